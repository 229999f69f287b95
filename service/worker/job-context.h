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
#include "service/shared/wire.h"
#include "service/worker/arena-map.h"
#include "service/worker/model-table.h"
#include "service/worker/plan.h"

/* A video and an audio latent, f32, [24, T, H, W] and [32, 2, A]. */
typedef struct Latents {
        float *video, *audio;
} Latents;

typedef struct Job {
        atomic_uint n_ref;
        uint64_t id;
        uint32_t epoch;
        WireJobKind kind;
        H3Compute compute;
        ModelEntry *model; /* counted, as is arenas */
        ArenaPair *arenas;

        /* inputs, never changed after job_new() */
        uint16_t *text;                /* bf16 [text_rows, text_dim] */
        uint64_t text_rows, text_size; /* size in bytes */
        H3Layout *layout;
        uint64_t n_video, n_audio; /* elements */
        WireTensor video, audio;   /* shapes; offsets inside a slot */
        uint32_t steps;
        float *sigmas_video, *sigmas_audio; /* [steps + 1]; STEP: [1] */

        /* place of the results in the output arena */
        uint32_t n_slots;
        uint64_t commit_offset, slot_offset, slot_stride, output_used;

        /* written by rank 0's thread once steps run */
        Latents state;    /* after `committed` steps; STEP: the input */
        Latents next;     /* SAMPLE: made by a step, becomes the state */
        Latents velocity; /* of the step */
        uint32_t committed;
        uint64_t progress_usec; /* CLOCK_MONOTONIC of the last PROGRESS */

        /* written by the link thread while no step is pending */
        Plan *plan;         /* NULL before PLAN */
        Fault plan_fault;   /* why the last PLAN was refused: STEP answers with it */
        bool plan_admitted; /* by rank 0's thread: its memory was found */

        atomic_uint n_pending; /* steps queued or running */
        atomic_bool cancelled; /* set by the link thread, seen at the next block */

        pthread_mutex_t lock; /* of closed, and held while results are written */
        bool closed;          /* nothing of this job may reach the output arena any more */
} Job;

/* JOB_OPEN: checks everything, copies what is used. Only when nothing is wrong any more, state 0 and the
 * commit word are written (RESUME: the committed state is read, the commit word renewed). On failure f says
 * why and the output arena is as it was. -EINVAL, -ENOMEM, ... */
int job_new(const WireJobOpen *w, ModelEntry *model, ArenaPair *arenas, uint64_t epoch, Job **ret, Fault *f);
Job *job_ref(Job *j);
Job *job_unref(Job *j);

/* Fills everything of ret behind the header. */
void job_describe(const Job *j, WireJobReady *ret);

/* Publishes the result of one more step: latents go to the next slot, then the commit word. -ECANCELED if
 * the job was closed meanwhile: then nothing was written. */
int job_commit(Job *j, const Latents *result);

/* JOB_CLOSE: a running step stops at its next block, and nothing is written to the output arena after this
 * returned. */
void job_close(Job *j);
