/* SPDX-License-Identifier: Apache-2.0 */
#include "service/latentd/worker-link-internal.h"

#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/pidfd.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include "service/latentd/job.h"
#include "service/latentd/queue.h"
#include "service/shared/cleanup.h"
#include "service/shared/clock.h"
#include "service/shared/log.h"

#define SECOND UINT64_C(1000000)
#define FAILURES_MAX 3
#define DELAY_MIN_USEC (SECOND / 4)
#define DELAY_MAX_USEC (10 * SECOND)
#define ROW_TILE 128
#define MESSAGES_PER_WAKEUP 64
#define MERGED_BYTES_MAX (UINT64_C(1) << 50)

static int on_timer(sd_event_source *source, uint64_t usec, void *userdata);
static void end_worker(WorkerLink *w, const char *reason);

int worker_link_new(Manager *m, WorkerLink **ret) {
        const char *tile = secure_getenv("LATENT_ROW_TILE");
        WorkerLink *w;
        int r;

        w = calloc(1, sizeof(*w));
        if (!w)
                return -ENOMEM;

        *w = (WorkerLink){
                .manager = m,
                .process = { .socket = -EBADF, .pidfd = -EBADF },
                .row_tile = ROW_TILE,
                .hello_usec = 30 * SECOND,
                .stall_usec = 30 * SECOND,
                .open_usec = 600 * SECOND,
                .end_usec = 10 * SECOND,
                .timer_usec = UINT64_MAX,
        };
        STAILQ_INIT(&w->queue);
        TAILQ_INIT(&w->models);
        TAILQ_INIT(&w->requests);
        if (m->config->worker == WORKER_CPU) /* known before one has started */
                gpu_set_note_cpu(m->config, &w->hello);

        /* For tests, whose sequences are shorter than a tile. Results do not depend on it. */
        if (tile && atoi(tile) > 0 && atoi(tile) <= ROW_TILE)
                w->row_tile = (uint32_t) atoi(tile);

        r = sd_event_add_time(m->event, &w->timer, CLOCK_MONOTONIC, 0, 1, on_timer, w);
        if (r >= 0)
                r = sd_event_source_set_enabled(w->timer, SD_EVENT_OFF);
        if (r < 0) {
                (void) worker_link_free(w);
                return r;
        }

        *ret = w;
        return 0;
}

/* One timer: what it means follows from the state. */
static void arm(WorkerLink *w, uint64_t usec) {
        w->timer_usec = usec;
        (void) sd_event_source_set_time(w->timer, usec);
        (void) sd_event_source_set_enabled(w->timer, SD_EVENT_ONESHOT);
}

static void disarm(WorkerLink *w) {
        w->timer_usec = UINT64_MAX;
        (void) sd_event_source_set_enabled(w->timer, SD_EVENT_OFF);
}

static void close_process(WorkerLink *w) {
        w->io = sd_event_source_disable_unref(w->io);
        w->child = sd_event_source_disable_unref(w->child);
        cleanup_closep(&w->process.socket);
        cleanup_closep(&w->process.pidfd);
        w->process = (WorkerProcess){ .socket = -EBADF, .pidfd = -EBADF };
}

/* Tells it, and makes it see the end of the connection, which its reaper thread obeys in any case. */
static void tell_to_die(WorkerLink *w) {
        WireMessage m;

        if (w->process.socket < 0)
                return;

        wire_init(&m, WIRE_DIE, w->epoch, 0, 0);
        (void) wire_send(w->process.socket, &m, -EBADF);
        (void) shutdown(w->process.socket, SHUT_WR);
}

WorkerLink *worker_link_free(WorkerLink *w) {
        if (!w)
                return NULL;

        tell_to_die(w);
        if (w->process.pidfd >= 0 && !w->reaped) {
                struct pollfd p = { .fd = w->process.pidfd, .events = POLLIN };
                char text[64];

                if (poll(&p, 1, 1000) <= 0)
                        (void) pidfd_send_signal(w->process.pidfd, SIGKILL, NULL, 0);
                if (poll(&p, 1, 5000) > 0)
                        (void) worker_process_reap(w->process.pidfd, text, sizeof(text));
        }
        close_process(w);
        worker_send_clear(w);
        worker_feed_clear(w);
        (void) sd_event_source_disable_unref(w->timer);
        (void) sd_event_source_disable_unref(w->close_timer);
        free(w);
        return NULL;
}

bool worker_link_is_ready(const WorkerLink *w) {
        return w->state == LINK_READY;
}

uint64_t worker_link_epoch(const WorkerLink *w) {
        return w->epoch;
}

uint32_t worker_link_ranks(const WorkerLink *w) {
        return w->ranks;
}

uint64_t worker_link_ranks_for(const WorkerLink *w, WireJobKind kind, const PlanWishes *split) {
        return w->ranks == 0 ? 0 : gpu_set_ranks(&w->set, kind, &w->hello, w->ranks, split);
}

uint64_t worker_link_starts(const WorkerLink *w) {
        return w->starts;
}

const char *worker_link_numerics_id(const WorkerLink *w) {
        return w->hello.numerics_id;
}

const char *worker_link_no_device(const WorkerLink *w) {
        return w->no_device;
}

const WireHello *worker_link_hello(const WorkerLink *w) {
        return w->hello.n_devices > 0 ? &w->hello : NULL;
}

const char *worker_link_notes(const WorkerLink *w) {
        return w->hello.notes;
}

const char *worker_link_kernels(const WorkerLink *w) {
        return w->hello.kernels;
}

const WireMemory *worker_link_memory(const WorkerLink *w) {
        return &w->memory;
}

WireDeviceModel worker_link_device_model(const WorkerLink *w, uint64_t model) {
        for (size_t i = 0; i < ELEMENTSOF(w->memory.models); i++)
                if (w->memory.models[i].model == model)
                        return w->memory.models[i];
        return (WireDeviceModel){};
}

/* When the worker has been silent for too long; UINT64_MAX: it may be. */
static uint64_t patience_ends(const WorkerLink *w) {
        uint64_t until = w->asked_job != 0 ? w->job_usec + w->patience_usec : UINT64_MAX;
        const LinkModel *x;

        /* A model that opens may take long, but that is no excuse for the step beside it. */
        TAILQ_FOREACH(x, &w->models, entry)
                if (x->sent && !x->ready && w->models_usec + w->open_usec < until)
                        until = w->models_usec + w->open_usec;

        return until;
}

void worker_link_watch(WorkerLink *w) {
        uint64_t until = patience_ends(w);

        if (w->state == LINK_READY && until < w->timer_usec)
                arm(w, until);
}

/* The timer of a worker at work went off. */
static void check_patience(WorkerLink *w) {
        uint64_t until = patience_ends(w);

        if (until <= clock_usec())
                worker_link_drop(w, "stopped working: no progress for longer than ten times what a step takes");
        else if (until != UINT64_MAX)
                arm(w, until);
}

static uint64_t delay_usec(const WorkerLink *w) {
        uint64_t delay = DELAY_MIN_USEC;

        if (w->failures == 0 || w->useless)
                return 0;

        for (unsigned i = 1; i < w->failures && delay < DELAY_MAX_USEC; i++)
                delay *= 2;
        return w->failures >= FAILURES_MAX || delay > DELAY_MAX_USEC ? DELAY_MAX_USEC : delay;
}

void worker_link_want(WorkerLink *w) {
        w->wanted = true;
        if (w->state != LINK_IDLE)
                return;

        w->state = LINK_DELAY;
        arm(w, w->failures > 0 ? w->failed_usec + delay_usec(w) : 0);
}

/* No worker for now: everybody who waits for one hears why. */
static void give_up(WorkerLink *w, const char *text) {
        Fault f = {};

        (void) fault_set(&f, -EHOSTDOWN, FAULT_NO_WORKER, "%s", text);
        w->wanted = false;
        log_warning("No worker: %s", text);
        manager_set_state(w->manager, f.text);
        queue_on_no_worker(w->manager->queue, &f);
        worker_feed_on_no_worker(w, &f);
}

/* A start that came to nothing, or a worker that died without anything to do. */
static void count_failure(WorkerLink *w, const char *text) {
        w->failures++;
        w->failed_usec = clock_usec();
        if (w->useless || w->failures >= FAILURES_MAX)
                give_up(w, text);
}

static int on_io(sd_event_source *source, int fd, uint32_t revents, void *userdata);
static int on_child(sd_event_source *source, int fd, uint32_t revents, void *userdata);

static int watch_process(WorkerLink *w) {
        sd_event *e = w->manager->event;
        int r;

        r = sd_event_add_io(e, &w->io, w->process.socket, EPOLLIN, on_io, w);
        if (r >= 0 && w->process.pidfd >= 0)
                r = sd_event_add_io(e, &w->child, w->process.pidfd, EPOLLIN, on_child, w);
        return r;
}

static void start(WorkerLink *w) {
        Fault f = {};
        int r;

        w->state = LINK_IDLE;
        w->useless = false;
        r = worker_start(w->manager->config, w->no_cuda, &w->process, &f);
        if (r < 0) {
                w->useless = r == -ENOENT;
                count_failure(w, f.text[0] ? f.text : strerror(-r));
                if (w->wanted)
                        worker_link_want(w);
                return;
        }

        w->epoch++;
        w->starts++;
        w->eof = w->reaped = w->expected = w->greeted = false;
        w->end_reason[0] = '\0';
        w->state = LINK_HELLO;
        arm(w, clock_usec() + w->hello_usec);

        r = watch_process(w);
        if (r < 0)
                end_worker(w, strerror(-r));
}

/* The worker is gone for good: only now may another one touch what it had. */
static void gone(WorkerLink *w, bool was_ready, bool was_busy) {
        char reason[sizeof(w->end_reason)];
        bool expected = w->expected, cuda = w->process.cuda;

        (void) snprintf(
                reason, sizeof(reason), "%s", w->end_reason[0] ? w->end_reason : "closed the connection");
        close_process(w);
        worker_send_clear(w);
        disarm(w);
        w->state = LINK_IDLE;
        w->expected = false;
        if (STEAL(w->hung, false))
                manager_set_state(w->manager, NULL);

        if (expected)
                log_info("The worker has ended.");
        else
                log_warning("The worker %s.", reason);

        w->memory = (WireMemory){};
        if (!expected) /* a way may have been why */
                w->links = (GpuLinks){};
        if (was_ready) {
                manager_devices_gone(w->manager);
                worker_feed_on_gone(w, reason, !expected);
                queue_on_worker_gone(w->manager->queue, reason);
        }

        if (!expected && !(was_ready && was_busy)) {
                char text[sizeof(reason) + 64];

                (void) snprintf(text, sizeof(text), "The worker%s %s.", cuda ? " (CUDA)" : "", reason);
                count_failure(w, text);
        }

        if (!queue_is_empty(w->manager->queue) || !TAILQ_EMPTY(&w->requests))
                worker_link_want(w);
        else
                w->wanted = false;
}

static void check_gone(WorkerLink *w) {
        /* Of a worker that systemd started the end of file is all we ever see: its process has closed the
         * connection by ending. One of our own is gone when it is reaped. */
        if (w->process.pidfd >= 0 ? w->reaped : w->eof)
                gone(w, w->was_ready, w->was_busy);
}

/* From now on nothing it says counts. */
static void begin_ending(WorkerLink *w) {
        w->was_ready = w->state == LINK_READY;
        w->was_busy = worker_feed_is_busy(w);
        w->state = LINK_ENDING;
        arm(w, clock_usec() + w->end_usec);
}

/* Makes it end and remembers why. */
static void end_worker(WorkerLink *w, const char *reason) {
        begin_ending(w);
        (void) snprintf(w->end_reason, sizeof(w->end_reason), "%s", reason);
        tell_to_die(w);
        if (w->process.pidfd >= 0 && !w->expected)
                (void) pidfd_send_signal(w->process.pidfd, SIGKILL, NULL, 0);
}

void worker_link_drop(WorkerLink *w, const char *what) {
        if (w->state == LINK_HELLO || w->state == LINK_READY)
                end_worker(w, what);
}

int worker_link_release(WorkerLink *w) {
        if (w->state == LINK_IDLE || w->state == LINK_ENDING)
                return 0;
        if (w->state != LINK_READY || worker_feed_is_busy(w) || !queue_is_empty(w->manager->queue) ||
                !TAILQ_EMPTY(&w->requests))
                return -EBUSY;

        w->expected = true;
        end_worker(w, "was released");
        return 0;
}

static int on_timer(sd_event_source *source, uint64_t usec, void *userdata) {
        WorkerLink *w = userdata;

        w->timer_usec = UINT64_MAX;
        switch (w->state) {

        case LINK_DELAY:
                start(w);
                break;

        case LINK_HELLO:
                worker_link_drop(w, "did not say Hello in time");
                break;

        case LINK_READY:
                check_patience(w);
                break;

        case LINK_ENDING:
                /* Its arenas and devices stay taken until it has ended, whatever that takes. */
                log_warning("The worker does not end; waiting for it.");
                w->hung = true;
                manager_set_state(w->manager,
                        "A worker that was told to end hangs; no other can be started before it is gone.");
                if (w->process.pidfd >= 0)
                        (void) pidfd_send_signal(w->process.pidfd, SIGKILL, NULL, 0);
                arm(w, clock_usec() + w->end_usec);
                break;

        default:
                break;
        }

        return 0;
}

/* A new worker would try the layers of its model in its first step: 25 ms each. What it makes of them is its own affair; they are kept
 * when a worker dies, since a trial would find the same again. */
static void send_pins(WorkerLink *w) {
        WireMessage m;

        if (w->pins.n == 0 || strcmp(w->pins.numerics_id, w->hello.numerics_id) != 0)
                return;
        wire_init(&m, WIRE_KNOWN_PINS, w->epoch, 0, 0);
        memcpy(m.bytes + sizeof(m.header), (const uint8_t *) &w->pins + sizeof(m.header), sizeof(w->pins) - sizeof(m.header));
        worker_send(w, &m, -EBADF);
}

static void welcome(WorkerLink *w) {
        const Config *c = w->manager->config;
        WireMessage m;

        w->ranks = c->worker_ranks > 0 ? c->worker_ranks : w->hello.n_devices;
        if (w->ranks == 0)
                w->ranks = 1;
        if (w->ranks > WIRE_RANKS_MAX)
                w->ranks = WIRE_RANKS_MAX;

        wire_init(&m, WIRE_WELCOME, w->epoch, 0, 0);
        m.welcome.ranks = w->ranks;
        m.welcome.threads = c->worker_threads;
        m.welcome.encode_cache_bytes = c->encode_cache_max;
        m.welcome.vram_reserve = c->vram_reserve;
        m.welcome.vram_limit = c->vram_limit;
        m.welcome.vram_idle_usec = (uint64_t) c->vram_idle_sec * SECOND;
        for (uint32_t i = 0; i < w->ranks; i++)
                m.welcome.device_of[i] = w->set.place[i % w->hello.n_devices];
        if (w->ranks < w->hello.n_devices) /* it lets go of a device without a rank, and of NCCL, which has all or none */
                w->hello.nccl = 0;
        /* Only devices have ways to themselves. Each new worker would take time for it before its first step. */
        w->tries_links = w->hello.n_devices > 1 && w->hello.peer_mbs[0][0] != 0 && !gpu_set_recall(&w->links, &w->set, &w->hello);
        m.welcome.try_links = w->tries_links;
        if (w->tries_links) /* pairs that hang take some seconds each, and it may have started slowly */
                arm(w, clock_usec() + w->hello_usec);
        worker_send(w, &m, -EBADF);
        send_pins(w);
}

/* It can compute nothing, and says why. */
static void on_no_device(WorkerLink *w, const WireHello *m) {
        char text[sizeof(w->end_reason)];

        (void) snprintf(w->no_device, sizeof(w->no_device), "%s", m->reason[0] ? m->reason : "It found no device.");
        if (w->process.cuda && w->manager->config->worker == WORKER_AUTO) {
                log_info("Using the CPU: %s", w->no_device);
                w->no_cuda = true;
                w->expected = true;
                end_worker(w, "has no device");
                return;
        }

        w->useless = true;
        /* a sentence that others make one of */
        (void) snprintf(text, sizeof(text), "has no device: %.180s", w->no_device);
        if (text[0] != '\0' && text[strlen(text) - 1] == '.')
                text[strlen(text) - 1] = '\0';
        worker_link_drop(w, text);
}

static int choose_devices(WorkerLink *w, Fault *f) {
        CLEANUP_FREE DeviceInfo *infos = NULL;
        size_t n = 0;

        if (w->hello.devices[0].pci_address[0] != '\0')
                (void) device_enumerate(&infos, &n);
        return gpu_set_apply(w->manager->config, infos, n, &w->hello, &w->set, f);
}

static void on_hello(WorkerLink *w, const WireHello *m) {
        char text[200];
        Fault f = {};

        if (strcmp(m->build_id, LATENTD_VERSION) != 0) {
                (void) snprintf(text, sizeof(text),
                        "is version %.63s, this service is version %s: restart both after an upgrade",
                        m->build_id, LATENTD_VERSION);
                w->useless = true;
                worker_link_drop(w, text);
                return;
        }

        if (m->n_devices > WIRE_DEVICES_MAX || m->numerics_id[0] == '\0' || m->backend[0] == '\0') {
                worker_link_drop(w, "broke the protocol: HELLO without a backend or with too many devices");
                return;
        }

        if (m->n_devices == 0) {
                on_no_device(w, m);
                return;
        }

        w->hello = *m;
        w->told_out = 0;
        if (choose_devices(w, &f) < 0) {
                (void) snprintf(w->hello.reason, sizeof(w->hello.reason), "%.500s", f.text);
                w->hello.n_devices = 0;
                on_no_device(w, &w->hello);
                return;
        }
        w->greeted = true;
        if (!w->no_cuda)
                w->no_device[0] = '\0';
        log_info("A worker is there: %s, %" PRIu32 " devices, numerics %s, pid %" PRIi32 ".", m->backend,
                w->hello.n_devices, m->numerics_id, m->pid);
        welcome(w);
}

/* It has acknowledged WELCOME: its ranks run. One that cannot run them ends before, and counts as one that
 * did not start. */
static void on_welcome_ack(WorkerLink *w, const WireMessage *m) {
        if (worker_send_on_acks(w, m->header.acks) < 0) {
                worker_link_drop(w, "broke the protocol: ACK for nothing");
                return;
        }

        w->state = LINK_READY;
        w->wanted = false;
        disarm(w);
        manager_devices_present(w->manager, &w->hello, &w->set);
        manager_set_state(w->manager, NULL);
        worker_feed_on_ready(w);
        queue_dispatch(w->manager->queue);
}

/* It may have been sent when the WELCOME was taken in, and says so then. */
static void on_links(WorkerLink *w, const WireMessage *m) {
        gpu_set_learn(&w->set, &m->links, &w->hello, &w->links);
        if (m->header.acks > 0)
                on_welcome_ack(w, m);
}

/* A worker that lies idle ends: a driver's context, modules and libraries take a GiB of each device, which come back in no other
 * way. If there is work that makes no steps for now it says so again later. */
static void on_memory(WorkerLink *w, const WireMemory *m) {
        bool idle = m->idle != w->memory.idle;

        w->manager->merged_bytes = m->merged_bytes;
        w->memory = *m;
        manager_used_changed(w->manager);
        if (idle && worker_link_release(w) == 0)
                log_info("The worker is ended: no step came for %" PRIu32 " s (VramIdleSec=).", w->manager->config->vram_idle_sec);
}

static void on_work_message(WorkerLink *w, const WireMessage *m) {
        Queue *q = w->manager->queue;

        switch ((WireType) m->header.type) {

        case WIRE_ACK:
                return; /* no sign of work */

        case WIRE_MODEL_READY:
                w->failures = 0;
                worker_feed_on_model_ready(w, &m->model_ready);
                break;

        case WIRE_JOB_READY:
                if (worker_feed_take_answer(w, &m->header, false))
                        queue_on_job_ready(q, &m->job_ready);
                break;

        case WIRE_PROGRESS:
                queue_on_progress(q, &m->progress);
                break;

        case WIRE_LORA_NOTES:
                queue_on_lora_notes(q, &m->lora_notes);
                break;

        case WIRE_MEMORY:
                if (m->memory.merged_bytes > MERGED_BYTES_MAX) {
                        worker_link_drop(w, "broke the protocol: it says that it holds more memory than there is");
                        break;
                }
                on_memory(w, &m->memory);
                break;

        case WIRE_PINS:
                if (m->pins.n > WIRE_PINS_MAX) {
                        worker_link_drop(w, "broke the protocol: it says more pins than there is room for");
                        break;
                }
                w->pins = m->pins;
                break;

        case WIRE_STEP_DONE:
                if (worker_feed_take_answer(w, &m->header, true))
                        queue_on_step_done(q, &m->step_done);
                break;

        case WIRE_ERROR:
                w->failures = 0;
                worker_feed_on_error(w, &m->error);
                break;

        default:
                worker_link_drop(
                        w, "broke the protocol: a message that only the broker sends, or a second HELLO");
                return;
        }

        w->job_usec = w->models_usec = clock_usec();
        worker_link_watch(w);
}

static void on_message(WorkerLink *w, const WireMessage *m) {
        if (w->state == LINK_HELLO) {
                if (!w->greeted && m->header.type == WIRE_HELLO && m->header.epoch == 0)
                        on_hello(w, &m->hello);
                else if (w->greeted && m->header.type == WIRE_ACK && m->header.epoch == w->epoch)
                        on_welcome_ack(w, m);
                else if (w->greeted && m->header.type == WIRE_LINKS && m->header.epoch == w->epoch && STEAL(w->tries_links, false))
                        on_links(w, m);
                else
                        worker_link_drop(w,
                                "broke the protocol: it does not begin with HELLO and the ACK of WELCOME");
                return;
        }

        if (w->state != LINK_READY)
                return;

        if (m->header.epoch != w->epoch) {
                log_debug("Dropped %s of another epoch.", wire_type_name(m->header.type));
                return;
        }

        if (worker_send_on_acks(w, m->header.acks) < 0) {
                worker_link_drop(w, "broke the protocol: more acknowledged than was sent");
                return;
        }

        on_work_message(w, m);
}

/* 1: there may be more; 0: no more for now, or the end of file. */
static int receive_one(WorkerLink *w) {
        CLEANUP_CLOSE int fd = -EBADF;
        WireMessage m;
        Fault f = {};
        int r;

        r = wire_receive(w->process.socket, &m, &fd, &f);
        if (r == -EAGAIN)
                return 0;

        if (r > 0) {
                on_message(w, &m);
                return 1;
        }

        if (r == -EBADMSG) {
                char text[200];

                if (w->state == LINK_HELLO)
                        w->useless = true; /* most likely another version */
                (void) snprintf(text, sizeof(text), "broke the protocol: %.150s", f.text);
                worker_link_drop(w, text);
                return 1; /* on to the end of file */
        }

        w->eof = true;
        w->io = sd_event_source_disable_unref(w->io);
        return 0;
}

static int on_io(sd_event_source *source, int fd, uint32_t revents, void *userdata) {
        WorkerLink *w = userdata;

        if (revents & EPOLLOUT)
                worker_send_flush(w);

        for (unsigned i = 0; i < MESSAGES_PER_WAKEUP; i++)
                if (receive_one(w) == 0)
                        break;

        if (w->eof) {
                if (w->state != LINK_ENDING) {
                        begin_ending(w);
                        if (w->process.pidfd >= 0) /* without its connection it has nothing to live for */
                                (void) pidfd_send_signal(w->process.pidfd, SIGKILL, NULL, 0);
                }
                check_gone(w);
        }
        return 0;
}

static int on_child(sd_event_source *source, int fd, uint32_t revents, void *userdata) {
        WorkerLink *w = userdata;
        char text[sizeof(w->end_reason)];

        if (worker_process_reap(w->process.pidfd, text, sizeof(text)) == 0)
                return 0;

        w->reaped = true;
        w->child = sd_event_source_disable_unref(w->child);

        /* What it said before it died counts: a step that is done need not run again. */
        while (!w->eof && receive_one(w) > 0)
                ;
        if (w->state != LINK_ENDING)
                begin_ending(w);
        if (w->end_reason[0] == '\0')
                (void) snprintf(w->end_reason, sizeof(w->end_reason), "%s", text);
        check_gone(w);
        return 0;
}

void worker_link_fault(const Fault *from, Fault *ret) {
        static const char *const names[] = {
                FAULT_INVALID_ARGUMENT,
                FAULT_INVALID_FILE,
                FAULT_INVALID_MODEL,
                FAULT_INVALID_TENSOR,
                FAULT_NOT_SUPPORTED,
                FAULT_DOES_NOT_FIT,
                FAULT_LIMIT,
                FAULT_IO,
                FAULT_FILE_CHANGED,
                FAULT_INTERNAL,
        };
        const char *name = FAULT_INTERNAL;

        for (size_t i = 0; i < ELEMENTSOF(names); i++)
                if (strcmp(from->name, names[i]) == 0)
                        name = names[i];

        (void) fault_set(
                ret, -EIO, name, "%s", from->text[0] ? from->text : "The worker refused without a reason.");
}
