/* SPDX-License-Identifier: Apache-2.0 */

/* How a job's end reaches the client, whatever happens to the signals and the service. */

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <time.h>

#include "tests/unit/client/fake-service.h"

static uint64_t now(void) {
        struct timespec t;

        (void) clock_gettime(CLOCK_MONOTONIC, &t);
        return (uint64_t) t.tv_sec * SECOND + (uint64_t) t.tv_nsec / 1000;
}

/* Waits for a load of this behaviour; the error's name is checked if it is to fail. */
static uint64_t expect(Fake *f, const char *behaviour, int code, const char *name) {
        latent_job *job = fake_load(f, behaviour);
        uint64_t start = now();
        latent_error e = {};

        assert_int_equal(latent_job_wait(job, LONG, NULL, NULL, &e), code);
        if (name) {
                assert_string_equal(e.name, name);
                assert_int_equal(e.code, code);
        } else
                assert_non_null(latent_job_result(job));
        latent_job_free(job);
        return now() - start;
}

/* Sooner than a look at the state would find out: once at least, on a machine that may be busy. */
static void expect_by_signal(Fake *f, const char *behaviour, int code, const char *name) {
        for (int i = 0; i < 10; i++)
                if (expect(f, behaviour, code, name) < SECOND)
                        return;
        fail_msg("%s: only a look at the state finds the end", behaviour);
}

static void wait_finished_before_reply_done(void **state) {
        expect_by_signal(*state, "signal-first", 0, NULL);
}

static void wait_finished_at_once_done(void **state) {
        for (int i = 0; i < 200; i++)
                expect_by_signal(*state, "immediate", 0, NULL);
}

static void wait_failed_names_the_error(void **state) {
        expect_by_signal(*state, "failed", -EBADMSG, "InvalidModel");
}

static void wait_lost_signal_reads_state(void **state) {
        assert_true(expect(*state, "lost", 0, NULL) >= SECOND / 2);
}

static void wait_lost_signal_of_failure_reads_error(void **state) {
        (void) expect(*state, "lost-failed", -ENOMEM, "DoesNotFit");
}

static void wait_forgotten_job_ends(void **state) {
        (void) expect(*state, "forgotten", -ENOENT, "NotFound");
}

static void wait_service_vanishes_restarted_at_once(void **state) {
        Fake *f = *state;

        for (int i = 0; i < 10; i++) {
                if (expect(f, "vanish", -ECONNRESET, "Restarted") < SECOND / 2)
                        return;
                fake_kill_service(f);
                fake_start_service(f);
        }
        fail_msg("only a look at the state finds out");
}

static void wait_forged_signal_ignored(void **state) {
        for (int i = 0; i < 20; i++)
                (void) expect(*state, "forged", 0, NULL);
}

static void wait_timeout_returns_one(void **state) {
        latent_job *job = fake_load(*state, "forever");
        uint64_t start = now();

        assert_int_equal(latent_job_wait(job, 0, NULL, NULL, NULL), 1);
        assert_int_equal(latent_job_wait(job, SECOND / 5, NULL, NULL, NULL), 1);
        assert_true(now() - start >= SECOND / 5);
        assert_null(latent_job_result(job));
        latent_job_free(job);
}

/* News come by asking, too: many short waits are one long silence. */
static void wait_many_short_ones_ask_for_state(void **state) {
        latent_job *job = fake_load(*state, "lost");
        uint64_t start = now();
        int r;

        do
                r = latent_job_wait(job, SECOND / 20, NULL, NULL, NULL);
        while (r == 1 && now() - start < LONG);
        assert_int_equal(r, 0);
        latent_job_free(job);
}

static void cancel_running_job_cancelled(void **state) {
        latent_job *job = fake_load(*state, "forever");
        latent_error e = {};

        assert_int_equal(latent_job_cancel(job, &e), 0);
        assert_int_equal(latent_job_wait(job, LONG, NULL, NULL, &e), -ECANCELED);
        assert_string_equal(e.name, "Cancelled");
        assert_int_equal(latent_job_cancel(job, &e), 0); /* again: nothing */
        latent_job_free(job);
}

typedef struct Seen {
        unsigned n;
        latent_progress last;
        latent_job *cancel;
} Seen;

static void on_progress(const latent_progress *p, void *userdata) {
        Seen *s = userdata;

        assert_int_equal(p->struct_size, sizeof(*p));
        s->n++;
        s->last = *p;
        if (s->cancel)
                assert_int_equal(latent_job_cancel(s->cancel, NULL), 0);
}

static void wait_progress_reaches_the_end(void **state) {
        latent_job *job = fake_load(*state, "progress");
        latent_progress p = {.struct_size = sizeof(p)};
        Seen seen = {};

        assert_int_equal(latent_job_wait(job, LONG, on_progress, &seen, NULL), 0);
        assert_true(seen.n >= 1);
        assert_int_equal(seen.last.state, LATENT_JOB_DONE);
        assert_string_equal(seen.last.phase, "read");
        assert_int_equal(seen.last.block, 3);
        assert_int_equal(latent_job_progress(job, &p), 0);
        assert_memory_equal(&p, &seen.last, sizeof(p));
        p.struct_size = 8;
        assert_int_equal(latent_job_progress(job, &p), -EINVAL);
        latent_job_free(job);
}

static void wait_cancel_from_callback_cancelled(void **state) {
        latent_job *job = fake_load(*state, "forever");
        Seen seen = {.cancel = job};

        /* The state that is asked for after a silence is news. */
        assert_int_equal(latent_job_wait(job, LONG, on_progress, &seen, NULL), -ECANCELED);
        assert_true(seen.n >= 2);
        latent_job_free(job);
}

static void load_refused_names_the_error(void **state) {
        Fake *f = *state;
        latent_job *job = NULL;
        latent_error e = {};

        assert_int_equal(latent_model_load_name(f->client, "refused", NULL, &job, &e), -ENOENT);
        assert_string_equal(e.name, "NotFound");
        assert_string_equal(e.text, "no model called refused");
        assert_null(job);
        assert_int_equal(latent_model_load_name(f->client, "unknown-error", NULL, &job, &e), -EPROTO);
        assert_string_equal(e.name, "Novel");
        assert_int_equal(latent_model_load_name(f->client, "\xff", NULL, &job, &e), -EINVAL);
        assert_string_equal(e.name, "InvalidArgument");
}

static void load_service_vanishes_restarted(void **state) {
        Fake *f = *state;
        latent_job *job = NULL;
        latent_error e = {};

        assert_int_equal(latent_model_load_name(f->client, "vanish-in-call", NULL, &job, &e), -ECONNRESET);
        assert_string_equal(e.name, "Restarted");
        assert_null(job);
        assert_int_equal(latent_model_load_name(f->client, "immediate", NULL, &job, &e), -ENOTCONN);
        assert_string_equal(e.name, "NoService");

        /* And works again with the next service. */
        fake_start_service(f);
        (void) expect(f, "immediate", 0, NULL);
}

/* A model of the run that is gone must not mean the object of that path in the next. */
static void model_of_a_former_service_restarted(void **state) {
        Fake *f = *state;
        latent_job *job = fake_load(f, "immediate");
        latent_model *model = NULL;
        latent_session *session = NULL;
        latent_error e = {};

        assert_int_equal(latent_job_wait(job, LONG, NULL, NULL, NULL), 0);
        assert_int_equal(latent_job_model(job, &model, NULL), 0);
        assert_string_equal(latent_model_path(model), "/org/latentd/Latent1/model/_37");
        fake_kill_service(f);
        fake_start_service(f);
        assert_int_equal(latent_model_unload(model, &e), -ECONNRESET);
        assert_string_equal(e.name, "Restarted");
        assert_int_equal(latent_session_open(f->client, model, NULL, &session, &e), -ECONNRESET);
        assert_null(session);
        latent_model_free(model);
        latent_job_free(job);
}

static void job_model_of_lost_signal_from_state(void **state) {
        latent_job *job = fake_load(*state, "lost");
        latent_model *model = NULL;
        latent_error e = {};

        assert_int_equal(latent_job_model(job, &model, &e), -EINVAL);
        assert_int_equal(latent_job_wait(job, LONG, NULL, NULL, NULL), 0);
        assert_int_equal(latent_job_model(job, &model, &e), 0);
        assert_string_equal(latent_model_path(model), "/org/latentd/Latent1/model/_39");
        latent_model_free(model);
        latent_job_free(job);
}

static void process_event_loop_finds_the_end(void **state) {
        Fake *f = *state;
        latent_job *job = fake_load(f, "progress");
        uint64_t start = now(), timeout;

        while (latent_job_wait(job, 0, NULL, NULL, NULL) == 1 && now() - start < LONG) {
                struct pollfd p = {.fd = latent_client_fd(f->client),
                        .events = (short) latent_client_events(f->client)};

                assert_true(p.fd >= 0);
                assert_int_equal(latent_client_timeout(f->client, &timeout), 0);
                assert_true(poll(&p, 1, timeout < SECOND ? (int) (timeout / 1000) : 1000) >= 0);
                assert_true(latent_client_process(f->client, NULL) >= 0);
        }
        assert_int_equal(latent_job_wait(job, 0, NULL, NULL, NULL), 0);
        latent_job_free(job);
}

static void wait_client_freed_restarted(void **state) {
        Fake *f = *state;
        latent_job *job = fake_load(f, "forever");
        latent_error e = {};

        latent_client_free(f->client);
        f->client = NULL;
        assert_int_equal(latent_job_wait(job, LONG, NULL, NULL, &e), -ECONNRESET);
        assert_string_equal(e.name, "Restarted");
        latent_job_free(job);
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, fake_setup, fake_teardown)

int main(void) {
        const struct CMUnitTest tests[] = {
                TEST(wait_finished_before_reply_done),
                TEST(wait_finished_at_once_done),
                TEST(wait_failed_names_the_error),
                TEST(wait_lost_signal_reads_state),
                TEST(wait_lost_signal_of_failure_reads_error),
                TEST(wait_forgotten_job_ends),
                TEST(wait_service_vanishes_restarted_at_once),
                TEST(wait_forged_signal_ignored),
                TEST(wait_timeout_returns_one),
                TEST(wait_many_short_ones_ask_for_state),
                TEST(cancel_running_job_cancelled),
                TEST(wait_progress_reaches_the_end),
                TEST(wait_cancel_from_callback_cancelled),
                TEST(load_refused_names_the_error),
                TEST(load_service_vanishes_restarted),
                TEST(model_of_a_former_service_restarted),
                TEST(job_model_of_lost_signal_from_state),
                TEST(process_event_loop_finds_the_end),
                TEST(wait_client_freed_restarted),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
