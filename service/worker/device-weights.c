/* SPDX-License-Identifier: Apache-2.0 */
#include "service/worker/device-weights.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "service/shared/cleanup.h"

#define ALIGN UINT64_C(256)
#define NO_PART UINT32_MAX

/* Parts that are fetched before they are taken, beside the one that is next: two blocks of a denoiser. What is fetched for
 * the first time is registered meanwhile, which holds up the host (0.1 s a GB): one such part at a time, so that a pass
 * begins with what it is about to use and the rest comes behind its computation. */
#define AHEAD 4u
#define AHEAD_FIRST 1u

/* Events, from first_event on. */
#define RING_MAX 16u /* parts in the ring at a time */
#define EVENT_READY 0u
#define EVENT_FREE RING_MAX
#define EVENT_ORDER (2 * RING_MAX)
_Static_assert(EVENT_ORDER + 1 == DEVICE_WEIGHTS_EVENTS, "events");
_Static_assert(AHEAD + 2 < RING_MAX, "an event is free again before it is used");

typedef struct Slot {
        LkMatrix *matrix; /* the user's; NULL: a vector */
        LkVector *vector;
        LkMatrix host_matrix;
        LkVector host_vector;
        uint64_t at, wide_at; /* inside the part, as the file has it and wide */
        uint64_t scale_at, block_scale_at, in_scale_at; /* behind `at` */
        bool expands; /* where the part is wide */
} Slot;

typedef struct Part {
        Slot *slots; /* [n_slots] */
        uint32_t n_slots, n_expanding;
        uint64_t size, wide_size; /* wide: what expands is of bf16 */
        bool passing;
        bool bf16; /* its matrices meet rows of bf16 alone */
        bool pinned; /* or tried to */

        uint8_t *memory; /* of one that stays; NULL: it does not */
        bool fetched;    /* into it; if it expands when it is taken: that, too */
        bool waited;     /* by LK_COMPUTE */
        uint32_t ready;  /* event; fetched and not waited */
} Part;

typedef struct Entry {
        uint32_t part;
        uint64_t begin, size;
        uint32_t ready, done; /* events */
        bool taken, given;
} Entry;

struct DeviceWeights {
        DeviceWeightsConfig config;
        Part *parts; /* [n_parts] */
        uint32_t n_parts, max_parts;
        uint32_t n_staying, resident; /* the first ones */
        uint32_t n_expanding;         /* slots of those */
        bool wide; /* what stays is wide: all of it then. It comes through the ring and is expanded when it is first taken */

        uint8_t *ring;
        uint64_t ring_bytes;
        Entry entries[RING_MAX]; /* oldest first */
        uint32_t n_entries;
        uint32_t next_ready, next_free;

        uint32_t *order; /* owned */
        uint32_t n_order, at, ahead; /* next to be taken; next to be fetched */
        uint32_t in_flight;          /* fetched, not taken */
        bool cut_off;                /* a fetch of a part failed: some of it may be under way */
        int error;                   /* of a fetch ahead: the next take says it */
        atomic_uint_least64_t fetched_bytes; /* others ask while a rank works */
};

static uint64_t align(uint64_t n) {
        return (n + ALIGN - 1) / ALIGN * ALIGN;
}

int device_weights_new(const DeviceWeightsConfig *config, DeviceWeights **ret) {
        DeviceWeights *w;

        if (config->first_event > LK_EVENTS_MAX - DEVICE_WEIGHTS_EVENTS)
                return -EINVAL;
        w = calloc(1, sizeof(*w));
        if (!w)
                return -ENOMEM;
        w->config = *config;
        *ret = w;
        return 0;
}

DeviceWeights *device_weights_free(DeviceWeights *w) {
        if (!w)
                return NULL;
        device_weights_release(w);
        for (uint32_t i = 0; i < w->n_parts; i++)
                free(w->parts[i].slots);
        free(w->parts);
        free(w->order);
        free(w);
        return NULL;
}

int device_weights_add_part(DeviceWeights *w, bool passing, bool bf16) {
        if (w->ring || w->resident > 0)
                return -EBUSY;
        if (!passing && w->n_staying < w->n_parts)
                return -EINVAL;
        if (w->n_parts == w->max_parts) {
                uint32_t max = w->max_parts ? 2 * w->max_parts : 64;
                Part *more = realloc(w->parts, max * sizeof(*more));

                if (!more)
                        return -ENOMEM;
                w->parts = more;
                w->max_parts = max;
        }
        w->parts[w->n_parts++] = (Part){.passing = passing, .bf16 = bf16};
        w->n_staying += !passing;
        return 0;
}

/* Tensor rows from one block of a matrix to the next. */
static uint64_t block_step(const LkMatrix *m) {
        return m->row_stride > 0 ? m->block_stride / m->row_stride : 0;
}

static bool is_one_block(const LkMatrix *m) {
        return m->block_rows >= m->rows;
}

/* LK_NVFP4: scales lie in tiles of 128 rows, which are packed whole. */
#define TILE 128u

static uint64_t tile_row_bytes(const LkMatrix *m) {
        return TILE * m->quant.block_scale_cols;
}

static bool tiles_pack(const LkMatrix *m) {
        return is_one_block(m) || (m->quant.first_row % TILE == 0 && m->block_rows % TILE == 0 &&
                                          block_step(m) % TILE == 0);
}

static uint64_t block_scale_bytes(const LkMatrix *m) {
        uint64_t first = is_one_block(m) ? m->quant.first_row % TILE : 0;

        return (first + m->rows + TILE - 1) / TILE * tile_row_bytes(m);
}

/* Its size. */
static uint64_t place_matrix(Slot *s) {
        const LkMatrix *m = &s->host_matrix;
        const LkQuant *q = &m->quant;
        uint64_t at = align(m->rows * lk_row_size(m->type, m->cols));

        s->scale_at = at;
        if (q->scale)
                at += align((q->scale_stride > 0 ? m->rows : 1) * sizeof(float));
        s->block_scale_at = at;
        if (q->block_scale)
                at += align(block_scale_bytes(m));
        s->in_scale_at = at;
        if (q->in_scale.data)
                at += align(q->in_scale.n * lk_type_size(q->in_scale.type));
        return at;
}

static bool expands(const DeviceWeights *w, const Part *p, const LkMatrix *m) {
        return w->config.expand && p->bf16 && !p->passing && m->type >= LK_I8 && w->config.ops->weights[m->type] == LK_EXPANDED;
}

int device_weights_add_slot(DeviceWeights *w, LkMatrix *matrix, LkVector *vector) {
        Part *p = w->n_parts > 0 ? w->parts + w->n_parts - 1 : NULL;
        uint64_t size, wide_size;
        Slot *more, *s;

        if (!p || !matrix == !vector)
                return -EINVAL;
        if (matrix && matrix->quant.block_scale && !tiles_pack(matrix))
                return -EOPNOTSUPP;
        more = realloc(p->slots, (p->n_slots + 1) * sizeof(*more));
        if (!more)
                return -ENOMEM;

        p->slots = more;
        s = p->slots + p->n_slots++;
        *s = (Slot){.matrix = matrix, .vector = vector, .at = p->size, .wide_at = p->wide_size};
        if (matrix) {
                s->host_matrix = *matrix;
                s->expands = expands(w, p, matrix);
                size = place_matrix(s);
        } else {
                s->host_vector = *vector;
                size = align(vector->n * lk_type_size(vector->type));
        }
        wide_size = s->expands ? align(matrix->rows * lk_row_size(LK_BF16, matrix->cols)) : size;
        p->size += size;
        p->wide_size += wide_size;
        p->n_expanding += s->expands;
        w->n_expanding += s->expands;
        return 0;
}

/* A fetch and its source's registration. */
static int fetch(DeviceWeights *w, bool pin, void *device, const void *host, uint64_t rows, uint64_t width,
        uint64_t stride) {
        const LkFetch args = {.device = device, .host = host, .rows = rows, .width = width, .stride = stride};
        const LkOps *ops = w->config.ops;

        if (rows == 0 || width == 0)
                return 0;
        if (pin) {
                uint64_t span = (rows - 1) * stride + width;

                if (w->config.pin)
                        (void) w->config.pin(w->config.userdata, w->config.context, host, span);
                else
                        (void) ops->pin(w->config.context, host, span);
        }
        w->fetched_bytes += rows * width;
        return ops->fetch(w->config.context, &args);
}

/* Rows of a strided matrix, `width` bytes each, `stride` bytes apart inside a block. */
static int fetch_rows(DeviceWeights *w, bool pin, uint8_t *device, const uint8_t *host, const LkMatrix *m,
        uint64_t width, uint64_t stride, uint64_t block_stride) {
        uint64_t blocks = is_one_block(m) ? 1 : m->rows / m->block_rows, rest;
        uint64_t rows = is_one_block(m) ? m->rows : m->block_rows;
        int r = 0;

        if (stride == width && blocks > 1)
                r = fetch(w, pin, device, host, blocks, rows * width, block_stride);
        else
                for (uint64_t i = 0; r >= 0 && i < blocks; i++)
                        r = fetch(w, pin, device + i * rows * width, host + i * block_stride, rows, width, stride);
        rest = m->rows - blocks * rows; /* of a last block that is cut */
        return r < 0 || rest == 0 ? r
                                  : fetch(w, pin, device + blocks * rows * width, host + blocks * block_stride, rest,
                                            width, stride);
}

static int fetch_scales(DeviceWeights *w, bool pin, const Slot *s, uint8_t *base) {
        const LkMatrix *m = &s->host_matrix;
        const LkQuant *q = &m->quant;
        uint64_t first = q->first_row;
        int r = 0;

        if (q->scale && q->scale_stride == 0)
                r = fetch(w, pin, base + s->scale_at, q->scale, 1, sizeof(float), sizeof(float));
        else if (q->scale)
                r = fetch_rows(w, pin, base + s->scale_at, (const uint8_t *) q->scale + first * q->scale_stride, m,
                        sizeof(float), q->scale_stride, block_step(m) * q->scale_stride);
        if (r >= 0 && q->block_scale && is_one_block(m))
                r = fetch(w, pin, base + s->block_scale_at,
                        (const uint8_t *) q->block_scale + first / TILE * tile_row_bytes(m), 1,
                        block_scale_bytes(m), block_scale_bytes(m));
        else if (r >= 0 && q->block_scale)
                r = fetch(w, pin, base + s->block_scale_at,
                        (const uint8_t *) q->block_scale + first / TILE * tile_row_bytes(m), m->rows / m->block_rows,
                        m->block_rows / TILE * tile_row_bytes(m), block_step(m) / TILE * tile_row_bytes(m));
        if (r >= 0 && q->in_scale.data)
                r = fetch(w, pin, base + s->in_scale_at, q->in_scale.data, 1,
                        q->in_scale.n * lk_type_size(q->in_scale.type), 0);
        return r;
}

static int fetch_slot(DeviceWeights *w, bool pin, const Slot *s, uint8_t *base) {
        const LkMatrix *m = &s->host_matrix;
        int r;

        if (s->vector)
                return fetch(w, pin, base, s->host_vector.data, 1,
                        s->host_vector.n * lk_type_size(s->host_vector.type), 0);
        r = fetch_rows(w, pin, base, m->data, m, lk_row_size(m->type, m->cols), m->row_stride, m->block_stride);
        return r < 0 ? r : fetch_scales(w, pin, s, base);
}

/* Where a slot comes to lie when the part is copied to `base`: there, but for what goes to its place at once. */
static uint8_t *slot_base(const DeviceWeights *w, const Part *p, const Slot *s, uint8_t *base) {
        return w->wide && p->memory && !s->expands ? p->memory + s->wide_at : base + s->at;
}

/* Starts the part's copies to `base`; event `ready` stands for them. */
static int fetch_part(DeviceWeights *w, Part *p, uint8_t *base, uint32_t *ret_ready) {
        uint32_t ready = w->config.first_event + EVENT_READY + w->next_ready++ % RING_MAX;
        int r = 0;

        for (uint32_t i = 0; r >= 0 && i < p->n_slots; i++)
                r = fetch_slot(w, !p->pinned, p->slots + i, slot_base(w, p, p->slots + i, base));
        if (r >= 0)
                r = w->config.ops->mark(w->config.context, LK_COPY, ready);
        if (r < 0) {
                w->cut_off = true;
                return r;
        }
        p->pinned = true;
        *ret_ready = ready;
        return 0;
}

/* The slot's data is at `base`, as the file has it. */
static void set_slot(const Slot *s, const uint8_t *base) {
        const LkMatrix *h = &s->host_matrix;
        uint64_t row = lk_row_size(h->type, h->cols);
        LkMatrix *m = s->matrix;

        if (s->vector) {
                *s->vector = s->host_vector;
                s->vector->data = base;
                return;
        }
        *m = *h;
        m->data = base;
        m->row_stride = row;
        m->block_rows = m->rows;
        m->block_stride = m->rows * row;
        m->quant.first_row = h->quant.block_scale && is_one_block(h) ? h->quant.first_row % TILE : 0;
        if (h->quant.scale) {
                m->quant.scale = base + s->scale_at;
                m->quant.scale_stride = h->quant.scale_stride > 0 ? sizeof(float) : 0;
        }
        if (h->quant.block_scale)
                m->quant.block_scale = base + s->block_scale_at;
        if (h->quant.in_scale.data)
                m->quant.in_scale.data = base + s->in_scale_at;
}

/* The same, expanded. */
static void set_wide_slot(const Slot *s, const uint8_t *base) {
        LkMatrix *m = s->matrix;

        *m = s->host_matrix;
        m->data = base;
        m->type = LK_BF16;
        m->row_stride = lk_row_size(LK_BF16, m->cols);
        m->block_rows = m->rows;
        m->block_stride = m->rows * m->row_stride;
        m->quant = (LkQuant){};
}

/* Is it (or is it to be) copied to the ring? */
static bool passes(const DeviceWeights *w, const Part *p) {
        return !p->memory || (w->wide && p->n_expanding > 0 && !p->fetched);
}

/* From the ring to its memory, by LK_COMPUTE. */
static int expand_part(DeviceWeights *w, Part *p, const uint8_t *base) {
        for (uint32_t i = 0; i < p->n_slots; i++) {
                const Slot *s = p->slots + i;
                int r;

                if (!s->expands || s->host_matrix.rows == 0 || s->host_matrix.cols == 0)
                        continue;
                set_slot(s, base + s->at);
                r = w->config.ops->expand(w->config.context,
                        &(LkExpand){.w = *s->matrix, .y = (uint16_t *) (void *) (p->memory + s->wide_at)});
                if (r < 0)
                        return r;
        }
        p->fetched = p->waited = true;
        return 0;
}

/* The oldest entry goes; what is copied there next waits for its last use. */
static int evict(DeviceWeights *w) {
        const Entry *e = w->entries;
        int r = 0;

        if (e->taken)
                r = w->config.ops->wait(w->config.context, LK_COPY, e->done);
        memmove(w->entries, w->entries + 1, --w->n_entries * sizeof(*w->entries));
        return r;
}

/* Room behind the newest entry, or before the oldest. */
static bool find_room(const DeviceWeights *w, uint64_t size, uint64_t *ret) {
        uint64_t begin, end;

        if (w->n_entries == 0) {
                *ret = 0;
                return size <= w->ring_bytes;
        }
        if (w->n_entries == RING_MAX)
                return false;
        begin = w->entries[0].begin;
        end = w->entries[w->n_entries - 1].begin + w->entries[w->n_entries - 1].size;
        if (end > begin) {
                *ret = w->ring_bytes - end >= size ? end : 0;
                return w->ring_bytes - end >= size || begin >= size;
        }
        *ret = end;
        return begin - end >= size;
}

/* A place in the ring. -EAGAIN: what is not given is in the way. */
static int ring_place(DeviceWeights *w, uint64_t size, uint64_t *ret) {
        while (!find_room(w, size, ret)) {
                int r;

                if (w->n_entries == 0 || !w->entries[0].given)
                        return -EAGAIN;
                r = evict(w);
                if (r < 0)
                        return r;
        }
        return 0;
}

static int ring_fetch(DeviceWeights *w, uint32_t part) {
        Part *p = w->parts + part;
        Entry e = {.part = part, .size = align(p->size > 0 ? p->size : 1)};
        int r;

        r = ring_place(w, e.size, &e.begin);
        if (r >= 0)
                r = fetch_part(w, p, w->ring + e.begin, &e.ready);
        if (r < 0)
                return r;
        e.done = w->config.first_event + EVENT_FREE + w->next_free++ % RING_MAX;
        w->entries[w->n_entries++] = e;
        w->in_flight++;
        return 0;
}

static int resident_fetch(DeviceWeights *w, Part *p) {
        int r;

        r = fetch_part(w, p, p->memory, &p->ready);
        if (r < 0)
                return r;
        p->fetched = true;
        p->waited = false;
        w->in_flight++;
        return 0;
}

/* The part's newest entry that is not given (given: or that is); NULL: none. */
static Entry *find_entry(DeviceWeights *w, uint32_t part, bool given) {
        for (uint32_t i = w->n_entries; i-- > 0;)
                if (w->entries[i].part == part && (given || !w->entries[i].given))
                        return w->entries + i;
        return NULL;
}

static void fetch_ahead(DeviceWeights *w) {
        int r = 0;

        if (w->ahead < w->at)
                w->ahead = w->at;
        while (r >= 0 && w->ahead < w->n_order && w->in_flight < AHEAD) {
                uint32_t part = w->order[w->ahead];
                Part *p = w->parts + part;

                if (!p->pinned && w->in_flight >= AHEAD_FIRST)
                        break;
                if (!passes(w, p))
                        r = p->fetched ? 0 : resident_fetch(w, p);
                else if (!find_entry(w, part, false))
                        r = ring_fetch(w, part);
                if (r >= 0)
                        w->ahead++;
        }
        if (r < 0 && r != -EAGAIN)
                w->error = r;
}

/* What was fetched and not taken leaves the ring: parts come in another order. Copies into its place come later
 * in the same queue. */
static void drop_untaken(DeviceWeights *w) {
        uint32_t n = 0;

        for (uint32_t i = 0; i < w->n_entries; i++)
                if (w->entries[i].taken)
                        w->entries[n++] = w->entries[i];
                else
                        w->in_flight--;
        w->n_entries = n;
        w->ahead = w->at;
}

static int take_from_ring(DeviceWeights *w, uint32_t part, uint8_t **ret) {
        Entry *e = find_entry(w, part, true);
        int r;

        if (!e) {
                r = ring_fetch(w, part);
                if (r == -EAGAIN) {
                        drop_untaken(w);
                        r = ring_fetch(w, part);
                }
                if (r < 0)
                        return r == -EAGAIN ? -ENOMEM : r;
                e = w->entries + w->n_entries - 1;
        }
        if (!e->taken) {
                r = w->config.ops->wait(w->config.context, LK_COMPUTE, e->ready);
                if (r < 0)
                        return r;
                w->in_flight--;
        }
        e->taken = true;
        e->given = false;
        *ret = w->ring + e->begin;
        return 0;
}

static int take_resident(DeviceWeights *w, Part *p) {
        int r;

        if (!p->fetched) {
                r = resident_fetch(w, p);
                if (r < 0)
                        return r;
        }
        if (p->waited)
                return 0;
        r = w->config.ops->wait(w->config.context, LK_COMPUTE, p->ready);
        if (r < 0)
                return r;
        p->waited = true;
        w->in_flight--;
        return 0;
}

/* The part is taken: where in the order we are, from here on or from the start: a pass may go over some of it again.
 * One that is not in it leaves the rest as it is. */
static void follow(DeviceWeights *w, uint32_t part) {
        for (uint32_t k = 0; k < w->n_order; k++) {
                uint32_t i = (w->at + k) % w->n_order;

                if (w->order[i] != part)
                        continue;
                if (i < w->at)
                        w->ahead = i + 1;
                w->at = i + 1;
                return;
        }
}

/* Work that is given later may overwrite what the entry has. */
static int give_entry(DeviceWeights *w, Entry *e) {
        e->given = true;
        return w->config.ops->mark(w->config.context, LK_COMPUTE, e->done);
}

/* Through the ring; what stays wide is done with it then. */
static int take_passing(DeviceWeights *w, uint32_t part, uint8_t **ret) {
        Part *p = w->parts + part;
        int r, q;

        r = take_from_ring(w, part, ret);
        if (r < 0 || !p->memory)
                return r;
        r = expand_part(w, p, *ret);
        q = give_entry(w, find_entry(w, part, false));
        *ret = p->memory;
        return r < 0 ? r : q;
}

int device_weights_take(DeviceWeights *w, uint32_t part) {
        uint8_t *base;
        Part *p;
        int r;

        if (part >= w->n_parts)
                return -EINVAL;
        r = STEAL(w->error, 0);
        if (r < 0)
                return r;

        p = w->parts + part;
        base = p->memory;
        if (passes(w, p) && !w->ring)
                return -EINVAL;
        follow(w, part);
        r = passes(w, p) ? take_passing(w, part, &base) : take_resident(w, p);
        if (r < 0)
                return r;
        for (uint32_t i = 0; i < p->n_slots; i++) {
                const Slot *s = p->slots + i;

                if (!w->wide || !p->memory)
                        set_slot(s, base + s->at);
                else if (s->expands)
                        set_wide_slot(s, base + s->wide_at);
                else
                        set_slot(s, base + s->wide_at);
        }
        return 0;
}

void device_weights_give(DeviceWeights *w, uint32_t part) {
        Entry *e;
        int r;

        e = part < w->n_parts && !w->parts[part].memory ? find_entry(w, part, false) : NULL;
        if (e && e->taken) {
                r = give_entry(w, e);
                if (r < 0)
                        w->error = r;
        }
        fetch_ahead(w);
}

/* Everything is given, the ring empty, nothing in flight. */
static int settle(DeviceWeights *w) {
        uint32_t order = w->config.first_event + EVENT_ORDER;
        int r = 0;

        for (uint32_t i = 0; r >= 0 && i < w->resident; i++) {
                Part *p = w->parts + i;

                if (p->fetched && !p->waited)
                        r = w->config.ops->wait(w->config.context, LK_COMPUTE, p->ready);
                p->waited = p->fetched;
        }
        if (r >= 0 && (w->in_flight > 0 || w->cut_off)) { /* no copy comes late into memory that is somebody else's then */
                r = w->config.ops->mark(w->config.context, LK_COPY, order);
                if (r >= 0)
                        r = w->config.ops->wait(w->config.context, LK_COMPUTE, order);
        }
        if (r >= 0 && w->n_entries > 0) {
                r = w->config.ops->mark(w->config.context, LK_COMPUTE, order);
                if (r >= 0)
                        r = w->config.ops->wait(w->config.context, LK_COPY, order);
        }
        w->n_entries = 0;
        w->in_flight = 0;
        w->cut_off = false;
        w->error = 0;
        return r;
}

int device_weights_begin(DeviceWeights *w, const uint32_t *order, uint32_t n) {
        CLEANUP_FREE uint32_t *copy = NULL;
        int r;

        for (uint32_t i = 0; i < n; i++)
                if (order[i] >= w->n_parts)
                        return -EINVAL;
        copy = malloc((n > 0 ? n : 1) * sizeof(*copy));
        if (!copy)
                return -ENOMEM;
        if (n > 0)
                memcpy(copy, order, n * sizeof(*copy));
        r = settle(w);
        if (r < 0)
                return r;
        free(w->order);
        w->order = STEAL_PTR(copy);
        w->n_order = n;
        w->at = w->ahead = 0;
        return 0;
}

/* The ring for parts that never stay, of which one is used at a time. */
static uint64_t ring_of_passing(const DeviceWeights *w) {
        uint64_t largest = 0;

        for (uint32_t i = w->n_staying; i < w->n_parts; i++)
                largest = w->parts[i].size > largest ? w->parts[i].size : largest;
        return align(largest);
}

/* The ring if some that could stay pass, too. Two of them that follow each other may be in use at a time: the second
 * finds room if it fits twice beside the first, wherever that lies. One and a half times the largest pair is what
 * copying ahead needs. */
static uint64_t ring_of_all(const DeviceWeights *w) {
        uint64_t least = ring_of_passing(w);

        for (uint32_t i = 0; i < w->n_staying; i++) {
                uint64_t a = align(w->parts[i].size), b = align(w->parts[(i + 1) % w->n_staying].size);
                uint64_t fits = a + 2 * b, ahead = align((a + b) / 2 * 3);

                if (w->config.one_at_a_time) /* one is copied while the other is in use */
                        fits = ahead = a + b;
                least = fits > least ? fits : least;
                least = ahead > least ? ahead : least;
        }
        return least;
}

/* Where even that is too much. */
static uint64_t ring_of_one(const DeviceWeights *w) {
        uint64_t largest = 1;

        if (!w->config.one_at_a_time)
                return ring_of_all(w);
        for (uint32_t i = 0; i < w->n_parts; i++)
                largest = w->parts[i].size > largest ? w->parts[i].size : largest;
        return align(largest);
}

static uint64_t part_size(const Part *p, bool wide) {
        return align(wide ? p->wide_size : p->size);
}

static uint64_t staying_bytes(const DeviceWeights *w, uint32_t n, bool wide) {
        uint64_t sum = 0;

        for (uint32_t i = 0; i < n; i++)
                sum += part_size(w->parts + i, wide);
        return sum;
}

/* Of device memory now. */
static uint64_t held_bytes(const DeviceWeights *w) {
        return staying_bytes(w, w->resident, w->wide) + w->ring_bytes;
}

typedef struct Plan {
        uint32_t n; /* stay */
        bool wide;
        uint64_t ring;
} Plan;

/* If some of what could stay comes through it. */
static uint64_t ring_of_some(const DeviceWeights *w) {
        return w->config.ring_bytes ? w->config.ring_bytes : ring_of_all(w);
}

/* What stays within the budget, and the ring beside it. False: not even the ring fits. Wide if all of it fits so, but
 * what stays as it is is not fetched again for that. ret->ring is set in any case. */
static bool plan(const DeviceWeights *w, uint64_t budget, Plan *ret) {
        uint64_t all = ring_of_some(w), sum = 0;
        uint64_t passing = w->config.ring_bytes ? w->config.ring_bytes : ring_of_passing(w);
        uint32_t n = 0;

        if (w->n_expanding > 0 && (w->wide || w->resident == 0) &&
                staying_bytes(w, w->n_staying, true) + ring_of_some(w) <= budget) {
                *ret = (Plan){w->n_staying, true, ring_of_some(w)};
                return true;
        }
        if (staying_bytes(w, w->n_staying, false) + passing <= budget) {
                *ret = (Plan){w->n_staying, false, passing};
                return true;
        }
        if (all > budget && w->config.ring_bytes == 0)
                all = ring_of_one(w);
        *ret = (Plan){.ring = all};
        if (all > budget)
                return false;
        while (n < w->n_staying && sum + part_size(w->parts + n, false) <= budget - all)
                sum += part_size(w->parts + n++, false);
        ret->n = n;
        return true;
}

static void drop_resident(DeviceWeights *w, uint32_t n) {
        while (w->resident > n) {
                Part *p = w->parts + --w->resident;

                w->config.ops->memory_free(w->config.context, p->memory);
                p->memory = NULL;
                p->fetched = p->waited = false;
        }
}

static void drop_ring(DeviceWeights *w) {
        if (w->ring)
                w->config.ops->memory_free(w->config.context, w->ring);
        w->ring = NULL;
        w->ring_bytes = 0;
}

static int take_ring(DeviceWeights *w, uint64_t bytes) {
        void *p;
        int r;

        if (w->ring_bytes == bytes)
                return 0;
        r = w->config.ops->memory_new(w->config.context, bytes, &p);
        if (r < 0)
                return r;
        w->ring = p;
        w->ring_bytes = bytes;
        return 0;
}

/* What a plan says, or as much of it as the device has. */
static int take_memory(DeviceWeights *w, const Plan *p) {
        uint32_t keep = p->wide == w->wide ? p->n : 0;
        bool drops_ring = w->ring && w->ring_bytes != p->ring, drops = drops_ring || w->resident > keep;
        int r;

        drop_resident(w, keep);
        w->wide = p->wide;
        if (drops_ring)
                drop_ring(w);
        if (drops) /* a context keeps what is freed: not beside what comes now */
                w->config.ops->memory_trim(w->config.context);
        r = take_ring(w, p->ring);
        while (r >= 0 && w->resident < p->n) {
                Part *part = w->parts + w->resident;
                uint64_t size = part_size(part, w->wide);
                void *memory;

                r = w->config.ops->memory_new(w->config.context, size > 0 ? size : 1, &memory);
                if (r < 0)
                        break;
                part->memory = memory;
                w->resident++;
        }
        return r;
}

int device_weights_plan(DeviceWeights *w, uint64_t budget, bool grow, uint64_t *ret_least) {
        uint64_t have = held_bytes(w);
        Plan p;
        int r;

        r = settle(w);
        if (r < 0)
                return r;
        if (!plan(w, budget, &p)) {
                *ret_least = p.ring;
                return -ENOSPC;
        }
        if (!grow && have > 0 && have <= budget && w->resident < p.n)
                return 0;

        for (;;) {
                r = take_memory(w, &p);
                if (r != -ENOMEM || p.n == 0)
                        return r;
                /* The device has less than it was told: of that, what it gave. */
                budget = staying_bytes(w, w->resident < p.n ? w->resident : p.n - 1, w->wide) + p.ring;
                if (!plan(w, budget, &p))
                        return -ENOMEM;
        }
}

int device_weights_shrink(DeviceWeights *w, uint64_t bytes) {
        uint64_t have = held_bytes(w), least;
        int r;

        if (w->resident == 0 || bytes >= have)
                return -ENOMEM;
        r = device_weights_plan(w, have - bytes, false, &least);
        w->config.ops->memory_trim(w->config.context);
        return r == -ENOSPC ? -ENOMEM : r;
}

void device_weights_release(DeviceWeights *w) {
        (void) settle(w);
        drop_resident(w, 0);
        drop_ring(w);
        w->config.ops->memory_trim(w->config.context);
}

void device_weights_state(const DeviceWeights *w, DeviceWeightsState *ret) {
        *ret = (DeviceWeightsState){
                .parts = w->n_staying,
                .resident = w->resident,
                .wide = w->wide && w->resident > 0,
                .bytes = held_bytes(w),
                .ring_bytes = w->ring_bytes,
                .all_bytes = staying_bytes(w, w->n_staying, false) + ring_of_passing(w),
                .wide_bytes = w->n_expanding > 0 ? staying_bytes(w, w->n_staying, true) + ring_of_some(w) : 0,
                .fetched_bytes = w->fetched_bytes,
        };
}
