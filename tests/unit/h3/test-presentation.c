/* SPDX-License-Identifier: Apache-2.0 */
#include "service/h3/presentation.h"

#include <errno.h>
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
#include "tests/unit/h3/text-data.h"

DEFINE_CLEANUP(H3Tokenizer *, h3_tokenizer_free)
DEFINE_CLEANUP(H3Presentation *, h3_presentation_free)

static void json_unref(json_t **j) {
        json_decref(*j);
}

static H3Tokenizer *published;
static H3SpecialIds special;

static int open_published(void **state) {
        CLEANUP(text_files_freep) TextFiles *files = text_files_published();
        Fault f = {};

        published = text_open(files);
        assert_int_equal(h3_special_ids(published, &special, &f), 0);
        return 0;
}

static int close_published(void **state) {
        published = h3_tokenizer_free(published);
        return 0;
}

static uint64_t at(const json_t *list, size_t i) {
        assert_true(json_is_integer(json_array_get(list, i)));
        return (uint64_t) json_integer_value(json_array_get(list, i));
}

static H3Item item_of(const json_t *reference) {
        const char *kind = json_string_value(json_array_get(reference, 0));

        assert_non_null(kind);
        if (strcmp(kind, "audio") == 0)
                return (H3Item){.kind = H3_ITEM_AUDIO};
        if (strcmp(kind, "image") == 0)
                return (H3Item){
                        .kind = H3_ITEM_IMAGE, .height = at(reference, 1), .width = at(reference, 2)};
        assert_string_equal(kind, "video");
        return (H3Item){.kind = H3_ITEM_VIDEO,
                .height = at(reference, 1),
                .width = at(reference, 2),
                .frames = at(reference, 3),
                .sound = json_is_true(json_array_get(reference, 4))};
}

/* Items of a case; its prompt stays the case's. */
static H3PresentationInput input_of(const json_t *entry, H3Item items[H3_ITEMS_MAX]) {
        const json_t *keyframes = json_object_get(entry, "keyframes"),
                     *refs = json_object_get(entry, "references");
        const json_t *prompt = json_object_get(entry, "prompt"), *k;
        H3PresentationInput in = {.items = items, .rules = &h3_picture_published};
        size_t i;

        in.prompt = json_string_value(prompt);
        in.prompt_size = json_string_length(prompt);
        json_array_foreach(keyframes, i, k) items[in.n_items++] =
                (H3Item){.kind = H3_ITEM_IMAGE, .height = at(k, 0), .width = at(k, 1)};
        json_array_foreach(refs, i, k) items[in.n_items++] = item_of(k);
        return in;
}

/* Blocks against the vision segments, which also say where the tokens are. */
static void assert_blocks(const json_t *entry, const H3Presentation *p, const H3Item *items) {
        const json_t *segments = json_object_get(entry, "segments"), *s;
        uint64_t token = 0;
        size_t i, b = 0;

        json_array_foreach(segments, i, s) {
                const json_t *grid = json_object_get(s, "merged_grid"),
                             *frames = json_object_get(s, "frames");
                const H3VisionBlock *block = &p->blocks[b];

                if (strcmp(json_string_value(json_object_get(s, "kind")), "text") == 0) {
                        token += json_array_size(json_object_get(s, "ids"));
                        continue;
                }
                assert_true(b++ < p->n_blocks);
                assert_int_equal(block->first_token, token + 1);
                assert_int_equal(block->merged_height, at(grid, 0));
                assert_int_equal(block->merged_width, at(grid, 1));
                assert_int_equal(block->size.height, 32 * at(grid, 0));
                assert_int_equal(block->size.width, 32 * at(grid, 1));
                assert_int_equal(items[block->item].kind, frames ? H3_ITEM_VIDEO : H3_ITEM_IMAGE);
                assert_int_equal(block->frames[0], frames ? at(frames, 0) : 0);
                assert_int_equal(block->frames[1], frames ? at(frames, 1) : 0);
                if (b > 1)
                        assert_true(
                                block->item > block[-1].item || (frames && block->item == block[-1].item));
                token += 2 + block->merged_height * block->merged_width;
        }
        assert_int_equal(b, p->n_blocks);
}

/* From the tokens alone: a run of one placeholder is a block, its grid the next in order. */
static void assert_positions(const H3Presentation *p) {
        int32_t next = 0;
        size_t b = 0;

        for (uint64_t i = 0; i < p->n;) {
                const H3VisionBlock *block = &p->blocks[b];

                if (b >= p->n_blocks || i != block->first_token) {
                        for (int axis = 0; axis < 3; axis++)
                                assert_int_equal(p->positions[(uint64_t) axis * p->n + i], next);
                        next++;
                        i++;
                        continue;
                }
                for (uint64_t y = 0; y < block->merged_height; y++)
                        for (uint64_t x = 0; x < block->merged_width; x++, i++) {
                                assert_int_equal(p->positions[i], next);
                                assert_int_equal(p->positions[p->n + i], next + (int32_t) y);
                                assert_int_equal(p->positions[2 * p->n + i], next + (int32_t) x);
                        }
                next += (int32_t) (block->merged_height > block->merged_width ? block->merged_height
                                                                              : block->merged_width);
                b++;
        }
}

static void check_case(const json_t *entry) {
        const json_t *ids = json_object_get(entry, "ids"), *tags = json_object_get(entry, "tags");
        CLEANUP(h3_presentation_freep) H3Presentation *p = NULL;
        H3Item items[H3_ITEMS_MAX];
        H3PresentationInput in = input_of(entry, items);
        Fault f = {};
        int r;

        r = h3_presentation_new(published, &in, &p, &f);
        if (json_object_get(entry, "error")) {
                assert_int_equal(r, -EINVAL);
                assert_string_equal(f.name, FAULT_INVALID_ARGUMENT);
                assert_non_null(strstr(f.text, "frames"));
                return;
        }
        if (r < 0)
                fail_msg("%s: %s", json_string_value(json_object_get(entry, "name")), f.text);
        assert_int_equal(json_array_size(ids), json_array_size(tags));
        if (json_array_size(ids) == 0) { /* ours has one, and says so */
                assert_true(p->padded);
                assert_int_equal(p->n, 1);
                return;
        }
        assert_false(p->padded);
        assert_int_equal(p->n, json_array_size(ids));
        for (uint64_t i = 0; i < p->n; i++) {
                assert_int_equal(p->ids[i], at(ids, i));
                assert_int_equal(p->tags[i], at(tags, i));
        }
        assert_blocks(entry, p, items);
        assert_positions(p);
}

static void presentation_published_cases_match(void **state) {
        CLEANUP(json_unref) json_t *j = text_json("text/presentation.json");
        const json_t *names = json_object_get(j, "ids"), *entry;
        size_t i, n = 0, errors = 0;

        assert_int_equal(special.vision_start, json_integer_value(json_object_get(names, "vision_start")));
        assert_int_equal(special.vision_end, json_integer_value(json_object_get(names, "vision_end")));
        assert_int_equal(special.image_pad, json_integer_value(json_object_get(names, "image_pad")));
        assert_int_equal(special.video_pad, json_integer_value(json_object_get(names, "video_pad")));
        json_array_foreach(json_object_get(j, "cases"), i, entry) {
                check_case(entry);
                errors += json_object_get(entry, "error") != NULL;
                n++;
        }
        assert_true(n > errors);
}

/* Blocks of recorded ids and grids; the small vocabulary has its own special ids. */
static size_t blocks_of(const int32_t *ids, uint64_t n, const json_t *names, const int32_t *image_grids,
        const int32_t *video_grids, H3VisionBlock blocks[16]) {
        int64_t image = json_integer_value(json_object_get(names, "image")),
                video = json_integer_value(json_object_get(names, "video")), t = 0;
        size_t n_blocks = 0;

        for (uint64_t i = 0; i < n; i++) {
                H3VisionBlock *b = &blocks[n_blocks];
                const int32_t *grid;

                if (ids[i] != image && ids[i] != video)
                        continue;
                assert_true(n_blocks++ < 16);
                grid = ids[i] == image ? image_grids : video_grids;
                *b = (H3VisionBlock){.first_token = i,
                        .merged_height = (uint64_t) grid[1] / 2,
                        .merged_width = (uint64_t) grid[2] / 2};
                if (ids[i] == image)
                        image_grids += 3;
                else if (++t == grid[0]) { /* a video's blocks share one */
                        video_grids += 3;
                        t = 0;
                }
                i += b->merged_height * b->merged_width - 1;
        }
        return n_blocks;
}

static void assert_recorded(const int32_t *ids, uint64_t n, const json_t *names, const int32_t *image_grids,
        const int32_t *video_grids, const int32_t *want) {
        CLEANUP_FREE int32_t *got = calloc(3 * n, sizeof(*got));
        H3VisionBlock blocks[16];
        size_t n_blocks = blocks_of(ids, n, names, image_grids, video_grids, blocks);

        assert_non_null(got);
        assert_int_equal(h3_presentation_positions(blocks, n_blocks, n, got), 0);
        assert_memory_equal(got, want, 3 * n * sizeof(*got));
}

static int32_t *numbers(const json_t *list, size_t expected) {
        int32_t *p = calloc(json_array_size(list) + 1, sizeof(*p));

        assert_non_null(p);
        if (expected > 0)
                assert_int_equal(json_array_size(list), expected);
        for (size_t i = 0; i < json_array_size(list); i++)
                p[i] = (int32_t) at(list, i);
        return p;
}

static size_t check_positions_file(void) {
        CLEANUP(json_unref) json_t *j = text_json("text/positions.json");
        const json_t *entry;
        size_t i;

        json_array_foreach(json_object_get(j, "cases"), i, entry) {
                size_t n = json_array_size(json_object_get(entry, "ids"));
                CLEANUP_FREE int32_t *ids = numbers(json_object_get(entry, "ids"), n),
                                     *want = numbers(json_object_get(entry, "position_ids"), 3 * n),
                                     *images = numbers(json_object_get(entry, "image_grids"), 0),
                                     *videos = numbers(json_object_get(entry, "video_grids"), 0);

                assert_recorded(ids, n, json_object_get(j, "ids"), images, videos, want);
        }
        return i;
}

static bool has(const Golden *g, const char *name) {
        return st_header_find(g->header, name) != NULL;
}

/* The same from a golden folder's own files. */
static size_t check_encoder_files(void) {
        CLEANUP(json_unref) json_t *j = text_json("text/encoder/index.json");
        const json_t *entry;
        size_t i, n_checked = 0;

        json_array_foreach(json_object_get(j, "cases"), i, entry) {
                CLEANUP(golden_freep) Golden *g = NULL;
                const int32_t *ids, *want, *images = NULL, *videos = NULL;
                char name[256];
                uint64_t n;

                (void) snprintf(name, sizeof(name), "text/encoder/%s.safetensors",
                        json_string_value(json_object_get(entry, "name")));
                if (!text_exists(name))
                        continue;
                g = text_golden(name);
                ids = golden_data(g, "ids", ST_I32, &n);
                want = golden_data(g, "position_ids", ST_I32, NULL);
                if (has(g, "image.grid_thw"))
                        images = golden_data(g, "image.grid_thw", ST_I32, NULL);
                if (has(g, "video.grid_thw"))
                        videos = golden_data(g, "video.grid_thw", ST_I32, NULL);
                assert_recorded(ids, n, json_object_get(j, "ids"), images, videos, want);
                n_checked++;
        }
        return n_checked;
}

static void positions_recorded_match(void **state) {
        size_t n = text_exists("text/positions.json") ? check_positions_file() : 0;

        n += text_exists("text/encoder/index.json") ? check_encoder_files() : 0;
        assert_true(n > 0);
}

static void positions_of_bad_blocks_are_refused(void **state) {
        const H3VisionBlock good = {.first_token = 1, .merged_height = 2, .merged_width = 3};
        H3VisionBlock b[2] = {good, {.first_token = 7, .merged_height = 1, .merged_width = 1}};
        int32_t got[3 * 8];

        assert_int_equal(h3_presentation_positions(b, 2, 8, got), 0);
        b[1].first_token = 6; /* inside the first */
        assert_int_equal(h3_presentation_positions(b, 2, 8, got), -EINVAL);
        b[1].first_token = 8;
        assert_int_equal(h3_presentation_positions(b, 2, 8, got), -EINVAL);
        b[1] = good; /* out of order */
        assert_int_equal(h3_presentation_positions(b, 2, 8, got), -EINVAL);
        b[0].merged_height = UINT64_MAX / 2;
        assert_int_equal(h3_presentation_positions(b, 1, 8, got), -EINVAL);
        b[0].merged_height = 0;
        assert_int_equal(h3_presentation_positions(b, 1, 8, got), -EINVAL);
}

/* The text of a presentation, with [k] for block k. */
static void read_back(const H3Presentation *p, char *ret, size_t size) {
        size_t at = 0, b = 0;

        for (uint64_t i = 0; i < p->n; i++) {
                const char *token;
                size_t n;

                if (b < p->n_blocks && i + 1 == p->blocks[b].first_token) {
                        at += (size_t) snprintf(ret + at, size - at, "[%zu]", b);
                        i += p->blocks[b].merged_height * p->blocks[b].merged_width + 1;
                        b++;
                        continue;
                }
                token = h3_tokenizer_token(published, p->ids[i], &n);
                assert_non_null(token);
                assert_true(at + n < size);
                memcpy(ret + at, token, n);
                at += n;
        }
        ret[at] = '\0';
}

static void assert_reads(const H3PresentationInput *in, const char *expected) {
        CLEANUP(h3_presentation_freep) H3Presentation *p = NULL;
        char text[1024];
        Fault f = {};

        if (h3_presentation_new(published, in, &p, &f) < 0)
                fail_msg("%s", f.text);
        read_back(p, text, sizeof(text));
        assert_string_equal(text, expected);
}

static const H3Item mixed[] = {
        {.kind = H3_ITEM_AUDIO},
        {.kind = H3_ITEM_VIDEO, .height = 64, .width = 64, .frames = 40, .sound = true},
        {.kind = H3_ITEM_IMAGE, .height = 256, .width = 256},
        {.kind = H3_ITEM_VIDEO, .height = 64, .width = 96, .frames = 13},
        {.kind = H3_ITEM_IMAGE, .height = 256, .width = 288},
};

static void presentation_labels_count_by_kind_in_request_order(void **state) {
        const H3PresentationInput in = {.items = mixed,
                .n_items = ELEMENTSOF(mixed),
                .prompt = "go",
                .prompt_size = 2,
                .rules = &h3_picture_published};

        assert_reads(&in, "<Audio 1>: <Audio 2>: <Video 1>: <0.2 seconds>[0]<1.2 seconds>[1]<Picture 1>: [2]"
                          "<Video 2>: <0.2 seconds>[3]<Picture 2>: [4]go");
}

static void presentation_comfys_order_is_by_kind(void **state) {
        const H3PresentationInput in = {.items = mixed,
                .n_items = ELEMENTSOF(mixed),
                .prompt = "go",
                .prompt_size = 2,
                .rules = &h3_picture_comfy,
                .comfy = true};

        assert_reads(&in,
                "<Picture 1>: [0]<Picture 2>: [1]<Audio 1>: <Video 1>: <0.2 seconds>[2]<1.2 seconds>[3]"
                "<Video 2>: <0.2 seconds>[4]<Audio 2>: go");
}

/* 2 samples in 13 frames, 3 in 25: the last one is shown twice. ComfyUI shows a single one twice. */
static void presentation_short_videos_show_a_frame_twice(void **state) {
        H3Item video = {.kind = H3_ITEM_VIDEO, .height = 64, .width = 64, .frames = 25};
        H3PresentationInput in = {
                .items = &video, .n_items = 1, .prompt = "", .rules = &h3_picture_published};
        CLEANUP(h3_presentation_freep) H3Presentation *p = NULL, *q = NULL;
        Fault f = {};

        assert_reads(&in, "<Video 1>: <0.2 seconds>[0]<1.0 seconds>[1]");
        assert_int_equal(h3_presentation_new(published, &in, &p, &f), 0);
        assert_int_equal(p->blocks[1].frames[0], 24);
        assert_int_equal(p->blocks[1].frames[1], 24);
        video.frames = 12;
        assert_int_equal(h3_presentation_new(published, &in, &q, &f), -EINVAL);
        assert_non_null(strstr(f.text, "12 frames"));
        assert_non_null(strstr(f.text, "13 to"));
        in.comfy = true;
        in.rules = &h3_picture_comfy;
        assert_reads(&in, "<Video 1>: <0.0 seconds>[0]");
}

static void presentation_timestamps_round_to_even(void **state) {
        const H3Item video = {.kind = H3_ITEM_VIDEO, .height = 32, .width = 32, .frames = 12 * 21};
        const H3PresentationInput in = {
                .items = &video, .n_items = 1, .prompt = "", .rules = &h3_picture_published};

        assert_reads(&in,
                "<Video 1>: <0.2 seconds>[0]<1.2 seconds>[1]<2.2 seconds>[2]<3.2 seconds>[3]<4.2 seconds>[4]"
                "<5.2 seconds>[5]<6.2 seconds>[6]<7.2 seconds>[7]<8.2 seconds>[8]<9.2 seconds>[9]"
                "<10.0 seconds>[10]");
}

static void presentation_of_nothing_is_one_pad(void **state) {
        const H3PresentationInput in = {.prompt = "", .rules = &h3_picture_published};
        CLEANUP(h3_presentation_freep) H3Presentation *p = NULL;
        Fault f = {};

        assert_int_equal(h3_presentation_new(published, &in, &p, &f), 0);
        assert_true(p->padded);
        assert_int_equal(p->n, 1);
        assert_int_equal(p->ids[0], special.pad);
        assert_int_equal(p->tags[0], 1);
        assert_int_equal(p->positions[0], 0);
        assert_int_equal(p->n_blocks, 0);
}

static void assert_refused(const H3PresentationInput *in, const char *why) {
        H3Presentation *p = NULL;
        Fault f = {};

        assert_int_equal(h3_presentation_new(published, in, &p, &f), -EINVAL);
        assert_null(p);
        assert_string_equal(f.name, FAULT_INVALID_ARGUMENT);
        if (!strstr(f.text, why))
                fail_msg("'%s' does not say '%s'", f.text, why);
}

static void presentation_bad_input_is_refused(void **state) {
        static H3Item many[H3_ITEMS_MAX + 1];
        H3Item item = {.kind = H3_ITEM_IMAGE, .height = 0, .width = 64};
        H3PresentationInput in = {.items = &item,
                .n_items = 1,
                .prompt = "x",
                .prompt_size = 1,
                .rules = &h3_picture_published};

        assert_refused(&in, "64 x 0 pixels");
        item = (H3Item){.kind = H3_ITEM_VIDEO, .height = 64, .width = 64, .frames = UINT64_MAX};
        assert_refused(&in, "18446744073709551615 frames");
        item.frames = 0;
        in.comfy = true;
        assert_refused(&in, "0 frames");
        item.kind = (H3ItemKind) 77;
        assert_refused(&in, "Item 0 is neither");
        in.n_items = 0;
        in.prompt = "a\xff";
        in.prompt_size = 2;
        assert_refused(&in, "byte 1");
        in.items = many;
        in.n_items = H3_ITEMS_MAX + 1;
        assert_refused(&in, "at most 30");
        for (size_t i = 0; i < ELEMENTSOF(many); i++) /* 30 times 45 blocks of 1008 tokens */
                many[i] = (H3Item){.kind = H3_ITEM_VIDEO, .height = 768, .width = 1344, .frames = 12 * 90};
        in = (H3PresentationInput){
                .items = many, .n_items = H3_ITEMS_MAX, .prompt = "", .rules = &h3_picture_comfy};
        assert_refused(&in, "over 1048576 tokens");
}

static void special_ids_come_from_the_tokenizer(void **state) {
        CLEANUP(text_files_freep) TextFiles *files = text_files_demo();
        CLEANUP(h3_tokenizer_freep) H3Tokenizer *t = text_open(files), *bare = NULL;
        H3SpecialIds ids = {};
        Fault f = {};

        assert_int_equal(h3_special_ids(t, &ids, &f), 0);
        assert_int_equal(ids.pad, 792);
        assert_int_equal(ids.vision_start, 801);
        assert_int_equal(ids.vision_end, 802);
        assert_int_equal(ids.image_pad, 804);
        assert_int_equal(ids.video_pad, 805);
        text_files_set(files, "tokenizer.json", NULL);
        text_files_set(files, "tokenizer_config.json", NULL);
        bare = text_open(files);
        assert_int_equal(h3_special_ids(bare, &ids, &f), -EINVAL);
        assert_string_equal(f.name, FAULT_INVALID_MODEL);
        assert_non_null(strstr(f.text, "'<|endoftext|>'"));
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(presentation_published_cases_match),
                cmocka_unit_test(positions_recorded_match),
                cmocka_unit_test(positions_of_bad_blocks_are_refused),
                cmocka_unit_test(presentation_labels_count_by_kind_in_request_order),
                cmocka_unit_test(presentation_comfys_order_is_by_kind),
                cmocka_unit_test(presentation_short_videos_show_a_frame_twice),
                cmocka_unit_test(presentation_timestamps_round_to_even),
                cmocka_unit_test(presentation_of_nothing_is_one_pad),
                cmocka_unit_test(presentation_bad_input_is_refused),
                cmocka_unit_test(special_ids_come_from_the_tokenizer),
        };

        return cmocka_run_group_tests(tests, open_published, close_published);
}
