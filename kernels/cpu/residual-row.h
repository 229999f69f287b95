/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* One row of x += gate * y with the rounding points of ops.h. */

#include <stdbool.h>

#include "kernels/cpu/check.h"
#include "kernels/cpu/rows.h"
#include "kernels/cpu/vec.h"

VEC_INLINE void residual_typed(const LkResidual *a, uint64_t row, LkType t, LkType yt) {
        const void *y = rows_at(a->y, yt, row, a->y_ld), *gate = NULL;
        void *x = rows_at_mutable(a->x, t, row, a->x_ld);

        if (a->mod)
                gate = rows_at(
                        rows_at(a->mod, t, (uint64_t) a->mod_index[row], a->mod_ld), t, 1, a->gate_at);

        for (uint64_t i = 0; i < a->n; i += VT_N) {
                VT v = vt_get(y, yt, i, a->n);

                if (gate)
                        v = vt_round(vt_mul(vt_get(gate, t, i, a->n), v), t);

                vt_put(x, t, i, a->n, vt_add(vt_get(x, t, i, a->n), v));
        }
}

VEC_INLINE void residual_row(const LkResidual *a, uint64_t row) {
        if (a->type == LK_BF16)
                residual_typed(a, row, LK_BF16, LK_BF16);
        else if (a->y_type == LK_F16)
                residual_typed(a, row, LK_F32, LK_F16);
        else
                residual_typed(a, row, LK_F32, LK_F32);
}

VEC_INLINE bool check_residual(const LkResidual *a) {
        if (!check_beside(a->type, a->y_type) || !check_rows(a->x, a->type, a->m, a->n, a->x_ld) ||
                !check_any_rows(a->y, type_beside(a->type, a->y_type), a->m, a->n, a->y_ld))
                return false;

        return !a->mod || (check_index(a->mod_index, a->m) &&
                                  check_mod_part(a->mod, a->type, a->mod_ld, a->gate_at, a->n));
}
