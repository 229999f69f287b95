/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "service/h3/lora-private.h"
#include "service/shared/cleanup.h"

/* How trainers spell adapter keys. Names are compared with '.' as '_', because musubi writes them so. */

#define NAME_SIZE 256

static const struct {
        const char *suffix;
        LoraRole role;
        bool named;
} roles[] = {
        {".lora_A.weight", LORA_A, false},
        {".lora_B.weight", LORA_B, false},
        {".lora_A.default.weight", LORA_A, true},
        {".lora_B.default.weight", LORA_B, true},
        {".lora_down.weight", LORA_A, false},
        {".lora_up.weight", LORA_B, false},
        {".alpha", LORA_ALPHA, false},
};

static const char *const prefixes[] = {
        "base_model.model.", "model.diffusion_model.", "diffusion_model.", "transformer.", "lora_unet_"};

static const struct {
        const char *prefix;
        bool refiner, diffusers;
} blocks[] = {
        {"token_refiner_refiner_blocks_", true, true},
        {"token_refiner_blocks_", true, false},
        {"transformer_blocks_", false, true},
        {"blocks_", false, false},
};

static const struct {
        const char *original, *diffusers;
        LoraPart part;
} block_parts[] = {
        {"attn_qkv_proj", NULL, LORA_QKV},
        {NULL, "attn_to_q", LORA_Q},
        {NULL, "attn_to_k", LORA_K},
        {NULL, "attn_to_v", LORA_V},
        {"attn_out_proj", "attn_to_out_0", LORA_OUT},
        {"mlp_fc1", "ff_net_0_proj", LORA_FC1},
        {"mlp_fc2", "ff_net_2", LORA_FC2},
        {"adaln_proj_linear", "adaln_proj_linear", LORA_ADALN},
};

static const struct {
        const char *original, *diffusers;
        LoraPart part;
} ends[] = {
        {"video_patch_proj", "proj_in", LORA_VIDEO_IN},
        {"audio_patch_proj", "audio_proj_in", LORA_AUDIO_IN},
        {"condition_proj", "context_embedder", LORA_TEXT_IN},
        {"time_embedder_proj_in", "time_embedder_linear_1", LORA_TIME_1},
        {"time_embedder_proj_out", "time_embedder_linear_2", LORA_TIME_2},
        {"final_layer_adaln_proj_linear", "norm_out_linear", LORA_FINAL_ADALN},
        {"final_layer_video_out", "proj_out", LORA_VIDEO_OUT},
        {"final_layer_audio_out", "audio_proj_out", LORA_AUDIO_OUT},
};

LoraRole lora_key_split(const char *key, size_t *ret_n, bool *ret_named_adapter) {
        size_t n = strlen(key);
        const char *dot;

        for (size_t i = 0; i < ELEMENTSOF(roles); i++) {
                size_t m = strlen(roles[i].suffix);

                if (n > m && strcmp(key + n - m, roles[i].suffix) == 0) {
                        *ret_n = n - m;
                        *ret_named_adapter = roles[i].named;
                        return roles[i].role;
                }
        }
        dot = strrchr(key, '.');
        *ret_n = dot && dot != key ? (size_t) (dot - key) : n;
        *ret_named_adapter = false;
        return LORA_OTHER;
}

static bool equal(const char *a, const char *b) {
        return a && strcmp(a, b) == 0;
}

static LoraTarget block_target(const char *rest, bool refiner, bool diffusers) {
        LoraTarget t = {.refiner = refiner, .diffusers = diffusers};
        unsigned long layer;
        char *end;

        if (rest[0] < '0' || rest[0] > '9')
                return t;
        layer = strtoul(rest, &end, 10);
        if (*end != '_' || layer > UINT32_MAX || end - rest > 6)
                return t;
        t.layer = (uint32_t) layer;
        for (size_t i = 0; i < ELEMENTSOF(block_parts); i++)
                if (equal(diffusers ? block_parts[i].diffusers : block_parts[i].original, end + 1))
                        t.part = block_parts[i].part;
        return t;
}

LoraTarget lora_target_parse(const char *module) {
        char name[NAME_SIZE];
        bool again = true;

        while (again) {
                again = false;
                for (size_t i = 0; i < ELEMENTSOF(prefixes); i++)
                        if (strncmp(module, prefixes[i], strlen(prefixes[i])) == 0) {
                                module += strlen(prefixes[i]);
                                again = true;
                        }
        }
        if (strlen(module) >= sizeof(name))
                return (LoraTarget){};
        (void) snprintf(name, sizeof(name), "%s", module);
        for (char *p = name; *p; p++)
                if (*p == '.')
                        *p = '_';

        for (size_t i = 0; i < ELEMENTSOF(blocks); i++)
                if (strncmp(name, blocks[i].prefix, strlen(blocks[i].prefix)) == 0)
                        return block_target(
                                name + strlen(blocks[i].prefix), blocks[i].refiner, blocks[i].diffusers);
        for (size_t i = 0; i < ELEMENTSOF(ends); i++)
                if (equal(ends[i].original, name) || equal(ends[i].diffusers, name))
                        return (LoraTarget){
                                .part = ends[i].part, .diffusers = equal(ends[i].diffusers, name)};
        return (LoraTarget){};
}
