/* SPDX-License-Identifier: Apache-2.0 */
#include "service/shared/clock.h"
#include "tests/unit/latentd/fake-bus.h"

/* What the client heard. */
typedef struct Heard {
        unsigned progress, finished;
        uint32_t block;
        char state[16], error_name[48], error_text[128], path[64], destination[32];
        char tensors[256]; /* names */
        uint64_t first_offset, bytes_read;
        char model[64];
} Heard;

static void read_result(sd_bus_message *m, Heard *h) {
        const char *key;

        assert_true(sd_bus_message_enter_container(m, 'a', "{sv}") > 0);
        while (sd_bus_message_enter_container(m, 'e', "sv") > 0) {
                assert_true(sd_bus_message_read(m, "s", &key) > 0);
                if (strcmp(key, "tensors") == 0) {
                        const char *name, *type;
                        uint64_t offset;

                        assert_true(sd_bus_message_enter_container(m, 'v', "a(stsat)") > 0);
                        assert_true(sd_bus_message_enter_container(m, 'a', "(stsat)") > 0);
                        while (sd_bus_message_enter_container(m, 'r', "stsat") > 0) {
                                const void *shape;
                                size_t n;

                                assert_true(sd_bus_message_read(m, "sts", &name, &offset, &type) > 0);
                                assert_true(sd_bus_message_read_array(m, 't', &shape, &n) > 0);
                                assert_string_equal(type, "F32");
                                assert_int_equal(n, strstr(name, "video") ? 32 : 24);
                                if (h->tensors[0] == '\0')
                                        h->first_offset = offset;
                                (void) strncat(
                                        h->tensors, name, sizeof(h->tensors) - strlen(h->tensors) - 1);
                                (void) strncat(h->tensors, " ", sizeof(h->tensors) - strlen(h->tensors) - 1);
                                assert_true(sd_bus_message_exit_container(m) >= 0);
                        }
                        assert_true(sd_bus_message_exit_container(m) >= 0);
                        assert_true(sd_bus_message_exit_container(m) >= 0);
                } else if (strcmp(key, "bytes-read") == 0)
                        assert_true(sd_bus_message_read(m, "v", "t", &h->bytes_read) > 0);
                else if (strcmp(key, "model") == 0) {
                        const char *path;

                        assert_true(sd_bus_message_read(m, "v", "o", &path) > 0);
                        (void) snprintf(h->model, sizeof(h->model), "%s", path);
                } else
                        assert_true(sd_bus_message_skip(m, "v") > 0);
                assert_true(sd_bus_message_exit_container(m) >= 0);
        }
        assert_true(sd_bus_message_exit_container(m) >= 0);
}

static int on_signal(sd_bus_message *m, void *userdata, sd_bus_error *error) {
        Heard *h = userdata;
        const char *state, *name, *text, *phase;
        uint32_t step, steps, blocks;
        uint64_t eta;
        double fraction;

        if (sd_bus_message_is_signal(m, BUS_INTERFACE("Job"), "Progress") > 0) {
                assert_int_equal(h->finished, 0);
                assert_true(sd_bus_message_read(m, "suuuudt", &phase, &step, &steps, &h->block, &blocks,
                                    &fraction, &eta) > 0);
                assert_true(fraction >= 0 && fraction <= 1);
                h->progress++;
        } else if (sd_bus_message_is_signal(m, BUS_INTERFACE("Job"), "Finished") > 0) {
                h->finished++;
                assert_true(sd_bus_message_read(m, "sss", &state, &name, &text) > 0);
                (void) snprintf(h->state, sizeof(h->state), "%s", state);
                (void) snprintf(h->error_name, sizeof(h->error_name), "%s", name);
                (void) snprintf(h->error_text, sizeof(h->error_text), "%.120s", text);
                (void) snprintf(h->path, sizeof(h->path), "%s", sd_bus_message_get_path(m));
                (void) snprintf(
                        h->destination, sizeof(h->destination), "%s", sd_bus_message_get_destination(m));
                read_result(m, h);
        }
        return 0;
}

static void listen_to(Fake *f, FakeBus *b, Heard *h) {
        fake_bus_start(f, b);
        *h = (Heard){};
        assert_true(sd_bus_add_filter(b->client, NULL, on_signal, h) >= 0);
        f->peer->bus = sd_bus_ref(b->service);
        free(f->peer->name);
        f->peer->name = strdup(":1.42");
}

static void finished_once_with_result(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, 1);
        WireJobOpen q = fake_request(WIRE_JOB_SAMPLE, 2, 1);
        CLEANUP_FREE char *path = NULL;
        Fault fault = {};
        FakeBus b;
        Heard h;
        Job *j;

        listen_to(f, &b, &h);
        q.flags = WIRE_JOB_KEEP_STEPS;
        assert_int_equal(session_submit(s, f->peer, &q, &j, &fault), 0);
        assert_int_equal(job_path(j, &path), 0);
        RUN_UNTIL(f, h.finished);
        job_finish(j, JOB_FAILED, NULL); /* too late: nothing happens */
        run_for(f, 20000);
        assert_int_equal(h.finished, 1);
        assert_int_equal(j->state, JOB_DONE);
        assert_string_equal(h.state, "done");
        assert_string_equal(h.error_name, "");
        assert_string_equal(h.path, path);
        assert_string_equal(h.destination, ":1.42");
        assert_string_equal(h.tensors, "video audio step.0.video step.0.audio step.1.video step.1.audio ");
        assert_int_equal(h.first_offset, 16384 + 64 + 2 * STRIDE);
        fake_bus_stop(&b);
}

static void finished_cancelled_has_name_and_no_result(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, 1);
        FakeBus b;
        Heard h;

        listen_to(f, &b, &h);
        job_cancel(fake_submit(f, s, WIRE_JOB_STEP, 1, 0));
        RUN_UNTIL(f, h.finished);
        assert_string_equal(h.state, "cancelled");
        assert_string_equal(h.error_name, "Cancelled");
        assert_string_equal(h.tensors, "");
        fake_bus_stop(&b);
}

static void finished_load_names_model(void **state) {
        Fake *f = *state;
        CLEANUP_FREE char *path = NULL;
        Fault fault = {};
        FakeBus b;
        Heard h;
        Job *j;

        listen_to(f, &b, &h);
        assert_int_equal(job_new(f->m, f->peer, JOB_LOAD, &j, &fault), 0);
        j->model = f->model;
        j->bytes_read = 4711;
        assert_int_equal(model_path(f->model, &path), 0);
        job_finish(j, JOB_DONE, NULL);
        RUN_UNTIL(f, h.finished);
        assert_string_equal(h.model, path);
        assert_int_equal(h.bytes_read, 4711);
        assert_int_equal(f->model->n_users, 0);
        fake_bus_stop(&b);
}

static void progress_at_most_ten_a_second_newest_last(void **state) {
        Fake *f = *state;
        Fault fault = {};
        FakeBus b;
        Heard h;
        uint64_t start;
        Job *j;

        listen_to(f, &b, &h);
        assert_int_equal(job_new(f->m, f->peer, JOB_LOAD, &j, &fault), 0);
        j->phase = "read";
        start = clock_usec();
        for (uint32_t i = 1; i <= 450; i++) {
                j->block = i;
                job_progress(j);
                run_for(f, 1000);
        }
        RUN_UNTIL(f, h.block == 450);
        /* One at once, then ten a second of the time it really took; two at least, the last one among them. */
        assert_in_range(h.progress, 2, 2 + (clock_usec() - start) / 100000);
        job_finish(j, JOB_CANCELLED, NULL);
        RUN_UNTIL(f, h.finished);
        run_for(f, 150000); /* on_signal() checks that no progress comes after the end */
        fake_bus_stop(&b);
}

static void finished_jobs_are_kept_to_256(void **state) {
        Fake *f = *state;
        uint64_t first = 0;
        Fault fault = {};
        unsigned n = 0;
        Job *j;

        for (int i = 0; i < 300; i++) {
                assert_int_equal(job_new(f->m, f->peer, JOB_LOAD, &j, &fault), 0);
                if (i == 0)
                        first = j->id;
                job_finish(j, JOB_FAILED, NULL);
                assert_string_equal(j->fault.name, FAULT_INTERNAL);
        }
        TAILQ_FOREACH(j, &f->m->jobs, entry)
                n++;
        assert_int_equal(n, 256);
        assert_null(job_find(f->m, first));
        assert_non_null(job_find(f->m, f->m->next_id - 1));
}

static void peer_gone_takes_its_jobs_only(void **state) {
        Fake *f = *state;
        Peer *other = fake_peer_new(f);
        Fault fault = {};
        uint64_t id;
        Job *a, *b;

        assert_int_equal(job_new(f->m, other, JOB_LOAD, &a, &fault), 0);
        assert_int_equal(job_new(f->m, f->peer, JOB_LOAD, &b, &fault), 0);
        id = a->id;
        peer_gone(other);
        assert_null(job_find(f->m, id));
        assert_false(job_is_finished(b));
        job_cancel(b);
}

static void quota_job_limit_counts_unfinished(void **state) {
        Fake *f = *state;
        Fault fault = {};
        Job *a, *b, *c = NULL;

        f->m->config->jobs_per_user = 2;
        assert_int_equal(job_new(f->m, f->peer, JOB_LOAD, &a, &fault), 0);
        assert_int_equal(job_new(f->m, f->peer, JOB_LOAD, &b, &fault), 0);
        assert_int_equal(job_new(f->m, f->peer, JOB_LOAD, &c, &fault), -EDQUOT);
        assert_string_equal(fault.name, FAULT_LIMIT);
        assert_null(c);
        job_cancel(a);
        assert_int_equal(job_new(f->m, f->peer, JOB_LOAD, &c, &fault), 0);
        job_cancel(b);
        job_cancel(c);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, fake_setup, fake_teardown)

int main(void) {
        const struct CMUnitTest tests[] = {
                TEST(finished_once_with_result),
                TEST(finished_cancelled_has_name_and_no_result),
                TEST(finished_load_names_model),
                TEST(progress_at_most_ten_a_second_newest_last),
                TEST(finished_jobs_are_kept_to_256),
                TEST(peer_gone_takes_its_jobs_only),
                TEST(quota_job_limit_counts_unfinished),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
