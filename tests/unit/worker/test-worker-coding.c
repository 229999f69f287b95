/* SPDX-License-Identifier: Apache-2.0 */
/* The worker program, behind its filter of system calls: coding jobs on the demo model's parts, and their
 * deaths. */

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "service/shared/cleanup.h"
#include "tests/unit/worker/broker.h"

#define ARENA (1 << 23)
#define DEMO "tests/demo-model/"
#define PROMPT "a yellow square moves up on a black background"

/* Three chunks of a film of 56 frames, 288 x 32. */
#define T 17
#define H 18
#define W 2
#define FRAME (768u * H * W)
#define FRAMES 56

static const char *const video_vae[] = {
        DEMO "vae/config.json", DEMO "vae/diffusion_pytorch_model.safetensors", NULL};
static const char *const audio_vae[] = {
        DEMO "audio_vae/config.json", DEMO "audio_vae/diffusion_pytorch_model.safetensors", NULL};
static const char *const conditioner[] = {DEMO "text_encoder/config.json",
        DEMO "text_encoder/model.safetensors", DEMO "tokenizer/vocab.json", DEMO "tokenizer/merges.txt",
        DEMO "tokenizer/tokenizer_config.json", NULL};

static const char *const denoiser[] = {DEMO "transformer/config.json", DEMO "transformer/diffusion_pytorch_model.safetensors",
        DEMO "scheduler/scheduler_config.json", NULL};

static WireMessage job(Broker *b, WireType type, uint64_t id, WireJobKind kind, uint64_t model) {
        WireMessage m;

        wire_init(&m, type, b->epoch, id, 0);
        m.job_open.model = model;
        m.job_open.session = 2;
        m.job_open.kind = kind;
        m.job_open.output_size = ARENA;
        return m;
}

static float *numbers(uint64_t n) {
        float *x = malloc(n * sizeof(*x));
        uint32_t state = 5;

        assert_non_null(x);
        for (uint64_t i = 0; i < n; i++) {
                state = state * 1664525u + 1013904223u;
                x[i] = (float) (state >> 8) / (float) (1 << 23) - 1;
        }
        return x;
}

static const void *output(const Arenas *a, const WireMessage *ready, uint32_t i) {
        return a->output + ready->job_ready.outputs[i].tensor.offset;
}

/* JOB_RUN, JOB_READY, STEP_DONE, JOB_CLOSE. */
static void run(Broker *b, const WireMessage *open, WireMessage *ret_ready, WireMessage *ret_done) {
        broker_send(b, open, -EBADF);
        broker_expect(b, WIRE_JOB_READY, open->header.job, ret_ready);
        broker_expect(b, WIRE_STEP_DONE, open->header.job, ret_done);
        broker_say(b, WIRE_JOB_CLOSE, open->header.job, 0);
}

static void conditioner_tokenizes_encodes_and_remembers(void **state) {
        CLEANUP(arenas_freep) Arenas *a = arenas_new(ARENA, ARENA);
        CLEANUP(broker_freep) Broker *b = broker_open_ranks(3, 3, 1 << 20);
        CLEANUP_FREE uint8_t *first = NULL;
        WireMessage m, ready, done;
        uint64_t rows;

        broker_load_sources(b, 1, conditioner, &m);
        assert_int_equal(m.model_ready.kind, WIRE_MODEL_CONDITIONER);
        assert_int_equal(m.model_ready.text_dim, 128);
        assert_int_equal(m.model_ready.layers, 4);
        assert_string_equal(m.model_ready.warning, "");
        broker_give_arenas(b, 2, a);

        m = job(b, WIRE_JOB_RUN, 5, WIRE_JOB_TOKENIZE, 1);
        m.job_open.text = arenas_put(a, ST_U8, 1, (uint64_t[]){strlen(PROMPT)}, PROMPT);
        run(b, &m, &ready, &done);
        rows = ready.job_ready.rows;
        assert_true(rows > 5);
        assert_commit(a, &ready, 3, 1);

        m.job_open.kind = WIRE_JOB_ENCODE;
        m.job_open.output_type = ST_F32;
        m.job_open.owner = 7;
        m.header.job = 6;
        run(b, &m, &ready, &done);
        assert_int_equal(ready.job_ready.rows, rows);
        assert_int_equal(ready.job_ready.n_outputs, 3);
        assert_int_equal(done.step_done.cached, 0);
        assert_true(done.step_done.exchanged_bytes > 0);
        first = malloc(rows * 512);
        assert_non_null(first);
        memcpy(first, output(a, &ready, 0), rows * 512);

        memset(a->output, 0, ARENA);
        m.header.job = 7;
        run(b, &m, &ready, &done);
        assert_int_equal(done.step_done.cached, 1);
        assert_int_equal(done.step_done.exchanged_bytes, 0);
        assert_memory_equal(first, output(a, &ready, 0), rows * 512);

        m.job_open.owner = 8;
        m.header.job = 8;
        run(b, &m, &ready, &done);
        assert_int_equal(done.step_done.cached, 0);
}

static void audio_vae_makes_sound_and_back(void **state) {
        CLEANUP(arenas_freep) Arenas *a = arenas_new(ARENA, ARENA);
        CLEANUP(broker_freep) Broker *b = broker_open_ranks(3, 2, 0);
        CLEANUP_FREE float *latents = numbers(64 * 8);
        WireMessage m, ready, done;

        broker_load_sources(b, 1, audio_vae, &m);
        assert_int_equal(m.model_ready.kind, WIRE_MODEL_AUDIO_VAE);
        broker_give_arenas(b, 2, a);
        m = job(b, WIRE_JOB_RUN, 5, WIRE_JOB_DECODE, 1);
        m.job_open.audio = arenas_put(a, ST_F32, 3, (uint64_t[]){32, 2, 8}, latents);
        run(b, &m, &ready, &done);
        assert_int_equal(ready.job_ready.outputs[0].tensor.size, 2 * 6400 * sizeof(float));

        m = job(b, WIRE_JOB_RUN, 6, WIRE_JOB_ENCODE_MEDIA, 1);
        m.job_open.audio = arenas_put(a, ST_F32, 2, (uint64_t[]){2, 6400}, output(a, &ready, 0));
        run(b, &m, &ready, &done);
        assert_int_equal(ready.job_ready.outputs[0].name, WIRE_OUTPUT_AUDIO);
        assert_int_equal(ready.job_ready.outputs[0].tensor.shape[2], 8);
        assert_commit(a, &ready, 3, 1);
}

static WireMessage film_job(Broker *b, Arenas *a, WireType type) {
        CLEANUP_FREE float *z = numbers(24 * T * H * W);
        WireMessage m = job(b, type, 5, WIRE_JOB_DECODE, 1);

        m.job_open.video = arenas_put(a, ST_F32, 4, (uint64_t[]){24, T, H, W}, z);
        m.job_open.output_type = ST_U8;
        return m;
}

static Broker *open_with(uint64_t epoch, uint32_t ranks, const Arenas *a) {
        Broker *b = broker_open_ranks(epoch, ranks, 0);

        broker_load_sources(b, 1, video_vae, NULL);
        broker_give_arenas(b, 2, a);
        return b;
}

/* The whole film, freed by the caller; its time. */
static uint8_t *decode_undisturbed(unsigned *ret_usec) {
        CLEANUP(arenas_freep) Arenas *a = arenas_new(ARENA, ARENA);
        CLEANUP(broker_freep) Broker *b = open_with(1, 1, a);
        WireMessage m = film_job(b, a, WIRE_JOB_OPEN), ready, done;
        uint8_t *film = malloc(FRAMES * FRAME);

        assert_non_null(film);
        *ret_usec = 0;
        broker_open_job(b, &m, &ready);
        for (uint32_t i = 0; i < 3; i++) {
                broker_say(b, WIRE_STEP, 5, i);
                broker_expect(b, WIRE_STEP_DONE, 5, &done);
                assert_int_equal(done.step_done.frames, i < 2 ? 17 * (i + 1) : FRAMES);
                *ret_usec += (unsigned) done.step_done.compute_usec;
        }
        memcpy(film, output(a, &ready, 0), FRAMES * FRAME);
        return film;
}

/* Workers die at times spread over the run, each on other ranks than the one before; the last lives. */
static void decode_killed_anywhere_ends_alike(void **state) {
        CLEANUP(arenas_freep) Arenas *a = arenas_new(ARENA, ARENA);
        CLEANUP_FREE uint8_t *expected = NULL;
        WireMessage open, ready;
        uint64_t epoch = 1;
        unsigned usec;

        expected = decode_undisturbed(&usec);
        for (unsigned i = 0; i < 8; i++) {
                CLEANUP(broker_freep) Broker *b = open_with(++epoch, 1 + i % 3, a);
                uint32_t committed;

                if (i == 0)
                        open = film_job(b, a, WIRE_JOB_OPEN);
                open.header.epoch = epoch;
                open.job_open.flags = i > 0 ? WIRE_JOB_RESUME : 0;
                broker_send(b, &open, -EBADF);
                broker_expect(b, WIRE_JOB_READY, 5, &ready);
                committed = ready.job_ready.committed;
                assert_int_equal(ready.job_ready.frames_done, committed < 3 ? 17 * committed : FRAMES);
                assert_memory_equal(output(a, &ready, 0), expected, ready.job_ready.frames_done * FRAME);
                for (uint32_t k = committed; k < 3; k++)
                        broker_say(b, WIRE_STEP, 5, k);
                if (i < 7) {
                        (void) usleep(usec / 6 + usec / 8 * (i % 3));
                        broker_kill(b);
                        continue;
                }
                for (uint32_t k = committed; k < 3; k++)
                        broker_expect(b, WIRE_STEP_DONE, 5, NULL);
        }
        assert_commit(a, &ready, (uint32_t) epoch, 3);
        assert_memory_equal(output(a, &ready, 0), expected, FRAMES * FRAME);
}

static void decode_cancelled_answers_every_step(void **state) {
        CLEANUP(arenas_freep) Arenas *a = arenas_new(ARENA, ARENA);
        CLEANUP(broker_freep) Broker *b = open_with(1, 2, a);
        WireMessage m = film_job(b, a, WIRE_JOB_RUN), ready;

        broker_send(b, &m, -EBADF);
        broker_say(b, WIRE_CANCEL, 5, 0);
        broker_say(b, WIRE_STEP, 5, 1);
        broker_expect(b, WIRE_JOB_READY, 5, &ready);
        broker_expect_error(b, 5, "Cancelled", "cancelled");
        broker_expect_error(b, 5, "Cancelled", "cancelled");
}

/* Once the close is acknowledged the arena is the client's. */
static void decode_closed_writes_nothing_more(void **state) {
        CLEANUP(arenas_freep) Arenas *a = arenas_new(ARENA, ARENA);
        CLEANUP(broker_freep) Broker *b = open_with(1, 2, a);
        CLEANUP_FREE uint8_t *before = malloc(ARENA);
        WireMessage m = film_job(b, a, WIRE_JOB_RUN), answer;
        unsigned n_acks;

        assert_non_null(before);
        broker_send(b, &m, -EBADF);
        broker_expect(b, WIRE_JOB_READY, 5, &answer);
        (void) usleep(20000);
        n_acks = b->n_acks;
        broker_say(b, WIRE_JOB_CLOSE, 5, 0);
        while (b->n_acks == n_acks && broker_receive(b, &answer)) /* STEP_DONE, or an ERROR */
                ;
        memcpy(before, a->output, ARENA);
        (void) usleep(300000);
        assert_memory_equal(a->output, before, ARENA);
        broker_load_sources(b, 4, video_vae, NULL); /* it lives on */
}

/* Of the file that came along; no other says. */
static void model_ready_has_the_shifts_of_a_denoiser(void **state) {
        CLEANUP(broker_freep) Broker *b = broker_open_ranks(3, 1, 0);
        WireMessage m;

        broker_load_sources(b, 1, denoiser, &m);
        assert_int_equal(m.model_ready.kind, WIRE_MODEL_DENOISER);
        assert_true(m.model_ready.shift_video == 6 && m.model_ready.shift_audio == 0);
        broker_load_sources(b, 2, video_vae, &m);
        assert_true(m.model_ready.shift_video == 0);
}

static void kinds_do_not_mix(void **state) {
        CLEANUP(arenas_freep) Arenas *a = arenas_new(ARENA, ARENA);
        CLEANUP(broker_freep) Broker *b = open_with(1, 1, a);
        WireMessage m = film_job(b, a, WIRE_JOB_OPEN), ready;

        broker_load_model(b, 3, NULL);
        m.job_open.model = 3;
        broker_send(b, &m, -EBADF);
        broker_expect_error(b, 5, "InvalidArgument", "\"denoiser\": it needs a VAE");

        /* a VAE as an adapter */
        m.job_open.kind = WIRE_JOB_MERGE;
        m.job_open.n_loras = 1;
        m.job_open.loras[0] = (WireLora){1, 1};
        broker_send(b, &m, -EBADF);
        broker_expect_error(b, 5, "InvalidArgument", "is a video VAE, no LoRA");

        /* A plan for what has none is passed over. */
        m = film_job(b, a, WIRE_JOB_OPEN);
        broker_send(b, &m, -EBADF);
        broker_expect(b, WIRE_JOB_READY, 5, &ready);
        broker_plan(b, 5, 100);
        broker_step(b, 5, 0);
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(conditioner_tokenizes_encodes_and_remembers),
                cmocka_unit_test(audio_vae_makes_sound_and_back),
                cmocka_unit_test(decode_killed_anywhere_ends_alike),
                cmocka_unit_test(decode_cancelled_answers_every_step),
                cmocka_unit_test(decode_closed_writes_nothing_more),
                cmocka_unit_test(model_ready_has_the_shifts_of_a_denoiser),
                cmocka_unit_test(kinds_do_not_mix),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
