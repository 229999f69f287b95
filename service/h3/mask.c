/* SPDX-License-Identifier: Apache-2.0 */
#include "service/h3/mask.h"

#include <errno.h>
#include <stdlib.h>

#include "service/shared/cleanup.h"

static int check_value(const char *what, uint64_t i, float m, Fault *f) {
        if (m >= 0 && m <= 1)
                return 0;
        return fault_set(f, -EINVAL, FAULT_INVALID_TENSOR,
                "%s[%llu] is %g; a mask has values from 0 (keep) to 1 (generate).", what,
                (unsigned long long) i, (double) m);
}

/* Smallest level that is not below m, in 0 to 1. The product is exact. */
static uint16_t level_of(float m) {
        float scaled = m * (float) H3_MASK_LEVELS;
        uint16_t level = (uint16_t) scaled;

        return (float) level < scaled ? level + 1 : level;
}

static float value_of(uint16_t level) {
        return (float) level / (float) H3_MASK_LEVELS;
}

/* Largest value of the patch whose first pixel is (y, x). */
static float patch_max(const H3Config *c, const H3Grid *g, const float *frame, uint64_t y, uint64_t x) {
        float largest = 0;

        for (uint64_t i = y; i < y + c->patch_h && i < g->height; i++)
                for (uint64_t j = x; j < x + c->patch_w && j < g->width; j++)
                        if (frame[i * g->width + j] > largest)
                                largest = frame[i * g->width + j];
        return largest;
}

static void patch_fill(const H3Config *c, const H3Grid *g, float *frame, uint64_t y, uint64_t x, float m) {
        for (uint64_t i = y; i < y + c->patch_h && i < g->height; i++)
                for (uint64_t j = x; j < x + c->patch_w && j < g->width; j++)
                        frame[i * g->width + j] = m;
}

int h3_mask_pool_video(const H3Config *c, const H3Grid *g, const float *mask, float *ret, Fault *f) {
        uint64_t per_frame = g->height * g->width;
        int r;

        for (uint64_t i = 0; i < g->frames * per_frame; i++) {
                r = check_value("video_mask", i, mask[i], f);
                if (r < 0)
                        return r;
        }
        for (uint64_t t = 0; t < g->frames; t++)
                for (uint64_t y = 0; y < g->height; y += c->patch_h)
                        for (uint64_t x = 0; x < g->width; x += c->patch_w)
                                patch_fill(c, g, ret + t * per_frame, y, x,
                                        value_of(level_of(patch_max(c, g, mask + t * per_frame, y, x))));
        return 0;
}

int h3_mask_pool_audio(uint64_t channels, uint64_t n_audio, const float *mask, float *ret, Fault *f) {
        uint64_t n = 2 * n_audio;
        int r;

        for (uint64_t i = 0; i < channels * n; i++) {
                r = check_value("audio_mask", i, mask[i], f);
                if (r < 0)
                        return r;
        }
        for (uint64_t i = 0; i < n; i++) {
                float largest = 0;

                for (uint64_t channel = 0; channel < channels; channel++)
                        if (mask[channel * n + i] > largest)
                                largest = mask[channel * n + i];
                ret[i] = value_of(level_of(largest));
        }
        return 0;
}

void h3_mask_mix(
        const float *mask, uint64_t n_mask, const float *x, const float *kept, uint64_t n, float *ret) {
        for (uint64_t begin = 0; begin < n; begin += n_mask)
                for (uint64_t i = 0; i < n_mask; i++) {
                        float m = mask[i];

                        ret[begin + i] = m * x[begin + i] + (1.0f - m) * kept[begin + i];
                }
}

/* Levels of the target's rows from pooled masks. */
static void set_levels(
        const H3Layout *l, const H3Config *c, const float *video, const float *audio, uint16_t *level) {
        H3Grid g = h3_shape_grid(&l->shape);
        uint64_t row = h3_layout_audio(l)->begin;

        for (uint64_t i = 0; i < l->rows; i++)
                level[i] = H3_MASK_LEVELS;
        for (uint64_t i = 0; audio && i < 2 * l->shape.audio; i++)
                level[row + i] = level_of(audio[i]);

        row = h3_layout_video(l)->begin;
        for (uint64_t t = 0; video && t < g.frames; t++)
                for (uint64_t y = 0; y < g.height; y += c->patch_h)
                        for (uint64_t x = 0; x < g.width; x += c->patch_w)
                                level[row++] = level_of(video[(t * g.height + y) * g.width + x]);
}

/* Distinct levels below "generate": each may have a timestep of its own. */
static uint32_t count_levels(const uint16_t *level, const H3Segment *s) {
        bool seen[H3_MASK_LEVELS + 1] = {};
        uint32_t n = 0;

        for (uint64_t i = s->begin; i < s->end; i++)
                if (level[i] < H3_MASK_LEVELS && !seen[level[i]]) {
                        seen[level[i]] = true;
                        n++;
                }
        return n;
}

static int pool(const H3Layout *l, const H3Config *c, const float *video_mask, const float *audio_mask,
        float *ret_video, float *ret_audio, Fault *f) {
        H3Grid g = h3_shape_grid(&l->shape);
        int r = 0;

        if (video_mask)
                r = h3_mask_pool_video(c, &g, video_mask, ret_video, f);
        if (r >= 0 && audio_mask)
                r = h3_mask_pool_audio(1, l->shape.audio, audio_mask, ret_audio, f);
        return r;
}

int h3_layout_set_masks(
        H3Layout *l, const H3Config *c, const float *video_mask, const float *audio_mask, Fault *f) {
        const H3Shape *s = &l->shape;
        CLEANUP_FREE float *video = malloc(s->frames * s->height * s->width * sizeof(float));
        CLEANUP_FREE float *audio = malloc(2 * s->audio * sizeof(float));
        CLEANUP_FREE uint16_t *level = malloc(l->rows * sizeof(*level));
        uint32_t before = 0, n;
        int r;

        if (!video || !audio || !level)
                return fault_set(f, -ENOMEM, FAULT_DOES_NOT_FIT,
                        "No memory for the masks of %llu rows; free some and try again.",
                        (unsigned long long) l->rows);
        r = pool(l, c, video_mask, audio_mask, video, audio, f);
        if (r < 0)
                return r;

        set_levels(l, c, video_mask ? video : NULL, audio_mask ? audio : NULL, level);
        if (l->level)
                before = count_levels(l->level, h3_layout_audio(l)) +
                         count_levels(l->level, h3_layout_video(l));
        n = count_levels(level, h3_layout_audio(l)) + count_levels(level, h3_layout_video(l));
        l->timesteps_max += n - before;
        free(l->level);
        l->level = n > 0 ? STEAL_PTR(level) : NULL;
        return 0;
}
