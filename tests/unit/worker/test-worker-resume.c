/* SPDX-License-Identifier: Apache-2.0 */
/* The worker program: a trajectory that is interrupted anywhere ends as an undisturbed one, to the bit. */

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "service/shared/cleanup.h"
#include "tests/unit/worker/broker.h"

#define ARENA (1 << 18)
#define N_VIDEO (24u * 2 * 4 * 4)
#define N_AUDIO (32u * 2 * 8)
#define STEPS 4u

static Broker *open_with(uint64_t epoch, const Arenas *a) {
        Broker *b = broker_open(epoch);

        broker_load_model(b, 1, NULL);
        broker_give_arenas(b, 2, a);
        return b;
}

/* What is run: everything that a state may depend on. */
typedef struct Variant {
        WireSampler sampler;
        bool masks, noise, keep, reference;
} Variant;

static const Variant variants[] = {
        {.sampler = WIRE_SAMPLER_EULER},
        {.sampler = WIRE_SAMPLER_EULER, .masks = true, .keep = true, .reference = true},
        {.sampler = WIRE_SAMPLER_RES_MULTISTEP, .keep = true},
        {.sampler = WIRE_SAMPLER_RES_MULTISTEP, .masks = true, .noise = true},
        {.sampler = WIRE_SAMPLER_RES_MULTISTEP_PERSTREAM, .reference = true, .noise = true},
        {.sampler = WIRE_SAMPLER_RES_MULTISTEP_PERSTREAM, .masks = true, .keep = true},
};

static WireMessage request(Broker *b, Arenas *a, const Variant *v) {
        static const uint64_t video_shape[] = {2, 4, 4}, audio_shape[] = {32, 2, 8};
        float mask_video[32], mask_audio[N_AUDIO];
        WireMessage m;
        WireJobOpen *j = &m.job_open;

        m = job_of_golden(b, 5, a, v->reference ? "traj_euler_4_ref2va_small" : "traj_euler_4");
        j->sampler = v->sampler;
        j->shift_video = 12;
        j->shift_audio = 3;
        j->flags = v->keep ? WIRE_JOB_KEEP_STEPS : 0;
        j->condition_noise = WIRE_NOISE_DIFFUSERS;
        j->seed = 3;
        j->noise = v->noise ? WIRE_NOISE_DIFFUSERS : WIRE_NOISE_GIVEN;
        if (!v->masks)
                return m;

        for (unsigned i = 0; i < ELEMENTSOF(mask_video); i++)
                mask_video[i] = (float) (i % 5) / 4;
        for (unsigned i = 0; i < ELEMENTSOF(mask_audio); i++)
                mask_audio[i] = (float) (i % 7) / 6;
        j->mask_video = arenas_put(a, ST_F32, 3, video_shape, mask_video);
        j->mask_audio = arenas_put(a, ST_F32, 3, audio_shape, mask_audio);
        if (!v->noise) {
                j->clean_video = arenas_put_like(a, &j->video, a->input + j->video.offset);
                j->clean_audio = arenas_put_like(a, &j->audio, a->input + j->audio.offset);
        }
        return m;
}

/* All slots of an undisturbed run, [steps + 1] of them, freed by the caller. */
static uint8_t *run_undisturbed(const Variant *v, uint64_t *ret_stride) {
        CLEANUP(arenas_freep) Arenas *a = arenas_new(ARENA, ARENA);
        CLEANUP(broker_freep) Broker *b = open_with(1, a);
        WireMessage open, ready;
        uint8_t *slots;

        open = request(b, a, v);
        open.job_open.flags = 0;
        broker_open_job(b, &open, &ready);
        *ret_stride = ready.job_ready.slot_stride;
        slots = malloc((STEPS + 1) * *ret_stride);
        assert_non_null(slots);
        for (uint32_t i = 0; i < STEPS; i++) {
                broker_step(b, 5, i);
                if (i == 0) /* which has made its own noise by then */
                        memcpy(slots, slot_video(a, &ready, 0), *ret_stride);
                memcpy(slots + (i + 1) * *ret_stride, slot_video(a, &ready, i + 1), *ret_stride);
        }
        return slots;
}

/* Of the states that there are slots for. */
static void assert_slots(
        const Arenas *a, const WireMessage *ready, uint32_t committed, const uint8_t *slots) {
        uint64_t stride = ready->job_ready.slot_stride;
        uint32_t n = ready->job_ready.n_slots, first = committed >= n ? committed - n + 1 : 0;

        for (uint32_t k = first; k <= committed; k++)
                assert_memory_equal(slot_video(a, ready, k), slots + k * stride, stride);
}

/* Every step in a worker of its own, which dies after it: the committed slot is all that the next one has.
 */
static void run_killed(const Variant *v, const uint8_t *slots) {
        CLEANUP(arenas_freep) Arenas *a = arenas_new(ARENA, ARENA);
        WireMessage open = {}, ready = {};

        for (uint32_t i = 0; i <= STEPS; i++) {
                CLEANUP(broker_freep) Broker *b = open_with(i + 1, a);

                if (i == 0)
                        open = request(b, a, v);
                open.header.epoch = i + 1;
                open.job_open.flags |= i > 0 ? WIRE_JOB_RESUME : 0;
                broker_open_job(b, &open, &ready);
                assert_int_equal(ready.job_ready.committed, i);
                if (i > 0 || !v->noise) {
                        assert_commit(a, &ready, i + 1, i);
                        assert_slots(a, &ready, i, slots);
                } else
                        assert_no_commit(a, &ready); /* the start is drawn by the first step */
                if (i < STEPS)
                        broker_step(b, 5, i);
                broker_kill(b);
        }
}

/* Goes on after every step with what the client has: the slots. */
static void run_taken_up(const Variant *v, const uint8_t *slots, uint64_t stride) {
        for (uint32_t k = 1; k < STEPS; k++) {
                CLEANUP(arenas_freep) Arenas *a = arenas_new(ARENA, ARENA);
                CLEANUP(broker_freep) Broker *b = open_with(9, a);
                const uint64_t shape[] = {k, stride};
                WireMessage open, ready;

                open = request(b, a, v);
                open.job_open.start_step = k;
                open.job_open.slot = arenas_put(a, ST_U8, 1, &stride, slots + k * stride);
                if (v->keep)
                        open.job_open.kept = arenas_put(a, ST_U8, 2, shape, slots);
                broker_open_job(b, &open, &ready);
                assert_int_equal(ready.job_ready.committed, k);
                assert_commit(a, &ready, 9, k);
                for (uint32_t i = k; i < STEPS; i++)
                        broker_step(b, 5, i);
                if (v->keep)
                        assert_slots(a, &ready, STEPS, slots);
                else
                        assert_memory_equal(slot_video(a, &ready, STEPS), slots + STEPS * stride, stride);
        }
}

static void sample_interrupted_anywhere_same_bits(void **state) {
        for (size_t i = 0; i < ELEMENTSOF(variants); i++) {
                CLEANUP_FREE uint8_t *slots = NULL;
                uint64_t stride;

                slots = run_undisturbed(&variants[i], &stride);
                run_killed(&variants[i], slots);
                run_taken_up(&variants[i], slots, stride);
        }
}

/* A worker that dies after a job went on from a client's slot: the committed state counts, not the slot. */
static void sample_taken_up_and_killed_same_bits(void **state) {
        CLEANUP(arenas_freep) Arenas *a = arenas_new(ARENA, ARENA);
        CLEANUP_FREE uint8_t *slots = NULL;
        WireMessage open = {}, ready;
        uint64_t stride;

        slots = run_undisturbed(&variants[3], &stride);
        for (uint32_t i = 1; i <= STEPS; i++) {
                CLEANUP(broker_freep) Broker *b = open_with(i, a);

                if (i == 1) {
                        open = request(b, a, &variants[3]);
                        open.job_open.start_step = 1;
                        open.job_open.slot = arenas_put(a, ST_U8, 1, &stride, slots + stride);
                } else
                        open.job_open.flags |= WIRE_JOB_RESUME;
                open.header.epoch = i;
                broker_open_job(b, &open, &ready);
                assert_int_equal(ready.job_ready.committed, i);
                if (i < STEPS)
                        broker_step(b, 5, i);
                broker_kill(b);
        }
        assert_memory_equal(slot_video(a, &ready, STEPS), slots + STEPS * stride, stride);
}

/* Finite latents that are too large for the model: it is said which state is not finite, nothing of it is
 * committed, and a resumed run ends with the same words. */
static void step_not_finite_is_refused_and_not_committed(void **state) {
        CLEANUP(arenas_freep) Arenas *a = arenas_new(ARENA, ARENA);
        WireMessage open = {}, ready;

        for (unsigned round = 0; round < 2; round++) {
                CLEANUP(broker_freep) Broker *b = open_with(round + 1, a);

                if (round == 0) {
                        open = job_of_golden(b, 5, a, "traj_euler_4");
                        for (uint64_t i = 0; i < N_VIDEO; i++) {
                                const float large = i % 2 ? 3e38f : -3e38f;

                                memcpy(a->input + open.job_open.video.offset + 4 * i, &large, sizeof(large));
                        }
                }
                open.header.epoch = round + 1;
                open.job_open.flags = round == 0 ? 0 : WIRE_JOB_RESUME;
                broker_open_job(b, &open, &ready);
                for (unsigned again = 0; again < 2; again++) {
                        broker_say(b, WIRE_STEP, 5, 0);
                        broker_expect_error(
                                b, 5, FAULT_INVALID_TENSOR, "of the state after step 1 of 4 has ");
                        assert_commit(a, &ready, round + 1, 0);
                }
        }
        {
                CLEANUP(broker_freep) Broker *b = open_with(9, a);

                open.header.epoch = 9;
                open.job_open.kind = WIRE_JOB_STEP;
                open.job_open.flags = 0;
                open.job_open.sigma_video = open.job_open.sigma_audio = 0.5f;
                broker_open_job(b, &open, &ready);
                broker_say(b, WIRE_STEP, 5, 0);
                broker_expect_error(b, 5, FAULT_INVALID_TENSOR, "of the model's velocities has ");
                assert_commit(a, &ready, 9, 0);
        }
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(sample_interrupted_anywhere_same_bits),
                cmocka_unit_test(sample_taken_up_and_killed_same_bits),
                cmocka_unit_test(step_not_finite_is_refused_and_not_committed),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
