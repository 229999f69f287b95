/* SPDX-License-Identifier: Apache-2.0 */
#include "service/latentd/remains.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "service/latentd/peer.h"
#include "service/shared/cleanup.h"
#include "service/shared/log.h"
#include "service/shared/memfd.h"

#define COLLECT_USEC UINT64_C(1000000)

/* A client may still have the object by a descriptor that neither reads nor writes (O_PATH) and keeps its pages, too.
 * It cannot be opened by that, being ours and of mode 0600: so the pages go, whoever has it. */
static void give_back(int fd, uint64_t size) {
        if (fd < 0)
                return;

        if (fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, (off_t) size) < 0)
                log_warning_errno(-errno, "Cannot free the pages of an arena");
        (void) close(fd);
}

/* On a pool thread: giving back a GiB takes some 0.3 s. */
static int remains_free(void *userdata) {
        Remains *x = userdata;

        if (x->map)
                (void) munmap(x->map, x->output_bytes);
        give_back(x->output_fd, x->output_bytes);
        give_back(x->input_fd, x->input_bytes);
        free(x);
        return 0;
}

/* Where the kernel cannot tell (leases are switched off) the client's connection has to do. */
static bool is_held(const Remains *x) {
        int fds[] = { x->input_fd, x->output_fd };
        static bool warned;

        for (size_t i = 0; i < ELEMENTSOF(fds); i++) {
                int r = fds[i] >= 0 ? memfd_is_shared(fds[i]) : 0;

                if (r < 0 && !STEAL(warned, true))
                        log_warning_errno(r, "Cannot tell whether clients still have the arenas of closed sessions");
                if (r > 0 || (r < 0 && x->owner))
                        return true;
        }

        return false;
}

static void release(Manager *m, Remains *x) {
        m->arena_bytes -= x->input_bytes + x->output_bytes;
        manager_used_changed(m);
        if (pool_submit(m->pool, remains_free, NULL, x) < 0)
                (void) remains_free(x);
}

static int on_timer(sd_event_source *source, uint64_t usec, void *userdata);

static void arm(Manager *m) {
        int r;

        if (!m->remains_timer)
                r = sd_event_add_time_relative(m->event, &m->remains_timer, CLOCK_MONOTONIC, COLLECT_USEC, 0, on_timer, m);
        else {
                r = sd_event_source_set_time_relative(m->remains_timer, COLLECT_USEC);
                if (r >= 0)
                        r = sd_event_source_set_enabled(m->remains_timer, SD_EVENT_ONESHOT);
        }
        if (r < 0)
                log_warning_errno(r, "Cannot arm the timer of closed sessions' memory");
}

static int on_timer(sd_event_source *source, uint64_t usec, void *userdata) {
        Manager *m = userdata;

        remains_collect(m);
        if (!TAILQ_EMPTY(&m->remains))
                arm(m);
        return 0;
}

/* Lets go of it and of no page: who has it keeps what it says. */
static void forget(Remains *x) {
        if (x->map)
                (void) munmap(x->map, x->output_bytes);
        cleanup_closep(&x->output_fd);
        cleanup_closep(&x->input_fd);
        free(x);
}

void remains_add(Manager *m, Remains *x) {
        if (m->stopping) { /* clients go on from what lies there */
                m->arena_bytes -= x->input_bytes + x->output_bytes;
                forget(x);
                return;
        }
        if (!is_held(x)) {
                release(m, x);
                return;
        }

        if (TAILQ_EMPTY(&m->remains))
                arm(m);
        TAILQ_INSERT_TAIL(&m->remains, x, entry);
}

void remains_collect(Manager *m) {
        Remains *x, *next;

        for (x = TAILQ_FIRST(&m->remains); x; x = next) {
                next = TAILQ_NEXT(x, entry);
                if (is_held(x))
                        continue;
                TAILQ_REMOVE(&m->remains, x, entry);
                release(m, x);
        }
}

void remains_peer_gone(Peer *p) {
        Remains *x;

        TAILQ_FOREACH(x, &p->manager->remains, entry)
                if (x->owner == p)
                        x->owner = NULL;
}

void remains_clear(Manager *m) {
        Remains *x;

        m->remains_timer = sd_event_source_disable_unref(m->remains_timer);
        while ((x = TAILQ_FIRST(&m->remains))) {
                TAILQ_REMOVE(&m->remains, x, entry);
                forget(x);
        }
}
