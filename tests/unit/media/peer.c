/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/unit/media/peer.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>

#include "service/shared/cleanup.h"
#include "service/shared/memfd.h"
#include "tests/unit/shared/child.h"

#define TIMEOUT_MSEC 120000

static const char *program = "service/media/latent-media";

void peer_set_program(const char *path) {
        program = path;
}

Peer *peer_open(void) {
        MediaMessage m;
        Peer *p;

        p = calloc(1, sizeof(*p));
        assert_non_null(p);
        p->pid = child_spawn(program, SOCK_SEQPACKET, &p->socket);

        assert_true(peer_receive(p, &m));
        assert_string_equal(media_type_name(m.header.type), "HELLO");
        p->hello = m.hello;
        return p;
}

int peer_wait(Peer *p) {
        return child_wait(&p->pid);
}

Peer *peer_free(Peer *p) {
        if (!p)
                return NULL;

        (void) close(p->socket);
        if (p->pid > 0)
                child_end(&p->pid);
        free(p);
        return NULL;
}

void peer_freep(Peer **p) {
        (void) peer_free(*p);
}

void peer_send(Peer *p, const MediaMessage *m, int file, int arena) {
        for (;;) {
                struct pollfd poll_fd = {.fd = p->socket, .events = POLLOUT};
                int r = media_send(p->socket, m, (int[]){file, arena}, 2);

                if (r != -EAGAIN) {
                        assert_int_equal(r, 0);
                        return;
                }
                assert_int_equal(poll(&poll_fd, 1, TIMEOUT_MSEC), 1);
        }
}

static int receive(Peer *p, MediaMessage *ret) {
        int fds[MEDIA_FDS_MAX], r;
        Fault f = {};

        r = media_receive(p->socket, ret, fds, &f);
        if (r < 0 && r != -EAGAIN)
                fail_msg("a message of latent-media is wrong: %s", f.text);
        if (r <= 0)
                return r;
        if (ret->header.type == MEDIA_TAKEN) {
                assert_true(ret->taken.frames > p->taken);
                p->taken = ret->taken.frames;
                return -EINPROGRESS;
        }
        if (ret->header.type == MEDIA_PROGRESS) {
                p->n_progress++;
                return -EINPROGRESS;
        }
        return 1;
}

bool peer_receive(Peer *p, MediaMessage *ret) {
        for (;;) {
                struct pollfd poll_fd = {.fd = p->socket, .events = POLLIN};
                int r = receive(p, ret);

                if (r >= 0)
                        return r > 0;
                if (r == -EAGAIN && poll(&poll_fd, 1, TIMEOUT_MSEC) != 1)
                        fail_msg("no answer of latent-media within %d ms", TIMEOUT_MSEC);
        }
}

void peer_take_in(Peer *p) {
        struct pollfd poll_fd = {.fd = p->socket, .events = POLLIN};
        MediaMessage m;
        int r;

        if (poll(&poll_fd, 1, TIMEOUT_MSEC) != 1)
                fail_msg("nothing of latent-media within %d ms", TIMEOUT_MSEC);
        r = receive(p, &m);
        if (r > 0 && m.header.type == MEDIA_ERROR)
                fail_msg("%s: %s", m.error.fault.name, m.error.fault.text);
        assert_true(r == -EAGAIN || r == -EINPROGRESS);
}

void peer_say_frames(Peer *p, uint64_t ready, bool sound) {
        MediaMessage m;

        (void) media_init(&m, MEDIA_FRAMES);
        m.frames.ready = ready;
        m.frames.sound = sound;
        peer_send(p, &m, -EBADF, -EBADF);
}

static MediaDone answer(Peer *p, Fault *f) {
        MediaMessage m, end;

        if (!peer_receive(p, &m))
                fail_msg("end of file instead of an answer");
        if (m.header.type == MEDIA_ERROR) {
                *f = m.error.fault;
                memset(&m, 0, sizeof(m));
        } else
                assert_string_equal(media_type_name(m.header.type), "DONE");
        assert_false(peer_receive(p, &end));
        return m.done;
}

MediaDone peer_read(const MediaRead *request, int file, int arena, Fault *f) {
        CLEANUP_PEER Peer *p = peer_open();
        MediaMessage m;
        MediaHeader h;

        (void) media_init(&m, MEDIA_READ);
        h = m.header;
        m.read = *request;
        m.read.header = h;
        peer_send(p, &m, file, request->what == MEDIA_PROBE ? -EBADF : arena);
        return answer(p, f);
}

void expect_fault(const Fault *f, const char *name, const char *part) {
        if (strcmp(f->name, name) != 0 || !strstr(f->text, part))
                fail_msg("expected %s with \"%s\", got %s: %s", name, part, f->name, f->text);
}

int arena_new(uint64_t size, void **ret_map) {
        int fd;

        size = (size + 4095) / 4096 * 4096;
        assert_int_equal(memfd_new("test-arena", size, &fd), 0);
        assert_int_equal(memfd_map(fd, size, PROT_READ | PROT_WRITE, ret_map), 0);
        return fd;
}

static void unmap(void *map, uint64_t size) {
        assert_int_equal(munmap(map, (size + 4095) / 4096 * 4096), 0);
}

int file_new(const void *bytes, size_t size) {
        int fd = memfd_create("test-file", MFD_CLOEXEC);

        assert_true(fd >= 0);
        if (size > 0)
                assert_int_equal(pwrite(fd, bytes, size, 0), size);
        return fd;
}

int file_open(const char *path) {
        int fd = open(path, O_RDONLY | O_CLOEXEC);

        if (fd < 0)
                fail_msg("%s: %s", path, strerror(errno));
        return fd;
}

uint64_t file_size(int fd) {
        struct stat st;

        assert_int_equal(fstat(fd, &st), 0);
        return (uint64_t) st.st_size;
}

static void expect_none(const Fault *f) {
        if (f->name[0] != '\0')
                fail_msg("%s: %s", f->name, f->text);
}

MediaDone probe_file(int file) {
        Fault f = {};
        MediaDone d = peer_read(&(MediaRead){.what = MEDIA_PROBE}, file, -EBADF, &f);

        expect_none(&f);
        return d;
}

static void *copy_of(const void *p, uint64_t size) {
        void *q = malloc(size + 1);

        assert_non_null(q);
        memcpy(q, p, size);
        return q;
}

uint8_t *read_clip(int file, uint32_t width, uint32_t height, uint64_t frames_max, uint64_t *ret_frames) {
        uint64_t size = (uint64_t) width * height * 3 * frames_max;
        MediaRead m = {.what = MEDIA_CLIP,
                .width = width,
                .height = height,
                .frames_max = frames_max,
                .size = size};
        CLEANUP_CLOSE int arena = -EBADF;
        Fault f = {};
        MediaDone d;
        uint8_t *copy;
        void *map;

        arena = arena_new(size, &map);
        d = peer_read(&m, file, arena, &f);
        expect_none(&f);
        assert_true(d.frames >= 1 && d.frames <= frames_max);
        copy = copy_of(map, size);
        unmap(map, size);
        *ret_frames = d.frames;
        return copy;
}

uint8_t *read_picture(int file, MediaFit fit, uint32_t width, uint32_t height) {
        uint64_t size = (uint64_t) width * height * 3;
        MediaRead m = {.what = MEDIA_PICTURE, .fit = fit, .width = width, .height = height, .size = size};
        CLEANUP_CLOSE int arena = -EBADF;
        Fault f = {};
        MediaDone d;
        uint8_t *copy;
        void *map;

        arena = arena_new(size, &map);
        d = peer_read(&m, file, arena, &f);
        expect_none(&f);
        assert_int_equal(d.frames, 1);
        copy = copy_of(map, size);
        unmap(map, size);
        return copy;
}

float *read_sound(int file, uint64_t samples_max, uint64_t *ret_samples) {
        uint64_t size = samples_max * 2 * sizeof(float);
        MediaRead m = {.what = MEDIA_SOUND, .samples_max = samples_max, .size = size};
        CLEANUP_CLOSE int arena = -EBADF;
        Fault f = {};
        MediaDone d;
        float *copy;
        void *map;

        arena = arena_new(size, &map);
        d = peer_read(&m, file, arena, &f);
        expect_none(&f);
        copy = copy_of(map, d.samples * 2 * sizeof(float));
        unmap(map, size);
        *ret_samples = d.samples;
        return copy;
}

int write_file(MediaFormat format, uint32_t width, uint32_t height, const uint8_t *frames, uint64_t n_frames,
        const float *sound, uint64_t samples) {
        uint64_t pictures = (uint64_t) width * height * 3 * n_frames, at = (pictures + 63) / 64 * 64,
                 size = at + samples * 2 * sizeof(float);
        CLEANUP_PEER Peer *p = peer_open();
        CLEANUP_CLOSE int arena = -EBADF;
        int file = file_new(NULL, 0);
        MediaMessage m;
        MediaDone d;
        Fault f = {};
        void *map;

        arena = arena_new(size, &map);
        if (n_frames > 0)
                memcpy(map, frames, pictures);
        if (samples > 0)
                memcpy((uint8_t *) map + at, sound, samples * 2 * sizeof(float));

        (void) media_init(&m, MEDIA_WRITE);
        m.write.format = format;
        m.write.width = width;
        m.write.height = height;
        m.write.frames = m.write.ring_frames = n_frames;
        m.write.samples = samples;
        m.write.sound_offset = at;
        (void) snprintf(m.write.title, sizeof(m.write.title), "A test");
        peer_send(p, &m, file, arena);
        peer_say_frames(p, n_frames, samples > 0);
        d = answer(p, &f);
        unmap(map, size);
        expect_none(&f);
        assert_int_equal(d.bytes, file_size(file));
        assert_int_equal(d.frames, n_frames);
        return file;
}

static char *run(const char *command) {
        char *text = calloc(1, 65536);
        FILE *s = popen(command, "re");
        size_t n;
        int status;

        assert_non_null(text);
        assert_non_null(s);
        n = fread(text, 1, 65535, s);
        text[n] = '\0';
        status = pclose(s);
        if (status != 0)
                fail_msg("exit %d of: %s", status, command);
        return text;
}

static bool is_there(const char *program) {
        char command[64];

        (void) snprintf(command, sizeof(command), "command -v %s >/dev/null 2>&1", program);
        return system(command) == 0;
}

bool ffmpeg(const char *format, ...) {
        char arguments[2048], command[4096];
        va_list ap;

        if (!is_there("ffmpeg"))
                return false;
        va_start(ap, format);
        (void) vsnprintf(arguments, sizeof(arguments), format, ap);
        va_end(ap);
        (void) snprintf(command, sizeof(command), "cd %s && ffmpeg -nostdin -v error -y %s",
                temporary_folder(), arguments);
        free(run(command));
        return true;
}

char *ffprobe(const char *path, const char *arguments) {
        char command[4096];

        if (!is_there("ffprobe"))
                return NULL;
        (void) snprintf(command, sizeof(command), "ffprobe -v error %s %s", arguments, path);
        return run(command);
}

static char folder[64];

static void remove_folder(void) {
        char command[128];

        (void) snprintf(command, sizeof(command), "rm -rf %s", folder);
        (void) !system(command);
}

const char *temporary_folder(void) {
        if (folder[0] == '\0') {
                (void) snprintf(folder, sizeof(folder), "/tmp/latent-media-test-XXXXXX");
                assert_non_null(mkdtemp(folder));
                (void) atexit(remove_folder);
        }
        return folder;
}

const char *path_of(int fd) {
        static char path[64];

        (void) snprintf(path, sizeof(path), "/proc/%d/fd/%d", (int) getpid(), fd);
        return path;
}
