/* SPDX-License-Identifier: Apache-2.0 */
#include "service/latentd/model.h"

#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "service/latentd/bus-error.h"
#include "service/latentd/job.h"
#include "service/latentd/peer.h"
#include "service/latentd/session.h"
#include "service/latentd/worker-link.h"
#include "service/shared/cleanup.h"
#include "service/shared/log.h"

#define INTERFACE BUS_INTERFACE("Model")


static int parse_qkv_order(const char *s, WireQkvOrder *ret, Fault *f) {
        if (strcmp(s, "auto") == 0)
                *ret = WIRE_QKV_AUTO;
        else if (strcmp(s, "interleaved") == 0)
                *ret = WIRE_QKV_INTERLEAVED;
        else if (strcmp(s, "stacked") == 0)
                *ret = WIRE_QKV_STACKED;
        else
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                                 "qkv-order \"%.32s\" is unknown; auto, interleaved or stacked was expected.", s);
        return 0;
}

static int check_partition(const char *s, Fault *f) {
        if (strcmp(s, "fl2va") == 0 || strcmp(s, "ref2va") == 0)
                return 0;

        return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT, "partition \"%.32s\" is unknown; fl2va or ref2va was expected.", s);
}

int model_bus_read_options(sd_bus_message *message, Manager *m, bool with_name, ModelOptions *ret, Fault *f) {
        const char *name = "unnamed", *qkv_order = "auto", *partition = NULL, *numa = NULL, *tokenizer = "";
        ModelOptions o = { .numa = m->config->numa_policy };
        bool tokenizer_seen = false;
        int defer = false;
        const BusKey keys[] = {
                { "qkv-order", "s", &qkv_order },
                { "partition", "s", &partition },
                { "numa",      "s", &numa      },
                { "defer",     "b", &defer     },
                with_name ? (BusKey) { "name", "s", &name } : (BusKey) { "tokenizer", "s", &tokenizer, &tokenizer_seen },
        };
        int r;

        r = bus_read_dictionary(message, keys, ELEMENTSOF(keys), f);
        if (r < 0)
                return r;

        r = parse_qkv_order(qkv_order, &o.qkv_order, f);
        if (r < 0)
                return r;

        if (partition) {
                r = check_partition(partition, f);
                if (r < 0)
                        return r;

                (void) snprintf(o.partition, sizeof(o.partition), "%s", partition);
        }

        if (numa && numa_policy_parse(numa, &o.numa) < 0)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                                 "numa \"%.32s\" is unknown; auto, default, interleave or bind:N was expected.", numa);

        r = numa ? numa_policy_check(&o.numa, f) : 0;
        if (r < 0)
                return -EINVAL;

        if (name[0] == '\0' || strlen(name) >= sizeof(o.name))
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT, "The name has %zu bytes; 1 to %zu were expected.",
                                 strlen(name), sizeof(o.name) - 1);

        if ((tokenizer_seen && tokenizer[0] == '\0') || strlen(tokenizer) >= sizeof(o.tokenizer))
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT, "\"tokenizer\" has %zu bytes; 1 to %zu were expected.",
                                 strlen(tokenizer), sizeof(o.tokenizer) - 1);

        o.defer = defer;
        (void) snprintf(o.name, sizeof(o.name), "%s", name);
        (void) snprintf(o.tokenizer, sizeof(o.tokenizer), "%s", tokenizer);
        *ret = o;
        return 0;
}

static int read_files(sd_bus_message *message, ModelFile *files, size_t *ret_n, Fault *f) {
        size_t n = 0;
        int r;

        r = sd_bus_message_enter_container(message, 'a', "(sh)");
        if (r < 0)
                return r;

        for (;;) {
                const char *name;
                int fd;

                r = sd_bus_message_read(message, "(sh)", &name, &fd);
                if (r < 0)
                        return r;
                if (r == 0)
                        break;

                if (n == MODEL_FILES_PER_CALL)
                        return fault_set(f, -E2BIG, FAULT_INVALID_ARGUMENT,
                                         "More than %d files in one call; add the others with further calls.", MODEL_FILES_PER_CALL);

                files[n++] = (ModelFile) { .name = (char *) name, .fd = fd }; /* both live as long as the message */
        }

        *ret_n = n;
        return sd_bus_message_exit_container(message);
}

static int method_add_files(sd_bus_message *message, void *userdata, sd_bus_error *error) {
        ModelFile files[MODEL_FILES_PER_CALL];
        Model *m = userdata;
        Fault f = {};
        size_t n = 0;
        int r;

        r = read_files(message, files, &n, &f);
        if (r < 0)
                return bus_error_fault(error, r, &f);

        r = model_add_files(m, files, n, &f);
        if (r < 0)
                return bus_error_fault(error, r, &f);

        return sd_bus_reply_method_return(message, NULL);
}

static int method_commit(sd_bus_message *message, void *userdata, sd_bus_error *error) {
        Model *m = userdata;
        Fault f = {};
        Peer *p;
        Job *j;
        int r;

        r = peer_of_message(m->manager, message, &p, &f);
        if (r < 0)
                return bus_error_fault(error, r, &f);

        r = model_commit(m, p, &j, &f);
        if (r < 0)
                return bus_error_fault(error, r, &f);

        return job_bus_reply(j, message, error);
}

static int method_unload(sd_bus_message *message, void *userdata, sd_bus_error *error) {
        Fault f = {};
        int r;

        r = model_unload(userdata, &f);
        if (r < 0)
                return bus_error_fault(error, r, &f);

        return sd_bus_reply_method_return(message, NULL);
}

static int method_pin(sd_bus_message *message, void *userdata, sd_bus_error *error) {
        int pin, r;

        r = sd_bus_message_read(message, "b", &pin);
        if (r < 0)
                return r;

        model_pin(userdata, pin);
        return sd_bus_reply_method_return(message, NULL);
}

/* Empty until ready. */
static const char *kind_text(const Model *m) {
        if (m->state != MODEL_READY)
                return "";

        return model_kind_to_string(m->info.kind);
}

static int property_get_text(sd_bus *bus, const char *path, const char *interface, const char *property, sd_bus_message *reply,
                             void *userdata, sd_bus_error *error) {
        const Model *m = userdata;
        const struct {
                const char *property, *value;
        } table[] = {
                { "Name",      m->name                          },
                { "State",     model_state_to_string(m->state)  },
                { "Kind",      kind_text(m)                     },
                { "Support",   m->info.support                  },
                { "Warning",   m->info.warning                  },
                { "Partition", m->state == MODEL_READY ? m->info.partition : m->partition },
                { "Layout",    m->info.layout                   },
                { "QkvOrder",  m->info.qkv_order                },
                { "Types",     m->info.types                    },
        };

        for (size_t i = 0; i < ELEMENTSOF(table); i++)
                if (strcmp(table[i].property, property) == 0)
                        return sd_bus_message_append_basic(reply, 's', table[i].value);

        return -ENOENT;
}

static int property_get_identity(sd_bus *bus, const char *path, const char *interface, const char *property, sd_bus_message *reply,
                                 void *userdata, sd_bus_error *error) {
        const Model *m = userdata;
        char text[17] = "";

        if (m->state == MODEL_READY)
                (void) snprintf(text, sizeof(text), "%016" PRIx64, m->identity);

        return sd_bus_message_append(reply, "s", text);
}

static int property_get_flag(sd_bus *bus, const char *path, const char *interface, const char *property, sd_bus_message *reply,
                             void *userdata, sd_bus_error *error) {
        const Model *m = userdata;

        return sd_bus_message_append(reply, "b", strcmp(property, "Private") == 0 ? m->is_private : m->keep);
}

static int property_get_config(sd_bus *bus, const char *path, const char *interface, const char *property, sd_bus_message *reply,
                               void *userdata, sd_bus_error *error) {
        const Model *m = userdata;

        if (m->state != MODEL_READY)
                return sd_bus_message_append(reply, "a{sv}", 0);

        return sd_bus_message_append(reply, "a{sv}", 9,
                                     "shift-video", "d", (double) m->info.shift_video,
                                     "shift-audio", "d", (double) m->info.shift_audio,
                                     "layers", "u", m->info.layers,
                                     "refiner-layers", "u", m->info.refiner_layers,
                                     "heads", "u", m->info.heads,
                                     "head-dim", "u", m->info.head_dim,
                                     "hidden", "u", m->info.hidden,
                                     "ffn", "u", m->info.ffn,
                                     "text-dim", "u", m->info.text_dim);
}

static int property_get_resident(sd_bus *bus, const char *path, const char *interface, const char *property, sd_bus_message *reply,
                                 void *userdata, sd_bus_error *error) {
        return sd_bus_message_append(reply, "t", model_resident_bytes(userdata));
}

/* LockedBytes, HugeBytes: over all regions. */
static int property_get_region_bytes(sd_bus *bus, const char *path, const char *interface, const char *property,
                                     sd_bus_message *reply, void *userdata, sd_bus_error *error) {
        bool locked = strcmp(property, "LockedBytes") == 0;
        const Model *m = userdata;
        uint64_t bytes = 0;

        for (size_t i = 0; i < m->n_parts; i++)
                if (m->parts[i].region)
                        bytes += locked ? m->parts[i].region->locked_bytes : m->parts[i].region->huge_bytes;

        return sd_bus_message_append(reply, "t", bytes);
}

/* What the worker said last of the models whose weights are on its devices. */
static int property_get_device(sd_bus *bus, const char *path, const char *interface, const char *property, sd_bus_message *reply,
                               void *userdata, sd_bus_error *error) {
        const Model *m = userdata;
        const WireDeviceModel d = worker_link_device_model(m->manager->worker, m->id);

        if (strcmp(property, "DeviceBlocks") == 0)
                return sd_bus_message_append(reply, "u", d.blocks);
        if (strcmp(property, "DeviceBytes") == 0)
                return sd_bus_message_append(reply, "t", d.bytes);
        return sd_bus_message_append(reply, "t", d.registered_bytes); /* PinnedBytes */
}

static int property_get_node_bytes(sd_bus *bus, const char *path, const char *interface, const char *property,
                                   sd_bus_message *reply, void *userdata, sd_bus_error *error) {
        uint64_t bytes[ELEMENTSOF(((Region *) NULL)->node_bytes)] = {};
        const Model *m = userdata;
        size_t n = numa_node_count();

        for (size_t i = 0; i < m->n_parts; i++)
                for (size_t k = 0; m->parts[i].region && k < ELEMENTSOF(bytes); k++)
                        bytes[k] += m->parts[i].region->node_bytes[k];

        if (n > ELEMENTSOF(bytes))
                n = ELEMENTSOF(bytes);

        return sd_bus_message_append_array(reply, 't', bytes, n * sizeof(*bytes));
}

static int property_get_numa_policy(sd_bus *bus, const char *path, const char *interface, const char *property,
                                    sd_bus_message *reply, void *userdata, sd_bus_error *error) {
        const Model *m = userdata;
        char policy[24], text[128];
        int numa_error = 0;

        for (size_t i = 0; i < m->n_parts; i++)
                if (m->parts[i].region && m->parts[i].region->numa_error < 0)
                        numa_error = m->parts[i].region->numa_error;

        if (numa_error < 0)
                (void) snprintf(text, sizeof(text), "%s (not applied: %s)", numa_policy_format(&m->numa, policy), strerror(-numa_error));
        else
                (void) snprintf(text, sizeof(text), "%s", numa_policy_format(&m->numa, policy));

        return sd_bus_message_append(reply, "s", text);
}

static int property_get_users(sd_bus *bus, const char *path, const char *interface, const char *property, sd_bus_message *reply,
                              void *userdata, sd_bus_error *error) {
        const Model *m = userdata;
        const Session *s;
        uint32_t n = 0;

        TAILQ_FOREACH(s, &m->manager->sessions, entry)
                if (session_uses(s, m) && s->state == SESSION_OPEN && s->form == SESSION_CLIENT)
                        n++;

        return sd_bus_message_append(reply, "u", n);
}

static const sd_bus_vtable model_vtable[] = {
        SD_BUS_VTABLE_START(0),
        SD_BUS_METHOD_WITH_ARGS("AddFiles", SD_BUS_ARGS("a(sh)", files), SD_BUS_NO_RESULT, method_add_files, SD_BUS_VTABLE_UNPRIVILEGED),
        SD_BUS_METHOD_WITH_ARGS("Commit", SD_BUS_NO_ARGS, SD_BUS_RESULT("o", job), method_commit, SD_BUS_VTABLE_UNPRIVILEGED),
        SD_BUS_METHOD_WITH_ARGS("Unload", SD_BUS_NO_ARGS, SD_BUS_NO_RESULT, method_unload, SD_BUS_VTABLE_UNPRIVILEGED),
        SD_BUS_METHOD_WITH_ARGS("Pin", SD_BUS_ARGS("b", pin), SD_BUS_NO_RESULT, method_pin, SD_BUS_VTABLE_UNPRIVILEGED),
        SD_BUS_PROPERTY("Name", "s", property_get_text, 0, SD_BUS_VTABLE_PROPERTY_CONST),
        SD_BUS_PROPERTY("State", "s", property_get_text, 0, SD_BUS_VTABLE_PROPERTY_EMITS_CHANGE),
        SD_BUS_PROPERTY("Private", "b", property_get_flag, 0, SD_BUS_VTABLE_PROPERTY_CONST),
        SD_BUS_PROPERTY("Kind", "s", property_get_text, 0, 0),
        SD_BUS_PROPERTY("Support", "s", property_get_text, 0, 0),
        SD_BUS_PROPERTY("Warning", "s", property_get_text, 0, 0),
        SD_BUS_PROPERTY("Partition", "s", property_get_text, 0, 0),
        SD_BUS_PROPERTY("Layout", "s", property_get_text, 0, 0),
        SD_BUS_PROPERTY("QkvOrder", "s", property_get_text, 0, 0),
        SD_BUS_PROPERTY("Types", "s", property_get_text, 0, 0),
        SD_BUS_PROPERTY("Identity", "s", property_get_identity, 0, 0),
        SD_BUS_PROPERTY("Config", "a{sv}", property_get_config, 0, 0),
        SD_BUS_PROPERTY("Bytes", "t", NULL, offsetof(Model, bytes), 0),
        SD_BUS_PROPERTY("ResidentBytes", "t", property_get_resident, 0, 0),
        SD_BUS_PROPERTY("LockedBytes", "t", property_get_region_bytes, 0, 0),
        SD_BUS_PROPERTY("PinnedBytes", "t", property_get_device, 0, 0),
        SD_BUS_PROPERTY("DeviceBytes", "t", property_get_device, 0, 0),
        SD_BUS_PROPERTY("DeviceBlocks", "u", property_get_device, 0, 0),
        SD_BUS_PROPERTY("HugeBytes", "t", property_get_region_bytes, 0, 0),
        SD_BUS_PROPERTY("PrivateBytes", "t", NULL, offsetof(Model, info.private_bytes), 0),
        SD_BUS_PROPERTY("NodeBytes", "at", property_get_node_bytes, 0, 0),
        SD_BUS_PROPERTY("NumaPolicy", "s", property_get_numa_policy, 0, 0),
        SD_BUS_PROPERTY("BytesRead", "t", NULL, offsetof(Model, bytes_read), 0),
        SD_BUS_PROPERTY("Users", "u", property_get_users, 0, 0),
        SD_BUS_PROPERTY("KeepPinned", "b", property_get_flag, 0, 0),
        SD_BUS_VTABLE_END
};

/* Signals of shared models are made outside of calls, so these are found without a caller. */
static int find_model(sd_bus *bus, const char *path, const char *interface, void *userdata, void **ret_found, sd_bus_error *error) {
        Manager *m = userdata;
        Model *model;
        uint64_t id;
        Peer *p;

        if (bus_path_id(path, BUS_ROOT "/model/", &id) < 0)
                return 0;

        model = model_find(m, id);
        if (!model || !model->announced)
                return 0;

        if (model->is_private) {
                p = peer_of_call(m, bus);
                if (!p || !model_visible(model, p->uid))
                        return 0;
        }

        *ret_found = model;
        return 1;
}

static int enumerate_models(sd_bus *bus, const char *prefix, void *userdata, char ***ret_nodes, sd_bus_error *error) {
        Manager *m = userdata;
        Peer *p = peer_of_call(m, bus);
        Model *model;
        size_t n = 0;
        char **nodes;

        TAILQ_FOREACH(model, &m->models, entry)
                n++;

        nodes = calloc(n + 1, sizeof(*nodes));
        if (!nodes)
                return -ENOMEM;

        n = 0;
        TAILQ_FOREACH(model, &m->models, entry) {
                if (!p || !model_visible(model, p->uid))
                        continue;

                if (model_path(model, &nodes[n]) < 0) {
                        while (n > 0)
                                free(nodes[--n]);
                        free(nodes);
                        return -ENOMEM;
                }
                n++;
        }

        *ret_nodes = nodes;
        return 1;
}

int model_bus_register(Manager *m, sd_bus *bus) {
        int r;

        r = sd_bus_add_fallback_vtable(bus, NULL, BUS_ROOT "/model", INTERFACE, model_vtable, find_model, m);
        if (r < 0)
                return r;

        return sd_bus_add_node_enumerator(bus, NULL, BUS_ROOT "/model", enumerate_models, m);
}

/* Broadcasts reach every user of the bus: private models are not announced, their maker has the path from NewModel. */
static void emit(Model *m, bool added) {
        CLEANUP_FREE char *path = NULL;
        int r;

        if (m->is_private || m->manager->stopping)
                return;

        r = model_path(m, &path);
        if (r < 0) {
                log_warning_errno(r, "Cannot announce model %" PRIu64, m->id);
                return;
        }

        for (sd_bus *bus = manager_next_bus(m->manager, NULL); bus; bus = manager_next_bus(m->manager, bus)) {
                r = added ? sd_bus_emit_object_added(bus, path) : sd_bus_emit_object_removed(bus, path);
                if (r < 0)
                        log_warning_errno(r, "Cannot announce model %" PRIu64, m->id);
        }
}
void model_bus_announce(Model *m) {
        m->announced = true;
        emit(m, true);
}

void model_bus_withdraw(Model *m) {
        if (m->announced)
                emit(m, false);
        m->announced = false;
}

/* As sd_bus_emit_properties_changed() does it, to the maker alone. */
static int send_private_state(Model *m, const char *path) {
        CLEANUP(sd_bus_message_unrefp) sd_bus_message *message = NULL;
        int r;

        r = sd_bus_message_new_signal(m->owner->bus, &message, path, "org.freedesktop.DBus.Properties", "PropertiesChanged");
        if (r < 0)
                return r;

        r = sd_bus_message_append(message, "sa{sv}as", INTERFACE, 1, "State", "s", model_state_to_string(m->state), 0);
        if (r < 0)
                return r;

        return peer_send(m->owner, STEAL_PTR(message), false);
}

void model_bus_emit_state(Model *m) {
        CLEANUP_FREE char *path = NULL;
        int r;

        if (!m->announced || m->manager->stopping || (m->is_private && (!m->owner || !m->owner->bus)))
                return;

        r = model_path(m, &path);
        if (r >= 0 && m->is_private)
                r = send_private_state(m, path);
        for (sd_bus *bus = m->is_private ? NULL : manager_next_bus(m->manager, NULL); r >= 0 && bus;
             bus = manager_next_bus(m->manager, bus))
                r = sd_bus_emit_properties_changed(bus, path, INTERFACE, "State", NULL);
        if (r < 0)
                log_warning_errno(r, "Cannot tell the state of model %" PRIu64, m->id);
}
