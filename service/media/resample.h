/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Lanczos resizing of U8 RGB pictures as PIL's Image.resize(LANCZOS) has it: support 3 source pixels (times
 the scale when a picture
 * shrinks), the row pass first and rounded to 8 bits, then the column pass,
         weights of 22 bits. Pure arithmetic: the same bits everywhere. */

#include <stdint.h>

/* A part of the resized picture. */
typedef struct ResampleCrop {
        uint32_t x, y, width, height;
} ResampleCrop;

/* from: [from_height, from_width, 3]. Makes the picture that resizing it to to_width x to_height gives, of
 * which `crop` (inside of it) is written to `to`, [crop.height, crop.width, 3]. All sizes from 1 to 2^16.
 * -EINVAL, -ENOMEM: `to` untouched. */
int resample_rgb(const uint8_t *from, uint32_t from_width, uint32_t from_height, uint32_t to_width,
        uint32_t to_height, const ResampleCrop *crop, uint8_t *to);
