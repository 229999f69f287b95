/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* What the transports of devices share: each rank's memory on its device, with places of what it sends, then of what it
 * is sent, and waiting for queues by asking. */

#include "service/worker/exchange-private.h"

#define DEVICE_CLOSE_USEC UINT64_C(5000000)

enum { /* events of a context, before those of the transport */
        DEVICE_EVENT_OPEN = EXCHANGE_FIRST_EVENT, /* what used the memory before is done */
        DEVICE_EVENT_ORDER,                       /* between two queues of the context */
        DEVICE_FIRST_EVENT,
};

#define DEVICE_PLACE_ALIGN UINT64_C(256)

/* What a message of so many bytes takes of a device's memory, or of that which is registered with it. */
static inline uint64_t device_place_bytes(uint64_t size) {
        return (size + DEVICE_PLACE_ALIGN - 1) / DEVICE_PLACE_ALIGN * DEVICE_PLACE_ALIGN;
}

typedef struct DevicePeer {
        LkContext *context;
        uint8_t *memory;
        uint64_t size;
        atomic_bool open; /* the others may use the rest; waiters look at it without the lock */
} DevicePeer;

typedef struct DeviceExchange {
        uint64_t *first; /* [places]: index in offsets */
        uint64_t *offsets; /* of each place and reader, in the reader's memory */
        DevicePeer peers[RANKS_MAX];
        void *own; /* the transport's, one free() */
} DeviceExchange;

/* Transport.make and .unmake. */
int device_exchange_make(Exchange *e);
void device_exchange_unmake(Exchange *e);

/* The rank's memory is there; the others see it. */
int device_exchange_open(Exchange *e, const H3Rank *rank);

/* How long the end of a rank may take: others may wait for it already. */
uint64_t device_exchange_close_usec(const Exchange *e);

/* What LK_PEER was given is done: gives the memory back. Else the device is lost, and the worker with it. */
int device_exchange_close(Exchange *e, const H3Rank *rank);

/* Another rank has made its memory. */
int device_exchange_wait_open(Exchange *e, uint32_t rank, uint32_t other);

/* What the event stands for is done, as long as the group has no error (any: it may have one). */
int device_exchange_wait_done(Exchange *e, const H3Rank *rank, uint32_t event, uint64_t patience_usec, bool any);

/* Around what a queue is given of so many bytes, for the hook's link_bytes. */
int device_exchange_hold(const Exchange *e, const H3Rank *rank, LkQueue queue);
int device_exchange_release(const Exchange *e, const H3Rank *rank, LkQueue queue, uint64_t bytes);

/* Views to a place or back, inside the rank's device, on LK_COMPUTE. */
int device_exchange_copy(const H3Rank *rank, const H3View *views, uint32_t n, uint8_t *place, bool in);

/* Where a reader gets what is sent from the place. */
uint8_t *device_exchange_reader_place(const Exchange *e, const Place *p, uint32_t reader);
