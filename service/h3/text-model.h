/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* A conditioner checkpoint (Qwen3-VL, h3.md 3): configuration and a view of every weight that a run needs.
 * Owns no weight bytes: views point into the files' memory, which must stay mapped as long as the model
 * lives. Knows the names of the published folder (model.language_model.*, model.visual.*; one file or
 * shards) and of single files (model.*, visual.*), matrices plain or quantised (h3.md 2.2, 2.3). */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/ops.h"
#include "service/h3/model.h"
#include "service/shared/fault.h"

#define H3_DEEPSTACK_MAX 8

typedef struct H3VisionConfig {
        uint32_t depth;
        uint32_t hidden, heads, head_dim, ffn;
        uint32_t merged; /* 4 * hidden: a merged token's patches side by side */
        uint32_t patch;  /* numbers of a patch: 1536 */
        uint32_t grid;   /* the position table is grid * grid */
        uint32_t n_deepstack;
        uint32_t deepstack[H3_DEEPSTACK_MAX]; /* blocks (from 0) after which a merger takes what goes behind
                                                 language layer 0, 1, ... */
        float eps, theta;
} H3VisionConfig;

#define H3_TEXT_TOKENS_MAX (UINT64_C(1) << 20) /* of any model */

typedef struct H3TextConfig {
        uint32_t layers;      /* that run (K) */
        uint32_t file_layers; /* that the files have */
        uint32_t hidden, heads, kv_heads, head_dim, ffn, vocab;
        uint32_t sections[3]; /* M-RoPE frequencies of t, h, w; sum head_dim / 2 */
        uint32_t tokens_max;  /* that it was made for */
        float eps, theta;
        H3VisionConfig vision;
} H3TextConfig;

typedef struct H3TextLayer {
        LkVector norm1, norm2;   /* [hidden] */
        LkVector q_norm, k_norm; /* [head_dim] */
        LkMatrix q, k, v, out;   /* [heads * head_dim, hidden], [kv_heads * head_dim, hidden] twice,
                                    [hidden, heads * head_dim] */
        LkMatrix gate, up, down; /* [ffn, hidden] twice, [hidden, ffn] */
} H3TextLayer;

typedef struct H3Linear {
        LkMatrix w;
        LkVector bias;
} H3Linear;

typedef struct H3LayerNorm {
        LkVector weight, bias;
} H3LayerNorm;

typedef struct H3VisionBlockWeights {
        H3LayerNorm norm1, norm2;
        H3Linear qkv; /* [3 * hidden, hidden]: q, k, v, each heads in order */
        H3Linear out, fc1, fc2;
} H3VisionBlockWeights;

typedef struct H3Merger {
        H3LayerNorm norm;  /* of the main one [hidden], of deepstack [merged] */
        H3Linear fc1, fc2; /* [merged, merged], [text hidden, merged] */
} H3Merger;

typedef struct H3TextModel {
        H3TextConfig config;
        H3TextLayer *layers;          /* [layers] */
        LkMatrix embed;               /* [vocab, hidden] */
        H3Linear patch;               /* [vision hidden, patch] */
        LkVector positions;           /* [grid * grid * vision hidden] */
        H3VisionBlockWeights *blocks; /* [depth] */
        H3Merger merger, deepstack[H3_DEEPSTACK_MAX];
        /* for people */
        char layout[24];       /* "published", "published-sharded", "comfy" */
        char types[64];        /* "BF16, I8 (rotated)" */
        uint32_t matrix_types; /* bit per LkType */
        uint64_t weight_bytes; /* of what a run reads */
        uint32_t n_tensors;    /* in the files */
} H3TextModel;

/* Opens a model from its files. Sizes come from the shapes; what shapes do not say (M-RoPE sections, vision
 * heads, deepstack blocks, eps, theta) from config.json or, without one, as released, if the sizes are the
 * released ones. A config.json that disagrees is an error. How many layers run: config.json's
 * latentd_run_layers; else all of a single (comfy) file; else 50 of 64 (h3.md 3.1); else it is an error.
 * ops: the backend that will run it, asked whether it can; may be NULL. Missing, extra and mis-shaped
 * tensors: one error that lists them. -EBADMSG (InvalidFile), -EINVAL (InvalidModel), -EOPNOTSUPP
 * (NotSupported), -ENOMEM. */
int h3_text_open(const H3File *files, size_t n_files, const LkOps *ops, H3TextModel **ret, Fault *f);
H3TextModel *h3_text_free(H3TextModel *m);
