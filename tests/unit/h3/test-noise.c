/* SPDX-License-Identifier: Apache-2.0 */
#include "service/h3/noise.h"

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
#include "tests/unit/h3/golden.h"

/* torch computes in f32 with vector functions of its own: this is how far exact arithmetic is from it. */
#define LARGEST 2e-6

static const H3Config config = {.video_channels = 24, .audio_channels = 32, .patch_h = 2, .patch_w = 2};

static void check(const char *what, const float *got, const float *expected, uint64_t n) {
        for (uint64_t i = 0; i < n; i++)
                if (!(fabs((double) got[i] - (double) expected[i]) <= LARGEST))
                        fail_msg("%s[%llu] is %.9g, expected %.9g", what, (unsigned long long) i,
                                (double) got[i], (double) expected[i]);
}

static void check_tensor(const Golden *g, const char *name, const float *got, uint64_t n) {
        uint64_t there;
        const float *expected = golden_data(g, name, ST_F32, &there);

        assert_int_equal(there, n);
        check(name, got, expected, n);
}

static H3Noise generator(uint64_t seed) {
        H3Noise g;

        h3_noise_init(&g, seed);
        return g;
}

static void draw_published_numbers_match(void **state) {
        static const uint64_t seeds[] = {0, 42, 2147483648, 4294967301, 9223372036854775807};
        static const uint64_t sizes[] = {1, 2, 7, 15, 16, 17, 31, 32, 33, 100, 257};
        CLEANUP(golden_freep) Golden *file = golden_open("noise");
        float x[257];

        for (size_t s = 0; s < ELEMENTSOF(seeds); s++)
                for (size_t i = 0; i < ELEMENTSOF(sizes); i++) {
                        H3Noise g = generator(seeds[s]);
                        char name[64];

                        (void) snprintf(name, sizeof(name), "randn.seed%llu.n%llu",
                                (unsigned long long) seeds[s], (unsigned long long) sizes[i]);
                        h3_noise_draw(&g, sizes[i], x);
                        check_tensor(file, name, x, sizes[i]);
                }
}

/* The second of a pair waits for the next draw that is as small, and a large draw does not touch it. */
static void draw_small_keeps_the_spare(void **state) {
        H3Noise a = generator(42), b = generator(42);
        float whole[3], parts[3], large[16];

        h3_noise_draw(&a, 2, whole);
        h3_noise_draw(&b, 1, parts);
        h3_noise_draw(&b, 16, large);
        h3_noise_draw(&b, 1, parts + 1);
        assert_true(memcmp(whole, parts, 2 * sizeof(float)) == 0);
        h3_noise_draw(&a, 16, large);
        h3_noise_draw(&a, 1, whole + 2);
        h3_noise_draw(&b, 1, parts + 2);
        assert_true(whole[2] == parts[2]);
}

static void run_target(const Golden *file, uint64_t t, uint64_t h, uint64_t w, uint64_t a) {
        const H3Shape s = {.text_rows = 1, .frames = t, .height = h, .width = w, .audio = a};
        CLEANUP_FREE float *video = malloc(24 * t * h * w * sizeof(float)),
                           *audio = malloc(64 * a * sizeof(float));
        static const char *const orders[] = {"comfy", "diffusers"};
        char prefix[40], name[80];

        assert_true(video && audio);
        (void) snprintf(
                prefix, sizeof(prefix), "full.seed42.T%dH%dW%dA%d", (int) t, (int) h, (int) w, (int) a);
        for (size_t i = 0; i < ELEMENTSOF(orders); i++) {
                H3Noise g = generator(42);

                assert_int_equal(h3_noise_target(&g, (H3NoiseOrder) i, &config, &s, video, audio), 0);
                (void) snprintf(name, sizeof(name), "%s.video", prefix);
                check_tensor(file, name, video, 24 * t * h * w);
                (void) snprintf(name, sizeof(name), "%s.%s.audio", prefix, orders[i]);
                check_tensor(file, name, audio, 64 * a);
        }
}

static void target_published_orders_match(void **state) {
        CLEANUP(golden_freep) Golden *file = golden_open("noise");

        run_target(file, 2, 4, 4, 8);
        run_target(file, 7, 6, 10, 37);
}

static float float_of(const json_t *hex) {
        uint32_t bits = (uint32_t) strtoul(json_string_value(hex), NULL, 16);
        float f;

        memcpy(&f, &bits, sizeof(f));
        return f;
}

static void check_ends(const char *what, const json_t *entry, const float *x, uint64_t n) {
        double sum = 0, expected = json_real_value(json_object_get(entry, "sum_abs"));

        for (size_t i = 0; i < 8; i++) {
                float first = float_of(json_array_get(json_object_get(entry, "first"), i));
                float last = float_of(json_array_get(json_object_get(entry, "last"), i));

                check(what, x + i, &first, 1);
                check(what, x + n - 8 + i, &last, 1);
        }
        for (uint64_t i = 0; i < n; i++)
                sum += fabs((double) x[i]);
        if (fabs(sum - expected) > 1e-7 * expected)
                fail_msg("%s: the absolute values sum up to %.12g, expected %.12g", what, sum, expected);
}

/* Every seed and shape of the list, one of them of real size. */
static void target_published_seeds_match(void **state) {
        uint64_t size;
        CLEANUP_FREE uint8_t *text = golden_read(NULL, "dit/noise.json", &size);
        json_t *root = json_loadb((const char *) text, size, 0, NULL), *entry;
        size_t i;

        json_array_foreach(json_object_get(root, "draws"), i, entry) {
                const uint64_t seed = strtoull(json_string_value(json_object_get(entry, "seed")), NULL, 10);
                const H3Shape s = {.frames = (uint64_t) json_integer_value(json_object_get(entry, "T")),
                        .height = (uint64_t) json_integer_value(json_object_get(entry, "H")),
                        .width = (uint64_t) json_integer_value(json_object_get(entry, "W")),
                        .audio = (uint64_t) json_integer_value(json_object_get(entry, "A"))};
                uint64_t n_video = 24 * s.frames * s.height * s.width, n_audio = 64 * s.audio;
                CLEANUP_FREE float *video = malloc(n_video * sizeof(float)),
                                   *audio = malloc(n_audio * sizeof(float));
                H3Noise g = generator(seed);

                assert_true(video && audio);
                assert_int_equal(h3_noise_target(&g, H3_NOISE_COMFY, &config, &s, video, audio), 0);
                check_ends("video", json_object_get(entry, "video"), video, n_video);
                check_ends("audio", json_object_get(entry, "audio_comfy_32_2_A"), audio, n_audio);
        }
        assert_true(i > 10);
        json_decref(root);
}

/* diffusers: one generator for the condition and then the target. */
static void condition_diffusers_comes_first(void **state) {
        CLEANUP(golden_freep) Golden *file = golden_open("noise");
        const H3Shape s = {.frames = 2, .height = 4, .width = 4, .audio = 8};
        float condition[24 * 16], video[24 * 32], audio[64 * 8], rows[64 * 8];
        H3Noise g = generator(42);

        h3_noise_draw(&g, ELEMENTSOF(condition), condition);
        assert_int_equal(h3_noise_target(&g, H3_NOISE_DIFFUSERS, &config, &s, video, audio), 0);
        h3_audio_to_rows(&config, 8, audio, 0, 16, rows);
        check_tensor(file, "cond.seed42.diffusers.keyframe", condition, ELEMENTSOF(condition));
        check_tensor(file, "cond.seed42.diffusers.video_after", video, ELEMENTSOF(video));
        check_tensor(file, "cond.seed42.diffusers.audio_rows_after", rows, ELEMENTSOF(rows));
}

static void condition_comfy_is_drawn_as_rows(void **state) {
        CLEANUP(golden_freep) Golden *file = golden_open("noise");
        const H3Grid grid = {1, 4, 4};
        float latent[24 * 16], rows[4 * 96];
        H3Noise g = generator(42);

        assert_int_equal(h3_noise_condition_comfy(&g, &config, &grid, latent), 0);
        h3_video_to_rows(&config, &grid, latent, 0, 4, rows);
        check_tensor(file, "cond.seed42.comfy.rows", rows, ELEMENTSOF(rows));
}

static void check_official(H3Grid grid, uint64_t full_frames) {
        uint64_t full = full_frames > grid.frames ? full_frames : grid.frames,
                 per_frame = grid.height * grid.width;
        uint64_t n = grid.frames * per_frame;
        CLEANUP_FREE float *all = malloc(24 * full * per_frame * sizeof(float)),
                           *latent = malloc(24 * n * sizeof(float));
        H3Noise g = generator(7), own = generator(7);

        assert_true(all && latent);
        h3_noise_condition_official(&own, &config, &grid, full_frames, latent);
        h3_noise_draw(&g, 24 * full * per_frame, all);
        for (uint64_t channel = 0; channel < 24; channel++)
                assert_memory_equal(
                        latent + channel * n, all + channel * full * per_frame, n * sizeof(float));
}

/* Nothing is published: by its rule it is the first frames of a whole draw, to the bit. */
static void condition_official_is_cut_from_a_film(void **state) {
        check_official((H3Grid){2, 4, 6}, 9);
        check_official((H3Grid){5, 2, 2}, 3); /* longer than that */
        check_official(
                (H3Grid){1, 3, 1}, 5); /* blocks of 16 across channels, and a ragged end that counts */
        check_official((H3Grid){1, 1, 1}, 1);
        check_official((H3Grid){5, 1, 1}, 5);
        check_official((H3Grid){1, 5, 7}, 41); /* most of it is skipped */
}

static bool second_time(void *userdata) {
        unsigned *asked = userdata;

        return ++*asked > 1;
}

/* The last range first. */
static void share(uint64_t n, H3NoiseWork work, void *arg) {
        for (uint64_t i = 5; i-- > 0;)
                work(arg, n * i / 5, n * (i + 1) / 5);
}

static void draw_shared_same_bits(void **state) {
        static const uint64_t sizes[] = {15, 16, 17, 31, 32, 1000, 65536, 65537, 200003};

        for (size_t i = 0; i < ELEMENTSOF(sizes); i++) {
                CLEANUP_FREE float *alone = malloc(sizes[i] * sizeof(float)), *shared = malloc(sizes[i] * sizeof(float));
                float next[2][16];
                H3Noise a, b;

                assert_true(alone && shared);
                h3_noise_init(&a, 7 + i);
                h3_noise_init(&b, 7 + i);
                b.share = share;
                h3_noise_draw(&a, sizes[i], alone);
                h3_noise_draw(&b, sizes[i], shared);
                assert_memory_equal(alone, shared, sizes[i] * sizeof(float));
                h3_noise_draw(&a, 16, next[0]); /* and the generator goes on */
                h3_noise_draw(&b, 16, next[1]);
                assert_memory_equal(next[0], next[1], sizeof(next[0]));
        }
}

/* A long draw asks now and then, and ends there. */
static void draw_stopped_ends_early(void **state) {
        const uint64_t n = 1 << 20;
        CLEANUP_FREE float *x = calloc(n, sizeof(float));
        H3Noise g = generator(1);
        unsigned asked = 0;

        assert_non_null(x);
        g.stop = second_time;
        g.stop_userdata = &asked;
        h3_noise_draw(&g, n, x);
        assert_int_equal(asked, 2);
        assert_true(x[0] != 0);
        for (uint64_t i = n / 2; i < n; i++)
                assert_true(x[i] == 0);
}

static void mix_has_one_part_in_a_thousand(void **state) {
        const float z[2] = {2, -1}, noise[2] = {-3, 5};
        float ret[2];

        h3_noise_mix(z, noise, 2, ret);
        assert_true(fabsf(ret[0] - (0.999f * 2 - 0.003f)) < 1e-6f);
        assert_true(fabsf(ret[1] - (-0.999f + 0.005f)) < 1e-6f);
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(draw_published_numbers_match),
                cmocka_unit_test(draw_small_keeps_the_spare),
                cmocka_unit_test(target_published_orders_match),
                cmocka_unit_test(target_published_seeds_match),
                cmocka_unit_test(condition_diffusers_comes_first),
                cmocka_unit_test(condition_comfy_is_drawn_as_rows),
                cmocka_unit_test(condition_official_is_cut_from_a_film),
                cmocka_unit_test(draw_shared_same_bits),
                cmocka_unit_test(draw_stopped_ends_early),
                cmocka_unit_test(mix_has_one_part_in_a_thousand),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
