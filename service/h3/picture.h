/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Pictures for the vision tower (h3.md 3.3): the size at which it sees a picture, the resize, the patches.
 * Pictures are u8 [height, width, 3], rows contiguous. Pure arithmetic on the host: the same bits anywhere.
 */

#include <stdint.h>

#include "service/h3/model.h"
#include "service/shared/fault.h"

#define H3_PATCH 16           /* pixels, both ways */
#define H3_PATCH_MERGE 2      /* patches per token, both ways */
#define H3_PATCH_PIXELS 32    /* H3_PATCH * H3_PATCH_MERGE: edges are multiples of it */
#define H3_PATCH_NUMBERS 1536 /* channel 3, time 2, 16, 16 */
#define H3_PICTURE_EDGE_MAX UINT64_C(65536)
#define H3_PICTURE_ASPECT_MAX UINT64_C(200)
#define H3_PICTURE_PIXELS_MAX (UINT64_C(1) << 30) /* of a picture, or of a video's sampled frames */

typedef enum H3Filter {
        H3_FILTER_BICUBIC, /* a = -0.5, wider when it shrinks (antialias), columns first, rounded to u8 after
                              each pass: torchvision on u8, which the published processor uses */
        H3_FILTER_BILINEAR, /* the four neighbours in f32, not wider, not rounded: ComfyUI */
} H3Filter;

/* How a processor makes pictures; all numbers above 0 except where said. */
typedef struct H3PictureRules {
        H3Filter filter;
        uint64_t image_min, image_max; /* pixels */
        uint64_t video_min, video_max; /* pixels of all sampled frames together; 0, 0: each pair of frames is
                                          sized as an image is */
} H3PictureRules;

extern const H3PictureRules h3_picture_published; /* Qwen3-VL's processors, as released with H3 */
extern const H3PictureRules h3_picture_comfy;     /* ComfyUI's */

/* The published rules with the limits that the files preprocessor_config.json (images) and
 * video_preprocessor_config.json (videos) give: size.shortest_edge and size.longest_edge, or min_pixels and
 * max_pixels; each file may be absent, and others are ignored. -EBADMSG (InvalidFile): not JSON, or no number
 * of pixels; -ENOTSUP (NotSupported): another patch, mean, deviation or filter, by its name; -ENOMEM. */
int h3_picture_rules_read(const H3File *files, size_t n_files, H3PictureRules *ret, Fault *f);

typedef struct H3PictureSize {
        uint64_t height, width; /* pixels, multiples of H3_PATCH_PIXELS */
} H3PictureSize;

/* The size at which a picture (frames 0) or a video of so many sampled frames (before an odd one is shown
 * twice) is presented: each edge to the nearest multiple of 32, ties to the even one, and if that breaks a
 * limit both edges by one factor. -EINVAL (InvalidArgument): an edge is 0 or above H3_PICTURE_EDGE_MAX, or
 * one is over H3_PICTURE_ASPECT_MAX times the other (the published processor refuses that too). */
int h3_picture_size(const H3PictureRules *rules, uint64_t frames, uint64_t height, uint64_t width,
        H3PictureSize *ret, Fault *f);

/* Resizes by H3_FILTER_BICUBIC. ret: [to.height, to.width, 3]. Time: pixels in and out, and 4 steps per
 * pixel of the larger side. -EINVAL: an edge is 0 or too large; -ENOMEM. */
int h3_picture_resize(const uint8_t *rgb, uint64_t height, uint64_t width, H3PictureSize to, uint8_t *ret);

/* One picture (second NULL: it fills both slots of time) or two frames of one size, resized to `to` by the
 * rules' filter, as f32 [to.height / 16 * to.width / 16, H3_PATCH_NUMBERS]. A row is one patch, ordered
 * (channel, time, y, x), of numbers (u8 - 127.5) / 127.5; rows go by (token row, token column, patch row in
 * it, patch column in it), so that four rows are one token. -EINVAL: an edge is 0, too large or, of `to`, no
 * multiple of 32; -ENOMEM. */
int h3_picture_patches(const H3PictureRules *rules, const uint8_t *first, const uint8_t *second,
        uint64_t height, uint64_t width, H3PictureSize to, float *ret);
