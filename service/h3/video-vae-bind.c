/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "service/h3/number.h"
#include "service/h3/video-vae-private.h"
#include "service/shared/cleanup.h"

/* Names and shapes of h3.md 5.1 and 5.2. A dimension of 0 is one that could not be read because its tensor
 * is missing: that one is reported, others are not blamed for it. Limits keep all later arithmetic far from
 * overflow. */

#define CHANNELS_MAX 16384
#define HIDDEN_MAX 65536
#define HEAD_DIM_MAX 256 /* of ops->attention */
#define FFN_MAX 262144
#define LAYERS_MAX 1024
#define BLOCKS_MAX 16
#define REGISTERS_MAX 256
#define NAME_SIZE 128
#define TOKEN_PIXELS (3 * H3_VIDEO_TOKEN_FRAMES * H3_VIDEO_RATIO * H3_VIDEO_RATIO)

typedef struct Binder {
        H3TensorSet *set;
        H3VideoVae *m;
        H3VideoConfig *c;
        bool diffusers;
        H3List missing, wrong;
        float *owned; /* where the next copy goes */
} Binder;

typedef struct Name {
        char text[NAME_SIZE];
} Name;

static Name name(const char *format, ...) __attribute__((format(printf, 1, 2)));

static Name name(const char *format, ...) {
        Name n;
        va_list ap;

        va_start(ap, format);
        (void) vsnprintf(n.text, sizeof(n.text), format, ap);
        va_end(ap);
        return n;
}

static const char *pick(const Binder *b, const char *original, const char *diffusers) {
        return b->diffusers ? diffusers : original;
}

static uint64_t dimension(const H3Tensor *t, uint32_t axis) {
        return t->entry->shape[axis] * (t->matrix_type == LK_NVFP4 && axis == 1 ? 2 : 1);
}

static void report_shape(Binder *b, const H3Tensor *t, uint32_t n_dims, const uint64_t *dims) {
        char text[2][100];
        const uint64_t *shapes[] = {t->entry->shape, dims};
        const uint32_t counts[] = {t->entry->n_dims, n_dims};

        for (size_t i = 0; i < 2; i++) {
                size_t n = 0;

                text[i][0] = '\0';
                for (uint32_t k = 0; k < counts[i] && n < sizeof(text[i]); k++)
                        n += (size_t) snprintf(
                                text[i] + n, sizeof(text[i]) - n, "%s%" PRIu64, k ? ", " : "", shapes[i][k]);
        }
        h3_list_add(&b->wrong, "%.100s is [%s], expected [%s]", t->entry->name, text[0], text[1]);
}

/* Finds a tensor, marks it as wanted and checks its shape; a dimension of 0 is not known. NULL after
 * reporting. */
static const H3Tensor *take(Binder *b, Name n, uint32_t n_dims, const uint64_t *dims) {
        H3Tensor *t = h3_tensor_set_find(b->set, n.text);
        bool same;

        if (!t) {
                h3_list_add(&b->missing, "%s", n.text);
                return NULL;
        }
        t->used = true;
        same = t->entry->n_dims == n_dims;
        for (uint32_t i = 0; same && i < n_dims; i++)
                same = dims[i] == 0 || dimension(t, i) == dims[i];
        if (same)
                return t;
        report_shape(b, t, n_dims, dims);
        return NULL;
}

/* One size of the configuration: dimension `axis` of a tensor of n_dims. 0 if it cannot be told. */
static uint32_t size_of(Binder *b, Name n, uint32_t n_dims, uint32_t axis, uint64_t max) {
        const H3Tensor *t = h3_tensor_set_find(b->set, n.text);

        if (!t || t->entry->n_dims != n_dims)
                return 0;
        if (dimension(t, axis) >= 1 && dimension(t, axis) <= max)
                return (uint32_t) dimension(t, axis);
        h3_list_add(&b->wrong, "%s: dimension %u is %" PRIu64 " (must be 1 to %" PRIu64 ")", n.text, axis,
                dimension(t, axis), max);
        return 0;
}

/* Numbered parts: how many there are from 0 on, by one tensor that each has. */
static uint32_t count_parts(Binder *b, const char *prefix, const char *suffix, uint32_t max) {
        uint32_t n = 0;

        while (n < max && h3_tensor_set_find(b->set, name("%s%u%s", prefix, n, suffix).text))
                n++;
        return n;
}

static bool has_prefix(const H3TensorSet *s, const char *prefix) {
        for (size_t i = 0; i < s->n_tensors; i++)
                if (strncmp(s->tensors[i].entry->name, prefix, strlen(prefix)) == 0)
                        return true;
        return false;
}

static LkVector vector_of(const H3Tensor *t) {
        return (LkVector){.data = t->data, .type = h3_float_type(t->entry->type), .n = t->entry->shape[0]};
}

static void bind_vector(Binder *b, Name n, uint64_t size, LkVector *ret) {
        const H3Tensor *t = take(b, n, 1, &size);

        if (t)
                *ret = vector_of(t);
}

static void bind_norm(Binder *b, const char *prefix, uint64_t size, VideoNorm *ret) {
        bind_vector(b, name("%s.weight", prefix), size, &ret->weight);
        bind_vector(b, name("%s.bias", prefix), size, &ret->bias);
}

/* Rows of a tensor as a matrix, `rows` of them from row `first`, in blocks of block_rows that start every
 * block_step rows. */
static LkMatrix matrix_of(Binder *b, const H3Tensor *t, uint64_t cols, uint64_t first, uint64_t rows,
        uint64_t block_rows, uint64_t block_step) {
        LkType type = t->matrix_type ? t->matrix_type : h3_float_type(t->entry->type);
        uint64_t stride = lk_row_size(type, cols);
        LkQuant quant = t->quant;

        quant.first_row = t->matrix_type ? first : 0;
        b->m->matrix_types |= 1u << type;
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

/* kernel: taps along each axis. */
static void bind_conv(
        Binder *b, const char *prefix, uint64_t out, uint64_t in, uint64_t kernel, VideoLinear *ret) {
        const uint64_t dims[] = {out, in, kernel, kernel, kernel};
        const H3Tensor *t = take(b, name("%s.weight", prefix), 5, dims);

        if (t && out > 0 && in > 0)
                ret->w = matrix_of(b, t, in * kernel * kernel * kernel, 0, out, out, out);
        bind_vector(b, name("%s.bias", prefix), out, &ret->bias);
}

static void bind_linear(Binder *b, const char *prefix, uint64_t rows, uint64_t cols, VideoLinear *ret) {
        const uint64_t dims[] = {rows, cols};
        const H3Tensor *t = take(b, name("%s.weight", prefix), 2, dims);

        if (t && rows > 0 && cols > 0)
                ret->w = matrix_of(b, t, cols, 0, rows, rows, rows);
        bind_vector(b, name("%s.bias", prefix), rows, &ret->bias);
}

/* n numbers of a tensor from element `first` on, as f32 of our own. */
static const float *copy_numbers(Binder *b, const H3Tensor *t, uint64_t first, uint64_t n) {
        float *to = b->owned;

        b->owned += n;
        for (uint64_t i = 0; t && i < n; i++)
                to[i] = h3_number(t->data, h3_float_type(t->entry->type), first + i);
        return to;
}

/* ------------------------------------------------------------------------------------ encoder */

static Name blocks_of(const Binder *b, uint32_t level) {
        return name("encoder.%s.%u.%s.", pick(b, "down", "down_blocks"), level, pick(b, "block", "resnets"));
}

static void read_encoder_config(Binder *b) {
        H3VideoConfig *c = b->c;

        for (uint32_t i = 0; i < H3_VIDEO_LEVELS; i++) {
                Name prefix = blocks_of(b, i);

                c->channels[i] = size_of(b, name("%s0.conv1.weight", prefix.text), 5, 0, CHANNELS_MAX);
                if (c->channels[i] % c->groups != 0)
                        h3_list_add(&b->wrong, "level %u has %u channels, no multiple of %u groups", i,
                                c->channels[i], c->groups);
                if (i == 0)
                        c->level_blocks = count_parts(b, prefix.text, ".conv1.weight", BLOCKS_MAX);
        }
}

static void bind_res_block(
        Binder *b, uint32_t level, uint32_t i, uint64_t in, uint64_t out, VideoResBlock *ret) {
        Name p = name("%s%u", blocks_of(b, level).text, i);

        bind_norm(b, name("%s.norm1", p.text).text, in, &ret->norm1);
        bind_conv(b, name("%s.conv1", p.text).text, out, in, 3, &ret->conv1);
        bind_norm(b, name("%s.norm2", p.text).text, out, &ret->norm2);
        bind_conv(b, name("%s.conv2", p.text).text, out, out, 3, &ret->conv2);
        if (in != out)
                bind_conv(b, name("%s.%s", p.text, pick(b, "nin_shortcut", "conv_shortcut")).text, out, in,
                        1, &ret->shortcut);
}

static int bind_encoder(Binder *b, Fault *f) {
        const H3VideoConfig *c = b->c;
        uint64_t in = c->channels[0], moments = 2ull * c->latent_channels;

        bind_conv(b, "encoder.conv_in", in, 3, 3, &b->m->conv_in);
        for (uint32_t i = 0; i < H3_VIDEO_LEVELS; i++) {
                VideoLevel *l = b->m->levels + i;

                l->blocks = calloc(c->level_blocks ? c->level_blocks : 1, sizeof(*l->blocks));
                if (!l->blocks)
                        return fault_set(f, -ENOMEM, FAULT_DOES_NOT_FIT,
                                "No memory for the model; free some and try again.");
                for (uint32_t k = 0; k < c->level_blocks; k++, in = c->channels[i])
                        bind_res_block(b, i, k, in, c->channels[i], l->blocks + k);
                if (video_space_stride[i] == 2)
                        bind_conv(b,
                                name("encoder.%s.%u.%s", pick(b, "down", "down_blocks"), i,
                                        pick(b, "downsample.conv", "downsamplers.0.conv"))
                                        .text,
                                in, in, 3, &l->down);
        }
        bind_norm(b, "encoder.norm_out", in, &b->m->norm_out);
        bind_conv(b, "encoder.conv_out", moments, in, 3, &b->m->conv_out);
        bind_conv(b, "quant_conv", moments, moments, 1, &b->m->quant);
        return 0;
}

/* ------------------------------------------------------------------------------------ decoder */

static void read_decoder_config(Binder *b, const VideoSaid *said) {
        H3VideoConfig *c = b->c;

        c->hidden = size_of(b, name("%s", pick(b, "decoder.x_embedder.weight", "decoder.proj_in.weight")), 2,
                0, HIDDEN_MAX);
        c->ffn = size_of(b,
                name("decoder.transformer_blocks.0.%s", pick(b, "ff.w2.weight", "ff.net.2.weight")), 2, 1,
                FFN_MAX);
        c->registers = size_of(b, name("decoder.register_tokens"), 3, 1, REGISTERS_MAX);
        c->layers = count_parts(b, "decoder.transformer_blocks.", ".norm1.weight", LAYERS_MAX);
        c->head_dim = said->head_dim;
        c->heads = c->hidden / c->head_dim;
        c->rope_freqs = c->head_dim * 3 / 4 / 6; /* rope on 3/4 of a head, in pairs, over three axes */
        if (c->head_dim % 8 != 0 || c->head_dim > HEAD_DIM_MAX || c->hidden % c->head_dim != 0)
                h3_list_add(&b->wrong, "a width of %u with heads of %u (a multiple of 8 up to %u)",
                        c->hidden, c->head_dim, HEAD_DIM_MAX);
}

/* Original names keep a head's q, k and v together: views of one matrix, and biases of our own. */
static void bind_qkv(Binder *b, const char *prefix, VideoLayer *l) {
        static const char *const split[] = {"attn.to_q", "attn.to_k", "attn.to_v"};
        VideoLinear *parts[] = {&l->q, &l->k, &l->v};
        uint64_t hidden = b->c->hidden, head_dim = b->c->head_dim, rows = 3 * hidden;
        const uint64_t dims[] = {rows, hidden};
        const H3Tensor *w, *bias;

        if (b->diffusers) {
                for (size_t i = 0; i < 3; i++)
                        bind_linear(b, name("%s%s", prefix, split[i]).text, hidden, hidden, parts[i]);
                return;
        }
        w = take(b, name("%sattn.to_qkv.weight", prefix), 2, dims);
        bias = take(b, name("%sattn.to_qkv.bias", prefix), 1, &rows);
        if (!w || !bias || hidden == 0 || hidden % head_dim != 0)
                return;
        for (size_t i = 0; i < 3; i++) {
                parts[i]->w = matrix_of(b, w, hidden, i * head_dim, hidden, head_dim, 3 * head_dim);
                parts[i]->bias = (LkVector){.data = b->owned, .type = LK_F32, .n = hidden};
                for (uint64_t head = 0; head < b->c->heads; head++)
                        (void) copy_numbers(b, bias, (3 * head + i) * head_dim, head_dim);
        }
}

/* Original names keep [gate ; up], diffusers [up ; gate]. */
static void bind_mlp(Binder *b, const char *prefix, VideoLayer *l) {
        uint64_t ffn = b->c->ffn, rows = 2 * ffn, gate = b->diffusers ? ffn : 0, up = ffn - gate;
        const uint64_t dims[] = {rows, b->c->hidden};
        Name p = name("%s%s", prefix, pick(b, "ff.w1", "ff.net.0.proj"));
        const H3Tensor *w = take(b, name("%s.weight", p.text), 2, dims),
                       *bias = take(b, name("%s.bias", p.text), 1, &rows);

        if (w && bias && ffn > 0 && b->c->hidden > 0) {
                LkVector v = vector_of(bias);
                const uint8_t *data = v.data;

                l->gate.w = matrix_of(b, w, b->c->hidden, gate, ffn, ffn, ffn);
                l->up.w = matrix_of(b, w, b->c->hidden, up, ffn, ffn, ffn);
                l->gate.bias = (LkVector){data + gate * lk_type_size(v.type), v.type, ffn};
                l->up.bias = (LkVector){data + up * lk_type_size(v.type), v.type, ffn};
        }
        bind_linear(b, name("%s%s", prefix, pick(b, "ff.w2", "ff.net.2")).text, b->c->hidden, ffn, &l->down);
}

static void bind_layer(Binder *b, uint32_t i, VideoLayer *l) {
        uint64_t hidden = b->c->hidden;
        Name prefix = name("decoder.transformer_blocks.%u.", i);
        const char *p = prefix.text;

        bind_vector(b, name("%snorm1.weight", p), hidden, &l->norm1);
        bind_vector(b, name("%snorm2.weight", p), hidden, &l->norm2);
        bind_qkv(b, p, l);
        bind_linear(
                b, name("%s%s", p, pick(b, "attn.to_out", "attn.to_out.0")).text, hidden, hidden, &l->out);
        bind_mlp(b, p, l);
        l->scale1 = copy_numbers(b, take(b, name("%sscale1", p), 1, &hidden), 0, hidden);
        l->scale2 = copy_numbers(b, take(b, name("%sscale2", p), 1, &hidden), 0, hidden);
}

static int bind_decoder(Binder *b, Fault *f) {
        const H3VideoConfig *c = b->c;
        uint64_t hidden = c->hidden, numbers = (5ull * c->layers + c->registers + 1) * hidden;
        const uint64_t registers[] = {1, c->registers, hidden};
        H3Tensor *mask = h3_tensor_set_find(b->set, "decoder.mask_token");

        b->m->layers = calloc(c->layers ? c->layers : 1, sizeof(*b->m->layers));
        b->m->owned = calloc(numbers ? numbers : 1, sizeof(float));
        if (!b->m->layers || !b->m->owned)
                return fault_set(
                        f, -ENOMEM, FAULT_DOES_NOT_FIT, "No memory for the model; free some and try again.");
        b->owned = b->m->owned;

        if (mask) /* zeros that nothing reads */
                mask->used = true;
        bind_conv(b, "post_quant_conv", c->latent_channels, c->latent_channels, 1, &b->m->post_quant);
        bind_linear(b, pick(b, "decoder.x_embedder", "decoder.proj_in"), hidden, c->latent_channels,
                &b->m->embed);
        b->m->suffix = copy_numbers(
                b, take(b, name("decoder.register_tokens"), 3, registers), 0, c->registers * hidden);
        b->owned += hidden; /* the row of zeros */
        for (uint32_t i = 0; i < c->layers; i++)
                bind_layer(b, i, b->m->layers + i);
        bind_norm(b, "decoder.norm_out", hidden, &b->m->decoder_norm);
        bind_linear(b, "decoder.proj_out", TOKEN_PIXELS, hidden, &b->m->proj);
        return 0;
}

/* ------------------------------------------------------------------------------------ both */

static int choose_layout(Binder *b, Fault *f) {
        static const char *const original[] = {"encoder.down.", "decoder.x_embedder."};
        static const char *const diffusers[] = {"encoder.down_blocks.", "decoder.proj_in."};
        bool has_original = false, has_diffusers = false;

        for (size_t i = 0; i < 2; i++) {
                has_original = has_original || has_prefix(b->set, original[i]);
                has_diffusers = has_diffusers || has_prefix(b->set, diffusers[i]);
        }
        if (has_original == has_diffusers)
                return fault_set(f, -EINVAL, FAULT_INVALID_MODEL,
                        "Not a video VAE of H3: %s tensors named encoder.down.* or decoder.x_embedder.* "
                        "(original names) %s encoder.down_blocks.* or decoder.proj_in.* (diffusers names); "
                        "expected one of the two.",
                        has_original ? "it has" : "it has neither", has_original ? "and" : "nor");
        b->diffusers = has_diffusers;
        (void) snprintf(b->m->layout, sizeof(b->m->layout), "%s", b->diffusers ? "diffusers" : "original");
        return 0;
}

/* The small convolutions between the halves, of a half that is not there. */
static void skip_unused(Binder *b) {
        static const char *const names[][2] = {{"quant_conv.weight", "quant_conv.bias"},
                {"post_quant_conv.weight", "post_quant_conv.bias"}};
        const bool needed[] = {b->c->has_encoder, b->c->has_decoder};

        for (size_t i = 0; i < 2; i++)
                for (size_t k = 0; k < 2; k++) {
                        H3Tensor *t = needed[i] ? NULL : h3_tensor_set_find(b->set, names[i][k]);

                        if (t)
                                t->used = true;
                }
}

static int check_types(const H3TensorSet *s, Fault *f) {
        for (size_t i = 0; i < s->n_tensors; i++) {
                const H3Tensor *t = s->tensors + i;

                if (!t->matrix_type && !t->used && !h3_is_float(t->entry->type))
                        return fault_set(f, -EOPNOTSUPP, FAULT_NOT_SUPPORTED,
                                "%.200s: tensor %.200s is %s; weights of the video VAE are F32, F16 or "
                                "BF16, "
                                "or quantised matrices of the decoder. Use the f16 file.",
                                t->file, t->entry->name, st_type_name(t->entry->type));
        }
        return 0;
}

static int report(Binder *b, Fault *f) {
        H3List extra = {};

        for (size_t i = 0; i < b->set->n_tensors; i++)
                if (!b->set->tensors[i].used)
                        h3_list_add(&extra, "%.150s", b->set->tensors[i].entry->name);
                else
                        b->m->weight_bytes += b->set->tensors[i].entry->size;
        if (b->missing.count + b->wrong.count + extra.count == 0)
                return 0;
        return fault_set(f, -EINVAL, FAULT_INVALID_MODEL,
                "Not a complete video VAE of H3. Missing (%u): %s. Wrong (%u): %s. Not of this model (%u): "
                "%s. Give all files of one VAE and no others, with its config.json if it has one.",
                b->missing.count, b->missing.count ? b->missing.text : "none", b->wrong.count,
                b->wrong.count ? b->wrong.text : "none", extra.count, extra.count ? extra.text : "none");
}

static int bind_halves(Binder *b, Fault *f) {
        H3VideoConfig *c = b->c;
        int r = 0;

        if (c->has_encoder && c->level_blocks == 0)
                h3_list_add(&b->missing, "%s",
                        pick(b, "encoder.down.0.block.0.*", "encoder.down_blocks.0.resnets.0.*"));
        if (c->has_decoder && c->layers == 0)
                h3_list_add(&b->missing, "decoder.transformer_blocks.0.*");
        if (c->has_encoder)
                r = bind_encoder(b, f);
        if (r >= 0 && c->has_decoder)
                r = bind_decoder(b, f);
        return r;
}

int video_vae_bind(H3TensorSet *s, const VideoSaid *said, H3VideoVae *m, Fault *f) {
        Binder b = {.set = s, .m = m, .c = &m->config};
        H3VideoConfig *c = &m->config;
        int r;

        r = choose_layout(&b, f);
        if (r >= 0)
                r = h3_quant_resolve(s, &b.missing, &b.wrong, f);
        if (r >= 0)
                r = check_types(s, f);
        if (r < 0)
                return r;

        c->has_encoder = has_prefix(s, "encoder.");
        c->has_decoder = has_prefix(s, "decoder.");
        c->groups = said->groups;
        c->pad = said->pad;
        c->group_eps = (float) said->group_eps;
        c->eps = (float) said->eps;
        c->rope_theta = said->rope_theta;
        c->latent_channels =
                c->has_decoder ? size_of(&b, name("post_quant_conv.weight"), 5, 0, H3_VIDEO_CHANNELS_MAX)
                               : size_of(&b, name("quant_conv.weight"), 5, 0, 2 * H3_VIDEO_CHANNELS_MAX) / 2;
        if (c->has_decoder)
                read_decoder_config(&b, said);
        if (c->has_encoder)
                read_encoder_config(&b);

        r = bind_halves(&b, f);
        if (r < 0)
                return r;
        skip_unused(&b);
        return report(&b, f);
}
