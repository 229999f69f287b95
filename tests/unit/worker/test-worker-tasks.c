/* SPDX-License-Identifier: Apache-2.0 */
/* The worker program: tasks. Conditions, who draws the noise, which partition, plans. */

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "service/h3/noise.h"
#include "service/shared/cleanup.h"
#include "tests/unit/worker/broker.h"

#define ARENA (1 << 19)
#define N_VIDEO (24u * 2 * 4 * 4)
#define N_AUDIO (32u * 2 * 8)
#define NOISE_LARGEST 2e-6 /* torch's own f32 arithmetic */

static Broker *open_with(const Arenas *a) {
        Broker *b = broker_open(1);

        broker_load_model(b, 1, NULL);
        broker_give_arenas(b, 2, a);
        return b;
}

static void run_case(Broker *b, Arenas *a, uint64_t job, const char *name) {
        CLEANUP(golden_freep) Golden *want = NULL;
        WireMessage open, ready;
        char file[64];

        (void) snprintf(file, sizeof(file), "case_%s", name);
        open = job_of_golden(b, job, a, file);
        broker_open_job(b, &open, &ready);
        broker_step(b, job, 0);

        (void) snprintf(file, sizeof(file), "expect_%s.f32", name);
        want = golden_open(file);
        assert_near(slot_video(a, &ready, 1), want, "video_velocity", open.job_open.video.size / 4, 5e-6);
        assert_near(slot_audio(a, &ready, 1), want, "audio_velocity", open.job_open.audio.size / 4, 5e-6);
        broker_say(b, WIRE_JOB_CLOSE, job, 0);
}

static void step_conditions_match_reference(void **state) {
        static const char *const cases[] = {
                "fl2va_first", "fl2va_firstlast", "fl2va_last", "fl2va_mid", "ref2va_mixed", "ref2va_small"};
        CLEANUP(arenas_freep) Arenas *a = arenas_new(ARENA, ARENA);
        CLEANUP(broker_freep) Broker *b = open_with(a);

        for (size_t i = 0; i < ELEMENTSOF(cases); i++)
                run_case(b, a, 5 + i, cases[i]);
}

static void sample_references_follow_trajectory(void **state) {
        CLEANUP(arenas_freep) Arenas *a = arenas_new(ARENA, ARENA);
        CLEANUP(golden_freep) Golden *traj = golden_open("traj_euler_4_ref2va_small");
        CLEANUP(broker_freep) Broker *b = open_with(a);
        WireMessage open, ready;

        open = job_of_golden(b, 5, a, "traj_euler_4_ref2va_small");
        broker_open_job(b, &open, &ready);
        assert_int_equal(ready.job_ready.rows, 49);
        memset(a->input, 0xff, a->input_size); /* all of it was copied */
        for (uint32_t i = 0; i < 4; i++) {
                char name[32];

                broker_step(b, 5, i);
                (void) snprintf(name, sizeof(name), "step.%u.video", i);
                assert_near(slot_video(a, &ready, i + 1), traj, name, N_VIDEO, 2e-5);
                (void) snprintf(name, sizeof(name), "step.%u.audio", i);
                assert_near(slot_audio(a, &ready, i + 1), traj, name, N_AUDIO, 2e-5);
        }
}

/* The conditions' noise as a job with given ones has it, made here. */
static void noise_by_hand(Arenas *a, WireJobOpen *j, uint32_t kind, uint64_t seed) {
        uint64_t full = j->video.shape[1];
        H3Noise g;

        h3_noise_init(&g, seed);
        for (uint32_t i = 0; i < j->n_conditions; i++)
                full += j->conditions[i].frames;
        for (uint32_t i = 0; i < j->n_conditions; i++) {
                WireCondition *w = &j->conditions[i];
                const H3Grid grid = {w->frames, w->height, w->width};
                uint64_t n = 24 * w->frames * w->height * w->width;
                CLEANUP_FREE float *noise = malloc(n * sizeof(float) + 1),
                                   *z = malloc(n * sizeof(float) + 1);

                if (n == 0)
                        continue;
                assert_true(noise && z);
                if (kind != WIRE_NOISE_DIFFUSERS)
                        h3_noise_init(&g, seed);
                if (kind == WIRE_NOISE_COMFY)
                        assert_int_equal(h3_noise_condition_comfy(&g, &tiny_config, &grid, noise), 0);
                else if (kind == WIRE_NOISE_OFFICIAL)
                        h3_noise_condition_official(&g, &tiny_config, &grid, full, noise);
                else
                        h3_noise_draw(&g, n, noise);
                memcpy(z, a->input + w->video_offset, n * sizeof(float));
                h3_noise_mix(z, noise, n, z);
                w->video_offset = arenas_put_floats(a, n, z);
        }
}

static void run_condition_noise(Broker *b, Arenas *a, const char *name, uint32_t kind, uint64_t id) {
        uint64_t n_video, n_audio;
        CLEANUP_FREE float *video = NULL, *audio = NULL;
        WireMessage open, made, ready;

        open = job_of_golden(b, id, a, name);
        n_video = open.job_open.video.size;
        n_audio = open.job_open.audio.size;
        made = open;
        made.job_open.condition_noise = kind;
        made.job_open.seed = 42;
        broker_open_job(b, &made, &ready);
        broker_step(b, id, 0);
        video = malloc(n_video);
        audio = malloc(n_audio);
        assert_true(video && audio);
        memcpy(video, slot_video(a, &ready, 1), n_video);
        memcpy(audio, slot_audio(a, &ready, 1), n_audio);
        broker_say(b, WIRE_JOB_CLOSE, id, 0);

        broker_open_job(b, &open, &ready); /* without any */
        broker_step(b, id, 0);
        assert_memory_not_equal(slot_video(a, &ready, 1), video, n_video);
        broker_say(b, WIRE_JOB_CLOSE, id, 0);

        noise_by_hand(a, &open.job_open, kind, 42);
        broker_open_job(b, &open, &ready);
        broker_step(b, id, 0);
        assert_memory_equal(slot_video(a, &ready, 1), video, n_video);
        assert_memory_equal(slot_audio(a, &ready, 1), audio, n_audio);
        broker_say(b, WIRE_JOB_CLOSE, id, 0);
}

static void step_condition_noise_is_the_programs(void **state) {
        for (uint32_t kind = WIRE_NOISE_COMFY; kind <= WIRE_NOISE_OFFICIAL; kind++) {
                CLEANUP(arenas_freep) Arenas *a = arenas_new(ARENA, ARENA);
                CLEANUP(broker_freep) Broker *b = open_with(a);

                run_condition_noise(b, a, "case_fl2va_mid", kind, 5);
                run_condition_noise(b, a, "case_ref2va_mixed", kind, 6);
        }
}

/* A long film and wide pictures: what the official program would draw for them is out of all proportion. */
static void step_official_noise_without_measure_refused(void **state) {
        const uint64_t n = 8200, video[] = {24, n, 1, 1}, audio[] = {32, 2, 1}, text[] = {1, 160};
        CLEANUP(arenas_freep) Arenas *a = arenas_new(1 << 21, 1 << 21);
        CLEANUP(broker_freep) Broker *b = open_with(a);
        CLEANUP_FREE float *zeros = calloc(24 * n, sizeof(float));
        WireMessage open;
        WireJobOpen *j = &open.job_open;

        assert_non_null(zeros);
        open = job_long(b, 5, a, 1);
        a->used = 0;
        j->text = arenas_put(a, ST_BF16, 2, text, zeros);
        j->video = arenas_put(a, ST_F32, 4, video, zeros);
        j->audio = arenas_put(a, ST_F32, 3, audio, zeros);
        j->condition_noise = WIRE_NOISE_OFFICIAL;
        j->n_conditions = 1;
        j->conditions[0] = (WireCondition){.kind = WIRE_CONDITION_IMAGE,
                .video_offset = arenas_put_floats(a, 24 * n, zeros),
                .frames = 1,
                .height = 1,
                .width = n};
        broker_send(b, &open, -EBADF);
        broker_expect_error(b, 5, FAULT_INVALID_TENSOR, "need 8201 frames of noise each");
        j->condition_noise = WIRE_NOISE_COMFY;
        broker_send(b, &open, -EBADF);
        broker_expect(b, WIRE_JOB_READY, 5, NULL);
}

static void assert_close(
        const char *what, const float *have, const Golden *g, const char *name, uint64_t n) {
        const float *want;
        uint64_t m;

        want = golden_data(g, name, ST_F32, &m);
        assert_int_equal(n, m);
        for (uint64_t i = 0; i < n; i++)
                if (!(fabs((double) have[i] - (double) want[i]) <= NOISE_LARGEST))
                        fail_msg("%s[%llu] is %g, expected %g", what, (unsigned long long) i,
                                (double) have[i], (double) want[i]);
}

/* The trajectory's own noise from its seed: with any latents, since its first sigmas are 1. */
static void run_noise(const char *name, uint32_t kind, uint64_t seed) {
        CLEANUP(arenas_freep) Arenas *a = arenas_new(ARENA, ARENA);
        CLEANUP(golden_freep) Golden *traj = golden_open(name);
        CLEANUP(broker_freep) Broker *b = open_with(a);
        WireMessage open, ready;
        uint32_t n;
        char step[32];

        open = job_of_golden(b, 5, a, name);
        open.job_open.noise = kind;
        open.job_open.seed = seed;
        for (uint64_t i = 0; i < N_VIDEO; i++) {
                const float large = 1e30f;

                memcpy(a->input + open.job_open.video.offset + 4 * i, &large, sizeof(large));
        }
        broker_open_job(b, &open, &ready);
        n = ready.job_ready.steps;
        broker_step(b, 5, 0); /* which draws it */
        assert_close("video", slot_video(a, &ready, 0), traj, "video", N_VIDEO);
        assert_close("audio", slot_audio(a, &ready, 0), traj, "audio", N_AUDIO);
        for (uint32_t i = 1; i < n; i++)
                broker_step(b, 5, i);
        (void) snprintf(step, sizeof(step), "step.%u.video", n - 1);
        assert_near(slot_video(a, &ready, n), traj, step, N_VIDEO, 2e-5);
        (void) snprintf(step, sizeof(step), "step.%u.audio", n - 1);
        assert_near(slot_audio(a, &ready, n), traj, step, N_AUDIO, 2e-5);
}

static void sample_noise_of_seed_follows_trajectory(void **state) {
        run_noise("traj_euler_4", WIRE_NOISE_DIFFUSERS, 42);
        run_noise(
                "traj_euler_4", WIRE_NOISE_DIFFUSERS, 42 + (UINT64_C(7) << 32)); /* the low 32 bits count */
        run_noise("traj_res_multistep_4", WIRE_NOISE_COMFY, 42);
}

/* One generator: the keyframe's noise comes first. Another program's conditions leave it as it was. */
static void sample_diffusers_draws_conditions_first(void **state) {
        CLEANUP(golden_freep) Golden *noise = golden_open("noise");
        CLEANUP(arenas_freep) Arenas *a = arenas_new(ARENA, ARENA);
        CLEANUP(broker_freep) Broker *b = open_with(a);
        float zeros[24 * 16] = {}, rows[N_AUDIO];
        WireMessage open, ready;
        WireJobOpen *j = &open.job_open;

        open = job_of_golden(b, 5, a, "traj_euler_4");
        j->noise = WIRE_NOISE_DIFFUSERS;
        j->condition_noise = WIRE_NOISE_DIFFUSERS;
        j->seed = 42;
        j->n_conditions = 1;
        j->conditions[0] = (WireCondition){.kind = WIRE_CONDITION_KEYFRAME,
                .video_offset = arenas_put_floats(a, ELEMENTSOF(zeros), zeros),
                .frames = 1,
                .height = 4,
                .width = 4};
        broker_open_job(b, &open, &ready);
        broker_step(b, 5, 0);
        assert_close("video", slot_video(a, &ready, 0), noise, "cond.seed42.diffusers.video_after", N_VIDEO);
        h3_audio_to_rows(&tiny_config, 8, slot_audio(a, &ready, 0), 0, 16, rows);
        assert_close("audio", rows, noise, "cond.seed42.diffusers.audio_rows_after", N_AUDIO);
        broker_say(b, WIRE_JOB_CLOSE, 5, 0);

        j->condition_noise = WIRE_NOISE_COMFY;
        broker_open_job(b, &open, &ready);
        broker_step(b, 5, 0);
        assert_close("video", slot_video(a, &ready, 0), noise, "full.seed42.T2H4W4A8.video", N_VIDEO);
        broker_say(b, WIRE_JOB_CLOSE, 5, 0);

        j->noise = WIRE_NOISE_COMFY;
        j->condition_noise = WIRE_NOISE_DIFFUSERS;
        broker_open_job(b, &open, &ready);
        broker_step(b, 5, 0);
        assert_close("video", slot_video(a, &ready, 0), noise, "full.seed42.T2H4W4A8.video", N_VIDEO);
        assert_close("audio", slot_audio(a, &ready, 0), noise, "full.seed42.T2H4W4A8.comfy.audio", N_AUDIO);
}

/* Below sigma 1 the start has a part of the latents, each stream by its own sigma. */
static void sample_start_below_one_keeps_part_of_the_latents(void **state) {
        CLEANUP(arenas_freep) Arenas *a = arenas_new(ARENA, ARENA);
        CLEANUP(broker_freep) Broker *b = open_with(a);
        const float sigmas_video[] = {0.75f, 0.5f, 0}, sigmas_audio[] = {0.25f, 0.125f, 0};
        const H3Shape shape = {.frames = 2, .height = 4, .width = 4, .audio = 8};
        float video[N_VIDEO], audio[N_AUDIO], latent;
        WireMessage open, ready;
        const uint64_t three = 3;
        H3Noise g;

        open = job_of_golden(b, 5, a, "traj_euler_4");
        open.job_open.sigmas_video = arenas_put(a, ST_F32, 1, &three, sigmas_video);
        open.job_open.sigmas_audio = arenas_put(a, ST_F32, 1, &three, sigmas_audio);
        open.job_open.noise = WIRE_NOISE_COMFY;
        open.job_open.seed = 7;
        broker_open_job(b, &open, &ready);
        broker_step(b, 5, 0);

        h3_noise_init(&g, 7);
        assert_int_equal(h3_noise_target(&g, H3_NOISE_COMFY, &tiny_config, &shape, video, audio), 0);
        for (uint64_t i = 0; i < N_VIDEO; i++) {
                memcpy(&latent, a->input + open.job_open.video.offset + 4 * i, 4);
                video[i] = 0.75f * video[i] + 0.25f * latent;
        }
        for (uint64_t i = 0; i < N_AUDIO; i++) {
                memcpy(&latent, a->input + open.job_open.audio.offset + 4 * i, 4);
                audio[i] = 0.25f * audio[i] + 0.75f * latent;
        }
        assert_memory_equal(slot_video(a, &ready, 0), video, sizeof(video));
        assert_memory_equal(slot_audio(a, &ready, 0), audio, sizeof(audio));
}

static void model_partition_refuses_the_other_task(void **state) {
        CLEANUP(arenas_freep) Arenas *a = arenas_new(ARENA, ARENA);
        CLEANUP(broker_freep) Broker *b = broker_open(1);
        WireMessage ready, keyframes, references;

        broker_load_file(b, 1, "fl2va", "dit/comfy.safetensors", &ready);
        assert_int_equal(ready.model_ready.kind, WIRE_MODEL_DENOISER);
        assert_string_equal(ready.model_ready.partition, "fl2va");
        broker_load_file(b, 7, "ref2va", "dit/comfy.safetensors", &ready);
        assert_string_equal(ready.model_ready.partition, "ref2va");
        broker_give_arenas(b, 2, a);

        keyframes = job_of_golden(b, 5, a, "case_fl2va_mid");
        references = job_of_golden(b, 6, a, "case_ref2va_small");
        broker_send(b, &references, -EBADF);
        broker_expect_error(b, 6, FAULT_INVALID_ARGUMENT, "of the fl2va partition");
        broker_send(b, &keyframes, -EBADF);
        broker_expect(b, WIRE_JOB_READY, 5, NULL);

        keyframes.job_open.model = references.job_open.model = 7;
        keyframes.header.job = 8;
        broker_send(b, &keyframes, -EBADF);
        broker_expect_error(b, 8, FAULT_INVALID_ARGUMENT, "of the ref2va partition");
        broker_send(b, &references, -EBADF);
        broker_expect(b, WIRE_JOB_READY, 6, NULL);
}

/* What it would take is said, nothing is written, no step runs. */
static void plan_only_touches_nothing(void **state) {
        static const char *const names[] = {"case_ref2va_small", "traj_res_multistep_4"};
        CLEANUP(arenas_freep) Arenas *a = arenas_new(ARENA, 1 << 16);
        CLEANUP(broker_freep) Broker *b = open_with(a);

        for (size_t i = 0; i < ELEMENTSOF(names); i++) {
                WireMessage open, planned, ready;

                open = job_of_golden(b, 5, a, names[i]);
                open.job_open.flags = WIRE_JOB_PLAN_ONLY;
                broker_open_job(b, &open, &planned);
                broker_say(b, WIRE_STEP, 5, 0);
                broker_expect_error(b, 5, FAULT_INTERNAL, "planned only");
                broker_say(b, WIRE_JOB_CLOSE, 5, 0);
                open.job_open.output_size = planned.job_ready.output_used - 1;
                broker_send(b, &open, -EBADF);
                broker_expect_error(b, 5, FAULT_DOES_NOT_FIT, "output arena");
                for (uint64_t k = 0; k < a->output_size; k++)
                        assert_int_equal(a->output[k], 0xa5);

                open.job_open.flags = 0;
                open.job_open.output_size++;
                broker_open_job(b, &open, &ready);
                planned.job_ready.header = ready.job_ready.header;
                assert_true(planned.job_ready.memory_bytes > 100000 && ready.job_ready.memory_bytes == 0);
                planned.job_ready.memory_bytes = 0; /* of what is only planned */
                assert_memory_equal(&planned.job_ready, &ready.job_ready, sizeof(ready.job_ready));
                broker_say(b, WIRE_JOB_CLOSE, 5, 0);
                memset(a->output, 0xa5, a->output_size);
        }
}

/* The plan of a film is that of its latents, which are not there yet. */
static void plan_unread_is_the_same_plan(void **state) {
        CLEANUP(arenas_freep) Arenas *a = arenas_new(ARENA, 1 << 16);
        CLEANUP(broker_freep) Broker *b = open_with(a);
        WireMessage open, read, unread;

        open = job_of_golden(b, 5, a, "traj_res_multistep_4");
        open.job_open.noise = WIRE_NOISE_COMFY;
        open.job_open.flags = WIRE_JOB_PLAN_ONLY;
        broker_open_job(b, &open, &read);
        broker_say(b, WIRE_JOB_CLOSE, 5, 0);

        memset(a->input + open.job_open.video.offset, 0xff, (size_t) open.job_open.video.size); /* NaN */
        memset(a->input + open.job_open.audio.offset, 0xff, (size_t) open.job_open.audio.size);
        broker_send(b, &open, -EBADF);
        broker_expect_error(b, 5, FAULT_INVALID_TENSOR, "video has NaN");
        open.job_open.flags |= WIRE_JOB_UNREAD;
        broker_open_job(b, &open, &unread);
        unread.job_ready.header = read.job_ready.header;
        assert_memory_equal(&unread.job_ready, &read.job_ready, sizeof(read.job_ready));
        broker_say(b, WIRE_JOB_CLOSE, 5, 0);
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(step_conditions_match_reference),
                cmocka_unit_test(sample_references_follow_trajectory),
                cmocka_unit_test(step_condition_noise_is_the_programs),
                cmocka_unit_test(step_official_noise_without_measure_refused),
                cmocka_unit_test(sample_noise_of_seed_follows_trajectory),
                cmocka_unit_test(sample_diffusers_draws_conditions_first),
                cmocka_unit_test(sample_start_below_one_keeps_part_of_the_latents),
                cmocka_unit_test(model_partition_refuses_the_other_task),
                cmocka_unit_test(plan_only_touches_nothing),
                cmocka_unit_test(plan_unread_is_the_same_plan),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
