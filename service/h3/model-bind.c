/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "service/h3/model-private.h"
#include "service/shared/cleanup.h"
#include "service/shared/fmath.h"

/* Names and shapes of h3.md 1.2. A dimension of 0 is one that could not be read because its tensor is
 * missing: that one is reported, others are not blamed for it. Limits keep all later arithmetic far from
 * overflow. */

#define HIDDEN_MAX 65536
#define HEADS_MAX 4096
#define HEAD_DIM_MAX 256 /* of ops->attention */
#define FFN_MAX 262144
#define LAYERS_MAX 1024
#define REFINER_MAX 64
#define CHANNELS_MAX 4096
#define WIDTH_MAX 65536 /* text and time widths */
#define CURVE_POINTS_MAX (1u << 20)

#define PATCH 2
#define EPS 1e-5f
#define ROPE_FREQS 16 /* and theta 1e4, where the file does not say */
#define LN_ROPE_THETA 9.210340371976184

#define NAME_SIZE 160

typedef struct Binder {
        H3TensorSet *set;
        H3QkvOrder order;
        H3Config *c;
        H3List missing, wrong;
        bool curve, gated;
} Binder;

void h3_list_add(H3List *l, const char *format, ...) {
        char item[sizeof(l->text)];
        va_list ap;
        int n;

        l->count++;
        if (l->full)
                return;
        va_start(ap, format);
        n = vsnprintf(item, sizeof(item), format, ap);
        va_end(ap);

        if (n < 0 || l->n + (size_t) n + 8 > sizeof(l->text)) {
                l->full = true;
                if (l->n == 0 && n > 0) /* one item longer than the list: its start is better than nothing */
                        l->n = (size_t) snprintf(l->text, sizeof(l->text), "%.240s", item);
                (void) snprintf(l->text + l->n, sizeof(l->text) - l->n, ", ...");
                return;
        }
        l->n += (size_t) snprintf(l->text + l->n, sizeof(l->text) - l->n, "%s%s", l->n ? ", " : "", item);
}

static const char *format_shape(const StTensor *t, char *buf, size_t size) {
        size_t n = (size_t) snprintf(buf, size, "[");

        for (uint32_t i = 0; i < t->n_dims && n < size; i++)
                n += (size_t) snprintf(buf + n, size - n, "%s%" PRIu64, i ? ", " : "", t->shape[i]);
        if (n < size)
                (void) snprintf(buf + n, size - n, "]");
        return buf;
}

/* A dimension as the model sees it: nvfp4 keeps two columns in a byte. */
static uint64_t dimension(const H3Tensor *t, uint32_t axis) {
        return t->entry->shape[axis] * (t->matrix_type == LK_NVFP4 && axis == 1 ? 2 : 1);
}

static bool is_diffusers(const Binder *b) {
        return b->order == H3_QKV_SPLIT;
}

static H3Tensor *find(
        const Binder *b, const char *prefix, const char *original, const char *diffusers, char *ret_name) {
        (void) snprintf(ret_name, NAME_SIZE, "%s%s", prefix, is_diffusers(b) ? diffusers : original);
        return h3_tensor_set_find(b->set, ret_name);
}

/* One size of the configuration: dimension `axis` of a tensor of n_dims. 0 if it cannot be told; a number
 * out of range is reported here, an absent tensor where it is bound. */
static uint32_t size_of(Binder *b, const char *prefix, const char *original, const char *diffusers,
        uint32_t n_dims, uint32_t axis, uint64_t max, const char *what) {
        char name[NAME_SIZE], shape[120];
        const H3Tensor *t = find(b, prefix, original, diffusers, name);

        if (!t || t->entry->n_dims != n_dims)
                return 0;
        if (t->entry->shape[axis] >= 1 && dimension(t, axis) <= max)
                return (uint32_t) dimension(t, axis);
        h3_list_add(&b->wrong, "%.100s is %s (%s must be 1 to %" PRIu64 ")", name,
                format_shape(t->entry, shape, sizeof(shape)), what, max);
        return 0;
}

/* Layers: the highest number behind the prefix, plus one. */
static uint32_t count_layers(Binder *b, const char *prefix, uint32_t max) {
        size_t n = strlen(prefix);
        uint32_t count = 0;

        for (size_t i = 0; i < b->set->n_tensors; i++) {
                const char *name = b->set->tensors[i].entry->name;
                unsigned long layer;
                char *end;

                if (strncmp(name, prefix, n) != 0 || name[n] < '0' || name[n] > '9')
                        continue;
                errno = 0;
                layer = strtoul(name + n, &end, 10);
                if (*end != '.' || (name[n] == '0' && end != name + n + 1)) /* left over: reported as such */
                        continue;
                if (errno != 0 || layer >= max) {
                        h3_list_add(&b->wrong, "%.100s (at most %u layers)", name, max);
                        continue;
                }
                if (layer >= count)
                        count = (uint32_t) layer + 1;
        }
        return count;
}

static const char *block_prefix(const Binder *b, bool refiner) {
        if (is_diffusers(b))
                return refiner ? "token_refiner.refiner_blocks." : "transformer_blocks.";
        return refiner ? "token_refiner.blocks." : "blocks.";
}

static uint32_t divide(Binder *b, uint32_t n, uint32_t by, const char *what) {
        if (n == 0 || by == 0)
                return 0;
        if (n % by == 0)
                return n / by;
        h3_list_add(&b->wrong, "%s is %u, no multiple of %u", what, n, by);
        return 0;
}

static int read_rope(Binder *b, Fault *f) {
        H3Tensor *t = is_diffusers(b) ? NULL : h3_tensor_set_find(b->set, "rope.inv_freq");
        H3Config *c = b->c;

        if (!t) {
                c->rope_freqs = ROPE_FREQS;
                for (uint32_t k = 0; k < ROPE_FREQS;
                        k++) { /* torch: a power in f32, then its reciprocal in f32 */
                        double power = fmath_exp(LN_ROPE_THETA * (double) k / ROPE_FREQS);

                        c->rope_inv_freq[k] = 1.0f / (float) power;
                }
                return 0;
        }

        t->used = true;
        if (t->entry->type != ST_F32 || t->entry->n_dims != 1 || t->entry->shape[0] < 1 ||
                t->entry->shape[0] > H3_ROPE_FREQS_MAX)
                return fault_set(f, -EINVAL, FAULT_INVALID_MODEL,
                        "rope.inv_freq in %.200s must be 1 to %d numbers of F32.", t->file,
                        H3_ROPE_FREQS_MAX);
        c->rope_freqs = (uint32_t) t->entry->shape[0];
        memcpy(c->rope_inv_freq, t->data, c->rope_freqs * sizeof(float));
        for (uint32_t k = 0; k < c->rope_freqs; k++)
                if (!(c->rope_inv_freq[k] > 0) ||
                        c->rope_inv_freq[k] > 64) /* angles stay inside fmath's range */
                        return fault_set(f, -EINVAL, FAULT_INVALID_MODEL,
                                "rope.inv_freq[%u] in %.200s is %g; expected above 0 and at most 64.", k,
                                t->file, (double) c->rope_inv_freq[k]);
        return 0;
}

static void read_attention_sizes(Binder *b, const char *block0) {
        H3Config *c = b->c;
        uint32_t rows;

        c->head_dim = size_of(
                b, block0, "attn.q_norm.weight", "attn.norm_q.weight", 1, 0, HEAD_DIM_MAX, "the head size");
        rows = size_of(b, block0, "attn.qkv_proj.weight", "attn.to_q.weight", 2, 0,
                3ull * HEADS_MAX * HEAD_DIM_MAX, "the rows");
        c->heads = divide(b, rows, (is_diffusers(b) ? 1 : 3) * c->head_dim,
                "the row count of attn.qkv_proj or attn.to_q");
        c->inner = c->heads * c->head_dim;
        if (c->head_dim > 0 && (c->head_dim % 8 != 0 || c->head_dim < 6 * c->rope_freqs)) {
                h3_list_add(&b->wrong,
                        "attn.q_norm: the head size is %u (expected a multiple of 8, at least %u for the "
                        "rope)",
                        c->head_dim, 6 * c->rope_freqs);
                c->head_dim = 0;
        }
}

static const char *const curve_names[] = {"adaln_t_table", "time_embedder.table"};

/* With a curve, its table instead of the time embedder. */
static void read_time_sizes(Binder *b) {
        H3Config *c = b->c;

        for (size_t i = 0; i < ELEMENTSOF(curve_names); i++)
                if (h3_tensor_set_find(b->set, curve_names[i])) {
                        b->curve = true;
                        c->curve_points = size_of(b, "", curve_names[i], curve_names[i], 2, 0,
                                CURVE_POINTS_MAX, "the curve's points");
                        c->time_dim = size_of(
                                b, "", curve_names[i], curve_names[i], 2, 1, WIDTH_MAX, "the curve's rank");
                        if (c->curve_points == 1)
                                h3_list_add(
                                        &b->wrong, "%s has one row (expected 2 or more)", curve_names[i]);
                        return;
                }

        c->time_freq_dim = size_of(b, "", "time_embedder.proj_in.weight", "time_embedder.linear_1.weight", 2,
                1, WIDTH_MAX, "the sinusoid size");
        if (c->time_freq_dim % 2 != 0)
                h3_list_add(&b->wrong, "time_embedder: the sinusoid size is %u (expected an even number)",
                        c->time_freq_dim);
        c->time_hidden = size_of(b, "", "time_embedder.proj_in.weight", "time_embedder.linear_1.weight", 2,
                0, WIDTH_MAX, "the time size");
        c->time_dim = size_of(b, "", "time_embedder.proj_out.weight", "time_embedder.linear_2.weight", 2, 0,
                WIDTH_MAX, "the time size");
}

static int read_config(Binder *b, Fault *f) {
        H3Config *c = b->c;
        char block0[64];
        int r;

        r = read_rope(b, f);
        if (r < 0)
                return r;
        c->eps = EPS;
        c->patch_h = c->patch_w = PATCH;
        c->layers = count_layers(b, block_prefix(b, false), LAYERS_MAX);
        c->refiner_layers = count_layers(b, block_prefix(b, true), REFINER_MAX);

        c->hidden = size_of(
                b, "", "video_patch_proj.weight", "proj_in.weight", 2, 0, HIDDEN_MAX, "the hidden size");
        c->video_channels = divide(b,
                size_of(b, "", "video_patch_proj.weight", "proj_in.weight", 2, 1,
                        CHANNELS_MAX * PATCH * PATCH, "the row"),
                PATCH * PATCH, "the video row");
        c->audio_channels = size_of(
                b, "", "audio_patch_proj.weight", "audio_proj_in.weight", 2, 1, CHANNELS_MAX, "the row");
        c->text_dim = size_of(
                b, "", "condition_proj.weight", "context_embedder.weight", 2, 1, WIDTH_MAX, "the text size");
        read_time_sizes(b);

        (void) snprintf(block0, sizeof(block0), "%s0.", block_prefix(b, false));
        c->ffn = size_of(b, block0, "mlp.fc2.weight", "ff.net.2.weight", 2, 1, FFN_MAX, "the MLP size");
        read_attention_sizes(b, block0);
        return 0;
}

/* Finds a tensor of the model, marks it as wanted and checks its shape. NULL after reporting. */
static const H3Tensor *take(Binder *b, const char *prefix, const char *original, const char *diffusers,
        uint32_t n_dims, uint64_t rows, uint64_t cols) {
        const uint64_t dims[] = {rows, cols};
        char name[NAME_SIZE], shape[120];
        H3Tensor *t = find(b, prefix, original, diffusers, name);
        bool same;

        if (!t) {
                h3_list_add(&b->missing, "%s", name);
                return NULL;
        }
        t->used = true;
        same = t->entry->n_dims == n_dims;
        for (uint32_t i = 0; same && i < n_dims; i++)
                same = dims[i] == 0 || dimension(t, i) == dims[i];
        if (same)
                return t;

        (void) format_shape(t->entry, shape, sizeof(shape));
        if (n_dims == 1)
                h3_list_add(&b->wrong, "%s is %s, expected [%" PRIu64 "]", name, shape, rows);
        else
                h3_list_add(
                        &b->wrong, "%s is %s, expected [%" PRIu64 ", %" PRIu64 "]", name, shape, rows, cols);
        return NULL;
}

/* Rows of a tensor as a matrix: `rows` of them from row `first`, in blocks of block_rows that start every
 * block_step rows. */
static LkMatrix matrix_of(
        const H3Tensor *t, uint64_t first, uint64_t rows, uint64_t block_rows, uint64_t block_step) {
        LkType type = t->matrix_type ? t->matrix_type : h3_float_type(t->entry->type);
        uint64_t cols = dimension(t, 1), stride = lk_row_size(type, cols);
        LkQuant quant = t->quant;

        quant.first_row = t->matrix_type ? first : 0;
        return (LkMatrix){
                .quant = quant,
                .data = t->data + first * stride,
                .type = type,
                .rows = rows,
                .cols = cols,
                .row_stride = stride,
                .block_rows = block_rows,
                .block_stride = block_step * stride,
        };
}

static void bind_matrix(Binder *b, const char *prefix, const char *original, const char *diffusers,
        uint64_t rows, uint64_t cols, LkMatrix *ret) {
        const H3Tensor *t = take(b, prefix, original, diffusers, 2, rows, cols);

        if (t)
                *ret = matrix_of(t, 0, t->entry->shape[0], t->entry->shape[0], t->entry->shape[0]);
}

static void bind_vector(Binder *b, const char *prefix, const char *original, const char *diffusers,
        uint64_t n, LkVector *ret) {
        const H3Tensor *t = take(b, prefix, original, diffusers, 1, n, 0);

        if (t)
                *ret = (LkVector){
                        .data = t->data, .type = h3_float_type(t->entry->type), .n = t->entry->shape[0]};
}

static void bind_qkv(Binder *b, const char *prefix, H3Attention *a) {
        static const char *const split[] = {"attn.to_q.weight", "attn.to_k.weight", "attn.to_v.weight"};
        LkMatrix *parts[] = {&a->q, &a->k, &a->v};
        uint64_t inner = b->c->inner, head_dim = b->c->head_dim;
        const H3Tensor *t;

        if (is_diffusers(b)) {
                for (size_t i = 0; i < 3; i++)
                        bind_matrix(b, prefix, split[i], split[i], inner, b->c->hidden, parts[i]);
                return;
        }
        t = take(b, prefix, "attn.qkv_proj.weight", "", 2, 3 * inner, b->c->hidden);
        if (!t || inner == 0)
                return;
        for (size_t i = 0; i < 3; i++)
                *parts[i] = b->order == H3_QKV_INTERLEAVED
                                    ? matrix_of(t, i * head_dim, inner, head_dim, 3 * head_dim)
                                    : matrix_of(t, i * inner, inner, inner, inner);
}

/* Original names keep [gate ; up], diffusers [up ; gate]. */
static void bind_mlp(Binder *b, const char *prefix, H3Mlp *m) {
        bool up_first = is_diffusers(b);
        uint64_t ffn = b->c->ffn;
        const H3Tensor *t;

        t = take(b, prefix, "mlp.fc1.weight", "ff.net.0.proj.weight", 2, 2 * ffn, b->c->hidden);
        if (t && ffn > 0) {
                m->gate = matrix_of(t, up_first ? ffn : 0, ffn, ffn, ffn);
                m->up = matrix_of(t, up_first ? 0 : ffn, ffn, ffn, ffn);
        }
        bind_matrix(b, prefix, "mlp.fc2.weight", "ff.net.2.weight", b->c->hidden, ffn, &m->down);
}

/* A bias of a curve file, which has the mean of the time embedding folded in and may say so in its name. */
static void bind_folded(Binder *b, const char *prefix, const char *original, const char *diffusers,
        const char *folded, const char *folded_diffusers, uint64_t n, LkVector *ret) {
        char name[NAME_SIZE];

        if (b->curve && find(b, prefix, folded, folded_diffusers, name))
                bind_vector(b, prefix, folded, folded_diffusers, n, ret);
        else
                bind_vector(b, prefix, original, diffusers, n, ret);
}

/* The table, and what some files keep beside it to fold LoRAs of the full model into theirs. */
static void bind_curve(Binder *b, H3Model *m) {
        const uint64_t rank = b->c->time_dim;
        const H3Tensor *t;
        H3Tensor *basis = h3_tensor_set_find(b->set, "adaln_basis"),
                 *mean = h3_tensor_set_find(b->set, "adaln_mean");

        for (size_t i = 0; i < ELEMENTSOF(curve_names); i++)
                if (h3_tensor_set_find(b->set, curve_names[i])) {
                        t = take(b, "", curve_names[i], curve_names[i], 2, b->c->curve_points, rank);
                        if (t && h3_is_float(t->entry->type))
                                m->curve = (LkVector){.data = t->data,
                                        .type = h3_float_type(t->entry->type),
                                        .n = t->entry->shape[0] * rank};
                        break;
                }
        if (basis)
                (void) take(b, "", "adaln_basis", "adaln_basis", 2, rank, 0);
        if (mean)
                (void) take(b, "", "adaln_mean", "adaln_mean", 1, 0, 0);
}

/* All blocks have one, or none has. */
static void bind_gate(Binder *b, const char *prefix, H3Attention *a) {
        static const char name[] = "attn.to_gate_compress.weight";

        if (b->gated)
                bind_matrix(b, prefix, name, name, b->c->inner, b->c->hidden, &a->gate);
}

static void bind_block(Binder *b, uint32_t layer, bool refiner, H3Block *block) {
        const H3Config *c = b->c;
        char prefix[64];

        (void) snprintf(prefix, sizeof(prefix), "%s%u.", block_prefix(b, refiner), layer);
        bind_vector(b, prefix, "norm1.weight", "norm1.weight", c->hidden, &block->norm1);
        bind_vector(b, prefix, "norm2.weight", "norm2.weight", c->hidden, &block->norm2);
        bind_qkv(b, prefix, &block->attn);
        bind_vector(b, prefix, "attn.q_norm.weight", "attn.norm_q.weight", c->head_dim, &block->attn.q_norm);
        bind_vector(b, prefix, "attn.k_norm.weight", "attn.norm_k.weight", c->head_dim, &block->attn.k_norm);
        bind_matrix(b, prefix, "attn.out_proj.weight", "attn.to_out.0.weight", c->hidden, c->inner,
                &block->attn.out);
        bind_mlp(b, prefix, &block->mlp);
        if (refiner)
                return;
        bind_gate(b, prefix, &block->attn);
        bind_matrix(b, prefix, "adaln_proj.linear.weight", "adaln_proj.linear.weight",
                6ull * H3_TAGS * c->hidden, c->time_dim, &block->adaln);
        bind_folded(b, prefix, "adaln_proj.linear.bias", "adaln_proj.linear.bias", "adaln_proj.folded_bias",
                "adaln_proj.folded_bias", 6ull * H3_TAGS * c->hidden, &block->adaln_bias);
}

static void bind_linear(Binder *b, const char *original, const char *diffusers, uint64_t rows, uint64_t cols,
        LkMatrix *ret, LkVector *ret_bias) {
        char weight[2][NAME_SIZE], bias[2][NAME_SIZE];

        (void) snprintf(weight[0], NAME_SIZE, "%s.weight", original);
        (void) snprintf(weight[1], NAME_SIZE, "%s.weight", diffusers);
        (void) snprintf(bias[0], NAME_SIZE, "%s.bias", original);
        (void) snprintf(bias[1], NAME_SIZE, "%s.bias", diffusers);
        bind_matrix(b, "", weight[0], weight[1], rows, cols, ret);
        bind_vector(b, "", bias[0], bias[1], rows, ret_bias);
}

static void bind_ends(Binder *b, H3Model *m) {
        const H3Config *c = b->c;
        uint64_t video = (uint64_t) c->video_channels * PATCH * PATCH;

        bind_linear(b, "video_patch_proj", "proj_in", c->hidden, video, &m->video_in, &m->video_in_bias);
        bind_linear(b, "audio_patch_proj", "audio_proj_in", c->hidden, c->audio_channels, &m->audio_in,
                &m->audio_in_bias);
        bind_linear(b, "condition_proj", "context_embedder", c->hidden, c->text_dim, &m->text_in,
                &m->text_in_bias);
        if (b->curve)
                bind_curve(b, m);
        else {
                bind_linear(b, "time_embedder.proj_in", "time_embedder.linear_1", c->time_hidden,
                        c->time_freq_dim, &m->time_1, &m->time_1_bias);
                bind_linear(b, "time_embedder.proj_out", "time_embedder.linear_2", c->time_dim,
                        c->time_hidden, &m->time_2, &m->time_2_bias);
        }
        bind_vector(b, "", "token_refiner.final_norm.weight", "token_refiner.final_norm.weight", c->hidden,
                &m->refiner_norm);
        bind_vector(b, "", "final_layer.norm.weight", "norm_out.norm.weight", c->hidden, &m->final_norm);
        bind_matrix(b, "", "final_layer.adaln_proj.linear.weight", "norm_out.linear.weight",
                2ull * c->hidden, c->time_dim, &m->final_adaln);
        bind_folded(b, "", "final_layer.adaln_proj.linear.bias", "norm_out.linear.bias",
                "final_layer.adaln_proj.folded_bias", "norm_out.folded_bias", 2ull * c->hidden,
                &m->final_adaln_bias);
        bind_linear(
                b, "final_layer.video_out", "proj_out", video, c->hidden, &m->video_out, &m->video_out_bias);
        bind_linear(b, "final_layer.audio_out", "audio_proj_out", c->audio_channels, c->hidden,
                &m->audio_out, &m->audio_out_bias);
}

static int report(Binder *b, Fault *f) {
        H3List extra = {};

        for (size_t i = 0; i < b->set->n_tensors; i++)
                if (!b->set->tensors[i].used)
                        h3_list_add(&extra, "%.150s", b->set->tensors[i].entry->name);
        if (b->c->layers == 0 && b->missing.count == 0)
                h3_list_add(&b->missing, "%s0.*", block_prefix(b, false));
        if (b->c->refiner_layers == 0)
                h3_list_add(&b->missing, "%s0.*", block_prefix(b, true));
        if (b->missing.count + b->wrong.count + extra.count == 0)
                return 0;

        return fault_set(f, -EINVAL, FAULT_INVALID_MODEL,
                "Not a complete H3 denoiser. Missing (%u): %s. Wrong shape (%u): %s. Not of this model "
                "(%u): %s. "
                "Give all files of one model and no others.",
                b->missing.count, b->missing.count ? b->missing.text : "none", b->wrong.count,
                b->wrong.count ? b->wrong.text : "none", extra.count, extra.count ? extra.text : "none");
}

/* What is left after the quantised matrices and the tensors beside them were found. */
static int check_types(const H3TensorSet *s, Fault *f) {
        for (size_t i = 0; i < s->n_tensors; i++) {
                const H3Tensor *t = s->tensors + i;

                if (t->matrix_type || t->used || h3_is_float(t->entry->type))
                        continue;
                switch (t->entry->type) {
                case ST_I8:
                case ST_U8:
                case ST_F8_E4M3:
                case ST_F8_E5M2:
                case ST_F8_E8M0:
                        return fault_set(f, -EOPNOTSUPP, FAULT_NOT_SUPPORTED,
                                "%.200s: tensor %.200s is %s and belongs to no quantised matrix that this "
                                "version runs. Use the bf16 model.",
                                t->file, t->entry->name, st_type_name(t->entry->type));
                default:
                        return fault_set(f, -EINVAL, FAULT_INVALID_MODEL,
                                "%.200s: tensor %.200s is %s; weights are F32, BF16 or F16, or quantised.",
                                t->file, t->entry->name, st_type_name(t->entry->type));
                }
        }
        return 0;
}

int h3_model_bind(H3TensorSet *s, H3QkvOrder order, H3Model *m, Fault *f) {
        Binder b = {.set = s, .order = order, .c = &m->config};
        int r;

        r = h3_quant_resolve(s, &b.missing, &b.wrong, f);
        if (r >= 0)
                r = check_types(s, f);
        if (r >= 0)
                r = read_config(&b, f);
        if (r < 0)
                return r;

        m->blocks = calloc(m->config.layers ? m->config.layers : 1, sizeof(*m->blocks));
        m->refiner = calloc(m->config.refiner_layers ? m->config.refiner_layers : 1, sizeof(*m->refiner));
        if (!m->blocks || !m->refiner)
                return fault_set(
                        f, -ENOMEM, FAULT_DOES_NOT_FIT, "No memory for the model; free some and try again.");

        for (size_t i = 0; i < s->n_tensors; i++)
                b.gated = b.gated || strstr(s->tensors[i].entry->name, ".attn.to_gate_compress.");
        m->gated = b.gated;
        bind_ends(&b, m);
        for (uint32_t i = 0; i < m->config.layers; i++)
                bind_block(&b, i, false, m->blocks + i);
        for (uint32_t i = 0; i < m->config.refiner_layers; i++)
                bind_block(&b, i, true, m->refiner + i);
        return report(&b, f);
}
