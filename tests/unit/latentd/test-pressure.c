/* SPDX-License-Identifier: Apache-2.0 */
/* In a made tree files cannot be polled, as on kernels that refuse the trigger; the real ones are tried too. */
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

#include "service/latentd/pressure.h"
#include "service/shared/cleanup.h"
#include "service/shared/clock.h"

static char root[64];

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *ftw) {
        return remove(path);
}

static void make_folder(const char *name) {
        char path[256];

        (void) snprintf(path, sizeof(path), "%s/%s", root, name);
        assert_int_equal(mkdir(path, 0755), 0);
}

static void make_file(const char *name, const char *text) {
        char path[256];
        FILE *f;

        (void) snprintf(path, sizeof(path), "%s/%s", root, name);
        f = fopen(path, "we");
        assert_non_null(f);
        (void) fputs(text, f);
        assert_int_equal(fclose(f), 0);
}

static size_t read_file(const char *name, char *ret, size_t size) {
        char path[256];
        ssize_t n;
        int fd;

        (void) snprintf(path, sizeof(path), "%s/%s", root, name);
        fd = open(path, O_RDONLY | O_CLOEXEC);
        assert_true(fd >= 0);
        n = read(fd, ret, size - 1);
        (void) close(fd);
        assert_true(n >= 0);
        ret[n] = '\0';
        return (size_t) n;
}

static int setup(void **state) {
        (void) snprintf(root, sizeof(root), "/tmp/latentd-pressure-XXXXXX");
        return mkdtemp(root) ? 0 : -1;
}

static int teardown(void **state) {
        return nftw(root, remove_one, 8, FTW_DEPTH | FTW_PHYS);
}

static void never(void *userdata) {
        fail_msg("there was no pressure");
}

static void pressure_new_nothing_there_is_no_error(void **state) {
        sd_event *event;
        Pressure *p = NULL;

        assert_true(sd_event_new(&event) >= 0);
        assert_int_equal(pressure_new(event, root, never, NULL, &p), 0);
        assert_int_equal(pressure_count(p), 0);
        assert_null(pressure_free(p));
        sd_event_unref(event);
}

/* Every group up to the root is asked, with the words that the kernel expects; a plain file cannot be waited for. */
static void pressure_new_asks_machine_and_groups(void **state) {
        static const char *const files[] = {
                "proc/pressure/memory",
                "sys/fs/cgroup/a.slice/b.service/memory.pressure",
                "sys/fs/cgroup/a.slice/memory.pressure",
        };
        sd_event *event;
        Pressure *p = NULL;
        char text[64];

        make_folder("proc");
        make_folder("proc/self");
        make_folder("proc/pressure");
        make_folder("sys");
        make_folder("sys/fs");
        make_folder("sys/fs/cgroup");
        make_folder("sys/fs/cgroup/a.slice");
        make_folder("sys/fs/cgroup/a.slice/b.service");
        make_file("proc/self/cgroup", "0::/a.slice/b.service\n");
        make_file("sys/fs/cgroup/memory.pressure", "");
        for (unsigned i = 0; i < ELEMENTSOF(files); i++)
                make_file(files[i], "");

        assert_true(sd_event_new(&event) >= 0);
        assert_int_equal(pressure_new(event, root, never, NULL, &p), 0);
        assert_int_equal(pressure_count(p), 0);
        for (unsigned i = 0; i < ELEMENTSOF(files); i++) {
                assert_int_equal(read_file(files[i], text, sizeof(text)), strlen("some 150000 2000000") + 1);
                assert_string_equal(text, "some 150000 2000000");
        }
        assert_int_equal(read_file("sys/fs/cgroup/memory.pressure", text, sizeof(text)), 0); /* the machine's again */
        assert_null(pressure_free(p));
        sd_event_unref(event);
}

static void count(void *userdata) {
        unsigned *n = userdata;

        (*n)++;
}

static void set_total(char *map, unsigned total) {
        (void) snprintf(map, 4096,
                "some avg10=0.00 avg60=0.00 avg300=0.00 total=%u\n"
                "full avg10=0.00 avg60=0.00 avg300=0.00 total=%u\n",
                total, total / 2);
}

/* A file that can be read and takes no trigger, as before Linux 6.5: it is looked at every 2 s. */
static void pressure_new_trigger_refused_looks_itself(void **state) {
        CLEANUP_CLOSE int fd = memfd_create("pressure", MFD_CLOEXEC | MFD_ALLOW_SEALING);
        char link[64], path[256], *map;
        Pressure *p = NULL;
        sd_event *event;
        uint64_t end;
        unsigned n = 0;

        assert_true(fd >= 0);
        assert_int_equal(ftruncate(fd, 4096), 0);
        map = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        assert_ptr_not_equal(map, MAP_FAILED);
        set_total(map, 5000000);
        assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE), 0);
        make_folder("proc");
        make_folder("proc/pressure");
        (void) snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
        (void) snprintf(path, sizeof(path), "%s/proc/pressure/memory", root);
        assert_int_equal(symlink(link, path), 0);

        assert_true(sd_event_new(&event) >= 0);
        assert_int_equal(pressure_new(event, root, count, &n, &p), 0);
        assert_int_equal(pressure_count(p), 1);
        set_total(map, 5149999); /* what it was before does not count, nor what is less than the threshold */
        end = clock_usec() + 2200000;
        while (clock_usec() < end)
                assert_true(sd_event_run(event, 100000) >= 0);
        assert_int_equal(n, 0);
        set_total(map, 5299999);
        end = clock_usec() + UINT64_C(60000000);
        while (n == 0 && clock_usec() < end)
                assert_true(sd_event_run(event, 100000) >= 0);
        assert_int_equal(n, 1);
        assert_null(pressure_free(p));
        sd_event_unref(event);
        (void) munmap(map, 4096);
}

/* Whatever this machine allows, it must not fail. */
static void pressure_new_of_this_machine(void **state) {
        sd_event *event;
        Pressure *p = NULL;

        assert_true(sd_event_new(&event) >= 0);
        assert_int_equal(pressure_new(event, "", never, NULL, &p), 0);
        print_message("# %u sources of pressure can be watched here\n", pressure_count(p));
        assert_null(pressure_free(p));
        sd_event_unref(event);
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test_setup_teardown(pressure_new_nothing_there_is_no_error, setup, teardown),
                cmocka_unit_test_setup_teardown(pressure_new_asks_machine_and_groups, setup, teardown),
                cmocka_unit_test_setup_teardown(pressure_new_trigger_refused_looks_itself, setup, teardown),
                cmocka_unit_test(pressure_new_of_this_machine),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
