/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The worker's end of the socket: receives on one thread, sends from any, acknowledges. Never blocks in a
 * send: what does not go out at once waits in a queue that the receiving thread empties on POLLOUT. */

#include <stdint.h>

#include "service/shared/wire.h"

typedef struct Link Link;

/* A valid message of this epoch. *fd is its descriptor or -EBADF; a handler that keeps it sets *fd to
 * -EBADF. < 0 with f ends link_run(). */
typedef int (*LinkFunc)(void *userdata, const WireMessage *m, int *fd, Fault *f);

/* socket stays the caller's. -ENOMEM, -errno. */
int link_new(int socket, Link **ret);
Link *link_free(Link *l);

/* From WELCOME on; messages of other epochs are dropped then. Before, only WELCOME is accepted. */
void link_set_epoch(Link *l, uint64_t epoch);
uint64_t link_epoch(const Link *l);

/* Any thread. A peer that is gone is no error here: the reaper sees it. Failure (no memory) ends link_run().
 */
void link_send(Link *l, const WireMessage *m);

/* The same for a message that may be lost: dropped unless it goes out at once. */
void link_offer(Link *l, const WireMessage *m);

/* Receives until end of file (0) or an error: -EBADMSG, -EPROTO (protocol), whatever func returned. */
int link_run(Link *l, LinkFunc func, void *userdata, Fault *f);

/* Sends what still waits as far as the socket takes it now. */
void link_flush(Link *l);
