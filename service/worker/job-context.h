/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* A job that was accepted: private copies of its inputs, its state, and where its results lie in the output
 * arena.
 *
 * Made by the link thread, stepped by the steps' thread, freed by whoever has the last reference. */

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "service/h3/dit.h"
#include "service/h3/sampler.h"
#include "service/h3/sparse.h"
#include "service/shared/wire.h"
#include "service/worker/arena-map.h"
#include "service/worker/merged-model.h"
#include "service/worker/model-table.h"
#include "service/worker/plan.h"

/* What lies in a slot, f32, each part at a multiple of 64: [24, T, H, W], [32, 2, A], [32, 2, A], and the
 * denoised ones like the streams. The last three are NULL where the sampler does not have them. */
typedef struct Latents {
        void *slot; /* all of it, owned; NULL: video and audio are, there is no more */
        float *video, *audio, *carried, *denoised_video, *denoised_audio;
} Latents;

/* One stream's mask, owned; all NULL: everything is generated. */
typedef struct StreamMask {
        float *mask, *pooled, *clean, *held; /* as H3SamplerMask */
} StreamMask;

typedef struct Coder Coder;       /* coder.h */
typedef struct JobStart JobStart; /* job-start.c */

typedef struct Job {
        atomic_uint n_ref;
        uint64_t id;
        uint32_t epoch;
        WireJobKind kind;
        bool plan_only;
        H3Compute compute;
        ModelEntry *model; /* counted, as is arenas (NULL: a MERGE has none) */
        ArenaPair *arenas;
        uint32_t n_loras;
        ModelEntry *loras[WIRE_LORAS_MAX]; /* counted */
        double strengths[WIRE_LORAS_MAX];
        Coder *coder; /* owned; NULL: the job is a denoiser's, and most of what follows is its */
        uint64_t private_max; /* of JOB_OPEN */
        uint64_t ranks;       /* that take part without a plan: bits, at least one */

        /* inputs, never changed after job_new() */
        uint16_t *text;                                     /* bf16 [text_rows, text_dim] */
        uint64_t text_rows, text_size;                      /* size in bytes */
        H3Layout *layout;                                   /* with the masks; NULL: a MERGE has none */
        H3ConditionLatents conditions[WIRE_CONDITIONS_MAX]; /* as the model shall see them */
        float *condition_video[WIRE_CONDITIONS_MAX],
                *condition_audio[WIRE_CONDITIONS_MAX]; /* theirs, owned */
        uint64_t n_video, n_audio;                     /* elements */
        WireTensor video, audio, carried;              /* shapes; offsets inside a slot */
        uint64_t denoised_video, denoised_audio;       /* offsets inside a slot */
        uint32_t steps;
        float *sigmas_video, *sigmas_audio; /* [steps + 1]; STEP: [1] */
        uint32_t announced;                 /* STEP: steps of the schedule that it is one of; 0: not said */
        float *announced_video, *announced_audio; /* [announced + 1] */
        StreamMask masks[2];                /* SAMPLE: video, audio */
        H3SamplerMask sampler_masks[2];     /* views of them */
        H3Sampler sampler;                  /* SAMPLE; points to the above */
        H3Sparse *sparse;                   /* owned; NULL: every step is dense */
        JobStart *start; /* owned; the noise that the first step draws, then NULL */

        /* place of the results in the output arena */
        uint32_t n_slots;
        uint64_t commit_offset, slot_offset, slot_stride, output_used;
        WireTensor preview;     /* likewise; size 0: none is made */
        uint32_t preview_steps; /* after every so many */
        float preview_map[75];

        /* written by rank 0's thread once steps run */
        MergedModel *merged; /* counted; NULL: the base itself, or not made yet */
        Latents state;       /* after `committed` steps; STEP: the input */
        Latents next;        /* SAMPLE: made by a step, becomes the state */
        Latents velocity;    /* of the step */
        Latents shown;       /* what the model sees of the state; only streams with a mask have one */
        uint32_t committed;
        bool table_tried; /* modulation rows of the schedule were made or declined: not again and again */
        atomic_uint_least64_t progress_usec; /* CLOCK_MONOTONIC of the last PROGRESS, or of the begin of the step */
        uint64_t open_usec;     /* how long job_new() took; 0 once a step's time has it */

        /* written by the link thread while no step is pending */
        Plan *plan;         /* NULL before PLAN */
        Fault plan_fault;   /* why the last PLAN was refused: STEP answers with it */
        bool plan_admitted; /* by rank 0's thread: its memory was found */

        atomic_uint n_pending; /* steps queued or running */
        atomic_bool cancelled; /* set by the link thread; seen by what runs in a fraction of a second */

        pthread_mutex_t lock; /* of closed, and held while results are written */
        bool closed;          /* nothing of this job may reach the output arena any more */
} Job;

/* The model that the job's steps run, and a number that no other one has; rank 0's thread, once it is made.
 */
static inline const H3Model *job_model(const Job *j) {
        return j->merged ? j->merged->h3 : j->model->h3;
}

static inline uint64_t job_model_serial(const Job *j) {
        return j->merged ? j->merged->serial : j->model->serial;
}

/* A step is split by the broker's plan; else by what it is itself. */
static inline bool job_has_plan(const Job *j) {
        return !j->coder && j->kind != WIRE_JOB_MERGE;
}

/* The first that takes part: it does what is not split. */
static inline uint32_t job_first_rank(const Job *j) {
        for (uint32_t i = 0; j->plan && i < j->plan->h3.ranks; i++)
                if (!h3_plan_is_idle(&j->plan->h3, i))
                        return i;
        return (uint32_t) __builtin_ctzll(j->ranks);
}

/* What a JOB_OPEN names, found by the caller: arenas may be NULL for a MERGE. */
typedef struct JobParts {
        ModelEntry *model;
        ArenaPair *arenas;
        ModelEntry *loras[WIRE_LORAS_MAX]; /* of w->n_loras */
        uint32_t ranks;                    /* that the worker has; 0: one */
} JobParts;

/* JOB_OPEN: checks everything, copies what is used, draws the noise. Only when nothing is wrong any more,
 * state committed so far (0, or start_step) and the commit word are written, or as "none yet" if the state is
 * still to be drawn (RESUME: the committed state is
 * read, the commit word renewed; PLAN_ONLY: nothing). On failure f says why and the output arena is as it
 * was. -EINVAL, -ENOMEM, ... */
int job_new(const WireJobOpen *w, const JobParts *parts, uint64_t epoch, Job **ret, Fault *f);
Job *job_ref(Job *j);
Job *job_unref(Job *j);

/* A LkStop: the job was cancelled. */
bool job_is_cancelled(void *job);
/* H3Noise.share by threads of its own. */
void job_share_noise(uint64_t n, void (*work)(void *arg, uint64_t begin, uint64_t end), void *arg);

/* On the steps' thread, before the first step: draws the noise that the job asks for, of conditions and start. A long film's
 * takes many seconds, in which the link's thread must go on to hear of a cancel. A state that begins with it is written to its slot
 * then, with the commit word. -ECANCELED, -ENOMEM, -EINVAL (InvalidTensor: the start is not finite): the job is of no use then. */
int job_draw_noise(Job *j, Fault *f);

/* Fills everything of ret behind the header. */
void job_describe(const Job *j, WireJobReady *ret);

/* What the model gets in step `step`: call job_show() first, on rank 0's thread. All but compute hooks. */
void job_show(Job *j);
void job_step_input(const Job *j, uint32_t step, H3StepInput *ret);

/* What attention of step `step` is; NULL: dense. */
const H3Sparse *job_sparse(const Job *j, uint32_t step);

/* One rule for undisturbed and interrupted runs: what is committed is finite. So a state that is taken up
 * again can be checked like any input without refusing what an undisturbed run would have gone on from.
 * -EINVAL with InvalidTensor, `whose` says whose numbers they are. */
int job_check_finite(const Job *j, const char *whose, const Latents *l, Fault *f);

/* Puts what this step foresees into the output arena if it is the turn of one; whether it did. x: the step's input. */
bool job_preview(Job *j, uint32_t step, const H3StepInput *x);

/* Publishes the result of one more step: latents go to the next slot, then the commit word. -ECANCELED if
 * the job was closed meanwhile: then nothing was written. */
int job_commit(Job *j, const Latents *result);

/* JOB_CLOSE: a running step stops soon, and nothing is written to the output arena after this
 * returned. */
void job_close(Job *j);
