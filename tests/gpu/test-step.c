/* SPDX-License-Identifier: Apache-2.0 */
/* Whole steps of the tiny models by the CUDA backend: against the published implementation, and against themselves
 * with their weights elsewhere. Needs a CUDA device; without one every test skips. */

#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "kernels/cpu/cpu.h"
#include "kernels/cuda/cuda.h"
#include "service/h3/adaln-table.h"
#include "service/h3/lora.h"
#include "service/shared/cleanup.h"
#include "service/worker/model-weights.h"
#include "tests/gpu/backends.h"
#include "tests/unit/h3/golden.h"

DEFINE_CLEANUP(H3Model *, h3_model_free)
DEFINE_CLEANUP(H3ModTable *, h3_mod_table_free)

#define BF16_REL 2.5e-2
#define BF16_FACTOR 1.25
#define INT8_REL 6e-2
#define WORDS(...) ((const char *const[]){__VA_ARGS__, NULL})
#define PLENTY (UINT64_C(1) << 33)

static const char *const cases[] = {"t2va_tiny", "t2va_odd", "t2va_long", "fl2va_first", "fl2va_last",
        "fl2va_firstlast", "fl2va_mid", "ref2va_mixed", "ref2va_small"};
static const char *const few_cases[] = {"t2va_tiny", "ref2va_small", "fl2va_mid"};

static const LkOps *ops;

static int setup(void **state) {
        ops = lk_cuda_ops();
        return backends_setup(state);
}

/* How a step is run. */
typedef struct Setting {
        uint64_t budget; /* for weights; 0: the least */
        uint32_t chunks, piece_rows;
        bool table;
        uint32_t times;
        bool expand; /* what stays, of formats that the products expand else */
} Setting;

static const Setting plain = {.budget = PLENTY, .chunks = 1, .times = 1};

static ModelWeights *weights_of(const H3Model *m, uint64_t budget, bool expand) {
        ModelWeights *w;
        uint64_t least = 0;

        assert_int_equal(
                model_weights_new(&h3_weights_denoiser, m, &(DeviceWeightsConfig){.ops = ops, .context = gpu, .expand = expand}, &w), 0);
        if (budget == 0) {
                assert_int_equal(device_weights_plan(model_weights_device(w), 1, true, &least), -ENOSPC);
                budget = least;
        }
        assert_int_equal(device_weights_plan(model_weights_device(w), budget, true, &least), 0);
        return w;
}

/* Nothing is registered for longer than the test's memory lives. */
static void unpin_model(const GoldenModel *g) {
        for (size_t i = 0; i < g->n_bytes; i++)
                ops->unpin(g->bytes[i], 64 << 20);
}

static GoldenStep run(const H3Model *m, const char *name, const Setting *s) {
        char file[100];
        CLEANUP(golden_case_freep) GoldenCase *k = NULL;
        CLEANUP(h3_mod_table_freep) H3ModTable *table = NULL;
        CLEANUP_FREE void *refined = NULL;
        ModelWeights *w = weights_of(m, s->budget, s->expand);
        H3Range rows, heads = {0, m->config.heads};
        H3Plan plan = {.ranks = 1, .row_tile = 1, .chunks = s->chunks, .rows = &rows, .heads = &heads};
        const H3Rank rank = {.ops = ops, .context = gpu, .plan = &plan, .weights = model_weights_interface(w),
                .piece_rows = s->piece_rows};
        H3StepInput in;
        Fault f = {};
        GoldenStep r;

        (void) snprintf(file, sizeof(file), "case_%s", name);
        k = golden_case_open(file, &m->config);
        rows = (H3Range){0, k->layout->rows};
        r = golden_step_new(k);

        assert_int_equal(model_weights_begin(w, H3_PASS_TEXT), 0);
        if (h3_refine_text(&rank, m, H3_COMPUTE_BF16, k->text, k->layout->shape.text_rows, &refined, &f) < 0)
                fail_msg("%s", f.text);
        in = golden_input(k, H3_COMPUTE_BF16, refined);
        if (s->table) {
                const H3ModSchedule schedule = {k->layout, &k->sigma_video, &k->sigma_audio, 1};

                assert_int_equal(model_weights_begin(w, H3_PASS_TABLE), 0);
                if (h3_mod_table_new(&rank, m, &schedule, H3_COMPUTE_BF16, NULL, &table, &f) < 0)
                        fail_msg("%s", f.text);
                in.mod_table = table;
        }
        for (uint32_t i = 0; i < s->times; i++) {
                memset(r.video, 0xff, r.n_video * sizeof(float)); /* NaN where nobody writes */
                memset(r.audio, 0xff, r.n_audio * sizeof(float));
                assert_int_equal(model_weights_begin(w, s->table ? H3_PASS_STEP_TABLE : H3_PASS_STEP), 0);
                if (h3_step(&rank, m, &in, NULL, r.video, r.audio, &f) < 0)
                        fail_msg("%s", f.text);
        }
        (void) model_weights_free(w);
        return r;
}

/* The worse of the two streams. */
static double distance_of(const float *video, const float *audio, const Golden *from) {
        uint64_t n_video, n_audio;
        const float *v = golden_data(from, "video_velocity", ST_F32, &n_video);
        const float *a = golden_data(from, "audio_velocity", ST_F32, &n_audio);

        return fmax(golden_distance(video, v, n_video, NULL), golden_distance(audio, a, n_audio, NULL));
}

static double distance(const GoldenStep *s, const char *name, const char *variant) {
        char file[100];
        CLEANUP(golden_freep) Golden *g = NULL;

        (void) snprintf(file, sizeof(file), "expect_%s.%s", name, variant);
        g = golden_open(file);
        return distance_of(s->video, s->audio, g);
}

/* Of two expectations. */
static double distance_between(const char *name, const char *variant, const char *from) {
        char file[100];
        CLEANUP(golden_freep) Golden *g = NULL;
        GoldenStep s = {};

        (void) snprintf(file, sizeof(file), "expect_%s.%s", name, variant);
        g = golden_open(file);
        s.video = (float *) golden_data(g, "video_velocity", ST_F32, &s.n_video);
        s.audio = (float *) golden_data(g, "audio_velocity", ST_F32, &s.n_audio);
        return distance(&s, name, from);
}

static void check_factor(const GoldenStep *s, const char *name, const char *f32, double theirs) {
        double own = distance(s, name, f32);

        print_message("%s.%s: %.3e, %.2f of the published bf16's\n", name, f32, own, own / theirs);
        if (!(own <= BF16_FACTOR * theirs))
                fail_msg("%s is %.3g from %s; the published bf16 is %.3g", name, own, f32, theirs);
}

static GoldenModel *model_of(const char *derived) {
        return derived ? golden_model_open(golden_derived(), WORDS(derived), H3_QKV_AUTO) : golden_comfy();
}

static void step_bf16_matches(void **state) {
        CLEANUP(golden_model_freep) GoldenModel *m = NULL;

        need_device();
        m = model_of(NULL);
        for (size_t i = 0; i < ELEMENTSOF(cases); i++) {
                CLEANUP(golden_step_done) GoldenStep s = run(m->model, cases[i], &plain);

                check_factor(&s, cases[i], "f32", distance_between(cases[i], "bf16", "f32"));
                assert_true(distance(&s, cases[i], "bf16") <= BF16_REL);
        }
        unpin_model(m);
}

static void step_pruned_matches(void **state) {
        CLEANUP(golden_model_freep) GoldenModel *m = NULL;

        need_device();
        m = model_of("comfy_pruned.safetensors");
        for (size_t i = 0; i < ELEMENTSOF(few_cases); i++) {
                CLEANUP(golden_step_done) GoldenStep s = run(m->model, few_cases[i], &plain);

                check_factor(&s, few_cases[i], "pruned.f32", distance_between(few_cases[i], "pruned.bf16", "pruned.f32"));
                assert_true(distance(&s, few_cases[i], "pruned.bf16") <= BF16_REL);
        }
        unpin_model(m);
}

static void step_int8_matches(void **state) {
        CLEANUP(golden_model_freep) GoldenModel *m = NULL;

        need_device();
        m = model_of("comfy_int8.safetensors");
        for (size_t i = 0; i < ELEMENTSOF(few_cases); i++) {
                CLEANUP(golden_step_done) GoldenStep s = run(m->model, few_cases[i], &plain);

                print_message("%s: %.3e from int8a, %.3e from int8e, %.3e from int8w\n", few_cases[i],
                        distance(&s, few_cases[i], "int8a.bf16"), distance(&s, few_cases[i], "int8e.bf16"),
                        distance(&s, few_cases[i], "int8w.f32"));
                assert_true(distance(&s, few_cases[i], "int8a.bf16") <= INT8_REL);
                assert_true(distance(&s, few_cases[i], "int8e.bf16") <= INT8_REL);
                /* the int8 arithmetic, not expanded weights */
                assert_true(distance(&s, few_cases[i], "int8w.f32") > 2.4e-2);
        }
        unpin_model(m);
}

/* There is no published step: against the CPU's in f32, of the same numbers. The published bf16 of the base says how far bf16 may be. */
static void step_of_expanded_formats_matches(void **state) {
        static const char *const models[] = {"comfy_fp8.safetensors", "comfy_nvfp4.safetensors"};

        need_device();
        for (size_t i = 0; i < ELEMENTSOF(models) * ELEMENTSOF(few_cases); i++) {
                const char *name = few_cases[i / ELEMENTSOF(models)];
                CLEANUP(golden_model_freep) GoldenModel *m = model_of(models[i % ELEMENTSOF(models)]);
                CLEANUP(golden_step_done) GoldenStep want = {}, s = run(m->model, name, &plain);
                double theirs = distance_between(name, "bf16", "f32"), own;

                golden_step_run(m->model, name, H3_COMPUTE_F32, &want);
                own = fmax(golden_distance(s.video, want.video, want.n_video, NULL),
                        golden_distance(s.audio, want.audio, want.n_audio, NULL));
                print_message("%s, %s: %.3e, %.2f of the published bf16's of the base\n", models[i % ELEMENTSOF(models)], name, own,
                        own / theirs);
                assert_true(own <= BF16_FACTOR * theirs);
                assert_true(distance(&s, name, "f32") > 2 * theirs); /* it is quantised */
                unpin_model(m);
        }
}

/* Merged on the device. The published bf16 of the base says how far bf16 may be from f32. */
static void step_lora_matches(void **state) {
        static const struct {
                double strength;
                const char *variant;
        } uses[] = {{1, "lora.f32"}, {0.5, "lora_s0.5.f32"}};
        CLEANUP(golden_model_freep) GoldenModel *base = NULL;
        CLEANUP_FREE uint8_t *bytes = NULL;
        uint64_t size;
        H3Lora *l;
        Fault f = {};

        need_device();
        base = model_of(NULL);
        bytes = golden_read(NULL, "dit/lora/lora_comfy.safetensors", &size);
        assert_int_equal(h3_lora_open(&(H3File){"x.safetensors", bytes, size}, 1, NULL, &l, &f), 0);
        for (size_t i = 0; i < ELEMENTSOF(uses); i++) {
                ModelWeights *w = weights_of(base->model, 0, false);
                const H3LoraUse use = {l, uses[i].strength};
                H3LoraReport *report;
                H3Model *m;

                if (h3_model_with_loras(base->model, &use, 1, H3_COMPUTE_BF16, ops, gpu,
                            model_weights_interface(w), &m, &report, &f) < 0)
                        fail_msg("%s", f.text);
                (void) h3_lora_report_free(report);
                (void) model_weights_free(w);
                for (size_t j = 0; j < ELEMENTSOF(few_cases); j++) {
                        CLEANUP(golden_step_done) GoldenStep s = run(m, few_cases[j], &plain);

                        check_factor(&s, few_cases[j], uses[i].variant, distance_between(few_cases[j], "bf16", "f32"));
                }
                for (size_t j = 0; j < m->n_merged; j++)
                        ops->unpin(m->merged[j].data, m->merged[j].size);
                (void) h3_model_free(m);
        }
        (void) h3_lora_free(l);
        unpin_model(base);
}

/* Where weights are, how many rows there are at a time, what ran before: not one bit. */
static void step_any_residency_same_bits(void **state) {
        static const char *const models[] = {NULL, "comfy_int8.safetensors", "comfy_pruned.safetensors", "comfy_fp8.safetensors",
                "comfy_nvfp4.safetensors"};
        static const Setting settings[] = {
                {.budget = PLENTY, .chunks = 1, .times = 3},
                {.budget = PLENTY, .chunks = 1, .times = 3, .expand = true},
                {.budget = PLENTY, .chunks = 3, .times = 2, .piece_rows = 128, .table = true, .expand = true},
                {.budget = 0, .chunks = 1, .times = 3},
                {.budget = 0, .chunks = 1, .times = 2, .table = true},
                {.budget = 3 << 20, .chunks = 1, .times = 2},
                {.budget = 0, .chunks = 1, .times = 1, .piece_rows = 64},
                {.budget = PLENTY, .chunks = 3, .times = 1, .piece_rows = 128},
                {.budget = 0, .chunks = 7, .times = 2, .piece_rows = 1000},
        };

        need_device();
        for (size_t i = 0; i < ELEMENTSOF(models); i++) {
                CLEANUP(golden_model_freep) GoldenModel *m = model_of(models[i]);
                CLEANUP(golden_step_done) GoldenStep want = run(m->model, "t2va_odd", &plain);

                for (size_t j = 0; j < ELEMENTSOF(settings); j++) {
                        CLEANUP(golden_step_done) GoldenStep got = run(m->model, "t2va_odd", settings + j);

                        if (memcmp(got.video, want.video, want.n_video * sizeof(float)) != 0 ||
                                memcmp(got.audio, want.audio, want.n_audio * sizeof(float)) != 0)
                                fail_msg("model %zu, setting %zu: other bits", i, j);
                }
                unpin_model(m);
        }
}

/* The integer stages of int8 blocks: what the CPU backend had before and behind them, stage by stage. */

typedef struct Tap {
        char name[40];
        uint16_t *values; /* bf16 */
        uint64_t rows, cols;
} Tap;

typedef struct Taps {
        Tap taps[256];
        size_t n;
} Taps;

static void on_tap(void *userdata, const char *name, const float *values, uint64_t rows, uint64_t cols) {
        Taps *t = userdata;
        Tap *x;

        if (strncmp(name, "block.", 6) != 0)
                return;
        assert_true(t->n < ELEMENTSOF(t->taps));
        x = t->taps + t->n++;
        (void) snprintf(x->name, sizeof(x->name), "%s", name);
        x->rows = rows;
        x->cols = cols;
        x->values = malloc(rows * cols * sizeof(uint16_t));
        for (uint64_t i = 0; i < rows * cols; i++) { /* exact: they came from bf16 */
                uint32_t bits;

                memcpy(&bits, values + i, sizeof(bits));
                x->values[i] = (uint16_t) (bits >> 16);
        }
}

static const Tap *tap(const Taps *t, uint32_t layer, const char *name) {
        char full[40];

        (void) snprintf(full, sizeof(full), "block.%u.%s", layer, name);
        for (size_t i = 0; i < t->n; i++)
                if (strcmp(t->taps[i].name, full) == 0)
                        return t->taps + i;
        fail_msg("no tap %s", full);
        return NULL;
}

typedef struct Stage {
        int8_t *q;
        float *scale;
        void *x, *y, *z;
} Stage;

static void *device_new(uint64_t bytes) {
        void *p;

        assert_int_equal(ops->memory_new(gpu, bytes, &p), 0);
        return p;
}

/* y = x . w^T, both bf16, by quantise and gemm_i8. up: not NULL with a gate. */
static void product(const Stage *s, const LkMatrix *w, uint64_t m, const void *x, const void *up, void *y) {
        const LkQuantise quantise = {.x_type = LK_BF16, .m = m, .k = w->cols, .x = x, .x_ld = w->cols, .up = up,
                .up_ld = w->cols, .rotation = w->quant.rotation, .q = s->q, .q_ld = w->cols, .scale = s->scale};
        const LkGemmI8 gemm = {.m = m, .x = s->q, .x_ld = w->cols, .x_scale = s->scale, .w = *w, .y = y,
                .y_type = LK_BF16, .y_ld = w->rows};

        assert_int_equal(ops->quantise(gpu, &quantise), 0);
        assert_int_equal(ops->gemm_i8(gpu, &gemm), 0);
}

static void check_stage(const Taps *t, uint32_t layer, const char *name, const void *device) {
        const Tap *want = tap(t, layer, name);
        uint64_t bytes = want->rows * want->cols * sizeof(uint16_t);
        CLEANUP_FREE void *got = malloc(bytes);

        assert_int_equal(ops->download(gpu, got, device, bytes), 0);
        if (memcmp(got, want->values, bytes) != 0)
                fail_msg("block %u: %s has other bits than the CPU's", layer, name);
}

static void put(const Tap *t, void *device) {
        assert_int_equal(ops->upload(gpu, device, t->values, t->rows * t->cols * sizeof(uint16_t)), 0);
}

static void check_layer(const Taps *t, const H3Block *block, const H3Config *c, uint32_t layer, const Stage *s) {
        const Tap *in = tap(t, layer, "attn_in");

        put(in, s->x);
        product(s, &block->attn.v, in->rows, s->x, NULL, s->y);
        check_stage(t, layer, "v", s->y);

        in = tap(t, layer, "attn");
        put(in, s->x);
        product(s, &block->attn.out, in->rows, s->x, NULL, s->y);
        check_stage(t, layer, "attn_proj", s->y);

        in = tap(t, layer, "ff_in");
        put(in, s->x);
        product(s, &block->mlp.gate, in->rows, s->x, NULL, s->y);
        product(s, &block->mlp.up, in->rows, s->x, NULL, s->z);
        product(s, &block->mlp.down, in->rows, s->y, s->z, s->x);
        check_stage(t, layer, "ff_out", s->x);
}

static void int8_stages_same_bits_as_cpu(void **state) {
        CLEANUP(golden_model_freep) GoldenModel *g = NULL;
        CLEANUP(golden_case_freep) GoldenCase *k = NULL;
        CLEANUP(golden_step_done) GoldenStep s = {};
        CLEANUP_FREE void *refined = NULL;
        CLEANUP_FREE Taps *t = calloc(1, sizeof(Taps));
        const H3StepHooks hooks = {.on_tap = on_tap, .userdata = t};
        const H3Model *m;
        ModelWeights *w;
        H3StepInput in;
        Stage stage;
        uint64_t widest;

        need_device();
        g = model_of("comfy_int8.safetensors");
        k = golden_case_open("case_t2va_odd", &g->model->config);
        refined = golden_refine(g->model, k, H3_COMPUTE_BF16);
        in = golden_input(k, H3_COMPUTE_BF16, refined);
        golden_run(g->model, &in, NULL, &hooks, k->n_video, k->n_audio, &s.video, &s.audio);

        m = g->model;
        widest = m->config.ffn > m->config.inner ? m->config.ffn : m->config.inner;
        stage = (Stage){device_new(k->layout->rows * widest), device_new(k->layout->rows * 4),
                device_new(k->layout->rows * widest * 2), device_new(k->layout->rows * widest * 2),
                device_new(k->layout->rows * widest * 2)};
        w = weights_of(m, PLENTY, false);
        for (uint32_t i = 0; i < m->config.layers; i++) {
                H3Weights *x = model_weights_interface(w);
                const void *taken;

                assert_int_equal(x->take(x, (H3Part){H3_PART_FEED, i}, &taken), 0);
                assert_int_equal(x->take(x, (H3Part){H3_PART_FINISH, i}, &taken), 0);
                check_layer(t, ((const H3Model *) taken)->blocks + i, &m->config, i, &stage);
                x->give(x, (H3Part){H3_PART_FEED, i});
                x->give(x, (H3Part){H3_PART_FINISH, i});
        }
        (void) model_weights_free(w);
        ops->memory_free(gpu, stage.q);
        ops->memory_free(gpu, stage.scale);
        ops->memory_free(gpu, stage.x);
        ops->memory_free(gpu, stage.y);
        ops->memory_free(gpu, stage.z);
        for (size_t i = 0; i < t->n; i++)
                free(t->taps[i].values);
        unpin_model(g);
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(step_bf16_matches),
                cmocka_unit_test(step_pruned_matches),
                cmocka_unit_test(step_int8_matches),
                cmocka_unit_test(step_of_expanded_formats_matches),
                cmocka_unit_test(step_lora_matches),
                cmocka_unit_test(step_any_residency_same_bits),
                cmocka_unit_test(int8_stages_same_bits_as_cpu),
        };

        return cmocka_run_group_tests(tests, setup, backends_teardown);
}
