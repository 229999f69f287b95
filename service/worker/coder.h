/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Coding jobs (TOKENIZE, ENCODE, DECODE, ENCODE_MEDIA): what they have beside Job, and what all of them do
 * alike. They run on a conditioner or a VAE and need no plan. Results go straight to their place in the
 * output arena,
 *
 *     [commit word, padded to 64] [outputs, each at a multiple of 64] [slots]
 *
 * while the job is held there; the commit word says what of them counts. */

#include <stdbool.h>
#include <stdint.h>

#include "service/h3/weights.h"
#include "service/shared/safetensors.h"
#include "service/worker/job-context.h"
#include "service/worker/step.h"

typedef struct CoderClass {
        /* Whether a backend has the operations that it needs; NULL: every one has. */
        bool (*runs)(const LkOps *ops);
        /* On the link's thread, when the job is opened: copies and checks the inputs, fills the Coder and
         * j->steps; of outputs name, type and shape. f says what is wrong. */
        int (*open)(Job *j, const WireJobOpen *w, Fault *f);
        /* RESUME after at least one step: takes the committed slot up, if steps are left. NULL: there is
         * nothing in it. */
        int (*resume)(Job *j, Fault *f);
        /* On the steps' thread, before memory is asked for: commits a result that is there already and
         * returns 1, or returns 0. May be NULL. */
        int (*recall)(StepRunner *s, Job *j, StepResult *ret);
        /* On the steps' thread: makes step `step` and commits it (coder_hold(), coder_commit()). */
        int (*step)(StepRunner *s, RankGroup *g, Job *j, uint32_t step, StepResult *ret, Fault *f);
        void (*free)(void *work); /* accepts NULL */
} CoderClass;

extern const CoderClass coder_tokenize, coder_encode;           /* coder-text.c */
extern const CoderClass coder_decode_video, coder_encode_video; /* coder-video.c, coder-media.c */
extern const CoderClass coder_decode_audio, coder_encode_audio; /* coder-audio.c */

typedef struct Coder {
        const CoderClass *class;
        void *work;     /* the class's own; freed by its free() */
        uint32_t ranks; /* that take part (Job.ranks); at least 1 */
        ExchangeKind exchange; /* between them, of ENCODE */
        StType output_type;
        uint64_t owner; /* ENCODE: of the result */
        uint64_t rows;
        uint32_t blocks; /* of a step, as PROGRESS counts them */
        uint32_t n_outputs;
        WireOutput outputs[WIRE_OUTPUTS_MAX];
        uint64_t frames, ring_frames, step_frames; /* DECODE of video; else 0 */
        uint64_t slot_size;                        /* 0: no slots */
        uint64_t memory_bytes;                     /* that a step takes beside arenas and model */
        uint64_t device_bytes;                     /* of these, of the ranks' devices */
        const H3WeightsKind *weights;              /* what of the model it needs there; NULL: nothing */
        const void *model;                         /* of that kind */
        bool admitted;                             /* by the steps' thread: they were found */
        uint64_t frames_done;                      /* by the committed steps, when the job was opened */
} Coder;

/* The rest of job_new(): everything but the job's header. */
int coder_new(Job *j, const WireJobOpen *w, Fault *f);
Coder *coder_free(Coder *c); /* accepts NULL */
void coder_describe(const Job *j, WireJobReady *ret);

/* Adds an output; its bytes follow from type and shape. -EOVERFLOW. */
int coder_add_output(Coder *c, WireOutputName name, StType type, uint32_t n_dims, const uint64_t *shape);

/* Where output i lies. Writes need coder_hold(). */
void *coder_output(const Job *j, uint32_t i);
/* Slot of the state after `steps` steps. */
void *coder_slot(const Job *j, uint32_t steps);

/* Between the two nobody can close the job: JOB_CLOSE waits, so be quick, and look at j->cancelled on the
 * way. -ECANCELED: it is closed already, and was not held. */
int coder_hold(Job *j);
/* Lets it go; committed: one more step counts from now on. */
void coder_release(Job *j, bool committed);

/* How many ranks take memory at a time where so many pieces can be made at once: with memory of their own devices all of them, since
 * each takes its part of that whoever gets a piece. */
uint64_t coder_takers(const Job *j, uint64_t pieces);

/* One step of a coding job: asks for memory, makes it. As step_run(). */
int coder_step(StepRunner *s, RankGroup *g, Job *j, uint32_t step, StepResult *ret, Fault *f);
