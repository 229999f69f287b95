/* SPDX-License-Identifier: Apache-2.0 */
/* Files that are not what they should be: every one is a named error that says what is wrong. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "service/shared/cleanup.h"
#include "tests/unit/media/peer.h"
#include "tests/unit/shared/cmocka-all.h"

static Fault fault_of(int file, MediaWhat what) {
        MediaRead m = {.what = what,
                .width = 32,
                .height = 32,
                .frames_max = 50,
                .samples_max = 32000,
                .size = 32000 * 8};
        CLEANUP_CLOSE int arena = -EBADF;
        Fault f = {};
        void *map;

        arena = arena_new(m.size, &map);
        (void) peer_read(&m, file, arena, &f);
        return f;
}

static void expect_all(int file, const char *name, const char *part) {
        for (unsigned what = 0; what < _MEDIA_WHAT_MAX; what++) {
                Fault f = fault_of(file, (MediaWhat) what);

                expect_fault(&f, name, part);
        }
}

static void read_text_file_refused(void **state) {
        CLEANUP_CLOSE int file = file_new("Dear diary, this is no picture at all.\n", 39);

        expect_all(file, FAULT_INVALID_FILE, "By its first bytes the file is none of: PNG");
}

static void read_empty_file_refused(void **state) {
        CLEANUP_CLOSE int file = file_new("", 0);

        expect_all(file, FAULT_INVALID_FILE, "empty (0 bytes)");
}

static void read_few_bytes_refused(void **state) {
        static const char *const starts[] = {"\x89PNG\r\n\x1a\n", "\xff\xd8\xff", "GIF89a",
                "RIFF\1\0\0\0WEBP", "RIFF\1\0\0\0WAVE", "RIFF\1\0\0\0AVI ", "fLaC", "OggS",
                "\x1a\x45\xdf\xa3", "BM\1\1\1\1", "ID3\4", "\xff\xfb\x90\x64", "\xff\xf1\x50\x80"};

        for (size_t i = 0; i < ELEMENTSOF(starts); i++)
                for (size_t n = 4; n <= 64; n *= 16) {
                        char bytes[64] = {};
                        CLEANUP_CLOSE int file = -EBADF;

                        (void) snprintf(bytes, sizeof(bytes), "%s", starts[i]);
                        memcpy(bytes, starts[i], strlen(starts[i]));
                        file = file_new(bytes, n);
                        for (unsigned what = MEDIA_PICTURE; what < _MEDIA_WHAT_MAX; what += 2) {
                                Fault f = fault_of(file, (MediaWhat) what);

                                if (strcmp(f.name, FAULT_INVALID_FILE) != 0 || strlen(f.text) < 20)
                                        fail_msg("start %zu, %zu bytes, what %u: %s: %s", i, n, what, f.name,
                                                f.text);
                        }
                }
}

static void read_folder_and_device_refused(void **state) {
        CLEANUP_CLOSE int folder = open("/", O_RDONLY | O_CLOEXEC),
                          device = open("/dev/null", O_RDONLY | O_CLOEXEC);

        expect_all(folder, FAULT_INVALID_FILE, "a folder");
        expect_all(device, FAULT_INVALID_FILE, "no regular file");
}

static void put_big(uint8_t *p, uint32_t v) {
        p[0] = (uint8_t) (v >> 24);
        p[1] = (uint8_t) (v >> 16);
        p[2] = (uint8_t) (v >> 8);
        p[3] = (uint8_t) v;
}

/* A PNG of 1x1 whose header says something else. */
static void read_huge_picture_refused_with_its_size(void **state) {
        uint8_t one[3] = {1, 2, 3}, p[4096];
        CLEANUP_CLOSE int small = write_file(MEDIA_PNG, 1, 1, one, 1, NULL, 0), file = -EBADF;
        uint64_t n = file_size(small);
        Fault f;

        assert_true(n < sizeof(p));
        assert_int_equal(pread(small, p, n, 0), n);
        put_big(p + 16, 20000);
        put_big(p + 20, 20000);
        file = file_new(p, n);
        f = fault_of(file, MEDIA_PICTURE);
        expect_fault(&f, FAULT_LIMIT, "20000x20000 pixels, expected sides of at most 16384");
        f = fault_of(file, MEDIA_PROBE);
        expect_fault(&f, FAULT_LIMIT, "20000x20000");
}

static uint8_t *film_bytes(MediaFormat format, uint64_t *ret_size) {
        CLEANUP_FREE uint8_t *frames = calloc(40, 96 * 64 * 3);
        CLEANUP_FREE float *sound = calloc(53334 * 2, sizeof(float));
        CLEANUP_CLOSE int file = -EBADF;
        uint32_t seed = 1;
        uint8_t *p;

        /* Noise: the file is large in proportion to its index. */
        for (size_t i = 0; i < (size_t) 40 * 96 * 64 * 3; i++) {
                seed = seed * 1664525u + 1013904223u;
                frames[i] = (uint8_t) (seed >> 25);
        }
        file = write_file(format, 96, 64, frames, 40, sound, 53334);
        *ret_size = file_size(file);
        p = malloc(*ret_size);
        assert_int_equal(pread(file, p, *ret_size, 0), *ret_size);
        return p;
}

static void read_truncated_film_says_how_far(void **state) {
        static const MediaFormat formats[] = {MEDIA_MP4, MEDIA_MKV, MEDIA_WEBM};

        for (size_t i = 0; i < ELEMENTSOF(formats); i++) {
                uint64_t n;
                CLEANUP_FREE uint8_t *p = film_bytes(formats[i], &n);

                for (unsigned k = 1; k < 4; k++) {
                        CLEANUP_CLOSE int file = file_new(p, n * k / 4);
                        Fault f = fault_of(file, MEDIA_CLIP);

                        if (strcmp(f.name, FAULT_INVALID_FILE) != 0 ||
                                (!strstr(f.text, "cut off") && !strstr(f.text, "damaged")))
                                fail_msg("format %d at %u/4: %s: %s", (int) formats[i], k, f.name, f.text);
                        if (formats[i] == MEDIA_MP4 && k == 3)
                                assert_non_null(strstr(f.text, "could be read for"));
                }
        }
}

static void read_truncated_film_first_frames_are_whole(void **state) {
        CLEANUP_CLOSE int file = -EBADF;
        CLEANUP_FREE uint8_t *q = NULL;
        uint64_t n, frames;
        CLEANUP_FREE uint8_t *p = film_bytes(MEDIA_MP4, &n);

        file = file_new(p, n * 3 / 4);
        q = read_clip(file, 32, 32, 3, &frames);
        assert_int_equal(frames, 3);
}

static void read_truncated_png_jpeg_refused(void **state) {
        CLEANUP_FREE uint8_t *pixels = calloc(1, 64 * 64 * 3), *p = NULL;
        CLEANUP_CLOSE int whole = -EBADF;
        uint64_t n;

        for (size_t i = 0; i < 64 * 64 * 3; i++)
                pixels[i] = (uint8_t) (i * i * 31 >> 3);
        whole = write_file(MEDIA_PNG, 64, 64, pixels, 1, NULL, 0);
        n = file_size(whole);
        p = malloc(n);
        assert_int_equal(pread(whole, p, n, 0), n);
        for (unsigned k = 1; k < 8; k++) {
                CLEANUP_CLOSE int file = file_new(p, n * k / 8);
                Fault f = fault_of(file, MEDIA_PICTURE);

                expect_fault(&f, FAULT_INVALID_FILE, "cannot be decoded");
        }
        if (!ffmpeg("-f lavfi -i testsrc=s=128x128 -frames:v 1 a.jpg"))
                skip();
        {
                CLEANUP_CLOSE int jpeg = -EBADF, half = -EBADF;
                char path[128];
                Fault f;

                (void) snprintf(path, sizeof(path), "%s/a.jpg", temporary_folder());
                jpeg = file_open(path);
                n = file_size(jpeg);
                free(p);
                p = malloc(n);
                assert_int_equal(pread(jpeg, p, n, 0), n);
                half = file_new(p, n / 2);
                f = fault_of(half, MEDIA_PICTURE);
                expect_fault(&f, FAULT_INVALID_FILE, "cannot be decoded");
        }
}

/* Bytes of an MP4 turned over, one place at a time: an answer always comes, and nothing but an answer. */
static void read_damaged_film_answers(void **state) {
        uint64_t n;
        CLEANUP_FREE uint8_t *p = film_bytes(MEDIA_MP4, &n);
        uint32_t seed = 99;
        unsigned refused = 0;

        for (unsigned i = 0; i < 40; i++) {
                CLEANUP_CLOSE int file = -EBADF;
                uint64_t at;
                uint8_t old[4];
                Fault f;

                seed = seed * 1664525u + 1013904223u;
                at = (seed >> 8) % (i < 30 ? 4000 : n - 4); /* most of them into the boxes */
                memcpy(old, p + at, 4);
                for (unsigned k = 0; k < 4; k++)
                        p[at + k] ^= (uint8_t) (seed >> (k * 7));
                file = file_new(p, n);
                memcpy(p + at, old, 4);
                f = fault_of(file, i % 2 ? MEDIA_CLIP : MEDIA_SOUND);
                assert_true(f.name[0] == '\0' || strlen(f.text) > 10);
                refused += f.name[0] != '\0';
        }
        assert_true(refused >= 3);
}

static void box(uint8_t **p, uint32_t size, const char *name) {
        put_big(*p, size);
        memcpy(*p + 4, name, 4);
        *p += 8;
}

/* Boxes in boxes without end, and a box that is larger than itself. */
static void read_nested_boxes_refused(void **state) {
        static uint8_t bytes[80000];
        uint8_t *p = bytes;
        CLEANUP_CLOSE int file = -EBADF;
        Fault f;

        box(&p, 16, "ftyp");
        memcpy(p, "isom\0\0\0\0", 8);
        p += 8;
        for (unsigned i = 0; i < 9000; i++)
                box(&p, 72000 - i * 8, i == 0 ? "moov" : "trak");
        file = file_new(bytes, (size_t) (p - bytes));
        f = fault_of(file, MEDIA_CLIP);
        expect_fault(&f, FAULT_INVALID_FILE, "");
        f = fault_of(file, MEDIA_PROBE);
        expect_fault(&f, FAULT_INVALID_FILE, "");
}

/* The index says that the film has 10^9 frames (of one size, each as long): what is asked comes, or an
 * error. */
static void read_billion_frames_refused_or_cut(void **state) {
        uint64_t n;
        CLEANUP_FREE uint8_t *p = film_bytes(MEDIA_MP4, &n);
        uint8_t *stsz = memmem(p, n, "stsz", 4), *stts = memmem(p, n, "stts", 4);
        CLEANUP_CLOSE int file = -EBADF;
        Fault f;

        assert_non_null(stsz);
        assert_non_null(stts);
        put_big(stsz + 8, 100);         /* all of one size */
        put_big(stsz + 12, 1000000000); /* samples */
        put_big(stts + 12, 1000000000);
        file = file_new(p, n);
        f = fault_of(file, MEDIA_CLIP);
        assert_string_equal(f.name, FAULT_INVALID_FILE);
}

static void read_growing_and_shrinking_file_refused(void **state) {
        uint64_t n;
        CLEANUP_FREE uint8_t *p = film_bytes(MEDIA_MP4, &n);

        for (unsigned shrink = 0; shrink < 2; shrink++) {
                MediaRead request = {.what = MEDIA_CLIP,
                        .width = 1200,
                        .height = 800,
                        .frames_max = 40,
                        .size = UINT64_C(1200) * 800 * 3 * 40};
                CLEANUP_CLOSE int file = file_new(p, n), arena = -EBADF;
                CLEANUP_PEER Peer *peer = peer_open();
                MediaMessage m;
                MediaHeader h;
                void *map;

                arena = arena_new(request.size, &map);
                (void) media_init(&m, MEDIA_READ);
                h = m.header;
                m.read = request;
                m.read.header = h;
                peer_send(peer, &m, file, arena);
                /* It begins to decode, which takes a while at this size. */
                while (peer->n_progress == 0)
                        peer_take_in(peer);
                assert_int_equal(ftruncate(file, shrink ? (off_t) n / 2 : (off_t) n + 1000), 0);
                assert_true(peer_receive(peer, &m));
                assert_string_equal(media_type_name(m.header.type), "ERROR");
                expect_fault(&m.error.fault, FAULT_FILE_CHANGED, "changed while it was read");
        }
}

static void read_picture_where_film_or_sound_is_asked_refused(void **state) {
        uint8_t one[3] = {1, 2, 3};
        CLEANUP_CLOSE int picture = write_file(MEDIA_PNG, 1, 1, one, 1, NULL, 0), sound = -EBADF;
        float samples[20] = {};
        Fault f;

        f = fault_of(picture, MEDIA_CLIP);
        expect_fault(&f, FAULT_INVALID_FILE, "this is a picture, where a clip is asked");
        f = fault_of(picture, MEDIA_SOUND);
        expect_fault(&f, FAULT_INVALID_FILE, "this is a picture, where sound is asked");
        sound = write_file(MEDIA_WAV, 0, 0, NULL, 0, samples, 10);
        f = fault_of(sound, MEDIA_PICTURE);
        expect_fault(&f, FAULT_INVALID_FILE, "There is no picture in this file");
        f = fault_of(sound, MEDIA_CLIP);
        expect_fault(&f, FAULT_INVALID_FILE, "There is no picture in this file");
}

/* Lists of other files are no kind of file here. */
static void read_playlists_refused(void **state) {
        static const char *const lists[] = {"#EXTM3U\n#EXTINF:1,\n/etc/passwd\n",
                "ffconcat version 1.0\nfile /etc/passwd\n",
                "<?xml version=\"1.0\"?><MPD xmlns=\"urn:mpeg:dash:schema:mpd:2011\"></MPD>",
                "[playlist]\nFile1=/etc/passwd\n"};

        for (size_t i = 0; i < ELEMENTSOF(lists); i++) {
                CLEANUP_CLOSE int file = file_new(lists[i], strlen(lists[i]));

                expect_all(file, FAULT_INVALID_FILE, "By its first bytes");
        }
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(read_text_file_refused),
                cmocka_unit_test(read_empty_file_refused),
                cmocka_unit_test(read_few_bytes_refused),
                cmocka_unit_test(read_folder_and_device_refused),
                cmocka_unit_test(read_huge_picture_refused_with_its_size),
                cmocka_unit_test(read_truncated_film_says_how_far),
                cmocka_unit_test(read_truncated_film_first_frames_are_whole),
                cmocka_unit_test(read_truncated_png_jpeg_refused),
                cmocka_unit_test(read_damaged_film_answers),
                cmocka_unit_test(read_nested_boxes_refused),
                cmocka_unit_test(read_billion_frames_refused_or_cut),
                cmocka_unit_test(read_growing_and_shrinking_file_refused),
                cmocka_unit_test(read_picture_where_film_or_sound_is_asked_refused),
                cmocka_unit_test(read_playlists_refused),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
