/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Random quantised matrices, and what their numbers are by the rule of ops.h, computed naively. */

#include "tests/unit/kernels/kernels-test.h"

typedef struct QuantMatrix {
        LkMatrix w; /* rows of a view: the first of three parts of each block, or all */
        uint64_t tensor_rows;
        uint8_t *data, *block_scale;
        uint8_t *scale; /* starts one byte off */
        void *in_scale;
} QuantMatrix;

TEST_INLINE uint64_t quant_view_rows(uint64_t rows, uint64_t block_rows) {
        return block_rows > 0 ? rows / block_rows * 3 * block_rows : rows;
}

/* block_rows 0: a plain matrix, else rows is a multiple of it and the view starts at tensor row block_rows.
 */
TEST_INLINE void quant_matrix_make(LkType type, uint64_t rows, uint64_t cols, uint64_t block_rows,
        uint32_t rotation, bool row_scales, QuantMatrix *ret) {
        uint64_t seed = rows + 3 * cols + (uint64_t) type, first = block_rows;
        uint64_t row = lk_row_size(type, cols), tensor_rows = quant_view_rows(rows, block_rows) + first;
        uint64_t padded_cols = (cols / 16 + 3) / 4 * 4,
                 scales = (tensor_rows + 127) / 128 * 128 * padded_cols;

        *ret = (QuantMatrix){
                .tensor_rows = tensor_rows,
                .data = allocate(tensor_rows * row + 3),
                .scale = allocate(tensor_rows * sizeof(float) + 1),
                .block_scale = allocate(scales + 1),
        };
        for (uint64_t i = 0; i < tensor_rows * row + 3; i++) {
                uint8_t u = (uint8_t) random_u64(&seed);

                /* no NaN and no infinity, which the tests of codes look at */
                if ((type == LK_F8_E4M3 && (u & 0x7f) == 0x7f) || (type == LK_F8_E5M2 && (u & 0x7c) == 0x7c))
                        u = 0x31;
                ret->data[i] = u;
        }
        for (uint64_t i = 0; i < tensor_rows; i++)
                put(ret->scale + 1, LK_F32, i, 0.01 * (1.5 + random_normal(&seed) * 0.2));
        for (uint64_t i = 0; i < scales + 1; i++)
                ret->block_scale[i] = (uint8_t) (random_u64(&seed) % 0x7f);
        ret->w = (LkMatrix){
                .data = ret->data + 3 + first * row,
                .type = type,
                .rows = rows,
                .cols = cols,
                .row_stride = row,
                .block_rows = block_rows > 0 ? block_rows : rows,
                .block_stride = block_rows > 0 ? 3 * block_rows * row : rows * row,
                .quant = {.scale = ret->scale + 1,
                        .scale_stride = row_scales ? sizeof(float) : 0,
                        .first_row = first,
                        .rotation = rotation},
        };
        if (type == LK_NVFP4) {
                ret->w.quant.block_scale = ret->block_scale + 1;
                ret->w.quant.block_scale_cols = padded_cols;
                ret->w.quant.in_scale = (LkVector){.type = LK_BF16, .n = cols};
                ret->w.quant.in_scale.data = random_array(cols, LK_BF16, 0, 1, &seed, &ret->in_scale);
        }
}

TEST_INLINE void quant_matrix_done(QuantMatrix *m) {
        free(m->data);
        free(m->scale);
        free(m->block_scale);
        free(m->in_scale);
}

/* Any small float: sign, `exponent` bits, `fraction` bits. */
TEST_INLINE double small_float(uint8_t u, int exponent, int fraction) {
        int e = (u >> fraction) & ((1 << exponent) - 1), f = u & ((1 << fraction) - 1),
            bias = (1 << (exponent - 1)) - 1;
        double sign = u >> (exponent + fraction) & 1 ? -1 : 1;

        return sign *
               (e == 0 ? ldexp(f, 1 - bias - fraction) : ldexp((1 << fraction) + f, e - bias - fraction));
}

TEST_INLINE uint32_t digits4(uint32_t n) {
        return n <= 1 ? 0 : 1 + digits4(n / 4);
}

/* The sign of H[row][col]: each pair of bits of row and col picks from the 4 x 4 pattern. */
TEST_INLINE int hadamard(uint32_t row, uint32_t col, uint32_t group) {
        int sign = 1;

        for (uint32_t i = 0; i < digits4(group); i++, row /= 4, col /= 4)
                sign *= row % 4 + col % 4 == 3 ? -1 : 1;
        return sign;
}

/* Number (r, k) of the view: exact in double but for the f32 products that the rule names. */
TEST_INLINE float quant_number(const QuantMatrix *m, uint64_t r, uint64_t k) {
        const LkMatrix *w = &m->w;
        const LkQuant *q = &w->quant;
        uint64_t blocks = r / w->block_rows;
        uint64_t tensor_row = q->first_row + (w->block_rows < w->rows ? blocks * 3 * w->block_rows : 0) +
                              r % w->block_rows;
        const uint8_t *row = m->data + 3 + tensor_row * w->row_stride;
        float scale = (float) get(m->scale + 1, LK_F32, q->scale_stride > 0 ? tensor_row : 0);
        double sum = 0;

        if (w->type == LK_F8_E4M3)
                return (float) small_float(row[k], 4, 3) * scale;
        if (w->type == LK_F8_E5M2)
                return (float) small_float(row[k], 5, 2) * scale;
        if (w->type == LK_NVFP4) {
                uint64_t c = k / 16, tile = tensor_row / 128 * (q->block_scale_cols / 4) + c / 4;
                uint8_t code = m->block_scale[1 + tile * 512 + tensor_row % 32 * 16 +
                                              tensor_row % 128 / 32 * 4 + c % 4];
                uint8_t nibble = k % 2 ? row[k / 2] & 15 : row[k / 2] >> 4;

                return (float) small_float(nibble, 2, 1) * (scale * (float) small_float(code, 4, 3));
        }
        if (q->rotation == 0)
                return (float) (int8_t) row[k] * scale;
        for (uint32_t i = 0; i < q->rotation; i++)
                sum += hadamard(i, (uint32_t) (k % q->rotation), q->rotation) *
                       (double) (int8_t) row[k / q->rotation * q->rotation + i];
        return (float) (sum / sqrt(q->rotation)) * scale;
}
