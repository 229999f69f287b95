/* SPDX-License-Identifier: Apache-2.0 */
#include "service/shared/media-wire.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdbool.h>
#include <string.h>
#include <sys/socket.h>

#include "service/shared/cleanup.h"
#include "service/shared/datagram.h"
#include "tests/unit/shared/cmocka-all.h"

static int sockets[2];

static int setup(void **state) {
        return socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets);
}

static int teardown(void **state) {
        (void) close(sockets[0]);
        (void) close(sockets[1]);
        return 0;
}

static unsigned count_fds(void) {
        DIR *d = opendir("/proc/self/fd");
        unsigned n = 0;

        assert_non_null(d);
        while (readdir(d))
                n++;
        (void) closedir(d);
        return n;
}

static unsigned fds_of(uint16_t type) {
        return type == MEDIA_READ || type == MEDIA_WRITE ? 2 : 0;
}

/* `what` says PICTURE, so that READ has two descriptors. */
static uint32_t make(MediaMessage *m, uint16_t type) {
        uint32_t size = media_init(m, (MediaType) type);

        if (type == MEDIA_READ)
                m->read.what = MEDIA_PICTURE;
        return size;
}

static const int both[4] = {STDERR_FILENO, STDERR_FILENO, STDERR_FILENO, STDERR_FILENO};

static void expect_refused(const void *bytes, size_t n, unsigned n_fds, const char *part) {
        unsigned before = count_fds();
        MediaMessage m, untouched;
        int fds[MEDIA_FDS_MAX] = {-4711, -4712};
        Fault f = {};

        memset(&m, 0x5a, sizeof(m));
        memset(&untouched, 0x5a, sizeof(untouched));
        assert_int_equal(datagram_send(sockets[0], bytes, n, both, n_fds), 0);
        assert_int_equal(media_receive(sockets[1], &m, fds, &f), -EBADMSG);
        if (!strstr(f.text, part))
                fail_msg("expected \"%s\" in: %s", part, f.text);
        assert_true(fds[0] == -4711 && fds[1] == -4712);
        assert_memory_equal(&m, &untouched, sizeof(m));
        assert_int_equal(count_fds(), before);
}

static void media_receive_every_type_arrives(void **state) {
        unsigned n = 0;

        for (uint16_t t = 0; t < _MEDIA_TYPE_MAX; t++) {
                int fds[MEDIA_FDS_MAX];
                MediaMessage m, got;
                Fault f = {};

                if (make(&m, t) == 0) {
                        assert_string_equal(media_type_name(t), "?");
                        continue;
                }
                n++;
                assert_int_equal(media_send(sockets[0], &m, both, fds_of(t)), 0);
                assert_int_equal(media_receive(sockets[1], &got, fds, &f), 1);
                assert_memory_equal(&got, &m, sizeof(m));
                for (unsigned i = 0; i < MEDIA_FDS_MAX; i++) {
                        assert_int_equal(fds[i] >= 0, i < fds_of(t));
                        if (fds[i] >= 0) {
                                assert_true(fcntl(fds[i], F_GETFD) & FD_CLOEXEC);
                                (void) close(fds[i]);
                        }
                }
        }
        assert_int_equal(n, 8);
        assert_string_equal(media_type_name(MEDIA_HELLO), "HELLO");
        assert_string_equal(media_type_name(UINT16_MAX), "?");
}

static void media_receive_probe_has_one_descriptor(void **state) {
        int fds[MEDIA_FDS_MAX];
        MediaMessage m;
        Fault f = {};

        (void) media_init(&m, MEDIA_READ);
        m.read.what = MEDIA_PROBE;
        assert_int_equal(media_send(sockets[0], &m, both, 2), -EINVAL);
        assert_int_equal(media_send(sockets[0], &m, (int[]){STDERR_FILENO, -EBADF}, 2), 0);
        assert_int_equal(media_receive(sockets[1], &m, fds, &f), 1);
        assert_true(fds[0] >= 0 && fds[1] < 0);
        (void) close(fds[0]);
        expect_refused(&m, m.header.size, 2, "carries 2 descriptors, expected 1");
}

static void media_receive_wrong_messages_refused(void **state) {
        uint8_t large[MEDIA_MESSAGE_MAX + 1] = {};
        MediaMessage m;

        for (uint16_t t = 0; t < _MEDIA_TYPE_MAX; t++) {
                unsigned n_fds = fds_of(t);
                uint32_t size = make(&m, t);

                if (size == 0)
                        continue;
                expect_refused(&m, size - 1, n_fds, "expected");
                expect_refused(&m, size + 1, n_fds, "expected");
                expect_refused(&m, size, n_fds + 1, "descriptors, expected");
                if (n_fds > 0)
                        expect_refused(&m, size, n_fds - 1, "descriptors, expected");
                m.header.size = UINT32_MAX;
                expect_refused(&m, size, n_fds, "expected");
        }

        (void) make(&m, MEDIA_TAKEN);
        expect_refused(&m, sizeof(MediaHeader) - 1, 0, "shorter than a header");
        m.header.version++;
        expect_refused(&m, sizeof(m.taken), 0, "protocol version 2, this program 1");
        m.header.version--;
        m.header.type = _MEDIA_TYPE_MAX;
        expect_refused(&m, sizeof(m.taken), 0, "unknown type");
        memcpy(large, &m, sizeof(m.taken));
        expect_refused(large, sizeof(large), 0, "cut off (data)");
}

static void media_receive_strings_without_end_are_ended(void **state) {
        static const MediaType with_strings[] = {
                MEDIA_HELLO, MEDIA_DONE, MEDIA_ERROR, MEDIA_WRITE, MEDIA_FRAMES};

        for (size_t i = 0; i < ELEMENTSOF(with_strings); i++) {
                int fds[MEDIA_FDS_MAX];
                MediaMessage m;
                Fault f = {};
                uint32_t size = media_init(&m, with_strings[i]);

                memset(m.bytes + sizeof(MediaHeader), 'x', size - sizeof(MediaHeader));
                assert_int_equal(
                        datagram_send(sockets[0], &m, size, both, fds_of((uint16_t) with_strings[i])), 0);
                assert_int_equal(media_receive(sockets[1], &m, fds, &f), 1);
                for (unsigned k = 0; k < MEDIA_FDS_MAX; k++)
                        cleanup_closep(&fds[k]);
                switch (with_strings[i]) {
                case MEDIA_HELLO:
                        assert_int_equal(strlen(m.hello.build_id), sizeof(m.hello.build_id) - 1);
                        assert_int_equal(strlen(m.hello.libraries), sizeof(m.hello.libraries) - 1);
                        assert_int_equal(strlen(m.hello.formats), sizeof(m.hello.formats) - 1);
                        assert_int_equal(m.hello.reserved, 0);
                        break;
                case MEDIA_DONE:
                        assert_int_equal(strlen(m.done.format), sizeof(m.done.format) - 1);
                        break;
                case MEDIA_ERROR:
                        assert_int_equal(strlen(m.error.fault.name), sizeof(m.error.fault.name) - 1);
                        assert_int_equal(strlen(m.error.fault.text), sizeof(m.error.fault.text) - 1);
                        break;
                case MEDIA_WRITE:
                        assert_int_equal(strlen(m.write.title), sizeof(m.write.title) - 1);
                        break;
                default:
                        assert_int_equal(m.frames.reserved, 0);
                }
        }
}

static void media_send_and_receive_ends(void **state) {
        int fds[MEDIA_FDS_MAX], r;
        MediaMessage m;
        Fault f = {};

        assert_int_equal(media_receive(sockets[1], &m, fds, &f), -EAGAIN);
        (void) make(&m, MEDIA_TAKEN);
        assert_int_equal(media_send(sockets[0], &m, both, 1), -EINVAL);
        assert_int_equal(media_init(&m, MEDIA_INVALID), 0);
        assert_int_equal(media_send(sockets[0], &m, NULL, 0), -EINVAL);
        (void) make(&m, MEDIA_TAKEN);
        while ((r = media_send(sockets[0], &m, NULL, 0)) == 0)
                ;
        assert_int_equal(r, -EAGAIN);
        (void) close(sockets[0]);
        sockets[0] = -EBADF;
        while ((r = media_receive(sockets[1], &m, fds, &f)) == 1)
                ;
        assert_int_equal(r, 0);
        assert_int_equal(media_send(sockets[1], &m, NULL, 0), -EPIPE);
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test_setup_teardown(media_receive_every_type_arrives, setup, teardown),
                cmocka_unit_test_setup_teardown(media_receive_probe_has_one_descriptor, setup, teardown),
                cmocka_unit_test_setup_teardown(media_receive_wrong_messages_refused, setup, teardown),
                cmocka_unit_test_setup_teardown(
                        media_receive_strings_without_end_are_ended, setup, teardown),
                cmocka_unit_test_setup_teardown(media_send_and_receive_ends, setup, teardown),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
