/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/unit/h3/text-quantised.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/cpu.h"
#include "service/h3/number.h"
#include "service/shared/cleanup.h"

static const char *const matrices[] = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
        "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"};

static void *keep(TextQuantised *b, uint64_t size) {
        void *p = calloc(1, size);

        assert_non_null(p);
        assert_true(b->n_memory < ELEMENTSOF(b->memory));
        b->memory[b->n_memory++] = p;
        return p;
}

/* The tensor's numbers. */
static float *numbers(TextQuantised *b, const char *name, uint64_t *ret_rows, uint64_t *ret_cols) {
        const StTensor *t = checkpoint_find(b->original, name);
        const void *data = checkpoint_data(b->original, name);
        uint64_t n = t->shape[0] * t->shape[1];
        float *x = keep(b, n * sizeof(float));

        for (uint64_t i = 0; i < n; i++)
                x[i] = h3_number(data, LK_BF16, i);
        *ret_rows = t->shape[0];
        *ret_cols = t->shape[1];
        return x;
}

static void add_marker(TextQuantised *b, const char *prefix, const char *json) {
        char name[160];

        (void) snprintf(name, sizeof(name), "%.100s.comfy_quant", prefix);
        checkpoint_add(b->quantised, name, ST_U8, 1, strlen(json), 0, json);
}

static void make_int8(TextQuantised *b, const char *prefix, uint32_t rotation) {
        char name[160], *json = keep(b, 120);
        uint64_t rows, cols;

        (void) snprintf(name, sizeof(name), "%.100s.weight", prefix);
        float *x = numbers(b, name, &rows, &cols), *scale = keep(b, rows * sizeof(float));
        int8_t *q = keep(b, rows * cols);
        const LkQuantise args = {.x_type = LK_F32,
                .m = rows,
                .k = cols,
                .x = x,
                .x_ld = cols,
                .rotation = rotation,
                .q = q,
                .q_ld = cols,
                .scale = scale};

        assert_int_equal(b->ops->quantise(b->context, &args), 0);
        checkpoint_replace(b->quantised, name, ST_I8, 2, rows, cols, q);
        (void) snprintf(name, sizeof(name), "%.100s.weight_scale", prefix);
        checkpoint_add(b->quantised, name, ST_F32, 2, rows, 1, scale);
        (void) snprintf(json, 120,
                rotation ? "{\"format\":\"int8_tensorwise\",\"convrot\":true,\"convrot_groupsize\":%u}"
                         : "{\"format\":\"int8_tensorwise\"}",
                rotation);
        add_marker(b, prefix, json);
}

static float e4m3(unsigned code) {
        unsigned exponent = code >> 3 & 15, fraction = code & 7;

        return exponent == 0 ? ldexpf((float) fraction, -9)
                             : ldexpf((float) (8 + fraction), (int) exponent - 10);
}

static unsigned nearest_e4m3(float x) {
        unsigned best = 1;

        for (unsigned code = 1; code < 0x7f; code++)
                if (fabsf(e4m3(code) - x) < fabsf(e4m3(best) - x))
                        best = code;
        return best;
}

static uint8_t nearest_nibble(float x) {
        static const float values[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
        uint8_t best = 0;

        for (uint8_t i = 1; i < 8; i++)
                if (fabsf(values[i] - fabsf(x)) < fabsf(values[best] - fabsf(x)))
                        best = i;
        return x < 0 ? best | 8 : best;
}

/* With an input scale as AWQ has it: the matrix is divided by what the input is multiplied by. */
static void make_nvfp4(TextQuantised *b, const char *prefix, bool scaled) {
        char name[160];
        uint64_t rows, cols;

        (void) snprintf(name, sizeof(name), "%.100s.weight", prefix);
        float *x = numbers(b, name, &rows, &cols), *whole = keep(b, sizeof(float));
        uint64_t padded = (cols / 16 + 3) / 4 * 4;
        uint8_t *q = keep(b, rows * cols / 2), *blocks = keep(b, (rows + 127) / 128 * 128 * padded);
        uint16_t *in = keep(b, cols * sizeof(uint16_t));

        *whole = 0x1p-6f;
        for (uint64_t k = 0; k < cols; k++) /* 0.5 to 2, or 1 */
                in[k] = (uint16_t) (scaled ? 0x3f00 + k * 37 % 11 * 0x17 : 0x3f80);
        for (uint64_t r = 0; r < rows; r++)
                for (uint64_t c = 0; c < cols / 16; c++) {
                        uint64_t tile = r / 128 * (padded / 4) + c / 4;
                        float w[16], most = 0, step;

                        for (uint64_t i = 0; i < 16; i++) {
                                w[i] = x[r * cols + c * 16 + i] / h3_number(in, LK_BF16, c * 16 + i);
                                most = fmaxf(most, fabsf(w[i]));
                        }
                        unsigned code = nearest_e4m3(most / 6 / *whole);

                        blocks[tile * 512 + r % 32 * 16 + r % 128 / 32 * 4 + c % 4] = (uint8_t) code;
                        step = e4m3(code) * *whole;
                        for (uint64_t i = 0; i < 16; i++)
                                q[(r * cols + c * 16 + i) / 2] |=
                                        (uint8_t) (nearest_nibble(w[i] / step) << (i % 2 ? 0 : 4));
                }
        checkpoint_replace(b->quantised, name, ST_U8, 2, rows, cols / 2, q);
        (void) snprintf(name, sizeof(name), "%.100s.weight_scale", prefix);
        checkpoint_add(b->quantised, name, ST_F8_E4M3, 2, (rows + 127) / 128 * 128, padded, blocks);
        (void) snprintf(name, sizeof(name), "%.100s.weight_scale_2", prefix);
        checkpoint_add(b->quantised, name, ST_F32, 0, 0, 0, whole);
        (void) snprintf(name, sizeof(name), "%.100s.pre_quant_scale", prefix);
        if (scaled)
                checkpoint_add(b->quantised, name, ST_BF16, 1, cols, 0, in);
        add_marker(b, prefix, "{\"format\":\"nvfp4\"}");
}

static H3TextModel *open_model(TextQuantised *b, const Checkpoint *c, unsigned i) {
        uint64_t size;
        Fault f = {};

        b->bytes[i] = checkpoint_write(c, &size);
        if (h3_text_open((const H3File[]){{"m.safetensors", b->bytes[i], size},
                                 {"config.json", b->config, strlen(b->config)}},
                    2, b->ops, &b->models[i], &f) < 0)
                fail_msg("%s", f.text);
        return b->models[i];
}

/* The matrix that the quantised model has, as F32 with the input scale multiplied in. */
static void expand(TextQuantised *b, const char *name, const LkMatrix *w) {
        float *y = keep(b, w->rows * w->cols * sizeof(float));
        const LkDequantise args = {.w = *w, .y = y, .y_ld = w->cols};

        assert_int_equal(b->ops->dequantise(b->context, &args), 0);
        for (uint64_t i = 0; w->quant.in_scale.data && i < w->rows * w->cols; i++)
                y[i] *= h3_number(w->quant.in_scale.data, w->quant.in_scale.type, i % w->cols);
        checkpoint_replace(b->expanded, name, ST_F32, 2, w->rows, w->cols, y);
}

TextQuantised *text_quantised_new(TextFormat format) {
        TextQuantised *b = calloc(1, sizeof(*b));
        H3TextModel *m;
        uint64_t size;
        char name[160];

        assert_non_null(b);
        b->ops = lk_cpu_ops(LK_CPU_AUTO);
        assert_int_equal(b->ops->context_new(1, &b->context), 0);
        b->config = (char *) golden_read(NULL, "text/encoder/config.json", &size);
        b->original = checkpoint_of(NULL, "text/encoder/model.comfy.safetensors");
        b->quantised = checkpoint_of(NULL, "text/encoder/model.comfy.safetensors");
        b->expanded = checkpoint_of(NULL, "text/encoder/model.comfy.safetensors");

        if (format == TEXT_NVFP4_TABLE)
                make_nvfp4(b, "model.embed_tokens", false);
        else
                make_int8(b, "model.embed_tokens", 0);
        for (unsigned i = 0; i < 4; i++)
                for (size_t j = 0; j < ELEMENTSOF(matrices); j++) {
                        (void) snprintf(name, sizeof(name), "model.layers.%u.%s", i, matrices[j]);
                        if (format != TEXT_INT8)
                                make_nvfp4(b, name, true);
                        else
                                make_int8(b, name, j == 3 ? 256 : 16);
                }
        (void) open_model(b, b->original, 0);
        m = open_model(b, b->quantised, 1);
        expand(b, "model.embed_tokens.weight", &m->embed);
        for (unsigned i = 0; i < 4; i++) {
                const H3TextLayer *l = m->layers + i;
                const LkMatrix *all[] = {&l->q, &l->k, &l->v, &l->out, &l->gate, &l->up, &l->down};

                for (size_t j = 0; j < ELEMENTSOF(matrices); j++) {
                        (void) snprintf(name, sizeof(name), "model.layers.%u.%s.weight", i, matrices[j]);
                        expand(b, name, all[j]);
                }
        }
        (void) open_model(b, b->expanded, 2);
        return b;
}

void text_quantised_freep(TextQuantised **p) {
        TextQuantised *b = *p;

        for (unsigned i = 0; i < 3; i++) {
                (void) h3_text_free(b->models[i]);
                free(b->bytes[i]);
        }
        (void) checkpoint_free(b->original);
        (void) checkpoint_free(b->quantised);
        (void) checkpoint_free(b->expanded);
        (void) b->ops->context_free(b->context);
        for (size_t i = 0; i < b->n_memory; i++)
                free(b->memory[i]);
        free(b->config);
        free(b);
}
