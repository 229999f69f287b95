/* SPDX-License-Identifier: Apache-2.0 */
/* Element-wise functions: kernels/cpu/activate.c, operation for operation. */

#include "kernels/cuda/rows.cuh"

__device__ static inline float gelu_tanh(float x) {
        float cubic = __fmaf_rn(__fmul_rn(x, x), 0.044715f, 1.0f);

        return __fdiv_rn(x, __fadd_rn(1.0f, number_exp(__fmul_rn(__fmul_rn(x, -0x1.988454p+0f), cubic))));
}

__device__ static inline float gelu(float x) {
        const float terms[] = {0x1.11d314p-5f, -0x1.8c0aa6p-3f, 0x1.8dd0fap-2f, -0x1.4cabc8p-2f, 0x1.308962p-2f, -0x1.100e34p-6f,
                0x1.ec9cfap-4f, 0x1.85865ap-4f, 0x1.9a6672p-4f, -0x1.4d1d6p-16f};
        float size = x > -x ? x : -x; /* a NaN stays */
        float minus_a = -16.0f > -size ? -16.0f : -size, a = -minus_a;
        float t = __fdiv_rn(1.0f, __fmaf_rn(a, 0.25f, 1.0f));
        float square = __fmul_rn(a, a), lost = __fmaf_rn(a, a, -square);
        float e = number_exp(__fmul_rn(square, -0.5f)), p = terms[0];

#pragma unroll
        for (unsigned i = 1; i < sizeof(terms) / sizeof(*terms); i++)
                p = __fmaf_rn(p, t, terms[i]);
        e = __fmaf_rn(__fmul_rn(e, -0.5f), lost, e);
        return __fmaf_rn(__fmul_rn(minus_a, p), e, x > 0.0f ? x : 0.0f);
}

template <LkFunction FUNCTION> __device__ static inline float function(float x) {
        return FUNCTION == LK_SILU ? number_silu(x) : FUNCTION == LK_GELU ? gelu(x) : gelu_tanh(x);
}

/* A block for a row. */
template <LkFunction FUNCTION> __global__ static void __launch_bounds__(256) activate_pieces(LkActivate a) {
        const void *x = row_at(a.x, LK_BF16, blockIdx.x, a.x_ld);
        void *y = row_at_mutable(a.y, LK_BF16, blockIdx.x, a.y_ld);

        for (uint32_t i = threadIdx.x; i < a.n / PIECE; i += blockDim.x) {
                float v[PIECE];

                piece_floats(piece_load(x, i), v);
#pragma unroll
                for (unsigned j = 0; j < PIECE; j++)
                        v[j] = function<FUNCTION>(v[j]);
                piece_store(y, i, piece_settled(piece_round(v)));
        }
}

template <LkFunction FUNCTION> __global__ static void activate_plain(LkActivate a) {
        uint64_t row = ((uint64_t) blockIdx.x * ROW_THREADS + threadIdx.x) / ROW_LANES;

        if (row < a.m)
                for (uint64_t i = threadIdx.x % ROW_LANES; i < a.n; i += ROW_LANES)
                        number_put(row_at_mutable(a.y, a.type, row, a.y_ld), a.type, i,
                                function<FUNCTION>(number_get(row_at(a.x, a.type, row, a.x_ld), a.type, i)));
}

template <LkFunction FUNCTION> static int launch(LkContext *c, const LkActivate *a) {
        if (a->type == LK_BF16 && a->m <= GRID_X_MAX && row_pieces(a->x, a->x_ld, a->n) && row_pieces(a->y, a->y_ld, a->n))
                activate_pieces<FUNCTION><<<(unsigned) a->m, row_threads(a->n / PIECE, 256), 0, c->stream>>>(*a);
        else if (row_blocks(a->m) > 0)
                activate_plain<FUNCTION><<<row_blocks(a->m), ROW_THREADS, 0, c->stream>>>(*a);
        else
                return -EINVAL;
        return cuda_result(cudaGetLastError());
}

extern "C" int lk_cuda_activate(LkContext *c, const LkActivate *a) {
        if (a->function < LK_SILU || a->function >= _LK_FUNCTION_MAX)
                return -EINVAL;
        if (a->m == 0 || a->n == 0)
                return 0;
        if (!check_activation_type(a->type) || !a->x || !a->y || a->x_ld < a->n || a->y_ld < a->n)
                return -EINVAL;

        return a->function == LK_SILU   ? launch<LK_SILU>(c, a)
               : a->function == LK_GELU ? launch<LK_GELU>(c, a)
                                        : launch<LK_GELU_TANH>(c, a);
}
