/* SPDX-License-Identifier: Apache-2.0 */
/* Loads through a table of system calls that fail: whatever the disk does, the outcome is the file's bytes
 * or a named error that fits, and nothing is left behind. Faults one by one, then drawn at random
 * (LATENT_FAULT_SEEDS: how many loads, 100 if it is not set). */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <liburing.h>

#include "service/latentd/loader-read.h"
#include "service/latentd/store-internal.h"
#include "service/shared/cleanup.h"
#include "service/shared/crc32c.h"
#include "tests/unit/latentd/leaks.h"

#define MIB (UINT64_C(1) << 20)
#define HEADER 256u /* of the made files: what a fault must not touch to stay unseen by the header check */
#define STALL_USEC 200000 /* where a read hangs; longer than a busy machine needs elsewhere */

typedef enum Ill { /* what ends a load */
        ILL_NONE,
        ILL_READ,
        ILL_CUT,
        ILL_GROWN,
        ILL_WRITTEN,
        ILL_REPLACED,
        ILL_FSTAT,
        ILL_HANGS,
        N_ILLS,
} Ill;

static const struct {
        const char *name, *fault;
} ills[N_ILLS] = {
        [ILL_NONE] = {"none", NULL},
        [ILL_READ] = {"read fails", FAULT_IO},
        [ILL_CUT] = {"file truncated", FAULT_FILE_CHANGED},
        [ILL_GROWN] = {"file grown", FAULT_FILE_CHANGED},
        [ILL_WRITTEN] = {"file written", FAULT_FILE_CHANGED},
        [ILL_REPLACED] = {"file replaced", FAULT_FILE_CHANGED},
        [ILL_FSTAT] = {"fstat fails", FAULT_IO},
        [ILL_HANGS] = {"read hangs", FAULT_IO},
};

typedef struct Plan {
        uint64_t size;
        int ring_error;                            /* of ring_init; 0: there is one */
        int open_error, flags_error, direct_error; /* each 0 or the errno for O_DIRECT */
        unsigned short_percent, again_percent;
        Ill ill;
        unsigned ill_at; /* it strikes at this read */
        int read_error;
} Plan;

/* The disk. Called on pool, loader and reader threads. */
static struct {
        pthread_mutex_t lock;
        pthread_cond_t changed;
        Plan plan;
        uint64_t random;
        atomic_bool faulty; /* else everything goes to the system */
        atomic_bool struck;
        unsigned n_reads, n_starts;
        int file;                  /* to change it */
        void *hung;                /* where the read that hangs would write to */
        int pipe_read, pipe_write; /* the ring's read that hangs */
        bool released;             /* ... go on */
        unsigned n_hung;           /* pread()s in it */
} disk = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};

/* xorshift64* */
static uint64_t draw(uint64_t *state, uint64_t n) {
        *state ^= *state >> 12;
        *state ^= *state << 25;
        *state ^= *state >> 27;
        return (*state * UINT64_C(2685821657736338717) >> 33) % n;
}

static bool chance(unsigned percent) {
        return draw(&disk.random, 100) < percent;
}

static void strike_file(void) {
        static const uint8_t other = 0xee;
        uint64_t size = disk.plan.size;

        if (disk.plan.ill == ILL_CUT)
                assert_int_equal(ftruncate(disk.file, (off_t) draw(&disk.random, size)), 0);
        else if (disk.plan.ill == ILL_GROWN)
                assert_int_equal(ftruncate(disk.file, (off_t) (size + 1 + draw(&disk.random, 5000))), 0);
        else if (disk.plan.ill == ILL_WRITTEN)
                assert_int_equal(
                        pwrite(disk.file, &other, 1, (off_t) (HEADER + draw(&disk.random, size - HEADER))),
                        1);
}

/* What has become of a read that gave `result` when it comes back. Under the lock. */
static int come_back(void *buffer, size_t size, bool direct, int result) {
        unsigned n = ++disk.n_reads;

        if (disk.plan.ill != ILL_NONE && disk.plan.ill != ILL_HANGS && n == disk.plan.ill_at) {
                disk.struck = true;
                strike_file();
                if (disk.plan.ill == ILL_READ) {
                        memset(buffer, 0xaa, size);
                        return -disk.plan.read_error;
                }
        }

        if (direct && disk.plan.direct_error > 0) {
                memset(buffer, 0xaa, size);
                return -disk.plan.direct_error;
        }
        if (chance(disk.plan.again_percent))
                return chance(50) ? -EINTR : -EAGAIN;
        if (result > 1 && chance(disk.plan.short_percent)) {
                int shorter = 1 + (int) draw(&disk.random, (uint64_t) result - 1);

                memset((char *) buffer + shorter, 0xaa, size - (size_t) shorter); /* to be read again */
                return shorter;
        }

        return result;
}

/* Whether this one is the read that hangs. Under the lock. */
static bool hangs(void *buffer) {
        if (!disk.faulty || disk.plan.ill != ILL_HANGS || ++disk.n_starts != disk.plan.ill_at)
                return false;

        disk.struck = true;
        disk.hung = buffer;
        return true;
}

static int disk_fstat(int fd, struct stat *ret) {
        int r = fstat(fd, ret);

        (void) pthread_mutex_lock(&disk.lock);
        if (disk.faulty && disk.struck && disk.plan.ill == ILL_FSTAT) {
                errno = EIO;
                r = -1;
        } else if (disk.faulty && disk.struck && disk.plan.ill == ILL_REPLACED)
                ret->st_ino++;
        if (disk.plan.ill != ILL_WRITTEN) /* else known by the time alone */
                ret->st_ctim.tv_sec -= 60;
        (void) pthread_mutex_unlock(&disk.lock);
        return r;
}

static int disk_open(const char *path, int flags) {
        if (disk.faulty && disk.plan.open_error > 0) {
                errno = disk.plan.open_error;
                return -1;
        }

        return file_io_system.open(path, flags);
}

static int disk_set_flags(int fd, int flags) {
        if (disk.faulty && (flags & O_DIRECT) && disk.plan.flags_error > 0) {
                errno = disk.plan.flags_error;
                return -1;
        }

        return file_io_system.set_flags(fd, flags);
}

static ssize_t disk_pread(int fd, void *buffer, size_t size, off_t offset) {
        ssize_t n;
        int r;

        (void) pthread_mutex_lock(&disk.lock);
        if (offset > 0 && hangs(buffer)) { /* not the header's */
                disk.n_hung++;
                while (!disk.released)
                        (void) pthread_cond_wait(&disk.changed, &disk.lock);
                memcpy(buffer, "late", 4);
                disk.n_hung--;
                (void) pthread_cond_broadcast(&disk.changed);
                (void) pthread_mutex_unlock(&disk.lock);
                return (ssize_t) size;
        }
        (void) pthread_mutex_unlock(&disk.lock);

        n = pread(fd, buffer, size, offset);
        if (n < 0 || !disk.faulty)
                return n;

        (void) pthread_mutex_lock(&disk.lock);
        r = come_back(buffer, size, fcntl(fd, F_GETFL) & O_DIRECT, (int) n);
        (void) pthread_mutex_unlock(&disk.lock);
        if (r >= 0)
                return r;
        errno = -r;
        return -1;
}

static int disk_ring_init(unsigned entries, struct io_uring *ring) {
        return disk.plan.ring_error > 0 ? -disk.plan.ring_error : file_io_system.ring_init(entries, ring);
}

static void disk_ring_read(struct io_uring_sqe *sqe, int fd, void *buffer, unsigned size, uint64_t offset) {
        bool hang;

        (void) pthread_mutex_lock(&disk.lock);
        hang = hangs(buffer);
        (void) pthread_mutex_unlock(&disk.lock);
        file_io_system.ring_read(sqe, hang ? disk.pipe_read : fd, buffer, size, hang ? 0 : offset);
}

static int disk_ring_wait(struct io_uring *ring) {
        static const int errors[] = {-EINTR, -EAGAIN, -EBUSY};
        int r = 0;

        (void) pthread_mutex_lock(&disk.lock);
        if (disk.faulty && chance(disk.plan.again_percent))
                r = errors[draw(&disk.random, ELEMENTSOF(errors))];
        (void) pthread_mutex_unlock(&disk.lock);
        return r < 0 ? r : file_io_system.ring_wait(ring);
}

static int disk_ring_result(const struct io_uring_cqe *answer) {
        const LoaderRequest *q = io_uring_cqe_get_data(answer);
        int r = answer->res;

        if (!q || r < 0 || !disk.faulty)
                return r;

        (void) pthread_mutex_lock(&disk.lock);
        if (q->read->map + q->offset != disk.hung)
                r = come_back(q->read->map + q->offset, q->end - q->offset, q->direct, r);
        (void) pthread_mutex_unlock(&disk.lock);
        return r;
}

static const FileIo disk_io = {
        .fstat = disk_fstat,
        .open = disk_open,
        .set_flags = disk_set_flags,
        .pread = disk_pread,
        .ring_init = disk_ring_init,
        .ring_read = disk_ring_read,
        .ring_wait = disk_ring_wait,
        .ring_result = disk_ring_result,
};

/* ---- a service that reads from it ---- */

typedef struct Test {
        sd_event *event;
        Pool *pool;
        Config *config;
        Store *store;
        uint8_t *content;
} Test;

typedef struct Answer {
        int n, result;
        Region *region;
        Fault fault;
} Answer;

static void on_done(void *userdata, int r, Region *region, uint64_t bytes_read, const Fault *f) {
        Answer *a = userdata;

        a->n++;
        a->result = r;
        a->region = region;
        if (f)
                a->fault = *f;
}

static int setup(void **state) {
        static Test t;

        if (config_new(&t.config) < 0)
                return -1;
        t.config->cache_ram_max = 256 * MIB;
        t.config->cache_ram_reserve = 0;
        t.config->lock_memory = TRISTATE_NO;
        t.content = malloc(8 * MIB);
        *state = &t;
        return t.content ? 0 : -1;
}

static int teardown(void **state) {
        Test *t = *state;

        config_free(t->config);
        free(t->content);
        return 0;
}

static void start_service(Test *t, uint64_t stall_usec) {
        assert_int_equal(sd_event_new(&t->event), 0);
        assert_int_equal(pool_new(t->event, 3, &t->pool), 0);
        assert_int_equal(store_new(t->event, t->pool, t->config, &t->store), 0);
        t->store->io = &disk_io;
        t->store->piece_bytes = 2 * MIB;
        loader_free(t->store->loader);
        assert_int_equal(loader_new(t->event, &disk_io, stall_usec, &t->store->loader), 0);
        assert_int_equal(loader_ring_error(t->store->loader), -disk.plan.ring_error);
}

static void stop_service(Test *t) {
        store_free(t->store);
        pool_free(t->pool);
        sd_event_unref(t->event);
}

/* A sound .safetensors file of one tensor, or a header alone. Fills t->content. */
static int new_file(Test *t, uint64_t size) {
        const char *base = getenv("TMPDIR");
        CLEANUP_FREE char *path = NULL;
        uint64_t n = HEADER - 8, state = size | 1;
        int fd;

        for (uint64_t i = 0; i < size; i++)
                t->content[i] = (uint8_t) draw(&state, 256);
        memset(t->content, ' ', HEADER);
        memcpy(t->content, &n, 8);
        n = (uint64_t) snprintf((char *) t->content + 8, HEADER - 8,
                "{\"t\":{\"dtype\":\"U8\",\"shape\":[%llu],\"data_offsets\":[0,%llu]}}",
                (unsigned long long) (size - HEADER), (unsigned long long) (size - HEADER));
        t->content[8 + n] = ' ';

        assert_true(asprintf(&path, "%s/latentd-file-io-XXXXXX", base ? base : "/tmp") > 0);
        fd = mkostemp(path, O_CLOEXEC);
        assert_true(fd >= 0);
        assert_int_equal(pwrite(fd, t->content, size, 0), size);
        assert_int_equal(unlink(path), 0);
        return fd;
}

/* Another description: the service may set O_DIRECT on the one that it got. */
static int open_again(int fd) {
        char path[64];
        int again;

        (void) snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
        again = open(path, O_RDWR | O_CLOEXEC);
        assert_true(again >= 0);
        return again;
}

static StoreRequest *get(Test *t, int fd, Answer *a) {
        NumaPolicy policy = {.kind = NUMA_DEFAULT};
        StoreRequest *r = NULL;
        Fault f = {};

        *a = (Answer){};
        if (store_get(t->store, fd, "x.safetensors", &policy, on_done, a, &r, &f) < 0)
                fail_msg("%s: %s", f.name, f.text);
        return r;
}

static void wait_for(Test *t, Answer *a) {
        while (a->n == 0)
                assert_true(sd_event_run(t->event, 10 * 1000000) > 0);
}

static void settle(Test *t) {
        while (t->store->n_outstanding > 0)
                assert_true(sd_event_run(t->event, 10 * 1000000) > 0);
}

static void describe(const Plan *p, char *buffer, size_t size) {
        (void) snprintf(buffer, size,
                "%llu bytes, ring %d, open %d, flags %d, direct %d, short %u%%, again %u%%, %s at %u (%d)",
                (unsigned long long) p->size, p->ring_error, p->open_error, p->flags_error, p->direct_error,
                p->short_percent, p->again_percent, ills[p->ill].name, p->ill_at, p->read_error);
}

static void check_bytes(Test *t, const Region *r) {
        const RegionTrailer *x = region_trailer(r);

        assert_int_equal(r->state, REGION_COMPLETE);
        assert_true(x->complete == REGION_MAGIC);
        assert_memory_equal(r->map, t->content, disk.plan.size);
        for (uint64_t i = disk.plan.size; i < x->data_bytes; i++)
                assert_int_equal(((uint8_t *) r->map)[i], 0);
        for (uint64_t i = 0; i < x->crc_count; i++) {
                uint64_t n = x->data_bytes - i * MIB < MIB ? x->data_bytes - i * MIB : MIB;

                assert_int_equal(region_crc_table(r)[i], crc32c(0, (char *) r->map + i * MIB, n));
        }
}

static void release_hung(void) {
        (void) pthread_mutex_lock(&disk.lock);
        disk.released = true;
        (void) pthread_cond_broadcast(&disk.changed);
        while (disk.n_hung > 0)
                (void) pthread_cond_wait(&disk.changed, &disk.lock);
        (void) pthread_mutex_unlock(&disk.lock);
        if (disk.plan.ring_error == 0)
                assert_int_equal(write(disk.pipe_write, "late", 4), 4);
}

/* Its memory is as it was, and nobody gets it. */
static void check_dead(Test *t, int fd) {
        Region *dead = store_first(t->store);
        Answer a;

        assert_non_null(dead);
        assert_int_equal(dead->state, REGION_DEAD);
        assert_int_equal(store_bytes(t->store), dead->populated);
        assert_int_equal(store_evict(t->store, UINT64_MAX), 0);
        assert_int_equal(store_drop(t->store, dead), 0);

        release_hung();
        for (unsigned i = 0; i < 60000 && memcmp(disk.hung, "late", 4) != 0; i++)
                (void) usleep(1000);
        assert_memory_equal(disk.hung, "late", 4);
        assert_true((char *) disk.hung >= (char *) dead->map &&
                    (char *) disk.hung < (char *) dead->map + dead->size);

        /* Now that it is at its end, it goes. */
        while (store_stuck(t->store) > 0)
                assert_true(sd_event_run(t->event, 10 * 1000000) > 0);
        settle(t);
        assert_int_equal(store_bytes(t->store), 0);

        disk.faulty = false;
        (void) get(t, fd, &a);
        wait_for(t, &a);
        assert_int_equal(a.result, 0);
        check_bytes(t, a.region);
        store_region_unref(t->store, a.region);
        assert_true(store_drop(t->store, a.region) > 0);
}

static void check_outcome(Test *t, const Answer *a, int fd) {
        char text[256];

        describe(&disk.plan, text, sizeof(text));
        if (a->result == 0) {
                if (disk.struck)
                        fail_msg("%s: not noticed", text);
                check_bytes(t, a->region);
                store_region_unref(t->store, a->region);
                assert_true(store_drop(t->store, a->region) > 0);
                return;
        }

        if (!disk.struck || strcmp(a->fault.name, ills[disk.plan.ill].fault) != 0)
                fail_msg("%s: %s: %s", text, a->fault.name, a->fault.text);
        assert_null(a->region);
        assert_non_null(strstr(a->fault.text, "x.safetensors"));
        if (disk.plan.ill == ILL_HANGS)
                check_dead(t, fd);
        else
                assert_null(store_first(t->store));
}

/* One load with these faults. Returns whether the fatal one struck. */
static bool run_plan(Test *t, const Plan *plan, uint64_t seed) {
        CLEANUP_CLOSE int fd = -EBADF;
        uint64_t rss;
        unsigned fds;
        Answer a;

        rss = shared_memory();
        fds = count_fds();

        fd = new_file(t, plan->size);
        disk.plan = *plan;
        disk.random = seed * UINT64_C(0x9e3779b97f4a7c15) + 1;
        disk.file = open_again(fd);
        disk.n_reads = disk.n_starts = 0;
        disk.hung = NULL;
        disk.released = false;
        disk.struck = false;
        disk.faulty = false;
        start_service(t, plan->ill == ILL_HANGS ? STALL_USEC : LOADER_STALL_USEC);

        disk.faulty = true;
        (void) get(t, fd, &a);
        wait_for(t, &a);
        check_outcome(t, &a, fd);
        settle(t);

        stop_service(t);
        (void) close(STEAL_FD(fd));
        (void) close(disk.file);
        assert_int_equal(count_fds(), fds);
        assert_in_range(shared_memory(), 0, rss + 64 * 1024);
        return disk.struck;
}

static void open_pipe(void) {
        int p[2];

        assert_int_equal(pipe2(p, O_CLOEXEC), 0);
        disk.pipe_read = p[0];
        disk.pipe_write = p[1];
}

static void close_pipe(void) {
        (void) close(disk.pipe_read);
        (void) close(disk.pipe_write);
}

/* ---- tests ---- */

static const int ring_errors[] = {0, EPERM, ENOSYS, ENOMEM};

static void load_each_fault_alone_is_bytes_or_the_named_error(void **state) {
        for (size_t i = 0; i < ELEMENTSOF(ring_errors); i++)
                for (Ill ill = ILL_NONE; ill < N_ILLS; ill++) {
                        Plan p = {
                                .size = 5 * MIB + 777,
                                .ring_error = ring_errors[i],
                                .ill = ill,
                                .ill_at = ill == ILL_HANGS ? 2 : 3,
                                .read_error = EIO,
                        };

                        open_pipe();
                        assert_int_equal(run_plan(*state, &p, 1), ill != ILL_NONE);
                        close_pipe();
                }
}

static void load_refused_direct_reads_give_the_same_bytes(void **state) {
        static const Plan plans[] = {
                {.open_error = EINVAL, .flags_error = EINVAL},
                {.open_error = EACCES},
                {.direct_error = EINVAL},
                {.direct_error = EOPNOTSUPP},
                {.open_error = EACCES, .direct_error = EINVAL},
        };

        for (size_t i = 0; i < ELEMENTSOF(plans); i++)
                for (size_t k = 0; k < 2; k++) {
                        Plan p = plans[i];

                        p.size = 3 * MIB + 4095;
                        p.ring_error = ring_errors[k];
                        assert_false(run_plan(*state, &p, 1));
                }
}

/* Three answers of four are cut short, at any byte. */
static void load_short_reads_give_the_same_bytes(void **state) {
        for (uint64_t i = 0; i < 8; i++) {
                Plan p = {
                        .size = 2 * MIB + 512 * i + i, .ring_error = i % 2 ? EPERM : 0, .short_percent = 75};

                assert_false(run_plan(*state, &p, i + 1));
        }
}

static void draw_plan(uint64_t seed, Plan *ret) {
        static const uint64_t sizes[] = {HEADER, HEADER + 1, 4095, 4096, 4097, MIB, MIB + 1, 4 * MIB};
        static const int read_errors[] = {EIO, ENXIO, ENOMEM, EBADMSG, ENODATA};
        static const int direct_errors[] = {EINVAL, EACCES, EOPNOTSUPP};
        uint64_t s = (seed + 1) * UINT64_C(0x9e3779b97f4a7c15);
        Plan p = {};

        p.size = draw(&s, 2) ? sizes[draw(&s, ELEMENTSOF(sizes))] : HEADER + 1 + draw(&s, 6 * MIB);
        p.ring_error = draw(&s, 2) ? ring_errors[draw(&s, ELEMENTSOF(ring_errors))] : 0;
        p.open_error = draw(&s, 4) ? 0 : direct_errors[draw(&s, ELEMENTSOF(direct_errors))];
        p.flags_error = draw(&s, 4) ? 0 : EINVAL;
        p.direct_error = draw(&s, 4) ? 0 : draw(&s, 2) ? EINVAL : EOPNOTSUPP;
        p.short_percent = draw(&s, 2) ? (unsigned) draw(&s, 70) : 0;
        p.again_percent = draw(&s, 2) ? (unsigned) draw(&s, 40) : 0;
        p.ill = draw(&s, 2) ? (Ill) draw(&s, N_ILLS) : ILL_NONE;
        if (p.ill == ILL_HANGS && draw(&s, 4)) /* each costs the stall time */
                p.ill = ILL_READ;
        if (p.size == HEADER && p.ill == ILL_WRITTEN)
                p.ill = ILL_GROWN;
        p.ill_at = 1 + (unsigned) draw(&s, 9);
        p.read_error = read_errors[draw(&s, ELEMENTSOF(read_errors))];
        *ret = p;
}

static void load_random_faults_are_bytes_or_the_named_error(void **state) {
        const char *text = getenv("LATENT_FAULT_SEEDS");
        unsigned n = text ? (unsigned) strtoul(text, NULL, 10) : 100, n_struck = 0;

        for (unsigned seed = 0; seed < n; seed++) {
                Plan p;

                draw_plan(seed, &p);
                open_pipe();
                n_struck += run_plan(*state, &p, seed + 1);
                close_pipe();
        }
        assert_in_range(n_struck, n / 10, n * 9 / 10); /* both outcomes were tried */
}

/* Without the ring too: the load beside it ends before anybody has given the hung one up. */
static void load_hung_read_holds_up_no_other(void **state) {
        static const int errors[] = {0, EPERM};
        static Loader *kept; /* by a thread in its read, when the service ends */
        Test *t = *state;

        for (size_t i = 0; i < ELEMENTSOF(errors); i++) {
                CLEANUP_CLOSE int hung = -EBADF, other = -EBADF;
                Answer a, b;

                open_pipe();
                disk.plan = (Plan){
                        .size = 4 * MIB + 1,
                        .ring_error = errors[i],
                        .ill = ILL_HANGS,
                        .ill_at = 1,
                };
                disk.n_starts = 0;
                disk.hung = NULL;
                disk.released = false;
                disk.struck = false;
                hung = new_file(t, disk.plan.size);
                other = new_file(t, disk.plan.size);
                start_service(t, 10 * STALL_USEC);
                disk.faulty = true;

                (void) get(t, hung, &a);
                while (!disk.struck)
                        assert_true(sd_event_run(t->event, 1000) >= 0);
                (void) get(t, other, &b);
                wait_for(t, &b);
                assert_int_equal(b.result, 0);
                assert_int_equal(a.n, 0);
                check_bytes(t, b.region);
                wait_for(t, &a);
                assert_int_equal(a.result, -ETIMEDOUT);
                assert_string_equal(a.fault.name, FAULT_IO);

                /* Still hanging while the service ends: what it holds stays. */
                kept = t->store->loader;
                stop_service(t);
                release_hung();
                assert_non_null(kept);
                close_pipe();
        }
}

/* A ring may be made and its use refused: by seccomp, for instance. */
static int refuse_wait(struct io_uring *ring) {
        return -EPERM;
}

static void loader_new_with_a_ring_that_may_not_be_used_reads_without(void **state) {
        FileIo io = file_io_system;
        unsigned fds = count_fds();
        sd_event *e = NULL;
        Loader *l = NULL;

        io.ring_wait = refuse_wait;
        assert_int_equal(sd_event_new(&e), 0);
        assert_int_equal(loader_new(e, &io, STALL_USEC, &l), 0);
        assert_int_equal(loader_ring_error(l), -EPERM);
        loader_free(l);
        sd_event_unref(e);
        assert_int_equal(count_fds(), fds);
}

static void file_io_retry_is_for_passing_errors_and_ends(void **state) {
        unsigned n = 0;

        assert_false(file_io_retry(-EIO, &n));
        assert_int_equal(n, 0);
        for (unsigned i = 0; i < FILE_IO_RETRIES; i++)
                assert_true(file_io_retry(i % 2 ? -EINTR : -EAGAIN, &n));
        assert_false(file_io_retry(-EAGAIN, &n));
}

int main(void) {
#define TEST(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(file_io_retry_is_for_passing_errors_and_ends),
                cmocka_unit_test(loader_new_with_a_ring_that_may_not_be_used_reads_without),
                TEST(load_each_fault_alone_is_bytes_or_the_named_error),
                TEST(load_refused_direct_reads_give_the_same_bytes),
                TEST(load_short_reads_give_the_same_bytes),
                TEST(load_random_faults_are_bytes_or_the_named_error),
                TEST(load_hung_read_holds_up_no_other),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
