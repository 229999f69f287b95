/* SPDX-License-Identifier: Apache-2.0 */
/* TOKENIZE and ENCODE on the demo model's conditioner, and what is kept of the results. */
#include "service/worker/coder.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <math.h>
#include <string.h>

#include <cmocka.h>

#include "service/h3/presentation.h"
#include "service/h3/text.h"
#include "service/shared/cleanup.h"
#include "tests/unit/worker/coder-bench.h"

DEFINE_CLEANUP(Job *, job_unref)

#define MODEL 1
#define ARENA (UINT64_C(4) << 20)
#define DIM 128
#define PROMPT "a red circle moves left over a dark blue background, low tone"

#ifdef SANITIZED /* ten times slower */
static const uint32_t rank_counts[] = {1, 3};
#else
static const uint32_t rank_counts[] = {1, 2, 3, 4, 5, 7, 8};
#endif

static atomic_int gemm_count;
static int (*real_gemm)(LkContext *c, const LkGemm *a);

static int counting_gemm(LkContext *c, const LkGemm *a) {
        gemm_count++;
        return real_gemm(c, a);
}

static int setup(void **state) {
        CoderBench *b = bench_new(1, ARENA);

        real_gemm = b->ops.gemm;
        b->ops.gemm = counting_gemm;
        bench_load(b, MODEL, bench_conditioner);
        encode_cache_set_limit(&b->runner.encodes, 1 << 20);
        *state = b;
        return 0;
}

static int teardown(void **state) {
        (void) bench_free(*state);
        return 0;
}

static WireTensor put_text(CoderBench *b, const char *text) {
        return bench_put(b, ST_U8, 1, (uint64_t[]){strlen(text)}, text);
}

static WireJobOpen tokenize_job(CoderBench *b, const char *text) {
        WireJobOpen w = bench_job(b, WIRE_JOB_TOKENIZE, MODEL);

        if (*text)
                w.text = put_text(b, text);
        return w;
}

static WireJobOpen encode_job(CoderBench *b, const char *text) {
        WireJobOpen w = bench_job(b, WIRE_JOB_ENCODE, MODEL);

        if (*text)
                w.text = put_text(b, text);
        w.owner = 1000;
        w.compute = WIRE_COMPUTE_F32;
        w.output_type = ST_F32;
        return w;
}

static void add_picture(CoderBench *b, WireJobOpen *w, WireConditionKind kind, uint64_t frames,
        uint64_t height, uint64_t width) {
        CLEANUP_FREE uint8_t *pixels = bench_bytes(frames * height * width * 3, 11 + w->n_conditions);
        const WireTensor t = bench_put(b, ST_U8, 4, (uint64_t[]){frames, height, width, 3}, pixels);

        w->conditions[w->n_conditions++] = (WireCondition){
                .kind = kind, .video_offset = t.offset, .frames = frames, .height = height, .width = width};
}

/* A prompt, and two keyframes of 3 x 2 and 2 x 2 tokens... if nothing resizes them. */
static WireJobOpen keyframes_job(CoderBench *b) {
        WireJobOpen w = encode_job(b, PROMPT);

        add_picture(b, &w, WIRE_CONDITION_KEYFRAME, 1, 96, 64);
        add_picture(b, &w, WIRE_CONDITION_KEYFRAME, 1, 64, 64);
        return w;
}

static void tokenize_gives_the_tokenizers_ids(void **state) {
        CoderBench *b = *state;
        const WireJobOpen w = tokenize_job(b, PROMPT "<|vision_start|>");
        CLEANUP(job_unrefp) Job *j = bench_open(b, &w);
        CLEANUP_FREE int32_t *expected = NULL, *ids = NULL;
        Fault f = {};
        size_t n;

        assert_int_equal(
                h3_tokenizer_encode(model_table_find(&b->models, MODEL)->tokenizer,
                        PROMPT "<|vision_start|>", strlen(PROMPT "<|vision_start|>"), &expected, &n, &f),
                0);
        assert_int_equal(j->coder->rows, n);
        assert_int_equal(j->steps, 1);
        bench_finish(b, j);
        assert_committed(b, j, 1);
        ids = bench_output(b, j, 0);
        assert_memory_equal(ids, expected, n * sizeof(*ids));
        assert_int_equal(ids[n - 1], 801);
}

static void tokenize_of_nothing_is_empty(void **state) {
        CoderBench *b = *state;
        const WireJobOpen w = tokenize_job(b, "");
        CLEANUP(job_unrefp) Job *j = bench_open(b, &w);

        assert_int_equal(j->coder->rows, 0);
        assert_int_equal(j->coder->outputs[0].tensor.size, 0);
        bench_finish(b, j);
        assert_committed(b, j, 1);
}

static void encode_ranks_and_delays_same_bits(void **state) {
        CoderBench *b = *state;
        const WireCompute computes[] = {WIRE_COMPUTE_F32, WIRE_COMPUTE_BF16};

        encode_cache_set_limit(&b->runner.encodes, 0);
        for (size_t k = 0; k < ELEMENTSOF(computes); k++) {
                CLEANUP_FREE uint8_t *expected = NULL;
                WireJobOpen w = keyframes_job(b);
                uint64_t size, n;

                w.compute = computes[k];
                w.output_type = k == 0 ? ST_F32 : ST_BF16;
                bench_set_ranks(b, 1);
                expected = bench_run(b, &w, &size);
                for (size_t i = 1; i < ELEMENTSOF(rank_counts); i++) {
                        CLEANUP_FREE uint8_t *have = NULL;

                        bench_set_ranks(b, rank_counts[i]);
                        bench_delay(b, (uint32_t) i, i % 2 ? 200 : 0);
                        have = bench_run(b, &w, &n);
                        assert_int_equal(n, size);
                        assert_memory_equal(have, expected, size);
                }
                bench_delay(b, 0, 0);
                for (uint64_t ranks = 2; ranks <= 14; ranks += 6) { /* of four: the second, the last, the last three */
                        CLEANUP_FREE uint8_t *have = NULL;

                        bench_set_ranks(b, 4);
                        w.ranks = ranks;
                        have = bench_run(b, &w, &n);
                        assert_memory_equal(have, expected, size);
                }
        }
}

/* The plain way through the network, from the same presentation. */
static void encode_is_what_the_network_makes(void **state) {
        CoderBench *b = *state;
        const ModelEntry *m = model_table_find(&b->models, MODEL);
        const WireJobOpen w = encode_job(b, PROMPT);
        CLEANUP(job_unrefp) Job *j = bench_open(b, &w);
        const H3PresentationInput in = {
                .prompt = PROMPT, .prompt_size = strlen(PROMPT), .rules = &h3_picture_published};
        H3Range rows[1];
        H3Plan plan = h3_text_plan(1, rows);
        H3Rank rank = {.ops = &b->ops, .plan = &plan};
        H3Presentation *p = NULL;
        CLEANUP_FREE float *hidden = NULL;
        H3TextInput text;
        Fault f = {};

        assert_int_equal(h3_presentation_new(m->tokenizer, &in, &p, &f), 0);
        text = (H3TextInput){.compute = H3_COMPUTE_F32, .n = p->n, .ids = p->ids, .positions = p->positions};
        hidden = malloc(p->n * DIM * sizeof(float));
        assert_non_null(hidden);
        assert_int_equal(b->ops.context_new(1, &rank.context), 0);
        if (h3_text_run(&rank, m->conditioner, &text, NULL, hidden, &f) < 0)
                fail_msg("%s", f.text);
        (void) b->ops.context_free(rank.context);

        bench_finish(b, j);
        assert_int_equal(j->coder->rows, p->n);
        assert_memory_equal(
                b->output + j->coder->outputs[0].tensor.offset, hidden, p->n * DIM * sizeof(float));
        assert_memory_equal(b->output + j->coder->outputs[1].tensor.offset, p->tags, p->n);
        assert_memory_equal(b->output + j->coder->outputs[2].tensor.offset, p->ids, p->n * sizeof(int32_t));
        (void) h3_presentation_free(p);
}

/* Rounded once, and widened exactly. */
static void encode_other_output_type_is_rounded(void **state) {
        CoderBench *b = *state;
        WireJobOpen w = encode_job(b, PROMPT);
        CLEANUP_FREE uint8_t *wide = NULL, *narrow = NULL;
        uint64_t n, size, different = 0;

        wide = bench_run(b, &w, &size);
        w.output_type = ST_BF16;
        narrow = bench_run(b, &w, &n);
        assert_true(n < size);
        n = DIM * 10;
        for (uint64_t i = 0; i < n; i++) {
                uint32_t bits = (uint32_t) (narrow[2 * i] | narrow[2 * i + 1] << 8) << 16;
                float x, y;

                memcpy(&x, wide + 4 * i, sizeof(x));
                memcpy(&y, &bits, sizeof(y));
                assert_true(fabsf(x - y) <= fabsf(x) / 256);
                different += x != y;
        }
        assert_true(different > n / 2);
}

static bool run_is_cached(CoderBench *b, const WireJobOpen *w) {
        CLEANUP(job_unrefp) Job *j = bench_open(b, w);
        StepResult result = {};
        Fault f = {};
        int before = gemm_count;

        if (bench_try_step(b, j, &result, &f) < 0)
                fail_msg("%s", f.text);
        assert_committed(b, j, 1);
        assert_int_equal(result.cached, gemm_count == before);
        return result.cached;
}

static void encode_again_is_not_computed_again(void **state) {
        CoderBench *b = *state;
        WireJobOpen w = keyframes_job(b), other;
        CLEANUP_FREE uint8_t *first = NULL, *second = NULL;
        uint64_t size, n;

        first = bench_run(b, &w, &size);
        memset(b->output, 0, b->size);
        bench_memory_available = 1; /* nothing is needed for it */
        assert_true(run_is_cached(b, &w));
        bench_memory_available = 0;
        second = bench_run(b, &w, &n);
        assert_int_equal(n, size);
        assert_memory_equal(first, second, size);

        /* The same at another place, on other ranks. */
        bench_set_ranks(b, 3);
        other = keyframes_job(b);
        assert_true(run_is_cached(b, &other));
        other.owner = 1001;
        assert_false(run_is_cached(b, &other));
        assert_true(run_is_cached(b, &other));
        assert_true(run_is_cached(b, &w));
}

static void encode_anything_else_is_computed(void **state) {
        CoderBench *b = *state;
        const WireJobOpen good = keyframes_job(b);
        WireJobOpen w = good;

        assert_false(run_is_cached(b, &good));
        w.compute = WIRE_COMPUTE_BF16;
        assert_false(run_is_cached(b, &w));
        w = good;
        w.output_type = ST_BF16;
        assert_false(run_is_cached(b, &w));
        w = good;
        w.picture_rule = WIRE_PICTURE_COMFY;
        assert_false(run_is_cached(b, &w));
        w = good;
        w.text = put_text(b, "a blue circle");
        assert_false(run_is_cached(b, &w));
        w = good;
        w.n_conditions = 1;
        assert_false(run_is_cached(b, &w));
        w = good;
        w.conditions[0].height = 64; /* the same bytes as another picture */
        w.conditions[0].width = 96;
        assert_false(run_is_cached(b, &w));
        b->input[good.conditions[1].video_offset + 64 * 64 * 3 - 1] ^= 1;
        assert_false(run_is_cached(b, &good));
        b->input[good.conditions[1].video_offset + 64 * 64 * 3 - 1] ^= 1;
        assert_true(run_is_cached(b, &good));
}

/* Clients load the model for every prompt: what counts is its bytes. */
static void encode_of_a_model_that_came_back_is_found(void **state) {
        CoderBench *b = *state;
        const WireJobOpen w = encode_job(b, PROMPT);
        CLEANUP(job_unrefp) Job *late = NULL;
        StepResult result;
        Fault f = {};

        late = bench_open(b, &w);
        (void) model_table_close(&b->models, MODEL);
        assert_int_equal(bench_try_step(b, late, &result, &f), 0); /* it still has the model */
        assert_false(result.cached);
        bench_load(b, MODEL, bench_conditioner);
        assert_true(run_is_cached(b, &w));

        (void) model_table_close(&b->models, MODEL);
        b->identity = 2;
        bench_load(b, MODEL, bench_conditioner);
        assert_false(run_is_cached(b, &w));
}

static void encode_shows_pictures_as_large_as_the_processor_says(void **state) {
        const char *files[16] = {};
        CoderBench *b = *state;
        uint64_t rows[2];
        size_t n = 0;

        for (; bench_conditioner[n]; n++)
                files[n] = bench_conditioner[n];
        files[n] = "tests/demo-model/processor/preprocessor_config.json";
        for (unsigned i = 0; i < 2; i++) {
                WireJobOpen w = encode_job(b, "");
                CLEANUP(job_unrefp) Job *j = NULL;

                if (i > 0) {
                        (void) model_table_close(&b->models, MODEL);
                        bench_load(b, MODEL, files);
                }
                add_picture(b, &w, WIRE_CONDITION_KEYFRAME, 1, 96, 64);
                j = bench_open(b, &w);
                rows[i] = j->coder->rows;
        }
        assert_int_equal(rows[0] - rows[1], 320 / 32 * 224 / 32 - 96 / 32 * 64 / 32); /* 65536 pixels at least, or 3136 */
}

static void encode_video_looks_at_what_is_shown(void **state) {
        CoderBench *b = *state;
        WireJobOpen w = encode_job(b, "");
        CLEANUP(job_unrefp) Job *j = NULL;
        uint64_t frame = 64 * 64 * 3;

        add_picture(b, &w, WIRE_CONDITION_VIDEO, 13, 64, 64); /* frames 0 and 12 */
        w.conditions[0].audio = 1;
        w.conditions[w.n_conditions++] = (WireCondition){.kind = WIRE_CONDITION_AUDIO, .audio = 1};
        assert_false(run_is_cached(b, &w));
        b->input[w.conditions[0].video_offset + 5 * frame] ^= 1;
        assert_true(run_is_cached(b, &w));
        b->input[w.conditions[0].video_offset + 12 * frame] ^= 1;
        assert_false(run_is_cached(b, &w));
        j = bench_open(b, &w);
        assert_true(j->coder->blocks > 4);
}

static Job *cancelled_by_gemm;

static int cancelling_gemm(LkContext *c, const LkGemm *a) {
        cancelled_by_gemm->cancelled = true;
        return real_gemm(c, a);
}

static void encode_cancelled_in_a_block_commits_nothing(void **state) {
        CoderBench *b = *state;
        const WireJobOpen w = keyframes_job(b);
        CLEANUP(job_unrefp) Job *j = NULL;
        StepResult result;
        Fault f = {};

        bench_set_ranks(b, 3);
        j = cancelled_by_gemm = bench_open(b, &w);
        b->ops.gemm = cancelling_gemm;
        assert_int_equal(bench_try_step(b, j, &result, &f), -ECANCELED);
        assert_string_equal(f.name, FAULT_CANCELLED);
        assert_committed(b, j, 0);
        assert_int_equal(b->runner.encodes.used, 0);
}

static void encode_does_not_fit_says_numbers(void **state) {
        CoderBench *b = *state;
        const WireJobOpen w = keyframes_job(b), other = encode_job(b, "a");
        CLEANUP(job_unrefp) Job *j = NULL;
        StepResult result;
        Fault f = {};

        assert_false(run_is_cached(b, &other));
        j = bench_open(b, &w);
        bench_memory_available = 1000;
        assert_int_equal(bench_try_step(b, j, &result, &f), -ENOMEM);
        assert_string_equal(f.name, FAULT_DOES_NOT_FIT);
        assert_non_null(strstr(f.text, "1000 are free"));
        assert_int_equal(b->runner.encodes.used, 0); /* what was kept went first */
        bench_memory_available = j->coder->memory_bytes;
        f = (Fault){};
        assert_int_equal(bench_try_step(b, j, &result, &f), 0);
}

static void encode_without_a_tokenizer_says_what_to_give(void **state) {
        CoderBench *b = *state;
        const char *const files[] = {bench_conditioner[0], bench_conditioner[1], NULL};
        WireJobOpen w = encode_job(b, PROMPT);
        WireModelReady ready = {};
        Fault f = {};

        assert_int_equal(bench_try_load(b, 2, files, &ready, &f), 0);
        assert_non_null(strstr(ready.warning, "tokenizer"));
        assert_int_equal(ready.kind, WIRE_MODEL_CONDITIONER);
        assert_int_equal(ready.layers, 4);
        assert_int_equal(ready.text_dim, DIM);
        assert_string_equal(ready.types, "BF16");
        assert_true(ready.n_tensors == 132 && ready.weight_bytes > 1000000 && ready.support[0] != '\0');
        w.model = 2;
        bench_refuse(b, &w, FAULT_INVALID_ARGUMENT, "vocab.json and merges.txt");
        w.kind = WIRE_JOB_TOKENIZE;
        w.output_type = 0;
        bench_refuse(b, &w, FAULT_INVALID_ARGUMENT, "vocab.json and merges.txt");
}

static void bad_requests_are_refused(void **state) {
        CoderBench *b = *state;
        const WireJobOpen good = keyframes_job(b);
        WireJobOpen w = tokenize_job(b, "abc\xffz");

        bench_refuse(b, &w, FAULT_INVALID_ARGUMENT, "3");
        w = good;
        w.output_type = ST_U8;
        bench_refuse(b, &w, FAULT_INVALID_ARGUMENT, "expected bf16 or f32");
        w = good;
        w.picture_rule = 2;
        bench_refuse(b, &w, FAULT_INVALID_ARGUMENT, "picture rule 2");
        w = good;
        w.owner = 0;
        bench_refuse(b, &w, FAULT_INTERNAL, "owner");
        w = good;
        w.conditions[1].kind = WIRE_CONDITION_IMAGE;
        bench_refuse(b, &w, FAULT_INVALID_ARGUMENT, "1 keyframes and 1 references");
        w = good;
        w.conditions[1].kind = 4;
        bench_refuse(b, &w, FAULT_INVALID_ARGUMENT, "unknown kind 4");
        w = good;
        w.conditions[0].frames = 2;
        bench_refuse(b, &w, FAULT_INVALID_ARGUMENT, "Picture 0 has 2 frames");
        w = good;
        w.conditions[0].video_offset = ARENA - 96 * 64 * 3 + 1;
        bench_refuse(b, &w, FAULT_INVALID_TENSOR, "Picture 0 lies outside");
        w = good;
        w.conditions[0].video_offset = UINT64_MAX - 5;
        bench_refuse(b, &w, FAULT_INVALID_TENSOR, "Picture 0 lies outside");
        w = good;
        w.conditions[0].height = UINT64_MAX / 64;
        bench_refuse(b, &w, FAULT_INVALID_TENSOR, "Picture 0 lies outside");
        w = good;
        w.n_conditions = WIRE_CONDITIONS_MAX + 1;
        bench_refuse(b, &w, FAULT_INVALID_ARGUMENT, "31 pictures");
        w = good;
        w.text.size = w.text.shape[0] = WIRE_TEXT_BYTES_MAX + 1;
        bench_refuse(b, &w, FAULT_INVALID_TENSOR, "at most 4194304");
        w = good;
        w.text.dtype = ST_BF16;
        bench_refuse(b, &w, FAULT_INVALID_TENSOR, "expected U8");
        w = good;
        w.conditions[0].kind = w.conditions[1].kind = WIRE_CONDITION_VIDEO;
        bench_refuse(b, &w, FAULT_INVALID_ARGUMENT, "13"); /* frames at least */
        w = good;
        w.kind = WIRE_JOB_DECODE;
        w.n_conditions = 0;
        bench_refuse(b, &w, FAULT_INVALID_ARGUMENT, "it needs a VAE");
}

#define TEST(function) cmocka_unit_test_setup_teardown(function, setup, teardown)

int main(void) {
        const struct CMUnitTest tests[] = {
                TEST(tokenize_gives_the_tokenizers_ids),
                TEST(tokenize_of_nothing_is_empty),
                TEST(encode_ranks_and_delays_same_bits),
                TEST(encode_is_what_the_network_makes),
                TEST(encode_other_output_type_is_rounded),
                TEST(encode_again_is_not_computed_again),
                TEST(encode_anything_else_is_computed),
                TEST(encode_of_a_model_that_came_back_is_found),
                TEST(encode_shows_pictures_as_large_as_the_processor_says),
                TEST(encode_video_looks_at_what_is_shown),
                TEST(encode_cancelled_in_a_block_commits_nothing),
                TEST(encode_does_not_fit_says_numbers),
                TEST(encode_without_a_tokenizer_says_what_to_give),
                TEST(bad_requests_are_refused),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
