/* SPDX-License-Identifier: Apache-2.0 */
#include "service/h3/adaln-table.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "kernels/cpu/cpu.h"
#include "service/shared/cleanup.h"
#include "tests/unit/h3/golden.h"

/* Steps with the modulation rows of their schedule made beforehand: the bits of steps without. */

DEFINE_CLEANUP(H3ModTable *, h3_mod_table_free)

/* Two streams of different shifts: equal at first, both near the end cleaner than a condition. */
static const float sigmas_video[] = {1, 0.9729729f, 0.8f, 0.0005f};
static const float sigmas_audio[] = {1, 0.9f, 0.5f, 0.0001f};
#define STEPS (uint32_t) ELEMENTSOF(sigmas_video)

static H3ModSchedule schedule_of(const H3Layout *l) {
        return (H3ModSchedule){l, sigmas_video, sigmas_audio, STEPS};
}

static H3ModTable *make_table(const H3Model *m, const H3ModSchedule *s, H3Compute compute) {
        H3Rank rank = {.ops = lk_cpu_ops(LK_CPU_AUTO)};
        H3ModTable *t = NULL;
        Fault f = {};

        assert_int_equal(rank.ops->context_new(2, &rank.context), 0);
        if (h3_mod_table_new(&rank, m, s, compute, NULL, &t, &f) < 0)
                fail_msg("table: %s", f.text);
        (void) rank.ops->context_free(rank.context);
        return t;
}

typedef struct Velocities {
        float *video, *audio;
} Velocities;

static void velocities_done(Velocities *v) {
        free(v->video);
        free(v->audio);
}

static void run_step(const H3Model *m, const GoldenCase *k, H3Compute compute, const void *refined,
        const H3ModTable *table, uint32_t step, Velocities *ret) {
        H3StepInput in = golden_input(k, compute, refined);

        in.sigma_video = sigmas_video[step];
        in.sigma_audio = sigmas_audio[step];
        in.mod_table = table;
        golden_run(m, &in, NULL, NULL, k->n_video, k->n_audio, &ret->video, &ret->audio);
}

/* Every level that video and audio masks have goes in, so that a step has many timesteps. */
static void set_masks(const H3Model *m, const GoldenCase *k) {
        const H3Shape *s = &k->layout->shape;
        uint64_t n_video = s->frames * s->height * s->width, n_audio = 2 * s->audio;
        CLEANUP_FREE float *video = malloc(n_video * sizeof(float)),
                           *audio = malloc(n_audio * sizeof(float));

        assert_true(video && audio);
        for (uint64_t i = 0; i < n_video; i++)
                video[i] = (float) (i * 7 % 16) / 16;
        for (uint64_t i = 0; i < n_audio; i++)
                audio[i] = (float) (i % 5) / 4;
        assert_int_equal(h3_layout_set_masks(k->layout, &m->config, video, audio, NULL), 0);
}

static void check_same_bits(const GoldenModel *m, const char *name, H3Compute compute, bool masked) {
        CLEANUP(golden_case_freep) GoldenCase *k = golden_case_open(name, &m->model->config);
        CLEANUP_FREE void *refined = golden_refine(m->model, k, compute);
        CLEANUP(h3_mod_table_freep) H3ModTable *table = NULL;
        H3ModSchedule s = schedule_of(k->layout);

        if (masked)
                set_masks(m->model, k);
        table = make_table(m->model, &s, compute);
        for (uint32_t i = 0; i < STEPS; i++) {
                CLEANUP(velocities_done) Velocities with = {}, without = {};

                run_step(m->model, k, compute, refined, NULL, i, &without);
                run_step(m->model, k, compute, refined, table, i, &with);
                if (memcmp(with.video, without.video, k->n_video * sizeof(float)) != 0 ||
                        memcmp(with.audio, without.audio, k->n_audio * sizeof(float)) != 0)
                        fail_msg("%s: step %u with the table has other bits than without", name, i);
        }
}

static void check_both(const GoldenModel *m, const char *name, bool masked) {
        check_same_bits(m, name, H3_COMPUTE_F32, masked);
        check_same_bits(m, name, H3_COMPUTE_BF16, masked);
}

static void table_t2va_same_bits(void **state) {
        CLEANUP(golden_model_freep) GoldenModel *m = golden_comfy();

        check_both(m, "case_t2va_tiny", false);
}

static void table_references_same_bits(void **state) {
        CLEANUP(golden_model_freep) GoldenModel *m = golden_comfy();

        check_both(m, "case_ref2va_small", false);
}

static void table_masks_same_bits(void **state) {
        CLEANUP(golden_model_freep) GoldenModel *m = golden_comfy();

        check_both(m, "case_ref2va_small", true);
}

static void check_format(const char *file) {
        CLEANUP(golden_model_freep)
        GoldenModel *m = golden_model_open(golden_derived(), (const char *const[]){file, NULL}, H3_QKV_AUTO);

        check_both(m, "case_t2va_tiny", false);
        check_both(m, "case_ref2va_small", false);
}

static void table_curve_same_bits(void **state) {
        check_format("comfy_pruned.safetensors");
}

/* AdaLN in int8 too: its rows are quantised one by one. */
static void table_int8_same_bits(void **state) {
        check_format("comfy_int8.safetensors");
}

/* With the AdaLN and time weights pointing to NaN the step still has its bits. */
static void table_weights_are_not_read_again(void **state) {
        CLEANUP(golden_model_freep) GoldenModel *m = golden_comfy();
        CLEANUP(golden_case_freep) GoldenCase *k = golden_case_open("case_t2va_tiny", &m->model->config);
        CLEANUP_FREE void *refined = golden_refine(m->model, k, H3_COMPUTE_BF16);
        H3ModSchedule s = schedule_of(k->layout);
        CLEANUP(h3_mod_table_freep) H3ModTable *table = make_table(m->model, &s, H3_COMPUTE_BF16);
        uint64_t bytes = 4ull * 96 * 256; /* of the largest of them, time_1 in f32 */
        CLEANUP_FREE uint8_t *nan = malloc(bytes);
        CLEANUP(velocities_done) Velocities good = {}, got = {}, spoilt = {};
        H3Model *h = m->model;

        assert_non_null(nan);
        memset(nan, 0xff, bytes);
        run_step(h, k, H3_COMPUTE_BF16, refined, NULL, 1, &good);
        for (uint32_t i = 0; i < h->config.layers; i++) {
                assert_true(h->blocks[i].adaln.rows * h->blocks[i].adaln.row_stride <= bytes);
                h->blocks[i].adaln.data = nan;
                h->blocks[i].adaln_bias.data = nan;
        }
        h->final_adaln.data = h->final_adaln_bias.data = nan;
        h->time_1.data = h->time_1_bias.data = h->time_2.data = h->time_2_bias.data = nan;
        run_step(h, k, H3_COMPUTE_BF16, refined, table, 1, &got);
        run_step(h, k, H3_COMPUTE_BF16, refined, NULL, 1, &spoilt);

        assert_memory_equal(got.video, good.video, k->n_video * sizeof(float));
        assert_memory_equal(got.audio, good.audio, k->n_audio * sizeof(float));
        assert_true(memcmp(spoilt.video, good.video, k->n_video * sizeof(float)) != 0);
}

static H3Model released_model(uint32_t curve_points) {
        return (H3Model){.config = {.layers = 50,
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
                                 .time_dim = curve_points > 0 ? 8 : 2688,
                                 .curve_points = curve_points,
                                 .rope_freqs = 16}};
}

/* 20 steps from sigma 1: 39 timesteps; a reference video with sound adds 0.999 and 1. */
static void table_bytes_of_the_released_model_are_counted(void **state) {
        const H3Model full = released_model(0), pruned = released_model(1025);
        const H3Condition video = {.kind = H3_CONDITION_VIDEO, .grid = {7, 4, 4}, .audio = 40};
        H3Shape shape = {.text_rows = 10, .frames = 7, .height = 4, .width = 4, .audio = 40};
        float audio[20], film[20];
        H3ModSchedule s = {NULL, film, audio, 20};
        H3Layout *l = NULL;
        uint64_t bytes;

        for (int i = 0; i < 20; i++) { /* equal at 0 only */
                film[i] = 1 - (float) i / 23;
                audio[i] = 1 - (float) i / 29;
        }
        assert_int_equal(h3_layout_new(&full.config, &shape, NULL, &l, NULL), 0);
        s.layout = l;
        assert_int_equal(h3_mod_table_bytes(&full, &s, H3_COMPUTE_BF16, &bytes, NULL), 0);
        assert_int_equal(bytes, 39ull * (50 * 96768 + 10752) * 2);
        assert_int_equal(h3_mod_table_bytes(&full, &s, H3_COMPUTE_F32, &bytes, NULL), 0);
        assert_int_equal(bytes, 39ull * (50 * 96768 + 10752) * 4);
        assert_int_equal(h3_mod_table_bytes(&pruned, &s, H3_COMPUTE_BF16, &bytes, NULL), 0);
        assert_int_equal(bytes, 39ull * (50ull * 96768 * 2 + 10752 * 4));
        (void) h3_layout_free(l);

        shape.n_conditions = 1;
        shape.conditions = &video;
        assert_int_equal(h3_layout_new(&full.config, &shape, NULL, &l, NULL), 0);
        s.layout = l;
        assert_int_equal(h3_mod_table_bytes(&full, &s, H3_COMPUTE_BF16, &bytes, NULL), 0);
        assert_int_equal(bytes, 41ull * (50 * 96768 + 10752) * 2);
        (void) h3_layout_free(l);
}

static void refused_step(const H3Model *m, const H3StepInput *in, const char *words) {
        const H3Range rows = {0, in->layout->rows}, heads = {0, m->config.heads};
        const H3Plan plan = {.ranks = 1, .row_tile = 1, .chunks = 1, .rows = &rows, .heads = &heads};
        const H3Rank rank = {.ops = lk_cpu_ops(LK_CPU_AUTO), .plan = &plan};
        Fault f = {};

        assert_int_equal(h3_step(&rank, m, in, NULL, NULL, NULL, &f), -EINVAL);
        assert_string_equal(f.name, FAULT_INTERNAL);
        assert_non_null(strstr(f.text, words));
}

static void table_of_something_else_is_refused(void **state) {
        CLEANUP(golden_model_freep) GoldenModel *m = golden_comfy(), *other = golden_comfy();
        CLEANUP(golden_case_freep) GoldenCase *k = golden_case_open("case_t2va_tiny", &m->model->config);
        H3ModSchedule s = schedule_of(k->layout);
        CLEANUP(h3_mod_table_freep) H3ModTable *table = make_table(m->model, &s, H3_COMPUTE_BF16);
        H3StepInput in = golden_input(k, H3_COMPUTE_F32, NULL);

        in.mod_table = table;
        in.sigma_video = sigmas_video[2];
        in.sigma_audio = sigmas_audio[2];
        refused_step(m->model, &in, "another arithmetic");
        in.compute = H3_COMPUTE_BF16;
        refused_step(other->model, &in, "another model");
        in.sigma_audio = 0.51f;
        refused_step(m->model, &in, "another schedule");
}

static void table_covers_the_steps_of_its_schedule(void **state) {
        CLEANUP(golden_model_freep) GoldenModel *m = golden_comfy();
        CLEANUP(golden_case_freep) GoldenCase *k = golden_case_open("case_t2va_tiny", &m->model->config);
        CLEANUP(golden_case_freep) GoldenCase *other = golden_case_open("case_ref2va_small", &m->model->config);
        H3ModSchedule s = {k->layout, sigmas_video, sigmas_audio, 3};
        CLEANUP(h3_mod_table_freep) H3ModTable *table = make_table(m->model, &s, H3_COMPUTE_BF16);
        H3StepInput in = golden_input(k, H3_COMPUTE_BF16, NULL);

        for (uint32_t i = 0; i < STEPS; i++) {
                in.sigma_video = sigmas_video[i];
                in.sigma_audio = sigmas_audio[i];
                assert_int_equal(h3_mod_table_covers(table, &in), i < 3);
        }
        in.sigma_video = sigmas_video[1]; /* both are there, each for itself */
        in.sigma_audio = sigmas_audio[2];
        assert_true(h3_mod_table_covers(table, &in));
        in.compute = H3_COMPUTE_F32;
        assert_false(h3_mod_table_covers(table, &in));
        in.compute = H3_COMPUTE_BF16;
        in.sigma_audio = 0.51f;
        assert_false(h3_mod_table_covers(table, &in));
        in.sigma_audio = sigmas_audio[2];
        in.layout = other->layout; /* conditions have a timestep of their own */
        assert_false(h3_mod_table_covers(table, &in));
        in.layout = k->layout;
        set_masks(m->model, k);
        assert_false(h3_mod_table_covers(table, &in));
}

static void table_bad_schedules_are_refused(void **state) {
        CLEANUP(golden_model_freep) GoldenModel *m = golden_comfy();
        CLEANUP(golden_case_freep) GoldenCase *k = golden_case_open("case_t2va_tiny", &m->model->config);
        const float bad[] = {0.5f, 1.5f};
        H3ModSchedule s = schedule_of(k->layout);
        H3ModTable *table = NULL;
        uint64_t bytes = 7;
        Fault f = {};

        s.steps = 0;
        assert_int_equal(h3_mod_table_bytes(m->model, &s, H3_COMPUTE_F32, &bytes, &f), -EINVAL);
        assert_string_equal(f.name, FAULT_INVALID_ARGUMENT);
        s = (H3ModSchedule){k->layout, sigmas_video, bad, 2};
        f = (Fault){};
        assert_int_equal(h3_mod_table_new(NULL, m->model, &s, H3_COMPUTE_F32, NULL, &table, &f), -EINVAL);
        assert_string_equal(f.name, FAULT_INVALID_ARGUMENT);
        assert_non_null(strstr(f.text, "1.5"));
        assert_null(table);
        assert_int_equal(bytes, 7);
}

static int stop_at_two(void *userdata, uint32_t done, uint32_t total) {
        *(uint32_t *) userdata = done;
        assert_int_equal(total, 3);
        return done == 2 ? -ECANCELED : 0;
}

static void table_hook_stops_after_a_block(void **state) {
        CLEANUP(golden_model_freep) GoldenModel *m = golden_comfy();
        CLEANUP(golden_case_freep) GoldenCase *k = golden_case_open("case_t2va_tiny", &m->model->config);
        H3Rank rank = {.ops = lk_cpu_ops(LK_CPU_AUTO)};
        H3ModSchedule s = schedule_of(k->layout);
        H3ModTable *table = NULL;
        uint32_t done = 0;
        Fault f = {};

        assert_int_equal(rank.ops->context_new(1, &rank.context), 0);
        assert_int_equal(h3_mod_table_new(&rank, m->model, &s, H3_COMPUTE_F32,
                                 &(H3StepHooks){.on_block = stop_at_two, .userdata = &done}, &table, &f),
                -ECANCELED);
        assert_int_equal(done, 2);
        assert_string_equal(f.name, FAULT_CANCELLED);
        assert_null(table);
        (void) rank.ops->context_free(rank.context);
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(table_t2va_same_bits),
                cmocka_unit_test(table_references_same_bits),
                cmocka_unit_test(table_masks_same_bits),
                cmocka_unit_test(table_curve_same_bits),
                cmocka_unit_test(table_int8_same_bits),
                cmocka_unit_test(table_weights_are_not_read_again),
                cmocka_unit_test(table_bytes_of_the_released_model_are_counted),
                cmocka_unit_test(table_of_something_else_is_refused),
                cmocka_unit_test(table_covers_the_steps_of_its_schedule),
                cmocka_unit_test(table_bad_schedules_are_refused),
                cmocka_unit_test(table_hook_stops_after_a_block),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
