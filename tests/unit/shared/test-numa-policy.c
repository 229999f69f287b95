/* SPDX-License-Identifier: Apache-2.0 */
#include "service/shared/numa-policy.h"

#include <errno.h>
#include <numaif.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "service/shared/cleanup.h"
#include "service/shared/memfd.h"
#include "tests/unit/shared/cmocka-all.h"

#define SIZE (UINT64_C(4) << 20)

static void numa_policy_parse_known_names_round_trip(void **state) {
        static const char *const names[] = {"default", "interleave", "bind:0", "bind:7", "bind:1023"};

        for (size_t i = 0; i < ELEMENTSOF(names); i++) {
                NumaPolicy p;
                char buf[24];

                assert_int_equal(numa_policy_parse(names[i], &p), 0);
                assert_string_equal(numa_policy_format(&p, buf), names[i]);
        }
}

static void numa_policy_parse_auto_follows_nodes(void **state) {
        NumaPolicy p;

        assert_int_equal(numa_policy_parse("auto", &p), 0);
        assert_int_equal(p.kind, numa_node_count() > 1 ? NUMA_INTERLEAVE : NUMA_DEFAULT);
}

static void numa_policy_parse_malformed_refused(void **state) {
        static const char *const bad[] = {
                "",
                "Auto",
                "interleave ",
                "bind",
                "bind:",
                "bind:-1",
                "bind:1x",
                "bind:1024",
                "bind:99999999999999999999",
                "bind: 1",
                "bind:0x1",
                "replicate",
        };

        for (size_t i = 0; i < ELEMENTSOF(bad); i++) {
                NumaPolicy p = {NUMA_BIND, 77};

                assert_int_equal(numa_policy_parse(bad[i], &p), -EINVAL);
                assert_int_equal(p.node, 77);
        }
}

static void numa_node_count_at_least_one(void **state) {
        assert_in_range(numa_node_count(), 1, 1024);
}

/* The first node that this process may use. */
static int first_node(void) {
        unsigned long nodes[1024 / (8 * sizeof(unsigned long))] = {};

        if (get_mempolicy(NULL, nodes, 1024, NULL, MPOL_F_MEMS_ALLOWED) < 0)
                return -1;
        for (int n = 0; n < 1024; n++)
                if (nodes[n / (8 * sizeof(unsigned long))] >> n % (8 * sizeof(unsigned long)) & 1)
                        return n;
        return -1;
}

static void numa_policy_check_names_the_nodes_that_there_are(void **state) {
        NumaPolicy there = {NUMA_BIND, first_node()};
        char expect[16];
        Fault f = {};

        if (there.node < 0)
                skip();
        assert_int_equal(numa_policy_check(&there, &f), 0);
        assert_int_equal(numa_policy_check(&(NumaPolicy){NUMA_INTERLEAVE, 0}, &f), 0);
        assert_int_equal(numa_policy_check(&(NumaPolicy){NUMA_DEFAULT, 99}, &f), 0);
        assert_string_equal(f.name, "");
        assert_int_equal(numa_policy_check(&(NumaPolicy){NUMA_BIND, 1023}, &f), -ENOENT);
        assert_string_equal(f.name, FAULT_INVALID_ARGUMENT);
        (void) snprintf(expect, sizeof(expect), "nodes: %d", there.node);
        assert_non_null(strstr(f.text, expect));
        assert_int_equal(numa_policy_check(&(NumaPolicy){NUMA_BIND, 1024}, &f), -ENOENT);
        assert_int_equal(numa_policy_check(&(NumaPolicy){NUMA_BIND, -1}, &f), -ENOENT);
}

static void numa_policy_apply_bind_seen_by_other_map(void **state) {
        NumaPolicy p = {NUMA_BIND, first_node()};
        CLEANUP_CLOSE int fd = -EBADF;
        void *map, *other;
        int mode = -1;

        if (p.node < 0)
                skip(); /* a kernel without NUMA */

        assert_int_equal(memfd_new("test", SIZE, &fd), 0);
        assert_int_equal(memfd_map(fd, SIZE, PROT_READ | PROT_WRITE, &map), 0);
        assert_int_equal(numa_policy_apply(&p, map, SIZE), 0);
        assert_int_equal(memory_populate(map, SIZE), 0);
        (void) munmap(map, SIZE);

        assert_int_equal(memfd_map(fd, SIZE, PROT_READ, &other), 0);
        assert_int_equal(get_mempolicy(&mode, NULL, 0, other, MPOL_F_ADDR), 0);
        assert_int_equal(mode, MPOL_BIND);
        (void) munmap(other, SIZE);
}

static void numa_policy_apply_impossible_node_reported(void **state) {
        NumaPolicy far = {NUMA_BIND, 1023}, wrong = {NUMA_BIND, -1}, huge = {NUMA_BIND, 1 << 20};
        CLEANUP_CLOSE int fd = -EBADF;
        void *map;

        assert_int_equal(memfd_new("test", SIZE, &fd), 0);
        assert_int_equal(memfd_map(fd, SIZE, PROT_READ | PROT_WRITE, &map), 0);
        assert_true(numa_policy_apply(&far, map, SIZE) < 0);
        assert_int_equal(numa_policy_apply(&wrong, map, SIZE), -EINVAL);
        assert_int_equal(numa_policy_apply(&huge, map, SIZE), -EINVAL);
        (void) munmap(map, SIZE);
}

static void numa_policy_apply_default_and_interleave_work(void **state) {
        NumaPolicy none = {NUMA_DEFAULT, 0}, interleave = {NUMA_INTERLEAVE, 0};
        CLEANUP_CLOSE int fd = -EBADF;
        int mode = -1;
        void *map;

        assert_int_equal(memfd_new("test", SIZE, &fd), 0);
        assert_int_equal(memfd_map(fd, SIZE, PROT_READ | PROT_WRITE, &map), 0);
        assert_int_equal(numa_policy_apply(&none, map, SIZE), 0);
        assert_int_equal(numa_policy_apply(&interleave, map, SIZE), 0);
        if (get_mempolicy(&mode, NULL, 0, map, MPOL_F_ADDR) == 0)
                assert_int_equal(mode, numa_node_count() > 1 ? MPOL_INTERLEAVE : MPOL_DEFAULT);
        (void) munmap(map, SIZE);
}

static void numa_placement_counts_populated_bytes(void **state) {
        uint64_t bytes[1024], total = 0;
        CLEANUP_CLOSE int fd = -EBADF;
        void *map;
        int r;

        if (first_node() < 0)
                skip();

        assert_int_equal(memfd_new("test", SIZE, &fd), 0);
        assert_int_equal(memfd_map(fd, SIZE, PROT_READ | PROT_WRITE, &map), 0);

        /* nothing is there yet */
        assert_int_equal(numa_placement(map, SIZE, 100, bytes, 1024), 0);
        for (size_t i = 0; i < 1024; i++)
                total += bytes[i];
        assert_int_equal(total, 0);

        /* the first half, with every page asked for, and then all by samples */
        assert_int_equal(memory_populate(map, SIZE / 2), 0);
        assert_true(numa_placement(map, SIZE, 1 << 20, bytes, 1024) >= 0);
        for (size_t i = 0; i < 1024; i++)
                total += bytes[i];
        assert_int_equal(total, SIZE / 2);

        assert_int_equal(memory_populate(map, SIZE), 0);
        r = numa_placement(map, SIZE, 64, bytes, 1024);
        assert_in_range(r, 0, 1);
        total = 0;
        for (size_t i = 0; i < 1024; i++)
                total += bytes[i];
        assert_int_equal(total, SIZE);
        (void) munmap(map, SIZE);
}

/* Anonymous memory, where more systems allow huge pages than for shared memory. */
static void numa_placement_huge_pages_reported(void **state) {
        uint64_t size = UINT64_C(8) << 20, bytes[1];
        char *raw, *map;
        bool can;

        raw = mmap(NULL, 2 * size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        assert_true(raw != MAP_FAILED);
        map = raw + (size - (uintptr_t) raw % size) % size;
        can = madvise(map, size, MADV_HUGEPAGE) == 0 && memory_populate(map, size) == 0;

        if (!can || numa_placement(map, size, 16, bytes, 1) != 1) {
                (void) munmap(raw, 2 * size);
                skip(); /* this system gives none */
        }

        assert_int_equal(madvise(map, size, MADV_NOHUGEPAGE), 0);
        assert_int_equal(madvise(map, size, MADV_DONTNEED), 0);
        memset(map, 1, size);
        assert_int_equal(numa_placement(map, size, 16, bytes, 1), 0);
        (void) munmap(raw, 2 * size);
}

static void numa_placement_bad_arguments_refused(void **state) {
        uint64_t bytes[1] = {77};

        assert_int_equal(numa_placement((void *) 4096, 0, 1, bytes, 1), -EINVAL);
        assert_int_equal(numa_placement((void *) 4096, 4096, 0, bytes, 1), -EINVAL);
        assert_int_equal(numa_placement((void *) 4097, 4096, 1, bytes, 1), -EINVAL);
        assert_int_equal(bytes[0], 77);
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(numa_policy_parse_known_names_round_trip),
                cmocka_unit_test(numa_policy_parse_auto_follows_nodes),
                cmocka_unit_test(numa_policy_parse_malformed_refused),
                cmocka_unit_test(numa_policy_check_names_the_nodes_that_there_are),
                cmocka_unit_test(numa_node_count_at_least_one),
                cmocka_unit_test(numa_policy_apply_bind_seen_by_other_map),
                cmocka_unit_test(numa_policy_apply_impossible_node_reported),
                cmocka_unit_test(numa_policy_apply_default_and_interleave_work),
                cmocka_unit_test(numa_placement_counts_populated_bytes),
                cmocka_unit_test(numa_placement_huge_pages_reported),
                cmocka_unit_test(numa_placement_bad_arguments_refused),
        };

        return cmocka_run_group_tests_name("numa-policy", tests, NULL, NULL);
}
