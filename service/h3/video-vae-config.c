/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <string.h>

#include "service/h3/video-vae-private.h"
#include "service/shared/cleanup.h"

/* config.json in the publisher's and in diffusers' spelling, in which the same fact has two names. */

#define SIZE_MAX_SAID 1048576

const uint32_t video_space_stride[H3_VIDEO_LEVELS] = {2, 2, 2, 2, 1, 1};
const uint32_t video_time_stride[H3_VIDEO_LEVELS] = {1, 2, 2, 1, 1, 1};

/* h3.md 5.6 */
static const float published_mean[24] = {0.858090341091156f, -0.9606591463088989f, 1.0661640167236328f,
        -0.5090325474739075f, -0.2727581858634949f, -1.3675414323806763f, -0.2553254961967468f,
        -0.26907554268836975f, -0.5376840829849243f, -0.0464097298681736f, 0.6657370328903198f,
        0.19690127670764923f, -0.5460608005523682f, -0.4035342037677765f, -0.23683024942874908f,
        0.25928452610969543f, -0.30133944749832153f, 0.211341992020607f, -1.1206848621368408f,
        0.3581933379173279f, -0.04225143790245056f, 0.2604829967021942f, 0.22864092886447906f,
        0.7056031823158264f};
static const float published_std[24] = {1.2223774194717407f, 1.2767263650894165f, 1.68317747116088865f,
        1.7549455165863037f, 1.5636216402053833f, 2.194143533706665f, 0.96531379222869875f,
        1.05698859691619875f, 0.841948926448822f, 0.7729952931404114f, 1.8955937623977661f,
        0.946841835975647f, 0.7996809482574463f, 0.44988900423049925f, 0.7197399735450745f,
        0.69362932443618775f, 2.961095094680786f, 2.7694199085235595f, 3.0496184825897215f,
        2.1088054180145265f, 3.276226282119751f, 3.1627357006073f, 2.28168129920959475f,
        2.6127843856811525f};

static void json_unref(json_t **j) {
        json_decref(*j);
}

static int bad(const char *key, const char *expected, Fault *f) {
        return fault_set(f, -EINVAL, FAULT_INVALID_MODEL,
                "config.json: %s must be %s. Use the config.json of this model, or leave it out.", key,
                expected);
}

static int read_size(const json_t *root, const char *key, uint32_t *ret, Fault *f) {
        const json_t *v = json_object_get(root, key);

        if (!v)
                return 0;
        if (!json_is_integer(v) || json_integer_value(v) < 1 || json_integer_value(v) > SIZE_MAX_SAID)
                return bad(key, "a whole number from 1 to 1048576", f);
        *ret = (uint32_t) json_integer_value(v);
        return 0;
}

static int read_real(const json_t *root, const char *key, double *ret, Fault *f) {
        const json_t *v = json_object_get(root, key);

        if (!v)
                return 0;
        if (!json_is_number(v) || !(json_number_value(v) > 0) || !(json_number_value(v) < 1e9))
                return bad(key, "a number above 0", f);
        *ret = json_number_value(v);
        return 0;
}

static int read_list(
        const json_t *root, const char *key, bool positive, float *ret, size_t *ret_n, Fault *f) {
        const json_t *v = json_object_get(root, key);

        *ret_n = 0;
        if (!v)
                return 0;
        if (!json_is_array(v) || json_array_size(v) < 1 || json_array_size(v) > H3_VIDEO_CHANNELS_MAX)
                return bad(key, "a list of 1 to 64 numbers", f);
        for (size_t i = 0; i < json_array_size(v); i++) {
                const json_t *n = json_array_get(v, i);

                if (!json_is_number(n) || !isfinite((float) json_number_value(n)) ||
                        (positive && !((float) json_number_value(n) > 0)))
                        return bad(key, positive ? "a list of numbers above 0" : "a list of numbers", f);
                ret[i] = (float) json_number_value(n);
        }
        *ret_n = json_array_size(v);
        return 0;
}

/* A constant of this version: other values would need other code. */
static int check_constant(const json_t *root, const char *key, double is, Fault *f) {
        const json_t *v = json_object_get(root, key);

        if (!v || (json_is_number(v) && json_number_value(v) == is))
                return 0;
        return fault_set(f, -EOPNOTSUPP, FAULT_NOT_SUPPORTED,
                "config.json: %s is not %g, the only value that this version runs.", key, is);
}

static int check_strides(const json_t *root, const char *key, const uint32_t *is, Fault *f) {
        const json_t *v = json_object_get(root, key);
        bool same = json_is_array(v) && json_array_size(v) == H3_VIDEO_LEVELS;

        if (!v)
                return 0;
        for (size_t i = 0; same && i < H3_VIDEO_LEVELS; i++)
                same = json_is_integer(json_array_get(v, i)) &&
                       json_integer_value(json_array_get(v, i)) == is[i];
        if (same)
                return 0;
        return fault_set(f, -EOPNOTSUPP, FAULT_NOT_SUPPORTED,
                "config.json: %s is not the published [%u, %u, %u, %u, %u, %u], which is all that this "
                "version runs.",
                key, is[0], is[1], is[2], is[3], is[4], is[5]);
}

static int check_constants(const json_t *root, const json_t *vit, Fault *f) {
        static const struct {
                const char *key;
                double is;
        } constants[] = {
                {"in_channels", 3},
                {"out_channels", 3},
                {"out_ch", 3},
                {"clip_length", H3_VIDEO_CLIP_FRAMES},
                {"vae_clip_length", H3_VIDEO_CLIP_FRAMES},
                {"token_drop", H3_VIDEO_TOKEN_DROP},
                {"vae_token_drop", H3_VIDEO_TOKEN_DROP},
                {"vae_ratio", H3_VIDEO_RATIO},
                {"vae_ratio_t", H3_VIDEO_TOKEN_FRAMES},
                {"decoder_rope_dim_ratio", 0.75},
        };
        int r = 0;

        for (size_t i = 0; r >= 0 && i < ELEMENTSOF(constants); i++)
                r = check_constant(root, constants[i].key, constants[i].is, f);
        if (r >= 0)
                r = check_constant(vit, "rope_dim_ratio", 0.75, f);
        if (r >= 0)
                r = check_strides(root, "spatial_downsample_factors", video_space_stride, f);
        if (r >= 0)
                r = check_strides(root, "space_down", video_space_stride, f);
        if (r >= 0)
                r = check_strides(root, "temporal_downsample_factors", video_time_stride, f);
        return r < 0 ? r : check_strides(root, "time_down", video_time_stride, f);
}

static int read_pad(const json_t *root, const char *key, LkPad *ret, Fault *f) {
        static const struct {
                const char *name;
                LkPad pad;
        } pads[] = {{"reflect", LK_PAD_REFLECT}, {"replicate", LK_PAD_REPLICATE}, {"constant", LK_PAD_ZERO},
                {"zeros", LK_PAD_ZERO}};
        const json_t *v = json_object_get(root, key);
        const char *name = json_string_value(v);

        if (!v)
                return 0;
        for (size_t i = 0; name && i < ELEMENTSOF(pads); i++)
                if (strcmp(name, pads[i].name) == 0) {
                        *ret = pads[i].pad;
                        return 0;
                }
        return fault_set(f, -EOPNOTSUPP, FAULT_NOT_SUPPORTED,
                "config.json: %s is \"%.100s\"; this version runs reflect, replicate and constant.", key,
                name ? name : "(not a string)");
}

/* diffusers: block_out_channels; original: ch times ch_mult. */
static int read_channels(const json_t *root, VideoSaid *s, Fault *f) {
        const json_t *all = json_object_get(root, "block_out_channels"),
                     *mult = json_object_get(root, "ch_mult");
        const json_t *list = all ? all : mult;
        uint32_t ch = 1;
        int r = 0;

        if (!list)
                return 0;
        if (!all)
                r = read_size(root, "ch", &ch, f);
        if (r < 0)
                return r;
        if (!json_is_array(list) || json_array_size(list) != H3_VIDEO_LEVELS)
                return bad(all ? "block_out_channels" : "ch_mult", "a list of six numbers", f);
        for (size_t i = 0; i < H3_VIDEO_LEVELS; i++) {
                const json_t *v = json_array_get(list, i);

                if (!json_is_integer(v) || json_integer_value(v) < 1 ||
                        json_integer_value(v) > SIZE_MAX_SAID / ch)
                        return bad(all ? "block_out_channels" : "ch_mult", "a list of whole numbers", f);
                s->channels[i] = (uint32_t) json_integer_value(v) * ch;
        }
        return 0;
}

static int read_sizes(const json_t *root, const json_t *vit, VideoSaid *s, Fault *f) {
        const struct {
                const json_t *from;
                const char *key;
                uint32_t *to;
        } sizes[] = {
                {root, "latent_channels", &s->latent_channels},
                {root, "layers_per_block", &s->level_blocks},
                {root, "num_res_blocks", &s->level_blocks},
                {root, "norm_num_groups", &s->groups},
                {root, "decoder_num_layers", &s->layers},
                {root, "decoder_num_attention_heads", &s->heads},
                {root, "decoder_attention_head_dim", &s->head_dim},
                {root, "decoder_num_register_tokens", &s->registers},
                {root, "decoder_ffn_mult", &s->ffn_mult},
                {vit, "num_layers", &s->layers},
                {vit, "heads", &s->heads},
                {vit, "dim_head", &s->head_dim},
        };
        const struct {
                const json_t *from;
                const char *key;
                double *to;
        } reals[] = {
                {root, "norm_eps", &s->group_eps},
                {root, "decoder_norm_eps", &s->eps},
                {root, "decoder_rope_theta", &s->rope_theta},
                {vit, "rope_theta", &s->rope_theta},
        };
        int r = 0;

        for (size_t i = 0; r >= 0 && i < ELEMENTSOF(sizes); i++)
                r = read_size(sizes[i].from, sizes[i].key, sizes[i].to, f);
        for (size_t i = 0; r >= 0 && i < ELEMENTSOF(reals); i++)
                r = read_real(reals[i].from, reals[i].key, reals[i].to, f);
        return r;
}

static int read_statistics(const json_t *root, VideoSaid *s, Fault *f) {
        size_t n_mean, n_std;
        int r;

        r = read_list(root, "latents_mean", false, s->mean, &n_mean, f);
        if (r >= 0)
                r = read_list(root, "latents_std", true, s->std, &n_std, f);
        if (r < 0)
                return r;
        if (n_mean != n_std || (n_mean > 0 && s->latent_channels > 0 && n_mean != s->latent_channels))
                return bad("latents_mean and latents_std", "lists of latent_channels numbers", f);
        s->has_statistics = n_mean > 0;
        if (n_mean > 0)
                s->latent_channels = (uint32_t) n_mean;
        return 0;
}

int video_config_read(const char *json, uint64_t size, VideoSaid *ret, Fault *f) {
        CLEANUP(json_unref) json_t *root = NULL;
        VideoSaid s = {.pad = LK_PAD_REFLECT,
                .groups = 32,
                .head_dim = 64,
                .group_eps = 1e-6,
                .eps = 1e-5,
                .rope_theta = 100};
        const json_t *vit, *class;
        json_error_t error;
        int r;

        if (!json) {
                *ret = s;
                return 0;
        }
        root = json_loadb(json, size, JSON_REJECT_DUPLICATES, &error);
        if (!root || !json_is_object(root))
                return fault_set(f, -EBADMSG, FAULT_INVALID_FILE,
                        "config.json is not a JSON object: %s (line %d).",
                        root ? "it is something else" : error.text, root ? 1 : error.line);
        class = json_object_get(root, "_class_name");
        if (class &&
                (!json_is_string(class) || strcmp(json_string_value(class), "AutoencoderKLMiniMaxH3") != 0))
                return bad("_class_name", "AutoencoderKLMiniMaxH3", f);
        vit = json_object_get(root, "vit_decoder_kwargs");
        if (vit && !json_is_object(vit))
                return bad("vit_decoder_kwargs", "an object", f);

        r = check_constants(root, vit, f);
        if (r >= 0)
                r = read_pad(root, "spatial_padding_mode", &s.pad, f);
        if (r >= 0)
                r = read_pad(root, "padding_mode", &s.pad, f);
        if (r >= 0)
                r = read_channels(root, &s, f);
        if (r >= 0)
                r = read_sizes(root, vit, &s, f);
        if (r >= 0)
                r = read_statistics(root, &s, f);
        if (r < 0)
                return r;
        *ret = s;
        return 0;
}

static int compare(const char *what, uint64_t said, uint64_t is, Fault *f) {
        if (said == 0 || said == is)
                return 0;
        return fault_set(f, -EINVAL, FAULT_INVALID_MODEL,
                "config.json says %" PRIu64 " %s, the tensors say %" PRIu64
                ". Use the config.json of this model, or leave it out.",
                said, what, is);
}

int video_config_stored(const H3Statistics *stored, VideoSaid *s, Fault *f) {
        if (stored->n == 0)
                return 0;

        if (s->latent_channels > 0 && s->latent_channels != stored->n)
                return fault_set(f, -EINVAL, FAULT_INVALID_MODEL,
                        "latents_mean has %" PRIu32 " numbers, config.json says %" PRIu32 " latent channels.", stored->n,
                        s->latent_channels);
        s->latent_channels = stored->n;
        for (uint32_t i = 0; i < stored->n; i++) {
                if (s->has_statistics && (!h3_statistics_agree(s->mean[i], stored->mean[i]) ||
                                                 !h3_statistics_agree(s->std[i], stored->std[i])))
                        return fault_set(f, -EINVAL, FAULT_INVALID_MODEL,
                                "latents_mean or latents_std of channel %" PRIu32
                                " is another in config.json than in the file. Use the config.json of this model, or "
                                "leave it out.",
                                i);
                if (!s->has_statistics) {
                        s->mean[i] = stored->mean[i];
                        s->std[i] = stored->std[i];
                }
        }
        s->has_statistics = true;
        return 0;
}

int video_config_check(const VideoSaid *s, const H3VideoConfig *c, Fault *f) {
        int r;

        r = compare("latent channels", s->latent_channels, c->latent_channels, f);
        for (uint32_t i = 0; r >= 0 && c->has_encoder && i < H3_VIDEO_LEVELS; i++)
                r = compare("channels of an encoder level", s->channels[i], c->channels[i], f);
        if (r >= 0 && c->has_encoder)
                r = compare("blocks in an encoder level", s->level_blocks, c->level_blocks, f);
        if (r < 0 || !c->has_decoder)
                return r;
        r = compare("decoder layers", s->layers, c->layers, f);
        if (r >= 0)
                r = compare("decoder heads", s->heads, c->heads, f);
        if (r >= 0)
                r = compare("register tokens", s->registers, c->registers, f);
        return r < 0 ? r : compare("MLP columns", (uint64_t) s->ffn_mult * c->hidden, c->ffn, f);
}

int video_config_statistics(const VideoSaid *s, H3VideoConfig *c, Fault *f) {
        bool said = s->has_statistics;

        if (!said && c->latent_channels != ELEMENTSOF(published_mean))
                return fault_set(f, -EINVAL, FAULT_INVALID_MODEL,
                        "The model has %u latent channels; without a config.json that gives latents_mean "
                        "and "
                        "latents_std it must have the published %zu.",
                        c->latent_channels, ELEMENTSOF(published_mean));
        memcpy(c->mean, said ? s->mean : published_mean, c->latent_channels * sizeof(float));
        memcpy(c->std, said ? s->std : published_std, c->latent_channels * sizeof(float));
        return 0;
}
