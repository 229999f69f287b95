/* SPDX-License-Identifier: Apache-2.0 */
/* Conditioner checkpoints: names, sizes, which layers run, config.json, and what is refused. */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "service/shared/cleanup.h"
#include "tests/unit/h3/checkpoint.h"
#include "tests/unit/h3/text-case.h"

#define COMFY "text/encoder/model.comfy.safetensors"
#define WORDS(...) ((const char *const[]){__VA_ARGS__, NULL})

DEFINE_CLEANUP(H3TextModel *, h3_text_free)

static Checkpoint *comfy(void) {
        return checkpoint_of(NULL, COMFY);
}

static char *config_text(void) {
        uint64_t size;

        return (char *) golden_read(NULL, "text/encoder/config.json", &size);
}

/* config: NULL: none. */
static int open_one(
        const Checkpoint *c, const char *config, uint8_t **ret_bytes, H3TextModel **ret, Fault *f) {
        uint64_t size;
        uint8_t *bytes = checkpoint_write(c, &size);
        const H3File files[] = {
                {"model.safetensors", bytes, size}, {"config.json", config, config ? strlen(config) : 0}};
        int r;

        r = h3_text_open(files, config ? 2 : 1, NULL, ret, f);
        if (r < 0)
                free(bytes);
        else
                *ret_bytes = bytes;
        return r;
}

static void refused(
        const Checkpoint *c, const char *config, int error, const char *name, const char *const *words) {
        H3TextModel *m = NULL;
        uint8_t *bytes = NULL;
        Fault f = {};

        assert_int_equal(open_one(c, config, &bytes, &m, &f), error);
        assert_null(m);
        assert_string_equal(f.name, name);
        for (; *words; words++)
                if (!strstr(f.text, *words))
                        fail_msg("\"%s\" is not in: %s", *words, f.text);
}

/* The first `what` of s, replaced. */
static char *replaced(const char *s, const char *what, const char *by) {
        const char *at = strstr(s, what);
        char *text = malloc(strlen(s) + strlen(by) + 1);

        assert_non_null(at);
        assert_non_null(text);
        (void) sprintf(text, "%.*s%s%s", (int) (at - s), s, by, at + strlen(what));
        return text;
}

static void open_tiny_has_its_sizes(void **state) {
        CLEANUP(text_model_files_freep) TextModelFiles *t = text_model_files_open("model.comfy.safetensors");
        const H3TextConfig *c = &t->model->config;

        assert_string_equal(t->model->layout, "comfy");
        assert_string_equal(t->model->types, "BF16");
        assert_int_equal(c->layers, 4);
        assert_int_equal(c->file_layers, 4);
        assert_int_equal(c->hidden, 32);
        assert_int_equal(c->heads, 4);
        assert_int_equal(c->kv_heads, 2);
        assert_int_equal(c->head_dim, 128);
        assert_int_equal(c->ffn, 48);
        assert_int_equal(c->vocab, 160);
        assert_int_equal(c->sections[0], 24);
        assert_int_equal(c->sections[1], 20);
        assert_int_equal(c->sections[2], 20);
        assert_true(c->eps == 1e-6f && c->theta == 5e6f);
        assert_int_equal(c->vision.depth, 4);
        assert_int_equal(c->vision.hidden, 24);
        assert_int_equal(c->vision.heads, 2);
        assert_int_equal(c->vision.head_dim, 12);
        assert_int_equal(c->vision.ffn, 56);
        assert_int_equal(c->vision.merged, 96);
        assert_int_equal(c->vision.patch, 1536);
        assert_int_equal(c->vision.grid, 48);
        assert_int_equal(c->vision.n_deepstack, 3);
        for (uint32_t i = 0; i < 3; i++)
                assert_int_equal(c->vision.deepstack[i], i);
}

/* As the published folder has it: other names, layers behind the last that runs, final norm, head. */
static Checkpoint *published(void) {
        Checkpoint *c = comfy();
        char from[160], to[160];
        size_t n = c->n;

        for (size_t i = 0; i < n; i++) {
                const char *name = c->names[i];

                (void) snprintf(from, sizeof(from), "%s", name);
                if (strncmp(from, "model.", 6) == 0)
                        (void) snprintf(to, sizeof(to), "model.language_model.%.100s", from + 6);
                else
                        (void) snprintf(to, sizeof(to), "model.%.100s", from);
                checkpoint_rename(c, from, to);
        }
        checkpoint_add(c, "lm_head.weight", ST_BF16, 2, 160, 32, NULL);
        checkpoint_add(c, "model.language_model.norm.weight", ST_BF16, 1, 32, 0, NULL);
        checkpoint_add(c, "model.language_model.layers.5.mlp.down_proj.weight", ST_BF16, 2, 32, 48, NULL);
        return c;
}

static void open_published_names_same_bits(void **state) {
        CLEANUP(text_model_files_freep) TextModelFiles *t = text_model_files_open("model.comfy.safetensors");
        CLEANUP(text_case_freep) TextCase *k = text_case_open("image_video");
        CLEANUP(checkpoint_freep) Checkpoint *c = published();
        CLEANUP_FREE char *config = config_text();
        CLEANUP_FREE float *x = text_case_run(t->model, &k->input, NULL), *y = NULL;
        CLEANUP_FREE uint8_t *bytes = NULL;
        CLEANUP(h3_text_freep) H3TextModel *m = NULL;
        Fault f = {};

        if (open_one(c, config, &bytes, &m, &f) < 0)
                fail_msg("%s", f.text);
        assert_string_equal(m->layout, "published");
        assert_int_equal(m->config.layers, 4);
        assert_int_equal(m->config.file_layers, 6);
        assert_int_equal(m->weight_bytes, t->model->weight_bytes);
        y = text_case_run(m, &k->input, NULL);
        assert_memory_equal(x, y, k->input.n * 32 * sizeof(float));
}

static void open_shards_same_bits(void **state) {
        CLEANUP(text_model_files_freep) TextModelFiles *t = text_model_files_open("model.comfy.safetensors");
        CLEANUP(text_case_freep) TextCase *k = text_case_open("one_image");
        CLEANUP(checkpoint_freep) Checkpoint *c = comfy(), *second = checkpoint_empty();
        CLEANUP_FREE char *config = config_text();
        CLEANUP_FREE float *x = text_case_run(t->model, &k->input, NULL), *y = NULL;
        CLEANUP_FREE uint8_t *a = NULL, *b = NULL;
        CLEANUP(h3_text_freep) H3TextModel *m = NULL;
        H3File files[3];
        Fault f = {};

        for (size_t i = c->n; i-- > 0;)
                if (strncmp(c->names[i], "visual.", 7) == 0)
                        checkpoint_move(c, c->names[i], second);
        files[0].name = "model-00001-of-00002.safetensors";
        files[0].bytes = a = checkpoint_write(c, &files[0].size);
        files[1].name = "model-00002-of-00002.safetensors";
        files[1].bytes = b = checkpoint_write(second, &files[1].size);
        files[2] = (H3File){"config.json", config, strlen(config)};
        if (h3_text_open(files, 3, NULL, &m, &f) < 0)
                fail_msg("%s", f.text);
        assert_string_equal(m->layout, "comfy-sharded");
        y = text_case_run(m, &k->input, NULL);
        assert_memory_equal(x, y, k->input.n * 32 * sizeof(float));
}

/* latentd_run_layers; all of a single file; of a folder nothing but the released 64 says how many. */
static void open_runs_as_many_layers_as_it_should(void **state) {
        CLEANUP(checkpoint_freep) Checkpoint *c = comfy(), *p = published();
        CLEANUP_FREE char *config = config_text(), *three = replaced(config, "\"latentd_run_layers\": 4",
                                                           "\"latentd_run_layers\": 3");
        CLEANUP_FREE char *silent = replaced(config, "\"latentd_run_layers\": 4", "\"nothing\": 4");
        CLEANUP_FREE char *seven =
                replaced(config, "\"latentd_run_layers\": 4", "\"latentd_run_layers\": 7");
        struct {
                const Checkpoint *c;
                const char *config;
                uint32_t layers;
        } cases[] = {{c, config, 4}, {c, silent, 4}, {p, config, 4}, {p, three, 3}};

        for (size_t i = 0; i < ELEMENTSOF(cases); i++) {
                CLEANUP_FREE uint8_t *bytes = NULL;
                CLEANUP(h3_text_freep) H3TextModel *m = NULL;
                Fault f = {};

                if (open_one(cases[i].c, cases[i].config, &bytes, &m, &f) < 0)
                        fail_msg("%s", f.text);
                assert_int_equal(m->config.layers, cases[i].layers);
        }
        refused(p, silent, -EINVAL, FAULT_INVALID_MODEL, WORDS("latentd_run_layers"));
        refused(p, seven, -EINVAL, FAULT_INVALID_MODEL, WORDS("latentd_run_layers = 7", "6 layers"));
}

static void open_without_config_needs_the_released_sizes(void **state) {
        CLEANUP(checkpoint_freep) Checkpoint *c = comfy();
        CLEANUP_FREE char *config = config_text();
        CLEANUP_FREE char *no_deepstack = replaced(config, "deepstack_visual_indexes", "other");

        refused(c, NULL, -EINVAL, FAULT_INVALID_MODEL, WORDS("vision_config.num_heads", "config.json"));
        refused(c, no_deepstack, -EINVAL, FAULT_INVALID_MODEL, WORDS("deepstack_visual_indexes"));
}

static void open_config_that_disagrees_is_refused(void **state) {
        static const struct {
                const char *is, *said, *word;
                int error;
        } cases[] = {
                {"\"hidden_size\": 32", "\"hidden_size\": 33", "text_config.hidden_size = 33", -EINVAL},
                {"\"num_attention_heads\": 4", "\"num_attention_heads\": 8", "num_attention_heads = 8",
                        -EINVAL},
                {"\"num_key_value_heads\": 2", "\"num_key_value_heads\": 4", "num_key_value_heads = 4",
                        -EINVAL},
                {"\"head_dim\": 128", "\"head_dim\": 64", "head_dim = 64", -EINVAL},
                {"\"intermediate_size\": 48", "\"intermediate_size\": 64", "intermediate_size = 64",
                        -EINVAL},
                {"\"num_hidden_layers\": 6", "\"num_hidden_layers\": 3", "num_hidden_layers = 3", -EINVAL},
                {"\"vocab_size\": 160", "\"vocab_size\": 161", "vocab_size = 161", -EINVAL},
                {"\"depth\": 4", "\"depth\": 5", "vision_config.depth = 5", -EINVAL},
                {"\"hidden_size\": 24", "\"hidden_size\": 28", "vision_config.hidden_size = 28", -EINVAL},
                {"\"num_heads\": 2", "\"num_heads\": 5", "num_heads = 5 of 24", -EINVAL},
                {"\"out_hidden_size\": 32", "\"out_hidden_size\": 31", "out_hidden_size = 31", -EINVAL},
                {"\"patch_size\": 16", "\"patch_size\": 14", "patch_size = 14", -EINVAL},
                {"\"spatial_merge_size\": 2", "\"spatial_merge_size\": 1", "spatial_merge_size = 1",
                        -EINVAL},
                {"\"num_position_embeddings\": 2304", "\"num_position_embeddings\": 2303",
                        "num_position_embeddings = 2303", -EINVAL},
                {"24,\n    20,\n    20", "24,\n    20,\n    21", "mrope_section", -EINVAL},
                {"   2\n  ]", "   4\n  ]", "ascend", -EINVAL},
                {"   2\n  ]", "   1\n  ]", "ascend", -EINVAL},
                {"\"hidden_act\": \"silu\"", "\"hidden_act\": \"gelu\"", "hidden_act = gelu", -EOPNOTSUPP},
                {"\"gelu_pytorch_tanh\"", "\"gelu\"", "vision_config.hidden_act = gelu", -EOPNOTSUPP},
                {"\"mrope_interleaved\": true", "\"mrope_interleaved\": false", "interleaved", -EOPNOTSUPP},
                {"\"rms_norm_eps\": 1e-06", "\"rms_norm_eps\": -1", "rms_norm_eps", -EINVAL},
                {"\"rope_theta\": 5000000", "\"rope_theta\": \"x\"", "rope_theta", -EINVAL},
                {"\"num_heads\": 2", "\"num_heads\": 2.5", "num_heads", -EINVAL},
        };
        CLEANUP(checkpoint_freep) Checkpoint *c = comfy();
        CLEANUP_FREE char *config = config_text();

        for (size_t i = 0; i < ELEMENTSOF(cases); i++) {
                CLEANUP_FREE char *other = NULL;

                if (!strstr(config, cases[i].is))
                        fail_msg("%s is not in config.json", cases[i].is);
                other = replaced(config, cases[i].is, cases[i].said);
                refused(c, other, cases[i].error,
                        cases[i].error == -EINVAL ? FAULT_INVALID_MODEL : FAULT_NOT_SUPPORTED,
                        WORDS(cases[i].word));
        }
        refused(c, "[1", -EBADMSG, FAULT_INVALID_FILE, WORDS("config.json", "JSON"));
        refused(c, "[1]", -EBADMSG, FAULT_INVALID_FILE, WORDS("config.json", "object"));
}

static void open_every_tensor_is_needed(void **state) {
        CLEANUP(checkpoint_freep) Checkpoint *all = comfy();
        CLEANUP_FREE char *config = config_text();

        for (size_t i = 0; i < all->n; i++) {
                CLEANUP(checkpoint_freep) Checkpoint *c = comfy();

                checkpoint_drop(c, all->names[i]);
                refused(c, config, -EINVAL, FAULT_INVALID_MODEL, WORDS("Missing (1)", all->names[i]));
        }
}

static void open_lists_what_is_wrong_together(void **state) {
        CLEANUP(checkpoint_freep) Checkpoint *c = comfy(), *both = comfy(), *none = checkpoint_empty();
        CLEANUP_FREE char *config = config_text();

        checkpoint_drop(c, "model.layers.1.mlp.up_proj.weight");
        checkpoint_replace(c, "model.layers.2.self_attn.q_proj.weight", ST_BF16, 2, 512, 31, NULL);
        checkpoint_replace(c, "visual.merger.norm.bias", ST_BF16, 1, 23, 0, NULL);
        checkpoint_replace(c, "visual.blocks.1.norm1.bias", ST_I32, 1, 24, 0, NULL);
        checkpoint_add(c, "model.layers.1.mlp.up_proj.bias", ST_BF16, 1, 48, 0, NULL);
        refused(c, config, -EINVAL, FAULT_INVALID_MODEL,
                WORDS("Missing (1): model.layers.1.mlp.up_proj.weight", "Wrong (3)",
                        "model.layers.2.self_attn.q_proj.weight is [512, 31], expected [512, 32]",
                        "visual.merger.norm.bias is not [24]", "visual.blocks.1.norm1.bias is I32",
                        "(1): model.layers.1.mlp.up_proj.bias"));

        checkpoint_add(both, "model.language_model.norm.weight", ST_BF16, 1, 32, 0, NULL);
        refused(both, config, -EINVAL, FAULT_INVALID_MODEL, WORDS("both"));
        checkpoint_add(none, "blocks.0.norm1.weight", ST_BF16, 1, 32, 0, NULL);
        refused(none, config, -EINVAL, FAULT_INVALID_MODEL, WORDS("neither"));
}

/* One entry of a header whose data is nowhere looked at. */
static uint64_t entry(FILE *out, uint64_t at, const char *name, uint64_t a, uint64_t b) {
        uint64_t end = at + 2 * a * (b ? b : 1);

        (void) fprintf(out, "%s\"%s\":{\"dtype\":\"BF16\",\"shape\":[%llu", at ? "," : "{", name,
                (unsigned long long) a);
        if (strstr(name, "patch_embed.proj.weight"))
                (void) fprintf(out, ",3,2,16,16");
        else if (b)
                (void) fprintf(out, ",%llu", (unsigned long long) b);
        (void) fprintf(
                out, "],\"data_offsets\":[%llu,%llu]}", (unsigned long long) at, (unsigned long long) end);
        return end;
}

typedef struct Shape {
        const char *name;
        uint64_t a, b;
} Shape;

static uint64_t entries(FILE *out, uint64_t at, const char *prefix, const Shape *shapes, size_t n) {
        for (size_t i = 0; i < n; i++) {
                char name[160];

                (void) snprintf(name, sizeof(name), "%s%s", prefix, shapes[i].name);
                at = entry(out, at, name, shapes[i].a, shapes[i].b);
        }
        return at;
}

/* The published folder's 1058 tensors (h3.md 3.1, 3.4), as one file. */
static uint64_t full_header(FILE *out) {
        static const Shape layer[] = {{"input_layernorm.weight", 5120, 0},
                {"post_attention_layernorm.weight", 5120, 0}, {"self_attn.q_proj.weight", 8192, 5120},
                {"self_attn.k_proj.weight", 1024, 5120}, {"self_attn.v_proj.weight", 1024, 5120},
                {"self_attn.o_proj.weight", 5120, 8192}, {"self_attn.q_norm.weight", 128, 0},
                {"self_attn.k_norm.weight", 128, 0}, {"mlp.gate_proj.weight", 25600, 5120},
                {"mlp.up_proj.weight", 25600, 5120}, {"mlp.down_proj.weight", 5120, 25600}};
        static const Shape block[] = {{"norm1.weight", 1152, 0}, {"norm1.bias", 1152, 0},
                {"norm2.weight", 1152, 0}, {"norm2.bias", 1152, 0}, {"attn.qkv.weight", 3456, 1152},
                {"attn.qkv.bias", 3456, 0}, {"attn.proj.weight", 1152, 1152}, {"attn.proj.bias", 1152, 0},
                {"mlp.linear_fc1.weight", 4304, 1152}, {"mlp.linear_fc1.bias", 4304, 0},
                {"mlp.linear_fc2.weight", 1152, 4304}, {"mlp.linear_fc2.bias", 1152, 0}};
        static const Shape merger[] = {{"linear_fc1.weight", 4608, 4608}, {"linear_fc1.bias", 4608, 0},
                {"linear_fc2.weight", 5120, 4608}, {"linear_fc2.bias", 5120, 0}};
        static const Shape ends[] = {{"lm_head.weight", 151936, 5120},
                {"model.language_model.embed_tokens.weight", 151936, 5120},
                {"model.language_model.norm.weight", 5120, 0},
                {"model.visual.patch_embed.proj.weight", 1152, 1536},
                {"model.visual.patch_embed.proj.bias", 1152, 0},
                {"model.visual.pos_embed.weight", 2304, 1152}, {"model.visual.merger.norm.weight", 1152, 0},
                {"model.visual.merger.norm.bias", 1152, 0}};
        uint64_t at = entries(out, 0, "", ends, ELEMENTSOF(ends));
        char prefix[96];

        for (unsigned i = 0; i < 64; i++) {
                (void) snprintf(prefix, sizeof(prefix), "model.language_model.layers.%u.", i);
                at = entries(out, at, prefix, layer, ELEMENTSOF(layer));
        }
        for (unsigned i = 0; i < 27; i++) {
                (void) snprintf(prefix, sizeof(prefix), "model.visual.blocks.%u.", i);
                at = entries(out, at, prefix, block, ELEMENTSOF(block));
        }
        at = entries(out, at, "model.visual.merger.", merger, ELEMENTSOF(merger));
        for (unsigned i = 0; i < 3; i++) {
                const Shape norm[] = {{"norm.weight", 4608, 0}, {"norm.bias", 4608, 0}};

                (void) snprintf(prefix, sizeof(prefix), "model.visual.deepstack_merger_list.%u.", i);
                at = entries(out, at, prefix, norm, 2);
                at = entries(out, at, prefix, merger, ELEMENTSOF(merger));
        }
        (void) fprintf(out, "}");
        return at;
}

static void open_full_size_has_published_numbers(void **state) {
        CLEANUP(h3_text_freep) H3TextModel *m = NULL;
        CLEANUP_FREE char *header = NULL;
        size_t header_size;
        FILE *out = open_memstream(&header, &header_size);
        uint64_t data = full_header(out), length, size, sum = 0, least = UINT64_MAX, most = 0;
        const H3TextConfig *c;
        uint8_t *bytes;
        Fault f = {};

        (void) fclose(out);
        assert_int_equal(data, 66714780128ull);
        length = header_size;
        size = 8 + length + data;
        bytes = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (bytes == MAP_FAILED) /* a machine that does not promise memory: nothing to test here */
                skip();
        memcpy(bytes, &length, sizeof(length));
        memcpy(bytes + 8, header, header_size);
        if (h3_text_open(&(H3File){"m.safetensors", bytes, size}, 1, NULL, &m, &f) < 0)
                fail_msg("%s", f.text);
        c = &m->config;
        assert_int_equal(m->n_tensors, 1058);
        assert_int_equal(c->layers, 50);
        assert_int_equal(c->file_layers, 64);
        assert_int_equal(c->heads, 64);
        assert_int_equal(c->kv_heads, 8);
        assert_int_equal(c->vision.heads, 16);
        assert_int_equal(c->vision.head_dim, 72);
        for (uint32_t i = 0; i < 3; i++)
                assert_int_equal(c->vision.deepstack[i], 8 * (i + 1));
        /* 51.51 GB (h3.md 3.1), of which the matrices but the token table split over the ranks */
        assert_in_range(m->weight_bytes, 51500000000ull, 51520000000ull);
        for (uint32_t i = 0; i < 8; i++) {
                uint64_t own = h3_text_rank_bytes(m, 8, i, true);

                sum += own;
                least = own < least ? own : least;
                most = own > most ? own : most;
        }
        assert_int_equal(sum, h3_text_rank_bytes(m, 1, 0, true));
        assert_in_range(m->weight_bytes - sum, 2ull * 151936 * 5120, 2ull * 151936 * 5120 + 8000000);
        assert_true(most - least < most / 1000);
        (void) munmap(bytes, size);
}

static void open_on_a_backend_that_lacks_the_type_is_refused(void **state) {
        CLEANUP(checkpoint_freep) Checkpoint *c = comfy();
        CLEANUP_FREE char *config = config_text();
        CLEANUP_FREE uint8_t *bytes = NULL;
        const LkOps none = {.backend = "none"};
        H3TextModel *m = NULL;
        uint64_t size;
        Fault f = {};

        bytes = checkpoint_write(c, &size);
        assert_int_equal(h3_text_open((const H3File[]){{"m.safetensors", bytes, size},
                                              {"config.json", config, strlen(config)}},
                                 2, &none, &m, &f),
                -EOPNOTSUPP);
        assert_string_equal(f.name, FAULT_NOT_SUPPORTED);
        assert_non_null(strstr(f.text, "bf16"));
}

int main(void) {
        static const struct CMUnitTest tests[] = {
                cmocka_unit_test(open_tiny_has_its_sizes),
                cmocka_unit_test(open_published_names_same_bits),
                cmocka_unit_test(open_shards_same_bits),
                cmocka_unit_test(open_runs_as_many_layers_as_it_should),
                cmocka_unit_test(open_without_config_needs_the_released_sizes),
                cmocka_unit_test(open_config_that_disagrees_is_refused),
                cmocka_unit_test(open_every_tensor_is_needed),
                cmocka_unit_test(open_lists_what_is_wrong_together),
                cmocka_unit_test(open_full_size_has_published_numbers),
                cmocka_unit_test(open_on_a_backend_that_lacks_the_type_is_refused),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
