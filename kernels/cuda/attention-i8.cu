/* SPDX-License-Identifier: Apache-2.0 */
/* Attention over int8: which kernel, and the one by the instructions of every card since sm_80: mma.sync, ldmatrix, cp.async, 81 KB of shared
 * memory. A block has 16 query rows of one head for each of its warps, with lists those of one list; two tiles of keys and values are in shared
 * memory, in rows of 128 bytes whose pieces of 16 are exchanged so that eight rows of one column lie in different banks. */

#include "kernels/cuda/attention-i8.cuh"

#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/check.h"
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/product.cuh"

#define WARPS 8 /* where there are no lists */
#define LIST_WARPS ((int) LK_BLOCK_ROWS / 16)
#define STAGE (2 * TILE + DIM * (int) sizeof(float)) /* keys, values, scales of the values */
#define SHARED(warps) ((warps) * 16 * DIM + 2 * STAGE)
#define HALF 64 /* channels whose sums a warp has at a time */

static __device__ __forceinline__ uint32_t place(uint32_t row, uint32_t piece) {
        return row * 128 + (piece ^ row % 8) * 16;
}

/* ROWS rows of 128 bytes; zeros behind the last of `left`. */
template <int ROWS, int THREADS>
static __device__ __forceinline__ void fetch(uint32_t to, const int8_t *from, uint64_t ld, uint64_t left) {
#pragma unroll
        for (uint32_t i = 0; i < ROWS * 8 / THREADS; i++) {
                const uint32_t row = (threadIdx.x + i * THREADS) / 8, piece = threadIdx.x % 8;
                const bool there = row < left;

                copy16_part(to + place(row, piece), there ? from + row * ld + piece * 16 : from, there ? 16 : 0);
        }
}

template <int THREADS>
static __device__ __forceinline__ void fetch_tile(uint32_t to, const LkKeysI8 &keys, uint64_t at) {
        fetch<KEYS, THREADS>(to, keys.k + at * TILE, DIM, KEYS);
        fetch<DIM, THREADS>(to + TILE, keys.v + at * TILE, KEYS, DIM);
        if (threadIdx.x < DIM / 4)
                copy16(to + 2 * TILE + threadIdx.x * 16, keys.v_scale + at * DIM + threadIdx.x * 4);
}

/* Keys of these blocks; the others' scores are 0. */
template <bool SOME>
static __device__ __forceinline__ void scores(int (&s)[KEYS / 2], uint32_t q, uint32_t k, uint32_t blocks) {
        const uint32_t lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane % 16;

#pragma unroll
        for (int i = 0; i < KEYS / 2; i++)
                s[i] = 0;
#pragma unroll
        for (uint32_t i = 0; i < DIM / 32; i++) {
                uint32_t x[4], y[4];

                matrices_load(x, q + place(row, 2 * i + lane / 16));
#pragma unroll
                for (uint32_t n = 0; n < KEYS / 16; n++) {
                        if (SOME && !(blocks >> n * 16 / LK_BLOCK_ROWS & 1))
                                continue;
                        matrices_load(y, k + place(n * 16 + lane / 16 * 8 + lane % 8, 2 * i + lane / 8 % 2));
                        multiply_i8(s + 8 * n, x, y[0], y[1]);
                        multiply_i8(s + 8 * n + 4, x, y[2], y[3]);
                }
        }
}

/* Of HALF channels, the first of them given. */
template <bool SOME>
static __device__ __forceinline__ void values(int (&d)[HALF / 2], const uint32_t (&p)[KEYS / 8], uint32_t v, uint32_t first, uint32_t blocks) {
        const uint32_t lane = threadIdx.x % 32;

#pragma unroll
        for (int i = 0; i < HALF / 2; i++)
                d[i] = 0;
#pragma unroll
        for (uint32_t i = 0; i < KEYS / 32; i++) {
                uint32_t y[4];

                if (SOME && !(blocks >> i * 32 / LK_BLOCK_ROWS & 1))
                        continue;
#pragma unroll
                for (uint32_t n = 0; n < HALF / 16; n++) {
                        matrices_load(y, v + place(first + n * 16 + lane / 16 * 8 + lane % 8, 2 * i + lane / 8 % 2));
                        multiply_u8_i8(d + 8 * n, p + 4 * i, y[0], y[1]);
                        multiply_u8_i8(d + 8 * n + 4, p + 4 * i, y[2], y[3]);
                }
        }
}

/* A tile that was fetched. SOME: only its first n keys are there, and of them those of these blocks. */
template <bool SOME>
static __device__ __forceinline__ void tile_i8(const AttentionI8 &a, float (&o)[DIM / 2], RowI8 (&row)[2], const float (&q_scale)[2], uint32_t q,
        uint32_t kv, const float *v_scale, float k_scale, uint32_t n, uint32_t blocks) {
        const int left = (int) n - (int) (threadIdx.x % 4 * 2);
        int s[KEYS / 2], sums[HALF / 2];
        uint32_t p[KEYS / 8];
        StepI8 step[2];

        scores<SOME>(s, q, kv, blocks);
        steps_i8<SOME>(s, row, step, q_scale, k_scale, a.half_scale, left, blocks);
        weights_i8<SOME>(s, step, left, p, blocks);
        sum_i8(row, step, p);
#pragma unroll
        for (uint32_t first = 0; first < DIM; first += HALF) {
                values<SOME>(sums, p, kv + TILE, first, blocks);
                accumulate_i8(o + first / 2, sums, step, v_scale + first);
        }
}

static __device__ __forceinline__ void fetched(void) {
        copies_wait_all();
        __syncthreads();
}

/* A tile whose keys, or those of some of its blocks, are seen. */
typedef struct SeenI8 {
        uint64_t tile;
        uint32_t blocks; /* 0: there is none */
} SeenI8;

/* The tiles of a block of threads, one after the other. */
template <bool LISTS>
struct WalkI8 {
        const uint32_t *list;
        uint32_t count;
        uint64_t at; /* in the list; without lists the tile */

        __device__ __forceinline__ WalkI8(const AttentionI8 &a, uint32_t head): at(0) {
                if (LISTS) {
                        const uint64_t task = (uint64_t) head * a.a.n_blocks + blockIdx.x;

                        list = a.a.list + task * a.blocks;
                        count = a.a.count[task];
                }
        }

        __device__ __forceinline__ SeenI8 next(const AttentionI8 &a) {
                if (!LISTS)
                        return {at, at++ < a.tiles ? BOTH : 0};
                if (at == count)
                        return {0, 0};

                const uint32_t b = list[at++];

                if (b % 2 == 0 && at < count && list[at] == b + 1) {
                        at++;
                        return {b / 2, BOTH};
                }
                return {b / 2, 1u << b % 2};
        }
};

/* Rows of q that a block of threads is for. */
template <bool LISTS, int ROWS>
static __device__ __forceinline__ void rows_i8(const LkAttentionI8 &a, uint64_t &first, uint64_t &end) {
        first = ((LISTS ? a.first_block : 0) + (uint64_t) blockIdx.x) * ROWS;
        end = first + ROWS;
        if (LISTS) {
                first = first > a.first_row ? first - a.first_row : 0;
                end = end > a.first_row ? end - a.first_row : 0;
        }
        end = end < a.n_q ? end : a.n_q;
}

template <int BLOCK_WARPS, bool LISTS>
static __global__ void __launch_bounds__(BLOCK_WARPS * 32, 1) attention_i8_mma(const __grid_constant__ AttentionI8 a) {
        constexpr int ROWS = BLOCK_WARPS * 16, THREADS = BLOCK_WARPS * 32;
        extern __shared__ __align__(1024) uint8_t raw[];
        const uint32_t head = blockIdx.y, q = (uint32_t) __cvta_generic_to_shared(raw), kv = q + ROWS * DIM, lane = threadIdx.x % 32;
        const uint64_t at = head * a.tiles;
        uint64_t first, end;

        rows_i8<LISTS, ROWS>(a.a, first, end);
        if (LISTS && first >= end)
                return;

        const uint64_t mine = first + threadIdx.x / 32 * 16 + lane / 4;
        float o[DIM / 2] = {}, q_scale[2];
        WalkI8<LISTS> walk(a, head);
        SeenI8 seen = walk.next(a);
        RowI8 row[2];

#pragma unroll
        for (int r = 0; r < 2; r++) {
                q_scale[r] = mine + r * 8 < end ? a.a.q_scale[(mine + r * 8) * a.scale_ld + head] : 0;
                row[r].max = -INFINITY;
                row[r].sum = 0;
        }
        fetch<ROWS, THREADS>(q, a.a.q + first * a.a.q_ld + (uint64_t) head * DIM, a.a.q_ld, end - first);
        if (seen.blocks > 0)
                fetch_tile<THREADS>(kv, a.a.keys, at + seen.tile);

#pragma unroll 1
        for (uint32_t stage = 0; seen.blocks > 0; stage = STAGE - stage) {
                const float *v_scale = (const float *) (raw + ROWS * DIM + stage + 2 * TILE);
                const float k_scale = a.a.keys.k_scale[at + seen.tile];
                const uint64_t left = a.a.keys.n - seen.tile * KEYS;
                const SeenI8 next = walk.next(a);

                fetched();
                if (next.blocks > 0)
                        fetch_tile<THREADS>(kv + (STAGE - stage), a.a.keys, at + next.tile);
                if (left >= KEYS && seen.blocks == BOTH)
                        tile_i8<false>(a, o, row, q_scale, q, kv + stage, v_scale, k_scale, KEYS, BOTH);
                else
                        tile_i8<true>(a, o, row, q_scale, q, kv + stage, v_scale, k_scale, left < KEYS ? (uint32_t) left : KEYS, seen.blocks);
                seen = next;
        }

#pragma unroll
        for (int r = 0; r < 2; r++)
                if (mine + r * 8 < end)
#pragma unroll
                        for (int i = 0; i < DIM / 8; i++)
                                store_i8(a, mine + r * 8, (uint64_t) head * DIM + i * 8 + lane % 4 * 2, __fdiv_rn(o[i * 4 + r * 2], row[r].sum),
                                        __fdiv_rn(o[i * 4 + r * 2 + 1], row[r].sum));
}

template <int BLOCK_WARPS, bool LISTS>
static int launch(LkContext *c, const AttentionI8 *a, uint64_t blocks) {
        const int shared = SHARED(BLOCK_WARPS);
        int r;

        r = cuda_result(cudaFuncSetAttribute(attention_i8_mma<BLOCK_WARPS, LISTS>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
        if (r < 0)
                return r;
        attention_i8_mma<BLOCK_WARPS, LISTS><<<dim3((unsigned) blocks, a->a.keys.heads), BLOCK_WARPS * 32, shared, c->stream>>>(*a);
        return cuda_result(cudaGetLastError());
}

int attention_i8_portable(LkContext *c, const AttentionI8 *a) {
        if (a->a.list)
                return launch<LIST_WARPS, true>(c, a, a->a.n_blocks);
        return launch<WARPS, false>(c, a, (a->a.n_q + WARPS * 16 - 1) / (WARPS * 16));
}

static void attention_i8_derive(AttentionI8 *a) {
        a->tiles = lk_i8_tiles(a->a.keys.n);
        a->blocks = lk_i8_blocks(a->a.keys.n);
        a->scale_ld = a->a.q_ld / DIM;
        a->half_scale = a->a.scale * 0.5f;
        a->pairs = (uintptr_t) a->a.o % (2 * lk_type_size(a->a.o_type)) == 0 && a->a.o_ld % 2 == 0;
}

#ifdef LK_CUDA_SM90
#define TRY_ROWS 130u
#define TRY_KEYS 300u
#define TRY_HEADS 2u
#define TRY_TILES 3u

/* All that a trial reads, for the host and the device alike. */
typedef struct TryNumbers {
        int8_t q[TRY_ROWS * TRY_HEADS * DIM], k[TRY_HEADS * TRY_TILES * TILE], v[TRY_HEADS * TRY_TILES * TILE];
        float v_scale[TRY_HEADS * TRY_TILES * DIM], offset[TRY_HEADS * DIM], k_scale[TRY_HEADS * TRY_TILES], q_scale[TRY_ROWS * TRY_HEADS];
} TryNumbers;

/* Scores of some tens; from tile to tile larger, and smaller in the other head. */
static void try_fill(TryNumbers *t) {
        uint8_t *integers = (uint8_t *) t;
        uint32_t seed = 1;

        for (uint32_t i = 0; i < sizeof(t->q) + sizeof(t->k) + sizeof(t->v); i++) {
                seed = seed * 1664525u + 1013904223u;
                integers[i] = (uint8_t) (seed >> 24);
        }
        for (uint32_t i = 0; i < TRY_HEADS * TRY_TILES; i++)
                t->k_scale[i] = (float) (i < TRY_TILES ? i + 1 : 2 * TRY_TILES - i) / 30;
        for (uint32_t i = 0; i < TRY_ROWS * TRY_HEADS; i++)
                t->q_scale[i] = (float) (i % 7 + 1) / 100;
        for (uint32_t i = 0; i < TRY_HEADS * TRY_TILES * DIM; i++)
                t->v_scale[i] = (float) (i % 31 + 1) / 1000;
}

int attention_i8_try(LkContext *c) {
        const uint64_t width = TRY_HEADS * DIM, size = TRY_ROWS * width * sizeof(float);
        Scratch s = scratch_begin(c->product);
        TryNumbers *t = (TryNumbers *) scratch_take(&s, sizeof(*t)), *numbers = (TryNumbers *) calloc(1, sizeof(*numbers));
        uint8_t *o = (uint8_t *) scratch_take(&s, 2 * size), *host = (uint8_t *) malloc(2 * size);
        AttentionI8 a = {};
        int r = -ENOMEM;

        if (o && numbers && host) {
                try_fill(numbers);
                a.a.n_q = TRY_ROWS;
                a.a.scale = 0.08838835f;
                a.a.q = t->q;
                a.a.q_scale = t->q_scale;
                a.a.q_ld = width;
                a.a.keys.n = TRY_KEYS;
                a.a.keys.heads = TRY_HEADS;
                a.a.keys.offset = t->offset;
                a.a.keys.k = t->k;
                a.a.keys.k_scale = t->k_scale;
                a.a.keys.v = t->v;
                a.a.keys.v_scale = t->v_scale;
                a.a.o_type = LK_F32;
                a.a.o = o;
                a.a.o_ld = width;
                attention_i8_derive(&a);
                r = cuda_result(cudaMemcpyAsync(t, numbers, sizeof(*t), cudaMemcpyHostToDevice, c->stream));
                if (r >= 0)
                        r = attention_i8_sm90(c, &a);
                a.a.o = o + size;
                if (r >= 0)
                        r = attention_i8_portable(c, &a);
                if (r >= 0)
                        r = cuda_result(cudaMemcpyAsync(host, o, 2 * size, cudaMemcpyDeviceToHost, c->stream));
                if (r >= 0)
                        r = cuda_result(cudaStreamSynchronize(c->stream));
                if (r >= 0)
                        r = memcmp(host, host + size, size) == 0;
        }
        free(numbers);
        free(host);
        return r;
}
#else
int attention_i8_try(LkContext *) {
        return 0;
}
#endif

extern "C" int lk_cuda_attention_i8(LkContext *c, const LkAttentionI8 *a) {
        AttentionI8 b;

        if (!c || !a || !check_attention_i8(a) || a->keys.heads > GRID_Y_MAX || a->n_q > (uint64_t) GRID_X_MAX * LK_BLOCK_ROWS)
                return -EINVAL;
        if (a->n_q == 0 || a->keys.heads == 0)
                return 0;

        b.a = *a;
        attention_i8_derive(&b);
#ifdef LK_CUDA_SM90
        if (!a->list && c->arch == 90 && c->attention != LK_CUDA_ATTENTION_PORTABLE && (c->attention == LK_CUDA_ATTENTION_UNTRIED || hopper_attention_i8(c))) {
                int r = attention_i8_sm90(c, &b);

                if (r != -EOPNOTSUPP)
                        return r;
        }
#endif
        return attention_i8_portable(c, &b);
}
