/* SPDX-License-Identifier: Apache-2.0 */
#include "service/latentd/queue.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "service/latentd/crash-budget.h"
#include "service/latentd/gpu-set.h"
#include "service/latentd/job-ready.h"
#include "service/latentd/job.h"
#include "service/latentd/render.h"
#include "service/latentd/session.h"
#include "service/latentd/step-pace.h"
#include "service/latentd/worker-link.h"
#include "service/shared/cleanup.h"
#include "service/shared/clock.h"
#include "service/shared/log.h"

#define DEATHS_MAX 2 /* in one step */

typedef enum Activity {
        ACTIVITY_OPEN,  /* the job's JOB_OPEN, or its model before that */
        ACTIVITY_AHEAD, /* JOB_RUN; JOB_READY makes it ACTIVITY_STEP */
        ACTIVITY_REPLAN, /* JOB_READY had other rows than expected: the step will fail by its plan and is asked for again */
        ACTIVITY_STEP,
} Activity;

struct Queue {
        Manager *manager;
        TAILQ_HEAD(, Job) jobs; /* unfinished, by arrival */
        Job *active;            /* what the worker is asked for now */
        Activity activity;
        uint64_t turns;
        CrashBudget *crashes;
        WireMemory memory;      /* of the worker, when its step began */
        sd_event_source *dispatch_source;
        sd_event_source *wait_source; /* when the next user need not wait any more */
};

static int on_dispatch(sd_event_source *source, void *userdata);
static int look_for_work(Queue *q);

static int on_wait_over(sd_event_source *source, uint64_t usec, void *userdata) {
        queue_dispatch(userdata);
        return 0;
}

int queue_new(Manager *m, Queue **ret) {
        Queue *q;
        int r;

        q = calloc(1, sizeof(*q));
        if (!q)
                return -ENOMEM;

        q->manager = m;
        TAILQ_INIT(&q->jobs);

        r = sd_event_add_defer(m->event, &q->dispatch_source, on_dispatch, q);
        if (r >= 0)
                r = sd_event_source_set_enabled(q->dispatch_source, SD_EVENT_OFF);
        if (r >= 0)
                r = sd_event_add_time(m->event, &q->wait_source, CLOCK_MONOTONIC, 0, 0, on_wait_over, q);
        if (r >= 0)
                r = sd_event_source_set_enabled(q->wait_source, SD_EVENT_OFF);
        if (r >= 0)
                r = crash_budget_new(m->config->crash_budget, m->config->crash_budget_usec, &q->crashes);
        if (r < 0) {
                (void) queue_free(q);
                return r;
        }

        *ret = q;
        return 0;
}

Queue *queue_free(Queue *q) {
        Job *j;

        if (!q)
                return NULL;

        while ((j = TAILQ_FIRST(&q->jobs))) {
                TAILQ_REMOVE(&q->jobs, j, queue_entry);
                j->queued = false;
        }
        (void) sd_event_source_disable_unref(q->dispatch_source);
        (void) sd_event_source_disable_unref(q->wait_source);
        (void) crash_budget_free(q->crashes);
        free(q);
        return NULL;
}

void queue_add(Queue *q, Job *j) {
        TAILQ_INSERT_TAIL(&q->jobs, j, queue_entry);
        j->queued = true;
        if (!q->active && look_for_work(q) < 0) /* whoever adds it does not expect its end: another try, from the loop */
                queue_dispatch(q);
}

void queue_remove(Queue *q, Job *j) {
        if (!j->queued)
                return;

        TAILQ_REMOVE(&q->jobs, j, queue_entry);
        j->queued = false;
        if (q->active == j)
                q->active = NULL;
        if (!q->active)
                queue_dispatch(q);
}

bool queue_is_empty(const Queue *q) {
        return TAILQ_EMPTY(&q->jobs);
}

uint32_t queue_position(const Queue *q, const Job *j) {
        const Job *x;
        uint32_t n = 0;

        if (!j->queued || j->state != JOB_QUEUED)
                return 0;

        TAILQ_FOREACH(x, &q->jobs, queue_entry) {
                if (x == j)
                        break;
                n++;
        }
        return n;
}

bool queue_must_wait(const Queue *q, const Job *j) {
        return q->active == j && j->worker_epoch != 0 &&
               j->worker_epoch == worker_link_epoch(q->manager->worker);
}

void queue_dispatch(Queue *q) {
        (void) sd_event_source_set_enabled(q->dispatch_source, SD_EVENT_ONESHOT);
}

/* Says so in its Phase, and that it is over. why: NULL: it does not wait. */
static void set_waiting(Job *j, const char *why) {
        const char *phase = why ? why : j->state == JOB_QUEUED ? "queue" : job_running_phase(j);

        if (j->phase == phase || strcmp(j->phase, phase) == 0)
                return;

        j->phase = phase;
        job_progress(j);
}

/* The one of the window that waited longest for the worker; of those that never had it the oldest. Those whose user or reader lets
 * them wait are not in the window: the number of the latter is bounded by RING_JOBS_MAX. */
static Job *pick(const Queue *q) {
        uint64_t now = clock_usec(), until, next = UINT64_MAX;
        Job *j, *best = NULL;
        const char *why;
        unsigned n = 0;

        TAILQ_FOREACH(j, &q->jobs, queue_entry) {
                until = crash_budget_until(q->crashes, j->uid, now);
                why = until > 0 ? "crash-wait" : job_has_room(j) ? NULL : "frames-wait";
                set_waiting(j, why);
                if (until > 0)
                        next = until < next ? until : next;
                if (why)
                        continue;
                if (n++ >= QUEUE_WINDOW)
                        break;
                if (!best || j->turn < best->turn)
                        best = j;
        }

        if (next != UINT64_MAX) {
                (void) sd_event_source_set_time(q->wait_source, next);
                (void) sd_event_source_set_enabled(q->wait_source, SD_EVENT_ONESHOT);
        }
        return best;
}

static unsigned n_concurrent(const Queue *q) {
        const Job *j;
        unsigned n = 0;

        TAILQ_FOREACH(j, &q->jobs, queue_entry)
                if (++n >= QUEUE_WINDOW)
                        break;
        return n;
}

/* Fraction and time to the end, from the measured time of a step and the blocks of the one that runs. The
 * other jobs of the window take their turns in between. */
static void estimate(const Queue *q, Job *j) {
        double part = j->blocks > 0 ? (double) j->block / j->blocks : 0, left;

        if (j->steps == 0)
                return;

        left = j->steps - j->step - part;
        j->fraction = 1.0 - left / j->steps;
        j->eta_usec = (uint64_t) (left * (double) j->step_usec * n_concurrent(q));
}

/* The worker has its step, or gets it now. */
static void begin_step(Queue *q, Job *j, Activity activity) {
        q->activity = activity;
        j->turn = ++q->turns;
        j->step_started_usec = clock_usec();
        q->memory = *worker_link_memory(q->manager->worker);
        j->block = 0;
        lora_notes_done(&j->notes); /* of an attempt that was lost */
        estimate(q, j);
        job_progress(j);
}

static int start_step(Queue *q, Job *j) {
        begin_step(q, j, ACTIVITY_STEP);
        return worker_link_step(q->manager->worker, j, j->step);
}

/* The same but for what no answer to JOB_OPEN depends on. */
static bool same_request(const WireJobOpen *a, const WireJobOpen *b) {
        WireJobOpen x = *a, y = *b;

        x.header = y.header = (WireHeader){};
        x.sigma_video = y.sigma_video = 0;
        x.sigma_audio = y.sigma_audio = 0;
        return memcmp(&x, &y, sizeof(x)) == 0;
}

/* A MERGE has no plan, a PLAN no step. */
static bool can_run_ahead(const Job *j) {
        return (j->kind == JOB_STEP || j->kind == JOB_SAMPLE) && !j->resume;
}

/* Frames that a reader has seen must stay what they are. From its first step a film can only be made again over those that the same
 * kind of worker made, and not in a ring, which holds others by now. */
static int begin_frames(Job *j, const char *numerics) {
        bool same = strcmp(j->numerics_id, numerics) == 0 && j->ready.ring_frames >= j->ready.frames;

        if (j->frames_ready > 0 && !same)
                return -ESTALE;

        j->frames_done = 0;
        return 0;
}

static int start_open(Queue *q, Job *j) {
        WorkerLink *w = q->manager->worker;
        const Session *s = j->session;
        bool known;
        int r;

        q->activity = ACTIVITY_OPEN;
        job_start(j, job_running_phase(j));
        if (j->resume && strcmp(j->numerics_id, worker_link_numerics_id(w)) != 0) {
                /* This worker computes other bits than the one that began: all steps or none from
                 * one of them. */
                j->resume = false;
                j->step = j->request.start_step;
        }
        if (!j->resume) {
                r = begin_frames(j, worker_link_numerics_id(w));
                if (r < 0)
                        return r;
        }

        /* The session's last job was of the same shape: then what the worker will answer is known. */
        known = can_run_ahead(j) && s->known_epoch == worker_link_epoch(w) &&
                same_request(&s->known_request, &j->request);
        if (known)
                j->ready = s->known_ready;

        j->open_started_usec = clock_usec();
        r = worker_link_open_job(w, j, j->resume, known);
        if (r > 0)
                begin_step(q, j, ACTIVITY_AHEAD);
        return r;
}

/* If there is something and the worker is free. A failure leaves everything as it was, ret_job says whose. */
static int start_next(Queue *q, Job **ret_job) {
        Job *j;
        int r;

        if (q->active)
                return 0;

        j = pick(q);
        if (!j) {
                manager_devices_busy(q->manager, false);
                return 0;
        }

        if (!worker_link_is_ready(q->manager->worker)) {
                worker_link_want(q->manager->worker);
                return 0;
        }

        manager_devices_busy(q->manager, true);
        q->active = j;
        r = j->opened ? start_step(q, j) : start_open(q, j);
        if (r < 0) {
                q->active = NULL;
                *ret_job = j;
        }
        return r;
}

static int look_for_work(Queue *q) {
        Job *unused;

        return start_next(q, &unused);
}

static int on_dispatch(sd_event_source *source, void *userdata) {
        Queue *q = userdata;
        Fault f = {};
        Job *j;
        int r;

        r = start_next(q, &j);
        if (r == -ESTALE)
                (void) fault_set(&f, r, FAULT_WORKER_CRASHED,
                        "The worker died, and what it left cannot be gone on from: frames of this film were read already. Start it again.");
        if (r == -ENODEV)
                (void) gpu_set_refuse(gpu_part_of((WireJobKind) j->request.kind), &j->session->split, &f);
        if (r < 0) {
                (void) fault_set(&f, r, FAULT_INTERNAL, "The job could not be given to the worker: %s.",
                        strerror(-r));
                job_finish(j, JOB_FAILED, &f);
        }
        return 0;
}

/* After an answer: what comes next goes out without another turn of the loop. */
static void dispatch_now(Queue *q) {
        (void) sd_event_source_set_enabled(q->dispatch_source, SD_EVENT_OFF);
        (void) on_dispatch(NULL, q);
}

static void lie(Queue *q, const char *what) {
        char text[200];

        (void) snprintf(text, sizeof(text), "broke the protocol: %s", what);
        worker_link_drop(q->manager->worker, text);
}

/* The job that the message is about, if the worker was asked for just this. */
static Job *expect(Queue *q, const WireHeader *h, Activity activity) {
        Job *j = q->active;

        if (!j || j->id != h->job || q->activity != activity || !queue_must_wait(q, j)) {
                lie(q, "an answer to nothing that was asked");
                return NULL;
        }
        if (activity == ACTIVITY_STEP && h->step != j->step) {
                lie(q, "an answer for another step");
                return NULL;
        }
        return j;
}

static uint64_t commit_word(const Job *j) {
        const char *map = j->session->output_map;

        return __atomic_load_n(
                (const uint64_t *) (const void *) (map + j->ready.commit_offset), __ATOMIC_ACQUIRE);
}

/* Weights were registered, uploaded or merged while the step ran. */
static bool weights_came(const Queue *q) {
        const WireMemory *a = &q->memory, *b = worker_link_memory(q->manager->worker);

        return memcmp(a->models, b->models, sizeof(a->models)) != 0 || a->merged_bytes != b->merged_bytes;
}

/* From where its device began with block 0, if that is known: before it weights may have come. */
static void note_pace(const Queue *q, const Job *j, const WireStepDone *m) {
        uint64_t now = clock_usec();
        bool stamped = m->first_usec > j->step_started_usec && m->first_usec < now;

        if (j->request.kind == WIRE_JOB_STEP || j->request.kind == WIRE_JOB_SAMPLE)
                step_pace_note(j, m->sparse, weights_came(q), stamped ? now - m->first_usec : m->compute_usec);
}

/* Nothing of it will run. */
static void finish_plan(WorkerLink *w, Job *j) {
        Fault f = {};
        int r;

        r = worker_link_plan_job(w, j);
        if (r == -ENODEV)
                (void) gpu_set_refuse(gpu_part_of((WireJobKind) j->request.kind), &j->session->split, &f);
        if (r < 0)
                (void) fault_set(&f, r, FAULT_INTERNAL, "The split over ranks cannot be made: %s.", strerror(-r));
        job_finish(j, r < 0 ? JOB_FAILED : JOB_DONE, r < 0 ? &f : NULL);
}

/* For jobs like this one. */
static void remember(const Job *j, const WireJobReady *m, uint64_t epoch) {
        Session *s = j->session;

        if (!can_run_ahead(j))
                return;
        s->known_request = j->request;
        s->known_ready = *m;
        s->known_epoch = epoch;
}

static void set_frames(Job *j, uint64_t done) {
        j->frames_done = done;
        if (done <= j->frames_ready)
                return;

        j->frames_ready = done;
        job_frames_ready(j);
}

void queue_on_job_ready(Queue *q, const WireJobReady *m) {
        WorkerLink *w = q->manager->worker;
        bool ahead = q->activity == ACTIVITY_AHEAD, as_expected;
        Job *j = expect(q, &m->header, ahead ? ACTIVITY_AHEAD : ACTIVITY_OPEN);
        const char *why;

        if (!j)
                return;

        why = job_ready_check(j, m);
        if (why) {
                j->session->known_epoch = 0;
                lie(q, why);
                return;
        }
        as_expected = ahead && m->rows == j->ready.rows;

        j->ready = *m;
        j->opened = true;
        j->steps = m->steps;
        j->blocks = m->blocks;
        (void) snprintf(j->numerics_id, sizeof(j->numerics_id), "%s", worker_link_numerics_id(w));
        if (!j->resume)
                j->first_epoch = (uint32_t) worker_link_epoch(w);
        j->open_took_usec = clock_usec() - j->open_started_usec;
        set_frames(j, m->frames_done);
        remember(j, m, worker_link_epoch(w));
        if (ahead) {
                q->activity = as_expected ? ACTIVITY_STEP : ACTIVITY_REPLAN;
                return;
        }

        q->active = NULL;
        if (j->state == JOB_CANCELLING)
                job_finish(j, JOB_CANCELLED, NULL);
        else if (j->kind == JOB_PLAN)
                finish_plan(w, j);
        dispatch_now(q);
}

void queue_on_lora_notes(Queue *q, const WireLoraNotes *m) {
        Job *j = expect(q, &m->header, ACTIVITY_STEP);
        int r;

        if (!j)
                return;

        r = j->kind == JOB_MERGE ? lora_notes_add(&j->notes, m, j->request.n_loras) : -EPROTO;
        if (r == -EPROTO)
                lie(q, "LORA_NOTES that nobody asked for");
        else if (r < 0)
                worker_link_drop(q->manager->worker, "cannot be served: out of memory");
}

void queue_on_progress(Queue *q, const WireProgress *m) {
        Job *j = expect(q, &m->header, ACTIVITY_STEP);

        if (!j)
                return;

        if (m->blocks != j->ready.blocks || m->block > m->blocks || m->block < j->block) {
                lie(q, "PROGRESS with impossible blocks");
                return;
        }

        j->block = m->block;
        if (j->step == j->request.start_step && m->block > 0) /* the first step: guessed from its blocks */
                j->step_usec = (clock_usec() - j->step_started_usec) * m->blocks / m->block;
        estimate(q, j);
        job_progress(j);
}

/* What the step made has room in the ring, since it was asked for only then (job_has_room()). */
static bool frames_fit(const Job *j, const WireStepDone *m) {
        const WireJobReady *y = &j->ready;

        if (m->cached > (j->kind == JOB_ENCODE))
                return false;
        if (y->frames == 0)
                return m->frames == 0;

        return m->frames >= j->frames_done && m->frames <= y->frames && m->frames - j->frames_done <= y->step_frames &&
               (j->step + 1 < j->steps || m->frames == y->frames);
}

static bool blocks_fit(const WireStepDone *m) {
        for (uint32_t i = 0; i < WIRE_RANKS_MAX; i++)
                if (m->blocks_seen[i] > m->blocks_all[i] || (m->blocks_all[i] > 0 && !m->sparse))
                        return false;
        return true;
}

/* How far ranks are from each other in what they saw of theirs; "" for one alone. */
static const char *ranks_of_sparse(const Job *j, char text[static 80]) {
        double least = 100, most = 0;
        uint32_t n = 0;

        for (uint32_t i = 0; i < WIRE_RANKS_MAX; i++) {
                double seen;

                if (j->blocks_all[i] == 0)
                        continue;
                seen = 100 * (double) j->blocks_seen[i] / (double) j->blocks_all[i];
                least = seen < least ? seen : least;
                most = seen > most ? seen : most;
                n++;
        }
        text[0] = '\0';
        if (n > 1)
                (void) snprintf(text, 80, "; its %" PRIu32 " ranks %.2f to %.2f %% of theirs", n, least, most);
        return text;
}

static void log_sparse(const Job *j) {
        uint32_t method = j->request.sparse.method;
        char ranks[80];

        if (method == SPARSE_NONE || j->kind != JOB_SAMPLE)
                return;
        if (j->sparse_steps == 0)
                log_info("Job %" PRIu64 ": none of its %" PRIu32 " steps had sparse attention (%s).", j->id, j->steps,
                        sparse_method_to_string(method));
        else
                log_info("Job %" PRIu64 ": %" PRIu32 " of its %" PRIu32 " steps had sparse attention (%s), from step %" PRIu32
                         " to %" PRIu32 ": %" PRIu64 " of their %" PRIu64 " pairs of blocks row by row%s.",
                        j->id, j->sparse_steps, j->steps, sparse_method_to_string(method), j->sparse_first + 1, j->sparse_last + 1,
                        job_sum_ranks(j->blocks_seen), job_sum_ranks(j->blocks_all), ranks_of_sparse(j, ranks));
}

void queue_on_step_done(Queue *q, const WireStepDone *m) {
        Job *j = expect(q, &m->header, ACTIVITY_STEP);
        uint32_t epoch, done;
        uint64_t elapsed;

        if (!j)
                return;

        if (j->kind == JOB_MERGE)
                j->merged_bytes = m->merged_bytes;
        else if (wire_commit_unpack(commit_word(j), &epoch, &done) < 0 || done != j->step + 1 ||
                epoch != (uint32_t) worker_link_epoch(q->manager->worker)) {
                lie(q, "STEP_DONE without its commit word");
                return;
        }

        if (!frames_fit(j, m)) {
                lie(q, "STEP_DONE with impossible frames");
                return;
        }

        if (m->preview > (j->kind == JOB_SAMPLE && j->ready.n_outputs > 0)) {
                lie(q, "STEP_DONE with a preview that has no place");
                return;
        }

        if (m->sparse > (j->request.sparse.method != SPARSE_NONE)) {
                lie(q, "STEP_DONE with sparse attention that nobody asked for");
                return;
        }

        if (!blocks_fit(m)) {
                lie(q, "STEP_DONE with impossible blocks");
                return;
        }

        elapsed = clock_usec() - j->step_started_usec;
        j->step_usec = elapsed;
        elapsed += STEAL(j->open_took_usec, 0); /* the first one's time has the opening in it */
        j->compute_usec += m->compute_usec < elapsed ? m->compute_usec : elapsed;
        if (j->first_kernel_usec == 0 && m->first_usec > j->created_usec && m->first_usec <= clock_usec())
                j->first_kernel_usec = m->first_usec - j->created_usec;
        note_pace(q, j, m);
        j->exchanged_bytes += m->exchanged_bytes;
        for (uint32_t i = 0; i < WIRE_RANKS_MAX; i++)
                j->tiles[i] += m->tiles[i];
        j->exposed_usec += m->exposed_usec;
        j->retries = 0;
        if (m->sparse) {
                j->sparse_first = j->sparse_steps == 0 ? j->step : j->sparse_first;
                j->sparse_last = j->step;
                j->sparse_steps++;
                for (uint32_t i = 0; i < WIRE_RANKS_MAX; i++) {
                        j->blocks_seen[i] += m->blocks_seen[i];
                        j->blocks_all[i] += m->blocks_all[i];
                }
        }
        j->step++;
        j->block = j->step < j->steps ? 0 : j->blocks;
        j->cached = m->cached > 0;
        q->manager->steps_done += j->kind != JOB_MERGE;
        set_frames(j, m->frames);
        if (m->preview && j->render)
                render_on_preview(j->render, j);
        q->active = NULL;

        if (j->state == JOB_CANCELLING)
                job_finish(j, JOB_CANCELLED, NULL);
        else if (j->step == j->steps) {
                log_sparse(j);
                job_finish(j, JOB_DONE, NULL);
        } else {
                estimate(q, j);
                job_progress(j);
        }
        dispatch_now(q);
}

void queue_on_job_error(Queue *q, const WireError *m) {
        Job *j = q->active;
        Fault f = {};

        /* While its model opens the job itself is not with the worker: worker-link made the message. */
        if (!j || j->id != m->header.job || (q->activity >= ACTIVITY_REPLAN && m->header.step != j->step)) {
                lie(q, "ERROR for nothing that was asked");
                return;
        }

        if (strcmp(m->fault.name, FAULT_CANCELLED) == 0 && j->state != JOB_CANCELLING) {
                lie(q, "a job cancelled that nobody cancelled");
                return;
        }

        q->active = NULL;
        if (j->state == JOB_CANCELLING)
                job_finish(j, JOB_CANCELLED, NULL);
        else if (q->activity == ACTIVITY_REPLAN)
                j->plan_epoch = 0;
        else {
                worker_link_fault(&m->fault, &f);
                job_finish(j, JOB_FAILED, &f);
        }
        queue_dispatch(q);
}

/* How many steps of a SAMPLE that was open in a worker are in its output arena for good. A word that cannot
 * be right (of another job, or overwritten) counts as none: the job starts where it began, with the same bits. */
static uint32_t committed_steps(const Job *j, bool ran) {
        uint32_t epoch, done, last = (uint32_t) j->worker_epoch, start = j->request.start_step;

        if (wire_commit_unpack(commit_word(j), &epoch, &done) < 0)
                return start;
        if (done < j->step || done > j->step + (ran ? 1 : 0) || done > j->steps)
                return start;
        if (epoch - j->first_epoch > last - j->first_epoch) /* modulo 2^32 */
                return start;
        return done;
}

/* Its commit word says how far it is. */
static bool can_go_on(const Job *j) {
        return j->kind == JOB_SAMPLE || (j->kind != JOB_PLAN && wire_job_is_coding(j->request.kind));
}

/* Where the job goes on. True if it has all its steps. */
static bool take_up(Job *j, bool ran) {
        uint32_t done;

        if (!j->opened) /* what an earlier worker committed is still to be resumed */
                return false;

        done = can_go_on(j) ? committed_steps(j, ran) : 0;
        if (done > j->step) {
                /* It died between the commit and STEP_DONE: the step counts. */
                j->compute_usec += clock_usec() - j->step_started_usec;
                j->manager->steps_done++;
                j->retries = 0;
        }
        j->step = done;
        j->block = 0;
        j->resume = done > j->request.start_step;
        j->opened = false;
        if (done == j->steps)
                set_frames(j, j->ready.frames);
        return done == j->steps;
}

/* One job after the worker's death. */
static void lost_worker(Queue *q, Job *j, bool active, bool ran, const char *reason) {
        uint32_t step = j->step;
        Fault f = {};
        bool all;

        if (j->state == JOB_CANCELLING) {
                job_finish(j, JOB_CANCELLED, NULL);
                return;
        }

        all = take_up(j, ran);
        if (all) {
                job_finish(j, JOB_DONE, NULL);
                return;
        }
        if (!active || j->step > step)
                return;

        if (++j->retries < DEATHS_MAX) {
                j->retries_total++;
                return;
        }

        if (j->kind == JOB_MERGE || j->kind == JOB_PLAN)
                (void) fault_set(&f, -EIO, FAULT_WORKER_CRASHED,
                        "The %s was tried %d times and the worker died each time: it %s.", job_kind_to_string(j->kind),
                        DEATHS_MAX, reason);
        (void) fault_set(&f, -EIO, FAULT_WORKER_CRASHED,
                "Step %" PRIu32 " was tried %d times and the worker died each time: it %s.", step,
                DEATHS_MAX, reason); /* one that is there stays */
        job_finish(j, JOB_FAILED, &f);
}

static void count_crash(Queue *q, uid_t uid) {
        if (crash_budget_count(q->crashes, uid, clock_usec()))
                log_warning("Jobs of user %u have crashed workers too often and wait for %u s.", (unsigned) uid,
                        (unsigned) (CRASH_WAIT_USEC / 1000000));
}

void queue_blame(Queue *q, uid_t uid) {
        if (!q->active || q->active->uid != uid)
                count_crash(q, uid);
}

uint64_t queue_wait_usec(const Queue *q, uid_t uid) {
        uint64_t now = clock_usec(), until = crash_budget_until(q->crashes, uid, now);

        return until > now ? until - now : 0;
}

void queue_on_worker_gone(Queue *q, const char *reason) {
        Job *active = q->active, *j, *next;
        bool ran = active && q->activity == ACTIVITY_STEP;

        if (active)
                count_crash(q, active->uid);

        q->active = NULL;
        for (j = TAILQ_FIRST(&q->jobs); j; j = next) {
                next = TAILQ_NEXT(j, queue_entry);
                lost_worker(q, j, j == active, ran && j == active, reason);
        }
        manager_devices_busy(q->manager, false);
        queue_dispatch(q);
}

void queue_on_no_worker(Queue *q, const Fault *f) {
        Job *j;

        q->active = NULL;
        while ((j = TAILQ_FIRST(&q->jobs)))
                job_finish(j, j->state == JOB_CANCELLING ? JOB_CANCELLED : JOB_FAILED,
                        j->state == JOB_CANCELLING ? NULL : f);
}
