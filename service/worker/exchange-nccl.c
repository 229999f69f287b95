/* SPDX-License-Identifier: Apache-2.0 */
/* By NCCL. What the ranks send each other in a phase of a block, of one chunk, is a group: each rank gives the same ones to its
 * LK_PEER in the same order,
 *
 *      views -> the sender's places     on its LK_COMPUTE
 *      the group                        on LK_PEER, when the last of its own messages is in its place: what it sends, and what it
 *                                       gets, all at once
 *      places -> the reader's views     on its LK_COMPUTE
 *
 * as messages of the largest size that they have. A group ends when all its ranks have come to it, so one that is missing keeps the
 * others: who fails, or is cancelled, gives its queue the groups that others have been given already, with whatever is in its
 * places, and NCCL stays as it was. Only where a rank does not do that in time, or NCCL failed, all is given up (nccl_abort()),
 * and the worker with it. */

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>

#include "service/shared/cleanup.h"
#include "service/shared/clock.h"
#include "service/shared/wire.h"
#include "service/worker/exchange-device.h"
#include "service/worker/nccl.h"

#define GROUPS (_H3_PHASE_MAX * WIRE_CHUNKS_MAX) /* of a block */
enum {
        EVENT_GROUP = DEVICE_FIRST_EVENT, /* [GROUPS] on LK_PEER: one of the newest block that has it */
        EVENT_END = EVENT_GROUP + GROUPS,
};
_Static_assert(EVENT_END <= LK_EVENTS_MAX, "events of an exchange");

typedef struct NcclRank {
        uint32_t put[_H3_PHASE_MAX][WIRE_CHUNKS_MAX]; /* own messages of the group that are in their places */
        uint64_t posted; /* groups that the queue was given; under the lock */
        bool closed;     /* under the lock */
} NcclRank;

typedef struct NcclRanks {
        NcclRank ranks[RANKS_MAX];
        atomic_bool over;
} NcclRanks;

static NcclRanks *state_of(const Exchange *e) {
        return ((DeviceExchange *) e->own)->own;
}

static int make(Exchange *e) {
        int r;

        if (e->plan->chunks > WIRE_CHUNKS_MAX)
                return -EINVAL;
        r = device_exchange_make(e);
        if (r < 0)
                return r;
        ((DeviceExchange *) e->own)->own = calloc(1, sizeof(NcclRanks));
        return state_of(e) ? 0 : -ENOMEM;
}

/* In the order in which all ranks give them to their queues: by block, phase, chunk. */
static uint64_t group_of(const Exchange *e, const H3Message *m) {
        return ((uint64_t) (m->sequence - 1) * _H3_PHASE_MAX + m->phase) * e->plan->chunks + m->chunk;
}

static uint32_t group_event(const Exchange *e, uint64_t group) {
        return EVENT_GROUP + (uint32_t) (group % (_H3_PHASE_MAX * e->plan->chunks));
}

/* The place of what a rank sends another in a group; NULL: nothing. */
static const Place *place_between(const Exchange *e, uint64_t group, uint32_t from, uint32_t to) {
        const uint64_t n = e->plan->chunks;
        H3Message m = {.phase = (H3Phase) (group / n % _H3_PHASE_MAX), .from = from, .to = to, .chunk = (uint32_t) (group % n)};
        const Place *p;

        if (h3_plan_sends_to_all(e->plan, m.phase))
                m.to = H3_TO_ALL;
        p = e->places + exchange_place(e->plan, &m);
        return from != to && p->size > 0 && p->readers >> to & 1 ? p : NULL;
}

static uint32_t own_messages(const Exchange *e, uint64_t group, uint32_t rank) {
        uint32_t n = 0;

        for (uint32_t to = 0; to < e->plan->ranks; to++)
                n += place_between(e, group, rank, to) != NULL;
        return n;
}

static bool has_error(const void *userdata) {
        const Exchange *e = userdata;

        return atomic_load(&e->error) < 0;
}

/* The whole group fails, and the worker will. */
static int give_up(Exchange *e, const H3Rank *rank, int error, const Fault *f) {
        state_of(e)->over = true;
        e->interface.fail(&e->interface, rank->index, error, f);
        nccl_abort(rank->ops, rank->context);
        return error;
}

static int find_messages(const Exchange *e, uint64_t group, uint32_t rank, NcclMessage *ret) {
        const DeviceExchange *x = e->own;
        int n = 0;

        for (uint32_t i = 0; i < e->plan->ranks; i++) {
                const Place *out = place_between(e, group, rank, i), *in = place_between(e, group, i, rank);

                if (out)
                        ret[n++] = (NcclMessage){x->peers[rank].memory + out->offset, out->size, x->peers[i].context, true};
                if (in)
                        ret[n++] = (NcclMessage){device_exchange_reader_place(e, in, rank), in->size, x->peers[i].context, false};
        }
        return n;
}

static uint64_t sent_bytes(const NcclGroup *g) {
        uint64_t sum = 0;

        for (size_t i = 0; i < g->n; i++)
                sum += g->messages[i].is_sent ? g->messages[i].size : 0;
        return sum;
}

/* The next group, to the queue. */
static int post(Exchange *e, const H3Rank *rank, uint64_t patience_usec, bool any) {
        NcclRank *own = state_of(e)->ranks + rank->index;
        NcclMessage messages[2 * RANKS_MAX];
        const uint64_t group = own->posted;
        const NcclGroup g = {.messages = messages, .n = (size_t) find_messages(e, group, rank->index, messages),
                .deadline_usec = patience_usec, .stop = any ? NULL : has_error, .userdata = e};
        Fault f = {};
        int r = 0;

        own->put[group / e->plan->chunks % _H3_PHASE_MAX][group % e->plan->chunks] = 0;
        (void) pthread_mutex_lock(&e->lock);
        own->posted++;
        (void) pthread_mutex_unlock(&e->lock);
        if (g.n == 0)
                return 0;
        r = rank->ops->mark(rank->context, LK_COMPUTE, DEVICE_EVENT_ORDER); /* also what has read the places before */
        if (r >= 0)
                r = rank->ops->wait(rank->context, LK_PEER, DEVICE_EVENT_ORDER);
        if (r >= 0)
                r = device_exchange_hold(e, rank, LK_PEER);
        if (r >= 0)
                r = nccl_send(rank->ops, rank->context, LK_PEER, &g, &f);
        if (r == -ECANCELED) /* it is on its way */
                return atomic_load(&e->error);
        if (r >= 0)
                r = device_exchange_release(e, rank, LK_PEER, sent_bytes(&g));
        return r < 0 ? give_up(e, rank, r, &f) : rank->ops->mark(rank->context, LK_PEER, group_event(e, group));
}

/* All groups before this one. Those in which the rank itself has something to send were there when the last of it was. */
static int post_until(Exchange *e, const H3Rank *rank, uint64_t end) {
        const NcclRank *own = state_of(e)->ranks + rank->index;
        int r = 0;

        while (r >= 0 && own->posted < end) {
                const uint32_t *put = &own->put[own->posted / e->plan->chunks % _H3_PHASE_MAX][own->posted % e->plan->chunks];

                if (*put < own_messages(e, own->posted, rank->index))
                        return -EPROTO;
                r = post(e, rank, e->deadline_usec, false);
        }
        return r;
}

static bool takes_part(const Exchange *e, uint32_t rank) {
        return !h3_plan_is_idle(e->plan, rank);
}

/* Before the first group: afterwards nobody can be missing who has not been there. */
static int wait_all_open(Exchange *e, uint32_t rank) {
        int r = 0;

        for (uint32_t i = 0; r >= 0 && i < e->plan->ranks; i++)
                if (takes_part(e, i))
                        r = device_exchange_wait_open(e, rank, i);
        return r < 0 ? r : atomic_load(&e->error);
}

static int open_rank(Exchange *e, const H3Rank *rank) {
        Fault f = {};

        if (!rank->ops->native)
                return -EOPNOTSUPP;
        if (nccl_version() == 0) {
                (void) fault_set(&f, -EIO, FAULT_INTERNAL, "NCCL: this worker has none, or has none any more after an error.");
                e->interface.fail(&e->interface, rank->index, -EIO, &f);
                return -EIO;
        }
        return device_exchange_open(e, rank);
}

static int expect(Exchange *e, const H3Rank *rank, const H3Message *m) {
        int r = wait_all_open(e, rank->index);

        return r < 0 ? r : post_until(e, rank, group_of(e, m) + 1);
}

static int put(Exchange *e, const H3Rank *rank, const Place *p, const H3Message *m, const H3View *views, uint32_t n,
        uint8_t **ret_bytes) {
        const DeviceExchange *x = e->own;
        uint32_t *in_place = &state_of(e)->ranks[rank->index].put[m->phase][m->chunk];
        uint64_t group = group_of(e, m);
        int r;

        *ret_bytes = NULL;
        r = wait_all_open(e, rank->index);
        if (r >= 0) /* what the rank only receives */
                r = post_until(e, rank, group);
        if (r >= 0 && m->sequence > 1)
                r = device_exchange_wait_done(e, rank, group_event(e, group), e->deadline_usec, false);
        if (r >= 0)
                r = device_exchange_copy(rank, views, n, x->peers[rank->index].memory + p->offset, true);
        if (r < 0)
                return r;
        *in_place += m->to == H3_TO_ALL ? (uint32_t) __builtin_popcountll(p->readers) : 1;
        return *in_place == own_messages(e, group, rank->index) ? post_until(e, rank, group + 1) : 0;
}

static int get(Exchange *e, const H3Rank *rank, const Place *p, const H3Message *m, const H3View *views, uint32_t n) {
        int r;

        r = rank->ops->wait(rank->context, LK_COMPUTE, group_event(e, group_of(e, m)));
        return r < 0 ? r : device_exchange_copy(rank, views, n, device_exchange_reader_place(e, p, rank->index), false);
}

/* Under the lock. Whether somebody could have been given a group, and how many at most. */
static bool were_all_open(const Exchange *e, uint64_t *ret_posted) {
        const DeviceExchange *x = e->own;

        *ret_posted = 0;
        for (uint32_t i = 0; i < e->plan->ranks; i++) {
                if (takes_part(e, i) && !x->peers[i].open)
                        return false;
                if (state_of(e)->ranks[i].posted > *ret_posted)
                        *ret_posted = state_of(e)->ranks[i].posted;
        }
        return true;
}

static bool are_all_closed(const Exchange *e) {
        for (uint32_t i = 0; i < e->plan->ranks; i++)
                if (takes_part(e, i) && !state_of(e)->ranks[i].closed)
                        return false;
        return true;
}

/* No rank gives its queue more by itself. -ETIMEDOUT: one has not come. */
static int wait_all_closed(Exchange *e, uint64_t *ret_posted) {
        struct timespec until = clock_after(device_exchange_close_usec(e));
        int r = 0;

        (void) pthread_mutex_lock(&e->lock);
        if (were_all_open(e, ret_posted))
                while (!are_all_closed(e) && !state_of(e)->over && r != ETIMEDOUT)
                        r = pthread_cond_timedwait(&e->changed, &e->lock, &until);
        (void) were_all_open(e, ret_posted);
        (void) pthread_mutex_unlock(&e->lock);
        return -r;
}

/* What others have been given, too. */
static int catch_up(Exchange *e, const H3Rank *rank) {
        const NcclRank *own = state_of(e)->ranks + rank->index;
        uint64_t end;
        Fault f = {};
        int r;

        r = wait_all_closed(e, &end);
        if (r >= 0 && !state_of(e)->over)
                r = nccl_settle(rank->ops, rank->context, device_exchange_close_usec(e), &f);
        while (r >= 0 && !state_of(e)->over && own->posted < end)
                r = post(e, rank, device_exchange_close_usec(e), true);
        return state_of(e)->over ? -EIO : r;
}

static int close_rank(Exchange *e, const H3Rank *rank) {
        const DeviceExchange *x = e->own;
        Fault f = {};
        int r = 0;

        if (!x->peers[rank->index].memory)
                return 0;
        (void) pthread_mutex_lock(&e->lock);
        state_of(e)->ranks[rank->index].closed = true;
        (void) pthread_cond_broadcast(&e->changed);
        (void) pthread_mutex_unlock(&e->lock);
        if (atomic_load(&e->error) < 0)
                r = catch_up(e, rank);
        if (r >= 0)
                r = device_exchange_close(e, rank);
        if (r >= 0)
                return 0;
        (void) fault_set(&f, -EIO, FAULT_INTERNAL, "NCCL: rank %" PRIu32 " cannot end: others have not come to their part.", rank->index);
        return give_up(e, rank, -EIO, &f);
}

const Transport exchange_nccl = {
        .make = make,
        .unmake = device_exchange_unmake,
        .open = open_rank,
        .close = close_rank,
        .expect = expect,
        .put = put,
        .get = get,
};
