/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* x + sin^2(a x) / (b + 1e-9), operation for operation as kernels/cpu/snake.h has it. */

#include "kernels/cuda/flat.cuh"

__device__ static inline float snake_sin_squared(float t) {
        const float round = 0x1.8p+23f;
        float n, r, z, p;

        t = -LK_SIN2_MAX > t ? -LK_SIN2_MAX : t; /* a NaN stays */
        t = LK_SIN2_MAX < t ? LK_SIN2_MAX : t;
        n = __fsub_rn(__fmaf_rn(t, 0x1.45f306p-2f, round), round);
        r = __fmaf_rn(n, -0x1.921fb6p+1f, t);
        r = __fmaf_rn(n, 0x1.777a5cp-24f, r);
        z = __fmul_rn(r, r);
        p = __fmaf_rn(0x1.5dbdeap-19f, z, -0x1.9f6ffep-13f);
        p = __fmaf_rn(p, z, 0x1.110ed4p-7f);
        p = __fmaf_rn(p, z, -0x1.55554cp-3f);
        r = __fmaf_rn(__fmul_rn(r, z), p, r);
        return __fmul_rn(r, r);
}

/* gain = 1 / (b + 1e-9) */
__device__ static inline float snake_at(float x, float a, float gain) {
        return __fmaf_rn(gain, snake_sin_squared(__fmul_rn(a, x)), x);
}

/* a and gain of a channel. */
__device__ static inline void snake_channel(const LkVector *alpha, const LkVector *beta, bool exponents, uint64_t channel, float *ret_a,
        float *ret_gain) {
        const LkVector *from = beta->data ? beta : alpha;
        float a = weight_get(alpha->data, alpha->type, channel), b = weight_get(from->data, from->type, channel);

        if (exponents) {
                a = number_exp(a);
                b = number_exp(b);
        }
        *ret_a = a;
        *ret_gain = __fdiv_rn(1.0f, __fadd_rn(b, 1e-9f));
}
