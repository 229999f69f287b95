/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* How long a step takes that is cut in this way, from what this service has run of the same model, compute type and kind of attention:
 * steps that were cut in the same way; else those of one rank, else of any others, and what travels (gpu-cost.h); before any, dense ones in
 * bf16 by the devices' rates. */

#include <stdbool.h>
#include <stdint.h>

typedef struct Job Job;

/* Its step (STEP, SAMPLE), by j->plan, took so long from its first block on. sparse: its attention was. rough: weights came to the devices
 * meanwhile, as in a worker's first step: what comes later goes before it. */
void step_pace_note(const Job *j, bool sparse, bool rough, uint64_t usec);

/* What one of j takes by j->plan, with the attention that it asks for; 0: not known. */
uint64_t step_pace_usec(const Job *j);
