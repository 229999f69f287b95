/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/unit/worker/exchange-bench.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "service/latentd/plan.h"
#include "tests/unit/worker/device-ops.h"

#define ROWS 57

ExchangeBenchState exchange_bench;

int exchange_bench_bind(uint32_t device) {
        device_ops_bind(device);
        return 0;
}

static void no_step(void *userdata, RankGroup *g, Job *j, uint32_t step) {
}

int exchange_bench_setup(ExchangeKind kind, uint32_t ranks, const uint8_t *devices, void (*start)(void)) {
        Fault f = {};

        exchange_bench.kind = kind;
        exchange_bench.ranks = ranks;
        exchange_bench.ops = *device_ops();
        device_sim.keeps = true;
        if (start)
                start();
        return rank_group_new(&exchange_bench.ops, ranks, ranks, &(RankPlaces){exchange_bench_bind, devices}, no_step, NULL,
                &exchange_bench.group, &f);
}

int exchange_bench_teardown(void **state) {
        exchange_bench.group = rank_group_free(exchange_bench.group);
        if (!exchange_bench.lost) /* its memory stays as it is */
                device_ops_done();
        return 0;
}

/* ---- weights on the devices ---- */

static int make_weights(void *userdata, uint32_t rank, LkContext *context) {
        ExchangeBench *b = userdata;
        const DeviceWeightsConfig config = {.ops = &exchange_bench.ops, .context = context};
        uint64_t least;
        int r;

        r = model_weights_new(&h3_weights_denoiser, &b->toy->model, &config, &b->weights[rank]);
        return r < 0 ? r : device_weights_plan(model_weights_device(b->weights[rank]), UINT64_C(1) << 30, true, &least);
}

static int free_weights(void *userdata, uint32_t rank, LkContext *context) {
        ExchangeBench *b = userdata;

        b->weights[rank] = model_weights_free(b->weights[rank]);
        exchange_bench.ops.memory_trim(context);
        return 0;
}

static int on_begin(void *userdata, uint32_t rank, H3Rank *to) {
        ExchangeBench *b = userdata;
        int r;

        r = model_weights_begin(b->weights[rank], H3_PASS_STEP);
        to->weights = model_weights_interface(b->weights[rank]);
        return r;
}

static void never(void *userdata, uint32_t rank) {
        fprintf(stderr, "rank %u hangs\n", rank);
        abort();
}

static void never_stuck(void *userdata, const Fault *f) {
        fprintf(stderr, "a rank hangs: %s\n", f->text);
        abort();
}

static void on_ranks(RankWork work, ExchangeBench *b) {
        assert_int_equal(rank_group_run(exchange_bench.group, &(RankOrder){.ranks = (1u << exchange_bench.ranks) - 1, .work = work,
                                                       .userdata = b, .deadline_usec = UINT64_C(60000000), .stuck = never}),
                0);
}

SplitStep exchange_bench_step(ExchangeBench *b, ExchangeKind kind, float *video, float *audio, uint64_t deadline_usec) {
        return (SplitStep){.ops = &exchange_bench.ops,
                .model = &b->toy->model,
                .plan = &b->plan->h3,
                .exchange = kind,
                .in = &b->step->in,
                .video = video,
                .audio = audio,
                .on_begin = on_begin,
                .userdata = b,
                .on_stuck = never_stuck,
                .deadline_usec = deadline_usec > 0 ? deadline_usec : UINT64_C(60000000)};
}

int exchange_bench_run(ExchangeBench *b, ExchangeKind kind, float *video, float *audio, uint64_t deadline_usec,
        uint64_t *ret_bytes, Fault *f) {
        const SplitStep s = exchange_bench_step(b, kind, video, audio, deadline_usec);

        memset(video, 0xff, b->step->n_video * sizeof(float));
        memset(audio, 0xff, b->step->n_audio * sizeof(float));
        return split_run(exchange_bench.group, &s, ret_bytes, f);
}

void exchange_bench_plan(ExchangeBench *b, uint32_t ranks, WirePlanKind kind, uint32_t chunks) {
        WireMessage w;
        Fault f = {};

        b->plan = plan_free(b->plan);
        wire_init(&w, WIRE_PLAN, 1, 1, 0);
        assert_int_equal(plan_make(ROWS, 56, ranks, 1, &(PlanWishes){.kind = kind, .chunks = chunks}, &w.plan), 0);
        assert_int_equal(plan_new(&w.plan, ROWS, 56, exchange_bench.ranks, &b->plan, &f), 0);
}

ExchangeBench exchange_bench_new(ToyKind kind) {
        ExchangeBench b = {.toy = toy_new(kind)};
        uint64_t bytes;
        Fault f = {};

        b.step = toy_step_of_rows(b.toy, ROWS, 3);
        b.video = malloc(b.step->n_video * sizeof(float));
        b.audio = malloc(b.step->n_audio * sizeof(float));
        assert_true(b.video && b.audio);
        on_ranks(make_weights, &b);
        exchange_bench_plan(&b, 1, WIRE_PLAN_HIDDEN_GATHER, 1);
        if (exchange_bench_run(&b, EXCHANGE_HOST, b.video, b.audio, 0, &bytes, &f) < 0)
                fail_msg("one rank: %s", f.text);
        return b;
}

void exchange_bench_done(ExchangeBench *b) {
        on_ranks(free_weights, b);
        (void) plan_free(b->plan);
        free(b->video);
        free(b->audio);
        (void) toy_step_free(b->step);
        (void) toy_free(b->toy);
}

ExchangeOut exchange_out_new(const ExchangeBench *b) {
        ExchangeOut o = {malloc(b->step->n_video * sizeof(float)), malloc(b->step->n_audio * sizeof(float))};

        assert_true(o.video && o.audio);
        return o;
}

bool exchange_out_is_same(const ExchangeBench *b, const ExchangeOut *o) {
        return memcmp(o->video, b->video, b->step->n_video * sizeof(float)) == 0 &&
               memcmp(o->audio, b->audio, b->step->n_audio * sizeof(float)) == 0;
}

void exchange_out_done(ExchangeOut *o) {
        free(o->video);
        free(o->audio);
}

void exchange_bench_every_plan(int kinds) {
        static const uint32_t chunk_list[] = {1, 3, 32};

        for (int kind = 0; kind < _TOY_MAX; kind += kinds) {
                ExchangeBench b = exchange_bench_new((ToyKind) kind);
                ExchangeOut o = exchange_out_new(&b);

                for (uint32_t ranks = 2; ranks <= exchange_bench.ranks; ranks++)
                        for (int p = WIRE_PLAN_HIDDEN_GATHER; p < _WIRE_PLAN_MAX; p++) {
                                uint64_t of_host, of_peers, copies = device_sim.peer_copies;
                                Fault f = {};

                                exchange_bench_plan(&b, ranks, (WirePlanKind) p, chunk_list[(ranks + (unsigned) p + (unsigned) kind) % 3]);
                                if (exchange_bench_run(&b, EXCHANGE_HOST, o.video, o.audio, 0, &of_host, &f) < 0 ||
                                        !exchange_out_is_same(&b, &o))
                                        fail_msg("host, plan %d on %u ranks: %s", p, ranks, f.text);
                                assert_int_equal(device_sim.peer_copies, copies);
                                if (exchange_bench_run(&b, exchange_bench.kind, o.video, o.audio, 0, &of_peers, &f) < 0)
                                        fail_msg("plan %d on %u ranks: %s", p, ranks, f.text);
                                if (!exchange_out_is_same(&b, &o))
                                        fail_msg("plan %d on %u ranks: other bits", p, ranks);
                                assert_int_equal(of_peers, of_host);
                                assert_true(device_sim.peer_copies > copies);
                        }
                exchange_out_done(&o);
                exchange_bench_done(&b);
        }
}

void exchange_bench_flipped_bit(void) {
        ExchangeBench b = exchange_bench_new(TOY_BF16);
        ExchangeOut o = exchange_out_new(&b);
        uint64_t bytes;
        Fault f = {};

        exchange_bench_plan(&b, 3, WIRE_PLAN_KV_GATHER, 2);
        device_sim.flip_next = true;
        assert_int_equal(exchange_bench_run(&b, exchange_bench.kind, o.video, o.audio, 0, &bytes, &f), 0);
        assert_false(device_sim.flip_next);
        assert_false(exchange_out_is_same(&b, &o));
        assert_int_equal(exchange_bench_run(&b, exchange_bench.kind, o.video, o.audio, 0, &bytes, &f), 0);
        assert_true(exchange_out_is_same(&b, &o));
        exchange_out_done(&o);
        exchange_bench_done(&b);
}

static int fail_once(void *userdata, uint32_t rank, const H3Message *m, uint8_t *bytes, uint64_t size) {
        return rank == 1 && m->from == 1 && m->sequence == 2 ? -EBADMSG : 0;
}

void exchange_bench_failing_rank(int times) {
        for (int kind = WIRE_PLAN_HIDDEN_GATHER; kind < _WIRE_PLAN_MAX; kind++) {
                ExchangeBench b = exchange_bench_new(TOY_BF16);
                ExchangeOut o = exchange_out_new(&b);
                uint64_t bytes;
                Fault f = {};

                exchange_bench_plan(&b, 4, (WirePlanKind) kind, 2);
                for (int i = 0; i < times; i++) {
                        SplitStep s = exchange_bench_step(&b, exchange_bench.kind, o.video, o.audio, 0);

                        s.hook.func = fail_once;
                        assert_int_equal(split_run(exchange_bench.group, &s, &bytes, &f), -EBADMSG);
                        f = (Fault){};
                        assert_int_equal(exchange_bench_run(&b, exchange_bench.kind, o.video, o.audio, 0, &bytes, &f), 0);
                        assert_true(exchange_out_is_same(&b, &o));
                }
                exchange_out_done(&o);
                exchange_bench_done(&b);
        }
}

/* No copy ends: the step does, within its deadline, as one whose device failed. */
void exchange_bench_stuck_copy(void) {
        ExchangeBench b = exchange_bench_new(TOY_BF16);
        ExchangeOut o = exchange_out_new(&b);
        uint64_t bytes;
        Fault f = {};

        exchange_bench_plan(&b, 3, WIRE_PLAN_HIDDEN_GATHER, 2);
        device_sim.peer_stuck = true;
        assert_int_equal(exchange_bench_run(&b, exchange_bench.kind, o.video, o.audio, 1000000, &bytes, &f), -EIO);
        assert_non_null(strstr(f.text, "to the device of another did not end in 1 s"));
        device_sim.peer_stuck = false;
        device_ops_sync();
        exchange_bench.lost = true;
        exchange_out_done(&o);
        exchange_bench_done(&b);
}
