/* SPDX-License-Identifier: Apache-2.0 */
/* Means of blocks of rows, and their distance from the mean of all. */

#include <errno.h>

#include "kernels/cpu/check.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/rows.h"
#include "kernels/cpu/vec.h"

static void mean_of_block(const void *arg, uint64_t block) {
        const LkBlockMeans *a = arg;
        uint64_t width = (uint64_t) a->heads * a->head_dim;
        uint64_t begin = a->blocks.start[block], end = a->blocks.start[block + 1];

        for (uint64_t i = 0; i < width; i += VT_N) {
                VT sum = vt_zero();

                for (uint64_t row = begin; row < end; row++)
                        sum = vt_add(sum, vt_get(rows_at(a->x, a->type, row, a->x_ld), a->type, i, width));
                vt_put(a->mean + block * width, LK_F32, i, width, vt_div(sum, vt_set1((float) (end - begin))));
        }
}

/* One (head, dim). */
static void centre_column(const void *arg, uint64_t i) {
        const LkBlockMeans *a = arg;
        uint64_t width = (uint64_t) a->heads * a->head_dim;
        float lanes[8] = {}, *x = a->mean + i, centre;

        for (uint32_t b = 0; b < a->blocks.n; b++)
                lanes[b % 8] += x[b * width];
        centre = v8_sum(v8_load(lanes)) / (float) a->blocks.n;
        a->centre[i] = centre;

        memset(lanes, 0, sizeof(lanes));
        for (uint32_t b = 0; b < a->blocks.n; b++) {
                x[b * width] -= centre;
                lanes[b % 8] = f32_fma(x[b * width], x[b * width], lanes[b % 8]);
        }
        a->centre[width + i] = v8_sum(v8_load(lanes)) / (float) a->blocks.n;
}

int LK_ISA(block_means)(LkContext *c, const LkBlockMeans *a) {
        uint64_t width;
        int r;

        if (!c || !a || !check_block_means(a))
                return -EINVAL;

        width = (uint64_t) a->heads * a->head_dim;
        r = rows_run(c, a->blocks.n, width * LK_BLOCK_ROWS, mean_of_block, a);
        if (r < 0 || !a->centre)
                return r;
        return rows_run(c, width, a->blocks.n, centre_column, a);
}
