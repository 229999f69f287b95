/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Numbers on the device, with the bits of kernels/cpu/number.h and vec.h: every operation is an explicit IEEE one, so that the
 * compiler has nothing to contract. A thread group of eight owns a row: lane l sums the elements l, l + 8, ... */

#include <stdint.h>

#include "kernels/ops.h"

#define ROW_LANES 8
#define ROW_THREADS 256

__device__ static inline float number_get(const void *p, LkType type, uint64_t i) {
        const uint8_t *b = (const uint8_t *) p;

        if (type == LK_F32)
                return ((const float *) p)[i];

        /* Weights may start at any byte. */
        uint32_t h = b[i * 2] | (uint32_t) b[i * 2 + 1] << 8;

        if (type == LK_BF16)
                return __uint_as_float(h << 16);

        uint32_t sign = (h & 0x8000u) << 16, exponent = (h >> 10) & 31u, fraction = h & 1023u;

        if (exponent == 31)
                return __uint_as_float(sign | 0x7f800000u | fraction << 13 | (fraction ? 0x400000u : 0));
        if (exponent == 0)
                return __uint_as_float(sign | __float_as_uint(__fmul_rn((float) fraction, 0x1p-24f)));
        return __uint_as_float(sign | (exponent + 112u) << 23 | fraction << 13);
}

/* A weight that may start at any byte, also as f32. */
__device__ static inline float weight_get(const void *p, LkType type, uint64_t i) {
        const uint8_t *b = (const uint8_t *) p + i * 4;

        if (type != LK_F32)
                return number_get(p, type, i);
        return __uint_as_float(b[0] | (uint32_t) b[1] << 8 | (uint32_t) b[2] << 16 | (uint32_t) b[3] << 24);
}

/* To nearest, ties to even; every NaN becomes 0x7fc0. */
__device__ static inline uint16_t bf16_from_f32(float f) {
        uint32_t u = __float_as_uint(f);

        if ((u & 0x7fffffffu) > 0x7f800000u)
                return 0x7fc0;
        return (uint16_t) ((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}

/* The same of f16; every NaN becomes 0x7e00. */
__device__ static inline uint16_t f16_from_f32(float f) {
        uint16_t h;

        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
        return f != f ? 0x7e00 : h;
}

__device__ static inline float f32_from_f16(uint16_t h) {
        float f;

        asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
        return f;
}

__device__ static inline float number_round(float f, LkType type) {
        return type == LK_BF16 ? __uint_as_float((uint32_t) bf16_from_f32(f) << 16) : f;
}

__device__ static inline void number_put(void *p, LkType type, uint64_t i, float f) {
        if (type == LK_F32)
                ((float *) p)[i] = f;
        else
                ((uint16_t *) p)[i] = bf16_from_f32(f);
}

/* Of operations that take f16, too. */
__device__ static inline float number_round_to(float f, LkType type) {
        return type == LK_F16 ? f32_from_f16(f16_from_f32(f)) : number_round(f, type);
}

__device__ static inline void number_put_as(void *p, LkType type, uint64_t i, float f) {
        if (type == LK_F16)
                ((uint16_t *) p)[i] = f16_from_f32(f);
        else
                number_put(p, type, i, f);
}

__device__ static inline const void *row_at(const void *p, LkType t, uint64_t i, uint64_t ld) {
        return (const uint8_t *) p + i * ld * (t == LK_F32 ? 4 : 2);
}

__device__ static inline void *row_at_mutable(void *p, LkType t, uint64_t i, uint64_t ld) {
        return (uint8_t *) p + i * ld * (t == LK_F32 ? 4 : 2);
}

/* ((0+4)+(2+6))+((1+5)+(3+7)) of a row's eight lanes, the order of ops.h: addition of two floats is commutative, so each lane may add in
 * its own order. All 32 threads of a warp call it. */
__device__ static inline float lanes_sum(float sum) {
        sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 4, ROW_LANES));
        sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 2, ROW_LANES));
        return __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 1, ROW_LANES));
}

/* sum(x[i]^2) of a row by its eight lanes, in the order of ops.h; every lane gets it. All 32 threads of a warp call it. */
__device__ static inline float row_sum_squares(const void *x, LkType type, uint64_t n, unsigned lane) {
        float sum = 0;

        for (uint64_t i = lane; i < n; i += ROW_LANES) {
                float v = number_get(x, type, i);

                sum = __fmaf_rn(v, v, sum);
        }
        return lanes_sum(sum);
}

__device__ static inline float row_factor(float sum_squares, uint64_t n, float eps) {
        return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(sum_squares, (float) n), eps)));
}

/* exp of kernels/cpu/vec.h, operation for operation. */
__device__ static inline float number_exp(float x) {
        const float round = 0x1.8p+23f;
        float t, r, p;
        uint32_t n, half;

        x = -104.0f > x ? -104.0f : x;
        x = 89.0f < x ? 89.0f : x;
        t = __fmaf_rn(x, 0x1.715476p+0f, round);
        n = __float_as_uint(t) - __float_as_uint(round);
        t = __fsub_rn(t, round);
        r = __fmaf_rn(t, -0x1.62e4p-1f, x);
        r = __fmaf_rn(t, -0x1.7f7d1cp-20f, r);
        p = __fmaf_rn(0x1.6a2412p-10f, r, 0x1.1239f2p-7f);
        p = __fmaf_rn(p, r, 0x1.5558f2p-5f);
        p = __fmaf_rn(p, r, 0x1.555492p-3f);
        p = __fmaf_rn(p, r, 0x1.fffffcp-2f);
        p = __fadd_rn(__fmaf_rn(__fmul_rn(r, r), p, r), 1.0f);
        half = (uint32_t) ((int32_t) n >> 1);
        p = __fmul_rn(p, __uint_as_float((half + 127u) << 23));
        return __fmul_rn(p, __uint_as_float((n - half + 127u) << 23));
}

/* silu(x) of kernels/cpu/swiglu.c, the same bits. */
__device__ static inline float number_silu(float x) {
        return __fdiv_rn(x, __fadd_rn(1.0f, number_exp(-x)));
}
