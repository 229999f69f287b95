/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* From what a person asks for to sizes that the model has (h3.md 4.1). */

#include <stdbool.h>
#include <stdint.h>

#include "service/shared/fault.h"

#define H3_FRAMES_PER_SECOND 24
#define H3_FRAMES_MAX 362 /* 15.08 s: the longest film that any front end makes */

typedef struct H3FilmSize {
        uint64_t frames;         /* 17 k + 5 */
        uint64_t latent_frames;  /* 5 k + 2 */
        uint64_t audio_latents;  /* per stereo channel, 40 a second */
        bool in_reference_range; /* 5 to 15 seconds: what the model was released for */
} H3FilmSize;

/* At least the frames asked for, 1 to H3_FRAMES_MAX. -EINVAL with InvalidArgument. */
int h3_request_frames(uint64_t frames, H3FilmSize *ret, Fault *f);

/* Pixels of a film of which only the aspect is known, 1:4 to 4:1: short edge 768, at most 768 x 1344 pixels
 * in all, both edges to the nearest multiple of 32. -EINVAL with InvalidArgument. */
int h3_request_canvas(
        uint64_t aspect_width, uint64_t aspect_height, uint64_t *ret_width, uint64_t *ret_height, Fault *f);
