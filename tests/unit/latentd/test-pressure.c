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
#include <sys/stat.h>

#include "service/latentd/pressure.h"
#include "service/shared/cleanup.h"

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
                cmocka_unit_test(pressure_new_of_this_machine),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
