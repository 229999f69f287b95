/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* What the tests of the video VAE share: the tiny model of tests/data/vae/video in both layouts, whole clips
 * on one rank, and the published numbers in their own order. Everything fails the test that asks for
 * something that is not there. */

#include <jansson.h>

#include "service/h3/video-vae.h"
#include "tests/unit/h3/checkpoint.h"
#include "tests/unit/h3/golden.h"

typedef struct Video {
        H3VideoVae *vae;
        Checkpoint *checkpoint;
        uint8_t *bytes;     /* of the file; the model views it */
        uint8_t *parts[64]; /* matrices made for another layout */
        size_t n_parts;
} Video;

Video *video_open(void); /* original names */
/* The same numbers under diffusers names: the data's own file if there is one, else made from the other. */
Video *video_open_diffusers(void);
Video *video_free(Video *v);
void video_freep(Video **v);

/* The checkpoint in original names and its config.json, freed by the caller. */
Checkpoint *video_checkpoint(void);
char *video_config(void);
/* Renames the tensors to diffusers' and splits or swaps what it keeps otherwise; new data goes to v->parts.
 */
void video_to_diffusers(Video *v, uint32_t head_dim);

/* Opens what a checkpoint holds. *ret_bytes is freed by the caller after the model. config NULL: none. */
int video_try_open(const Checkpoint *c, const char *config, uint8_t **ret_bytes, H3VideoVae **ret, Fault *f);

bool video_data_has(const char *name); /* a file of the test data */

/* A rank of the CPU backend with its own threads; rank->context is freed by ops->context_free(). */
H3Rank video_rank(uint32_t threads);

/* All raw tiles, [jobs] arrays, freed by video_tiles_free(). hooks get job 0 only. */
float **video_decode_all(
        const H3VideoVae *m, const H3VideoDecodePlan *p, const float *z, const H3StepHooks *hooks);
float **video_encode_all(const H3VideoVae *m, const H3VideoEncodePlan *p, H3Pixels pixels,
        const void *frames, const H3StepHooks *hooks);
void video_tiles_free(float **tiles, uint64_t n);

/* All frames, [frames, height, width, 3], freed by the caller. band: rows that are blended at a time. */
void *video_blend_all(const H3VideoDecodePlan *p, float **tiles, H3Pixels pixels, uint32_t band);
float *video_moments_all(const H3VideoVae *m, const H3VideoEncodePlan *p, float **tiles);

/* Stages that a run offered. */
typedef struct VideoTap {
        char name[40];
        float *values;
        uint64_t rows, columns;
} VideoTap;

typedef struct VideoTaps {
        VideoTap taps[64];
        size_t n;
} VideoTaps;

void video_tap_record(
        void *userdata, const char *name, const float *values, uint64_t rows, uint64_t columns);
void video_taps_free(VideoTaps *t);

/* index.json, and a case's tiling. */
json_t *video_index(void);
H3VideoTiling video_case_tiling(const json_t *c);
uint64_t video_case_number(const json_t *c, const char *key, uint64_t otherwise);

/* Tensor `name` of the case against got, which is in the published order. largest_max 0: not looked at. */
void video_check(
        const Golden *g, const char *name, const float *got, uint64_t n, double rel_max, double largest_max);

bool video_has(const Golden *g, const char *name);

/* [rows, columns] as [columns, rows]; freed by the caller. */
float *video_transposed(const float *x, uint64_t rows, uint64_t columns);
