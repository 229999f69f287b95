/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* What the files of video-vae-*.c share; nobody else includes it. */

#include "service/h3/model-private.h"
#include "service/h3/video-vae.h"
#include "service/h3/weights.h"

/* A convolution [out, in, kt, kh, kw] as a matrix [out, in * kt * kh * kw], or a linear layer. */
typedef struct VideoLinear {
        LkMatrix w;
        LkVector bias;
} VideoLinear;

typedef struct VideoNorm {
        LkVector weight, bias;
} VideoNorm;

typedef struct VideoResBlock {
        VideoNorm norm1, norm2;
        VideoLinear conv1, conv2;
        VideoLinear shortcut; /* w.data NULL: in and out channels are the same */
} VideoResBlock;

typedef struct VideoLevel {
        VideoResBlock *blocks; /* [level_blocks] */
        VideoLinear down;      /* w.data NULL: none */
} VideoLevel;

typedef struct VideoLayer {
        LkVector norm1, norm2;
        VideoLinear q, k, v, out;
        VideoLinear gate, up, down;
        const float *scale1, *scale2; /* [hidden] */
} VideoLayer;

struct H3VideoVae {
        H3VideoConfig config;
        char layout[12];
        uint64_t weight_bytes;
        uint32_t matrix_types; /* bit per LkType */
        /* encoder */
        VideoLinear conv_in, conv_out, quant;
        VideoNorm norm_out;
        VideoLevel levels[H3_VIDEO_LEVELS];
        /* decoder */
        VideoLinear post_quant, embed, proj;
        VideoNorm decoder_norm;
        VideoLayer *layers;
        const float *suffix; /* [registers + 1, hidden]: register tokens, then zeros */
        float *owned;        /* what suffix, scales and the biases of an interleaved QKV point to */
};

/* Strides of the level's downsampling. */
extern const uint32_t video_space_stride[H3_VIDEO_LEVELS], video_time_stride[H3_VIDEO_LEVELS];

/* video-vae-config.c: what config.json says, or the published constants where it says nothing. A size of 0
 * is one that it does not give. */
typedef struct VideoSaid {
        uint32_t channels[H3_VIDEO_LEVELS], level_blocks, latent_channels;
        uint32_t layers, heads, head_dim, registers, ffn_mult, groups;
        LkPad pad;
        double group_eps, eps, rope_theta;
        bool has_statistics;
        float mean[H3_VIDEO_CHANNELS_MAX], std[H3_VIDEO_CHANNELS_MAX];
} VideoSaid;

int video_config_read(const char *json, uint64_t size, VideoSaid *ret, Fault *f); /* json NULL: none */

/* Adds mean and std that the file has as tensors. -EINVAL if both say something and it is not the same. */
int video_config_stored(const H3Statistics *stored, VideoSaid *s, Fault *f);

/* Compares it with the sizes that the tensors say. */
int video_config_check(const VideoSaid *s, const H3VideoConfig *c, Fault *f);

/* Mean and std of the latents: said, or published. */
int video_config_statistics(const VideoSaid *s, H3VideoConfig *c, Fault *f);

/* video-vae-bind.c: fills config and views of m, or says everything that is missing, left over or
 * mis-shaped.
 */
int video_vae_bind(H3TensorSet *s, const VideoSaid *said, H3VideoVae *m, Fault *f);

/* Consecutive pieces of one block of memory, 256 bytes aligned. base NULL: only counts. */
typedef struct VideoArena {
        uint8_t *base;
        uint64_t used;
        bool overflow;
} VideoArena;

void *video_take(VideoArena *a, uint64_t count, uint64_t size); /* NULL without a base */

/* A stage's values to a test. */
int video_tap(const H3Rank *rank, const H3StepHooks *hooks, const char *name, const float *x, uint64_t rows,
        uint64_t columns);

/* y[m, out] = x[m, in] . w^T + bias, x and y of `type`. */
int video_gemm(const H3Rank *rank, LkType type, uint64_t m, const void *x, const VideoLinear *l, void *y);

/* The model with the part's weights where operations may read them, until it is given. */
static inline int video_part(const H3Rank *rank, const H3VideoVae *m, H3PartKind kind, uint32_t layer, const H3VideoVae **ret) {
        const void *taken;
        int r;

        r = h3_part_take(rank->weights, m, kind, layer, &taken);
        if (r >= 0)
                *ret = taken;
        return r;
}

int video_device_fault(int r, const char *what, Fault *f);

/* A rank that can do it: the backend has the operations. */
int video_check_rank(const H3Rank *rank, bool encode, Fault *f);

/* -EINVAL (Internal) if the plan has no such part and n tiles from `tile` on. */
int video_check_job(uint32_t part, uint32_t parts, uint32_t tile, uint32_t n, const H3VideoAxis *rows,
        const H3VideoAxis *cols, Fault *f);

/* video-vae-tiles.c: checks sizes in pixels and cuts both axes. */
int video_split_both(uint64_t height, uint64_t width, H3VideoTiling tiling, H3VideoAxis *ret_rows,
        H3VideoAxis *ret_cols, Fault *f);

static const float video_pixel_mean[3] = {0.485f, 0.456f, 0.406f};
static const float video_pixel_std[3] = {0.229f, 0.224f, 0.225f};
