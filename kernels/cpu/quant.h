/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Quantised numbers: the rotation, and rows of a matrix as f32. Plain loops, element by element, that the
 * compiler may turn into vectors: no result depends on it. */

#include <stdint.h>

#include "kernels/cpu/number.h"

/* x . H by groups (ops.h, LkQuantise). */
static inline void rotate(float *x, uint64_t n, uint32_t group) {
        for (uint64_t stride = 1; stride < group; stride *= 4)
                for (uint64_t at = 0; at < n; at += 4 * stride)
                        for (float *p = x + at, *end = p + stride; p < end; p++) {
                                float a = p[0], b = p[stride], c = p[2 * stride], d = p[3 * stride];

                                p[0] = (((a + b) + c) - d) * 0.5f;
                                p[stride] = (((a + b) - c) + d) * 0.5f;
                                p[2 * stride] = (((a - b) + c) + d) * 0.5f;
                                p[3 * stride] = (((b - a) + c) + d) * 0.5f;
                        }
}

/* Exact. Exponent bias 7, no infinity, one NaN per sign. */
static inline float f32_from_e4m3(uint8_t u) {
        uint32_t sign = (uint32_t) (u & 0x80u) << 24, exponent = (u >> 3) & 15u, fraction = u & 7u;

        if ((u & 0x7fu) == 0x7fu)
                return f32_from_bits(sign | 0x7fc00000u);
        if (exponent == 0) {
                float magnitude = (float) fraction * 0x1p-9f;

                return f32_from_bits(sign | f32_bits(magnitude));
        }

        return f32_from_bits(sign | (exponent + 120u) << 23 | fraction << 20);
}

/* The upper half of an f16; every NaN is quiet. */
static inline float f32_from_e5m2(uint8_t u) {
        return f32_from_f16((uint16_t) ((uint16_t) u << 8));
}

static inline float f32_from_e2m1(uint8_t nibble) {
        static const float values[16] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f,
                -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

        return values[nibble & 15u];
}

/* The row of the tensor that row r of a view is. */
static inline uint64_t quant_tensor_row(const LkMatrix *w, uint64_t r) {
        uint64_t block = r / w->block_rows;

        return w->quant.first_row + (block > 0 ? block * (w->block_stride / w->row_stride) : 0) +
               r % w->block_rows;
}

static inline float quant_row_scale(const LkMatrix *w, uint64_t r) {
        return number_get((const uint8_t *) w->quant.scale + quant_tensor_row(w, r) * w->quant.scale_stride,
                LK_F32, 0);
}

static inline float quant_block_scale(const LkQuant *q, uint64_t tensor_row, uint64_t col) {
        const uint8_t *scales = q->block_scale;
        uint64_t tile = tensor_row / 128 * (q->block_scale_cols / 4) + col / 4;

        return f32_from_e4m3(
                scales[tile * 512 + tensor_row % 32 * 16 + tensor_row % 128 / 32 * 4 + col % 4]);
}

static inline const uint8_t *quant_row(const LkMatrix *w, uint64_t r) {
        return (const uint8_t *) w->data + r / w->block_rows * w->block_stride +
               r % w->block_rows * w->row_stride;
}

static inline void quant_expand_nvfp4(const LkMatrix *w, uint64_t r, uint64_t k0, uint64_t n, float *y) {
        const uint8_t *row = quant_row(w, r);
        uint64_t tensor_row = quant_tensor_row(w, r);
        float scale = quant_row_scale(w, r), block = 0;

        for (uint64_t i = 0; i < n; i++) {
                uint64_t k = k0 + i;

                if (i == 0 || k % 16 == 0)
                        block = scale * quant_block_scale(&w->quant, tensor_row, k / 16);

                y[i] = f32_from_e2m1(k % 2 == 0 ? row[k / 2] >> 4 : row[k / 2]) * block;
        }
}

/* Columns k0 .. k0 + n - 1 of row r of a quantised matrix. k0 and n are multiples of the rotation's group.
 */
static inline void quant_expand(const LkMatrix *w, uint64_t r, uint64_t k0, uint64_t n, float *y) {
        const uint8_t *q = quant_row(w, r) + k0;
        float scale;

        if (w->type == LK_NVFP4) {
                quant_expand_nvfp4(w, r, k0, n, y);
                return;
        }

        scale = quant_row_scale(w, r);
        if (w->type == LK_I8) {
                for (uint64_t i = 0; i < n; i++)
                        y[i] = (float) (int8_t) q[i];
                rotate(y, n, w->quant.rotation);
        } else if (w->type == LK_F8_E4M3)
                for (uint64_t i = 0; i < n; i++)
                        y[i] = f32_from_e4m3(q[i]);
        else
                for (uint64_t i = 0; i < n; i++)
                        y[i] = f32_from_e5m2(q[i]);

        for (uint64_t i = 0; i < n; i++)
                y[i] = y[i] * scale;
}

/* What the columns of x would be multiplied by, of a row of w. */
static inline void quant_scale_columns(const LkMatrix *w, uint64_t k0, uint64_t n, float *y) {
        const LkVector *scale = &w->quant.in_scale;

        for (uint64_t i = 0; scale->data && i < n; i++)
                y[i] = y[i] * number_get(scale->data, scale->type, k0 + i);
}
