/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The abstract rank: one participant of a split step, its device and its way to the others. The model's code
 * is written over this and nothing else, so that a transport or a backend adds no model code. */

#include <stdint.h>

#include "kernels/ops.h"

typedef struct H3Range {
        uint64_t begin, end;
} H3Range;

/* The split of one step, the same on every rank; made by the broker (wire.h PLAN). */
typedef struct H3Plan {
        uint32_t ranks;
        uint32_t row_tile, chunks;
        const H3Range *rows;  /* [ranks], packed rows owned */
        const H3Range *heads; /* [ranks] */
} H3Plan;

typedef struct H3Exchange H3Exchange;
struct H3Exchange {
        /* Every rank calls each of these once, in the same order. Returns 0 or the group's first error.
         * gather: rank r has filled rows [plan.rows[r]) of the [rows, width] device array `x` (width in
         * bytes); afterwards every rank has all rows. scatter_heads: rank r has filled the columns of its
         * heads (head_width bytes each) of the [rows, heads * head_width] device array `x`; afterwards every
         * rank has all columns of its own rows. */
        int (*gather)(H3Exchange *e, uint32_t rank, void *x, uint64_t width);
        int (*scatter_heads)(H3Exchange *e, uint32_t rank, void *x, uint64_t head_width);
};

typedef struct H3Rank {
        uint32_t index;
        const LkOps *ops;
        LkContext *context;
        const H3Plan *plan;
        H3Exchange *exchange; /* NULL with one rank: nothing to move */
} H3Rank;
