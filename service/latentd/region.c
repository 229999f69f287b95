/* SPDX-License-Identifier: Apache-2.0 */
#include "service/latentd/region.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>

#include "service/shared/cleanup.h"
#include "service/shared/crc32c.h"
#include "service/shared/memfd.h"

DEFINE_CLEANUP(Region *, region_free)

/* The kernel holds the lock of the whole address space while it unmaps or locks: in steps, so that the loop
 * gets its turn. */
#define STEP_BYTES (UINT64_C(16) << 20)

/* Of memory that goes back for good, some half a millisecond of the kernel's work: with as long a pause behind each, whoever shares the
 * processor is not kept waiting for longer. */
#define SCRAP_BYTES (UINT64_C(2) << 20)
#define REST_MAX_NSEC 2000000

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

/* As long as it has worked since then, by its own clock. */
static void rest(const struct timespec *since) {
        struct timespec t;

        (void) clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
        t.tv_nsec -= since->tv_nsec;
        if (t.tv_sec == since->tv_sec && t.tv_nsec > 0 && t.tv_nsec < REST_MAX_NSEC)
                (void) nanosleep(&(struct timespec){ .tv_nsec = t.tv_nsec }, NULL);
}

Region *region_scrap(Region *r) {
        uint64_t at = r->size, begin;
        struct timespec t;

        /* From the end: without its trailer nobody takes what is left for a region. */
        for (; at > 0; at = begin) {
                begin = (at - 1) / SCRAP_BYTES * SCRAP_BYTES;
                (void) clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
                if (r->map)
                        (void) munmap((char *) r->map + begin, at - begin);
                if (r->fd >= 0)
                        (void) fallocate(r->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t) begin,
                                (off_t) (at - begin)); /* else it goes when all have closed it */
                rest(&t);
        }
        r->map = NULL;
        return region_free(r);
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

static void fill_trailer(const Region *r, RegionTrailer *t) {
        t->magic = REGION_MAGIC;
        t->layout_version = 1;
        t->numa_kind = r->policy.kind;
        t->numa_node = r->policy.kind == NUMA_BIND ? r->policy.node : -1;
        t->crc_block = REGION_CRC_BLOCK;
        t->identity = r->identity;
        t->data_bytes = region_data_bytes(r->identity.size);
        t->crc_offset = t->data_bytes + REGION_BLOCK;
        t->crc_count = crc_count(t->data_bytes);
}

void region_write_trailer(Region *r) {
        RegionTrailer *t = trailer(r);

        fill_trailer(r, t);
        atomic_store_explicit(&t->complete, REGION_MAGIC, memory_order_release);
}

int region_verify(const Region *r, uint64_t begin, uint64_t end) {
        const char *map = r->map;

        for (uint64_t at = begin; at < end; at += REGION_CRC_BLOCK)
                if (crc_table(r)[at / REGION_CRC_BLOCK] !=
                        crc32c(0, map + at, end - at < REGION_CRC_BLOCK ? end - at : REGION_CRC_BLOCK))
                        return -EBADMSG;

        return 0;
}

void region_set_last_used(Region *r) {
        trailer(r)->last_used_usec = r->last_used_usec;
}

static bool same_trailer(const RegionTrailer *a, const RegionTrailer *b) {
        return memcmp(a, b, offsetof(RegionTrailer, last_used_usec)) == 0;
}

int region_verify_trailer(const Region *r) {
        RegionTrailer t = {.complete = REGION_MAGIC};

        fill_trailer(r, &t);
        return same_trailer(&t, trailer(r)) ? 0 : -EBADMSG;
}

/* ---- taking over ---- */

static uint64_t hash(uint64_t h, uint64_t v) {
        for (unsigned i = 0; i < 8; i++) { /* FNV-1a */
                h ^= v >> (8 * i) & 0xff;
                h *= UINT64_C(0x100000001b3);
        }
        return h;
}

uint64_t region_hash(const Region *r, const char *name, uint64_t h) {
        const uint32_t *table = crc_table(r);
        uint64_t n = crc_count(region_data_bytes(r->identity.size));
        size_t length = strlen(name);

        h = hash(h, length);
        for (size_t i = 0; i < length; i++)
                h = hash(h, (unsigned char) name[i]);
        h = hash(h, r->identity.size);
        for (uint64_t i = 0; i < n; i++)
                h = hash(h, table[i]);
        return h;
}

void region_store_name(const FileIdentity *i, const NumaPolicy *policy, char ret[static REGION_NAME_MAX]) {
        const uint64_t values[] = {
                i->device,
                i->inode,
                i->size,
                (uint64_t) i->mtime_sec,
                (uint64_t) i->mtime_nsec,
                (uint64_t) i->ctime_sec,
                (uint64_t) i->ctime_nsec,
                (uint64_t) policy->kind,
                policy->kind == NUMA_BIND ? (uint64_t) policy->node : 0,
        };
        uint64_t h = REGION_HASH_BEGIN;

        for (size_t k = 0; k < ELEMENTSOF(values); k++)
                h = hash(h, values[k]);
        (void) snprintf(ret, REGION_NAME_MAX, "w-%016" PRIx64, h);
}

/* Where the trailer of a memfd of this size would be; 0: no region has this size. */
static uint64_t trailer_offset(uint64_t size) {
        /* data + one block + one block for each 1024 checksums of a MiB */
        const uint64_t data_per_block = REGION_BLOCK / sizeof(uint32_t) * REGION_CRC_BLOCK;
        uint64_t blocks, data;

        if (size < 3 * (uint64_t) REGION_BLOCK || size > INT64_MAX / 4 || size % REGION_BLOCK != 0)
                return 0;

        size -= REGION_BLOCK;
        blocks = (size + data_per_block + REGION_BLOCK - 1) / (data_per_block + REGION_BLOCK);
        data = size - blocks * REGION_BLOCK;
        return region_memory_bytes(data) == size + REGION_BLOCK ? data : 0;
}

static const char *check_object(int fd, uint64_t *ret_size) {
        const int seals = F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW, writes = F_SEAL_WRITE | F_SEAL_FUTURE_WRITE;
        struct stat st;
        int have;

        if (fstat(fd, &st) < 0 || st.st_size <= 0 || memfd_check(fd, (uint64_t) st.st_size) < 0)
                return "it is no memory object that is sealed against resizing";
        if ((fcntl(fd, F_GETFL) & O_ACCMODE) != O_RDWR || st.st_uid != geteuid() || (st.st_mode & 0777) != 0600)
                return "it is not ours alone to write";
        have = fcntl(fd, F_GET_SEALS);
        if (have < 0 || (have & seals) != seals || (have & writes) != 0)
                return "it has other seals";

        *ret_size = (uint64_t) st.st_size;
        return NULL;
}

/* Reads the trailer without mapping anything. */
static const char *read_trailer(int fd, uint64_t size, Region *ret) {
        RegionTrailer t, want = {.complete = REGION_MAGIC};
        uint64_t at = trailer_offset(size);

        if (at == 0 || pread(fd, &t, sizeof(t), (off_t) at) != (ssize_t) sizeof(t))
                return "its size is not that of a region";
        if (t.magic != REGION_MAGIC)
                return "it is no region";
        if (t.layout_version != 1)
                return "it is of another version";
        if (t.complete != REGION_MAGIC)
                return "it is not complete";
        if (t.numa_kind > NUMA_BIND || region_data_bytes(t.identity.size) != at)
                return "its trailer does not fit its size";

        *ret = (Region){
                .identity = t.identity,
                .policy = {.kind = (NumaKind) t.numa_kind, .node = t.numa_kind == NUMA_BIND ? t.numa_node : 0},
                .last_used_usec = t.last_used_usec,
                .size = size,
        };
        fill_trailer(ret, &want);
        return same_trailer(&t, &want) ? NULL : "its trailer does not fit its size";
}

int region_adopt(uint64_t id, int fd, const char *name, Region **ret, const char **ret_why) {
        CLEANUP_FREE Region *r = NULL;
        char expected[REGION_NAME_MAX];
        uint64_t size = 0;
        Region found;
        int k;

        *ret_why = check_object(fd, &size);
        if (!*ret_why)
                *ret_why = read_trailer(fd, size, &found);
        if (*ret_why)
                return -EINVAL;

        region_store_name(&found.identity, &found.policy, expected);
        if (strcmp(expected, name) != 0) {
                *ret_why = "its name is that of another region";
                return -EINVAL;
        }

        *ret_why = "there is no memory for it";
        r = malloc(sizeof(*r));
        if (!r)
                return -ENOMEM;

        *r = found;
        r->id = id;
        r->fd = fd;
        r->state = REGION_COMPLETE;
        r->populated = size;
        r->adopted = r->unverified = r->stored = true;
        k = memfd_map(fd, size, PROT_READ | PROT_WRITE, &r->map);
        if (k < 0)
                return k;

        *ret_why = NULL;
        *ret = STEAL_PTR(r);
        return 0;
}
