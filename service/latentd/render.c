/* SPDX-License-Identifier: Apache-2.0 */
#include "service/latentd/render.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "service/latentd/bus-error.h"
#include "service/latentd/gpu-set.h"
#include "service/latentd/model.h"
#include "service/latentd/queue.h"
#include "service/latentd/render-internal.h"
#include "service/latentd/step-pace.h"
#include "service/latentd/worker-link.h"
#include "service/latentd/worker-start.h"
#include "service/shared/cleanup.h"
#include "service/shared/clock.h"
#include "service/shared/log.h"

/* The worker may be at something else when a phase wants it: that is waiting, as before the first. */
static void count_wait(Render *r, const Job *child) {
        if (r->child_waits && child->kind != JOB_LOAD)
                r->job->queued_usec += job_queued_usec(child);
        r->child_waits = false;
}

uint64_t render_waits_usec(const Render *r) {
        return r->child && r->child_waits && r->child->queued && r->child->state == JOB_QUEUED ? job_queued_usec(r->child) : 0;
}

static void on_child_done(void *userdata, const Job *j) {
        Render *r = userdata;
        char unused[32];

        r->child = NULL;
        r->child_ended = true;
        r->child_state = j->state;
        r->child_fault = j->fault;
        if (j->kind != JOB_LOAD)
                r->child_ready = j->ready;
        r->child_ranks = j->plan_ranks;
        r->child_plan = j->plan;
        r->child_step_usec = j->kind == JOB_PLAN && j->state == JOB_DONE ? step_pace_usec(j) : 0;
        r->child_took_usec = clock_usec() - j->created_usec;
        r->child_compute_usec = j->compute_usec;
        r->child_cached = j->cached;
        if (j->state == JOB_DONE && j->kind == JOB_SAMPLE)
                for (uint32_t i = 0; i < ELEMENTSOF(r->child_results); i++)
                        (void) job_result_tensor(j, i, unused, &r->child_results[i]);
        r->job->compute_usec += j->compute_usec;
        count_wait(r, j);
        if (j->kind == JOB_PLAN) /* its progress is nobody's, and what comes next may need no worker */
                r->job->phase = r->phase_before;
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
                count_wait(r, child);
                job_cancel(child);
        }
}

/* The files are the client's again. May free r. */
static void end_stop(Render *r) {
        if (!r->media_stops && !r->sheet_stops)
                job_finish(r->job, r->end_state, r->end_fault.name[0] != '\0' ? &r->end_fault : NULL);
}

/* Nobody hears of the end while latent-media may write. May free r. */
static void finish(Render *r, JobState state, const Fault *f) {
        drop_child(r);
        r->end_state = state;
        r->end_fault = f ? *f : (Fault){};
        r->stage = RENDER_STAGE_STOP;
        r->media_stops = r->media && media_link_stop(r->media);
        r->sheet_stops = r->sheet && media_link_stop(r->sheet);
        if (state == JOB_CANCELLED && (r->media_stops || r->sheet_stops))
                r->job->state = JOB_CANCELLING;
        end_stop(r);
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
        r->child_waits = r->job->state == JOB_RUNNING; /* else it is the job's own time in the queue */
        r->phase_before = r->job->phase;
        if (!child->queued || child->state != JOB_QUEUED)
                return;

        r->job->phase = child->phase;
        job_progress(r->job);
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
        if (from != RENDER_CLIENT_INPUT)
                error = alias(r, from, RENDER_CLIENT_OUTPUT, &s);
        if (error >= 0)
                error = session_submit_hidden(s, r->client->conditioner, &q, NULL, r, &child);
        if (error < 0)
                return error;

        own_child(r, child);
        return 0;
}

/* Whether there are GPUs for what comes, too: a film that cannot be decoded is not made first. What is not known before a worker
 * is there counts as good. */
static int check_parts(const Render *r, Fault *f) {
        const WorkerLink *w = r->client->manager->worker;
        const PlanWishes *wishes = &r->client->split;

        if (r->o.encode_only || worker_link_ranks(w) == 0)
                return 0;
        for (RenderPhase p = r->phase; p < _RENDER_PHASE_MAX; p++)
                if (worker_link_ranks_for(w, render_phase_kind(p), wishes) == 0)
                        return gpu_set_refuse(gpu_part_of(render_phase_kind(p)), wishes, f);
        return 0;
}

static int start_phase(Render *r) {
        const LoraList *loras = r->phase == RENDER_SAMPLE ? &r->client->loras : NULL;
        RenderPlace from, to;
        WireJobOpen q;
        Session *s;
        Job *child;
        Fault f = {};
        int error;

        if (check_parts(r, &f) < 0) {
                fail(r, &f);
                return 0;
        }
        render_make_request(r, r->phase, &q, &from, &to);
        if (r->plan_message)
                q.flags = WIRE_JOB_PLAN_ONLY | WIRE_JOB_UNREAD; /* there are none: render_assume_latents() */
        error = alias(r, from, to, &s);
        if (error >= 0)
                error = session_submit_hidden(s, render_model(r, r->phase), &q, loras, r, &child);
        if (error < 0)
                return error;

        own_child(r, child);
        return 0;
}

static bool loads_models(const Render *r) {
        if (r->o.encode_only)
                return false;

        for (RenderPhase p = 0; p < _RENDER_PHASE_MAX; p++)
                if (render_model(r, p)->defer)
                        return true;

        return false;
}

/* Of two that load models one after the other the second would want the memory that the first has only just made room in. */
static bool must_wait(const Render *r) {
        const Job *j;

        if (!loads_models(r))
                return false;

        TAILQ_FOREACH(j, &r->job->manager->unfinished, unfinished_entry) {
                if (j == r->job)
                        return false;
                if (j->kind == JOB_RENDER && loads_models(j->render))
                        return true;
        }

        return false;
}

static void let_others_begin(const Render *r) {
        Job *j;

        TAILQ_FOREACH(j, &r->job->manager->unfinished, unfinished_entry)
                if (j->kind == JOB_RENDER && j != r->job && j->render->waiting)
                        (void) sd_event_source_set_enabled(j->render->next_source, SD_EVENT_ONESHOT);
}

static int load_part(Render *r) {
        Job *child;
        int error;

        error = job_new_hidden(r->job->manager, r->job->uid, JOB_LOAD, &child);
        if (error < 0)
                return error;

        child->render = r;
        own_child(r, child);
        r->loading = true;
        error = model_want(r->wanted, child); /* which may have ended it */
        if (error < 0) {
                r->child = NULL;
                r->loading = false;
                child->done_fn = NULL;
                (void) job_free(child);
        }
        return error;
}

static void want(Render *r, Model *m) {
        if (r->wanted == m)
                return;

        if (r->wanted)
                model_wanted_remove(r->wanted);
        r->wanted = m;
        if (m)
                model_wanted_add(m);
}

/* The phase has its turn; its model may have to be loaded first. */
static int begin(Render *r) {
        Model *m = render_model(r, r->phase);

        want(r, m->defer ? m : NULL);
        if (m->defer && (m->state == MODEL_DEFERRED || m->state == MODEL_LOADING))
                return load_part(r);

        return r->stage == RENDER_STAGE_TOKENS ? plan_tokens(r) : start_phase(r);
}

/* What a deferred model is turns out now. */
static int end_load(Render *r) {
        const WireModelKind kinds[] = {
                [RENDER_ENCODE] = WIRE_MODEL_CONDITIONER,
                [RENDER_CONDITION] = r->item_sound ? WIRE_MODEL_AUDIO_VAE : WIRE_MODEL_VIDEO_VAE,
                [RENDER_SAMPLE] = WIRE_MODEL_DENOISER,
                [RENDER_SOUND] = WIRE_MODEL_AUDIO_VAE,
                [RENDER_DECODE] = WIRE_MODEL_VIDEO_VAE,
        };
        const Model *m = r->wanted;
        Fault f = {};

        if (m->state != MODEL_READY) /* somebody else had it go again */
                return begin(r);

        render_measure_load(r, m->bytes_read, r->child_took_usec);
        if (m->info.kind != (uint32_t) kinds[r->phase]) {
                (void) fault_set(&f, -EINVAL, FAULT_INVALID_ARGUMENT, "Phase \"%s\": \"%.64s\" is a model of kind \"%s\", expected \"%s\".",
                        render_phase_name(r->phase), m->name, model_kind_to_string(m->info.kind), model_kind_to_string(kinds[r->phase]));
                fail(r, &f);
                return 0;
        }

        render_weigh(r);
        return begin(r);
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

static int make_memory(Render *r) {
        uint64_t page = (uint64_t) sysconf(_SC_PAGESIZE);
        Fault f = {};
        int error;

        render_make_layout(r, &r->child_ready);
        r->planned[RENDER_ENCODE] = (struct RenderPlanned){
                .known = true, .memory = r->child_ready.memory_bytes, .steps = 1, .ranks = r->child_ranks };
        render_weigh(r);
        error = render_check_memory(r, &f);
        if (error < 0) {
                fail(r, &f);
                return 0;
        }

        r->stage = RENDER_STAGE_MEMORY;
        error = session_new_work(r->job->manager, r->job->uid, (r->sizes.work_bytes + page - 1) / page * page, r->plan_message != NULL,
                render_on_memory, r, &r->work, &f);
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
                at += wire_slot_pad(n);
        }

        return 0;
}

/* The measured time of a phase is what later ones are weighed by. */
static void end_phase(Render *r) {
        r->took_usec[r->phase] += r->child_took_usec;
        if (!r->child_cached && r->child_compute_usec > 0)
                render_measure_phase(r, r->phase, r->child_compute_usec);
        render_take_results(r, r->phase);
}

static void say_what_failed(Render *r) {
        Fault f = {};

        if (r->child_state == JOB_CANCELLED) /* nobody cancels a hidden job but the end of the service */
                (void) fault_set(&f, -ECANCELED, FAULT_CANCELLED, "The session was closed.");
        else
                (void) fault_set(&f, -EIO, r->child_fault.name, "Phase \"%s\": %s", render_phase_name(r->phase), r->child_fault.text);
        fail(r, &f);
}

/* Fraction and time to the end over all phases: of the one that runs, or behind the last one of what is still to be written, this part
 * is done, and it takes eta_usec more (0: not known). */
static void estimate(Render *r, double part_of_it, uint64_t eta_usec) {
        double done = 0, all = r->tail, here = r->film_made ? r->tail : r->weights[r->phase] + r->loads[r->phase], part, left;
        bool measured = true;
        Job *j = r->job;

        for (RenderPhase p = 0; p < _RENDER_PHASE_MAX; p++) {
                double w = r->weights[p] + r->loads[p];

                all += w;
                done += p < r->phase || r->film_made ? w : 0;
                measured = measured && (p <= r->phase || r->measured[p]);
        }
        done += here * part_of_it;
        if (all <= 0)
                return;

        part = done < all ? done / all : 1; /* sums round */
        if (part > j->fraction) /* a worker's death takes a step back, the bar does not go there */
                j->fraction = part;
        left = all - done;
        if (eta_usec > 0) /* measured while it runs */
                left += (double) eta_usec - here * (1 - part_of_it);
        if (!measured || (eta_usec == 0 && !r->film_made && !r->measured[r->phase])) {
                bool timed = r->film_made || r->phase > RENDER_SAMPLE || (r->phase == RENDER_SAMPLE && eta_usec > 0);
                double so_far = (double) (clock_usec() - j->started_usec);

                /* Before a step of the denoiser was timed nothing says what the guessed weights are in seconds. */
                left = timed && part > 0 ? so_far * (1 - part) / part : 0;
        }
        j->eta_usec = left > 0 && left < 1e15 ? (uint64_t) left : 0;
}

/* The film is made, and written if it was to be. */
static void end_film(Render *r) {
        if (!r->film_made || (render_to_file(&r->o) && (!r->media_done || !r->sheet_over)))
                return;

        if (render_to_file(&r->o))
                render_measure_write(r, clock_usec() - r->film_made_usec);
        r->stage = RENDER_STAGE_END;
        job_finish(r->job, JOB_DONE, NULL);
}

static int encode_only(Render *r) {
        r->encoded = (RenderRange){ .place = RENDER_CLIENT_OUTPUT, .offset = r->o.output_offset, .size = r->o.output_size };
        r->stage = RENDER_STAGE_PHASES;
        return start_phase(r);
}

/* Without a prompt: what does not fit so will not fit with it. Behind others nothing can be said yet. */
static int check_memory(Render *r, Fault *f) {
        render_make_layout(r, &(WireJobReady){});
        render_weigh(r);
        return r->waiting ? 0 : render_check_memory(r, f);
}

/* Pictures are being read. */
static int read_on(Render *r) {
        Fault f = {};
        int error;

        error = render_pictures_next(r, &f);
        if (error > 0 && r->o.encode_only)
                return encode_only(r);
        if (error > 0) {
                r->stage = RENDER_STAGE_TOKENS;
                error = check_memory(r, &f);
                if (error >= 0)
                        return begin(r);
        }
        if (error == 0 || f.name[0] == '\0')
                return error;

        fail(r, &f);
        return 0;
}

/* What latent-media has still to write of a film that is made. */
static void tell_writing(Render *r, uint64_t taken) {
        Job *j = r->job;

        j->phase = "write";
        j->step = (uint32_t) taken;
        j->steps = r->o.frames;
        j->block = j->blocks = 0;
        estimate(r, (double) taken / r->o.frames, 0);
        job_progress(j);
}

static void end_phases(Render *r) {
        want(r, NULL);
        r->film_made = true;
        r->film_made_usec = clock_usec();
        if (render_to_file(&r->o) && !r->media_done)
                tell_writing(r, r->taken);
        end_film(r);
}

/* The next one that can be planned: whose model is there. */
static int plan_next(Render *r) {
        while (++r->phase < _RENDER_PHASE_MAX)
                if (render_has_phase(r, r->phase) && render_model(r, r->phase)->state == MODEL_READY)
                        return start_phase(r);

        job_finish(r->job, JOB_DONE, NULL); /* which answers */
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

        if (r->phase == RENDER_DECODE) {
                end_phases(r);
                return 0;
        }

        if (r->phase == RENDER_CONDITION) {
                if (render_condition_next(r))
                        return begin(r);
                render_pictures_drop(r);
        }

        r->phase++;
        if (r->phase == RENDER_CONDITION && !render_condition_first(r))
                r->phase++;
        return begin(r);
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
                if (!r->plan_message)
                        return begin(r);

                render_take_results(r, RENDER_ENCODE);
                render_assume_latents(r);
                return plan_next(r);

        case RENDER_STAGE_PHASES:
                if (r->plan_message) {
                        r->planned[r->phase] =
                                (struct RenderPlanned){ true, r->child_ready.memory_bytes, r->child_ready.steps, r->child_ranks,
                                        r->child_plan, r->child_step_usec };
                        return plan_next(r);
                }

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

        error = begin(r); /* its model may have left meanwhile */
        if (error < 0)
                fail_errno(r, error);
}

/* What it does first. */
static int first(Render *r, Fault *f) {
        if (r->o.n_pictures > 0)
                return render_pictures_start(r, f);

        r->stage = RENDER_STAGE_TOKENS;
        return begin(r);
}

/* It has its turn. */
static int begin_first(Render *r) {
        Fault f = {};
        int error;

        error = first(r, &f);
        if (error >= 0 || f.name[0] == '\0')
                return error;

        fail(r, &f);
        return 0;
}

/* The files were looked at, or one that it waits for may be over. */
static int wait_on(Render *r) {
        if (r->files_fault.name[0] != '\0') {
                fail(r, &r->files_fault);
                return 0;
        }

        r->waiting = r->files || must_wait(r);
        return r->waiting ? 0 : begin_first(r);
}

static int on_next(sd_event_source *source, void *userdata) {
        Render *r = userdata;
        int error;

        if (r->media_error < 0) {
                fail_media(r, r->media_error, &r->media_fault);
                return 0;
        }
        if (r->decode_again) {
                if (!r->sheet_stops)
                        decode_again(r);
                return 0;
        }
        if (STEAL(r->child_ended, false)) {
                if (r->child_state != JOB_DONE) {
                        say_what_failed(r);
                        return 0;
                }
                error = STEAL(r->loading, false) ? end_load(r) : go_on(r);
        } else if (STEAL(r->memory_ready, false) || STEAL(r->read_ended, false))
                error = go_on(r);
        else if (r->waiting)
                error = wait_on(r);
        else {
                end_film(r);
                return 0;
        }

        if (error < 0)
                fail_errno(r, error);
        return 0;
}

static int check_models(const Session *s, const RenderOptions *o, Fault *f) {
        const char *partition = s->model->partition; /* known before it is loaded */
        bool references = o->n_pictures > 0 && o->pictures[0].kind != WIRE_CONDITION_KEYFRAME;
        const struct {
                const char *key;
                const Model *model;
        } parts[] = { { "conditioner", s->conditioner }, { "video-vae", s->video_vae }, { "audio-vae", s->audio_vae } };
        int r;

        r = s->model->defer && s->model->state != MODEL_READY ? 0 : session_check_kind(s, WIRE_JOB_SAMPLE, f); /* end_load() does */
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
        o->file = o->sheet = -EBADF;
        for (uint32_t i = 0; i < o->n_pictures; i++)
                o->pictures[i].file = -EBADF;
}

static void own(RenderOptions *o, const RenderOptions *from) {
        o->file = from->file;
        o->sheet = from->sheet;
        for (uint32_t i = 0; i < o->n_pictures; i++)
                o->pictures[i].file = from->pictures[i].file;
}

void render_options_done(RenderOptions *o) {
        cleanup_closep(&o->file);
        cleanup_closep(&o->sheet);
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
        if (o->width > 0)
                render_drop_preview(&r->o);
        disown(&r->o); /* until nothing can fail any more */
        r->sheet_over = o->sheet < 0;
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

/* The job has its models, and unless it is a plan its place in the output arena. */
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
        if (j->hidden)
                return;

        j->request.output_offset = o->output_offset;
        j->request.output_size = o->output_size;
        j->request.ring_frames = o->ring_frames;
}

/* Models and sizes; what the pictures' files are is not known yet. */
static int check(const Session *s, const RenderOptions *o, bool plan, Fault *f) {
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
        if (r >= 0 && o->ring_frames > 0 && !plan)
                r = session_check_rings(s, f);
        return r;
}

/* Nothing of it has failed so far. Of pictures that nobody has looked at no sizes are known. */
static int start(Render *r, Fault *f) {
        int error = 0;

        r->waiting = must_wait(r);
        if (r->o.n_pictures == 0)
                error = check_memory(r, f);
        if (error >= 0 && !r->o.encode_only)
                error = render_files_start(r, f);
        if (error < 0)
                return error;

        r->waiting = r->waiting || r->files;
        return r->waiting ? 0 : first(r, f);
}

static int new_job(Session *s, Peer *owner, JobKind kind, const RenderOptions *o, sd_bus_message *plan, Job **ret, Fault *f) {
        Job *j;
        int r;

        r = job_new(s->manager, owner, kind, &j, f);
        if (r < 0)
                return r;

        r = render_init(s, o, j, &j->render);
        if (r < 0) {
                (void) job_free(j);
                return r;
        }

        j->hidden = plan != NULL;
        j->render->plan_message = plan;
        attach(s, o, j);
        if (!plan)
                own(&j->render->o, o);
        r = start(j->render, f);
        if (r < 0) {
                disown(&j->render->o);
                (void) job_free(j);
                return r;
        }

        *ret = j;
        return 0;
}

int render_new_encode(Session *s, Peer *owner, const RenderOptions *o, Job **ret, Fault *f) {
        return new_job(s, owner, JOB_ENCODE, o, NULL, ret, f);
}

int render_new(Session *s, Peer *owner, const RenderOptions *o, Job **ret, Fault *f) {
        int r;

        r = check(s, o, false, f);
        return r < 0 ? r : new_job(s, owner, JOB_RENDER, o, NULL, ret, f);
}

static void on_planned(void *userdata, const Job *j) {
        CLEANUP(sd_bus_message_unrefp) sd_bus_message *message = userdata;
        CLEANUP(sd_bus_error_free) sd_bus_error error = SD_BUS_ERROR_NULL;
        Fault f = j->fault;

        if (j->state == JOB_DONE) {
                (void) render_plan_reply(j->render, message);
                return;
        }

        (void) fault_set(&f, -ECANCELED, FAULT_CANCELLED, "The session was closed."); /* a fault that is there stays */
        (void) bus_error_fault(&error, -EIO, &f);
        (void) sd_bus_reply_method_error(message, &error);
}

int render_plan(Session *s, Peer *owner, const RenderOptions *o, sd_bus_message *message, Fault *f) {
        Job *j;
        int r;

        r = check(s, o, true, f);
        if (r >= 0)
                r = new_job(s, owner, JOB_RENDER, o, message, &j, f);
        if (r < 0)
                return r;

        j->done_fn = on_planned;
        j->done_userdata = sd_bus_message_ref(message); /* on_planned()'s */
        return 0;
}

void render_stop(Render *r) {
        drop_child(r);
        render_files_stop(r);
        r->stage = RENDER_STAGE_END;
        r->media = media_link_free(r->media);
        r->reader = media_link_free(r->reader);
        r->sheet = media_link_free(r->sheet);
        want(r, NULL);
        let_others_begin(r);
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

/* Of the phase that runs, when its child is at this part of its own. A model is read before what runs on it. */
static double part_of_phase(const Render *r, double part) {
        double load = r->loads[r->phase], weight = r->weights[r->phase], all = load + weight, own, before = 0, now = 1, items = 1;

        if (all <= 0)
                return 0;

        own = load;
        if (r->phase == RENDER_CONDITION) {
                render_condition_work(r, &before, &now, &items);
                own = r->item_sound ? r->load_of_sounds : load - r->load_of_sounds;
                load = r->item_sound ? load : own;
        }
        return (r->loading ? load - own * (1 - part) + weight * before / items : load + weight * (before + now * part) / items) / all;
}

static void estimate_with(Render *r, const Job *child) {
        double here = r->loads[r->phase] + r->weights[r->phase], rest = here * (1 - part_of_phase(r, 1));
        uint64_t eta = child->eta_usec;

        if (r->o.encode_only) {
                r->job->fraction = child->fraction;
                r->job->eta_usec = eta;
                return;
        }

        /* The phase takes more than this child. */
        if (eta > 0 && rest > 0)
                eta = r->measured[r->phase] ? eta + (uint64_t) rest : 0;
        estimate(r, part_of_phase(r, child->fraction), eta);
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
                estimate_with(r, child);
        job_progress(j);
}

/* What both have taken may be made anew. */
static void release(Render *r) {
        render_release_frames(r, r->sheet_over || r->taken < r->sheet_taken ? r->taken : r->sheet_taken);
        if (r->film_made)
                tell_writing(r, r->taken);
}

static void on_taken(void *userdata, uint64_t frames) {
        Render *r = userdata;

        r->taken = frames;
        release(r);
}

static void on_sheet_taken(void *userdata, uint64_t frames) {
        Render *r = userdata;

        r->sheet_taken = frames;
        release(r);
}

static void on_sheet(void *userdata, const MediaDone *done, const Fault *f) {
        Render *r = userdata;
        bool stopped = STEAL(r->sheet_stops, false);

        if (r->stage == RENDER_STAGE_STOP) {
                end_stop(r);
                return;
        }
        if (stopped) { /* for it, too, the frames come again */
                r->sheet = media_link_free(r->sheet);
                (void) sd_event_source_set_enabled(r->next_source, SD_EVENT_ONESHOT);
                return;
        }

        r->sheet_over = true;
        if (done)
                r->sheet_bytes = done->bytes;
        else
                r->sheet_fault = *f;
        release(r);
        (void) sd_event_source_set_enabled(r->next_source, SD_EVENT_ONESHOT);
}

static void start_sheet(Render *r) {
        const MediaHandlers handlers = { .taken = on_sheet_taken, .end = on_sheet, .userdata = r };
        MediaMessage m;
        int error;

        render_make_sheet(r, &m);
        error = media_link_new(r->job->manager, &m, r->o.sheet, r->work->output_fd, &handlers, &r->sheet, &r->sheet_fault);
        r->sheet_over = error < 0;
        if (error < 0)
                (void) fault_set(&r->sheet_fault, error, FAULT_INTERNAL, "latent-media could not be started: %s.", strerror(-error));
}

/* Another process gets the frames, from the first one on: once. */
static void write_again(Render *r) {
        log_notice("latent-media was lost while it wrote a film: another one begins again.");
        r->media = media_link_free(r->media);
        r->media_again = r->decode_again = true;
        r->taken = 0;
        if (r->sheet && !r->sheet_over) {
                r->sheet_taken = 0;
                r->sheet_stops = media_link_stop(r->sheet);
                if (!r->sheet_stops)
                        r->sheet = media_link_free(r->sheet);
        }
        if (r->child)
                job_cancel(r->child); /* its end is told when the worker has let go of it */
        else
                (void) sd_event_source_set_enabled(r->next_source, SD_EVENT_ONESHOT);
}

static void on_written(void *userdata, const MediaDone *done, const Fault *f) {
        Render *r = userdata;

        if (r->stage == RENDER_STAGE_STOP) {
                r->media_stops = false;
                end_stop(r);
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
        if (!r->sheet && !r->sheet_over)
                start_sheet(r);
        if (r->sheet)
                media_link_frames(r->sheet, ready, false);
}

void render_on_frames(Render *r, const Job *child) {
        Job *j = r->job;

        if (r->phase != RENDER_DECODE || child != r->child || child->frames_ready <= j->frames_ready)
                return;
        if (r->decode_again) /* the last ones of a decoder that is cancelled */
                return;

        r->child_ready = child->ready;
        render_take_results(r, RENDER_DECODE);
        if (render_to_file(&r->o)) {
                write_frames(r, child->frames_ready);
                return;
        }

        j->frames_ready = child->frames_ready;
        job_frames_ready(j);
}

void render_on_preview(Render *r, const Job *child) {
        r->preview = child->ready.outputs[0].tensor;
        r->job->preview_step = child->step;
        job_preview_ready(r->job);
}

void render_release_frames(Render *r, uint64_t up_to) {
        Fault f = {};

        if (r->child && r->phase == RENDER_DECODE && r->stage == RENDER_STAGE_PHASES)
                (void) job_release_frames(r->child, up_to, &f);
}

bool render_left_latents(const Render *r) {
        return r->job->state == JOB_FAILED && r->o.keep_latents && r->video.size > 0 && r->audio.size > 0;
}

int render_result_tensor(const Render *r, uint32_t i, char ret_name[static 32], WireTensor *ret) {
        bool failed = r->job->state == JOB_FAILED, frames = !render_to_file(&r->o) && !failed, latents = r->o.keep_latents;
        const struct {
                const char *name;
                const WireTensor *tensor;
                bool given;
        } all[] = {
                { "frames", &r->frames_tensor, frames },
                { "sound", &r->sound_tensor, frames },
                { "video", &r->video, latents },
                { "audio", &r->audio, latents },
                { "preview", &r->preview, !failed },
        };

        for (size_t k = 0; k < ELEMENTSOF(all); k++) {
                if (!all[k].given || all[k].tensor->size == 0 || i-- > 0) /* some are not known yet */
                        continue;
                (void) snprintf(ret_name, 32, "%s", all[k].name);
                *ret = *all[k].tensor;
                return 0;
        }

        return -ENOENT;
}

int render_append_result(sd_bus_message *m, const Render *r) {
        int error;

        /* In a file the sound is as long as the pictures: it is cut, or goes on with silence. */
        error = sd_bus_message_append(m, "{sv}{sv}{sv}{sv}", "frames", "t", (uint64_t) r->o.frames, "width", "u", r->o.width, "height", "u",
                r->o.height, "samples", "t",
                render_to_file(&r->o) ? (uint64_t) r->o.frames * MEDIA_SAMPLE_RATE / MEDIA_FPS : r->sound_tensor.shape[1]);
        if (error >= 0 && render_to_file(&r->o))
                error = sd_bus_message_append(m, "{sv}", "bytes", "t", r->bytes);
        if (error >= 0 && r->sheet_bytes > 0)
                error = sd_bus_message_append(m, "{sv}", "sheet-bytes", "t", r->sheet_bytes);
        if (error >= 0 && r->sheet_fault.name[0] != '\0')
                error = sd_bus_message_append(m, "{sv}", "sheet-error", "(ss)", r->sheet_fault.name, r->sheet_fault.text);
        if (error >= 0)
                error = bus_open_list(m, "phases", "(st)");
        if (r->o.n_pictures > 0 && error >= 0)
                error = sd_bus_message_append(m, "(st)", "read", r->read_usec);
        for (RenderPhase p = 0; p < _RENDER_PHASE_MAX && error >= 0; p++)
                if (render_has_phase(r, p))
                        error = sd_bus_message_append(m, "(st)", render_phase_name(p), r->took_usec[p]);
        return error < 0 ? error : bus_close_list(m);
}
