/* SPDX-License-Identifier: Apache-2.0 */
/* The pool. Workers sleep on a condition variable between jobs. A job is open from its announcement until
 * the caller finds no task left; a worker that wakes up later finds it closed and sleeps on, so the caller
 * never waits for a thread that did not start. */

#include "kernels/cpu/threads.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>

typedef struct Worker {
        Threads *pool;
        pthread_t thread;
        uint32_t index; /* from 1: 0 is the caller */
} Worker;

struct Threads {
        uint32_t count;   /* threads that work, the caller included */
        uint32_t started; /* entries of workers[] to be joined */

        pthread_mutex_t lock;
        pthread_cond_t wake; /* a job was opened, or quit */
        pthread_cond_t idle; /* active reached 0 */

        /* under lock */
        bool quit;
        uint64_t job; /* number of the open job, 0: none */
        uint64_t jobs_seen;
        uint32_t active; /* workers inside the open job */
        ThreadsTask fn;
        void *arg;
        uint64_t n_tasks;

        _Atomic uint64_t next; /* first task that nobody took */

        ThreadsStop stop; /* written by the caller while no job is open */
        void *stop_userdata;

        Worker workers[];
};

static void run_tasks(Threads *t, ThreadsTask fn, void *arg, uint64_t n_tasks, uint32_t index) {
        for (;;) {
                uint64_t task = atomic_fetch_add_explicit(&t->next, 1, memory_order_relaxed);

                if (task >= n_tasks || threads_stopped(t))
                        return;

                fn(arg, task, index);
        }
}

static void *worker_main(void *userdata) {
        Worker *w = userdata;
        Threads *t = w->pool;
        uint64_t done = 0; /* the last job this thread took part in */

        (void) pthread_mutex_lock(&t->lock);

        for (;;) {
                ThreadsTask fn;
                void *arg;
                uint64_t n;

                while (!t->quit && (t->job == 0 || t->job == done))
                        (void) pthread_cond_wait(&t->wake, &t->lock);

                if (t->quit)
                        break;

                done = t->job;
                fn = t->fn;
                arg = t->arg;
                n = t->n_tasks;
                t->active++;
                (void) pthread_mutex_unlock(&t->lock);

                run_tasks(t, fn, arg, n, w->index);

                (void) pthread_mutex_lock(&t->lock);
                if (--t->active == 0)
                        (void) pthread_cond_signal(&t->idle);
        }

        (void) pthread_mutex_unlock(&t->lock);
        return NULL;
}

/* Signals belong to the program's own threads. */
static int start_workers(Threads *t) {
        sigset_t all, old;
        int r = 0;

        (void) sigfillset(&all);
        (void) pthread_sigmask(SIG_SETMASK, &all, &old);

        for (uint32_t i = 0; i + 1 < t->count && r == 0; i++) {
                t->workers[i] = (Worker){.pool = t, .index = i + 1};

                r = -pthread_create(&t->workers[i].thread, NULL, worker_main, &t->workers[i]);
                if (r == 0)
                        t->started++;
        }

        (void) pthread_sigmask(SIG_SETMASK, &old, NULL);
        return r;
}

int threads_new(uint32_t count, Threads **ret) {
        Threads *t;
        int r;

        if (count == 0 || count > THREADS_MAX)
                return -EINVAL;

        t = calloc(1, sizeof(*t) + (count - 1) * sizeof(Worker));
        if (!t)
                return -ENOMEM;

        t->count = count;
        (void) pthread_mutex_init(&t->lock, NULL); /* with default attributes these cannot fail on Linux */
        (void) pthread_cond_init(&t->wake, NULL);
        (void) pthread_cond_init(&t->idle, NULL);

        r = start_workers(t);
        if (r < 0) {
                (void) threads_free(t);
                return r;
        }

        *ret = t;
        return 0;
}

Threads *threads_free(Threads *t) {
        if (!t)
                return NULL;

        (void) pthread_mutex_lock(&t->lock);
        t->quit = true;
        (void) pthread_cond_broadcast(&t->wake);
        (void) pthread_mutex_unlock(&t->lock);

        for (uint32_t i = 0; i < t->started; i++)
                (void) pthread_join(t->workers[i].thread, NULL);

        (void) pthread_cond_destroy(&t->idle);
        (void) pthread_cond_destroy(&t->wake);
        (void) pthread_mutex_destroy(&t->lock);
        free(t);
        return NULL;
}

uint32_t threads_count(const Threads *t) {
        return t->count;
}

void threads_stop_when(Threads *t, ThreadsStop stop, void *userdata) {
        t->stop = stop;
        t->stop_userdata = userdata;
}

bool threads_stopped(const Threads *t) {
        return t->stop && t->stop(t->stop_userdata);
}

/* A thread that stopped has seen it before the caller looks: so no task is missing of what is said to be done. */
static int result_of_run(const Threads *t) {
        return threads_stopped(t) ? -ECANCELED : 0;
}

int threads_run(Threads *t, uint64_t n_tasks, ThreadsTask fn, void *arg) {
        if (t->count == 1 || n_tasks <= 1) {
                for (uint64_t i = 0; i < n_tasks && !threads_stopped(t); i++)
                        fn(arg, i, 0);
                return result_of_run(t);
        }

        (void) pthread_mutex_lock(&t->lock);
        t->fn = fn;
        t->arg = arg;
        t->n_tasks = n_tasks;
        atomic_store_explicit(&t->next, 0, memory_order_relaxed);
        t->job = ++t->jobs_seen;
        (void) pthread_cond_broadcast(&t->wake);
        (void) pthread_mutex_unlock(&t->lock);

        run_tasks(t, fn, arg, n_tasks, 0);

        /* Workers leave under the lock: what they wrote is visible from here on. */
        (void) pthread_mutex_lock(&t->lock);
        t->job = 0;
        while (t->active > 0)
                (void) pthread_cond_wait(&t->idle, &t->lock);
        (void) pthread_mutex_unlock(&t->lock);
        return result_of_run(t);
}
