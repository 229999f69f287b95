/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Who calls: a connection on the bus or on the private socket, and the user behind it. Asked once per connection (the bus, or
 * SO_PEERCRED; never /proc), kept until the connection ends; then everything it owns goes. Handlers are written against this and do not
 * know where a caller is. */

#include "service/latentd/manager.h"
#include "service/latentd/polkit.h"

struct Peer {
        Manager *manager;
        sd_bus *bus;
        char *name; /* unique name; NULL on a private socket, where the whole connection is this peer */
        uid_t uid;
        bool listed; /* served without asking polkit: --user: our user; --system: root and AllowedUsers= */
        bool granted; /* something, by polkit, at some time */
        uint64_t granted_until[POLKIT_ACTION_MAX]; /* by polkit; CLOCK_MONOTONIC, 0: not asked or refused */
        sd_bus_track *track; /* NULL on a private socket */
        bool gone;
        unsigned n_finished; /* jobs of it that are kept */
        TAILQ_ENTRY(Peer) entry;
};

/* A peer on the private socket, of the user that the kernel names. It ends with peer_gone(). */
int peer_new_private(Manager *m, sd_bus *bus, uid_t uid, Peer **ret);

/* The peer of the message being handled, made at first sight: blocks once per connection (~100 us). Fails with AccessDenied if its user
 * may not use the service. The gate has let the message through before any handler asks. */
int peer_of_message(Manager *m, sd_bus_message *message, Peer **ret, Fault *f);

/* For find callbacks and node enumerators, which get no message: the peer whose method call is being handled on this bus, or NULL if none
 * is (a signal of ours is being made). */
Peer *peer_of_call(Manager *m, sd_bus *bus);

/* AccessDenied, and what the administrator can do about it. */
int peer_refuse(const Peer *p, Fault *f);

/* The gate: every method call below our root path, property reads and introspection included, is let through or refused here, before
 * any handler sees it. Where polkit has to be asked the message is kept and comes again with the answer. */
int peer_bus_register(Manager *m, sd_bus *bus);

/* Called when it left the bus: sessions closed, jobs cancelled, private models released, then freed. */
void peer_gone(Peer *p);
Peer *peer_free(Peer *p);

/* Signals to this peer only (destination set); for a peer that does not read (more than 64 messages queued) the droppable ones are
 * dropped. Returns 1 if sent, 0 if dropped. Takes m's reference. */
int peer_send(Peer *p, sd_bus_message *m, bool droppable);
