/* SPDX-License-Identifier: Apache-2.0 */
/* Through memory of the worker: one copy in by the sender, one copy out by each receiver, each with its own device. No rank
 * sees another's memory. Where memory is a device's, exchange-staged.c does it beside the computation. */

#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "service/worker/exchange-private.h"

#define PLACE_ALIGN UINT64_C(64)

typedef struct Staging {
        uint8_t *memory;
        uint64_t size;
} Staging;

static uint64_t place_bytes(uint64_t size) {
        return (size + PLACE_ALIGN - 1) / PLACE_ALIGN * PLACE_ALIGN;
}

uint64_t exchange_host_memory(const H3Plan *p, ExchangeSize size) {
        uint64_t sum = 0;

        for (size_t i = 0; i < exchange_places(p); i++) {
                const H3Message m = exchange_message_of(p, i);

                sum += place_bytes(size.func(size.userdata, &m));
        }
        return sum;
}

static int make(Exchange *e) {
        Staging *s = calloc(1, sizeof(*s));
        void *memory;

        if (!s)
                return -ENOMEM;
        e->own = s;
        for (size_t i = 0; i < exchange_places(e->plan); i++) {
                e->places[i].offset = s->size;
                s->size += place_bytes(e->places[i].size);
        }
        if (s->size == 0)
                return 0;
        memory = mmap(NULL, s->size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED)
                return -errno;
        s->memory = memory;
        return 0;
}

static void unmake(Exchange *e) {
        Staging *s = e->own;

        if (s && s->memory)
                (void) munmap(s->memory, s->size);
        free(s);
}

static int copy(const H3Rank *rank, const H3View *v, uint8_t *bytes, bool in) {
        bool dense = v->stride == v->width;
        uint64_t rows = dense ? 1 : v->rows, width = dense ? v->rows * v->width : v->width;
        int r = 0;

        for (uint64_t i = 0; r >= 0 && i < rows; i++) {
                uint8_t *device = (uint8_t *) v->data + i * v->stride, *host = bytes + i * width;

                r = in ? rank->ops->download(rank->context, host, device, width)
                       : rank->ops->upload(rank->context, device, host, width);
        }
        return r;
}

int exchange_host_copy(const H3Rank *rank, const H3View *views, uint32_t n, uint8_t *bytes, bool in) {
        int r = 0;

        for (uint32_t i = 0; r >= 0 && i < n; i++) {
                r = copy(rank, views + i, bytes, in);
                bytes += views[i].rows * views[i].width;
        }
        return r;
}

static int put(Exchange *e, const H3Rank *rank, const Place *p, const H3Message *m, const H3View *views, uint32_t n,
        uint8_t **ret_bytes) {
        const Staging *s = e->own;

        *ret_bytes = s->memory + p->offset;
        return exchange_host_copy(rank, views, n, *ret_bytes, true);
}

static int get(Exchange *e, const H3Rank *rank, const Place *p, const H3Message *m, const H3View *views, uint32_t n) {
        const Staging *s = e->own;

        return exchange_host_copy(rank, views, n, s->memory + p->offset, false);
}

const Transport exchange_host = {
        .make = make,
        .unmake = unmake,
        .put = put,
        .get = get,
};
