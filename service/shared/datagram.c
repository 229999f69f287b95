/* SPDX-License-Identifier: Apache-2.0 */
#include "service/shared/datagram.h"

#include <errno.h>
#include <stdbool.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

int datagram_send(int socket, const void *bytes, size_t size, const int *fds, size_t n_fds) {
        union {
                char bytes[CMSG_SPACE(sizeof(int) * DATAGRAM_FDS_MAX)];
                struct cmsghdr align;
        } control = {};
        struct iovec iov = {.iov_base = (void *) bytes, .iov_len = size};
        struct msghdr h = {.msg_iov = &iov, .msg_iovlen = 1};
        ssize_t n;

        if (n_fds > DATAGRAM_FDS_MAX)
                return -EINVAL;

        if (n_fds > 0) {
                struct cmsghdr *c;

                h.msg_control = control.bytes;
                h.msg_controllen = CMSG_SPACE(sizeof(int) * n_fds);
                c = CMSG_FIRSTHDR(&h);
                c->cmsg_level = SOL_SOCKET;
                c->cmsg_type = SCM_RIGHTS;
                c->cmsg_len = CMSG_LEN(sizeof(int) * n_fds);
                memcpy(CMSG_DATA(c), fds, sizeof(int) * n_fds);
        }

        do
                n = sendmsg(socket, &h, MSG_DONTWAIT | MSG_NOSIGNAL);
        while (n < 0 && errno == EINTR);

        if (n < 0) {
                if (errno == EAGAIN || errno == EWOULDBLOCK)
                        return -EAGAIN;
                if (errno == ECONNRESET)
                        return -EPIPE;
                return -errno;
        }

        return n == (ssize_t) size ? 0 : -EIO; /* SEQPACKET: all or nothing */
}

static void collect_fds(struct msghdr *h, Datagram *d) {
        for (struct cmsghdr *c = CMSG_FIRSTHDR(h); c; c = CMSG_NXTHDR(h, c)) {
                size_t bytes;

                if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
                        continue;

                bytes = c->cmsg_len - CMSG_LEN(0);
                for (size_t at = 0; at + sizeof(int) <= bytes; at += sizeof(int)) {
                        int fd;

                        memcpy(&fd, CMSG_DATA(c) + at, sizeof(fd));
                        if (d->n_fds < DATAGRAM_FDS_MAX)
                                d->fds[d->n_fds] = fd;
                        else
                                (void) close(fd);
                        d->n_fds++;
                }
        }
}

int datagram_receive(int socket, void *bytes, size_t size_max, Datagram *ret) {
        union {
                char bytes[CMSG_SPACE(sizeof(int) * DATAGRAM_FDS_MAX)];
                struct cmsghdr align;
        } control;
        struct iovec iov = {.iov_base = bytes, .iov_len = size_max};
        struct msghdr h = {
                .msg_iov = &iov,
                .msg_iovlen = 1,
                .msg_control = control.bytes,
                .msg_controllen = sizeof(control.bytes),
        };
        Datagram d = {};
        bool reset = false;
        ssize_t n;

        for (;;) {
                n = recvmsg(socket, &h, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
                if (n >= 0)
                        break;
                if (errno == EINTR)
                        continue;
                if (errno == ECONNRESET && !reset) {
                        /* The peer died with unread messages of ours. The kernel says so once, before it
                         * gives out what the peer had sent: those messages count. */
                        reset = true;
                        continue;
                }
                return errno == EWOULDBLOCK ? -EAGAIN : -errno;
        }

        d.size = (size_t) n;
        d.flags = h.msg_flags;
        collect_fds(&h, &d);
        if (n == 0 && d.n_fds == 0)
                return 0;
        *ret = d;
        return 1;
}

void datagram_close(const Datagram *d) {
        for (unsigned i = 0; i < d->n_fds && i < DATAGRAM_FDS_MAX; i++)
                (void) close(d->fds[i]);
}
