/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* An H3 denoiser checkpoint: configuration from tensor shapes and a view of every weight. Owns no weight
 * bytes but those that a LoRA changed: views point into the files' memory, which must stay mapped as long as
 * the model lives. Knows all published layouts (h3.md 1.2): diffusers (single, sharded), original names
 * interleaved or stacked; with the time embedder or as a curve (1.12); matrices plain or quantised
 * (2.2, 2.3). */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/ops.h"
#include "service/shared/fault.h"

#define H3_ROPE_FREQS_MAX 32
#define H3_TAGS 3 /* modalities: 0 video, 1 text, 2 audio (h3.md 1.6) */

typedef enum H3QkvOrder {
        H3_QKV_AUTO, /* diffusers: split; original names: a folder with the official index interleaved, else
                        stacked */
        H3_QKV_INTERLEAVED, /* per head q, k, v (raw MiniMax shards) */
        H3_QKV_STACKED,     /* [Q | K | V] (Comfy single files) */
        H3_QKV_SPLIT,       /* three matrices (diffusers); never asked for, only reported */
} H3QkvOrder;

/* One file of the checkpoint, in memory. Name decides the kind: "*.safetensors", "*.index.json",
 * "config.json", those of h3_shifts_read(); others are ignored. bytes may be changed by a hostile writer at any time: headers are
 * copied before they are parsed. */
typedef struct H3File {
        const char *name;
        const void *bytes;
        uint64_t size;
} H3File;

typedef struct H3Config {
        uint32_t layers, refiner_layers;
        uint32_t hidden, heads, head_dim, inner, ffn; /* inner = heads * head_dim */
        uint32_t video_channels, audio_channels;      /* 24, 32 */
        uint32_t patch_h, patch_w;                    /* 2, 2; temporal patch is 1 */
        uint32_t text_dim;
        uint32_t time_freq_dim, time_hidden; /* 0 with a curve */
        uint32_t time_dim;                   /* columns of the AdaLN matrices */
        uint32_t curve_points;               /* rows of the curve table; 0: a time embedder */
        uint32_t rope_freqs;                 /* per axis */
        float rope_inv_freq[H3_ROPE_FREQS_MAX];
        float eps;
} H3Config;

typedef struct H3Attention {
        LkMatrix q, k, v; /* [inner, hidden] views, heads in order: head h is rows [h * head_dim, (h + 1) *
                             head_dim) */
        LkMatrix out;     /* [hidden, inner] */
        LkMatrix gate;    /* [inner, hidden], rows as those of q: of the coarse branch (h3.md 1.14); absent but in models made for VSA */
        LkVector q_norm, k_norm; /* [head_dim] */
} H3Attention;

typedef struct H3Mlp {
        LkMatrix gate, up; /* [ffn, hidden] */
        LkMatrix down;     /* [hidden, ffn] */
} H3Mlp;

typedef struct H3Block {
        LkVector norm1, norm2;
        H3Attention attn;
        H3Mlp mlp;
        LkMatrix adaln; /* [H3_TAGS * 6 * hidden, time_dim]; absent (data NULL) in refiner blocks */
        LkVector adaln_bias;
} H3Block;

/* Which requests a checkpoint was made for. No file says so: the broker tells from its name. */
typedef enum H3Partition {
        H3_PARTITION_UNKNOWN,
        H3_PARTITION_FL2VA,  /* t2va, fl2va */
        H3_PARTITION_REF2VA, /* ref2va */
} H3Partition;

/* Memory of a merged matrix: whole pages, so that it can be registered with a device. */
#define H3_MERGED_ALIGN 4096u
typedef struct H3Merged {
        void *data;
        uint64_t size;
} H3Merged;

typedef struct H3Model {
        H3Config config;
        H3Block *blocks;  /* [layers] */
        H3Block *refiner; /* [refiner_layers] */
        LkVector refiner_norm;
        LkMatrix video_in, audio_in, text_in;
        LkVector video_in_bias, audio_in_bias, text_in_bias;
        LkMatrix time_1, time_2; /* absent with a curve */
        LkVector time_1_bias, time_2_bias;
        LkVector curve; /* the table [curve_points, time_dim] (h3.md 1.12); absent with a time embedder */
        LkVector final_norm;
        LkMatrix final_adaln; /* [2 * hidden, time_dim]: shift, scale */
        LkVector final_adaln_bias;
        LkMatrix video_out, audio_out;
        LkVector video_out_bias, audio_out_bias;
        /* what it was made of, for people */
        char layout[24];
        H3QkvOrder qkv_order;
        char types[64];    /* "BF16, F32, I8 (rotated)" */
        char support[160]; /* what the backend does with each: "int8: native ..."; "" if no ops were given */
        char warning[240]; /* for people; "" none */
        bool gated;        /* every block has attn.gate; else none */
        uint32_t matrix_types; /* bit per LkType */
        uint32_t int8_cols;    /* columns of the widest int8 matrix; 0: none */
        H3Partition partition;
        float shift_video, shift_audio; /* schedule.h; 0: no file says */
        uint64_t weight_bytes;
        uint32_t n_tensors;
        uint64_t private_bytes; /* of merged matrices */
        H3Merged *merged;       /* [n_merged], owned */
        size_t n_merged;
} H3Model;

typedef struct H3ModelOptions {
        H3QkvOrder qkv_order;
        H3Partition partition;
        const LkOps *ops; /* the backend that will run it, asked whether it can; NULL: not asked */
} H3ModelOptions;

/* Opens a model from its files. Configuration from shapes as DESIGN.md says; a config.json that disagrees is
 * an error. Missing, extra and mis-shaped tensors: one error that lists them. -EBADMSG (InvalidFile),
 * -EINVAL (InvalidModel), -EOPNOTSUPP (NotSupported: a format of a later version, or one that options->ops
 * does not run), -ENOMEM. */
int h3_model_open(
        const H3File *files, size_t n_files, const H3ModelOptions *options, H3Model **ret, Fault *f);
H3Model *h3_model_free(H3Model *m);

/* What a backend does with each kind of matrix that the model has, in words. -EOPNOTSUPP (NotSupported) if
 * there is one that it does not run. */
int h3_model_support(const H3Model *m, const LkOps *ops, char *ret, size_t size, Fault *f);

/* references: the request has reference images, videos or audio (ref2va); keyframes are none. -EINVAL
 * (InvalidArgument) if the model's partition is known and the other one. */
int h3_model_check_references(const H3Model *m, bool references, Fault *f);
