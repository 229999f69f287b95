/* SPDX-License-Identifier: Apache-2.0 */
/* Names and shapes of h3.md 6, original, diffusers and Comfy names being the same. A size of 0 is one that
 * could not be read because its tensor is missing: that one is reported, others are not blamed for it. */

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "service/h3/audio-vae-private.h"
#include "service/h3/number.h"
#include "service/shared/cleanup.h"

#define NAME_SIZE 128
#define PREFIX_SIZE 64
#define DIM_MAX 65536
#define KERNEL_MAX 64
#define HOP_MAX 65536
#define MLP_RATIO 2

static const uint32_t unit_dilations[AUDIO_UNITS] = {1, 3, 9};

typedef struct Binder {
        H3TensorSet *set;
        H3AudioVae *v;
        H3AudioConfig *c;
        H3List missing, wrong;
        bool pairs, folded; /* kinds of weights seen */
        bool no_memory;
} Binder;

static const char *format_shape(const StTensor *t, char *buf, size_t size) {
        size_t n = (size_t) snprintf(buf, size, "[");

        for (uint32_t i = 0; i < t->n_dims && n < size; i++)
                n += (size_t) snprintf(buf + n, size - n, "%s%" PRIu64, i ? ", " : "", t->shape[i]);
        if (n < size)
                (void) snprintf(buf + n, size - n, "]");
        return buf;
}

/* The tensor of that name if it has the shape [a, b, c] cut to n_dims; 0: a size that is not known. */
static H3Tensor *take(Binder *b, const char *name, uint32_t n_dims, uint64_t x, uint64_t y, uint64_t z) {
        const uint64_t shape[] = {x, y, z};
        H3Tensor *t = h3_tensor_set_find(b->set, name);
        char is[120];
        bool same;

        if (!t) {
                h3_list_add(&b->missing, "%s", name);
                return NULL;
        }
        t->used = true;
        same = t->entry->n_dims == n_dims && h3_is_float(t->entry->type);
        for (uint32_t i = 0; i < n_dims && same; i++) {
                if (shape[i] == 0)
                        return NULL;
                same = t->entry->shape[i] == shape[i];
        }
        if (same)
                return t;
        h3_list_add(&b->wrong, "%s is %s %s", name, st_type_name(t->entry->type),
                format_shape(t->entry, is, sizeof(is)));
        return NULL;
}

static LkVector vector_of(const H3Tensor *t) {
        uint64_t n = 1;

        if (!t)
                return (LkVector){};
        for (uint32_t i = 0; i < t->entry->n_dims; i++)
                n *= t->entry->shape[i];
        return (LkVector){t->data, h3_float_type(t->entry->type), n};
}

static LkVector bind_vector(Binder *b, const char *prefix, const char *suffix, uint64_t n) {
        char name[NAME_SIZE];

        (void) snprintf(name, sizeof(name), "%s%s", prefix, suffix);
        return vector_of(take(b, name, 1, n, 0, 0));
}

/* alpha of the encoder's snakes: [1, n, 1] */
static LkVector bind_alpha(Binder *b, const char *prefix, const char *suffix, uint64_t n) {
        char name[NAME_SIZE];

        (void) snprintf(name, sizeof(name), "%s%s.alpha", prefix, suffix);
        return vector_of(take(b, name, 3, 1, n, 1));
}

static LkMatrix matrix_of(const void *data, LkType type, uint64_t rows, uint64_t cols) {
        return (LkMatrix){.data = data,
                .type = type,
                .rows = rows,
                .cols = cols,
                .row_stride = cols * lk_type_size(type),
                .block_rows = rows,
                .block_stride = rows * cols * lk_type_size(type)};
}

/* Where a pair of weight norm has its norms and its directions. */
static const char *const pair_names[][2] = {
        {".weight_g", ".weight_v"},
        {".parametrizations.weight.original0", ".parametrizations.weight.original1"},
};

static H3Tensor *find(const Binder *b, const char *prefix, const char *suffix) {
        char name[NAME_SIZE];

        (void) snprintf(name, sizeof(name), "%s%s", prefix, suffix);
        return h3_tensor_set_find(b->set, name);
}

/* A weight [x, y, z] as it is in the file, or folded; NULL if it cannot be had. */
static const void *bind_weight(
        Binder *b, const char *prefix, uint64_t x, uint64_t y, uint64_t z, LkType *ret_type) {
        const H3Tensor *direction, *norm;
        char name[NAME_SIZE];
        const void *w;

        for (size_t i = 0; i < ELEMENTSOF(pair_names); i++) {
                if (!find(b, prefix, pair_names[i][0]) && !find(b, prefix, pair_names[i][1]))
                        continue;
                (void) snprintf(name, sizeof(name), "%s%s", prefix, pair_names[i][0]);
                norm = take(b, name, 3, x, 1, 1);
                (void) snprintf(name, sizeof(name), "%s%s", prefix, pair_names[i][1]);
                direction = take(b, name, 3, x, y, z);
                b->pairs = true;
                if (!norm || !direction)
                        return NULL;
                w = audio_fold(b->v, norm, direction, x, y * z);
                b->no_memory = b->no_memory || !w;
                *ret_type = LK_F32;
                return w;
        }

        (void) snprintf(name, sizeof(name), "%s.weight", prefix);
        direction = take(b, name, 3, x, y, z);
        b->folded = b->folded || direction;
        if (!direction)
                return NULL;
        *ret_type = h3_float_type(direction->entry->type);
        return direction->data;
}

/* Dimensions of a weight whatever its layout; all 0 if there is none. */
static void weight_shape(Binder *b, const char *prefix, uint32_t ret[3]) {
        const H3Tensor *t = find(b, prefix, pair_names[0][1]);

        if (!t)
                t = find(b, prefix, pair_names[1][1]);
        if (!t)
                t = find(b, prefix, ".weight");
        for (uint32_t i = 0; i < 3; i++)
                ret[i] = t && t->entry->n_dims == 3 && t->entry->shape[i] <= DIM_MAX
                                 ? (uint32_t) t->entry->shape[i]
                                 : 0;
        if (ret[2] > KERNEL_MAX)
                ret[2] = 0;
        if (t && (ret[0] == 0 || ret[1] == 0 || ret[2] == 0))
                h3_list_add(&b->wrong, "%s (sizes of 1 to %d, kernels to %d)", t->entry->name, DIM_MAX,
                        KERNEL_MAX);
}

static void bind_conv(Binder *b, const char *prefix, uint32_t out, uint32_t in, uint32_t kernel,
        uint32_t stride, uint32_t dilation, uint32_t pad, AudioConv *ret) {
        LkType type = LK_F32;
        const void *w = bind_weight(b, prefix, out, in, kernel, &type);

        *ret = (AudioConv){
                .in = in, .out = out, .kernel = kernel, .stride = stride, .dilation = dilation, .pad = pad};
        if (w)
                ret->w = matrix_of(w, type, out, (uint64_t) in * kernel);
}

/* With a bias and a padding that keeps the length. */
static void bind_same(Binder *b, const char *prefix, uint32_t out, uint32_t in, uint32_t kernel,
        uint32_t dilation, AudioConv *ret) {
        bind_conv(
                b, prefix, out, in, kernel, 1, dilation, kernel > 0 ? (kernel - 1) / 2 * dilation : 0, ret);
        ret->bias = bind_vector(b, prefix, ".bias", out);
}

static void bind_activation(Binder *b, const char *prefix, uint32_t channels, AudioActivation *ret) {
        char name[NAME_SIZE];

        ret->alpha = bind_vector(b, prefix, ".act.alpha", channels);
        ret->beta = bind_vector(b, prefix, ".act.beta", channels);
        (void) snprintf(name, sizeof(name), "%s.upsample.filter", prefix);
        ret->up = vector_of(take(b, name, 3, 1, 1, LK_ALIAS_FREE_TAPS));
        (void) snprintf(name, sizeof(name), "%s.downsample.lowpass.filter", prefix);
        ret->down = vector_of(take(b, name, 3, 1, 1, LK_ALIAS_FREE_TAPS));
}

static void bind_block(Binder *b, uint32_t index, uint32_t channels, AudioBlock *ret) {
        const H3AudioConfig *c = b->c;
        uint32_t kernel = c->block_kernels[index % H3_AUDIO_BLOCKS];
        char prefix[PREFIX_SIZE];

        for (uint32_t i = 0; i < AUDIO_CONVS; i++) {
                uint32_t dilation = i % 2 == 0 ? c->block_dilations[index % H3_AUDIO_BLOCKS][i / 2] : 1;

                (void) snprintf(
                        prefix, sizeof(prefix), "decoder.resblocks.%u.convs%u.%u", index, i % 2 + 1, i / 2);
                bind_same(b, prefix, channels, channels, kernel, dilation, ret->conv + i);
                (void) snprintf(prefix, sizeof(prefix), "decoder.resblocks.%u.activations.%u", index, i);
                bind_activation(b, prefix, channels, ret->act + i);
        }
}

static void bind_stage(Binder *b, uint32_t index, AudioStage *s) {
        const H3AudioConfig *c = b->c;
        uint32_t in = c->decoder_dim >> index, kernel = c->decoder_kernels[index];
        char prefix[PREFIX_SIZE];
        LkType type = LK_F32;
        const void *w;
        LkVector bias;

        s->channels = in / 2;
        s->rate = c->decoder_rates[index];
        s->crop = (kernel - s->rate) / 2;
        (void) snprintf(prefix, sizeof(prefix), "decoder.ups.%u.0", index);
        w = bind_weight(b, prefix, in, s->channels, kernel, &type);
        bias = bind_vector(b, prefix, ".bias", s->channels);
        if (w && bias.data)
                b->no_memory = b->no_memory || audio_fold_up(b->v, w, type, &bias, in, kernel, s) < 0;
        for (uint32_t i = 0; i < H3_AUDIO_BLOCKS; i++)
                bind_block(b, index * H3_AUDIO_BLOCKS + i, s->channels, s->blocks + i);
}

static void bind_decoder(Binder *b) {
        const H3AudioConfig *c = b->c;
        H3AudioWeights *w = b->v->weights;
        uint32_t last = c->decoder_dim >> c->decoder_stages;

        bind_same(b, "dec_in_proj", c->latent_dim, c->channels, 1, 1, &w->dec_in);
        bind_same(b, "decoder.conv_pre", c->decoder_dim, c->latent_dim, 7, 1, &w->dec_pre);
        for (uint32_t i = 0; i < c->decoder_stages; i++)
                bind_stage(b, i, w->stages + i);
        bind_activation(b, "decoder.activation_post", last, &w->post);
        bind_conv(b, "decoder.conv_post", 1, last, 7, 1, 1, 3, &w->dec_post); /* no bias */
}

static void bind_encoder_stage(Binder *b, uint32_t index, AudioEncoderStage *s) {
        uint32_t in = b->c->encoder_dim << index, rate = b->c->encoder_rates[index];
        char prefix[PREFIX_SIZE], name[PREFIX_SIZE + 8];

        for (uint32_t i = 0; i < AUDIO_UNITS; i++) {
                AudioUnit *u = s->units + i;

                (void) snprintf(prefix, sizeof(prefix), "encoder.block.%u.block.%u.block.", index + 1, i);
                u->alpha[0] = bind_alpha(b, prefix, "0", in);
                (void) snprintf(name, sizeof(name), "%s1", prefix);
                bind_same(b, name, in, in, 7, unit_dilations[i], u->conv);
                u->alpha[1] = bind_alpha(b, prefix, "2", in);
                (void) snprintf(name, sizeof(name), "%s3", prefix);
                bind_same(b, name, in, in, 1, 1, u->conv + 1);
        }
        (void) snprintf(prefix, sizeof(prefix), "encoder.block.%u.block.", index + 1);
        s->alpha = bind_alpha(b, prefix, "3", in);
        (void) snprintf(name, sizeof(name), "%s4", prefix);
        bind_conv(b, name, 2 * in, in, 2 * rate, rate, 1, (rate + 1) / 2, &s->down);
        s->down.bias = bind_vector(b, name, ".bias", 2ull * in);
}

static void bind_linear(Binder *b, const char *prefix, uint64_t out, uint64_t in, AudioLinear *ret) {
        char name[NAME_SIZE];
        const H3Tensor *t;

        (void) snprintf(name, sizeof(name), "%s.weight", prefix);
        t = take(b, name, 2, out, in, 0);
        if (t)
                ret->w = matrix_of(t->data, h3_float_type(t->entry->type), out, in);
        ret->bias = bind_vector(b, prefix, ".bias", out);
}

/* mean_proj and logs_proj: convolutions of one tap */
static void bind_head(Binder *b, const char *prefix, uint64_t n, AudioLinear *ret) {
        char name[NAME_SIZE];
        const H3Tensor *t;

        (void) snprintf(name, sizeof(name), "%s.weight", prefix);
        t = take(b, name, 3, n, n, 1);
        if (t)
                ret->w = matrix_of(t->data, h3_float_type(t->entry->type), n, n);
        ret->bias = bind_vector(b, prefix, ".bias", n);
}

static AudioNorm bind_norm(Binder *b, const char *prefix, uint64_t n) {
        return (AudioNorm){bind_vector(b, prefix, ".weight", n), bind_vector(b, prefix, ".bias", n)};
}

/* One matrix for Q, K and V has a bias in three parts. */
static void bind_qkv(Binder *b, uint64_t n) {
        static const char *const parts[] = {".q_bias", ".zero_k_bias", ".v_bias"};
        AudioLinear *qkv = &b->v->weights->qkv;
        const H3Tensor *t = take(b, "pre_block.attn.qkv.weight", 2, 3 * n, n, 0);
        float *bias = audio_own(b->v, 3 * n);

        b->no_memory = b->no_memory || !bias;
        for (size_t i = 0; i < ELEMENTSOF(parts); i++) {
                LkVector part = bind_vector(b, "pre_block.attn", parts[i], n);

                for (uint64_t k = 0; bias && part.data && k < n; k++)
                        bias[i * n + k] = h3_number(part.data, part.type, k);
        }
        qkv->bias = (LkVector){bias, LK_F32, 3 * n};
        if (t)
                qkv->w = matrix_of(t->data, h3_float_type(t->entry->type), 3 * n, n);
}

/* The mean over heads, then over neighbours inside the head until `channels` numbers are left, as one
 * matrix.
 */
static void make_pool(Binder *b) {
        const H3AudioConfig *c = b->c;
        uint64_t n = c->latent_dim, head_dim = n / c->heads, group = head_dim / c->channels;
        float *pool = audio_own(b->v, c->channels * n);

        b->no_memory = b->no_memory || !pool;
        for (uint64_t row = 0; pool && row < c->channels; row++)
                for (uint64_t k = 0; k < n; k++)
                        pool[row * n + k] =
                                k % head_dim / group == row ? 1.0f / (float) (c->heads * group) : 0;
        b->v->weights->pool = matrix_of(pool, LK_F32, c->channels, n);
}

static void bind_encoder(Binder *b) {
        const H3AudioConfig *c = b->c;
        H3AudioWeights *w = b->v->weights;
        uint32_t last = c->encoder_dim << c->encoder_stages, n = c->channels;
        char name[PREFIX_SIZE];

        bind_same(b, "encoder.block.0", c->encoder_dim, 1, 7, 1, &w->enc_first);
        for (uint32_t i = 0; i < c->encoder_stages; i++)
                bind_encoder_stage(b, i, w->enc + i);
        (void) snprintf(name, sizeof(name), "%u", c->encoder_stages + 1);
        w->enc_alpha = bind_alpha(b, "encoder.block.", name, last);
        (void) snprintf(name, sizeof(name), "encoder.block.%u", c->encoder_stages + 2);
        bind_same(b, name, c->latent_dim, last, 3, 1, &w->enc_last);

        w->norm1 = bind_norm(b, "pre_block.norm1", c->latent_dim);
        w->norm2 = bind_norm(b, "pre_block.norm2", n);
        w->norm3 = bind_norm(b, "pre_block.norm3", c->latent_dim);
        w->mlp_norm = bind_norm(b, "pre_block.mlp.norm", n);
        bind_linear(b, "pre_block.proj", n, c->latent_dim, &w->proj);
        bind_linear(b, "pre_block.attn.proj", n, n, &w->attn_proj);
        bind_linear(b, "pre_block.mlp.w0", MLP_RATIO * n, n, &w->w0);
        bind_linear(b, "pre_block.mlp.w1", MLP_RATIO * n, n, &w->w1);
        bind_linear(b, "pre_block.mlp.w2", n, MLP_RATIO * n, &w->w2);
        bind_head(b, "mean_proj", n, &w->mean);
        bind_head(b, "logs_proj", n, &w->logs);
        if (c->latent_dim > 0)
                bind_qkv(b, c->latent_dim);
        if (c->heads > 0)
                make_pool(b);
}

static bool has_prefix(const H3TensorSet *s, const char *prefix) {
        for (size_t i = 0; i < s->n_tensors; i++)
                if (strncmp(s->tensors[i].entry->name, prefix, strlen(prefix)) == 0)
                        return true;
        return false;
}

/* Numbers n for which there are tensors "<format of n>...", from `first` on. */
static uint32_t count(Binder *b, const char *format_prefix, uint32_t first) {
        char prefix[PREFIX_SIZE];
        uint32_t n = 0;

        do
                (void) snprintf(prefix, sizeof(prefix), "%s%u.", format_prefix, first + n);
        while (has_prefix(b->set, prefix) && ++n <= H3_AUDIO_STAGES_MAX + 2);
        return n;
}

static void read_decoder_sizes(Binder *b) {
        H3AudioConfig *c = b->c;
        uint32_t shape[3];
        char name[PREFIX_SIZE];

        weight_shape(b, "dec_in_proj", shape);
        c->channels = shape[1];
        weight_shape(b, "decoder.conv_pre", shape);
        c->decoder_dim = shape[0];
        c->latent_dim = shape[1];
        c->decoder_stages = count(b, "decoder.ups.", 0);
        if (c->decoder_stages == 0 || c->decoder_stages > H3_AUDIO_STAGES_MAX ||
                c->decoder_dim % (1u << c->decoder_stages) != 0) {
                h3_list_add(&b->wrong, "%u stages decoder.ups.* of %u channels, halved in each (1 to %d)",
                        c->decoder_stages, c->decoder_dim, H3_AUDIO_STAGES_MAX);
                c->decoder_stages = 0;
        }
        for (uint32_t i = 0; i < c->decoder_stages; i++) {
                (void) snprintf(name, sizeof(name), "decoder.ups.%u.0", i);
                weight_shape(b, name, shape);
                c->decoder_kernels[i] = shape[2];
        }
        for (uint32_t i = 0; i < H3_AUDIO_BLOCKS; i++) {
                (void) snprintf(name, sizeof(name), "decoder.resblocks.%u.convs1.0", i);
                weight_shape(b, name, shape);
                c->block_kernels[i] = shape[2];
                if (shape[2] > 0 && shape[2] % 2 == 0)
                        h3_list_add(&b->wrong, "%s (kernel %u, expected an odd one)", name, shape[2]);
        }
}

static void read_encoder_sizes(Binder *b) {
        H3AudioConfig *c = b->c;
        uint32_t blocks = count(b, "encoder.block.", 0), shape[3];
        char name[PREFIX_SIZE];

        weight_shape(b, "mean_proj", shape);
        if (c->channels == 0)
                c->channels = shape[0];
        weight_shape(b, "encoder.block.0", shape);
        c->encoder_dim = shape[0];
        if (blocks < 4 || blocks - 3 > H3_AUDIO_STAGES_MAX ||
                (uint64_t) c->encoder_dim << (blocks - 3) > DIM_MAX) {
                h3_list_add(&b->wrong, "%u parts encoder.block.* of %u channels, doubled in each (4 to %d)",
                        blocks, c->encoder_dim, H3_AUDIO_STAGES_MAX + 3);
                return;
        }
        c->encoder_stages = blocks - 3;
        (void) snprintf(name, sizeof(name), "encoder.block.%u", blocks - 1);
        weight_shape(b, name, shape);
        if (c->latent_dim == 0)
                c->latent_dim = shape[0];
        for (uint32_t i = 0; i < c->encoder_stages; i++) {
                (void) snprintf(name, sizeof(name), "encoder.block.%u.block.4", i + 1);
                weight_shape(b, name, shape);
                c->encoder_rates[i] = shape[2] / 2;
        }
}

static uint64_t product(const uint32_t *rates, uint32_t n) {
        uint64_t p = 1;

        for (uint32_t i = 0; i < n && p <= HOP_MAX; i++)
                p *= rates[i];
        return p;
}

static void check_hop(Binder *b) {
        H3AudioConfig *c = b->c;
        uint64_t encoder = product(c->encoder_rates, c->encoder_stages),
                 decoder = product(c->decoder_rates, c->decoder_stages),
                 hop = c->decoder_stages > 0 ? decoder : encoder;

        if (hop > HOP_MAX || (c->encoder_stages > 0 && c->decoder_stages > 0 && encoder != decoder))
                h3_list_add(&b->wrong, "the rates (%" PRIu64 " samples per latent in, %" PRIu64 " out)",
                        encoder, decoder);
        c->hop = (uint32_t) hop;
}

static void check_channels(Binder *b) {
        if (b->c->channels <= H3_AUDIO_CHANNELS_MAX)
                return;
        h3_list_add(&b->wrong, "%u latent channels (at most %d)", b->c->channels, H3_AUDIO_CHANNELS_MAX);
        b->c->channels = 0;
}

static int report(Binder *b, Fault *f) {
        H3List extra = {};

        for (size_t i = 0; i < b->set->n_tensors; i++)
                if (!b->set->tensors[i].used)
                        h3_list_add(&extra, "%.100s", b->set->tensors[i].entry->name);
        if (b->missing.count + b->wrong.count + extra.count > 0)
                return fault_set(f, -EINVAL, FAULT_INVALID_MODEL,
                        "Not a complete H3 audio VAE. Missing (%u): %s. Wrong (%u): %s. Not of this model "
                        "(%u): %s. Give all files of one model and no others.",
                        b->missing.count, b->missing.count ? b->missing.text : "none", b->wrong.count,
                        b->wrong.count ? b->wrong.text : "none", extra.count,
                        extra.count ? extra.text : "none");
        if (b->no_memory)
                return fault_set(f, -ENOMEM, FAULT_DOES_NOT_FIT,
                        "No memory for the audio VAE's folded weights; free some and try again.");
        return 0;
}

int audio_bind(H3TensorSet *s, H3AudioVae *v, Fault *f) {
        Binder b = {.set = s, .v = v, .c = &v->config};
        H3Statistics stored;
        int r;

        v->has_decoder = has_prefix(s, "decoder.") || has_prefix(s, "dec_in_proj.");
        v->has_encoder = has_prefix(s, "encoder.") || has_prefix(s, "pre_block.");
        if (!v->has_decoder && !v->has_encoder)
                return fault_set(f, -EINVAL, FAULT_INVALID_MODEL,
                        "Not an H3 audio VAE: it has neither tensors decoder.* nor encoder.*; give the "
                        "files "
                        "of the folder audio_vae.");

        if (v->has_decoder)
                read_decoder_sizes(&b);
        if (v->has_encoder)
                read_encoder_sizes(&b);
        check_channels(&b);
        r = h3_statistics_read(s, &stored, f);
        if (r >= 0)
                r = audio_config_read(s->config, s->config_size, &stored, &v->config, &b.wrong, f);
        if (r < 0)
                return r;
        check_hop(&b);
        if (v->has_decoder)
                bind_decoder(&b);
        if (v->has_encoder)
                bind_encoder(&b);
        v->layout = b.pairs ? "weight norm" : "folded";
        v->n_tensors = (uint32_t) s->n_tensors;
        for (size_t i = 0; i < s->n_tensors; i++)
                v->weight_bytes += s->tensors[i].entry->size;
        return report(&b, f);
}
