/* SPDX-License-Identifier: Apache-2.0 */
#include "service/latentd/manager.h"

#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "service/latentd/bus-error.h"
#include "service/latentd/worker-link.h"
#include "service/shared/cleanup.h"
#include "service/shared/log.h"

#define PREFIX BUS_ROOT "/device/"

static int device_path(const Device *d, char **ret) {
        return asprintf(ret, PREFIX "%" PRIu64, d->id) < 0 ? -ENOMEM : 0;
}

static int property_get_text(sd_bus *bus, const char *path, const char *interface, const char *property, sd_bus_message *reply,
                             void *userdata, sd_bus_error *error) {
        const Device *d = userdata;
        const struct {
                const char *property, *value;
        } table[] = {
                { "Kind",         d->kind              },
                { "Name",         d->info.name         },
                { "Uuid",         d->info.uuid         },
                { "PciAddress",   d->info.pci_address  },
                { "Architecture", d->info.architecture },
                { "Kernels",      d->kernels           },
                { "State",        device_state(d)      },
        };

        for (size_t i = 0; i < ELEMENTSOF(table); i++)
                if (strcmp(table[i].property, property) == 0)
                        return sd_bus_message_append_basic(reply, 's', table[i].value);

        return -ENOENT;
}

/* Of the worker's devices, WIRE_DEVICES_MAX: it is none of them. */
static uint32_t place_of(const WireHello *h, const Device *d) {
        for (uint32_t i = 0; h && d->present && i < h->n_devices; i++)
                if (d->info.pci_address[0] != '\0' && strcmp(h->devices[i].pci_address, d->info.pci_address) == 0)
                        return i;

        return WIRE_DEVICES_MAX;
}

/* To each other device: what was measured by the first worker that had both. */
static int append_link(sd_bus_message *reply, const char *property, const char *other, uint32_t peer, uint32_t host) {
        bool direct = peer > 0 && peer >= host;

        if (strcmp(property, "Links") == 0)
                return sd_bus_message_append(reply, "(od)", other, (direct ? peer : host) * 1e6);

        return sd_bus_message_append(reply, "(ostt)", other, direct ? "p2p" : "host", (uint64_t) peer * 1000000, (uint64_t) host * 1000000);
}

static int property_get_links(sd_bus *bus, const char *path, const char *interface, const char *property, sd_bus_message *reply,
                              void *userdata, sd_bus_error *error) {
        const Device *d = userdata, *other;
        const WireHello *h = worker_link_hello(d->manager->worker);
        uint32_t from = place_of(h, d);
        int r;

        r = sd_bus_message_open_container(reply, 'a', strcmp(property, "Links") == 0 ? "(od)" : "(ostt)");
        TAILQ_FOREACH(other, &d->manager->devices, entry) {
                uint32_t to = place_of(h, other);
                CLEANUP_FREE char *name = NULL;

                if (r < 0 || from == to || from == WIRE_DEVICES_MAX || to == WIRE_DEVICES_MAX)
                        continue;
                r = device_path(other, &name);
                if (r >= 0)
                        r = append_link(reply, property, name, h->peer_mbs[from][to], h->host_mbs[from][to]);
        }

        return r < 0 ? r : sd_bus_message_close_container(reply);
}

static int property_get_nccl(sd_bus *bus, const char *path, const char *interface, const char *property, sd_bus_message *reply,
                             void *userdata, sd_bus_error *error) {
        const Device *d = userdata;
        const WireHello *h = worker_link_hello(d->manager->worker);
        char version[32] = "";

        if (place_of(h, d) < WIRE_DEVICES_MAX && h->nccl > 0)
                (void) snprintf(version, sizeof(version), "%" PRIu32 ".%" PRIu32 ".%" PRIu32, h->nccl / 10000, h->nccl / 100 % 100,
                        h->nccl % 100);
        return sd_bus_message_append(reply, "s", version);
}

static int property_get_parts(sd_bus *bus, const char *path, const char *interface, const char *property, sd_bus_message *reply,
                              void *userdata, sd_bus_error *error) {
        static const char *const names[] = {
                [GPU_PART_DENOISER] = "denoiser",
                [GPU_PART_CONDITIONER] = "conditioner",
                [GPU_PART_VAE] = "vae",
        };
        const Device *d = userdata;
        int r;

        r = sd_bus_message_open_container(reply, 'a', "s");
        for (GpuPart p = 0; p < _GPU_PART_MAX && r >= 0; p++)
                if (d->parts >> p & 1)
                        r = sd_bus_message_append(reply, "s", names[p]);

        return r < 0 ? r : sd_bus_message_close_container(reply);
}

static const sd_bus_vtable device_vtable[] = {
        SD_BUS_VTABLE_START(0),
        SD_BUS_PROPERTY("Kind", "s", property_get_text, 0, SD_BUS_VTABLE_PROPERTY_CONST),
        SD_BUS_PROPERTY("Name", "s", property_get_text, 0, SD_BUS_VTABLE_PROPERTY_CONST),
        SD_BUS_PROPERTY("Uuid", "s", property_get_text, 0, SD_BUS_VTABLE_PROPERTY_CONST),
        SD_BUS_PROPERTY("PciAddress", "s", property_get_text, 0, SD_BUS_VTABLE_PROPERTY_CONST),
        SD_BUS_PROPERTY("Architecture", "s", property_get_text, 0, SD_BUS_VTABLE_PROPERTY_CONST),
        SD_BUS_PROPERTY("Kernels", "s", property_get_text, 0, 0),
        SD_BUS_PROPERTY("NumaNode", "i", NULL, offsetof(Device, info.numa_node), SD_BUS_VTABLE_PROPERTY_CONST),
        SD_BUS_PROPERTY("MemoryTotal", "t", NULL, offsetof(Device, info.memory_total), SD_BUS_VTABLE_PROPERTY_CONST),
        SD_BUS_PROPERTY("MemoryFree", "t", NULL, offsetof(Device, info.memory_free), 0),
        SD_BUS_PROPERTY("State", "s", property_get_text, 0, SD_BUS_VTABLE_PROPERTY_EMITS_CHANGE),
        SD_BUS_PROPERTY("Links", "a(od)", property_get_links, 0, 0),
        SD_BUS_PROPERTY("Transports", "a(ostt)", property_get_links, 0, 0),
        SD_BUS_PROPERTY("Nccl", "s", property_get_nccl, 0, 0),
        SD_BUS_PROPERTY("Share", "d", NULL, offsetof(Device, share), 0),
        SD_BUS_PROPERTY("Parts", "as", property_get_parts, 0, 0),
        SD_BUS_VTABLE_END
};

static int find_device(sd_bus *bus, const char *path, const char *interface, void *userdata, void **ret_found, sd_bus_error *error) {
        Manager *m = userdata;
        uint64_t id;
        Device *d;

        if (bus_path_id(path, PREFIX, &id) < 0)
                return 0;

        TAILQ_FOREACH(d, &m->devices, entry)
                if (d->id == id) {
                        *ret_found = d;
                        return 1;
                }

        return 0;
}

static int enumerate_devices(sd_bus *bus, const char *prefix, void *userdata, char ***ret_nodes, sd_bus_error *error) {
        Manager *m = userdata;
        size_t n = 0;
        char **nodes;
        Device *d;

        TAILQ_FOREACH(d, &m->devices, entry)
                n++;

        nodes = calloc(n + 1, sizeof(*nodes));
        if (!nodes)
                return -ENOMEM;

        n = 0;
        TAILQ_FOREACH(d, &m->devices, entry) {
                if (device_path(d, &nodes[n]) < 0) {
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

int device_bus_register(Manager *m, sd_bus *bus) {
        int r;

        r = sd_bus_add_fallback_vtable(bus, NULL, BUS_ROOT "/device", BUS_INTERFACE("Device"), device_vtable, find_device, m);
        if (r < 0)
                return r;

        return sd_bus_add_node_enumerator(bus, NULL, BUS_ROOT "/device", enumerate_devices, m);
}

void device_bus_announce(Device *d) {
        CLEANUP_FREE char *path = NULL;
        int r;

        if (d->manager->stopping)
                return;

        r = device_path(d, &path);
        for (sd_bus *bus = manager_next_bus(d->manager, NULL); r >= 0 && bus; bus = manager_next_bus(d->manager, bus))
                r = sd_bus_emit_object_added(bus, path);
        if (r < 0)
                log_warning_errno(r, "Cannot announce a device");
}

void device_bus_emit_state(Device *d) {
        CLEANUP_FREE char *path = NULL;
        int r;

        if (d->manager->stopping)
                return;

        r = device_path(d, &path);
        for (sd_bus *bus = manager_next_bus(d->manager, NULL); r >= 0 && bus; bus = manager_next_bus(d->manager, bus))
                r = sd_bus_emit_properties_changed(bus, path, BUS_INTERFACE("Device"), "State", NULL);
        if (r < 0)
                log_warning_errno(r, "Cannot tell the state of a device");
}
