/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* A box of a convolution's output, from operands that conv.cu has laid out. */

#include "kernels/cuda/context.cuh"

#define CONV_COLUMNS 128u /* w's columns are filled up to a multiple of it */

/* Positions of y, and what of the padded x lies under the largest box of the cut. */
typedef struct Box {
        uint64_t first[3];
        uint32_t size[3], width[3];
} Box;

typedef struct ConvBox {
        Box box;
        uint32_t stride[3];
        uint64_t y_size[3];
        const float *planes; /* [channels, plane], fewer than 2^31 elements */
        uint32_t plane;
        const float *w; /* [k up to a multiple of 32, w_ld]: columns of y from `begin` on */
        uint64_t w_ld;
        const int32_t *offsets; /* [k up to a multiple of 32] */
        uint64_t k;
        uint64_t begin;
        uint32_t n;
        LkVector bias; /* of all columns; may be absent */
        float *y;
        uint64_t y_ld;
} ConvBox;

int conv_f32(LkContext *c, const ConvBox *b);
