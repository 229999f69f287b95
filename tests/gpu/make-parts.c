/* SPDX-License-Identifier: Apache-2.0 */

/* What a render needs beside a denoiser (make-checkpoint), without the weights: conditioner, video and audio autoencoder in the released
 * sizes, ComfyUI's names and types, numbers from counters (counter.h).
 *
 *     make-parts DIR nvfp4|int8 [--small] [--text-dim N] [--threads N]
 *
 * DIR/text_encoder: 15.7 GB in nvfp4 as the released one has it (rows of the vocabulary in int8, the vision tower in bf16), or 26.4 GB in
 * int8 (rotated); DIR/vae: 5.2 GB in f16; DIR/audio_vae: 0.6 GB in f32, folded. No tokenizer. --small: few and narrow layers, for trials.
 *
 * Values stay healthy: what goes to a residual is scaled by the number of layers. Tokens of the video decoder make smooth patches, as no
 * encoder of films ever sees noise. */

#include <getopt.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "service/shared/clock.h"
#include "tests/gpu/counter.h"
#include "tests/gpu/made.h"

#define PROGRAM "make-parts"
#define HEAD_DIM 128
#define PATCH 16
#define VIDEO_LEVELS 6
#define VIDEO_CHANNELS 24
#define VIDEO_HEAD_DIM 64
#define AUDIO_CHANNELS 32
#define AUDIO_STAGES 7
#define AUDIO_UNITS 3
#define ENCODER_STAGES 5
#define TAPS 12

typedef enum Own {
        OWN_SMOOTH, /* rows of pixels of a patch */
        OWN_FILTER,
} Own;

typedef struct Sizes {
        uint64_t text, heads, kv_heads, ffn, layers, vocab;
        uint64_t vision, vision_heads, vision_ffn, depth, grid;
        unsigned deepstack[3];
        uint64_t video, video_ffn, video_layers, video_channels[VIDEO_LEVELS];
        uint64_t audio, audio_decoder, audio_encoder;
} Sizes;

static const Sizes released = {
        .text = 5120, .heads = 64, .kv_heads = 8, .ffn = 25600, .layers = 50, .vocab = 151936,
        .vision = 1152, .vision_heads = 16, .vision_ffn = 4304, .depth = 27, .grid = 48, .deepstack = {8, 16, 24},
        .video = 2048, .video_ffn = 8192, .video_layers = 36, .video_channels = {128, 256, 256, 512, 512, 1024},
        .audio = 2048, .audio_decoder = 1024, .audio_encoder = 64,
}, small = {
        .text = 256, .heads = 2, .kv_heads = 1, .ffn = 512, .layers = 3, .vocab = 1024,
        .vision = 64, .vision_heads = 1, .vision_ffn = 128, .depth = 4, .grid = 8, .deepstack = {0, 1, 2},
        .video = 128, .video_ffn = 256, .video_layers = 2, .video_channels = {32, 32, 64, 64, 64, 64},
        .audio = 256, .audio_decoder = 128, .audio_encoder = 8,
};

typedef struct Parts {
        const char *directory;
        bool is_int8;
        unsigned n_threads;
        Sizes s;
        MadeFiles files; /* of the part that is made */
} Parts;

static float root(uint64_t n) {
        return 1.0f / sqrtf((float) n);
}

static MadeTensor *add(Parts *p, StType type, uint32_t n_dims, const uint64_t *shape, float center, float spread, const char *name) {
        MadeTensor *t = made_add(&p->files, type, n_dims, shape, "%s", name);

        t->fill = type == ST_BF16 ? MADE_NORMAL : MADE_QUICK;
        t->center = center;
        t->spread = spread;
        return t;
}

typedef struct Name {
        char text[96];
} Name;

static Name join(const char *prefix, const char *name) {
        Name n;

        if ((size_t) snprintf(n.text, sizeof(n.text), "%s%s", prefix, name) >= sizeof(n.text))
                made_die(PROGRAM, "the name %s%s is too long", prefix, name);
        return n;
}

static void vector(Parts *p, StType type, uint64_t n, float center, float spread, const char *prefix, const char *name) {
        (void) add(p, type, 1, &n, center, spread, join(prefix, name).text);
}

static void norm(Parts *p, StType type, uint64_t n, const char *prefix, const char *name) {
        Name full = join(prefix, name);

        vector(p, type, n, 1, 0.05f, full.text, ".weight");
        vector(p, type, n, 0, 0.05f, full.text, ".bias");
}

static void matrix(Parts *p, StType type, uint64_t rows, uint64_t cols, float spread, const char *prefix, const char *name) {
        (void) add(p, type, 2, (uint64_t[]){rows, cols}, 0, spread, join(join(prefix, name).text, ".weight").text);
}

static void linear(Parts *p, StType type, uint64_t rows, uint64_t cols, float gain, const char *prefix, const char *name) {
        matrix(p, type, rows, cols, gain * root(cols), prefix, name);
        vector(p, type, rows, 0, 0.02f, join(prefix, name).text, ".bias");
}

/* Of a convolution over n_axes axes with so many taps each. */
static void conv(Parts *p, StType type, uint64_t out, uint64_t in, uint64_t taps, uint32_t n_axes, float gain, const char *prefix,
        const char *name) {
        uint64_t shape[MADE_DIMS_MAX] = {out, in}, all = in;

        for (uint32_t i = 0; i < n_axes; i++)
                all *= shape[2 + i] = taps;
        (void) add(p, type, 2 + n_axes, shape, 0, gain * root(all), join(join(prefix, name).text, ".weight").text);
}

static void conv_bias(Parts *p, StType type, uint64_t out, uint64_t in, uint64_t taps, uint32_t n_axes, float gain, const char *prefix,
        const char *name) {
        conv(p, type, out, in, taps, n_axes, gain, prefix, name);
        vector(p, type, out, 0, 0.02f, join(prefix, name).text, ".bias");
}

/* ---- conditioner ---- */

static void marker(Parts *p, const char *text, const char *full) {
        MadeTensor *t = made_add(&p->files, ST_U8, 1, (uint64_t[]){strlen(text)}, "%s.comfy_quant", full);

        t->fill = MADE_TEXT;
        (void) snprintf(t->text, sizeof(t->text), "%s", text);
}

static void codes(Parts *p, uint64_t rows, uint64_t cols, float spread, bool rotated, const char *full) {
        MadeTensor *t = made_add(&p->files, ST_I8, 2, (uint64_t[]){rows, cols}, "%s.weight", full);

        t->fill = MADE_CODES;
        t = made_add(&p->files, ST_F32, 2, (uint64_t[]){rows, 1}, "%s.weight_scale", full);
        t->center = spread / MADE_CODE_DEVIATION;
        t->spread = t->center / 10;
        marker(p,
                rotated ? "{\"format\":\"int8_tensorwise\",\"convrot\":true,\"convrot_groupsize\":256}"
                        : "{\"format\":\"int8_tensorwise\"}",
                full);
}

static void nvfp4(Parts *p, uint64_t rows, uint64_t cols, float spread, const char *full) {
        MadeTensor *t = made_add(&p->files, ST_U8, 2, (uint64_t[]){rows, cols / 2}, "%s.weight", full);

        t->fill = MADE_BITS;
        t = made_add(&p->files, ST_F8_E4M3, 2, (uint64_t[]){(rows + 127) / 128 * 128, (cols / 16 + 3) / 4 * 4}, "%s.weight_scale", full);
        t->fill = MADE_SCALES;
        t = made_add(&p->files, ST_F32, 1, (uint64_t[]){1}, "%s.weight_scale_2", full);
        t->center = spread / MADE_NVFP4_DEVIATION;
        t = made_add(&p->files, ST_BF16, 1, &cols, "%s.pre_quant_scale", full);
        t->center = 1;
        t->spread = 0.05f;
        marker(p, "{\"format\":\"nvfp4\"}", full);
}

static void quantised(Parts *p, uint64_t rows, uint64_t cols, float gain, const char *prefix, const char *name) {
        Name full = join(prefix, name);

        if (p->is_int8)
                codes(p, rows, cols, gain * root(cols), true, full.text);
        else
                nvfp4(p, rows, cols, gain * root(cols), full.text);
}

static void text_layer(Parts *p, uint64_t i) {
        const Sizes *s = &p->s;
        uint64_t inner = s->heads * HEAD_DIM, kv = s->kv_heads * HEAD_DIM;
        float branch = root(2 * s->layers);
        char at[40];

        (void) snprintf(at, sizeof(at), "model.layers.%" PRIu64 ".", i);
        vector(p, ST_BF16, s->text, 1, 0.05f, at, "input_layernorm.weight");
        vector(p, ST_BF16, s->text, 1, 0.05f, at, "post_attention_layernorm.weight");
        vector(p, ST_BF16, HEAD_DIM, 1, 0.05f, at, "self_attn.q_norm.weight");
        vector(p, ST_BF16, HEAD_DIM, 1, 0.05f, at, "self_attn.k_norm.weight");
        quantised(p, inner, s->text, 1, at, "self_attn.q_proj");
        quantised(p, kv, s->text, 1, at, "self_attn.k_proj");
        quantised(p, kv, s->text, 1, at, "self_attn.v_proj");
        quantised(p, s->text, inner, branch, at, "self_attn.o_proj");
        quantised(p, s->ffn, s->text, 1, at, "mlp.gate_proj");
        quantised(p, s->ffn, s->text, 1, at, "mlp.up_proj");
        quantised(p, s->text, s->ffn, branch, at, "mlp.down_proj");
}

static void vision_block(Parts *p, uint64_t i) {
        const Sizes *s = &p->s;
        float branch = root(2 * s->depth);
        char at[40];

        (void) snprintf(at, sizeof(at), "visual.blocks.%" PRIu64 ".", i);
        norm(p, ST_BF16, s->vision, at, "norm1");
        norm(p, ST_BF16, s->vision, at, "norm2");
        linear(p, ST_BF16, 3 * s->vision, s->vision, 1, at, "attn.qkv");
        linear(p, ST_BF16, s->vision, s->vision, branch, at, "attn.proj");
        linear(p, ST_BF16, s->vision_ffn, s->vision, 1, at, "mlp.linear_fc1");
        linear(p, ST_BF16, s->vision, s->vision_ffn, branch, at, "mlp.linear_fc2");
}

static void merger(Parts *p, uint64_t width, const char *at) {
        norm(p, ST_BF16, width, at, "norm");
        linear(p, ST_BF16, 4 * p->s.vision, 4 * p->s.vision, 1, at, "linear_fc1");
        linear(p, ST_BF16, p->s.text, 4 * p->s.vision, 1, at, "linear_fc2");
}

static void add_conditioner(Parts *p) {
        const Sizes *s = &p->s;
        char at[40];

        codes(p, s->vocab, s->text, 1, false, "model.embed_tokens");
        for (uint64_t i = 0; i < s->layers; i++)
                text_layer(p, i);
        (void) add(p, ST_BF16, 5, (uint64_t[]){s->vision, 3, 2, PATCH, PATCH}, 0, root(3 * 2 * PATCH * PATCH),
                "visual.patch_embed.proj.weight");
        vector(p, ST_BF16, s->vision, 0, 0.02f, "visual.patch_embed.proj", ".bias");
        matrix(p, ST_BF16, s->grid * s->grid, s->vision, 0.1f, "visual.", "pos_embed");
        for (uint64_t i = 0; i < s->depth; i++)
                vision_block(p, i);
        merger(p, s->vision, "visual.merger.");
        for (unsigned i = 0; i < 3; i++) {
                (void) snprintf(at, sizeof(at), "visual.deepstack_merger_list.%u.", i);
                merger(p, 4 * s->vision, at);
        }
}

/* What no shape says. */
static void write_config(const Parts *p, const char *directory) {
        const Sizes *s = &p->s;
        char path[4096];
        FILE *f;

        (void) snprintf(path, sizeof(path), "%s/config.json", directory);
        f = fopen(path, "wxe");
        if (!f || fprintf(f, "{\"vision_config\": {\"num_heads\": %" PRIu64 ", \"deepstack_visual_indexes\": [%u, %u, %u]}}\n",
                          s->vision_heads, s->deepstack[0], s->deepstack[1], s->deepstack[2]) < 0 ||
                fclose(f) != 0)
                made_die(PROGRAM, "%s cannot be written", path);
}

/* ---- video ---- */

static void res_block(Parts *p, uint64_t in, uint64_t out, const char *at) {
        norm(p, ST_F16, in, at, "norm1");
        conv_bias(p, ST_F16, out, in, 3, 3, 1, at, "conv1");
        norm(p, ST_F16, out, at, "norm2");
        conv_bias(p, ST_F16, out, out, 3, 3, 0.3f, at, "conv2");
        if (in != out)
                conv_bias(p, ST_F16, out, in, 1, 3, 1, at, "nin_shortcut");
}

static void add_video_encoder(Parts *p) {
        const uint64_t *channels = p->s.video_channels;
        uint64_t in = channels[0];
        char at[60];

        conv_bias(p, ST_F16, in, 3, 3, 3, 1, "encoder.", "conv_in");
        for (unsigned i = 0; i < VIDEO_LEVELS; i++) {
                for (unsigned k = 0; k < 2; k++, in = channels[i]) {
                        (void) snprintf(at, sizeof(at), "encoder.down.%u.block.%u.", i, k);
                        res_block(p, in, channels[i], at);
                }
                (void) snprintf(at, sizeof(at), "encoder.down.%u.", i);
                if (i < 4)
                        conv_bias(p, ST_F16, in, in, 3, 3, 1, at, "downsample.conv");
        }
        norm(p, ST_F16, in, "encoder.", "norm_out");
        conv_bias(p, ST_F16, 2 * VIDEO_CHANNELS, in, 3, 3, 1, "encoder.", "conv_out");
        conv_bias(p, ST_F16, 2 * VIDEO_CHANNELS, 2 * VIDEO_CHANNELS, 1, 3, 1, "", "quant_conv");
}

static void add_video_decoder(Parts *p) {
        const Sizes *s = &p->s;
        MadeTensor *t;
        char at[60];

        conv_bias(p, ST_F16, VIDEO_CHANNELS, VIDEO_CHANNELS, 1, 3, 1, "", "post_quant_conv");
        linear(p, ST_F16, s->video, VIDEO_CHANNELS, 1, "decoder.", "x_embedder");
        (void) add(p, ST_F16, 3, (uint64_t[]){1, 4, s->video}, 0, 1, "decoder.register_tokens");
        for (uint64_t i = 0; i < s->video_layers; i++) {
                (void) snprintf(at, sizeof(at), "decoder.transformer_blocks.%" PRIu64 ".", i);
                vector(p, ST_F16, s->video, 1, 0.05f, at, "norm1.weight");
                vector(p, ST_F16, s->video, 1, 0.05f, at, "norm2.weight");
                linear(p, ST_F16, 3 * s->video, s->video, 1, at, "attn.to_qkv");
                linear(p, ST_F16, s->video, s->video, 1, at, "attn.to_out");
                linear(p, ST_F16, 2 * s->video_ffn, s->video, 1, at, "ff.w1");
                linear(p, ST_F16, s->video, s->video_ffn, 1, at, "ff.w2");
                vector(p, ST_F16, s->video, 0.1f, 0.02f, at, "scale1");
                vector(p, ST_F16, s->video, 0.1f, 0.02f, at, "scale2");
        }
        norm(p, ST_F16, s->video, "decoder.", "norm_out");
        t = add(p, ST_F16, 2, (uint64_t[]){3 * 4 * PATCH * PATCH, s->video}, 0, 0.7f * root(s->video), "decoder.proj_out.weight");
        t->fill = MADE_OWN;
        t->own = OWN_SMOOTH;
        vector(p, ST_F16, 3 * 4 * PATCH * PATCH, 0, 0, "decoder.proj_out", ".bias");
}

/* ---- audio ---- */

static void filter(Parts *p, const char *prefix, const char *name) {
        MadeTensor *t = add(p, ST_F32, 3, (uint64_t[]){1, 1, TAPS}, 0, 0, join(prefix, name).text);

        t->fill = MADE_OWN;
        t->own = OWN_FILTER;
}

static void activation(Parts *p, uint64_t channels, const char *at) {
        vector(p, ST_F32, channels, 0, 0.1f, at, ".act.alpha");
        vector(p, ST_F32, channels, 0.5f, 0.1f, at, ".act.beta");
        filter(p, at, ".upsample.filter");
        filter(p, at, ".downsample.lowpass.filter");
}

static void amp_block(Parts *p, unsigned index, uint64_t channels, uint64_t kernel) {
        char at[60];

        for (unsigned i = 0; i < 6; i++) {
                (void) snprintf(at, sizeof(at), "decoder.resblocks.%u.convs%u.%u", index, i % 2 + 1, i / 2);
                conv_bias(p, ST_F32, channels, channels, kernel, 1, i % 2 == 0 ? 0.7f : 0.2f, at, "");
                (void) snprintf(at, sizeof(at), "decoder.resblocks.%u.activations.%u", index, i);
                activation(p, channels, at);
        }
}

static void add_audio_decoder(Parts *p) {
        static const uint64_t kernels[AUDIO_STAGES] = {9, 9, 4, 4, 4, 4, 4}, rates[AUDIO_STAGES] = {5, 5, 2, 2, 2, 2, 2};
        static const uint64_t amp[] = {3, 7, 11};
        const Sizes *s = &p->s;
        char at[60];

        conv_bias(p, ST_F32, s->audio, AUDIO_CHANNELS, 1, 1, 1, "", "dec_in_proj");
        conv_bias(p, ST_F32, s->audio_decoder, s->audio, 7, 1, 1, "decoder.", "conv_pre");
        for (unsigned i = 0; i < AUDIO_STAGES; i++) {
                uint64_t in = s->audio_decoder >> i, out = in / 2;

                (void) snprintf(at, sizeof(at), "decoder.ups.%u.0", i);
                (void) add(p, ST_F32, 3, (uint64_t[]){in, out, kernels[i]}, 0, 0.7f * root(in * kernels[i] / rates[i]),
                        join(at, ".weight").text);
                vector(p, ST_F32, out, 0, 0.02f, at, ".bias");
                for (unsigned k = 0; k < 3; k++)
                        amp_block(p, 3 * i + k, out, amp[k]);
        }
        activation(p, s->audio_decoder >> AUDIO_STAGES, "decoder.activation_post");
        conv(p, ST_F32, 1, s->audio_decoder >> AUDIO_STAGES, 7, 1, 0.2f, "decoder.", "conv_post");
}

static void alpha(Parts *p, uint64_t channels, const char *prefix, const char *name) {
        (void) add(p, ST_F32, 3, (uint64_t[]){1, channels, 1}, 1, 0.1f, join(join(prefix, name).text, ".alpha").text);
}

static void add_audio_encoder(Parts *p) {
        static const uint64_t rates[ENCODER_STAGES] = {2, 4, 4, 5, 5};
        const uint64_t n = AUDIO_CHANNELS, all = p->s.audio;
        uint64_t in = p->s.audio_encoder;
        char at[60];

        conv_bias(p, ST_F32, in, 1, 7, 1, 1, "encoder.block.", "0");
        for (unsigned i = 0; i < ENCODER_STAGES; i++, in *= 2) {
                for (unsigned k = 0; k < AUDIO_UNITS; k++) {
                        (void) snprintf(at, sizeof(at), "encoder.block.%u.block.%u.block.", i + 1, k);
                        alpha(p, in, at, "0");
                        conv_bias(p, ST_F32, in, in, 7, 1, 0.7f, at, "1");
                        alpha(p, in, at, "2");
                        conv_bias(p, ST_F32, in, in, 1, 1, 0.3f, at, "3");
                }
                (void) snprintf(at, sizeof(at), "encoder.block.%u.block.", i + 1);
                alpha(p, in, at, "3");
                conv_bias(p, ST_F32, 2 * in, in, 2 * rates[i], 1, 0.7f, at, "4");
        }
        alpha(p, in, "encoder.block.", "6");
        conv_bias(p, ST_F32, all, in, 3, 1, 0.7f, "encoder.block.", "7");

        norm(p, ST_F32, all, "pre_block.", "norm1");
        norm(p, ST_F32, n, "pre_block.", "norm2");
        norm(p, ST_F32, all, "pre_block.", "norm3");
        linear(p, ST_F32, n, all, 1, "pre_block.", "proj");
        matrix(p, ST_F32, 3 * all, all, root(all), "pre_block.attn.", "qkv");
        vector(p, ST_F32, all, 0, 0.02f, "pre_block.attn.", "q_bias");
        vector(p, ST_F32, all, 0, 0, "pre_block.attn.", "zero_k_bias");
        vector(p, ST_F32, all, 0, 0.02f, "pre_block.attn.", "v_bias");
        linear(p, ST_F32, n, n, 1, "pre_block.attn.", "proj");
        norm(p, ST_F32, n, "pre_block.mlp.", "norm");
        linear(p, ST_F32, 2 * n, n, 1, "pre_block.mlp.", "w0");
        linear(p, ST_F32, 2 * n, n, 1, "pre_block.mlp.", "w1");
        linear(p, ST_F32, n, 2 * n, 1, "pre_block.mlp.", "w2");
        conv_bias(p, ST_F32, n, n, 1, 1, 1, "", "mean_proj");
        conv_bias(p, ST_F32, n, n, 1, 1, 1, "", "logs_proj");
}

/* ---- numbers ---- */

/* Of pixel (channel, frame, y, x) of a patch: a color that rises to one side and goes with time. */
static float smooth_value(const MadeTensor *t, uint64_t i) {
        uint64_t cols = t->shape[1], col = i % cols, row = i / cols, channel = row / (4 * PATCH * PATCH);
        const float slopes[] = {1, 0.2f * ((float) (row % PATCH) / 7.5f - 1), 0.2f * ((float) (row / PATCH % PATCH) / 7.5f - 1),
                0.1f * ((float) (row / (PATCH * PATCH) % 4) / 1.5f - 1)};
        float v = 0;

        for (uint64_t k = 0; k < 4; k++)
                v += slopes[k] * counter_normal(t->seed, (4 * channel + k) * cols + col);
        return t->spread * v;
}

/* Half a band: Kaiser's window on a sinc (h3.md 6.3). */
static const float taps[TAPS] = {0.00202896645f, 0.00938946394f, -0.0255434641f, -0.0576573755f, 0.128572609f, 0.4432098f,
        0.4432098f, 0.128572609f, -0.0576573755f, -0.0255434641f, 0.00938946394f, 0.00202896645f};

static float value_of(const void *userdata, const MadeTensor *t, uint64_t i) {
        return t->own == OWN_SMOOTH ? smooth_value(t, i) : taps[i];
}

/* ---- all ---- */

static void make(Parts *p, const char *folder, const char *name, void (*first)(Parts *p), void (*second)(Parts *p)) {
        uint64_t begin = clock_usec();
        char directory[4000];

        (void) snprintf(directory, sizeof(directory), "%s/%s", p->directory, folder);
        p->files = (MadeFiles){.program = PROGRAM, .directory = directory, .name = name, .shard_bytes = UINT64_C(1) << 40,
                .n_threads = p->n_threads, .value = value_of};
        first(p);
        if (second)
                second(p);
        made_write(&p->files);
        if (first == add_conditioner)
                write_config(p, directory);
        (void) printf("%s: ", folder);
        made_report(&p->files, begin);
}

static void usage(void) {
        (void) fprintf(stderr, "usage: make-parts DIR nvfp4|int8 [--small] [--text-dim N] [--threads N]\n");
        exit(2);
}

static void parse(Parts *p, int argc, char *argv[]) {
        static const struct option options[] = {{"small", no_argument, NULL, 's'}, {"text-dim", required_argument, NULL, 'd'},
                {"threads", required_argument, NULL, 't'}, {}};
        uint64_t text_dim = 0;
        int o, index;

        *p = (Parts){.s = released, .n_threads = made_threads()};
        while ((o = getopt_long(argc, argv, "", options, &index)) != -1)
                switch (o) {
                case 's':
                        p->s = small;
                        break;
                case 'd':
                        text_dim = made_number(PROGRAM, "text-dim", optarg, 256, 65536);
                        if (text_dim % 256 != 0)
                                made_die(PROGRAM, "--text-dim %s: expected a multiple of 256", optarg);
                        break;
                case 't':
                        p->n_threads = (unsigned) made_number(PROGRAM, "threads", optarg, 1, 64);
                        break;
                default:
                        usage();
                }
        if (argc - optind != 2 || (strcmp(argv[optind + 1], "nvfp4") != 0 && strcmp(argv[optind + 1], "int8") != 0))
                usage();
        p->s.text = text_dim > 0 ? text_dim : p->s.text;
        p->is_int8 = strcmp(argv[optind + 1], "int8") == 0;
        p->directory = argv[optind];
}

int main(int argc, char *argv[]) {
        Parts p;

        parse(&p, argc, argv);
        make(&p, "text_encoder", p.is_int8 ? "qwen3vl_32b_minimax_h3_int8_convrot" : "qwen3vl_32b_minimax_h3_nvfp4_awq",
                add_conditioner, NULL);
        make(&p, "vae", "minimax_h3_video_vae_fp16", add_video_encoder, add_video_decoder);
        make(&p, "audio_vae", "minimax_h3_audio_vae_fp32", add_audio_encoder, add_audio_decoder);
        return 0;
}
