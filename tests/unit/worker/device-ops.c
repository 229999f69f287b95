/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/unit/worker/device-ops.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "kernels/cpu/cpu.h"
#include "service/shared/cleanup.h"

#define BLOCKS_MAX 4096
#define COPIES_MAX 65536
#define CONTEXTS_MAX 16
#define ALIGN 256u
#define PAGE UINT64_C(4096)
#define OPEN_MAX 64
#define ASIDE_MAX 64

/* What a queue has been given, and what it waits for of the others, of all contexts. */
typedef struct Clock {
        uint64_t at[CONTEXTS_MAX][_LK_QUEUE_MAX];
} Clock;

typedef struct Copy {
        LkFetch args;
        uint64_t position;
} Copy;

/* To another context, or its own, or to or from the host. */
typedef struct PeerCopy {
        uint8_t *to;
        const uint8_t *from;
        uint64_t size, position;
        Clock after; /* what the queue had been told to wait for */
        bool flip;
} PeerCopy;

/* Of a queue, in order; that did not happen yet. */
typedef struct PeerCopies {
        PeerCopy *copies; /* [COPIES_MAX] */
        size_t first, end;
} PeerCopies;

/* Host memory that is registered. */
typedef struct Registered {
        uint8_t *p;
        uint64_t size;
        struct Grain {
                uint64_t read[CONTEXTS_MAX]; /* position of each LK_TAKE that copied out of it last */
                uint64_t wrote;              /* of the LK_PEER that copied into it last */
                size_t writer;
        } *grains; /* [size / ALIGN + 1]; NULL: nothing was copied yet */
} Registered;

typedef struct Block Block;

/* Attention on LK_SIDE: it happens when LK_COMPUTE waits for it. */
typedef struct Aside {
        LkAttention args;
        uint64_t position;
} Aside;

/* The queues of a context. */
typedef struct Queues {
        LkContext *context;
        DeviceQueue native;
        Clock clocks[_LK_QUEUE_MAX]; /* of each queue: itself, and what it waits for */
        Clock events[LK_EVENTS_MAX];
        bool marked[LK_EVENTS_MAX];
        Copy *copies; /* that did not happen yet */
        size_t n_copies;
        PeerCopies peers[_LK_QUEUE_MAX]; /* likewise: of LK_PEER and LK_TAKE */
        Aside aside[ASIDE_MAX]; /* likewise */
        size_t n_aside;
        uint64_t made_keys; /* position of LK_COMPUTE that normed heads last */
        uint32_t device;
        Block *open[OPEN_MAX]; /* to the operation that runs */
        size_t n_open;
} Queues;

/* Pages of its own, and one behind them that nobody may touch. */
struct Block {
        Queues *queues; /* whose it is: nobody else reads it or copies into it */
        uint8_t *p;
        uint64_t size;
        uint64_t wrote; /* position of LK_COMPUTE that copied into it last */
        uint64_t *read; /* [size / ALIGN]: position of LK_COMPUTE that read it last */
        bool kept;      /* freed, and not given back yet */
        bool open;
};

DeviceSim device_sim;

static LkOps table;
static const LkOps *cpu;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of all below, and of device_sim */
static Block blocks[BLOCKS_MAX];
static Queues all_queues[CONTEXTS_MAX];
static Clock seen; /* what hosts' threads have found done: they tell each other */
static Registered *registered; /* [n_registered] */
static size_t n_registered;

/* On any thread, where a test's own assertion would jump out of another one's stack. */
static _Noreturn void die(const char *text) {
        (void) fprintf(stderr, "The device: %s\n", text);
        abort();
}

static _Thread_local uint32_t bound;

static uint64_t *own(Queues *q, Clock *clock) {
        return clock->at[q - all_queues];
}

static void must(bool holds, const char *text) {
        if (!holds)
                die(text);
}

static void unlock(pthread_mutex_t **m) {
        (void) pthread_mutex_unlock(*m);
}

#define LOCKED CLEANUP(unlock) __attribute__((__unused__)) pthread_mutex_t *locked = take_lock()

static pthread_mutex_t *take_lock(void) {
        (void) pthread_mutex_lock(&lock);
        return &lock;
}

static Queues *queues_of(LkContext *c) {
        Queues *unused = NULL;

        for (size_t i = 0; i < CONTEXTS_MAX; i++) {
                if (all_queues[i].context == c)
                        return all_queues + i;
                if (!all_queues[i].context && !unused)
                        unused = all_queues + i;
        }
        must(unused, "too many contexts");
        unused->context = c;
        return unused;
}

static Block *find_block(const void *p, uint64_t size) {
        for (size_t i = 0; i < BLOCKS_MAX; i++)
                if (blocks[i].p && !blocks[i].kept && (const uint8_t *) p >= blocks[i].p &&
                        (const uint8_t *) p + size <= blocks[i].p + blocks[i].size)
                        return blocks + i;
        return NULL;
}

static uint64_t whole_pages(uint64_t size) {
        return (size + PAGE - 1) / PAGE * PAGE;
}

/* Nothing but the operation that names it touches device memory: anything else ends the program. */
static void open_block(Block *b) {
        Queues *q = b->queues;

        if (b->open)
                return;
        must(q->n_open < OPEN_MAX && mprotect(b->p, whole_pages(b->size), PROT_READ | PROT_WRITE) == 0, "memory cannot be opened");
        b->open = true;
        q->open[q->n_open++] = b;
}

static void close_blocks(Queues *q) {
        while (q->n_open > 0) {
                Block *b = q->open[--q->n_open];

                must(mprotect(b->p, whole_pages(b->size), PROT_NONE) == 0, "memory cannot be closed");
                b->open = false;
        }
}

/* Its numbers are NaN. */
static void poison(Block *b) {
        open_block(b);
        memset(b->p, 0xff, b->size);
        close_blocks(b->queues);
}

static bool overlaps(const void *a, uint64_t n, const void *b, uint64_t m) {
        return (const uint8_t *) a < (const uint8_t *) b + m && (const uint8_t *) b < (const uint8_t *) a + n;
}

/* A copy between contexts that did not happen yet has to do with it. */
static bool is_under_way(const Queues *q, const void *p, uint64_t size) {
        for (unsigned k = 0; k < _LK_QUEUE_MAX; k++)
                for (size_t i = q->peers[k].first; i < q->peers[k].end; i++) {
                        const PeerCopy *a = q->peers[k].copies + i;

                        if (overlaps(a->from, a->size, p, size) || overlaps(a->to, a->size, p, size))
                                return true;
                }
        return false;
}

static void expect_quiet(const Block *b) {
        for (size_t i = 0; i < CONTEXTS_MAX; i++)
                must(!is_under_way(all_queues + i, b->p, b->size), "memory goes while a copy between contexts is under way");
}

static void give_back(Block *b) {
        expect_quiet(b);
        device_sim.used -= b->size;
        device_sim.used_of[b->queues->device] -= b->size;
        must(munmap(b->p, whole_pages(b->size) + PAGE) == 0, "memory cannot be given back");
        free(b->read);
        *b = (Block){};
}

static void trim(const Queues *q) {
        for (size_t i = 0; i < BLOCKS_MAX; i++)
                if (blocks[i].kept && blocks[i].queues == q)
                        give_back(blocks + i);
}

/* One of about that size; LK_COPY waits for what may still use it. */
static bool take_kept(Queues *q, uint64_t size, void **ret) {
        for (size_t i = 0; i < BLOCKS_MAX; i++) {
                Block *b = blocks + i;

                if (!b->kept || b->queues != q || b->size < size || b->size - size > size / 8)
                        continue;
                b->kept = false;
                expect_quiet(b);
                b->wrote = 0;
                poison(b);
                memset(b->read, 0, b->size / ALIGN * sizeof(*b->read));
                *ret = b->p;
                return true;
        }
        return false;
}

static int memory_new(LkContext *c, uint64_t size, void **ret) {
        LOCKED;

        size = size > 0 ? (size + ALIGN - 1) / ALIGN * ALIGN : ALIGN;
        if (take_kept(queues_of(c), size, ret))
                return 0;
        if (device_sim.refusals > 0 && --device_sim.refusals < device_sim.refuse)
                return -ENOMEM;
        if (device_sim.limit > 0 && size > device_sim.limit - device_sim.used_of[queues_of(c)->device])
                trim(queues_of(c));
        if (device_sim.limit > 0 && size > device_sim.limit - device_sim.used_of[queues_of(c)->device])
                return -ENOMEM;
        for (size_t i = 0; i < BLOCKS_MAX; i++)
                if (!blocks[i].p) {
                        void *pages = mmap(NULL, whole_pages(size) + PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

                        blocks[i] = (Block){
                                .queues = queues_of(c), .p = pages, .size = size, .read = calloc(size / ALIGN, sizeof(uint64_t))};
                        must(pages != MAP_FAILED && blocks[i].read, "no memory");
                        poison(blocks + i);
                        device_sim.used += size;
                        device_sim.used_of[blocks[i].queues->device] += size;
                        device_sim.peak = device_sim.used > device_sim.peak ? device_sim.used : device_sim.peak;
                        device_sim.allocations++;
                        *ret = blocks[i].p;
                        return 0;
                }
        die("too many blocks of memory");
}

/* Copies up to a position happen. */
static void copy_until(Queues *q, uint64_t position) {
        size_t n = 0;

        while (n < q->n_copies && q->copies[n].position <= position) {
                const LkFetch *a = &q->copies[n++].args;

                open_block(find_block(a->device, 1));
                for (uint64_t i = 0; i < a->rows; i++)
                        memcpy((uint8_t *) a->device + i * a->width, (const uint8_t *) a->host + i * a->stride, a->width);
        }
        if (n == 0)
                return;
        close_blocks(q);
        q->n_copies -= n;
        memmove(q->copies, q->copies + n, q->n_copies * sizeof(*q->copies));
}

/* NULL, too, where somebody let go of his memory without a word and a device has it now. */
static Registered *find_registered(const void *p, uint64_t size) {
        for (size_t i = 0; i < BLOCKS_MAX; i++)
                if (blocks[i].p && overlaps(blocks[i].p, blocks[i].size, p, size))
                        return NULL;
        for (size_t i = 0; i < n_registered; i++)
                if ((const uint8_t *) p >= registered[i].p && (const uint8_t *) p + size <= registered[i].p + registered[i].size)
                        return registered + i;
        return NULL;
}

/* Of a copy between contexts: a rank that failed may have freed it already, it is kept then. */
static Block *find_end(const void *p, uint64_t size) {
        for (size_t i = 0; i < BLOCKS_MAX; i++)
                if (blocks[i].p && (const uint8_t *) p >= blocks[i].p && (const uint8_t *) p + size <= blocks[i].p + blocks[i].size)
                        return blocks + i;
        die("a copy between contexts works with what is no device memory");
}

/* Whatever its owner is about. */
static void access_block(const void *p, uint64_t size, bool begin) {
        Block *b = find_registered(p, size) ? NULL : find_end(p, size);

        if (b && !b->open)
                must(mprotect(b->p, whole_pages(b->size), begin ? PROT_READ | PROT_WRITE : PROT_NONE) == 0, "memory cannot be opened");
}

static bool all_until(const Clock *clock);

static void copy_peer(const PeerCopy *a) {
        access_block(a->from, a->size, true);
        access_block(a->to, a->size, true);
        memcpy(a->to, a->from, a->size);
        if (a->flip)
                a->to[a->size / 2] ^= 0x10;
        access_block(a->from, a->size, false);
        access_block(a->to, a->size, false);
}

/* Copies between contexts up to a position happen, and what they wait for before them. False: not all of them can. */
static bool peers_until(Queues *q, LkQueue queue, uint64_t position) {
        PeerCopies *all = q->peers + queue;

        while (all->first < all->end && all->copies[all->first].position <= position) {
                const PeerCopy *a = all->copies + all->first;

                if (device_sim.peer_stuck || !all_until(&a->after))
                        return false;
                copy_peer(a);
                if (++all->first == all->end)
                        all->first = all->end = 0;
        }
        return true;
}

/* What one waits for was given out before it: this ends. */
static bool all_until(const Clock *clock) {
        bool done = true;

        for (size_t i = 0; i < CONTEXTS_MAX; i++)
                done = peers_until(all_queues + i, LK_PEER, clock->at[i][LK_PEER]) &&
                       peers_until(all_queues + i, LK_TAKE, clock->at[i][LK_TAKE]) && done;
        return done;
}

static void memory_free(LkContext *c, void *p) {
        LOCKED;
        Block *b = p ? find_block(p, 1) : NULL;
        Queues *q = queues_of(c);
        uint64_t known = own(q, q->clocks + LK_COMPUTE)[LK_COPY];

        if (!p)
                return;
        must(b && b->p == p, "what is freed is no memory");
        must(b->queues == q, "memory is freed by another context");
        for (size_t i = 0; i < q->n_copies; i++) /* it may be somebody else's by then */
                must((uint8_t *) q->copies[i].args.device < b->p || (uint8_t *) q->copies[i].args.device >= b->p + b->size ||
                                q->copies[i].position <= known,
                        "memory is freed while a copy into it is under way");
        copy_until(q, known);
        if (q->n_aside > 0 && find_block(q->aside[0].args.o, 1) == b) /* of a step that failed */
                q->n_aside = 0;
        b->kept = true;
        if (!device_sim.keeps)
                give_back(b);
}

static void memory_trim(LkContext *c) {
        LOCKED;

        trim(queues_of(c));
}

static int fetch(LkContext *c, const LkFetch *a) {
        LOCKED;
        const uint64_t size = a->rows * a->width;
        Block *b = find_block(a->device, size);
        Queues *q = queues_of(c);

        if (device_sim.fetches_left == 0)
                return -EIO;
        if (device_sim.fetches_left > 0)
                device_sim.fetches_left--;
        must(b, "a fetch goes to what is no device memory");
        must(b->queues == q, "a fetch goes to another context's memory");
        must(!find_block(a->host, 1), "a fetch comes from device memory");
        for (uint64_t i = 0; i < (size + ALIGN - 1) / ALIGN; i++)
                must(b->read[(uint64_t) ((uint8_t *) a->device - b->p) / ALIGN + i] <= own(q, q->clocks + LK_COPY)[LK_COMPUTE],
                        "a copy does not wait for work that reads what it overwrites");

        if (!q->copies)
                q->copies = calloc(COPIES_MAX, sizeof(*q->copies));
        must(q->copies && q->n_copies < COPIES_MAX, "too many copies");
        q->copies[q->n_copies++] = (Copy){*a, ++own(q, q->clocks + LK_COPY)[LK_COPY]};
        device_sim.fetches++;
        device_sim.fetched_bytes += size;
        return 0;
}

static int mark(LkContext *c, LkQueue queue, uint32_t event) {
        LOCKED;
        Queues *q = queues_of(c);

        must(queue < _LK_QUEUE_MAX && event < LK_EVENTS_MAX, "no such event");
        q->events[event] = q->clocks[queue];
        q->marked[event] = true;
        return 0;
}

static void merge(Clock *to, const Clock *from) {
        for (unsigned i = 0; i < CONTEXTS_MAX; i++)
                for (unsigned k = 0; k < _LK_QUEUE_MAX; k++)
                        if (from->at[i][k] > to->at[i][k])
                                to->at[i][k] = from->at[i][k];
}

static int attend(LkContext *c, const LkAttention *a);

static bool next_aside(LkContext *c, LkAttention *ret) {
        LOCKED;
        Queues *q = queues_of(c);

        if (q->n_aside == 0 || q->aside[0].position > own(q, q->clocks + LK_COMPUTE)[LK_SIDE])
                return false;
        *ret = q->aside[0].args;
        memmove(q->aside, q->aside + 1, --q->n_aside * sizeof(*q->aside));
        return true;
}

static void wait_on(LkContext *c, LkQueue queue, uint32_t event) {
        LOCKED;
        Queues *q = queues_of(c);

        must(queue < _LK_QUEUE_MAX && event < LK_EVENTS_MAX, "no such event");
        merge(q->clocks + queue, q->events + event);
}

static int wait(LkContext *c, LkQueue queue, uint32_t event) {
        LkAttention a;
        int r = 0;

        wait_on(c, queue, event);
        while (r >= 0 && next_aside(c, &a))
                r = attend(c, &a);
        return r;
}

static int wait_for(LkContext *c, LkQueue queue, LkContext *other, uint32_t event) {
        LOCKED;
        Queues *q = queues_of(c), *o = queues_of(other);

        must(queue < _LK_QUEUE_MAX && event < LK_EVENTS_MAX, "no such event");
        must(o->marked[event], "an event of another context was never marked");
        merge(q->clocks + queue, o->events + event);
        return 0;
}

static int is_done(LkContext *c, uint32_t event) {
        LOCKED;
        const Clock *clock;

        must(event < LK_EVENTS_MAX, "no such event");
        clock = queues_of(c)->events + event;
        if (!all_until(clock))
                return 0;
        merge(&seen, clock);
        return 1;
}

static void *native(LkContext *c, LkQueue queue, int *ret_device) {
        LOCKED;
        Queues *q = queues_of(c);

        q->native = (DeviceQueue){&table, c};
        *ret_device = (int) q->device;
        return &q->native;
}

static int join(LkContext *c, uint32_t event) {
        LOCKED;

        must(event < LK_EVENTS_MAX, "no such event");
        device_sim.joins++;
        if (all_until(queues_of(c)->events + event))
                merge(&seen, queues_of(c)->events + event);
        return 0;
}

static int pin(LkContext *c, const void *host, uint64_t size) {
        LOCKED;

        if (device_sim.pin_fails)
                return -ENOMEM;
        device_sim.pinned_bytes += size;
        if (find_registered(host, size))
                return 0;
        registered = realloc(registered, (n_registered + 1) * sizeof(*registered));
        must(registered, "no memory");
        registered[n_registered++] = (Registered){.p = (uint8_t *) host, .size = size};
        return 0;
}

static void unpin(const void *host, uint64_t size) {
        LOCKED;

        for (size_t i = 0; i < CONTEXTS_MAX; i++)
                must(!is_under_way(all_queues + i, host, size), "host memory is not registered any more while a copy is under way");
        for (size_t i = n_registered; i-- > 0;)
                if (overlaps(registered[i].p, registered[i].size, host, size)) {
                        free(registered[i].grains);
                        registered[i] = registered[--n_registered];
                }
}

static void begin(Queues *q) {
        own(q, q->clocks + LK_COMPUTE)[LK_COMPUTE]++;
        copy_until(q, own(q, q->clocks + LK_COMPUTE)[LK_COPY]);
        (void) all_until(q->clocks + LK_COMPUTE);
}

static void queue_copy(Queues *q, LkQueue queue, const LkCopy *a, uint64_t size) {
        PeerCopies *all = q->peers + queue;

        if (!all->copies)
                all->copies = calloc(COPIES_MAX, sizeof(*all->copies));
        must(all->copies && all->end < COPIES_MAX, "too many copies between contexts");
        all->copies[all->end] = (PeerCopy){.to = a->to, .from = a->from, .size = size, .flip = device_sim.flip_next};
        all->copies[all->end].after = q->clocks[queue];
        all->copies[all->end++].position = ++own(q, q->clocks + queue)[queue];
        device_sim.flip_next = false;
        device_sim.peer_copies++;
        device_sim.peer_bytes += size;
}

/* Work that read a block before it is overwritten by a copy of this queue. */
static void expect_read(const Block *to, const void *p, uint64_t size, const Clock *known) {
        for (uint64_t i = 0; i < (size + ALIGN - 1) / ALIGN; i++)
                must(to->read[(uint64_t) ((const uint8_t *) p - to->p) / ALIGN + i] <= own(to->queues, (Clock *) known)[LK_COMPUTE],
                        "a copy between contexts does not wait for work that reads what it overwrites");
}

static struct Grain *grains_of(Registered *r, const void *p) {
        if (!r->grains)
                r->grains = calloc(r->size / ALIGN + 1, sizeof(*r->grains));
        must(r->grains, "no memory");
        return r->grains + (uint64_t) ((const uint8_t *) p - r->p) / ALIGN;
}

static void write_host(Queues *q, Registered *to, const LkCopy *a, uint64_t size) {
        struct Grain *g = grains_of(to, a->to);

        for (uint64_t i = 0; i < (size + ALIGN - 1) / ALIGN; i++) {
                for (size_t k = 0; k < CONTEXTS_MAX; k++)
                        must(g[i].read[k] <= q->clocks[LK_PEER].at[k][LK_TAKE] || g[i].read[k] <= seen.at[k][LK_TAKE],
                                "a copy to the host does not wait for those that read what it overwrites");
                g[i].wrote = own(q, q->clocks + LK_PEER)[LK_PEER] + 1;
                g[i].writer = (size_t) (q - all_queues);
        }
}

static void read_host(Queues *q, Registered *from, const LkCopy *a, uint64_t size) {
        struct Grain *g = grains_of(from, a->from);

        for (uint64_t i = 0; i < (size + ALIGN - 1) / ALIGN; i++) {
                must(g[i].wrote <= q->clocks[LK_TAKE].at[g[i].writer][LK_PEER] || g[i].wrote <= seen.at[g[i].writer][LK_PEER],
                        "a copy from the host does not wait for what it copies");
                g[i].read[q - all_queues] = own(q, q->clocks + LK_TAKE)[LK_TAKE] + 1;
        }
}

/* From a context's memory to its own or another's, or to the host, dense: later. */
static void queue_peer(Queues *q, const LkCopy *a) {
        const uint64_t size = a->rows * a->width;
        Block *from = find_block(a->from, size);
        Registered *host = find_registered(a->to, size);

        must(a->rows <= 1 || (a->to_stride == a->width && a->from_stride == a->width), "a copy between contexts has gaps");
        must(from && from->queues == q, "a copy between contexts is of another's memory");
        must(from->wrote <= own(q, q->clocks + LK_PEER)[LK_COMPUTE], "a copy between contexts does not wait for what it copies");
        if (host)
                write_host(q, host, a, size);
        else
                expect_read(find_end(a->to, size), a->to, size, q->clocks + LK_PEER);
        queue_copy(q, LK_PEER, a, size);
}

/* From the host, dense: later. */
static void queue_take(Queues *q, const LkCopy *a) {
        const uint64_t size = a->rows * a->width;
        Block *to = find_block(a->to, size);
        Registered *host = find_registered(a->from, size);

        must(a->rows <= 1 || (a->to_stride == a->width && a->from_stride == a->width), "a copy from the host has gaps");
        must(host, "a copy from the host is of memory that is not registered");
        must(to && to->queues == q, "a copy from the host goes to another's memory");
        read_host(q, host, a, size);
        expect_read(to, a->to, size, q->clocks + LK_TAKE);
        queue_copy(q, LK_TAKE, a, size);
}

/* Inside the context: now. */
static void copy_rows(Queues *q, const LkCopy *a) {
        uint64_t from_size = (a->rows - 1) * a->from_stride + a->width, to_size = (a->rows - 1) * a->to_stride + a->width;
        Block *from = find_block(a->from, from_size), *to = find_block(a->to, to_size);
        uint64_t first;

        must(from && to && from->queues == q && to->queues == q, "a copy of a context is of another's memory");
        begin(q);
        must(!is_under_way(q, a->to, to_size), "a copy overwrites what a copy between contexts still reads");
        open_block(from);
        open_block(to);
        first = (uint64_t) ((const uint8_t *) a->from - from->p);
        for (uint64_t i = first / ALIGN; i <= (first + from_size - 1) / ALIGN; i++)
                from->read[i] = own(q, q->clocks + LK_COMPUTE)[LK_COMPUTE];
        to->wrote = own(q, q->clocks + LK_COMPUTE)[LK_COMPUTE];
        for (uint64_t i = 0; i < a->rows; i++)
                memcpy((uint8_t *) a->to + i * a->to_stride, (const uint8_t *) a->from + i * a->from_stride, a->width);
        close_blocks(q);
}

static int copy(LkContext *c, LkQueue queue, const LkCopy *a) {
        LOCKED;

        must(queue == LK_COMPUTE || queue == LK_PEER || queue == LK_TAKE, "a copy is on a queue that has none");
        if (a->rows == 0 || a->width == 0)
                return 0;
        if (queue == LK_PEER)
                queue_peer(queues_of(c), a);
        else if (queue == LK_TAKE)
                queue_take(queues_of(c), a);
        else
                copy_rows(queues_of(c), a);
        return 0;
}

/* Work of LK_COMPUTE begins: what it waited for has happened. */
static void begin_work(LkContext *c) {
        LOCKED;

        begin(queues_of(c));
}

/* c: whose work it is; NULL: that of its owner. */
static void touch(LkContext *c, const void *p, uint64_t size) {
        LOCKED;
        Block *b = size > 0 ? find_block(p, size) : NULL;

        if (size == 0)
                return;
        must(b, "an operation works with what is not in device memory");
        must(!c || b->queues == queues_of(c), "an operation works with another context's memory");
        open_block(b);
}

static void touch_rows(LkContext *c, const void *p, LkType type, uint64_t m, uint64_t n, uint64_t ld) {
        if (m > 0 && n > 0)
                touch(c, p, ((m - 1) * ld + n) * lk_type_size(type));
}

/* Weights: copies into their place wait for it. */
static void read_memory(LkContext *c, const void *p, uint64_t size) {
        LOCKED;
        Block *b = find_block(p, size);
        uint64_t first;

        must(b, "an operation reads weights that are not in device memory");
        must(!c || b->queues == queues_of(c), "an operation reads another context's weights");
        open_block(b);
        first = (uint64_t) ((const uint8_t *) p - b->p);
        for (uint64_t i = first / ALIGN; i <= (first + size - 1) / ALIGN; i++)
                b->read[i] = own(b->queues, b->queues->clocks + LK_COMPUTE)[LK_COMPUTE];
}

void device_ops_read(const void *p, uint64_t size) {
        device_ops_sync();
        read_memory(NULL, p, size);
}

/* Part of one begins where its first number does. */
static void read_vector(LkContext *c, const LkVector *v) {
        if (!v->data)
                return;
        must((uintptr_t) v->data % lk_type_size(v->type) == 0, "an operation reads weights that are not aligned");
        read_memory(c, v->data, v->n * lk_type_size(v->type));
}

static uint64_t block_scale_bytes(const LkMatrix *m) {
        return (m->quant.first_row + m->rows + 127) / 128 * 128 * m->quant.block_scale_cols;
}

/* A part of a matrix begins where its row does: only the matrix itself is aligned. */
static void read_matrix(LkContext *c, const LkMatrix *m) {
        uint64_t row = lk_row_size(m->type, m->cols);

        must(m->row_stride == row && m->block_rows >= m->rows, "an operation reads a matrix with gaps");
        read_memory(c, m->data, m->rows * row);
        if (m->quant.scale)
                read_memory(c, m->quant.scale, (m->quant.scale_stride ? m->quant.first_row + m->rows : 1) * sizeof(float));
        if (m->quant.block_scale)
                read_memory(c, m->quant.block_scale, block_scale_bytes(m));
        read_vector(c, &m->quant.in_scale);
}

static int ended(LkContext *c, int r) {
        LOCKED;

        close_blocks(queues_of(c));
        return r;
}

static bool is_device(const void *p) {
        LOCKED;

        return find_block(p, 1) != NULL;
}

static int gemm(LkContext *c, const LkGemm *a) {
        begin_work(c);
        if (a->m > 0 && a->w.rows > 0)
                read_matrix(c, &a->w);
        read_vector(c, &a->bias);
        touch_rows(c, a->x, a->x_type, a->m, a->w.cols, a->x_ld);
        touch_rows(c, a->y, a->y_type, a->m, a->w.rows, a->y_ld);
        return ended(c, cpu->gemm(c, a));
}

static int gemm_i8(LkContext *c, const LkGemmI8 *a) {
        begin_work(c);
        for (const LkGemmI8 *p = a; p; p = p->beside) {
                read_matrix(c, &p->w);
                read_vector(c, &p->bias);
                touch(c, p->x, p->m > 0 ? (p->m - 1) * p->x_ld + p->w.cols : 0);
                touch(c, p->x_scale, p->m * sizeof(float));
                touch_rows(c, p->y, p->y_type, p->m, p->w.rows, p->y_ld);
        }
        return ended(c, cpu->gemm_i8(c, a));
}

static int dequantise(LkContext *c, const LkDequantise *a) {
        begin_work(c);
        read_matrix(c, &a->w);
        touch_rows(c, a->y, LK_F32, a->w.rows, a->w.cols, a->y_ld);
        return ended(c, cpu->dequantise(c, a));
}

static int expand(LkContext *c, const LkExpand *a) {
        begin_work(c);
        read_matrix(c, &a->w);
        touch(c, a->y, a->w.rows * a->w.cols * sizeof(*a->y));
        return ended(c, cpu->expand(c, a));
}

static void touch_residual(LkContext *c, const LkResidual *a, LkType type, uint64_t m, uint64_t n, const void *x, uint64_t x_ld) {
        touch_rows(c, x, type, m, n, x_ld);
        touch_rows(c, a->y, a->y_type ? a->y_type : type, m, n, a->y_ld);
        if (a->mod && m > 0) {
                touch(c, a->mod, 1);
                touch(c, a->mod_index, m * sizeof(int32_t));
        }
}

static void touch_quantised(LkContext *c, const LkQuantise *a, uint64_t m, uint64_t k) {
        touch(c, a->q, m > 0 ? (m - 1) * a->q_ld + k : 0);
        touch(c, a->scale, m * sizeof(float));
}

static int norm(LkContext *c, const LkNorm *a) {
        begin_work(c);
        read_vector(c, &a->weight);
        touch_rows(c, a->x, a->type, a->m, a->n, a->x_ld);
        if (a->y)
                touch_rows(c, a->y, a->y_type ? a->y_type : a->type, a->m, a->n, a->y_ld);
        if (a->mod && a->m > 0) {
                touch(c, a->mod, 1);
                touch(c, a->mod_index, a->m * sizeof(int32_t));
        }
        if (a->add)
                touch_residual(c, a->add, a->type, a->m, a->n, a->x, a->x_ld);
        if (a->quantise)
                touch_quantised(c, a->quantise, a->m, a->n);
        return ended(c, cpu->norm(c, a));
}

static int layer_norm(LkContext *c, const LkLayerNorm *a) {
        begin_work(c);
        read_vector(c, &a->weight);
        read_vector(c, &a->bias);
        touch_rows(c, a->x, a->type, a->m, a->n, a->x_ld);
        touch_rows(c, a->y, a->type, a->m, a->n, a->y_ld);
        return ended(c, cpu->layer_norm(c, a));
}

static void keys_are_made(LkContext *c) {
        LOCKED;
        Queues *q = queues_of(c);

        q->made_keys = own(q, q->clocks + LK_COMPUTE)[LK_COMPUTE];
}

static int qk_norm_rope(LkContext *c, const LkQkNormRope *a) {
        begin_work(c);
        read_vector(c, &a->weight);
        touch_rows(c, a->x, a->type, a->m, (uint64_t) a->heads * a->head_dim, a->x_ld);
        if (a->cos) {
                uint64_t turns = a->period > 0 && a->period < a->m ? a->period : a->m;

                touch(c, a->cos, turns * a->rope_dims * sizeof(float));
                touch(c, a->sin, turns * a->rope_dims * sizeof(float));
        }
        keys_are_made(c);
        return ended(c, cpu->qk_norm_rope(c, a));
}

static int residual(LkContext *c, const LkResidual *a) {
        begin_work(c);
        touch_residual(c, a, a->type, a->m, a->n, a->x, a->x_ld);
        return ended(c, cpu->residual(c, a));
}

static int swiglu(LkContext *c, const LkSwiglu *a) {
        begin_work(c);
        touch_rows(c, a->gate, a->type, a->m, a->n, a->gate_ld);
        touch_rows(c, a->up, a->type, a->m, a->n, a->up_ld);
        touch_rows(c, a->y, a->type, a->m, a->n, a->y_ld);
        return ended(c, cpu->swiglu(c, a));
}

static int activate(LkContext *c, const LkActivate *a) {
        begin_work(c);
        touch_rows(c, a->x, a->type, a->m, a->n, a->x_ld);
        touch_rows(c, a->y, a->type, a->m, a->n, a->y_ld);
        return ended(c, cpu->activate(c, a));
}

static int convert(LkContext *c, const LkConvert *a) {
        begin_work(c);
        touch_rows(c, a->x, a->x_type, a->m, a->n, a->x_ld);
        touch_rows(c, a->y, a->y_type, a->m, a->n, a->y_ld);
        return ended(c, cpu->convert(c, a));
}

static int quantise(LkContext *c, const LkQuantise *a) {
        begin_work(c);
        touch_rows(c, a->x, a->x_type, a->m, a->k, a->x_ld);
        if (a->up)
                touch_rows(c, a->up, a->x_type, a->m, a->k, a->up_ld);
        touch_quantised(c, a, a->m, a->k);
        return ended(c, cpu->quantise(c, a));
}

static int queue_aside(LkContext *c, const LkAttention *a) {
        LOCKED;
        Queues *q = queues_of(c);

        must(q->made_keys <= own(q, q->clocks + LK_SIDE)[LK_COMPUTE], "attention beside others does not wait for its keys");
        must(q->n_aside < ASIDE_MAX, "too much attention on LK_SIDE");
        q->aside[q->n_aside++] = (Aside){*a, ++own(q, q->clocks + LK_SIDE)[LK_SIDE]};
        return 0;
}

static int attend(LkContext *c, const LkAttention *a) {
        uint64_t n = (uint64_t) a->heads * a->head_dim, keys = a->kv_heads > 0 ? (uint64_t) a->kv_heads * a->head_dim : n;
        uint64_t sequences = a->sequences > 0 ? a->sequences : 1;

        begin_work(c);
        if (a->n_q > 0 && a->heads > 0) {
                touch_rows(c, a->q, a->type, sequences * a->n_q, n, a->q_ld);
                touch_rows(c, a->k, a->type, sequences * a->n_k, keys, a->k_ld);
                touch_rows(c, a->v, a->type, sequences * a->n_k, keys, a->v_ld);
                touch_rows(c, a->o, a->type, sequences * a->n_q, n, a->o_ld);
        }
        return ended(c, cpu->attention(c, a));
}

static int attention(LkContext *c, const LkAttention *a) {
        return a->aside ? queue_aside(c, a) : attend(c, a);
}

/* The rows of all blocks. */
static uint64_t touch_blocks(LkContext *c, const LkBlocks *b) {
        touch(c, b->start, ((uint64_t) b->n + 1) * sizeof(*b->start));
        return b->start[b->n];
}

static void touch_numbers(LkContext *c, const void *p, uint64_t n) {
        if (p)
                touch(c, p, n * sizeof(float));
}

static int block_means(LkContext *c, const LkBlockMeans *a) {
        uint64_t width = (uint64_t) a->heads * a->head_dim;

        begin_work(c);
        touch_rows(c, a->x, a->type, touch_blocks(c, &a->blocks), width, a->x_ld);
        touch_numbers(c, a->mean, a->blocks.n * width);
        touch_numbers(c, a->centre, 2 * width);
        return ended(c, cpu->block_means(c, a));
}

static void touch_lists(LkContext *c, const uint32_t *list, const uint32_t *count, const float *score, uint64_t lists, uint64_t n) {
        touch_numbers(c, list, lists * n);
        touch_numbers(c, count, lists);
        touch_numbers(c, score, lists * n);
}

static int route(LkContext *c, const LkRoute *a) {
        uint64_t width = (uint64_t) a->heads * a->head_dim;

        begin_work(c);
        touch_numbers(c, a->q, a->n * width);
        touch_numbers(c, a->k, a->n * width);
        touch_numbers(c, a->by_rank ? NULL : a->variance, width);
        touch_lists(c, a->list, a->count, a->score, (uint64_t) a->heads * a->n_q, a->n);
        return ended(c, cpu->route(c, a));
}

static int sparse_attention(LkContext *c, const LkSparseAttention *a) {
        uint64_t width = (uint64_t) a->a.heads * a->a.head_dim, rows;

        begin_work(c);
        rows = touch_blocks(c, &a->blocks);
        touch_rows(c, a->a.q, a->a.type, a->a.n_q, width, a->a.q_ld);
        touch_rows(c, a->a.k, a->a.type, rows, width, a->a.k_ld);
        touch_rows(c, a->a.v, a->a.type, rows, width, a->a.v_ld);
        touch_rows(c, a->a.o, a->a.type, a->a.n_q, width, a->a.o_ld);
        touch_lists(c, a->list, a->count, a->score, (uint64_t) a->a.heads * a->n_blocks, a->blocks.n);
        touch_numbers(c, a->value, a->blocks.n * width);
        touch_numbers(c, a->value ? a->centre : NULL, width);
        if (a->gate) {
                touch_rows(c, a->gate, a->a.type, a->a.n_q, width, a->gate_ld);
                touch_numbers(c, a->coarse, a->blocks.n * width);
        }
        return ended(c, cpu->sparse_attention(c, a));
}

static int conv(LkContext *c, const LkConv *a) {
        uint64_t in = a->channels, out = a->w.rows;

        for (unsigned i = 0; i < 3; i++) {
                in *= a->axis[i].size;
                out *= lk_conv_size(a->axis + i);
        }
        begin_work(c);
        read_matrix(c, &a->w);
        read_vector(c, &a->bias);
        touch(c, a->x, in * sizeof(float));
        touch(c, a->y, out * sizeof(float));
        return ended(c, cpu->conv(c, a));
}

static int group_norm(LkContext *c, const LkGroupNorm *a) {
        uint64_t size = a->frames * a->pixels * a->channels * sizeof(float);

        begin_work(c);
        read_vector(c, &a->weight);
        read_vector(c, &a->bias);
        touch(c, a->x, size);
        touch(c, a->y, size);
        return ended(c, cpu->group_norm(c, a));
}

static int snake(LkContext *c, const LkSnake *a) {
        begin_work(c);
        read_vector(c, &a->alpha);
        read_vector(c, &a->beta);
        touch(c, a->x, a->m * a->channels * sizeof(float));
        touch(c, a->y, a->m * a->channels * sizeof(float));
        return ended(c, cpu->snake(c, a));
}

static int alias_free(LkContext *c, const LkAliasFree *a) {
        const LkVector *vectors[] = {&a->alpha, &a->beta, &a->up, &a->down};

        begin_work(c);
        for (unsigned i = 0; i < 4; i++)
                read_vector(c, vectors[i]);
        touch(c, a->x, a->rows * a->channels * sizeof(float));
        touch(c, a->y, a->m * a->channels * sizeof(float));
        return ended(c, cpu->alias_free(c, a));
}

static int average(LkContext *c, const LkAverage *a) {
        begin_work(c);
        for (uint32_t i = 0; i < a->count && i < LK_AVERAGE_MAX; i++)
                touch(c, a->x[i], a->n * sizeof(float));
        touch(c, a->y, a->n * sizeof(float));
        return ended(c, cpu->average(c, a));
}

static int unpatch(LkContext *c, const LkUnpatch *a) {
        uint64_t tokens = a->t * a->h * a->w, numbers = (uint64_t) a->channels * a->patch[0] * a->patch[1] * a->patch[2];

        begin_work(c);
        touch_rows(c, a->x, LK_F32, tokens, numbers, a->x_ld);
        touch(c, a->y, tokens * numbers * sizeof(float));
        return ended(c, cpu->unpatch(c, a));
}

static int upload(LkContext *c, void *device, const void *host, uint64_t size) {
        begin_work(c);
        must(!is_device(host), "an upload comes from device memory");
        touch(c, device, size);
        return ended(c, cpu->upload(c, device, host, size));
}

static int download(LkContext *c, void *host, const void *device, uint64_t size) {
        begin_work(c);
        must(!is_device(host), "a download goes to device memory");
        touch(c, device, size);
        return ended(c, cpu->download(c, host, device, size));
}

static bool has_peers(const Queues *q) {
        return q->peers[LK_PEER].end > 0 || q->peers[LK_TAKE].end > 0;
}

/* Another context's positions begin anew. */
static void forget_grains(Registered *r, size_t context) {
        for (uint64_t i = 0; r->grains && i <= r->size / ALIGN; i++) {
                r->grains[i].read[context] = 0;
                if (r->grains[i].writer == context)
                        r->grains[i].wrote = 0;
        }
}

static void forget(Queues *q) {
        memset(seen.at[q - all_queues], 0, sizeof(seen.at[0]));
        for (size_t i = 0; i < n_registered; i++)
                forget_grains(registered + i, (size_t) (q - all_queues));
        free(q->copies);
        for (unsigned i = 0; i < _LK_QUEUE_MAX; i++)
                free(q->peers[i].copies);
        *q = (Queues){};
}

/* Another one may come to lie where it was. */
static LkContext *context_free(LkContext *c) {
        LOCKED;

        for (size_t i = 0; c && i < CONTEXTS_MAX; i++)
                if (all_queues[i].context == c) {
                        must(all_queues[i].n_copies == 0 && !has_peers(all_queues + i), "a context goes with copies under way");
                        trim(all_queues + i);
                        forget(all_queues + i);
                }
        return cpu->context_free(c);
}

static int context_new(uint32_t threads, LkContext **ret) {
        int r = cpu->context_new(threads, ret);
        LOCKED;

        if (r >= 0)
                queues_of(*ret)->device = bound;
        return r;
}

void device_ops_bind(uint32_t device) {
        must(device < DEVICE_SIM_DEVICES, "no such device");
        bound = device;
}

uint32_t device_ops_device(const void *p) {
        LOCKED;

        return find_registered(p, 1) ? UINT32_MAX : find_end(p, 1)->queues->device;
}

const LkOps *device_ops(void) {
        cpu = lk_cpu_ops(LK_CPU_AUTO);
        table = *cpu;
        table.host_weights = false;
        table.half = true;
        table.batch = 3;
        table.memory_new = memory_new;
        table.memory_free = memory_free;
        table.memory_trim = memory_trim;
        table.upload = upload;
        table.download = download;
        table.fetch = fetch;
        table.mark = mark;
        table.wait = wait;
        table.join = join;
        table.copy = copy;
        table.wait_for = wait_for;
        table.is_done = is_done;
        table.native = native;
        table.pin = pin;
        table.unpin = unpin;
        table.gemm = gemm;
        table.gemm_i8 = gemm_i8;
        table.dequantise = dequantise;
        table.expand = expand;
        table.norm = norm;
        table.layer_norm = layer_norm;
        table.qk_norm_rope = qk_norm_rope;
        table.residual = residual;
        table.swiglu = swiglu;
        table.activate = activate;
        table.convert = convert;
        table.quantise = quantise;
        table.attention = attention;
        table.conv = conv;
        table.group_norm = group_norm;
        table.snake = snake;
        table.alias_free = alias_free;
        table.average = average;
        table.unpatch = unpatch;
        table.block_means = block_means;
        table.route = route;
        table.sparse_attention = sparse_attention;
        table.context_new = context_new;
        table.context_free = context_free;
        for (size_t i = 0; i < CONTEXTS_MAX; i++)
                forget(all_queues + i);
        while (n_registered > 0)
                free(registered[--n_registered].grains);
        device_sim = (DeviceSim){.fetches_left = -1};
        return &table;
}

const LkOps *device_ops_cpu(void) {
        return cpu;
}

void device_ops_sync(void) {
        LOCKED;

        for (size_t i = 0; i < CONTEXTS_MAX; i++)
                if (all_queues[i].context) {
                        (void) peers_until(all_queues + i, LK_PEER, UINT64_MAX);
                        (void) peers_until(all_queues + i, LK_TAKE, UINT64_MAX);
                        begin(all_queues + i);
                }
}

void device_ops_done(void) {
        must(device_sim.used == 0, "memory is left");
        for (size_t i = 0; i < CONTEXTS_MAX; i++) {
                must(all_queues[i].n_copies == 0 && !has_peers(all_queues + i), "copies are left");
                forget(all_queues + i);
        }
}
