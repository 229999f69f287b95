/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Pictures for the vision tower (h3.md 3.3): the size at which it sees a picture, the resize, the patches.
 * Pictures are u8 [height, width, 3], rows contiguous. */

#include <stdbool.h>
#include <stdint.h>

#include "service/shared/fault.h"

#define H3_PATCH 16          /* pixels, both ways */
#define H3_PATCH_MERGE 2     /* patches per token, both ways */
#define H3_PATCH_PIXELS 32   /* H3_PATCH * H3_PATCH_MERGE: edges are multiples of it */
#define H3_PATCH_NUMBERS 1536 /* channel 3, time 2, 16, 16 */
#define H3_PICTURE_EDGE_MAX UINT64_C(65536)

typedef enum H3Filter {
        /* a = -0.5, wider when shrinking (antialias); columns first, rounded to u8 after each pass. torchvision
         * on u8, the published processor */
        H3_FILTER_BICUBIC,
        /* the four neighbours, no antialias, not rounded: ComfyUI */
        H3_FILTER_BILINEAR,
} H3Filter;

/* How a processor makes pictures. Limits count pixels of height * width (of videos: see below). */
typedef struct H3PictureRules {
        H3Filter filter;
        uint64_t image_min, image_max;
        /* Videos: limits of frames (rounded to even) * height * width, edges under 32 are scaled up first;
         * 0, 0: each pair of frames is sized as an image is. */
        uint64_t video_min, video_max;
} H3PictureRules;

extern const H3PictureRules h3_picture_published; /* Qwen3-VL's processors, as released with H3 */
extern const H3PictureRules h3_picture_comfy;     /* ComfyUI's */

typedef struct H3PictureSize {
        uint64_t height, width; /* pixels, multiples of H3_PATCH_PIXELS */
} H3PictureSize;

/* The size at which a picture (frames = 0) or the sampled frames (>= 2) of a video are presented. -EINVAL
 * (InvalidArgument): an edge is 0 or above H3_PICTURE_EDGE_MAX, its aspect is over 200:1 as the published
 * processor has it, or so many frames that none is left. */
int h3_picture_size(const H3PictureRules *rules, uint64_t frames, uint64_t height, uint64_t width,
        H3PictureSize *ret, Fault *f);

/* Resizes by H3_FILTER_BICUBIC. ret: [to.height, to.width, 3]. Equal sizes: a copy. -EINVAL, -ENOMEM. */
int h3_picture_resize(const uint8_t *rgb, uint64_t height, uint64_t width, H3PictureSize to, uint8_t *ret);

/* One picture (second NULL: it fills both slots of time) or two frames of one size, resized to `to` by the
 * rules' filter, as patches f32 [to.height / 16 * to.width / 16, H3_PATCH_NUMBERS]: numbers (x - 127.5) /
 * 127.5 ordered (channel, time, row, column), patches (block row, block column, row in block, column in
 * block), so that four in a row are one token. -EINVAL, -ENOMEM. */
int h3_picture_patches(const H3PictureRules *rules, const uint8_t *first, const uint8_t *second, uint64_t height,
        uint64_t width, H3PictureSize to, float *ret);
