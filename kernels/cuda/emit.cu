/* SPDX-License-Identifier: Apache-2.0 */
/* The last step of a product whose sums a library has left in scratch memory. Eight columns a thread, several rows. */

#include "kernels/cuda/product.cuh"

#define THREADS 256u
#define ROWS 4u /* a thread: their reads are under way together */

template <EmitType TYPE> __device__ static float sum_at(const Emit &a, uint64_t row, uint64_t col) {
        uint64_t at = row * a.sums_ld + col;

        if (TYPE == EMIT_I32)
                return __int2float_rn(((const int32_t *) a.sums)[at]);
        return number_get(a.sums, TYPE == EMIT_F32 ? LK_F32 : TYPE == EMIT_F16 ? LK_F16 : LK_BF16, at);
}

__device__ static float finish(const Emit &a, float v, float x_scale, float scale, float bias) {
        if (a.x_scale)
                v = __fmul_rn(v, x_scale);
        if (a.columns.scale)
                v = __fmul_rn(v, scale);
        return a.columns.bias ? __fadd_rn(v, bias) : v;
}

template <EmitType TYPE> __device__ static void emit_slow(const Emit &a, uint64_t row, uint64_t col) {
        float x_scale = a.x_scale ? a.x_scale[row] : 1;
        void *y = row_at_mutable(a.y, a.y_type, row, a.y_ld);

        for (uint64_t i = col; i < a.n && i < col + 8; i++)
                number_put_as(y, a.y_type, i,
                        finish(a, sum_at<TYPE>(a, row, i), x_scale, a.columns.scale ? a.columns.scale[i] : 1,
                                a.columns.bias ? a.columns.bias[i] : 0));
}

/* vectors: all of int32 or f32, everything aligned and n a multiple of eight. */
template <EmitType TYPE> __global__ static void __launch_bounds__(THREADS) emit_kernel(const __grid_constant__ Emit a, bool vectors) {
        uint64_t per_row = (a.n + 7) / 8, at = (uint64_t) blockIdx.x * THREADS + threadIdx.x, row = at / per_row * ROWS,
                 col = at % per_row * 8;
        uint32_t n = row < a.m ? (uint32_t) (a.m - row < ROWS ? a.m - row : ROWS) : 0;
        float scale[8], bias[8];
        uint4 u[ROWS][2];

        if (!vectors || n < ROWS) {
                for (uint32_t i = 0; i < n; i++)
                        emit_slow<TYPE>(a, row + i, col);
                return;
        }

#pragma unroll
        for (uint32_t i = 0; i < ROWS; i++)
#pragma unroll
                for (uint32_t j = 0; j < 2; j++)
                        u[i][j] = __ldcs((const uint4 *) ((const uint32_t *) a.sums + (row + i) * a.sums_ld + col) + j);
#pragma unroll
        for (uint32_t i = 0; i < 8; i++) {
                scale[i] = a.columns.scale ? a.columns.scale[col + i] : 1;
                bias[i] = a.columns.bias ? a.columns.bias[col + i] : 0;
        }
#pragma unroll
        for (uint32_t i = 0; i < ROWS; i++) {
                const uint32_t *s = (const uint32_t *) u[i];
                float x_scale = a.x_scale ? a.x_scale[row + i] : 1, v[8];
                void *y = row_at_mutable(a.y, a.y_type, row + i, a.y_ld);

#pragma unroll
                for (uint32_t j = 0; j < 8; j++)
                        v[j] = finish(a, TYPE == EMIT_I32 ? __int2float_rn((int32_t) s[j]) : __uint_as_float(s[j]), x_scale, scale[j], bias[j]);
                if (a.y_type == LK_F32) {
                        ((float4 *) ((float *) y + col))[0] = make_float4(v[0], v[1], v[2], v[3]);
                        ((float4 *) ((float *) y + col))[1] = make_float4(v[4], v[5], v[6], v[7]);
                } else {
                        uint4 packed;

                        packed.x = bf16_from_f32(v[0]) | (uint32_t) bf16_from_f32(v[1]) << 16;
                        packed.y = bf16_from_f32(v[2]) | (uint32_t) bf16_from_f32(v[3]) << 16;
                        packed.z = bf16_from_f32(v[4]) | (uint32_t) bf16_from_f32(v[5]) << 16;
                        packed.w = bf16_from_f32(v[6]) | (uint32_t) bf16_from_f32(v[7]) << 16;
                        *(uint4 *) ((uint16_t *) y + col) = packed;
                }
        }
}

int product_emit(cudaStream_t stream, const Emit *a) {
        uint64_t threads = (a->m + ROWS - 1) / ROWS * ((a->n + 7) / 8), blocks = (threads + THREADS - 1) / THREADS;
        bool vectors = (a->type == EMIT_I32 || a->type == EMIT_F32) && a->y_type != LK_F16 && a->n % 8 == 0 && is_aligned(a->sums, a->sums_ld * 4) &&
                       is_aligned(a->y, a->y_ld * lk_type_size(a->y_type)) && is_aligned(a->columns.scale, 0) && is_aligned(a->columns.bias, 0);

        if (blocks > GRID_X_MAX)
                return -EINVAL;
        switch (a->type) {
        case EMIT_I32:
                emit_kernel<EMIT_I32><<<(unsigned) blocks, THREADS, 0, stream>>>(*a, vectors);
                break;
        case EMIT_F32:
                emit_kernel<EMIT_F32><<<(unsigned) blocks, THREADS, 0, stream>>>(*a, vectors);
                break;
        case EMIT_BF16:
                emit_kernel<EMIT_BF16><<<(unsigned) blocks, THREADS, 0, stream>>>(*a, false);
                break;
        case EMIT_F16:
                emit_kernel<EMIT_F16><<<(unsigned) blocks, THREADS, 0, stream>>>(*a, false);
                break;
        }
        return cuda_result(cudaGetLastError());
}
