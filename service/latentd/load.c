/* SPDX-License-Identifier: Apache-2.0 */
/* One load: prepare (header, O_DIRECT) - admit - piece by piece populate, read, checksum - finish (identity
 * again, trailer). load_step() looks at what is there and starts what can be started; every job and read
 * ends in it. Loop thread, except for *_work(). */
#include "service/latentd/store-internal.h"

#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "service/latentd/memory.h"
#include "service/shared/cleanup.h"
#include "service/shared/clock.h"
#include "service/shared/log.h"

/* What one pool thread populates at a time (about 15 ms with small pages): the kernel holds the lock of the
 * address space meanwhile, for which a malloc() on the loop may have to wait. */
#define SLICE_BYTES (UINT64_C(16) << 20)

/* Memory given back by this process is free at once, but a worker that had it mapped needs a moment. */
#define RETRY_USEC (2 * UINT64_C(1000000))

#define MIB(bytes) ((double) (bytes) / (double) (1 << 20))

/* A part of the region that a pool job works on. */
typedef struct Slice {
        Load *load;
        uint64_t begin, end;
        uint64_t usec;
} Slice;

static void load_step(Load *l);

static void load_fail(Load *l, int error, const Fault *f) {
        if (l->result < 0)
                return;

        l->result = error;
        l->fault = *f;
        load_stop(l);
}

static int submitted(Load *l, int r) {
        if (r < 0) {
                Fault f = {};

                (void) fault_set(&f, r, FAULT_INTERNAL, "%s: out of memory", l->name);
                load_fail(l, r, &f);
                return r;
        }

        l->n_jobs++;
        return 0;
}

static int submit(Load *l, PoolWork work, PoolDone done, void *userdata) {
        return submitted(l, pool_submit(l->store->pool, work, done, userdata));
}

static int submit_slice(Load *l, PoolWork work, PoolDone done, uint64_t begin, uint64_t end) {
        Slice *s = malloc(sizeof(*s));
        int r;

        if (s)
                *s = (Slice){.load = l, .begin = begin, .end = end};
        else {
                load_fail(l, -ENOMEM, &(Fault){.name = FAULT_INTERNAL, .text = "out of memory"});
                return -ENOMEM;
        }

        r = submit(l, work, done, s);
        if (r < 0)
                free(s);
        return r;
}

/* A job that asks the file system does not end. */
static void on_job_stuck(void *userdata) {
        Load *l = userdata;
        Fault f = {};

        l->n_stuck++;
        (void) store_no_answer(l->name, &f);
        load_fail(l, -ETIMEDOUT, &f);
        load_step(l);
}

static int submit_file_job(Load *l, PoolWork work, PoolDone done) {
        return submitted(l, file_jobs_submit(l->store->file_jobs, work, on_job_stuck, done, l));
}

/* ---- finish ---- */

/* The end of a file's pages in our hands: locks and measures into l->measured. */
static int lock_region(Load *l) {
        Region *m = &l->measured;

        if (l->store->config->lock_memory == TRISTATE_NO)
                return 0;

        m->lock_error = region_lock(l->region);
        if (m->lock_error == 0) {
                m->locked_bytes = l->region->size;
                return 0;
        }
        if (l->store->config->lock_memory == TRISTATE_AUTO)
                return 0;

        return fault_set(&l->job_fault, -EPERM, FAULT_DOES_NOT_FIT,
                "%s: %.1f MiB cannot be locked (%s): raise LimitMEMLOCK= of latentd.service, or set "
                "LockMemory=auto",
                l->name, MIB(l->region->size), strerror(-m->lock_error));
}

static int finish_work(void *userdata) {
        Load *l = userdata;
        FileIdentity now;
        int r;

        if (atomic_load(&l->stop))
                return -ECANCELED;

        r = file_source_identity(l->store->io, l->fd, &now);
        if (atomic_load(&l->stop)) /* it may have taken its time */
                return -ECANCELED;
        if (r < 0)
                return fault_set(
                        &l->job_fault, r, FAULT_IO, "%s: cannot be examined: %s", l->name, strerror(-r));
        if (!file_source_same(&now, &l->identity))
                return fault_set(&l->job_fault, -ESTALE, FAULT_FILE_CHANGED,
                        "%s changed while it was read: load it again", l->name);

        r = lock_region(l);
        if (r < 0)
                return r;

        r = numa_placement(l->region->map, l->region->size, 512, l->measured.node_bytes, REGION_NODES_MAX);
        l->measured.huge_bytes = r > 0 ? l->region->size : 0;
        region_write_trailer(l->region);
        return 0;
}

static void on_finish(void *userdata, int result) {
        Load *l = userdata;
        Region *r = l->region;

        l->n_jobs--;
        if (result < 0)
                load_fail(l, result, &l->job_fault);
        if (l->result == 0 && !l->cancelled) {
                r->locked_bytes = l->measured.locked_bytes;
                r->lock_error = l->measured.lock_error;
                r->huge_bytes = l->measured.huge_bytes;
                memcpy(r->node_bytes, l->measured.node_bytes, sizeof(r->node_bytes));
                r->state = REGION_COMPLETE;
                l->complete = true;
        }

        load_step(l);
}

/* ---- checksum ---- */

static int checksum_work(void *userdata) {
        Slice *s = userdata;
        uint64_t begin = clock_usec();

        if (!atomic_load(&s->load->stop))
                region_checksum(s->load->region, s->begin, s->end);
        s->usec = clock_usec() - begin;
        return 0;
}

static void on_checksum(void *userdata, int result) {
        Slice *s = userdata;
        Load *l = s->load;

        l->n_jobs--;
        l->n_checksums--;
        l->region->crc_usec += s->usec;
        free(s);
        load_step(l);
}

/* ---- read ---- */

static void read_failed(Load *l, int error) {
        Fault f = {};

        switch (error) {
        case -ECANCELED:
                return;
        case -ESTALE:
                (void) fault_set(&f, error, FAULT_FILE_CHANGED,
                        "%s was truncated while it was read: %" PRIu64 " bytes expected", l->name,
                        l->identity.size);
                break;
        case -ETIMEDOUT:
                l->read_stuck = true;
                (void) fault_set(&f, error, FAULT_IO,
                        "%s: the disk or server gave no data for %u s, the load was given up", l->name,
                        (unsigned) (LOADER_STALL_USEC / 1000000));
                break;
        default:
                (void) fault_set(&f, error, FAULT_IO, "%s cannot be read: %s", l->name, strerror(-error));
        }

        load_fail(l, error, &f);
}

static void load_late(Load *l);

static void on_late(void *userdata) {
        Load *l = userdata;

        l->read_stuck = false;
        load_late(l);
}

static void on_read(void *userdata, int result, uint64_t bytes, uint64_t usec) {
        Load *l = userdata;

        l->reading = NULL;
        l->region->read += bytes;
        l->region->read_usec += usec;
        l->store->bytes_read += bytes;

        if (result < 0)
                read_failed(l, result);
        else if (submit_slice(l, checksum_work, on_checksum, l->read_begin, l->read_next) >= 0)
                l->n_checksums++;

        load_step(l);
}

static uint64_t piece_end(const Load *l, uint64_t begin) {
        return l->data_bytes - begin < l->store->piece_bytes ? l->data_bytes : begin + l->store->piece_bytes;
}

static void read_more(Load *l) {
        Fault f = {};
        int r;

        if (l->reading || l->read_next >= l->populated_end)
                return;

        l->read_begin = l->read_next;
        r = loader_read(l->store->loader, &l->source, l->region->map, l->read_begin,
                piece_end(l, l->read_begin), l->identity.size, on_read, on_late, l, &l->reading);
        if (r < 0) {
                (void) fault_set(
                        &f, r, FAULT_INTERNAL, "%s: reading cannot be started: %s", l->name, strerror(-r));
                load_fail(l, r, &f);
                return;
        }

        l->read_next = piece_end(l, l->read_begin);
}

/* ---- memory ---- */

static int does_not_fit(Load *l, uint64_t need, uint64_t available, const char *limit) {
        Store *s = l->store;
        Fault f = {};

        (void) fault_set(&f, -ENOMEM, FAULT_DOES_NOT_FIT,
                "%s needs %.1f MiB of memory%s, %.1f MiB can be had (limit: %s; reserve %.1f MiB; cache "
                "%.1f MiB): unload models, or free or "
                "allow more memory",
                l->name, MIB(l->memory_bytes), need < l->memory_bytes ? " (the rest was there before)" : "",
                MIB(available), limit, MIB(s->config->cache_ram_reserve), MIB(s->held_bytes));
        load_fail(l, -ENOMEM, &f);
        return -ENOMEM;
}

/* Whether `need` bytes may be taken when `taken` are already promised to others. 1: yes; 0: later (unused
 * regions are on their way out); negative: the load has failed. */
static int admit(Load *l, uint64_t need, uint64_t taken) {
        Store *s = l->store;
        uint64_t available, missing, now = clock_usec();
        MemoryHeadroom h;
        int r;

        r = memory_headroom(s->config, s->root, s->held_bytes + s->arena_bytes, &h);
        if (r < 0) {
                Fault f = {};

                (void) fault_set(
                        &f, r, FAULT_INTERNAL, "free memory cannot be determined: %s", strerror(-r));
                load_fail(l, r, &f);
                return r;
        }

        available = h.bytes > taken ? h.bytes - taken : 0;
        if (available >= need) {
                l->retry_until = 0;
                return 1;
        }

        missing = need - available;
        if (missing > s->freeing_bytes && store_evict(s, missing - s->freeing_bytes) > 0)
                l->retry_until = now + RETRY_USEC;

        if (s->freeing_bytes == 0) {
                if (l->retry_until <= now)
                        return does_not_fit(l, need, available, h.limit);
                store_retry_later(s);
        }

        l->waiting = true;
        return 0;
}

/* Everything at once, so that two loads that cannot both be held do not both begin. */
static int admit_all(Load *l) {
        int r;

        r = admit(l, l->memory_bytes, store_promised(l->store));
        if (r > 0)
                l->promised = l->memory_bytes;
        return r;
}

/* And each piece again, since the rest of the machine goes on. */
static int admit_piece(Load *l, uint64_t bytes) {
        uint64_t taken = 0;
        Load *other;
        int r;

        TAILQ_FOREACH(other, &l->store->loads, entry) {
                taken += other->granted;
        }

        r = admit(l, bytes, taken);
        if (r > 0)
                l->granted += bytes;
        return r;
}

static int populate_work(void *userdata) {
        Slice *s = userdata;
        uint64_t begin = clock_usec();
        int r;

        if (atomic_load(&s->load->stop))
                return -ECANCELED;

        r = region_populate(s->load->region, s->begin, s->end);
        s->usec = clock_usec() - begin;
        return r;
}

static void on_populate(void *userdata, int result) {
        Slice *s = userdata;
        Load *l = s->load;
        uint64_t bytes = s->end - s->begin;

        l->n_jobs--;
        l->n_slices--;
        l->granted -= bytes;
        l->promised -= bytes;
        if (result >= 0) {
                l->region->populated += bytes;
                l->region->populate_usec += s->usec;
                l->store->held_bytes += bytes;
        } else if (result != -ECANCELED) {
                Fault f = {};

                (void) fault_set(&f, result, result == -ENOMEM ? FAULT_DOES_NOT_FIT : FAULT_INTERNAL,
                        "%s: %.1f MiB of memory could not be had: %s", l->name, MIB(bytes),
                        strerror(-result));
                load_fail(l, result, &f);
        }
        if (l->n_slices == 0)
                l->populated_end = l->grant_next;

        free(s);
        load_step(l);
}

/* At most one piece ahead of the one being read. */
static void populate_more(Load *l) {
        uint64_t begin = l->grant_next, end, memory_end;

        if (l->n_slices > 0 || l->waiting || begin >= l->data_bytes || l->populated_end > l->read_next)
                return;

        end = piece_end(l, begin);
        memory_end =
                end == l->data_bytes ? l->memory_bytes : end; /* the trailer comes with the last piece */
        if (admit_piece(l, memory_end - begin) <= 0)
                return;

        l->grant_next = end;
        for (uint64_t at = begin; at < memory_end; at += SLICE_BYTES) {
                uint64_t to = memory_end - at < SLICE_BYTES ? memory_end : at + SLICE_BYTES;

                if (submit_slice(l, populate_work, on_populate, at, to) < 0) {
                        l->granted -= memory_end - at;
                        return;
                }
                l->n_slices++;
        }
}

/* ---- begin and end ---- */

static int prepare_work(void *userdata) {
        Load *l = userdata;
        int r;

        r = file_source_open(l->store->io, l->fd, &l->source);
        if (r < 0)
                return fault_set(&l->job_fault, r, FAULT_INTERNAL, "%s: %s", l->name, strerror(-r));

        /* Through the same descriptor: a direct read leaves no trace in the page cache. */
        r = file_source_check_content(&l->source, l->name, l->identity.size, &l->job_fault);
        if (r < 0)
                return fault_set(&l->job_fault, r, FAULT_INTERNAL, "%s: %s", l->name, strerror(-r));

        return 0;
}

static void on_prepare(void *userdata, int result) {
        Load *l = userdata;

        l->n_jobs--;
        l->prepared = true;
        if (result < 0)
                load_fail(l, result, &l->job_fault);
        load_step(l);
}

/* Each region holds a descriptor. The cache takes half of those that this process may have: the rest is for the bus,
 * clients' files and arenas, without which nobody can be answered at all. */
static int admit_descriptor(Load *l) {
        Store *s = l->store;
        uint64_t n = 0;
        Fault f = {};

        for (const Region *r = s->regions; r; r = r->next)
                n++;
        if (n < s->regions_max || store_evict(s, 1) > 0)
                return 0;

        (void) fault_set(&f, -EMFILE, FAULT_LIMIT,
                "%s: %" PRIu64 " files are in the cache and in use, at most %" PRIu64
                " can be (half of LimitNOFILE=). Unload models that are not needed.",
                l->name, n, s->regions_max);
        load_fail(l, -EMFILE, &f);
        return -EMFILE;
}

static void begin_region(Load *l) {
        Fault f = {};
        int r;

        l->data_bytes = region_data_bytes(l->identity.size);
        l->memory_bytes = region_memory_bytes(l->identity.size);
        if (l->memory_bytes == 0) {
                (void) fault_set(&f, -EFBIG, FAULT_INVALID_FILE, "%s has %" PRIu64 " bytes: too large",
                        l->name, l->identity.size);
                load_fail(l, -EFBIG, &f);
                return;
        }
        if (l->waiting || admit_all(l) <= 0 || admit_descriptor(l) < 0)
                return;

        r = region_new(l->store->next_id++, &l->identity, &l->policy, &l->region);
        if (r < 0) {
                (void) fault_set(&f, r, FAULT_INTERNAL, "%s: no memory object of %.1f MiB can be made: %s",
                        l->name, MIB(l->memory_bytes), strerror(-r));
                load_fail(l, r, &f);
                return;
        }

        store_add_region(l->store, l->region);
}

/* The answers to its requests are given: what it holds, except for a complete region, goes. */
static void load_give_back(Load *l) {
        Store *s = l->store;

        if (!l->complete && l->region)
                store_remove_region(s, l->region);
        store_give_back(s, l->complete ? NULL : l->region, &l->source, l->fd);
        free(l->name);
        free(l);
}

/* Something of it does not end. Its memory may be written to at any time, and stays. */
static void load_park(Load *l) {
        Store *s = l->store;

        l->stuck = true;
        l->stuck_usec = clock_usec();
        if (l->region)
                l->region->state = REGION_DEAD;
        TAILQ_INSERT_TAIL(&s->stuck_loads, l, entry);
        log_warning("A load was given up since its file system does not answer; %" PRIu64
                    " bytes of memory stay taken until it does: %u such files now",
                l->region ? l->region->populated : 0, store_stuck(s));
}

/* It has come to its end after all. */
static void load_late(Load *l) {
        Store *s = l->store;

        if (!l->stuck || l->read_stuck || l->n_jobs > 0)
                return;

        TAILQ_REMOVE(&s->stuck_loads, l, entry);
        log_notice("A file system answered %.0f s after a load was given up: its memory is free again, %u such files now",
                (double) (clock_usec() - l->stuck_usec) / 1e6, store_stuck(s));
        load_give_back(l);
}

/* Nothing of it runs any more but what is stuck: tell who waits, give back what is not needed. */
static void load_end(Load *l) {
        Store *s = l->store;
        uint64_t bytes_read = l->identity.size;
        StoreRequest *r;

        TAILQ_REMOVE(&s->loads, l, entry);

        /* A guard: a done function may drop its reference at once. */
        if (l->complete) {
                store_keep(s, l->region);
                (void) store_region_ref(l->region);
        }

        while ((r = TAILQ_FIRST(&l->requests))) {
                TAILQ_REMOVE(&l->requests, r, entry);
                if (l->complete)
                        store_finish_request(r, 0, store_region_ref(l->region), bytes_read, NULL);
                else
                        store_finish_request(r, l->result, NULL, 0, &l->fault);
                bytes_read = 0; /* read once, counted once */
        }

        if (l->complete)
                store_region_unref(s, l->region);
        if (l->read_stuck || l->n_stuck > 0)
                load_park(l);
        else
                load_give_back(l);
        store_release(s);
}

static void load_step(Load *l) {
        bool stopped = l->result < 0 || l->cancelled;

        if (l->stuck) {
                load_late(l);
                return;
        }
        if (!stopped && l->prepared && !l->complete) {
                if (!l->region)
                        begin_region(l);
                if (l->region && l->result == 0) {
                        /* Reading first: it makes room for the next piece. */
                        read_more(l);
                        populate_more(l);
                        read_more(l);

                        if (!l->finishing && l->result == 0 && l->read_next == l->data_bytes &&
                                !l->reading && l->n_checksums == 0)
                                l->finishing = submit_file_job(l, finish_work, on_finish) >= 0;
                }
                stopped = l->result < 0 || l->cancelled;
        }

        if ((stopped || l->complete) && l->n_jobs == l->n_stuck && !l->reading)
                load_end(l);
}

int load_new(Store *s, StoreRequest *r) {
        Load *l = calloc(1, sizeof(*l));
        int k;

        if (!l)
                return -ENOMEM;

        l->store = s;
        l->identity = r->identity;
        l->policy = r->policy;
        l->source.fd = -EBADF;
        l->fd = r->fd;
        l->name = r->name;
        TAILQ_INIT(&l->requests);

        l->n_jobs = 1; /* everything before the job is there: it runs at once */
        k = file_jobs_submit(s->file_jobs, prepare_work, on_job_stuck, on_prepare, l);
        if (k < 0) {
                free(l);
                return k;
        }

        r->name = NULL;
        r->fd = -EBADF;
        TAILQ_INSERT_TAIL(&s->loads, l, entry);
        s->n_outstanding++;
        load_join(l, r);
        return 0;
}

void load_join(Load *l, StoreRequest *r) {
        r->load = l;
        TAILQ_INSERT_TAIL(&l->requests, r, entry);
}

void load_stop(Load *l) {
        atomic_store(&l->stop, true);
        l->waiting = false;
        if (l->reading)
                loader_cancel(l->reading);
}

void load_leave(Load *l, StoreRequest *r) {
        bool ended = l->complete || l->result < 0;

        TAILQ_REMOVE(&l->requests, r, entry);
        r->load = NULL;

        if (!TAILQ_EMPTY(&l->requests) || ended)
                return;

        l->cancelled = true;
        load_stop(l);
        load_step(l);
}

Load *load_find(Store *s, const FileIdentity *identity, const NumaPolicy *policy) {
        Load *l;

        TAILQ_FOREACH(l, &s->loads, entry) {
                if (!l->cancelled && l->result == 0 && !l->complete &&
                        file_source_same(&l->identity, identity) && l->policy.kind == policy->kind &&
                        (policy->kind != NUMA_BIND || l->policy.node == policy->node))
                        return l;
        }

        return NULL;
}

void load_retry_all(Store *s) {
        Load *l;

        TAILQ_FOREACH(l, &s->loads, entry) {
                l->retry = l->waiting;
        }

        do {
                TAILQ_FOREACH(l, &s->loads, entry) {
                        if (l->retry)
                                break;
                }
                if (l) {
                        l->retry = l->waiting = false;
                        load_step(l); /* may free it */
                }
        } while (l);
}
