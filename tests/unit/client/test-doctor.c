/* SPDX-License-Identifier: Apache-2.0 */

/* The checks of latentctl doctor, on made-up machines and services. */

#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <systemd/sd-bus.h>

#include "client/latentctl/doctor-checks.h"
#include "client/liblatent/value.h"
#include "service/shared/cleanup.h"
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

/* As the service sends it. */
static void add_way(latent_value *device, const char *to, uint64_t peer, uint64_t host) {
        CLEANUP(sd_bus_message_unrefp) sd_bus_message *m = NULL;
        CLEANUP(sd_bus_unrefp) sd_bus *bus = NULL;
        latent_value *ways;
        int fds[2];

        assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
        assert_int_equal(sd_bus_new(&bus), 0);
        assert_true(sd_bus_set_fd(bus, fds[0], fds[0]) >= 0 && sd_bus_start(bus) >= 0);
        assert_true(sd_bus_message_new_signal(bus, &m, "/", "a.b", "C") >= 0);
        assert_true(sd_bus_message_append(m, "a(ostt)", 1, to, peer >= host ? "p2p" : "host", peer, host) >= 0);
        assert_true(sd_bus_message_seal(m, 1, 0) >= 0);
        assert_int_equal(value_read(m, &ways), 0);
        assert_int_equal(value_add(device, "Transports", ways), 0);
        (void) close(fds[1]);
}

static latent_value *gpu(latent_value *list, const char *path, const char *address) {
        latent_value *v = value_new(LATENT_VALUE_DICT);

        assert_int_equal(value_add_string(v, "path", path), 0);
        assert_int_equal(value_add_string(v, "PciAddress", address), 0);
        assert_int_equal(value_add(list, NULL, v), 0);
        return v;
}

static void links_slow_one_is_explained(void **state) {
        latent_value *list = value_new(LATENT_VALUE_LIST);
        latent_value *a = gpu(list, "/a", "0000:41:00.0"), *b = gpu(list, "/b", "0000:42:00.0"), *c = gpu(list, "/c", "0000:43:00.0");
        Findings f = {};

        check_links(&f, ".", list);
        assert_int_equal(f.n, 0);
        add_way(a, "/b", UINT64_C(24) << 30, UINT64_C(6) << 30);
        add_way(b, "/a", UINT64_C(20) << 30, UINT64_C(6) << 30);
        check_links(&f, ".", list);
        expect(&f, LEVEL_OK, "20.0 GiB a second");
        assert_int_equal(f.n, 1);

        add_way(c, "/a", 0, UINT64_C(1) << 30);
        check_links(&f, ".", list);
        expect(&f, LEVEL_WARNING, "0000:43:00.0 to 0000:41:00.0: 1.0 GiB a second, the best link here has 24.0 GiB");
        expect(&f, LEVEL_WARNING, "nvidia-smi topo");
        write_text("sys/bus/pci/devices/0000:43:00.0/current_link_width", "1\n");
        write_text("sys/bus/pci/devices/0000:43:00.0/max_link_width", "16\n");
        check_links(&f, ".", list);
        expect(&f, LEVEL_WARNING, "0000:43:00.0 has a link width of 1, it could have 16");
        latent_value_free(list);
}

static void device_notes_are_warnings(void **state) {
        latent_value *v = service("0.1.0", "ready", "");
        Findings f = {};

        check_device_notes(&f, v);
        assert_int_equal(f.n, 0);
        assert_int_equal(value_add_string(v, "DeviceNotes", "one card is left out\nanother, too\n"), 0);
        check_device_notes(&f, v);
        expect(&f, LEVEL_WARNING, "another, too");
        assert_int_equal(f.n, 2);
        latent_value_free(v);
}

static void add_parts(latent_value *d, const char *state, const char *first, const char *second) {
        latent_value *v = value_new(LATENT_VALUE_LIST);

        assert_int_equal(value_add_string(d, "State", state), 0);
        assert_int_equal(value_add_string(v, NULL, first), 0);
        if (second)
                assert_int_equal(value_add_string(v, NULL, second), 0);
        assert_int_equal(value_add(d, "Parts", v), 0);
}

static void part_without_a_gpu_is_a_problem(void **state) {
        latent_value *list = value_new(LATENT_VALUE_LIST);
        Findings f = {};

        check_parts(&f, list); /* none is known yet */
        assert_int_equal(f.n, 0);
        add_parts(gpu(list, "/a", "0000:41:00.0"), "gone", "vae", NULL);
        check_parts(&f, list); /* nor which of them a worker drives */
        assert_int_equal(f.n, 0);
        add_parts(gpu(list, "/b", "0000:42:00.0"), "idle", "conditioner", "denoiser");
        check_parts(&f, list);
        assert_int_equal(f.n, 1);
        expect(&f, LEVEL_PROBLEM, "none is for the vae: of those that VaeGpus= of latentd.conf names none takes part");
        add_parts(gpu(list, "/c", "0000:43:00.0"), "idle", "vae", NULL);
        check_parts(&f, list);
        assert_int_equal(f.n, 1);
        latent_value_free(list);
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
                TEST(links_slow_one_is_explained),
                cmocka_unit_test(device_notes_are_warnings),
                cmocka_unit_test(part_without_a_gpu_is_a_problem),
                cmocka_unit_test(regions_with_errors_warn),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
