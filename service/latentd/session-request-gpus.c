/* SPDX-License-Identifier: Apache-2.0 */
/* OpenSession's "gpus": which devices of the worker a session's steps run on. A worker of this version runs every step on
 * all that it has, so the names are checked against those and nothing else follows from them. */
#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "service/latentd/session-request-internal.h"
#include "service/latentd/worker-link.h"

int request_read_gpus(sd_bus_message *m, const BusKey *k, Fault *f) {
        RequestGpus *x = k->value;
        const char *name;
        int r;

        r = sd_bus_message_enter_container(m, 'a', "s");
        if (r < 0)
                return r;

        x->given = true;
        while ((r = sd_bus_message_read_basic(m, 's', &name)) > 0)
                if (x->n++ < WIRE_DEVICES_MAX)
                        x->names[x->n - 1] = name;
        if (r < 0)
                return r;

        return sd_bus_message_exit_container(m);
}

static bool is_device(const char *name, const WireDevice *d, uint32_t index) {
        char *end;

        if (isdigit((unsigned char) name[0]) && strlen(name) < 4 && strtoul(name, &end, 10) == index && *end == '\0')
                return true;

        return name[0] != '\0' && (strcasecmp(name, d->uuid) == 0 || strcasecmp(name, d->pci_address) == 0);
}

/* "0 (GPU-..., 0000:41:00.0)". */
static void list_devices(const WireHello *h, char ret[static 600]) {
        size_t used = 0;

        ret[0] = '\0';
        for (uint32_t i = 0; i < h->n_devices && used < 600; i++)
                used += (size_t) snprintf(ret + used, 600 - used, "%s%" PRIu32 " (%.48s, %.16s)", i > 0 ? ", " : "", i, h->devices[i].uuid,
                        h->devices[i].pci_address);
}

static int find_device(const WireHello *h, const char *name, uint32_t *ret, Fault *f) {
        char devices[600];

        for (uint32_t i = 0; i < h->n_devices; i++)
                if (is_device(name, &h->devices[i], i)) {
                        *ret = i;
                        return 0;
                }

        list_devices(h, devices);
        return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                "\"gpus\" names \"%.64s\", which the worker does not have. Expected numbers, UUIDs or PCI addresses of: %s.", name,
                devices);
}

/* Each is there, and named once. */
static int find_devices(const RequestGpus *x, const WireHello *h, Fault *f) {
        bool seen[WIRE_DEVICES_MAX] = {};

        for (size_t i = 0; i < x->n; i++) {
                uint32_t device;
                int r;

                r = find_device(h, x->names[i], &device, f);
                if (r < 0)
                        return r;
                if (seen[device])
                        return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT, "\"gpus\" names %.16s more than once.",
                                h->devices[device].pci_address);
                seen[device] = true;
        }

        return 0;
}

int request_check_gpus(const Manager *m, const RequestGpus *x, Fault *f) {
        const WireHello *h = worker_link_hello(m->worker);
        int r;

        if (!x->given)
                return 0;

        if (!h && m->state_reason[0] != '\0')
                return fault_set(f, -EHOSTDOWN, FAULT_NO_WORKER, "\"gpus\": %s", m->state_reason);
        if (!h)
                return fault_set(f, -EBUSY, FAULT_BUSY,
                        "\"gpus\": the worker has not told of its devices yet. Try again in a moment, or leave the key out.");
        if (strcmp(h->backend, "cpu") == 0)
                return fault_set(f, -EOPNOTSUPP, FAULT_NOT_SUPPORTED,
                        "\"gpus\" is for GPUs, and this service computes on the CPU: leave the key out (latentctl doctor says what it "
                        "has).");
        if (x->n == 0)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "\"gpus\" names no device. Leave the key out for all of them.");
        if (x->n > h->n_devices)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT, "\"gpus\" names %zu devices, the worker has %" PRIu32 ".", x->n,
                        h->n_devices);

        r = find_devices(x, h, f);
        if (r < 0)
                return r;
        if (x->n < h->n_devices)
                return fault_set(f, -EOPNOTSUPP, FAULT_NOT_SUPPORTED,
                        "\"gpus\" names %zu of the %" PRIu32
                        " devices, and this version runs every step on all that its worker has. Name all of them, or leave the key out.",
                        x->n, h->n_devices);
        return 0;
}
