/* SPDX-License-Identifier: Apache-2.0 */
/* What the worker is given: models, arenas, jobs. All of it lazily, and again for each worker. */
#include "service/latentd/worker-link-internal.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "service/latentd/job.h"
#include "service/latentd/model.h"
#include "service/latentd/plan.h"
#include "service/latentd/queue.h"
#include "service/latentd/session.h"
#include "service/shared/cleanup.h"
#include "service/shared/clock.h"

#define MODELS_HELD_MAX 32 /* in a worker at a time; the least recently used one without jobs gives way */
#define DEATHS_MAX 2       /* while a model is being opened */

/* A step whose time is not known yet: at least this much work is taken to be done per second, in rows times
 * bytes of weights. */
#define PACE_CPU UINT64_C(1000000000)
#define PACE_GPU UINT64_C(1000000000000)
#define PATIENCE 10 /* times the expected duration */

#define CLOSE_DELAY_USEC 20000 /* of a JOB_CLOSE that nothing waits for */

static LinkModel *find_model(const WorkerLink *w, uint64_t id) {
        LinkModel *x;

        TAILQ_FOREACH(x, &w->models, entry)
                if (x->id == id)
                        return x;

        return NULL;
}

static LinkModel *link_model_free(WorkerLink *w, LinkModel *x) {
        TAILQ_REMOVE(&w->models, x, entry);
        free(x);
        return NULL;
}

static void send_simple(WorkerLink *w, WireType type, uint64_t id, uint32_t step) {
        WireMessage m;

        wire_init(&m, type, w->epoch, id, step);
        worker_send(w, &m, -EBADF);
}

static void send_closes(WorkerLink *w) {
        for (unsigned i = 0; i < w->n_closing; i++)
                send_simple(w, WIRE_JOB_CLOSE, w->closing[i], 0);
        w->n_closing = 0;
}

static int on_close_timer(sd_event_source *source, uint64_t usec, void *userdata) {
        WorkerLink *w = userdata;

        if (w->state == LINK_READY)
                send_closes(w);
        return 0;
}

/* The timer stays as it is once it runs: with many short steps it finds nothing to do most of the time. */
static int arm_close_timer(WorkerLink *w) {
        int enabled, r;

        if (!w->close_timer)
                return sd_event_add_time_relative(w->manager->event, &w->close_timer, CLOCK_MONOTONIC, CLOSE_DELAY_USEC, 1000,
                        on_close_timer, w);

        r = sd_event_source_get_enabled(w->close_timer, &enabled);
        if (r < 0 || enabled != SD_EVENT_OFF)
                return r;

        r = sd_event_source_set_time_relative(w->close_timer, CLOSE_DELAY_USEC);
        return r < 0 ? r : sd_event_source_set_enabled(w->close_timer, SD_EVENT_ONESHOT);
}

/* The worker does not touch a job that is done: it can have the next one before it clears away. */
static void close_later(WorkerLink *w, uint64_t id) {
        if (w->n_closing == ELEMENTSOF(w->closing))
                send_closes(w);
        w->closing[w->n_closing++] = id;
        if (arm_close_timer(w) < 0)
                send_closes(w);
}

static void send_model(WorkerLink *w, const Model *model) {
        WireMessage m;

        wire_init(&m, WIRE_MODEL_OPEN, w->epoch, model->id, 0);
        m.model_open.n_files = (uint32_t) model->n_parts;
        m.model_open.qkv_order = model->qkv_order;
        m.model_open.identity = model_identity(model);
        (void) snprintf(m.model_open.partition, sizeof(m.model_open.partition), "%s", model->partition);
        worker_send(w, &m, -EBADF);

        for (size_t i = 0; i < model->n_parts; i++) {
                const ModelPart *p = &model->parts[i];

                wire_init(&m, WIRE_REGION, w->epoch, model->id, 0);
                m.region.size = p->size;
                m.region.region_size = p->region->size;
                m.region.index = (uint32_t) i;
                p->region->worker_epoch = w->epoch;
                (void) snprintf(m.region.name, sizeof(m.region.name), "%s", p->name);
                worker_send(w, &m, p->region->fd);
        }

        send_simple(w, WIRE_MODEL_COMMIT, model->id, 0);
}

static bool job_uses(const Job *j, uint64_t model) {
        for (uint32_t i = 0; i < j->request.n_loras; i++)
                if (j->request.loras[i].model == model)
                        return true;

        return j->request.model == model;
}

static bool model_has_jobs(const WorkerLink *w, const LinkModel *x) {
        const Job *j;

        TAILQ_FOREACH(j, &w->manager->unfinished, unfinished_entry)
                if (j->worker_epoch == w->epoch && job_uses(j, x->id))
                        return true;

        return w->opening && job_uses(w->opening, x->id);
}

/* Its worker maps every region of a model: keep the number of them bounded. */
static void make_room(WorkerLink *w) {
        LinkModel *x, *next;
        unsigned n = 0;

        TAILQ_FOREACH(x, &w->models, entry)
                n++;

        for (x = TAILQ_FIRST(&w->models); x && n >= MODELS_HELD_MAX; x = next) {
                next = TAILQ_NEXT(x, entry);
                if (!x->ready || model_has_jobs(w, x))
                        continue;
                send_closes(w);
                send_simple(w, WIRE_MODEL_CLOSE, x->id, 0);
                (void) link_model_free(w, x);
                n--;
        }
}

static void on_model_error(WorkerLink *w, LinkModel *x, const Fault *f);

static void send_checked_model(WorkerLink *w, LinkModel *x) {
        x->sent = true;
        send_model(w, x->model);
        w->models_usec = clock_usec();
        worker_link_watch(w);
}

/* The worker that it was mended for may be gone: then the next one that wants it gets it. */
static void on_mended(void *userdata, Model *model, const Fault *f) {
        WorkerLink *w = userdata;
        LinkModel *x = find_model(w, model->id);

        if (!x || x->sent)
                return;

        if (f)
                on_model_error(w, x, f);
        else
                send_checked_model(w, x);
}

/* Sends the model unless the worker has it or is at it. */
static int ensure_model(WorkerLink *w, Model *model, LinkModel **ret) {
        LinkModel *x = find_model(w, model->id);
        int r;

        if (x) {
                TAILQ_REMOVE(&w->models, x, entry);
                TAILQ_INSERT_TAIL(&w->models, x, entry);
        } else {
                make_room(w);
                x = calloc(1, sizeof(*x));
                if (!x)
                        return -ENOMEM;

                x->id = model->id;
                x->model = model;
                TAILQ_INSERT_TAIL(&w->models, x, entry);
                if (model_is_sound(model))
                        send_checked_model(w, x);
                else {
                        r = model_mend(model, on_mended, w);
                        if (r < 0) {
                                (void) link_model_free(w, x);
                                return r;
                        }
                }
        }

        *ret = x;
        return 0;
}

bool worker_feed_is_busy(const WorkerLink *w) {
        const LinkModel *x;

        TAILQ_FOREACH(x, &w->models, entry)
                if (x->sent && !x->ready)
                        return true;

        return w->asked_job != 0 || w->opening;
}

/* Ends the first request for this model; fn may do anything, so the list is looked at anew after it. */
static bool answer_one(WorkerLink *w, const Model *model, const WireModelReady *info, const Fault *f) {
        ModelRequest *x;

        TAILQ_FOREACH(x, &w->requests, entry)
                if (!model || x->model == model) {
                        ModelRequest copy = *x;

                        TAILQ_REMOVE(&w->requests, x, entry);
                        free(x);
                        copy.fn(copy.userdata, copy.model, info, f);
                        return true;
                }

        return false;
}

/* A model that the worker has already is asked for again: what it said then is in model->info. */
static int on_answer(sd_event_source *source, void *userdata) {
        WorkerLink *w = userdata;

        if (w->state == LINK_READY)
                worker_feed_on_ready(w);
        return 0;
}

int worker_link_open_model(WorkerLink *w, Model *model, WorkerModelFn fn, void *userdata) {
        ModelRequest *x;
        int r;

        x = calloc(1, sizeof(*x));
        if (!x)
                return -ENOMEM;

        *x = (ModelRequest){ .model = model, .fn = fn, .userdata = userdata };
        x->uid = model->n_waiters > 0 ? model->waiters[0]->uid : model->uid;
        if (!w->answer_source)
                r = sd_event_add_defer(w->manager->event, &w->answer_source, on_answer, w);
        else
                r = sd_event_source_set_enabled(w->answer_source, SD_EVENT_ONESHOT);
        if (r < 0) {
                free(x);
                return r;
        }

        TAILQ_INSERT_TAIL(&w->requests, x, entry);
        worker_link_want(w);
        return 0;
}

void worker_feed_on_ready(WorkerLink *w) {
        ModelRequest *x, *next;

        for (x = TAILQ_FIRST(&w->requests); x; x = next) {
                LinkModel *y;

                next = TAILQ_NEXT(x, entry);
                if (ensure_model(w, x->model, &y) < 0) {
                        worker_link_drop(w, "cannot be served: out of memory");
                        return;
                }
                if (y->ready) {
                        (void) answer_one(w, x->model, &x->model->info, NULL);
                        next = TAILQ_FIRST(&w->requests); /* answered ones are gone, so this ends */
                }
        }
}

static void send_arenas(WorkerLink *w, Session *s) {
        const struct {
                int fd;
                uint64_t size;
        } arenas[] = {
                [WIRE_ARENA_INPUT] = { s->input_fd, s->input_bytes },
                [WIRE_ARENA_OUTPUT] = { s->output_fd, s->output_bytes },
        };
        WireMessage m;

        if (s->arena_epoch == w->epoch)
                return;

        for (uint32_t i = 0; i < ELEMENTSOF(arenas); i++) {
                wire_init(&m, WIRE_ARENA, w->epoch, s->id, 0);
                m.arena.size = arenas[i].size;
                m.arena.kind = i;
                worker_send(w, &m, arenas[i].fd);
        }
        s->arena_epoch = w->epoch;
}

/* The others run on JOB_OPEN alone. */
static bool has_plan(const Job *j) {
        return j->request.kind == WIRE_JOB_STEP || j->request.kind == WIRE_JOB_SAMPLE;
}

/* Of a job without a plan: bits; 0: none of its GPUs is there. */
static uint64_t ranks_of(const WorkerLink *w, const Job *j) {
        return worker_link_ranks_for(w, (WireJobKind) j->request.kind, &j->session->split);
}

/* Fills p behind its header, which stays. */
static int fill_plan(WorkerLink *w, Job *j, WirePlan *p) {
        const GpuWork work = gpu_work_of(&j->model->info, j->ready.rows);
        uint64_t out;
        int r;

        r = gpu_cost_plan(&w->set, &w->hello, w->ranks, w->row_tile, &work, &j->session->split, p, &out, j->left_out, sizeof(j->left_out));
        if (r >= 0 && (out & ~w->told_out)) {
                gpu_set_note(&w->hello, "%s (GpuShares= keeps it in).", j->left_out);
                w->told_out |= out;
        }
        if (r >= 0 && p->exchange == WIRE_EXCHANGE_NCCL && j->retries > 0) /* a worker has died of this step */
                p->exchange = WIRE_EXCHANGE_HOST;
        return r;
}

/* Merged copies are memory that this process does not see being taken: the worker gets its limit beforehand. For a MERGE, which may
 * take as much as the whole model, weights that nobody uses give way; the jobs after it find its copies there. */
static uint64_t private_max(Manager *m, const Job *j) {
        MemoryHeadroom h;

        if (j->loras.n == 0 || manager_headroom(m, &h) < 0)
                return 0;

        if (j->kind == JOB_MERGE && h.bytes < j->model->bytes)
                h.bytes += store_evict(m->store, j->model->bytes - h.bytes);
        return h.bytes > 0 ? h.bytes : 1;
}

/* with_step: JOB_RUN; j->ready is known. */
static int send_job(WorkerLink *w, Job *j, bool resume, bool with_step) {
        WireHeader header;
        WireMessage m;
        int r;

        send_arenas(w, j->session);
        wire_init(&m, with_step ? WIRE_JOB_RUN : WIRE_JOB_OPEN, w->epoch, j->id, 0);
        header = m.header;
        m.job_open = j->request;
        m.header = header;
        m.job_open.private_max = private_max(w->manager, j);
        if (resume)
                m.job_open.flags |= WIRE_JOB_RESUME;
        m.job_open.ranks = has_plan(j) ? 0 : ranks_of(w, j);
        if (j->request.kind == WIRE_JOB_ENCODE)
                m.job_open.exchange = gpu_set_exchange_of(&w->hello, m.job_open.ranks, j->session->split.exchange);
        if (with_step) {
                r = fill_plan(w, j, &m.job_run.plan);
                if (r < 0)
                        return r;
                j->plan = m.job_run.plan;
        } else
                send_closes(w); /* not more jobs open than the queue has in its window */

        j->worker_epoch = w->epoch;
        j->plan_epoch = with_step ? w->epoch : 0;
        w->asked_job = j->id;
        w->asked_open = true;
        w->asked_step = with_step;
        w->patience_usec = w->open_usec;
        w->job_usec = clock_usec();
        worker_send(w, &m, -EBADF);
        worker_link_watch(w);
        return 0;
}

/* Sends the job that is opening, if the worker has all of its models: 1, else 0. */
static int send_opening(WorkerLink *w, bool with_step) {
        const Job *j = w->opening;
        const LinkModel *x = find_model(w, j->request.model);
        bool ready = x && x->ready;
        int r;

        for (uint32_t i = 0; i < j->request.n_loras; i++) {
                x = find_model(w, j->request.loras[i].model);
                ready = ready && x && x->ready;
        }
        if (!ready)
                return 0;

        r = send_job(w, STEAL_PTR(w->opening), w->opening_resume, with_step);
        return r < 0 ? r : 1;
}

int worker_link_open_job(WorkerLink *w, Job *j, bool resume, bool with_step) {
        LinkModel *x;
        int r;

        if (w->state != LINK_READY)
                return -ENOTCONN;
        if (!has_plan(j) && ranks_of(w, j) == 0) /* now, not when its model is there */
                return -ENODEV;

        w->opening = j; /* before: none of its models gives way to another of them */
        w->opening_resume = resume;
        r = ensure_model(w, j->model, &x);
        for (uint32_t i = 0; r >= 0 && i < j->loras.n; i++)
                r = ensure_model(w, j->loras.models[i], &x);
        if (r < 0) {
                w->opening = NULL;
                return r;
        }

        r = send_opening(w, with_step);
        return r < 0 ? r : r > 0 && with_step;
}

static int send_plan(WorkerLink *w, Job *j) {
        WireMessage m;
        int r;

        wire_init(&m, WIRE_PLAN, w->epoch, j->id, 0);
        r = fill_plan(w, j, &m.plan);
        if (r < 0)
                return r;
        j->plan = m.plan;

        worker_send(w, &m, -EBADF);
        j->plan_epoch = w->epoch;
        return 0;
}

int worker_link_plan_job(WorkerLink *w, Job *j) {
        int r;

        if (!has_plan(j)) {
                j->plan_ranks = ranks_of(w, j);
                return j->plan_ranks > 0 ? 0 : -ENODEV;
        }

        r = fill_plan(w, j, &j->plan);
        if (r < 0)
                return r;

        j->plan_ranks = plan_ranks_at_work(&j->plan);
        return 0;
}

/* For the next block of a step. Without a measurement a pace is assumed that everything worth using exceeds.
 */
static uint64_t step_patience(const WorkerLink *w, const Job *j) {
        uint64_t pace = strcmp(w->hello.backend, "cpu") == 0 ? PACE_CPU : PACE_GPU, usec, limit;
        double block;

        if (j->kind == JOB_MERGE)
                return w->open_usec; /* goes over the weights, as the opening of a model does */

        if (j->step_usec > 0)
                usec = j->step_usec;
        else {
                block = (double) j->ready.rows * (double) j->model->info.weight_bytes / j->ready.blocks /
                        (double) pace;
                usec = block < 1e9 ? (uint64_t) (block * 1e6) : UINT64_C(1000000000000000);
        }
        if (__builtin_mul_overflow(usec, (uint64_t) PATIENCE, &limit))
                limit = usec;
        return limit > w->stall_usec ? limit : w->stall_usec;
}

int worker_link_step(WorkerLink *w, Job *j, uint32_t step) {
        int r;

        if (w->state != LINK_READY)
                return -ENOTCONN;

        if (j->plan_epoch != w->epoch && has_plan(j)) {
                r = send_plan(w, j);
                if (r < 0)
                        return r;
        }

        w->asked_job = j->id;
        w->asked_step = true;
        if (!w->asked_open) /* else JOB_READY sets it */
                w->patience_usec = step_patience(w, j);
        w->job_usec = clock_usec();
        send_simple(w, WIRE_STEP, j->id, step);
        worker_link_watch(w);
        return 0;
}

bool worker_feed_take_answer(WorkerLink *w, const WireHeader *h, bool step) {
        Job *j;

        if (w->asked_job == 0 || w->asked_job != h->job || w->asked_open == step || (step && !w->asked_step)) {
                worker_link_drop(w, "broke the protocol: an answer to nothing that was asked");
                return false;
        }

        w->failures = 0;
        if (!step && w->asked_step) {
                w->asked_open = false;
                j = job_find(w->manager, h->job);
                if (j)
                        w->patience_usec = step_patience(w, j);
                return true;
        }

        w->asked_job = 0;
        w->asked_open = w->asked_step = false;
        return true;
}

void worker_link_close_job(WorkerLink *w, Job *j) {
        if (w->opening == j)
                w->opening = NULL;

        if (j->worker_epoch != 0 && j->worker_epoch == w->epoch) {
                if (w->asked_job == j->id) {
                        w->asked_job = 0;
                        w->asked_open = w->asked_step = false;
                }
                if (j->state == JOB_DONE)
                        close_later(w, j->id);
                else
                        send_simple(w, WIRE_JOB_CLOSE, j->id, 0);
        }
        j->worker_epoch = 0;
        j->plan_epoch = 0;
}

void worker_link_cancel(WorkerLink *w, Job *j) {
        if (j->worker_epoch != 0 && j->worker_epoch == w->epoch)
                send_simple(w, WIRE_CANCEL, j->id, 0);
}

void worker_link_trim(WorkerLink *w) {
        /* With messages waiting it has other things to do, or was told already. */
        if (w && w->state == LINK_READY && STAILQ_EMPTY(&w->queue))
                send_simple(w, WIRE_TRIM, 0, 0);
}

void worker_link_forget_session(WorkerLink *w, Session *s) {
        if (s->arena_epoch != 0 && s->arena_epoch == w->epoch) {
                send_closes(w);
                send_simple(w, WIRE_ARENA_CLOSE, s->id, 0);
        }
        s->arena_epoch = 0;
}

void worker_link_forget_model(WorkerLink *w, Model *model) {
        LinkModel *y = find_model(w, model->id);
        ModelRequest *x, *next;

        for (x = TAILQ_FIRST(&w->requests); x; x = next) {
                next = TAILQ_NEXT(x, entry);
                if (x->model != model)
                        continue;
                TAILQ_REMOVE(&w->requests, x, entry);
                free(x);
        }

        if (!y)
                return;

        if (!y->sent)
                (void) link_model_free(w, y);
        else if (y->ready) {
                send_closes(w);
                send_simple(w, WIRE_MODEL_CLOSE, y->id, 0);
                (void) link_model_free(w, y);
        } else
                y->model = NULL; /* its answer is still to come */
}

/* model: as it was known before, or NULL. */
static bool info_is_possible(const Model *model, const WireModelReady *m) {
        if (model && model->state == MODEL_READY && m->kind != model->info.kind)
                return false;

        switch (m->kind) {

        case WIRE_MODEL_DENOISER:
                return m->heads > 0 && m->layers > 0 && m->gated <= 1 && isfinite(m->shift_video) && m->shift_video >= 0 &&
                       isfinite(m->shift_audio) && m->shift_audio >= 0;

        case WIRE_MODEL_CONDITIONER:
                return m->text_dim > 0;

        default:
                return m->kind < _WIRE_MODEL_KIND_MAX;
        }
}

void worker_feed_on_model_ready(WorkerLink *w, const WireModelReady *m) {
        LinkModel *x = find_model(w, m->header.job);
        Model *model;

        if (!x || !x->sent || x->ready || !info_is_possible(x->model, m)) {
                worker_link_drop(w, "broke the protocol: MODEL_READY for nothing that was asked");
                return;
        }

        model = x->model;
        if (!model) {
                send_simple(w, WIRE_MODEL_CLOSE, x->id, 0);
                (void) link_model_free(w, x);
                return;
        }

        x->ready = true;
        if (w->opening)
                (void) send_opening(w, false); /* fails only with a step */
        while (answer_one(w, model, m, NULL))
                ;
}

/* The job in w->opening gets the fault of its model. */
static void refuse_opening(WorkerLink *w, const Fault *f) {
        Job *j = STEAL_PTR(w->opening);
        WireMessage m;

        wire_init(&m, WIRE_ERROR, w->epoch, j->id, 0);
        m.error.fault = *f;
        queue_on_job_error(w->manager->queue, &m.error);
}

static void on_model_error(WorkerLink *w, LinkModel *x, const Fault *f) {
        Model *model = x->model;
        Fault copy = {};

        if (x->ready) {
                worker_link_drop(w, "broke the protocol: ERROR for an open model");
                return;
        }

        worker_link_fault(f, &copy);
        (void) link_model_free(w, x);
        if (!model)
                return;

        if (w->opening && job_uses(w->opening, model->id))
                refuse_opening(w, &copy);
        while (answer_one(w, model, NULL, &copy))
                ;
}

void worker_feed_on_error(WorkerLink *w, const WireError *m) {
        LinkModel *x = find_model(w, m->header.job);
        Job *j;

        if (x && x->sent) {
                on_model_error(w, x, &m->fault);
                return;
        }

        if (w->asked_job == 0 || w->asked_job != m->header.job) {
                worker_link_drop(w, "broke the protocol: ERROR for nothing that was asked");
                return;
        }

        if (m->fatal == WIRE_FATAL_OFF_BUS)
                manager_device_quarantine(w->manager, m->fault.text);
        if (m->fatal) { /* as if it had died: the next worker goes on */
                worker_link_drop(w, m->fault.text);
                return;
        }

        w->asked_job = 0;
        w->asked_step = false;
        if (STEAL(w->asked_open, false)) {
                /* A refused job is not there to be closed. */
                j = job_find(w->manager, m->header.job);
                if (j)
                        j->worker_epoch = 0;
        }
        queue_on_job_error(w->manager->queue, m);
}

static bool was_opening(WorkerLink *w, const ModelRequest *x) {
        const LinkModel *y = find_model(w, x->model->id);

        return y && y->sent && !y->ready;
}

/* The worker died with these models half open. Each user counts once. */
static void blame_openers(WorkerLink *w) {
        const ModelRequest *x, *earlier;

        TAILQ_FOREACH(x, &w->requests, entry) {
                if (!was_opening(w, x))
                        continue;
                TAILQ_FOREACH(earlier, &w->requests, entry)
                        if (earlier == x || (earlier->uid == x->uid && was_opening(w, earlier)))
                                break;
                if (earlier == x)
                        queue_blame(w->manager->queue, x->uid);
        }
}

void worker_feed_on_gone(WorkerLink *w, const char *reason, bool crashed) {
        ModelRequest *x, *next;
        Fault f = {};

        (void) fault_set(&f, -EIO, FAULT_WORKER_CRASHED,
                "The worker died %d times while it opened the model: it %s.", DEATHS_MAX, reason);
        TAILQ_FOREACH(x, &w->requests, entry)
                if (was_opening(w, x))
                        x->deaths++;
        if (crashed)
                blame_openers(w);
        if (crashed)
                store_distrust(w->manager->store, w->epoch);

        w->manager->merged_bytes = 0;
        manager_used_changed(w->manager);
        w->opening = NULL;
        w->asked_job = 0;
        w->asked_open = w->asked_step = false;
        w->n_closing = 0;
        while (!TAILQ_EMPTY(&w->models))
                (void) link_model_free(w, TAILQ_FIRST(&w->models));

        for (x = TAILQ_FIRST(&w->requests); x; x = next) {
                next = TAILQ_NEXT(x, entry);
                if (x->deaths < DEATHS_MAX)
                        continue;
                (void) answer_one(w, x->model, NULL, &f);
                next = TAILQ_FIRST(&w->requests);
        }
}

void worker_feed_on_no_worker(WorkerLink *w, const Fault *f) {
        while (answer_one(w, NULL, NULL, f))
                ;
}

void worker_feed_clear(WorkerLink *w) {
        w->answer_source = sd_event_source_disable_unref(w->answer_source);
        while (!TAILQ_EMPTY(&w->models))
                (void) link_model_free(w, TAILQ_FIRST(&w->models));
        while (!TAILQ_EMPTY(&w->requests)) {
                ModelRequest *x = TAILQ_FIRST(&w->requests);

                TAILQ_REMOVE(&w->requests, x, entry);
                free(x);
        }
}
