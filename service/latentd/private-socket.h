/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The socket that clients use without a message bus (containers, tests): D-Bus, peer to peer, with the same objects. Each connection is
 * one Peer, whose user the kernel names and whose end is the end of the connection. A user's connections are limited, and so are those
 * of users who may not use the service; who does not authenticate in time or does not read is dropped.
 *
 * Of sd-bus, not ours to change: a message may have 128 MiB, one that is no valid D-Bus is thrown away without an answer, and so is
 * one whose descriptors arrive in one piece with the end of the authentication. */

#include "service/latentd/manager.h"

/* Sets up the objects on a connection, as on the message bus. */
typedef int (*PrivateSocketRegisterFn)(Manager *m, sd_bus *bus);

/* The listening socket "bus" that the service manager handed in (latentd.socket), duplicated; -EBADF: none. To be called
 * before the store of descriptors takes what is handed in. */
int private_socket_take_activated(void);

/* Listens where PrivateSocket= says, or where its default is; or at m->activated_fd. *ret is
 * NULL if there is to be none. f: only where the configuration names a socket; a default that cannot be had is logged. */
int private_socket_new(Manager *m, PrivateSocketRegisterFn register_objects, PrivateSocket **ret, Fault *f);
/* Closes the connections (their peers are gone by then) and removes the socket. */
PrivateSocket *private_socket_free(PrivateSocket *s);

/* The connections of users who may use the service, for signals to all: the first, the one behind `previous`, NULL at the end. */
sd_bus *private_socket_next(PrivateSocket *s, const sd_bus *previous);
/* A call came on this connection (or on the message bus): one that lets too many answers lie is dropped, soon. */
void private_socket_watch(PrivateSocket *s, const sd_bus *bus);
