/* SPDX-License-Identifier: Apache-2.0 */
/* Where patches stand, and a run's other sides: sizes over the pieces, hooks, memory, refusals. */

#include "service/h3/vision.h"

#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "kernels/cpu/cpu.h"
#include "service/shared/cleanup.h"
#include "tests/unit/h3/text-case.h"

/* The published way: rows * columns, cut into 2 x 2, those row by row. */
static void place_follows_the_published_order(void **state) {
        static const uint64_t grids[][2] = {{2, 2}, {4, 6}, {6, 4}, {2, 52}};

        for (size_t g = 0; g < ELEMENTSOF(grids); g++) {
                uint64_t i = 0;

                for (uint64_t br = 0; br < grids[g][0] / 2; br++)
                        for (uint64_t bc = 0; bc < grids[g][1] / 2; bc++)
                                for (uint64_t r = 0; r < 2; r++)
                                        for (uint64_t c = 0; c < 2; c++, i++) {
                                                uint64_t row, column;

                                                h3_vision_place(grids[g][1], i, &row, &column);
                                                assert_int_equal(row, 2 * br + r);
                                                assert_int_equal(column, 2 * bc + c);
                                        }
        }
}

#define GRID 5

/* A table that is linear in row and column comes out linear, whatever the grid: corners on corners. */
static void positions_stretch_the_table(void **state) {
        static const uint64_t grids[][2] = {{2, 2}, {4, 8}, {10, 6}, {2, 40}};
        float table[GRID * GRID * 2];
        H3TextModel m = {.config.vision = {.hidden = 2, .grid = GRID},
                .positions = {table, LK_F32, ELEMENTSOF(table)}};

        for (uint32_t r = 0; r < GRID; r++)
                for (uint32_t c = 0; c < GRID; c++) {
                        table[(r * GRID + c) * 2] = (float) r + 100;
                        table[(r * GRID + c) * 2 + 1] = (float) c * 3;
                }
        for (size_t g = 0; g < ELEMENTSOF(grids); g++) {
                uint64_t height = grids[g][0], width = grids[g][1];
                CLEANUP_FREE float *p = malloc(height * width * 2 * sizeof(float));

                h3_vision_positions(&m, height, width, p);
                for (uint64_t i = 0; i < height * width; i++) {
                        uint64_t row, column;

                        h3_vision_place(width, i, &row, &column);
                        assert_true(
                                fabs(p[2 * i] - (100 + (double) row * 4 / (double) (height - 1))) < 2e-5);
                        assert_true(fabs(p[2 * i + 1] - (double) column * 12 / (double) (width - 1)) < 2e-5);
                }
        }
}

static void rope_turns_by_row_then_column(void **state) {
        const H3VisionConfig c = {.head_dim = 72, .theta = 10000};
        float cosines[8 * 36], sines[8 * 36];

        h3_vision_rope(&c, 2, 4, cosines, sines);
        for (uint64_t i = 0; i < 8; i++)
                for (uint32_t k = 0; k < 36; k++) {
                        uint64_t place[2];
                        double angle;

                        h3_vision_place(4, i, place, place + 1);
                        angle = (double) place[k / 18] * pow(10000, -(double) (k % 18) / 18);
                        assert_true(fabs(cosines[i * 36 + k] - cos(angle)) < 1e-6);
                        assert_true(fabs(sines[i * 36 + k] - sin(angle)) < 1e-6);
                }
}

typedef struct Progress {
        uint32_t calls, last, total, stop;
} Progress;

static int on_block(void *userdata, uint32_t done, uint32_t total) {
        Progress *p = userdata;

        assert_int_equal(done, p->last + 1);
        p->calls++;
        p->last = done;
        p->total = total;
        return done == p->stop ? -ECANCELED : 0;
}

static void run_tells_every_block_and_stops(void **state) {
        CLEANUP(text_model_files_freep) TextModelFiles *t = text_model_files_open("model.comfy.safetensors");
        CLEANUP(text_case_freep) TextCase *k = text_case_open("image_video");
        H3Range rows[1];
        H3Plan plan = h3_text_plan(1, rows);
        H3Rank rank = {.ops = lk_cpu_ops(LK_CPU_AUTO), .plan = &plan};
        uint32_t blocks =
                (uint32_t) (k->input.n_vision * t->model->config.vision.depth + t->model->config.layers);
        CLEANUP_FREE void *hidden = malloc(k->input.n * t->model->config.hidden * sizeof(float));
        static const uint32_t stops[] = {0, 1, 4, 13, 16};

        assert_int_equal(rank.ops->context_new(1, &rank.context), 0);
        for (size_t i = 0; i < ELEMENTSOF(stops); i++) {
                Progress p = {.stop = stops[i]};
                const H3StepHooks hooks = {.on_block = on_block, .userdata = &p};
                Fault f = {};

                assert_int_equal(h3_text_run(&rank, t->model, &k->input, &hooks, hidden, &f),
                        stops[i] ? -ECANCELED : 0);
                assert_string_equal(f.name, stops[i] ? FAULT_CANCELLED : "");
                assert_int_equal(p.last, stops[i] ? stops[i] : blocks);
                assert_int_equal(p.total, blocks);
        }
        assert_null(rank.ops->context_free(rank.context));
}

/* ---- memory ---- */

static uint64_t asked;
static const LkOps *real;

static int counted_memory_new(LkContext *c, uint64_t size, void **ret) {
        asked = size;
        return real->memory_new(c, size, ret);
}

static int no_memory_new(LkContext *c, uint64_t size, void **ret) {
        return -ENOMEM;
}

static void memory_is_what_a_run_takes(void **state) {
        CLEANUP(text_model_files_freep) TextModelFiles *t = text_model_files_open("model.comfy.safetensors");
        static const char *const names[] = {"text_only", "one_image", "image_video"};
        H3Range rows[1];
        H3Plan plan = h3_text_plan(1, rows);
        LkOps ops;
        H3Rank rank = {.ops = &ops, .plan = &plan};

        real = lk_cpu_ops(LK_CPU_AUTO);
        ops = *real;
        assert_int_equal(ops.context_new(1, &rank.context), 0);
        for (size_t i = 0; i < 2 * ELEMENTSOF(names); i++) {
                CLEANUP(text_case_freep) TextCase *k = text_case_open(names[i / 2]);
                CLEANUP_FREE void *hidden = malloc(k->input.n * 32 * sizeof(float));
                H3TextSize size;
                char bytes[32];
                Fault f = {};

                k->input.compute = i % 2 ? H3_COMPUTE_BF16 : H3_COMPUTE_F32;
                size = h3_text_size(&k->input, 1);
                ops.memory_new = counted_memory_new;
                assert_int_equal(h3_text_run(&rank, t->model, &k->input, NULL, hidden, &f), 0);
                assert_int_equal(asked, h3_text_memory(t->model, &size));

                ops.memory_new = no_memory_new;
                assert_int_equal(h3_text_run(&rank, t->model, &k->input, NULL, hidden, &f), -ENOMEM);
                assert_string_equal(f.name, FAULT_DOES_NOT_FIT);
                (void) snprintf(bytes, sizeof(bytes), "%llu", (unsigned long long) asked);
                assert_non_null(strstr(f.text, bytes));
        }
        assert_null(ops.context_free(rank.context));
}

/* ---- refusals ---- */

#define REFUSED(fault, word, statement)                                                                     \
        do {                                                                                                \
                H3TextInput in = k->input;                                                                  \
                H3VisionInput vision[TEXT_VISION_MAX];                                                      \
                int32_t ids[64], positions[192];                                                            \
                Fault f = {};                                                                               \
                assert_true(in.n <= 64);                                                                    \
                memcpy(vision, k->vision, sizeof(vision));                                                  \
                memcpy(ids, in.ids, in.n * sizeof(*ids));                                                   \
                memcpy(positions, in.positions, 3 * in.n * sizeof(*positions));                             \
                in.vision = vision;                                                                         \
                in.ids = ids;                                                                               \
                in.positions = positions;                                                                   \
                assert_int_equal(h3_text_check(t->model, &in, &f), 0);                                      \
                statement;                                                                                  \
                assert_int_equal(h3_text_check(t->model, &in, &f), -EINVAL);                                \
                assert_string_equal(f.name, fault);                                                         \
                if (!strstr(f.text, word))                                                                  \
                        fail_msg("\"%s\" is not in: %s", word, f.text);                                     \
                assert_int_equal(h3_text_run(&rank, t->model, &in, NULL, hidden, NULL), -EINVAL);           \
        } while (0)

static void check_refuses_what_does_not_fit(void **state) {
        CLEANUP(text_model_files_freep) TextModelFiles *t = text_model_files_open("model.comfy.safetensors");
        CLEANUP(text_case_freep) TextCase *k = text_case_open("image_video");
        H3Range rows[1];
        H3Plan plan = h3_text_plan(1, rows);
        H3Rank rank = {.ops = lk_cpu_ops(LK_CPU_AUTO), .plan = &plan};
        CLEANUP_FREE void *hidden = malloc(k->input.n * 32 * sizeof(float));

        assert_int_equal(rank.ops->context_new(1, &rank.context), 0);
        REFUSED(FAULT_INVALID_ARGUMENT, "0 tokens", in.n = 0);
        REFUSED(FAULT_INVALID_ARGUMENT, "tokens", in.n = H3_TEXT_TOKENS_MAX + 1);
        REFUSED(FAULT_INVALID_ARGUMENT, "not given", in.ids = NULL);
        REFUSED(FAULT_INVALID_ARGUMENT, "not given", in.positions = NULL);
        REFUSED(FAULT_INVALID_ARGUMENT, "not given", in.vision = NULL);
        REFUSED(FAULT_INVALID_ARGUMENT, "Token 2 has the id 160", ids[2] = 160);
        REFUSED(FAULT_INVALID_ARGUMENT, "Token 0 has the id -1", ids[0] = -1);
        REFUSED(FAULT_INVALID_ARGUMENT, "Token 46 has the id", ids[46] = 1 << 30);
        REFUSED(FAULT_INVALID_ARGUMENT, "Token 3 has the position -1", positions[3] = -1);
        REFUSED(FAULT_INVALID_ARGUMENT, "Token 46 has the position",
                positions[3 * in.n - 1] = (1 << 24) + 1);
        REFUSED(FAULT_INVALID_TENSOR, "Vision input 0", vision[0].grid_height = 5);
        REFUSED(FAULT_INVALID_TENSOR, "Vision input 1", vision[1].grid_width = 0);
        REFUSED(FAULT_INVALID_TENSOR, "Vision input 1", vision[1].grid_width = UINT64_MAX - 1);
        REFUSED(FAULT_INVALID_TENSOR, "Vision input 2 has no patches", vision[2].patches = NULL);
        REFUSED(FAULT_INVALID_ARGUMENT, "Vision input 1", vision[1].first_token = vision[0].first_token + 2);
        REFUSED(FAULT_INVALID_ARGUMENT, "Vision input 2", vision[2].first_token = in.n - 1);
        REFUSED(FAULT_INVALID_ARGUMENT, "Vision input 2", vision[2].first_token = UINT64_MAX);
        assert_null(rank.ops->context_free(rank.context));
}

/* Ids under a picture are not looked at. */
static void ids_under_a_picture_do_not_count(void **state) {
        CLEANUP(text_model_files_freep) TextModelFiles *t = text_model_files_open("model.comfy.safetensors");
        CLEANUP(text_case_freep) TextCase *k = text_case_open("one_image");
        CLEANUP_FREE float *x = text_case_run(t->model, &k->input, NULL), *y = NULL;
        CLEANUP_FREE int32_t *ids = malloc(k->input.n * sizeof(*ids));

        memcpy(ids, k->input.ids, k->input.n * sizeof(*ids));
        for (uint64_t i = 0; i < 6; i++)
                ids[k->vision[0].first_token + i] = -7;
        k->input.ids = ids;
        y = text_case_run(t->model, &k->input, NULL);
        assert_memory_equal(x, y, k->input.n * 32 * sizeof(float));
}

int main(void) {
        static const struct CMUnitTest tests[] = {
                cmocka_unit_test(place_follows_the_published_order),
                cmocka_unit_test(positions_stretch_the_table),
                cmocka_unit_test(rope_turns_by_row_then_column),
                cmocka_unit_test(run_tells_every_block_and_stops),
                cmocka_unit_test(memory_is_what_a_run_takes),
                cmocka_unit_test(check_refuses_what_does_not_fit),
                cmocka_unit_test(ids_under_a_picture_do_not_count),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
