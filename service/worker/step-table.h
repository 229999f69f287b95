/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The modulation rows of a job's whole schedule, made at its first step (mod-cache.h). The bits are those of
 * steps without. On the steps' thread; rank 0 makes them. */

#include "service/worker/step.h"

/* A counted reference to a table that covers step `step` of j, whose input is `in`: of the cache, or made now
 * if the job's schedule (a SAMPLE's own, one that a STEP announces) has more steps to come and there is
 * memory to spare; *ret is NULL where it goes without. A table is optional memory: not having it is no
 * error. -ECANCELED, device errors. */
int step_choose_table(
        StepRunner *s, RankGroup *g, Job *j, uint32_t step, const H3StepInput *in, ModTable **ret, Fault *f);
