/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "kernels/cpu/cpu.h"
#include "service/h3/model-private.h"
#include "service/shared/cleanup.h"
#include "tests/unit/h3/golden.h"

/* Single layers of the quantised formats against the published code (quant_layers of the golden data). */

#define FLIPS 0.005 /* of the quantised activations, by 1: the rotation is summed in another order */
#define WEIGHTS_REL 5e-6

static const LkOps *ops;
static LkContext *context;

typedef struct Layers {
        Golden *g;
        H3TensorSet *set;
} Layers;

static void layers_open(Layers *l) {
        H3List missing = {}, wrong = {};
        H3File file = {.name = "quant_layers.safetensors"};
        Fault f = {};

        l->g = golden_open("quant_layers");
        file.bytes = l->g->bytes;
        file.size = l->g->header->data_offset;
        for (size_t i = 0; i < l->g->header->n_tensors; i++)
                file.size += l->g->header->tensors[i].size;
        if (h3_tensor_set_new(&file, 1, &l->set, &f) < 0 ||
                h3_quant_resolve(l->set, &missing, &wrong, &f) < 0 || missing.count + wrong.count > 0)
                fail_msg("%s%s%s", f.text, missing.text, wrong.text);
}

static void layers_close(Layers *l) {
        (void) h3_tensor_set_free(l->set);
        (void) golden_free(l->g);
}

static LkMatrix matrix(const Layers *l, const char *layer, LkType expected) {
        char name[100];
        H3Tensor *t;
        uint64_t cols;

        (void) snprintf(name, sizeof(name), "%s.weight", layer);
        t = h3_tensor_set_find(l->set, name);
        assert_non_null(t);
        assert_int_equal(t->matrix_type, expected);
        cols = t->entry->shape[1] * (expected == LK_NVFP4 ? 2 : 1);
        return (LkMatrix){.data = t->data,
                .type = t->matrix_type,
                .rows = t->entry->shape[0],
                .cols = cols,
                .row_stride = lk_row_size(t->matrix_type, cols),
                .block_rows = t->entry->shape[0],
                .quant = t->quant};
}

static const void *data(const Layers *l, const char *layer, const char *part, StType type, uint64_t *ret_n) {
        char name[100];

        (void) snprintf(name, sizeof(name), "%s.%s", layer, part);
        return golden_data(l->g, name, type, ret_n);
}

static bool has(const Layers *l, const char *layer, const char *part) {
        char name[100];

        (void) snprintf(name, sizeof(name), "%s.%s", layer, part);
        return st_header_find(l->g->header, name);
}

static void check_rel(const char *layer, const float *got, const float *expected, uint64_t n) {
        double rel = golden_distance(got, expected, n, NULL);

        if (!(rel <= WEIGHTS_REL))
                fail_msg("%s: rel %g", layer, rel);
}

static void check_quantiser(const Layers *l, const char *layer, const LkMatrix *w, bool swiglu) {
        uint64_t n, rows, flips = 0;
        const uint16_t *x = data(l, layer, "x", ST_BF16, NULL);
        const int8_t *xq = data(l, layer, "xq", ST_I8, &n);
        const float *scale = data(l, layer, "x_scale", ST_F32, &rows);
        CLEANUP_FREE int8_t *q = malloc(n);
        CLEANUP_FREE float *s = malloc(rows * sizeof(float));
        LkQuantise a = {.x_type = LK_BF16,
                .m = rows,
                .k = w->cols,
                .x = x,
                .x_ld = swiglu ? 2 * w->cols : w->cols,
                .up = swiglu ? x + w->cols : NULL,
                .up_ld = 2 * w->cols,
                .rotation = w->quant.rotation,
                .q = q,
                .q_ld = w->cols,
                .scale = s};

        assert_int_equal(ops->quantise(context, &a), 0);
        for (uint64_t i = 0; i < n; i++) {
                if (abs(q[i] - xq[i]) > 1)
                        fail_msg("%s: %lu is %d, expected %d", layer, (unsigned long) i, q[i], xq[i]);
                flips += q[i] != xq[i];
        }
        print_message("%s: %lu of %lu quantised numbers differ by one\n", layer, (unsigned long) flips,
                (unsigned long) n);
        assert_true((double) flips <= FLIPS * (double) n);
        for (uint64_t i = 0; i < rows; i++)
                assert_true(fabs((double) s[i] - (double) scale[i]) <= 1e-6 * (double) scale[i]);
}

static void check_product(const Layers *l, const char *layer, const LkMatrix *w) {
        uint64_t rows, n;
        const float *scale = data(l, layer, "x_scale", ST_F32, &rows), one = 1;
        const int32_t *acc = data(l, layer, "acc", ST_I32, &n);
        const uint16_t *y = data(l, layer, "y", ST_BF16, NULL);
        CLEANUP_FREE float *sums = malloc(n * sizeof(float)), *ones = malloc(rows * sizeof(float));
        CLEANUP_FREE uint16_t *got = malloc(n * sizeof(uint16_t));
        LkGemmI8 g = {.m = rows,
                .x = data(l, layer, "xq", ST_I8, NULL),
                .x_ld = w->cols,
                .x_scale = ones,
                .w = *w,
                .y = sums,
                .y_type = LK_F32,
                .y_ld = w->rows};

        for (uint64_t i = 0; i < rows; i++)
                ones[i] = 1;
        g.w.quant.scale = &one;
        g.w.quant.scale_stride = 0;
        assert_int_equal(ops->gemm_i8(context, &g), 0);
        for (uint64_t i = 0; i < n; i++) {
                assert_true(abs(acc[i]) < 1 << 24); /* exact in f32 */
                assert_true(sums[i] == (float) acc[i]);
        }

        g.w = *w;
        g.x_scale = scale;
        g.y = got;
        g.y_type = LK_BF16;
        if (has(l, layer, "bias"))
                g.bias = (LkVector){data(l, layer, "bias", ST_BF16, NULL), LK_BF16, w->rows};
        assert_int_equal(ops->gemm_i8(context, &g), 0);
        assert_memory_equal(got, y, n * sizeof(uint16_t));
}

static void check_weights(const Layers *l, const char *layer, const LkMatrix *w, bool swiglu) {
        uint64_t rows, n, n_dequant;
        const uint16_t *x = data(l, layer, "x", ST_BF16, &n);
        const float *dequant = data(l, layer, "dequant", ST_F32, &n_dequant);
        const float *expected = data(l, layer, "y_weights_only", ST_F32, &rows);
        CLEANUP_FREE float *wide = malloc(n * sizeof(float)), *act = malloc(n * sizeof(float));
        CLEANUP_FREE float *weights = malloc(n_dequant * sizeof(float)), *y = malloc(rows * sizeof(float));
        uint64_t m = rows / w->rows;
        LkGemm g = {.m = m,
                .x = swiglu ? act : wide,
                .x_type = LK_F32,
                .x_ld = w->cols,
                .w = *w,
                .y = y,
                .y_type = LK_F32,
                .y_ld = w->rows};

        assert_int_equal(n_dequant, w->rows * w->cols);
        assert_int_equal(
                ops->dequantise(context, &(LkDequantise){.w = *w, .y = weights, .y_ld = w->cols}), 0);
        check_rel(layer, weights, dequant, n_dequant);

        assert_int_equal(ops->convert(context, &(LkConvert){.m = 1,
                                                       .n = n,
                                                       .x = x,
                                                       .x_type = LK_BF16,
                                                       .x_ld = n,
                                                       .y = wide,
                                                       .y_type = LK_F32,
                                                       .y_ld = n}),
                0);
        if (swiglu)
                assert_int_equal(ops->swiglu(context, &(LkSwiglu){.type = LK_F32,
                                                              .m = m,
                                                              .n = w->cols,
                                                              .gate = wide,
                                                              .up = wide + w->cols,
                                                              .gate_ld = 2 * w->cols,
                                                              .up_ld = 2 * w->cols,
                                                              .y = act,
                                                              .y_ld = w->cols}),
                        0);
        if (has(l, layer, "bias"))
                g.bias = (LkVector){data(l, layer, "bias", ST_BF16, NULL), LK_BF16, w->rows};
        assert_int_equal(ops->gemm(context, &g), 0);
        check_rel(layer, y, expected, rows);
}

static void quant_int8_layers_match(void **state) {
        static const char *const names[] = {
                "int8_g256", "int8_g64_bias", "int8_g16", "int8_plain", "int8_swiglu", "int8_zero_row"};
        static const uint32_t rotations[] = {256, 64, 16, 0, 64, 64};
        Layers l;

        layers_open(&l);
        for (size_t i = 0; i < ELEMENTSOF(names); i++) {
                LkMatrix w = matrix(&l, names[i], LK_I8);
                bool swiglu = strcmp(names[i], "int8_swiglu") == 0;

                assert_int_equal(w.quant.rotation, rotations[i]);
                check_quantiser(&l, names[i], &w, swiglu);
                check_product(&l, names[i], &w);
                check_weights(&l, names[i], &w, swiglu);
        }
        layers_close(&l);
}

static void quant_fp8_layers_are_exact(void **state) {
        Layers l;

        layers_open(&l);
        for (size_t i = 0; i < 2; i++) {
                const char *layer = i ? "fp8_e5m2" : "fp8_e4m3";
                LkMatrix w = matrix(&l, layer, i ? LK_F8_E5M2 : LK_F8_E4M3);
                CLEANUP_FREE float *y = malloc(w.rows * w.cols * sizeof(float));

                assert_int_equal(
                        ops->dequantise(context, &(LkDequantise){.w = w, .y = y, .y_ld = w.cols}), 0);
                assert_memory_equal(
                        y, data(&l, layer, "dequant", ST_F32, NULL), w.rows * w.cols * sizeof(float));
        }
        layers_close(&l);
}

static void quant_fp8_codes_match(void **state) {
        const float one = 1, *values;
        float y[256];
        Layers l;
        LkMatrix w;

        layers_open(&l);
        values = data(&l, "fp8_e4m3", "all_values", ST_F32, NULL);
        w = (LkMatrix){.data = data(&l, "fp8_e4m3", "all_codes", ST_F8_E4M3, NULL),
                .type = LK_F8_E4M3,
                .rows = 1,
                .cols = 256,
                .row_stride = 256,
                .block_rows = 1,
                .quant = {.scale = &one}};
        assert_int_equal(ops->dequantise(context, &(LkDequantise){.w = w, .y = y, .y_ld = 256}), 0);
        for (size_t i = 0; i < 256; i++)
                assert_true(isnan(values[i]) ? isnan(y[i]) : y[i] == values[i]);
        layers_close(&l);
}

static void quant_nvfp4_layers_match(void **state) {
        static const char *const names[] = {"nvfp4_small", "nvfp4_tiles"};
        Layers l;

        layers_open(&l);
        for (size_t i = 0; i < ELEMENTSOF(names); i++) {
                LkMatrix w = matrix(&l, names[i], LK_NVFP4);
                CLEANUP_FREE float *expanded = malloc(w.rows * w.cols * sizeof(float));
                uint64_t n;
                const float *expected = data(&l, names[i], "y", ST_F32, &n);
                CLEANUP_FREE float *y = malloc(n * sizeof(float));
                LkGemm g = {.m = n / w.rows,
                        .x = data(&l, names[i], "x", ST_BF16, NULL),
                        .x_type = LK_BF16,
                        .x_ld = w.cols,
                        .w = w,
                        .y = y,
                        .y_type = LK_F32,
                        .y_ld = w.rows};

                assert_int_equal(
                        ops->dequantise(context, &(LkDequantise){.w = w, .y = expanded, .y_ld = w.cols}), 0);
                assert_memory_equal(expanded, data(&l, names[i], "dequant", ST_F32, NULL),
                        w.rows * w.cols * sizeof(float));
                assert_int_equal(ops->gemm(context, &g), 0);
                check_rel(names[i], y, expected, n);
        }
        layers_close(&l);
}

static int setup(void **state) {
        ops = lk_cpu_ops(LK_CPU_AUTO);
        return ops->context_new(2, &context);
}

static int teardown(void **state) {
        return ops->context_free(context) ? -1 : 0;
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(quant_int8_layers_match),
                cmocka_unit_test(quant_fp8_layers_are_exact),
                cmocka_unit_test(quant_fp8_codes_match),
                cmocka_unit_test(quant_nvfp4_layers_match),
        };

        return cmocka_run_group_tests(tests, setup, teardown);
}
