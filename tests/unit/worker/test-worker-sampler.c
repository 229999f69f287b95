/* SPDX-License-Identifier: Apache-2.0 */
/* The worker program: samplers and masks, against published trajectories, and to the bit against the library
 * used directly. */

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "service/h3/mask.h"
#include "service/h3/noise.h"
#include "service/h3/sampler.h"
#include "service/shared/cleanup.h"
#include "tests/unit/worker/broker.h"

#define ARENA (1 << 18)
#define N_VIDEO (24u * 2 * 4 * 4)
#define N_AUDIO (32u * 2 * 8)
#define STEPS 4u

static Broker *open_with(const Arenas *a) {
        Broker *b = broker_open(1);

        broker_load_model(b, 1, NULL);
        broker_give_arenas(b, 2, a);
        return b;
}

static void check(const float *have, const Golden *g, uint32_t step, const char *what, uint64_t n) {
        char name[48];

        (void) snprintf(name, sizeof(name), "step.%u.%s", step, what);
        assert_near(have, g, name, n, 2e-5);
}

static void run_trajectory(const char *name, uint32_t schedule) {
        CLEANUP(golden_freep) Golden *traj = golden_open(name);
        CLEANUP(arenas_freep) Arenas *a = arenas_new(ARENA, ARENA);
        CLEANUP(broker_freep) Broker *b = open_with(a);
        WireMessage open, ready;
        bool carried;

        open = job_of_golden(b, 5, a, name);
        if (schedule != WIRE_SCHEDULE_GIVEN) {
                open.job_open.steps = (uint32_t) open.job_open.sigmas_video.shape[0] - 1;
                open.job_open.schedule = schedule;
        }
        open.job_open.flags = WIRE_JOB_KEEP_STEPS;
        carried = open.job_open.sampler == WIRE_SAMPLER_RES_MULTISTEP;
        broker_open_job(b, &open, &ready);
        assert_int_equal(ready.job_ready.slot_stride, carried ? 12288 : 10240);
        assert_int_equal(ready.job_ready.carried.n_dims, carried ? 3 : 0);
        assert_int_equal(ready.job_ready.carried.size, carried ? 2048 : 0);
        for (uint32_t i = 0; i < ready.job_ready.steps; i++)
                broker_step(b, 5, i);
        for (uint32_t i = 0; i < ready.job_ready.steps; i++) { /* all of them are kept */
                check(slot_video(a, &ready, i + 1), traj, i, "video", N_VIDEO);
                check(slot_audio(a, &ready, i + 1), traj, i, "audio", N_AUDIO);
                if (carried)
                        check(slot_carried(a, &ready, i + 1), traj, i, "audio_carried", N_AUDIO);
        }
}

static void sample_multistep_matches_reference_step_by_step(void **state) {
        static const char *const names[] = {"traj_res_multistep_4", "traj_res_multistep_8",
                "traj_res_multistep_perstream_4"};

        for (size_t i = 0; i < ELEMENTSOF(names); i++)
                run_trajectory(names[i], WIRE_SCHEDULE_GIVEN);
        run_trajectory("traj_res_multistep_4", WIRE_SCHEDULE_SIMPLE);
}

/* A sampler by hand. */
typedef struct Reference {
        GoldenModel *model;
        GoldenCase *k;
        H3Sampler sampler;
        H3SamplerMask video_mask, audio_mask;
        H3SamplerState now, next;
        float arrays[2][3 * N_AUDIO + 2 * N_VIDEO];
        float video[N_VIDEO], audio[64 * 8], pooled_video[32], pooled_audio[N_AUDIO];
        float held_video[N_VIDEO];
} Reference;

static H3SamplerState state_in(float *x) {
        return (H3SamplerState){x, x + N_VIDEO, x + N_VIDEO + N_AUDIO, x + N_VIDEO + 2 * N_AUDIO,
                x + 2 * N_VIDEO + 2 * N_AUDIO};
}

static void reference_free(Reference **r) {
        (void) golden_model_free((*r)->model);
        (void) golden_case_free((*r)->k);
        free(*r);
}

static Reference *reference_new(const char *name, const WireJobOpen *j, const Arenas *a) {
        Reference *r = calloc(1, sizeof(*r));

        assert_non_null(r);
        r->model = golden_comfy();
        r->k = golden_case_open(name, &r->model->model->config);
        r->now = state_in(r->arrays[0]);
        r->next = state_in(r->arrays[1]);
        r->sampler = (H3Sampler){
                .kind = (H3SamplerKind) j->sampler,
                .steps = STEPS,
                .sigmas_video = golden_data(r->k->file, "sigmas_video", ST_F32, NULL),
                .sigmas_audio = golden_data(r->k->file, "sigmas_audio", ST_F32, NULL),
                .shift_video = 12,
                .shift_audio = 3,
                .n_video = N_VIDEO,
                .n_audio = N_AUDIO,
        };
        memcpy(r->video, r->k->video, sizeof(r->video));
        memcpy(r->audio, r->k->audio, sizeof(r->audio));
        return r;
}

/* Masks as the request has them; noise: of the kept video. */
static void reference_mask(Reference *r, const float *video, const float *clean_video, const float *noise,
        const float *audio, const float *clean_audio, uint64_t audio_channels) {
        const H3Grid g = {2, 4, 4};

        assert_int_equal(h3_mask_pool_video(&tiny_config, &g, video, r->pooled_video, NULL), 0);
        assert_int_equal(h3_mask_pool_audio(audio_channels, 8, audio, r->pooled_audio, NULL), 0);
        assert_int_equal(h3_layout_set_masks(r->k->layout, &r->model->model->config, r->pooled_video,
                                 r->pooled_audio, NULL),
                0);
        for (uint64_t i = 16; i < 16 * audio_channels; i++)
                r->pooled_audio[i] = r->pooled_audio[i % 16];
        h3_noise_mix(clean_video, noise, N_VIDEO, r->held_video);
        r->video_mask = (H3SamplerMask){32, video, r->pooled_video, clean_video, r->held_video};
        r->audio_mask =
                (H3SamplerMask){16 * audio_channels, audio, r->pooled_audio, clean_audio, clean_audio};
        r->sampler.video_mask = &r->video_mask;
        r->sampler.audio_mask = &r->audio_mask;
}

static void reference_step(Reference *r, uint32_t step) {
        CLEANUP_FREE float *v = NULL, *w = NULL;
        float video[N_VIDEO], audio[N_AUDIO], sigma_video, sigma_audio;
        H3SamplerState next = r->next;

        if (step == 0)
                h3_sampler_start(&r->sampler, r->video, r->audio, &r->now);
        h3_sampler_sigmas(&r->sampler, step, &sigma_video, &sigma_audio);
        h3_sampler_input(r->sampler.video_mask, r->now.video, N_VIDEO, video);
        h3_sampler_input(r->sampler.audio_mask, r->now.audio, N_AUDIO, audio);
        golden_step(
                r->model->model, r->k, H3_COMPUTE_F32, video, audio, sigma_video, sigma_audio, NULL, &v, &w);
        h3_sampler_step(&r->sampler, step, &r->now, v, w, &r->next);
        r->next = r->now;
        r->now = next;
}

static void assert_slot(const Arenas *a, const WireMessage *ready, uint32_t k, const Reference *r) {
        const float *denoised = slot_audio(a, ready, k) + N_AUDIO;

        assert_memory_equal(slot_video(a, ready, k), r->now.video, N_VIDEO * 4);
        assert_memory_equal(slot_audio(a, ready, k), r->now.audio, N_AUDIO * 4);
        if (r->sampler.kind == H3_SAMPLER_RES_MULTISTEP) {
                assert_memory_equal(slot_carried(a, ready, k), r->now.carried, N_AUDIO * 4);
                denoised += N_AUDIO;
        }
        if (r->sampler.kind != H3_SAMPLER_EULER) {
                assert_memory_equal(denoised, r->now.denoised_video, N_VIDEO * 4);
                assert_memory_equal(denoised + N_VIDEO, r->now.denoised_audio, N_AUDIO * 4);
        }
}

/* Some of each frame is kept, some is halfway; whole channels of sound. */
static void make_masks(float *video, float *audio, uint64_t channels) {
        for (unsigned i = 0; i < 32; i++)
                video[i] = i % 16 < 6 ? 0 : i % 4 == 1 ? 0.37f : 1;
        for (unsigned i = 0; i < 16 * channels; i++)
                audio[i] = i % 16 < 5 ? 0 : i % 8 == 6 ? 0.6f : i / 16 % 3 == 1 ? 0.2f : 1;
}

static void run_masked(WireSampler sampler, uint64_t channels, bool made_noise) {
        static const uint64_t video_shape[] = {2, 4, 4}, audio_shape[] = {32, 2, 8};
        CLEANUP(arenas_freep) Arenas *a = arenas_new(ARENA, ARENA);
        CLEANUP(broker_freep) Broker *b = open_with(a);
        float mask_video[32], mask_audio[N_AUDIO], clean_video[N_VIDEO], clean_audio[N_AUDIO];
        CLEANUP(reference_free) Reference *r = NULL;
        WireMessage open, ready;
        WireJobOpen *j = &open.job_open;

        open = job_of_golden(b, 5, a, "traj_euler_4");
        j->sampler = sampler;
        j->shift_video = 12;
        j->shift_audio = 3;
        for (unsigned i = 0; i < N_VIDEO; i++)
                clean_video[i] = (float) (i % 17) / 8 - 1;
        for (unsigned i = 0; i < N_AUDIO; i++)
                clean_audio[i] = (float) (i % 13) / 6 - 1;
        make_masks(mask_video, mask_audio, channels);
        j->mask_video = arenas_put(a, ST_F32, 3, video_shape, mask_video);
        j->mask_audio = channels > 1 ? arenas_put(a, ST_F32, 3, audio_shape, mask_audio)
                                     : arenas_put(a, ST_F32, 2, audio_shape + 1, mask_audio);
        r = reference_new("traj_euler_4", j, a);
        if (made_noise) { /* what is kept are the latents */
                const H3Shape shape = {.frames = 2, .height = 4, .width = 4, .audio = 8};
                H3Noise g;

                h3_noise_init(&g, 9);
                assert_int_equal(
                        h3_noise_target(&g, H3_NOISE_COMFY, &tiny_config, &shape, r->video, r->audio), 0);
                j->noise = WIRE_NOISE_COMFY;
                j->seed = 9;
                j->video = arenas_put_like(a, &j->video, clean_video);
                j->audio = arenas_put_like(a, &j->audio, clean_audio);
        } else {
                j->clean_video = arenas_put_like(a, &j->video, clean_video);
                j->clean_audio = arenas_put_like(a, &j->audio, clean_audio);
        }
        reference_mask(r, mask_video, clean_video, r->video, mask_audio, clean_audio, channels);

        broker_open_job(b, &open, &ready);
        memset(a->input, 0xff, a->input_size);
        for (uint32_t i = 0; i < STEPS; i++) {
                broker_step(b, 5, i);
                reference_step(r, i);
                assert_slot(a, &ready, i + 1, r);
        }
}

static void sample_masked_same_bits_as_the_library(void **state) {
        for (WireSampler s = WIRE_SAMPLER_EULER; s <= WIRE_SAMPLER_RES_MULTISTEP_PERSTREAM; s++) {
                run_masked(s, 1, false);
                run_masked(s, 32, false);
        }
        run_masked(WIRE_SAMPLER_EULER, 1, true);
        run_masked(WIRE_SAMPLER_RES_MULTISTEP, 32, true);
}

static void sample_mask_of_ones_same_bits_as_none(void **state) {
        static const uint64_t video_shape[] = {2, 4, 4}, audio_shape[] = {2, 8};
        CLEANUP(arenas_freep) Arenas *a = arenas_new(ARENA, ARENA);
        CLEANUP(broker_freep) Broker *b = open_with(a);
        float video[N_VIDEO], audio[N_AUDIO], ones[32];
        WireMessage open, ready;

        open = job_of_golden(b, 5, a, "traj_res_multistep_4");
        for (unsigned i = 0; i < 32; i++)
                ones[i] = 1;
        for (unsigned masked = 0; masked < 2; masked++) {
                open.header.job = 5 + masked;
                if (masked) {
                        open.job_open.mask_video = arenas_put(a, ST_F32, 3, video_shape, ones);
                        open.job_open.mask_audio = arenas_put(a, ST_F32, 2, audio_shape, ones);
                        open.job_open.clean_video = open.job_open.video;
                        open.job_open.clean_audio = open.job_open.audio;
                }
                broker_open_job(b, &open, &ready);
                for (uint32_t i = 0; i < STEPS; i++)
                        broker_step(b, 5 + masked, i);
                if (masked) {
                        assert_memory_equal(slot_video(a, &ready, STEPS), video, sizeof(video));
                        assert_memory_equal(slot_audio(a, &ready, STEPS), audio, sizeof(audio));
                }
                memcpy(video, slot_video(a, &ready, STEPS), sizeof(video));
                memcpy(audio, slot_audio(a, &ready, STEPS), sizeof(audio));
        }
}

/* The latents of a step are what the model sees: a mask changes timesteps and velocities only. */
static void step_masked_same_bits_as_the_library(void **state) {
        static const uint64_t video_shape[] = {7, 4, 4}, audio_shape[] = {2, 37};
        CLEANUP(arenas_freep) Arenas *a = arenas_new(ARENA, ARENA);
        CLEANUP(broker_freep) Broker *b = open_with(a);
        CLEANUP(golden_model_freep) GoldenModel *m = golden_comfy();
        CLEANUP(golden_case_freep) GoldenCase *k = golden_case_open("case_fl2va_mid", &m->model->config);
        CLEANUP_FREE float *v = NULL, *w = NULL;
        float mask_video[7 * 16], mask_audio[2 * 37];
        WireMessage open, ready;

        for (unsigned i = 0; i < ELEMENTSOF(mask_video); i++)
                mask_video[i] = i < 32 ? 0 : (float) (i % 5) / 4;
        for (unsigned i = 0; i < ELEMENTSOF(mask_audio); i++)
                mask_audio[i] = i % 3 == 0 ? 0.4f : 1;
        open = job_of_golden(b, 5, a, "case_fl2va_mid");
        open.job_open.mask_video = arenas_put(a, ST_F32, 3, video_shape, mask_video);
        open.job_open.mask_audio = arenas_put(a, ST_F32, 2, audio_shape, mask_audio);
        broker_open_job(b, &open, &ready);
        broker_step(b, 5, 0);

        assert_int_equal(h3_layout_set_masks(k->layout, &m->model->config, mask_video, mask_audio, NULL), 0);
        golden_step(m->model, k, H3_COMPUTE_F32, k->video, k->audio, k->sigma_video, k->sigma_audio, NULL,
                &v, &w);
        assert_memory_equal(slot_video(a, &ready, 1), v, k->n_video * sizeof(float));
        assert_memory_equal(slot_audio(a, &ready, 1), w, k->n_audio * sizeof(float));
        for (unsigned i = 0; i < 32; i++) /* kept: no velocity */
                assert_true(slot_video(a, &ready, 1)[i] == 0);
}

/* All steps are queued; the model is closed while they run. What was made of it for the job stays whole. */
static void sample_model_closed_while_its_steps_run_same_bits(void **state) {
        float video[2][N_VIDEO], audio[2][N_AUDIO];

        for (unsigned closed = 0; closed < 2; closed++) {
                CLEANUP(arenas_freep) Arenas *a = arenas_new(ARENA, ARENA);
                CLEANUP(broker_freep) Broker *b = open_with(a);
                WireMessage open, ready;

                open = job_of_golden(b, 5, a, "traj_res_multistep_8");
                broker_open_job(b, &open, &ready);
                for (uint32_t i = 0; i < 8; i++)
                        broker_say(b, WIRE_STEP, 5, i);
                for (uint32_t i = 0; i < 8; i++) {
                        broker_expect(b, WIRE_STEP_DONE, 5, NULL);
                        if (closed && i == 1)
                                broker_say(b, WIRE_MODEL_CLOSE, 1, 0);
                }
                memcpy(video[closed], slot_video(a, &ready, 8), sizeof(video[closed]));
                memcpy(audio[closed], slot_audio(a, &ready, 8), sizeof(audio[closed]));
        }
        assert_memory_equal(video[1], video[0], sizeof(video[0]));
        assert_memory_equal(audio[1], audio[0], sizeof(audio[0]));
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(sample_multistep_matches_reference_step_by_step),
                cmocka_unit_test(sample_masked_same_bits_as_the_library),
                cmocka_unit_test(sample_mask_of_ones_same_bits_as_none),
                cmocka_unit_test(step_masked_same_bits_as_the_library),
                cmocka_unit_test(sample_model_closed_while_its_steps_run_same_bits),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
