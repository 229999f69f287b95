/* SPDX-License-Identifier: Apache-2.0 */
/* y = silu(gate) * up: kernels/cpu/swiglu.c, the same bits. */

#include "kernels/cuda/rows.cuh"

#define TOGETHER 2u /* pieces whose reads are under way together */
#define THREADS_MOST 512u

__device__ static inline uint32_t silu_pair(uint32_t g) {
        return pair_round(silu_near(bf16_low(g)), silu_near(bf16_high(g)));
}

__device__ static uint32_t silu_pair_any(uint32_t g) {
        return pair_settled(pair_round(number_silu(bf16_low(g)), number_silu(bf16_high(g))));
}

__device__ static inline uint4 piece_silu(const uint4 &g) {
        uint4 s = make_uint4(silu_pair(g.x), silu_pair(g.y), silu_pair(g.z), silu_pair(g.w));

        if (!silu_is_near(pair_least(pair_least(pair_least(pair_least(0x7f7f7f7fu, s.x), s.y), s.z), s.w)))
                s = make_uint4(silu_pair_any(g.x), silu_pair_any(g.y), silu_pair_any(g.z), silu_pair_any(g.w));
        return s;
}

/* A block for a row. */
__global__ static void __launch_bounds__(THREADS_MOST) swiglu_pieces(LkSwiglu a) {
        const uint64_t row = blockIdx.x;
        const uint32_t pieces = (uint32_t) (a.n / PIECE);
        const void *gate = row_at(a.gate, LK_BF16, row, a.gate_ld), *up = row_at(a.up, LK_BF16, row, a.up_ld);
        void *y = row_at_mutable(a.y, LK_BF16, row, a.y_ld);

        for (uint32_t i = threadIdx.x; i < pieces; i += TOGETHER * blockDim.x) {
                uint4 g[TOGETHER], u[TOGETHER];

#pragma unroll
                for (unsigned j = 0; j < TOGETHER; j++)
                        if (i + j * blockDim.x < pieces) {
                                g[j] = piece_load(gate, i + j * blockDim.x);
                                u[j] = piece_load(up, i + j * blockDim.x);
                        }
#pragma unroll
                for (unsigned j = 0; j < TOGETHER; j++)
                        if (i + j * blockDim.x < pieces)
                                piece_store(y, i + j * blockDim.x, piece_settled(piece_mul(piece_silu(g[j]), u[j])));
        }
}

/* A block for a row of f16. Without the short cut that bf16's fewer digits allow: the memory is as slow as this. */
__global__ static void __launch_bounds__(THREADS_MOST) swiglu_half(LkSwiglu a) {
        const uint32_t pieces = (uint32_t) (a.n / PIECE);
        const void *gate = row_at(a.gate, LK_F16, blockIdx.x, a.gate_ld), *up = row_at(a.up, LK_F16, blockIdx.x, a.up_ld);
        void *y = row_at_mutable(a.y, LK_F16, blockIdx.x, a.y_ld);

        for (uint32_t i = threadIdx.x; i < pieces; i += blockDim.x) {
                const uint4 g = piece_load(gate, i), u = piece_load(up, i);
                const uint32_t *gs = (const uint32_t *) &g, *us = (const uint32_t *) &u;
                uint32_t p[4], seen = 0;

#pragma unroll
                for (unsigned j = 0; j < 4; j++) {
                        const uint32_t s = pair_round_f16(number_silu(pair_low<LK_F16>(gs[j])), number_silu(pair_high<LK_F16>(gs[j])));

                        p[j] = pair_round_f16(__fmul_rn(pair_low<LK_F16>(s), pair_low<LK_F16>(us[j])),
                                __fmul_rn(pair_high<LK_F16>(s), pair_high<LK_F16>(us[j])));
                        seen = pair_watch_of<LK_F16>(p[j], seen);
                }
                if (!watch_clean(seen))
#pragma unroll
                        for (unsigned j = 0; j < 4; j++)
                                p[j] = pair_settled_of<LK_F16>(p[j]);
                piece_store(y, i, make_uint4(p[0], p[1], p[2], p[3]));
        }
}

__global__ static void swiglu_plain(LkSwiglu a) {
        uint64_t row = ((uint64_t) blockIdx.x * ROW_THREADS + threadIdx.x) / ROW_LANES;

        if (row >= a.m)
                return;

        const void *gate = row_at(a.gate, a.type, row, a.gate_ld), *up = row_at(a.up, a.type, row, a.up_ld);
        void *y = row_at_mutable(a.y, a.type, row, a.y_ld);

        for (uint64_t i = threadIdx.x % ROW_LANES; i < a.n; i += ROW_LANES) {
                float s = number_round_to(number_silu(number_get(gate, a.type, i)), a.type);

                number_put_as(y, a.type, i, __fmul_rn(s, number_get(up, a.type, i)));
        }
}

extern "C" int lk_cuda_swiglu(LkContext *c, const LkSwiglu *a) {
        bool pieces = a->m <= GRID_X_MAX && row_pieces(a->gate, a->gate_ld, a->n) && row_pieces(a->up, a->up_ld, a->n) &&
                      row_pieces(a->y, a->y_ld, a->n);

        if (a->m == 0 || a->n == 0)
                return 0;
        if (!check_type(a->type) || !a->gate || !a->up || !a->y || a->gate_ld < a->n || a->up_ld < a->n || a->y_ld < a->n)
                return -EINVAL;

        if (a->type == LK_F16 && pieces)
                swiglu_half<<<(unsigned) a->m, row_threads(a->n / PIECE, THREADS_MOST), 0, c->stream>>>(*a);
        else if (a->type == LK_BF16 && pieces)
                swiglu_pieces<<<(unsigned) a->m, row_threads((a->n / PIECE + TOGETHER - 1) / TOGETHER, THREADS_MOST), 0, c->stream>>>(*a);
        else if (row_blocks(a->m) > 0)
                swiglu_plain<<<row_blocks(a->m), ROW_THREADS, 0, c->stream>>>(*a);
        else
                return -EINVAL;
        return cuda_result(cudaGetLastError());
}
