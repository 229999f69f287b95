/* SPDX-License-Identifier: Apache-2.0 */
/* A service manager played by the test: a notify socket, and descriptors handed in as systemd does. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include "service/latentd/fd-store.h"
#include "service/latentd/region.h"
#include "service/shared/cleanup.h"
#include "service/shared/memfd.h"

#define FIRST 3 /* as in sd_listen_fds(3) */

static const FileIdentity identity = {.device = 1, .inode = 2, .size = 3 * (1 << 20) + 5, .ctime_sec = 9};
static const NumaPolicy policy = {.kind = NUMA_DEFAULT};

/* ---- regions ---- */

static Region *make_region(void) {
        Region *r = NULL;

        assert_int_equal(region_new(1, &identity, &policy, &r), 0);
        memset(r->map, 7, identity.size);
        region_checksum(r, 0, region_data_bytes(identity.size));
        region_write_trailer(r);
        return r;
}

static RegionTrailer *trailer_of(const Region *r) {
        return (RegionTrailer *) (void *) ((char *) r->map + region_data_bytes(r->identity.size));
}

/* A second descriptor, since adopting takes it over. */
static int adopt(const Region *r, const char *name, Region **ret, const char **ret_why) {
        int fd = fcntl(r->fd, F_DUPFD_CLOEXEC, 3), k;

        k = region_adopt(5, fd, name, ret, ret_why);
        if (k < 0)
                (void) close(fd);
        return k;
}

static void region_adopt_complete_is_taken_over(void **state) {
        Region *r = make_region(), *a = NULL;
        char name[REGION_NAME_MAX];
        const char *why;

        r->last_used_usec = 77;
        region_set_last_used(r);
        region_store_name(&identity, &policy, name);
        assert_int_equal(strlen(name), 18);
        assert_int_equal(strncmp(name, "w-", 2), 0);
        assert_int_equal(adopt(r, name, &a, &why), 0);
        assert_null(why);
        assert_int_equal(a->state, REGION_COMPLETE);
        assert_int_equal(a->size, r->size);
        assert_int_equal(a->last_used_usec, 77);
        assert_memory_equal(&a->identity, &identity, sizeof(identity));
        assert_true(a->unverified && a->stored && a->adopted);
        assert_memory_equal(a->map, r->map, identity.size);
        assert_int_equal(region_verify(a, 0, region_data_bytes(identity.size)), 0);
        assert_int_equal(region_verify_trailer(a), 0);

        /* A byte that somebody else changes is seen here, in its block. */
        ((char *) r->map)[(1 << 20) + 1] ^= 1;
        assert_int_equal(region_verify(a, 0, 1 << 20), 0);
        assert_int_equal(region_verify(a, 1 << 20, 2 << 20), -EBADMSG);
        trailer_of(r)->crc_count++;
        assert_int_equal(region_verify_trailer(a), -EBADMSG);
        (void) region_free(a);
        (void) region_free(r);
}

static void region_store_name_differs_with_every_field(void **state) {
        FileIdentity other[] = {identity, identity, identity, identity, identity, identity, identity};
        NumaPolicy bind = {.kind = NUMA_BIND, .node = 0}, bind1 = {.kind = NUMA_BIND, .node = 1};
        char names[10][REGION_NAME_MAX];

        other[0].device++, other[1].inode++, other[2].size++, other[3].mtime_sec++, other[4].mtime_nsec++;
        other[5].ctime_sec++, other[6].ctime_nsec++;
        for (unsigned i = 0; i < 7; i++)
                region_store_name(&other[i], &policy, names[i]);
        region_store_name(&identity, &policy, names[7]);
        region_store_name(&identity, &bind, names[8]);
        region_store_name(&identity, &bind1, names[9]);
        for (unsigned i = 0; i < 10; i++)
                for (unsigned k = 0; k < i; k++)
                        assert_string_not_equal(names[i], names[k]);
}

static void region_adopt_wrong_trailer_is_refused(void **state) {
        char name[REGION_NAME_MAX];

        region_store_name(&identity, &policy, name);
        for (unsigned i = 0; i < 11; i++) {
                Region *r = make_region(), *a = NULL;
                RegionTrailer *t = trailer_of(r);
                const char *why = NULL, *expected = "its trailer does not fit its size", *as = name;

                switch (i) {
                case 0:
                        t->magic++;
                        expected = "it is no region";
                        break;
                case 1:
                        t->layout_version = 2;
                        expected = "it is of another version";
                        break;
                case 2:
                        t->complete = 0;
                        expected = "it is not complete";
                        break;
                case 3:
                        t->identity.inode++;
                        expected = "its name is that of another region";
                        break;
                case 4:
                        t->identity.size += 4096;
                        break;
                case 5:
                        t->crc_block *= 2;
                        break;
                case 6:
                        t->crc_offset = UINT64_MAX;
                        break;
                case 7:
                        t->crc_count--;
                        break;
                case 8:
                        t->numa_kind = 9;
                        break;
                case 9:
                        as = "w-0000000000000000";
                        expected = "its name is that of another region";
                        break;
                case 10:
                        t->numa_node = 3;
                        break;
                }
                assert_int_equal(adopt(r, as, &a, &why), -EINVAL);
                assert_string_equal(why, expected);
                assert_null(a);
                (void) region_free(r);
        }
}

static void expect_object(int fd, const char *expected) {
        const char *why = NULL;
        Region *a = NULL;

        assert_true(fd >= 0);
        assert_int_equal(region_adopt(1, fd, "w-0", &a, &why), -EINVAL);
        assert_string_equal(why, expected);
        (void) close(fd);
}

static void region_adopt_other_objects_are_refused(void **state) {
        Region *r = make_region();
        int fd;

        expect_object(open("/dev/zero", O_RDWR | O_CLOEXEC), "it is no memory object that is sealed against resizing");
        expect_object(memfd_create("x", MFD_CLOEXEC | MFD_ALLOW_SEALING), "it is no memory object that is sealed against resizing");
        fd = memfd_create("x", MFD_CLOEXEC | MFD_ALLOW_SEALING); /* of the right size, but not sealed */
        assert_int_equal(ftruncate(fd, (off_t) r->size), 0);
        expect_object(fd, "it is no memory object that is sealed against resizing");

        assert_int_equal(memfd_new("x", 2 * 4096, &fd), 0);
        expect_object(fd, "its size is not that of a region");
        assert_int_equal(memfd_new("x", (UINT64_C(1) << 40) + 4096, &fd), 0); /* nothing of it is touched */
        expect_object(fd, "it is no region");
        assert_int_equal(memfd_new("x", r->size, &fd), 0);
        expect_object(fd, "it is no region");
        assert_int_equal(memfd_reopen_read_only(r->fd, &fd), 0);
        expect_object(fd, "it is not ours alone to write");
        assert_int_equal(fchmod(r->fd, 0666), 0);
        expect_object(fcntl(r->fd, F_DUPFD_CLOEXEC, 3), "it is not ours alone to write");
        (void) region_free(r);
}

static void region_adopt_sizes_of_all_tables_are_found(void **state) {
        const uint64_t sizes[] = {1, 4096, 4097, UINT64_C(1) << 30, (UINT64_C(1) << 30) + 1, (UINT64_C(5) << 30) + 12345,
                UINT64_C(1) << 40};

        for (unsigned i = 0; i < ELEMENTSOF(sizes); i++) {
                FileIdentity x = {.size = sizes[i]};
                Region *r = NULL, *a = NULL;
                char name[REGION_NAME_MAX];
                const char *why = NULL;

                assert_int_equal(region_new(1, &x, &policy, &r), 0);
                region_write_trailer(r); /* its data stays a hole */
                region_store_name(&x, &policy, name);
                if (adopt(r, name, &a, &why) < 0)
                        fail_msg("%llu bytes: %s", (unsigned long long) sizes[i], why);
                assert_int_equal(a->identity.size, sizes[i]);
                (void) region_free(a);
                (void) region_free(r);
        }
}

/* ---- the store ---- */

typedef struct TestManager {
        char path[64];
        int socket;
} TestManager;

static int setup(void **state) {
        struct sockaddr_un sa = {.sun_family = AF_UNIX};
        TestManager *m = calloc(1, sizeof(*m));
        int fd;

        (void) snprintf(m->path, sizeof(m->path), "/tmp/latentd-notify-%d", getpid());
        memcpy(sa.sun_path, m->path, sizeof(m->path));
        (void) unlink(m->path);
        fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        m->socket = fcntl(fd, F_DUPFD_CLOEXEC, 50); /* out of the way of what is handed in */
        (void) close(fd);
        if (bind(m->socket, (struct sockaddr *) &sa, sizeof(sa)) < 0 || setenv("NOTIFY_SOCKET", m->path, 1) < 0)
                return -1;
        *state = m;
        return 0;
}

static int teardown(void **state) {
        TestManager *m = *state;

        (void) unsetenv("NOTIFY_SOCKET");
        (void) close(m->socket);
        (void) unlink(m->path);
        free(m);
        return 0;
}

/* The next message, "" if there is none; how many descriptors came with it (closed). */
static unsigned hear(TestManager *m, char text[static 256]) {
        union {
                char bytes[CMSG_SPACE(8 * sizeof(int))];
                struct cmsghdr align;
        } control = {};
        struct iovec v = {.iov_base = text, .iov_len = 255};
        struct msghdr h = {
                .msg_iov = &v, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof(control.bytes)};
        ssize_t n = recvmsg(m->socket, &h, MSG_CMSG_CLOEXEC);
        unsigned n_fds = 0;

        text[n > 0 ? n : 0] = '\0';
        for (struct cmsghdr *c = n > 0 ? CMSG_FIRSTHDR(&h) : NULL; c; c = CMSG_NXTHDR(&h, c))
                if (c->cmsg_type == SCM_RIGHTS)
                        for (size_t i = 0; i < (c->cmsg_len - CMSG_LEN(0)) / sizeof(int); i++, n_fds++) {
                                int fd;

                                memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof(fd));
                                (void) close(fd);
                        }
        return n_fds;
}

/* Puts the descriptors in place; what the test runner has there is kept elsewhere meanwhile. */
static void hand_in(const int *fds, unsigned n, const char *names) {
        char text[16];

        for (unsigned i = 0; i < n; i++)
                assert_true(dup2(fds[i], FIRST + (int) i) >= 0);
        (void) snprintf(text, sizeof(text), "%d", getpid());
        assert_int_equal(setenv("LISTEN_PID", text, 1), 0);
        (void) snprintf(text, sizeof(text), "%u", n);
        assert_int_equal(setenv("LISTEN_FDS", text, 1), 0);
        assert_int_equal(setenv("LISTEN_FDNAMES", names, 1), 0);
}

static int new_fds[8];

static void make_fds(unsigned n) {
        for (unsigned i = 0; i < n; i++) {
                int fd;

                assert_int_equal(memfd_new("x", 4096, &fd), 0);
                new_fds[i] = fcntl(fd, F_DUPFD_CLOEXEC, 50);
                (void) close(fd);
        }
}

typedef struct Seen {
        unsigned n;
        char names[8][32];
        const char *take;
} Seen;

static bool on_offer(void *userdata, int fd, const char *name) {
        Seen *s = userdata;

        assert_true(fcntl(fd, F_GETFD) & FD_CLOEXEC);
        (void) snprintf(s->names[s->n++], 32, "%s", name);
        return strcmp(name, s->take) == 0;
}

static void fd_store_offer_drops_what_is_not_taken(void **state) {
        int saved[4];
        TestManager *m = *state;
        Seen seen = {.take = "w-1"};
        FdStore *s = NULL;
        char text[256];

        make_fds(4);
        for (int i = 0; i < 4; i++)
                saved[i] = fcntl(FIRST + i, F_DUPFD_CLOEXEC, 60);
        hand_in(new_fds, 4, "w-1:w-2:twice:twice");
        assert_int_equal(fd_store_new(&s), 0);
        assert_null(getenv("LISTEN_FDS")); /* a worker must not think that they are its own */
        fd_store_offer(s, on_offer, &seen);
        assert_int_equal(seen.n, 2); /* a name that came twice is not even asked about */
        assert_string_equal(seen.names[0], "w-1");
        assert_string_equal(seen.names[1], "w-2");
        assert_int_equal(fd_store_count(s), 1);
        for (int i = 1; i < 4; i++)
                assert_int_equal(fcntl(FIRST + i, F_GETFD), -1);
        assert_true(fcntl(FIRST, F_GETFD) >= 0);

        assert_int_equal(hear(m, text), 0);
        assert_string_equal(text, "FDSTOREREMOVE=1\nFDNAME=w-2");
        assert_int_equal(hear(m, text), 0);
        assert_string_equal(text, "FDSTOREREMOVE=1\nFDNAME=twice");
        assert_int_equal(hear(m, text), 0);
        assert_string_equal(text, "FDSTOREREMOVE=1\nFDNAME=twice");
        (void) hear(m, text);
        assert_string_equal(text, "");

        (void) close(FIRST);
        assert_null(fd_store_free(s));
        for (int i = 0; i < 4; i++) {
                if (saved[i] >= 0) {
                        (void) dup2(saved[i], FIRST + i);
                        (void) close(saved[i]);
                }
                (void) close(new_fds[i]);
        }
}

static void fd_store_push_never_more_than_the_unit_allows(void **state) {
        TestManager *m = *state;
        CLEANUP_CLOSE int fd = -EBADF;
        FdStore *s = NULL;
        char text[256], name[32];

        assert_int_equal(memfd_new("x", 4096, &fd), 0);
        assert_int_equal(fd_store_new(&s), 0);
        for (unsigned i = 0; i < FD_STORE_MAX; i++) {
                (void) snprintf(name, sizeof(name), "w-%u", i);
                assert_true(fd_store_push(s, fd, name));
                assert_int_equal(hear(m, text), 1);
                if (i == 5)
                        assert_string_equal(text, "FDSTORE=1\nFDNAME=w-5\nFDPOLL=0");
        }
        assert_false(fd_store_push(s, fd, "w-more"));
        (void) hear(m, text);
        assert_string_equal(text, "");
        fd_store_remove(s, "w-5");
        (void) hear(m, text);
        assert_string_equal(text, "FDSTOREREMOVE=1\nFDNAME=w-5");
        assert_true(fd_store_push(s, fd, "w-more"));
        assert_int_equal(hear(m, text), 1);
        assert_int_equal(fd_store_count(s), FD_STORE_MAX);
        assert_null(fd_store_free(s));
}

static void fd_store_without_manager_keeps_nothing(void **state) {
        CLEANUP_CLOSE int fd = -EBADF;
        FdStore *s = NULL;

        (void) unsetenv("NOTIFY_SOCKET");
        assert_int_equal(memfd_new("x", 4096, &fd), 0);
        assert_int_equal(fd_store_new(&s), 0);
        assert_false(fd_store_push(s, fd, "w-1"));
        fd_store_remove(s, "w-1");
        assert_int_equal(fd_store_count(s), 0);
        assert_null(fd_store_free(s));
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(region_adopt_complete_is_taken_over),
                cmocka_unit_test(region_store_name_differs_with_every_field),
                cmocka_unit_test(region_adopt_wrong_trailer_is_refused),
                cmocka_unit_test(region_adopt_other_objects_are_refused),
                cmocka_unit_test(region_adopt_sizes_of_all_tables_are_found),
                cmocka_unit_test_setup_teardown(fd_store_offer_drops_what_is_not_taken, setup, teardown),
                cmocka_unit_test_setup_teardown(fd_store_push_never_more_than_the_unit_allows, setup, teardown),
                cmocka_unit_test(fd_store_without_manager_keeps_nothing),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
