/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "service/h3/dit-private.h"
#include "service/shared/cleanup.h"

/* Which timesteps a step has and which row has which (h3.md 1.9). Text rows go with the target's video,
 * whatever their tag. */

/* Conditions count as nearly clean, pictures a little less so than sounds. */
#define VISUAL_CONDITION 0.999f
#define AUDIO_CONDITION 1.0f

static float larger(float a, float b) {
        return a > b ? a : b;
}

/* What is generated to a part of level / H3_MASK_LEVELS has that part of the noise; what is kept is as clean
 * as a condition. */
static float masked(float sigma, uint32_t level, float condition) {
        float t = 1.0f - (float) level / (float) H3_MASK_LEVELS * sigma;

        return t < condition ? t : condition;
}

static uint32_t find(const DitTimesteps *t, float value) {
        uint32_t i = 0;

        while (i < t->n && t->t[i] < value)
                i++;
        return i;
}

/* Keeps them ascending and distinct. */
static void add(DitTimesteps *t, float value) {
        uint32_t i = find(t, value);

        if (i < t->n && t->t[i] == value)
                return;
        memmove(t->t + i + 1, t->t + i, (t->n - i) * sizeof(*t->t));
        t->t[i] = value;
        t->n++;
}

static void seen_levels(const H3Layout *l, const H3Segment *s, bool *ret) {
        memset(ret, 0, H3_MASK_LEVELS * sizeof(*ret));
        ret[H3_MASK_LEVELS] = true;
        for (uint64_t row = s->begin; l->level && row < s->end; row++)
                ret[l->level[row]] = true;
}

void dit_timesteps(const H3Layout *l, float sigma_video, float sigma_audio, DitTimesteps *ret) {
        bool video[H3_MASK_LEVELS + 1], audio[H3_MASK_LEVELS + 1];
        float visual = larger(1.0f - sigma_video, VISUAL_CONDITION);
        float sound = larger(1.0f - sigma_audio, AUDIO_CONDITION);

        seen_levels(l, h3_layout_video(l), video);
        seen_levels(l, h3_layout_audio(l), audio);
        ret->n = 0;
        for (uint32_t i = 0; i <= H3_MASK_LEVELS; i++) {
                if (video[i])
                        add(ret, masked(sigma_video, i, visual));
                if (audio[i])
                        add(ret, masked(sigma_audio, i, sound));
        }
        for (uint32_t i = 0; i < l->shape.n_conditions; i++) {
                if (l->shape.conditions[i].grid.frames > 0)
                        add(ret, visual);
                if (l->shape.conditions[i].audio > 0)
                        add(ret, sound);
        }

        for (uint32_t i = 0; i <= H3_MASK_LEVELS; i++) {
                ret->video[i] = find(ret, masked(sigma_video, i, visual));
                ret->audio[i] = find(ret, masked(sigma_audio, i, sound));
        }
        ret->visual_condition = find(ret, visual);
        ret->audio_condition = find(ret, sound);
}

/* The timestep of a row of the segment. */
static uint32_t row_timestep(const H3Layout *l, const DitTimesteps *t, const H3Segment *s, uint64_t row) {
        uint32_t level = l->level ? l->level[row] : H3_MASK_LEVELS;

        if (s->condition >= 0)
                return s->kind == H3_SEGMENT_AUDIO ? t->audio_condition : t->visual_condition;
        return s->kind == H3_SEGMENT_AUDIO ? t->audio[level] : t->video[level];
}

static int tap_indices(const DitRun *run, const int32_t *time, uint64_t n) {
        CLEANUP_FREE float *values = NULL;

        if (!run->hooks || !run->hooks->on_tap)
                return 0;
        values = malloc(n * sizeof(*values));
        if (!values)
                return -ENOMEM;
        for (uint64_t i = 0; i < n; i++)
                values[i] = (float) time[i];
        dit_tap_host(run, "timestep_indices", values, n, 1);
        return 0;
}

int dit_index_rows(const DitRun *run, const H3Layout *l, const DitTimesteps *t) {
        uint64_t n = dit_own_rows(run);
        CLEANUP_FREE int32_t *time = NULL, *mod = NULL;
        const H3Segment *s = l->segments;
        int r;

        if (n == 0)
                return 0;
        time = malloc(n * sizeof(*time));
        mod = malloc(n * sizeof(*mod));
        if (!time || !mod)
                return -ENOMEM;

        for (uint64_t i = 0; i < n; i++) {
                uint64_t row = run->rows.begin + i;

                while (row >= s->end) /* segments follow one another without a gap */
                        s++;
                row = h3_sparse_row(run->sparse, row); /* of the same segment */
                time[i] = (int32_t) row_timestep(l, t, s, row);
                mod[i] = time[i] * H3_TAGS + l->tag[row];
        }
        r = tap_indices(run, time, n);
        if (r < 0)
                return r;
        r = run->ops->upload(run->context, run->time_index, time, n * sizeof(*time));
        return r < 0 ? r : run->ops->upload(run->context, run->mod_index, mod, n * sizeof(*mod));
}
