/* SPDX-License-Identifier: Apache-2.0 */
#include "service/latentd/region.h"

#include <stddef.h>
#include <string.h>
#include <sys/mman.h>

#include "service/shared/cleanup.h"
#include "service/shared/crc32c.h"
#include "service/shared/memfd.h"

DEFINE_CLEANUP(Region *, region_free)

/* The kernel holds the lock of the whole address space while it unmaps or locks: in steps, so that the loop
 * gets its turn. */
#define STEP_BYTES (UINT64_C(16) << 20)

_Static_assert(sizeof(RegionTrailer) <= REGION_BLOCK, "the trailer is one page");

static uint64_t round_up(uint64_t n) {
        return (n + REGION_BLOCK - 1) / REGION_BLOCK * REGION_BLOCK;
}

static uint64_t crc_count(uint64_t data_bytes) {
        return (data_bytes + REGION_CRC_BLOCK - 1) / REGION_CRC_BLOCK;
}

uint64_t region_data_bytes(uint64_t file_size) {
        /* A quarter of what a file may have: nothing below can overflow. */
        if (file_size == 0 || file_size > INT64_MAX / 4)
                return 0;

        return round_up(file_size);
}

uint64_t region_memory_bytes(uint64_t file_size) {
        uint64_t data = region_data_bytes(file_size);

        return data == 0 ? 0 : data + REGION_BLOCK + round_up(crc_count(data) * sizeof(uint32_t));
}

int region_new(uint64_t id, const FileIdentity *identity, const NumaPolicy *policy, Region **ret) {
        CLEANUP(region_freep) Region *r = NULL;
        int k;

        r = calloc(1, sizeof(*r));
        if (!r)
                return -ENOMEM;

        r->fd = -EBADF;
        r->id = id;
        r->state = REGION_LOADING;
        r->identity = *identity;
        r->policy = *policy;
        r->size = region_memory_bytes(identity->size);
        if (r->size == 0)
                return -EFBIG;

        k = memfd_new("latentd-region", r->size, &r->fd);
        if (k < 0)
                return k;
        k = memfd_map(r->fd, r->size, PROT_READ | PROT_WRITE, &r->map);
        if (k < 0)
                return k;

        /* Both before the first page is there: later they would change nothing. */
        (void) madvise(r->map, r->size, MADV_HUGEPAGE);
        r->numa_error = numa_policy_apply(policy, r->map, r->size);

        *ret = STEAL_PTR(r);
        return 0;
}

Region *region_free(Region *r) {
        if (!r)
                return NULL;

        for (uint64_t at = 0; r->map && at < r->size; at += STEP_BYTES)
                (void) munmap((char *) r->map + at, r->size - at < STEP_BYTES ? r->size - at : STEP_BYTES);
        if (r->fd >= 0)
                (void) close(r->fd);
        free(r);
        return NULL;
}

int region_lock(const Region *r) {
        for (uint64_t at = 0; at < r->size; at += STEP_BYTES)
                if (mlock((char *) r->map + at, r->size - at < STEP_BYTES ? r->size - at : STEP_BYTES) < 0) {
                        int k = -errno;

                        if (at > 0)
                                (void) munlock(r->map, at);
                        return k;
                }

        return 0;
}

int region_populate(Region *r, uint64_t begin, uint64_t end) {
        return memory_populate((char *) r->map + begin, end - begin);
}

static RegionTrailer *trailer(const Region *r) {
        return (RegionTrailer *) ((char *) r->map + region_data_bytes(r->identity.size));
}

static uint32_t *crc_table(const Region *r) {
        return (uint32_t *) ((char *) trailer(r) + REGION_BLOCK);
}

const RegionTrailer *region_trailer(const Region *r) {
        return trailer(r);
}

const uint32_t *region_crc_table(const Region *r) {
        return crc_table(r);
}

void region_checksum(Region *r, uint64_t begin, uint64_t end) {
        uint64_t data = region_data_bytes(r->identity.size);
        char *map = r->map;

        if (end == data) /* the read of the last block may have left anything there */
                memset(map + r->identity.size, 0, data - r->identity.size);

        for (uint64_t at = begin; at < end; at += REGION_CRC_BLOCK)
                crc_table(r)[at / REGION_CRC_BLOCK] =
                        crc32c(0, map + at, end - at < REGION_CRC_BLOCK ? end - at : REGION_CRC_BLOCK);
}

void region_write_trailer(Region *r) {
        RegionTrailer *t = trailer(r);

        t->magic = REGION_MAGIC;
        t->layout_version = 1;
        t->numa_kind = r->policy.kind;
        t->numa_node = r->policy.kind == NUMA_BIND ? r->policy.node : -1;
        t->crc_block = REGION_CRC_BLOCK;
        t->identity = r->identity;
        t->data_bytes = region_data_bytes(r->identity.size);
        t->crc_offset = t->data_bytes + REGION_BLOCK;
        t->crc_count = crc_count(t->data_bytes);
        atomic_store_explicit(&t->complete, REGION_MAGIC, memory_order_release);
}
