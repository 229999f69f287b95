/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* A request for text, keyframes, sound and video, twice: as rows for the oracle, made here from the rules
 * (h3.md 1.3, 1.4, 1.9, 1.11), and as a layout and a step of service/h3. */

#include <stdint.h>

#include "tests/unit/h3/golden.h"
#include "tests/unit/h3/oracle.h"

/* What a step is made of. Sizes are the latents' own; keyframes have one frame. */
typedef struct Scene {
        uint64_t n_text, t, h, w, a;
        const uint16_t *text; /* bf16 [n_text, text_dim] */
        const uint8_t *tags;
        const float *video, *audio;
        float sigma_video, sigma_audio;
        uint32_t n_keyframes;
        const uint64_t *frames;
        const float *const *keyframes;
        const float *video_mask, *audio_mask; /* [t, h, w], [2, a]; NULL */
} Scene;

/* Velocities [24, t, h, w] and [32, 2, a] as the oracle has them. */
void scene_oracle(const Scene *s, const OracleModel *o, OracleRounding rounding, float *video, float *audio);

H3Layout *scene_layout(const Scene *s, const H3Config *c);
/* Our step of the scene; velocities are freed by the caller. */
void scene_step(const Scene *s, const H3Model *m, H3Compute compute, float **ret_video, float **ret_audio);
