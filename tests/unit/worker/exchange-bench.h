/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Steps split over ranks that exchange from device to device: the bits of the exchange through the host, whatever the plan and the
 * chunks. Copies happen as late as the queues allow, and what does not wait for what it must ends the program (device-ops.h). */

#include <stdbool.h>
#include <stdint.h>

#include "service/shared/wire.h"
#include "service/worker/model-weights.h"
#include "service/worker/plan.h"
#include "service/worker/split.h"
#include "tests/unit/worker/toy.h"

#define EXCHANGE_BENCH_RANKS 4 /* where a test says no other number */
#define EXCHANGE_BENCH_RANKS_MAX 8

typedef struct ExchangeBenchState {
        LkOps ops;
        RankGroup *group;
        ExchangeKind kind; /* that is tested */
        uint32_t ranks;    /* of the group */
        bool lost;         /* the device, by the last test: its memory stays as it is */
} ExchangeBenchState;

extern ExchangeBenchState exchange_bench;

/* devices: of each rank. ranks: at most EXCHANGE_BENCH_RANKS_MAX. start: before there are ranks; may be NULL. */
int exchange_bench_setup(ExchangeKind kind, uint32_t ranks, const uint8_t *devices, void (*start)(void));
int exchange_bench_teardown(void **state);
int exchange_bench_bind(uint32_t device);

typedef struct ExchangeBench {
        Toy *toy;
        ToyStep *step;
        Plan *plan;
        float *video, *audio; /* through the host */
        ModelWeights *weights[EXCHANGE_BENCH_RANKS_MAX];
} ExchangeBench;

ExchangeBench exchange_bench_new(ToyKind kind);
void exchange_bench_done(ExchangeBench *b);
void exchange_bench_plan(ExchangeBench *b, uint32_t ranks, WirePlanKind kind, uint32_t chunks);

/* deadline_usec 0: plenty. */
SplitStep exchange_bench_step(ExchangeBench *b, ExchangeKind kind, float *video, float *audio, uint64_t deadline_usec);
int exchange_bench_run(ExchangeBench *b, ExchangeKind kind, float *video, float *audio, uint64_t deadline_usec,
        uint64_t *ret_bytes, Fault *f);

typedef struct ExchangeOut {
        float *video, *audio;
} ExchangeOut;

ExchangeOut exchange_out_new(const ExchangeBench *b);
bool exchange_out_is_same(const ExchangeBench *b, const ExchangeOut *o);
void exchange_out_done(ExchangeOut *o);

/* Tests of any kind. kinds: every so-manieth of the models. */
void exchange_bench_every_plan(int kinds);
void exchange_bench_flipped_bit(void);
void exchange_bench_failing_rank(int times);
void exchange_bench_stuck_copy(void); /* of a device */
