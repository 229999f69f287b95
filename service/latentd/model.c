/* SPDX-License-Identifier: Apache-2.0 */
#include "service/latentd/model.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include "service/latentd/bus-error.h"
#include "service/latentd/descriptors.h"
#include "service/latentd/job.h"
#include "service/latentd/peer.h"
#include "service/latentd/worker-link.h"
#include "service/shared/cleanup.h"
#include "service/shared/clock.h"
#include "service/shared/log.h"
#include "service/shared/suffix.h"

static void forget_in_worker(Model *m) {
        if (m->manager->worker) /* NULL while the service stops */
                worker_link_forget_model(m->manager->worker, m);
}

const char *model_state_to_string(ModelState s) {
        static const char *const names[] = {
                [MODEL_NEW] = "new", [MODEL_DEFERRED] = "deferred", [MODEL_LOADING] = "loading", [MODEL_READY] = "ready",
                [MODEL_FAILED] = "failed",
        };

        return names[s];
}

const char *model_kind_to_string(uint32_t kind) {
        static const char *const names[] = {
                [WIRE_MODEL_DENOISER] = "denoiser",   [WIRE_MODEL_LORA] = "lora",           [WIRE_MODEL_CONDITIONER] = "conditioner",
                [WIRE_MODEL_VIDEO_VAE] = "video-vae", [WIRE_MODEL_AUDIO_VAE] = "audio-vae",
        };

        return kind < ELEMENTSOF(names) ? names[kind] : "unknown";
}

uint32_t model_ease(uint32_t kind) {
        switch (kind) {

        case WIRE_MODEL_CONDITIONER:
                return 2;

        case WIRE_MODEL_VIDEO_VAE:
        case WIRE_MODEL_AUDIO_VAE:
                return 1;

        default:
                return 0;
        }
}

/* The administrator wants its memory back. Not while the service stops: then clients go only to come back to the next one. */
static bool goes_after_use(const Model *m) {
        static const uint32_t parts[] = {
                [WIRE_MODEL_DENOISER] = CONFIG_PART_DENOISER,   [WIRE_MODEL_CONDITIONER] = CONFIG_PART_CONDITIONER,
                [WIRE_MODEL_VIDEO_VAE] = CONFIG_PART_VIDEO_VAE, [WIRE_MODEL_AUDIO_VAE] = CONFIG_PART_AUDIO_VAE,
        };

        return m->state == MODEL_READY && !m->keep && !m->manager->stopping && m->info.kind < ELEMENTSOF(parts) &&
               (m->manager->config->evict_after_use & parts[m->info.kind]);
}

Model *model_find(Manager *m, uint64_t id) {
        Model *model;

        TAILQ_FOREACH(model, &m->models, entry)
                if (model->id == id)
                        return model;

        return NULL;
}

bool model_visible(const Model *m, uid_t uid) {
        return m->announced && (!m->is_private || m->uid == uid);
}

int model_path(const Model *m, char **ret) {
        char *path;

        if (asprintf(&path, BUS_ROOT "/model/%" PRIu64, m->id) < 0)
                return -ENOMEM;

        *ret = path;
        return 0;
}

int model_from_path(Manager *m, const char *path, uid_t uid, Model **ret) {
        Model *model;
        uint64_t id;

        if (bus_path_id(path, BUS_ROOT "/model/", &id) < 0)
                return -ENOENT;

        model = model_find(m, id);
        if (!model || !model_visible(model, uid))
                return -ENOENT;

        *ret = model;
        return 0;
}

const char *model_partition_of_name(const char *name) {
        if (strcasestr(name, "ref2va"))
                return "ref2va";

        return strcasestr(name, "fl2va") ? "fl2va" : "";
}

/* The others come from folders of their own: of a tokenizer, of a scheduler. */
static bool is_of_folder(const char *file) {
        return has_suffix(file, ".safetensors") || has_suffix(file, ".safetensors.index.json") || strcmp(file, "config.json") == 0;
}

const char *model_file_label(const Model *m, const char *file, char ret[static MODEL_LABEL_MAX]) {
        size_t n = strlen(m->name), begin;

        while (n > 0 && m->name[n - 1] == '/')
                n--;
        for (begin = n; begin > 0 && m->name[begin - 1] != '/'; begin--)
                ;
        n -= begin;

        if (n == 0 || !is_of_folder(file) || (n == strlen(file) && memcmp(m->name + begin, file, n) == 0)) /* a model of one file */
                (void) snprintf(ret, MODEL_LABEL_MAX, "%s", file);
        else
                (void) snprintf(ret, MODEL_LABEL_MAX, "%.*s/%s", n < 256 ? (int) n : 256, m->name + begin, file);
        return ret;
}

static int check_limits(Manager *m, const Peer *owner, Fault *f) {
        size_t n = 0, max = owner ? MODELS_OPEN_MAX : MODELS_SHARED_MAX;
        Model *model;

        TAILQ_FOREACH(model, &m->models, entry)
                if (model->is_private ? owner && model->uid == owner->uid : !owner)
                        n++;

        if (n < max)
                return 0;

        return fault_set(f, -EDQUOT, FAULT_LIMIT, owner
                         ? "You have opened %zu models of your own, the most that one user may have: unload one, or end a program that "
                           "has one."
                         : "%zu models are loaded, the most that this service keeps; unload one first.", n);
}

int model_new(Manager *m, Peer *owner, const ModelOptions *o, const char *name, Model **ret, Fault *f) {
        const char *partition = o->partition[0] != '\0' ? o->partition : model_partition_of_name(name);
        Model *model;
        int r;

        r = check_limits(m, owner, f);
        if (r < 0)
                return r;

        model = calloc(1, sizeof(*model));
        if (!model)
                return -ENOMEM;

        model->name = strdup(name);
        model->tokenizer = strdup(o->tokenizer);
        if (!model->name || !model->tokenizer) {
                free(model->name);
                free(model->tokenizer);
                free(model);
                return -ENOMEM;
        }

        model->id = m->next_id++;
        model->manager = m;
        model->owner = owner;
        model->uid = owner ? owner->uid : 0;
        model->is_private = !!owner;
        model->qkv_order = o->qkv_order;
        model->numa = o->numa;
        model->defer = o->defer;
        (void) snprintf(model->partition, sizeof(model->partition), "%s", partition);
        model->last_used_usec = clock_usec();
        TAILQ_INSERT_TAIL(&m->models, model, entry);
        *ret = model;
        return 0;
}

static bool name_is_plain(const char *name) {
        size_t n = strlen(name);

        if (n == 0 || n >= sizeof(((WireRegion *) NULL)->name) || strcmp(name, ".") == 0 || strcmp(name, "..") == 0)
                return false;

        for (const char *p = name; *p; p++)
                if (*p == '/' || (unsigned char) *p < 0x20 || *p == 0x7f)
                        return false;

        return true;
}

static int check_descriptor(const char *name, int fd, FileIdentity *ret, Fault *f) {
        struct statx st;
        int flags;

        flags = fcntl(fd, F_GETFL);
        if (flags < 0)
                return -errno;

        if ((flags & O_PATH) || (flags & O_ACCMODE) == O_WRONLY)
                return fault_set(f, -EBADF, FAULT_INVALID_ARGUMENT, "The descriptor of \"%s\" is not open for reading.", name);

        /* What the kernel knows already: a file system in user space (or far away) must not keep the loop waiting. The loader looks
         * closely, on the pool. */
        if (statx(fd, "", AT_EMPTY_PATH | AT_STATX_DONT_SYNC, STATX_BASIC_STATS, &st) < 0)
                return -errno;

        if (!S_ISREG(st.stx_mode))
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT, "The descriptor of \"%s\" is not a regular file.", name);

        *ret = (FileIdentity){
                .device = makedev(st.stx_dev_major, st.stx_dev_minor),
                .inode = st.stx_ino,
                .size = st.stx_size,
                .mtime_sec = st.stx_mtime.tv_sec,
                .mtime_nsec = st.stx_mtime.tv_nsec,
                .ctime_sec = st.stx_ctime.tv_sec,
                .ctime_nsec = st.stx_ctime.tv_nsec,
        };
        return 0;
}

static int check_file(const Model *m, const ModelFile *files, size_t i, Fault *f) {
        const char *name = files[i].name;

        if (!name_is_plain(name))
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                                 "\"%.64s\" is not a base name: 1 to 255 bytes without '/' and control characters were expected.", name);

        for (size_t k = 0; k < m->n_parts; k++)
                if (strcmp(m->parts[k].name, name) == 0)
                        return fault_set(f, -EEXIST, FAULT_INVALID_ARGUMENT, "The model has a file \"%s\" already.", name);

        for (size_t k = 0; k < i; k++)
                if (strcmp(files[k].name, name) == 0)
                        return fault_set(f, -EEXIST, FAULT_INVALID_ARGUMENT, "The file \"%s\" is given twice.", name);

        return 0;
}

static int check_files(const Model *m, const ModelFile *files, size_t n_files, Fault *f) {
        size_t n_open = 0;
        Model *model;
        int r;

        if (!m->is_private || m->state != MODEL_NEW)
                return fault_set(f, -EBUSY, FAULT_INVALID_ARGUMENT,
                                 "The model is %s: files can only be added to a model made by NewModel, before Commit.",
                                 m->is_private ? model_state_to_string(m->state) : "one of ModelPath=");

        if (n_files > MODEL_FILES_PER_CALL)
                return fault_set(f, -E2BIG, FAULT_INVALID_ARGUMENT, "%zu files in one call; at most %d are allowed, in several calls.",
                                 n_files, MODEL_FILES_PER_CALL);

        if (m->n_parts + n_files > MODEL_FILES_MAX)
                return fault_set(f, -E2BIG, FAULT_LIMIT, "The model would have %zu files; at most %d are allowed.",
                                 m->n_parts + n_files, MODEL_FILES_MAX);

        TAILQ_FOREACH(model, &m->manager->models, entry)
                for (size_t i = 0; model->is_private && model->uid == m->uid && i < model->n_parts; i++)
                        n_open += model->parts[i].fd >= 0;

        if (n_open + n_files > MODEL_OPEN_FILES_MAX)
                return fault_set(f, -EDQUOT, FAULT_LIMIT,
                                 "You would have %zu files open in models that are not loaded yet; at most %d are allowed. Wait until some "
                                 "are loaded, or unload one.",
                                 n_open + n_files, MODEL_OPEN_FILES_MAX);

        for (size_t i = 0; i < n_files; i++) {
                r = check_file(m, files, i, f);
                if (r < 0)
                        return r;
        }

        return descriptors_check("A file", f);
}

static int part_fill(Model *m, const ModelFile *file, ModelPart *ret, Fault *f) {
        CLEANUP_CLOSE int fd = -EBADF;
        CLEANUP_FREE char *name = NULL;
        FileIdentity identity;
        int r;

        r = check_descriptor(file->name, file->fd, &identity, f);
        if (r < 0)
                return r;

        fd = fcntl(file->fd, F_DUPFD_CLOEXEC, 3);
        if (fd < 0)
                return -errno;

        name = strdup(file->name);
        if (!name)
                return -ENOMEM;

        *ret = (ModelPart) { .model = m, .name = STEAL_PTR(name), .fd = STEAL_FD(fd), .size = identity.size, .identity = identity };
        return 0;
}

static uint64_t hash_bytes(uint64_t h, const void *bytes, size_t n) {
        for (const unsigned char *p = bytes; n > 0; n--)
                h = (h ^ *p++) * UINT64_C(0x100000001b3);
        return h;
}

void model_hash_files(Model *m) {
        uint64_t h = hash_bytes(REGION_HASH_BEGIN, m->partition, strlen(m->partition) + 1);

        h = hash_bytes(h, &m->qkv_order, sizeof(m->qkv_order));
        h = hash_bytes(h, &m->numa.kind, sizeof(m->numa.kind));
        h = hash_bytes(h, &m->numa.node, sizeof(m->numa.node));
        for (size_t i = 0; i < m->n_parts; i++) {
                h = hash_bytes(h, m->parts[i].name, strlen(m->parts[i].name) + 1);
                h = hash_bytes(h, &m->parts[i].identity, sizeof(m->parts[i].identity)); /* no padding: file_source_same() */
        }
        m->files_hash = h;
}

static void part_done(ModelPart *p) {
        if (p->fd >= 0)
                (void) close(p->fd);
        free(p->name);
}

int model_add_files(Model *m, const ModelFile *files, size_t n_files, Fault *f) {
        ModelPart added[MODEL_FILES_PER_CALL], *parts;
        size_t n = 0;
        int r;

        r = check_files(m, files, n_files, f);
        if (r < 0)
                return r;

        for (; n < n_files; n++) {
                r = part_fill(m, &files[n], &added[n], f);
                if (r < 0)
                        goto fail;
        }

        parts = reallocarray(m->parts, m->n_parts + n_files, sizeof(*parts));
        if (!parts && n_files > 0) {
                r = -ENOMEM;
                goto fail;
        }

        m->parts = parts;
        for (size_t i = 0; i < n_files; i++) {
                m->parts[m->n_parts++] = added[i];
                m->bytes += added[i].size;
        }

        return 0;

fail:
        while (n > 0)
                part_done(&added[--n]);
        return r;
}

/* A region is kept as long as one pinned model uses it. */
static void region_update_keep(Manager *m, Region *region) {
        Model *model;

        region->keep = false;
        TAILQ_FOREACH(model, &m->models, entry)
                for (size_t i = 0; model->keep && i < model->n_parts; i++)
                        if (model->parts[i].region == region)
                                region->keep = true;
}

void model_pin(Model *m, bool pin) {
        m->keep = pin;

        for (size_t i = 0; i < m->n_parts; i++)
                if (m->parts[i].region)
                        region_update_keep(m->manager, m->parts[i].region);
}

static void release_region(Model *m, ModelPart *p, bool drop) {
        Region *region = STEAL_PTR(p->region);

        p->request = store_request_cancel(p->request);
        if (!region)
                return;

        region_update_keep(m->manager, region);
        store_region_unref(m->manager->store, region);
        if (drop)
                (void) store_drop(m->manager->store, region);
}

/* A Render that waits for its next phase, or has not come to it yet, does not run on it. */
static bool has_jobs(const Model *m) {
        const Job *j;

        TAILQ_FOREACH(j, &m->manager->unfinished, unfinished_entry)
                if (j->model == m && j->kind != JOB_RENDER)
                        return true;

        return false;
}

bool model_can_rest(const Model *m) {
        return m->defer && m->state == MODEL_READY && !m->keep && m->n_wanted == 0 && !has_jobs(m);
}

void model_rest(Model *m) {
        log_info("the weights of model %" PRIu64 " go until they are needed", m->id);
        model_mend_stop(m);
        forget_in_worker(m);
        for (size_t i = 0; i < m->n_parts; i++)
                release_region(m, &m->parts[i], true);
        model_set_state(m, MODEL_DEFERRED);
}

void model_wanted_add(Model *m) {
        m->n_wanted++;
}

void model_wanted_remove(Model *m) {
        m->n_wanted--;
        if (model_can_rest(m) && goes_after_use(m))
                model_rest(m);
}

void model_release_parts(Model *m, bool drop) {
        model_mend_stop(m);

        for (size_t i = 0; i < m->n_parts; i++) {
                release_region(m, &m->parts[i], drop);
                part_done(&m->parts[i]);
        }

        free(m->parts);
        m->parts = NULL;
        m->n_parts = 0;
}

void model_set_state(Model *m, ModelState state) {
        m->state = state;
        model_bus_emit_state(m);
}

uint64_t model_resident_bytes(const Model *m) {
        uint64_t bytes = 0, done, total;

        for (size_t i = 0; i < m->n_parts; i++) {
                const ModelPart *p = &m->parts[i];

                if (p->region)
                        bytes += p->size;
                else if (p->request) {
                        store_request_progress(p->request, &done, &total);
                        bytes += done < p->size ? done : p->size;
                }
        }

        return bytes;
}

uint64_t model_identity(const Model *m) {
        uint64_t h = REGION_HASH_BEGIN;

        for (size_t i = 0; i < m->n_parts; i++)
                h = region_hash(m->parts[i].region, m->parts[i].name, h);
        return h;
}

int model_unload(Model *m, Fault *f) {
        if (m->n_users > 0)
                return fault_set(f, -EBUSY, FAULT_BUSY,
                                 "The model is in use by %u sessions and unfinished jobs; close them first.", m->n_users);

        if (m->state == MODEL_LOADING)
                return fault_set(f, -EBUSY, FAULT_BUSY, "The model is loading; cancel its load job first.");

        log_info("model %" PRIu64 " is unloaded", m->id);
        forget_in_worker(m);
        model_release_parts(m, true);
        model_free(m);
        return 0;
}

void model_user_add(Model *m) {
        m->n_users++;
        m->last_used_usec = clock_usec();
}

void model_user_remove(Model *m) {
        m->n_users--;
        m->last_used_usec = clock_usec();
        for (size_t i = 0; i < m->n_parts; i++)
                if (m->parts[i].region)
                        store_region_touch(m->parts[i].region);

        if (m->n_users > 0)
                return;

        if (m->superseded) {
                forget_in_worker(m);
                model_release_parts(m, true); /* no file leads to these bytes any more */
                model_free(m);
        } else if (m->is_private && !m->owner && m->n_waiters == 0)
                model_free(m);
        else if (goes_after_use(m) || (m->state == MODEL_DEFERRED && !m->is_private))
                (void) model_unload(m, NULL);
}

void model_peer_gone(Peer *p) {
        Model *m, *next;

        for (m = TAILQ_FIRST(&p->manager->models); m; m = next) {
                next = TAILQ_NEXT(m, entry);

                if (m->owner != p)
                        continue;

                m->owner = NULL;
                if (m->n_users == 0 && m->n_waiters == 0)
                        model_free(m);
        }
}

Model *model_free(Model *m) {
        Manager *manager;
        Job *j;

        if (!m)
                return NULL;

        manager = m->manager;
        model_mend_stop(m);
        model_load_stop(m, NULL);
        forget_in_worker(m);
        model_bus_withdraw(m);
        TAILQ_REMOVE(&manager->models, m, entry);
        m->keep = false;
        model_release_parts(m, false);

        TAILQ_FOREACH(j, &manager->jobs, entry)
                if (j->model == m)
                        j->model = NULL;

        free(m->waiters);
        free(m->name);
        free(m->tokenizer);
        free(m);
        return NULL;
}
