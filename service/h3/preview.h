/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* What a film looks like while it is sampled: the clean latent that a step foresees, through a linear map to
 * colours. */

#include <stdint.h>

#define H3_PREVIEW_CHANNELS 24u

/* state, velocity: F32 [24, n], a step's input and the model's answer, in its own sign; the clean latent is
 * state + sigma * velocity. map: [25][3]: a channel's part of red, green and blue, 0 to 1, and last what all
 * have. ret: U8 [n, 3]; numbers outside of the range, and none at all, are cut off at its ends. */
void h3_preview(const float *state, const float *velocity, float sigma, uint64_t n,
        const float map[static 75], uint8_t *ret);
