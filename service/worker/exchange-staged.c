/* SPDX-License-Identifier: Apache-2.0 */
/* From device to device through memory of the host, beside the computation. A message's way:
 *
 *      views -> the sender's place      on its LK_COMPUTE: the views may be overwritten by what comes next
 *      -> the message's place           on its LK_PEER: host memory, one for all readers, made by one of them
 *      -> each reader's place           on its LK_TAKE, which the host gives out while the device is at work on what came before
 *      -> the reader's views            on its LK_COMPUTE
 *
 * Who waits for whom is as in exchange-p2p.c: a device waits for another's event only after the sequence number of the place said
 * that it was marked, and the host waits by asking, with the deadline. The place on the host is overwritten when all readers' copies out
 * of it have ended, the reader's when what was there went into its views.
 *
 * Memory that cannot be registered with the devices is used as exchange-host.c does it, while the threads wait. */

#include <errno.h>
#include <stdlib.h>

#include "service/worker/exchange-device.h"
#include "service/worker/staging.h"

/* Events of a context. Several places may have one. */
#define SLOTS 42u
enum {
        EVENT_SENT = DEVICE_FIRST_EVENT,  /* [SLOTS] on LK_PEER, the sender's */
        EVENT_ARRIVED = EVENT_SENT + SLOTS, /* [SLOTS] on LK_TAKE, the reader's */
        EVENT_TAKEN = EVENT_ARRIVED + SLOTS, /* [SLOTS] on LK_COMPUTE, the reader's */
        EVENT_END = EVENT_TAKEN + SLOTS,
};
_Static_assert(EVENT_END <= LK_EVENTS_MAX, "events of an exchange");

typedef struct Staged {
        Staging own; /* where the exchange was given none */
        StagingArea areas[RANKS_MAX]; /* of those that are open */
        uint64_t sizes[RANKS_MAX];
        uint8_t *sent;    /* [places]: the sender's slot */
        uint8_t *read;    /* [places and readers, as DeviceExchange.offsets]: the reader's */
        atomic_bool lost; /* a device may still copy */
} Staged;

static Staged *state_of(const Exchange *e) {
        return ((DeviceExchange *) e->own)->own;
}

static bool is_used(const Place *p) {
        return p->readers != 0 && p->size > 0;
}

/* Whose memory the place is in: each sender's messages to all are another reader's. */
static uint32_t owner_of(const Exchange *e, const Place *p) {
        uint32_t from = exchange_message_of(e->plan, (size_t) (p - e->places)).from;
        uint64_t behind = p->readers & ~((UINT64_C(2) << from) - 1);

        return (uint32_t) __builtin_ctzll(behind != 0 ? behind : p->readers);
}

uint64_t exchange_staged_memory(const H3Plan *p, ExchangeSize size) {
        uint64_t sum = 0;

        for (size_t i = 0; i < exchange_places(p); i++) {
                const H3Message m = exchange_message_of(p, i);

                if (exchange_readers(p, &m) != 0)
                        sum += device_place_bytes(size.func(size.userdata, &m));
        }
        return sum;
}

/* Slots in the order of places, so that those of a block are others as long as there are enough. */
static void number_places(Exchange *e) {
        const DeviceExchange *x = e->own;
        Staged *s = x->own;
        uint32_t n_sent[RANKS_MAX] = {}, n_read[RANKS_MAX] = {};

        for (size_t i = 0; i < exchange_places(e->plan); i++) {
                const Place *p = e->places + i;
                uint8_t *read = s->read + x->first[i];

                if (!is_used(p))
                        continue;
                s->sent[i] = (uint8_t) (n_sent[exchange_message_of(e->plan, i).from]++ % SLOTS);
                for (uint32_t to = 0; to < e->plan->ranks; to++)
                        if (p->readers >> to & 1)
                                *read++ = (uint8_t) (n_read[to]++ % SLOTS);
        }
}

static int make(Exchange *e) {
        const size_t n = exchange_places(e->plan);
        DeviceExchange *x;
        uint64_t pairs = 0;
        Staged *s;
        int r;

        r = device_exchange_make(e);
        if (r < 0)
                return r;
        x = e->own;
        x->own = s = calloc(1, sizeof(*s));
        if (!s)
                return -ENOMEM;
        for (size_t i = 0; i < n; i++)
                pairs += (uint64_t) __builtin_popcountll(e->places[i].readers);
        s->sent = calloc(n, 1);
        s->read = calloc(pairs > 0 ? pairs : 1, 1);
        if (!s->sent || !s->read)
                return -ENOMEM;
        number_places(e);
        for (size_t i = 0; i < n; i++) {
                Place *p = e->places + i;

                if (!is_used(p))
                        continue;
                p->host_offset = s->sizes[owner_of(e, p)];
                s->sizes[owner_of(e, p)] += device_place_bytes(p->size);
        }
        return 0;
}

static void unmake(Exchange *e) {
        Staged *s = e->own ? state_of(e) : NULL;

        if (s) {
                if (s->lost)
                        staging_abandon(e->staging ? e->staging : &s->own);
                staging_clear(&s->own);
                free(s->sent);
                free(s->read);
        }
        device_exchange_unmake(e);
}

static int open_rank(Exchange *e, const H3Rank *rank) {
        Staged *s = state_of(e);
        int r;

        if (!rank->ops->copy)
                return -EOPNOTSUPP;
        r = staging_take(e->staging ? e->staging : &s->own, rank->ops, rank->context, rank->index, s->sizes[rank->index],
                s->areas + rank->index);
        return r < 0 ? r : device_exchange_open(e, rank);
}

static int close_rank(Exchange *e, const H3Rank *rank) {
        const DeviceExchange *x = e->own;
        int r = 0;

        if (!x->peers[rank->index].memory)
                return 0;
        r = rank->ops->mark(rank->context, LK_TAKE, DEVICE_EVENT_ORDER);
        if (r >= 0)
                r = rank->ops->wait(rank->context, LK_PEER, DEVICE_EVENT_ORDER);
        if (r >= 0)
                r = device_exchange_close(e, rank);
        if (r < 0)
                state_of(e)->lost = true;
        return r;
}

static uint32_t sent_event(const Exchange *e, const Place *p) {
        return EVENT_SENT + state_of(e)->sent[p - e->places];
}

static uint32_t read_slot(const Exchange *e, const Place *p, uint32_t reader) {
        const DeviceExchange *x = e->own;
        uint64_t before = p->readers & ((UINT64_C(1) << reader) - 1);

        return state_of(e)->read[x->first[p - e->places] + (uint64_t) __builtin_popcountll(before)];
}

static uint32_t arrived_event(const Exchange *e, const Place *p, uint32_t reader) {
        return EVENT_ARRIVED + read_slot(e, p, reader);
}

static uint32_t taken_event(const Exchange *e, const Place *p, uint32_t reader) {
        return EVENT_TAKEN + read_slot(e, p, reader);
}

/* A queue's copy of a dense message, as slow as a test wants it. */
static int copy(Exchange *e, const H3Rank *rank, LkQueue queue, uint8_t *to, const uint8_t *from, uint64_t size) {
        const LkCopy a = {.to = to, .from = from, .rows = 1, .width = size, .to_stride = size, .from_stride = size};
        int r;

        r = device_exchange_hold(e, rank, queue);
        if (r >= 0)
                r = rank->ops->copy(rank->context, queue, &a);
        return r < 0 ? r : device_exchange_release(e, rank, queue, size);
}

/* LK_PEER waits for the readers of the message that is in the place. */
static int wait_for_readers(Exchange *e, const H3Rank *rank, const Place *p) {
        const DeviceExchange *x = e->own;
        int r = 0;

        for (uint32_t to = 0; r >= 0 && to < e->plan->ranks; to++)
                if (p->readers >> to & 1)
                        r = rank->ops->wait_for(rank->context, LK_PEER, x->peers[to].context, arrived_event(e, p, to));
        return r;
}

static int put(Exchange *e, const H3Rank *rank, const Place *p, const H3Message *m, const H3View *views, uint32_t n,
        uint8_t **ret_bytes) {
        const DeviceExchange *x = e->own;
        const LkOps *ops = rank->ops;
        uint8_t *from = x->peers[rank->index].memory + p->offset, *to;
        const StagingArea *area;
        int r;

        *ret_bytes = NULL;
        if (!is_used(p))
                return 0;
        r = device_exchange_wait_open(e, rank->index, owner_of(e, p));
        if (r < 0)
                return r;
        area = state_of(e)->areas + owner_of(e, p);
        to = area->memory + p->host_offset;
        if (!area->registered) {
                *ret_bytes = to;
                return exchange_host_copy(rank, views, n, to, true);
        }

        if (m->sequence > 1)
                r = device_exchange_wait_done(e, rank, sent_event(e, p), e->deadline_usec, false);
        if (r >= 0)
                r = device_exchange_copy(rank, views, n, from, true);
        if (r >= 0)
                r = ops->mark(rank->context, LK_COMPUTE, DEVICE_EVENT_ORDER);
        if (r >= 0)
                r = ops->wait(rank->context, LK_PEER, DEVICE_EVENT_ORDER);
        if (r >= 0 && m->sequence > 1)
                r = wait_for_readers(e, rank, p);
        if (r >= 0)
                r = copy(e, rank, LK_PEER, to, from, exchange_bytes_of(views, n));
        return r < 0 ? r : ops->mark(rank->context, LK_PEER, sent_event(e, p));
}

static int get(Exchange *e, const H3Rank *rank, const Place *p, const H3Message *m, const H3View *views, uint32_t n) {
        const DeviceExchange *x = e->own;
        const LkOps *ops = rank->ops;
        const StagingArea *area;
        uint8_t *from, *to;
        int r;

        if (!is_used(p))
                return 0;
        area = state_of(e)->areas + owner_of(e, p);
        from = area->memory + p->host_offset;
        if (!area->registered)
                return exchange_host_copy(rank, views, n, from, false);

        to = device_exchange_reader_place(e, p, rank->index);
        r = ops->wait_for(rank->context, LK_TAKE, x->peers[m->from].context, sent_event(e, p));
        if (r >= 0)
                r = ops->wait(rank->context, LK_TAKE, m->sequence > 1 ? taken_event(e, p, rank->index) : DEVICE_EVENT_OPEN);
        if (r >= 0)
                r = copy(e, rank, LK_TAKE, to, from, exchange_bytes_of(views, n));
        if (r >= 0)
                r = ops->mark(rank->context, LK_TAKE, arrived_event(e, p, rank->index));
        if (r >= 0)
                r = ops->wait(rank->context, LK_COMPUTE, arrived_event(e, p, rank->index));
        if (r >= 0)
                r = device_exchange_copy(rank, views, n, to, false);
        return r < 0 ? r : ops->mark(rank->context, LK_COMPUTE, taken_event(e, p, rank->index));
}

const Transport exchange_staged = {
        .make = make,
        .unmake = unmake,
        .open = open_rank,
        .close = close_rank,
        .put = put,
        .get = get,
};
