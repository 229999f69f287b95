/* SPDX-License-Identifier: Apache-2.0 */
/* What films are written with where libav lacks encoders: the next best that is right for the format, in the same sandbox, or an error
 * that names what is missing. */
#include "tests/unit/media/film.h"

static bool without(const char *names) {
        return setenv("TEST_WITHOUT", names, 1) == 0;
}

/* Whether the libraries here have an encoder at all: what they lack cannot be tried. */
static bool is_here(const char *name, const char *all_others) {
        CLEANUP_PEER Peer *p = NULL;

        assert_true(without(all_others));
        p = peer_open();
        return strstr(p->hello.formats, name);
}

static void expect_formats(const char *part) {
        CLEANUP_PEER Peer *p = peer_open();

        if (!strstr(p->hello.formats, part))
                fail_msg("\"%s\" is not in \"%s\"", part, p->hello.formats);
}

/* In sync, frame for frame, and the same bytes twice. */
static void check_format(MediaFormat format, const char *codecs) {
        CLEANUP_FREE uint8_t *frames = make_frames();
        CLEANUP_FREE float *sound = make_sound(SAMPLES);
        CLEANUP_CLOSE int a = -EBADF, b = -EBADF;
        CLEANUP_FREE uint8_t *x = NULL, *y = NULL;
        MediaDone d;
        uint64_t n;

        expect_formats(codecs);
        check_round_trip(format);
        a = write_file(format, WIDTH, HEIGHT, frames, FRAMES, sound, SAMPLES);
        b = write_file(format, WIDTH, HEIGHT, frames, FRAMES, sound, SAMPLES);
        n = file_size(a);
        x = malloc(n);
        y = malloc(n);
        assert_int_equal(file_size(b), n);
        assert_int_equal(pread(a, x, n, 0), n);
        assert_int_equal(pread(b, y, n, 0), n);
        assert_memory_equal(x, y, n);
        d = probe_file(a);
        print_message("%s: %s\n", codecs, d.format);
}

static void everything_there_is_the_usual(void **state) {
        assert_true(without(""));
        expect_formats("mp4 (libx264, aac), webm (libvpx-vp9, libopus), mkv (libx264, libopus), png (png)");
}

static void mp4_without_x264_is_av1(void **state) {
        if (!is_here("mp4 (libsvtav1", "libx264"))
                skip();
        check_format(MEDIA_MP4, "mp4 (libsvtav1, aac)");
        check_format(MEDIA_MKV, "mkv (libsvtav1, libopus)");
}

static void mp4_without_x264_and_av1_is_vp9(void **state) {
        if (!is_here("mp4 (libvpx-vp9", "libx264,libsvtav1"))
                skip();
        check_format(MEDIA_MP4, "mp4 (libvpx-vp9, aac)");
        check_format(MEDIA_MKV, "mkv (libvpx-vp9, libopus)");
}

static void mp4_without_aac_has_opus(void **state) {
        if (!is_here("mp4 (libx264, libopus", "aac"))
                skip();
        check_format(MEDIA_MP4, "mp4 (libx264, libopus)");
}

static void mp4_without_x264_and_aac_is_vp9_and_opus(void **state) {
        if (!is_here("mp4 (libvpx-vp9, libopus", "libx264,libsvtav1,aac"))
                skip();
        check_format(MEDIA_MP4, "mp4 (libvpx-vp9, libopus)");
}

static void webm_without_vp9_is_av1(void **state) {
        if (!is_here("webm (libsvtav1", "libvpx-vp9"))
                skip();
        check_format(MEDIA_WEBM, "webm (libsvtav1, libopus)");
}

static void webm_without_opus_has_vorbis(void **state) {
        if (!is_here("libvorbis", "libopus"))
                skip();
        check_format(MEDIA_WEBM, "webm (libvpx-vp9, libvorbis)");
}

static void mkv_without_opus_has_flac(void **state) {
        assert_true(without("libopus"));
        check_format(MEDIA_MKV, "mkv (libx264, flac)");
}

/* SVT-AV1 takes no sides below 64 pixels: it is there, and does not open. */
static void encoder_that_does_not_open_gives_way(void **state) {
        enum { SIDE = 32, N = 5 };
        CLEANUP_FREE uint8_t *frames = NULL, *back = NULL;
        CLEANUP_CLOSE int file = -EBADF;
        uint64_t n;

        if (!is_here("mp4 (libsvtav1", "libx264"))
                skip();
        frames = calloc(N, (size_t) SIDE * SIDE * 3);
        assert_non_null(frames);
        memset(frames, 200, (size_t) SIDE * SIDE * 3 * N);
        file = write_file(MEDIA_MP4, SIDE, SIDE, frames, N, NULL, 0);
        back = read_clip(file, SIDE, SIDE, N + 5, &n);
        assert_int_equal(n, N);
        assert_true(psnr(frames, back, (size_t) SIDE * SIDE * 3 * N) > 35);
}

static void expect_refused(MediaFormat format, const char *lacks, const char *has) {
        CLEANUP_CLOSE int file = file_new(NULL, 0), arena = -EBADF;
        CLEANUP_PEER Peer *p = peer_open();
        MediaMessage m;
        void *map;

        arena = arena_new(1 << 20, &map);
        (void) media_init(&m, MEDIA_WRITE);
        m.write.format = format;
        m.write.width = m.write.height = 64;
        m.write.frames = m.write.ring_frames = 5;
        peer_send(p, &m, file, arena);
        assert_true(peer_receive(p, &m));
        assert_string_equal(media_type_name(m.header.type), "ERROR");
        expect_fault(&m.error.fault, FAULT_NOT_SUPPORTED, lacks);
        expect_fault(&m.error.fault, FAULT_NOT_SUPPORTED, has);
        assert_int_equal(file_size(file), 0);
}

static void nothing_that_fits_is_named(void **state) {
        assert_true(without("libvpx-vp9,libsvtav1"));
        expect_formats("mp4 (libx264, aac), mkv");
        expect_refused(MEDIA_WEBM, "cannot write webm, they lack libvpx-vp9 or libsvtav1.",
                "What can be written here: mp4 (libx264, aac), mkv (");
        assert_true(without("libx264,libsvtav1,libvpx-vp9,aac,libopus"));
        expect_refused(MEDIA_MP4, "they lack libx264 or libsvtav1 or libvpx-vp9, and aac or libopus.",
                "What can be written here: png (png), wav");
        expect_refused(MEDIA_MKV, "they lack libx264 or libsvtav1 or libvpx-vp9. What", "png (png)"); /* it has its sound: FLAC */
        assert_true(without("libx264,libsvtav1,libvpx-vp9,aac,libopus,libvorbis,png,pcm_s16le,flac"));
        expect_refused(MEDIA_MKV, "they lack libx264", "What can be written here: nothing.");
}

/* What latent-media itself must never have: another way in. */
static void product_hides_nothing(void **state) {
        assert_true(without("libx264,aac"));
        peer_set_program("service/media/latent-media");
        expect_formats("mp4 (libx264, aac)");
        peer_set_program("tests/unit/media/media-without");
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(everything_there_is_the_usual),
                cmocka_unit_test(mp4_without_x264_is_av1),
                cmocka_unit_test(mp4_without_x264_and_av1_is_vp9),
                cmocka_unit_test(mp4_without_aac_has_opus),
                cmocka_unit_test(mp4_without_x264_and_aac_is_vp9_and_opus),
                cmocka_unit_test(webm_without_vp9_is_av1),
                cmocka_unit_test(webm_without_opus_has_vorbis),
                cmocka_unit_test(mkv_without_opus_has_flac),
                cmocka_unit_test(encoder_that_does_not_open_gives_way),
                cmocka_unit_test(nothing_that_fits_is_named),
                cmocka_unit_test(product_hides_nothing),
        };

        peer_set_program("tests/unit/media/media-without");
        return cmocka_run_group_tests(tests, NULL, NULL);
}
