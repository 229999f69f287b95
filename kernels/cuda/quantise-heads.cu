/* SPDX-License-Identifier: Apache-2.0 */
/* Queries, keys and values to int8 for attention, by the steps of ops.h and with the bits of kernels/cpu/quantise-heads.c. A warp has a head of a
 * row, four numbers a thread. */

#include <math.h>

#include "kernels/cpu/check.h"
#include "kernels/cuda/context.cuh"
#include "kernels/cuda/ptx.cuh"

#define WARPS 8
#define THREADS (WARPS * 32)
#define DIM 128
#define KEYS 128
#define TILE (KEYS * DIM)
#define WARP_KEYS (KEYS / WARPS) /* 16, the group that LkKeysI8 reorders */

/* Four numbers of a row; fast: they lie at a multiple of their size together. */
static __device__ __forceinline__ float4 load_four(const void *x, LkType t, uint64_t at, bool fast) {
        if (fast && t == LK_F32)
                return *(const float4 *) ((const float *) x + at);
        if (fast) {
                const uint2 two = *(const uint2 *) ((const uint16_t *) x + at);

                return make_float4(__uint_as_float(two.x << 16), __uint_as_float(two.x & 0xffff0000u), __uint_as_float(two.y << 16),
                        __uint_as_float(two.y & 0xffff0000u));
        }
        return make_float4(number_get(x, t, at), number_get(x, t, at + 1), number_get(x, t, at + 2), number_get(x, t, at + 3));
}

/* Number `place` of the four that become ((a+b)+c)-d, ((a+b)-c)+d, ((a-b)+c)+d, ((b-a)+c)+d, times 0.5. */
static __device__ __forceinline__ float rotate_one(float a, float b, float c, float d, uint32_t place) {
        const float first = place < 2 ? __fadd_rn(a, b) : place == 2 ? __fsub_rn(a, b) : __fsub_rn(b, a);
        const float second = place == 1 ? __fsub_rn(first, c) : __fadd_rn(first, c);

        return __fmul_rn(place == 0 ? __fsub_rn(second, d) : __fadd_rn(second, d), 0.5f);
}

/* The same of four threads, `apart` from one to the next. */
static __device__ __forceinline__ float rotate_across(float x, uint32_t apart) {
        const uint32_t lane = threadIdx.x % 32, place = lane / apart % 4, from = lane - place * apart;
        const float a = __shfl_sync(0xffffffffu, x, (int) from), b = __shfl_sync(0xffffffffu, x, (int) (from + apart));
        const float c = __shfl_sync(0xffffffffu, x, (int) (from + 2 * apart)), d = __shfl_sync(0xffffffffu, x, (int) (from + 3 * apart));

        return rotate_one(a, b, c, d, place);
}

static __device__ __forceinline__ float rotate_rest(float x) {
        float other;

        x = rotate_across(rotate_across(x, 1), 4);
        other = __shfl_xor_sync(0xffffffffu, x, 16);
        return threadIdx.x % 32 < 16 ? __fadd_rn(x, other) : __fsub_rn(other, x);
}

/* The head of a row that the warp has. */
static __device__ __forceinline__ float4 rotate_head(float4 v) {
        return make_float4(rotate_rest(rotate_one(v.x, v.y, v.z, v.w, 0)), rotate_rest(rotate_one(v.x, v.y, v.z, v.w, 1)),
                rotate_rest(rotate_one(v.x, v.y, v.z, v.w, 2)), rotate_rest(rotate_one(v.x, v.y, v.z, v.w, 3)));
}

static __device__ __forceinline__ uint32_t magnitude(float x) {
        return __float_as_uint(x) & 0x7fffffffu;
}

static __device__ __forceinline__ uint32_t largest(float4 v) {
        return max(max(magnitude(v.x), magnitude(v.y)), max(magnitude(v.z), magnitude(v.w)));
}

/* What numbers of this largest magnitude are multiplied by, and their scale. */
static __device__ __forceinline__ float factor_of(uint32_t most, float *ret_scale) {
        const float m = fmaxf(__uint_as_float(most), 1e-30f);

        if (most >= 0x7f800000u) {
                *ret_scale = __uint_as_float(0x7fc00000u);
                return 0;
        }
        *ret_scale = __fmul_rn(m, 1.0f / 127.0f);
        return __fdiv_rn(127.0f, m);
}

/* To the lowest byte. A factor of 0 stands for integers of 0. */
static __device__ __forceinline__ uint32_t integer_of(float x, float factor) {
        return factor == 0 ? 0 : __float_as_uint(__fadd_rn(__fmul_rn(x, factor), 0x1.8p23f));
}

static __device__ __forceinline__ uint32_t integers_of(float4 v, float factor) {
        return bytes_pack(integer_of(v.x, factor), integer_of(v.y, factor), integer_of(v.z, factor), integer_of(v.w, factor));
}

static __global__ void __launch_bounds__(THREADS) queries_to_i8(const __grid_constant__ LkQuantiseQueries a, bool fast) {
        const uint64_t head_row = (uint64_t) blockIdx.x * WARPS + threadIdx.x / 32, row = head_row / a.heads;
        const uint64_t at = head_row % a.heads * DIM + threadIdx.x % 32 * 4;
        float4 v;
        float scale, factor;

        if (row >= a.n) /* the whole warp */
                return;
        v = rotate_head(load_four(a.x, a.type, row * a.x_ld + at, fast));
        factor = factor_of(__reduce_max_sync(0xffffffffu, largest(v)), &scale);
        *(uint32_t *) (a.q + row * a.q_ld + at) = integers_of(v, factor);
        if (threadIdx.x % 32 == 0)
                a.scale[row * (a.q_ld / DIM) + head_row % a.heads] = scale;
}

/* A block for a head. */
static __global__ void __launch_bounds__(DIM) keys_offset(const __grid_constant__ LkQuantiseKeys a) {
        const uint64_t at = (uint64_t) blockIdx.x * DIM + threadIdx.x;
        float sum = 0;

#pragma unroll 16
        for (uint64_t i = 0; i < LK_I8_SAMPLES; i++)
                sum = __fadd_rn(sum, number_get(a.k, a.type, i * a.to.n / LK_I8_SAMPLES * a.k_ld + at));
        a.to.offset[at] = __fmul_rn(sum, 1.0f / LK_I8_SAMPLES);
}

/* What a warp has of a tile. */
typedef struct Share {
        uint64_t head, tile, at; /* at: of all heads' tiles */
        uint32_t first, n;       /* its first key, and how many keys the tile has */
} Share;

static __device__ __forceinline__ void keys_tile(const LkQuantiseKeys &a, const Share &s, bool fast, uint32_t *most) {
        const uint32_t lane = threadIdx.x % 32;
        const uint64_t column = s.head * DIM + lane * 4;
        const float4 offset = *(const float4 *) (a.to.offset + column);
        float4 v[WARP_KEYS];
        uint32_t bits = 0;
        float scale, factor;

#pragma unroll
        for (uint32_t i = 0; i < WARP_KEYS; i++) {
                const bool there = s.first + i < s.n;
                float4 x = make_float4(0, 0, 0, 0);

                if (there)
                        x = load_four(a.k, a.type, (s.tile * KEYS + s.first + i) * a.k_ld + column, fast);
                x = make_float4(__fsub_rn(x.x, offset.x), __fsub_rn(x.y, offset.y), __fsub_rn(x.z, offset.z), __fsub_rn(x.w, offset.w));
                v[i] = rotate_head(x);
                if (!there)
                        v[i] = make_float4(0, 0, 0, 0);
                bits = max(bits, largest(v[i]));
        }
        bits = __reduce_max_sync(0xffffffffu, bits);
        if (lane == 0)
                most[threadIdx.x / 32] = bits;
        __syncthreads();
        for (uint32_t i = 0; i < WARPS; i++)
                bits = max(bits, most[i]);
        factor = factor_of(bits, &scale);
#pragma unroll
        for (uint32_t i = 0; i < WARP_KEYS; i++)
                *(uint32_t *) (a.to.k + s.at * TILE + (s.first + i) * DIM + lane * 4) = integers_of(v[i], factor);
        if (threadIdx.x == 0)
                a.to.k_scale[s.at] = scale;
}

/* 16 keys of a channel in the order of LkKeysI8. */
static __device__ __forceinline__ uint4 places_of(const float (&x)[WARP_KEYS], float factor) {
        uint32_t y[4];

#pragma unroll
        for (uint32_t i = 0; i < 4; i++)
                y[i] = bytes_pack(integer_of(x[2 * i], factor), integer_of(x[2 * i + 1], factor), integer_of(x[2 * i + 8], factor),
                        integer_of(x[2 * i + 9], factor));
        return make_uint4(y[0], y[1], y[2], y[3]);
}

static __device__ __forceinline__ void values_tile(const LkQuantiseKeys &a, const Share &s, bool fast, uint32_t (*most)[DIM]) {
        const uint32_t lane = threadIdx.x % 32;
        const uint64_t column = s.head * DIM + lane * 4;
        float v[4][WARP_KEYS];

#pragma unroll
        for (uint32_t i = 0; i < WARP_KEYS; i++) {
                float4 x = make_float4(0, 0, 0, 0);

                if (s.first + i < s.n)
                        x = load_four(a.v, a.type, (s.tile * KEYS + s.first + i) * a.v_ld + column, fast);
                v[0][i] = x.x;
                v[1][i] = x.y;
                v[2][i] = x.z;
                v[3][i] = x.w;
        }
#pragma unroll
        for (uint32_t j = 0; j < 4; j++) {
                uint32_t bits = 0;

#pragma unroll
                for (uint32_t i = 0; i < WARP_KEYS; i++)
                        bits = max(bits, magnitude(v[j][i]));
                most[threadIdx.x / 32][lane * 4 + j] = bits;
        }
        __syncthreads();
#pragma unroll
        for (uint32_t j = 0; j < 4; j++) {
                const uint32_t d = lane * 4 + j;
                uint32_t bits = 0;
                float scale, factor;

                for (uint32_t i = 0; i < WARPS; i++)
                        bits = max(bits, most[i][d]);
                factor = factor_of(bits, &scale);
                *(uint4 *) (a.to.v + s.at * TILE + d * KEYS + s.first) = places_of(v[j], factor);
                if (threadIdx.x < 32)
                        a.to.v_scale[s.at * DIM + d] = scale;
        }
}

/* A block for a tile of a head, a warp for 16 keys of it. */
static __global__ void __launch_bounds__(THREADS) keys_to_i8(const __grid_constant__ LkQuantiseKeys a, bool fast) {
        __shared__ uint32_t most_key[WARPS], most_value[WARPS][DIM];
        const uint64_t tiles = gridDim.x, left = a.to.n - (uint64_t) blockIdx.x * KEYS;
        const Share s = {.head = blockIdx.y,
                .tile = blockIdx.x,
                .at = blockIdx.y * tiles + blockIdx.x,
                .first = threadIdx.x / 32 * WARP_KEYS,
                .n = left < KEYS ? (uint32_t) left : KEYS};

        keys_tile(a, s, fast, most_key);
        values_tile(a, s, fast, most_value);
}

/* Four numbers may be loaded at once. */
static bool is_fast(const void *x, LkType t, uint64_t ld) {
        return (uintptr_t) x % (4 * lk_type_size(t)) == 0 && ld % 4 == 0;
}

extern "C" int lk_cuda_quantise_queries(LkContext *c, const LkQuantiseQueries *a) {
        uint64_t heads, blocks;

        if (!c || !a || !check_quantise_queries(a) || __builtin_mul_overflow(a->n, (uint64_t) a->heads, &heads))
                return -EINVAL;
        blocks = heads / WARPS + (heads % WARPS != 0);
        if (blocks > GRID_X_MAX)
                return -EINVAL;
        if (blocks == 0)
                return 0;

        queries_to_i8<<<(unsigned) blocks, THREADS, 0, c->stream>>>(*a, is_fast(a->x, a->type, a->x_ld));
        return cuda_result(cudaGetLastError());
}

extern "C" int lk_cuda_quantise_keys(LkContext *c, const LkQuantiseKeys *a) {
        uint64_t tiles;
        int r;

        if (!c || !a || !check_quantise_keys(a))
                return -EINVAL;
        tiles = lk_i8_tiles(a->to.n);
        if (tiles > GRID_X_MAX || a->to.heads > GRID_Y_MAX)
                return -EINVAL;
        if (a->to.heads == 0)
                return 0;

        keys_offset<<<a->to.heads, DIM, 0, c->stream>>>(*a);
        r = cuda_result(cudaGetLastError());
        if (r < 0)
                return r;
        keys_to_i8<<<dim3((unsigned) tiles, a->to.heads), THREADS, 0, c->stream>>>(
                *a, is_fast(a->k, a->type, a->k_ld) && is_fast(a->v, a->type, a->v_ld));
        return cuda_result(cudaGetLastError());
}
