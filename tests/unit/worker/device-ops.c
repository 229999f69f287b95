/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/unit/worker/device-ops.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "kernels/cpu/cpu.h"

#define BLOCKS_MAX 1024
#define COPIES_MAX 65536
#define ALIGN 256u

/* What a queue has been given, and what it waits for of the other. */
typedef struct Clock {
        uint64_t at[_LK_QUEUE_MAX];
} Clock;

typedef struct Block {
        uint8_t *p;
        uint64_t size;
        uint64_t *read; /* [size / ALIGN]: position of LK_COMPUTE that read it last */
} Block;

typedef struct Copy {
        LkFetch args;
        uint64_t position;
} Copy;

DeviceSim device_sim;

static LkOps table;
static const LkOps *cpu;
static Block blocks[BLOCKS_MAX];
static Clock clocks[_LK_QUEUE_MAX]; /* of each queue: itself, and what it waits for */
static Clock events[LK_EVENTS_MAX];
static Copy *copies; /* that did not happen yet */
static size_t n_copies;

static Block *find_block(const void *p, uint64_t size) {
        for (size_t i = 0; i < BLOCKS_MAX; i++)
                if (blocks[i].p && (const uint8_t *) p >= blocks[i].p &&
                        (const uint8_t *) p + size <= blocks[i].p + blocks[i].size)
                        return blocks + i;
        return NULL;
}

static int memory_new(LkContext *c, uint64_t size, void **ret) {
        size = (size + ALIGN - 1) / ALIGN * ALIGN;
        if (device_sim.limit > 0 && size > device_sim.limit - device_sim.used)
                return -ENOMEM;
        for (size_t i = 0; i < BLOCKS_MAX; i++)
                if (!blocks[i].p) {
                        blocks[i] = (Block){aligned_alloc(ALIGN, size), size, calloc(size / ALIGN, sizeof(uint64_t))};
                        assert_true(blocks[i].p && blocks[i].read);
                        memset(blocks[i].p, 0xff, size); /* NaN */
                        device_sim.used += size;
                        device_sim.peak = device_sim.used > device_sim.peak ? device_sim.used : device_sim.peak;
                        device_sim.allocations++;
                        *ret = blocks[i].p;
                        return 0;
                }
        fail_msg("more than %d blocks of device memory", BLOCKS_MAX);
        return -ENOMEM;
}

/* Copies up to a position happen. */
static void copy_until(uint64_t position) {
        size_t n = 0;

        while (n < n_copies && copies[n].position <= position) {
                const LkFetch *a = &copies[n++].args;

                for (uint64_t i = 0; i < a->rows; i++)
                        memcpy((uint8_t *) a->device + i * a->width, (const uint8_t *) a->host + i * a->stride, a->width);
        }
        n_copies -= n;
        memmove(copies, copies + n, n_copies * sizeof(*copies));
}

static void memory_free(LkContext *c, void *p) {
        Block *b = p ? find_block(p, 1) : NULL;

        if (!p)
                return;
        assert_non_null(b);
        assert_ptr_equal(b->p, p);
        for (size_t i = 0; i < n_copies; i++) /* it may be somebody else's by then */
                if ((uint8_t *) copies[i].args.device >= b->p && (uint8_t *) copies[i].args.device < b->p + b->size &&
                        copies[i].position > clocks[LK_COMPUTE].at[LK_COPY])
                        fail_msg("memory is freed while a copy into it is under way");
        copy_until(clocks[LK_COMPUTE].at[LK_COPY]);
        device_sim.used -= b->size;
        free(b->p);
        free(b->read);
        *b = (Block){};
}

static void memory_trim(LkContext *c) {
}

static int fetch(LkContext *c, const LkFetch *a) {
        const uint64_t size = a->rows * a->width;
        Block *b = find_block(a->device, size);

        if (device_sim.fetches_left == 0)
                return -EIO;
        if (device_sim.fetches_left > 0)
                device_sim.fetches_left--;
        if (!b)
                fail_msg("a fetch goes to what is no device memory");
        for (uint64_t i = 0; i < (size + ALIGN - 1) / ALIGN; i++)
                if (b->read[((uint8_t *) a->device - b->p) / ALIGN + i] > clocks[LK_COPY].at[LK_COMPUTE])
                        fail_msg("a copy does not wait for work that reads what it overwrites");

        if (!copies)
                copies = calloc(COPIES_MAX, sizeof(*copies));
        assert_true(copies && n_copies < COPIES_MAX);
        copies[n_copies++] = (Copy){*a, ++clocks[LK_COPY].at[LK_COPY]};
        device_sim.fetches++;
        device_sim.fetched_bytes += size;
        return 0;
}

static int mark(LkContext *c, LkQueue queue, uint32_t event) {
        assert_true(queue < _LK_QUEUE_MAX && event < LK_EVENTS_MAX);
        events[event] = clocks[queue];
        return 0;
}

static int wait(LkContext *c, LkQueue queue, uint32_t event) {
        assert_true(queue < _LK_QUEUE_MAX && event < LK_EVENTS_MAX);
        for (unsigned i = 0; i < _LK_QUEUE_MAX; i++)
                if (events[event].at[i] > clocks[queue].at[i])
                        clocks[queue].at[i] = events[event].at[i];
        return 0;
}

static int join(LkContext *c, uint32_t event) {
        assert_true(event < LK_EVENTS_MAX);
        device_sim.joins++;
        return 0;
}

static int pin(LkContext *c, const void *host, uint64_t size) {
        if (device_sim.pin_fails)
                return -ENOMEM;
        device_sim.pinned_bytes += size;
        return 0;
}

static void unpin(const void *host, uint64_t size) {
}

/* Work of LK_COMPUTE begins: what it waited for has happened. */
static void begin_work(void) {
        clocks[LK_COMPUTE].at[LK_COMPUTE]++;
        copy_until(clocks[LK_COMPUTE].at[LK_COPY]);
}

static void read_memory(const void *p, uint64_t size) {
        Block *b = find_block(p, size);

        if (!b)
                fail_msg("an operation reads weights that are not in device memory");
        if ((uintptr_t) p % ALIGN != 0)
                fail_msg("an operation reads weights that are not aligned");
        for (uint64_t i = 0; i < (size + ALIGN - 1) / ALIGN; i++)
                b->read[((const uint8_t *) p - b->p) / ALIGN + i] = clocks[LK_COMPUTE].at[LK_COMPUTE];
}

void device_ops_read(const void *p, uint64_t size) {
        begin_work();
        read_memory(p, size);
}

static void read_vector(const LkVector *v) {
        if (v->data)
                read_memory(v->data, v->n * lk_type_size(v->type));
}

/* A part of a matrix begins where its row does: only the matrix itself is aligned. */
static void read_matrix(const LkMatrix *m) {
        uint64_t row = lk_row_size(m->type, m->cols);
        Block *b = find_block(m->data, m->rows * row);

        if (!b)
                fail_msg("an operation reads a matrix that is not in device memory");
        if (m->row_stride != row || m->block_rows < m->rows)
                fail_msg("an operation reads a matrix with gaps");
        for (uint64_t i = ((const uint8_t *) m->data - b->p) / ALIGN;
                i <= ((const uint8_t *) m->data - b->p + m->rows * row - 1) / ALIGN; i++)
                b->read[i] = clocks[LK_COMPUTE].at[LK_COMPUTE];
        if (m->quant.scale)
                read_memory(m->quant.scale,
                        (m->quant.scale_stride ? m->quant.first_row + m->rows : 1) * sizeof(float));
        read_vector(&m->quant.in_scale);
}

static int gemm(LkContext *c, const LkGemm *a) {
        begin_work();
        if (find_block(a->w.data, 1)) /* a product with rows that were uploaded has its own matrix */
                read_matrix(&a->w);
        else
                fail_msg("an operation reads a matrix that is not in device memory");
        read_vector(&a->bias);
        return cpu->gemm(c, a);
}

static int gemm_i8(LkContext *c, const LkGemmI8 *a) {
        begin_work();
        read_matrix(&a->w);
        read_vector(&a->bias);
        return cpu->gemm_i8(c, a);
}

static int dequantise(LkContext *c, const LkDequantise *a) {
        begin_work();
        read_matrix(&a->w);
        return cpu->dequantise(c, a);
}

static int norm(LkContext *c, const LkNorm *a) {
        begin_work();
        read_vector(&a->weight);
        return cpu->norm(c, a);
}

static int qk_norm_rope(LkContext *c, const LkQkNormRope *a) {
        begin_work();
        read_vector(&a->weight);
        return cpu->qk_norm_rope(c, a);
}

/* The others see no weights. */
static int attention(LkContext *c, const LkAttention *a) {
        begin_work();
        return cpu->attention(c, a);
}

static int upload(LkContext *c, void *device, const void *host, uint64_t size) {
        begin_work();
        return cpu->upload(c, device, host, size);
}

static int download(LkContext *c, void *host, const void *device, uint64_t size) {
        begin_work();
        return cpu->download(c, host, device, size);
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
        memset(clocks, 0, sizeof(clocks));
        memset(events, 0, sizeof(events));
        n_copies = 0;
        device_sim = (DeviceSim){.fetches_left = -1};
        return &table;
}

const LkOps *device_ops_cpu(void) {
        return cpu;
}

void device_ops_sync(void) {
        begin_work();
}

void device_ops_done(void) {
        assert_int_equal(device_sim.used, 0);
        assert_int_equal(n_copies, 0);
        free(copies);
        copies = NULL;
}
