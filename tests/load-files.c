/* SPDX-License-Identifier: Apache-2.0 */
/* Loads files as the service does, one after the other, and looks at what came of it.
 *
 *     load-files [--no-compare] FILE...
 *
 * A line for each: bytes, whether it was read with O_DIRECT, whether with the ring, pages of the file in the
 * page cache afterwards, microseconds of the whole load and of its parts (populate and checksum are summed
 * over the pool's threads), CPU microseconds of the loader's threads, name. Exit status 1 if the region is
 * not the file's bytes or a load fails. For tests/bus/test-filesystems and tests/bench/bench-load. */
#include <dirent.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "service/latentd/store-internal.h"
#include "service/shared/cleanup.h"
#include "service/shared/clock.h"

#define COMPARE_BYTES (UINT64_C(1) << 20)

typedef struct Outcome {
        bool done, direct;
        int result;
        Region *region;
        Fault fault;
} Outcome;

static void on_done(void *userdata, int r, Region *region, uint64_t bytes_read, const Fault *f) {
        Outcome *o = userdata;

        o->done = true;
        o->result = r;
        o->region = region;
        if (f)
                o->fault = *f;
}

/* Of the loader, what it starts and the kernel's helpers of the ring. Those that have ended are not seen:
 * their part is small. */
static uint64_t loader_cpu_usec(void) {
        DIR *d = opendir("/proc/self/task");
        uint64_t total_nsec = 0;
        struct dirent *e;

        while (d && (e = readdir(d))) {
                char path[320], name[32] = "";
                unsigned long long nsec = 0;
                FILE *f;

                (void) snprintf(path, sizeof(path), "/proc/self/task/%s/comm", e->d_name);
                f = fopen(path, "re");
                if (!f)
                        continue;
                (void) !fgets(name, sizeof(name), f);
                (void) fclose(f);
                if (strncmp(name, "loader", 6) != 0 && strncmp(name, "iou-wrk", 7) != 0)
                        continue;

                (void) snprintf(path, sizeof(path), "/proc/self/task/%s/schedstat", e->d_name);
                f = fopen(path, "re");
                if (f && fscanf(f, "%llu", &nsec) == 1)
                        total_nsec += nsec;
                if (f)
                        (void) fclose(f);
        }

        if (d)
                (void) closedir(d);
        return total_nsec / 1000;
}

/* Pages of the file that are in the page cache; negative errno. */
static int64_t resident_pages(int fd, uint64_t size) {
        size_t n = (size_t) ((size + 4095) / 4096);
        CLEANUP_FREE unsigned char *pages = malloc(n);
        int64_t count = 0;
        void *map;

        if (!pages)
                return -ENOMEM;
        map = mmap(NULL, (size_t) size, PROT_READ, MAP_SHARED, fd, 0);
        if (map == MAP_FAILED)
                return -errno;
        if (mincore(map, (size_t) size, pages) < 0)
                count = -errno;
        for (size_t i = 0; count >= 0 && i < n; i++)
                count += pages[i] & 1;

        (void) munmap(map, (size_t) size);
        return count;
}

static int compare(int fd, const Region *r) {
        CLEANUP_FREE char *buffer = malloc(COMPARE_BYTES);
        uint64_t at = 0;

        while (buffer && at < r->identity.size) {
                ssize_t n = pread(fd, buffer, COMPARE_BYTES, (off_t) at);

                if (n <= 0)
                        return n < 0 ? -errno : -ESTALE;
                if (memcmp(buffer, (char *) r->map + at, (size_t) n) != 0)
                        return -EILSEQ;
                at += (uint64_t) n;
        }
        for (const char *p = r->map; at < region_data_bytes(r->identity.size); at++)
                if (p[at] != 0)
                        return -EILSEQ;

        return buffer ? 0 : -ENOMEM;
}

static int load(sd_event *event, Store *s, const char *path, bool with_compare) {
        uint64_t begin = clock_usec(), cpu = loader_cpu_usec(), usec;
        NumaPolicy policy = {.kind = NUMA_DEFAULT};
        CLEANUP_CLOSE int fd = -EBADF;
        StoreRequest *request;
        int64_t resident;
        Outcome o = {};
        int r;

        fd = open(path, O_RDONLY | O_CLOEXEC);
        if (fd < 0)
                return -errno;

        r = store_get(s, fd, path, &policy, on_done, &o, &request, &o.fault);
        while (r >= 0 && !o.done) {
                const Load *l = TAILQ_FIRST(&s->loads);

                if (l && l->prepared)
                        o.direct = l->source.direct;
                r = sd_event_run(event, UINT64_MAX);
        }
        if (r < 0 || o.result < 0) {
                (void) fprintf(stderr, "%s: %s\n", o.fault.name, o.fault.text);
                return r < 0 ? r : o.result;
        }

        usec = clock_usec() - begin;
        cpu = loader_cpu_usec() - cpu;
        resident = resident_pages(fd, o.region->identity.size);
        if (with_compare)
                r = compare(fd, o.region);

        (void) printf("bytes=%" PRIu64 " direct=%d ring=%d resident=%" PRId64 " usec=%" PRIu64
                      " populate_usec=%" PRIu64 " read_usec=%" PRIu64 " crc_usec=%" PRIu64
                      " cpu_usec=%" PRIu64 " huge=%d same=%d name=%s\n",
                o.region->identity.size, o.direct, loader_ring_error(s->loader) == 0, resident, usec,
                o.region->populate_usec, o.region->read_usec, o.region->crc_usec, cpu,
                o.region->huge_bytes > 0, r >= 0, path);
        (void) fflush(stdout);
        store_region_unref(s, o.region);
        (void) store_drop(s, o.region);
        while (s->n_outstanding > 0 && sd_event_run(event, UINT64_MAX) >= 0)
                ;
        return r;
}

int main(int argc, char *argv[]) {
        bool with_compare = argc < 2 || strcmp(argv[1], "--no-compare") != 0;
        sd_event *event = NULL;
        Config *config = NULL;
        Store *store = NULL;
        Pool *pool = NULL;
        int r = 0;

        if (config_new(&config) < 0 || sd_event_new(&event) < 0 || pool_new(event, 3, &pool) < 0 ||
                store_new(event, pool, config, &store) < 0) {
                (void) fprintf(stderr, "cannot start\n");
                return EXIT_FAILURE;
        }
        config->cache_ram_reserve = 0;

        for (int i = with_compare ? 1 : 2; i < argc; i++) {
                int k = load(event, store, argv[i], with_compare);

                if (k < 0) {
                        (void) fprintf(stderr, "%s: %s\n", argv[i], strerror(-k));
                        r = k;
                }
        }

        store_free(store);
        pool_free(pool);
        sd_event_unref(event);
        config_free(config);
        return r < 0 ? EXIT_FAILURE : EXIT_SUCCESS;
}
