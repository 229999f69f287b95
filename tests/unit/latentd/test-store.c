/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <fcntl.h>
#include <ftw.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "service/latentd/model.h"
#include "service/latentd/store-internal.h"
#include "service/shared/cleanup.h"
#include "service/shared/crc32c.h"
#include "service/shared/memfd.h"
#include "tests/unit/latentd/leaks.h"

#define MIB (UINT64_C(1) << 20)

typedef struct Test {
        char directory[64];
        sd_event *event;
        Pool *pool;
        Config *config;
        Store *store;
        NumaPolicy policy;
} Test;

typedef struct Answer {
        int n, result;
        Region *region;
        uint64_t bytes_read;
        Fault fault;
} Answer;

static void on_done(void *userdata, int r, Region *region, uint64_t bytes_read, const Fault *f) {
        Answer *a = userdata;

        a->n++;
        a->result = r;
        a->region = region;
        a->bytes_read = bytes_read;
        if (f)
                a->fault = *f;
}

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *ftw) {
        return remove(path);
}

static int setup(void **state) {
        const char *base = getenv("TMPDIR");
        Test *t = calloc(1, sizeof(*t));

        (void) snprintf(
                t->directory, sizeof(t->directory), "%.30s/latentd-store-XXXXXX", base ? base : "/tmp");
        if (!mkdtemp(t->directory) || config_new(&t->config) < 0 || sd_event_new(&t->event) < 0 ||
                pool_new(t->event, 3, &t->pool) < 0)
                return -1;
        t->config->cache_ram_max = 256 * MIB; /* what the machine has just now decides nothing */
        t->config->cache_ram_reserve = 0;
        t->config->lock_memory = TRISTATE_NO;
        if (store_new(t->event, t->pool, t->config, &t->store) < 0)
                return -1;
        t->store->piece_bytes = 2 * MIB;
        *state = t;
        return 0;
}

static int teardown(void **state) {
        Test *t = *state;

        store_free(t->store);
        pool_free(t->pool);
        sd_event_unref(t->event);
        config_free(t->config);
        (void) nftw(t->directory, remove_one, 8, FTW_DEPTH | FTW_PHYS);
        free(t);
        return 0;
}

static uint8_t content(uint64_t at) {
        return (uint8_t) ((at * 2654435761u >> 7) ^ (at >> 16) ^ 0x5a);
}

static int open_new(Test *t, const char *name) {
        char path[160];
        int fd;

        (void) snprintf(path, sizeof(path), "%s/%s", t->directory, name);
        fd = open(path, O_CREAT | O_TRUNC | O_RDWR | O_CLOEXEC, 0644);
        assert_true(fd >= 0);
        return fd;
}

static void write_all(int fd, const void *data, uint64_t size) {
        assert_int_equal(pwrite(fd, data, size, 0), size);
}

/* A file of `size` bytes. As .safetensors with a header that spans the rest, as anything else plain bytes.
 */
static int make_file(Test *t, const char *name, uint64_t size) {
        CLEANUP_FREE uint8_t *data = malloc(size + 1);
        int fd = open_new(t, name);

        for (uint64_t i = 0; i < size; i++)
                data[i] = content(i);

        if (strstr(name, ".safetensors")) {
                char header[256] = "{}";
                uint64_t n = 128;

                assert_true(size >= 8 + n || size == 10);
                if (size == 10)
                        n = 2;
                else
                        (void) snprintf(header, sizeof(header),
                                "{\"t\":{\"dtype\":\"U8\",\"shape\":[%llu],\"data_offsets\":[0,%llu]}}",
                                (unsigned long long) (size - 8 - n), (unsigned long long) (size - 8 - n));
                memcpy(data, &n, 8);
                memset(data + 8, ' ', n);
                memcpy(data + 8, header, strlen(header));
        }

        write_all(fd, data, size);
        assert_int_equal(fsync(fd), 0);
        return fd;
}

static StoreRequest *get(Test *t, int fd, const char *name, Answer *a) {
        StoreRequest *r = NULL;
        Fault f = {};

        *a = (Answer){};
        if (store_get(t->store, fd, name, &t->policy, on_done, a, &r, &f) < 0)
                fail_msg("%s: %s", name, f.text);
        assert_int_equal(a->n, 0);
        return r;
}

static void run(Test *t) {
        assert_true(sd_event_run(t->event, 60 * 1000000) > 0);
}

static void wait_for(Test *t, Answer *a) {
        while (a->n == 0)
                run(t);
        assert_int_equal(a->n, 1);
}

/* Until everything is given back. */
static void settle(Test *t) {
        while (t->store->n_outstanding > 0)
                run(t);
}

static void load(Test *t, int fd, const char *name, Answer *a) {
        (void) get(t, fd, name, a);
        wait_for(t, a);
}

/* The region holds the file, then zeros to the block, then a trailer that describes it. */
static void check_region(const Region *r, int fd) {
        const RegionTrailer *x = region_trailer(r);
        const uint8_t *map = r->map;
        CLEANUP_FREE uint8_t *data = NULL;
        struct stat st;

        assert_int_equal(fstat(fd, &st), 0);
        data = malloc((size_t) st.st_size);
        assert_int_equal(pread(fd, data, (size_t) st.st_size, 0), st.st_size);
        assert_memory_equal(map, data, (size_t) st.st_size);
        for (uint64_t i = (uint64_t) st.st_size; i < x->data_bytes; i++)
                assert_int_equal(map[i], 0);

        assert_int_equal(r->state, REGION_COMPLETE);
        assert_int_equal(memfd_check(r->fd, r->size), 0);
        assert_true(x->magic == REGION_MAGIC && x->complete == REGION_MAGIC);
        assert_int_equal(x->layout_version, 1);
        assert_int_equal(x->crc_block, MIB);
        assert_int_equal(x->identity.inode, st.st_ino);
        assert_int_equal(x->identity.size, st.st_size);
        assert_int_equal(x->data_bytes, ((uint64_t) st.st_size + 4095) / 4096 * 4096);
        assert_int_equal(x->crc_count, (x->data_bytes + MIB - 1) / MIB);
        assert_int_equal(x->crc_offset, x->data_bytes + 4096);
        assert_true(r->size >= x->crc_offset + 4 * x->crc_count && r->size % 4096 == 0);
        assert_int_equal(r->populated, r->size);
        assert_int_equal(r->read, st.st_size);

        for (uint64_t i = 0; i < x->crc_count; i++) {
                uint64_t n = x->data_bytes - i * MIB < MIB ? x->data_bytes - i * MIB : MIB;

                assert_int_equal(region_crc_table(r)[i], crc32c(0, map + i * MIB, n));
        }
}

static const struct {
        const char *name;
        uint64_t size;
} odd_sizes[] = {
        {"one.json", 1},
        {"empty.safetensors", 10},
        {"a.safetensors", 4095},
        {"b.safetensors", 4096},
        {"c.safetensors", 4097},
        {"d.safetensors", MIB + 777},
        {"e.safetensors", 5 * MIB + 1},
        {"f.safetensors", 6 * MIB},
        {"g.safetensors", 33 * MIB + 4096},
        {"config.json", 5000},
};

static void load_odd_sizes(Test *t) {
        for (size_t i = 0; i < ELEMENTSOF(odd_sizes); i++) {
                CLEANUP_CLOSE int fd = make_file(t, odd_sizes[i].name, odd_sizes[i].size);
                Answer a;

                load(t, fd, odd_sizes[i].name, &a);
                if (a.result < 0)
                        fail_msg("%s: %s", odd_sizes[i].name, a.fault.text);
                assert_int_equal(a.bytes_read, odd_sizes[i].size);
                check_region(a.region, fd);
                store_region_unref(t->store, a.region);
                /* The client's own descriptor is as it was. */
                assert_int_equal(fcntl(fd, F_GETFL) & O_DIRECT, 0);
        }
}

static void store_get_odd_sizes_are_byte_equal(void **state) {
        Test *t = *state;

        load_odd_sizes(t);
        settle(t);
        assert_int_equal(loader_ring_error(t->store->loader), 0);
}

/* A direct read of the last block may leave anything behind the end of the file. */
static void region_checksum_zeroes_behind_the_end(void **state) {
        const FileIdentity identity = {.size = MIB + 777};
        NumaPolicy policy = {.kind = NUMA_DEFAULT};
        Region *r = NULL;
        uint8_t *map;

        assert_int_equal(region_new(1, &identity, &policy, &r), 0);
        map = r->map;
        memset(map, 0xff, MIB + 4096);
        region_checksum(r, 0, MIB);
        assert_int_equal(map[MIB + 777], 0xff);
        region_checksum(r, MIB, MIB + 4096);
        assert_int_equal(map[MIB + 776], 0xff);
        for (uint64_t i = MIB + 777; i < MIB + 4096; i++)
                assert_int_equal(map[i], 0);
        assert_int_equal(region_crc_table(r)[0], crc32c(0, map, MIB));
        assert_int_equal(region_crc_table(r)[1], crc32c(0, map + MIB, 4096));
        assert_null(region_free(r));
}

/* Somebody who still holds it keeps no memory from coming back; one that is only freed is his as it was. */
static void region_scrap_gives_back_what_others_hold(void **state) {
        const FileIdentity identity = {.size = 5 * MIB + 777};
        NumaPolicy policy = {.kind = NUMA_DEFAULT};

        for (int scrap = 0; scrap < 2; scrap++) {
                Region *r = NULL;
                struct stat st;
                uint64_t size;
                uint8_t *map;
                int fd;

                assert_int_equal(region_new(1, &identity, &policy, &r), 0);
                size = r->size;
                memset(r->map, 0xff, size);
                fd = fcntl(r->fd, F_DUPFD_CLOEXEC, 3);
                assert_true(fd >= 0);
                map = mmap(NULL, size, PROT_READ, MAP_SHARED, fd, 0);
                assert_true(map != MAP_FAILED);

                assert_null(scrap ? region_scrap(r) : region_free(r));
                assert_int_equal(fstat(fd, &st), 0);
                assert_int_equal((uint64_t) st.st_size, size);
                assert_int_equal((uint64_t) st.st_blocks * 512, scrap ? 0 : size);
                for (uint64_t at = 0; at < size; at += 4096)
                        assert_int_equal(map[at], scrap ? 0 : 0xff);
                assert_int_equal(munmap(map, size), 0);
                assert_int_equal(close(fd), 0);
        }
}

static void region_memory_bytes_counts_blocks_and_trailer(void **state) {
        assert_int_equal(region_memory_bytes(0), 0);
        assert_int_equal(region_memory_bytes(UINT64_MAX), 0);
        assert_int_equal(region_memory_bytes(INT64_MAX), 0);
        assert_int_equal(region_data_bytes(1), 4096);
        assert_int_equal(region_data_bytes(4097), 8192);
        assert_int_equal(region_memory_bytes(1), 3 * 4096);
        assert_int_equal(region_memory_bytes(1024 * MIB), 1024 * MIB + 2 * 4096);
        assert_int_equal(region_memory_bytes(1024 * MIB + 1), 1024 * MIB + 4096 + 3 * 4096);
}

static void store_get_second_time_reads_nothing(void **state) {
        Test *t = *state;
        CLEANUP_CLOSE int fd = make_file(t, "x.safetensors", 3 * MIB + 5), again = -EBADF;
        uint64_t read_before;
        char path[160];
        Answer a, b;

        load(t, fd, "x.safetensors", &a);
        assert_int_equal(a.bytes_read, 3 * MIB + 5);
        read_before = store_bytes_read(t->store);
        assert_int_equal(read_before, 3 * MIB + 5);

        (void) snprintf(path, sizeof(path), "%s/x.safetensors", t->directory);
        again = open(path, O_RDONLY | O_CLOEXEC);
        load(t, again, "x.safetensors", &b);
        assert_int_equal(b.result, 0);
        assert_ptr_equal(a.region, b.region);
        assert_int_equal(b.bytes_read, 0);
        assert_int_equal(store_bytes_read(t->store), read_before);
        assert_int_equal(a.region->n_ref, 2);
}

static void store_get_other_policy_is_another_region(void **state) {
        Test *t = *state;
        CLEANUP_CLOSE int fd = make_file(t, "x.safetensors", 5000);
        Answer a, b;

        load(t, fd, "x.safetensors", &a);
        t->policy = (NumaPolicy){.kind = NUMA_BIND, .node = 0};
        load(t, fd, "x.safetensors", &b);
        assert_int_equal(b.result, 0);
        assert_ptr_not_equal(a.region, b.region);
        assert_int_equal(region_trailer(b.region)->numa_kind, NUMA_BIND);
        assert_int_equal(region_trailer(b.region)->numa_node, 0);
        check_region(b.region, fd);
}

static void store_get_at_once_twice_is_one_load(void **state) {
        Test *t = *state;
        CLEANUP_CLOSE int fd = make_file(t, "x.safetensors", 9 * MIB + 1);
        Answer a, b;

        (void) get(t, fd, "x.safetensors", &a);
        (void) get(t, fd, "x.safetensors", &b);
        wait_for(t, &a);
        wait_for(t, &b);
        assert_int_equal(a.result, 0);
        assert_int_equal(b.result, 0);
        assert_ptr_equal(a.region, b.region);
        assert_int_equal(a.region->n_ref, 2);
        assert_int_equal(store_bytes_read(t->store), 9 * MIB + 1);
        assert_int_equal(a.bytes_read + b.bytes_read, 9 * MIB + 1);
}

static void store_get_many_files_at_once_are_all_right(void **state) {
        Test *t = *state;
        enum { N = 12 };
        Answer a[N];
        int fds[N];

        for (int i = 0; i < N; i++) {
                char name[32];

                (void) snprintf(name, sizeof(name), "%d.safetensors", i);
                fds[i] = make_file(t, name, 2 * MIB + 1000 * (uint64_t) i);
                (void) get(t, fds[i], name, &a[i]);
        }
        for (int i = 0; i < N; i++) {
                wait_for(t, &a[i]);
                assert_int_equal(a[i].result, 0);
                check_region(a[i].region, fds[i]);
                (void) close(fds[i]);
        }
}

static void store_promised_is_what_running_loads_will_still_take(void **state) {
        Test *t = *state;
        CLEANUP_CLOSE int fd = make_file(t, "x.safetensors", 9 * MIB);
        Answer a;

        assert_int_equal(store_promised(t->store), 0);
        (void) get(t, fd, "x.safetensors", &a);
        while (!t->store->regions)
                run(t);
        assert_int_equal(
                store_promised(t->store), region_memory_bytes(9 * MIB) - t->store->regions->populated);
        while (a.n == 0) {
                assert_int_equal(store_promised(t->store) + store_bytes(t->store),
                        region_memory_bytes(9 * MIB));
                run(t);
        }
        assert_int_equal(a.result, 0);
        assert_int_equal(store_promised(t->store), 0);
}

/* At every moment of a load: after k turns of the loop. */
static void store_request_cancel_at_any_time_frees_everything(void **state) {
        Test *t = *state;
        CLEANUP_CLOSE int fd = make_file(t, "x.safetensors", 24 * MIB + 1);
        uint64_t rss = shared_memory();
        unsigned fds = count_fds(), finished = 0;

        for (unsigned k = 0; k < 60; k++) {
                StoreRequest *r;
                Answer a;

                r = get(t, fd, "x.safetensors", &a);
                for (unsigned i = 0; i < k && a.n == 0; i++)
                        run(t);
                if (a.n > 0) {
                        assert_int_equal(a.result, 0);
                        store_region_unref(t->store, a.region);
                        assert_true(store_drop(t->store, a.region) > 0);
                        finished++;
                } else
                        assert_null(store_request_cancel(r));
                settle(t);

                if (a.n == 0 || k >= 59)
                        assert_int_equal(a.n, k >= 59 ? a.n : 0);
                assert_null(store_first(t->store));
                assert_int_equal(store_bytes(t->store), 0);
                assert_int_equal(count_fds(), fds);
                assert_in_range(shared_memory(), 0, rss + 64 * 1024);
        }
        assert_in_range(finished, 0, 58); /* else nothing was cancelled on its way */
}

static void store_request_cancel_one_of_two_lets_the_other_finish(void **state) {
        Test *t = *state;
        CLEANUP_CLOSE int fd = make_file(t, "x.safetensors", 9 * MIB);
        StoreRequest *r;
        Answer a, b;

        r = get(t, fd, "x.safetensors", &a);
        (void) get(t, fd, "x.safetensors", &b);
        while (!t->store->regions)
                run(t);
        assert_null(store_request_cancel(r));
        wait_for(t, &b);
        assert_int_equal(a.n, 0);
        assert_int_equal(b.result, 0);
        assert_int_equal(b.bytes_read, 9 * MIB);
        check_region(b.region, fd);
}

static void store_get_after_a_cancelled_load_loads_anew(void **state) {
        Test *t = *state;
        CLEANUP_CLOSE int fd = make_file(t, "x.safetensors", 9 * MIB);
        StoreRequest *r;
        Answer a, b;

        r = get(t, fd, "x.safetensors", &a);
        while (!t->store->regions)
                run(t);
        assert_null(store_request_cancel(r));
        load(t, fd, "x.safetensors", &b);
        assert_int_equal(b.result, 0);
        check_region(b.region, fd);
        settle(t);
        assert_ptr_equal(store_first(t->store), b.region);
        assert_null(b.region->next);
}

static void store_request_progress_ends_at_the_size(void **state) {
        Test *t = *state;
        CLEANUP_CLOSE int fd = make_file(t, "x.safetensors", 12 * MIB + 3);
        uint64_t done, total, last = 0;
        StoreRequest *r;
        Answer a;

        r = get(t, fd, "x.safetensors", &a);
        for (;;) {
                run(t);
                if (a.n > 0)
                        break;
                store_request_progress(r, &done, &total);
                assert_true(done >= last && done <= 12 * MIB + 3);
                assert_true(total == 12 * MIB + 3 || (total == 0 && done == 0));
                last = done;
        }
        assert_true(last > 0);
        assert_int_equal(a.result, 0);
}

/* What store_get() says of the content, or nothing where that is not to blame. */
static void check_look(Test *t, int fd, const char *name, const Answer *got) {
        bool bad = strcmp(got->fault.name, FAULT_INVALID_FILE) == 0;
        StoreRequest *r = NULL;
        Answer a = {};
        Fault f = {};

        assert_int_equal(store_look(t->store, fd, name, on_done, &a, &r, &f), 0);
        wait_for(t, &a);
        assert_null(a.region);
        assert_int_equal(a.result, bad ? got->result : 0);
        assert_string_equal(a.fault.text, bad ? got->fault.text : "");
}

static void expect_refused(Test *t, int fd, const char *name, const char *fault, const char *text) {
        uint64_t rss = shared_memory();
        unsigned fds = count_fds();
        Answer a;

        load(t, fd, name, &a);
        check_look(t, fd, name, &a);
        assert_true(a.result < 0);
        assert_null(a.region);
        if (strcmp(a.fault.name, fault) != 0 || !strstr(a.fault.text, text) || !strstr(a.fault.text, name))
                fail_msg("%s: %s: %s", name, a.fault.name, a.fault.text);
        settle(t);
        assert_null(store_first(t->store));
        assert_int_equal(store_bytes(t->store), 0);
        assert_int_equal(t->store->next_id, 1); /* no region was ever made */
        assert_int_equal(count_fds(), fds);
        assert_int_equal(shared_memory(), rss);
}

static void store_get_hostile_header_allocates_nothing(void **state) {
        Test *t = *state;
        static const struct {
                const char *name, *header, *text;
                uint64_t length;
        } cases[] = {
                {"long.safetensors", "{}", "", UINT64_C(1) << 40},
                {"json.safetensors", "{\"a\":", "", 5},
                {"hole.safetensors", "{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[4,8]}}", "",
                        0},
                {"type.safetensors", "{\"a\":{\"dtype\":\"Q4_K\",\"shape\":[4],\"data_offsets\":[0,4]}}", "",
                        0},
                {"big.safetensors",
                        "{\"a\":{\"dtype\":\"F32\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,4]}"
                        "}",
                        "", 0},
        };

        for (size_t i = 0; i < ELEMENTSOF(cases); i++) {
                CLEANUP_CLOSE int fd = open_new(t, cases[i].name);
                uint64_t n = cases[i].length > 0 ? cases[i].length : strlen(cases[i].header);
                char data[512] = {};

                memcpy(data, &n, 8);
                memcpy(data + 8, cases[i].header, strlen(cases[i].header));
                write_all(fd, data, 8 + strlen(cases[i].header) + 8);
                expect_refused(t, fd, cases[i].name, FAULT_INVALID_FILE, cases[i].text);
        }
}

static void store_get_empty_and_oversized_files_are_refused(void **state) {
        Test *t = *state;
        CLEANUP_CLOSE int empty = open_new(t, "empty.json"), weights = open_new(t, "empty.safetensors"),
                          large = open_new(t, "large.json");

        expect_refused(t, empty, "empty.json", FAULT_INVALID_FILE, "empty");
        expect_refused(t, weights, "empty.safetensors", FAULT_INVALID_FILE, "empty");
        assert_int_equal(ftruncate(large, 100000001), 0);
        expect_refused(t, large, "large.json", FAULT_INVALID_FILE, "100000000");
}

static void store_get_what_is_no_regular_file_is_refused_at_once(void **state) {
        Test *t = *state;
        CLEANUP_CLOSE int directory = open(t->directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC),
                          null = open("/dev/null", O_RDONLY | O_CLOEXEC), memory = -EBADF,
                          write_only = -EBADF, path_only = -EBADF;
        CLEANUP_CLOSE int pipe_read = -EBADF, pipe_write = -EBADF;
        StoreRequest *r = NULL;
        char path[160];
        int p[2];

        assert_int_equal(pipe2(p, O_CLOEXEC), 0);
        pipe_read = p[0];
        pipe_write = p[1];
        (void) close(make_file(t, "x.safetensors", 4096));
        (void) snprintf(path, sizeof(path), "%s/x.safetensors", t->directory);
        write_only = open(path, O_WRONLY | O_CLOEXEC);
        path_only = open(path, O_PATH | O_CLOEXEC);
        assert_int_equal(memfd_new("test", 4096, &memory), 0);

        const struct {
                int fd;
                const char *fault, *text;
        } cases[] = {
                {directory, FAULT_INVALID_FILE, "directory"},
                {null, FAULT_INVALID_FILE, "character device"},
                {pipe_read, FAULT_INVALID_FILE, "pipe"},
                {write_only, FAULT_ACCESS_DENIED, "O_RDONLY"},
                {path_only, FAULT_ACCESS_DENIED, "O_RDONLY"},
                {memory, FAULT_ACCESS_DENIED, "mount table"},
                {-1, FAULT_INVALID_ARGUMENT, "descriptor"},
        };
        for (size_t i = 0; i < ELEMENTSOF(cases); i++) {
                Answer a = {};
                Fault f = {};

                assert_true(store_get(t->store, cases[i].fd, "thing", &t->policy, on_done, &a, &r, &f) < 0);
                if (strcmp(f.name, cases[i].fault) != 0 || !strstr(f.text, cases[i].text))
                        fail_msg("%zu: %s: %s", i, f.name, f.text);
                assert_null(r);
        }
        assert_int_equal(t->store->n_outstanding, 0);
}

static void store_look_file_cut_by_a_byte_is_named(void **state) {
        Test *t = *state;
        CLEANUP_CLOSE int fd = make_file(t, "x.safetensors", 4096);

        check_look(t, fd, "x.safetensors", &(Answer){});
        assert_int_equal(ftruncate(fd, 4095), 0);
        expect_refused(t, fd, "x.safetensors", FAULT_INVALID_FILE, "");
}

static void store_look_cancelled_says_nothing(void **state) {
        Test *t = *state;
        CLEANUP_CLOSE int fd = make_file(t, "x.safetensors", 4096);
        StoreRequest *r = NULL;
        Answer a = {};

        assert_int_equal(store_look(t->store, fd, "x.safetensors", on_done, &a, &r, NULL), 0);
        assert_null(store_request_cancel(r));
        settle(t);
        assert_int_equal(a.n, 0);
}

static void store_get_beyond_the_limit_does_not_fit(void **state) {
        Test *t = *state;
        CLEANUP_CLOSE int fd = make_file(t, "x.safetensors", 9 * MIB);

        t->config->cache_ram_max = 8 * MIB;
        expect_refused(t, fd, "x.safetensors", FAULT_DOES_NOT_FIT, "CacheRamMax");
}

static void store_get_two_loads_are_never_promised_the_same_memory(void **state) {
        Test *t = *state;
        CLEANUP_CLOSE int x = make_file(t, "x.safetensors", 9 * MIB),
                          y = make_file(t, "y.safetensors", 9 * MIB);
        Answer a, b;

        t->config->cache_ram_max = 16 * MIB;
        (void) get(t, x, "x.safetensors", &a);
        (void) get(t, y, "y.safetensors", &b);
        while (a.n + b.n < 2) {
                run(t);
                assert_in_range(store_bytes(t->store), 0, 16 * MIB);
        }
        assert_true((a.result == 0) != (b.result == 0));
        assert_int_equal(t->store->next_id, 2); /* the other one never began */
        assert_string_equal(a.result < 0 ? a.fault.name : b.fault.name, FAULT_DOES_NOT_FIT);
}

static void store_get_arenas_count(void **state) {
        Test *t = *state;
        CLEANUP_CLOSE int fd = make_file(t, "x.safetensors", 9 * MIB);
        Answer a;

        t->config->cache_ram_max = 16 * MIB;
        store_set_other_bytes(t->store, 10 * MIB);
        expect_refused(t, fd, "x.safetensors", FAULT_DOES_NOT_FIT, "CacheRamMax");
        store_set_other_bytes(t->store, 6 * MIB);
        load(t, fd, "x.safetensors", &a);
        assert_int_equal(a.result, 0);
}

/* Descriptors run out long before memory does when files are small. */
static void store_get_more_files_than_descriptors_evicts_or_is_refused(void **state) {
        Test *t = *state;
        int fds[4];
        Answer a[4];

        t->store->regions_max = 2;
        for (int i = 0; i < 4; i++) {
                char name[32];

                (void) snprintf(name, sizeof(name), "%d.safetensors", i);
                fds[i] = make_file(t, name, 4096);
        }
        for (int i = 0; i < 2; i++) {
                load(t, fds[i], "x.safetensors", &a[i]);
                assert_int_equal(a[i].result, 0);
        }

        load(t, fds[2], "x.safetensors", &a[2]);
        assert_string_equal(a[2].fault.name, FAULT_LIMIT);
        assert_non_null(strstr(a[2].fault.text, "LimitNOFILE"));
        store_region_unref(t->store, a[0].region);
        load(t, fds[2], "x.safetensors", &a[2]);
        assert_int_equal(a[2].result, 0);
        for (Region *r = store_first(t->store); r; r = r->next)
                assert_ptr_not_equal(r, a[0].region);
        for (int i = 0; i < 4; i++)
                (void) close(fds[i]);
}

/* Conditioners before VAEs before denoisers, whenever they were used. */
static void store_evict_takes_what_is_given_up_most_easily(void **state) {
        Test *t = *state;
        static const uint32_t kinds[] = {WIRE_MODEL_DENOISER, WIRE_MODEL_AUDIO_VAE, WIRE_MODEL_CONDITIONER, WIRE_MODEL_VIDEO_VAE,
                WIRE_MODEL_CONDITIONER};
        static const int order[] = {2, 4, 1, 3, 0};
        Region *regions[5];
        Answer a;

        for (int i = 0; i < 5; i++) {
                char name[32];
                int fd;

                (void) snprintf(name, sizeof(name), "%d.safetensors", i);
                fd = make_file(t, name, MIB);
                load(t, fd, "x.safetensors", &a);
                assert_int_equal(a.result, 0);
                regions[i] = a.region;
                regions[i]->ease = model_ease(kinds[i]);
                (void) close(fd);
        }
        for (int i = 0; i < 5; i++)
                store_region_unref(t->store, regions[i]);

        for (size_t k = 0; k < ELEMENTSOF(order); k++) {
                unsigned n = 0;

                assert_true(store_evict(t->store, 1) > 0);
                for (Region *r = store_first(t->store); r; r = r->next) {
                        n++;
                        for (size_t i = 0; i <= k; i++)
                                assert_ptr_not_equal(r, regions[order[i]]);
                }
                assert_int_equal(n, 4 - k);
        }
}

static void store_get_evicts_the_least_recently_used(void **state) {
        Test *t = *state;
        int fds[5];
        Answer a[5];
        Region *kept;

        t->config->cache_ram_max = 13 * MIB; /* four of 3 MiB and their trailers */
        for (int i = 0; i < 5; i++) {
                char name[32];

                (void) snprintf(name, sizeof(name), "%d.safetensors", i);
                fds[i] = make_file(t, name, 3 * MIB);
        }
        for (int i = 0; i < 4; i++) {
                load(t, fds[i], "x.safetensors", &a[i]);
                assert_int_equal(a[i].result, 0);
        }

        /* 0 in use, 1 kept, 2 used again after 3: 3 has to go. */
        kept = a[1].region;
        kept->keep = true;
        store_region_unref(t->store, a[1].region);
        store_region_unref(t->store, a[2].region);
        store_region_unref(t->store, a[3].region);
        load(t, fds[2], "x.safetensors", &a[2]);
        assert_int_equal(a[2].bytes_read, 0);
        store_region_unref(t->store, a[2].region);

        load(t, fds[4], "x.safetensors", &a[4]);
        assert_int_equal(a[4].result, 0);
        for (Region *r = store_first(t->store); r; r = r->next)
                assert_ptr_not_equal(r, a[3].region);
        load(t, fds[2], "x.safetensors", &a[2]);
        assert_int_equal(a[2].bytes_read, 0);

        /* Now only 1 is without users, and it is kept: nothing more fits. */
        load(t, fds[3], "x.safetensors", &a[3]);
        assert_string_equal(a[3].fault.name, FAULT_DOES_NOT_FIT);
        assert_int_equal(store_evict(t->store, UINT64_MAX), 0);
        assert_true(store_drop(t->store, kept) > 0);
        load(t, fds[3], "x.safetensors", &a[3]);
        assert_int_equal(a[3].result, 0);

        assert_int_equal(store_drop(t->store, a[0].region), 0); /* in use */
        for (int i = 0; i < 5; i++)
                (void) close(fds[i]);
}

static void store_get_file_changed_during_the_load_is_refused(void **state) {
        Test *t = *state;
        CLEANUP_CLOSE int fd = make_file(t, "x.safetensors", 12 * MIB);
        uint8_t byte = 1;
        Answer a;

        (void) get(t, fd, "x.safetensors", &a);
        while (!t->store->regions)
                run(t);
        assert_int_equal(pwrite(fd, &byte, 1, 11 * MIB), 1);
        wait_for(t, &a);
        assert_int_equal(a.result, -ESTALE);
        assert_string_equal(a.fault.name, FAULT_FILE_CHANGED);
        settle(t);
        assert_null(store_first(t->store));
        assert_int_equal(store_bytes(t->store), 0);

        load(t, fd, "x.safetensors", &a);
        assert_int_equal(a.result, 0);
        check_region(a.region, fd);
}

static void store_get_file_cut_during_the_load_is_refused(void **state) {
        Test *t = *state;
        CLEANUP_CLOSE int fd = make_file(t, "x.safetensors", 12 * MIB);
        Answer a;

        (void) get(t, fd, "x.safetensors", &a);
        while (!t->store->regions)
                run(t);
        assert_int_equal(ftruncate(fd, 5 * MIB + 777), 0);
        wait_for(t, &a);
        assert_int_equal(a.result, -ESTALE);
        assert_string_equal(a.fault.name, FAULT_FILE_CHANGED);
        assert_non_null(strstr(a.fault.text, "truncated"));
}

static void store_get_restored_mtime_does_not_hit(void **state) {
        Test *t = *state;
        CLEANUP_CLOSE int fd = make_file(t, "x.safetensors", 5000);
        struct timespec times[2];
        struct stat st;
        Answer a, b;

        load(t, fd, "x.safetensors", &a);
        assert_int_equal(fstat(fd, &st), 0);
        (void) usleep(20000); /* more than a tick of the file system's clock */
        assert_int_equal(pwrite(fd, "X", 1, 4000), 1);
        times[0] = st.st_atim;
        times[1] = st.st_mtim;
        assert_int_equal(futimens(fd, times), 0);

        load(t, fd, "x.safetensors", &b);
        assert_int_equal(b.result, 0);
        assert_ptr_not_equal(a.region, b.region);
        assert_int_equal(((char *) b.region->map)[4000], 'X');
}

/* A read that does not answer (a pipe that nobody writes to, put in the file's place) costs its memory until
 * it does, not the service. */
static void store_get_stalled_read_is_given_up(void **state) {
        Test *t = *state;
        CLEANUP_CLOSE int fd = make_file(t, "x.safetensors", 9 * MIB), pipe_read = -EBADF,
                          pipe_write = -EBADF;
        Region *dead;
        Answer a;
        int p[2];

        assert_int_equal(pipe2(p, O_CLOEXEC), 0);
        pipe_read = p[0];
        pipe_write = p[1];
        loader_free(t->store->loader);
        assert_int_equal(loader_new(t->event, &file_io_system, 200000, &t->store->loader), 0);

        (void) get(t, fd, "x.safetensors", &a);
        while (!t->store->regions)
                run(t);
        assert_true(dup3(pipe_read, TAILQ_FIRST(&t->store->loads)->source.fd, O_CLOEXEC) >= 0);
        wait_for(t, &a);
        assert_int_equal(a.result, -ETIMEDOUT);
        assert_string_equal(a.fault.name, FAULT_IO);
        assert_non_null(strstr(a.fault.text, "no data"));
        settle(t);

        dead = store_first(t->store);
        assert_int_equal(dead->state, REGION_DEAD);
        assert_int_equal(store_bytes(t->store), dead->populated);
        assert_int_equal(store_evict(t->store, UINT64_MAX), 0);
        assert_int_equal(store_drop(t->store, dead), 0);
        assert_int_equal(store_stuck(t->store), 1);

        load(t, fd, "x.safetensors", &a);
        assert_int_equal(a.result, 0);
        assert_ptr_not_equal(a.region, dead);
        check_region(a.region, fd);
        store_region_unref(t->store, a.region);
        assert_true(store_drop(t->store, a.region) > 0);
        settle(t);
        assert_int_equal(store_bytes(t->store), dead->populated);

        ((volatile char *) dead->map)[MIB] = 1;
        assert_int_equal(write(pipe_write, "late", 4), 4); /* may still land there */
        cleanup_closep(&pipe_write);                       /* and the others are at an end */
        while (store_stuck(t->store) > 0)
                run(t);
        settle(t);
        assert_null(store_first(t->store));
        assert_int_equal(store_bytes(t->store), 0);
}

/* A file system that answers nothing from some question on, until it is told to. */
static struct {
        pthread_mutex_t lock;
        pthread_cond_t open;
        bool closed;
        unsigned n_left; /* questions that are still answered */
} gate = {.lock = PTHREAD_MUTEX_INITIALIZER, .open = PTHREAD_COND_INITIALIZER};

static void gate_set(bool closed, unsigned n_left) {
        (void) pthread_mutex_lock(&gate.lock);
        gate.closed = closed;
        gate.n_left = n_left;
        (void) pthread_cond_broadcast(&gate.open);
        (void) pthread_mutex_unlock(&gate.lock);
}

static void gate_pass(void) {
        (void) pthread_mutex_lock(&gate.lock);
        if (gate.n_left > 0)
                gate.n_left--;
        else
                while (gate.closed)
                        (void) pthread_cond_wait(&gate.open, &gate.lock);
        (void) pthread_mutex_unlock(&gate.lock);
}

static int gate_fstat(int fd, struct stat *ret) {
        gate_pass();
        return file_io_system.fstat(fd, ret);
}

static int gate_open(const char *path, int flags) {
        gate_pass();
        return file_io_system.open(path, flags);
}

static ssize_t gate_pread(int fd, void *buffer, size_t size, off_t offset) {
        gate_pass();
        return file_io_system.pread(fd, buffer, size, offset);
}

static void use_gate(Test *t, FileIo *io) {
        *io = file_io_system;
        io->fstat = gate_fstat;
        io->open = gate_open;
        io->pread = gate_pread;
        t->store->io = io;
        t->store->file_jobs = file_jobs_free(t->store->file_jobs);
        assert_int_equal(file_jobs_new(t->event, 500000, &t->store->file_jobs), 0);
}

/* fstat() at the beginning, open(), the header's read, fstat() at the end: each hangs once. */
static void store_get_silent_file_system_is_given_up_and_comes_back(void **state) {
        Test *t = *state;
        CLEANUP_CLOSE int fd = make_file(t, "x.safetensors", 3 * MIB);
        unsigned fds = count_fds();
        FileIo io;
        Answer a;

        use_gate(t, &io);
        (void) usleep(50000); /* the file's times are no doubt any more: one fstat() */
        for (unsigned n = 0; n < 4; n++) {
                gate_set(true, n);
                (void) get(t, fd, "x.safetensors", &a);
                wait_for(t, &a);
                assert_int_equal(a.result, -ETIMEDOUT);
                assert_string_equal(a.fault.name, FAULT_IO);
                assert_non_null(strstr(a.fault.text, "x.safetensors"));
                assert_non_null(strstr(a.fault.text, "gave no answer"));
                settle(t);
                assert_int_equal(store_stuck(t->store), 1);
                assert_true(count_fds() > fds);
                assert_int_equal(store_bytes(t->store) > 0, n == 3);

                gate_set(false, 0);
                while (store_stuck(t->store) > 0)
                        run(t);
                settle(t);
                assert_int_equal(store_bytes(t->store), 0);
                assert_null(store_first(t->store));
                assert_int_equal(count_fds(), fds);
        }
        load(t, fd, "x.safetensors", &a);
        assert_int_equal(a.result, 0);
        check_region(a.region, fd);
}

/* Some show that it is of no use: more are refused at once, until they come back. Cancelled ones count too. */
static void store_get_silent_file_system_more_loads_are_refused(void **state) {
        Test *t = *state;
        CLEANUP_CLOSE int fd = make_file(t, "x.safetensors", MIB);
        StoreRequest *r = NULL;
        Fault f = {};
        Answer a[4];
        FileIo io;

        use_gate(t, &io);
        (void) usleep(50000);
        gate_set(true, 0);
        for (int i = 0; i < 4; i++) {
                r = get(t, fd, "x.safetensors", &a[i]);
                if (i == 3)
                        (void) store_request_cancel(r);
        }
        while (store_stuck(t->store) < 4)
                run(t);
        for (int i = 0; i < 3; i++)
                assert_int_equal(a[i].result, -ETIMEDOUT);
        assert_int_equal(a[3].n, 0);

        assert_int_equal(store_get(t->store, fd, "y.safetensors", &t->policy, on_done, &a[0], &r, &f), -ETIMEDOUT);
        assert_string_equal(f.name, FAULT_IO);
        assert_non_null(strstr(f.text, "y.safetensors: 4 reads"));

        gate_set(false, 0);
        while (store_stuck(t->store) > 0)
                run(t);
        load(t, fd, "y.safetensors", &a[0]);
        assert_int_equal(a[0].result, 0);
}

/* The service ends while something is stuck: it does not wait for ever, and what comes back finds its place. */
static void store_free_with_a_silent_file_system_ends(void **state) {
        Test *t = *state;
        CLEANUP_CLOSE int fd = make_file(t, "x.safetensors", MIB);
        static FileJobs *kept_jobs; /* by threads */
        static Store *kept;
        static FileIo io;
        Answer a;

        kept = t->store;
        use_gate(t, &io);
        kept_jobs = t->store->file_jobs;
        (void) usleep(50000);
        for (unsigned n = 0; n < 2; n++) {
                gate_set(true, n);
                (void) get(t, fd, "x.safetensors", &a);
                wait_for(t, &a);
                assert_int_equal(a.result, -ETIMEDOUT);
        }
        (void) get(t, fd, "x.safetensors", &a); /* not known to be stuck yet */
        store_free(t->store);
        assert_int_equal(a.n, 0);
        assert_true(kept && kept_jobs);
        gate_set(false, 0);
        (void) usleep(50000);
        assert_int_equal(store_new(t->event, t->pool, t->config, &t->store), 0);
}

static void store_get_locks_memory_if_it_may(void **state) {
        Test *t = *state;
        CLEANUP_CLOSE int fd = make_file(t, "x.safetensors", MIB);
        Answer a;

        t->config->lock_memory = TRISTATE_AUTO;
        load(t, fd, "x.safetensors", &a);
        assert_int_equal(a.result, 0);
        if (a.region->lock_error == 0)
                assert_int_equal(a.region->locked_bytes, a.region->size);
        else
                assert_int_equal(a.region->locked_bytes, 0);
        assert_true(a.region->node_bytes[0] > 0);
}

static void store_free_in_the_middle_leaves_nothing(void **state) {
        Test *t = *state;
        CLEANUP_CLOSE int fd = make_file(t, "x.safetensors", 24 * MIB),
                          other = make_file(t, "y.safetensors", 3 * MIB);
        unsigned fds = count_fds();
        uint64_t rss = shared_memory();

        for (unsigned k = 0; k < 12; k++) {
                Answer a, b, c;

                load(t, other, "y.safetensors", &a);
                (void) get(t, fd, "x.safetensors", &b);
                for (unsigned i = 0; i < k && b.n == 0; i++)
                        run(t);
                (void) get(t, fd, "x.safetensors", &c);

                store_free(t->store);
                pool_free(t->pool);
                assert_in_range(shared_memory(), 0, rss + 64 * 1024);
                assert_int_equal(pool_new(t->event, 3, &t->pool), 0);
                assert_int_equal(store_new(t->event, t->pool, t->config, &t->store), 0);
                t->store->piece_bytes = 2 * MIB;
                assert_int_equal(count_fds(), fds);
        }
}

static int refuse_io_uring(int error) {
        struct sock_filter filter[] = {
                BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
                BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_setup, 0, 1),
                BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (unsigned) error),
                BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        };
        struct sock_fprog program = {.len = ELEMENTSOF(filter), .filter = filter};

        if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0 ||
                prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) < 0)
                return -errno;

        return 0;
}

/* The child has its own service; what it asserts ends in its exit status. */
static int child_without_ring(int error) {
        void *state = NULL;
        Test *t;
        int r;

        if (refuse_io_uring(error) < 0)
                return 77;
        if (setup(&state) < 0)
                return 2;
        t = state;
        if (loader_ring_error(t->store->loader) != -error)
                return 3;
        for (size_t i = 0; i < ELEMENTSOF(odd_sizes); i++) {
                CLEANUP_CLOSE int fd = make_file(t, odd_sizes[i].name, odd_sizes[i].size);
                CLEANUP_FREE uint8_t *data = malloc(odd_sizes[i].size);
                StoreRequest *q;
                Answer a = {};
                Fault f = {};

                if (store_get(t->store, fd, odd_sizes[i].name, &t->policy, on_done, &a, &q, &f) < 0)
                        return 4;
                while (a.n == 0)
                        run(t);
                if (a.result < 0 || pread(fd, data, odd_sizes[i].size, 0) != (ssize_t) odd_sizes[i].size ||
                        memcmp(data, a.region->map, odd_sizes[i].size) != 0 ||
                        region_trailer(a.region)->complete != REGION_MAGIC)
                        return 5;
                store_region_unref(t->store, a.region);
        }

        r = teardown(&state);
        return r < 0 ? 6 : 0;
}

static void store_get_without_io_uring_gives_the_same_bytes(void **state) {
        static const int errors[] = {EPERM, ENOSYS, ENOMEM};

        for (size_t i = 0; i < ELEMENTSOF(errors); i++) {
                pid_t pid = fork();
                int status;

                assert_true(pid >= 0);
                if (pid == 0)
                        _exit(child_without_ring(errors[i]));
                assert_int_equal(waitpid(pid, &status, 0), pid);
                assert_true(WIFEXITED(status));
                if (WEXITSTATUS(status) == 77)
                        skip();
                assert_int_equal(WEXITSTATUS(status), 0);
        }
}

int main(void) {
#define TEST(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
        const struct CMUnitTest tests[] = {
                /* Before any thread was ever started: a child of fork() has only one. */
                cmocka_unit_test(store_get_without_io_uring_gives_the_same_bytes),
                TEST(store_get_odd_sizes_are_byte_equal),
                cmocka_unit_test(region_checksum_zeroes_behind_the_end),
                cmocka_unit_test(region_scrap_gives_back_what_others_hold),
                cmocka_unit_test(region_memory_bytes_counts_blocks_and_trailer),
                TEST(store_get_second_time_reads_nothing),
                TEST(store_get_other_policy_is_another_region),
                TEST(store_get_at_once_twice_is_one_load),
                TEST(store_get_many_files_at_once_are_all_right),
                TEST(store_promised_is_what_running_loads_will_still_take),
                TEST(store_request_cancel_at_any_time_frees_everything),
                TEST(store_request_cancel_one_of_two_lets_the_other_finish),
                TEST(store_get_after_a_cancelled_load_loads_anew),
                TEST(store_request_progress_ends_at_the_size),
                TEST(store_get_hostile_header_allocates_nothing),
                TEST(store_get_empty_and_oversized_files_are_refused),
                TEST(store_get_what_is_no_regular_file_is_refused_at_once),
                TEST(store_look_file_cut_by_a_byte_is_named),
                TEST(store_look_cancelled_says_nothing),
                TEST(store_get_beyond_the_limit_does_not_fit),
                TEST(store_get_two_loads_are_never_promised_the_same_memory),
                TEST(store_get_arenas_count),
                TEST(store_get_more_files_than_descriptors_evicts_or_is_refused),
                TEST(store_get_evicts_the_least_recently_used),
                TEST(store_evict_takes_what_is_given_up_most_easily),
                TEST(store_get_file_changed_during_the_load_is_refused),
                TEST(store_get_file_cut_during_the_load_is_refused),
                TEST(store_get_restored_mtime_does_not_hit),
                TEST(store_get_stalled_read_is_given_up),
                TEST(store_get_silent_file_system_is_given_up_and_comes_back),
                TEST(store_get_silent_file_system_more_loads_are_refused),
                TEST(store_free_with_a_silent_file_system_ends),
                TEST(store_get_locks_memory_if_it_may),
                TEST(store_free_in_the_middle_leaves_nothing),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
