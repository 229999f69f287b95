/* SPDX-License-Identifier: Apache-2.0 */
/* The keys of Tokenize, Encode, EncodeMedia and Decode. */
#include "tests/unit/latentd/fake-request.h"

#include "service/latentd/session-request.h"

typedef int (*Reader)(sd_bus_message *message, const Session *s, uint32_t flags, WireJobOpen *ret, Fault *f);

/* A request with one tensor. */
static sd_bus_message *with(const char *key, uint64_t offset, const char *type, size_t n, const uint64_t *shape) {
        sd_bus_message *m = request_new();

        add_tensor(m, key, offset, type, n, shape);
        return m;
}

static WireJobOpen expect(Reader read, sd_bus_message *m, const Session *s, const char *name, const char *word) {
        WireJobOpen q = { .steps = 77 };
        Fault f = {};
        int r;

        seal(m);
        r = read(m, s, 0, &q, &f);
        if (name) {
                assert_true(r < 0);
                assert_string_equal(f.name, name);
                if (!strstr(f.text, word))
                        fail_msg("\"%s\" does not name \"%s\"", f.text, word);
                assert_int_equal(q.steps, 77); /* untouched */
        } else if (r < 0)
                fail_msg("%s: %s", f.name, f.text);
        (void) sd_bus_message_unref(m);
        return q;
}

#define OK(read, m, s) expect(read, m, s, NULL, NULL)
#define ARGUMENT(read, m, s, word) (void) expect(read, m, s, FAULT_INVALID_ARGUMENT, word)
#define TENSOR(read, m, s, word) (void) expect(read, m, s, FAULT_INVALID_TENSOR, word)

static const struct {
        const char *name;
        Reader read;
        const char *needs; /* "": it is of this kind */
} methods[] = {
        { "Step", session_request_step, "a denoiser" },
        { "Sample", session_request_sample, "a denoiser" },
        { "Tokenize", session_request_tokenize, "a conditioner" },
        { "Encode", session_request_encode, "a conditioner" },
        { "EncodeMedia", session_request_encode_media, "a video-vae or audio-vae" },
        { "Decode", session_request_decode, "a video-vae or audio-vae" },
};

static void request_of_another_kind_of_model_is_refused_in_words(void **state) {
        Fake *f = *state;
        Model *models[] = { f->model, f->conditioner, f->vae, f->audio_vae };
        static const char *const kinds[] = { "denoiser", "conditioner", "video-vae", "audio-vae" };

        for (size_t i = 0; i < ELEMENTSOF(models); i++) {
                Session *s = fake_session_on(f, models[i], 0);

                for (size_t k = 0; k < ELEMENTSOF(methods); k++) {
                        char text[200];

                        if (strstr(methods[k].needs, kinds[i]))
                                continue;
                        (void) snprintf(text, sizeof(text), "model is of kind \"%s\", %s needs %s", kinds[i], methods[k].name,
                                methods[k].needs);
                        ARGUMENT(methods[k].read, request_new(), s, text);
                }
                session_close(s);
        }
}

/* Every key of every method with every other basic type. */
static void request_every_wrong_type_is_named(void **state) {
        Fake *f = *state;
        static const struct {
                Reader read;
                int model; /* 0: conditioner, 1: vae */
                const char *key, *type;
        } keys[] = {
                { session_request_tokenize, 0, "text", "(tsat)" },
                { session_request_tokenize, 0, "output-offset", "t" },
                { session_request_tokenize, 0, "output-bytes", "t" },
                { session_request_encode, 0, "text", "(tsat)" },
                { session_request_encode, 0, "pictures", "aa{sv}" },
                { session_request_encode, 0, "picture-rule", "s" },
                { session_request_encode, 0, "type", "s" },
                { session_request_encode, 0, "compute", "s" },
                { session_request_encode, 0, "output-offset", "t" },
                { session_request_encode, 0, "output-bytes", "t" },
                { session_request_encode_media, 1, "video", "(tsat)" },
                { session_request_encode_media, 1, "audio", "(tsat)" },
                { session_request_encode_media, 1, "posterior", "s" },
                { session_request_encode_media, 1, "seed", "t" },
                { session_request_encode_media, 1, "output-offset", "t" },
                { session_request_encode_media, 1, "output-bytes", "t" },
                { session_request_decode, 1, "video", "(tsat)" },
                { session_request_decode, 1, "audio", "(tsat)" },
                { session_request_decode, 1, "type", "s" },
                { session_request_decode, 1, "frames", "t" },
                { session_request_decode, 1, "compute", "s" },
                { session_request_decode, 1, "output-offset", "t" },
                { session_request_decode, 1, "output-bytes", "t" },
        };
        static const char *const types[] = { "y", "b", "n", "q", "i", "u", "x", "t", "d", "s", "o", "g" };
        Session *sessions[] = { fake_session_on(f, f->conditioner, 0), fake_session_on(f, f->vae, 0) };

        for (size_t i = 0; i < ELEMENTSOF(keys); i++)
                for (size_t k = 0; k < ELEMENTSOF(types); k++) {
                        sd_bus_message *m;
                        char text[64];

                        if (strcmp(types[k], keys[i].type) == 0)
                                continue;
                        m = request_new();
                        if (strcmp(types[k], "s") == 0 || strcmp(types[k], "o") == 0 || strcmp(types[k], "g") == 0)
                                ADD(m, keys[i].key, types[k], types[k][0] == 'o' ? "/x" : "u");
                        else if (types[k][0] == 'd')
                                ADD(m, keys[i].key, types[k], 1.0);
                        else if (types[k][0] == 'x' || types[k][0] == 't')
                                ADD(m, keys[i].key, types[k], UINT64_C(1));
                        else
                                ADD(m, keys[i].key, types[k], 1);
                        (void) snprintf(text, sizeof(text), "Key \"%s\" has type \"%s\"", keys[i].key, types[k]);
                        ARGUMENT(keys[i].read, m, sessions[keys[i].model], text);
                }

        for (size_t k = 2; k < ELEMENTSOF(methods); k++) {
                sd_bus_message *m = request_new();

                ADD(m, "prompt", "s", "a cat");
                ARGUMENT(methods[k].read, m, sessions[k >= 4], "Unknown key \"prompt\"");
        }
}

static void request_tokenize_reads_text(void **state) {
        Fake *f = *state;
        Session *s = fake_session_on(f, f->conditioner, 0);
        sd_bus_message *m = with("text", 7, "U8", SHAPE(100));
        WireJobOpen q;

        ADD(m, "output-offset", "t", UINT64_C(64));
        q = OK(session_request_tokenize, m, s);
        assert_int_equal(q.kind, WIRE_JOB_TOKENIZE);
        assert_int_equal(q.text.offset, 7);
        assert_int_equal(q.text.size, 100);
        assert_int_equal(q.output_offset, 64);
        assert_int_equal(q.output_size, ARENA_BYTES - 64);
        assert_int_equal(q.compute, WIRE_COMPUTE_AUTO);

        q = OK(session_request_tokenize, request_new(), s); /* the empty text */
        assert_int_equal(q.text.size, 0);

        TENSOR(session_request_tokenize, with("text", 0, "I8", SHAPE(100)), s, "\"text\" is I8 [100], expected U8 [bytes]");
        TENSOR(session_request_tokenize, with("text", 0, "U8", SHAPE(10, 10)), s, "U8 [bytes]");
        TENSOR(session_request_tokenize, with("text", ARENA_BYTES - 99, "U8", SHAPE(100)), s, "outside the input arena");
        TENSOR(session_request_tokenize, with("text", UINT64_MAX, "U8", SHAPE(100)), s, "outside the input arena");
        TENSOR(session_request_tokenize, with("text", 0, "U8", SHAPE(WIRE_TEXT_BYTES_MAX + 1)), s, "at most 4194304");
        m = request_new();
        ADD(m, "output-offset", "t", UINT64_C(8));
        ARGUMENT(session_request_tokenize, m, s, "multiple of 64");
}

static void open_pictures(sd_bus_message *m) {
        assert_true(sd_bus_message_open_container(m, 'e', "sv") >= 0);
        assert_true(sd_bus_message_append(m, "s", "pictures") >= 0);
        assert_true(sd_bus_message_open_container(m, 'v', "aa{sv}") >= 0);
        assert_true(sd_bus_message_open_container(m, 'a', "a{sv}") >= 0);
}

static void close_containers(sd_bus_message *m, int n) {
        while (n-- > 0)
                assert_true(sd_bus_message_close_container(m) >= 0);
}

/* Adds one; shape with n 0: no picture. sound: -1: not given. */
static void add_picture(sd_bus_message *m, const char *kind, uint64_t offset, const char *type, size_t n,
        const uint64_t *shape, int sound) {
        assert_true(sd_bus_message_open_container(m, 'a', "{sv}") >= 0);
        if (kind)
                ADD(m, "kind", "s", kind);
        if (n > 0)
                add_tensor(m, "picture", offset, type, n, shape);
        if (sound >= 0)
                ADD(m, "sound", "b", sound);
        close_containers(m, 1);
}

/* A good one, then this one. */
static sd_bus_message *second(const char *kind, uint64_t offset, const char *type, size_t n, const uint64_t *shape, int sound) {
        sd_bus_message *m = request_new();

        open_pictures(m);
        add_picture(m, "image", 1, "U8", SHAPE(2, 2, 3), -1);
        add_picture(m, kind, offset, type, n, shape, sound);
        close_containers(m, 3);
        return m;
}

static void request_encode_reads_pictures_in_order(void **state) {
        Fake *f = *state;
        Session *s = fake_session_on(f, f->conditioner, 0);
        sd_bus_message *m = with("text", 3, "U8", SHAPE(5));
        WireJobOpen q;

        open_pictures(m);
        add_picture(m, "video", 101, "U8", SHAPE(13, 5, 7, 3), 1);
        add_picture(m, "audio", 0, "U8", 0, NULL, -1);
        add_picture(m, "image", 33, "U8", SHAPE(4, 6, 3), -1);
        add_picture(m, "video", 101, "U8", SHAPE(13, 5, 7, 3), 0);
        close_containers(m, 3);
        ADD(m, "picture-rule", "s", "comfy");
        ADD(m, "type", "s", "f32");
        ADD(m, "compute", "s", "f32");
        q = OK(session_request_encode, m, s);
        assert_int_equal(q.kind, WIRE_JOB_ENCODE);
        assert_int_equal(q.n_conditions, 4);
        assert_int_equal(q.conditions[0].kind, WIRE_CONDITION_VIDEO);
        assert_int_equal(q.conditions[0].video_offset, 101);
        assert_int_equal(q.conditions[0].frames, 13);
        assert_int_equal(q.conditions[0].height, 5);
        assert_int_equal(q.conditions[0].width, 7);
        assert_int_equal(q.conditions[0].audio, 1);
        assert_int_equal(q.conditions[1].kind, WIRE_CONDITION_AUDIO);
        assert_int_equal(q.conditions[1].frames, 0);
        assert_int_equal(q.conditions[1].audio, 1);
        assert_int_equal(q.conditions[2].kind, WIRE_CONDITION_IMAGE);
        assert_int_equal(q.conditions[2].video_offset, 33);
        assert_int_equal(q.conditions[2].frames, 1);
        assert_int_equal(q.conditions[2].height, 4);
        assert_int_equal(q.conditions[2].width, 6);
        assert_int_equal(q.conditions[3].audio, 0);
        assert_int_equal(q.picture_rule, WIRE_PICTURE_COMFY);
        assert_int_equal(q.output_type, ST_F32);
        assert_int_equal(q.compute, WIRE_COMPUTE_F32);

        s->compute = WIRE_COMPUTE_BF16;
        q = OK(session_request_encode, request_new(), s);
        assert_int_equal(q.picture_rule, WIRE_PICTURE_REFERENCE);
        assert_int_equal(q.output_type, ST_BF16);
        assert_int_equal(q.compute, WIRE_COMPUTE_BF16);
        assert_int_equal(q.n_conditions, 0);
}

#define SECOND "\"pictures\"[1]"

static void request_encode_bad_pictures_are_named(void **state) {
        Fake *f = *state;
        Session *s = fake_session_on(f, f->conditioner, 0);
        sd_bus_message *m;

        ARGUMENT(session_request_encode, second(NULL, 0, "U8", SHAPE(2, 2, 3), -1), s, SECOND ": The key \"kind\"");
        ARGUMENT(session_request_encode, second("film", 0, "U8", SHAPE(2, 2, 3), -1), s, SECOND ": \"kind\" is \"film\"");
        ARGUMENT(session_request_encode, second("keyframe", 0, "U8", SHAPE(2, 2, 3), -1), s, "do not go together");
        ARGUMENT(session_request_encode, second("image", 0, "U8", 0, NULL, -1), s, SECOND ": The key \"picture\"");
        ARGUMENT(session_request_encode, second("video", 0, "U8", 0, NULL, 1), s, SECOND ": The key \"picture\"");
        ARGUMENT(session_request_encode, second("audio", 0, "U8", SHAPE(2, 2, 3), -1), s, SECOND ": An entry of kind \"audio\"");
        ARGUMENT(session_request_encode, second("image", 0, "U8", SHAPE(2, 2, 3), 1), s, SECOND ": \"sound\" is for");
        TENSOR(session_request_encode, second("image", 0, "F32", SHAPE(2, 2, 3), -1), s, SECOND ": \"picture\" is F32");
        TENSOR(session_request_encode, second("image", 0, "U8", SHAPE(2, 2, 4), -1), s, "U8 [H, W, 3]");
        TENSOR(session_request_encode, second("image", 0, "U8", SHAPE(1, 2, 2, 3), -1), s, "U8 [H, W, 3]");
        TENSOR(session_request_encode, second("video", 0, "U8", SHAPE(2, 2, 3), -1), s, "U8 [F, H, W, 3]");
        TENSOR(session_request_encode, second("image", ARENA_BYTES - 11, "U8", SHAPE(2, 2, 3), -1), s,
                SECOND ": \"picture\" takes 12 bytes");
        TENSOR(session_request_encode, second("image", UINT64_MAX, "U8", SHAPE(2, 2, 3), -1), s, SECOND);
        (void) OK(session_request_encode, second("image", ARENA_BYTES - 12, "U8", SHAPE(2, 2, 3), -1), s);

        m = request_new();
        ADD(m, "picture-rule", "s", "hf");
        ARGUMENT(session_request_encode, m, s, "reference or comfy");
        m = request_new();
        ADD(m, "type", "s", "f16");
        ARGUMENT(session_request_encode, m, s, "bf16 or f32");

        for (int n = 30; n <= 31; n++) {
                m = request_new();
                open_pictures(m);
                for (int i = 0; i < n; i++)
                        add_picture(m, "keyframe", 0, "U8", SHAPE(2, 2, 3), -1);
                close_containers(m, 3);
                if (n == 30)
                        (void) OK(session_request_encode, m, s);
                else
                        ARGUMENT(session_request_encode, m, s, "more than 30");
        }
}

/* What overflows when it is multiplied. */
static void check_request_overflowing_picture_is_refused(void **state) {
        Fake *f = *state;
        Session *s = fake_session_on(f, f->conditioner, 0);
        WireJobOpen q = fake_coding(WIRE_JOB_ENCODE, 0);
        Fault fault = {};

        q.n_conditions = 1;
        q.conditions[0] = (WireCondition){
                .kind = WIRE_CONDITION_VIDEO, .frames = UINT64_C(1) << 40, .height = UINT64_C(1) << 40, .width = 1 };
        assert_true(session_check_request(s, &q, &fault) < 0);
        assert_string_equal(fault.name, FAULT_INVALID_TENSOR);
}

static void request_encode_media_reads_frames_or_sound(void **state) {
        Fake *f = *state;
        Session *v = fake_session_on(f, f->vae, 0), *a = fake_session_on(f, f->audio_vae, 0);
        sd_bus_message *m = with("video", 5, "U8", SHAPE(2, 16, 32, 3));
        WireJobOpen q;

        q = OK(session_request_encode_media, m, v);
        assert_int_equal(q.kind, WIRE_JOB_ENCODE_MEDIA);
        assert_int_equal(q.video.offset, 5);
        assert_int_equal(q.posterior, WIRE_POSTERIOR_MEAN);
        assert_int_equal(q.seed, 0);
        m = with("video", 4, "F32", SHAPE(1, 16, 16, 3));
        ADD(m, "posterior", "s", "sampled");
        q = OK(session_request_encode_media, m, v);
        assert_int_equal(q.posterior, WIRE_POSTERIOR_SAMPLED);
        assert_int_equal(q.seed, 42);
        m = with("video", 0, "U8", SHAPE(1, 16, 16, 3));
        ADD(m, "posterior", "s", "sampled");
        ADD(m, "seed", "t", UINT64_MAX);
        q = OK(session_request_encode_media, m, v);
        assert_int_equal(q.seed, UINT64_MAX);
        q = OK(session_request_encode_media, with("audio", 8, "F32", SHAPE(2, 801)), a);
        assert_int_equal(q.audio.offset, 8);

        ARGUMENT(session_request_encode_media, request_new(), v, "The key \"video\"");
        ARGUMENT(session_request_encode_media, request_new(), a, "The key \"audio\"");
        ARGUMENT(session_request_encode_media, with("audio", 0, "F32", SHAPE(2, 800)), v, "model is a video-vae");
        ARGUMENT(session_request_encode_media, with("video", 0, "U8", SHAPE(1, 16, 16, 3)), a, "model is an audio-vae");
        m = with("audio", 0, "F32", SHAPE(2, 800));
        ADD(m, "posterior", "s", "mean");
        ARGUMENT(session_request_encode_media, m, a, "\"posterior\"");
        m = with("video", 0, "U8", SHAPE(1, 16, 16, 3));
        ADD(m, "seed", "t", UINT64_C(1));
        ARGUMENT(session_request_encode_media, m, v, "\"seed\" is for");
        m = with("video", 0, "U8", SHAPE(1, 16, 16, 3));
        ADD(m, "posterior", "s", "mode");
        ARGUMENT(session_request_encode_media, m, v, "mean or sampled");
        TENSOR(session_request_encode_media, with("video", 0, "U8", SHAPE(1, 17, 16, 3)), v, "height 17 and width 16");
        TENSOR(session_request_encode_media, with("video", 0, "U8", SHAPE(1, 16, 8, 3)), v, "multiples of 16");
        TENSOR(session_request_encode_media, with("video", 0, "BF16", SHAPE(1, 16, 16, 3)), v, "U8 or F32");
        TENSOR(session_request_encode_media, with("video", 0, "U8", SHAPE(1, 16, 16, 4)), v, "[F, H, W, 3]");
        TENSOR(session_request_encode_media, with("video", 2, "F32", SHAPE(1, 16, 16, 3)), v, "multiple of its element size");
        TENSOR(session_request_encode_media, with("audio", 0, "F32", SHAPE(1, 800)), a, "F32 [2, samples]");
}

static void request_decode_reads_latents(void **state) {
        Fake *f = *state;
        Session *v = fake_session_on(f, f->vae, 0), *a = fake_session_on(f, f->audio_vae, 0);
        sd_bus_message *m = with("video", 0, "F32", SHAPE(24, 7, 1, 1));
        WireJobOpen q;

        q = OK(session_request_decode, m, v);
        assert_int_equal(q.kind, WIRE_JOB_DECODE);
        assert_int_equal(q.output_type, ST_U8);
        assert_int_equal(q.ring_frames, 0);
        m = with("video", 0, "F32", SHAPE(24, 7, 1, 1));
        ADD(m, "type", "s", "f32");
        ADD(m, "frames", "t", UINT64_C(22));
        ADD(m, "compute", "s", "bf16");
        q = OK(session_request_decode, m, v);
        assert_int_equal(q.output_type, ST_F32);
        assert_int_equal(q.ring_frames, 22);
        assert_int_equal(q.compute, WIRE_COMPUTE_BF16);
        q = OK(session_request_decode, with("audio", 0, "F32", SHAPE(32, 2, 3)), a);
        assert_int_equal(q.audio.size, 768);
        assert_int_equal(q.output_type, 0);

        ARGUMENT(session_request_decode, request_new(), v, "The key \"video\"");
        ARGUMENT(session_request_decode, with("audio", 0, "F32", SHAPE(32, 2, 3)), v, "model is a video-vae");
        m = with("audio", 0, "F32", SHAPE(32, 2, 3));
        ADD(m, "frames", "t", UINT64_C(0));
        ARGUMENT(session_request_decode, m, a, "\"frames\"");
        m = with("video", 0, "F32", SHAPE(24, 7, 1, 1));
        ADD(m, "frames", "t", UINT64_MAX);
        ARGUMENT(session_request_decode, m, v, "\"frames\" is");
        m = with("video", 0, "F32", SHAPE(24, 7, 1, 1));
        ADD(m, "type", "s", "u16");
        ARGUMENT(session_request_decode, m, v, "u8 or f32");
        TENSOR(session_request_decode, with("video", 0, "F32", SHAPE(24, 7, 1)), v, "F32 [24, T, H, W]");
        TENSOR(session_request_decode, with("audio", 0, "F32", SHAPE(32, 1, 3)), a, "F32 [32, 2, A]");
}

static void submit_adds_owner(void **state) {
        Fake *f = *state;
        Session *s = fake_session_on(f, f->conditioner, 0);
        WireJobOpen q = fake_coding(WIRE_JOB_ENCODE, 0);
        Job *j;

        j = fake_submit_request(f, s, &q);
        assert_int_equal(j->request.owner, (uint64_t) getuid() + 1);
        q = fake_coding(WIRE_JOB_TOKENIZE, 1);
        j = fake_submit_request(f, s, &q);
        assert_int_equal(j->request.owner, 0);
        assert_int_equal(j->kind, JOB_TOKENIZE);
}

static void request_overlapping_output_of_unfinished_coding_is_busy(void **state) {
        Fake *f = *state;
        Session *s = fake_session_on(f, f->conditioner, 0);
        WireJobOpen q = fake_coding(WIRE_JOB_TOKENIZE, 1);
        Fault fault = {};

        (void) fake_submit_request(f, s, &q);
        assert_int_equal(session_check_request(s, &q, &fault), -EBUSY);
        assert_string_equal(fault.name, FAULT_BUSY);
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, request_setup, request_teardown)

int main(void) {
        const struct CMUnitTest tests[] = {
                TEST(request_of_another_kind_of_model_is_refused_in_words),
                TEST(request_every_wrong_type_is_named),
                TEST(request_tokenize_reads_text),
                TEST(request_encode_reads_pictures_in_order),
                TEST(request_encode_bad_pictures_are_named),
                TEST(check_request_overflowing_picture_is_refused),
                TEST(request_encode_media_reads_frames_or_sound),
                TEST(request_decode_reads_latents),
                TEST(submit_adds_owner),
                TEST(request_overlapping_output_of_unfinished_coding_is_busy),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
