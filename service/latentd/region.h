/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* A weight region: one memfd with the bytes of one file at their own offsets, padded to REGION_BLOCK,
 * followed by a trailer: one header page (RegionTrailer) and the CRC-32C of each MiB of the padded data;
 * `complete` is written last. Describes itself: no manifest. */

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "service/shared/numa-policy.h"

#define REGION_BLOCK 4096u
#define REGION_CRC_BLOCK (1u << 20)
#define REGION_NODES_MAX 8
#define REGION_MAGIC UINT64_C(0x31304e4f49474552) /* "REGION01" */

/* Names a file's content as well as can be: an owner may restore mtime, not ctime. */
typedef struct FileIdentity {
        uint64_t device, inode, size;
        int64_t mtime_sec, mtime_nsec, ctime_sec, ctime_nsec;
} FileIdentity;

typedef struct RegionTrailer {
        uint64_t magic;
        uint32_t layout_version; /* 1 */
        uint32_t numa_kind;
        int32_t numa_node;
        uint32_t crc_block; /* 1 MiB */
        FileIdentity identity;
        uint64_t data_bytes; /* file size rounded up to REGION_BLOCK */
        uint64_t crc_offset, crc_count;
        _Atomic uint64_t complete; /* REGION_MAGIC once everything else is there */
        uint64_t last_used_usec;   /* CLOCK_MONOTONIC; not checked: it only orders evictions after a restart */
} RegionTrailer;

/* "w-" and 16 hexadecimal digits: the region's name in the service manager's store, made of identity and policy. */
#define REGION_NAME_MAX 19

typedef enum RegionState {
        REGION_LOADING,
        REGION_COMPLETE,
        REGION_DEAD,    /* failed, or may still be written to by a late read: never used again */
        REGION_DAMAGED, /* failed its checksums: nobody new gets it, it goes with its last user */
} RegionState;

typedef struct Region {
        unsigned n_ref; /* users: models. The store itself holds no reference */
        uint64_t id;
        RegionState state;
        FileIdentity identity;
        NumaPolicy policy;
        int fd;
        uint64_t size;                    /* of the memfd */
        void *map;                        /* the broker's own mapping, while it has one */
        uint64_t populated, read;         /* bytes so far: of the memfd, of the file */
        uint64_t populate_usec, crc_usec; /* summed over the threads that did it */
        uint64_t read_usec;
        uint64_t huge_bytes; /* all of it or nothing: whether most of it is huge pages */
        uint64_t locked_bytes, node_bytes[REGION_NODES_MAX];
        int numa_error, lock_error; /* 0 or negative errno */
        bool keep;                  /* Model.Pin */
        uint32_t ease;              /* model_ease() of the model that had it last: regions with more of it are evicted first */
        bool adopted;               /* from an earlier run of the service: never locked or measured by this one */
        bool unverified;            /* its checksums are to be verified before it is used */
        bool stored;                /* the service manager holds it too */
        uint64_t worker_epoch;      /* of the last worker that got it; 0: none */
        uint64_t last_used_usec;    /* CLOCK_MONOTONIC */
        struct Region *next;        /* store's list */
} Region;

/* Sizes for a file of file_size bytes, which is checked to be > 0. 0 if it is 0 or too large to add up. */
uint64_t region_data_bytes(uint64_t file_size);
uint64_t region_memory_bytes(uint64_t file_size);

/* memfd, mapping and policy; takes no memory yet, so that the loop may do it. policy is applied at best.
 * state is LOADING. */
int region_new(uint64_t id, const FileIdentity *identity, const NumaPolicy *policy, Region **ret);
/* Takes over what an earlier run of the service left with the service manager under this name: a region that this
 * program could have made, complete, for this name. Nothing of fd is mapped before that is sure, and its content
 * is not verified. fd is taken over on success. -EINVAL: something else, *ret_why says what. Maps, but touches no
 * page of it: the loop may do it. */
int region_adopt(uint64_t id, int fd, const char *name, Region **ret, const char **ret_why);
void region_store_name(const FileIdentity *identity, const NumaPolicy *policy, char ret[static REGION_NAME_MAX]);

/* Unmaps and closes: in proportion to size, pool threads only. */
Region *region_free(Region *r);
/* The same for one that nobody needs any more, the service manager neither: its memory is free even if somebody still holds or maps it,
 * who finds zeros. */
Region *region_scrap(Region *r);

/* Locks all pages, or none and a negative errno. Pool threads. */
int region_lock(const Region *r);

/* The next three write only to the region's memory; pool threads. begin is a multiple of REGION_CRC_BLOCK;
 * end too, or data_bytes. */
int region_populate(Region *r, uint64_t begin, uint64_t end); /* end: of the memfd */
void region_checksum(Region *r, uint64_t begin,
        uint64_t end);                /* zeroes what lies behind the end of the file, then the table */
void region_write_trailer(Region *r); /* `complete` last */
/* Whether the bytes, or the trailer, are what region_checksum() and region_write_trailer() left. -EBADMSG if not. */
int region_verify(const Region *r, uint64_t begin, uint64_t end);
int region_verify_trailer(const Region *r);
/* Of a complete region that was verified: a hash over the name, the size and the checksums of its bytes, going on from h. Not over
 * where it lies, when it was written or which run of the service read it: a file that was touched or unlinked is the same. The pages
 * of its table are touched. */
#define REGION_HASH_BEGIN UINT64_C(0xcbf29ce484222325)
uint64_t region_hash(const Region *r, const char *name, uint64_t h);
void region_set_last_used(Region *r); /* to the trailer; not while that is written or verified on the pool */

const RegionTrailer *region_trailer(const Region *r);
const uint32_t *region_crc_table(const Region *r);
