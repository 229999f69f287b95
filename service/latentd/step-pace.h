/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* How long a step takes that is cut in this way: from steps of the same model, compute type, ranks, way of exchange and kind of
 * attention that this service has run. */

#include <stdbool.h>
#include <stdint.h>

typedef struct Job Job;

/* Its step (STEP, SAMPLE), by j->plan, took so long from its first block on. sparse: its attention was. */
void step_pace_note(const Job *j, bool sparse, uint64_t usec);

/* What one of j takes by j->plan, with the attention that it asks for; 0: no such step was run yet. */
uint64_t step_pace_usec(const Job *j);
