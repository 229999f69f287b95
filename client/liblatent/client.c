/* SPDX-License-Identifier: Apache-2.0 */
#include "client/liblatent/client.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/liblatent/bus-choice.h"
#include "client/liblatent/job.h"
#include "client/liblatent/options.h"
#include "client/liblatent/value.h"
#include "service/shared/clock.h"

_Static_assert(sizeof(latent_client_options) == 32, "public layout changed: add fields, never alter");
#define CLIENT_OPTIONS_SIZE_V1 16u
#define RESTART_SEC 60u
#define PING_USEC (10 * CLOCK_USEC_PER_SEC)
#define START_USEC (2 * CLOCK_USEC_PER_SEC) /* between two requests to the bus to start the service */
#define PING_AGAIN_USEC (2 * CLOCK_USEC_PER_SEC)

int object_init(Object *o, const char *owner, const char *path) {
        Object x = {};

        if (owner) {
                x.owner = strdup(owner);
                if (!x.owner)
                        return -ENOMEM;
        }
        x.path = strdup(path);
        if (!x.path) {
                free(x.owner);
                return -ENOMEM;
        }

        *o = x;
        return 0;
}

void object_done(Object *o) {
        free(o->owner);
        free(o->path);
        *o = (Object){};
}

latent_client *client_ref(latent_client *c) {
        c->n_ref++;
        return c;
}

static void client_disconnect(latent_client *c) {
        c->filter = sd_bus_slot_unref(c->filter);
        c->owner_match = sd_bus_slot_unref(c->owner_match);
        c->bus = sd_bus_flush_close_unref(c->bus);
        if (c->is_peer) {
                free(c->owner);
                c->owner = NULL;
        }
}

static void client_lost(latent_client *c) {
        client_disconnect(c);
        job_on_service_gone(c, NULL);
}

latent_client *client_unref(latent_client *c) {
        if (!c || --c->n_ref > 0)
                return NULL;

        client_disconnect(c);
        free(c->socket);
        free(c->owner);
        free(c);
        return NULL;
}

static int on_message(sd_bus_message *m, void *userdata, sd_bus_error *reterr_error) {
        job_on_signal(userdata, m);
        return 0;
}

static int on_owner_changed(sd_bus_message *m, void *userdata, sd_bus_error *reterr_error) {
        latent_client *c = userdata;
        const char *name, *old_owner, *new_owner;
        int r;

        r = sd_bus_message_read(m, "sss", &name, &old_owner, &new_owner);
        if (r < 0)
                return 0; /* not what the bus sends: nothing to learn from it */

        if (strcmp(name, BUS_NAME) != 0)
                return 0;

        free(c->owner);
        c->owner = new_owner[0] != '\0' ? strdup(new_owner) : NULL; /* no memory: as if it were not back */
        c->start_usec = new_owner[0] != '\0' || c->said_goodbye ? 0 : clock_usec(); /* who stopped it starts it, too */
        c->said_goodbye = false;
        if (old_owner[0] != '\0')
                job_on_service_gone(c, old_owner);
        return 0;
}

/* Nobody listens to the answer: a service that starts has its name on the bus, and for one that cannot be started there is no more to do
 * than to wait. */
void client_ask_start(latent_client *c) {
        CLEANUP(sd_bus_message_unrefp) sd_bus_message *m = NULL;
        uint64_t now = clock_usec();

        if (!c->bus || c->start_usec == 0 || now < c->start_usec)
                return;

        c->start_usec = now + START_USEC;
        if (sd_bus_message_new_method_call(c->bus, &m, "org.freedesktop.DBus", "/org/freedesktop/DBus", "org.freedesktop.DBus",
                    "StartServiceByName") >= 0 &&
                sd_bus_message_append(m, "su", BUS_NAME, (uint32_t) 0) >= 0 && sd_bus_message_set_expect_reply(m, false) >= 0)
                (void) sd_bus_send(c->bus, m, NULL); /* an error shows again in client_dispatch() */
}

/* Signals to us need no match rule on the bus, but must be listened for before the first call. */
static int client_listen(latent_client *c, latent_error *e) {
        int r;

        r = sd_bus_add_filter(c->bus, &c->filter, on_message, c);
        if (r < 0)
                return error_errno(e, r, "Listening for signals");
        if (c->is_peer)
                return 0;

        r = sd_bus_add_match(c->bus, &c->owner_match,
                "type='signal',sender='org.freedesktop.DBus',path='/org/freedesktop/DBus',"
                "interface='org.freedesktop.DBus',member='NameOwnerChanged',arg0='" BUS_NAME "'",
                on_owner_changed, c);
        if (r < 0)
                return error_bus(e, r, NULL, false, "Listening for signals");

        return 0;
}

/* The first connection waits longer for its answer than the later ones, which are tried again and again. */
static int client_connect_socket(latent_client *c, uint32_t kind, const char *path, uint64_t ping_usec, latent_error *e) {
        char number[24];
        int r;

        r = bus_open_socket(kind, path, ping_usec, &c->bus, e);
        if (r < 0)
                return r;

        (void) snprintf(number, sizeof(number), "#%" PRIu64, ++c->n_connected);
        c->owner = strdup(number);
        r = c->owner ? client_listen(c, e) : error_errno(e, -ENOMEM, "Connecting");
        if (r < 0)
                client_disconnect(c);
        return r;
}

int client_connect_again(latent_client *c, latent_error *e) {
        if (c->bus)
                return 0;
        if (!c->socket)
                return error_set(
                        e, -ENOTCONN, LATENT_ERROR_NO_SERVICE, "The connection to the service is closed.");

        return client_connect_socket(c, LATENT_BUS_AUTO, c->socket, PING_AGAIN_USEC, e);
}

bool client_can_return(const latent_client *c) {
        return c->bus || c->socket;
}

const char *client_sender(const latent_client *c, sd_bus_message *m) {
        return c->is_peer ? c->owner : sd_bus_message_get_sender(m);
}

static int client_connect(latent_client *c, const latent_client_options *o, latent_error *e) {
        int r;

        if (!o->socket) {
                r = bus_choose(o->bus, o->address, &c->bus, e);
                return r < 0 ? r : client_listen(c, e);
        }

        c->is_peer = true;
        r = client_connect_socket(c, o->bus, o->socket, PING_USEC, e);
        if (r < 0)
                return r;

        c->socket = strdup(o->socket);
        return c->socket ? 0 : error_errno(e, -ENOMEM, "Connecting");
}

LATENT_PUBLIC int latent_client_new(
        const latent_client_options *options, latent_client **ret_client, latent_error *error) {
        CLEANUP(client_unrefp) latent_client *c = NULL;
        latent_client_options o;
        int r;

        r = options_read(options, CLIENT_OPTIONS_SIZE_V1, &o, sizeof(o), error);
        if (r < 0)
                return r;

        if (o.flags & ~(uint32_t) LATENT_CLIENT_NO_RESUME)
                return error_set(error, -E2BIG, LATENT_ERROR_INVALID_ARGUMENT,
                        "Unknown flags %#x; expected LATENT_CLIENT_*.", o.flags);

        c = calloc(1, sizeof(*c));
        if (!c)
                return error_errno(error, -ENOMEM, "Connecting");
        c->n_ref = 1;
        c->no_resume = (o.flags & LATENT_CLIENT_NO_RESUME) != 0;
        c->restart_usec = (o.restart_timeout_sec > 0 ? o.restart_timeout_sec : RESTART_SEC) * CLOCK_USEC_PER_SEC;
        LIST_INIT(&c->jobs);

        r = client_connect(c, &o, error);
        if (r < 0)
                return r;

        *ret_client = STEAL_PTR(c);
        return 0;
}

LATENT_PUBLIC void latent_client_free(latent_client *client) {
        if (!client)
                return;

        free(client->socket);
        client->socket = NULL;
        client_lost(client);
        (void) client_unref(client);
}

LATENT_PUBLIC int latent_client_fd(latent_client *client) {
        return client->bus ? sd_bus_get_fd(client->bus) : -ENOTCONN;
}

LATENT_PUBLIC int latent_client_events(latent_client *client) {
        return client->bus ? sd_bus_get_events(client->bus) : -ENOTCONN;
}

LATENT_PUBLIC int latent_client_timeout(latent_client *client, uint64_t *ret_usec) {
        uint64_t until, now;
        int r;

        if (!client->bus)
                return -ENOTCONN;

        r = sd_bus_get_timeout(client->bus, &until);
        if (r < 0)
                return r;

        /* sd-bus names a point in time, zero if something is waiting already. */
        now = clock_usec();
        if (until == UINT64_MAX)
                *ret_usec = UINT64_MAX;
        else
                *ret_usec = until > now ? until - now : 0;
        return 0;
}

int client_dispatch(latent_client *c, latent_error *e) {
        int r, any = 0;

        if (!c->bus)
                return error_set(
                        e, -ENOTCONN, LATENT_ERROR_NO_SERVICE, "The connection to the service is closed.");

        for (;;) {
                r = sd_bus_process(c->bus, NULL);
                if (r == 0)
                        return any;
                if (r < 0)
                        break;
                any = 1;
        }

        client_lost(c);
        return error_set(e, -ENOTCONN, LATENT_ERROR_NO_SERVICE, "The connection to the %s was lost: %s.%s",
                c->is_peer ? "service" : "bus", strerror(-r), c->is_peer ? "" : " Connect again.");
}

LATENT_PUBLIC int latent_client_process(latent_client *client, latent_error *error) {
        return client_dispatch(client, error);
}

int client_error_message(int r, const char *doing, latent_error *e) {
        /* sd-bus refuses to send what is not text; our own mistakes and the service's have other codes. */
        if (r == -EINVAL)
                return error_set(e, r, LATENT_ERROR_INVALID_ARGUMENT,
                        "%s failed: a string is not UTF-8 text, or a tensor has no type.", doing);

        return error_set(e, r, LATENT_ERROR_INTERNAL,
                "%s failed: a message could not be made or understood (%s). Are liblatent and latentd of "
                "one version?",
                doing, strerror(-r));
}

int client_message(latent_client *c, const char *owner, const char *path, const char *interface,
        const char *member, sd_bus_message **ret, latent_error *e) {
        int r;

        /* A call may have seen the end of the connection, which nobody took in yet. */
        if (c->is_peer && c->bus && sd_bus_is_open(c->bus) <= 0)
                client_lost(c);

        if (c->is_peer ? owner && (!c->owner || strcmp(owner, c->owner) != 0) : owner && !c->bus)
                return error_set(e, -ECONNRESET, LATENT_ERROR_RESTARTED,
                        "%s: the connection to the service that had this object is closed.", member);
        r = client_connect_again(c, e);
        if (r < 0)
                return r;

        r = sd_bus_message_new_method_call(
                c->bus, ret, c->is_peer ? NULL : owner ? owner : BUS_NAME, path, interface, member);
        if (r < 0)
                return client_error_message(r, member, e);

        return 0;
}

static int call(latent_client *c, sd_bus_message *m, uint64_t usec, const char *doing, sd_bus_message **ret_reply,
        latent_error *e) {
        CLEANUP(sd_bus_error_free) sd_bus_error b = SD_BUS_ERROR_NULL;
        const char *to;
        bool made;
        int r;

        /* sd-bus refuses to send under a lost connection; nothing else can end it here. */
        r = sd_bus_call(c->bus, m, usec, &b, ret_reply);
        if (r >= 0)
                return 0;

        /* Not before: a message moves in memory until it is sent. */
        to = sd_bus_message_get_destination(m);
        made = c->is_peer ? strcmp(sd_bus_message_get_path(m), BUS_ROOT) != 0 : to && to[0] == ':';
        return error_bus(e, r, &b, made, doing);
}

int client_call(latent_client *c, sd_bus_message *m, const char *doing, sd_bus_message **ret_reply,
        latent_error *e) {
        return call(c, m, 0, doing, ret_reply, e);
}

int client_call_patiently(latent_client *c, sd_bus_message *m, const char *doing, sd_bus_message **ret_reply,
        latent_error *e) {
        return call(c, m, UINT64_MAX, doing, ret_reply, e);
}

int client_call_simple(latent_client *c, const Object *o, const char *interface, const char *member,
        const char *doing, latent_error *e) {
        CLEANUP(sd_bus_message_unrefp) sd_bus_message *m = NULL;
        int r;

        r = client_message(c, o->owner, o->path, interface, member, &m, e);
        if (r < 0)
                return r;

        return client_call(c, m, doing, NULL, e);
}

int client_properties(latent_client *c, const char *owner, const char *path, const char *interface,
        const char *doing, latent_value **ret, latent_error *e) {
        CLEANUP(sd_bus_message_unrefp) sd_bus_message *m = NULL, *reply = NULL;
        int r;

        r = client_message(c, owner, path, "org.freedesktop.DBus.Properties", "GetAll", &m, e);
        if (r < 0)
                return r;
        r = sd_bus_message_append(m, "s", interface);
        if (r < 0)
                return client_error_message(r, doing, e);

        r = client_call(c, m, doing, &reply, e);
        if (r < 0)
                return r;

        if (!sd_bus_message_has_signature(reply, "a{sv}"))
                return client_error_message(-EBADMSG, doing, e);
        r = value_read(reply, ret);
        if (r < 0)
                return client_error_message(r, doing, e);

        return 0;
}

LATENT_PUBLIC const char *latent_version(void) {
        return LATENTD_VERSION;
}
