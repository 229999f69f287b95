/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The name of a listening AF_UNIX socket in a file system: what may be in its place, and taking it away again. Nothing is ever removed but
 * sockets that nobody listens on, of the user that the process runs as. */

#include <sys/types.h>

#include "service/shared/fault.h"

typedef struct SocketPath {
        char *path; /* NULL: none */
        dev_t device;
        ino_t inode;
} SocketPath;

/* Binds fd (AF_UNIX, SOCK_STREAM, not bound) to path. A socket that an earlier run left there is replaced: one of our effective user (root,
 * too, takes only root's) that refuses connections. -ENAMETOOLONG; -EADDRINUSE, with f: something else is there, which stays as it is, or
 * somebody listens; other errors of the system have no fault. */
int socket_path_bind(int fd, const char *path, SocketPath *ret, Fault *f);

/* Removes the name, if what is there is still the socket that was bound, and empties *p. To be called while the socket listens: then
 * nobody else has taken the name meanwhile for an abandoned one. */
void socket_path_remove(SocketPath *p);
