/* SPDX-License-Identifier: Apache-2.0 */
#include "client/liblatent/bus-choice.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "client/liblatent/error.h"
#include "service/shared/cleanup.h"

#ifndef LATENTD_LIBEXECDIR
#define LATENTD_LIBEXECDIR "/usr/local/libexec/latentd"
#endif

static int open_address(const char *address, sd_bus **ret) {
        CLEANUP(sd_bus_flush_close_unrefp) sd_bus *bus = NULL;
        int r;

        r = sd_bus_new(&bus);
        if (r < 0)
                return r;
        r = sd_bus_set_address(bus, address);
        if (r < 0)
                return r;
        r = sd_bus_set_bus_client(bus, true);
        if (r < 0)
                return r;
        r = sd_bus_start(bus);
        if (r < 0)
                return r;

        *ret = STEAL_PTR(bus);
        return 0;
}

static const char *bus_title(uint32_t kind) {
        switch (kind) {
        case LATENT_BUS_SYSTEM:
                return "system bus";
        case LATENT_BUS_USER:
                return "user bus";
        default:
                return "bus at this address";
        }
}

/* Whether a list of names that the bus driver's method gives holds the service. */
static int bus_lists(sd_bus *bus, const char *member) {
        CLEANUP(sd_bus_message_unrefp) sd_bus_message *reply = NULL;
        const char *name;
        int r;

        r = sd_bus_call_method(bus, "org.freedesktop.DBus", "/org/freedesktop/DBus", "org.freedesktop.DBus",
                member, NULL, &reply, NULL);
        if (r < 0)
                return r;
        r = sd_bus_message_enter_container(reply, 'a', "s");
        if (r < 0)
                return r;
        while ((r = sd_bus_message_read(reply, "s", &name)) > 0)
                if (strcmp(name, BUS_NAME) == 0)
                        return 1;

        return r;
}

static int bus_has_service(sd_bus *bus) {
        int r;

        r = bus_lists(bus, "ListNames");
        if (r != 0)
                return r;

        return bus_lists(bus, "ListActivatableNames");
}

/* 1: connected and the service is there; 0: connected, but it is not. */
static int bus_try(uint32_t kind, const char *address, sd_bus **ret) {
        CLEANUP(sd_bus_flush_close_unrefp) sd_bus *bus = NULL;
        int r;

        switch (kind) {
        case LATENT_BUS_SYSTEM:
                r = sd_bus_open_system_with_description(&bus, "liblatent");
                break;
        case LATENT_BUS_USER:
                r = sd_bus_open_user_with_description(&bus, "liblatent");
                break;
        default:
                r = open_address(address, &bus);
                break;
        }
        if (r < 0)
                return r;

        r = bus_has_service(bus);
        if (r <= 0)
                return r;

        *ret = STEAL_PTR(bus);
        return 1;
}

/* The queue of a listening socket may be full: that is waited for, too. */
static int connect_socket(const char *path, uint64_t usec) {
        struct timeval patience = {.tv_sec = (time_t) (usec / 1000000), .tv_usec = (suseconds_t) (usec % 1000000)};
        struct sockaddr_un sa = {.sun_family = AF_UNIX};
        CLEANUP_CLOSE int fd = -EBADF;
        size_t n = strlen(path);

        if (n >= sizeof(sa.sun_path))
                return -ENAMETOOLONG;
        memcpy(sa.sun_path, path, n);

        fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience)) < 0 ||
                connect(fd, (const struct sockaddr *) &sa, sizeof(sa)) < 0)
                return -errno;

        return STEAL_FD(fd);
}

/* Ping is answered by whatever speaks D-Bus there; who may do what is said to the calls behind it. */
static int open_peer(const char *path, uint64_t ping_usec, sd_bus **ret) {
        CLEANUP(sd_bus_flush_close_unrefp) sd_bus *bus = NULL;
        CLEANUP(sd_bus_message_unrefp) sd_bus_message *m = NULL;
        int fd, r;

        r = sd_bus_new(&bus);
        if (r < 0)
                return r;

        fd = connect_socket(path, ping_usec);
        if (fd < 0)
                return fd;
        r = sd_bus_set_fd(bus, fd, fd);
        if (r < 0) {
                (void) close(fd);
                return r;
        }

        r = sd_bus_negotiate_fds(bus, true);
        if (r >= 0)
                r = sd_bus_start(bus);
        if (r >= 0)
                r = sd_bus_message_new_method_call(bus, &m, NULL, "/", "org.freedesktop.DBus.Peer", "Ping");
        if (r >= 0)
                r = sd_bus_call(bus, m, ping_usec, NULL, NULL);
        if (r < 0)
                return r;

        *ret = STEAL_PTR(bus);
        return 0;
}

int bus_open_socket(uint32_t kind, const char *path, uint64_t ping_usec, sd_bus **ret, latent_error *e) {
        int r;

        if (kind != LATENT_BUS_AUTO)
                return error_set(e, -EINVAL, LATENT_ERROR_INVALID_ARGUMENT,
                        "A socket and a message bus are both given; expected one of them.");
        if (path[0] != '/')
                return error_set(e, -EINVAL, LATENT_ERROR_INVALID_ARGUMENT,
                        "The socket \"%s\" is no absolute path; expected one such as /run/latentd/bus.", path);

        r = open_peer(path, ping_usec, ret);
        if (r >= 0)
                return 0;
        if (r == -ENOMEM)
                return error_errno(e, r, "Connecting");
        if (r == -ENAMETOOLONG)
                return error_set(e, -EINVAL, LATENT_ERROR_INVALID_ARGUMENT,
                        "The path of the socket has %zu bytes; at most %zu are possible.", strlen(path),
                        sizeof(((struct sockaddr_un *) NULL)->sun_path) - 1);

        /* The service says nothing to whom it has no place for. */
        if (r == -ECONNRESET || r == -EPIPE || r == -ENOTCONN)
                return error_set(e, -ENOTCONN, LATENT_ERROR_NO_SERVICE,
                        "The service's socket %s was reached, and the connection closed before anything was said (%s). latentd takes at "
                        "most 32 connections of one user: does this user have as many? It also does so while it stops; its journal "
                        "says more.",
                        path, strerror(-r));

        return error_set(e, -ENOTCONN, LATENT_ERROR_NO_SERVICE,
                "The service's socket %s cannot be reached: %s. Is latentd running, and PrivateSocket= this path?", path,
                strerror(-r));
}

static const char *start_hint(uint32_t kind) {
        switch (kind) {
        case LATENT_BUS_SYSTEM:
                return "Start it: systemctl start latentd (and read: journalctl -u latentd).";
        case LATENT_BUS_USER:
                return "Start it: systemctl --user start latentd, or run " LATENTD_LIBEXECDIR "/latentd --user.";
        default:
                return "Start the service on this bus.";
        }
}

static int bus_choose_one(uint32_t kind, const char *address, sd_bus **ret, latent_error *e) {
        int r;

        r = bus_try(kind, address, ret);
        if (r > 0)
                return 0;
        if (r == 0)
                return error_set(e, -ENOTCONN, LATENT_ERROR_NO_SERVICE,
                        "The service %s is not on the %s and cannot be started there. %s", BUS_NAME,
                        bus_title(kind), start_hint(kind));
        if (r == -ENOMEM)
                return error_errno(e, r, "Connecting");
        if (r == -EINVAL && kind == LATENT_BUS_ADDRESS)
                return error_set(e, -EINVAL, LATENT_ERROR_INVALID_ARGUMENT,
                        "\"%s\" is no D-Bus address; expected one such as unix:path=/run/user/1000/bus.",
                        address);

        return error_set(e, -ENOTCONN, LATENT_ERROR_NO_SERVICE, "The %s cannot be reached: %s.%s",
                bus_title(kind), strerror(-r),
                kind == LATENT_BUS_USER ? " Is DBUS_SESSION_BUS_ADDRESS or XDG_RUNTIME_DIR set?" : "");
}

int bus_choose(uint32_t kind, const char *address, sd_bus **ret, latent_error *e) {
        latent_error system, user;
        int r;

        if (kind > LATENT_BUS_ADDRESS)
                return error_set(e, -EINVAL, LATENT_ERROR_INVALID_ARGUMENT,
                        "Unknown bus %u; expected LATENT_BUS_*.", kind);
        if (kind == LATENT_BUS_ADDRESS && (!address || address[0] == '\0'))
                return error_set(
                        e, -EINVAL, LATENT_ERROR_INVALID_ARGUMENT, "LATENT_BUS_ADDRESS needs an address.");
        if (kind != LATENT_BUS_AUTO)
                return bus_choose_one(kind, address, ret, e);

        r = bus_choose_one(LATENT_BUS_SYSTEM, NULL, ret, &system);
        if (r != -ENOTCONN) {
                if (r < 0 && e)
                        *e = system;
                return r;
        }
        r = bus_choose_one(LATENT_BUS_USER, NULL, ret, &user);
        if (r == -ENOTCONN)
                return error_set(e, r, LATENT_ERROR_NO_SERVICE, "%s %s", system.text, user.text);
        if (r < 0 && e)
                *e = user;
        return r;
}
