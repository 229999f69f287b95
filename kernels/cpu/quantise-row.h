/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* One row to int8, by the steps of ops.h. */

#include "kernels/cpu/quant.h"
#include "kernels/cpu/rows.h"
#include "kernels/cpu/vec.h"

#define BF16_MAX 0x1.fep+127f
#define SCALE_MIN 1e-30f
#define INFINITY_BITS 0x7f800000u

VEC_INLINE void quantise_load(const LkQuantise *a, uint64_t row, float *v, LkType t) {
        const void *x = rows_at(a->x, t, row, a->x_ld);
        const void *up = a->up ? rows_at(a->up, t, row, a->up_ld) : NULL;
        VT one = vt_set1(1);

        for (uint64_t i = 0; i < a->k; i += VT_N) {
                VT g = vt_get(x, t, i, a->k);

                if (up)
                        g = vt_mul(vt_div(g, vt_add(one, vt_exp(vt_negate(g)))), vt_get(up, t, i, a->k));

                vt_put(v, LK_F32, i, a->k, g);
        }
}

/* As integers: the order of non-negative floats is that of their bits, and a maximum of integers may be
 * taken in any order. */
VEC_INLINE float largest(const float *v, uint64_t n) {
        uint32_t most = 0;

        for (uint64_t i = 0; i < n; i++) {
                uint32_t u = f32_bits(v[i]) & 0x7fffffffu;

                u = u > INFINITY_BITS ? 0 : u;
                most = u > most ? u : most;
        }

        return f32_from_bits(most);
}

VEC_INLINE float bf16_rounded(float f) {
        return f32_from_bf16(bf16_from_f32(f));
}

VEC_INLINE int8_t to_integer(float q) {
        q = q == q ? q : 0;
        q = q > -128.0f ? q : -128.0f;
        q = q < 127.0f ? q : 127.0f;
        q = (q + 0x1.8p23f) - 0x1.8p23f; /* to nearest even */
        return (int8_t) (int32_t) q;
}

VEC_INLINE float scale_of(float m, LkType t) {
        float limit = t == LK_BF16 ? BF16_MAX : 0x1.fffffep+127f, s;

        m = m < limit ? m : limit;
        s = t == LK_BF16 ? m * (1.0f / 127.0f) : m / 127.0f;
        return s > SCALE_MIN ? s : SCALE_MIN;
}

/* v: the row in f32, overwritten. */
VEC_INLINE void quantise_values(const LkQuantise *a, uint64_t row, float *v, LkType t) {
        float s;
        VT divisor;

        rotate(v, a->k, a->rotation);
        s = scale_of(largest(v, a->k), t);
        divisor = vt_set1(t == LK_BF16 ? bf16_rounded(s) : s);

        for (uint64_t i = 0; i < a->k; i += VT_N)
                vt_put(v, LK_F32, i, a->k,
                        vt_round(vt_div(vt_round(vt_get(v, LK_F32, i, a->k), t), divisor), t));
        for (uint64_t i = 0; i < a->k; i++)
                a->q[row * a->q_ld + i] = to_integer(v[i]);
        a->scale[row] = s;
}
