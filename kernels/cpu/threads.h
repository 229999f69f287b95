/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* A fixed pool of threads that runs one numbered set of tasks at a time. The calling thread works too. Which
 * thread gets which task is left to chance: a task's result must not depend on it. */

#include <stdbool.h>
#include <stdint.h>

typedef struct Threads Threads;

/* arg is the caller's; task counts from 0; thread is < threads_count() and no two tasks run at the same time
 * under the same number, so that it may index per-thread scratch. */
typedef void (*ThreadsTask)(void *arg, uint64_t task, uint32_t thread);

/* count: threads that work, the caller included (1 starts none); at most THREADS_MAX. Returns -EINVAL,
 * -ENOMEM or the error of thread creation. */
int threads_new(uint32_t count, Threads **ret);
Threads *threads_free(Threads *t); /* joins; accepts NULL, returns NULL */

uint32_t threads_count(const Threads *t);

/* From the caller of threads_run(), between two: whether tasks that were not begun shall stay so, asked before each
 * of them by all threads. Once true it stays true. NULL: never. */
typedef bool (*ThreadsStop)(void *userdata);
void threads_stop_when(Threads *t, ThreadsStop stop, void *userdata);
/* Its answer; a task that is long by itself asks on the way. */
bool threads_stopped(const Threads *t);

/* Runs tasks 0..n_tasks-1 and returns when all are done: 0; or when none is being done any more, with -ECANCELED, as
 * threads_stop_when() says. One caller at a time; not from inside a task. */
int threads_run(Threads *t, uint64_t n_tasks, ThreadsTask fn, void *arg);

#define THREADS_MAX 1024u
