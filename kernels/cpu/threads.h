/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* A fixed pool of threads that runs one numbered set of tasks at a time. The calling thread works too. Which
 * thread gets which task is left to chance: a task's result must not depend on it. */

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

/* Runs tasks 0..n_tasks-1 and returns when all are done. One caller at a time; not from inside a task. */
void threads_run(Threads *t, uint64_t n_tasks, ThreadsTask fn, void *arg);

#define THREADS_MAX 1024u
