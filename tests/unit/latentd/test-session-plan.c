/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/unit/latentd/fake-bus.h"

#define START 10.0f

static FakeBus bus;

static void add_tensor(sd_bus_message *m, const char *key, uint64_t offset, const char *type, size_t n,
        const uint64_t *shape) {
        assert_true(sd_bus_message_open_container(m, 'e', "sv") >= 0);
        assert_true(sd_bus_message_append(m, "s", key) >= 0);
        assert_true(sd_bus_message_open_container(m, 'v', "(tsat)") >= 0);
        assert_true(sd_bus_message_open_container(m, 'r', "tsat") >= 0);
        assert_true(sd_bus_message_append(m, "ts", offset, type) >= 0);
        assert_true(sd_bus_message_append_array(m, 't', shape, n * 8) >= 0);
        for (int i = 0; i < 3; i++)
                assert_true(sd_bus_message_close_container(m) >= 0);
}

/* A good request of 4 steps. */
static sd_bus_message *plan_call(Session *s, const char *kind, bool keep_steps) {
        CLEANUP_FREE char *path = NULL;
        sd_bus_message *m;

        assert_int_equal(session_path(s, &path), 0);
        m = fake_bus_call(&bus, path, BUS_INTERFACE("Session"), "Plan");
        assert_true(sd_bus_message_append(m, "s", kind) >= 0);
        assert_true(sd_bus_message_open_container(m, 'a', "{sv}") >= 0);
        add_tensor(m, "text", 4096, "BF16", 2, (uint64_t[]){2, 4});
        add_tensor(m, "video", 0, "F32", 4, (uint64_t[]){24, 1, 1, 1});
        add_tensor(m, "audio", 96, "F32", 3, (uint64_t[]){32, 2, 1});
        if (strcmp(kind, "step") == 0)
                assert_true(sd_bus_message_append(
                                    m, "{sv}{sv}", "sigma-video", "d", 0.5, "sigma-audio", "d", 0.5) >= 0);
        else
                assert_true(sd_bus_message_append(
                                    m, "{sv}{sv}", "steps", "u", 4, "keep-steps", "b", keep_steps) >= 0);
        assert_true(sd_bus_message_close_container(m) >= 0);
        return m;
}

static void assert_plan(
        sd_bus_message *reply, uint64_t rows, uint32_t steps, uint64_t bytes, uint32_t ranks) {
        uint64_t given_rows, given_bytes;
        uint32_t given_steps, given_ranks;
        const char *keys[8], *kind, *exchange;
        const uint64_t *rows_of = NULL;
        uint64_t sum = 0;
        uint32_t chunks;
        size_t size;

        if (sd_bus_message_is_method_error(reply, NULL) > 0)
                fail_msg("%s", sd_bus_message_get_error(reply)->message);
        assert_true(sd_bus_message_enter_container(reply, 'a', "{sv}") > 0);
        assert_true(sd_bus_message_read(reply, "{sv}{sv}{sv}{sv}{sv}{sv}{sv}", &keys[0], "t", &given_rows, &keys[1], "u",
                            &given_steps, &keys[2], "t", &given_bytes, &keys[3], "u", &given_ranks, &keys[4], "s", &kind, &keys[5],
                            "s", &exchange, &keys[6], "u", &chunks) > 0);
        assert_true(sd_bus_message_enter_container(reply, 'e', "sv") > 0 && sd_bus_message_read(reply, "s", &keys[7]) > 0);
        assert_true(sd_bus_message_enter_container(reply, 'v', "at") > 0);
        assert_true(sd_bus_message_read_array(reply, 't', (const void **) &rows_of, &size) > 0);
        assert_string_equal(keys[7], "rank-rows");
        for (size_t i = 0; i < size / sizeof(*rows_of); i++)
                sum += rows_of[i];
        assert_int_equal(sum, rows);
        assert_string_equal(keys[4], "plan");
        assert_string_equal(kind, "hidden-gather");
        assert_string_equal(keys[5], "exchange");
        assert_string_equal(exchange, "host");
        assert_string_equal(keys[6], "chunks");
        assert_true(chunks >= 1);
        assert_string_equal(keys[0], "rows");
        assert_string_equal(keys[1], "steps");
        assert_string_equal(keys[2], "output-bytes");
        assert_string_equal(keys[3], "ranks");
        assert_int_equal(given_rows, rows);
        assert_int_equal(given_steps, steps);
        assert_int_equal(given_bytes, bytes);
        assert_int_equal(given_ranks, ranks);
        (void) sd_bus_message_unref(reply);
}

static unsigned n_jobs(const Fake *f) {
        unsigned n = 0;
        Job *j;

        TAILQ_FOREACH(j, &f->m->jobs, entry)
        n++;
        return n;
}

static void plan_says_what_it_would_take(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, START);

        f->m->config->worker_ranks = 5; /* 300 rows: three tiles */
        assert_plan(fake_bus_wait(f, &bus, plan_call(s, "sample", false)), FAKE_ROWS, 4, 64 + 2 * STRIDE, 3);
        assert_plan(fake_bus_wait(f, &bus, plan_call(s, "sample", true)), FAKE_ROWS, 4, 64 + 5 * STRIDE, 3);
        s->split.ranks = 2;
        assert_plan(fake_bus_wait(f, &bus, plan_call(s, "step", false)), FAKE_ROWS, 1, 64 + STRIDE, 2);
        assert_int_equal(f->count[WIRE_JOB_OPEN], 3);
        assert_int_equal(f->count[WIRE_PLAN] + f->count[WIRE_STEP], 0);
        RUN_UNTIL(f, f->n_jobs == 0);   /* closed in the worker */
        assert_int_equal(n_jobs(f), 0); /* and forgotten here */
        assert_int_equal(s->n_busy, 0);
        assert_int_equal(f->model->n_users, 1);
}

static void plan_bad_requests_are_refused(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, START);
        CLEANUP_FREE char *path = NULL;
        sd_bus_message *m;

        fake_bus_expect(fake_bus_wait(f, &bus, plan_call(s, "film", false)), FAULT_INVALID_ARGUMENT,
                "step, sample, tokenize, encode, encode-media, decode or render");
        fake_bus_expect(fake_bus_wait(f, &bus, plan_call(s, "render", false)), FAULT_INVALID_ARGUMENT, "Unknown key \"text\"");
        assert_int_equal(session_path(s, &path), 0);
        m = fake_bus_call(&bus, path, BUS_INTERFACE("Session"), "Plan");
        assert_true(sd_bus_message_append(m, "sa{sv}", "step", 1, "seeds", "t", UINT64_C(1)) >= 0);
        fake_bus_expect(fake_bus_wait(f, &bus, m), FAULT_INVALID_ARGUMENT, "Unknown key \"seeds\"");
        (void) fault_set(&s->lora_fault, -EIO, FAULT_INVALID_MODEL, "Nothing of it applies.");
        fake_bus_expect(fake_bus_wait(f, &bus, plan_call(s, "step", false)), FAULT_INVALID_MODEL,
                "Nothing of it applies.");
        assert_int_equal(n_jobs(f), 0);
        assert_int_equal(f->count[WIRE_JOB_OPEN], 0);
}

static bool refuse(Fake *f, const WireMessage *m) {
        if (m->header.type != WIRE_JOB_OPEN)
                return false;
        assert_true(m->job_open.flags & WIRE_JOB_PLAN_ONLY);
        fake_error(f, m->header.job, 0, FAULT_INVALID_TENSOR);
        return true;
}

static void plan_gives_the_workers_error(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, START);

        f->hook = refuse;
        fake_bus_expect(fake_bus_wait(f, &bus, plan_call(s, "sample", false)), FAULT_INVALID_TENSOR,
                "The fake worker says no.");
        assert_int_equal(n_jobs(f), 0);
}

/* It writes nothing: it may stand beside a job with the same output range, and nobody sees it among the
 * jobs. */
static void plan_beside_a_job(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, START);
        Job *j = fake_submit(f, s, WIRE_JOB_SAMPLE, 3, 0);

        assert_plan(fake_bus_wait(f, &bus, plan_call(s, "sample", false)), FAKE_ROWS, 4, 64 + 2 * STRIDE, 1);
        RUN_UNTIL(f, job_is_finished(j));
        assert_result(s, j, START, 3);
}

static bool hold_open(Fake *f, const WireMessage *m) {
        return m->header.type == WIRE_JOB_OPEN;
}

static void plan_is_no_object(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, START);
        CLEANUP_FREE char *path = NULL;
        sd_bus_message *reply, *m;
        WireJobOpen q;
        Fault fault = {};
        Job *j;

        f->hook = hold_open;
        fake_bus_send(&bus, plan_call(s, "sample", false), &reply);
        RUN_UNTIL(f, f->count[WIRE_JOB_OPEN] == 1);
        j = TAILQ_FIRST(&f->m->jobs);
        assert_int_equal(job_path(j, &path), 0);
        m = fake_bus_call(&bus, path, BUS_INTERFACE("Job"), "Cancel");
        fake_bus_expect(fake_bus_wait(f, &bus, m), "UnknownObject", path);
        q = fake_request(WIRE_JOB_SAMPLE, 2, 0); /* the range is free */
        assert_int_equal(session_check_request(s, &q, &fault), 0);
        assert_null(reply);

        /* The end of the session is the end of it. */
        session_close(s);
        assert_null(reply);
        fake_error(f, j->id, 0, FAULT_CANCELLED);
        RUN_UNTIL(f, reply);
        fake_bus_expect(reply, FAULT_CANCELLED, "cancelled");
        assert_int_equal(f->model->n_users, 0);
}

/* hook_count times. */
static bool die_at_open(Fake *f, const WireMessage *m) {
        if (m->header.type != WIRE_JOB_OPEN || f->hook_count == 0)
                return false;
        f->hook_count--;
        fake_die(f);
        return true;
}

static void plan_survives_one_death(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, START);

        f->hook = die_at_open;
        f->hook_count = 1;
        assert_plan(fake_bus_wait(f, &bus, plan_call(s, "step", false)), FAKE_ROWS, 1, 64 + STRIDE, 1);
        assert_int_equal(f->n_starts, 2);
        f->hook_count = 2;
        fake_bus_expect(fake_bus_wait(f, &bus, plan_call(s, "step", false)), FAULT_WORKER_CRASHED,
                "The plan was tried 2 times");
        assert_int_equal(n_jobs(f), 0);
}

static void plan_caller_leaves(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, START);
        sd_bus_message *reply;
        uint64_t id;

        f->hook = hold_open;
        fake_bus_send(&bus, plan_call(s, "step", false), &reply);
        RUN_UNTIL(f, f->count[WIRE_JOB_OPEN] == 1);
        id = TAILQ_FIRST(&f->m->jobs)->id;
        peer_gone(f->peer);
        f->peer = fake_peer_new(f);
        assert_int_equal(n_jobs(f), 1); /* the worker is at it */
        fake_error(f, id, 0, FAULT_CANCELLED);
        RUN_UNTIL(f, n_jobs(f) == 0 && TAILQ_EMPTY(&f->m->sessions));
        assert_int_equal(f->model->n_users, 0);
        RUN_UNTIL(f, reply); /* the connection of the test is still there */
        fake_bus_expect(reply, FAULT_CANCELLED, "cancelled");
}

static bool steps_for_nothing(Fake *f, const WireMessage *m) {
        WireMessage done;

        if (m->header.type != WIRE_JOB_OPEN)
                return false;
        f->hook = NULL;
        wire_init(&done, WIRE_STEP_DONE, f->epoch, m->header.job, 0);
        fake_send(f, &done);
        return true;
}

static void plan_lying_worker_is_dropped(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, START);

        f->hook = steps_for_nothing;
        assert_plan(fake_bus_wait(f, &bus, plan_call(s, "step", false)), FAKE_ROWS, 1, 64 + STRIDE, 1);
        assert_int_equal(f->n_starts, 2);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

static int setup(void **state) {
        int r = fake_setup(state);

        fake_bus_serve(*state, &bus);
        return r;
}

static int teardown(void **state) {
        Fake *f = *state;

        f->hook = NULL;
        peer_gone(f->peer);
        f->peer = fake_peer_new(f);
        fake_bus_stop(&bus);
        return fake_teardown(state);
}

int main(void) {
        const struct CMUnitTest tests[] = {
                TEST(plan_says_what_it_would_take),
                TEST(plan_bad_requests_are_refused),
                TEST(plan_gives_the_workers_error),
                TEST(plan_beside_a_job),
                TEST(plan_is_no_object),
                TEST(plan_survives_one_death),
                TEST(plan_caller_leaves),
                TEST(plan_lying_worker_is_dropped),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
