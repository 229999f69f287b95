/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Rows of bf16 to int8 by the steps of ops.h, 16 neighbouring numbers (a share) a thread, with the bits of kernels/cpu/quantise.c.
 *
 * Half a warp has a rotation group of 256. The stages with strides 1 and 4 lie inside a share; then the half warp turns its numbers
 * over in shared memory, so that thread j has the numbers j, j + 16, .., and the strides 16 and 64 lie inside a thread.
 *
 * The factor 0.5 of a stage is left out and put back by a power of two at the end, which changes no bit while nothing is near the ends
 * of the number range. A warp whose largest number is (or is no number) does its shares again with the factors: `exact`.
 *
 * bf16(v / s) of two bf16 numbers is bf16(v * (1 / s)): the quotient is never a tie of bf16 and at least 2^-17 of itself away from one. */

#include "kernels/cuda/rows.cuh"

#define SHARE 16u
#define EXCHANGE_LD 20u               /* floats from one thread's share to the next: no two in one bank */
#define EXCHANGE_HALF 336u            /* half a warp's */
#define EXCHANGE_SIZE (672u * 4u)     /* bytes of a warp */
#define EXCHANGE_BYTES_HALF 272u      /* the same memory as bytes */
#define SHARE_SMALLEST 0x14800000u    /* 2^-86 */
#define SHARE_LARGEST 0x7b800000u     /* 2^120 */
#define F32_INFINITY_BITS 0x7f800000u

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

__device__ static inline void share_halve(float (&v)[SHARE], bool exact) {
        if (exact)
#pragma unroll
                for (unsigned i = 0; i < SHARE; i++)
                        v[i] = __fmul_rn(v[i], 0.5f);
}

/* Two stages inside a thread, as many as there are. */
__device__ static inline void share_rotate(float (&v)[SHARE], int stages, bool exact) {
        if (stages > 0) {
#pragma unroll
                for (unsigned i = 0; i < SHARE; i += 4)
                        rotate_four(v[i], v[i + 1], v[i + 2], v[i + 3]);
                share_halve(v, exact);
        }
        if (stages > 1) {
#pragma unroll
                for (unsigned i = 0; i < 4; i++)
                        rotate_four(v[i], v[i + 4], v[i + 8], v[i + 12]);
                share_halve(v, exact);
        }
}

/* Numbers 16j .. 16j + 15 of thread j of half a warp to j, j + 16, ... */
__device__ static inline void share_turn(float (&v)[SHARE], float *exchange) {
        const unsigned lane = threadIdx.x % 32;
        float *half = exchange + lane / 16 * EXCHANGE_HALF;

        __syncwarp();
#pragma unroll
        for (unsigned i = 0; i < SHARE; i += 4)
                *(float4 *) (half + lane % 16 * EXCHANGE_LD + i) = make_float4(v[i], v[i + 1], v[i + 2], v[i + 3]);
        __syncwarp();
#pragma unroll
        for (unsigned i = 0; i < SHARE; i++)
                v[i] = half[i * EXCHANGE_LD + lane % 16];
}

/* The largest magnitude of a warp as bits; with NaN above all, or without. */
__device__ static inline uint32_t share_most(const float (&v)[SHARE], bool exact) {
        float most = 0;
        uint32_t bits = 0;

        if (exact) {
#pragma unroll
                for (unsigned i = 0; i < SHARE; i++) {
                        uint32_t u = __float_as_uint(v[i]) & 0x7fffffffu;

                        bits = max(bits, u > F32_INFINITY_BITS ? 0 : u);
                }
        } else {
#pragma unroll
                for (unsigned i = 0; i < SHARE; i++)
                        asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(most), "f"(fabsf(v[i])));
                bits = __float_as_uint(most) & 0x7fffffffu;
        }
        return __reduce_max_sync(0xffffffffu, bits);
}

/* A share on its way: rotated, turned over, bf16, 2^stages times too large unless exact. */
typedef struct Share {
        uint4 low, high;
        float most; /* of the warp, in its true size */
        bool exact;
} Share;

/* values(v) gives a thread's 16 numbers; it may be called twice. The whole warp calls this. */
template <typename Values> __device__ static inline Share share_make(Values values, int stages, float *exchange) {
        Share s;

        s.exact = false;
        while (true) {
                float v[SHARE];
                uint32_t bits;

                values(v);
                share_rotate(v, stages, s.exact);
                share_turn(v, exchange);
                share_rotate(v, stages - 2, s.exact);
                bits = share_most(v, s.exact);
                s.low = piece_round(v);
                s.high = piece_round(v + 8);
                s.most = __uint_as_float(bits);
                if (s.exact)
                        return s;
                if (bits == 0 || (bits >= SHARE_SMALLEST && bits < SHARE_LARGEST))
                        break;
                s.exact = true;
        }
        s.most = __fmul_rn(s.most, __uint_as_float((127u - (unsigned) stages) << 23));
        return s;
}

/* The scale of a row whose largest magnitude is m. */
__device__ static inline float share_scale(float m) {
        m = m < 0x1.fep+127f ? m : 0x1.fep+127f;
        return fmaxf(__fmul_rn(m, 1.0f / 127.0f), 1e-30f);
}

/* What numbers are multiplied by, instead of being divided by the scale. */
__device__ static inline float share_factor(float scale) {
        return __fdiv_rn(1.0f, number_round(scale, LK_BF16));
}

__device__ static inline void share_put(uint8_t *to, float q, bool careful) {
        if (careful)
                q = q == q ? fmaxf(q, -128.0f) : 0.0f;
        *to = (uint8_t) __float_as_uint(__fadd_rn(fminf(q, 127.0f), 0x1.8p+23f)); /* to nearest even */
}

/* A share to 16 bytes at q, in order again. The whole warp calls this. */
__device__ static inline void share_store(
        uint4 low, uint4 high, float factor, int stages, bool exact, float *exchange, int8_t *q, bool inside) {
        const unsigned lane = threadIdx.x % 32;
        uint8_t *half = (uint8_t *) exchange + lane / 16 * EXCHANGE_BYTES_HALF;
        float v[SHARE];

        piece_floats(low, v);
        piece_floats(high, v + 8);
        if (!exact)
                factor = __fmul_rn(factor, __uint_as_float((127u - (unsigned) stages) << 23));
        __syncwarp();
#pragma unroll
        for (unsigned i = 0; i < SHARE; i += 2) {
                uint32_t pair = pair_round(__fmul_rn(v[i], factor), __fmul_rn(v[i + 1], factor));

                share_put(half + i * 16 + lane % 16, bf16_low(pair), exact);
                share_put(half + (i + 1) * 16 + lane % 16, bf16_high(pair), exact);
        }
        __syncwarp();
        if (inside)
                *(uint4 *) q = *(const uint4 *) (half + lane % 16 * 16);
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
