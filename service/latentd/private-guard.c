/* SPDX-License-Identifier: Apache-2.0 */
#include "service/latentd/private-guard.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include "service/shared/cleanup.h"

#define CHUNK_MAX 65536u
#define LINE_MAX_BYTES 512u /* of the authentication */
#define HEADER_BYTES 16u    /* the fixed part, which says how long the rest is */

typedef enum Stage {
        STAGE_NUL, /* the byte before the authentication */
        STAGE_AUTH,
        STAGE_HEADER,
        STAGE_BODY,
        STAGE_END,
} Stage;

struct Guard {
        int in, out; /* a duplicate of the client's; our end of what sd-bus reads */
        sd_event_source *in_source, *out_source;
        GuardBroken broken;
        void *userdata;

        Stage stage;
        char own[32]; /* the client's uid as AUTH EXTERNAL has it */
        char line[LINE_MAX_BYTES];
        size_t n_line;
        bool authenticated;
        uint8_t header[HEADER_BYTES];
        size_t n_header;
        uint32_t left;  /* of the message */
        unsigned n_fds; /* that came with it so far */

        /* What sd-bus has not taken yet. */
        uint8_t *rest;
        size_t n_rest;
        int fds[GUARD_FDS_MAX];
        unsigned n_pending_fds;
};

/* Loop thread only. What is passed on may be longer than what came: by a line that came in parts before, and where "CANCEL" takes the place
 * of "DATA". */
static uint8_t chunk[CHUNK_MAX], passed[2 * CHUNK_MAX + LINE_MAX_BYTES];

DEFINE_CLEANUP(Guard *, guard_free)

static void break_off(Guard *g, const char *why) {
        if (g->stage == STAGE_END)
                return;

        g->stage = STAGE_END;
        (void) sd_event_source_set_enabled(g->in_source, SD_EVENT_OFF);
        (void) sd_event_source_set_enabled(g->out_source, SD_EVENT_OFF);
        g->broken(g->userdata, why);
}

/* ---- what may pass ---- */

static bool is_word(const Guard *g, const char *word) {
        size_t n = strlen(word);

        return g->n_line >= n && memcmp(g->line, word, n) == 0 && (g->n_line == n || g->line[n] == ' ');
}

/* Nothing, or the client's own uid. */
static bool is_own(const Guard *g, size_t at) {
        while (at < g->n_line && g->line[at] == ' ')
                at++;

        return at == g->n_line || (g->n_line - at == strlen(g->own) && memcmp(g->line + at, g->own, g->n_line - at) == 0);
}

static void set_line(Guard *g, const char *text) {
        g->n_line = strlen(text);
        memcpy(g->line, text, g->n_line);
}

/* sd-bus cannot see the client's credentials behind us and takes everybody's word: only what is true comes to it, and so its view of
 * where the messages begin is ours. */
static const char *check_line(Guard *g) {
        if (is_word(g, "AUTH EXTERNAL")) {
                g->authenticated = is_own(g, strlen("AUTH EXTERNAL"));
                if (!g->authenticated)
                        set_line(g, "CANCEL");
        } else if (is_word(g, "AUTH ANONYMOUS"))
                set_line(g, "AUTH");
        else if (is_word(g, "DATA")) {
                g->authenticated = g->authenticated && is_own(g, strlen("DATA"));
                if (!g->authenticated)
                        set_line(g, "CANCEL");
        } else if (is_word(g, "CANCEL") || is_word(g, "ERROR"))
                g->authenticated = false;
        else if (is_word(g, "BEGIN")) {
                if (g->n_line != strlen("BEGIN") || !g->authenticated)
                        return "it begins without authentication";
                g->stage = STAGE_HEADER;
        }

        return NULL;
}

/* Takes one byte of the authentication; a whole line is appended to `passed`. */
static const char *take_line_byte(Guard *g, uint8_t byte, size_t *n_passed) {
        const char *why;

        if (g->n_line > 0 && g->line[g->n_line - 1] == '\r' && byte == '\n') {
                g->n_line--;
                why = check_line(g);
                if (why)
                        return why;
                memcpy(passed + *n_passed, g->line, g->n_line);
                memcpy(passed + *n_passed + g->n_line, "\r\n", 2);
                *n_passed += g->n_line + 2;
                g->n_line = 0;
                return NULL;
        }

        if (g->n_line == sizeof(g->line) - 2)
                return "a line of its authentication is too long";
        g->line[g->n_line++] = (char) byte;
        return NULL;
}

static uint32_t header_u32(const Guard *g, size_t at) {
        const uint8_t *p = g->header + at;

        return g->header[0] == 'l' ? (uint32_t) p[0] | (uint32_t) p[1] << 8 | (uint32_t) p[2] << 16 | (uint32_t) p[3] << 24
                                   : (uint32_t) p[3] | (uint32_t) p[2] << 8 | (uint32_t) p[1] << 16 | (uint32_t) p[0] << 24;
}

static const char *check_header(Guard *g) {
        uint64_t body, fields;

        if (g->header[0] != 'l' && g->header[0] != 'B')
                return "what it sends is no D-Bus message";

        body = header_u32(g, 4);
        fields = ((uint64_t) header_u32(g, 12) + 7) / 8 * 8;
        if (HEADER_BYTES + fields + body > GUARD_MESSAGE_MAX)
                return "it announces a message of more than 1 MiB";

        g->n_header = 0;
        g->left = (uint32_t) (fields + body);
        g->stage = STAGE_BODY;
        return NULL;
}

/* Looks at n bytes of `chunk`, and appends what may pass to `passed`. Returns why not. */
static const char *look(Guard *g, size_t n, size_t *ret_passed) {
        const char *why = NULL;
        size_t at = 0, k;

        *ret_passed = 0;
        while (!why && at < n) {
                switch (g->stage) {
                case STAGE_NUL:
                        if (chunk[at] != 0)
                                return "it does not begin as D-Bus does";
                        passed[(*ret_passed)++] = chunk[at++];
                        g->stage = STAGE_AUTH;
                        break;
                case STAGE_AUTH:
                        why = take_line_byte(g, chunk[at++], ret_passed);
                        break;
                case STAGE_HEADER:
                        g->header[g->n_header++] = passed[(*ret_passed)++] = chunk[at++];
                        if (g->n_header == HEADER_BYTES)
                                why = check_header(g);
                        break;
                case STAGE_BODY:
                        k = n - at < g->left ? n - at : g->left;
                        memcpy(passed + *ret_passed, chunk + at, k);
                        *ret_passed += k;
                        at += k;
                        g->left -= (uint32_t) k;
                        break;
                case STAGE_END:
                        return NULL;
                }
                if (g->stage == STAGE_BODY && g->left == 0) {
                        g->stage = STAGE_HEADER;
                        g->n_fds = 0;
                }
        }

        return why;
}

/* ---- in and out ---- */

static void close_fds(Guard *g) {
        while (g->n_pending_fds > 0)
                (void) close(g->fds[--g->n_pending_fds]);
}

/* Bytes that went; the descriptors go with the first. */
static ssize_t send_some(Guard *g, const uint8_t *bytes, size_t n) {
        union {
                struct cmsghdr header;
                char space[CMSG_SPACE(GUARD_FDS_MAX * sizeof(int))];
        } control = {};
        struct iovec iov = {.iov_base = (void *) bytes, .iov_len = n};
        struct msghdr m = {.msg_iov = &iov, .msg_iovlen = 1};
        ssize_t sent;

        if (g->n_pending_fds > 0) {
                m.msg_control = &control;
                m.msg_controllen = CMSG_SPACE(g->n_pending_fds * sizeof(int));
                control.header.cmsg_level = SOL_SOCKET;
                control.header.cmsg_type = SCM_RIGHTS;
                control.header.cmsg_len = CMSG_LEN(g->n_pending_fds * sizeof(int));
                memcpy(CMSG_DATA(&control.header), g->fds, g->n_pending_fds * sizeof(int));
        }

        sent = sendmsg(g->out, &m, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent < 0)
                return errno == EAGAIN || errno == EINTR ? 0 : -errno;
        if (sent > 0)
                close_fds(g);
        return sent;
}

/* Passes on what can go now; the rest is kept, and nothing more is read meanwhile. */
static int pass(Guard *g, const uint8_t *bytes, size_t n) {
        size_t done = 0;
        uint8_t *rest = NULL;

        while (done < n) {
                ssize_t k = send_some(g, bytes + done, n - done);

                if (k < 0)
                        return (int) k;
                if (k == 0)
                        break;
                done += (size_t) k;
        }

        if (done < n) {
                rest = malloc(n - done);
                if (!rest)
                        return -ENOMEM;
                memcpy(rest, bytes + done, n - done);
        }
        free(g->rest);
        g->rest = rest;
        g->n_rest = n - done;

        (void) sd_event_source_set_enabled(g->out_source, rest ? SD_EVENT_ON : SD_EVENT_OFF);
        (void) sd_event_source_set_enabled(g->in_source, rest ? SD_EVENT_OFF : SD_EVENT_ON);
        return 0;
}

/* Which it does not have to be given more of. */
static const char *take_fds(Guard *g, struct msghdr *m) {
        const char *why = m->msg_flags & MSG_CTRUNC ? "it sends too many descriptors" : NULL;

        for (struct cmsghdr *c = CMSG_FIRSTHDR(m); c; c = CMSG_NXTHDR(m, c)) {
                size_t n = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
                const unsigned char *data = CMSG_DATA(c);

                if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
                        continue;
                for (size_t i = 0; i < n; i++) {
                        int fd;

                        memcpy(&fd, data + i * sizeof(int), sizeof(int));
                        if (++g->n_fds > GUARD_FDS_MAX || g->n_pending_fds == GUARD_FDS_MAX) {
                                why = "it sends too many descriptors";
                                (void) close(fd);
                        } else
                                g->fds[g->n_pending_fds++] = fd;
                }
        }

        return why;
}

static int on_in(sd_event_source *s, int fd, uint32_t revents, void *userdata) {
        union {
                struct cmsghdr header;
                char space[CMSG_SPACE(GUARD_FDS_MAX * sizeof(int))];
        } control;
        struct iovec iov = {.iov_base = chunk, .iov_len = sizeof(chunk)};
        struct msghdr m = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control)};
        Guard *g = userdata;
        size_t n_passed;
        const char *why;
        ssize_t n;

        n = recvmsg(g->in, &m, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
        if (n < 0 && (errno == EAGAIN || errno == EINTR))
                return 0;
        if (n <= 0) { /* sd-bus takes it from here */
                (void) shutdown(g->out, SHUT_WR);
                return sd_event_source_set_enabled(g->in_source, SD_EVENT_OFF);
        }

        why = take_fds(g, &m);
        if (!why)
                why = look(g, (size_t) n, &n_passed);
        if (why)
                break_off(g, why);
        else if (n_passed > 0 && pass(g, passed, n_passed) < 0)
                break_off(g, "it cannot be passed on");
        return 0;
}

static int on_out(sd_event_source *s, int fd, uint32_t revents, void *userdata) {
        CLEANUP_FREE uint8_t *rest = NULL;
        Guard *g = userdata;
        size_t n = g->n_rest;

        rest = STEAL_PTR(g->rest);
        if (pass(g, rest, n) < 0)
                break_off(g, "it cannot be passed on");
        return 0;
}

static int open_pair(Guard *g, int fd, int *ret_fd) {
        int pair[2];

        g->in = fcntl(fd, F_DUPFD_CLOEXEC, 3);
        if (g->in < 0)
                return -errno;
        if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) < 0)
                return -errno;

        g->out = pair[0];
        *ret_fd = pair[1];
        return 0;
}

int guard_new(sd_event *event, int fd, uid_t uid, GuardBroken broken, void *userdata, Guard **ret, int *ret_fd) {
        CLEANUP(guard_freep) Guard *g = NULL;
        CLEANUP_CLOSE int other = -EBADF;
        char text[16];
        int r;

        g = calloc(1, sizeof(*g));
        if (!g)
                return -ENOMEM;

        g->in = g->out = -EBADF;
        g->broken = broken;
        g->userdata = userdata;
        (void) snprintf(text, sizeof(text), "%" PRIu32, (uint32_t) uid);
        for (size_t i = 0; text[i]; i++) { /* digits are 30 to 39 */
                g->own[2 * i] = '3';
                g->own[2 * i + 1] = text[i];
        }

        r = open_pair(g, fd, &other);
        if (r < 0)
                return r;
        r = sd_event_add_io(event, &g->in_source, g->in, EPOLLIN, on_in, g);
        if (r >= 0)
                r = sd_event_add_io(event, &g->out_source, g->out, EPOLLOUT, on_out, g);
        if (r >= 0)
                r = sd_event_source_set_enabled(g->out_source, SD_EVENT_OFF);
        if (r < 0)
                return r;

        *ret = STEAL_PTR(g);
        *ret_fd = STEAL_FD(other);
        return 0;
}

Guard *guard_free(Guard *g) {
        if (!g)
                return NULL;

        (void) sd_event_source_disable_unref(g->in_source);
        (void) sd_event_source_disable_unref(g->out_source);
        close_fds(g);
        cleanup_closep(&g->in);
        cleanup_closep(&g->out);
        free(g->rest);
        free(g);
        return NULL;
}
