/* SPDX-License-Identifier: Apache-2.0 */
#include "service/worker/job-private.h"

#include <string.h>

#include "service/h3/mask.h"
#include "service/shared/cleanup.h"
#include "service/worker/job-input.h"

/* What a mask of one stream is about. */
typedef struct MaskPlace {
        const char *mask_name, *clean_name;
        const WireTensor *mask, *clean, *latent; /* latent: shape of the stream */
        const float *given;                      /* the request's latent */
} MaskPlace;

static bool is_all_ones(const float *mask, uint64_t n) {
        for (uint64_t i = 0; i < n; i++)
                if (mask[i] != 1.0f)
                        return false;
        return true;
}

/* What is kept: given for it, or where the worker makes the noise the request's latent. */
static int take_clean(const Job *j, const WireJobOpen *w, const MaskPlace *p, float **ret, Fault *f) {
        TensorRule rule = {.name = p->clean_name, .type = ST_F32, .n_dims = p->latent->n_dims};
        CLEANUP_FREE void *clean = NULL;
        int r;

        memcpy(rule.shape, p->latent->shape, sizeof(rule.shape));
        if (tensor_is_absent(p->clean)) {
                if (w->noise == WIRE_NOISE_GIVEN)
                        return fault_set(f, -EINVAL, FAULT_INVALID_TENSOR,
                                "Tensor %s is missing: with %s and given noise it says what is kept.",
                                p->clean_name, p->mask_name);
                *ret = malloc((size_t) p->latent->size);
                if (!*ret)
                        return -ENOMEM;
                memcpy(*ret, p->given, (size_t) p->latent->size);
                return 0;
        }

        r = tensor_copy(p->clean, &rule, &j->arenas->input, &clean, f);
        if (r < 0)
                return r;
        r = tensor_check_finite(p->clean_name, ST_F32, clean, rule.n_dims, p->clean->shape, f);
        if (r < 0)
                return r;
        *ret = STEAL_PTR(clean);
        return 0;
}

static int take_video_mask(Job *j, const MaskPlace *p, StreamMask *ret, Fault *f) {
        TensorRule rule = {.name = p->mask_name, .type = ST_F32, .n_dims = 3};
        const H3Grid g = h3_shape_grid(&j->layout->shape);
        int r;

        memcpy(rule.shape, p->latent->shape + 1, 3 * sizeof(uint64_t));
        r = tensor_copy(p->mask, &rule, &j->arenas->input, (void **) &ret->mask, f);
        if (r < 0)
                return r;
        ret->pooled = malloc((size_t) p->mask->size);
        if (!ret->pooled)
                return -ENOMEM;
        return h3_mask_pool_video(&j->model->h3->config, &g, ret->mask, ret->pooled, f);
}

/* A mask that tells latent channels apart has a pooled one that does not: it is repeated, since a sampler
 * has both of one size. */
static int take_audio_mask(Job *j, const MaskPlace *p, StreamMask *ret, Fault *f) {
        uint64_t n_audio = p->latent->shape[2];
        TensorRule rule = {.name = p->mask_name, .type = ST_F32};
        uint64_t channels = 1;
        int r;

        if (p->mask->n_dims == 3) {
                rule.n_dims = 3;
                memcpy(rule.shape, p->latent->shape, 3 * sizeof(uint64_t));
                channels = p->latent->shape[0];
        } else {
                rule.n_dims = 2;
                memcpy(rule.shape, p->latent->shape + 1, 2 * sizeof(uint64_t));
        }
        r = tensor_copy(p->mask, &rule, &j->arenas->input, (void **) &ret->mask, f);
        if (r < 0)
                return r;
        ret->pooled = malloc((size_t) p->mask->size);
        if (!ret->pooled)
                return -ENOMEM;
        r = h3_mask_pool_audio(channels, n_audio, ret->mask, ret->pooled, f);
        if (r < 0)
                return r;
        for (uint64_t channel = 1; channel < channels; channel++)
                memcpy(ret->pooled + channel * 2 * n_audio, ret->pooled,
                        (size_t) (2 * n_audio) * sizeof(float));
        return 0;
}

static void stream_mask_done(StreamMask *m) {
        free(m->mask);
        free(m->pooled);
        free(m->clean);
        free(m->held);
}

/* One stream. A mask of ones is as none, to the bit. */
static int take_mask(Job *j, const WireJobOpen *w, unsigned stream, const MaskPlace *p, Fault *f) {
        CLEANUP(stream_mask_done) StreamMask m = {};
        int r;

        if (tensor_is_absent(p->mask) && tensor_is_absent(p->clean))
                return 0;
        if (tensor_is_absent(p->mask) || (j->kind == WIRE_JOB_STEP && !tensor_is_absent(p->clean)))
                return fault_set(f, -EINVAL, FAULT_INVALID_TENSOR,
                        "Tensor %s is given without %s, or for a single step, whose latents are what the "
                        "model "
                        "sees: nothing is kept with it.",
                        p->clean_name, p->mask_name);

        r = stream == STREAM_VIDEO ? take_video_mask(j, p, &m, f) : take_audio_mask(j, p, &m, f);
        if (r < 0)
                return r;
        if (j->kind == WIRE_JOB_SAMPLE) {
                r = take_clean(j, w, p, &m.clean, f);
                if (r < 0)
                        return r;
        }
        if (is_all_ones(m.mask, p->mask->size / sizeof(float)))
                return 0;

        if (j->kind == WIRE_JOB_SAMPLE) {
                m.held = malloc((size_t) p->latent->size);
                if (!m.held)
                        return -ENOMEM;
                memcpy(m.held, m.clean, (size_t) p->latent->size); /* sound stays clean */
                j->sampler_masks[stream] = (H3SamplerMask){
                        .n_mask = p->mask->size / sizeof(float),
                        .mask = m.mask,
                        .pooled = m.pooled,
                        .clean = m.clean,
                        .held = m.held,
                };
        }
        j->masks[stream] = m;
        m = (StreamMask){};
        return 0;
}

int job_take_masks(Job *j, const WireJobOpen *w, const Latents *given, Fault *f) {
        const MaskPlace places[] = {
                [STREAM_VIDEO] = {"mask_video", "clean_video", &w->mask_video, &w->clean_video, &w->video,
                        given->video},
                [STREAM_AUDIO] = {"mask_audio", "clean_audio", &w->mask_audio, &w->clean_audio, &w->audio,
                        given->audio},
        };
        const StreamMask *m = j->masks;

        for (unsigned i = STREAM_VIDEO; i <= STREAM_AUDIO; i++) {
                int r = take_mask(j, w, i, &places[i], f);

                if (r < 0)
                        return r;
        }
        j->sampler.video_mask = m[STREAM_VIDEO].held ? &j->sampler_masks[STREAM_VIDEO] : NULL;
        j->sampler.audio_mask = m[STREAM_AUDIO].held ? &j->sampler_masks[STREAM_AUDIO] : NULL;
        if (!m[STREAM_VIDEO].pooled && !m[STREAM_AUDIO].pooled)
                return 0;
        return h3_layout_set_masks(
                j->layout, &j->model->h3->config, m[STREAM_VIDEO].pooled, m[STREAM_AUDIO].pooled, f);
}

void job_hold_video(Job *j, const float *noise) {
        const StreamMask *m = &j->masks[STREAM_VIDEO];

        h3_noise_mix(m->clean, noise, j->n_video, m->held);
}
