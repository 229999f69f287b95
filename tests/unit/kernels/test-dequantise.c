/* SPDX-License-Identifier: Apache-2.0 */
/* dequantise and expand, and gemm of quantised matrices, against the rule of LkQuant (bits). */

#include "tests/unit/kernels/quant-test.h"

typedef struct Case {
        LkType type;
        uint64_t rows, cols, block_rows;
        uint32_t rotation;
        bool row_scales;
} Case;

static const Case cases[] = {
        {LK_I8, 5, 7, 0, 0, true},
        {LK_I8, 40, 512, 0, 256, true},
        {LK_I8, 33, 2688, 0, 64, true},
        {LK_I8, 24, 832, 8, 16, true},
        {LK_I8, 17, 36, 0, 4, false},
        {LK_F8_E4M3, 24, 48, 0, 0, false},
        {LK_F8_E5M2, 24, 401, 8, 0, false},
        {LK_NVFP4, 16, 64, 0, 0, false},
        {LK_NVFP4, 144, 80, 0, 0, false},
        {LK_NVFP4, 300, 400, 0, 0, false},
        {LK_NVFP4, 96, 416, 32, 0, false},
};

static void matrix_make(const Case *c, QuantMatrix *ret) {
        quant_matrix_make(c->type, c->rows, c->cols, c->block_rows, c->rotation, c->row_scales, ret);
}

static void dequantise_formats_follow_rule(void **state) {
        for (unsigned i = 0; i < ELEMENTSOF(cases) * ISAS; i++) {
                const Case *k = cases + i / ISAS;
                uint64_t ld = k->cols + 3;
                CLEANUP_FREE float *y = guarded(k->rows * ld, LK_F32);
                LkContext *c;
                const LkOps *ops = open_isa(all_isas[i % ISAS], 1 + i % 3, &c);
                QuantMatrix m;

                if (!ops)
                        continue;
                matrix_make(k, &m);
                assert_int_equal(ops->dequantise(c, &(LkDequantise){.w = m.w, .y = y, .y_ld = ld}), 0);
                for (uint64_t r = 0; r < k->rows; r++)
                        for (uint64_t j = 0; j < ld; j++) {
                                float expected;

                                memset(&expected, 0x5a, sizeof(expected));
                                if (j < k->cols)
                                        expected = quant_number(&m, r, j);
                                if (memcmp(&expected, y + r * ld + j, sizeof(expected)) != 0 &&
                                        !(expected == 0 && y[r * ld + j] == 0))
                                        fail_msg("case %u: (%lu, %lu) is %g, expected %g", i / ISAS,
                                                (unsigned long) r, (unsigned long) j, (double) y[r * ld + j],
                                                (double) expected);
                        }
                quant_matrix_done(&m);
                assert_null(ops->context_free(c));
        }
}

static void dequantise_plain_types_are_converted(void **state) {
        static const LkType types[] = {LK_F32, LK_BF16, LK_F16};
        LkContext *c;
        const LkOps *ops = open_isa(LK_CPU_AUTO, 2, &c);

        for (unsigned t = 0; t < 3; t++) {
                uint64_t seed = t;
                void *base;
                LkMatrix w = {.type = types[t], .rows = 9, .cols = 11, .block_rows = 9};
                float y[9 * 11];

                w.data = random_array(99, types[t], 1, 1, &seed, &base);
                w.row_stride = 11 * lk_type_size(types[t]);
                assert_int_equal(ops->dequantise(c, &(LkDequantise){.w = w, .y = y, .y_ld = 11}), 0);
                for (uint64_t i = 0; i < 99; i++)
                        assert_true((double) y[i] == get(w.data, types[t], i));
                free(base);
        }
        assert_null(ops->context_free(c));
}

/* Every code of the 8-bit and 4-bit formats; NaN too. */
static void dequantise_all_codes_are_right(void **state) {
        LkContext *c;
        const LkOps *ops = open_isa(LK_CPU_AUTO, 1, &c);
        uint8_t codes[256];
        float y[512], one = 1;

        for (unsigned i = 0; i < 256; i++)
                codes[i] = (uint8_t) i;
        for (unsigned t = 0; t < 2; t++) {
                LkMatrix w = {.data = codes,
                        .type = t ? LK_F8_E5M2 : LK_F8_E4M3,
                        .rows = 1,
                        .cols = 256,
                        .row_stride = 256,
                        .block_rows = 1,
                        .quant = {.scale = &one}};

                assert_int_equal(ops->dequantise(c, &(LkDequantise){.w = w, .y = y, .y_ld = 256}), 0);
                for (unsigned i = 0; i < 256; i++) {
                        double expected = small_float((uint8_t) i, t ? 5 : 4, t ? 2 : 3);

                        if (t && (i & 0x7f) == 0x7c)
                                assert_true(isinf(y[i]) && !signbit(y[i]) == !(i & 0x80));
                        else if ((i & 0x7f) >= (t ? 0x7d : 0x7f))
                                assert_true(isnan(y[i]));
                        else
                                assert_true((double) y[i] == expected && !signbit(y[i]) == !(i & 0x80));
                }
        }
        assert_null(ops->context_free(c));
}

/* gemm of the quantised matrix has the bits of gemm of the expanded one, whatever the rows of x. */
static void gemm_quantised_equals_gemm_of_expanded(void **state) {
        for (unsigned i = 0; i < ELEMENTSOF(cases) * ISAS * 2; i++) {
                const Case *k = cases + i / 2 / ISAS;
                uint64_t m = i % 2 ? 37 : 2, seed = i;
                CLEANUP_FREE float *x = random_aligned(m * k->cols, LK_F32, 1, &seed);
                CLEANUP_FREE float *scaled = allocate(m * k->cols * sizeof(float));
                CLEANUP_FREE float *w = allocate(k->rows * k->cols * sizeof(float));
                CLEANUP_FREE float *y = allocate(m * k->rows * sizeof(float));
                CLEANUP_FREE float *expected = allocate(m * k->rows * sizeof(float));
                LkContext *c;
                const LkOps *ops = open_isa(all_isas[i / 2 % ISAS], 1 + i % 3, &c);
                LkGemm g = {.m = m,
                        .x = x,
                        .x_type = LK_F32,
                        .x_ld = k->cols,
                        .y = y,
                        .y_type = LK_F32,
                        .y_ld = k->rows};
                QuantMatrix q;

                if (!ops)
                        continue;
                matrix_make(k, &q);
                g.w = q.w;
                assert_int_equal(ops->gemm(c, &g), 0);

                for (uint64_t j = 0; j < m * k->cols; j++)
                        scaled[j] = q.in_scale ? x[j] * (float) get(q.in_scale, LK_BF16, j % k->cols) : x[j];
                assert_int_equal(ops->dequantise(c, &(LkDequantise){.w = q.w, .y = w, .y_ld = k->cols}), 0);
                g.w = (LkMatrix){.data = w,
                        .type = LK_F32,
                        .rows = k->rows,
                        .cols = k->cols,
                        .row_stride = k->cols * sizeof(float),
                        .block_rows = k->rows};
                g.x = scaled;
                g.y = expected;
                assert_int_equal(ops->gemm(c, &g), 0);
                assert_memory_equal(y, expected, m * k->rows * sizeof(float));
                quant_matrix_done(&q);
                assert_null(ops->context_free(c));
        }
}

/* By the rule: the number of f32 times the column's, then once to bf16. */
static void expand_formats_follow_rule(void **state) {
        for (unsigned i = 0; i < ELEMENTSOF(cases) * ISAS; i++) {
                const Case *k = cases + i / ISAS;
                uint64_t n = k->rows * k->cols;
                CLEANUP_FREE uint16_t *y = guarded(n + 1, LK_BF16), *expected = guarded(n + 1, LK_BF16);
                LkContext *c;
                const LkOps *ops = open_isa(all_isas[i % ISAS], 1 + i % 3, &c);
                QuantMatrix m;

                if (!ops)
                        continue;
                matrix_make(k, &m);
                assert_int_equal(ops->expand(c, &(LkExpand){.w = m.w, .y = y}), 0);
                for (uint64_t j = 0; j < n; j++) {
                        double f = (double) quant_number(&m, j / k->cols, j % k->cols);

                        if (m.in_scale)
                                f = (double) (float) (f * get(m.in_scale, LK_BF16, j % k->cols));
                        put(expected, LK_BF16, j, f);
                        if (expected[j] != y[j] && ((expected[j] | y[j]) & 0x7fffu) != 0)
                                fail_msg("case %u: number %lu is %04x, expected %04x", i / ISAS, (unsigned long) j, y[j], expected[j]);
                }
                assert_int_equal(y[n], expected[n]);
                quant_matrix_done(&m);
                assert_null(ops->context_free(c));
        }
}

/* In bf16 a quantised matrix, in pieces or whole, has the bits of the one that was expanded before. */
static void gemm_bf16_equals_gemm_of_expand(void **state) {
        for (unsigned i = 0; i < ELEMENTSOF(cases) * ISAS * 2; i++) {
                const Case *k = cases + i / 2 / ISAS;
                uint64_t m = i % 2 ? 37 : 2, seed = i;
                CLEANUP_FREE uint16_t *x = random_aligned(m * k->cols, LK_BF16, 1, &seed);
                CLEANUP_FREE uint16_t *w = guarded(k->rows * k->cols, LK_BF16);
                CLEANUP_FREE uint16_t *y = guarded(m * k->rows, LK_BF16), *expected = guarded(m * k->rows, LK_BF16);
                LkContext *c;
                const LkOps *ops = open_isa(all_isas[i / 2 % ISAS], 1 + i % 3, &c);
                LkGemm g = {.m = m, .x = x, .x_type = LK_BF16, .x_ld = k->cols, .y = y, .y_type = LK_BF16, .y_ld = k->rows};
                QuantMatrix q;

                if (!ops)
                        continue;
                matrix_make(k, &q);
                g.w = q.w;
                assert_int_equal(ops->gemm(c, &g), 0);
                assert_int_equal(ops->expand(c, &(LkExpand){.w = q.w, .y = w}), 0);
                g.w = (LkMatrix){.data = w,
                        .type = LK_BF16,
                        .rows = k->rows,
                        .cols = k->cols,
                        .row_stride = k->cols * sizeof(uint16_t),
                        .block_rows = k->rows};
                g.y = expected;
                assert_int_equal(ops->gemm(c, &g), 0);
                assert_memory_equal(y, expected, m * k->rows * sizeof(uint16_t));
                quant_matrix_done(&q);
                assert_null(ops->context_free(c));
        }
}

static void expand_bad_argument_is_refused(void **state) {
        _Alignas(16) uint16_t y[520];
        LkContext *c;
        const LkOps *ops = open_isa(LK_CPU_AUTO, 1, &c);
        QuantMatrix m;
        LkExpand a;

        quant_matrix_make(LK_F8_E4M3, 8, 64, 0, 0, false, &m);
        a = (LkExpand){m.w, y};
        assert_int_equal(ops->expand(c, &a), 0);
        assert_int_equal(ops->expand(NULL, &a), -EINVAL);
        assert_int_equal(ops->expand(c, NULL), -EINVAL);
        a.y = NULL;
        assert_int_equal(ops->expand(c, &a), -EINVAL);
        a.y = y + 1;
        assert_int_equal(ops->expand(c, &a), -EINVAL);
        a.y = y;
        a.w.type = LK_BF16; /* is no quantised one */
        a.w.row_stride = 128;
        assert_int_equal(ops->expand(c, &a), -EINVAL);
        a.w = m.w;
        a.w.quant.scale = NULL;
        assert_int_equal(ops->expand(c, &a), -EINVAL);
        quant_matrix_done(&m);
        assert_null(ops->context_free(c));
}

/* Rows of a view, as a rank or a chunk takes them. */
static void dequantise_part_of_rows_same_bits(void **state) {
        for (unsigned i = 0; i < ELEMENTSOF(cases); i++) {
                const Case *k = cases + i;
                uint64_t begin = k->block_rows > 0 ? k->block_rows : 3;
                uint64_t n = k->block_rows > 0 ? k->block_rows : k->rows - 3;
                CLEANUP_FREE float *whole = allocate(k->rows * k->cols * sizeof(float));
                CLEANUP_FREE float *part = allocate(n * k->cols * sizeof(float));
                LkContext *c;
                const LkOps *ops = open_isa(LK_CPU_AUTO, 2, &c);
                QuantMatrix m;

                matrix_make(k, &m);
                assert_int_equal(
                        ops->dequantise(c, &(LkDequantise){.w = m.w, .y = whole, .y_ld = k->cols}), 0);
                assert_int_equal(ops->dequantise(c, &(LkDequantise){.w = lk_matrix_rows(&m.w, begin, n),
                                                            .y = part,
                                                            .y_ld = k->cols}),
                        0);
                assert_memory_equal(part, whole + begin * k->cols, n * k->cols * sizeof(float));
                quant_matrix_done(&m);
                assert_null(ops->context_free(c));
        }
}

#define REFUSED(statement)                                                                                  \
        do {                                                                                                \
                LkDequantise a = good;                                                                      \
                statement;                                                                                  \
                assert_int_equal(ops->dequantise(c, &a), -EINVAL);                                          \
        } while (0)

static void dequantise_bad_argument_is_refused(void **state) {
        float y[4096];
        LkContext *c;
        const LkOps *ops = open_isa(LK_CPU_AUTO, 1, &c);
        QuantMatrix m, n;
        LkDequantise good;

        quant_matrix_make(LK_I8, 8, 64, 4, 16, true, &m);
        quant_matrix_make(LK_NVFP4, 8, 64, 0, 0, false, &n);
        good = (LkDequantise){.w = m.w, .y = y, .y_ld = 64};
        assert_int_equal(ops->dequantise(c, &good), 0);
        assert_int_equal(ops->dequantise(NULL, &good), -EINVAL);
        assert_int_equal(ops->dequantise(c, NULL), -EINVAL);
        REFUSED(a.y = NULL);
        REFUSED(a.y_ld = 63);
        REFUSED(a.w.data = NULL);
        REFUSED(a.w.type = LK_TYPE_MAX);
        REFUSED(a.w.type = (LkType) 0);
        REFUSED(a.w.quant.scale = NULL);
        REFUSED(a.w.quant.rotation = 8);
        REFUSED(a.w.quant.rotation = 256);
        REFUSED(a.w.row_stride = 63);
        REFUSED(a.w.block_stride = a.w.block_stride + 1);
        REFUSED(a.w.quant.in_scale = ((LkVector){.data = y, .type = LK_F32, .n = 63}));
        REFUSED(a.w.type = LK_F8_E4M3); /* has a rotation */
        good.w = n.w;
        assert_int_equal(ops->dequantise(c, &good), 0);
        REFUSED(a.w.quant.block_scale = NULL);
        REFUSED(a.w.quant.block_scale_cols = 5);
        REFUSED(a.w.quant.block_scale_cols = 0);
        REFUSED(a.w.cols = 40);
        quant_matrix_done(&m);
        quant_matrix_done(&n);
        assert_null(ops->context_free(c));
}

int main(void) {
        static const struct CMUnitTest tests[] = {
                cmocka_unit_test(dequantise_formats_follow_rule),
                cmocka_unit_test(dequantise_plain_types_are_converted),
                cmocka_unit_test(dequantise_all_codes_are_right),
                cmocka_unit_test(gemm_quantised_equals_gemm_of_expanded),
                cmocka_unit_test(expand_formats_follow_rule),
                cmocka_unit_test(gemm_bf16_equals_gemm_of_expand),
                cmocka_unit_test(expand_bad_argument_is_refused),
                cmocka_unit_test(dequantise_part_of_rows_same_bits),
                cmocka_unit_test(dequantise_bad_argument_is_refused),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
