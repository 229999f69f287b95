/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/unit/worker/fake-nccl.h"

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "service/worker/nccl-library.h"
#include "tests/unit/worker/device-ops.h"

#define MESSAGES_MAX 128
#define EVENT_TO 254u /* of the contexts, beyond the exchange's */
#define EVENT_DONE 255u

typedef struct Comm Comm;

typedef struct Message {
        Comm *comm;
        void *data;
        size_t size;
        int peer;
        bool is_sent, done;
        DeviceQueue *queue;
} Message;

typedef struct Group Group;
struct Group {
        Group *next;
        size_t n;
        Message messages[MESSAGES_MAX];
};

struct Comm {
        Comm *next; /* of all */
        NcclUniqueId id;
        int rank, n;
        Group *first;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of all below but what is a thread's */
static Comm *comms;
static FakeNccl fake;
static bool asked; /* the environment */
static _Thread_local unsigned depth;
static _Thread_local Message waiting[MESSAGES_MAX];
static _Thread_local size_t n_waiting;

#define EXPORT __attribute__((__visibility__("default")))
FakeNccl *fake_nccl(void);
#define DECLARE(name, arguments) NcclResult name arguments;
NCCL_FUNCTIONS(DECLARE)
#undef DECLARE
const char *ncclGetErrorString(NcclResult r);

static _Noreturn void die(const char *text) {
        (void) fprintf(stderr, "NCCL: %s\n", text);
        abort();
}

EXPORT FakeNccl *fake_nccl(void) {
        return &fake;
}

EXPORT NcclResult ncclGetVersion(int *ret) {
        *ret = 22803;
        return NCCL_SUCCESS;
}

EXPORT NcclResult ncclGetUniqueId(NcclUniqueId *ret) {
        static unsigned n;

        *ret = (NcclUniqueId){};
        (void) snprintf(ret->bytes, sizeof(ret->bytes), "%u", ++n);
        return NCCL_SUCCESS;
}

EXPORT const char *ncclGetErrorString(NcclResult r) {
        return r == NCCL_INTERNAL_ERROR ? "internal error" : "unknown result code";
}

static Comm *find(const NcclUniqueId *id, int rank) {
        for (Comm *c = comms; c; c = c->next)
                if (memcmp(&c->id, id, sizeof(*id)) == 0 && c->rank == rank)
                        return c;
        return NULL;
}

EXPORT NcclResult ncclCommInitRankConfig(void **ret, int n, NcclUniqueId id, int rank, NcclCommConfig *config) {
        Comm *c = calloc(1, sizeof(*c));
        const char *multicast = getenv("NCCL_NVLS_ENABLE");

        if (!c || config->size < 24 || config->magic != 0xcafebeef || config->blocking != 0 || rank >= n || find(&id, rank))
                die("a communicator is made wrongly");
        if (!multicast || strcmp(multicast, "0") != 0)
                die("multicast is on");
        (void) pthread_mutex_lock(&lock);
        *c = (Comm){.next = comms, .id = id, .rank = rank, .n = n};
        comms = c;
        (void) pthread_mutex_unlock(&lock);
        *ret = c;
        return NCCL_IN_PROGRESS;
}

static Message *find_in_first(const Comm *c, int peer, bool is_sent) {
        for (size_t i = 0; c && c->first && i < c->first->n; i++)
                if (c->first->messages[i].peer == peer && c->first->messages[i].is_sent == is_sent && !c->first->messages[i].done)
                        return c->first->messages + i;
        return NULL;
}

/* On both queues, which have waited for what each was given before. */
static void move_message(Message *from, Message *to) {
        const LkOps *ops = from->queue->ops;
        const LkCopy a = {.to = to->data, .from = from->data, .rows = 1, .width = from->size,
                .to_stride = from->size, .from_stride = from->size};

        if (from->size != to->size)
                die("a message has two sizes");
        if (ops->mark(to->queue->context, LK_PEER, EVENT_TO) < 0 ||
                ops->wait_for(from->queue->context, LK_PEER, to->queue->context, EVENT_TO) < 0 ||
                ops->copy(from->queue->context, LK_PEER, &a) < 0 || ops->mark(from->queue->context, LK_PEER, EVENT_DONE) < 0 ||
                ops->wait_for(to->queue->context, LK_PEER, from->queue->context, EVENT_DONE) < 0)
                die("a message cannot be copied");
        from->done = to->done = true;
}

static bool drop_done(Comm *c) {
        Group *g = c->first;

        for (size_t i = 0; g && i < g->n; i++)
                if (!g->messages[i].done)
                        return false;
        if (!g)
                return false;
        c->first = g->next;
        free(g);
        return true;
}

/* Under the lock: all that can be done now. */
static void go_on(void) {
        bool again;

        do {
                again = false;
                for (Comm *c = comms; c; c = c->next) {
                        for (size_t i = 0; c->first && i < c->first->n; i++) {
                                Message *m = c->first->messages + i, *other;

                                if (m->done || !m->is_sent)
                                        continue;
                                other = find_in_first(find(&c->id, m->peer), c->rank, false);
                                if (other) {
                                        move_message(m, other);
                                        again = true;
                                }
                        }
                        again |= drop_done(c);
                }
        } while (again);
}

EXPORT NcclResult ncclCommGetAsyncError(void *comm, NcclResult *ret) {
        const Comm *c = comm;
        bool busy;

        (void) pthread_mutex_lock(&lock);
        busy = c->first != NULL;
        for (int i = 0; i < c->n; i++)
                busy |= !find(&c->id, i);
        (void) pthread_mutex_unlock(&lock);
        *ret = busy ? NCCL_IN_PROGRESS : NCCL_SUCCESS;
        return NCCL_SUCCESS;
}

EXPORT NcclResult ncclCommAbort(void *comm) {
        Comm *c = comm;

        (void) pthread_mutex_lock(&lock);
        for (Comm **p = &comms; *p; p = &(*p)->next)
                if (*p == c) {
                        *p = c->next;
                        break;
                }
        for (Group *g = c->first, *next; g; g = next) {
                next = g->next;
                free(g);
        }
        free(c);
        fake.aborts++;
        (void) pthread_mutex_unlock(&lock);
        return NCCL_SUCCESS;
}

EXPORT NcclResult ncclGroupStart(void) {
        depth++;
        return NCCL_SUCCESS;
}

/* Of one communicator, behind those it has. */
static void queue_group(Comm *c) {
        Group *g = calloc(1, sizeof(*g)), **end = &c->first;

        if (!g)
                die("no memory");
        for (size_t i = 0; i < n_waiting; i++)
                if (waiting[i].comm == c) {
                        g->messages[g->n++] = waiting[i];
                        waiting[i].done = true;
                }
        while (*end)
                end = &(*end)->next;
        *end = g;
        fake.groups++;
}

EXPORT NcclResult ncclGroupEnd(void) {
        if (depth == 0)
                return NCCL_INVALID_USAGE;
        if (--depth > 0)
                return NCCL_SUCCESS;
        (void) pthread_mutex_lock(&lock);
        if (!asked && getenv("LATENT_FAKE_NCCL_FAILS_IN"))
                fake.fails_in = (unsigned) atoi(getenv("LATENT_FAKE_NCCL_FAILS_IN"));
        asked = true;
        if (fake.fails_in > 0 && --fake.fails_in == 0) {
                n_waiting = 0;
                (void) pthread_mutex_unlock(&lock);
                return NCCL_INTERNAL_ERROR;
        }
        for (size_t i = 0; i < n_waiting; i++)
                if (!waiting[i].done)
                        queue_group(waiting[i].comm);
        n_waiting = 0;
        go_on();
        (void) pthread_mutex_unlock(&lock);
        return NCCL_IN_PROGRESS;
}

static NcclResult add(Message m) {
        if (depth == 0 || n_waiting == MESSAGES_MAX || m.peer < 0 || m.peer >= m.comm->n || m.peer == m.comm->rank)
                return NCCL_INVALID_USAGE;
        waiting[n_waiting++] = m;
        return NCCL_SUCCESS;
}

EXPORT NcclResult ncclSend(const void *data, size_t size, int type, int peer, void *comm, void *stream) {
        return add((Message){.comm = comm, .data = (void *) data, .size = size, .peer = peer, .is_sent = true, .queue = stream});
}

EXPORT NcclResult ncclRecv(void *data, size_t size, int type, int peer, void *comm, void *stream) {
        return add((Message){.comm = comm, .data = data, .size = size, .peer = peer, .queue = stream});
}
