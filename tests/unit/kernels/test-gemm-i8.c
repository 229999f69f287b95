/* SPDX-License-Identifier: Apache-2.0 */
/* gemm_i8 against its rule (bits). */

#include "tests/unit/kernels/quant-test.h"

typedef struct Case {
        uint64_t m, n, k, block_rows;
        LkType y, bias; /* bias 0: none */
        bool row_scales;
} Case;

typedef struct Data {
        LkGemmI8 g;
        QuantMatrix w;
        int8_t *x;
        float *x_scale;
        void *bias_base;
} Data;

static void data_make(const Case *c, Data *d) {
        uint64_t seed = c->m + 7 * c->n + 31 * c->k;

        *d = (Data){.x = allocate(c->m * (c->k + 2)), .x_scale = allocate(c->m * sizeof(float))};
        quant_matrix_make(LK_I8, c->n, c->k, c->block_rows, 0, c->row_scales, &d->w);
        for (uint64_t i = 0; i < c->m * (c->k + 2); i++)
                d->x[i] = (int8_t) random_u64(&seed);
        for (uint64_t i = 0; i < c->m; i++)
                d->x_scale[i] = 0.02f + 0.001f * (float) (random_u64(&seed) % 100);
        d->g = (LkGemmI8){.m = c->m,
                .x = d->x,
                .x_ld = c->k + 2,
                .x_scale = d->x_scale,
                .w = d->w.w,
                .y_type = c->y,
                .y_ld = c->n + 3};
        if (c->bias) {
                d->g.bias = (LkVector){.type = c->bias, .n = c->n};
                d->g.bias.data = random_array(c->n, c->bias, 1, 1, &seed, &d->bias_base);
        }
}

static void data_done(Data *d) {
        free(d->x);
        free(d->x_scale);
        free(d->bias_base);
        quant_matrix_done(&d->w);
}

static float rule(const Data *d, uint64_t i, uint64_t j) {
        const LkMatrix *w = &d->w.w;
        uint64_t tensor_row = w->quant.first_row +
                              (w->block_rows < w->rows ? j / w->block_rows * 3 * w->block_rows : 0) +
                              j % w->block_rows;
        int64_t sum = 0;
        float y;

        for (uint64_t k = 0; k < w->cols; k++)
                sum += (int64_t) d->x[i * d->g.x_ld + k] * (int8_t) d->w.data[3 + tensor_row * w->cols + k];
        y = (float) (int32_t) sum * d->x_scale[i] *
            (float) get(d->w.scale + 1, LK_F32, w->quant.scale_stride ? tensor_row : 0);
        return d->g.bias.data ? y + (float) get(d->g.bias.data, d->g.bias.type, j) : y;
}

static void *run(LkCpuIsa isa, uint32_t threads, const LkGemmI8 *g) {
        LkContext *c;
        const LkOps *ops = open_isa(isa, threads, &c);
        LkGemmI8 a = *g;

        if (!ops)
                return NULL;
        a.y = guarded(a.m * a.y_ld, a.y_type);
        assert_int_equal(ops->gemm_i8(c, &a), 0);
        assert_null(ops->context_free(c));
        return a.y;
}

static void check_case(const Case *c) {
        uint64_t size = lk_type_size(c->y);
        Data d;

        data_make(c, &d);
        for (unsigned isa = 0; isa < ISAS; isa++) {
                CLEANUP_FREE uint8_t *y = run(all_isas[isa], 1 + isa, &d.g);
                uint64_t step = y && c->m * c->n * c->k > 3000000 ? 97 : 1;

                for (uint64_t at = 0; y && at < c->m * c->n; at += step) {
                        uint8_t expected[4] = {};
                        uint64_t i = at / c->n, j = at % c->n;

                        put(expected, c->y, 0, rule(&d, i, j));
                        if (memcmp(expected, y + (i * d.g.y_ld + j) * size, size) != 0)
                                fail_msg("m %lu n %lu k %lu: (%lu, %lu) breaks the rule",
                                        (unsigned long) c->m, (unsigned long) c->n, (unsigned long) c->k,
                                        (unsigned long) i, (unsigned long) j);
                }
                for (uint64_t i = 0; y && i < c->m; i++)
                        for (uint64_t b = c->n * size; b < d.g.y_ld * size; b++)
                                assert_int_equal(y[i * d.g.y_ld * size + b], 0x5a);
        }
        data_done(&d);
}

static void gemm_i8_sizes_follow_rule(void **state) {
        static const uint64_t ms[] = {1, 3, 13, 29}, ns[] = {1, 15, 33, 96}, ks[] = {1, 2, 7, 64, 257};
        unsigned i = 0;

        for (unsigned m = 0; m < ELEMENTSOF(ms); m++)
                for (unsigned n = 0; n < ELEMENTSOF(ns); n++)
                        for (unsigned k = 0; k < ELEMENTSOF(ks); k++, i++)
                                check_case(&(Case){ms[m], ns[n], ks[k], 0, i % 2 ? LK_BF16 : LK_F32,
                                        i % 3 ? LK_BF16 : (LkType) 0, i % 5 != 0});
}

static void gemm_i8_many_blocks_follow_rule(void **state) {
        check_case(&(Case){1200, 40, 1700, 0, LK_BF16, LK_F32, true}); /* more rows and k than a block */
        check_case(&(Case){2, 8300, 30, 0, LK_F32, 0, true});          /* more columns */
}

static void gemm_i8_block_view_follows_rule(void **state) {
        check_case(&(Case){5, 48, 40, 16, LK_BF16, 0, true});
        check_case(&(Case){5, 384, 33, 128, LK_F32, LK_BF16, true});
}

/* The largest sums that int32 holds. */
static void gemm_i8_extreme_sums_are_exact(void **state) {
        Case k = {2, 3, LK_GEMM_I8_K_MAX, 0, LK_F32, 0, false};
        Data d;

        data_make(&k, &d);
        memset(d.x, -128, k.m * d.g.x_ld);
        memset(d.w.data, -128, 3 + 3 * k.k);
        memset(d.w.data + 3 + k.k, 127, k.k);
        for (unsigned isa = 0; isa < ISAS; isa++) {
                CLEANUP_FREE float *y = run(all_isas[isa], 1, &d.g);

                for (uint64_t j = 0; y && j < 3; j++)
                        assert_true(y[j] == rule(&d, 0, j));
        }
        data_done(&d);
}

static void gemm_i8_row_position_and_threads_same_bits(void **state) {
        static const uint32_t threads[] = {1, 2, 3, 8, 0};
        Case k = {157, 70, 300, 0, LK_BF16, LK_BF16, true};
        CLEANUP_FREE uint8_t *first = NULL;
        Data d;

        data_make(&k, &d);
        first = run(LK_CPU_AUTO, 1, &d.g);
        for (unsigned i = 0; i < ELEMENTSOF(threads); i++) {
                CLEANUP_FREE void *y = run(LK_CPU_AUTO, threads[i], &d.g);

                assert_memory_equal(first, y, k.m * d.g.y_ld * 2);
        }
        for (uint64_t row = 0; row < k.m; row += 11) {
                LkGemmI8 g = d.g;
                CLEANUP_FREE uint8_t *y = NULL;

                g.m = k.m - row;
                g.x = d.x + row * g.x_ld;
                g.x_scale = d.x_scale + row;
                y = run(LK_CPU_AUTO, 2, &g);
                assert_memory_equal(y, first + row * g.y_ld * 2, g.m * g.y_ld * 2);
        }
        data_done(&d);
}

/* Of the same rows and of others, with all that may differ. */
static void gemm_i8_beside_each_other_same_bits(void **state) {
        static const Case cases[] = {{29, 33, 64, 0, LK_BF16, 0, true},
                {29, 96, 64, 32, LK_F32, LK_BF16, false}, {29, 15, 64, 0, LK_BF16, LK_F32, true},
                {3, 40, 257, 0, LK_F32, 0, true}};

        for (unsigned isa = 0; isa < ISAS; isa++) {
                uint8_t *expected[ELEMENTSOF(cases)], *y[ELEMENTSOF(cases)];
                LkGemmI8 all[ELEMENTSOF(cases)];
                Data d[ELEMENTSOF(cases)];
                LkContext *c;
                const LkOps *ops = open_isa(all_isas[isa], 2, &c);

                if (!ops)
                        continue;
                for (unsigned i = 0; i < ELEMENTSOF(cases); i++) {
                        data_make(cases + i, d + i);
                        if (i > 0 && cases[i].k == cases[0].k) { /* the same x */
                                d[i].g.x = d[0].g.x;
                                d[i].g.x_scale = d[0].g.x_scale;
                        }
                        expected[i] = run(all_isas[isa], 1, &d[i].g);
                        all[i] = d[i].g;
                        all[i].y = y[i] = guarded(all[i].m * all[i].y_ld, all[i].y_type);
                        all[i].beside = i + 1 < ELEMENTSOF(cases) ? all + i + 1 : NULL;
                }
                assert_int_equal(ops->gemm_i8(c, all), 0);
                for (unsigned i = 0; i < ELEMENTSOF(cases); i++) {
                        assert_memory_equal(
                                y[i], expected[i], all[i].m * all[i].y_ld * lk_type_size(all[i].y_type));
                        memset(y[i], 0x5a, all[i].m * all[i].y_ld * lk_type_size(all[i].y_type));
                }
                all[ELEMENTSOF(cases) - 1].x = NULL; /* refused before the first is made */
                assert_int_equal(ops->gemm_i8(c, all), -EINVAL);
                for (uint64_t i = 0; i < all[0].m * all[0].y_ld * 2; i++)
                        assert_int_equal(y[0][i], 0x5a);
                for (unsigned i = 0; i < ELEMENTSOF(cases); i++) {
                        free(y[i]);
                        free(expected[i]);
                        data_done(d + i);
                }
                assert_null(ops->context_free(c));
        }
}

#define REFUSED(statement)                                                                                  \
        do {                                                                                                \
                LkGemmI8 g = good;                                                                          \
                statement;                                                                                  \
                assert_int_equal(ops->gemm_i8(c, &g), -EINVAL);                                             \
        } while (0)

static void gemm_i8_bad_argument_is_refused(void **state) {
        Case k = {2, 3, 16, 0, LK_F32, LK_F32, true};
        LkContext *c;
        const LkOps *ops = open_isa(LK_CPU_AUTO, 1, &c);
        float y[64];
        LkGemmI8 good;
        Data d;

        data_make(&k, &d);
        good = d.g;
        good.y = y;
        assert_int_equal(ops->gemm_i8(c, &good), 0);
        assert_int_equal(ops->gemm_i8(NULL, &good), -EINVAL);
        assert_int_equal(ops->gemm_i8(c, NULL), -EINVAL);
        REFUSED(g.x = NULL);
        REFUSED(g.x_scale = NULL);
        REFUSED(g.y = NULL);
        REFUSED(g.x_ld = 15);
        REFUSED(g.y_ld = 2);
        REFUSED(g.y_type = LK_F16);
        REFUSED(g.w.type = LK_F8_E4M3);
        REFUSED(g.w.type = LK_F32);
        REFUSED(g.w.quant.scale = NULL);
        REFUSED(g.w.cols = LK_GEMM_I8_K_MAX + 1; g.x_ld = g.w.cols; g.w.row_stride = g.w.cols);
        REFUSED(g.w.cols = 0);
        REFUSED(g.bias.n = 2);
        REFUSED(g.m = UINT64_MAX / 4);
        good.m = 0;
        assert_int_equal(ops->gemm_i8(c, &good), 0);
        data_done(&d);
        assert_null(ops->context_free(c));
}

int main(void) {
        static const struct CMUnitTest tests[] = {
                cmocka_unit_test(gemm_i8_sizes_follow_rule),
                cmocka_unit_test(gemm_i8_many_blocks_follow_rule),
                cmocka_unit_test(gemm_i8_block_view_follows_rule),
                cmocka_unit_test(gemm_i8_extreme_sums_are_exact),
                cmocka_unit_test(gemm_i8_row_position_and_threads_same_bits),
                cmocka_unit_test(gemm_i8_beside_each_other_same_bits),
                cmocka_unit_test(gemm_i8_bad_argument_is_refused),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
