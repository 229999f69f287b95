/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdlib.h>

#include "service/h3/dit-private.h"
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

int dit_time_embedding(const DitRun *run, const H3Model *m, const DitTimesteps *t) {
        const H3Config *c = run->c;
        uint64_t n_out = (uint64_t) t->n * c->time_dim;
        const LkConvert to_activation = {
                .m = t->n,
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

        host = malloc(sizeof(float) * t->n * dit_time_width(c));
        if (!host)
                return -ENOMEM;

        for (uint32_t i = 0; i < t->n; i++)
                sinusoid(t->t[i], c->time_freq_dim, host + (size_t) i * c->time_freq_dim);
        r = time_linear(run, t->n, &m->time_1, &m->time_1_bias, host);
        if (r < 0)
                return r;
        silu(host, (uint64_t) t->n * c->time_hidden);
        r = time_linear(run, t->n, &m->time_2, &m->time_2_bias, host);
        if (r < 0)
                return r;
        dit_tap_host(run, "temb", host, t->n, c->time_dim);

        silu(host, n_out);
        r = run->ops->upload(run->context, run->time_a, host, sizeof(float) * n_out);
        return r < 0 ? r : run->ops->convert(run->context, &to_activation);
}
