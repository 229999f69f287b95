/* SPDX-License-Identifier: Apache-2.0 */
#include "service/h3/layout.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>

#include "service/h3/layout-private.h"
#include "service/shared/cleanup.h"

DEFINE_CLEANUP(H3Layout *, h3_layout_free)

/* One axis of a grid: point i of numpy's linspace(left, left + extent, n, endpoint=False) x 32, in its
 * order of roundings. */
typedef struct Axis {
        double left, step;
} Axis;

typedef struct Axes {
        Axis h, w;
        uint64_t rows_h, rows_w;
} Axes;

static const double frames_of_latent[] = {1, 4, 4, 4, 4};
#define UNITS_PER_FRAME (5.0 / 3.0)

uint64_t h3_grid_rows_h(const H3Config *c, const H3Grid *g) {
        return (g->height + c->patch_h - 1) / c->patch_h;
}

uint64_t h3_grid_rows_w(const H3Config *c, const H3Grid *g) {
        return (g->width + c->patch_w - 1) / c->patch_w;
}

uint64_t h3_film_frames(uint64_t latent_frames) {
        uint64_t rest = latent_frames % 5;

        return latent_frames / 5 * 17 + (rest > 0 ? 4 * rest - 3 : 0);
}

static Axis axis_new(uint64_t length, double scale, uint64_t n) {
        double extent = (double) length / scale;
        double left = (1.0 - extent) / 2.0;

        return (Axis){.left = left, .step = ((left + extent) - left) / (double) n};
}

static double axis_point(const Axis *a, uint64_t i) {
        return ((double) i * a->step + a->left) * 32.0;
}

/* The padded grid's: a row of the padding has its place like any other. */
static Axes axes_new(const H3Config *c, const H3Grid *g) {
        uint64_t rows_h = h3_grid_rows_h(c, g), rows_w = h3_grid_rows_w(c, g);
        uint64_t height = rows_h * c->patch_h, width = rows_w * c->patch_w;
        double scale = sqrt((double) (height * width));

        return (Axes){axis_new(height, scale, rows_h), axis_new(width, scale, rows_w), rows_h, rows_w};
}

/* The next segment, which begins where the last one ended. */
static const H3Segment *segment_add(H3Layout *l, H3SegmentKind kind, int32_t condition, uint64_t n) {
        H3Segment *s = l->segments + l->n_segments;
        uint64_t begin = l->n_segments > 0 ? s[-1].end : 0;

        *s = (H3Segment){kind, begin, begin + n, condition};
        l->n_segments++;
        return s;
}

static void place_text(H3Layout *l, const uint8_t *tags) {
        const H3Segment *s = segment_add(l, H3_SEGMENT_TEXT, -1, l->shape.text_rows);

        for (uint64_t i = 0; i < s->end; i++) {
                l->position[i][0] = (double) i;
                l->tag[i] = tags ? tags[i] : 1;
        }
}

static void place_audio(H3Layout *l, int32_t condition, double origin, const Axes *a, uint64_t n) {
        uint64_t row = segment_add(l, H3_SEGMENT_AUDIO, condition, 2 * n)->begin;

        for (uint64_t channel = 0; channel < 2; channel++)
                for (uint64_t j = 0; j < n; j++, row++) {
                        l->position[row][0] = origin + (double) j;
                        l->position[row][1] = 0.0;
                        l->position[row][2] = axis_point(&a->w, channel == 0 ? 0 : a->rows_w - 1);
                        l->tag[row] = 2;
                }
}

/* Units of time that `frames` video latents take: a running sum, as published, because the order of the
 * additions is part of the value. */
static double video_span(uint64_t frames) {
        double elapsed = 0;

        for (uint64_t k = 0; k < frames; k++)
                elapsed += UNITS_PER_FRAME * frames_of_latent[k % 5];
        return elapsed;
}

static void place_video(H3Layout *l, int32_t condition, double origin, const Axes *a, uint64_t frames) {
        uint64_t row = segment_add(l, H3_SEGMENT_VIDEO, condition, frames * a->rows_h * a->rows_w)->begin;
        double elapsed = 0;

        for (uint64_t k = 0; k < frames; k++) {
                double t = origin + elapsed;

                for (uint64_t y = 0; y < a->rows_h; y++)
                        for (uint64_t x = 0; x < a->rows_w; x++, row++) {
                                l->position[row][0] = t;
                                l->position[row][1] = axis_point(&a->h, y);
                                l->position[row][2] = axis_point(&a->w, x);
                                l->tag[row] = 0;
                        }
                elapsed += UNITS_PER_FRAME * frames_of_latent[k % 5];
        }
}

/* How far a condition moves the start of what comes after it. */
static double condition_span(const H3Condition *k) {
        double sound = (double) k->audio, picture = video_span(k->grid.frames);

        switch (k->kind) {
        case H3_CONDITION_KEYFRAME:
                return 0;
        case H3_CONDITION_IMAGE:
                return 1;
        case H3_CONDITION_VIDEO:
                return picture > sound ? picture : sound;
        case H3_CONDITION_AUDIO:
                return sound;
        }
        return 0;
}

/* A keyframe sits in the target's time, on the target's grid. */
static void place_keyframe(H3Layout *l, int32_t i, double origin, const Axes *target) {
        const H3Condition *k = l->conditions + i;
        double t = origin + UNITS_PER_FRAME * (double) k->frame;

        if (k->grid.frames > 0)
                place_video(l, i, t, target, k->grid.frames);
        if (k->audio > 0)
                place_audio(l, i, t, target, k->audio);
}

static void place_reference(H3Layout *l, const H3Config *c, int32_t i, double cursor, const Axes *target) {
        const H3Condition *k = l->conditions + i;
        Axes own;

        if (k->kind == H3_CONDITION_AUDIO) { /* has no grid of its own */
                place_audio(l, i, cursor, target, k->audio);
                return;
        }
        own = axes_new(c, &k->grid);
        if (k->audio > 0)
                place_audio(l, i, cursor, &own, k->audio);
        place_video(l, i, cursor, &own, k->grid.frames);
}

static void place(H3Layout *l, const H3Config *c, const uint8_t *text_tags) {
        const H3Shape *s = &l->shape;
        H3Grid grid = h3_shape_grid(s);
        Axes target = axes_new(c, &grid);
        double cursor = (double) s->text_rows, origin = cursor;

        for (uint32_t i = 0; i < s->n_conditions; i++)
                origin += condition_span(l->conditions + i);

        place_text(l, text_tags);
        for (uint32_t i = 0; i < s->n_conditions; i++) {
                if (l->conditions[i].kind == H3_CONDITION_KEYFRAME)
                        place_keyframe(l, (int32_t) i, origin, &target);
                else
                        place_reference(l, c, (int32_t) i, cursor, &target);
                cursor += condition_span(l->conditions + i);
        }
        place_audio(l, -1, origin, &target, s->audio);
        place_video(l, -1, origin, &target, s->frames);
}

static uint32_t count_timesteps(const H3Layout *l) {
        bool visual = false, sound = false;

        for (uint32_t i = 0; i < l->shape.n_conditions; i++) {
                visual = visual || l->conditions[i].grid.frames > 0;
                sound = sound || l->conditions[i].audio > 0;
        }
        return 2 + visual + sound;
}

int h3_layout_new(
        const H3Config *c, const H3Shape *shape, const uint8_t *text_tags, H3Layout **ret, Fault *f) {
        CLEANUP(h3_layout_freep) H3Layout *l = NULL;
        uint64_t rows = 0;
        int r;

        r = h3_shape_check(c, shape, text_tags, &rows, f);
        if (r < 0)
                return r;

        l = calloc(1, sizeof(*l));
        if (l) {
                l->position = calloc(rows, sizeof(*l->position));
                l->tag = malloc(rows);
        }
        if (!l || !l->position || !l->tag)
                return fault_set(f, -ENOMEM, FAULT_DOES_NOT_FIT,
                        "No memory for the layout of %llu rows; free some and try again.",
                        (unsigned long long) rows);

        l->shape = *shape;
        for (uint32_t i = 0; i < shape->n_conditions; i++)
                l->conditions[i] = shape->conditions[i];
        l->shape.conditions = l->conditions;
        l->rows = rows;
        l->timesteps_max = count_timesteps(l);
        place(l, c, text_tags);

        *ret = STEAL_PTR(l);
        return 0;
}

H3Layout *h3_layout_free(H3Layout *l) {
        if (!l)
                return NULL;
        free(l->position);
        free(l->tag);
        free(l->level);
        free(l);
        return NULL;
}
