/* SPDX-License-Identifier: Apache-2.0 */
/* The keys of Session.Tokenize, Encode, EncodeMedia and Decode. */
#include "service/latentd/session-request-internal.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "service/latentd/model.h"
#include "service/shared/cleanup.h"

#define SEED_DEFAULT 42u
#define FRAMES_MAX (UINT64_C(1) << 31) /* of a ring; what it needs at least is the worker's to say */
#define PATCH 16u /* pixels of a latent's side */

/* All that the four may have; each reads its own keys of it. */
typedef struct Coding {
        WireJobOpen q;
        RequestPictures files; /* ENCODE */
        RequestCanvas canvas;
        const char *compute, *type, *picture_rule, *posterior;
        bool text, video, audio, frames, seed, output_bytes;
} Coding;

#define OUTPUT_KEYS(c)                                                                                                \
        {"output-offset", "t", &(c)->q.output_offset}, {                                                             \
                "output-bytes", "t", &(c)->q.output_size, &(c)->output_bytes                                         \
        }
#define TEXT_KEY(c) {"text", "(tsat)", &(c)->q.text, &(c)->text}

/* What all four end with. */
static int finish(Coding *c, const Session *s, WireJobOpen *ret, Fault *f) {
        WireJobOpen *q = &c->q;
        int r;

        /* An offset behind the arena is refused by session_check_request(). */
        if (!c->output_bytes && q->output_offset < s->output_bytes)
                q->output_size = s->output_bytes - q->output_offset;

        r = session_check_request(s, q, f);
        if (r < 0)
                return r;

        *ret = *q;
        return 0;
}

static int set_compute(Coding *c, const Session *s, Fault *f) {
        c->q.compute = s->compute;
        return c->compute ? request_compute(c->compute, &c->q.compute, f) : 0;
}

int request_check_prompt(const WireTensor *text, bool seen, Fault *f) {
        const TensorRule rule = {ST_U8, 1, "U8 [bytes] of UTF-8", {}};
        int r;

        r = request_check_tensor("text", text, seen, false, &rule, f);
        if (r < 0)
                return r;

        if (text->size > WIRE_TEXT_BYTES_MAX)
                return fault_set(f, -EINVAL, FAULT_INVALID_TENSOR,
                        "\"text\" has %" PRIu64 " bytes, at most %" PRIu64 " are allowed.", text->size,
                        WIRE_TEXT_BYTES_MAX);

        return 0;
}

int session_request_tokenize(
        sd_bus_message *message, const Session *s, uint32_t flags, WireJobOpen *ret, Fault *f) {
        Coding c = {.q = {.kind = WIRE_JOB_TOKENIZE, .flags = flags}};
        const BusKey keys[] = {TEXT_KEY(&c), OUTPUT_KEYS(&c)};
        int r;

        r = bus_read_dictionary(message, keys, ELEMENTSOF(keys), f);
        if (r >= 0)
                r = session_check_kind(s, WIRE_JOB_TOKENIZE, f);
        if (r >= 0)
                r = request_check_prompt(&c.q.text, c.text, f);
        if (r < 0)
                return r;

        return finish(&c, s, ret, f);
}

/* ---- Encode ---- */

typedef struct Picture {
        const char *kind;
        WireTensor picture;
        int sound;
        bool has_picture, has_sound;
} Picture;

static int check_picture(const Picture *p, WireCondition *ret, Fault *f) {
        const TensorRule image = {ST_U8, 3, "U8 [H, W, 3]", {0, 0, 3}};
        const TensorRule video = {ST_U8, 4, "U8 [F, H, W, 3]", {0, 0, 0, 3}};
        bool is_video, is_audio;
        uint32_t kind;
        int r;

        if (!p->kind)
                return request_missing("kind", "keyframe, image, video or audio", f);

        r = request_condition_kind(p->kind, &kind, f);
        if (r < 0)
                return r;
        is_video = kind == WIRE_CONDITION_VIDEO;
        is_audio = kind == WIRE_CONDITION_AUDIO;

        if (is_audio && p->has_picture)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "An entry of kind \"audio\" has no \"picture\": leave it out.");
        if (p->has_sound && !is_video)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "\"sound\" is for entries of kind \"video\", this one is \"%s\".", p->kind);
        r = request_check_tensor("picture", &p->picture, p->has_picture, !is_audio, is_video ? &video : &image, f);
        if (r < 0)
                return r;

        *ret = (WireCondition){.kind = kind, .audio = is_audio || (is_video && p->sound)};
        if (p->has_picture) {
                const uint64_t *shape = p->picture.shape + is_video;

                ret->video_offset = p->picture.offset;
                ret->frames = is_video ? p->picture.shape[0] : 1;
                ret->height = shape[0];
                ret->width = shape[1];
        }
        return 0;
}

static int read_picture(sd_bus_message *m, void *ret, Fault *f) {
        Picture p = {};
        const BusKey keys[] = {
                {"kind", "s", &p.kind},
                {"picture", "(tsat)", &p.picture, &p.has_picture},
                {"sound", "b", &p.sound, &p.has_sound},
        };
        int r;

        r = bus_read_dictionary(m, keys, ELEMENTSOF(keys), f);
        return r < 0 ? r : check_picture(&p, ret, f);
}

/* BusKey.read: k->value is the WireJobOpen. */
static int read_pictures(sd_bus_message *m, const BusKey *k, Fault *f) {
        return request_read_wire_conditions(m, "pictures", k->value, read_picture, f);
}

/* Keyframes are of the film, references are not: the prompt is presented in one way or the other (h3.md 3.2). */
static int check_pictures(const WireJobOpen *q, Fault *f) {
        for (uint32_t i = 1; i < q->n_conditions; i++)
                if ((q->conditions[i].kind == WIRE_CONDITION_KEYFRAME) !=
                        (q->conditions[0].kind == WIRE_CONDITION_KEYFRAME))
                        return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                                "\"pictures\"[%" PRIu32
                                "]: keyframes and references (image, video, audio) do not go together.",
                                i);

        return 0;
}

static int encode_options(Coding *c, Fault *f) {
        static const char *const types[] = {"bf16", "f32"};
        uint32_t type;
        int r;

        r = request_picture_rule(c->picture_rule, &c->q.picture_rule, f);
        if (r >= 0)
                r = request_choice("type", c->type, types, ELEMENTSOF(types), &type, f);
        if (r < 0)
                return r;

        c->q.output_type = type == 0 ? ST_BF16 : ST_F32;
        return 0;
}

/* An Encode of files begins as a Render does. */
static int take_files(Coding *c, RenderOptions *ret, Fault *f) {
        const WireJobOpen *q = &c->q;
        RenderOptions o = {
                .prompt = q->text,
                .picture_rule = q->picture_rule,
                .sample.compute = q->compute,
                .encode_only = true,
                .text_type = q->output_type,
                .output_offset = q->output_offset,
                .output_size = q->output_size,
                .file = -EBADF,
                .sheet = -EBADF,
                .format = _MEDIA_FORMAT_MAX,
        };
        int r;

        if (q->n_conditions > 0)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT, "\"pictures\" and \"files\" do not go together.");
        if (!ret)
                return fault_set(f, -EOPNOTSUPP, FAULT_NOT_SUPPORTED,
                        "Plan does not read \"files\": give \"pictures\" of their size instead, whose content does not matter.");

        r = request_check_pictures(&c->files, &o, f);
        if (r >= 0)
                r = request_read_canvas(&c->canvas, &c->files, &o, f);
        if (r >= 0)
                r = request_own_pictures(&c->files, &o);
        if (r < 0) {
                render_options_done(&o);
                return r;
        }

        *ret = o;
        return 0;
}

int session_request_encode(
        sd_bus_message *message, const Session *s, uint32_t flags, WireJobOpen *ret, Fault *f) {
        return session_request_encode_files(message, s, flags, ret, NULL, f);
}

int session_request_encode_files(
        sd_bus_message *message, const Session *s, uint32_t flags, WireJobOpen *ret, RenderOptions *ret_files, Fault *f) {
        Coding c = {
                .q = {.kind = WIRE_JOB_ENCODE, .flags = flags},
                .canvas = REQUEST_CANVAS_DEFAULT,
                .picture_rule = "reference",
                .type = "bf16",
        };
        const BusKey keys[] = {
                TEXT_KEY(&c),
                OUTPUT_KEYS(&c),
                {"pictures", "aa{sv}", &c.q, .read = read_pictures},
                {"files", "aa{sv}", &c.files, .read = request_read_pictures},
                CANVAS_KEYS(&c.canvas),
                {"picture-rule", "s", &c.picture_rule},
                {"type", "s", &c.type},
                {"compute", "s", &c.compute},
        };
        int r;

        r = bus_read_dictionary(message, keys, ELEMENTSOF(keys), f);
        if (r >= 0)
                r = session_check_kind(s, WIRE_JOB_ENCODE, f);
        if (r >= 0)
                r = request_check_prompt(&c.q.text, c.text, f);
        if (r >= 0)
                r = check_pictures(&c.q, f);
        if (r >= 0)
                r = encode_options(&c, f);
        if (r >= 0)
                r = set_compute(&c, s, f);
        if (r >= 0)
                r = finish(&c, s, ret, f);
        if (r < 0)
                return r;
        if (c.files.n > 0)
                return take_files(&c, ret_files, f);

        if (c.canvas.width_seen || c.canvas.height_seen || c.canvas.frames_seen)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "\"width\", \"height\" and \"frames\" are for \"files\": give these too, or leave them out.");
        return 0;
}

/* ---- Decode and EncodeMedia ---- */

/* The stream that the session's VAE is for: *ret_video. A key of the other one was given: what is wrong. */
static int check_stream(const Coding *c, const Session *s, bool video_keys, const char *names, bool *ret_video, Fault *f) {
        bool video = s->model->info.kind == WIRE_MODEL_VIDEO_VAE;

        if (video && c->audio)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "\"audio\" is for an audio-vae, the session's model is a video-vae: give \"video\".");
        if (!video && (c->video || video_keys))
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "\"video\", %s are for a video-vae, the session's model is an audio-vae: give only \"audio\".",
                        names);

        *ret_video = video;
        return 0;
}

static int check_pixels(const Coding *c, Fault *f) {
        const WireTensor *t = &c->q.video;
        const TensorRule rule = {
                c->video && t->dtype == ST_F32 ? ST_F32 : ST_U8, 4, "U8 or F32 [F, H, W, 3]", {0, 0, 0, 3}};
        int r;

        r = request_check_tensor("video", t, c->video, true, &rule, f);
        if (r < 0)
                return r;

        if (t->shape[1] % PATCH != 0 || t->shape[2] % PATCH != 0)
                return fault_set(f, -EINVAL, FAULT_INVALID_TENSOR,
                        "\"video\" has height %" PRIu64 " and width %" PRIu64 ", expected multiples of %u.",
                        t->shape[1], t->shape[2], PATCH);

        return 0;
}

static int pixels_options(Coding *c, Fault *f) {
        static const char *const posteriors[] = {
                [WIRE_POSTERIOR_MEAN] = "mean",
                [WIRE_POSTERIOR_SAMPLED] = "sampled",
        };
        WireJobOpen *q = &c->q;
        int r;

        if (c->posterior) {
                r = request_choice("posterior", c->posterior, posteriors, ELEMENTSOF(posteriors), &q->posterior, f);
                if (r < 0)
                        return r;
        }

        if (c->seed && q->posterior != WIRE_POSTERIOR_SAMPLED)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "\"seed\" is for \"posterior\" \"sampled\": give that too, or leave it out.");
        if (!c->seed && q->posterior == WIRE_POSTERIOR_SAMPLED)
                q->seed = SEED_DEFAULT;

        return check_pixels(c, f);
}

int session_request_encode_media(
        sd_bus_message *message, const Session *s, uint32_t flags, WireJobOpen *ret, Fault *f) {
        const TensorRule sound = {ST_F32, 2, "F32 [2, samples]", {2}};
        Coding c = {.q = {.kind = WIRE_JOB_ENCODE_MEDIA, .flags = flags}};
        const BusKey keys[] = {
                {"video", "(tsat)", &c.q.video, &c.video},
                {"audio", "(tsat)", &c.q.audio, &c.audio},
                {"posterior", "s", &c.posterior},
                {"seed", "t", &c.q.seed, &c.seed},
                OUTPUT_KEYS(&c),
        };
        bool video;
        int r;

        r = bus_read_dictionary(message, keys, ELEMENTSOF(keys), f);
        if (r >= 0)
                r = session_check_kind(s, WIRE_JOB_ENCODE_MEDIA, f);
        if (r >= 0)
                r = check_stream(&c, s, c.posterior || c.seed, "\"posterior\" and \"seed\"", &video, f);
        if (r >= 0)
                r = video ? pixels_options(&c, f) : request_check_tensor("audio", &c.q.audio, c.audio, true, &sound, f);
        if (r < 0)
                return r;

        return finish(&c, s, ret, f);
}

static int frames_options(Coding *c, Fault *f) {
        static const char *const types[] = {"u8", "f32"};
        const TensorRule rule = RULE_VIDEO;
        uint32_t type = 0;
        int r;

        if (c->type) {
                r = request_choice("type", c->type, types, ELEMENTSOF(types), &type, f);
                if (r < 0)
                        return r;
        }
        c->q.output_type = type == 0 ? ST_U8 : ST_F32;

        if (c->q.ring_frames > FRAMES_MAX)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "\"frames\" is %" PRIu64 ", expected at most %" PRIu64 ", or 0 for all.", c->q.ring_frames,
                        FRAMES_MAX);

        return request_check_tensor("video", &c->q.video, c->video, true, &rule, f);
}

int session_request_decode(
        sd_bus_message *message, const Session *s, uint32_t flags, WireJobOpen *ret, Fault *f) {
        const TensorRule sound = RULE_AUDIO;
        Coding c = {.q = {.kind = WIRE_JOB_DECODE, .flags = flags}};
        const BusKey keys[] = {
                {"video", "(tsat)", &c.q.video, &c.video},
                {"audio", "(tsat)", &c.q.audio, &c.audio},
                {"type", "s", &c.type},
                {"frames", "t", &c.q.ring_frames, &c.frames},
                {"compute", "s", &c.compute},
                OUTPUT_KEYS(&c),
        };
        bool video;
        int r;

        r = bus_read_dictionary(message, keys, ELEMENTSOF(keys), f);
        if (r >= 0)
                r = session_check_kind(s, WIRE_JOB_DECODE, f);
        if (r >= 0)
                r = check_stream(&c, s, c.type || c.frames, "\"type\" and \"frames\"", &video, f);
        if (r >= 0)
                r = video ? frames_options(&c, f) : request_check_tensor("audio", &c.q.audio, c.audio, true, &sound, f);
        if (r >= 0)
                r = set_compute(&c, s, f);
        if (r < 0)
                return r;

        return finish(&c, s, ret, f);
}
