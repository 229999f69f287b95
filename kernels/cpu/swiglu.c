/* SPDX-License-Identifier: Apache-2.0 */
/* y = silu(gate) * up with the rounding points of ops.h. */

#include <errno.h>

#include "kernels/cpu/check.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/rows.h"
#include "kernels/cpu/vec.h"

VEC_INLINE void swiglu_typed(const LkSwiglu *a, uint64_t row, LkType t) {
        const void *gate = rows_at(a->gate, t, row, a->gate_ld), *up = rows_at(a->up, t, row, a->up_ld);
        void *y = rows_at_mutable(a->y, t, row, a->y_ld);
        VT one = vt_set1(1);

        for (uint64_t i = 0; i < a->n; i += VT_N) {
                VT g = vt_get(gate, t, i, a->n);
                VT s = vt_round(vt_div(g, vt_add(one, vt_exp(vt_negate(g)))), t);

                vt_put(y, t, i, a->n, vt_mul(s, vt_get(up, t, i, a->n)));
        }
}

static void swiglu_row(const void *arg, uint64_t row) {
        const LkSwiglu *a = arg;

        if (a->type == LK_BF16)
                swiglu_typed(a, row, LK_BF16);
        else if (a->type == LK_F16)
                swiglu_typed(a, row, LK_F16);
        else
                swiglu_typed(a, row, LK_F32);
}

int LK_ISA(swiglu)(LkContext *c, const LkSwiglu *a) {
        if (!c || !a || !check_any_rows(a->gate, a->type, a->m, a->n, a->gate_ld) ||
                !check_any_rows(a->up, a->type, a->m, a->n, a->up_ld) ||
                !check_any_rows(a->y, a->type, a->m, a->n, a->y_ld))
                return -EINVAL;
        if (a->m == 0 || a->n == 0)
                return 0;

        return rows_run(c, a->m, a->n, swiglu_row, a);
}
