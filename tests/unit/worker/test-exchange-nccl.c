/* SPDX-License-Identifier: Apache-2.0 */
#include "service/worker/nccl.h"

#include <dlfcn.h>
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "tests/unit/worker/device-ops.h"
#include "tests/unit/worker/exchange-bench.h"
#include "tests/unit/worker/fake-nccl.h"

/* By the libnccl.so.2 of fake-nccl.c. */

static FakeNccl *fake;

static FakeNccl *find_fake(void) {
        void *library = dlopen("libnccl.so.2", RTLD_NOW), *p = library ? dlsym(library, "fake_nccl") : NULL;
        FakeNcclGet get;

        memcpy(&get, &p, sizeof(p));
        if (!p)
                fail_msg("this is not the test's libnccl.so.2: %s", dlerror());
        return get();
}

static void start_nccl(void) {
        LkContext *contexts[EXCHANGE_BENCH_RANKS];
        const NcclDevices d = {.ops = &exchange_bench.ops, .n = EXCHANGE_BENCH_RANKS, .contexts = contexts, .bind = exchange_bench_bind,
                .size = 4096, .deadline_usec = UINT64_C(60000000)};
        Fault f = {};
        int r = 0;

        (void) setenv("LATENT_NCCL", "1", 1);
        assert_true(nccl_is_wanted());
        for (uint32_t i = 0; i < EXCHANGE_BENCH_RANKS; i++) {
                (void) exchange_bench_bind(i);
                assert_int_equal(exchange_bench.ops.context_new(1, contexts + i), 0);
        }
        fake = find_fake();
        device_sim.flip_next = true;
        assert_int_equal(nccl_start(&d, &f), -EBADMSG);
        assert_non_null(strstr(f.text, "arrive wrong"));
        assert_int_equal(nccl_version(), 0);
        assert_int_equal(fake->aborts, EXCHANGE_BENCH_RANKS);
        f = (Fault){};
        r = nccl_start(&d, &f);
        if (r < 0)
                fail_msg("%s", f.text);
        assert_int_equal(nccl_version(), 22803);
        for (uint32_t i = 0; i < EXCHANGE_BENCH_RANKS; i++)
                (void) exchange_bench.ops.context_free(contexts[i]);
}

static int setup(void **state) {
        static const uint8_t devices[EXCHANGE_BENCH_RANKS] = {0, 1, 2, 3};

        return exchange_bench_setup(EXCHANGE_NCCL, EXCHANGE_BENCH_RANKS, devices, start_nccl);
}

static void exchange_of_every_plan_same_bits_and_bytes(void **state) {
        exchange_bench_every_plan(2);
}

/* The copies are what the ranks compute with. */
static void exchange_flipped_bit_changes_the_result(void **state) {
        exchange_bench_flipped_bit();
}

static void exchange_failing_rank_releases_the_others(void **state) {
        exchange_bench_failing_rank(2);
}

/* A rank is exchange_bench.lost: who is left gives NCCL up, and there is none for the next step. The rank is away until both have. */
static int is_late(void *userdata, uint32_t rank, const H3Message *m, uint8_t *bytes, uint64_t size) {
        unsigned aborts = fake->aborts;

        if (rank == 1 && m->from == 1 && m->sequence == 2)
                while (fake->aborts < aborts + 2)
                        (void) usleep(1000);
        return 0;
}

static void exchange_lost_rank_gives_nccl_up(void **state) {
        ExchangeBench b = exchange_bench_new(TOY_BF16);
        ExchangeOut o = exchange_out_new(&b);
        uint64_t bytes;
        Fault f = {};
        SplitStep s;
        int r;

        exchange_bench_plan(&b, 3, WIRE_PLAN_HIDDEN_GATHER, 2);
        s = exchange_bench_step(&b, EXCHANGE_NCCL, o.video, o.audio, 500000);
        s.hook.func = is_late;
        r = split_run(exchange_bench.group, &s, &bytes, &f);
        assert_true(r == -ETIMEDOUT || r == -EIO); /* by whom it is noticed */
        assert_non_null(strstr(f.text, r == -EIO ? "NCCL: ncclGroupEnd did not end in time" : "Rank 1 did not answer in 1 s."));
        assert_int_equal(nccl_version(), 0);
        device_ops_sync();
        f = (Fault){};
        assert_int_equal(exchange_bench_run(&b, EXCHANGE_NCCL, o.video, o.audio, 0, &bytes, &f), -EIO);
        assert_non_null(strstr(f.text, "NCCL: this worker has none"));
        f = (Fault){};
        assert_int_equal(exchange_bench_run(&b, EXCHANGE_HOST, o.video, o.audio, 0, &bytes, &f), 0);
        assert_true(exchange_out_is_same(&b, &o));
        device_ops_sync();
        exchange_bench.lost = true;
        exchange_out_done(&o);
        exchange_bench_done(&b);
}

static void exchange_nccl_that_fails_ends_with_its_error(void **state) {
        ExchangeBench b = exchange_bench_new(TOY_BF16);
        ExchangeOut o = exchange_out_new(&b);
        uint64_t bytes;
        Fault f = {};

        exchange_bench_plan(&b, 4, WIRE_PLAN_HIDDEN_GATHER, 1);
        fake->fails_in = 9;
        assert_int_equal(exchange_bench_run(&b, EXCHANGE_NCCL, o.video, o.audio, 0, &bytes, &f), -EIO);
        assert_string_equal(f.text, "NCCL: ncclGroupEnd failed: internal error.");
        device_ops_sync();
        exchange_bench.lost = true;
        exchange_out_done(&o);
        exchange_bench_done(&b);
}

/* After an error there is no NCCL any more: "failing" is a run of its own. */
int main(int argc, char *argv[]) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(exchange_of_every_plan_same_bits_and_bytes),
                cmocka_unit_test(exchange_flipped_bit_changes_the_result),
                cmocka_unit_test(exchange_failing_rank_releases_the_others),
                cmocka_unit_test(exchange_lost_rank_gives_nccl_up),
        };
        const struct CMUnitTest failing[] = {
                cmocka_unit_test(exchange_nccl_that_fails_ends_with_its_error),
        };

        if (argc > 1)
                return cmocka_run_group_tests(failing, setup, exchange_bench_teardown);
        return cmocka_run_group_tests(tests, setup, exchange_bench_teardown);
}
