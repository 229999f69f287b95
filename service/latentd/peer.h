/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Who calls: a connection on the bus and the user behind it. Asked from the bus once per connection (never from /proc), kept until
 * the connection leaves; then everything it owns goes. Handlers are written against this, so that they also serve a private socket
 * later. */

#include "service/latentd/manager.h"

struct Peer {
        Manager *manager;
        sd_bus *bus;
        char *name; /* unique name; NULL on a private socket */
        uid_t uid;
        sd_bus_track *track;
        bool gone;
        TAILQ_ENTRY(Peer) entry;
};

/* The peer of the message being handled, made at first sight. Fails with AccessDenied if this uid may not use the service (user mode:
 * not ours; system mode: not in AllowedUsers= and not root). Blocking once per connection (~100 us). */
int peer_of_message(Manager *m, sd_bus_message *message, Peer **ret, Fault *f);

/* For find callbacks and node enumerators, which get no message: the peer whose method call is being handled on this bus, or NULL if none
 * is (a signal of ours is being made). */
Peer *peer_of_call(Manager *m, sd_bus *bus);

/* The gate: refuses every method call below our root path by a user who may not use the service, property reads and introspection
 * included, before any handler sees it. */
int peer_bus_register(Manager *m, sd_bus *bus);

/* Called when it left the bus: sessions closed, jobs cancelled, private models released, then freed. */
void peer_gone(Peer *p);
Peer *peer_free(Peer *p);

/* Signals to this peer only (destination set); for a peer that does not read (more than 64 messages queued) the droppable ones are
 * dropped. Returns 1 if sent, 0 if dropped. Takes m's reference. */
int peer_send(Peer *p, sd_bus_message *m, bool droppable);
