/* SPDX-License-Identifier: Apache-2.0 */
/* Sending to the worker: in order, never blocking, never beyond the credits. */
#include "service/latentd/worker-link-internal.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>

#include "service/shared/cleanup.h"

static bool needs_credit(uint16_t type) {
        return type != WIRE_CANCEL && type != WIRE_DIE;
}

static void count_credit(WorkerLink *w, uint16_t type) {
        if (needs_credit(type) && ++w->credits_used > w->credits_used_max)
                w->credits_used_max = w->credits_used;
}

static Outgoing *outgoing_free(Outgoing *o) {
        cleanup_closep(&o->fd);
        free(o);
        return NULL;
}

void worker_send_clear(WorkerLink *w) {
        while (!STAILQ_EMPTY(&w->queue)) {
                Outgoing *o = STAILQ_FIRST(&w->queue);

                STAILQ_REMOVE_HEAD(&w->queue, entry);
                (void) outgoing_free(o);
        }
        w->credits_used = 0;
}

static void send_failed(WorkerLink *w, int r) {
        char text[100];

        (void) snprintf(text, sizeof(text), "cannot be sent to: %s", strerror(-r));
        worker_link_drop(w, text);
}

void worker_send_flush(WorkerLink *w) {
        uint32_t events = EPOLLIN;

        while (!STAILQ_EMPTY(&w->queue)) {
                Outgoing *o = STAILQ_FIRST(&w->queue);
                WireMessage m = {};
                int r;

                memcpy(&m, o->header, o->header->size);
                if (needs_credit(m.header.type) && w->credits_used >= WIRE_CREDITS)
                        break; /* until an ACK comes */

                r = wire_send(w->process.socket, &m, o->fd);
                if (r == -EAGAIN) {
                        events |= EPOLLOUT;
                        break;
                }
                if (r == -EPIPE) /* it is ending: its last messages and its end of file are still to be read
                                  */
                        break;
                if (r < 0) {
                        send_failed(w, r);
                        return;
                }

                count_credit(w, m.header.type);
                STAILQ_REMOVE_HEAD(&w->queue, entry);
                (void) outgoing_free(o);
        }

        if (w->io)
                (void) sd_event_source_set_io_events(w->io, events);
}

void worker_send(WorkerLink *w, const WireMessage *m, int fd) {
        Outgoing *o;
        int r;

        if (w->state != LINK_READY && w->state != LINK_HELLO)
                return; /* dropped meanwhile */

        if (STAILQ_EMPTY(&w->queue) && (!needs_credit(m->header.type) || w->credits_used < WIRE_CREDITS) &&
                wire_send(w->process.socket, m, fd) == 0) {
                count_credit(w, m->header.type);
                return;
        }

        /* Not now; what is wrong with it shows again. */
        o = malloc(sizeof(*o) + m->header.size);
        if (!o) {
                send_failed(w, -ENOMEM);
                return;
        }
        o->fd = -EBADF;
        memcpy(o->header, m, m->header.size);

        if (fd >= 0) {
                /* Its owner may close it before its turn comes. */
                o->fd = fcntl(fd, F_DUPFD_CLOEXEC, 3);
                if (o->fd < 0) {
                        r = -errno;
                        (void) outgoing_free(o);
                        send_failed(w, r);
                        return;
                }
        }

        STAILQ_INSERT_TAIL(&w->queue, o, entry);
        worker_send_flush(w);
}

int worker_send_on_acks(WorkerLink *w, uint32_t n) {
        if (n > w->credits_used)
                return -EPROTO;

        w->credits_used -= n;
        if (n > 0)
                worker_send_flush(w);
        return 0;
}
