/* SPDX-License-Identifier: Apache-2.0 */
/* The worker program: takes over the socket that it was started with, shuts itself in, serves the broker
 * until that is gone. */

#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "service/shared/clock.h"
#include "service/shared/listen.h"
#include "service/shared/log.h"
#include "service/shared/reaper.h"
#include "service/shared/slice.h"
#include "service/worker/seccomp.h"
#include "service/worker/timeline.h"
#include "service/worker/worker.h"

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
        uint64_t begin = clock_usec();
        Fault why = {};
        int r, started;

        r = listen_take_socket("latent-worker.socket", f);
        if (r < 0)
                return r;

        /* Before: a driver's library looks at this process in /proc, which is shut then. */
        started = b->start ? b->start(&why) : 0;
        if (b->start && started >= 0)
                log_info("The device was ready after %" PRIu64 " ms.", (clock_usec() - begin) / 1000);

        r = listen_shut_in(f);
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

        timeline_note("shut in");
        return worker_run(f);
}

int main(int argc, char **argv) {
        const Backend *b;
        Fault f = {};
        int r;

        timeline_begin();
        b = backend_get(&f);
        if (!b) {
                fprintf(stderr, "%s: %s\n", program_invocation_short_name, f.text);
                return EXIT_FAILURE;
        }

        r = parse_arguments(b, argc, argv);
        if (r <= 0)
                return r < 0 ? EXIT_FAILURE : EXIT_SUCCESS;

        log_open(b->program);
        log_set_level_from_environment();

        r = serve(b, &f);
        if (r == 0) /* end of file, which the reaper sees too: one end for both */
                reaper_kill_process();

        (void) log_error(f.name[0] != '\0' ? 0 : r, "%s", f.name[0] != '\0' ? f.text : "The worker ends");
        /* Not exit(): rank threads may be in the middle of a step. */
        _exit(EXIT_FAILURE);
}
