/* SPDX-License-Identifier: Apache-2.0 */
/* Steps on a device with memory of its own, played by the CPU backend: what stays there, for how long, and what happens
 * where there is less of it than was said. */
#include "service/worker/residency.h"

#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

#include "service/latentd/plan.h"
#include "service/shared/cleanup.h"
#include "service/shared/clock.h"
#include "service/worker/step.h"
#include "tests/unit/worker/device-ops.h"
#include "tests/unit/worker/fixture.h"

#define PLENTY (UINT64_C(1) << 32)

static uint64_t said_more; /* than the device has */
static bool device_gone;

static uint64_t memory_available(void) {
        return 0;
}

static int device_memory(uint32_t device, uint64_t *ret_free, uint64_t *ret_total) {
        if (device_gone)
                return -ENODEV;
        *ret_total = device_sim.limit + said_more;
        *ret_free = device_sim.limit - device_sim.used + said_more;
        return 0;
}

typedef struct Bench {
        Fixture *x;
        int sockets[2];
        Link *link;
        uint32_t n_ranks; /* 0: one */
        LkOps ops;
        Backend backend;
        RankGroup *ranks;
        StepRunner runner;
} Bench;

static void no_step(void *userdata, RankGroup *g, Job *j, uint32_t step) {
}

static void start(Bench *b, const LkOps *ops) {
        Fault f = {};

        b->ops = *ops;
        b->backend = (Backend){.program = "test", .ops = &b->ops, .memory_available = memory_available, .device_memory = device_memory};
        assert_int_equal(rank_group_new(&b->ops, b->n_ranks > 0 ? b->n_ranks : 1, b->n_ranks, NULL, no_step, NULL, &b->ranks, &f), 0);
        b->runner = (StepRunner){.backend = &b->backend, .link = b->link, .merged = MERGED_CACHE_INIT, .tables = MOD_CACHE_INIT};
}

static void stop(Bench *b) {
        step_runner_done(&b->runner);
        b->ranks = rank_group_free(b->ranks);
}

static Bench *bench_of_ranks(uint64_t limit, uint32_t n_ranks) {
        Bench *b = calloc(1, sizeof(*b));

        assert_non_null(b);
        b->n_ranks = n_ranks;
        b->x = fixture_new();
        fixture_model(b->x)->ops = device_ops();
        assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, b->sockets), 0);
        assert_int_equal(link_new(b->sockets[0], &b->link), 0);
        device_sim.limit = limit;
        said_more = 0;
        device_gone = false;
        start(b, device_ops());
        device_sim.limit = limit;
        device_sim.keeps = true;
        return b;
}

static Bench *bench_new(uint64_t limit) {
        return bench_of_ranks(limit, 1);
}

static void bench_free(Bench *b) {
        stop(b);
        device_ops_done();
        (void) link_free(b->link);
        (void) close(b->sockets[0]);
        (void) close(b->sockets[1]);
        (void) fixture_free(b->x);
        free(b);
}

static Job *new_job_of_ranks(Bench *b, uint64_t id, uint32_t ranks) {
        Job *j = fixture_job(b->x, id);
        WireMessage m;
        Fault f = {};

        wire_init(&m, WIRE_PLAN, 1, id, 0);
        assert_int_equal(plan_make(j->layout->rows, 8, ranks, 1, &(PlanWishes){.chunks = ranks > 1 ? 2 : 1}, &m.plan), 0);
        assert_int_equal(plan_ranks_used(&m.plan), ranks);
        assert_int_equal(plan_new(&m.plan, j->layout->rows, 8, rank_group_size(b->ranks), &j->plan, &f), 0);
        return j;
}

static Job *new_job(Bench *b, uint64_t id) {
        return new_job_of_ranks(b, id, rank_group_size(b->ranks));
}

static int try_step(Bench *b, Job *j, Fault *f) {
        StepResult result;

        *f = (Fault){};
        return step_run(&b->runner, b->ranks, j, j->committed, &result, f);
}

static void run_to_end(Bench *b, Job *j) {
        while (j->committed < j->steps) {
                Fault f;

                if (try_step(b, j, &f) < 0)
                        fail_msg("%s", f.text);
        }
}

/* The last state of a whole run with weights where they are. */
static float *expected(void) {
        Bench b = {.x = fixture_new()};
        float *video;
        Job *j;

        assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, b.sockets), 0);
        assert_int_equal(link_new(b.sockets[0], &b.link), 0);
        (void) device_ops(); /* so that there is a CPU's */
        start(&b, device_ops_cpu());
        j = new_job(&b, 5);
        run_to_end(&b, j);
        video = malloc(j->slot_stride);
        assert_non_null(video);
        memcpy(video, j->state.slot, j->slot_stride);
        (void) job_unref(j);
        stop(&b);
        (void) link_free(b.link);
        (void) close(b.sockets[0]);
        (void) close(b.sockets[1]);
        (void) fixture_free(b.x);
        return video;
}

static void assert_same(const Job *j, const float *want) {
        assert_int_equal(j->committed, j->steps);
        assert_memory_equal(j->state.slot, want, j->slot_stride);
}

/* With room for all, for a ring alone and between: the same bits, and never more than there is. */
static void step_any_memory_same_bits(void **state) {
        CLEANUP_FREE float *want = expected();
        uint64_t whole = 0, least = 0;

        for (unsigned i = 0; i < 4; i++) {
                Bench *b;
                Job *j;

                b = bench_new(i == 0 ? PLENTY : least + (whole - least) * (i - 1) / 3);
                j = new_job(b, 5);
                run_to_end(b, j);
                assert_same(j, want);
                if (i == 0) {
                        whole = device_sim.peak + device_sim.peak / 32;
                        assert_true(b->runner.residency.figures[0].blocks > 0);
                        assert_int_equal(b->runner.residency.figures[0].model, 1);
                } else if (i == 1)
                        assert_true(b->runner.residency.figures[0].blocks < fixture_model(b->x)->h3->config.layers);
                (void) job_unref(j);
                bench_free(b);

                /* The least that a step takes. */
                for (least = i == 0 ? whole / 64 : least; i == 0; least += whole / 64) {
                        Fault f;
                        int r;

                        b = bench_new(least);
                        j = new_job(b, 5);
                        r = try_step(b, j, &f);
                        (void) job_unref(j);
                        bench_free(b);
                        if (r >= 0)
                                break;
                        assert_int_equal(r, -ENOMEM);
                        assert_string_equal(f.name, FAULT_DOES_NOT_FIT);
                }
                assert_true(least < whole);
        }
}

/* Between steps and jobs. */
static void step_model_stays(void **state) {
        Bench *b = bench_new(PLENTY);
        uint64_t fetched, used;
        uint32_t blocks;
        Job *j = new_job(b, 5);

        run_to_end(b, j);
        (void) job_unref(j);
        fetched = device_sim.fetched_bytes;
        used = device_sim.used;
        blocks = b->runner.residency.figures[0].blocks;
        assert_int_equal(blocks, fixture_model(b->x)->h3->config.layers);
        for (unsigned i = 0; i < 10; i++) {
                j = new_job(b, 6 + i);
                run_to_end(b, j);
                (void) job_unref(j);
                assert_int_equal(b->runner.residency.figures[0].blocks, blocks);
                assert_int_equal(device_sim.used, used);
        }
        /* parts of a prompt and a schedule pass, and their results are kept */
        assert_true(device_sim.fetched_bytes - fetched < fetched / 4);
        bench_free(b);
}

/* Of another file with the same numbers, as model 2. */
static void run_other(Bench *b, uint64_t id, const float *want) {
        WireJobOpen open = b->x->sample;
        WireMessage m;
        Fault f = {};
        Job *j;

        if (!model_table_find(&b->x->models, 2)) {
                fixture_add_model(b->x, 2, "dit/comfy.safetensors");
                model_table_find(&b->x->models, 2)->ops = fixture_model(b->x)->ops;
        }
        open.header.job = id;
        open.model = 2;
        assert_int_equal(fixture_open(b->x, &open, &j, &f), 0);
        wire_init(&m, WIRE_PLAN, 1, id, 0);
        assert_int_equal(plan_make(j->layout->rows, 8, 1, 1, &(PlanWishes){.chunks = 1}, &m.plan), 0);
        assert_int_equal(plan_new(&m.plan, j->layout->rows, 8, 1, &j->plan, &f), 0);
        run_to_end(b, j);
        assert_same(j, want);
        (void) job_unref(j);
}

static uint32_t run_one(Bench *b, uint64_t id, const float *want) {
        Job *j = new_job(b, id);

        run_to_end(b, j);
        assert_same(j, want);
        (void) job_unref(j);
        return b->runner.residency.figures[0].blocks;
}

/* Where there is room for two of them, each finds its weights again. */
static void step_other_models_stay(void **state) {
        CLEANUP_FREE float *want = expected();
        Bench *b = bench_new(PLENTY);
        const WireDeviceModel *figures = b->runner.residency.figures;
        uint64_t fetched, used;
        uint32_t blocks;

        blocks = run_one(b, 5, want);
        assert_int_equal(figures[1].model, 0);
        fetched = device_sim.fetched_bytes;
        run_other(b, 6, want);
        assert_int_equal(figures[0].model, 2);
        assert_int_equal(figures[1].model, 1);
        assert_int_equal(figures[0].blocks, blocks);
        assert_int_equal(figures[1].blocks, blocks);
        assert_true(figures[0].bytes > 0 && figures[0].bytes == figures[1].bytes);
        assert_true(device_sim.used >= figures[0].bytes + figures[1].bytes);
        used = device_sim.used;
        fetched = device_sim.fetched_bytes;
        for (unsigned i = 0; i < 6; i++) {
                if (i % 2 == 0)
                        assert_int_equal(run_one(b, 7 + i, want), blocks);
                else
                        run_other(b, 7 + i, want);
                assert_int_equal(device_sim.used, used);
        }
        assert_true((device_sim.fetched_bytes - fetched) / 6 < figures[0].bytes / 2); /* what passes for each prompt */

        /* One is closed, then there is nothing to do. */
        assert_true(model_table_close(&b->x->models, 1) > 0);
        (void) residency_rest(&b->runner.residency, b->ranks);
        assert_int_equal(figures[0].model, 2);
        assert_int_equal(figures[1].model, 0);
        assert_true(device_sim.used < used && device_sim.used >= figures[0].bytes);
        b->runner.residency.limits.idle_usec = 1;
        (void) usleep(10);
        (void) residency_rest(&b->runner.residency, b->ranks);
        assert_int_equal(device_sim.used, 0);
        bench_free(b);
}

/* Where there is room for one, and where the device has less than it said: the one whose turn it is has all that it has alone. */
static void step_other_models_yield(void **state) {
        CLEANUP_FREE float *want = expected();
        Bench *b = bench_new(PLENTY);
        const WireDeviceModel *figures = b->runner.residency.figures;
        const uint32_t blocks = run_one(b, 5, want);
        const uint64_t peak = device_sim.peak, weights = figures[0].bytes;

        bench_free(b);
        for (unsigned i = 0; i < 3; i++) {
                const bool lies = i == 2;

                b = bench_new(i == 1 ? PLENTY : peak + weights / 2);
                figures = b->runner.residency.figures;
                if (i == 1)
                        b->runner.residency.limits.limit = RESIDENCY_OVERHEAD + peak + weights / 2;
                said_more = lies ? weights : 0;
                for (unsigned n = 0; n < 4; n++) {
                        if (n % 2 == 0)
                                assert_int_equal(run_one(b, 6 + n, want), blocks);
                        else
                                run_other(b, 6 + n, want);
                        assert_int_equal(figures[0].blocks, blocks);
                        assert_int_equal(figures[1].model, 0);
                        assert_int_equal(b->runner.residency.regrow_usec, 0);
                        if (i == 1)
                                assert_true(device_sim.peak <= peak + weights / 2);
                }
                bench_free(b);
        }
}

/* What a whole run takes at most. */
static uint64_t peak_of(uint32_t ranks) {
        Bench *b = bench_of_ranks(PLENTY, ranks);
        Job *j = new_job(b, 5);
        uint64_t peak;

        run_to_end(b, j);
        (void) job_unref(j);
        peak = device_sim.peak;
        bench_free(b);
        return peak;
}

static void step_limit_is_kept(void **state) {
        CLEANUP_FREE float *want = expected();
        uint64_t peak = peak_of(1);
        Bench *b;
        Job *j;

        b = bench_new(PLENTY);
        b->runner.residency.limits.limit = RESIDENCY_OVERHEAD + peak / 4 * 3;
        j = new_job(b, 5);
        run_to_end(b, j);
        assert_same(j, want);
        assert_true(device_sim.peak <= peak / 4 * 3);
        (void) job_unref(j);
        bench_free(b);

        b = bench_new(peak);
        b->runner.residency.limits.reserve = peak / 4;
        j = new_job(b, 5);
        run_to_end(b, j);
        assert_same(j, want);
        assert_true(device_sim.peak <= peak / 4 * 3);
        (void) job_unref(j);
        bench_free(b);
}

/* Others took memory after it was counted. */
static void step_less_memory_than_said_goes_on(void **state) {
        CLEANUP_FREE float *want = expected();
        uint64_t peak = peak_of(1);
        Bench *b;
        Job *j;

        for (unsigned i = 1; i < 4; i++) {
                b = bench_new(peak - peak / 16 * i);
                said_more = peak;
                j = new_job(b, 5);
                run_to_end(b, j);
                assert_same(j, want);
                (void) job_unref(j);
                bench_free(b);
        }
}

/* What is done beside steps, and what a heap keeps, included: with room for all, for some, and of a new prompt. */
static void step_peak_is_the_plan(void **state) {
        for (uint32_t ranks = 1; ranks <= 3; ranks++) {
                uint64_t all = peak_of(ranks);

                for (unsigned i = 0; i < 3; i++) {
                        Bench *b = bench_of_ranks(i == 0 ? PLENTY : all - all / 8 * i, ranks);

                        for (unsigned n = 0; n < 3; n++) {
                                Job *j = new_job(b, 5 + n);

                                j->text[0] ^= (uint8_t) n;
                                run_to_end(b, j);
                                (void) job_unref(j);
                                assert_in_range(device_sim.peak, 1, b->runner.residency.all_bytes + b->runner.residency.all_bytes / 50);
                        }
                        assert_true(device_sim.used <= b->runner.residency.all_bytes);
                        bench_free(b);
                }
        }
}

/* The same bits on ranks that share the device, and all of them within its limit. */
static void step_ranks_share_a_device(void **state) {
        CLEANUP_FREE float *want = expected();

        for (uint32_t ranks = 1; ranks <= 3; ranks++) {
                uint64_t all = peak_of(ranks);

                for (unsigned i = 0; i < 3; i++) {
                        const uint64_t limit = i == 0 ? PLENTY : all / 100 * (100 - 8 * i);
                        Bench *b = bench_of_ranks(PLENTY, ranks);

                        if (i > 0)
                                b->runner.residency.limits.limit = RESIDENCY_OVERHEAD + limit;
                        for (unsigned n = 0; n < 2; n++) {
                                Job *j = new_job(b, 5 + n);

                                run_to_end(b, j);
                                assert_same(j, want);
                                (void) job_unref(j);
                        }
                        assert_true(device_sim.peak <= limit);
                        for (uint32_t r = 0; r < ranks; r++)
                                assert_non_null(b->runner.residency.now.weights[r]);
                        bench_free(b);
                }
        }
}

static int trim(void *userdata, uint32_t rank, LkContext *context) {
        Bench *b = userdata;

        b->ops.memory_trim(context);
        return 0;
}

static const LkOps *fast;

static void slow_free(LkContext *c, void *p) {
        (void) usleep(2000);
        fast->memory_free(c, p);
}

/* A rank that had the device for itself lets go before others take their share: no job finds less than the one before. */
static void step_ranks_yield_to_each_other(void **state) {
        CLEANUP_FREE float *want = expected();
        uint64_t all = peak_of(3);
        Bench *b = bench_of_ranks(all / 20 * 11, 3);
        uint32_t blocks[2] = {};
        const LkOps ops = b->ops;

        fast = &ops;
        b->ops.memory_free = slow_free;
        for (uint32_t i = 0; i < 6; i++) {
                Job *j = new_job_of_ranks(b, 5 + i, i % 2 ? 3 : 1);

                run_to_end(b, j);
                assert_same(j, want);
                (void) job_unref(j);
                if (i < 2)
                        blocks[i] = b->runner.residency.figures[0].blocks;
                assert_int_equal(b->runner.residency.figures[0].blocks, blocks[i % 2]);
                assert_int_equal(b->runner.residency.regrow_delay_usec, 0); /* nothing was refused */
        }
        assert_true(blocks[0] > blocks[1]);
        bench_free(b);
}

/* What contexts keep goes. */
static int on_ranks_trim(Bench *b) {
        return rank_group_run(b->ranks, &(RankOrder){.ranks = (UINT64_C(1) << rank_group_size(b->ranks)) - 1, .work = trim,
                                                .userdata = b, .deadline_usec = UINT64_C(60000000)});
}

/* Memory is refused again and again: less stays each time. When it is there again, so are the blocks, after a while. */
static void step_refused_memory_comes_back(void **state) {
        CLEANUP_FREE float *want = expected();

        for (uint32_t ranks = 1; ranks <= 2; ranks++) {
                Bench *b = bench_of_ranks(PLENTY, ranks);
                Residency *x = &b->runner.residency;
                uint32_t all = run_one(b, 5, want), few;
                const uint64_t used = device_sim.used;

                for (unsigned i = 0; i < 3; i++) {
                        assert_int_equal(on_ranks_trim(b), 0);
                        device_sim.limit = used - used / 16 * (i + 1);
                        few = run_one(b, 6 + i, want);
                        assert_true(few < all);
                        assert_true(x->regrow_usec > clock_usec());
                }
                assert_true(x->regrow_delay_usec >= 60000000); /* more than once */
                few = run_one(b, 9, want);
                assert_int_equal(run_one(b, 10, want), few);

                device_sim.limit = PLENTY;
                assert_int_equal(run_one(b, 11, want), few); /* not yet */
                x->regrow_usec = 1;
                assert_int_equal(run_one(b, 12, want), all);
                assert_int_equal(x->regrow_usec, 0);
                assert_int_equal(device_sim.used, used);
                bench_free(b);
        }
}

static void step_does_not_fit_says_numbers(void **state) {
        Bench *b = bench_new(10000);
        Job *j = new_job(b, 5);
        Fault f;

        assert_int_equal(try_step(b, j, &f), -ENOMEM);
        assert_string_equal(f.name, FAULT_DOES_NOT_FIT);
        assert_non_null(strstr(f.text, "bytes of device memory"));
        assert_non_null(strstr(f.text, "9844 may be taken"));
        assert_int_equal(j->committed, 0);

        device_sim.limit = PLENTY;
        assert_int_equal(try_step(b, j, &f), 0);
        (void) job_unref(j);
        bench_free(b);
}

static void rest_closed_model_is_let_go(void **state) {
        Bench *b = bench_new(PLENTY);
        Job *j = new_job(b, 5);

        run_to_end(b, j);
        assert_int_equal(residency_rest(&b->runner.residency, b->ranks), UINT64_MAX);
        assert_true(device_sim.used > 0);
        (void) job_unref(j);
        assert_true(model_table_close(&b->x->models, 1) > 0);
        assert_int_equal(residency_rest(&b->runner.residency, b->ranks), UINT64_MAX);
        assert_int_equal(device_sim.used, 0);
        assert_int_equal(b->runner.residency.figures[0].bytes, 0);
        assert_int_equal(b->runner.residency.figures[0].model, 0);
        bench_free(b);
}

static void rest_idle_model_is_let_go(void **state) {
        CLEANUP_FREE float *want = expected();
        Bench *b = bench_new(PLENTY);
        Job *j = new_job(b, 5);
        uint64_t next;
        Fault f;

        b->runner.residency.limits.idle_usec = UINT64_C(3600000000);
        assert_int_equal(try_step(b, j, &f), 0);
        next = residency_rest(&b->runner.residency, b->ranks);
        assert_true(next > clock_usec() + UINT64_C(3500000000) && next < clock_usec() + UINT64_C(3700000000));
        assert_true(device_sim.used > 0);

        assert_int_equal(b->runner.residency.idle, 0);
        b->runner.residency.limits.idle_usec = 1;
        assert_true(residency_rest(&b->runner.residency, b->ranks) <= clock_usec() + 1);
        assert_int_equal(device_sim.used, 0);
        assert_int_equal(b->runner.residency.figures[0].bytes, 0);
        assert_int_equal(b->runner.residency.idle, 1);

        /* Counted again after as long, not before. */
        b->runner.residency.limits.idle_usec = UINT64_C(3600000000);
        next = residency_rest(&b->runner.residency, b->ranks);
        assert_true(next > clock_usec() + UINT64_C(3500000000) && next < clock_usec() + UINT64_C(3700000000));
        assert_int_equal(b->runner.residency.idle, 1);
        b->runner.residency.limits.idle_usec = 1;
        (void) usleep(10);
        (void) residency_rest(&b->runner.residency, b->ranks);
        assert_int_equal(b->runner.residency.idle, 2);
        b->runner.residency.limits.idle_usec = 0; /* never */
        assert_int_equal(residency_rest(&b->runner.residency, b->ranks), UINT64_MAX);
        assert_int_equal(b->runner.residency.idle, 2);

        run_to_end(b, j);
        assert_same(j, want);
        (void) job_unref(j);
        bench_free(b);
}

static int (*real_attention)(LkContext *c, const LkAttention *a);

static int slow_attention(LkContext *c, const LkAttention *a) {
        (void) usleep(20000);
        return real_attention(c, a);
}

/* A step that takes longer than that is no time without one. */
static void rest_long_step_is_not_idle(void **state) {
        Bench *b = bench_new(PLENTY);
        Job *j = new_job(b, 5);
        uint64_t used;
        Fault f;

        real_attention = b->ops.attention;
        b->ops.attention = slow_attention;
        b->runner.residency.limits.idle_usec = 30000;
        assert_int_equal(try_step(b, j, &f), 0);
        used = device_sim.used;
        assert_true(residency_rest(&b->runner.residency, b->ranks) > clock_usec());
        assert_int_equal(device_sim.used, used);
        assert_int_equal(b->runner.residency.idle, 0);
        (void) job_unref(j);
        bench_free(b);
}

/* The device fails in the middle; another process's device takes the job up. */
static void step_device_error_job_goes_on(void **state) {
        CLEANUP_FREE float *want = expected();
        Bench *b = bench_new(PLENTY);
        Job *j = new_job(b, 5);
        uint32_t committed;
        uint64_t all;
        Fault f;

        b->runner.residency.limits.limit = 0;
        assert_int_equal(try_step(b, j, &f), 0);
        all = device_sim.fetches;
        assert_true(all > 8);
        b->runner.residency.limits.idle_usec = 1;
        (void) residency_rest(&b->runner.residency, b->ranks); /* so that there is something to fetch */

        for (unsigned i = 0; i < 2 && j->committed < j->steps; i++) {
                committed = j->committed;
                device_sim.fetches_left = (int64_t) (all / 4 * i);
                assert_int_equal(try_step(b, j, &f), -EIO);
                assert_int_equal(j->committed, committed);
                stop(b);
                start(b, device_ops());
                device_sim.limit = PLENTY;
                assert_int_equal(try_step(b, j, &f), 0);
                b->runner.residency.limits.idle_usec = 1;
                (void) residency_rest(&b->runner.residency, b->ranks);
        }
        run_to_end(b, j);
        assert_same(j, want);
        (void) job_unref(j);
        bench_free(b);
}

static void step_device_gone_is_an_error(void **state) {
        Bench *b = bench_new(PLENTY);
        Job *j = new_job(b, 5);
        Fault f;

        device_gone = true;
        assert_int_equal(try_step(b, j, &f), -ENODEV);
        assert_int_equal(j->committed, 0);
        (void) job_unref(j);
        bench_free(b);
}

static unsigned n_pins, n_refused;
static Ranges pinned;

/* The kernel writes where the process may. */
static bool is_writable(const void *p) {
        char byte = *(const char *) p;
        int pair[2];
        bool yes;

        assert_int_equal(pipe(pair), 0);
        assert_int_equal(write(pair[1], &byte, 1), 1);
        yes = read(pair[0], (void *) p, 1) == 1;
        (void) close(pair[0]);
        (void) close(pair[1]);
        return yes;
}

static int counting_pin(LkContext *c, const void *host, uint64_t size) {
        n_pins++;
        assert_int_equal(ranges_add(&pinned, (uintptr_t) host, (uintptr_t) host + size), 0);
        n_refused += !is_writable(host) || !is_writable((const uint8_t *) host + size - 1);
        return 0;
}

/* A driver wants memory that it registers to be writable; nobody else may write to it. */
static void step_regions_are_writable_to_the_driver_alone(void **state) {
        Bench *b = bench_new(PLENTY);
        const Region *region = fixture_model(b->x)->regions;
        Job *j = new_job(b, 5);

        n_pins = n_refused = 0;
        b->ops.pin = counting_pin;
        run_to_end(b, j);
        assert_true(n_pins > 0);
        assert_int_equal(n_refused, 0);
        assert_true(b->runner.residency.figures[0].registered_bytes > 0);
        for (uint64_t at = 0; at < region->region_size; at += 4096)
                assert_false(is_writable((const uint8_t *) region->map + at));
        (void) job_unref(j);
        bench_free(b);
}

/* Another model was on the device, or nothing was for a while: what is registered stays so, and counts once, whichever ranks asked for
 * it. */
static void step_regions_are_registered_once(void **state) {
        Bench *b = bench_of_ranks(PLENTY, 3);
        Job *j = new_job(b, 5);
        uint64_t bytes;

        n_pins = n_refused = 0;
        ranges_done(&pinned);
        b->ops.pin = counting_pin;
        run_to_end(b, j);
        bytes = b->runner.residency.figures[0].registered_bytes;
        (void) job_unref(j);
        assert_true(n_pins > 0 && bytes > 0);
        assert_int_equal(bytes, pinned.bytes);

        residency_clear(&b->runner.residency, b->ranks);
        n_pins = 0;
        j = new_job(b, 6);
        run_to_end(b, j);
        assert_int_equal(n_pins, 0);
        assert_int_equal(b->runner.residency.figures[0].registered_bytes, bytes);
        (void) job_unref(j);
        ranges_done(&pinned);
        bench_free(b);
}

/* What is not split is done by a rank that takes part: the first one need not have the model. */
static void step_rank_without_a_part_has_no_weights(void **state) {
        CLEANUP_FREE float *want = expected();
        Bench *b = bench_of_ranks(PLENTY, 3);
        Job *j = fixture_job(b->x, 5);
        WireMessage m;
        Fault f = {};

        wire_init(&m, WIRE_PLAN, 1, 5, 0);
        assert_int_equal(plan_make(j->layout->rows, 8, 3, 1, &(PlanWishes){.without = 1}, &m.plan), 0);
        assert_int_equal(plan_new(&m.plan, j->layout->rows, 8, 3, &j->plan, &f), 0);
        assert_int_equal(job_first_rank(j), 1);
        run_to_end(b, j);
        assert_same(j, want);
        assert_null(b->runner.residency.now.weights[0]);
        assert_non_null(b->runner.residency.now.weights[1]);
        assert_non_null(b->runner.residency.now.weights[2]);
        (void) job_unref(j);
        bench_free(b);
}

/* Memory that cannot be registered is fetched from all the same. */
static void step_without_registration_same_bits(void **state) {
        CLEANUP_FREE float *want = expected();
        Bench *b = bench_new(PLENTY);
        Job *j = new_job(b, 5);

        device_sim.pin_fails = true;
        run_to_end(b, j);
        assert_same(j, want);
        assert_int_equal(b->runner.residency.figures[0].registered_bytes, 0);
        (void) job_unref(j);
        bench_free(b);
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(step_any_memory_same_bits),
                cmocka_unit_test(step_model_stays),
                cmocka_unit_test(step_other_models_stay),
                cmocka_unit_test(step_other_models_yield),
                cmocka_unit_test(step_limit_is_kept),
                cmocka_unit_test(step_less_memory_than_said_goes_on),
                cmocka_unit_test(step_peak_is_the_plan),
                cmocka_unit_test(step_ranks_share_a_device),
                cmocka_unit_test(step_ranks_yield_to_each_other),
                cmocka_unit_test(step_refused_memory_comes_back),
                cmocka_unit_test(step_does_not_fit_says_numbers),
                cmocka_unit_test(rest_closed_model_is_let_go),
                cmocka_unit_test(rest_idle_model_is_let_go),
                cmocka_unit_test(rest_long_step_is_not_idle),
                cmocka_unit_test(step_device_error_job_goes_on),
                cmocka_unit_test(step_device_gone_is_an_error),
                cmocka_unit_test(step_regions_are_writable_to_the_driver_alone),
                cmocka_unit_test(step_regions_are_registered_once),
                cmocka_unit_test(step_rank_without_a_part_has_no_weights),
                cmocka_unit_test(step_without_registration_same_bits),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
