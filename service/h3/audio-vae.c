/* SPDX-License-Identifier: Apache-2.0 */
/* Opening, plans, and the steps that encoder and decoder share. */

#include "service/h3/audio-vae.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>

#include "service/h3/audio-vae-private.h"
#include "service/shared/cleanup.h"

#define WORK_ALIGN 256u
#define PIECES_LOOKED_AT 64u /* the largest is among the first: later ones have no more around them */

DEFINE_CLEANUP(H3AudioVae *, h3_audio_vae_free)
DEFINE_CLEANUP(H3TensorSet *, h3_tensor_set_free)

int h3_audio_vae_open(const H3File *files, size_t n_files, H3AudioVae **ret, Fault *f) {
        CLEANUP(h3_tensor_set_freep) H3TensorSet *s = NULL;
        CLEANUP(h3_audio_vae_freep) H3AudioVae *v = NULL;
        int r;

        r = h3_tensor_set_new(files, n_files, &s, f);
        if (r < 0)
                return r;
        v = calloc(1, sizeof(*v));
        if (v)
                v->weights = calloc(1, sizeof(*v->weights));
        if (!v || !v->weights)
                return fault_set(f, -ENOMEM, FAULT_DOES_NOT_FIT,
                        "No memory for the audio VAE; free some and try again.");
        r = audio_bind(s, v, f);
        if (r < 0)
                return r;

        *ret = STEAL_PTR(v);
        return 0;
}

H3AudioVae *h3_audio_vae_free(H3AudioVae *v) {
        if (!v)
                return NULL;
        for (size_t i = 0; v->weights && i < v->weights->n_owned; i++)
                free(v->weights->owned[i]);
        if (v->weights)
                free(v->weights->owned);
        free(v->weights);
        free(v);
        return NULL;
}

uint64_t h3_audio_latents(const H3AudioVae *v, uint64_t samples) {
        return samples / v->config.hop + (samples % v->config.hop != 0);
}

static void set_pieces(const H3AudioVae *v, uint64_t piece, AudioJobMemory job_memory, H3AudioPlan *p) {
        p->piece = piece < p->latents ? piece : p->latents;
        p->jobs = 2 * (p->latents / p->piece + (p->latents % p->piece != 0));
        p->job_memory = 0;
        for (uint64_t job = 0; job < p->jobs && job < 2 * PIECES_LOOKED_AT; job += 2) {
                uint64_t bytes = job_memory(v, p, job);

                if (bytes > p->job_memory)
                        p->job_memory = bytes;
        }
}

int audio_plan_pieces(const H3AudioVae *v, uint64_t piece, uint64_t memory, AudioJobMemory job_memory,
        H3AudioPlan *p, Fault *f) {
        uint64_t least = piece > 0 ? piece : 1, at = piece > 0 ? piece : H3_AUDIO_PIECE;

        if (p->latents == 0 || p->latents > AUDIO_LATENTS_MAX)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "A sound of %" PRIu64 " latents; expected 1 to %u.", p->latents, AUDIO_LATENTS_MAX);

        for (;; at /= 2) {
                set_pieces(v, at, job_memory, p);
                if (p->job_memory <= memory)
                        return 0;
                if (at <= least)
                        break;
        }
        return fault_set(f, -ENOMEM, FAULT_DOES_NOT_FIT,
                "A piece of %" PRIu64 " audio latents takes %" PRIu64 " bytes, and %" PRIu64
                " are given; give more, or shorter pieces.",
                p->piece, p->job_memory, memory);
}

float *audio_carve(AudioRun *run, uint64_t numbers) {
        float *p = run->work ? (float *) (void *) (run->work + run->at) : NULL;

        run->at += (numbers * sizeof(float) + WORK_ALIGN - 1) / WORK_ALIGN * WORK_ALIGN;
        return p;
}

H3Range audio_reads(const AudioConv *c, H3Range out, uint64_t n) {
        uint64_t begin = out.begin * c->stride, end;

        end = (out.end - 1) * c->stride + (uint64_t) (c->kernel - 1) * c->dilation + 1;
        begin = begin > c->pad ? begin - c->pad : 0;
        end = end > c->pad ? end - c->pad : 0;
        return (H3Range){begin, end < n ? end : n};
}

int audio_conv(const AudioRun *run, const AudioConv *c, const float *x, H3Range in, uint64_t n_in,
        H3Range out, float *y) {
        const LkConvAxis one = {.size = 1, .kernel = 1, .stride = 1, .dilation = 1};
        H3Range reads = audio_reads(c, out, n_in);
        uint64_t first = out.begin * c->stride, last; /* of the padded sound */
        LkConv a = {.axis = {one, one}, .channels = c->in, .w = c->w, .bias = c->bias, .y = y};

        if (reads.begin < in.begin || reads.end > in.end || reads.begin >= reads.end)
                return -EINVAL;
        last = (out.end - 1) * c->stride + (uint64_t) (c->kernel - 1) * c->dilation;
        a.axis[2] = (LkConvAxis){
                .size = h3_range_size(reads),
                .kernel = c->kernel,
                .stride = c->stride,
                .dilation = c->dilation,
                .before = first < c->pad ? (uint32_t) (c->pad - first) : 0,
                .after = last + 1 > n_in + c->pad ? (uint32_t) (last + 1 - n_in - c->pad) : 0,
        };
        a.x = x + (reads.begin - in.begin) * c->in;
        return run->rank->ops->conv(run->rank->context, &a);
}

int audio_snake(const AudioRun *run, const LkVector *alpha, const float *x, uint64_t m, float *y) {
        return run->rank->ops->snake(run->rank->context,
                &(LkSnake){.m = m, .channels = alpha->n, .x = x, .alpha = *alpha, .y = y});
}

int audio_add(const AudioRun *run, float *x, const float *y, uint64_t n) {
        return run->rank->ops->residual(run->rank->context,
                &(LkResidual){.type = LK_F32, .m = 1, .n = n, .x = x, .x_ld = n, .y = y, .y_ld = n});
}

int audio_linear(const AudioRun *run, const AudioLinear *l, const float *x, uint64_t m, float *y) {
        return run->rank->ops->gemm(run->rank->context, &(LkGemm){.m = m,
                                                                .x = x,
                                                                .x_type = LK_F32,
                                                                .x_ld = l->w.cols,
                                                                .w = l->w,
                                                                .bias = l->bias,
                                                                .y = y,
                                                                .y_type = LK_F32,
                                                                .y_ld = l->w.rows});
}

int audio_tap(const AudioRun *run, const char *name, const float *x, uint64_t rows, uint64_t columns) {
        CLEANUP_FREE float *host = NULL;
        int r;

        if (!run->hooks || !run->hooks->on_tap)
                return 0;
        host = malloc(rows * columns * sizeof(float));
        if (!host)
                return -ENOMEM;
        r = run->rank->ops->download(run->rank->context, host, x, rows * columns * sizeof(float));
        if (r < 0)
                return r;
        run->hooks->on_tap(run->hooks->userdata, name, host, rows, columns);
        return 0;
}

int audio_check_job(const H3AudioPlan *p, uint64_t job, const void *work, Fault *f) {
        if (job < p->jobs && work)
                return 0;
        return fault_set(f, -EINVAL, FAULT_INTERNAL, "Audio job %" PRIu64 " of %" PRIu64 "%s.", job, p->jobs,
                work ? "" : " has no memory");
}

int audio_failed(int error, const char *what, Fault *f) {
        return error >= 0 ? 0
                          : fault_set(f, error, error == -ENOMEM ? FAULT_DOES_NOT_FIT : FAULT_INTERNAL,
                                    "%s the sound failed (error %d).", what, -error);
}
