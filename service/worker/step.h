/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* One step of a job on this group's ranks: adapters merged if they are not yet, text once per prompt, AdaLN
 * rows once per schedule, the forward pass, the sampler's update, the commit. Runs on the steps' thread. */

#include <stdint.h>

#include "service/worker/backend.h"
#include "service/worker/encode-cache.h"
#include "service/worker/job-context.h"
#include "service/worker/link.h"
#include "service/worker/merged-model.h"
#include "service/worker/mod-cache.h"
#include "service/worker/residency.h"
#include "service/worker/rope-cache.h"
#include "service/worker/split.h"

/* The refined text of the last prompt: it depends on the model, the compute type and the text alone, and
 * jobs and steps of one prompt follow each other. */
typedef struct TextCache {
        uint64_t serial; /* of the model; 0: empty */
        H3Compute compute;
        uint16_t *text; /* own copy: the key */
        uint64_t size;
        void *refined;
} TextCache;

typedef struct StepRunner {
        const Backend *backend;
        Link *link; /* for PROGRESS and LORA_NOTES */
        TextCache text;
        RopeCache rope;
        MergedCache merged; /* MODEL_CLOSE drops from it, on the link's thread */
        ModCache tables;    /* likewise */
        EncodeCache encodes; /* likewise */
        Residency residency; /* its limits are set when the worker starts */
        /* A rank of the step does not end: f says which. A worker answers and ends its process; a test may
         * let go of the rank, then the step goes on waiting. */
        void (*on_stuck)(void *userdata, const Job *j, uint32_t step, const Fault *f);
        void *userdata;
        ExchangeHook hook;      /* for tests */
        void (*tile_hook)(void *userdata, uint32_t rank, uint32_t chunk, uint32_t tile); /* likewise: before each */
        void *tile_userdata;
        uint64_t deadline_usec; /* for tests; 0: from the size of the step */
} StepRunner;

typedef struct StepResult {
        uint64_t usec;            /* it took */
        uint64_t first_usec;      /* of a forward pass: SplitStep.first_usec */
        uint64_t exchanged_bytes; /* its ranks received from each other */
        uint64_t exposed_usec;    /* SplitStep.exposed_usec */
        uint64_t frames;          /* DECODE of video: finished so far */
        bool cached;              /* ENCODE: nothing was computed */
        bool preview;             /* SAMPLE: there is a new one */
        bool sparse;              /* its attention was */
        uint32_t tiles[RANKS_MAX]; /* coding of video: made by each rank since the step before */
        uint64_t blocks_seen[RANKS_MAX], blocks_all[RANKS_MAX]; /* then: H3StepHooks.on_seen of each rank */
} StepResult;

void step_runner_done(StepRunner *s);

/* Lets go of what is only kept to be quick: before a step is refused for want of memory. */
void step_runner_shrink(StepRunner *s);

/* More blocks than these are not told apart. */
#define STEP_BLOCKS_MAX 4096u

/* PROGRESS, unless one went out just now. Any thread: of several at once one does. */
void step_tell(StepRunner *s, Job *j, uint32_t step, uint32_t done, uint32_t total);

/* About what a step of a job that is only planned would take on so many ranks of equal share; 0: it cannot be counted. */
uint64_t step_planned_memory(const StepRunner *s, const Job *j, uint32_t ranks);

/* Runs step `step` of j, which must be the next one, and commits it; that of a MERGE sends what applies of
 * its adapters instead. On failure f is filled and the job's state is as it was: -ECANCELED (Cancelled),
 * -ENOMEM (DoesNotFit), -EINVAL (also InvalidTensor: a result that is not finite; InvalidModel: adapters),
 * -ETIMEDOUT, device errors (-EIO, -ENODEV). */
int step_run(StepRunner *s, RankGroup *g, Job *j, uint32_t step, StepResult *ret, Fault *f);
