/* SPDX-License-Identifier: Apache-2.0 */
#include "service/worker/exchange-link.h"
#include "service/worker/exchange-private.h"

#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "service/shared/cleanup.h"
#include "service/shared/clock.h"

#define LINK_POLL_USEC 10000u

size_t exchange_places(const H3Plan *p) {
        return (size_t) _H3_PHASE_MAX * p->ranks * (p->ranks + 1) * p->chunks;
}

size_t exchange_place(const H3Plan *p, const H3Message *m) {
        uint32_t to = m->to == H3_TO_ALL ? p->ranks : m->to;

        return (((size_t) m->phase * p->ranks + m->from) * (p->ranks + 1) + to) * p->chunks + m->chunk;
}

H3Message exchange_message_of(const H3Plan *p, size_t place) {
        uint32_t to = (uint32_t) (place / p->chunks % (p->ranks + 1));

        return (H3Message){
                .phase = (H3Phase) (place / p->chunks / (p->ranks + 1) / p->ranks),
                .from = (uint32_t) (place / p->chunks / (p->ranks + 1) % p->ranks),
                .to = to == p->ranks ? H3_TO_ALL : to,
                .chunk = (uint32_t) (place % p->chunks),
        };
}

uint64_t exchange_readers(const H3Plan *p, const H3Message *m) {
        uint64_t readers = 0;

        for (uint32_t to = 0; to < p->ranks; to++)
                if ((m->to == H3_TO_ALL || m->to == to) && h3_plan_receives(p, m->phase, m->from, to))
                        readers |= UINT64_C(1) << to;
        return readers;
}

uint64_t exchange_bytes_of(const H3View *views, uint32_t n) {
        uint64_t size = 0;

        for (uint32_t i = 0; i < n; i++)
                size += views[i].rows * views[i].width;
        return size;
}

uint64_t exchange_step_message(const void *step, const H3Message *m) {
        const ExchangeStep *s = step;

        return h3_message_max(s->model, s->plan, s->compute, m);
}

uint64_t exchange_text_message(const void *text, const H3Message *m) {
        const ExchangeText *t = text;

        return h3_text_message_max(t->model, &t->size, m);
}

ExchangeKind exchange_kind_of(ExchangeKind kind, const LkOps *ops) {
        return kind == EXCHANGE_HOST && ops->copy ? EXCHANGE_STAGED : kind;
}

uint64_t exchange_memory(ExchangeKind kind, const H3Plan *p, ExchangeSize size) {
        if (p->ranks <= 1)
                return 0;
        return exchange_places(p) * sizeof(Place) + (kind == EXCHANGE_HOST     ? exchange_host_memory(p, size)
                                                            : kind == EXCHANGE_STAGED ? exchange_staged_memory(p, size)
                                                                                      : 0);
}

uint64_t exchange_device_memory(ExchangeKind kind, const H3Plan *p, ExchangeSize size, uint32_t rank) {
        return kind != EXCHANGE_HOST && p->ranks > 1 ? exchange_peer_memory(p, size, rank) : 0;
}

/* Under the lock. Later errors follow from the first. */
static void set_error(Exchange *e, int error, const Fault *f) {
        if (atomic_load(&e->error) < 0)
                return;
        if (f)
                e->fault = *f;
        (void) fault_set(&e->fault, error, FAULT_INTERNAL, "A rank failed: %s.", strerrordesc_np(-error));
        atomic_store(&e->error, error);
        (void) pthread_cond_broadcast(&e->changed);
}

/* The rank that the others hang on: whoever is waited for and does not wait itself. */
static uint32_t culprit(const Exchange *e, uint32_t rank) {
        for (uint32_t i = 0; i < e->plan->ranks && e->members[rank].waits_for > 0; i++)
                rank = e->members[rank].waits_for - 1;
        return rank;
}

int exchange_wait(Exchange *e, uint32_t rank, ExchangeAwaited awaited, const void *what) {
        struct timespec until;
        Fault f = {};
        int on, r = 0;

        if (atomic_load(&e->error) == 0 && awaited(e, what) < 0)
                return 0;

        until = clock_after(e->deadline_usec);
        (void) pthread_mutex_lock(&e->lock);
        while (atomic_load(&e->error) == 0 && (on = awaited(e, what)) >= 0) {
                e->members[rank].waits_for = (uint32_t) on + 1;
                if (r == ETIMEDOUT) {
                        (void) fault_set(&f, -ETIMEDOUT, FAULT_INTERNAL,
                                "Rank %" PRIu32 " did not answer in %" PRIu64 " s.", culprit(e, rank),
                                (e->deadline_usec + 999999) / 1000000);
                        set_error(e, -ETIMEDOUT, &f);
                        break;
                }
                r = pthread_cond_timedwait(&e->changed, &e->lock, &until);
        }
        e->members[rank].waits_for = 0;
        (void) pthread_mutex_unlock(&e->lock);
        return atomic_load(&e->error);
}

typedef struct WaitForMessage {
        const Place *place;
        const H3Message *message;
} WaitForMessage;

/* The message that is in its place. */
static int awaits_message(const Exchange *e, const void *what) {
        const WaitForMessage *w = what;

        return atomic_load_explicit(&w->place->published, memory_order_acquire) >= w->message->sequence ? -1
                                                                                                         : (int) w->message->from;
}

/* The one before it was taken. */
static int awaits_place(const Exchange *e, const void *what) {
        const WaitForMessage *w = what;
        uint64_t missing = w->place->readers & ~atomic_load_explicit(&w->place->taken, memory_order_acquire);

        return missing == 0 ? -1 : __builtin_ctzll(missing);
}

static int call_hook(Exchange *e, uint32_t rank, const H3Message *m, uint8_t *bytes, uint64_t size) {
        return e->hook.func ? e->hook.func(e->hook.userdata, rank, m, bytes, size) : 0;
}

/* A message is slow where its transport cannot hold a queue. */
static int make_link(Exchange *e, const H3Rank *rank) {
        int r = 0;

        if (e->hook.link_bytes == 0 || (e->transport != &exchange_host && rank->ops->hold))
                return 0;
        (void) pthread_mutex_lock(&e->lock);
        if (!e->link)
                r = exchange_link_new(e->plan, e->hook.link_bytes, &e->link);
        (void) pthread_mutex_unlock(&e->lock);
        return r;
}

static int wait_link(Exchange *e, uint32_t rank, const Place *p) {
        uint64_t at, now;

        if (!e->link)
                return 0;
        (void) pthread_mutex_lock(&e->lock);
        at = exchange_link_arrives(e->link, (size_t) (p - e->places), rank);
        (void) pthread_mutex_unlock(&e->lock);
        while (atomic_load(&e->error) == 0 && (now = clock_usec()) < at) {
                uint64_t usec = at - now < LINK_POLL_USEC ? at - now : LINK_POLL_USEC;

                (void) nanosleep(&(struct timespec){.tv_nsec = (long) usec * 1000}, NULL);
        }
        return atomic_load(&e->error);
}

/* Around what a rank does here. */
static int lap(Exchange *e, const H3Rank *rank, bool begins) {
        Member *own = e->members + rank->index;

        if (!e->hook.measures)
                return 0;
        if (rank->ops->lap)
                return rank->ops->lap(rank->context, begins);
        own->exposed_usec += begins ? -clock_usec() : clock_usec();
        return 0;
}

static int put_message(Exchange *e, const H3Rank *rank, const H3Message *m, const H3View *views, uint32_t n) {
        Place *p = e->places + exchange_place(e->plan, m);
        uint64_t size = exchange_bytes_of(views, n);
        uint8_t *bytes;
        int r;

        if (size > p->size || m->sequence != atomic_load(&p->published) + 1)
                return -EPROTO;
        r = call_hook(e, rank->index, m, NULL, size);
        if (r >= 0)
                r = exchange_wait(e, rank->index, awaits_place, &(WaitForMessage){p, m});
        if (r >= 0)
                r = e->transport->put(e, rank, p, m, views, n, &bytes);
        if (r >= 0 && bytes)
                r = call_hook(e, rank->index, m, bytes, size);
        if (r < 0)
                return r;

        e->members[rank->index].sent += size;
        (void) pthread_mutex_lock(&e->lock);
        if (e->link)
                exchange_link_send(e->link, (size_t) (p - e->places), rank->index, p->readers, size,
                        e->transport == &exchange_host || e->transport == &exchange_staged);
        atomic_store(&p->taken, 0);
        atomic_store_explicit(&p->published, m->sequence, memory_order_release);
        (void) pthread_cond_broadcast(&e->changed);
        (void) pthread_mutex_unlock(&e->lock);
        return 0;
}

static int send(H3Exchange *interface, const H3Rank *rank, const H3Message *m, const H3View *views, uint32_t n) {
        Exchange *e = (Exchange *) interface;
        int r;

        r = lap(e, rank, true);
        if (r >= 0)
                r = put_message(e, rank, m, views, n);
        return r < 0 ? r : lap(e, rank, false);
}

static int get_message(Exchange *e, const H3Rank *rank, const H3Message *m, const H3View *views, uint32_t n) {
        Place *p = e->places + exchange_place(e->plan, m);
        uint64_t size = exchange_bytes_of(views, n);
        int r;

        if (size > p->size)
                return -EPROTO;
        r = call_hook(e, rank->index, m, NULL, size);
        if (r >= 0 && e->transport->expect)
                r = e->transport->expect(e, rank, m);
        if (r >= 0)
                r = exchange_wait(e, rank->index, awaits_message, &(WaitForMessage){p, m});
        if (r >= 0)
                r = wait_link(e, rank->index, p);
        if (r < 0)
                return r;
        if (atomic_load(&p->published) != m->sequence)
                return -EPROTO;
        r = e->transport->get(e, rank, p, m, views, n);
        if (r < 0)
                return r;
        e->members[rank->index].received += size;
        (void) pthread_mutex_lock(&e->lock);
        (void) atomic_fetch_or_explicit(&p->taken, UINT64_C(1) << rank->index, memory_order_release);
        (void) pthread_cond_broadcast(&e->changed);
        (void) pthread_mutex_unlock(&e->lock);
        return 0;
}

static int recv(H3Exchange *interface, const H3Rank *rank, const H3Message *m, const H3View *views, uint32_t n) {
        Exchange *e = (Exchange *) interface;
        int r;

        r = lap(e, rank, true);
        if (r >= 0)
                r = get_message(e, rank, m, views, n);
        return r < 0 ? r : lap(e, rank, false);
}

static void fail(H3Exchange *interface, uint32_t rank, int error, const Fault *f) {
        Exchange *e = (Exchange *) interface;

        (void) pthread_mutex_lock(&e->lock);
        set_error(e, error, f);
        (void) pthread_mutex_unlock(&e->lock);
}

static int init_lock(Exchange *e) {
        pthread_condattr_t attributes;
        int r;

        r = pthread_condattr_init(&attributes);
        if (r != 0)
                return -r;
        (void) pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
        r = pthread_cond_init(&e->changed, &attributes);
        (void) pthread_condattr_destroy(&attributes);
        if (r != 0)
                return -r;
        return -pthread_mutex_init(&e->lock, NULL);
}

DEFINE_CLEANUP(Exchange *, exchange_free)

static const Transport *const transports[] = {
        [EXCHANGE_HOST] = &exchange_host,
        [EXCHANGE_STAGED] = &exchange_staged,
        [EXCHANGE_P2P] = &exchange_p2p,
        [EXCHANGE_NCCL] = &exchange_nccl,
};

int exchange_new(ExchangeKind kind, const H3Plan *p, ExchangeSize size, uint64_t deadline_usec, const ExchangeHook *hook,
        Exchange **ret) {
        CLEANUP(exchange_freep) Exchange *e = NULL;
        int r;

        if (p->ranks > RANKS_MAX)
                return -EINVAL;
        e = calloc(1, sizeof(*e));
        if (!e)
                return -ENOMEM;
        r = init_lock(e);
        if (r < 0) {
                free(STEAL_PTR(e));
                return r;
        }
        e->interface = (H3Exchange){send, recv, fail};
        e->transport = transports[kind];
        e->plan = p;
        e->deadline_usec = deadline_usec;
        e->hook = hook ? *hook : (ExchangeHook){};
        e->members = calloc(p->ranks, sizeof(*e->members));
        e->places = calloc(exchange_places(p), sizeof(*e->places));
        if (!e->members || !e->places)
                return -ENOMEM;

        for (size_t i = 0; i < exchange_places(p); i++) {
                const H3Message m = exchange_message_of(p, i);

                e->places[i].size = size.func(size.userdata, &m);
                e->places[i].readers = exchange_readers(p, &m);
                atomic_init(&e->places[i].taken, e->places[i].readers);
        }
        r = e->transport->make(e);
        if (r < 0)
                return r;
        *ret = STEAL_PTR(e);
        return 0;
}

void exchange_set_staging(Exchange *e, Staging *s) {
        e->staging = s;
}

Exchange *exchange_free(Exchange *e) {
        if (!e)
                return NULL;
        e->transport->unmake(e);
        (void) exchange_link_free(e->link);
        (void) pthread_cond_destroy(&e->changed);
        (void) pthread_mutex_destroy(&e->lock);
        free(e->places);
        free(e->members);
        free(e);
        return NULL;
}

H3Exchange *exchange_interface(Exchange *e) {
        return &e->interface;
}

int exchange_open(Exchange *e, const H3Rank *rank) {
        int r;

        r = make_link(e, rank);
        if (r >= 0 && e->hook.measures && rank->ops->laps) /* what is left of a step that failed */
                r = rank->ops->laps(rank->context, &e->members[rank->index].exposed_usec);
        if (r < 0)
                return r;
        e->members[rank->index].exposed_usec = 0;
        return e->transport->open ? e->transport->open(e, rank) : 0;
}

int exchange_close(Exchange *e, const H3Rank *rank) {
        int r = 0;

        if (e->hook.measures && rank->ops->laps && atomic_load(&e->error) == 0)
                r = rank->ops->laps(rank->context, &e->members[rank->index].exposed_usec);
        if (e->transport->close) {
                int closed = e->transport->close(e, rank);

                r = r < 0 ? r : closed;
        }
        return r;
}

int exchange_error(Exchange *e, Fault *f) {
        int r;

        (void) pthread_mutex_lock(&e->lock);
        r = atomic_load(&e->error);
        if (r < 0 && f)
                *f = e->fault;
        (void) pthread_mutex_unlock(&e->lock);
        return r;
}

uint64_t exchange_exposed(const Exchange *e) {
        uint64_t most = 0;

        for (uint32_t i = 0; i < e->plan->ranks; i++)
                most = e->members[i].exposed_usec > most ? e->members[i].exposed_usec : most;
        return most;
}

void exchange_bytes(const Exchange *e, uint32_t rank, uint64_t *ret_sent, uint64_t *ret_received) {
        *ret_sent = e->members[rank].sent;
        *ret_received = e->members[rank].received;
}
