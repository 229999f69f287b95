/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* A step's forward pass on the ranks of its plan: their threads, the exchange between them, the first error
 * of all of them. */

#include "service/worker/exchange.h"
#include "service/worker/rank.h"

typedef struct SplitStep {
        const LkOps *ops;
        const H3Model *model;
        const H3Plan *plan;
        const H3StepInput *in;
        ExchangeKind exchange;
        Staging *staging; /* kept for the next step; NULL: what is registered goes with this one */
        float *video, *audio; /* the velocities, written by all ranks */

        /* As H3StepHooks.on_block, on each rank's thread. */
        int (*on_block)(void *userdata, uint32_t rank, uint32_t done, uint32_t total);
        /* A rank does not end; f says so. As RankOrder.stuck. */
        void (*on_stuck)(void *userdata, const Fault *f);
        void *userdata;

        /* On each rank's thread, before the step: completes what the rank is given. NULL: nothing to do. */
        int (*on_begin)(void *userdata, uint32_t rank, H3Rank *to);

        /* When (CLOCK_MONOTONIC) the first kernel of block 0 could begin on the first rank; 0: not known. NULL: not wanted. */
        uint64_t *first_usec;

        uint64_t *exposed_usec; /* exchange_exposed(), if the hook measures. NULL: not wanted */
        /* Of a sparse step, [ranks of the plan]: pairs of blocks that were seen row by row, and all (H3StepHooks.on_seen); a rank
         * without any leaves them as they were. NULL: not wanted */
        uint64_t *blocks_seen, *blocks_all;

        ExchangeHook hook;      /* for tests */
        uint64_t deadline_usec; /* for tests; 0: from the size of the step */
} SplitStep;

/* Bytes of host memory that the step takes over all ranks, with what lies between them; the latter alone where the
 * ranks' own are on a device. */
int split_memory(const LkOps *ops, const H3Model *m, const H3Layout *l, const H3Plan *p, ExchangeKind exchange, H3Compute compute,
        uint64_t *ret);

/* How long a rank may be waited for that multiplies rows by weights: the sum of its rows times their bytes. */
uint64_t split_deadline(const LkOps *ops, double row_bytes);

/* Runs it. *ret_bytes: what the ranks received from each other, which is what the plan says, or the step has
 * failed. On failure the first real error, with f. */
int split_run(RankGroup *g, const SplitStep *s, uint64_t *ret_bytes, Fault *f);
