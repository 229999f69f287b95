/* SPDX-License-Identifier: Apache-2.0 */
#include "service/worker/exchange.h"

#include <dlfcn.h>
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "service/latentd/plan.h"
#include "service/shared/cleanup.h"
#include "service/worker/model-weights.h"
#include "service/worker/nccl.h"
#include "service/worker/plan.h"
#include "service/worker/split.h"
#include "tests/unit/worker/device-ops.h"
#include "tests/unit/worker/fake-nccl.h"
#include "tests/unit/worker/toy.h"

/* Steps split over ranks that copy from device to device, or (argument "nccl") have fake-nccl.c do it: the bits of the exchange
 * through the host, whatever the plan and the chunks. Copies happen as late as the queues allow, and what does not wait for what it
 * must ends the program (device-ops.h). */

#define RANKS 4
#define ROWS 57

static LkOps ops;
static RankGroup *group;
static bool lost; /* the device, by the last test */
static uint8_t devices[RANKS] = {0, 1, 0, 1}; /* two ranks of one device each */
static ExchangeKind direct = EXCHANGE_P2P;
static FakeNccl *fake; /* NULL: P2P */

static int bind_device(uint32_t device) {
        device_ops_bind(device);
        return 0;
}

static void no_step(void *userdata, RankGroup *g, Job *j, uint32_t step) {
}

static FakeNccl *find_fake(void) {
        void *library = dlopen("libnccl.so.2", RTLD_NOW), *p = library ? dlsym(library, "fake_nccl") : NULL;
        FakeNcclGet get;

        memcpy(&get, &p, sizeof(p));
        if (!p)
                fail_msg("this is not the test's libnccl.so.2: %s", dlerror());
        return get();
}

static int start_nccl(void) {
        LkContext *contexts[RANKS];
        const NcclDevices d = {.ops = &ops, .n = RANKS, .contexts = contexts, .bind = bind_device, .size = 4096,
                .deadline_usec = UINT64_C(60000000)};
        Fault f = {};
        int r = 0;

        (void) setenv("LATENT_NCCL", "1", 1);
        assert_true(nccl_is_wanted());
        for (uint32_t i = 0; i < RANKS; i++) {
                devices[i] = (uint8_t) i;
                (void) bind_device(i);
                assert_int_equal(ops.context_new(1, contexts + i), 0);
        }
        fake = find_fake();
        device_sim.flip_next = true;
        assert_int_equal(nccl_start(&d, &f), -EBADMSG);
        assert_non_null(strstr(f.text, "arrive wrong"));
        assert_int_equal(nccl_version(), 0);
        assert_int_equal(fake->aborts, RANKS);
        f = (Fault){};
        r = nccl_start(&d, &f);
        if (r < 0)
                fail_msg("%s", f.text);
        assert_int_equal(nccl_version(), 22803);
        for (uint32_t i = 0; i < RANKS; i++)
                (void) ops.context_free(contexts[i]);
        return 0;
}

static int setup(void **state) {
        Fault f = {};

        ops = *device_ops();
        device_sim.keeps = true;
        if (direct == EXCHANGE_NCCL)
                (void) start_nccl();
        return rank_group_new_at(&ops, RANKS, RANKS, &(RankPlaces){bind_device, devices}, no_step, NULL, &group, &f);
}

static int teardown(void **state) {
        group = rank_group_free(group);
        if (!lost) /* its memory stays as it is */
                device_ops_done();
        return 0;
}

typedef struct Bench {
        Toy *toy;
        ToyStep *step;
        Plan *plan;
        float *video, *audio; /* through the host */
        ModelWeights *weights[RANKS];
} Bench;

/* ---- weights on the devices ---- */

static int make_weights(void *userdata, uint32_t rank, LkContext *context) {
        Bench *b = userdata;
        const DeviceWeightsConfig config = {.ops = &ops, .context = context};
        uint64_t least;
        int r;

        r = model_weights_new(&h3_weights_denoiser, &b->toy->model, &config, &b->weights[rank]);
        return r < 0 ? r : device_weights_plan(model_weights_device(b->weights[rank]), UINT64_C(1) << 30, true, &least);
}

static int free_weights(void *userdata, uint32_t rank, LkContext *context) {
        Bench *b = userdata;

        b->weights[rank] = model_weights_free(b->weights[rank]);
        ops.memory_trim(context);
        return 0;
}

static int on_begin(void *userdata, uint32_t rank, H3Rank *to) {
        Bench *b = userdata;
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

static void on_ranks(RankWork work, Bench *b) {
        assert_int_equal(rank_group_run(group, &(RankOrder){.ranks = (1u << RANKS) - 1, .work = work, .userdata = b,
                                                       .deadline_usec = UINT64_C(60000000), .stuck = never}),
                0);
}

static SplitStep step(Bench *b, ExchangeKind kind, float *video, float *audio, uint64_t deadline_usec) {
        return (SplitStep){.ops = &ops,
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

static int run(Bench *b, ExchangeKind kind, float *video, float *audio, uint64_t deadline_usec, uint64_t *ret_bytes, Fault *f) {
        const SplitStep s = step(b, kind, video, audio, deadline_usec);

        memset(video, 0xff, b->step->n_video * sizeof(float));
        memset(audio, 0xff, b->step->n_audio * sizeof(float));
        return split_run(group, &s, ret_bytes, f);
}

static void plan(Bench *b, uint32_t ranks, WirePlanKind kind, uint32_t chunks) {
        WireMessage w;
        Fault f = {};

        b->plan = plan_free(b->plan);
        wire_init(&w, WIRE_PLAN, 1, 1, 0);
        assert_int_equal(plan_make(ROWS, 56, ranks, 1, &(PlanWishes){.kind = kind, .chunks = chunks}, &w.plan), 0);
        assert_int_equal(plan_new(&w.plan, ROWS, 56, RANKS, &b->plan, &f), 0);
}

static Bench bench_new(ToyKind kind) {
        Bench b = {.toy = toy_new(kind)};
        uint64_t bytes;
        Fault f = {};

        b.step = toy_step_of_rows(b.toy, ROWS, 3);
        b.video = malloc(b.step->n_video * sizeof(float));
        b.audio = malloc(b.step->n_audio * sizeof(float));
        assert_true(b.video && b.audio);
        on_ranks(make_weights, &b);
        plan(&b, 1, WIRE_PLAN_HIDDEN_GATHER, 1);
        if (run(&b, EXCHANGE_HOST, b.video, b.audio, 0, &bytes, &f) < 0)
                fail_msg("one rank: %s", f.text);
        return b;
}

static void bench_done(Bench *b) {
        on_ranks(free_weights, b);
        (void) plan_free(b->plan);
        free(b->video);
        free(b->audio);
        (void) toy_step_free(b->step);
        (void) toy_free(b->toy);
}

typedef struct Out {
        float *video, *audio;
} Out;

static Out out_new(const Bench *b) {
        Out o = {malloc(b->step->n_video * sizeof(float)), malloc(b->step->n_audio * sizeof(float))};

        assert_true(o.video && o.audio);
        return o;
}

static bool is_same(const Bench *b, const Out *o) {
        return memcmp(o->video, b->video, b->step->n_video * sizeof(float)) == 0 &&
               memcmp(o->audio, b->audio, b->step->n_audio * sizeof(float)) == 0;
}

static void out_done(Out *o) {
        free(o->video);
        free(o->audio);
}

static void exchange_of_every_plan_same_bits_and_bytes(void **state) {
        static const uint32_t chunk_list[] = {1, 3, 32};

        for (int kind = 0; kind < _TOY_MAX; kind += fake ? 2 : 1) {
                Bench b = bench_new((ToyKind) kind);
                Out o = out_new(&b);

                for (uint32_t ranks = 2; ranks <= RANKS; ranks++)
                        for (int p = WIRE_PLAN_HIDDEN_GATHER; p < _WIRE_PLAN_MAX; p++) {
                                uint64_t of_host, of_peers, copies = device_sim.peer_copies;
                                Fault f = {};

                                plan(&b, ranks, (WirePlanKind) p, chunk_list[(ranks + (unsigned) p + (unsigned) kind) % 3]);
                                if (run(&b, EXCHANGE_HOST, o.video, o.audio, 0, &of_host, &f) < 0 || !is_same(&b, &o))
                                        fail_msg("host, plan %d on %u ranks: %s", p, ranks, f.text);
                                assert_int_equal(device_sim.peer_copies, copies);
                                if (run(&b, direct, o.video, o.audio, 0, &of_peers, &f) < 0)
                                        fail_msg("plan %d on %u ranks: %s", p, ranks, f.text);
                                if (!is_same(&b, &o))
                                        fail_msg("plan %d on %u ranks: other bits", p, ranks);
                                assert_int_equal(of_peers, of_host);
                                assert_true(device_sim.peer_copies > copies);
                        }
                out_done(&o);
                bench_done(&b);
        }
}

/* A bit that changes on its way changes the result: the copies are what the ranks compute with. */
static void exchange_flipped_bit_changes_the_result(void **state) {
        Bench b = bench_new(TOY_BF16);
        Out o = out_new(&b);
        uint64_t bytes;
        Fault f = {};

        plan(&b, 3, WIRE_PLAN_KV_GATHER, 2);
        device_sim.flip_next = true;
        assert_int_equal(run(&b, direct, o.video, o.audio, 0, &bytes, &f), 0);
        assert_false(device_sim.flip_next);
        assert_false(is_same(&b, &o));
        assert_int_equal(run(&b, direct, o.video, o.audio, 0, &bytes, &f), 0);
        assert_true(is_same(&b, &o));
        out_done(&o);
        bench_done(&b);
}

/* No copy ends: the step does, within its deadline, as one whose device failed. */
static void exchange_copy_that_hangs_ends_with_an_error(void **state) {
        Bench b = bench_new(TOY_BF16);
        Out o = out_new(&b);
        uint64_t bytes;
        Fault f = {};

        plan(&b, 3, WIRE_PLAN_HIDDEN_GATHER, 2);
        device_sim.peer_stuck = true;
        assert_int_equal(run(&b, direct, o.video, o.audio, 1000000, &bytes, &f), -EIO);
        assert_non_null(strstr(f.text, "to the device of another did not end in 1 s"));
        device_sim.peer_stuck = false;
        device_ops_sync();
        lost = true;
        out_done(&o);
        bench_done(&b);
}

static int fail_once(void *userdata, uint32_t rank, const H3Message *m, uint8_t *bytes, uint64_t size) {
        return rank == 1 && m->from == 1 && m->sequence == 2 ? -EBADMSG : 0;
}

static void exchange_failing_rank_releases_the_others(void **state) {
        for (int kind = WIRE_PLAN_HIDDEN_GATHER; kind < _WIRE_PLAN_MAX; kind++) {
                Bench b = bench_new(TOY_BF16);
                Out o = out_new(&b);
                uint64_t bytes;
                Fault f = {};

                plan(&b, 4, (WirePlanKind) kind, 2);
                for (int i = 0; i < (fake ? 2 : 5); i++) {
                        SplitStep s = step(&b, direct, o.video, o.audio, 0);

                        s.hook.func = fail_once;
                        assert_int_equal(split_run(group, &s, &bytes, &f), -EBADMSG);
                        f = (Fault){};
                        assert_int_equal(run(&b, direct, o.video, o.audio, 0, &bytes, &f), 0);
                        assert_true(is_same(&b, &o));
                }
                out_done(&o);
                bench_done(&b);
        }
}

static void exchange_without_such_a_device_is_refused(void **state) {
        Bench b = bench_new(TOY_BF16);
        Out o = out_new(&b);
        LkOps whole = ops;
        uint64_t bytes;
        Fault f = {};

        plan(&b, 2, WIRE_PLAN_HIDDEN_GATHER, 1);
        ops.copy = NULL;
        assert_int_equal(run(&b, direct, o.video, o.audio, 0, &bytes, &f), -EOPNOTSUPP);
        ops = whole;
        out_done(&o);
        bench_done(&b);
}

/* What residency counts is what a rank takes. */
static void exchange_memory_of_a_rank_is_counted(void **state) {
        Bench b = bench_new(TOY_INT8);
        const ExchangeStep sizes = {&b.toy->model, NULL, b.toy->compute};
        ExchangeStep own = sizes;
        uint64_t sum = 0;

        plan(&b, 3, WIRE_PLAN_HIDDEN_GATHER, 2);
        own.plan = &b.plan->h3;
        for (uint32_t i = 0; i < 3; i++) {
                uint64_t bytes = exchange_device_memory(direct, own.plan, (ExchangeSize){exchange_step_message, &own}, i);

                assert_true(bytes > 0 && bytes % 256 == 0);
                assert_int_equal(exchange_device_memory(EXCHANGE_HOST, own.plan, (ExchangeSize){exchange_step_message, &own}, i), 0);
                sum += bytes;
        }
        /* Each message once at its sender and once at each of two readers, or one. */
        assert_true(sum > exchange_memory(EXCHANGE_HOST, own.plan, (ExchangeSize){exchange_step_message, &own}));
        assert_true(exchange_memory(direct, own.plan, (ExchangeSize){exchange_step_message, &own}) <
                    exchange_memory(EXCHANGE_HOST, own.plan, (ExchangeSize){exchange_step_message, &own}));
        bench_done(&b);
}

/* A rank is lost: who is left gives NCCL up, and there is none for the next step. The rank is away until both have. */
static int is_late(void *userdata, uint32_t rank, const H3Message *m, uint8_t *bytes, uint64_t size) {
        unsigned aborts = fake->aborts;

        if (rank == 1 && m->from == 1 && m->sequence == 2)
                while (fake->aborts < aborts + 2)
                        (void) usleep(1000);
        return 0;
}

static void exchange_lost_rank_gives_nccl_up(void **state) {
        Bench b = bench_new(TOY_BF16);
        Out o = out_new(&b);
        uint64_t bytes;
        Fault f = {};
        SplitStep s;
        int r;

        plan(&b, 3, WIRE_PLAN_HIDDEN_GATHER, 2);
        s = step(&b, EXCHANGE_NCCL, o.video, o.audio, 500000);
        s.hook.func = is_late;
        r = split_run(group, &s, &bytes, &f);
        assert_true(r == -ETIMEDOUT || r == -EIO); /* by whom it is noticed */
        assert_non_null(strstr(f.text, r == -EIO ? "NCCL: ncclGroupEnd did not end in time" : "Rank 1 did not answer in 1 s."));
        assert_int_equal(nccl_version(), 0);
        device_ops_sync();
        f = (Fault){};
        assert_int_equal(run(&b, EXCHANGE_NCCL, o.video, o.audio, 0, &bytes, &f), -EIO);
        assert_non_null(strstr(f.text, "NCCL: this worker has none"));
        f = (Fault){};
        assert_int_equal(run(&b, EXCHANGE_HOST, o.video, o.audio, 0, &bytes, &f), 0);
        assert_true(is_same(&b, &o));
        device_ops_sync();
        lost = true;
        out_done(&o);
        bench_done(&b);
}

static void exchange_nccl_that_fails_ends_with_its_error(void **state) {
        Bench b = bench_new(TOY_BF16);
        Out o = out_new(&b);
        uint64_t bytes;
        Fault f = {};

        plan(&b, 4, WIRE_PLAN_HIDDEN_GATHER, 1);
        fake->fails_in = 9;
        assert_int_equal(run(&b, EXCHANGE_NCCL, o.video, o.audio, 0, &bytes, &f), -EIO);
        assert_string_equal(f.text, "NCCL: ncclGroupEnd failed: internal error.");
        device_ops_sync();
        lost = true;
        out_done(&o);
        bench_done(&b);
}

int main(int argc, char *argv[]) {
        const struct CMUnitTest of_nccl[] = {
                cmocka_unit_test(exchange_of_every_plan_same_bits_and_bytes),
                cmocka_unit_test(exchange_flipped_bit_changes_the_result),
                cmocka_unit_test(exchange_failing_rank_releases_the_others),
                cmocka_unit_test(exchange_lost_rank_gives_nccl_up),
        };
        const struct CMUnitTest failing[] = {
                cmocka_unit_test(exchange_nccl_that_fails_ends_with_its_error),
        };
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(exchange_memory_of_a_rank_is_counted),
                cmocka_unit_test(exchange_without_such_a_device_is_refused),
                cmocka_unit_test(exchange_of_every_plan_same_bits_and_bytes),
                cmocka_unit_test(exchange_flipped_bit_changes_the_result),
                cmocka_unit_test(exchange_failing_rank_releases_the_others),
                cmocka_unit_test(exchange_copy_that_hangs_ends_with_an_error),
        };

        if (argc < 2)
                return cmocka_run_group_tests(tests, setup, teardown);
        direct = EXCHANGE_NCCL;
        if (strcmp(argv[1], "failing") == 0)
                return cmocka_run_group_tests(failing, setup, teardown);
        return cmocka_run_group_tests(of_nccl, setup, teardown);
}
