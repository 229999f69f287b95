/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Rows of bf16 in pieces of 16 bytes: what the fast row passes share. Whatever is not aligned to pieces, or is f32, takes the plain
 * kernels instead, with the same bits. */

#include "kernels/cpu/check.h"
#include "kernels/cuda/context.cuh"
#include "kernels/cuda/ptx.cuh"

#define PIECE 8u /* numbers of bf16 */

/* May rows at p, ld apart, of n numbers of bf16 be moved in pieces? */
static inline bool row_pieces(const void *p, uint64_t ld, uint64_t n) {
        return (uintptr_t) p % 16 == 0 && ld % PIECE == 0 && n % PIECE == 0;
}

/* May the place of a row be had by one multiplication of 32 bits (row_piece)? */
static inline bool rows_near(uint64_t m, uint64_t ld) {
        return m < UINT64_C(1) << 31 && ld < UINT64_C(1) << 31;
}

/* Threads of a block that handles a row of `items` work items, `each` at a time a thread: few idle ones in the last turn. */
static inline unsigned row_threads(uint64_t items, unsigned most) {
        uint64_t turns = (items + most - 1) / most, threads = (items + turns - 1) / turns;

        return (unsigned) ((threads + 31) / 32 * 32);
}

/* Blocks of a kernel that fill the device once, for kernels that walk over the rows. */
static inline int row_grid(LkContext *c, const void *kernel, unsigned threads, uint64_t shared, unsigned *ret) {
        int each = 0, processors = 0, r;

        r = cuda_result(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int) shared));
        if (r >= 0)
                r = cuda_result(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, (int) threads, shared));
        if (r >= 0)
                r = cuda_result(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, c->device));
        if (r >= 0 && each * processors == 0)
                r = -EINVAL;
        if (r < 0)
                return r;
        *ret = (unsigned) (each * processors);
        return 0;
}

__device__ static inline float bf16_low(uint32_t pair) {
        return __uint_as_float(pair << 16);
}

__device__ static inline float bf16_high(uint32_t pair) {
        return __uint_as_float(pair & 0xffff0000u);
}

/* a * b rounded once, which is what rounding the f32 product gives: that one is exact. */
__device__ static inline uint32_t pair_mul(uint32_t a, uint32_t b) {
        uint32_t y;

        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(0x80008000u));
        return y;
}

/* a + b rounded once. The f32 sum has more than twice the digits of bf16, so rounding that one gives the same. */
__device__ static inline uint32_t pair_add(uint32_t a, uint32_t b) {
        uint32_t y;

        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(0x3f803f80u), "r"(b));
        return y;
}

/* `seen` stays zeros of any sign as long as no pair holds an infinity or a NaN. */
__device__ static inline uint32_t pair_watch(uint32_t pair, uint32_t seen) {
        uint32_t y;

        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(pair), "r"(0u), "r"(seen));
        return y;
}

__device__ static inline bool watch_clean(uint32_t seen) {
        return (seen & 0x7fff7fffu) == 0;
}

/* The NaN of ops.h in place of the hardware's (pair_round). */
__device__ static inline uint32_t pair_settled(uint32_t pair) {
        if ((pair & 0x7fffu) > 0x7f80u)
                pair = (pair & 0xffff0000u) | 0x7fc0u;
        if ((pair & 0x7fff0000u) > 0x7f800000u)
                pair = (pair & 0xffffu) | 0x7fc00000u;
        return pair;
}

/* The same for pairs of either type. A product of two numbers of f16 is exact in f32, too. */
template <LkType TYPE> __device__ static inline float pair_low(uint32_t pair) {
        return TYPE == LK_F16 ? f32_from_f16((uint16_t) pair) : bf16_low(pair);
}

template <LkType TYPE> __device__ static inline float pair_high(uint32_t pair) {
        return TYPE == LK_F16 ? f32_from_f16((uint16_t) (pair >> 16)) : bf16_high(pair);
}

template <LkType TYPE> __device__ static inline uint32_t pair_round_to(float low, float high) {
        return TYPE == LK_F16 ? pair_round_f16(low, high) : pair_round(low, high);
}

template <LkType TYPE> __device__ static inline uint32_t pair_watch_of(uint32_t pair, uint32_t seen) {
        uint32_t y;

        if (TYPE != LK_F16)
                return pair_watch(pair, seen);
        asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(pair), "r"(0u), "r"(seen));
        return y;
}

template <LkType TYPE> __device__ static inline uint32_t pair_settled_of(uint32_t pair) {
        if (TYPE != LK_F16)
                return pair_settled(pair);
        if ((pair & 0x7fffu) > 0x7c00u)
                pair = (pair & 0xffff0000u) | 0x7e00u;
        if ((pair & 0x7fff0000u) > 0x7c000000u)
                pair = (pair & 0xffffu) | 0x7e000000u;
        return pair;
}

__device__ static inline uint4 piece_mul(uint4 a, uint4 b) {
        return make_uint4(pair_mul(a.x, b.x), pair_mul(a.y, b.y), pair_mul(a.z, b.z), pair_mul(a.w, b.w));
}

__device__ static inline uint4 piece_add(uint4 a, uint4 b) {
        return make_uint4(pair_add(a.x, b.x), pair_add(a.y, b.y), pair_add(a.z, b.z), pair_add(a.w, b.w));
}

/* Four pairs: one test for all of them, since a NaN is rare. */
__device__ static inline uint4 piece_settled(uint4 p) {
        if (!watch_clean(pair_watch(p.x, pair_watch(p.y, pair_watch(p.z, pair_watch(p.w, 0))))))
                p = make_uint4(pair_settled(p.x), pair_settled(p.y), pair_settled(p.z), pair_settled(p.w));
        return p;
}

__device__ static inline void piece_floats(const uint4 &p, float *v) {
        v[0] = bf16_low(p.x);
        v[1] = bf16_high(p.x);
        v[2] = bf16_low(p.y);
        v[3] = bf16_high(p.y);
        v[4] = bf16_low(p.z);
        v[5] = bf16_high(p.z);
        v[6] = bf16_low(p.w);
        v[7] = bf16_high(p.w);
}

__device__ static inline uint4 piece_round(const float *v) {
        return make_uint4(pair_round(v[0], v[1]), pair_round(v[2], v[3]), pair_round(v[4], v[5]), pair_round(v[6], v[7]));
}

__device__ static inline uint4 piece_load(const void *row, uint32_t piece) {
        return ((const uint4 *) row)[piece];
}

__device__ static inline void piece_store(void *row, uint32_t piece, uint4 v) {
        ((uint4 *) row)[piece] = v;
}

/* A piece of a row of bf16 where rows_near(). */
__device__ static inline const uint4 *row_piece(const void *p, uint32_t row, uint64_t ld, uint32_t piece) {
        return (const uint4 *) ((const uint8_t *) p + (uint64_t) row * (uint32_t) (ld * 2)) + piece;
}

__device__ static inline uint4 *row_piece_mutable(void *p, uint32_t row, uint64_t ld, uint32_t piece) {
        return (uint4 *) ((uint8_t *) p + (uint64_t) row * (uint32_t) (ld * 2)) + piece;
}

__device__ static inline void row_prefetch(const void *p) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

/* What rounds to bf16(silu(g)) for a g of bf16, with few instructions: any error of ex2 up to 2^-22 and of rcp up to 2^-23, which is what
 * PTX promises, leaves every result from SILU_NEAR up on its side of a tie. The nearest ties are at 2^-7, -2^-8 and 5.9375;
 * making g a little smaller moves them away, and the last digits of log2(e) were chosen so that no other number comes near
 * (test-rows has the proof). */
#define SILU_NEAR_BITS 0x400u /* 2^-119 as bf16 */
#define SILU_NEAR_END 0x7f80u /* infinity, which comes out as no number, and that is above it */

__device__ static inline float silu_near(float g) {
        float e, y;

        asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(__fmul_rn(g, -0x1.715474p+0f)));
        asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(__fadd_rn(1.0f, e)));
        return __fmul_rn(__fmaf_rn(fabsf(g), -0x1.6p-21f, g), y);
}

/* The smaller magnitude; NaN before all. */
__device__ static inline uint32_t pair_least(uint32_t least, uint32_t pair) {
        uint32_t y;

        asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(least), "r"(pair & 0x7fff7fffu));
        return y;
}

__device__ static inline bool silu_is_near(uint32_t least) {
        return (least & 0xffffu) - SILU_NEAR_BITS < SILU_NEAR_END - SILU_NEAR_BITS &&
               (least >> 16) - SILU_NEAR_BITS < SILU_NEAR_END - SILU_NEAR_BITS;
}

/* x += gate * y of a row, by `step` threads. */
__device__ static inline void row_add(const LkResidual &a, uint64_t row, unsigned thread, unsigned step) {
        const LkType y_type = a.y_type ? a.y_type : a.type;
        const void *y = row_at(a.y, y_type, row, a.y_ld), *gate = NULL;
        void *x = row_at_mutable(a.x, a.type, row, a.x_ld);

        if (a.mod)
                gate = row_at(row_at(a.mod, a.type, (uint64_t) a.mod_index[row], a.mod_ld), a.type, 1, a.gate_at);
        for (uint64_t i = thread; i < a.n; i += step) {
                float v = number_get(y, y_type, i);

                if (gate)
                        v = number_round(__fmul_rn(number_get(gate, a.type, i), v), a.type);
                number_put(x, a.type, i, __fadd_rn(number_get(x, a.type, i), v));
        }
}
