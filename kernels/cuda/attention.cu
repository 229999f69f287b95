/* SPDX-License-Identifier: Apache-2.0 */
/* Attention: which kernel, and the plain one, which takes every shape and has the bits of kernels/cpu/attention.c. */

#include "kernels/cuda/attention.cuh"

#include <math.h>

#include "kernels/cpu/check.h"
#include "kernels/cuda/cuda.h"

#define HEAD_DIM_MAX 256u
#define THREADS 128u

/* How many keys a query row sees. */
__device__ static inline uint64_t keys_seen(const LkAttention &a, uint64_t row) {
        return a.causal ? a.first_row + row + 1 : a.n_k;
}

/* A block for a query row of a head: a thread for each key of a tile, then for each of a thread's dims. */
__global__ static void __launch_bounds__(THREADS) attention_plain(const __grid_constant__ Attention b) {
        __shared__ float q[HEAD_DIM_MAX], s[LK_KEY_TILE], sum[8];
        const LkAttention &a = b.a;
        const uint64_t row = blockIdx.x, end = keys_seen(a, row), at = blockIdx.z * a.n_q + row;
        const uint32_t head = blockIdx.y, kv_head = head / b.group, thread = threadIdx.x;
        const void *k = row_at(row_at(a.k, a.type, blockIdx.z * a.n_k, a.k_ld), a.type, kv_head, a.head_dim);
        const void *v = row_at(row_at(a.v, a.type, blockIdx.z * a.n_k, a.v_ld), a.type, kv_head, a.head_dim);
        float o[HEAD_DIM_MAX / THREADS] = {}, top = -INFINITY, total;

        for (uint32_t d = thread; d < a.head_dim; d += THREADS)
                q[d] = number_get(row_at(row_at(a.q, a.type, at, a.q_ld), a.type, head, a.head_dim), a.type, d);
        if (thread < 8)
                sum[thread] = 0;

        for (uint64_t key = 0; key < end; key += LK_KEY_TILE) {
                const uint32_t n = end - key < LK_KEY_TILE ? (uint32_t) (end - key) : LK_KEY_TILE;
                float most = top, base, factor;

                __syncthreads();
                if (thread < LK_KEY_TILE) {
                        float dot = 0;

                        for (uint32_t d = 0; d < a.head_dim && thread < n; d++)
                                dot = __fmaf_rn(q[d], number_get(row_at(k, a.type, key + thread, a.k_ld), a.type, d), dot);
                        s[thread] = thread < n ? __fmul_rn(a.scale, dot) : -INFINITY;
                }
                __syncthreads();
                for (uint32_t i = 0; i < LK_KEY_TILE; i++)
                        most = s[i] > most ? s[i] : most;
                base = most == -INFINITY ? 0 : most;
                factor = number_exp(__fsub_rn(top, base));
                top = most;
                __syncthreads();
                if (thread < LK_KEY_TILE)
                        s[thread] = number_exp(__fsub_rn(s[thread], base));
                __syncthreads();
                if (thread < 8) {
                        float t[4];

                        for (uint32_t g = 0; g < 4; g++)
                                t[g] = __fadd_rn(s[16 * g + thread], s[16 * g + 8 + thread]);
                        sum[thread] = __fmaf_rn(sum[thread], factor, __fadd_rn(__fadd_rn(t[0], t[1]), __fadd_rn(t[2], t[3])));
                }
                for (uint32_t i = 0; i < HEAD_DIM_MAX / THREADS; i++) {
                        const uint32_t d = thread + i * THREADS;

                        o[i] = __fmul_rn(o[i], factor);
                        for (uint32_t j = 0; j < n && d < a.head_dim; j++)
                                o[i] = __fmaf_rn(number_round_to(s[j], a.type), number_get(row_at(v, a.type, key + j, a.v_ld), a.type, d), o[i]);
                }
        }
        __syncthreads();
        total = __fadd_rn(__fadd_rn(__fadd_rn(sum[0], sum[4]), __fadd_rn(sum[2], sum[6])),
                __fadd_rn(__fadd_rn(sum[1], sum[5]), __fadd_rn(sum[3], sum[7])));
        for (uint32_t i = 0; i < HEAD_DIM_MAX / THREADS; i++)
                if (thread + i * THREADS < a.head_dim)
                        number_put_as(row_at_mutable(row_at_mutable(a.o, a.type, at, a.o_ld), a.type, head, a.head_dim), a.type,
                                thread + i * THREADS, total == 0 ? 0 : __fdiv_rn(o[i], total));
}

/* Rows and heads start at multiples of 16 bytes. */
static bool has_pieces(const LkAttention *a) {
        return a->type != LK_F32 && a->head_dim % 8 == 0 && a->scale != 0 && isfinite(a->scale) &&
               ((uintptr_t) a->q | (uintptr_t) a->k | (uintptr_t) a->v) % 16 == 0 && (a->q_ld | a->k_ld | a->v_ld) % 8 == 0;
}

static bool attention_valid(const LkAttention *a) {
        const uint64_t n = (uint64_t) a->heads * a->head_dim, keys = a->kv_heads > 0 ? (uint64_t) a->kv_heads * a->head_dim : n;

        if (!check_type(a->type) || a->head_dim == 0 || a->head_dim % 4 || a->head_dim > HEAD_DIM_MAX || a->n_k == 0 ||
                (a->kv_heads > 0 && a->heads % a->kv_heads))
                return false;
        if (a->causal && (a->first_row > a->n_k || a->n_q > a->n_k - a->first_row))
                return false;
        return a->n_q == 0 || a->heads == 0 ||
               (a->q && a->k && a->v && a->o && a->q_ld >= n && a->o_ld >= n && a->k_ld >= keys && a->v_ld >= keys && a->n_q <= GRID_X_MAX &&
                       a->heads <= GRID_Y_MAX && a->sequences <= GRID_Y_MAX);
}

extern "C" int lk_cuda_attention(LkContext *c, const LkAttention *a) {
        Attention b = {*a};

        if (!attention_valid(a))
                return -EINVAL;
        if (a->n_q == 0 || a->heads == 0)
                return 0;

        b.group = a->kv_heads > 0 ? a->heads / a->kv_heads : 1;
        b.unit = fabsf(a->scale) * 1.4426950408889634f;
        b.negative = a->scale < 0;
        b.sequences = a->sequences > 0 ? (unsigned) a->sequences : 1;
#ifdef LK_CUDA_SM90
        if (c->arch == 90 && !c->portable) {
                int r = attention_sm90(c, &b);

                if (r != -EOPNOTSUPP)
                        return r;
        }
#endif
        if (has_pieces(a))
                return a->type == LK_BF16 ? attention_bf16(c, &b) : attention_f16(c, &b);

        attention_plain<<<dim3((unsigned) a->n_q, a->heads, b.sequences), THREADS, 0, c->stream>>>(b);
        return cuda_result(cudaGetLastError());
}

extern "C" void lk_cuda_attention_set(LkContext *c, bool portable) {
        c->portable = portable;
}
