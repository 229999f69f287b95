/* SPDX-License-Identifier: Apache-2.0 */
/* The worker program: jobs, steps, results. */

#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>

#include <cmocka.h>

#include "service/h3/schedule.h"
#include "service/shared/cleanup.h"
#include "tests/unit/h3/golden.h"
#include "tests/unit/worker/broker.h"

#define N_VIDEO (24u * 2 * 4 * 4)
#define N_AUDIO (32u * 2 * 8)
#define TRAJ_STEPS 4u
/* Latent frames of 32 x 32 in job_long(): 256 rows each; a block of these takes about a tenth of a second
 * and more. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define LONG_FRAMES 3u
#else
#define LONG_FRAMES 10u
#endif

/* A worker that holds the tiny model as 1 and these arenas as session 2. */
static Broker *open_with(uint64_t epoch, const Arenas *a) {
        Broker *b = broker_open(epoch);

        broker_load_model(b, 1, NULL);
        broker_give_arenas(b, 2, a);
        return b;
}

static void step_tiny_f32_matches_reference(void **state) {
        CLEANUP(arenas_freep) Arenas *a = arenas_new(1 << 16, 1 << 16);
        CLEANUP(golden_freep) Golden *want = golden_open("expect_t2va_tiny.f32");
        CLEANUP(broker_freep) Broker *b = open_with(3, a);
        WireMessage open, ready, done;

        open = job_of_golden(b, 5, a, "case_t2va_tiny");
        broker_open_job(b, &open, &ready);
        assert_int_equal(ready.job_ready.rows, 33);
        assert_int_equal(ready.job_ready.steps, 1);
        assert_int_equal(ready.job_ready.blocks, 3);
        assert_int_equal(ready.job_ready.committed, 0);
        assert_int_equal(ready.job_ready.n_slots, 1);
        assert_true(ready.job_ready.output_used <= a->output_size);
        assert_commit(a, &ready, 3, 0);

        broker_say(b, WIRE_STEP, 5, 0);
        broker_expect(b, WIRE_STEP_DONE, 5, &done);
        assert_true(done.step_done.compute_usec > 0 && done.step_done.compute_usec < 60000000);
        assert_commit(a, &ready, 3, 1);
        assert_near(slot_video(a, &ready, 1), want, "video_velocity", N_VIDEO, 5e-6);
        assert_near(slot_audio(a, &ready, 1), want, "audio_velocity", N_AUDIO, 5e-6);

        if (done.step_done.compute_usec < 20000)
                assert_int_equal(b->n_progress, 0);

        for (uint64_t i = ready.job_ready.output_used; i < a->output_size; i++)
                assert_int_equal(a->output[i], 0xa5);
        broker_say(b, WIRE_JOB_CLOSE, 5, 0);
        broker_say(b, WIRE_ARENA_CLOSE, 2, 0);
        broker_say(b, WIRE_MODEL_CLOSE, 1, 0);
        broker_expect_acks(b, 12);
}

static WireMessage run_of(const WireMessage *open, uint64_t rows) {
        WireMessage m;

        wire_init(&m, WIRE_JOB_RUN, open->header.epoch, open->header.job, 0);
        memcpy(m.bytes + sizeof(WireHeader), open->bytes + sizeof(WireHeader), sizeof(WireJobOpen) - sizeof(WireHeader));
        m.job_run.plan.ranks = m.job_run.plan.chunks = 1;
        m.job_run.plan.row_tile = 128;
        m.job_run.plan.kind = WIRE_PLAN_HIDDEN_GATHER;
        m.job_run.plan.exchange = WIRE_EXCHANGE_HOST;
        m.job_run.plan.rows[0].end = rows;
        m.job_run.plan.heads[0].end = 8;
        return m;
}

/* All in one message: the same answers, the same bits. */
static void job_run_is_open_plan_and_step(void **state) {
        CLEANUP(arenas_freep) Arenas *a = arenas_new(1 << 16, 1 << 16);
        CLEANUP(broker_freep) Broker *b = open_with(3, a);
        WireMessage open, run, ready, done;
        float video[N_VIDEO];

        open = job_of_golden(b, 5, a, "case_t2va_tiny");
        broker_open_job(b, &open, &ready);
        broker_step(b, 5, 0);
        memcpy(video, slot_video(a, &ready, 1), sizeof(video));

        memset(a->output, 0, a->output_size);
        open.header.job = 6;
        run = run_of(&open, 33);
        broker_send(b, &run, -EBADF);
        broker_expect(b, WIRE_JOB_READY, 6, &ready);
        broker_expect(b, WIRE_STEP_DONE, 6, &done);
        assert_int_equal(done.header.step, 0);
        assert_commit(a, &ready, 3, 1);
        assert_memory_equal(slot_video(a, &ready, 1), video, sizeof(video));

        /* A plan for other rows is the step's fault. */
        open.header.job = 7;
        run = run_of(&open, 34);
        broker_send(b, &run, -EBADF);
        broker_expect(b, WIRE_JOB_READY, 7, NULL);
        broker_expect_error(b, 7, FAULT_INTERNAL, "");

        /* Refused: one answer. */
        open.header.job = 8;
        open.job_open.sigma_video = 2.0f;
        run = run_of(&open, 33);
        broker_send(b, &run, -EBADF);
        broker_expect_error(b, 8, FAULT_INVALID_ARGUMENT, "sigmas");
        open.job_open.sigma_video = 0.5f;
        run = run_of(&open, 33);
        broker_send(b, &run, -EBADF);
        broker_expect(b, WIRE_JOB_READY, 8, NULL);
        broker_expect(b, WIRE_STEP_DONE, 8, NULL);

        run.job_open.flags = WIRE_JOB_RESUME;
        run.header.job = 9;
        broker_send(b, &run, -EBADF);
        broker_expect_eof(b);
}

static void step_tiny_bf16_matches_reference(void **state) {
        CLEANUP(arenas_freep) Arenas *a = arenas_new(1 << 16, 1 << 16);
        CLEANUP(golden_freep) Golden *want = golden_open("expect_t2va_tiny.f32");
        CLEANUP(broker_freep) Broker *b = open_with(1, a);
        WireMessage open, ready;

        open = job_of_golden(b, 5, a, "case_t2va_tiny");
        open.job_open.compute = WIRE_COMPUTE_AUTO;
        broker_open_job(b, &open, &ready);
        broker_step(b, 5, 0);
        assert_near(slot_video(a, &ready, 1), want, "video_velocity", N_VIDEO, 1.25 * 1.81e-2);
        assert_near(slot_audio(a, &ready, 1), want, "audio_velocity", N_AUDIO, 1.25 * 1.84e-2);
}

static void assert_traj_state(const Arenas *a, const WireMessage *ready, const Golden *traj, uint32_t step) {
        char name[32];

        (void) snprintf(name, sizeof(name), "step.%u.video", step);
        assert_near(slot_video(a, ready, step + 1), traj, name, N_VIDEO, 2e-5);
        (void) snprintf(name, sizeof(name), "step.%u.audio", step);
        assert_near(slot_audio(a, ready, step + 1), traj, name, N_AUDIO, 2e-5);
}

static void sample_euler_4_matches_reference_step_by_step(void **state) {
        CLEANUP(golden_freep) Golden *traj = golden_open("traj_euler_4");

        for (unsigned keep = 0; keep < 2; keep++) {
                CLEANUP(arenas_freep) Arenas *a = arenas_new(1 << 16, 1 << 16);
                CLEANUP(broker_freep) Broker *b = open_with(9, a);
                WireMessage open, ready;

                open = job_of_golden(b, 5, a, "traj_euler_4");
                open.job_open.flags = keep ? WIRE_JOB_KEEP_STEPS : 0;
                open.job_open.output_offset = 4096; /* not at the start */
                open.job_open.output_size -= 4096;
                broker_open_job(b, &open, &ready);
                assert_int_equal(ready.job_ready.steps, TRAJ_STEPS);
                assert_int_equal(ready.job_ready.n_slots, keep ? TRAJ_STEPS + 1 : 2);
                assert_true(ready.job_ready.commit_offset >= 4096);
                assert_commit(a, &ready, 9, 0);
                assert_memory_equal(
                        slot_video(a, &ready, 0), golden_data(traj, "video", ST_F32, NULL), N_VIDEO * 4);
                assert_memory_equal(
                        slot_audio(a, &ready, 0), golden_data(traj, "audio", ST_F32, NULL), N_AUDIO * 4);

                for (uint32_t i = 0; i < TRAJ_STEPS; i++) {
                        broker_step(b, 5, i);
                        assert_commit(a, &ready, 9, i + 1);
                        assert_traj_state(a, &ready, traj, i);
                }

                if (keep) /* nothing was overwritten */
                        for (uint32_t i = 0; i < TRAJ_STEPS; i++)
                                assert_traj_state(a, &ready, traj, i);
                broker_say(b, WIRE_STEP, 5, TRAJ_STEPS);
                broker_expect_error(b, 5, FAULT_INTERNAL, "all 4 steps are done");
        }
}

static void sample_made_schedule_matches_reference(void **state) {
        CLEANUP(arenas_freep) Arenas *a = arenas_new(1 << 16, 1 << 16);
        CLEANUP(golden_freep) Golden *traj = golden_open("traj_euler_4");
        CLEANUP(broker_freep) Broker *b = open_with(1, a);
        WireMessage open, ready;

        open = job_of_golden(b, 5, a, "traj_euler_4");
        open.job_open.schedule = WIRE_SCHEDULE_REFERENCE;
        open.job_open.steps = TRAJ_STEPS;
        open.job_open.shift_video = 12.0f;
        open.job_open.shift_audio = 3.0f;
        broker_open_job(b, &open, &ready);
        assert_int_equal(ready.job_ready.steps, TRAJ_STEPS);
        for (uint32_t i = 0; i < TRAJ_STEPS; i++)
                broker_step(b, 5, i);
        assert_traj_state(a, &ready, traj, TRAJ_STEPS - 1);
}

/* One step with a schedule that the worker makes is the step with that list given. */
static void sample_made_schedules_are_those_of_their_kind(void **state) {
        static const WireSchedule kinds[] = {WIRE_SCHEDULE_SIMPLE, WIRE_SCHEDULE_REFERENCE};
        static const H3ScheduleKind h3_kinds[] = {H3_SCHEDULE_SIMPLE, H3_SCHEDULE_REFERENCE};
        CLEANUP(arenas_freep) Arenas *a = arenas_new(1 << 18, 1 << 16);
        CLEANUP(broker_freep) Broker *b = open_with(1, a);
        float video[2][N_VIDEO];

        for (unsigned i = 0; i < ELEMENTSOF(kinds); i++) {
                float sigmas_video[50], sigmas_audio[50];
                WireMessage open, ready;
                uint64_t count;
                uint32_t n;

                open = job_of_golden(b, 10 + i, a, "traj_euler_4");
                assert_int_equal(h3_schedule(h3_kinds[i], 49, 12.0f, sigmas_video, &n, NULL), 0);
                assert_int_equal(h3_schedule(h3_kinds[i], 49, 3.0f, sigmas_audio, &n, NULL), 0);
                count = n + 1;
                open.job_open.sigmas_video = arenas_put(a, ST_F32, 1, &count, sigmas_video);
                open.job_open.sigmas_audio = arenas_put(a, ST_F32, 1, &count, sigmas_audio);
                broker_open_job(b, &open, &ready);
                assert_int_equal(ready.job_ready.steps, n);
                broker_step(b, 10 + i, 0);
                memcpy(video[i], slot_video(a, &ready, 1), sizeof(video[i]));

                open.header.job = 20 + i;
                open.job_open.schedule = kinds[i];
                open.job_open.steps = 49;
                open.job_open.shift_video = 12.0f;
                open.job_open.shift_audio = 3.0f;
                broker_open_job(b, &open, &ready);
                assert_int_equal(ready.job_ready.steps, n);
                broker_step(b, 20 + i, 0);
                assert_memory_equal(slot_video(a, &ready, 1), video[i], sizeof(video[i]));
        }
        assert_memory_not_equal(video[0], video[1], sizeof(video[0]));
}

/* The bits of the whole output after an undisturbed run of traj_euler_4 with all states kept. */
static void run_undisturbed(float *ret_video, float *ret_audio) {
        CLEANUP(arenas_freep) Arenas *a = arenas_new(1 << 16, 1 << 16);
        CLEANUP(broker_freep) Broker *b = open_with(1, a);
        WireMessage open, ready;

        open = job_of_golden(b, 5, a, "traj_euler_4");
        broker_open_job(b, &open, &ready);
        for (uint32_t i = 0; i < TRAJ_STEPS; i++)
                broker_step(b, 5, i);
        memcpy(ret_video, slot_video(a, &ready, TRAJ_STEPS), N_VIDEO * 4);
        memcpy(ret_audio, slot_audio(a, &ready, TRAJ_STEPS), N_AUDIO * 4);
}

static void sample_killed_between_and_during_steps_same_bits(void **state) {
        CLEANUP(arenas_freep) Arenas *a = arenas_new(1 << 16, 1 << 16);
        float video[N_VIDEO], audio[N_AUDIO];
        uint32_t committed = 0, epoch = 0;
        WireMessage open = {}, ready = {};

        run_undisturbed(video, audio);

        /* Every worker does one step and is killed after it, or with the next one under way at some point.
         */
        for (unsigned round = 0; committed < TRAJ_STEPS; round++) {
                CLEANUP(broker_freep) Broker *b = open_with(++epoch, a);
                const struct timespec pause = {.tv_nsec = 200000L * round};

                assert_true(round < 100);
                if (round == 0)
                        open = job_of_golden(b, 5, a, "traj_euler_4");
                else
                        open.job_open.flags = WIRE_JOB_RESUME;
                open.header.epoch = epoch;
                broker_open_job(b, &open, &ready);
                /* A killed step may have committed: never less than what was said to be done, never more
                 * than one more. */
                assert_in_range(ready.job_ready.committed, committed, committed + 1);
                committed = ready.job_ready.committed;
                assert_commit(a, &ready, epoch, committed);
                if (committed == TRAJ_STEPS)
                        break;

                if (round % 2 == 0) {
                        broker_step(b, 5, committed);
                        committed++;
                        if (committed < TRAJ_STEPS)
                                broker_say(b, WIRE_STEP, 5, committed);
                } else
                        broker_say(b, WIRE_STEP, 5, committed);
                (void) nanosleep(&pause, NULL);
                broker_kill(b);
        }

        assert_memory_equal(slot_video(a, &ready, TRAJ_STEPS), video, sizeof(video));
        assert_memory_equal(slot_audio(a, &ready, TRAJ_STEPS), audio, sizeof(audio));
}

static void step_killed_and_resumed(void **state) {
        CLEANUP(arenas_freep) Arenas *a = arenas_new(1 << 16, 1 << 16);
        CLEANUP(golden_freep) Golden *want = golden_open("expect_t2va_tiny.f32");
        WireMessage open, ready;

        for (uint32_t epoch = 1; epoch <= 2; epoch++) {
                CLEANUP(broker_freep) Broker *b = open_with(epoch, a);

                if (epoch == 1)
                        open = job_of_golden(b, 5, a, "case_t2va_tiny");
                else {
                        open.header.epoch = epoch;
                        open.job_open.flags = WIRE_JOB_RESUME;
                }
                broker_open_job(b, &open, &ready);
                assert_int_equal(ready.job_ready.committed, epoch - 1);
                assert_commit(a, &ready, epoch, epoch - 1);
                if (epoch == 1)
                        broker_step(b, 5, 0);
                broker_kill(b);
        }
        assert_near(slot_video(a, &ready, 1), want, "video_velocity", N_VIDEO, 5e-6);
}

static void resume_without_valid_state_refused(void **state) {
        CLEANUP(arenas_freep) Arenas *a = arenas_new(1 << 16, 1 << 16);
        CLEANUP(broker_freep) Broker *b = open_with(1, a);
        WireMessage open, ready;
        uint64_t word;
        float *video;

        open = job_of_golden(b, 5, a, "traj_euler_4");
        memset(a->output, 0, a->output_size);
        open.job_open.flags = WIRE_JOB_RESUME;
        broker_send(b, &open, -EBADF);
        broker_expect_error(b, 5, FAULT_INVALID_ARGUMENT, "no committed state");

        word = wire_commit_pack(1, TRAJ_STEPS + 1);
        memcpy(a->output, &word, sizeof(word));
        broker_send(b, &open, -EBADF);
        broker_expect_error(b, 5, FAULT_INVALID_ARGUMENT, "5 steps of 4");

        open.job_open.flags = 0;
        broker_open_job(b, &open, &ready);
        broker_step(b, 5, 0);
        broker_say(b, WIRE_JOB_CLOSE, 5, 0);
        video = (float *) slot_video(a, &ready, 1);
        video[700] = INFINITY;
        open.job_open.flags = WIRE_JOB_RESUME;
        broker_send(b, &open, -EBADF);
        broker_expect_error(
                b, 5, FAULT_INVALID_TENSOR, "video of the committed state has Inf at [21, 1, 3, 0]");
}

static void input_changed_after_ready_has_no_effect(void **state) {
        CLEANUP(arenas_freep) Arenas *a = arenas_new(1 << 16, 1 << 16);
        CLEANUP(golden_freep) Golden *traj = golden_open("traj_euler_4");
        CLEANUP(broker_freep) Broker *b = open_with(1, a);
        WireMessage open, ready;

        open = job_of_golden(b, 5, a, "traj_euler_4");
        broker_open_job(b, &open, &ready);
        memset(a->input, 0xff, a->input_size); /* NaN all over */
        for (uint32_t i = 0; i < TRAJ_STEPS; i++) {
                broker_step(b, 5, i);
                assert_traj_state(a, &ready, traj, i);
        }
}

/* Two samples and a step of other prompts and compute types, their steps taking turns: each as if it were
 * alone. */
static void jobs_interleaved_same_bits(void **state) {
        CLEANUP(arenas_freep) Arenas *a = arenas_new(1 << 18, 1 << 18);
        CLEANUP(broker_freep) Broker *b = open_with(1, a);
        WireMessage open[3], ready[3];
        float video[N_VIDEO], audio[N_AUDIO], other[N_VIDEO];

        run_undisturbed(video, audio);
        for (unsigned i = 0; i < 3; i++) {
                open[i] = job_of_golden(b, 5 + i, a, "traj_euler_4");
                open[i].job_open.output_offset = i << 16;
                open[i].job_open.output_size = 1 << 16;
        }
        a->input[open[1].job_open.text.offset] ^= 1; /* another prompt, by one bit */
        open[2].job_open.compute = WIRE_COMPUTE_BF16;
        for (unsigned i = 0; i < 3; i++)
                broker_open_job(b, &open[i], &ready[i]);

        for (uint32_t s = 0; s < TRAJ_STEPS; s++) {
                for (unsigned i = 0; i < 3; i++) /* all queued at once */
                        broker_say(b, WIRE_STEP, 5 + i, s);
                for (unsigned i = 0; i < 3; i++)
                        broker_expect(b, WIRE_STEP_DONE, 5 + i, NULL);
        }
        assert_memory_equal(slot_video(a, &ready[0], TRAJ_STEPS), video, sizeof(video));
        assert_memory_equal(slot_audio(a, &ready[0], TRAJ_STEPS), audio, sizeof(audio));
        assert_memory_not_equal(slot_video(a, &ready[1], TRAJ_STEPS), video, sizeof(video));
        assert_memory_not_equal(slot_video(a, &ready[2], TRAJ_STEPS), video, sizeof(video));

        /* The other prompt alone. */
        memcpy(other, slot_video(a, &ready[1], TRAJ_STEPS), sizeof(other));
        open[1].header.job = 9;
        broker_open_job(b, &open[1], &ready[1]);
        for (uint32_t s = 0; s < TRAJ_STEPS; s++)
                broker_step(b, 9, s);
        assert_memory_equal(slot_video(a, &ready[1], TRAJ_STEPS), other, sizeof(other));
}

/* Waits for the first PROGRESS of a running step. */
static void wait_progress(Broker *b) {
        unsigned before = b->n_progress;

        while (b->n_progress == before) {
                const struct timespec pause = {.tv_nsec = 1000000};
                WireMessage m;
                Fault f = {};
                int fd, r;

                r = wire_receive(b->socket, &m, &fd, &f);
                if (r == -EAGAIN) {
                        (void) nanosleep(&pause, NULL);
                        continue;
                }
                assert_int_equal(r, 1);
                b->n_acks += m.header.acks;
                if (m.header.type == WIRE_PROGRESS) {
                        b->n_progress++;
                        assert_int_equal(m.progress.blocks, 3);
                        assert_in_range(m.progress.block, 1, 3);
                } else if (m.header.type != WIRE_ACK)
                        fail_msg("%s before the first PROGRESS", wire_type_name(m.header.type));
        }
}

static void cancel_running_step_stops_at_a_block(void **state) {
        CLEANUP(arenas_freep) Arenas *a = arenas_new(1 << 23, 1 << 23);
        CLEANUP(golden_freep) Golden *want = golden_open("expect_t2va_tiny.f32");
        CLEANUP(broker_freep) Broker *b = open_with(1, a);
        WireMessage open, ready, small;

        open = job_long(b, 5, a, LONG_FRAMES);
        broker_open_job(b, &open, &ready);
        broker_say(b, WIRE_STEP, 5, 0);
        wait_progress(b);
        broker_say(b, WIRE_CANCEL, 5, 0);
        broker_say(b, WIRE_CANCEL, 4711, 0); /* not there: no error */
        broker_expect_error(b, 5, FAULT_CANCELLED, "cancelled");
        assert_int_equal(b->n_progress, 1);
        assert_commit(a, &ready, 1, 0);

        /* It stays cancelled; others are not. */
        broker_say(b, WIRE_STEP, 5, 0);
        broker_expect_error(b, 5, FAULT_CANCELLED, "cancelled");
        broker_say(b, WIRE_JOB_CLOSE, 5, 0);

        small = job_of_golden(b, 6, a, "case_t2va_tiny");
        broker_open_job(b, &small, &ready);
        broker_step(b, 6, 0);
        assert_near(slot_video(a, &ready, 1), want, "video_velocity", N_VIDEO, 5e-6);
}

static void cancel_queued_step_answers_in_its_turn(void **state) {
        CLEANUP(arenas_freep) Arenas *a = arenas_new(1 << 23, 1 << 23);
        CLEANUP(broker_freep) Broker *b = open_with(1, a);
        WireMessage open, ready, small, small_ready;

        open = job_long(b, 5, a, 4);
        open.job_open.output_size = 1 << 22;
        broker_open_job(b, &open, &ready);
        small = job_of_golden(b, 6, a, "case_t2va_tiny");
        small.job_open.output_offset = 1 << 22;
        small.job_open.output_size = 1 << 22;
        broker_open_job(b, &small, &small_ready);

        broker_say(b, WIRE_STEP, 5, 0);
        broker_say(b, WIRE_STEP, 6, 0);
        broker_say(b, WIRE_CANCEL, 6, 0);
        broker_expect(b, WIRE_STEP_DONE, 5, NULL);
        broker_expect_error(b, 6, FAULT_CANCELLED, "cancelled");
        assert_commit(a, &small_ready, 1, 0);
}

static void close_during_step_leaves_the_arena_alone(void **state) {
        CLEANUP(arenas_freep) Arenas *a = arenas_new(1 << 23, 1 << 23);
        CLEANUP(broker_freep) Broker *b = open_with(1, a);
        WireMessage open, ready, next_ready;

        open = job_long(b, 5, a, LONG_FRAMES);
        broker_open_job(b, &open, &ready);
        broker_say(b, WIRE_STEP, 5, 0);
        wait_progress(b);

        /* All of it goes while the step runs; the answer still comes, and the model is there for the next.
         */
        broker_say(b, WIRE_JOB_CLOSE, 5, 0);
        broker_say(b, WIRE_ARENA_CLOSE, 2, 0);
        broker_say(b, WIRE_MODEL_CLOSE, 1, 0);
        broker_expect_error(b, 5, FAULT_CANCELLED, "cancelled");
        assert_commit(a, &ready, 1, 0);
        broker_expect_acks(b, 12);

        broker_load_model(b, 1, NULL);
        broker_give_arenas(b, 2, a);
        open = job_of_golden(b, 6, a, "case_t2va_tiny");
        broker_open_job(b, &open, &next_ready);
        broker_step(b, 6, 0);
        assert_commit(a, &next_ready, 1, 1);
}

static void end_of_file_during_step_ends_the_worker(void **state) {
        for (unsigned die = 0; die < 2; die++) {
                CLEANUP(arenas_freep) Arenas *a = arenas_new(1 << 23, 1 << 23);
                CLEANUP(broker_freep) Broker *b = open_with(1, a);
                WireMessage open, ready;
                int status;

                open = job_long(b, 5, a, LONG_FRAMES);
                broker_open_job(b, &open, &ready);
                broker_say(b, WIRE_STEP, 5, 0);
                wait_progress(b);
                if (die)
                        broker_say(b, WIRE_DIE, 0, 0);
                else
                        (void) close(STEAL_FD(b->socket));

                status = broker_wait(b);
                assert_true(WIFSIGNALED(status));
                assert_int_equal(WTERMSIG(status), SIGKILL);
                assert_commit(a, &ready, 1, 0);
        }
}

static void step_out_of_order_refused(void **state) {
        CLEANUP(arenas_freep) Arenas *a = arenas_new(1 << 16, 1 << 16);
        CLEANUP(golden_freep) Golden *traj = golden_open("traj_euler_4");
        CLEANUP(broker_freep) Broker *b = open_with(1, a);
        WireMessage open, ready, plan;

        broker_say(b, WIRE_STEP, 5, 0);
        broker_expect_error(b, 5, FAULT_INTERNAL, "job 5, which is not open");

        open = job_of_golden(b, 5, a, "traj_euler_4");
        broker_send(b, &open, -EBADF);
        broker_expect(b, WIRE_JOB_READY, 5, &ready);
        broker_say(b, WIRE_STEP, 5, 0);
        broker_expect_error(b, 5, FAULT_INTERNAL, "before PLAN");

        wire_init(&plan, WIRE_PLAN, 1, 5, 0);
        plan.plan.ranks = 1;
        plan.plan.row_tile = 128;
        plan.plan.kind = WIRE_PLAN_HIDDEN_GATHER;
        plan.plan.exchange = WIRE_EXCHANGE_HOST;
        plan.plan.chunks = 1;
        plan.plan.rows[0].end = 32;
        plan.plan.heads[0].end = 8;
        broker_send(b, &plan, -EBADF);
        broker_say(b, WIRE_STEP, 5, 0);
        broker_expect_error(b, 5, FAULT_INTERNAL, "cuts the rows at 32");

        broker_plan(b, 5, 33);
        broker_say(b, WIRE_STEP, 5, 1);
        broker_expect_error(b, 5, FAULT_INTERNAL, "step 0 is next");
        assert_commit(a, &ready, 1, 0);
        broker_step(b, 5, 0);
        broker_say(b, WIRE_STEP, 5, 0);
        broker_expect_error(b, 5, FAULT_INTERNAL, "step 1 is next");
        assert_traj_state(a, &ready, traj, 0);
}

static void job_without_tags_is_all_text(void **state) {
        CLEANUP(arenas_freep) Arenas *a = arenas_new(1 << 16, 1 << 16);
        CLEANUP(broker_freep) Broker *b = open_with(1, a);
        float with[N_VIDEO], without[N_VIDEO];
        WireMessage open, ready;

        open = job_of_golden(b, 5, a, "case_t2va_tiny");
        memset(a->input + open.job_open.text_tags.offset, 1, open.job_open.text_tags.size);
        broker_open_job(b, &open, &ready);
        broker_step(b, 5, 0);
        memcpy(with, slot_video(a, &ready, 1), sizeof(with));

        open.header.job = 6;
        open.job_open.text_tags = (WireTensor){};
        broker_open_job(b, &open, &ready);
        broker_step(b, 6, 0);
        memcpy(without, slot_video(a, &ready, 1), sizeof(without));
        assert_memory_equal(with, without, sizeof(with));

        open.header.job = 7;
        open.job_open.text_tags = arenas_put(a, ST_U8, 1, (uint64_t[]){9}, (uint8_t[9]){0});
        broker_open_job(b, &open, &ready);
        broker_step(b, 7, 0);
        assert_memory_not_equal(slot_video(a, &ready, 1), with, sizeof(with));
}

static void arena_unusable_answered_at_job_open(void **state) {
        CLEANUP(arenas_freep) Arenas *a = arenas_new(1 << 16, 1 << 16);
        CLEANUP(broker_freep) Broker *b = broker_open(1);
        WireMessage open, m;

        broker_load_model(b, 1, NULL);
        wire_init(&m, WIRE_ARENA, 1, 2, 0);
        m.arena.kind = WIRE_ARENA_INPUT;
        m.arena.size = a->input_size;
        broker_send(b, &m, a->input_fd);
        open = job_of_golden(b, 5, a, "case_t2va_tiny");
        broker_send(b, &open, -EBADF);
        broker_expect_error(b, 5, FAULT_INTERNAL, "no output arena");

        m.arena.kind = WIRE_ARENA_OUTPUT;
        m.arena.size = a->output_size * 2; /* mapped as said, the end would be SIGBUS */
        broker_send(b, &m, a->output_fd);
        broker_send(b, &open, -EBADF);
        broker_expect_error(b, 5, FAULT_INTERNAL, "output arena of 131072 bytes cannot be used");

        broker_say(b, WIRE_ARENA_CLOSE, 2, 0);
        broker_give_arenas(b, 2, a);
        broker_send(b, &open, -EBADF);
        broker_expect(b, WIRE_JOB_READY, 5, NULL);
}

static void job_opened_twice_ends_the_worker(void **state) {
        CLEANUP(arenas_freep) Arenas *a = arenas_new(1 << 16, 1 << 16);
        CLEANUP(broker_freep) Broker *b = open_with(1, a);
        WireMessage open;
        int status;

        open = job_of_golden(b, 5, a, "case_t2va_tiny");
        broker_send(b, &open, -EBADF);
        broker_expect(b, WIRE_JOB_READY, 5, NULL);
        broker_send(b, &open, -EBADF);
        broker_expect_eof(b);
        status = broker_wait(b);
        assert_true(WIFEXITED(status) && WEXITSTATUS(status) == EXIT_FAILURE);
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(step_tiny_f32_matches_reference),
                cmocka_unit_test(job_run_is_open_plan_and_step),
                cmocka_unit_test(step_tiny_bf16_matches_reference),
                cmocka_unit_test(sample_euler_4_matches_reference_step_by_step),
                cmocka_unit_test(sample_made_schedule_matches_reference),
                cmocka_unit_test(sample_made_schedules_are_those_of_their_kind),
                cmocka_unit_test(sample_killed_between_and_during_steps_same_bits),
                cmocka_unit_test(step_killed_and_resumed),
                cmocka_unit_test(resume_without_valid_state_refused),
                cmocka_unit_test(input_changed_after_ready_has_no_effect),
                cmocka_unit_test(jobs_interleaved_same_bits),
                cmocka_unit_test(cancel_running_step_stops_at_a_block),
                cmocka_unit_test(cancel_queued_step_answers_in_its_turn),
                cmocka_unit_test(close_during_step_leaves_the_arena_alone),
                cmocka_unit_test(end_of_file_during_step_ends_the_worker),
                cmocka_unit_test(step_out_of_order_refused),
                cmocka_unit_test(job_without_tags_is_all_text),
                cmocka_unit_test(arena_unusable_answered_at_job_open),
                cmocka_unit_test(job_opened_twice_ends_the_worker),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
