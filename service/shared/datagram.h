/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Datagrams with descriptors over a SOCK_SEQPACKET socket: what wire.c and media-wire.c have in common.
 * Neither call blocks. */

#include <stddef.h>

/* More than any of our messages carries, so that too many are seen, counted and closed by us. What does not
 * even fit here the kernel closes, which it says by MSG_CTRUNC. */
#define DATAGRAM_FDS_MAX 4

typedef struct Datagram {
        size_t size;
        int flags;      /* MSG_TRUNC, MSG_CTRUNC */
        unsigned n_fds; /* that came; the first DATAGRAM_FDS_MAX of them are in fds, the caller's, O_CLOEXEC
                         */
        int fds[DATAGRAM_FDS_MAX];
} Datagram;

/* Sends all of it or nothing. n_fds <= DATAGRAM_FDS_MAX. -EAGAIN, -EPIPE: the peer is gone; -errno. */
int datagram_send(int socket, const void *bytes, size_t size, const int *fds, size_t n_fds);
/* 1; 0: end of file; -EAGAIN; -errno. */
int datagram_receive(int socket, void *bytes, size_t size_max, Datagram *ret);
/* Closes its descriptors. */
void datagram_close(const Datagram *d);
