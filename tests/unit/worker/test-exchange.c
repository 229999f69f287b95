/* SPDX-License-Identifier: Apache-2.0 */
#include "service/worker/exchange.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "kernels/cpu/cpu.h"
#include "service/latentd/plan.h"
#include "service/shared/cleanup.h"
#include "service/shared/clock.h"
#include "service/worker/plan.h"
#include "service/worker/split.h"
#include "tests/unit/h3/golden.h"
#include "tests/unit/worker/toy.h"

/* Steps split over ranks with the worker's own threads and exchange and the broker's own plans: the same bits
 * as one rank, whatever the plan, the shares, the chunks and who is late; and what happens to the others when
 * one fails. Every arena is full of NaN at first: what a rank did not make or receive shows. */

#define RANKS 8

/* Sanitizers make a product many times as long: there the long sequences are shorter. So is the longest one but
 * with LATENT_RANK_DRAWS: attention is quadratic in it. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define LONG_ROWS 131
#define LONGEST_WIDTH 26
#else
#define LONG_ROWS 997
#define LONGEST_WIDTH 82
#endif
#define TENTH_WIDTH 226

static const uint32_t rank_counts[] = {1, 2, 3, 4, 5, 7, 8};

/* ---- the bench: ranks on one device each, all of them poisoned ---- */

static LkOps ops;
static const LkOps *real;
static RankGroup *group;
static const H3Sparse *sparse; /* of the steps to run; NULL: dense */

static int poisoned_memory_new(LkContext *c, uint64_t size, void **ret) {
        int r = real->memory_new(c, size, ret);

        if (r >= 0)
                memset(*ret, 0xff, size);
        return r;
}

static void no_step(void *userdata, RankGroup *g, Job *j, uint32_t step) {
}

static int setup(void **state) {
        Fault f = {};

        real = lk_cpu_ops(LK_CPU_AUTO);
        ops = *real;
        ops.memory_new = poisoned_memory_new;
        return rank_group_new(&ops, RANKS, RANKS, NULL, no_step, NULL, &group, &f);
}

static int teardown(void **state) {
        group = rank_group_free(group);
        return 0;
}

typedef struct Result {
        float *video, *audio;
        uint64_t n_video, n_audio, bytes;
        uint64_t blocks_seen[RANKS_MAX], blocks_all[RANKS_MAX];
} Result;

static uint64_t sum(const uint64_t *of_ranks) {
        uint64_t all = 0;

        for (uint32_t i = 0; i < RANKS_MAX; i++)
                all += of_ranks[i];
        return all;
}

static Result result_new(uint64_t n_video, uint64_t n_audio) {
        Result r = {.video = malloc(n_video * sizeof(float)), .audio = malloc(n_audio * sizeof(float)), .n_video = n_video,
                .n_audio = n_audio};

        assert_true(r.video && r.audio);
        return r;
}

static void result_done(Result *r) {
        free(r->video);
        free(r->audio);
}

static void never_stuck(void *userdata, const Fault *f) {
        fprintf(stderr, "a rank hangs: %s\n", f->text);
        abort();
}

static SplitStep step_of(const H3Model *m, const H3StepInput *in, const H3Plan *p, Result *result) {
        return (SplitStep){.ops = &ops,
                .model = m,
                .plan = p,
                .in = in,
                .video = result->video,
                .audio = result->audio,
                .on_stuck = never_stuck,
                .blocks_seen = result->blocks_seen,
                .blocks_all = result->blocks_all,
                .deadline_usec = UINT64_C(60000000)};
}

static int run(const SplitStep *s, Result *result, Fault *f) {
        memset(result->video, 0xff, result->n_video * sizeof(float));
        memset(result->audio, 0xff, result->n_audio * sizeof(float));
        memset(result->blocks_seen, 0, sizeof(result->blocks_seen));
        memset(result->blocks_all, 0, sizeof(result->blocks_all));
        *f = (Fault){};
        return split_run(group, s, &result->bytes, f);
}

static Result whole_of(const H3Model *m, const H3StepInput *in, uint64_t n_video, uint64_t n_audio) {
        const H3Range rows = {0, in->layout->rows}, heads = {0, m->config.heads};
        const H3Plan one = {.ranks = 1, .row_tile = 1, .chunks = 1, .rows = &rows, .heads = &heads, .sparse = sparse};
        Result result = result_new(n_video, n_audio);
        SplitStep s = step_of(m, in, &one, &result);
        Fault f;

        if (run(&s, &result, &f) < 0)
                fail_msg("one rank: %s", f.text);
        assert_int_equal(result.bytes, 0);
        for (uint64_t i = 0; i < n_video; i++)
                assert_true(result.video[i] == result.video[i]);
        return result;
}

/* Sound and picture apart: one may be right where the other is not. */
static void expect_same(const Result *a, const Result *whole, const char *what) {
        if (memcmp(a->video, whole->video, whole->n_video * sizeof(float)) != 0)
                fail_msg("%s: the video has other bits than one rank's", what);
        if (memcmp(a->audio, whole->audio, whole->n_audio * sizeof(float)) != 0)
                fail_msg("%s: the audio has other bits than one rank's", what);
        if (sum(a->blocks_seen) != sum(whole->blocks_seen) || sum(a->blocks_all) != sum(whole->blocks_all))
                fail_msg("%s: it saw other blocks than one rank", what);
}

static uint64_t bytes_of(const H3Model *m, const H3Plan *p, H3Compute compute) {
        uint64_t sum = 0;

        for (uint32_t i = 0; i < p->ranks; i++) {
                uint64_t sent, received;

                h3_exchange_size(m, p, compute, i, &sent, &received);
                sum += received;
        }
        return sum;
}

/* ---- delays ---- */

typedef struct Delays {
        uint32_t seed, max_usec;
} Delays;

static uint32_t mix(uint32_t x) {
        x ^= x >> 16;
        x *= 0x7feb352du;
        x ^= x >> 15;
        x *= 0x846ca68bu;
        return x ^ x >> 16;
}

/* One message in four is late. The same seed gives the same delays. */
static int delay(void *userdata, uint32_t rank, const H3Message *m, uint8_t *bytes, uint64_t size) {
        const Delays *d = userdata;
        uint32_t x = mix(d->seed ^ mix(rank * 64u + m->phase * 32u + m->chunk + (bytes ? 4096u : 0)));

        x = mix(x ^ mix(m->from * 977u + m->sequence * 31u));
        if (x % 4 == 0)
                (void) usleep(x / 4 % (d->max_usec + 1));
        return 0;
}

/* ---- plans ---- */

/* One run of a plan as the broker makes it. Returns the ranks that took part. */
static uint32_t check_plan(const H3Model *m, const H3StepInput *in, const Result *whole, uint32_t ranks,
        uint32_t tile, const PlanWishes *wishes, Delays delays) {
        Result result = result_new(whole->n_video, whole->n_audio);
        Plan *p = NULL;
        WireMessage w;
        SplitStep s;
        char what[160];
        Fault f = {};

        wire_init(&w, WIRE_PLAN, 1, 1, 0);
        assert_int_equal(plan_make(in->layout->rows, m->config.heads, ranks, tile, wishes, &w.plan), 0);
        (void) snprintf(what, sizeof(what), "%llu rows, %u ranks, %s, %u chunks, tile %u, %u shares, seed %u",
                (unsigned long long) in->layout->rows, w.plan.ranks,
                plan_kind_to_string((WirePlanKind) w.plan.kind), w.plan.chunks, tile, wishes->n_shares, delays.seed);
        if (plan_new(&w.plan, in->layout->rows, m->config.heads, RANKS, &p, &f) < 0)
                fail_msg("%s: %s", what, f.text);

        p->h3.sparse = sparse;
        s = step_of(m, in, &p->h3, &result);
        if (delays.max_usec > 0)
                s.hook = (ExchangeHook){delay, &delays};
        if (run(&s, &result, &f) < 0)
                fail_msg("%s: %s", what, f.text);
        expect_same(&result, whole, what);
        assert_int_equal(result.bytes, bytes_of(m, &p->h3, in->compute));
        (void) plan_free(p);
        result_done(&result);
        return plan_ranks_used(&w.plan);
}

static const uint32_t share_lists[][RANKS] = {
        {1, 1, 1, 1, 1, 1, 1, 1},
        {10, 7, 10, 7, 10, 7, 10, 7},
        {2, 2, 1, 2, 2, 1, 2, 2},
        {100, 1, 100, 1, 1, 1, 1, 1},
        {1, 100, 1, 1, 1, 1, 1, 100},
};

static PlanWishes wishes_of(uint32_t ranks, uint32_t shares, WirePlanKind kind, uint32_t chunks) {
        PlanWishes w = {.ranks = ranks, .kind = kind, .chunks = chunks, .n_shares = ranks};

        memcpy(w.shares, share_lists[shares % ELEMENTSOF(share_lists)], ranks * sizeof(uint32_t));
        return w;
}

/* All rank counts and plans on one step; shares and chunks take turns. A long sequence has rows for all ranks
 * whatever their number: three of them. */
static void check_rank_counts(const H3Model *m, const H3StepInput *in, const Result *whole, uint32_t tile, uint32_t *turn) {
        static const uint32_t chunk_list[] = {1, 2, 0, 5, 32, 3, 8}, of_long[] = {2, 3, 8};
        const bool is_long = in->layout->rows >= LONG_ROWS;
        const uint32_t *counts = is_long ? of_long : rank_counts;

        for (size_t i = 0; i < (is_long ? ELEMENTSOF(of_long) : ELEMENTSOF(rank_counts)); i++)
                for (int kind = WIRE_PLAN_HIDDEN_GATHER; kind < _WIRE_PLAN_MAX; kind++) {
                        uint32_t x = (*turn)++;
                        PlanWishes w = wishes_of(
                                counts[i], x / 3, (WirePlanKind) kind, chunk_list[x % ELEMENTSOF(chunk_list)]);

                        (void) check_plan(m, in, whole, counts[i], tile, &w,
                                (Delays){x, in->layout->rows < 100 ? 300 : 0});
                }
}

/* The standard shape list: for every rank count N sequences of N - 1, N, N + 1, 2 N + 1 rows and some more;
 * those of fewer rows than ranks are planned onto fewer. The shortest request has 4 rows. */
static void split_of_every_length_same_bits(void **state) {
        static const uint64_t lengths[] = {4, 5, 6, 7, 8, 9, 11, 13, 15, 17, 57, LONG_ROWS};
        uint32_t turn = 0;

        for (size_t i = 0; i < ELEMENTSOF(lengths); i++) {
                CLEANUP(toy_freep) Toy *t = toy_new((ToyKind) (i % _TOY_MAX));
                /* odd and even numbers of sound rows per channel */
                CLEANUP(toy_step_freep)
                ToyStep *s = toy_step_of_rows(t, lengths[i], lengths[i] < 9 ? 1 : 1 + i % 3);
                Result whole = whole_of(&t->model, &s->in, s->n_video, s->n_audio);

                assert_int_equal(s->layout->rows, lengths[i]);
                check_rank_counts(&t->model, &s->in, &whole, 1, &turn);
                result_done(&whole);
        }
}

/* With the real row tile: 227 + 1,353 + 42 rows; with LATENT_RANK_DRAWS a tenth of a real request, 227 + 3,729 + 42. */
static void split_of_a_tenth_same_bits(void **state) {
        const uint64_t width = getenv("LATENT_RANK_DRAWS") ? TENTH_WIDTH : LONGEST_WIDTH;
        CLEANUP(toy_freep) Toy *t = toy_new(TOY_INT8);
        CLEANUP(toy_step_freep) ToyStep *s = toy_step_new(t, 227, 21, 3, 22, width);
        Result whole = whole_of(&t->model, &s->in, s->n_video, s->n_audio);
        const PlanWishes wishes[] = {
                wishes_of(2, 1, WIRE_PLAN_HIDDEN_GATHER, 0),
                wishes_of(5, 2, WIRE_PLAN_KV_GATHER, 7),
                wishes_of(8, 0, WIRE_PLAN_QKV_ALL_TO_ALL, 4),
        };

        assert_int_equal(s->layout->rows, 227 + 33 * width / 2 + 42);
        for (size_t i = 0; i < ELEMENTSOF(wishes); i++)
                (void) check_plan(&t->model, &s->in, &whole, RANKS, 128, wishes + i, (Delays){1, 2000});
        result_done(&whole);
}

static void split_short_sequence_is_planned_down(void **state) {
        CLEANUP(toy_freep) Toy *t = toy_new(TOY_BF16);
        CLEANUP(toy_step_freep) ToyStep *s = toy_step_of_rows(t, 7, 1);
        Result whole = whole_of(&t->model, &s->in, s->n_video, s->n_audio);

        for (int kind = WIRE_PLAN_HIDDEN_GATHER; kind < _WIRE_PLAN_MAX; kind++) {
                const PlanWishes w = {.kind = (WirePlanKind) kind, .chunks = 32};

                assert_int_equal(check_plan(&t->model, &s->in, &whole, 8, 1, &w, (Delays){3, 100}), 7);
                assert_int_equal(check_plan(&t->model, &s->in, &whole, 8, 4, &w, (Delays){3, 100}), 2);
                assert_int_equal(check_plan(&t->model, &s->in, &whole, 8, 128, &w, (Delays){3, 100}), 1);
        }
        result_done(&whole);
}

/* One random draw of a plan and rank count on a step. */
static void check_draw(const H3Model *m, const H3StepInput *in, const Result *whole, uint32_t ranks, WirePlanKind kind,
        uint32_t seed) {
        uint32_t largest = seed % 2 ? 100 : 3;
        PlanWishes w = {.ranks = ranks, .n_shares = ranks, .kind = kind, .chunks = 1 + mix(seed) % WIRE_CHUNKS_MAX};

        for (uint32_t i = 0; i < ranks; i++)
                w.shares[i] = 1 + mix(seed + i) % largest;
        (void) check_plan(m, in, whole, ranks, 1, &w, (Delays){seed, mix(seed) % 1500});
}

/* LATENT_RANK_DRAWS draws of each plan and rank count, over 20 steps of several lengths and types. */
static void split_at_random_same_bits(void **state) {
        static const uint64_t lengths[] = {4, 9, 13, 57, 211};
        const char *text = getenv("LATENT_RANK_DRAWS");
        uint32_t n = text ? (uint32_t) atoi(text) : 2, n_steps = ELEMENTSOF(lengths) * _TOY_MAX;

        for (uint32_t step = 0; step < n_steps; step++) {
                uint64_t rows = lengths[step % ELEMENTSOF(lengths)];
                CLEANUP(toy_freep) Toy *t = toy_new((ToyKind) (step / ELEMENTSOF(lengths)));
                CLEANUP(toy_step_freep) ToyStep *s = toy_step_of_rows(t, rows, rows < 9 ? 1 : 1 + step % 3);
                Result whole = whole_of(&t->model, &s->in, s->n_video, s->n_audio);
                uint32_t combination = 0;

                for (size_t i = 0; i < ELEMENTSOF(rank_counts); i++)
                        for (int kind = WIRE_PLAN_HIDDEN_GATHER; kind < _WIRE_PLAN_MAX; kind++, combination++)
                                for (uint32_t draw = 0; draw < n; draw++)
                                        if ((draw + combination) % n_steps == step)
                                                check_draw(&t->model, &s->in, &whole, rank_counts[i],
                                                        (WirePlanKind) kind, draw * 21 + combination);
                result_done(&whole);
        }
}

/* Each method on 1 to 8 ranks, every second plan of each (with LATENT_RANK_DRAWS every one), shares and chunks in turn, cuts where no
 * block ends; of vsa, gates that travel as q does and such that keep the rows from travelling in int8. */
static void split_of_sparse_attention_same_bits(void **state) {
        static const char *const texts[] = {"sol-attn:tau=0.5", "sla:keep=20,sinks=exact_kv,dense_blocks=0", "vsa:keep=10", "vsa:keep=20"};
        const bool all = getenv("LATENT_RANK_DRAWS") != NULL;
        uint32_t turn = 0;

        for (size_t i = 0; i < ELEMENTSOF(texts); i++) {
                CLEANUP(toy_freep) Toy *t = toy_new((ToyKind) ((i + 1) % _TOY_MAX));
                CLEANUP(toy_step_freep) ToyStep *s = toy_step_new(t, 70, 19, 5, 12, 10);
                Result dense = whole_of(&t->model, &s->in, s->n_video, s->n_audio), whole;
                H3Sparse *blocks = NULL;
                SparseOptions o;
                Fault f = {};

                assert_int_equal(sparse_parse(texts[i], &o, &f), 0);
                o.shift = 12;
                if (o.method == SPARSE_VSA)
                        toy_add_gates(t, i == 2);
                assert_int_equal(h3_sparse_new(&t->model.config, s->layout, &o, &blocks), 0);
                assert_true(blocks->n > 3);
                sparse = blocks;
                whole = whole_of(&t->model, &s->in, s->n_video, s->n_audio);
                assert_true(memcmp(whole.video, dense.video, whole.n_video * sizeof(float)) != 0);
                assert_true(whole.blocks_seen[0] > 0 && whole.blocks_seen[0] < whole.blocks_all[0] && sum(dense.blocks_all) == 0);
                for (uint32_t ranks = 1; ranks <= 8; ranks++)
                        for (int kind = WIRE_PLAN_HIDDEN_GATHER; kind < _WIRE_PLAN_MAX; kind++, turn++) {
                                PlanWishes w = wishes_of(ranks, turn, (WirePlanKind) kind, turn % 6);

                                if (all || (ranks + (size_t) kind + i) % 2 == 0)
                                        (void) check_plan(&t->model, &s->in, &whole, ranks, 1, &w, (Delays){});
                        }
                sparse = NULL;
                (void) h3_sparse_free(blocks);
                result_done(&whole);
                result_done(&dense);
        }
}

/* ---- real models, and cuts that no planner makes ---- */

typedef struct Cuts {
        uint32_t ranks;
        uint64_t rows[RANKS + 1], heads[RANKS + 1];
} Cuts;

static void check_cuts(const H3Model *m, const H3StepInput *in, const Result *whole, const Cuts *cuts, uint32_t chunks) {
        H3Range rows[RANKS], heads[RANKS];
        H3Plan p = {.ranks = cuts->ranks, .row_tile = 1, .chunks = chunks, .rows = rows, .heads = heads};
        Result result = result_new(whole->n_video, whole->n_audio);
        Delays delays = {chunks, 200};
        char what[64];
        Fault f;

        for (uint32_t i = 0; i < cuts->ranks; i++) {
                rows[i] = (H3Range){cuts->rows[i], cuts->rows[i + 1]};
                heads[i] = (H3Range){cuts->heads[i], cuts->heads[i + 1]};
        }
        for (p.kind = 0; p.kind < _H3_PLAN_MAX; p.kind++) {
                SplitStep s = step_of(m, in, &p, &result);

                s.hook = (ExchangeHook){delay, &delays};
                (void) snprintf(what, sizeof(what), "%u ranks from %llu, plan %u, %u chunks", cuts->ranks,
                        (unsigned long long) cuts->rows[1], p.kind, chunks);
                if (run(&s, &result, &f) < 0)
                        fail_msg("%s: %s", what, f.text);
                expect_same(&result, whole, what);
                assert_int_equal(result.bytes, bytes_of(m, &p, in->compute));
        }
        result_done(&result);
}

/* A mask of several levels over the case's target. */
static void set_masks(const GoldenModel *m, const GoldenCase *k) {
        const H3Shape *s = &k->layout->shape;
        uint64_t n = s->frames * s->height * s->width;
        CLEANUP_FREE float *video = malloc(n * sizeof(float)), *audio = malloc(2 * s->audio * sizeof(float));

        assert_true(video && audio);
        for (uint64_t i = 0; i < n; i++)
                video[i] = (float) (i * 7 % 16) / 16;
        for (uint64_t i = 0; i < 2 * s->audio; i++)
                audio[i] = (float) (i % 5) / 4;
        assert_int_equal(h3_layout_set_masks(k->layout, &m->model->config, video, audio, NULL), 0);
}

static void check_case(const GoldenModel *m, const char *name, H3Compute compute, bool masked, const Cuts *cuts, size_t n) {
        CLEANUP(golden_case_freep) GoldenCase *k = golden_case_open(name, &m->model->config);
        CLEANUP_FREE void *refined = golden_refine(m->model, k, compute);
        H3StepInput in = golden_input(k, compute, refined);
        Result whole;

        if (masked)
                set_masks(m, k);
        whole = whole_of(m->model, &in, k->n_video, k->n_audio);
        for (size_t i = 0; i < n; i++)
                check_cuts(m->model, &in, &whole, cuts + i, 1 + (uint32_t) i * 3 % 7);
        result_done(&whole);
}

/* 193 rows: even and odd cuts, inside segments and on their borders, a rank without rows, a rank without
 * heads, one with neither */
static const Cuts cuts_of_odd[] = {
        {2, {0, 97, 193}, {0, 4, 8}},
        {2, {0, 1, 193}, {0, 7, 8}},
        {3, {0, 64, 128, 193}, {0, 3, 6, 8}},
        {3, {0, 100, 100, 193}, {0, 3, 5, 8}},
        {3, {0, 60, 120, 193}, {0, 4, 4, 8}},
        {4, {0, 0, 0, 120, 193}, {0, 1, 1, 1, 8}},
        {8, {0, 24, 48, 72, 96, 120, 144, 168, 193}, {0, 1, 2, 3, 4, 5, 6, 7, 8}},
};

/* 244 rows: text 40, image 6, sound 24, video 28, sound 10, image 6, audio 74, video 56. Cuts inside every
 * one of them. */
static const Cuts cuts_of_mixed[] = {
        {2, {0, 43, 244}, {0, 4, 8}},
        {4, {0, 60, 90, 105, 244}, {0, 2, 4, 6, 8}},
        {7, {0, 30, 41, 71, 99, 111, 150, 244}, {0, 1, 2, 3, 4, 5, 7, 8}},
};

static void split_of_golden_cases_same_bits(void **state) {
        CLEANUP(golden_model_freep) GoldenModel *m = golden_comfy();

        for (int compute = H3_COMPUTE_F32; compute <= H3_COMPUTE_BF16; compute++) {
                check_case(m, "case_t2va_odd", (H3Compute) compute, false, cuts_of_odd, ELEMENTSOF(cuts_of_odd));
                check_case(m, "case_ref2va_mixed", (H3Compute) compute, false, cuts_of_mixed,
                        ELEMENTSOF(cuts_of_mixed));
        }
}

static void split_with_masks_same_bits(void **state) {
        CLEANUP(golden_model_freep) GoldenModel *m = golden_comfy();

        check_case(m, "case_ref2va_mixed", H3_COMPUTE_BF16, true, cuts_of_mixed, ELEMENTSOF(cuts_of_mixed));
}

/* A rank takes its heads' rows of a quantised matrix, and their scales; a curve is the same for all. */
static void split_of_other_formats_same_bits(void **state) {
        static const char *const names[] = {"comfy_int8.safetensors", "comfy_pruned.safetensors"};

        for (size_t i = 0; i < ELEMENTSOF(names); i++)
                for (int compute = H3_COMPUTE_F32; compute <= H3_COMPUTE_BF16; compute++) {
                        CLEANUP(golden_model_freep)
                        GoldenModel *m = golden_model_open(
                                golden_derived(), (const char *const[]){names[i], NULL}, H3_QKV_AUTO);

                        check_case(m, "case_t2va_odd", (H3Compute) compute, false, cuts_of_odd + 2 * i, 4);
                }
}

/* ---- what tests like these must notice, and what a failure does ---- */

/* A toy of 57 rows on `ranks` ranks, one plan. */
typedef struct Bench {
        Toy *toy;
        ToyStep *step;
        Plan *plan;
        Result whole, result;
        SplitStep split;
} Bench;

static Bench bench_new(uint32_t ranks, WirePlanKind kind, uint32_t chunks) {
        Bench b = {.toy = toy_new(TOY_BF16)};
        WireMessage w;
        Fault f = {};

        b.step = toy_step_of_rows(b.toy, 57, 3);
        b.whole = whole_of(&b.toy->model, &b.step->in, b.step->n_video, b.step->n_audio);
        b.result = result_new(b.step->n_video, b.step->n_audio);
        wire_init(&w, WIRE_PLAN, 1, 1, 0);
        assert_int_equal(plan_make(57, 56, ranks, 1, &(PlanWishes){.kind = kind, .chunks = chunks}, &w.plan), 0);
        assert_int_equal(plan_new(&w.plan, 57, 56, ranks, &b.plan, &f), 0);
        b.split = step_of(&b.toy->model, &b.step->in, &b.plan->h3, &b.result);
        return b;
}

static void bench_done(Bench *b) {
        (void) plan_free(b->plan);
        result_done(&b->whole);
        result_done(&b->result);
        (void) toy_step_free(b->step);
        (void) toy_free(b->toy);
}

static void expect_works(Bench *b) {
        Fault f;

        b->split.hook = (ExchangeHook){};
        b->split.ops = &ops;
        b->split.on_stuck = never_stuck;
        b->split.deadline_usec = UINT64_C(60000000);
        if (run(&b->split, &b->result, &f) < 0)
                fail_msg("the step after it: %s", f.text);
        expect_same(&b->result, &b->whole, "the step after it");
}

static int flip(void *userdata, uint32_t rank, const H3Message *m, uint8_t *bytes, uint64_t size) {
        if (bytes && rank == 1 && m->sequence == 1 && m->chunk == 0)
                bytes[1] ^= 0x40;
        return 0;
}

static void exchange_flipped_bit_changes_the_result(void **state) {
        for (int kind = WIRE_PLAN_HIDDEN_GATHER; kind < _WIRE_PLAN_MAX; kind++) {
                Bench b = bench_new(3, (WirePlanKind) kind, 2);
                Fault f;

                b.split.hook.func = flip;
                assert_int_equal(run(&b.split, &b.result, &f), 0);
                assert_memory_not_equal(b.result.video, b.whole.video, b.whole.n_video * sizeof(float));
                expect_works(&b);
                bench_done(&b);
        }
}

static atomic_uint inside, together;

/* Waits until all three ranks are here; gives up after 20 s. */
static int meet_in_attention(LkContext *c, const LkAttention *a) {
        unsigned n = ++inside;

        for (unsigned i = 0; i < 20000 && together < 3; i++) {
                n = inside;
                if (n > together)
                        together = n;
                (void) usleep(1000);
        }
        inside--;
        return real->attention(c, a);
}

static void exchange_ranks_compute_at_the_same_time(void **state) {
        Bench b = bench_new(3, WIRE_PLAN_HIDDEN_GATHER, 2);
        LkOps meeting = ops;
        Fault f;

        inside = together = 0;
        meeting.attention = meet_in_attention;
        b.split.ops = &meeting;
        assert_int_equal(run(&b.split, &b.result, &f), 0);
        assert_int_equal(together, 3);
        expect_same(&b.result, &b.whole, "ranks that met");
        bench_done(&b);
}

/* The message before which, or after which, a rank does something. */
typedef struct Point {
        uint32_t rank;
        bool sending, staged;
        uint32_t sequence;
        atomic_bool hold; /* hangs until it is false */
        int error;
} Point;

static int at_point(void *userdata, uint32_t rank, const H3Message *m, uint8_t *bytes, uint64_t size) {
        Point *p = userdata;

        if (rank != p->rank || (m->from == rank) != p->sending || (bytes != NULL) != p->staged ||
                m->sequence != p->sequence)
                return 0;
        while (p->hold)
                (void) usleep(1000);
        return p->error;
}

static const struct {
        uint32_t rank;
        bool sending, staged;
        uint32_t sequence;
} points[] = {{0, true, false, 1}, {1, true, true, 1}, {2, false, false, 1}, {0, false, false, 2}, {2, true, false, 2}};

static void exchange_failing_rank_releases_the_others(void **state) {
        for (int kind = WIRE_PLAN_HIDDEN_GATHER; kind < _WIRE_PLAN_MAX; kind++) {
                Bench b = bench_new(3, (WirePlanKind) kind, 4);

                for (size_t i = 0; i < ELEMENTSOF(points); i++) {
                        Point p = {points[i].rank, points[i].sending, points[i].staged, points[i].sequence, false, -EIO};
                        Fault f;

                        b.split.hook = (ExchangeHook){at_point, &p};
                        assert_int_equal(run(&b.split, &b.result, &f), -EIO);
                        assert_string_equal(f.name, FAULT_INTERNAL);
                        assert_non_null(strstr(f.text, "Input/output error"));
                        expect_works(&b);
                }
                bench_done(&b);
        }
}

/* Long enough for ranks that do not hang, on a busy machine too. */
#define STUCK_SEC 2u

/* The rank that hangs is let go when the group has given up, so that its thread can be joined. */
static char stuck_text[1024];
static Point *stuck_point;

static void let_go(void *userdata, const Fault *f) {
        (void) snprintf(stuck_text, sizeof(stuck_text), "%s", f->text);
        stuck_point->hold = false;
}

static void exchange_stuck_rank_is_named(void **state) {
        for (int kind = WIRE_PLAN_HIDDEN_GATHER; kind < _WIRE_PLAN_MAX; kind++) {
                Bench b = bench_new(3, (WirePlanKind) kind, 3);

                for (size_t i = (size_t) kind - 1; i < ELEMENTSOF(points); i += 3) {
                        Point p = {points[i].rank, points[i].sending, points[i].staged, points[i].sequence, true, 0};
                        char expected[64];
                        Fault f;

                        stuck_point = &p;
                        b.split.hook = (ExchangeHook){at_point, &p};
                        b.split.deadline_usec = STUCK_SEC * UINT64_C(1000000);
                        b.split.on_stuck = let_go;
                        assert_int_equal(run(&b.split, &b.result, &f), -ETIMEDOUT);
                        (void) snprintf(expected, sizeof(expected), "Rank %u did not answer in %u s.", p.rank, STUCK_SEC);
                        assert_string_equal(f.text, expected);
                        assert_string_equal(stuck_text, expected);
                        expect_works(&b);
                }
                bench_done(&b);
        }
}

/* At its end nobody waits for its messages any more. */
static atomic_bool hold_end;

static int hang_at_the_end(void *userdata, uint32_t rank, uint32_t done, uint32_t total) {
        while (rank == 2 && done == total && hold_end)
                (void) usleep(1000);
        return 0;
}

static void let_go_of_end(void *userdata, const Fault *f) {
        (void) snprintf(stuck_text, sizeof(stuck_text), "%s", f->text);
        hold_end = false;
}

static void exchange_rank_stuck_at_its_end_is_named(void **state) {
        Bench b = bench_new(3, WIRE_PLAN_KV_GATHER, 3);
        Fault f;

        hold_end = true;
        b.split.on_block = hang_at_the_end;
        b.split.on_stuck = let_go_of_end;
        b.split.deadline_usec = STUCK_SEC * UINT64_C(1000000);
        assert_int_equal(run(&b.split, &b.result, &f), -ETIMEDOUT);
        assert_non_null(strstr(f.text, "Rank 2 did not answer in "));
        assert_string_equal(stuck_text, f.text);
        b.split.on_block = NULL;
        expect_works(&b);
        bench_done(&b);
}

static atomic_int n_memory;

/* The second arena is not there. */
static int failing_memory_new(LkContext *c, uint64_t size, void **ret) {
        return ++n_memory == 2 ? -ENOMEM : poisoned_memory_new(c, size, ret);
}

static void exchange_failure_before_the_first_message_is_reported(void **state) {
        Bench b = bench_new(4, WIRE_PLAN_HIDDEN_GATHER, 2);
        LkOps failing = ops;
        Fault f;

        failing.memory_new = failing_memory_new;
        n_memory = 0;
        b.split.ops = &failing;
        assert_int_equal(run(&b.split, &b.result, &f), -ENOMEM);
        assert_string_equal(f.name, FAULT_DOES_NOT_FIT);
        assert_non_null(strstr(f.text, "bytes of device memory"));
        expect_works(&b);
        bench_done(&b);
}

static int cancel_at_one(void *userdata, uint32_t rank, uint32_t done, uint32_t total) {
        return rank == 1 && done == 1 ? -ECANCELED : 0;
}

static void exchange_cancel_ends_all_ranks(void **state) {
        Bench b = bench_new(3, WIRE_PLAN_QKV_ALL_TO_ALL, 2);
        Fault f;

        b.split.on_block = cancel_at_one;
        assert_int_equal(run(&b.split, &b.result, &f), -ECANCELED);
        assert_string_equal(f.name, FAULT_CANCELLED);
        b.split.on_block = NULL;
        expect_works(&b);
        bench_done(&b);
}

/* What one says and the other does not expect. */
static void exchange_wrong_messages_are_refused(void **state) {
        Bench b = bench_new(2, WIRE_PLAN_HIDDEN_GATHER, 1);
        const ExchangeStep sizes = {&b.toy->model, &b.plan->h3, H3_COMPUTE_BF16};
        H3Rank rank = {.index = 0, .ops = &ops, .plan = &b.plan->h3};
        H3Message m = {.phase = H3_PHASE_IN, .from = 0, .to = H3_TO_ALL, .sequence = 2};
        uint8_t bytes[64 * 29 * 2 + 2] = {};
        H3View view = {bytes, 1, 64 * 29 * 2, 64 * 29 * 2};
        Exchange *e = NULL;
        H3Exchange *x;
        Fault f = {};

        assert_int_equal(ops.context_new(1, &rank.context), 0);
        assert_int_equal(exchange_new(EXCHANGE_HOST, &b.plan->h3, (ExchangeSize){exchange_step_message, &sizes}, 10000, NULL, &e), 0);
        x = exchange_interface(e);
        assert_int_equal(x->send(x, &rank, &m, &view, 1), -EPROTO); /* 2 before 1 */
        view.width++;
        m.sequence = 1;
        assert_int_equal(x->send(x, &rank, &m, &view, 1), -EPROTO); /* more than the plan says */
        assert_int_equal(exchange_error(e, &f), 0);

        /* The place is taken until rank 1 has read it. */
        view.width--;
        assert_int_equal(x->send(x, &rank, &m, &view, 1), 0);
        m.sequence = 2;
        assert_int_equal(x->send(x, &rank, &m, &view, 1), -ETIMEDOUT);
        assert_int_equal(exchange_error(e, &f), -ETIMEDOUT);
        assert_string_equal(f.text, "Rank 1 did not answer in 1 s.");
        (x->fail)(x, 0, -EIO, NULL); /* too late to be the first */
        assert_int_equal(exchange_error(e, NULL), -ETIMEDOUT);
        (void) exchange_free(e);
        (void) ops.context_free(rank.context);
        assert_null(exchange_free(NULL));
        bench_done(&b);
}

typedef struct Waiter {
        Exchange *exchange;
        H3Rank rank;
        uint32_t from;
        int r;
} Waiter;

static int waiter_work(void *userdata, uint32_t index, LkContext *context) {
        Waiter *w = (Waiter *) userdata + index;
        H3Exchange *x = exchange_interface(w->exchange);
        const H3Message m = {.phase = H3_PHASE_IN, .from = w->from, .to = H3_TO_ALL, .sequence = 1};
        uint8_t byte;
        H3View view = {&byte, 1, 1, 1};

        (void) usleep(index * 200000); /* the time of rank 0 is over first, which waits for one that waits */
        w->rank.context = context;
        w->r = x->recv(x, &w->rank, &m, &view, 1);
        return 0;
}

/* 0 waits for 1, 1 for 2, 2 for 3, which does nothing. */
static void exchange_the_one_all_wait_for_is_named(void **state) {
        Bench b = bench_new(4, WIRE_PLAN_HIDDEN_GATHER, 1);
        const ExchangeStep sizes = {&b.toy->model, &b.plan->h3, H3_COMPUTE_BF16};
        Waiter waiters[3];
        Exchange *e = NULL;
        Fault f = {};

        assert_int_equal(exchange_new(EXCHANGE_HOST, &b.plan->h3, (ExchangeSize){exchange_step_message, &sizes}, 2000000, NULL, &e), 0);
        for (uint32_t i = 0; i < 3; i++)
                waiters[i] = (Waiter){e, {.index = i, .ops = &ops, .plan = &b.plan->h3}, i + 1, 0};
        assert_int_equal(rank_group_run(group, &(RankOrder){.ranks = 7,
                                                       .work = waiter_work,
                                                       .userdata = waiters,
                                                       .deadline_usec = UINT64_C(60000000)}),
                0);
        for (uint32_t i = 0; i < 3; i++)
                assert_int_equal(waiters[i].r, -ETIMEDOUT);
        assert_int_equal(exchange_error(e, &f), -ETIMEDOUT);
        assert_string_equal(f.text, "Rank 3 did not answer in 2 s.");
        (void) exchange_free(e);
        bench_done(&b);
}

static void split_memory_counts_arenas_and_what_lies_between(void **state) {
        Bench b = bench_new(3, WIRE_PLAN_KV_GATHER, 2);
        uint64_t sum = 0, bytes;

        for (uint32_t i = 0; i < 3; i++) {
                assert_int_equal(h3_step_memory(&b.toy->model, b.step->layout, &b.plan->h3, i, H3_COMPUTE_BF16, 0, &bytes), 0);
                sum += bytes;
        }
        assert_int_equal(split_memory(&ops, &b.toy->model, b.step->layout, &b.plan->h3, EXCHANGE_HOST, H3_COMPUTE_BF16, &bytes), 0);
        /* K and V of all rows, and the places' own bookkeeping */
        assert_true(bytes >= sum + 57 * 2 * 448 * 2 && bytes < sum + 57 * 2 * 448 * 2 + 10000);
        bench_done(&b);
}

/* It leaves when the one before has, and comes when as much time is over as it takes; who waits for it was so long in the exchange. */
static void exchange_slow_link_takes_its_time(void **state) {
        Bench b = bench_new(2, WIRE_PLAN_HIDDEN_GATHER, 2);
        const ExchangeStep sizes = {&b.toy->model, &b.plan->h3, H3_COMPUTE_BF16};
        const ExchangeHook slow = {.measures = true, .link_bytes = 1};
        H3Rank ranks[2] = {{.index = 0, .ops = &ops, .plan = &b.plan->h3}, {.index = 1, .ops = &ops, .plan = &b.plan->h3}};
        H3Message m = {.phase = H3_PHASE_IN, .from = 0, .to = H3_TO_ALL, .sequence = 1};
        uint8_t bytes[64 * 14 * 2], taken[sizeof(bytes)];
        H3View view = {bytes, 1, sizeof(bytes), sizeof(bytes)};
        uint64_t begin;
        Exchange *e;
        H3Exchange *x;

        memset(bytes, 5, sizeof(bytes));
        assert_int_equal(exchange_new(EXCHANGE_HOST, &b.plan->h3, (ExchangeSize){exchange_step_message, &sizes}, 60000000, &slow, &e), 0);
        x = exchange_interface(e);
        for (uint32_t i = 0; i < 2; i++) {
                assert_int_equal(ops.context_new(1, &ranks[i].context), 0);
                assert_int_equal(exchange_open(e, ranks + i), 0);
        }
        begin = clock_usec();
        for (m.chunk = 0; m.chunk < 2; m.chunk++)
                assert_int_equal(x->send(x, ranks, &m, &view, 1), 0);
        view.data = taken;
        for (m.chunk = 0; m.chunk < 2; m.chunk++) {
                memset(taken, 0, sizeof(taken));
                assert_int_equal(x->recv(x, ranks + 1, &m, &view, 1), 0);
                assert_memory_equal(taken, bytes, sizeof(bytes));
                assert_true(clock_usec() - begin >= (m.chunk + 1) * sizeof(bytes));
        }
        for (uint32_t i = 0; i < 2; i++) {
                assert_int_equal(exchange_close(e, ranks + i), 0);
                (void) ops.context_free(ranks[i].context);
        }
        assert_true(exchange_exposed(e) > 0 && exchange_exposed(e) <= clock_usec() - begin);
        (void) exchange_free(e);
        bench_done(&b);
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(exchange_slow_link_takes_its_time),
                cmocka_unit_test(exchange_wrong_messages_are_refused),
                cmocka_unit_test(exchange_ranks_compute_at_the_same_time),
                cmocka_unit_test(exchange_flipped_bit_changes_the_result),
                cmocka_unit_test(exchange_failing_rank_releases_the_others),
                cmocka_unit_test(exchange_the_one_all_wait_for_is_named),
                cmocka_unit_test(exchange_stuck_rank_is_named),
                cmocka_unit_test(exchange_rank_stuck_at_its_end_is_named),
                cmocka_unit_test(exchange_failure_before_the_first_message_is_reported),
                cmocka_unit_test(exchange_cancel_ends_all_ranks),
                cmocka_unit_test(split_memory_counts_arenas_and_what_lies_between),
                cmocka_unit_test(split_short_sequence_is_planned_down),
                cmocka_unit_test(split_of_golden_cases_same_bits),
                cmocka_unit_test(split_with_masks_same_bits),
                cmocka_unit_test(split_of_other_formats_same_bits),
                cmocka_unit_test(split_of_every_length_same_bits),
                cmocka_unit_test(split_of_sparse_attention_same_bits),
                cmocka_unit_test(split_of_a_tenth_same_bits),
                cmocka_unit_test(split_at_random_same_bits),
        };

        return cmocka_run_group_tests(tests, setup, teardown);
}
