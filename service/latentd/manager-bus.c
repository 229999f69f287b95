/* SPDX-License-Identifier: Apache-2.0 */
#include "service/latentd/manager.h"

#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "service/latentd/bus-error.h"
#include "service/latentd/job.h"
#include "service/latentd/memory.h"
#include "service/latentd/model.h"
#include "service/latentd/peer.h"
#include "service/latentd/remains.h"
#include "service/latentd/session.h"
#include "service/latentd/worker-link.h"
#include "service/latentd/worker-start.h"
#include "service/shared/cleanup.h"
#include "service/shared/log.h"

#define API_VERSION UINT32_C(1)
#define INTERFACE BUS_INTERFACE("Manager")


/* Below a directory of ModelPath=: what can be said without looking at the file system. */
static int check_model_name(const char *name, Fault *f) {
        size_t n = strlen(name);

        if (n == 0 || n > 1024)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT, "The name has %zu bytes; 1 to 1024 were expected.", n);

        if (name[0] == '/')
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                                 "\"%.256s\" is an absolute path; a path below a directory of ModelPath= was expected. "
                                 "Files elsewhere can be handed over with NewModel.", name);

        for (const char *p = name; *p; p += strcspn(p, "/"), p += strspn(p, "/"))
                if (strcspn(p, "/") == 2 && p[0] == '.' && p[1] == '.')
                        return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT, "\"%.256s\" contains \"..\", which no model name may.", name);

        return 0;
}

static int method_load_model(sd_bus_message *message, void *userdata, sd_bus_error *error) {
        Manager *m = userdata;
        const char *name;
        ModelOptions o;
        Fault f = {};
        Peer *p;
        Job *j;
        int r;

        r = peer_of_message(m, message, &p, &f);
        if (r >= 0)
                r = sd_bus_message_read(message, "s", &name);
        if (r >= 0)
                r = model_bus_read_options(message, m, false, &o, &f);
        if (r >= 0)
                r = check_model_name(name, &f);
        if (r >= 0)
                r = model_load(m, p, name, &o, &j, &f);
        if (r < 0)
                return bus_error_fault(error, r, &f);

        return job_bus_reply(j, message, error);
}

static int method_new_model(sd_bus_message *message, void *userdata, sd_bus_error *error) {
        CLEANUP_FREE char *path = NULL;
        Manager *m = userdata;
        ModelOptions o;
        Model *model;
        Fault f = {};
        Peer *p;
        int r;

        r = peer_of_message(m, message, &p, &f);
        if (r >= 0)
                r = model_bus_read_options(message, m, true, &o, &f);
        if (r >= 0)
                r = model_new(m, p, &o, o.name, &model, &f);
        if (r < 0)
                return bus_error_fault(error, r, &f);

        model_bus_announce(model);
        r = model_path(model, &path);
        if (r < 0)
                return r;

        return sd_bus_reply_method_return(message, "o", path);
}

static int append_job(sd_bus_message *reply, const Job *j) {
        CLEANUP_FREE char *path = NULL;
        int r;

        r = job_path(j, &path);
        if (r < 0)
                return r;

        return sd_bus_message_append(reply, "(oss)", path, job_kind_to_string(j->kind), job_state_to_string(j->state));
}

static int append_session(sd_bus_message *reply, const Session *s) {
        CLEANUP_FREE char *path = NULL, *model = NULL;
        int r;

        r = model_path(s->model, &model);
        if (r < 0)
                return r;

        r = session_path(s, &path);
        if (r < 0)
                return r;

        return sd_bus_message_append(reply, "(oo)", path, model);
}

static int append_jobs(Manager *m, sd_bus_message *reply, uid_t uid) {
        Job *j;
        int r;

        TAILQ_FOREACH(j, &m->jobs, entry) {
                if (j->uid != uid || !j->owner || j->hidden)
                        continue;

                r = append_job(reply, j);
                if (r < 0)
                        return r;
        }

        return 0;
}

static int append_sessions(Manager *m, sd_bus_message *reply, uid_t uid) {
        Session *s;
        int r;

        TAILQ_FOREACH(s, &m->sessions, entry) {
                if (s->uid != uid || s->state != SESSION_OPEN || s->form != SESSION_CLIENT)
                        continue;

                r = append_session(reply, s);
                if (r < 0)
                        return r;
        }

        return 0;
}

/* An array of whatever append() adds for the caller's user. */
static int reply_list(sd_bus_message *message, Manager *m, const char *contents,
                      int (*append)(Manager *m, sd_bus_message *reply, uid_t uid), sd_bus_error *error) {
        CLEANUP(sd_bus_message_unrefp) sd_bus_message *reply = NULL;
        Fault f = {};
        Peer *p;
        int r;

        r = peer_of_message(m, message, &p, &f);
        if (r < 0)
                return bus_error_fault(error, r, &f);

        r = sd_bus_message_new_method_return(message, &reply);
        if (r < 0)
                return r;

        r = sd_bus_message_open_container(reply, 'a', contents);
        if (r < 0)
                return r;

        r = append(m, reply, p->uid);
        if (r < 0)
                return r;

        r = sd_bus_message_close_container(reply);
        if (r < 0)
                return r;

        return sd_bus_send(NULL, reply, NULL);
}

static int method_list_jobs(sd_bus_message *message, void *userdata, sd_bus_error *error) {
        return reply_list(message, userdata, "(oss)", append_jobs, error);
}

static int method_list_sessions(sd_bus_message *message, void *userdata, sd_bus_error *error) {
        return reply_list(message, userdata, "(oo)", append_sessions, error);
}

/* A file's name is shown to those who may know it: it is below ModelPath=, or the user handed it over. */
static const char *region_name(Manager *m, const Region *region, uid_t uid) {
        const Model *model;

        TAILQ_FOREACH(model, &m->models, entry)
                for (size_t i = 0; model_visible(model, uid) && i < model->n_parts; i++)
                        if (model->parts[i].region == region)
                                return model->parts[i].name;

        return NULL;
}

static int append_error(sd_bus_message *reply, const char *key, int error) {
        return sd_bus_message_append(reply, "{sv}", key, "s", error < 0 ? strerror(-error) : "");
}

static int append_node_bytes(sd_bus_message *reply, const Region *region) {
        size_t n = numa_node_count();

        if (n > ELEMENTSOF(region->node_bytes))
                n = ELEMENTSOF(region->node_bytes);

        return bus_append_numbers(reply, "node-bytes", region->node_bytes, n);
}

static int append_numbers(sd_bus_message *reply, const Region *region) {
        const struct {
                const char *key;
                uint64_t value;
        } numbers[] = {
                { "bytes",          region->identity.size  },
                { "huge-bytes",     region->huge_bytes     },
                { "locked-bytes",   region->locked_bytes   },
                { "bytes-read",     region->read           },
                { "populate-usec",  region->populate_usec  },
                { "read-usec",      region->read_usec      },
                { "crc-usec",       region->crc_usec       },
                { "last-used-usec", region->last_used_usec },
        };
        int r;

        for (size_t i = 0; i < ELEMENTSOF(numbers); i++) {
                r = sd_bus_message_append(reply, "{sv}", numbers[i].key, "t", numbers[i].value);
                if (r < 0)
                        return r;
        }

        return 0;
}

static int append_region(sd_bus_message *reply, const Region *region, const char *name) {
        char id[24], policy[24];
        int r;

        (void) snprintf(id, sizeof(id), "%" PRIu64, region->id);

        r = sd_bus_message_open_container(reply, 'a', "{sv}");
        if (r < 0)
                return r;

        r = sd_bus_message_append(reply, "{sv}{sv}{sv}{sv}",
                                  "id", "s", id,
                                  "state", "s", region->state == REGION_COMPLETE ? "complete" : "loading",
                                  "users", "u", (uint32_t) region->n_ref,
                                  "numa", "s", numa_policy_format(&region->policy, policy));
        if (r >= 0)
                r = append_numbers(reply, region);
        if (r >= 0)
                r = append_node_bytes(reply, region);
        if (r >= 0)
                r = append_error(reply, "numa-error", region->numa_error);
        if (r >= 0)
                r = append_error(reply, "lock-error", region->lock_error);
        if (r >= 0 && name)
                r = sd_bus_message_append(reply, "{sv}", "name", "s", name);
        if (r < 0)
                return r;

        return sd_bus_message_close_container(reply);
}

static int append_regions(Manager *m, sd_bus_message *reply, uid_t uid) {
        int r;

        for (const Region *region = store_first(m->store); region; region = region->next) {
                if (region->state >= REGION_DEAD)
                        continue;

                r = append_region(reply, region, region_name(m, region, uid));
                if (r < 0)
                        return r;
        }

        return 0;
}

static int method_list_regions(sd_bus_message *message, void *userdata, sd_bus_error *error) {
        return reply_list(message, userdata, "a{sv}", append_regions, error);
}

static int method_drop_cache(sd_bus_message *message, void *userdata, sd_bus_error *error) {
        Manager *m = userdata;

        worker_link_trim(m->worker);
        return sd_bus_reply_method_return(message, "t", store_evict(m->store, UINT64_MAX));
}

static int method_release_gpus(sd_bus_message *message, void *userdata, sd_bus_error *error) {
        Manager *m = userdata;
        Fault f = {};
        int r;

        r = bus_read_dictionary(message, NULL, 0, &f);
        if (r < 0)
                return bus_error_fault(error, r, &f);

        r = worker_link_release(m->worker);
        if (r == -EBUSY)
                (void) fault_set(&f, r, FAULT_BUSY, "The worker is busy; cancel its jobs or wait for them first.");
        if (r < 0)
                return bus_error_fault(error, r, &f);

        return sd_bus_reply_method_return(message, NULL);
}

static int method_hold(sd_bus_message *message, void *userdata, sd_bus_error *error) {
        Fault f = {};

        return bus_error_fault(error, fault_set(&f, -EOPNOTSUPP, FAULT_NOT_SUPPORTED, "Hold is of a later version of this service."), &f);
}

static int property_get_text(sd_bus *bus, const char *path, const char *interface, const char *property, sd_bus_message *reply,
                             void *userdata, sd_bus_error *error) {
        const Manager *m = userdata;
        const struct {
                const char *property, *value;
        } table[] = {
                { "Version",     LATENTD_VERSION                                   },
                { "State",       m->state_reason[0] == '\0' ? "ready" : "degraded" },
                { "StateReason", m->state_reason                                   },
                { "NumericsId",  worker_link_numerics_id(m->worker)                },
                { "DeviceReason", worker_link_no_device(m->worker)                 },
                { "DeviceNotes", worker_link_notes(m->worker)                      },
                { "WorkerStart", worker_start_by_socket(m->config) ? "socket" : "spawn" },
        };

        for (size_t i = 0; i < ELEMENTSOF(table); i++)
                if (strcmp(table[i].property, property) == 0)
                        return sd_bus_message_append(reply, "s", table[i].value ? table[i].value : "");

        return -ENOENT;
}

static int property_get_features(sd_bus *bus, const char *path, const char *interface, const char *property, sd_bus_message *reply,
                                 void *userdata, sd_bus_error *error) {
        return sd_bus_message_append(reply, "as", 14, "step", "sample", "f32", "bf16", "conditions", "masks", "noise",
                                     "res_multistep", "lora", "plan", "tokenize", "encode", "decode", "encode-media");
}

static int property_get_api_version(sd_bus *bus, const char *path, const char *interface, const char *property,
                                    sd_bus_message *reply, void *userdata, sd_bus_error *error) {
        return sd_bus_message_append(reply, "u", API_VERSION);
}

static uint64_t headroom(Manager *m) {
        MemoryHeadroom h;
        int r;

        r = manager_headroom(m, &h);
        if (r < 0) {
                log_warning_errno(r, "Cannot tell how much memory is free");
                return 0;
        }

        return h.bytes;
}

static uint32_t n_regions(Manager *m) {
        uint32_t n = 0;

        for (const Region *region = store_first(m->store); region; region = region->next)
                n += region->state < REGION_DEAD;

        return n;
}

static int property_get_t(sd_bus *bus, const char *path, const char *interface, const char *property, sd_bus_message *reply,
                          void *userdata, sd_bus_error *error) {
        Manager *m = userdata;
        uint64_t v;

        if (strcmp(property, "WorkerStarts") == 0)
                v = worker_link_starts(m->worker);
        else if (strcmp(property, "BytesRead") == 0)
                v = store_bytes_read(m->store);
        else if (strcmp(property, "CacheBytes") == 0)
                v = store_bytes(m->store);
        else if (strcmp(property, "ArenaBytes") == 0) {
                remains_collect(m);
                v = m->arena_bytes;
        } else if (strcmp(property, "MergedBytes") == 0)
                v = m->merged_bytes;
        else if (strcmp(property, "CacheRamMax") == 0)
                v = m->config->cache_ram_max;
        else if (strcmp(property, "CacheRamReserve") == 0)
                v = m->config->cache_ram_reserve;
        else if (strcmp(property, "MemoryHeadroom") == 0)
                v = headroom(m);
        else
                return -ENOENT;

        return sd_bus_message_append(reply, "t", v);
}

static int property_get_u(sd_bus *bus, const char *path, const char *interface, const char *property, sd_bus_message *reply,
                          void *userdata, sd_bus_error *error) {
        Manager *m = userdata;
        uint32_t v;

        if (strcmp(property, "Workers") == 0)
                v = worker_link_is_ready(m->worker);
        else if (strcmp(property, "StuckReads") == 0)
                v = store_stuck(m->store) + m->n_stuck_opens;
        else if (strcmp(property, "Ranks") == 0)
                v = worker_link_ranks(m->worker);
        else
                v = n_regions(m);

        return sd_bus_message_append(reply, "u", v);
}

static const sd_bus_vtable manager_vtable[] = {
        SD_BUS_VTABLE_START(0),
        SD_BUS_METHOD_WITH_ARGS("LoadModel", SD_BUS_ARGS("s", name, "a{sv}", options), SD_BUS_RESULT("o", job), method_load_model,
                                SD_BUS_VTABLE_UNPRIVILEGED),
        SD_BUS_METHOD_WITH_ARGS("NewModel", SD_BUS_ARGS("a{sv}", options), SD_BUS_RESULT("o", model), method_new_model,
                                SD_BUS_VTABLE_UNPRIVILEGED),
        SD_BUS_METHOD_WITH_ARGS("OpenSession", SD_BUS_ARGS("a{sv}", options), SD_BUS_RESULT("o", session, "h", input, "h", output),
                                session_open, SD_BUS_VTABLE_UNPRIVILEGED),
        SD_BUS_METHOD_WITH_ARGS("ListJobs", SD_BUS_NO_ARGS, SD_BUS_RESULT("a(oss)", jobs), method_list_jobs, SD_BUS_VTABLE_UNPRIVILEGED),
        SD_BUS_METHOD_WITH_ARGS("ListSessions", SD_BUS_NO_ARGS, SD_BUS_RESULT("a(oo)", sessions), method_list_sessions,
                                SD_BUS_VTABLE_UNPRIVILEGED),
        SD_BUS_METHOD_WITH_ARGS("ListRegions", SD_BUS_NO_ARGS, SD_BUS_RESULT("aa{sv}", regions), method_list_regions,
                                SD_BUS_VTABLE_UNPRIVILEGED),
        SD_BUS_METHOD_WITH_ARGS("DropCache", SD_BUS_NO_ARGS, SD_BUS_RESULT("t", bytes), method_drop_cache, SD_BUS_VTABLE_UNPRIVILEGED),
        SD_BUS_METHOD_WITH_ARGS("ReleaseGpus", SD_BUS_ARGS("a{sv}", options), SD_BUS_NO_RESULT, method_release_gpus,
                                SD_BUS_VTABLE_UNPRIVILEGED),
        SD_BUS_METHOD_WITH_ARGS("Hold", SD_BUS_ARGS("s", why), SD_BUS_RESULT("h", inhibitor), method_hold, SD_BUS_VTABLE_UNPRIVILEGED),
        SD_BUS_PROPERTY("Version", "s", property_get_text, 0, SD_BUS_VTABLE_PROPERTY_CONST),
        SD_BUS_PROPERTY("ApiVersion", "u", property_get_api_version, 0, SD_BUS_VTABLE_PROPERTY_CONST),
        SD_BUS_PROPERTY("State", "s", property_get_text, 0, SD_BUS_VTABLE_PROPERTY_EMITS_CHANGE),
        SD_BUS_PROPERTY("StateReason", "s", property_get_text, 0, SD_BUS_VTABLE_PROPERTY_EMITS_CHANGE),
        SD_BUS_PROPERTY("Features", "as", property_get_features, 0, SD_BUS_VTABLE_PROPERTY_CONST),
        SD_BUS_PROPERTY("NumericsId", "s", property_get_text, 0, 0),
        SD_BUS_PROPERTY("DeviceReason", "s", property_get_text, 0, 0),
        SD_BUS_PROPERTY("DeviceNotes", "s", property_get_text, 0, 0),
        SD_BUS_PROPERTY("Workers", "u", property_get_u, 0, 0),
        SD_BUS_PROPERTY("WorkerStart", "s", property_get_text, 0, 0),
        SD_BUS_PROPERTY("Ranks", "u", property_get_u, 0, 0),
        SD_BUS_PROPERTY("WorkerStarts", "t", property_get_t, 0, 0),
        SD_BUS_PROPERTY("Steps", "t", NULL, offsetof(Manager, steps_done), 0),
        SD_BUS_PROPERTY("BytesRead", "t", property_get_t, 0, 0),
        SD_BUS_PROPERTY("CacheBytes", "t", property_get_t, 0, 0),
        SD_BUS_PROPERTY("CacheRegions", "u", property_get_u, 0, 0),
        SD_BUS_PROPERTY("CacheRamMax", "t", property_get_t, 0, 0),
        SD_BUS_PROPERTY("CacheRamReserve", "t", property_get_t, 0, 0),
        SD_BUS_PROPERTY("MemoryHeadroom", "t", property_get_t, 0, 0),
        SD_BUS_PROPERTY("ArenaBytes", "t", property_get_t, 0, 0),
        SD_BUS_PROPERTY("MergedBytes", "t", property_get_t, 0, 0),
        SD_BUS_PROPERTY("StuckReads", "u", property_get_u, 0, 0),
        SD_BUS_VTABLE_END
};

int manager_bus_register(Manager *m, sd_bus *bus) {
        int r;

        r = sd_bus_add_object_vtable(bus, NULL, BUS_ROOT, INTERFACE, manager_vtable, m);
        if (r < 0)
                return r;

        return sd_bus_add_object_manager(bus, NULL, BUS_ROOT);
}

void manager_bus_emit_state(Manager *m) {
        int r;

        if (m->stopping)
                return;

        for (sd_bus *bus = manager_next_bus(m, NULL); bus; bus = manager_next_bus(m, bus)) {
                r = sd_bus_emit_properties_changed(bus, BUS_ROOT, INTERFACE, "State", "StateReason", NULL);
                if (r < 0)
                        log_warning_errno(r, "Cannot tell the state of the service");
        }
}
