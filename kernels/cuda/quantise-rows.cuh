/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Rows of bf16 to int8 by the steps of ops.h, 16 or 32 numbers a thread, with the bits of kernels/cpu/quantise.c.
 *
 * A rotation group of 256 is a square of 16 x 16 numbers. A thread has one or two rows of it (a share), so that the stages with strides
 * 1 and 4 lie inside a thread; then its threads, neighbours in a warp, turn the square over in shared memory and have one or two columns
 * each, for the strides 16 and 64. As bf16 the numbers go back the same way.
 *
 * The factor 0.5 of a stage is left out and put back by a power of two at the end, which changes no bit while the largest number of a row
 * is not near the ends of the number range. Other rows, and those with numbers that are none, go the plain way.
 *
 * bf16(v / s) of two bf16 numbers is bf16(v * f + bf16(v * g)) with f = bf16(1 / s), g = bf16(1 / s - f): the quotient is never a tie of
 * bf16 and far enough away from one (test-rows tries all of them). */

#include "kernels/cuda/rows.cuh"

#define SQUARE 16u        /* numbers in a row of a square */
#define SQUARE_PITCH 304u /* floats from one square to the next in shared memory: the other half of the banks */
#define SQUARE_WORDS 136u /* the same as pairs of bf16: the next quarter of the banks */
#define SHARE_SMALLEST 0x14800000u /* 2^-86 */
#define SHARE_LARGEST 0x73800000u  /* 2^104: g of the largest rows is a normal number */
#define F32_INFINITY_BITS 0x7f800000u

/* Of N numbers a thread: threads of a square; bytes that a warp needs for the turning over. */
#define SHARE_THREADS(N) (256u / (N))
#define SHARE_BYTES(N) ((N) / 8u * SQUARE_PITCH * 4u)

static inline unsigned rotation_stages(uint32_t rotation) {
        return rotation == 256 ? 4 : rotation == 64 ? 3 : rotation == 16 ? 2 : rotation == 4 ? 1 : 0;
}

/* As in kernels/cpu/check.h. */
static inline bool rotation_valid(uint32_t rotation, uint64_t cols) {
        return rotation == 0 || (rotation_stages(rotation) > 0 && cols % rotation == 0);
}

__device__ static inline void rotate_four(float &a, float &b, float &c, float &d) {
        float sum = __fadd_rn(a, b), less = __fsub_rn(a, b), p = c, q = d;

        a = __fsub_rn(__fadd_rn(sum, p), q);
        b = __fadd_rn(__fsub_rn(sum, p), q);
        c = __fadd_rn(__fadd_rn(less, p), q);
        d = __fadd_rn(__fsub_rn(p, less), q);
}

/* Row i, counted from the row that the thread has for its part-th 16 numbers. */
template <unsigned N> __device__ static inline uint32_t share_row(unsigned part) {
        return threadIdx.x % SHARE_THREADS(N) + part * SHARE_THREADS(N);
}

/* Where they lie in the whole row of numbers. */
template <unsigned N> __device__ static inline uint32_t share_at(unsigned part) {
        return threadIdx.x / SHARE_THREADS(N) * 256 + share_row<N>(part) * SQUARE;
}

/* Two stages of 16 numbers, `apart` from one to the next, as many as there are. */
template <unsigned APART> __device__ static inline void square_rotate(float *v, int stages) {
        if (stages > 0)
#pragma unroll
                for (unsigned i = 0; i < 16; i += 4)
                        rotate_four(v[i * APART], v[(i + 1) * APART], v[(i + 2) * APART], v[(i + 3) * APART]);
        if (stages > 1)
#pragma unroll
                for (unsigned i = 0; i < 4; i++)
                        rotate_four(v[i * APART], v[(i + 4) * APART], v[(i + 8) * APART], v[(i + 12) * APART]);
}

/* Where row i is in shared memory, in floats: the same four numbers of eight rows lie in different banks. */
__device__ static inline uint32_t square_row(uint32_t i) {
        return i * SQUARE + i / 2 * 4;
}

/* Rows to columns: v[i * N / 16 + c] becomes row i of the thread's column c. */
template <unsigned N> __device__ static inline void share_turn(float (&v)[N], float *exchange) {
        const unsigned lane = threadIdx.x % 32;
        float *square = exchange + lane / SHARE_THREADS(N) * SQUARE_PITCH;

        __syncwarp();
#pragma unroll
        for (unsigned i = 0; i < N; i += 4)
                *(float4 *) (square + square_row(share_row<N>(0)) + square_row(i / 16 * SHARE_THREADS(N)) + i % 16) =
                        make_float4(v[i], v[i + 1], v[i + 2], v[i + 3]);
        __syncwarp();
        square += lane % SHARE_THREADS(N) * (N / 16);
#pragma unroll
        for (unsigned i = 0; i < 16; i++) {
                if (N == 16)
                        v[i] = square[square_row(i)];
                else
                        *(float2 *) &v[i * 2] = *(const float2 *) (square + square_row(i));
        }
}

/* Eight numbers of row i, the first or second ones, in words. */
__device__ static inline uint32_t square_words(uint32_t i, uint32_t second) {
        return (2 * i + (second ^ (i / 4 % 2))) * 4;
}

/* Columns back to rows, as bf16: two pieces for each 16 numbers. */
template <unsigned N> __device__ static inline void share_return(const float (&v)[N], float *exchange, uint4 (&ret)[N / 8]) {
        const unsigned lane = threadIdx.x % 32, thread = lane % SHARE_THREADS(N);
        uint32_t *square = (uint32_t *) exchange + lane / SHARE_THREADS(N) * SQUARE_WORDS;

        __syncwarp();
        if (N == 16) {
#pragma unroll
                for (unsigned i = 0; i < 16; i += 2) {
                        uint32_t two = pair_round(v[i], v[i + 1]);

                        ((uint16_t *) (square + square_words(i, thread / 8)))[thread % 8] = (uint16_t) two;
                        ((uint16_t *) (square + square_words(i + 1, thread / 8)))[thread % 8] = (uint16_t) (two >> 16);
                }
        } else {
#pragma unroll
                for (unsigned i = 0; i < 16; i++)
                        square[square_words(i, thread / 4) + thread % 4] = pair_round(v[i * 2], v[i * 2 + 1]);
        }
        __syncwarp();
#pragma unroll
        for (unsigned i = 0; i < N / 8; i++)
                ret[i] = *(const uint4 *) (square + square_words(share_row<N>(i / 2), i % 2));
}

/* The largest magnitude of a warp as bits; a NaN is above all. */
template <unsigned N> __device__ static inline uint32_t share_most(const float (&v)[N]) {
        float most[4] = {fabsf(v[0]), fabsf(v[1]), fabsf(v[2]), fabsf(v[3])}; /* so that none waits for long */

#pragma unroll
        for (unsigned i = 4; i < N; i++)
                asm("max.NaN.f32 %0, %1, %2;" : "=f"(most[i % 4]) : "f"(most[i % 4]), "f"(fabsf(v[i])));
#pragma unroll
        for (unsigned i = 1; i < 4; i++)
                asm("max.NaN.f32 %0, %1, %2;" : "=f"(most[0]) : "f"(most[0]), "f"(most[i]));
        return __reduce_max_sync(0xffffffffu, __float_as_uint(most[0]) & 0x7fffffffu);
}

/* A thread's numbers to rotated ones in bf16, 2^stages times too large, and the largest magnitude of the warp. The whole warp calls
 * this; exchange: SHARE_BYTES of it. */
template <unsigned N>
__device__ static inline uint32_t share_make(float (&v)[N], int stages, float *exchange, uint4 (&ret)[N / 8]) {
        uint32_t most;

#pragma unroll
        for (unsigned i = 0; i < N; i += 16)
                square_rotate<1>(v + i, stages);
        share_turn<N>(v, exchange);
#pragma unroll
        for (unsigned i = 0; i < N / 16; i++)
                square_rotate<N / 16>(v + i, stages - 2);
        most = share_most<N>(v);
        share_return<N>(v, exchange, ret);
        return most;
}

/* May a row with this largest magnitude, 2^stages times too large, go on the fast way? */
__device__ static inline bool share_usual(uint32_t most) {
        return most == 0 || (most >= SHARE_SMALLEST && most < SHARE_LARGEST);
}

__device__ static inline float share_power(int stages) {
        return __uint_as_float((127u - (unsigned) stages) << 23);
}

/* The scale of a row whose largest magnitude is m. */
__device__ static inline float share_scale(float m) {
        m = m < 0x1.fep+127f ? m : 0x1.fep+127f;
        return fmaxf(__fmul_rn(m, 1.0f / 127.0f), 1e-30f);
}

/* What numbers that are 2^stages times too large are multiplied by, instead of being divided by the scale. */
__device__ static inline float share_factor(float scale, int stages) {
        return __fmul_rn(__fdiv_rn(1.0f, number_round(scale, LK_BF16)), share_power(stages));
}

/* The same as two numbers of bf16, each twice. */
typedef struct Factor {
        uint32_t most, rest;
} Factor;

__device__ static inline Factor factor_of(float f) {
        const uint32_t most = pair_round(f, f);
        const float rest = __fsub_rn(f, bf16_low(most));

        return {most, pair_round(rest, rest)};
}

/* Two numbers to the lower bytes of 16 bits each. The quotients are numbers of bf16 of at most 128.5, so those of f16 are the same but
 * near 0, and 1536 + q of f16 has q in its last digits, to nearest even. */
__device__ static inline uint32_t pair_integers(uint32_t pair, const Factor &factor) {
        uint32_t y;

        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(pair), "r"(factor.most), "r"(pair_mul(pair, factor.rest)));
        pair = y;
        asm("{ .reg .b32 q; cvt.rn.f16x2.f32 q, %2, %1; min.f16x2 q, q, %3; add.rn.f16x2 %0, q, %4; }"
                : "=r"(y)
                : "f"(bf16_low(pair)), "f"(bf16_high(pair)), "r"(0x57f057f0u), "r"(0x66006600u)); /* 127, 1536 */
        return y;
}

/* Eight numbers to integers. */
__device__ static inline uint2 piece_integers(const uint4 &p, const Factor &factor) {
        return make_uint2(__byte_perm(pair_integers(p.x, factor), pair_integers(p.y, factor), 0x6420),
                __byte_perm(pair_integers(p.z, factor), pair_integers(p.w, factor), 0x6420));
}

/* A thread's numbers to int8 at a row's q; n: numbers in the row. */
template <unsigned N> __device__ static inline void share_store(const uint4 (&y)[N / 8], const Factor &factor, int8_t *q, uint32_t n) {
#pragma unroll
        for (unsigned part = 0; part < N / 16; part++)
                if (share_at<N>(part) < n) {
                        uint2 low = piece_integers(y[2 * part], factor), high = piece_integers(y[2 * part + 1], factor);

                        *(uint4 *) (q + share_at<N>(part)) = make_uint4(low.x, low.y, high.x, high.y);
                }
}

/* The plain way, any type, rotation or alignment: a block has a row, a warp a group of it at a time, in shared memory.
 * value(i) gives a number of the row; called once for the maximum and once for the integers. */
#define PLAIN_GROUP 256u

template <typename Value>
__device__ static inline void plain_group(Value value, uint64_t at, uint32_t n, uint32_t rotation, float *v) {
        const unsigned lane = threadIdx.x % 32;

        __syncwarp();
        for (uint32_t i = lane; i < n; i += 32)
                v[i] = value(at + i);
        __syncwarp();
        for (uint32_t stride = 1; stride < rotation; stride *= 4) {
                for (uint32_t i = lane; i < n / 4; i += 32) {
                        float *p = v + i / stride * 4 * stride + i % stride;
                        float a = p[0], b = p[stride], c = p[2 * stride], d = p[3 * stride];

                        rotate_four(a, b, c, d);
                        p[0] = __fmul_rn(a, 0.5f);
                        p[stride] = __fmul_rn(b, 0.5f);
                        p[2 * stride] = __fmul_rn(c, 0.5f);
                        p[3 * stride] = __fmul_rn(d, 0.5f);
                }
                __syncwarp();
        }
}

__device__ static inline int8_t plain_integer(float q) {
        q = q == q ? q : 0;
        q = fminf(fmaxf(q, -128.0f), 127.0f);
        return (int8_t) (int32_t) __fsub_rn(__fadd_rn(q, 0x1.8p+23f), 0x1.8p+23f);
}

/* a: of x only the type, m and k are looked at. exchange: PLAIN_GROUP floats a warp. most: one number of the block. */
template <typename Value>
__device__ static inline void plain_quantise(const LkQuantise &a, uint64_t row, Value value, float *exchange, uint32_t *most) {
        const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        float *v = exchange + warp * PLAIN_GROUP, m, s, divisor;

        if (threadIdx.x == 0)
                *most = 0;
        __syncthreads();
        for (uint64_t at = (uint64_t) warp * PLAIN_GROUP; at < a.k; at += (uint64_t) blockDim.x / 32 * PLAIN_GROUP) {
                uint32_t n = a.k - at < PLAIN_GROUP ? (uint32_t) (a.k - at) : PLAIN_GROUP, bits = 0;

                plain_group(value, at, n, a.rotation, v);
                for (uint32_t i = lane; i < n; i += 32) {
                        uint32_t u = __float_as_uint(v[i]) & 0x7fffffffu;

                        bits = max(bits, u > F32_INFINITY_BITS ? 0 : u);
                }
                atomicMax(most, bits);
        }
        __syncthreads();

        m = __uint_as_float(*most);
        if (a.x_type == LK_BF16) {
                s = share_scale(m);
                divisor = number_round(s, LK_BF16);
        } else {
                m = m < 0x1.fffffep+127f ? m : 0x1.fffffep+127f;
                s = fmaxf(__fdiv_rn(m, 127.0f), 1e-30f);
                divisor = s;
        }
        if (threadIdx.x == 0)
                a.scale[row] = s;
        for (uint64_t at = (uint64_t) warp * PLAIN_GROUP; at < a.k; at += (uint64_t) blockDim.x / 32 * PLAIN_GROUP) {
                uint32_t n = a.k - at < PLAIN_GROUP ? (uint32_t) (a.k - at) : PLAIN_GROUP;

                plain_group(value, at, n, a.rotation, v);
                for (uint32_t i = lane; i < n; i += 32)
                        a.q[row * a.q_ld + at + i] = plain_integer(
                                number_round(__fdiv_rn(number_round(v[i], a.x_type), divisor), a.x_type));
        }
        __syncthreads();
}
