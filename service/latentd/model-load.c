/* SPDX-License-Identifier: Apache-2.0 */

/* From files to a model that is ready: open (pool), regions (store), check (worker). Loop thread except open_work(). */

#include "service/latentd/model.h"

#include <inttypes.h>
#include <string.h>

#include "service/latentd/bus-error.h"
#include "service/latentd/descriptors.h"
#include "service/latentd/file-source.h"
#include "service/latentd/job.h"
#include "service/latentd/loader.h"
#include "service/latentd/peer.h"
#include "service/latentd/queue.h"
#include "service/latentd/quota.h"
#include "service/latentd/worker-link.h"
#include "service/shared/cleanup.h"
#include "service/shared/clock.h"
#include "service/shared/log.h"
#include "service/shared/suffix.h"

#define PROGRESS_USEC UINT64_C(100000)
#define MIB UINT64_C(1048576)
#define STUCK_OPENS_MAX 4u /* each costs a thread */

/* What the pool works on. It outlives a model whose load was stopped. */
struct ModelOpen {
        Model *model; /* NULL: nobody wants the answer */
        const Config *config;
        Manager *manager;
        char *name; /* NULL: the model has its files */
        char *tokenizer; /* "": not given */
        bool stuck;
        ModelFiles files;
        FileIdentity *identities; /* of each file */
        Fault fault;
};

static ModelOpen *model_open_free(ModelOpen *o) {
        if (!o)
                return NULL;

        model_files_done(&o->files);
        free(o->identities);
        free(o->tokenizer);
        free(o->name);
        free(o);
        return NULL;
}
DEFINE_CLEANUP(ModelOpen *, model_open_free)

static void waiter_finish(Model *m, Model *result, Job *j, JobState state, const Fault *f) {
        j->model = result;
        j->bytes_read = state == JOB_DONE && j == m->waiters[0] ? m->bytes_read : 0;
        job_finish(j, state, f);
}

/* All waiting jobs end. result: the model they get, NULL for none. */
static void finish_waiters(Model *m, Model *result, JobState state, const Fault *f) {
        size_t n = m->n_waiters;

        m->n_waiters = 0;
        for (size_t i = 0; i < n; i++)
                waiter_finish(m, result, m->waiters[i], state, f);
}

void model_load_stop(Model *m, const Fault *f) {
        Fault stopped = {};

        if (m->state != MODEL_LOADING)
                return;

        m->timer = sd_event_source_disable_unref(m->timer);
        if (m->open)
                STEAL_PTR(m->open)->model = NULL;
        for (size_t i = 0; i < m->n_parts; i++)
                m->parts[i].request = store_request_cancel(m->parts[i].request);
        if (m->checking && m->manager->worker)
                worker_link_forget_model(m->manager->worker, m);
        m->checking = false;

        (void) fault_set(&stopped, -ECANCELED, FAULT_CANCELLED, "The load was stopped.");
        finish_waiters(m, NULL, JOB_FAILED, f ? f : &stopped);
}

/* A shared model that cannot be loaded goes; a private one stays to say so, unless nobody is left to ask. */
static void model_fail(Model *m, int r, const Fault *f) {
        Fault copy = {};

        if (f && f->name[0] != '\0')
                copy = *f;
        else
                (void) fault_set(&copy, r, FAULT_INTERNAL, "Loading failed: %s.", strerror(-r));

        log_info("model %" PRIu64 " was not loaded: %s", m->id, copy.name);
        model_load_stop(m, &copy);

        if (m->defer && m->n_users > 0) {
                model_rest(m); /* its users may try again */
                return;
        }

        if (!m->is_private || !m->owner) {
                m->state = MODEL_FAILED;
                model_free(m);
                return;
        }

        model_release_parts(m, false);
        model_set_state(m, MODEL_FAILED);
}

/* Of what is in the files the worker does not know whose they are. Of a model of one file it begins with that: once is enough. */
static void name_model(const Model *m, const Fault *f, Fault *ret) {
        const char *file = m->n_parts == 1 ? m->parts[0].name : "";
        size_t n = strlen(file);

        if (n > 0 && strncmp(f->text, file, n) == 0 && (f->text[n] == ':' || f->text[n] == ' ') &&
                (strcmp(m->name, file) == 0 || has_suffix(m->name, file)))
                (void) fault_set(ret, -EIO, f->name, "%.256s%s", m->name, f->text + n);
        else
                (void) fault_set(ret, -EIO, f->name, "%.256s: %s", m->name, f->text);
}

static void on_worker_model(void *userdata, Model *model, const WireModelReady *info, const Fault *f) {
        Model *m = userdata;

        m->checking = false;
        if (f) {
                Fault named = {};

                if (strcmp(f->name, FAULT_INVALID_MODEL) == 0 || strcmp(f->name, FAULT_INVALID_FILE) == 0)
                        name_model(m, f, &named);
                model_fail(m, -EIO, named.name[0] != '\0' ? &named : f);
                return;
        }

        m->timer = sd_event_source_disable_unref(m->timer);
        m->info = *info;
        bus_text(m->info.layout);
        bus_text(m->info.qkv_order);
        bus_text(m->info.partition);
        bus_text(m->info.types);
        bus_text(m->info.support);
        bus_text(m->info.warning);
        m->identity = model_identity(m);
        for (size_t i = 0; i < m->n_parts; i++)
                m->parts[i].region->ease = model_ease(m->info.kind);
        m->last_used_usec = clock_usec();
        log_info("model %" PRIu64 " is ready: %zu files, %" PRIu64 " bytes, %" PRIu64 " read", m->id, m->n_parts, m->bytes,
                 m->bytes_read);
        if (m->info.warning[0] != '\0')
                log_warning("model %" PRIu64 ": %s", m->id, m->info.warning);
        model_set_state(m, MODEL_READY);
        finish_waiters(m, m, JOB_DONE, NULL);

        if (m->is_private && !m->owner && m->n_users == 0)
                model_free(m);
}

static void waiters_progress(Model *m, const char *phase) {
        uint64_t done = model_resident_bytes(m);

        for (size_t i = 0; i < m->n_waiters; i++) {
                Job *j = m->waiters[i];

                job_start(j, phase);
                j->phase = phase;
                j->block = (uint32_t) (done / MIB);
                j->blocks = (uint32_t) ((m->bytes + MIB - 1) / MIB);
                if (done == m->bytes)
                        j->block = j->blocks;
                if (done > 0)
                        j->eta_usec = (uint64_t) ((double) (m->bytes - done) / (double) done *
                                                  (double) (clock_usec() - j->started_usec));
                j->fraction = m->bytes > 0 ? (double) done / (double) m->bytes : 0.0;
                job_progress(j);
        }
}

/* Whether everybody who waits for it has crashed workers too often lately. */
static uint64_t crash_wait_usec(const Model *m) {
        uint64_t least = UINT64_MAX;

        for (size_t i = 0; i < m->n_waiters; i++) {
                uint64_t usec = queue_wait_usec(m->manager->queue, m->waiters[i]->uid);

                least = usec < least ? usec : least;
        }

        return m->n_waiters > 0 ? least : 0;
}

static void model_check(Model *m) {
        uint64_t wait = crash_wait_usec(m);
        Fault f = {};
        int r;

        if (wait > 0) {
                (void) fault_set(&f, -EDQUOT, FAULT_LIMIT,
                                 "Your jobs and loads have crashed workers too often (CrashBudget=): load the model again in %" PRIu64
                                 " s.",
                                 wait / 1000000 + 1);
                model_fail(m, -EDQUOT, &f);
                return;
        }

        waiters_progress(m, "check");
        m->checking = true;
        r = worker_link_open_model(m->manager->worker, m, on_worker_model, m);
        if (r < 0) {
                m->checking = false;
                model_fail(m, r, NULL);
        }
}

static bool leaves_before(const Model *a, const Model *b) {
        uint32_t ease_a = model_ease(a->info.kind), ease_b = model_ease(b->info.kind);

        return ease_a != ease_b ? ease_a > ease_b : a->last_used_usec < b->last_used_usec;
}

bool model_deferred_gives_way(Manager *manager, const Model *loading) {
        Model *m, *first = NULL;

        TAILQ_FOREACH(m, &manager->models, entry)
                if (m != loading && model_can_rest(m) && (!first || leaves_before(m, first)))
                        first = m;

        if (first)
                model_rest(first);
        return first;
}

bool model_idle_gives_way(Manager *manager, const Model *loading) {
        Model *m, *first = NULL;

        TAILQ_FOREACH(m, &manager->models, entry)
                if (m != loading && !m->is_private && m->state == MODEL_READY && !m->keep && m->n_users == 0 &&
                    (!first || leaves_before(m, first)))
                        first = m;

        return (first && model_unload(first, NULL) >= 0) || model_deferred_gives_way(manager, loading);
}

static void on_region(void *userdata, int r, Region *region, uint64_t bytes_read, const Fault *f);

static int get_region(ModelPart *p, Fault *f) {
        const Model *m = p->model;
        char label[MODEL_LABEL_MAX];

        return store_get(m->manager->store, p->fd, model_file_label(m, p->name, label), &m->numa, on_region, p, &p->request, f);
}

static void on_region(void *userdata, int r, Region *region, uint64_t bytes_read, const Fault *f) {
        ModelPart *p = userdata;
        Model *m = p->model;

        p->request = NULL;
        if (r < 0 && strcmp(f->name, FAULT_DOES_NOT_FIT) == 0 && model_idle_gives_way(m->manager, m) &&
            get_region(p, NULL) >= 0)
                return;

        if (r < 0) {
                model_fail(m, r, f);
                return;
        }

        p->region = region;
        if (m->keep)
                region->keep = true;
        if (p->fd >= 0 && !m->defer)
                (void) close(STEAL_FD(p->fd));
        m->bytes_read += bytes_read;

        for (size_t i = 0; i < m->n_parts; i++)
                if (!m->parts[i].region)
                        return;

        model_check(m);
}

static int on_timer(sd_event_source *s, uint64_t usec, void *userdata) {
        Model *m = userdata;
        int r;

        waiters_progress(m, m->checking ? "check" : "read");

        r = sd_event_source_set_time_relative(s, PROGRESS_USEC);
        if (r < 0)
                return r;

        return sd_event_source_set_enabled(s, SD_EVENT_ONESHOT);
}

static void get_regions(Model *m) {
        Fault f = {};
        int r;

        r = sd_event_add_time_relative(m->manager->event, &m->timer, CLOCK_MONOTONIC, PROGRESS_USEC, 0, on_timer, m);
        if (r < 0) {
                model_fail(m, r, NULL);
                return;
        }

        waiters_progress(m, "read");
        for (size_t i = 0; i < m->n_parts; i++) {
                r = get_region(&m->parts[i], &f);
                if (r < 0) {
                        model_fail(m, r, &f);
                        return;
                }
        }
}

static int open_work(void *userdata) {
        ModelOpen *o = userdata;
        int r;

        if (!o->name)
                return 0;

        r = model_files_open(o->config, o->name, o->tokenizer, &o->files, &o->fault);
        if (r < 0)
                return r;

        o->identities = calloc(o->files.n_files, sizeof(*o->identities));
        if (!o->identities)
                return -ENOMEM;

        for (size_t i = 0; i < o->files.n_files; i++) {
                r = file_source_identity(&file_io_system, o->files.files[i].fd, &o->identities[i]);
                if (r < 0)
                        return fault_set(&o->fault, r, FAULT_IO, "%s cannot be examined: %s.", o->files.files[i].name, strerror(-r));
        }

        return 0;
}

static bool same_files(const Model *m, const ModelOpen *o) {
        if (m->n_parts != o->files.n_files)
                return false;

        for (size_t i = 0; i < m->n_parts; i++)
                if (strcmp(m->parts[i].name, o->files.files[i].name) != 0 ||
                    !file_source_same(&o->identities[i], m->parts[i].region ? &m->parts[i].region->identity : &m->parts[i].identity))
                        return false;

        return true;
}

static Model *find_shared(const Model *like, ModelState state) {
        Model *m;

        TAILQ_FOREACH(m, &like->manager->models, entry)
                if (m != like && !m->is_private && !m->superseded && m->state == state && strcmp(m->name, like->name) == 0 &&
                    strcmp(m->tokenizer, like->tokenizer) == 0 && m->qkv_order == like->qkv_order &&
                    strcmp(m->partition, like->partition) == 0 &&
                    m->numa.kind == like->numa.kind && (m->numa.kind != NUMA_BIND || m->numa.node == like->numa.node))
                        return m;

        return NULL;
}

/* The files of this model are not what they were: free it now if nobody uses it, since its successor needs the memory. */
static void supersede(Model *old) {
        old->superseded = true;
        old->n_users++;
        model_user_remove(old);
}

static int take_files(Model *m, ModelOpen *o) {
        m->parts = calloc(o->files.n_files, sizeof(*m->parts));
        if (!m->parts)
                return -ENOMEM;

        m->n_parts = o->files.n_files;
        for (size_t i = 0; i < m->n_parts; i++) {
                ModelFile *file = &o->files.files[i];

                m->parts[i] = (ModelPart) {
                        .model = m,
                        .name = STEAL_PTR(file->name),
                        .fd = STEAL_FD(file->fd),
                        .size = o->identities[i].size,
                        .identity = o->identities[i],
                };
                m->bytes += m->parts[i].size;
        }

        return 0;
}

/* The model goes on without it; what it opens is closed when it comes back. */
static void on_open_stuck(void *userdata) {
        ModelOpen *o = userdata;
        Model *m = STEAL_PTR(o->model);
        Fault f = {};

        o->stuck = true;
        o->manager->n_stuck_opens++;
        log_warning("A ModelPath= directory does not answer: %u loads wait there for ever", o->manager->n_stuck_opens);
        if (!m)
                return;

        m->open = NULL;
        (void) fault_set(&f, -ETIMEDOUT, FAULT_IO,
                         "%s: the file system of ModelPath= gave no answer for %u s, the load was given up.", o->name,
                         (unsigned) (LOADER_STALL_USEC / 1000000));
        model_fail(m, -ETIMEDOUT, &f);
}

static int waiter_add(Model *m, Job *j) {
        Job **waiters;

        waiters = reallocarray(m->waiters, m->n_waiters + 1, sizeof(*waiters));
        if (!waiters)
                return -ENOMEM;

        m->waiters = waiters;
        m->waiters[m->n_waiters++] = j;
        j->model = m;
        return 0;
}

static void wake(Model *m) {
        m->bytes_read = 0;
        model_set_state(m, MODEL_LOADING);
        get_regions(m);
}

int model_want(Model *m, Job *j) {
        int r;

        r = waiter_add(m, j);
        if (r < 0)
                return r;

        if (m->state == MODEL_DEFERRED)
                wake(m);
        return 0;
}

/* The jobs that wait for m wait for another model of the same files. */
static int move_waiters(Model *m, Model *to) {
        for (size_t i = 0; i < m->n_waiters; i++) {
                int r;

                r = waiter_add(to, m->waiters[i]);
                if (r < 0)
                        return r;
        }

        m->n_waiters = 0;
        return 0;
}

/* An object for these files is there already. True: m is not needed, and gone. */
static bool join_other(Model *m, Model *old) {
        if (old->state == MODEL_READY || m->defer) {
                old->last_used_usec = clock_usec();
                finish_waiters(m, old, JOB_DONE, NULL);
        } else if (move_waiters(m, old) >= 0)
                wake(old);
        else
                return false;

        model_free(m);
        return true;
}

static void defer(Model *m) {
        Fault f = {};
        int r;

        r = descriptors_check("A deferred model", &f);
        if (r < 0) {
                model_fail(m, r, &f);
                return;
        }

        model_set_state(m, MODEL_DEFERRED);
        finish_waiters(m, m, JOB_DONE, NULL);
}

static void on_opened(void *userdata, int r) {
        CLEANUP(model_open_freep) ModelOpen *o = userdata;
        Model *m = o->model, *old;

        if (o->stuck)
                o->manager->n_stuck_opens--;
        if (!m)
                return;

        m->open = NULL;
        if (r < 0) {
                model_fail(m, r, &o->fault);
                return;
        }

        if (o->name) {
                old = find_shared(m, MODEL_READY);
                if (!old)
                        old = find_shared(m, MODEL_DEFERRED);
                if (old && same_files(old, o) && join_other(m, old))
                        return;

                if (old) {
                        m->keep = old->keep;
                        supersede(old);
                }

                r = take_files(m, o);
                if (r < 0) {
                        model_fail(m, r, NULL);
                        return;
                }

                model_bus_announce(m);
        }

        if (m->defer)
                defer(m);
        else
                get_regions(m);
}

/* Even a model that has its files goes through the pool: its job must not end before the caller knows the job. */
static int start(Model *m, const char *name, Job *j) {
        CLEANUP(model_open_freep) ModelOpen *o = NULL;
        int r;

        o = calloc(1, sizeof(*o));
        if (!o)
                return -ENOMEM;

        o->model = m;
        o->manager = m->manager;
        o->config = m->manager->config;
        if (name) {
                o->name = strdup(name);
                o->tokenizer = strdup(m->tokenizer);
                if (!o->name || !o->tokenizer)
                        return -ENOMEM;
        }

        r = waiter_add(m, j);
        if (r < 0)
                return r;

        r = file_jobs_submit(store_file_jobs(m->manager->store), open_work, on_open_stuck, on_opened, o);
        if (r < 0) {
                m->n_waiters = 0;
                j->model = NULL;
                return r;
        }

        m->open = STEAL_PTR(o);
        return 0;
}

static int load_shared(Manager *m, const char *name, const ModelOptions *o, Job *j, Fault *f) {
        Model *model, *loading;
        int r;

        if (m->n_stuck_opens >= STUCK_OPENS_MAX)
                return fault_set(f, -ETIMEDOUT, FAULT_IO,
                                 "%u loads below ModelPath= were given up since a file system there does not answer; no more are begun "
                                 "until one of them comes back.",
                                 m->n_stuck_opens);

        r = model_new(m, NULL, o, name, &model, f);
        if (r < 0)
                return r;

        loading = find_shared(model, MODEL_LOADING);
        if (loading) {
                model_free(model);
                return waiter_add(loading, j);
        }

        r = start(model, name, j);
        if (r < 0) {
                model_free(model);
                return r;
        }

        model_set_state(model, MODEL_LOADING);
        return 0;
}

int model_load(Manager *m, Peer *p, const char *name, const ModelOptions *o, Job **ret, Fault *f) {
        Job *j;
        int r;

        r = job_new(m, p, JOB_LOAD, &j, f);
        if (r < 0)
                return r;

        r = load_shared(m, name, o, j, f);
        if (r < 0) {
                job_free(j);
                return r;
        }

        *ret = j;
        return 0;
}

int model_commit(Model *m, Peer *p, Job **ret, Fault *f) {
        Job *j;
        int r;

        if (!m->is_private || m->state != MODEL_NEW)
                return fault_set(f, -EBUSY, m->state == MODEL_LOADING ? FAULT_BUSY : FAULT_INVALID_ARGUMENT,
                                 "The model is %s; only a new one, made by NewModel, can be committed.", model_state_to_string(m->state));

        if (m->n_parts == 0)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT, "The model has no files; add some with AddFiles first.");

        model_hash_files(m);
        r = quota_check_model(m, f);
        if (r < 0)
                return r;

        r = job_new(m->manager, p, JOB_LOAD, &j, f);
        if (r < 0)
                return r;

        r = start(m, NULL, j);
        if (r < 0) {
                job_free(j);
                return r;
        }

        model_set_state(m, MODEL_LOADING);
        *ret = j;
        return 0;
}

void model_load_cancel(Model *m, Job *j) {
        size_t i;

        for (i = 0; i < m->n_waiters; i++)
                if (m->waiters[i] == j)
                        break;

        if (i == m->n_waiters)
                return;

        m->n_waiters--;
        memmove(&m->waiters[i], &m->waiters[i + 1], (m->n_waiters - i) * sizeof(*m->waiters));
        j->model = NULL;

        if (m->n_waiters == 0) {
                Fault f = {};

                model_fail(m, fault_set(&f, -ECANCELED, FAULT_CANCELLED, "The load was cancelled."), &f);
        }
}
