/* SPDX-License-Identifier: Apache-2.0 */
/* f32 <-> bf16, and plain copies: kernels/cpu/convert.c, the same bits. */

#include "kernels/cuda/rows.cuh"

/* A block for a row. */
__global__ static void __launch_bounds__(256) narrow_pieces(LkConvert a) {
        const void *x = row_at(a.x, LK_F32, blockIdx.x, a.x_ld);
        void *y = row_at_mutable(a.y, LK_BF16, blockIdx.x, a.y_ld);

        for (uint32_t i = threadIdx.x; i < a.n / PIECE; i += blockDim.x) {
                float4 u = ((const float4 *) x)[2 * i], v = ((const float4 *) x)[2 * i + 1];

                piece_store(y, i, piece_settled(make_uint4(pair_round(u.x, u.y), pair_round(u.z, u.w), pair_round(v.x, v.y), pair_round(v.z, v.w))));
        }
}

__global__ static void __launch_bounds__(256) widen_pieces(LkConvert a) {
        const void *x = row_at(a.x, LK_BF16, blockIdx.x, a.x_ld);
        void *y = row_at_mutable(a.y, LK_F32, blockIdx.x, a.y_ld);

        for (uint32_t i = threadIdx.x; i < a.n / PIECE; i += blockDim.x) {
                float v[PIECE];

                piece_floats(piece_load(x, i), v);
                ((float4 *) y)[2 * i] = make_float4(v[0], v[1], v[2], v[3]);
                ((float4 *) y)[2 * i + 1] = make_float4(v[4], v[5], v[6], v[7]);
        }
}

/* A number at its own address only, so that equal types keep even the bits of a NaN. */
__global__ static void convert_plain(LkConvert a) {
        uint64_t row = ((uint64_t) blockIdx.x * ROW_THREADS + threadIdx.x) / ROW_LANES;

        if (row >= a.m)
                return;

        const void *x = row_at(a.x, a.x_type, row, a.x_ld);
        void *y = row_at_mutable(a.y, a.y_type, row, a.y_ld);

        for (uint64_t i = threadIdx.x % ROW_LANES; i < a.n; i += ROW_LANES)
                number_put(y, a.y_type, i, number_get(x, a.x_type, i));
}

extern "C" int lk_cuda_convert(LkContext *c, const LkConvert *a) {
        bool pieces = a->m <= GRID_X_MAX && row_pieces(a->x, a->x_ld, a->n) && row_pieces(a->y, a->y_ld, a->n);

        if (a->m == 0 || a->n == 0)
                return 0;
        if (!check_activation_type(a->x_type) || !check_activation_type(a->y_type) || !a->x || !a->y || a->x_ld < a->n || a->y_ld < a->n)
                return -EINVAL;

        if (a->x_type == a->y_type) {
                uint64_t size = lk_type_size(a->x_type);

                return cuda_result(cudaMemcpy2DAsync(
                        a->y, a->y_ld * size, a->x, a->x_ld * size, a->n * size, a->m, cudaMemcpyDeviceToDevice, c->stream));
        }
        if (pieces && a->x_type == LK_F32)
                narrow_pieces<<<(unsigned) a->m, row_threads(a->n / PIECE, 256), 0, c->stream>>>(*a);
        else if (pieces)
                widen_pieces<<<(unsigned) a->m, row_threads(a->n / PIECE, 256), 0, c->stream>>>(*a);
        else if (row_blocks(a->m) > 0)
                convert_plain<<<row_blocks(a->m), ROW_THREADS, 0, c->stream>>>(*a);
        else
                return -EINVAL;
        return cuda_result(cudaGetLastError());
}
