/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/unit/latentd/fake-bus.h"

#include <math.h>

#include "service/latentd/session-request.h"
#include "service/latentd/store-internal.h"

static FakeBus bus;

static sd_bus_message *request_new(void) {
        sd_bus_message *m;

        assert_true(sd_bus_message_new_method_call(bus.client, &m, NULL, "/x", "x.y", "Z") >= 0);
        assert_true(sd_bus_message_open_container(m, 'a', "{sv}") >= 0);
        return m;
}

static void seal(sd_bus_message *m) {
        assert_true(sd_bus_message_close_container(m) >= 0);
        assert_true(sd_bus_message_seal(m, 1, 0) >= 0);
        assert_true(sd_bus_message_rewind(m, 1) >= 0);
}

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

#define ADD(m, key, type, value) assert_true(sd_bus_message_append(m, "{sv}", key, type, value) >= 0)
#define SHAPE(...)                                                                                          \
        sizeof((uint64_t[]){ __VA_ARGS__ }) / 8, (uint64_t[]) {                                             \
                __VA_ARGS__                                                                                 \
        }

/* The required tensors without the one called skip. */
static sd_bus_message *with_tensors(const char *skip) {
        sd_bus_message *m = request_new();

        if (strcmp(skip, "text") != 0)
                add_tensor(m, "text", 4096, "BF16", SHAPE(2, 4));
        if (strcmp(skip, "video") != 0)
                add_tensor(m, "video", 0, "F32", SHAPE(24, 1, 1, 1));
        if (strcmp(skip, "audio") != 0)
                add_tensor(m, "audio", 96, "F32", SHAPE(32, 2, 1));
        return m;
}

static sd_bus_message *with_sigmas(const char *skip) {
        sd_bus_message *m = with_tensors(skip);

        if (strcmp(skip, "sigma-video") != 0)
                ADD(m, "sigma-video", "d", 0.75);
        if (strcmp(skip, "sigma-audio") != 0)
                ADD(m, "sigma-audio", "d", 0.1);
        return m;
}

static sd_bus_message *with_steps(const char *skip) {
        sd_bus_message *m = with_tensors(skip);

        if (strcmp(skip, "steps") != 0)
                ADD(m, "steps", "u", 4u);
        return m;
}

static void expect(bool step, sd_bus_message *m, const Session *s, const char *name, const char *word) {
        WireJobOpen q = { .steps = 77 };
        Fault f = {};
        int r;

        seal(m);
        r = step ? session_request_step(m, s, &q, &f) : session_request_sample(m, s, &q, &f);
        if (name) {
                assert_true(r < 0);
                assert_string_equal(f.name, name);
                if (!strstr(f.text, word))
                        fail_msg("\"%s\" does not name \"%s\"", f.text, word);
                assert_int_equal(q.steps, 77); /* untouched */
        } else
                assert_int_equal(r, 0);
        (void) sd_bus_message_unref(m);
}

static void request_step_all_keys_are_taken(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, 0);
        sd_bus_message *m = with_sigmas("");
        Fault fault = {};
        WireJobOpen q;

        add_tensor(m, "text-tags", 9000, "U8", SHAPE(2));
        ADD(m, "compute", "s", "f32");
        ADD(m, "output-offset", "t", UINT64_C(128));
        ADD(m, "output-bytes", "t", UINT64_C(1024));
        seal(m);
        assert_int_equal(session_request_step(m, s, &q, &fault), 0);
        assert_int_equal(q.kind, WIRE_JOB_STEP);
        assert_int_equal(q.compute, WIRE_COMPUTE_F32);
        assert_int_equal(q.output_offset, 128);
        assert_int_equal(q.output_size, 1024);
        assert_int_equal(q.text_tags.offset, 9000);
        assert_int_equal(q.text_tags.size, 2);
        assert_int_equal(q.video.size, 96);
        assert_true(q.sigma_video == 0.75f && q.sigma_audio == (float) 0.1);
        (void) sd_bus_message_unref(m);
}

static void request_step_bad_input_is_named(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, 0);
        static const char *const required[] = { "text", "video", "audio", "sigma-video", "sigma-audio" };
        static const double sigmas[] = { -0.001, 1.001, NAN, INFINITY };
        sd_bus_message *m;

        for (size_t i = 0; i < ELEMENTSOF(required); i++)
                expect(true, with_sigmas(required[i]), s, FAULT_INVALID_ARGUMENT, required[i]);
        for (size_t i = 0; i < ELEMENTSOF(sigmas); i++) {
                m = with_sigmas("sigma-audio");
                ADD(m, "sigma-audio", "d", sigmas[i]);
                expect(true, m, s, FAULT_INVALID_ARGUMENT, "sigma-audio");
        }

        m = with_sigmas("");
        ADD(m, "steps", "u", 4u);
        expect(true, m, s, FAULT_INVALID_ARGUMENT, "steps"); /* a key of Sample */
        m = with_sigmas("sigma-video");
        ADD(m, "sigma-video", "s", "0.5");
        expect(true, m, s, FAULT_INVALID_ARGUMENT, "sigma-video");
        m = with_sigmas("");
        ADD(m, "compute", "s", "fp64");
        expect(true, m, s, FAULT_INVALID_ARGUMENT, "fp64");
        m = with_sigmas("");
        ADD(m, "output-offset", "t", UINT64_C(32));
        expect(true, m, s, FAULT_INVALID_ARGUMENT, "multiple of 64");
        m = with_sigmas("");
        ADD(m, "output-offset", "t", (uint64_t) ARENA_BYTES);
        expect(true, m, s, FAULT_INVALID_ARGUMENT, "output");
        m = with_sigmas("");
        ADD(m, "output-bytes", "t", (uint64_t) ARENA_BYTES + 1);
        expect(true, m, s, FAULT_INVALID_ARGUMENT, "output");
        m = with_sigmas("");
        ADD(m, "output-bytes", "t", UINT64_MAX);
        expect(true, m, s, FAULT_INVALID_ARGUMENT, "output");
}

static void request_tensor_bad_place_or_type_is_named(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, 0);
        sd_bus_message *m;

        m = with_sigmas("video");
        add_tensor(m, "video", ARENA_BYTES - 92, "F32", SHAPE(24, 1, 1, 1));
        expect(true, m, s, FAULT_INVALID_TENSOR, "video");
        m = with_sigmas("video");
        add_tensor(m, "video", UINT64_MAX - 3, "F32", SHAPE(24, 1, 1, 1));
        expect(true, m, s, FAULT_INVALID_TENSOR, "video");
        m = with_sigmas("video");
        add_tensor(m, "video", 2, "F32", SHAPE(24, 1, 1, 1));
        expect(true, m, s, FAULT_INVALID_TENSOR, "multiple");
        m = with_sigmas("video");
        add_tensor(m, "video", 0, "BF16", SHAPE(24, 1, 1, 1));
        expect(true, m, s, FAULT_INVALID_TENSOR, "F32 [24, T, H, W]");
        m = with_sigmas("video");
        add_tensor(m, "video", 0, "F32", SHAPE(24, 1, 1));
        expect(true, m, s, FAULT_INVALID_TENSOR, "3 dimensions");
        m = with_sigmas("video");
        add_tensor(m, "video", 0, "F32", SHAPE(UINT64_C(1) << 62, 4, 4, 4));
        expect(true, m, s, FAULT_INVALID_TENSOR, "video");
        m = with_sigmas("");
        add_tensor(m, "text-tags", 9000, "U8", SHAPE(3));
        expect(true, m, s, FAULT_INVALID_TENSOR, "text-tags");
        m = with_sigmas("video");
        add_tensor(m, "video", ARENA_BYTES - 96, "F32", SHAPE(24, 1, 1, 1));
        expect(true, m, s, NULL, NULL); /* just fits */
}

static void request_sample_defaults_and_keys(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, 0);
        sd_bus_message *m = with_steps("");
        Fault fault = {};
        WireJobOpen q;

        s->compute = WIRE_COMPUTE_BF16;
        seal(m);
        assert_int_equal(session_request_sample(m, s, &q, &fault), 0);
        assert_int_equal(q.kind, WIRE_JOB_SAMPLE);
        assert_int_equal(q.steps, 4);
        assert_int_equal(q.schedule, WIRE_SCHEDULE_SIMPLE);
        assert_int_equal(q.compute, WIRE_COMPUTE_BF16);
        assert_int_equal(q.flags, 0);
        assert_true(q.shift_video == 12.0f && q.shift_audio == 3.0f);
        assert_int_equal(q.output_size, ARENA_BYTES);
        (void) sd_bus_message_unref(m);

        m = with_steps("");
        ADD(m, "keep-steps", "b", 1);
        ADD(m, "schedule", "s", "reference");
        ADD(m, "shift-video", "d", 7.5);
        seal(m);
        assert_int_equal(session_request_sample(m, s, &q, &fault), 0);
        assert_int_equal(q.flags, WIRE_JOB_KEEP_STEPS);
        assert_int_equal(q.schedule, WIRE_SCHEDULE_REFERENCE);
        assert_true(q.shift_video == 7.5f);
        (void) sd_bus_message_unref(m);

        m = with_steps(""); /* sigmas win over steps */
        add_tensor(m, "sigmas-video", 9000, "F32", SHAPE(9));
        add_tensor(m, "sigmas-audio", 9100, "F32", SHAPE(9));
        seal(m);
        assert_int_equal(session_request_sample(m, s, &q, &fault), 0);
        assert_int_equal(q.schedule, WIRE_SCHEDULE_GIVEN);
        assert_int_equal(q.steps, 0);
        (void) sd_bus_message_unref(m);
}

/* What another run of the service began. */
static void request_sample_resume_keys(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, 0);
        sd_bus_message *m = with_steps("");
        Fault fault = {};
        WireJobOpen q;

        ADD(m, "keep-steps", "b", 1);
        ADD(m, "resume-step", "u", 3);
        ADD(m, "numerics", "s", "cpu-1");
        add_tensor(m, "kept-video", 0, "F32", SHAPE(3, 24, 1, 1, 1));
        add_tensor(m, "kept-audio", 4096, "F32", SHAPE(3, 32, 2, 1));
        seal(m);
        assert_int_equal(session_request_sample(m, s, &q, &fault), 0);
        assert_int_equal(q.start_step, 3);
        assert_string_equal(q.numerics, "cpu-1");
        assert_int_equal(q.kept_video.size, 3 * 24 * 4);
        assert_int_equal(q.kept_audio.offset, 4096);
        (void) sd_bus_message_unref(m);

        m = with_steps(""); /* of 4 steps */
        ADD(m, "resume-step", "u", 4);
        expect(false, m, s, FAULT_INVALID_ARGUMENT, "resume-step");
        m = with_steps("");
        ADD(m, "numerics", "s", "cpu-1");
        expect(false, m, s, FAULT_INVALID_ARGUMENT, "resume-step");
        m = with_steps("");
        ADD(m, "resume-step", "u", 1);
        ADD(m, "numerics", "s",
                "0123456789012345678901234567890123456789012345678901234567890123456789012345678901234567890123456789"
                "0123456789012345678901234567");
        expect(false, m, s, FAULT_INVALID_ARGUMENT, "128 bytes");
        m = with_steps("");
        ADD(m, "resume-step", "u", 1);
        ADD(m, "keep-steps", "b", 1);
        expect(false, m, s, FAULT_INVALID_ARGUMENT, "kept-video");
        m = with_steps("");
        ADD(m, "resume-step", "u", 1);
        add_tensor(m, "kept-video", 0, "F32", SHAPE(1, 24, 1, 1, 1));
        expect(false, m, s, FAULT_INVALID_ARGUMENT, "keep-steps");
        m = with_steps("");
        ADD(m, "resume-step", "u", 1);
        ADD(m, "keep-steps", "b", 1);
        add_tensor(m, "kept-video", ARENA_BYTES - 64, "F32", SHAPE(1, 24, 1, 1, 1));
        add_tensor(m, "kept-audio", 4096, "F32", SHAPE(1, 32, 2, 1));
        expect(false, m, s, FAULT_INVALID_TENSOR, "kept-video");
}

static void request_sample_bad_input_is_named(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, 0);
        static const double shifts[] = { 0, -1, NAN, INFINITY, 1e300, 1e-300 };
        static const uint32_t steps[] = { 0, 1001, UINT32_MAX };
        sd_bus_message *m;

        expect(false, with_steps("steps"), s, FAULT_INVALID_ARGUMENT, "steps");
        for (size_t i = 0; i < ELEMENTSOF(steps); i++) {
                m = with_steps("steps");
                ADD(m, "steps", "u", steps[i]);
                expect(false, m, s, FAULT_INVALID_ARGUMENT, "steps");
        }
        for (size_t i = 0; i < ELEMENTSOF(shifts); i++) {
                m = with_steps("");
                ADD(m, "shift-audio", "d", shifts[i]);
                expect(false, m, s, FAULT_INVALID_ARGUMENT, "shift-audio");
        }

        m = with_steps("");
        ADD(m, "sampler", "s", "heun");
        expect(false, m, s, FAULT_INVALID_ARGUMENT, "heun");
        m = with_steps("");
        ADD(m, "sampler", "s", "res_multistep");
        expect(false, m, s, FAULT_NOT_SUPPORTED, "res_multistep");
        m = with_steps("");
        ADD(m, "noise", "s", "comfy");
        expect(false, m, s, FAULT_NOT_SUPPORTED, "comfy");
        m = with_steps("");
        ADD(m, "seed", "t", UINT64_C(1));
        expect(false, m, s, FAULT_NOT_SUPPORTED, "seed");
        m = with_steps("");
        ADD(m, "schedule", "s", "linear");
        expect(false, m, s, FAULT_INVALID_ARGUMENT, "linear");
        m = with_steps("");
        ADD(m, "sigma-video", "d", 0.5);
        expect(false, m, s, FAULT_INVALID_ARGUMENT, "sigma-video");
        m = with_tensors("");
        add_tensor(m, "sigmas-video", 9000, "F32", SHAPE(9));
        expect(false, m, s, FAULT_INVALID_ARGUMENT, "sigmas-audio");
        m = with_tensors("");
        add_tensor(m, "sigmas-video", 9000, "F32", SHAPE(9));
        add_tensor(m, "sigmas-audio", 9100, "F32", SHAPE(8));
        expect(false, m, s, FAULT_INVALID_TENSOR, "same number");
        m = with_tensors("");
        add_tensor(m, "sigmas-video", 9000, "F32", SHAPE(1));
        add_tensor(m, "sigmas-audio", 9100, "F32", SHAPE(1));
        expect(false, m, s, FAULT_INVALID_TENSOR, "2 to 1001");
}

static void request_overlap_with_unfinished_job_is_busy(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, 0), *other = fake_session(f, 0);
        WireJobOpen q = fake_request(WIRE_JOB_STEP, 1, 1);
        Fault fault = {};
        Job *j = fake_submit(f, s, WIRE_JOB_STEP, 1, 1);

        assert_int_equal(session_check_request(other, &q, &fault), 0);
        assert_int_equal(session_check_request(s, &q, &fault), -EBUSY);
        assert_string_equal(fault.name, FAULT_BUSY);
        q.output_offset = 16384 + 16320;
        q.output_size = 128;
        assert_int_equal(session_check_request(s, &q, &fault), -EBUSY);
        q.output_offset += 64; /* right behind it */
        assert_int_equal(session_check_request(s, &q, &fault), 0);
        RUN_UNTIL(f, job_is_finished(j));
        q.output_offset = 16384;
        assert_int_equal(session_check_request(s, &q, &fault), 0);
}

static int request_open(Fake *f, sd_bus_message *m, SessionOptions *ret, Fault *fault) {
        seal(m);
        *fault = (Fault){};
        return session_request_open(m, f->m, getuid(), ret, fault);
}

static void request_open_reads_and_refuses(void **state) {
        Fake *f = *state;
        CLEANUP_FREE char *path = NULL;
        SessionOptions o = {};
        sd_bus_message *m;
        Fault fault;

        f->model->announced = true;
        assert_int_equal(model_path(f->model, &path), 0);

        m = request_new();
        ADD(m, "model", "o", path);
        ADD(m, "input-bytes", "t", UINT64_C(4097));
        ADD(m, "ranks", "u", 3u);
        ADD(m, "class", "s", "batch");
        assert_int_equal(request_open(f, m, &o, &fault), 0);
        assert_ptr_equal(o.model, f->model);
        assert_int_equal(o.input_bytes, 8192);
        assert_int_equal(o.output_bytes, 64 << 20);
        assert_int_equal(o.split.ranks, 3);
        assert_int_equal(o.split.n_shares, 0);
        assert_int_equal(o.split.kind, WIRE_PLAN_AUTO);
        assert_string_equal(o.job_class, "batch");
        (void) sd_bus_message_unref(m);

        f->model->state = MODEL_LOADING;
        m = request_new();
        ADD(m, "model", "o", path);
        assert_int_equal(request_open(f, m, &o, &fault), -EBUSY);
        assert_string_equal(fault.name, FAULT_BUSY);
        (void) sd_bus_message_unref(m);
        f->model->state = MODEL_READY;

        m = request_new();
        ADD(m, "model", "o", BUS_ROOT "/model/999");
        assert_true(request_open(f, m, &o, &fault) < 0);
        assert_string_equal(fault.name, FAULT_NOT_FOUND);
        (void) sd_bus_message_unref(m);

        m = request_new();
        assert_true(request_open(f, m, &o, &fault) < 0);
        assert_non_null(strstr(fault.text, "model"));
        (void) sd_bus_message_unref(m);

        m = request_new();
        ADD(m, "model", "o", path);
        ADD(m, "input-bytes", "t", UINT64_C(4095));
        assert_true(request_open(f, m, &o, &fault) < 0);
        assert_string_equal(fault.name, FAULT_INVALID_ARGUMENT);
        (void) sd_bus_message_unref(m);

        m = request_new();
        ADD(m, "model", "o", path);
        ADD(m, "ranks", "u", 65u);
        assert_true(request_open(f, m, &o, &fault) < 0);
        assert_string_equal(fault.name, FAULT_INVALID_ARGUMENT);
        (void) sd_bus_message_unref(m);

        m = request_new();
        ADD(m, "model", "o", path);
        ADD(m, "sparse", "s", "x");
        assert_true(request_open(f, m, &o, &fault) < 0);
        assert_string_equal(fault.name, FAULT_NOT_SUPPORTED);
        (void) sd_bus_message_unref(m);
}

static void add_shares(sd_bus_message *m, const uint32_t *shares, size_t n) {
        assert_true(sd_bus_message_open_container(m, 'e', "sv") >= 0);
        assert_true(sd_bus_message_append(m, "s", "shares") >= 0);
        assert_true(sd_bus_message_open_container(m, 'v', "au") >= 0);
        assert_true(sd_bus_message_append_array(m, 'u', shares, n * sizeof(*shares)) >= 0);
        assert_true(sd_bus_message_close_container(m) >= 0);
        assert_true(sd_bus_message_close_container(m) >= 0);
}

/* ranks: 0: not given; n: number of shares. */
static int request_split(Fake *f, const char *path, uint32_t ranks, const uint32_t *shares, size_t n, const char *plan,
        const char *exchange, uint32_t chunks, SessionOptions *ret, Fault *fault) {
        sd_bus_message *m = request_new();
        int r;

        ADD(m, "model", "o", path);
        if (ranks > 0)
                ADD(m, "ranks", "u", ranks);
        if (shares)
                add_shares(m, shares, n);
        ADD(m, "plan", "s", plan);
        ADD(m, "exchange", "s", exchange);
        ADD(m, "chunks", "u", chunks);
        r = request_open(f, m, ret, fault);
        (void) sd_bus_message_unref(m);
        return r;
}

static void request_open_split_reads_and_refuses(void **state) {
        static const uint32_t shares[] = { 100, 1, 70 }, zero[] = { 1, 0 }, large[] = { 1000001 };
        static const struct {
                uint32_t ranks;
                const uint32_t *shares;
                size_t n;
                const char *plan, *exchange;
                uint32_t chunks;
                const char *text;
        } wrong[] = {
                { 2, shares, 3, "auto", "auto", 0, "3 numbers for 2 ranks" },
                { 0, zero, 2, "auto", "auto", 0, "Share 1 is 0" },
                { 0, large, 1, "auto", "auto", 0, "1000000" },
                { 0, NULL, 0, "gather", "auto", 0, "kv-gather" },
                { 0, NULL, 0, "auto", "nccl", 0, "host" },
                { 0, NULL, 0, "auto", "auto", 33, "1 to 32" },
        };
        Fake *f = *state;
        CLEANUP_FREE char *path = NULL;
        SessionOptions o = {};
        Fault fault;

        f->model->announced = true;
        assert_int_equal(model_path(f->model, &path), 0);
        assert_int_equal(request_split(f, path, 3, shares, 3, "kv-gather", "host", 32, &o, &fault), 0);
        assert_int_equal(o.split.ranks, 3);
        assert_int_equal(o.split.n_shares, 3);
        assert_memory_equal(o.split.shares, shares, sizeof(shares));
        assert_int_equal(o.split.kind, WIRE_PLAN_KV_GATHER);
        assert_int_equal(o.split.exchange, WIRE_EXCHANGE_HOST);
        assert_int_equal(o.split.chunks, 32);

        for (size_t i = 0; i < ELEMENTSOF(wrong); i++) {
                assert_true(request_split(f, path, wrong[i].ranks, wrong[i].shares, wrong[i].n, wrong[i].plan,
                                    wrong[i].exchange, wrong[i].chunks, &o, &fault) < 0);
                assert_string_equal(fault.name, FAULT_INVALID_ARGUMENT);
                assert_non_null(strstr(fault.text, wrong[i].text));
        }

        /* Once there is a worker: not more than it has, and both numbers. */
        f->m->worker->ranks = 2;
        assert_true(request_split(f, path, 4, NULL, 0, "auto", "auto", 0, &o, &fault) < 0);
        assert_non_null(strstr(fault.text, "4 ranks, the worker has 2"));
        assert_true(request_split(f, path, 0, shares, 3, "auto", "auto", 0, &o, &fault) < 0);
        assert_non_null(strstr(fault.text, "3 ranks, the worker has 2"));
        assert_int_equal(request_split(f, path, 2, NULL, 0, "auto", "auto", 0, &o, &fault), 0);
}

static int try_session(Fake *f, uint64_t bytes, Opened *opened, Fault *fault) {
        SessionOptions o = {
                .model = f->model, .input_bytes = bytes, .output_bytes = bytes, .job_class = "normal"
        };

        *fault = (Fault){};
        return session_new(f->m, f->peer, &o, fake_on_opened, opened, fault);
}

static void session_new_limits_leave_state_as_it_was(void **state) {
        Fake *f = *state;
        Opened opened = {};
        Fault fault;

        f->m->config->arena_bytes_per_user = 3 * ARENA_BYTES;
        (void) fake_session(f, 0);
        assert_int_equal(try_session(f, ARENA_BYTES, &opened, &fault), -EDQUOT);
        assert_string_equal(fault.name, FAULT_LIMIT);
        assert_int_equal(f->m->arena_bytes, 2 * ARENA_BYTES);

        f->m->config->arena_bytes_per_user = UINT64_MAX;
        f->m->config->sessions_per_user = 1;
        assert_int_equal(try_session(f, ARENA_BYTES, &opened, &fault), -EDQUOT);
        assert_string_equal(fault.name, FAULT_LIMIT);

        f->m->config->sessions_per_user = 64;
        assert_int_equal(try_session(f, UINT64_C(1) << 50, &opened, &fault), -ENOMEM);
        assert_string_equal(fault.name, FAULT_DOES_NOT_FIT);
        assert_int_equal(try_session(f, UINT64_C(1) << 63, &opened, &fault), -EOVERFLOW);
        assert_int_equal(f->m->arena_bytes, 2 * ARENA_BYTES);
        assert_int_equal(f->model->n_users, 1);
        assert_int_equal(opened.calls, 0);
}

/* Memory that a running load was promised is not free, though nobody has it yet. */
static void session_new_counts_what_loads_were_promised(void **state) {
        Fake *f = *state;
        Load load = {.promised = 64 * ARENA_BYTES};
        Opened opened = {};
        Fault fault;

        f->m->config->cache_ram_max = 65 * ARENA_BYTES;
        f->m->config->cache_ram_reserve = 0;
        TAILQ_INSERT_TAIL(&f->m->store->loads, &load, entry);
        assert_int_equal(try_session(f, ARENA_BYTES, &opened, &fault), -ENOMEM);
        assert_string_equal(fault.name, FAULT_DOES_NOT_FIT);
        load.promised = 63 * ARENA_BYTES;
        assert_int_equal(try_session(f, ARENA_BYTES, &opened, &fault), 0);
        TAILQ_REMOVE(&f->m->store->loads, &load, entry);
        while (opened.calls == 0)
                assert_true(sd_event_run(f->m->event, 1000000) >= 0);
}

static void session_new_owner_leaves_while_it_opens(void **state) {
        Fake *f = *state;
        Opened opened = {};
        Fault fault;

        assert_int_equal(try_session(f, ARENA_BYTES, &opened, &fault), 0);
        peer_gone(STEAL_PTR(f->peer));
        assert_int_equal(opened.calls, 0);
        RUN_UNTIL(f, opened.calls);
        assert_null(opened.session);
        assert_string_equal(opened.fault.name, FAULT_CANCELLED);
        assert_true(TAILQ_EMPTY(&f->m->sessions));
        assert_int_equal(f->m->arena_bytes, 0);
        assert_int_equal(f->model->n_users, 0);
        f->peer = fake_peer_new(f);
}

static void session_arenas_are_sealed_and_output_map_is_read_only(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, 0);
        int output;

        assert_int_equal(memfd_check(s->input_fd, ARENA_BYTES), 0);
        assert_int_equal(memfd_check(s->output_fd, ARENA_BYTES), 0);
        assert_int_equal(memfd_reopen_read_only(s->output_fd, &output), 0);
        assert_true(mmap(NULL, ARENA_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, output, 0) == MAP_FAILED);
        assert_int_equal(mprotect(s->output_map, ARENA_BYTES, PROT_READ), 0);
        (void) close(output);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

static int setup(void **state) {
        int r = fake_setup(state);

        fake_bus_start(*state, &bus);
        return r;
}

static int teardown(void **state) {
        fake_bus_stop(&bus);
        return fake_teardown(state);
}

int main(void) {
        const struct CMUnitTest tests[] = {
                TEST(request_step_all_keys_are_taken),
                TEST(request_step_bad_input_is_named),
                TEST(request_tensor_bad_place_or_type_is_named),
                TEST(request_sample_defaults_and_keys),
                TEST(request_sample_resume_keys),
                TEST(request_sample_bad_input_is_named),
                TEST(request_overlap_with_unfinished_job_is_busy),
                TEST(request_open_reads_and_refuses),
                TEST(request_open_split_reads_and_refuses),
                TEST(session_new_limits_leave_state_as_it_was),
                TEST(session_new_counts_what_loads_were_promised),
                TEST(session_new_owner_leaves_while_it_opens),
                TEST(session_arenas_are_sealed_and_output_map_is_read_only),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
