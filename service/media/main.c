/* SPDX-License-Identifier: Apache-2.0 */
/* latent-media: takes over the socket that it was started with, says HELLO, serves one request, ends. */

#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "service/media/codecs.h"
#include "service/media/decode.h"
#include "service/media/encode.h"
#include "service/media/libraries.h"
#include "service/media/sandbox.h"
#include "service/media/sheet.h"
#include "service/shared/listen.h"
#include "service/shared/log.h"
#include "service/shared/memfd.h"
#include "service/shared/reaper.h"
#include "service/shared/slice.h"

static int help(void) {
        printf("Usage: latent-media [OPTION]\n\n"
               "Reads and writes pictures, films and sound for latentd. It is started by latentd, or by "
               "systemd\n"
               "through latent-media.socket, with a connected SOCK_SEQPACKET socket as descriptor 3 and\n"
               "LISTEN_FDS=1; it serves one request.\n\n"
               "  -h, --help     show this text\n"
               "      --version  show the version, the libraries and the formats that are written here\n\n"
               "Environment: LATENT_LOG_LEVEL=error|warning|notice|info|debug (default info).\n");
        return 0;
}

static int version(void) {
        char text[256];

        printf("latent-media %s\n", LATENTD_VERSION);
        libraries_describe(text, sizeof(text));
        printf("%s\n", text);
        codecs_describe(text, sizeof(text));
        printf("%s\n", text);
        return 0;
}

/* 1: run; 0: done; -EINVAL. */
static int parse_arguments(int argc, char **argv) {
        enum { ARG_VERSION = 0x100 };
        static const struct option options[] = {
                {"help", no_argument, NULL, 'h'},
                {"version", no_argument, NULL, ARG_VERSION},
                {},
        };

        for (;;) {
                switch (getopt_long(argc, argv, "h", options, NULL)) {
                case -1:
                        if (optind < argc) {
                                fprintf(stderr, "latent-media: unexpected argument \"%s\"; try --help.\n",
                                        argv[optind]);
                                return -EINVAL;
                        }
                        return 1;
                case 'h':
                        return help();
                case ARG_VERSION:
                        return version();
                default:
                        return -EINVAL;
                }
        }
}

typedef struct Request {
        MediaMessage message;
        int fds[MEDIA_FDS_MAX];
        uint8_t *arena; /* all of it; NULL for PROBE */
        uint64_t arena_size;
} Request;

static int say_hello(Channel *c) {
        MediaMessage m;

        (void) media_init(&m, MEDIA_HELLO);
        (void) snprintf(m.hello.build_id, sizeof(m.hello.build_id), "%s", LATENTD_VERSION);
        libraries_describe(m.hello.libraries, sizeof(m.hello.libraries));
        codecs_describe(m.hello.formats, sizeof(m.hello.formats));
        m.hello.pid = (int32_t) getpid();
        return channel_answer(c, &m);
}

/* 1: a request; 0: the other side went away without one. */
static int receive_request(int socket, Request *q, Fault *f) {
        for (;;) {
                struct pollfd p = {.fd = socket, .events = POLLIN};
                int r;

                r = media_receive(socket, &q->message, q->fds, f);
                if (r != -EAGAIN) {
                        if (r > 0 && q->message.header.type != MEDIA_READ &&
                                q->message.header.type != MEDIA_WRITE)
                                return fault_set(f, -EPROTO, FAULT_INTERNAL, "%s came instead of a request.",
                                        media_type_name(q->message.header.type));
                        return r;
                }
                if (poll(&p, 1, -1) < 0 && errno != EINTR)
                        return fault_set(f, -errno, FAULT_INTERNAL, "poll() failed: %s.", strerror(errno));
        }
}

static int map_arena(Request *q, Fault *f) {
        bool write = q->message.header.type == MEDIA_WRITE;
        struct stat st;
        void *p;
        int r;

        if (q->fds[1] < 0)
                return 0;
        r = fstat(q->fds[1], &st) < 0 ? -errno : memfd_check(q->fds[1], (uint64_t) st.st_size);
        if (r >= 0)
                r = memfd_map(
                        q->fds[1], (uint64_t) st.st_size, write ? PROT_READ : PROT_READ | PROT_WRITE, &p);
        if (r < 0)
                return fault_set(
                        f, r, FAULT_INVALID_ARGUMENT, "The arena cannot be used: %s.", strerror(-r));
        q->arena = p;
        q->arena_size = (uint64_t) st.st_size;
        return 0;
}

static int serve_request(Request *q, Channel *c, MediaDone *ret, Fault *f) {
        bool write = q->message.header.type == MEDIA_WRITE;
        int r;

        r = map_arena(q, f);
        if (r < 0)
                return r;
        r = write ? encode_check(&q->message.write, q->arena_size, f)
                  : decode_check(&q->message.read, q->arena_size, f);
        if (r < 0)
                return r;
        r = sandbox_enter(write, f);
        if (r < 0)
                return r;
        r = reaper_start(LISTEN_FD);
        if (r < 0)
                return fault_set(
                        f, r, FAULT_INTERNAL, "The reaper thread cannot be started: %s.", strerror(-r));

        if (!write)
                return decode_run(&q->message.read, q->fds[0],
                        q->arena ? q->arena + q->message.read.offset : NULL, c, ret, f);

        c->frames = q->message.write.frames;
        c->ring_frames = q->message.write.ring_frames;
        c->with_sound = q->message.write.samples > 0;
        return q->message.write.sheet_columns > 0 ? sheet_run(&q->message.write, q->fds[0], q->arena, c, ret, f)
                                                  : encode_run(&q->message.write, q->fds[0], q->arena, c, ret, f);
}

static int serve(Fault *f) {
        Channel c = {.socket = LISTEN_FD};
        Fault fault = {};
        MediaMessage m;
        Request q = {};
        int r;

        r = listen_take_socket("latent-media.socket", f);
        if (r < 0)
                return r;
        r = listen_shut_in(f);
        if (r < 0)
                return r;
        (void) syscall(SYS_close_range, LISTEN_FD + 1, ~0u, 0);
        (void) signal(SIGPIPE, SIG_IGN);
        (void) slice_make_long(); /* of the codecs' threads too: a worker beside them gives work to devices that wait for it */
        libraries_init();

        r = say_hello(&c);
        if (r < 0)
                return r == -EPIPE
                               ? 0
                               : fault_set(f, r, FAULT_INTERNAL, "HELLO cannot be sent: %s.", strerror(-r));
        r = receive_request(LISTEN_FD, &q, f);
        if (r <= 0)
                return r;

        (void) media_init(&m, MEDIA_DONE);
        r = serve_request(&q, &c, &m.done, &fault);
        if (r < 0) {
                if (fault.name[0] == '\0')
                        (void) fault_set(&fault, r, FAULT_INTERNAL, "%s.", strerror(-r));
                log_debug("%s: %s", fault.name, fault.text);
                (void) media_init(&m, MEDIA_ERROR);
                m.error.fault = fault;
        }
        r = channel_answer(&c, &m);
        return r == -EPIPE ? 0 : r;
}

int main(int argc, char **argv) {
        Fault f = {};
        int r;

        r = parse_arguments(argc, argv);
        if (r <= 0)
                return r < 0 ? EXIT_FAILURE : EXIT_SUCCESS;

        log_open("latent-media");
        log_set_level_from_environment();

        r = serve(&f);
        if (r < 0)
                (void) log_error(
                        f.name[0] != '\0' ? 0 : r, "%s", f.name[0] != '\0' ? f.text : "latent-media ends");
        /* Not exit(): threads of codecs and the reaper may be at work. */
        _exit(r < 0 ? EXIT_FAILURE : EXIT_SUCCESS);
}
