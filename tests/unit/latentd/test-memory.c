/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <fcntl.h>
#include <ftw.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "service/latentd/memory.h"
#include "service/shared/cleanup.h"

#define MIB (UINT64_C(1) << 20)

typedef struct Tree {
        char root[64];
        Config config;
        MemoryHeadroom headroom;
} Tree;

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *ftw) {
        return remove(path);
}

static int setup(void **state) {
        Tree *t = calloc(1, sizeof(*t));

        (void) snprintf(t->root, sizeof(t->root), "/tmp/latentd-memory-XXXXXX");
        *state = t;
        return mkdtemp(t->root) ? 0 : -1;
}

static int teardown(void **state) {
        Tree *t = *state;

        (void) nftw(t->root, remove_one, 8, FTW_DEPTH | FTW_PHYS);
        free(t);
        return 0;
}

/* Writes root/path, making its directories. */
static void put(Tree *t, const char *path, const char *text) {
        CLEANUP_CLOSE int fd = -EBADF;
        char full[256];

        (void) snprintf(full, sizeof(full), "%s/%s", t->root, path);
        for (char *p = strchr(full + 1, '/'); p; p = strchr(p + 1, '/')) {
                *p = '\0';
                (void) mkdir(full, 0755);
                *p = '/';
        }
        fd = open(full, O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0644);
        assert_true(fd >= 0);
        assert_int_equal(write(fd, text, strlen(text)), strlen(text));
}

static void put_meminfo(Tree *t) {
        put(t, "proc/meminfo",
                "MemTotal:       2048000 kB\nMemFree:          1 kB\nMemAvailable:   1024000 kB\nBuffers: 7 "
                "kB\n");
}

static void check(Tree *t, uint64_t used, uint64_t bytes, const char *limit) {
        assert_int_equal(memory_headroom(&t->config, t->root, used, &t->headroom), 0);
        assert_int_equal(t->headroom.bytes, bytes);
        assert_string_equal(t->headroom.limit, limit);
}

static void memory_headroom_no_cgroup_is_available_minus_reserve(void **state) {
        Tree *t = *state;

        put_meminfo(t);
        check(t, 123, 1000 * MIB, "MemAvailable");
        t->config.cache_ram_reserve = 100 * MIB;
        check(t, 123, 900 * MIB, "MemAvailable");
        t->config.cache_ram_reserve = 2000 * MIB;
        check(t, 123, 0, "MemAvailable");
}

static void memory_headroom_tightest_ancestor_counts(void **state) {
        Tree *t = *state;

        put_meminfo(t);
        put(t, "proc/self/cgroup", "0::/latentd.slice/latentd.service\n");
        put(t, "sys/fs/cgroup/latentd.slice/latentd.service/memory.max", "max\n");
        put(t, "sys/fs/cgroup/latentd.slice/latentd.service/memory.current", "104857600\n");
        put(t, "sys/fs/cgroup/latentd.slice/memory.max", "524288000\n");
        put(t, "sys/fs/cgroup/latentd.slice/memory.current", "104857600\n");
        check(t, 0, 400 * MIB, "cgroup /latentd.slice");

        put(t, "sys/fs/cgroup/latentd.slice/latentd.service/memory.max", "157286400\n");
        check(t, 0, 50 * MIB, "cgroup /latentd.slice/latentd.service");

        t->config.cache_ram_reserve = 10 * MIB;
        check(t, 0, 40 * MIB, "cgroup /latentd.slice/latentd.service");

        put(t, "sys/fs/cgroup/latentd.slice/memory.current", "629145600\n"); /* more than its limit */
        check(t, 0, 0, "cgroup /latentd.slice");
}

static void memory_headroom_container_root_has_limits_too(void **state) {
        Tree *t = *state;

        put_meminfo(t);
        put(t, "proc/self/cgroup", "1:name=systemd:/x\n0::/\n");
        put(t, "sys/fs/cgroup/memory.max", "209715200\n");
        put(t, "sys/fs/cgroup/memory.current", "104857600\n");
        check(t, 0, 100 * MIB, "cgroup /");

        put(t, "proc/self/cgroup", "0::/../outside\n");
        check(t, 0, 100 * MIB, "cgroup /");
}

static void memory_headroom_reclaimable_cache_does_not_count(void **state) {
        Tree *t = *state;

        put_meminfo(t);
        put(t, "proc/self/cgroup", "0::/a\n");
        put(t, "sys/fs/cgroup/a/memory.max", "209715200\n");
        put(t, "sys/fs/cgroup/a/memory.current", "209715200\n");
        check(t, 0, 0, "cgroup /a");
        put(t, "sys/fs/cgroup/a/memory.stat",
                "anon 1\ninactive_anon 5\nfile 104857600\ninactive_file 104857600\nactive_file 3\n");
        check(t, 0, 100 * MIB, "cgroup /a");
}

static void memory_headroom_memory_high_is_a_limit(void **state) {
        Tree *t = *state;

        put_meminfo(t);
        put(t, "proc/self/cgroup", "0::/a\n");
        put(t, "sys/fs/cgroup/a/memory.max", "max\n");
        put(t, "sys/fs/cgroup/a/memory.high", "104857600\n");
        put(t, "sys/fs/cgroup/a/memory.current", "0\n");
        check(t, 0, 100 * MIB, "cgroup /a");
}

static void memory_headroom_missing_group_files_are_no_limit(void **state) {
        Tree *t = *state;

        put_meminfo(t);
        put(t, "proc/self/cgroup", "0::/a/b\n");
        check(t, 0, 1000 * MIB, "MemAvailable");
        put(t, "sys/fs/cgroup/a/memory.max", "1\n"); /* but no memory.current */
        check(t, 0, 1000 * MIB, "MemAvailable");
        put(t, "sys/fs/cgroup/a/memory.current", "garbage\n");
        check(t, 0, 1000 * MIB, "MemAvailable");
}

static void memory_headroom_cache_ram_max_replaces_available(void **state) {
        Tree *t = *state;

        t->config.cache_ram_max = 300 * MIB;
        t->config.cache_ram_reserve = 1000 * MIB; /* not of a size that was chosen */
        check(t, 100 * MIB, 200 * MIB, "CacheRamMax");
        check(t, 301 * MIB, 0, "CacheRamMax");

        t->config.cache_ram_reserve = 0;
        put(t, "proc/self/cgroup", "0::/a\n");
        put(t, "sys/fs/cgroup/a/memory.max", "104857600\n");
        put(t, "sys/fs/cgroup/a/memory.current", "52428800\n");
        check(t, 100 * MIB, 50 * MIB, "cgroup /a");
}

static void memory_headroom_without_meminfo_fails(void **state) {
        Tree *t = *state;
        MemoryHeadroom h = {.bytes = 42};

        assert_int_equal(memory_headroom(&t->config, t->root, 0, &h), -ENOENT);
        put(t, "proc/meminfo", "MemTotal: 5 kB\n");
        assert_int_equal(memory_headroom(&t->config, t->root, 0, &h), -ENODATA);
        assert_int_equal(h.bytes, 42);
}

static void memory_headroom_of_this_machine_is_below_all_memory(void **state) {
        Tree *t = *state;

        assert_int_equal(memory_headroom(&t->config, "", 0, &t->headroom), 0);
        assert_in_range(
                t->headroom.bytes, 1, (uint64_t) sysconf(_SC_PHYS_PAGES) * (uint64_t) sysconf(_SC_PAGESIZE));
}

int main(void) {
#define TEST(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
        const struct CMUnitTest tests[] = {
                TEST(memory_headroom_no_cgroup_is_available_minus_reserve),
                TEST(memory_headroom_tightest_ancestor_counts),
                TEST(memory_headroom_container_root_has_limits_too),
                TEST(memory_headroom_reclaimable_cache_does_not_count),
                TEST(memory_headroom_memory_high_is_a_limit),
                TEST(memory_headroom_missing_group_files_are_no_limit),
                TEST(memory_headroom_cache_ram_max_replaces_available),
                TEST(memory_headroom_without_meminfo_fails),
                TEST(memory_headroom_of_this_machine_is_below_all_memory),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
