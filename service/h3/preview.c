/* SPDX-License-Identifier: Apache-2.0 */
#include "service/h3/preview.h"

void h3_preview(const float *state, const float *velocity, float sigma, uint64_t n,
        const float map[static 75], uint8_t *ret) {
        for (uint64_t i = 0; i < n; i++)
                for (unsigned k = 0; k < 3; k++) {
                        float v = map[H3_PREVIEW_CHANNELS * 3 + k];

                        for (unsigned c = 0; c < H3_PREVIEW_CHANNELS; c++)
                                v += map[c * 3 + k] * (state[c * n + i] + sigma * velocity[c * n + i]);
                        v = v * 255.0f + 0.5f;
                        ret[i * 3 + k] = v >= 255.0f ? 255 : v > 0.0f ? (uint8_t) v : 0; /* NaN: 0 */
                }
}
