/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdio.h>

#include "service/h3/layout-private.h"

/* Sizes stay so small that rows x (any width of a model) x 4 bytes cannot overflow 64 bits, nor a row
 * index 32. */
#define AXIS_MAX (1u << 20)
#define ROWS_MAX (1u << 24)

static int check_axis(const char *whose, const char *what, uint64_t n, Fault *f) {
        if (n >= 1 && n <= AXIS_MAX)
                return 0;
        return fault_set(f, -EINVAL, FAULT_INVALID_TENSOR, "%s %s is %llu; expected 1 to %u.", whose, what,
                (unsigned long long) n, AXIS_MAX);
}

static int check_grid(const char *whose, const H3Grid *g, Fault *f) {
        int r;

        r = check_axis(whose, "frame count T", g->frames, f);
        if (r >= 0)
                r = check_axis(whose, "height H", g->height, f);
        if (r >= 0)
                r = check_axis(whose, "width W", g->width, f);
        return r;
}

static int check_keyframe(const H3Shape *s, const H3Condition *k, const char *whose, Fault *f) {
        uint64_t film = h3_film_frames(s->frames);

        if (k->frame >= film)
                return fault_set(f, -EINVAL, FAULT_INVALID_TENSOR,
                        "%s frame is %llu; the film has frames 0 to %llu.", whose,
                        (unsigned long long) k->frame, (unsigned long long) (film - 1));
        if (k->grid.frames == 0 && k->audio == 0)
                return fault_set(f, -EINVAL, FAULT_INVALID_TENSOR,
                        "%s latent is missing: a keyframe has a video latent, an audio latent or both.",
                        whose);
        if (k->grid.frames > 0 && (k->grid.height != s->height || k->grid.width != s->width))
                return fault_set(f, -EINVAL, FAULT_INVALID_TENSOR,
                        "%s video latent is %llu x %llu; a keyframe has the film's height and width, %llu x "
                        "%llu.",
                        whose, (unsigned long long) k->grid.height, (unsigned long long) k->grid.width,
                        (unsigned long long) s->height, (unsigned long long) s->width);
        return 0;
}

/* Which latents a kind has; sizes are checked after it. */
static int check_kind(const H3Shape *s, const H3Condition *k, const char *whose, Fault *f) {
        switch (k->kind) {
        case H3_CONDITION_KEYFRAME:
                return check_keyframe(s, k, whose, f);
        case H3_CONDITION_IMAGE:
                if (k->grid.frames == 1 && k->audio == 0)
                        return 0;
                return fault_set(f, -EINVAL, FAULT_INVALID_TENSOR,
                        "%s image has a video latent of %llu frames and %llu audio latents; expected 1 and "
                        "0.",
                        whose, (unsigned long long) k->grid.frames, (unsigned long long) k->audio);
        case H3_CONDITION_VIDEO:
                if (k->grid.frames > 0)
                        return 0;
                return fault_set(f, -EINVAL, FAULT_INVALID_TENSOR,
                        "%s video has no video latent; sound alone is of kind audio.", whose);
        case H3_CONDITION_AUDIO:
                if (k->grid.frames == 0 && k->audio > 0)
                        return 0;
                return fault_set(f, -EINVAL, FAULT_INVALID_TENSOR,
                        "%s sound has a video latent of %llu frames and %llu audio latents; expected none "
                        "and at least 1.",
                        whose, (unsigned long long) k->grid.frames, (unsigned long long) k->audio);
        }
        return fault_set(f, -EINVAL, FAULT_INVALID_TENSOR,
                "%s kind is number %d; expected keyframe, image, video or audio.", whose, (int) k->kind);
}

static int check_condition(const H3Shape *s, uint32_t i, Fault *f) {
        const H3Condition *k = s->conditions + i;
        char whose[32];
        int r;

        (void) snprintf(whose, sizeof(whose), "Condition %u's", i);
        r = check_kind(s, k, whose, f);
        if (r >= 0 && k->grid.frames > 0)
                r = check_grid(whose, &k->grid, f);
        if (r >= 0 && k->audio > 0)
                r = check_axis(whose, "number of audio latents A", k->audio, f);
        return r;
}

static int check_sizes(const H3Shape *s, Fault *f) {
        H3Grid grid = h3_shape_grid(s);
        int r;

        r = check_axis("The", "number of text rows", s->text_rows, f);
        if (r >= 0)
                r = check_grid("The video latent's", &grid, f);
        if (r >= 0)
                r = check_axis("The", "number of audio latents A", s->audio, f);
        if (r < 0)
                return r;

        if (s->n_conditions > H3_CONDITIONS_MAX)
                return fault_set(f, -EINVAL, FAULT_INVALID_TENSOR,
                        "The request has %u conditions; expected 0 to %u.", s->n_conditions,
                        H3_CONDITIONS_MAX);
        for (uint32_t i = 0; i < s->n_conditions; i++) {
                r = check_condition(s, i, f);
                if (r < 0)
                        return r;
        }
        return 0;
}

/* Sizes are checked: a grid has at most 2^60 rows, and the sum is looked at after each. */
static bool add_rows(const H3Config *c, const H3Grid *g, uint64_t audio, uint64_t *rows) {
        *rows += g->frames * h3_grid_rows_h(c, g) * h3_grid_rows_w(c, g) + 2 * audio;
        return *rows <= ROWS_MAX;
}

static int count_rows(const H3Config *c, const H3Shape *s, uint64_t *ret, Fault *f) {
        H3Grid grid = h3_shape_grid(s);
        uint64_t rows = s->text_rows;
        bool fits = add_rows(c, &grid, s->audio, &rows);

        for (uint32_t i = 0; fits && i < s->n_conditions; i++)
                fits = add_rows(c, &s->conditions[i].grid, s->conditions[i].audio, &rows);
        if (!fits)
                return fault_set(f, -EOVERFLOW, FAULT_INVALID_TENSOR,
                        "The request needs more than %u rows (text %llu, video latent %llu x %llu x %llu, "
                        "audio 2 x %llu, %u conditions); make the film shorter or smaller.",
                        ROWS_MAX, (unsigned long long) s->text_rows, (unsigned long long) s->frames,
                        (unsigned long long) s->height, (unsigned long long) s->width,
                        (unsigned long long) s->audio, s->n_conditions);
        *ret = rows;
        return 0;
}

int h3_shape_check(
        const H3Config *c, const H3Shape *s, const uint8_t *text_tags, uint64_t *ret_rows, Fault *f) {
        int r;

        r = check_sizes(s, f);
        if (r < 0)
                return r;
        for (uint64_t i = 0; text_tags && i < s->text_rows; i++)
                if (text_tags[i] > 1)
                        return fault_set(f, -EINVAL, FAULT_INVALID_TENSOR,
                                "text_tags[%llu] is %u; expected 0 (vision row) or 1 (text row).",
                                (unsigned long long) i, text_tags[i]);
        return count_rows(c, s, ret_rows, f);
}
