/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* What snake and alias_free share: x + sin^2(a x) / (b + 1e-9) and its numbers per channel. */

#include "kernels/cpu/vec.h"

/* sin^2 has the period pi, so the reduction needs no quadrant: r = t - round(t / pi) * pi with pi in two
 * parts. The first step is exact (a multiple of 2^-22 below 2), what the second part leaves out is 3.5e-15 a
 * period. sin(r) is r plus a polynomial of degree 9 (own minimax fit over |r| <= pi / 2, relative error
 * 6.1e-9). Adding SIN_ROUND leaves round(t / pi) in the low bits; up to LK_SIN2_MAX, what SIN_INV_PI lacks
 * moves |r| beyond pi / 2 by no more than 0.01. */
#define SIN_INV_PI 0x1.45f306p-2f
#define SIN_ROUND 0x1.8p+23f
#define SIN_PI_HI 0x1.921fb6p+1f
#define SIN_PI_LO (-0x1.777a5cp-24f)
#define SIN_C3 (-0x1.55554cp-3f)
#define SIN_C5 0x1.110ed4p-7f
#define SIN_C7 (-0x1.9f6ffep-13f)
#define SIN_C9 0x1.5dbdeap-19f

#if LK_CPU_LEVEL >= 3

VEC_INLINE VT snake_sin_squared(VT t) {
        VT n, r, z, p;

        t = vt_max(vt_set1(-LK_SIN2_MAX), t); /* a NaN stays */
        t = vt_negate(vt_max(vt_set1(-LK_SIN2_MAX), vt_negate(t)));
        n = vt_sub(vt_fma(t, vt_set1(SIN_INV_PI), vt_set1(SIN_ROUND)), vt_set1(SIN_ROUND));
        r = vt_fma(n, vt_set1(-SIN_PI_HI), t);
        r = vt_fma(n, vt_set1(-SIN_PI_LO), r);
        z = vt_mul(r, r);
        p = vt_fma(vt_set1(SIN_C9), z, vt_set1(SIN_C7));
        p = vt_fma(p, z, vt_set1(SIN_C5));
        p = vt_fma(p, z, vt_set1(SIN_C3));
        r = vt_fma(vt_mul(r, z), p, r);
        return vt_mul(r, r);
}

#else

static inline float snake_sin_squared_one(float t) {
        float n, r, z, p;

        t = -LK_SIN2_MAX > t ? -LK_SIN2_MAX : t; /* a NaN stays */
        t = LK_SIN2_MAX < t ? LK_SIN2_MAX : t;
        n = f32_fma(t, SIN_INV_PI, SIN_ROUND) - SIN_ROUND;
        r = f32_fma(n, -SIN_PI_HI, t);
        r = f32_fma(n, -SIN_PI_LO, r);
        z = r * r;
        p = f32_fma(SIN_C9, z, SIN_C7);
        p = f32_fma(p, z, SIN_C5);
        p = f32_fma(p, z, SIN_C3);
        r = f32_fma(r * z, p, r);
        return r * r;
}
VEC_INLINE VT snake_sin_squared(VT t) {
        return V8_EACH(snake_sin_squared_one(t.f[i]));
}

#endif

/* gain = 1 / (b + 1e-9) */
VEC_INLINE VT snake_at(VT x, VT a, VT gain) {
        return vt_fma(gain, snake_sin_squared(vt_mul(a, x)), x);
}

/* a and gain of channels begin .. begin + n - 1, repeated to n + VT_N numbers: the lanes of a vector that
 * starts at any of the n channels and goes on with the next row. */
static inline void snake_channels(const LkVector *alpha, const LkVector *beta, bool exponents,
        uint64_t begin, uint64_t n, float *a, float *gain) {
        const LkVector *b = beta->data ? beta : alpha;

        for (uint64_t i = 0; i < n; i += VT_N) {
                VT va = vt_get(alpha->data, alpha->type, begin + i, begin + n);
                VT vb = vt_get(b->data, b->type, begin + i, begin + n);

                if (exponents) {
                        va = vt_exp(va);
                        vb = vt_exp(vb);
                }

                vt_put(a, LK_F32, i, n, va);
                vt_put(gain, LK_F32, i, n, vt_div(vt_set1(1), vt_add(vb, vt_set1(1e-9f))));
        }

        for (uint64_t i = n; i < n + VT_N; i++) {
                a[i] = a[i - n];
                gain[i] = gain[i - n];
        }
}
