/* SPDX-License-Identifier: Apache-2.0 */
#include "service/latentd/manager.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include <systemd/sd-daemon.h>

#include "service/latentd/device.h"
#include "service/latentd/job.h"
#include "service/latentd/model.h"
#include "service/latentd/peer.h"
#include "service/latentd/private-socket.h"
#include "service/latentd/queue.h"
#include "service/latentd/remains.h"
#include "service/latentd/session.h"
#include "service/latentd/worker-link.h"
#include "service/shared/cleanup.h"
#include "service/shared/log.h"

#define DEVICES_DELAY_USEC UINT64_C(100000)
#define POOL_THREADS_MAX 4
#define STOP_USEC UINT64_C(3000000)
#define NAME_TRIES 10 /* a twentieth of a second between them */

DEFINE_CLEANUP(Manager *, manager_free)

uint64_t manager_used_bytes(const Manager *m) {
        return store_bytes(m->store) + m->arena_bytes + m->merged_bytes;
}

void manager_used_changed(Manager *m) {
        if (m->store)
                store_set_other_bytes(m->store, m->arena_bytes + m->merged_bytes);
}

int manager_headroom(const Manager *m, MemoryHeadroom *ret) {
        uint64_t promised = store_promised(m->store);
        int r;

        r = memory_headroom(m->config, "", manager_used_bytes(m), ret);
        if (r < 0)
                return r;

        ret->bytes = ret->bytes > promised ? ret->bytes - promised : 0;
        return 0;
}

void manager_relieve(Manager *m) {
        uint64_t excess = store_excess(m->store), freed = 0;
        unsigned n = 0;

        if (excess == 0)
                return;

        worker_link_trim(m->worker);
        freed = store_evict(m->store, excess);
        while (freed < excess && model_idle_gives_way(m, NULL)) {
                uint64_t left = store_excess(m->store);

                n++;
                freed = left < excess ? excess - left : 0; /* what is on its way out counts */
        }
        log_info("Memory is short by %" PRIu64 " bytes: %" PRIu64 " bytes of weights and %u idle models are freed.", excess, freed, n);
}

static void on_pressure(void *userdata) {
        manager_relieve(userdata);
}

int manager_new(Config *config, bool user_mode, FdStore *fds, Manager **ret) {
        CLEANUP(manager_freep) Manager *m = NULL;
        int threads, r;

        m = calloc(1, sizeof(*m));
        if (!m)
                return -ENOMEM;

        m->user_mode = user_mode;
        m->activated_fd = -EBADF;
        TAILQ_INIT(&m->peers);
        TAILQ_INIT(&m->models);
        TAILQ_INIT(&m->sessions);
        TAILQ_INIT(&m->remains);
        TAILQ_INIT(&m->jobs);
        TAILQ_INIT(&m->unfinished);
        TAILQ_INIT(&m->devices);
        TAILQ_INIT(&m->queries);
        m->next_id = 1;

        r = sd_event_default(&m->event);
        if (r < 0)
                return r;

        threads = get_nprocs();
        r = pool_new(m->event, threads < 2 ? 2u : threads > POOL_THREADS_MAX ? POOL_THREADS_MAX : (unsigned) threads, &m->pool);
        if (r < 0)
                return r;

        r = store_new(m->event, m->pool, config, &m->store);
        if (r < 0)
                return r;
        if (fds)
                store_adopt(m->store, fds);

        r = pressure_new(m->event, "", on_pressure, m, &m->pressure);
        if (r < 0)
                return r;

        if (store_ring_error(m->store) < 0)
                log_notice("io_uring cannot be used here (%s): files are read by threads with pread()",
                           strerror(-store_ring_error(m->store)));

        m->config = config; /* the parts below read it; on failure it stays the caller's */
        r = queue_new(m, &m->queue);
        if (r >= 0)
                r = worker_link_new(m, &m->worker);
        if (r < 0) {
                m->queue = queue_free(m->queue);
                m->config = NULL;
                return r;
        }

        *ret = STEAL_PTR(m);
        return 0;
}

/* Jobs that still run are lost with this process: whoever waits for one hears it now, and not by silence. */
static void end_jobs(Manager *m) {
        Fault f = {};
        Job *j;

        (void) fault_set(&f, -ECANCELED, FAULT_RESTARTED, "The service stops; start the job again when it is back.");

        while ((j = TAILQ_FIRST(&m->unfinished)))
                job_finish(j, JOB_FAILED, &f);
}

static int on_stop_post(sd_event_source *s, void *userdata) {
        Manager *m = userdata;

        return TAILQ_EMPTY(&m->sessions) ? sd_event_exit(m->event, m->exit_status) : 0;
}

static int on_stop_timer(sd_event_source *s, uint64_t usec, void *userdata) {
        Manager *m = userdata;

        return sd_event_exit(m->event, m->exit_status);
}

void manager_stop(Manager *m, int status) {
        Peer *p;
        int r;

        if (m->stopping)
                return;

        m->stopping = true;
        m->exit_status = status;
        (void) sd_notify(0, "STOPPING=1\nSTATUS=Stopping.");
        log_info("stopping");

        end_jobs(m);
        while ((p = TAILQ_FIRST(&m->peers)))
                peer_gone(p); /* with its sessions, jobs and private models */

        /* A session whose arenas are being populated goes when that is done. */
        r = sd_event_add_post(m->event, &m->stop_post, on_stop_post, m);
        if (r >= 0)
                r = sd_event_add_time_relative(m->event, &m->stop_timer, CLOCK_MONOTONIC,
                                               TAILQ_EMPTY(&m->sessions) ? 0 : STOP_USEC, 0, on_stop_timer, m);
        if (r < 0)
                (void) sd_event_exit(m->event, status);
}

Manager *manager_free(Manager *m) {
        Device *d;
        Model *model;
        Peer *p;
        Job *j;

        if (!m)
                return NULL;

        m->stopping = true;
        while ((p = TAILQ_FIRST(&m->peers)))
                peer_gone(p);

        worker_link_free(m->worker);
        m->worker = NULL;

        /* The pool still works on them: what it needs goes with the process. */
        if (!TAILQ_EMPTY(&m->sessions))
                return NULL;

        while ((j = TAILQ_FIRST(&m->jobs)))
                job_free(j);

        while ((model = TAILQ_FIRST(&m->models)))
                model_free(model);

        remains_clear(m);
        pressure_free(m->pressure);
        queue_free(m->queue);
        store_free(m->store); /* gives memory back through the pool */
        pool_free(m->pool);

        while ((d = TAILQ_FIRST(&m->devices))) {
                TAILQ_REMOVE(&m->devices, d, entry);
                free(d);
        }

        sd_event_source_disable_unref(m->devices_timer);
        sd_event_source_disable_unref(m->progress_timer);
        sd_event_source_disable_unref(m->stop_post);
        sd_event_source_disable_unref(m->stop_timer);
        private_socket_free(m->private_socket);
        cleanup_closep(&m->activated_fd);
        sd_bus_flush_close_unref(m->bus);
        sd_event_unref(m->event);
        config_free(m->config);
        free(m);
        return NULL;
}

static int on_disconnected(sd_bus_message *message, void *userdata, sd_bus_error *error) {
        Manager *m = userdata;

        if (m->stopping)
                return 0;

        log_error(-ECONNRESET, "The connection to the bus is lost");
        manager_stop(m, EXIT_FAILURE);
        return 0;
}

static int on_name_lost(sd_bus_message *message, void *userdata, sd_bus_error *error) {
        Manager *m = userdata;
        const char *name;
        int r;

        r = sd_bus_message_read(message, "s", &name);
        if (r < 0 || strcmp(name, BUS_NAME) != 0)
                return 0;

        log_error(0, "The name " BUS_NAME " was taken away");
        manager_stop(m, EXIT_FAILURE);
        return 0;
}

/* On the message bus and on each private connection. */
static int register_objects(Manager *m, sd_bus *bus) {
        static int (*const functions[])(Manager *m, sd_bus *bus) = {
                peer_bus_register, /* the gate first */
                manager_bus_register, device_bus_register, model_bus_register, session_bus_register, job_bus_register,
        };
        int r;

        for (size_t i = 0; i < ELEMENTSOF(functions); i++) {
                r = functions[i](m, bus);
                if (r < 0)
                        return r;
        }

        return 0;
}

static int register_all(Manager *m, sd_bus *bus) {
        int r;

        r = register_objects(m, bus);
        if (r < 0)
                return r;

        r = sd_bus_match_signal(bus, NULL, "org.freedesktop.DBus.Local", "/org/freedesktop/DBus/Local",
                                "org.freedesktop.DBus.Local", "Disconnected", on_disconnected, m);
        if (r < 0)
                return r;

        return sd_bus_match_signal(bus, NULL, "org.freedesktop.DBus", "/org/freedesktop/DBus", "org.freedesktop.DBus", "NameLost",
                                   on_name_lost, m);
}

/* Who is killed owns its name until the bus has noticed: a service that is started at once must not give up. */
static int request_name(sd_bus *bus) {
        int r;

        for (unsigned i = 0; (r = sd_bus_request_name(bus, BUS_NAME, 0)) == -EEXIST && i + 1 < NAME_TRIES; i++)
                (void) usleep(50000);
        return r;
}

int manager_connect(Manager *m, sd_bus *bus, Fault *f) {
        int r;

        r = register_all(m, bus);
        if (r < 0)
                return fault_set(f, r, FAULT_INTERNAL, "Cannot register the objects on the bus: %s.", strerror(-r));

        r = sd_bus_attach_event(bus, m->event, SD_EVENT_PRIORITY_NORMAL);
        if (r < 0)
                return fault_set(f, r, FAULT_INTERNAL, "Cannot attach the bus to the event loop: %s.", strerror(-r));

        m->bus = sd_bus_ref(bus);

        /* Last: who sees the name may call. */
        r = request_name(bus);
        if (r == -EEXIST)
                return fault_set(f, r, FAULT_BUSY, "Another process owns " BUS_NAME " on this bus: is latentd running already?");
        if (r < 0)
                return fault_set(f, r, FAULT_ACCESS_DENIED, "Cannot own the name " BUS_NAME " on the bus: %s.", strerror(-r));

        r = private_socket_new(m, register_objects, &m->private_socket, f);
        if (r < 0)
                return fault_set(f, r, FAULT_INTERNAL, "Cannot make the private socket: %s.", strerror(-r));

        (void) sd_notify(0, "READY=1\nSTATUS=Ready.");
        worker_link_want(m->worker); /* so that devices, numerics id and a broken worker are known before the first job */
        return 0;
}

sd_bus *manager_next_bus(Manager *m, const sd_bus *previous) {
        if (!previous && m->bus)
                return m->bus;

        return private_socket_next(m->private_socket, previous == m->bus ? NULL : previous);
}

void manager_set_state(Manager *m, const char *reason) {
        char text[sizeof(m->state_reason)];

        (void) snprintf(text, sizeof(text), "%s", reason ? reason : "");
        if (m->stopping || strcmp(text, m->state_reason) == 0)
                return;

        memcpy(m->state_reason, text, sizeof(text));
        (void) sd_notifyf(0, "STATUS=%s%s", text[0] != '\0' ? "Degraded: " : "Ready.", text);
        manager_bus_emit_state(m);
}

const char *device_state(const Device *d) {
        return !d->present ? d->quarantined ? "quarantined" : "gone" : d->busy ? "busy" : "idle";
}

static int on_devices_timer(sd_event_source *s, uint64_t usec, void *userdata) {
        Manager *m = userdata;
        Device *d;

        TAILQ_FOREACH(d, &m->devices, entry) {
                if (d->announced_state == device_state(d))
                        continue;

                d->announced_state = device_state(d);
                device_bus_emit_state(d);
        }

        return 0;
}

/* Short steps would flood the bus with busy and idle: the state is told a little later, whatever it is then. */
static void devices_changed(Manager *m) {
        int enabled = SD_EVENT_OFF, r;

        if (m->stopping)
                return;

        if (!m->devices_timer)
                r = sd_event_add_time_relative(m->event, &m->devices_timer, CLOCK_MONOTONIC, DEVICES_DELAY_USEC, 0,
                                               on_devices_timer, m);
        else {
                r = sd_event_source_get_enabled(m->devices_timer, &enabled);
                if (r > 0)
                        return; /* armed already */

                r = sd_event_source_set_time_relative(m->devices_timer, DEVICES_DELAY_USEC);
                if (r >= 0)
                        r = sd_event_source_set_enabled(m->devices_timer, SD_EVENT_ONESHOT);
        }
        if (r < 0)
                log_warning_errno(r, "Cannot arm the timer of device states");
}

static Device *device_find_absent(Manager *m, const char *kind, const WireDevice *info) {
        Device *d;

        TAILQ_FOREACH(d, &m->devices, entry)
                if (!d->present && strcmp(d->kind, kind) == 0 && strcmp(d->info.uuid, info->uuid) == 0 &&
                    strcmp(d->info.pci_address, info->pci_address) == 0 && strcmp(d->info.name, info->name) == 0)
                        return d;

        return NULL;
}

/* i: its place in both. */
static void device_describe(Device *d, const WireHello *hello, const GpuSet *set, uint32_t i) {
        d->info = hello->devices[i];
        memcpy(d->kernels, hello->kernels, sizeof(d->kernels));
        d->share = set->shares[i] / 1000.0;
        d->parts = 0;
        for (GpuPart p = 0; p < _GPU_PART_MAX; p++)
                if (set->parts[p] >> i & 1)
                        d->parts |= 1u << p;
        d->present = true;
}

static int device_new(Manager *m, const WireHello *hello, const GpuSet *set, uint32_t i) {
        Device *d;

        d = calloc(1, sizeof(*d));
        if (!d)
                return -ENOMEM;

        d->id = m->next_id++;
        d->manager = m;
        device_describe(d, hello, set, i);
        d->announced_state = device_state(d);
        (void) snprintf(d->kind, sizeof(d->kind), "%s", hello->backend);
        TAILQ_INSERT_TAIL(&m->devices, d, entry);
        device_bus_announce(d);
        return 0;
}

void manager_devices_present(Manager *m, const WireHello *hello, const GpuSet *set) {
        uint32_t n = hello->n_devices < WIRE_DEVICES_MAX ? hello->n_devices : WIRE_DEVICES_MAX;

        for (uint32_t i = 0; i < n; i++) {
                const WireDevice *info = &hello->devices[i];
                Device *d;
                int r;

                d = device_find_absent(m, hello->backend, info);
                if (d) {
                        device_describe(d, hello, set, i);
                        d->busy = d->quarantined = false;
                        continue;
                }

                r = device_new(m, hello, set, i);
                if (r < 0)
                        log_warning_errno(r, "Cannot add device %s", info->name);
        }

        devices_changed(m);
}

void manager_devices_gone(Manager *m) {
        Device *d;

        TAILQ_FOREACH(d, &m->devices, entry)
                d->present = d->busy = false;

        devices_changed(m);
}

void manager_device_quarantine(Manager *m, const char *text) {
        Device *d;

        TAILQ_FOREACH(d, &m->devices, entry)
                if (d->present && d->info.pci_address[0] != '\0' && strstr(text, d->info.pci_address)) {
                        d->quarantined = true;
                        log_warning("Device %s (%s) is in quarantine: it has fallen off the bus.", d->info.name, d->info.pci_address);
                }
}

void manager_devices_busy(Manager *m, bool busy) {
        Device *d;

        TAILQ_FOREACH(d, &m->devices, entry)
                if (d->present)
                        d->busy = busy;

        devices_changed(m);
}
