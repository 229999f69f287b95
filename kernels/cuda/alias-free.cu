/* SPDX-License-Identifier: Apache-2.0 */
/* Upsampling, snake and downsampling: kernels/cpu/alias-free.c, the same bits. A block has some rows of some channels: the upsampled sound
 * behind the snake goes to shared memory once, even and odd positions apart (s[2i] and s[2i + 1] in row i). */

#include "kernels/cuda/snake.cuh"

#define ROWS 64u
#define WIDTH 32u /* channels */
#define REACH 3u  /* rows of s before the first and behind the last one */

/* Rows that lie beyond the ends are those at the ends. */
__device__ static inline uint64_t inside(int64_t i, uint64_t n) {
        return i < 0 ? 0 : (uint64_t) i < n ? (uint64_t) i : n - 1;
}

/* s at position `at` of the upsampled sound, 0 <= at < 2 * rows. */
__device__ static inline float upsampled(const LkAliasFree &a, const float *up, uint64_t at, uint64_t channel, float alpha, float gain) {
        int64_t row = (int64_t) (at / 2);
        uint32_t odd = (uint32_t) (at % 2);
        float sum = 0;

        /* even: up[1], up[3] .. with rows + 2, + 1 ..; odd: up[0], up[2] .. with rows + 3, + 2 .. */
#pragma unroll
        for (uint32_t k = 0; k < LK_ALIAS_FREE_TAPS / 2; k++)
                sum = __fmaf_rn(up[2 * k + 1 - odd], a.x[inside(row + 2 + odd - k, a.rows) * a.channels + channel], sum);
        return snake_at(__fmul_rn(2.0f, sum), alpha, gain);
}

__global__ static void __launch_bounds__(FLAT_THREADS) alias_free_rows(const __grid_constant__ LkAliasFree a) {
        __shared__ float s[2][(ROWS + 2 * REACH) * WIDTH], up[LK_ALIAS_FREE_TAPS], down[LK_ALIAS_FREE_TAPS], alpha[WIDTH], gain[WIDTH];
        const uint64_t done = (uint64_t) blockIdx.x * ROWS, first = a.first + done, channel = (uint64_t) blockIdx.y * WIDTH;
        const uint32_t rows = a.m - done < ROWS ? (uint32_t) (a.m - done) : ROWS;
        const uint32_t width = a.channels - channel < WIDTH ? (uint32_t) (a.channels - channel) : WIDTH;

        if (threadIdx.x < LK_ALIAS_FREE_TAPS) {
                up[threadIdx.x] = weight_get(a.up.data, a.up.type, threadIdx.x);
                down[threadIdx.x] = weight_get(a.down.data, a.down.type, threadIdx.x);
        }
        if (threadIdx.x < width)
                snake_channel(&a.alpha, &a.beta, true, channel + threadIdx.x, alpha + threadIdx.x, gain + threadIdx.x);
        __syncthreads();

        for (uint32_t i = threadIdx.x; i < (rows + 2 * REACH) * width; i += FLAT_THREADS) {
                const int64_t row = (int64_t) (first + i / width) - (int64_t) REACH;
                const uint32_t c = i % width;

                for (uint32_t odd = 0; odd < 2; odd++)
                        s[odd][i] = upsampled(a, up, inside(2 * row + odd, 2 * a.rows), channel + c, alpha[c], gain[c]);
        }
        __syncthreads();

        for (uint32_t i = threadIdx.x; i < rows * width; i += FLAT_THREADS) {
                float sum = 0;

#pragma unroll
                for (uint32_t k = 0; k < LK_ALIAS_FREE_TAPS / 2; k++) {
                        sum = __fmaf_rn(down[2 * k], s[1][i + k * width], sum);
                        sum = __fmaf_rn(down[2 * k + 1], s[0][i + (k + 1) * width], sum);
                }
                a.y[(done + i / width) * a.channels + channel + i % width] = sum;
        }
}

extern "C" int lk_cuda_alias_free(LkContext *c, const LkAliasFree *a) {
        uint64_t blocks, slices;

        if (!c || !a || !check_alias_free(a) || a->rows > INT64_MAX / 2)
                return -EINVAL;
        if (a->m == 0)
                return 0;

        blocks = a->m / ROWS + (a->m % ROWS != 0);
        slices = a->channels / WIDTH + (a->channels % WIDTH != 0);
        if (blocks > GRID_X_MAX || slices > GRID_Y_MAX)
                return -EINVAL;
        alias_free_rows<<<dim3((unsigned) blocks, (unsigned) slices), FLAT_THREADS, 0, c->stream>>>(*a);
        return cuda_result(cudaGetLastError());
}
