/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/unit/h3/oracle.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "service/shared/cleanup.h"
#include "tests/unit/h3/golden.h"

#define HIDDEN 64
#define HEADS 8
#define HEAD_DIM 128
#define INNER (HEADS * HEAD_DIM)
#define FFN 96
#define TIME_FREQ 256
#define TIME_HIDDEN 96
#define TIME_DIM 32
#define EPS 1e-5

/* A weight by name, widened, freed by the caller. */
static double *weight(const Golden *g, const char *prefix, const char *name, uint64_t n) {
        char full[128];
        const StTensor *t;
        double *w = malloc(n * sizeof(*w));

        (void) snprintf(full, sizeof(full), "%s%s", prefix, name);
        t = golden_tensor(g, full);
        assert_non_null(w);
        assert_int_equal(t->size, n * st_type_size(t->type));
        for (uint64_t i = 0; i < n; i++) {
                const uint8_t *at = g->bytes + t->offset + i * st_type_size(t->type);
                uint32_t bits = 0;
                float f;

                memcpy(t->type == ST_BF16 ? (uint8_t *) &bits + 2 : (uint8_t *) &bits, at,
                        st_type_size(t->type));
                memcpy(&f, &bits, sizeof(f));
                w[i] = f;
        }
        return w;
}

/* y[m, out] = x[m, in] . w^T + bias; x_ld numbers from one x to the next. */
static void linear(const Golden *g, const char *prefix, const char *name, bool has_bias, uint64_t m,
        const double *x, uint64_t in, uint64_t x_ld, uint64_t out, double *y) {
        char tensor[64];
        CLEANUP_FREE double *w = NULL, *bias = NULL;

        (void) snprintf(tensor, sizeof(tensor), "%s.weight", name);
        w = weight(g, prefix, tensor, in * out);
        (void) snprintf(tensor, sizeof(tensor), "%s.bias", name);
        bias = has_bias ? weight(g, prefix, tensor, out) : calloc(out, sizeof(double));
        assert_non_null(bias);
        for (uint64_t i = 0; i < m; i++)
                for (uint64_t j = 0; j < out; j++) {
                        double sum = bias[j];

                        for (uint64_t k = 0; k < in; k++)
                                sum += x[i * x_ld + k] * w[j * in + k];
                        y[i * out + j] = sum;
                }
}

static double silu(double x) {
        return x / (1 + exp(-x));
}

static void rms(const double *x, const double *w, uint64_t n, double *y) {
        double sum = 0;

        for (uint64_t i = 0; i < n; i++)
                sum += x[i] * x[i];
        for (uint64_t i = 0; i < n; i++)
                y[i] = x[i] / sqrt(sum / (double) n + EPS) * w[i];
}

/* temb of a row, [TIME_DIM] */
static void time_embedding(const Golden *g, double t, double *ret) {
        double e[TIME_FREQ], hidden[TIME_HIDDEN];

        for (int i = 0; i < TIME_FREQ / 2; i++) {
                double angle = t * exp(-log(10000.0) * i / (TIME_FREQ / 2));

                e[i] = cos(angle);
                e[i + TIME_FREQ / 2] = sin(angle);
        }
        linear(g, "time_embedder.", "proj_in", true, 1, e, TIME_FREQ, TIME_FREQ, TIME_HIDDEN, hidden);
        for (int i = 0; i < TIME_HIDDEN; i++)
                hidden[i] = silu(hidden[i]);
        linear(g, "time_embedder.", "proj_out", true, 1, hidden, TIME_HIDDEN, TIME_HIDDEN, TIME_DIM, ret);
        for (int i = 0; i < TIME_DIM; i++)
                ret[i] = silu(ret[i]);
}

/* Rotates one head; positions and angles are f32 by definition. */
static void rope(double *head, const OracleRow *row) {
        for (int i = 0; i < 48; i++) {
                float inverse = (float) pow(10000.0, -2.0 * (i % 16) / 32.0);
                double angle = (double) ((float) row->position[i / 16] * inverse);
                double a = head[i], b = head[i + 48];

                head[i] = a * cos(angle) - b * sin(angle);
                head[i + 48] = b * cos(angle) + a * sin(angle);
        }
}

static void attend(const double *qkv, uint64_t n, uint64_t head, double *o) {
        CLEANUP_FREE double *p = calloc(n, sizeof(double));

        assert_non_null(p);
        for (uint64_t i = 0; i < n; i++) {
                const double *q = qkv + i * 3 * INNER + head * HEAD_DIM;
                double sum = 0;

                for (uint64_t j = 0; j < n; j++) {
                        const double *k = qkv + j * 3 * INNER + INNER + head * HEAD_DIM;
                        double dot = 0;

                        for (int d = 0; d < HEAD_DIM; d++)
                                dot += q[d] * k[d];
                        p[j] = exp(dot / sqrt(HEAD_DIM)); /* normed rows: the exponent stays small */
                        sum += p[j];
                }
                for (int d = 0; d < HEAD_DIM; d++) {
                        double value = 0;

                        for (uint64_t j = 0; j < n; j++)
                                value += p[j] * qkv[j * 3 * INNER + 2 * INNER + head * HEAD_DIM + d];
                        o[i * INNER + head * HEAD_DIM + d] = value / sum;
                }
        }
}

/* h[n, HIDDEN] to attn(h). rows: NULL without rope. */
static void attention(const Golden *g, const char *prefix, const OracleRow *rows, uint64_t n,
        const double *h, double *ret) {
        CLEANUP_FREE double *qkv = calloc(n * 3 * INNER, sizeof(double)),
                            *o = calloc(n * INNER, sizeof(double));
        CLEANUP_FREE double *q_norm = weight(g, prefix, "attn.q_norm.weight", HEAD_DIM),
                            *k_norm = weight(g, prefix, "attn.k_norm.weight", HEAD_DIM);

        assert_true(qkv && o);
        linear(g, prefix, "attn.qkv_proj", false, n, h, HIDDEN, HIDDEN, 3 * INNER, qkv);
        for (uint64_t i = 0; i < n; i++)
                for (uint64_t part = 0; part < 2 * HEADS; part++) {
                        double *head = qkv + i * 3 * INNER + part * HEAD_DIM;

                        rms(head, part < HEADS ? q_norm : k_norm, HEAD_DIM, head);
                        if (rows)
                                rope(head, rows + i);
                }
        for (uint64_t head = 0; head < HEADS; head++)
                attend(qkv, n, head, o);
        linear(g, prefix, "attn.out_proj", false, n, o, INNER, INNER, HIDDEN, ret);
}

static void mlp(const Golden *g, const char *prefix, uint64_t n, const double *h, double *ret) {
        CLEANUP_FREE double *wide = calloc(n * 2 * FFN, sizeof(double));

        assert_non_null(wide);
        linear(g, prefix, "mlp.fc1", false, n, h, HIDDEN, HIDDEN, 2 * FFN, wide);
        for (uint64_t i = 0; i < n; i++)
                for (int j = 0; j < FFN; j++)
                        wide[i * 2 * FFN + j] = silu(wide[i * 2 * FFN + j]) * wide[i * 2 * FFN + FFN + j];
        linear(g, prefix, "mlp.fc2", false, n, wide, FFN, 2 * FFN, HIDDEN, ret);
}

/* x += branch(norm(x)), modulated by chunks 3 * which .. of mod [n, 6 * HIDDEN] if there is one. */
static void branch(const Golden *g, const char *prefix, int which, const OracleRow *rows, uint64_t n,
        const double *mod, double *x) {
        CLEANUP_FREE double *h = calloc(n * HIDDEN, sizeof(double)), *y = calloc(n * HIDDEN, sizeof(double));
        CLEANUP_FREE double *norm = weight(g, prefix, which == 0 ? "norm1.weight" : "norm2.weight", HIDDEN);

        assert_true(h && y);
        for (uint64_t i = 0; i < n; i++) {
                const double *m = mod ? mod + i * 6 * HIDDEN + (uint64_t) which * 3 * HIDDEN : NULL;

                rms(x + i * HIDDEN, norm, HIDDEN, h + i * HIDDEN);
                for (int j = 0; m && j < HIDDEN; j++)
                        h[i * HIDDEN + j] = h[i * HIDDEN + j] * (1 + m[HIDDEN + j]) + m[j];
        }
        if (which == 0)
                attention(g, prefix, mod ? rows : NULL, n, h, y);
        else
                mlp(g, prefix, n, h, y);
        for (uint64_t i = 0; i < n * HIDDEN; i++)
                x[i] += y[i] * (mod ? mod[i / HIDDEN * 6 * HIDDEN + (uint64_t) which * 3 * HIDDEN +
                                              2 * HIDDEN + i % HIDDEN]
                                    : 1);
}

static void block(
        const Golden *g, int layer, const OracleRow *rows, uint64_t n, const double *time, double *x) {
        CLEANUP_FREE double *all = calloc(n * 18 * HIDDEN, sizeof(double)),
                            *mod = calloc(n * 6 * HIDDEN, sizeof(double));
        char prefix[32];

        assert_true(all && mod);
        (void) snprintf(prefix, sizeof(prefix), "blocks.%d.", layer);
        linear(g, prefix, "adaln_proj.linear", true, n, time, TIME_DIM, TIME_DIM, 18 * HIDDEN, all);
        for (uint64_t i = 0; i < n; i++)
                memcpy(mod + i * 6 * HIDDEN, all + i * 18 * HIDDEN + rows[i].tag * 6 * HIDDEN,
                        6 * HIDDEN * sizeof(double));
        branch(g, prefix, 0, rows, n, mod, x);
        branch(g, prefix, 1, rows, n, mod, x);
}

static void embed(const Golden *g, const OracleRow *rows, uint64_t n_text, uint64_t n, double *x) {
        CLEANUP_FREE double *norm = weight(g, "token_refiner.", "final_norm.weight", HIDDEN);

        for (uint64_t i = 0; i < n; i++) {
                OracleKind kind = rows[i].kind;

                linear(g, "",
                        kind == ORACLE_TEXT    ? "condition_proj"
                        : kind == ORACLE_VIDEO ? "video_patch_proj"
                                               : "audio_patch_proj",
                        true, 1, rows[i].in,
                        kind == ORACLE_TEXT    ? 160
                        : kind == ORACLE_VIDEO ? 96
                                               : 32,
                        0, HIDDEN, x + i * HIDDEN);
        }
        for (int layer = 0; layer < 2; layer++) {
                char prefix[40];

                (void) snprintf(prefix, sizeof(prefix), "token_refiner.blocks.%d.", layer);
                branch(g, prefix, 0, rows, n_text, NULL, x);
                branch(g, prefix, 1, rows, n_text, NULL, x);
        }
        for (uint64_t i = 0; i < n_text; i++)
                rms(x + i * HIDDEN, norm, HIDDEN, x + i * HIDDEN);
}

static void heads(const Golden *g, OracleRow *rows, uint64_t n, const double *time, const double *x) {
        CLEANUP_FREE double *norm = weight(g, "final_layer.", "norm.weight", HIDDEN);

        for (uint64_t i = 0; i < n; i++) {
                double mod[2 * HIDDEN], y[HIDDEN];

                linear(g, "final_layer.", "adaln_proj.linear", true, 1, time + i * TIME_DIM, TIME_DIM,
                        TIME_DIM, 2 * HIDDEN, mod);
                rms(x + i * HIDDEN, norm, HIDDEN, y);
                for (int j = 0; j < HIDDEN; j++)
                        y[j] = y[j] * (1 + mod[HIDDEN + j]) + mod[j];
                if (rows[i].kind == ORACLE_VIDEO)
                        linear(g, "final_layer.", "video_out", true, 1, y, HIDDEN, HIDDEN, 96, rows[i].out);
                else if (rows[i].kind == ORACLE_AUDIO)
                        linear(g, "final_layer.", "audio_out", true, 1, y, HIDDEN, HIDDEN, 32, rows[i].out);
        }
}

void oracle_run(OracleRow *rows, uint64_t n_text, uint64_t n) {
        CLEANUP(golden_freep) Golden *g = golden_open("comfy");
        CLEANUP_FREE double *x = calloc(n * HIDDEN, sizeof(double)),
                            *time = malloc(n * TIME_DIM * sizeof(double));

        assert_true(x && time);
        for (uint64_t i = 0; i < n; i++)
                time_embedding(g, rows[i].t, time + i * TIME_DIM);
        embed(g, rows, n_text, n, x);
        for (int layer = 0; layer < 3; layer++)
                block(g, layer, rows, n, time, x);
        heads(g, rows, n, time, x);
}
