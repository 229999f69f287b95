/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/unit/worker/toy.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "service/shared/cleanup.h"

#define HIDDEN 64
#define HEADS 56
#define HEAD_DIM 8
#define FFN 96

static uint32_t seed;

/* -1 .. 1 */
static float random_float(void) {
        seed = seed * 1664525u + 1013904223u;
        return (float) (int32_t) seed / 2147483648.0f;
}

static void *keep(Toy *t, size_t size) {
        void *p = malloc(size);

        assert_true(p && t->n_memory < ELEMENTSOF(t->memory));
        t->memory[t->n_memory++] = p;
        return p;
}

static LkVector vector(Toy *t, uint64_t n, float middle, float around) {
        float *x = keep(t, n * sizeof(float));

        for (uint64_t i = 0; i < n; i++)
                x[i] = middle + around * random_float();
        return (LkVector){x, LK_F32, n};
}

static LkMatrix matrix(Toy *t, uint64_t rows, uint64_t cols) {
        LkVector x = vector(t, rows * cols, 0, 0.15f);

        return (LkMatrix){.data = x.data,
                .type = LK_F32,
                .rows = rows,
                .cols = cols,
                .row_stride = cols * sizeof(float),
                .block_rows = rows,
                .block_stride = rows * cols * sizeof(float)};
}

static LkMatrix matrix_int8(Toy *t, uint64_t rows, uint64_t cols) {
        int8_t *x = keep(t, rows * cols);

        for (uint64_t i = 0; i < rows * cols; i++)
                x[i] = (int8_t) (127 * random_float());
        return (LkMatrix){.data = x,
                .type = LK_I8,
                .rows = rows,
                .cols = cols,
                .row_stride = cols,
                .block_rows = rows,
                .block_stride = rows * cols,
                .quant = {.scale = vector(t, rows, 0.001f, 0.0005f).data,
                        .scale_stride = sizeof(float),
                        .rotation = 16}};
}

static H3Block block(Toy *t, bool int8) {
        LkMatrix (*make)(Toy *t, uint64_t rows, uint64_t cols) = int8 ? matrix_int8 : matrix;
        uint64_t inner = HEADS * HEAD_DIM;

        return (H3Block){
                .norm1 = vector(t, HIDDEN, 1, 0.2f),
                .norm2 = vector(t, HIDDEN, 1, 0.2f),
                .attn = {.q = make(t, inner, HIDDEN),
                        .k = make(t, inner, HIDDEN),
                        .v = make(t, inner, HIDDEN),
                        .out = make(t, HIDDEN, inner),
                        .q_norm = vector(t, HEAD_DIM, 1, 0.2f),
                        .k_norm = vector(t, HEAD_DIM, 1, 0.2f)},
                .mlp = {make(t, FFN, HIDDEN), make(t, FFN, HIDDEN), make(t, HIDDEN, FFN)},
                .adaln = matrix(t, H3_TAGS * 6 * HIDDEN, 32),
                .adaln_bias = vector(t, H3_TAGS * 6 * HIDDEN, 0, 0.2f),
        };
}

Toy *toy_new(ToyKind kind) {
        Toy *t = calloc(1, sizeof(*t));
        H3Model *m;

        assert_non_null(t);
        seed = 7;
        m = &t->model;
        t->compute = kind == TOY_F32 ? H3_COMPUTE_F32 : H3_COMPUTE_BF16;
        t->blocks[0] = block(t, kind >= TOY_INT8);
        t->blocks[1] = block(t, kind == TOY_INT8);
        *m = (H3Model){
                .config = {.layers = 2,
                        .hidden = HIDDEN,
                        .heads = HEADS,
                        .head_dim = HEAD_DIM,
                        .inner = HEADS * HEAD_DIM,
                        .ffn = FFN,
                        .video_channels = 24,
                        .audio_channels = 32,
                        .patch_h = 2,
                        .patch_w = 2,
                        .text_dim = 16,
                        .time_freq_dim = 16,
                        .time_hidden = 32,
                        .time_dim = 32,
                        .rope_freqs = 1,
                        .rope_inv_freq = {1.0f},
                        .eps = 1e-5f},
                .blocks = t->blocks,
                .video_in = matrix(t, HIDDEN, 96),
                .video_in_bias = vector(t, HIDDEN, 0, 0.1f),
                .audio_in = matrix(t, HIDDEN, 32),
                .audio_in_bias = vector(t, HIDDEN, 0, 0.1f),
                .time_1 = matrix(t, 32, 16),
                .time_1_bias = vector(t, 32, 0, 0.1f),
                .time_2 = matrix(t, 32, 32),
                .time_2_bias = vector(t, 32, 0, 0.1f),
                .final_norm = vector(t, HIDDEN, 1, 0.2f),
                .final_adaln = matrix(t, 2 * HIDDEN, 32),
                .final_adaln_bias = vector(t, 2 * HIDDEN, 0, 0.1f),
                .video_out = matrix(t, 96, HIDDEN),
                .video_out_bias = vector(t, 96, 0, 0.1f),
                .audio_out = matrix(t, 32, HIDDEN),
                .audio_out_bias = vector(t, 32, 0, 0.1f),
                .int8_cols = kind >= TOY_INT8 ? HEADS * HEAD_DIM : 0,
                .weight_bytes = 1000000,
        };
        return t;
}

void toy_add_gates(Toy *t, bool like_q) {
        for (uint32_t i = 0; i < 2; i++) {
                bool int8 = (t->blocks[i].attn.q.type == LK_I8) == like_q;

                t->blocks[i].attn.gate = (int8 ? matrix_int8 : matrix)(t, HEADS * HEAD_DIM, HIDDEN);
        }
        t->model.gated = true;
        t->model.int8_cols = t->model.int8_cols > 0 || !like_q ? HEADS * HEAD_DIM : 0;
}

Toy *toy_free(Toy *t) {
        if (!t)
                return NULL;
        for (size_t i = 0; i < t->n_memory; i++)
                free(t->memory[i]);
        free(t);
        return NULL;
}

void toy_freep(Toy **t) {
        (void) toy_free(*t);
}

static float *latent(uint64_t n) {
        float *x = malloc(n * sizeof(float));

        assert_non_null(x);
        for (uint64_t i = 0; i < n; i++)
                x[i] = random_float();
        return x;
}

ToyStep *toy_step_new(
        const Toy *t, uint64_t text, uint64_t audio, uint64_t frames, uint64_t height, uint64_t width) {
        const H3Shape shape = {
                .text_rows = text, .frames = frames, .height = height, .width = width, .audio = audio};
        ToyStep *s = calloc(1, sizeof(*s));
        float *hidden;
        Fault f = {};

        assert_non_null(s);
        seed = (uint32_t) (text * 31 + audio * 17 + frames);
        if (h3_layout_new(&t->model.config, &shape, NULL, &s->layout, &f) < 0)
                fail_msg("toy: %s", f.text);
        s->n_video = 24 * frames * height * width;
        s->n_audio = 32 * 2 * audio;
        s->video = latent(s->n_video);
        s->audio = latent(s->n_audio);
        hidden = latent(text * HIDDEN);
        s->text = hidden;
        if (t->compute == H3_COMPUTE_BF16) /* the upper halves, in place */
                for (uint64_t i = 0; i < text * HIDDEN; i++) {
                        uint32_t bits;
                        uint16_t half;

                        memcpy(&bits, hidden + i, sizeof(bits));
                        half = (uint16_t) (bits >> 16);
                        memcpy((uint8_t *) s->text + 2 * i, &half, sizeof(half));
                }
        s->in = (H3StepInput){
                .compute = t->compute,
                .layout = s->layout,
                .refined_text = s->text,
                .video = s->video,
                .audio = s->audio,
                .sigma_video = 0.75f,
                .sigma_audio = 0.5f,
        };
        return s;
}

ToyStep *toy_step_of_rows(const Toy *t, uint64_t rows, uint64_t audio) {
        assert_true(rows > 1 + 2 * audio);
        return toy_step_new(t, 1, audio, rows - 1 - 2 * audio, 2, 2);
}

ToyStep *toy_step_free(ToyStep *s) {
        if (!s)
                return NULL;
        (void) h3_layout_free(s->layout);
        free(s->video);
        free(s->audio);
        free(s->text);
        free(s);
        return NULL;
}

void toy_step_freep(ToyStep **s) {
        (void) toy_step_free(*s);
}
