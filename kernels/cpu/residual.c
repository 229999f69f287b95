/* SPDX-License-Identifier: Apache-2.0 */
/* x += gate * y with the rounding points of ops.h. */

#include <errno.h>

#include "kernels/cpu/isa.h"
#include "kernels/cpu/residual-row.h"

static void residual_task(const void *arg, uint64_t row) {
        residual_row(arg, row);
}

int LK_ISA(residual)(LkContext *c, const LkResidual *a) {
        if (!c || !a || !check_residual(a))
                return -EINVAL;
        if (a->m == 0 || a->n == 0)
                return 0;

        return rows_run(c, a->m, a->n, residual_task, a);
}
