/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Two ends of a private D-Bus connection in the test's own loop. */

#include <systemd/sd-bus.h>

#include "tests/unit/latentd/fake-worker.h"

typedef struct FakeBus {
        sd_bus *service, *client;
} FakeBus;

static inline void fake_bus_start(Fake *f, FakeBus *b) {
        sd_id128_t id;
        int pair[2];

        assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair), 0);
        assert_true(sd_id128_randomize(&id) >= 0);
        assert_true(sd_bus_new(&b->service) >= 0);
        assert_true(sd_bus_set_fd(b->service, pair[0], pair[0]) >= 0);
        assert_true(sd_bus_set_server(b->service, 1, id) >= 0);
        assert_true(sd_bus_negotiate_fds(b->service, 1) >= 0);
        assert_true(sd_bus_start(b->service) >= 0);
        assert_true(sd_bus_new(&b->client) >= 0);
        assert_true(sd_bus_set_fd(b->client, pair[1], pair[1]) >= 0);
        assert_true(sd_bus_negotiate_fds(b->client, 1) >= 0);
        assert_true(sd_bus_start(b->client) >= 0);
        assert_true(sd_bus_attach_event(b->service, f->m->event, 0) >= 0);
        assert_true(sd_bus_attach_event(b->client, f->m->event, 0) >= 0);
        RUN_UNTIL(f, sd_bus_is_ready(b->service) > 0 && sd_bus_is_ready(b->client) > 0);
}

static inline void fake_bus_stop(FakeBus *b) {
        sd_bus_detach_event(b->service);
        sd_bus_detach_event(b->client);
        b->service = sd_bus_close_unref(b->service);
        b->client = sd_bus_close_unref(b->client);
}
