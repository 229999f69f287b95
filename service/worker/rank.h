/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The rank threads of a worker and the steps that wait for them. Each rank has its own thread and device
 * context; rank 0 takes the steps, one after the other, in the order they came. */

#include <stdint.h>

#include "kernels/ops.h"
#include "service/shared/fault.h"
#include "service/worker/job-context.h"

#define STEPS_QUEUED_MAX 64

typedef struct RankGroup RankGroup;

/* Called on rank 0's thread. */
typedef void (*RankFunc)(void *userdata, LkContext *context, Job *j, uint32_t step);

/* Starts the threads; threads: CPU threads over all ranks, 0 = all. -EOPNOTSUPP (NotSupported): more ranks
 * than this version runs; what context_new() or pthread_create() returned, with f. */
int rank_group_new(const LkOps *ops, uint32_t ranks, uint32_t threads, RankFunc func, void *userdata,
        RankGroup **ret, Fault *f);

/* Waits for a running step; queued ones are dropped. */
RankGroup *rank_group_free(RankGroup *g);

uint32_t rank_group_size(const RankGroup *g);

/* Queues a step, takes a reference to the job. -ENOBUFS: STEPS_QUEUED_MAX wait already. */
int rank_group_queue(RankGroup *g, Job *j, uint32_t step);
