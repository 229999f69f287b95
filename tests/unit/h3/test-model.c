/* SPDX-License-Identifier: Apache-2.0 */
#include "service/h3/model.h"

#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <cmocka.h>

#include "service/shared/cleanup.h"
#include "tests/unit/h3/checkpoint.h"
#include "tests/unit/h3/golden.h"

DEFINE_CLEANUP(H3Model *, h3_model_free)

static const char *derived(void) {
        const char *folder = getenv("LATENT_TEST_DERIVED");

        if (!folder)
                fail_msg("LATENT_TEST_DERIVED is not set; run the test through meson");
        return folder;
}

/* Opening must fail with this error, fault name and word(s) in its text, and must leave the output alone. */
static void refused_files(const H3File *files, size_t n, H3QkvOrder order, int error, const char *name,
        const char *const *words) {
        H3Model *m = NULL;
        Fault f = {};
        int r = h3_model_open(files, n, &(H3ModelOptions){.qkv_order = order}, &m, &f);

        if (r != error || strcmp(f.name, name) != 0)
                fail_msg("returned %d with %s: %s", r, f.name, f.text);
        for (; *words; words++)
                if (!strstr(f.text, *words))
                        fail_msg("no '%s' in: %s", *words, f.text);
        assert_null(m);
}

static void refused(const Checkpoint *c, int error, const char *name, const char *const *words) {
        uint64_t size;
        CLEANUP_FREE uint8_t *bytes = checkpoint_write(c, &size);

        refused_files(&(H3File){"m.safetensors", bytes, size}, 1, H3_QKV_AUTO, error, name, words);
}

#define WORDS(...) ((const char *const[]){__VA_ARGS__, NULL})

static void model_tiny_configuration_from_shapes(void **state) {
        CLEANUP(golden_model_freep) GoldenModel *g = golden_comfy();
        const H3Model *m = g->model;
        const H3Config *c = &m->config;

        assert_int_equal(c->layers, 3);
        assert_int_equal(c->refiner_layers, 2);
        assert_int_equal(c->hidden, 64);
        assert_int_equal(c->heads, 8);
        assert_int_equal(c->head_dim, 128);
        assert_int_equal(c->inner, 1024);
        assert_int_equal(c->ffn, 96);
        assert_int_equal(c->video_channels, 24);
        assert_int_equal(c->audio_channels, 32);
        assert_int_equal(c->patch_h, 2);
        assert_int_equal(c->patch_w, 2);
        assert_int_equal(c->text_dim, 160);
        assert_int_equal(c->time_freq_dim, 256);
        assert_int_equal(c->time_hidden, 96);
        assert_int_equal(c->time_dim, 32);
        assert_int_equal(c->rope_freqs, 16);
        assert_true(c->rope_inv_freq[0] == 1 && c->eps == 1e-5f);
        assert_string_equal(m->layout, "comfy");
        assert_string_equal(m->types, "BF16, F32");
        assert_int_equal(m->qkv_order, H3_QKV_STACKED);
        assert_int_equal(m->n_tensors, 65);
        assert_int_equal(m->weight_bytes, 3244736);
}

typedef struct Layout {
        const char *folder; /* NULL: the test data, else below the derived ones */
        const char *const *names;
        H3QkvOrder order, found;
        const char *layout;
} Layout;

#define SHARD "diffusers_sharded/diffusion_pytorch_model"

static const Layout layouts[] = {
        {NULL, WORDS("dit/comfy.safetensors"), H3_QKV_AUTO, H3_QKV_STACKED, "comfy"},
        {"", WORDS("original.safetensors"), H3_QKV_INTERLEAVED, H3_QKV_INTERLEAVED, "original"},
        {"", WORDS("diffusers/config.json", "diffusers/diffusion_pytorch_model.safetensors"), H3_QKV_AUTO,
                H3_QKV_SPLIT, "diffusers"},
        {"", WORDS("diffusers/diffusion_pytorch_model.safetensors"), H3_QKV_AUTO, H3_QKV_SPLIT, "diffusers"},
        {"",
                WORDS(SHARD "-00002-of-00002.safetensors", "diffusers_sharded/config.json",
                        SHARD "-00001-of-00002.safetensors", SHARD ".safetensors.index.json"),
                H3_QKV_AUTO, H3_QKV_SPLIT, "diffusers-sharded"},
        {"", WORDS(SHARD "-00001-of-00002.safetensors", SHARD "-00002-of-00002.safetensors"), H3_QKV_AUTO,
                H3_QKV_SPLIT, "diffusers-sharded"},
};

static GoldenModel *open_layout(const Layout *l) {
        return golden_model_open(l->folder ? derived() : NULL, l->names, l->order);
}

static void step_of(const H3Model *m, float **ret_video, float **ret_audio, GoldenCase **ret) {
        *ret = golden_case_open("case_t2va_tiny", &m->config);
        golden_step(m, *ret, H3_COMPUTE_BF16, (*ret)->video, (*ret)->audio, (*ret)->sigma_video,
                (*ret)->sigma_audio, NULL, ret_video, ret_audio);
}

static void model_all_layouts_give_the_same_bits(void **state) {
        CLEANUP(golden_model_freep) GoldenModel *first = open_layout(layouts);
        CLEANUP(golden_case_freep) GoldenCase *k = NULL;
        CLEANUP_FREE float *video = NULL, *audio = NULL;

        step_of(first->model, &video, &audio, &k);
        for (size_t i = 0; i < ELEMENTSOF(layouts); i++) {
                CLEANUP(golden_model_freep) GoldenModel *g = open_layout(layouts + i);
                CLEANUP(golden_case_freep) GoldenCase *again = NULL;
                CLEANUP_FREE float *v = NULL, *a = NULL;

                assert_string_equal(g->model->layout, layouts[i].layout);
                assert_int_equal(g->model->qkv_order, layouts[i].found);
                assert_memory_equal(&g->model->config, &first->model->config, sizeof(H3Config));
                step_of(g->model, &v, &a, &again);
                if (memcmp(video, v, k->n_video * sizeof(float)) != 0 ||
                        memcmp(audio, a, k->n_audio * sizeof(float)) != 0)
                        fail_msg("%s (%zu) gives other bits than comfy", layouts[i].layout, i);
        }
}

static void model_wrong_qkv_order_gives_another_picture(void **state) {
        CLEANUP(golden_model_freep) GoldenModel *right = open_layout(layouts), *wrong = NULL;
        CLEANUP(golden_case_freep) GoldenCase *k = NULL, *again = NULL;
        CLEANUP_FREE float *video = NULL, *audio = NULL, *v = NULL, *a = NULL;

        wrong = golden_model_open(derived(), WORDS("original.safetensors"), H3_QKV_AUTO);
        step_of(right->model, &video, &audio, &k);
        step_of(wrong->model, &v, &a, &again);
        assert_true(golden_distance(v, video, k->n_video, NULL) > 0.5);
}

static bool inside(const LkMatrix *m, const GoldenModel *g, const uint64_t *sizes) {
        const uint8_t *begin = m->data, *end;

        end = begin + (m->rows - 1) / m->block_rows * m->block_stride +
              (m->rows - 1) % m->block_rows * m->row_stride + m->cols * lk_type_size(m->type);
        for (size_t i = 0; i < g->n_bytes; i++)
                if (begin >= g->bytes[i] && end <= g->bytes[i] + sizes[i])
                        return true;
        return false;
}

static void model_views_stay_inside_the_files(void **state) {
        for (size_t i = 0; i < ELEMENTSOF(layouts); i++) {
                CLEANUP(golden_model_freep) GoldenModel *g = open_layout(layouts + i);
                uint64_t sizes[8];

                for (size_t j = 0; j < g->n_bytes; j++)
                        free(golden_read(
                                layouts[i].folder ? derived() : NULL, layouts[i].names[j], sizes + j));
                for (uint32_t j = 0; j < g->model->config.layers + g->model->config.refiner_layers; j++) {
                        const H3Block *b = j < g->model->config.layers
                                                   ? g->model->blocks + j
                                                   : g->model->refiner + (j - g->model->config.layers);
                        const LkMatrix *all[] = {&b->attn.q, &b->attn.k, &b->attn.v, &b->attn.out,
                                &b->mlp.gate, &b->mlp.up, &b->mlp.down, &b->adaln};

                        for (size_t n = 0; n < ELEMENTSOF(all); n++)
                                assert_true((n == 7 && j >= g->model->config.layers) ||
                                            inside(all[n], g, sizes));
                }
        }
}

static void model_official_index_means_interleaved(void **state) {
        uint64_t size;
        CLEANUP_FREE uint8_t *bytes = golden_read(derived(), "original.safetensors", &size);
        CLEANUP(checkpoint_freep) Checkpoint *c = checkpoint_new();
        CLEANUP(h3_model_freep) H3Model *m = NULL;
        CLEANUP_FREE char *index = NULL;
        size_t index_size;
        FILE *out = open_memstream(&index, &index_size);
        Fault f = {};

        (void) fprintf(out, "{\"weight_map\": {");
        for (size_t i = 0; i < c->n; i++)
                (void) fprintf(
                        out, "%s\"%s\": \"model-00001-of-00001.safetensors\"", i ? ", " : "", c->names[i]);
        (void) fprintf(out, "}}");
        (void) fclose(out);

        const H3File files[] = {{"model.safetensors.index.json", index, index_size},
                {"model-00001-of-00001.safetensors", bytes, size}};

        assert_int_equal(h3_model_open(files, 2, NULL, &m, &f), 0);
        assert_int_equal(m->qkv_order, H3_QKV_INTERLEAVED);
        assert_int_equal(m->blocks[0].attn.k.block_rows, 128);
        assert_string_equal(m->layout, "original");
}

static void model_without_inv_freq_recomputes_it(void **state) {
        CLEANUP(golden_model_freep) GoldenModel *g = golden_comfy();
        CLEANUP(checkpoint_freep) Checkpoint *c = checkpoint_new();
        CLEANUP(h3_model_freep) H3Model *m = NULL;
        CLEANUP_FREE uint8_t *bytes = NULL;
        uint64_t size;
        Fault f = {};

        checkpoint_drop(c, "rope.inv_freq");
        bytes = checkpoint_write(c, &size);
        assert_int_equal(h3_model_open(&(H3File){"m.safetensors", bytes, size}, 1, NULL, &m, &f), 0);
        assert_memory_equal(
                m->config.rope_inv_freq, g->model->config.rope_inv_freq, sizeof(m->config.rope_inv_freq));
}

static void model_bad_inv_freq_is_refused(void **state) {
        static const float nan_at_3[16] = {1, 1, 1, NAN, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
        static const struct {
                StType type;
                uint64_t n;
                const void *data;
        } bad[] = {{ST_F32, 16, nan_at_3}, {ST_F32, 16, NULL}, {ST_BF16, 16, NULL}, {ST_F32, 33, NULL},
                {ST_F32, 0, NULL}};

        for (size_t i = 0; i < ELEMENTSOF(bad); i++) {
                CLEANUP(checkpoint_freep) Checkpoint *c = checkpoint_new();

                checkpoint_drop(c, "rope.inv_freq");
                checkpoint_add(c, "rope.inv_freq", bad[i].type, 1, bad[i].n, 0, bad[i].data);
                refused(c, -EINVAL, FAULT_INVALID_MODEL, WORDS("rope.inv_freq", "m.safetensors"));
        }
}

static void model_f16_weights_are_taken(void **state) {
        CLEANUP(checkpoint_freep) Checkpoint *c = checkpoint_new();
        CLEANUP(h3_model_freep) H3Model *m = NULL;
        CLEANUP_FREE uint8_t *bytes = NULL;
        uint64_t size;
        Fault f = {};

        checkpoint_find(c, "final_layer.norm.weight")->type = ST_F16;
        bytes = checkpoint_write(c, &size);
        assert_int_equal(h3_model_open(&(H3File){"m.safetensors", bytes, size}, 1, NULL, &m, &f), 0);
        assert_int_equal(m->final_norm.type, LK_F16);
        assert_string_equal(m->types, "BF16, F16, F32");
}

static void model_missing_extra_and_misshaped_are_listed_together(void **state) {
        CLEANUP(checkpoint_freep) Checkpoint *c = checkpoint_new();
        StTensor *t;

        checkpoint_drop(c, "condition_proj.bias");
        checkpoint_drop(c, "blocks.1.mlp.fc2.weight");
        checkpoint_add(c, "blocks.0.attn.q_proj.weight", ST_BF16, 2, 2, 2, NULL);
        t = checkpoint_find(c, "blocks.2.attn.out_proj.weight");
        t->shape[0] = 1024, t->shape[1] = 64;
        checkpoint_drop(c, "token_refiner.blocks.1.norm1.weight");
        checkpoint_add(c, "token_refiner.blocks.1.norm1.weight", ST_BF16, 2, 64, 1, NULL);
        refused(c, -EINVAL, FAULT_INVALID_MODEL,
                WORDS("Missing (2)", "condition_proj.bias", "blocks.1.mlp.fc2.weight", "Wrong shape (2)",
                        "blocks.2.attn.out_proj.weight is [1024, 64], expected [64, 1024]",
                        "token_refiner.blocks.1.norm1.weight is [64, 1], expected [64]",
                        "Not of this model (1)", "blocks.0.attn.q_proj.weight"));
}

/* One entry of a header whose data only has to be there, not to be anything. */
static uint64_t full_entry(FILE *out, const char *name, bool f32, uint64_t a, uint64_t b, uint64_t at) {
        uint64_t end = at + a * (b ? b : 1) * (f32 ? 4 : 2);

        (void) fprintf(out, "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[%llu", at ? "," : "{", name,
                f32 ? "F32" : "BF16", (unsigned long long) a);
        if (b)
                (void) fprintf(out, ",%llu", (unsigned long long) b);
        (void) fprintf(
                out, "],\"data_offsets\":[%llu,%llu]}", (unsigned long long) at, (unsigned long long) end);
        return end;
}

typedef struct FullTensor {
        const char *name;
        bool f32;
        uint64_t a, b;
} FullTensor;

/* The published model's tensors (535 of them); rope.inv_freq comes first, so that its data follows the
 * header. */
static uint64_t full_header(FILE *out) {
        static const FullTensor ends[] = {{"rope.inv_freq", true, 16, 0},
                {"video_patch_proj.weight", true, 5376, 96}, {"video_patch_proj.bias", true, 5376, 0},
                {"audio_patch_proj.weight", true, 5376, 32}, {"audio_patch_proj.bias", true, 5376, 0},
                {"condition_proj.weight", false, 5376, 5120}, {"condition_proj.bias", false, 5376, 0},
                {"time_embedder.proj_in.weight", true, 5376, 256},
                {"time_embedder.proj_in.bias", true, 5376, 0},
                {"time_embedder.proj_out.weight", true, 2688, 5376},
                {"time_embedder.proj_out.bias", true, 2688, 0},
                {"token_refiner.final_norm.weight", false, 5376, 0},
                {"final_layer.norm.weight", false, 5376, 0},
                {"final_layer.adaln_proj.linear.weight", false, 10752, 2688},
                {"final_layer.adaln_proj.linear.bias", false, 10752, 0},
                {"final_layer.video_out.weight", true, 96, 5376},
                {"final_layer.video_out.bias", true, 96, 0},
                {"final_layer.audio_out.weight", true, 32, 5376},
                {"final_layer.audio_out.bias", true, 32, 0}};
        static const FullTensor block[] = {{"norm1.weight", false, 5376, 0},
                {"norm2.weight", false, 5376, 0}, {"attn.qkv_proj.weight", false, 21504, 5376},
                {"attn.q_norm.weight", false, 128, 0}, {"attn.k_norm.weight", false, 128, 0},
                {"attn.out_proj.weight", false, 5376, 7168}, {"mlp.fc1.weight", false, 28672, 5376},
                {"mlp.fc2.weight", false, 5376, 14336}, {"adaln_proj.linear.weight", false, 96768, 2688},
                {"adaln_proj.linear.bias", false, 96768, 0}};
        uint64_t at = 0;
        char name[96];

        for (size_t i = 0; i < ELEMENTSOF(ends); i++)
                at = full_entry(out, ends[i].name, ends[i].f32, ends[i].a, ends[i].b, at);
        for (unsigned layer = 0; layer < 52; layer++)
                for (size_t i = 0; i < ELEMENTSOF(block) - (layer < 2 ? 2 : 0); i++) {
                        (void) snprintf(name, sizeof(name), "%sblocks.%u.%s",
                                layer < 2 ? "token_refiner." : "", layer < 2 ? layer : layer - 2,
                                block[i].name);
                        at = full_entry(out, name, block[i].f32, block[i].a, block[i].b, at);
                }
        (void) fprintf(out, "}");
        return at;
}

static void model_full_size_opens_with_published_numbers(void **state) {
        CLEANUP(golden_model_freep) GoldenModel *tiny = golden_comfy();
        CLEANUP(h3_model_freep) H3Model *m = NULL;
        CLEANUP_FREE char *header = NULL;
        size_t header_size;
        FILE *out = open_memstream(&header, &header_size);
        uint64_t data = full_header(out), length, size;
        uint8_t *bytes;
        Fault f = {};

        (void) fclose(out);
        assert_int_equal(data, 66280430144ull);
        length = header_size;
        size = 8 + length + data;
        bytes = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (bytes == MAP_FAILED) /* a machine that does not promise memory: nothing to test here */
                skip();
        memcpy(bytes, &length, sizeof(length));
        memcpy(bytes + 8, header, header_size);
        memcpy(bytes + 8 + header_size, tiny->model->config.rope_inv_freq, 64);

        if (h3_model_open(&(H3File){"m.safetensors", bytes, size}, 1, NULL, &m, &f) < 0)
                fail_msg("%s", f.text);
        assert_int_equal(m->n_tensors, 535);
        assert_int_equal(m->weight_bytes, 66280430144ull);
        assert_int_equal(m->config.layers, 50);
        assert_int_equal(m->config.heads, 56);
        assert_int_equal(m->config.inner, 7168);
        assert_int_equal(m->config.ffn, 14336);
        (void) munmap(bytes, size);
}

static void model_every_tensor_is_needed(void **state) {
        CLEANUP(checkpoint_freep) Checkpoint *all = checkpoint_new();

        for (size_t i = 0; i < all->n; i++) {
                CLEANUP(checkpoint_freep) Checkpoint *c = checkpoint_new();

                if (strcmp(all->names[i], "rope.inv_freq") == 0)
                        continue;
                checkpoint_drop(c, all->names[i]);
                refused(c, -EINVAL, FAULT_INVALID_MODEL,
                        WORDS("Missing (1)", all->names[i], "Wrong shape (0)"));
        }
}

static void model_a_missing_block_is_listed(void **state) {
        CLEANUP(checkpoint_freep) Checkpoint *c = checkpoint_new();

        for (size_t i = c->n; i-- > 0;)
                if (strncmp(c->names[i], "blocks.1.", 9) == 0)
                        checkpoint_drop(c, c->names[i]);
        refused(c, -EINVAL, FAULT_INVALID_MODEL, WORDS("Missing (10)", "blocks.1.norm1.weight"));
}

static void model_hostile_names_and_sizes_are_refused(void **state) {
        static const char *const extra[] = {"blocks.4000000000.norm1.weight",
                "blocks.99999999999999999999999.norm1.weight", "blocks.01.norm1.weight",
                "blocks.-1.norm1.weight", "blocks.x", ""};

        for (size_t i = 0; i < ELEMENTSOF(extra); i++) {
                CLEANUP(checkpoint_freep) Checkpoint *c = checkpoint_new();

                checkpoint_add(c, extra[i], ST_BF16, 1, 64, 0, NULL);
                refused(c, -EINVAL, FAULT_INVALID_MODEL, WORDS("(1)", extra[i]));
        }
}

typedef struct Reshape {
        const char *name;
        uint64_t a, b;
        const char *word;
} Reshape;

static void model_impossible_sizes_are_refused(void **state) {
        static const Reshape reshapes[] = {
                {"video_patch_proj.weight", 0, 96, "video_patch_proj.weight is [0, 96]"},
                {"video_patch_proj.weight", 1u << 30, 0, "video_patch_proj.weight"},
                {"blocks.0.mlp.fc2.weight", 64, 0, "blocks.0.mlp.fc2.weight is [64, 0]"},
                {"blocks.0.mlp.fc2.weight", 0, 1ull << 40, "MLP size"},
                {"blocks.0.attn.qkv_proj.weight", 3000, 4, "no multiple of 384"},
                {"audio_patch_proj.weight", 64, 31, "audio"},
                {"video_patch_proj.weight", 64, 94, "no multiple of 4"},
                {"time_embedder.proj_in.weight", 96, 255, "even"},
        };

        for (size_t i = 0; i < ELEMENTSOF(reshapes); i++) {
                CLEANUP(checkpoint_freep) Checkpoint *c = checkpoint_new();
                StType type = checkpoint_find(c, reshapes[i].name)->type;
                CLEANUP_FREE void *data = calloc(1, 1u << 20);

                checkpoint_drop(c, reshapes[i].name);
                checkpoint_add(c, reshapes[i].name, type, 2, reshapes[i].a, reshapes[i].b, data);
                refused(c, -EINVAL, FAULT_INVALID_MODEL, WORDS(reshapes[i].word));
        }
}

static void model_head_size_must_suit_rope_and_attention(void **state) {
        static const uint64_t sizes[] = {64, 132, 264};

        for (size_t i = 0; i < ELEMENTSOF(sizes); i++) {
                CLEANUP(checkpoint_freep) Checkpoint *c = checkpoint_new();

                checkpoint_drop(c, "blocks.0.attn.q_norm.weight");
                checkpoint_add(c, "blocks.0.attn.q_norm.weight", ST_BF16, 1, sizes[i], 0, NULL);
                refused(c, -EINVAL, FAULT_INVALID_MODEL, WORDS("q_norm", "head size"));
        }
}

static void model_later_formats_are_not_supported(void **state) {
        static const struct {
                const char *name, *word;
        } later[] = {
                {"control_proj_in.weight", "ControlNet"},
                {"control_blocks.0.after_proj.weight", "ControlNet"},
                {"control_blocks.4.attn.qkv_proj.weight", "ControlNet"},
                {"blocks.0.mlp.fc1.weight.quant_state.bitsandbytes__nf4", "NF4"},
                {"blocks.0.mlp.fc1.weight.quant_state.bitsandbytes__fp4", "FP4"},
                {"diffusion_model.blocks.0.attn.qkv_proj.lora_A.weight", "LoRA"},
        };

        for (size_t i = 0; i < ELEMENTSOF(later); i++) {
                CLEANUP(checkpoint_freep) Checkpoint *c = checkpoint_new();

                checkpoint_add(c, later[i].name, ST_F32, 1, 4, 0, NULL);
                refused(c, -EOPNOTSUPP, FAULT_NOT_SUPPORTED,
                        WORDS("m.safetensors", later[i].name, later[i].word));
        }
}

/* Heads of 32 times the rows, in original names and in diffusers'. */
static void model_head_bank_is_not_supported(void **state) {
        static const struct {
                const char *name, *diffusers, *in, *in_diffusers;
                uint64_t rows;
        } heads[] = {{"final_layer.video_out.weight", "proj_out.weight", "video_patch_proj.weight",
                             "proj_in.weight", 96},
                {"final_layer.audio_out.weight", "audio_proj_out.weight", "audio_patch_proj.weight",
                        "audio_proj_in.weight", 32}};
        CLEANUP_FREE float *bank = calloc(32 * 96 * 64, sizeof(float));

        for (size_t i = 0; i < ELEMENTSOF(heads); i++) {
                CLEANUP(checkpoint_freep) Checkpoint *c = checkpoint_new(), *d = checkpoint_new();

                checkpoint_replace(c, heads[i].name, ST_F32, 2, 32 * heads[i].rows, 64, bank);
                refused(c, -EOPNOTSUPP, FAULT_NOT_SUPPORTED,
                        WORDS("m.safetensors", heads[i].name, "bank of 32 output heads"));
                checkpoint_replace(d, heads[i].name, ST_F32, 2, 32 * heads[i].rows, 64, bank);
                checkpoint_rename(d, heads[i].name, heads[i].diffusers);
                checkpoint_rename(d, heads[i].in, heads[i].in_diffusers);
                refused(d, -EOPNOTSUPP, FAULT_NOT_SUPPORTED, WORDS(heads[i].diffusers, "bank of 32"));
        }
}

static void model_gguf_is_refused_by_name(void **state) {
        static const uint8_t gguf[64] = "GGUF\3";

        refused_files(&(H3File){"m.safetensors", gguf, sizeof(gguf)}, 1, H3_QKV_AUTO, -EBADMSG,
                FAULT_INVALID_FILE, WORDS("m.safetensors", "GGUF"));
}

/* fp8 with scales per group and no marker */
static void model_mxfp8_is_refused_by_name(void **state) {
        CLEANUP(checkpoint_freep) Checkpoint *c = checkpoint_new();

        checkpoint_replace(c, "blocks.1.mlp.fc2.weight", ST_F8_E4M3, 2, 64, 96, NULL);
        checkpoint_add(c, "blocks.1.mlp.fc2.weight_scale", ST_F8_E8M0, 2, 64, 3, NULL);
        refused(c, -EOPNOTSUPP, FAULT_NOT_SUPPORTED, WORDS("blocks.1.mlp.fc2.weight", "mxfp8"));
}

static void model_other_types_are_refused_by_name(void **state) {
        static const struct {
                StType type;
                int error;
                const char *fault;
        } types[] = {{ST_I8, -EOPNOTSUPP, FAULT_NOT_SUPPORTED},
                {ST_F8_E8M0, -EOPNOTSUPP, FAULT_NOT_SUPPORTED}, {ST_U8, -EOPNOTSUPP, FAULT_NOT_SUPPORTED},
                {ST_F64, -EINVAL, FAULT_INVALID_MODEL}, {ST_I64, -EINVAL, FAULT_INVALID_MODEL}};
        CLEANUP_FREE void *data = calloc(96 * 64, 8);

        for (size_t i = 0; i < ELEMENTSOF(types); i++) {
                CLEANUP(checkpoint_freep) Checkpoint *c = checkpoint_new();

                checkpoint_drop(c, "blocks.1.mlp.fc2.weight");
                checkpoint_add(c, "blocks.1.mlp.fc2.weight", types[i].type, 2, 64, 96, data);
                refused(c, types[i].error, types[i].fault,
                        WORDS("blocks.1.mlp.fc2.weight", st_type_name(types[i].type)));
        }
}

static void model_of_nothing_or_something_else_is_refused(void **state) {
        CLEANUP(checkpoint_freep) Checkpoint *other = checkpoint_empty(), *mixed = checkpoint_new();
        const H3File garbage = {"m.safetensors", "<!DOCTYPE html><html>not found</html>", 37};
        const H3File text = {"README.md", "hello", 5}, twice[] = {garbage, garbage};
        const H3File empty = {"m.safetensors", "", 0};

        refused_files(NULL, 0, H3_QKV_AUTO, -EINVAL, FAULT_INVALID_MODEL, WORDS("No *.safetensors"));
        refused_files(&text, 1, H3_QKV_AUTO, -EINVAL, FAULT_INVALID_MODEL, WORDS("No *.safetensors"));
        refused_files(&garbage, 1, H3_QKV_AUTO, -EBADMSG, FAULT_INVALID_FILE, WORDS("m.safetensors"));
        refused_files(&empty, 1, H3_QKV_AUTO, -EBADMSG, FAULT_INVALID_FILE, WORDS("m.safetensors"));
        refused_files(twice, 2, H3_QKV_AUTO, -EINVAL, FAULT_INVALID_MODEL, WORDS("twice"));

        checkpoint_add(other, "model.layers.0.weight", ST_BF16, 2, 4, 4, NULL);
        refused(other, -EINVAL, FAULT_INVALID_MODEL, WORDS("neither"));
        checkpoint_add(mixed, "transformer_blocks.0.norm1.weight", ST_BF16, 1, 64, 0, NULL);
        refused(mixed, -EINVAL, FAULT_INVALID_MODEL, WORDS("one of the two"));
}

static void model_truncated_anywhere_is_refused(void **state) {
        uint64_t size;
        CLEANUP_FREE uint8_t *bytes = golden_read(NULL, "dit/comfy.safetensors", &size);

        for (uint64_t n = 0; n < size; n += 1 + n / 3) {
                CLEANUP_FREE uint8_t *part =
                        malloc(n ? n : 1); /* of its own size, so that a sanitizer sees one byte too far */

                memcpy(part, bytes, n);
                refused_files(&(H3File){"m.safetensors", part, n}, 1, H3_QKV_AUTO, -EBADMSG,
                        FAULT_INVALID_FILE, WORDS("m.safetensors"));
        }
}

static void model_damaged_headers_never_crash(void **state) {
        uint64_t size, seed = 88172645463325252ULL;
        CLEANUP_FREE uint8_t *bytes = golden_read(NULL, "dit/comfy.safetensors", &size);

        for (int i = 0; i < 400; i++) {
                CLEANUP(h3_model_freep) H3Model *m = NULL;
                CLEANUP_FREE uint8_t *copy = malloc(size);
                Fault f = {};

                memcpy(copy, bytes, size);
                for (int j = 0; j < 3; j++) {
                        seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
                        copy[8 + seed % 6240] = "0123456789,:[]{}\"abn"[seed >> 40 & 15];
                }
                if (h3_model_open(&(H3File){"m.safetensors", copy, size}, 1, NULL, &m, &f) < 0)
                        assert_true(f.name[0] && f.text[0] && !m);
        }
}

static void model_order_of_split_matrices_cannot_be_asked_for(void **state) {
        uint64_t size;
        CLEANUP_FREE uint8_t *bytes =
                golden_read(derived(), "diffusers/diffusion_pytorch_model.safetensors", &size);
        const H3File file = {"m.safetensors", bytes, size};

        refused_files(&file, 1, H3_QKV_STACKED, -EINVAL, FAULT_INVALID_ARGUMENT, WORDS("auto"));
        refused_files(&file, 1, H3_QKV_INTERLEAVED, -EINVAL, FAULT_INVALID_ARGUMENT, WORDS("auto"));
        refused_files(&file, 1, H3_QKV_SPLIT, -EINVAL, FAULT_INVALID_ARGUMENT, WORDS("stacked"));
}

static void config_refused(const char *json, int error, const char *fault, const char *const *words) {
        uint64_t size;
        CLEANUP_FREE uint8_t *bytes = golden_read(NULL, "dit/comfy.safetensors", &size);
        const H3File files[] = {{"m.safetensors", bytes, size}, {"config.json", json, strlen(json)}};

        refused_files(files, 2, H3_QKV_AUTO, error, fault, words);
}

static void config_disagreement_names_key_and_both_values(void **state) {
        static const struct {
                const char *json, *key, *said, *is;
        } wrong[] = {
                {"{\"num_layers\": 4}", "num_layers", "4", "3"},
                {"{\"num_refiner_layers\": 1}", "num_refiner_layers", "1", "2"},
                {"{\"num_attention_heads\": 56}", "num_attention_heads", "56", "8"},
                {"{\"attention_head_dim\": 64}", "attention_head_dim", "64", "128"},
                {"{\"hidden_size\": 5376}", "hidden_size", "5376", "64"},
                {"{\"ffn_dim\": 14336}", "ffn_dim", "14336", "96"},
                {"{\"in_channels\": 16}", "in_channels", "16", "24"},
                {"{\"audio_in_channels\": 8}", "audio_in_channels", "8", "32"},
                {"{\"patch_size\": [1, 2, 4]}", "patch_size", "4", "2"},
                {"{\"text_dim\": 5120}", "text_dim", "5120", "160"},
                {"{\"freq_dim\": 128}", "freq_dim", "128", "256"},
                {"{\"time_embed_hidden_dim\": 1}", "time_embed_hidden_dim", "1", "96"},
                {"{\"time_embed_dim\": 2688}", "time_embed_dim", "2688", "32"},
                {"{\"rope_freq_dim\": 8}", "rope_freq_dim", "8", "16"},
                {"{\"rope_theta\": 5000000}", "rope_theta", "5000000", "10000"},
                {"{\"norm_eps\": 1e-6}", "norm_eps", "1e-06", "1e-05"},
                {"{\"qk_norm_eps\": 1e-6}", "qk_norm_eps", "1e-06", "1e-05"},
                {"{\"final_norm_eps\": 1e-6}", "final_norm_eps", "1e-06", "1e-05"},
                {"{\"_class_name\": \"Other\"}", "_class_name", "Other", "MiniMaxH3Transformer3DModel"},
                {"{\"num_layers\": \"3\"}", "num_layers", "not a number", "3"},
                {"{\"patch_size\": 2}", "patch_size", "list", "[1, 2, 2]"},
        };

        for (size_t i = 0; i < ELEMENTSOF(wrong); i++)
                config_refused(wrong[i].json, -EINVAL, FAULT_INVALID_MODEL,
                        WORDS(wrong[i].key, wrong[i].said, wrong[i].is));
}

static void config_malformed_is_refused(void **state) {
        config_refused("{\"num_layers\": ", -EBADMSG, FAULT_INVALID_FILE, WORDS("config.json"));
        config_refused("[3]", -EBADMSG, FAULT_INVALID_FILE, WORDS("config.json"));
        config_refused("{\"num_layers\": 3, \"num_layers\": 4}", -EBADMSG, FAULT_INVALID_FILE,
                WORDS("config.json"));
        config_refused("", -EBADMSG, FAULT_INVALID_FILE, WORDS("config.json"));
}

/* Two shards of the tiny model and an index that says final_layer.norm is in the second. */
typedef struct Shards {
        Checkpoint *a, *b;
        uint8_t *bytes[2];
        char *index;
        H3File files[3];
} Shards;

#define SHARED_NAME "final_layer.norm.weight"

static void shards_free(Shards *s) {
        (void) checkpoint_free(s->b);
        (void) checkpoint_free(s->a);
        free(s->bytes[0]);
        free(s->bytes[1]);
        free(s->index);
}

/* copy_in_first: a second, different tensor of that name in the first shard. */
static void shards_make(Shards *s, bool copy_in_first) {
        size_t index_size;
        FILE *out = open_memstream(&s->index, &index_size);

        s->a = checkpoint_new();
        s->b = checkpoint_empty();
        checkpoint_move(s->a, SHARED_NAME, s->b);
        checkpoint_move(s->a, "blocks.1.mlp.fc2.weight", s->b);

        (void) fprintf(out, "{\"metadata\": {\"total_size\": 1}, \"weight_map\": {");
        for (size_t i = 0; i < s->a->n; i++)
                (void) fprintf(out, "\"%s\": \"1.safetensors\", ", s->a->names[i]);
        (void) fprintf(out, "\"%s\": \"2.safetensors\", \"%s\": \"2.safetensors\"}}", s->b->names[0],
                s->b->names[1]);
        (void) fclose(out);
        if (copy_in_first)
                checkpoint_add(s->a, SHARED_NAME, ST_BF16, 1, 64, 0, NULL);

        s->files[0] = (H3File){.name = "1.safetensors"};
        s->files[1] = (H3File){.name = "2.safetensors"};
        s->files[0].bytes = s->bytes[0] = checkpoint_write(s->a, &s->files[0].size);
        s->files[1].bytes = s->bytes[1] = checkpoint_write(s->b, &s->files[1].size);
        s->files[2] = (H3File){"x.safetensors.index.json", s->index, index_size};
}

static void index_decides_which_of_two_copies_counts(void **state) {
        CLEANUP(shards_free) Shards s = {};
        CLEANUP(h3_model_freep) H3Model *m = NULL;
        const uint8_t *norm;
        Fault f = {};

        shards_make(&s, true);
        if (h3_model_open(s.files, 3, &(H3ModelOptions){.qkv_order = H3_QKV_STACKED}, &m, &f) < 0)
                fail_msg("%s", f.text);
        norm = m->final_norm.data;
        assert_true(norm >= s.bytes[1] && norm < s.bytes[1] + s.files[1].size);
        assert_string_equal(m->layout, "comfy-sharded");
        assert_int_equal(m->n_tensors, 65);
        assert_int_equal(m->weight_bytes, 3244736);
}

static void shards_without_index_must_be_disjoint(void **state) {
        CLEANUP(shards_free) Shards s = {}, twice = {};
        CLEANUP(h3_model_freep) H3Model *m = NULL;
        Fault f = {};

        shards_make(&s, false);
        assert_int_equal(h3_model_open(s.files, 2, NULL, &m, &f), 0);
        shards_make(&twice, true);
        refused_files(twice.files, 2, H3_QKV_AUTO, -EINVAL, FAULT_INVALID_MODEL,
                WORDS(SHARED_NAME, "1.safetensors", "2.safetensors", "index"));
}

static void index_absent_shard_is_listed(void **state) {
        CLEANUP(shards_free) Shards s = {};
        const char *nothing = "{\"weight_map\": {\"a\": \"7.safetensors\", \"b\": \"8.safetensors\"}}";

        shards_make(&s, false);
        refused_files((const H3File[]){s.files[0], s.files[2]}, 2, H3_QKV_AUTO, -EINVAL, FAULT_INVALID_MODEL,
                WORDS("x.safetensors.index.json", "1 of its 2 files", "2.safetensors"));
        refused_files((const H3File[]){s.files[0], s.files[1], {"i.index.json", nothing, strlen(nothing)}},
                3, H3_QKV_AUTO, -EINVAL, FAULT_INVALID_MODEL,
                WORDS("2 of its 2 files", "7.safetensors", "8.safetensors"));
}

static void index_naming_a_tensor_that_is_not_there_is_refused(void **state) {
        CLEANUP(shards_free) Shards s = {};
        const char *lies = "{\"weight_map\": {\"blocks.9.norm1.weight\": \"1.safetensors\"}}";

        shards_make(&s, false);
        refused_files((const H3File[]){s.files[0], {"i.index.json", lies, strlen(lies)}}, 2, H3_QKV_AUTO,
                -EINVAL, FAULT_INVALID_MODEL,
                WORDS("i.index.json", "blocks.9.norm1.weight", "1.safetensors"));
        refused_files((const H3File[]){s.files[0], s.files[2], {"y.index.json", lies, strlen(lies)}}, 3,
                H3_QKV_AUTO, -EINVAL, FAULT_INVALID_MODEL,
                WORDS("x.safetensors.index.json", "y.index.json"));
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(model_tiny_configuration_from_shapes),
                cmocka_unit_test(model_all_layouts_give_the_same_bits),
                cmocka_unit_test(model_wrong_qkv_order_gives_another_picture),
                cmocka_unit_test(model_views_stay_inside_the_files),
                cmocka_unit_test(model_official_index_means_interleaved),
                cmocka_unit_test(model_without_inv_freq_recomputes_it),
                cmocka_unit_test(model_bad_inv_freq_is_refused),
                cmocka_unit_test(model_f16_weights_are_taken),
                cmocka_unit_test(model_missing_extra_and_misshaped_are_listed_together),
                cmocka_unit_test(model_full_size_opens_with_published_numbers),
                cmocka_unit_test(model_every_tensor_is_needed),
                cmocka_unit_test(model_a_missing_block_is_listed),
                cmocka_unit_test(model_hostile_names_and_sizes_are_refused),
                cmocka_unit_test(model_impossible_sizes_are_refused),
                cmocka_unit_test(model_head_size_must_suit_rope_and_attention),
                cmocka_unit_test(model_later_formats_are_not_supported),
                cmocka_unit_test(model_head_bank_is_not_supported),
                cmocka_unit_test(model_gguf_is_refused_by_name),
                cmocka_unit_test(model_mxfp8_is_refused_by_name),
                cmocka_unit_test(model_other_types_are_refused_by_name),
                cmocka_unit_test(model_of_nothing_or_something_else_is_refused),
                cmocka_unit_test(model_truncated_anywhere_is_refused),
                cmocka_unit_test(model_damaged_headers_never_crash),
                cmocka_unit_test(model_order_of_split_matrices_cannot_be_asked_for),
                cmocka_unit_test(config_disagreement_names_key_and_both_values),
                cmocka_unit_test(config_malformed_is_refused),
                cmocka_unit_test(index_decides_which_of_two_copies_counts),
                cmocka_unit_test(shards_without_index_must_be_disjoint),
                cmocka_unit_test(index_absent_shard_is_listed),
                cmocka_unit_test(index_naming_a_tensor_that_is_not_there_is_refused),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
