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

/* Sizes, tiles and chunks against the published tables, and the blend of numbers that are easy to follow. */

static json_t *tables(void) {
        uint64_t size;
        CLEANUP_FREE uint8_t *text = golden_read(NULL, "vae/tiles.json", &size);
        json_t *root = json_loadb((const char *) text, size, 0, NULL);

        assert_non_null(root);
        return root;
}

static void split_published_lengths_match(void **state) {
        json_t *root = tables();
        const json_t *row;
        size_t i;

        json_array_foreach(json_object_get(root, "tiles"), i, row) {
                const json_t *starts = json_object_get(row, "starts"),
                             *sizes = json_object_get(row, "sizes"),
                             *overlaps = json_object_get(row, "overlaps");
                H3VideoTiling t = {(uint32_t) video_case_number(row, "tile", 0),
                        (uint32_t) video_case_number(row, "min_overlap", 0)};
                H3VideoAxis a;
                Fault f = {};

                if (h3_video_split(video_case_number(row, "length", 0), t, &a, &f) < 0)
                        fail_msg("%s", f.text);
                assert_int_equal(a.n, json_array_size(starts));
                for (uint32_t k = 0; k < a.n; k++) {
                        assert_int_equal(a.start[k], json_integer_value(json_array_get(starts, k)));
                        assert_int_equal(a.size, json_integer_value(json_array_get(sizes, k)));
                        if (k > 0)
                                assert_int_equal(h3_video_overlap(&a, k),
                                        json_integer_value(json_array_get(overlaps, k - 1)));
                }
        }
        assert_true(i > 60);
        json_decref(root);
}

/* Where the reference raises (1 and 2 tokens) ours makes what the tokens stand for. */
static void plan_published_chunks_match(void **state) {
        CLEANUP(video_freep) Video *v = video_open();
        json_t *root = tables();
        const json_t *row;
        size_t i;

        json_array_foreach(json_object_get(root, "decode_plan"), i, row) {
                uint64_t tokens = video_case_number(row, "tokens", 0);
                uint64_t frames = video_case_number(row, "frames", tokens == 1 ? 1 : 5), end = 0;
                H3VideoDecodePlan p;

                assert_int_equal(h3_video_decode_plan(v->vae, tokens, 2, 3, H3_VIDEO_TILING, &p, NULL), 0);
                assert_int_equal(p.frames, frames);
                assert_int_equal(p.chunks, tokens <= 2 ? 1 : video_case_number(row, "chunks", 0));
                assert_int_equal(p.chunk_tokens, tokens == 1 ? 1 : 7);
                assert_int_equal(h3_video_decode_jobs(&p), p.chunks);
                for (uint32_t chunk = 0; chunk < p.chunks; chunk++) {
                        H3Range r = h3_video_decode_frames(&p, chunk);

                        assert_int_equal(r.begin, end);
                        assert_true(r.end > r.begin);
                        end = r.end;
                }
                assert_int_equal(end, frames);
        }
        assert_true(i >= 20);
        json_decref(root);
}

static void plan_encode_counts_tokens(void **state) {
        static const struct {
                uint32_t frames, clips, tokens;
        } rows[] = {{1, 1, 1}, {2, 1, 2}, {5, 1, 2}, {17, 1, 2}, {18, 2, 7}, {22, 2, 7}, {124, 8, 37},
                {243, 15, 72}, {362, 22, 107}};
        CLEANUP(video_freep) Video *v = video_open();

        for (size_t i = 0; i < ELEMENTSOF(rows); i++) {
                H3VideoEncodePlan p;

                assert_int_equal(
                        h3_video_encode_plan(v->vae, rows[i].frames, 768, 1344, H3_VIDEO_TILING, &p, NULL),
                        0);
                assert_int_equal(p.clips, rows[i].clips);
                assert_int_equal(p.tokens, rows[i].tokens);
                assert_int_equal(h3_video_encode_tiles(&p), 28);
                assert_int_equal(h3_video_encode_jobs(&p), 28 * rows[i].clips);
        }
}

static double largest(double a, double b) {
        return a > b ? a : b;
}

/* What the blocks and what the last product need is not there at the same time; the result is on its way beside the next stream. */
static void check_decode_memory(const H3VideoConfig *c, const H3VideoDecodePlan *d) {
        double tokens = 7 * 256 * d->batch, rows = tokens + (c->registers + 1) * d->batch, size = d->type == LK_F16 ? 2 : 4;
        double stream = rows * c->hidden * (4 + size) + tokens * 3072 * 4;
        double block = largest(rows * size * largest(3 * c->hidden, 2 * c->ffn), rows * 3072 * 4);
        double bytes = stream + block + 4 * (tokens * 2 * 24 + rows) + rows / d->batch * 6 * c->rope_freqs * 4;

        assert_true((double) d->memory.device >= bytes && (double) d->memory.device < bytes + 16384);
        assert_true((double) d->memory.host >= 4 * tokens * 24 &&
                (double) d->memory.host < 4 * (tokens * 24 + rows * (6 * c->rope_freqs + 2)));
}

static void plan_memory_is_counted(void **state) {
        CLEANUP(video_freep) Video *v = video_open();
        const H3VideoConfig *c = h3_video_vae_config(v->vae);
        H3VideoDecodePlan d;
        H3VideoEncodePlan e;

        assert_int_equal(h3_video_decode_plan(v->vae, 37, 48, 84, H3_VIDEO_TILING, &d, NULL), 0);
        assert_int_equal(h3_video_decode_tiles(&d), 28);
        assert_int_equal(d.memory.tile, 28ull * 256 * 256 * 3 * 4);
        assert_int_equal(d.memory.chunk, 28 * d.memory.tile);
        assert_int_equal(d.memory.tail, 5ull * 768 * 1344 * 3 * 4);
        assert_int_equal(d.type, LK_F32);
        assert_int_equal(d.batch, 1);
        check_decode_memory(c, &d);
        assert_int_equal(h3_video_decode_plan_as(v->vae, LK_F16, 8, &d, NULL), 0);
        assert_int_equal(d.type, LK_F16);
        assert_int_equal(d.batch, 8);
        check_decode_memory(c, &d);
        assert_int_equal(d.memory.chunk, 28 * d.memory.tile);
        assert_int_equal(h3_video_decode_plan_as(v->vae, LK_F16, 99, &d, NULL), 0);
        assert_int_equal(d.batch, 28);
        assert_int_equal(h3_video_decode_plan_as(v->vae, LK_F32, 0, &d, NULL), 0);
        assert_int_equal(d.batch, 1);
        check_decode_memory(c, &d);

        assert_int_equal(h3_video_encode_plan(v->vae, 22, 768, 1344, H3_VIDEO_TILING, &e, NULL), 0);
        assert_int_equal(e.memory.tile, 5ull * 16 * 16 * 48 * 4);
        assert_int_equal(e.memory.chunk, 28 * e.memory.tile);
        assert_int_equal(e.memory.host, 17ull * 256 * 256 * 3 * 4);
        assert_true(e.memory.device >= 3ull * 17 * 256 * 256 * c->channels[0] * 4);
        assert_int_equal(e.memory.tail, 0);
}

static void expect_invalid(int r, const Fault *f, const char *part) {
        assert_int_equal(r, -EINVAL);
        assert_string_equal(f->name, FAULT_INVALID_ARGUMENT);
        assert_non_null(strstr(f->text, part));
}

static void plan_bad_sizes_are_refused(void **state) {
        CLEANUP(video_freep) Video *v = video_open();
        static const H3VideoTiling bad[] = {{0, 0}, {250, 64}, {256, 60}, {64, 64}, {1u << 20, 16}};
        H3VideoDecodePlan d, before;
        H3VideoEncodePlan e;
        H3VideoAxis a;

        memset(&d, 0x5a, sizeof(d));
        before = d;
#define DECODE(t, h, w, tiling, part)                                                                       \
        do {                                                                                                \
                Fault f = {};                                                                               \
                expect_invalid(h3_video_decode_plan(v->vae, t, h, w, tiling, &d, &f), &f, part);            \
                assert_memory_equal(&d, &before, sizeof(d));                                                \
        } while (0)
#define ENCODE(n, h, w, tiling, part)                                                                       \
        do {                                                                                                \
                Fault f = {};                                                                               \
                expect_invalid(h3_video_encode_plan(v->vae, n, h, w, tiling, &e, &f), &f, part);            \
        } while (0)

        DECODE(0, 2, 2, H3_VIDEO_TILING, "tokens");
        DECODE(7, 0, 2, H3_VIDEO_TILING, "0 pixels");
        DECODE(7, 2, 1025, H3_VIDEO_TILING, "multiple of 16");
        DECODE(UINT64_MAX, 2, 2, H3_VIDEO_TILING, "tokens");
        DECODE(7, UINT64_MAX / 16 + 2, 2, H3_VIDEO_TILING, "height");
        ENCODE(0, 32, 32, H3_VIDEO_TILING, "frames");
        ENCODE(UINT64_MAX, 32, 32, H3_VIDEO_TILING, "frames");
        ENCODE(1, 16, 32, H3_VIDEO_TILING, "at least 32");
        ENCODE(1, 32, 40, H3_VIDEO_TILING, "multiple of 16");
        ENCODE(1, 64, 64, ((H3VideoTiling){16, 0}), "the encoder needs");
        for (size_t i = 0; i < ELEMENTSOF(bad); i++)
                DECODE(7, 20, 20, bad[i], "Tiles of");
        {
                Fault f = {};

                expect_invalid(h3_video_split(16384, (H3VideoTiling){64, 16}, &a, &f), &f, "larger tiles");
        }
}

/* ------------------------------------------------------------------------------------ blending */

static float **made_tiles(const H3VideoDecodePlan *p, uint64_t seed) {
        uint64_t jobs = h3_video_decode_jobs(p), n = p->memory.tile / sizeof(float);
        float **tiles = malloc(jobs * sizeof(*tiles));

        assert_non_null(tiles);
        for (uint64_t i = 0; i < jobs; i++) {
                tiles[i] = malloc(p->memory.tile);
                assert_non_null(tiles[i]);
                for (uint64_t k = 0; k < n; k++) {
                        seed = seed * 6364136223846793005u + 1442695040888963407u;
                        tiles[i][k] = (float) (seed >> 40) * 0x1p-22f - 2;
                }
        }
        return tiles;
}

/* The value of a pixel by the words of h3.md 5.4 and 5.3: with raw neighbours, above first; then the fade.
 */
static float blended(const H3VideoDecodePlan *p, float **tiles, uint32_t chunk, uint64_t frame, uint32_t row,
        uint32_t col, uint64_t y, uint64_t x, uint64_t c) {
        const float *t = tiles[(uint64_t) chunk * h3_video_decode_tiles(p) + row * p->cols.n + col];

        return t[((frame * p->rows.size + y) * p->cols.size + x) * 3 + c];
}

static float whole(const H3VideoDecodePlan *p, float **tiles, uint32_t chunk, uint64_t frame, uint64_t y,
        uint64_t x, uint64_t c) {
        uint32_t row = p->rows.n - 1, col = p->cols.n - 1;
        float v;

        while (y < p->rows.start[row])
                row--;
        while (x < p->cols.start[col])
                col--;
        y -= p->rows.start[row];
        x -= p->cols.start[col];
        v = blended(p, tiles, chunk, frame, row, col, y, x, c);
        if (row > 0 && y < h3_video_overlap(&p->rows, row)) {
                float e = (float) h3_video_overlap(&p->rows, row), w = (float) y / e;
                float a = blended(p, tiles, chunk, frame, row - 1, col,
                        y + p->rows.start[row] - p->rows.start[row - 1], x, c);

                v = a * (1 - w) + v * w;
        }
        if (col > 0 && x < h3_video_overlap(&p->cols, col)) {
                float e = (float) h3_video_overlap(&p->cols, col), w = (float) x / e;
                float a = blended(p, tiles, chunk, frame, row, col - 1, y,
                        x + p->cols.start[col] - p->cols.start[col - 1], c);

                v = a * (1 - w) + v * w;
        }
        return v;
}

static float film(
        const H3VideoDecodePlan *p, float **tiles, uint64_t frame, uint64_t y, uint64_t x, uint64_t c) {
        uint32_t chunk = (uint32_t) (frame / 17 < p->chunks ? frame / 17 : p->chunks - 1);
        uint64_t in = frame - 17ull * chunk;
        float v = whole(p, tiles, chunk, in < 17 ? in + 3 : in - 17 + 23, y, x, c);

        if (chunk > 0 && in < 5) {
                float w = (float) in / 5, a = whole(p, tiles, chunk - 1, 23 + in, y, x, c);

                v = a * (1 - w) + v * w;
        }
        return v;
}

static void blend_follows_the_words(void **state) {
        static const uint32_t bands[] = {1, 7, 1000};
        CLEANUP(video_freep) Video *v = video_open();
        H3VideoDecodePlan p;
        float **tiles;
        uint64_t n;

        assert_int_equal(h3_video_decode_plan(v->vae, 14, 7, 10, (H3VideoTiling){64, 16}, &p, NULL), 0);
        assert_int_equal(p.rows.n, 2);
        assert_int_equal(p.cols.n, 3);
        assert_int_equal(p.chunks, 3);
        tiles = made_tiles(&p, 1);
        n = 3ull * p.frames * p.rows.length * p.cols.length;
        for (size_t i = 0; i < ELEMENTSOF(bands); i++) {
                CLEANUP_FREE float *got = video_blend_all(&p, tiles, H3_PIXELS_NORMALISED, bands[i]);

                for (uint64_t k = i; k < n; k += i == 0 ? 1 : 97) {
                        uint64_t at = k / 3, x = at % p.cols.length, y = at / p.cols.length % p.rows.length,
                                 frame = at / p.cols.length / p.rows.length;
                        float expected = film(&p, tiles, frame, y, x, k % 3);

                        if (memcmp(&got[k], &expected, sizeof(expected)) != 0)
                                fail_msg("frame %lu (%lu, %lu): %a, expected %a", (unsigned long) frame,
                                        (unsigned long) y, (unsigned long) x, (double) got[k],
                                        (double) expected);
                }
        }
        video_tiles_free(tiles, h3_video_decode_jobs(&p));
}

static void blend_kinds_of_pixels_agree(void **state) {
        static const float mean[] = {0.485f, 0.456f, 0.406f}, std[] = {0.229f, 0.224f, 0.225f};
        CLEANUP(video_freep) Video *v = video_open();
        CLEANUP_FREE float *raw = NULL, *unit = NULL;
        CLEANUP_FREE uint8_t *bytes = NULL;
        H3VideoDecodePlan p;
        float **tiles;
        uint64_t n;

        assert_int_equal(h3_video_decode_plan(v->vae, 1, 2, 2, H3_VIDEO_TILING, &p, NULL), 0);
        tiles = made_tiles(&p, 2);
        n = 3ull * 32 * 32;
        tiles[0][3 * n + 0] = NAN; /* frame 3 is the picture */
        tiles[0][3 * n + 1] = INFINITY;
        tiles[0][3 * n + 2] = -INFINITY;
        raw = video_blend_all(&p, tiles, H3_PIXELS_NORMALISED, 32);
        unit = video_blend_all(&p, tiles, H3_PIXELS_F32, 3);
        bytes = video_blend_all(&p, tiles, H3_PIXELS_U8, 32);
        assert_memory_equal(raw, tiles[0] + 3 * n, n * sizeof(float));
        assert_true(unit[0] == 0 && unit[1] == 1 && unit[2] == 0);
        assert_true(bytes[0] == 0 && bytes[1] == 255 && bytes[2] == 0);
        for (uint64_t i = 3; i < n; i++) {
                float x = raw[i] * std[i % 3], u = x + mean[i % 3];

                u = u < 0 ? 0 : u > 1 ? 1 : u;
                assert_true(unit[i] == u);
                assert_int_equal(bytes[i], (int) nearbyintf(255 * u));
        }
        video_tiles_free(tiles, 1);
}

static void blend_bad_arguments_are_refused(void **state) {
        CLEANUP(video_freep) Video *v = video_open();
        CLEANUP_FREE uint8_t *frames = NULL;
        CLEANUP_FREE float *moments = NULL;
        float *tails[2];
        H3VideoDecodePlan p;
        H3VideoEncodePlan e;
        H3VideoBlend good;
        float **tiles;

        assert_int_equal(h3_video_decode_plan(v->vae, 12, 2, 2, H3_VIDEO_TILING, &p, NULL), 0);
        tiles = made_tiles(&p, 3);
        frames = malloc(17 * 32 * 32 * 3);
        tails[0] = calloc(1, p.memory.tail);
        tails[1] = calloc(1, p.memory.tail);
        good = (H3VideoBlend){.chunk = 0,
                .tiles = (const float *const *) tiles,
                .tail_before = tails[0],
                .tail_after = tails[1],
                .pixels = H3_PIXELS_U8,
                .frames = frames};
        assert_int_equal(h3_video_decode_blend(&p, &good, (H3Range){0, 32}), 0);
        assert_int_equal(h3_video_decode_blend(&p, &good, (H3Range){5, 5}), 0);
        assert_int_equal(h3_video_decode_blend(&p, &good, (H3Range){0, 33}), -EINVAL);
        assert_int_equal(h3_video_decode_blend(&p, &good, (H3Range){6, 5}), -EINVAL);

#define REFUSED(member, value)                                                                              \
        do {                                                                                                \
                H3VideoBlend b = good;                                                                      \
                b.member = value;                                                                           \
                assert_int_equal(h3_video_decode_blend(&p, &b, (H3Range){0, 32}), -EINVAL);                 \
        } while (0)
        REFUSED(chunk, 2);
        REFUSED(tiles, NULL);
        REFUSED(frames, NULL);
        REFUSED(tail_after, NULL);
        good.chunk = 1;
        REFUSED(tail_before, NULL);

        assert_int_equal(h3_video_encode_plan(v->vae, 1, 32, 32, H3_VIDEO_TILING, &e, NULL), 0);
        moments = malloc(48 * 4 * sizeof(float));
        assert_int_equal(
                h3_video_encode_blend(v->vae, &e, 1, (const float *const *) tiles, moments), -EINVAL);
        assert_int_equal(h3_video_encode_blend(v->vae, &e, 0, NULL, moments), -EINVAL);
        free(tails[0]);
        free(tails[1]);
        video_tiles_free(tiles, h3_video_decode_jobs(&p));
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(split_published_lengths_match),
                cmocka_unit_test(plan_published_chunks_match),
                cmocka_unit_test(plan_encode_counts_tokens),
                cmocka_unit_test(plan_memory_is_counted),
                cmocka_unit_test(plan_bad_sizes_are_refused),
                cmocka_unit_test(blend_follows_the_words),
                cmocka_unit_test(blend_kinds_of_pixels_agree),
                cmocka_unit_test(blend_bad_arguments_are_refused),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
