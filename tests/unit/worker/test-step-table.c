/* SPDX-License-Identifier: Apache-2.0 */
#include "service/worker/step-table.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include <cmocka.h>

#include "kernels/cpu/cpu.h"
#include "service/latentd/plan.h"
#include "service/shared/cleanup.h"
#include "service/worker/step-model.h"
#include "tests/unit/worker/broker.h"
#include "tests/unit/worker/fixture.h"

/* Steps whose AdaLN rows are made once for their schedule, against steps without: the same bits, and how many
 * products with AdaLN weights it takes. */

#define LAYERS 3

DEFINE_CLEANUP(Job *, job_unref)

static const LkOps *real;
static uint64_t available;
static atomic_int n_adaln, n_attention;
static void (*on_adaln)(void), (*on_attention)(void); /* may be NULL */
static int memory_error, memory_error_in;             /* the how-manieth memory_new() from now on fails; 0: none */

typedef struct Bench {
        Fixture *x;
        Arenas input; /* the fixture's */
        Broker broker;
        int sockets[2];
        Link *link;
        LkOps ops;
        Backend backend;
        RankGroup *ranks;
        StepRunner runner;
} Bench;

static Bench *bench;

static uint64_t memory_available(void) {
        return available;
}

static int counting_gemm(LkContext *c, const LkGemm *a) {
        if (a->w.rows == UINT64_C(6) * H3_TAGS * fixture_model(bench->x)->h3->config.hidden) {
                n_adaln++;
                if (on_adaln)
                        on_adaln();
        }
        return real->gemm(c, a);
}

static int counting_attention(LkContext *c, const LkAttention *a) {
        n_attention++;
        if (on_attention)
                on_attention();
        return real->attention(c, a);
}

static int failing_memory_new(LkContext *c, uint64_t size, void **ret) {
        if (memory_error_in > 0 && --memory_error_in == 0)
                return memory_error;
        return real->memory_new(c, size, ret);
}

static void no_step(void *userdata, RankGroup *g, Job *j, uint32_t step) {
}

static int setup(void **state) {
        Bench *b = calloc(1, sizeof(*b));
        Fault f = {};

        assert_non_null(b);
        b->x = fixture_new();
        b->input = (Arenas){.input = b->x->input, .input_size = FIXTURE_ARENA, .output_size = FIXTURE_ARENA};
        b->broker.epoch = 1;
        assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, b->sockets), 0);
        assert_int_equal(link_new(b->sockets[0], &b->link), 0);
        real = lk_cpu_ops(LK_CPU_AUTO);
        b->ops = *real;
        b->ops.gemm = counting_gemm;
        b->ops.attention = counting_attention;
        b->ops.memory_new = failing_memory_new;
        b->backend = (Backend){.program = "test", .ops = &b->ops, .memory_available = memory_available};
        assert_int_equal(rank_group_new(&b->ops, 3, 3, NULL, no_step, NULL, &b->ranks, &f), 0);
        b->runner = (StepRunner){.backend = &b->backend,
                .link = b->link,
                .merged = MERGED_CACHE_INIT,
                .tables = MOD_CACHE_INIT};
        available = 0;
        on_adaln = on_attention = NULL;
        memory_error_in = 0;
        assert_int_equal(fixture_model(b->x)->h3->config.layers, LAYERS);
        *state = bench = b;
        return 0;
}

static int teardown(void **state) {
        Bench *b = *state;

        step_runner_done(&b->runner);
        (void) rank_group_free(b->ranks);
        (void) link_free(b->link);
        (void) close(b->sockets[0]);
        (void) close(b->sockets[1]);
        (void) fixture_free(b->x);
        free(b);
        return 0;
}

static WireJobOpen golden_job(Bench *b, const char *name) {
        b->input.used = 0; /* jobs have their own copies */
        return job_of_golden(&b->broker, 5, &b->input, name).job_open;
}

/* With its plan: all of these ranks, tiny as the sequence is. */
static Job *open_job(Bench *b, const WireJobOpen *open, uint32_t ranks) {
        WireMessage m;
        Fault f = {};
        Job *j = NULL;

        if (fixture_open(b->x, open, &j, &f) < 0)
                fail_msg("%s", f.text);
        wire_init(&m, WIRE_PLAN, 1, 5, 0);
        assert_int_equal(plan_make(j->layout->rows, 8, ranks, 1,
                                 &(PlanWishes){.kind = WIRE_PLAN_HIDDEN_GATHER, .chunks = 2}, &m.plan),
                0);
        assert_int_equal(plan_new(&m.plan, j->layout->rows, 8, 3, &j->plan, &f), 0);
        return j;
}

/* Products of the step. */
static int run_step(Bench *b, Job *j, uint32_t step) {
        StepResult result;
        Fault f = {};

        n_adaln = n_attention = 0;
        if (step_run(&b->runner, b->ranks, j, step, &result, &f) < 0)
                fail_msg("%s", f.text);
        return n_adaln;
}

static uint64_t step_bytes(const Job *j) {
        uint64_t bytes;

        assert_int_equal(split_memory(lk_cpu_ops(LK_CPU_AUTO), job_model(j), j->layout, &j->plan->h3, EXCHANGE_HOST, j->compute,
                                 &bytes),
                0);
        return bytes;
}

/* Runs it all, and returns every state. Without a table: there is just enough memory for a step. */
static uint8_t *run_sample(
        Bench *b, const WireJobOpen *open, uint32_t ranks, bool table, uint64_t *ret_size, int *ret_products) {
        CLEANUP(job_unrefp) Job *j = open_job(b, open, ranks);
        uint8_t *states;
        Fault f = {};

        available = 0;
        assert_int_equal(step_choose_model(&b->runner, b->ranks, j, &f), 0);
        if (!table)
                available = step_bytes(j);
        *ret_products = 0;
        for (uint32_t i = 0; i < j->steps; i++)
                *ret_products += run_step(b, j, i);
        assert_int_equal(b->runner.tables.kept[0] != NULL, table);

        *ret_size = j->n_slots * j->slot_stride;
        states = malloc(*ret_size);
        assert_non_null(states);
        memcpy(states, (const uint8_t *) b->x->arenas->output.map + j->slot_offset, *ret_size);
        return states;
}

static void check_sample(Bench *b, const char *what, const WireJobOpen *sample, uint32_t ranks, WireCompute compute) {
        CLEANUP_FREE uint8_t *with = NULL, *without = NULL;
        WireJobOpen open = *sample;
        uint64_t size, n;
        int made, computed;

        open.flags = WIRE_JOB_KEEP_STEPS;
        open.compute = compute;
        without = run_sample(b, &open, ranks, false, &size, &computed);
        memset(b->x->arenas->output.map, 0, FIXTURE_ARENA);
        with = run_sample(b, &open, ranks, true, &n, &made);
        assert_int_equal(n, size);
        if (memcmp(with, without, size) != 0)
                fail_msg("%s on %u ranks has other bits with a table", what, ranks);
        assert_int_equal(made, LAYERS);
        assert_int_equal(computed, LAYERS * ranks * (open.sigmas_video.shape[0] - 1));
        mod_cache_clear(&b->runner.tables);
}

static void check_everywhere(Bench *b, const char *what, const WireJobOpen *sample) {
        check_sample(b, what, sample, 1, WIRE_COMPUTE_F32);
        check_sample(b, what, sample, 1, WIRE_COMPUTE_BF16);
        check_sample(b, what, sample, 3, WIRE_COMPUTE_BF16);
}

static void sample_of_every_sampler_same_bits(void **state) {
        static const char *const names[] = {
                "traj_euler_4", "traj_res_multistep_4", "traj_res_multistep_perstream_4"};
        Bench *b = *state;

        for (size_t i = 0; i < ELEMENTSOF(names); i++) {
                WireJobOpen open = golden_job(b, names[i]);

                check_everywhere(b, names[i], &open);
        }
}

static void sample_with_references_same_bits(void **state) {
        Bench *b = *state;
        WireJobOpen open = golden_job(b, "traj_euler_4_ref2va_small");

        assert_true(open.n_conditions > 0);
        check_everywhere(b, "references", &open);
}

/* Several levels, so that a step has many timesteps. */
static void sample_with_masks_same_bits(void **state) {
        const uint64_t video_shape[] = {2, 4, 4}, audio_shape[] = {2, 8};
        Bench *b = *state;
        WireJobOpen open = golden_job(b, "traj_res_multistep_4");
        float video[32], audio[16];

        for (unsigned i = 0; i < 32; i++)
                video[i] = (float) (i / 16 * 8 + i % 4 / 2 * 3) / 16;
        for (unsigned i = 0; i < 16; i++)
                audio[i] = (float) (i % 5) / 4;
        open.mask_video = arenas_put(&b->input, ST_F32, 3, video_shape, video);
        open.mask_audio = arenas_put(&b->input, ST_F32, 2, audio_shape, audio);
        open.clean_video = open.video;
        open.clean_audio = open.audio;
        check_everywhere(b, "masks", &open);
}

static void sample_with_adapters_same_bits(void **state) {
        Bench *b = *state;
        WireJobOpen open = golden_job(b, "traj_res_multistep_perstream_4");

        fixture_add_model(b->x, 2, "dit/lora/lora_comfy.safetensors");
        open.n_loras = 1;
        open.loras[0] = (WireLora){2, 0.75};
        check_everywhere(b, "adapters", &open);
}

/* The next job of the schedule makes no product; one that goes on after step 2 needs rows of the rest only. */
static void sample_takes_the_table_of_another(void **state) {
        Bench *b = *state;
        WireJobOpen open = golden_job(b, "traj_euler_4");
        CLEANUP(job_unrefp) Job *first = open_job(b, &open, 1), *second = open_job(b, &open, 3), *third = NULL;
        const ModTable *t;
        uint64_t whole;

        assert_int_equal(run_step(b, first, 0), LAYERS);
        for (uint32_t i = 0; i < 4; i++)
                assert_int_equal(run_step(b, second, i), 0);
        whole = b->runner.tables.kept[0]->bytes;

        mod_cache_clear(&b->runner.tables);
        third = open_job(b, &open, 1);
        third->committed = 2;
        assert_int_equal(run_step(b, third, 2), LAYERS);
        t = b->runner.tables.kept[0];
        assert_true(t->bytes < whole);
        assert_int_equal(run_step(b, third, 3), 0);

        /* A table that went is not made again for the same job. */
        assert_int_equal(run_step(b, first, 1), LAYERS);
        assert_ptr_equal(b->runner.tables.kept[0], t);
        assert_null(b->runner.tables.kept[1]);
}

static void sample_last_step_makes_no_table(void **state) {
        Bench *b = *state;
        WireJobOpen open = golden_job(b, "traj_euler_4");
        CLEANUP(job_unrefp) Job *j = open_job(b, &open, 1);

        j->committed = 3;
        assert_int_equal(run_step(b, j, 3), LAYERS);
        assert_null(b->runner.tables.kept[0]);
}

/* ---- steps that announce their schedule ---- */

typedef struct Steps {
        WireJobOpen open; /* a STEP that announces */
        float video[5], audio[5];
} Steps;

static Steps steps_of(Bench *b) {
        CLEANUP(golden_freep) Golden *g = golden_open("traj_euler_4");
        Steps x = {.open = golden_job(b, "traj_euler_4")};

        x.open.kind = WIRE_JOB_STEP;
        x.open.compute = WIRE_COMPUTE_BF16;
        memcpy(x.video, golden_data(g, "sigmas_video", ST_F32, NULL), sizeof(x.video));
        memcpy(x.audio, golden_data(g, "sigmas_audio", ST_F32, NULL), sizeof(x.audio));
        return x;
}

static Job *open_step(Bench *b, const Steps *x, float video, float audio, bool announce, uint32_t ranks) {
        WireJobOpen open = x->open;

        open.sigma_video = video;
        open.sigma_audio = audio;
        if (!announce)
                open.sigmas_video = open.sigmas_audio = (WireTensor){};
        return open_job(b, &open, ranks);
}

/* Products of one such step. */
static int one_step(Bench *b, const Steps *x, float video, float audio, bool announce) {
        CLEANUP(job_unrefp) Job *j = open_step(b, x, video, audio, announce, 1);

        return run_step(b, j, 0);
}

static void step_announced_makes_rows_once_same_bits(void **state) {
        Bench *b = *state;
        Steps x = steps_of(b);

        for (uint32_t ranks = 1; ranks <= 3; ranks += 2) {
                for (uint32_t i = 0; i < 4; i++) {
                        CLEANUP(job_unrefp) Job *with = NULL, *without = NULL;
                        ModTable *t = b->runner.tables.kept[0];

                        b->runner.tables.kept[0] = NULL; /* put aside */
                        without = open_step(b, &x, x.video[i], x.audio[i], false, ranks);
                        assert_int_equal(run_step(b, without, 0), LAYERS * ranks);
                        assert_null(b->runner.tables.kept[0]);
                        b->runner.tables.kept[0] = t;

                        with = open_step(b, &x, x.video[i], x.audio[i], true, ranks);
                        assert_int_equal(run_step(b, with, 0), i == 0 ? LAYERS : 0);
                        assert_memory_equal(with->velocity.video, without->velocity.video, with->video.size);
                        assert_memory_equal(with->velocity.audio, without->velocity.audio, with->audio.size);
                }
                assert_int_equal(one_step(b, &x, x.video[1], x.audio[1], false), 0); /* there it is */
                mod_cache_clear(&b->runner.tables);
        }
}

/* Sigmas between those of the list, and the list's last step: rows of their own. */
static void step_announced_elsewhere_goes_without(void **state) {
        Bench *b = *state;
        Steps x = steps_of(b);

        assert_int_equal(one_step(b, &x, 0.7654321f, x.audio[1], true), LAYERS);
        assert_int_equal(one_step(b, &x, x.video[1], 0.7654321f, true), LAYERS);
        assert_int_equal(one_step(b, &x, x.video[1], x.audio[2], true), LAYERS); /* of two steps */
        assert_int_equal(one_step(b, &x, x.video[3], x.audio[3], true), LAYERS);
        assert_null(b->runner.tables.kept[0]);

        /* Nor do they disturb what is there. */
        assert_int_equal(one_step(b, &x, x.video[0], x.audio[0], true), LAYERS);
        assert_int_equal(one_step(b, &x, 0.7654321f, x.audio[1], true), LAYERS);
        assert_int_equal(one_step(b, &x, x.video[3], x.audio[3], true), 0);
        assert_null(b->runner.tables.kept[1]);
}

/* One that is not the schedule's first: rows from there on. */
static void step_announced_in_the_middle_makes_the_rest(void **state) {
        Bench *b = *state;
        Steps x = steps_of(b);

        assert_int_equal(one_step(b, &x, x.video[1], x.audio[1], true), LAYERS);
        for (uint32_t i = 1; i < 4; i++)
                assert_int_equal(one_step(b, &x, x.video[i], x.audio[i], true), 0);
        assert_int_equal(one_step(b, &x, x.video[0], x.audio[0], false), LAYERS);
        assert_int_equal(one_step(b, &x, x.video[0], x.audio[0], true), LAYERS); /* the whole one */
        assert_int_equal(one_step(b, &x, x.video[0], x.audio[0], true), 0);
}

static atomic_uint kept_meanwhile;

static void count_kept(void) {
        unsigned n = 0;

        while (n < MOD_TABLES_KEPT && bench->runner.tables.kept[n])
                n++;
        kept_meanwhile = n;
}

static void step_announced_oldest_schedule_goes(void **state) {
        const uint64_t shape[] = {3};
        Bench *b = *state;
        Steps x = steps_of(b);
        float first[] = {0.9f, 0.8f, 0};

        for (unsigned i = 0; i <= MOD_TABLES_KEPT; i++) {
                const float sigmas[] = {0.9f - 0.001f * (float) i, 0.8f - 0.001f * (float) i, 0};

                x.open.sigmas_video = x.open.sigmas_audio = arenas_put(&b->input, ST_F32, 1, shape, sigmas);
                assert_int_equal(one_step(b, &x, sigmas[0], sigmas[0], true), LAYERS);
                assert_int_equal(one_step(b, &x, sigmas[1], sigmas[1], true), 0);
        }
        assert_int_equal(one_step(b, &x, 0.9f - 0.001f, 0.9f - 0.001f, false), 0);
        assert_int_equal(one_step(b, &x, first[1], first[1], false), LAYERS);
        x.open.sigmas_video = x.open.sigmas_audio = arenas_put(&b->input, ST_F32, 1, shape, first);
        on_adaln = count_kept; /* there never is one too many */
        assert_int_equal(one_step(b, &x, first[0], first[0], true), LAYERS);
        assert_int_equal(kept_meanwhile, MOD_TABLES_KEPT - 1);
        assert_int_equal(one_step(b, &x, first[1], first[1], true), 0);
}

/* ---- memory ---- */

static void table_is_made_beside_the_memory_of_a_step(void **state) {
        Bench *b = *state;
        Steps x = steps_of(b);
        CLEANUP(job_unrefp) Job *j = open_step(b, &x, x.video[0], x.audio[0], true, 1), *again = NULL;
        const H3ModSchedule s = {j->layout, x.video, x.audio, 4};
        uint64_t bytes;

        assert_int_equal(h3_mod_table_bytes(job_model(j), &s, j->compute, &bytes, NULL), 0);
        available = step_bytes(j) + bytes - 1;
        assert_int_equal(run_step(b, j, 0), LAYERS);
        assert_null(b->runner.tables.kept[0]);

        available++;
        again = open_step(b, &x, x.video[0], x.audio[0], true, 1);
        assert_int_equal(run_step(b, again, 0), LAYERS);
        assert_int_equal(b->runner.tables.kept[0]->bytes, bytes);
}

static uint64_t taken_by_tables(void) {
        return bench->runner.tables.kept[0] ? 1000 : UINT64_C(1) << 40;
}

/* Before a step is refused. */
static void tables_go_where_a_step_needs_the_memory(void **state) {
        Bench *b = *state;
        Steps x = steps_of(b);

        assert_int_equal(one_step(b, &x, x.video[0], x.audio[0], true), LAYERS);
        assert_non_null(b->runner.tables.kept[0]);
        b->backend.memory_available = taken_by_tables;
        assert_int_equal(one_step(b, &x, x.video[1], x.audio[1], false), LAYERS);
        assert_null(b->runner.tables.kept[0]);
}

static void table_without_device_memory_is_gone_without(void **state) {
        Bench *b = *state;
        Steps x = steps_of(b);
        CLEANUP(job_unrefp) Job *j = open_step(b, &x, x.video[0], x.audio[0], true, 1), *broken = NULL;
        StepResult result;
        Fault f = {};

        (void) one_step(b, &x, x.video[1], x.audio[1], false); /* refines the text */
        memory_error = -ENOMEM;
        memory_error_in = 1;
        assert_int_equal(run_step(b, j, 0), LAYERS); /* in the step itself */
        assert_int_equal(memory_error_in, 0);
        assert_null(b->runner.tables.kept[0]);

        broken = open_step(b, &x, x.video[0], x.audio[0], true, 1);
        memory_error = -EIO;
        memory_error_in = 1;
        assert_int_equal(step_run(&b->runner, b->ranks, broken, 0, &result, &f), -EIO);
        assert_string_equal(f.name, FAULT_INTERNAL);
        assert_non_null(strstr(f.text, "modulation rows"));
        assert_int_equal(broken->committed, 0);
        assert_int_equal(run_step(b, broken, 0), LAYERS);
}

/* ---- what happens meanwhile ---- */

static Job *current;

static void cancel_current(void) {
        current->cancelled = true;
}

static void table_cancelled_while_it_is_made(void **state) {
        Bench *b = *state;
        Steps x = steps_of(b);
        CLEANUP(job_unrefp) Job *j = open_step(b, &x, x.video[0], x.audio[0], true, 1);
        StepResult result;
        Fault f = {};

        (void) one_step(b, &x, x.video[1], x.audio[1], false); /* refines the text */
        current = j;
        on_adaln = cancel_current;
        n_adaln = n_attention = 0;
        assert_int_equal(step_run(&b->runner, b->ranks, j, 0, &result, &f), -ECANCELED);
        assert_string_equal(f.name, FAULT_CANCELLED);
        assert_int_equal(n_adaln, 1);
        assert_int_equal(n_attention, 0);
        assert_int_equal(j->committed, 0);
        assert_null(b->runner.tables.kept[0]);

        on_adaln = NULL;
        assert_int_equal(one_step(b, &x, x.video[0], x.audio[0], true), LAYERS); /* others may */
        assert_non_null(b->runner.tables.kept[0]);
}

static void wait_a_progress(void) {
        (void) usleep(25000);
}

/* As slow as they may be, the blocks that are counted are the step's. */
static void table_is_no_progress(void **state) {
        Bench *b = *state;
        Steps x = steps_of(b);
        uint32_t last = 0;

        (void) one_step(b, &x, x.video[1], x.audio[1], false);
        while (recv(b->sockets[1], &(WireMessage){}, sizeof(WireMessage), MSG_DONTWAIT) > 0)
                ;
        on_adaln = wait_a_progress;
        assert_int_equal(one_step(b, &x, x.video[0], x.audio[0], true), LAYERS);
        for (;;) {
                WireMessage m;
                Fault f = {};
                int fd, r;

                r = wire_receive(b->sockets[1], &m, &fd, &f);
                if (r == -EAGAIN)
                        break;
                assert_int_equal(r, 1);
                assert_int_equal(m.header.type, WIRE_PROGRESS);
                assert_in_range(m.progress.block, last + 1, LAYERS); /* never back to the first */
                last = m.progress.block;
        }
        assert_true(last > 0);
}

static atomic_ulong closing;

static void drop_closing(void) {
        mod_cache_drop(&bench->runner.tables, closing);
}

/* MODEL_CLOSE of the base and of an adapter in the middle of a step: it ends as it would have, the table goes
 * with it. */
static void table_of_a_closed_model_lives_to_the_end_of_the_step(void **state) {
        Bench *b = *state;
        Steps x = steps_of(b);

        fixture_add_model(b->x, 2, "dit/lora/lora_comfy.safetensors");
        x.open.n_loras = 1;
        x.open.loras[0] = (WireLora){2, 1};
        for (uint64_t id = 1; id <= 2; id++) {
                CLEANUP(job_unrefp) Job *j = open_step(b, &x, x.video[0], x.audio[0], true, 3);
                CLEANUP(job_unrefp) Job *other = open_step(b, &x, x.video[0], x.audio[0], false, 3);

                on_attention = drop_closing;
                closing = 4711;
                assert_int_equal(run_step(b, j, 0), LAYERS);
                assert_non_null(b->runner.tables.kept[0]);

                closing = model_table_find(&b->x->models, id)->serial;
                assert_int_equal(run_step(b, other, 0), 0);
                assert_null(b->runner.tables.kept[0]);
                on_attention = NULL;
                assert_memory_equal(other->velocity.video, j->velocity.video, j->video.size);
        }
}

#define TABLE_TEST(fn) cmocka_unit_test_setup_teardown(fn, setup, teardown)

int main(void) {
        const struct CMUnitTest tests[] = {
                TABLE_TEST(sample_of_every_sampler_same_bits),
                TABLE_TEST(sample_with_references_same_bits),
                TABLE_TEST(sample_with_masks_same_bits),
                TABLE_TEST(sample_with_adapters_same_bits),
                TABLE_TEST(sample_takes_the_table_of_another),
                TABLE_TEST(sample_last_step_makes_no_table),
                TABLE_TEST(step_announced_makes_rows_once_same_bits),
                TABLE_TEST(step_announced_elsewhere_goes_without),
                TABLE_TEST(step_announced_in_the_middle_makes_the_rest),
                TABLE_TEST(step_announced_oldest_schedule_goes),
                TABLE_TEST(table_is_made_beside_the_memory_of_a_step),
                TABLE_TEST(tables_go_where_a_step_needs_the_memory),
                TABLE_TEST(table_without_device_memory_is_gone_without),
                TABLE_TEST(table_cancelled_while_it_is_made),
                TABLE_TEST(table_is_no_progress),
                TABLE_TEST(table_of_a_closed_model_lives_to_the_end_of_the_step),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
