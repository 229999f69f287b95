/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* What the kernels of attention over int8 share: the steps of ops.h between the products, with the bits of kernels/cpu/attention-i8.c.
 * Every operation on f32 is an explicit IEEE one, so that the card does not matter. */

#include "kernels/cuda/context.cuh"
#include "kernels/cuda/ptx.cuh"

#define DIM 128  /* LK_I8_DIM */
#define KEYS 128 /* LK_I8_KEYS */
#define TILE (KEYS * DIM) /* bytes of keys, or of values */

typedef struct AttentionI8 {
        LkAttentionI8 a;
        uint64_t tiles, scale_ld;
        uint64_t blocks;  /* of keys, that lists are of */
        float half_scale; /* scale * 0.5 */
        bool pairs;       /* two numbers of o beside each other may be stored at once */
} AttentionI8;

/* By mma.sync: any card since sm_80. */
int attention_i8_portable(LkContext *c, const AttentionI8 *a);
/* By Hopper's instructions. -EOPNOTSUPP: it does not serve the arguments, nothing was done. */
int attention_i8_sm90(LkContext *c, const AttentionI8 *a);

/* What a row carries from tile to tile, but its sums of values. */
typedef struct RowI8 {
        float max, sum;
} RowI8;

/* A row in a tile. */
typedef struct StepI8 {
        float f, g;    /* what was summed up so far, and the tile's sums, are multiplied by it */
        float a, base; /* of a score: fma(score, a, base) */
} StepI8;

/* The same for all threads that have numbers of the row. top: its largest score in the tile. */
static __device__ __forceinline__ StepI8 step_i8(RowI8 &row, int top, float q_scale, float k_scale, float half_scale) {
        const float s = __int2float_rn(top), u = __fmul_rn(__fmul_rn(q_scale, k_scale), half_scale), t = __fmul_rn(s, u);
        const float e = number_exp(-fabsf(__fsub_rn(t, row.max)));
        const bool more = t > row.max;
        StepI8 y;

        y.f = more ? e : 1;
        y.g = more ? 1 : e;
        row.max = more ? t : row.max;
        y.a = __fmul_rn(u, 0x1.715476p+0f / 16);
        y.base = __fmaf_rn(-s, y.a, 1);
        return y;
}

/* The weight is the lowest byte. */
static __device__ __forceinline__ uint32_t weight_i8(int score, float a, float base) {
        const float round = 0x1.8p19f + 111.0f / 16;
        float w, n, r;

        asm("fma.rn.sat.f32 %0, %1, %2, %3;" : "=f"(w) : "f"(__int2float_rn(score)), "f"(a), "f"(base));
        n = __fadd_rn(w, round);
        r = __fsub_rn(w, __fsub_rn(n, round));
        r = __fmaf_rn(__fmaf_rn(LK_I8_EXP_2, r, LK_I8_EXP_1), r, LK_I8_EXP_0);
        return __float_as_uint(__fmaf_rn(r, __uint_as_float(__float_as_uint(n) << 23), 0x1p23f));
}

/* Two numbers beside each other. */
static __device__ __forceinline__ void store_i8(const AttentionI8 &a, uint64_t row, uint64_t column, float x, float y) {
        const uint64_t at = row * a.a.o_ld + column;

        if (a.a.o_type == LK_F32 && a.pairs) {
                *(float2 *) ((float *) a.a.o + at) = make_float2(x, y);
        } else if (a.pairs) {
                *(uint32_t *) ((uint16_t *) a.a.o + at) = bf16_from_f32(x) | (uint32_t) bf16_from_f32(y) << 16;
        } else {
                number_put(a.a.o, a.a.o_type, at, x);
                number_put(a.a.o, a.a.o_type, at + 1, y);
        }
}

/* Where a thread's numbers of a product are: of a group of four, number i is in row i / 2 * 8 + lane / 4 and in column lane % 4 * 2 + i % 2;
 * groups are eight columns apart. As the left operand of the next product a thread has, of each 16 columns, the numbers of two groups: that is
 * why LkKeysI8 has keys in another order. */

/* Both blocks of LK_BLOCK_ROWS that a tile has keys of, as bits. */
#define BOTH 3u

/* Whether column i / 4 * 8 + i % 2 behind the thread's first one is there. */
static __device__ __forceinline__ bool column_there(int i, int left, uint32_t blocks) {
        const int column = i / 4 * 8 + i % 2;

        return column < left && blocks >> column / (int) LK_BLOCK_ROWS & 1;
}

/* The steps of a thread's two rows by a tile's scores, COUNT of them. SOME: of these blocks, only `left` of the columns from the thread's first
 * one on are there; the others' scores become the least. */
template <bool SOME, int COUNT>
static __device__ __forceinline__ void steps_i8(int (&s)[COUNT], RowI8 (&row)[2], StepI8 (&step)[2], const float (&q_scale)[2], float k_scale,
        float half_scale, int left, uint32_t blocks = BOTH) {
        int most[2];

        if (SOME)
#pragma unroll
                for (int i = 0; i < COUNT; i++)
                        if (!column_there(i, left, blocks))
                                s[i] = INT32_MIN;
#pragma unroll
        for (int r = 0; r < 2; r++) {
                most[r] = max(s[2 * r], s[2 * r + 1]);
#pragma unroll
                for (int i = 4; i < COUNT; i += 4)
                        most[r] = max(max(most[r], s[i + 2 * r]), s[i + 2 * r + 1]);
                most[r] = max(most[r], __shfl_xor_sync(0xffffffffu, most[r], 1));
                most[r] = max(most[r], __shfl_xor_sync(0xffffffffu, most[r], 2));
                step[r] = step_i8(row[r], most[r], q_scale[r], k_scale, half_scale);
        }
}

/* Scores to weights as operands. */
template <bool SOME, int COUNT>
static __device__ __forceinline__ void weights_i8(
        const int (&s)[COUNT], const StepI8 (&step)[2], int left, uint32_t (&p)[COUNT / 4], uint32_t blocks = BOTH) {
#pragma unroll
        for (int i = 0; i < COUNT / 4; i++) {
                uint32_t w[4];

#pragma unroll
                for (int j = 0; j < 4; j++) {
                        const int at = i / 2 * 8 + i % 2 * 2 + j / 2 * 4 + j % 2;

                        w[j] = weight_i8(s[at], step[i % 2].a, step[i % 2].base);
                        if (SOME && !column_there(at, left, blocks))
                                w[j] = 0;
                }
                p[i] = bytes_pack(w[0], w[1], w[2], w[3]);
        }
}

/* l = fma(sum of weights, g, l * f) */
template <int COUNT>
static __device__ __forceinline__ void sum_i8(RowI8 (&row)[2], const StepI8 (&step)[2], const uint32_t (&p)[COUNT]) {
        uint32_t sum[2] = {}, both;

#pragma unroll
        for (int i = 0; i < COUNT; i++)
                sum[i % 2] = __dp4a(p[i], 0x01010101u, sum[i % 2]);
        both = sum[0] | sum[1] << 16; /* each at most 128 * 255 */
        both += __shfl_xor_sync(0xffffffffu, both, 1);
        both += __shfl_xor_sync(0xffffffffu, both, 2);
#pragma unroll
        for (int r = 0; r < 2; r++)
                row[r].sum = __fmaf_rn(__uint2float_rn(r ? both >> 16 : both & 0xffffu), step[r].g, __fmul_rn(row[r].sum, step[r].f));
}

/* o = fma(sums * scale, g, o * f); scale: of the tile's channels from the first of `o` on. */
template <int COUNT>
static __device__ __forceinline__ void accumulate_i8(float *o, const int (&sums)[COUNT], const StepI8 (&step)[2], const float *scale) {
        const float2 *pair = (const float2 *) scale + threadIdx.x % 4;

        if (__any_sync(0xffffffffu, step[0].f != 1 || step[1].f != 1)) /* by 1 changes nothing */
#pragma unroll
                for (int i = 0; i < COUNT; i++)
                        o[i] = __fmul_rn(o[i], step[i / 2 % 2].f);
#pragma unroll
        for (int i = 0; i < COUNT; i += 4) {
                const float2 x = pair[i];

#pragma unroll
                for (int j = 0; j < 4; j++)
                        o[i + j] = __fmaf_rn(__fmul_rn(__int2float_rn(sums[i + j]), j % 2 ? x.y : x.x), step[j / 2].g, o[i + j]);
        }
}
