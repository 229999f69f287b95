/* SPDX-License-Identifier: Apache-2.0 */
/* Threads: the loop calls what loader.h declares; the loader thread and, without the ring, those that it
 * starts are everything between the headings "loader thread" and "loop". They meet in the lists and counts
 * under `lock` and in the atomics of a LoaderRead. */
#include "service/latentd/loader.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <time.h>

#include <liburing.h>

#include "service/latentd/loader-read.h"
#include "service/shared/cleanup.h"
#include "service/shared/clock.h"

typedef TAILQ_HEAD(LoaderReadList, LoaderRead) LoaderReadList;

struct Loader {
        const FileIo *io;
        pthread_mutex_t lock; /* queued, finished, stop; without the ring also the requests of all reads */
        LoaderReadList queued, finished;
        bool stop;

        int wake_fd; /* to the thread */
        int done_fd; /* to the loop */
        pthread_t thread;
        bool has_thread;

        /* loop */
        sd_event_source *done_source, *stall_source;
        LoaderReadList unfinished;
        uint64_t stall_usec;
        int ring_error;
        bool closing;

        /* thread */
        struct io_uring ring;
        LoaderReadList active;
        bool wake_armed;
};

DEFINE_CLEANUP(Loader *, loader_free)

static void signal_fd(int fd) {
        uint64_t one = 1;

        /* Cannot fail: the counter would have to reach 2^64 - 1. */
        if (write(fd, &one, sizeof(one)) < 0)
                return;
}

/* ---- loader thread ---- */

/* They have said that they are at their end. */
static void join_readers(LoaderRead *r) {
        for (unsigned i = 0; i < r->n_threads; i++)
                (void) pthread_join(r->threads[i], NULL);
        r->n_threads = 0;
}

/* Moves new reads in and finished ones out. Returns false when it is time to end. */
static bool exchange_lists(Loader *l) {
        bool stop, news = false;
        LoaderRead *r, *next;

        (void) pthread_mutex_lock(&l->lock);
        TAILQ_CONCAT(&l->active, &l->queued, entry);
        stop = l->stop;

        for (r = TAILQ_FIRST(&l->active); r; r = next) {
                next = TAILQ_NEXT(r, entry);
                if (r->n_running == 0 && loader_read_finished(r)) {
                        join_readers(r);
                        TAILQ_REMOVE(&l->active, r, entry);
                        TAILQ_INSERT_TAIL(&l->finished, r, entry);
                        news = true;
                }
        }

        /* Answers to abandoned reads may never come. */
        if (stop)
                TAILQ_FOREACH(r, &l->active, entry) {
                        if (!atomic_load(&r->abandoned))
                                stop = false;
                }
        (void) pthread_mutex_unlock(&l->lock);

        if (news)
                signal_fd(l->done_fd);
        return !stop;
}

static LoaderRequest *next_request(LoaderRead *r) {
        LoaderRequest *q = loader_read_next(r);
        uint64_t now;

        if (!q)
                return NULL;

        /* The stall clock runs only while something is in flight. */
        now = clock_usec();
        if (atomic_load(&r->n_in_flight) == 1)
                atomic_store(&r->progress_usec, now);
        if (r->started_usec == 0)
                r->started_usec = now;
        return q;
}

static void answer_request(LoaderRequest *q, int result) {
        LoaderRead *r = q->read;

        loader_read_answer(q, result);
        if (!q->again || result >= 0)
                atomic_store(&r->progress_usec, clock_usec());
}

static void submit_request(Loader *l, LoaderRequest *q) {
        struct io_uring_sqe *sqe = io_uring_get_sqe(&l->ring);

        if (!sqe) { /* does not happen: the caller has looked for room */
                answer_request(q, -EAGAIN);
                return;
        }

        l->io->ring_read(sqe, q->read->source.fd, q->read->map + q->offset, (unsigned) (q->end - q->offset),
                q->offset);
        io_uring_sqe_set_data(sqe, q);
}

/* Every read gets an equal part of the depth, so that a slow disk does not hold up another. */
static void submit_requests(Loader *l) {
        unsigned n_reads = 0, share;
        LoaderRead *r;

        TAILQ_FOREACH(r, &l->active, entry) {
                if (!atomic_load(&r->abandoned))
                        n_reads++;
        }
        if (n_reads == 0)
                return;

        share = LOADER_DEPTH / n_reads > 0 ? LOADER_DEPTH / n_reads : 1;
        TAILQ_FOREACH(r, &l->active, entry) {
                while (!atomic_load(&r->abandoned) && atomic_load(&r->n_in_flight) < share) {
                        LoaderRequest *q;

                        /* With more reads than the ring has entries the rest waits for its turn. */
                        if (io_uring_sq_space_left(&l->ring) == 0)
                                return;

                        q = next_request(r);
                        if (!q)
                                break;
                        submit_request(l, q);
                }
        }
}

static void arm_wake(Loader *l) {
        struct io_uring_sqe *sqe;

        if (l->wake_armed)
                return;

        sqe = io_uring_get_sqe(&l->ring);
        if (!sqe)
                return;
        io_uring_prep_poll_add(sqe, l->wake_fd, POLLIN);
        io_uring_sqe_set_data(sqe, NULL);
        l->wake_armed = true;
}

static void clear_wake(Loader *l) {
        uint64_t n;

        if (read(l->wake_fd, &n, sizeof(n)) < 0)
                return; /* not set */
}

static void take_answers(Loader *l) {
        struct io_uring_cqe *cqe;

        while (io_uring_peek_cqe(&l->ring, &cqe) == 0) {
                LoaderRequest *q = io_uring_cqe_get_data(cqe);
                int result = l->io->ring_result(cqe);

                io_uring_cqe_seen(&l->ring, cqe);
                if (q) {
                        file_io_pause(result);
                        answer_request(q, result);
                } else {
                        l->wake_armed = false;
                        clear_wake(l);
                }
        }
}

static void run_ring(Loader *l) {
        while (exchange_lists(l)) {
                int r;

                arm_wake(l);
                submit_requests(l);

                r = l->io->ring_wait(&l->ring);
                if (r < 0 && r != -EINTR)
                        /* EAGAIN, EBUSY: the kernel is short of memory for requests; what is in flight will
                         * free some. */
                        (void) nanosleep(&(struct timespec){.tv_nsec = 1000 * 1000}, NULL);
                take_answers(l);
        }
}

/* One of a few for each read: one that hangs holds up no other read. */
static void *reader_thread(void *userdata) {
        LoaderRead *r = userdata;
        Loader *l = r->loader;
        LoaderRequest *q;

        (void) pthread_mutex_lock(&l->lock);
        while ((q = next_request(r))) {
                ssize_t n;
                int result;

                (void) pthread_mutex_unlock(&l->lock);
                n = l->io->pread(
                        r->source.fd, r->map + q->offset, (size_t) (q->end - q->offset), (off_t) q->offset);
                result = n < 0 ? -errno : (int) n;
                file_io_pause(result);

                (void) pthread_mutex_lock(&l->lock);
                answer_request(q, result);
        }

        r->n_running--;
        signal_fd(l->wake_fd);
        (void) pthread_mutex_unlock(&l->lock);
        return NULL;
}

/* Under the lock. */
static void start_readers_of(Loader *l, LoaderRead *r) {
        uint64_t n_requests = (r->end - r->next + LOADER_REQUEST_BYTES - 1) / LOADER_REQUEST_BYTES;
        int error = 0;

        r->started = true;
        while (error == 0 && r->n_threads < LOADER_READ_THREADS && r->n_threads < n_requests) {
                error = pthread_create(&r->threads[r->n_threads], NULL, reader_thread, r);
                if (error == 0)
                        r->n_threads++;
        }

        r->n_running = r->n_threads;
        if (r->n_threads == 0) {
                r->error = -error;
                signal_fd(l->wake_fd);
        }
}

static void start_readers(Loader *l) {
        unsigned n_reads = 0;
        LoaderRead *r;

        (void) pthread_mutex_lock(&l->lock);
        TAILQ_FOREACH(r, &l->active, entry) {
                n_reads += r->started && !atomic_load(&r->abandoned);
        }

        TAILQ_FOREACH(r, &l->active, entry) {
                if (n_reads < LOADER_READS && !r->started && !atomic_load(&r->cancelled)) {
                        start_readers_of(l, r);
                        n_reads++;
                }
        }
        (void) pthread_mutex_unlock(&l->lock);
}

static void run_pread(Loader *l) {
        while (exchange_lists(l)) {
                struct pollfd p = {.fd = l->wake_fd, .events = POLLIN};

                start_readers(l);
                (void) poll(&p, 1, -1);
                clear_wake(l);
        }
}

static void *loader_thread(void *userdata) {
        Loader *l = userdata;

        if (l->ring_error == 0)
                run_ring(l);
        else
                run_pread(l);

        return NULL;
}

/* ---- loop ---- */

static int final_result(const LoaderRead *r) {
        return r->error < 0 ? r->error : atomic_load(&r->cancelled) ? -ECANCELED : 0;
}

static void finish_read(LoaderRead *r, int result) {
        uint64_t now = clock_usec();

        r->done(r->userdata, result, atomic_load(&r->bytes),
                r->started_usec > 0 ? now - r->started_usec : 0);
}

static void take_finished(Loader *l) {
        LoaderReadList list = TAILQ_HEAD_INITIALIZER(list);
        LoaderRead *r;

        (void) pthread_mutex_lock(&l->lock);
        TAILQ_CONCAT(&list, &l->finished, entry);
        (void) pthread_mutex_unlock(&l->lock);

        while ((r = TAILQ_FIRST(&list))) {
                TAILQ_REMOVE(&list, r, entry);

                if (!atomic_load(&r->abandoned)) {
                        TAILQ_REMOVE(&l->unfinished, r, loop_entry);
                        finish_read(r, final_result(r));
                } else if (!l->closing)
                        r->late(r->userdata);
                free(r);
        }
}

static int on_finished(sd_event_source *s, int fd, uint32_t revents, void *userdata) {
        Loader *l = userdata;
        uint64_t n;

        if (read(fd, &n, sizeof(n)) < 0 && errno != EAGAIN)
                return -errno;

        take_finished(l);
        return 0;
}

/* From here on the loop has forgotten it; the thread hands it back if its answers come after all. */
static void abandon_read(Loader *l, LoaderRead *r) {
        TAILQ_REMOVE(&l->unfinished, r, loop_entry);
        atomic_store(&r->cancelled, true);
        r->done(r->userdata, -ETIMEDOUT, atomic_load(&r->bytes), l->stall_usec);
        atomic_store(&r->abandoned, true);
        signal_fd(l->wake_fd);
}

static int arm_stall(Loader *l) {
        uint64_t period = l->stall_usec / 4 < 1000000 ? l->stall_usec / 4 : 1000000; /* coarse is enough */
        int r;

        r = sd_event_source_set_time(l->stall_source, clock_usec() + period);
        if (r < 0)
                return r;

        return sd_event_source_set_enabled(
                l->stall_source, TAILQ_EMPTY(&l->unfinished) ? SD_EVENT_OFF : SD_EVENT_ONESHOT);
}

static int on_stall(sd_event_source *s, uint64_t usec, void *userdata) {
        Loader *l = userdata;
        uint64_t now = clock_usec();
        LoaderRead *r, *next;

        for (r = TAILQ_FIRST(&l->unfinished); r; r = next) {
                next = TAILQ_NEXT(r, loop_entry);
                if (atomic_load(&r->n_in_flight) > 0 &&
                        atomic_load(&r->progress_usec) + l->stall_usec <= now)
                        abandon_read(l, r);
        }

        return arm_stall(l);
}

static int start_thread(Loader *l) {
        sigset_t all, before;
        int r;

        (void) sigfillset(&all);
        (void) pthread_sigmask(SIG_SETMASK, &all, &before);
        r = pthread_create(&l->thread, NULL, loader_thread, l);
        (void) pthread_sigmask(SIG_SETMASK, &before, NULL);
        l->has_thread = r == 0;
        if (l->has_thread)
                (void) pthread_setname_np(l->thread, "loader");
        return -r;
}

/* Room for every request and the wake-up. It may be refused by sysctl, seccomp or a memory limit, as a whole
 * or only its use. */
static int start_ring(Loader *l) {
        struct io_uring_cqe *answer;
        struct io_uring_sqe *sqe;
        int r;

        r = l->io->ring_init(2 * LOADER_DEPTH, &l->ring);
        if (r < 0)
                return r;

        sqe = io_uring_get_sqe(&l->ring);
        io_uring_prep_nop(sqe);
        io_uring_sqe_set_data(sqe, NULL);
        do
                r = l->io->ring_wait(&l->ring);
        while (r == -EINTR);
        if (r >= 0)
                r = io_uring_peek_cqe(&l->ring, &answer);
        if (r < 0) {
                io_uring_queue_exit(&l->ring);
                return r;
        }

        io_uring_cqe_seen(&l->ring, answer);
        return 0;
}

int loader_new(sd_event *event, const FileIo *io, uint64_t stall_usec, Loader **ret) {
        CLEANUP(loader_freep) Loader *l = NULL;
        int r;

        l = calloc(1, sizeof(*l));
        if (!l)
                return -ENOMEM;

        l->io = io;
        l->stall_usec = stall_usec;
        (void) pthread_mutex_init(&l->lock, NULL);
        TAILQ_INIT(&l->queued);
        TAILQ_INIT(&l->finished);
        TAILQ_INIT(&l->unfinished);
        TAILQ_INIT(&l->active);
        l->ring_error = -ENODEV; /* none to take down yet */
        l->done_fd = -EBADF;

        l->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        if (l->wake_fd < 0)
                return -errno;
        l->done_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        if (l->done_fd < 0)
                return -errno;

        r = sd_event_add_io(event, &l->done_source, l->done_fd, EPOLLIN, on_finished, l);
        if (r < 0)
                return r;
        r = sd_event_add_time(event, &l->stall_source, CLOCK_MONOTONIC, 0, 1000, on_stall, l);
        if (r < 0)
                return r;
        r = sd_event_source_set_enabled(l->stall_source, SD_EVENT_OFF);
        if (r < 0)
                return r;

        l->ring_error = start_ring(l);

        r = start_thread(l);
        if (r < 0)
                return r;

        *ret = STEAL_PTR(l);
        return 0;
}

/* False if a thread is stuck in a read that does not end: then it keeps the loader. */
static bool join_threads(Loader *l) {
        struct timespec until;
        bool stuck = false;
        LoaderRead *r;

        if (!l->has_thread)
                return true;

        (void) pthread_mutex_lock(&l->lock);
        l->stop = true;
        (void) pthread_mutex_unlock(&l->lock);
        signal_fd(l->wake_fd);

        (void) clock_gettime(CLOCK_REALTIME, &until);
        until.tv_sec += (time_t) (l->stall_usec / 1000000) + 1;
        if (pthread_timedjoin_np(l->thread, NULL, &until) != 0) {
                (void) pthread_detach(l->thread);
                return false;
        }

        /* The abandoned ones: nobody looks after them from now on. */
        (void) pthread_mutex_lock(&l->lock);
        TAILQ_FOREACH(r, &l->active, entry) {
                stuck = stuck || r->n_running > 0;
        }
        TAILQ_FOREACH(r, &l->active, entry) {
                if (!stuck)
                        join_readers(r);
                else
                        for (unsigned i = 0; i < r->n_threads; i++)
                                (void) pthread_detach(r->threads[i]);
        }
        (void) pthread_mutex_unlock(&l->lock);
        return !stuck;
}

Loader *loader_free(Loader *l) {
        LoaderRead *r;
        bool joined;

        if (!l)
                return NULL;

        l->closing = true;
        TAILQ_FOREACH(r, &l->unfinished, loop_entry) {
                loader_cancel(r);
        }

        joined = join_threads(l);
        (void) sd_event_source_disable_unref(l->done_source);
        (void) sd_event_source_disable_unref(l->stall_source);
        take_finished(l);
        while ((r = TAILQ_FIRST(&l->unfinished)))
                abandon_read(l, r);

        if (!joined)
                return NULL;

        if (l->ring_error == 0)
                io_uring_queue_exit(&l->ring);
        /* Abandoned ones: the memory they read into stays, they need not. */
        while ((r = TAILQ_FIRST(&l->active))) {
                TAILQ_REMOVE(&l->active, r, entry);
                free(r);
        }
        if (l->wake_fd >= 0)
                (void) close(l->wake_fd);
        if (l->done_fd >= 0)
                (void) close(l->done_fd);
        (void) pthread_mutex_destroy(&l->lock);
        free(l);
        return NULL;
}

int loader_ring_error(const Loader *l) {
        return l->ring_error;
}

int loader_read(Loader *l, const FileSource *source, void *map, uint64_t begin, uint64_t end,
        uint64_t file_size, LoaderDone done, LoaderLate late, void *userdata, LoaderRead **ret) {
        LoaderRead *r;

        if ((uintptr_t) map % REGION_BLOCK != 0 || begin % REGION_BLOCK != 0 || end % REGION_BLOCK != 0 ||
                begin >= file_size || begin >= end || end - REGION_BLOCK >= file_size)
                return -EINVAL;

        r = calloc(1, sizeof(*r));
        if (!r)
                return -ENOMEM;

        r->loader = l;
        r->source = *source;
        r->map = map;
        r->next = begin;
        r->end = end;
        r->file_size = file_size;
        r->done = done;
        r->late = late;
        r->userdata = userdata;
        TAILQ_INSERT_TAIL(&l->unfinished, r, loop_entry);
        (void) arm_stall(l);

        (void) pthread_mutex_lock(&l->lock);
        TAILQ_INSERT_TAIL(&l->queued, r, entry);
        (void) pthread_mutex_unlock(&l->lock);
        signal_fd(l->wake_fd);

        *ret = r;
        return 0;
}

void loader_cancel(LoaderRead *r) {
        atomic_store(&r->cancelled, true);
        signal_fd(r->loader->wake_fd);
}

uint64_t loader_read_bytes(const LoaderRead *r) {
        return atomic_load(&r->bytes);
}
