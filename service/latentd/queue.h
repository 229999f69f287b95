/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Which job's step runs next: first come, first served, steps of concurrent jobs alternating. */

#include "service/latentd/manager.h"

int queue_new(Manager *m, Queue **ret);
Queue *queue_free(Queue *q);
void queue_add(Queue *q, Job *j);
void queue_remove(Queue *q, Job *j); /* fine if it is not in */
uint32_t queue_position(const Queue *q, const Job *j); /* jobs before it; 0: running or not queued */
/* Looks for work if the worker is free. Called after every change. */
void queue_dispatch(Queue *q);

/* The worker's news, by worker-link. */
void queue_on_job_ready(Queue *q, const WireJobReady *m);
void queue_on_progress(Queue *q, const WireProgress *m);
void queue_on_step_done(Queue *q, const WireStepDone *m);
void queue_on_job_error(Queue *q, const WireError *m);
/* The worker is gone (EOF seen and, if spawned, reaped): unfinished jobs go on from their commit word on the next worker. reason for the log and,
 * after the second death in one step, for Error.WorkerCrashed. */
void queue_on_worker_gone(Queue *q, const char *reason);
/* No worker can be started: all jobs end with NoWorker. */
void queue_on_no_worker(Queue *q, const Fault *f);
