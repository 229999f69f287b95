/* SPDX-License-Identifier: Apache-2.0 */
/* A Render's pictures: what is in the files, how large they become (canvas.h), and reading them. Until the prompt is encoded they lie
 * in memory of their own, with the prompt; the latents are in the work arena. Each request to latent-media is tried twice: a process
 * that dies in between costs that file. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "service/latentd/job.h"
#include "service/latentd/render-internal.h"
#include "service/shared/cleanup.h"
#include "service/shared/clock.h"

#define SIDE 16u           /* pixels of a latent, and the least that a picture's side may have */
#define CLIP_FRAMES_MIN 5u /* that the VAE can take */
#define SHOWN_FRAMES_MIN 13u /* two samples for the conditioner, as the reference wants them */
#define SECONDS_MAX 600u   /* of a clip or sound, of which a film's length is read */
#define FRAMES_SPARE MEDIA_FPS /* more than the file says */
#define IMAGES_MAX 9u
#define VIDEOS_MAX 3u
#define AUDIOS_MAX 3u

/* Which picture it was. */
static int name_fault(const Render *r, uint32_t i, int error, const Fault *inner, Fault *f) {
        const char *name = r->o.pictures[i].name;
        const char *text = inner->name[0] != '\0' ? inner->text : strerror(-error);

        return fault_set(f, error, inner->name[0] != '\0' ? inner->name : FAULT_INTERNAL, "\"%s\"[%" PRIu32 "]%s%s%s: %s",
                r->o.encode_only ? "files" : "pictures", r->items[i].number, name[0] != '\0' ? " (" : "", name,
                name[0] != '\0' ? ")" : "", text);
}

/* ---- latent-media ---- */

static void on_read(void *userdata, const MediaDone *done, const Fault *f) {
        Render *r = userdata;

        r->read_ended = true;
        r->read_done = done ? *done : (MediaDone){};
        r->read_fault = done ? (Fault){} : *f;
        (void) sd_event_source_set_enabled(r->next_source, SD_EVENT_ONESHOT);
}

static void make_read(const Render *r, MediaMessage *ret) {
        const RenderItem *x = &r->items[r->item];
        bool clip = x->kind == WIRE_CONDITION_VIDEO;
        MediaRead *q = &ret->read;

        (void) media_init(ret, MEDIA_READ);
        if (r->stage == RENDER_STAGE_PROBE) {
                q->what = MEDIA_PROBE;
        } else if (r->item_sound) {
                q->what = MEDIA_SOUND;
                q->samples_max = x->samples;
                q->cut = true;
                q->offset = x->wave;
                q->size = 2 * sizeof(float) * x->samples;
        } else {
                /* The first of the keyframes gives the film its geometry (h3.md 5.7). */
                bool cover = x->kind == WIRE_CONDITION_KEYFRAME && r->o.pictures[r->item].last &&
                             (r->item > 0 || r->o.picture_rule == WIRE_PICTURE_COMFY);

                q->what = clip ? MEDIA_CLIP : MEDIA_PICTURE;
                q->fit = cover ? MEDIA_FIT_COVER : MEDIA_FIT_STRETCH;
                q->width = x->width;
                q->height = x->height;
                q->frames_max = x->room;
                q->offset = x->pixels;
                q->size = UINT64_C(3) * x->width * x->height * x->room;
        }
}

static int start(Render *r, Fault *f) {
        const MediaHandlers handlers = { .end = on_read, .userdata = r };
        Fault inner = {};
        MediaMessage m;
        int error;

        make_read(r, &m);
        error = media_link_new(r->job->manager, &m, r->o.pictures[r->item].file, r->pixels ? r->pixels->output_fd : -EBADF, &handlers,
                &r->reader, &inner);
        return error < 0 ? name_fault(r, r->item, error, &inner, f) : 0;
}

int render_pictures_start(Render *r, Fault *f) {
        r->stage = RENDER_STAGE_PROBE;
        r->read_usec = clock_usec();
        for (uint32_t i = 0; i < r->o.n_pictures; i++)
                r->items[i].number = i;
        job_start(r->job, "read");
        return start(r, f);
}

/* ---- what they are ---- */

static int check_probed(const Render *r, uint32_t i, Fault *f) {
        const RenderPicture *p = &r->o.pictures[i];
        const RenderItem *x = &r->items[i];
        const MediaDone *d = &x->probed;
        uint64_t frames = x->kind == WIRE_CONDITION_VIDEO ? d->frames : 0, samples = x->has_sound ? d->samples : 0;

        if (p->sound != RENDER_SOUND_AS_IT_HAS && x->kind != WIRE_CONDITION_VIDEO)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT, "\"sound\" is for clips, this is a %s.",
                        x->kind == WIRE_CONDITION_AUDIO ? "sound alone" : "picture");
        if (x->kind == WIRE_CONDITION_AUDIO ? d->samples == 0 : p->sound == RENDER_SOUND_NEEDED && !x->has_sound)
                return fault_set(f, -ENODATA, FAULT_INVALID_FILE, "There is no sound in this file, where sound is asked.");
        if (x->kind != WIRE_CONDITION_AUDIO && d->frames == 0)
                return fault_set(f, -ENODATA, FAULT_INVALID_FILE, "There is no picture in this file, only sound.");
        if (x->kind == WIRE_CONDITION_VIDEO && d->still)
                return fault_set(f, -EINVAL, FAULT_INVALID_FILE, "This is a picture, where a clip is asked.");
        if (x->kind != WIRE_CONDITION_AUDIO && (d->width < SIDE || d->height < SIDE))
                return fault_set(f, -EINVAL, FAULT_INVALID_FILE, "The picture has %ux%u pixels, expected sides of at least %u.", d->width,
                        d->height, SIDE);
        if (frames / MEDIA_FPS > SECONDS_MAX || samples / MEDIA_SAMPLE_RATE > SECONDS_MAX)
                return fault_set(f, -EFBIG, FAULT_LIMIT, "It lasts %" PRIu64 " seconds, expected at most %u: cut it first.",
                        frames / MEDIA_FPS > SECONDS_MAX ? frames / MEDIA_FPS : samples / MEDIA_SAMPLE_RATE, SECONDS_MAX);
        return 0;
}

/* The numbers come from a process that looked into a hostile file. */
static int take_probed(Render *r, Fault *f) {
        const RenderPicture *p = &r->o.pictures[r->item];
        RenderItem *x = &r->items[r->item];
        const MediaDone *d = &r->read_done;
        Fault inner = {};
        int error;

        if (d->width > 8 * MEDIA_SIDE_MAX || d->height > MEDIA_SIDE_MAX || (d->frames > 0 && (d->width == 0 || d->height == 0)))
                return name_fault(r, r->item, -EBADMSG,
                        &(Fault){ .name = FAULT_IO, .text = "latent-media broke the protocol. Start the job again." }, f);

        x->probed = *d;
        x->kind = p->kind != RENDER_KIND_BY_CONTENT ? p->kind
                : d->frames == 0                    ? WIRE_CONDITION_AUDIO
                : d->still                          ? WIRE_CONDITION_IMAGE
                                                    : WIRE_CONDITION_VIDEO;
        x->has_sound = x->kind == WIRE_CONDITION_AUDIO ||
                       (x->kind == WIRE_CONDITION_VIDEO && d->samples > 0 && p->sound != RENDER_SOUND_NONE);
        error = check_probed(r, r->item, &inner);
        return error < 0 ? name_fault(r, r->item, error, &inner, f) : 0;
}

static int check_counts(const Render *r, Fault *f) {
        const struct {
                WireConditionKind kind;
                const char *what;
                uint32_t max;
        } rules[] = {
                { WIRE_CONDITION_IMAGE, "images", IMAGES_MAX },
                { WIRE_CONDITION_VIDEO, "clips", VIDEOS_MAX },
                { WIRE_CONDITION_AUDIO, "sounds", AUDIOS_MAX },
        };
        uint32_t n[WIRE_CONDITION_AUDIO + 1] = {};

        for (uint32_t i = 0; i < r->o.n_pictures; i++)
                n[r->items[i].kind]++;
        for (size_t i = 0; i < ELEMENTSOF(rules); i++)
                if (n[rules[i].kind] > rules[i].max)
                        return fault_set(f, -E2BIG, FAULT_INVALID_ARGUMENT,
                                "%" PRIu32 " %s are given as references, the model takes at most %" PRIu32 ".", n[rules[i].kind],
                                rules[i].what, rules[i].max);
        if (n[WIRE_CONDITION_AUDIO] == r->o.n_pictures)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "Only sounds alone are given as references, which the model does not take: add a picture or clip.");
        return 0;
}

/* As ComfyUI has them: images, clips, sounds. */
static void sort_items(Render *r) {
        for (uint32_t i = 1; i < r->o.n_pictures; i++)
                for (uint32_t k = i; k > 0 && r->items[k].kind < r->items[k - 1].kind; k--) {
                        RenderPicture p = r->o.pictures[k];
                        RenderItem x = r->items[k];

                        r->o.pictures[k] = r->o.pictures[k - 1];
                        r->items[k] = r->items[k - 1];
                        r->o.pictures[k - 1] = p;
                        r->items[k - 1] = x;
                }
}

/* ---- how large they become ---- */

static int size_item(const Render *r, RenderItem *x, Fault *f) {
        CanvasRule rule = r->o.picture_rule == WIRE_PICTURE_COMFY ? CANVAS_COMFY : CANVAS_REFERENCE;
        uint64_t said = x->probed.frames;

        if (x->has_sound)
                x->samples = (uint64_t) r->o.frames * MEDIA_SAMPLE_RATE / MEDIA_FPS;
        x->room = 1;

        switch ((WireConditionKind) x->kind) {

        case WIRE_CONDITION_KEYFRAME:
                x->width = r->o.width;
                x->height = r->o.height;
                return 0;

        case WIRE_CONDITION_IMAGE:
                return canvas_of_reference(rule, x->probed.width, x->probed.height, r->o.width, r->o.height, &x->width, &x->height, f);

        case WIRE_CONDITION_VIDEO:
                x->room = said <= 1 || said + FRAMES_SPARE > r->o.frames ? r->o.frames : said + FRAMES_SPARE;
                return canvas_of_clip(rule, x->probed.width, x->probed.height, &x->width, &x->height, f);

        default:
                x->room = 0;
                return 0;
        }
}

static int size_all(Render *r, uint64_t *ret_bytes, Fault *f) {
        uint64_t at = wire_slot_pad(r->o.prompt.size), unused;
        int error;

        if (r->o.width == 0) {
                const MediaDone *first = &r->items[0].probed;
                Fault inner = {};

                error = r->items[0].kind == WIRE_CONDITION_KEYFRAME
                              ? canvas_from_picture(first->width, first->height, &r->o.width, &r->o.height, &inner)
                              : canvas_of_clip(CANVAS_REFERENCE, first->width, first->height, &r->o.width, &r->o.height, &inner);
                if (error < 0)
                        return name_fault(r, 0, error, &inner, f);
                render_drop_preview(&r->o);
                error = r->o.encode_only ? 0 : render_check_output(&r->o, &unused, f);
                if (error < 0)
                        return error;
        }

        for (uint32_t i = 0; i < r->o.n_pictures; i++) {
                RenderItem *x = &r->items[i];
                Fault inner = {};

                error = size_item(r, x, &inner);
                if (error < 0)
                        return name_fault(r, i, error, &inner, f);
                x->pixels = at;
                at += wire_slot_pad(UINT64_C(3) * x->width * x->height * x->room);
                x->wave = at;
                at += wire_slot_pad(2 * sizeof(float) * x->samples);
        }

        *ret_bytes = at;
        return 0;
}

static int make_room(Render *r, Fault *f) {
        uint64_t page = (uint64_t) sysconf(_SC_PAGESIZE), bytes;
        int error;

        error = check_counts(r, f);
        if (error < 0)
                return error;
        if (r->o.picture_rule == WIRE_PICTURE_COMFY)
                sort_items(r);
        error = size_all(r, &bytes, f);
        if (error < 0)
                return error;

        r->stage = RENDER_STAGE_ROOM;
        return session_new_work(r->job->manager, r->job->uid, (bytes + page - 1) / page * page, false, render_on_memory, r, &r->pixels, f);
}

/* ---- reading them ---- */

/* At most 4 MiB. */
static int copy_prompt(const Render *r) {
        const WireTensor *t = &r->o.prompt;
        char bytes[16384];

        for (uint64_t at = 0; at < t->size;) {
                size_t n = t->size - at < sizeof(bytes) ? (size_t) (t->size - at) : sizeof(bytes);

                if (pread(r->client->input_fd, bytes, n, (off_t) (t->offset + at)) != (ssize_t) n ||
                        pwrite(r->pixels->output_fd, bytes, n, (off_t) at) != (ssize_t) n)
                        return -EIO;
                at += n;
        }

        return 0;
}

static int take_clip(const Render *r, RenderItem *x, Fault *f) {
        bool comfy = r->o.picture_rule == WIRE_PICTURE_COMFY;
        uint64_t n = r->read_done.frames, least = comfy ? CLIP_FRAMES_MIN : SHOWN_FRAMES_MIN;

        if (n < least)
                return fault_set(f, -EINVAL, FAULT_INVALID_FILE,
                        "The clip has %" PRIu64 " frames at %d a second, expected at least %" PRIu64 ".", n, MEDIA_FPS, least);

        x->frames = canvas_clip_frames(n);
        x->shown = comfy ? x->frames : n; /* ComfyUI cuts before it shows, the reference after that */
        return 0;
}

static int take_read(Render *r, Fault *f) {
        RenderItem *x = &r->items[r->item];
        const MediaDone *d = &r->read_done;

        if (r->item_sound) {
                if (d->samples == 0 || d->samples > x->samples)
                        return fault_set(f, -EBADMSG, FAULT_INVALID_FILE, "Its sound track is empty.");
                x->samples = d->samples;
                return 0;
        }

        if (d->frames == 0 || d->frames > x->room || d->width != x->width || d->height != x->height)
                return fault_set(f, -EBADMSG, FAULT_IO, "latent-media broke the protocol. Start the job again.");
        if (x->kind == WIRE_CONDITION_VIDEO)
                return take_clip(r, x, f);

        x->shown = x->frames = 1;
        return 0;
}

/* Files are read in their order. The next thing at or behind this place; false: there is none. */
static bool find(Render *r, uint32_t item, bool sound) {
        for (; item < r->o.n_pictures; item++, sound = false) {
                if (!sound && r->items[item].kind == WIRE_CONDITION_AUDIO)
                        sound = true;
                if (!sound || r->items[item].has_sound) {
                        r->item = item;
                        r->item_sound = sound;
                        return true;
                }
        }

        return false;
}

static bool find_behind(Render *r) {
        return r->item_sound ? find(r, r->item + 1, false) : find(r, r->item, true);
}

/* 1: there is nothing more to read. */
static int read_next(Render *r, Fault *f) {
        Fault inner = {};
        int error;

        error = take_read(r, &inner);
        if (error < 0)
                return name_fault(r, r->item, error, &inner, f);
        if (find_behind(r))
                return start(r, f);

        r->read_usec = clock_usec() - r->read_usec;
        return 1;
}

static int probe_next(Render *r, Fault *f) {
        int error;

        error = take_probed(r, f);
        if (error < 0)
                return error;
        if (++r->item < r->o.n_pictures)
                return start(r, f);

        return make_room(r, f);
}

/* Of what a process has ended with. */
static int check_ended(Render *r, Fault *f) {
        Fault inner = r->read_fault;

        r->reader = media_link_free(r->reader);
        if (inner.name[0] == '\0') {
                r->item_again = false;
                return 1;
        }
        if (strcmp(inner.name, FAULT_IO) != 0 || r->item_again)
                return name_fault(r, r->item, -EIO, &inner, f);

        r->item_again = true;
        return start(r, f);
}

int render_pictures_next(Render *r, Fault *f) {
        int error;

        if (r->stage == RENDER_STAGE_ROOM) {
                error = copy_prompt(r);
                if (error < 0)
                        return error;
                r->stage = RENDER_STAGE_READ;
                (void) find(r, 0, false);
                return start(r, f);
        }

        error = check_ended(r, f);
        if (error <= 0)
                return error;

        return r->stage == RENDER_STAGE_PROBE ? probe_next(r, f) : read_next(r, f);
}

void render_pictures_drop(Render *r) {
        for (RenderPlace p = 0; p < _RENDER_PLACE_MAX; p++)
                if (r->aliases[RENDER_PIXELS][p])
                        session_forget(STEAL_PTR(r->aliases[RENDER_PIXELS][p]));
        if (r->pixels)
                session_forget(STEAL_PTR(r->pixels));
        for (uint32_t i = 0; i < r->o.n_pictures; i++)
                cleanup_closep(&r->o.pictures[i].file);
}

/* ---- their latents ---- */

/* All pictures, then all sounds: each VAE has its turn once. */
static bool find_part(Render *r, uint32_t item, bool sound) {
        for (; item < r->o.n_pictures; item++)
                if (sound ? r->items[item].has_sound : r->items[item].kind != WIRE_CONDITION_AUDIO) {
                        r->item = item;
                        r->item_sound = sound;
                        return true;
                }

        return !sound && find_part(r, 0, true);
}

bool render_condition_first(Render *r) {
        return find_part(r, 0, false);
}

bool render_condition_next(Render *r) {
        return find_part(r, r->item + 1, r->item_sound);
}

/* Latents of pictures; those of sound are next to nothing beside them. */
static double work_of(const RenderItem *x, bool sound) {
        uint64_t tokens = x->frames == 1 ? 1 : canvas_video_tokens((uint32_t) x->frames);

        return sound ? 1 : (double) (tokens * (x->height / SIDE) * (x->width / SIDE));
}

void render_condition_work(const Render *r, double *ret_done, double *ret_now, double *ret_all) {
        double done = 0, now = 0, all = 0;

        for (uint32_t i = 0; i < r->o.n_pictures; i++)
                for (unsigned sound = r->items[i].kind == WIRE_CONDITION_AUDIO; sound <= r->items[i].has_sound; sound++) {
                        double work = work_of(&r->items[i], sound);

                        all += work;
                        if (sound < r->item_sound || (i < r->item && sound == r->item_sound))
                                done += work;
                        else if (i == r->item && sound == r->item_sound)
                                now = work;
                }

        *ret_done = done;
        *ret_now = now;
        *ret_all = all;
}
