/* SPDX-License-Identifier: Apache-2.0 */
#include "service/h3/lora.h"

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
#include "tests/unit/h3/checkpoint.h"
#include "tests/unit/h3/golden.h"

/* Adapters against the published sums, and against each other. */

#define F32_REL 5e-6
#define F32_LARGEST 3e-5
#define WORDS(...) ((const char *const[]){__VA_ARGS__, NULL})

DEFINE_CLEANUP(H3Model *, h3_model_free)
DEFINE_CLEANUP(H3LoraReport *, h3_lora_report_free)

static const LkOps *ops;
static LkContext *context;

static void step_run(const H3Model *m, H3Compute compute, GoldenStep *ret) {
        golden_step_run(m, "t2va_tiny", compute, ret);
}

static bool same(const GoldenStep *a, const GoldenStep *b) {
        return memcmp(a->video, b->video, a->n_video * sizeof(float)) == 0 &&
               memcmp(a->audio, b->audio, a->n_audio * sizeof(float)) == 0;
}

/* An adapter and the memory that it points to. */
typedef struct Adapter {
        uint8_t *bytes;
        H3Lora *lora;
} Adapter;

static Adapter adapter_of_bytes(uint8_t *bytes, uint64_t size, H3QkvOrder order) {
        Adapter a = {.bytes = bytes};
        Fault f = {};

        if (h3_lora_open(&(H3File){"lora.safetensors", bytes, size}, 1, &(H3LoraOptions){.qkv_order = order},
                    &a.lora, &f) < 0)
                fail_msg("%s", f.text);
        return a;
}

static Adapter adapter_open(const char *name) {
        char file[100];
        uint64_t size;
        uint8_t *bytes;

        (void) snprintf(file, sizeof(file), "dit/lora/%s.safetensors", name);
        bytes = golden_read(NULL, file, &size);
        return adapter_of_bytes(bytes, size, H3_QKV_AUTO);
}

static Adapter adapter_of(const Checkpoint *c) {
        uint64_t size;
        uint8_t *bytes = checkpoint_write(c, &size);

        return adapter_of_bytes(bytes, size, H3_QKV_AUTO);
}

static void adapter_done(Adapter *a) {
        (void) h3_lora_free(a->lora);
        free(a->bytes);
}

static H3Model *merged(const H3Model *base, const Adapter *a, double strength, H3Compute compute,
        H3LoraReport **ret_report) {
        H3LoraReport *report = NULL;
        H3Model *m = NULL;
        Fault f = {};

        if (h3_model_with_loras(
                    base, &(H3LoraUse){a->lora, strength}, 1, compute, ops, context, NULL, &m, &report, &f) < 0)
                fail_msg("%s", f.text);
        if (ret_report)
                *ret_report = report;
        else
                (void) h3_lora_report_free(report);
        return m;
}

static void check_published(const GoldenStep *s, const char *name, const char *variant) {
        char file[100];
        CLEANUP(golden_freep) Golden *e = NULL;
        double video, audio, largest[2];

        (void) snprintf(file, sizeof(file), "expect_%s.%s", name, variant);
        e = golden_open(file);
        video = golden_distance(
                s->video, golden_data(e, "video_velocity", ST_F32, NULL), s->n_video, largest);
        audio = golden_distance(
                s->audio, golden_data(e, "audio_velocity", ST_F32, NULL), s->n_audio, largest + 1);
        print_message("%s.%s: %.2e, %.2e\n", name, variant, video, audio);
        assert_true(video <= F32_REL && audio <= F32_REL);
        assert_true(largest[0] <= F32_LARGEST && largest[1] <= F32_LARGEST);
}

static const char *const cases[] = {"t2va_tiny", "ref2va_small", "fl2va_mid"};
static const char *const spellings[] = {"lora_diffusers", "lora_comfy", "lora_peft"};
static const size_t n_modules[] = {18, 12, 18};

static void lora_published_files_match(void **state) {
        CLEANUP(golden_model_freep) GoldenModel *base = golden_comfy();

        for (size_t i = 0; i < ELEMENTSOF(spellings); i++) {
                Adapter a = adapter_open(spellings[i]);

                for (unsigned half = 0; half < 2; half++) {
                        CLEANUP(h3_lora_report_freep) H3LoraReport *report = NULL;
                        CLEANUP(h3_model_freep)
                        H3Model *m = merged(base->model, &a, half ? 0.5 : 1, H3_COMPUTE_F32, &report);

                        assert_int_equal(report->n_applied, n_modules[i]);
                        assert_int_equal(report->n_refused, 0);
                        for (size_t j = 0; j < ELEMENTSOF(cases); j++) {
                                GoldenStep s;

                                golden_step_run(m, cases[j], H3_COMPUTE_F32, &s);
                                check_published(&s, cases[j], half ? "lora_s0.5.f32" : "lora.f32");
                                golden_step_done(&s);
                        }
                }
                adapter_done(&a);
        }
}

static void same_as_published(const H3Model *base, const Adapter *a, double strength, H3Compute compute) {
        CLEANUP(golden_model_freep) GoldenModel *comfy = golden_comfy();
        Adapter published = adapter_open("lora_comfy");
        CLEANUP(h3_model_freep) H3Model *x = merged(comfy->model, &published, 1, compute, NULL);
        CLEANUP(h3_model_freep) H3Model *y = merged(base, a, strength, compute, NULL);
        GoldenStep s, t;

        step_run(x, compute, &s);
        step_run(y, compute, &t);
        assert_true(same(&s, &t));
        golden_step_done(&s);
        golden_step_done(&t);
        adapter_done(&published);
}

/* Three matrices or one fused: the zeros of the fused B change nothing. */
static void lora_split_and_fused_same_bits(void **state) {
        CLEANUP(golden_model_freep) GoldenModel *base = golden_comfy();
        Adapter a = adapter_open("lora_diffusers");

        same_as_published(base->model, &a, 1, H3_COMPUTE_F32);
        same_as_published(base->model, &a, 1, H3_COMPUTE_BF16);
        adapter_done(&a);
}

static void lora_any_base_layout_same_bits(void **state) {
        CLEANUP(golden_model_freep)
        GoldenModel *original =
                golden_model_open(golden_derived(), WORDS("original.safetensors"), H3_QKV_INTERLEAVED);
        CLEANUP(golden_model_freep)
        GoldenModel *diffusers = golden_model_open(
                golden_derived(), WORDS("diffusers/diffusion_pytorch_model.safetensors"), H3_QKV_AUTO);
        Adapter a = adapter_open("lora_comfy");

        same_as_published(original->model, &a, 1, H3_COMPUTE_BF16);
        same_as_published(diffusers->model, &a, 1, H3_COMPUTE_BF16);
        adapter_done(&a);
}

static Checkpoint *keys(const char *name) {
        char file[100];

        (void) snprintf(file, sizeof(file), "dit/lora/%s.safetensors", name);
        return checkpoint_of(NULL, file);
}

/* "diffusion_model.blocks.0.attn.qkv_proj.lora_A.weight" as other trainers write it. */
static void respell(Checkpoint *c, unsigned style) {
        static const char prefix[] = "diffusion_model.";

        for (size_t i = 0; i < c->n; i++) {
                CLEANUP_FREE char *old = strdup(c->names[i]);
                const char *module = old + strlen(prefix);
                char *role = strstr(old, ".lora_");
                char name[200], *p;

                assert_non_null(old);
                role = role ? role : strstr(old, ".alpha");
                assert_true(role && strncmp(old, prefix, strlen(prefix)) == 0);
                *role++ = '\0';
                if (style == 0)
                        (void) snprintf(name, sizeof(name), "%s.%s", module, role);
                else if (style == 1) {
                        int n = snprintf(name, sizeof(name), "lora_unet_%s", module);

                        for (p = name; *p; p++)
                                if (*p == '.')
                                        *p = '_';
                        (void) snprintf(name + n, sizeof(name) - (size_t) n, ".%s",
                                strcmp(role, "lora_A.weight") == 0   ? "lora_down.weight"
                                : strcmp(role, "lora_B.weight") == 0 ? "lora_up.weight"
                                                                     : role);
                } else
                        (void) snprintf(
                                name, sizeof(name), "base_model.model.%s%s.%s", prefix, module, role);
                if (role[0] == 'l')
                        role[-1] = '.';
                checkpoint_rename(c, c->names[i], name);
        }
}

static void lora_key_styles_same_bits(void **state) {
        CLEANUP(golden_model_freep) GoldenModel *base = golden_comfy();

        for (unsigned style = 0; style < 3; style++) {
                CLEANUP(checkpoint_freep) Checkpoint *c = keys("lora_comfy");
                Adapter a;

                respell(c, style);
                a = adapter_of(c);
                same_as_published(base->model, &a, 1, H3_COMPUTE_F32);
                adapter_done(&a);
        }
}

/* DiffSynth: ".default" in the keys, and the rows of B interleaved per head. */
static void lora_diffsynth_rows_are_interleaved(void **state) {
        CLEANUP(golden_model_freep) GoldenModel *base = golden_comfy();
        CLEANUP(checkpoint_freep) Checkpoint *c = keys("lora_comfy");
        CLEANUP_FREE uint8_t *rows = malloc(3 * 3072 * 24);
        unsigned fused = 0;
        Adapter a;

        for (size_t i = c->n; i-- > 0;) {
                CLEANUP_FREE char *old = strdup(c->names[i]);
                char name[200], *lora = strstr(old, ".lora_");

                if (!lora)
                        continue;
                if (strstr(old, "qkv_proj.lora_B")) {
                        uint8_t *to = rows + fused++ * 3072 * 24;

                        for (uint64_t r = 0; r < 3072; r++)
                                memcpy(to + r * 24,
                                        (const uint8_t *) c->data[i] +
                                                (r / 128 % 3 * 1024 + r / 384 * 128 + r % 128) * 24,
                                        24);
                        c->data[i] = to;
                }
                (void) snprintf(
                        name, sizeof(name), "%.*s.lora_%c.default.weight", (int) (lora - old), old, lora[6]);
                checkpoint_rename(c, old, name);
        }
        assert_int_equal(fused, 3);
        a = adapter_of(c);
        same_as_published(base->model, &a, 1, H3_COMPUTE_F32);
        adapter_done(&a);
}

/* No alpha anywhere: alpha = rank, so strength 0.5 does what alpha 2 of rank 4 did. */
static void lora_without_alpha_takes_the_rank(void **state) {
        CLEANUP(golden_model_freep) GoldenModel *base = golden_comfy();
        CLEANUP(checkpoint_freep) Checkpoint *c = keys("lora_comfy");
        Adapter a;

        for (size_t i = c->n; i-- > 0;)
                if (strstr(c->names[i], ".alpha"))
                        checkpoint_drop(c, c->names[i]);
        a = adapter_of(c);
        same_as_published(base->model, &a, 0.5, H3_COMPUTE_F32);
        adapter_done(&a);
}

static void lora_strength_zero_changes_no_bit(void **state) {
        CLEANUP(golden_model_freep)
        GoldenModel *int8 =
                golden_model_open(golden_derived(), WORDS("comfy_int8.safetensors"), H3_QKV_AUTO);
        CLEANUP(golden_model_freep) GoldenModel *comfy = golden_comfy();
        const H3Model *bases[] = {comfy->model, int8->model};
        Adapter a = adapter_open("lora_comfy");

        for (unsigned i = 0; i < 4; i++) {
                H3Compute compute = i & 1 ? H3_COMPUTE_BF16 : H3_COMPUTE_F32;
                CLEANUP(h3_model_freep) H3Model *m = merged(bases[i / 2], &a, 0, compute, NULL);
                GoldenStep s, t;

                assert_int_equal(m->private_bytes, 0);
                step_run(bases[i / 2], compute, &s);
                step_run(m, compute, &t);
                assert_true(same(&s, &t));
                golden_step_done(&s);
                golden_step_done(&t);
        }
        adapter_done(&a);
}

/* Two adapters with strengths: 0.75 and 0.25 of the same are 1 of it, up to rounding; the base is untouched.
 */
static void lora_several_add_up(void **state) {
        CLEANUP(golden_model_freep) GoldenModel *base = golden_comfy();
        Adapter a = adapter_open("lora_comfy"), b = adapter_open("lora_peft");
        const H3LoraUse uses[] = {{a.lora, 0.75}, {b.lora, 0.25}};
        CLEANUP(h3_lora_report_freep) H3LoraReport *report = NULL;
        CLEANUP(h3_model_freep) H3Model *m = NULL;
        uint64_t size;
        CLEANUP_FREE uint8_t *before = golden_read(NULL, "dit/comfy.safetensors", &size);
        Fault f = {};
        GoldenStep s;

        assert_int_equal(
                h3_model_with_loras(base->model, uses, 2, H3_COMPUTE_F32, ops, context, NULL, &m, &report, &f), 0);
        assert_int_equal(report->n_applied, 30);
        assert_int_equal(report->applied[29].lora, 1);
        step_run(m, H3_COMPUTE_F32, &s);
        check_published(&s, "t2va_tiny", "lora.f32");
        assert_memory_equal(before, base->bytes[0], size);
        golden_step_done(&s);
        adapter_done(&a);
        adapter_done(&b);
}

/* Blocks 0 and 2 and a refiner block: qkv, out, fc1, fc2, in the type that the compute mode asks for. */
static void lora_private_bytes_are_counted(void **state) {
        CLEANUP(golden_model_freep) GoldenModel *base = golden_comfy();
        uint64_t numbers = 3 * (3072 * 64 + 64 * 1024 + 192 * 64 + 64 * 96);
        Adapter a = adapter_open("lora_comfy");
        CLEANUP(h3_model_freep) H3Model *wide = merged(base->model, &a, 1, H3_COMPUTE_F32, NULL);
        CLEANUP(h3_model_freep) H3Model *half = merged(base->model, &a, 1, H3_COMPUTE_BF16, NULL);

        assert_int_equal(wide->private_bytes, 4 * numbers);
        assert_int_equal(half->private_bytes, 2 * numbers);
        assert_int_equal(half->blocks[0].attn.k.type, LK_BF16);
        assert_ptr_equal(half->blocks[1].attn.k.data, base->model->blocks[1].attn.k.data);
        assert_ptr_not_equal(half->blocks[2].attn.k.data, base->model->blocks[2].attn.k.data);
        adapter_done(&a);
}

static float *expanded(const LkMatrix *w) {
        float *y = malloc(w->rows * w->cols * sizeof(float));

        assert_non_null(y);
        assert_int_equal(ops->dequantise(context, &(LkDequantise){.w = *w, .y = y, .y_ld = w->cols}), 0);
        return y;
}

/* int8 stays int8: each row is the nearest that its new scale allows, and the scale is its largest number's.
 */
static void lora_int8_is_quantised_again_to_nearest(void **state) {
        CLEANUP(golden_model_freep)
        GoldenModel *base =
                golden_model_open(golden_derived(), WORDS("comfy_int8.safetensors"), H3_QKV_AUTO);
        CLEANUP(golden_model_freep) GoldenModel *plain = golden_comfy();
        Adapter a = adapter_open("lora_comfy");
        CLEANUP(h3_model_freep) H3Model *m = merged(base->model, &a, 1, H3_COMPUTE_BF16, NULL);
        CLEANUP(h3_model_freep) H3Model *exact = merged(plain->model, &a, 1, H3_COMPUTE_F32, NULL);
        const LkMatrix *old = &base->model->blocks[0].attn.out, *new = &m->blocks[0].attn.out;
        CLEANUP_FREE float *before = expanded(old), *after = expanded(new);
        CLEANUP_FREE float *w = expanded(&plain->model->blocks[0].attn.out);
        CLEANUP_FREE float *sum = expanded(&exact->blocks[0].attn.out);
        double changed = 0;

        assert_int_equal(new->type, LK_I8);
        assert_int_equal(new->quant.rotation, 256);
        assert_int_equal(m->private_bytes, 2 * (3072 * 64 + 64 * 1024 + 192 * 64 + 64 * 96) +
                                                   2 * 4 * (3072 + 64 + 192 + 64) +
                                                   2 * (3072 * 64 + 64 * 1024 + 192 * 64 + 64 * 96));
        for (uint64_t r = 0; r < new->rows; r++) {
                double scale = (double) ((const float *) new->quant.scale)[r], error = 0;

                for (uint64_t k = 0; k < new->cols; k++) {
                        uint64_t i = r * new->cols + k;
                        double delta = (double) sum[i] - (double) w[i];
                        double d = (double) after[i] - ((double) before[i] + delta);

                        error += d * d;
                        changed += delta * delta;
                }
                /* a rotation keeps lengths: no number is more than half a step away */
                assert_true(sqrt(error) <= 0.5 * scale * sqrt((double) new->cols));
                assert_true(sqrt(error) >= 0.2 * scale * sqrt((double) new->cols));
        }
        assert_true(changed > 0.01);
        adapter_done(&a);
}

static void lora_int8_step_is_near_the_exact_one(void **state) {
        CLEANUP(golden_model_freep)
        GoldenModel *base =
                golden_model_open(golden_derived(), WORDS("comfy_int8.safetensors"), H3_QKV_AUTO);
        CLEANUP(golden_freep) Golden *e = golden_open("expect_t2va_tiny.lora.f32");
        Adapter a = adapter_open("lora_comfy");
        CLEANUP(h3_model_freep) H3Model *m = merged(base->model, &a, 1, H3_COMPUTE_F32, NULL);
        const float *expected = golden_data(e, "video_velocity", ST_F32, NULL);
        double with, without;
        GoldenStep s, t;

        step_run(m, H3_COMPUTE_F32, &s);
        step_run(base->model, H3_COMPUTE_F32, &t);
        with = golden_distance(s.video, expected, s.n_video, NULL);
        without = golden_distance(t.video, expected, t.n_video, NULL);
        print_message("int8 with the adapter: %.2e; without it: %.2e\n", with, without);
        assert_true(with < 6e-2 && without > 2 * with);
        golden_step_done(&s);
        golden_step_done(&t);
        adapter_done(&a);
}

static const H3LoraNote *refusal(const H3LoraReport *r, const char *module) {
        for (size_t i = 0; i < r->n_refused; i++)
                if (strcmp(r->refused[i].name, module) == 0)
                        return r->refused + i;
        fail_msg("%s is not refused", module);
        return NULL;
}

static void lora_refused_modules_are_listed_with_reasons(void **state) {
        CLEANUP(golden_model_freep) GoldenModel *base = golden_comfy();
        CLEANUP(checkpoint_freep) Checkpoint *c = keys("lora_comfy");
        CLEANUP(h3_lora_report_freep) H3LoraReport *report = NULL;
        CLEANUP(h3_model_freep) H3Model *m = NULL;
        Adapter a;

        checkpoint_replace(
                c, "diffusion_model.blocks.0.attn.out_proj.lora_A.weight", ST_BF16, 2, 4, 1020, NULL);
        checkpoint_drop(c, "diffusion_model.blocks.0.mlp.fc1.lora_B.weight");
        checkpoint_replace(c, "diffusion_model.blocks.2.mlp.fc2.lora_B.weight", ST_BF16, 2, 64, 5, NULL);
        checkpoint_replace(c, "diffusion_model.blocks.2.mlp.fc1.alpha", ST_F32, 1, 2, 0, NULL);
        checkpoint_add(c, "diffusion_model.blocks.3.mlp.fc1.lora_A.weight", ST_BF16, 2, 4, 64, NULL);
        checkpoint_add(c, "diffusion_model.blocks.3.mlp.fc1.lora_B.weight", ST_BF16, 2, 192, 4, NULL);
        checkpoint_add(c, "text_model.layer.lora_A.weight", ST_BF16, 2, 4, 64, NULL);
        checkpoint_add(c, "text_model.layer.lora_B.weight", ST_BF16, 2, 4, 4, NULL);
        checkpoint_add(c, "diffusion_model.blocks.1.mlp.fc1.dora_scale", ST_BF16, 2, 192, 1, NULL);
        checkpoint_add(c, "diffusion_model.blocks.1.mlp.fc2.diff", ST_BF16, 2, 64, 96, NULL);
        a = adapter_of(c);
        m = merged(base->model, &a, 1, H3_COMPUTE_F32, &report);
        assert_int_equal(report->n_applied, 8);
        assert_int_equal(report->n_refused, 8);
        assert_non_null(strstr(refusal(report, "diffusion_model.blocks.0.attn.out_proj")->reason,
                "A is [4, 1020] and B [64, 4]; the matrix is [64, 1024]"));
        assert_non_null(strstr(refusal(report, "diffusion_model.blocks.0.mlp.fc1")->reason, "B (up)"));
        assert_non_null(strstr(refusal(report, "diffusion_model.blocks.2.mlp.fc2")->reason, "B [64, 5]"));
        assert_non_null(strstr(refusal(report, "diffusion_model.blocks.2.mlp.fc1")->reason, "alpha"));
        assert_non_null(
                strstr(refusal(report, "diffusion_model.blocks.3.mlp.fc1")->reason, "no such matrix"));
        assert_non_null(strstr(refusal(report, "text_model.layer")->reason, "no such matrix"));
        assert_non_null(strstr(refusal(report, "diffusion_model.blocks.1.mlp.fc1")->reason, "dora_scale"));
        assert_non_null(strstr(refusal(report, "diffusion_model.blocks.1.mlp.fc2")->reason, "diff"));
        adapter_done(&a);
}

/* AdaLN pairs: of the full model they apply to it, and are refused with the reason on a curve. */
static void lora_adaln_of_the_full_model_is_refused_on_a_curve(void **state) {
        CLEANUP(golden_model_freep) GoldenModel *full = golden_comfy(), *curve = NULL;
        CLEANUP(checkpoint_freep) Checkpoint *c = keys("lora_comfy");
        CLEANUP(h3_lora_report_freep) H3LoraReport *on_full = NULL, *on_curve = NULL;
        CLEANUP(h3_model_freep) H3Model *m = NULL, *n = NULL;
        Adapter a;

        curve = golden_model_open(golden_derived(), WORDS("comfy_pruned.safetensors"), H3_QKV_AUTO);
        checkpoint_add(c, "blocks.1.adaln_proj.linear.lora_A.weight", ST_BF16, 2, 2, 32, NULL);
        checkpoint_add(c, "blocks.1.adaln_proj.linear.lora_B.weight", ST_BF16, 2, 1152, 2, NULL);
        checkpoint_add(c, "time_embedder.proj_in.lora_A.weight", ST_BF16, 2, 2, 256, NULL);
        checkpoint_add(c, "time_embedder.proj_in.lora_B.weight", ST_BF16, 2, 96, 2, NULL);
        a = adapter_of(c);
        m = merged(full->model, &a, 1, H3_COMPUTE_F32, &on_full);
        n = merged(curve->model, &a, 1, H3_COMPUTE_F32, &on_curve);
        assert_int_equal(on_full->n_applied, 14);
        assert_int_equal(on_full->n_refused, 0);
        assert_int_equal(on_curve->n_applied, 12);
        assert_non_null(strstr(refusal(on_curve, "blocks.1.adaln_proj.linear")->reason, "32 inputs"));
        assert_non_null(strstr(refusal(on_curve, "blocks.1.adaln_proj.linear")->reason, "curve of rank 8"));
        assert_non_null(strstr(refusal(on_curve, "time_embedder.proj_in")->reason, "curve"));
        adapter_done(&a);
}

static void merge_refused(const Adapter *a, double strength, const char *name, const char *word) {
        CLEANUP(golden_model_freep) GoldenModel *base = golden_comfy();
        H3LoraReport *report = NULL;
        H3Model *m = NULL;
        Fault f = {};

        assert_int_equal(h3_model_with_loras(base->model, &(H3LoraUse){a->lora, strength}, 1, H3_COMPUTE_F32,
                                 ops, context, NULL, &m, &report, &f),
                -EINVAL);
        assert_string_equal(f.name, name);
        if (!strstr(f.text, word))
                fail_msg("no '%s' in: %s", word, f.text);
        assert_true(!m && !report);
}

static void lora_bad_numbers_are_refused(void **state) {
        CLEANUP(checkpoint_freep) Checkpoint *c = keys("lora_comfy"), *other = checkpoint_empty();
        CLEANUP(checkpoint_freep) Checkpoint *alpha = keys("lora_comfy");
        static const float infinite = INFINITY;
        CLEANUP_FREE uint16_t *nan = calloc(64 * 4, 2);
        Adapter a = adapter_open("lora_comfy"), b, d, e;

        merge_refused(&a, NAN, FAULT_INVALID_ARGUMENT, "strength");
        merge_refused(&a, INFINITY, FAULT_INVALID_ARGUMENT, "strength");
        merge_refused(&a, 1e9, FAULT_INVALID_ARGUMENT, "strength");

        nan[100] = 0x7fc0;
        checkpoint_replace(c, "diffusion_model.blocks.2.mlp.fc2.lora_B.weight", ST_BF16, 2, 64, 4, nan);
        b = adapter_of(c);
        merge_refused(&b, 1, FAULT_INVALID_MODEL, "blocks.2.mlp.fc2");

        checkpoint_add(other, "unet.down.lora_A.weight", ST_F32, 2, 4, 64, NULL);
        checkpoint_add(other, "unet.down.lora_B.weight", ST_F32, 2, 64, 4, NULL);
        d = adapter_of(other);
        merge_refused(&d, 1, FAULT_INVALID_MODEL, "Nothing of adapter 0 applies");

        checkpoint_replace(alpha, "diffusion_model.blocks.0.mlp.fc1.alpha", ST_F32, 0, 0, 0, &infinite);
        e = adapter_of(alpha);
        merge_refused(&e, 1, FAULT_INVALID_MODEL, "alpha");
        adapter_done(&a);
        adapter_done(&b);
        adapter_done(&d);
        adapter_done(&e);
}

static void open_refused(const Checkpoint *c, int error, const char *word) {
        uint64_t size;
        CLEANUP_FREE uint8_t *bytes = checkpoint_write(c, &size);
        H3Lora *l = NULL;
        Fault f = {};

        assert_int_equal(h3_lora_open(&(H3File){"l.safetensors", bytes, size}, 1, NULL, &l, &f), error);
        if (!strstr(f.text, word))
                fail_msg("no '%s' in: %s", word, f.text);
        assert_null(l);
}

static void lora_files_that_are_none_are_refused(void **state) {
        CLEANUP(checkpoint_freep) Checkpoint *model = checkpoint_new(), *twice = keys("lora_comfy");
        uint64_t size;
        uint8_t *bytes = golden_read(NULL, "dit/lora/lora_diffusers.safetensors", &size);
        H3Lora *l = NULL;
        Fault f = {};
        char *alpha;

        open_refused(model, -EINVAL, "is no LoRA");
        checkpoint_add(twice, "diffusion_model.blocks.0.mlp.fc1.lora_down.weight", ST_BF16, 2, 4, 64, NULL);
        open_refused(twice, -EINVAL, "two keys");

        /* the metadata's alpha is a number or an error */
        alpha = memmem(bytes, size, "\"2.0\"", 5);
        assert_non_null(alpha);
        memcpy(alpha, "\"x.0\"", 5);
        assert_int_equal(h3_lora_open(&(H3File){"l.safetensors", bytes, size}, 1, NULL, &l, &f), -EBADMSG);
        assert_non_null(strstr(f.text, "x.0"));
        memcpy(alpha, "\"0.0\"", 5);
        assert_int_equal(h3_lora_open(&(H3File){"l.safetensors", bytes, size}, 1, NULL, &l, &f), -EBADMSG);
        free(bytes);
}

/* The pairs of such a file are made for its heads. */
static void lora_with_a_head_bank_is_not_supported(void **state) {
        static const char *const names[] = {"final_layer.video_out.weight",
                "diffusion_model.final_layer.audio_out.bias", "proj_out.weight"};

        for (size_t i = 0; i < ELEMENTSOF(names); i++) {
                CLEANUP(checkpoint_freep) Checkpoint *c = keys("lora_comfy");

                checkpoint_add(c, names[i], ST_BF16, 2, 64, 64, NULL);
                open_refused(c, -EOPNOTSUPP, "bank of output heads");
        }
}

static int setup(void **state) {
        ops = lk_cpu_ops(LK_CPU_AUTO);
        return ops->context_new(2, &context);
}

static int teardown(void **state) {
        return ops->context_free(context) ? -1 : 0;
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(lora_published_files_match),
                cmocka_unit_test(lora_split_and_fused_same_bits),
                cmocka_unit_test(lora_any_base_layout_same_bits),
                cmocka_unit_test(lora_key_styles_same_bits),
                cmocka_unit_test(lora_diffsynth_rows_are_interleaved),
                cmocka_unit_test(lora_without_alpha_takes_the_rank),
                cmocka_unit_test(lora_strength_zero_changes_no_bit),
                cmocka_unit_test(lora_several_add_up),
                cmocka_unit_test(lora_private_bytes_are_counted),
                cmocka_unit_test(lora_int8_is_quantised_again_to_nearest),
                cmocka_unit_test(lora_int8_step_is_near_the_exact_one),
                cmocka_unit_test(lora_refused_modules_are_listed_with_reasons),
                cmocka_unit_test(lora_adaln_of_the_full_model_is_refused_on_a_curve),
                cmocka_unit_test(lora_bad_numbers_are_refused),
                cmocka_unit_test(lora_files_that_are_none_are_refused),
                cmocka_unit_test(lora_with_a_head_bank_is_not_supported),
        };

        return cmocka_run_group_tests(tests, setup, teardown);
}
