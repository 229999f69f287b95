/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "service/latentd/socket-path.h"
#include "service/shared/cleanup.h"

static const char content[] = "not yours";

typedef struct Test {
        char folder[64], path[80], other[80];
        int fd, second;
        SocketPath bound;
        Fault fault;
} Test;

static int new_socket(int type) {
        int fd = socket(AF_UNIX, type | SOCK_CLOEXEC, 0);

        assert_true(fd >= 0);
        return fd;
}

static int setup(void **state) {
        Test *t = calloc(1, sizeof(*t));

        (void) snprintf(t->folder, sizeof(t->folder), "/tmp/latentd-socket-XXXXXX");
        if (!mkdtemp(t->folder))
                return -1;
        (void) snprintf(t->path, sizeof(t->path), "%s/bus", t->folder);
        (void) snprintf(t->other, sizeof(t->other), "%s/other", t->folder);
        t->fd = new_socket(SOCK_STREAM);
        t->second = new_socket(SOCK_STREAM);
        *state = t;
        return 0;
}

static int teardown(void **state) {
        Test *t = *state;

        cleanup_closep(&t->fd);
        cleanup_closep(&t->second);
        free(t->bound.path);
        (void) unlink(t->other);
        (void) unlink(t->path);
        (void) rmdir(t->path);
        (void) rmdir(t->folder);
        free(t);
        return 0;
}

static void write_file(const char *path) {
        CLEANUP_CLOSE int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0640);

        assert_true(fd >= 0);
        assert_int_equal(write(fd, content, sizeof(content)), sizeof(content));
}

static void assert_content(const char *path) {
        CLEANUP_CLOSE int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
        char found[sizeof(content) + 1] = "";

        assert_true(fd >= 0);
        assert_int_equal(read(fd, found, sizeof(found)), sizeof(content));
        assert_memory_equal(found, content, sizeof(content));
}

static void assert_refused(Test *t, const char *words) {
        assert_int_equal(socket_path_bind(t->fd, t->path, &t->bound, &t->fault), -EADDRINUSE);
        assert_string_equal(t->fault.name, FAULT_IO);
        assert_non_null(strstr(t->fault.text, words));
        assert_non_null(strstr(t->fault.text, "choose another path"));
        assert_null(t->bound.path);
}

static bool exists(const char *path) {
        struct stat st;

        return lstat(path, &st) >= 0;
}

static void bind_plainly(int fd, const char *path) {
        struct sockaddr_un sa = { .sun_family = AF_UNIX };

        (void) snprintf(sa.sun_path, sizeof(sa.sun_path), "%s", path);
        assert_int_equal(bind(fd, (const struct sockaddr *) &sa, sizeof(sa)), 0);
}

/* As one that was killed leaves it: bound, and nobody listens. */
static void leave_socket(Test *t) {
        CLEANUP_CLOSE int fd = new_socket(SOCK_STREAM);

        bind_plainly(fd, t->path);
}

static void bind_nothing_there_binds_and_removes(void **state) {
        Test *t = *state;

        assert_int_equal(socket_path_bind(t->fd, t->path, &t->bound, &t->fault), 0);
        assert_true(exists(t->path));
        socket_path_remove(&t->bound);
        assert_false(exists(t->path));
        assert_null(t->bound.path);
        socket_path_remove(&t->bound);
}

static void bind_abandoned_socket_replaces(void **state) {
        Test *t = *state;

        leave_socket(t);
        assert_int_equal(socket_path_bind(t->fd, t->path, &t->bound, &t->fault), 0);
        assert_int_equal(listen(t->fd, 1), 0);
        socket_path_remove(&t->bound);
        assert_false(exists(t->path));
}

static void bind_live_socket_refuses(void **state) {
        Test *t = *state;
        SocketPath live = {};

        assert_int_equal(socket_path_bind(t->second, t->path, &live, &t->fault), 0);
        assert_int_equal(listen(t->second, 1), 0);
        assert_refused(t, "listens there");
        assert_true(exists(t->path));
        socket_path_remove(&live);
}

static void bind_live_datagram_socket_refuses(void **state) {
        Test *t = *state;
        CLEANUP_CLOSE int live = new_socket(SOCK_DGRAM);

        bind_plainly(live, t->path);
        assert_refused(t, "cannot be seen");
        assert_true(exists(t->path));
}

static void bind_regular_file_refuses(void **state) {
        Test *t = *state;

        write_file(t->path);
        assert_refused(t, "a regular file");
        assert_content(t->path);
}

static void bind_link_refuses(void **state) {
        Test *t = *state;

        write_file(t->other);
        assert_int_equal(symlink(t->other, t->path), 0);
        assert_refused(t, "a symbolic link");
        assert_content(t->other);
        assert_true(exists(t->path));
}

/* connect() would go through the link, and find nobody. */
static void bind_link_to_abandoned_socket_refuses(void **state) {
        Test *t = *state;

        leave_socket(t);
        assert_int_equal(rename(t->path, t->other), 0);
        assert_int_equal(symlink(t->other, t->path), 0);
        assert_refused(t, "a symbolic link");
        assert_true(exists(t->path) && exists(t->other));
}

static void bind_fifo_refuses(void **state) {
        Test *t = *state;

        assert_int_equal(mkfifo(t->path, 0600), 0);
        assert_refused(t, "a FIFO");
        assert_true(exists(t->path));
}

static void bind_directory_refuses(void **state) {
        Test *t = *state;

        assert_int_equal(mkdir(t->path, 0700), 0);
        assert_refused(t, "a directory");
}

/* Who is not root cannot make one. */
static void bind_socket_of_another_user_refuses(void **state) {
        Test *t = *state;

        if (geteuid() != 0)
                skip();
        leave_socket(t);
        if (lchown(t->path, 12345, 12345) < 0)
                skip();
        assert_refused(t, "user 12345");
        assert_true(exists(t->path));
}

static void bind_long_path_refuses(void **state) {
        Test *t = *state;
        char path[sizeof(((struct sockaddr_un *) NULL)->sun_path) + 1];

        memset(path, 'x', sizeof(path) - 1);
        path[0] = '/';
        path[sizeof(path) - 1] = '\0';
        assert_int_equal(socket_path_bind(t->fd, path, &t->bound, &t->fault), -ENAMETOOLONG);
}

static void remove_file_in_its_place_keeps(void **state) {
        Test *t = *state;

        assert_int_equal(socket_path_bind(t->fd, t->path, &t->bound, &t->fault), 0);
        assert_int_equal(unlink(t->path), 0);
        write_file(t->path);
        socket_path_remove(&t->bound);
        assert_content(t->path);
}

static void remove_other_socket_in_its_place_keeps(void **state) {
        Test *t = *state;
        SocketPath other = {};

        assert_int_equal(socket_path_bind(t->fd, t->path, &t->bound, &t->fault), 0);
        assert_int_equal(rename(t->path, t->other), 0);
        assert_int_equal(socket_path_bind(t->second, t->path, &other, &t->fault), 0);
        socket_path_remove(&t->bound);
        assert_true(exists(t->path) && exists(t->other));
        socket_path_remove(&other);
        assert_false(exists(t->path));
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test_setup_teardown(bind_nothing_there_binds_and_removes, setup, teardown),
                cmocka_unit_test_setup_teardown(bind_abandoned_socket_replaces, setup, teardown),
                cmocka_unit_test_setup_teardown(bind_live_socket_refuses, setup, teardown),
                cmocka_unit_test_setup_teardown(bind_live_datagram_socket_refuses, setup, teardown),
                cmocka_unit_test_setup_teardown(bind_regular_file_refuses, setup, teardown),
                cmocka_unit_test_setup_teardown(bind_link_refuses, setup, teardown),
                cmocka_unit_test_setup_teardown(bind_link_to_abandoned_socket_refuses, setup, teardown),
                cmocka_unit_test_setup_teardown(bind_fifo_refuses, setup, teardown),
                cmocka_unit_test_setup_teardown(bind_directory_refuses, setup, teardown),
                cmocka_unit_test_setup_teardown(bind_socket_of_another_user_refuses, setup, teardown),
                cmocka_unit_test_setup_teardown(bind_long_path_refuses, setup, teardown),
                cmocka_unit_test_setup_teardown(remove_file_in_its_place_keeps, setup, teardown),
                cmocka_unit_test_setup_teardown(remove_other_socket_in_its_place_keeps, setup, teardown),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
