/* SPDX-License-Identifier: Apache-2.0 */
#include "service/h3/layout.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>

#include "service/shared/cleanup.h"

DEFINE_CLEANUP(H3Layout *, h3_layout_free)

/* Sizes stay so small that rows x (any width of a model) x 4 bytes cannot overflow 64 bits, nor a row
 * index 32. */
#define AXIS_MAX (1u << 20)
#define ROWS_MAX (1u << 24)

static int check_axis(const char *what, uint64_t n, uint64_t multiple, Fault *f) {
        if (n >= multiple && n <= AXIS_MAX && n % multiple == 0)
                return 0;
        if (multiple == 1)
                return fault_set(f, -EINVAL, FAULT_INVALID_TENSOR, "%s is %llu; expected 1 to %u.", what,
                        (unsigned long long) n, AXIS_MAX);
        return fault_set(f, -EINVAL, FAULT_INVALID_TENSOR,
                "%s is %llu; expected a multiple of %llu (the patch) up to %u. Pad or crop the latent.",
                what, (unsigned long long) n, (unsigned long long) multiple, AXIS_MAX);
}

static int check_shape(const H3Config *c, const H3Shape *s, Fault *f) {
        int r;

        r = check_axis("The number of text rows", s->text_rows, 1, f);
        if (r >= 0)
                r = check_axis("The video latent's frame count T", s->frames, 1, f);
        if (r >= 0)
                r = check_axis("The video latent's height H", s->height, c->patch_h, f);
        if (r >= 0)
                r = check_axis("The video latent's width W", s->width, c->patch_w, f);
        if (r >= 0)
                r = check_axis("The number of audio latents A", s->audio, 1, f);
        return r;
}

static int count_rows(const H3Config *c, const H3Shape *s, uint64_t *ret, Fault *f) {
        uint64_t grid = (s->height / c->patch_h) * (s->width / c->patch_w); /* at most 2^40 */
        uint64_t rows;

        if (__builtin_mul_overflow(grid, s->frames, &rows) ||
                __builtin_add_overflow(rows, s->text_rows + 2 * s->audio, &rows) || rows > ROWS_MAX)
                return fault_set(f, -EOVERFLOW, FAULT_INVALID_TENSOR,
                        "The request needs more than %u rows (text %llu, audio 2 x %llu, video %llu x %llu "
                        "x %llu); "
                        "make the film shorter or smaller.",
                        ROWS_MAX, (unsigned long long) s->text_rows, (unsigned long long) s->audio,
                        (unsigned long long) s->frames, (unsigned long long) (s->height / c->patch_h),
                        (unsigned long long) (s->width / c->patch_w));
        *ret = rows;
        return 0;
}

/* One axis of the grid: point i of numpy's linspace(left, left + extent, n, endpoint=False) x 32, in its
 * order of roundings. */
typedef struct Axis {
        double left, step;
} Axis;

static Axis axis_new(uint64_t length, double scale, uint64_t n) {
        double extent = (double) length / scale;
        double left = (1.0 - extent) / 2.0;

        return (Axis){.left = left, .step = ((left + extent) - left) / (double) n};
}

static double axis_point(const Axis *a, uint64_t i) {
        return ((double) i * a->step + a->left) * 32.0;
}

static void place_audio(H3Layout *l, uint64_t row, double origin, const Axis *w, uint64_t last_w) {
        for (uint64_t channel = 0; channel < 2; channel++)
                for (uint64_t j = 0; j < l->shape.audio; j++, row++) {
                        l->position[row][0] = origin + (double) j;
                        l->position[row][1] = 0.0;
                        l->position[row][2] = axis_point(w, channel == 0 ? 0 : last_w);
                        l->tag[row] = 2;
                }
}

static void place_video(H3Layout *l, uint64_t row, double origin, const Axis *h, uint64_t rows_h,
        const Axis *w, uint64_t rows_w) {
        static const double frames_of_latent[] = {1, 4, 4, 4, 4};
        double elapsed =
                0; /* a running sum, as published: the order of the additions is part of the value */

        for (uint64_t k = 0; k < l->shape.frames; k++) {
                double t = origin + elapsed;

                for (uint64_t y = 0; y < rows_h; y++)
                        for (uint64_t x = 0; x < rows_w; x++, row++) {
                                l->position[row][0] = t;
                                l->position[row][1] = axis_point(h, y);
                                l->position[row][2] = axis_point(w, x);
                                l->tag[row] = 0;
                        }
                elapsed += 5.0 / 3.0 * frames_of_latent[k % 5];
        }
}

static void place(H3Layout *l, const H3Config *c, const uint8_t *text_tags) {
        const H3Shape *s = &l->shape;
        uint64_t rows_h = s->height / c->patch_h, rows_w = s->width / c->patch_w;
        double scale = sqrt((double) (s->height * s->width)), origin = (double) s->text_rows;
        Axis h = axis_new(s->height, scale, rows_h), w = axis_new(s->width, scale, rows_w);

        for (uint64_t i = 0; i < s->text_rows; i++) {
                l->position[i][0] = (double) i;
                l->tag[i] = text_tags ? text_tags[i] : 1;
        }
        place_audio(l, l->segments[1].begin, origin, &w, rows_w - 1);
        place_video(l, l->segments[2].begin, origin, &h, rows_h, &w, rows_w);
}

int h3_layout_new(
        const H3Config *c, const H3Shape *shape, const uint8_t *text_tags, H3Layout **ret, Fault *f) {
        CLEANUP(h3_layout_freep) H3Layout *l = NULL;
        uint64_t rows = 0, video, audio;
        int r;

        r = check_shape(c, shape, f);
        if (r < 0)
                return r;
        r = count_rows(c, shape, &rows, f);
        if (r < 0)
                return r;
        for (uint64_t i = 0; text_tags && i < shape->text_rows; i++)
                if (text_tags[i] > 1)
                        return fault_set(f, -EINVAL, FAULT_INVALID_TENSOR,
                                "text_tags[%llu] is %u; expected 0 (vision row) or 1 (text row).",
                                (unsigned long long) i, text_tags[i]);

        l = calloc(1, sizeof(*l));
        if (l) {
                l->position = calloc(rows, sizeof(*l->position));
                l->tag = malloc(rows);
        }
        if (!l || !l->position || !l->tag)
                return fault_set(f, -ENOMEM, FAULT_DOES_NOT_FIT,
                        "No memory for the layout of %llu rows; free some and try again.",
                        (unsigned long long) rows);

        audio = shape->text_rows;
        video = audio + 2 * shape->audio;
        l->shape = *shape;
        l->rows = rows;
        l->n_segments = 3;
        l->segments[0] = (H3Segment){H3_SEGMENT_TEXT, 0, audio};
        l->segments[1] = (H3Segment){H3_SEGMENT_AUDIO, audio, video};
        l->segments[2] = (H3Segment){H3_SEGMENT_VIDEO, video, rows};
        place(l, c, text_tags);

        *ret = STEAL_PTR(l);
        return 0;
}

H3Layout *h3_layout_free(H3Layout *l) {
        if (!l)
                return NULL;
        free(l->position);
        free(l->tag);
        free(l);
        return NULL;
}

/* Where a row of the video segment sits in the patch grid. */
typedef struct VideoPlace {
        uint64_t frame, y, x;
} VideoPlace;

static VideoPlace video_place(const H3Config *c, const H3Shape *s, uint64_t row) {
        uint64_t w = s->width / c->patch_w, per_frame = (s->height / c->patch_h) * w;

        return (VideoPlace){row / per_frame, row % per_frame / w, row % w};
}

/* Index of number (channel, ph, pw) of a row in [C, T, H, W]. */
static uint64_t video_at(const H3Config *c, const H3Shape *s, const VideoPlace *p, uint64_t channel,
        uint64_t ph, uint64_t pw) {
        uint64_t y = p->y * c->patch_h + ph, x = p->x * c->patch_w + pw;

        return ((channel * s->frames + p->frame) * s->height + y) * s->width + x;
}

void h3_video_to_rows(const H3Config *c, const H3Shape *s, const float *latent, uint64_t begin, uint64_t end,
        float *ret_rows) {
        for (uint64_t row = begin; row < end; row++) {
                VideoPlace p = video_place(c, s, row);

                for (uint64_t channel = 0; channel < c->video_channels; channel++)
                        for (uint64_t ph = 0; ph < c->patch_h; ph++)
                                for (uint64_t pw = 0; pw < c->patch_w; pw++)
                                        *ret_rows++ = latent[video_at(c, s, &p, channel, ph, pw)];
        }
}

void h3_rows_to_video(const H3Config *c, const H3Shape *s, const float *rows, uint64_t begin, uint64_t end,
        float *ret_latent) {
        for (uint64_t row = begin; row < end; row++) {
                VideoPlace p = video_place(c, s, row);

                for (uint64_t channel = 0; channel < c->video_channels; channel++)
                        for (uint64_t ph = 0; ph < c->patch_h; ph++)
                                for (uint64_t pw = 0; pw < c->patch_w; pw++)
                                        ret_latent[video_at(c, s, &p, channel, ph, pw)] = *rows++;
        }
}

void h3_audio_to_rows(const H3Config *c, const H3Shape *s, const float *latent, uint64_t begin, uint64_t end,
        float *ret_rows) {
        for (uint64_t row = begin; row < end; row++)
                for (uint64_t channel = 0; channel < c->audio_channels; channel++)
                        *ret_rows++ = latent[channel * 2 * s->audio + row];
}

void h3_rows_to_audio(const H3Config *c, const H3Shape *s, const float *rows, uint64_t begin, uint64_t end,
        float *ret_latent) {
        for (uint64_t row = begin; row < end; row++)
                for (uint64_t channel = 0; channel < c->audio_channels; channel++)
                        ret_latent[channel * 2 * s->audio + row] = *rows++;
}
