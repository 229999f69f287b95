/* SPDX-License-Identifier: Apache-2.0 */
/* Means of blocks of rows: kernels/cpu/block-means.c, the same bits. */

#include "kernels/cpu/check.h"
#include "kernels/cuda/context.cuh"

#define THREADS 128u
#define PIECE 8u /* columns of a thread, 16 bytes */
#define LANES 8u
#define COLUMNS 32u /* of a block of centre_columns */

__device__ static inline uint64_t width_of(const LkBlockMeans &a) {
        return (uint64_t) a.heads * a.head_dim;
}

/* bf16, rows of whole 16-byte pieces. */
__global__ static void __launch_bounds__(THREADS) mean_pieces(const __grid_constant__ LkBlockMeans a) {
        const uint64_t width = width_of(a), i = ((uint64_t) blockIdx.y * THREADS + threadIdx.x) * PIECE;
        const uint32_t begin = a.blocks.start[blockIdx.x], end = a.blocks.start[blockIdx.x + 1];
        const uint16_t *x = (const uint16_t *) a.x + begin * a.x_ld + i;
        float *y = a.mean + blockIdx.x * width + i, sum[PIECE] = {};

        if (i >= width)
                return;
#pragma unroll 8
        for (uint32_t row = begin; row < end; row++, x += a.x_ld) {
                const uint4 v = *(const uint4 *) x;
                const uint32_t pair[4] = {v.x, v.y, v.z, v.w};

#pragma unroll
                for (uint32_t j = 0; j < PIECE; j++)
                        sum[j] = __fadd_rn(sum[j], __uint_as_float(j % 2 ? pair[j / 2] & 0xffff0000u : pair[j / 2] << 16));
        }
#pragma unroll
        for (uint32_t j = 0; j < PIECE; j++)
                y[j] = __fdiv_rn(sum[j], (float) (end - begin));
}

__global__ static void __launch_bounds__(THREADS) mean_numbers(const __grid_constant__ LkBlockMeans a) {
        const uint64_t width = width_of(a), i = (uint64_t) blockIdx.y * THREADS + threadIdx.x;
        const uint32_t begin = a.blocks.start[blockIdx.x], end = a.blocks.start[blockIdx.x + 1];
        float sum = 0;

        if (i >= width)
                return;
        for (uint32_t row = begin; row < end; row++)
                sum = __fadd_rn(sum, number_get(row_at(a.x, a.type, row, a.x_ld), a.type, i));
        a.mean[blockIdx.x * width + i] = __fdiv_rn(sum, (float) (end - begin));
}

/* The sum of a column's lanes in the order of ops.h; every thread of the column gets it. */
__device__ static float lanes_of_column_sum(float (&part)[LANES][COLUMNS], float mine) {
        const uint32_t x = threadIdx.x;

        __syncthreads();
        part[threadIdx.y][x] = mine;
        __syncthreads();
        return __fadd_rn(__fadd_rn(__fadd_rn(part[0][x], part[4][x]), __fadd_rn(part[2][x], part[6][x])),
                __fadd_rn(__fadd_rn(part[1][x], part[5][x]), __fadd_rn(part[3][x], part[7][x])));
}

/* A thread is a lane of a column: blocks lane, lane + 8, ... */
__global__ static void __launch_bounds__(COLUMNS * LANES) centre_columns(const __grid_constant__ LkBlockMeans a) {
        __shared__ float part[LANES][COLUMNS];
        const uint64_t width = width_of(a), i = (uint64_t) blockIdx.x * COLUMNS + threadIdx.x;
        const uint32_t n = i < width ? a.blocks.n : 0;
        float *x = a.mean + i, sum = 0, centre;

#pragma unroll 8
        for (uint32_t b = threadIdx.y; b < n; b += LANES)
                sum = __fadd_rn(sum, x[b * width]);
        centre = __fdiv_rn(lanes_of_column_sum(part, sum), (float) a.blocks.n);

        sum = 0;
        for (uint32_t b = threadIdx.y; b < n; b += 8 * LANES) {
                float y[8]; /* read before anything is written, so that the reads are under way together */

#pragma unroll
                for (uint32_t j = 0; j < 8; j++)
                        y[j] = b + j * LANES < n ? x[(b + j * LANES) * width] : 0;
#pragma unroll
                for (uint32_t j = 0; j < 8; j++)
                        if (b + j * LANES < n) {
                                y[j] = __fsub_rn(y[j], centre);
                                x[(b + j * LANES) * width] = y[j];
                                sum = __fmaf_rn(y[j], y[j], sum);
                        }
        }
        sum = __fdiv_rn(lanes_of_column_sum(part, sum), (float) a.blocks.n);
        if (threadIdx.y == 0 && i < width) {
                a.centre[i] = centre;
                a.centre[width + i] = sum;
        }
}

static bool has_pieces(const LkBlockMeans *a) {
        return a->type == LK_BF16 && (uintptr_t) a->x % 16 == 0 && a->x_ld % PIECE == 0 && (uint64_t) a->heads * a->head_dim % PIECE == 0;
}

extern "C" int lk_cuda_block_means(LkContext *c, const LkBlockMeans *a) {
        uint64_t width, parts;
        int r;

        if (!c || !a || !check_block_means(a))
                return -EINVAL;
        width = (uint64_t) a->heads * a->head_dim;
        if (width == 0)
                return 0;
        parts = has_pieces(a) ? width / PIECE : width;
        parts = parts / THREADS + (parts % THREADS != 0);
        if (parts > GRID_Y_MAX)
                return -EINVAL;

        if (has_pieces(a))
                mean_pieces<<<dim3(a->blocks.n, (unsigned) parts), THREADS, 0, c->stream>>>(*a);
        else
                mean_numbers<<<dim3(a->blocks.n, (unsigned) parts), THREADS, 0, c->stream>>>(*a);
        r = cuda_result(cudaGetLastError());
        if (r < 0 || !a->centre)
                return r;
        centre_columns<<<(unsigned) ((width + COLUMNS - 1) / COLUMNS), dim3(COLUMNS, LANES), 0, c->stream>>>(*a);
        return cuda_result(cudaGetLastError());
}
