/* SPDX-License-Identifier: Apache-2.0 */
/* Coding jobs on a device with memory of its own, played by the CPU backend: the bits of the plain one with as much or as
 * little memory as may be, and what stays there. */
#include "service/worker/coder.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "service/shared/cleanup.h"
#include "tests/unit/worker/coder-bench.h"
#include "tests/unit/worker/device-ops.h"

DEFINE_CLEANUP(Job *, job_unref)

#define PLENTY (UINT64_C(1) << 32)
#define ARENA (UINT64_C(16) << 20)
#define PROMPT "a red circle moves left over a dark blue background, low tone"

static uint64_t said_more; /* than the device has */

static int device_memory(uint64_t *ret_free, uint64_t *ret_total) {
        *ret_total = device_sim.limit + said_more;
        *ret_free = device_sim.limit - device_sim.used + said_more;
        return 0;
}

/* ---- jobs ---- */

enum { CONDITIONER = 1, VIDEO, VIDEO_ORIGINAL, AUDIO, AUDIO_DEMO, MODELS };

static const char *const video_original[] = {"tests/data/vae/video/config.diffusers.json:config.json",
        "tests/data/vae/video/model.original.safetensors", NULL};
static const char *const audio_demo[] = {
        "tests/demo-model/audio_vae/config.json", "tests/demo-model/audio_vae/diffusion_pytorch_model.safetensors", NULL};

static const char *const *files_of(uint64_t model) {
        const char *const *const files[MODELS] = {[CONDITIONER] = bench_conditioner, [VIDEO] = bench_video_vae,
                [VIDEO_ORIGINAL] = video_original, [AUDIO] = bench_audio_vae, [AUDIO_DEMO] = audio_demo};

        return files[model];
}

static const ModelEntry *model_of(const CoderBench *b, uint64_t model) {
        return model_table_find(&b->models, model);
}

static void add_picture(CoderBench *b, WireJobOpen *w, uint64_t height, uint64_t width) {
        CLEANUP_FREE uint8_t *pixels = bench_bytes(height * width * 3, 11 + w->n_conditions);
        const WireTensor t = bench_put(b, ST_U8, 4, (uint64_t[]){1, height, width, 3}, pixels);

        w->conditions[w->n_conditions++] = (WireCondition){.kind = WIRE_CONDITION_KEYFRAME, .video_offset = t.offset, .frames = 1,
                .height = height, .width = width};
}

static WireJobOpen text_job(CoderBench *b, WireCompute compute, bool pictures) {
        WireJobOpen w = bench_job(b, WIRE_JOB_ENCODE, CONDITIONER);

        w.text = bench_put(b, ST_U8, 1, (uint64_t[]){strlen(PROMPT)}, PROMPT);
        w.owner = 1000;
        w.compute = compute;
        w.output_type = compute == WIRE_COMPUTE_F32 ? ST_F32 : ST_BF16;
        if (pictures) {
                add_picture(b, &w, 96, 64);
                add_picture(b, &w, 64, 64);
        }
        return w;
}

static WireJobOpen words_job(CoderBench *b) {
        return text_job(b, WIRE_COMPUTE_BF16, false);
}

static WireJobOpen pictures_job(CoderBench *b) {
        return text_job(b, WIRE_COMPUTE_BF16, true);
}

static WireJobOpen pictures_f32_job(CoderBench *b) {
        return text_job(b, WIRE_COMPUTE_F32, true);
}

/* Two chunks. */
static WireJobOpen decode_video(CoderBench *b, uint64_t model) {
        uint64_t channels = h3_video_vae_config(model_of(b, model)->video_vae)->latent_channels;
        CLEANUP_FREE float *z = bench_numbers(channels * 8 * 4 * 2, 1);
        WireJobOpen w = bench_job(b, WIRE_JOB_DECODE, model);

        w.video = bench_put(b, ST_F32, 4, (uint64_t[]){channels, 8, 4, 2}, z);
        w.output_type = ST_F32;
        return w;
}

/* Two clips. */
static WireJobOpen encode_video(CoderBench *b, uint64_t model) {
        CLEANUP_FREE uint8_t *pixels = bench_bytes(18 * 64 * 32 * 3, 2);
        WireJobOpen w = bench_job(b, WIRE_JOB_ENCODE_MEDIA, model);

        w.video = bench_put(b, ST_U8, 4, (uint64_t[]){18, 64, 32, 3}, pixels);
        return w;
}

/* A piece of each channel. */
static WireJobOpen decode_audio(CoderBench *b, uint64_t model) {
        uint64_t channels = model_of(b, model)->audio_vae->config.channels, n = 20;
        CLEANUP_FREE float *latents = bench_numbers(2 * channels * n, 3);
        WireJobOpen w = bench_job(b, WIRE_JOB_DECODE, model);

        w.audio = bench_put(b, ST_F32, 3, (uint64_t[]){channels, 2, n}, latents);
        return w;
}

static WireJobOpen encode_audio(CoderBench *b, uint64_t model) {
        uint64_t n = (uint64_t) model_of(b, model)->audio_vae->config.hop * 20 - 77;
        CLEANUP_FREE float *wave = bench_numbers(2 * n, 4);
        WireJobOpen w = bench_job(b, WIRE_JOB_ENCODE_MEDIA, model);

        for (uint64_t i = 0; i < 2 * n; i++)
                wave[i] *= 0.2f;
        w.audio = bench_put(b, ST_F32, 2, (uint64_t[]){2, n}, wave);
        return w;
}

static WireJobOpen decode_film(CoderBench *b) {
        return decode_video(b, VIDEO);
}

static WireJobOpen decode_original(CoderBench *b) {
        return decode_video(b, VIDEO_ORIGINAL);
}

static WireJobOpen encode_film(CoderBench *b) {
        return encode_video(b, VIDEO);
}

static WireJobOpen encode_original(CoderBench *b) {
        return encode_video(b, VIDEO_ORIGINAL);
}

static WireJobOpen decode_sound(CoderBench *b) {
        return decode_audio(b, AUDIO);
}

static WireJobOpen decode_demo_sound(CoderBench *b) {
        return decode_audio(b, AUDIO_DEMO);
}

static WireJobOpen encode_sound(CoderBench *b) {
        return encode_audio(b, AUDIO);
}

typedef struct Kind {
        const char *name;
        uint64_t model;
        WireJobOpen (*job)(CoderBench *b);
} Kind;

static const Kind kinds[] = {
        {"words", CONDITIONER, words_job},
        {"words and pictures", CONDITIONER, pictures_job},
        {"words and pictures in f32", CONDITIONER, pictures_f32_job},
        {"decode video, diffusers names", VIDEO, decode_film},
        {"decode video, original names", VIDEO_ORIGINAL, decode_original},
        {"encode video, diffusers names", VIDEO, encode_film},
        {"encode video, original names", VIDEO_ORIGINAL, encode_original},
        {"decode sound, weight norm", AUDIO, decode_sound},
        {"decode sound, demo model", AUDIO_DEMO, decode_demo_sound},
        {"encode sound", AUDIO, encode_sound},
};

/* ---- runs ---- */

/* On the device, with this much memory; results are not kept. */
static CoderBench *bench_on_device(uint64_t limit) {
        CoderBench *b = bench_new(1, ARENA);

        encode_cache_set_limit(&b->runner.encodes, 0);
        bench_set_ops(b, device_ops(), device_memory);
        device_sim.limit = limit;
        said_more = 0;
        return b;
}

static void bench_end(CoderBench *b) {
        bool device = !b->ops.host_weights;

        (void) bench_free(b);
        if (device)
                device_ops_done();
}

static uint8_t *run_plainly(const Kind *k, uint64_t *ret_size) {
        CoderBench *b = bench_new(1, ARENA);
        WireJobOpen w;
        uint8_t *result;

        bench_load(b, k->model, files_of(k->model));
        w = k->job(b);
        result = bench_run(b, &w, ret_size);
        bench_end(b);
        return result;
}

static int try_run(CoderBench *b, const Kind *k, Fault *f) {
        const WireJobOpen w = k->job(b);
        CLEANUP(job_unrefp) Job *j = bench_open(b, &w);
        StepResult result = {};
        int r = 0;

        while (r >= 0 && j->committed < j->steps)
                r = bench_try_step(b, j, &result, f);
        return r;
}

static void run_same(CoderBench *b, const Kind *k, const uint8_t *want, uint64_t size) {
        const WireJobOpen w = k->job(b);
        CLEANUP_FREE uint8_t *have = NULL;
        uint64_t n;

        have = bench_run(b, &w, &n);
        assert_int_equal(n, size);
        if (memcmp(have, want, size) != 0)
                fail_msg("%s: the bits differ", k->name);
}

/* About the least memory that it runs with. */
static uint64_t least_memory(const Kind *k, uint64_t most) {
        for (uint64_t limit = most / 12 * 2;; limit += most / 12) {
                CoderBench *b = bench_on_device(limit);
                Fault f = {};
                int r;

                bench_load(b, k->model, files_of(k->model));
                r = try_run(b, k, &f);
                bench_end(b);
                if (r >= 0)
                        return limit;
                assert_int_equal(r, -ENOMEM);
                assert_string_equal(f.name, FAULT_DOES_NOT_FIT);
                assert_true(limit < most);
        }
}

/* With room for everything, for what passes alone, and between. What stays between steps and jobs is not fetched again. */
static void code_any_memory_same_bits(void **state) {
        unsigned passed = 0;

        for (size_t i = 0; i < ELEMENTSOF(kinds); i++) {
                const Kind *k = kinds + i;
                CLEANUP_FREE uint8_t *want = NULL;
                uint64_t size, most, least, fetched;
                uint32_t all;
                CoderBench *b;

                want = run_plainly(k, &size);
                b = bench_on_device(PLENTY);
                bench_load(b, k->model, files_of(k->model));
                run_same(b, k, want, size);
                assert_int_equal(b->runner.residency.device_model, k->model);
                all = b->runner.residency.device_blocks;
                most = device_sim.peak + device_sim.peak / 32;
                fetched = device_sim.fetched_bytes;
                b->used = 0; /* of the input */
                memset(b->output, 0, b->size);
                run_same(b, k, want, size);
                assert_int_equal(device_sim.fetched_bytes, fetched);
                bench_end(b);

                least = least_memory(k, most);
                print_message("%s: %llu bytes of the device, or %llu\n", k->name, (unsigned long long) most,
                        (unsigned long long) least);
                for (unsigned part = 0; part < 2; part++) {
                        b = bench_on_device(least + (most - least) * part / 2);
                        bench_load(b, k->model, files_of(k->model));
                        run_same(b, k, want, size);
                        assert_true(device_sim.peak <= device_sim.limit);
                        passed += part == 0 && b->runner.residency.device_blocks < all;
                        bench_end(b);
                }
        }
        assert_true(passed >= 6); /* a ring for tiny parts is as large as all of them */
}

/* One after the other on a device that has no room for two, and back again. */
static void code_models_take_turns(void **state) {
        static const Kind *const turns[] = {kinds + 1, kinds + 3, kinds + 7, kinds + 5, kinds + 9, kinds + 1};
        uint8_t *want[ELEMENTSOF(turns)];
        uint64_t sizes[ELEMENTSOF(turns)], most = 0;
        CoderBench *b;

        for (size_t i = 0; i < ELEMENTSOF(turns); i++) {
                CoderBench *alone = bench_on_device(PLENTY);
                Fault f = {};

                want[i] = run_plainly(turns[i], sizes + i);
                bench_load(alone, turns[i]->model, files_of(turns[i]->model));
                assert_int_equal(try_run(alone, turns[i], &f), 0);
                most = device_sim.peak > most ? device_sim.peak : most;
                bench_end(alone);
        }

        b = bench_on_device(most + most / 32);
        for (uint64_t model = CONDITIONER; model <= AUDIO; model++)
                bench_load(b, model, files_of(model));
        for (size_t i = 0; i < ELEMENTSOF(turns); i++) {
                b->used = 0;                     /* of the input */
                memset(b->output, 0, b->size); /* also what lies between results */
                run_same(b, turns[i], want[i], sizes[i]);
                assert_int_equal(b->runner.residency.device_model, turns[i]->model);
                free(want[i]);
        }
        for (uint64_t model = CONDITIONER; model <= AUDIO; model++)
                (void) model_table_close(&b->models, model);
        (void) residency_rest(&b->runner.residency, b->ranks);
        assert_int_equal(device_sim.used, 0);
        bench_end(b);
}

/* Others took memory after it was counted. */
static void code_less_memory_than_said_goes_on(void **state) {
        static const Kind *const some[] = {kinds + 1, kinds + 3, kinds + 5}; /* of large parts */

        for (size_t i = 0; i < ELEMENTSOF(some); i++) {
                CLEANUP_FREE uint8_t *want = NULL;
                uint64_t size, peak;
                CoderBench *b;

                want = run_plainly(some[i], &size);
                b = bench_on_device(PLENTY);
                bench_load(b, some[i]->model, files_of(some[i]->model));
                run_same(b, some[i], want, size);
                peak = device_sim.peak;
                bench_end(b);

                b = bench_on_device(peak - peak / 16);
                said_more = peak;
                bench_load(b, some[i]->model, files_of(some[i]->model));
                run_same(b, some[i], want, size);
                bench_end(b);
        }
}

/* A device's error ends the step, not the job. */
static void code_device_error_job_goes_on(void **state) {
        CLEANUP_FREE uint8_t *want = NULL;
        const Kind *k = kinds + 3;
        CLEANUP_FREE uint8_t *have = NULL;
        StepResult result = {};
        CoderBench *b;
        uint64_t size;
        WireJobOpen w;
        Fault f = {};
        Job *j;

        want = run_plainly(k, &size);
        b = bench_on_device(PLENTY);
        bench_load(b, k->model, files_of(k->model));
        w = k->job(b);
        j = bench_open(b, &w);
        device_sim.fetches_left = 12;
        assert_int_equal(bench_try_step(b, j, &result, &f), -EIO);
        assert_int_equal(j->committed, 0);
        bench_set_ops(b, device_ops_cpu(), NULL); /* gives everything back */
        device_ops_done();
        bench_set_ops(b, device_ops(), device_memory);
        device_sim.limit = PLENTY;
        bench_finish(b, j);
        have = bench_output(b, j, 0);
        assert_memory_equal(have, want, j->coder->outputs[0].tensor.size);
        (void) job_unref(j);
        bench_end(b);
}

/* Host memory is asked for what a step takes there. */
static void code_device_memory_is_not_the_hosts(void **state) {
        const Kind *k = kinds + 3;
        CoderBench *b = bench_on_device(PLENTY);
        WireJobOpen w;
        Fault f = {};
        Job *j;

        bench_load(b, k->model, files_of(k->model));
        w = k->job(b);
        j = bench_open(b, &w);
        assert_true(j->coder->device_bytes > 0 && j->coder->device_bytes < j->coder->memory_bytes);
        bench_memory_available = j->coder->memory_bytes - j->coder->device_bytes - 1;
        assert_int_equal(bench_try_step(b, j, &(StepResult){}, &f), -ENOMEM);
        bench_memory_available++;
        assert_int_equal(bench_try_step(b, j, &(StepResult){}, &f), 0);
        bench_memory_available = 0;
        (void) job_unref(j);
        bench_end(b);
}

/* A backend that lacks an operation is told from what is wrong with a job; it runs the rest. */
static void code_without_convolutions_is_not_supported(void **state) {
        CoderBench *b = bench_on_device(PLENTY);

        b->ops.conv = NULL;
        for (size_t i = 0; i < ELEMENTSOF(kinds); i++) {
                bool convolves = strstr(kinds[i].name, "encode") || strstr(kinds[i].name, "sound");
                WireJobOpen w;
                Fault f = {};

                if (!model_of(b, kinds[i].model))
                        bench_load(b, kinds[i].model, files_of(kinds[i].model));
                b->used = 0;
                w = kinds[i].job(b);
                if (convolves)
                        bench_refuse(b, &w, FAULT_NOT_SUPPORTED, "set Worker=cpu");
                else
                        assert_int_equal(try_run(b, kinds + i, &f), 0);
        }
        bench_end(b);
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(code_any_memory_same_bits),
                cmocka_unit_test(code_models_take_turns),
                cmocka_unit_test(code_less_memory_than_said_goes_on),
                cmocka_unit_test(code_device_error_job_goes_on),
                cmocka_unit_test(code_device_memory_is_not_the_hosts),
                cmocka_unit_test(code_without_convolutions_is_not_supported),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
