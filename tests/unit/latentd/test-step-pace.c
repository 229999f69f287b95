/* SPDX-License-Identifier: Apache-2.0 */
#include "service/latentd/step-pace.h"

#include "tests/unit/latentd/fake-worker.h"

/* Seconds that the released model in int8 took on H200s: one of them, and two of them by p2p, where the first step of a worker was slower
 * by the weights that it uploads. */
#define SHORT 38010
#define LONG 73686
#define SHORT_ONE 4.39
#define LONG_ONE 13.9
#define SHORT_TWO 2.39
#define SHORT_TWO_FIRST 3.18

/* GPUs of 700 TFLOP/s in bf16, with 150 GB/s between them. */
static void set_worker(Fake *f, uint32_t n) {
        WireHello *h = &f->m->worker->hello;

        *h = (WireHello){.n_devices = n};
        for (uint32_t i = 0; i < n; i++) {
                h->rates[i] = 700000;
                for (uint32_t k = 0; k < n; k++) {
                        h->peer_mbs[i][k] = i == k ? WIRE_LINK_SAME : 150000;
                        h->host_mbs[i][k] = i == k ? 0 : 12000;
                }
        }
        (void) snprintf(f->model->info.types, sizeof(f->model->info.types), "BF16, F32, I8 (rotated)");
        f->model->info.weight_bytes = 19270000000;
        f->model->info.layers = 50;
        f->model->info.heads = 56;
        f->model->info.head_dim = 128;
        f->model->info.hidden = 5376;
}

static Job job_of(const Fake *f, uint64_t rows, uint32_t ranks, WireExchange exchange) {
        const PlanWishes w = {.ranks = ranks, .exchange = exchange};
        Job j = {.manager = f->m, .model = f->model, .request = {.compute = WIRE_COMPUTE_BF16}, .ready = {.rows = rows}};

        assert_int_equal(plan_make(rows, 56, 8, 128, &w, &j.plan), 0);
        return j;
}

static double foretold(const Fake *f, uint64_t rows, uint32_t ranks, WireExchange exchange) {
        const Job j = job_of(f, rows, ranks, exchange);

        return (double) step_pace_usec(&j) / 1e6;
}

static void note(const Fake *f, uint64_t rows, uint32_t ranks, bool rough, double sec) {
        const Job j = job_of(f, rows, ranks, WIRE_EXCHANGE_P2P);

        step_pace_note(&j, false, rough, (uint64_t) (sec * 1e6));
}

static void assert_near(double value, double wanted, double part) {
        if (value < wanted * (1 - part) || value > wanted * (1 + part))
                fail_msg("%g s, expected %g s within %g %%", value, wanted, part * 100);
}

/* What the first one is measured at says nothing any more once there is a second one. */
static void usec_after_the_first_step_of_a_worker_is_the_second_ones(void **state) {
        Fake *f = *state;

        set_worker(f, 2);
        note(f, SHORT, 2, true, SHORT_TWO_FIRST);
        assert_near(foretold(f, SHORT, 2, WIRE_EXCHANGE_P2P), SHORT_TWO, 0.15);
        note(f, SHORT, 2, false, SHORT_TWO);
        assert_near(foretold(f, SHORT, 2, WIRE_EXCHANGE_P2P), SHORT_TWO, 0.001);
        note(f, SHORT, 2, true, SHORT_TWO_FIRST); /* the next worker */
        assert_near(foretold(f, SHORT, 2, WIRE_EXCHANGE_P2P), SHORT_TWO, 0.001);
}

static void usec_of_another_length_follows_its_work(void **state) {
        Fake *f = *state;

        set_worker(f, 1);
        note(f, SHORT, 1, false, SHORT_ONE);
        assert_near(foretold(f, LONG, 1, WIRE_EXCHANGE_HOST), LONG_ONE, 0.05);
        assert_near(foretold(f, SHORT, 1, WIRE_EXCHANGE_HOST), SHORT_ONE, 0.001);
}

/* A first step there does not go before what one GPU is known to need. */
static void usec_of_two_is_known_from_one(void **state) {
        Fake *f = *state;

        set_worker(f, 2);
        note(f, LONG, 1, false, LONG_ONE);
        assert_near(foretold(f, SHORT, 2, WIRE_EXCHANGE_P2P), SHORT_TWO, 0.15);
        note(f, SHORT, 2, true, SHORT_TWO_FIRST);
        assert_near(foretold(f, SHORT, 2, WIRE_EXCHANGE_P2P), SHORT_TWO, 0.15);
}

static void usec_of_one_is_known_from_two(void **state) {
        Fake *f = *state;

        set_worker(f, 2);
        note(f, SHORT, 2, false, SHORT_TWO);
        assert_near(foretold(f, SHORT, 1, WIRE_EXCHANGE_P2P), SHORT_ONE, 0.15);
        assert_near(foretold(f, LONG, 1, WIRE_EXCHANGE_P2P), LONG_ONE, 0.15);
}

static void usec_before_any_step_is_by_the_rates(void **state) {
        Fake *f = *state;

        set_worker(f, 2);
        assert_near(foretold(f, SHORT, 1, WIRE_EXCHANGE_P2P), SHORT_ONE, 0.15);
        assert_near(foretold(f, LONG, 1, WIRE_EXCHANGE_P2P), LONG_ONE, 0.15);
        assert_near(foretold(f, SHORT, 2, WIRE_EXCHANGE_P2P), SHORT_TWO, 0.15);
}

/* 11.9 GB reach each of two: by a way of 12 GB/s a second of which chunks hide three quarters, by one of 1 GB/s
 * more than they compute. */
static void usec_of_a_slower_way_has_what_it_does_not_hide(void **state) {
        Fake *f = *state;
        double bytes = 50.0 * SHORT / 2 * (5380 + 28 * 256);

        set_worker(f, 2);
        note(f, SHORT, 1, false, SHORT_ONE);
        assert_near(foretold(f, SHORT, 2, WIRE_EXCHANGE_HOST), SHORT_ONE / 2 + bytes / 12e9 / 4, 0.01);
        f->m->worker->hello.host_mbs[0][1] = f->m->worker->hello.host_mbs[1][0] = 1000;
        assert_near(foretold(f, SHORT, 2, WIRE_EXCHANGE_HOST), bytes / 1e9 + SHORT_ONE / 2 / 4, 0.01);
        f->m->worker->hello.host_mbs[0][1] = 0;
        assert_true(foretold(f, SHORT, 2, WIRE_EXCHANGE_HOST) == 0);
}

/* Ranks of one device compute one after the other: a cut there is no quicker. */
static void usec_of_ranks_of_one_device_is_no_less(void **state) {
        Fake *f = *state;

        set_worker(f, 1);
        note(f, SHORT, 1, false, SHORT_ONE);
        assert_near(foretold(f, SHORT, 3, WIRE_EXCHANGE_HOST), SHORT_ONE, 0.001);
}

/* Of neither the rates say anything; and dense steps nothing of sparse ones. */
static void usec_of_f32_and_sparse_steps_is_of_such(void **state) {
        Fake *f = *state;
        Job j;

        set_worker(f, 1);
        note(f, SHORT, 1, false, SHORT_ONE);
        j = job_of(f, SHORT, 1, WIRE_EXCHANGE_HOST);
        j.request.sparse.method = SPARSE_SLA;
        assert_int_equal(step_pace_usec(&j), 0);
        step_pace_note(&j, true, true, 2000000);
        assert_near((double) step_pace_usec(&j) / 1e6, 2, 0.001);
        assert_near(foretold(f, SHORT, 1, WIRE_EXCHANGE_HOST), SHORT_ONE, 0.001);
        j.request.sparse.method = SPARSE_NONE;
        j.request.compute = WIRE_COMPUTE_F32;
        assert_int_equal(step_pace_usec(&j), 0);
}

static void usec_without_devices_or_rates_is_not_known(void **state) {
        Fake *f = *state;

        set_worker(f, 1);
        f->m->worker->hello.rates[0] = 0;
        assert_true(foretold(f, SHORT, 1, WIRE_EXCHANGE_HOST) == 0);
        set_worker(f, 0);
        note(f, SHORT, 1, false, SHORT_ONE);
        assert_true(foretold(f, SHORT, 1, WIRE_EXCHANGE_HOST) == 0);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, fake_setup, fake_teardown)

int main(void) {
        const struct CMUnitTest tests[] = {
                TEST(usec_after_the_first_step_of_a_worker_is_the_second_ones),
                TEST(usec_of_another_length_follows_its_work),
                TEST(usec_of_two_is_known_from_one),
                TEST(usec_of_one_is_known_from_two),
                TEST(usec_before_any_step_is_by_the_rates),
                TEST(usec_of_a_slower_way_has_what_it_does_not_hide),
                TEST(usec_of_ranks_of_one_device_is_no_less),
                TEST(usec_of_f32_and_sparse_steps_is_of_such),
                TEST(usec_without_devices_or_rates_is_not_known),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
