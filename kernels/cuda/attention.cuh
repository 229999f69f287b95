/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* What the parts of attention share. */

#include "kernels/cuda/context.cuh"

typedef struct Attention {
        LkAttention a;
        uint32_t group; /* query heads that share a key head */
        float unit;     /* |scale| * log2(e) */
        bool negative;  /* scale is */
        unsigned sequences; /* at least 1 */
} Attention;

static inline cudaStream_t attention_stream(LkContext *c, const LkAttention *a) {
        c->aside |= a->aside;
        return a->aside ? c->side : c->stream;
}

/* Whether the arguments hold what ops.h says; whether rows and heads start at multiples of 16 bytes, which the kernels of mma.sync want. */
bool attention_valid(const LkAttention *a);
bool attention_has_pieces(const LkAttention *a);
Attention attention_call(const LkAttention *a);

/* By mma.sync; any multiple of 8 up to 256 as head size, rows of 16-byte pieces. */
int attention_bf16(LkContext *c, const Attention *a);
int attention_f16(LkContext *c, const Attention *a);
/* Over lists of blocks, bf16, heads up to 128. -EOPNOTSUPP: it does not serve the arguments, nothing was done. */
int sparse_attention_mma(LkContext *c, const LkSparseAttention *a);
/* By Hopper's instructions, every key for every query: bf16, heads of 128, one sequence; f16, heads of 64. -EOPNOTSUPP: it does not serve the arguments, nothing was done. */
int attention_sm90(LkContext *c, const Attention *a);
