/* SPDX-License-Identifier: Apache-2.0 */
#include "service/latentd/private-socket.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <systemd/sd-daemon.h>

#include "service/latentd/descriptors.h"
#include "service/latentd/peer.h"
#include "service/latentd/private-guard.h"
#include "service/latentd/socket-path.h"
#include "service/shared/cleanup.h"
#include "service/shared/log.h"

#define CONNECTIONS_MAX 256
#define CONNECTIONS_PER_USER_MAX 32
#define STRANGERS_MAX 4 /* connections of users who may not use the service */
#define PATIENCE_USEC UINT64_C(10000000) /* to authenticate; a stranger's connection altogether */
#define UNREAD_MAX 1024                  /* messages that wait in our end of a connection */
#define START_MESSAGES_MAX 1024          /* more than the buffer of the authentication holds */
#define ACCEPTS_PER_SECOND 200
#define ACTIVATED_NAME "bus" /* FileDescriptorName= */

typedef struct Connection {
        PrivateSocket *socket;
        Guard *guard;
        sd_bus *bus;
        uid_t uid;
        bool stranger;
        sd_event_source *patience, *end;
        sd_event_source *start; /* takes in what was read with the end of the authentication */
        unsigned n_started;
        TAILQ_ENTRY(Connection) entry;
} Connection;

struct PrivateSocket {
        Manager *manager;
        PrivateSocketRegisterFn register_objects;
        int fd;
        SocketPath path; /* ours to remove; none: the service manager's */
        sd_event_source *io;
        TAILQ_HEAD(, Connection) connections;
};

DEFINE_CLEANUP(PrivateSocket *, private_socket_free)

static Peer *connection_peer(const Connection *c) {
        Peer *p;

        TAILQ_FOREACH(p, &c->socket->manager->peers, entry)
                if (p->bus == c->bus)
                        return p;

        return NULL; /* the service stops: all peers are gone already */
}

static Connection *connection_free(Connection *c) {
        Peer *p;

        if (!c)
                return NULL;

        p = connection_peer(c);
        if (p)
                peer_gone(p);
        TAILQ_REMOVE(&c->socket->connections, c, entry);
        sd_event_source_disable_unref(c->patience);
        sd_event_source_disable_unref(c->end);
        sd_event_source_disable_unref(c->start);
        if (c->bus) {
                sd_bus_detach_event(c->bus);
                sd_bus_close_unref(c->bus); /* not flush: who does not read would stop us */
        }
        (void) guard_free(c->guard);
        free(c);
        return NULL;
}

DEFINE_CLEANUP(Connection *, connection_free)

static int on_end(sd_event_source *s, void *userdata) {
        (void) connection_free(userdata);
        return 0;
}

/* Not now: a handler of this connection may be on the stack. */
static void connection_end(Connection *c) {
        int r;

        if (c->end)
                return;

        r = sd_event_add_defer(c->socket->manager->event, &c->end, on_end, c);
        if (r >= 0)
                r = sd_event_source_set_priority(c->end, SD_EVENT_PRIORITY_IMPORTANT);
        if (r < 0)
                log_warning_errno(r, "Cannot end a private connection");
}

static int on_patience(sd_event_source *s, uint64_t usec, void *userdata) {
        Connection *c = userdata;

        if (c->stranger || sd_bus_is_ready(c->bus) <= 0) {
                log_debug("A private connection of user %" PRIu32 " is dropped: %s", (uint32_t) c->uid,
                          c->stranger ? "the user may not use the service" : "it did not authenticate");
                (void) connection_free(c);
        }

        return 0;
}

/* What arrived in one piece with the last line of the authentication lies in sd-bus's buffer, and no event of the socket will tell: it is
 * processed from here, until nothing of it is left. */
static int on_start(sd_event_source *s, void *userdata) {
        Connection *c = userdata;

        if (c->end || ++c->n_started > START_MESSAGES_MAX || sd_bus_process(c->bus, NULL) <= 0)
                return 0;

        return sd_event_source_set_enabled(s, SD_EVENT_ONESHOT);
}

static int on_connected(sd_bus_message *message, void *userdata, sd_bus_error *error) {
        Connection *c = userdata;

        return c->start ? 0 : sd_event_add_defer(c->socket->manager->event, &c->start, on_start, c);
}

static int on_disconnected(sd_bus_message *message, void *userdata, sd_bus_error *error) {
        connection_end(userdata);
        return 0;
}

static void on_broken(void *userdata, const char *why) {
        Connection *c = userdata;

        log_notice("A private connection of user %" PRIu32 " is dropped: %s", (uint32_t) c->uid, why);
        connection_end(c);
}

/* It reads from the guard and writes to the client. */
static int open_bus(Connection *c, int fd_taken) {
        CLEANUP_CLOSE int fd = fd_taken, in = -EBADF;
        int r;

        r = guard_new(c->socket->manager->event, fd, c->uid, on_broken, c, &c->guard, &in);
        if (r < 0)
                return r;
        r = sd_bus_new(&c->bus);
        if (r < 0)
                return r;
        r = sd_bus_set_fd(c->bus, in, fd);
        if (r < 0)
                return r;

        /* From here on the descriptors are the bus's. */
        fd = in = -EBADF;
        return 0;
}

static int connection_start(Connection *c, int fd) {
        Manager *m = c->socket->manager;
        sd_id128_t id;
        Peer *p = NULL;
        int r;

        r = open_bus(c, fd);
        if (r >= 0)
                r = sd_id128_randomize(&id);
        if (r >= 0)
                r = sd_bus_set_server(c->bus, true, id);
        if (r >= 0)
                r = sd_bus_set_anonymous(c->bus, true); /* the guard asks for more */
        if (r >= 0)
                r = sd_bus_negotiate_fds(c->bus, true);
        if (r >= 0)
                r = sd_bus_set_connected_signal(c->bus, true);
        if (r >= 0)
                r = sd_bus_start(c->bus);
        if (r >= 0)
                r = c->socket->register_objects(m, c->bus);
        if (r >= 0)
                r = sd_bus_match_signal(c->bus, NULL, "org.freedesktop.DBus.Local", "/org/freedesktop/DBus/Local",
                                        "org.freedesktop.DBus.Local", "Connected", on_connected, c);
        if (r >= 0)
                r = sd_bus_match_signal(c->bus, NULL, "org.freedesktop.DBus.Local", "/org/freedesktop/DBus/Local",
                                        "org.freedesktop.DBus.Local", "Disconnected", on_disconnected, c);
        if (r >= 0)
                r = sd_bus_attach_event(c->bus, m->event, SD_EVENT_PRIORITY_NORMAL);
        if (r >= 0)
                r = peer_new_private(m, c->bus, c->uid, &p);
        if (r >= 0)
                r = sd_event_add_time_relative(m->event, &c->patience, CLOCK_MONOTONIC, PATIENCE_USEC, 0, on_patience, c);
        if (r < 0)
                return r;

        c->stranger = !p->listed;
        return 0;
}

static const char *too_many(const PrivateSocket *s, uid_t uid) {
        unsigned n = 0, of_user = 0, strangers = 0;
        const Connection *c;

        TAILQ_FOREACH(c, &s->connections, entry) {
                n++;
                of_user += c->uid == uid;
                strangers += c->stranger;
        }

        if (of_user >= CONNECTIONS_PER_USER_MAX)
                return "that user has too many";
        if (strangers >= STRANGERS_MAX)
                return "too many users who may not use the service are connected";

        return n >= CONNECTIONS_MAX ? "there are too many" : NULL;
}

static int connection_new(PrivateSocket *s, int fd, uid_t uid) {
        CLEANUP(connection_freep) Connection *c = NULL;
        int r;

        c = calloc(1, sizeof(*c));
        if (!c) {
                (void) close(fd);
                return -ENOMEM;
        }

        c->socket = s;
        c->uid = uid;
        TAILQ_INSERT_TAIL(&s->connections, c, entry);

        r = connection_start(c, fd);
        if (r < 0)
                return r;

        c = NULL; /* the list has it */
        return 0;
}

static int on_connect(sd_event_source *source, int listen_fd, uint32_t revents, void *userdata) {
        PrivateSocket *s = userdata;
        struct ucred who = {};
        socklen_t size = sizeof(who);
        const char *why;
        int fd, r;

        if (s->manager->stopping)
                return 0;

        fd = accept4(listen_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd < 0) {
                /* Out of descriptors or memory: the rate limit of this source keeps us from spinning. */
                if (errno != EAGAIN && errno != ECONNABORTED && errno != EINTR)
                        log_warning_errno(-errno, "Cannot take a private connection");
                return 0;
        }

        if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &who, &size) < 0 || size != sizeof(who)) {
                (void) close(fd);
                return 0;
        }

        why = descriptor_is_reserve(fd) ? "there are hardly any descriptors left" : too_many(s, who.uid);
        if (why) {
                log_debug("A private connection of user %" PRIu32 " is refused: %s", (uint32_t) who.uid, why);
                (void) close(fd);
                return 0;
        }

        r = connection_new(s, fd, who.uid);
        if (r < 0) /* most often its first bytes are no D-Bus */
                log_debug("A private connection of user %" PRIu32 " cannot be served: %s", (uint32_t) who.uid, strerror(-r));

        return 0;
}

static int listen_at(PrivateSocket *s, const char *path, Fault *f) {
        int r;

        s->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        if (s->fd < 0)
                return -errno;

        r = socket_path_bind(s->fd, path, &s->path, f);
        if (r < 0)
                return r;

        /* Who may do what is decided here, where refusals have a text; another user's service is nobody else's matter. */
        if (chmod(path, s->manager->user_mode ? 0600 : 0666) < 0 || listen(s->fd, SOMAXCONN) < 0)
                return -errno;

        return 0;
}

/* malloc'ed; NULL: there is no good place. */
static int default_path(bool user_mode, char **ret) {
        const char *runtime = getenv("XDG_RUNTIME_DIR");
        CLEANUP_FREE char *folder = NULL;
        char *path;

        if (!user_mode) {
                path = strdup("/run/latentd/bus");
                *ret = path;
                return path ? 0 : -ENOMEM;
        }

        *ret = NULL;
        if (!runtime || runtime[0] != '/')
                return 0;

        if (asprintf(&folder, "%s/latentd", runtime) < 0) {
                folder = NULL;
                return -ENOMEM;
        }
        if (mkdir(folder, 0700) < 0 && errno != EEXIST)
                return -errno;

        if (asprintf(&path, "%s/bus", folder) < 0)
                return -ENOMEM;

        *ret = path;
        return 0;
}

/* A listening socket that systemd made for us (latentd.socket) outlives a restart, with the connections that wait in it. */
int private_socket_take_activated(void) {
        char **names = NULL;
        int n, fd = -EBADF;

        n = sd_listen_fds_with_names(false, &names);
        for (int i = 0; i < n; i++)
                if (strcmp(names[i], ACTIVATED_NAME) == 0 &&
                    sd_is_socket_unix(SD_LISTEN_FDS_START + i, SOCK_STREAM, 1, NULL, 0) > 0)
                        fd = SD_LISTEN_FDS_START + i;

        for (int i = 0; names && names[i]; i++)
                free(names[i]);
        free(names);
        return fd < 0 ? fd : fcntl(fd, F_DUPFD_CLOEXEC, 3);
}

static int open_socket(PrivateSocket *s, bool *ret_wanted, Fault *f) {
        const char *configured = s->manager->config->private_socket;
        CLEANUP_FREE char *path = NULL;
        int r;

        *ret_wanted = true;
        if (configured && configured[0] != '\0')
                return listen_at(s, configured, f);

        *ret_wanted = !configured;
        if (configured)
                return 0;

        if (s->manager->activated_fd >= 0) {
                s->fd = STEAL_FD(s->manager->activated_fd);
                return fcntl(s->fd, F_SETFL, O_RDWR | O_NONBLOCK) < 0 ? -errno : 0;
        }

        r = default_path(s->manager->user_mode, &path);
        if (r < 0)
                return r;
        if (!path) {
                *ret_wanted = false;
                return 0;
        }

        return listen_at(s, path, f);
}

int private_socket_new(Manager *m, PrivateSocketRegisterFn register_objects, PrivateSocket **ret, Fault *f) {
        CLEANUP(private_socket_freep) PrivateSocket *s = NULL;
        const char *configured = m->config->private_socket;
        Fault why = {};
        bool wanted;
        int r;

        s = calloc(1, sizeof(*s));
        if (!s)
                return -ENOMEM;

        s->manager = m;
        s->register_objects = register_objects;
        s->fd = -EBADF;
        TAILQ_INIT(&s->connections);

        r = open_socket(s, &wanted, &why);
        if (r < 0) /* unless it has words of its own */
                (void) fault_set(&why, r, FAULT_IO, "%s", strerror(-r));
        if (r < 0 && configured)
                return fault_set(f, r, FAULT_IO, "PrivateSocket=%s: cannot listen there: %s.", configured, why.text);
        if (r < 0)
                log_notice("There is no private socket at its default place: %s", why.text);
        if (r < 0 || !wanted) {
                *ret = NULL;
                return 0;
        }

        r = sd_event_add_io(m->event, &s->io, s->fd, EPOLLIN, on_connect, s);
        if (r >= 0)
                r = sd_event_source_set_ratelimit(s->io, 1000000, ACCEPTS_PER_SECOND);
        if (r < 0)
                return r;

        *ret = STEAL_PTR(s);
        return 0;
}

PrivateSocket *private_socket_free(PrivateSocket *s) {
        Connection *c;

        if (!s)
                return NULL;

        while ((c = TAILQ_FIRST(&s->connections)))
                (void) connection_free(c);

        sd_event_source_disable_unref(s->io);
        socket_path_remove(&s->path);
        cleanup_closep(&s->fd);
        free(s);
        return NULL;
}

/* Whoever lets too many messages lie is dropped, soon. */
static void watch(Connection *c) {
        uint64_t unread;

        if (c->end || sd_bus_get_n_queued_write(c->bus, &unread) < 0 || unread <= UNREAD_MAX)
                return;

        log_notice("A private connection of user %" PRIu32 " is dropped: it does not read", (uint32_t) c->uid);
        connection_end(c);
}

sd_bus *private_socket_next(PrivateSocket *s, const sd_bus *previous) {
        Connection *c;
        bool here = !previous;

        if (!s)
                return NULL;

        TAILQ_FOREACH(c, &s->connections, entry) {
                if (here && !c->end && !c->stranger && sd_bus_is_ready(c->bus) > 0) {
                        watch(c);
                        if (!c->end)
                                return c->bus;
                }
                here = here || c->bus == previous;
        }

        return NULL;
}

void private_socket_watch(PrivateSocket *s, const sd_bus *bus) {
        Connection *c;

        if (!s)
                return;

        TAILQ_FOREACH(c, &s->connections, entry)
                if (c->bus == bus) {
                        watch(c);
                        return;
                }
}
