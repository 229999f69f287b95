/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Noise as torch's CPU generator draws it (h3.md 4.7), and the noise on conditions (1.10). Host arithmetic
 * in f64, rounded to f32 once: the same bits everywhere; torch's own f32 arithmetic is up to 2e-6 away. */

#include <stdbool.h>
#include <stdint.h>

#include "kernels/ops.h"
#include "service/h3/layout.h"

/* A piece of work on the items [begin, end). */
typedef void (*H3NoiseWork)(void *arg, uint64_t begin, uint64_t end);

/* The generator: mt19937, and the second of a pair of normals that a draw of fewer than 16 left over. */
typedef struct H3Noise {
        uint32_t state[624];
        uint32_t at; /* of the next word; 624: none is left */
        bool has_spare;
        double spare;
        /* The owner's: asked now and then while much is drawn. Once it says true, what is drawn is undefined: ask it again
         * afterwards. NULL: never. */
        LkStop stop;
        void *stop_userdata;
        /* The owner's, too: does the work on ranges that make up [0, n), on several threads at the same time. NULL: on this one. */
        void (*share)(uint64_t n, H3NoiseWork work, void *arg);
} H3Noise;

/* Only the low 32 bits of the seed count, as in torch. */
void h3_noise_init(H3Noise *g, uint64_t seed);

/* One draw: randn(n). Draws are not one another's continuation: how n is split into calls matters. */
void h3_noise_draw(H3Noise *g, uint64_t n, float *ret);

/* The target's noise, ret_video [24, T, H, W] and ret_audio [32, 2, A], from a generator that is new or has
 * drawn the conditions' noise. The order decides where the audio's numbers go. */
typedef enum H3NoiseOrder {
        H3_NOISE_COMFY,     /* audio drawn as the latent, [32, 2, A] */
        H3_NOISE_DIFFUSERS, /* audio drawn as rows, [2 * A, 32] */
} H3NoiseOrder;

/* -ENOMEM (rows that are put in their place need a copy). */
int h3_noise_target(H3Noise *g, H3NoiseOrder order, const H3Config *c, const H3Shape *s, float *ret_video,
        float *ret_audio);

/* Noise of one visual condition, ret [24, T, H, W] of its grid. Sounds stay clean.
 *  diffusers: the request's one generator draws the conditions in order, then the target:
 *             h3_noise_draw(g, 24 * T * H * W, ret).
 *  comfy:     a new generator of the seed for each, drawn as rows [rows, 96].
 *  official:  likewise, it draws `full_frames` frames, the first ones count. full_frames is
 *             T of the target + the number of condition frames of the task, and at least the grid's. Takes
 *             time for all of them, 3 ns for each number that does not count.
 * -ENOMEM (comfy). */
int h3_noise_condition_comfy(H3Noise *g, const H3Config *c, const H3Grid *grid, float *ret);
void h3_noise_condition_official(
        H3Noise *g, const H3Config *c, const H3Grid *grid, uint64_t full_frames, float *ret);

/* ret = 0.999 * z + 0.001 * noise: a visual condition as the model sees it, and what is kept of a video
 * under a denoise mask. ret may be z or noise. */
void h3_noise_mix(const float *z, const float *noise, uint64_t n, float *ret);
