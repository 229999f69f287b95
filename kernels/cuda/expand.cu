/* SPDX-License-Identifier: Apache-2.0 */
/* Matrices in their file's numbers to f32 (dequantise, the CPU's bits) and to bf16 for the multiply instructions. */

#include "kernels/cpu/check.h"
#include "kernels/cuda/product.cuh"

#define THREADS 256u
#define CHUNK 1024u /* columns of a row that a block expands: whole groups of any rotation */

static_assert(CHUNK % LK_ROTATION_MAX == 0, "a rotation's group would be cut");

__device__ static float f32_from_e4m3(uint8_t u) {
        uint32_t sign = (uint32_t) (u & 0x80u) << 24, exponent = (u >> 3) & 15u, fraction = u & 7u;

        if ((u & 0x7fu) == 0x7fu)
                return __uint_as_float(sign | 0x7fc00000u);
        if (exponent == 0)
                return __uint_as_float(sign | __float_as_uint(__fmul_rn((float) fraction, 0x1p-9f)));
        return __uint_as_float(sign | (exponent + 120u) << 23 | fraction << 20);
}

__device__ static float f32_from_e5m2(uint8_t u) {
        const uint16_t half = (uint16_t) ((uint16_t) u << 8);

        return number_get(&half, LK_F16, 0);
}

__device__ static float f32_from_e2m1(uint32_t nibble) {
        float magnitude = (float) (0xc8643210u >> (nibble & 7) * 4 & 15) * 0.5f;

        return nibble & 8 ? -magnitude : magnitude;
}

/* A division of 64 bits takes as long as dozens of numbers: rows of the first block, which is all of a matrix that a worker fetched, go without. */
__device__ static const uint8_t *near_row(const LkMatrix &w, uint64_t r) {
        return r < w.block_rows ? (const uint8_t *) w.data + r * w.row_stride : matrix_row(w, r);
}

/* The row of the tensor that row r of a view is. */
__device__ static uint64_t tensor_row(const LkMatrix &w, uint64_t r) {
        if (r < w.block_rows)
                return w.quant.first_row + r;

        uint64_t block = r / w.block_rows;

        return w.quant.first_row + (block > 0 ? block * (w.block_stride / w.row_stride) : 0) + r % w.block_rows;
}

__device__ static float row_scale(const LkMatrix &w, uint64_t r) {
        return weight_get((const uint8_t *) w.quant.scale + tensor_row(w, r) * w.quant.scale_stride, LK_F32, 0);
}

__device__ static float block_scale(const LkQuant &q, uint64_t row, uint64_t col) {
        uint64_t tile = row / 128 * (q.block_scale_cols / 4) + col / 4;

        return f32_from_e4m3(((const uint8_t *) q.block_scale)[tile * 512 + row % 32 * 16 + row % 128 / 32 * 4 + col % 4]);
}

/* Number k of a row as it stands in the file. */
__device__ static float stored(const LkMatrix &w, const uint8_t *row, uint64_t k) {
        switch (w.type) {
        case LK_I8:
                return (float) (int8_t) row[k];
        case LK_F8_E4M3:
                return f32_from_e4m3(row[k]);
        case LK_F8_E5M2:
                return f32_from_e5m2(row[k]);
        case LK_NVFP4:
                return f32_from_e2m1(k % 2 == 0 ? row[k / 2] >> 4 : row[k / 2] & 15);
        default:
                return weight_get(row, w.type, k);
        }
}

/* One stage of the rotation of ops.h on n numbers: a quad a thread. All threads of the block call it. */
__device__ static void rotate_stage(float *v, uint32_t n, uint32_t stride) {
        uint32_t at = threadIdx.x / stride * 4 * stride + threadIdx.x % stride;

        if (threadIdx.x < n / 4) {
                float a = v[at], b = v[at + stride], c = v[at + 2 * stride], d = v[at + 3 * stride];

                v[at] = __fmul_rn(__fsub_rn(__fadd_rn(__fadd_rn(a, b), c), d), 0.5f);
                v[at + stride] = __fmul_rn(__fadd_rn(__fsub_rn(__fadd_rn(a, b), c), d), 0.5f);
                v[at + 2 * stride] = __fmul_rn(__fadd_rn(__fadd_rn(__fsub_rn(a, b), c), d), 0.5f);
                v[at + 3 * stride] = __fmul_rn(__fadd_rn(__fadd_rn(__fsub_rn(b, a), c), d), 0.5f);
        }
        __syncthreads();
}

/* Rows of f32, or rounded to another type; zeros behind w's last row. */
template <LkType TYPE> __global__ static void __launch_bounds__(THREADS) numbers_kernel(LkMatrix w, void *to, uint64_t y_ld, uint32_t chunks) {
        __shared__ float v[CHUNK];
        uint64_t r = blockIdx.x / chunks, k0 = (uint64_t) (blockIdx.x % chunks) * CHUNK;
        uint32_t n = (uint32_t) (w.cols - k0 < CHUNK ? w.cols - k0 : CHUNK);

        if (r >= w.rows) {
                for (uint32_t i = threadIdx.x; i < n; i += THREADS)
                        number_put_as(to, TYPE, r * y_ld + k0 + i, 0);
                return;
        }

        const uint8_t *row = matrix_row(w, r);
        float scale = w.type >= LK_I8 ? row_scale(w, r) : 0;

        for (uint32_t i = threadIdx.x; i < n; i += THREADS)
                v[i] = stored(w, row, k0 + i);
        if (w.type == LK_I8 && w.quant.rotation > 0) {
                __syncthreads();
                for (uint32_t stride = 1; stride < w.quant.rotation; stride *= 4)
                        rotate_stage(v, n, stride);
        }
        for (uint32_t i = threadIdx.x; i < n; i += THREADS) {
                float f = v[i];

                if (w.type == LK_NVFP4)
                        f = __fmul_rn(f, __fmul_rn(scale, block_scale(w.quant, tensor_row(w, r), (k0 + i) / 16)));
                else if (w.type >= LK_I8)
                        f = __fmul_rn(f, scale);
                if (TYPE == LK_BF16 && w.quant.in_scale.data)
                        f = __fmul_rn(f, weight_get(w.quant.in_scale.data, w.quant.in_scale.type, k0 + i));
                number_put_as(to, TYPE, r * y_ld + k0 + i, f);
        }
}

template <LkType TYPE> static int numbers(cudaStream_t stream, const LkMatrix *w, uint64_t padded_rows, void *y, uint64_t y_ld) {
        uint64_t chunks = (w->cols + CHUNK - 1) / CHUNK;

        if (padded_rows > GRID_X_MAX / chunks)
                return -EINVAL;
        numbers_kernel<TYPE><<<(unsigned) (padded_rows * chunks), THREADS, 0, stream>>>(*w, y, y_ld, (uint32_t) chunks);
        return cuda_result(cudaGetLastError());
}

int expand_f32(cudaStream_t stream, const LkMatrix *w, float *y, uint64_t y_ld) {
        return numbers<LK_F32>(stream, w, w->rows, y, y_ld);
}

/* Up to eight bytes; all of them in one load where they lie that way. */
__device__ static uint64_t few_bytes(const uint8_t *p, uint32_t n) {
        uint64_t v = 0;

        if (n == 8 && (uintptr_t) p % 8 == 0)
                return *(const uint64_t *) p;
        if (n == 4 && (uintptr_t) p % 4 == 0)
                return *(const uint32_t *) p;
        for (uint32_t i = 0; i < n; i++)
                v |= (uint64_t) p[i] << 8 * i;
        return v;
}

/* The number of a quantised row with this code. */
template <LkType T> __device__ static float decoded(uint32_t code) {
        return T == LK_I8 ? (float) (int8_t) code : T == LK_F8_E4M3 ? f32_from_e4m3((uint8_t) code) : T == LK_F8_E5M2 ? f32_from_e5m2((uint8_t) code) : f32_from_e2m1(code);
}

/* What columns k to k + n of the input are multiplied with; behind them 1. All of it in one load where it lies that way. */
__device__ static void eight_scales(const LkVector &s, uint64_t k, uint32_t n, float *ret) {
        const uint8_t *p = (const uint8_t *) s.data + k * 2;

        if (s.type == LK_BF16 && n == 8 && (uintptr_t) p % 16 == 0) {
                const uint4 pairs = *(const uint4 *) p;
                const uint32_t pair[4] = {pairs.x, pairs.y, pairs.z, pairs.w};

#pragma unroll
                for (uint32_t i = 0; i < 8; i++)
                        ret[i] = __uint_as_float(i % 2 ? pair[i / 2] & 0xffff0000u : pair[i / 2] << 16);
                return;
        }
#pragma unroll
        for (uint32_t i = 0; i < 8; i++)
                ret[i] = i < n ? weight_get(s.data, s.type, k + i) : 1.0f;
}

/* Eight numbers a thread of rows that are not rotated, to bf16: n of them from k on. */
template <LkType T> __device__ static void eight_numbers(const LkMatrix &w, uint64_t r, uint64_t k, uint32_t n, uint16_t *v) {
        const bool four = T == LK_NVFP4; /* bits; then n is 8 */
        uint64_t codes = few_bytes(near_row(w, r) + (four ? k / 2 : k), four ? 4 : n);
        const bool scaled = w.quant.in_scale.data;
        float scale = row_scale(w, r), in_scale[8];

        if (four)
                scale = __fmul_rn(scale, block_scale(w.quant, tensor_row(w, r), k / 16));
        if (scaled)
                eight_scales(w.quant.in_scale, k, n, in_scale);
#pragma unroll
        for (uint32_t i = 0; i < 8; i++) {
                uint32_t code = four ? (uint32_t) (codes >> (i * 4 ^ 4)) & 15 : (uint32_t) (codes >> i * 8) & 255;
                float f = __fmul_rn(decoded<T>(code), scale);

                if (scaled)
                        f = __fmul_rn(f, in_scale[i]);
                v[i] = bf16_from_f32(f);
        }
}

/* Numbers of 16 bits as they are. */
template <> __device__ void eight_numbers<LK_BF16>(const LkMatrix &w, uint64_t r, uint64_t k, uint32_t n, uint16_t *v) {
        const uint8_t *p = near_row(w, r) + k * 2;

        if (n == 8 && (uintptr_t) p % 16 == 0) {
                *(uint4 *) v = *(const uint4 *) p;
                return;
        }
#pragma unroll
        for (uint32_t i = 0; i < 8; i++)
                if (i < n)
                        v[i] = (uint16_t) (p[i * 2] | p[i * 2 + 1] << 8);
}

template <LkType T> __global__ static void __launch_bounds__(THREADS) eight_kernel(LkMatrix w, uint64_t padded_rows, uint16_t *y) {
        uint64_t per_row = (w.cols + 7) / 8, at = (uint64_t) blockIdx.x * THREADS + threadIdx.x;
        uint64_t r = (at | per_row) >> 32 ? at / per_row : (uint32_t) at / (uint32_t) per_row, k = (at - r * per_row) * 8;
        uint32_t n = (uint32_t) (w.cols - k < 8 ? w.cols - k : 8);
        __align__(16) uint16_t v[8] = {};

        if (r >= padded_rows)
                return;
        if (r < w.rows)
                eight_numbers<T>(w, r, k, n, v);
        if (w.cols % 8 == 0)
                *(uint4 *) (y + r * w.cols + k) = *(const uint4 *) v;
        else
                for (uint32_t i = 0; i < n; i++)
                        y[r * w.cols + k + i] = v[i];
}

template <LkType T> static int eight(cudaStream_t stream, const LkMatrix *w, uint64_t padded_rows, void *y) {
        uint64_t threads = padded_rows * ((w->cols + 7) / 8), blocks = (threads + THREADS - 1) / THREADS;

        if (blocks > GRID_X_MAX)
                return -EINVAL;
        eight_kernel<T><<<(unsigned) blocks, THREADS, 0, stream>>>(*w, padded_rows, (uint16_t *) y);
        return cuda_result(cudaGetLastError());
}

int expand_bf16(cudaStream_t stream, const LkMatrix *w, uint64_t padded_rows, void *y) {
        switch (w->type) {
        case LK_BF16:
                return eight<LK_BF16>(stream, w, padded_rows, y);
        case LK_I8:
                return w->quant.rotation > 0 ? numbers<LK_BF16>(stream, w, padded_rows, y, w->cols) : eight<LK_I8>(stream, w, padded_rows, y);
        case LK_F8_E4M3:
                return eight<LK_F8_E4M3>(stream, w, padded_rows, y);
        case LK_F8_E5M2:
                return eight<LK_F8_E5M2>(stream, w, padded_rows, y);
        case LK_NVFP4:
                return eight<LK_NVFP4>(stream, w, padded_rows, y);
        default:
                return -EINVAL;
        }
}

int expand_f16(cudaStream_t stream, const LkMatrix *w, uint64_t padded_rows, void *y) {
        return w->type == LK_F16 ? eight<LK_BF16>(stream, w, padded_rows, y) : numbers<LK_F16>(stream, w, padded_rows, y, w->cols);
}

__global__ static void columns_kernel(LkMatrix w, LkVector bias, bool scaled, float *scale, float *sum) {
        uint64_t i = (uint64_t) blockIdx.x * THREADS + threadIdx.x;

        if (i >= w.rows)
                return;
        if (scaled)
                scale[i] = row_scale(w, i);
        if (bias.data)
                sum[i] = weight_get(bias.data, bias.type, i);
}

/* The bias of an f16 product, twice; zeros behind its end. */
__global__ static void half_bias_kernel(LkVector bias, uint64_t n, float *sum, uint16_t *half) {
        uint64_t i = (uint64_t) blockIdx.x * THREADS + threadIdx.x;

        if (i >= n)
                return;
        half[i] = i < bias.n ? f16_from_f32(weight_get(bias.data, bias.type, i)) : 0;
        sum[i] = f32_from_f16(half[i]);
}

static int half_columns(cudaStream_t stream, float *sum, const LkVector *bias, uint16_t *half, Columns *ret) {
        uint64_t n = round_up(bias->n, 8);
        int r;

        if (!bias->data)
                return 0;
        half_bias_kernel<<<(unsigned) ((n + THREADS - 1) / THREADS), THREADS, 0, stream>>>(*bias, n, sum, half);
        r = cuda_result(cudaGetLastError());
        if (r >= 0) {
                ret->bias = sum;
                ret->half_bias = half;
        }
        return r;
}

int expand_columns(const CudaProduct *p, cudaStream_t stream, const LkMatrix *w, const LkVector *bias, bool scaled, bool half, Columns *ret) {
        float *scale = (float *) p->scratch, *sum = scale + COLUMNS_MAX;
        int r = 0;

        if (w->rows > COLUMNS_MAX)
                return -EINVAL;
        if (half)
                return half_columns(stream, sum, bias, (uint16_t *) scale, ret);
        if (scaled || bias->data) {
                columns_kernel<<<(unsigned) ((w->rows + THREADS - 1) / THREADS), THREADS, 0, stream>>>(*w, *bias, scaled, scale, sum);
                r = cuda_result(cudaGetLastError());
        }
        if (r >= 0) {
                ret->scale = scaled ? scale : NULL;
                ret->bias = bias->data ? sum : NULL;
        }
        return r;
}

extern "C" int lk_cuda_dequantise(LkContext *c, const LkDequantise *a) {
        if (!c || !a || !check_dequantise(a))
                return -EINVAL;
        if (a->w.rows == 0 || a->w.cols == 0)
                return 0;

        return expand_f32(c->stream, &a->w, a->y, a->y_ld);
}

extern "C" int lk_cuda_expand(LkContext *c, const LkExpand *a) {
        if (!c || !a || !check_expand(a))
                return -EINVAL;
        if (a->w.rows == 0 || a->w.cols == 0)
                return 0;

        return expand_bf16(c->stream, &a->w, a->w.rows, a->y);
}
