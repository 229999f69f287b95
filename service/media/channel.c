/* SPDX-License-Identifier: Apache-2.0 */
#include "service/media/channel.h"

#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <string.h>

#include "service/shared/cleanup.h"
#include "service/shared/clock.h"

#define PROGRESS_USEC 200000

void channel_progress(Channel *c, uint64_t done, uint64_t total) {
        uint64_t now = clock_usec();
        MediaMessage m;

        if (now - c->progress_usec < PROGRESS_USEC)
                return;
        c->progress_usec = now;
        (void) media_init(&m, MEDIA_PROGRESS);
        m.progress.done = done;
        m.progress.total = total;
        (void) media_send(c->socket, &m, NULL, 0);
}

/* What the socket does not take now goes with the next one: the count is of all. */
static void say_taken(Channel *c) {
        MediaMessage m;

        if (c->taken == c->taken_said)
                return;
        (void) media_init(&m, MEDIA_TAKEN);
        m.taken.frames = c->taken;
        if (media_send(c->socket, &m, NULL, 0) == 0)
                c->taken_said = c->taken;
}

void channel_taken(Channel *c, uint64_t n) {
        c->taken = n;
        say_taken(c);
}

static int take_frames(Channel *c, const MediaFrames *m, Fault *f) {
        if (m->ready < c->ready || m->ready > c->frames || m->ready - c->taken > c->ring_frames ||
                m->sound > 1 || (m->sound && !c->with_sound) || (!m->sound && c->sound_ready))
                return fault_set(f, -EPROTO, FAULT_INTERNAL,
                        "FRAMES says %" PRIu64 " frames and sound %u; there were %" PRIu64 " of %" PRIu64
                        ", %" PRIu64 " taken, in a ring of %" PRIu64 ".",
                        m->ready, m->sound, c->ready, c->frames, c->taken, c->ring_frames);
        c->ready = m->ready;
        c->sound_ready = m->sound;
        return 0;
}

int channel_take_in(Channel *c, Fault *f) {
        for (;;) {
                int fds[MEDIA_FDS_MAX], r;
                MediaMessage m;

                r = media_receive(c->socket, &m, fds, f);
                if (r == -EAGAIN)
                        return 0;
                if (r < 0)
                        return r;
                if (r == 0)
                        return fault_set(f, -EPIPE, FAULT_CANCELLED, "The connection ended.");
                if (m.header.type != MEDIA_FRAMES) {
                        for (unsigned i = 0; i < MEDIA_FDS_MAX; i++)
                                cleanup_closep(&fds[i]);
                        return fault_set(f, -EPROTO, FAULT_INTERNAL, "%s came in the middle of a request.",
                                media_type_name(m.header.type));
                }
                r = take_frames(c, &m.frames, f);
                if (r < 0)
                        return r;
        }
}

static int wait(Channel *c, Fault *f) {
        struct pollfd p = {.fd = c->socket, .events = POLLIN};

        say_taken(c);
        if (c->taken != c->taken_said)
                p.events |= POLLOUT;
        if (poll(&p, 1, -1) < 0 && errno != EINTR)
                return fault_set(f, -errno, FAULT_INTERNAL, "poll() failed: %s.", strerror(errno));
        return channel_take_in(c, f);
}

int channel_wait_frame(Channel *c, uint64_t frame, Fault *f) {
        while (c->ready <= frame) {
                int r = wait(c, f);

                if (r < 0)
                        return r;
        }
        return 0;
}

int channel_wait_sound(Channel *c, Fault *f) {
        while (!c->sound_ready) {
                int r = wait(c, f);

                if (r < 0)
                        return r;
        }
        return 0;
}

int channel_answer(Channel *c, const MediaMessage *m) {
        for (;;) {
                struct pollfd p = {.fd = c->socket, .events = POLLOUT};
                int r;

                r = media_send(c->socket, m, NULL, 0);
                if (r != -EAGAIN)
                        return r;
                if (poll(&p, 1, -1) < 0 && errno != EINTR)
                        return -errno;
        }
}
