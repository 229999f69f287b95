/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Which calls take which right, and polkit's word on it (org.freedesktop.PolicyKit1 on the bus, dbus/org.latentd.latent1.policy).
 *
 * Never asked: --user; root; the private socket, whose callers have no name on the bus (AllowedUsers= alone counts there). Users of
 * AllowedUsers= have use and load-model; for manage, and for all other users, polkit answers. Where there is no polkit, AllowedUsers=
 * is the answer to everything. */

#include <systemd/sd-bus.h>

#include "service/shared/fault.h"

typedef struct Peer Peer;

typedef enum PolkitAction {
        POLKIT_USE,        /* look, open sessions, compute */
        POLKIT_LOAD_MODEL, /* LoadModel, NewModel, AddFiles, Commit */
        POLKIT_MANAGE,     /* what concerns other users: DropCache, ReleaseGpus, Pin, Unload of a shared model */
        POLKIT_ACTION_MAX,
} PolkitAction;

const char *polkit_action_name(PolkitAction a); /* "org.latentd.latent1.use" */
PolkitAction polkit_action_of(const Peer *p, sd_bus_message *message);

/* 1: the peer may make this call. 0: polkit is being asked; the message is kept, and dispatched again after a yes (which holds for a
 * minute) or answered after a no. AccessDenied; LimitExceeded if too many calls wait already. */
int polkit_check(Peer *p, sd_bus_message *message, Fault *f);

/* Forgets what it asked for. */
void polkit_peer_gone(Peer *p);
