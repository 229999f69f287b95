/* SPDX-License-Identifier: Apache-2.0 */
#include "service/latentd/job.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "service/latentd/model.h"
#include "service/latentd/peer.h"
#include "service/latentd/queue.h"
#include "service/latentd/quota.h"
#include "service/latentd/render.h"
#include "service/latentd/session.h"
#include "service/latentd/worker-link.h"
#include "service/shared/cleanup.h"
#include "service/shared/clock.h"

#define PROGRESS_INTERVAL_USEC (UINT64_C(100) * 1000)
#define FINISHED_MAX 256

static int make(Manager *m, Peer *owner, uid_t uid, JobKind kind, Job **ret) {
        Job *j;

        j = calloc(1, sizeof(*j));
        if (!j)
                return -ENOMEM;

        *j = (Job){
                .id = m->next_id++,
                .manager = m,
                .owner = owner,
                .uid = uid,
                .kind = kind,
                .hidden = kind == JOB_PLAN || !owner,
                .state = JOB_QUEUED,
                .phase = "queue",
                .created_usec = clock_usec(),
        };
        j->progress_sent_usec = j->created_usec;
        TAILQ_INSERT_TAIL(&m->jobs, j, entry);
        TAILQ_INSERT_TAIL(&m->unfinished, j, unfinished_entry);
        *ret = j;
        return 0;
}

int job_new(Manager *m, Peer *owner, JobKind kind, Job **ret, Fault *f) {
        int r;

        r = quota_check_job(m, owner->uid, f);
        if (r < 0)
                return r;

        return make(m, owner, owner->uid, kind, ret);
}

int job_new_hidden(Manager *m, uid_t uid, JobKind kind, Job **ret) {
        return make(m, NULL, uid, kind, ret);
}

/* A Render, which is hidden when it is only planned, or an Encode of files, which is the beginning of one; not its hidden jobs. */
static bool owns_render(const Job *j) {
        return j->render && (j->kind == JOB_RENDER || !j->hidden);
}

/* Lets go of everything that a finished job does not need. */
static void drop_references(Job *j) {
        Manager *m = j->manager;
        Session *session = STEAL_PTR(j->session);
        Model *model = STEAL_PTR(j->model);

        if (owns_render(j))
                render_stop(j->render);
        if (m->queue)
                queue_remove(m->queue, j);
        if (m->worker && j->kind != JOB_LOAD)
                worker_link_close_job(m->worker, j);
        if (session)
                session_job_finished(session);
        if (model && j->kind != JOB_LOAD)
                model_user_remove(model);
        lora_list_done(&j->loras);
}

/* Whoever waits for it hears of its end, whatever that is. */
static void tell_end(Job *j) {
        JobDoneFn fn = STEAL_PTR(j->done_fn);

        if (fn)
                fn(j->done_userdata, j);
}

Job *job_free(Job *j) {
        if (!j)
                return NULL;

        tell_end(j);
        drop_references(j);
        if (!job_is_finished(j))
                TAILQ_REMOVE(&j->manager->unfinished, j, unfinished_entry);
        else if (j->owner)
                j->owner->n_finished--;
        TAILQ_REMOVE(&j->manager->jobs, j, entry);
        lora_notes_done(&j->notes);
        free(j->result_model);
        if (owns_render(j))
                (void) render_free(j->render);
        free(j);
        return NULL;
}

Job *job_find(Manager *m, uint64_t id) {
        Job *j;

        /* The newest ones are asked for most. */
        TAILQ_FOREACH_REVERSE(j, &m->jobs, JobList, entry)
                if (j->id <= id)
                        return j->id == id ? j : NULL;

        return NULL;
}

const char *job_kind_to_string(JobKind k) {
        static const char *const names[] = {
                [JOB_LOAD] = "load", [JOB_STEP] = "step", [JOB_SAMPLE] = "sample",
                [JOB_MERGE] = "merge", [JOB_TOKENIZE] = "tokenize", [JOB_ENCODE] = "encode",
                [JOB_DECODE] = "decode", [JOB_ENCODE_MEDIA] = "encode-media", [JOB_PLAN] = "plan",
                [JOB_RENDER] = "render",
        };

        return names[k];
}

const char *job_running_phase(const Job *j) {
        return j->kind == JOB_STEP || j->kind == JOB_PLAN ? "sample" : job_kind_to_string(j->kind);
}

bool job_writes_output(const Job *j) {
        return j->kind != JOB_LOAD && j->kind != JOB_MERGE && j->kind != JOB_PLAN;
}

const char *job_state_to_string(JobState s) {
        static const char *const names[] = {
                [JOB_QUEUED] = "queued",
                [JOB_RUNNING] = "running",
                [JOB_CANCELLING] = "cancelling",
                [JOB_DONE] = "done",
                [JOB_FAILED] = "failed",
                [JOB_CANCELLED] = "cancelled",
        };

        return names[s];
}

bool job_is_finished(const Job *j) {
        return j->state >= JOB_DONE;
}

int job_path(const Job *j, char **ret) {
        char *p;

        if (asprintf(&p, BUS_ROOT "/job/%" PRIu64, j->id) < 0)
                return -ENOMEM;

        *ret = p;
        return 0;
}

void job_start(Job *j, const char *phase) {
        if (j->state != JOB_QUEUED)
                return;

        j->state = JOB_RUNNING;
        j->phase = phase;
        j->started_usec = clock_usec();
        j->queued_usec = j->started_usec - j->created_usec;
}

uint64_t job_queued_usec(const Job *j) {
        if (j->state == JOB_QUEUED)
                return clock_usec() - j->created_usec;
        return j->queued_usec + (owns_render(j) ? render_waits_usec(j->render) : 0);
}

static void send_progress(Job *j) {
        j->progress_waits = false;
        j->progress_sent_usec = clock_usec();
        (void) job_bus_send_progress(j); /* may be lost, as documented */
}

/* False: not now. */
static bool send_frames(Job *j) {
        j->frames_wait = job_bus_send_frames(j, true) <= 0;
        if (!j->frames_wait)
                j->frames_told = j->frames_ready;
        return !j->frames_wait;
}

static int arm_progress_timer(Manager *m, uint64_t usec);

static int on_progress_timer(sd_event_source *source, uint64_t usec, void *userdata) {
        Manager *m = userdata;
        uint64_t now = clock_usec(), next = UINT64_MAX;
        Job *j;

        m->progress_usec = 0;
        TAILQ_FOREACH(j, &m->unfinished, unfinished_entry) {
                uint64_t due = j->progress_sent_usec + PROGRESS_INTERVAL_USEC;

                if (j->frames_wait && j->owner && !send_frames(j))
                        next = now + PROGRESS_INTERVAL_USEC < next ? now + PROGRESS_INTERVAL_USEC : next;
                if (!j->progress_waits || !j->owner)
                        continue;
                if (due <= now)
                        send_progress(j);
                else if (due < next)
                        next = due;
        }

        if (next != UINT64_MAX)
                (void) arm_progress_timer(m, next);
        return 0;
}

/* One for all jobs, set only where it would go off too late: what is over within a tenth of a second costs nothing. */
static int arm_progress_timer(Manager *m, uint64_t usec) {
        int r;

        if (m->progress_usec != 0 && m->progress_usec <= usec)
                return 0;

        if (!m->progress_timer)
                r = sd_event_add_time(m->event, &m->progress_timer, CLOCK_MONOTONIC, usec, 1000, on_progress_timer, m);
        else {
                r = sd_event_source_set_time(m->progress_timer, usec);
                if (r >= 0)
                        r = sd_event_source_set_enabled(m->progress_timer, SD_EVENT_ONESHOT);
        }
        if (r >= 0)
                m->progress_usec = usec;
        return r;
}

void job_progress(Job *j) {
        uint64_t due = j->progress_sent_usec + PROGRESS_INTERVAL_USEC;

        if (job_is_finished(j))
                return;
        if (j->hidden && j->render)
                render_on_progress(j->render, j);
        if (!j->owner || j->hidden)
                return;

        if (clock_usec() >= due) {
                send_progress(j);
                return;
        }

        j->progress_waits = true;
        (void) arm_progress_timer(j->manager, due);
}

void job_frames_ready(Job *j) {
        if (j->hidden && j->render)
                render_on_frames(j->render, j);
        if (j->frames_told == j->frames_ready || !j->owner || j->hidden)
                return;

        if (!send_frames(j))
                (void) arm_progress_timer(j->manager, clock_usec() + PROGRESS_INTERVAL_USEC);
}

void job_preview_ready(Job *j) {
        if (j->owner && !j->hidden)
                (void) job_bus_send_preview(j);
}

int job_release_frames(Job *j, uint64_t up_to, Fault *f) {
        if (j->kind != JOB_DECODE && j->kind != JOB_RENDER)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                                 "This is a job of kind \"%s\", frames are made by \"decode\" and \"render\".",
                                 job_kind_to_string(j->kind));

        if (up_to > j->frames_ready)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                                 "Frames up to %" PRIu64 " cannot be released, only %" PRIu64 " were ready so far.", up_to,
                                 j->frames_ready);

        if (up_to > j->frames_released)
                j->frames_released = up_to;
        if (job_is_finished(j))
                return 0;
        if (j->kind == JOB_RENDER)
                render_release_frames(j->render, j->frames_released);
        else if (j->manager->queue)
                queue_dispatch(j->manager->queue);
        return 0;
}

bool job_has_room(const Job *j) {
        const WireJobReady *y = &j->ready;
        uint64_t left, next;

        if (j->kind != JOB_DECODE || !j->opened || y->ring_frames >= y->frames)
                return true;

        left = y->frames - j->frames_done;
        next = y->step_frames < left ? y->step_frames : left;
        return j->frames_done + next <= j->frames_released + y->ring_frames;
}

bool job_has_result(const Job *j) {
        bool frames = j->kind == JOB_DECODE || j->kind == JOB_RENDER;

        if (j->kind == JOB_RENDER && render_left_latents(j->render))
                return true;

        return j->state == JOB_DONE || (frames && j->state < JOB_DONE && (j->frames_ready > 0 || j->preview_step > 0));
}

/* Forgets the oldest finished jobs of this peer beyond FINISHED_MAX. */
static void trim_finished(Manager *m, const Peer *owner) {
        Job *j, *next;

        for (j = TAILQ_FIRST(&m->jobs); j && owner->n_finished > FINISHED_MAX; j = next) {
                next = TAILQ_NEXT(j, entry);
                if (j->owner == owner && job_is_finished(j))
                        (void) job_free(j);
        }
}

void job_finish(Job *j, JobState state, const Fault *f) {
        if (job_is_finished(j))
                return;

        if (j->state == JOB_QUEUED)
                j->queued_usec = job_queued_usec(j);
        TAILQ_REMOVE(&j->manager->unfinished, j, unfinished_entry);
        j->state = state;
        j->eta_usec = 0;

        if (f)
                j->fault = *f;
        else if (state == JOB_CANCELLED)
                (void) fault_set(&j->fault, -ECANCELED, FAULT_CANCELLED, "The job was cancelled.");
        else if (state == JOB_FAILED)
                (void) fault_set(&j->fault, -EIO, FAULT_INTERNAL, "The job failed for an unknown reason.");

        if (state == JOB_DONE) {
                j->fraction = 1.0;
                if (j->kind == JOB_LOAD && j->model)
                        (void) model_path(
                                j->model, &j->result_model); /* no memory: the result has no model */
        }

        if (j->kind == JOB_MERGE && j->session)
                session_merge_finished(j->session, j);
        tell_end(j);
        drop_references(j);

        if (!j->owner || j->hidden) {
                (void) job_free(j);
                return;
        }

        j->owner->n_finished++;
        if (j->frames_told < j->frames_ready && job_bus_send_frames(j, false) > 0)
                j->frames_told = j->frames_ready;
        (void) job_bus_send_finished(j);
        trim_finished(j->manager, j->owner);
}

void job_cancel(Job *j) {
        if (job_is_finished(j) || j->state == JOB_CANCELLING)
                return;

        if (j->kind == JOB_LOAD) {
                if (j->model)
                        model_load_cancel(j->model, j);
                job_finish(j, JOB_CANCELLED, NULL);
                return;
        }

        if (j->kind == JOB_RENDER) {
                render_cancel(j->render);
                return;
        }

        if (!queue_must_wait(j->manager->queue, j)) {
                job_finish(j, JOB_CANCELLED, NULL);
                return;
        }

        /* The worker is at it: it answers at the next block. */
        j->state = JOB_CANCELLING;
        worker_link_cancel(j->manager->worker, j);
}

void job_peer_gone(Peer *p) {
        Job *j, *next;

        for (j = TAILQ_FIRST(&p->manager->jobs); j; j = next) {
                bool render = owns_render(j);

                next = TAILQ_NEXT(j, entry);
                if (j->owner != p)
                        continue;

                j->owner = NULL;
                if (job_is_finished(j))
                        (void) job_free(j);
                else
                        job_cancel(j); /* frees no other job but those of its phases */
                if (render)
                        next = TAILQ_FIRST(&p->manager->jobs);
        }
}

/* Coding has them by name. */
static int output_tensor(const WireJobReady *y, uint32_t i, char ret_name[static 32], WireTensor *ret) {
        const char *name;

        if (i >= y->n_outputs || i >= ELEMENTSOF(y->outputs))
                return -ENOENT;

        name = wire_output_name(y->outputs[i].name);
        (void) snprintf(ret_name, 32, "%s", name ? name : "?");
        *ret = y->outputs[i].tensor;
        return 0;
}

/* The end state comes first; of a SAMPLE that keeps its steps then every state, with what its sampler carries. */
int job_result_tensor(const Job *j, uint32_t i, char ret_name[static 32], WireTensor *ret) {
        static const char *const names[] = { "video", "audio", "audio_carried" };
        const WireJobReady *y = &j->ready;
        uint32_t per_state = y->carried.size > 0 ? 3 : 2, which = i, state = y->steps;

        if (!job_writes_output(j))
                return -ENOENT;
        if (j->kind == JOB_RENDER)
                return render_result_tensor(j->render, i, ret_name, ret);
        if (wire_job_is_coding(j->request.kind))
                return output_tensor(y, i, ret_name, ret);

        if (i < 2)
                (void) snprintf(ret_name, 32, "%s%s", names[i], j->kind == JOB_STEP ? "_velocity" : "");
        else {
                which = (i - 2) % per_state;
                state = (i - 2) / per_state + 1; /* step.I is the state after step I, I from 0: state I + 1 */
                if (!(j->request.flags & WIRE_JOB_KEEP_STEPS) || state > y->steps)
                        return -ENOENT;
                (void) snprintf(ret_name, 32, "step.%" PRIu32 ".%s", state - 1, names[which]);
        }

        *ret = which == 0 ? y->video : which == 1 ? y->audio : y->carried;
        ret->offset += y->slot_offset + (state % y->n_slots) * y->slot_stride;
        return 0;
}
