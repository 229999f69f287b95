/* SPDX-License-Identifier: Apache-2.0 */
#include "service/shared/text-file.h"

#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "service/shared/cleanup.h"

static char folder[64], path[80];

static int setup(void **state) {
        (void) snprintf(folder, sizeof(folder), "/tmp/latent-text-XXXXXX");
        if (!mkdtemp(folder))
                return -1;
        (void) snprintf(path, sizeof(path), "%s/x", folder);
        return 0;
}

static int teardown(void **state) {
        (void) unlink(path);
        return rmdir(folder);
}

static void put(size_t size) {
        CLEANUP_CLOSE int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
        static const char text[16] = "0123456789abcdef";

        assert_true(size <= sizeof(text));
        assert_int_equal(write(fd, text, size), size);
}

static void assert_error(const char *name, int error) {
        char *text = NULL;
        size_t size = 77;

        assert_int_equal(text_file_read(name, 10, &text, &size), error);
        assert_null(text);
        assert_int_equal(size, 77);
        assert_true(strlen(text_file_strerror(error)) > 0);
}

static void read_at_the_limit_is_whole(void **state) {
        for (size_t n = 0; n <= 10; n += 5) {
                CLEANUP_FREE char *text = NULL;
                size_t size = 77;

                put(n);
                assert_int_equal(text_file_read(path, 10, &text, &size), 0);
                assert_int_equal(size, n);
                assert_int_equal(strlen(text), n);
                assert_memory_equal(text, "0123456789", n);
        }
}

static void read_beyond_the_limit_refuses(void **state) {
        put(11);
        assert_error(path, -EFBIG);
}

/* None of them ends or blocks this. */
static void read_other_files_refuses(void **state) {
        assert_error(path, -ENOENT);
        assert_error(folder, -EISDIR);
        assert_error("/dev/zero", -ENODEV);
        assert_int_equal(mkfifo(path, 0600), 0);
        assert_error(path, -ENODEV);
}

static void read_null_device_is_empty(void **state) {
        CLEANUP_FREE char *text = NULL;
        size_t size = 77;

        assert_int_equal(text_file_read("/dev/null", 10, &text, &size), 0);
        assert_int_equal(size, 0);
        assert_string_equal(text, "");
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test_setup_teardown(read_at_the_limit_is_whole, setup, teardown),
                cmocka_unit_test_setup_teardown(read_beyond_the_limit_refuses, setup, teardown),
                cmocka_unit_test_setup_teardown(read_other_files_refuses, setup, teardown),
                cmocka_unit_test_setup_teardown(read_null_device_is_empty, setup, teardown),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
