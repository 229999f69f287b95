/* SPDX-License-Identifier: Apache-2.0 */
#include "service/latentd/pool.h"

#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/eventfd.h>
#include <sys/queue.h>

#include "service/shared/cleanup.h"
#include "service/shared/slice.h"

typedef struct PoolItem {
        PoolWork work;
        PoolDone done;
        void *userdata;
        int result;
        STAILQ_ENTRY(PoolItem) entry;
} PoolItem;

typedef STAILQ_HEAD(PoolList, PoolItem) PoolList;

struct Pool {
        pthread_mutex_t lock; /* the two lists and stop */
        pthread_cond_t wake;
        PoolList queued, finished;
        bool stop;

        int event_fd; /* counts up when `finished` got an item */
        sd_event_source *source;
        pthread_t *threads;
        unsigned n_threads;
};

DEFINE_CLEANUP(Pool *, pool_free)

static void finish_item(Pool *p, PoolItem *item) {
        uint64_t one = 1;

        if (!item->done) {
                free(item);
                return;
        }

        (void) pthread_mutex_lock(&p->lock);
        STAILQ_INSERT_TAIL(&p->finished, item, entry);
        (void) pthread_mutex_unlock(&p->lock);

        /* Cannot fail: the counter would have to reach 2^64 - 1. */
        if (write(p->event_fd, &one, sizeof(one)) < 0)
                return;
}

static void *pool_thread(void *userdata) {
        Pool *p = userdata;

        (void) slice_make_long(); /* the loop goes first */
        for (;;) {
                PoolItem *item;

                (void) pthread_mutex_lock(&p->lock);
                while (STAILQ_EMPTY(&p->queued) && !p->stop)
                        (void) pthread_cond_wait(&p->wake, &p->lock);

                item = STAILQ_FIRST(&p->queued);
                if (item)
                        STAILQ_REMOVE_HEAD(&p->queued, entry);
                (void) pthread_mutex_unlock(&p->lock);

                if (!item)
                        return NULL;

                item->result = item->work(item->userdata);
                finish_item(p, item);
        }
}

/* Calls the done functions of what is finished now; what they submit and finishes meanwhile waits for the
 * next turn of the loop, so that the pool cannot starve it. */
static void call_done(Pool *p) {
        PoolList list = STAILQ_HEAD_INITIALIZER(list);
        PoolItem *item;

        (void) pthread_mutex_lock(&p->lock);
        STAILQ_CONCAT(&list, &p->finished);
        (void) pthread_mutex_unlock(&p->lock);

        while ((item = STAILQ_FIRST(&list))) {
                STAILQ_REMOVE_HEAD(&list, entry);
                item->done(item->userdata, item->result);
                free(item);
        }
}

static int on_finished(sd_event_source *s, int fd, uint32_t revents, void *userdata) {
        Pool *p = userdata;
        uint64_t n;

        if (read(fd, &n, sizeof(n)) < 0 && errno != EAGAIN)
                return -errno;

        call_done(p);
        return 0;
}

/* Signals belong to the loop: here they would only interrupt long system calls. */
static int start_threads(Pool *p, unsigned n) {
        sigset_t all, before;
        int r = 0;

        (void) sigfillset(&all);
        (void) pthread_sigmask(SIG_SETMASK, &all, &before);
        for (; p->n_threads < n && r == 0; p->n_threads += r == 0)
                r = pthread_create(&p->threads[p->n_threads], NULL, pool_thread, p);
        (void) pthread_sigmask(SIG_SETMASK, &before, NULL);

        return -r;
}

int pool_new(sd_event *event, unsigned n_threads, Pool **ret) {
        CLEANUP(pool_freep) Pool *p = NULL;
        int r;

        if (n_threads == 0)
                return -EINVAL;

        p = calloc(1, sizeof(*p));
        if (!p)
                return -ENOMEM;

        p->event_fd = -EBADF;
        (void) pthread_mutex_init(&p->lock, NULL);
        (void) pthread_cond_init(&p->wake, NULL);
        STAILQ_INIT(&p->queued);
        STAILQ_INIT(&p->finished);

        p->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        if (p->event_fd < 0)
                return -errno;

        r = sd_event_add_io(event, &p->source, p->event_fd, EPOLLIN, on_finished, p);
        if (r < 0)
                return r;

        p->threads = calloc(n_threads, sizeof(pthread_t));
        if (!p->threads)
                return -ENOMEM;

        r = start_threads(p, n_threads);
        if (r < 0)
                return r;

        *ret = STEAL_PTR(p);
        return 0;
}

static void stop_threads(Pool *p) {
        (void) pthread_mutex_lock(&p->lock);
        p->stop = true;
        (void) pthread_cond_broadcast(&p->wake);
        (void) pthread_mutex_unlock(&p->lock);

        for (unsigned i = 0; i < p->n_threads; i++)
                (void) pthread_join(p->threads[i], NULL);
        p->n_threads = 0;
}

Pool *pool_free(Pool *p) {
        PoolItem *item;

        if (!p)
                return NULL;

        stop_threads(p);

        /* The last done functions may submit more (memory to free): no thread is left, so it runs here. */
        for (;;) {
                call_done(p);

                item = STAILQ_FIRST(&p->queued);
                if (!item)
                        break;
                STAILQ_REMOVE_HEAD(&p->queued, entry);
                item->result = item->work(item->userdata);
                finish_item(p, item);
        }

        (void) sd_event_source_disable_unref(p->source);
        if (p->event_fd >= 0)
                (void) close(p->event_fd);
        (void) pthread_cond_destroy(&p->wake);
        (void) pthread_mutex_destroy(&p->lock);
        free(p->threads);
        free(p);
        return NULL;
}

int pool_submit(Pool *p, PoolWork work, PoolDone done, void *userdata) {
        PoolItem *item = calloc(1, sizeof(*item));

        if (!item)
                return -ENOMEM;

        *item = (PoolItem){.work = work, .done = done, .userdata = userdata};

        (void) pthread_mutex_lock(&p->lock);
        STAILQ_INSERT_TAIL(&p->queued, item, entry);
        (void) pthread_cond_signal(&p->wake);
        (void) pthread_mutex_unlock(&p->lock);
        return 0;
}
