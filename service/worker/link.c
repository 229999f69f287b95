/* SPDX-License-Identifier: Apache-2.0 */
#include "service/worker/link.h"

#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/queue.h>
#include <time.h>

#include "service/shared/cleanup.h"
#include "service/shared/clock.h"
#include "service/shared/log.h"

typedef struct Outgoing Outgoing;
struct Outgoing {
        STAILQ_ENTRY(Outgoing) entry;
        WireHeader header[]; /* the message, header.size bytes */
};

struct Link {
        int socket;
        int wake;               /* eventfd: something waits for POLLOUT, or `failed` was set */
        _Atomic uint64_t epoch; /* 0: no WELCOME yet */

        /* The receiving thread's, once it is in link_run(). What it sends waits until it has taken in all that is there: a rank
         * that was given a step begins before the answers to what came with it are written. */
        _Atomic bool reading;
        pthread_t reader;

        pthread_mutex_t lock; /* of all below, and around every send, so that the order of messages is that
                                 of the calls */
        STAILQ_HEAD(, Outgoing) queue;
        unsigned owed;       /* messages taken in that the broker does not know of */
        uint64_t owed_since; /* microseconds */
        int failed;          /* a message was lost: link_run() ends with this */
};

int link_new(int socket, Link **ret) {
        Link *l;

        l = calloc(1, sizeof(*l));
        if (!l)
                return -ENOMEM;

        l->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        if (l->wake < 0) {
                int r = -errno;

                free(l);
                return r;
        }

        l->socket = socket;
        STAILQ_INIT(&l->queue);
        (void) pthread_mutex_init(&l->lock, NULL);
        *ret = l;
        return 0;
}

Link *link_free(Link *l) {
        if (!l)
                return NULL;

        while (!STAILQ_EMPTY(&l->queue)) {
                Outgoing *o = STAILQ_FIRST(&l->queue);

                STAILQ_REMOVE_HEAD(&l->queue, entry);
                free(o);
        }
        (void) close(l->wake);
        (void) pthread_mutex_destroy(&l->lock);
        free(l);
        return NULL;
}

void link_set_epoch(Link *l, uint64_t epoch) {
        l->epoch = epoch;
}

uint64_t link_epoch(const Link *l) {
        return l->epoch;
}

static void wake(Link *l) {
        uint64_t one = 1;

        /* EAGAIN means that the counter is not zero: awake already. */
        (void) !write(l->wake, &one, sizeof(one));
}

static int queue_locked(Link *l, const WireMessage *m) {
        Outgoing *o;

        o = malloc(sizeof(*o) + m->header.size);
        if (!o)
                return -ENOMEM;

        memcpy(o->header, m, m->header.size);
        STAILQ_INSERT_TAIL(&l->queue, o, entry);
        return 0;
}

/* Whatever goes out takes along what is owed. -EAGAIN: it did not; a peer that is gone is no error. */
static int send_locked(Link *l, const WireHeader *h) {
        WireMessage m;
        int r;

        memcpy(&m, h, h->size);
        m.header.acks = l->owed;
        r = wire_send(l->socket, &m, -EBADF);
        if (r == -EPIPE)
                r = 0;
        if (r == 0)
                l->owed = 0;
        return r;
}

static void fail_locked(Link *l, int r) {
        l->failed = r;
        wake(l);
}

static void flush_locked(Link *l) {
        while (!STAILQ_EMPTY(&l->queue)) {
                Outgoing *o = STAILQ_FIRST(&l->queue);
                int r = 0;

                if (o->header->type != WIRE_ACK || l->owed > 0)
                        r = send_locked(l, o->header);
                if (r == -EAGAIN)
                        break;
                if (r < 0)
                        fail_locked(l, r);

                STAILQ_REMOVE_HEAD(&l->queue, entry);
                free(o);
        }
}

static void send_message(Link *l, const WireMessage *m, bool may_drop) {
        bool later = l->reading && pthread_equal(l->reader, pthread_self());
        int r = -EAGAIN;

        (void) pthread_mutex_lock(&l->lock);
        if (!later) {
                flush_locked(l);
                if (STAILQ_EMPTY(&l->queue))
                        r = send_locked(l, &m->header);
        }
        if (r == -EAGAIN) {
                r = may_drop ? 0 : queue_locked(l, m);
                if (r == 0 && !may_drop && !later)
                        wake(l);
        }
        if (r < 0 && !may_drop)
                fail_locked(l, r);
        (void) pthread_mutex_unlock(&l->lock);
}

void link_send(Link *l, const WireMessage *m) {
        send_message(l, m, false);
}

void link_offer(Link *l, const WireMessage *m) {
        send_message(l, m, true);
}

void link_flush(Link *l) {
        (void) pthread_mutex_lock(&l->lock);
        flush_locked(l);
        (void) pthread_mutex_unlock(&l->lock);
}

/* Sends what waits, and an ACK if something is owed still. */
static void acknowledge(Link *l) {
        WireMessage ack;
        int r;

        (void) pthread_mutex_lock(&l->lock);
        flush_locked(l);
        if (STAILQ_EMPTY(&l->queue) && l->owed > 0) { /* else what is in the queue says so */
                wire_init(&ack, WIRE_ACK, link_epoch(l), 0, 0);
                r = send_locked(l, &ack.header);
                if (r == -EAGAIN)
                        r = queue_locked(l, &ack);
                if (r < 0)
                        fail_locked(l, r);
        }
        (void) pthread_mutex_unlock(&l->lock);
}

/* A message is taken in. Returns how many are owed. */
static unsigned owe(Link *l) {
        unsigned n;

        (void) pthread_mutex_lock(&l->lock);
        if (l->owed++ == 0)
                l->owed_since = clock_usec();
        n = l->owed;
        (void) pthread_mutex_unlock(&l->lock);
        return n;
}

/* Milliseconds until what is owed must be said; -1: nothing is. */
static int time_to_acknowledge(Link *l) {
        uint64_t since = 0, now, due;

        (void) pthread_mutex_lock(&l->lock);
        if (l->owed > 0)
                since = l->owed_since;
        (void) pthread_mutex_unlock(&l->lock);
        if (since == 0)
                return -1;

        now = clock_usec();
        due = since + WIRE_ACK_DELAY_MSEC * 1000u;
        return due > now ? (int) ((due - now + 999) / 1000) : 0;
}

/* Messages that are answered by something else later are taken in as soon as they are here, the
 * others when they took effect: the ACK of a close means that nothing of it is in use. */
static bool is_acknowledged_first(uint16_t type) {
        return type == WIRE_MODEL_COMMIT || type == WIRE_JOB_OPEN || type == WIRE_JOB_RUN || type == WIRE_STEP;
}

static bool has_credit(uint16_t type) {
        return type != WIRE_CANCEL && type != WIRE_DIE;
}

/* Half of the credits is said at once; the broker waits for WELCOME, and MODEL_COMMIT may take long. */
static void take_in(Link *l, uint16_t type) {
        if (owe(l) >= WIRE_CREDITS / 2 || type == WIRE_WELCOME || type == WIRE_MODEL_COMMIT)
                acknowledge(l);
}

static int check_credit(Link *l, Fault *f) {
        unsigned n;

        /* What could not be said yet the broker does not know: with a credit's worth of it it may not send. */
        (void) pthread_mutex_lock(&l->lock);
        n = l->owed;
        (void) pthread_mutex_unlock(&l->lock);

        if (n >= WIRE_CREDITS)
                return fault_set(f, -EPROTO, FAULT_INTERNAL,
                        "The broker sends without reading: %u messages are not acknowledged.", n);
        return 0;
}

static int handle(Link *l, const WireMessage *m, int *fd, LinkFunc func, void *userdata, Fault *f) {
        uint64_t epoch = link_epoch(l);
        const WireHeader *h = &m->header;
        int r;

        if (h->type < WIRE_WELCOME)
                return fault_set(f, -EPROTO, FAULT_INTERNAL,
                        "The broker sent %s, which only a worker sends.", wire_type_name(h->type));

        if ((epoch == 0) != (h->type == WIRE_WELCOME))
                return fault_set(f, -EPROTO, FAULT_INTERNAL, "The broker sent %s %s WELCOME.",
                        wire_type_name(h->type), epoch == 0 ? "before" : "after");

        if (epoch != 0 && h->epoch != epoch) {
                log_debug("Dropped %s of another epoch.", wire_type_name(h->type));
                return 0;
        }

        if (has_credit(h->type)) {
                r = check_credit(l, f);
                if (r < 0)
                        return r;
        }

        if (is_acknowledged_first(h->type))
                take_in(l, h->type);
        if (h->type == WIRE_DIE) /* what was said is said */
                link_flush(l);

        r = func(userdata, m, fd, f);
        if (r < 0)
                return r;

        if (has_credit(h->type) && !is_acknowledged_first(h->type))
                take_in(l, h->type);
        return 0;
}

/* Takes in all that is there. 1: wait for more, 0: end of file. */
static int receive_all(Link *l, LinkFunc func, void *userdata, Fault *f) {
        for (;;) {
                CLEANUP_CLOSE int fd = -EBADF;
                WireMessage m;
                int r;

                r = wire_receive(l->socket, &m, &fd, f);
                if (r == -EAGAIN) {
                        link_flush(l);
                        return 1;
                }
                if (r <= 0)
                        return r;

                r = handle(l, &m, &fd, func, userdata, f);
                if (r < 0)
                        return r;
        }
}

static int run(Link *l, LinkFunc func, void *userdata, Fault *f) {
        for (;;) {
                struct pollfd p[] = {
                        {.fd = l->socket, .events = POLLIN},
                        {.fd = l->wake, .events = POLLIN},
                };
                uint64_t count;
                int r, n;

                (void) pthread_mutex_lock(&l->lock);
                r = l->failed;
                if (!STAILQ_EMPTY(&l->queue))
                        p[0].events |= POLLOUT;
                (void) pthread_mutex_unlock(&l->lock);
                if (r < 0)
                        return fault_set(
                                f, r, FAULT_INTERNAL, "Sending a message failed: %s.", strerror(-r));

                n = poll(p, ELEMENTSOF(p), time_to_acknowledge(l));
                if (n < 0) {
                        if (errno == EINTR)
                                continue;
                        return fault_set(f, -errno, FAULT_INTERNAL, "poll() failed: %s.", strerror(errno));
                }

                if (n == 0)
                        acknowledge(l);
                if (p[1].revents)
                        (void) !read(l->wake, &count, sizeof(count));
                if (p[0].revents & POLLOUT)
                        link_flush(l);
                if (p[0].revents & ~POLLOUT) {
                        r = receive_all(l, func, userdata, f);
                        if (r <= 0)
                                return r;
                }
        }
}

int link_run(Link *l, LinkFunc func, void *userdata, Fault *f) {
        int r;

        l->reader = pthread_self();
        l->reading = true;
        r = run(l, func, userdata, f);
        l->reading = false;
        acknowledge(l);
        return r;
}
