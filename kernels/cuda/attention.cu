/* SPDX-License-Identifier: Apache-2.0 */
/* Attention: which kernel, and the plain one, which takes every shape and has the bits of kernels/cpu/attention.c. */

#include "kernels/cuda/attention.cuh"

#include <math.h>

#include "kernels/cpu/check.h"
#include "kernels/cuda/attention-plain.cuh"
#include "kernels/cuda/cuda.h"

/* How many keys a query row sees. */
__device__ static inline uint64_t keys_seen(const LkAttention &a, uint64_t row) {
        return a.causal ? a.first_row + row + 1 : a.n_k;
}

/* A block for a query row of a head. */
__global__ static void __launch_bounds__(PLAIN_THREADS) attention_plain(const __grid_constant__ Attention b) {
        __shared__ PlainShared m;
        const LkAttention &a = b.a;
        const uint64_t row = blockIdx.x, end = keys_seen(a, row), at = blockIdx.z * a.n_q + row, first_key = blockIdx.z * a.n_k;
        const uint32_t head = blockIdx.y, kv_head = head / b.group;
        PlainRow t;

        plain_begin(m, t, a, at, head);
        for (uint64_t key = 0; key < end; key += LK_KEY_TILE)
                plain_keys(m, t, a, kv_head, first_key + key, end - key < LK_KEY_TILE ? (uint32_t) (end - key) : LK_KEY_TILE);
        plain_store(m, t, a, at, head, [](uint32_t, float y) { return y; });
}

bool attention_has_pieces(const LkAttention *a) {
        return a->type != LK_F32 && a->head_dim % 8 == 0 && a->scale != 0 && isfinite(a->scale) &&
               ((uintptr_t) a->q | (uintptr_t) a->k | (uintptr_t) a->v) % 16 == 0 && (a->q_ld | a->k_ld | a->v_ld) % 8 == 0;
}

bool attention_valid(const LkAttention *a) {
        const uint64_t n = (uint64_t) a->heads * a->head_dim, keys = a->kv_heads > 0 ? (uint64_t) a->kv_heads * a->head_dim : n;

        if (!check_type(a->type) || a->head_dim == 0 || a->head_dim % 4 || a->head_dim > PLAIN_DIM_MAX || a->n_k == 0 ||
                (a->kv_heads > 0 && a->heads % a->kv_heads))
                return false;
        if (a->causal && (a->first_row > a->n_k || a->n_q > a->n_k - a->first_row))
                return false;
        return a->n_q == 0 || a->heads == 0 ||
               (a->q && a->k && a->v && a->o && a->q_ld >= n && a->o_ld >= n && a->k_ld >= keys && a->v_ld >= keys && a->n_q <= GRID_X_MAX &&
                       a->heads <= GRID_Y_MAX && a->sequences <= GRID_Y_MAX);
}

Attention attention_call(const LkAttention *a) {
        Attention b = {*a};

        b.group = a->kv_heads > 0 ? a->heads / a->kv_heads : 1;
        b.unit = fabsf(a->scale) * 1.4426950408889634f;
        b.negative = a->scale < 0;
        b.sequences = a->sequences > 0 ? (unsigned) a->sequences : 1;
        return b;
}

extern "C" int lk_cuda_attention(LkContext *c, const LkAttention *a) {
        Attention b;

        if (!attention_valid(a))
                return -EINVAL;
        if (a->n_q == 0 || a->heads == 0)
                return 0;

        b = attention_call(a);
#ifdef LK_CUDA_SM90
        if (c->arch == 90 && c->attention != LK_CUDA_ATTENTION_PORTABLE) {
                int r = attention_sm90(c, &b);

                if (r != -EOPNOTSUPP)
                        return r;
        }
#endif
        if (attention_has_pieces(a))
                return a->type == LK_BF16 ? attention_bf16(c, &b) : attention_f16(c, &b);

        attention_plain<<<dim3((unsigned) a->n_q, a->heads, b.sequences), PLAIN_THREADS, 0, attention_stream(c, a)>>>(b);
        return cuda_result(cudaGetLastError());
}

extern "C" void lk_cuda_attention_set(LkContext *c, LkCudaAttention kernels) {
        c->attention = kernels;
}
