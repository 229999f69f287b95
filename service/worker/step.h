/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* One step of a job on this group's ranks: adapters merged if they are not yet, text once per prompt, the
 * forward pass, the sampler's update, the commit. Runs on rank 0's thread. */

#include <stdint.h>

#include "service/worker/backend.h"
#include "service/worker/job-context.h"
#include "service/worker/link.h"
#include "service/worker/merged-model.h"

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
        MergedCache merged; /* MODEL_CLOSE drops from it, on the link's thread */
} StepRunner;

void step_runner_done(StepRunner *s);

/* Runs step `step` of j, which must be the next one, and commits it; that of a MERGE sends what applies of
 * its adapters instead. 0: *ret_usec is the time it took. On failure f is filled and the job's state is as
 * it was: -ECANCELED (Cancelled), -ENOMEM (DoesNotFit), -EINVAL (also InvalidTensor: a result that is not
 * finite; InvalidModel: adapters), device errors. */
int step_run(StepRunner *s, LkContext *context, Job *j, uint32_t step, uint64_t *ret_usec, Fault *f);
