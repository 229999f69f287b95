/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "service/h3/text-private.h"
#include "service/shared/cleanup.h"

/* Names and shapes of h3.md 3.1 and 3.4. A dimension of 0 is one that could not be read because its tensor
 * is missing: that one is reported, others are not blamed for it. Limits keep all later arithmetic far from
 * overflow. */

#define HIDDEN_MAX 65536
#define FFN_MAX 262144
#define HEAD_DIM_MAX 256 /* of ops->attention */
#define HEADS_MAX 4096
#define LAYERS_MAX 1024
#define VOCAB_MAX (1u << 22)
#define GRID_MAX 1024

#define PATCH 1536 /* 3 channels, 2 frames, 16 * 16 */

/* What the released model has and a file without config.json does not say. */
#define EPS 1e-6
#define THETA 5e6
#define VISION_THETA 1e4
#define RELEASED_LAYERS 64
#define RELEASED_RUN 50
#define RELEASED_HEAD_DIM 128
#define RELEASED_TOKENS 262144u
#define RELEASED_VISION_HIDDEN 1152
#define RELEASED_VISION_HEADS 16
#define RELEASED_DEPTH 27

#define NAME_SIZE 160

static const uint32_t released_sections[] = {24, 20, 20}, released_deepstack[] = {8, 16, 24};

typedef struct Binder {
        H3TensorSet *set;
        const char *text, *vision; /* what names begin with */
        H3TextModel *m;
        H3List missing, wrong;
} Binder;

static uint64_t dimension(const H3Tensor *t, uint32_t axis) {
        return t->entry->shape[axis] * (t->matrix_type == LK_NVFP4 && axis == 1 ? 2 : 1);
}

/* A tensor as rows and columns; the patch projection has five dimensions. */
static bool as_matrix(const H3Tensor *t, uint64_t *ret_rows, uint64_t *ret_cols) {
        uint64_t cols = 1;

        if (t->entry->n_dims < 2)
                return false;
        for (uint32_t i = 1; i < t->entry->n_dims; i++)
                if (__builtin_mul_overflow(cols, dimension(t, i), &cols))
                        return false;
        *ret_rows = t->entry->shape[0];
        *ret_cols = cols;
        return t->entry->n_dims == 2 || t->matrix_type == 0;
}

/* One size: rows or columns of a tensor. 0 if it cannot be told; a number out of range is reported here, an
 * absent tensor where it is bound. */
static uint32_t size_of(Binder *b, const char *prefix, const char *name, bool columns, uint64_t max) {
        char full[NAME_SIZE];
        const H3Tensor *t;
        uint64_t rows, cols, n;

        (void) snprintf(full, sizeof(full), "%s%s", prefix, name);
        t = h3_tensor_set_find(b->set, full);
        if (!t || t->entry->n_dims == 0)
                return 0;
        if (t->entry->n_dims == 1)
                rows = cols = t->entry->shape[0];
        else if (!as_matrix(t, &rows, &cols))
                return 0;
        n = columns ? cols : rows;
        if (n >= 1 && n <= max)
                return (uint32_t) n;
        h3_list_add(&b->wrong, "%.100s has %" PRIu64 " %s (1 to %" PRIu64 ")", full, n,
                columns ? "columns" : "rows", max);
        return 0;
}

/* The highest number behind the prefix, plus one. */
static uint32_t count(Binder *b, const char *prefix, const char *name, uint32_t max) {
        char full[NAME_SIZE];
        size_t n = (size_t) snprintf(full, sizeof(full), "%s%s", prefix, name);
        uint32_t layers = 0;

        for (size_t i = 0; i < b->set->n_tensors; i++) {
                const char *tensor = b->set->tensors[i].entry->name;
                unsigned long layer;
                char *end;

                if (strncmp(tensor, full, n) != 0 || tensor[n] < '0' || tensor[n] > '9')
                        continue;
                errno = 0;
                layer = strtoul(tensor + n, &end, 10);
                if (*end != '.' || (tensor[n] == '0' && end != tensor + n + 1)) /* left over */
                        continue;
                if (errno != 0 || layer >= max)
                        h3_list_add(&b->wrong, "%.100s (at most %u)", tensor, max);
                else if (layer >= layers)
                        layers = (uint32_t) layer + 1;
        }
        return layers;
}

static uint32_t divide(Binder *b, uint32_t n, uint32_t by, const char *what) {
        if (n == 0 || by == 0)
                return 0;
        if (n % by == 0)
                return n / by;
        h3_list_add(&b->wrong, "%s is %u, no multiple of %u", what, n, by);
        return 0;
}

static void read_text_sizes(Binder *b) {
        H3TextConfig *c = &b->m->config;
        char layer[64];

        c->file_layers = count(b, b->text, "layers.", LAYERS_MAX);
        c->vocab = size_of(b, b->text, "embed_tokens.weight", false, VOCAB_MAX);
        c->hidden = size_of(b, b->text, "embed_tokens.weight", true, HIDDEN_MAX);
        (void) snprintf(layer, sizeof(layer), "%slayers.0.", b->text);
        c->head_dim = size_of(b, layer, "self_attn.q_norm.weight", false, HEAD_DIM_MAX);
        if (c->head_dim % 8 != 0) {
                h3_list_add(
                        &b->wrong, "self_attn.q_norm: the head size is %u, no multiple of 8", c->head_dim);
                c->head_dim = 0;
        }
        c->heads = divide(b, size_of(b, layer, "self_attn.q_proj.weight", false, HEADS_MAX * HEAD_DIM_MAX),
                c->head_dim, "the row count of self_attn.q_proj");
        c->kv_heads =
                divide(b, size_of(b, layer, "self_attn.k_proj.weight", false, HEADS_MAX * HEAD_DIM_MAX),
                        c->head_dim, "the row count of self_attn.k_proj");
        if (divide(b, c->heads, c->kv_heads, "the number of heads") == 0)
                c->kv_heads = 0;
        c->ffn = size_of(b, layer, "mlp.gate_proj.weight", false, FFN_MAX);
}

static void read_vision_sizes(Binder *b) {
        H3VisionConfig *v = &b->m->config.vision;
        uint32_t positions;
        char block[64];

        v->depth = count(b, b->vision, "blocks.", LAYERS_MAX);
        v->n_deepstack = count(b, b->vision, "deepstack_merger_list.", H3_DEEPSTACK_MAX);
        v->hidden = size_of(b, b->vision, "patch_embed.proj.weight", false, HIDDEN_MAX);
        v->merged = 4 * v->hidden;
        v->patch = PATCH;
        (void) snprintf(block, sizeof(block), "%sblocks.0.", b->vision);
        v->ffn = size_of(b, block, "mlp.linear_fc1.weight", false, FFN_MAX);
        positions = size_of(b, b->vision, "pos_embed.weight", false, GRID_MAX * GRID_MAX);
        while (v->grid < GRID_MAX && v->grid * v->grid < positions)
                v->grid++;
        if (v->grid * v->grid != positions)
                h3_list_add(
                        &b->wrong, "%spos_embed.weight has %u rows, no square number", b->vision, positions);
}

/* A size that neither the shapes nor config.json say, of a model that is not the released one. */
static int not_said(const char *what, const char *key, Fault *f) {
        return fault_set(f, -EINVAL, FAULT_INVALID_MODEL,
                "The tensors do not say %s, and the sizes are not those of the released model. Give the "
                "model's config.json with %s.",
                what, key);
}

static int choose_layers(H3TextConfig *c, bool published, const TextSaid *said, Fault *f) {
        if (said->run_layers > 0) {
                if (c->file_layers > 0 && said->run_layers > c->file_layers)
                        return fault_set(f, -EINVAL, FAULT_INVALID_MODEL,
                                "config.json says latentd_run_layers = %u, and the files have %u layers.",
                                said->run_layers, c->file_layers);
                c->layers = said->run_layers;
        } else if (!published || c->file_layers == 0)
                c->layers = c->file_layers;
        else if (c->file_layers == RELEASED_LAYERS)
                c->layers = RELEASED_RUN;
        else
                return not_said("how many of their layers run", "latentd_run_layers", f);
        return 0;
}

static int choose_rope(H3TextConfig *c, const TextSaid *said, Fault *f) {
        const uint32_t *s = said->sections;
        bool empty = s[0] + s[1] + s[2] == 0;

        c->tokens_max = said->positions == 0 ? RELEASED_TOKENS
                        : said->positions < H3_TEXT_TOKENS_MAX ? said->positions
                                                               : (uint32_t) H3_TEXT_TOKENS_MAX;
        c->eps = (float) (said->eps > 0 ? said->eps : EPS);
        c->theta = (float) (said->theta > 0 ? said->theta : THETA);
        if (c->head_dim == 0) /* reported */
                return 0;
        if (empty && c->head_dim != RELEASED_HEAD_DIM)
                return not_said("the M-RoPE sections", "text_config.rope_parameters.mrope_section", f);
        memcpy(c->sections, empty ? released_sections : s, sizeof(c->sections));
        if (c->sections[0] + c->sections[1] + c->sections[2] == c->head_dim / 2)
                return 0;
        return fault_set(f, -EINVAL, FAULT_INVALID_MODEL,
                "config.json: mrope_section is %u, %u, %u; expected a sum of %u, half the head size.", s[0],
                s[1], s[2], c->head_dim / 2);
}

static int choose_heads(H3VisionConfig *v, const TextSaid *said, Fault *f) {
        if (v->hidden == 0)
                return 0;
        v->heads = said->heads;
        if (v->heads == 0 && v->hidden == RELEASED_VISION_HIDDEN)
                v->heads = RELEASED_VISION_HEADS;
        if (v->heads == 0)
                return not_said("how many heads the vision tower has", "vision_config.num_heads", f);
        v->head_dim = v->hidden / v->heads;
        if (v->head_dim * v->heads == v->hidden && v->head_dim % 4 == 0 && v->head_dim <= HEAD_DIM_MAX)
                return 0;
        return fault_set(f, -EINVAL, FAULT_INVALID_MODEL,
                "config.json says vision_config.num_heads = %u of %u; the head size must be a multiple of "
                "4, "
                "at most %d.",
                v->heads, v->hidden, HEAD_DIM_MAX);
}

static int choose_deepstack(H3TextConfig *c, const TextSaid *said, Fault *f) {
        H3VisionConfig *v = &c->vision;
        bool released = v->depth == RELEASED_DEPTH && v->n_deepstack == ELEMENTSOF(released_deepstack);
        const uint32_t *from = said->n_deepstack > 0 ? said->deepstack : released_deepstack;

        if (v->n_deepstack == 0 || v->depth == 0)
                return 0;
        if (said->n_deepstack == 0 && !released)
                return not_said("after which blocks the deepstack mergers come",
                        "vision_config.deepstack_visual_indexes", f);
        if (said->n_deepstack > 0 && said->n_deepstack != v->n_deepstack)
                return fault_set(f, -EINVAL, FAULT_INVALID_MODEL,
                        "config.json has %u deepstack_visual_indexes, the tensors have %u mergers.",
                        said->n_deepstack, v->n_deepstack);
        for (uint32_t i = 0; i < v->n_deepstack; i++) {
                v->deepstack[i] = from[i];
                if (from[i] >= v->depth || (i > 0 && from[i] <= from[i - 1]))
                        return fault_set(f, -EINVAL, FAULT_INVALID_MODEL,
                                "config.json: deepstack_visual_indexes must ascend and be below %u, the "
                                "number of blocks; number %u is %u.",
                                v->depth, i, from[i]);
        }
        if (c->layers > 0 && v->n_deepstack > c->layers)
                return fault_set(f, -EINVAL, FAULT_INVALID_MODEL,
                        "There are %u deepstack mergers for %u language layers.", v->n_deepstack, c->layers);
        return 0;
}

/* Finds a tensor of the model, marks it as wanted and checks its shape; NULL after reporting. cols 0: a
 * vector. */
static H3Tensor *take(Binder *b, uint64_t rows, uint64_t cols, bool vector, const char *name) {
        H3Tensor *t = h3_tensor_set_find(b->set, name);
        uint64_t got_rows = 0, got_cols = 0;

        if (!t) {
                h3_list_add(&b->missing, "%s", name);
                return NULL;
        }
        t->used = true;
        if (!t->matrix_type && !h3_is_float(t->entry->type)) {
                h3_list_add(&b->wrong, "%s is %s (F32, BF16 or F16)", name, st_type_name(t->entry->type));
                return NULL;
        }
        if (vector) {
                if (t->entry->n_dims == 1 && !t->matrix_type && (rows == 0 || t->entry->shape[0] == rows))
                        return t;
                h3_list_add(&b->wrong, "%s is not [%" PRIu64 "]", name, rows);
                return NULL;
        }
        if (as_matrix(t, &got_rows, &got_cols) && (rows == 0 || got_rows == rows) &&
                (cols == 0 || got_cols == cols))
                return t;
        h3_list_add(&b->wrong, "%s is [%" PRIu64 ", %" PRIu64 "], expected [%" PRIu64 ", %" PRIu64 "]", name,
                got_rows, got_cols, rows, cols);
        return NULL;
}

static void bind_matrix(
        Binder *b, const char *prefix, const char *name, uint64_t rows, uint64_t cols, LkMatrix *ret) {
        char full[NAME_SIZE];
        const H3Tensor *t;
        LkType type;

        (void) snprintf(full, sizeof(full), "%s%s.weight", prefix, name);
        t = take(b, rows, cols, false, full);
        if (!t)
                return;
        type = t->matrix_type ? t->matrix_type : h3_float_type(t->entry->type);
        (void) as_matrix(t, &rows, &cols);
        *ret = (LkMatrix){
                .data = t->data,
                .type = type,
                .rows = rows,
                .cols = cols,
                .row_stride = lk_row_size(type, cols),
                .block_rows = rows,
                .block_stride = rows * lk_row_size(type, cols),
                .quant = t->quant,
        };
        b->m->matrix_types |= 1u << type;
        b->m->weight_bytes += t->entry->size;
}

static void bind_vector(Binder *b, const char *prefix, const char *name, uint64_t n, LkVector *ret) {
        char full[NAME_SIZE];
        const H3Tensor *t;

        (void) snprintf(full, sizeof(full), "%s%s", prefix, name);
        t = take(b, n, 0, true, full);
        if (!t)
                return;
        *ret = (LkVector){.data = t->data, .type = h3_float_type(t->entry->type), .n = t->entry->shape[0]};
        b->m->weight_bytes += t->entry->size;
}

static void bind_linear(
        Binder *b, const char *prefix, const char *name, uint64_t rows, uint64_t cols, H3Linear *ret) {
        char bias[NAME_SIZE];

        (void) snprintf(bias, sizeof(bias), "%s.bias", name);
        bind_matrix(b, prefix, name, rows, cols, &ret->w);
        bind_vector(b, prefix, bias, rows, &ret->bias);
}

static void bind_norm(Binder *b, const char *prefix, const char *name, uint64_t n, H3LayerNorm *ret) {
        char part[NAME_SIZE];

        (void) snprintf(part, sizeof(part), "%s.weight", name);
        bind_vector(b, prefix, part, n, &ret->weight);
        (void) snprintf(part, sizeof(part), "%s.bias", name);
        bind_vector(b, prefix, part, n, &ret->bias);
}

static void bind_layer(Binder *b, uint32_t i, H3TextLayer *l) {
        const H3TextConfig *c = &b->m->config;
        uint64_t inner = (uint64_t) c->heads * c->head_dim, kv = (uint64_t) c->kv_heads * c->head_dim;
        char p[64];

        (void) snprintf(p, sizeof(p), "%slayers.%u.", b->text, i);
        bind_vector(b, p, "input_layernorm.weight", c->hidden, &l->norm1);
        bind_vector(b, p, "post_attention_layernorm.weight", c->hidden, &l->norm2);
        bind_vector(b, p, "self_attn.q_norm.weight", c->head_dim, &l->q_norm);
        bind_vector(b, p, "self_attn.k_norm.weight", c->head_dim, &l->k_norm);
        bind_matrix(b, p, "self_attn.q_proj", inner, c->hidden, &l->q);
        bind_matrix(b, p, "self_attn.k_proj", kv, c->hidden, &l->k);
        bind_matrix(b, p, "self_attn.v_proj", kv, c->hidden, &l->v);
        bind_matrix(b, p, "self_attn.o_proj", c->hidden, inner, &l->out);
        bind_matrix(b, p, "mlp.gate_proj", c->ffn, c->hidden, &l->gate);
        bind_matrix(b, p, "mlp.up_proj", c->ffn, c->hidden, &l->up);
        bind_matrix(b, p, "mlp.down_proj", c->hidden, c->ffn, &l->down);
}

static void bind_block(Binder *b, uint32_t i, H3VisionBlockWeights *w) {
        const H3VisionConfig *v = &b->m->config.vision;
        char p[64];

        (void) snprintf(p, sizeof(p), "%sblocks.%u.", b->vision, i);
        bind_norm(b, p, "norm1", v->hidden, &w->norm1);
        bind_norm(b, p, "norm2", v->hidden, &w->norm2);
        bind_linear(b, p, "attn.qkv", 3ull * v->hidden, v->hidden, &w->qkv);
        bind_linear(b, p, "attn.proj", v->hidden, v->hidden, &w->out);
        bind_linear(b, p, "mlp.linear_fc1", v->ffn, v->hidden, &w->fc1);
        bind_linear(b, p, "mlp.linear_fc2", v->hidden, v->ffn, &w->fc2);
}

static void bind_merger(Binder *b, const char *name, uint64_t norm, H3Merger *w) {
        const H3VisionConfig *v = &b->m->config.vision;
        char p[96];

        (void) snprintf(p, sizeof(p), "%s%s.", b->vision, name);
        bind_norm(b, p, "norm", norm, &w->norm);
        bind_linear(b, p, "linear_fc1", v->merged, v->merged, &w->fc1);
        bind_linear(b, p, "linear_fc2", b->m->config.hidden, v->merged, &w->fc2);
}

static void bind_vision(Binder *b) {
        H3TextModel *m = b->m;
        const H3VisionConfig *v = &m->config.vision;
        const H3Tensor *t;
        char name[NAME_SIZE];

        bind_linear(b, b->vision, "patch_embed.proj", v->hidden, v->patch, &m->patch);
        (void) snprintf(name, sizeof(name), "%spos_embed.weight", b->vision);
        t = take(b, (uint64_t) v->grid * v->grid, v->hidden, false, name);
        if (t && t->matrix_type)
                h3_list_add(&b->wrong, "%s is quantised (F32, BF16 or F16)", name);
        else if (t) {
                m->positions = (LkVector){.data = t->data,
                        .type = h3_float_type(t->entry->type),
                        .n = (uint64_t) v->grid * v->grid * v->hidden};
                m->weight_bytes += t->entry->size;
        }
        for (uint32_t i = 0; i < v->depth; i++)
                bind_block(b, i, m->blocks + i);
        bind_merger(b, "merger", v->hidden, &m->merger);
        for (uint32_t i = 0; i < v->n_deepstack; i++) {
                (void) snprintf(name, sizeof(name), "deepstack_merger_list.%u", i);
                bind_merger(b, name, v->merged, m->deepstack + i);
        }
}

/* What the files may have and no run reads: the head, the final norm, the layers behind the last. */
static bool is_spare(const Binder *b, const char *name) {
        size_t n = strlen(b->text);
        unsigned long layer;

        if (strcmp(name, "lm_head.weight") == 0)
                return true;
        if (strncmp(name, b->text, n) != 0)
                return false;
        name += n;
        if (strcmp(name, "norm.weight") == 0)
                return true;
        if (strncmp(name, "layers.", 7) != 0)
                return false;
        layer = strtoul(name + 7, NULL, 10);
        return layer >= b->m->config.layers && layer < b->m->config.file_layers;
}

static int report(Binder *b, Fault *f) {
        H3List extra = {};

        for (size_t i = 0; i < b->set->n_tensors; i++)
                if (!b->set->tensors[i].used && !is_spare(b, b->set->tensors[i].entry->name))
                        h3_list_add(&extra, "%.150s", b->set->tensors[i].entry->name);
        if (b->m->config.layers == 0)
                h3_list_add(&b->missing, "%slayers.0.*", b->text);
        if (b->m->config.vision.depth == 0)
                h3_list_add(&b->missing, "%sblocks.0.*", b->vision);
        if (b->missing.count + b->wrong.count + extra.count == 0)
                return 0;

        return fault_set(f, -EINVAL, FAULT_INVALID_MODEL,
                "Not a complete conditioner (Qwen3-VL). Missing (%u): %s. Wrong (%u): %s. Not of this model "
                "(%u): %s. Give all files of one model and no others.",
                b->missing.count, b->missing.count ? b->missing.text : "none", b->wrong.count,
                b->wrong.count ? b->wrong.text : "none", extra.count, extra.count ? extra.text : "none");
}

static int choose(Binder *b, bool published, const TextSaid *said, Fault *f) {
        H3TextConfig *c = &b->m->config;
        int r;

        c->vision.eps = (float) EPS;
        c->vision.theta = (float) (said->vision_theta > 0 ? said->vision_theta : VISION_THETA);
        r = choose_layers(c, published, said, f);
        if (r >= 0)
                r = choose_rope(c, said, f);
        if (r >= 0)
                r = choose_heads(&c->vision, said, f);
        return r < 0 ? r : choose_deepstack(c, said, f);
}

int text_bind(H3TensorSet *s, bool published, const TextSaid *said, H3TextModel *m, Fault *f) {
        Binder b = {
                .set = s,
                .text = published ? "model.language_model." : "model.",
                .vision = published ? "model.visual." : "visual.",
                .m = m,
        };
        const H3TextConfig *c = &m->config;
        int r;

        r = h3_quant_resolve(s, &b.missing, &b.wrong, f);
        if (r < 0)
                return r;
        read_text_sizes(&b);
        read_vision_sizes(&b);
        r = choose(&b, published, said, f);
        if (r < 0)
                return r;

        m->layers = calloc(c->layers ? c->layers : 1, sizeof(*m->layers));
        m->blocks = calloc(c->vision.depth ? c->vision.depth : 1, sizeof(*m->blocks));
        if (!m->layers || !m->blocks)
                return fault_set(
                        f, -ENOMEM, FAULT_DOES_NOT_FIT, "No memory for the model; free some and try again.");
        bind_matrix(&b, b.text, "embed_tokens", c->vocab, c->hidden, &m->embed);
        for (uint32_t i = 0; i < c->layers; i++)
                bind_layer(&b, i, m->layers + i);
        bind_vision(&b);
        return report(&b, f);
}
