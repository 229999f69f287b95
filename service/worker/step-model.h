/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Which model a job's steps run: its base, or one with the job's adapters merged. On the steps' thread; rank 0 merges. */

#include "service/worker/step.h"

/* Makes j->merged if the job has adapters: of the cache, or by a merge, of which a cancel on the way leaves
 * nothing. Nothing to do for strengths of 0 alone, but for a MERGE, which is
 * asked what applies of them. -ECANCELED, -EINVAL (InvalidModel), -ENOMEM (DoesNotFit, before anything is
 * merged), device errors. */
int step_choose_model(StepRunner *s, RankGroup *g, Job *j, Fault *f);

/* Of a MERGE: LORA_NOTES for every module of its adapters, those that apply first. */
void step_send_notes(StepRunner *s, const Job *j);
