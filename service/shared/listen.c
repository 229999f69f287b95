/* SPDX-License-Identifier: Apache-2.0 */
#include "service/shared/listen.h"

#include <errno.h>
#include <fcntl.h>
#include <pwd.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

/* What systemd sets for a started service; a program that spawns us can leave LISTEN_PID out. */
static bool environment_gives_socket(void) {
        const char *n = getenv("LISTEN_FDS"), *pid = getenv("LISTEN_PID");
        char *end;

        if (!n || strcmp(n, "1") != 0)
                return false;
        return !pid || (strtol(pid, &end, 10) == (long) getpid() && end != pid && *end == '\0');
}

static int get_int_option(int fd, int option) {
        socklen_t n = sizeof(int);
        int value;

        if (getsockopt(fd, SOL_SOCKET, option, &value, &n) < 0 || n != sizeof(value))
                return -1;
        return value;
}

/* Root, our own user (a broker that spawned us) or the service's: who else holds the other end is no broker.
 */
static int check_peer(int fd, const char *unit, Fault *f) {
        struct ucred peer;
        socklen_t n = sizeof(peer);
        const struct passwd *user;

        if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &n) < 0 || n != sizeof(peer))
                return fault_set(f, -errno, FAULT_INTERNAL, "The broker's user cannot be asked: %s.",
                        strerror(errno));

        if (peer.uid == 0 || peer.uid == getuid())
                return 0;

        user = getpwnam("latentd");
        if (user && user->pw_uid == peer.uid)
                return 0;

        return fault_set(f, -EACCES, FAULT_ACCESS_DENIED,
                "The connection comes from uid %lu, expected root, uid %lu or the user latentd: set "
                "SocketUser= of %s to the user that latentd runs as.",
                (unsigned long) peer.uid, (unsigned long) getuid(), unit);
}

int listen_take_socket(const char *unit, Fault *f) {
        struct sockaddr_storage peer;
        socklen_t n = sizeof(peer);
        int flags;

        if (!environment_gives_socket() || get_int_option(LISTEN_FD, SO_DOMAIN) != AF_UNIX ||
                get_int_option(LISTEN_FD, SO_TYPE) != SOCK_SEQPACKET ||
                getpeername(LISTEN_FD, (struct sockaddr *) &peer, &n) < 0)
                return fault_set(f, -ENOTCONN, FAULT_INVALID_ARGUMENT,
                        "This program is not started by hand: latentd starts it, or systemd through "
                        "%s "
                        "(Accept=yes). Expected a connected SOCK_SEQPACKET unix socket as descriptor %d and "
                        "LISTEN_FDS=1.",
                        unit, LISTEN_FD);

        (void) unsetenv("LISTEN_FDS");
        (void) unsetenv("LISTEN_PID");
        (void) unsetenv("LISTEN_FDNAMES");

        flags = fcntl(LISTEN_FD, F_GETFL);
        if (flags < 0 || fcntl(LISTEN_FD, F_SETFL, flags | O_NONBLOCK) < 0 ||
                fcntl(LISTEN_FD, F_SETFD, FD_CLOEXEC) < 0)
                return fault_set(
                        f, -errno, FAULT_INTERNAL, "The socket cannot be set up: %s.", strerror(errno));

        return check_peer(LISTEN_FD, unit, f);
}

/* Weights and users' data must reach neither a core file nor another process. */
int listen_shut_in(Fault *f) {
        const struct rlimit none = {};

        if (setrlimit(RLIMIT_CORE, &none) < 0 || prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) < 0 ||
                prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0)
                return fault_set(
                        f, -errno, FAULT_INTERNAL, "The process cannot be protected: %s.", strerror(errno));
        return 0;
}
