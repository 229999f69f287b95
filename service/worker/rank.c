/* SPDX-License-Identifier: Apache-2.0 */
#include "service/worker/rank.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>

#include "service/shared/cleanup.h"
#include "service/shared/slice.h"

/* The exchange between ranks is not there yet: one rank, whose thread takes steps from the queue. */
#define RANKS_SUPPORTED 1u

typedef struct Task {
        Job *job; /* counted */
        uint32_t step;
} Task;

typedef struct Rank {
        RankGroup *group;
        uint32_t index;
        pthread_t thread;
        bool running;       /* thread is there and must be joined */
        LkContext *context; /* made and freed by the thread */
} Rank;

struct RankGroup {
        const LkOps *ops;
        RankFunc func;
        void *userdata;
        uint32_t n_ranks, threads_per_rank;

        pthread_mutex_t lock; /* of all below */
        pthread_cond_t changed;
        Task tasks[STEPS_QUEUED_MAX]; /* ring */
        unsigned first, n_tasks;
        bool stop;
        uint32_t n_started; /* ranks that have a context or an error */
        int error;          /* first error of a start */

        Rank ranks[RANKS_SUPPORTED];
};

static bool next_task(RankGroup *g, Task *ret) {
        bool found;

        (void) pthread_mutex_lock(&g->lock);
        while (!g->stop && g->n_tasks == 0)
                (void) pthread_cond_wait(&g->changed, &g->lock);
        found = !g->stop;
        if (found) {
                *ret = g->tasks[g->first];
                g->first = (g->first + 1) % STEPS_QUEUED_MAX;
                g->n_tasks--;
        }
        (void) pthread_mutex_unlock(&g->lock);
        return found;
}

static void *rank_thread(void *userdata) {
        Rank *rank = userdata;
        RankGroup *g = rank->group;
        char name[16];
        Task task;
        int r;

        (void) snprintf(name, sizeof(name), "rank-%" PRIu32, rank->index);
        (void) prctl(PR_SET_NAME, name);
        (void) slice_make_long(); /* of the backend's threads too: they work, others pass on */

        r = g->ops->context_new(g->threads_per_rank, &rank->context);
        (void) pthread_mutex_lock(&g->lock);
        if (r < 0 && g->error == 0)
                g->error = r;
        g->n_started++;
        (void) pthread_cond_broadcast(&g->changed);
        (void) pthread_mutex_unlock(&g->lock);
        if (r < 0)
                return NULL;

        while (next_task(g, &task)) {
                g->func(g->userdata, rank->context, task.job, task.step);
                (void) job_unref(task.job);
        }

        rank->context = g->ops->context_free(rank->context);
        return NULL;
}

static int start_ranks(RankGroup *g) {
        int r;

        for (uint32_t i = 0; i < g->n_ranks; i++) {
                Rank *rank = &g->ranks[i];

                rank->group = g;
                rank->index = i;
                r = pthread_create(&rank->thread, NULL, rank_thread, rank);
                if (r != 0)
                        return -r;
                rank->running = true;
        }

        (void) pthread_mutex_lock(&g->lock);
        while (g->n_started < g->n_ranks)
                (void) pthread_cond_wait(&g->changed, &g->lock);
        r = g->error;
        (void) pthread_mutex_unlock(&g->lock);
        return r;
}

int rank_group_new(const LkOps *ops, uint32_t ranks, uint32_t threads, RankFunc func, void *userdata,
        RankGroup **ret, Fault *f) {
        RankGroup *g;
        int r;

        if (ranks == 0 || ranks > RANKS_SUPPORTED)
                return fault_set(f, -EOPNOTSUPP, FAULT_NOT_SUPPORTED,
                        "%" PRIu32
                        " ranks were asked for, this version of the worker runs %u: set WorkerRanks=%u.",
                        ranks, RANKS_SUPPORTED, RANKS_SUPPORTED);

        g = calloc(1, sizeof(*g));
        if (!g)
                return fault_set(f, -ENOMEM, FAULT_DOES_NOT_FIT, "There is no memory for the rank threads.");

        g->ops = ops;
        g->func = func;
        g->userdata = userdata;
        g->n_ranks = ranks;
        g->threads_per_rank = threads == 0 || threads >= ranks ? threads / ranks : 1;
        (void) pthread_mutex_init(&g->lock, NULL);
        (void) pthread_cond_init(&g->changed, NULL);

        r = start_ranks(g);
        if (r < 0) {
                (void) rank_group_free(g);
                return fault_set(
                        f, r, FAULT_INTERNAL, "The rank threads cannot be started: %s.", strerror(-r));
        }

        *ret = g;
        return 0;
}

RankGroup *rank_group_free(RankGroup *g) {
        if (!g)
                return NULL;

        (void) pthread_mutex_lock(&g->lock);
        g->stop = true;
        (void) pthread_cond_broadcast(&g->changed);
        (void) pthread_mutex_unlock(&g->lock);

        for (uint32_t i = 0; i < g->n_ranks; i++)
                if (g->ranks[i].running)
                        (void) pthread_join(g->ranks[i].thread, NULL);

        for (unsigned i = 0; i < g->n_tasks; i++)
                (void) job_unref(g->tasks[(g->first + i) % STEPS_QUEUED_MAX].job);

        (void) pthread_cond_destroy(&g->changed);
        (void) pthread_mutex_destroy(&g->lock);
        free(g);
        return NULL;
}

uint32_t rank_group_size(const RankGroup *g) {
        return g->n_ranks;
}

int rank_group_queue(RankGroup *g, Job *j, uint32_t step) {
        int r = 0;

        (void) pthread_mutex_lock(&g->lock);
        if (g->n_tasks >= STEPS_QUEUED_MAX)
                r = -ENOBUFS;
        else {
                g->tasks[(g->first + g->n_tasks++) % STEPS_QUEUED_MAX] =
                        (Task){.job = job_ref(j), .step = step};
        }
        (void) pthread_mutex_unlock(&g->lock);
        if (r == 0) /* not under the lock, which the woken thread would have to wait for */
                (void) pthread_cond_broadcast(&g->changed);
        return r;
}
