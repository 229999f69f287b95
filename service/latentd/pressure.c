/* SPDX-License-Identifier: Apache-2.0 */
#include "service/latentd/pressure.h"

#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>

#include "service/latentd/memory.h"
#include "service/shared/cleanup.h"
#include "service/shared/log.h"

#define SOURCES_MAX 16

/* 150 ms of waiting in 2 s. Without privileges windows are multiples of 2 s. */
#define TRIGGER "some 150000 2000000"
#define STALL_USEC 150000u
#define WINDOW_USEC 2000000u

/* Where the kernel refuses to tell: before 6.5 without CAP_SYS_RESOURCE, and where /sys/fs/cgroup is read-only. */
typedef struct Polled {
        int fd;
        uint64_t total_usec; /* of waiting, at the last look */
} Polled;

struct Pressure {
        sd_event *event;
        PressureFn fn;
        void *userdata;
        sd_event_source *sources[SOURCES_MAX];
        unsigned n;
        Polled polled[SOURCES_MAX];
        unsigned n_polled;
        sd_event_source *timer;
};

DEFINE_CLEANUP(Pressure *, pressure_free)

static int on_pressure(sd_event_source *source, int fd, uint32_t revents, void *userdata) {
        Pressure *p = userdata;

        if (revents & EPOLLERR) /* its cgroup is gone */
                return sd_event_source_set_enabled(source, SD_EVENT_OFF);
        if (revents & EPOLLPRI)
                p->fn(p->userdata);
        return 0;
}

static int add(Pressure *p, const char *path) {
        CLEANUP_CLOSE int fd = -EBADF;
        sd_event_source *source;
        int r;

        fd = open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
        if (fd < 0)
                return -errno;
        if (write(fd, TRIGGER, sizeof(TRIGGER)) != (ssize_t) sizeof(TRIGGER)) /* with its NUL */
                return errno > 0 ? -errno : -EIO;

        r = sd_event_add_io(p->event, &source, fd, EPOLLPRI, on_pressure, p);
        if (r < 0)
                return r;
        r = sd_event_source_set_io_fd_own(source, true);
        if (r < 0) {
                (void) sd_event_source_disable_unref(source);
                return r;
        }

        fd = -EBADF;
        p->sources[p->n++] = source;
        return 0;
}

static int read_total(int fd, uint64_t *ret) {
        char text[256], *at;
        ssize_t n;

        n = pread(fd, text, sizeof(text) - 1, 0);
        if (n < 0)
                return -errno;

        text[n] = '\0';
        at = strncmp(text, "some ", 5) == 0 ? strstr(text, "total=") : NULL;
        return at && sscanf(at, "total=%" SCNu64, ret) == 1 ? 0 : -EBADMSG;
}

static int on_timer(sd_event_source *source, uint64_t usec, void *userdata) {
        Pressure *p = userdata;
        bool any = false;
        int r;

        for (unsigned i = 0; i < p->n_polled; i++) {
                Polled *x = &p->polled[i];
                uint64_t total;

                if (read_total(x->fd, &total) < 0) /* its cgroup is gone */
                        continue;
                any = any || (total > x->total_usec && total - x->total_usec >= STALL_USEC);
                x->total_usec = total;
        }

        r = sd_event_source_set_time_relative(source, WINDOW_USEC);
        if (r >= 0)
                r = sd_event_source_set_enabled(source, SD_EVENT_ONESHOT);
        if (any)
                p->fn(p->userdata);
        return r;
}

static int poll_file(Pressure *p, const char *path) {
        CLEANUP_CLOSE int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY);
        uint64_t total = 0;
        int r;

        if (fd < 0)
                return -errno;
        r = read_total(fd, &total);
        if (r < 0)
                return r;

        if (!p->timer) {
                r = sd_event_add_time_relative(p->event, &p->timer, CLOCK_MONOTONIC, WINDOW_USEC, 0, on_timer, p);
                if (r < 0)
                        return r;
        }

        p->polled[p->n_polled++] = (Polled){.fd = STEAL_FD(fd), .total_usec = total};
        return 0;
}

static void try_to_add(Pressure *p, const char *path) {
        int r = p->n < SOURCES_MAX ? add(p, path) : -ENOBUFS;

        if (r < 0 && p->n_polled < SOURCES_MAX)
                r = poll_file(p, path);
        if (r < 0)
                log_debug("Memory pressure of %s is not watched: %s.", path, strerror(-r));
}

int pressure_new(sd_event *event, const char *root, PressureFn fn, void *userdata, Pressure **ret) {
        CLEANUP(pressure_freep) Pressure *p = NULL;
        char group[PATH_MAX], path[PATH_MAX];
        char *slash;

        p = calloc(1, sizeof(*p));
        if (!p)
                return -ENOMEM;

        *p = (Pressure){.event = event, .fn = fn, .userdata = userdata};
        if (snprintf(path, sizeof(path), "%s/proc/pressure/memory", root) < (int) sizeof(path))
                try_to_add(p, path);

        /* The file of the root group is that of the machine. */
        memory_own_group(root, group, sizeof(group));
        while ((slash = strrchr(group, '/'))) {
                if (snprintf(path, sizeof(path), "%s/sys/fs/cgroup%s/memory.pressure", root, group) < (int) sizeof(path))
                        try_to_add(p, path);
                *slash = '\0';
        }

        *ret = STEAL_PTR(p);
        return 0;
}

Pressure *pressure_free(Pressure *p) {
        if (!p)
                return NULL;

        for (unsigned i = 0; i < p->n; i++)
                (void) sd_event_source_disable_unref(p->sources[i]);
        for (unsigned i = 0; i < p->n_polled; i++)
                (void) close(p->polled[i].fd);
        (void) sd_event_source_disable_unref(p->timer);
        free(p);
        return NULL;
}

unsigned pressure_count(const Pressure *p) {
        return p->n + p->n_polled;
}
