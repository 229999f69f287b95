/* SPDX-License-Identifier: Apache-2.0 */
#include "service/worker/worker.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "service/shared/cleanup.h"
#include "service/shared/clock.h"
#include "service/shared/log.h"
#include "service/shared/reaper.h"
#include "service/worker/arena-map.h"
#include "service/worker/coder.h"
#include "service/worker/exchange-test.h"
#include "service/worker/job-context.h"
#include "service/worker/link.h"
#include "service/worker/model-table.h"
#include "service/worker/rank.h"
#include "service/worker/step.h"
#include "service/worker/timeline.h"

#define SESSIONS_MAX 8192
#define JOBS_MAX 4096

/* All of it is the link thread's; jobs are shared with the steps' thread as job-context.h says. */
typedef struct Worker {
        const Backend *backend;
        Link *link;
        uint32_t n_devices;
        uint16_t nodes[WIRE_DEVICES_MAX]; /* of each: 1 + its NUMA node; 0: not known */
        RankGroup *ranks; /* NULL before WELCOME */
        StepRunner steps; /* the steps' thread's */
        ModelTable models;
        ArenaPair *arenas[SESSIONS_MAX];
        Job *jobs[JOBS_MAX];
        size_t jobs_end; /* behind the last one */
        pthread_mutex_t memory_lock; /* of the rest */
        WireMemory memory; /* as the broker knows it */
        WirePins pins;     /* likewise */
} Worker;

static Worker worker = {.memory_lock = PTHREAD_MUTEX_INITIALIZER};

static void reply_error(Worker *w, uint64_t id, uint32_t step, int error, const Fault *f) {
        WireMessage m;

        wire_init(&m, WIRE_ERROR, link_epoch(w->link), id, step);
        m.error.fault = *f;
        /* Also what forgot to say anything must not look like success. */
        (void) fault_set(&m.error.fault, error, error == -ENOMEM ? FAULT_DOES_NOT_FIT : FAULT_INTERNAL,
                "%s (errno %d).", strerror(-error), -error);
        link_send(w->link, &m);
}

/* The broker counts what it does not see being taken. Any thread. */
static void report_memory(Worker *w) {
        const Residency *x = &w->steps.residency;
        WireMessage m;

        wire_init(&m, WIRE_MEMORY, link_epoch(w->link), 0, 0);
        m.memory.merged_bytes = merged_model_bytes();
        residency_figures(x, m.memory.models);
        m.memory.idle = x->idle;

        (void) pthread_mutex_lock(&w->memory_lock);
        w->memory.header = m.memory.header;
        if (memcmp(&m.memory, &w->memory, sizeof(m.memory)) != 0) {
                w->memory = m.memory;
                link_send(w->link, &m);
        }
        (void) pthread_mutex_unlock(&w->memory_lock);
}

/* What trials of the devices' library have found, for the next worker. Any thread. */
static void report_pins(Worker *w) {
        WireMessage m;

        if (!w->backend->pins)
                return;
        wire_init(&m, WIRE_PINS, link_epoch(w->link), 0, 0);
        w->backend->pins(&m.pins);
        (void) snprintf(m.pins.numerics_id, sizeof(m.pins.numerics_id), "%s", w->backend->ops->numerics_id);

        (void) pthread_mutex_lock(&w->memory_lock);
        w->pins.header = m.pins.header;
        if (m.pins.n > 0 && memcmp(&m.pins, &w->pins, sizeof(m.pins)) != 0) {
                w->pins = m.pins;
                link_send(w->link, &m);
        }
        (void) pthread_mutex_unlock(&w->memory_lock);
}

/* They are tried again, then: another library, another device. */
static int on_known_pins(Worker *w, const WirePins *p, Fault *f) {
        Fault why = {};
        uint32_t n = 0;

        if (p->n > WIRE_PINS_MAX)
                return fault_set(f, -EPROTO, FAULT_INTERNAL, "KNOWN_PINS has %" PRIu32 " pins, at most %d are possible.", p->n,
                        WIRE_PINS_MAX);
        if (!w->backend->take_pins)
                return 0;
        if (strcmp(p->numerics_id, w->backend->ops->numerics_id) != 0)
                (void) fault_set(&why, -EINVAL, FAULT_INTERNAL, "they are of %.127s, this worker has %s", p->numerics_id,
                        w->backend->ops->numerics_id);
        else
                n = w->backend->take_pins(p, &why);
        timeline_beside("layers told");
        if (n == p->n) { /* the broker knows what this worker has */
                (void) pthread_mutex_lock(&w->memory_lock);
                w->pins = *p;
                (void) pthread_mutex_unlock(&w->memory_lock);
        }
        if (n < p->n)
                log_notice("%" PRIu32 " of %" PRIu32 " layers are tried again that a worker before this one knew: %s.", p->n - n, p->n,
                        why.text);
        return 0;
}

static ArenaPair **find_arenas(Worker *w, uint64_t session) {
        for (size_t i = 0; i < SESSIONS_MAX; i++)
                if (w->arenas[i] && w->arenas[i]->session == session)
                        return &w->arenas[i];
        return NULL;
}

static Job **find_job(Worker *w, uint64_t id) {
        for (size_t i = 0; i < w->jobs_end; i++)
                if (w->jobs[i] && w->jobs[i]->id == id)
                        return &w->jobs[i];
        return NULL;
}

/* A device's error stays with the process (and what else is of it may be wrong, too). */
static bool device_is_lost(const Worker *w, int error) {
        return !w->backend->ops->host_weights && (error == -EIO || error == -ENODEV);
}

static void end_without_device(Worker *w, const Job *j, uint32_t step, const Fault *f) {
        char text[sizeof(((Fault *) NULL)->text) - 64] = "its device failed";
        bool off_bus = false;
        WireMessage m;

        if (w->backend->device_error)
                off_bus = w->backend->device_error(text, sizeof(text));
        if (!off_bus && strncmp(f->text, "NCCL: ", 6) == 0) /* which says more */
                (void) snprintf(text, sizeof(text), "%.*s", (int) strcspn(f->text, "."), f->text); /* its first sentence */
        wire_init(&m, WIRE_ERROR, j->epoch, j->id, step);
        (void) fault_set(&m.error.fault, -EIO, FAULT_WORKER_CRASHED, "lost its device: %s", text);
        m.error.fatal = off_bus ? WIRE_FATAL_OFF_BUS : WIRE_FATAL_DEVICE;
        (void) log_error(0, "The worker %s. It ends.", m.error.fault.text);
        link_send(w->link, &m);
        link_flush(w->link);
        reaper_kill_process();
}

/* On the steps' thread: what nobody needs leaves the devices. */
static uint64_t on_idle(void *userdata, RankGroup *g) {
        Worker *w = userdata;
        uint64_t next = residency_rest(&w->steps.residency, g);

        report_memory(w);
        return next;
}

/* On the steps' thread, as the next one. */
static void on_step(void *userdata, RankGroup *g, Job *j, uint32_t step) {
        Worker *w = userdata;
        StepResult result;
        WireMessage m;
        Fault f = {};
        int r;

        r = step_run(&w->steps, g, j, step, &result, &f);

        /* Before the answer: with it in hands the broker may send another PLAN. */
        j->n_pending--;

        report_memory(w);
        report_pins(w);
        if (r < 0 && device_is_lost(w, r))
                end_without_device(w, j, step, &f);
        if (r < 0) {
                reply_error(w, j->id, step, r, &f);
                return;
        }
        wire_init(&m, WIRE_STEP_DONE, j->epoch, j->id, step);
        m.step_done.compute_usec = result.usec + STEAL(j->open_usec, 0);
        m.step_done.first_usec = result.first_usec;
        m.step_done.exchanged_bytes = result.exchanged_bytes;
        m.step_done.exposed_usec = result.exposed_usec;
        m.step_done.frames = result.frames;
        m.step_done.cached = result.cached;
        m.step_done.preview = result.preview;
        m.step_done.sparse = result.sparse;
        memcpy(m.step_done.tiles, result.tiles, sizeof(m.step_done.tiles));
        memcpy(m.step_done.blocks_seen, result.blocks_seen, sizeof(m.step_done.blocks_seen));
        memcpy(m.step_done.blocks_all, result.blocks_all, sizeof(m.step_done.blocks_all));
        if (j->kind == WIRE_JOB_MERGE && j->merged)
                m.step_done.merged_bytes = j->merged->h3->private_bytes;
        link_send(w->link, &m);
}

/* A thread that cannot be ended takes the process with it: the broker starts another, in which the job goes on from the last step
 * that it committed. */
static void on_stuck(void *userdata, const Job *j, uint32_t step, const Fault *f) {
        Worker *w = userdata;
        WireMessage m;

        (void) log_error(0, "%s The worker ends.", f->text);
        wire_init(&m, WIRE_ERROR, link_epoch(w->link), j->id, step);
        (void) fault_set(&m.error.fault, -ETIMEDOUT, FAULT_WORKER_CRASHED, "lost a rank: %.400s", f->text);
        m.error.fatal = WIRE_FATAL_DEVICE;
        link_send(w->link, &m);
        link_flush(w->link);
        reaper_kill_process();
}

/* Which device each rank computes on. */
static int place_ranks(Worker *w, const WireWelcome *welcome, Fault *f) {
        uint64_t devices = 0;

        for (uint32_t i = 0; i < welcome->ranks && i < WIRE_RANKS_MAX; i++) {
                if (welcome->device_of[i] >= w->n_devices)
                        return fault_set(f, -EPROTO, FAULT_INTERNAL, "WELCOME gives rank %" PRIu32 " the device %u of %" PRIu32 ".", i,
                                welcome->device_of[i], w->n_devices);
                w->steps.residency.device_of[i] = welcome->device_of[i];
                w->steps.residency.staging.nodes[i] = w->nodes[welcome->device_of[i]];
                devices |= UINT64_C(1) << welcome->device_of[i];
        }
        if (w->backend->choose)
                w->backend->choose(devices);
        return 0;
}

static void say_links(Worker *w) {
        WireHello found = {};
        WireMessage m;

        w->backend->try_links(&found);
        wire_init(&m, WIRE_LINKS, link_epoch(w->link), 0, 0);
        memcpy(m.links.peer_mbs, found.peer_mbs, sizeof(m.links.peer_mbs));
        memcpy(m.links.host_mbs, found.host_mbs, sizeof(m.links.host_mbs));
        memcpy(m.links.rates, found.rates, sizeof(m.links.rates));
        memcpy(m.links.notes, found.notes, sizeof(m.links.notes));
        link_send(w->link, &m);
        timeline_note("links");
}

static int on_welcome(Worker *w, const WireMessage *m, Fault *f) {
        uint64_t epoch = m->header.epoch;
        int r;

        /* The commit word has 32 bits for it; 0 stands for "none yet". */
        if (epoch == 0 || epoch > UINT32_MAX)
                return fault_set(f, -EPROTO, FAULT_INTERNAL, "WELCOME has the epoch %" PRIu64 ".", epoch);

        link_set_epoch(w->link, epoch);
        encode_cache_set_limit(&w->steps.encodes, m->welcome.encode_cache_bytes);
        w->steps.residency.limits = (ResidencyLimits){
                .reserve = m->welcome.vram_reserve,
                .limit = m->welcome.vram_limit,
                .idle_usec = m->welcome.vram_idle_usec,
        };
        w->steps.residency.used_usec = clock_usec();
        r = place_ranks(w, &m->welcome, f);
        if (r < 0)
                return r;
        if (m->welcome.try_links && w->backend->try_links)
                say_links(w);
        r = rank_group_new(w->backend->ops, m->welcome.ranks, m->welcome.threads,
                &(RankPlaces){w->backend->bind, w->steps.residency.device_of}, on_step, w, &w->ranks, f);
        if (r >= 0 && !w->backend->ops->host_weights) {
                rank_group_set_idle(w->ranks, on_idle);
                rank_group_poke(w->ranks); /* also a worker that no step comes to is idle some day */
        }
        timeline_note("welcome");
        return r;
}

static void warn_of_backend(const Worker *w, WireModelReady *m) {
        const LkOps *ops = w->backend->ops;

        if (m->kind == WIRE_MODEL_VIDEO_VAE && !coder_encode_video.runs(ops))
                (void) snprintf(m->warning, sizeof(m->warning),
                        "The %s worker of this version decodes video only: EncodeMedia of video needs Worker=cpu.", ops->backend);
        if (m->kind == WIRE_MODEL_AUDIO_VAE && !coder_decode_audio.runs(ops))
                (void) snprintf(m->warning, sizeof(m->warning),
                        "The %s worker of this version runs no audio VAE: set Worker=cpu to use this model.", ops->backend);
}

static int on_model_commit(Worker *w, const WireMessage *m, Fault *f) {
        WireMessage reply;
        Fault fault = {};
        int r;

        wire_init(&reply, WIRE_MODEL_READY, m->header.epoch, m->header.job, m->header.step);
        r = model_table_commit(&w->models, m->header.job, w->backend->ops, &reply.model_ready, &fault);
        if (r == -EPROTO) {
                *f = fault;
                return r;
        }

        if (r < 0)
                reply_error(w, m->header.job, m->header.step, r, &fault);
        else {
                warn_of_backend(w, &reply.model_ready);
                link_send(w->link, &reply);
        }
        timeline_note("model");
        return 0;
}

/* Merged models that nobody uses go with what they are made of, as do tables; others when their jobs or
 * steps end. */
static void on_model_close(Worker *w, const WireMessage *m) {
        uint64_t serial = model_table_close(&w->models, m->header.job);

        if (serial == 0)
                return;
        merged_cache_drop(&w->steps.merged, serial);
        mod_cache_drop(&w->steps.tables, serial);
        rank_group_poke(w->ranks);
}

static int on_arena(Worker *w, const WireMessage *m, int fd, Fault *f) {
        ArenaPair **slot = find_arenas(w, m->header.job);
        int r;

        for (size_t i = 0; !slot && i < SESSIONS_MAX; i++)
                if (!w->arenas[i])
                        slot = &w->arenas[i];
        if (!slot)
                return fault_set(
                        f, -EPROTO, FAULT_INTERNAL, "More than %d sessions are open.", SESSIONS_MAX);

        if (!*slot) {
                r = arena_pair_new(m->header.job, slot);
                if (r < 0)
                        return r;
        }
        return arena_pair_add(*slot, &m->arena, fd, f);
}

static void close_job(Worker *w, Job **slot) {
        job_close(*slot);
        *slot = job_unref(*slot);
        while (w->jobs_end > 0 && !w->jobs[w->jobs_end - 1])
                w->jobs_end--;
}

static void on_arena_close(Worker *w, const WireMessage *m) {
        ArenaPair **slot = find_arenas(w, m->header.job);

        if (!slot)
                return;

        /* The broker closes jobs first. If it did not, they end here: the ACK promises that the arenas are
         * left alone. */
        for (size_t i = 0; i < JOBS_MAX; i++)
                if (w->jobs[i] && w->jobs[i]->arenas == *slot)
                        close_job(w, &w->jobs[i]);
        *slot = arena_pair_unref(*slot);
}

/* What this backend cannot do, told from what is wrong: another worker can. */
static int check_backend(const Worker *w, const WireJobOpen *open, Fault *f) {
        if (w->backend->bf16_only && !wire_job_is_coding(open->kind) && open->compute == WIRE_COMPUTE_F32)
                return fault_set(f, -EOPNOTSUPP, FAULT_NOT_SUPPORTED,
                        "The %s worker computes in bf16: leave compute out or say bf16; f32 needs Worker=cpu.",
                        w->backend->ops->backend);
        if (open->sparse.method != SPARSE_NONE && !w->backend->ops->sparse_attention)
                return fault_set(f, -EOPNOTSUPP, FAULT_NOT_SUPPORTED,
                        "The %s worker has no sparse attention yet: leave sparse out, or set Worker=cpu.", w->backend->ops->backend);
        return 0;
}

static int open_job(Worker *w, const WireJobOpen *open, Job **slot, Fault *f) {
        ArenaPair **arenas = find_arenas(w, open->session);
        JobParts parts = {.model = model_table_find(&w->models, open->model)};
        int r;

        if (!slot)
                return fault_set(
                        f, -ENOBUFS, FAULT_LIMIT, "The worker holds %d jobs already: close some.", JOBS_MAX);
        if (!parts.model)
                return fault_set(f, -ENOENT, FAULT_INTERNAL,
                        "The job is for model %" PRIu64 ", which the worker does not hold.", open->model);
        if (!arenas)
                return fault_set(f, -ENOENT, FAULT_INTERNAL,
                        "The job is for session %" PRIu64 ", which has no arenas here.", open->session);
        for (uint32_t i = 0; i < open->n_loras && i < WIRE_LORAS_MAX; i++) {
                parts.loras[i] = model_table_find(&w->models, open->loras[i].model);
                if (!parts.loras[i])
                        return fault_set(f, -ENOENT, FAULT_INTERNAL,
                                "The job has model %" PRIu64
                                " as an adapter, which the worker does not hold.",
                                open->loras[i].model);
        }

        r = check_backend(w, open, f);
        if (r < 0)
                return r;

        if (open->numerics[0] != '\0' && strcmp(open->numerics, w->backend->ops->numerics_id) != 0)
                return fault_set(f, -EOPNOTSUPP, FAULT_NOT_SUPPORTED,
                        "The job was begun with numerics %.127s, this worker has %s: its bits would differ. "
                        "Start it "
                        "from the beginning.",
                        open->numerics, w->backend->ops->numerics_id);

        parts.arenas = *arenas;
        parts.ranks = rank_group_size(w->ranks);
        return job_new(open, &parts, link_epoch(w->link), slot, f);
}

/* JOB_OPEN, or the first part of JOB_RUN. The job, or NULL: it was refused. */
static int on_job_open(Worker *w, const WireMessage *m, Job **ret, Fault *f) {
        uint64_t begin = clock_usec();
        Job **slot = NULL;
        WireMessage reply;
        Fault fault = {};
        int r;

        timeline_note("asked");
        if (find_job(w, m->header.job))
                return fault_set(
                        f, -EPROTO, FAULT_INTERNAL, "Job %" PRIu64 " is open already.", m->header.job);

        for (size_t i = 0; !slot && i < JOBS_MAX; i++)
                if (!w->jobs[i])
                        slot = &w->jobs[i];

        r = open_job(w, &m->job_open, slot, &fault);
        if (r < 0) {
                reply_error(w, m->header.job, m->header.step, r, &fault);
                return 0;
        }

        (*slot)->open_usec = clock_usec() - begin;
        if (slot >= w->jobs + w->jobs_end)
                w->jobs_end = (size_t) (slot - w->jobs) + 1;

        wire_init(&reply, WIRE_JOB_READY, m->header.epoch, m->header.job, m->header.step);
        job_describe(*slot, &reply.job_ready);
        if ((*slot)->plan_only && job_has_plan(*slot))
                reply.job_ready.memory_bytes = step_planned_memory(&w->steps, *slot, rank_group_size(w->ranks));
        link_send(w->link, &reply);
        timeline_note("opened");
        *ret = *slot;
        return 0;
}

static void take_plan(Worker *w, Job *j, const WirePlan *plan) {
        int r;

        j->plan = plan_free(j->plan);
        j->plan_fault = (Fault){};
        j->plan_admitted = false;
        if (!job_has_plan(j))
                return;
        r = plan_new(plan, j->layout->rows, j->model->h3->config.heads, rank_group_size(w->ranks), &j->plan,
                &j->plan_fault);
        if (r == -ENOMEM)
                (void) fault_set(&j->plan_fault, r, FAULT_DOES_NOT_FIT,
                        "There is no memory for a plan (%zu bytes).", sizeof(Plan));
        if (r >= 0)
                j->plan->exchange = exchange_kind_of(j->plan->exchange, w->backend->ops);
}

static int on_plan(Worker *w, const WireMessage *m, Fault *f) {
        Job **slot = find_job(w, m->header.job);

        if (!slot)
                return fault_set(f, -EPROTO, FAULT_INTERNAL,
                        "PLAN is for job %" PRIu64 ", which is not open.", m->header.job);

        if ((*slot)->n_pending > 0)
                return fault_set(f, -EPROTO, FAULT_INTERNAL,
                        "PLAN came for job %" PRIu64 " while a step of it is queued or runs.", (*slot)->id);

        take_plan(w, *slot, &m->plan);
        return 0;
}

static int queue_step(Worker *w, Job *j, uint32_t step, Fault *f) {
        int r;

        j->n_pending++;
        r = rank_group_queue(w->ranks, j, step);
        if (r < 0)
                return fault_set(
                        f, -EPROTO, FAULT_INTERNAL, "More than %d steps are queued.", STEPS_QUEUED_MAX);
        return 0;
}

static int on_step_message(Worker *w, const WireMessage *m, Fault *f) {
        Job **slot = find_job(w, m->header.job);
        Fault fault = {};
        int r;

        if (slot)
                return queue_step(w, *slot, m->header.step, f);

        r = fault_set(&fault, -ENOENT, FAULT_INTERNAL, "STEP is for job %" PRIu64 ", which is not open.",
                m->header.job);
        reply_error(w, m->header.job, m->header.step, r, &fault);
        return 0;
}

static int on_job_run(Worker *w, const WireMessage *m, Fault *f) {
        Job *j = NULL;
        int r;

        if (m->job_open.kind == WIRE_JOB_MERGE || (m->job_open.flags & (WIRE_JOB_RESUME | WIRE_JOB_PLAN_ONLY)))
                return fault_set(f, -EPROTO, FAULT_INTERNAL, "JOB_RUN of a job that is resumed, merges or is only planned.");

        r = on_job_open(w, m, &j, f);
        if (r < 0 || !j)
                return r;

        take_plan(w, j, &m->job_run.plan);
        return queue_step(w, j, j->committed, f);
}

static void on_job_close(Worker *w, const WireMessage *m) {
        Job **slot = find_job(w, m->header.job);

        if (slot) /* else a refused job, or one that went with its arenas */
                close_job(w, slot);
}

static void on_cancel(Worker *w, const WireMessage *m) {
        Job **slot = find_job(w, m->header.job);

        if (slot)
                (*slot)->cancelled = true;
}

static int on_message(void *userdata, const WireMessage *m, int *fd, Fault *f) {
        Worker *w = userdata;
        Job *job;

        switch ((WireType) m->header.type) {

        case WIRE_WELCOME:
                return on_welcome(w, m, f);

        case WIRE_KNOWN_PINS:
                return on_known_pins(w, &m->pins, f);

        case WIRE_MODEL_OPEN:
                return model_table_open(&w->models, &m->model_open, f);

        case WIRE_REGION:
                return model_table_add_region(&w->models, &m->region, fd, f);

        case WIRE_MODEL_COMMIT:
                return on_model_commit(w, m, f);

        case WIRE_MODEL_CLOSE:
                on_model_close(w, m);
                report_memory(w);
                return 0;

        case WIRE_ARENA:
                return on_arena(w, m, *fd, f);

        case WIRE_ARENA_CLOSE:
                on_arena_close(w, m);
                return 0;

        case WIRE_JOB_OPEN:
                return on_job_open(w, m, &job, f);

        case WIRE_JOB_RUN:
                return on_job_run(w, m, f);

        case WIRE_PLAN:
                return on_plan(w, m, f);

        case WIRE_STEP:
                return on_step_message(w, m, f);

        case WIRE_JOB_CLOSE:
                on_job_close(w, m);
                report_memory(w);
                return 0;

        case WIRE_CANCEL:
                on_cancel(w, m);
                return 0;

        case WIRE_TRIM:
                merged_cache_clear(&w->steps.merged);
                mod_cache_clear(&w->steps.tables);
                encode_cache_clear(&w->steps.encodes);
                rank_group_poke(w->ranks);
                report_memory(w);
                return 0;

        case WIRE_DIE:
                reaper_kill_process();

        default:
                return fault_set(
                        f, -EPROTO, FAULT_INTERNAL, "The broker sent %s.", wire_type_name(m->header.type));
        }
}

int worker_start(const Backend *backend, int socket, const Fault *no_device, Fault *f) {
        Worker *w = &worker;
        WireMessage m;
        int r;

        r = link_new(socket, &w->link);
        if (r < 0)
                return fault_set(f, r, FAULT_INTERNAL, "The connection cannot be set up: %s.", strerror(-r));

        w->backend = backend;
        w->steps = (StepRunner){
                .backend = backend,
                .link = w->link,
                .merged = MERGED_CACHE_INIT,
                .tables = MOD_CACHE_INIT,
                .encodes = ENCODE_CACHE_INIT,
                .on_stuck = on_stuck,
                .userdata = w,
        };
#ifdef LATENT_TEST_HOOKS
        exchange_test_read(&w->steps.hook, &w->steps.deadline_usec);
#endif

        /* A worker without a device says so and waits for its end: the broker shows why. */
        wire_init(&m, WIRE_HELLO, 0, 0, 0);
        if (no_device) {
                (void) snprintf(m.hello.reason, sizeof(m.hello.reason), "%.511s", no_device->text);
                (void) log_error(0, "%s", no_device->text);
        } else {
                m.hello.n_devices = backend->devices(&m.hello);
                (void) snprintf(m.hello.kernels, sizeof(m.hello.kernels), "%s", backend->kernels ? backend->kernels : "");
                log_info("Version %s on %s (%s).", LATENTD_VERSION, m.hello.devices[0].name,
                        m.hello.devices[0].architecture);
        }
        w->n_devices = m.hello.n_devices;
        for (uint32_t i = 0; i < w->n_devices; i++)
                w->nodes[i] = m.hello.devices[i].numa_node < 0 ? 0 : (uint16_t) (m.hello.devices[i].numa_node + 1);
        (void) snprintf(m.hello.build_id, sizeof(m.hello.build_id), "%s", LATENTD_VERSION);
        (void) snprintf(m.hello.backend, sizeof(m.hello.backend), "%s", backend->ops->backend);
        (void) snprintf(m.hello.numerics_id, sizeof(m.hello.numerics_id), "%s", backend->ops->numerics_id);
        m.hello.sparse = backend->ops->sparse_attention != NULL;
        m.hello.pid = getpid();
        link_send(w->link, &m);
        return 0;
}

int worker_run(Fault *f) {
        return link_run(worker.link, on_message, &worker, f);
}
