/* SPDX-License-Identifier: Apache-2.0 */
/* The worker program: start, protocol, models, end. Steps are in test-worker-step.c. */

#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>

#include <cmocka.h>

#include "service/shared/cleanup.h"
#include "tests/unit/h3/golden.h"
#include "tests/unit/worker/broker.h"

static void assert_fails(Broker *b) {
        int status;

        broker_expect_eof(b);
        status = broker_wait(b);
        assert_true(WIFEXITED(status));
        assert_int_equal(WEXITSTATUS(status), EXIT_FAILURE);
}

static void assert_killed(Broker *b) {
        int status = broker_wait(b);

        assert_true(WIFSIGNALED(status));
        assert_int_equal(WTERMSIG(status), SIGKILL);
}

/* Runs the program by hand: no socket. What it prints goes to ret. */
static int run_by_hand(const char *environment, const char *arguments, char *ret, size_t n) {
        char command[4300];
        size_t got;
        FILE *p;
        int status;

        (void) snprintf(command, sizeof(command), "%s %s/service/worker/latent-worker-cpu %s 2>&1",
                environment, getenv("LATENT_BUILD_DIR"), arguments);
        p = popen(command, "re");
        assert_non_null(p);
        got = fread(ret, 1, n - 1, p);
        ret[got] = '\0';
        status = pclose(p);
        assert_true(WIFEXITED(status));
        return WEXITSTATUS(status);
}

static void start_options_answered(void **state) {
        char text[4096];

        assert_int_equal(run_by_hand("", "--version", text, sizeof(text)), 0);
        assert_string_equal(text, "latent-worker-cpu " LATENTD_VERSION "\n");
        assert_int_equal(run_by_hand("", "--help", text, sizeof(text)), 0);
        assert_non_null(strstr(text, "latent-worker.socket"));
        assert_int_equal(run_by_hand("", "--no-such-option", text, sizeof(text)), EXIT_FAILURE);
        assert_int_equal(run_by_hand("", "word", text, sizeof(text)), EXIT_FAILURE);
        assert_non_null(strstr(text, "unexpected argument \"word\""));
}

static void start_without_socket_refused(void **state) {
        char text[4096];

        assert_int_equal(run_by_hand("", "", text, sizeof(text)), EXIT_FAILURE);
        assert_non_null(strstr(text, "not started by hand"));
        assert_int_equal(run_by_hand("LISTEN_FDS=1", "3</dev/null", text, sizeof(text)), EXIT_FAILURE);
        assert_non_null(strstr(text, "Expected a connected SOCK_SEQPACKET"));
}

static void start_wrong_socket_refused(void **state) {
        CLEANUP(broker_freep) Broker *b = NULL;
        char byte;
        int status;

        b = broker_spawn(SOCK_STREAM);
        status = broker_wait(b);
        assert_true(WIFEXITED(status));
        assert_int_equal(WEXITSTATUS(status), EXIT_FAILURE);
        assert_int_equal(recv(b->socket, &byte, 1, 0), 0); /* not even HELLO */
}

static void hello_describes_the_worker(void **state) {
        CLEANUP(broker_freep) Broker *b = broker_spawn(SOCK_SEQPACKET);
        const WireDevice *d;
        WireMessage m;

        broker_expect(b, WIRE_HELLO, 0, &m);
        assert_string_equal(m.hello.build_id, LATENTD_VERSION);
        assert_string_equal(m.hello.backend, "cpu");
        assert_true(strlen(m.hello.numerics_id) > 0);
        assert_int_equal(m.hello.pid, b->pid);
        assert_int_equal(m.hello.n_devices, 1);
        d = &m.hello.devices[0];
        assert_true(strlen(d->name) > 0);
        assert_true(strlen(d->architecture) > 0);
        assert_string_equal(d->pci_address, "");
        assert_true(d->memory_total > 0 && d->memory_free > 0 && d->memory_free <= d->memory_total);
        assert_int_equal(d->numa_node, -1);
}

static void welcome_wrong_ends_the_worker(void **state) {
        static const struct {
                uint64_t epoch;
                uint32_t ranks;
        } wrong[] = {{0, 1}, {(uint64_t) UINT32_MAX + 1, 1}, {1, 0}, {1, WIRE_RANKS_MAX + 1}};

        for (size_t i = 0; i < ELEMENTSOF(wrong); i++) {
                CLEANUP(broker_freep) Broker *b = broker_spawn(SOCK_SEQPACKET);
                WireMessage m;

                broker_expect(b, WIRE_HELLO, 0, NULL);
                wire_init(&m, WIRE_WELCOME, wrong[i].epoch, 0, 0);
                m.welcome.ranks = wrong[i].ranks;
                broker_send(b, &m, -EBADF);
                assert_fails(b);
        }
}

/* A worker without trials goes on, whatever it is told. */
static void known_pins_are_nothing_to_a_cpu(void **state) {
        CLEANUP(broker_freep) Broker *b = broker_open(1);
        WireMessage m;

        wire_init(&m, WIRE_KNOWN_PINS, 1, 0, 0);
        m.pins.n = WIRE_PINS_MAX;
        broker_send(b, &m, -EBADF);
        broker_expect_acks(b, 2);

        m.pins.n++; /* more than there are */
        broker_send(b, &m, -EBADF);
        assert_fails(b);
}

static void message_before_welcome_ends_the_worker(void **state) {
        CLEANUP(broker_freep) Broker *b = broker_spawn(SOCK_SEQPACKET);

        broker_expect(b, WIRE_HELLO, 0, NULL);
        broker_say(b, WIRE_MODEL_COMMIT, 1, 0);
        assert_fails(b);
}

static void second_welcome_ends_the_worker(void **state) {
        CLEANUP(broker_freep) Broker *b = broker_open(1);
        WireMessage m;

        wire_init(&m, WIRE_WELCOME, 1, 0, 0);
        m.welcome.ranks = 1;
        broker_send(b, &m, -EBADF);
        assert_fails(b);
}

static void garbage_ends_the_worker(void **state) {
        static const char garbage[200] = "GET / HTTP/1.1";

        for (unsigned i = 0; i < 3; i++) {
                CLEANUP(broker_freep) Broker *b = broker_open(1);
                WireMessage m;
                size_t n = sizeof(garbage);
                const void *bytes = garbage;

                if (i == 1) { /* a worker's message */
                        n = wire_init(&m, WIRE_STEP_DONE, 1, 1, 0);
                        bytes = &m;
                } else if (i == 2) { /* a message without the descriptor that belongs to it */
                        n = wire_init(&m, WIRE_ARENA, 1, 1, 0);
                        bytes = &m;
                }
                assert_int_equal(send(b->socket, bytes, n, MSG_NOSIGNAL), n);
                assert_fails(b);
        }
}

static void other_epoch_is_dropped(void **state) {
        CLEANUP(broker_freep) Broker *b = broker_open(5);
        CLEANUP(arenas_freep) Arenas *a = arenas_new(4096, 4096);

        b->epoch = 4;
        broker_say(b, WIRE_MODEL_COMMIT, 1, 0); /* would be an ERROR */
        broker_give_arenas(b, 2, a);
        broker_say(b, WIRE_DIE, 0, 0);
        b->epoch = 5;
        broker_say(b, WIRE_MODEL_CLOSE, 1, 0);
        broker_expect_acks(b, 2); /* of WELCOME and of this one */
        broker_say(b, WIRE_MODEL_COMMIT, 1, 0);
        broker_expect_error(b, 1, FAULT_INTERNAL, "was not opened");
}

static void end_of_file_ends_the_worker(void **state) {
        CLEANUP(broker_freep) Broker *b = broker_open(1);

        (void) close(STEAL_FD(b->socket));
        assert_killed(b);
}

static void half_closed_socket_ends_the_worker(void **state) {
        CLEANUP(broker_freep) Broker *b = broker_open(1);

        assert_int_equal(shutdown(b->socket, SHUT_WR), 0);
        assert_killed(b);
}

/* One file as a whole model, up to the commit. */
static void offer_model(Broker *b, uint64_t id, int fd, uint64_t size, uint64_t region_size) {
        WireMessage m;

        wire_init(&m, WIRE_MODEL_OPEN, b->epoch, id, 0);
        m.model_open.n_files = 1;
        broker_send(b, &m, -EBADF);
        wire_init(&m, WIRE_REGION, b->epoch, id, 0);
        m.region.size = size;
        m.region.region_size = region_size;
        (void) snprintf(m.region.name, sizeof(m.region.name), "model.safetensors");
        broker_send(b, &m, fd);
        broker_say(b, WIRE_MODEL_COMMIT, id, 0);
}

static uint64_t now_msec(void) {
        struct timespec t;

        assert_int_equal(clock_gettime(CLOCK_MONOTONIC, &t), 0);
        return (uint64_t) t.tv_sec * 1000u + (uint64_t) t.tv_nsec / 1000000u;
}

/* A well-formed file of very many tensors of one number, no H3 model: the link thread is busy with it for a
 * while. */
static int many_tensors(uint64_t *ret_size, uint64_t *ret_region_size) {
        enum { n = 150000 };
        static char bytes[8 + n * 80];
        size_t at = 8;
        uint64_t header;
        int fd;

        bytes[at++] = '{';
        for (unsigned i = 0; i < n; i++)
                at += (size_t) snprintf(bytes + at, sizeof(bytes) - at,
                        "\"t%u\":{\"dtype\":\"BF16\",\"shape\":[1],\"data_offsets\":[%u,%u]}%c", i, 2 * i,
                        2 * i + 2, i + 1 < n ? ',' : '}');
        header = at - 8;
        memcpy(bytes, &header, sizeof(header));
        *ret_size = at + 2 * n;
        assert_true(*ret_size <= sizeof(bytes));
        *ret_region_size = (*ret_size + 4095) / 4096 * 4096;
        fd = memfd_of(bytes, *ret_size, *ret_region_size);
        return fd;
}

/* The link thread cannot see the end of file: the reaper does. */
static void end_of_file_while_busy_ends_the_worker(void **state) {
        CLEANUP_CLOSE int fd = -EBADF;
        uint64_t size, region_size;

        fd = many_tensors(&size, &region_size);
        for (unsigned i = 0; i < 10; i++) { /* on a busy machine one may be late, and not all of them */
                CLEANUP(broker_freep) Broker *b = broker_open(1);
                uint64_t begin = now_msec(), busy;

                offer_model(b, 1, fd, size, region_size);
                broker_expect_error(b, 1, FAULT_INVALID_MODEL, "");
                busy = now_msec() - begin;

                offer_model(b, 1, fd, size, region_size);
                broker_expect_acks(b, 7); /* the COMMIT is being worked at */
                begin = now_msec();
                (void) close(STEAL_FD(b->socket));
                assert_killed(b);
                if (busy < 100 || now_msec() - begin < busy / 2 + 20)
                        return;
        }
        fail_msg("the worker ends only when its link thread has the time to look");
}

static void die_keeps_sent_answers(void **state) {
        CLEANUP(broker_freep) Broker *b = broker_open(1);

        broker_say(b, WIRE_MODEL_COMMIT, 7, 0);
        broker_say(b, WIRE_DIE, 0, 0);
        broker_say(b, WIRE_MODEL_COMMIT, 8, 0); /* nobody reads this one */
        assert_killed(b);
        broker_expect_error(b, 7, FAULT_INTERNAL, "Model 7 was not opened");
        broker_expect_eof(b);
}

static void overdrawn_credit_ends_the_worker(void **state) {
        CLEANUP(broker_freep) Broker *b = broker_open(1);
        WireMessage m;
        int status;

        /* Never reads: at some point ACKs wait in the worker, and more of them than there are credits. */
        wire_init(&m, WIRE_MODEL_CLOSE, 1, 1, 0);
        for (unsigned i = 0; i < 10000000; i++) {
                int r = wire_send(b->socket, &m, -EBADF);

                if (r == -EPIPE)
                        break;
                assert_true(r == 0 || r == -EAGAIN);
        }
        status = broker_wait(b);
        assert_true(WIFEXITED(status));
        assert_int_equal(WEXITSTATUS(status), EXIT_FAILURE);
}

static void model_ready_describes_the_model(void **state) {
        CLEANUP(broker_freep) Broker *b = broker_open(1);
        WireMessage m;

        broker_load_model(b, 3, &m);
        assert_int_equal(m.model_ready.layers, 3);
        assert_int_equal(m.model_ready.refiner_layers, 2);
        assert_int_equal(m.model_ready.heads, 8);
        assert_int_equal(m.model_ready.head_dim, 128);
        assert_int_equal(m.model_ready.hidden, 64);
        assert_int_equal(m.model_ready.ffn, 96);
        assert_int_equal(m.model_ready.text_dim, 160);
        assert_int_equal(m.model_ready.n_tensors, 65);
        assert_string_equal(m.model_ready.layout, "comfy");
        assert_string_equal(m.model_ready.qkv_order, "stacked");
        assert_string_equal(m.model_ready.partition, "");
        assert_true(m.model_ready.weight_bytes > 3000000 && m.model_ready.weight_bytes < 3250984);
        assert_true(m.model_ready.private_bytes > 0);
        broker_expect_acks(b, 4); /* WELCOME, OPEN, REGION, COMMIT */
}

static void model_bad_file_refused_then_good_one(void **state) {
        CLEANUP(broker_freep) Broker *b = broker_open(1);
        CLEANUP_FREE uint8_t *bytes = NULL;
        CLEANUP_CLOSE int bad = -EBADF, cut = -EBADF;
        uint64_t size;

        bytes = golden_read(NULL, "dit/comfy.safetensors", &size);
        cut = memfd_of(bytes, 4096, 4096);
        offer_model(b, 3, cut, 4096, 4096);
        broker_expect_error(b, 3, FAULT_INVALID_FILE, "model.safetensors");

        bytes[0] ^= 0xff;
        bad = memfd_of(bytes, 4096, 4096);
        offer_model(b, 3, bad, 4096, 4096);
        broker_expect_error(b, 3, FAULT_INVALID_FILE, "model.safetensors");

        broker_load_model(b, 3, NULL);
}

static void model_bad_region_refused(void **state) {
        CLEANUP(broker_freep) Broker *b = broker_open(1);
        CLEANUP_CLOSE int good = memfd_of("x", 1, 8192), open_ended = -EBADF;

        offer_model(b, 1, good, 8193, 8192);
        broker_expect_error(b, 1, FAULT_INTERNAL, "8193 bytes, its region only 8192");
        offer_model(b, 1, good, 4096, 4096); /* the memfd has 8192 */
        broker_expect_error(b, 1, FAULT_INTERNAL, "cannot be used");
        offer_model(b, 1, STDERR_FILENO, 4096, 4096);
        broker_expect_error(b, 1, FAULT_INTERNAL, "cannot be used");

        /* Whoever else holds it could cut it under the worker's feet. */
        open_ended = memfd_create("test-open-ended", MFD_CLOEXEC | MFD_ALLOW_SEALING);
        assert_true(open_ended >= 0);
        assert_int_equal(ftruncate(open_ended, 4096), 0);
        offer_model(b, 1, open_ended, 4096, 4096);
        broker_expect_error(b, 1, FAULT_INTERNAL, "cannot be used");
}

static void model_wrong_order_ends_the_worker(void **state) {
        for (unsigned i = 0; i < 8; i++) {
                CLEANUP(broker_freep) Broker *b = broker_open(1);
                CLEANUP_CLOSE int fd = memfd_of("x", 1, 4096);
                WireMessage m, region;

                wire_init(&m, WIRE_MODEL_OPEN, 1, 1, 0);
                m.model_open.n_files = 2;
                wire_init(&region, WIRE_REGION, 1, 1, 0);
                region.region.region_size = 4096;
                (void) snprintf(region.region.name, sizeof(region.region.name), "a.safetensors");

                switch (i) {
                case 0: /* twice the same id */
                        broker_send(b, &m, -EBADF);
                        break;
                case 1:
                        m.model_open.n_files = 0;
                        break;
                case 2:
                        m.model_open.n_files = 100000;
                        break;
                case 3:
                        m.model_open.qkv_order = 3;
                        break;
                case 4:
                        (void) snprintf(m.model_open.partition, sizeof(m.model_open.partition), "other");
                        break;
                default:
                        broker_send(b, &m, -EBADF);
                        region.region.index = i == 5 ? 1 : 0;
                        if (i == 6)
                                (void) snprintf(
                                        region.region.name, sizeof(region.region.name), "../a.safetensors");
                        if (i == 7)
                                region.header.job = 2;
                        broker_send(b, &region, fd);
                        break;
                }
                if (i < 5)
                        broker_send(b, &m, -EBADF);
                assert_fails(b);
        }
}

static void model_incomplete_commit_refused(void **state) {
        CLEANUP(broker_freep) Broker *b = broker_open(1);
        WireMessage m;

        wire_init(&m, WIRE_MODEL_OPEN, 1, 1, 0);
        m.model_open.n_files = 2;
        broker_send(b, &m, -EBADF);
        broker_say(b, WIRE_MODEL_COMMIT, 1, 0);
        broker_expect_error(b, 1, FAULT_INTERNAL, "0 of 2 files");
}

static void arena_wrong_ends_the_worker(void **state) {
        for (unsigned i = 0; i < 2; i++) {
                CLEANUP(broker_freep) Broker *b = broker_open(1);
                CLEANUP(arenas_freep) Arenas *a = arenas_new(4096, 4096);
                WireMessage m;

                wire_init(&m, WIRE_ARENA, 1, 2, 0);
                m.arena.size = 4096;
                m.arena.kind = i == 0 ? 2 : WIRE_ARENA_INPUT;
                if (i == 1) /* given twice */
                        broker_send(b, &m, a->input_fd);
                broker_send(b, &m, a->input_fd);
                assert_fails(b);
        }
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(start_options_answered),
                cmocka_unit_test(start_without_socket_refused),
                cmocka_unit_test(start_wrong_socket_refused),
                cmocka_unit_test(hello_describes_the_worker),
                cmocka_unit_test(welcome_wrong_ends_the_worker),
                cmocka_unit_test(known_pins_are_nothing_to_a_cpu),
                cmocka_unit_test(message_before_welcome_ends_the_worker),
                cmocka_unit_test(second_welcome_ends_the_worker),
                cmocka_unit_test(garbage_ends_the_worker),
                cmocka_unit_test(other_epoch_is_dropped),
                cmocka_unit_test(end_of_file_ends_the_worker),
                cmocka_unit_test(half_closed_socket_ends_the_worker),
                cmocka_unit_test(end_of_file_while_busy_ends_the_worker),
                cmocka_unit_test(die_keeps_sent_answers),
                cmocka_unit_test(overdrawn_credit_ends_the_worker),
                cmocka_unit_test(model_ready_describes_the_model),
                cmocka_unit_test(model_bad_file_refused_then_good_one),
                cmocka_unit_test(model_bad_region_refused),
                cmocka_unit_test(model_wrong_order_ends_the_worker),
                cmocka_unit_test(model_incomplete_commit_refused),
                cmocka_unit_test(arena_wrong_ends_the_worker),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
