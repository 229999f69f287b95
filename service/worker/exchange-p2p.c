/* SPDX-License-Identifier: Apache-2.0 */
/* From device to device. A message's way:
 *
 *      views -> the sender's place      on its LK_COMPUTE: the views may be overwritten by what comes next
 *      -> the places of its readers     on its LK_PEER, behind what all of them compute meanwhile
 *      -> the reader's views            on its LK_COMPUTE
 *
 * A device waits for another's event only after its rank has said, by the sequence number of the place, that the event was
 * marked: so everything waits for work that was given out before, and nothing waits in a circle. An event may stand for later
 * work of its queue by then, which is only late. The host waits for what devices do by asking, with the deadline: before a place
 * is used again, and at the end. */

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <time.h>

#include "service/shared/cleanup.h"
#include "service/shared/clock.h"
#include "service/worker/exchange-private.h"

#define PLACE_ALIGN UINT64_C(256)
#define POLL_USEC 50
#define CLOSE_USEC UINT64_C(5000000) /* the end of a rank that failed: others wait for it already */

/* Events of a context. Several places may have one. */
#define SLOTS 60u
enum {
        EVENT_OPEN = EXCHANGE_FIRST_EVENT, /* what used the memory before is done */
        EVENT_ORDER,                       /* between two queues of the context */
        EVENT_SENT,                        /* [SLOTS] on LK_PEER, the sender's */
        EVENT_TAKEN = EVENT_SENT + SLOTS,  /* [SLOTS] on LK_COMPUTE, the reader's */
        EVENT_END = EVENT_TAKEN + SLOTS,
};
_Static_assert(EVENT_END <= LK_EVENTS_MAX, "events of an exchange");

typedef struct Peer {
        LkContext *context;
        uint8_t *memory; /* places of what it sends, then of what it is sent */
        uint64_t size;
        bool open; /* under the lock */
} Peer;

typedef struct P2p {
        uint64_t *first; /* [places]: index in offsets */
        uint64_t *offsets; /* of each place and reader, in the reader's memory */
        Peer peers[RANKS_MAX];
} P2p;

static uint64_t place_bytes(uint64_t size) {
        return (size + PLACE_ALIGN - 1) / PLACE_ALIGN * PLACE_ALIGN;
}

uint64_t exchange_p2p_memory(const H3Plan *p, ExchangeSize size, uint32_t rank) {
        uint64_t sum = 0;

        for (size_t i = 0; i < exchange_places(p); i++) {
                const H3Message m = exchange_message_of(p, i);
                uint64_t readers = exchange_readers(p, &m), bytes;

                if (readers == 0 || (m.from != rank && !(readers >> rank & 1)))
                        continue;
                bytes = size.func(size.userdata, &m);
                sum += place_bytes(bytes);
        }
        return sum;
}

static int make(Exchange *e) {
        const size_t n = exchange_places(e->plan);
        P2p *x = calloc(1, sizeof(*x));
        uint64_t pairs = 0;

        if (!x)
                return -ENOMEM;
        e->own = x;
        x->first = calloc(n, sizeof(*x->first));
        if (!x->first)
                return -ENOMEM;
        for (size_t i = 0; i < n; i++) {
                x->first[i] = pairs;
                pairs += (uint64_t) __builtin_popcountll(e->places[i].readers);
        }
        x->offsets = calloc(pairs > 0 ? pairs : 1, sizeof(*x->offsets));
        if (!x->offsets)
                return -ENOMEM;

        for (size_t i = 0; i < n; i++) {
                Place *p = e->places + i;
                Peer *from = x->peers + exchange_message_of(e->plan, i).from;
                uint64_t *at = x->offsets + x->first[i];

                if (p->readers == 0)
                        continue;
                p->offset = from->size;
                from->size += place_bytes(p->size);
                for (uint32_t to = 0; to < e->plan->ranks; to++)
                        if (p->readers >> to & 1) {
                                *at++ = x->peers[to].size;
                                x->peers[to].size += place_bytes(p->size);
                        }
        }
        return 0;
}

static void unmake(Exchange *e) {
        P2p *x = e->own;

        if (!x)
                return;
        free(x->first);
        free(x->offsets);
        free(x);
}

static int open_rank(Exchange *e, const H3Rank *rank) {
        P2p *x = e->own;
        Peer *own = x->peers + rank->index;
        void *memory;
        int r;

        if (!rank->ops->copy)
                return -EOPNOTSUPP;
        r = rank->ops->memory_new(rank->context, own->size, &memory);
        if (r < 0)
                return r;
        own->memory = memory;
        own->context = rank->context;
        r = rank->ops->mark(rank->context, LK_COMPUTE, EVENT_OPEN);
        if (r < 0)
                return r;
        (void) pthread_mutex_lock(&e->lock);
        own->open = true;
        (void) pthread_cond_broadcast(&e->changed);
        (void) pthread_mutex_unlock(&e->lock);
        return 0;
}

/* What the event stands for is done, as long as the group has no error (any: it may have one). */
static int wait_done(Exchange *e, const H3Rank *rank, uint32_t event, uint64_t patience_usec, bool any) {
        const struct timespec pause = {.tv_nsec = POLL_USEC * 1000};
        uint64_t until = clock_usec() + patience_usec;
        Fault f = {};
        int r;

        for (;;) {
                r = atomic_load(&e->error);
                if (r < 0 && !any)
                        return r;
                r = rank->ops->is_done(rank->context, event);
                if (r != 0)
                        return r < 0 ? r : 0;
                if (clock_usec() >= until)
                        break;
                (void) nanosleep(&pause, NULL);
        }

        r = fault_set(&f, -EIO, FAULT_INTERNAL, "A copy of rank %" PRIu32 " to the device of another did not end in %" PRIu64 " s.",
                rank->index, (patience_usec + 999999) / 1000000);
        e->interface.fail(&e->interface, rank->index, r, &f);
        return r;
}

/* What was sent arrives before its memory is somebody else's. What was sent to this rank arrives before the others have
 * ended: their memory and this one's may be kept for others of the same context, but not be given back until then. */
static int close_rank(Exchange *e, const H3Rank *rank) {
        P2p *x = e->own;
        Peer *own = x->peers + rank->index;
        int r;

        if (!own->memory)
                return 0;
        r = rank->ops->mark(rank->context, LK_PEER, EVENT_ORDER);
        if (r >= 0)
                r = wait_done(e, rank, EVENT_ORDER, e->deadline_usec < CLOSE_USEC ? e->deadline_usec : CLOSE_USEC, true);
        if (r >= 0) /* else the device is lost, and the worker with it */
                rank->ops->memory_free(rank->context, own->memory);
        return r;
}

/* Views to a place or back, inside the rank's device. */
static int copy_views(const H3Rank *rank, const H3View *views, uint32_t n, uint8_t *place, bool in) {
        int r = 0;

        for (uint32_t i = 0; r >= 0 && i < n; i++) {
                const H3View *v = views + i;
                const LkCopy a = {
                        .to = in ? place : v->data,
                        .from = in ? v->data : place,
                        .rows = v->rows,
                        .width = v->width,
                        .to_stride = in ? v->width : v->stride,
                        .from_stride = in ? v->stride : v->width,
                };

                r = rank->ops->copy(rank->context, LK_COMPUTE, &a);
                place += v->rows * v->width;
        }
        return r;
}

static uint32_t sent_event(const Exchange *e, const H3Message *m) {
        uint32_t to = m->to == H3_TO_ALL ? e->plan->ranks : m->to;

        return EVENT_SENT + ((m->phase * (e->plan->ranks + 1) + to) * e->plan->chunks + m->chunk) % SLOTS;
}

static uint32_t taken_event(const Exchange *e, const H3Message *m) {
        return EVENT_TAKEN + ((m->phase * e->plan->ranks + m->from) * e->plan->chunks + m->chunk) % SLOTS;
}

static int awaits_open(const Exchange *e, const void *what) {
        const P2p *x = e->own;
        uint32_t rank = *(const uint32_t *) what;

        return x->peers[rank].open ? -1 : (int) rank;
}

/* It has made its memory. */
static int wait_open(Exchange *e, uint32_t rank, uint32_t to) {
        const P2p *x = e->own;
        bool is_open;

        (void) pthread_mutex_lock(&e->lock);
        is_open = x->peers[to].open;
        (void) pthread_mutex_unlock(&e->lock);
        return is_open ? 0 : exchange_wait(e, rank, awaits_open, &to);
}

static uint8_t *reader_place(const Exchange *e, const Place *p, uint32_t reader) {
        const P2p *x = e->own;
        uint64_t before = p->readers & ((UINT64_C(1) << reader) - 1);

        return x->peers[reader].memory + x->offsets[x->first[p - e->places] + (uint64_t) __builtin_popcountll(before)];
}

static int copy_to(Exchange *e, const H3Rank *rank, const Place *p, const H3Message *m, uint32_t to, uint8_t *from, uint64_t size) {
        const P2p *x = e->own;
        const LkOps *ops = rank->ops;
        int r;

        r = wait_open(e, rank->index, to);
        if (r >= 0)
                r = ops->wait_for(rank->context, LK_PEER, x->peers[to].context, m->sequence > 1 ? taken_event(e, m) : EVENT_OPEN);
        if (r < 0)
                return r;
        return ops->copy(rank->context, LK_PEER,
                &(LkCopy){.to = reader_place(e, p, to), .from = from, .rows = 1, .width = size, .to_stride = size, .from_stride = size});
}

static int put(Exchange *e, const H3Rank *rank, const Place *p, const H3Message *m, const H3View *views, uint32_t n,
        uint8_t **ret_bytes) {
        const P2p *x = e->own;
        uint8_t *from = x->peers[rank->index].memory + p->offset;
        uint64_t size = 0;
        int r = 0;

        *ret_bytes = NULL;
        for (uint32_t i = 0; i < n; i++)
                size += views[i].rows * views[i].width;

        if (m->sequence > 1)
                r = wait_done(e, rank, sent_event(e, m), e->deadline_usec, false);
        if (r >= 0)
                r = copy_views(rank, views, n, from, true);
        if (r >= 0)
                r = rank->ops->mark(rank->context, LK_COMPUTE, EVENT_ORDER);
        if (r >= 0)
                r = rank->ops->wait(rank->context, LK_PEER, EVENT_ORDER);
        for (uint32_t to = 0; r >= 0 && to < e->plan->ranks; to++)
                if (p->readers >> to & 1)
                        r = copy_to(e, rank, p, m, to, from, size);
        return r < 0 ? r : rank->ops->mark(rank->context, LK_PEER, sent_event(e, m));
}

static int get(Exchange *e, const H3Rank *rank, const Place *p, const H3Message *m, const H3View *views, uint32_t n) {
        const P2p *x = e->own;
        int r;

        r = rank->ops->wait_for(rank->context, LK_COMPUTE, x->peers[m->from].context, sent_event(e, m));
        if (r >= 0)
                r = copy_views(rank, views, n, reader_place(e, p, rank->index), false);
        return r < 0 ? r : rank->ops->mark(rank->context, LK_COMPUTE, taken_event(e, m));
}

const Transport exchange_p2p = {
        .make = make,
        .unmake = unmake,
        .open = open_rank,
        .close = close_rank,
        .put = put,
        .get = get,
};
