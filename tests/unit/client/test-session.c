/* SPDX-License-Identifier: Apache-2.0 */

/* Sessions: mapped arenas, a step's tensors there and back. */

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "tests/unit/client/fake-service.h"

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

static void open_gpus_are_passed_on(void **state) {
        static const char *const gpus[] = {"0000:41:00.0", "GPU-1", NULL};
        Fake *f = *state;
        latent_session_options o = {.struct_size = sizeof(o), .gpus = gpus, .n_gpus = 2};
        latent_model *m = find_model(f);
        latent_session *s = NULL;
        latent_error e = {};

        latent_session_free(open_session(f, &o));
        o.n_gpus = 1; /* the fake service has those two */
        assert_int_equal(latent_session_open(f->client, m, &o, &s, &e), -EOPNOTSUPP);
        assert_string_equal(e.name, "NotSupported");
        assert_non_null(strstr(e.text, "0000:41:00.0;"));
        o.n_gpus = 3;
        assert_int_equal(latent_session_open(f->client, m, &o, &s, &e), -EINVAL);
        assert_non_null(strstr(e.text, "gpus[2] is NULL"));
        o.n_gpus = 0;
        assert_int_equal(latent_session_open(f->client, m, &o, &s, &e), -EINVAL);
        o.n_gpus = 65;
        assert_int_equal(latent_session_open(f->client, m, &o, &s, &e), -EINVAL);
        o.gpus = NULL;
        o.n_gpus = 1;
        assert_int_equal(latent_session_open(f->client, m, &o, &s, &e), -EINVAL);
        assert_null(s);
        /* A caller of before has no gpus, whatever lies behind its struct. */
        o = (latent_session_options){.struct_size = offsetof(latent_session_options, gpus), .gpus = gpus, .n_gpus = 1};
        latent_session_free(open_session(f, &o));
        latent_model_free(m);
}

static void release_gpus_answer_is_passed_on(void **state) {
        Fake *f = *state;
        latent_error e = {};

        assert_int_equal(latent_client_release_gpus(f->client, &e), -EBUSY);
        assert_string_equal(e.name, "Busy");
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
        assert_int_equal(latent_job_wait(job, LONG, NULL, NULL, &e), 0);
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
static latent_session *open_named(latent_client *client, const char *name) {
        latent_job *load = NULL;
        latent_session *s = NULL;
        latent_model *m = NULL;
        latent_error e = {};

        if (latent_model_load_name(client, name, NULL, &load, &e) < 0 ||
                latent_job_wait(load, LONG, NULL, NULL, &e) < 0 || latent_job_model(load, &m, &e) < 0 ||
                latent_session_open(client, m, NULL, &s, &e) < 0)
                fail_msg("%s: %s", e.name, e.text);
        latent_model_free(m);
        latent_job_free(load);
        return s;
}

static latent_session *open_loaded(Fake *f, latent_client *client) {
        return open_named(client, "immediate");
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
        while (n_news == 0)
                assert_int_equal(latent_job_wait(job, SECOND / 4, on_news, &n_news, &e), 1);
        assert_int_equal(n_news, 1);
        fake_kill_service(f);
        fake_start_service(f);
        if (latent_job_wait(job, LONG, on_news, &n_news, &e) < 0)
                fail_msg("%s: %s", e.name, e.text);
        expect_velocity(job);
        assert_int_equal(n_news, 1);

        /* The input is where it was, and is the new service's: what is written there now is what it reads. */
        assert_ptr_equal(latent_session_input(s), input);
        assert_true(input[0] == 1.0f && input[5] == -6.0f);
        assert_ptr_not_equal(latent_session_output(s), output);
        latent_session_reset(s);
        next = start_step(s, 0.5, &input);
        assert_int_equal(latent_job_wait(next, LONG, NULL, NULL, &e), 0);
        expect_velocity(next);
        latent_job_free(next);
        latent_session_free(s);
        expect_velocity(job);
        latent_job_free(job);
}

static void expect_file_changed(Fake *f, latent_job *job, const char *what) {
        latent_error e = {};

        assert_int_equal(latent_job_wait(job, SECOND / 4, NULL, NULL, &e), 1);
        fake_kill_service(f);
        fake_start_service(f);
        assert_int_equal(latent_job_wait(job, LONG, NULL, NULL, &e), -ESTALE);
        assert_string_equal(e.name, LATENT_ERROR_FILE_CHANGED);
        if (!strstr(e.text, what))
                fail_msg("\"%s\" does not say \"%s\"", e.text, what);
        latent_job_free(job);
}

static void model_changes_step_ends(void **state) {
        Fake *f = *state;
        latent_session *s = open_named(f->client, "changes");
        float *input;

        expect_file_changed(f, start_step(s, 0.125, &input), "model \"changes\"");
        latent_session_free(s);
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
        if (latent_job_wait(job, LONG, NULL, NULL, &e) < 0)
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
        latent_client *clients[] = {connect_with(f, LATENT_CLIENT_NO_RESUME, 0), connect_with(f, 0, 3)};
        latent_session *s[2] = {open_loaded(f, clients[0]), open_loaded(f, clients[1])};
        latent_error e = {};
        latent_job *job[2], *third;
        float *input;

        job[0] = start_step(s[0], 0.125, &input);
        assert_int_equal(latent_job_wait(job[0], LONG, NULL, NULL, &e), -ECONNRESET);
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
        assert_int_equal(latent_job_wait(job[1], LONG, NULL, NULL, &e), -ECONNRESET);
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
        assert_int_equal(latent_job_wait(third, LONG, NULL, NULL, &e), -ECANCELED);
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

        assert_int_equal(latent_job_wait(job, LONG, NULL, NULL, &e), -ECONNRESET);
        assert_string_equal(e.name, "Restarted");
        latent_job_free(job);
        latent_session_free(s);
}

/* ---- what is sent ---- */

static const char *string_of(const latent_value *v, const char *key) {
        const char *s = latent_value_as_string(latent_value_get(v, key));

        return s ? s : "";
}

static void wait_done(latent_job *job) {
        latent_error e = {};

        if (latent_job_wait(job, LONG, NULL, NULL, &e) != 0)
                fail_msg("%s: %s", e.name, e.text);
}

/* Everything that an option can say; the arrays are of the caller and are overwritten behind the call. */
typedef struct Everything {
        latent_tensor video, audio, mask, clean, sigmas[2];
        latent_condition conditions[2];
        char kind[16], noise[16];
} Everything;

static void everything_init(Everything *x) {
        *x = (Everything){
                .video = {.offset = 64, .dtype = "F32", .n_dims = 2, .shape = {2, 3}},
                .audio = {.offset = 128, .dtype = "F32", .n_dims = 1, .shape = {5}},
                .mask = {.offset = 192, .dtype = "F32", .n_dims = 1, .shape = {7}},
                .clean = {.offset = 256, .dtype = "F32", .n_dims = 1, .shape = {8}},
                .sigmas = {{.offset = 320, .dtype = "F32", .n_dims = 1, .shape = {5}},
                        {.offset = 384, .dtype = "F32", .n_dims = 1, .shape = {5}}},
                .kind = "keyframe",
                .noise = "comfy",
        };
        x->conditions[0] = (latent_condition){.kind = x->kind, .frame = 7, .video = &x->video};
        x->conditions[1] = (latent_condition){.kind = "video", .video = &x->video, .audio = &x->audio};
}

static latent_step_options everything_step(const Everything *x) {
        return (latent_step_options){.struct_size = sizeof(latent_step_options),
                .video = &x->video,
                .audio = &x->audio,
                .sigma_video = 0.5,
                .sigma_audio = 0.25,
                .conditions = x->conditions,
                .n_conditions = 2,
                .has_seed = 1,
                .condition_noise = x->noise,
                .seed = 42,
                .mask_video = &x->mask,
                .mask_audio = &x->mask,
                .sigmas_video = &x->sigmas[0],
                .sigmas_audio = &x->sigmas[1]};
}

#define EVERYTHING                                                                                                         \
        "{video=(64,F32,[2,3]),audio=(128,F32,[5]),conditions=[{kind=keyframe,frame=7,video=(64,F32,[2,3])},{kind=video,"   \
        "video=(64,F32,[2,3]),audio=(128,F32,[5])}],condition-noise=comfy,seed=42,mask-video=(192,F32,[7]),"                \
        "mask-audio=(192,F32,[7])"

#define OF_A_STEP ",sigma-video=0.5,sigma-audio=0.25,sigmas-video=(320,F32,[5]),sigmas-audio=(384,F32,[5])}"

static void step_sends_all_options(void **state) {
        latent_session *s = open_session(*state, NULL);
        latent_job *job = NULL;
        latent_error e = {};
        latent_step_options o;
        Everything x;

        everything_init(&x);
        o = everything_step(&x);
        assert_int_equal(latent_session_step(s, &o, &job, &e), 0);
        wait_done(job);
        assert_string_equal(string_of(latent_job_result(job), "request"), EVERYTHING OF_A_STEP);
        latent_job_free(job);
        latent_session_free(s);
}

/* What a caller of the first version has behind its struct is not looked at. */
static void step_older_caller_without_new_options(void **state) {
        latent_session *s = open_session(*state, NULL);
        latent_tensor video = {.dtype = "F32", .n_dims = 2, .shape = {2, 3}};
        latent_step_options o = {.struct_size = 80,
                .video = &video,
                .sigma_video = 0.5,
                .conditions = (const latent_condition *) 1,
                .n_conditions = 3,
                .has_seed = 1,
                .mask_video = (const latent_tensor *) 1,
                .sigmas_video = (const latent_tensor *) 1};
        latent_job *job = NULL;
        latent_error e = {};

        assert_int_equal(latent_session_step(s, &o, &job, &e), 0);
        wait_done(job);
        assert_string_equal(
                string_of(latent_job_result(job), "request"), "{video=(0,F32,[2,3]),sigma-video=0.5,sigma-audio=0}");
        latent_job_free(job);

        /* the version before the last one */
        o = (latent_step_options){
                .struct_size = 128, .video = &video, .mask_audio = &video, .sigmas_video = (const latent_tensor *) 1};
        assert_int_equal(latent_session_step(s, &o, &job, &e), 0);
        wait_done(job);
        assert_string_equal(string_of(latent_job_result(job), "request"),
                "{video=(0,F32,[2,3]),mask-audio=(0,F32,[2,3]),sigma-video=0,sigma-audio=0}");
        latent_job_free(job);
        latent_session_free(s);
}

static void conditions_that_cannot_be_sent_refused(void **state) {
        latent_session *s = open_session(*state, NULL);
        latent_condition c[31] = {[0] = {.kind = "keyframe", .frame = UINT64_C(1) << 32}};
        latent_step_options o = {.struct_size = sizeof(o), .conditions = c, .n_conditions = 31};
        latent_job *job = NULL;
        latent_error e = {};

        assert_int_equal(latent_session_step(s, &o, &job, &e), -EINVAL);
        assert_string_equal(e.name, "InvalidArgument");
        assert_non_null(strstr(e.text, "at most 30"));
        o.n_conditions = 1;
        assert_int_equal(latent_session_step(s, &o, &job, &e), -EINVAL);
        assert_non_null(strstr(e.text, "frame 4294967296"));
        o.conditions = NULL;
        assert_int_equal(latent_session_step(s, &o, &job, &e), -EINVAL);
        assert_null(job);
        latent_session_free(s);
}

static void plan_asks_for_the_same_request(void **state) {
        latent_session *s = open_session(*state, NULL);
        latent_sample_options sample = {.struct_size = sizeof(sample), .steps = 4, .sampler = "res_multistep"};
        latent_step_options step;
        latent_value *v = NULL;
        latent_error e = {};
        uint64_t rows = 0;
        Everything x;

        everything_init(&x);
        step = everything_step(&x);
        assert_int_equal(latent_session_plan_step(s, &step, &v, &e), 0);
        assert_string_equal(string_of(v, "request"), "step " EVERYTHING OF_A_STEP);
        assert_int_equal(latent_value_as_uint(latent_value_get(v, "rows"), &rows), 0);
        assert_int_equal(rows, 33);
        latent_value_free(v);

        assert_int_equal(latent_session_plan_sample(s, &sample, &v, &e), 0);
        assert_string_equal(string_of(v, "request"), "sample {steps=4,sampler=res_multistep}");
        latent_value_free(v);
        sample.flags = 2;
        assert_int_equal(latent_session_plan_sample(s, &sample, &v, &e), -E2BIG);
        latent_session_free(s);
}

/* A trajectory that goes on in another run: with the arrays of its caller as they were, and the slots as they lay. */
static void sample_goes_on(Fake *f, const char *sampler, uint64_t stride, uint32_t flags, const char *resume) {
        latent_session *s = open_loaded(f, f->client);
        latent_sample_options o = {.struct_size = sizeof(o), .steps = 4, .shift_video = 6, .flags = flags};
        char expected[1024], name[32];
        const uint8_t *output;
        latent_job *job = NULL;
        latent_error e = {};
        Everything x;

        everything_init(&x);
        (void) snprintf(name, sizeof(name), "%s", sampler);
        o.video = &x.video;
        o.audio = &x.audio;
        o.mask_video = &x.mask;
        o.clean_video = &x.clean;
        o.conditions = x.conditions;
        o.n_conditions = 2;
        o.noise = x.noise;
        o.sampler = name;
        o.has_seed = 1;
        o.seed = stride;
        if (latent_session_sample(s, &o, &job, &e) < 0)
                fail_msg("%s: %s", e.name, e.text);
        memset(&x, 0xff, sizeof(x));
        memset(name, 'x', sizeof(name));

        assert_int_equal(latent_job_wait(job, SECOND / 4, NULL, NULL, &e), 1);
        fake_kill_service(f);
        fake_start_service(f);
        wait_done(job);
        (void) snprintf(expected, sizeof(expected),
                "{video=(64,F32,[2,3]),audio=(128,F32,[5]),conditions=[{kind=keyframe,frame=7,video=(64,F32,[2,3])},{kind=video,"
                "video=(64,F32,[2,3]),audio=(128,F32,[5])}],seed=%llu,mask-video=(192,F32,[7]),steps=4,shift-video=6,sampler=%s,"
                "noise=comfy,clean-video=(256,F32,[8])%s}",
                (unsigned long long) stride, sampler, resume);
        assert_string_equal(string_of(latent_job_result(job), "request"), expected);

        /* State 2 whole, and with KEEP_STEPS those before it: the fake wrote k + 1 into state k. */
        output = (const uint8_t *) latent_session_output(s) + SAMPLE_COPIES;
        for (uint64_t i = 0; i < stride; i++)
                assert_int_equal(output[i], 3);
        for (uint64_t i = 0; flags && i < 2 * stride; i++)
                assert_int_equal(output[stride + i], i < stride ? 1 : 2);
        latent_job_free(job);
        latent_session_free(s);
}

static void sample_goes_on_from_its_slot(void **state) {
        /* video 24 and audio 20 bytes: one multiple of 64 each. Two slots take turns: state 2 lies in the first. */
        sample_goes_on(*state, "res_multistep", 5 * 64, 0,
                ",resume-step=2,numerics=fake-numerics,resume-slot=(65536,U8,[320])");
}

static void sample_goes_on_with_its_kept_slots(void **state) {
        sample_goes_on(*state, "res_multistep_perstream", 4 * 64, LATENT_SAMPLE_KEEP_STEPS,
                ",keep-steps=1,resume-step=2,numerics=fake-numerics,resume-slot=(65536,U8,[256]),kept-slots=(65792,U8,[2,256])");
}

/* ---- adapters ---- */

static latent_model *load_adapter(Fake *f, const char *name) {
        latent_job *load = fake_load(f, name);
        latent_model *m = NULL;

        wait_done(load);
        assert_int_equal(latent_job_model(load, &m, NULL), 0);
        latent_job_free(load);
        return m;
}

/* Sets name:strength, ... and frees the models: the session knows where they come from. */
static latent_job *set_adapters(Fake *f, latent_session *s, const char *const *names, const double *strengths, size_t n) {
        latent_lora loras[4] = {};
        latent_job *job = NULL;
        latent_error e = {};

        for (size_t i = 0; i < n; i++)
                loras[i] = (latent_lora){.model = load_adapter(f, names[i]), .strength = strengths[i]};
        if (latent_session_set_loras(s, loras, n, n > 1 ? "f32" : NULL, &job, &e) < 0)
                fail_msg("%s: %s", e.name, e.text);
        for (size_t i = 0; i < n; i++)
                latent_model_free(loras[i].model);
        return job;
}

#define SET(f, s, n, ...) set_adapters(f, s, (const char *const[]){"lora-a", "lora-b"}, (const double[]){__VA_ARGS__}, n)

static void expect_loras(latent_session *s, const char *expected) {
        float *input;
        latent_job *job = start_step(s, 0.5, &input);

        wait_done(job);
        assert_string_equal(string_of(latent_job_result(job), "loras"), expected);
        latent_job_free(job);
}

static void set_loras_in_their_order_with_result(void **state) {
        latent_session *s = open_session(*state, NULL);
        latent_job *job = SET(*state, s, 2, 0.5, -2);
        const latent_value *refused;

        wait_done(job);
        assert_string_equal(
                latent_value_as_string(latent_value_at(latent_value_get(latent_job_result(job), "applied"), 0)), "blocks.0");
        refused = latent_value_at(latent_value_get(latent_job_result(job), "refused"), 0);
        assert_string_equal(latent_value_as_string(latent_value_at(refused, 1)), "no such block");
        latent_job_free(job);
        expect_loras(s, "lora-a:0.5 lora-b:-2 {compute=f32}");

        job = SET(*state, s, 0, 0);
        wait_done(job);
        latent_job_free(job);
        expect_loras(s, "{}");
        latent_session_free(s);
}

static void refuse_loras(latent_session *s, const latent_lora *loras, size_t n, int code, const char *says) {
        latent_job *job = NULL;
        latent_error e = {};

        assert_int_equal(latent_session_set_loras(s, loras, n, NULL, &job, &e), code);
        if (!strstr(e.text, says))
                fail_msg("\"%s\" does not say \"%s\"", e.text, says);
        assert_null(job);
}

static void set_loras_wrong_arguments_refused(void **state) {
        Fake *f = *state;
        latent_client *other = connect_with(f, 0, 0);
        latent_session *s = open_session(f, NULL);
        latent_lora l[17] = {};
        latent_model *m = load_adapter(f, "lora-a"), *stranger = NULL;
        const double strengths[] = {(double) INFINITY, (double) NAN, 1000.5, -1e300};

        assert_int_equal(latent_model_find(other, "tiny", &stranger, NULL), 0);
        refuse_loras(s, l, 17, -EINVAL, "at most 16");
        refuse_loras(s, NULL, 1, -EINVAL, "at no place");
        refuse_loras(s, l, 1, -EINVAL, "no model");
        l[0] = (latent_lora){.model = stranger, .strength = 1};
        refuse_loras(s, l, 1, -EINVAL, "another client");
        l[0].model = m;
        for (size_t i = 0; i < sizeof(strengths) / sizeof(strengths[0]); i++) {
                l[0].strength = strengths[i];
                refuse_loras(s, l, 1, -EINVAL, "from -1000 to 1000");
        }

        latent_model_free(stranger);
        latent_model_free(m);
        latent_session_free(s);
        latent_client_free(other);
}

static void service_comes_back_loras_are_set_again(void **state) {
        Fake *f = *state;
        latent_session *s = open_loaded(f, f->client);
        latent_job *merge = SET(f, s, 2, 0.5, -2), *job;
        latent_error e = {};
        float *input;

        wait_done(merge);
        job = start_step(s, 0.125, &input);
        assert_int_equal(latent_job_wait(job, SECOND / 4, NULL, NULL, &e), 1);
        fake_kill_service(f);
        fake_start_service(f);
        wait_done(job);
        assert_string_equal(string_of(latent_job_result(job), "loras"), "lora-a:0.5 lora-b:-2 {compute=f32}");
        expect_velocity(job);
        latent_job_free(job);
        latent_session_reset(s);
        expect_loras(s, "lora-a:0.5 lora-b:-2 {compute=f32}"); /* of the session, too */
        latent_job_free(merge);
        latent_session_free(s);
}

static void lora_changes_step_and_merge_end(void **state) {
        static const char *const names[] = {"lora-a", "lora-changes"};
        Fake *f = *state;
        latent_session *s = open_loaded(f, f->client);
        latent_job *merge = set_adapters(f, s, names, (const double[]){0.5, 2}, 2);
        float *input;

        wait_done(merge);
        latent_job_free(merge);
        expect_file_changed(f, start_step(s, 0.125, &input), "adapter \"lora-changes\"");
        latent_session_free(s);

        f->n_starts = 0;
        fake_kill_service(f);
        fake_start_service(f);
        s = open_loaded(f, f->client);
        expect_file_changed(f, set_adapters(f, s, names + 1, (const double[]){0.125}, 1), "adapter \"lora-changes\"");
        latent_session_free(s);
}

static void service_dies_in_a_merge_it_is_sent_again(void **state) {
        Fake *f = *state;
        latent_session *s = open_loaded(f, f->client);
        latent_job *merge = SET(f, s, 1, 0.125);
        latent_error e = {};

        assert_int_equal(latent_job_wait(merge, SECOND / 4, NULL, NULL, &e), 1);
        fake_kill_service(f);
        fake_start_service(f);
        wait_done(merge);
        assert_non_null(latent_value_get(latent_job_result(merge), "applied"));
        expect_loras(s, "lora-a:0.125 {}");
        latent_job_free(merge);
        latent_session_free(s);
}

/* A job keeps those that it began with, whatever was set behind it. */
static void service_comes_back_each_job_with_its_loras(void **state) {
        Fake *f = *state;
        latent_session *s = open_loaded(f, f->client);
        latent_job *bare, *first, *merge[2];
        latent_error e = {};
        float *input;

        bare = start_step(s, 0.1875, &input);
        merge[0] = SET(f, s, 1, 3);
        wait_done(merge[0]);
        first = start_step(s, 0.1875, &input);
        merge[1] = SET(f, s, 2, 4, 5);
        wait_done(merge[1]);
        fake_kill_service(f);
        fake_start_service(f);

        /* One by one: the fake has one path for all steps. */
        assert_int_equal(latent_job_wait(first, LONG, NULL, NULL, &e), 0);
        assert_string_equal(string_of(latent_job_result(first), "loras"), "lora-a:3 {}");
        assert_int_equal(latent_job_wait(bare, LONG, NULL, NULL, &e), 0);
        assert_string_equal(string_of(latent_job_result(bare), "loras"), "{}");
        expect_loras(s, "lora-a:4 lora-b:5 {compute=f32}");
        latent_job_free(bare);
        latent_job_free(first);
        latent_job_free(merge[0]);
        latent_job_free(merge[1]);
        latent_session_free(s);
}

static void lora_of_unknown_source_restarted_at_once(void **state) {
        Fake *f = *state;
        latent_session *s = open_loaded(f, f->client);
        latent_lora l = {.model = find_model(f), .strength = 1}; /* found, not loaded */
        latent_job *merge = NULL, *job;
        latent_error e = {};
        float *input;

        assert_int_equal(latent_session_set_loras(s, &l, 1, NULL, &merge, &e), 0);
        wait_done(merge);
        job = start_step(s, 0.125, &input);
        assert_int_equal(latent_job_wait(job, LONG, NULL, NULL, &e), -ECONNRESET);
        assert_string_equal(e.name, "Restarted");
        latent_job_free(job);
        latent_job_free(merge);
        latent_model_free(l.model);
        latent_session_free(s);
}

/* In the new run the path may mean something else. */
static void lora_handle_of_a_gone_run_refused(void **state) {
        Fake *f = *state;
        latent_session *s = open_loaded(f, f->client);
        latent_lora l = {.model = load_adapter(f, "lora-a"), .strength = 1};
        latent_error e = {};
        float *input;
        latent_job *job = start_step(s, 0.125, &input);

        assert_int_equal(latent_job_wait(job, SECOND / 4, NULL, NULL, &e), 1);
        fake_kill_service(f);
        fake_start_service(f);
        wait_done(job);
        latent_job_free(job);
        refuse_loras(s, &l, 1, -ECONNRESET, "Load it again");
        latent_session_reset(s);
        expect_loras(s, "");
        latent_model_free(l.model);
        latent_session_free(s);
}

/* ---- coding ---- */

typedef struct Coding {
        latent_tensor text, video, audio, picture;
        latent_picture pictures[2];
        char type[8];
} Coding;

static void coding_init(Coding *x) {
        *x = (Coding){
                .text = {.offset = 7, .dtype = "U8", .n_dims = 1, .shape = {5}},
                .video = {.offset = 64, .dtype = "F32", .n_dims = 4, .shape = {24, 7, 1, 2}},
                .audio = {.offset = 128, .dtype = "F32", .n_dims = 3, .shape = {32, 2, 9}},
                .picture = {.offset = 33, .dtype = "U8", .n_dims = 4, .shape = {13, 2, 3, 3}},
                .type = "f32",
        };
        x->pictures[0] = (latent_picture){.kind = "video", .picture = &x->picture, .sound = 1};
        x->pictures[1] = (latent_picture){.kind = "audio"};
}

/* What the service was asked for; frees the job. */
static void expect_request(latent_job *job, const char *expected) {
        latent_error e = {};

        if (latent_job_wait(job, LONG, NULL, NULL, &e) != 0)
                fail_msg("%s: %s", e.name, e.text);
        assert_string_equal(string_of(latent_job_result(job), "request"), expected);
        latent_job_free(job);
}

static int file_with(char c) {
        int fd = memfd_create("file", MFD_CLOEXEC);
        return pwrite(fd, &c, 1, 0) == 1 ? fd : -1;
}

static void render_sends_files_that_are_its_own(void **state) {
        latent_session *s = open_session(*state, NULL);
        latent_media pictures[3] = {{.kind = "keyframe", .flags = LATENT_MEDIA_LAST},
                {.name = "a clip", .flags = LATENT_MEDIA_SOUND}, {.kind = "video", .flags = LATENT_MEDIA_SILENT}};
        latent_render_options o = {.struct_size = sizeof(o), .steps = 3, .pictures = pictures, .n_pictures = 3, .picture_rule = "comfy"};
        latent_media many[13] = {{.flags = 8}};
        latent_job *job = NULL;
        latent_error e = {};

        for (unsigned i = 0; i < 3; i++)
                pictures[i].file = file_with((char) ('A' + i));
        assert_int_equal(latent_session_render(s, &o, &job, NULL), 0);
        for (unsigned i = 0; i < 3; i++)
                (void) close(pictures[i].file);
        memset(pictures, 0xff, sizeof(pictures)); /* copies were taken */
        expect_request(job, "Render {steps=3,pictures=[{kind=keyframe,file=A,last=1},{name=a clip,file=B,sound=1},"
                            "{kind=video,file=C,sound=0}],picture-rule=comfy}");

        o.pictures = many;
        o.n_pictures = 13;
        assert_int_equal(latent_session_render(s, &o, &job, &e), -EINVAL);
        o.n_pictures = 1;
        assert_int_equal(latent_session_render(s, &o, &job, &e), -E2BIG);
        many[0] = (latent_media){.file = -1};
        assert_int_equal(latent_session_render(s, &o, &job, &e), -EINVAL);
        latent_session_free(s);
}

static void coding_sends_all_options(void **state) {
        latent_session *s = open_session(*state, NULL);
        latent_tokenize_options t = {.struct_size = sizeof(t)};
        latent_encode_options n = {.struct_size = sizeof(n)};
        latent_encode_media_options m = {.struct_size = sizeof(m)};
        latent_job *job = NULL;
        Coding x;

        coding_init(&x);
        t.text = &x.text;
        t.output_offset = 64;
        t.output_bytes = 4096;
        assert_int_equal(latent_session_tokenize(s, &t, &job, NULL), 0);
        expect_request(job, "Tokenize {text=(7,U8,[5]),output-offset=64,output-bytes=4096}");
        assert_int_equal(latent_session_tokenize(s, NULL, &job, NULL), 0);
        expect_request(job, "Tokenize {}");

        n.text = &x.text;
        n.pictures = x.pictures;
        n.n_pictures = 2;
        n.picture_rule = "comfy";
        n.type = x.type;
        n.compute = "bf16";
        assert_int_equal(latent_session_encode(s, &n, &job, NULL), 0);
        memset(&x, 0xff, sizeof(x)); /* copies were taken */
        expect_request(job, "Encode {text=(7,U8,[5]),pictures=[{kind=video,picture=(33,U8,[13,2,3,3]),sound=1},{kind=audio}],"
                            "picture-rule=comfy,type=f32,compute=bf16}");

        coding_init(&x);
        m.video = &x.video;
        m.posterior = "sampled";
        m.has_seed = 1;
        assert_int_equal(latent_session_encode_media(s, &m, &job, NULL), 0);
        expect_request(job, "EncodeMedia {video=(64,F32,[24,7,1,2]),posterior=sampled,seed=0}");
        m = (latent_encode_media_options){.struct_size = sizeof(m), .audio = &x.audio};
        assert_int_equal(latent_session_encode_media(s, &m, &job, NULL), 0);
        expect_request(job, "EncodeMedia {audio=(128,F32,[32,2,9])}");
        latent_session_free(s);
}

static void coding_that_cannot_be_sent_refused(void **state) {
        latent_session *s = open_session(*state, NULL);
        latent_encode_options n = {.struct_size = sizeof(n), .n_pictures = 31};
        latent_decode_options d = {.struct_size = 8};
        latent_picture pictures[31] = {};
        latent_job *job = NULL;
        latent_error e = {};

        assert_int_equal(latent_session_encode(s, &n, &job, &e), -EINVAL);
        n.pictures = pictures;
        assert_int_equal(latent_session_encode(s, &n, &job, &e), -EINVAL);
        assert_non_null(strstr(e.text, "31 pictures"));
        assert_int_equal(latent_session_decode(s, &d, &job, &e), -EINVAL);
        assert_non_null(strstr(e.text, "struct_size"));
        assert_null(job);
        latent_session_free(s);
}

static void plan_of_coding_asks_for_the_same_request(void **state) {
        latent_session *s = open_session(*state, NULL);
        latent_decode_options d = {.struct_size = sizeof(d), .frames = 22};
        latent_value *v = NULL;
        Coding x;

        coding_init(&x);
        d.video = &x.video;
        assert_int_equal(latent_session_plan_decode(s, &d, &v, NULL), 0);
        assert_string_equal(string_of(v, "request"), "decode {video=(64,F32,[24,7,1,2]),frames=22}");
        latent_value_free(v);
        assert_int_equal(latent_session_plan_tokenize(s, NULL, &v, NULL), 0);
        assert_string_equal(string_of(v, "request"), "tokenize {}");
        latent_value_free(v);
        assert_int_equal(latent_session_plan_encode(s, NULL, &v, NULL), 0);
        assert_string_equal(string_of(v, "request"), "encode {}");
        latent_value_free(v);
        assert_int_equal(latent_session_plan_encode_media(s, NULL, &v, NULL), 0);
        assert_string_equal(string_of(v, "request"), "encode-media {}");
        latent_value_free(v);
        latent_session_free(s);
}

static void expect_frames(const latent_job *job, uint64_t n) {
        const uint8_t *p;
        latent_tensor t;
        const void *data;
        uint64_t all;

        assert_int_equal(latent_job_tensor(job, "frames", &t, &data, NULL), 0);
        assert_int_equal(t.shape[0], 22);
        assert_int_equal(latent_value_as_uint(latent_value_get(latent_job_result(job), "frames"), &all), 0);
        assert_int_equal(all, 22);
        p = data;
        for (uint64_t i = 0; i < 3 * n; i++)
                assert_int_equal(p[i], i / 3 + 1);
}

static void decode_frames_can_be_read_and_released(void **state) {
        latent_session *s = open_session(*state, NULL);
        latent_decode_options d = {.struct_size = sizeof(d), .frames = 22};
        latent_job *job = NULL, *other = NULL;
        latent_error e = {};
        uint64_t n = 0;
        Coding x;

        coding_init(&x);
        d.video = &x.video;
        assert_int_equal(latent_session_decode(s, &d, &job, &e), 0);
        assert_null(latent_job_result(job));
        assert_int_equal(latent_job_frames_ready(job, 0, LONG, NULL, NULL, &n, &e), 0);
        assert_int_equal(n, 17);
        expect_frames(job, 17);
        n = 77;
        assert_int_equal(latent_job_frames_ready(job, 17, SECOND / 10, NULL, NULL, &n, &e), 1);
        assert_int_equal(n, 77);
        assert_int_equal(latent_job_release_frames(job, 18, &e), -EINVAL);
        assert_non_null(strstr(e.text, "17 of them"));
        assert_int_equal(latent_job_release_frames(job, 17, &e), 0);
        assert_int_equal(latent_job_frames_ready(job, 17, LONG, NULL, NULL, &n, &e), 0);
        assert_int_equal(n, 22);
        assert_int_equal(latent_job_frames_ready(job, 22, LONG, NULL, NULL, &n, &e), 0); /* its end */
        assert_int_equal(n, 22);
        expect_frames(job, 22);
        assert_string_equal(string_of(latent_job_result(job), "request"), "Decode {video=(64,F32,[24,7,1,2]),frames=22}");
        assert_int_equal(latent_job_release_frames(job, 22, &e), 0); /* nothing to be done */

        assert_int_equal(latent_session_tokenize(s, NULL, &other, &e), 0);
        assert_int_equal(latent_job_frames_ready(other, 0, 0, NULL, NULL, &n, &e), -EINVAL);
        assert_int_equal(latent_job_release_frames(other, 0, &e), -EINVAL);
        latent_job_free(other);
        latent_job_free(job);
        latent_session_free(s);
}

/* Without a ring all frames are made again, in a new arena. */
static void service_comes_back_decode_is_sent_again(void **state) {
        Fake *f = *state;
        latent_session *s = open_loaded(f, f->client);
        latent_decode_options d = {.struct_size = sizeof(d), .type = "f32"};
        latent_job *job = NULL;
        latent_error e = {};
        uint64_t n = 0;
        Coding x;

        coding_init(&x);
        d.video = &x.video;
        assert_int_equal(latent_session_decode(s, &d, &job, &e), 0);
        assert_int_equal(latent_job_frames_ready(job, 0, LONG, NULL, NULL, &n, &e), 0);
        assert_int_equal(n, 17);
        assert_int_equal(latent_job_wait(job, SECOND / 4, NULL, NULL, &e), 1);
        fake_kill_service(f);
        fake_start_service(f);
        assert_int_equal(latent_job_frames_ready(job, 21, LONG, NULL, NULL, &n, &e), 0);
        assert_int_equal(n, 22);
        wait_done(job);
        expect_frames(job, 22);
        latent_job_free(job);
        latent_session_free(s);
}

static void service_goes_away_ring_restarted(void **state) {
        Fake *f = *state;
        latent_session *s = open_loaded(f, f->client);
        latent_decode_options d = {.struct_size = sizeof(d), .type = "f32", .frames = 22};
        latent_job *job = NULL;
        latent_error e = {};
        uint64_t n = 0;
        Coding x;

        coding_init(&x);
        d.video = &x.video;
        assert_int_equal(latent_session_decode(s, &d, &job, &e), 0);
        assert_int_equal(latent_job_frames_ready(job, 0, LONG, NULL, NULL, &n, &e), 0);
        assert_int_equal(latent_job_frames_ready(job, 17, LONG, NULL, NULL, &n, &e), -ECONNRESET);
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
        assert_int_equal(latent_job_wait(job, LONG, NULL, NULL, &e), 0);
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
                TEST(open_gpus_are_passed_on),
                TEST(release_gpus_answer_is_passed_on),
                TEST(step_tensors_there_and_back),
                TEST(service_comes_back_step_is_sent_again),
                TEST(model_changes_step_ends),
                TEST(service_dies_twice_step_is_sent_twice),
                TEST(service_stays_away_restarted),
                TEST(model_of_unknown_source_restarted_at_once),
                TEST(step_sends_all_options),
                TEST(step_older_caller_without_new_options),
                TEST(conditions_that_cannot_be_sent_refused),
                TEST(plan_asks_for_the_same_request),
                TEST(sample_goes_on_from_its_slot),
                TEST(sample_goes_on_with_its_kept_slots),
                TEST(set_loras_in_their_order_with_result),
                TEST(set_loras_wrong_arguments_refused),
                TEST(service_comes_back_loras_are_set_again),
                TEST(lora_changes_step_and_merge_end),
                TEST(service_dies_in_a_merge_it_is_sent_again),
                TEST(service_comes_back_each_job_with_its_loras),
                TEST(lora_of_unknown_source_restarted_at_once),
                TEST(lora_handle_of_a_gone_run_refused),
                TEST(render_sends_files_that_are_its_own),
                TEST(coding_sends_all_options),
                TEST(coding_that_cannot_be_sent_refused),
                TEST(plan_of_coding_asks_for_the_same_request),
                TEST(decode_frames_can_be_read_and_released),
                TEST(service_comes_back_decode_is_sent_again),
                TEST(service_goes_away_ring_restarted),
                TEST(allocate_full_arena_does_not_fit),
                TEST(sample_unknown_flag_refused),
                TEST(session_after_restart_restarted),
                TEST(load_path_hands_over_all_files),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
