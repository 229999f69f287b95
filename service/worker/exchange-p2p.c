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

#include "service/worker/exchange-device.h"

/* Events of a context. Several places may have one. */
#define SLOTS 60u
enum {
        EVENT_SENT = DEVICE_FIRST_EVENT,  /* [SLOTS] on LK_PEER, the sender's */
        EVENT_TAKEN = EVENT_SENT + SLOTS,  /* [SLOTS] on LK_COMPUTE, the reader's */
        EVENT_END = EVENT_TAKEN + SLOTS,
};
_Static_assert(EVENT_END <= LK_EVENTS_MAX, "events of an exchange");

static uint32_t sent_event(const Exchange *e, const H3Message *m) {
        uint32_t to = m->to == H3_TO_ALL ? e->plan->ranks : m->to;

        return EVENT_SENT + ((m->phase * (e->plan->ranks + 1) + to) * e->plan->chunks + m->chunk) % SLOTS;
}

static uint32_t taken_event(const Exchange *e, const H3Message *m) {
        return EVENT_TAKEN + ((m->phase * e->plan->ranks + m->from) * e->plan->chunks + m->chunk) % SLOTS;
}

static int copy_to(Exchange *e, const H3Rank *rank, const Place *p, const H3Message *m, uint32_t to, uint8_t *from, uint64_t size) {
        const DeviceExchange *x = e->own;
        const LkOps *ops = rank->ops;
        int r;

        r = device_exchange_wait_open(e, rank->index, to);
        if (r >= 0)
                r = ops->wait_for(rank->context, LK_PEER, x->peers[to].context, m->sequence > 1 ? taken_event(e, m) : DEVICE_EVENT_OPEN);
        if (r >= 0)
                r = device_exchange_hold(e, rank, LK_PEER);
        if (r >= 0)
                r = ops->copy(rank->context, LK_PEER,
                        &(LkCopy){.to = device_exchange_reader_place(e, p, to), .from = from, .rows = 1, .width = size, .to_stride = size,
                                .from_stride = size});
        return r < 0 ? r : device_exchange_release(e, rank, LK_PEER, size);
}

static int put(Exchange *e, const H3Rank *rank, const Place *p, const H3Message *m, const H3View *views, uint32_t n,
        uint8_t **ret_bytes) {
        const DeviceExchange *x = e->own;
        uint8_t *from = x->peers[rank->index].memory + p->offset;
        int r = 0;

        *ret_bytes = NULL;
        if (m->sequence > 1)
                r = device_exchange_wait_done(e, rank, sent_event(e, m), e->deadline_usec, false);
        if (r >= 0)
                r = device_exchange_copy(rank, views, n, from, true);
        if (r >= 0)
                r = rank->ops->mark(rank->context, LK_COMPUTE, DEVICE_EVENT_ORDER);
        if (r >= 0)
                r = rank->ops->wait(rank->context, LK_PEER, DEVICE_EVENT_ORDER);
        for (uint32_t to = 0; r >= 0 && to < e->plan->ranks; to++)
                if (p->readers >> to & 1)
                        r = copy_to(e, rank, p, m, to, from, exchange_bytes_of(views, n));
        return r < 0 ? r : rank->ops->mark(rank->context, LK_PEER, sent_event(e, m));
}

static int get(Exchange *e, const H3Rank *rank, const Place *p, const H3Message *m, const H3View *views, uint32_t n) {
        const DeviceExchange *x = e->own;
        int r;

        r = rank->ops->wait_for(rank->context, LK_COMPUTE, x->peers[m->from].context, sent_event(e, m));
        if (r >= 0)
                r = device_exchange_copy(rank, views, n, device_exchange_reader_place(e, p, rank->index), false);
        return r < 0 ? r : rank->ops->mark(rank->context, LK_COMPUTE, taken_event(e, m));
}

const Transport exchange_p2p = {
        .make = device_exchange_make,
        .unmake = device_exchange_unmake,
        .open = device_exchange_open,
        .close = device_exchange_close,
        .put = put,
        .get = get,
};
