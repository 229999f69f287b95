/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "kernels/cpu/cpu.h"
#include "service/h3/exchange-size.h"
#include "service/shared/cleanup.h"
#include "tests/unit/h3/golden.h"

/* A rank's part of a step where no exchange is needed to see it: memory, sums, hooks, refusals. That ranks
 * give the same bits: tests/unit/worker/test-exchange.c. */

static int stop_at_two(void *userdata, uint32_t done, uint32_t total) {
        *(uint32_t *) userdata = done;
        assert_int_equal(total, 3);
        return done == 2 ? -ECANCELED : 0;
}

static void step_hook_stops_after_a_block(void **state) {
        CLEANUP(golden_model_freep) GoldenModel *m = golden_comfy();
        CLEANUP(golden_case_freep) GoldenCase *k = golden_case_open("case_t2va_tiny", &m->model->config);
        const H3Range rows = {0, k->layout->rows}, heads = {0, 8};
        const H3Plan plan = {.ranks = 1, .row_tile = 1, .chunks = 1, .rows = &rows, .heads = &heads};
        H3Rank rank = {.ops = lk_cpu_ops(LK_CPU_AUTO), .plan = &plan};
        CLEANUP_FREE float *video = malloc(k->n_video * sizeof(float)),
                           *audio = malloc(k->n_audio * sizeof(float));
        CLEANUP_FREE void *refined = NULL;
        uint32_t done = 0;
        H3StepInput in;
        Fault f = {};

        assert_int_equal(rank.ops->context_new(1, &rank.context), 0);
        assert_int_equal(h3_refine_text(&rank, m->model, H3_COMPUTE_BF16, k->text,
                                 k->layout->shape.text_rows, &refined, &f),
                0);
        in = golden_input(k, H3_COMPUTE_BF16, refined);
        assert_int_equal(
                h3_step(&rank, m->model, &in, &(H3StepHooks){.on_block = stop_at_two, .userdata = &done},
                        video, audio, &f),
                -ECANCELED);
        assert_int_equal(done, 2);
        assert_string_equal(f.name, FAULT_CANCELLED);

        f = (Fault){};
        in.sigma_video = 1.5f;
        assert_int_equal(h3_step(&rank, m->model, &in, NULL, video, audio, &f), -EINVAL);
        assert_string_equal(f.name, FAULT_INVALID_ARGUMENT);
        (void) rank.ops->context_free(rank.context);
}

static void step_memory_shrinks_with_the_share(void **state) {
        CLEANUP(golden_model_freep) GoldenModel *m = golden_comfy();
        CLEANUP(golden_case_freep) GoldenCase *k = golden_case_open("case_t2va_odd", &m->model->config);
        const H3Range one_rows = {0, 193}, one_heads = {0, 8}, rows[] = {{0, 97}, {97, 193}},
                      heads[] = {{0, 4}, {4, 8}};
        const H3Plan one = {.ranks = 1, .row_tile = 1, .chunks = 1, .rows = &one_rows, .heads = &one_heads};
        H3Plan two = {.ranks = 2, .row_tile = 1, .chunks = 1, .rows = rows, .heads = heads}, four = one;
        const H3Range beyond = {0, 194};
        H3Plan wrong = {.ranks = 1, .row_tile = 1, .chunks = 1, .rows = &beyond, .heads = &one_heads};
        uint64_t whole, half, f32, chunked;

        assert_int_equal(h3_step_memory(m->model, k->layout, &one, 0, H3_COMPUTE_BF16, 0, &whole), 0);
        assert_int_equal(h3_step_memory(m->model, k->layout, &one, 0, H3_COMPUTE_F32, 0, &f32), 0);
        for (two.kind = 0; two.kind < _H3_PLAN_MAX; two.kind++) {
                assert_int_equal(h3_step_memory(m->model, k->layout, &two, 1, H3_COMPUTE_BF16, 0, &half), 0);
                assert_true(half < whole && whole < f32);
        }
        assert_true(whole > 193ull * 1024 * 2 * 4); /* q, k, v and o */
        four.chunks = 4;
        assert_int_equal(h3_step_memory(m->model, k->layout, &four, 0, H3_COMPUTE_BF16, 0, &chunked), 0);
        assert_true(chunked < whole);

        two.kind = H3_PLAN_HIDDEN_GATHER;
        assert_int_equal(h3_step_memory(m->model, k->layout, &two, 2, H3_COMPUTE_BF16, 0, &half), -EINVAL);
        assert_int_equal(h3_step_memory(m->model, k->layout, &wrong, 0, H3_COMPUTE_BF16, 0, &half), -EINVAL);
        wrong = one;
        wrong.row_tile = 0;
        assert_int_equal(h3_step_memory(m->model, k->layout, &wrong, 0, H3_COMPUTE_BF16, 0, &half), -EINVAL);
        wrong = one;
        wrong.chunks = 0;
        assert_int_equal(h3_step_memory(m->model, k->layout, &wrong, 0, H3_COMPUTE_BF16, 0, &half), -EINVAL);
        wrong = one;
        wrong.kind = _H3_PLAN_MAX;
        assert_int_equal(h3_step_memory(m->model, k->layout, &wrong, 0, H3_COMPUTE_BF16, 0, &half), -EINVAL);
}

/* Chunks of all ranks are its rows, cut at tiles. */
static void plan_chunk_covers_the_rows(void **state) {
        static const uint64_t cuts[][2] = {{0, 1}, {0, 57}, {128, 131}, {256, 256}, {384, 4000}};
        static const uint32_t tiles[] = {1, 128};

        for (size_t i = 0; i < ELEMENTSOF(cuts); i++)
                for (size_t t = 0; t < ELEMENTSOF(tiles); t++)
                        for (uint32_t chunks = 1; chunks <= 32; chunks++) {
                                const H3Range rows = {cuts[i][0], cuts[i][1]};
                                const H3Plan p = {
                                        .ranks = 1, .row_tile = tiles[t], .chunks = chunks, .rows = &rows};
                                uint64_t at = rows.begin;

                                for (uint32_t c = 0; c < chunks; c++) {
                                        H3Range part = h3_plan_chunk(&p, 0, c);

                                        assert_int_equal(part.begin, at);
                                        assert_true(part.end >= at);
                                        assert_true(part.end % tiles[t] == 0 || part.end == rows.end);
                                        at = part.end;
                                }
                                assert_int_equal(at, rows.end);
                        }
}

/* The sums of service/h3/exchange-size.h for the released model, in plain words. */
static void exchange_size_of_the_released_model(void **state) {
        static H3Block blocks[50];
        const H3Model real = {.blocks = blocks,
                .config = {.layers = 50, .hidden = 5376, .heads = 56, .head_dim = 128, .inner = 7168}};
        const H3Range rows[] = {{0, 25344}, {25344, 50688}, {50688, 75794}}, heads[] = {{0, 19}, {19, 38}, {38, 56}};
        H3Plan p = {.ranks = 3, .row_tile = 128, .chunks = 4, .rows = rows, .heads = heads};
        uint64_t sent, received, own = 25344, others = 75794 - own;

        for (size_t i = 0; i < ELEMENTSOF(blocks); i++)
                blocks[i].attn.q.type = blocks[i].attn.k.type = blocks[i].attn.v.type = LK_BF16;
        h3_exchange_size(&real, &p, H3_COMPUTE_BF16, 0, &sent, &received);
        assert_int_equal(sent, 50 * (own * 5376 * 2 + others * 19 * 128 * 2));
        assert_int_equal(received, 50 * (others * 5376 * 2 + own * 37 * 128 * 2));

        p.kind = H3_PLAN_KV_GATHER;
        h3_exchange_size(&real, &p, H3_COMPUTE_BF16, 0, &sent, &received);
        assert_int_equal(sent, 50 * own * 2 * 7168 * 2);
        assert_int_equal(received, 50 * others * 2 * 7168 * 2);

        p.kind = H3_PLAN_QKV_ALL_TO_ALL;
        h3_exchange_size(&real, &p, H3_COMPUTE_BF16, 0, &sent, &received);
        assert_int_equal(sent, 50 * (own * 3 * 37 * 128 * 2 + others * 19 * 128 * 2));
        assert_int_equal(received, 50 * (others * 3 * 19 * 128 * 2 + own * 37 * 128 * 2));

        /* int8: a byte and a scale a row, where all of a block is int8 */
        p.kind = H3_PLAN_HIDDEN_GATHER;
        for (size_t i = 0; i < 10; i++)
                blocks[i].attn.q.type = blocks[i].attn.k.type = blocks[i].attn.v.type = LK_I8;
        h3_exchange_size(&real, &p, H3_COMPUTE_BF16, 0, &sent, &received);
        assert_int_equal(received, others * (10 * (5376 + 4) + 40 * 5376 * 2) + 50 * own * 37 * 128 * 2);
        blocks[0].attn.k.quant.rotation = 64; /* not the rotation of the others: made twice, so sent as it is */
        h3_exchange_size(&real, &p, H3_COMPUTE_BF16, 0, &sent, &received);
        assert_int_equal(received, others * (9 * (5376 + 4) + 41 * 5376 * 2) + 50 * own * 37 * 128 * 2);
        h3_exchange_size(&real, &p, H3_COMPUTE_F32, 0, &sent, &received);
        assert_int_equal(received, 50 * (others * 5376 * 4 + own * 37 * 128 * 4));
}

static void step_condition_without_latent_is_refused(void **state) {
        CLEANUP(golden_model_freep) GoldenModel *m = golden_comfy();
        CLEANUP(golden_case_freep) GoldenCase *k = golden_case_open("case_ref2va_small", &m->model->config);
        const H3Range rows = {0, k->layout->rows}, heads = {0, 8};
        const H3Plan plan = {.ranks = 1, .row_tile = 1, .chunks = 1, .rows = &rows, .heads = &heads};
        const H3Rank rank = {.ops = lk_cpu_ops(LK_CPU_AUTO), .plan = &plan};
        H3StepInput in = golden_input(k, H3_COMPUTE_BF16, NULL);
        Fault f = {};

        k->conditions[1].video = NULL;
        assert_int_equal(h3_step(&rank, m->model, &in, NULL, NULL, NULL, &f), -EINVAL);
        assert_string_equal(f.name, FAULT_INVALID_TENSOR);
        assert_non_null(strstr(f.text, "condition 1"));
        f = (Fault){};
        in.conditions = NULL;
        assert_int_equal(h3_step(&rank, m->model, &in, NULL, NULL, NULL, &f), -EINVAL);
        assert_non_null(strstr(f.text, "condition 0"));
}

/* The released model and 200,000 rows: sums beyond 2^32, counted here in plain words. */
static void step_memory_of_a_large_request_is_counted(void **state) {
        const H3Model real = {.config = {.layers = 50,
                                      .hidden = 5376,
                                      .heads = 56,
                                      .head_dim = 128,
                                      .inner = 7168,
                                      .ffn = 14336,
                                      .video_channels = 24,
                                      .audio_channels = 32,
                                      .patch_h = 2,
                                      .patch_w = 2,
                                      .text_dim = 5120,
                                      .time_freq_dim = 256,
                                      .time_hidden = 5376,
                                      .time_dim = 2688,
                                      .rope_freqs = 16}};
        const H3Condition video = {.kind = H3_CONDITION_VIDEO, .grid = {92, 48, 84}, .audio = 520};
        const H3Shape s = {.text_rows = 3000,
                .frames = 102,
                .height = 48,
                .width = 84,
                .audio = 575,
                .n_conditions = 1,
                .conditions = &video};
        H3Layout *l = NULL;
        uint64_t bytes;
        double n, expected;

        assert_int_equal(h3_layout_new(&real.config, &s, NULL, &l, NULL), 0);
        n = (double) l->rows;
        assert_true(n > 200000);
        {
                const H3Range rows = {0, l->rows}, heads = {0, 56};
                const H3Plan plan = {.ranks = 1, .row_tile = 128, .chunks = 25, .rows = &rows, .heads = &heads};

                assert_int_equal(h3_step_memory(&real, l, &plan, 0, H3_COMPUTE_BF16, 0, &bytes), 0);
        }
        /* x, q, k, v, o in two bytes; rope and two indices in four; h and y of a chunk; a piece of
         * the MLP; modulation of two blocks */
        expected = n * (2 * (5376 + 4 * 7168) + 4 * (2 * 48 + 2)) + n / 25 * (2 * 2 * 5376) +
                   4096.0 * 3 * 14336 * 2 + 2.0 * 4 * 3 * 6 * 5376 * 2;
        assert_true((double) bytes > expected && (double) bytes < expected * 1.001);
        (void) h3_layout_free(l);
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(step_hook_stops_after_a_block),
                cmocka_unit_test(step_condition_without_latent_is_refused),
                cmocka_unit_test(step_memory_of_a_large_request_is_counted),
                cmocka_unit_test(step_memory_shrinks_with_the_share),
                cmocka_unit_test(plan_chunk_covers_the_rows),
                cmocka_unit_test(exchange_size_of_the_released_model),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
