/* SPDX-License-Identifier: Apache-2.0 */
#include "service/shared/log.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "service/shared/cleanup.h"
#include "tests/unit/shared/cmocka-all.h"

/* stderr while a test runs: an unnamed file */
static int capture_fd = -EBADF, saved_fd = -EBADF;

static int capture_start(void **state) {
        capture_fd = memfd_create("stderr", MFD_CLOEXEC);
        saved_fd = dup(STDERR_FILENO);
        if (capture_fd < 0 || saved_fd < 0 || dup2(capture_fd, STDERR_FILENO) < 0)
                return -1;

        (void) fcntl(STDERR_FILENO, F_SETFL, O_APPEND);
        (void) unsetenv("JOURNAL_STREAM");
        log_open("prog");
        log_set_max_level(LOG_INFO);
        return 0;
}

static int capture_stop(void **state) {
        (void) dup2(saved_fd, STDERR_FILENO);
        (void) close(saved_fd);
        (void) close(capture_fd);
        return 0;
}

static char *captured(char *buf, size_t n) {
        ssize_t k = pread(capture_fd, buf, n - 1, 0);

        assert_true(k >= 0);
        buf[k] = '\0';
        return buf;
}

static void log_info_goes_to_stderr_with_program(void **state) {
        char buf[256];

        log_info("hello %d", 7);
        assert_string_equal(captured(buf, sizeof(buf)), "prog: hello 7\n");
}

static void log_error_appends_errno_and_returns_it(void **state) {
        char buf[256];

        errno = 77;
        assert_int_equal(log_error(-ENOENT, "Cannot open %s", "x"), -ENOENT);
        assert_int_equal(log_error(0, "plain"), 0);
        assert_int_equal(log_warning_errno(-EIO, "reading"), -EIO);
        assert_int_equal(errno, 77);
        assert_string_equal(captured(buf, sizeof(buf)),
                "prog: Cannot open x: No such file or directory\nprog: "
                "plain\nprog: reading: Input/output error\n");
}

static void log_max_level_filters(void **state) {
        char buf[256];

        log_debug("no");
        log_set_max_level(LOG_WARNING);
        log_info("no");
        log_notice("no");
        log_warning("yes");
        assert_int_equal(log_error(-EIO, "e"), -EIO);
        log_set_max_level(LOG_DEBUG);
        log_debug("dbg");
        assert_string_equal(
                captured(buf, sizeof(buf)), "prog: yes\nprog: e: Input/output error\nprog: dbg\n");
}

static void log_line_break_stays_in_line(void **state) {
        char buf[256];

        log_info("a\nprog: forged\x1b[0m");
        assert_string_equal(captured(buf, sizeof(buf)), "prog: a prog: forged [0m\n");
}

static void log_full_failing_write_keeps_errno(void **state) {
        CLEANUP_CLOSE int full = open("/dev/full", O_WRONLY | O_CLOEXEC);

        if (full < 0)
                skip();
        assert_true(dup2(full, STDERR_FILENO) >= 0);
        errno = 77;
        assert_int_equal(log_error(-EIO, "x"), -EIO);
        assert_int_equal(errno, 77);
}

static void log_long_text_is_cut(void **state) {
        char text[5000], buf[8192];

        memset(text, 'x', sizeof(text) - 1);
        text[sizeof(text) - 1] = '\0';
        log_info("%s", text);
        assert_int_equal(strlen(captured(buf, sizeof(buf))), strlen("prog: ") + 2047 + 1);
        assert_int_equal(buf[strlen(buf) - 1], '\n');
}

static void log_open_foreign_journal_stream_is_stderr(void **state) {
        struct stat st;
        char buf[256];

        assert_int_equal(fstat(STDERR_FILENO, &st), 0);
        (void) snprintf(buf, sizeof(buf), "%llu:%llu", (unsigned long long) st.st_dev,
                (unsigned long long) st.st_ino + 1);
        (void) setenv("JOURNAL_STREAM", buf, 1);
        log_open("prog");
        log_info("x");
        assert_string_equal(captured(buf, sizeof(buf)), "prog: x\n");
}

/* Without a journal to take the message it goes to the stream that leads there, with its priority. */
static void log_open_own_journal_stream_keeps_priority(void **state) {
        struct stat st;
        char buf[256];

        if (access("/run/systemd/journal/socket", F_OK) == 0)
                skip(); /* it would write into the journal of this machine */

        assert_int_equal(fstat(STDERR_FILENO, &st), 0);
        (void) snprintf(buf, sizeof(buf), "%llu:%llu", (unsigned long long) st.st_dev,
                (unsigned long long) st.st_ino);
        (void) setenv("JOURNAL_STREAM", buf, 1);
        log_open("prog");
        log_warning("x");
        assert_string_equal(captured(buf, sizeof(buf)), "<4>x\n");
}

static void *log_many(void *p) {
        for (int i = 0; i < 200; i++)
                log_info("%s", (const char *) p);

        return NULL;
}

static void log_threads_lines_stay_whole(void **state) {
        static char texts[4][101];
        CLEANUP_FREE char *buf = malloc(1 << 20);
        pthread_t threads[4];
        size_t lines = 0;

        assert_non_null(buf);
        for (int i = 0; i < 4; i++) {
                memset(texts[i], 'a' + i, 100);
                assert_int_equal(pthread_create(&threads[i], NULL, log_many, texts[i]), 0);
        }
        for (int i = 0; i < 4; i++)
                assert_int_equal(pthread_join(threads[i], NULL), 0);

        (void) captured(buf, 1 << 20);
        for (char *line = strtok(buf, "\n"); line; line = strtok(NULL, "\n"), lines++) {
                assert_int_equal(strlen(line), strlen("prog: ") + 100);
                assert_string_equal(line + 6, texts[line[6] - 'a']);
        }
        assert_int_equal(lines, 800);
}

static void log_level_from_string_known_and_unknown(void **state) {
        static const char *const bad[] = {"", "Debug", "8", "-1", "77", "7x", "warn", "info "};
        int level = 99;

        for (size_t i = 0; i < ELEMENTSOF(bad); i++)
                assert_int_equal(log_level_from_string(bad[i], &level), -EINVAL);
        assert_int_equal(level, 99);

        assert_int_equal(log_level_from_string("debug", &level), 0);
        assert_int_equal(level, LOG_DEBUG);
        assert_int_equal(log_level_from_string("info", &level), 0);
        assert_int_equal(level, LOG_INFO);
        assert_int_equal(log_level_from_string("notice", &level), 0);
        assert_int_equal(level, LOG_NOTICE);
        assert_int_equal(log_level_from_string("warning", &level), 0);
        assert_int_equal(level, LOG_WARNING);
        assert_int_equal(log_level_from_string("error", &level), 0);
        assert_int_equal(level, LOG_ERR);
        assert_int_equal(log_level_from_string("0", &level), 0);
        assert_int_equal(level, LOG_EMERG);
        assert_int_equal(log_level_from_string("7", &level), 0);
        assert_int_equal(level, LOG_DEBUG);
}

#define CAPTURED(test) cmocka_unit_test_setup_teardown(test, capture_start, capture_stop)

int main(void) {
        const struct CMUnitTest tests[] = {
                CAPTURED(log_info_goes_to_stderr_with_program),
                CAPTURED(log_error_appends_errno_and_returns_it),
                CAPTURED(log_max_level_filters),
                CAPTURED(log_line_break_stays_in_line),
                CAPTURED(log_full_failing_write_keeps_errno),
                CAPTURED(log_long_text_is_cut),
                CAPTURED(log_open_foreign_journal_stream_is_stderr),
                CAPTURED(log_open_own_journal_stream_keeps_priority),
                CAPTURED(log_threads_lines_stay_whole),
                cmocka_unit_test(log_level_from_string_known_and_unknown),
        };

        return cmocka_run_group_tests_name("log", tests, NULL, NULL);
}
