/* SPDX-License-Identifier: Apache-2.0 */
#include "service/latentd/gpu-cost.h"

#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "service/shared/cleanup.h"

/* The released model in int8 at the length that speeds are told for. */
static const GpuWork work = {
        .rows = 75794, .weight_bytes = 19270000000.0, .layers = 50, .heads = 56, .head_dim = 128, .hidden = 5376, .int8 = true};

/* n GPUs of 10^9 operations a second each, and ways of so many MB/s between all of them. */
static WireHello hello_of(uint32_t n, const uint32_t *rates, uint32_t mbs) {
        WireHello h = {.n_devices = n};

        for (uint32_t i = 0; i < n; i++) {
                (void) snprintf(h.devices[i].name, sizeof(h.devices[i].name), "Card");
                (void) snprintf(h.devices[i].pci_address, sizeof(h.devices[i].pci_address), "0000:4%u:00.0", 1 + i);
                h.rates[i] = rates[i];
                for (uint32_t k = 0; k < n; k++) {
                        h.peer_mbs[i][k] = i == k ? WIRE_LINK_SAME : 0;
                        h.host_mbs[i][k] = i == k ? 0 : mbs;
                }
        }
        return h;
}

static GpuSet set_of(const WireHello *h) {
        WireHello copy = *h;
        GpuLinks known;
        WireLinks m = {};
        GpuSet s;
        Fault f = {};

        assert_int_equal(gpu_set_apply(&(Config){}, NULL, 0, &copy, &s, &f), 0);
        memcpy(m.rates, h->rates, sizeof(m.rates));
        gpu_set_learn(&s, &m, &copy, &known);
        return s;
}

typedef struct Answer {
        WirePlan plan;
        uint64_t out;
        char why[400];
} Answer;

static Answer plan_for(const WireHello *h, const GpuWork *x, const PlanWishes *w) {
        const GpuSet s = set_of(h);
        Answer a = {};

        assert_int_equal(gpu_cost_plan(&s, h, h->n_devices, 128, x, w, &a.plan, &a.out, a.why, sizeof(a.why)), 0);
        return a;
}

static uint64_t rows_of(const Answer *a, uint32_t rank) {
        return rank < a->plan.ranks ? a->plan.rows[rank].end - a->plan.rows[rank].begin : 0;
}

static uint32_t heads_of(const Answer *a, uint32_t rank) {
        return rank < a->plan.ranks ? a->plan.heads[rank].end - a->plan.heads[rank].begin : 0;
}

/* Two layers of two heads of 10, 100 numbers wide, 1000 weights, 2 rows: by hand. */
static void cost_is_that_of_the_slowest(void **state) {
        const GpuWork small = {.rows = 2, .weight_bytes = 2000, .layers = 2, .heads = 2, .head_dim = 10, .hidden = 100};
        WireHello h = hello_of(2, (uint32_t[]){1, 2}, 1);
        WirePlan p = {.ranks = 2, .exchange = WIRE_EXCHANGE_HOST, .rows = {{0, 1}, {1, 2}}, .heads = {{0, 1}, {1, 2}}};
        const double compute = 2 * 1000 + 4 * 2 * 1 * 10 * 4, travel = 2 * (200 + 20);

        assert_true(fabs(gpu_cost(&h, &small, &p) - travel / 1e6) < 1e-12);
        h = hello_of(2, (uint32_t[]){1, 2}, 1000000);
        assert_true(fabs(gpu_cost(&h, &small, &p) - compute / 1e9) < 1e-15);
        h.rates[0] = 4; /* now the other one */
        assert_true(fabs(gpu_cost(&h, &small, &p) - compute / 2e9) < 1e-15);
        h.host_mbs[1][0] = 0;
        assert_true(gpu_cost(&h, &small, &p) == 0);
        h.host_mbs[1][0] = 1;
        h.rates[1] = 0;
        assert_true(gpu_cost(&h, &small, &p) == 0);
        p = (WirePlan){.ranks = 1, .rows = {{0, 2}}, .heads = {{0, 2}}}; /* alone: nothing travels */
        assert_true(gpu_cost(&h, &small, &p) > 0);
}

/* As a worker lists types: those of norms first. */
static void work_of_each_type(void **state) {
        static const struct {
                const char *types;
                double bytes; /* of 9000 in the file */
                bool int8;
        } cases[] = {
                {"BF16", 9000, false},
                {"BF16, F32, I8", 9000, true},
                {"BF16, F32, I8 (rotated), AdaLN curve", 9000, true},
                {"BF16, F32, F8_E4M3", 18000, false},
                {"BF16, F32, NVFP4", 32000, false},
        };

        for (size_t i = 0; i < ELEMENTSOF(cases); i++) {
                WireModelReady m = {.layers = 50, .heads = 56, .head_dim = 128, .hidden = 5376, .weight_bytes = 9000};
                GpuWork x;

                (void) snprintf(m.types, sizeof(m.types), "%s", cases[i].types);
                x = gpu_work_of(&m, 7);
                assert_int_equal(x.rows, 7);
                assert_true(fabs(x.weight_bytes - cases[i].bytes) < 1e-6);
                assert_int_equal(x.int8, cases[i].int8);
                assert_true(x.layers == 50 && x.heads == 56 && x.head_dim == 128 && x.hidden == 5376);
        }
}

static void plan_of_equal_cards_is_equal(void **state) {
        const WireHello h = hello_of(3, (uint32_t[]){65000, 64000, 65500}, 12000);
        const Answer a = plan_for(&h, &work, &(PlanWishes){});

        assert_int_equal(a.out, 0);
        assert_string_equal(a.why, "");
        assert_int_equal(a.plan.ranks, 3);
        assert_int_equal(heads_of(&a, 0), 19);
        assert_int_equal(heads_of(&a, 1), 19);
        assert_int_equal(heads_of(&a, 2), 18);
        assert_true(rows_of(&a, 0) - rows_of(&a, 1) <= 128);
}

/* By their rates, rows and heads; any number of rows. */
static void plan_of_unequal_cards_follows_rates(void **state) {
        const WireHello h = hello_of(2, (uint32_t[]){90000, 30000}, 12000);
        GpuWork x = work;

        for (x.rows = 1024; x.rows < 80000; x.rows = x.rows * 3 + 1) {
                const Answer a = plan_for(&h, &x, &(PlanWishes){});

                assert_int_equal(a.out, 0);
                assert_int_equal(heads_of(&a, 0), 42);
                assert_int_equal(rows_of(&a, 0) + rows_of(&a, 1), x.rows);
                assert_true(rows_of(&a, 1) >= x.rows / 4 - 256 && rows_of(&a, 1) <= x.rows / 4 + 256);
        }
}

/* 21 GB of each step come by a way of 0.1 GB/s: 209 s, where two others take 76 and all three would 50. */
static void plan_leaves_out_a_card_behind_a_slow_way(void **state) {
        WireHello h = hello_of(3, (uint32_t[]){65000, 65000, 65000}, 12000);
        Answer a;

        for (uint32_t i = 0; i < 2; i++)
                h.host_mbs[1][2 * i] = h.host_mbs[2 * i][1] = 100;
        a = plan_for(&h, &work, &(PlanWishes){});
        assert_int_equal(a.out, 2);
        assert_non_null(strstr(a.why, "Card (0000:42:00.0) is left out: a step would take "));
        assert_int_equal(rows_of(&a, 1), 0);
        assert_int_equal(heads_of(&a, 1), 0);
        assert_true(rows_of(&a, 0) > 0 && rows_of(&a, 2) > 0);
        assert_int_equal(plan_ranks_used(&a.plan), 2);
}

/* All that is left is one: it gets everything, and nothing is exchanged. */
static void plan_leaves_out_all_but_one(void **state) {
        const WireHello h = hello_of(3, (uint32_t[]){65000, 65000, 65000}, 1);
        const Answer a = plan_for(&h, &work, &(PlanWishes){});

        assert_int_equal(__builtin_popcountll(a.out), 2);
        assert_int_equal(plan_ranks_used(&a.plan), 1);
        assert_non_null(strstr(a.why, "; Card (0000:4"));
}

/* DenoiserGpus= has two of three: both work, slow as the way between them is, and the third does not. */
static void plan_of_a_part_leaves_nobody_out(void **state) {
        WireHello h = hello_of(3, (uint32_t[]){65000, 65000, 65000}, 12000);
        GpuSet s = set_of(&h);
        Answer a;

        h.host_mbs[0][2] = h.host_mbs[2][0] = 100;
        s.parts[GPU_PART_DENOISER] = 5;
        assert_int_equal(gpu_cost_plan(&s, &h, 3, 128, &work, &(PlanWishes){}, &a.plan, &a.out, a.why, sizeof(a.why)), 0);
        assert_int_equal(a.out, 0);
        assert_int_equal(plan_ranks_at_work(&a.plan), 5);
        s.parts[GPU_PART_DENOISER] = 0;
        assert_int_equal(gpu_cost_plan(&s, &h, 3, 128, &work, &(PlanWishes){}, &a.plan, &a.out, a.why, sizeof(a.why)), -ENODEV);
}

/* What a session or the configuration says is done; what is not known is not judged. */
static void plan_of_wishes_leaves_nobody_out(void **state) {
        static const PlanWishes wishes[] = {
                {.ranks = 2},
                {.n_shares = 2, .shares = {1, 1}},
                {.n_gpus = 2, .gpus = {"0000:41:00.0", "0000:42:00.0"}},
        };
        WireHello h = hello_of(2, (uint32_t[]){65000, 65000}, 1);
        GpuSet s;
        Answer a;

        for (size_t i = 0; i < ELEMENTSOF(wishes); i++) {
                a = plan_for(&h, &work, wishes + i);
                assert_int_equal(a.out, 0);
                assert_int_equal(plan_ranks_used(&a.plan), 2);
        }
        s = set_of(&h);
        s.given = true;
        assert_int_equal(gpu_cost_plan(&s, &h, 2, 128, &work, &(PlanWishes){}, &a.plan, &a.out, a.why, sizeof(a.why)), 0);
        assert_int_equal(a.out, 0);
        h.rates[1] = 0;
        a = plan_for(&h, &work, &(PlanWishes){});
        assert_int_equal(a.out, 0);
        assert_int_equal(plan_ranks_used(&a.plan), 2);
        assert_int_equal(plan_for(&h, &work, &(PlanWishes){.exchange = WIRE_EXCHANGE_HOST}).plan.exchange, WIRE_EXCHANGE_HOST);
        assert_int_equal(gpu_cost_plan(&s, &h, 2, 128, &work, &(PlanWishes){.n_gpus = 1, .gpus = {"0000:4f:00.0"}}, &a.plan, &a.out, a.why,
                                 sizeof(a.why)),
                -ENODEV);
}

/* WorkerRanks= below the number of GPUs: those behind have none, and are no choice. */
static void plan_of_fewer_ranks_than_devices_keeps_one(void **state) {
        const WireHello h = hello_of(3, (uint32_t[]){65000, 65000, 65000}, 1);
        const GpuSet s = set_of(&h);
        Answer a = {};

        assert_int_equal(gpu_cost_plan(&s, &h, 1, 128, &work, &(PlanWishes){}, &a.plan, &a.out, a.why, sizeof(a.why)), 0);
        assert_int_equal(a.out, 0);
        assert_int_equal(rows_of(&a, 0), work.rows);
        assert_int_equal(gpu_cost_plan(&s, &h, 2, 128, &work, &(PlanWishes){}, &a.plan, &a.out, a.why, sizeof(a.why)), 0);
        assert_int_equal(__builtin_popcountll(a.out), 1);
        assert_int_equal(plan_ranks_used(&a.plan), 1);
}

static void plan_of_one_device_is_its_own(void **state) {
        const WireHello h = hello_of(1, (uint32_t[]){65000}, 0);
        const Answer a = plan_for(&h, &work, &(PlanWishes){});

        assert_int_equal(a.out, 0);
        assert_int_equal(a.plan.ranks, 1);
        assert_int_equal(rows_of(&a, 0), work.rows);
        assert_int_equal(heads_of(&a, 0), 56);
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(cost_is_that_of_the_slowest),
                cmocka_unit_test(work_of_each_type),
                cmocka_unit_test(plan_of_equal_cards_is_equal),
                cmocka_unit_test(plan_of_unequal_cards_follows_rates),
                cmocka_unit_test(plan_leaves_out_a_card_behind_a_slow_way),
                cmocka_unit_test(plan_leaves_out_all_but_one),
                cmocka_unit_test(plan_of_wishes_leaves_nobody_out),
                cmocka_unit_test(plan_of_a_part_leaves_nobody_out),
                cmocka_unit_test(plan_of_fewer_ranks_than_devices_keeps_one),
                cmocka_unit_test(plan_of_one_device_is_its_own),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
