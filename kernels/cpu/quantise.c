/* SPDX-License-Identifier: Apache-2.0 */
/* Rows to int8 with one scale each, by the steps of ops.h. */

#include <errno.h>

#include "kernels/cpu/check.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/quantise-row.h"

typedef struct QuantiseJob {
        const LkQuantise *args;
        float *rows; /* one of row_ld numbers per thread */
        uint64_t row_ld;
        uint64_t rows_per_task;
} QuantiseJob;

VEC_INLINE void quantise_typed(const LkQuantise *a, uint64_t row, float *v, LkType t) {
        quantise_load(a, row, v, t);
        quantise_values(a, row, v, t);
}

static void quantise_task(void *userdata, uint64_t task, uint32_t thread) {
        const QuantiseJob *j = userdata;
        const LkQuantise *a = j->args;
        float *v = j->rows + thread * j->row_ld;

        for (uint64_t i = task * j->rows_per_task; i < (task + 1) * j->rows_per_task && i < a->m; i++)
                if (a->x_type == LK_BF16)
                        quantise_typed(a, i, v, LK_BF16);
                else
                        quantise_typed(a, i, v, LK_F32);
}

int LK_ISA(quantise)(LkContext *c, const LkQuantise *a) {
        QuantiseJob j = {.args = a};
        void *scratch;
        int r;

        if (!c || !a || !check_rows(a->x, a->x_type, a->m, a->k, a->x_ld) ||
                (a->up && !check_rows(a->up, a->x_type, a->m, a->k, a->up_ld)) ||
                !check_bytes(a->q, a->m, a->k, a->q_ld) || !check_rows(a->scale, LK_F32, a->m, 1, 1) ||
                !check_rotation(a->rotation, a->k) || a->k > PTRDIFF_MAX / 8 / THREADS_MAX)
                return -EINVAL;
        if (a->m == 0 || a->k == 0)
                return 0;

        j.row_ld = (a->k + 63) / 64 * 64;
        j.rows_per_task = rows_per_task(a->k);
        r = context_scratch(c, threads_count(c->threads) * j.row_ld * sizeof(float), &scratch);
        if (r < 0)
                return r;
        j.rows = scratch;
        return threads_run(c->threads, a->m / j.rows_per_task + (a->m % j.rows_per_task != 0), quantise_task, &j);
}
