/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* How the programs that latentd talks to are started: with the connection as descriptor 3 and LISTEN_FDS=1,
 * by systemd (a socket unit with Accept=yes) or by latentd itself. */

#include "service/shared/fault.h"

#define LISTEN_FD 3

/* Takes LISTEN_FD over: a connected SOCK_SEQPACKET unix socket whose peer is root, our own user or the user
 * latentd; makes it non-blocking and O_CLOEXEC, clears the environment. unit: the socket unit, for the text.
 * -ENOTCONN, -EACCES, -errno with f. */
int listen_take_socket(const char *unit, Fault *f);

/* What none of these programs may lose to another process or to a core file: not dumpable, no core, no new
 * privileges. */
int listen_shut_in(Fault *f);
