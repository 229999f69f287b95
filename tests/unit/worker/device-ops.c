/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/unit/worker/device-ops.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/cpu.h"
#include "service/shared/cleanup.h"

#define BLOCKS_MAX 4096
#define COPIES_MAX 65536
#define CONTEXTS_MAX 8
#define ALIGN 256u

/* What a queue has been given, and what it waits for of the other. */
typedef struct Clock {
        uint64_t at[_LK_QUEUE_MAX];
} Clock;

typedef struct Copy {
        LkFetch args;
        uint64_t position;
} Copy;

/* The queues of a context. */
typedef struct Queues {
        LkContext *context;
        Clock clocks[_LK_QUEUE_MAX]; /* of each queue: itself, and what it waits for */
        Clock events[LK_EVENTS_MAX];
        Copy *copies; /* that did not happen yet */
        size_t n_copies;
} Queues;

typedef struct Block {
        Queues *queues; /* whose it is: nobody else reads it or copies into it */
        uint8_t *p;
        uint64_t size;
        uint64_t *read; /* [size / ALIGN]: position of LK_COMPUTE that read it last */
        bool kept;      /* freed, and not given back yet */
} Block;

DeviceSim device_sim;

static LkOps table;
static const LkOps *cpu;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of all below, and of device_sim */
static Block blocks[BLOCKS_MAX];
static Queues all_queues[CONTEXTS_MAX];

/* On any thread, where a test's own assertion would jump out of another one's stack. */
static _Noreturn void die(const char *text) {
        (void) fprintf(stderr, "The device: %s\n", text);
        abort();
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

static void give_back(Block *b) {
        device_sim.used -= b->size;
        free(b->p);
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
                memset(b->p, 0xff, b->size);
                memset(b->read, 0, b->size / ALIGN * sizeof(*b->read));
                *ret = b->p;
                return true;
        }
        return false;
}

static int memory_new(LkContext *c, uint64_t size, void **ret) {
        LOCKED;

        size = (size + ALIGN - 1) / ALIGN * ALIGN;
        if (take_kept(queues_of(c), size, ret))
                return 0;
        if (device_sim.refusals > 0 && --device_sim.refusals < device_sim.refuse)
                return -ENOMEM;
        if (device_sim.limit > 0 && size > device_sim.limit - device_sim.used)
                trim(queues_of(c));
        if (device_sim.limit > 0 && size > device_sim.limit - device_sim.used)
                return -ENOMEM;
        for (size_t i = 0; i < BLOCKS_MAX; i++)
                if (!blocks[i].p) {
                        blocks[i] = (Block){queues_of(c), aligned_alloc(ALIGN, size), size, calloc(size / ALIGN, sizeof(uint64_t)), false};
                        must(blocks[i].p && blocks[i].read, "no memory");
                        memset(blocks[i].p, 0xff, size); /* NaN */
                        device_sim.used += size;
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

                for (uint64_t i = 0; i < a->rows; i++)
                        memcpy((uint8_t *) a->device + i * a->width, (const uint8_t *) a->host + i * a->stride, a->width);
        }
        if (n == 0)
                return;
        q->n_copies -= n;
        memmove(q->copies, q->copies + n, q->n_copies * sizeof(*q->copies));
}

static void memory_free(LkContext *c, void *p) {
        LOCKED;
        Block *b = p ? find_block(p, 1) : NULL;
        Queues *q = queues_of(c);
        uint64_t known = q->clocks[LK_COMPUTE].at[LK_COPY];

        if (!p)
                return;
        must(b && b->p == p, "what is freed is no memory");
        must(b->queues == q, "memory is freed by another context");
        for (size_t i = 0; i < q->n_copies; i++) /* it may be somebody else's by then */
                must((uint8_t *) q->copies[i].args.device < b->p || (uint8_t *) q->copies[i].args.device >= b->p + b->size ||
                                q->copies[i].position <= known,
                        "memory is freed while a copy into it is under way");
        copy_until(q, known);
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
        for (uint64_t i = 0; i < (size + ALIGN - 1) / ALIGN; i++)
                must(b->read[(uint64_t) ((uint8_t *) a->device - b->p) / ALIGN + i] <= q->clocks[LK_COPY].at[LK_COMPUTE],
                        "a copy does not wait for work that reads what it overwrites");

        if (!q->copies)
                q->copies = calloc(COPIES_MAX, sizeof(*q->copies));
        must(q->copies && q->n_copies < COPIES_MAX, "too many copies");
        q->copies[q->n_copies++] = (Copy){*a, ++q->clocks[LK_COPY].at[LK_COPY]};
        device_sim.fetches++;
        device_sim.fetched_bytes += size;
        return 0;
}

static int mark(LkContext *c, LkQueue queue, uint32_t event) {
        LOCKED;
        Queues *q = queues_of(c);

        must(queue < _LK_QUEUE_MAX && event < LK_EVENTS_MAX, "no such event");
        q->events[event] = q->clocks[queue];
        return 0;
}

static int wait(LkContext *c, LkQueue queue, uint32_t event) {
        LOCKED;
        Queues *q = queues_of(c);

        must(queue < _LK_QUEUE_MAX && event < LK_EVENTS_MAX, "no such event");
        for (unsigned i = 0; i < _LK_QUEUE_MAX; i++)
                if (q->events[event].at[i] > q->clocks[queue].at[i])
                        q->clocks[queue].at[i] = q->events[event].at[i];
        return 0;
}

static int join(LkContext *c, uint32_t event) {
        LOCKED;

        must(event < LK_EVENTS_MAX, "no such event");
        device_sim.joins++;
        return 0;
}

static int pin(LkContext *c, const void *host, uint64_t size) {
        LOCKED;

        if (device_sim.pin_fails)
                return -ENOMEM;
        device_sim.pinned_bytes += size;
        return 0;
}

static void unpin(const void *host, uint64_t size) {
}

static void begin(Queues *q) {
        q->clocks[LK_COMPUTE].at[LK_COMPUTE]++;
        copy_until(q, q->clocks[LK_COMPUTE].at[LK_COPY]);
}

/* Work of LK_COMPUTE begins: what it waited for has happened. */
static void begin_work(LkContext *c) {
        LOCKED;

        begin(queues_of(c));
}

/* c: whose work it is; NULL: that of its owner. */
static void read_memory(LkContext *c, const void *p, uint64_t size) {
        LOCKED;
        Block *b = find_block(p, size);

        must(b, "an operation reads weights that are not in device memory");
        must(!c || b->queues == queues_of(c), "an operation reads another context's weights");
        must((uintptr_t) p % ALIGN == 0, "an operation reads weights that are not aligned");
        for (uint64_t i = 0; i < (size + ALIGN - 1) / ALIGN; i++)
                b->read[(uint64_t) ((const uint8_t *) p - b->p) / ALIGN + i] = b->queues->clocks[LK_COMPUTE].at[LK_COMPUTE];
}

void device_ops_read(const void *p, uint64_t size) {
        device_ops_sync();
        read_memory(NULL, p, size);
}

static void read_vector(LkContext *c, const LkVector *v) {
        if (v->data)
                read_memory(c, v->data, v->n * lk_type_size(v->type));
}

static void read_rows(LkContext *c, const LkMatrix *m) {
        LOCKED;
        uint64_t row = lk_row_size(m->type, m->cols), first;
        Block *b = find_block(m->data, m->rows * row);

        must(b, "an operation reads a matrix that is not in device memory");
        must(b->queues == queues_of(c), "an operation reads another context's matrix");
        must(m->row_stride == row && m->block_rows >= m->rows, "an operation reads a matrix with gaps");
        first = (uint64_t) ((const uint8_t *) m->data - b->p);
        for (uint64_t i = first / ALIGN; i <= (first + m->rows * row - 1) / ALIGN; i++)
                b->read[i] = b->queues->clocks[LK_COMPUTE].at[LK_COMPUTE];
}

/* A part of a matrix begins where its row does: only the matrix itself is aligned. */
static void read_matrix(LkContext *c, const LkMatrix *m) {
        read_rows(c, m);
        if (m->quant.scale)
                read_memory(c, m->quant.scale, (m->quant.scale_stride ? m->quant.first_row + m->rows : 1) * sizeof(float));
        read_vector(c, &m->quant.in_scale);
}

static int gemm(LkContext *c, const LkGemm *a) {
        begin_work(c);
        read_matrix(c, &a->w);
        read_vector(c, &a->bias);
        return cpu->gemm(c, a);
}

static int gemm_i8(LkContext *c, const LkGemmI8 *a) {
        begin_work(c);
        read_matrix(c, &a->w);
        read_vector(c, &a->bias);
        return cpu->gemm_i8(c, a);
}

static int dequantise(LkContext *c, const LkDequantise *a) {
        begin_work(c);
        read_matrix(c, &a->w);
        return cpu->dequantise(c, a);
}

static int norm(LkContext *c, const LkNorm *a) {
        begin_work(c);
        read_vector(c, &a->weight);
        return cpu->norm(c, a);
}

static int qk_norm_rope(LkContext *c, const LkQkNormRope *a) {
        begin_work(c);
        read_vector(c, &a->weight);
        return cpu->qk_norm_rope(c, a);
}

/* The others see no weights. */
static int attention(LkContext *c, const LkAttention *a) {
        begin_work(c);
        return cpu->attention(c, a);
}

static int upload(LkContext *c, void *device, const void *host, uint64_t size) {
        begin_work(c);
        return cpu->upload(c, device, host, size);
}

static int download(LkContext *c, void *host, const void *device, uint64_t size) {
        begin_work(c);
        return cpu->download(c, host, device, size);
}

static void forget(Queues *q) {
        free(q->copies);
        *q = (Queues){};
}

/* Another one may come to lie where it was. */
static LkContext *context_free(LkContext *c) {
        LOCKED;

        for (size_t i = 0; c && i < CONTEXTS_MAX; i++)
                if (all_queues[i].context == c) {
                        must(all_queues[i].n_copies == 0, "a context goes with copies under way");
                        trim(all_queues + i);
                        forget(all_queues + i);
                }
        return cpu->context_free(c);
}

const LkOps *device_ops(void) {
        cpu = lk_cpu_ops(LK_CPU_AUTO);
        table = *cpu;
        table.host_weights = false;
        table.memory_new = memory_new;
        table.memory_free = memory_free;
        table.memory_trim = memory_trim;
        table.upload = upload;
        table.download = download;
        table.fetch = fetch;
        table.mark = mark;
        table.wait = wait;
        table.join = join;
        table.pin = pin;
        table.unpin = unpin;
        table.gemm = gemm;
        table.gemm_i8 = gemm_i8;
        table.dequantise = dequantise;
        table.norm = norm;
        table.qk_norm_rope = qk_norm_rope;
        table.attention = attention;
        table.context_free = context_free;
        for (size_t i = 0; i < CONTEXTS_MAX; i++)
                forget(all_queues + i);
        device_sim = (DeviceSim){.fetches_left = -1};
        return &table;
}

const LkOps *device_ops_cpu(void) {
        return cpu;
}

void device_ops_sync(void) {
        LOCKED;

        for (size_t i = 0; i < CONTEXTS_MAX; i++)
                if (all_queues[i].context)
                        begin(all_queues + i);
}

void device_ops_done(void) {
        must(device_sim.used == 0, "memory is left");
        for (size_t i = 0; i < CONTEXTS_MAX; i++) {
                must(all_queues[i].n_copies == 0, "copies are left");
                forget(all_queues + i);
        }
}
