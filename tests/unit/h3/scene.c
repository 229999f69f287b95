/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/unit/h3/scene.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "service/shared/cleanup.h"

DEFINE_CLEANUP(H3Layout *, h3_layout_free)

static double axis(uint64_t length, uint64_t other, uint64_t i) {
        double extent = (double) length / sqrt((double) length * (double) other);

        return 32 * ((1 - extent) / 2 + (double) i * extent / ((double) length / 2));
}

/* Part of a patch that is to be generated. */
static double pooled(const Scene *s, uint64_t frame, uint64_t y, uint64_t x) {
        double m = 0;

        if (!s->video_mask)
                return 1;
        for (uint64_t i = 2 * y; i < 2 * y + 2 && i < s->h; i++)
                for (uint64_t j = 2 * x; j < 2 * x + 2 && j < s->w; j++)
                        m = fmax(m, (double) s->video_mask[(frame * s->h + i) * s->w + j]);
        return ceil(m * 256) / 256;
}

static double time_of(double sigma, double m, double condition) {
        return fmin(1 - m * sigma, fmax(1 - sigma, condition));
}

/* One frame of [24, n_frames, h, w] as rows. */
static OracleRow *add_frame(const Scene *s, OracleRow *row, const float *latent, uint64_t n_frames,
        uint64_t frame, double t, double condition) {
        uint64_t rows_h = (s->h + 1) / 2, rows_w = (s->w + 1) / 2;

        for (uint64_t y = 0; y < rows_h; y++)
                for (uint64_t x = 0; x < rows_w; x++, row++) {
                        *row = (OracleRow){.kind = ORACLE_VIDEO,
                                .t = condition ? fmax(1 - (double) s->sigma_video, condition)
                                               : time_of(s->sigma_video, pooled(s, frame, y, x), 0.999),
                                .position = {t, axis(2 * rows_h, 2 * rows_w, y),
                                        axis(2 * rows_w, 2 * rows_h, x)}};
                        for (uint64_t i = 0; i < 96; i++) {
                                uint64_t py = (2 * y + i / 2 % 2) % s->h, px = (2 * x + i % 2) % s->w;

                                row->in[i] = (double)
                                        latent[((i / 4 * n_frames + frame) * s->h + py) * s->w + px];
                        }
                }
        return row;
}

static double audio_part(const Scene *s, uint64_t i) {
        return s->audio_mask ? ceil((double) s->audio_mask[i] * 256) / 256 : 1;
}

static uint64_t n_rows(const Scene *s) {
        return s->n_text + 2 * s->a + (s->t + s->n_keyframes) * ((s->h + 1) / 2) * ((s->w + 1) / 2);
}

static void make_rows(const Scene *s, uint64_t text_dim, OracleRow *row) {
        uint64_t rows_h = (s->h + 1) / 2, rows_w = (s->w + 1) / 2;
        double origin = (double) s->n_text, elapsed = 0;

        for (uint64_t i = 0; i < s->n_text; i++, row++) {
                *row = (OracleRow){.tag = s->tags ? s->tags[i] : 1,
                        .t = 1 - (double) s->sigma_video,
                        .position = {(double) i, 0, 0}};
                for (uint64_t k = 0; k < text_dim; k++) {
                        uint32_t bits = (uint32_t) s->text[i * text_dim + k] << 16;
                        float f;

                        memcpy(&f, &bits, sizeof(f));
                        row->in[k] = f;
                }
        }
        for (uint32_t i = 0; i < s->n_keyframes; i++)
                row = add_frame(
                        s, row, s->keyframes[i], 1, 0, origin + 5.0 / 3.0 * (double) s->frames[i], 0.999);
        for (uint64_t i = 0; i < 2 * s->a; i++, row++) {
                *row = (OracleRow){.kind = ORACLE_AUDIO,
                        .tag = 2,
                        .t = time_of(s->sigma_audio, audio_part(s, i), 1),
                        .position = {origin + (double) (i % s->a), 0,
                                axis(2 * rows_w, 2 * rows_h, i < s->a ? 0 : rows_w - 1)}};
                for (uint64_t k = 0; k < 32; k++)
                        row->in[k] = (double) s->audio[k * 2 * s->a + i];
        }
        for (uint64_t k = 0; k < s->t; k++) {
                row = add_frame(s, row, s->video, s->t, k, origin + elapsed, 0);
                elapsed += 5.0 / 3.0 * (k % 5 == 0 ? 1 : 4);
        }
}

void scene_oracle(
        const Scene *s, const OracleModel *o, OracleRounding rounding, float *video, float *audio) {
        uint64_t n = n_rows(s), per_frame = ((s->h + 1) / 2) * ((s->w + 1) / 2);
        uint64_t rows_w = (s->w + 1) / 2;
        CLEANUP_FREE OracleRow *rows = calloc(n, sizeof(*rows));
        const OracleRow *row;

        assert_non_null(rows);
        make_rows(s, o->text_dim, rows);
        oracle_run(o, rounding, rows, s->n_text, n);

        row = rows + n - s->t * per_frame - 2 * s->a;
        for (uint64_t i = 0; i < 2 * s->a; i++, row++)
                for (uint64_t k = 0; k < 32; k++)
                        audio[k * 2 * s->a + i] = (float) (row->out[k] * audio_part(s, i));
        for (uint64_t frame = 0; frame < s->t; frame++)
                for (uint64_t y = 0; y < s->h; y++)
                        for (uint64_t x = 0; x < s->w; x++) {
                                const OracleRow *r = row + frame * per_frame + y / 2 * rows_w + x / 2;

                                for (uint64_t k = 0; k < 24; k++)
                                        video[((k * s->t + frame) * s->h + y) * s->w + x] =
                                                (float) (r->out[k * 4 + y % 2 * 2 + x % 2] *
                                                         pooled(s, frame, y / 2, x / 2));
                        }
}

H3Layout *scene_layout(const Scene *s, const H3Config *c) {
        H3Condition conditions[4];
        H3Shape shape = {s->n_text, s->t, s->h, s->w, s->a, s->n_keyframes, conditions};
        H3Layout *l = NULL;
        Fault f = {};

        for (uint32_t i = 0; i < s->n_keyframes; i++)
                conditions[i] = (H3Condition){
                        .kind = H3_CONDITION_KEYFRAME, .frame = s->frames[i], .grid = {1, s->h, s->w}};
        if (h3_layout_new(c, &shape, s->tags, &l, &f) < 0 ||
                h3_layout_set_masks(l, c, s->video_mask, s->audio_mask, &f) < 0)
                fail_msg("%s", f.text);
        return l;
}

void scene_step(const Scene *s, const H3Model *m, H3Compute compute, float **ret_video, float **ret_audio) {
        CLEANUP(h3_layout_freep) H3Layout *l = scene_layout(s, &m->config);
        const GoldenCase text = {.layout = l, .text = s->text};
        CLEANUP_FREE void *refined = golden_refine(m, &text, compute);
        H3ConditionLatents conditions[4] = {};
        H3StepInput in = {
                .compute = compute,
                .layout = l,
                .refined_text = refined,
                .video = s->video,
                .audio = s->audio,
                .conditions = conditions,
                .sigma_video = s->sigma_video,
                .sigma_audio = s->sigma_audio,
        };

        for (uint32_t i = 0; i < s->n_keyframes; i++)
                conditions[i].video = s->keyframes[i];
        golden_run(m, &in, NULL, NULL, 24 * s->t * s->h * s->w, 64 * s->a, ret_video, ret_audio);
}
