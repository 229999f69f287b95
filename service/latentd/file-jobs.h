/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Work that asks a file system (open, fstat, a header), each on a thread of its own, so that one that never answers holds
 * up nothing else. One that does not end in time is said to be stuck; it ends when it ends. Loop thread, except for the work. */

#include "service/latentd/pool.h"

typedef struct FileJobs FileJobs;

/* On the loop, at most once, before done: the work has not ended in time. What it uses must stay until done, which may
 * never come. */
typedef void (*FileJobStuck)(void *userdata);

int file_jobs_new(sd_event *event, uint64_t stall_usec, FileJobs **ret);

/* Waits for work that runs, at most the stall time, and calls the outstanding done functions, with -ECANCELED where the
 * work has not begun. Of stuck ones it calls none: they go with the process. */
FileJobs *file_jobs_free(FileJobs *j);

/* The time counts from when the work begins. Errors of starting a thread come as the result. */
int file_jobs_submit(FileJobs *j, PoolWork work, FileJobStuck stuck, PoolDone done, void *userdata);
