/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "service/h3/noise.h"
#include "service/h3/number.h"
#include "service/h3/video-vae-private.h"
#include "service/shared/cleanup.h"
#include "service/shared/fmath.h"

/* From the moments of the posterior to a normalised latent (h3.md 5.6, 5.7). Host arithmetic; each product,
 * sum and quotient rounds once to f32, as in the reference. */

static float normalise(const H3VideoVae *m, uint64_t channel, float latent) {
        return (latent - m->config.mean[channel]) / m->config.std[channel];
}

void h3_video_latent_mean(const H3VideoVae *m, const float *moments, uint64_t n, float *ret) {
        for (uint64_t c = 0; c < m->config.latent_channels; c++)
                for (uint64_t i = 0; i < n; i++)
                        ret[c * n + i] = normalise(m, c, moments[c * n + i]);
}

/* The nearest number of f16, ties to even; beyond its range infinity. */
static float round_f16(float v) {
        float size = v < 0 ? -v : v, step = 0x1p-24f;

        if (!(size < 65520)) /* NaN too */
                return size >= 65520 ? v * __builtin_inff() : v;
        for (float limit = 0x1p-13f; size >= limit; limit *= 2)
                step *= 2;
        /* size / step is below 2^11: adding 1.5 * 2^23 leaves no fraction */
        size = ((size / step + 0x1.8p23f) - 0x1.8p23f) * step;
        return v < 0 ? -size : size;
}

void h3_video_latent_sample_of(
        const H3VideoVae *m, const float *moments, const float *noise, uint64_t n, float *ret) {
        uint64_t total = m->config.latent_channels * n;

        for (uint64_t i = 0; i < total; i++) {
                float log_variance = moments[total + i];
                float std, sample;

                log_variance = log_variance < -30 ? -30 : log_variance > 20 ? 20 : log_variance;
                std = (float) fmath_exp((double) (0.5f * log_variance));
                sample = std * noise[i];
                ret[i] = normalise(m, i / n, round_f16(moments[i] + sample));
        }
}

int h3_video_latent_sample(
        const H3VideoVae *m, const float *moments, uint64_t n, uint64_t seed, float *ret) {
        uint64_t total = m->config.latent_channels * n;
        CLEANUP_FREE float *noise = NULL;
        H3Noise g;

        if (total == 0)
                return 0;
        noise = malloc(total * sizeof(*noise));
        if (!noise)
                return -ENOMEM;
        h3_noise_init(&g, seed);
        h3_noise_draw(&g, total, noise);
        h3_video_latent_sample_of(m, moments, noise, n, ret);
        return 0;
}
