/* SPDX-License-Identifier: Apache-2.0 */
/* What a worker wrote to a region through its own mapping is found before the region is used again. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <fcntl.h>
#include <ftw.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "service/latentd/store-internal.h"
#include "service/shared/cleanup.h"
#include "service/shared/memfd.h"

#define MIB (UINT64_C(1) << 20)
#define SIZE (3 * MIB + 777)
#define EPOCH 7

typedef struct Test {
        char directory[64];
        sd_event *event;
        Pool *pool;
        Config *config;
        Store *store;
        int fd;
        Region *region; /* loaded, with one reference */
        void *worker;   /* a worker's mapping of it */
} Test;

typedef struct Answer {
        int n, result;
        bool sound;
        Region *region;
        uint64_t bytes_read;
} Answer;

static void on_done(void *userdata, int r, Region *region, uint64_t bytes_read, const Fault *f) {
        *(Answer *) userdata = (Answer){.n = ((Answer *) userdata)->n + 1, .result = r, .region = region, .bytes_read = bytes_read};
}

static void on_checked(void *userdata, Region *region, bool sound) {
        *(Answer *) userdata = (Answer){.n = ((Answer *) userdata)->n + 1, .sound = sound, .region = region};
}

static void run_until(Test *t, const int *n) {
        while (*n == 0)
                assert_true(sd_event_run(t->event, 10 * 1000000) > 0);
}

static void get(Test *t, Answer *a) {
        NumaPolicy policy = {};
        StoreRequest *r;
        Fault f = {};

        *a = (Answer){};
        assert_int_equal(store_get(t->store, t->fd, "x.json", &policy, on_done, a, &r, &f), 0);
        run_until(t, &a->n);
}

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *ftw) {
        return remove(path);
}

static int setup(void **state) {
        CLEANUP_FREE char *bytes = calloc(1, SIZE);
        Test *t = calloc(1, sizeof(*t));
        char path[80];
        Answer a;

        (void) snprintf(t->directory, sizeof(t->directory), "/tmp/latentd-check-XXXXXX");
        if (!mkdtemp(t->directory) || config_new(&t->config) < 0 || sd_event_new(&t->event) < 0 ||
                pool_new(t->event, 2, &t->pool) < 0)
                return -1;
        t->config->cache_ram_max = 256 * MIB;
        t->config->cache_ram_reserve = 0;
        t->config->lock_memory = TRISTATE_NO;
        if (store_new(t->event, t->pool, t->config, &t->store) < 0)
                return -1;

        (void) snprintf(path, sizeof(path), "%s/x.json", t->directory);
        t->fd = open(path, O_CREAT | O_RDWR | O_CLOEXEC, 0600);
        for (uint64_t i = 0; i < SIZE; i++)
                bytes[i] = (char) (i * 31 + (i >> 10));
        assert_int_equal(write(t->fd, bytes, SIZE), SIZE);
        get(t, &a);
        assert_int_equal(a.result, 0);
        assert_int_equal(a.bytes_read, SIZE);
        t->region = a.region;
        t->region->worker_epoch = EPOCH;
        assert_int_equal(memfd_map(t->region->fd, t->region->size, PROT_READ | PROT_WRITE, &t->worker), 0);
        *state = t;
        return 0;
}

static int teardown(void **state) {
        Test *t = *state;

        (void) munmap(t->worker, region_memory_bytes(SIZE));
        store_free(t->store);
        pool_free(t->pool);
        sd_event_unref(t->event);
        config_free(t->config);
        (void) close(t->fd);
        (void) nftw(t->directory, remove_one, 8, FTW_DEPTH | FTW_PHYS);
        free(t);
        return 0;
}

static void store_get_unverified_and_sound_reads_nothing(void **state) {
        Test *t = *state;
        Answer a;

        store_distrust(t->store, EPOCH + 1); /* another worker's death */
        assert_false(t->region->unverified);
        store_distrust(t->store, EPOCH);
        assert_true(t->region->unverified);
        get(t, &a);
        assert_int_equal(a.result, 0);
        assert_int_equal(a.bytes_read, 0);
        assert_ptr_equal(a.region, t->region);
        assert_false(t->region->unverified);
        assert_int_equal(t->region->n_ref, 2);
}

/* One flipped bit anywhere: in the data, its last byte, behind its end, in the table, in the trailer. */
static void store_get_damaged_region_is_read_again(void **state) {
        Test *t = *state;
        const uint64_t data = region_data_bytes(SIZE);
        const uint64_t places[] = {0, MIB, SIZE - 1, SIZE, data + 4096, data + offsetof(RegionTrailer, identity)};

        for (size_t i = 0; i < ELEMENTSOF(places); i++) {
                uint64_t before = store_bytes(t->store);
                Region *old = t->region;
                Answer a;

                ((char *) t->worker)[places[i]] ^= 1;
                store_distrust(t->store, EPOCH);
                get(t, &a);
                assert_int_equal(a.result, 0);
                assert_int_equal(a.bytes_read, SIZE);
                assert_ptr_not_equal(a.region, old);
                assert_int_equal(old->state, REGION_DAMAGED);
                assert_int_equal(old->n_ref, 1);
                assert_int_equal(region_verify(a.region, 0, data), 0);

                /* It goes with its last user, and its memory with it. */
                (void) munmap(t->worker, old->size);
                store_region_unref(t->store, old);
                while (t->store->n_outstanding > 0)
                        assert_true(sd_event_run(t->event, 10 * 1000000) > 0);
                assert_int_equal(store_bytes(t->store), before);

                t->region = a.region;
                t->region->worker_epoch = EPOCH;
                assert_int_equal(memfd_map(t->region->fd, t->region->size, PROT_READ | PROT_WRITE, &t->worker), 0);
        }
}

static void store_check_is_shared_and_can_be_cancelled(void **state) {
        Test *t = *state;
        Answer a = {}, b = {}, c = {};
        StoreCheck *x, *y, *z;

        store_distrust(t->store, EPOCH);
        assert_int_equal(store_check(t->store, t->region, on_checked, &a, &x), 0);
        assert_int_equal(store_check(t->store, t->region, on_checked, &b, &y), 0);
        assert_int_equal(store_check(t->store, t->region, on_checked, &c, &z), 0);
        assert_null(store_check_cancel(y));
        assert_int_equal(a.n, 0);
        assert_int_equal(t->region->n_ref, 2); /* it cannot be evicted meanwhile */
        run_until(t, &c.n);
        assert_true(a.n == 1 && a.sound && c.sound && b.n == 0);
        assert_int_equal(t->region->n_ref, 1);

        /* What needs no check is answered too, from outside. */
        assert_int_equal(store_check(t->store, t->region, on_checked, &b, &y), 0);
        assert_int_equal(b.n, 0);
        run_until(t, &b.n);
        assert_true(b.sound);

        ((char *) t->worker)[5] ^= 0x10;
        store_distrust(t->store, EPOCH);
        a = b = (Answer){};
        assert_int_equal(store_check(t->store, t->region, on_checked, &a, &x), 0);
        assert_int_equal(store_check(t->store, t->region, on_checked, &b, &y), 0);
        run_until(t, &b.n);
        assert_false(a.sound || b.sound);
        assert_int_equal(t->region->state, REGION_DAMAGED);
        c = (Answer){};
        assert_int_equal(store_check(t->store, t->region, on_checked, &c, &z), 0);
        run_until(t, &c.n);
        assert_false(c.sound);
}

/* The pool still looks at it. */
static void store_free_during_a_check_leaves_nothing(void **state) {
        Test *t = *state;
        NumaPolicy policy = {};
        Answer a = {};
        StoreRequest *r;
        StoreCheck *x;
        Fault f = {};

        store_distrust(t->store, EPOCH);
        assert_int_equal(store_get(t->store, t->fd, "x.json", &policy, on_done, &a, &r, &f), 0);
        assert_int_equal(store_check(t->store, t->region, on_checked, &a, &x), 0);
        (void) store_check_cancel(x);
        (void) sd_event_run(t->event, 0);
        t->store = store_free(t->store);
        pool_free(t->pool);
        t->pool = NULL;
        assert_int_equal(a.n, 0);
}

static void store_excess_counts_what_is_to_go(void **state) {
        Test *t = *state;

        assert_int_equal(store_excess(t->store), 0);
        t->config->cache_ram_max = MIB;
        assert_int_equal(store_excess(t->store), region_memory_bytes(SIZE) - MIB);
        assert_int_equal(store_evict(t->store, store_excess(t->store)), 0); /* in use */
        store_region_unref(t->store, t->region);
        t->region->keep = true;
        assert_int_equal(store_evict(t->store, store_excess(t->store)), 0); /* pinned */
        t->region->keep = false;
        assert_int_equal(store_evict(t->store, store_excess(t->store)), region_memory_bytes(SIZE));
        assert_int_equal(store_excess(t->store), 0); /* it is on its way */
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, setup, teardown)

int main(void) {
        const struct CMUnitTest tests[] = {
                TEST(store_get_unverified_and_sound_reads_nothing),
                TEST(store_get_damaged_region_is_read_again),
                TEST(store_check_is_shared_and_can_be_cancelled),
                TEST(store_free_during_a_check_leaves_nothing),
                TEST(store_excess_counts_what_is_to_go),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
