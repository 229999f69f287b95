/* SPDX-License-Identifier: Apache-2.0 */
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

/* Curve and quantised checkpoints: whole steps against the published code, and what opening them refuses. */

#define F32_REL 5e-6
#define F32_LARGEST 3e-5
#define BF16_REL 2.5e-2
#define BF16_FACTOR 1.25
#define INT8_REL 6e-2

DEFINE_CLEANUP(H3Model *, h3_model_free)

#define PRUNED "comfy_pruned.safetensors"
#define INT8 "comfy_int8.safetensors"
#define QKV "blocks.0.attn.qkv_proj"
#define WORDS(...) ((const char *const[]){__VA_ARGS__, NULL})

static const char *const cases[] = {"t2va_tiny", "ref2va_small", "fl2va_mid"};

static void step_run(const H3Model *m, H3Compute compute, GoldenStep *ret) {
        golden_step_run(m, "t2va_tiny", compute, ret);
}

static GoldenModel *derived_model(const char *name) {
        return golden_model_open(golden_derived(), WORDS(name), H3_QKV_AUTO);
}

/* Distance of a step from an expectation, the worse of the two streams. */
static double distance(const GoldenStep *s, const char *case_name, const char *variant, double *ret_largest) {
        char name[100];
        CLEANUP(golden_freep) Golden *e = NULL;
        double video, audio, largest[2];

        (void) snprintf(name, sizeof(name), "expect_%s.%s", case_name, variant);
        e = golden_open(name);
        video = golden_distance(
                s->video, golden_data(e, "video_velocity", ST_F32, NULL), s->n_video, largest);
        audio = golden_distance(
                s->audio, golden_data(e, "audio_velocity", ST_F32, NULL), s->n_audio, largest + 1);
        if (ret_largest)
                *ret_largest = fmax(largest[0], largest[1]);
        print_message("%s.%s: %.2e, %.2e\n", case_name, variant, video, audio);
        return fmax(video, audio);
}

static void check_f32(const char *model, const char *variant) {
        CLEANUP(golden_model_freep) GoldenModel *m = derived_model(model);

        for (size_t i = 0; i < ELEMENTSOF(cases); i++) {
                double largest;
                GoldenStep s;

                golden_step_run(m->model, cases[i], H3_COMPUTE_F32, &s);
                assert_true(distance(&s, cases[i], variant, &largest) <= F32_REL);
                assert_true(largest <= F32_LARGEST);
                golden_step_done(&s);
        }
}

static void step_pruned_f32_matches(void **state) {
        check_f32(PRUNED, "pruned.f32");
}

static void step_int8_f32_expands_weights(void **state) {
        check_f32(INT8, "int8w.f32");
}

static void step_pruned_bf16_matches(void **state) {
        CLEANUP(golden_model_freep) GoldenModel *m = derived_model(PRUNED);

        for (size_t i = 0; i < ELEMENTSOF(cases); i++) {
                CLEANUP(golden_freep) Golden *bf16 = NULL;
                char name[100];
                GoldenStep s, public = {};
                double theirs;

                (void) snprintf(name, sizeof(name), "expect_%s.pruned.bf16", cases[i]);
                bf16 = golden_open(name);
                public.video = (float *) golden_data(bf16, "video_velocity", ST_F32, &public.n_video);
                public.audio = (float *) golden_data(bf16, "audio_velocity", ST_F32, &public.n_audio);
                theirs = distance(&public, cases[i], "pruned.f32", NULL);
                golden_step_run(m->model, cases[i], H3_COMPUTE_BF16, &s);
                assert_true(distance(&s, cases[i], "pruned.bf16", NULL) <= BF16_REL);
                assert_true(distance(&s, cases[i], "pruned.f32", NULL) <= BF16_FACTOR * theirs);
                golden_step_done(&s);
        }
}

static void step_int8_bf16_matches(void **state) {
        CLEANUP(golden_model_freep) GoldenModel *m = derived_model(INT8);

        for (size_t i = 0; i < ELEMENTSOF(cases); i++) {
                GoldenStep s;

                golden_step_run(m->model, cases[i], H3_COMPUTE_BF16, &s);
                assert_true(distance(&s, cases[i], "int8a.bf16", NULL) <= INT8_REL);
                assert_true(distance(&s, cases[i], "int8e.bf16", NULL) <= INT8_REL);
                /* and it is the int8 arithmetic, not expanded weights in bf16: those are 2.7e-2 and more
                 * away */
                assert_true(distance(&s, cases[i], "int8w.f32", NULL) > 2.4e-2);
                golden_step_done(&s);
        }
}

/* Nobody publishes such a step. In bf16 against f32 of the same numbers, by what the published bf16 of the base is from its f32; and far
 * enough from the base that the format is seen. */
static void step_fp8_and_nvfp4_bf16_matches_f32(void **state) {
        static const char *const models[] = {"comfy_fp8.safetensors", "comfy_nvfp4.safetensors"};

        for (size_t i = 0; i < ELEMENTSOF(models); i++) {
                CLEANUP(golden_model_freep) GoldenModel *m = derived_model(models[i]);
                CLEANUP(golden_freep) Golden *bf16 = golden_open("expect_t2va_tiny.bf16");
                GoldenStep s, exact, public = {};
                double theirs, own;

                public.video = (float *) golden_data(bf16, "video_velocity", ST_F32, &public.n_video);
                public.audio = (float *) golden_data(bf16, "audio_velocity", ST_F32, &public.n_audio);
                theirs = distance(&public, "t2va_tiny", "f32", NULL);
                step_run(m->model, H3_COMPUTE_BF16, &s);
                step_run(m->model, H3_COMPUTE_F32, &exact);
                own = fmax(golden_distance(s.video, exact.video, s.n_video, NULL), golden_distance(s.audio, exact.audio, s.n_audio, NULL));
                print_message("%s: %.2e, %.2f of the published bf16's\n", models[i], own, own / theirs);
                assert_true(own <= BF16_FACTOR * theirs);
                assert_true(distance(&exact, "t2va_tiny", "f32", NULL) > 2 * theirs);
                golden_step_done(&s);
                golden_step_done(&exact);
        }
}

static H3Model *open_checkpoint(const Checkpoint *c, uint8_t **ret_bytes) {
        H3Model *m = NULL;
        uint64_t size;
        Fault f = {};

        *ret_bytes = checkpoint_write(c, &size);
        if (h3_model_open(&(H3File){"m.safetensors", *ret_bytes, size}, 1, NULL, &m, &f) < 0)
                fail_msg("%s", f.text);
        return m;
}

static void same_step(const Checkpoint *c, const char *derived, H3Compute compute) {
        CLEANUP(golden_model_freep) GoldenModel *g = derived_model(derived);
        CLEANUP_FREE uint8_t *bytes = NULL;
        CLEANUP(h3_model_freep) H3Model *m = open_checkpoint(c, &bytes);
        GoldenStep a, b;

        step_run(g->model, compute, &a);
        step_run(m, compute, &b);
        assert_memory_equal(a.video, b.video, a.n_video * sizeof(float));
        assert_memory_equal(a.audio, b.audio, a.n_audio * sizeof(float));
        golden_step_done(&a);
        golden_step_done(&b);
}

static Checkpoint *derived_checkpoint(const char *name) {
        return checkpoint_of(golden_derived(), name);
}

/* The same curve as diffusers spells it, with what it keeps beside it. */
static void curve_other_names_same_bits(void **state) {
        CLEANUP(checkpoint_freep) Checkpoint *c = derived_checkpoint(PRUNED);

        checkpoint_rename(c, "adaln_t_table", "time_embedder.table");
        for (unsigned i = 0; i < 3; i++) {
                char name[100], folded[100];

                (void) snprintf(name, sizeof(name), "blocks.%u.adaln_proj.linear.bias", i);
                (void) snprintf(folded, sizeof(folded), "blocks.%u.adaln_proj.folded_bias", i);
                checkpoint_rename(c, name, folded);
        }
        checkpoint_rename(c, "final_layer.adaln_proj.linear.bias", "final_layer.adaln_proj.folded_bias");
        checkpoint_add(c, "adaln_basis", ST_F32, 2, 8, 32, NULL);
        checkpoint_add(c, "adaln_mean", ST_F32, 1, 32, 0, NULL);
        same_step(c, PRUNED, H3_COMPUTE_BF16);
}

/* Only the rows on the two sides of a timestep count: the others may be anything. */
static void curve_takes_the_rows_beside_the_timestep(void **state) {
        CLEANUP(checkpoint_freep) Checkpoint *c = derived_checkpoint(PRUNED);
        CLEANUP(golden_freep) Golden *k = golden_open("case_t2va_tiny");
        const float sigmas[] = {golden_meta_float(k, "sigma_video"), golden_meta_float(k, "sigma_audio")};
        const float *table = checkpoint_data(c, "adaln_t_table");
        CLEANUP_FREE float *other = malloc(1025 * 8 * sizeof(float));

        for (unsigned i = 0; i < 1025 * 8; i++)
                other[i] = 1e6f;
        for (unsigned i = 0; i < 2; i++) {
                size_t row = (size_t) floorf((1.0f - sigmas[i]) * 1024);

                assert_true(row < 1024);
                memcpy(other + row * 8, table + row * 8, 16 * sizeof(float));
        }
        checkpoint_replace(c, "adaln_t_table", ST_F32, 2, 1025, 8, other);
        same_step(c, PRUNED, H3_COMPUTE_F32);
}

/* Rank 11 with three columns of zeros. */
static void widen(Checkpoint *c, const char *name, uint64_t rows, size_t size, uint8_t *to) {
        const uint8_t *from = checkpoint_data(c, name);
        StType type = checkpoint_find(c, name)->type;

        memset(to, 0, rows * 11 * size);
        for (uint64_t i = 0; i < rows; i++)
                memcpy(to + i * 11 * size, from + i * 8 * size, 8 * size);
        checkpoint_replace(c, name, type, 2, rows, 11, to);
}

static void curve_any_rank_same_bits(void **state) {
        CLEANUP(checkpoint_freep) Checkpoint *c = derived_checkpoint(PRUNED);
        CLEANUP_FREE uint8_t *table = malloc(1025 * 11 * 4), *matrices = malloc(4 * 1152 * 11 * 2);

        widen(c, "adaln_t_table", 1025, 4, table);
        for (unsigned i = 0; i < 3; i++) {
                char name[100];

                (void) snprintf(name, sizeof(name), "blocks.%u.adaln_proj.linear.weight", i);
                widen(c, name, 1152, 2, matrices + i * 1152 * 22);
        }
        widen(c, "final_layer.adaln_proj.linear.weight", 128, 2, matrices + 3 * 1152 * 22);
        same_step(c, PRUNED, H3_COMPUTE_F32);
}

/* A point between each two: the same piecewise line. */
static void curve_any_number_of_points_matches(void **state) {
        CLEANUP(checkpoint_freep) Checkpoint *c = derived_checkpoint(PRUNED);
        CLEANUP_FREE float *fine = malloc(2049 * 8 * sizeof(float));
        const float *table = checkpoint_data(c, "adaln_t_table");
        CLEANUP_FREE uint8_t *bytes = NULL;
        CLEANUP(h3_model_freep) H3Model *m = NULL;
        GoldenStep s;

        for (unsigned i = 0; i < 2049 * 8; i++)
                fine[i] = (table[i / 16 * 8 + i % 8] + table[(i / 8 + 1) / 2 * 8 + i % 8]) / 2;
        checkpoint_replace(c, "adaln_t_table", ST_F32, 2, 2049, 8, fine);
        m = open_checkpoint(c, &bytes);
        assert_int_equal(m->config.curve_points, 2049);
        step_run(m, H3_COMPUTE_F32, &s);
        assert_true(distance(&s, "t2va_tiny", "pruned.f32", NULL) <= F32_REL);
        golden_step_done(&s);
}

static void refused_with(const Checkpoint *c, const H3ModelOptions *options, int error, const char *name,
        const char *const *words) {
        uint64_t size;
        CLEANUP_FREE uint8_t *bytes = checkpoint_write(c, &size);
        H3Model *m = NULL;
        Fault f = {};
        int r = h3_model_open(&(H3File){"m.safetensors", bytes, size}, 1, options, &m, &f);

        if (r != error || strcmp(f.name, name) != 0)
                fail_msg("returned %d with %s: %s", r, f.name, f.text);
        for (; *words; words++)
                if (!strstr(f.text, *words))
                        fail_msg("no '%s' in: %s", *words, f.text);
        assert_null(m);
}

static void refused(const Checkpoint *c, int error, const char *name, const char *const *words) {
        refused_with(c, NULL, error, name, words);
}

static void curve_wrong_shapes_are_listed(void **state) {
        CLEANUP(checkpoint_freep)
        Checkpoint *c = derived_checkpoint(PRUNED), *one = derived_checkpoint(PRUNED);

        checkpoint_replace(c, "blocks.1.adaln_proj.linear.weight", ST_F16, 2, 1152, 9, NULL);
        checkpoint_drop(c, "blocks.2.adaln_proj.linear.bias");
        checkpoint_add(c, "time_embedder.proj_in.bias", ST_F32, 1, 96, 0, NULL);
        refused(c, -EINVAL, FAULT_INVALID_MODEL,
                WORDS("blocks.1.adaln_proj.linear.weight is [1152, 9], expected [1152, 8]",
                        "blocks.2.adaln_proj.linear.bias", "time_embedder.proj_in.bias"));
        checkpoint_replace(one, "adaln_t_table", ST_F32, 2, 1, 8, NULL);
        refused(one, -EINVAL, FAULT_INVALID_MODEL, WORDS("adaln_t_table has one row"));
}

static void int8_scales_of_any_shape_same_bits(void **state) {
        CLEANUP(checkpoint_freep) Checkpoint *c = derived_checkpoint(INT8);

        checkpoint_find(c, QKV ".weight_scale")->n_dims = 1;
        same_step(c, INT8, H3_COMPUTE_BF16);
}

static void int8_one_scale_is_every_rows_scale(void **state) {
        CLEANUP(checkpoint_freep) Checkpoint *c = derived_checkpoint(INT8), *each = derived_checkpoint(INT8);
        CLEANUP_FREE float *scales = malloc(3072 * sizeof(float));
        CLEANUP_FREE uint8_t *a_bytes = NULL, *b_bytes = NULL;
        CLEANUP(h3_model_freep) H3Model *a = NULL, *b = NULL;
        GoldenStep x, y;

        for (unsigned i = 0; i < 3072; i++)
                scales[i] = 0.01f;
        checkpoint_replace(c, QKV ".weight_scale", ST_F32, 0, 0, 0, scales);
        checkpoint_replace(each, QKV ".weight_scale", ST_F32, 2, 3072, 1, scales);
        a = open_checkpoint(c, &a_bytes);
        b = open_checkpoint(each, &b_bytes);
        step_run(a, H3_COMPUTE_F32, &x);
        step_run(b, H3_COMPUTE_F32, &y);
        assert_memory_equal(x.video, y.video, x.n_video * sizeof(float));
        golden_step_done(&x);
        golden_step_done(&y);
}

/* qkv interleaved per head, its scales too: the views must find the scales of their rows. */
static void int8_interleaved_rows_keep_their_scales(void **state) {
        CLEANUP(checkpoint_freep) Checkpoint *c = derived_checkpoint(INT8);
        CLEANUP(golden_model_freep) GoldenModel *g = derived_model(INT8);
        CLEANUP_FREE uint8_t *bytes = NULL, *data = malloc(3 * 3072 * 64), *scales = malloc(3 * 3072 * 4);
        CLEANUP_FREE uint8_t *refiner = malloc(2 * 3072 * 128);
        CLEANUP(h3_model_freep) H3Model *m = NULL;
        uint64_t size;
        Fault f = {};
        GoldenStep a, b;

        for (unsigned layer = 0; layer < 5; layer++) {
                char name[2][100];
                const char *base = layer < 3 ? "blocks" : "token_refiner.blocks";
                uint64_t row = layer < 3 ? 64 : 128;
                uint8_t *to = layer < 3 ? data + layer * 3072 * 64 : refiner + (layer - 3) * 3072 * 128;
                uint8_t *to_scale = scales + layer % 3 * 3072 * 4;

                (void) snprintf(name[0], 100, "%s.%u.attn.qkv_proj.weight", base, layer % 3);
                (void) snprintf(name[1], 100, "%s.%u.attn.qkv_proj.weight_scale", base, layer % 3);
                for (uint64_t r = 0; r < 3072; r++) {
                        uint64_t head = r / 384, part = r / 128 % 3,
                                 from = part * 1024 + head * 128 + r % 128;

                        memcpy(to + r * row, (const uint8_t *) checkpoint_data(c, name[0]) + from * row,
                                row);
                        if (layer < 3)
                                memcpy(to_scale + r * 4,
                                        (const uint8_t *) checkpoint_data(c, name[1]) + from * 4, 4);
                }
                checkpoint_replace(c, name[0], layer < 3 ? ST_I8 : ST_BF16, 2, 3072, 64, to);
                if (layer < 3)
                        checkpoint_replace(c, name[1], ST_F32, 2, 3072, 1, to_scale);
        }
        bytes = checkpoint_write(c, &size);
        assert_int_equal(h3_model_open(&(H3File){"m.safetensors", bytes, size}, 1,
                                 &(H3ModelOptions){.qkv_order = H3_QKV_INTERLEAVED}, &m, &f),
                0);
        for (unsigned compute = 0; compute < 2; compute++) {
                step_run(g->model, compute ? H3_COMPUTE_BF16 : H3_COMPUTE_F32, &a);
                step_run(m, compute ? H3_COMPUTE_BF16 : H3_COMPUTE_F32, &b);
                assert_memory_equal(a.video, b.video, a.n_video * sizeof(float));
                golden_step_done(&a);
                golden_step_done(&b);
        }
}

static void set_marker(Checkpoint *c, const char *name, const char *json) {
        checkpoint_replace(c, name, ST_U8, 1, strlen(json), 0, json);
}

static void marker_unknown_or_broken_is_refused(void **state) {
        static char long_marker[2000];
        static const struct {
                const char *json;
                int error;
                const char *name, *word;
        } markers[] = {
                {"{\"format\": \"mxfp8\"}", -EOPNOTSUPP, FAULT_NOT_SUPPORTED, "mxfp8"},
                {"{\"format\": \"convrot_w4a4\"}", -EOPNOTSUPP, FAULT_NOT_SUPPORTED, "convrot_w4a4"},
                {"{\"format\": \"asym_w4a8_int8\"}", -EOPNOTSUPP, FAULT_NOT_SUPPORTED, "asym_w4a8_int8"},
                {"{\"format\": \"awq_w4a16\"}", -EOPNOTSUPP, FAULT_NOT_SUPPORTED, "awq_w4a16"},
                {"{\"format\": \"w6a8\"}", -EOPNOTSUPP, FAULT_NOT_SUPPORTED, "w6a8"},
                {"{\"format\": \"int8_tensorwise\", \"zero_point\": 3}", -EOPNOTSUPP, FAULT_NOT_SUPPORTED,
                        "zero_point"},
                {"{\"format\": \"int8_tensorwise\", \"convrot\": true, \"convrot_groupsize\": 1024}",
                        -EOPNOTSUPP, FAULT_NOT_SUPPORTED, "1024"},
                {"{\"format\": \"int8_tensorwise\", \"convrot\": true, \"convrot_groupsize\": 32}", -EBADMSG,
                        FAULT_INVALID_FILE, "power of 4"},
                {"{\"format\": \"int8_tensorwise\", \"convrot\": true, \"convrot_groupsize\": -4}", -EBADMSG,
                        FAULT_INVALID_FILE, "power of 4"},
                {"{\"format\": \"int8_tensorwise\", \"convrot\": true, \"convrot_groupsize\": 1}", -EBADMSG,
                        FAULT_INVALID_FILE, "power of 4"},
                {"{\"format\": \"int8_tensorwise\", \"convrot\": \"yes\"}", -EBADMSG, FAULT_INVALID_FILE,
                        "convrot"},
                {"{\"format\": \"int8_tensorwise\", \"convrot\": true, \"convrot_groupsize\": \"64\"}",
                        -EBADMSG, FAULT_INVALID_FILE, "convrot_groupsize"},
                {"{\"format\": 8}", -EBADMSG, FAULT_INVALID_FILE, "format"},
                {"{}", -EBADMSG, FAULT_INVALID_FILE, "format"},
                {"[]", -EBADMSG, FAULT_INVALID_FILE, "JSON object"},
                {"{\"format\": \"int8_tensorwise\"", -EBADMSG, FAULT_INVALID_FILE, "JSON object"},
                {"{\"format\": \"nvfp4\", \"format\": \"int8_tensorwise\"}", -EBADMSG, FAULT_INVALID_FILE,
                        "JSON"},
                {"{\"format\": \"nvfp4\", \"convrot\": true}", -EBADMSG, FAULT_INVALID_FILE,
                        "other than int8"},
                {"{\"format\": \"nvfp4\"}", -EINVAL, FAULT_INVALID_MODEL, "is I8, expected U8 for nvfp4"},
                /* 256 does not divide 64 columns: the default, and said */
                {"{\"format\": \"int8_tensorwise\", \"convrot\": true}", -EINVAL, FAULT_INVALID_MODEL,
                        "64 columns, no multiple of its rotation groups of 256"},
                {long_marker, -EBADMSG, FAULT_INVALID_FILE, "1024 bytes"},
        };

        memset(long_marker, ' ', sizeof(long_marker) - 1);
        memcpy(long_marker, "{\"format\": \"int8_tensorwise\"}", 29);
        for (size_t i = 0; i < ELEMENTSOF(markers); i++) {
                CLEANUP(checkpoint_freep) Checkpoint *c = derived_checkpoint(INT8);

                set_marker(c, QKV ".comfy_quant", markers[i].json);
                refused(c, markers[i].error, markers[i].name, WORDS(QKV, markers[i].word));
        }
}

static void quantised_parts_missing_or_misshaped_are_listed(void **state) {
        CLEANUP(checkpoint_freep) Checkpoint *c = derived_checkpoint(INT8), *bare = derived_checkpoint(INT8);
        CLEANUP(checkpoint_freep) Checkpoint *orphan = checkpoint_new(), *norm = derived_checkpoint(INT8);

        checkpoint_drop(c, QKV ".weight_scale");
        checkpoint_replace(c, "blocks.1.mlp.fc1.weight_scale", ST_F32, 1, 191, 0, NULL);
        checkpoint_replace(c, "blocks.2.mlp.fc2.weight_scale", ST_BF16, 2, 64, 1, NULL);
        refused(c, -EINVAL, FAULT_INVALID_MODEL,
                WORDS("Missing (1): " QKV ".weight_scale", "Wrong shape (2)",
                        "blocks.1.mlp.fc1.weight_scale", "blocks.2.mlp.fc2.weight_scale"));
        checkpoint_drop(bare, QKV ".comfy_quant");
        refused(bare, -EOPNOTSUPP, FAULT_NOT_SUPPORTED, WORDS(QKV ".weight", QKV ".comfy_quant"));
        checkpoint_add(orphan, "blocks.0.mlp.fc1.weight_scale", ST_F32, 0, 0, 0, NULL);
        refused(orphan, -EINVAL, FAULT_INVALID_MODEL,
                WORDS("Not of this model (1): blocks.0.mlp.fc1.weight_scale"));
        checkpoint_replace(norm, "blocks.0.norm1.weight", ST_F8_E4M3, 1, 64, 0, NULL);
        refused(norm, -EOPNOTSUPP, FAULT_NOT_SUPPORTED, WORDS("blocks.0.norm1.weight is F8_E4M3"));
}

/* Turns fc2 of a block into fp8 with no marker, or nvfp4, of the same numbers as an f32 matrix. */
static const uint8_t *codes(uint64_t n, uint8_t *to) {
        for (uint64_t i = 0; i < n; i++)
                to[i] = (uint8_t) ((i * 37 + i / 7) % 0x60 | (i % 3 == 0 ? 0x80 : 0));
        return to;
}

static float e4m3(uint8_t u) {
        int exponent = u >> 3 & 15, fraction = u & 7;
        float f =
                exponent == 0 ? ldexpf((float) fraction, -9) : ldexpf((float) (8 + fraction), exponent - 10);

        return u & 0x80 ? -f : f;
}

/* To nearest, ties to even. */
static uint16_t bf16(float f) {
        uint32_t u;

        memcpy(&u, &f, sizeof(u));
        return (uint16_t) ((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

/* In f32 as it is, in bf16 as a file in bf16 would have it. */
static void fp8_and_nvfp4_steps_equal_their_expansion(void **state) {
        static const float lut[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
        static const float scale = 0.003f;
        uint8_t data[64 * 96], blocks[128 * 8];
        float plain[2][64 * 96];
        uint16_t rounded[64 * 96];

        (void) codes(sizeof(data), data);
        (void) codes(sizeof(blocks), blocks);
        for (uint64_t i = 0; i < sizeof(blocks); i++)
                blocks[i] &= 0x7f;
        for (uint64_t i = 0; i < 64 * 96; i++) {
                uint64_t r = i / 96, k = i % 96, c = k / 16;
                uint8_t nibble = k % 2 ? data[r * 48 + k / 2] & 15 : data[r * 48 + k / 2] >> 4;
                float block = scale * e4m3(blocks[c / 4 * 512 + r % 32 * 16 + r / 32 * 4 + c % 4]);

                plain[0][i] = e4m3(data[i]) * scale;
                plain[1][i] = (nibble & 8 ? -lut[nibble & 7] : lut[nibble & 7]) * block;
        }
        for (unsigned i = 0; i < 2; i++) {
                CLEANUP(checkpoint_freep) Checkpoint *q = checkpoint_new();
                CLEANUP_FREE uint8_t *q_bytes = NULL;
                CLEANUP(h3_model_freep) H3Model *a = NULL;

                checkpoint_drop(q, "blocks.1.mlp.fc2.weight");
                checkpoint_add(q, i ? "blocks.1.mlp.fc2.weight_scale_2" : "blocks.1.mlp.fc2.weight_scale",
                        ST_F32, 0, 0, 0, &scale);
                checkpoint_add(q, "blocks.1.mlp.fc2.input_scale", ST_F32, 0, 0, 0, &scale);
                checkpoint_add(
                        q, "blocks.1.mlp.fc2.weight", i ? ST_U8 : ST_F8_E4M3, 2, 64, i ? 48 : 96, data);
                if (i) {
                        checkpoint_add(q, "blocks.1.mlp.fc2.weight_scale", ST_F8_E4M3, 2, 128, 8, blocks);
                        checkpoint_add(q, "blocks.1.mlp.fc2.comfy_quant", ST_U8, 1, 19, 0,
                                "{\"format\": \"nvfp4\"}");
                }
                a = open_checkpoint(q, &q_bytes);
                assert_non_null(strstr(a->types, i ? "NVFP4" : "F8_E4M3"));
                for (unsigned compute = 0; compute < 2; compute++) {
                        CLEANUP(checkpoint_freep) Checkpoint *p = checkpoint_new();
                        CLEANUP_FREE uint8_t *p_bytes = NULL;
                        CLEANUP(h3_model_freep) H3Model *b = NULL;
                        GoldenStep x, y;

                        for (size_t j = 0; j < ELEMENTSOF(rounded); j++)
                                rounded[j] = bf16(plain[i][j]);
                        checkpoint_replace(p, "blocks.1.mlp.fc2.weight", compute ? ST_BF16 : ST_F32, 2, 64, 96,
                                compute ? (const void *) rounded : plain[i]);
                        b = open_checkpoint(p, &p_bytes);
                        step_run(a, compute ? H3_COMPUTE_BF16 : H3_COMPUTE_F32, &x);
                        step_run(b, compute ? H3_COMPUTE_BF16 : H3_COMPUTE_F32, &y);
                        assert_memory_equal(x.video, y.video, x.n_video * sizeof(float));
                        golden_step_done(&x);
                        golden_step_done(&y);
                }
                if (i) {
                        checkpoint_replace(q, "blocks.1.mlp.fc2.weight_scale", ST_F8_E4M3, 2, 64, 6, blocks);
                        checkpoint_drop(q, "blocks.1.mlp.fc2.weight_scale_2");
                        refused(q, -EINVAL, FAULT_INVALID_MODEL,
                                WORDS("F8_E4M3 [128, 8]", "Missing (1): blocks.1.mlp.fc2.weight_scale_2"));
                }
        }
}

static void support_is_answered_when_the_model_is_opened(void **state) {
        CLEANUP(checkpoint_freep) Checkpoint *c = derived_checkpoint(INT8);
        uint64_t size;
        CLEANUP_FREE uint8_t *bytes = checkpoint_write(c, &size);
        CLEANUP(h3_model_freep) H3Model *m = NULL;
        const LkOps *cpu = lk_cpu_ops(LK_CPU_AUTO);
        LkOps other = *cpu;
        Fault f = {};

        assert_int_equal(h3_model_open(&(H3File){"m.safetensors", bytes, size}, 1,
                                 &(H3ModelOptions){.ops = cpu}, &m, &f),
                0);
        assert_string_equal(m->support, "f32: native; bf16: native; int8: native in bf16, expanded in f32");
        assert_string_equal(m->types, "BF16, F32, I8 (rotated)");
        assert_int_equal(m->int8_cols, 1024);

        /* a conditioner's or a VAE's: no products in int8 */
        other.backend = "other";
        assert_int_equal(h3_model_support(&(H3Model){.matrix_types = 1u << LK_BF16 | 1u << LK_I8 | 1u << LK_NVFP4}, cpu, m->support,
                                 sizeof(m->support), &f),
                0);
        assert_string_equal(m->support, "bf16: native; int8: expanded; nvfp4: expanded");
        other.weights[LK_I8] = LK_REFUSED;
        refused_with(c, &(H3ModelOptions){.ops = &other}, -EOPNOTSUPP, FAULT_NOT_SUPPORTED,
                WORDS("int8", "the backend other"));
        other.weights[LK_I8] = LK_EXPANDED;
        assert_int_equal(h3_model_support(m, &other, m->support, sizeof(m->support), &f), 0);
        assert_non_null(strstr(m->support, "int8: expanded"));
        for (LkType t = LK_F32; t < LK_TYPE_MAX; t++)
                assert_true(cpu->weights[t] != LK_REFUSED);
}

static void partition_refuses_the_other_kind_of_request(void **state) {
        H3Model m = {};
        Fault f = {};

        assert_int_equal(h3_model_check_references(&m, true, &f), 0);
        assert_int_equal(h3_model_check_references(&m, false, &f), 0);
        m.partition = H3_PARTITION_FL2VA;
        assert_int_equal(h3_model_check_references(&m, false, &f), 0);
        assert_int_equal(h3_model_check_references(&m, true, &f), -EINVAL);
        assert_non_null(strstr(f.text, "ref2va model"));
        f = (Fault){};
        m.partition = H3_PARTITION_REF2VA;
        assert_int_equal(h3_model_check_references(&m, true, &f), 0);
        assert_int_equal(h3_model_check_references(&m, false, &f), -EINVAL);
        assert_string_equal(f.name, FAULT_INVALID_ARGUMENT);
}

/* V rows of half the length, as a trained model's differ: read in the right order nothing is said, in the
 * wrong one it is. Random weights say nothing in either order. */
static void probe_warns_of_the_wrong_order_only(void **state) {
        for (unsigned i = 0; i < 8; i++) {
                bool trained = i & 1, interleaved = i & 2, read_interleaved = i & 4;
                CLEANUP(checkpoint_freep)
                Checkpoint *c = checkpoint_of(interleaved ? golden_derived() : NULL,
                        interleaved ? "original.safetensors" : "dit/comfy.safetensors");
                CLEANUP_FREE uint16_t *changed = malloc(3 * 3072 * 64 * 2);
                CLEANUP(h3_model_freep) H3Model *m = NULL;
                CLEANUP_FREE uint8_t *bytes = NULL;
                uint64_t size;
                Fault f = {};

                for (unsigned layer = 0; layer < 3 && trained; layer++) {
                        uint16_t *to = changed + layer * 3072 * 64;
                        char name[100];

                        (void) snprintf(name, sizeof(name), "blocks.%u.attn.qkv_proj.weight", layer);
                        memcpy(to, checkpoint_data(c, name), 3072 * 64 * 2);
                        for (uint64_t r = 0; r < 3072; r++)
                                for (uint64_t k = 0; k < 64; k++)
                                        if ((interleaved ? r / 128 % 3 : r / 1024) == 2)
                                                to[r * 64 + k] = (uint16_t) (to[r * 64 + k] - 0x80);
                        checkpoint_replace(c, name, ST_BF16, 2, 3072, 64, to);
                }
                bytes = checkpoint_write(c, &size);
                assert_int_equal(h3_model_open(&(H3File){"m.safetensors", bytes, size}, 1,
                                         &(H3ModelOptions){.qkv_order = read_interleaved ? H3_QKV_INTERLEAVED
                                                                                         : H3_QKV_STACKED},
                                         &m, &f),
                        0);
                if (trained && interleaved != read_interleaved)
                        assert_non_null(
                                strstr(m->warning, interleaved ? "look interleaved" : "look stacked"));
                else
                        assert_string_equal(m->warning, "");
        }
}

static void damaged_quantised_files_never_crash(void **state) {
        CLEANUP(checkpoint_freep) Checkpoint *c = derived_checkpoint(INT8);
        uint64_t size, state64 = 7;
        CLEANUP_FREE uint8_t *bytes = checkpoint_write(c, &size);

        for (unsigned i = 0; i < 3000; i++) {
                uint64_t at;
                uint8_t before;
                H3Model *m = NULL;
                Fault f = {};

                state64 = state64 * 6364136223846793005u + 1442695040888963407u;
                at = (state64 >> 33) % 9000; /* the header */
                before = bytes[at];
                bytes[at] = (uint8_t) (state64 >> 20);
                if (h3_model_open(&(H3File){"m.safetensors", bytes, size}, 1, NULL, &m, &f) >= 0)
                        (void) h3_model_free(m);
                else
                        assert_true(f.text[0] != '\0');
                bytes[at] = before;
        }
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(step_pruned_f32_matches),
                cmocka_unit_test(step_pruned_bf16_matches),
                cmocka_unit_test(step_int8_f32_expands_weights),
                cmocka_unit_test(step_int8_bf16_matches),
                cmocka_unit_test(step_fp8_and_nvfp4_bf16_matches_f32),
                cmocka_unit_test(curve_other_names_same_bits),
                cmocka_unit_test(curve_takes_the_rows_beside_the_timestep),
                cmocka_unit_test(curve_any_rank_same_bits),
                cmocka_unit_test(curve_any_number_of_points_matches),
                cmocka_unit_test(curve_wrong_shapes_are_listed),
                cmocka_unit_test(int8_scales_of_any_shape_same_bits),
                cmocka_unit_test(int8_one_scale_is_every_rows_scale),
                cmocka_unit_test(int8_interleaved_rows_keep_their_scales),
                cmocka_unit_test(marker_unknown_or_broken_is_refused),
                cmocka_unit_test(quantised_parts_missing_or_misshaped_are_listed),
                cmocka_unit_test(fp8_and_nvfp4_steps_equal_their_expansion),
                cmocka_unit_test(support_is_answered_when_the_model_is_opened),
                cmocka_unit_test(partition_refuses_the_other_kind_of_request),
                cmocka_unit_test(probe_warns_of_the_wrong_order_only),
                cmocka_unit_test(damaged_quantised_files_never_crash),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
