/* SPDX-License-Identifier: Apache-2.0 */
#include "service/h3/layout.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <jansson.h>

#include "service/shared/cleanup.h"
#include "tests/unit/h3/golden.h"
#include "tests/unit/h3/sha256.h"

DEFINE_CLEANUP(H3Layout *, h3_layout_free)

static const H3Config config = {
        .video_channels = 24, .audio_channels = 32, .patch_h = 2, .patch_w = 2, .rope_freqs = 16};

static uint64_t number(const json_t *entry, const char *key) {
        const json_t *v = json_object_get(entry, key);

        assert_true(json_is_integer(v));
        return (uint64_t) json_integer_value(v);
}

static H3Layout *layout_of(const json_t *entry) {
        const json_t *latent = json_object_get(entry, "latent");
        H3Layout *l = NULL;
        H3Shape s = {
                .text_rows = number(entry, "text_rows"),
                .frames = (uint64_t) json_integer_value(json_array_get(latent, 0)),
                .height = (uint64_t) json_integer_value(json_array_get(latent, 1)),
                .width = (uint64_t) json_integer_value(json_array_get(latent, 2)),
                .audio = number(entry, "audio_latents"),
        };
        Fault f = {};

        if (h3_layout_new(&config, &s, NULL, &l, &f) < 0)
                fail_msg("%s", f.text);
        return l;
}

static void check_segments(const H3Layout *l, const json_t *segments) {
        static const char *const names[] = {"text", "audio", "video"};

        assert_int_equal(l->n_segments, json_array_size(segments));
        for (uint32_t i = 0; i < l->n_segments; i++) {
                const json_t *s = json_array_get(segments, i);

                assert_string_equal(names[l->segments[i].kind], json_string_value(json_array_get(s, 0)));
                assert_int_equal(l->segments[i].begin, json_integer_value(json_array_get(s, 1)));
                assert_int_equal(l->segments[i].end, json_integer_value(json_array_get(s, 2)));
        }
}

static void check_positions(const H3Layout *l, const json_t *positions) {
        const char *row;
        json_t *hex;

        json_object_foreach((json_t *) positions, row, hex) for (size_t axis = 0; axis < 3; axis++) {
                uint64_t bits, expected = strtoull(json_string_value(json_array_get(hex, axis)), NULL, 16);

                memcpy(&bits, &l->position[strtoul(row, NULL, 10)][axis], sizeof(bits));
                if (bits != expected)
                        fail_msg("row %s, axis %zu: %016llx, expected %016llx", row, axis,
                                (unsigned long long) bits, (unsigned long long) expected);
        }
}

static void check_hashes(const H3Layout *l, const json_t *entry) {
        CLEANUP_FREE float *narrow = malloc(l->rows * 3 * sizeof(float));
        char hash[65];

        assert_non_null(narrow);
        sha256_hex(l->position, l->rows * sizeof(*l->position), hash);
        assert_string_equal(hash, json_string_value(json_object_get(entry, "sha256_f64le")));
        for (uint64_t i = 0; i < l->rows * 3; i++)
                narrow[i] = (float) l->position[i / 3][i % 3];
        sha256_hex(narrow, l->rows * 3 * sizeof(float), hash);
        assert_string_equal(hash, json_string_value(json_object_get(entry, "sha256_f32le")));
}

static void layout_published_entries_match(void **state) {
        uint64_t size;
        CLEANUP_FREE uint8_t *text = golden_read(NULL, "dit/layout.json", &size);
        json_t *root = json_loadb((const char *) text, size, 0, NULL), *entry;
        size_t i, n = 0;

        assert_non_null(root);
        json_array_foreach(json_object_get(root, "entries"), i, entry) {
                CLEANUP(h3_layout_freep) H3Layout *l = NULL;

                if (strcmp(json_string_value(json_object_get(entry, "task")), "t2va") != 0)
                        continue;
                l = layout_of(entry);
                assert_int_equal(l->rows, number(entry, "rows"));
                check_segments(l, json_object_get(entry, "segments"));
                check_positions(l, json_object_get(entry, "positions"));
                check_hashes(l, entry);
                n++;
        }
        print_message("%zu entries\n", n);
        assert_true(n >= 5);
        json_decref(root);
}

static void layout_tags_follow_text_and_segment(void **state) {
        CLEANUP(h3_layout_freep) H3Layout *l = NULL;
        const uint8_t tags[] = {1, 0, 0, 1};
        const H3Shape s = {.text_rows = 4, .frames = 2, .height = 2, .width = 4, .audio = 3};
        static const uint8_t expected[] = {1, 0, 0, 1, 2, 2, 2, 2, 2, 2, 0, 0, 0, 0};
        Fault f = {};

        assert_int_equal(h3_layout_new(&config, &s, tags, &l, &f), 0);
        assert_int_equal(l->rows, sizeof(expected));
        assert_memory_equal(l->tag, expected, sizeof(expected));
}

static void refused(const H3Shape *s, const uint8_t *tags, int error, const char *word) {
        H3Layout *l = NULL;
        Fault f = {};

        assert_int_equal(h3_layout_new(&config, s, tags, &l, &f), error);
        assert_string_equal(f.name, FAULT_INVALID_TENSOR);
        if (!strstr(f.text, word))
                fail_msg("no '%s' in: %s", word, f.text);
        assert_null(l);
}

static void layout_bad_shapes_are_refused(void **state) {
        const H3Shape good = {.text_rows = 4, .frames = 2, .height = 4, .width = 4, .audio = 8};
        const uint8_t tags[] = {1, 1, 1, 2};
        H3Shape s;

        s = good, s.text_rows = 0, refused(&s, NULL, -EINVAL, "text");
        s = good, s.frames = 0, refused(&s, NULL, -EINVAL, "T is 0");
        s = good, s.height = 3, refused(&s, NULL, -EINVAL, "H is 3");
        s = good, s.height = 0, refused(&s, NULL, -EINVAL, "H is 0");
        s = good, s.width = 5, refused(&s, NULL, -EINVAL, "W is 5");
        s = good, s.audio = 0, refused(&s, NULL, -EINVAL, "A is 0");
        s = good, s.audio = UINT64_MAX, refused(&s, NULL, -EINVAL, "A is");
        s = good, s.frames = s.height = s.width = 1u << 20, refused(&s, NULL, -EOVERFLOW, "rows");
        refused(&good, tags, -EINVAL, "text_tags[3]");
}

static float *ramp(uint64_t n) {
        float *x = malloc(n * sizeof(*x));

        assert_non_null(x);
        for (uint64_t i = 0; i < n; i++)
                x[i] = (float) i;
        return x;
}

static void rows_of_video_have_published_order(void **state) {
        const H3Shape s = {.text_rows = 1, .frames = 3, .height = 4, .width = 6, .audio = 5};
        uint64_t n = 24 * 3 * 4 * 6, rows = 3 * 2 * 3;
        CLEANUP_FREE float *latent = ramp(n), *packed = calloc(n, sizeof(float)),
                           *back = calloc(n, sizeof(float));

        h3_video_to_rows(&config, &s, latent, 0, rows, packed);
        /* row 10 is frame 1, patch (1, 1); its number 7 * 4 + 1 * 2 + 0 is channel 7, ph 1, pw 0 */
        assert_true(packed[10 * 96 + 30] == latent[((7 * 3 + 1) * 4 + 3) * 6 + 2]);
        h3_rows_to_video(&config, &s, packed, 0, 7, back);
        h3_rows_to_video(&config, &s, packed + 7 * 96, 7, rows, back);
        assert_memory_equal(latent, back, n * sizeof(float));
}

static void rows_of_audio_have_published_order(void **state) {
        const H3Shape s = {.text_rows = 1, .frames = 3, .height = 4, .width = 6, .audio = 5};
        uint64_t n = 32 * 2 * 5;
        CLEANUP_FREE float *latent = ramp(n), *packed = calloc(n, sizeof(float)),
                           *back = calloc(n, sizeof(float));

        h3_audio_to_rows(&config, &s, latent, 0, 10, packed);
        /* row 7 is stereo channel 1, latent 2 */
        assert_true(packed[7 * 32 + 9] == latent[(9 * 2 + 1) * 5 + 2]);
        h3_rows_to_audio(&config, &s, packed, 0, 4, back);
        h3_rows_to_audio(&config, &s, packed + 4 * 32, 4, 10, back);
        assert_memory_equal(latent, back, n * sizeof(float));
}

static void rope_table_part_equals_whole(void **state) {
        const H3Shape s = {.text_rows = 300, .frames = 7, .height = 12, .width = 20, .audio = 40};
        CLEANUP(h3_layout_freep) H3Layout *l = NULL;
        H3Config c = config;
        Fault f = {};
        uint64_t n;

        for (uint32_t k = 0; k < c.rope_freqs; k++)
                c.rope_inv_freq[k] = 1.0f / (float) (k + 1);
        assert_int_equal(h3_layout_new(&c, &s, NULL, &l, &f), 0);
        n = l->rows * 48;

        for (int round = 0; round < 2; round++) {
                CLEANUP_FREE float *cos = calloc(n, sizeof(float)), *sin = calloc(n, sizeof(float));
                CLEANUP_FREE float *part_cos = calloc(n, sizeof(float)),
                                   *part_sin = calloc(n, sizeof(float));

                h3_rope_table(&c, l, 0, l->rows, round, cos, sin);
                h3_rope_table(&c, l, 0, 313, round, part_cos, part_sin);
                h3_rope_table(&c, l, 313, l->rows, round, part_cos + 313 * 48, part_sin + 313 * 48);
                assert_memory_equal(cos, part_cos, n * sizeof(float));
                assert_memory_equal(sin, part_sin, n * sizeof(float));
                for (uint64_t i = 0; round && i < n; i++) {
                        uint32_t bits;

                        memcpy(&bits, cos + i, sizeof(bits));
                        assert_int_equal(bits & 0xffff, 0);
                }
        }
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(layout_published_entries_match),
                cmocka_unit_test(layout_tags_follow_text_and_segment),
                cmocka_unit_test(layout_bad_shapes_are_refused),
                cmocka_unit_test(rows_of_video_have_published_order),
                cmocka_unit_test(rows_of_audio_have_published_order),
                cmocka_unit_test(rope_table_part_equals_whole),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
