/* SPDX-License-Identifier: Apache-2.0 */
/* Are the bytes of a region still what was loaded? Workers map regions writable, so that they can pin them: after one has
 * crashed, and after a run of the service of which nothing is known, the checksums are verified on the pool before the
 * region is used. That costs about 0.1 to 0.3 s of processor time per GiB and reads no file. */
#include "service/latentd/store-internal.h"

#include <string.h>

#include "service/shared/cleanup.h"

#define SLICE_BYTES (UINT64_C(64) << 20)
#define SLICES_MAX 4 /* at a time: the pool has other things to do too */

struct StoreCheck {
        Check *check;
        StoreChecked done; /* NULL: cancelled */
        void *userdata;
        TAILQ_ENTRY(StoreCheck) entry;
};

struct Check {
        Store *store;
        Region *region; /* one reference */
        TAILQ_HEAD(, StoreCheck) waiters;
        uint64_t next;
        unsigned n_slices;
        bool needed, trailer_done;
        atomic_bool stop, damaged;
        Region measured; /* of an adopted one: written by the job that ends it */
        TAILQ_ENTRY(Check) entry;
};

typedef struct Slice {
        Check *check;
        uint64_t begin, end; /* begin == end: the trailer, and what is left to do for an adopted region */
} Slice;

static void check_step(Check *c);

static void measure(Check *c) {
        Region *m = &c->measured;
        int r;

        if (c->store->config->lock_memory != TRISTATE_NO) {
                m->lock_error = region_lock(c->region);
                m->locked_bytes = m->lock_error == 0 ? c->region->size : 0;
        }
        r = numa_placement(c->region->map, c->region->size, 512, m->node_bytes, REGION_NODES_MAX);
        m->huge_bytes = r > 0 ? c->region->size : 0;
}

static int check_work(void *userdata) {
        Slice *s = userdata;
        Check *c = s->check;
        int r;

        if (atomic_load(&c->stop) || atomic_load(&c->damaged))
                return 0;

        if (s->begin < s->end)
                r = region_verify(c->region, s->begin, s->end);
        else {
                r = region_verify_trailer(c->region);
                if (r >= 0 && c->region->adopted)
                        measure(c);
        }
        if (r < 0)
                atomic_store(&c->damaged, true);
        return 0;
}

static void on_slice(void *userdata, int result) {
        Slice *s = userdata;
        Check *c = s->check;

        c->n_slices--;
        free(s);
        check_step(c);
}

static void take_measured(Check *c) {
        Region *r = c->region;

        if (!STEAL(r->adopted, false))
                return;

        r->locked_bytes = c->measured.locked_bytes;
        r->lock_error = c->measured.lock_error;
        r->huge_bytes = c->measured.huge_bytes;
        memcpy(r->node_bytes, c->measured.node_bytes, sizeof(r->node_bytes));
}

static void check_end(Check *c) {
        Store *s = c->store;
        bool sound = !atomic_load(&c->damaged), stopped = atomic_load(&c->stop);
        StoreCheck *x;

        TAILQ_REMOVE(&s->checks, c, entry);
        if (c->needed && !stopped) {
                if (sound) {
                        c->region->unverified = false;
                        take_measured(c);
                } else
                        store_damaged(s, c->region);
        }

        while ((x = TAILQ_FIRST(&c->waiters))) {
                StoreCheck copy = *x;

                TAILQ_REMOVE(&c->waiters, x, entry);
                free(x);
                if (copy.done)
                        copy.done(copy.userdata, c->region, sound);
        }

        store_region_unref(s, c->region);
        if (s->closing)
                store_discard(s, c->region);
        free(c);
        store_release(s);
}

static bool submit(Check *c, uint64_t begin, uint64_t end) {
        Slice *s = malloc(sizeof(*s));

        if (s) {
                *s = (Slice){.check = c, .begin = begin, .end = end};
                if (pool_submit(c->store->pool, check_work, on_slice, s) >= 0) {
                        c->n_slices++;
                        return true;
                }
                free(s);
        }

        /* Unknown is not sound. */
        atomic_store(&c->damaged, true);
        return false;
}

static void check_step(Check *c) {
        uint64_t data = region_data_bytes(c->region->identity.size);
        bool over = !c->needed || atomic_load(&c->stop);

        while (!over && !atomic_load(&c->damaged) && c->n_slices < SLICES_MAX && c->next < data) {
                uint64_t end = data - c->next < SLICE_BYTES ? data : c->next + SLICE_BYTES;

                if (submit(c, c->next, end))
                        c->next = end;
        }
        /* The last, when every page was touched. */
        if (!over && !atomic_load(&c->damaged) && c->n_slices == 0 && !c->trailer_done)
                c->trailer_done = submit(c, data, data);

        if (c->n_slices == 0)
                check_end(c);
}

Check *check_find(Store *s, const Region *r) {
        Check *c;

        TAILQ_FOREACH(c, &s->checks, entry)
                if (c->region == r)
                        return c;

        return NULL;
}

/* On the pool and back: so that nobody is answered from inside his own call. */
static int begin_work(void *userdata) {
        return 0;
}

static int check_new(Store *s, Region *r, Check **ret) {
        Check *c = calloc(1, sizeof(*c));
        Slice *first = calloc(1, sizeof(*first));
        int k = -ENOMEM;

        if (c && first) {
                *c = (Check){.store = s, .region = r, .needed = r->unverified && r->state == REGION_COMPLETE, .n_slices = 1};
                atomic_init(&c->damaged, r->state != REGION_COMPLETE);
                TAILQ_INIT(&c->waiters);
                first->check = c;
                k = pool_submit(s->pool, begin_work, on_slice, first);
        }
        if (k < 0) {
                free(first);
                free(c);
                return k;
        }

        (void) store_region_ref(r);
        TAILQ_INSERT_TAIL(&s->checks, c, entry);
        s->n_outstanding++;
        *ret = c;
        return 0;
}

int store_check(Store *s, Region *r, StoreChecked done, void *userdata, StoreCheck **ret) {
        StoreCheck *x = malloc(sizeof(*x));
        Check *c = check_find(s, r);
        int k;

        if (!x)
                return -ENOMEM;

        if (!c) {
                k = check_new(s, r, &c);
                if (k < 0) {
                        free(x);
                        return k;
                }
        }

        *x = (StoreCheck){.check = c, .done = done, .userdata = userdata};
        TAILQ_INSERT_TAIL(&c->waiters, x, entry);
        *ret = x;
        return 0;
}

StoreCheck *store_check_cancel(StoreCheck *c) {
        if (c)
                c->done = NULL; /* goes with its check */
        return NULL;
}

void check_stop_all(Store *s) {
        Check *c;

        TAILQ_FOREACH(c, &s->checks, entry)
                atomic_store(&c->stop, true);
}

void store_distrust(Store *s, uint64_t worker_epoch) {
        for (Region *r = s->regions; r; r = r->next)
                if (r->worker_epoch == worker_epoch && r->state == REGION_COMPLETE)
                        r->unverified = true;
}
