/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "service/shared/cleanup.h"
#include "tests/unit/media/peer.h"
#include "tests/unit/shared/cmocka-all.h"

static uint8_t *noise(uint32_t width, uint32_t height) {
        uint8_t *p = malloc((size_t) width * height * 3);
        uint32_t seed = width * 7 + height;

        assert_non_null(p);
        for (size_t i = 0; i < (size_t) width * height * 3; i++) {
                seed = seed * 1664525u + 1013904223u;
                p[i] = (uint8_t) (seed >> 24);
        }
        return p;
}

static int ffmpeg_file(const char *name) {
        char path[128];

        (void) snprintf(path, sizeof(path), "%s/%s", temporary_folder(), name);
        return file_open(path);
}

static void write_png_read_same_pixels(void **state) {
        static const uint32_t sizes[][2] = {{64, 48}, {1, 1}, {33, 7}, {1, 500}};

        for (size_t i = 0; i < ELEMENTSOF(sizes); i++) {
                uint32_t w = sizes[i][0], h = sizes[i][1];
                CLEANUP_FREE uint8_t *p = noise(w, h), *q = NULL;
                CLEANUP_CLOSE int file = write_file(MEDIA_PNG, w, h, p, 1, NULL, 0);
                MediaDone d = probe_file(file);

                assert_int_equal(d.width, w);
                assert_int_equal(d.height, h);
                assert_int_equal(d.frames, 1);
                assert_int_equal(d.samples, 0);
                assert_string_equal(d.format, "png");
                q = read_picture(file, MEDIA_FIT_STRETCH, w, h);
                assert_memory_equal(p, q, (size_t) w * h * 3);
        }
}

static void read_one_pixel_fills_canvas(void **state) {
        uint8_t one[3] = {200, 100, 50};
        CLEANUP_CLOSE int file = write_file(MEDIA_PNG, 1, 1, one, 1, NULL, 0);
        CLEANUP_FREE uint8_t *q = read_picture(file, MEDIA_FIT_COVER, 64, 32);

        for (size_t i = 0; i < 64 * 32; i++)
                assert_memory_equal(q + i * 3, one, 3);
}

/* A picture of 3 bands; COVER cuts the outer ones off, in the middle. */
static void read_cover_cuts_centre(void **state) {
        CLEANUP_FREE uint8_t *p = calloc(1, 96 * 32 * 3), *q = NULL;
        CLEANUP_CLOSE int file = -EBADF;

        for (uint32_t y = 0; y < 32; y++)
                for (uint32_t x = 0; x < 96; x++)
                        p[(y * 96 + x) * 3 + x / 32] = 255;
        file = write_file(MEDIA_PNG, 96, 32, p, 1, NULL, 0);
        q = read_picture(file, MEDIA_FIT_COVER, 32, 32);
        for (uint32_t y = 0; y < 32; y++)
                assert_memory_equal(q + y * 32 * 3, p + (y * 96 + 32) * 3, 32 * 3);

        free(q);
        q = read_picture(file, MEDIA_FIT_STRETCH, 32, 32);
        assert_true(
                q[16 * 32 * 3] > 240 && q[(16 * 32 + 16) * 3 + 1] > 240 && q[(16 * 32 + 31) * 3 + 2] > 240);
}

static void read_formats_close_to_source(void **state) {
        static const struct {
                const char *name, *options;
                int within;
        } cases[] = {{"a.jpg", "-q:v 1 -pix_fmt yuvj444p", 6}, {"a.bmp", "", 0},
                {"a.webp", "-c:v libwebp -lossless 1", 0}, {"b.webp", "-c:v libwebp -quality 100", 8},
                {"a.png", "-pix_fmt rgb48be", 1},
                {"c.png", "-vf \"split[a][b];[a]palettegen[p];[b][p]paletteuse\" -pix_fmt pal8", 1},
                {"a.gif", "-vf \"split[a][b];[a]palettegen[p];[b][p]paletteuse\"", 1},
                {"d.png", "-pix_fmt rgba", 0}};

        for (size_t i = 0; i < ELEMENTSOF(cases); i++) {
                CLEANUP_FREE uint8_t *q = NULL;
                CLEANUP_CLOSE int file = -EBADF;

                if (!ffmpeg("-f lavfi -i color=black:s=40x24:d=0.04,format=rgb24,geq=r=192:g=96:b=48 "
                            "-frames:v 1 %s %s",
                            cases[i].options, cases[i].name))
                        skip();
                file = ffmpeg_file(cases[i].name);
                assert_int_equal(probe_file(file).width, 40);
                q = read_picture(file, MEDIA_FIT_STRETCH, 40, 24);
                for (size_t k = 0; k < 40 * 24 * 3; k++) {
                        static const int want[] = {0xc0, 0x60, 0x30};

                        if (abs(q[k] - want[k % 3]) > cases[i].within)
                                fail_msg("%s: channel %zu is %d, expected %d", cases[i].name, k % 3, q[k],
                                        want[k % 3]);
                }
        }
}

static void read_grey_and_16_bits_exact(void **state) {
        CLEANUP_FREE uint8_t *q = NULL;
        CLEANUP_CLOSE int file = -EBADF;

        if (!ffmpeg("-f lavfi -i \"color=black:s=256x4,format=gray,geq=lum=X\" -frames:v 1 -pix_fmt gray "
                    "e.png"))
                skip();
        file = ffmpeg_file("e.png");
        q = read_picture(file, MEDIA_FIT_STRETCH, 256, 4);
        for (uint32_t x = 0; x < 256; x++)
                assert_true(q[x * 3] == x && q[x * 3 + 1] == x && q[x * 3 + 2] == x);
}

static void read_transparent_over_black(void **state) {
        CLEANUP_FREE uint8_t *q = NULL;
        CLEANUP_CLOSE int file = -EBADF;

        /* Opaque at the left, half in the middle, nothing at the right. */
        if (!ffmpeg("-f lavfi -i "
                    "\"color=white:s=96x8,format=rgba,geq=r=200:g=100:b=40:a='if(lt(X,32),255,if(lt(X,64),"
                    "128,0))'\" -frames:v 1 f.png"))
                skip();
        file = ffmpeg_file("f.png");
        q = read_picture(file, MEDIA_FIT_STRETCH, 96, 8);
        assert_memory_equal(q, "\xc8\x64\x28", 3);
        assert_memory_equal(q + 48 * 3, "\x64\x32\x14", 3);
        assert_memory_equal(q + 90 * 3, "\0\0\0", 3);
}

/* A JPEG with an EXIF orientation: red, green / blue, white quarters, stored as they are. */
static int jpeg_with_orientation(unsigned orientation) {
        uint8_t exif[36] = {0xff, 0xe1, 0, 34, 'E', 'x', 'i', 'f', 0, 0, 'M', 'M', 0, 42, 0, 0, 0, 8, 0, 1,
                0x01, 0x12, 0, 3, 0, 0, 0, 1, 0, (uint8_t) orientation, 0, 0, 0, 0, 0, 0};
        CLEANUP_CLOSE int plain = ffmpeg_file("g.jpg");
        uint64_t n = file_size(plain);
        CLEANUP_FREE uint8_t *p = malloc(n + sizeof(exif));

        assert_int_equal(pread(plain, p, 2, 0), 2);
        memcpy(p + 2, exif, sizeof(exif));
        assert_int_equal(pread(plain, p + 2 + sizeof(exif), n - 2, 2), n - 2);
        return file_new(p, n + sizeof(exif));
}

static char colour_at(const uint8_t *q, uint32_t width, uint32_t x, uint32_t y) {
        const uint8_t *p = q + ((size_t) y * width + x) * 3;

        if (p[0] > 200 && p[1] > 200 && p[2] > 200)
                return 'w';
        return p[0] > 200 ? 'r' : p[1] > 200 ? 'g' : p[2] > 200 ? 'b' : '?';
}

static void read_exif_orientations_upright(void **state) {
        /* top left, top right, bottom left, bottom right of the upright picture */
        static const char *const want[9] = {
                "", "rgbw", "grwb", "wbgr", "bwrg", "rbgw", "brwg", "wgbr", "gwrb"};

        if (!ffmpeg("-f lavfi -i "
                    "\"color=black:s=64x48,format=rgb24,geq=r='255*(lt(X,32)*lt(Y,24)+gte(X,32)*gte(Y,24))':"
                    "g='255*(gte(X,32))':b='255*(gte(Y,24))'\" -frames:v 1 -q:v 1 -pix_fmt yuvj444p g.jpg"))
                skip();
        for (unsigned o = 1; o <= 8; o++) {
                CLEANUP_CLOSE int file = jpeg_with_orientation(o);
                uint32_t w = o >= 5 ? 48 : 64, h = o >= 5 ? 64 : 48;
                CLEANUP_FREE uint8_t *q = NULL;
                char got[5] = "";
                MediaDone d = probe_file(file);

                assert_int_equal(d.width, w);
                assert_int_equal(d.height, h);
                q = read_picture(file, MEDIA_FIT_STRETCH, w, h);
                for (unsigned i = 0; i < 4; i++)
                        got[i] = colour_at(q, w, i % 2 ? w - 8 : 8, i / 2 ? h - 8 : 8);
                if (strcmp(got, want[o]) != 0)
                        fail_msg("orientation %u: %s, expected %s", o, got, want[o]);
        }
}

/* One picture is a picture, however long it is to be shown; two are a clip. */
static void probe_file_of_one_picture_is_still(void **state) {
        static const struct {
                const char *name, *options;
                bool still;
        } cases[] = {{"i.gif", "-frames:v 1", true}, {"j.gif", "-r 5 -frames:v 1", true}, {"k.gif", "-r 5 -frames:v 2", false},
                {"l.mkv", "-r 5 -frames:v 1 -c:v ffv1", true}, {"m.mkv", "-r 5 -frames:v 2 -c:v ffv1", false}};

        for (size_t i = 0; i < ELEMENTSOF(cases); i++) {
                CLEANUP_CLOSE int file = -EBADF;
                MediaDone d;

                if (!ffmpeg("-f lavfi -i testsrc=s=32x32:r=25 %s %s", cases[i].options, cases[i].name))
                        skip();
                file = ffmpeg_file(cases[i].name);
                d = probe_file(file);
                if (d.still != cases[i].still || (d.frames == 1) != cases[i].still)
                        fail_msg("%s: still %u, %llu frames", cases[i].name, d.still, (unsigned long long) d.frames);
        }
}

static void read_first_of_animation(void **state) {
        CLEANUP_FREE uint8_t *q = NULL, *clip = NULL;
        CLEANUP_CLOSE int file = -EBADF;
        uint64_t n;

        if (!ffmpeg("-f lavfi -i \"color=black:s=32x32:r=12,format=gray,geq=lum=50*N\" -frames:v 4 h.gif"))
                skip();
        file = ffmpeg_file("h.gif");
        q = read_picture(file, MEDIA_FIT_STRETCH, 32, 32);
        assert_true(q[0] < 3);
        clip = read_clip(file, 32, 32, 20, &n);
        assert_int_equal(n, 8);
        assert_true(abs(clip[7 * 32 * 32 * 3] - 150) < 3);
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(write_png_read_same_pixels),
                cmocka_unit_test(read_one_pixel_fills_canvas),
                cmocka_unit_test(read_cover_cuts_centre),
                cmocka_unit_test(read_formats_close_to_source),
                cmocka_unit_test(read_grey_and_16_bits_exact),
                cmocka_unit_test(read_transparent_over_black),
                cmocka_unit_test(read_exif_orientations_upright),
                cmocka_unit_test(probe_file_of_one_picture_is_still),
                cmocka_unit_test(read_first_of_animation),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
