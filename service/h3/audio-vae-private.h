/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* What the files of audio-vae*.c share; nobody else includes it. */

#include "service/h3/audio-vae.h"
#include "service/h3/model-private.h"
#include "service/h3/weights.h"

#define AUDIO_CONVS (2u * H3_AUDIO_DILATIONS) /* of an AMP block: dilated, plain, dilated .. */
#define AUDIO_UNITS 3u                        /* residual units of an encoder stage */
#define AUDIO_LAYER_EPS 1e-5f
#define AUDIO_LATENTS_MAX (1u << 24) /* more than a hundred hours; sizes stay far from overflow */

/* A convolution over time with zeros beyond the ends. */
typedef struct AudioConv {
        LkMatrix w;    /* [out, in * kernel] */
        LkVector bias; /* data NULL: none */
        uint32_t in, out, kernel, stride, dilation, pad;
} AudioConv;

typedef struct AudioActivation {
        LkVector alpha, beta, up, down;
} AudioActivation;

typedef struct AudioBlock {
        AudioConv conv[AUDIO_CONVS];
        AudioActivation act[AUDIO_CONVS];
} AudioBlock;

/* A transposed convolution y[t * rate + j - crop] += w[j] x[t] is a plain one with an output for each of the
 * `rate` positions between two of x: up has rate * channels outputs (position after position) and the taps
 * that reach one position, the latest x first; taps that a position lacks are 0. Row r of its result is
 * positions [r * rate, (r + 1) * rate) before the crop, and sees x[r - up.kernel + 1] .. x[r]. */
typedef struct AudioStage {
        AudioConv up;
        uint32_t channels, rate, crop;
        AudioBlock blocks[H3_AUDIO_BLOCKS];
} AudioStage;

typedef struct AudioUnit {
        LkVector alpha[2];
        AudioConv conv[2];
} AudioUnit;

typedef struct AudioEncoderStage {
        AudioUnit units[AUDIO_UNITS];
        LkVector alpha;
        AudioConv down;
} AudioEncoderStage;

typedef struct AudioLinear {
        LkMatrix w;
        LkVector bias;
} AudioLinear;

typedef struct AudioNorm {
        LkVector weight, bias;
} AudioNorm;

struct H3AudioWeights {
        /* decoder */
        AudioConv dec_in, dec_pre, dec_post;
        AudioStage stages[H3_AUDIO_STAGES_MAX];
        AudioActivation post;
        /* encoder */
        AudioConv enc_first, enc_last;
        AudioEncoderStage enc[H3_AUDIO_STAGES_MAX];
        LkVector enc_alpha;
        AudioNorm norm1, norm2, norm3, mlp_norm;
        AudioLinear proj, qkv, attn_proj, w0, w1, w2, mean, logs;
        LkMatrix pool; /* [channels, latent_dim]: the mean over heads and over neighbours inside a head */

        void **owned; /* [n_owned]: private copies */
        size_t n_owned;
};

/* audio-vae-config.c: what the shapes do not say, from config.json or the released model; what contradicts
 * the shapes goes to the list. -EBADMSG. */
int audio_config_read(const char *json, uint64_t size, const H3Statistics *stored, H3AudioConfig *c, H3List *wrong,
        Fault *f);

/* audio-vae-fold.c. All copies are f32, owned by v->weights and counted in v->private_bytes; NULL: no
 * memory.
 */
float *audio_own(H3AudioVae *v, uint64_t n);
/* w = g * v / |v| of [rows, cols], the norm over each row: f64 sums ascending, one rounding at the end. */
float *audio_fold(H3AudioVae *v, const H3Tensor *g, const H3Tensor *direction, uint64_t rows, uint64_t cols);
/* Weights and bias of AudioStage.up from [in, out, kernel] and [out]. */
int audio_fold_up(H3AudioVae *v, const void *w, LkType type, const LkVector *bias, uint32_t in,
        uint32_t kernel, AudioStage *s);

/* audio-vae-model.c: fills config and weights, or says everything that is wrong at once. */
int audio_bind(H3TensorSet *s, H3AudioVae *v, Fault *f);

/* audio-vae.c: what the two directions share. */
typedef struct AudioRun {
        const H3Rank *rank;
        const H3StepHooks *hooks;
        uint8_t *work; /* NULL: only count */
        uint64_t at;   /* bytes of it that are given away */
} AudioRun;

float *audio_carve(AudioRun *run, uint64_t numbers);

/* The weights with the part's where operations may read them, until it is given. */
static inline int audio_part(
        const AudioRun *run, const H3AudioVae *v, H3PartKind kind, uint32_t layer, const H3AudioWeights **ret) {
        const void *taken;
        int r;

        r = h3_part_take(run->rank->weights, v, kind, layer, &taken);
        if (r >= 0)
                *ret = ((const H3AudioVae *) taken)->weights;
        return r;
}

static inline void audio_give(const AudioRun *run, H3PartKind kind, uint32_t layer) {
        h3_part_give(run->rank->weights, kind, layer);
}

/* Positions of n that an output range of the convolution reads. */
H3Range audio_reads(const AudioConv *c, H3Range out, uint64_t n);
/* out of n positions' whole, from x, which holds positions `in` of n_in and covers audio_reads(). */
int audio_conv(const AudioRun *run, const AudioConv *c, const float *x, H3Range in, uint64_t n_in,
        H3Range out, float *y);
int audio_snake(const AudioRun *run, const LkVector *alpha, const float *x, uint64_t m, float *y);
int audio_add(const AudioRun *run, float *x, const float *y, uint64_t n);
int audio_linear(const AudioRun *run, const AudioLinear *l, const float *x, uint64_t m, float *y);
int audio_tap(const AudioRun *run, const char *name, const float *x, uint64_t rows, uint64_t columns);

/* -EINVAL: no such job, or no memory for it. */
int audio_check_job(const H3AudioPlan *p, uint64_t job, const void *work, Fault *f);
/* An error of an operation as a fault; 0 if there was none. */
int audio_failed(int error, const char *what, Fault *f);

/* Wider by reach on both sides, inside 0 .. n. */
static inline H3Range audio_widen(H3Range r, uint64_t reach, uint64_t n) {
        return (H3Range){r.begin > reach ? r.begin - reach : 0, n - r.end > reach ? r.end + reach : n};
}

/* The latents of a job, and the plan's number of jobs. */
static inline H3Range audio_job_latents(const H3AudioPlan *p, uint64_t job) {
        uint64_t begin = job / 2 * p->piece;

        return (H3Range){begin, p->latents - begin < p->piece ? p->latents : begin + p->piece};
}

/* Sets piece, jobs and job_memory from a function that says what a job takes. */
typedef uint64_t (*AudioJobMemory)(const H3AudioVae *v, const H3AudioPlan *p, uint64_t job);
int audio_plan_pieces(const H3AudioVae *v, uint64_t piece, uint64_t memory, AudioJobMemory job_memory,
        H3AudioPlan *p, Fault *f);
