/* SPDX-License-Identifier: Apache-2.0 */

/* latentd: arguments, process settings, start and stop. */

#include <getopt.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <systemd/sd-bus.h>
#include <systemd/sd-daemon.h>
#include <systemd/sd-event.h>

#include "service/latentd/config.h"
#include "service/latentd/manager.h"
#include "service/latentd/private-socket.h"
#include "service/shared/cleanup.h"
#include "service/shared/fault.h"
#include "service/shared/log.h"
#include "service/shared/slice.h"

static bool arg_user, arg_system;
static const char *arg_bus_address, *arg_config;
static int arg_log_level = -1;

DEFINE_CLEANUP(Config *, config_free)
DEFINE_CLEANUP(FdStore *, fd_store_free)
DEFINE_CLEANUP(Manager *, manager_free)

static void help(void) {
        puts("latentd --user|--system [OPTION]...\n"
             "\n"
             "One sampler for the MiniMax H3 video model out of all the GPUs of this machine, on D-Bus.\n"
             "\n"
             "  --user                 serve the calling user on the user bus\n"
             "  --system               serve the users of latentd.conf on the system bus\n"
             "  --bus-address=ADDRESS  this bus instead\n"
             "  --config=FILE          read FILE and FILE.d/*.conf instead of the usual places\n"
             "  --log-level=LEVEL      error, warning, notice, info, debug; wins over LogLevel=\n"
             "  --help, --version\n"
             "\n"
             "SIGTERM and SIGINT stop the service, SIGHUP is ignored: a changed configuration takes a restart.");
}

/* 1: go on; 0: done; negative: a wrong command line. */
static int parse_arguments(int argc, char **argv) {
        enum { USER = 256, SYSTEM, BUS_ADDRESS, CONFIG, LOG_LEVEL, HELP, VERSION };
        static const struct option options[] = {
                { "user",        no_argument,       NULL, USER        },
                { "system",      no_argument,       NULL, SYSTEM      },
                { "bus-address", required_argument, NULL, BUS_ADDRESS },
                { "config",      required_argument, NULL, CONFIG      },
                { "log-level",   required_argument, NULL, LOG_LEVEL   },
                { "help",        no_argument,       NULL, HELP        },
                { "version",     no_argument,       NULL, VERSION     },
                {}
        };
        int c;

        while ((c = getopt_long(argc, argv, "h", options, NULL)) >= 0)
                switch (c) {
                case USER:
                        arg_user = true;
                        break;
                case SYSTEM:
                        arg_system = true;
                        break;
                case BUS_ADDRESS:
                        arg_bus_address = optarg;
                        break;
                case CONFIG:
                        arg_config = optarg;
                        break;
                case LOG_LEVEL:
                        if (log_level_from_string(optarg, &arg_log_level) < 0)
                                return log_error(-EINVAL, "--log-level=%s: error, warning, notice, info or debug was expected", optarg);
                        break;
                case HELP:
                case 'h':
                        help();
                        return 0;
                case VERSION:
                        puts("latentd " LATENTD_VERSION);
                        return 0;
                default:
                        return -EINVAL; /* getopt has said why */
                }

        if (optind < argc)
                return log_error(-EINVAL, "Argument \"%s\": none was expected", argv[optind]);

        if (arg_user == arg_system)
                return log_error(-EINVAL, "Exactly one of --user and --system was expected");

        return 1;
}

/* A descriptor for every file of the largest models, no core dump of other people's data, nothing that a child could gain. */
static int set_up_process(void) {
        struct rlimit files, none = {};

        (void) umask(077);

        if (setrlimit(RLIMIT_CORE, &none) < 0)
                return log_error(-errno, "Cannot switch core dumps off");

        if (getrlimit(RLIMIT_NOFILE, &files) >= 0) {
                files.rlim_cur = files.rlim_max;
                if (setrlimit(RLIMIT_NOFILE, &files) < 0)
                        (void) log_warning_errno(-errno, "Cannot raise the number of open files");
        }

        if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0)
                return log_error(-errno, "Cannot set no_new_privs");

        if (signal(SIGHUP, SIG_IGN) == SIG_ERR || signal(SIGPIPE, SIG_IGN) == SIG_ERR)
                return log_error(-errno, "Cannot ignore signals");

        return 0;
}

static int read_config(Config **ret) {
        CLEANUP(config_freep) Config *c = NULL;
        Fault f = {};
        int r;

        r = config_new(&c);
        if (r < 0)
                return log_error(r, "Cannot make the configuration");

        r = arg_config ? config_read(c, arg_config, false, &f) : config_read_default(c, arg_user, &f);
        if (r < 0 && f.name[0] != '\0')
                return log_error(0, "%s", f.text), r;
        if (r < 0)
                return log_error(r, "Cannot read the configuration");

        log_set_max_level(arg_log_level >= 0 ? arg_log_level : c->log_level);
        *ret = STEAL_PTR(c);
        return 0;
}

static int open_address(sd_bus **ret) {
        CLEANUP(sd_bus_flush_close_unrefp) sd_bus *bus = NULL;
        int r;

        r = sd_bus_new(&bus);
        if (r >= 0)
                r = sd_bus_set_address(bus, arg_bus_address);
        if (r >= 0)
                r = sd_bus_set_bus_client(bus, true);
        if (r >= 0)
                r = sd_bus_start(bus);
        if (r < 0)
                return r;

        *ret = STEAL_PTR(bus);
        return 0;
}

static int open_bus(sd_bus **ret) {
        const char *what = arg_bus_address ? arg_bus_address :
                arg_user                   ? "the user bus, which DBUS_SESSION_BUS_ADDRESS or XDG_RUNTIME_DIR names" :
                                             "the system bus";
        int r;

        r = arg_bus_address ? open_address(ret) : arg_user ? sd_bus_open_user(ret) : sd_bus_open_system(ret);
        if (r < 0)
                return log_error(r, "Cannot connect to %s", what);

        return 0;
}

static int on_signal(sd_event_source *s, const struct signalfd_siginfo *si, void *userdata) {
        manager_stop(userdata, EXIT_SUCCESS);
        return 0;
}

static int add_signals(Manager *m) {
        static const int signals[] = { SIGTERM, SIGINT };
        int r;

        for (size_t i = 0; i < ELEMENTSOF(signals); i++) {
                r = sd_event_add_signal(m->event, NULL, signals[i], on_signal, m);
                if (r < 0)
                        return log_error(r, "Cannot wait for signals");
        }

        r = sd_event_set_watchdog(m->event, true);
        if (r < 0)
                return log_error(r, "Cannot set up the watchdog");

        return 0;
}

/* SIGCHLD too: the worker's part waits for it. Before any thread is made, since threads inherit the mask. */
static int block_signals(void) {
        sigset_t mask;

        (void) sigemptyset(&mask);
        (void) sigaddset(&mask, SIGTERM);
        (void) sigaddset(&mask, SIGINT);
        (void) sigaddset(&mask, SIGCHLD);
        if (sigprocmask(SIG_BLOCK, &mask, NULL) < 0)
                return log_error(-errno, "Cannot block signals");

        return 0;
}

static int run(void) {
        CLEANUP(fd_store_freep) FdStore *fds = NULL;
        CLEANUP_CLOSE int activated = -EBADF;
        CLEANUP(config_freep) Config *config = NULL;
        CLEANUP(sd_bus_flush_close_unrefp) sd_bus *bus = NULL;
        CLEANUP(manager_freep) Manager *m = NULL;
        Fault f = {};
        int r;

        /* Before anything else opens a descriptor; the socket first, which is no part of the store. */
        activated = private_socket_take_activated();
        r = fd_store_new(&fds);
        if (r < 0)
                return log_error(r, "Cannot take over what the service manager kept");

        r = read_config(&config);
        if (r < 0)
                return r;

        r = set_up_process();
        if (r < 0)
                return r;

        r = block_signals();
        if (r < 0)
                return r;

        r = open_bus(&bus);
        if (r < 0)
                return r;

        r = manager_new(config, arg_user, fds, &m);
        if (r < 0)
                return log_error(r, "Cannot start");
        m->activated_fd = STEAL_FD(activated);
        config = NULL;

        r = add_signals(m);
        if (r < 0)
                return r;

        r = manager_connect(m, bus, &f);
        if (r < 0)
                return log_error(0, "%s", f.text), r;

        log_info("latentd " LATENTD_VERSION " serves %s", arg_user ? "its user" : "the users of the system");
        (void) slice_make_short(); /* the loop never runs long, and all wait for it */
        r = sd_event_loop(m->event);
        if (r < 0)
                return log_error(r, "The event loop failed");

        return r; /* the exit status */
}

int main(int argc, char **argv) {
        int r;

        log_open("latentd");

        r = parse_arguments(argc, argv);
        if (r <= 0)
                return r < 0 ? EXIT_FAILURE : EXIT_SUCCESS;

        r = run();
        if (r < 0)
                (void) sd_notifyf(0, "ERRNO=%i", -r);

        return r == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
