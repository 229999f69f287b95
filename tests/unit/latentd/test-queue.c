/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/unit/latentd/fake-worker.h"

#define START 100.0f

static void queue_sample_runs_to_result(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, START);
        Job *j = fake_submit(f, s, WIRE_JOB_SAMPLE, 5, 1);

        assert_int_equal(j->state, JOB_QUEUED);
        RUN_UNTIL(f, job_is_finished(j));
        assert_result(s, j, START, 5);
        assert_int_equal(f->count[WIRE_STEP], 5);
        assert_int_equal(f->count[WIRE_PLAN], 1);
        assert_int_equal(j->step, 5);
        assert_int_equal(j->retries_total, 0);
        assert_true(j->fraction == 1.0);
        assert_string_equal(j->numerics_id, "fake-1");
        assert_int_equal(f->m->steps_done, 5);
        RUN_UNTIL(f, f->n_jobs == 0); /* closed in the worker too */
}

static void queue_step_gives_velocities(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, START);
        Job *j = fake_submit(f, s, WIRE_JOB_STEP, 1, 0);
        WireTensor t;
        char name[32];

        RUN_UNTIL(f, job_is_finished(j));
        assert_result(s, j, START, 1);
        assert_int_equal(job_result_tensor(j, 0, name, &t), 0);
        assert_string_equal(name, "video_velocity");
        assert_int_equal(job_result_tensor(j, 1, name, &t), 0);
        assert_string_equal(name, "audio_velocity");
        assert_int_equal(job_result_tensor(j, 2, name, &t), -ENOENT);
}

static void queue_two_jobs_alternate(void **state) {
        Fake *f = *state;
        Session *a = fake_session(f, 0), *b = fake_session(f, START);
        Job *x = fake_submit(f, a, WIRE_JOB_SAMPLE, 3, 0), *y = fake_submit(f, b, WIRE_JOB_SAMPLE, 3, 0);

        RUN_UNTIL(f, job_is_finished(x) && job_is_finished(y));
        for (int i = 0; i < 6; i++)
                assert_int_equal(f->step_order[i], i % 2 == 0 ? x->id : y->id);
        assert_result(a, x, 0, 3);
        assert_result(b, y, START, 3);
}

static void queue_window_bounds_open_jobs(void **state) {
        Fake *f = *state;
        Session *s[3] = { fake_session(f, 0), fake_session(f, 1), fake_session(f, 2) };
        Job *jobs[12];
        unsigned most = 0;

        for (unsigned i = 0; i < 12; i++)
                jobs[i] = fake_submit(f, s[i % 3], WIRE_JOB_SAMPLE, 4, i / 3);
        assert_int_equal(queue_position(f->m->queue, jobs[0]), 0);
        assert_int_equal(queue_position(f->m->queue, jobs[11]), 11);

        while (!job_is_finished(jobs[11])) {
                RUN_UNTIL(f, true);
                assert_true(sd_event_run(f->m->event, 2000) >= 0);
                fake_pump(f);
                if (f->n_jobs > most)
                        most = f->n_jobs;
        }
        assert_int_equal(most, QUEUE_WINDOW);
        /* The first eight took one step each before any took its second; the ninth came when one had ended.
         */
        for (unsigned i = 0; i < 8; i++) {
                assert_int_equal(f->step_order[i], jobs[i]->id);
                assert_int_equal(f->step_order[8 + i], jobs[i]->id);
        }
        for (unsigned i = 0; i < 12; i++)
                assert_result(s[i % 3], jobs[i], (float) (i % 3), 4);
}

/* Dies instead of taking step 2, hook_count times. */
static bool die_at_step_2(Fake *f, const WireMessage *m) {
        if (m->header.type != WIRE_STEP || m->header.step != 2 || f->hook_count == 0)
                return false;
        f->hook_count--;
        fake_die(f);
        return true;
}

static void queue_death_in_step_resumes_from_commit(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, START);
        Job *j;

        f->hook = die_at_step_2;
        f->hook_count = 1;
        j = fake_submit(f, s, WIRE_JOB_SAMPLE, 5, 0);
        RUN_UNTIL(f, job_is_finished(j));
        assert_result(s, j, START, 5);
        assert_int_equal(f->n_starts, 2);
        assert_int_equal(j->retries_total, 1);
        assert_int_equal(f->count[WIRE_STEP], 6); /* step 2 twice, no other */
        assert_int_equal(f->count[WIRE_ARENA], 4);
        assert_int_equal(f->count[WIRE_MODEL_COMMIT], 2);
}

/* A trajectory that an earlier run of the service took to step 2: a death before its first commit starts there again, a later
 * one goes on. */
static void queue_started_later_survives_deaths(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, START);
        WireJobOpen q = fake_request(WIRE_JOB_SAMPLE, 6, 0);
        Fault fault = {};
        Job *j;

        q.start_step = 2;
        f->hook = die_at_step_2;
        f->hook_count = 1;
        assert_int_equal(session_submit(s, f->peer, &q, &j, &fault), 0);
        assert_int_equal(j->step, 2);
        RUN_UNTIL(f, job_is_finished(j));
        assert_result(s, j, START, 4); /* of the state that it was given */
        assert_int_equal(f->count[WIRE_STEP], 5);
        assert_int_equal(f->n_starts, 2);
        assert_int_equal(j->step, 6);
}

/* The second crash of a user's jobs: they wait, those of others do not. */
static void queue_crash_budget_makes_jobs_wait(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, START), *other = fake_session(f, 0);
        Job *j, *next, *alien;

        f->m->queue = queue_free(f->m->queue);
        f->m->config->crash_budget = 1;
        f->m->config->crash_budget_usec = UINT64_C(600000000);
        assert_int_equal(queue_new(f->m, &f->m->queue), 0);

        f->hook = die_at_step_2;
        f->hook_count = 1;
        j = fake_submit(f, s, WIRE_JOB_SAMPLE, 5, 0);
        RUN_UNTIL(f, f->hook_count == 0 && strcmp(j->phase, "crash-wait") == 0);
        next = fake_submit(f, s, WIRE_JOB_SAMPLE, 1, 1);
        alien = fake_submit(f, other, WIRE_JOB_SAMPLE, 3, 0);
        alien->uid++;
        RUN_UNTIL(f, job_is_finished(alien));
        assert_result(other, alien, 0, 3);
        run_for(f, 50000);
        assert_int_equal(j->state, JOB_RUNNING);
        assert_int_equal(j->step, 2);
        assert_int_equal(next->state, JOB_QUEUED);
        assert_string_equal(next->phase, "crash-wait");
        alien->uid--;

        /* What waits can be cancelled as ever. */
        job_cancel(next);
        assert_int_equal(next->state, JOB_CANCELLED);
        job_cancel(j);
        assert_int_equal(j->state, JOB_CANCELLED);
}

static void queue_two_deaths_in_one_step_fail(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, START);
        Job *j, *next;

        f->hook = die_at_step_2;
        f->hook_count = 2;
        j = fake_submit(f, s, WIRE_JOB_SAMPLE, 5, 0);
        RUN_UNTIL(f, job_is_finished(j));
        assert_int_equal(j->state, JOB_FAILED);
        assert_string_equal(j->fault.name, FAULT_WORKER_CRASHED);
        assert_int_equal(j->retries_total, 1);
        assert_int_equal(f->n_starts, 2);

        next = fake_submit(f, s, WIRE_JOB_SAMPLE, 5, 0);
        RUN_UNTIL(f, job_is_finished(next));
        assert_result(s, next, START, 5);
}

static bool die_once_in_each_step(Fake *f, const WireMessage *m) {
        if (m->header.type != WIRE_STEP || m->header.step < f->hook_count)
                return false;
        f->hook_count = m->header.step + 1;
        fake_die(f);
        return true;
}

static void queue_one_death_in_each_step_survives(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, START);
        Job *j;

        f->hook = die_once_in_each_step;
        j = fake_submit(f, s, WIRE_JOB_SAMPLE, 4, 0);
        RUN_UNTIL(f, job_is_finished(j));
        assert_result(s, j, START, 4);
        assert_int_equal(j->retries_total, 4);
        assert_int_equal(f->n_starts, 5);
}

static bool die_after_commit_of_1(Fake *f, const WireMessage *m) {
        if (m->header.type != WIRE_STEP || m->header.step != 1 || f->hook_count++ > 0)
                return false;
        fake_compute(f, fake_job(f, m->header.job), 1);
        fake_die(f);
        return true;
}

static void queue_death_between_commit_and_answer_keeps_step(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, START);
        Job *j;

        f->hook = die_after_commit_of_1;
        j = fake_submit(f, s, WIRE_JOB_SAMPLE, 3, 0);
        RUN_UNTIL(f, job_is_finished(j));
        assert_result(s, j, START, 3);
        assert_int_equal(j->retries_total, 0);
        assert_int_equal(f->count[WIRE_STEP], 3);
        assert_int_equal(f->hook_count, 1); /* step 1 was not asked for again */
}

static void queue_death_after_last_commit_finishes(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, START);
        Job *j;

        f->hook = die_after_commit_of_1;
        j = fake_submit(f, s, WIRE_JOB_SAMPLE, 2, 0);
        RUN_UNTIL(f, job_is_finished(j));
        assert_result(s, j, START, 2);
        assert_int_equal(f->n_starts, 1);
}

static bool die_at_first_step(Fake *f, const WireMessage *m) {
        if (m->header.type != WIRE_STEP || f->hook_count++ > 0)
                return false;
        fake_die(f);
        return true;
}

static void queue_death_in_step_job_runs_again(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, START);
        Job *j;

        f->hook = die_at_first_step;
        j = fake_submit(f, s, WIRE_JOB_STEP, 1, 0);
        RUN_UNTIL(f, job_is_finished(j));
        assert_result(s, j, START, 1);
        assert_int_equal(j->retries_total, 1);
}

static bool spoil_commit_and_die(Fake *f, const WireMessage *m) {
        if (m->header.type != WIRE_STEP || m->header.step != 2 || f->hook_count++ > 0)
                return false;
        *fake_commit_word(f, fake_job(f, m->header.job)) = wire_commit_pack((uint32_t) f->epoch, 4);
        fake_die(f);
        return true;
}

static void queue_impossible_commit_word_starts_again(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, START);
        Job *j;

        f->hook = spoil_commit_and_die;
        j = fake_submit(f, s, WIRE_JOB_SAMPLE, 5, 0);
        RUN_UNTIL(f, job_is_finished(j));
        assert_result(s, j, START, 5);
        assert_int_equal(f->count[WIRE_STEP], 3 + 5);
}

/* Of step 1: whether it was sparse, and of which blocks. */
static WireStepDone said;

static bool say_blocks(Fake *f, const WireMessage *m) {
        WireMessage reply;

        if (m->header.type != WIRE_STEP || m->header.step != 1 || f->hook_count++ > 0)
                return false;
        fake_compute(f, fake_job(f, m->header.job), 1);
        wire_init(&reply, WIRE_STEP_DONE, f->epoch, m->header.job, 1);
        reply.step_done.sparse = said.sparse;
        memcpy(reply.step_done.blocks_seen, said.blocks_seen, sizeof(said.blocks_seen));
        memcpy(reply.step_done.blocks_all, said.blocks_all, sizeof(said.blocks_all));
        fake_send(f, &reply);
        return true;
}

static void queue_impossible_blocks_drop_the_worker(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, START);
        static const struct {
                SparseMethod method;
                WireStepDone said;
                bool good;
        } table[] = {
                { SPARSE_SLA, { .sparse = 1, .blocks_seen = { 2, 0, 1 }, .blocks_all = { 2, 0, 2 } }, true },
                { SPARSE_SLA, { .sparse = 1, .blocks_seen = { 1, 3 }, .blocks_all = { 4, 2 } }, false },
                { SPARSE_SLA, { .blocks_seen = { 3 }, .blocks_all = { 4 } }, false },
                { SPARSE_SLA, { .sparse = 0 }, true },
                { SPARSE_NONE, { .sparse = 1, .blocks_seen = { 3 }, .blocks_all = { 4 } }, false },
        };

        f->hook = say_blocks;
        for (size_t i = 0; i < ELEMENTSOF(table); i++) {
                bool counted = table[i].good && table[i].said.sparse;
                WireJobOpen q = fake_request(WIRE_JOB_SAMPLE, 3, 0);
                unsigned starts = i == 0 ? 1 : f->n_starts; /* the first job starts it */
                Job *j;

                f->hook_count = 0;
                said = table[i].said;
                q.sparse.method = table[i].method;
                j = fake_submit_request(f, s, &q);
                RUN_UNTIL(f, job_is_finished(j));
                assert_result(s, j, START, 3);
                assert_int_equal(f->n_starts - starts, table[i].good ? 0 : 1);
                assert_int_equal(j->sparse_steps, counted ? 1 : 0);
                for (uint32_t rank = 0; rank < 3; rank++) {
                        assert_int_equal(j->blocks_seen[rank], counted ? table[i].said.blocks_seen[rank] : 0);
                        assert_int_equal(j->blocks_all[rank], counted ? table[i].said.blocks_all[rank] : 0);
                }
        }
}

static bool die_and_change_numerics(Fake *f, const WireMessage *m) {
        if (m->header.type != WIRE_STEP || m->header.step != 2 || f->hook_count++ > 0)
                return false;
        f->numerics_id = "fake-2";
        fake_die(f);
        return true;
}

static void queue_other_numerics_start_again(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, START);
        Job *j;

        f->hook = die_and_change_numerics;
        j = fake_submit(f, s, WIRE_JOB_SAMPLE, 4, 0);
        RUN_UNTIL(f, job_is_finished(j));
        assert_result(s, j, START, 4);
        assert_string_equal(j->numerics_id, "fake-2");
        assert_int_equal(f->count[WIRE_STEP], 3 + 4);
}

static void queue_death_spares_the_other_jobs(void **state) {
        Fake *f = *state;
        Session *a = fake_session(f, 0), *b = fake_session(f, START);
        Job *x, *y;

        /* Step 2 of x comes first and dies twice; y has done two steps and must not pay. */
        f->hook = die_at_step_2;
        f->hook_count = 2;
        x = fake_submit(f, a, WIRE_JOB_SAMPLE, 5, 0);
        y = fake_submit(f, b, WIRE_JOB_SAMPLE, 2, 0);
        RUN_UNTIL(f, job_is_finished(x) && job_is_finished(y));
        assert_int_equal(x->state, JOB_FAILED);
        assert_result(b, y, START, 2);
        assert_int_equal(y->retries_total, 0);
}

static void queue_cancel_queued_ends_at_once(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, START);
        Job *j = fake_submit(f, s, WIRE_JOB_SAMPLE, 5, 0);

        job_cancel(j);
        assert_int_equal(j->state, JOB_CANCELLED);
        assert_string_equal(j->fault.name, FAULT_CANCELLED);
        run_for(f, 20000);
        assert_int_equal(f->count[WIRE_JOB_OPEN], 0);
}

static bool hold_step_answer_cancel(Fake *f, const WireMessage *m) {
        if (m->header.type == WIRE_CANCEL) {
                fake_error(f, m->header.job, 0, FAULT_CANCELLED);
                return true;
        }
        return m->header.type == WIRE_STEP;
}

static void queue_cancel_running_waits_for_worker(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, START);
        Job *j;

        f->hook = hold_step_answer_cancel;
        j = fake_submit(f, s, WIRE_JOB_SAMPLE, 5, 0);
        RUN_UNTIL(f, f->count[WIRE_STEP] == 1);
        job_cancel(j);
        assert_int_equal(j->state, JOB_CANCELLING);
        RUN_UNTIL(f, job_is_finished(j));
        assert_int_equal(j->state, JOB_CANCELLED);
        assert_int_equal(f->count[WIRE_CANCEL], 1);
        RUN_UNTIL(f, f->n_jobs == 0);
        assert_int_equal(f->n_starts, 1);
}

static bool hold_step(Fake *f, const WireMessage *m) {
        return m->header.type == WIRE_STEP;
}

static void queue_cancel_running_ends_when_worker_dies(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, START);
        Job *j;

        f->hook = hold_step;
        j = fake_submit(f, s, WIRE_JOB_SAMPLE, 5, 0);
        RUN_UNTIL(f, f->count[WIRE_STEP] == 1);
        job_cancel(j);
        fake_die(f);
        RUN_UNTIL(f, job_is_finished(j));
        assert_int_equal(j->state, JOB_CANCELLED);
}

static void queue_session_close_keeps_arenas_until_answer(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, START);
        uint64_t id = s->id, job;
        Job *j;

        f->hook = hold_step;
        j = fake_submit(f, s, WIRE_JOB_SAMPLE, 5, 0);
        job = j->id;
        RUN_UNTIL(f, f->count[WIRE_STEP] == 1);
        session_close(s);
        assert_null(session_find(f->m, id));
        assert_int_equal(f->m->arena_bytes, 2 * ARENA_BYTES);
        run_for(f, 20000);
        assert_int_equal(f->count[WIRE_ARENA_CLOSE], 0);

        f->hook = NULL;
        fake_compute(f, fake_job(f, job), 0);
        fake_step_done(f, job, 0);
        RUN_UNTIL(f, TAILQ_EMPTY(&f->m->sessions));
        assert_int_equal(f->m->arena_bytes, 0);
        RUN_UNTIL(f, f->count[WIRE_ARENA_CLOSE] == 1);
        assert_int_equal(f->n_starts, 1);
        assert_int_equal(j->state, JOB_CANCELLED);
}

static void queue_session_close_sends_arena_close_last(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, START);
        Job *j;

        f->hook = hold_step_answer_cancel;
        j = fake_submit(f, s, WIRE_JOB_SAMPLE, 5, 0);
        RUN_UNTIL(f, f->count[WIRE_STEP] == 1);
        session_close(s);
        assert_int_equal(j->state, JOB_CANCELLING);
        RUN_UNTIL(f, f->count[WIRE_ARENA_CLOSE] == 1); /* fake_close_arena() checks that it is there */
        assert_int_equal(f->n_jobs, 0);
        assert_int_equal(f->n_arenas, 0);
        assert_int_equal(f->m->arena_bytes, 0);
        assert_int_equal(f->n_starts, 1);
        assert_null(j->session);
}

static void queue_peer_gone_frees_everything(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, START);

        f->hook = hold_step_answer_cancel;
        (void) fake_submit(f, s, WIRE_JOB_SAMPLE, 5, 0);
        (void) fake_submit(f, s, WIRE_JOB_SAMPLE, 5, 1);
        RUN_UNTIL(f, f->count[WIRE_STEP] == 1);
        peer_gone(STEAL_PTR(f->peer));
        RUN_UNTIL(f, TAILQ_EMPTY(&f->m->sessions) && TAILQ_EMPTY(&f->m->jobs));
        assert_int_equal(f->m->arena_bytes, 0);
        assert_int_equal(f->model->n_users, 0);
        f->peer = fake_peer_new(f);
}

static bool refuse_job(Fake *f, const WireMessage *m) {
        if (m->header.type != WIRE_JOB_OPEN)
                return false;
        fake_error(f, m->header.job, 0, FAULT_INVALID_TENSOR);
        return true;
}

static void queue_refused_job_fails_with_its_fault(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, START);
        Job *j, *next;

        f->hook = refuse_job;
        j = fake_submit(f, s, WIRE_JOB_SAMPLE, 5, 0);
        RUN_UNTIL(f, job_is_finished(j));
        assert_int_equal(j->state, JOB_FAILED);
        assert_string_equal(j->fault.name, FAULT_INVALID_TENSOR);
        assert_string_equal(j->fault.text, "The fake worker says no.");

        f->hook = NULL;
        next = fake_submit(f, s, WIRE_JOB_SAMPLE, 2, 0);
        RUN_UNTIL(f, job_is_finished(next));
        assert_result(s, next, START, 2);
        RUN_UNTIL(f, f->n_jobs == 0);
        assert_int_equal(f->count[WIRE_JOB_CLOSE], 1); /* not for the refused one */
        assert_int_equal(f->n_starts, 1);
}

/* The session's second step, whose request differs from the first one's by what differs from step to step. Without a turn of the loop:
 * the worker has it all before the broker can have read an answer. */
static Job *submit_ahead(Fake *f, Session *s) {
        WireJobOpen q = fake_request(WIRE_JOB_STEP, 1, 0);
        unsigned steps = f->count[WIRE_STEP];
        Fault fault = {};
        Job *j;

        j = fake_submit(f, s, WIRE_JOB_STEP, 1, 0);
        RUN_UNTIL(f, job_is_finished(j));
        assert_int_equal(f->count[WIRE_STEP], steps + 1);

        q.sigma_video = 0.25f;
        assert_int_equal(session_submit(s, f->peer, &q, &j, &fault), 0);
        assert_int_equal(j->state, JOB_RUNNING);
        return j;
}

static void queue_equal_request_goes_out_with_its_step(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, START);
        Job *j = submit_ahead(f, s), *other;

        fake_pump(f);
        assert_int_equal(f->count[WIRE_JOB_RUN], 1);
        assert_int_equal(f->count[WIRE_STEP], 2);
        RUN_UNTIL(f, job_is_finished(j));
        assert_result(s, j, START, 1);
        assert_int_equal(j->retries_total, 0);

        other = fake_submit(f, s, WIRE_JOB_SAMPLE, 2, 0); /* another one has to ask */
        fake_pump(f);
        assert_int_equal(f->count[WIRE_JOB_OPEN], 3);
        assert_int_equal(f->count[WIRE_JOB_RUN], 1);
        RUN_UNTIL(f, job_is_finished(other));
        assert_result(s, other, START, 2);
        RUN_UNTIL(f, f->n_jobs == 0);
        assert_int_equal(f->n_starts, 1);
}

static void queue_refused_ahead_fails_with_its_fault(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, START);
        Job *j = submit_ahead(f, s), *next;

        f->hook = refuse_job;
        RUN_UNTIL(f, job_is_finished(j));
        assert_string_equal(j->fault.name, FAULT_INVALID_TENSOR);
        assert_int_equal(f->count[WIRE_JOB_RUN], 1);

        f->hook = NULL;
        next = fake_submit(f, s, WIRE_JOB_STEP, 1, 0);
        RUN_UNTIL(f, job_is_finished(next));
        assert_result(s, next, START, 1);
        assert_int_equal(f->n_starts, 1);
}

/* hook_count is the type to die at, once. */
static bool die_ahead(Fake *f, const WireMessage *m) {
        if (m->header.type != f->hook_count)
                return false;
        f->hook = NULL;
        fake_die(f);
        return true;
}

static void queue_death_ahead_runs_again(void **state) {
        static const WireType types[] = { WIRE_JOB_OPEN, WIRE_PLAN, WIRE_STEP };
        Fake *f = *state;
        Session *s = fake_session(f, START);

        for (size_t i = 0; i < ELEMENTSOF(types); i++) {
                Job *j = submit_ahead(f, s);

                f->hook = die_ahead;
                f->hook_count = types[i];
                RUN_UNTIL(f, job_is_finished(j));
                assert_null(f->hook);
                assert_result(s, j, START, 1);
                assert_int_equal(j->retries_total, 1);
                assert_int_equal(f->n_starts, i + 2);
        }
}

static bool cancelled_at_step(Fake *f, const WireMessage *m) {
        if (m->header.type == WIRE_CANCEL)
                fake_error(f, m->header.job, 0, FAULT_CANCELLED);
        return m->header.type == WIRE_STEP;
}

static void queue_cancel_ahead_waits_for_worker(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, START);
        Job *j = submit_ahead(f, s);

        f->hook = cancelled_at_step;
        job_cancel(j);
        assert_int_equal(j->state, JOB_CANCELLING);
        RUN_UNTIL(f, job_is_finished(j));
        assert_int_equal(j->state, JOB_CANCELLED);
        RUN_UNTIL(f, f->n_jobs == 0);
        assert_int_equal(f->n_starts, 1);
}

/* Rows of an equal request can differ after all: the step was planned for others, and is again for these. */
static bool other_rows(Fake *f, const WireMessage *m) {
        WireMessage reply;
        uint32_t committed;
        FakeJob *j;

        if (m->header.type == WIRE_JOB_OPEN) {
                j = fake_open(f, &m->job_open, &committed);
                fake_job_ready(f, j, committed, &reply);
                reply.job_ready.rows++;
                fake_send(f, &reply);
                return true;
        }
        if (m->header.type != WIRE_STEP || f->plan.rows[0].end == FAKE_ROWS + 1)
                return false;
        fake_error(f, m->header.job, m->header.step, FAULT_INTERNAL);
        return true;
}

static void queue_other_rows_than_before_plan_again(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, START);
        Job *j = submit_ahead(f, s);

        f->hook = other_rows;
        RUN_UNTIL(f, job_is_finished(j));
        assert_result(s, j, START, 1);
        assert_int_equal(j->ready.rows, FAKE_ROWS + 1);
        assert_int_equal(f->count[WIRE_JOB_OPEN], 2);
        assert_int_equal(f->count[WIRE_PLAN], 3);
        assert_int_equal(f->count[WIRE_STEP], 3);
        assert_int_equal(f->n_starts, 1);
        assert_int_equal(j->retries_total, 0);
}

static bool fail_step_1(Fake *f, const WireMessage *m) {
        if (m->header.type != WIRE_STEP || m->header.step != 1)
                return false;
        fake_error(f, m->header.job, 1, "NoSuchName");
        return true;
}

static void queue_failed_step_ends_job_with_listed_name(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, START);
        Job *j;

        f->hook = fail_step_1;
        j = fake_submit(f, s, WIRE_JOB_SAMPLE, 5, 0);
        RUN_UNTIL(f, job_is_finished(j));
        assert_string_equal(j->fault.name, FAULT_INTERNAL);
        RUN_UNTIL(f, f->n_jobs == 0);
}

static void queue_keep_steps_names_every_state(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, START);
        WireJobOpen q = fake_request(WIRE_JOB_SAMPLE, 3, 0);
        Fault fault = {};
        WireTensor t, last;
        char name[32];
        Job *j;

        q.flags = WIRE_JOB_KEEP_STEPS;
        assert_int_equal(session_submit(s, f->peer, &q, &j, &fault), 0);
        RUN_UNTIL(f, job_is_finished(j));
        assert_result(s, j, START, 3);
        assert_int_equal(job_result_tensor(j, 2, name, &t), 0);
        assert_string_equal(name, "step.0.video");
        assert_int_equal(t.offset, 64 + STRIDE);
        assert_int_equal(job_result_tensor(j, 7, name, &t), 0);
        assert_string_equal(name, "step.2.audio");
        assert_int_equal(job_result_tensor(j, 1, name, &last), 0);
        assert_memory_equal(&t, &last, sizeof(t)); /* the state after the last step is the result */
        assert_int_equal(job_result_tensor(j, 8, name, &t), -ENOENT);
}

/* What its sampler holds is named, but not of the end, which needs none of it. */
static void queue_keep_steps_names_what_is_carried(void **state) {
        static const char *const names[] = {
                "video", "audio", "step.0.video", "step.0.audio", "step.0.audio_carried",
                "step.1.video", "step.1.audio", "step.1.audio_carried",
        };
        Fake *f = *state;
        Session *s = fake_session(f, START);
        WireJobOpen q = fake_request(WIRE_JOB_SAMPLE, 2, 0);
        Fault fault = {};
        WireTensor t;
        char name[32];
        Job *j;

        q.sampler = WIRE_SAMPLER_RES_MULTISTEP;
        q.flags = WIRE_JOB_KEEP_STEPS;
        assert_int_equal(session_submit(s, f->peer, &q, &j, &fault), 0);
        RUN_UNTIL(f, job_is_finished(j));
        assert_result(s, j, START, 2);
        for (uint32_t i = 0; i < ELEMENTSOF(names); i++) {
                assert_int_equal(job_result_tensor(j, i, name, &t), 0);
                assert_string_equal(name, names[i]);
        }
        assert_int_equal(t.offset, 64 + 2 * 1024 + 384); /* slots of 1024 bytes; behind video and audio */
        assert_int_equal(t.size, AUDIO_FLOATS * 4);
        assert_int_equal(job_result_tensor(j, ELEMENTSOF(names), name, &t), -ENOENT);
}

static void queue_eta_from_measured_steps(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, START);
        uint64_t begin = clock_usec();
        Job *j;

        f->hook = hold_step;
        j = fake_submit(f, s, WIRE_JOB_SAMPLE, 2, 0);
        RUN_UNTIL(f, f->count[WIRE_STEP] == 1);
        assert_int_equal(j->eta_usec, 0);
        run_for(f, 40000);
        fake_progress(f, j->id, 0, 2); /* half of the first of two steps in 40 ms: three such halves to go */
        RUN_UNTIL(f, j->block == 2);
        assert_in_range(j->eta_usec, 120000, 3 * (clock_usec() - begin));
        assert_true(j->fraction == 0.25);
        f->hook = NULL;
        fake_compute(f, fake_job(f, j->id), 0);
        fake_step_done(f, j->id, 0);
        RUN_UNTIL(f, job_is_finished(j));
        assert_result(s, j, START, 2);
        assert_true(j->compute_usec <= 2);
}

/* As for the devices' sake: hook_count bytes of registered memory once a step is asked for. */
static bool register_weights(Fake *f, const WireMessage *m) {
        WireMessage memory;

        if (m->header.type != WIRE_STEP && m->header.type != WIRE_JOB_RUN)
                return false;
        wire_init(&memory, WIRE_MEMORY, f->epoch, 0, 0);
        memory.memory.models[0] = (WireDeviceModel){.model = 1, .registered_bytes = f->hook_count};
        fake_send(f, &memory);
        return false;
}

static const PaceEntry *only_pace(const Fake *f) {
        const PaceEntry *e = NULL;

        for (size_t i = 0; i < PACE_ENTRIES; i++)
                if (f->m->paces.entries[i].usec > 0) {
                        assert_null(e);
                        e = &f->m->paces.entries[i];
                }
        assert_non_null(e);
        return e;
}

/* How long a step took says little if weights came meanwhile. */
static void queue_first_step_of_a_worker_is_a_rough_pace(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, START);

        f->hook = register_weights;
        for (unsigned i = 1; i <= 3; i++) {
                Job *j = fake_submit(f, s, WIRE_JOB_STEP, 1, 0);

                f->hook_count = i < 2 ? i : 2; /* the third one finds all there */
                RUN_UNTIL(f, job_is_finished(j));
                assert_int_equal(j->state, JOB_DONE);
                assert_int_equal(only_pace(f)->rough, i < 3);
        }
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, fake_setup, fake_teardown)

int main(void) {
        const struct CMUnitTest tests[] = {
                TEST(queue_sample_runs_to_result),
                TEST(queue_step_gives_velocities),
                TEST(queue_two_jobs_alternate),
                TEST(queue_window_bounds_open_jobs),
                TEST(queue_death_in_step_resumes_from_commit),
                TEST(queue_started_later_survives_deaths),
                TEST(queue_crash_budget_makes_jobs_wait),
                TEST(queue_two_deaths_in_one_step_fail),
                TEST(queue_one_death_in_each_step_survives),
                TEST(queue_death_between_commit_and_answer_keeps_step),
                TEST(queue_death_after_last_commit_finishes),
                TEST(queue_death_in_step_job_runs_again),
                TEST(queue_impossible_commit_word_starts_again),
                TEST(queue_impossible_blocks_drop_the_worker),
                TEST(queue_other_numerics_start_again),
                TEST(queue_death_spares_the_other_jobs),
                TEST(queue_cancel_queued_ends_at_once),
                TEST(queue_cancel_running_waits_for_worker),
                TEST(queue_cancel_running_ends_when_worker_dies),
                TEST(queue_session_close_keeps_arenas_until_answer),
                TEST(queue_session_close_sends_arena_close_last),
                TEST(queue_peer_gone_frees_everything),
                TEST(queue_refused_job_fails_with_its_fault),
                TEST(queue_equal_request_goes_out_with_its_step),
                TEST(queue_refused_ahead_fails_with_its_fault),
                TEST(queue_death_ahead_runs_again),
                TEST(queue_cancel_ahead_waits_for_worker),
                TEST(queue_other_rows_than_before_plan_again),
                TEST(queue_failed_step_ends_job_with_listed_name),
                TEST(queue_keep_steps_names_every_state),
                TEST(queue_keep_steps_names_what_is_carried),
                TEST(queue_eta_from_measured_steps),
                TEST(queue_first_step_of_a_worker_is_a_rough_pace),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
