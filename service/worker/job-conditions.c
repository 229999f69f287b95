/* SPDX-License-Identifier: Apache-2.0 */
#include "service/worker/job-private.h"

#include <inttypes.h>
#include <stdio.h>

#include "service/h3/layout.h"
#include "service/shared/cleanup.h"
#include "service/worker/job-input.h"

int job_take_text(Job *j, const WireJobOpen *w, uint8_t **ret_tags, Fault *f) {
        TensorRule text = {
                .name = "text", .type = ST_BF16, .n_dims = 2, .shape = {0, j->model->h3->config.text_dim}};
        TensorRule tags = {.name = "text_tags", .type = ST_U8, .n_dims = 1};
        CLEANUP_FREE uint8_t *t = NULL;
        int r;

        r = tensor_copy(&w->text, &text, &j->arenas->input, (void **) &j->text, f);
        if (r < 0)
                return r;

        r = tensor_check_finite("text", ST_BF16, j->text, 2, w->text.shape, f);
        if (r < 0)
                return r;

        j->text_rows = w->text.shape[0];
        j->text_size = w->text.size;
        if (tensor_is_absent(&w->text_tags))
                return 0;

        tags.shape[0] = j->text_rows;
        r = tensor_copy(&w->text_tags, &tags, &j->arenas->input, (void **) &t, f);
        if (r < 0)
                return r;

        for (uint64_t i = 0; i < j->text_rows; i++)
                if (t[i] > 1)
                        return fault_set(f, -EINVAL, FAULT_INVALID_TENSOR,
                                "Tensor text_tags has %u at [%" PRIu64
                                "], expected 0 (vision row) or 1 (text row).",
                                t[i], i);

        *ret_tags = STEAL_PTR(t);
        return 0;
}

/* Places and sizes are looked at when the latents are copied; kinds, grids and their sum here. */
int job_make_layout(Job *j, const WireJobOpen *w, const uint8_t *tags, Fault *f) {
        H3Condition conditions[WIRE_CONDITIONS_MAX];
        H3Shape shape = {
                .text_rows = j->text_rows,
                .frames = j->video.shape[1],
                .height = j->video.shape[2],
                .width = j->video.shape[3],
                .audio = j->audio.shape[2],
                .n_conditions = w->n_conditions,
                .conditions = conditions,
        };
        bool references = false;
        int r;

        if (w->n_conditions > WIRE_CONDITIONS_MAX)
                return fault_set(f, -EINVAL, FAULT_INVALID_TENSOR,
                        "The request has %" PRIu32 " conditions; expected 0 to %d.", w->n_conditions,
                        WIRE_CONDITIONS_MAX);
        for (uint32_t i = 0; i < w->n_conditions; i++) {
                const WireCondition *k = &w->conditions[i];

                if (k->kind > WIRE_CONDITION_AUDIO)
                        return fault_set(f, -EINVAL, FAULT_INVALID_TENSOR,
                                "Condition %" PRIu32 " is of the unknown kind %" PRIu32
                                "; expected keyframe, image, video or audio.",
                                i, k->kind);
                conditions[i] = (H3Condition){
                        .kind = (H3ConditionKind) k->kind,
                        .frame = k->frame,
                        .grid = {.frames = k->frames, .height = k->height, .width = k->width},
                        .audio = k->audio,
                };
                references = references || k->kind != WIRE_CONDITION_KEYFRAME;
        }

        r = h3_model_check_references(j->model->h3, references, f);
        if (r < 0)
                return r;
        return h3_layout_new(&j->model->h3->config, &shape, tags, &j->layout, f);
}

/* One latent of a condition. Its sizes were found sound with the layout's: they cannot overflow. */
static int take_latent(const Job *j, uint32_t i, const char *stream, uint64_t offset, uint32_t n_dims,
        const uint64_t *shape, float **ret, Fault *f) {
        WireTensor t = {.offset = offset, .size = sizeof(float), .dtype = ST_F32, .n_dims = n_dims};
        CLEANUP_FREE void *copy = NULL;
        TensorRule rule = {.type = ST_F32, .n_dims = n_dims};
        char name[48];
        int r;

        (void) snprintf(name, sizeof(name), "%s of condition %" PRIu32, stream, i);
        rule.name = name;
        for (uint32_t d = 0; d < n_dims; d++) {
                t.shape[d] = rule.shape[d] = shape[d];
                t.size *= shape[d];
        }
        if (offset % sizeof(float) != 0)
                return fault_set(f, -EINVAL, FAULT_INVALID_TENSOR,
                        "Tensor %s lies at offset %" PRIu64 ", expected a multiple of %zu.", name, offset,
                        sizeof(float));

        r = tensor_copy(&t, &rule, &j->arenas->input, &copy, f);
        if (r < 0)
                return r;
        r = tensor_check_finite(name, ST_F32, copy, n_dims, shape, f);
        if (r < 0)
                return r;
        *ret = STEAL_PTR(copy);
        return 0;
}

int job_take_conditions(Job *j, const WireJobOpen *w, Fault *f) {
        const H3Config *c = &j->model->h3->config;

        for (uint32_t i = 0; i < w->n_conditions; i++) {
                const WireCondition *k = &w->conditions[i];
                const uint64_t video[] = {c->video_channels, k->frames, k->height, k->width};
                const uint64_t audio[] = {c->audio_channels, 2, k->audio};
                int r = 0;

                if (k->frames > 0)
                        r = take_latent(j, i, "video", k->video_offset, 4, video, &j->condition_video[i], f);
                if (r >= 0 && k->audio > 0)
                        r = take_latent(j, i, "audio", k->audio_offset, 3, audio, &j->condition_audio[i], f);
                if (r < 0)
                        return r;
                j->conditions[i] = (H3ConditionLatents){j->condition_video[i], j->condition_audio[i]};
        }
        return 0;
}
