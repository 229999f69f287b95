/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Sparse attention of a step (h3.md 7): which rows make a block, in which order a step packs them, which blocks are seen
 * in any case. The choice itself is made by the device in every block of the model (kernels/ops.h). */

#include <stdbool.h>
#include <stdint.h>

#include "service/h3/layout.h"
#include "service/shared/sparse.h"

typedef struct H3Sparse {
        SparseOptions options;
        uint64_t rows;
        uint32_t n;      /* blocks */
        uint32_t *start; /* [n + 1]: rows of block b, as the step packs them, are start[b] .. start[b + 1] - 1 */
        uint64_t *order; /* VSA, [rows]: packed row i is row order[i] of the layout, of the same segment; NULL: i */
        uint32_t sinks, dense_begin, dense_end; /* as in LkRoute */
        uint32_t keep;                          /* SLA, VSA */
} H3Sparse;

/* SOL, SLA: 64 rows of the layout after the other. VSA: each segment but the target's video likewise, by itself; that one
 * in cubes of 4 x 4 x 4 patches of (t, h, w), t slowest, smaller at the edges, the patches of a cube in their order.
 * -ENOMEM. */
int h3_sparse_new(const H3Config *c, const H3Layout *l, const SparseOptions *o, H3Sparse **ret);
H3Sparse *h3_sparse_free(H3Sparse *s);

/* Whether a step of `rows` rows at that sigma is sparse. */
bool h3_sparse_applies(const SparseOptions *o, uint64_t rows, float sigma_video);

/* Whether the coarse branch is there. */
static inline bool h3_sparse_is_gated(const H3Sparse *s) {
        return s && s->options.method == SPARSE_VSA;
}

/* What the packed row is in the layout. s may be NULL. */
static inline uint64_t h3_sparse_row(const H3Sparse *s, uint64_t row) {
        return s && s->order ? s->order[row] : row;
}

/* The block that a row is in. */
uint32_t h3_sparse_block(const H3Sparse *s, uint64_t row);

/* Blocks of `scored`, without sinks, that SLA and VSA choose. */
uint32_t h3_sparse_keep(double percent, uint32_t scored);
