/* SPDX-License-Identifier: Apache-2.0 */
#include "service/latentd/media-link.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/pidfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "service/latentd/bus-error.h"
#include "service/latentd/worker-link.h"
#include "service/latentd/worker-start.h"
#include "service/shared/cleanup.h"
#include "service/shared/clock.h"
#include "service/shared/log.h"

#define PATIENCE_USEC (UINT64_C(60) * 1000000) /* without a sign of life while there is something to do */
#define STOP_USEC (UINT64_C(10) * 1000000)     /* for its last write to come to an end */

struct MediaLink {
        Manager *manager;
        MediaHandlers handlers;
        WorkerProcess process;
        int fds[MEDIA_FDS_MAX]; /* until the request is sent */
        MediaMessage request;
        bool greeted, stopping, over, lost;
        Fault why; /* stopping: what end() is told */
        uint64_t ready, taken; /* WRITE: frames */
        bool sound, frames_wait; /* what ready and sound say has not gone out yet */
        uint64_t alive_usec, patience_usec;
        sd_event_source *io, *timer;
};

/* A child that was killed: whoever waits for it must not be the loop. */
static int on_corpse(sd_event_source *source, int fd, uint32_t events, void *userdata) {
        char unused[64];

        if (worker_process_reap(fd, unused, sizeof(unused)) > 0)
                (void) sd_event_source_set_floating(source, false); /* its last reference */
        return 0;
}

static void bury(MediaLink *l) {
        sd_event_source *source;
        char unused[64];

        if (l->process.pidfd < 0)
                return;

        (void) pidfd_send_signal(l->process.pidfd, SIGKILL, NULL, 0);
        if (worker_process_reap(l->process.pidfd, unused, sizeof(unused)) > 0) {
                cleanup_closep(&l->process.pidfd);
                return;
        }

        /* The source owns the descriptor; without memory for it the child stays a zombie until the service ends. */
        if (sd_event_add_io(l->manager->event, &source, l->process.pidfd, EPOLLIN, on_corpse, NULL) < 0) {
                cleanup_closep(&l->process.pidfd);
                return;
        }
        (void) sd_event_source_set_io_fd_own(source, true);
        (void) sd_event_source_set_floating(source, true);
        (void) sd_event_source_unref(source);
        l->process.pidfd = -EBADF;
}

MediaLink *media_link_free(MediaLink *l) {
        if (!l)
                return NULL;

        sd_event_source_disable_unref(l->io);
        sd_event_source_disable_unref(l->timer);
        cleanup_closep(&l->process.socket);
        for (size_t i = 0; i < MEDIA_FDS_MAX; i++)
                cleanup_closep(&l->fds[i]);
        bury(l);
        free(l);
        return NULL;
}

/* The last thing that is done with l. */
static void end(MediaLink *l, const MediaDone *done, const Fault *f) {
        if (l->over)
                return;

        l->over = true;
        (void) sd_event_source_set_enabled(l->io, SD_EVENT_OFF);
        (void) sd_event_source_set_enabled(l->timer, SD_EVENT_OFF);
        l->handlers.end(l->handlers.userdata, done, f);
}

static void set_time(MediaLink *l, uint64_t usec) {
        (void) sd_event_source_set_time(l->timer, usec);
        (void) sd_event_source_set_enabled(l->timer, SD_EVENT_ONESHOT);
}

/* Its end of the connection closes when the last of its threads has come back from the last call. */
static void stop(MediaLink *l, const Fault *why) {
        if (!l->greeted) { /* it has nothing of ours */
                end(l, NULL, why);
                return;
        }

        l->stopping = true;
        l->why = *why;
        (void) shutdown(l->process.socket, SHUT_WR); /* its reaper ends it, where we may not */
        if (l->process.pidfd >= 0)
                (void) pidfd_send_signal(l->process.pidfd, SIGKILL, NULL, 0);
        (void) sd_event_source_set_io_events(l->io, EPOLLIN);
        set_time(l, clock_usec() + STOP_USEC);
}

bool media_link_stop(MediaLink *l) {
        Fault f = {};

        if (l->over || !l->greeted)
                return false;

        (void) fault_set(&f, -ECANCELED, FAULT_CANCELLED, "The request was cancelled.");
        if (!l->stopping)
                stop(l, &f);
        return true;
}

bool media_link_was_lost(const MediaLink *l) {
        return l->lost;
}

void media_link_set_patience(MediaLink *l, uint64_t usec) {
        l->patience_usec = usec;
        set_time(l, l->alive_usec + usec);
}

static void fail(MediaLink *l, const char *what) {
        Fault f = {};

        (void) fault_set(&f, -EIO, FAULT_IO, "latent-media %s. Start the job again.", what);
        stop(l, &f);
}

/* The end of file. */
static void died(MediaLink *l) {
        char text[128] = "closed its connection";
        Fault f = l->why;

        if (l->process.pidfd >= 0 && worker_process_reap(l->process.pidfd, text, sizeof(text)) > 0)
                cleanup_closep(&l->process.pidfd);
        if (l->stopping) {
                end(l, NULL, &f);
                return;
        }

        l->lost = true;
        (void) fault_set(&f, -EIO, FAULT_IO, "latent-media died: it %s. Start the job again.", text);
        end(l, NULL, &f);
}

/* There is something to do for it: not while it waits for frames. */
static bool is_busy(const MediaLink *l) {
        const MediaWrite *w = &l->request.write;

        return !l->greeted || l->request.header.type != MEDIA_WRITE || l->taken < l->ready || (l->ready == w->frames && l->sound);
}

static int on_timer(sd_event_source *source, uint64_t usec, void *userdata) {
        MediaLink *l = userdata;
        uint64_t now = clock_usec();
        Fault f = l->why;
        char text[64];

        if (l->stopping) {
                log_warning("latent-media does not end: what it writes may change for a while yet.");
                end(l, NULL, &f);
                return 0;
        }

        if (!is_busy(l))
                l->alive_usec = now;
        if (now - l->alive_usec >= l->patience_usec) {
                (void) snprintf(text, sizeof(text), "did not answer for %" PRIu64 " seconds", l->patience_usec / 1000000);
                fail(l, text);
                return 0;
        }

        set_time(l, l->alive_usec + l->patience_usec);
        return 0;
}

static void send_frames(MediaLink *l) {
        MediaMessage m;
        int r;

        if (!l->frames_wait || !l->greeted)
                return;

        (void) media_init(&m, MEDIA_FRAMES);
        m.frames.ready = l->ready;
        m.frames.sound = l->sound;
        r = media_send(l->process.socket, &m, NULL, 0);
        if (r >= 0)
                l->frames_wait = false;
        /* Else when there is room; of a process that is gone the end of file tells. */
        (void) sd_event_source_set_io_events(l->io, r == -EAGAIN ? EPOLLIN | EPOLLOUT : EPOLLIN);
}

void media_link_frames(MediaLink *l, uint64_t ready, bool sound) {
        if (l->over || l->stopping || (ready <= l->ready && sound <= l->sound))
                return;

        if (!is_busy(l))
                l->alive_usec = clock_usec();
        if (ready > l->ready)
                l->ready = ready;
        l->sound = l->sound || sound;
        l->frames_wait = true;
        send_frames(l);
}

static int on_hello(MediaLink *l, const MediaHello *m) {
        int r;

        if (strcmp(m->build_id, LATENTD_VERSION) != 0) {
                fail(l, "is of another version: restart its socket unit, or install both of one version");
                return 0;
        }

        r = media_send(l->process.socket, &l->request, l->fds, MEDIA_FDS_MAX);
        if (r == -EPIPE) /* it died: the end of file tells */
                return 0;
        if (r < 0)
                return r;

        l->greeted = true;
        for (size_t i = 0; i < MEDIA_FDS_MAX; i++)
                cleanup_closep(&l->fds[i]);
        send_frames(l);
        return 0;
}

static void on_error(MediaLink *l, const MediaError *m) {
        Fault f = {};

        worker_link_fault(&m->fault, &f);
        bus_text(f.text);
        end(l, NULL, &f);
}

static int on_message(MediaLink *l, const MediaMessage *m) {
        bool write = l->request.header.type == MEDIA_WRITE;

        l->alive_usec = clock_usec();
        if (l->greeted == (m->header.type == MEDIA_HELLO))
                return -EBADMSG;

        switch ((MediaType) m->header.type) {

        case MEDIA_HELLO:
                return on_hello(l, &m->hello);

        case MEDIA_PROGRESS:
                return 0;

        case MEDIA_TAKEN:
                if (!write || m->taken.frames < l->taken || m->taken.frames > l->ready)
                        return -EBADMSG;
                l->taken = m->taken.frames;
                if (l->handlers.taken)
                        l->handlers.taken(l->handlers.userdata, l->taken);
                return 0;

        case MEDIA_DONE:
                if (write && (l->ready < l->request.write.frames || (l->request.write.samples > 0 && !l->sound)))
                        return -EBADMSG;
                end(l, &m->done, NULL);
                return 0;

        case MEDIA_ERROR:
                on_error(l, &m->error);
                return 0;

        default:
                return -EBADMSG;
        }
}

static int on_io(sd_event_source *source, int fd, uint32_t events, void *userdata) {
        MediaLink *l = userdata;
        int fds[MEDIA_FDS_MAX] = { -EBADF, -EBADF };
        MediaMessage m;
        Fault f = {};
        int r;

        if (events & EPOLLOUT)
                send_frames(l);
        if (!(events & ~(uint32_t) EPOLLOUT))
                return 0;

        r = media_receive(fd, &m, fds, &f); /* one per turn of the loop: end() may have freed l */
        if (r == -EAGAIN)
                return 0;
        for (size_t i = 0; i < MEDIA_FDS_MAX; i++)
                cleanup_closep(&fds[i]);
        if (r == 0 && !(events & EPOLLHUP)) /* an empty message */
                r = -EBADMSG;
        if (r == 0 || (r < 0 && r != -EBADMSG)) {
                died(l);
                return 0;
        }

        if (!l->stopping && (r < 0 || on_message(l, &m) < 0))
                fail(l, "broke the protocol");
        return 0;
}

static int watch(MediaLink *l) {
        int r;

        l->alive_usec = clock_usec();
        l->patience_usec = PATIENCE_USEC;
        r = sd_event_add_io(l->manager->event, &l->io, l->process.socket, EPOLLIN, on_io, l);
        if (r < 0)
                return r;

        return sd_event_add_time(l->manager->event, &l->timer, CLOCK_MONOTONIC, l->alive_usec + l->patience_usec, 0, on_timer, l);
}

DEFINE_CLEANUP(MediaLink *, media_link_free)

int media_link_new(Manager *m, const MediaMessage *message, int file, int arena, const MediaHandlers *handlers, MediaLink **ret, Fault *f) {
        CLEANUP(media_link_freep) MediaLink *l = NULL;
        int r;

        l = calloc(1, sizeof(*l));
        if (!l)
                return -ENOMEM;

        l->manager = m;
        l->handlers = *handlers;
        l->request = *message;
        l->process = (WorkerProcess){ .socket = -EBADF, .pidfd = -EBADF };
        l->fds[0] = fcntl(file, F_DUPFD_CLOEXEC, 3);
        l->fds[1] = arena < 0 ? -EBADF : fcntl(arena, F_DUPFD_CLOEXEC, 3);
        if (l->fds[0] < 0 || (arena >= 0 && l->fds[1] < 0))
                return -errno;

        r = media_start(m->config, &l->process, f);
        if (r >= 0)
                r = watch(l);
        if (r < 0)
                return r;

        *ret = STEAL_PTR(l);
        return 0;
}
