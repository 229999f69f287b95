/* SPDX-License-Identifier: Apache-2.0 */
#include "service/worker/exchange.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "service/worker/staging.h"
#include "tests/unit/worker/device-ops.h"
#include "tests/unit/worker/exchange-bench.h"

static int setup(void **state) {
        static const uint8_t devices[EXCHANGE_BENCH_RANKS_MAX] = {0, 1, 2, 3, 0, 1, 2, 3};

        return exchange_bench_setup(EXCHANGE_STAGED, EXCHANGE_BENCH_RANKS_MAX, devices, NULL);
}

/* On 2 to 8 ranks. */
static void exchange_of_every_plan_same_bits_and_bytes(void **state) {
        exchange_bench_every_plan(2);
}

/* The copies are what the ranks compute with. */
static void exchange_flipped_bit_changes_the_result(void **state) {
        exchange_bench_flipped_bit();
}

static void exchange_failing_rank_releases_the_others(void **state) {
        exchange_bench_failing_rank(3);
}

/* The threads pass it on themselves. */
static void exchange_without_registered_memory_same_bits(void **state) {
        ExchangeBench b = exchange_bench_new(TOY_BF16);
        ExchangeOut o = exchange_out_new(&b);
        uint64_t bytes, copies = device_sim.peer_copies;
        Fault f = {};

        exchange_bench_plan(&b, 3, WIRE_PLAN_HIDDEN_GATHER, 3);
        device_sim.pin_fails = true;
        assert_int_equal(exchange_bench_run(&b, exchange_bench.kind, o.video, o.audio, 0, &bytes, &f), 0);
        device_sim.pin_fails = false;
        assert_true(exchange_out_is_same(&b, &o));
        assert_int_equal(device_sim.peer_copies, copies);
        exchange_out_done(&o);
        exchange_bench_done(&b);
}

static void run_kept(ExchangeBench *b, const ExchangeOut *o, Staging *kept) {
        SplitStep s = exchange_bench_step(b, exchange_bench.kind, o->video, o->audio, 0);
        uint64_t bytes;
        Fault f = {};

        s.staging = kept;
        memset(o->video, 0xff, b->step->n_video * sizeof(float));
        assert_int_equal(split_run(exchange_bench.group, &s, &bytes, &f), 0);
        assert_true(exchange_out_is_same(b, o));
}

/* What is registered for a step serves the next ones; their weights' is theirs. */
static void exchange_keeps_what_is_registered(void **state) {
        ExchangeBench b = exchange_bench_new(TOY_BF16);
        ExchangeOut o = exchange_out_new(&b);
        Staging kept = {};
        uint64_t pinned, bytes;

        exchange_bench_plan(&b, 4, WIRE_PLAN_KV_GATHER, 2);
        run_kept(&b, &o, &kept);
        bytes = staging_bytes(&kept);
        assert_true(bytes > 0);
        pinned = device_sim.pinned_bytes;
        for (unsigned i = 0; i < 3; i++)
                run_kept(&b, &o, &kept);
        assert_int_equal(device_sim.pinned_bytes, pinned);
        exchange_bench_plan(&b, 2, WIRE_PLAN_QKV_ALL_TO_ALL, 5); /* others' places in the same memory */
        run_kept(&b, &o, &kept);
        assert_int_equal(staging_bytes(&kept), bytes);
        staging_drop(&kept, 0);
        assert_true(staging_bytes(&kept) < bytes);
        run_kept(&b, &o, &kept);
        assert_true(device_sim.pinned_bytes > pinned);
        staging_clear(&kept);
        assert_int_equal(staging_bytes(&kept), 0);
        exchange_out_done(&o);
        exchange_bench_done(&b);
}

/* What is much too large goes. */
static void staging_is_about_as_large_as_asked_for(void **state) {
        const uint64_t large = UINT64_C(32) << 20;
        LkContext *c = NULL; /* the played devices do not look at it */
        Staging s = {};
        StagingArea a, b;

        assert_int_equal(staging_take(&s, &exchange_bench.ops, c, 1, large, &a), 0);
        assert_true(a.registered && a.size == large);
        a.memory[large - 1] = 5;
        assert_int_equal(staging_take(&s, &exchange_bench.ops, c, 1, large - large / 16, &b), 0);
        assert_ptr_equal(a.memory, b.memory);
        assert_int_equal(staging_take(&s, &exchange_bench.ops, c, 1, large / 2 + 1, &b), 0);
        assert_int_equal(b.size, large / 2 + (UINT64_C(2) << 20));
        assert_int_equal(staging_take(&s, &exchange_bench.ops, c, 0, 0, &a), 0);
        assert_null(a.memory);
        assert_int_equal(staging_bytes(&s), b.size);
        staging_clear(&s);
}

static void exchange_copy_that_hangs_ends_with_an_error(void **state) {
        exchange_bench_stuck_copy();
}

static void exchange_without_such_a_device_is_refused(void **state) {
        ExchangeBench b = exchange_bench_new(TOY_BF16);
        ExchangeOut o = exchange_out_new(&b);
        LkOps whole = exchange_bench.ops;
        uint64_t bytes;
        Fault f = {};

        exchange_bench_plan(&b, 2, WIRE_PLAN_HIDDEN_GATHER, 1);
        assert_int_equal(exchange_kind_of(EXCHANGE_HOST, &exchange_bench.ops), EXCHANGE_STAGED);
        assert_int_equal(exchange_kind_of(EXCHANGE_P2P, &exchange_bench.ops), EXCHANGE_P2P);
        exchange_bench.ops.copy = NULL;
        assert_int_equal(exchange_kind_of(EXCHANGE_HOST, &exchange_bench.ops), EXCHANGE_HOST);
        assert_int_equal(exchange_bench_run(&b, exchange_bench.kind, o.video, o.audio, 0, &bytes, &f), -EOPNOTSUPP);
        exchange_bench.ops = whole;
        exchange_out_done(&o);
        exchange_bench_done(&b);
}

/* On the devices as from one to the other; on the host one for all readers. */
static void exchange_memory_of_a_rank_is_counted(void **state) {
        ExchangeBench b = exchange_bench_new(TOY_INT8);
        ExchangeStep step = {.model = &b.toy->model, .compute = b.toy->compute};
        const ExchangeSize size = {exchange_step_message, &step};
        const H3Plan *p;

        exchange_bench_plan(&b, 3, WIRE_PLAN_HIDDEN_GATHER, 2);
        p = step.plan = &b.plan->h3;
        for (uint32_t i = 0; i < 3; i++) {
                uint64_t bytes = exchange_device_memory(EXCHANGE_STAGED, p, size, i);

                assert_true(bytes > 0);
                assert_int_equal(bytes, exchange_device_memory(EXCHANGE_P2P, p, size, i));
        }
        assert_true(exchange_memory(EXCHANGE_STAGED, p, size) >= exchange_memory(EXCHANGE_HOST, p, size));
        assert_true(exchange_memory(EXCHANGE_STAGED, p, size) > exchange_memory(EXCHANGE_P2P, p, size));
        exchange_bench_done(&b);
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(exchange_memory_of_a_rank_is_counted),
                cmocka_unit_test(exchange_without_such_a_device_is_refused),
                cmocka_unit_test(staging_is_about_as_large_as_asked_for),
                cmocka_unit_test(exchange_of_every_plan_same_bits_and_bytes),
                cmocka_unit_test(exchange_flipped_bit_changes_the_result),
                cmocka_unit_test(exchange_without_registered_memory_same_bits),
                cmocka_unit_test(exchange_keeps_what_is_registered),
                cmocka_unit_test(exchange_failing_rank_releases_the_others),
                cmocka_unit_test(exchange_copy_that_hangs_ends_with_an_error),
        };

        return cmocka_run_group_tests(tests, setup, exchange_bench_teardown);
}
