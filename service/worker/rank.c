/* SPDX-License-Identifier: Apache-2.0 */
#include "service/worker/rank.h"

#include <inttypes.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

#include "service/shared/cleanup.h"
#include "service/shared/clock.h"
#include "service/shared/slice.h"

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
        RankPlaces places; /* bind NULL: one device */
        pthread_t steps;
        bool steps_running;

        uint64_t idle_usec; /* the steps' thread's: when idle() is called next */

        pthread_mutex_t lock; /* of all below */
        pthread_cond_t changed;
        RankIdle idle; /* NULL: none */
        bool poked;
        Job *running; /* whose step runs; NULL: none */
        Task tasks[STEPS_QUEUED_MAX]; /* ring */
        unsigned first, n_tasks;
        bool stop;          /* no more steps */
        bool stop_ranks;    /* no more orders: the steps' thread has ended */
        uint32_t n_started; /* ranks that have a context or an error */
        int error;          /* first error of a start */

        RankOrder order;
        Job *order_job;         /* whose step it is of, which is there until it is done; NULL: of none */
        uint64_t pending, busy; /* ranks that shall begin, that have not ended */
        bool behind;            /* it goes on behind its step */
        pthread_t beginner;     /* the thread that began it */
        int result;

        Rank ranks[RANKS_MAX];
};

/* Under the lock, which is given up meanwhile. */
static void wait_for_task(RankGroup *g) {
        struct timespec until = {.tv_sec = (time_t) (g->idle_usec / 1000000), .tv_nsec = (long) (g->idle_usec % 1000000) * 1000};

        if (g->behind && g->busy == 0 && pthread_equal(g->beginner, pthread_self())) {
                (void) pthread_mutex_unlock(&g->lock);
                (void) rank_group_end(g);
                (void) pthread_mutex_lock(&g->lock);
        } else if (g->idle && (g->poked || g->idle_usec <= clock_usec())) {
                g->poked = false;
                (void) pthread_mutex_unlock(&g->lock);
                g->idle_usec = g->idle(g->userdata, g);
                (void) pthread_mutex_lock(&g->lock);
        } else if (g->idle && g->idle_usec != UINT64_MAX)
                (void) pthread_cond_timedwait(&g->changed, &g->lock, &until);
        else
                (void) pthread_cond_wait(&g->changed, &g->lock);
}

static bool next_task(RankGroup *g, Task *ret) {
        bool found;

        (void) pthread_mutex_lock(&g->lock);
        g->running = NULL;
        while (!g->stop && g->n_tasks == 0)
                wait_for_task(g);
        found = !g->stop;
        if (found) {
                *ret = g->tasks[g->first];
                g->first = (g->first + 1) % STEPS_QUEUED_MAX;
                g->n_tasks--;
                g->running = ret->job;
                g->poked = true;
        }
        (void) pthread_mutex_unlock(&g->lock);
        return found;
}

static void *steps_thread(void *userdata) {
        RankGroup *g = userdata;
        Task task;

        (void) prctl(PR_SET_NAME, "steps");
        while (next_task(g, &task)) {
                g->func(g->userdata, g, task.job, task.step);
                (void) job_unref(task.job);
        }
        return NULL;
}

static bool next_order(RankGroup *g, uint64_t bit, RankOrder *ret, Job **ret_job) {
        bool found;

        (void) pthread_mutex_lock(&g->lock);
        while (!g->stop_ranks && !(g->pending & bit))
                (void) pthread_cond_wait(&g->changed, &g->lock);
        found = g->pending & bit;
        g->pending &= ~bit;
        *ret = g->order;
        *ret_job = g->order_job;
        (void) pthread_mutex_unlock(&g->lock);
        return found;
}

static void *rank_thread(void *userdata) {
        Rank *rank = userdata;
        RankGroup *g = rank->group;
        uint64_t bit = UINT64_C(1) << rank->index;
        RankOrder order;
        Job *job;
        char name[16];
        int r;

        (void) snprintf(name, sizeof(name), "rank-%" PRIu32, rank->index);
        (void) prctl(PR_SET_NAME, name);
        if (g->ops->host_weights) /* of the backend's threads too: they work, others pass on, as does a rank of a device */
                (void) slice_make_long();

        r = g->places.bind ? g->places.bind(g->places.device_of[rank->index]) : 0;
        if (r >= 0)
                r = g->ops->context_new(g->threads_per_rank, &rank->context);
        (void) pthread_mutex_lock(&g->lock);
        if (r < 0 && g->error == 0)
                g->error = r;
        g->n_started++;
        (void) pthread_cond_broadcast(&g->changed);
        (void) pthread_mutex_unlock(&g->lock);
        if (r < 0)
                return NULL;

        while (next_order(g, bit, &order, &job)) {
                if (g->ops->stop_when)
                        g->ops->stop_when(rank->context, job ? job_is_cancelled : NULL, job);
                r = order.work(order.userdata, rank->index, rank->context);
                (void) pthread_mutex_lock(&g->lock);
                if (r < 0 && g->result == 0)
                        g->result = r;
                if (!(g->pending & bit)) /* else it begins again */
                        g->busy &= ~bit;
                (void) pthread_cond_broadcast(&g->changed);
                (void) pthread_mutex_unlock(&g->lock);
        }

        rank->context = g->ops->context_free(rank->context);
        return NULL;
}

static int start_threads(RankGroup *g) {
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
        if (r < 0)
                return r;

        r = pthread_create(&g->steps, NULL, steps_thread, g);
        g->steps_running = r == 0;
        return -r;
}

static int init_locks(RankGroup *g) {
        pthread_condattr_t attributes;
        int r;

        (void) pthread_mutex_init(&g->lock, NULL);
        r = pthread_condattr_init(&attributes);
        if (r == 0) {
                (void) pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
                r = pthread_cond_init(&g->changed, &attributes);
                (void) pthread_condattr_destroy(&attributes);
        }
        return -r;
}

/* 0: all of the CPUs that we may use, shared among the ranks. */
static uint32_t threads_of_rank(uint32_t ranks, uint32_t threads) {
        cpu_set_t cpus;

        if (ranks == 1)
                return threads;
        if (threads == 0 && sched_getaffinity(0, sizeof(cpus), &cpus) == 0)
                threads = (uint32_t) CPU_COUNT(&cpus);
        return threads >= ranks ? threads / ranks : 1;
}

int rank_group_new(const LkOps *ops, uint32_t ranks, uint32_t threads, const RankPlaces *places, RankFunc func, void *userdata,
        RankGroup **ret, Fault *f) {
        RankGroup *g;
        int r;

        if (ranks == 0 || ranks > RANKS_MAX)
                return fault_set(f, -EINVAL, FAULT_INTERNAL,
                        "%" PRIu32 " ranks were asked for, expected 1 to %d.", ranks, RANKS_MAX);

        g = calloc(1, sizeof(*g));
        if (!g)
                return fault_set(f, -ENOMEM, FAULT_DOES_NOT_FIT, "There is no memory for the rank threads.");

        g->ops = ops;
        g->func = func;
        g->userdata = userdata;
        g->n_ranks = ranks;
        g->places = places ? *places : (RankPlaces){};
        g->idle_usec = UINT64_MAX;
        g->threads_per_rank = threads_of_rank(ranks, threads);
        r = init_locks(g);
        if (r >= 0)
                r = start_threads(g);
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

        /* Its last step needs the ranks until it ends. */
        if (g->steps_running)
                (void) pthread_join(g->steps, NULL);

        (void) rank_group_end(g);
        (void) pthread_mutex_lock(&g->lock);
        g->stop_ranks = true;
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

void rank_group_set_idle(RankGroup *g, RankIdle idle) {
        (void) pthread_mutex_lock(&g->lock);
        g->idle = idle;
        (void) pthread_mutex_unlock(&g->lock);
}

void rank_group_poke(RankGroup *g) {
        (void) pthread_mutex_lock(&g->lock);
        g->poked = true;
        (void) pthread_mutex_unlock(&g->lock);
        (void) pthread_cond_broadcast(&g->changed);
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

/* Under the lock, which is given up while waiting. False: the deadline is over. */
static bool wait_for_ranks(RankGroup *g, const RankOrder *order) {
        struct timespec until;
        bool late = false;

        while (g->busy == order->ranks)
                (void) pthread_cond_wait(&g->changed, &g->lock);
        until = clock_after(order->deadline_usec);
        while (g->busy != 0) {
                if (g->result == -ETIMEDOUT && !late) { /* the others have waited for it already */
                        late = true;
                        until = clock_after(order->deadline_usec / 10);
                }
                if (pthread_cond_timedwait(&g->changed, &g->lock, &until) == ETIMEDOUT)
                        return g->busy == 0;
        }
        return true;
}

static void begin(RankGroup *g, const RankOrder *order, bool behind) {
        (void) pthread_mutex_lock(&g->lock);
        g->order = *order;
        g->order_job = g->running;
        g->behind = behind;
        g->beginner = pthread_self();
        g->result = 0;
        g->pending = g->busy = order->ranks;
        (void) pthread_cond_broadcast(&g->changed);
        (void) pthread_mutex_unlock(&g->lock);
}

static int wait_for_end(RankGroup *g, const RankOrder *order) {
        uint32_t first;
        int r;

        (void) pthread_mutex_lock(&g->lock);
        if (!wait_for_ranks(g, order)) {
                first = (uint32_t) __builtin_ctzll(g->busy);
                (void) pthread_mutex_unlock(&g->lock);
                order->stuck(order->userdata, first);
                (void) pthread_mutex_lock(&g->lock);
                while (g->busy != 0)
                        (void) pthread_cond_wait(&g->changed, &g->lock);
        }
        r = g->result;
        (void) pthread_mutex_unlock(&g->lock);
        return r;
}

int rank_group_run(RankGroup *g, const RankOrder *order) {
        (void) rank_group_end(g);
        if (order->ranks == 0)
                return 0;

        begin(g, order, false);
        return wait_for_end(g, order);
}

void rank_group_begin(RankGroup *g, const RankOrder *order) {
        (void) rank_group_end(g);
        begin(g, order, true);
}

void rank_group_again(RankGroup *g, uint64_t ranks) {
        (void) pthread_mutex_lock(&g->lock);
        g->pending |= ranks;
        g->busy |= ranks;
        (void) pthread_cond_broadcast(&g->changed);
        (void) pthread_mutex_unlock(&g->lock);
}

int rank_group_end(RankGroup *g) {
        RankOrder order;
        bool behind;
        int r;

        (void) pthread_mutex_lock(&g->lock);
        order = g->order;
        behind = STEAL(g->behind, false);
        (void) pthread_mutex_unlock(&g->lock);
        if (!behind)
                return 0;

        order.stop(order.userdata);
        r = wait_for_end(g, &order);
        order.ended(order.userdata);
        return r;
}
