/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/unit/h3/text-case.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>
#include <jansson.h>

#include "kernels/cpu/cpu.h"
#include "service/h3/number.h"
#include "service/shared/cleanup.h"

static json_t *read_index(void) {
        CLEANUP_FREE uint8_t *bytes = NULL;
        uint64_t size;
        json_t *root;

        bytes = golden_read(NULL, "text/encoder/index.json", &size);
        root = json_loadb((const char *) bytes, size, 0, NULL);
        assert_non_null(root);
        return root;
}

/* Read once: the names live as long as the program. */
static json_t *the_index(void) {
        static json_t *root;

        if (!root)
                root = read_index();
        return root;
}

size_t text_case_names(const char *ret[TEXT_CASES_MAX]) {
        const json_t *cases = json_object_get(the_index(), "cases");
        size_t n = json_array_size(cases);

        assert_in_range(n, 1, TEXT_CASES_MAX);
        for (size_t i = 0; i < n; i++)
                ret[i] = json_string_value(json_object_get(json_array_get(cases, i), "name"));
        return n;
}

static void path_of(const char *name, char *ret, size_t size) {
        (void) snprintf(ret, size, "text/encoder/%s", name);
}

bool text_model_files_exist(const char *name) {
        char path[4096];

        (void) snprintf(path, sizeof(path), "%s/text/encoder/%s", getenv("LATENT_TEST_DATA"), name);
        return access(path, R_OK) == 0;
}

TextModelFiles *text_model_files_open(const char *name) {
        TextModelFiles *t = calloc(1, sizeof(*t));
        char path[256];
        uint64_t config_size, size;
        Fault f = {};

        assert_non_null(t);
        path_of("config.json", path, sizeof(path));
        t->config = golden_read(NULL, path, &config_size);
        path_of(name, path, sizeof(path));
        t->bytes = golden_read(NULL, path, &size);
        if (h3_text_open((const H3File[]){{"config.json", t->config, config_size}, {name, t->bytes, size}},
                    2, NULL, &t->model, &f) < 0)
                fail_msg("%s: %s", name, f.text);
        return t;
}

TextModelFiles *text_model_files_free(TextModelFiles *t) {
        if (!t)
                return NULL;
        (void) h3_text_free(t->model);
        free(t->config);
        free(t->bytes);
        free(t);
        return NULL;
}

void text_model_files_freep(TextModelFiles **t) {
        (void) text_model_files_free(*t);
}

/* Patches of a kind, from their bytes. */
static float *patches_of(const Golden *g, const char *kind) {
        char name[64];
        const uint8_t *u8;
        uint64_t n, n_float;
        float *patches;

        (void) snprintf(name, sizeof(name), "%s.patches_u8", kind);
        if (!st_header_find(g->header, name))
                return NULL;
        u8 = golden_data(g, name, ST_U8, &n);
        patches = malloc(n * sizeof(*patches));
        assert_non_null(patches);
        for (uint64_t i = 0; i < n; i++)
                patches[i] = ((float) u8[i] - 127.5f) / 127.5f;

        (void) snprintf(name, sizeof(name), "%s.patches", kind);
        if (st_header_find(g->header, name)) {
                const float *stored = golden_data(g, name, ST_F32, &n_float);

                assert_int_equal(n, n_float);
                assert_memory_equal(patches, stored, n * sizeof(*patches));
        }
        return patches;
}

/* Patches of a kind before picture (or video) `index`. */
static uint64_t patches_before(const Golden *g, const char *kind, uint64_t index, const int32_t **ret_grid) {
        char name[64];
        const int32_t *grid;
        uint64_t n, sum = 0;

        (void) snprintf(name, sizeof(name), "%s.grid_thw", kind);
        grid = golden_data(g, name, ST_I32, &n);
        assert_true(index < n / 3);
        for (uint64_t i = 0; i < index; i++)
                sum += (uint64_t) (grid[3 * i] * grid[3 * i + 1] * grid[3 * i + 2]);
        *ret_grid = grid + 3 * index;
        return sum;
}

static int integer(const json_t *segment, const char *key) {
        return (int) json_integer_value(json_object_get(segment, key));
}

static void add_vision(TextCase *k, const json_t *segment, uint64_t first_token) {
        bool video = strcmp(json_string_value(json_object_get(segment, "kind")), "video_block") == 0;
        const char *kind = video ? "video" : "image";
        size_t i = k->input.n_vision++;
        const int32_t *grid;
        uint64_t patch;

        assert_true(i < TEXT_VISION_MAX);
        patch = patches_before(k->file, kind, (uint64_t) integer(segment, kind), &grid);
        patch += (uint64_t) (integer(segment, "block") * grid[1] * grid[2]);
        k->parts[i] = (TextPart){kind, patch};
        k->vision[i] = (H3VisionInput){
                .grid_height = (uint64_t) grid[1],
                .grid_width = (uint64_t) grid[2],
                .first_token = first_token,
                .patches = k->patches[video] + patch * 1536,
        };
}

TextCase *text_case_open(const char *name) {
        const json_t *cases = json_object_get(the_index(), "cases"), *segments = NULL;
        TextCase *k = calloc(1, sizeof(*k));
        uint64_t token = 0, n_positions;
        char path[256];

        assert_non_null(k);
        (void) snprintf(path, sizeof(path), "text/encoder/%s.safetensors", name);
        k->file = golden_open_at(path);
        k->patches[0] = patches_of(k->file, "image");
        k->patches[1] = patches_of(k->file, "video");
        k->input = (H3TextInput){.compute = H3_COMPUTE_F32, .vision = k->vision};
        k->input.ids = golden_data(k->file, "ids", ST_I32, &k->input.n);
        k->input.positions = golden_data(k->file, "position_ids", ST_I32, &n_positions);
        assert_int_equal(n_positions, 3 * k->input.n);

        for (size_t i = 0; i < json_array_size(cases); i++)
                if (strcmp(json_string_value(json_object_get(json_array_get(cases, i), "name")), name) == 0)
                        segments = json_object_get(json_array_get(cases, i), "segments");
        assert_non_null(segments);
        for (size_t i = 0; i < json_array_size(segments); i++) {
                const json_t *segment = json_array_get(segments, i);

                if (strcmp(json_string_value(json_object_get(segment, "kind")), "text") != 0)
                        add_vision(k, segment, token + 1);
                token += (uint64_t) integer(segment, "tokens");
        }
        assert_int_equal(token, k->input.n);
        return k;
}

TextCase *text_case_free(TextCase *k) {
        if (!k)
                return NULL;
        (void) golden_free(k->file);
        free(k->patches[0]);
        free(k->patches[1]);
        free(k);
        return NULL;
}

void text_case_freep(TextCase **k) {
        (void) text_case_free(*k);
}

float *text_case_run(const H3TextModel *m, const H3TextInput *in, const H3StepHooks *hooks) {
        const LkOps *ops = lk_cpu_ops(LK_CPU_AUTO);
        H3Range rows[1];
        H3Plan plan = h3_text_plan(1, rows);
        H3Rank rank = {.ops = ops, .plan = &plan};
        uint64_t n = in->n * m->config.hidden;
        float *hidden = malloc(n * sizeof(*hidden));
        Fault f = {};

        assert_non_null(hidden);
        assert_int_equal(ops->context_new(1, &rank.context), 0);
        if (h3_text_run(&rank, m, in, hooks, hidden, &f) < 0)
                fail_msg("%s: %s", f.name, f.text);
        assert_null(ops->context_free(rank.context));
        if (in->compute == H3_COMPUTE_BF16) /* widened in place from the end */
                for (uint64_t i = n; i-- > 0;)
                        hidden[i] = h3_number(hidden, LK_BF16, i);
        return hidden;
}
