/* SPDX-License-Identifier: Apache-2.0 */

/* The row passes of the CUDA backend against their CPU twins: the same bits, for odd sizes, both types, modulated and not, fused and not,
 * weights at any byte, numbers near the ends of the range. Needs a CUDA device; without one every test skips, but for what the kernels'
 * arithmetic rests on. */

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <math.h>

#include "kernels/cpu/cpu.h"
#include "kernels/cuda/cuda.h"
#include "tests/gpu/backends.h"

static const uint64_t rows[] = { 1, 2, 7, 33, 407, 4099 }, widths[] = { 1, 8, 13, 96, 264, 528, 1024, 5376 };
#define NUMBERS_MAX UINT64_C(2500000) /* of an array: keeps the test short */
#define NUMBERS_PART UINT64_C(12000)
static float float_of(uint32_t u) {
        float f;

        memcpy(&f, &u, 4);
        return f;
}

static void put(void *p, LkType t, uint64_t i, uint32_t u) {
        if (t == LK_F32)
                memcpy((uint8_t *) p + i * 4, &u, 4);
        else
                memcpy((uint8_t *) p + i * 2, (uint8_t *) &u + 2, 2);
}

/* Numbers of all sizes, exponents -40 .. 20, now and then a zero. */
static void fill(void *p, LkType t, uint64_t n) {
        for (uint64_t i = 0; i < n; i++) {
                uint32_t u = (next() & 0x807fffffu) | (127u - 40u + next() % 60u) << 23;

                if (next() % 50 == 0)
                        u &= 0x80000000u;
                put(p, t, i, u);
        }
}

/* Bell-shaped, as activations are: no row is all small but for one number. */
static void fill_even(void *p, LkType t, uint64_t n, float size) {
        for (uint64_t i = 0; i < n; i++) {
                float f = 0;
                uint32_t u;

                for (int j = 0; j < 4; j++)
                        f += (float) (next() >> 8) * 0x1p-24f - 0.5f;
                f *= size;
                memcpy(&u, &f, 4);
                put(p, t, i, u);
        }
}

/* Some rows of bf16 get what no row should have: infinities, no numbers, the largest and the smallest numbers. (f32 has more than one
 * NaN, and which one comes out is not promised.) */
static void spoil(void *p, LkType t, uint64_t m, uint64_t n) {
        static const uint32_t odd[] = { 0x7f800000u, 0xff800000u, 0x7fc00000u, 0x7f7f0000u, 0xff7f0000u, 0x00010000u, 0x80400000u };

        for (uint64_t i = 1; t == LK_BF16 && i < m; i += 3) {
                uint64_t form = next() % 9;

                if (form == 7)
                        for (uint64_t j = 0; j < n; j++) /* near the smallest numbers */
                                put(p, t, i * n + j, (next() & 0x807fffffu) | (next() % 30) << 23);
                else if (form == 8)
                        for (uint64_t j = 0; j < n; j++) /* near the largest */
                                put(p, t, i * n + j, (next() & 0x807fffffu) | (225 + next() % 30) << 23);
                else
                        put(p, t, i * n + next() % n, odd[form]);
        }
}

/* The same bytes for both backends. */
typedef struct Pair {
        void *host, *device;
        uint64_t size;
} Pair;

static Pair pair_new(LkType t, uint64_t n) {
        Pair p = { .size = n * lk_type_size(t) + 16 };

        p.host = calloc(1, p.size);
        assert_non_null(p.host);
        fill(p.host, t, n);
        assert_int_equal(lk_cuda_ops()->memory_new(gpu, p.size, &p.device), 0);
        assert_int_equal(lk_cuda_ops()->upload(gpu, p.device, p.host, p.size), 0);
        return p;
}

static Pair pair_bytes(uint64_t size) {
        return pair_new(LK_BF16, size / 2 + 1);
}

static Pair pair_spoilt(LkType t, uint64_t m, uint64_t n, bool even) {
        Pair p = pair_new(t, m * n);

        if (even)
                fill_even(p.host, t, m * n, 4);
        spoil(p.host, t, m, n);
        assert_int_equal(lk_cuda_ops()->upload(gpu, p.device, p.host, p.size), 0);
        return p;
}

static void pair_sync(Pair *p) {
        assert_int_equal(lk_cuda_ops()->upload(gpu, p->device, p->host, p->size), 0);
}

static void assert_pair_same(Pair *p, const char *what, uint64_t m, uint64_t n) {
        uint8_t *got = malloc(p->size);

        assert_non_null(got);
        assert_int_equal(lk_cuda_ops()->download(gpu, got, p->device, p->size), 0);
        for (uint64_t i = 0; i < p->size; i++)
                if (got[i] != ((uint8_t *) p->host)[i])
                        fail_msg("%s, %llu x %llu: byte %llu differs", what, (unsigned long long) m, (unsigned long long) n,
                                (unsigned long long) i);
        free(got);
}

static void pair_free(Pair *p) {
        lk_cuda_ops()->memory_free(gpu, p->device);
        free(p->host);
}

static int32_t *index_of(uint64_t m, int32_t **ret_device) {
        int32_t *host = malloc(m * sizeof(*host));
        void *device;

        assert_non_null(host);
        for (uint64_t i = 0; i < m; i++)
                host[i] = (int32_t) (next() % 6);
        assert_int_equal(lk_cuda_ops()->memory_new(gpu, m * sizeof(*host), &device), 0);
        assert_int_equal(lk_cuda_ops()->upload(gpu, device, host, m * sizeof(*host)), 0);
        *ret_device = device;
        return host;
}

static void each(void (*f)(LkType t, uint64_t m, uint64_t n)) {
        need_device();
        for (LkType t = LK_F32; t <= LK_BF16; t++)
                for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++)
                        for (size_t j = 0; j < sizeof(widths) / sizeof(widths[0]); j++)
                                if (rows[i] * widths[j] <= (is_part() ? NUMBERS_PART : NUMBERS_MAX))
                                        f(t, rows[i], widths[j]);
}

/* The largest rotation that divides n, or a smaller one, or none. */
static uint32_t rotation_of(uint64_t n) {
        uint32_t r = 256;

        while (r > 1 && (n % r || next() % 3 == 0))
                r /= 4;
        return r == 1 ? 0 : r;
}

enum { MODULATED = 1, MODULATED_F32 = 2, ADDED = 4, GATED = 8, QUANTISED = 16, ONLY_QUANTISED = 32, ROUND_FIRST = 64, FORMS = 128 };

static bool form_exists(int form) {
        return !(form & MODULATED_F32 && !(form & MODULATED)) && !(form & GATED && !(form & ADDED)) &&
               !(form & ONLY_QUANTISED && !(form & QUANTISED)) && !(form & ROUND_FIRST && form & MODULATED);
}

static void norm_form(LkType t, uint64_t m, uint64_t n, int form) {
        LkType mt = form & MODULATED_F32 ? LK_F32 : t, wt = (LkType) (1 + next() % 3);
        unsigned shift = (unsigned) (next() % 4); /* bytes */
        Pair x = pair_spoilt(t, m, n, next() % 2), w = pair_new(LK_F32, n + 1), mod = pair_new(mt, 6 * 3 * n), y = pair_new(t, m * n);
        Pair source = pair_spoilt(t, m, n, true), gates = pair_new(t, 6 * n), q = pair_bytes(m * n), scales = pair_new(LK_F32, m);
        int32_t *device, *host = index_of(m, &device);
        LkResidual add = { .type = t, .m = m, .n = n, .x = x.host, .x_ld = n, .y = source.host, .y_ld = n };
        LkQuantise quantise = { .rotation = rotation_of(n), .q = q.host, .q_ld = n, .scale = scales.host };

        fill_even((uint8_t *) w.host + shift, wt == LK_F32 ? LK_F32 : LK_BF16, n, 2); /* as f16: other numbers */
        pair_sync(&w);
        LkNorm a = { .type = t, .m = m, .n = n, .x = x.host, .x_ld = n, .eps = 1e-5f, .y = form & ONLY_QUANTISED ? NULL : y.host, .y_ld = n,
                .weight = { (uint8_t *) w.host + shift, wt, n }, .round_first = form & ROUND_FIRST, .add = form & ADDED ? &add : NULL,
                .quantise = form & QUANTISED ? &quantise : NULL };

        if (form & MODULATED) {
                a.mod = mod.host;
                a.mod_type = mt;
                a.mod_ld = 3 * n;
                a.mod_index = host;
                a.shift_at = n;
                a.scale_at = 2 * n;
        }
        if (form & GATED) {
                add.mod = gates.host;
                add.mod_ld = n;
                add.mod_index = host;
        }
        assert_int_equal(lk_cpu_ops(LK_CPU_AUTO)->norm(cpu, &a), 0);
        a.x = add.x = x.device;
        a.y = a.y ? y.device : NULL;
        a.weight.data = (uint8_t *) w.device + shift;
        a.mod = a.mod ? mod.device : NULL;
        a.mod_index = add.mod_index = device;
        add.y = source.device;
        add.mod = add.mod ? gates.device : NULL;
        quantise.q = q.device;
        quantise.scale = scales.device;
        assert_int_equal(lk_cuda_ops()->norm(gpu, &a), 0);
        assert_pair_same(&y, "norm", m, n);
        assert_pair_same(&x, "residual before the norm", m, n);
        assert_pair_same(&scales, "scales behind the norm", m, n);
        assert_pair_same(&q, "int8 rows behind the norm", m, n);
        lk_cuda_ops()->memory_free(gpu, device);
        free(host);
        pair_free(&x);
        pair_free(&w);
        pair_free(&mod);
        pair_free(&y);
        pair_free(&source);
        pair_free(&gates);
        pair_free(&q);
        pair_free(&scales);
}

/* All forms of small rows, a few of large ones. */
static void norm_one(LkType t, uint64_t m, uint64_t n) {
        int step = m * n < 20000 ? 1 : m * n < 500000 ? 7 : 29, left = 0;

        for (int form = 0; form < FORMS; form++)
                if (form_exists(form) && left-- == 0) {
                        norm_form(t, m, n, form);
                        left = step - 1;
                }
}

static void quantise_one(LkType t, uint64_t m, uint64_t n) {
        for (int gated = 0; gated < 2; gated++) {
                Pair x = pair_spoilt(t, m, n, true), up = pair_spoilt(t, m, n, next() % 2), q = pair_bytes(m * n),
                     scales = pair_new(LK_F32, m);
                LkQuantise a = { .x_type = t, .m = m, .k = n, .x = x.host, .x_ld = n, .up = gated ? up.host : NULL, .up_ld = n,
                        .rotation = rotation_of(n), .q = q.host, .q_ld = n, .scale = scales.host };

                assert_int_equal(lk_cpu_ops(LK_CPU_AUTO)->quantise(cpu, &a), 0);
                a.x = x.device;
                a.up = gated ? up.device : NULL;
                a.q = q.device;
                a.scale = scales.device;
                assert_int_equal(lk_cuda_ops()->quantise(gpu, &a), 0);
                assert_pair_same(&scales, gated ? "gated scales" : "scales", m, n);
                assert_pair_same(&q, gated ? "gated int8 rows" : "int8 rows", m, n);
                pair_free(&x);
                pair_free(&up);
                pair_free(&q);
                pair_free(&scales);
        }
}

static void residual_one(LkType t, uint64_t m, uint64_t n) {
        for (int gated = 0; gated < 2; gated++) {
                Pair x = pair_spoilt(t, m, n, false), y = pair_spoilt(t, m, n, true), mod = pair_new(t, 6 * n);
                int32_t *device, *host = index_of(m, &device);
                LkResidual a = { .type = t, .m = m, .n = n, .x = x.host, .x_ld = n, .y = y.host, .y_ld = n };

                if (gated) {
                        a.mod = mod.host;
                        a.mod_ld = n;
                        a.mod_index = host;
                }
                pair_sync(&x);
                assert_int_equal(lk_cpu_ops(LK_CPU_AUTO)->residual(cpu, &a), 0);
                a.x = x.device;
                a.y = y.device;
                a.mod = a.mod ? mod.device : NULL;
                a.mod_index = device;
                assert_int_equal(lk_cuda_ops()->residual(gpu, &a), 0);
                assert_pair_same(&x, "residual", m, n);
                lk_cuda_ops()->memory_free(gpu, device);
                free(host);
                pair_free(&x);
                pair_free(&y);
                pair_free(&mod);
        }
}

static void swiglu_one(LkType t, uint64_t m, uint64_t n) {
        Pair g = pair_spoilt(t, m, n, next() % 2), u = pair_spoilt(t, m, n, true), y = pair_new(t, m * n);
        LkSwiglu a = { .type = t, .m = m, .n = n, .gate = g.host, .gate_ld = n, .up = u.host, .up_ld = n, .y = y.host, .y_ld = n };

        assert_int_equal(lk_cpu_ops(LK_CPU_AUTO)->swiglu(cpu, &a), 0);
        a.gate = g.device;
        a.up = u.device;
        a.y = y.device;
        assert_int_equal(lk_cuda_ops()->swiglu(gpu, &a), 0);
        assert_pair_same(&y, "swiglu", m, n);
        pair_free(&g);
        pair_free(&u);
        pair_free(&y);
}

static void convert_one(LkType t, uint64_t m, uint64_t n) {
        LkType to = t == LK_F32 ? LK_BF16 : LK_F32;
        Pair x = pair_new(t, m * n), y = pair_new(to, m * n);
        LkConvert a = { .m = m, .n = n, .x = x.host, .x_type = t, .x_ld = n, .y = y.host, .y_type = to, .y_ld = n };

        assert_int_equal(lk_cpu_ops(LK_CPU_AUTO)->convert(cpu, &a), 0);
        a.x = x.device;
        a.y = y.device;
        assert_int_equal(lk_cuda_ops()->convert(gpu, &a), 0);
        assert_pair_same(&y, "convert", m, n);
        pair_free(&x);
        pair_free(&y);
}

static void layer_norm_one(LkType t, uint64_t m, uint64_t n) {
        unsigned shift = (unsigned) (next() % 4);
        Pair x = pair_spoilt(t, m, n, true), w = pair_new(LK_F32, n + 1), b = pair_new(LK_F32, n), y = pair_new(t, m * n);
        fill_even((uint8_t *) w.host + shift, LK_BF16, n, 2); /* as f16: other numbers, but numbers */
        pair_sync(&w);
        fill(b.host, LK_BF16, n); /* f32 cut in two would be none here and there */
        pair_sync(&b);
        LkLayerNorm a = { .type = t, .m = m, .n = n, .x = x.host, .x_ld = n, .eps = 1e-5f, .y = y.host, .y_ld = n,
                .weight = { (uint8_t *) w.host + shift, LK_F16, n }, .bias = { b.host, LK_BF16, n } };

        assert_int_equal(lk_cpu_ops(LK_CPU_AUTO)->layer_norm(cpu, &a), 0);
        a.x = x.device;
        a.y = y.device;
        a.weight.data = (uint8_t *) w.device + shift;
        a.bias.data = b.device;
        assert_int_equal(lk_cuda_ops()->layer_norm(gpu, &a), 0);
        assert_pair_same(&y, "layer_norm", m, n);
        pair_free(&x);
        pair_free(&w);
        pair_free(&b);
        pair_free(&y);
}

static void activate_one(LkType t, uint64_t m, uint64_t n) {
        for (LkFunction f = LK_SILU; f < _LK_FUNCTION_MAX; f++) {
                Pair x = pair_spoilt(t, m, n, next() % 2), y = pair_new(t, m * n);
                LkActivate a = { .type = t, .function = f, .m = m, .n = n, .x = x.host, .x_ld = n, .y = y.host, .y_ld = n };

                assert_int_equal(lk_cpu_ops(LK_CPU_AUTO)->activate(cpu, &a), 0);
                a.x = x.device;
                a.y = y.device;
                assert_int_equal(lk_cuda_ops()->activate(gpu, &a), 0);
                assert_pair_same(&y, "activate", m, n);
                pair_free(&x);
                pair_free(&y);
        }
}

static void qk_one(LkType t, uint64_t m, uint64_t n) {
        static const uint32_t shapes[][2] = { { 8, 3 }, { 12, 6 }, { 64, 24 }, { 72, 36 }, { 128, 48 }, { 128, 64 }, { 256, 96 } };

        for (unsigned i = 0; i < 2 * sizeof(shapes) / sizeof(shapes[0]); i++) {
                uint32_t head_dim = shapes[i / 2][0], pairs = shapes[i / 2][1], heads = (uint32_t) (n % 9 + 1), rope = i % 2;

                if (m * heads * head_dim > NUMBERS_MAX / 2)
                        continue;

                Pair x = pair_spoilt(t, m * heads, head_dim, next() % 2), w = pair_new(LK_F32, head_dim);
                Pair c = pair_new(LK_F32, m * pairs), s = pair_new(LK_F32, m * pairs);
                LkQkNormRope a = { .type = t, .m = m, .heads = heads, .head_dim = head_dim, .x = x.host,
                        .x_ld = (uint64_t) heads * head_dim, .weight = { w.host, LK_F32, head_dim }, .eps = 1e-5f, .rope_dims = pairs };

                if (rope) {
                        a.cos = c.host;
                        a.sin = s.host;
                }
                pair_sync(&x);
                assert_int_equal(lk_cpu_ops(LK_CPU_AUTO)->qk_norm_rope(cpu, &a), 0);
                a.x = x.device;
                a.weight.data = w.device;
                a.cos = rope ? c.device : NULL;
                a.sin = rope ? s.device : NULL;
                assert_int_equal(lk_cuda_ops()->qk_norm_rope(gpu, &a), 0);
                assert_pair_same(&x, "qk_norm_rope", m, n);
                pair_free(&x);
                pair_free(&w);
                pair_free(&c);
                pair_free(&s);
        }
}

/* silu of every bf16 number: its f32 bits show in the scale of a row of nothing else. */
static void silu_of_every_number_same_bits_as_cpu(void **state) {
        const uint64_t m = 65536, n = 16;

        need_device();

        Pair g = pair_new(LK_BF16, m * n), u = pair_new(LK_BF16, m * n), q = pair_bytes(m * n),
             scales = pair_new(LK_F32, m), y = pair_new(LK_BF16, m * n);
        LkQuantise a = {.x_type = LK_BF16,
                .m = m,
                .k = n,
                .x = g.host,
                .x_ld = n,
                .up = u.host,
                .up_ld = n,
                .q = q.host,
                .q_ld = n,
                .scale = scales.host};
        LkSwiglu b = { .type = LK_BF16, .m = m, .n = n, .gate = g.host, .gate_ld = n, .up = u.host, .up_ld = n, .y = y.host, .y_ld = n };

        for (uint64_t i = 0; i < m * n; i++) {
                put(g.host, LK_BF16, i, (uint32_t) (i / n) << 16);
                put(u.host, LK_BF16, i, 0x3f800000u);
        }
        pair_sync(&g);
        pair_sync(&u);
        assert_int_equal(lk_cpu_ops(LK_CPU_AUTO)->quantise(cpu, &a), 0);
        assert_int_equal(lk_cpu_ops(LK_CPU_AUTO)->swiglu(cpu, &b), 0);
        a.x = b.gate = g.device;
        a.up = b.up = u.device;
        a.q = q.device;
        a.scale = scales.device;
        b.y = y.device;
        assert_int_equal(lk_cuda_ops()->quantise(gpu, &a), 0);
        assert_int_equal(lk_cuda_ops()->swiglu(gpu, &b), 0);
        assert_pair_same(&scales, "silu", m, n);
        assert_pair_same(&q, "int8 of silu", m, n);
        assert_pair_same(&y, "swiglu", m, n);
        pair_free(&g);
        pair_free(&u);
        pair_free(&q);
        pair_free(&scales);
        pair_free(&y);
}

/* silu of every number of bf16 by the CPU backend. */
static void silu_all(LkType t, void *y) {
        float g[65536], one[65536];
        uint16_t h[65536], one_h[65536];
        LkSwiglu a = { .type = t, .m = 1, .n = 65536, .gate = t == LK_F32 ? (void *) g : h, .gate_ld = 65536,
                .up = t == LK_F32 ? (void *) one : one_h, .up_ld = 65536, .y = y, .y_ld = 65536 };

        for (uint32_t i = 0; i < 65536; i++) {
                h[i] = (uint16_t) i;
                one_h[i] = 0x3f80;
                one[i] = 1;
                g[i] = float_of(i << 16);
        }
        assert_int_equal(lk_cpu_ops(LK_CPU_AUTO)->swiglu(cpu, &a), 0);
}

/* silu_near of rows.cuh, with its constants: no error that PTX allows of ex2 (2^-22) and of rcp (2^-23) takes any number across a tie. */
static void silu_near_has_room_for_errors(void **state) {
        const double slope = 0x1.715474p+0, smaller = 0x1.6p-21;
        uint16_t y[65536];

        silu_all(LK_BF16, y);
        for (uint32_t i = 0; i < 65536; i++) {
                const double g = float_of(i << 16), e = exp2(-g * slope), s = fabs(g) * (1 - copysign(smaller, g)) / (1 + e);
                const uint32_t got = y[i] & 0x7fffu;
                /* that of g * slope, of ex2, as far as they reach the sum; of the sum, rcp, the smaller g, the product */
                const double error = e / (1 + e) * (fabs(g) * 0x1p-24 + 0x1p-22) + 0x1p-24 + 0x1p-23 + 0x1p-24 + 0x1p-24;
                double low, high;

                if (got < 0x400 || got >= 0x7f80)
                        continue;
                low = ((double) float_of((got - 1) << 16) + float_of(got << 16)) / 2;
                high = ((double) float_of(got << 16) + float_of((got + 1) << 16)) / 2;
                if (!(s * (1 - error) > low && s * (1 + error) < high))
                        fail_msg("silu of %a: %a is too near a tie", g, s);
        }
}

/* A number to the nearest one of bf16, ties to even; far from the ends of the range. */
static double bf16_of(double x) {
        int e;
        const double f = frexp(x, &e);

        return ldexp(nearbyint(ldexp(f, 8)), e - 8);
}

/* What quantise-rows.cuh has instead of a division, for every fraction of both numbers. */
static void quotient_of_every_pair_is_the_nearest(void **state) {
        for (int s = 128; s < 256; s++) {
                const double f = (float) (1.0 / s), most = bf16_of(f), rest = f == most ? 0 : bf16_of(f - most);

                for (int v = 128; v < 256; v++) {
                        const double got = bf16_of(v * most + (rest == 0 ? 0 : bf16_of(v * rest)));

                        if (got != bf16_of((double) v / s))
                                fail_msg("%d / %d: %a", v, s, got);
                }
        }
}

/* Widths of the denoiser, so many rows that every block has several: what it keeps from one to the next is tried. */
static void many_rows_same_bits_as_cpu(void **state) {
        static const int forms[] = { 0, ADDED, MODULATED | ADDED | GATED, QUANTISED | MODULATED, ADDED | QUANTISED | ONLY_QUANTISED,
                MODULATED | ADDED | GATED | QUANTISED | ONLY_QUANTISED };

        need_device();
        for (size_t i = 0; i < sizeof(forms) / sizeof(forms[0]); i++)
                norm_form(LK_BF16, i % 2 ? 2500 : 1601, 5376, forms[i]);
        quantise_one(LK_BF16, 1203, 14336);
        quantise_one(LK_BF16, 1701, 7168);
        swiglu_one(LK_BF16, 61, 14336);
}

/* Rows that are further apart than they are wide, by one backend. p: what is read, then what is written, on its side. */
enum { X, UP, WEIGHT, COSINES, SINES, HEADS, Y, NORMED, Q, SCALES, Q_NORMED, SCALES_NORMED, ARRAYS };

static void strides_run(const LkOps *ops, LkContext *c, void *const *p, LkType t, uint64_t m, uint64_t n, uint64_t extra,
        uint32_t rotation) {
        const uint64_t ld = n + extra, far = 3 * n + extra;
        const LkQuantise quantise = { .x_type = t, .m = m, .k = n, .x = p[X], .x_ld = far, .up = p[UP], .up_ld = ld, .rotation = rotation,
                .q = p[Q], .q_ld = ld, .scale = p[SCALES] };
        const LkQuantise normed = { .rotation = rotation, .q = p[Q_NORMED], .q_ld = far, .scale = p[SCALES_NORMED] };
        const LkSwiglu swiglu = { .type = t, .m = m, .n = n, .gate = p[X], .gate_ld = far, .up = p[UP], .up_ld = ld,
                .y = p[Y], .y_ld = ld };
        const LkResidual add = { .type = t, .m = m, .n = n, .x = p[X], .x_ld = far, .y = p[UP], .y_ld = ld };
        const LkNorm norm = { .type = t, .m = m, .n = n, .x = p[X], .x_ld = far, .eps = 1e-5f, .y = p[NORMED], .y_ld = ld,
                .weight = { p[WEIGHT], LK_F32, n }, .add = &add, .quantise = &normed };
        const LkQkNormRope qk = { .type = t, .m = m, .heads = 2, .head_dim = 128, .x = p[HEADS], .x_ld = 256 + extra,
                .weight = { p[WEIGHT], LK_F32, 128 }, .eps = 1e-5f, .cos = p[COSINES], .sin = p[SINES], .rope_dims = 48 };

        assert_int_equal(ops->swiglu(c, &swiglu), 0);
        assert_int_equal(ops->quantise(c, &quantise), 0);
        assert_int_equal(ops->norm(c, &norm), 0);
        assert_int_equal(ops->qk_norm_rope(c, &qk), 0);
}

/* extra: numbers between rows; whole pieces or not. What lies there stays as it is. */
static void strides_form(LkType t, uint64_t m, uint64_t n, uint64_t extra) {
        const uint64_t ld = n + extra, far = 3 * n + extra;
        const uint32_t rotation = rotation_of(n);
        Pair a[ARRAYS] = { [X] = pair_spoilt(t, m, far, true),
                [UP] = pair_spoilt(t, m, ld, true),
                [WEIGHT] = pair_new(LK_F32, n > 128 ? n : 128),
                [COSINES] = pair_new(LK_F32, m * 48),
                [SINES] = pair_new(LK_F32, m * 48),
                [HEADS] = pair_spoilt(t, m, 256 + extra, true),
                [Y] = pair_new(t, m * ld),
                [NORMED] = pair_new(t, m * ld),
                [Q] = pair_bytes(m * ld),
                [SCALES] = pair_new(LK_F32, m),
                [Q_NORMED] = pair_bytes(m * far),
                [SCALES_NORMED] = pair_new(LK_F32, m) };
        void *host[ARRAYS], *device[ARRAYS];

        for (int i = 0; i < ARRAYS; i++) {
                host[i] = a[i].host;
                device[i] = a[i].device;
        }
        strides_run(lk_cpu_ops(LK_CPU_AUTO), cpu, host, t, m, n, extra, rotation);
        strides_run(lk_cuda_ops(), gpu, device, t, m, n, extra, rotation);
        for (int i = 0; i < ARRAYS; i++) {
                static const char *const what[ARRAYS] = { [X] = "x", [HEADS] = "heads", [Y] = "swiglu", [NORMED] = "norm",
                        [Q] = "int8 rows", [SCALES] = "scales",
                        [Q_NORMED] = "int8 rows behind the norm", [SCALES_NORMED] = "scales behind the norm" };

                assert_pair_same(&a[i], what[i] ? what[i] : "what is only read", m, n);
                pair_free(&a[i]);
        }
}

static void strides_same_bits_as_cpu(void **state) {
        need_device();
        for (LkType t = LK_F32; t <= LK_BF16; t++)
                for (uint64_t extra = 1; extra <= 64; extra *= 4)
                        for (size_t i = 0; i < sizeof(widths) / sizeof(widths[0]); i++)
                                strides_form(t, 37, widths[i], i % 2 ? extra : 16 * extra);
}

/* A row gives the same wherever it stands and however many stand beside it: rows 0 and m - 1 of each launch are the same ones, numbers
 * that are none, that are too small or too large for the fast ways among them. */
static void row_position_same_bits(void **state) {
        const uint64_t m = 1601, n = 5376;

        need_device();
        for (int odd = 0; odd < 3; odd++) {
                Pair x = pair_new(LK_BF16, m * n), up = pair_new(LK_BF16, m * n), w = pair_new(LK_F32, n), q = pair_bytes(2 * m * n),
                     scales = pair_new(LK_F32, 2 * m);
                uint8_t *got, *s, alone[5376];

                fill_even(x.host, LK_BF16, m * n, odd == 1 ? 0x1p+30f : 4);
                if (odd == 2)
                        put(x.host, LK_BF16, 4711, 0x7fc00000u);
                for (uint64_t i = 1; i < m; i++) {
                        if (i % 5 != 1 && i != m - 1)
                                continue;
                        memcpy((uint8_t *) x.host + i * n * 2, x.host, n * 2);
                        memcpy((uint8_t *) up.host + i * n * 2, up.host, n * 2);
                }
                pair_sync(&x);
                pair_sync(&up);

                LkQuantise gated = { .x_type = LK_BF16, .m = m, .k = n, .x = x.device, .x_ld = n, .up = up.device, .up_ld = n,
                        .rotation = 256, .q = q.device, .q_ld = n, .scale = scales.device };
                LkQuantise normed = { .rotation = 256, .q = (int8_t *) q.device + m * n, .q_ld = n, .scale = (float *) scales.device + m };
                LkResidual add = { .type = LK_BF16, .m = m, .n = n, .x = x.device, .x_ld = n, .y = up.device, .y_ld = n };
                LkNorm norm = { .type = LK_BF16, .m = m, .n = n, .x = x.device, .x_ld = n, .weight = { w.device, LK_F32, n }, .eps = 1e-5f,
                        .add = &add, .quantise = &normed };

                assert_int_equal(lk_cuda_ops()->quantise(gpu, &gated), 0);
                assert_int_equal(lk_cuda_ops()->norm(gpu, &norm), 0);
                got = malloc(q.size);
                s = malloc(scales.size);
                assert_non_null(got);
                assert_non_null(s);
                assert_int_equal(lk_cuda_ops()->download(gpu, got, q.device, q.size), 0);
                assert_int_equal(lk_cuda_ops()->download(gpu, s, scales.device, scales.size), 0);
                for (uint64_t i = 1; i < m; i++) {
                        if (i % 5 != 1 && i != m - 1)
                                continue;
                        for (int part = 0; part < 2; part++) {
                                assert_memory_equal(got + (part * m + i) * n, got + part * m * n, n);
                                assert_memory_equal(s + (part * m + i) * 4, s + part * m * 4, 4);
                        }
                }

                gated.m = norm.m = add.m = 1;
                pair_sync(&x);
                assert_int_equal(lk_cuda_ops()->quantise(gpu, &gated), 0);
                assert_int_equal(lk_cuda_ops()->norm(gpu, &norm), 0);
                for (int part = 0; part < 2; part++) {
                        assert_int_equal(lk_cuda_ops()->download(gpu, alone, (int8_t *) q.device + part * m * n, n), 0);
                        assert_memory_equal(alone, got + part * m * n, n);
                }
                free(got);
                free(s);
                pair_free(&x);
                pair_free(&up);
                pair_free(&w);
                pair_free(&q);
                pair_free(&scales);
        }
}

static void quantise_same_bits_as_cpu(void **state) {
        each(quantise_one);
}

static void layer_norm_same_bits_as_cpu(void **state) {
        each(layer_norm_one);
}

static void activate_same_bits_as_cpu(void **state) {
        each(activate_one);
}

static void norm_same_bits_as_cpu(void **state) {
        each(norm_one);
}

static void residual_same_bits_as_cpu(void **state) {
        each(residual_one);
        residual_one(LK_F32, 1, 300007); /* cut over blocks */
        residual_one(LK_BF16, 3, 70001);
}

static void swiglu_same_bits_as_cpu(void **state) {
        each(swiglu_one);
}

static void convert_same_bits_as_cpu(void **state) {
        each(convert_one);
}

static void qk_norm_rope_same_bits_as_cpu(void **state) {
        each(qk_one);
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(norm_same_bits_as_cpu),
                cmocka_unit_test(residual_same_bits_as_cpu),
                cmocka_unit_test(swiglu_same_bits_as_cpu),
                cmocka_unit_test(convert_same_bits_as_cpu),
                cmocka_unit_test(qk_norm_rope_same_bits_as_cpu),
                cmocka_unit_test(quantise_same_bits_as_cpu),
                cmocka_unit_test(silu_near_has_room_for_errors),
                cmocka_unit_test(quotient_of_every_pair_is_the_nearest),
                cmocka_unit_test(many_rows_same_bits_as_cpu),
                cmocka_unit_test(strides_same_bits_as_cpu),
                cmocka_unit_test(row_position_same_bits),
                cmocka_unit_test(silu_of_every_number_same_bits_as_cpu),
                cmocka_unit_test(layer_norm_same_bits_as_cpu),
                cmocka_unit_test(activate_same_bits_as_cpu),
        };

        return cmocka_run_group_tests(tests, backends_setup, backends_teardown);
}
