/* SPDX-License-Identifier: Apache-2.0 */
/* Attention over lists of blocks: which kernel, and the plain one, which takes every shape and has the bits of
 * kernels/cpu/sparse-attention.c. */

#include "kernels/cuda/attention.cuh"

#include "kernels/cpu/check.h"
#include "kernels/cuda/attention-plain.cuh"

__device__ static inline uint32_t block_rows(const LkBlocks &b, uint32_t i) {
        return b.start[i + 1] - b.start[i];
}

/* n blocks that are not seen, as a tile. centre: scale * (q . centre). */
__device__ static void plain_means(PlainShared &m, PlainRow &t, const LkSparseAttention &x, uint32_t head, const uint32_t *list,
        const float *score, uint32_t n, float centre) {
        const uint32_t i = threadIdx.x, dim = x.a.head_dim;

        if (i < LK_KEY_TILE) {
                m.many[i] = i < n ? (float) block_rows(x.blocks, list[i]) : 0;
                m.s[i] = i < n ? __fadd_rn(score[list[i]], centre) : -INFINITY;
        }
        plain_absorb<true>(m, t, x.a, n, [&](uint32_t j, uint32_t d) {
                return number_round(x.value[((uint64_t) list[j] * x.a.heads + head) * dim + d], x.a.type);
        });
}

/* A block of threads for a query row of a head. */
__global__ static void __launch_bounds__(PLAIN_THREADS) sparse_plain(const __grid_constant__ LkSparseAttention x) {
        __shared__ PlainShared m;
        const uint32_t own = x.first_block + blockIdx.x / LK_BLOCK_ROWS, head = blockIdx.y, n = x.blocks.n;
        const uint64_t row = (uint64_t) x.blocks.start[own] + blockIdx.x % LK_BLOCK_ROWS, first = x.a.first_row;
        const uint64_t task = (uint64_t) head * x.n_blocks + blockIdx.x / LK_BLOCK_ROWS;
        const uint32_t *list = x.list + task * n, count = x.count[task];
        PlainRow t;

        if (row >= x.blocks.start[own + 1] || row < first || row >= first + x.a.n_q)
                return;

        plain_begin(m, t, x.a, row - first, head);
        for (uint32_t e = 0; e < count; e++)
                plain_keys(m, t, x.a, head, x.blocks.start[list[e]], block_rows(x.blocks, list[e]));
        if (x.value) {
                float sum = 0;

                for (uint32_t d = 0; d < x.a.head_dim; d++)
                        sum = __fmaf_rn(m.q[d], x.centre[(uint64_t) head * x.a.head_dim + d], sum);
                for (uint32_t e = count; e < n; e += LK_KEY_TILE)
                        plain_means(m, t, x, head, list + e, x.score + task * n, n - e < LK_KEY_TILE ? n - e : LK_KEY_TILE,
                                __fmul_rn(x.a.scale, sum));
        }
        plain_store(m, t, x.a, row - first, head, [&](uint32_t d, float y) {
                if (!x.gate)
                        return y;
                return __fmaf_rn(number_get(row_at(row_at(x.gate, x.a.type, row - first, x.gate_ld), x.a.type, head, x.a.head_dim), x.a.type, d),
                        x.coarse[((uint64_t) own * x.a.heads + head) * x.a.head_dim + d], y);
        });
}

extern "C" int lk_cuda_sparse_attention(LkContext *c, const LkSparseAttention *a) {
        int r;

        if (!c || !a || !check_activation_type(a->a.type) || !check_sparse_attention(a) || !attention_valid(&a->a))
                return -EINVAL;
        if (a->a.n_q == 0 || a->a.heads == 0)
                return 0;

        r = sparse_attention_mma(c, a);
        if (r != -EOPNOTSUPP)
                return r;
        if (a->n_blocks > GRID_X_MAX / LK_BLOCK_ROWS)
                return -EINVAL;
        sparse_plain<<<dim3(a->n_blocks * LK_BLOCK_ROWS, a->a.heads), PLAIN_THREADS, 0, c->stream>>>(*a);
        return cuda_result(cudaGetLastError());
}
