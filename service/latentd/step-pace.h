/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* How long a step takes that is cut in this way: from steps of the same model, compute type, ranks and way of exchange that this
 * service has run. */

#include <stdint.h>

typedef struct Job Job;

/* Its step (STEP, SAMPLE), by j->plan, took so long from its first block on. */
void step_pace_note(const Job *j, uint64_t usec);

/* What one of j takes by j->plan; 0: no such step was run yet. */
uint64_t step_pace_usec(const Job *j);
