/* SPDX-License-Identifier: Apache-2.0 */
#include "service/latentd/peer.h"

#include <inttypes.h>
#include <string.h>
#include <unistd.h>

#include "service/latentd/bus-error.h"
#include "service/latentd/job.h"
#include "service/latentd/model.h"
#include "service/latentd/private-socket.h"
#include "service/latentd/session.h"
#include "service/shared/cleanup.h"
#include "service/shared/log.h"

/* Messages that wait in our end of the connection before droppable ones are dropped. */
#define QUEUED_WRITE_MAX 64

DEFINE_CLEANUP(Peer *, peer_free)

static bool uid_listed(const Manager *m, uid_t uid) {
        if (m->user_mode)
                return uid == getuid();

        if (uid == 0)
                return true;

        for (size_t i = 0; i < m->config->n_allowed_users; i++)
                if (m->config->allowed_users[i] == uid)
                        return true;

        return false;
}

/* The effective uid as the bus vouches for it. What sd-bus had to fill in from /proc is refused: the process may be gone and its
 * pid taken by another. */
static int message_euid(sd_bus_message *message, uid_t *ret, Fault *f) {
        CLEANUP(sd_bus_creds_unrefp) sd_bus_creds *creds = NULL;
        int r;

        r = sd_bus_query_sender_creds(message, SD_BUS_CREDS_EUID, &creds);
        if (r < 0)
                return fault_set(f, r, FAULT_ACCESS_DENIED, "The bus could not say who is calling: %s.", strerror(-r));

        if (sd_bus_creds_get_augmented_mask(creds) & SD_BUS_CREDS_EUID)
                return fault_set(f, -EACCES, FAULT_ACCESS_DENIED, "The bus does not vouch for the caller's user.");

        r = sd_bus_creds_get_euid(creds, ret);
        if (r < 0)
                return fault_set(f, r, FAULT_ACCESS_DENIED, "The bus could not say who is calling: %s.", strerror(-r));

        return 0;
}

int peer_refuse(const Peer *p, Fault *f) {
        if (p->manager->user_mode)
                return fault_set(f, -EACCES, FAULT_ACCESS_DENIED,
                                 "This is the service of user %" PRIu32 "; user %" PRIu32 " may not use it.",
                                 (uint32_t) getuid(), (uint32_t) p->uid);

        return fault_set(f, -EACCES, FAULT_ACCESS_DENIED,
                         "User %" PRIu32 " may not use this service; an administrator can add it to AllowedUsers= in latentd.conf%s.",
                         (uint32_t) p->uid, p->name ? " or give it rights with polkit" : "");
}

static int on_track_empty(sd_bus_track *track, void *userdata) {
        peer_gone(userdata);
        return 0;
}

/* name: NULL on a private socket. */
static int peer_new(Manager *m, sd_bus *bus, const char *name, uid_t uid, Peer **ret) {
        CLEANUP(peer_freep) Peer *p = NULL;
        int r;

        p = calloc(1, sizeof(*p));
        if (!p)
                return -ENOMEM;

        p->bus = sd_bus_ref(bus);
        p->uid = uid;
        p->listed = uid_listed(m, uid);
        if (name) {
                p->name = strdup(name);
                if (!p->name)
                        return -ENOMEM;

                r = sd_bus_track_new(bus, &p->track, on_track_empty, p);
                if (r < 0)
                        return r;

                /* Fails if the name has left already: then nobody would ever call on_track_empty(). */
                r = sd_bus_track_add_name(p->track, name);
                if (r < 0)
                        return r;
        }

        p->manager = m;
        TAILQ_INSERT_TAIL(&m->peers, p, entry);
        *ret = STEAL_PTR(p);
        return 0;
}

int peer_new_private(Manager *m, sd_bus *bus, uid_t uid, Peer **ret) {
        return peer_new(m, bus, NULL, uid, ret);
}

/* On a private socket anything may stand in the sender's field: the connection says who it is. */
static Peer *peer_find(Manager *m, sd_bus *bus, const char *name) {
        Peer *p;

        TAILQ_FOREACH(p, &m->peers, entry)
                if (p->bus == bus && (!p->name || (name && strcmp(p->name, name) == 0)))
                        return p;

        return NULL;
}

static int peer_get(Manager *m, sd_bus_message *message, Peer **ret, Fault *f) {
        sd_bus *bus = sd_bus_message_get_bus(message);
        const char *name = sd_bus_message_get_sender(message);
        uid_t uid;
        Peer *p;
        int r;

        p = peer_find(m, bus, name);
        if (p) {
                *ret = p;
                return 0;
        }

        if (!name || sd_bus_is_bus_client(bus) <= 0)
                return fault_set(f, -EACCES, FAULT_ACCESS_DENIED, "The message has no sender.");

        r = message_euid(message, &uid, f);
        if (r < 0)
                return r;

        r = peer_new(m, bus, name, uid, &p);
        if (r < 0)
                return fault_set(f, r, FAULT_INTERNAL, "Cannot follow the connection %s: %s.", name, strerror(-r));

        *ret = p;
        return 0;
}

int peer_of_message(Manager *m, sd_bus_message *message, Peer **ret, Fault *f) {
        Peer *p = NULL;
        int r;

        r = peer_get(m, message, &p, f);
        if (r < 0)
                return r;

        if (!p->listed && !p->granted)
                return peer_refuse(p, f);

        *ret = p;
        return 0;
}

Peer *peer_of_call(Manager *m, sd_bus *bus) {
        sd_bus_message *message = sd_bus_get_current_message(bus);
        Peer *p = NULL;

        if (!message || sd_bus_message_is_method_call(message, NULL, NULL) <= 0)
                return NULL;

        return peer_of_message(m, message, &p, NULL) < 0 ? NULL : p;
}

static int on_message(sd_bus_message *message, void *userdata, sd_bus_error *error) {
        const char *path = sd_bus_message_get_path(message);
        Manager *m = userdata;
        Fault f = {};
        Peer *p = NULL;
        int r;

        if (sd_bus_message_is_method_call(message, NULL, NULL) <= 0 || !path || strncmp(path, BUS_ROOT, strlen(BUS_ROOT)) != 0)
                return 0;

        if (m->stopping)
                r = fault_set(&f, -ESHUTDOWN, FAULT_RESTARTED, "The service stops; call again when it is back.");
        else
                r = peer_get(m, message, &p, &f);
        if (r >= 0 && !p->name)
                private_socket_watch(m->private_socket, p->bus);
        if (r >= 0)
                r = polkit_check(p, message, &f);
        if (r < 0)
                return bus_error_fault(error, r, &f);

        return r == 0; /* 1: on to the handlers; 0: the message comes again */
}

int peer_bus_register(Manager *m, sd_bus *bus) {
        return sd_bus_add_filter(bus, NULL, on_message, m);
}

void peer_gone(Peer *p) {
        if (p->gone)
                return;

        p->gone = true;
        log_debug("%s of user %" PRIu32 " left", p->name ? p->name : "A private connection", (uint32_t) p->uid);

        polkit_peer_gone(p);
        session_peer_gone(p);
        job_peer_gone(p);
        model_peer_gone(p);
        peer_free(p);
}

Peer *peer_free(Peer *p) {
        if (!p)
                return NULL;

        if (p->manager)
                TAILQ_REMOVE(&p->manager->peers, p, entry);

        sd_bus_track_unref(p->track);
        sd_bus_unref(p->bus);
        free(p->name);
        free(p);
        return NULL;
}

int peer_send(Peer *p, sd_bus_message *m, bool droppable) {
        CLEANUP(sd_bus_message_unrefp) sd_bus_message *message = m;
        uint64_t queued;
        int r;

        if (p->gone)
                return 0;

        if (droppable) {
                r = sd_bus_get_n_queued_write(p->bus, &queued);
                if (r < 0)
                        return r;

                if (queued > QUEUED_WRITE_MAX)
                        return 0;
        }

        if (p->name) {
                r = sd_bus_message_set_destination(message, p->name);
                if (r < 0)
                        return r;
        }

        r = sd_bus_send(p->bus, message, NULL);
        return r < 0 ? r : 1;
}
