/* SPDX-License-Identifier: Apache-2.0 */
#include "service/worker/exchange.h"

#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "service/shared/cleanup.h"
#include "service/shared/clock.h"

#define PLACE_ALIGN UINT64_C(64)

/* Of one (phase, from, to, chunk). */
typedef struct Place {
        uint64_t offset, size;     /* in the staging memory */
        uint64_t readers;          /* a bit per rank */
        atomic_uint published;     /* sequence of the message that is there */
        atomic_uint_least64_t taken; /* by these readers; all of them: the place is free */
} Place;

#define RANKS_MAX 64

typedef struct Member {
        uint64_t sent, received; /* the rank's own thread writes */
        uint32_t waits_for;      /* rank + 1; under the lock */
} Member;

struct Exchange {
        H3Exchange interface; /* first: the functions get a pointer to it */
        const H3Plan *plan;
        uint64_t deadline_usec;
        ExchangeHook hook;
        Place *places; /* [phases, ranks, ranks + 1 (the last: to all), chunks] */
        uint8_t *staging;
        uint64_t staging_size;
        Member *members;

        pthread_mutex_t lock; /* of all below; also around what waiters wait for */
        pthread_cond_t changed;
        atomic_int error;
        Fault fault;
};

static size_t n_places(const H3Plan *p) {
        return (size_t) _H3_PHASE_MAX * p->ranks * (p->ranks + 1) * p->chunks;
}

static size_t place_index(const H3Plan *p, const H3Message *m) {
        uint32_t to = m->to == H3_TO_ALL ? p->ranks : m->to;

        return (((size_t) m->phase * p->ranks + m->from) * (p->ranks + 1) + to) * p->chunks + m->chunk;
}

static uint64_t readers_of(const H3Plan *p, const H3Message *m) {
        uint64_t readers = 0;

        for (uint32_t to = 0; to < p->ranks; to++)
                if ((m->to == H3_TO_ALL || m->to == to) && h3_plan_receives(p, m->phase, m->from, to))
                        readers |= UINT64_C(1) << to;
        return readers;
}

uint64_t exchange_step_message(const void *step, const H3Message *m) {
        const ExchangeStep *s = step;

        return h3_message_max(s->model, s->plan, s->compute, m);
}

uint64_t exchange_text_message(const void *text, const H3Message *m) {
        const ExchangeText *t = text;

        return h3_text_message_max(t->model, &t->size, m);
}

/* Returns the bytes of all places; places: NULL, or filled. */
static uint64_t lay_out(const H3Plan *p, ExchangeSize max, Place *places) {
        uint64_t at = 0;

        for (size_t i = 0; i < n_places(p); i++) {
                uint32_t to = (uint32_t) (i / p->chunks % (p->ranks + 1));
                const H3Message message = {
                        .phase = (H3Phase) (i / p->chunks / (p->ranks + 1) / p->ranks),
                        .from = (uint32_t) (i / p->chunks / (p->ranks + 1) % p->ranks),
                        .to = to == p->ranks ? H3_TO_ALL : to,
                        .chunk = (uint32_t) (i % p->chunks),
                };
                uint64_t size = max.func(max.userdata, &message);

                if (places) {
                        places[i].offset = at;
                        places[i].size = size;
                        places[i].readers = readers_of(p, &message);
                        atomic_init(&places[i].taken, places[i].readers);
                }
                at += (size + PLACE_ALIGN - 1) / PLACE_ALIGN * PLACE_ALIGN;
        }
        return at;
}

uint64_t exchange_memory(const H3Plan *p, ExchangeSize size) {
        return p->ranks > 1 ? lay_out(p, size, NULL) + n_places(p) * sizeof(Place) : 0;
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

/* Whom the wait for a message (sequence > 0) or for a free place (0) is for: a rank, or -1: it is over. */
static int awaited(const Place *p, const H3Message *m, uint32_t sequence) {
        uint64_t missing;

        if (sequence > 0)
                return atomic_load_explicit(&p->published, memory_order_acquire) >= sequence ? -1 : (int) m->from;
        missing = p->readers & ~atomic_load_explicit(&p->taken, memory_order_acquire);
        return missing == 0 ? -1 : __builtin_ctzll(missing);
}

static int wait_for(Exchange *e, uint32_t rank, const Place *p, const H3Message *m, uint32_t sequence) {
        struct timespec until;
        Fault f = {};
        int on, r = 0;

        if (atomic_load(&e->error) == 0 && awaited(p, m, sequence) < 0)
                return 0;

        until = clock_after(e->deadline_usec);
        (void) pthread_mutex_lock(&e->lock);
        while (atomic_load(&e->error) == 0 && (on = awaited(p, m, sequence)) >= 0) {
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

static int call_hook(Exchange *e, uint32_t rank, const H3Message *m, uint8_t *bytes, uint64_t size) {
        return e->hook.func ? e->hook.func(e->hook.userdata, rank, m, bytes, size) : 0;
}

static uint64_t total(const H3View *views, uint32_t n) {
        uint64_t size = 0;

        for (uint32_t i = 0; i < n; i++)
                size += views[i].rows * views[i].width;
        return size;
}

/* Views to bytes or back, by the rank's own device. */
static int copy(const H3Rank *rank, const H3View *v, uint8_t *bytes, bool in) {
        bool dense = v->stride == v->width;
        uint64_t rows = dense ? 1 : v->rows, width = dense ? v->rows * v->width : v->width;
        int r = 0;

        for (uint64_t i = 0; r >= 0 && i < rows; i++) {
                uint8_t *device = (uint8_t *) v->data + i * v->stride, *host = bytes + i * width;

                r = in ? rank->ops->download(rank->context, host, device, width)
                       : rank->ops->upload(rank->context, device, host, width);
        }
        return r;
}

static int copy_all(const H3Rank *rank, const H3View *views, uint32_t n, uint8_t *bytes, bool in) {
        int r = 0;

        for (uint32_t i = 0; r >= 0 && i < n; i++) {
                r = copy(rank, views + i, bytes, in);
                bytes += views[i].rows * views[i].width;
        }
        return r;
}

static int host_send(
        H3Exchange *interface, const H3Rank *rank, const H3Message *m, const H3View *views, uint32_t n) {
        Exchange *e = (Exchange *) interface;
        Place *p = e->places + place_index(e->plan, m);
        uint64_t size = total(views, n);
        uint8_t *bytes = e->staging + p->offset;
        int r;

        if (size > p->size || m->sequence != atomic_load(&p->published) + 1)
                return -EPROTO;
        r = call_hook(e, rank->index, m, NULL, size);
        if (r >= 0)
                r = wait_for(e, rank->index, p, m, 0);
        if (r >= 0)
                r = copy_all(rank, views, n, bytes, true);
        if (r >= 0)
                r = call_hook(e, rank->index, m, bytes, size);
        if (r < 0)
                return r;

        e->members[rank->index].sent += size;
        (void) pthread_mutex_lock(&e->lock);
        atomic_store(&p->taken, 0);
        atomic_store_explicit(&p->published, m->sequence, memory_order_release);
        (void) pthread_cond_broadcast(&e->changed);
        (void) pthread_mutex_unlock(&e->lock);
        return 0;
}

static int host_recv(
        H3Exchange *interface, const H3Rank *rank, const H3Message *m, const H3View *views, uint32_t n) {
        Exchange *e = (Exchange *) interface;
        Place *p = e->places + place_index(e->plan, m);
        uint64_t size = total(views, n);
        int r;

        if (size > p->size)
                return -EPROTO;
        r = call_hook(e, rank->index, m, NULL, size);
        if (r >= 0)
                r = wait_for(e, rank->index, p, m, m->sequence);
        if (r < 0)
                return r;
        if (atomic_load(&p->published) != m->sequence)
                return -EPROTO;
        r = copy_all(rank, views, n, e->staging + p->offset, false);
        if (r < 0)
                return r;
        e->members[rank->index].received += size;
        (void) pthread_mutex_lock(&e->lock);
        (void) atomic_fetch_or_explicit(&p->taken, UINT64_C(1) << rank->index, memory_order_release);
        (void) pthread_cond_broadcast(&e->changed);
        (void) pthread_mutex_unlock(&e->lock);
        return 0;
}

static void host_fail(H3Exchange *interface, uint32_t rank, int error, const Fault *f) {
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

int exchange_new(const H3Plan *p, ExchangeSize size, uint64_t deadline_usec, const ExchangeHook *hook, Exchange **ret) {
        CLEANUP(exchange_freep) Exchange *e = NULL;
        void *staging;
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
        e->interface = (H3Exchange){host_send, host_recv, host_fail};
        e->plan = p;
        e->deadline_usec = deadline_usec;
        e->hook = hook ? *hook : (ExchangeHook){};
        e->members = calloc(p->ranks, sizeof(*e->members));
        e->places = calloc(n_places(p), sizeof(*e->places));
        if (!e->members || !e->places)
                return -ENOMEM;

        e->staging_size = lay_out(p, size, e->places);
        if (e->staging_size > 0) {
                staging = mmap(NULL, e->staging_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
                if (staging == MAP_FAILED)
                        return -errno;
                e->staging = staging;
        }
        *ret = STEAL_PTR(e);
        return 0;
}

Exchange *exchange_free(Exchange *e) {
        if (!e)
                return NULL;
        if (e->staging)
                (void) munmap(e->staging, e->staging_size);
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

int exchange_error(Exchange *e, Fault *f) {
        int r;

        (void) pthread_mutex_lock(&e->lock);
        r = atomic_load(&e->error);
        if (r < 0 && f)
                *f = e->fault;
        (void) pthread_mutex_unlock(&e->lock);
        return r;
}

void exchange_bytes(const Exchange *e, uint32_t rank, uint64_t *ret_sent, uint64_t *ret_received) {
        *ret_sent = e->members[rank].sent;
        *ret_received = e->members[rank].received;
}
