/* SPDX-License-Identifier: Apache-2.0 */
#include "service/worker/exchange-device.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <time.h>

#include "service/shared/cleanup.h"
#include "service/shared/clock.h"

#define POLL_USEC 50

uint64_t exchange_peer_memory(const H3Plan *p, ExchangeSize size, uint32_t rank) {
        uint64_t sum = 0;

        for (size_t i = 0; i < exchange_places(p); i++) {
                const H3Message m = exchange_message_of(p, i);
                uint64_t readers = exchange_readers(p, &m);

                if (readers != 0 && (m.from == rank || readers >> rank & 1))
                        sum += device_place_bytes(size.func(size.userdata, &m));
        }
        return sum;
}

int device_exchange_make(Exchange *e) {
        const size_t n = exchange_places(e->plan);
        DeviceExchange *x = calloc(1, sizeof(*x));
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
                DevicePeer *from = x->peers + exchange_message_of(e->plan, i).from;
                uint64_t *at = x->offsets + x->first[i];

                if (p->readers == 0)
                        continue;
                p->offset = from->size;
                from->size += device_place_bytes(p->size);
                for (uint32_t to = 0; to < e->plan->ranks; to++)
                        if (p->readers >> to & 1) {
                                *at++ = x->peers[to].size;
                                x->peers[to].size += device_place_bytes(p->size);
                        }
        }
        return 0;
}

void device_exchange_unmake(Exchange *e) {
        DeviceExchange *x = e->own;

        if (!x)
                return;
        free(x->first);
        free(x->offsets);
        free(x->own);
        free(x);
}

int device_exchange_open(Exchange *e, const H3Rank *rank) {
        DeviceExchange *x = e->own;
        DevicePeer *own = x->peers + rank->index;
        void *memory;
        int r;

        if (!rank->ops->copy)
                return -EOPNOTSUPP;
        r = rank->ops->memory_new(rank->context, own->size, &memory);
        if (r < 0)
                return r;
        own->memory = memory;
        own->context = rank->context;
        r = rank->ops->mark(rank->context, LK_COMPUTE, DEVICE_EVENT_OPEN);
        if (r < 0)
                return r;
        (void) pthread_mutex_lock(&e->lock);
        own->open = true;
        (void) pthread_cond_broadcast(&e->changed);
        (void) pthread_mutex_unlock(&e->lock);
        return 0;
}

int device_exchange_wait_done(Exchange *e, const H3Rank *rank, uint32_t event, uint64_t patience_usec, bool any) {
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

uint64_t device_exchange_close_usec(const Exchange *e) {
        return e->deadline_usec < DEVICE_CLOSE_USEC ? e->deadline_usec : DEVICE_CLOSE_USEC;
}

/* What was sent arrives before its memory is somebody else's. What was sent to this rank arrives before the others have
 * ended: their memory and this one's may be kept for others of the same context, but not be given back until then. */
int device_exchange_close(Exchange *e, const H3Rank *rank) {
        DeviceExchange *x = e->own;
        DevicePeer *own = x->peers + rank->index;
        int r;

        if (!own->memory)
                return 0;
        r = rank->ops->mark(rank->context, LK_PEER, DEVICE_EVENT_ORDER);
        if (r >= 0)
                r = device_exchange_wait_done(e, rank, DEVICE_EVENT_ORDER, device_exchange_close_usec(e), true);
        if (r >= 0) /* else the device is lost, and the worker with it */
                rank->ops->memory_free(rank->context, own->memory);
        return r;
}

int device_exchange_hold(const Exchange *e, const H3Rank *rank, LkQueue queue) {
        return e->hook.link_bytes > 0 && rank->ops->hold ? rank->ops->hold(rank->context, queue, 0) : 0;
}

int device_exchange_release(const Exchange *e, const H3Rank *rank, LkQueue queue, uint64_t bytes) {
        return e->hook.link_bytes > 0 && rank->ops->hold
                       ? rank->ops->hold(rank->context, queue, bytes * 1000 / e->hook.link_bytes + 1)
                       : 0;
}

int device_exchange_copy(const H3Rank *rank, const H3View *views, uint32_t n, uint8_t *place, bool in) {
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

static int awaits_open(const Exchange *e, const void *what) {
        const DeviceExchange *x = e->own;
        uint32_t rank = *(const uint32_t *) what;

        return x->peers[rank].open ? -1 : (int) rank;
}

int device_exchange_wait_open(Exchange *e, uint32_t rank, uint32_t other) {
        const DeviceExchange *x = e->own;

        return x->peers[other].open ? 0 : exchange_wait(e, rank, awaits_open, &other);
}

uint8_t *device_exchange_reader_place(const Exchange *e, const Place *p, uint32_t reader) {
        const DeviceExchange *x = e->own;
        uint64_t before = p->readers & ((UINT64_C(1) << reader) - 1);

        return x->peers[reader].memory + x->offsets[x->first[p - e->places] + (uint64_t) __builtin_popcountll(before)];
}

