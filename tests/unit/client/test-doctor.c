/* SPDX-License-Identifier: Apache-2.0 */

/* The checks of latentctl doctor, on made-up machines and services. */

#include <stdio.h>
#include <string.h>

#include "client/latentctl/doctor-checks.h"
#include "client/liblatent/value.h"
#include "tests/unit/client/temporary.h"

static void write_text(const char *name, const char *text) {
        temporary_write(name, text, strlen(text));
}

static void expect(const Findings *f, Level level, const char *says) {
        const Finding *x;

        assert_true(f->n > 0);
        x = &f->list[f->n - 1];
        if (x->level != level || !strstr(x->text, says))
                fail_msg("%s: level %d, \"%s\"; expected level %d and \"%s\"", x->name, x->level, x->text,
                        level, says);
        assert_true((level == LEVEL_OK) == (x->advice[0] == '\0'));
}

static void io_uring_each_setting(void **state) {
        Findings f = {};

        check_io_uring(&f, ".");
        expect(&f, LEVEL_OK, "no switch");
        write_text("proc/sys/kernel/io_uring_disabled", "0\n");
        check_io_uring(&f, ".");
        expect(&f, LEVEL_OK, "everyone");
        write_text("proc/sys/kernel/io_uring_disabled", "1\n");
        check_io_uring(&f, ".");
        expect(&f, LEVEL_WARNING, "one group");
        write_text("proc/sys/kernel/io_uring_disabled", "2\n");
        check_io_uring(&f, ".");
        expect(&f, LEVEL_WARNING, "switched off");
}

static void huge_pages_each_setting(void **state) {
        Findings f = {};

        check_huge_pages(&f, ".");
        expect(&f, LEVEL_WARNING, "none");
        write_text("sys/kernel/mm/transparent_hugepage/shmem_enabled",
                "always within_size advise [never] deny force\n");
        check_huge_pages(&f, ".");
        expect(&f, LEVEL_WARNING, "never");
        write_text("sys/kernel/mm/transparent_hugepage/shmem_enabled",
                "always within_size [advise] never deny force\n");
        check_huge_pages(&f, ".");
        expect(&f, LEVEL_OK, "advise");
}

static void memory_little_left_warns(void **state) {
        Findings f = {};

        check_memory(&f, ".");
        expect(&f, LEVEL_WARNING, "cannot be read");
        write_text(
                "proc/meminfo", "MemTotal:       33554432 kB\nMemFree: 1 kB\nMemAvailable:   16777216 kB\n");
        check_memory(&f, ".");
        expect(&f, LEVEL_OK, "16.0 GiB of 32.0 GiB");
        write_text("proc/meminfo", "MemTotal:       33554432 kB\nMemAvailable:   1048576 kB\n");
        check_memory(&f, ".");
        expect(&f, LEVEL_WARNING, "1.0 GiB");
}

static void numa_nodes_named(void **state) {
        Findings f = {};

        check_numa(&f, ".");
        expect(&f, LEVEL_OK, "one node");
        write_text("sys/devices/system/node/has_memory", "0-1\n");
        check_numa(&f, ".");
        expect(&f, LEVEL_OK, "nodes 0-1");
}

static latent_value *service(const char *version, const char *state, const char *reason) {
        latent_value *v = value_new(LATENT_VALUE_DICT);

        assert_int_equal(value_add_string(v, "Version", version), 0);
        assert_int_equal(value_add_string(v, "State", state), 0);
        assert_int_equal(value_add_string(v, "StateReason", reason), 0);
        return v;
}

static void state_degraded_is_a_problem(void **state) {
        latent_value *v = service("0.1.0", "degraded", "no worker binary");
        Findings f = {};

        check_state(&f, v);
        expect(&f, LEVEL_PROBLEM, "no worker binary");
        check_version(&f, v); /* no ApiVersion at all */
        expect(&f, LEVEL_PROBLEM, "interface 0");
        check_headroom(&f, v);
        expect(&f, LEVEL_WARNING, "nothing more");
        latent_value_free(v);

        v = service("0.1.0", "ready", "");
        check_state(&f, v);
        expect(&f, LEVEL_OK, "none runs");
        latent_value_free(v);
}

static void status_sandbox_and_stuck_reads(void **state) {
        latent_value *v = service("0.1.0", "ready", "");
        Findings f = {};

        check_sandbox(&f, v); /* of an older service */
        check_stuck(&f, 0);
        assert_int_equal(f.n, 0);
        assert_int_equal(value_add_string(v, "WorkerStart", "spawn"), 0);
        check_sandbox(&f, v);
        expect(&f, LEVEL_WARNING, "weaker sandbox");
        check_stuck(&f, 3);
        expect(&f, LEVEL_PROBLEM, "3 reads");
        latent_value_free(v);

        v = service("0.1.0", "ready", "");
        assert_int_equal(value_add_string(v, "WorkerStart", "socket"), 0);
        check_sandbox(&f, v);
        expect(&f, LEVEL_OK, "service manager");
        latent_value_free(v);
}

static void regions_with_errors_warn(void **state) {
        latent_value *regions = value_new(LATENT_VALUE_LIST), *r = value_new(LATENT_VALUE_DICT);
        Findings f = {};

        check_locked(&f, regions);
        expect(&f, LEVEL_OK, "nothing is loaded");
        assert_int_equal(value_add_string(r, "lock-error", "over the limit"), 0);
        assert_int_equal(value_add_string(r, "numa-error", "not permitted"), 0);
        assert_int_equal(value_add(regions, NULL, r), 0);
        check_locked(&f, regions);
        expect(&f, LEVEL_WARNING, "over the limit");
        check_numa_applied(&f, regions);
        expect(&f, LEVEL_WARNING, "not permitted");
        check_cache(&f, regions);
        expect(&f, LEVEL_OK, "1 file");
        latent_value_free(regions);
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, temporary_setup, temporary_teardown)

int main(void) {
        const struct CMUnitTest tests[] = {
                TEST(io_uring_each_setting),
                TEST(huge_pages_each_setting),
                TEST(memory_little_left_warns),
                TEST(numa_nodes_named),
                cmocka_unit_test(state_degraded_is_a_problem),
                cmocka_unit_test(status_sandbox_and_stuck_reads),
                cmocka_unit_test(regions_with_errors_warn),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
