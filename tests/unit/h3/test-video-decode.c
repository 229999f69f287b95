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

/* Decoding against the published numbers: stages, raw tiles and chunks, finished frames. Limits: README of
 * the golden data. */
#define REL_MAX 5e-6
#define LARGEST_MAX 5e-5
#define F16_REL_MAX 3e-3
#define RGB_SHARE_MAX 1e-3

typedef struct Case {
        const json_t *json;
        Golden *file;
        H3VideoDecodePlan plan;
        float **tiles;
        VideoTaps taps;
} Case;

static void case_run_as(const Video *v, const json_t *json, bool taps, LkType type, Case *ret) {
        const json_t *size = json_object_get(json, "size");
        const float *z;
        char path[160];
        H3StepHooks hooks = {.on_tap = video_tap_record, .userdata = &ret->taps};
        Fault f = {};

        *ret = (Case){.json = json};
        (void) snprintf(path, sizeof(path), "vae/video/decode_%s.safetensors",
                json_string_value(json_object_get(json, "name")));
        ret->file = golden_open_at(path);
        z = golden_data(ret->file, "z", ST_F32, NULL);
        if (h3_video_decode_plan(v->vae, video_case_number(json, "tokens", 0),
                    (uint64_t) json_integer_value(json_array_get(size, 0)) / H3_VIDEO_RATIO,
                    (uint64_t) json_integer_value(json_array_get(size, 1)) / H3_VIDEO_RATIO,
                    video_case_tiling(json), &ret->plan, &f) < 0 ||
                h3_video_decode_plan_as(v->vae, type, 1, &ret->plan, &f) < 0)
                fail_msg("%s", f.text);
        ret->tiles = video_decode_all(v->vae, &ret->plan, z, taps ? &hooks : NULL);
}

static void case_run(const Video *v, const json_t *json, bool taps, Case *ret) {
        case_run_as(v, json, taps, LK_F32, ret);
}

static void case_done(Case *c) {
        video_tiles_free(c->tiles, h3_video_decode_jobs(&c->plan));
        video_taps_free(&c->taps);
        (void) golden_free(c->file);
}

/* [frames, h, w, 3] to [3, frames, h, w] of chosen frames and every step-th row and column. */
static float *pick(const Case *c, const float *x, uint64_t h, uint64_t w, uint64_t add, uint64_t *ret_n) {
        const json_t *frames = json_object_get(c->json, "frames");
        uint64_t step = video_case_number(c->json, "step", 1),
                 offset = video_case_number(c->json, "offset", 0);
        float *y = malloc(3 * json_array_size(frames) * h * w * sizeof(float));
        uint64_t n = 0;

        assert_non_null(y);
        for (uint64_t channel = 0; channel < 3; channel++)
                for (size_t i = 0; i < json_array_size(frames); i++) {
                        uint64_t frame = (uint64_t) json_integer_value(json_array_get(frames, i)) + add;

                        for (uint64_t row = offset; row < h; row += step)
                                for (uint64_t col = offset; col < w; col += step)
                                        y[n++] = x[((frame * h + row) * w + col) * 3 + channel];
                }
        *ret_n = n;
        return y;
}

static float *all_planes(const float *x, uint64_t frames, uint64_t h, uint64_t w) {
        return video_transposed(x, frames * h * w, 3);
}

static void check_raw(const Case *c) {
        uint64_t jobs = h3_video_decode_jobs(&c->plan), n;
        uint64_t frames = c->plan.chunk_tokens * H3_VIDEO_TOKEN_FRAMES;
        uint64_t h = c->plan.rows.size, w = c->plan.cols.size;
        char name[32];

        for (uint64_t i = 0; i < jobs; i++) {
                CLEANUP_FREE float *got = NULL;

                (void) snprintf(name, sizeof(name), "tile.%llu", (unsigned long long) i);
                if (video_has(c->file, name)) {
                        got = pick(c, c->tiles[i], h, w, 3, &n);
                        video_check(c->file, name, got, n, REL_MAX, LARGEST_MAX);
                        continue;
                }
                (void) snprintf(name, sizeof(name), "chunk.%llu", (unsigned long long) i);
                if (video_has(c->file, name)) {
                        got = all_planes(c->tiles[i], frames, h, w);
                        video_check(c->file, name, got, 3 * frames * h * w, REL_MAX, LARGEST_MAX);
                }
        }
}

static void check_rgb(const Case *c) {
        CLEANUP_FREE uint8_t *got = NULL;
        uint64_t n, off = 0;
        const uint8_t *expected;

        if (!video_has(c->file, "rgb"))
                return;
        expected = golden_data(c->file, "rgb", ST_U8, &n);
        got = video_blend_all(&c->plan, c->tiles, H3_PIXELS_U8, 5);
        assert_int_equal(n, 3ull * c->plan.frames * c->plan.rows.length * c->plan.cols.length);
        for (uint64_t i = 0; i < n; i++) {
                assert_true(abs(got[i] - expected[i]) <= 1);
                off += got[i] != expected[i];
        }
        assert_true((double) off <= RGB_SHARE_MAX * (double) n);
}

/* The published decoder with f16 weights and f16 arithmetic is as far from f32 as the README says. */
static void check_half(const Case *c, const float *got, uint64_t n) {
        double difference = 0, norm = 0;
        const uint8_t *half;
        uint64_t expected_n;

        if (!video_has(c->file, "frames_f16_decoder"))
                return;
        half = golden_data(c->file, "frames_f16_decoder", ST_F16, &expected_n);
        assert_int_equal(n, expected_n);
        for (uint64_t i = 0; i < n; i++) {
                uint16_t u;
                double d, sign, fraction;

                memcpy(&u, half + 2 * i, sizeof(u));
                sign = u & 0x8000 ? -1 : 1;
                fraction = u & 1023;
                d = (u >> 10 & 31) == 0 ? ldexp(fraction, -24)
                                        : ldexp(1024 + fraction, (int) (u >> 10 & 31) - 25);
                difference += (sign * d - (double) got[i]) * (sign * d - (double) got[i]);
                norm += d * d;
        }
        assert_true(sqrt(difference / norm) <= F16_REL_MAX);
}

/* What a case holds in its picked frames; for an image all four frames of the token, of which ours is the
 * last.
 */
static void check_frames(const Case *c) {
        uint64_t h = c->plan.rows.length, w = c->plan.cols.length, n;
        CLEANUP_FREE float *frames = video_blend_all(&c->plan, c->tiles, H3_PIXELS_NORMALISED, 7),
                           *got = NULL, *all = NULL;

        if (c->plan.chunk_tokens > 1) {
                got = pick(c, frames, h, w, 0, &n);
                check_half(c, got, n);
                video_check(c->file, "frames", got, n, REL_MAX, LARGEST_MAX);
                return;
        }
        /* put our one frame in the place of the last */
        all = calloc(H3_VIDEO_TOKEN_FRAMES * 3 * h * w, sizeof(float));
        assert_non_null(all);
        for (uint64_t frame = 0; frame < H3_VIDEO_TOKEN_FRAMES; frame++)
                memcpy(all + frame * 3 * h * w,
                        frame + 1 == H3_VIDEO_TOKEN_FRAMES || h3_video_decode_jobs(&c->plan) > 1
                                ? frames
                                : c->tiles[0] + frame * 3 * h * w,
                        3 * h * w * sizeof(float));
        got = pick(c, all, h, w, 0, &n);
        video_check(c->file, "frames", got, n, REL_MAX, LARGEST_MAX);
}

static void check_all(const Video *v) {
        json_t *index = video_index();
        const json_t *json;
        size_t i;

        json_array_foreach(json_object_get(index, "decode"), i, json) {
                Case c;

                case_run(v, json, false, &c);
                assert_int_equal(c.plan.frames,
                        json_is_integer(json_object_get(json, "frames_total")) && c.plan.chunk_tokens > 1
                                ? video_case_number(json, "frames_total", 0)
                                : 1);
                check_raw(&c);
                check_frames(&c);
                check_rgb(&c);
                case_done(&c);
        }
        assert_true(i > 0);
        json_decref(index);
}

static void decode_original_every_case_matches(void **state) {
        CLEANUP(video_freep) Video *v = video_open();

        assert_string_equal(h3_video_vae_layout(v->vae), "original");
        check_all(v);
}

static void decode_diffusers_every_case_matches(void **state) {
        CLEANUP(video_freep) Video *v = video_open_diffusers();

        assert_string_equal(h3_video_vae_layout(v->vae), "diffusers");
        check_all(v);
}

/* Blocks in f16: as close to the f32 numbers as the published f16 decoder may be, and not those of f32. */
static void check_half_run(const Video *v) {
        json_t *index = video_index();
        const json_t *json;
        unsigned checked = 0;
        size_t i;

        json_array_foreach(json_object_get(index, "decode"), i, json) {
                Case c;

                case_run_as(v, json, false, LK_F16, &c);
                if (c.plan.chunk_tokens > 1) {
                        uint64_t h = c.plan.rows.length, w = c.plan.cols.length, n, expected_n;
                        CLEANUP_FREE float *frames = video_blend_all(&c.plan, c.tiles, H3_PIXELS_NORMALISED, 7), *got = NULL;
                        const float *expected = golden_data(c.file, "frames", ST_F32, &expected_n);
                        double rel;

                        got = pick(&c, frames, h, w, 0, &n);
                        assert_int_equal(n, expected_n);
                        rel = golden_distance(got, expected, n, NULL);
                        if (!(rel <= F16_REL_MAX) || rel <= 10 * REL_MAX)
                                fail_msg("%s: rel %.3g, expected %g to %g", json_string_value(json_object_get(json, "name")), rel,
                                        10 * REL_MAX, F16_REL_MAX);
                        checked++;
                }
                case_done(&c);
        }
        assert_true(checked > 0);
        json_decref(index);
}

static void decode_original_in_f16_is_close(void **state) {
        CLEANUP(video_freep) Video *v = video_open();

        check_half_run(v);
}

static void decode_diffusers_in_f16_is_close(void **state) {
        CLEANUP(video_freep) Video *v = video_open_diffusers();

        check_half_run(v);
}

/* Stages in the order of computation: the first that deviates is named. */
static void decode_every_stage_matches(void **state) {
        CLEANUP(video_freep) Video *v = video_open();
        json_t *index = video_index();
        const json_t *json;
        unsigned checked = 0;
        size_t i;

        json_array_foreach(json_object_get(index, "decode"), i, json) {
                Case c;

                if (!json_is_true(json_object_get(json, "taps")))
                        continue;
                case_run(v, json, true, &c);
                for (size_t k = 0; k < c.taps.n; k++) {
                        const VideoTap *t = c.taps.taps + k;
                        CLEANUP_FREE float *planes = NULL;
                        char name[64];

                        (void) snprintf(name, sizeof(name), "tap.%s", t->name);
                        if (strcmp(t->name, "post_quant") == 0) /* published as [channels, t, h, w] */
                                planes = video_transposed(t->values, t->rows, t->columns);
                        video_check(
                                c.file, name, planes ? planes : t->values, t->rows * t->columns, REL_MAX, 0);
                        checked++;
                }
                case_done(&c);
        }
        json_decref(index);
        assert_true(checked >= 7);
}

static int stop_after_one(void *userdata, uint32_t done, uint32_t total) {
        unsigned *calls = userdata;

        (*calls)++;
        assert_int_equal(done, 1);
        assert_true(total > 1);
        return -ECANCELED;
}

static void decode_hook_stops_after_a_layer(void **state) {
        CLEANUP(video_freep) Video *v = video_open();
        H3VideoDecodePlan p;
        CLEANUP_FREE float *z = NULL, *out = NULL;
        H3Rank rank = video_rank(1);
        unsigned calls = 0;
        H3StepHooks hooks = {.on_block = stop_after_one, .userdata = &calls};
        void *work;
        Fault f = {};

        assert_int_equal(h3_video_decode_plan(v->vae, 1, 2, 3, H3_VIDEO_TILING, &p, &f), 0);
        z = calloc(24 * 6, sizeof(float));
        out = malloc(p.memory.tile);
        assert_int_equal(rank.ops->memory_new(rank.context, p.memory.device, &work), 0);
        assert_int_equal(
                h3_video_decode_tile(&rank, v->vae, &p, z, 0, 0, work, &hooks, out, &f), -ECANCELED);
        assert_int_equal(calls, 1);
        assert_int_equal(h3_video_decode_tile(&rank, v->vae, &p, z, 1, 0, work, NULL, out, &f), -EINVAL);
        assert_string_equal(f.name, FAULT_INTERNAL);
        f = (Fault){};
        assert_int_equal(h3_video_decode_tile(&rank, v->vae, &p, z, 0, 1, work, NULL, out, &f), -EINVAL);
        rank.ops->memory_free(rank.context, work);
        (void) rank.ops->context_free(rank.context);
}

/* The publisher's config.json and none at all mean the constants of the release; a model of other group and
 * head sizes needs a config.json that says them, and the error says so. */
static void decode_without_diffusers_config_same_bits(void **state) {
        CLEANUP(video_freep) Video *v = video_open();
        bool published = video_data_has("vae/video/config.original.json");
        CLEANUP_FREE uint8_t *config = NULL;
        CLEANUP_FREE float *z = calloc(24 * 4, sizeof(float));
        const char *texts[2] = {NULL, "{}"};
        H3VideoDecodePlan p;
        float **reference;
        uint64_t size;

        if (published)
                texts[1] =
                        (const char *) (config = golden_read(NULL, "vae/video/config.original.json", &size));
        assert_int_equal(h3_video_decode_plan(v->vae, 1, 2, 2, H3_VIDEO_TILING, &p, NULL), 0);
        reference = video_decode_all(v->vae, &p, z, NULL);
        for (size_t i = 0; i < ELEMENTSOF(texts); i++) {
                CLEANUP_FREE uint8_t *bytes = NULL;
                H3VideoVae *vae = NULL;
                float **tiles;
                Fault f = {};
                int r;

                r = video_try_open(v->checkpoint, texts[i], &bytes, &vae, &f);
                if (!published) {
                        assert_int_equal(r, -EINVAL);
                        assert_non_null(strstr(f.text, "no multiple of 32 groups"));
                        assert_non_null(strstr(f.text, "with heads of 64"));
                        continue;
                }
                if (r < 0)
                        fail_msg("%s", f.text);
                tiles = video_decode_all(vae, &p, z, NULL);
                assert_memory_equal(tiles[0], reference[0], p.memory.tile);
                video_tiles_free(tiles, 1);
                (void) h3_video_vae_free(vae);
        }
        video_tiles_free(reference, 1);
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(decode_every_stage_matches),
                cmocka_unit_test(decode_original_every_case_matches),
                cmocka_unit_test(decode_diffusers_every_case_matches),
                cmocka_unit_test(decode_original_in_f16_is_close),
                cmocka_unit_test(decode_diffusers_in_f16_is_close),
                cmocka_unit_test(decode_hook_stops_after_a_layer),
                cmocka_unit_test(decode_without_diffusers_config_same_bits),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
