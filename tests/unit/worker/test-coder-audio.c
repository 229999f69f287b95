/* SPDX-License-Identifier: Apache-2.0 */
/* DECODE and ENCODE_MEDIA of sound, compared to the bit with the plain way through the VAE. */
#include "service/worker/coder.h"

#include <setjmp.h>
#include <stdarg.h>
#include <math.h>
#include <string.h>

#include <cmocka.h>

#include "service/shared/cleanup.h"
#include "tests/unit/worker/coder-bench.h"

DEFINE_CLEANUP(Job *, job_unref)

#define MODEL 1
#define ARENA (UINT64_C(8) << 20)
#define A 130 /* latents: two pieces */
#define SAMPLES (800 * A - 77)

#ifdef SANITIZED /* ten times slower */
static const uint32_t rank_counts[] = {1, 3};
#else
static const uint32_t rank_counts[] = {1, 2, 3, 8};
#endif

static int setup(void **state) {
        CoderBench *b = bench_new(1, ARENA);

        bench_load(b, MODEL, bench_audio_vae);
        *state = b;
        return 0;
}

static int teardown(void **state) {
        (void) bench_free(*state);
        return 0;
}

static const H3AudioVae *vae_of(const CoderBench *b) {
        return model_table_find(&b->models, MODEL)->audio_vae;
}

static WireJobOpen decode_job(CoderBench *b) {
        CLEANUP_FREE float *latents = bench_numbers(64 * A, 1);
        WireJobOpen w = bench_job(b, WIRE_JOB_DECODE, MODEL);

        w.audio = bench_put(b, ST_F32, 3, (uint64_t[]){32, 2, A}, latents);
        return w;
}

static WireJobOpen encode_job(CoderBench *b) {
        CLEANUP_FREE float *wave = bench_numbers(2 * SAMPLES, 2);
        WireJobOpen w = bench_job(b, WIRE_JOB_ENCODE_MEDIA, MODEL);

        for (size_t i = 0; i < 2 * SAMPLES; i++)
                wave[i] *= 0.2f;
        w.audio = bench_put(b, ST_F32, 2, (uint64_t[]){2, SAMPLES}, wave);
        return w;
}

static float *decode_plainly(CoderBench *b, uint64_t *ret_bytes) {
        CLEANUP_FREE float *latents = bench_numbers(64 * A, 1);
        float *wave = malloc(2 * 800 * A * sizeof(*wave));
        H3Rank rank = {.ops = &b->ops};
        H3AudioPlan p;
        void *work;
        Fault f = {};

        assert_non_null(wave);
        assert_int_equal(b->ops.context_new(1, &rank.context), 0);
        assert_int_equal(h3_audio_decode_plan(vae_of(b), A, A, UINT64_MAX, &p, &f), 0);
        assert_int_equal(b->ops.memory_new(rank.context, p.job_memory + p.finish_memory, &work), 0);
        for (uint64_t i = 0; i < p.jobs; i++)
                if (h3_audio_decode_job(&rank, vae_of(b), &p, latents, i, work, NULL, wave, &f) < 0)
                        fail_msg("%s", f.text);
        b->ops.memory_free(rank.context, work);
        (void) b->ops.context_free(rank.context);
        *ret_bytes = 2 * 800 * A * sizeof(*wave);
        return wave;
}

static float *encode_plainly(CoderBench *b, uint64_t *ret_bytes) {
        CLEANUP_FREE float *wave = bench_numbers(2 * SAMPLES, 2), *hidden = NULL;
        float *latents = malloc(64 * A * sizeof(*latents));
        H3Rank rank = {.ops = &b->ops};
        H3AudioPlan p;
        void *work;
        Fault f = {};

        for (size_t i = 0; i < 2 * SAMPLES; i++)
                wave[i] *= 0.2f;
        assert_int_equal(b->ops.context_new(1, &rank.context), 0);
        assert_int_equal(h3_audio_encode_plan(vae_of(b), SAMPLES, A, UINT64_MAX, &p, &f), 0);
        assert_int_equal(p.latents, A);
        hidden = malloc(p.hidden_bytes);
        assert_true(latents && hidden);
        assert_int_equal(b->ops.memory_new(rank.context, p.job_memory + p.finish_memory, &work), 0);
        for (uint64_t i = 0; i < p.jobs; i++)
                if (h3_audio_encode_job(&rank, vae_of(b), &p, wave, i, work, NULL, hidden, &f) < 0)
                        fail_msg("%s", f.text);
        for (uint32_t i = 0; i < 2; i++)
                if (h3_audio_encode_finish(
                            &rank, vae_of(b), &p, hidden, i, work, NULL, latents, NULL, NULL, &f) < 0)
                        fail_msg("%s", f.text);
        b->ops.memory_free(rank.context, work);
        (void) b->ops.context_free(rank.context);
        *ret_bytes = 64 * A * sizeof(*latents);
        return latents;
}

static void assert_same_on_all_ranks(
        CoderBench *b, const WireJobOpen *w, const void *expected, uint64_t bytes) {
        for (size_t i = 0; i < ELEMENTSOF(rank_counts); i++) {
                CLEANUP_FREE uint8_t *have = NULL;
                uint64_t n;

                bench_set_ranks(b, rank_counts[i]);
                bench_delay(b, (uint32_t) i, i % 2 ? 3000 : 0);
                have = bench_run(b, w, &n);
                assert_true(n >= bytes);
                assert_memory_equal(have, expected, bytes);
        }
}

static void decode_ranks_and_delays_same_bits(void **state) {
        CoderBench *b = *state;
        const WireJobOpen w = decode_job(b);
        CLEANUP_FREE float *expected = NULL;
        uint64_t bytes;

        expected = decode_plainly(b, &bytes);
        assert_same_on_all_ranks(b, &w, expected, bytes);
}

static void encode_ranks_and_delays_same_bits(void **state) {
        CoderBench *b = *state;
        const WireJobOpen w = encode_job(b);
        CLEANUP_FREE float *expected = NULL;
        uint64_t bytes;

        expected = encode_plainly(b, &bytes);
        assert_same_on_all_ranks(b, &w, expected, bytes);
}

static void decode_says_what_it_makes(void **state) {
        CoderBench *b = *state;
        const WireJobOpen w = decode_job(b);
        CLEANUP(job_unrefp) Job *j = bench_open(b, &w);
        WireMessage m;

        wire_init(&m, WIRE_JOB_READY, 1, BENCH_JOB, 0);
        job_describe(j, &m.job_ready);
        assert_int_equal(m.job_ready.steps, 1);
        assert_int_equal(m.job_ready.rows, 800 * A);
        assert_int_equal(m.job_ready.blocks, 4);
        assert_int_equal(m.job_ready.n_slots, 0);
        assert_int_equal(m.job_ready.slot_offset, 0);
        assert_int_equal(m.job_ready.n_outputs, 1);
        assert_int_equal(m.job_ready.outputs[0].name, WIRE_OUTPUT_SOUND);
        assert_int_equal(m.job_ready.outputs[0].tensor.shape[1], 800 * A);
        assert_int_equal(m.job_ready.frames, 0);
        assert_true(m.job_ready.memory_bytes > 2 * 800 * A * sizeof(float));
}

static Job *cancelled_by_tile;

static void cancel_at_tile(void *userdata, uint32_t rank, uint32_t chunk, uint32_t tile) {
        if (tile == 2)
                cancelled_by_tile->cancelled = true;
}

/* The answer of a run that ended between two pieces; and a resumed one begins again. */
static void decode_cancelled_then_resumed_same_bits(void **state) {
        CoderBench *b = *state;
        WireJobOpen w = decode_job(b);
        Job *j = cancelled_by_tile = bench_open(b, &w);
        CLEANUP_FREE float *expected = NULL;
        StepResult result;
        uint64_t bytes;
        Fault f = {};

        b->runner.tile_hook = cancel_at_tile;
        assert_int_equal(bench_try_step(b, j, &result, &f), -ECANCELED);
        assert_string_equal(f.name, FAULT_CANCELLED);
        assert_committed(b, j, 0);
        b->runner.tile_hook = NULL;
        (void) job_unref(j);

        w.flags = WIRE_JOB_RESUME;
        j = bench_open(b, &w);
        bench_finish(b, j);
        expected = decode_plainly(b, &bytes);
        assert_memory_equal(b->output + j->coder->outputs[0].tensor.offset, expected, bytes);
        (void) job_unref(j);

        j = bench_open(b, &w);
        assert_int_equal(j->committed, 1);
        (void) job_unref(j);
}

static void bad_requests_are_refused(void **state) {
        CoderBench *b = *state;
        const WireJobOpen good = decode_job(b), sound = encode_job(b);
        const float nan = NAN;
        WireJobOpen w = good;

        w.audio.shape[0] = 24;
        bench_refuse(b, &w, FAULT_INVALID_TENSOR, "expected [32, 2, *]");
        w = good;
        w.audio.size++;
        bench_refuse(b, &w, FAULT_INVALID_TENSOR, "its shape needs");
        w = good;
        w.video = w.audio;
        bench_refuse(b, &w, FAULT_INVALID_ARGUMENT, "the tensor video");
        w = good;
        w.kind = WIRE_JOB_ENCODE;
        bench_refuse(b, &w, FAULT_INVALID_ARGUMENT, "Encode cannot run on a model of kind \"audio VAE\"");
        w = sound;
        w.audio.shape[0] = 1;
        bench_refuse(b, &w, FAULT_INVALID_TENSOR, "expected [2, *]");
        w = good;
        memcpy(b->input + good.audio.offset, &nan, sizeof(nan));
        bench_refuse(b, &w, FAULT_INVALID_TENSOR, "audio has NaN at [0, 0, 0]");
}

static void decode_does_not_fit_says_numbers(void **state) {
        CoderBench *b = *state;
        const WireJobOpen w = decode_job(b);
        CLEANUP(job_unrefp) Job *j = bench_open(b, &w);
        StepResult result;
        Fault f = {};

        bench_memory_available = 1000;
        assert_int_equal(bench_try_step(b, j, &result, &f), -ENOMEM);
        assert_string_equal(f.name, FAULT_DOES_NOT_FIT);
        assert_non_null(strstr(f.text, "1000 are free"));
}

#define TEST(function) cmocka_unit_test_setup_teardown(function, setup, teardown)

int main(void) {
        const struct CMUnitTest tests[] = {
                TEST(decode_ranks_and_delays_same_bits),
                TEST(encode_ranks_and_delays_same_bits),
                TEST(decode_says_what_it_makes),
                TEST(decode_cancelled_then_resumed_same_bits),
                TEST(bad_requests_are_refused),
                TEST(decode_does_not_fit_says_numbers),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
