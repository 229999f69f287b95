/* SPDX-License-Identifier: Apache-2.0 */
/* The conditioner's golden cases with its weights in a played device's memory (device-ops.h), in the types of files: the bits of
 * the plain run. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "kernels/cpu/cpu.h"
#include "service/h3/number.h"
#include "service/h3/text-private.h"
#include "service/shared/cleanup.h"
#include "service/worker/model-weights.h"
#include "tests/unit/h3/text-quantised.h"
#include "tests/unit/worker/device-ops.h"

#define PLENTY (UINT64_C(1) << 32)

/* [n, hidden] as text_case_run(), of a run with so much of the weights on the device. */
static float *run_on_device(const H3TextModel *m, const H3TextInput *in, bool resident) {
        const LkOps *ops = device_ops();
        uint64_t n = in->n * m->config.hidden, least;
        float *hidden = malloc(n * sizeof(*hidden));
        H3Range rows[1];
        H3Plan plan = h3_text_plan(1, rows);
        H3Rank rank = {.ops = ops, .plan = &plan};
        ModelWeights *w = NULL;
        Fault f = {};

        assert_non_null(hidden);
        assert_int_equal(ops->context_new(1, &rank.context), 0);
        assert_int_equal(
                model_weights_new(&h3_weights_text, m, &(DeviceWeightsConfig){.ops = ops, .context = rank.context}, &w), 0);
        assert_int_equal(device_weights_plan(model_weights_device(w), 0, true, &least), -ENOSPC);
        assert_int_equal(device_weights_plan(model_weights_device(w), resident ? PLENTY : least, true, &least), 0);
        assert_int_equal(model_weights_begin(w, H3_PASS_CODE), 0);
        rank.weights = model_weights_interface(w);
        if (h3_text_run(&rank, m, in, NULL, hidden, &f) < 0)
                fail_msg("%s: %s", f.name, f.text);
        (void) model_weights_free(w);
        (void) ops->context_free(rank.context);
        device_ops_done();
        if (in->compute == H3_COMPUTE_BF16) /* widened in place from the end */
                for (uint64_t i = n; i-- > 0;)
                        hidden[i] = h3_number(hidden, LK_BF16, i);
        return hidden;
}

static void check(const H3TextModel *m, const char *name) {
        const H3Compute computes[] = {H3_COMPUTE_F32, H3_COMPUTE_BF16};
        CLEANUP(text_case_freep) TextCase *k = text_case_open(name);

        for (size_t i = 0; i < ELEMENTSOF(computes); i++) {
                CLEANUP_FREE float *want = NULL;
                uint64_t size = k->input.n * m->config.hidden * sizeof(float);

                k->input.compute = computes[i];
                want = text_case_run(m, &k->input, NULL);
                for (unsigned resident = 0; resident < 2; resident++) {
                        CLEANUP_FREE float *have = run_on_device(m, &k->input, resident);

                        if (memcmp(have, want, size) != 0)
                                fail_msg("%s: the bits differ", name);
                }
        }
}

static void text_of_every_case_same_bits(void **state) {
        TextModelFiles *files = text_model_files_open("model.comfy.safetensors");
        const char *names[TEXT_CASES_MAX];
        size_t n = text_case_names(names);

        assert_true(n > 0);
        for (size_t i = 0; i < n; i++)
                check(files->model, names[i]);
        (void) text_model_files_free(files);
}

static void text_of_every_type_same_bits(void **state) {
        for (TextFormat format = TEXT_INT8; format <= TEXT_NVFP4_TABLE; format++) {
                CLEANUP(text_quantised_freep) TextQuantised *q = text_quantised_new(format);

                check(q->models[1], "image_video");
                check(q->models[2], "text_only"); /* f32 */
        }
}

/* Rows of a table of several tiles of block scales, in pieces and any order. */
static void table_rows_are_the_tables(void **state) {
        enum { VOCAB = 300, COLS = 128, TOKENS = TEXT_PIECE_ROWS + 131 };
        static uint8_t numbers[VOCAB * COLS], blocks[384 * 8];
        static float scales[VOCAB];
        static int32_t ids[TOKENS];
        static float want[TOKENS * COLS], have[TOKENS * COLS];
        const LkType types[] = {LK_NVFP4, LK_I8, LK_F8_E4M3, LK_BF16};

        for (size_t i = 0; i < sizeof(numbers); i++)
                numbers[i] = (uint8_t) (i * 2654435761u >> 13) & 0x77;
        for (size_t i = 0; i < sizeof(blocks); i++)
                blocks[i] = (uint8_t) (0x30 + i % 13);
        for (size_t i = 0; i < VOCAB; i++)
                scales[i] = (float) (i + 1) / 64;
        for (size_t i = 0; i < TOKENS; i++)
                ids[i] = (int32_t) (i * 7919 % VOCAB);
        for (size_t t = 0; t < ELEMENTSOF(types); t++)
                for (unsigned one = 0; one < 2; one++) {
                        uint64_t row = lk_row_size(types[t], COLS);
                        H3TextModel m = {.config.hidden = COLS, .embed = {.data = numbers, .type = types[t], .rows = VOCAB / 2,
                                                                        .cols = COLS, .row_stride = row, .block_rows = VOCAB / 2,
                                                                        .block_stride = VOCAB / 2 * row}};
                        H3TextInput in = {.n = TOKENS, .ids = ids};

                        if (types[t] != LK_BF16) { /* of a part of a tensor */
                                m.embed.rows = m.embed.block_rows = VOCAB;
                                m.embed.quant = (LkQuant){.scale = scales, .scale_stride = one ? 0 : 4,
                                        .block_scale = types[t] == LK_NVFP4 ? blocks : NULL,
                                        .block_scale_cols = types[t] == LK_NVFP4 ? 8 : 0};
                        }
                        for (size_t i = 0; i < TOKENS; i++)
                                ids[i] %= (int32_t) m.embed.rows;
                        for (unsigned device = 0; device < 2; device++) {
                                H3TextSize size = {.compute = H3_COMPUTE_F32, .ranks = 1, .tokens = TOKENS};
                                TextRun run = text_run_make(&m, &size, 0);
                                void *x, *io, *table[3];

                                run.ops = device ? device_ops() : lk_cpu_ops(LK_CPU_AUTO);
                                assert_int_equal(run.ops->context_new(1, &run.context), 0);
                                assert_int_equal(run.ops->memory_new(run.context, sizeof(want), &x), 0);
                                assert_int_equal(run.ops->memory_new(run.context, TEXT_PIECE_ROWS * COLS * 4, &io), 0);
                                for (unsigned i = 0; i < 3; i++)
                                        assert_int_equal(run.ops->memory_new(run.context, TEXT_PIECE_ROWS * COLS * 2, table + i), 0);
                                run.x = x;
                                run.io = io;
                                run.table = table[0];
                                run.table_scale = table[1];
                                run.table_blocks = table[2];
                                assert_int_equal(text_embed(&run, &in, 0, TOKENS), 0);
                                assert_int_equal(run.ops->download(run.context, device ? have : want, x, sizeof(want)), 0);
                                run.ops->memory_free(run.context, x);
                                run.ops->memory_free(run.context, io);
                                for (unsigned i = 0; i < 3; i++)
                                        run.ops->memory_free(run.context, table[i]);
                                (void) run.ops->context_free(run.context);
                                if (device)
                                        device_ops_done();
                        }
                        assert_memory_equal(have, want, sizeof(want));
                }
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(text_of_every_case_same_bits),
                cmocka_unit_test(text_of_every_type_same_bits),
                cmocka_unit_test(table_rows_are_the_tables),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
