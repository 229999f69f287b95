/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "kernels/cpu/cpu.h"
#include "service/h3/adaln-table.h"
#include "service/h3/lora.h"
#include "service/shared/cleanup.h"
#include "service/worker/model-weights.h"
#include "tests/unit/h3/golden.h"
#include "tests/unit/worker/device-ops.h"

/* Whole steps of the tiny models with their weights in a simulated device's memory (device-ops.h), as few or as
 * many of them at a time as there may be: the bits of the plain step. */

DEFINE_CLEANUP(H3Model *, h3_model_free)
DEFINE_CLEANUP(H3ModTable *, h3_mod_table_free)

#define WORDS(...) ((const char *const[]){__VA_ARGS__, NULL})
#define PLENTY (UINT64_C(1) << 40)

/* Passes on and writes down. */
typedef struct Recorder {
        H3Weights interface;
        H3Weights *next;
        H3Part taken[1024];
        uint32_t n, held, most;
} Recorder;

static int record_take(H3Weights *w, H3Part part, const H3Model **ret) {
        Recorder *x = (Recorder *) w;
        int r;

        assert_true(x->n < ELEMENTSOF(x->taken));
        x->taken[x->n++] = part;
        r = x->next->take(x->next, part, ret);
        if (r < 0)
                return r;
        x->held++;
        x->most = x->held > x->most ? x->held : x->most;
        return 0;
}

static void record_give(H3Weights *w, H3Part part) {
        Recorder *x = (Recorder *) w;

        assert_true(x->held-- > 0);
        x->next->give(x->next, part);
}

typedef struct Bench {
        const LkOps *ops;
        const H3Model *model;
        GoldenCase *k;
        H3Compute compute;
        H3Range rows, heads;
        H3Plan plan;
        H3Rank rank;
        ModelWeights *weights; /* NULL: the plain CPU backend */
        Recorder recorder;
        uint32_t stop_at, blocks_seen;
} Bench;

static void bench_new(Bench *b, const H3Model *m, const char *name, H3Compute compute, bool device) {
        *b = (Bench){.ops = device ? device_ops() : lk_cpu_ops(LK_CPU_AUTO), .model = m, .compute = compute};
        b->k = golden_case_open(name, &m->config);
        b->rows = (H3Range){0, b->k->layout->rows};
        b->heads = (H3Range){0, m->config.heads};
        b->plan = (H3Plan){.ranks = 1, .row_tile = 1, .chunks = 1, .rows = &b->rows, .heads = &b->heads};
        b->rank = (H3Rank){.ops = b->ops, .plan = &b->plan};
        assert_int_equal(b->ops->context_new(2, &b->rank.context), 0);
        if (!device)
                return;
        assert_int_equal(
                model_weights_new(m, &(DeviceWeightsConfig){.ops = b->ops, .context = b->rank.context}, &b->weights), 0);
        b->recorder = (Recorder){.interface = {record_take, record_give}, .next = model_weights_interface(b->weights)};
        b->rank.weights = &b->recorder.interface;
}

static void bench_done(Bench *b) {
        bool device = b->weights;

        b->weights = model_weights_free(b->weights);
        b->k = golden_case_free(b->k);
        if (b->rank.context)
                b->rank.context = b->ops->context_free(b->rank.context);
        if (device)
                device_ops_done();
}

/* Memory for the ring and `resident` of 1 + 2 * layers parts. */
static void bench_plan(Bench *b, uint32_t resident) {
        DeviceWeights *d = model_weights_device(b->weights);
        DeviceWeightsState s;
        uint64_t least = 0, budget;

        assert_int_equal(device_weights_plan(d, 1, true, &least), -ENOSPC);
        for (budget = least;; budget += 4096) {
                assert_int_equal(device_weights_plan(d, budget, true, &least), 0);
                device_weights_state(d, &s);
                if (s.resident >= resident)
                        break;
        }
        assert_int_equal(s.resident, resident);
}

static void begin(Bench *b, H3Pass pass) {
        b->recorder.n = 0;
        if (b->weights)
                assert_int_equal(model_weights_begin(b->weights, pass), 0);
}

/* What was taken is what the pass said it would take, two at a time at most. */
static void check_taken(Bench *b, H3Pass pass) {
        H3Part parts[1024];
        uint32_t n = h3_pass_parts(b->model, pass, NULL);

        if (!b->weights)
                return;
        assert_int_equal(h3_pass_parts(b->model, pass, parts), n);
        assert_int_equal(b->recorder.n, n);
        for (uint32_t i = 0; i < n; i++) {
                assert_int_equal(b->recorder.taken[i].kind, parts[i].kind);
                assert_int_equal(b->recorder.taken[i].layer, parts[i].layer);
        }
        assert_int_equal(b->recorder.held, 0);
        assert_true(b->recorder.most <= 2);
}

static int on_block(void *userdata, uint32_t done, uint32_t total) {
        Bench *b = userdata;

        assert_int_equal(total, b->model->config.layers);
        assert_int_equal(done, ++b->blocks_seen);
        return done == b->stop_at ? -ECANCELED : 0;
}

/* Refined text, the table if it is wanted, a step. */
static int bench_run(Bench *b, bool table, float *video, float *audio) {
        const H3StepHooks hooks = {.on_block = on_block, .userdata = b};
        CLEANUP(h3_mod_table_freep) H3ModTable *t = NULL;
        CLEANUP_FREE void *refined = NULL;
        H3StepInput in;
        Fault f = {};
        int r;

        begin(b, H3_PASS_TEXT);
        if (h3_refine_text(&b->rank, b->model, b->compute, b->k->text, b->k->layout->shape.text_rows, &refined, &f) < 0)
                fail_msg("%s", f.text);
        check_taken(b, H3_PASS_TEXT);

        in = golden_input(b->k, b->compute, refined);
        if (table) {
                const H3ModSchedule s = {b->k->layout, &b->k->sigma_video, &b->k->sigma_audio, 1};

                begin(b, H3_PASS_TABLE);
                if (h3_mod_table_new(&b->rank, b->model, &s, b->compute, NULL, &t, &f) < 0)
                        fail_msg("%s", f.text);
                check_taken(b, H3_PASS_TABLE);
                in.mod_table = t;
        }

        begin(b, table ? H3_PASS_STEP_TABLE : H3_PASS_STEP);
        b->blocks_seen = 0;
        r = h3_step(&b->rank, b->model, &in, &hooks, video, audio, &f);
        if (r >= 0) {
                check_taken(b, table ? H3_PASS_STEP_TABLE : H3_PASS_STEP);
                assert_int_equal(b->blocks_seen, b->model->config.layers);
        } else if (r != -ECANCELED)
                fail_msg("%s", f.text);
        assert_int_equal(b->recorder.held, 0);
        return r;
}

typedef struct Result {
        float *video, *audio;
        uint64_t n_video, n_audio;
} Result;

static void result_done(Result *r) {
        free(r->video);
        free(r->audio);
}

static Result run(Bench *b, bool table) {
        Result r = {.n_video = b->k->n_video, .n_audio = b->k->n_audio};

        r.video = calloc(r.n_video, sizeof(float));
        r.audio = calloc(r.n_audio, sizeof(float));
        assert_true(r.video && r.audio);
        assert_int_equal(bench_run(b, table, r.video, r.audio), 0);
        return r;
}

static void check_equal(const Result *a, const Result *b) {
        assert_memory_equal(a->video, b->video, a->n_video * sizeof(float));
        assert_memory_equal(a->audio, b->audio, a->n_audio * sizeof(float));
}

static void check_model(const H3Model *m, const char *name, H3Compute compute) {
        CLEANUP(bench_done) Bench plain, device;
        CLEANUP(result_done) Result want = {};
        uint32_t parts = 1 + 2 * m->config.layers;

        bench_new(&plain, m, name, compute, false);
        want = run(&plain, false);
        bench_new(&device, m, name, compute, true);
        for (uint32_t resident = 0; resident <= parts; resident += parts / 2) {
                bench_plan(&device, resident);
                for (unsigned table = 0; table < 2; table++) {
                        CLEANUP(result_done) Result got = run(&device, table);

                        check_equal(&got, &want);
                }
        }
}

static GoldenModel *model_of(const char *name) {
        return name ? golden_model_open(golden_derived(), WORDS(name), H3_QKV_AUTO) : golden_comfy();
}

static void step_bf16_same_bits(void **state) {
        CLEANUP(golden_model_freep) GoldenModel *m = model_of(NULL);

        check_model(m->model, "case_t2va_tiny", H3_COMPUTE_BF16);
        check_model(m->model, "case_ref2va_small", H3_COMPUTE_BF16);
}

static void step_f32_same_bits(void **state) {
        CLEANUP(golden_model_freep) GoldenModel *m = model_of(NULL);

        check_model(m->model, "case_fl2va_mid", H3_COMPUTE_F32);
}

static void step_int8_same_bits(void **state) {
        CLEANUP(golden_model_freep) GoldenModel *m = model_of("comfy_int8.safetensors");

        check_model(m->model, "case_t2va_tiny", H3_COMPUTE_BF16);
        check_model(m->model, "case_t2va_tiny", H3_COMPUTE_F32);
}

static void step_pruned_same_bits(void **state) {
        CLEANUP(golden_model_freep) GoldenModel *m = model_of("comfy_pruned.safetensors");

        check_model(m->model, "case_fl2va_mid", H3_COMPUTE_BF16);
}

/* Heads of q, k and v interleaved, and in matrices of their own. */
static void step_of_other_layouts_same_bits(void **state) {
        CLEANUP(golden_model_freep)
        GoldenModel *original =
                golden_model_open(golden_derived(), WORDS("original.safetensors"), H3_QKV_INTERLEAVED);
        CLEANUP(golden_model_freep)
        GoldenModel *split = golden_model_open(
                golden_derived(), WORDS("diffusers/diffusion_pytorch_model.safetensors"), H3_QKV_AUTO);

        check_model(original->model, "case_t2va_tiny", H3_COMPUTE_BF16);
        check_model(split->model, "case_t2va_tiny", H3_COMPUTE_BF16);
}

/* Merged through the device, in parts, is merged; and a step of what came out. */
static void lora_same_bits(void **state) {
        static const char *const bases[] = {NULL, "comfy_int8.safetensors"};
        CLEANUP_FREE uint8_t *bytes = NULL;
        uint64_t size;
        H3Lora *l;
        Fault f = {};

        bytes = golden_read(NULL, "dit/lora/lora_comfy.safetensors", &size);
        assert_int_equal(h3_lora_open(&(H3File){"x.safetensors", bytes, size}, 1, NULL, &l, &f), 0);
        for (size_t i = 0; i < ELEMENTSOF(bases); i++) {
                CLEANUP(golden_model_freep) GoldenModel *base = model_of(bases[i]);
                CLEANUP(h3_model_freep) H3Model *want = NULL, *got = NULL;
                CLEANUP(result_done) Result plain_result = {}, device_result = {};
                const H3LoraUse use = {l, 0.5};
                H3LoraReport *report;

                {
                        CLEANUP(bench_done) Bench plain;

                        bench_new(&plain, base->model, "case_t2va_tiny", H3_COMPUTE_BF16, false);
                        assert_int_equal(h3_model_with_loras(base->model, &use, 1, H3_COMPUTE_BF16, plain.ops,
                                                 plain.rank.context, NULL, &want, &report, &f),
                                0);
                        (void) h3_lora_report_free(report);
                }
                {
                        CLEANUP(bench_done) Bench device;

                        bench_new(&device, base->model, "case_t2va_tiny", H3_COMPUTE_BF16, true);
                        bench_plan(&device, 2);
                        assert_int_equal(h3_model_with_loras(base->model, &use, 1, H3_COMPUTE_BF16, device.ops,
                                                 device.rank.context, device.rank.weights, &got, &report, &f),
                                0);
                        (void) h3_lora_report_free(report);
                        assert_int_equal(device.recorder.held, 0);
                }
                assert_true(want->n_merged > 0);
                assert_int_equal(got->n_merged, want->n_merged);
                assert_int_equal(got->private_bytes, want->private_bytes);
                for (size_t j = 0; j < got->n_merged; j++) {
                        assert_int_equal((uintptr_t) got->merged[j].data % H3_MERGED_ALIGN, 0);
                        assert_int_equal(got->merged[j].size % H3_MERGED_ALIGN, 0);
                }
                for (uint32_t j = 0; j < want->config.layers; j++) {
                        const LkMatrix *x = &want->blocks[j].attn.k, *y = &got->blocks[j].attn.k;

                        assert_memory_equal(x->data, y->data, x->rows * x->row_stride);
                }

                {
                        CLEANUP(bench_done) Bench plain;

                        bench_new(&plain, want, "case_t2va_tiny", H3_COMPUTE_BF16, false);
                        plain_result = run(&plain, false);
                }
                {
                        CLEANUP(bench_done) Bench device;

                        bench_new(&device, got, "case_t2va_tiny", H3_COMPUTE_BF16, true);
                        bench_plan(&device, 1);
                        device_result = run(&device, false);
                }
                check_equal(&device_result, &plain_result);
        }
        (void) h3_lora_free(l);
}

/* Rows of an MLP at a time, chunks of the plan. */
static void step_of_any_pieces_same_bits(void **state) {
        static const struct {
                uint32_t piece, chunks;
        } cases[] = {{1, 1}, {7, 3}, {64, 2}, {100000, 4}};
        static const char *const models[] = {NULL, "comfy_int8.safetensors"};

        for (size_t i = 0; i < ELEMENTSOF(models); i++) {
                CLEANUP(golden_model_freep) GoldenModel *m = model_of(models[i]);
                CLEANUP(bench_done) Bench plain, device;
                CLEANUP(result_done) Result want = {};

                bench_new(&plain, m->model, "case_t2va_tiny", H3_COMPUTE_BF16, false);
                want = run(&plain, false);
                bench_new(&device, m->model, "case_t2va_tiny", H3_COMPUTE_BF16, true);
                bench_plan(&device, 3);
                for (size_t j = 0; j < ELEMENTSOF(cases); j++) {
                        CLEANUP(result_done) Result got = {};

                        device.rank.piece_rows = cases[j].piece;
                        device.plan.chunks = cases[j].chunks;
                        got = run(&device, false);
                        check_equal(&got, &want);
                }
        }
}

/* A step that is cancelled leaves nothing behind; the next one has its bits. The host is a block ahead: it sees a
 * block's end when it has given out the next one. */
static void step_after_a_cancelled_one_same_bits(void **state) {
        CLEANUP(golden_model_freep) GoldenModel *m = model_of(NULL);
        CLEANUP(bench_done) Bench plain, device;
        CLEANUP(result_done) Result want = {};
        CLEANUP_FREE float *video = NULL, *audio = NULL;

        bench_new(&plain, m->model, "case_t2va_tiny", H3_COMPUTE_BF16, false);
        want = run(&plain, false);
        bench_new(&device, m->model, "case_t2va_tiny", H3_COMPUTE_BF16, true);
        bench_plan(&device, 0);
        video = calloc(want.n_video, sizeof(float));
        audio = calloc(want.n_audio, sizeof(float));
        for (uint32_t stop = 1; stop <= m->model->config.layers; stop++) {
                CLEANUP(result_done) Result got = {};

                device.stop_at = stop;
                assert_int_equal(bench_run(&device, false, video, audio), -ECANCELED);
                assert_int_equal(device.blocks_seen, stop);
                device.stop_at = 0;
                got = run(&device, false);
                check_equal(&got, &want);
        }
        assert_true(device_sim.joins > 0);
}

/* A device error in the middle comes out, everything is given back, and the next step is right. */
static void step_after_a_failed_one_same_bits(void **state) {
        CLEANUP(golden_model_freep) GoldenModel *m = model_of(NULL);
        CLEANUP(bench_done) Bench plain, device;
        CLEANUP(result_done) Result want = {};
        CLEANUP_FREE float *video = NULL, *audio = NULL;
        CLEANUP_FREE void *refined = NULL;
        H3StepInput in;

        bench_new(&plain, m->model, "case_t2va_tiny", H3_COMPUTE_BF16, false);
        want = run(&plain, false);
        refined = golden_refine(m->model, plain.k, H3_COMPUTE_BF16);
        in = golden_input(plain.k, H3_COMPUTE_BF16, refined);
        bench_new(&device, m->model, "case_t2va_tiny", H3_COMPUTE_BF16, true);
        bench_plan(&device, 2);
        video = calloc(want.n_video, sizeof(float));
        audio = calloc(want.n_audio, sizeof(float));
        for (int64_t after = 0; after < 24; after++) {
                CLEANUP(result_done) Result got = {};
                Fault f = {};

                begin(&device, H3_PASS_STEP);
                device_sim.fetches_left = after;
                assert_int_equal(h3_step(&device.rank, m->model, &in, NULL, video, audio, &f), -EIO);
                assert_int_equal(device.recorder.held, 0);
                device_sim.fetches_left = -1;
                got = run(&device, false);
                check_equal(&got, &want);
        }
}

/* Memory of a step is taken once per shape by the one who keeps it; ours is the same before and after. */
static void step_gives_its_memory_back(void **state) {
        CLEANUP(golden_model_freep) GoldenModel *m = model_of(NULL);
        CLEANUP(bench_done) Bench device;
        uint64_t used, bytes;

        bench_new(&device, m->model, "case_t2va_tiny", H3_COMPUTE_BF16, true);
        bench_plan(&device, 3);
        used = device_sim.used;
        for (unsigned i = 0; i < 3; i++) {
                CLEANUP(result_done) Result r = run(&device, false);

                (void) r;
                assert_int_equal(device_sim.used, used);
        }
        assert_int_equal(
                h3_step_memory(m->model, device.k->layout, &device.plan, 0, H3_COMPUTE_BF16, 0, &bytes), 0);
        assert_true(device_sim.peak >= used + bytes);
        assert_true(device_sim.peak <= used + bytes + 256);
}

static void visit_refuses_parts_that_are_none(void **state) {
        CLEANUP(golden_model_freep) GoldenModel *m = model_of(NULL);
        uint32_t layers = m->model->config.layers;

        assert_int_equal(h3_model_visit(m->model, (H3Part){H3_PART_FEED, layers}, NULL, NULL), -EINVAL);
        assert_int_equal(h3_model_visit(m->model, (H3Part){H3_PART_FINISH, layers}, NULL, NULL), -EINVAL);
        assert_int_equal(h3_model_visit(m->model, (H3Part){H3_PART_ADALN, layers + 1}, NULL, NULL), -EINVAL);
        assert_int_equal(h3_model_visit(m->model, (H3Part){H3_PART_TEXT, 1}, NULL, NULL), -EINVAL);
        assert_int_equal(h3_model_visit(m->model, (H3Part){_H3_PART_KIND_MAX, 0}, NULL, NULL), -EINVAL);
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(step_bf16_same_bits),
                cmocka_unit_test(step_f32_same_bits),
                cmocka_unit_test(step_int8_same_bits),
                cmocka_unit_test(step_pruned_same_bits),
                cmocka_unit_test(step_of_other_layouts_same_bits),
                cmocka_unit_test(lora_same_bits),
                cmocka_unit_test(step_of_any_pieces_same_bits),
                cmocka_unit_test(step_after_a_cancelled_one_same_bits),
                cmocka_unit_test(step_after_a_failed_one_same_bits),
                cmocka_unit_test(step_gives_its_memory_back),
                cmocka_unit_test(visit_refuses_parts_that_are_none),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
