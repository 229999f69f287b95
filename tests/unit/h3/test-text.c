/* SPDX-License-Identifier: Apache-2.0 */
/* The conditioner against the published one, on every case of the folder: every stage in f32, the result in
 * bf16. */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/cpu.h"
#include "service/shared/cleanup.h"
#include "tests/unit/h3/text-case.h"

/* Limits of the README of the golden data. */
#define F32 2e-5
#define BF16 0.02

typedef struct Stages {
        const TextCase *k;
        const H3TextModel *m;
        uint32_t compared;
        double worst;
} Stages;

static void compare(Stages *s, const char *name, const float *got, const float *want, uint64_t n) {
        double rel = golden_distance(got, want, n, NULL);

        s->compared++;
        s->worst = rel > s->worst ? rel : s->worst;
        if (!(rel <= F32))
                fail_msg("%s: rel %g", name, rel);
}

/* A stage of vision input `number` is a part of the tensor of its kind. */
static void compare_vision(
        Stages *s, const char *stage, unsigned number, const float *got, uint64_t rows, uint64_t columns) {
        bool deepstack = strcmp(stage, "vision.deepstack") == 0;
        bool patches = strcmp(stage, "vision.embed") == 0 || strcmp(stage, "vision.trunk") == 0;
        const TextPart *part = s->k->parts + (deepstack ? number / H3_DEEPSTACK_MAX : number);
        char name[96];
        uint64_t n, first = patches ? part->patch : part->patch / 4;

        if (deepstack)
                (void) snprintf(
                        name, sizeof(name), "vision.%s.deepstack.%u", part->kind, number % H3_DEEPSTACK_MAX);
        else
                (void) snprintf(name, sizeof(name), "vision.%s.%s", part->kind, stage + strlen("vision."));
        if (patches && !st_header_find(s->k->file->header, name)) /* left out of large cases */
                return;
        const float *want = golden_data(s->k->file, name, ST_F32, &n);

        assert_true((first + rows) * columns <= n);
        compare(s, name, got, want + first * columns, rows * columns);
}

/* Frequency by frequency: the slow ones hardly show in the whole. */
static void compare_columns(
        Stages *s, const char *name, const float *got, const float *want, uint64_t rows, uint64_t columns) {
        CLEANUP_FREE float *x = malloc(2 * rows * sizeof(float));

        assert_non_null(x);
        for (uint64_t c = 0; c < columns; c++) {
                char column[64];

                for (uint64_t r = 0; r < rows; r++) {
                        x[r] = got[r * columns + c];
                        x[rows + r] = want[r * columns + c];
                }
                (void) snprintf(column, sizeof(column), "%s of frequency %u", name, (unsigned) c);
                compare(s, column, x, x + rows, rows);
        }
}

static void on_tap(void *userdata, const char *name, const float *values, uint64_t rows, uint64_t columns) {
        Stages *s = userdata;
        const char *dot = strrchr(name, '.');
        char stage[64];
        uint64_t n;

        if (strncmp(name, "vision.", 7) == 0) {
                (void) snprintf(stage, sizeof(stage), "%.*s", (int) (dot - name), name);
                compare_vision(s, stage, (unsigned) atoi(dot + 1), values, rows, columns);
                return;
        }
        if (strcmp(name, "residual.0") == 0)
                name = "embeds";
        if (!st_header_find(
                    s->k->file->header, name)) /* left out of large cases; the last one is "hidden" */
                return;
        const float *want = golden_data(s->k->file, name, ST_F32, &n);

        assert_int_equal(n, rows * columns);
        if (strcmp(name, "rope.sin") == 0)
                compare_columns(s, name, values, want, rows, columns);
        else
                compare(s, name, values, want, n);
}

static void run_cases(const char *file, H3Compute compute) {
        CLEANUP(text_model_files_freep) TextModelFiles *t = text_model_files_open(file);
        const char *names[TEXT_CASES_MAX];
        size_t n_cases = text_case_names(names);

        for (size_t i = 0; i < n_cases; i++) {
                CLEANUP(text_case_freep) TextCase *k = text_case_open(names[i]);
                CLEANUP_FREE float *hidden = NULL;
                Stages s = {.k = k, .m = t->model};
                const H3StepHooks hooks = {
                        .on_tap = compute == H3_COMPUTE_F32 ? on_tap : NULL, .userdata = &s};
                uint64_t n;
                const float *want = golden_data(k->file, "hidden", ST_F32, &n);
                double rel;

                k->input.compute = compute;
                hidden = text_case_run(t->model, &k->input, &hooks);
                assert_int_equal(n, k->input.n * t->model->config.hidden);
                rel = golden_distance(hidden, want, n, NULL);
                print_message("%s %s %s: rel %.3g, worst stage %.3g of %u\n", file, names[i],
                        compute == H3_COMPUTE_F32 ? "f32" : "bf16", rel, s.worst, s.compared);
                if (!(rel <= (compute == H3_COMPUTE_F32 ? F32 : BF16)))
                        fail_msg("%s: hidden: rel %g", names[i], rel);
                if (compute == H3_COMPUTE_F32)
                        assert_true(s.compared >=
                                    1 + k->input.n_vision * (1 + t->model->config.vision.n_deepstack));
        }
}

static void text_f32_every_stage_matches(void **state) {
        run_cases("model.comfy.safetensors", H3_COMPUTE_F32);
}

static void text_bf16_matches(void **state) {
        run_cases("model.comfy.safetensors", H3_COMPUTE_BF16);
}

/* Where the folder has the published layout, too: all layers, final norm and head, the same bits. */
static void text_published_layout_same_bits(void **state) {
        CLEANUP(text_model_files_freep) TextModelFiles *a = text_model_files_open("model.comfy.safetensors"), *b = NULL;
        const char *names[TEXT_CASES_MAX];
        size_t n_cases = text_case_names(names);

        if (!text_model_files_exist("model.hf.safetensors")) {
                print_message("no model.hf.safetensors in this folder; test-text-model makes one\n");
                return;
        }
        b = text_model_files_open("model.hf.safetensors");
        for (size_t i = 0; i < n_cases; i++) {
                CLEANUP(text_case_freep) TextCase *k = text_case_open(names[i]);
                CLEANUP_FREE float *x = text_case_run(a->model, &k->input, NULL);
                CLEANUP_FREE float *y = text_case_run(b->model, &k->input, NULL);

                assert_memory_equal(x, y, k->input.n * a->model->config.hidden * sizeof(*x));
        }
}

#define LONG 4096

static int stop_inside(void *userdata, uint32_t done, uint32_t total) {
        uint32_t *asked = userdata;

        assert_int_equal(done, 0);
        return ++*asked == 3 ? -ECANCELED : 0;
}

/* Attention grows with the square of the tokens: a cancel is heard inside of a layer. */
static void text_long_stops_inside_a_layer(void **state) {
        CLEANUP(text_model_files_freep) TextModelFiles *files = text_model_files_open("model.comfy.safetensors");
        CLEANUP_FREE int32_t *ids = calloc(LONG, sizeof(*ids)), *positions = calloc(3 * LONG, sizeof(*positions));
        const LkOps *ops = lk_cpu_ops(LK_CPU_AUTO);
        H3Range rows[1];
        H3Plan plan = h3_text_plan(1, rows);
        H3Rank rank = {.ops = ops, .plan = &plan};
        H3TextInput in = {.compute = H3_COMPUTE_F32, .n = LONG, .ids = ids, .positions = positions};
        uint32_t asked = 0;
        Fault f = {};

        assert_non_null(ids);
        assert_non_null(positions);
        for (int32_t i = 0; i < 3 * LONG; i++)
                positions[i] = i % LONG;
        assert_int_equal(ops->context_new(1, &rank.context), 0);
        assert_int_equal(h3_text_run(&rank, files->model, &in, &(H3StepHooks){.on_block = stop_inside, .userdata = &asked},
                                 NULL, &f),
                -ECANCELED);
        assert_int_equal(asked, 3);

        in.n = files->model->config.tokens_max + 1ull;
        f = (Fault){};
        assert_int_equal(h3_text_run(&rank, files->model, &in, NULL, NULL, &f), -EINVAL);
        assert_non_null(strstr(f.text, "max_position_embeddings"));
        assert_null(ops->context_free(rank.context));
}

int main(void) {
        static const struct CMUnitTest tests[] = {
                cmocka_unit_test(text_f32_every_stage_matches),
                cmocka_unit_test(text_bf16_matches),
                cmocka_unit_test(text_published_layout_same_bits),
                cmocka_unit_test(text_long_stops_inside_a_layer),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
