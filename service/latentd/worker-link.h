/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The broker's end of a worker: start (socket unit or spawn), Hello, credits, sending, death. One worker at
 * a time in this version. */

#include "service/latentd/manager.h"
#include "service/latentd/plan.h"

/* f == NULL: the worker holds the model and *info says what it is. Called on the loop, exactly once per
 * request. */
typedef void (*WorkerModelFn)(void *userdata, Model *model, const WireModelReady *info, const Fault *f);

int worker_link_new(Manager *m, WorkerLink **ret);
/* Tells it to die, waits (bounded, 1 s, then SIGKILL if spawned). */
WorkerLink *worker_link_free(WorkerLink *w);

/* Starts a worker if none runs (asynchronous). Repeated quick failures: exponential delay up to 10 s; after
 * 3 in a row manager_set_state() degraded and queue_on_no_worker(). */
void worker_link_want(WorkerLink *w);
bool worker_link_is_ready(const WorkerLink *w);
uint64_t worker_link_epoch(const WorkerLink *w);
uint32_t worker_link_ranks(const WorkerLink *w); /* of the last worker that was welcomed; 0 before */
/* Of those the ones that a job of such a session may run on: bits, gpu_set_ranks(); 0 before, or if there are none. */
uint64_t worker_link_ranks_for(const WorkerLink *w, WireJobKind kind, const PlanWishes *split);
uint64_t worker_link_starts(const WorkerLink *w);
const char *worker_link_no_device(const WorkerLink *w); /* why there is no GPU worker: "" there is, or nobody asked for one */
const char *worker_link_notes(const WorkerLink *w);   /* WireHello.notes, and what latentd.conf left out */
const char *worker_link_kernels(const WorkerLink *w);   /* as WireHello */
const WireMemory *worker_link_memory(const WorkerLink *w); /* zeros without a worker */
WireDeviceModel worker_link_device_model(const WorkerLink *w, uint64_t model); /* zeros if nothing of it is on a device */
const WireHello *worker_link_hello(const WorkerLink *w); /* of the last worker that has devices; NULL before */
const char *worker_link_numerics_id(const WorkerLink *w); /* of the last worker that said Hello; "" before */

/* Ends a worker that has nothing to do, so that it gives its devices back; the next job starts another.
 * -EBUSY: it has; 0: done or none runs. */
int worker_link_release(WorkerLink *w);

/* A worker's fault as we may show it: with a name of the list and some text. *ret is empty before. */
void worker_link_fault(const Fault *from, Fault *ret);

/* This worker cannot be trusted any more: it is ended like one that crashed. what: goes behind "the worker
 * ". */
void worker_link_drop(WorkerLink *w, const char *what);

/* Opens the model in the worker (now or when it runs) and calls fn, never from inside; a worker's death
 * meanwhile means another try, once. */
int worker_link_open_model(WorkerLink *w, Model *model, WorkerModelFn fn, void *userdata);
void worker_link_forget_model(
        WorkerLink *w, Model *model); /* MODEL_CLOSE; drops pending requests without calling fn */
void worker_link_forget_session(WorkerLink *w, Session *s); /* ARENA_CLOSE */

/* Makes sure that this worker has the job's model, adapters and arenas, then JOB_OPEN (resume: flag RESUME). Answer:
 * queue_on_job_ready or _error, never from inside. with_step: j->ready is what the answer will be (same rows); if the worker has the
 * models the first step is asked for too, by JOB_RUN, and the answer is 1, else 0. -ENOTCONN if it is not ready. */
int worker_link_open_job(WorkerLink *w, Job *j, bool resume, bool with_step);
int worker_link_step(
        WorkerLink *w, Job *j, uint32_t step); /* PLAN first where the worker has none for a STEP or SAMPLE */
/* How the job, which the worker has opened, would be split: its plan (of those that have one) and plan_ranks. -ENODEV, -EINVAL. */
int worker_link_plan_job(WorkerLink *w, Job *j);
void worker_link_close_job(WorkerLink *w, Job *j);
void worker_link_cancel(WorkerLink *w, Job *j);
/* What the worker keeps without need goes. w may be NULL; nothing happens without a worker. */
void worker_link_trim(WorkerLink *w);
