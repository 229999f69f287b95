/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* One number at a time: bf16 and f16 from and to f32, and reading a number from any byte address. */

#include <stdint.h>
#include <string.h>

#include "kernels/ops.h"

#define F32_INFINITY __builtin_inff()

/* Exact by IEEE. fma is a libm call where the instruction set lacks it, the only one in this backend;
 * <math.h> is not included, so that no other slips in. */
static inline float f32_fma(float a, float b, float c) {
        return __builtin_fmaf(a, b, c);
}

static inline float f32_sqrt(float f) {
        return __builtin_sqrtf(f);
}

static inline uint32_t f32_bits(float f) {
        uint32_t u;

        memcpy(&u, &f, sizeof(u));
        return u;
}

static inline float f32_from_bits(uint32_t u) {
        float f;

        memcpy(&f, &u, sizeof(f));
        return f;
}

/* To nearest, ties to even; overflow to infinity; every NaN becomes 0x7fc0, because the payload and sign of
 * a NaN differ between instruction sets. */
static inline uint16_t bf16_from_f32(float f) {
        uint32_t u = f32_bits(f);

        if ((u & 0x7fffffffu) > 0x7f800000u)
                return 0x7fc0;

        return (uint16_t) ((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}

/* The same of f16: beyond 65504 and a half step infinity; every NaN becomes 0x7e00. */
static inline uint16_t f16_from_f32(float f) {
        uint32_t u = f32_bits(f), magnitude = u & 0x7fffffffu, sign = u >> 16 & 0x8000u;

        if (magnitude > 0x7f800000u)
                return 0x7e00;
        if (magnitude >= 0x477ff000u)
                return (uint16_t) (sign | 0x7c00u);
        if (magnitude >= 0x38800000u)
                return (uint16_t) (sign | (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1)) >> 13);

        /* a multiple of 2^-24, which is the last place of a sum from 0.5 on */
        return (uint16_t) (sign | (f32_bits(f32_from_bits(magnitude) + 0.5f) - 0x3f000000u));
}

static inline float f32_from_bf16(uint16_t h) {
        return f32_from_bits((uint32_t) h << 16);
}

/* Exact, subnormals included; a signalling NaN becomes quiet as in VCVTPH2PS. */
static inline float f32_from_f16(uint16_t h) {
        uint32_t sign = (uint32_t) (h & 0x8000u) << 16, exponent = (h >> 10) & 31u, fraction = h & 1023u;

        if (exponent == 31)
                return f32_from_bits(sign | 0x7f800000u | fraction << 13 | (fraction ? 0x400000u : 0));

        if (exponent == 0) {
                float magnitude = (float) fraction * 0x1p-24f;

                return f32_from_bits(sign | f32_bits(magnitude));
        }

        return f32_from_bits(sign | (exponent + 112u) << 23 | fraction << 13);
}

/* Element i of an array that may start at any byte. */
static inline float number_get(const void *p, LkType type, uint64_t i) {
        uint32_t u;
        uint16_t h;

        if (type == LK_F32) {
                memcpy(&u, (const uint8_t *) p + i * 4, 4);
                return f32_from_bits(u);
        }

        memcpy(&h, (const uint8_t *) p + i * 2, 2);
        return type == LK_BF16 ? f32_from_bf16(h) : f32_from_f16(h);
}
