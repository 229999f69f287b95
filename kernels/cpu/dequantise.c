/* SPDX-License-Identifier: Apache-2.0 */
/* A matrix as f32 rows, or as bf16 rows. */

#include <errno.h>

#include "kernels/cpu/check.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/quant.h"
#include "kernels/cpu/rows.h"

static void dequantise_row(const void *arg, uint64_t row) {
        const LkDequantise *a = arg;
        float *y = a->y + row * a->y_ld;
        const uint8_t *w = quant_row(&a->w, row);

        if (a->w.type >= LK_I8)
                quant_expand(&a->w, row, 0, a->w.cols, y);
        else
                for (uint64_t i = 0; i < a->w.cols; i++)
                        y[i] = number_get(w, a->w.type, i);
}

int LK_ISA(dequantise)(LkContext *c, const LkDequantise *a) {
        if (!c || !a || !check_dequantise(a))
                return -EINVAL;
        if (a->w.rows == 0 || a->w.cols == 0)
                return 0;

        return rows_run(c, a->w.rows, a->w.cols, dequantise_row, a);
}

#define EXPAND_COLUMNS 1024u /* at a time: whole groups of any rotation */

static void expand_row(const void *arg, uint64_t row) {
        const LkExpand *a = arg;
        uint16_t *y = a->y + row * a->w.cols;
        float f[EXPAND_COLUMNS];

        for (uint64_t k = 0; k < a->w.cols; k += EXPAND_COLUMNS) {
                uint64_t n = a->w.cols - k < EXPAND_COLUMNS ? a->w.cols - k : EXPAND_COLUMNS;

                quant_expand(&a->w, row, k, n, f);
                quant_scale_columns(&a->w, k, n, f);
                for (uint64_t i = 0; i < n; i++)
                        y[k + i] = bf16_from_f32(f[i]);
        }
}

int LK_ISA(expand)(LkContext *c, const LkExpand *a) {
        if (!c || !a || !check_expand(a))
                return -EINVAL;
        if (a->w.rows == 0 || a->w.cols == 0)
                return 0;

        return rows_run(c, a->w.rows, a->w.cols, expand_row, a);
}
