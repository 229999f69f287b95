/* SPDX-License-Identifier: Apache-2.0 */
/* RMS norm of a row, optionally modulated. (x * rstd) * weight, in this order, is rounded (round_first:
 * after the first product, too); then the modulation. */

#include <errno.h>

#include "kernels/cpu/check.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/rows.h"
#include "kernels/cpu/vec.h"

VEC_INLINE void norm_typed(const LkNorm *a, uint64_t row, LkType t, LkType mt) {
        const void *x = rows_at(a->x, t, row, a->x_ld), *shift = NULL, *scale = NULL;
        void *y = rows_at_mutable(a->y, t, row, a->y_ld);
        float rstd = 1 / f32_sqrt(v8_sum_squares(x, t, a->n) / (float) a->n + a->eps);
        VT factor = vt_set1(rstd), one = vt_set1(1);

        if (a->mod) {
                const void *mod = rows_at(a->mod, mt, (uint64_t) a->mod_index[row], a->mod_ld);

                shift = rows_at(mod, mt, 1, a->shift_at);
                scale = rows_at(mod, mt, 1, a->scale_at);
        }

        for (uint64_t i = 0; i < a->n; i += VT_N) {
                VT h = vt_mul(vt_get(x, t, i, a->n), factor);

                h = vt_mul(a->round_first ? vt_round(h, t) : h,
                        vt_get(a->weight.data, a->weight.type, i, a->n));
                if (a->mod)
                        h = vt_fma(vt_round(h, t), vt_add(one, vt_get(scale, mt, i, a->n)),
                                vt_get(shift, mt, i, a->n));

                vt_put(y, t, i, a->n, h);
        }
}

static void norm_row(const void *arg, uint64_t row) {
        const LkNorm *a = arg;

        if (a->type == LK_F32)
                norm_typed(a, row, LK_F32, LK_F32);
        else if (a->mod_type == LK_F32)
                norm_typed(a, row, LK_BF16, LK_F32);
        else
                norm_typed(a, row, LK_BF16, LK_BF16);
}

int LK_ISA(norm)(LkContext *c, const LkNorm *a) {
        LkType mod_type = a && a->mod_type != 0 ? a->mod_type : a ? a->type : LK_F32;

        if (!c || !a || !check_rows(a->x, a->type, a->m, a->n, a->x_ld) ||
                !check_rows(a->y, a->type, a->m, a->n, a->y_ld) || !check_vector(&a->weight, a->n))
                return -EINVAL;
        if (a->mod_type != 0 && a->mod_type != a->type && a->mod_type != LK_F32)
                return -EINVAL;
        if (a->mod && a->round_first)
                return -EINVAL;
        if (a->mod && (!check_index(a->mod_index, a->m) ||
                              !check_mod_part(a->mod, mod_type, a->mod_ld, a->shift_at, a->n) ||
                              !check_mod_part(a->mod, mod_type, a->mod_ld, a->scale_at, a->n)))
                return -EINVAL;
        if (a->m == 0 || a->n == 0)
                return 0;

        rows_run(c, a->m, a->n, norm_row, a);
        return 0;
}
