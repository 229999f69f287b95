/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "kernels/cpu/cpu.h"
#include "service/shared/cleanup.h"
#include "tests/unit/h3/video.h"

/* Opening: names, types, halves, quantised decoders, config.json, and what is refused. */

static void expect_fault(int r, int error, const Fault *f, const char *name, const char *part) {
        assert_int_equal(r, error);
        assert_string_equal(f->name, name);
        if (!strstr(f->text, part))
                fail_msg("\"%s\" does not say \"%s\"", f->text, part);
}

/* Opens the checkpoint and expects this error. */
static void refused(const Checkpoint *c, const char *config, int error, const char *name, const char *part) {
        CLEANUP_FREE uint8_t *bytes = NULL;
        H3VideoVae *vae = (H3VideoVae *) &bytes, *before = vae;
        Fault f = {};

        expect_fault(video_try_open(c, config, &bytes, &vae, &f), error, &f, name, part);
        assert_ptr_equal(vae, before);
}

/* config.json with one text replaced. */
static char *changed(const char *config, const char *from, const char *to) {
        const char *at = strstr(config, from);
        char *text;

        if (!at)
                fail_msg("config.json has no %s", from);
        assert_true(asprintf(&text, "%.*s%s%s", (int) (at - config), config, to, at + strlen(from)) > 0);
        return text;
}

static void refused_config(const Checkpoint *c, const char *config, const char *from, const char *to,
        int error, const char *name, const char *part) {
        CLEANUP_FREE char *text = changed(config, from, to);

        refused(c, text, error, name, part);
}

static float *decode_image(const H3VideoVae *m) {
        H3VideoDecodePlan p;
        float z[24 * 2], *out;
        float **tiles;

        for (unsigned i = 0; i < ELEMENTSOF(z); i++)
                z[i] = (float) ((i * 37) % 11) / 5 - 1;
        assert_int_equal(h3_video_decode_plan(m, 1, 1, 2, H3_VIDEO_TILING, &p, NULL), 0);
        tiles = video_decode_all(m, &p, z, NULL);
        out = tiles[0];
        free(tiles);
        return out;
}

#define IMAGE_BYTES (4 * 16 * 32 * 3 * sizeof(float))

static void open_original_reads_sizes(void **state) {
        CLEANUP(video_freep) Video *v = video_open();
        CLEANUP_FREE char *config = video_config();
        const H3VideoConfig *c = h3_video_vae_config(v->vae);
        json_t *root = json_loads(config, 0, NULL);
        uint64_t bytes = 0;

        assert_int_equal(c->latent_channels, 24);
        assert_int_equal(c->layers, video_case_number(root, "decoder_num_layers", 0));
        assert_int_equal(c->heads, video_case_number(root, "decoder_num_attention_heads", 0));
        assert_int_equal(c->head_dim, video_case_number(root, "decoder_attention_head_dim", 0));
        assert_int_equal(c->hidden, c->heads * c->head_dim);
        assert_int_equal(c->ffn, 4 * c->hidden);
        assert_int_equal(c->registers, 4);
        assert_int_equal(c->groups, video_case_number(root, "norm_num_groups", 0));
        assert_int_equal(c->level_blocks, video_case_number(root, "layers_per_block", 0));
        assert_int_equal(c->rope_freqs, c->head_dim / 8);
        assert_true(c->pad == LK_PAD_REFLECT && c->has_encoder && c->has_decoder);
        for (unsigned i = 0; i < 6; i++)
                assert_int_equal(c->channels[i],
                        json_integer_value(json_array_get(json_object_get(root, "block_out_channels"), i)));
        assert_true(c->mean[1] == -0.9606591463088989f && c->std[23] == 2.6127843856811525f);
        for (size_t i = 0; i < v->checkpoint->n; i++)
                bytes += v->checkpoint->tensors[i].size;
        assert_int_equal(h3_video_vae_weight_bytes(v->vae), bytes);
        json_decref(root);
}

/* f16 numbers in f32, and in f16 at an odd address: the same bits come out. */
static void open_types_and_places_same_bits(void **state) {
        CLEANUP(video_freep) Video *v = video_open();
        CLEANUP_FREE char *config = video_config();
        CLEANUP_FREE float *reference = decode_image(v->vae), *wide_image = NULL, *odd_image = NULL;
        CLEANUP_FREE uint8_t *bytes = NULL, *odd = NULL;
        H3File files[] = {
                {.name = "a.safetensors"}, {.name = "config.json", .bytes = config, .size = strlen(config)}};
        Checkpoint *c = video_checkpoint(), *wide = checkpoint_empty();
        float *numbers[CHECKPOINT_TENSORS_MAX];
        H3VideoVae *vae = NULL;
        Fault f = {};

        for (size_t i = 0; i < c->n; i++) {
                StTensor t = c->tensors[i];
                uint64_t n = t.size / 2;
                const uint8_t *half = c->data[i];

                assert_int_equal(t.type, ST_F16);
                numbers[i] = malloc(n * sizeof(float));
                for (uint64_t k = 0; k < n; k++) {
                        uint16_t u = (uint16_t) (half[2 * k] | half[2 * k + 1] << 8);
                        float fraction = (float) (u & 1023);

                        numbers[i][k] =
                                (u & 0x8000 ? -1.0f : 1.0f) *
                                ((u >> 10 & 31) == 0 ? ldexpf(fraction, -24)
                                                     : ldexpf(1024 + fraction, (int) (u >> 10 & 31) - 25));
                }
                checkpoint_add(wide, c->names[i], ST_F32, 1, n, 0, numbers[i]);
                memcpy(wide->tensors[i].shape, t.shape, sizeof(t.shape));
                wide->tensors[i].n_dims = t.n_dims;
        }
        if (video_try_open(wide, config, &bytes, &vae, &f) < 0)
                fail_msg("%s", f.text);
        wide_image = decode_image(vae);
        assert_memory_equal(wide_image, reference, IMAGE_BYTES);
        (void) h3_video_vae_free(vae);

        free(bytes);
        bytes = checkpoint_write(c, &files[0].size);
        odd = malloc(files[0].size + 1);
        memcpy(odd + 1, bytes, files[0].size);
        files[0].bytes = odd + 1;
        assert_int_equal(h3_video_vae_open(files, 2, NULL, &vae, NULL), 0);
        odd_image = decode_image(vae);
        assert_memory_equal(odd_image, reference, IMAGE_BYTES);
        (void) h3_video_vae_free(vae);
        for (size_t i = 0; i < c->n; i++)
                free(numbers[i]);
        (void) checkpoint_free(wide);
        (void) checkpoint_free(c);
}

/* ------------------------------------------------------------------------------------ halves */

static void drop_half(Checkpoint *c, const char *prefix, const char *conv) {
        for (size_t i = c->n; i-- > 0;)
                if (strncmp(c->names[i], prefix, strlen(prefix)) == 0 ||
                        strncmp(c->names[i], conv, strlen(conv)) == 0)
                        checkpoint_drop(c, c->names[i]);
}

static void open_decoder_only_names_the_missing_half(void **state) {
        CLEANUP(checkpoint_freep) Checkpoint *c = video_checkpoint();
        CLEANUP(video_freep) Video *v = video_open();
        CLEANUP_FREE char *config = video_config();
        CLEANUP_FREE float *reference = decode_image(v->vae), *image = NULL;
        CLEANUP_FREE uint8_t *bytes = NULL;
        H3VideoEncodePlan p;
        H3VideoVae *vae = NULL;
        Fault f = {};

        drop_half(c, "encoder.", "none");
        if (video_try_open(c, config, &bytes, &vae, &f) < 0)
                fail_msg("%s", f.text);
        expect_fault(h3_video_encode_plan(vae, 1, 32, 32, H3_VIDEO_TILING, &p, &f), -EINVAL, &f,
                FAULT_INVALID_MODEL, "holds the decoder only");
        image = decode_image(vae);
        assert_memory_equal(image, reference, IMAGE_BYTES);
        (void) h3_video_vae_free(vae);
}

static void open_encoder_only_names_the_missing_half(void **state) {
        CLEANUP(checkpoint_freep) Checkpoint *c = video_checkpoint();
        CLEANUP_FREE char *config = video_config();
        CLEANUP_FREE uint8_t *bytes = NULL;
        H3VideoDecodePlan p;
        H3VideoEncodePlan e;
        H3VideoVae *vae = NULL;
        Fault f = {};

        drop_half(c, "decoder.", "post_quant_conv.");
        if (video_try_open(c, config, &bytes, &vae, &f) < 0)
                fail_msg("%s", f.text);
        assert_int_equal(h3_video_encode_plan(vae, 1, 32, 32, H3_VIDEO_TILING, &e, &f), 0);
        expect_fault(h3_video_decode_plan(vae, 1, 2, 2, H3_VIDEO_TILING, &p, &f), -EINVAL, &f,
                FAULT_INVALID_MODEL, "holds the encoder only");
        (void) h3_video_vae_free(vae);
}

/* ------------------------------------------------------------------------------------ int8 */

typedef struct Quantised {
        int8_t *q;
        float *scale, *expanded;
} Quantised;

#define GROUP 16
static const char marker[] =
        "{\"format\": \"int8_tensorwise\", \"convrot\": true, \"convrot_groupsize\": 16}";

/* Rows to int8 with rotation, and what they stand for. */
static Quantised quantise(const LkOps *ops, LkContext *context, const StTensor *t, const uint8_t *half) {
        uint64_t rows = t->shape[0], cols = t->shape[1];
        Quantised y = {
                malloc(rows * cols), malloc(rows * sizeof(float)), malloc(rows * cols * sizeof(float))};
        CLEANUP_FREE float *x = malloc(rows * cols * sizeof(float));
        LkDequantise widen = {.w = {.data = half,
                                      .type = LK_F16,
                                      .rows = rows,
                                      .cols = cols,
                                      .row_stride = 2 * cols,
                                      .block_rows = rows},
                .y = x,
                .y_ld = cols};
        LkQuantise to_int8 = {.x_type = LK_F32,
                .m = rows,
                .k = cols,
                .x = x,
                .x_ld = cols,
                .rotation = GROUP,
                .q = y.q,
                .q_ld = cols,
                .scale = y.scale};

        assert_int_equal(ops->dequantise(context, &widen), 0);
        assert_int_equal(ops->quantise(context, &to_int8), 0);
        widen.w = (LkMatrix){.data = y.q,
                .type = LK_I8,
                .rows = rows,
                .cols = cols,
                .row_stride = cols,
                .block_rows = rows,
                .quant = {.scale = y.scale, .scale_stride = 4, .rotation = GROUP}};
        widen.y = y.expanded;
        assert_int_equal(ops->dequantise(context, &widen), 0);
        return y;
}

/* A decoder whose blocks are int8 with rotation gives the bits of one that holds the expanded numbers, with
 * q, k and v of a head interleaved as in the original file. */
static void open_int8_decoder_same_bits_as_expanded(void **state) {
        CLEANUP(checkpoint_freep) Checkpoint *int8 = video_checkpoint();
        CLEANUP(checkpoint_freep) Checkpoint *wide = video_checkpoint();
        CLEANUP_FREE char *config = video_config();
        uint8_t *bytes[2] = {};
        float *images[2] = {};
        const LkOps *ops = lk_cpu_ops(LK_CPU_AUTO);
        Quantised made[32];
        LkContext *context;
        size_t n = 0, tensors = wide->n;
        H3VideoVae *vae[2];
        Fault f = {};

        assert_int_equal(ops->context_new(1, &context), 0);
        drop_half(int8, "encoder.", "quant_conv.");
        for (size_t i = 0; i < tensors; i++) {
                const StTensor t = wide->tensors[i];
                char name[160];

                if (strncmp(t.name, "decoder.transformer_blocks.", 27) != 0 || t.n_dims != 2)
                        continue;
                assert_true(n < ELEMENTSOF(made));
                made[n] = quantise(ops, context, &t, wide->data[i]);
                checkpoint_replace(int8, t.name, ST_I8, 2, t.shape[0], t.shape[1], made[n].q);
                (void) snprintf(name, sizeof(name), "%s_scale", t.name);
                checkpoint_add(int8, name, ST_F32, 2, t.shape[0], 1, made[n].scale);
                (void) snprintf(name, sizeof(name), "%.*scomfy_quant", (int) strlen(t.name) - 6, t.name);
                checkpoint_add(int8, name, ST_U8, 1, sizeof(marker) - 1, 0, marker);
                wide->tensors[i].type = ST_F32;
                wide->tensors[i].size = 2 * t.size;
                wide->data[i] = made[n].expanded;
                n++;
        }
        assert_int_equal(n, 2 * 4);
        if (video_try_open(int8, config, &bytes[0], &vae[0], &f) < 0 ||
                video_try_open(wide, config, &bytes[1], &vae[1], &f) < 0)
                fail_msg("%s", f.text);
        for (size_t i = 0; i < 2; i++)
                images[i] = decode_image(vae[i]);
        assert_memory_equal(images[0], images[1], IMAGE_BYTES);
        for (size_t i = 0; i < 2; i++) {
                (void) h3_video_vae_free(vae[i]);
                free(bytes[i]);
                free(images[i]);
        }
        for (size_t i = 0; i < n; i++) {
                free(made[i].q);
                free(made[i].scale);
                free(made[i].expanded);
        }
        (void) ops->context_free(context);
}

/* ------------------------------------------------------------------------------------ refusals */

static void open_broken_checkpoints_are_refused(void **state) {
        static const struct {
                const char *drop, *part;
        } missing[] = {
                {"encoder.down.2.block.0.norm2.bias", "Missing (1): encoder.down.2.block.0.norm2.bias"},
                {"decoder.transformer_blocks.1.attn.to_qkv.bias", "to_qkv.bias"},
                {"decoder.transformer_blocks.0.scale2", "scale2"},
                {"decoder.register_tokens", "decoder.register_tokens"},
                {"quant_conv.weight", "quant_conv.weight"},
                {"post_quant_conv.bias", "post_quant_conv.bias"},
                {"encoder.down.1.downsample.conv.weight", "downsample"},
        };
        CLEANUP_FREE char *config = video_config();
        CLEANUP(checkpoint_freep) Checkpoint *c = video_checkpoint();

        for (size_t i = 0; i < ELEMENTSOF(missing); i++) {
                CLEANUP(checkpoint_freep) Checkpoint *broken = video_checkpoint();

                checkpoint_drop(broken, missing[i].drop);
                refused(broken, config, -EINVAL, FAULT_INVALID_MODEL, missing[i].part);
        }
        checkpoint_add(c, "encoder.more", ST_F32, 1, 3, 0, NULL);
        refused(c, config, -EINVAL, FAULT_INVALID_MODEL, "Not of this model (1): encoder.more");
        checkpoint_drop(c, "encoder.more");
        checkpoint_replace(c, "decoder.norm_out.bias", ST_F32, 1, 3, 0, NULL);
        refused(c, config, -EINVAL, FAULT_INVALID_MODEL, "decoder.norm_out.bias is [3], expected [");
        checkpoint_replace(c, "decoder.norm_out.bias", ST_I32, 1, 3, 0, NULL);
        refused(c, config, -EOPNOTSUPP, FAULT_NOT_SUPPORTED, "decoder.norm_out.bias is I32");
        checkpoint_rename(c, "decoder.x_embedder.weight", "decoder.proj_in.weight");
        refused(c, config, -EINVAL, FAULT_INVALID_MODEL, "it has tensors");
        {
                CLEANUP(checkpoint_freep) Checkpoint *other = checkpoint_empty();

                checkpoint_add(other, "blocks.0.norm1.weight", ST_F32, 1, 8, 0, NULL);
                refused(other, config, -EINVAL, FAULT_INVALID_MODEL, "it has neither");
        }
}

static void open_config_that_disagrees_is_refused(void **state) {
        CLEANUP_FREE char *config = video_config();
        CLEANUP(checkpoint_freep) Checkpoint *c = video_checkpoint();

        refused_config(c, config, "\"decoder_num_layers\": 2", "\"decoder_num_layers\": 3", -EINVAL,
                FAULT_INVALID_MODEL, "says 3 decoder layers, the tensors say 2");
        refused_config(c, config, "\"decoder_num_attention_heads\": 2", "\"decoder_num_attention_heads\": 4",
                -EINVAL, FAULT_INVALID_MODEL, "4 decoder heads");
        refused_config(c, config, "\"decoder_ffn_mult\": 4", "\"decoder_ffn_mult\": 2", -EINVAL,
                FAULT_INVALID_MODEL, "MLP columns");
        refused_config(c, config, "\"layers_per_block\": ", "\"layers_per_block\": 1", -EINVAL,
                FAULT_INVALID_MODEL, "blocks in an encoder level");
        refused_config(c, config, "\"decoder_num_register_tokens\": 4", "\"decoder_num_register_tokens\": 3",
                -EINVAL, FAULT_INVALID_MODEL, "register tokens");
        refused_config(c, config, "\"latent_channels\": 24", "\"latent_channels\": 16", -EINVAL,
                FAULT_INVALID_MODEL, "latents_mean");
        refused_config(c, config, "\"block_out_channels\": [", "\"block_out_channels\": [ 4,", -EINVAL,
                FAULT_INVALID_MODEL, "a list of six numbers");
        refused_config(c, config, "\"norm_num_groups\": ", "\"norm_num_groups\": 5", -EINVAL,
                FAULT_INVALID_MODEL, "no multiple of 5");
        refused_config(c, config, "\"clip_length\": 17", "\"clip_length\": 33", -EOPNOTSUPP,
                FAULT_NOT_SUPPORTED, "clip_length is not 17");
        refused_config(
                c, config, "\"reflect\"", "\"circular\"", -EOPNOTSUPP, FAULT_NOT_SUPPORTED, "\"circular\"");
        refused_config(c, config, "\"decoder_norm_eps\": ", "\"decoder_norm_eps\": -", -EINVAL,
                FAULT_INVALID_MODEL, "a number above 0");
        refused_config(c, config, "AutoencoderKLMiniMaxH3", "AutoencoderKLWan", -EINVAL, FAULT_INVALID_MODEL,
                "_class_name must be AutoencoderKLMiniMaxH3");
        refused_config(c, config, "\"latents_std\": [", "\"latents_std\": [ 0, ", -EINVAL,
                FAULT_INVALID_MODEL, "latents_std");
        refused(c, "[1]", -EBADMSG, FAULT_INVALID_FILE, "config.json is not a JSON object");
        refused(c, "{", -EBADMSG, FAULT_INVALID_FILE, "config.json is not a JSON object");
}

/* As ComfyUI's file has them. */
static void open_stored_statistics_are_used(void **state) {
        CLEANUP_FREE char *config = video_config(), *half = changed(config, "\"latents_mean\"", "\"a\""),
                          *none = changed(half, "\"latents_std\"", "\"b\"");
        CLEANUP(checkpoint_freep) Checkpoint *c = video_checkpoint();
        CLEANUP_FREE uint8_t *bytes = NULL;
        H3VideoVae *vae = NULL;
        float mean[24], std[24];
        Fault f = {};

        for (unsigned i = 0; i < ELEMENTSOF(mean); i++) {
                mean[i] = (float) i / 8 - 2;
                std[i] = (float) (i + 1) / 16;
        }
        checkpoint_add(c, "latents_std", ST_F32, 1, ELEMENTSOF(std), 0, std);
        refused(c, none, -EINVAL, FAULT_INVALID_MODEL, "latents_std but not latents_mean");
        checkpoint_add(c, "latents_mean", ST_F32, 1, ELEMENTSOF(mean), 0, mean);
        assert_int_equal(video_try_open(c, none, &bytes, &vae, &f), 0);
        assert_memory_equal(h3_video_vae_config(vae)->mean, mean, sizeof(mean));
        assert_memory_equal(h3_video_vae_config(vae)->std, std, sizeof(std));
        (void) h3_video_vae_free(vae);
        refused(c, config, -EINVAL, FAULT_INVALID_MODEL, "is another in config.json than in the file");
        checkpoint_replace(c, "latents_mean", ST_F32, 1, 23, 0, mean);
        refused(c, none, -EINVAL, FAULT_INVALID_MODEL, "latents_std of model.safetensors is no list");
}

/* The publisher's spelling of the same facts; and what disagrees in it. */
static void open_original_config_is_read(void **state) {
        CLEANUP(video_freep) Video *v = video_open();
        CLEANUP(checkpoint_freep) Checkpoint *c = video_checkpoint();
        const H3VideoConfig *is = h3_video_vae_config(v->vae);
        CLEANUP_FREE float *reference = decode_image(v->vae), *image = NULL;
        CLEANUP_FREE uint8_t *bytes = NULL;
        CLEANUP_FREE char *text = NULL;
        H3VideoVae *vae = NULL;
        Fault f = {};

        assert_true(
                asprintf(&text,
                        "{\"ch\": %u, \"ch_mult\": [1, %u, %u, %u, %u, %u], \"num_res_blocks\": %u, "
                        "\"norm_num_groups\": %u, \"padding_mode\": \"reflect\", "
                        "\"space_down\": [2, 2, 2, 2, 1, 1], \"vae_ratio\": 16, \"latent_channels\": 24, "
                        "\"vit_decoder_kwargs\": {\"dim_head\": %u, \"heads\": %u, \"num_layers\": %u, "
                        "\"rope_dim_ratio\": 0.75, \"rope_theta\": 100.0}}",
                        is->channels[0], is->channels[1] / is->channels[0],
                        is->channels[2] / is->channels[0], is->channels[3] / is->channels[0],
                        is->channels[4] / is->channels[0], is->channels[5] / is->channels[0],
                        is->level_blocks, is->groups, is->head_dim, is->heads, is->layers) > 0);
        if (video_try_open(c, text, &bytes, &vae, &f) < 0)
                fail_msg("%s", f.text);
        image = decode_image(vae); /* without mean and std: the published ones, which the file has, too */
        assert_memory_equal(image, reference, IMAGE_BYTES);
        (void) h3_video_vae_free(vae);

        refused_config(c, text, "\"ch\": ", "\"ch\": 1", -EINVAL, FAULT_INVALID_MODEL,
                "channels of an encoder level");
        refused_config(c, text, "\"rope_dim_ratio\": 0.75", "\"rope_dim_ratio\": 0.5", -EOPNOTSUPP,
                FAULT_NOT_SUPPORTED, "rope_dim_ratio is not 0.75");
        refused_config(c, text, "\"space_down\": [2, 2, 2", "\"space_down\": [2, 2, 1", -EOPNOTSUPP,
                FAULT_NOT_SUPPORTED, "space_down");
        refused_config(c, text, "{\"dim_head\"", "[], \"x\": {\"dim_head\"", -EINVAL, FAULT_INVALID_MODEL,
                "vit_decoder_kwargs");
}

/* ------------------------------------------------------------------------------------ the demo model */

static uint8_t *demo_file(const char *name, uint64_t *ret_size) {
        const char *source = getenv("LATENT_SOURCE_DIR");
        char folder[4096];

        (void) snprintf(folder, sizeof(folder), "%s/tests/demo-model", source ? source : "");
        return golden_read(folder, name, ret_size);
}

/* Rows of a transformer, [rows, 96], as a latent [24, t, h, w]. */
static float *latent_of(const Golden *g, const char *name, uint64_t t, uint64_t h, uint64_t w) {
        const H3Config c = {.video_channels = 24, .patch_h = 2, .patch_w = 2};
        const H3Grid grid = {t, h, w};
        uint64_t n;
        const float *rows = golden_data(g, name, ST_F32, &n);
        float *z = malloc(n * sizeof(float));

        assert_int_equal(n, 24 * t * h * w);
        h3_rows_to_video(&c, &grid, rows, 0, t * h * w / 4, z);
        return z;
}

/* Frames 0, 10, 21 that the public classes decode of made rows, and their latent of the keyframe. Padding
 * with zeros, diffusers names, bf16 matrices. */
static void demo_model_matches_public_classes(void **state) {
        static const uint64_t shown[] = {0, 10, 21};
        const uint64_t frame = 96ull * 160 * 3;
        H3File files[] = {{.name = "diffusion_pytorch_model.safetensors"}, {.name = "config.json"}};
        CLEANUP_FREE uint8_t *weights = NULL, *config = NULL, *rgb = NULL;
        CLEANUP_FREE float *z = NULL, *clean = NULL, *moments = NULL, *got = NULL;
        H3VideoDecodePlan d;
        H3VideoEncodePlan e;
        H3VideoVae *vae = NULL;
        const uint8_t *expected;
        uint64_t size, off = 0;
        double largest;
        Golden sample = {};
        float **tiles;
        Fault f = {};

        if (!getenv("LATENT_SOURCE_DIR"))
                skip();
        files[0].bytes = weights = demo_file("vae/diffusion_pytorch_model.safetensors", &files[0].size);
        files[1].bytes = config = demo_file("vae/config.json", &files[1].size);
        if (h3_video_vae_open(files, 2, lk_cpu_ops(LK_CPU_AUTO), &vae, &f) < 0)
                fail_msg("%s", f.text);
        assert_true(h3_video_vae_config(vae)->pad == LK_PAD_ZERO);
        sample.bytes = demo_file("samples/ref_3.safetensors", &size);
        {
                uint64_t header;

                assert_int_equal(st_header_size(sample.bytes, size, size, "ref_3", &header, &f), 0);
                assert_int_equal(
                        st_header_parse(sample.bytes, header, size, "ref_3", &sample.header, &f), 0);
        }

        z = latent_of(&sample, "video_rows_8", 7, 6, 10);
        assert_int_equal(h3_video_decode_plan(vae, 7, 6, 10, H3_VIDEO_TILING, &d, &f), 0);
        tiles = video_decode_all(vae, &d, z, NULL);
        rgb = video_blend_all(&d, tiles, H3_PIXELS_U8, 96);
        video_tiles_free(tiles, 1);
        expected = golden_data(&sample, "frames_8_u8", ST_U8, NULL);
        for (uint64_t i = 0; i < 3 * frame; i++) {
                int difference = rgb[shown[i / frame] * frame + i % frame] - expected[i];

                assert_true(abs(difference) <= 1);
                off += difference != 0;
        }
        assert_true(off <= 3 * frame / 1000);

        clean = latent_of(&sample, "keyframe_rows_clean", 1, 6, 10);
        assert_int_equal(h3_video_encode_plan(vae, 1, 96, 160, H3_VIDEO_TILING, &e, &f), 0);
        tiles = video_encode_all(
                vae, &e, H3_PIXELS_U8, golden_data(&sample, "keyframe_pixels_u8", ST_U8, NULL), NULL);
        moments = video_moments_all(vae, &e, tiles);
        video_tiles_free(tiles, 1);
        got = malloc(24 * 60 * sizeof(float));
        h3_video_latent_mean(vae, moments, 60, got);
        assert_true(golden_distance(got, clean, 24 * 60, &largest) <= 5e-5);

        (void) st_header_free(sample.header);
        free(sample.bytes);
        (void) h3_video_vae_free(vae);
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(open_original_reads_sizes),
                cmocka_unit_test(open_types_and_places_same_bits),
                cmocka_unit_test(open_decoder_only_names_the_missing_half),
                cmocka_unit_test(open_encoder_only_names_the_missing_half),
                cmocka_unit_test(open_int8_decoder_same_bits_as_expanded),
                cmocka_unit_test(open_broken_checkpoints_are_refused),
                cmocka_unit_test(open_config_that_disagrees_is_refused),
                cmocka_unit_test(open_original_config_is_read),
                cmocka_unit_test(open_stored_statistics_are_used),
                cmocka_unit_test(demo_model_matches_public_classes),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
