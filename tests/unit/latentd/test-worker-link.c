/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/unit/latentd/fake-worker.h"

#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>

#include "service/latentd/worker-start.h"
#include "service/shared/clock.h"

#define START 10.0f

/* Runs a job through; after it the worker is fine again. */
static void assert_works(Fake *f, Session *s) {
        Job *j;

        f->hook = NULL;
        j = fake_submit(f, s, WIRE_JOB_SAMPLE, 3, 0);
        RUN_UNTIL(f, job_is_finished(j));
        assert_result(s, j, START, 3);
}

static void hello_other_version_is_a_clear_error(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, START);
        Job *j;

        f->build_id = "0.0.1-other";
        j = fake_submit(f, s, WIRE_JOB_SAMPLE, 3, 0);
        RUN_UNTIL(f, job_is_finished(j));
        assert_int_equal(j->state, JOB_FAILED);
        assert_string_equal(j->fault.name, FAULT_NO_WORKER);
        assert_non_null(strstr(j->fault.text, "0.0.1-other"));
        assert_non_null(strstr(f->m->state_reason, "restart both"));
        assert_int_equal(f->n_starts, 1); /* another try would be the same */

        f->build_id = LATENTD_VERSION;
        assert_works(f, s);
        assert_string_equal(f->m->state_reason, "");
}

static bool die_at_welcome(Fake *f, const WireMessage *m) {
        if (m->header.type != WIRE_WELCOME)
                return false;
        fake_die(f);
        return true;
}

static void welcome_that_cannot_be_followed_is_no_worker(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, START);
        Job *j;

        f->hook = die_at_welcome;
        j = fake_submit(f, s, WIRE_JOB_SAMPLE, 3, 0);
        RUN_UNTIL(f, job_is_finished(j));
        assert_string_equal(j->fault.name, FAULT_NO_WORKER);
        assert_int_equal(j->retries_total, 0);
        assert_int_equal(f->n_starts, 3);
}

/* As when no GPU is there; trying again would not change that. */
static void hello_without_device_says_why(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, START);
        Job *j;

        f->no_device = "There is no NVIDIA driver.";
        j = fake_submit(f, s, WIRE_JOB_SAMPLE, 3, 0);
        RUN_UNTIL(f, job_is_finished(j));
        assert_string_equal(j->fault.name, FAULT_NO_WORKER);
        assert_non_null(strstr(j->fault.text, "has no device: There is no NVIDIA driver."));
        assert_string_equal(worker_link_no_device(f->m->worker), "There is no NVIDIA driver.");
        assert_int_equal(f->n_starts, 1);

        f->no_device = NULL;
        assert_works(f, s);
        assert_string_equal(worker_link_no_device(f->m->worker), "");
}

static unsigned devices_lost;

static bool lose_device(Fake *f, const WireMessage *m) {
        WireMessage e;

        if (m->header.type != WIRE_STEP || devices_lost >= 2)
                return false;
        devices_lost++;
        wire_init(&e, WIRE_ERROR, f->epoch, m->header.job, m->header.step);
        (void) snprintf(e.error.fault.name, sizeof(e.error.fault.name), FAULT_WORKER_CRASHED);
        (void) snprintf(e.error.fault.text, sizeof(e.error.fault.text), "lost its device: the GPU fell off");
        e.error.fatal = 1;
        fake_send(f, &e);
        return true;
}

/* It goes on in the next worker; a step that loses two of them is to blame. */
static void error_lost_device_job_goes_on(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, START);
        Job *j;

        devices_lost = 1; /* once */
        f->hook = lose_device;
        j = fake_submit(f, s, WIRE_JOB_SAMPLE, 3, 0);
        RUN_UNTIL(f, job_is_finished(j));
        assert_result(s, j, START, 3);
        assert_int_equal(f->n_starts, 2);
        assert_int_equal(devices_lost, 2);

        devices_lost = 0;
        j = fake_submit(f, s, WIRE_JOB_SAMPLE, 3, 0);
        RUN_UNTIL(f, job_is_finished(j));
        assert_string_equal(j->fault.name, FAULT_WORKER_CRASHED);
        assert_non_null(strstr(j->fault.text, "lost its device: the GPU fell off"));
        assert_works(f, s);
}

static void hello_late_worker_is_dropped(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, START);
        Job *j;

        f->silent = true;
        f->m->worker->hello_usec = 30000;
        j = fake_submit(f, s, WIRE_JOB_SAMPLE, 3, 0);
        RUN_UNTIL(f, f->m->worker->failures == 1);
        assert_false(job_is_finished(j));
        f->silent = false;
        f->m->worker->hello_usec = UINT64_C(60000000); /* the fake is as slow as the machine */
        RUN_UNTIL(f, job_is_finished(j));
        assert_result(s, j, START, 3);
        assert_int_equal(f->n_starts, 2);
}

static void start_three_failures_degrade(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, START);
        uint64_t begin = clock_usec();
        Job *j;

        f->silent = true;
        f->m->worker->hello_usec = 10000;
        j = fake_submit(f, s, WIRE_JOB_SAMPLE, 3, 0);
        RUN_UNTIL(f, job_is_finished(j));
        assert_string_equal(j->fault.name, FAULT_NO_WORKER);
        assert_string_not_equal(f->m->state_reason, "");
        assert_int_equal(f->m->worker->failures, 3);
        assert_int_equal(worker_link_starts(f->m->worker), 3);
        assert_true(clock_usec() - begin >= 750000); /* a quarter, then half a second between them */

        /* The next job does not wait the ten seconds in this test. */
        f->silent = false;
        f->m->worker->hello_usec = UINT64_C(60000000);
        f->m->worker->failed_usec = 0;
        assert_works(f, s);
        assert_string_equal(f->m->state_reason, "");
        assert_int_equal(f->m->worker->failures, 0);
}

static void start_missing_binary_is_no_worker(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, START);
        Config *c = f->m->config;
        Job *j;

        c->worker_start = WORKER_START_SPAWN;
        c->worker = WORKER_CUDA;
        free(c->worker_directory);
        c->worker_directory = strdup(f->dir);
        j = fake_submit(f, s, WIRE_JOB_SAMPLE, 3, 0);
        RUN_UNTIL(f, job_is_finished(j));
        assert_string_equal(j->fault.name, FAULT_NO_WORKER);
        assert_non_null(strstr(j->fault.text, "latent-worker-cuda"));

        c->worker_start = WORKER_START_AUTO;
        free(c->worker_cuda_socket);
        c->worker_cuda_socket = strdup(c->worker_socket); /* it is there */
        assert_works(f, s);
        assert_true(f->m->worker->process.cuda);
}

static void credits_are_never_exceeded(void **state) {
        Fake *f = *state;
        Session *s;
        Job *j;

        /* A model of many files, and a worker that takes its time: fake_pump() counts. */
        free(f->model->parts[0].name);
        free(f->model->parts);
        f->model->n_parts = 100;
        f->model->parts = calloc(100, sizeof(*f->model->parts));
        for (unsigned i = 0; i < 100; i++)
                f->model->parts[i] = (ModelPart){ .model = f->model,
                        .name = (char *) "part",
                        .fd = -EBADF,
                        .size = 4000,
                        .region = &f->region };

        s = fake_session(f, START);
        worker_link_want(f->m->worker);
        RUN_UNTIL(f, worker_link_is_ready(f->m->worker));
        f->hold_acks = true;
        j = fake_submit(f, s, WIRE_JOB_SAMPLE, 3, 0);
        RUN_UNTIL(f, f->unacked == WIRE_CREDITS);
        run_for(f, 20000);
        assert_int_equal(f->unacked, WIRE_CREDITS);
        assert_int_equal(f->count[WIRE_MODEL_COMMIT], 0);

        fake_ack_all(f);
        RUN_UNTIL(f, job_is_finished(j));
        assert_result(s, j, START, 3);
        assert_int_equal(f->count[WIRE_REGION], 100);
        assert_int_equal(f->m->worker->credits_used_max, WIRE_CREDITS);

        f->model->n_parts = 1; /* for fake_model_free() */
        f->model->parts[0].name = strdup("part");
}

/* hook_count is the type to die at, once. */
static bool die_at_type(Fake *f, const WireMessage *m) {
        if (m->header.type != f->hook_count)
                return false;
        f->hook = NULL;
        fake_die(f);
        return true;
}

static void death_at_every_phase_is_survived(void **state) {
        static const WireType types[] = {
                WIRE_WELCOME,
                WIRE_MODEL_OPEN,
                WIRE_REGION,
                WIRE_MODEL_COMMIT,
                WIRE_ARENA,
                WIRE_JOB_OPEN,
                WIRE_PLAN,
                WIRE_STEP,
        };
        Fake *f = *state;
        Session *s = fake_session(f, START);

        for (size_t i = 0; i < ELEMENTSOF(types); i++) {
                unsigned starts = f->n_starts;
                Job *j;

                if (f->conn >= 0) {
                        fake_die(f);
                        RUN_UNTIL(f, !worker_link_is_ready(f->m->worker));
                        starts = f->n_starts;
                }
                f->m->worker->failures = 0;
                f->hook = die_at_type;
                f->hook_count = types[i];
                j = fake_submit(f, s, WIRE_JOB_SAMPLE, 3, 0);
                RUN_UNTIL(f, job_is_finished(j));
                assert_null(f->hook);
                assert_result(s, j, START, 3);
                assert_int_equal(f->n_starts - starts, 2);
                assert_int_equal(j->retries_total, types[i] == WIRE_WELCOME ? j->retries_total : 1);
        }

        /* At the end of a job nothing is lost. */
        f->hook = die_at_type;
        f->hook_count = WIRE_JOB_CLOSE;
        {
                Job *j = fake_submit(f, s, WIRE_JOB_SAMPLE, 3, 0);

                RUN_UNTIL(f, job_is_finished(j) && !f->hook);
                assert_result(s, j, START, 3);
        }
}

static void drop_only_starts_another_when_the_old_one_is_gone(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, START);
        Job *j;

        f->hook = NULL;
        j = fake_submit(f, s, WIRE_JOB_SAMPLE, 3, 0);
        RUN_UNTIL(f, job_is_finished(j));
        (void) fake_submit(f, s, WIRE_JOB_SAMPLE, 3, 0);
        worker_link_drop(f->m->worker, "is dropped by the test");

        /* The fake does not look: the connection stays, and so does the epoch. */
        for (int i = 0; i < 20; i++)
                assert_true(sd_event_run(f->m->event, 2000) >= 0);
        assert_int_equal(f->m->worker->state, LINK_ENDING);
        assert_int_equal(worker_link_starts(f->m->worker), 1);
        RUN_UNTIL(f, worker_link_starts(f->m->worker) == 2);
        assert_works(f, fake_session(f, START));
}

/* Lies: each replaces the true answer of a good worker, once. */
typedef struct Lie {
        const char *name;
        WireType at;
        void (*tell)(Fake *f, const WireMessage *m);
} Lie;

static void change_job_ready(Fake *f, const WireMessage *m, void (*change)(WireJobReady *y)) {
        WireMessage reply;
        uint32_t committed;
        FakeJob *j = fake_open(f, &m->job_open, &committed);

        fake_job_ready(f, j, committed, &reply);
        change(&reply.job_ready);
        fake_send(f, &reply);
}

#define LIE_READY(name, change)                                                                             \
        static void name##_change(WireJobReady *y) {                                                        \
                change;                                                                                     \
        }                                                                                                   \
        static void name(Fake *f, const WireMessage *m) {                                                   \
                change_job_ready(f, m, name##_change);                                                      \
        }

LIE_READY(lie_commit_outside, y->commit_offset = ARENA_BYTES)
LIE_READY(lie_commit_before_range, y->commit_offset = 0)
LIE_READY(lie_commit_unaligned, y->commit_offset += 4)
LIE_READY(lie_commit_in_slot, y->commit_offset = y->slot_offset)
LIE_READY(lie_slot_outside, y->slot_offset = ARENA_BYTES - 64)
LIE_READY(lie_stride_overflow, y->slot_stride = UINT64_C(1) << 63)
LIE_READY(lie_slots_many, y->n_slots = 1000000)
LIE_READY(lie_slots_one, y->n_slots = 1)
LIE_READY(lie_steps, y->steps = 4)
LIE_READY(lie_blocks, y->blocks = 0)
LIE_READY(lie_rows, y->rows = 0)
LIE_READY(lie_committed, y->committed = 1)
LIE_READY(lie_used, y->output_used = 16385)
LIE_READY(lie_tensor_place, y->audio.offset = y->slot_stride - 4)
LIE_READY(lie_tensor_overlap, y->audio.offset = 0)
LIE_READY(lie_tensor_shape, y->video.shape[0]++)
LIE_READY(lie_tensor_type, y->video.dtype = ST_BF16)
LIE_READY(lie_stride, y->slot_stride += 64)
LIE_READY(lie_carried, y->carried = y->audio)
LIE_READY(lie_unknown_job, y->header.job = 999999)

static void lie_step_done_early(Fake *f, const WireMessage *m) {
        fake_step_done(f, m->header.job, m->header.step);
}

static void lie_step_done_other_step(Fake *f, const WireMessage *m) {
        fake_compute(f, fake_job(f, m->header.job), m->header.step);
        fake_step_done(f, m->header.job, m->header.step + 1);
}

static void lie_step_done_old_epoch_in_word(Fake *f, const WireMessage *m) {
        FakeJob *j = fake_job(f, m->header.job);

        fake_compute(f, j, m->header.step);
        *fake_commit_word(f, j) = wire_commit_pack((uint32_t) f->epoch + 7, m->header.step + 1);
        fake_step_done(f, m->header.job, m->header.step);
}

static void lie_step_done_twice(Fake *f, const WireMessage *m) {
        fake_compute(f, fake_job(f, m->header.job), m->header.step);
        fake_step_done(f, m->header.job, m->header.step);
        fake_step_done(f, m->header.job, m->header.step);
}

static void lie_progress_blocks(Fake *f, const WireMessage *m) {
        fake_progress(f, m->header.job, m->header.step, FAKE_BLOCKS + 1);
}

static void lie_progress_unknown_job(Fake *f, const WireMessage *m) {
        fake_progress(f, 999999, m->header.step, 1);
}

static void lie_cancelled(Fake *f, const WireMessage *m) {
        fake_error(f, m->header.job, m->header.step, FAULT_CANCELLED);
}

static void lie_error_unknown(Fake *f, const WireMessage *m) {
        fake_error(f, 999999, 0, FAULT_INTERNAL);
}

static void lie_error_other_step(Fake *f, const WireMessage *m) {
        fake_error(f, m->header.job, m->header.step + 1, FAULT_INTERNAL);
}

static void lie_acks(Fake *f, const WireMessage *m) {
        WireMessage ack;

        wire_init(&ack, WIRE_ACK, f->epoch, 0, 0);
        for (unsigned i = 0; i < WIRE_CREDITS + 1; i++)
                fake_send(f, &ack);
        f->unacked = 1;
}

static void lie_second_hello(Fake *f, const WireMessage *m) {
        WireMessage hello;

        wire_init(&hello, WIRE_HELLO, f->epoch, 0, 0);
        fake_send(f, &hello);
}

static void lie_brokers_message(Fake *f, const WireMessage *m) {
        WireMessage die;

        wire_init(&die, WIRE_DIE, f->epoch, 0, 0);
        fake_send(f, &die);
}

static void lie_garbage(Fake *f, const WireMessage *m) {
        assert_int_equal(send(f->conn, "garbage", 7, MSG_NOSIGNAL), 7);
}

static void lie_model_ready_again(Fake *f, const WireMessage *m) {
        fake_model_ready(f, m->job_open.model);
}

static const Lie lies[] = {
        { "commit word behind the arena", WIRE_JOB_OPEN, lie_commit_outside },
        { "commit word before the range", WIRE_JOB_OPEN, lie_commit_before_range },
        { "commit word unaligned", WIRE_JOB_OPEN, lie_commit_unaligned },
        { "commit word in a slot", WIRE_JOB_OPEN, lie_commit_in_slot },
        { "slots outside", WIRE_JOB_OPEN, lie_slot_outside },
        { "stride overflows", WIRE_JOB_OPEN, lie_stride_overflow },
        { "many slots", WIRE_JOB_OPEN, lie_slots_many },
        { "one slot", WIRE_JOB_OPEN, lie_slots_one },
        { "other steps", WIRE_JOB_OPEN, lie_steps },
        { "no blocks", WIRE_JOB_OPEN, lie_blocks },
        { "no rows", WIRE_JOB_OPEN, lie_rows },
        { "committed without resume", WIRE_JOB_OPEN, lie_committed },
        { "uses more than it may", WIRE_JOB_OPEN, lie_used },
        { "result behind its slot", WIRE_JOB_OPEN, lie_tensor_place },
        { "results overlap", WIRE_JOB_OPEN, lie_tensor_overlap },
        { "result of another shape", WIRE_JOB_OPEN, lie_tensor_shape },
        { "result of another type", WIRE_JOB_OPEN, lie_tensor_type },
        { "slots of another size", WIRE_JOB_OPEN, lie_stride },
        { "carried by a sampler that carries nothing", WIRE_JOB_OPEN, lie_carried },
        { "JOB_READY of an unknown job", WIRE_JOB_OPEN, lie_unknown_job },
        { "MODEL_READY again", WIRE_JOB_OPEN, lie_model_ready_again },
        { "STEP_DONE without a commit", WIRE_STEP, lie_step_done_early },
        { "STEP_DONE of another step", WIRE_STEP, lie_step_done_other_step },
        { "commit word of another epoch", WIRE_STEP, lie_step_done_old_epoch_in_word },
        { "STEP_DONE twice", WIRE_STEP, lie_step_done_twice },
        { "more blocks than there are", WIRE_STEP, lie_progress_blocks },
        { "PROGRESS of an unknown job", WIRE_STEP, lie_progress_unknown_job },
        { "cancelled by nobody", WIRE_STEP, lie_cancelled },
        { "ERROR of an unknown job", WIRE_STEP, lie_error_unknown },
        { "ERROR of another step", WIRE_STEP, lie_error_other_step },
        { "ACK for nothing", WIRE_STEP, lie_acks },
        { "second HELLO", WIRE_STEP, lie_second_hello },
        { "DIE from the worker", WIRE_STEP, lie_brokers_message },
        { "garbage", WIRE_STEP, lie_garbage },
};

static bool tell_lie(Fake *f, const WireMessage *m) {
        const Lie *lie = &lies[f->hook_count];

        if (m->header.type != lie->at)
                return false;
        f->hook = NULL;
        lie->tell(f, m);
        return true;
}

static void lying_worker_is_dropped_and_the_job_survives(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, START);

        for (unsigned i = 0; i < ELEMENTSOF(lies); i++) {
                unsigned starts = f->n_starts;
                Job *j;

                f->hook = tell_lie;
                f->hook_count = i;
                j = fake_submit(f, s, WIRE_JOB_SAMPLE, 3, 1);
                RUN_UNTIL(f, job_is_finished(j));
                if (f->n_starts - starts != (i == 0 ? 2 : 1))
                        fail_msg("the lie \"%s\" went through", lies[i].name);
                assert_result(s, j, START, 3);
        }
}

static bool other_epoch_first(Fake *f, const WireMessage *m) {
        WireMessage stale;

        if (m->header.type != WIRE_STEP)
                return false;
        wire_init(&stale, WIRE_ERROR, f->epoch - 1, m->header.job, m->header.step);
        (void) snprintf(stale.error.fault.name, sizeof(stale.error.fault.name), "Internal");
        fake_send(f, &stale);
        return false;
}

static void message_of_other_epoch_is_dropped(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, START);
        Job *j;

        f->hook = other_epoch_first;
        j = fake_submit(f, s, WIRE_JOB_SAMPLE, 3, 0);
        RUN_UNTIL(f, job_is_finished(j));
        assert_result(s, j, START, 3);
        assert_int_equal(f->n_starts, 1);
}

/* Where the worker's limit is short it is so for this step alone: what it does else is as slow as the machine. */
static bool hold_first_step(Fake *f, const WireMessage *m) {
        if (m->header.type == WIRE_STEP && f->hook_count++ == 0)
                return true;
        if (f->hook_count > 0)
                f->m->worker->stall_usec = UINT64_C(60000000);
        return false;
}

static void step_without_progress_is_a_death(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, START);
        Job *j;

        f->m->worker->stall_usec = 50000;
        f->hook = hold_first_step;
        j = fake_submit(f, s, WIRE_JOB_SAMPLE, 3, 0);
        RUN_UNTIL(f, job_is_finished(j));
        assert_result(s, j, START, 3);
        assert_int_equal(f->n_starts, 2);
        assert_int_equal(f->count[WIRE_DIE], 1);
        assert_int_equal(j->retries_total, 1);
}

static void step_with_progress_is_left_alone(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, START);
        Job *j;

        f->m->worker->stall_usec = 1500000;
        f->hook = hold_first_step;
        j = fake_submit(f, s, WIRE_JOB_STEP, 1, 0);
        RUN_UNTIL(f, f->count[WIRE_STEP] == 1);
        for (uint32_t b = 1; b <= 4; b++) {
                run_for(f, 400000); /* longer in all than the limit */
                fake_progress(f, j->id, 0, b);
        }
        fake_compute(f, fake_job(f, j->id), 0);
        fake_step_done(f, j->id, 0);
        RUN_UNTIL(f, job_is_finished(j));
        assert_result(s, j, START, 1);
        assert_int_equal(f->n_starts, 1);
}

typedef struct Answer {
        unsigned calls;
        Fault fault;
        WireModelReady info;
} Answer;

static void on_model(void *userdata, Model *model, const WireModelReady *info, const Fault *f) {
        Answer *a = userdata;

        a->calls++;
        a->fault = f ? *f : (Fault){};
        a->info = info ? *info : (WireModelReady){};
}

/* A model that opens beside it may take minutes; the step's limit stays. */
static bool hold_step_and_later_models(Fake *f, const WireMessage *m) {
        if (m->header.type == WIRE_MODEL_COMMIT)
                return f->hook_count > 0;
        return hold_first_step(f, m);
}

static void step_without_progress_is_a_death_also_beside_an_opening_model(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, START);
        Model other = *f->model;
        Answer a = {};
        Job *j;

        f->m->worker->stall_usec = 50000;
        f->hook = hold_step_and_later_models;
        j = fake_submit(f, s, WIRE_JOB_SAMPLE, 3, 0);
        RUN_UNTIL(f, f->count[WIRE_STEP] == 1);
        other.id = 4711;
        assert_int_equal(worker_link_open_model(f->m->worker, &other, on_model, &a), 0);
        RUN_UNTIL(f, f->n_starts == 2); /* and not open_usec later */
        worker_link_forget_model(f->m->worker, &other);
        f->hook = NULL;
        RUN_UNTIL(f, job_is_finished(j));
        assert_result(s, j, START, 3);
        assert_int_equal(j->retries_total, 1);
}

static void open_model_answers_once(void **state) {
        Fake *f = *state;
        Answer a = {}, b = {}, c = {};

        assert_int_equal(worker_link_open_model(f->m->worker, f->model, on_model, &a), 0);
        assert_int_equal(worker_link_open_model(f->m->worker, f->model, on_model, &b), 0);
        RUN_UNTIL(f, a.calls && b.calls);
        assert_int_equal(a.info.heads, FAKE_HEADS);
        assert_int_equal(f->count[WIRE_MODEL_COMMIT], 1);

        assert_int_equal(worker_link_open_model(f->m->worker, f->model, on_model, &c), 0);
        assert_int_equal(c.calls, 0); /* never from inside */
        RUN_UNTIL(f, c.calls);
        run_for(f, 10000);
        assert_int_equal(a.calls + b.calls + c.calls, 3);
        assert_int_equal(f->count[WIRE_MODEL_COMMIT], 1);
}

static bool refuse_model(Fake *f, const WireMessage *m) {
        if (m->header.type != WIRE_MODEL_COMMIT)
                return false;
        fake_error(f, m->header.job, 0, FAULT_INVALID_MODEL);
        return true;
}

static void open_model_refused_gives_the_fault(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, START);
        Answer a = {};
        Job *j;

        f->hook = refuse_model;
        assert_int_equal(worker_link_open_model(f->m->worker, f->model, on_model, &a), 0);
        RUN_UNTIL(f, a.calls);
        assert_string_equal(a.fault.name, FAULT_INVALID_MODEL);

        j = fake_submit(f, s, WIRE_JOB_SAMPLE, 3, 0); /* the same by way of a job */
        RUN_UNTIL(f, job_is_finished(j));
        assert_string_equal(j->fault.name, FAULT_INVALID_MODEL);
        assert_int_equal(f->count[WIRE_JOB_OPEN], 0);
        assert_int_equal(f->n_starts, 1);
        assert_works(f, s);
}

static bool die_at_commit(Fake *f, const WireMessage *m) {
        if (m->header.type != WIRE_MODEL_COMMIT)
                return false;
        fake_die(f);
        return true;
}

static void open_model_two_deaths_fail(void **state) {
        Fake *f = *state;
        Answer a = {};

        f->hook = die_at_commit;
        assert_int_equal(worker_link_open_model(f->m->worker, f->model, on_model, &a), 0);
        RUN_UNTIL(f, a.calls);
        assert_string_equal(a.fault.name, FAULT_WORKER_CRASHED);
        assert_int_equal(f->n_starts, 2);
        run_for(f, 20000);
        assert_int_equal(f->n_starts, 2); /* nobody wants a third */
}

/* Each death once for each user, however many models were open. */
static void open_model_deaths_are_counted_for_its_user(void **state) {
        Fake *f = *state;
        Model more = *f->model;
        Answer a = {}, b = {};

        f->m->queue = queue_free(f->m->queue);
        f->m->config->crash_budget = 2;
        f->m->config->crash_budget_usec = UINT64_C(600000000);
        assert_int_equal(queue_new(f->m, &f->m->queue), 0);

        f->hook = die_at_commit;
        f->model->uid = more.uid = 7;
        more.id = 4711;
        assert_int_equal(worker_link_open_model(f->m->worker, f->model, on_model, &a), 0);
        assert_int_equal(worker_link_open_model(f->m->worker, &more, on_model, &b), 0);
        RUN_UNTIL(f, f->n_starts == 2);
        assert_int_equal(queue_wait_usec(f->m->queue, 7), 0);
        RUN_UNTIL(f, a.calls);
        assert_int_equal(a.fault.name[0] != '\0', true);
        assert_true(queue_wait_usec(f->m->queue, 7) > 0);
        assert_int_equal(queue_wait_usec(f->m->queue, 8), 0);
        worker_link_forget_model(f->m->worker, &more);
}

static bool hold_commit(Fake *f, const WireMessage *m) {
        return m->header.type == WIRE_MODEL_COMMIT;
}

static void forget_model_while_it_opens_closes_it_later(void **state) {
        Fake *f = *state;
        uint64_t id = f->model->id;
        Answer a = {};

        f->hook = hold_commit;
        assert_int_equal(worker_link_open_model(f->m->worker, f->model, on_model, &a), 0);
        RUN_UNTIL(f, f->count[WIRE_MODEL_COMMIT] == 1);
        worker_link_forget_model(f->m->worker, f->model);
        run_for(f, 10000);
        assert_int_equal(f->count[WIRE_MODEL_CLOSE], 0);
        fake_model_ready(f, id);
        RUN_UNTIL(f, f->count[WIRE_MODEL_CLOSE] == 1);
        assert_int_equal(a.calls, 0);
        assert_int_equal(f->n_starts, 1);
}

static void release_ends_only_an_idle_worker(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, START);
        Job *j;

        assert_int_equal(worker_link_release(f->m->worker), 0); /* none runs */
        f->hook = hold_first_step;
        j = fake_submit(f, s, WIRE_JOB_STEP, 1, 0);
        RUN_UNTIL(f, f->count[WIRE_STEP] == 1);
        assert_int_equal(worker_link_release(f->m->worker), -EBUSY);
        fake_compute(f, fake_job(f, j->id), 0);
        fake_step_done(f, j->id, 0);
        RUN_UNTIL(f, job_is_finished(j));

        assert_int_equal(worker_link_release(f->m->worker), 0);
        RUN_UNTIL(f, f->m->worker->state == LINK_IDLE);
        run_for(f, 10000);
        assert_int_equal(f->n_starts, 1);
        assert_int_equal(f->m->worker->failures, 0);
        assert_works(f, s); /* arenas and model are sent again */
        assert_int_equal(f->n_starts, 2);
}

static void say_idle(Fake *f, uint32_t times) {
        WireMessage m;

        wire_init(&m, WIRE_MEMORY, f->epoch, 0, 0);
        m.memory.idle = times;
        fake_send(f, &m);
}

static void memory_of_an_idle_worker_ends_it(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, START);
        Job *j;

        f->hook = hold_first_step;
        j = fake_submit(f, s, WIRE_JOB_STEP, 1, 0);
        RUN_UNTIL(f, f->count[WIRE_STEP] == 1);
        say_idle(f, 1); /* crossed with the step on its way */
        run_for(f, 20000);
        assert_int_equal(f->count[WIRE_DIE], 0);
        fake_compute(f, fake_job(f, j->id), 0);
        fake_step_done(f, j->id, 0);
        RUN_UNTIL(f, job_is_finished(j));

        say_idle(f, 1); /* nothing new */
        run_for(f, 20000);
        assert_int_equal(f->count[WIRE_DIE], 0);
        say_idle(f, 2);
        RUN_UNTIL(f, f->m->worker->state == LINK_IDLE);
        assert_int_equal(f->count[WIRE_DIE], 1);
        assert_int_equal(f->m->worker->failures, 0);
        assert_string_equal(f->m->state_reason, "");
        assert_int_equal(f->n_starts, 1);
        assert_works(f, s);
        assert_int_equal(f->n_starts, 2);
}

static WirePins pins_known;

static bool keep_known_pins(Fake *f, const WireMessage *m) {
        if (m->header.type == WIRE_KNOWN_PINS)
                pins_known = m->pins;
        return false;
}

static void say_pins(Fake *f, const char *numerics, uint32_t n, uint8_t seed) {
        WireMessage m;

        wire_init(&m, WIRE_PINS, f->epoch, 0, 0);
        memset(m.bytes + sizeof(WireHeader), seed, sizeof(WirePins) - sizeof(WireHeader));
        (void) snprintf(m.pins.numerics_id, sizeof(m.pins.numerics_id), "%s", numerics);
        (void) snprintf(m.pins.device, sizeof(m.pins.device), "of its own");
        m.pins.n = n;
        m.pins.reserved = 0;
        fake_send(f, &m);
}

/* Whatever the worker made of its layers comes to the next one as it was said last, also if it was killed. */
static void pins_go_to_the_next_worker(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, START);
        WorkerLink *w = f->m->worker;
        WirePins said;
        Job *j;

        j = fake_submit(f, s, WIRE_JOB_STEP, 1, 0);
        RUN_UNTIL(f, job_is_finished(j));
        assert_int_equal(f->count[WIRE_KNOWN_PINS], 0);
        say_pins(f, w->hello.numerics_id, 1, 3);
        say_pins(f, w->hello.numerics_id, WIRE_PINS_MAX, 5);
        RUN_UNTIL(f, w->pins.n == WIRE_PINS_MAX);
        said = w->pins;
        fake_die(f);
        RUN_UNTIL(f, w->state == LINK_IDLE);

        f->hook = keep_known_pins;
        j = fake_submit(f, s, WIRE_JOB_STEP, 1, 0);
        RUN_UNTIL(f, job_is_finished(j));
        assert_int_equal(f->count[WIRE_KNOWN_PINS], 1);
        assert_int_equal(pins_known.header.epoch, f->epoch);
        assert_memory_equal(
                (uint8_t *) &pins_known + sizeof(WireHeader), (uint8_t *) &said + sizeof(WireHeader), sizeof(said) - sizeof(WireHeader));
        assert_true(said.pins[WIRE_PINS_MAX - 1].small[WIRE_PIN_WORDS - 1] == UINT32_C(0x05050505));
}

static void pins_of_other_numerics_stay(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, START);
        WorkerLink *w = f->m->worker;
        Job *j;

        j = fake_submit(f, s, WIRE_JOB_STEP, 1, 0);
        RUN_UNTIL(f, job_is_finished(j));
        say_pins(f, "another", 1, 3);
        RUN_UNTIL(f, w->pins.n == 1);
        fake_die(f);
        RUN_UNTIL(f, w->state == LINK_IDLE);
        assert_works(f, s);
        assert_int_equal(f->n_starts, 2);
        assert_int_equal(f->count[WIRE_KNOWN_PINS], 0);
}

static void pins_without_room_drop_the_worker(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, START);
        Job *j;

        j = fake_submit(f, s, WIRE_JOB_STEP, 1, 0);
        RUN_UNTIL(f, job_is_finished(j));
        say_pins(f, f->m->worker->hello.numerics_id, WIRE_PINS_MAX + 1, 3);
        RUN_UNTIL(f, f->m->worker->state == LINK_IDLE);
        assert_int_equal(f->m->worker->pins.n, 0);
        assert_works(f, s);
}

static void plan_fits_ranks_of_worker_and_session(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, START);

        f->m->config->worker_ranks = 4;
        s->split.ranks = 2;
        assert_works(f, s);
        assert_int_equal(f->ranks, 4);
        assert_int_equal(f->plan.ranks, 2); /* the other two have no part */
        assert_int_equal(f->plan.rows[0].end, 256); /* 3 tiles of 128 on 2 ranks */
        assert_int_equal(f->plan.rows[1].end, FAKE_ROWS);
        assert_int_equal(f->plan.heads[1].end, FAKE_HEADS);
        assert_int_equal(f->plan.rows[2].end, 0);
}

/* What is wrong with the surroundings of a spawned worker. */
static const char *child_problem(void) {
        const char *fds = getenv("LISTEN_FDS"), *pid = getenv("LISTEN_PID"),
                   *level = getenv("LATENT_LOG_LEVEL");
        struct rlimit core;
        struct stat st;
        sigset_t mask;

        if (!fds || strcmp(fds, "1") != 0 || !pid || atoi(pid) != getpid())
                return "LISTEN_FDS, LISTEN_PID";
        if (getenv("LATENTD_TEST_SECRET") || !level || strcmp(level, "6") != 0)
                return "environment";
        if (getrlimit(RLIMIT_CORE, &core) < 0 || core.rlim_max != 0)
                return "core";
        if (prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) != 1)
                return "no_new_privs";
        if (fstat(0, &st) < 0 || !S_ISCHR(st.st_mode))
                return "stdin";
        if (sigprocmask(SIG_SETMASK, NULL, &mask) < 0 || sigismember(&mask, SIGTERM))
                return "signal mask";
        for (int fd = 4; fd < 1024; fd++)
                if (fcntl(fd, F_GETFD) >= 0)
                        return "a descriptor too many";
        return "all well";
}

/* The test program started as a worker: says in its numerics id what is wrong, then waits for the end. */
static int child_worker(void) {
        const char *mode = getenv("LATENT_TEST_CHILD");
        struct pollfd p = { .fd = 3, .events = POLLIN };
        WireMessage m;

        if (mode && strcmp(mode, "exit") == 0)
                return 3;

        wire_init(&m, WIRE_HELLO, 0, 0, 0);
        (void) snprintf(m.hello.build_id, sizeof(m.hello.build_id), LATENTD_VERSION);
        (void) snprintf(m.hello.backend, sizeof(m.hello.backend), "cpu");
        (void) snprintf(m.hello.numerics_id, sizeof(m.hello.numerics_id), "%s", child_problem());
        m.hello.n_devices = 1;
        m.hello.pid = getpid();
        if (wire_send(3, &m, -EBADF) < 0)
                return 1;

        for (;;) {
                CLEANUP_CLOSE int fd = -EBADF;

                (void) poll(&p, 1, -1);
                if (p.revents & (POLLHUP | POLLRDHUP))
                        return 0;
                if (wire_receive(3, &m, &fd, NULL) <= 0 || m.header.type == WIRE_DIE)
                        return 0;
                if (m.header.type == WIRE_WELCOME) {
                        WireMessage ack;

                        wire_init(&ack, WIRE_ACK, m.header.epoch, 0, 0);
                        (void) wire_send(3, &ack, -EBADF);
                }
                if (mode && strcmp(mode, "segv") == 0 && m.header.type == WIRE_MODEL_COMMIT) {
                        (void) signal(SIGSEGV, SIG_DFL); /* also under a sanitizer */
                        (void) raise(SIGSEGV);
                }
        }
}

static void use_child(Fake *f) {
        char link[128], self[4096];
        ssize_t n = readlink("/proc/self/exe", self, sizeof(self) - 1);

        assert_true(n > 0);
        self[n] = '\0';
        (void) snprintf(link, sizeof(link), "%s/latent-worker-cpu", f->dir);
        assert_int_equal(symlink(self, link), 0);
        f->m->config->worker_start = WORKER_START_SPAWN;
        free(f->m->config->worker_directory);
        f->m->config->worker_directory = strdup(f->dir);
}

static void remove_child(Fake *f) {
        char link[128];

        (void) snprintf(link, sizeof(link), "%s/latent-worker-cpu", f->dir);
        assert_int_equal(unlink(link), 0);
        (void) unsetenv("LATENT_TEST_CHILD");
}

static void spawn_child_is_shut_in(void **state) {
        Fake *f = *state;
        int extra = open("/dev/null", O_RDONLY); /* not close-on-exec: must not arrive */

        assert_int_equal(setenv("LATENTD_TEST_SECRET", "1", 1), 0);
        use_child(f);
        worker_link_want(f->m->worker);
        RUN_UNTIL(f, worker_link_is_ready(f->m->worker));
        assert_string_equal(worker_link_numerics_id(f->m->worker), "all well");
        assert_int_equal(worker_link_starts(f->m->worker), 1);

        /* Ends on request, and is waited for. */
        assert_int_equal(worker_link_release(f->m->worker), 0);
        RUN_UNTIL(f, f->m->worker->state == LINK_IDLE);
        assert_int_equal(f->m->worker->failures, 0);
        (void) close(extra);
        (void) unsetenv("LATENTD_TEST_SECRET");
        remove_child(f);
}

static void spawn_child_that_exits_degrades(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, START);
        Job *j;

        assert_int_equal(setenv("LATENT_TEST_CHILD", "exit", 1), 0);
        use_child(f);
        j = fake_submit(f, s, WIRE_JOB_SAMPLE, 3, 0);
        RUN_UNTIL(f, job_is_finished(j));
        assert_string_equal(j->fault.name, FAULT_NO_WORKER);
        assert_non_null(strstr(j->fault.text, "exited with status 3"));
        remove_child(f);
}

static void spawn_child_killed_is_named(void **state) {
        Fake *f = *state;
        Answer a = {};

        assert_int_equal(setenv("LATENT_TEST_CHILD", "segv", 1), 0);
        use_child(f);
        assert_int_equal(worker_link_open_model(f->m->worker, f->model, on_model, &a), 0);
        RUN_UNTIL(f, a.calls);
        assert_string_equal(a.fault.name, FAULT_WORKER_CRASHED);
        remove_child(f);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, fake_setup, fake_teardown)

int main(int argc, char **argv) {
        const struct CMUnitTest tests[] = {
                TEST(hello_other_version_is_a_clear_error),
                TEST(welcome_that_cannot_be_followed_is_no_worker),
                TEST(hello_without_device_says_why),
                TEST(error_lost_device_job_goes_on),
                TEST(hello_late_worker_is_dropped),
                TEST(start_three_failures_degrade),
                TEST(start_missing_binary_is_no_worker),
                TEST(credits_are_never_exceeded),
                TEST(death_at_every_phase_is_survived),
                TEST(drop_only_starts_another_when_the_old_one_is_gone),
                TEST(lying_worker_is_dropped_and_the_job_survives),
                TEST(message_of_other_epoch_is_dropped),
                TEST(step_without_progress_is_a_death),
                TEST(step_with_progress_is_left_alone),
                TEST(step_without_progress_is_a_death_also_beside_an_opening_model),
                TEST(open_model_answers_once),
                TEST(open_model_refused_gives_the_fault),
                TEST(open_model_two_deaths_fail),
                TEST(open_model_deaths_are_counted_for_its_user),
                TEST(forget_model_while_it_opens_closes_it_later),
                TEST(release_ends_only_an_idle_worker),
                TEST(memory_of_an_idle_worker_ends_it),
                TEST(pins_go_to_the_next_worker),
                TEST(pins_of_other_numerics_stay),
                TEST(pins_without_room_drop_the_worker),
                TEST(plan_fits_ranks_of_worker_and_session),
                TEST(spawn_child_is_shut_in),
                TEST(spawn_child_that_exits_degrades),
                TEST(spawn_child_killed_is_named),
        };

        if (argc == 1 && strstr(argv[0], "/latent-worker-cpu"))
                return child_worker();
        return cmocka_run_group_tests(tests, NULL, NULL);
}
