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
#include "tests/unit/h3/oracle-product.h"

#define HEAD_DIM 128
#define TIME_FREQ 256
#define EPS 1e-5

typedef struct Run {
        const OracleModel *m;
        OracleRounding rounding;
        uint64_t hidden, inner;
        OracleRow *rows;
        uint64_t n_times;
        double *time;      /* [n_times, time_dim]: silu of the embedding */
        uint32_t *time_of; /* [rows] */
} Run;

static double *numbers(uint64_t n) {
        double *x = calloc(n, sizeof(*x));

        assert_non_null(x);
        return x;
}

/* A whole tensor, freed by the caller. */
static double *weight(const Run *run, const char *prefix, const char *name, uint64_t n) {
        double *w = numbers(n);
        char full[128];

        (void) snprintf(full, sizeof(full), "%s%s", prefix, name);
        run->m->read(run->m->userdata, full, 0, n, w);
        return w;
}

/* To nearest even. The step over f32 rounds twice, once in 2^16 numbers to the other side. */
static double bf16(double x) {
        float f = (float) x;
        uint32_t bits;

        memcpy(&bits, &f, sizeof(bits));
        bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
        memcpy(&f, &bits, sizeof(f));
        return f;
}

static double rounded(const Run *run, double x) {
        return run->rounding == ORACLE_BF16 ? bf16(x) : x;
}

/* y[m, out] = x[m, in] . w^T + bias; x_ld numbers from one x to the next. */
static void linear_unrounded(const Run *run, const char *prefix, const char *name, bool has_bias, uint64_t m,
        const double *x, uint64_t in, uint64_t x_ld, uint64_t out, double *y) {
        char tensor[128];
        CLEANUP_FREE double *bias = NULL;

        (void) snprintf(tensor, sizeof(tensor), "%s%s.weight", prefix, name);
        oracle_product(run->m, tensor, m, x, in, x_ld, out, y);
        if (!has_bias)
                return;
        (void) snprintf(tensor, sizeof(tensor), "%s.bias", name);
        bias = weight(run, prefix, tensor, out);
        for (uint64_t i = 0; i < m * out; i++)
                y[i] += bias[i % out];
}

static void linear(const Run *run, const char *prefix, const char *name, bool has_bias, uint64_t m,
        const double *x, uint64_t in, uint64_t x_ld, uint64_t out, double *y) {
        linear_unrounded(run, prefix, name, has_bias, m, x, in, x_ld, out, y);
        for (uint64_t i = 0; i < m * out; i++)
                y[i] = rounded(run, y[i]);
}

static double silu(double x) {
        return x / (1 + exp(-x));
}

static void rms(const Run *run, const double *x, const double *w, uint64_t n, double *y) {
        double sum = 0;

        for (uint64_t i = 0; i < n; i++)
                sum += x[i] * x[i];
        for (uint64_t i = 0; i < n; i++)
                y[i] = rounded(run, x[i] / sqrt(sum / (double) n + EPS) * w[i]);
}

/* y = y * (1 + scale) + shift */
static void modulate(const Run *run, const double *shift, const double *scale, uint64_t n, double *y) {
        for (uint64_t i = 0; i < n; i++)
                y[i] = rounded(run, rounded(run, y[i] * rounded(run, 1 + scale[i])) + shift[i]);
}

/* silu of the embedding of a timestep, [time_dim]: in f32 by definition, rounded as the input of products */
static void time_embedding(const Run *run, double t, double *ret) {
        const OracleModel *m = run->m;
        double e[TIME_FREQ];
        CLEANUP_FREE double *hidden = numbers(m->time_hidden);

        for (int i = 0; i < TIME_FREQ / 2; i++) {
                double angle = t * exp(-log(10000.0) * i / (TIME_FREQ / 2));

                e[i] = cos(angle);
                e[i + TIME_FREQ / 2] = sin(angle);
        }
        linear_unrounded(
                run, "time_embedder.", "proj_in", true, 1, e, TIME_FREQ, TIME_FREQ, m->time_hidden, hidden);
        for (uint32_t i = 0; i < m->time_hidden; i++)
                hidden[i] = silu(hidden[i]);
        linear_unrounded(run, "time_embedder.", "proj_out", true, 1, hidden, m->time_hidden, m->time_hidden,
                m->time_dim, ret);
        for (uint32_t i = 0; i < m->time_dim; i++)
                ret[i] = rounded(run, silu(ret[i]));
}

static void time_rows(Run *run, uint64_t n) {
        CLEANUP_FREE double *seen = numbers(n);

        for (uint64_t i = 0; i < n; i++) {
                uint32_t at = 0;

                while (at < run->n_times && seen[at] != run->rows[i].t)
                        at++;
                run->time_of[i] = at;
                if (at < run->n_times)
                        continue;
                seen[run->n_times++] = run->rows[i].t;
                time_embedding(run, run->rows[i].t, run->time + (uint64_t) at * run->m->time_dim);
        }
}

/* Rotates one head; positions and angles are f32 by definition. */
static void rope(const Run *run, double *head, const OracleRow *row) {
        for (int i = 0; i < 48; i++) {
                float inverse = (float) pow(10000.0, -2.0 * (i % 16) / 32.0);
                double angle = (double) ((float) row->position[i / 16] * inverse);
                double c = rounded(run, cos(angle)), s = rounded(run, sin(angle));
                double a = head[i], b = head[i + 48];

                head[i] = rounded(run, rounded(run, a * c) - rounded(run, b * s));
                head[i + 48] = rounded(run, rounded(run, b * c) + rounded(run, a * s));
        }
}

typedef struct Attend {
        const Run *run;
        const double *qkv; /* [n, 3 * inner] */
        double *o;         /* [n, inner] */
        uint64_t n;
} Attend;

static void attend(void *userdata, uint64_t head) {
        const Attend *a = userdata;
        uint64_t inner = a->run->inner;
        CLEANUP_FREE double *p = numbers(a->n);

        for (uint64_t i = 0; i < a->n; i++) {
                const double *q = a->qkv + i * 3 * inner + head * HEAD_DIM;
                double sum = 0, value[HEAD_DIM] = {}, largest = -INFINITY;

                for (uint64_t j = 0; j < a->n; j++) {
                        const double *k = a->qkv + j * 3 * inner + inner + head * HEAD_DIM;
                        double dot = 0;

                        for (int d = 0; d < HEAD_DIM; d++)
                                dot += q[d] * k[d];
                        p[j] = dot / sqrt(HEAD_DIM);
                        largest = fmax(largest, p[j]);
                }
                for (uint64_t j = 0; j < a->n; j++) {
                        p[j] = exp(p[j] - largest);
                        sum += p[j];
                        p[j] = rounded(a->run, p[j]);
                        for (int d = 0; d < HEAD_DIM; d++)
                                value[d] +=
                                        p[j] *
                                        a->qkv[j * 3 * inner + 2 * inner + head * HEAD_DIM + (uint64_t) d];
                }
                for (int d = 0; d < HEAD_DIM; d++)
                        a->o[i * inner + head * HEAD_DIM + (uint64_t) d] = rounded(a->run, value[d] / sum);
        }
}

/* h[n, hidden] to attn(h). rows: NULL without rope. */
static void attention(const Run *run, const char *prefix, const OracleRow *rows, uint64_t n, const double *h,
        double *ret) {
        uint64_t inner = run->inner, heads = run->m->heads;
        CLEANUP_FREE double *qkv = numbers(n * 3 * inner), *o = numbers(n * inner);
        CLEANUP_FREE double *q_norm = weight(run, prefix, "attn.q_norm.weight", HEAD_DIM),
                            *k_norm = weight(run, prefix, "attn.k_norm.weight", HEAD_DIM);
        Attend a = {run, qkv, o, n};

        linear(run, prefix, "attn.qkv_proj", false, n, h, run->hidden, run->hidden, 3 * inner, qkv);
        for (uint64_t i = 0; i < n; i++)
                for (uint64_t part = 0; part < 2 * heads; part++) {
                        double *head = qkv + i * 3 * inner + part * HEAD_DIM;

                        rms(run, head, part < heads ? q_norm : k_norm, HEAD_DIM, head);
                        if (rows)
                                rope(run, head, rows + i);
                }
        oracle_each(run->m, heads, attend, &a);
        linear(run, prefix, "attn.out_proj", false, n, o, inner, inner, run->hidden, ret);
}

static void mlp(const Run *run, const char *prefix, uint64_t n, const double *h, double *ret) {
        uint64_t ffn = run->m->ffn;
        CLEANUP_FREE double *wide = numbers(n * 2 * ffn);

        linear(run, prefix, "mlp.fc1", false, n, h, run->hidden, run->hidden, 2 * ffn, wide);
        for (uint64_t i = 0; i < n; i++)
                for (uint64_t j = i * 2 * ffn; j < (i * 2 + 1) * ffn; j++)
                        wide[j] = rounded(run, rounded(run, silu(wide[j])) * wide[j + ffn]);
        linear(run, prefix, "mlp.fc2", false, n, wide, ffn, 2 * ffn, run->hidden, ret);
}

/* x += branch(norm(x)), modulated by chunks 3 * which .. of mod [n_times, 18 * hidden] if there is one. */
static void branch(
        const Run *run, const char *prefix, unsigned which, uint64_t n, const double *mod, double *x) {
        uint64_t hidden = run->hidden;
        CLEANUP_FREE double *h = numbers(n * hidden), *y = numbers(n * hidden);
        CLEANUP_FREE double *norm =
                weight(run, prefix, which == 0 ? "norm1.weight" : "norm2.weight", hidden);
        CLEANUP_FREE const double **gates = calloc(n, sizeof(*gates));

        assert_non_null(gates);
        for (uint64_t i = 0; i < n; i++) {
                const double *m =
                        mod ? mod + ((run->time_of[i] * 3ull + run->rows[i].tag) * 6 + which * 3ull) * hidden
                            : NULL;

                rms(run, x + i * hidden, norm, hidden, h + i * hidden);
                if (!m)
                        continue;
                modulate(run, m, m + hidden, hidden, h + i * hidden);
                gates[i] = m + 2 * hidden;
        }
        if (which == 0)
                attention(run, prefix, mod ? run->rows : NULL, n, h, y);
        else
                mlp(run, prefix, n, h, y);
        for (uint64_t i = 0; i < n * hidden; i++) {
                const double *gate = gates[i / hidden];

                x[i] = rounded(run, x[i] + (gate ? rounded(run, gate[i % hidden] * y[i]) : y[i]));
        }
}

static void block(const Run *run, uint32_t layer, uint64_t n, double *x) {
        CLEANUP_FREE double *mod = numbers(run->n_times * 18 * run->hidden);
        char prefix[32];

        (void) snprintf(prefix, sizeof(prefix), "blocks.%u.", layer);
        linear(run, prefix, "adaln_proj.linear", true, run->n_times, run->time, run->m->time_dim,
                run->m->time_dim, 18 * run->hidden, mod);
        branch(run, prefix, 0, n, mod, x);
        branch(run, prefix, 1, n, mod, x);
}

/* Rows begin .. end, of one kind, through the projection into the model. */
static void embed_part(const Run *run, uint64_t begin, uint64_t end, double *x) {
        OracleKind kind = run->rows[begin].kind;
        const char *name = kind == ORACLE_TEXT    ? "condition_proj"
                           : kind == ORACLE_VIDEO ? "video_patch_proj"
                                                  : "audio_patch_proj";
        uint64_t width = kind == ORACLE_TEXT ? run->m->text_dim : kind == ORACLE_VIDEO ? 96 : 32;
        CLEANUP_FREE double *in = numbers((end - begin) * width);

        for (uint64_t i = begin; i < end; i++)
                memcpy(in + (i - begin) * width, run->rows[i].in, width * sizeof(double));
        linear(run, "", name, true, end - begin, in, width, width, run->hidden, x + begin * run->hidden);
}

static void embed(const Run *run, uint64_t n_text, uint64_t n, double *x) {
        CLEANUP_FREE double *norm = weight(run, "token_refiner.", "final_norm.weight", run->hidden);

        for (uint64_t begin = 0, end; begin < n; begin = end) {
                for (end = begin + 1; end < n && run->rows[end].kind == run->rows[begin].kind;)
                        end++;
                embed_part(run, begin, end, x);
        }
        for (uint32_t layer = 0; layer < run->m->refiner_layers; layer++) {
                char prefix[40];

                (void) snprintf(prefix, sizeof(prefix), "token_refiner.blocks.%u.", layer);
                branch(run, prefix, 0, n_text, NULL, x);
                branch(run, prefix, 1, n_text, NULL, x);
        }
        for (uint64_t i = 0; i < n_text; i++)
                rms(run, x + i * run->hidden, norm, run->hidden, x + i * run->hidden);
}

/* The last rows' heads are f32 by definition. */
static void heads(const Run *run, uint64_t n, const double *x) {
        uint64_t hidden = run->hidden, time_dim = run->m->time_dim;
        CLEANUP_FREE double *norm = weight(run, "final_layer.", "norm.weight", hidden),
                            *mod = numbers(run->n_times * 2 * hidden), *y = numbers(n * hidden),
                            *video = numbers(n * 96), *audio = numbers(n * 32);

        linear(run, "final_layer.", "adaln_proj.linear", true, run->n_times, run->time, time_dim, time_dim,
                2 * hidden, mod);
        for (uint64_t i = 0; i < n; i++) {
                const double *m = mod + run->time_of[i] * 2 * hidden;

                rms(run, x + i * hidden, norm, hidden, y + i * hidden);
                modulate(run, m, m + hidden, hidden, y + i * hidden);
        }
        linear_unrounded(run, "final_layer.", "video_out", true, n, y, hidden, hidden, 96, video);
        linear_unrounded(run, "final_layer.", "audio_out", true, n, y, hidden, hidden, 32, audio);
        for (uint64_t i = 0; i < n; i++) {
                if (run->rows[i].kind == ORACLE_VIDEO)
                        memcpy(run->rows[i].out, video + i * 96, 96 * sizeof(double));
                else if (run->rows[i].kind == ORACLE_AUDIO)
                        memcpy(run->rows[i].out, audio + i * 32, 32 * sizeof(double));
        }
}

void oracle_run(
        const OracleModel *m, OracleRounding rounding, OracleRow *rows, uint64_t n_text, uint64_t n) {
        CLEANUP_FREE double *x = numbers(n * m->hidden), *time = numbers(n * m->time_dim);
        CLEANUP_FREE uint32_t *time_of = calloc(n, sizeof(*time_of));
        Run run = {m, rounding, m->hidden, (uint64_t) m->heads * HEAD_DIM, rows, 0, time, time_of};

        assert_non_null(time_of);
        time_rows(&run, n);
        embed(&run, n_text, n, x);
        for (uint32_t layer = 0; layer < m->layers; layer++)
                block(&run, layer, n, x);
        heads(&run, n, x);
}

static void read_golden(const void *userdata, const char *name, uint64_t first, uint64_t n, double *ret) {
        const Golden *g = userdata;
        const StTensor *t = golden_tensor(g, name);
        uint64_t size = st_type_size(t->type);

        assert_true((first + n) * size <= t->size);
        for (uint64_t i = 0; i < n; i++) {
                uint32_t bits = 0;
                float f;

                memcpy(t->type == ST_BF16 ? (uint8_t *) &bits + 2 : (uint8_t *) &bits,
                        g->bytes + t->offset + (first + i) * size, size);
                memcpy(&f, &bits, sizeof(f));
                ret[i] = f;
        }
}

OracleModel oracle_tiny(const Golden *comfy) {
        return (OracleModel){
                .layers = 3,
                .refiner_layers = 2,
                .hidden = 64,
                .heads = 8,
                .ffn = 96,
                .text_dim = 160,
                .time_hidden = 96,
                .time_dim = 32,
                .threads = 1,
                .read = read_golden,
                .userdata = comfy,
        };
}
