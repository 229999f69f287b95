/* SPDX-License-Identifier: Apache-2.0 */
#include "service/worker/exchange.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/unit/worker/device-ops.h"
#include "tests/unit/worker/exchange-bench.h"

static int setup(void **state) {
        static const uint8_t devices[EXCHANGE_BENCH_RANKS] = {0, 1, 0, 1}; /* two ranks of one device each */

        return exchange_bench_setup(EXCHANGE_P2P, EXCHANGE_BENCH_RANKS, devices, NULL);
}

static void exchange_of_every_plan_same_bits_and_bytes(void **state) {
        exchange_bench_every_plan(1);
}

/* The copies are what the ranks compute with. */
static void exchange_flipped_bit_changes_the_result(void **state) {
        exchange_bench_flipped_bit();
}

static void exchange_failing_rank_releases_the_others(void **state) {
        exchange_bench_failing_rank(5);
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
        exchange_bench.ops.copy = NULL;
        assert_int_equal(exchange_bench_run(&b, exchange_bench.kind, o.video, o.audio, 0, &bytes, &f), -EOPNOTSUPP);
        exchange_bench.ops = whole;
        exchange_out_done(&o);
        exchange_bench_done(&b);
}

/* What residency counts is what a rank takes. */
static void exchange_memory_of_a_rank_is_counted(void **state) {
        ExchangeBench b = exchange_bench_new(TOY_INT8);
        ExchangeStep step = {.model = &b.toy->model, .compute = b.toy->compute};
        const ExchangeSize size = {exchange_step_message, &step};
        const H3Plan *p;
        uint64_t sum = 0;

        exchange_bench_plan(&b, 3, WIRE_PLAN_HIDDEN_GATHER, 2);
        p = step.plan = &b.plan->h3;
        for (uint32_t i = 0; i < 3; i++) {
                uint64_t bytes = exchange_device_memory(exchange_bench.kind, p, size, i);

                assert_true(bytes > 0 && bytes % 256 == 0);
                assert_int_equal(exchange_device_memory(EXCHANGE_HOST, p, size, i), 0);
                sum += bytes;
        }
        /* Each message once at its sender and once at each of two readers, or one. */
        assert_true(sum > exchange_memory(EXCHANGE_HOST, p, size));
        assert_true(exchange_memory(exchange_bench.kind, p, size) < exchange_memory(EXCHANGE_HOST, p, size));
        exchange_bench_done(&b);
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(exchange_memory_of_a_rank_is_counted),
                cmocka_unit_test(exchange_without_such_a_device_is_refused),
                cmocka_unit_test(exchange_of_every_plan_same_bits_and_bytes),
                cmocka_unit_test(exchange_flipped_bit_changes_the_result),
                cmocka_unit_test(exchange_failing_rank_releases_the_others),
                cmocka_unit_test(exchange_copy_that_hangs_ends_with_an_error),
        };

        return cmocka_run_group_tests(tests, setup, exchange_bench_teardown);
}
