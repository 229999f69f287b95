/* SPDX-License-Identifier: Apache-2.0 */
/* Which blocks of keys a block of queries sees: kernels/cpu/route.c, the same lists, counts and scores. */

#include "kernels/cpu/check.h"
#include "kernels/cuda/context.cuh"

#define TILE 64u /* query blocks and blocks of a tile of dots */
#define DEPTH 32u /* dims in shared memory at a time */
#define PITCH (TILE + 4)
#define THREADS 256u
#define LISTS (THREADS / 32) /* of a block, a warp each */

typedef float Side[DEPTH][PITCH];

/* Rows `row` .. `row` + TILE - 1 of a head, dims d .. d + n - 1; a number that is not there is not looked at later. */
__device__ static void side_load(Side &to, const float *x, uint32_t row, uint32_t rows, uint64_t width, uint32_t n) {
        const uint32_t d = threadIdx.x % DEPTH;

#pragma unroll
        for (uint32_t i = 0; i < TILE / (THREADS / DEPTH); i++) {
                const uint32_t r = threadIdx.x / DEPTH + i * (THREADS / DEPTH);

                to[d][r] = row + r < rows && d < n ? x[(row + r) * width + d] : 0;
        }
}

/* Dots into `score`. A thread has 4 x 4 of a tile's, each in one accumulator over ascending dims. */
__global__ static void __launch_bounds__(THREADS) route_dots(const __grid_constant__ LkRoute a) {
        __shared__ __align__(16) Side q, k;
        const uint64_t width = (uint64_t) a.heads * a.head_dim, at = (uint64_t) blockIdx.z * a.head_dim;
        const uint32_t block = blockIdx.x * TILE, query = blockIdx.y * TILE, x = threadIdx.x % 16 * 4, y = threadIdx.x / 16 * 4;
        float dot[4][4] = {};

        for (uint32_t d = 0; d < a.head_dim; d += DEPTH) {
                const uint32_t n = a.head_dim - d < DEPTH ? a.head_dim - d : DEPTH;

                __syncthreads();
                side_load(q, a.q + a.first * width + at + d, query, a.n_q, width, n);
                side_load(k, a.k + at + d, block, a.n, width, n);
                __syncthreads();
#pragma unroll 8
                for (uint32_t e = 0; e < n; e++) {
                        const float4 u = *(const float4 *) &q[e][y], v = *(const float4 *) &k[e][x];
                        const float left[4] = {u.x, u.y, u.z, u.w}, right[4] = {v.x, v.y, v.z, v.w};

#pragma unroll
                        for (uint32_t i = 0; i < 16; i++)
                                dot[i / 4][i % 4] = __fmaf_rn(left[i / 4], right[i % 4], dot[i / 4][i % 4]);
                }
        }
#pragma unroll
        for (uint32_t i = 0; i < 16; i++)
                if (query + y + i / 4 < a.n_q && block + x + i % 4 < a.n)
                        a.score[((uint64_t) blockIdx.z * a.n_q + query + y + i / 4) * a.n + block + x + i % 4] = dot[i / 4][i % 4];
}

/* Integers in the order of the numbers; -0 is 0, a NaN is the least of all. */
__device__ static inline uint32_t order_key(float f) {
        const uint32_t u = __float_as_uint(__fadd_rn(f, 0.0f));

        if ((u & 0x7fffffffu) > 0x7f800000u)
                return 0;
        return u & 0x80000000u ? ~u : u | 0x80000000u;
}

/* least_key() of the twin, by a warp. */
__device__ static uint32_t least_key(const float *dot, const LkRoute &a) {
        uint32_t key = 0;

        if (a.keep == 0 || a.sinks >= a.n)
                return UINT32_MAX;
        for (uint32_t bit = UINT32_C(1) << 31; bit > 0; bit >>= 1) {
                uint32_t reached = 0;

#pragma unroll 4
                for (uint32_t b = a.sinks + threadIdx.x % 32; b < a.n; b += 32)
                        reached += order_key(dot[b]) >= (key | bit);
                if (__reduce_add_sync(0xffffffffu, reached) >= a.keep)
                        key |= bit;
        }
        return key > 0 ? key : 1; /* 0: a NaN */
}

/* By every lane alike. */
__device__ static float limit_of(const LkRoute &a, float c, const float *q, const float *variance) {
        float sum = 0;

#pragma unroll 8
        for (uint32_t d = 0; d < a.head_dim; d++)
                sum = __fmaf_rn(__fmul_rn(q[d], q[d]), variance[d], sum);
        return __fmul_rn(a.tau, __fsqrt_rn(__fadd_rn(__fmul_rn(__fmul_rn(c, c), sum), 1e-6f)));
}

__device__ static inline bool always_seen(const LkRoute &a, uint32_t i, uint32_t b) {
        return b < a.sinks || (i >= a.dense_begin && i < a.dense_end) || (i > b ? i - b : b - i) < a.reach;
}

/* A warp for a head and a query block; `score` holds dots first. c: scale * log2(e). */
__global__ static void __launch_bounds__(THREADS) route_lists(const __grid_constant__ LkRoute a, float c) {
        const uint64_t task = (uint64_t) blockIdx.x * LISTS + threadIdx.x / 32, width = (uint64_t) a.heads * a.head_dim;
        const uint32_t lane = threadIdx.x % 32, head = (uint32_t) (task / a.n_q), i = a.first + (uint32_t) (task % a.n_q);
        const uint32_t below = (UINT32_C(1) << lane) - 1;
        uint32_t *list = a.list + task * a.n, least = 0, seen = 0, others;
        float *score = a.score + task * a.n, limit = 0;

        if (head >= a.heads)
                return;
        if (a.by_rank)
                least = least_key(score, a);
        else
                limit = limit_of(a, c, a.q + i * width + (uint64_t) head * a.head_dim, a.variance + (uint64_t) head * a.head_dim);

#pragma unroll 4
        for (uint32_t b = lane; b < a.n; b += 32)
                seen += (a.by_rank ? order_key(score[b]) >= least : __fmul_rn(score[b], c) > limit) || always_seen(a, i, b);
        others = seen = __reduce_add_sync(0xffffffffu, seen);
        if (lane == 0)
                a.count[task] = seen;

        seen = 0;
        for (uint32_t first = 0; first < a.n; first += 32) {
                const uint32_t b = first + lane;
                const bool there = b < a.n;
                const float dot = there ? score[b] : 0;
                const bool sees = there && ((a.by_rank ? order_key(dot) >= least : __fmul_rn(dot, c) > limit) || always_seen(a, i, b));
                const uint32_t in = __ballot_sync(0xffffffffu, sees), out = __ballot_sync(0xffffffffu, there && !sees);

                if (there) {
                        list[sees ? seen + __popc(in & below) : others + __popc(out & below)] = b;
                        score[b] = __fmul_rn(dot, a.scale);
                }
                seen += __popc(in);
                others += __popc(out);
        }
}

extern "C" int lk_cuda_route(LkContext *c, const LkRoute *a) {
        const uint32_t tiles = a ? (uint32_t) (((uint64_t) a->n + TILE - 1) / TILE) : 0;
        uint64_t queries, lists;
        int r;

        if (!c || !a || !check_route(a))
                return -EINVAL;
        if (a->heads == 0 || a->n_q == 0)
                return 0;
        queries = ((uint64_t) a->n_q + TILE - 1) / TILE;
        lists = ((uint64_t) a->heads * a->n_q + LISTS - 1) / LISTS;
        if (a->heads > GRID_Y_MAX || queries > GRID_Y_MAX || lists > GRID_X_MAX)
                return -EINVAL;

        route_dots<<<dim3(tiles, (unsigned) queries, a->heads), THREADS, 0, c->stream>>>(*a);
        r = cuda_result(cudaGetLastError());
        if (r < 0)
                return r;
        route_lists<<<(unsigned) lists, THREADS, 0, c->stream>>>(*a, a->scale * 1.4426950408889634f);
        return cuda_result(cudaGetLastError());
}
