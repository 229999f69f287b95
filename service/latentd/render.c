/* SPDX-License-Identifier: Apache-2.0 */
#include "service/latentd/render.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "service/latentd/model.h"
#include "service/latentd/queue.h"
#include "service/latentd/render-internal.h"
#include "service/latentd/worker-start.h"
#include "service/shared/cleanup.h"
#include "service/shared/clock.h"
#include "service/shared/log.h"

/* What a phase is taken to last as long as its model was not measured: a row goes through so many bytes of weights in a microsecond. Only
 * the phases' shares of the whole matter. */
#define PACE_BYTES 10000.0

static void on_child_done(void *userdata, const Job *j) {
        Render *r = userdata;
        char unused[32];

        r->child = NULL;
        r->child_ended = true;
        r->child_state = j->state;
        r->child_fault = j->fault;
        r->child_ready = j->ready;
        r->child_took_usec = clock_usec() - j->created_usec;
        r->child_compute_usec = j->compute_usec;
        r->child_cached = j->cached;
        if (j->state == JOB_DONE && j->kind == JOB_SAMPLE)
                for (uint32_t i = 0; i < ELEMENTSOF(r->child_results); i++)
                        (void) job_result_tensor(j, i, unused, &r->child_results[i]);
        r->job->compute_usec += j->compute_usec;
        if (j->kind == JOB_SAMPLE || r->o.encode_only)
                memcpy(r->job->numerics_id, j->numerics_id, sizeof(r->job->numerics_id));
        /* What comes next is not for here: this is called from inside of the queue. */
        (void) sd_event_source_set_enabled(r->next_source, SD_EVENT_ONESHOT);
}

/* What the worker is at ends at its next block. */
static void drop_child(Render *r) {
        Job *child = STEAL_PTR(r->child);

        (void) sd_event_source_set_enabled(r->next_source, SD_EVENT_OFF);
        if (child) {
                child->done_fn = NULL;
                child->render = NULL;
                job_cancel(child);
        }
}

/* Nobody hears of the end while latent-media may write: the file is the client's again then. May free r. */
static void finish(Render *r, JobState state, const Fault *f) {
        drop_child(r);
        if (!r->media || !media_link_stop(r->media)) {
                job_finish(r->job, state, f);
                return;
        }

        r->stage = RENDER_STAGE_STOP;
        r->end_state = state;
        r->end_fault = f ? *f : (Fault){};
        if (state == JOB_CANCELLED)
                r->job->state = JOB_CANCELLING;
}

void render_cancel(Render *r) {
        if (r->stage == RENDER_STAGE_STOP)
                r->job->state = JOB_CANCELLING;
        else
                finish(r, JOB_CANCELLED, NULL);
}

static void fail(Render *r, const Fault *f) {
        finish(r, JOB_FAILED, f);
}

/* What goes wrong on the way to the file. */
static void fail_media(Render *r, int error, const Fault *f) {
        Fault named = {};

        if (f->name[0] == '\0')
                (void) fault_set(&named, error, FAULT_INTERNAL, "The film could not be written: %s.", strerror(-error));
        else
                (void) fault_set(&named, error, f->name, "The film could not be written: %s", f->text);
        fail(r, &named);
}

static void fail_errno(Render *r, int error) {
        Fault f = {};

        (void) fault_set(&f, error, error == -ENOMEM ? FAULT_DOES_NOT_FIT : FAULT_INTERNAL, "The phase \"%s\" could not be started: %s.",
                render_phase_name(r->phase), strerror(-error));
        fail(r, &f);
}

static Session *base_of(const Render *r, RenderPlace p) {
        return p == RENDER_WORK ? r->work : p == RENDER_PIXELS ? r->pixels : r->client;
}

static int alias(Render *r, RenderPlace from, RenderPlace to, Session **ret) {
        Session **s = &r->aliases[from][to];
        int error;

        if (!*s) {
                error = session_new_alias(base_of(r, from), base_of(r, to), from == RENDER_CLIENT_OUTPUT, s);
                if (error < 0)
                        return error;
                (*s)->split = r->client->split;
        }

        *ret = *s;
        return 0;
}

static void own_child(Render *r, Job *child) {
        r->child = child;
        child->done_fn = on_child_done;
        child->done_userdata = r;
}

/* Encode's plan says how many tokens the prompt has; nothing of it runs. */
static int plan_tokens(Render *r) {
        WireJobOpen q;
        RenderPlace from, to;
        Session *s = r->client;
        Job *child;
        int error = 0;

        render_make_request(r, RENDER_ENCODE, &q, &from, &to);
        q.flags = WIRE_JOB_PLAN_ONLY;
        q.output_offset = 0;
        q.output_size = r->client->output_bytes;
        r->stage = RENDER_STAGE_TOKENS;
        r->phase = RENDER_ENCODE; /* whose failure it would be */
        if (from != RENDER_CLIENT_INPUT)
                error = alias(r, from, RENDER_CLIENT_OUTPUT, &s);
        if (error >= 0)
                error = session_submit_hidden(s, r->client->conditioner, &q, NULL, r, &child);
        if (error < 0)
                return error;

        own_child(r, child);
        return 0;
}

static int start_phase(Render *r) {
        const LoraList *loras = r->phase == RENDER_SAMPLE ? &r->client->loras : NULL;
        RenderPlace from, to;
        WireJobOpen q;
        Session *s;
        Job *child;
        int error;

        render_make_request(r, r->phase, &q, &from, &to);
        error = alias(r, from, to, &s);
        if (error >= 0)
                error = session_submit_hidden(s, render_model(r, r->phase), &q, loras, r, &child);
        if (error < 0)
                return error;

        own_child(r, child);
        return 0;
}

void render_on_memory(void *userdata, Session *s, const Fault *f) {
        Render *r = userdata;

        if (!s) {
                *(r->stage == RENDER_STAGE_ROOM ? &r->pixels : &r->work) = NULL; /* it frees itself */
                fail(r, f);
                return;
        }

        r->memory_ready = true;
        (void) sd_event_source_set_enabled(r->next_source, SD_EVENT_ONESHOT);
}

static void weigh(Render *r) {
        r->measured = true;
        for (RenderPhase p = 0; p < _RENDER_PHASE_MAX; p++) {
                double bytes = (double) render_model(r, p)->info.weight_bytes + 1, pace = *render_pace(r, p);

                if (p == RENDER_CONDITION && r->o.n_pictures == 0)
                        continue;
                r->measured = r->measured && pace > 0;
                r->weights[p] = render_work(r, p) * (pace > 0 ? pace : bytes / PACE_BYTES);
        }
}

static int make_memory(Render *r) {
        uint64_t page = (uint64_t) sysconf(_SC_PAGESIZE);
        Fault f = {};
        int error;

        render_make_layout(r, &r->child_ready);
        weigh(r);
        r->stage = RENDER_STAGE_MEMORY;
        error = session_new_work(r->job->manager, r->job->uid, (r->sizes.work_bytes + page - 1) / page * page, render_on_memory, r,
                &r->work, &f);
        if (error >= 0)
                return 0;
        if (f.name[0] == '\0')
                return error;

        fail(r, &f);
        return 0;
}

/* Schedules are a few numbers; the arena that Sample reads is another one than they lie in. */
static int copy_sigmas(const Render *r) {
        const WireTensor *tensors[] = { &r->o.sample.sigmas_video, &r->o.sample.sigmas_audio };
        uint64_t at = r->sigmas.offset;
        char bytes[8192];

        for (size_t i = 0; i < ELEMENTSOF(tensors); i++) {
                size_t n = (size_t) tensors[i]->size;

                if (n > sizeof(bytes))
                        return -E2BIG;
                if (n > 0 && pread(r->client->input_fd, bytes, n, (off_t) tensors[i]->offset) != (ssize_t) n)
                        return -EIO;
                if (n > 0 && pwrite(r->work->output_fd, bytes, n, (off_t) at) != (ssize_t) n)
                        return -EIO;
                at += (n + WIRE_SLOT_ALIGN - 1) / WIRE_SLOT_ALIGN * WIRE_SLOT_ALIGN;
        }

        return 0;
}

/* The measured time of a phase is what later ones are weighed by. */
static void end_phase(Render *r) {
        double work = render_work(r, r->phase), done, all;

        if (r->phase == RENDER_CONDITION)
                render_condition_work(r, &done, &work, &all);
        r->took_usec[r->phase] += r->child_took_usec;
        if (!r->child_cached && work > 0 && r->child_compute_usec > 0 && !(r->phase == RENDER_CONDITION && r->item_sound))
                *render_pace(r, r->phase) = (double) r->child_compute_usec / work;
        render_take_results(r, r->phase);
        if (r->phase == RENDER_ENCODE)
                render_pictures_drop(r);
}

static void say_what_failed(Render *r) {
        Fault f = {};

        if (r->child_state == JOB_CANCELLED) /* nobody cancels a hidden job but the end of the service */
                (void) fault_set(&f, -ECANCELED, FAULT_CANCELLED, "The session was closed.");
        else
                (void) fault_set(&f, -EIO, r->child_fault.name, "Phase \"%s\": %s", render_phase_name(r->phase), r->child_fault.text);
        fail(r, &f);
}

/* The film is made, and written if it was to be. */
static void end_film(Render *r) {
        if (!r->film_made || (r->o.file >= 0 && !r->media_done))
                return;

        r->stage = RENDER_STAGE_END;
        job_finish(r->job, JOB_DONE, NULL);
}

static int encode_only(Render *r) {
        r->encoded = (RenderRange){ .place = RENDER_CLIENT_OUTPUT, .offset = r->o.output_offset, .size = r->o.output_size };
        r->stage = RENDER_STAGE_PHASES;
        r->phase = RENDER_ENCODE;
        return start_phase(r);
}

/* Pictures are being read. */
static int read_on(Render *r) {
        Fault f = {};
        int error;

        error = render_pictures_next(r, &f);
        if (error > 0)
                return r->o.encode_only ? encode_only(r) : plan_tokens(r);
        if (error == 0 || f.name[0] == '\0')
                return error;

        fail(r, &f);
        return 0;
}

static int next_phase(Render *r) {
        if (r->o.encode_only) {
                r->job->ready = r->child_ready;
                r->job->cached = r->child_cached;
                r->stage = RENDER_STAGE_END;
                job_finish(r->job, JOB_DONE, NULL);
                return 0;
        }

        if (r->phase == RENDER_CONDITION && render_condition_next(r))
                return start_phase(r);

        if (r->phase + 1 < _RENDER_PHASE_MAX) {
                r->phase++;
                return start_phase(r);
        }

        r->film_made = true;
        end_film(r);
        return 0;
}

/* What comes after what has just ended. */
static int go_on(Render *r) {
        int error;

        switch (r->stage) {

        case RENDER_STAGE_PROBE:
        case RENDER_STAGE_ROOM:
        case RENDER_STAGE_READ:
                return read_on(r);

        case RENDER_STAGE_TOKENS:
                return make_memory(r);

        case RENDER_STAGE_MEMORY:
                error = copy_sigmas(r);
                if (error < 0)
                        return error;
                r->stage = RENDER_STAGE_PHASES;
                r->phase = render_condition_first(r) ? RENDER_CONDITION : RENDER_ENCODE;
                return start_phase(r);

        case RENDER_STAGE_PHASES:
                end_phase(r);
                return next_phase(r);

        default:
                return 0;
        }
}

/* Those frames that the lost process had are not in the ring any more, the latents still are: the last phase is run once more. */
static void decode_again(Render *r) {
        int error;

        r->decode_again = r->film_made = false;
        if (STEAL(r->child_ended, false) && r->child_state == JOB_FAILED) {
                say_what_failed(r);
                return;
        }

        error = start_phase(r);
        if (error < 0)
                fail_errno(r, error);
}

static int on_next(sd_event_source *source, void *userdata) {
        Render *r = userdata;
        int error;

        if (r->media_error < 0) {
                fail_media(r, r->media_error, &r->media_fault);
                return 0;
        }
        if (r->decode_again) {
                decode_again(r);
                return 0;
        }
        if (STEAL(r->child_ended, false)) {
                if (r->child_state != JOB_DONE) {
                        say_what_failed(r);
                        return 0;
                }
        } else if (!STEAL(r->memory_ready, false) && !STEAL(r->read_ended, false)) {
                end_film(r);
                return 0;
        }

        error = go_on(r);
        if (error < 0)
                fail_errno(r, error);
        return 0;
}

static int check_models(const Session *s, const RenderOptions *o, Fault *f) {
        const char *partition = s->model->info.partition;
        bool references = o->n_pictures > 0 && o->pictures[0].kind != WIRE_CONDITION_KEYFRAME;
        const struct {
                const char *key;
                const Model *model;
        } parts[] = { { "conditioner", s->conditioner }, { "video-vae", s->video_vae }, { "audio-vae", s->audio_vae } };
        int r;

        r = session_check_kind(s, WIRE_JOB_SAMPLE, f);
        if (r < 0)
                return r;

        for (size_t i = 0; i < ELEMENTSOF(parts); i++)
                if (!parts[i].model)
                        return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                                "The session has no \"%s\", which Render needs: give it to OpenSession.", parts[i].key);

        if (references && strcmp(partition, "fl2va") == 0)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "\"pictures\" has references, which the session's denoiser does not take: it is of the fl2va partition. Use one of "
                        "the ref2va partition, or give keyframes.");
        if (!references && strcmp(partition, "ref2va") == 0)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "\"pictures\" has no references, which the session's denoiser is for: it is of the ref2va partition. Use one of "
                        "the fl2va partition.");
        return 0;
}

static void disown(RenderOptions *o) {
        o->file = -EBADF;
        for (uint32_t i = 0; i < o->n_pictures; i++)
                o->pictures[i].file = -EBADF;
}

static void own(RenderOptions *o, const RenderOptions *from) {
        o->file = from->file;
        for (uint32_t i = 0; i < o->n_pictures; i++)
                o->pictures[i].file = from->pictures[i].file;
}

void render_options_done(RenderOptions *o) {
        cleanup_closep(&o->file);
        for (uint32_t i = 0; i < o->n_pictures; i++)
                cleanup_closep(&o->pictures[i].file);
}

static int render_init(Session *s, const RenderOptions *o, Job *j, Render **ret) {
        Render *r;
        int error;

        r = calloc(1, sizeof(*r));
        if (!r)
                return -ENOMEM;

        r->job = j;
        r->client = s;
        r->o = *o;
        disown(&r->o); /* until nothing can fail any more */
        error = sd_event_add_defer(s->manager->event, &r->next_source, on_next, r);
        if (error >= 0)
                error = sd_event_source_set_enabled(r->next_source, SD_EVENT_OFF);
        if (error < 0) {
                (void) render_free(r);
                return error;
        }

        *ret = r;
        return 0;
}

/* The job has its place in the output arena and its models. */
static void attach(Session *s, const RenderOptions *o, Job *j) {
        j->session = s;
        j->session_id = s->id;
        s->n_busy++;
        j->model = s->model;
        model_user_add(j->model);
        j->loras = s->loras;
        lora_list_hold(&j->loras);
        if (j->kind == JOB_ENCODE)
                j->request.kind = WIRE_JOB_ENCODE;
        j->request.output_offset = o->output_offset;
        j->request.output_size = o->output_size;
        j->request.ring_frames = o->ring_frames;
}

/* The first thing that it does. */
static int begin(Render *r, const RenderOptions *o, Fault *f) {
        int error;

        if (o->n_pictures == 0)
                return plan_tokens(r);

        own(&r->o, o);
        error = render_pictures_start(r, f);
        if (error < 0)
                disown(&r->o);
        return error;
}

static int new_job(Session *s, Peer *owner, JobKind kind, const RenderOptions *o, Job **ret, Fault *f) {
        Job *j;
        int r;

        r = job_new(s->manager, owner, kind, &j, f);
        if (r < 0)
                return r;

        r = render_init(s, o, j, &j->render);
        if (r >= 0) {
                attach(s, o, j);
                r = begin(j->render, o, f);
        }
        if (r < 0) {
                (void) job_free(j);
                return r;
        }

        own(&j->render->o, o);
        *ret = j;
        return 0;
}

int render_new_encode(Session *s, Peer *owner, const RenderOptions *o, Job **ret, Fault *f) {
        return new_job(s, owner, JOB_ENCODE, o, ret, f);
}

int render_new(Session *s, Peer *owner, const RenderOptions *o, Job **ret, Fault *f) {
        uint64_t bytes;
        int r;

        r = check_models(s, o, f);
        if (r < 0)
                return r;
        if (s->lora_fault.name[0] != '\0')
                return fault_set(f, -EIO, s->lora_fault.name, "%s", s->lora_fault.text);

        r = o->file >= 0 ? media_check(s->manager->config, f) : 0;
        if (r >= 0 && o->width > 0)
                r = render_check_output(o, &bytes, f);
        if (r >= 0 && o->ring_frames > 0)
                r = session_check_rings(s, f);
        return r < 0 ? r : new_job(s, owner, JOB_RENDER, o, ret, f);
}

void render_stop(Render *r) {
        drop_child(r);
        r->stage = RENDER_STAGE_END;
        r->media = media_link_free(r->media);
        r->reader = media_link_free(r->reader);
        for (RenderPlace a = 0; a < _RENDER_PLACE_MAX; a++)
                for (RenderPlace b = 0; b < _RENDER_PLACE_MAX; b++)
                        if (r->aliases[a][b])
                                session_forget(STEAL_PTR(r->aliases[a][b]));
        render_pictures_drop(r);
        if (r->work)
                session_forget(STEAL_PTR(r->work));
        r->client = NULL; /* its job has let go of it, too */
}

Render *render_free(Render *r) {
        if (!r)
                return NULL;

        sd_event_source_disable_unref(r->next_source);
        render_options_done(&r->o);
        free(r);
        return NULL;
}

/* Fraction and time to the end over all phases. */
static void estimate(Render *r, const Job *child) {
        double done = 0, all = 0, part = child->fraction, left, before = 0, now = 1, phase = 1;
        Job *j = r->job;

        if (r->phase == RENDER_CONDITION) {
                render_condition_work(r, &before, &now, &phase);
                part = (before + now * child->fraction) / phase;
        }

        for (RenderPhase p = 0; p < _RENDER_PHASE_MAX; p++) {
                all += r->weights[p];
                done += p < r->phase ? r->weights[p] : p == r->phase ? r->weights[p] * part : 0;
        }
        if (r->o.encode_only)
                j->fraction = child->fraction;
        if (all <= 0)
                return;

        part = done / all;
        if (part > j->fraction) /* a worker's death takes a step back, the bar does not go there */
                j->fraction = part;
        left = all - done;
        if (child->eta_usec > 0) /* measured while it runs */
                left += (double) child->eta_usec - r->weights[r->phase] * now / phase * (1 - child->fraction);
        if (!r->measured)
                left = part > 0 ? (double) (clock_usec() - j->started_usec) * (1 - part) / part : 0;
        j->eta_usec = left > 0 && left < 1e15 ? (uint64_t) left : 0;
}

void render_on_progress(Render *r, const Job *child) {
        Job *j = r->job;

        if (child->kind == JOB_PLAN || child != r->child)
                return;

        if (child->state == JOB_RUNNING)
                job_start(j, render_phase_name(r->phase));
        /* "queue", "crash-wait" and "frames-wait" are told as they are. */
        j->phase = child->state == JOB_RUNNING && strcmp(child->phase, job_running_phase(child)) == 0 ? render_phase_name(r->phase)
                                                                                                     : child->phase;
        j->step = child->step;
        j->steps = child->steps;
        j->block = child->block;
        j->blocks = child->blocks;
        if (child->state == JOB_RUNNING)
                estimate(r, child);
        job_progress(j);
}

static void on_taken(void *userdata, uint64_t frames) {
        render_release_frames(userdata, frames);
}

/* Another process gets the frames, from the first one on: once. */
static void write_again(Render *r) {
        log_notice("latent-media was lost while it wrote a film: another one begins again.");
        r->media = media_link_free(r->media);
        r->media_again = r->decode_again = true;
        if (r->child)
                job_cancel(r->child); /* its end is told when the worker has let go of it */
        else
                (void) sd_event_source_set_enabled(r->next_source, SD_EVENT_ONESHOT);
}

static void on_written(void *userdata, const MediaDone *done, const Fault *f) {
        Render *r = userdata;

        if (r->stage == RENDER_STAGE_STOP) {
                job_finish(r->job, r->end_state, r->end_fault.name[0] != '\0' ? &r->end_fault : NULL);
                return;
        }
        if (!done && media_link_was_lost(r->media) && !r->media_again) {
                write_again(r);
                return;
        }
        if (!done) {
                fail_media(r, -EIO, f);
                return;
        }

        r->media_done = true;
        r->bytes = done->bytes;
        (void) sd_event_source_set_enabled(r->next_source, SD_EVENT_ONESHOT);
}

/* The first ones say where the frames lie: then latent-media starts, beside what follows. This is called from inside of the queue: a
 * failure is told from the loop. */
static void write_frames(Render *r, uint64_t ready) {
        const MediaHandlers handlers = { .taken = on_taken, .end = on_written, .userdata = r };
        MediaMessage m;
        int error;

        if (!r->media && r->media_error == 0) {
                render_make_write(r, &m);
                error = media_link_new(r->job->manager, &m, r->o.file, r->work->output_fd, &handlers, &r->media, &r->media_fault);
                if (error < 0) {
                        r->media_error = error;
                        (void) sd_event_source_set_enabled(r->next_source, SD_EVENT_ONESHOT);
                }
        }
        if (r->media)
                media_link_frames(r->media, ready, true);
}

void render_on_frames(Render *r, const Job *child) {
        Job *j = r->job;

        if (r->phase != RENDER_DECODE || child != r->child || child->frames_ready <= j->frames_ready)
                return;
        if (r->decode_again) /* the last ones of a decoder that is cancelled */
                return;

        r->child_ready = child->ready;
        render_take_results(r, RENDER_DECODE);
        if (r->o.file >= 0) {
                write_frames(r, child->frames_ready);
                return;
        }

        j->frames_ready = child->frames_ready;
        job_frames_ready(j);
}

void render_release_frames(Render *r, uint64_t up_to) {
        Fault f = {};

        if (r->child && r->phase == RENDER_DECODE && r->stage == RENDER_STAGE_PHASES)
                (void) job_release_frames(r->child, up_to, &f);
}

int render_result_tensor(const Render *r, uint32_t i, char ret_name[static 32], WireTensor *ret) {
        static const char *const names[] = { "frames", "sound", "video", "audio" };
        const WireTensor *tensors[] = { &r->frames_tensor, &r->sound_tensor, &r->video, &r->audio };

        if (r->o.format != _MEDIA_FORMAT_MAX) /* the first two are in the file */
                i += 2;
        if (i >= ELEMENTSOF(names) || (i >= 2 && !r->o.keep_latents))
                return -ENOENT;

        (void) snprintf(ret_name, 32, "%s", names[i]);
        *ret = *tensors[i];
        return 0;
}

int render_append_result(sd_bus_message *m, const Render *r) {
        int error;

        error = sd_bus_message_append(m, "{sv}{sv}{sv}{sv}", "frames", "t", (uint64_t) r->o.frames, "width", "u", r->o.width, "height", "u",
                r->o.height, "samples", "t", r->sound_tensor.shape[1]);
        if (error >= 0 && r->o.format != _MEDIA_FORMAT_MAX)
                error = sd_bus_message_append(m, "{sv}", "bytes", "t", r->bytes);
        if (error >= 0)
                error = sd_bus_message_open_container(m, 'e', "sv");
        if (error >= 0)
                error = sd_bus_message_append(m, "s", "phases");
        if (error >= 0)
                error = sd_bus_message_open_container(m, 'v', "a(st)");
        if (error >= 0)
                error = sd_bus_message_open_container(m, 'a', "(st)");
        if (r->o.n_pictures > 0 && error >= 0)
                error = sd_bus_message_append(m, "(st)", "read", r->read_usec);
        for (RenderPhase p = r->o.n_pictures > 0 ? RENDER_CONDITION : RENDER_ENCODE; p < _RENDER_PHASE_MAX && error >= 0; p++)
                error = sd_bus_message_append(m, "(st)", render_phase_name(p), r->took_usec[p]);
        for (int i = 0; i < 3 && error >= 0; i++)
                error = sd_bus_message_close_container(m);
        return error;
}
