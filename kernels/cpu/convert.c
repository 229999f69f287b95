/* SPDX-License-Identifier: Apache-2.0 */
/* f32 <-> bf16, and plain copies. */

#include <errno.h>

#include "kernels/cpu/check.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/rows.h"
#include "kernels/cpu/vec.h"

VEC_INLINE void convert_typed(const LkConvert *a, uint64_t row, LkType from, LkType to) {
        const void *x = rows_at(a->x, from, row, a->x_ld);
        void *y = rows_at_mutable(a->y, to, row, a->y_ld);

        for (uint64_t i = 0; i < a->n; i += VT_N)
                vt_put(y, to, i, a->n, vt_get(x, from, i, a->n));
}

static void convert_row(const void *arg, uint64_t row) {
        const LkConvert *a = arg;

        if (a->x_type == a->y_type)
                memcpy(rows_at_mutable(a->y, a->y_type, row, a->y_ld),
                        rows_at(a->x, a->x_type, row, a->x_ld), a->n * lk_type_size(a->x_type));
        else if (a->x_type == LK_F32)
                convert_typed(a, row, LK_F32, LK_BF16);
        else
                convert_typed(a, row, LK_BF16, LK_F32);
}

int LK_ISA(convert)(LkContext *c, const LkConvert *a) {
        if (!c || !a || !check_rows(a->x, a->x_type, a->m, a->n, a->x_ld) ||
                !check_rows(a->y, a->y_type, a->m, a->n, a->y_ld))
                return -EINVAL;
        if (a->m == 0 || a->n == 0)
                return 0;

        return rows_run(c, a->m, a->n, convert_row, a);
}
