/* SPDX-License-Identifier: Apache-2.0 */
#include "service/worker/peers.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "service/shared/cleanup.h"
#include "tests/unit/worker/device-ops.h"

#define DEVICES 3

static LkOps ops;
static LkContext *contexts[DEVICES];
static WireDevice devices[DEVICES];
static int unconnected; /* from this one to others the driver has no way; -1: none */
static uint32_t peer_copies_of[DEVICES];
static uint32_t flips_from, device_bound; /* copies from this one change a bit */
static uint32_t slow, refuses; /* products of these: 2 ms more each; they fail */
static const LkOps *real;

static int bind_device(uint32_t device) {
        device_bound = device;
        device_ops_bind(device);
        return 0;
}

static int connect(uint32_t from, uint32_t to) {
        return unconnected == (int) from ? -EOPNOTSUPP : 0;
}

static int copy(LkContext *c, LkQueue queue, const LkCopy *a) {
        assert_ptr_equal(c, contexts[device_bound]); /* drivers have a device that the thread is bound to */
        peer_copies_of[device_bound] += queue == LK_PEER;
        device_sim.flip_next = device_bound == flips_from;
        return real->copy(c, queue, a);
}

static int gemm(LkContext *c, const LkGemm *a) {
        assert_ptr_equal(c, contexts[device_bound]);
        if (device_bound == slow)
                (void) usleep(2000);
        return device_bound == refuses ? -EIO : real->gemm(c, a);
}

static int setup(void **state) {
        real = device_ops();
        ops = *real;
        ops.copy = copy;
        ops.gemm = gemm;
        slow = refuses = UINT32_MAX;
        unconnected = -1;
        flips_from = UINT32_MAX;
        for (uint32_t i = 0; i < DEVICES; i++) {
                assert_int_equal(bind_device(i), 0);
                assert_int_equal(ops.context_new(1, contexts + i), 0);
                (void) snprintf(devices[i].pci_address, sizeof(devices[i].pci_address), "0000:4%u:00.0", i);
        }
        return 0;
}

static int teardown(void **state) {
        for (uint32_t i = 0; i < DEVICES; i++)
                contexts[i] = ops.context_free(contexts[i]);
        device_ops_done();
        return 0;
}

static PeersTrial trial(uint32_t n) {
        return (PeersTrial){.ops = &ops, .n = n, .devices = devices, .contexts = contexts, .bind = bind_device, .connect = connect,
                .size = 100000, .product = 32, .deadline_usec = 1000000};
}

static void peers_all_ways_are_measured(void **state) {
        PeersTrial t = trial(DEVICES);
        WireHello h = {};

        peers_try(&t, &h);
        for (uint32_t i = 0; i < DEVICES; i++)
                for (uint32_t k = 0; k < DEVICES; k++) {
                        assert_true(h.peer_mbs[i][k] > 0 && (h.peer_mbs[i][k] == WIRE_LINK_SAME) == (i == k));
                        assert_int_equal(h.host_mbs[i][k] > 0, i != k);
                }
        assert_string_equal(h.notes, "");
        assert_int_equal(device_sim.used, 0);
}

static void peers_one_device_is_not_tried(void **state) {
        PeersTrial t = trial(1);
        WireHello h = {};

        peers_try(&t, &h);
        assert_int_equal(h.peer_mbs[0][0], WIRE_LINK_SAME);
        assert_int_equal(device_sim.peer_copies, 0);
        ops.copy = NULL; /* a backend without */
        peers_try(&t, &(WireHello){});
        h = (WireHello){};
        peers_try(&t, &h);
        assert_int_equal(h.peer_mbs[0][0], 0);
}

static void peers_devices_without_ranks_are_not_tried(void **state) {
        PeersTrial t = trial(DEVICES);
        WireHello h = {};

        t.without = 1 << 1;
        contexts[1] = ops.context_free(contexts[1]);
        peers_try(&t, &h);
        for (uint32_t i = 0; i < DEVICES; i++)
                for (uint32_t k = 0; k < DEVICES; k++)
                        assert_int_equal(h.peer_mbs[i][k] > 0, i == k || (i != 1 && k != 1));
        assert_string_equal(h.notes, "");
}

static void peers_wrong_bytes_are_noticed(void **state) {
        PeersTrial t = trial(DEVICES);
        WireHello h = {};

        flips_from = 1;
        peers_try(&t, &h);
        assert_int_equal(h.peer_mbs[1][0], 0);
        assert_int_equal(h.peer_mbs[1][2], 0);
        assert_true(h.peer_mbs[0][1] > 0 && h.peer_mbs[2][1] > 0 && h.host_mbs[1][0] > 0);
        assert_non_null(strstr(h.notes, "GPU 0000:41:00.0 to 0000:42:00.0: copies between them arrive with wrong bytes"));
        assert_non_null(strstr(h.notes, "(the first at 50000)"));
        assert_int_equal(device_sim.used, 0);
}

static void peers_without_a_way_are_told(void **state) {
        PeersTrial t = trial(2);
        WireHello h = {};

        unconnected = 0;
        peers_try(&t, &h);
        assert_int_equal(h.peer_mbs[0][1], 0);
        assert_true(h.peer_mbs[1][0] > 0);
        assert_true(h.host_mbs[0][1] > 0 && h.host_mbs[1][0] > 0); /* their only way */
        assert_non_null(strstr(h.notes, "GPU 0000:40:00.0 to 0000:41:00.0: the driver has no direct way"));
}

/* Slower, but known. */
static void peers_without_registered_memory_are_measured(void **state) {
        PeersTrial t = trial(2);
        WireHello h = {};

        device_sim.pin_fails = true;
        peers_try(&t, &h);
        assert_true(h.peer_mbs[0][1] > 0 && h.host_mbs[0][1] > 0 && h.host_mbs[1][0] > 0);
        assert_string_equal(h.notes, "");
        assert_int_equal(device_sim.used, 0);
}

/* Everything that is tried after it leaves these two alone. */
static void peers_hanging_copy_is_given_up(void **state) {
        const uint32_t copies_of_one = peer_copies_of[1];
        PeersTrial t = trial(DEVICES);
        WireHello h = {};

        t.deadline_usec = 50000;
        device_sim.peer_stuck = true;
        peers_try(&t, &h);
        assert_int_equal(h.peer_mbs[0][1], 0);
        assert_int_equal(h.peer_mbs[1][0], 0);
        assert_non_null(strstr(h.notes, "did not end in 1 s"));
        assert_int_equal(peer_copies_of[1], copies_of_one);
        device_sim.peer_stuck = false;
        device_ops_sync();
        device_sim.used = 0; /* what was in use stays so */
}

/* Products of 2 * 64^3 operations: at most 0.3 * 10^9 a second of the slow one, which is 1 in whole numbers. */
static void peers_rates_tell_a_slow_device(void **state) {
        PeersTrial t = trial(DEVICES);
        WireHello h = {};

        t.product = 64;
        slow = 1;
        t.without = 1 << 2;
        peers_try(&t, &h);
        assert_true(h.rates[0] > h.rates[1] && h.rates[1] == 1);
        assert_int_equal(h.rates[2], 0);
        assert_string_equal(h.notes, "");
        assert_int_equal(device_sim.used, 0);
}

static void peers_rate_that_fails_is_told(void **state) {
        PeersTrial t = trial(2);
        WireHello h = {};

        refuses = 1;
        peers_try(&t, &h);
        assert_true(h.rates[0] > 0 && h.rates[1] == 0);
        assert_non_null(strstr(h.notes, "GPU 0000:41:00.0: its rate cannot be measured"));
        assert_true(h.peer_mbs[0][1] > 0 && h.peer_mbs[1][0] > 0);
        assert_int_equal(device_sim.used, 0);
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test_setup_teardown(peers_all_ways_are_measured, setup, teardown),
                cmocka_unit_test_setup_teardown(peers_one_device_is_not_tried, setup, teardown),
                cmocka_unit_test_setup_teardown(peers_devices_without_ranks_are_not_tried, setup, teardown),
                cmocka_unit_test_setup_teardown(peers_wrong_bytes_are_noticed, setup, teardown),
                cmocka_unit_test_setup_teardown(peers_without_a_way_are_told, setup, teardown),
                cmocka_unit_test_setup_teardown(peers_rates_tell_a_slow_device, setup, teardown),
                cmocka_unit_test_setup_teardown(peers_rate_that_fails_is_told, setup, teardown),
                cmocka_unit_test_setup_teardown(peers_without_registered_memory_are_measured, setup, teardown),
                cmocka_unit_test_setup_teardown(peers_hanging_copy_is_given_up, setup, teardown),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
