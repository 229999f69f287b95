/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Which job's step runs next: first come, first served, steps of concurrent jobs alternating. The oldest
 * QUEUE_WINDOW jobs are concurrent: each holds copies of its inputs in the worker, so not more. The worker
 * has one thing to do at a time: a job to open or a step. Jobs of a user whose jobs crashed workers too often wait meanwhile,
 * outside of the window (Phase "crash-wait"). */

#include "service/latentd/manager.h"

#define QUEUE_WINDOW 8

int queue_new(Manager *m, Queue **ret);
Queue *queue_free(Queue *q); /* jobs stay; they are not in it any more */
void queue_add(Queue *q, Job *j); /* a free worker gets it at once; no job ends in here */
void queue_remove(Queue *q, Job *j); /* fine if it is not in */
bool queue_is_empty(const Queue *q);
uint32_t queue_position(const Queue *q, const Job *j); /* jobs before it; 0: running or not queued */
/* The worker is busy with this job and will answer: it cannot end before. */
bool queue_must_wait(const Queue *q, const Job *j);
/* Looks for work if the worker is free: from the loop, never from inside. Called after every change that does not see to it itself. */
void queue_dispatch(Queue *q);

/* The worker's news, by worker-link. What was not asked for or does not fit is a lie: worker_link_drop(). */
void queue_on_job_ready(Queue *q, const WireJobReady *m);
void queue_on_lora_notes(Queue *q, const WireLoraNotes *m);
void queue_on_progress(Queue *q, const WireProgress *m);
void queue_on_step_done(Queue *q, const WireStepDone *m);
void queue_on_job_error(Queue *q, const WireError *m);
/* A load of this user had the worker when that crashed, beside the job that runs, which is counted by itself: see CrashBudget=. Before
 * queue_on_worker_gone(). */
void queue_blame(Queue *q, uid_t uid);
/* For how long this user has to wait for that; 0: not. */
uint64_t queue_wait_usec(const Queue *q, uid_t uid);
/* The worker is gone (EOF seen or, if spawned, reaped): unfinished jobs go on from their commit word on the
 * next worker. reason for the log and, after the second death in one step, for Error.WorkerCrashed. */
void queue_on_worker_gone(Queue *q, const char *reason);
/* No worker can be started: all jobs end with NoWorker. */
void queue_on_no_worker(Queue *q, const Fault *f);
