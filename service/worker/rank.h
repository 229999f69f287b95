/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The threads of a worker and the steps that wait for them. Each rank has its own thread and device context.
 * One more thread, the steps' own, takes the steps one after the other in the order they came, has the ranks
 * work on them and answers: it waits for every rank and hangs on none. */

#include <stdint.h>

#include "kernels/ops.h"
#include "service/shared/fault.h"
#include "service/worker/job-context.h"

#define STEPS_QUEUED_MAX 64
#define RANKS_MAX 64

typedef struct RankGroup RankGroup;

/* Called on the steps' thread. */
typedef void (*RankFunc)(void *userdata, RankGroup *g, Job *j, uint32_t step);

/* Where ranks compute. */
typedef struct RankPlaces {
        int (*bind)(uint32_t device); /* Backend.bind; NULL: there is one */
        const uint8_t *device_of;     /* [ranks], devices; looked at when the ranks start */
} RankPlaces;

/* Starts the threads; threads: CPU threads over all ranks, 0 = all; places: NULL: all of them on one device. -EINVAL: no ranks, or more
 * than RANKS_MAX; what context_new() or pthread_create() returned; with f. */
int rank_group_new(const LkOps *ops, uint32_t ranks, uint32_t threads, const RankPlaces *places, RankFunc func, void *userdata,
        RankGroup **ret, Fault *f);

/* Called on the steps' thread when it has nothing to do: after the last queued step, after a poke, and at the time
 * (CLOCK_MONOTONIC, usec; UINT64_MAX: none) that the call before returned. May give the ranks work. */
typedef uint64_t (*RankIdle)(void *userdata, RankGroup *g);

/* Before anything is queued. */
void rank_group_set_idle(RankGroup *g, RankIdle idle);

/* Any thread. */
void rank_group_poke(RankGroup *g);

/* Waits for a running step; queued ones are dropped. */
RankGroup *rank_group_free(RankGroup *g);

uint32_t rank_group_size(const RankGroup *g);

/* Queues a step, takes a reference to the job. -ENOBUFS: STEPS_QUEUED_MAX wait already. */
int rank_group_queue(RankGroup *g, Job *j, uint32_t step);

/* Work of a rank, on its thread. Returns 0 or an error. */
typedef int (*RankWork)(void *userdata, uint32_t rank, LkContext *context);

typedef struct RankOrder {
        uint64_t ranks; /* a bit for each that takes part */
        RankWork work;
        void *userdata;
        /* Once one of them has ended, the others must within this time, or a tenth of it after -ETIMEDOUT (they
         * were waited for). The first that has not is named to stuck(), after which they are waited for without
         * limit: a worker ends its process there. */
        uint64_t deadline_usec;
        void (*stuck)(void *userdata, uint32_t rank);

        /* Of rank_group_begin(), both on the thread that ends it: makes the ranks come to their ends soon; all of them have. */
        void (*stop)(void *userdata);
        void (*ended)(void *userdata);
} RankOrder;

/* Has the ranks do it and waits for all of them. If it is for a step, its job's cancel ends the backend's operations, too (stop_when()
 * of ops.h). Returns 0 or the error of one of them (which of several is
 * not said). From the steps' thread, or while no step is queued: one order at a time. */
int rank_group_run(RankGroup *g, const RankOrder *order);

/* Has the ranks begin it and returns: they go on behind the step. It ends by rank_group_end(), before any other order, with the group,
 * or, if all of them have come to their end, when no step is queued. Its job must be there until ended(). */
void rank_group_begin(RankGroup *g, const RankOrder *order);

/* Those of its ranks that have come to their end, or are about to return, begin anew. */
void rank_group_again(RankGroup *g, uint64_t ranks);

/* Stops what was begun, if anything was, and waits for its end. As rank_group_run(). */
int rank_group_end(RankGroup *g);
