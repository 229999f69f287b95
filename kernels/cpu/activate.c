/* SPDX-License-Identifier: Apache-2.0 */
/* Element-wise functions. GELU is max(x, 0) - |x| * P(-|x|), P the normal distribution, which keeps the
 * tails' digits: P(-a) = exp(-a^2 / 2) * p(1 / (1 + a / 4)) with a polynomial of degree 9 (own weighted
 * least-squares fit over 0 <= a <= 14.5, relative error 2e-8); the rounding error of a^2 is put back after
 * the exponential. */

#include <errno.h>

#include "kernels/cpu/check.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/rows.h"
#include "kernels/cpu/vec.h"

#define GELU_END 16.0f /* P(-16) < 2^-150 */

static const float gelu_terms[] = {0x1.11d314p-5f, -0x1.8c0aa6p-3f, 0x1.8dd0fap-2f, -0x1.4cabc8p-2f,
        0x1.308962p-2f, -0x1.100e34p-6f, 0x1.ec9cfap-4f, 0x1.85865ap-4f, 0x1.9a6672p-4f, -0x1.4d1d6p-16f};

VEC_INLINE VT logistic_part(VT x, VT exponent) {
        return vt_div(x, vt_add(vt_set1(1), vt_exp(exponent)));
}

VEC_INLINE VT gelu_tanh(VT x) {
        VT cubic = vt_fma(vt_mul(x, x), vt_set1(0.044715f), vt_set1(1));

        return logistic_part(x, vt_mul(vt_mul(x, vt_set1(-0x1.988454p+0f)), cubic)); /* -2 * sqrt(2 / pi) */
}

VEC_INLINE VT gelu(VT x) {
        /* a NaN survives: it is the second argument of both */
        VT minus_a = vt_max(vt_set1(-GELU_END), vt_negate(vt_max(x, vt_negate(x)))), a = vt_negate(minus_a);
        VT t = vt_div(vt_set1(1), vt_fma(a, vt_set1(0.25f), vt_set1(1)));
        VT square = vt_mul(a, a), lost = vt_fma(a, a, vt_negate(square));
        VT e = vt_exp(vt_mul(square, vt_set1(-0.5f))), p = vt_set1(gelu_terms[0]);

        for (uint32_t i = 1; i < sizeof(gelu_terms) / sizeof(*gelu_terms); i++)
                p = vt_fma(p, t, vt_set1(gelu_terms[i]));

        e = vt_fma(vt_mul(e, vt_set1(-0.5f)), lost, e);
        return vt_fma(vt_mul(minus_a, p), e, vt_max(x, vt_zero())); /* e alone may be all but subnormal */
}

VEC_INLINE void activate_typed(const LkActivate *a, uint64_t row, LkType t, LkFunction f) {
        const void *x = rows_at(a->x, t, row, a->x_ld);
        void *y = rows_at_mutable(a->y, t, row, a->y_ld);

        for (uint64_t i = 0; i < a->n; i += VT_N) {
                VT v = vt_get(x, t, i, a->n);

                vt_put(y, t, i, a->n,
                        f == LK_SILU   ? logistic_part(v, vt_negate(v))
                        : f == LK_GELU ? gelu(v)
                                       : gelu_tanh(v));
        }
}

VEC_INLINE void activate_function(const LkActivate *a, uint64_t row, LkFunction f) {
        if (a->type == LK_F32)
                activate_typed(a, row, LK_F32, f);
        else
                activate_typed(a, row, LK_BF16, f);
}

static void activate_row(const void *arg, uint64_t row) {
        const LkActivate *a = arg;

        if (a->function == LK_SILU)
                activate_function(a, row, LK_SILU);
        else if (a->function == LK_GELU)
                activate_function(a, row, LK_GELU);
        else
                activate_function(a, row, LK_GELU_TANH);
}

int LK_ISA(activate)(LkContext *c, const LkActivate *a) {
        if (!c || !a || a->function < LK_SILU || a->function >= _LK_FUNCTION_MAX ||
                !check_rows(a->x, a->type, a->m, a->n, a->x_ld) ||
                !check_rows(a->y, a->type, a->m, a->n, a->y_ld))
                return -EINVAL;
        if (a->m == 0 || a->n == 0)
                return 0;

        return rows_run(c, a->m, a->n, activate_row, a);
}
