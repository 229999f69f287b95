/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "service/shared/cleanup.h"
#include "tests/unit/h3/video.h"

/* Encoding against the published numbers. Limit: README of the golden data. */
#define REL_MAX 5e-5

typedef struct Case {
        const json_t *json;
        Golden *file;
        H3VideoEncodePlan plan;
        float **tiles;
        float *moments;
        VideoTaps taps;
        uint64_t latents; /* positions of the result */
} Case;

static void case_plan(const Video *v, const json_t *json, Case *ret) {
        const json_t *size = json_object_get(json, "size");
        char path[160];
        Fault f = {};

        *ret = (Case){.json = json};
        (void) snprintf(path, sizeof(path), "vae/video/encode_%s.safetensors",
                json_string_value(json_object_get(json, "name")));
        ret->file = golden_open_at(path);
        if (h3_video_encode_plan(v->vae, video_case_number(json, "frames", 0),
                    (uint64_t) json_integer_value(json_array_get(size, 0)),
                    (uint64_t) json_integer_value(json_array_get(size, 1)), video_case_tiling(json),
                    &ret->plan, &f) < 0)
                fail_msg("%s", f.text);
        ret->latents = (uint64_t) ret->plan.tokens * (ret->plan.height / 16) * (ret->plan.width / 16);
}

static void case_run(const Video *v, const json_t *json, bool taps, Case *ret) {
        H3StepHooks hooks = {.on_tap = video_tap_record, .userdata = &ret->taps};
        const uint8_t *rgb;

        case_plan(v, json, ret);
        rgb = golden_data(ret->file, "rgb", ST_U8, NULL);
        ret->tiles = video_encode_all(v->vae, &ret->plan, H3_PIXELS_U8, rgb, taps ? &hooks : NULL);
        ret->moments = video_moments_all(v->vae, &ret->plan, ret->tiles);
}

static void case_done(Case *c) {
        video_tiles_free(c->tiles, h3_video_encode_jobs(&c->plan));
        video_taps_free(&c->taps);
        free(c->moments);
        (void) golden_free(c->file);
}

/* tile.I of a tiled case, clip.I of one that is not. */
static void check_raw(const Case *c) {
        uint64_t jobs = h3_video_encode_jobs(&c->plan);
        uint64_t n = (uint64_t) c->plan.clip_tokens * (c->plan.rows.size / 16) * (c->plan.cols.size / 16);
        bool tiled = h3_video_encode_tiles(&c->plan) > 1;

        for (uint64_t i = 0; i < jobs; i++) {
                CLEANUP_FREE float *got = video_transposed(c->tiles[i], n, 48);
                char name[40];

                (void) snprintf(name, sizeof(name), "%s.%llu.moments", tiled ? "tile" : "clip",
                        (unsigned long long) i);
                if (tiled || video_has(c->file, name))
                        video_check(c->file, name, got, 48 * n, REL_MAX, 0);
        }
}

static void check_latents(const Video *v, const Case *c) {
        CLEANUP_FREE float *z = malloc(24 * c->latents * sizeof(float));

        video_check(c->file, "moments", c->moments, 48 * c->latents, REL_MAX, 0);
        video_check(c->file, "mean", c->moments, 24 * c->latents, REL_MAX, 0);
        h3_video_latent_mean(v->vae, c->moments, c->latents, z);
        video_check(c->file, "z", z, 24 * c->latents, REL_MAX, 0);
        if (!video_has(c->file, "condition"))
                return;
        assert_int_equal(h3_video_latent_sample(v->vae, c->moments, c->latents, H3_VIDEO_SAMPLE_SEED, z), 0);
        video_check(c->file, "condition", z, 24 * c->latents, REL_MAX, 0);
}

static void check_all(const Video *v) {
        json_t *index = video_index();
        const json_t *json;
        size_t i;

        json_array_foreach(json_object_get(index, "encode"), i, json) {
                Case c;

                case_run(v, json, false, &c);
                assert_int_equal(c.plan.tokens, video_case_number(json, "tokens", 0));
                check_raw(&c);
                check_latents(v, &c);
                case_done(&c);
        }
        assert_true(i > 0);
        json_decref(index);
}

static void encode_original_every_case_matches(void **state) {
        CLEANUP(video_freep) Video *v = video_open();

        check_all(v);
}

static void encode_diffusers_every_case_matches(void **state) {
        CLEANUP(video_freep) Video *v = video_open_diffusers();

        check_all(v);
}

static void encode_every_stage_matches(void **state) {
        CLEANUP(video_freep) Video *v = video_open();
        json_t *index = video_index();
        const json_t *json;
        unsigned checked = 0;
        size_t i;

        json_array_foreach(json_object_get(index, "encode"), i, json) {
                Case c;

                if (!json_is_true(json_object_get(json, "taps")))
                        continue;
                case_run(v, json, true, &c);
                for (size_t k = 0; k < c.taps.n; k++) {
                        const VideoTap *t = c.taps.taps + k;
                        CLEANUP_FREE float *planes = video_transposed(t->values, t->rows, t->columns);
                        char name[64];

                        (void) snprintf(name, sizeof(name), "tap.%s", t->name);
                        if (!video_has(c.file, name))
                                continue;
                        video_check(c.file, name, planes, t->rows * t->columns, REL_MAX, 0);
                        checked++;
                }
                case_done(&c);
        }
        json_decref(index);
        assert_true(checked >= 9); /* conv_in, the first block, six levels, conv_out */
}

/* The same picture in bytes, in 0 to 1, and as the model sees it: the same bits. */
static void encode_kinds_of_pixels_same_bits(void **state) {
        static const float mean[] = {0.485f, 0.456f, 0.406f}, std[] = {0.229f, 0.224f, 0.225f};
        CLEANUP(video_freep) Video *v = video_open();
        json_t *index = video_index();
        CLEANUP_FREE float *unit = NULL, *normalised = NULL;
        const uint8_t *rgb;
        float **other;
        uint64_t n;
        Case c;

        case_run(v, json_array_get(json_object_get(index, "encode"), 0), false, &c);
        rgb = golden_data(c.file, "rgb", ST_U8, &n);
        unit = malloc(n * sizeof(float));
        normalised = malloc(n * sizeof(float));
        for (uint64_t i = 0; i < n; i++) {
                unit[i] = (float) rgb[i] / 255;
                normalised[i] = (unit[i] - mean[i % 3]) / std[i % 3];
        }
        other = video_encode_all(v->vae, &c.plan, H3_PIXELS_F32, unit, NULL);
        assert_memory_equal(other[0], c.tiles[0], c.plan.memory.tile);
        video_tiles_free(other, h3_video_encode_jobs(&c.plan));
        other = video_encode_all(v->vae, &c.plan, H3_PIXELS_NORMALISED, normalised, NULL);
        assert_memory_equal(other[0], c.tiles[0], c.plan.memory.tile);
        video_tiles_free(other, h3_video_encode_jobs(&c.plan));
        case_done(&c);
        json_decref(index);
}

/* The noise enters the sample as the reference's own, and both extremes of the variance are cut. */
static void latent_sample_clamps_the_variance(void **state) {
        CLEANUP(video_freep) Video *v = video_open();
        const H3VideoConfig *c = h3_video_vae_config(v->vae);
        float moments[2][48] = {}, z[2][24], tiny[24];

        for (unsigned i = 0; i < 24; i++) {
                moments[0][24 + i] = 20;
                moments[1][24 + i] = 1e6f;
        }
        for (unsigned i = 0; i < 2; i++)
                assert_int_equal(h3_video_latent_sample(v->vae, moments[i], 1, 42, z[i]), 0);
        assert_memory_equal(z[0], z[1], sizeof(z[0]));
        for (unsigned i = 0; i < 24; i++) {
                assert_true(isfinite(z[0][i]));
                moments[0][24 + i] = -1e6f;
        }
        assert_int_equal(h3_video_latent_sample(v->vae, moments[0], 1, 42, tiny), 0);
        for (unsigned i = 0; i < 24; i++) /* 3e-7 times the noise: a few of the smallest steps of f16 */
                assert_true(fabsf(tiny[i] * c->std[i] + c->mean[i]) < 2e-6f);
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(encode_every_stage_matches),
                cmocka_unit_test(encode_original_every_case_matches),
                cmocka_unit_test(encode_diffusers_every_case_matches),
                cmocka_unit_test(encode_kinds_of_pixels_same_bits),
                cmocka_unit_test(latent_sample_clamps_the_variance),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
