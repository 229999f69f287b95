/* SPDX-License-Identifier: Apache-2.0 */
/* OpenSession's "gpus": which devices of the worker a session's steps run on, and "exchange" as far as devices matter. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "service/latentd/gpu-set.h"
#include "service/latentd/session-request-internal.h"
#include "service/latentd/worker-link.h"
#include "service/shared/gpu-names.h"

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
                if (gpu_is_named(name, &h->devices[i], i)) {
                        *ret = i;
                        return 0;
                }

        list_devices(h, devices);
        return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                "\"gpus\" names \"%.64s\", which the worker does not have. Expected numbers, UUIDs or PCI addresses of: %s.", name,
                devices);
}

/* Each is there, and named once. */
static int find_devices(const RequestGpus *x, const WireHello *h, PlanWishes *w, Fault *f) {
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
                memcpy(w->gpus[i], h->devices[device].pci_address, sizeof(w->gpus[i]));
        }

        return 0;
}

int request_check_gpus(const Manager *m, const RequestGpus *x, PlanWishes *w, Fault *f) {
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

        r = find_devices(x, h, w, f);
        if (r < 0)
                return r;
        w->n_gpus = (uint32_t) x->n;
        return 0;
}

int request_check_exchange(const Manager *m, const PlanWishes *w, Fault *f) {
        const WireHello *h = worker_link_hello(m->worker);

        if ((w->exchange == WIRE_EXCHANGE_P2P || w->exchange == WIRE_EXCHANGE_NCCL) && h && h->peer_mbs[0][0] == 0)
                return fault_set(f, -EOPNOTSUPP, FAULT_NOT_SUPPORTED,
                        "\"exchange\" is %s, which is for GPUs, and this service computes with %s: say auto or host.",
                        plan_exchange_to_string(w->exchange), h->backend);
        if (w->exchange == WIRE_EXCHANGE_NCCL && h && h->nccl == 0)
                return fault_set(f, -EOPNOTSUPP, FAULT_NOT_SUPPORTED,
                        "\"exchange\" is nccl, and the worker has no NCCL: it starts it where LATENT_NCCL=1 is in its environment "
                        "(latent-worker(8)). Where it is, latentctl doctor says what was wrong. Say auto, host or p2p.");
        return 0;
}
