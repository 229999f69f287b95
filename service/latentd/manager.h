/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* All state of the service and its start and stop order. Loop thread only. */

#include <sys/queue.h>
#include <systemd/sd-bus.h>
#include <systemd/sd-event.h>

#include "service/latentd/config.h"
#include "service/latentd/gpu-set.h"
#include "service/latentd/memory.h"
#include "service/latentd/pace.h"
#include "service/latentd/pool.h"
#include "service/latentd/pressure.h"
#include "service/latentd/store.h"
#include "service/shared/wire.h"

typedef struct Manager Manager;
typedef struct Peer Peer;
typedef struct Model Model;
typedef struct Remains Remains;
typedef struct Session Session;
typedef struct Job Job;
typedef struct Render Render;
typedef struct Device Device;
typedef struct Queue Queue;
typedef struct WorkerLink WorkerLink;
typedef struct PrivateSocket PrivateSocket;
typedef struct PolkitQuery PolkitQuery;

#define BUS_NAME "org.latentd.Latent1"
#define BUS_ROOT "/org/latentd/Latent1"
#define BUS_INTERFACE(x) "org.latentd.Latent1." x
#define BUS_ERROR(x) "org.latentd.Latent1.Error." x

/* A device that a worker told of. Kept when the worker goes (State gone). */
struct Device {
        uint64_t id;
        Manager *manager;
        WireDevice info;
        char kind[16];
        char kernels[2048]; /* as in WireHello */
        double share; /* GpuShares=, LATENTD_SHARE of its PCI function, or 1 */
        uint32_t parts; /* that it runs: a bit for each GpuPart */
        bool present, busy;
        bool quarantined; /* it fell off the bus; until a worker has it again */
        const char *announced_state; /* what clients were told last */
        TAILQ_ENTRY(Device) entry;
};

struct Manager {
        Config *config;
        bool user_mode;
        sd_event *event;
        sd_bus *bus;
        PrivateSocket *private_socket; /* NULL: none */
        int activated_fd; /* its listening socket, if the service manager made one, until it has it; else -EBADF */
        Pool *pool;
        Store *store;
        Pressure *pressure;
        WorkerLink *worker; /* one group in this version */
        Queue *queue;
        TAILQ_HEAD(, Peer) peers;
        TAILQ_HEAD(, Model) models;
        TAILQ_HEAD(, Session) sessions;
        TAILQ_HEAD(, Remains) remains; /* remains.c: memory of closed sessions that clients still have */
        sd_event_source *remains_timer;
        TAILQ_HEAD(JobList, Job) jobs; /* by id */
        TAILQ_HEAD(, Job) unfinished; /* those of them that are; short, while a client's finished ones pile up */
        TAILQ_HEAD(, Device) devices;
        TAILQ_HEAD(, PolkitQuery) queries; /* polkit.c */
        uint64_t next_id; /* of models, sessions, jobs, devices alike: never used twice */
        uint64_t arena_bytes; /* of sessions and remains */
        uint64_t merged_bytes; /* of merged copies in the worker, as it said last */
        uint64_t steps_done;
        PaceTable paces; /* of Renders */
        unsigned n_stuck_opens; /* below ModelPath=, where a file system does not answer */
        char state_reason[256]; /* empty: ready */
        sd_event_source *progress_timer; /* job.c: Progress that waits for its time */
        uint64_t progress_usec; /* when it goes off; 0: off */
        sd_event_source *devices_timer; /* tells device states to clients, not more often than 10 times a second */
        bool stopping;
        int exit_status;
        sd_event_source *stop_post, *stop_timer;
};

/* config is taken over on success; fds stays the caller's and outlives the manager (NULL: nothing outlives us). */
int manager_new(Config *config, bool user_mode, FdStore *fds, Manager **ret);
Manager *manager_free(Manager *m);
/* Others are short of memory: frees weights that nobody uses until the reserve is there again, then idle models. */
void manager_relieve(Manager *m);
/* Vtables, then the name; then READY=1. */
int manager_connect(Manager *m, sd_bus *bus, Fault *f);
/* Ends all jobs with Error.Restarted and leaves the loop with this exit status when the pool lets go of the sessions. */
void manager_stop(Manager *m, int status);
/* Where signals to all go: the message bus, then each private connection. First: previous NULL. NULL at the end, or before any is there. */
sd_bus *manager_next_bus(Manager *m, const sd_bus *previous);
/* Worker state for people: NULL or "" is ready. Emits the property change; the log is the caller's part. */
void manager_set_state(Manager *m, const char *reason);
/* From the worker's Hello: adds or revives devices, with what is said of them. And when it goes. */
void manager_devices_present(Manager *m, const WireHello *hello, const GpuSet *set);
void manager_devices_gone(Manager *m);
void manager_device_quarantine(Manager *m, const char *text); /* those present whose PCI addresses are in the text */
void manager_devices_busy(Manager *m, bool busy);

/* What counts against CacheRamMax=: weights, arenas and merged copies. */
uint64_t manager_used_bytes(const Manager *m);
/* After each change of arena_bytes or merged_bytes. */
void manager_used_changed(Manager *m);
/* May be taken now, without what loads were promised. */
int manager_headroom(const Manager *m, MemoryHeadroom *ret);

const char *device_state(const Device *d); /* idle, busy, gone */

/* manager-bus.c, device-bus.c: changes for clients; nothing happens before the bus is connected. */
void manager_bus_emit_state(Manager *m);
void device_bus_announce(Device *d);
void device_bus_emit_state(Device *d);

/* manager-bus.c, device-bus.c, model-bus.c, session-bus.c, job-bus.c: each registers its vtables on a bus connection. */
int manager_bus_register(Manager *m, sd_bus *bus);
int device_bus_register(Manager *m, sd_bus *bus);
int model_bus_register(Manager *m, sd_bus *bus);
int session_bus_register(Manager *m, sd_bus *bus);
int job_bus_register(Manager *m, sd_bus *bus);
