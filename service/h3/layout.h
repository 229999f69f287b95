/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The packed sequence of a request: which rows there are, in which order, where in time and space they sit
 * (h3.md 1.3, 1.4), how latents become rows and velocities become latents. Pure arithmetic on the host, no
 * device. */

#include <stdint.h>

#include "service/h3/model.h"
#include "service/shared/fault.h"

typedef enum H3SegmentKind {
        H3_SEGMENT_TEXT,
        H3_SEGMENT_AUDIO,
        H3_SEGMENT_VIDEO,
} H3SegmentKind;

typedef struct H3Segment {
        H3SegmentKind kind;
        uint64_t begin, end; /* rows */
} H3Segment;

#define H3_SEGMENTS_MAX 64

/* Sizes of a text-to-video request. */
typedef struct H3Shape {
        uint64_t text_rows;             /* L >= 1 */
        uint64_t frames, height, width; /* video latent T, H, W; H and W multiples of the patch */
        uint64_t audio;                 /* A, latents per stereo channel >= 1 */
} H3Shape;

typedef struct H3Layout {
        H3Shape shape;
        uint64_t rows;
        uint32_t n_segments;
        H3Segment segments[H3_SEGMENTS_MAX]; /* [text | target audio | target video] */
        double (*position)[3];               /* [rows]: t, h, w */
        uint8_t *tag;                        /* [rows]: 0 video, 1 text, 2 audio */
} H3Layout;

/* text_tags: [L] 0 (vision row) or 1 (text row); NULL: all 1. -EINVAL with InvalidTensor (what, limits),
 * -EOVERFLOW, -ENOMEM. */
int h3_layout_new(
        const H3Config *c, const H3Shape *shape, const uint8_t *text_tags, H3Layout **ret, Fault *f);
H3Layout *h3_layout_free(H3Layout *l);

/* cos and sin of the rope angles, f32, [row_end - row_begin, 3 * rope_freqs] (h3.md 1.5): angles are f32
 * products of f32 positions and inv_freq; evaluated in f64 by shared/fmath and rounded to f32, then to bf16
 * (kept in f32) if round_bf16. */
void h3_rope_table(const H3Config *c, const H3Layout *l, uint64_t row_begin, uint64_t row_end,
        bool round_bf16, float *ret_cos, float *ret_sin);

/* Video latent [C, T, H, W] <-> rows [T * H/2 * W/2, C * 4], number order (channel, ph, pw). Rows begin..end
 * of the segment. */
void h3_video_to_rows(const H3Config *c, const H3Shape *s, const float *latent, uint64_t begin, uint64_t end,
        float *ret_rows);
void h3_rows_to_video(const H3Config *c, const H3Shape *s, const float *rows, uint64_t begin, uint64_t end,
        float *ret_latent);
/* Audio latent [C, 2, A] <-> rows [2 * A, C], stereo channel 0 first. */
void h3_audio_to_rows(const H3Config *c, const H3Shape *s, const float *latent, uint64_t begin, uint64_t end,
        float *ret_rows);
void h3_rows_to_audio(const H3Config *c, const H3Shape *s, const float *rows, uint64_t begin, uint64_t end,
        float *ret_latent);
