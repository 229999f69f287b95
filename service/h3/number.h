/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Single numbers of a file on the host: tables and adapters; matrices are the op table's. */

#include <stdint.h>
#include <string.h>

#include "kernels/ops.h"

static inline float h3_float_of_bits(uint32_t bits) {
        float f;

        memcpy(&f, &bits, sizeof(f));
        return f;
}

/* Exact, subnormals included. */
static inline float h3_float_of_f16(uint16_t h) {
        uint32_t sign = (uint32_t) (h & 0x8000u) << 16, exponent = (h >> 10) & 31u, fraction = h & 1023u;
        float magnitude;

        if (exponent == 31)
                return h3_float_of_bits(sign | 0x7f800000u | fraction << 13);
        if (exponent > 0)
                return h3_float_of_bits(sign | (exponent + 112u) << 23 | fraction << 13);
        magnitude = (float) fraction * 0x1p-24f;
        return sign ? -magnitude : magnitude;
}

/* Element i of an array of f32, bf16 or f16 that may start at any byte. */
static inline float h3_number(const void *p, LkType type, uint64_t i) {
        uint32_t bits;
        uint16_t half;

        if (type == LK_F32) {
                memcpy(&bits, (const uint8_t *) p + 4 * i, sizeof(bits));
                return h3_float_of_bits(bits);
        }
        memcpy(&half, (const uint8_t *) p + 2 * i, sizeof(half));
        return type == LK_F16 ? h3_float_of_f16(half) : h3_float_of_bits((uint32_t) half << 16);
}
