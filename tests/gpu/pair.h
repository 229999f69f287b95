/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Bytes that are the same for both backends before an operation, and must be after it. */

#include <stdlib.h>

#include "tests/gpu/backends.h"

#define PAIR_GUARD 32u /* bytes behind, zeros: an operation that writes there fails */

typedef struct Pair {
        uint8_t *host, *device;
        uint64_t size; /* with the guard */
} Pair;

/* The host's bytes to the device. */
static inline void pair_sync(const Pair *p) {
        assert_int_equal(lk_cuda_ops()->upload(gpu, p->device, p->host, p->size), 0);
}

/* Zeros. */
static inline Pair pair_new(uint64_t size) {
        Pair p = {.size = size + PAIR_GUARD};
        void *device;

        p.host = calloc(1, p.size);
        assert_non_null(p.host);
        assert_int_equal(lk_cuda_ops()->memory_new(gpu, p.size, &device), 0);
        p.device = device;
        pair_sync(&p);
        return p;
}

static inline void pair_free(Pair *p) {
        lk_cuda_ops()->memory_free(gpu, p->device);
        free(p->host);
}

/* The device's bytes; the caller frees them. */
static inline uint8_t *pair_downloaded(const Pair *p) {
        uint8_t *got = malloc(p->size);

        assert_non_null(got);
        assert_int_equal(lk_cuda_ops()->download(gpu, got, p->device, p->size), 0);
        return got;
}

static inline void assert_pair_same(const Pair *p, const char *what) {
        uint8_t *got = pair_downloaded(p);

        for (uint64_t i = 0; i < p->size; i++)
                if (got[i] != p->host[i])
                        fail_msg("%s: byte %llu of %llu differs", what, (unsigned long long) i, (unsigned long long) p->size);
        free(got);
}
