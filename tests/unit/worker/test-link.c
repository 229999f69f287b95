/* SPDX-License-Identifier: Apache-2.0 */
#include "service/worker/link.h"

#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

static int sockets[2];
static Link *l;

static int setup(void **state) {
        assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets), 0);
        assert_int_equal(link_new(sockets[0], &l), 0);
        link_set_epoch(l, 1);
        return 0;
}

static int teardown(void **state) {
        l = link_free(l);
        assert_null(link_free(NULL));
        if (sockets[0] >= 0)
                (void) close(sockets[0]);
        if (sockets[1] >= 0)
                (void) close(sockets[1]);
        return 0;
}

static WireMessage numbered(WireType type, uint32_t step) {
        WireMessage m;

        wire_init(&m, type, 1, 2, step);
        return m;
}

/* The step of the next message, -1 if there is none. */
static int64_t next_step(void) {
        WireMessage m;
        Fault f = {};
        int fd, r;

        r = wire_receive(sockets[1], &m, &fd, &f);
        if (r == -EAGAIN || r == 0)
                return -1;
        assert_int_equal(r, 1);
        return m.header.step;
}

static void link_send_full_socket_keeps_all_in_order(void **state) {
        const uint32_t n = 3000; /* many times what a socket takes */
        uint32_t got = 0;

        for (uint32_t i = 0; i < n; i++) {
                WireMessage m = numbered(WIRE_STEP_DONE, i);

                link_send(l, &m);
        }
        while (got < n) {
                int64_t s = next_step();

                if (s < 0) {
                        link_flush(l);
                        s = next_step();
                }
                assert_int_equal(s, got);
                got++;
        }
        link_flush(l);
        assert_int_equal(next_step(), -1);
}

static void link_offer_full_socket_drops(void **state) {
        uint32_t n = 0;
        WireMessage m;

        for (uint32_t i = 0; i < 3000; i++) {
                m = numbered(WIRE_PROGRESS, i);
                link_offer(l, &m);
        }
        while (next_step() == n)
                n++;
        assert_in_range(n, 1, 2999);
        link_flush(l);
        assert_int_equal(next_step(), -1); /* nothing was kept */

        /* Never past one that waits. */
        for (uint32_t i = 0; i < 3000; i++) {
                m = numbered(WIRE_STEP_DONE, i);
                link_send(l, &m);
        }
        (void) next_step();
        m = numbered(WIRE_PROGRESS, 5000);
        link_offer(l, &m);
        for (uint32_t i = 1; i < 3000; i++) {
                int64_t s = next_step();

                if (s < 0) {
                        link_flush(l);
                        s = next_step();
                }
                assert_int_equal(s, i);
        }
}

/* How many messages the next one acknowledges. */
static int64_t next_acks(WireType type) {
        WireMessage m;
        Fault f = {};
        int fd;

        assert_int_equal(wire_receive(sockets[1], &m, &fd, &f), 1);
        assert_string_equal(wire_type_name(m.header.type), wire_type_name((uint16_t) type));
        return m.header.acks;
}

static int answer_message(void *userdata, const WireMessage *m, int *fd, Fault *f) {
        WireMessage reply = numbered(m->header.type == WIRE_STEP ? WIRE_STEP_DONE : WIRE_JOB_READY, 1);

        if (m->header.type != WIRE_PLAN)
                link_send(l, &reply);
        return 0;
}

static int count_message(void *userdata, const WireMessage *m, int *fd, Fault *f) {
        unsigned *n = userdata;

        (*n)++;
        return m->header.type == WIRE_MODEL_CLOSE && m->header.step == 99 ? -ECHILD : 0;
}

static void link_run_acknowledges_what_has_credit(void **state) {
        static const WireType sent[] = {WIRE_MODEL_CLOSE, WIRE_CANCEL, WIRE_STEP, WIRE_DIE, WIRE_JOB_CLOSE};
        unsigned n = 0;
        WireMessage m;
        Fault f = {};

        for (uint32_t i = 0; i < 5; i++) {
                m = numbered(sent[i], i + 1);
                assert_int_equal(wire_send(sockets[1], &m, -1), 0);
        }
        assert_int_equal(shutdown(sockets[1], SHUT_WR), 0);
        assert_int_equal(link_run(l, count_message, &n, &f), 0);
        assert_int_equal(n, 5);
        assert_int_equal(next_acks(WIRE_ACK), 3);
        assert_int_equal(next_step(), -1);
}

/* The answers to what came together go out together, the first with all that is owed. */
static void link_run_answers_take_the_acks_along(void **state) {
        static const WireType sent[] = {WIRE_JOB_RUN, WIRE_PLAN, WIRE_STEP};
        WireMessage m;
        Fault f = {};

        for (uint32_t i = 0; i < 3; i++) {
                m = numbered(sent[i], i + 1);
                assert_int_equal(wire_send(sockets[1], &m, -1), 0);
        }
        assert_int_equal(shutdown(sockets[1], SHUT_WR), 0);
        assert_int_equal(link_run(l, answer_message, NULL, &f), 0);
        assert_int_equal(next_acks(WIRE_JOB_READY), 3);
        assert_int_equal(next_acks(WIRE_STEP_DONE), 0);
        assert_int_equal(next_step(), -1);
}

/* Half of the credits is not kept back, nor what a broker waits for. */
static void link_run_acknowledges_at_once_what_is_waited_for(void **state) {
        unsigned n = 0;
        WireMessage m;
        Fault f = {};

        for (uint32_t i = 0; i < WIRE_CREDITS; i++) {
                m = numbered(i == 3 ? WIRE_MODEL_COMMIT : WIRE_JOB_CLOSE, i + 1);
                assert_int_equal(wire_send(sockets[1], &m, -1), 0);
        }
        m = numbered(WIRE_MODEL_CLOSE, 99);
        assert_int_equal(wire_send(sockets[1], &m, -1), 0);
        assert_int_equal(link_run(l, count_message, &n, &f), -ECHILD);
        assert_int_equal(n, WIRE_CREDITS + 1);
        assert_int_equal(next_acks(WIRE_ACK), 4);
        assert_int_equal(next_acks(WIRE_ACK), WIRE_CREDITS / 2);
        assert_int_equal(next_acks(WIRE_ACK), WIRE_CREDITS / 2 - 4);
        assert_int_equal(next_step(), -1);
}

static void link_run_handler_fails_no_ack(void **state) {
        unsigned n = 0;
        WireMessage m;
        Fault f = {};

        m = numbered(WIRE_MODEL_CLOSE, 99);
        assert_int_equal(wire_send(sockets[1], &m, -1), 0);
        assert_int_equal(link_run(l, count_message, &n, &f), -ECHILD);
        assert_int_equal(next_step(), -1);
}

static void link_run_other_epoch_dropped(void **state) {
        unsigned n = 0;
        WireMessage m;
        Fault f = {};

        m = numbered(WIRE_MODEL_CLOSE, 1);
        m.header.epoch = 2;
        assert_int_equal(wire_send(sockets[1], &m, -1), 0);
        assert_int_equal(shutdown(sockets[1], SHUT_WR), 0);
        assert_int_equal(link_run(l, count_message, &n, &f), 0);
        assert_int_equal(n, 0);
        assert_int_equal(next_step(), -1);
}

static void *send_many(void *userdata) {
        for (uint32_t i = 0; i < 2000; i++) {
                WireMessage m = numbered(WIRE_STEP_DONE, i);

                link_send(l, &m);
        }
        return NULL;
}

static void *run_thread(void *userdata) {
        unsigned n = 0;
        Fault f = {};

        return (void *) (intptr_t) link_run(l, count_message, &n, &f);
}

/* Another thread sends while the link thread waits in poll(): what had to wait goes out without any message
 * coming in. */
static void link_send_from_other_thread_wakes_the_loop(void **state) {
        pthread_t sender, runner;
        uint32_t got = 0;
        void *answer;

        assert_int_equal(pthread_create(&runner, NULL, run_thread, NULL), 0);
        assert_int_equal(pthread_create(&sender, NULL, send_many, NULL), 0);
        while (got < 2000) {
                int64_t s = next_step();

                if (s < 0) {
                        (void) usleep(1000);
                        continue;
                }
                assert_int_equal(s, got);
                got++;
        }
        assert_int_equal(pthread_join(sender, NULL), 0);
        assert_int_equal(shutdown(sockets[1], SHUT_WR), 0);
        assert_int_equal(pthread_join(runner, &answer), 0);
        assert_null(answer);
}

#define LINK_TEST(fn) cmocka_unit_test_setup_teardown(fn, setup, teardown)

int main(void) {
        const struct CMUnitTest tests[] = {
                LINK_TEST(link_send_full_socket_keeps_all_in_order),
                LINK_TEST(link_offer_full_socket_drops),
                LINK_TEST(link_run_acknowledges_what_has_credit),
                LINK_TEST(link_run_answers_take_the_acks_along),
                LINK_TEST(link_run_acknowledges_at_once_what_is_waited_for),
                LINK_TEST(link_run_handler_fails_no_ack),
                LINK_TEST(link_run_other_epoch_dropped),
                LINK_TEST(link_send_from_other_thread_wakes_the_loop),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
