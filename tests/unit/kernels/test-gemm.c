/* SPDX-License-Identifier: Apache-2.0 */
/* gemm against its rule (bits) and against double precision. */

#include "tests/unit/kernels/kernels-test.h"

typedef struct Case {
        uint64_t m, n, k, block_rows; /* block_rows 0: plain */
        LkType x, w, y, bias;         /* bias 0: none */
        unsigned offset;              /* of the weights, bytes */
} Case;

typedef struct Data {
        LkGemm g;
        void *x_base, *w_base, *bias_base;
        uint64_t y_size;
} Data;

/* Rows of the view are the first of three parts of each block, as in a QKV matrix interleaved per head. */
static void data_make(const Case *c, Data *d) {
        uint64_t seed = c->m * 7 + c->n * 11 + c->k * 13, row = c->k * lk_type_size(c->w);
        uint64_t rows = c->block_rows > 0 ? (c->n / c->block_rows + 1) * 3 * c->block_rows : c->n;

        *d = (Data){
                .g =
                        {
                                .m = c->m,
                                .x_type = c->x,
                                .x_ld = c->k + 3,
                                .y_type = c->y,
                                .y_ld = c->n + 5,
                                .w = {.type = c->w,
                                        .rows = c->n,
                                        .cols = c->k,
                                        .row_stride = row,
                                        .block_rows = c->block_rows > 0 ? c->block_rows : c->n,
                                        .block_stride = c->block_rows > 0 ? 3 * c->block_rows * row : 0},
                        },
                .y_size = c->m * (c->n + 5) * lk_type_size(c->y),
        };
        d->g.x = random_array(c->m * (c->k + 3), c->x, 0, 1, &seed, &d->x_base);
        d->g.w.data = random_array(rows * c->k, c->w, c->offset, 1, &seed, &d->w_base);
        if (c->bias != 0) {
                d->g.bias = (LkVector){.type = c->bias, .n = c->n};
                d->g.bias.data = random_array(c->n, c->bias, c->offset, 1, &seed, &d->bias_base);
        }
}

static void data_done(Data *d) {
        free(d->x_base);
        free(d->w_base);
        free(d->bias_base);
}

static double weight(const LkGemm *g, uint64_t row, uint64_t k) {
        const LkMatrix *w = &g->w;

        return get((const uint8_t *) w->data + row / w->block_rows * w->block_stride +
                           row % w->block_rows * w->row_stride,
                w->type, k);
}

/* As it meets rows of x. */
static float met(const LkGemm *g, double d) {
        return (float) (g->x_type == LK_F16 ? round_type(d, LK_F16) : d);
}

static float rule(const LkGemm *g, uint64_t i, uint64_t j) {
        float sum = 0;

        for (uint64_t k = 0; k < g->w.cols; k++)
                sum = fmaf((float) get(g->x, g->x_type, i * g->x_ld + k), met(g, weight(g, j, k)), sum);

        if (g->bias.data)
                sum += met(g, get(g->bias.data, g->bias.type, j));

        return sum;
}

static void check_element(const LkGemm *g, const void *y, uint64_t i, uint64_t j) {
        uint64_t at = i * g->y_ld + j, size = lk_type_size(g->y_type);
        uint8_t expected[4] = {};

        put(expected, g->y_type, 0, rule(g, i, j));
        if (memcmp(expected, (const uint8_t *) y + at * size, size) != 0)
                fail_msg("m %lu n %lu k %lu: element (%lu, %lu) breaks the rule", (unsigned long) g->m,
                        (unsigned long) g->w.rows, (unsigned long) g->w.cols, (unsigned long) i,
                        (unsigned long) j);
}

/* Every element if that is quick, else 400 of them; and what lies between the rows. */
static void check_rule(const LkGemm *g, const void *y) {
        uint64_t state = 5, n = g->w.rows, size = lk_type_size(g->y_type);

        if (g->m * n * g->w.cols <= 300000)
                for (uint64_t i = 0; i < g->m * n; i++)
                        check_element(g, y, i / n, i % n);
        else
                for (unsigned i = 0; i < 400; i++)
                        check_element(g, y, random_u64(&state) % g->m, random_u64(&state) % n);

        for (uint64_t i = 0; i < g->m; i++)
                for (uint64_t b = n * size; b < g->y_ld * size; b++)
                        assert_int_equal(((const uint8_t *) y)[i * g->y_ld * size + b], 0x5a);
}

static void *run(LkCpuIsa isa, uint32_t threads, const Data *d) {
        LkContext *c;
        const LkOps *ops = open_isa(isa, threads, &c);
        LkGemm g = d->g;

        if (!ops)
                return NULL;

        g.y = guarded(d->y_size / lk_type_size(g.y_type), g.y_type);
        assert_int_equal(ops->gemm(c, &g), 0);
        assert_null(ops->context_free(c));
        return g.y;
}

/* The portable code calls fmaf() for each product: it gets the small shapes only. */
#define SCALAR_WORK 6000000u

static void check_case(const Case *c) {
        CLEANUP_FREE void *first = NULL;
        Data d;

        data_make(c, &d);

        for (unsigned i = 0; i < ISAS; i++) {
                CLEANUP_FREE void *y = NULL;

                if (all_isas[i] == LK_CPU_SCALAR && c->m * c->n * c->k > SCALAR_WORK)
                        continue;

                y = run(all_isas[i], 1 + i, &d);
                if (y && !first) {
                        check_rule(&d.g, y);
                        first = STEAL_PTR(y);
                } else if (y)
                        assert_memory_equal(first, y, d.y_size);
        }

        data_done(&d);
}

static const LkType types[] = {LK_F32, LK_BF16, LK_F16};

static void gemm_sizes_follow_rule(void **state) {
        static const uint64_t ms[] = {1, 2, 5, 6, 7, 13, 407}, ks[] = {1, 32, 96, 160, 1024};
        static const uint64_t ns[] = {1, 15, 16, 17, 96, 3072};
        unsigned i = 0;

        for (unsigned m = 0; m < ELEMENTSOF(ms); m++)
                for (unsigned k = 0; k < ELEMENTSOF(ks); k++)
                        for (unsigned n = 0; n < ELEMENTSOF(ns); n++, i++) {
                                Case c = {.m = ms[m],
                                        .n = ns[n],
                                        .k = ks[k],
                                        .x = types[i % 2],
                                        .w = types[i % 3],
                                        .y = types[i / 2 % 2],
                                        .bias = i % 4 ? types[i % 3] : 0};

                                if (c.m * c.n * c.k <= 50000000)
                                        check_case(&c);
                        }
}

static void gemm_many_blocks_follow_rule(void **state) {
        static const Case cases[] = {
                {1300, 70, 800, 0, LK_F32, LK_F32, LK_F32, LK_F32, 0},   /* more rows than a block */
                {3, 8500, 390, 0, LK_BF16, LK_BF16, LK_BF16, LK_F16, 0}, /* more columns than a block */
                {600, 1100, 33, 0, LK_BF16, LK_F16, LK_F32, 0, 0},
        };

        for (unsigned i = 0; i < ELEMENTSOF(cases); i++)
                check_case(&cases[i]);
}

/* Both rows in f16: weights and bias are rounded to it first. */
static void gemm_f16_follows_rule(void **state) {
        static const Case sizes[] = {{.m = 1, .n = 1, .k = 1}, {.m = 13, .n = 96, .k = 160}, {.m = 407, .n = 17, .k = 800},
                {.m = 7, .n = 48, .k = 33, .block_rows = 16, .offset = 1}, {.m = 3, .n = 8500, .k = 40}};

        for (unsigned i = 0; i < 3 * ELEMENTSOF(sizes); i++) {
                Case c = sizes[i / 3];

                c.x = c.y = LK_F16;
                c.w = types[i % 3];
                c.bias = i % 2 ? types[(i + 1) % 3] : 0;
                check_case(&c);
        }
}

/* Rows of bf16 meet a rotated weight rounded to bf16, rows of f32 as it is. */
static void gemm_rotated_meets_bf16_rounded(void **state) {
        static const LkType rows[] = {LK_BF16, LK_F16, LK_F32};

        for (unsigned i = 0; i < ELEMENTSOF(rows) * ISAS; i++) {
                uint64_t seed = i, m = 9, n = 20, k = 64;
                LkType type = rows[i / ISAS];
                CLEANUP_FREE int8_t *q = allocate(n * k);
                CLEANUP_FREE float *scale = random_aligned(n, LK_F32, 0.1, &seed), *w = allocate(n * k * sizeof(float));
                CLEANUP_FREE void *x = random_aligned(m * k, type, 1, &seed), *rounded = allocate(n * k * 4);
                CLEANUP_FREE void *y = guarded(m * n, type), *expected = guarded(m * n, type);
                LkDequantise all = {.w = {.data = q, .type = LK_I8, .rows = n, .cols = k, .row_stride = k, .block_rows = n,
                                            .quant = {.scale = scale, .scale_stride = 4, .rotation = 16}},
                        .y = w,
                        .y_ld = k};
                LkGemm a = {.m = m, .x = x, .x_type = type, .x_ld = k, .w = all.w, .y = y, .y_type = type, .y_ld = n};
                LkContext *c;
                const LkOps *ops = open_isa(all_isas[i % ISAS], 2, &c);

                if (!ops)
                        continue;
                for (uint64_t j = 0; j < n * k; j++)
                        q[j] = (int8_t) random_u64(&seed);
                assert_int_equal(ops->dequantise(c, &all), 0);
                assert_int_equal(ops->gemm(c, &a), 0);
                for (uint64_t j = 0; j < n * k; j++)
                        put(rounded, type, j, w[j]);
                a.w = (LkMatrix){.data = rounded, .type = type, .rows = n, .cols = k, .row_stride = k * lk_type_size(type),
                        .block_rows = n};
                a.y = expected;
                assert_int_equal(ops->gemm(c, &a), 0);
                assert_memory_equal(y, expected, m * n * lk_type_size(type));
                assert_null(ops->context_free(c));
        }
}

static void gemm_unaligned_weights_follow_rule(void **state) {
        static const unsigned offsets[] = {1, 2, 3, 8};

        for (unsigned i = 0; i < 3 * ELEMENTSOF(offsets); i++) {
                Case c = {.m = 9,
                        .n = 37,
                        .k = 45,
                        .x = LK_F32,
                        .w = types[i % 3],
                        .y = LK_F32,
                        .bias = types[i % 3],
                        .offset = offsets[i / 3]};

                check_case(&c);
        }
}

static void gemm_block_view_follows_rule(void **state) {
        static const uint64_t blocks[] = {8, 16, 24, 128};

        for (unsigned i = 0; i < 3 * ELEMENTSOF(blocks); i++) {
                Case c = {.m = 5,
                        .n = 3 * blocks[i / 3],
                        .k = 40,
                        .block_rows = blocks[i / 3],
                        .x = LK_BF16,
                        .w = types[i % 3],
                        .y = LK_BF16,
                        .offset = i % 4};

                check_case(&c);
        }
}

static void gemm_against_double_is_accurate(void **state) {
        Case c = {.m = 13, .n = 96, .k = 1024, .x = LK_F32, .w = LK_F32, .y = LK_F32, .bias = LK_F32};
        static const LkType outputs[] = {LK_F32, LK_BF16};
        double expected[13 * 96];

        for (unsigned t = 0; t < 2; t++) {
                CLEANUP_FREE void *y = NULL;
                Data d;

                c.y = outputs[t];
                data_make(&c, &d);

                for (uint64_t i = 0; i < c.m * c.n; i++) {
                        expected[i] = get(d.g.bias.data, LK_F32, i % c.n);
                        for (uint64_t k = 0; k < c.k; k++)
                                expected[i] +=
                                        get(d.g.x, c.x, i / c.n * d.g.x_ld + k) * weight(&d.g, i % c.n, k);
                }

                y = run(LK_CPU_AUTO, 2, &d);
                /* bf16: the error of rounding alone is about 2^-9 / sqrt(1.8) */
                assert_true(
                        relative_l2(y, c.y, d.g.y_ld, expected, c.m, c.n) < (c.y == LK_F32 ? 1e-6 : 1.8e-3));
                data_done(&d);
        }
}

static void gemm_any_thread_count_same_bits(void **state) {
        static const uint32_t threads[] = {1, 2, 3, 8, 0};
        Case c = {.m = 407, .n = 96, .k = 160, .x = LK_BF16, .w = LK_BF16, .y = LK_F32, .bias = LK_BF16};
        CLEANUP_FREE void *first = NULL;
        Data d;

        data_make(&c, &d);
        first = run(LK_CPU_AUTO, 1, &d);

        for (unsigned i = 1; i < ELEMENTSOF(threads); i++) {
                CLEANUP_FREE void *y = run(LK_CPU_AUTO, threads[i], &d);

                assert_memory_equal(first, y, d.y_size);
        }

        data_done(&d);
}

/* Row 0 of every run is the same row of x at another place, between NaN. */
static void gemm_row_position_same_bits(void **state) {
        static const uint64_t ms[] = {1, 2, 6, 7, 14, 15, 29, 407, 1200};
        Case c = {.m = 1200, .n = 50, .k = 96, .x = LK_F32, .w = LK_F32, .y = LK_F32};

        for (unsigned isa = 0; isa < ISAS; isa++) {
                CLEANUP_FREE float *row = NULL;
                CLEANUP_FREE uint8_t *expected = NULL;
                Data d;

                if (!lk_cpu_ops(all_isas[isa]))
                        continue;

                data_make(&c, &d);
                row = allocate(c.k * 4);
                memcpy(row, d.g.x, c.k * 4);

                for (unsigned i = 0; i < ELEMENTSOF(ms); i++) {
                        for (uint64_t at = 0; at < ms[i]; at += ms[i] < 16 ? 1 : ms[i] / 3) {
                                CLEANUP_FREE uint8_t *y = NULL;
                                float *x = d.x_base;

                                for (uint64_t e = 0; e < ms[i] * d.g.x_ld; e++)
                                        x[e] = NAN;

                                memcpy(x + at * d.g.x_ld, row, c.k * 4);
                                d.g.m = ms[i];
                                y = run(all_isas[isa], 1, &d);

                                if (!expected)
                                        expected = STEAL_PTR(y);
                                else
                                        assert_memory_equal(expected, y + at * d.g.y_ld * 4, c.n * 4);
                        }
                }

                data_done(&d);
        }
}

static void gemm_column_slice_same_bits(void **state) {
        Case c = {.m = 20, .n = 100, .k = 500, .x = LK_BF16, .w = LK_BF16, .y = LK_F32};
        CLEANUP_FREE uint8_t *whole = NULL;
        Data d;

        data_make(&c, &d);
        whole = run(LK_CPU_AUTO, 1, &d);

        for (uint64_t first = 1; first < 40; first += 13) {
                CLEANUP_FREE uint8_t *y = NULL;
                Data part = d;

                part.g.w.data = (const uint8_t *) d.g.w.data + first * d.g.w.row_stride;
                part.g.w.rows = part.g.w.block_rows = 37;
                y = run(LK_CPU_AUTO, 1, &part);

                for (uint64_t i = 0; i < c.m; i++)
                        assert_memory_equal(
                                whole + (i * d.g.y_ld + first) * 4, y + i * d.g.y_ld * 4, 37 * 4);
        }

        data_done(&d);
}

#define REFUSED(statement)                                                                                  \
        do {                                                                                                \
                LkGemm g = good;                                                                            \
                statement;                                                                                  \
                assert_int_equal(ops->gemm(c, &g), -EINVAL);                                                \
        } while (0)

static void gemm_bad_argument_is_refused(void **state) {
        float x[8] = {1}, w[8] = {1}, y[8];
        LkGemm good = {
                .m = 2,
                .x = x,
                .x_type = LK_F32,
                .x_ld = 2,
                .y = y,
                .y_type = LK_F32,
                .y_ld = 2,
                .w = {.data = w, .type = LK_F32, .rows = 2, .cols = 2, .row_stride = 8, .block_rows = 2},
        };
        LkContext *c;
        const LkOps *ops = open_isa(LK_CPU_AUTO, 1, &c);

        assert_int_equal(ops->gemm(c, &good), 0);
        assert_int_equal(ops->gemm(NULL, &good), -EINVAL);
        assert_int_equal(ops->gemm(c, NULL), -EINVAL);
        REFUSED(g.x = NULL);
        REFUSED(g.y = NULL);
        REFUSED(g.w.data = NULL);
        REFUSED(g.x_ld = 1);
        REFUSED(g.y_ld = 1);
        REFUSED(g.x_type = LK_F16);
        REFUSED(g.y_type = LK_F16);
        REFUSED(g.x_type = (LkType) 9);
        REFUSED(g.w.type = (LkType) 0);
        REFUSED(g.w.block_rows = 0);
        REFUSED(g.w.row_stride = 7);
        REFUSED(g.w.cols = 0);
        REFUSED(g.w.cols = UINT64_MAX / 2);
        REFUSED(g.m = UINT64_MAX / 4);
        REFUSED(g.x = (uint8_t *) x + 2);
        REFUSED(g.w.block_rows = 1; g.w.block_stride = UINT64_MAX);
        REFUSED(g.bias = ((LkVector){.data = w, .type = LK_F32, .n = 3}));
        REFUSED(g.bias = ((LkVector){.data = w, .type = (LkType) 7, .n = 2}));

        good.m = 0;
        assert_int_equal(ops->gemm(c, &good), 0);
        assert_null(ops->context_free(c));
}

int main(void) {
        static const struct CMUnitTest tests[] = {
                cmocka_unit_test(gemm_sizes_follow_rule),
                cmocka_unit_test(gemm_many_blocks_follow_rule),
                cmocka_unit_test(gemm_f16_follows_rule),
                cmocka_unit_test(gemm_rotated_meets_bf16_rounded),
                cmocka_unit_test(gemm_unaligned_weights_follow_rule),
                cmocka_unit_test(gemm_block_view_follows_rule),
                cmocka_unit_test(gemm_against_double_is_accurate),
                cmocka_unit_test(gemm_any_thread_count_same_bits),
                cmocka_unit_test(gemm_row_position_same_bits),
                cmocka_unit_test(gemm_column_slice_same_bits),
                cmocka_unit_test(gemm_bad_argument_is_refused),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
