/* SPDX-License-Identifier: Apache-2.0 */
/* The worker program: takes over the socket that it was started with, shuts itself in, serves the broker
 * until that is gone. */

#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <pwd.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "service/shared/cleanup.h"
#include "service/shared/log.h"
#include "service/shared/slice.h"
#include "service/worker/reaper.h"
#include "service/worker/seccomp.h"
#include "service/worker/worker.h"

#define LISTEN_FD 3

static int help(const Backend *b) {
        printf("Usage: %s [OPTION]\n\n"
               "Runs sampling steps for latentd. It is started by latentd, or by systemd through\n"
               "latent-worker.socket, with a connected SOCK_SEQPACKET socket as descriptor 3 and\n"
               "LISTEN_FDS=1; it ends when that connection ends.\n\n"
               "  -h, --help     show this text\n"
               "      --version  show the version\n\n"
               "Environment: LATENT_LOG_LEVEL=error|warning|notice|info|debug (default info).\n",
                b->program);
        return 0;
}

/* 1: run; 0: done; -EINVAL. */
static int parse_arguments(const Backend *b, int argc, char **argv) {
        enum { ARG_VERSION = 0x100 };
        static const struct option options[] = {
                {"help", no_argument, NULL, 'h'},
                {"version", no_argument, NULL, ARG_VERSION},
                {},
        };

        for (;;) {
                int c = getopt_long(argc, argv, "h", options, NULL);

                switch (c) {
                case -1:
                        if (optind < argc) {
                                fprintf(stderr, "%s: unexpected argument \"%s\"; try --help.\n", b->program,
                                        argv[optind]);
                                return -EINVAL;
                        }
                        return 1;
                case 'h':
                        return help(b);
                case ARG_VERSION:
                        printf("%s %s\n", b->program, LATENTD_VERSION);
                        return 0;
                default:
                        return -EINVAL;
                }
        }
}

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
static int check_peer(int fd, Fault *f) {
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
                "SocketUser= of "
                "latent-worker.socket to the user that latentd runs as.",
                (unsigned long) peer.uid, (unsigned long) getuid());
}

static int take_socket(Fault *f) {
        struct sockaddr_storage peer;
        socklen_t n = sizeof(peer);
        int flags;

        if (!environment_gives_socket() || get_int_option(LISTEN_FD, SO_DOMAIN) != AF_UNIX ||
                get_int_option(LISTEN_FD, SO_TYPE) != SOCK_SEQPACKET ||
                getpeername(LISTEN_FD, (struct sockaddr *) &peer, &n) < 0)
                return fault_set(f, -ENOTCONN, FAULT_INVALID_ARGUMENT,
                        "This program is not started by hand: latentd starts it, or systemd through "
                        "latent-worker.socket "
                        "(Accept=yes). Expected a connected SOCK_SEQPACKET unix socket as descriptor %d and "
                        "LISTEN_FDS=1.",
                        LISTEN_FD);

        (void) unsetenv("LISTEN_FDS");
        (void) unsetenv("LISTEN_PID");
        (void) unsetenv("LISTEN_FDNAMES");

        flags = fcntl(LISTEN_FD, F_GETFL);
        if (flags < 0 || fcntl(LISTEN_FD, F_SETFL, flags | O_NONBLOCK) < 0 ||
                fcntl(LISTEN_FD, F_SETFD, FD_CLOEXEC) < 0)
                return fault_set(
                        f, -errno, FAULT_INTERNAL, "The socket cannot be set up: %s.", strerror(errno));

        return check_peer(LISTEN_FD, f);
}

/* Weights and users' data must reach neither a core file nor another process. */
static int shut_in(Fault *f) {
        const struct rlimit none = {};

        if (setrlimit(RLIMIT_CORE, &none) < 0 || prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) < 0 ||
                prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0)
                return fault_set(
                        f, -errno, FAULT_INTERNAL, "The process cannot be protected: %s.", strerror(errno));
        return 0;
}

static int filter_system_calls(const Backend *b, Fault *f) {
        int r;

        if (!seccomp_is_supported()) {
                log_debug("This build runs without a filter of system calls (sanitizer, or an architecture "
                          "without one).");
                return 0;
        }

        r = seccomp_apply(b->uses_driver);
        if (r == -EOPNOTSUPP) {
                log_warning(
                        "This kernel has no seccomp: the worker runs without its filter of system calls.");
                return 0;
        }
        if (r < 0)
                return fault_set(
                        f, r, FAULT_INTERNAL, "The filter of system calls cannot be set: %s.", strerror(-r));
        return 0;
}

static int serve(const Backend *b, Fault *f) {
        Fault why = {};
        int r, started;

        r = take_socket(f);
        if (r < 0)
                return r;

        /* Before: a driver's library looks at this process in /proc, which is shut then. */
        started = b->start ? b->start(&why) : 0;

        r = shut_in(f);
        if (r < 0)
                return r;

        (void) signal(SIGPIPE, SIG_IGN); /* stderr may be a pipe whose reader is gone */

        (void) slice_make_short(); /* this thread only passes on; ranks have their own */
        r = worker_start(b, LISTEN_FD, started < 0 ? &why : NULL, f);
        if (r < 0)
                return r;

        r = filter_system_calls(b, f);
        if (r < 0)
                return r;

        r = reaper_start(LISTEN_FD);
        if (r < 0)
                return fault_set(
                        f, r, FAULT_INTERNAL, "The reaper thread cannot be started: %s.", strerror(-r));

        return worker_run(f);
}

int main(int argc, char **argv) {
        const Backend *b;
        const char *level_name;
        Fault f = {};
        int r, level;

        b = backend_get(&f);
        if (!b) {
                fprintf(stderr, "%s: %s\n", program_invocation_short_name, f.text);
                return EXIT_FAILURE;
        }

        r = parse_arguments(b, argc, argv);
        if (r <= 0)
                return r < 0 ? EXIT_FAILURE : EXIT_SUCCESS;

        log_open(b->program);
        level_name = getenv("LATENT_LOG_LEVEL");
        if (level_name && log_level_from_string(level_name, &level) >= 0)
                log_set_max_level(level);

        r = serve(b, &f);
        if (r == 0) /* end of file, which the reaper sees too: one end for both */
                reaper_kill_process();

        (void) log_error(f.name[0] != '\0' ? 0 : r, "%s", f.name[0] != '\0' ? f.text : "The worker ends");
        /* Not exit(): rank threads may be in the middle of a step. */
        _exit(EXIT_FAILURE);
}
