/* SPDX-License-Identifier: Apache-2.0 */
/* What each phase of a Render asks for, and where it lies. */
#include "service/latentd/render-internal.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "service/latentd/job-ready.h"
#include "service/latentd/model.h"
#include "service/latentd/session-request.h"
#include "service/shared/cleanup.h"
#include "service/shared/safetensors.h"

#define VIDEO_CHANNELS 24u
#define AUDIO_CHANNELS 32u
#define SIDE 16u     /* pixels of a latent */
#define SAMPLES 800u /* of a latent of sound */
#define CONDITION_SEED 42u /* of the reference (h3.md 5.7) */
#define TAIL 5u      /* frames that a chunk hands to the next, as F32 (service/h3/video-vae.h) */
#define CHUNK 22u    /* frames that a chunk makes at most */
#define FILE_RING (2 * CHUNK) /* one is made while the other is written */

const char *render_phase_name(RenderPhase p) {
        static const char *const names[] = {
                [RENDER_CONDITION] = "condition",
                [RENDER_ENCODE] = "encode",
                [RENDER_SAMPLE] = "sample",
                [RENDER_SOUND] = "decode-sound",
                [RENDER_DECODE] = "decode",
        };

        return names[p];
}

Model *render_model(const Render *r, RenderPhase p) {
        const Session *s = r->client;

        switch (p) {

        case RENDER_CONDITION:
                return r->item_sound ? s->audio_vae : s->video_vae;
        case RENDER_ENCODE:
                return r->o.encode_only ? s->model : s->conditioner;
        case RENDER_SAMPLE:
                return s->model;
        case RENDER_SOUND:
                return s->audio_vae;
        default:
                return s->video_vae;
        }
}

/* The sizes below are of films within canvas.h's limits: at most some 10^11 bytes, nothing overflows. */

static WireTensor video_latent(const RenderOptions *o) {
        WireTensor t = {.dtype = ST_F32, .n_dims = 4,
                .shape = {VIDEO_CHANNELS, canvas_video_tokens(o->frames), o->height / SIDE, o->width / SIDE}};

        t.size = sizeof(float) * t.shape[0] * t.shape[1] * t.shape[2] * t.shape[3];
        return t;
}

static WireTensor audio_latent(const RenderOptions *o) {
        WireTensor t = {.dtype = ST_F32, .n_dims = 3, .shape = {AUDIO_CHANNELS, 2, canvas_audio_tokens(o->frames)}};

        t.size = sizeof(float) * t.shape[0] * t.shape[1] * t.shape[2];
        return t;
}

/* [commit word] [slot 0] [slot 1], as the worker lays it out. */
static uint64_t sample_bytes(const RenderOptions *o) {
        WireJobOpen q = o->sample;
        WireSlot slot;

        q.video = video_latent(o);
        q.audio = audio_latent(o);
        return job_slot_place(&q, &slot) < 0 ? UINT64_MAX / 4 : WIRE_SLOT_ALIGN + 2 * slot.stride;
}

/* Of the client's arena, with the latents; none where these alone have room. */
static uint64_t preview_bytes(const RenderOptions *o) {
        uint64_t size = UINT64_C(3) * canvas_video_tokens(o->frames) * (o->height / SIDE) * (o->width / SIDE);

        return o->sample.preview_steps > 0 ? wire_slot_pad(size) : 0;
}

static bool latents_are_the_client_s(const RenderOptions *o) {
        return o->keep_latents || o->sample.preview_steps > 0;
}

static uint64_t sound_bytes(const RenderOptions *o) {
        return WIRE_SLOT_ALIGN + wire_slot_pad(2 * sizeof(float) * SAMPLES * canvas_audio_tokens(o->frames));
}

static uint64_t ring_frames(const RenderOptions *o) {
        uint64_t ring = render_to_file(o) ? FILE_RING : o->ring_frames;

        return ring > 0 && ring < o->frames ? ring : o->frames;
}

/* [commit word] [frames] [two tails]. */
static uint64_t film_bytes(const RenderOptions *o) {
        uint64_t pixels = UINT64_C(3) * o->width * o->height;

        return WIRE_SLOT_ALIGN + wire_slot_pad(ring_frames(o) * pixels * st_type_size((StType) o->frame_type)) +
               (o->frames > CHUNK ? 2 * wire_slot_pad(TAIL * pixels * sizeof(float)) : 0);
}

void render_drop_preview(RenderOptions *o) {
        uint64_t sound = !render_to_file(o) ? wire_slot_pad(sound_bytes(o)) : 0, film = !render_to_file(o) ? film_bytes(o) : 0;

        if (wire_slot_pad(sample_bytes(o)) + preview_bytes(o) + sound + film > o->output_size)
                o->sample.preview_steps = 0;
}

int render_check_output(const RenderOptions *o, uint64_t *ret_bytes, Fault *f) {
        uint64_t latents = o->keep_latents ? wire_slot_pad(sample_bytes(o)) : 0,
                 sound = !render_to_file(o) ? wire_slot_pad(sound_bytes(o)) : 0,
                 film = !render_to_file(o) ? film_bytes(o) : 0, bytes = latents + sound + film;

        if (bytes > o->output_size)
                return fault_set(f, -ENOSPC, FAULT_DOES_NOT_FIT,
                        "The film needs %" PRIu64 " bytes of the output arena (latents %" PRIu64 ", sound %" PRIu64
                        ", frames %" PRIu64 "), %" PRIu64 " are given: make the arena larger, or give \"ring\" frames at a time.",
                        bytes, latents, sound, film, o->output_size);

        *ret_bytes = bytes;
        return 0;
}

static RenderRange take(RenderPlace place, uint64_t size, uint64_t *at) {
        RenderRange x = {.place = place, .offset = *at, .size = size};

        *at += wire_slot_pad(size);
        return x;
}

/* F32, without a place. */
static WireTensor latent(uint32_t n_dims, const uint64_t *shape) {
        WireTensor t = {.size = sizeof(float), .dtype = ST_F32, .n_dims = n_dims};

        for (uint32_t i = 0; i < n_dims; i++)
                t.size *= t.shape[i] = shape[i];
        return t;
}

static WireTensor item_video(const RenderItem *x) {
        uint64_t tokens = x->frames == 1 ? 1 : canvas_video_tokens((uint32_t) x->frames);

        return latent(4, (uint64_t[]){VIDEO_CHANNELS, tokens, x->height / SIDE, x->width / SIDE});
}

static WireTensor item_audio(const RenderItem *x) {
        return latent(3, (uint64_t[]){AUDIO_CHANNELS, 2, (x->samples + SAMPLES - 1) / SAMPLES});
}

/* Places of the pictures' latents; how many rows they are. */
static uint64_t place_items(Render *r, uint64_t *at) {
        uint64_t rows = 0;

        for (uint32_t i = 0; i < r->o.n_pictures; i++) {
                RenderItem *x = &r->items[i];

                if (x->frames > 0) {
                        WireTensor t = item_video(x);

                        x->to_video = take(RENDER_WORK, WIRE_SLOT_ALIGN + wire_slot_pad(t.size), at);
                        rows += t.shape[1] * (x->height / CANVAS_STEP) * (x->width / CANVAS_STEP);
                }
                if (x->has_sound) {
                        WireTensor t = item_audio(x);

                        x->to_audio = take(RENDER_WORK, WIRE_SLOT_ALIGN + wire_slot_pad(t.size), at);
                        rows += 2 * t.shape[2];
                }
        }

        return rows;
}

void render_make_layout(Render *r, const WireJobReady *ready) {
        const RenderOptions *o = &r->o;
        uint64_t video = wire_slot_pad(video_latent(o).size), audio = audio_latent(o).size, work = 0, output = o->output_offset;

        r->encoded = take(RENDER_WORK, ready->output_used, &work);
        r->sigmas = take(RENDER_WORK, wire_slot_pad(o->sample.sigmas_video.size) + o->sample.sigmas_audio.size, &work);
        r->noise = take(RENDER_WORK, video + audio, &work);
        r->latents = latents_are_the_client_s(o) ? RENDER_CLIENT_OUTPUT : RENDER_WORK;
        r->sampled = take(r->latents, wire_slot_pad(sample_bytes(o)) + preview_bytes(o), latents_are_the_client_s(o) ? &output : &work);
        r->sound = take(!render_to_file(o) ? RENDER_CLIENT_OUTPUT : RENDER_WORK, sound_bytes(o), !render_to_file(o) ? &output : &work);
        r->film = take(!render_to_file(o) ? RENDER_CLIENT_OUTPUT : RENDER_WORK, film_bytes(o), !render_to_file(o) ? &output : &work);

        r->sizes.tokens = ready->rows;
        r->sizes.rows = ready->rows + place_items(r, &work) +
                        video_latent(o).shape[1] * (o->height / CANVAS_STEP) * (o->width / CANVAS_STEP) +
                        2 * (uint64_t) canvas_audio_tokens(o->frames);
        r->sizes.work_bytes = work;
        r->sizes.output_bytes = output - o->output_offset;
}

double render_work(const Render *r, RenderPhase p) {
        const RenderOptions *o = &r->o;
        uint64_t audio = 2 * (uint64_t) canvas_audio_tokens(o->frames);
        uint64_t steps = o->sample.schedule == WIRE_SCHEDULE_GIVEN ? o->sample.sigmas_video.shape[0] - 1 : o->sample.steps;

        switch (p) {

        case RENDER_CONDITION: {
                double done, now, all;

                render_condition_work(r, &done, &now, &all);
                return all;
        }
        case RENDER_ENCODE:
                return (double) r->sizes.tokens;
        case RENDER_SAMPLE:
                return (double) r->sizes.rows * (double) steps;
        case RENDER_SOUND:
                return (double) audio;
        default:
                return (double) video_latent(o).shape[1] * (o->height / SIDE) * (o->width / SIDE);
        }
}

static void condition_request(const Render *r, WireJobOpen *q) {
        const RenderItem *x = &r->items[r->item];

        if (r->item_sound) {
                q->audio = latent(2, (uint64_t[]){2, x->samples});
                q->audio.offset = x->wave;
                return;
        }

        q->video = (WireTensor){.offset = x->pixels, .size = 3 * x->frames * x->height * x->width, .dtype = ST_U8, .n_dims = 4,
                .shape = {x->frames, x->height, x->width, 3}};
        if (r->o.picture_rule == WIRE_PICTURE_REFERENCE) {
                q->posterior = WIRE_POSTERIOR_SAMPLED;
                q->seed = CONDITION_SEED;
        }
}

void render_assume_latents(Render *r) {
        r->video = video_latent(&r->o);
        r->audio = audio_latent(&r->o);
        r->video.offset = r->sampled.offset + WIRE_SLOT_ALIGN;
        r->audio.offset = r->video.offset + wire_slot_pad(r->video.size);
}

static void encode_request(const Render *r, WireJobOpen *q) {
        q->compute = r->o.sample.compute;
        q->output_type = r->o.encode_only ? r->o.text_type : ST_BF16;
        q->text = r->o.prompt;
        if (r->o.n_pictures == 0)
                return;

        q->text.offset = 0; /* where render-pictures.c has put it */
        q->picture_rule = r->o.picture_rule;
        q->n_conditions = r->o.n_pictures;
        for (uint32_t i = 0; i < r->o.n_pictures; i++) {
                const RenderItem *x = &r->items[i];

                q->conditions[i] = (WireCondition){.kind = x->kind, .audio = x->has_sound};
                if (x->shown == 0)
                        continue;
                q->conditions[i].video_offset = x->pixels;
                q->conditions[i].frames = x->shown;
                q->conditions[i].height = x->height;
                q->conditions[i].width = x->width;
        }
}

/* As packed. */
static void add_conditions(const Render *r, WireJobOpen *q) {
        q->n_conditions = r->o.n_pictures;
        if (q->n_conditions > 0)
                q->condition_noise = r->o.sample.noise;
        for (uint32_t i = 0; i < r->o.n_pictures; i++) {
                const RenderItem *x = &r->items[i];
                WireCondition *c = &q->conditions[i];

                *c = (WireCondition){.kind = x->kind};
                if (x->kind == WIRE_CONDITION_KEYFRAME && r->o.pictures[i].last)
                        c->frame = r->o.frames - 1;
                if (x->video.size > 0) {
                        c->video_offset = x->video.offset;
                        c->frames = x->video.shape[1];
                        c->height = x->video.shape[2];
                        c->width = x->video.shape[3];
                }
                if (x->audio.size > 0) {
                        c->audio_offset = x->audio.offset;
                        c->audio = x->audio.shape[2];
                }
        }
}

static void sample_request(const Render *r, WireJobOpen *q) {
        const RenderOptions *o = &r->o;

        *q = o->sample;
        session_request_shifts(render_model(r, RENDER_SAMPLE), q);
        session_request_sparse(&o->sample.sparse, render_model(r, RENDER_SAMPLE), q);
        q->text = r->text;
        q->text_tags = r->text_tags;
        q->video = video_latent(o);
        q->audio = audio_latent(o);
        q->video.offset = r->noise.offset;
        q->audio.offset = r->noise.offset + wire_slot_pad(q->video.size);
        add_conditions(r, q);
        if (q->sigmas_video.size > 0) {
                q->sigmas_video.offset = r->sigmas.offset;
                q->sigmas_audio.offset = r->sigmas.offset + wire_slot_pad(q->sigmas_video.size);
        }
}

static void decode_request(const Render *r, bool video, WireJobOpen *q) {
        q->compute = r->o.sample.compute;
        if (video) {
                q->video = r->video;
                q->output_type = r->o.frame_type;
                q->ring_frames = ring_frames(&r->o) < r->o.frames ? ring_frames(&r->o) : 0;
        } else {
                q->audio = r->audio;
                q->output_type = ST_U8; /* as Session.Decode has it */
        }
}

WireJobKind render_phase_kind(RenderPhase p) {
        static const WireJobKind kinds[_RENDER_PHASE_MAX] = {
                [RENDER_ENCODE] = WIRE_JOB_ENCODE,
                [RENDER_CONDITION] = WIRE_JOB_ENCODE_MEDIA,
                [RENDER_SAMPLE] = WIRE_JOB_SAMPLE,
                [RENDER_SOUND] = WIRE_JOB_DECODE,
                [RENDER_DECODE] = WIRE_JOB_DECODE,
        };

        return kinds[p];
}

void render_make_request(const Render *r, RenderPhase p, WireJobOpen *ret, RenderPlace *ret_from, RenderPlace *ret_to) {
        const RenderItem *x = &r->items[r->item];
        const RenderRange *output = p == RENDER_CONDITION ? (r->item_sound ? &x->to_audio : &x->to_video)
                                  : p == RENDER_ENCODE    ? &r->encoded
                                  : p == RENDER_SAMPLE    ? &r->sampled
                                  : p == RENDER_SOUND     ? &r->sound
                                                          : &r->film;

        *ret = (WireJobOpen){};
        *ret_from = r->latents;
        if (p == RENDER_CONDITION) {
                *ret_from = RENDER_PIXELS;
                condition_request(r, ret);
        } else if (p == RENDER_ENCODE) {
                *ret_from = r->o.n_pictures > 0 ? RENDER_PIXELS : RENDER_CLIENT_INPUT;
                encode_request(r, ret);
        } else if (p == RENDER_SAMPLE) {
                *ret_from = RENDER_WORK;
                sample_request(r, ret);
        } else
                decode_request(r, p == RENDER_DECODE, ret);
        ret->kind = render_phase_kind(p);
        ret->output_offset = output->offset;
        ret->output_size = output->size;
        *ret_to = output->place;
}

void render_make_write(const Render *r, MediaMessage *ret) {
        MediaWrite *w = &ret->write;

        (void) media_init(ret, MEDIA_WRITE);
        w->format = r->o.format;
        w->width = r->o.width;
        w->height = r->o.height;
        w->frames = r->o.frames;
        w->samples = r->sound_tensor.shape[1];
        w->frames_offset = r->frames_tensor.offset;
        w->ring_frames = r->frames_tensor.shape[0];
        w->sound_offset = r->sound_tensor.offset;
        w->again = r->media_again;
}

void render_make_sheet(const Render *r, MediaMessage *ret) {
        MediaWrite *w = &ret->write;

        render_make_write(r, ret);
        w->format = MEDIA_PNG;
        w->samples = 0;
        w->sheet_columns = r->o.sheet_columns;
        w->sheet_rows = r->o.sheet_rows;
}

/* The output of this name; a finished job has all of its kind (job_ready_check()). */
static WireTensor output_of(const WireJobReady *y, WireOutputName name) {
        for (uint32_t i = 0; i < y->n_outputs; i++)
                if (y->outputs[i].name == (uint32_t) name)
                        return y->outputs[i].tensor;

        return (WireTensor){};
}

void render_take_results(Render *r, RenderPhase p) {
        const WireJobReady *y = &r->child_ready;

        switch (p) {

        case RENDER_CONDITION:
                if (r->item_sound)
                        r->items[r->item].audio = output_of(y, WIRE_OUTPUT_AUDIO);
                else
                        r->items[r->item].video = output_of(y, WIRE_OUTPUT_VIDEO);
                break;

        case RENDER_ENCODE:
                r->text = output_of(y, WIRE_OUTPUT_TEXT);
                r->text_tags = output_of(y, WIRE_OUTPUT_TEXT_TAGS);
                break;

        case RENDER_SAMPLE:
                r->video = r->child_results[0];
                r->audio = r->child_results[1];
                r->job->ready.rows = y->rows;
                break;

        case RENDER_SOUND:
                r->sound_tensor = output_of(y, WIRE_OUTPUT_SOUND);
                break;

        default:
                r->frames_tensor = output_of(y, WIRE_OUTPUT_FRAMES);
                break;
        }
}
