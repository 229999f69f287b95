/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "service/latentd/file-source.h"
#include "service/shared/cleanup.h"

typedef struct Test {
        char file[64], mountinfo[64];
        int fd;
        unsigned major, minor;
        unsigned long long mount_id;
        Fault fault;
} Test;

static int setup(void **state) {
        Test *t = calloc(1, sizeof(*t));
        struct statx stx;
        int fd;

        (void) snprintf(t->file, sizeof(t->file), "/tmp/latentd-file-XXXXXX");
        (void) snprintf(t->mountinfo, sizeof(t->mountinfo), "/tmp/latentd-mounts-XXXXXX");
        t->fd = mkstemp(t->file);
        fd = mkstemp(t->mountinfo);
        if (t->fd < 0 || fd < 0 || statx(t->fd, "", AT_EMPTY_PATH, STATX_TYPE | STATX_MNT_ID, &stx) < 0)
                return -1;
        (void) close(fd);
        t->major = stx.stx_dev_major;
        t->minor = stx.stx_dev_minor;
        t->mount_id = stx.stx_mnt_id;
        *state = t;
        return 0;
}

static int teardown(void **state) {
        Test *t = *state;

        (void) close(t->fd);
        (void) unlink(t->file);
        (void) unlink(t->mountinfo);
        free(t);
        return 0;
}

/* One line for another mount of the same device, one for the file's own mount; an empty type leaves the line
 * out. */
static int check(Test *t, const char *type_by_device, const char *type_by_id) {
        FILE *f = fopen(t->mountinfo, "we");

        assert_non_null(f);
        (void) fprintf(f, "1 0 0:5 / /proc rw shared:1 - proc proc rw\n");
        if (type_by_id[0])
                (void) fprintf(f,
                        "%llu 1 9999:1 / /a\\040b rw,relatime shared:2 master:3 - %s /dev/x rw,x=y\n",
                        t->mount_id, type_by_id);
        if (type_by_device[0])
                (void) fprintf(
                        f, "999999999 1 %u:%u / /b rw - %s /dev/x rw\n", t->major, t->minor, type_by_device);
        (void) fprintf(f, "garbage line\n");
        assert_int_equal(fclose(f), 0);

        t->fault = (Fault){};
        return file_source_check(t->fd, "weights.safetensors", t->mountinfo, NULL, &t->fault);
}

static void file_source_check_every_allowed_type_is_accepted(void **state) {
        static const char *const types[] = {"ext4", "ext3", "ext2", "xfs", "btrfs", "f2fs", "zfs",
                "bcachefs", "tmpfs", "overlay", "nfs", "nfs4"};
        Test *t = *state;

        for (size_t i = 0; i < ELEMENTSOF(types); i++) {
                assert_int_equal(check(t, types[i], ""), 0);
                assert_int_equal(check(t, "", types[i]), 0);
        }
}

static void file_source_check_other_types_are_refused_by_name(void **state) {
        static const char *const types[] = {
                "fuse.sshfs", "fuse", "fuseblk", "9p", "cifs", "proc", "ext4x", "autofs", "virtiofs"};
        Test *t = *state;

        for (size_t i = 0; i < ELEMENTSOF(types); i++) {
                assert_int_equal(check(t, types[i], ""), -EACCES);
                assert_string_equal(t->fault.name, FAULT_ACCESS_DENIED);
                assert_non_null(strstr(t->fault.text, types[i]));
                assert_non_null(strstr(t->fault.text, "weights.safetensors"));
        }
}

static void file_source_check_own_mount_counts_more_than_the_device(void **state) {
        Test *t = *state;

        assert_int_equal(check(t, "ext4", "fuse"), -EACCES);
        assert_int_equal(check(t, "fuse", "ext4"), 0);
}

static void file_source_check_unknown_mount_is_refused(void **state) {
        Test *t = *state;

        assert_int_equal(check(t, "", ""), -EACCES);
        assert_non_null(strstr(t->fault.text, "mount table"));
}

static void file_source_check_here_and_now_is_accepted(void **state) {
        Test *t = *state;

        assert_int_equal(file_source_check(t->fd, "x", "/proc/self/mountinfo", NULL, &t->fault), 0);
}

static void file_source_open_never_leaves_a_flag_behind(void **state) {
        Test *t = *state;
        FileSource s;

        assert_int_equal(file_source_open(&file_io_system, t->fd, &s), 0);
        assert_true(s.fd >= 0 && s.fd != t->fd);
        assert_int_equal(fcntl(s.fd, F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
        /* Would let the ring try reads on the loader thread that may wait for a server. */
        assert_int_equal(fcntl(s.fd, F_GETFL) & O_NONBLOCK, 0);
        file_source_done(&s);
        assert_int_equal(s.fd, -EBADF);
        assert_int_equal(fcntl(t->fd, F_GETFL) & O_DIRECT, 0);
        file_source_done(&s);
}

/* What a client's descriptor gets that we may not open again. */
static void file_source_done_takes_the_flag_back(void **state) {
        Test *t = *state;
        FileSource s = {.io = &file_io_system,
                .fd = fcntl(t->fd, F_DUPFD_CLOEXEC, 3),
                .direct = true,
                .restore = true};

        if (fcntl(s.fd, F_SETFL, fcntl(s.fd, F_GETFL) | O_DIRECT) < 0)
                skip(); /* a file system without it */
        assert_int_not_equal(fcntl(t->fd, F_GETFL) & O_DIRECT, 0);
        file_source_done(&s);
        assert_int_equal(fcntl(t->fd, F_GETFL) & O_DIRECT, 0);
}

static void file_source_open_unreadable_file_uses_the_passed_descriptor(void **state) {
        Test *t = *state;
        pid_t pid;
        int status;

        assert_int_equal(fchmod(t->fd, 0), 0);
        if (geteuid() != 0)
                skip();

        /* Another user, who got the descriptor from its owner. */
        pid = fork();
        assert_true(pid >= 0);
        if (pid == 0) {
                FileSource s;

                if (setresuid(65534, 65534, 65534) < 0 || file_source_open(&file_io_system, t->fd, &s) < 0)
                        _exit(1);
                if (s.direct && (!s.restore || !(fcntl(t->fd, F_GETFL) & O_DIRECT)))
                        _exit(2);
                file_source_done(&s);
                _exit(fcntl(t->fd, F_GETFL) & O_DIRECT ? 3 : 0);
        }
        assert_int_equal(waitpid(pid, &status, 0), pid);
        assert_int_equal(status, 0);
}

static void file_source_same_sees_every_field(void **state) {
        const FileIdentity a = {1, 2, 3, 4, 5, 6, 7};

        assert_true(file_source_same(&a, &(FileIdentity){1, 2, 3, 4, 5, 6, 7}));
        for (size_t i = 0; i < 7; i++) {
                FileIdentity b = a;

                ((uint64_t *) &b)[i]++;
                assert_false(file_source_same(&a, &b));
        }
}

static void file_source_read_small_gives_the_text(void **state) {
        CLEANUP_FREE char *text = NULL;
        Test *t = *state;

        assert_int_equal(write(t->fd, "{\"a\": 1}", 8), 8);
        assert_int_equal(file_source_read_small(t->fd, "c.json", 8, &text, &t->fault), 0);
        assert_string_equal(text, "{\"a\": 1}");

        char *more = NULL;
        assert_int_equal(file_source_read_small(t->fd, "c.json", 9, &more, &t->fault), -ESTALE);
        assert_string_equal(t->fault.name, FAULT_FILE_CHANGED);
        t->fault = (Fault){};
        assert_int_equal(file_source_read_small(t->fd, "c.json", 0, &more, &t->fault), -EBADMSG);
        assert_null(more);
}

static void file_source_read_header_longer_than_a_page(void **state) {
        Test *t = *state;
        CLEANUP_FREE char *header = calloc(1, 20008);
        StHeader *h = NULL;
        uint64_t n = 20000;

        memset(header, ' ', 20008);
        memcpy(header, &n, 8);
        memcpy(header + 8, "{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]}}", 53);
        assert_int_equal(pwrite(t->fd, header, 20008, 0), 20008);
        assert_int_equal(ftruncate(t->fd, 20010), 0);
        if (file_source_read_header(t->fd, "x.safetensors", 20010, &h, &t->fault) < 0)
                fail_msg("%s", t->fault.text);
        assert_int_equal(h->n_tensors, 1);
        assert_int_equal(h->data_offset, 20008);
        st_header_free(h);

        assert_int_equal(file_source_read_header(t->fd, "x.safetensors", 20011, &h, &t->fault), -EBADMSG);
        t->fault = (Fault){};
        assert_int_equal(ftruncate(t->fd, 9999), 0);
        assert_int_equal(file_source_read_header(t->fd, "x.safetensors", 20010, &h, &t->fault), -ESTALE);
        assert_non_null(strstr(t->fault.text, "9999 found"));
}

int main(void) {
#define TEST(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
        const struct CMUnitTest tests[] = {
                TEST(file_source_check_every_allowed_type_is_accepted),
                TEST(file_source_check_other_types_are_refused_by_name),
                TEST(file_source_check_own_mount_counts_more_than_the_device),
                TEST(file_source_check_unknown_mount_is_refused),
                TEST(file_source_check_here_and_now_is_accepted),
                TEST(file_source_open_never_leaves_a_flag_behind),
                TEST(file_source_done_takes_the_flag_back),
                TEST(file_source_open_unreadable_file_uses_the_passed_descriptor),
                TEST(file_source_same_sees_every_field),
                TEST(file_source_read_small_gives_the_text),
                TEST(file_source_read_header_longer_than_a_page),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
