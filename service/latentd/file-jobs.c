/* SPDX-License-Identifier: Apache-2.0 */
#include "service/latentd/file-jobs.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/eventfd.h>
#include <sys/queue.h>
#include <time.h>

#include "service/shared/cleanup.h"
#include "service/shared/clock.h"

#define RUNNING_MAX 8u /* stuck ones do not count */

typedef struct FileJob {
        FileJobs *jobs;
        PoolWork work;
        FileJobStuck stuck;
        PoolDone done;
        void *userdata;
        uint64_t started_usec;
        bool is_stuck;
        int result;    /* under the lock, with has_ended */
        bool has_ended;
        TAILQ_ENTRY(FileJob) entry;
} FileJob;

typedef TAILQ_HEAD(FileJobList, FileJob) FileJobList;

struct FileJobs {
        pthread_mutex_t lock; /* result and has_ended of the running and stuck ones */
        pthread_cond_t ended;
        int event_fd; /* counts up when one has ended */

        /* loop */
        sd_event_source *source, *timer;
        uint64_t stall_usec;
        FileJobList queued, running, stuck;
        unsigned n_running;
        bool closing; /* nothing begins any more */
};

DEFINE_CLEANUP(FileJobs *, file_jobs_free)

static void *job_thread(void *userdata) {
        FileJob *x = userdata;
        FileJobs *j = x->jobs;
        int result = x->work(x->userdata);
        uint64_t one = 1;

        (void) pthread_mutex_lock(&j->lock);
        x->result = result;
        x->has_ended = true;
        (void) pthread_cond_broadcast(&j->ended);
        /* Under the lock: who finds the job ended may free everything behind it. Cannot fail: the counter would have to reach 2^64 - 1. */
        if (write(j->event_fd, &one, sizeof(one)) < 0)
                result = -errno;
        (void) pthread_mutex_unlock(&j->lock);
        return NULL;
}

static void arm_timer(FileJobs *j) {
        uint64_t period = j->stall_usec / 4 < 1000000 ? j->stall_usec / 4 : 1000000; /* coarse is enough */

        (void) sd_event_source_set_time(j->timer, clock_usec() + period);
        (void) sd_event_source_set_enabled(j->timer, TAILQ_EMPTY(&j->running) ? SD_EVENT_OFF : SD_EVENT_ONESHOT);
}

static int start_thread(FileJob *x) {
        sigset_t all, before;
        pthread_attr_t attr;
        pthread_t thread;
        int r;

        r = pthread_attr_init(&attr);
        if (r != 0)
                return -r;
        (void) pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
        (void) sigfillset(&all); /* signals belong to the loop */
        (void) pthread_sigmask(SIG_SETMASK, &all, &before);
        r = pthread_create(&thread, &attr, job_thread, x);
        (void) pthread_sigmask(SIG_SETMASK, &before, NULL);
        (void) pthread_attr_destroy(&attr);
        return -r;
}

static void start_jobs(FileJobs *j) {
        FileJob *x;
        int r;

        while (!j->closing && j->n_running < RUNNING_MAX && (x = TAILQ_FIRST(&j->queued))) {
                TAILQ_REMOVE(&j->queued, x, entry);
                TAILQ_INSERT_TAIL(&j->running, x, entry);
                j->n_running++;
                x->started_usec = clock_usec();
                r = start_thread(x);
                if (r < 0) {
                        uint64_t one = 1;

                        x->result = r; /* no other thread has it */
                        x->has_ended = true;
                        if (write(j->event_fd, &one, sizeof(one)) < 0)
                                return;
                }
        }
        arm_timer(j);
}

/* Takes those that have ended out of the list. */
static void take_ended(FileJobs *j, FileJobList *list, FileJobList *ret) {
        FileJob *x, *next;

        (void) pthread_mutex_lock(&j->lock);
        for (x = TAILQ_FIRST(list); x; x = next) {
                next = TAILQ_NEXT(x, entry);
                if (x->has_ended) {
                        TAILQ_REMOVE(list, x, entry);
                        TAILQ_INSERT_TAIL(ret, x, entry);
                }
        }
        (void) pthread_mutex_unlock(&j->lock);
}

/* What done functions submit begins on the next turn of the loop. */
static void call_done(FileJobs *j, bool with_stuck) {
        FileJobList ended = TAILQ_HEAD_INITIALIZER(ended);
        FileJob *x;

        take_ended(j, &j->running, &ended);
        if (with_stuck)
                take_ended(j, &j->stuck, &ended);
        while ((x = TAILQ_FIRST(&ended))) {
                TAILQ_REMOVE(&ended, x, entry);
                if (!x->is_stuck)
                        j->n_running--;
                x->done(x->userdata, x->result);
                free(x);
        }
}

static int on_ended(sd_event_source *s, int fd, uint32_t revents, void *userdata) {
        FileJobs *j = userdata;
        uint64_t n;

        if (read(fd, &n, sizeof(n)) < 0 && errno != EAGAIN)
                return -errno;

        call_done(j, true);
        start_jobs(j);
        return 0;
}

static void mark_stuck(FileJobs *j) {
        uint64_t now = clock_usec();
        FileJob *x, *next;

        for (x = TAILQ_FIRST(&j->running); x; x = next) {
                bool ended;

                next = TAILQ_NEXT(x, entry);
                (void) pthread_mutex_lock(&j->lock);
                ended = x->has_ended;
                (void) pthread_mutex_unlock(&j->lock);
                if (ended || x->started_usec + j->stall_usec > now)
                        continue;

                TAILQ_REMOVE(&j->running, x, entry);
                TAILQ_INSERT_TAIL(&j->stuck, x, entry);
                j->n_running--;
                x->is_stuck = true;
                x->stuck(x->userdata);
        }
}

static int on_timer(sd_event_source *s, uint64_t usec, void *userdata) {
        FileJobs *j = userdata;

        mark_stuck(j);
        start_jobs(j);
        return 0;
}

int file_jobs_new(sd_event *event, uint64_t stall_usec, FileJobs **ret) {
        CLEANUP(file_jobs_freep) FileJobs *j = NULL;
        pthread_condattr_t attr;
        int r;

        j = calloc(1, sizeof(*j));
        if (!j)
                return -ENOMEM;

        j->stall_usec = stall_usec;
        TAILQ_INIT(&j->queued);
        TAILQ_INIT(&j->running);
        TAILQ_INIT(&j->stuck);
        (void) pthread_mutex_init(&j->lock, NULL);
        (void) pthread_condattr_init(&attr);
        (void) pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
        (void) pthread_cond_init(&j->ended, &attr);
        (void) pthread_condattr_destroy(&attr);

        j->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        if (j->event_fd < 0)
                return -errno;

        r = sd_event_add_io(event, &j->source, j->event_fd, EPOLLIN, on_ended, j);
        if (r < 0)
                return r;
        r = sd_event_add_time(event, &j->timer, CLOCK_MONOTONIC, 0, 1000, on_timer, j);
        if (r < 0)
                return r;
        r = sd_event_source_set_enabled(j->timer, SD_EVENT_OFF);
        if (r < 0)
                return r;

        *ret = STEAL_PTR(j);
        return 0;
}

static void wait_for(FileJobs *j, const FileJob *x) {
        uint64_t until = x->started_usec + j->stall_usec;
        struct timespec t = {.tv_sec = (time_t) (until / 1000000), .tv_nsec = (long) (until % 1000000 * 1000)};

        (void) pthread_mutex_lock(&j->lock);
        while (!x->has_ended && pthread_cond_timedwait(&j->ended, &j->lock, &t) == 0)
                ;
        (void) pthread_mutex_unlock(&j->lock);
}

static void end_jobs(FileJobs *j) {
        FileJob *x;

        /* Done functions may submit more. */
        for (;;) {
                while ((x = TAILQ_FIRST(&j->queued))) {
                        TAILQ_REMOVE(&j->queued, x, entry);
                        x->done(x->userdata, -ECANCELED);
                        free(x);
                }

                x = TAILQ_FIRST(&j->running);
                if (!x)
                        return;
                wait_for(j, x);
                call_done(j, false);
                mark_stuck(j);
        }
}

FileJobs *file_jobs_free(FileJobs *j) {
        if (!j)
                return NULL;

        j->closing = true;
        end_jobs(j);
        (void) sd_event_source_disable_unref(j->source);
        (void) sd_event_source_disable_unref(j->timer);
        if (!TAILQ_EMPTY(&j->stuck))
                return NULL; /* their threads may come back any time */

        if (j->event_fd >= 0)
                (void) close(j->event_fd);
        (void) pthread_cond_destroy(&j->ended);
        (void) pthread_mutex_destroy(&j->lock);
        free(j);
        return NULL;
}

int file_jobs_submit(FileJobs *j, PoolWork work, FileJobStuck stuck, PoolDone done, void *userdata) {
        FileJob *x = calloc(1, sizeof(*x));

        if (!x)
                return -ENOMEM;

        *x = (FileJob){.jobs = j, .work = work, .stuck = stuck, .done = done, .userdata = userdata};
        TAILQ_INSERT_TAIL(&j->queued, x, entry);
        start_jobs(j);
        return 0;
}
