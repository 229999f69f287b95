/* SPDX-License-Identifier: Apache-2.0 */
/* Coding jobs on a device with memory of its own, played by the CPU backend: the bits of the plain one with as much or as
 * little memory as may be, and what stays there. */
#include "service/worker/coder.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "service/shared/cleanup.h"
#include "tests/unit/worker/coder-kinds.h"
#include "tests/unit/worker/device-ops.h"

DEFINE_CLEANUP(Job *, job_unref)

#define PLENTY (UINT64_C(1) << 32)

static uint64_t said_more; /* than the device has */

static int device_memory(uint32_t device, uint64_t *ret_free, uint64_t *ret_total) {
        *ret_total = device_sim.limit + said_more;
        *ret_free = device_sim.limit - device_sim.used + said_more;
        return 0;
}

/* On the device, with this much memory; results are not kept. */
static CoderBench *bench_on_device(uint64_t limit) {
        CoderBench *b = bench_new(1, CODER_ARENA);

        encode_cache_set_limit(&b->runner.encodes, 0);
        bench_set_ops(b, device_ops(), device_memory);
        device_sim.limit = limit;
        said_more = 0;
        return b;
}

static void bench_end(CoderBench *b) {
        bool device = !b->ops.host_weights;

        (void) bench_free(b);
        if (device)
                device_ops_done();
}

static uint8_t *run_plainly(const CoderKind *k, uint64_t *ret_size) {
        CoderBench *b = bench_new(1, CODER_ARENA);
        WireJobOpen w;
        uint8_t *result;

        b->ops.half = true; /* as on the device */
        bench_load(b, k->model, coder_files(k->model));
        w = k->job(b);
        result = bench_run(b, &w, ret_size);
        bench_end(b);
        return result;
}

/* Where the backend has f16, a job has it unless it asks for f32. */
static void decode_in_f16_is_near_f32(void **state) {
        CLEANUP_FREE uint8_t *half = NULL, *plain = NULL;
        double difference = 0, length = 0;
        uint64_t size, n;

        half = run_plainly(coder_kinds + CODER_DECODE_HALF, &size);
        plain = run_plainly(coder_kinds + 4, &n);
        assert_int_equal(n, size);
        for (uint64_t i = 0; i < n / sizeof(float); i++) {
                float a, b;

                memcpy(&a, half + i * sizeof(a), sizeof(a));
                memcpy(&b, plain + i * sizeof(b), sizeof(b));
                difference += ((double) a - (double) b) * ((double) a - (double) b);
                length += (double) b * (double) b;
        }
        assert_true(difference > 1e-10 * length && difference < 9e-6 * length);
}

/* Two chunks of five tiles, of which the device takes three at a time, then two. */
static WireJobOpen wide_film(CoderBench *b) {
        WireJobOpen w = coder_decode_job(b, CODER_VIDEO_ORIGINAL, 2, 54);

        w.output_type = ST_U8;
        return w;
}

static int try_run(CoderBench *b, const CoderKind *k, Fault *f) {
        const WireJobOpen w = k->job(b);
        CLEANUP(job_unrefp) Job *j = bench_open(b, &w);
        StepResult result = {};
        int r = 0;

        while (r >= 0 && j->committed < j->steps)
                r = bench_try_step(b, j, &result, f);
        return r;
}

static void run_same(CoderBench *b, const CoderKind *k, const uint8_t *want, uint64_t size) {
        const WireJobOpen w = k->job(b);
        CLEANUP_FREE uint8_t *have = NULL;
        uint64_t n;

        have = bench_run(b, &w, &n);
        assert_int_equal(n, size);
        if (memcmp(have, want, size) != 0)
                fail_msg("%s: the bits differ", k->name);
}

/* About the least memory that it runs with. */
static uint64_t least_memory(const CoderKind *k, uint64_t most) {
        for (uint64_t limit = most / 12 * 2;; limit += most / 12) {
                CoderBench *b = bench_on_device(limit);
                Fault f = {};
                int r;

                bench_load(b, k->model, coder_files(k->model));
                r = try_run(b, k, &f);
                bench_end(b);
                if (r >= 0)
                        return limit;
                assert_int_equal(r, -ENOMEM);
                assert_string_equal(f.name, FAULT_DOES_NOT_FIT);
                assert_true(limit < most);
        }
}

/* With room for everything, for what passes alone, and between. What stays between steps and jobs is not fetched again. */
static void code_any_memory_same_bits(void **state) {
        unsigned passed = 0;

        for (size_t i = 0; i < CODER_KINDS; i++) {
                const CoderKind *k = coder_kinds + i;
                CLEANUP_FREE uint8_t *want = NULL;
                uint64_t size, most, least, fetched;
                uint32_t all;
                CoderBench *b;

                want = run_plainly(k, &size);
                b = bench_on_device(PLENTY);
                bench_load(b, k->model, coder_files(k->model));
                run_same(b, k, want, size);
                assert_int_equal(b->runner.residency.figures[0].model, k->model);
                all = b->runner.residency.figures[0].blocks;
                most = device_sim.peak + device_sim.peak / 32;
                fetched = device_sim.fetched_bytes;
                b->used = 0; /* of the input */
                memset(b->output, 0, b->size);
                run_same(b, k, want, size);
                assert_int_equal(device_sim.fetched_bytes, fetched);
                bench_end(b);

                least = least_memory(k, most);
                print_message("%s: %llu bytes of the device, or %llu\n", k->name, (unsigned long long) most,
                        (unsigned long long) least);
                for (unsigned part = 0; part < 2; part++) {
                        b = bench_on_device(least + (most - least) * part / 2);
                        bench_load(b, k->model, coder_files(k->model));
                        run_same(b, k, want, size);
                        assert_true(device_sim.peak <= device_sim.limit);
                        passed += part == 0 && b->runner.residency.figures[0].blocks < all;
                        bench_end(b);
                }
        }
        assert_true(passed >= 6); /* a ring for tiny parts is as large as all of them */
}

/* Tiles of a batch do not touch what another batch, of another size, has on its way to the host. */
static void decode_uneven_batches_same_bits(void **state) {
        static const CoderKind k = {"a wide film", CODER_VIDEO_ORIGINAL, wide_film};
        CLEANUP_FREE uint8_t *want = NULL;
        uint64_t size;
        CoderBench *b;

        want = run_plainly(&k, &size);
        b = bench_on_device(PLENTY);
        assert_int_equal(b->ops.batch, 3);
        bench_load(b, k.model, coder_files(k.model));
        run_same(b, &k, want, size);
        bench_end(b);
}

/* One after the other on a device that has no room for two, and back again. */
static void code_models_take_turns(void **state) {
        static const CoderKind *const turns[] = {coder_kinds + 1, coder_kinds + 3, coder_kinds + 7, coder_kinds + 5, coder_kinds + 9,
                coder_kinds + 1};
        uint8_t *want[ELEMENTSOF(turns)];
        uint64_t sizes[ELEMENTSOF(turns)], most = 0;
        CoderBench *b;

        for (size_t i = 0; i < ELEMENTSOF(turns); i++) {
                CoderBench *alone = bench_on_device(PLENTY);
                Fault f = {};

                want[i] = run_plainly(turns[i], sizes + i);
                bench_load(alone, turns[i]->model, coder_files(turns[i]->model));
                assert_int_equal(try_run(alone, turns[i], &f), 0);
                most = device_sim.peak > most ? device_sim.peak : most;
                bench_end(alone);
        }

        b = bench_on_device(most + most / 32);
        for (uint64_t model = CODER_CONDITIONER; model <= CODER_AUDIO; model++)
                bench_load(b, model, coder_files(model));
        for (size_t i = 0; i < ELEMENTSOF(turns); i++) {
                b->used = 0;                     /* of the input */
                memset(b->output, 0, b->size); /* also what lies between results */
                run_same(b, turns[i], want[i], sizes[i]);
                assert_int_equal(b->runner.residency.figures[0].model, turns[i]->model);
                free(want[i]);
        }
        for (uint64_t model = CODER_CONDITIONER; model <= CODER_AUDIO; model++)
                (void) model_table_close(&b->models, model);
        (void) residency_rest(&b->runner.residency, b->ranks);
        assert_int_equal(device_sim.used, 0);
        bench_end(b);
}

/* Others took memory after it was counted. */
static void code_less_memory_than_said_goes_on(void **state) {
        static const CoderKind *const some[] = {coder_kinds + 1, coder_kinds + 3, coder_kinds + 5}; /* of large parts */

        for (size_t i = 0; i < ELEMENTSOF(some); i++) {
                CLEANUP_FREE uint8_t *want = NULL;
                uint64_t size, peak;
                CoderBench *b;

                want = run_plainly(some[i], &size);
                b = bench_on_device(PLENTY);
                bench_load(b, some[i]->model, coder_files(some[i]->model));
                run_same(b, some[i], want, size);
                peak = device_sim.peak;
                bench_end(b);

                b = bench_on_device(peak - peak / 16);
                said_more = peak;
                bench_load(b, some[i]->model, coder_files(some[i]->model));
                run_same(b, some[i], want, size);
                bench_end(b);
        }
}

/* A device's error ends the step, not the job. */
static void code_device_error_job_goes_on(void **state) {
        CLEANUP_FREE uint8_t *want = NULL;
        const CoderKind *k = coder_kinds + 3;
        CLEANUP_FREE uint8_t *have = NULL;
        StepResult result = {};
        CoderBench *b;
        uint64_t size;
        WireJobOpen w;
        Fault f = {};
        Job *j;

        want = run_plainly(k, &size);
        b = bench_on_device(PLENTY);
        bench_load(b, k->model, coder_files(k->model));
        w = k->job(b);
        j = bench_open(b, &w);
        device_sim.fetches_left = 12;
        assert_int_equal(bench_try_step(b, j, &result, &f), -EIO);
        assert_int_equal(j->committed, 0);
        bench_set_ops(b, device_ops_cpu(), NULL); /* gives everything back */
        device_ops_done();
        bench_set_ops(b, device_ops(), device_memory);
        device_sim.limit = PLENTY;
        bench_finish(b, j);
        have = bench_output(b, j, 0);
        assert_memory_equal(have, want, j->coder->outputs[0].tensor.size);
        (void) job_unref(j);
        bench_end(b);
}

/* Host memory is asked for what a step takes there. */
static void code_device_memory_is_not_the_hosts(void **state) {
        const CoderKind *k = coder_kinds + 3;
        CoderBench *b = bench_on_device(PLENTY);
        WireJobOpen w;
        Fault f = {};
        Job *j;

        bench_load(b, k->model, coder_files(k->model));
        w = k->job(b);
        j = bench_open(b, &w);
        assert_true(j->coder->device_bytes > 0 && j->coder->device_bytes < j->coder->memory_bytes);
        bench_memory_available = j->coder->memory_bytes - j->coder->device_bytes - 1;
        assert_int_equal(bench_try_step(b, j, &(StepResult){}, &f), -ENOMEM);
        bench_memory_available++;
        assert_int_equal(bench_try_step(b, j, &(StepResult){}, &f), 0);
        bench_memory_available = 0;
        (void) job_unref(j);
        bench_end(b);
}

/* Whoever gets a tile: each rank takes as much of its device as a rank alone. (The conditioner's ranks share its rows.) */
static void code_is_planned_with_memory_for_every_rank(void **state) {
        for (size_t i = 0; i < CODER_KINDS; i++) {
                const CoderKind *k = coder_kinds + i;
                uint64_t one = 0;

                for (uint32_t ranks = 1; k->model != CODER_CONDITIONER && ranks <= 3; ranks += 2) {
                        CoderBench *b = bench_on_device(PLENTY);
                        WireJobOpen w;
                        Job *j;

                        bench_set_ranks(b, ranks);
                        bench_load(b, k->model, coder_files(k->model));
                        w = k->job(b);
                        j = bench_open(b, &w);
                        one = ranks == 1 ? j->coder->device_bytes : one;
                        if (j->coder->device_bytes != ranks * one || j->coder->device_bytes > j->coder->memory_bytes)
                                fail_msg("%s: %u ranks are planned with %llu bytes, one with %llu", k->name, ranks,
                                        (unsigned long long) j->coder->device_bytes, (unsigned long long) one);
                        (void) job_unref(j);
                        bench_end(b);
                }
        }
}

/* The conditioner's ranks exchange beside the computation, through the host or from device to device. */
static void encode_any_exchange_same_bits(void **state) {
        const uint64_t ranks[] = {3, 7, 10}; /* of four */

        for (size_t i = 0; i < 3; i++) {
                const CoderKind *k = coder_kinds + i;
                CLEANUP_FREE uint8_t *want = NULL;
                uint64_t size;

                want = run_plainly(k, &size);
                for (unsigned n = 0; n < 2 * ELEMENTSOF(ranks); n++) {
                        const WireExchange exchange = n % 2 ? WIRE_EXCHANGE_P2P : WIRE_EXCHANGE_HOST;
                        CoderBench *b = bench_on_device(PLENTY);
                        CLEANUP_FREE uint8_t *have = NULL;
                        uint64_t have_size;
                        WireJobOpen w;

                        bench_set_ranks(b, 4);
                        bench_load(b, k->model, coder_files(k->model));
                        w = k->job(b);
                        w.ranks = ranks[n / 2];
                        w.exchange = exchange;
                        device_sim.peer_copies = 0;
                        have = bench_run(b, &w, &have_size);
                        assert_int_equal(have_size, size);
                        if (memcmp(have, want, size) != 0)
                                fail_msg("%s: ranks %llx, exchange %u: the bits differ", k->name, (unsigned long long) w.ranks, exchange);
                        assert_true(device_sim.peer_copies > 0); /* staged ones are on the same queue */
                        bench_end(b);
                }
        }
}

/* A backend that lacks an operation is told from what is wrong with a job; it runs the rest. */
static void code_without_convolutions_is_not_supported(void **state) {
        CoderBench *b = bench_on_device(PLENTY);

        b->ops.conv = NULL;
        for (size_t i = 0; i < CODER_KINDS; i++) {
                bool convolves = strstr(coder_kinds[i].name, "encode") || strstr(coder_kinds[i].name, "sound");
                WireJobOpen w;
                Fault f = {};

                if (!model_table_find(&b->models, coder_kinds[i].model))
                        bench_load(b, coder_kinds[i].model, coder_files(coder_kinds[i].model));
                b->used = 0;
                w = coder_kinds[i].job(b);
                if (convolves)
                        bench_refuse(b, &w, FAULT_NOT_SUPPORTED, "set Worker=cpu");
                else
                        assert_int_equal(try_run(b, coder_kinds + i, &f), 0);
        }
        bench_end(b);
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(decode_in_f16_is_near_f32),
                cmocka_unit_test(code_any_memory_same_bits),
                cmocka_unit_test(decode_uneven_batches_same_bits),
                cmocka_unit_test(code_models_take_turns),
                cmocka_unit_test(code_less_memory_than_said_goes_on),
                cmocka_unit_test(code_device_error_job_goes_on),
                cmocka_unit_test(code_device_memory_is_not_the_hosts),
                cmocka_unit_test(code_is_planned_with_memory_for_every_rank),
                cmocka_unit_test(encode_any_exchange_same_bits),
                cmocka_unit_test(code_without_convolutions_is_not_supported),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
