/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/unit/worker/device-ops.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <cmocka.h>

#include "kernels/cpu/cpu.h"

#define BLOCKS_MAX 1024
#define COPIES_MAX 65536
#define ALIGN 256u
#define PAGE UINT64_C(4096)
#define OPEN_MAX 64

/* What a queue has been given, and what it waits for of the other. */
typedef struct Clock {
        uint64_t at[_LK_QUEUE_MAX];
} Clock;

/* Pages of its own, and one behind them that nobody may touch. */
typedef struct Block {
        uint8_t *p;
        uint64_t size;
        bool open; /* to the operation that runs */
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
static Block *opened[OPEN_MAX];
static size_t n_opened;
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

static uint64_t whole_pages(uint64_t size) {
        return (size + PAGE - 1) / PAGE * PAGE;
}

/* Nothing but the operation that names it touches device memory: anything else ends the test program. */
static void open_block(Block *b) {
        if (b->open)
                return;
        assert_true(n_opened < OPEN_MAX);
        assert_int_equal(mprotect(b->p, whole_pages(b->size), PROT_READ | PROT_WRITE), 0);
        b->open = true;
        opened[n_opened++] = b;
}

static void close_blocks(void) {
        while (n_opened > 0) {
                Block *b = opened[--n_opened];

                assert_int_equal(mprotect(b->p, whole_pages(b->size), PROT_NONE), 0);
                b->open = false;
        }
}

/* An operation works with these bytes. */
static void touch(const void *p, uint64_t size) {
        Block *b = size > 0 ? find_block(p, size) : NULL;

        if (size == 0)
                return;
        if (!b)
                fail_msg("an operation works with what is not in device memory");
        open_block(b);
}

static void touch_rows(const void *p, LkType type, uint64_t m, uint64_t n, uint64_t ld) {
        if (m > 0 && n > 0)
                touch(p, ((m - 1) * ld + n) * lk_type_size(type));
}

static int memory_new(LkContext *c, uint64_t size, void **ret) {
        size = (size + ALIGN - 1) / ALIGN * ALIGN;
        size = size > 0 ? size : ALIGN;
        if (device_sim.limit > 0 && size > device_sim.limit - device_sim.used)
                return -ENOMEM;
        for (size_t i = 0; i < BLOCKS_MAX; i++)
                if (!blocks[i].p) {
                        uint8_t *p = mmap(NULL, whole_pages(size) + PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

                        assert_true(p != MAP_FAILED);
                        blocks[i] = (Block){.p = p, .size = size, .read = calloc(size / ALIGN, sizeof(uint64_t))};
                        assert_non_null(blocks[i].read);
                        open_block(blocks + i);
                        memset(blocks[i].p, 0xff, size); /* NaN */
                        close_blocks();
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

                touch(a->device, a->rows * a->width);
                for (uint64_t i = 0; i < a->rows; i++)
                        memcpy((uint8_t *) a->device + i * a->width, (const uint8_t *) a->host + i * a->stride, a->width);
        }
        close_blocks();
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
        assert_int_equal(munmap(b->p, whole_pages(b->size) + PAGE), 0);
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
        if (find_block(a->host, 1))
                fail_msg("a fetch comes from device memory");
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
        open_block(b);
        for (uint64_t i = ((const uint8_t *) p - b->p) / ALIGN; i <= ((const uint8_t *) p - b->p + size - 1) / ALIGN; i++)
                b->read[i] = clocks[LK_COMPUTE].at[LK_COMPUTE];
}

void device_ops_read(const void *p, uint64_t size) {
        begin_work();
        read_memory(p, size);
}

/* Part of one begins where its first number does. */
static void read_vector(const LkVector *v) {
        if (!v->data)
                return;
        if ((uintptr_t) v->data % lk_type_size(v->type) != 0)
                fail_msg("an operation reads weights that are not aligned");
        read_memory(v->data, v->n * lk_type_size(v->type));
}

static uint64_t block_scale_bytes(const LkMatrix *m) {
        return (m->quant.first_row + m->rows + 127) / 128 * 128 * m->quant.block_scale_cols;
}

/* A part of a matrix begins where its row does: only the matrix itself is aligned. */
static void read_matrix(const LkMatrix *m) {
        uint64_t row = lk_row_size(m->type, m->cols);

        if (m->row_stride != row || m->block_rows < m->rows)
                fail_msg("an operation reads a matrix with gaps");
        read_memory(m->data, m->rows * row);
        if (m->quant.scale)
                read_memory(m->quant.scale,
                        (m->quant.scale_stride ? m->quant.first_row + m->rows : 1) * sizeof(float));
        if (m->quant.block_scale)
                read_memory(m->quant.block_scale, block_scale_bytes(m));
        read_vector(&m->quant.in_scale);
}

static int ended(int r) {
        close_blocks();
        return r;
}

static int gemm(LkContext *c, const LkGemm *a) {
        begin_work();
        if (a->m > 0 && a->w.rows > 0)
                read_matrix(&a->w);
        read_vector(&a->bias);
        touch_rows(a->x, a->x_type, a->m, a->w.cols, a->x_ld);
        touch_rows(a->y, a->y_type, a->m, a->w.rows, a->y_ld);
        return ended(cpu->gemm(c, a));
}

static int gemm_i8(LkContext *c, const LkGemmI8 *a) {
        begin_work();
        read_matrix(&a->w);
        read_vector(&a->bias);
        touch(a->x, a->m > 0 ? (a->m - 1) * a->x_ld + a->w.cols : 0);
        touch(a->x_scale, a->m * sizeof(float));
        touch_rows(a->y, a->y_type, a->m, a->w.rows, a->y_ld);
        return ended(cpu->gemm_i8(c, a));
}

static int dequantise(LkContext *c, const LkDequantise *a) {
        begin_work();
        read_matrix(&a->w);
        touch_rows(a->y, LK_F32, a->w.rows, a->w.cols, a->y_ld);
        return ended(cpu->dequantise(c, a));
}

static void touch_residual(const LkResidual *a, LkType type, uint64_t m, uint64_t n, const void *x, uint64_t x_ld) {
        touch_rows(x, type, m, n, x_ld);
        touch_rows(a->y, type, m, n, a->y_ld);
        if (a->mod && m > 0) {
                touch(a->mod, 1);
                touch(a->mod_index, m * sizeof(int32_t));
        }
}

static void touch_quantised(const LkQuantise *a, uint64_t m, uint64_t k) {
        touch(a->q, m > 0 ? (m - 1) * a->q_ld + k : 0);
        touch(a->scale, m * sizeof(float));
}

static int norm(LkContext *c, const LkNorm *a) {
        begin_work();
        read_vector(&a->weight);
        touch_rows(a->x, a->type, a->m, a->n, a->x_ld);
        if (a->y)
                touch_rows(a->y, a->type, a->m, a->n, a->y_ld);
        if (a->mod && a->m > 0) {
                touch(a->mod, 1);
                touch(a->mod_index, a->m * sizeof(int32_t));
        }
        if (a->add)
                touch_residual(a->add, a->type, a->m, a->n, a->x, a->x_ld);
        if (a->quantise)
                touch_quantised(a->quantise, a->m, a->n);
        return ended(cpu->norm(c, a));
}

static int layer_norm(LkContext *c, const LkLayerNorm *a) {
        begin_work();
        read_vector(&a->weight);
        read_vector(&a->bias);
        touch_rows(a->x, a->type, a->m, a->n, a->x_ld);
        touch_rows(a->y, a->type, a->m, a->n, a->y_ld);
        return ended(cpu->layer_norm(c, a));
}

static int qk_norm_rope(LkContext *c, const LkQkNormRope *a) {
        begin_work();
        read_vector(&a->weight);
        touch_rows(a->x, a->type, a->m, (uint64_t) a->heads * a->head_dim, a->x_ld);
        if (a->cos) {
                touch(a->cos, a->m * a->rope_dims * sizeof(float));
                touch(a->sin, a->m * a->rope_dims * sizeof(float));
        }
        return ended(cpu->qk_norm_rope(c, a));
}

static int residual(LkContext *c, const LkResidual *a) {
        begin_work();
        touch_residual(a, a->type, a->m, a->n, a->x, a->x_ld);
        return ended(cpu->residual(c, a));
}

static int swiglu(LkContext *c, const LkSwiglu *a) {
        begin_work();
        touch_rows(a->gate, a->type, a->m, a->n, a->gate_ld);
        touch_rows(a->up, a->type, a->m, a->n, a->up_ld);
        touch_rows(a->y, a->type, a->m, a->n, a->y_ld);
        return ended(cpu->swiglu(c, a));
}

static int activate(LkContext *c, const LkActivate *a) {
        begin_work();
        touch_rows(a->x, a->type, a->m, a->n, a->x_ld);
        touch_rows(a->y, a->type, a->m, a->n, a->y_ld);
        return ended(cpu->activate(c, a));
}

static int convert(LkContext *c, const LkConvert *a) {
        begin_work();
        touch_rows(a->x, a->x_type, a->m, a->n, a->x_ld);
        touch_rows(a->y, a->y_type, a->m, a->n, a->y_ld);
        return ended(cpu->convert(c, a));
}

static int quantise(LkContext *c, const LkQuantise *a) {
        begin_work();
        touch_rows(a->x, a->x_type, a->m, a->k, a->x_ld);
        if (a->up)
                touch_rows(a->up, a->x_type, a->m, a->k, a->up_ld);
        touch_quantised(a, a->m, a->k);
        return ended(cpu->quantise(c, a));
}

static int attention(LkContext *c, const LkAttention *a) {
        uint64_t n = (uint64_t) a->heads * a->head_dim, keys = a->kv_heads > 0 ? (uint64_t) a->kv_heads * a->head_dim : n;

        begin_work();
        if (a->n_q > 0 && a->heads > 0) {
                touch_rows(a->q, a->type, a->n_q, n, a->q_ld);
                touch_rows(a->k, a->type, a->n_k, keys, a->k_ld);
                touch_rows(a->v, a->type, a->n_k, keys, a->v_ld);
                touch_rows(a->o, a->type, a->n_q, n, a->o_ld);
        }
        return ended(cpu->attention(c, a));
}

static int conv(LkContext *c, const LkConv *a) {
        uint64_t in = a->channels, out = a->w.rows;

        for (unsigned i = 0; i < 3; i++) {
                in *= a->axis[i].size;
                out *= lk_conv_size(a->axis + i);
        }
        begin_work();
        read_matrix(&a->w);
        read_vector(&a->bias);
        touch(a->x, in * sizeof(float));
        touch(a->y, out * sizeof(float));
        return ended(cpu->conv(c, a));
}

static int group_norm(LkContext *c, const LkGroupNorm *a) {
        uint64_t size = a->frames * a->pixels * a->channels * sizeof(float);

        begin_work();
        read_vector(&a->weight);
        read_vector(&a->bias);
        touch(a->x, size);
        touch(a->y, size);
        return ended(cpu->group_norm(c, a));
}

static int snake(LkContext *c, const LkSnake *a) {
        begin_work();
        read_vector(&a->alpha);
        read_vector(&a->beta);
        touch(a->x, a->m * a->channels * sizeof(float));
        touch(a->y, a->m * a->channels * sizeof(float));
        return ended(cpu->snake(c, a));
}

static int alias_free(LkContext *c, const LkAliasFree *a) {
        const LkVector *vectors[] = {&a->alpha, &a->beta, &a->up, &a->down};

        begin_work();
        for (unsigned i = 0; i < 4; i++)
                read_vector(vectors[i]);
        touch(a->x, a->rows * a->channels * sizeof(float));
        touch(a->y, a->m * a->channels * sizeof(float));
        return ended(cpu->alias_free(c, a));
}

static int average(LkContext *c, const LkAverage *a) {
        begin_work();
        for (uint32_t i = 0; i < a->count && i < LK_AVERAGE_MAX; i++)
                touch(a->x[i], a->n * sizeof(float));
        touch(a->y, a->n * sizeof(float));
        return ended(cpu->average(c, a));
}

static int upload(LkContext *c, void *device, const void *host, uint64_t size) {
        begin_work();
        if (size > 0 && find_block(host, 1))
                fail_msg("an upload comes from device memory");
        touch(device, size);
        return ended(cpu->upload(c, device, host, size));
}

static int download(LkContext *c, void *host, const void *device, uint64_t size) {
        begin_work();
        if (size > 0 && find_block(host, 1))
                fail_msg("a download goes to device memory");
        touch(device, size);
        return ended(cpu->download(c, host, device, size));
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
        memset(clocks, 0, sizeof(clocks));
        memset(events, 0, sizeof(events));
        n_copies = 0;
        n_opened = 0;
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
