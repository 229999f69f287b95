/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The weight cache: all regions by (file identity, NUMA policy), one copy whoever asks. Loop thread only;
 * the work runs on the loader thread and the pool. */

#include <systemd/sd-event.h>

#include "service/latentd/config.h"
#include "service/latentd/fd-store.h"
#include "service/latentd/file-jobs.h"
#include "service/latentd/pool.h"
#include "service/latentd/region.h"
#include "service/shared/fault.h"

typedef struct Store Store;
typedef struct StoreRequest StoreRequest;
typedef struct StoreCheck StoreCheck;

/* On the loop, exactly once per request unless it is cancelled. r == 0: region is complete and the caller
 * owns one reference (store_region_unref); bytes_read says what this request had to read (0: it was there).
 * r < 0: fault says why. */
typedef void (*StoreDone)(void *userdata, int r, Region *region, uint64_t bytes_read, const Fault *f);

int store_new(sd_event *event, Pool *pool, const Config *config, Store **ret);
/* Calls no done function any more. Before pool_free(), which gives the memory back. Regions go even if
 * references are left. */
Store *store_free(Store *s);

/* From now on complete regions are given to the service manager, in whose hands they stay when this process ends. First of
 * all what an earlier process left there is adopted, without reading a file; what is no complete region of ours is
 * removed. Then unused regions are freed until CacheRamReserve= is free. fds stays the caller's. */
void store_adopt(Store *s, FdStore *fds);

/* Asks for the bytes of an open regular file. fd is duplicated. name is for messages only ("file" in
 * faults). Steps: identity; hit or join a running load; else the header of a .safetensors file is checked
 * before any allocation, admission, populate, read, checksum, identity again. Answers arguments at once
 * (-EINVAL, InvalidFile for what is not a regular file on a local file system in our own mount table;
 * -ENOMEM), everything else through done, never from inside this call. */
int store_get(Store *s, int fd, const char *name, const NumaPolicy *policy, StoreDone done, void *userdata,
        StoreRequest **ret, Fault *f);

/* Only looks whether the file is one that store_get() would read: identity and header against its size. done gets no region. */
int store_look(Store *s, int fd, const char *name, StoreDone done, void *userdata, StoreRequest **ret, Fault *f);

/* No done call will come. A load that nobody waits for any more is stopped and its memory freed. NULL is
 * fine. */
StoreRequest *store_request_cancel(StoreRequest *r);
/* Bytes read and to read so far, for progress. */
void store_request_progress(const StoreRequest *r, uint64_t *ret_done, uint64_t *ret_total);

/* On the loop, exactly once unless cancelled. sound: the region's bytes are what was loaded; else it is out of the cache
 * (REGION_DAMAGED), and goes with its last user. */
typedef void (*StoreChecked)(void *userdata, Region *region, bool sound);

/* Verifies the checksums of a region that the caller has a reference to, on the pool; several callers share the work, and
 * a region that needs no check is answered too. done is never called from inside. store_get() checks by itself. */
int store_check(Store *s, Region *r, StoreChecked done, void *userdata, StoreCheck **ret);
StoreCheck *store_check_cancel(StoreCheck *c); /* NULL is fine */
/* The regions that this worker had may have been written to: their checksums are verified before they are used again. */
void store_distrust(Store *s, uint64_t worker_epoch);

/* It is being used: also for those who come after this process. */
void store_region_touch(Region *r);
Region *store_region_ref(Region *r);
void store_region_unref(Store *s, Region *r); /* the region stays in the cache until evicted */

/* Frees regions without users (not kept ones), those with the most ease first, of these the least recently used, until `bytes`
 * are freed or none is left. Returns bytes. The memory itself goes on the pool. */
uint64_t store_evict(Store *s, uint64_t bytes);
/* How many bytes the cache should give back for CacheRamReserve= and CacheRamMax= to hold; 0 if they do. */
uint64_t store_excess(Store *s);
/* Drops this region now if it is complete and has no users, kept or not. Bytes freed or 0. */
uint64_t store_drop(Store *s, Region *r);

Region *store_first(Store *s);             /* iterate by ->next */
uint64_t store_bytes(const Store *s);      /* of memory held, loads and dead regions included */
uint64_t store_leaving(const Store *s);    /* of these, on their way out */
uint64_t store_bytes_read(const Store *s); /* since start */
uint64_t store_bytes_adopted(const Store *s);
int store_ring_error(const Store *s);      /* 0, or why files are read without io_uring (negative errno) */
FileJobs *store_file_jobs(Store *s);
unsigned store_stuck(const Store *s);     /* reads that were given up and have not come back: each holds descriptors, perhaps memory */
uint64_t store_promised(const Store *s); /* bytes that running loads will still take: not free for others */

/* What arenas and merged weights hold, for CacheRamMax=: to be told after each change. */
void store_set_other_bytes(Store *s, uint64_t bytes);
