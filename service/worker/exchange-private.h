/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* What the transports of an exchange share: places, the first error, waits with a deadline (exchange.c). */

#include <pthread.h>
#include <stdatomic.h>

#include "service/worker/exchange.h"

#define RANKS_MAX 64

/* Of one (phase, from, to, chunk). */
typedef struct Place {
        uint64_t size;             /* of its largest message */
        uint64_t offset;           /* the transport's */
        uint64_t host_offset;      /* likewise, where it has memory of both kinds */
        uint64_t readers;          /* a bit per rank */
        atomic_uint published;     /* sequence of the message that is there */
        atomic_uint_least64_t taken; /* by these readers; all of them: the place is free */
} Place;

typedef struct ExchangeLink ExchangeLink; /* exchange-link.h */

typedef struct Member {
        uint64_t sent, received; /* the rank's own thread writes */
        uint64_t exposed_usec;   /* likewise */
        uint32_t waits_for;      /* rank + 1; under the lock */
} Member;

/* Moves what the views hold into a place that is free, and out of it into the views of a reader, on their ranks' threads. */
typedef struct Transport {
        int (*make)(Exchange *e);    /* places have sizes and readers; of a new one */
        void (*unmake)(Exchange *e); /* also after a make() that failed, or none */
        int (*open)(Exchange *e, const H3Rank *rank);  /* NULL: nothing to do */
        int (*close)(Exchange *e, const H3Rank *rank); /* likewise */
        int (*expect)(Exchange *e, const H3Rank *rank, const H3Message *m); /* before the rank waits for a message; likewise */
        /* *ret_bytes: where the host sees it, or NULL. */
        int (*put)(Exchange *e, const H3Rank *rank, const Place *p, const H3Message *m, const H3View *views, uint32_t n,
                uint8_t **ret_bytes);
        int (*get)(Exchange *e, const H3Rank *rank, const Place *p, const H3Message *m, const H3View *views, uint32_t n);
} Transport;

extern const Transport exchange_host, exchange_staged, exchange_p2p, exchange_nccl;

struct Exchange {
        H3Exchange interface; /* first: the functions get a pointer to it */
        const Transport *transport;
        void *own; /* the transport's */
        Staging *staging; /* somebody else's; NULL: none */
        const H3Plan *plan;
        uint64_t deadline_usec;
        ExchangeHook hook;
        Place *places; /* [phases, ranks, ranks + 1 (the last: to all), chunks] */
        Member *members;
        ExchangeLink *link; /* of tests; NULL: none, or the transport's queues are held */

        pthread_mutex_t lock; /* of all below; also around what waiters wait for */
        pthread_cond_t changed;
        atomic_int error;
        Fault fault;
};

size_t exchange_places(const H3Plan *p);
size_t exchange_place(const H3Plan *p, const H3Message *m);
H3Message exchange_message_of(const H3Plan *p, size_t place); /* without a sequence */
uint64_t exchange_readers(const H3Plan *p, const H3Message *m);
uint64_t exchange_bytes_of(const H3View *views, uint32_t n);

/* Which rank is waited for, -1: none any more. Under the lock, or where what it looks at is atomic. */
typedef int (*ExchangeAwaited)(const Exchange *e, const void *what);

/* 0, or the group's first error: that may be that this wait took too long. */
int exchange_wait(Exchange *e, uint32_t rank, ExchangeAwaited awaited, const void *what);

/* Views to bytes or back, by the rank's own device, while its thread waits. */
int exchange_host_copy(const H3Rank *rank, const H3View *views, uint32_t n, uint8_t *bytes, bool in);

uint64_t exchange_host_memory(const H3Plan *p, ExchangeSize size);
uint64_t exchange_staged_memory(const H3Plan *p, ExchangeSize size);
uint64_t exchange_peer_memory(const H3Plan *p, ExchangeSize size, uint32_t rank);
