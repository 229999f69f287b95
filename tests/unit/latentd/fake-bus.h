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

/* The test's peer is the client of this connection, and sessions, jobs and models are there. */
static inline void fake_bus_serve(Fake *f, FakeBus *b) {
        fake_bus_start(f, b);
        assert_int_equal(session_bus_register(f->m, b->service), 0);
        assert_int_equal(job_bus_register(f->m, b->service), 0);
        assert_int_equal(model_bus_register(f->m, b->service), 0);
        f->peer->bus = sd_bus_ref(b->service);
        f->peer->listed = true;
        free(STEAL_PTR(f->peer->name));
        f->model->announced = f->lora->announced = true;
        f->conditioner->announced = f->vae->announced = f->audio_vae->announced = true;
}

/* A method call with nothing in it yet. */
static inline sd_bus_message *fake_bus_call(FakeBus *b, const char *path, const char *interface, const char *member) {
        sd_bus_message *m;

        assert_true(sd_bus_message_new_method_call(b->client, &m, NULL, path, interface, member) >= 0);
        return m;
}

static inline int fake_bus_on_reply(sd_bus_message *m, void *userdata, sd_bus_error *error) {
        *(sd_bus_message **) userdata = sd_bus_message_ref(m);
        return 0;
}

/* Sends it and returns at once; *ret_reply is filled when the answer is there. Takes m. */
static inline void fake_bus_send(FakeBus *b, sd_bus_message *m, sd_bus_message **ret_reply) {
        *ret_reply = NULL;
        assert_true(sd_bus_call_async(b->client, NULL, m, fake_bus_on_reply, ret_reply, UINT64_C(60000000)) >= 0);
        (void) sd_bus_message_unref(m);
}

static inline sd_bus_message *fake_bus_wait(Fake *f, FakeBus *b, sd_bus_message *m) {
        sd_bus_message *reply;

        fake_bus_send(b, m, &reply);
        RUN_UNTIL(f, reply);
        return reply;
}

/* Takes the reply, which must be this error (the last part of its name) with the word in its text; name NULL: no error. */
static inline void fake_bus_expect(sd_bus_message *reply, const char *name, const char *word) {
        const sd_bus_error *e = sd_bus_message_get_error(reply);

        if (!name && e)
                fail_msg("%s: %s", e->name, e->message);
        if (name) {
                assert_non_null(e);
                assert_string_equal(strrchr(e->name, '.') + 1, name);
                assert_non_null(word);
                if (!strstr(e->message, word))
                        fail_msg("\"%s\" does not name \"%s\"", e->message, word);
        }
        (void) sd_bus_message_unref(reply);
}
