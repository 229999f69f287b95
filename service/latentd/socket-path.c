/* SPDX-License-Identifier: Apache-2.0 */
#include "service/latentd/socket-path.h"

#include <errno.h>
#include <inttypes.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "service/shared/cleanup.h"

static const char *kind_of(mode_t mode) {
        switch (mode & S_IFMT) {

        case S_IFREG:
                return "a regular file";

        case S_IFDIR:
                return "a directory";

        case S_IFLNK:
                return "a symbolic link";

        case S_IFIFO:
                return "a FIFO";

        default:
                return "a device";
        }
}

/* 0: nobody listens there. */
static int probe(const struct sockaddr_un *sa, Fault *f) {
        CLEANUP_CLOSE int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        int r;

        if (fd < 0)
                return -errno;

        r = connect(fd, (const struct sockaddr *) sa, sizeof(*sa)) < 0 ? -errno : 0;
        if (r == -ECONNREFUSED)
                return 0;
        if (r >= 0 || r == -EAGAIN) /* EAGAIN: more wait already than it has room for */
                return fault_set(f, -EADDRINUSE, FAULT_IO, "another process listens there: end it, or choose another path");

        return fault_set(f, -EADDRINUSE, FAULT_IO,
                "whether somebody listens on the socket there cannot be seen (%s): remove it if it is of no use, or choose another path",
                strerror(-r));
}

/* Something has the name. 0: an abandoned socket of ours had it, and it is gone; all else stays. */
static int make_way(const struct sockaddr_un *sa, Fault *f) {
        struct stat before, now;
        int r;

        if (lstat(sa->sun_path, &before) < 0)
                return errno == ENOENT ? 0 : -errno;

        if (!S_ISSOCK(before.st_mode))
                return fault_set(f, -EADDRINUSE, FAULT_IO, "%s is there, which stays as it is: move it away, or choose another path",
                        kind_of(before.st_mode));
        if (before.st_uid != geteuid())
                return fault_set(f, -EADDRINUSE, FAULT_IO,
                        "a socket of user %" PRIu32 " is there, which stays as it is: remove it if it is of no use, or choose another path",
                        (uint32_t) before.st_uid);

        r = probe(sa, f);
        if (r < 0)
                return r;

        if (lstat(sa->sun_path, &now) < 0)
                return errno == ENOENT ? 0 : -errno;
        if (!S_ISSOCK(now.st_mode) || now.st_dev != before.st_dev || now.st_ino != before.st_ino)
                return fault_set(f, -EADDRINUSE, FAULT_IO, "somebody else takes that name at the same time: choose another path");

        return unlink(sa->sun_path) < 0 && errno != ENOENT ? -errno : 0;
}

int socket_path_bind(int fd, const char *path, SocketPath *ret, Fault *f) {
        struct sockaddr_un sa = { .sun_family = AF_UNIX };
        CLEANUP_FREE char *copy = NULL;
        struct stat st;
        int r;

        if (strlen(path) >= sizeof(sa.sun_path))
                return -ENAMETOOLONG;
        memcpy(sa.sun_path, path, strlen(path));
        copy = strdup(path);
        if (!copy)
                return -ENOMEM;

        if (bind(fd, (const struct sockaddr *) &sa, sizeof(sa)) < 0) {
                if (errno != EADDRINUSE)
                        return -errno;
                r = make_way(&sa, f);
                if (r < 0)
                        return r;
                if (bind(fd, (const struct sockaddr *) &sa, sizeof(sa)) < 0)
                        return -errno;
        }

        if (lstat(path, &st) < 0)
                return -errno;

        *ret = (SocketPath) { .path = STEAL_PTR(copy), .device = st.st_dev, .inode = st.st_ino };
        return 0;
}

void socket_path_remove(SocketPath *p) {
        struct stat st;

        if (p->path && lstat(p->path, &st) >= 0 && S_ISSOCK(st.st_mode) && st.st_dev == p->device && st.st_ino == p->inode)
                (void) unlink(p->path);
        free(p->path);
        *p = (SocketPath) {};
}
