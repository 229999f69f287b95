/* SPDX-License-Identifier: Apache-2.0 */
/* The program and its connection: protocol, cancel, kill, its limits, full disks. */
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>

#include "service/shared/call-filter.h"
#include "service/shared/cleanup.h"
#include "tests/unit/media/peer.h"
#include "tests/unit/shared/cmocka-all.h"

#define WIDTH 320u
#define HEIGHT 192u
#define SIZE ((uint64_t) WIDTH * HEIGHT * 3)

/* A film of `frames` in a ring of 2. */
static Peer *begin_film(uint64_t frames, int file, uint8_t **ret_map) {
        CLEANUP_CLOSE int arena = -EBADF;
        Peer *p = peer_open();
        MediaMessage m;

        arena = arena_new(SIZE * 2, (void **) ret_map);
        (void) media_init(&m, MEDIA_WRITE);
        m.write.format = MEDIA_MP4;
        m.write.width = WIDTH;
        m.write.height = HEIGHT;
        m.write.quality = 100;
        m.write.frames = frames;
        m.write.ring_frames = 2;
        peer_send(p, &m, file, arena);
        return p;
}

static void fill(uint8_t *p, uint32_t seed) {
        for (uint64_t i = 0; i < SIZE; i++) {
                seed = seed * 1664525u + 1013904223u;
                p[i] = (uint8_t) (seed >> 24);
        }
}

/* Frames until the answer; false: end of file without one. */
static bool feed(Peer *p, uint8_t *map, uint64_t frames, MediaMessage *ret) {
        for (uint64_t ready = 0; ready < frames; ready++) {
                while (ready - p->taken >= 2) {
                        MediaMessage m;
                        int fds[MEDIA_FDS_MAX], r;
                        Fault f = {};

                        r = media_receive(p->socket, &m, fds, &f);
                        if (r == -EAGAIN) {
                                const struct timespec pause = {.tv_nsec = 500000};

                                (void) nanosleep(&pause, NULL);
                                continue;
                        }
                        if (r <= 0)
                                return false;
                        if (m.header.type == MEDIA_TAKEN)
                                p->taken = m.taken.frames;
                        else if (m.header.type != MEDIA_PROGRESS) {
                                *ret = m;
                                return true;
                        }
                }
                fill(map + ready % 2 * SIZE, (uint32_t) ready + 1);
                (void) media_init(ret, MEDIA_FRAMES);
                ret->frames.ready = ready + 1;
                if (media_send(p->socket, ret, NULL, 0) < 0)
                        break;
        }
        return peer_receive(p, ret);
}

static void hello_says_what_is_here(void **state) {
        CLEANUP_PEER Peer *p = peer_open();

        assert_string_equal(p->hello.build_id, LATENTD_VERSION);
        assert_int_equal(p->hello.pid, p->pid);
        assert_non_null(strstr(p->hello.libraries, "libavcodec"));
        assert_non_null(strstr(p->hello.formats, "mp4 ("));
        assert_non_null(strstr(p->hello.formats, "wav (pcm_s16le)"));
}

static void connection_ends_program_ends(void **state) {
        CLEANUP_PEER Peer *p = peer_open();

        (void) shutdown(p->socket, SHUT_RDWR);
        assert_true(WIFEXITED(peer_wait(p)));
}

/* In the middle of a film: the reaper ends it, whatever it does. */
static void connection_ends_in_the_middle_program_ends(void **state) {
        CLEANUP_CLOSE int file = file_new(NULL, 0);
        uint8_t *map;
        CLEANUP_PEER Peer *p = begin_film(100, file, &map);

        fill(map, 1);
        peer_say_frames(p, 1, false);
        while (p->taken == 0)
                peer_take_in(p);
        (void) shutdown(p->socket, SHUT_RDWR);
        (void) peer_wait(p);
}

static void killed_in_the_middle_end_of_file(void **state) {
        CLEANUP_CLOSE int file = file_new(NULL, 0);
        uint8_t *map;
        CLEANUP_PEER Peer *p = begin_film(100, file, &map);
        MediaMessage m;

        fill(map, 1);
        peer_say_frames(p, 1, false);
        while (p->taken == 0)
                peer_take_in(p);
        assert_int_equal(kill(p->pid, SIGKILL), 0);
        assert_false(peer_receive(p, &m));
}

static void expect_write_refused(const MediaWrite *w, const char *name, const char *part) {
        CLEANUP_CLOSE int file = file_new(NULL, 0), arena = -EBADF;
        CLEANUP_PEER Peer *p = peer_open();
        MediaMessage m;
        MediaHeader h;
        void *map;

        arena = arena_new(1 << 20, &map);
        (void) media_init(&m, MEDIA_WRITE);
        h = m.header;
        m.write = *w;
        m.write.header = h;
        peer_send(p, &m, file, arena);
        assert_true(peer_receive(p, &m));
        assert_string_equal(media_type_name(m.header.type), "ERROR");
        expect_fault(&m.error.fault, name, part);
        assert_int_equal(file_size(file), 0);
}

static void write_wrong_requests_refused(void **state) {
        const MediaWrite good = {
                .format = MEDIA_MP4, .width = 64, .height = 32, .frames = 5, .ring_frames = 5};
        MediaWrite w;

        w = good;
        w.width = 33;
        expect_write_refused(&w, FAULT_INVALID_ARGUMENT, "33x32 pixels");
        w = good;
        w.height = 0;
        expect_write_refused(&w, FAULT_INVALID_ARGUMENT, "64x0 pixels");
        w = good;
        w.width = 20000;
        expect_write_refused(&w, FAULT_INVALID_ARGUMENT, "20000x32");
        w = good;
        w.frames = 0;
        expect_write_refused(&w, FAULT_INVALID_ARGUMENT, "a film: 0 frames");
        w = good;
        w.frames = 1000000000;
        expect_write_refused(&w, FAULT_INVALID_ARGUMENT, "1000000000 frames");
        w = good;
        w.ring_frames = 0;
        expect_write_refused(&w, FAULT_INVALID_ARGUMENT, "a ring of 0");
        w = good;
        w.ring_frames = UINT64_MAX / 64;
        expect_write_refused(&w, FAULT_INVALID_ARGUMENT, "outside of an arena");
        w = good;
        w.frames_offset = UINT64_MAX - 5;
        expect_write_refused(&w, FAULT_INVALID_ARGUMENT, "outside of an arena");
        w = good;
        w.samples = 1 << 20;
        expect_write_refused(&w, FAULT_INVALID_ARGUMENT, "outside of an arena");
        w = good;
        w.format = 99;
        expect_write_refused(&w, FAULT_INVALID_ARGUMENT, "unknown format 99");
        w = good;
        w.format = MEDIA_PNG;
        expect_write_refused(&w, FAULT_INVALID_ARGUMENT, "one picture");
        w = good;
        w.format = MEDIA_WAV;
        expect_write_refused(&w, FAULT_INVALID_ARGUMENT, "sound alone");
}

static void read_wrong_requests_refused(void **state) {
        CLEANUP_CLOSE int file = file_new("x", 1), arena = -EBADF;
        static const MediaRead wrong[] = {
                {.what = MEDIA_PICTURE, .width = 0, .height = 32, .size = 4096},
                {.what = MEDIA_PICTURE, .width = 20000, .height = 1, .size = 1 << 16},
                {.what = MEDIA_PICTURE, .width = 64, .height = 64, .size = 64 * 64 * 3 - 1},
                {.what = MEDIA_PICTURE, .width = 64, .height = 64, .offset = 1 << 16, .size = 64 * 64 * 3},
                {.what = MEDIA_PICTURE,
                        .width = 64,
                        .height = 64,
                        .offset = UINT64_MAX,
                        .size = 64 * 64 * 3},
                {.what = MEDIA_CLIP, .width = 64, .height = 64, .frames_max = 0, .size = 4096},
                {.what = MEDIA_CLIP,
                        .width = 16384,
                        .height = 16384,
                        .frames_max = UINT64_MAX,
                        .size = 4096},
                {.what = MEDIA_SOUND, .samples_max = 0, .size = 4096},
                {.what = MEDIA_SOUND, .samples_max = UINT64_MAX / 4, .size = 4096},
                {.what = MEDIA_SOUND, .samples_max = 10, .offset = 2, .size = 4096},
                {.what = 77, .size = 4096},
                {.what = MEDIA_PICTURE, .fit = 9, .width = 4, .height = 4, .size = 4096},
        };
        void *map;

        arena = arena_new(1 << 16, &map);
        for (size_t i = 0; i < ELEMENTSOF(wrong); i++) {
                Fault f = {};

                (void) peer_read(&wrong[i], file, arena, &f);
                expect_fault(&f, FAULT_INVALID_ARGUMENT, "");
        }
}

static void frames_that_cannot_be_are_refused(void **state) {
        static const struct {
                uint64_t ready;
                bool sound;
        } wrong[] = {{3, false}, {101, false}, {1, true}, {UINT64_MAX, false}};

        for (size_t i = 0; i < ELEMENTSOF(wrong); i++) {
                CLEANUP_CLOSE int file = file_new(NULL, 0);
                uint8_t *map;
                CLEANUP_PEER Peer *p = begin_film(100, file, &map);
                MediaMessage m;

                peer_say_frames(p, wrong[i].ready, wrong[i].sound);
                assert_true(peer_receive(p, &m));
                assert_string_equal(media_type_name(m.header.type), "ERROR");
                expect_fault(&m.error.fault, FAULT_INTERNAL, "FRAMES says");
        }
}

static void write_to_wrong_file_refused(void **state) {
        CLEANUP_CLOSE int full = file_new("x", 1), null = open("/dev/null", O_WRONLY | O_CLOEXEC),
                          empty = file_new(NULL, 0), read_only = -EBADF;
        int files[3];

        read_only = open(path_of(empty), O_RDONLY | O_CLOEXEC);
        files[0] = full;
        files[1] = null;
        files[2] = read_only;
        for (size_t i = 0; i < ELEMENTSOF(files); i++) {
                uint8_t *map;
                CLEANUP_PEER Peer *p = begin_film(3, files[i], &map);
                MediaMessage m;

                assert_true(peer_receive(p, &m));
                assert_string_equal(media_type_name(m.header.type), "ERROR");
                expect_fault(&m.error.fault, FAULT_INVALID_ARGUMENT, "must be a regular, empty one");
        }
}

/* A file that may not be read: the index is in front all the same. */
static void write_only_file_is_enough(void **state) {
        CLEANUP_CLOSE int file = -EBADF, back = -EBADF;
        uint8_t *map, start[4096];
        MediaMessage m;
        char path[128];

        (void) snprintf(path, sizeof(path), "%s/write-only.mp4", temporary_folder());
        file = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
        assert_true(file >= 0);
        {
                CLEANUP_PEER Peer *p = begin_film(5, file, &map);

                assert_true(feed(p, map, 5, &m));
                assert_string_equal(media_type_name(m.header.type), "DONE");
        }
        back = file_open(path);
        assert_int_equal(probe_file(back).frames, 5);
        assert_true(pread(back, start, sizeof(start), 0) > 1000);
        assert_non_null(memmem(start, 1000, "moov", 4));
}

/* No file of the process may get larger than 100000 bytes. */
static void write_beyond_file_limit_named(void **state) {
        CLEANUP_CLOSE int file = -EBADF;
        MediaMessage m;
        uint8_t *map;
        char path[128];

        (void) snprintf(path, sizeof(path), "%s/large.mp4", temporary_folder());
        file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        {
                CLEANUP_PEER Peer *p = NULL;
                const struct rlimit hard = {100000, 100000};

                p = begin_film(60, file, &map);
                /* After its start: the limit that it sets itself is the soft one. */
                if (prlimit(p->pid, RLIMIT_FSIZE, &hard, NULL) < 0)
                        skip();
                if (!feed(p, map, 60, &m))
                        fail_msg("no answer");
                assert_string_equal(media_type_name(m.header.type), "ERROR");
                expect_fault(&m.error.fault, FAULT_IO, "may not get larger than");
        }
}

/* Needs the right to mount; the file stays open when the disk is taken away again. */
static void write_to_full_disk_named(void **state) {
        CLEANUP_CLOSE int file = -EBADF;
        char path[128], name[160];
        MediaMessage m;
        uint8_t *map;

        (void) snprintf(path, sizeof(path), "%s/disk", temporary_folder());
        assert_int_equal(mkdir(path, 0700), 0);
        if (mount("tmpfs", path, "tmpfs", 0, "size=128k") < 0)
                skip();
        (void) snprintf(name, sizeof(name), "%s/film.mp4", path);
        file = open(name, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        (void) umount2(path, MNT_DETACH);
        assert_true(file >= 0);
        {
                CLEANUP_PEER Peer *p = begin_film(60, file, &map);

                assert_true(feed(p, map, 60, &m));
                assert_string_equal(media_type_name(m.header.type), "ERROR");
                expect_fault(&m.error.fault, FAULT_IO, "The disk is full");
        }
}

/* What the program may do while it serves a file: seccomp is on, nothing can be gained, little is open. */
static void sandbox_is_on_while_it_serves(void **state) {
        CLEANUP_CLOSE int file = file_new(NULL, 0);
        uint8_t *map;
        CLEANUP_PEER Peer *p = begin_film(100, file, &map);
        char path[64], text[4096] = "";
        FILE *s;

        fill(map, 1);
        peer_say_frames(p, 1, false);
        while (p->taken == 0)
                peer_take_in(p);
        (void) snprintf(path, sizeof(path), "/proc/%d/status", (int) p->pid);
        s = fopen(path, "re");
        assert_non_null(s);
        (void) !fread(text, 1, sizeof(text) - 1, s);
        (void) fclose(s);
        assert_non_null(strstr(text, "NoNewPrivs:\t1"));
        if (call_filter_is_supported())
                assert_non_null(strstr(text, "Seccomp:\t2"));
}

static void started_by_hand_refused(void **state) {
        char command[4096];

        (void) snprintf(command, sizeof(command),
                "%s/service/media/latent-media 2>&1 | grep -q 'not started by hand'",
                getenv("LATENT_BUILD_DIR"));
        assert_int_equal(system(command), 0);
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(hello_says_what_is_here),
                cmocka_unit_test(connection_ends_program_ends),
                cmocka_unit_test(connection_ends_in_the_middle_program_ends),
                cmocka_unit_test(killed_in_the_middle_end_of_file),
                cmocka_unit_test(write_wrong_requests_refused),
                cmocka_unit_test(read_wrong_requests_refused),
                cmocka_unit_test(frames_that_cannot_be_are_refused),
                cmocka_unit_test(write_to_wrong_file_refused),
                cmocka_unit_test(write_only_file_is_enough),
                cmocka_unit_test(write_beyond_file_limit_named),
                cmocka_unit_test(write_to_full_disk_named),
                cmocka_unit_test(sandbox_is_on_while_it_serves),
                cmocka_unit_test(started_by_hand_refused),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
