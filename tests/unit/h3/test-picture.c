/* SPDX-License-Identifier: Apache-2.0 */
#include "service/h3/picture.h"

#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <jansson.h>

#include "service/shared/cleanup.h"
#include "tests/unit/h3/sha256.h"
#include "tests/unit/h3/text-data.h"

static void json_unref(json_t **j) {
        json_decref(*j);
}

static uint64_t number(const json_t *entry, const char *key) {
        const json_t *v = json_object_get(entry, key);

        assert_true(json_is_integer(v));
        return (uint64_t) json_integer_value(v);
}

static uint64_t element(const json_t *entry, const char *key, size_t i) {
        const json_t *v = json_array_get(json_object_get(entry, key), i);

        assert_true(json_is_integer(v));
        return (uint64_t) json_integer_value(v);
}

static H3PictureSize size_of(const H3PictureRules *rules, uint64_t frames, uint64_t h, uint64_t w) {
        H3PictureSize size = {};
        Fault f = {};

        if (h3_picture_size(rules, frames, h, w, &size, &f) < 0)
                fail_msg("%s", f.text);
        return size;
}

static void size_published_rows_match(void **state) {
        CLEANUP(json_unref) json_t *j = text_json("text/smart_resize.json");
        const json_t *row;
        size_t i, n = 0;

        assert_int_equal(element(j, "image_limits", 0), h3_picture_published.image_min);
        assert_int_equal(element(j, "image_limits", 1), h3_picture_published.image_max);
        assert_int_equal(element(j, "video_limits", 0), h3_picture_published.video_min);
        assert_int_equal(element(j, "video_limits", 1), h3_picture_published.video_max);
        assert_int_equal(element(j, "comfy_limits", 0), h3_picture_comfy.image_min);
        assert_int_equal(element(j, "comfy_limits", 1), h3_picture_comfy.image_max);
        json_array_foreach(json_object_get(j, "rows"), i, row) {
                bool image = strcmp(json_string_value(json_object_get(row, "kind")), "image") == 0;
                uint64_t frames = image ? 0 : number(row, "frames"), h = number(row, "h"),
                         w = number(row, "w");
                H3PictureSize size = size_of(&h3_picture_published, frames, h, w);
                uint64_t tokens = size.height / 32 * (size.width / 32);

                assert_int_equal(size.height, element(row, "out", 0));
                assert_int_equal(size.width, element(row, "out", 1));
                assert_int_equal(tokens, number(row, image ? "tokens" : "tokens_per_block"));
                if (image) {
                        size = size_of(&h3_picture_comfy, 0, h, w);
                        assert_int_equal(size.height, element(row, "out_comfy_limits", 0));
                        assert_int_equal(size.width, element(row, "out_comfy_limits", 1));
                }
                n++;
        }
        assert_true(n > 0);
}

static void size_of_a_video_by_comfys_rules_is_an_images(void **state) {
        H3PictureSize image = size_of(&h3_picture_comfy, 0, 768, 1344),
                      video = size_of(&h3_picture_comfy, 60, 768, 1344);

        assert_int_equal(video.height, image.height);
        assert_int_equal(video.width, image.width);
        assert_int_equal(video.height, 768);
        assert_int_equal(size_of(&h3_picture_published, 60, 768, 1344).height, 480);
}

static void size_bad_edges_are_refused(void **state) {
        const uint64_t bad[][2] = {{0, 10}, {10, 0}, {65537, 65537}, {UINT64_MAX, 1}, {1, 201}, {402, 2}};

        for (size_t i = 0; i < ELEMENTSOF(bad); i++) {
                H3PictureSize size = {1, 2};
                char height[32];
                Fault f = {};

                assert_int_equal(
                        h3_picture_size(&h3_picture_published, i % 2, bad[i][0], bad[i][1], &size, &f),
                        -EINVAL);
                assert_string_equal(f.name, FAULT_INVALID_ARGUMENT);
                (void) snprintf(height, sizeof(height), "x %llu pixels", (unsigned long long) bad[i][0]);
                assert_non_null(strstr(f.text, height));
                assert_true(size.height == 1 && size.width == 2);
        }
        assert_int_equal(size_of(&h3_picture_published, 0, 65536, 65536).height, 4096);
        assert_int_equal(size_of(&h3_picture_published, 0, 1, 200).width, 3648);
}

static int read_rules(const char *name, const char *json, H3PictureRules *ret, Fault *f) {
        const H3File files[] = {
                {.name = "config.json", .bytes = (const uint8_t *) "no JSON", .size = 7},
                {.name = name, .bytes = (const uint8_t *) json, .size = strlen(json)},
        };

        *f = (Fault){};
        return h3_picture_rules_read(files, 2, ret, f);
}

static void expect_rules(const char *name, const char *json, const H3PictureRules *expected) {
        H3PictureRules rules = {};
        Fault f;

        if (read_rules(name, json, &rules, &f) < 0)
                fail_msg("%s: %s", json, f.text);
        assert_memory_equal(&rules, expected, sizeof(rules));
}

#define IMAGES "preprocessor_config.json"
#define VIDEOS "video_preprocessor_config.json"

static void rules_read_limits_of_images_and_videos(void **state) {
        H3PictureRules rules = h3_picture_published;

        expect_rules("other.json", "{\"size\": 3}", &rules);
        expect_rules(IMAGES, "{}", &rules);
        expect_rules(VIDEOS, "{\"size\": null, \"min_pixels\": null, \"image_mean\": null}", &rules);
        rules.image_min = 3136;
        expect_rules(IMAGES,
                "{\"size\": {\"shortest_edge\": 3136, \"longest_edge\": 16777216}, \"patch_size\": 16, \"merge_size\": 2,"
                " \"temporal_patch_size\": 2, \"image_mean\": [0.5, 0.5, 0.5], \"image_std\": [0.5, 0.5, 0.5],"
                " \"resample\": 3, \"rescale_factor\": 0.00392156862745098, \"do_resize\": true, \"more\": [1]}",
                &rules);
        assert_int_equal(size_of(&rules, 0, 96, 160).height, 96);
        assert_int_equal(size_of(&h3_picture_published, 0, 96, 160).height, 224);
        expect_rules(IMAGES, "{\"min_pixels\": 3136, \"size\": {\"shortest_edge\": 5}}", &rules);
        rules.image_max = 4000;
        expect_rules(IMAGES, "{\"min_pixels\": 3136, \"max_pixels\": 4000}", &rules);
        rules = h3_picture_published;
        rules.video_min = 1;
        rules.video_max = UINT64_C(1) << 30;
        expect_rules(VIDEOS, "{\"size\": {\"longest_edge\": 1073741824, \"shortest_edge\": 1}}", &rules);
}

static void rules_read_others_are_refused_by_name(void **state) {
        static const struct {
                const char *json, *says;
                int error;
        } bad[] = {
                {"{\"patch_size\": 14}", "patch_size is not 16", -ENOTSUP},
                {"{\"merge_size\": 1}", "merge_size is not 2", -ENOTSUP},
                {"{\"temporal_patch_size\": \"2\"}", "temporal_patch_size is not 2", -ENOTSUP},
                {"{\"resample\": 2}", "resample is not 3", -ENOTSUP},
                {"{\"rescale_factor\": 0.004}", "rescale_factor is not", -ENOTSUP},
                {"{\"do_normalize\": false}", "do_normalize is not true", -ENOTSUP},
                {"{\"image_mean\": [0.48, 0.46, 0.41]}", "image_mean is not", -ENOTSUP},
                {"{\"image_std\": [0.5, 0.5]}", "image_std is not", -ENOTSUP},
                {"{\"size\": {\"height\": 384, \"width\": 384}}", "size is not", -ENOTSUP},
                {"", "not JSON", -EBADMSG},
                {"[1]", "not a JSON object", -EBADMSG},
                {"{\"size\": 1}", "size is not an object", -EBADMSG},
                {"{\"size\": {\"shortest_edge\": 0}}", "size.shortest_edge", -EBADMSG},
                {"{\"size\": {\"longest_edge\": -1}}", "size.longest_edge", -EBADMSG},
                {"{\"max_pixels\": 1e9}", "max_pixels", -EBADMSG},
                {"{\"max_pixels\": 1073741825}", "max_pixels", -EBADMSG},
                {"{\"min_pixels\": 99999999}", "above the most", -EBADMSG},
                {"{\"min_pixels\": 1, \"min_pixels\": 1}", "not JSON", -EBADMSG},
        };
        CLEANUP_FREE char *large = malloc(65538);
        H3PictureRules rules = {.image_min = 7};
        Fault f;

        for (size_t i = 0; i < ELEMENTSOF(bad); i++) {
                assert_int_equal(read_rules(i % 2 ? VIDEOS : IMAGES, bad[i].json, &rules, &f), bad[i].error);
                assert_string_equal(f.name, bad[i].error == -EBADMSG ? FAULT_INVALID_FILE : FAULT_NOT_SUPPORTED);
                if (!strstr(f.text, bad[i].says) || !strstr(f.text, i % 2 ? VIDEOS : IMAGES))
                        fail_msg("%s: %s", bad[i].json, f.text);
        }
        assert_non_null(large);
        memset(large, ' ', 65537);
        memcpy(large, "{}", 2);
        large[65537] = '\0';
        assert_int_equal(read_rules(IMAGES, large, &rules, &f), -EBADMSG);
        assert_non_null(strstr(f.text, "65536"));
        assert_int_equal(rules.image_min, 7);
}

static uint64_t fnv(const uint8_t *p, uint64_t n) {
        uint64_t h = UINT64_C(0xcbf29ce484222325);

        for (uint64_t i = 0; i < n; i++)
                h = (h ^ p[i]) * UINT64_C(0x100000001b3);
        return h;
}

/* Of the whole matrix: as f32 and as the u8 that it came of. */
static void assert_hashes(const json_t *entry, const float *patches, uint64_t n) {
        CLEANUP_FREE uint8_t *bytes = malloc(n);
        char hash[65];
        unsigned long long want;

        assert_non_null(bytes);
        sha256_hex(patches, n * sizeof(*patches), hash);
        assert_string_equal(hash, json_string_value(json_object_get(entry, "patches_sha256")));
        for (uint64_t i = 0; i < n; i++)
                bytes[i] = (uint8_t) lrint((double) patches[i] * 127.5 + 127.5);
        assert_int_equal(
                sscanf(json_string_value(json_object_get(entry, "patches_fnv1a64")), "%llx", &want), 1);
        assert_true(fnv(bytes, n) == want);
}

static void check_case(const json_t *entry) {
        CLEANUP(golden_freep) Golden *g = NULL;
        CLEANUP_FREE uint8_t *resized = NULL;
        CLEANUP_FREE float *patches = NULL;
        uint64_t h = element(entry, "in", 0), w = element(entry, "in", 1), n, n_rows, off = 0;
        H3PictureRules rules = h3_picture_published;
        const uint8_t *want, *rgb;
        const float *want_patches;
        const int32_t *rows;
        H3PictureSize to;
        char name[256];

        (void) snprintf(name, sizeof(name), "text/preprocess/%s.safetensors",
                json_string_value(json_object_get(entry, "name")));
        g = text_golden(name);
        rules.image_min = element(entry, "limits", 0);
        rules.image_max = element(entry, "limits", 1);
        to = size_of(&rules, 0, h, w);
        assert_int_equal(to.height, element(entry, "out", 0));
        assert_int_equal(to.width, element(entry, "out", 1));
        assert_int_equal(to.height / 16, element(entry, "grid", 1));
        assert_int_equal(to.width / 16, element(entry, "grid", 2));

        rgb = golden_data(g, "rgb", ST_U8, &n);
        assert_int_equal(n, h * w * 3);
        want = golden_data(g, "resized", ST_U8, &n);
        assert_int_equal(n, to.height * to.width * 3);
        resized = malloc(n);
        patches = malloc(n * 2 * sizeof(*patches));
        assert_non_null(resized);
        assert_non_null(patches);
        assert_int_equal(h3_picture_resize(rgb, h, w, to, resized), 0);
        for (uint64_t i = 0; i < n; i++) {
                assert_in_range(abs(resized[i] - want[i]), 0, 1);
                off += resized[i] != want[i];
        }
        assert_true(50 * off <= n); /* 2 in 100 */

        /* Exact from the published pixels on. */
        assert_int_equal(h3_picture_patches(&rules, want, NULL, to.height, to.width, to, patches), 0);
        rows = golden_data(g, "patch_rows", ST_I32, &n_rows);
        want_patches = golden_data(g, "patches", ST_F32, NULL);
        for (uint64_t i = 0; i < n_rows; i++)
                assert_memory_equal(patches + (uint64_t) rows[i] * H3_PATCH_NUMBERS,
                        want_patches + i * H3_PATCH_NUMBERS, H3_PATCH_NUMBERS * sizeof(float));
        assert_hashes(entry, patches, 2 * n);

        /* And with the resize before. */
        assert_int_equal(h3_picture_patches(&rules, rgb, NULL, h, w, to, patches), 0);
        for (uint64_t i = 0; i < n_rows; i++)
                for (uint64_t k = 0; k < H3_PATCH_NUMBERS; k++)
                        assert_true(fabsf(patches[(uint64_t) rows[i] * H3_PATCH_NUMBERS + k] -
                                            want_patches[i * H3_PATCH_NUMBERS + k]) <= 1.001f / 127.5f);
}

static void resize_published_pictures_match(void **state) {
        CLEANUP(json_unref) json_t *j = text_json("text/preprocess/index.json");
        const json_t *entry;
        size_t i, n = 0;

        json_array_foreach(json_object_get(j, "cases"), i, entry) {
                check_case(entry);
                n++;
        }
        assert_true(n > 0);
}

static void fill(uint8_t *p, uint64_t n, uint32_t seed) {
        for (uint64_t i = 0; i < n; i++) {
                seed = seed * 1664525u + 1013904223u;
                p[i] = (uint8_t) (seed >> 24);
        }
}

static double kernel(double x) {
        x = fabs(x);
        return x < 1   ? 1.5 * x * x * x - 2.5 * x * x + 1
               : x < 2 ? -0.5 * x * x * x + 2.5 * x * x - 4 * x + 2
                       : 0;
}

/* One edge by the definition: all places of the old one, most of them with weight 0. */
static double by_definition(const uint8_t *p, uint64_t step, uint64_t from, uint64_t to, uint64_t place) {
        double scale = (double) from / (double) to, wide = fmax(scale, 1.0), sum = 0, all = 0;

        for (uint64_t i = 0; i < from; i++) {
                double weight = kernel(((double) i + 0.5 - ((double) place + 0.5) * scale) / wide);

                sum += weight * p[i * step];
                all += weight;
        }
        return sum / all;
}

static int rounded(double x) {
        return (int) floor(fmin(fmax(x, 0.0), 255.0) + 0.5);
}

/* Sizes of all kinds: both edges, one, wider, narrower, tiny. */
static void resize_any_size_follows_the_rule(void **state) {
        const uint64_t sizes[][4] = {{1, 1, 32, 64}, {2, 3, 64, 32}, {40, 50, 32, 32}, {32, 33, 32, 96},
                {97, 32, 32, 32}, {300, 7, 32, 32}, {5, 64, 96, 64}};

        for (size_t s = 0; s < ELEMENTSOF(sizes); s++) {
                uint64_t h = sizes[s][0], w = sizes[s][1];
                H3PictureSize to = {sizes[s][2], sizes[s][3]};
                CLEANUP_FREE uint8_t *rgb = malloc(h * w * 3), *between = malloc(h * to.width * 3),
                                     *got = malloc(to.height * to.width * 3);

                assert_true(rgb && between && got);
                fill(rgb, h * w * 3, (uint32_t) s + 1);
                assert_int_equal(h3_picture_resize(rgb, h, w, to, got), 0);
                for (uint64_t i = 0; i < h * to.width * 3; i++) {
                        uint64_t y = i / 3 / to.width, x = i / 3 % to.width;

                        between[i] =
                                (uint8_t) rounded(by_definition(rgb + y * w * 3 + i % 3, 3, w, to.width, x));
                }
                for (uint64_t i = 0; i < to.height * to.width * 3; i++) {
                        uint64_t y = i / 3 / to.width, x = i / 3 % to.width;
                        double want = by_definition(between + x * 3 + i % 3, to.width * 3, h, to.height, y);

                        assert_true(got[i] == rounded(want) ||
                                    fabs(fabs(want - floor(want)) - 0.5) < 1e-9); /* a tie */
                }
        }
}

static void resize_a_plain_picture_stays_plain(void **state) {
        uint8_t rgb[9 * 5 * 3], got[64 * 32 * 3];

        for (size_t i = 0; i < sizeof(rgb); i++)
                rgb[i] = (uint8_t) (50 + 100 * (i % 3));
        assert_int_equal(h3_picture_resize(rgb, 9, 5, (H3PictureSize){64, 32}, got), 0);
        for (size_t i = 0; i < sizeof(got); i++)
                assert_int_equal(got[i], 50 + 100 * (i % 3));
}

static void resize_bad_sizes_are_refused(void **state) {
        uint8_t rgb[3] = {}, got[3];
        float patches[1];

        assert_int_equal(h3_picture_resize(rgb, 0, 1, (H3PictureSize){1, 1}, got), -EINVAL);
        assert_int_equal(h3_picture_resize(rgb, 1, 65537, (H3PictureSize){1, 1}, got), -EINVAL);
        assert_int_equal(h3_picture_resize(rgb, 1, 1, (H3PictureSize){0, 1}, got), -EINVAL);
        assert_int_equal(h3_picture_resize(rgb, 1, 1, (H3PictureSize){1, UINT64_MAX}, got), -EINVAL);
        assert_int_equal(
                h3_picture_patches(&h3_picture_published, rgb, NULL, 1, 1, (H3PictureSize){32, 33}, patches),
                -EINVAL);
        assert_int_equal(
                h3_picture_patches(&h3_picture_comfy, rgb, NULL, 0, 1, (H3PictureSize){32, 32}, patches),
                -EINVAL);
}

/* Where a number of a picture's stands, from the rule: (gh / 2, gw / 2, 2, 2), then (c, t, y, x). */
static uint64_t place(H3PictureSize size, uint64_t y, uint64_t x, uint64_t c, uint64_t t) {
        uint64_t gw = size.width / 16, token = y / 32 * (gw / 2) + x / 32,
                 inner = y / 16 % 2 * 2 + x / 16 % 2;

        return (token * 4 + inner) * 1536 + c * 512 + t * 256 + y % 16 * 16 + x % 16;
}

static void patches_two_frames_fill_both_slots(void **state) {
        const H3PictureSize size = {64, 96};
        const uint64_t n = size.height * size.width * 3;
        CLEANUP_FREE uint8_t *first = malloc(n), *second = malloc(n);
        CLEANUP_FREE float *patches = malloc(2 * n * sizeof(*patches));

        assert_true(first && second && patches);
        fill(first, n, 3);
        fill(second, n, 4);
        assert_int_equal(h3_picture_patches(&h3_picture_published, first, second, 64, 96, size, patches), 0);
        for (uint64_t i = 0; i < n; i++) {
                uint64_t y = i / 3 / size.width, x = i / 3 % size.width;

                assert_true(patches[place(size, y, x, i % 3, 0)] == ((float) first[i] - 127.5f) / 127.5f);
                assert_true(patches[place(size, y, x, i % 3, 1)] == ((float) second[i] - 127.5f) / 127.5f);
        }
}

/* ComfyUI's in f64, from the definition: pixel centres at one half, the picture's edge repeated. */
static double interpolated(
        const uint8_t *rgb, uint64_t h, uint64_t w, H3PictureSize to, uint64_t y, uint64_t x, uint64_t c) {
        double down = ((double) y + 0.5) * (double) h / (double) to.height - 0.5,
               right = ((double) x + 0.5) * (double) w / (double) to.width - 0.5, sum = 0;

        down = fmin(fmax(down, 0), (double) (h - 1));
        right = fmin(fmax(right, 0), (double) (w - 1));
        for (uint64_t i = 0; i < h; i++)
                for (uint64_t k = 0; k < w; k++)
                        sum += fmax(0, 1 - fabs(down - (double) i)) * fmax(0, 1 - fabs(right - (double) k)) *
                               rgb[(i * w + k) * 3 + c];
        return sum / 127.5 - 1;
}

static void patches_bilinear_match_f64(void **state) {
        const uint64_t sizes[][4] = {{1, 1, 64, 64}, {20, 30, 32, 64}, {50, 40, 64, 32}, {32, 32, 32, 32}};

        for (size_t s = 0; s < ELEMENTSOF(sizes); s++) {
                uint64_t h = sizes[s][0], w = sizes[s][1];
                H3PictureSize to = {sizes[s][2], sizes[s][3]};
                CLEANUP_FREE uint8_t *rgb = malloc(h * w * 3);
                CLEANUP_FREE float *patches = malloc(to.height * to.width * 6 * sizeof(*patches));

                assert_true(rgb && patches);
                fill(rgb, h * w * 3, (uint32_t) s + 7);
                assert_int_equal(h3_picture_patches(&h3_picture_comfy, rgb, NULL, h, w, to, patches), 0);
                for (uint64_t i = 0; i < to.height * to.width * 3; i++) {
                        uint64_t y = i / 3 / to.width, x = i / 3 % to.width;
                        double want = interpolated(rgb, h, w, to, y, x, i % 3);

                        /* two f32 roundings of a share up to 64 places away, and those of the sum */
                        assert_true(fabs(patches[place(to, y, x, i % 3, 0)] - want) < 2e-5);
                        assert_true(
                                patches[place(to, y, x, i % 3, 0)] == patches[place(to, y, x, i % 3, 1)]);
                }
        }
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(size_published_rows_match),
                cmocka_unit_test(size_of_a_video_by_comfys_rules_is_an_images),
                cmocka_unit_test(size_bad_edges_are_refused),
                cmocka_unit_test(rules_read_limits_of_images_and_videos),
                cmocka_unit_test(rules_read_others_are_refused_by_name),
                cmocka_unit_test(resize_published_pictures_match),
                cmocka_unit_test(resize_any_size_follows_the_rule),
                cmocka_unit_test(resize_a_plain_picture_stays_plain),
                cmocka_unit_test(resize_bad_sizes_are_refused),
                cmocka_unit_test(patches_two_frames_fill_both_slots),
                cmocka_unit_test(patches_bilinear_match_f64),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
