/* SPDX-License-Identifier: Apache-2.0 */
#include "service/shared/wire.h"

#include <dirent.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <cmocka.h>

#include "service/shared/cleanup.h"

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

/* Sends bytes as they are, with n_fds copies of a descriptor. */
static void send_raw(const void *bytes, size_t n, unsigned n_fds) {
        union {
                char bytes[CMSG_SPACE(sizeof(int) * 8)];
                struct cmsghdr align;
        } control = {};
        struct iovec iov = {.iov_base = (void *) bytes, .iov_len = n};
        struct msghdr h = {.msg_iov = &iov, .msg_iovlen = 1};

        assert_true(n_fds <= 8);
        if (n_fds > 0) {
                struct cmsghdr *c;
                int fds[8];

                for (unsigned i = 0; i < n_fds; i++)
                        fds[i] = STDERR_FILENO;
                h.msg_control = control.bytes;
                h.msg_controllen = CMSG_SPACE(sizeof(int) * n_fds);
                c = CMSG_FIRSTHDR(&h);
                c->cmsg_level = SOL_SOCKET;
                c->cmsg_type = SCM_RIGHTS;
                c->cmsg_len = CMSG_LEN(sizeof(int) * n_fds);
                memcpy(CMSG_DATA(c), fds, sizeof(int) * n_fds);
        }
        assert_int_equal(sendmsg(sockets[0], &h, MSG_NOSIGNAL), n);
}

/* That a message is refused with `part` in the text, and that nothing was touched or leaked. */
static void expect_refused(const void *bytes, size_t n, unsigned n_fds, const char *part) {
        unsigned before = count_fds();
        WireMessage m, untouched;
        Fault f = {};
        int fd = -4711;

        memset(&m, 0x5a, sizeof(m));
        memset(&untouched, 0x5a, sizeof(untouched));
        send_raw(bytes, n, n_fds);
        assert_int_equal(wire_receive(sockets[1], &m, &fd, &f), -EBADMSG);
        if (!strstr(f.text, part))
                fail_msg("expected \"%s\" in: %s", part, f.text);
        assert_string_equal(f.name, FAULT_INTERNAL);
        assert_int_equal(fd, -4711);
        assert_memory_equal(&m, &untouched, sizeof(m));
        assert_int_equal(count_fds(), before);
}

static bool carries_fd(uint16_t type) {
        return type == WIRE_REGION || type == WIRE_ARENA;
}

static void wire_receive_every_type_arrives(void **state) {
        unsigned n = 0;

        for (uint16_t t = 0; t < WIRE_TYPE_MAX; t++) {
                CLEANUP_CLOSE int fd = -EBADF;
                WireMessage m, got;
                Fault f = {};
                uint32_t size;

                size = wire_init(&m, (WireType) t, 7, 8, 9);
                assert_int_equal(size, wire_size_of(t));
                if (size == 0) {
                        assert_string_equal(wire_type_name(t), "?");
                        continue;
                }
                n++;

                assert_int_equal(wire_send(sockets[0], &m, carries_fd(t) ? STDERR_FILENO : -EBADF), 0);
                assert_int_equal(wire_receive(sockets[1], &got, &fd, &f), 1);
                assert_memory_equal(&got, &m, sizeof(m));
                assert_int_equal(fd >= 0, carries_fd(t));
                if (fd >= 0)
                        assert_true(fcntl(fd, F_GETFD) & FD_CLOEXEC);
        }
        assert_int_equal(n, 27);
        assert_string_equal(wire_type_name(WIRE_HELLO), "HELLO");
        assert_string_equal(wire_type_name(WIRE_DIE), "DIE");
        assert_int_equal(wire_size_of(UINT16_MAX), 0);
}

static void wire_receive_every_type_wrong_size_refused(void **state) {
        for (uint16_t t = 0; t < WIRE_TYPE_MAX; t++) {
                unsigned n_fds = carries_fd(t) ? 1 : 0;
                uint32_t size;
                WireMessage m;

                size = wire_init(&m, (WireType) t, 7, 8, 9);
                if (size == 0)
                        continue;

                /* the datagram shorter, longer; the header's own figure off */
                if (size > sizeof(WireHeader))
                        expect_refused(&m, size - 1, n_fds, "expected");
                expect_refused(&m, size + 1, n_fds, "expected");
                m.header.size = size - 1;
                expect_refused(&m, size, n_fds, "expected");
                m.header.size = UINT32_MAX;
                expect_refused(&m, size, n_fds, "expected");
        }
}

static void wire_receive_every_type_wrong_fds_refused(void **state) {
        for (uint16_t t = 0; t < WIRE_TYPE_MAX; t++) {
                uint32_t size;
                WireMessage m;

                size = wire_init(&m, (WireType) t, 7, 8, 9);
                if (size == 0)
                        continue;

                expect_refused(&m, size, carries_fd(t) ? 0 : 1, "descriptors, expected");
                expect_refused(&m, size, 2, "descriptors, expected");
                expect_refused(&m, size, 4, "descriptors, expected");
                expect_refused(&m, size, 8, "cut off (descriptors)");
        }
}

static void wire_receive_header_rules_refused(void **state) {
        uint8_t large[WIRE_MESSAGE_MAX + 1] = {};
        uint32_t size;
        WireMessage m;

        size = wire_init(&m, WIRE_STEP, 7, 8, 9);
        expect_refused(&m, sizeof(WireHeader) - 1, 0, "shorter than a header");
        expect_refused(&m, 1, 0, "shorter than a header");

        m.header.version++;
        expect_refused(&m, size, 0, "protocol version 2, this program 1");
        m.header.version--;

        for (uint32_t t = 0; t <= UINT16_MAX; t += 13) {
                if (wire_size_of((uint16_t) t) != 0)
                        continue;
                m.header.type = (uint16_t) t;
                expect_refused(&m, size, 0, "unknown type");
        }
        m.header.type = WIRE_TYPE_MAX;
        expect_refused(&m, size, 0, "unknown type");

        memcpy(large, &m, size);
        expect_refused(large, sizeof(large), 0, "cut off (data)");
        expect_refused(large, sizeof(large), 1, "cut off (data)");
}

static void wire_receive_strings_without_end_are_ended(void **state) {
        static const WireType with_strings[] = {WIRE_HELLO, WIRE_LINKS, WIRE_PINS, WIRE_MODEL_READY, WIRE_LORA_NOTES, WIRE_ERROR,
                WIRE_KNOWN_PINS, WIRE_MODEL_OPEN, WIRE_REGION, WIRE_JOB_OPEN};
        CLEANUP_CLOSE int fd = -EBADF;
        WireMessage m, got;
        Fault f = {};

        for (size_t i = 0; i < ELEMENTSOF(with_strings); i++) {
                uint32_t size = wire_init(&m, with_strings[i], 7, 8, 9);

                memset(m.bytes + sizeof(WireHeader), 'x', size - sizeof(WireHeader));
                m.header.acks = 4711;
                send_raw(&m, size, carries_fd((uint16_t) with_strings[i]) ? 1 : 0);
                assert_int_equal(wire_receive(sockets[1], &got, &fd, &f), 1);
                assert_int_equal(got.header.acks, with_strings[i] < WIRE_WELCOME ? 4711 : 0);

                switch (with_strings[i]) {
                case WIRE_HELLO:
                        assert_int_equal(strlen(got.hello.build_id), sizeof(got.hello.build_id) - 1);
                        assert_int_equal(strlen(got.hello.backend), sizeof(got.hello.backend) - 1);
                        assert_int_equal(strlen(got.hello.numerics_id), sizeof(got.hello.numerics_id) - 1);
                        assert_int_equal(strlen(got.hello.reason), sizeof(got.hello.reason) - 1);
                        assert_int_equal(strlen(got.hello.kernels), sizeof(got.hello.kernels) - 1);
                        assert_int_equal(strlen(got.hello.notes), sizeof(got.hello.notes) - 1);
                        for (size_t d = 0; d < WIRE_DEVICES_MAX; d++) {
                                const WireDevice *x = &got.hello.devices[d];

                                assert_int_equal(strlen(x->name), sizeof(x->name) - 1);
                                assert_int_equal(strlen(x->pci_address), sizeof(x->pci_address) - 1);
                                assert_int_equal(strlen(x->uuid), sizeof(x->uuid) - 1);
                                assert_int_equal(strlen(x->architecture), sizeof(x->architecture) - 1);
                                assert_true(x->left_out <= 1);
                        }
                        break;
                case WIRE_LINKS:
                        assert_int_equal(strlen(got.links.notes), sizeof(got.links.notes) - 1);
                        break;
                case WIRE_PINS:
                case WIRE_KNOWN_PINS:
                        assert_int_equal(strlen(got.pins.numerics_id), sizeof(got.pins.numerics_id) - 1);
                        assert_int_equal(strlen(got.pins.device), sizeof(got.pins.device) - 1);
                        assert_int_equal(got.pins.reserved, 0);
                        break;
                case WIRE_MODEL_READY:
                        assert_int_equal(strlen(got.model_ready.layout), sizeof(got.model_ready.layout) - 1);
                        assert_int_equal(
                                strlen(got.model_ready.qkv_order), sizeof(got.model_ready.qkv_order) - 1);
                        assert_int_equal(
                                strlen(got.model_ready.partition), sizeof(got.model_ready.partition) - 1);
                        assert_int_equal(strlen(got.model_ready.types), sizeof(got.model_ready.types) - 1);
                        assert_int_equal(
                                strlen(got.model_ready.support), sizeof(got.model_ready.support) - 1);
                        assert_int_equal(
                                strlen(got.model_ready.warning), sizeof(got.model_ready.warning) - 1);
                        break;
                case WIRE_LORA_NOTES:
                        for (size_t k = 0; k < WIRE_LORA_NOTES_MAX; k++) {
                                const WireLoraNote *x = &got.lora_notes.notes[k];

                                assert_int_equal(strlen(x->name), sizeof(x->name) - 1);
                                assert_int_equal(strlen(x->reason), sizeof(x->reason) - 1);
                        }
                        assert_int_equal(got.lora_notes.reserved, 0);
                        break;
                case WIRE_JOB_OPEN:
                        assert_int_equal(strlen(got.job_open.numerics), sizeof(got.job_open.numerics) - 1);
                        for (size_t k = 0; k < WIRE_CONDITIONS_MAX; k++)
                                assert_int_equal(got.job_open.conditions[k].reserved, 0);
                        assert_int_equal(got.job_open.reserved, 0);
                        break;
                case WIRE_ERROR:
                        assert_int_equal(strlen(got.error.fault.name), sizeof(got.error.fault.name) - 1);
                        assert_int_equal(strlen(got.error.fault.text), sizeof(got.error.fault.text) - 1);
                        break;
                case WIRE_MODEL_OPEN:
                        assert_int_equal(
                                strlen(got.model_open.partition), sizeof(got.model_open.partition) - 1);
                        break;
                case WIRE_REGION:
                        assert_int_equal(strlen(got.region.name), sizeof(got.region.name) - 1);
                        assert_int_equal(got.region.reserved, 0);
                        break;
                default:
                        fail();
                }
        }
}

static void wire_receive_nothing_there_again(void **state) {
        WireMessage m;
        Fault f = {};
        int fd;

        assert_int_equal(wire_receive(sockets[1], &m, &fd, &f), -EAGAIN);
        assert_string_equal(f.name, "");
}

static void wire_receive_peer_gone_messages_then_end(void **state) {
        WireMessage m;
        Fault f = {};
        int fd;

        /* The peer dies with an unread message of ours: what it had sent must still arrive. */
        wire_init(&m, WIRE_STEP, 1, 2, 3);
        assert_int_equal(wire_send(sockets[1], &m, -EBADF), 0);
        wire_init(&m, WIRE_STEP_DONE, 1, 2, 3);
        assert_int_equal(wire_send(sockets[0], &m, -EBADF), 0);
        (void) close(sockets[0]);
        sockets[0] = -EBADF;

        assert_int_equal(wire_receive(sockets[1], &m, &fd, &f), 1);
        assert_int_equal(m.header.type, WIRE_STEP_DONE);
        assert_int_equal(wire_receive(sockets[1], &m, &fd, &f), 0);
        assert_int_equal(wire_receive(sockets[1], &m, &fd, &f), 0);
}

static void wire_send_peer_gone_pipe(void **state) {
        WireMessage m;

        (void) close(sockets[1]);
        sockets[1] = -EBADF;
        wire_init(&m, WIRE_STEP, 1, 2, 3);
        assert_int_equal(wire_send(sockets[0], &m, -EBADF), -EPIPE);
}

static void wire_send_full_again(void **state) {
        unsigned n = 0;
        WireMessage m;
        int r;

        wire_init(&m, WIRE_STEP, 1, 2, 3);
        for (;;) {
                r = wire_send(sockets[0], &m, -EBADF);
                if (r != 0)
                        break;
                assert_true(++n < 100000);
        }
        assert_int_equal(r, -EAGAIN);
        assert_true(n >= WIRE_CREDITS);
}

static void wire_send_wrong_message_refused(void **state) {
        WireMessage m;

        wire_init(&m, WIRE_STEP, 1, 2, 3);
        assert_int_equal(wire_send(sockets[0], &m, STDERR_FILENO), -EINVAL);
        m.header.size++;
        assert_int_equal(wire_send(sockets[0], &m, -EBADF), -EINVAL);
        wire_init(&m, WIRE_ARENA, 1, 2, 3);
        assert_int_equal(wire_send(sockets[0], &m, -EBADF), -EINVAL);
        assert_int_equal(wire_init(&m, WIRE_INVALID, 1, 2, 3), 0);
        assert_int_equal(wire_send(sockets[0], &m, -EBADF), -EINVAL);
}

static void wire_commit_word_round_trip(void **state) {
        uint32_t epoch = 1, steps = 1;

        assert_int_equal(wire_commit_unpack(0, &epoch, &steps), -ENODATA);
        assert_int_equal(wire_commit_unpack((uint64_t) 5 << 32, &epoch, &steps), -ENODATA);
        assert_int_equal(epoch, 1);
        assert_int_equal(wire_commit_unpack(wire_commit_pack(UINT32_MAX, 0x7fffffff), &epoch, &steps), 0);
        assert_int_equal(epoch, UINT32_MAX);
        assert_int_equal(steps, 0x7fffffff);
        assert_int_equal(wire_commit_unpack(wire_commit_pack(0, 0), &epoch, &steps), 0);
        assert_int_equal(epoch, 0);
        assert_int_equal(steps, 0);
}

static void wire_slot_place_each_sampler(void **state) {
        WireSlot s;

        assert_int_equal(wire_slot_place(WIRE_SAMPLER_EULER, 65, 64, &s), 0);
        assert_memory_equal(&s, &((WireSlot){.audio = 128, .stride = 192}), sizeof(s));

        assert_int_equal(wire_slot_place(WIRE_SAMPLER_RES_MULTISTEP, 65, 64, &s), 0);
        assert_memory_equal(&s,
                &((WireSlot){.audio = 128, .carried = 192, .denoised_video = 256, .denoised_audio = 384, .stride = 448}),
                sizeof(s));

        assert_int_equal(wire_slot_place(WIRE_SAMPLER_RES_MULTISTEP_PERSTREAM, 65, 64, &s), 0);
        assert_memory_equal(&s,
                &((WireSlot){.audio = 128, .denoised_video = 192, .denoised_audio = 320, .stride = 384}), sizeof(s));
}

static void wire_slot_place_too_large_untouched(void **state) {
        WireSlot s = {.stride = 7};

        assert_int_equal(wire_slot_place(WIRE_SAMPLER_EULER, UINT64_MAX, 0, &s), -EOVERFLOW);
        assert_int_equal(wire_slot_place(WIRE_SAMPLER_EULER, UINT64_MAX - 127, 128, &s), -EOVERFLOW);
        assert_int_equal(wire_slot_place(WIRE_SAMPLER_RES_MULTISTEP, UINT64_MAX / 2, 64, &s), -EOVERFLOW);
        assert_int_equal(s.stride, 7);
}

#define WIRE_TEST(fn) cmocka_unit_test_setup_teardown(fn, setup, teardown)

int main(void) {
        const struct CMUnitTest tests[] = {
                WIRE_TEST(wire_slot_place_each_sampler),
                WIRE_TEST(wire_slot_place_too_large_untouched),
                WIRE_TEST(wire_receive_every_type_arrives),
                WIRE_TEST(wire_receive_every_type_wrong_size_refused),
                WIRE_TEST(wire_receive_every_type_wrong_fds_refused),
                WIRE_TEST(wire_receive_header_rules_refused),
                WIRE_TEST(wire_receive_strings_without_end_are_ended),
                WIRE_TEST(wire_receive_nothing_there_again),
                WIRE_TEST(wire_receive_peer_gone_messages_then_end),
                WIRE_TEST(wire_send_peer_gone_pipe),
                WIRE_TEST(wire_send_full_again),
                WIRE_TEST(wire_send_wrong_message_refused),
                WIRE_TEST(wire_commit_word_round_trip),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
