/* SPDX-License-Identifier: Apache-2.0 */

/* f16 on the CUDA backend: row passes, plain attention and pixels have the CPU's bits; products and attention by the multiply
 * instructions come as close to it as another order of the sums allows, and their parts have the bits of the whole. Needs a CUDA
 * device; without one every test skips. */

#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "kernels/cpu/number.h"
#include "service/shared/cleanup.h"
#include "tests/gpu/pair.h"

/* Relative distance of two ways that differ by roundings of single numbers: 2^-12 each, and of probabilities. */
#define PRODUCT_LIMIT 4e-4
#define ATTENTION_LIMIT 1e-3

/* -1 .. 1 */
static float small(void) {
        return (float) (int32_t) next() * 0x1p-31f;
}

static void put(uint8_t *p, LkType t, uint64_t i, float f) {
        uint16_t h = t == LK_F16 ? f16_from_f32(f) : bf16_from_f32(f);

        if (t == LK_F32)
                memcpy(p + 4 * i, &f, 4);
        else
                memcpy(p + 2 * i, &h, 2);
}

static void fill(Pair *p, LkType t, uint64_t offset, uint64_t n, float size) {
        for (uint64_t i = 0; i < n; i++)
                put(p->host + offset, t, i, size * small());
        pair_sync(p);
}

static Pair filled(LkType t, uint64_t n, float size) {
        Pair p = pair_new(n * lk_type_size(t));

        fill(&p, t, 0, n, size);
        return p;
}

/* Now and then what no row should have. */
static void spoil(Pair *p, uint64_t n) {
        static const uint16_t odd[] = {0x7c00, 0xfc00, 0x7e00, 0x7bff, 0x0001, 0x83ff};

        for (uint64_t i = 0; i < n; i += 1 + next() % 997)
                memcpy(p->host + 2 * i, odd + next() % ELEMENTSOF(odd), 2);
        pair_sync(p);
}

static double distance(const uint8_t *a, const uint8_t *b, uint64_t n) {
        double difference = 0, length = 0;

        for (uint64_t i = 0; i < n; i++) {
                double x = (double) number_get(a, LK_F16, i), y = (double) number_get(b, LK_F16, i);

                difference += (x - y) * (x - y);
                length += y * y;
        }
        return sqrt(difference / length);
}

static int32_t *indices(Pair *p, uint64_t m) {
        *p = pair_new(m * sizeof(int32_t));
        for (uint64_t i = 0; i < m; i++) {
                int32_t v = (int32_t) (next() % 6);

                memcpy(p->host + i * sizeof(v), &v, sizeof(v));
        }
        pair_sync(p);
        return (int32_t *) (void *) p->host;
}

/* ---- rows ---- */

typedef struct Rows {
        Pair x, y, w, gate, index;
        uint64_t m, n, x_ld, y_ld;
} Rows;

static Rows rows_new(uint64_t m, uint64_t n, uint64_t more) {
        Rows r = {.m = m, .n = n, .x_ld = n + more, .y_ld = n + 3 * more};

        r.x = filled(LK_F32, m * r.x_ld, 8);
        r.y = filled(LK_F16, m * r.y_ld, 4);
        r.w = filled(LK_F32, n + 1, 2);
        r.gate = filled(LK_F32, 6 * n, 1);
        (void) indices(&r.index, m);
        return r;
}

static void rows_free(Rows *r) {
        pair_free(&r->x);
        pair_free(&r->y);
        pair_free(&r->w);
        pair_free(&r->gate);
        pair_free(&r->index);
}

static LkResidual residual_of(const Rows *r, bool gated, bool device) {
        return (LkResidual){.type = LK_F32, .m = r->m, .n = r->n, .x = device ? r->x.device : r->x.host, .x_ld = r->x_ld,
                .y = device ? r->y.device : r->y.host, .y_type = LK_F16, .y_ld = r->y_ld,
                .mod = !gated ? NULL : device ? r->gate.device : r->gate.host, .mod_ld = r->n,
                .mod_index = (const int32_t *) (const void *) (device ? r->index.device : r->index.host)};
}

/* y in the place of what is added, as the decoder has it; or alone. */
static void norm_one(Rows *r, LkType weight_type, unsigned shift, int form) {
        LkResidual add = residual_of(r, form & 2, false);
        LkNorm a = {.type = LK_F32, .m = r->m, .n = r->n, .x = r->x.host, .x_ld = r->x_ld, .eps = 1e-5f, .y = r->y.host, .y_type = LK_F16,
                .y_ld = r->y_ld, .add = form & 1 ? &add : NULL, .weight = {r->w.host + shift, weight_type, r->n}};

        fill(&r->w, weight_type, shift, r->n, 2);
        assert_int_equal(lk_cpu_ops(LK_CPU_AUTO)->norm(cpu, &a), 0);
        add = residual_of(r, form & 2, true);
        a.x = r->x.device;
        a.y = r->y.device;
        a.weight.data = r->w.device + shift;
        assert_int_equal(lk_cuda_ops()->norm(gpu, &a), 0);
        assert_pair_same(&r->x, "stream");
        assert_pair_same(&r->y, "norm");
}

static void norm_same_bits_as_cpu(void **state) {
        static const uint64_t sizes[][3] = {{1, 8, 0}, {7, 13, 1}, {33, 264, 0}, {33, 264, 3}, {407, 96, 8}, {1797, 2048, 0},
                {4099, 136, 8}, {6, 4096, 8}, {6, 4104, 0}};

        need_device();
        for (size_t i = 0; i < ELEMENTSOF(sizes); i++)
                for (int form = 0; form < 4; form++)
                        for (unsigned t = 0; t < 5; t++) {
                                static const LkType types[] = {LK_F32, LK_BF16, LK_F16, LK_BF16, LK_F16};
                                Rows r = rows_new(sizes[i][0], sizes[i][1], sizes[i][2]);

                                norm_one(&r, types[t], t < 3 ? 0 : 1, form);
                                rows_free(&r);
                        }
}

static void residual_same_bits_as_cpu(void **state) {
        static const uint64_t sizes[][3] = {{1, 8, 0}, {7, 13, 1}, {33, 264, 8}, {407, 96, 8}, {1797, 2048, 0}};

        need_device();
        for (size_t i = 0; i < 2 * ELEMENTSOF(sizes); i++) {
                Rows r = rows_new(sizes[i / 2][0], sizes[i / 2][1], sizes[i / 2][2]);
                LkResidual a = residual_of(&r, i % 2, false);

                assert_int_equal(lk_cpu_ops(LK_CPU_AUTO)->residual(cpu, &a), 0);
                a = residual_of(&r, i % 2, true);
                assert_int_equal(lk_cuda_ops()->residual(gpu, &a), 0);
                assert_pair_same(&r.x, "residual");
                rows_free(&r);
        }
}

static void swiglu_one(uint64_t m, uint64_t n, uint64_t more, bool every) {
        uint64_t ld = n + more;
        Pair gate = filled(LK_F16, m * ld, 30), up = filled(LK_F16, m * ld, 3), y = pair_new(m * ld * 2);
        LkSwiglu a = {.type = LK_F16, .m = m, .n = n, .gate = gate.host, .up = up.host, .y = y.host, .gate_ld = ld, .up_ld = ld,
                .y_ld = ld};

        spoil(&up, m * ld);
        for (uint64_t i = 0; every && i < m * n; i++)
                memcpy(gate.host + 2 * i, &(uint16_t){(uint16_t) i}, 2);
        pair_sync(&gate);
        assert_int_equal(lk_cpu_ops(LK_CPU_AUTO)->swiglu(cpu, &a), 0);
        a.gate = gate.device;
        a.up = up.device;
        a.y = y.device;
        assert_int_equal(lk_cuda_ops()->swiglu(gpu, &a), 0);
        assert_pair_same(&y, "swiglu");
        pair_free(&gate);
        pair_free(&up);
        pair_free(&y);
}

static void swiglu_same_bits_as_cpu(void **state) {
        need_device();
        swiglu_one(256, 256, 0, true);
        swiglu_one(1, 8, 0, false);
        swiglu_one(33, 131, 0, false);
        swiglu_one(407, 264, 3, false);
        swiglu_one(300, 8192, 0, false);
}

static void qk_one(uint64_t m, uint32_t heads, uint32_t head_dim, uint32_t pairs, uint64_t period, uint64_t more) {
        uint64_t ld = (uint64_t) heads * head_dim + more, turns = period > 0 ? period : m;
        Pair x = filled(LK_F16, m * ld, 3), w = filled(LK_F32, head_dim, 1), c = filled(LK_F32, turns * pairs, 1),
             s = filled(LK_F32, turns * pairs, 1);
        LkQkNormRope a = {.type = LK_F16, .m = m, .heads = heads, .head_dim = head_dim, .x = x.host, .x_ld = ld,
                .weight = {w.host, LK_F32, head_dim}, .eps = 1e-5f, .cos = (float *) (void *) c.host, .sin = (float *) (void *) s.host,
                .rope_dims = pairs, .period = period};

        spoil(&x, m * ld);
        assert_int_equal(lk_cpu_ops(LK_CPU_AUTO)->qk_norm_rope(cpu, &a), 0);
        a.x = x.device;
        a.weight.data = w.device;
        a.cos = (float *) (void *) c.device;
        a.sin = (float *) (void *) s.device;
        assert_int_equal(lk_cuda_ops()->qk_norm_rope(gpu, &a), 0);
        assert_pair_same(&x, "qk_norm_rope");
        pair_free(&x);
        pair_free(&w);
        pair_free(&c);
        pair_free(&s);
}

static void qk_norm_rope_same_bits_as_cpu(void **state) {
        need_device();
        qk_one(2 * 1797, 32, 64, 24, 1797, 0);
        qk_one(100, 3, 64, 24, 0, 0);
        qk_one(100, 5, 64, 24, 7, 3);
        qk_one(50, 2, 24, 9, 0, 0);
        qk_one(50, 2, 128, 48, 13, 8);
}

static void unpatch_same_bits_as_cpu(void **state) {
        static const LkUnpatch sizes[] = {
                {.t = 1, .h = 1, .w = 1, .patch = {1, 1, 1}, .channels = 1, .x_ld = 1},
                {.t = 2, .h = 3, .w = 5, .patch = {4, 16, 16}, .channels = 3, .x_ld = 3072},
                {.t = 3, .h = 2, .w = 4, .patch = {1, 3, 2}, .channels = 5, .x_ld = 41},
        };

        need_device();
        for (size_t i = 0; i < ELEMENTSOF(sizes); i++) {
                LkUnpatch a = sizes[i];
                uint64_t tokens = a.t * a.h * a.w, numbers = (uint64_t) a.channels * a.patch[0] * a.patch[1] * a.patch[2];
                Pair x = filled(LK_F32, tokens * a.x_ld, 1), y = pair_new(tokens * numbers * 4);

                a.x = (float *) (void *) x.host;
                a.y = (float *) (void *) y.host;
                assert_int_equal(lk_cpu_ops(LK_CPU_AUTO)->unpatch(cpu, &a), 0);
                a.x = (float *) (void *) x.device;
                a.y = (float *) (void *) y.device;
                assert_int_equal(lk_cuda_ops()->unpatch(gpu, &a), 0);
                assert_pair_same(&y, "unpatch");
                a.channels = 0;
                assert_int_equal(lk_cuda_ops()->unpatch(gpu, &a), -EINVAL);
                pair_free(&x);
                pair_free(&y);
        }
}

/* ---- products ---- */

typedef struct Product {
        Pair x, w, bias, y, scale;
        LkGemm host, device;
} Product;

/* block_rows: 0, or of a view with gaps as in a QKV matrix interleaved by heads. */
static Product product_new(uint64_t m, uint64_t n, uint64_t k, LkType w_type, LkType bias_type, uint64_t block_rows, uint64_t more) {
        uint64_t stored = block_rows > 0 ? 3 * n : n, row = lk_row_size(w_type, k);
        Product p = {.x = filled(LK_F16, m * (k + more), 1), .w = pair_new(stored * row), .bias = filled(bias_type, n, 2),
                .y = pair_new(m * (n + more) * 2), .scale = filled(LK_F32, stored, 0.01f)};

        if (w_type == LK_I8)
                for (uint64_t i = 0; i < stored * row; i++)
                        p.w.host[i] = (uint8_t) next();
        else
                fill(&p.w, w_type, 0, stored * k, 1);
        pair_sync(&p.w);
        p.host = (LkGemm){.m = m, .x = p.x.host, .x_type = LK_F16, .x_ld = k + more, .y = p.y.host, .y_type = LK_F16, .y_ld = n + more,
                .bias = {p.bias.host, bias_type, n},
                .w = {.data = p.w.host, .type = w_type, .rows = n, .cols = k, .row_stride = row, .block_rows = block_rows ? block_rows : n,
                        .block_stride = block_rows ? 3 * block_rows * row : n * row}};
        if (w_type == LK_I8)
                p.host.w.quant = (LkQuant){.scale = p.scale.host, .scale_stride = 4, .rotation = k % 256 == 0 ? 256 : 0};
        p.device = p.host;
        p.device.x = p.x.device;
        p.device.w.data = p.w.device;
        p.device.w.quant.scale = w_type == LK_I8 ? p.scale.device : NULL;
        p.device.bias.data = p.bias.device;
        p.device.y = p.y.device;
        return p;
}

static void product_free(Product *p) {
        pair_free(&p->x);
        pair_free(&p->w);
        pair_free(&p->bias);
        pair_free(&p->y);
        pair_free(&p->scale);
}

static void gemm_near_cpu(void **state) {
        static const struct {
                uint64_t m, n, k, block_rows, more;
        } sizes[] = {{1, 8, 8, 0, 0}, {97, 131, 1040, 0, 3}, {200, 320, 1024, 0, 0}, {200, 192, 512, 64, 0}, {130, 40, 1043, 0, 0},
                {513, 264, 2048, 0, 5}};
        static const LkType types[] = {LK_F32, LK_BF16, LK_F16, LK_I8};

        need_device();
        for (size_t i = 0; i < ELEMENTSOF(sizes) * ELEMENTSOF(types) * 4; i++) {
                const size_t s = i / 4 / ELEMENTSOF(types);
                Product p = product_new(
                        sizes[s].m, sizes[s].n, sizes[s].k, types[i / 4 % ELEMENTSOF(types)], i % 2 ? LK_F16 : LK_F32,
                        sizes[s].block_rows, sizes[s].more);
                CLEANUP_FREE uint8_t *got = NULL;
                double d;

                if (i / 2 % 2 && i % 4 == 3)
                        p.host.bias.data = p.device.bias.data = NULL;
                assert_int_equal(lk_cpu_ops(LK_CPU_AUTO)->gemm(cpu, &p.host), 0);
                lk_cuda_product_set(gpu, i / 2 % 2, 0);
                assert_int_equal(lk_cuda_ops()->gemm(gpu, &p.device), 0);
                lk_cuda_product_set(gpu, false, 0);
                got = pair_downloaded(&p.y);
                d = distance(got, p.y.host, (p.y.size - PAIR_GUARD) / 2);
                if (!(d <= PRODUCT_LIMIT))
                        fail_msg("size %zu, weights %d, %s: %.3g from the CPU's", s, types[i / 4 % ELEMENTSOF(types)],
                                i / 2 % 2 ? "own" : "library", d);
                product_free(&p);
        }
}

/* Rows and columns of a layer of the decoder have the bits of the whole, with the bias that the library adds, and without one. */
static void gemm_parts_have_the_bits_of_the_whole(void **state) {
        static const uint64_t rows[][2] = {{0, 1}, {1, 1796}, {77, 200}, {1797, 1797}, {3593, 1}},
                              cols[][2] = {{0, 2048}, {0, 128}, {1024, 1024}};

        need_device();
        for (size_t i = 0; i < 4; i++) {
                const uint64_t m = 2 * 1797, n = 2048, k = i / 2 ? 8192 : 2048;
                Product p = product_new(m, n, k, LK_F16, LK_F16, 0, 0);
                CLEANUP_FREE uint8_t *whole = NULL;

                if (i % 2)
                        p.device.bias.data = NULL;
                assert_int_equal(lk_cuda_ops()->gemm(gpu, &p.device), 0);
                whole = pair_downloaded(&p.y);
                for (size_t c = 0; c < ELEMENTSOF(rows) * ELEMENTSOF(cols); c++) {
                        const uint64_t *r = rows[c / ELEMENTSOF(cols)], *l = cols[c % ELEMENTSOF(cols)];
                        LkGemm a = p.device;

                        a.m = r[1];
                        a.x = p.x.device + r[0] * k * 2;
                        a.w = lk_matrix_rows(&p.device.w, l[0], l[1]);
                        if (a.bias.data)
                                a.bias = (LkVector){p.bias.device + l[0] * 2, LK_F16, l[1]};
                        a.y_ld = l[1];
                        memset(p.y.host, 0, p.y.size);
                        pair_sync(&p.y);
                        for (uint64_t row = 0; row < r[1]; row++)
                                memcpy(p.y.host + row * l[1] * 2, whole + ((r[0] + row) * n + l[0]) * 2, l[1] * 2);
                        assert_int_equal(lk_cuda_ops()->gemm(gpu, &a), 0);
                        assert_pair_same(&p.y, "part of a product");
                }
                product_free(&p);
        }
}

/* ---- attention ---- */

typedef struct Heads {
        Pair q, k, v, o;
        LkAttention host, device;
} Heads;

static Heads heads_new(uint64_t sequences, uint64_t rows, uint32_t heads, uint32_t dim) {
        uint64_t n = (uint64_t) heads * dim, numbers = sequences * rows * n;
        Heads h = {.q = filled(LK_F16, numbers, 3), .k = filled(LK_F16, numbers, 3), .v = filled(LK_F16, numbers, 1),
                .o = pair_new(numbers * 2)};

        h.host = (LkAttention){.type = LK_F16, .n_q = rows, .n_k = rows, .sequences = sequences, .heads = heads, .head_dim = dim,
                .scale = 1 / sqrtf((float) dim), .q = h.q.host, .k = h.k.host, .v = h.v.host, .o = h.o.host, .q_ld = n, .k_ld = n,
                .v_ld = n,
                .o_ld = n};
        h.device = h.host;
        h.device.q = h.q.device;
        h.device.k = h.k.device;
        h.device.v = h.v.device;
        h.device.o = h.o.device;
        return h;
}

static void heads_free(Heads *h) {
        pair_free(&h->q);
        pair_free(&h->k);
        pair_free(&h->v);
        pair_free(&h->o);
}

static void attention_plain_same_bits_as_cpu(void **state) {
        need_device();
        for (unsigned i = 0; i < 2; i++) {
                Heads h = heads_new(1 + 2 * i, 130, 3, 12); /* rows of no whole pieces */

                assert_int_equal(lk_cpu_ops(LK_CPU_AUTO)->attention(cpu, &h.host), 0);
                assert_int_equal(lk_cuda_ops()->attention(gpu, &h.device), 0);
                assert_pair_same(&h.o, "plain attention");
                heads_free(&h);
        }
}

/* Sequences in one launch have the bits of launches of their own, and are near the CPU's. */
static void attention_sequences_same_bits_as_alone(void **state) {
        static const uint32_t dims[] = {64, 72, 128};

        need_device();
        for (size_t i = 0; i < ELEMENTSOF(dims); i++) {
                const uint64_t sequences = 3, rows = 261;
                Heads h = heads_new(sequences, rows, 4, dims[i]);
                uint64_t step = rows * 4 * dims[i] * 2;
                CLEANUP_FREE uint8_t *all = NULL;
                double d;

                assert_int_equal(lk_cuda_ops()->attention(gpu, &h.device), 0);
                all = pair_downloaded(&h.o);
                assert_int_equal(lk_cpu_ops(LK_CPU_AUTO)->attention(cpu, &h.host), 0);
                d = distance(all, h.o.host, (h.o.size - PAIR_GUARD) / 2);
                if (!(d <= ATTENTION_LIMIT))
                        fail_msg("heads of %u: %.3g from the CPU's", dims[i], d);
                memcpy(h.o.host, all, h.o.size);
                memset(all, 0, h.o.size);
                assert_int_equal(lk_cuda_ops()->upload(gpu, h.o.device, all, h.o.size), 0);
                for (uint64_t k = 0; k < sequences; k++) {
                        LkAttention one = h.device;

                        one.sequences = 0;
                        one.q = h.q.device + k * step;
                        one.k = h.k.device + k * step;
                        one.v = h.v.device + k * step;
                        one.o = h.o.device + k * step;
                        assert_int_equal(lk_cuda_ops()->attention(gpu, &one), 0);
                }
                assert_pair_same(&h.o, "sequences alone");
                heads_free(&h);
        }
}

/* A sequence without one number leaves its neighbours' bits alone, whose last tiles reach into it. */
static void attention_sequence_without_numbers_stays_alone(void **state) {
        static const uint32_t dims[] = {64, 72, 128};

        need_device();
        for (size_t i = 0; i < ELEMENTSOF(dims); i++) {
                const uint64_t rows = 261, size = rows * 4 * dims[i] * 2;
                Heads h = heads_new(3, rows, 4, dims[i]);
                CLEANUP_FREE uint8_t *before = NULL, *after = NULL;

                assert_int_equal(lk_cuda_ops()->attention(gpu, &h.device), 0);
                before = pair_downloaded(&h.o);
                memset(h.q.host + size, 0xff, size);
                memset(h.k.host + size, 0xff, size);
                memset(h.v.host + size, 0xff, size);
                pair_sync(&h.q);
                pair_sync(&h.k);
                pair_sync(&h.v);
                assert_int_equal(lk_cuda_ops()->attention(gpu, &h.device), 0);
                after = pair_downloaded(&h.o);
                assert_memory_equal(before, after, size);
                assert_memory_equal(before + 2 * size, after + 2 * size, size);
                for (uint64_t k = 0; k < size / 2; k++)
                        assert_true(isnan(number_get(after + size, LK_F16, k)));
                heads_free(&h);
        }
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(norm_same_bits_as_cpu),
                cmocka_unit_test(residual_same_bits_as_cpu),
                cmocka_unit_test(swiglu_same_bits_as_cpu),
                cmocka_unit_test(qk_norm_rope_same_bits_as_cpu),
                cmocka_unit_test(unpatch_same_bits_as_cpu),
                cmocka_unit_test(gemm_near_cpu),
                cmocka_unit_test(gemm_parts_have_the_bits_of_the_whole),
                cmocka_unit_test(attention_plain_same_bits_as_cpu),
                cmocka_unit_test(attention_sequences_same_bits_as_alone),
                cmocka_unit_test(attention_sequence_without_numbers_stays_alone),
        };

        return cmocka_run_group_tests(tests, backends_setup, backends_teardown);
}
