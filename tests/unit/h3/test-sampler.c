/* SPDX-License-Identifier: Apache-2.0 */
#include "service/h3/sampler.h"

#include <errno.h>
#include <math.h>
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

static const char *const files[] = {
        "traj_euler_4", "traj_euler_8", "traj_euler_4_turbo", "traj_euler_4_ref2va_small"};
static const char *const multistep_files[] = {"traj_res_multistep_4", "traj_res_multistep_8",
        "traj_res_multistep_perstream_4"};

static void euler_recorded_velocities_match(void **state) {
        for (size_t i = 0; i < ELEMENTSOF(files); i++) {
                run_recorded(files[i], "video");
                run_recorded(files[i], "audio");
        }
}

/* A trajectory's sampler, its sigmas borrowed from the file. */
static H3Sampler sampler_of(const GoldenCase *k) {
        static const char *const names[] = {"euler", "res_multistep", "res_multistep_perstream"};
        const char *name = st_header_meta(k->file->header, "sampler");
        H3Sampler s = {.n_video = k->n_video, .n_audio = k->n_audio};
        uint64_t n;
        Fault f = {};

        assert_non_null(name);
        while (strcmp(names[s.kind], name) != 0)
                assert_true(++s.kind < ELEMENTSOF(names));
        s.sigmas_video = golden_data(k->file, "sigmas_video", ST_F32, &n);
        s.sigmas_audio = golden_data(k->file, "sigmas_audio", ST_F32, NULL);
        s.steps = (uint32_t) n - 1;
        s.shift_video = golden_meta_float(k->file, "shift_video");
        s.shift_audio = golden_meta_float(k->file, "shift_audio");
        if (h3_sampler_check(&s, &f) < 0)
                fail_msg("%s", f.text);
        return s;
}

/* NaN where the sampler reads what the kind does not have. */
static H3SamplerState state_new(const H3Sampler *s) {
        H3SamplerState x = {
                .video = malloc(s->n_video * sizeof(float)), .audio = malloc(s->n_audio * sizeof(float))};

        assert_true(x.video && x.audio);
        if (h3_sampler_carries(s->kind))
                x.carried = malloc(s->n_audio * sizeof(float));
        if (h3_sampler_remembers(s->kind)) {
                x.denoised_video = malloc(s->n_video * sizeof(float));
                x.denoised_audio = malloc(s->n_audio * sizeof(float));
                assert_true(x.denoised_video && x.denoised_audio);
                memset(x.denoised_video, 0xff, s->n_video * sizeof(float));
                memset(x.denoised_audio, 0xff, s->n_audio * sizeof(float));
        }
        return x;
}

static void state_done(H3SamplerState *x) {
        free(x->video);
        free(x->audio);
        free(x->carried);
        free(x->denoised_video);
        free(x->denoised_audio);
}

static void check_state(const char *file, const H3Sampler *s, uint32_t step, const H3SamplerState *x,
        const Golden *g, double limit, double *worst) {
        check(file, "video", step, x->video, g, s->n_video, limit, worst);
        check(file, "audio", step, x->audio, g, s->n_audio, limit, worst);
        if (x->carried)
                check(file, "audio_carried", step, x->carried, g, s->n_audio, limit, worst);
}

/* m: NULL to use the recorded velocities. */
static void run_sampler(const char *file, const GoldenModel *m) {
        static const H3Config tiny = {
                .video_channels = 24, .audio_channels = 32, .patch_h = 2, .patch_w = 2, .text_dim = 160};
        CLEANUP(golden_case_freep) GoldenCase *k = golden_case_open(file, m ? &m->model->config : &tiny);
        H3Sampler s = sampler_of(k);
        CLEANUP(state_done) H3SamplerState a = state_new(&s), b = state_new(&s);
        double worst = 0;

        h3_sampler_start(&s, k->video, k->audio, &a);
        for (uint32_t i = 0; i < s.steps; i++) {
                CLEANUP_FREE float *v = NULL, *w = NULL;
                float sigma_video, sigma_audio;
                H3SamplerState next = b;

                h3_sampler_sigmas(&s, i, &sigma_video, &sigma_audio);
                if (m)
                        golden_step(m->model, k, H3_COMPUTE_F32, a.video, a.audio, sigma_video, sigma_audio,
                                NULL, &v, &w);
                h3_sampler_step(&s, i, &a, m ? v : recorded(k->file, "velocity", i, "video", s.n_video),
                        m ? w : recorded(k->file, "velocity", i, "audio", s.n_audio), &b);
                check_state(file, &s, i, &b, k->file, m ? MODEL_REL : SAMPLER_REL, &worst);
                b = a;
                a = next;
        }
        print_message("%s%s: %.2e\n", file, m ? " with our model" : "", worst);
}

static void multistep_recorded_velocities_match(void **state) {
        for (size_t i = 0; i < ELEMENTSOF(multistep_files); i++)
                run_sampler(multistep_files[i], NULL);
}

static void euler_own_model_follows_trajectories(void **state) {
        CLEANUP(golden_model_freep) GoldenModel *m = golden_comfy();

        for (size_t i = 0; i < ELEMENTSOF(files); i++)
                run_sampler(files[i], m);
}

static void multistep_own_model_follows_trajectories(void **state) {
        CLEANUP(golden_model_freep) GoldenModel *m = golden_comfy();

        for (size_t i = 0; i < ELEMENTSOF(multistep_files); i++)
                run_sampler(multistep_files[i], m);
}

/* One stream through the object is h3_euler(), to the bit: what earlier versions sampled, this one does. */
static void euler_object_same_bits(void **state) {
        const float sigmas[] = {1, 0.7f, 0.2f, 0}, x[] = {1, -2, 0.5f, 3}, v[] = {0.25f, 4, -1, 1.5f};
        const H3Sampler s = {
                .steps = 3, .sigmas_video = sigmas, .sigmas_audio = sigmas, .n_video = 4, .n_audio = 2};
        float a[4], b[4], c[2], d[2], expected[4];
        const H3SamplerState now = {.video = a, .audio = c}, next = {.video = b, .audio = d};

        h3_sampler_start(&s, x, x, &now);
        for (uint32_t i = 0; i < 3; i++) {
                h3_sampler_step(&s, i, &now, v, v, &next);
                h3_euler(a, v, sigmas[i], sigmas[i + 1], 4, expected);
                assert_memory_equal(b, expected, sizeof(expected));
                assert_memory_equal(d, expected, sizeof(d));
                memcpy(a, b, sizeof(a));
                memcpy(c, d, sizeof(c));
        }
}

/* The state of a step is all that the next one needs: a run that is taken up from a copy goes on with the
 * same bits. */
static void multistep_resumed_same_bits(void **state) {
        static const H3Config tiny = {
                .video_channels = 24, .audio_channels = 32, .patch_h = 2, .patch_w = 2, .text_dim = 160};

        for (size_t i = 0; i < ELEMENTSOF(multistep_files); i++) {
                CLEANUP(golden_case_freep) GoldenCase *k = golden_case_open(multistep_files[i], &tiny);
                H3Sampler s = sampler_of(k);
                CLEANUP(state_done)
                H3SamplerState a = state_new(&s),
                               b = state_new(&s), c = state_new(&s), d = state_new(&s);
                const float *video = recorded(k->file, "velocity", 1, "video", s.n_video),
                            *audio = recorded(k->file, "velocity", 1, "audio", s.n_audio);

                h3_sampler_start(&s, k->video, k->audio, &a);
                h3_sampler_step(&s, 0, &a, recorded(k->file, "velocity", 0, "video", s.n_video),
                        recorded(k->file, "velocity", 0, "audio", s.n_audio), &b);
                h3_sampler_step(&s, 1, &b, video, audio, &a);

                memcpy(c.video, b.video, s.n_video * sizeof(float));
                memcpy(c.audio, b.audio, s.n_audio * sizeof(float));
                memcpy(c.denoised_video, b.denoised_video, s.n_video * sizeof(float));
                memcpy(c.denoised_audio, b.denoised_audio, s.n_audio * sizeof(float));
                if (c.carried)
                        memcpy(c.carried, b.carried, s.n_audio * sizeof(float));
                h3_sampler_step(&s, 1, &c, video, audio, &d);
                assert_memory_equal(a.video, d.video, s.n_video * sizeof(float));
                assert_memory_equal(a.audio, d.audio, s.n_audio * sizeof(float));
                assert_memory_equal(a.denoised_audio, d.denoised_audio, s.n_audio * sizeof(float));
        }
}

/* ComfyUI's rule with a mask, in f64: the model sees held values where the pooled mask says so, the step
 * takes the clean latent for what the model should have said where the client's mask does, and at the end
 * that is what is there. */
static void run_masked(H3SamplerKind kind) {
        const float sigmas_video[] = {1, 0.9f, 0.6f, 0}, sigmas_audio[] = {1, 0.6923077f, 0.2727273f, 0};
        const float mask[] = {1, 0.3f, 0}, pooled[] = {1, 0.5f, 0}, clean[] = {4, 5, 6, 7, 8, 9},
                    held[] = {4.1f, 5.1f, 6.1f, 7.1f, 8.1f, 9.1f};
        const float x[] = {1, -1, 0.5f, 2, -0.25f, 0}, v[] = {0.5f, 1, -2, 0.125f, 3, -1};
        const H3SamplerMask video_mask = {3, mask, pooled, clean, held},
                            audio_mask = {3, mask, pooled, clean, clean};
        const H3Sampler s = {kind, 3, sigmas_video, sigmas_audio, 12, 3, 6, 6, &video_mask, &audio_mask};
        CLEANUP(state_done) H3SamplerState a = state_new(&s), b = state_new(&s);
        double old[6] = {}, y[6], shown[6];

        h3_sampler_start(&s, x, x, &a);
        for (int i = 0; i < 6; i++)
                y[i] = (double) x[i];
        for (uint32_t step = 0; step < 3; step++) {
                double from = (double) sigmas_video[step], to = (double) sigmas_video[step + 1];
                float input[6];
                H3SamplerState next = b;

                h3_sampler_input(&video_mask, a.video, 6, input);
                h3_sampler_step(&s, step, &a, v, v, &b);
                for (int i = 0; i < 6; i++) {
                        double m = (double) mask[i % 3], p = (double) pooled[i % 3], d;

                        shown[i] = p * y[i] + (1 - p) * (double) held[i];
                        assert_true(fabs(shown[i] - (double) input[i]) < 2e-6);
                        d = m * (shown[i] + from * (double) v[i]) + (1 - m) * (double) clean[i];
                        if (kind == H3_SAMPLER_EULER || step == 0 || to == 0)
                                y[i] = to / from * y[i] + (1 - to / from) * d;
                        else {
                                double h = log(from / to),
                                       c2 = log(from / (double) sigmas_video[step - 1]) / h;
                                double phi1 = expm1(-h) / -h, phi2 = (phi1 - 1) / -h;

                                y[i] = exp(-h) * y[i] + h * ((phi1 - phi2 / c2) * d + phi2 / c2 * old[i]);
                        }
                        old[i] = d;
                        assert_true(fabs(y[i] - (double) b.video[i]) < 4e-6);
                }
                b = a;
                a = next;
        }
        for (int i = 2; i < 6; i += 3) { /* kept */
                assert_true(fabsf(a.video[i] - clean[i]) < 1e-6f);
                assert_true(fabsf(a.audio[i] - clean[i]) < 1e-5f);
        }
}

static void masked_steps_match_the_rule(void **state) {
        run_masked(H3_SAMPLER_EULER);
        run_masked(H3_SAMPLER_RES_MULTISTEP);
        run_masked(H3_SAMPLER_RES_MULTISTEP_PERSTREAM);
}

/* Carried Euler steps (the first and the last one) are the stream's own (h3.md 4.4), with a mask, too. */
static void carried_first_step_is_the_streams_own(void **state) {
        const float sigmas_video[] = {0.9f, 0.6f, 0}, x[] = {1, -1, 0.5f, 2}, v[] = {0.5f, 1, -2, 0.125f};
        const float mask[] = {1, 0.25f}, clean[] = {4, 5, 6, 7};
        const H3SamplerMask audio_mask = {2, mask, mask, clean, clean};
        float sigmas_audio[3];

        h3_schedule_audio(12, 3, sigmas_video, 3, sigmas_audio);
        for (int masked = 0; masked < 2; masked++) {
                const H3SamplerMask *k = masked ? &audio_mask : NULL;
                const H3Sampler carried = {
                        H3_SAMPLER_RES_MULTISTEP, 2, sigmas_video, NULL, 12, 3, 4, 4, NULL, k};
                const H3Sampler own = {
                        H3_SAMPLER_EULER, 2, sigmas_video, sigmas_audio, 12, 3, 4, 4, NULL, k};
                CLEANUP(state_done)
                H3SamplerState a = state_new(&carried),
                               b = state_new(&carried), c = state_new(&own), d = state_new(&own);

                h3_sampler_start(&carried, x, x, &a);
                h3_sampler_start(&own, x, x, &c);
                h3_sampler_step(&carried, 0, &a, v, v, &b);
                h3_sampler_step(&own, 0, &c, v, v, &d);
                for (int i = 0; i < 4; i++)
                        if (fabsf(b.audio[i] - d.audio[i]) > 2e-6f)
                                fail_msg("%.9g, expected %.9g", (double) b.audio[i], (double) d.audio[i]);
        }
}

static void sampler_bad_values_are_refused(void **state) {
        const float sigmas[] = {1, 0.5f, 0}, wrong[] = {1, 1, 0};
        const H3Sampler good = {H3_SAMPLER_RES_MULTISTEP, 2, sigmas, NULL, 12, 3, 1, 1, NULL, NULL};
        H3Sampler s[5] = {good, good, good, good, good};
        static const char *const words[] = {
                "number 7", "sigmas_video[1]", "sigmas_audio[1]", "shifts", "has 1"};

        assert_int_equal(h3_sampler_check(&good, NULL), 0);
        s[0].kind = (H3SamplerKind) 7;
        s[1].sigmas_video = wrong;
        s[2].kind = H3_SAMPLER_EULER;
        s[2].sigmas_audio = wrong;
        s[3].shift_audio = 0;
        s[4].steps = 0;
        for (size_t i = 0; i < ELEMENTSOF(s); i++) {
                Fault f = {};

                assert_int_equal(h3_sampler_check(s + i, &f), -EINVAL);
                assert_string_equal(f.name, FAULT_INVALID_ARGUMENT);
                if (!strstr(f.text, words[i]))
                        fail_msg("no '%s' in: %s", words[i], f.text);
        }
}

static void audio_sigmas_follow_the_videos(void **state) {
        for (size_t i = 0; i < ELEMENTSOF(multistep_files); i++) {
                CLEANUP(golden_freep) Golden *g = golden_open(multistep_files[i]);
                uint64_t n;
                const float *video = golden_data(g, "sigmas_video", ST_F32, &n);
                float audio[H3_STEPS_MAX + 1];

                h3_schedule_audio(golden_meta_float(g, "shift_video"), golden_meta_float(g, "shift_audio"),
                        video, n, audio);
                assert_memory_equal(audio, golden_data(g, "sigmas_audio", ST_F32, NULL), n * sizeof(float));
        }
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
                cmocka_unit_test(euler_object_same_bits),
                cmocka_unit_test(multistep_recorded_velocities_match),
                cmocka_unit_test(multistep_own_model_follows_trajectories),
                cmocka_unit_test(multistep_resumed_same_bits),
                cmocka_unit_test(masked_steps_match_the_rule),
                cmocka_unit_test(carried_first_step_is_the_streams_own),
                cmocka_unit_test(sampler_bad_values_are_refused),
                cmocka_unit_test(audio_sigmas_follow_the_videos),
                cmocka_unit_test(trajectories_use_the_reference_schedule),
                cmocka_unit_test(euler_last_step_gives_the_clean_sample),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
