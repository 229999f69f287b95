/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* One query row of a head by a block of threads, any shape, with the bits of kernels/cpu/attention.h (f32, bf16): a thread for each key of
 * a tile, then for each of PLAIN_DIM_MAX / PLAIN_THREADS dims. */

#include <math.h>

#include "kernels/cuda/context.cuh"

#define PLAIN_DIM_MAX 256u
#define PLAIN_THREADS 128u
#define PLAIN_DIMS (PLAIN_DIM_MAX / PLAIN_THREADS)

typedef struct PlainShared {
        float q[PLAIN_DIM_MAX], s[LK_KEY_TILE], sum[8];
        float many[LK_KEY_TILE]; /* how many keys one of a tile stands for; looked at on demand */
} PlainShared;

/* A thread's part. */
typedef struct PlainRow {
        float o[PLAIN_DIMS], top;
} PlainRow;

__device__ static inline void plain_begin(PlainShared &m, PlainRow &t, const LkAttention &a, uint64_t row, uint32_t head) {
        for (uint32_t d = threadIdx.x; d < a.head_dim; d += PLAIN_THREADS)
                m.q[d] = number_get(row_at(row_at(a.q, a.type, row, a.q_ld), a.type, head, a.head_dim), a.type, d);
        if (threadIdx.x < 8)
                m.sum[threadIdx.x] = 0;
        for (uint32_t i = 0; i < PLAIN_DIMS; i++)
                t.o[i] = 0;
        t.top = -INFINITY;
        __syncthreads();
}

/* The tile's scores are in m.s, -inf behind the last of n, written by whoever; value(j, d): numbers of what they are of. */
template <bool MANY, class VALUE>
__device__ static inline void plain_absorb(PlainShared &m, PlainRow &t, const LkAttention &a, uint32_t n, VALUE value) {
        const uint32_t thread = threadIdx.x;
        float most = t.top, base, factor;

        __syncthreads();
        for (uint32_t i = 0; i < LK_KEY_TILE; i++)
                most = m.s[i] > most ? m.s[i] : most;
        base = most == -INFINITY ? 0 : most;
        factor = number_exp(__fsub_rn(t.top, base));
        t.top = most;
        __syncthreads();
        if (thread < LK_KEY_TILE) {
                m.s[thread] = number_exp(__fsub_rn(m.s[thread], base));
                if (MANY)
                        m.s[thread] = __fmul_rn(m.s[thread], m.many[thread]);
        }
        __syncthreads();
        if (thread < 8) {
                float x[4];

                for (uint32_t g = 0; g < 4; g++)
                        x[g] = __fadd_rn(m.s[16 * g + thread], m.s[16 * g + 8 + thread]);
                m.sum[thread] = __fmaf_rn(m.sum[thread], factor, __fadd_rn(__fadd_rn(x[0], x[1]), __fadd_rn(x[2], x[3])));
        }
        for (uint32_t i = 0; i < PLAIN_DIMS; i++) {
                const uint32_t d = thread + i * PLAIN_THREADS;

                t.o[i] = __fmul_rn(t.o[i], factor);
                for (uint32_t j = 0; j < n && d < a.head_dim; j++)
                        t.o[i] = __fmaf_rn(number_round_to(m.s[j], a.type), value(j, d), t.o[i]);
        }
        __syncthreads();
}

/* n keys from `key` on. */
__device__ static inline void plain_keys(PlainShared &m, PlainRow &t, const LkAttention &a, uint32_t kv_head, uint64_t key, uint32_t n) {
        const void *k = row_at(a.k, a.type, kv_head, a.head_dim), *v = row_at(a.v, a.type, kv_head, a.head_dim);

        if (threadIdx.x < LK_KEY_TILE) {
                float dot = 0;

                for (uint32_t d = 0; d < a.head_dim && threadIdx.x < n; d++)
                        dot = __fmaf_rn(m.q[d], number_get(row_at(k, a.type, key + threadIdx.x, a.k_ld), a.type, d), dot);
                m.s[threadIdx.x] = threadIdx.x < n ? __fmul_rn(a.scale, dot) : -INFINITY;
        }
        plain_absorb<false>(m, t, a, n, [&](uint32_t j, uint32_t d) { return number_get(row_at(v, a.type, key + j, a.v_ld), a.type, d); });
}

/* finish(d, quotient): what is stored. */
template <class FINISH>
__device__ static inline void plain_store(PlainShared &m, PlainRow &t, const LkAttention &a, uint64_t row, uint32_t head, FINISH finish) {
        const float *sum = m.sum;
        const float total = __fadd_rn(__fadd_rn(__fadd_rn(sum[0], sum[4]), __fadd_rn(sum[2], sum[6])),
                __fadd_rn(__fadd_rn(sum[1], sum[5]), __fadd_rn(sum[3], sum[7])));

        for (uint32_t i = 0; i < PLAIN_DIMS; i++) {
                const uint32_t d = threadIdx.x + i * PLAIN_THREADS;

                if (d < a.head_dim)
                        number_put_as(row_at_mutable(row_at_mutable(a.o, a.type, row, a.o_ld), a.type, head, a.head_dim), a.type, d,
                                finish(d, total == 0 ? 0 : __fdiv_rn(t.o[i], total)));
        }
}
