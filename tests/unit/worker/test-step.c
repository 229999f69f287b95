/* SPDX-License-Identifier: Apache-2.0 */
#include "service/worker/step.h"

#include <limits.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "kernels/cpu/cpu.h"
#include "service/latentd/plan.h"
#include "service/shared/cleanup.h"
#include "service/worker/rank.h"
#include "tests/unit/worker/fixture.h"

static uint64_t available;

static uint64_t memory_available(void) {
        return available;
}

static atomic_int gemm_count;
static const LkOps *real;

/* Counts what the cached text saves: the refiner's own products. */
static int counting_gemm(LkContext *c, const LkGemm *a) {
        gemm_count++;
        return real->gemm(c, a);
}

static int failing_memory_new(LkContext *c, uint64_t size, void **ret) {
        return -ENOMEM;
}

typedef struct Bench {
        Fixture *x;
        int sockets[2];
        Link *link;
        LkOps ops;
        Backend backend;
        RankGroup *ranks;
        StepRunner runner;
        Job *job;
} Bench;

/* Steps are run by the tests. */
static void no_step(void *userdata, RankGroup *g, Job *j, uint32_t step) {
}

static int downloads_behind_all; /* without a product since */

static int forgetting_gemm(LkContext *c, const LkGemm *a) {
        downloads_behind_all = 0;
        return real->gemm(c, a);
}

static int counting_download(LkContext *c, void *host, const void *device, uint64_t size) {
        downloads_behind_all++;
        return real->download(c, host, device, size);
}

/* One rank does all of it. */
static void plan_whole(Job *j) {
        WireMessage m;
        WirePlan *w = &m.plan;
        Fault f = {};

        wire_init(&m, WIRE_PLAN, 1, 5, 0);
        w->ranks = w->row_tile = w->chunks = 1;
        w->kind = WIRE_PLAN_HIDDEN_GATHER;
        w->exchange = WIRE_EXCHANGE_HOST;
        w->rows[0].end = j->layout->rows;
        w->heads[0].end = 8;
        assert_int_equal(plan_new(w, j->layout->rows, 8, 1, &j->plan, &f), 0);
}

static int setup(void **state) {
        Bench *b = calloc(1, sizeof(*b));
        Fault f = {};

        assert_non_null(b);
        b->x = fixture_new();
        assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, b->sockets), 0);
        assert_int_equal(link_new(b->sockets[0], &b->link), 0);
        real = lk_cpu_ops(LK_CPU_AUTO);
        b->ops = *real;
        b->ops.gemm = counting_gemm;
        available = 0;
        b->backend = (Backend){.program = "test", .ops = &b->ops, .memory_available = memory_available};
        assert_int_equal(rank_group_new(&b->ops, 3, 3, NULL, no_step, NULL, &b->ranks, &f), 0);
        b->runner = (StepRunner){.backend = &b->backend, .link = b->link, .merged = MERGED_CACHE_INIT};

        b->job = fixture_job(b->x, 5);
        plan_whole(b->job);
        *state = b;
        return 0;
}

static int teardown(void **state) {
        Bench *b = *state;

        (void) job_unref(b->job);
        step_runner_done(&b->runner);
        (void) rank_group_free(b->ranks);
        (void) link_free(b->link);
        (void) close(b->sockets[0]);
        (void) close(b->sockets[1]);
        (void) fixture_free(b->x);
        free(b);
        return 0;
}

static void step_run_commits_and_counts(void **state) {
        Bench *b = *state;
        StepResult result = {};
        Fault f = {};

        for (uint32_t i = 0; i < 4; i++) {
                assert_int_equal(step_run(&b->runner, b->ranks, b->job, i, &result, &f), 0);
                assert_int_equal(b->job->committed, i + 1);
                assert_true(result.usec > 0);
                assert_int_equal(result.exchanged_bytes, 0);
        }
        assert_int_equal(step_run(&b->runner, b->ranks, b->job, 4, &result, &f), -EINVAL);
        assert_string_equal(f.name, FAULT_INTERNAL);
}

static void step_run_same_text_is_refined_once(void **state) {
        Bench *b = *state;
        int first, second, third;
        StepResult result;
        Fault f = {};

        gemm_count = 0;
        assert_int_equal(step_run(&b->runner, b->ranks, b->job, 0, &result, &f), 0);
        first = gemm_count;
        assert_int_equal(step_run(&b->runner, b->ranks, b->job, 1, &result, &f), 0);
        second = gemm_count - first;
        assert_true(second < first);

        /* One bit of the text. */
        b->job->text[0] ^= 1;
        gemm_count = 0;
        assert_int_equal(step_run(&b->runner, b->ranks, b->job, 2, &result, &f), 0);
        third = gemm_count;
        assert_true(third > second);
}

/* 33 rows in four chunks, of which each has sound or picture; one has both. */
static void step_run_device_has_all_work_before_the_first_download(void **state) {
        Bench *b = *state;
        StepResult result;
        Fault f = {};

        b->ops.gemm = forgetting_gemm;
        b->ops.download = counting_download;
        b->job->plan->h3.row_tile = 9;
        b->job->plan->h3.chunks = 4;
        assert_int_equal(step_run(&b->runner, b->ranks, b->job, 0, &result, &f), 0);
        assert_true(downloads_behind_all >= 3);
}

static void step_run_does_not_fit_says_numbers(void **state) {
        Bench *b = *state;
        StepResult result;
        Fault f = {};

        available = 1000;
        assert_int_equal(step_run(&b->runner, b->ranks, b->job, 0, &result, &f), -ENOMEM);
        assert_string_equal(f.name, FAULT_DOES_NOT_FIT);
        assert_non_null(strstr(f.text, "A step of 33 rows needs "));
        assert_non_null(strstr(f.text, "1000 are free"));
        assert_int_equal(b->job->committed, 0);

        /* It is asked again, and passes when there is room. */
        available = UINT64_MAX;
        f = (Fault){};
        assert_int_equal(step_run(&b->runner, b->ranks, b->job, 0, &result, &f), 0);
}

static void step_run_device_out_of_memory_says_number(void **state) {
        Bench *b = *state;
        StepResult result;
        Fault f = {};

        b->ops.memory_new = failing_memory_new;
        assert_int_equal(step_run(&b->runner, b->ranks, b->job, 0, &result, &f), -ENOMEM);
        assert_string_equal(f.name, FAULT_DOES_NOT_FIT);
        assert_int_equal(b->job->committed, 0);

        b->ops.memory_new = real->memory_new;
        f = (Fault){};
        assert_int_equal(step_run(&b->runner, b->ranks, b->job, 0, &result, &f), 0);
}

/* A MERGE of the adapter 2 with this strength; NULL plan. */
static Job *merge_job(Bench *b, double strength) {
        WireJobOpen open = b->x->sample;
        Fault f = {};
        Job *j;

        if (!model_table_find(&b->x->models, 2))
                fixture_add_model(b->x, 2, "dit/lora/lora_comfy.safetensors");
        open.kind = WIRE_JOB_MERGE;
        open.n_loras = 1;
        open.loras[0] = (WireLora){2, strength};
        if (fixture_open(b->x, &open, &j, &f) < 0)
                fail_msg("%s", f.text);
        return j;
}

static void assert_merges(Bench *b, Job *j) {
        StepResult result;
        Fault f = {};

        if (step_run(&b->runner, b->ranks, j, 0, &result, &f) < 0)
                fail_msg("%s", f.text);
        assert_non_null(j->merged);
        assert_int_equal(j->committed, 1);
}

/* Asked before anything is merged. Models that no job uses go first, those in use stay whole. */
static void step_run_merge_does_not_fit_says_numbers(void **state) {
        Bench *b = *state;
        Job *j = merge_job(b, 1), *used = merge_job(b, 0.5), *unused = merge_job(b, 0.25);
        StepResult result;
        uint64_t need;
        Fault f = {};

        assert_merges(b, used);
        assert_merges(b, unused);
        (void) job_unref(unused);
        available = 1000;
        gemm_count = 0;
        assert_int_equal(step_run(&b->runner, b->ranks, j, 0, &result, &f), -ENOMEM);
        assert_string_equal(f.name, FAULT_DOES_NOT_FIT);
        assert_non_null(strstr(f.text, "LoRA adapters (1) needs "));
        assert_non_null(strstr(f.text, "1000 are free"));
        assert_int_equal(gemm_count, 0);
        assert_int_equal(j->committed, 0);
        assert_null(b->runner.merged.kept[0]);
        assert_int_equal(used->merged->n_ref, 1);

        need = strtoull(strstr(f.text, "needs ") + strlen("needs "), NULL, 10);
        assert_true(need > used->merged->h3->private_bytes); /* and room for the work */
        available = need - 1;
        f = (Fault){};
        assert_int_equal(step_run(&b->runner, b->ranks, j, 0, &result, &f), -ENOMEM);
        available = need;
        assert_merges(b, j);
        (void) job_unref(j);
        (void) job_unref(used);
}

static void step_run_merge_device_out_of_memory_can_be_tried_again(void **state) {
        Bench *b = *state;
        Job *j = merge_job(b, 1);
        StepResult result;
        Fault f = {};

        b->ops.memory_new = failing_memory_new;
        assert_int_equal(step_run(&b->runner, b->ranks, j, 0, &result, &f), -ENOMEM);
        assert_string_equal(f.name, FAULT_DOES_NOT_FIT);
        assert_null(j->merged);
        b->ops.memory_new = real->memory_new;
        assert_merges(b, j);
        (void) job_unref(j);
}

/* Cancelled while it merges, where that does not stop: it is seen afterwards, and what was made is kept for others. */
static Job *cancelled_by_gemm;

static int cancelling_gemm(LkContext *c, const LkGemm *a) {
        cancelled_by_gemm->cancelled = true;
        return real->gemm(c, a);
}

static void step_run_cancelled_during_merge_is_seen_after_it(void **state) {
        Bench *b = *state;
        Job *j = merge_job(b, 1), *other = merge_job(b, 1);
        StepResult result;
        Fault f = {};

        cancelled_by_gemm = j;
        b->ops.gemm = cancelling_gemm;
        assert_int_equal(step_run(&b->runner, b->ranks, j, 0, &result, &f), -ECANCELED);
        assert_string_equal(f.name, FAULT_CANCELLED);
        assert_int_equal(j->committed, 0);

        b->ops.gemm = counting_gemm;
        gemm_count = 0;
        assert_merges(b, other);
        assert_int_equal(gemm_count, 0);
        (void) job_unref(j);
        (void) job_unref(other);
}

/* ---- as the worker does it ---- */

typedef struct Queued {
        Bench *bench;
        int result;
        Fault fault;
        atomic_bool done;
} Queued;

static void run_queued(void *userdata, RankGroup *g, Job *j, uint32_t step) {
        Queued *q = userdata;
        StepResult result;

        q->fault = (Fault){};
        q->result = step_run(&q->bench->runner, g, j, step, &result, &q->fault);
        q->done = true;
}

static int queue_and_wait(RankGroup *g, Queued *q, Job *j) {
        q->done = false;
        assert_int_equal(rank_group_queue(g, j, 0), 0);
        while (!q->done)
                (void) usleep(1000);
        return q->result;
}

static atomic_int gemms_left;

static int cancelling_gemm_in_a_while(LkContext *c, const LkGemm *a) {
        if (--gemms_left == 0)
                cancelled_by_gemm->cancelled = true;
        return real->gemm(c, a);
}

/* Wherever it is: the operation in which the cancel comes is the last. The next job of the group knows nothing of it. */
static void step_queued_cancelled_inside_of_a_block_stops_there(void **state) {
        Bench *b = *state;
        Queued q = {.bench = b};
        RankGroup *g = NULL;
        Fault f = {};

        assert_int_equal(rank_group_new(&b->ops, 1, 2, NULL, run_queued, &q, &g, &f), 0);
        b->ops.gemm = cancelling_gemm_in_a_while;
        for (int at = 1, r = -ECANCELED; r < 0; at += 3) {
                Job *j = cancelled_by_gemm = fixture_job(b->x, 7);

                plan_whole(j);
                gemms_left = at;
                r = queue_and_wait(g, &q, j);
                if (r == 0) { /* a step has not as many */
                        assert_true(at > 10 && gemms_left > 0);
                        (void) job_unref(j);
                        break;
                }
                assert_int_equal(r, -ECANCELED);
                assert_string_equal(q.fault.name, FAULT_CANCELLED);
                assert_int_equal(gemms_left, 0);
                assert_int_equal(j->committed, 0);
                (void) job_unref(j);
        }

        gemms_left = INT_MAX;
        assert_int_equal(queue_and_wait(g, &q, b->job), 0);
        assert_int_equal(b->job->committed, 1);
        assert_null(rank_group_free(g));
}

/* Likewise a merge, of which nothing is kept then. */
static void step_queued_cancelled_merge_stops_and_is_made_anew(void **state) {
        Bench *b = *state;
        Job *j = merge_job(b, 1), *other = merge_job(b, 1);
        Queued q = {.bench = b};
        RankGroup *g = NULL;
        Fault f = {};

        assert_int_equal(rank_group_new(&b->ops, 1, 2, NULL, run_queued, &q, &g, &f), 0);
        b->ops.gemm = cancelling_gemm_in_a_while;
        cancelled_by_gemm = j;
        gemms_left = 1;
        assert_int_equal(queue_and_wait(g, &q, j), -ECANCELED);
        assert_string_equal(q.fault.name, FAULT_CANCELLED);
        assert_int_equal(gemms_left, 0);
        assert_null(j->merged);

        gemms_left = INT_MAX;
        assert_int_equal(queue_and_wait(g, &q, other), 0);
        assert_true(gemms_left < INT_MAX);
        (void) job_unref(j);
        (void) job_unref(other);
        assert_null(rank_group_free(g));
}

static void step_run_cancelled_keeps_the_state(void **state) {
        Bench *b = *state;
        StepResult result;
        Fault f = {};

        b->job->cancelled = true;
        assert_int_equal(step_run(&b->runner, b->ranks, b->job, 0, &result, &f), -ECANCELED);
        assert_string_equal(f.name, FAULT_CANCELLED);
        assert_int_equal(b->job->committed, 0);
}

/* PROGRESS messages that came. */
static unsigned count_progress(int socket) {
        unsigned n = 0;

        for (;;) {
                WireMessage m;
                Fault f = {};
                int fd, r;

                r = wire_receive(socket, &m, &fd, &f);
                if (r == -EAGAIN)
                        return n;
                assert_int_equal(r, 1);
                assert_int_equal(m.header.type, WIRE_PROGRESS);
                assert_int_equal(m.progress.blocks, 3);
                assert_in_range(m.progress.block, 1, 3);
                n++;
        }
}

static uint64_t now_msec(void) {
        struct timespec t;

        assert_int_equal(clock_gettime(CLOCK_MONOTONIC, &t), 0);
        return (uint64_t) t.tv_sec * 1000u + (uint64_t) t.tv_nsec / 1000000u;
}

/* Nobody hears of a step shorter than a fiftieth of a second before its end. */
static void step_run_progress_is_rare(void **state) {
        Bench *b = *state;
        uint64_t begin = now_msec();
        unsigned n = 0;

        for (uint32_t i = 0; i < 20; i++) {
                StepResult result;
                Fault f = {};

                b->job->committed = 0; /* the first step again */
                assert_int_equal(step_run(&b->runner, b->ranks, b->job, 0, &result, &f), 0);
                n += count_progress(b->sockets[1]);
        }
        assert_true(n <= (now_msec() - begin) / 20);
}

static atomic_uint n_run, n_wrong;

/* On the steps' thread, where a failed assertion would have nowhere to go. */
static void count_step(void *userdata, RankGroup *g, Job *j, uint32_t step) {
        if (userdata != &n_run || !g || step != n_run)
                n_wrong++;
        n_run++;
}

static void rank_group_runs_in_order_and_lets_go(void **state) {
        Bench *b = *state;
        RankGroup *g = NULL;
        Fault f = {};

        assert_int_equal(rank_group_new(&b->ops, 0, 1, NULL, count_step, &n_run, &g, &f), -EINVAL);
        assert_int_equal(rank_group_new(&b->ops, 65, 1, NULL, count_step, &n_run, &g, &f), -EINVAL);
        f = (Fault){};
        assert_int_equal(rank_group_new(&b->ops, 1, 1, NULL, count_step, &n_run, &g, &f), 0);
        assert_int_equal(rank_group_size(g), 1);
        for (uint32_t i = 0; i < 20; i++)
                assert_int_equal(rank_group_queue(g, b->job, i), 0);
        while (n_run < 3)
                (void) usleep(1000);
        assert_null(rank_group_free(g)); /* some have run, the others are dropped */
        assert_true(n_run <= 20);
        assert_int_equal(n_wrong, 0);
        assert_int_equal(b->job->n_ref, 1);
        assert_null(rank_group_free(NULL));
}

static atomic_bool late_began;
static atomic_int late_result;

static int late_work(void *userdata, uint32_t rank, LkContext *context) {
        return 0;
}

/* Orders its ranks when the group has been told to end for a while. */
static void late_step(void *userdata, RankGroup *g, Job *j, uint32_t step) {
        late_began = true;
        (void) usleep(200000);
        late_result = rank_group_run(g, &(RankOrder){.ranks = 1, .work = late_work}) + 1;
}

static void rank_group_free_lets_the_last_step_end(void **state) {
        Bench *b = *state;
        RankGroup *g = NULL;
        Fault f = {};

        assert_int_equal(rank_group_new(&b->ops, 2, 2, NULL, late_step, NULL, &g, &f), 0);
        assert_int_equal(rank_group_queue(g, b->job, 0), 0);
        while (!late_began)
                (void) usleep(1000);
        assert_null(rank_group_free(g));
        assert_int_equal(late_result, 1);
}

typedef struct Order {
        atomic_uint ran[3];
        atomic_bool hold; /* rank 1 */
        uint32_t stuck;   /* + 1 */
        int error;        /* of rank 2 */
} Order;

static int order_work(void *userdata, uint32_t rank, LkContext *context) {
        Order *o = userdata;

        o->ran[rank] += context ? 1 : 100;
        while (rank == 1 && o->hold)
                (void) usleep(1000);
        return rank == 2 ? o->error : 0;
}

static void order_stuck(void *userdata, uint32_t rank) {
        Order *o = userdata;

        o->stuck = rank + 1;
        o->hold = false;
}

static void rank_group_run_reports_errors_and_who_is_stuck(void **state) {
        Bench *b = *state;
        Order o = {};
        RankOrder order = {
                .ranks = 7, .work = order_work, .userdata = &o, .deadline_usec = 60000000, .stuck = order_stuck};

        assert_int_equal(rank_group_run(b->ranks, &order), 0);
        o.error = -EIO;
        assert_int_equal(rank_group_run(b->ranks, &order), -EIO);
        assert_int_equal(o.stuck, 0);

        o.hold = true;
        order.deadline_usec = 1000000; /* the others are there by then */
        assert_int_equal(rank_group_run(b->ranks, &order), -EIO);
        assert_int_equal(o.stuck, 2);

        /* All of them, or those that were asked for; and on they go. */
        order.ranks = 2;
        order.deadline_usec = 60000000;
        o.error = 0;
        assert_int_equal(rank_group_run(b->ranks, &order), 0);
        assert_int_equal(o.ran[0], 3);
        assert_int_equal(o.ran[1], 4);
        assert_int_equal(o.ran[2], 3);
}

/* The job's plan on three ranks, as the broker would send it. */
static void plan_three(Bench *b, WirePlanKind kind) {
        uint64_t rows = b->job->layout->rows;
        WireMessage m;
        Fault f = {};

        wire_init(&m, WIRE_PLAN, 1, 5, 0);
        assert_int_equal(plan_make(rows, 8, 3, 1, &(PlanWishes){.kind = kind, .chunks = 2}, &m.plan), 0);
        b->job->plan = plan_free(b->job->plan);
        b->job->plan_admitted = false;
        assert_int_equal(plan_new(&m.plan, rows, 8, 3, &b->job->plan, &f), 0);
}

static void step_run_three_ranks_same_state(void **state) {
        Bench *b = *state;
        CLEANUP_FREE float *video = malloc(b->job->n_video * sizeof(float));
        StepResult result;
        Fault f = {};

        assert_non_null(video);
        assert_int_equal(step_run(&b->runner, b->ranks, b->job, 0, &result, &f), 0);
        memcpy(video, b->job->velocity.video, b->job->n_video * sizeof(float));

        for (int kind = WIRE_PLAN_HIDDEN_GATHER; kind < _WIRE_PLAN_MAX; kind++) {
                (void) job_unref(b->job);
                b->job = fixture_job(b->x, 5);
                plan_three(b, (WirePlanKind) kind);
                if (step_run(&b->runner, b->ranks, b->job, 0, &result, &f) < 0)
                        fail_msg("%s", f.text);
                assert_memory_equal(b->job->velocity.video, video, b->job->n_video * sizeof(float));
                assert_true(result.exchanged_bytes > 0);
        }
}

static int fail_once(void *userdata, uint32_t rank, const H3Message *m, uint8_t *bytes, uint64_t size) {
        return rank == 1 && m->sequence == 2 ? -EIO : 0;
}

static void step_run_failing_rank_next_step_works(void **state) {
        Bench *b = *state;
        StepResult result;
        Fault f = {};

        plan_three(b, WIRE_PLAN_HIDDEN_GATHER);
        b->runner.hook.func = fail_once;
        assert_int_equal(step_run(&b->runner, b->ranks, b->job, 0, &result, &f), -EIO);
        assert_string_equal(f.name, FAULT_INTERNAL);
        assert_non_null(strstr(f.text, "Input/output error"));
        assert_int_equal(b->job->committed, 0);

        b->runner.hook.func = NULL;
        f = (Fault){};
        assert_int_equal(step_run(&b->runner, b->ranks, b->job, 0, &result, &f), 0);
        assert_int_equal(b->job->committed, 1);
}

static atomic_bool held;
static char stuck_text[1024];

static int hang(void *userdata, uint32_t rank, const H3Message *m, uint8_t *bytes, uint64_t size) {
        while (rank == 2 && m->sequence == 2 && held)
                (void) usleep(1000);
        return 0;
}

static void let_go(void *userdata, const Job *j, uint32_t step, const Fault *f) {
        (void) snprintf(stuck_text, sizeof(stuck_text), "%s", f->text);
        held = false;
}

static void step_run_stuck_rank_is_named_next_step_works(void **state) {
        Bench *b = *state;
        StepResult result;
        Fault f = {};

        plan_three(b, WIRE_PLAN_QKV_ALL_TO_ALL);
        held = true;
        b->runner.hook.func = hang;
        b->runner.deadline_usec = 2000000;
        b->runner.on_stuck = let_go;
        assert_int_equal(step_run(&b->runner, b->ranks, b->job, 0, &result, &f), -ETIMEDOUT);
        assert_string_equal(f.text, "Rank 2 did not answer in 2 s.");
        assert_string_equal(stuck_text, f.text);
        assert_int_equal(b->job->committed, 0);

        f = (Fault){};
        assert_int_equal(step_run(&b->runner, b->ranks, b->job, 0, &result, &f), 0);
}

#define STEP_TEST(fn) cmocka_unit_test_setup_teardown(fn, setup, teardown)

int main(void) {
        const struct CMUnitTest tests[] = {
                STEP_TEST(step_run_commits_and_counts),
                STEP_TEST(step_run_same_text_is_refined_once),
                STEP_TEST(step_run_device_has_all_work_before_the_first_download),
                STEP_TEST(step_run_does_not_fit_says_numbers),
                STEP_TEST(step_run_device_out_of_memory_says_number),
                STEP_TEST(step_run_merge_does_not_fit_says_numbers),
                STEP_TEST(step_run_merge_device_out_of_memory_can_be_tried_again),
                STEP_TEST(step_run_cancelled_during_merge_is_seen_after_it),
                STEP_TEST(step_queued_cancelled_inside_of_a_block_stops_there),
                STEP_TEST(step_queued_cancelled_merge_stops_and_is_made_anew),
                STEP_TEST(step_run_cancelled_keeps_the_state),
                STEP_TEST(step_run_progress_is_rare),
                STEP_TEST(step_run_three_ranks_same_state),
                STEP_TEST(step_run_failing_rank_next_step_works),
                STEP_TEST(step_run_stuck_rank_is_named_next_step_works),
                STEP_TEST(rank_group_runs_in_order_and_lets_go),
                STEP_TEST(rank_group_free_lets_the_last_step_end),
                STEP_TEST(rank_group_run_reports_errors_and_who_is_stuck),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
