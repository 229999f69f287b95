/* SPDX-License-Identifier: Apache-2.0 */
/* Requests, the list of regions, and who may be evicted. The loads themselves: load.c. */
#include "service/latentd/store.h"

#include <fcntl.h>
#include <inttypes.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/sysmacros.h>
#include <time.h>

#include "service/latentd/descriptors.h"
#include "service/latentd/memory.h"
#include "service/latentd/store-internal.h"
#include "service/shared/cleanup.h"
#include "service/shared/clock.h"
#include "service/shared/log.h"

#define RETRY_PERIOD_USEC 100000
#define STUCK_MAX 4u /* of a file system */
#define TICK_NSEC 20000000 /* and more than one, where CONFIG_HZ is 100 or above */

DEFINE_CLEANUP(Store *, store_free)

/* What goes back on the pool. */
typedef struct GiveBack {
        Store *store;
        Region *region;
        FileSource source;
        int fd;
        uint64_t bytes;
        bool scrap; /* nobody is to have the region after us */
} GiveBack;

/* ---- regions ---- */

void store_add_region(Store *s, Region *r) {
        r->next = s->regions;
        s->regions = r;
}

void store_remove_region(Store *s, Region *r) {
        for (Region **p = &s->regions; *p; p = &(*p)->next)
                if (*p == r) {
                        *p = r->next;
                        r->next = NULL;
                        return;
                }
}

static Region *find_region(Store *s, const FileIdentity *identity, const NumaPolicy *policy) {
        for (Region *r = s->regions; r; r = r->next)
                if (r->state == REGION_COMPLETE && file_source_same(&r->identity, identity) &&
                        r->policy.kind == policy->kind &&
                        (policy->kind != NUMA_BIND || r->policy.node == policy->node))
                        return r;

        return NULL;
}

Region *store_region_ref(Region *r) {
        r->n_ref++;
        store_region_touch(r);
        return r;
}

void store_region_touch(Region *r) {
        r->last_used_usec = clock_usec();
        if (r->map && r->state == REGION_COMPLETE)
                region_set_last_used(r);
}

void store_region_unref(Store *s, Region *r) {
        if (!r)
                return;

        r->n_ref--;
        store_region_touch(r);
        if (r->state == REGION_DAMAGED && r->n_ref == 0) {
                store_remove_region(s, r);
                store_give_back(s, r, NULL, -EBADF);
        }
}

static int give_back_work(void *userdata) {
        GiveBack *g = userdata;

        file_source_done(&g->source);
        if (g->fd >= 0)
                (void) close(g->fd);
        if (g->scrap)
                region_scrap(g->region);
        else
                region_free(g->region);
        return 0;
}

static void account_given_back(const GiveBack *g) {
        g->store->freeing_bytes -= g->bytes;
        g->store->held_bytes -= g->bytes;
}

static void on_given_back(void *userdata, int result) {
        GiveBack *g = userdata;
        Store *s = g->store;

        account_given_back(g);
        free(g);
        load_retry_all(s);
        store_release(s);
}

void store_give_back(Store *s, Region *r, const FileSource *source, int fd) {
        GiveBack *g = calloc(1, sizeof(*g)), on_stack;

        if (!g)
                g = &on_stack;
        *g = (GiveBack){
                .store = s,
                .region = r,
                .source = source ? *source : (FileSource){.fd = -EBADF},
                .fd = fd,
                .bytes = r ? r->populated : 0,
                .scrap = r && !r->stored && !s->closing,
        };
        s->freeing_bytes += g->bytes;

        if (g != &on_stack && pool_submit(s->pool, give_back_work, on_given_back, g) >= 0) {
                s->n_outstanding++;
                return;
        }

        /* No memory for a job of a few bytes: the loop has to wait for it this once. */
        (void) give_back_work(g);
        account_given_back(g);
        if (g != &on_stack)
                free(g);
        store_retry_later(s);
}

/* Takes it out of the service manager's hands, not at the end of the service: then it is to stay there. */
static void forget(Store *s, Region *r) {
        char name[REGION_NAME_MAX];

        if (!r->stored || s->closing)
                return;

        region_store_name(&r->identity, &r->policy, name);
        fd_store_remove(s->fds, name);
        r->stored = false;
}

uint64_t store_drop(Store *s, Region *r) {
        uint64_t bytes = r->populated;

        if (r->state != REGION_COMPLETE || r->n_ref > 0)
                return 0;

        forget(s, r);
        store_remove_region(s, r);
        store_give_back(s, r, NULL, -EBADF);
        return bytes;
}

void store_keep(Store *s, Region *r) {
        char name[REGION_NAME_MAX];

        if (!s->fds || r->stored)
                return;

        region_store_name(&r->identity, &r->policy, name);
        r->stored = fd_store_push(s->fds, r->fd, name);
}

void store_damaged(Store *s, Region *r) {
        log_warning("The weights in region %" PRIu64 " (%" PRIu64 " bytes) were damaged in memory; they are dropped.", r->id,
                r->identity.size);
        forget(s, r);
        r->state = REGION_DAMAGED;
        (void) store_region_ref(r);
        store_region_unref(s, r); /* goes at once if it has no user */
}

/* Which one leaves first. */
static bool leaves_before(const Region *a, const Region *b) {
        if (a->ease != b->ease)
                return a->ease > b->ease;
        if (a->last_used_usec != b->last_used_usec)
                return a->last_used_usec < b->last_used_usec;
        return a->id < b->id;
}

uint64_t store_evict(Store *s, uint64_t bytes) {
        uint64_t freed = 0;

        while (freed < bytes) {
                Region *first = NULL;

                for (Region *r = s->regions; r; r = r->next)
                        if (r->state == REGION_COMPLETE && r->n_ref == 0 && !r->keep && (!first || leaves_before(r, first)))
                                first = r;
                if (!first)
                        break;

                freed += store_drop(s, first);
        }

        return freed;
}

Region *store_first(Store *s) {
        return s->regions;
}

uint64_t store_bytes(const Store *s) {
        return s->held_bytes;
}

uint64_t store_leaving(const Store *s) {
        return s->freeing_bytes;
}

int store_ring_error(const Store *s) {
        return loader_ring_error(s->loader);
}

uint64_t store_promised(const Store *s) {
        uint64_t bytes = 0;
        const Load *l;

        TAILQ_FOREACH(l, &s->loads, entry) {
                bytes += l->promised;
        }

        return bytes;
}

uint64_t store_bytes_read(const Store *s) {
        return s->bytes_read;
}

uint64_t store_bytes_adopted(const Store *s) {
        return s->bytes_adopted;
}

uint64_t store_excess(Store *s) {
        MemoryHeadroom h;

        if (memory_headroom(s->config, s->root, s->held_bytes + s->arena_bytes, &h) < 0)
                return 0;

        return h.missing > s->freeing_bytes ? h.missing - s->freeing_bytes : 0;
}

void store_set_other_bytes(Store *s, uint64_t bytes) {
        s->arena_bytes = bytes;
}

/* ---- requests ---- */

static void free_request(StoreRequest *r) {
        if (r->fd >= 0)
                (void) close(r->fd);
        free(r->name);
        free(r);
}

void store_finish_request(StoreRequest *r, int result, Region *region, uint64_t bytes_read, const Fault *f) {
        r->done(r->userdata, result, region, bytes_read, f);
        free_request(r);
}

/* Times are as coarse as the kernel's tick: a file written a moment ago could change once more and keep
 * them. */
static bool may_change_unseen(const FileIdentity *identity) {
        struct timespec now;
        int64_t age_nsec;

        (void) clock_gettime(CLOCK_REALTIME, &now);
        if (now.tv_sec - identity->ctime_sec < 0 || now.tv_sec - identity->ctime_sec > 1)
                return false;

        age_nsec = (now.tv_sec - identity->ctime_sec) * 1000000000 + now.tv_nsec - identity->ctime_nsec;
        return age_nsec < TICK_NSEC;
}

static int identify_work(void *userdata) {
        StoreRequest *r = userdata;
        int k;

        k = file_source_identity(r->store->io, r->fd, &r->identity);
        if (k < 0 || !may_change_unseen(&r->identity))
                return k;

        (void) nanosleep(&(struct timespec){.tv_nsec = TICK_NSEC}, NULL);
        return file_source_identity(r->store->io, r->fd, &r->identity);
}

static int look_work(void *userdata) {
        StoreRequest *r = userdata;
        FileSource source = {.io = r->store->io, .fd = r->fd};
        int k;

        k = file_source_identity(r->store->io, r->fd, &r->identity);
        return k < 0 ? k : file_source_check_content(&source, r->name, r->identity.size, &r->fault);
}

static void request_failed(StoreRequest *r, int error) {
        Fault f = r->fault;

        (void) fault_set(&f, error, error == -ENOMEM ? FAULT_INTERNAL : FAULT_IO, "%s: %s", r->name,
                strerror(-error));
        store_finish_request(r, error, NULL, 0, &f);
}

static void on_checked(void *userdata, Region *region, bool sound);

/* Its identity is known: a hit, a load under way, or a new one. */
static int look_up(Store *s, StoreRequest *r) {
        Region *region = find_region(s, &r->identity, &r->policy);
        Load *load;
        int k;

        if (region && region->unverified) {
                k = store_check(s, store_region_ref(region), on_checked, r, &r->check);
                if (k < 0) {
                        store_region_unref(s, region);
                        return k;
                }
                TAILQ_INSERT_TAIL(&s->identifying, r, entry);
                return 0;
        }
        if (region) {
                store_finish_request(r, 0, store_region_ref(region), 0, NULL);
                return 0;
        }

        load = load_find(s, &r->identity, &r->policy);
        if (!load)
                return load_new(s, r);

        load_join(load, r);
        return 0;
}

/* The request has a reference to the region. */
static void on_checked(void *userdata, Region *region, bool sound) {
        StoreRequest *r = userdata;
        Store *s = r->store;
        int k;

        r->check = NULL;
        TAILQ_REMOVE(&s->identifying, r, entry);
        if (r->cancelled || !sound)
                store_region_unref(s, region);

        if (r->cancelled)
                free_request(r);
        else if (sound)
                store_finish_request(r, 0, region, 0, NULL);
        else {
                k = look_up(s, r);
                if (k < 0)
                        request_failed(r, k);
        }
}

static void on_identify_stuck(void *userdata) {
        StoreRequest *r = userdata;
        Store *s = r->store;
        Fault f = {};

        TAILQ_REMOVE(&s->identifying, r, entry);
        TAILQ_INSERT_TAIL(&s->stuck_requests, r, entry);
        r->stuck = true;
        log_warning("A file system does not say anything about a file of a model: %u such files now", store_stuck(s));
        if (!STEAL(r->cancelled, true)) {
                (void) store_no_answer(r->name, &f);
                r->done(r->userdata, -ETIMEDOUT, NULL, 0, &f);
        }
        store_release(s);
}

static void on_identified(void *userdata, int result) {
        StoreRequest *r = userdata;
        Store *s = r->store;

        if (r->stuck) {
                TAILQ_REMOVE(&s->stuck_requests, r, entry);
                free_request(r);
                return;
        }

        TAILQ_REMOVE(&s->identifying, r, entry);

        if (r->cancelled)
                free_request(r);
        else if (result < 0)
                request_failed(r, result);
        else if (r->look)
                store_finish_request(r, 0, NULL, 0, NULL);
        else {
                result = look_up(s, r);
                if (result < 0)
                        request_failed(r, result);
        }

        store_release(s);
}

int store_no_answer(const char *name, Fault *f) {
        return fault_set(f, -ETIMEDOUT, FAULT_IO, "%s: its file system gave no answer for %u s, the load was given up", name,
                (unsigned) (LOADER_STALL_USEC / 1000000));
}

FileJobs *store_file_jobs(Store *s) {
        return s->file_jobs;
}

unsigned store_stuck(const Store *s) {
        const StoreRequest *r;
        const Load *l;
        unsigned n = 0;

        TAILQ_FOREACH(r, &s->stuck_requests, entry) {
                n++;
        }
        TAILQ_FOREACH(l, &s->stuck_loads, entry) {
                n++;
        }

        return n;
}

/* Each that does not answer costs a thread, two descriptors and perhaps much memory: a few show that it is of no use. */
static int check_answers(const Store *s, uint64_t device, const char *name, Fault *f) {
        const StoreRequest *r;
        const Load *l;
        unsigned n = 0;

        TAILQ_FOREACH(r, &s->stuck_requests, entry) {
                n += r->device == device;
        }
        TAILQ_FOREACH(l, &s->stuck_loads, entry) {
                n += l->identity.device == device;
        }
        if (n < STUCK_MAX)
                return 0;

        return fault_set(f, -ETIMEDOUT, FAULT_IO,
                "%s: %u reads from its file system (device %u:%u) were given up after %u s and have not come back; nothing is loaded "
                "from there until one does",
                name, n, major(device), minor(device), (unsigned) (LOADER_STALL_USEC / 1000000));
}

/* policy: NULL of one that only looks. */
static int request_new(Store *s, int fd, const char *name, const NumaPolicy *policy, StoreDone done, void *userdata,
        StoreRequest **ret, Fault *f) {
        StoreRequest *r;
        uint64_t device;
        int k;

        k = descriptors_check(name, f);
        if (k < 0)
                return k;
        k = file_source_check(fd, name, "/proc/self/mountinfo", &device, f);
        if (k < 0)
                return k;
        k = check_answers(s, device, name, f);
        if (k < 0)
                return k;

        r = calloc(1, sizeof(*r));
        if (!r)
                return -ENOMEM;

        *r = (StoreRequest){.store = s, .done = done, .userdata = userdata, .device = device, .look = !policy};
        if (policy)
                r->policy = *policy;
        r->name = strdup(name);
        r->fd = fcntl(fd, F_DUPFD_CLOEXEC, 3);
        if (!r->name || r->fd < 0) {
                k = r->name ? -errno : -ENOMEM;
                free_request(r);
                return fault_set(f, k, FAULT_INTERNAL, "%s: %s", name, strerror(-k));
        }

        k = file_jobs_submit(s->file_jobs, policy ? identify_work : look_work, on_identify_stuck, on_identified, r);
        if (k < 0) {
                free_request(r);
                return k;
        }

        TAILQ_INSERT_TAIL(&s->identifying, r, entry);
        s->n_outstanding++;
        *ret = r;
        return 0;
}

int store_get(Store *s, int fd, const char *name, const NumaPolicy *policy, StoreDone done, void *userdata,
        StoreRequest **ret, Fault *f) {
        return request_new(s, fd, name, policy, done, userdata, ret, f);
}

int store_look(Store *s, int fd, const char *name, StoreDone done, void *userdata, StoreRequest **ret, Fault *f) {
        return request_new(s, fd, name, NULL, done, userdata, ret, f);
}

StoreRequest *store_request_cancel(StoreRequest *r) {
        if (!r)
                return NULL;

        if (r->load) {
                load_leave(r->load, r);
                free_request(r);
        } else
                r->cancelled = true; /* its job ends by itself */

        return NULL;
}

void store_request_progress(const StoreRequest *r, uint64_t *ret_done, uint64_t *ret_total) {
        const Load *l = r->load;

        *ret_done = l && l->region ? l->region->read + (l->reading ? loader_read_bytes(l->reading) : 0) : 0;
        *ret_total = l ? l->identity.size : 0;
}

/* ---- the store ---- */

static int on_retry(sd_event_source *source, uint64_t usec, void *userdata) {
        load_retry_all(userdata);
        return 0;
}

void store_retry_later(Store *s) {
        if (!s->retry_source)
                return; /* closing */

        (void) sd_event_source_set_time(s->retry_source, clock_usec() + RETRY_PERIOD_USEC);
        (void) sd_event_source_set_enabled(s->retry_source, SD_EVENT_ONESHOT);
}

int store_new(sd_event *event, Pool *pool, const Config *config, Store **ret) {
        CLEANUP(store_freep) Store *s = NULL;
        struct rlimit files;
        int r;

        s = calloc(1, sizeof(*s));
        if (!s)
                return -ENOMEM;

        s->event = event;
        s->pool = pool;
        s->config = config;
        s->root = "";
        s->io = &file_io_system;
        s->piece_bytes = UINT64_C(1) << 30;
        s->next_id = 1;
        if (getrlimit(RLIMIT_NOFILE, &files) < 0)
                return -errno;
        s->regions_max = files.rlim_cur / 2;
        TAILQ_INIT(&s->loads);
        TAILQ_INIT(&s->checks);
        TAILQ_INIT(&s->identifying);
        TAILQ_INIT(&s->stuck_requests);
        TAILQ_INIT(&s->stuck_loads);

        r = loader_new(event, s->io, LOADER_STALL_USEC, &s->loader);
        if (r < 0)
                return r;

        r = file_jobs_new(event, LOADER_STALL_USEC, &s->file_jobs);
        if (r < 0)
                return r;

        r = sd_event_add_time(event, &s->retry_source, CLOCK_MONOTONIC, 0, 0, on_retry, s);
        if (r < 0)
                return r;
        r = sd_event_source_set_enabled(s->retry_source, SD_EVENT_OFF);
        if (r < 0)
                return r;

        *ret = STEAL_PTR(s);
        return 0;
}

void store_discard(Store *s, Region *r) {
        if (r->state != REGION_COMPLETE && r->state != REGION_DAMAGED)
                return;

        store_remove_region(s, r);
        store_give_back(s, r, NULL, -EBADF);
}

static bool adopt(void *userdata, int fd, const char *name) {
        Store *s = userdata;
        const char *why = NULL;
        Region *r;

        if (region_adopt(s->next_id, fd, name, &r, &why) < 0) {
                log_info("\"%.64s\" is not adopted: %s.", name, why);
                return false;
        }

        s->next_id++;
        if (r->last_used_usec > clock_usec())
                r->last_used_usec = 0;
        s->held_bytes += r->populated;
        s->bytes_adopted += r->identity.size;
        store_add_region(s, r);
        return true;
}

void store_adopt(Store *s, FdStore *fds) {
        uint64_t excess, freed = 0;
        unsigned n = 0;

        s->fds = fds;
        fd_store_offer(fds, adopt, s);
        for (const Region *r = s->regions; r; r = r->next)
                n++;

        excess = store_excess(s);
        if (excess > 0)
                freed = store_evict(s, excess);
        if (n > 0)
                log_info("%u regions with %" PRIu64 " bytes of weights are still here; %" PRIu64 " bytes of them are freed.", n,
                        s->bytes_adopted, freed);
}

static void finish_closing(Store *s) {
        Load *l, *next;
        Region *r;

        while ((r = s->regions)) {
                store_remove_region(s, r);
                free(r); /* dead: its memory may still be written to, it goes with the process */
        }
        for (l = TAILQ_FIRST(&s->stuck_loads); l; l = next) {
                next = TAILQ_NEXT(l, entry);
                if (l->n_jobs == 0) {
                        TAILQ_REMOVE(&s->stuck_loads, l, entry);
                        free(l->name);
                        free(l);
                }
        }
        if (!TAILQ_EMPTY(&s->stuck_requests) || !TAILQ_EMPTY(&s->stuck_loads))
                return; /* what a thread may still come back to goes with the process too */
        free(s);
}

void store_release(Store *s) {
        s->n_outstanding--;
        if (s->closing && s->n_outstanding == 0)
                finish_closing(s);
}

static void drop_requests(Store *s) {
        StoreRequest *r;
        Load *l;

        TAILQ_FOREACH(r, &s->identifying, entry) {
                r->cancelled = true;
        }

        /* A load that ends at once takes itself out of the list. */
        for (l = TAILQ_FIRST(&s->loads); l;) {
                r = TAILQ_FIRST(&l->requests);
                if (r) {
                        (void) store_request_cancel(r);
                        l = TAILQ_FIRST(&s->loads);
                } else
                        l = TAILQ_NEXT(l, entry);
        }
}

Store *store_free(Store *s) {
        Region *next;

        if (!s)
                return NULL;

        s->n_outstanding++; /* ours, until the end of this function */
        s->closing = true;
        s->retry_source = sd_event_source_disable_unref(s->retry_source);
        drop_requests(s);
        check_stop_all(s);
        s->loader = loader_free(s->loader);
        s->file_jobs = file_jobs_free(s->file_jobs);

        for (Region *r = s->regions; r; r = next) {
                next = r->next;
                if (!check_find(s, r))
                        store_discard(s, r);
        }

        store_release(s);
        return NULL;
}
