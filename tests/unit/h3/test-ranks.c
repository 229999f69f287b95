/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "kernels/cpu/cpu.h"
#include "service/shared/cleanup.h"
#include "tests/unit/h3/golden.h"

/* One step split over ranks, each a thread with its own memory: the same bits as one rank. The exchange here
 * is the plainest one that keeps its contract. */

#define RANKS_MAX 8

typedef struct Group {
        H3Exchange exchange; /* first: hooks get a pointer to it */
        const H3Plan *plan;
        uint64_t heads;
        pthread_barrier_t barrier;
        uint8_t *arrays[RANKS_MAX];
        atomic_uint gathers, scatters;
} Group;

static int gather(H3Exchange *e, uint32_t rank, void *x, uint64_t width) {
        Group *g = (Group *) e;

        atomic_fetch_add(&g->gathers, 1);
        g->arrays[rank] = x;
        (void) pthread_barrier_wait(&g->barrier);
        for (uint32_t r = 0; r < g->plan->ranks; r++) {
                uint64_t begin = g->plan->rows[r].begin * width, end = g->plan->rows[r].end * width;

                if (r != rank && end > begin)
                        memcpy((uint8_t *) x + begin, g->arrays[r] + begin, end - begin);
        }
        (void) pthread_barrier_wait(&g->barrier);
        return 0;
}

static int scatter_heads(H3Exchange *e, uint32_t rank, void *x, uint64_t head_width) {
        Group *g = (Group *) e;
        uint64_t stride = g->heads * head_width;

        atomic_fetch_add(&g->scatters, 1);
        g->arrays[rank] = x;
        (void) pthread_barrier_wait(&g->barrier);
        for (uint32_t r = 0; r < g->plan->ranks; r++)
                for (uint64_t row = g->plan->rows[rank].begin; r != rank && row < g->plan->rows[rank].end;
                        row++) {
                        uint64_t at = row * stride + g->plan->heads[r].begin * head_width;

                        memcpy((uint8_t *) x + at, g->arrays[r] + at,
                                (g->plan->heads[r].end - g->plan->heads[r].begin) * head_width);
                }
        (void) pthread_barrier_wait(&g->barrier);
        return 0;
}

typedef struct Member {
        H3Rank rank;
        const H3Model *model;
        const H3StepInput *in;
        float *video, *audio;
        int r;
} Member;

static void *member_main(void *userdata) {
        Member *m = userdata;

        m->r = h3_step(&m->rank, m->model, m->in, NULL, m->video, m->audio, NULL);
        return NULL;
}

/* rows and heads: ranks + 1 cuts. Velocities start as NaN, so that an element nobody writes shows. */
static void run_split(const H3Model *m, const H3StepInput *in, uint32_t ranks, const uint64_t *rows,
        const uint64_t *heads, float *video, uint64_t n_video, float *audio, uint64_t n_audio) {
        H3Range row_ranges[RANKS_MAX], head_ranges[RANKS_MAX];
        const H3Plan plan = {
                .ranks = ranks, .row_tile = 1, .chunks = 1, .rows = row_ranges, .heads = head_ranges};
        Group g = {.exchange = {gather, scatter_heads}, .plan = &plan, .heads = m->config.heads};
        Member members[RANKS_MAX] = {};
        pthread_t threads[RANKS_MAX];

        memset(video, 0xff, n_video * sizeof(*video));
        memset(audio, 0xff, n_audio * sizeof(*audio));
        assert_int_equal(pthread_barrier_init(&g.barrier, NULL, ranks), 0);
        for (uint32_t i = 0; i < ranks; i++) {
                row_ranges[i] = (H3Range){rows[i], rows[i + 1]};
                head_ranges[i] = (H3Range){heads[i], heads[i + 1]};
        }
        for (uint32_t i = 0; i < ranks; i++) {
                members[i] = (Member){
                        .rank = {.index = i,
                                .ops = lk_cpu_ops(LK_CPU_AUTO),
                                .plan = &plan,
                                .exchange = ranks > 1 ? &g.exchange : NULL},
                        .model = m,
                        .in = in,
                        .video = video,
                        .audio = audio,
                };
                assert_int_equal(members[i].rank.ops->context_new(1, &members[i].rank.context), 0);
        }
        for (uint32_t i = 0; i < ranks; i++)
                assert_int_equal(pthread_create(threads + i, NULL, member_main, members + i), 0);
        for (uint32_t i = 0; i < ranks; i++)
                assert_int_equal(pthread_join(threads[i], NULL), 0);
        for (uint32_t i = 0; i < ranks; i++) {
                assert_int_equal(members[i].r, 0);
                (void) members[i].rank.ops->context_free(members[i].rank.context);
        }
        (void) pthread_barrier_destroy(&g.barrier);
        assert_int_equal(g.gathers, ranks > 1 ? ranks * m->config.layers : 0);
        assert_int_equal(g.scatters, ranks > 1 ? ranks * m->config.layers : 0);
}

typedef struct Split {
        uint32_t ranks;
        uint64_t rows[RANKS_MAX + 1], heads[RANKS_MAX + 1];
} Split;

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

static void check_splits_of(GoldenModel *m, const char *name, H3Compute compute, bool masked,
        const Split *splits, size_t n_splits) {
        CLEANUP(golden_case_freep) GoldenCase *k = golden_case_open(name, &m->model->config);
        CLEANUP_FREE float *video = malloc(k->n_video * sizeof(float)),
                           *audio = malloc(k->n_audio * sizeof(float));
        CLEANUP_FREE float *whole_video = malloc(k->n_video * sizeof(float)),
                           *whole_audio = malloc(k->n_audio * sizeof(float));
        CLEANUP_FREE void *refined = golden_refine(m->model, k, compute);
        H3StepInput in = golden_input(k, compute, refined);

        assert_true(video && audio && whole_video && whole_audio);
        if (masked)
                set_masks(m, k);

        run_split(m->model, &in, 1, (const uint64_t[]){0, k->layout->rows}, (const uint64_t[]){0, 8},
                whole_video, k->n_video, whole_audio, k->n_audio);
        for (size_t i = 0; i < n_splits; i++) {
                run_split(m->model, &in, splits[i].ranks, splits[i].rows, splits[i].heads, video, k->n_video,
                        audio, k->n_audio);
                if (memcmp(video, whole_video, k->n_video * sizeof(float)) != 0 ||
                        memcmp(audio, whole_audio, k->n_audio * sizeof(float)) != 0)
                        fail_msg("%s: split %zu (%u ranks) gives other bits than one rank", name, i,
                                splits[i].ranks);
        }
}

static void check_splits(
        const char *name, H3Compute compute, bool masked, const Split *splits, size_t n_splits) {
        CLEANUP(golden_model_freep) GoldenModel *m = golden_comfy();

        check_splits_of(m, name, compute, masked, splits, n_splits);
}

/* 193 rows: even and odd cuts, inside segments and on their borders, a rank without rows, a rank without
 * heads */
static const Split splits_of_odd[] = {
        {2, {0, 97, 193}, {0, 4, 8}},
        {2, {0, 1, 193}, {0, 7, 8}},
        {3, {0, 64, 128, 193}, {0, 3, 6, 8}},
        {3, {0, 100, 100, 193}, {0, 3, 5, 8}},
        {3, {0, 60, 120, 193}, {0, 4, 4, 8}},
        {8, {0, 24, 48, 72, 96, 120, 144, 168, 193}, {0, 1, 2, 3, 4, 5, 6, 7, 8}},
};

static void step_split_f32_same_bits(void **state) {
        check_splits("case_t2va_odd", H3_COMPUTE_F32, false, splits_of_odd, ELEMENTSOF(splits_of_odd));
}

static void step_split_bf16_same_bits(void **state) {
        check_splits("case_t2va_odd", H3_COMPUTE_BF16, false, splits_of_odd, ELEMENTSOF(splits_of_odd));
}

static void step_split_two_timesteps_same_bits(void **state) {
        const Split splits[] = {{2, {0, 17, 33}, {0, 4, 8}}, {5, {0, 3, 9, 12, 26, 33}, {0, 1, 3, 5, 6, 8}}};

        check_splits("case_t2va_tiny", H3_COMPUTE_BF16, false, splits, ELEMENTSOF(splits));
}

/* 244 rows: text 40, image 6, sound 24, video 28, sound 10, image 6, audio 74, video 56. Cuts inside every
 * one of them. */
static const Split splits_of_mixed[] = {
        {2, {0, 43, 244}, {0, 4, 8}},
        {4, {0, 60, 90, 105, 244}, {0, 2, 4, 6, 8}},
        {7, {0, 30, 41, 71, 99, 111, 150, 244}, {0, 1, 2, 3, 4, 5, 7, 8}},
};

static void step_split_references_same_bits(void **state) {
        check_splits(
                "case_ref2va_mixed", H3_COMPUTE_F32, false, splits_of_mixed, ELEMENTSOF(splits_of_mixed));
        check_splits(
                "case_ref2va_mixed", H3_COMPUTE_BF16, false, splits_of_mixed, ELEMENTSOF(splits_of_mixed));
}

static void step_split_masks_same_bits(void **state) {
        check_splits(
                "case_ref2va_mixed", H3_COMPUTE_BF16, true, splits_of_mixed, ELEMENTSOF(splits_of_mixed));
}

/* A rank takes its heads' rows of a quantised matrix, and their scales; a curve is the same for all. */
static void step_split_other_formats_same_bits(void **state) {
        static const char *const names[] = {"comfy_int8.safetensors", "comfy_pruned.safetensors"};

        for (size_t i = 0; i < ELEMENTSOF(names); i++)
                for (unsigned compute = 0; compute < 2; compute++) {
                        CLEANUP(golden_model_freep)
                        GoldenModel *m = golden_model_open(
                                golden_derived(), (const char *const[]){names[i], NULL}, H3_QKV_AUTO);

                        check_splits_of(m, "case_t2va_odd", compute ? H3_COMPUTE_BF16 : H3_COMPUTE_F32,
                                false, splits_of_odd + 2 * i, 4);
                }
}

static int stop_at_two(void *userdata, uint32_t done, uint32_t total) {
        *(uint32_t *) userdata = done;
        assert_int_equal(total, 3);
        return done == 2 ? -ECANCELED : 0;
}

static void step_hook_stops_after_a_block(void **state) {
        CLEANUP(golden_model_freep) GoldenModel *m = golden_comfy();
        CLEANUP(golden_case_freep) GoldenCase *k = golden_case_open("case_t2va_tiny", &m->model->config);
        const H3Range rows = {0, k->layout->rows}, heads = {0, 8};
        const H3Plan plan = {.ranks = 1, .row_tile = 1, .chunks = 1, .rows = &rows, .heads = &heads};
        H3Rank rank = {.ops = lk_cpu_ops(LK_CPU_AUTO), .plan = &plan};
        CLEANUP_FREE float *video = malloc(k->n_video * sizeof(float)),
                           *audio = malloc(k->n_audio * sizeof(float));
        CLEANUP_FREE void *refined = NULL;
        uint32_t done = 0;
        H3StepInput in;
        Fault f = {};

        assert_int_equal(rank.ops->context_new(1, &rank.context), 0);
        assert_int_equal(h3_refine_text(&rank, m->model, H3_COMPUTE_BF16, k->text,
                                 k->layout->shape.text_rows, &refined, &f),
                0);
        in = golden_input(k, H3_COMPUTE_BF16, refined);
        assert_int_equal(
                h3_step(&rank, m->model, &in, &(H3StepHooks){.on_block = stop_at_two, .userdata = &done},
                        video, audio, &f),
                -ECANCELED);
        assert_int_equal(done, 2);
        assert_string_equal(f.name, FAULT_CANCELLED);

        f = (Fault){};
        in.sigma_video = 1.5f;
        assert_int_equal(h3_step(&rank, m->model, &in, NULL, video, audio, &f), -EINVAL);
        assert_string_equal(f.name, FAULT_INVALID_ARGUMENT);
        (void) rank.ops->context_free(rank.context);
}

static void step_memory_shrinks_with_the_share(void **state) {
        CLEANUP(golden_model_freep) GoldenModel *m = golden_comfy();
        CLEANUP(golden_case_freep) GoldenCase *k = golden_case_open("case_t2va_odd", &m->model->config);
        const H3Range one_rows = {0, 193}, one_heads = {0, 8}, rows[] = {{0, 97}, {97, 193}},
                      heads[] = {{0, 4}, {4, 8}};
        const H3Plan one = {.ranks = 1, .rows = &one_rows, .heads = &one_heads};
        const H3Plan two = {.ranks = 2, .rows = rows, .heads = heads};
        const H3Range beyond = {0, 194};
        const H3Plan wrong = {.ranks = 1, .rows = &beyond, .heads = &one_heads};
        uint64_t whole, half, f32;

        assert_int_equal(h3_step_memory(m->model, k->layout, &one, 0, H3_COMPUTE_BF16, &whole), 0);
        assert_int_equal(h3_step_memory(m->model, k->layout, &two, 1, H3_COMPUTE_BF16, &half), 0);
        assert_int_equal(h3_step_memory(m->model, k->layout, &one, 0, H3_COMPUTE_F32, &f32), 0);
        assert_true(half < whole && whole < f32);
        assert_true(whole > 193ull * 1024 * 2 * 4); /* q, k, v and o */
        assert_int_equal(h3_step_memory(m->model, k->layout, &two, 2, H3_COMPUTE_BF16, &half), -EINVAL);
        assert_int_equal(h3_step_memory(m->model, k->layout, &wrong, 0, H3_COMPUTE_BF16, &half), -EINVAL);
}

static void step_condition_without_latent_is_refused(void **state) {
        CLEANUP(golden_model_freep) GoldenModel *m = golden_comfy();
        CLEANUP(golden_case_freep) GoldenCase *k = golden_case_open("case_ref2va_small", &m->model->config);
        const H3Range rows = {0, k->layout->rows}, heads = {0, 8};
        const H3Plan plan = {.ranks = 1, .row_tile = 1, .chunks = 1, .rows = &rows, .heads = &heads};
        const H3Rank rank = {.ops = lk_cpu_ops(LK_CPU_AUTO), .plan = &plan};
        H3StepInput in = golden_input(k, H3_COMPUTE_BF16, NULL);
        Fault f = {};

        k->conditions[1].video = NULL;
        assert_int_equal(h3_step(&rank, m->model, &in, NULL, NULL, NULL, &f), -EINVAL);
        assert_string_equal(f.name, FAULT_INVALID_TENSOR);
        assert_non_null(strstr(f.text, "condition 1"));
        f = (Fault){};
        in.conditions = NULL;
        assert_int_equal(h3_step(&rank, m->model, &in, NULL, NULL, NULL, &f), -EINVAL);
        assert_non_null(strstr(f.text, "condition 0"));
}

/* The released model and 200,000 rows: sums beyond 2^32, counted here in plain words. */
static void step_memory_of_a_large_request_is_counted(void **state) {
        const H3Model real = {.config = {.layers = 50,
                                      .hidden = 5376,
                                      .heads = 56,
                                      .head_dim = 128,
                                      .inner = 7168,
                                      .ffn = 14336,
                                      .video_channels = 24,
                                      .audio_channels = 32,
                                      .patch_h = 2,
                                      .patch_w = 2,
                                      .text_dim = 5120,
                                      .time_freq_dim = 256,
                                      .time_hidden = 5376,
                                      .time_dim = 2688,
                                      .rope_freqs = 16}};
        const H3Condition video = {.kind = H3_CONDITION_VIDEO, .grid = {92, 48, 84}, .audio = 520};
        const H3Shape s = {.text_rows = 3000,
                .frames = 102,
                .height = 48,
                .width = 84,
                .audio = 575,
                .n_conditions = 1,
                .conditions = &video};
        H3Layout *l = NULL;
        uint64_t bytes;
        double n, expected;

        assert_int_equal(h3_layout_new(&real.config, &s, NULL, &l, NULL), 0);
        n = (double) l->rows;
        assert_true(n > 200000);
        {
                const H3Range rows = {0, l->rows}, heads = {0, 56};
                const H3Plan plan = {.ranks = 1, .rows = &rows, .heads = &heads};

                assert_int_equal(h3_step_memory(&real, l, &plan, 0, H3_COMPUTE_BF16, &bytes), 0);
        }
        /* x, h, y, q, k, v, o in two bytes; rope, latent rows and two indices in four; one chunk of the MLP
         */
        expected = n * (2 * (3 * 5376 + 4 * 7168) + 4 * (2 * 48 + 96 + 2)) + 4096.0 * 3 * 14336 * 2;
        assert_true((double) bytes > expected && (double) bytes < expected * 1.001);
        (void) h3_layout_free(l);
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(step_split_f32_same_bits),
                cmocka_unit_test(step_split_bf16_same_bits),
                cmocka_unit_test(step_split_two_timesteps_same_bits),
                cmocka_unit_test(step_split_other_formats_same_bits),
                cmocka_unit_test(step_split_references_same_bits),
                cmocka_unit_test(step_split_masks_same_bits),
                cmocka_unit_test(step_hook_stops_after_a_block),
                cmocka_unit_test(step_condition_without_latent_is_refused),
                cmocka_unit_test(step_memory_of_a_large_request_is_counted),
                cmocka_unit_test(step_memory_shrinks_with_the_share),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
