/* SPDX-License-Identifier: Apache-2.0 */
#include "service/shared/canvas.h"

#include <errno.h>
#include <string.h>

#include "tests/unit/shared/cmocka-all.h"

#include "service/shared/cleanup.h"

static uint32_t frames(uint64_t wanted) {
        uint32_t n = 0;
        Fault f = {};

        assert_int_equal(canvas_frames(wanted, &n, &f), 0);
        return n;
}

static void frames_round_up_to_17k_and_5(void **state) {
        const uint32_t cases[][2] = {{1, 5}, {5, 5}, {6, 22}, {7, 22}, {22, 22}, {23, 39}, {124, 124},
                {125, 141}, {345, 345}, {361, 362}, {362, 362}};

        for (size_t i = 0; i < ELEMENTSOF(cases); i++)
                assert_int_equal(frames(cases[i][0]), cases[i][1]);
}

static void frames_none_or_too_many_are_refused(void **state) {
        const uint64_t cases[] = {0, 363, 1000000000, UINT64_MAX};

        for (size_t i = 0; i < ELEMENTSOF(cases); i++) {
                uint32_t n = 77;
                Fault f = {};

                assert_int_equal(canvas_frames(cases[i], &n, &f), -EINVAL);
                assert_int_equal(n, 77);
                assert_string_equal(f.name, FAULT_INVALID_ARGUMENT);
        }
}

/* The table of h3.md 4.1. */
static void tokens_are_those_of_the_table(void **state) {
        const uint32_t cases[][3] = {{5, 2, 8}, {22, 7, 37}, {124, 37, 207}, {192, 57, 320}, {243, 72, 405},
                {345, 102, 575}, {362, 107, 603}};

        for (size_t i = 0; i < ELEMENTSOF(cases); i++) {
                assert_int_equal(canvas_video_tokens(cases[i][0]), cases[i][1]);
                assert_int_equal(canvas_audio_tokens(cases[i][0]), cases[i][2]);
        }
}

typedef int (*SizeFn)(uint64_t width, uint64_t height, uint32_t *ret_width, uint32_t *ret_height, Fault *f);

static void gives(SizeFn fn, uint64_t w, uint64_t h, uint32_t want_w, uint32_t want_h) {
        uint32_t got_w = 0, got_h = 0;
        Fault f = {};

        if (fn(w, h, &got_w, &got_h, &f) < 0)
                fail_msg("%s", f.text);
        assert_int_equal(got_w, want_w);
        assert_int_equal(got_h, want_h);
}

static void refuses(SizeFn fn, uint64_t w, uint64_t h) {
        uint32_t got_w = 1, got_h = 2;
        Fault f = {};

        assert_int_equal(fn(w, h, &got_w, &got_h, &f), -EINVAL);
        assert_string_equal(f.name, FAULT_INVALID_ARGUMENT);
        assert_true(got_w == 1 && got_h == 2);
}

static void size_goes_to_the_nearest_multiple(void **state) {
        gives(canvas_size, 1344, 768, 1344, 768);
        gives(canvas_size, 33, 31, 32, 32);
        gives(canvas_size, 1, 1, 32, 32);
        gives(canvas_size, 47, 48, 32, 64);
        gives(canvas_size, 4096, 1024, 4096, 1024);
        refuses(canvas_size, 0, 64);
        refuses(canvas_size, 64, 0);
        refuses(canvas_size, 257, 64);
        refuses(canvas_size, 64, 257);
        refuses(canvas_size, 4097, 4096);
        refuses(canvas_size, UINT64_MAX, UINT64_MAX);
}

static void picture_gives_short_edge_768_within_the_area(void **state) {
        gives(canvas_from_picture, 1920, 1080, 1344, 768); /* 1365 x 768 is more than the area */
        gives(canvas_from_picture, 1080, 1920, 768, 1344);
        gives(canvas_from_picture, 64, 64, 768, 768);
        gives(canvas_from_picture, 4000, 3000, 1024, 768);
        gives(canvas_from_picture, 4000, 1000, 2016, 512);
        gives(canvas_from_picture, 1, 1, 768, 768);
        refuses(canvas_from_picture, 4001, 1000);
        refuses(canvas_from_picture, 0, 1);
        refuses(canvas_from_picture, 20000, 1);
}

static CanvasRule rule;

static int reference(uint64_t w, uint64_t h, uint32_t *ret_w, uint32_t *ret_h, Fault *f) {
        return canvas_of_reference(rule, w, h, 160, 96, ret_w, ret_h, f);
}

static int clip(uint64_t w, uint64_t h, uint32_t *ret_w, uint32_t *ret_h, Fault *f) {
        return canvas_of_clip(rule, w, h, ret_w, ret_h, f);
}

/* Another size helps a film, not a reference. */
static void refusal_says_what_helps(void **state) {
        Fault film = {}, picture = {}, of_reference = {}, of_clip = {};
        uint32_t w, h;

        assert_true(canvas_size(16, 400, &w, &h, &film) < 0);
        assert_non_null(strstr(film.text, "ask for another size"));
        assert_true(canvas_from_picture(16, 400, &w, &h, &picture) < 0);
        assert_non_null(strstr(picture.text, "crop the picture, or ask for a size"));
        assert_true(canvas_of_reference(CANVAS_COMFY, 16, 400, 64, 64, &w, &h, &of_reference) < 0);
        assert_true(canvas_of_clip(CANVAS_COMFY, 16, 400, &w, &h, &of_clip) < 0);
        assert_non_null(strstr(of_reference.text, "crop it first"));
        assert_null(strstr(of_reference.text, "ask for"));
        assert_string_equal(of_reference.text, of_clip.text);
}

/* Numbers of the two programs' own expressions, evaluated in Python. */
static void references_get_the_size_of_their_rule(void **state) {
        rule = CANVAS_REFERENCE;
        gives(reference, 128, 128, 2048, 2048);
        gives(reference, 4096, 8192, 2048, 4096);
        gives(reference, 1000, 400, 5120, 2048);
        gives(reference, 1920, 1080, 3648, 2048); /* 3640.9 */
        refuses(reference, 401, 100);
        rule = CANVAS_COMFY;
        gives(reference, 128, 128, 128, 128); /* 123.9 */
        gives(reference, 4000, 4000, 128, 128);
        gives(reference, 1920, 1080, 160, 96); /* 165.2, 92.9 */
        gives(reference, 64, 64, 64, 64); /* never larger */
        gives(reference, 80, 48, 64, 64); /* 2.5 and 1.5: of two the even one */
        gives(reference, 20, 20, 32, 32);
        refuses(reference, 100, 401);
}

static void clips_get_the_size_of_their_rule(void **state) {
        rule = CANVAS_REFERENCE;
        gives(clip, 1920, 1080, 1344, 768);
        gives(clip, 256, 160, 1216, 768); /* 1228.8 is 38.4 steps */
        rule = CANVAS_COMFY;
        gives(clip, 1920, 1080, 1344, 768);
        gives(clip, 256, 160, 256, 160);
        gives(clip, 1280, 720, 1280, 704); /* 22.5 */
        refuses(clip, 100, 401);
}

static void clips_are_cut_to_17m_and_5(void **state) {
        const uint64_t cases[][2] = {{0, 0}, {4, 0}, {5, 5}, {21, 5}, {22, 22}, {38, 22}, {39, 39}, {362, 362}};

        for (size_t i = 0; i < ELEMENTSOF(cases); i++)
                assert_int_equal(canvas_clip_frames(cases[i][0]), cases[i][1]);
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(refusal_says_what_helps),
                cmocka_unit_test(references_get_the_size_of_their_rule),
                cmocka_unit_test(clips_get_the_size_of_their_rule),
                cmocka_unit_test(clips_are_cut_to_17m_and_5),
                cmocka_unit_test(frames_round_up_to_17k_and_5),
                cmocka_unit_test(frames_none_or_too_many_are_refused),
                cmocka_unit_test(tokens_are_those_of_the_table),
                cmocka_unit_test(size_goes_to_the_nearest_multiple),
                cmocka_unit_test(picture_gives_short_edge_768_within_the_area),
        };

        return cmocka_run_group_tests_name("canvas", tests, NULL, NULL);
}
