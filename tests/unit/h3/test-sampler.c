/* SPDX-License-Identifier: Apache-2.0 */
#include "service/h3/sampler.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "service/h3/schedule.h"
#include "service/shared/cleanup.h"
#include "tests/unit/h3/golden.h"

#define SAMPLER_REL 1e-6
#define MODEL_REL 2e-5

/* A stream's recorded values: "velocity.3.video", "step.3.video". */
static const float *recorded(
        const Golden *g, const char *kind, uint32_t step, const char *stream, uint64_t n) {
        const float *values;
        uint64_t there;
        char name[64];

        (void) snprintf(name, sizeof(name), "%s.%u.%s", kind, step, stream);
        values = golden_data(g, name, ST_F32, &there);
        assert_int_equal(there, n);
        return values;
}

static void check(const char *file, const char *stream, uint32_t step, const float *x, const Golden *g,
        uint64_t n, double limit, double *worst) {
        double rel = golden_distance(x, recorded(g, "step", step, stream, n), n, NULL);

        if (rel > limit)
                fail_msg("%s: %s after step %u is %.3g from the recorded one, limit %g", file, stream, step,
                        rel, limit);
        if (rel > *worst)
                *worst = rel;
}

static void run_recorded(const char *file, const char *stream) {
        CLEANUP(golden_freep) Golden *g = golden_open(file);
        char sigmas_name[32];
        uint64_t n, n_sigmas;
        const float *sigmas, *x = golden_data(g, stream, ST_F32, &n);
        CLEANUP_FREE float *a = malloc(n * sizeof(float)), *b = malloc(n * sizeof(float));
        double worst = 0;

        assert_true(a && b);
        (void) snprintf(sigmas_name, sizeof(sigmas_name), "sigmas_%s", stream);
        sigmas = golden_data(g, sigmas_name, ST_F32, &n_sigmas);
        memcpy(a, x, n * sizeof(float));
        for (uint32_t i = 0; i + 1 < n_sigmas; i++) {
                h3_euler(a, recorded(g, "velocity", i, stream, n), sigmas[i], sigmas[i + 1], n, b);
                check(file, stream, i, b, g, n, SAMPLER_REL, &worst);
                memcpy(a, b, n * sizeof(float));
        }
        print_message("%s %s: %.2e\n", file, stream, worst);
}

static const char *const files[] = {"traj_euler_4", "traj_euler_8", "traj_euler_4_turbo"};

static void euler_recorded_velocities_match(void **state) {
        for (size_t i = 0; i < ELEMENTSOF(files); i++) {
                run_recorded(files[i], "video");
                run_recorded(files[i], "audio");
        }
}

static void run_own_model(const char *file) {
        CLEANUP(golden_model_freep) GoldenModel *m = golden_comfy();
        CLEANUP(golden_case_freep) GoldenCase *k = golden_case_open(file, &m->model->config);
        uint64_t n_sigmas;
        const float *sigma_video = golden_data(k->file, "sigmas_video", ST_F32, &n_sigmas);
        const float *sigma_audio = golden_data(k->file, "sigmas_audio", ST_F32, NULL);
        CLEANUP_FREE float *video = malloc(k->n_video * sizeof(float)),
                           *audio = malloc(k->n_audio * sizeof(float));
        CLEANUP_FREE float *next_video = malloc(k->n_video * sizeof(float)),
                           *next_audio = malloc(k->n_audio * sizeof(float));
        double worst = 0;

        assert_true(video && audio && next_video && next_audio);
        memcpy(video, k->video, k->n_video * sizeof(float));
        memcpy(audio, k->audio, k->n_audio * sizeof(float));
        for (uint32_t i = 0; i + 1 < n_sigmas; i++) {
                CLEANUP_FREE float *v = NULL, *a = NULL;

                golden_step(m->model, k, H3_COMPUTE_F32, video, audio, sigma_video[i], sigma_audio[i], NULL,
                        &v, &a);
                h3_euler(video, v, sigma_video[i], sigma_video[i + 1], k->n_video, next_video);
                h3_euler(audio, a, sigma_audio[i], sigma_audio[i + 1], k->n_audio, next_audio);
                check(file, "video", i, next_video, k->file, k->n_video, MODEL_REL, &worst);
                check(file, "audio", i, next_audio, k->file, k->n_audio, MODEL_REL, &worst);
                memcpy(video, next_video, k->n_video * sizeof(float));
                memcpy(audio, next_audio, k->n_audio * sizeof(float));
        }
        print_message("%s with our model: %.2e\n", file, worst);
}

static void euler_own_model_follows_trajectories(void **state) {
        for (size_t i = 0; i < ELEMENTSOF(files); i++)
                run_own_model(files[i]);
}

static void trajectories_use_the_reference_schedule(void **state) {
        for (size_t i = 0; i < ELEMENTSOF(files); i++) {
                CLEANUP(golden_freep) Golden *g = golden_open(files[i]);
                float sigmas[H3_STEPS_MAX + 1];
                uint64_t n_sigmas;
                const float *expected = golden_data(g, "sigmas_audio", ST_F32, &n_sigmas);
                uint32_t n;
                Fault f = {};

                assert_int_equal(h3_schedule(H3_SCHEDULE_REFERENCE, (uint32_t) n_sigmas - 1,
                                         golden_meta_float(g, "shift_audio"), sigmas, &n, &f),
                        0);
                assert_int_equal(n + 1, n_sigmas);
                assert_memory_equal(sigmas, expected, n_sigmas * sizeof(float));
        }
}

static void euler_last_step_gives_the_clean_sample(void **state) {
        const float x[] = {1, -2, 0.5f}, v[] = {0.25f, 4, -1};
        float ret[3];

        h3_euler(x, v, 0.5f, 0, 3, ret);
        assert_true(ret[0] == 1.125f && ret[1] == 0 && ret[2] == 0);
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(euler_recorded_velocities_match),
                cmocka_unit_test(euler_own_model_follows_trajectories),
                cmocka_unit_test(trajectories_use_the_reference_schedule),
                cmocka_unit_test(euler_last_step_gives_the_clean_sample),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
