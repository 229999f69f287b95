/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Whether a worker's JOB_READY can be true of the job that it was asked to open: everything later taken from
 * it (where to read the commit word, what the client is told to read) stays inside the job's output range.
 */

#include "service/latentd/job.h"

#define JOB_STEPS_MAX 1000
#define JOB_CHUNKS_MAX (1u << 20) /* steps of a Decode or EncodeMedia: chunks of 17 frames, films of days */
#define JOB_BLOCKS_MAX 4096
#define JOB_ROWS_MAX (UINT64_C(1) << 32)
#define JOB_MEMORY_MAX (UINT64_C(1) << 50)

/* How a slot of the job is laid out; of a STEP: as of a sampler without more than the streams. -EOVERFLOW. */
int job_slot_place(const WireJobOpen *q, WireSlot *ret);

/* NULL if all is well, else what is wrong (a literal). j->ready: of a job that goes on what was said before. */
const char *job_ready_check(const Job *j, const WireJobReady *m);
/* Of a coding job. */
const char *job_ready_check_coding(const Job *j, const WireJobReady *m);
