/* SPDX-License-Identifier: Apache-2.0 */

/* A session's Tokenize, Encode, Decode and EncodeMedia: from options to requests. */

#include <errno.h>
#include <string.h>
#include <stdlib.h>
#include <string.h>

#include "client/liblatent/error.h"
#include "client/liblatent/options.h"
#include "client/liblatent/request.h"
#include "client/liblatent/session.h"

_Static_assert(sizeof(latent_tokenize_options) == 32, "public layout changed: add fields, never alter");
_Static_assert(sizeof(latent_encode_options) == 88, "public layout changed: add fields, never alter");
_Static_assert(sizeof(latent_decode_options) == 64, "public layout changed: add fields, never alter");
_Static_assert(sizeof(latent_encode_media_options) == 56, "public layout changed: add fields, never alter");
_Static_assert(sizeof(latent_render_options) == 200, "public layout changed: add fields, never alter");
_Static_assert(sizeof(latent_picture) == 24, "public layout changed");
_Static_assert(sizeof(latent_media) == 24, "public layout changed");
#define TOKENIZE_OPTIONS_SIZE_V1 32u
#define ENCODE_OPTIONS_SIZE_V1 64u
#define DECODE_OPTIONS_SIZE_V1 64u
#define ENCODE_MEDIA_OPTIONS_SIZE_V1 56u
#define RENDER_OPTIONS_SIZE_V1 152u

static int request_tokenize(const void *options, Request **ret, latent_error *e) {
        latent_tokenize_options o;
        Request q = {.kind = REQUEST_TOKENIZE};
        int r;

        r = options_read(options, TOKENIZE_OPTIONS_SIZE_V1, &o, sizeof(o), e);
        if (r < 0)
                return r;

        q.sample.text = o.text;
        q.sample.output_offset = o.output_offset;
        q.sample.output_bytes = o.output_bytes;
        return request_new_coding(&q, ret, e);
}

static int take_pictures(const latent_media *pictures, uint32_t n, Request *q, latent_error *e) {
        const uint32_t known = LATENT_MEDIA_LAST | LATENT_MEDIA_SOUND | LATENT_MEDIA_SILENT;

        if (n > PICTURES_MAX || (n > 0 && !pictures))
                return error_set(e, -EINVAL, LATENT_ERROR_INVALID_ARGUMENT, "%u pictures%s; expected an array of at most %u.",
                        n, pictures ? "" : " at no place", PICTURES_MAX);
        for (uint32_t i = 0; i < n; i++)
                if (pictures[i].flags & ~known)
                        return error_set(e, -E2BIG, LATENT_ERROR_INVALID_ARGUMENT,
                                "Unknown flags %#x of picture %u; expected LATENT_MEDIA_*.", pictures[i].flags, i);

        if (n > 0)
                memcpy(q->pictures, pictures, n * sizeof(q->pictures[0]));
        q->n_pictures = n;
        return 0;
}

static int request_encode(const void *options, Request **ret, latent_error *e) {
        latent_condition conditions[CONDITIONS_MAX];
        latent_encode_options o;
        Request q = {.kind = REQUEST_ENCODE};
        int r;

        r = options_read(options, ENCODE_OPTIONS_SIZE_V1, &o, sizeof(o), e);
        if (r < 0)
                return r;
        if (o.n_pictures > CONDITIONS_MAX || (o.n_pictures > 0 && !o.pictures))
                return error_set(e, -EINVAL, LATENT_ERROR_INVALID_ARGUMENT, "%u pictures%s; expected an array of at most %u.",
                        o.n_pictures, o.pictures ? "" : " at no place", CONDITIONS_MAX);

        for (uint32_t i = 0; i < o.n_pictures; i++) {
                conditions[i] = (latent_condition){.kind = o.pictures[i].kind, .video = o.pictures[i].picture};
                q.sound[i] = o.pictures[i].sound != 0;
        }
        q.sample.conditions = conditions;
        q.sample.n_conditions = o.n_pictures;
        q.sample.text = o.text;
        q.sample.compute = o.compute;
        q.sample.output_offset = o.output_offset;
        q.sample.output_bytes = o.output_bytes;
        q.picture_rule = o.picture_rule;
        q.type = o.type;
        q.width = o.width;
        q.height = o.height;
        q.frames = o.frames;
        r = take_pictures(o.files, o.n_files, &q, e);
        return r < 0 ? r : request_new_coding(&q, ret, e);
}

static int request_decode(const void *options, Request **ret, latent_error *e) {
        latent_decode_options o;
        Request q = {.kind = REQUEST_DECODE};
        int r;

        r = options_read(options, DECODE_OPTIONS_SIZE_V1, &o, sizeof(o), e);
        if (r < 0)
                return r;

        q.sample.video = o.video;
        q.sample.audio = o.audio;
        q.sample.compute = o.compute;
        q.sample.output_offset = o.output_offset;
        q.sample.output_bytes = o.output_bytes;
        q.type = o.type;
        q.ring_frames = o.frames;
        return request_new_coding(&q, ret, e);
}

static int request_encode_media(const void *options, Request **ret, latent_error *e) {
        latent_encode_media_options o;
        Request q = {.kind = REQUEST_ENCODE_MEDIA};
        int r;

        r = options_read(options, ENCODE_MEDIA_OPTIONS_SIZE_V1, &o, sizeof(o), e);
        if (r < 0)
                return r;

        q.sample.video = o.video;
        q.sample.audio = o.audio;
        q.sample.has_seed = o.has_seed;
        q.sample.seed = o.seed;
        q.sample.output_offset = o.output_offset;
        q.sample.output_bytes = o.output_bytes;
        q.posterior = o.posterior;
        return request_new_coding(&q, ret, e);
}

static int request_render(const void *options, Request **ret, latent_error *e) {
        latent_render_options o;
        Request q = {.kind = REQUEST_RENDER};
        int r;

        r = options_read(options, RENDER_OPTIONS_SIZE_V1, &o, sizeof(o), e);
        if (r < 0)
                return r;
        if (o.flags & ~(uint32_t) (LATENT_RENDER_KEEP_LATENTS | LATENT_RENDER_FILE | LATENT_RENDER_SHEET))
                return error_set(e, -E2BIG, LATENT_ERROR_INVALID_ARGUMENT, "Unknown flags %#x; expected LATENT_RENDER_*.", o.flags);

        q.sample = (latent_sample_options){
                .text = o.prompt,
                .sigmas_video = o.sigmas_video,
                .sigmas_audio = o.sigmas_audio,
                .steps = o.steps,
                .schedule = o.schedule,
                .shift_video = o.shift_video,
                .shift_audio = o.shift_audio,
                .sampler = o.sampler,
                .noise = o.noise,
                .has_seed = o.has_seed,
                .seed = o.seed,
                .compute = o.compute,
                .output_offset = o.output_offset,
                .output_bytes = o.output_bytes,
        };
        q.width = o.width;
        q.height = o.height;
        q.frames = o.frames;
        q.keep_latents = o.flags & LATENT_RENDER_KEEP_LATENTS;
        q.has_file = o.flags & LATENT_RENDER_FILE;
        q.file = o.file;
        q.has_sheet = o.flags & LATENT_RENDER_SHEET;
        q.sheet = o.sheet;
        q.sheet_columns = o.sheet_columns;
        q.sheet_rows = o.sheet_rows;
        q.preview_steps = o.preview_steps;
        q.has_map = o.preview_map;
        if (o.preview_map)
                memcpy(q.preview_map, o.preview_map, sizeof(q.preview_map));
        q.format = o.format;
        q.type = o.type;
        q.ring_frames = o.ring;
        q.picture_rule = o.picture_rule;
        r = take_pictures(o.pictures, o.n_pictures, &q, e);
        return r < 0 ? r : request_new_coding(&q, ret, e);
}

typedef int (*RequestFn)(const void *options, Request **ret, latent_error *e);

static int start(latent_session *s, RequestFn make, const void *options, latent_job **ret, latent_error *e) {
        CLEANUP(request_freep) Request *q = NULL;
        int r;

        r = make(options, &q, e);
        return r < 0 ? r : session_start(s, &q, ret, e);
}

static int plan(latent_session *s, RequestFn make, const void *options, latent_value **ret, latent_error *e) {
        CLEANUP(request_freep) Request *q = NULL;
        int r;

        r = make(options, &q, e);
        return r < 0 ? r : session_plan(s, q, ret, e);
}

LATENT_PUBLIC int latent_session_tokenize(latent_session *session, const latent_tokenize_options *options,
        latent_job **ret_job, latent_error *error) {
        return start(session, request_tokenize, options, ret_job, error);
}

LATENT_PUBLIC int latent_session_encode(latent_session *session, const latent_encode_options *options,
        latent_job **ret_job, latent_error *error) {
        return start(session, request_encode, options, ret_job, error);
}

LATENT_PUBLIC int latent_session_decode(latent_session *session, const latent_decode_options *options,
        latent_job **ret_job, latent_error *error) {
        return start(session, request_decode, options, ret_job, error);
}

LATENT_PUBLIC int latent_session_encode_media(latent_session *session, const latent_encode_media_options *options,
        latent_job **ret_job, latent_error *error) {
        return start(session, request_encode_media, options, ret_job, error);
}

LATENT_PUBLIC int latent_session_render(latent_session *session, const latent_render_options *options, latent_job **ret_job,
        latent_error *error) {
        CLEANUP(request_freep) Request *q = NULL;
        int r;

        r = request_render(options, &q, error);
        if (r < 0)
                return r;

        q->adapters = adapters_ref(session->adapters);
        return session_start(session, &q, ret_job, error);
}

LATENT_PUBLIC int latent_session_plan_render(latent_session *session, const latent_render_options *options,
        latent_value **ret_value, latent_error *error) {
        return plan(session, request_render, options, ret_value, error);
}

LATENT_PUBLIC int latent_session_plan_tokenize(latent_session *session, const latent_tokenize_options *options,
        latent_value **ret_value, latent_error *error) {
        return plan(session, request_tokenize, options, ret_value, error);
}

LATENT_PUBLIC int latent_session_plan_encode(latent_session *session, const latent_encode_options *options,
        latent_value **ret_value, latent_error *error) {
        return plan(session, request_encode, options, ret_value, error);
}

LATENT_PUBLIC int latent_session_plan_decode(latent_session *session, const latent_decode_options *options,
        latent_value **ret_value, latent_error *error) {
        return plan(session, request_decode, options, ret_value, error);
}

LATENT_PUBLIC int latent_session_plan_encode_media(latent_session *session, const latent_encode_media_options *options,
        latent_value **ret_value, latent_error *error) {
        return plan(session, request_encode_media, options, ret_value, error);
}
