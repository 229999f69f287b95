/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The exchange between the ranks of one run, through memory of the worker or from device to device.
 *
 * Every message has a place of its own, and a sequence number that is published once it is there, or will be by what was given
 * to the devices; a sender waits until the message before has been taken by all its receivers. Every wait has a deadline. The
 * first error releases all. */

#include <stdint.h>

#include "service/h3/exchange-size.h"
#include "service/h3/text.h"

typedef struct Exchange Exchange;
typedef struct Staging Staging; /* staging.h */

typedef enum ExchangeKind {
        EXCHANGE_HOST, /* exchange-host.c: any backend */
        EXCHANGE_STAGED, /* exchange-staged.c: through the host, too, beside the computation: contexts with queues (LkOps.copy) */
        EXCHANGE_P2P,  /* exchange-p2p.c: contexts that copy to each other (LkOps.copy) */
        EXCHANGE_NCCL, /* exchange-nccl.c: contexts of different devices, where nccl_start() was */
} ExchangeKind;

/* What to use where `kind` is asked for: the host's memory in the best way that the backend has. */
ExchangeKind exchange_kind_of(ExchangeKind kind, const LkOps *ops);

/* From here on events of the ranks' contexts are the exchange's. */
#define EXCHANGE_FIRST_EVENT 128u

/* For tests: called on the rank's thread before it sends or takes a message (bytes NULL), and after it has put
 * one into a place that the host sees (bytes: there). < 0: the rank fails with it. */
typedef struct ExchangeHook {
        int (*func)(void *userdata, uint32_t rank, const H3Message *m, uint8_t *bytes, uint64_t size);
        void *userdata;
        bool measures;       /* how long ranks are in the exchange (exchange_exposed()) */
        uint64_t link_bytes; /* a microsecond, of what leaves a rank and of what comes to it; 0: as fast as it is */
} ExchangeHook;

/* Bytes of the largest message of a (phase, from, to, chunk); 0: it is never sent. */
typedef struct ExchangeSize {
        uint64_t (*func)(const void *userdata, const H3Message *m);
        const void *userdata;
} ExchangeSize;

/* Of a denoiser's step. */
typedef struct ExchangeStep {
        const H3Model *model;
        const H3Plan *plan;
        H3Compute compute;
} ExchangeStep;

uint64_t exchange_step_message(const void *step, const H3Message *m);

/* Of a conditioner's run. */
typedef struct ExchangeText {
        const H3TextModel *model;
        H3TextSize size;
} ExchangeText;

uint64_t exchange_text_message(const void *text, const H3Message *m);

/* Bytes that exchange_new() takes, and exchange_open() of a rank's device. */
uint64_t exchange_memory(ExchangeKind kind, const H3Plan *p, ExchangeSize size);
uint64_t exchange_device_memory(ExchangeKind kind, const H3Plan *p, ExchangeSize size, uint32_t rank);

/* For one run of this plan, which must outlive it. size is asked here only. deadline_usec: of each wait; hook: may be
 * NULL. -ENOMEM. */
int exchange_new(ExchangeKind kind, const H3Plan *p, ExchangeSize size, uint64_t deadline_usec, const ExchangeHook *hook,
        Exchange **ret);
/* Before a rank is there: where memory that is registered for it stays for the next one. Else it goes with the exchange. */
void exchange_set_staging(Exchange *e, Staging *s);
/* No rank may use it any more. */
Exchange *exchange_free(Exchange *e);

/* On each rank's thread, before its first message and after its last, also if it failed. What close() returns is an error of
 * the device. A rank that cannot open() must fail(). */
int exchange_open(Exchange *e, const H3Rank *rank);
int exchange_close(Exchange *e, const H3Rank *rank);

/* What the ranks are given. */
H3Exchange *exchange_interface(Exchange *e);

/* The first error of the group, 0 if there is none; f (may be NULL) gets its text. Any thread. */
int exchange_error(Exchange *e, Fault *f);

/* Of the rank that was longest in the exchange (the hook measures): how much time of its work that took, which is what did not hide
 * behind it. Once they have ended. */
uint64_t exchange_exposed(const Exchange *e);

/* What a rank has sent and received. Once the rank has ended. */
void exchange_bytes(const Exchange *e, uint32_t rank, uint64_t *ret_sent, uint64_t *ret_received);
