/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "service/shared/cleanup.h"
#include "tests/unit/h3/golden.h"

/* Whole steps of the tiny model against the published implementation. Limits: the golden data's README. */
#define F32_REL 5e-6
#define F32_LARGEST 3e-5
#define BF16_REL 2.5e-2
#define BF16_FACTOR 1.25

static Golden *expect_open(const char *name, const char *variant, const GoldenCase *k,
        const float **ret_video, const float **ret_audio) {
        char file[128];
        uint64_t n_video, n_audio;
        Golden *g;

        (void) snprintf(file, sizeof(file), "expect_%s.%s", name, variant);
        g = golden_open(file);
        *ret_video = golden_data(g, "video_velocity", ST_F32, &n_video);
        *ret_audio = golden_data(g, "audio_velocity", ST_F32, &n_audio);
        assert_int_equal(n_video, k->n_video);
        assert_int_equal(n_audio, k->n_audio);
        return g;
}

static GoldenCase *case_open(const char *name, const H3Model *m) {
        char file[128];

        (void) snprintf(file, sizeof(file), "case_%s", name);
        return golden_case_open(file, &m->config);
}

static void check_f32(const char *what, const float *got, const float *expected, uint64_t n) {
        double largest, rel = golden_distance(got, expected, n, &largest);

        print_message("%s: rel %.2e, largest %.2e\n", what, rel, largest);
        if (rel > F32_REL || largest > F32_LARGEST)
                fail_msg("%s is %.3g (rel) and %.3g (largest) from .f32; limits %g and %g", what, rel,
                        largest, F32_REL, F32_LARGEST);
}

static void check_bf16(const char *what, const float *got, const float *bf16, const float *f32, uint64_t n) {
        double own = golden_distance(got, f32, n, NULL), theirs = golden_distance(bf16, f32, n, NULL);
        double between = golden_distance(got, bf16, n, NULL);

        print_message("%s: %.2e from .f32 (%.2f of the published bf16's), %.2e from .bf16\n", what, own,
                own / theirs, between);
        if (own > BF16_FACTOR * theirs || between > BF16_REL)
                fail_msg("%s is %.3g from .f32 (the published bf16 is %.3g) and %.3g from .bf16", what, own,
                        theirs, between);
}

static void run_case_f32(const char *name) {
        CLEANUP(golden_model_freep) GoldenModel *m = golden_comfy();
        CLEANUP(golden_case_freep) GoldenCase *k = NULL;
        CLEANUP(golden_freep) Golden *e = NULL;
        CLEANUP_FREE float *video = NULL, *audio = NULL;
        const float *want_video, *want_audio;

        k = case_open(name, m->model);
        e = expect_open(name, "f32", k, &want_video, &want_audio);
        golden_step(m->model, k, H3_COMPUTE_F32, k->video, k->audio, k->sigma_video, k->sigma_audio, NULL,
                &video, &audio);
        check_f32("video velocity", video, want_video, k->n_video);
        check_f32("audio velocity", audio, want_audio, k->n_audio);
}

static void run_case_bf16(const char *name) {
        CLEANUP(golden_model_freep) GoldenModel *m = golden_comfy();
        CLEANUP(golden_case_freep) GoldenCase *k = NULL;
        CLEANUP(golden_freep) Golden *f32 = NULL, *bf16 = NULL;
        CLEANUP_FREE float *video = NULL, *audio = NULL;
        const float *video_f32, *audio_f32, *video_bf16, *audio_bf16;

        k = case_open(name, m->model);
        f32 = expect_open(name, "f32", k, &video_f32, &audio_f32);
        bf16 = expect_open(name, "bf16", k, &video_bf16, &audio_bf16);
        golden_step(m->model, k, H3_COMPUTE_BF16, k->video, k->audio, k->sigma_video, k->sigma_audio, NULL,
                &video, &audio);
        check_bf16("video velocity", video, video_bf16, video_f32, k->n_video);
        check_bf16("audio velocity", audio, audio_bf16, audio_f32, k->n_audio);
}

#define CASE_TESTS(name)                                                                                    \
        static void step_##name##_f32_matches(void **state) {                                               \
                run_case_f32(#name);                                                                        \
        }                                                                                                   \
        static void step_##name##_bf16_matches(void **state) {                                              \
                run_case_bf16(#name);                                                                       \
        }

CASE_TESTS(t2va_tiny)
CASE_TESTS(t2va_odd)
CASE_TESTS(t2va_long)
CASE_TESTS(fl2va_first)
CASE_TESTS(fl2va_last)
CASE_TESTS(fl2va_firstlast)
CASE_TESTS(fl2va_mid)
CASE_TESTS(ref2va_mixed)
CASE_TESTS(ref2va_small)

#define CASE_ENTRIES(name)                                                                                  \
        cmocka_unit_test(step_##name##_f32_matches), cmocka_unit_test(step_##name##_bf16_matches)

int main(void) {
        const struct CMUnitTest tests[] = {
                CASE_ENTRIES(t2va_tiny),
                CASE_ENTRIES(t2va_odd),
                CASE_ENTRIES(t2va_long),
                CASE_ENTRIES(fl2va_first),
                CASE_ENTRIES(fl2va_last),
                CASE_ENTRIES(fl2va_firstlast),
                CASE_ENTRIES(fl2va_mid),
                CASE_ENTRIES(ref2va_mixed),
                CASE_ENTRIES(ref2va_small),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
