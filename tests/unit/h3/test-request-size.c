/* SPDX-License-Identifier: Apache-2.0 */
#include "service/h3/request-size.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>
#include <jansson.h>

#include "service/shared/cleanup.h"
#include "tests/unit/h3/golden.h"

static uint64_t number(const json_t *entry, const char *key) {
        const json_t *v = json_object_get(entry, key);

        assert_true(json_is_integer(v));
        return (uint64_t) json_integer_value(v);
}

static json_t *table(const char *name, json_t **ret_root) {
        uint64_t size;
        CLEANUP_FREE uint8_t *text = golden_read(NULL, "dit/layout.json", &size);
        json_t *root = json_loadb((const char *) text, size, 0, NULL);

        assert_non_null(root);
        *ret_root = root;
        return json_object_get(root, name);
}

static void frames_published_roundings_match(void **state) {
        json_t *root, *entry, *list = table("frame_rounding", &root);
        size_t i;

        json_array_foreach(list, i, entry) {
                H3FilmSize s;

                assert_int_equal(h3_request_frames(number(entry, "requested"), &s, NULL), 0);
                assert_int_equal(s.frames, number(entry, "frames"));
                assert_int_equal(s.latent_frames, number(entry, "latent_frames"));
                assert_int_equal(s.audio_latents, number(entry, "audio_latents"));
                assert_int_equal(
                        s.in_reference_range, json_is_true(json_object_get(entry, "in_reference_range")));
        }
        assert_int_equal(i, 19);
        json_decref(root);
}

static void canvas_published_sizes_match(void **state) {
        json_t *root, *entry, *list = table("canvas", &root);
        size_t i;

        json_array_foreach(list, i, entry) {
                const json_t *aspect = json_object_get(entry, "aspect");
                uint64_t w, h;

                assert_int_equal(
                        h3_request_canvas((uint64_t) json_integer_value(json_array_get(aspect, 0)),
                                (uint64_t) json_integer_value(json_array_get(aspect, 1)), &w, &h, NULL),
                        0);
                assert_int_equal(w, number(entry, "width"));
                assert_int_equal(h, number(entry, "height"));
        }
        assert_int_equal(i, 14);
        json_decref(root);
}

static void frames_out_of_range_are_refused(void **state) {
        const uint64_t bad[] = {0, H3_FRAMES_MAX + 1, UINT64_MAX};

        for (size_t i = 0; i < ELEMENTSOF(bad); i++) {
                H3FilmSize s = {.frames = 77};
                Fault f = {};

                assert_int_equal(h3_request_frames(bad[i], &s, &f), -EINVAL);
                assert_string_equal(f.name, FAULT_INVALID_ARGUMENT);
                assert_non_null(strstr(f.text, "1 to 362"));
                assert_int_equal(s.frames, 77);
        }
}

static void canvas_odd_aspects_are_refused(void **state) {
        const uint64_t bad[][2] = {{0, 1}, {1, 0}, {401, 100}, {100, 401}, {UINT64_MAX, UINT64_MAX}};

        for (size_t i = 0; i < ELEMENTSOF(bad); i++) {
                uint64_t w = 1, h = 2;
                Fault f = {};

                assert_int_equal(h3_request_canvas(bad[i][0], bad[i][1], &w, &h, &f), -EINVAL);
                assert_string_equal(f.name, FAULT_INVALID_ARGUMENT);
                assert_non_null(strstr(f.text, "1:4 to 4:1"));
                assert_true(w == 1 && h == 2);
        }
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(frames_published_roundings_match),
                cmocka_unit_test(canvas_published_sizes_match),
                cmocka_unit_test(frames_out_of_range_are_refused),
                cmocka_unit_test(canvas_odd_aspects_are_refused),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
