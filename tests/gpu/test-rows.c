/* SPDX-License-Identifier: Apache-2.0 */

/* The row passes of the CUDA backend against their CPU twins: the same bits, for odd sizes, both types, modulated and not, weights at
 * any byte. Needs a CUDA device; without one every test skips. */

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "kernels/cpu/cpu.h"
#include "kernels/cuda/cuda.h"

static const uint64_t rows[] = { 1, 2, 7, 33, 407, 4099 }, widths[] = { 1, 8, 13, 96, 1024, 5376 };
static LkContext *gpu, *cpu;
static uint64_t seed = 42;

static uint32_t next(void) {
        seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        return (uint32_t) (seed >> 32);
}

/* Numbers of all sizes, exponents -40 .. 20, now and then a zero or a large one. */
static void fill(void *p, LkType t, uint64_t n) {
        for (uint64_t i = 0; i < n; i++) {
                uint32_t u = (next() & 0x807fffffu) | (127u - 40u + next() % 60u) << 23;

                if (next() % 50 == 0)
                        u = 0;
                if (t == LK_F32)
                        memcpy((uint8_t *) p + i * 4, &u, 4);
                else
                        memcpy((uint8_t *) p + i * 2, (uint8_t *) &u + 2, 2);
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
        if (!gpu)
                skip();
        for (LkType t = LK_F32; t <= LK_BF16; t++)
                for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++)
                        for (size_t j = 0; j < sizeof(widths) / sizeof(widths[0]); j++)
                                f(t, rows[i], widths[j]);
}

static void norm_one(LkType t, uint64_t m, uint64_t n) {
        for (int form = 0; form < 4; form++) { /* bit 0: modulated, bit 1: modulation in f32 */
                LkType mt = form & 2 ? LK_F32 : t;
                unsigned shift = (unsigned) (next() % 4); /* bytes */
                Pair x = pair_new(t, m * n), w = pair_new(LK_F32, n), mod = pair_new(mt, 6 * 3 * n), y = pair_new(t, m * n);
                int32_t *device, *host = index_of(m, &device);

                fill((uint8_t *) w.host + shift, LK_BF16, n);
                pair_sync(&w);
                LkNorm a = { .type = t, .m = m, .n = n, .x = x.host, .x_ld = n, .eps = 1e-5f, .y = y.host, .y_ld = n,
                        .weight = { (uint8_t *) w.host + shift, LK_BF16, n } };

                if (form & 1) {
                        a.mod = mod.host;
                        a.mod_type = mt;
                        a.mod_ld = 3 * n;
                        a.mod_index = host;
                        a.shift_at = n;
                        a.scale_at = 2 * n;
                }
                assert_int_equal(lk_cpu_ops(LK_CPU_AUTO)->norm(cpu, &a), 0);
                a.x = x.device;
                a.y = y.device;
                a.weight.data = (uint8_t *) w.device + shift;
                a.mod = a.mod ? mod.device : NULL;
                a.mod_index = device;
                assert_int_equal(lk_cuda_ops()->norm(gpu, &a), 0);
                assert_pair_same(&y, "norm", m, n);
                lk_cuda_ops()->memory_free(gpu, device);
                free(host);
                pair_free(&x);
                pair_free(&w);
                pair_free(&mod);
                pair_free(&y);
        }
}

static void residual_one(LkType t, uint64_t m, uint64_t n) {
        for (int gated = 0; gated < 2; gated++) {
                Pair x = pair_new(t, m * n), y = pair_new(t, m * n), mod = pair_new(t, 6 * n);
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
        Pair g = pair_new(t, m * n), u = pair_new(t, m * n), y = pair_new(t, m * n);
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

static void qk_one(LkType t, uint64_t m, uint64_t n) {
        const uint32_t dims[] = { 8, 64, 72, 128 };
        uint32_t head_dim = dims[n % 4], heads = (uint32_t) (n % 9 + 1), pairs = head_dim * 3 / 8;

        for (int rope = 0; rope < 2; rope++) {
                Pair x = pair_new(t, m * heads * head_dim), w = pair_new(LK_F32, head_dim);
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

static void norm_same_bits_as_cpu(void **state) {
        each(norm_one);
}

static void residual_same_bits_as_cpu(void **state) {
        each(residual_one);
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

static int setup(void **state) {
        int r = lk_cuda_ops()->context_new(0, &gpu);

        if (r < 0) {
                gpu = NULL;
                print_message("# no CUDA device: %s\n", strerror(-r));
        }
        return lk_cpu_ops(LK_CPU_AUTO)->context_new(0, &cpu);
}

static int teardown(void **state) {
        lk_cuda_ops()->context_free(gpu);
        lk_cpu_ops(LK_CPU_AUTO)->context_free(cpu);
        return 0;
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(norm_same_bits_as_cpu),
                cmocka_unit_test(residual_same_bits_as_cpu),
                cmocka_unit_test(swiglu_same_bits_as_cpu),
                cmocka_unit_test(convert_same_bits_as_cpu),
                cmocka_unit_test(qk_norm_rope_same_bits_as_cpu),
        };

        return cmocka_run_group_tests(tests, setup, teardown);
}
