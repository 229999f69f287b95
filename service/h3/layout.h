/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The packed sequence of a request: which rows there are, in which order, where in time and space they sit
 * (h3.md 1.3, 1.4), how latents become rows and velocities become latents. Pure arithmetic on the host, no
 * device.
 *
 * Order of the rows: text, then the conditions in the order given, then the target's audio, then its video.
 * A keyframe's video rows come before its audio rows, a reference video's after them. */

#include <stdbool.h>
#include <stdint.h>

#include "service/h3/model.h"
#include "service/shared/fault.h"

/* A video latent's T, H, W. H and W that the patch does not divide are padded in the rows: the latent goes
 * round, column W is column 0 again, and what the model says about the padding is dropped (as ComfyUI does).
 */
typedef struct H3Grid {
        uint64_t frames, height, width;
} H3Grid;

typedef enum H3ConditionKind {
        H3_CONDITION_KEYFRAME, /* a picture, a clip, a sound or both, at `frame` of the film to make */
        H3_CONDITION_IMAGE,    /* reference picture */
        H3_CONDITION_VIDEO,    /* reference video, with or without sound */
        H3_CONDITION_AUDIO,    /* reference sound */
} H3ConditionKind;

typedef struct H3Condition {
        H3ConditionKind kind;
        uint64_t frame; /* KEYFRAME: pixel frame of the film, from 0 */
        H3Grid grid;    /* frames 0: no picture. KEYFRAME: height and width of the target. IMAGE: 1 frame */
        uint64_t audio; /* latents per stereo channel; 0: no sound */
} H3Condition;

#define H3_CONDITIONS_MAX 30

typedef enum H3SegmentKind {
        H3_SEGMENT_TEXT,
        H3_SEGMENT_AUDIO,
        H3_SEGMENT_VIDEO,
} H3SegmentKind;

typedef struct H3Segment {
        H3SegmentKind kind;
        uint64_t begin, end; /* rows */
        int32_t condition;   /* whose rows they are; -1: the text or the target */
} H3Segment;

#define H3_SEGMENTS_MAX (3 + 2 * H3_CONDITIONS_MAX)

/* Sizes of a request. */
typedef struct H3Shape {
        uint64_t text_rows;             /* L >= 1 */
        uint64_t frames, height, width; /* video latent T, H, W */
        uint64_t audio;                 /* A, latents per stereo channel >= 1 */
        uint32_t n_conditions;
        const H3Condition *conditions;
} H3Shape;

/* Levels of a denoise mask: H3_MASK_LEVELS is "generate", 0 is "keep". */
#define H3_MASK_LEVELS 256

typedef struct H3Layout {
        H3Shape shape; /* its conditions point to the layout's own copy */
        H3Condition conditions[H3_CONDITIONS_MAX];
        uint64_t rows;
        uint32_t n_segments;
        H3Segment segments[H3_SEGMENTS_MAX]; /* [text | conditions | target audio | target video] */
        double (*position)[3];               /* [rows]: t, h, w */
        uint8_t *tag;                        /* [rows]: 0 video, 1 text, 2 audio */
        uint16_t *level;        /* [rows]: denoise mask, H3_MASK_LEVELS outside the target; NULL: no mask */
        uint32_t timesteps_max; /* distinct timesteps that a step of it can have */
} H3Layout;

/* text_tags: [L] 0 (vision row) or 1 (text row); NULL: all 1. Everything is copied. -EINVAL with
 * InvalidTensor (what, limits), -EOVERFLOW, -ENOMEM. */
int h3_layout_new(
        const H3Config *c, const H3Shape *shape, const uint8_t *text_tags, H3Layout **ret, Fault *f);
H3Layout *h3_layout_free(H3Layout *l);

/* Denoise masks (h3.md 1.11), 1 = generate: video [T, H, W], audio [2, A], either may be NULL (generate
 * everything). They are pooled here (mask.h); pooling twice is the same as once. Masks that generate
 * everything are as none. -EINVAL with InvalidTensor, -ENOMEM; then the layout is as before. */
int h3_layout_set_masks(
        H3Layout *l, const H3Config *c, const float *video_mask, const float *audio_mask, Fault *f);

static inline const H3Segment *h3_layout_audio(const H3Layout *l) {
        return l->segments + l->n_segments - 2;
}

static inline const H3Segment *h3_layout_video(const H3Layout *l) {
        return l->segments + l->n_segments - 1;
}

static inline H3Grid h3_shape_grid(const H3Shape *s) {
        return (H3Grid){s->frames, s->height, s->width};
}

/* Rows of one latent frame: patches, the padded ones included. */
uint64_t h3_grid_rows_h(const H3Config *c, const H3Grid *g);
uint64_t h3_grid_rows_w(const H3Config *c, const H3Grid *g);

/* Pixel frames of T video latents: 1, 4, 4, 4, 4 and again. 17 k + 5 for T = 5 k + 2. */
uint64_t h3_film_frames(uint64_t latent_frames);

/* cos and sin of the rope angles, f32, [row_end - row_begin, 3 * rope_freqs] (h3.md 1.5): angles are f32
 * products of f32 positions and inv_freq; evaluated in f64 by shared/fmath and rounded to f32, then to bf16
 * (kept in f32) if round_bf16. order: row i is row order[i] of the layout; NULL: i. */
void h3_rope_table(const H3Config *c, const H3Layout *l, const uint64_t *order, uint64_t row_begin, uint64_t row_end,
        bool round_bf16, float *ret_cos, float *ret_sin);

/* Video latent [C, T, H, W] <-> rows [T * rows_h * rows_w, C * 4], number order (channel, ph, pw). Rows
 * begin..end of the grid; `rows` is the first of them. */
void h3_video_to_rows(const H3Config *c, const H3Grid *g, const float *latent, uint64_t begin, uint64_t end,
        float *ret_rows);
void h3_rows_to_video(const H3Config *c, const H3Grid *g, const float *rows, uint64_t begin, uint64_t end,
        float *ret_latent);
/* Audio latent [C, 2, A] <-> rows [2 * A, C], stereo channel 0 first. */
void h3_audio_to_rows(const H3Config *c, uint64_t n_audio, const float *latent, uint64_t begin, uint64_t end,
        float *ret_rows);
void h3_rows_to_audio(const H3Config *c, uint64_t n_audio, const float *rows, uint64_t begin, uint64_t end,
        float *ret_latent);
