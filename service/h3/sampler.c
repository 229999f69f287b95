/* SPDX-License-Identifier: Apache-2.0 */
#include "service/h3/sampler.h"

void h3_euler(const float *x, const float *velocity, float sigma, float next, uint64_t n, float *ret) {
        float t = 1.0f - sigma; /* diffusers hands the model and the step t, not sigma: 1 - t rounds twice */
        float back = 1.0f - t, ratio = next / sigma, rest = 1.0f - ratio;

        for (uint64_t i = 0; i < n; i++) {
                float x0 = x[i] + back * velocity[i];

                ret[i] = ratio * x[i] + rest * x0;
        }
}
