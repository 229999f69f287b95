/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/unit/latentd/fake-request.h"

#include <fcntl.h>
#include <math.h>
#include <sys/stat.h>

#include "service/latentd/remains.h"
#include "service/latentd/session-request.h"
#include "service/latentd/store-internal.h"

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
        r = step ? session_request_step(m, s, 0, &q, &f) : session_request_sample(m, s, 0, &q, &f);
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
        assert_int_equal(session_request_step(m, s, 0, &q, &fault), 0);
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

/* The schedule that a step is one of. */
static void request_step_announced_schedule_is_checked(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, 0);
        sd_bus_message *m = with_sigmas("");
        Fault fault = {};
        WireJobOpen q;

        add_tensor(m, "sigmas-video", 9000, "F32", SHAPE(9));
        add_tensor(m, "sigmas-audio", 9100, "F32", SHAPE(9));
        seal(m);
        assert_int_equal(session_request_step(m, s, 0, &q, &fault), 0);
        assert_int_equal(q.kind, WIRE_JOB_STEP);
        assert_int_equal(q.schedule, WIRE_SCHEDULE_GIVEN);
        assert_int_equal(q.sigmas_video.offset, 9000);
        assert_int_equal(q.sigmas_audio.offset, 9100);
        assert_int_equal(q.sigmas_audio.size, 36);
        (void) sd_bus_message_unref(m);

        m = with_sigmas("");
        add_tensor(m, "sigmas-video", 9000, "F32", SHAPE(9));
        expect(true, m, s, FAULT_INVALID_ARGUMENT, "\"sigmas-audio\" is missing");
        m = with_sigmas("");
        add_tensor(m, "sigmas-audio", 9000, "F32", SHAPE(9));
        expect(true, m, s, FAULT_INVALID_ARGUMENT, "\"sigmas-video\" is missing");
        m = with_sigmas("");
        add_tensor(m, "sigmas-video", 9000, "F32", SHAPE(9));
        add_tensor(m, "sigmas-audio", 9100, "F32", SHAPE(8));
        expect(true, m, s, FAULT_INVALID_TENSOR, "9 and 8 values");
        for (uint64_t n = 1; n <= 1002; n += 1001) {
                m = with_sigmas("");
                add_tensor(m, "sigmas-video", 0, "F32", SHAPE(n));
                add_tensor(m, "sigmas-audio", 0, "F32", SHAPE(n));
                expect(true, m, s, FAULT_INVALID_TENSOR, "2 to 1001");
        }
        m = with_sigmas("");
        add_tensor(m, "sigmas-video", 9000, "F64", SHAPE(9));
        add_tensor(m, "sigmas-audio", 9100, "F32", SHAPE(9));
        expect(true, m, s, FAULT_INVALID_TENSOR, "sigmas-video");
        m = with_sigmas("");
        add_tensor(m, "sigmas-video", 9000, "F32", SHAPE(9));
        add_tensor(m, "sigmas-audio", ARENA_BYTES - 32, "F32", SHAPE(9));
        expect(true, m, s, FAULT_INVALID_TENSOR, "sigmas-audio");
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
        expect(true, m, s, FAULT_INVALID_TENSOR, "F32 [24, 1, 1]");
        m = with_sigmas("video");
        add_tensor(m, "video", 0, "F32", SHAPE(25, 1, 1, 1));
        expect(true, m, s, FAULT_INVALID_TENSOR, "F32 [24, T, H, W]");
        m = with_sigmas("audio");
        add_tensor(m, "audio", 0, "F32", SHAPE(32, 1, 1));
        expect(true, m, s, FAULT_INVALID_TENSOR, "F32 [32, 2, A]");
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
        assert_int_equal(session_request_sample(m, s, 0, &q, &fault), 0);
        assert_int_equal(q.kind, WIRE_JOB_SAMPLE);
        assert_int_equal(q.steps, 4);
        assert_int_equal(q.schedule, WIRE_SCHEDULE_SIMPLE);
        assert_int_equal(q.compute, WIRE_COMPUTE_BF16);
        assert_int_equal(q.flags, 0);
        assert_true(q.shift_video == 12.0f && q.shift_audio == 3.0f);
        assert_int_equal(q.output_size, ARENA_BYTES);
        (void) sd_bus_message_unref(m);

        s->model->info.shift_video = 6.0f; /* what a checkpoint says of itself */
        m = with_steps("");
        seal(m);
        assert_int_equal(session_request_sample(m, s, 0, &q, &fault), 0);
        assert_true(q.shift_video == 6.0f && q.shift_audio == 3.0f);
        (void) sd_bus_message_unref(m);

        m = with_steps("");
        ADD(m, "keep-steps", "b", 1);
        ADD(m, "schedule", "s", "reference");
        ADD(m, "shift-video", "d", 7.5);
        seal(m);
        assert_int_equal(session_request_sample(m, s, 0, &q, &fault), 0);
        assert_int_equal(q.flags, WIRE_JOB_KEEP_STEPS);
        assert_int_equal(q.schedule, WIRE_SCHEDULE_REFERENCE);
        assert_true(q.shift_video == 7.5f);
        (void) sd_bus_message_unref(m);

        m = with_steps(""); /* sigmas win over steps */
        add_tensor(m, "sigmas-video", 9000, "F32", SHAPE(9));
        add_tensor(m, "sigmas-audio", 9100, "F32", SHAPE(9));
        seal(m);
        assert_int_equal(session_request_sample(m, s, 0, &q, &fault), 0);
        assert_int_equal(q.schedule, WIRE_SCHEDULE_GIVEN);
        assert_int_equal(q.steps, 0);
        (void) sd_bus_message_unref(m);
}

/* What another run of the service began. A slot of these latents has 128 + 256 bytes. */
static void request_sample_resume_keys(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, 0);
        sd_bus_message *m = with_steps("");
        Fault fault = {};
        WireJobOpen q;

        ADD(m, "keep-steps", "b", 1);
        ADD(m, "resume-step", "u", 3);
        ADD(m, "numerics", "s", "cpu-1");
        add_tensor(m, "resume-slot", 8192, "U8", SHAPE(384));
        add_tensor(m, "kept-slots", 4096, "U8", SHAPE(3, 384));
        seal(m);
        assert_int_equal(session_request_sample(m, s, 0, &q, &fault), 0);
        assert_int_equal(q.start_step, 3);
        assert_string_equal(q.numerics, "cpu-1");
        assert_int_equal(q.slot.size, 384);
        assert_int_equal(q.slot.offset, 8192);
        assert_int_equal(q.kept.size, 3 * 384);
        assert_int_equal(q.kept.offset, 4096);
        (void) sd_bus_message_unref(m);

        m = with_steps(""); /* of 4 steps */
        ADD(m, "resume-step", "u", 4);
        add_tensor(m, "resume-slot", 0, "U8", SHAPE(384));
        expect(false, m, s, FAULT_INVALID_ARGUMENT, "resume-step");
        m = with_steps("");
        ADD(m, "resume-step", "u", 1);
        expect(false, m, s, FAULT_INVALID_ARGUMENT, "resume-slot");
        m = with_steps("");
        add_tensor(m, "resume-slot", 0, "U8", SHAPE(384));
        expect(false, m, s, FAULT_INVALID_ARGUMENT, "resume-step");
        m = with_steps("");
        ADD(m, "numerics", "s", "cpu-1");
        expect(false, m, s, FAULT_INVALID_ARGUMENT, "resume-step");
        m = with_steps("");
        ADD(m, "resume-step", "u", 1);
        add_tensor(m, "resume-slot", 0, "U8", SHAPE(384));
        ADD(m, "numerics", "s",
                "0123456789012345678901234567890123456789012345678901234567890123456789012345678901234567890123456789"
                "0123456789012345678901234567");
        expect(false, m, s, FAULT_INVALID_ARGUMENT, "128 bytes");
        m = with_steps("");
        ADD(m, "resume-step", "u", 1);
        ADD(m, "keep-steps", "b", 1);
        add_tensor(m, "resume-slot", 0, "U8", SHAPE(384));
        expect(false, m, s, FAULT_INVALID_ARGUMENT, "kept-slots");
        m = with_steps("");
        ADD(m, "resume-step", "u", 1);
        add_tensor(m, "resume-slot", 0, "U8", SHAPE(384));
        add_tensor(m, "kept-slots", 4096, "U8", SHAPE(1, 384));
        expect(false, m, s, FAULT_INVALID_ARGUMENT, "keep-steps");
        m = with_steps("");
        ADD(m, "resume-step", "u", 2);
        ADD(m, "keep-steps", "b", 1);
        add_tensor(m, "resume-slot", 0, "U8", SHAPE(384));
        add_tensor(m, "kept-slots", 4096, "U8", SHAPE(3, 384));
        expect(false, m, s, FAULT_INVALID_TENSOR, "U8 [2, 384]");
        m = with_steps("");
        ADD(m, "resume-step", "u", 1);
        add_tensor(m, "resume-slot", ARENA_BYTES - 383, "U8", SHAPE(384));
        expect(false, m, s, FAULT_INVALID_TENSOR, "resume-slot");
}

/* The XML's numbers: 384, + 2 x 256 + 128, + 256 + 128. */
static void request_sample_slot_is_that_of_its_sampler(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, 0);
        static const struct {
                const char *sampler;
                uint64_t bytes;
        } table[] = { { "euler", 384 }, { "res_multistep", 1024 }, { "res_multistep_perstream", 768 } };

        for (size_t i = 0; i < ELEMENTSOF(table); i++)
                for (size_t k = 0; k < ELEMENTSOF(table); k++) {
                        sd_bus_message *m = with_steps("");

                        ADD(m, "sampler", "s", table[i].sampler);
                        ADD(m, "resume-step", "u", 1);
                        add_tensor(m, "resume-slot", 0, "U8", SHAPE(table[k].bytes));
                        expect(false, m, s, i == k ? NULL : FAULT_INVALID_TENSOR, "resume-slot");
                }
}

static void open_condition(sd_bus_message *m) {
        assert_true(sd_bus_message_open_container(m, 'a', "{sv}") >= 0);
}

static void open_conditions(sd_bus_message *m) {
        assert_true(sd_bus_message_open_container(m, 'e', "sv") >= 0);
        assert_true(sd_bus_message_append(m, "s", "conditions") >= 0);
        assert_true(sd_bus_message_open_container(m, 'v', "aa{sv}") >= 0);
        assert_true(sd_bus_message_open_container(m, 'a', "a{sv}") >= 0);
}

static void close_containers(sd_bus_message *m, int n) {
        while (n-- > 0)
                assert_true(sd_bus_message_close_container(m) >= 0);
}

/* A good picture, then the one that the caller fills and closes with finish_condition(). */
static sd_bus_message *second_condition(const char *kind) {
        sd_bus_message *m = with_sigmas("");

        open_conditions(m);
        open_condition(m);
        ADD(m, "kind", "s", "image");
        add_tensor(m, "video", 0, "F32", SHAPE(24, 1, 2, 3));
        close_containers(m, 1);
        open_condition(m);
        if (kind)
                ADD(m, "kind", "s", kind);
        return m;
}

static sd_bus_message *finish_condition(sd_bus_message *m) {
        close_containers(m, 4);
        return m;
}

#define SECOND "\"conditions\"[1]"

static void request_conditions_are_taken_in_order(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, 0);
        sd_bus_message *m = second_condition("keyframe");
        Fault fault = {};
        WireJobOpen q;

        ADD(m, "frame", "u", 17u);
        add_tensor(m, "video", 1024, "F32", SHAPE(24, 2, 1, 1));
        add_tensor(m, "audio", 2048, "F32", SHAPE(32, 2, 5));
        close_containers(m, 1);
        open_condition(m);
        ADD(m, "kind", "s", "audio");
        add_tensor(m, "audio", 4096, "F32", SHAPE(32, 2, 7));
        close_containers(m, 1);
        open_condition(m);
        ADD(m, "kind", "s", "video");
        add_tensor(m, "video", 8192, "F32", SHAPE(24, 3, 4, 5));
        (void) finish_condition(m);
        ADD(m, "condition-noise", "s", "official");
        ADD(m, "seed", "t", UINT64_C(0x123456789a));
        seal(m);
        assert_int_equal(session_request_step(m, s, 0, &q, &fault), 0);
        assert_int_equal(q.n_conditions, 4);
        assert_int_equal(q.conditions[0].kind, WIRE_CONDITION_IMAGE);
        assert_int_equal(q.conditions[0].frames, 1);
        assert_int_equal(q.conditions[0].height, 2);
        assert_int_equal(q.conditions[0].width, 3);
        assert_int_equal(q.conditions[0].audio, 0);
        assert_int_equal(q.conditions[1].kind, WIRE_CONDITION_KEYFRAME);
        assert_int_equal(q.conditions[1].frame, 17);
        assert_int_equal(q.conditions[1].video_offset, 1024);
        assert_int_equal(q.conditions[1].frames, 2);
        assert_int_equal(q.conditions[1].audio_offset, 2048);
        assert_int_equal(q.conditions[1].audio, 5);
        assert_int_equal(q.conditions[2].kind, WIRE_CONDITION_AUDIO);
        assert_int_equal(q.conditions[2].frames, 0);
        assert_int_equal(q.conditions[2].audio, 7);
        assert_int_equal(q.conditions[3].kind, WIRE_CONDITION_VIDEO);
        assert_int_equal(q.conditions[3].width, 5);
        assert_int_equal(q.condition_noise, WIRE_NOISE_OFFICIAL);
        assert_int_equal(q.noise, WIRE_NOISE_GIVEN);
        assert_int_equal(q.seed, UINT64_C(0x123456789a));
        (void) sd_bus_message_unref(m);
}

static void request_conditions_bad_ones_are_named(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, 0);
        sd_bus_message *m;

        expect(true, finish_condition(second_condition(NULL)), s, FAULT_INVALID_ARGUMENT, SECOND);
        expect(true, finish_condition(second_condition("film")), s, FAULT_INVALID_ARGUMENT,
                SECOND ": \"kind\" is \"film\", expected keyframe, image, video or audio");
        expect(true, finish_condition(second_condition("keyframe")), s, FAULT_INVALID_ARGUMENT, SECOND);
        expect(true, finish_condition(second_condition("image")), s, FAULT_INVALID_ARGUMENT, "\"video\"");
        expect(true, finish_condition(second_condition("video")), s, FAULT_INVALID_ARGUMENT, "\"video\"");
        expect(true, finish_condition(second_condition("audio")), s, FAULT_INVALID_ARGUMENT, "\"audio\"");

        m = second_condition("image");
        ADD(m, "strength", "d", 1.0);
        expect(true, finish_condition(m), s, FAULT_INVALID_ARGUMENT, SECOND ": Unknown key \"strength\"");
        m = second_condition("keyframe");
        ADD(m, "frame", "t", UINT64_C(1));
        expect(true, finish_condition(m), s, FAULT_INVALID_ARGUMENT, SECOND ": Key \"frame\" has type \"t\"");
        m = second_condition("image");
        ADD(m, "frame", "u", 1u);
        expect(true, finish_condition(m), s, FAULT_INVALID_ARGUMENT, "\"frame\"");
        m = second_condition("image");
        add_tensor(m, "audio", 0, "F32", SHAPE(32, 2, 1));
        expect(true, finish_condition(m), s, FAULT_INVALID_ARGUMENT, "\"audio\"");
        m = second_condition("audio");
        add_tensor(m, "video", 0, "F32", SHAPE(24, 1, 1, 1));
        expect(true, finish_condition(m), s, FAULT_INVALID_ARGUMENT, "\"video\"");
        m = second_condition("image");
        add_tensor(m, "video", 0, "F32", SHAPE(24, 2, 1, 1));
        expect(true, finish_condition(m), s, FAULT_INVALID_TENSOR, "F32 [24, 1, H, W]");
        m = second_condition("video");
        add_tensor(m, "video", 0, "F32", SHAPE(16, 2, 1, 1));
        expect(true, finish_condition(m), s, FAULT_INVALID_TENSOR, SECOND ": \"video\" is F32 [16, 2, 1, 1]");
        m = second_condition("audio");
        add_tensor(m, "audio", 0, "BF16", SHAPE(32, 2, 1));
        expect(true, finish_condition(m), s, FAULT_INVALID_TENSOR, SECOND ": \"audio\" is BF16");
        m = second_condition("keyframe");
        add_tensor(m, "video", 0, "F32", SHAPE(24, 1, 1, 2));
        expect(true, finish_condition(m), s, FAULT_INVALID_TENSOR, SECOND ": the keyframe's");
        m = second_condition("image");
        add_tensor(m, "video", ARENA_BYTES - 92, "F32", SHAPE(24, 1, 1, 1));
        expect(true, finish_condition(m), s, FAULT_INVALID_TENSOR, SECOND ": \"video\" takes 96 bytes");
        m = second_condition("image");
        add_tensor(m, "video", 2, "F32", SHAPE(24, 1, 1, 1));
        expect(true, finish_condition(m), s, FAULT_INVALID_TENSOR, SECOND ": \"video\" starts at 2");
        m = second_condition("audio");
        add_tensor(m, "audio", UINT64_MAX - 3, "F32", SHAPE(32, 2, 1));
        expect(true, finish_condition(m), s, FAULT_INVALID_TENSOR, SECOND ": \"audio\" takes");
        m = second_condition("image");
        add_tensor(m, "video", ARENA_BYTES - 96, "F32", SHAPE(24, 1, 1, 1));
        expect(true, finish_condition(m), s, NULL, NULL); /* just fits */
}

static void request_conditions_at_most_30(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, 0);

        for (int n = 30; n <= 31; n++) {
                sd_bus_message *m = with_sigmas("");

                open_conditions(m);
                for (int i = 0; i < n; i++) {
                        open_condition(m);
                        ADD(m, "kind", "s", "audio");
                        add_tensor(m, "audio", 0, "F32", SHAPE(32, 2, 1));
                        close_containers(m, 1);
                }
                close_containers(m, 3);
                expect(true, m, s, n == 30 ? NULL : FAULT_INVALID_ARGUMENT, "30");
        }
}

/* Sizes are computed again from what is on the wire. */
static void check_request_overflowing_condition_is_refused(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, 0);
        WireJobOpen q = fake_request(WIRE_JOB_STEP, 1, 0);
        Fault fault = {};

        q.n_conditions = 1;
        q.conditions[0] = (WireCondition){ .frames = UINT64_C(1) << 32, .height = UINT64_C(1) << 32, .width = 1 };
        assert_int_equal(session_check_request(s, &q, &fault), -EINVAL);
        assert_string_equal(fault.name, FAULT_INVALID_TENSOR);
        q.conditions[0] = (WireCondition){ .audio = UINT64_C(1) << 56 };
        fault = (Fault){};
        assert_int_equal(session_check_request(s, &q, &fault), -EINVAL);
        assert_non_null(strstr(fault.text, "\"conditions\"[0]: \"audio\""));
        q.conditions[0] = (WireCondition){ .audio = 256, .audio_offset = 0 };
        assert_int_equal(session_check_request(s, &q, &fault), 0);
        q.conditions[0].audio_offset = 4;
        assert_int_equal(session_check_request(s, &q, &fault), -EINVAL);
}

static void request_noise_needs_seed_and_what_it_is_for(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, 0);
        static const char *const noises[] = { "given", "comfy", "diffusers" };
        Fault fault = {};
        sd_bus_message *m;
        WireJobOpen q;

        for (uint32_t i = 0; i < ELEMENTSOF(noises); i++) {
                m = with_steps("");
                ADD(m, "noise", "s", noises[i]);
                expect(false, m, s, i == 0 ? NULL : FAULT_INVALID_ARGUMENT, "\"seed\"");

                m = with_steps("");
                ADD(m, "noise", "s", noises[i]);
                ADD(m, "seed", "t", UINT64_C(7));
                if (i == 0) {
                        expect(false, m, s, FAULT_INVALID_ARGUMENT, "\"seed\"");
                        continue;
                }
                seal(m);
                assert_int_equal(session_request_sample(m, s, 0, &q, &fault), 0);
                assert_int_equal(q.noise, i);
                assert_int_equal(q.seed, 7);
                (void) sd_bus_message_unref(m);
        }

        m = with_steps("");
        ADD(m, "noise", "s", "official"); /* of conditions only */
        expect(false, m, s, FAULT_INVALID_ARGUMENT, "given, comfy or diffusers");
        m = with_sigmas("");
        ADD(m, "seed", "t", UINT64_C(7));
        expect(true, m, s, FAULT_INVALID_ARGUMENT, "condition-noise");
        m = with_sigmas("");
        ADD(m, "condition-noise", "s", "comfy");
        ADD(m, "seed", "t", UINT64_C(7));
        expect(true, m, s, FAULT_INVALID_ARGUMENT, "no \"conditions\"");
        m = second_condition("audio");
        add_tensor(m, "audio", 0, "F32", SHAPE(32, 2, 1));
        (void) finish_condition(m);
        ADD(m, "condition-noise", "s", "comfy");
        expect(true, m, s, FAULT_INVALID_ARGUMENT, "\"seed\"");
        m = with_sigmas("");
        ADD(m, "condition-noise", "s", "white");
        expect(true, m, s, FAULT_INVALID_ARGUMENT, "given, comfy, diffusers or official");
}

static void request_masks_and_what_they_keep(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, 0);
        Fault fault = {};
        sd_bus_message *m;
        WireJobOpen q;

        m = with_sigmas("");
        add_tensor(m, "mask-video", 8192, "F32", SHAPE(1, 1, 1));
        add_tensor(m, "mask-audio", 8196, "F32", SHAPE(2, 1));
        seal(m);
        assert_int_equal(session_request_step(m, s, 0, &q, &fault), 0);
        assert_int_equal(q.mask_video.offset, 8192);
        assert_int_equal(q.mask_video.size, 4);
        assert_int_equal(q.mask_audio.size, 8);
        (void) sd_bus_message_unref(m);

        m = with_sigmas("");
        add_tensor(m, "mask-audio", 0, "F32", SHAPE(32, 2, 1));
        expect(true, m, s, NULL, NULL);
        m = with_sigmas("");
        add_tensor(m, "mask-video", 0, "F32", SHAPE(1, 1, 2));
        expect(true, m, s, FAULT_INVALID_TENSOR, "mask-video");
        m = with_sigmas("");
        add_tensor(m, "mask-video", 0, "U8", SHAPE(1, 1, 1));
        expect(true, m, s, FAULT_INVALID_TENSOR, "U8 [1, 1, 1]");
        m = with_sigmas("");
        add_tensor(m, "mask-audio", 0, "F32", SHAPE(2, 2));
        expect(true, m, s, FAULT_INVALID_TENSOR, "[2, A] or [32, 2, A]");
        m = with_sigmas("");
        add_tensor(m, "mask-audio", 0, "F32", SHAPE(31, 2, 1));
        expect(true, m, s, FAULT_INVALID_TENSOR, "mask-audio");
        m = with_sigmas("");
        add_tensor(m, "mask-video", ARENA_BYTES, "F32", SHAPE(1, 1, 1));
        expect(true, m, s, FAULT_INVALID_TENSOR, "mask-video");
        m = with_sigmas("");
        add_tensor(m, "clean-video", 0, "F32", SHAPE(24, 1, 1, 1)); /* a key of Sample */
        expect(true, m, s, FAULT_INVALID_ARGUMENT, "clean-video");

        m = with_steps("");
        add_tensor(m, "mask-video", 0, "F32", SHAPE(1, 1, 1));
        expect(false, m, s, FAULT_INVALID_ARGUMENT, "clean-video");
        m = with_steps("");
        add_tensor(m, "mask-audio", 0, "F32", SHAPE(2, 1));
        expect(false, m, s, FAULT_INVALID_ARGUMENT, "clean-audio");
        m = with_steps("");
        add_tensor(m, "clean-audio", 0, "F32", SHAPE(32, 2, 1));
        expect(false, m, s, FAULT_INVALID_ARGUMENT, "mask-audio");
        m = with_steps("");
        add_tensor(m, "mask-video", 0, "F32", SHAPE(1, 1, 1));
        add_tensor(m, "clean-video", 0, "F32", SHAPE(24, 1, 1, 2));
        expect(false, m, s, FAULT_INVALID_TENSOR, "clean-video");
        m = with_steps("");
        add_tensor(m, "mask-video", 0, "F32", SHAPE(1, 1, 1));
        add_tensor(m, "clean-video", ARENA_BYTES - 92, "F32", SHAPE(24, 1, 1, 1));
        expect(false, m, s, FAULT_INVALID_TENSOR, "clean-video");
        m = with_steps("");
        add_tensor(m, "mask-video", 0, "F32", SHAPE(1, 1, 1));
        add_tensor(m, "clean-video", 0, "F32", SHAPE(24, 1, 1, 1));
        expect(false, m, s, NULL, NULL);
        m = with_steps(""); /* video is the clean latent */
        add_tensor(m, "mask-video", 0, "F32", SHAPE(1, 1, 1));
        ADD(m, "noise", "s", "comfy");
        ADD(m, "seed", "t", UINT64_C(0));
        expect(false, m, s, NULL, NULL);
}

/* Given sigmas win over the shifts, but for the sampler that needs them. */
static void request_sample_samplers(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, 0);
        static const char *const samplers[] = { "euler", "res_multistep", "res_multistep_perstream" };
        Fault fault = {};
        WireJobOpen q;

        for (uint32_t i = 0; i < ELEMENTSOF(samplers); i++) {
                sd_bus_message *m = with_tensors("");

                ADD(m, "sampler", "s", samplers[i]);
                ADD(m, "shift-video", "d", 7.0);
                add_tensor(m, "sigmas-video", 9000, "F32", SHAPE(3));
                add_tensor(m, "sigmas-audio", 9100, "F32", SHAPE(3));
                seal(m);
                assert_int_equal(session_request_sample(m, s, 0, &q, &fault), 0);
                assert_int_equal(q.sampler, i);
                assert_true(q.shift_video == (i == WIRE_SAMPLER_RES_MULTISTEP ? 7.0f : 0.0f));
                assert_true(q.shift_audio == (i == WIRE_SAMPLER_RES_MULTISTEP ? 3.0f : 0.0f));
                (void) sd_bus_message_unref(m);
        }
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
                expect(false, m, s, FAULT_INVALID_ARGUMENT, "expected a number above 0 and at most 3.4e+38");
        }

        m = with_steps("");
        ADD(m, "sampler", "s", "heun");
        expect(false, m, s, FAULT_INVALID_ARGUMENT, "heun");
        m = with_steps("");
        ADD(m, "noise", "s", "white");
        expect(false, m, s, FAULT_INVALID_ARGUMENT, "white");
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
        q.flags = WIRE_JOB_PLAN_ONLY; /* writes nothing */
        assert_int_equal(session_check_request(s, &q, &fault), 0);
        q.flags = 0;
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

        f->model->info.kind = WIRE_MODEL_LORA;
        m = request_new();
        ADD(m, "model", "o", path);
        assert_int_equal(request_open(f, m, &o, &fault), -EINVAL);
        assert_string_equal(fault.name, FAULT_INVALID_ARGUMENT);
        assert_non_null(strstr(fault.text, "SetLoras"));
        (void) sd_bus_message_unref(m);
        f->model->info.kind = WIRE_MODEL_DENOISER;

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
        assert_string_equal(fault.name, FAULT_INVALID_ARGUMENT);
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

/* Of a worker with several devices. */
static void request_open_gpus_are_found_or_refused(void **state) {
        static const char *const uuids[] = { "GPU-a", "GPU-b", "GPU-c" };
        static const char *const addresses[] = { "0000:01:00.0", "0000:02:00.0", "0000:03:00.0" };
        static const struct {
                const char *names[5], *fault, *text;
                int result;
                uint32_t n_gpus;
        } cases[] = {
                { { "0", "1", "2" }, "", "", 0, 3 }, /* all of them is a wish, too: none is left out then */
                { { "gpu-C", "0", "0000:02:00.0" }, "", "", 0, 3 },
                { { "gpu-C", "0" }, "", "", 0, 2 },
                { { "0", "1", "0000:01:00.0" }, FAULT_INVALID_ARGUMENT, "names 0000:01:00.0 more than once", -EINVAL },
                { { "0", "3" }, FAULT_INVALID_ARGUMENT, "\"3\"", -EINVAL },
                { { "2", "" }, FAULT_INVALID_ARGUMENT, "2 (GPU-c, 0000:03:00.0)", -EINVAL },
                { { "0", "1", "2", "2" }, FAULT_INVALID_ARGUMENT, "names 4 devices, the worker has 3", -EINVAL },
                { { "1" }, "", "", 0, 1 },
                { {}, FAULT_INVALID_ARGUMENT, "names no device", -EINVAL },
        };
        Fake *f = *state;
        WireHello *h = &f->m->worker->hello, was = *h;
        CLEANUP_FREE char *path = NULL;

        assert_int_equal(model_path(f->model, &path), 0);
        (void) snprintf(h->backend, sizeof(h->backend), "cuda");
        h->n_devices = 3;
        for (size_t i = 0; i < 3; i++) {
                (void) snprintf(h->devices[i].uuid, sizeof(h->devices[i].uuid), "%s", uuids[i]);
                (void) snprintf(h->devices[i].pci_address, sizeof(h->devices[i].pci_address), "%s", addresses[i]);
        }
        f->model->announced = true;

        for (size_t i = 0; i <= ELEMENTSOF(cases); i++) {
                const bool known = i < ELEMENTSOF(cases); /* once more without a worker */
                sd_bus_message *m = request_new();
                SessionOptions o;
                Fault fault;

                if (!known)
                        h->n_devices = 0;
                ADD(m, "model", "o", path);
                assert_true(sd_bus_message_open_container(m, 'e', "sv") >= 0);
                assert_true(sd_bus_message_append(m, "s", "gpus") >= 0);
                assert_true(sd_bus_message_open_container(m, 'v', "as") >= 0);
                assert_true(sd_bus_message_append_strv(m, (char **) cases[known ? i : 0].names) >= 0);
                assert_true(sd_bus_message_close_container(m) >= 0 && sd_bus_message_close_container(m) >= 0);
                assert_int_equal(request_open(f, m, &o, &fault), known ? cases[i].result : -EBUSY);
                assert_string_equal(fault.name, known ? cases[i].fault : FAULT_BUSY);
                if (known)
                        assert_non_null(strstr(fault.text, cases[i].text));
                if (known && cases[i].result == 0)
                        assert_int_equal(o.split.n_gpus, cases[i].n_gpus);
                if (known && cases[i].n_gpus == 2)
                        assert_true(strcmp(o.split.gpus[0], addresses[2]) == 0 && strcmp(o.split.gpus[1], addresses[0]) == 0);
                (void) sd_bus_message_unref(m);
        }
        *h = was;
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
                { 0, NULL, 0, "auto", "mpi", 0, "nccl" },
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

/* What this process has computed, however busy the machine is. */
static uint64_t cpu_usec(void) {
        struct timespec t;

        assert_int_equal(clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t), 0);
        return (uint64_t) t.tv_sec * UINT64_C(1000000) + (uint64_t) t.tv_nsec / 1000u;
}

#define PIECE (UINT64_C(128) << 20)
#define LARGE (24 * PIECE) /* of both: seconds, if it was populated to its end */

/* Within a piece or two. Meanwhile its memory counts, and whoever asks for more hears that it comes back. */
static void session_closed_while_it_opens_stops_populating(void **state) {
        Fake *f = *state;
        Opened opened = {}, unused = {};
        uint64_t begin = cpu_usec(), piece;
        Fault fault;

        f->m->config->arena_bytes_per_user = 2 * LARGE;
        assert_int_equal(try_session(f, PIECE, &unused, &fault), 0);
        RUN_UNTIL(f, unused.calls);
        piece = cpu_usec() - begin;
        session_close(STEAL_PTR(unused.session));
        RUN_UNTIL(f, f->m->arena_bytes == 0);

        begin = cpu_usec();
        if (try_session(f, LARGE, &opened, &fault) == -ENOMEM)
                skip(); /* the machine has not as much */
        session_forget(TAILQ_FIRST(&f->m->sessions));
        assert_int_equal(f->m->arena_bytes, 2 * LARGE);
        assert_int_equal(try_session(f, ARENA_BYTES, &unused, &fault), -EDQUOT);
        assert_non_null(strstr(fault.text, "come back by themselves"));
        RUN_UNTIL(f, TAILQ_EMPTY(&f->m->sessions) && f->m->arena_bytes == 0);
        assert_true(cpu_usec() - begin < 8 * piece + 100000);
        unused.calls = 0;
        assert_int_equal(try_session(f, ARENA_BYTES, &unused, &fault), 0);
        RUN_UNTIL(f, unused.calls);
        session_close(unused.session);
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

/* What a client keeps counts until it lets go, by descriptor or mapping, of either arena. */
static void session_closed_arenas_count_while_a_client_has_them(void **state) {
        Fake *f = *state;
        Opened opened = {};
        Fault fault;
        void *map;

        f->m->config->arena_bytes_per_user = 2 * ARENA_BYTES;
        for (int i = 0; i < 4; i++) {
                Session *s = fake_session(f, 1);
                int fd;

                assert_int_equal(i % 2 ? memfd_reopen_read_write(s->input_fd, &fd) : memfd_reopen_read_only(s->output_fd, &fd),
                        0);
                if (i >= 2) {
                        assert_int_equal(memfd_map(fd, ARENA_BYTES, PROT_READ, &map), 0);
                        (void) close(fd);
                }
                session_close(s);
                assert_int_equal(f->m->arena_bytes, 2 * ARENA_BYTES);
                assert_int_equal(try_session(f, ARENA_BYTES / 2, &opened, &fault), -EDQUOT);
                assert_string_equal(fault.name, FAULT_LIMIT);
                assert_non_null(strstr(fault.text, "closed"));
                if (i == 3)
                        assert_true(((float *) map)[0] == 1); /* as it was */
                if (i >= 2)
                        (void) munmap(map, ARENA_BYTES);
                else
                        (void) close(fd);
                if (i == 0)
                        RUN_UNTIL(f, f->m->arena_bytes == 0); /* by the timer */
        }
        remains_collect(f->m);
        assert_int_equal(f->m->arena_bytes, 0);
        assert_true(TAILQ_EMPTY(&f->m->remains));
}

/* O_PATH keeps the object, not the pages. */
static void session_closed_pages_go_in_spite_of_a_path(void **state) {
        Fake *f = *state;
        Session *s = fake_session(f, 1);
        char name[64];
        struct stat st;
        int fd;

        (void) snprintf(name, sizeof(name), "/proc/self/fd/%d", s->input_fd);
        fd = open(name, O_PATH | O_CLOEXEC);
        assert_true(fd >= 0);
        assert_int_equal(fstat(fd, &st), 0);
        assert_true(st.st_blocks > 0);
        session_close(s);
        assert_int_equal(f->m->arena_bytes, 0);
        for (int i = 0; i < 6000 && st.st_blocks > 0; i++) {
                (void) usleep(10000);
                assert_int_equal(fstat(fd, &st), 0);
        }
        assert_int_equal(st.st_blocks, 0);
        (void) close(fd);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, request_setup, request_teardown)

int main(void) {
        const struct CMUnitTest tests[] = {
                TEST(request_step_all_keys_are_taken),
                TEST(request_step_bad_input_is_named),
                TEST(request_step_announced_schedule_is_checked),
                TEST(request_tensor_bad_place_or_type_is_named),
                TEST(request_sample_defaults_and_keys),
                TEST(request_sample_resume_keys),
                TEST(request_sample_slot_is_that_of_its_sampler),
                TEST(request_conditions_are_taken_in_order),
                TEST(request_conditions_bad_ones_are_named),
                TEST(request_conditions_at_most_30),
                TEST(check_request_overflowing_condition_is_refused),
                TEST(request_noise_needs_seed_and_what_it_is_for),
                TEST(request_masks_and_what_they_keep),
                TEST(request_sample_samplers),
                TEST(request_sample_bad_input_is_named),
                TEST(request_overlap_with_unfinished_job_is_busy),
                TEST(request_open_reads_and_refuses),
                TEST(request_open_gpus_are_found_or_refused),
                TEST(request_open_split_reads_and_refuses),
                TEST(session_new_limits_leave_state_as_it_was),
                TEST(session_new_counts_what_loads_were_promised),
                TEST(session_new_owner_leaves_while_it_opens),
                TEST(session_closed_while_it_opens_stops_populating),
                TEST(session_arenas_are_sealed_and_output_map_is_read_only),
                TEST(session_closed_arenas_count_while_a_client_has_them),
                TEST(session_closed_pages_go_in_spite_of_a_path),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
