/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Requests to a session, as its readers get them: a{sv}. */

#include "tests/unit/latentd/fake-bus.h"

static FakeBus bus;

#define ADD(m, key, type, value) assert_true(sd_bus_message_append(m, "{sv}", key, type, value) >= 0)
#define SHAPE(...)                                                                                          \
        sizeof((uint64_t[]){ __VA_ARGS__ }) / 8, (uint64_t[]) {                                             \
                __VA_ARGS__                                                                                 \
        }

static inline sd_bus_message *request_new(void) {
        sd_bus_message *m;

        assert_true(sd_bus_message_new_method_call(bus.client, &m, NULL, "/x", "x.y", "Z") >= 0);
        assert_true(sd_bus_message_open_container(m, 'a', "{sv}") >= 0);
        return m;
}

/* It can be read now. */
static inline void seal(sd_bus_message *m) {
        assert_true(sd_bus_message_close_container(m) >= 0);
        assert_true(sd_bus_message_seal(m, 1, 0) >= 0);
        assert_true(sd_bus_message_rewind(m, 1) >= 0);
}

static inline void add_tensor(
        sd_bus_message *m, const char *key, uint64_t offset, const char *type, size_t n, const uint64_t *shape) {
        assert_true(sd_bus_message_open_container(m, 'e', "sv") >= 0);
        assert_true(sd_bus_message_append(m, "s", key) >= 0);
        assert_true(sd_bus_message_open_container(m, 'v', "(tsat)") >= 0);
        assert_true(sd_bus_message_open_container(m, 'r', "tsat") >= 0);
        assert_true(sd_bus_message_append(m, "ts", offset, type) >= 0);
        assert_true(sd_bus_message_append_array(m, 't', shape, n * 8) >= 0);
        for (int i = 0; i < 3; i++)
                assert_true(sd_bus_message_close_container(m) >= 0);
}

static inline int request_setup(void **state) {
        int r = fake_setup(state);

        fake_bus_start(*state, &bus);
        return r;
}

static inline int request_teardown(void **state) {
        fake_bus_stop(&bus);
        return fake_teardown(state);
}
