/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdlib.h>

#include "service/h3/dit-private.h"
#include "service/h3/number.h"
#include "service/shared/cleanup.h"
#include "service/shared/fmath.h"

/* The embedding of the timesteps (h3.md 1.6). Functions of the timestep are host arithmetic, the same on
 * every backend; products with weights are the op table's, in f32. */

#define LN_10000 9.210340371976184

/* [cos(t * f), sin(t * f)], f_i = 10000^(-i / half) */
static void sinusoid(float t, uint32_t width, float *ret) {
        uint32_t half = width / 2;
        float *cosines = ret, *sines = ret + half;

        for (uint32_t i = 0; i < half; i++) {
                float frequency = (float) fmath_exp(-LN_10000 * (double) i / (double) half);
                double angle = (double) (t * frequency);

                cosines[i] = (float) fmath_cos(angle);
                sines[i] = (float) fmath_sin(angle);
        }
}

static void silu(float *x, uint64_t n) {
        for (uint64_t i = 0; i < n; i++)
                x[i] = (float) ((double) x[i] / (1.0 + fmath_exp(-(double) x[i])));
}

/* host[n, w.cols] becomes host[n, w.rows] = host . w^T + bias, in f32. */
static int time_linear(const DitRun *run, uint32_t n, const LkMatrix *w, const LkVector *bias, float *host) {
        int r;

        r = run->ops->upload(run->context, run->time_a, host, sizeof(float) * n * w->cols);
        if (r >= 0)
                r = dit_gemm(run, n, run->time_a, LK_F32, w, bias, run->time_b, LK_F32);
        return r < 0 ? r : run->ops->download(run->context, host, run->time_b, sizeof(float) * n * w->rows);
}

/* The curve at t: between two rows of the table, in f32, as torch.lerp does it. No silu: the table has it.
 */
static void curve_point(const H3Model *m, float t, float *ret) {
        uint32_t points = m->config.curve_points, rank = m->config.time_dim;
        float at = (t < 0 ? 0 : t > 1 ? 1 : t) * (float) (points - 1), weight;
        uint32_t i = (uint32_t) at < points - 2 ? (uint32_t) at : points - 2;

        weight = at - (float) i;
        for (uint32_t k = 0; k < rank; k++) {
                float a = h3_number(m->curve.data, m->curve.type, (uint64_t) i * rank + k);
                float b = h3_number(m->curve.data, m->curve.type, ((uint64_t) i + 1) * rank + k);

                ret[k] = weight < 0.5f ? a + weight * (b - a) : b - (b - a) * (1.0f - weight);
        }
}

static int curve_embedding(const DitRun *run, const H3Model *m, const float *t, uint32_t n) {
        uint64_t rank = run->c->time_dim;
        CLEANUP_FREE float *host = NULL;

        host = malloc(sizeof(float) * n * rank);
        if (!host)
                return -ENOMEM;
        for (uint32_t i = 0; i < n; i++)
                curve_point(m, t[i], host + i * rank);
        return run->ops->upload(run->context, run->coordinate, host, sizeof(float) * n * rank);
}

int dit_time_embedding(const DitRun *run, const H3Model *m, const float *t, uint32_t n) {
        const H3Config *c = run->c;
        uint64_t n_out = (uint64_t) n * c->time_dim;
        const LkConvert to_activation = {
                .m = n,
                .n = c->time_dim,
                .x = run->time_a,
                .x_type = LK_F32,
                .x_ld = c->time_dim,
                .y = run->coordinate,
                .y_type = run->type,
                .y_ld = c->time_dim,
        };
        CLEANUP_FREE float *host = NULL;
        int r;

        if (m->curve.data)
                return curve_embedding(run, m, t, n);
        host = malloc(sizeof(float) * n * dit_time_width(c));
        if (!host)
                return -ENOMEM;

        for (uint32_t i = 0; i < n; i++)
                sinusoid(t[i], c->time_freq_dim, host + (size_t) i * c->time_freq_dim);
        r = dit_take(run, m, H3_PART_TIME, 0, &m);
        if (r < 0)
                return r;
        r = time_linear(run, n, &m->time_1, &m->time_1_bias, host);
        if (r >= 0) {
                silu(host, (uint64_t) n * c->time_hidden);
                r = time_linear(run, n, &m->time_2, &m->time_2_bias, host);
        }
        dit_give(run, H3_PART_TIME, 0);
        if (r < 0)
                return r;
        dit_tap_host(run, "temb", host, n, c->time_dim);

        silu(host, n_out);
        r = run->ops->upload(run->context, run->time_a, host, sizeof(float) * n_out);
        return r < 0 ? r : run->ops->convert(run->context, &to_activation);
}

int dit_modulation_rows(const DitRun *run, const H3Model *m, uint32_t layer, uint32_t n) {
        bool final = layer == m->config.layers;
        int r;

        r = dit_take(run, m, H3_PART_ADALN, layer, &m);
        if (r < 0)
                return r;
        r = dit_gemm(run, n, run->coordinate, run->coordinate_type,
                final ? &m->final_adaln : &m->blocks[layer].adaln,
                final ? &m->final_adaln_bias : &m->blocks[layer].adaln_bias, dit_mod(run, layer),
                final ? run->coordinate_type : run->type);
        dit_give(run, H3_PART_ADALN, layer);
        return r;
}

int dit_modulation(const DitRun *run, const H3Model *m, uint32_t layer, const DitTimesteps *t) {
        return run->table ? dit_table_load(run, layer, t) : dit_modulation_rows(run, m, layer, t->n);
}
