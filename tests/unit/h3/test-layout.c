/* SPDX-License-Identifier: Apache-2.0 */
#include "service/h3/layout.h"

#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

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

static H3ConditionKind kind_of(const json_t *entry) {
        static const char *const kinds[] = {"keyframe", "image", "video", "audio"};
        const char *kind = json_string_value(json_object_get(entry, "kind"));

        for (size_t i = 0; i < ELEMENTSOF(kinds); i++)
                if (strcmp(kinds[i], kind) == 0)
                        return (H3ConditionKind) i;
        fail_msg("a condition of the unknown kind %s", kind);
        return H3_CONDITION_KEYFRAME;
}

static H3Condition condition_of(const json_t *entry, const H3Shape *s) {
        H3Condition k = {.kind = kind_of(entry)};

        if (k.kind == H3_CONDITION_KEYFRAME) {
                k.frame = number(entry, "frame");
                k.grid = (H3Grid){1, s->height, s->width};
                return k;
        }
        k.grid = (H3Grid){number(entry, "T"), number(entry, "H"), number(entry, "W")};
        k.audio = number(entry, "A");
        return k;
}

static H3Layout *layout_of(const json_t *entry) {
        const json_t *latent = json_object_get(entry, "latent"), *conds = json_object_get(entry, "conds");
        H3Condition conditions[H3_CONDITIONS_MAX];
        H3Layout *l = NULL;
        H3Shape s = {
                .text_rows = number(entry, "text_rows"),
                .frames = (uint64_t) json_integer_value(json_array_get(latent, 0)),
                .height = (uint64_t) json_integer_value(json_array_get(latent, 1)),
                .width = (uint64_t) json_integer_value(json_array_get(latent, 2)),
                .audio = number(entry, "audio_latents"),
                .n_conditions = (uint32_t) json_array_size(conds),
                .conditions = conditions,
        };
        Fault f = {};

        assert_int_equal(h3_film_frames(s.frames), number(entry, "frames"));
        assert_true(s.n_conditions <= H3_CONDITIONS_MAX);
        for (uint32_t i = 0; i < s.n_conditions; i++)
                conditions[i] = condition_of(json_array_get(conds, i), &s);
        if (h3_layout_new(&config, &s, NULL, &l, &f) < 0)
                fail_msg("%s", f.text);
        return l;
}

/* As the reference names a segment of ours. */
static const char *segment_name(const H3Layout *l, const H3Segment *s) {
        static const char *const visual[] = {"keyframe", "ref_image", "ref_video"};

        if (s->kind == H3_SEGMENT_TEXT)
                return "text";
        if (s->kind == H3_SEGMENT_AUDIO)
                return s->condition < 0 ? "audio" : "ref_audio";
        return s->condition < 0 ? "video" : visual[l->conditions[s->condition].kind];
}

static void check_segments(const H3Layout *l, const json_t *segments) {
        assert_int_equal(l->n_segments, json_array_size(segments));
        for (uint32_t i = 0; i < l->n_segments; i++) {
                const json_t *s = json_array_get(segments, i);

                assert_string_equal(
                        segment_name(l, l->segments + i), json_string_value(json_array_get(s, 0)));
                assert_int_equal(l->segments[i].begin, json_integer_value(json_array_get(s, 1)));
                assert_int_equal(l->segments[i].end, json_integer_value(json_array_get(s, 2)));
        }
}

static double double_of(const json_t *hex) {
        uint64_t bits = strtoull(json_string_value(hex), NULL, 16);
        double d;

        memcpy(&d, &bits, sizeof(d));
        return d;
}

/* The reference sums the frames before a last frame in pairs: another last bit of t. Its value is put into
 * our rows, if it is that near, so that everything else of the entry can still be compared to the bit. */
static void adopt_last_frame(H3Layout *l, const json_t *entry) {
        const json_t *positions = json_object_get(entry, "positions");

        for (uint32_t i = 0; i < l->n_segments; i++) {
                const H3Segment *s = l->segments + i;
                const H3Condition *k = s->condition < 0 ? NULL : l->conditions + s->condition;
                char row[24];
                double t;

                if (!k || k->kind != H3_CONDITION_KEYFRAME || k->frame + 1 != number(entry, "frames"))
                        continue;
                (void) snprintf(row, sizeof(row), "%llu", (unsigned long long) s->begin);
                t = double_of(json_array_get(json_object_get(positions, row), 0));
                assert_true(t != 0 && fabs(t - l->position[s->begin][0]) <= 2.3e-13);
                assert_true((float) t == (float) l->position[s->begin][0]);
                for (uint64_t j = s->begin; j < s->end; j++)
                        l->position[j][0] = t;
        }
}

static void check_positions(const H3Layout *l, const json_t *positions) {
        const char *row;
        json_t *hex;

        json_object_foreach((json_t *) positions, row, hex) for (size_t axis = 0; axis < 3; axis++) {
                double expected = double_of(json_array_get(hex, axis));
                const double *got = l->position[strtoul(row, NULL, 10)] + axis;

                if (memcmp(got, &expected, sizeof(expected)) != 0)
                        fail_msg("row %s, axis %zu: %a, expected %a", row, axis, *got, expected);
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

static void check_entry(const json_t *entry) {
        CLEANUP(h3_layout_freep) H3Layout *l = layout_of(entry);

        assert_int_equal(l->rows, number(entry, "rows"));
        check_segments(l, json_object_get(entry, "segments"));
        adopt_last_frame(l, entry);
        check_positions(l, json_object_get(entry, "positions"));
        check_hashes(l, entry);
}

static void layout_published_entries_match(void **state) {
        uint64_t size;
        CLEANUP_FREE uint8_t *text = golden_read(NULL, "dit/layout.json", &size);
        json_t *root = json_loadb((const char *) text, size, 0, NULL), *entry;
        size_t i;

        assert_non_null(root);
        json_array_foreach(json_object_get(root, "entries"), i, entry) check_entry(entry);
        assert_int_equal(i, 25);
        json_decref(root);
}

/* A film of 2 x 2 patches with everything that diffusers has no name for: a clip with sound in the middle, a
 * sound alone, and references after them (ComfyUI's order and times). */
static void layout_guides_sit_in_the_films_time(void **state) {
        const H3Condition conditions[] = {
                {.kind = H3_CONDITION_KEYFRAME, .frame = 3, .grid = {2, 4, 4}, .audio = 2},
                {.kind = H3_CONDITION_KEYFRAME, .frame = 9, .audio = 1},
                {.kind = H3_CONDITION_IMAGE, .grid = {1, 2, 2}},
                {.kind = H3_CONDITION_AUDIO, .audio = 3},
        };
        const H3Shape s = {.text_rows = 4,
                .frames = 7,
                .height = 4,
                .width = 4,
                .audio = 5,
                .n_conditions = ELEMENTSOF(conditions),
                .conditions = conditions};
        const double origin = 4 + 1 + 3; /* text, image, sound */
        const struct {
                uint64_t row;
                double t, h, w;
                uint8_t tag;
        } expected[] = {
                {4, origin + 5.0, 0, 0, 0},              /* the clip's first frame */
                {9, origin + 5.0 + 5.0 / 3.0, 0, 16, 0}, /* its second one */
                {12, origin + 5.0, 0, 0, 2},             /* its sound */
                {15, origin + 5.0 + 1, 0, 16, 2},        /* other channel, second latent */
                {16, origin + 15.0, 0, 0, 2},            /* the sound alone */
                {18, 4, 0, 0, 0},                        /* the image */
                {19, 5, 0, 0, 2},                        /* reference sound */
                {24, 7, 0, 16, 2},                       /* its last row */
                {25, origin, 0, 0, 2},                   /* the film's sound */
                {35, origin, 0, 0, 0},                   /* the film */
                {36 + 4, origin + 5.0 / 3.0, 0, 16, 0},
        };
        CLEANUP(h3_layout_freep) H3Layout *l = NULL;
        Fault f = {};

        if (h3_layout_new(&config, &s, NULL, &l, &f) < 0)
                fail_msg("%s", f.text);
        assert_int_equal(l->rows, 4 + (8 + 4) + 2 + 1 + 6 + 10 + 28);
        assert_int_equal(l->n_segments, 8);
        assert_int_equal(l->timesteps_max, 4);
        for (size_t i = 0; i < ELEMENTSOF(expected); i++) {
                const double *p = l->position[expected[i].row];

                if (fabs(p[0] - expected[i].t) > 1e-12 || p[1] != expected[i].h || p[2] != expected[i].w ||
                        l->tag[expected[i].row] != expected[i].tag)
                        fail_msg("row %llu is at (%g, %g, %g) with tag %u",
                                (unsigned long long) expected[i].row, p[0], p[1], p[2],
                                l->tag[expected[i].row]);
        }
}

/* A row has the place that it has in the padded latent. */
static void layout_odd_sizes_are_padded(void **state) {
        const H3Shape odd = {.text_rows = 2, .frames = 2, .height = 5, .width = 3, .audio = 3};
        const H3Shape even = {.text_rows = 2, .frames = 2, .height = 6, .width = 4, .audio = 3};
        CLEANUP(h3_layout_freep) H3Layout *a = NULL, *b = NULL;

        assert_int_equal(h3_layout_new(&config, &odd, NULL, &a, NULL), 0);
        assert_int_equal(h3_layout_new(&config, &even, NULL, &b, NULL), 0);
        assert_int_equal(a->rows, b->rows);
        assert_memory_equal(a->position, b->position, a->rows * sizeof(*a->position));
}

/* The first video takes the 207 units of its sound, the second one those of its frames. 200,000 rows: a film
 * of 345 frames with four pictures, two videos with sound, and long text. */
static void layout_large_request_is_placed(void **state) {
        const H3Condition conditions[] = {
                {.kind = H3_CONDITION_VIDEO, .grid = {37, 48, 84}, .audio = 207},
                {.kind = H3_CONDITION_IMAGE, .grid = {1, 128, 228}},
                {.kind = H3_CONDITION_VIDEO, .grid = {37, 48, 84}},
                {.kind = H3_CONDITION_IMAGE, .grid = {1, 128, 228}},
                {.kind = H3_CONDITION_IMAGE, .grid = {1, 100, 146}},
        };
        const H3Shape s = {.text_rows = 4000,
                .frames = 102,
                .height = 48,
                .width = 84,
                .audio = 575,
                .n_conditions = ELEMENTSOF(conditions),
                .conditions = conditions};
        CLEANUP(h3_layout_freep) H3Layout *l = NULL;
        const H3Segment *video;
        double span = 0;

        assert_int_equal(h3_layout_new(&config, &s, NULL, &l, NULL), 0);
        assert_true(l->rows >= 200000);
        print_message("%llu rows\n", (unsigned long long) l->rows);
        video = h3_layout_video(l);
        assert_int_equal(video->end, l->rows);
        assert_int_equal(video->end - video->begin, 102 * 24 * 42);
        for (int k = 0; k < 37; k++)
                span += 5.0 / 3.0 * (k % 5 == 0 ? 1 : 4);
        assert_true(fabs(l->position[video->begin][0] - (4000 + 207 + span + 3)) < 1e-9);
        assert_true(fabs(l->position[l->rows - 1][0] - (4000 + 207 + span + 3 + 5.0 / 3.0 * 341)) < 1e-9);
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
        s = good, s.height = 0, refused(&s, NULL, -EINVAL, "H is 0");
        s = good, s.width = (1u << 20) + 1, refused(&s, NULL, -EINVAL, "W is 1048577");
        s = good, s.audio = 0, refused(&s, NULL, -EINVAL, "A is 0");
        s = good, s.audio = UINT64_MAX, refused(&s, NULL, -EINVAL, "A is");
        s = good, s.frames = s.height = s.width = 1u << 20, refused(&s, NULL, -EOVERFLOW, "rows");
        s = good, s.n_conditions = H3_CONDITIONS_MAX + 1, refused(&s, NULL, -EINVAL, "31 conditions");
        refused(&good, tags, -EINVAL, "text_tags[3]");
}

static void refused_condition(const H3Condition *k, int error, const char *word) {
        const H3Condition two[] = {{.kind = H3_CONDITION_IMAGE, .grid = {1, 2, 2}}, *k};
        const H3Shape s = {.text_rows = 4,
                .frames = 7,
                .height = 4,
                .width = 6,
                .audio = 8,
                .n_conditions = 2,
                .conditions = two};

        refused(&s, NULL, error, word);
}

static void layout_bad_conditions_are_refused(void **state) {
        const H3Condition wrong[] = {
                {.kind = H3_CONDITION_KEYFRAME, .frame = 22, .grid = {1, 4, 6}},
                {.kind = H3_CONDITION_KEYFRAME, .frame = 21},
                {.kind = H3_CONDITION_KEYFRAME, .grid = {1, 6, 4}},
                {.kind = H3_CONDITION_IMAGE, .grid = {2, 4, 4}},
                {.kind = H3_CONDITION_IMAGE, .grid = {1, 4, 4}, .audio = 1},
                {.kind = H3_CONDITION_IMAGE, .grid = {1, 0, 4}},
                {.kind = H3_CONDITION_VIDEO, .audio = 3},
                {.kind = H3_CONDITION_VIDEO, .grid = {5, 4, 4}, .audio = UINT64_MAX},
                {.kind = H3_CONDITION_AUDIO},
                {.kind = H3_CONDITION_AUDIO, .grid = {1, 4, 4}, .audio = 3},
                {.kind = (H3ConditionKind) 4, .grid = {1, 4, 4}},
        };
        static const char *const words[] = {"frames 0 to 21", "latent is missing", "4 x 6", "2 frames",
                "1 audio latents", "height H is 0", "no video latent", "audio latents A is",
                "0 audio latents", "latent of 1 frames", "kind is number 4"};

        _Static_assert(ELEMENTSOF(wrong) == ELEMENTSOF(words), "one word each");
        for (size_t i = 0; i < ELEMENTSOF(wrong); i++)
                refused_condition(wrong + i, -EINVAL, words[i]);
        refused_condition(&(H3Condition){.kind = H3_CONDITION_VIDEO, .grid = {1u << 20, 1u << 20, 1u << 20}},
                -EOVERFLOW, "rows");
}

static float *ramp(uint64_t n) {
        float *x = malloc(n * sizeof(*x));

        assert_non_null(x);
        for (uint64_t i = 0; i < n; i++)
                x[i] = (float) i;
        return x;
}

static void rows_of_video_have_published_order(void **state) {
        const H3Grid g = {3, 4, 6};
        uint64_t n = 24 * 3 * 4 * 6, rows = 3 * 2 * 3;
        CLEANUP_FREE float *latent = ramp(n), *packed = calloc(n, sizeof(float)),
                           *back = calloc(n, sizeof(float));

        h3_video_to_rows(&config, &g, latent, 0, rows, packed);
        /* row 10 is frame 1, patch (1, 1); its number 7 * 4 + 1 * 2 + 0 is channel 7, ph 1, pw 0 */
        assert_true(packed[10 * 96 + 30] == latent[((7 * 3 + 1) * 4 + 3) * 6 + 2]);
        h3_rows_to_video(&config, &g, packed, 0, 7, back);
        h3_rows_to_video(&config, &g, packed + 7 * 96, 7, rows, back);
        assert_memory_equal(latent, back, n * sizeof(float));
}

static void rows_of_odd_video_go_round(void **state) {
        const H3Grid g = {2, 5, 3};
        uint64_t n = 24 * 2 * 5 * 3, rows = 2 * 3 * 2;
        CLEANUP_FREE float *latent = ramp(n), *packed = calloc(rows * 96, sizeof(float)),
                           *back = calloc(n, sizeof(float));
        const float *row;

        h3_video_to_rows(&config, &g, latent, 0, rows, packed);
        row = packed + (6 + 5) * 96 +
              4 * 4; /* frame 1, patch (2, 1), channel 4: rows 4 and 0, columns 2 and 0 */
        assert_true(row[0] == latent[((4 * 2 + 1) * 5 + 4) * 3 + 2]);
        assert_true(row[1] == latent[((4 * 2 + 1) * 5 + 4) * 3 + 0]);
        assert_true(row[2] == latent[((4 * 2 + 1) * 5 + 0) * 3 + 2]);
        assert_true(row[3] == latent[((4 * 2 + 1) * 5 + 0) * 3 + 0]);

        for (uint64_t i = 0; i < rows * 96; i++) { /* what is said about the padding must not come back */
                uint64_t y = i / 96 % 6 / 2 * 2 + i / 2 % 2, x = i / 96 % 2 * 2 + i % 2;

                packed[i] += y >= 5 || x >= 3 ? 1e6f : 0;
        }
        h3_rows_to_video(&config, &g, packed, 0, rows, back);
        assert_memory_equal(latent, back, n * sizeof(float));
}

/* More than 2^31 numbers: only the pages that are touched exist. */
static void rows_beyond_two_to_the_31_are_found(void **state) {
        const H3Grid g = {92, 1000, 1000};
        uint64_t n = 24 * g.frames * g.height * g.width, rows = g.frames * 500 * 500;
        float *latent = mmap(NULL, n * sizeof(float), PROT_READ | PROT_WRITE,
                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        float row[96];

        assert_true(n > UINT64_C(1) << 31 && latent != MAP_FAILED);
        latent[n - 1] = 7;
        latent[n - 1 - g.width] = 5;
        h3_video_to_rows(&config, &g, latent, rows - 1, rows, row);
        assert_true(row[95] == 7 && row[93] == 5 && row[94] == 0);
        row[94] = 3;
        h3_rows_to_video(&config, &g, row, rows - 1, rows, latent);
        assert_true(latent[n - 2] == 3 && latent[n - 1] == 7);
        assert_int_equal(munmap(latent, n * sizeof(float)), 0);
}

static void rows_of_audio_have_published_order(void **state) {
        uint64_t n = 32 * 2 * 5;
        CLEANUP_FREE float *latent = ramp(n), *packed = calloc(n, sizeof(float)),
                           *back = calloc(n, sizeof(float));

        h3_audio_to_rows(&config, 5, latent, 0, 10, packed);
        /* row 7 is stereo channel 1, latent 2 */
        assert_true(packed[7 * 32 + 9] == latent[(9 * 2 + 1) * 5 + 2]);
        h3_rows_to_audio(&config, 5, packed, 0, 4, back);
        h3_rows_to_audio(&config, 5, packed + 4 * 32, 4, 10, back);
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

                h3_rope_table(&c, l, NULL, 0, l->rows, round, cos, sin);
                h3_rope_table(&c, l, NULL, 0, 313, round, part_cos, part_sin);
                h3_rope_table(&c, l, NULL, 313, l->rows, round, part_cos + 313 * 48, part_sin + 313 * 48);
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
                cmocka_unit_test(layout_guides_sit_in_the_films_time),
                cmocka_unit_test(layout_odd_sizes_are_padded),
                cmocka_unit_test(layout_large_request_is_placed),
                cmocka_unit_test(layout_tags_follow_text_and_segment),
                cmocka_unit_test(layout_bad_shapes_are_refused),
                cmocka_unit_test(layout_bad_conditions_are_refused),
                cmocka_unit_test(rows_of_video_have_published_order),
                cmocka_unit_test(rows_of_odd_video_go_round),
                cmocka_unit_test(rows_beyond_two_to_the_31_are_found),
                cmocka_unit_test(rows_of_audio_have_published_order),
                cmocka_unit_test(rope_table_part_equals_whole),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
