/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* What store.c (requests, regions, memory) and load.c (the loads) share. Loop thread only, except for what a
 * field says. */

#include <stdatomic.h>
#include <sys/queue.h>

#include "service/latentd/file-jobs.h"
#include "service/latentd/file-source.h"
#include "service/latentd/loader.h"
#include "service/latentd/store.h"

typedef struct Load Load;
typedef struct Check Check;
typedef TAILQ_HEAD(StoreRequestList, StoreRequest) StoreRequestList;

struct StoreRequest {
        Store *store;
        char *name;
        int fd;
        NumaPolicy policy;
        StoreDone done;
        void *userdata;
        FileIdentity identity;           /* written on the pool, read after that job's done */
        bool look;                       /* store_look(): that job reads the header, too, and then it ends */
        Fault fault;                     /* likewise written there */
        bool cancelled;                  /* while that job runs */
        Load *load;                      /* joined */
        StoreCheck *check;               /* of the region that it hit */
        uint64_t device;                 /* its file system's number */
        bool stuck;                      /* its job does not end: the answer was given */
        TAILQ_ENTRY(StoreRequest) entry; /* in the store's `identifying` or `stuck_requests`, or the load's list */
};

struct Store {
        sd_event *event;
        Pool *pool;
        const Config *config;
        Loader *loader;
        FileJobs *file_jobs;
        const char *root;     /* of proc and sys; "" but for tests */
        const FileIo *io;     /* the system's but for tests */
        uint64_t piece_bytes; /* memory is admitted, populated and read in such pieces; a multiple of
                                 REGION_CRC_BLOCK */
        sd_event_source *retry_source;
        FdStore *fds; /* NULL: none */

        Region *regions;
        uint64_t regions_max; /* half of the descriptors this process may have */
        TAILQ_HEAD(, Load) loads;
        TAILQ_HEAD(, Check) checks;
        StoreRequestList identifying, stuck_requests;
        TAILQ_HEAD(, Load) stuck_loads; /* given up, but a read or a job of theirs has not ended */
        uint64_t next_id, bytes_read, bytes_adopted, arena_bytes;
        uint64_t held_bytes;    /* populated and not yet given back, dead regions included */
        uint64_t freeing_bytes; /* of these: on the way back */
        unsigned n_outstanding; /* identify and free jobs, loads, checks: each will look at the store once more */
        bool closing;
};

/* load.c */
struct Load {
        Store *store;
        Region *region;
        char *name;
        int fd;
        FileIdentity identity;
        NumaPolicy policy;
        FileSource source;
        StoreRequestList requests;
        TAILQ_ENTRY(Load) entry;

        bool prepared, cancelled, finishing, complete;
        bool waiting, retry;  /* for memory */
        uint64_t retry_until; /* memory that was given back may take a moment to be seen */
        bool stuck;       /* in `stuck_loads`: region and descriptors stay until everything has ended */
        bool read_stuck;  /* late answers may come */
        unsigned n_stuck; /* jobs that do not end */
        uint64_t stuck_usec; /* since when */
        int result;       /* the first error */
        Fault fault;
        Fault job_fault; /* a file job's own; copied at its end */
        atomic_bool stop; /* pool jobs that have not begun need not */

        uint64_t memory_bytes, data_bytes;
        uint64_t promised; /* bytes of memory admitted and not yet populated */
        uint64_t granted;  /* of these: being populated */
        uint64_t grant_next, populated_end, read_next, read_begin;
        unsigned n_slices, n_checksums, n_jobs; /* jobs on the pool and of files; n_jobs is all of them */
        LoaderRead *reading;

        Region measured; /* written by the last job, then copied */
};

/* Starts a load for the first request and takes its descriptor over. -ENOMEM: request unchanged. */
int load_new(Store *s, StoreRequest *r);
void load_join(Load *l, StoreRequest *r);
/* The request is no longer in it; stops the load if it was the last. */
void load_leave(Load *l, StoreRequest *r);
void load_stop(Load *l);
/* The running load of this content, NULL if none. */
Load *load_find(Store *s, const FileIdentity *identity, const NumaPolicy *policy);
/* Looks again at all loads that wait for memory. */
void load_retry_all(Store *s);

/* store-check.c */
void check_stop_all(Store *s);
Check *check_find(Store *s, const Region *r); /* NULL: none runs */

/* store.c */
/* Nobody new gets it; it goes now or with its last user. */
void store_damaged(Store *s, Region *r);
/* At the end, whoever may still use it. */
void store_discard(Store *s, Region *r);
/* Gives it to the service manager. */
void store_keep(Store *s, Region *r);
/* The request is in no list. Calls done and frees it. */
void store_finish_request(StoreRequest *r, int result, Region *region, uint64_t bytes_read, const Fault *f);
void store_add_region(Store *s, Region *r);
void store_remove_region(Store *s, Region *r); /* from the list */
/* Gives memory (NULL: none) and descriptors back on the pool. The region is not in the list. */
void store_give_back(Store *s, Region *r, const FileSource *source, int fd);
/* One of n_outstanding is over; may free a closing store. */
void store_release(Store *s);
void store_retry_later(Store *s);
/* -ETIMEDOUT with f. */
int store_no_answer(const char *name, Fault *f);
