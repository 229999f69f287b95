/* SPDX-License-Identifier: Apache-2.0 */

/* Sessions: mapped arenas, a step's tensors there and back. */

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/unit/client/fake-service.h"

#define SECOND UINT64_C(1000000)

static latent_model *find_model(Fake *f) {
        latent_model *m = NULL;
        latent_error e = {};

        if (latent_model_find(f->client, "tiny", &m, &e) < 0)
                fail_msg("%s: %s", e.name, e.text);
        return m;
}

static latent_session *open_session(Fake *f, const latent_session_options *o) {
        latent_model *m = find_model(f);
        latent_session *s = NULL;
        latent_error e = {};

        if (latent_session_open(f->client, m, o, &s, &e) < 0)
                fail_msg("%s: %s", e.name, e.text);
        latent_model_free(m);
        return s;
}

static void find_by_name_newest(void **state) {
        latent_model *m = find_model(*state);

        assert_string_equal(latent_model_path(m), "/org/latentd/Latent1/model/_310");
        latent_model_free(m);
}

static void find_by_path_that_one(void **state) {
        Fake *f = *state;
        latent_model *m = NULL;
        latent_error e = {};

        assert_int_equal(latent_model_find(f->client, "/org/latentd/Latent1/model/_39", &m, NULL), 0);
        assert_string_equal(latent_model_path(m), "/org/latentd/Latent1/model/_39");
        latent_model_free(m);
        assert_int_equal(latent_model_find(f->client, "nothing", &m, &e), -ENOENT);
        assert_string_equal(e.name, "NotFound");
}

static void open_maps_both_arenas(void **state) {
        latent_session *s = open_session(*state, NULL);

        assert_int_equal(latent_session_input_bytes(s), 65536);
        assert_int_equal(latent_session_output_bytes(s), 65536);
        memset(latent_session_input(s), 1, 65536);
        assert_int_equal(((const char *) latent_session_output(s))[65535], 0);
        assert_int_equal(latent_session_close(s, NULL), 0);
        latent_session_free(s);
}

static void open_unsealed_arena_refused(void **state) {
        Fake *f = *state;
        latent_session_options o = {.struct_size = sizeof(o), .job_class = "batch"};
        latent_model *m = find_model(f);
        latent_session *s = NULL;
        latent_error e = {};

        assert_true(latent_session_open(f->client, m, &o, &s, &e) < 0);
        assert_string_equal(e.name, "Internal");
        assert_null(s);
        latent_model_free(m);
}

static void open_smaller_arena_than_asked_refused(void **state) {
        Fake *f = *state;
        latent_session_options o = {.struct_size = sizeof(o), .output_bytes = 65537};
        latent_model *m = find_model(f);
        latent_session *s = NULL;

        assert_true(latent_session_open(f->client, m, &o, &s, NULL) < 0);
        assert_null(s);
        latent_model_free(m);
}

static void open_split_is_passed_on(void **state) {
        static const uint32_t shares[] = {3, 1};
        Fake *f = *state;
        latent_session_options o = {.struct_size = sizeof(o),
                .ranks = 2,
                .shares = shares,
                .n_shares = 2,
                .chunks = 5,
                .plan = "kv-gather",
                .exchange = "host"};
        latent_model *m = find_model(f);
        latent_session *s = NULL;
        latent_error e = {};

        latent_session_free(open_session(f, &o));
        o.n_shares = 1; /* the fake service sees the difference */
        assert_true(latent_session_open(f->client, m, &o, &s, &e) < 0);
        o.n_shares = 0;
        assert_int_equal(latent_session_open(f->client, m, &o, &s, &e), -EINVAL);
        assert_string_equal(e.name, "InvalidArgument");
        o.shares = NULL;
        o.n_shares = 2;
        assert_int_equal(latent_session_open(f->client, m, &o, &s, &e), -EINVAL);
        o.shares = shares;
        o.n_shares = 65;
        assert_int_equal(latent_session_open(f->client, m, &o, &s, &e), -EINVAL);
        assert_null(s);
        latent_model_free(m);
}

static void step_tensors_there_and_back(void **state) {
        latent_session *s = open_session(*state, NULL);
        latent_tensor text = {.dtype = "BF16", .n_dims = 2, .shape = {3, 5}};
        latent_tensor video = {.dtype = "F32", .n_dims = 2, .shape = {2, 3}}, result;
        latent_step_options o = {.struct_size = sizeof(o),
                .text = &text,
                .video = &video,
                .audio = &video,
                .sigma_video = 0.5,
                .sigma_audio = 0.25};
        const float values[6] = {1, -2, 3, -4, 5, -6};
        latent_job *job = NULL;
        const void *data;
        latent_error e = {};
        uint64_t rows;
        void *p;

        assert_int_equal(latent_session_allocate(s, &text, &p, NULL), 0);
        assert_int_equal(latent_session_allocate(s, &video, &p, NULL), 0);
        assert_int_equal(video.offset, 64);
        assert_int_equal(video.size, sizeof(values));
        memcpy(p, values, sizeof(values));

        assert_int_equal(latent_session_step(s, &o, &job, &e), 0);
        assert_int_equal(latent_job_wait(job, 10 * SECOND, NULL, NULL, &e), 0);
        latent_session_free(s); /* the job keeps the arenas */

        assert_string_equal(latent_job_tensor_name(job, 0), "video_velocity");
        assert_null(latent_job_tensor_name(job, 2));
        assert_int_equal(latent_job_tensor(job, "video_velocity", &result, &data, &e), 0);
        assert_int_equal(result.n_dims, 2);
        assert_int_equal(result.shape[1], 3);
        assert_int_equal(result.size, sizeof(values));
        assert_memory_equal(data, values, sizeof(values));
        assert_int_equal(latent_value_as_uint(latent_value_get(latent_job_result(job), "rows"), &rows), 0);
        assert_int_equal(rows, 500); /* what the fake made of sigma_video */

        assert_int_equal(latent_job_tensor(job, "outside", &result, &data, &e), -EPROTO);
        assert_int_equal(latent_job_tensor(job, "absent", &result, &data, &e), -ENOENT);
        assert_string_equal(e.name, "NotFound");
        latent_job_free(job);
}

/* ---- restarts ---- */

/* A model that this client loaded, so that it can be loaded again. */
static latent_session *open_loaded(Fake *f, latent_client *client) {
        latent_job *load = NULL;
        latent_session *s = NULL;
        latent_model *m = NULL;
        latent_error e = {};

        if (latent_model_load_name(client, "immediate", NULL, &load, &e) < 0 ||
                latent_job_wait(load, 10 * SECOND, NULL, NULL, &e) < 0 || latent_job_model(load, &m, &e) < 0 ||
                latent_session_open(client, m, NULL, &s, &e) < 0)
                fail_msg("%s: %s", e.name, e.text);
        latent_model_free(m);
        latent_job_free(load);
        return s;
}

static latent_job *start_step(latent_session *s, double sigma, float **ret_input) {
        latent_tensor video = {.dtype = "F32", .n_dims = 2, .shape = {2, 3}};
        latent_step_options o = {.struct_size = sizeof(o), .video = &video, .sigma_video = sigma};
        const float values[6] = {1, -2, 3, -4, 5, -6};
        latent_job *job = NULL;
        latent_error e = {};
        void *p;

        assert_int_equal(latent_session_allocate(s, &video, &p, NULL), 0);
        memcpy(p, values, sizeof(values));
        if (latent_session_step(s, &o, &job, &e) < 0) /* with copies of video and o */
                fail_msg("%s: %s", e.name, e.text);
        *ret_input = p;
        return job;
}

static void expect_velocity(latent_job *job) {
        const float values[6] = {1, -2, 3, -4, 5, -6};
        latent_tensor result;
        const void *data;
        latent_error e = {};

        if (latent_job_tensor(job, "video_velocity", &result, &data, &e) < 0)
                fail_msg("%s: %s", e.name, e.text);
        assert_memory_equal(data, values, sizeof(values));
}

static void on_news(const latent_progress *p, void *userdata) {
        if (strcmp(p->phase, "restart") == 0)
                ++*(unsigned *) userdata;
}

static void service_comes_back_step_is_sent_again(void **state) {
        Fake *f = *state;
        latent_session *s = open_loaded(f, f->client);
        const void *output = latent_session_output(s);
        unsigned n_news = 0;
        float *input;
        latent_job *job = start_step(s, 0.125, &input), *next;
        latent_error e = {};

        /* Nobody is there yet: it waits, and says so. */
        assert_int_equal(latent_job_wait(job, SECOND / 4, on_news, &n_news, &e), 1);
        assert_int_equal(n_news, 1);
        fake_kill_service(f);
        fake_start_service(f);
        if (latent_job_wait(job, 10 * SECOND, on_news, &n_news, &e) < 0)
                fail_msg("%s: %s", e.name, e.text);
        expect_velocity(job);
        assert_int_equal(n_news, 1);

        /* The input is where it was, and is the new service's: what is written there now is what it reads. */
        assert_ptr_equal(latent_session_input(s), input);
        assert_true(input[0] == 1.0f && input[5] == -6.0f);
        assert_ptr_not_equal(latent_session_output(s), output);
        latent_session_reset(s);
        next = start_step(s, 0.5, &input);
        assert_int_equal(latent_job_wait(next, 10 * SECOND, NULL, NULL, &e), 0);
        expect_velocity(next);
        latent_job_free(next);
        latent_session_free(s);
        expect_velocity(job);
        latent_job_free(job);
}

static void service_dies_twice_step_is_sent_twice(void **state) {
        Fake *f = *state;
        latent_session *s = open_loaded(f, f->client);
        latent_error e = {};
        float *input;
        latent_job *job = start_step(s, 0.0625, &input);

        for (unsigned i = 0; i < 2; i++) {
                assert_int_equal(latent_job_wait(job, SECOND / 2, NULL, NULL, &e), 1);
                fake_kill_service(f);
                fake_start_service(f);
        }
        if (latent_job_wait(job, 10 * SECOND, NULL, NULL, &e) < 0)
                fail_msg("%s: %s", e.name, e.text);
        expect_velocity(job);
        latent_job_free(job);
        latent_session_free(s);
}

static latent_client *connect_with(Fake *f, uint32_t flags, uint32_t sec) {
        latent_client_options o = {.struct_size = sizeof(o),
                .bus = LATENT_BUS_ADDRESS,
                .address = f->address,
                .flags = flags,
                .restart_timeout_sec = sec};
        latent_client *c = NULL;
        latent_error e = {};

        if (latent_client_new(&o, &c, &e) < 0)
                fail_msg("%s: %s", e.name, e.text);
        return c;
}

/* Restarted: at once if the client wants no more, else after its patience, unless it is cancelled before. */
static void service_stays_away_restarted(void **state) {
        Fake *f = *state;
        latent_client *clients[] = {connect_with(f, LATENT_CLIENT_NO_RESUME, 0), connect_with(f, 0, 1)};
        latent_session *s[2] = {open_loaded(f, clients[0]), open_loaded(f, clients[1])};
        latent_error e = {};
        latent_job *job[2], *third;
        float *input;

        job[0] = start_step(s[0], 0.125, &input);
        assert_int_equal(latent_job_wait(job[0], 10 * SECOND, NULL, NULL, &e), -ECONNRESET);
        assert_string_equal(e.name, "Restarted");
        latent_job_free(job[0]);
        latent_session_free(s[0]);
        fake_kill_service(f);

        f->n_starts = 0;
        fake_start_service(f);
        latent_session_free(s[1]);
        s[1] = open_loaded(f, clients[1]);
        job[1] = start_step(s[1], 0.125, &input);
        assert_int_equal(latent_job_wait(job[1], SECOND / 2, NULL, NULL, &e), 1);
        assert_int_equal(latent_job_wait(job[1], 10 * SECOND, NULL, NULL, &e), -ECONNRESET);
        assert_string_equal(e.name, "Restarted");
        latent_job_free(job[1]);
        latent_session_free(s[1]);
        fake_kill_service(f);

        f->n_starts = 0;
        fake_start_service(f);
        s[0] = open_loaded(f, f->client);
        third = start_step(s[0], 0.125, &input);
        assert_int_equal(latent_job_wait(third, SECOND / 4, NULL, NULL, &e), 1);
        assert_int_equal(latent_job_cancel(third, &e), 0);
        assert_int_equal(latent_job_wait(third, 10 * SECOND, NULL, NULL, &e), -ECANCELED);
        latent_job_free(third);
        latent_session_free(s[0]);
        latent_client_free(clients[0]);
        latent_client_free(clients[1]);
}

static void model_of_unknown_source_restarted_at_once(void **state) {
        Fake *f = *state;
        latent_session *s = open_session(f, NULL); /* found, not loaded */
        latent_error e = {};
        float *input;
        latent_job *job = start_step(s, 0.125, &input);

        assert_int_equal(latent_job_wait(job, 10 * SECOND, NULL, NULL, &e), -ECONNRESET);
        assert_string_equal(e.name, "Restarted");
        latent_job_free(job);
        latent_session_free(s);
}

static void allocate_full_arena_does_not_fit(void **state) {
        latent_session *s = open_session(*state, NULL);
        latent_tensor t = {.dtype = "U8", .n_dims = 1, .shape = {65536}};
        latent_error e = {};
        void *p;

        assert_int_equal(latent_session_allocate(s, &t, &p, &e), 0);
        assert_ptr_equal(p, latent_session_input(s));
        t.shape[0] = 1;
        assert_int_equal(latent_session_allocate(s, &t, &p, &e), -ENOMEM);
        assert_string_equal(e.name, "DoesNotFit");
        latent_session_reset(s);
        assert_int_equal(latent_session_allocate(s, &t, &p, &e), 0);
        (void) snprintf(t.dtype, sizeof(t.dtype), "F31");
        assert_int_equal(latent_session_allocate(s, &t, &p, &e), -EINVAL);
        latent_session_free(s);
}

static void sample_unknown_flag_refused(void **state) {
        latent_session *s = open_session(*state, NULL);
        latent_sample_options o = {.struct_size = sizeof(o), .flags = 2};
        latent_job *job = NULL;
        latent_error e = {};

        assert_int_equal(latent_session_sample(s, &o, &job, &e), -E2BIG);
        assert_string_equal(e.name, "InvalidArgument");
        assert_null(job);
        latent_session_free(s);
}

static void session_after_restart_restarted(void **state) {
        Fake *f = *state;
        latent_session *s = open_session(f, NULL);
        latent_step_options o = {.struct_size = sizeof(o)};
        latent_job *job = NULL;
        latent_error e = {};

        fake_kill_service(f);
        fake_start_service(f);
        assert_int_equal(latent_session_step(s, &o, &job, &e), -ECONNRESET);
        assert_string_equal(e.name, "Restarted");
        assert_int_equal(latent_session_close(s, &e), -ECONNRESET);
        assert_int_equal(((const char *) latent_session_output(s))[0], 0); /* still readable */
        latent_session_free(s);
}

static void load_path_hands_over_all_files(void **state) {
        Fake *f = *state;
        char directory[] = "/tmp/latent-test-XXXXXX", path[96];
        latent_job *job = NULL;
        latent_error e = {};
        uint64_t n = 0;

        assert_non_null(mkdtemp(directory));
        for (int i = 0; i < 9; i++) { /* three calls of AddFiles() */
                FILE *file;

                (void) snprintf(path, sizeof(path), "%s/%03d.safetensors", directory, i);
                file = fopen(path, "we");
                assert_non_null(file);
                (void) fprintf(file, "%03d.", i);
                assert_int_equal(fclose(file), 0);
        }

        assert_int_equal(latent_model_load_path(f->client, directory, NULL, &job, &e), 0);
        assert_int_equal(latent_job_wait(job, 10 * SECOND, NULL, NULL, &e), 0);
        assert_int_equal(
                latent_value_as_uint(latent_value_get(latent_job_result(job), "bytes-read"), &n), 0);
        assert_int_equal(n, 9);
        latent_job_free(job);

        assert_int_equal(latent_model_load_path(f->client, "/nowhere/at/all", NULL, &job, &e), -ENOENT);
        assert_string_equal(e.name, "NotFound");

        for (int i = 0; i < 9; i++) {
                (void) snprintf(path, sizeof(path), "%s/%03d.safetensors", directory, i);
                assert_int_equal(unlink(path), 0);
        }
        assert_int_equal(rmdir(directory), 0);
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, fake_setup, fake_teardown)

int main(void) {
        const struct CMUnitTest tests[] = {
                TEST(find_by_name_newest),
                TEST(find_by_path_that_one),
                TEST(open_maps_both_arenas),
                TEST(open_unsealed_arena_refused),
                TEST(open_smaller_arena_than_asked_refused),
                TEST(open_split_is_passed_on),
                TEST(step_tensors_there_and_back),
                TEST(service_comes_back_step_is_sent_again),
                TEST(service_dies_twice_step_is_sent_twice),
                TEST(service_stays_away_restarted),
                TEST(model_of_unknown_source_restarted_at_once),
                TEST(allocate_full_arena_does_not_fit),
                TEST(sample_unknown_flag_refused),
                TEST(session_after_restart_restarted),
                TEST(load_path_hands_over_all_files),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
