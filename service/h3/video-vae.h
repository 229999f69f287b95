/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The video VAE (h3.md 5): pixels to latents and back. A clip is cut into jobs, (chunk, tile) to decode and
 * (clip, tile) to encode, which share nothing: any rank does any of them, in any order, and gets the same
 * bits. What follows is ordered and cheap: the blend of a chunk's tiles and the cross-fade with the tail of
 * the chunk before it.
 *
 *      plan   h3_video_decode_plan()    sizes, tiles, chunks, bytes: pure arithmetic
 *      job    h3_video_decode_batch()   tiles of one chunk on one rank, together; their number changes no bit
 *      blend  h3_video_decode_blend()   finished frames of a chunk and its tail, any range of rows
 *
 * Decoding computes with f32 activations and the weights in the type that the file has (f32, f16, bf16, or int8
 * by expansion), or with f16 in the blocks, as published: there the residual stream, statistics, norm weights and
 * scales are f32; what meets weights (rounded to f16 if they are not), q, k, v, attention and the MLP are f16 with
 * the rounding points of ops.h. What is before and behind the blocks is f32 in both. Encoding is f32.
 *
 * Of a film of 243 frames of 1344 x 768 (392 tiles of 1,797 rows, 3.8 PFLOP), published sizes:
 *     products of the blocks           3.41 PFLOP     4 * 2048^2 + 3 * 2048 * 8192 weights a row and layer
 *     attention                        0.37 PFLOP     32 heads of 64; 46 G exponentials a layer
 *     norms, residuals, rope, silu     128 KiB a row and layer in f16: 3.3 TB
 *     last product, in f32             8.9 TFLOP
 *     pixels                           22 MB a tile: 8.6 GB */

#include <stdbool.h>
#include <stdint.h>

#include "service/h3/dit.h"
#include "service/h3/model.h"
#include "service/h3/rank.h"
#include "service/shared/fault.h"

#define H3_VIDEO_LEVELS 6         /* of the encoder */
#define H3_VIDEO_CHANNELS_MAX 64  /* of a latent */
#define H3_VIDEO_RATIO 16         /* pixels per latent in height and width */
#define H3_VIDEO_TOKEN_FRAMES 4   /* frames that the decoder makes of a token */
#define H3_VIDEO_CLIP_FRAMES 17   /* encoded at a time, to 5 tokens; finished by a chunk */
#define H3_VIDEO_CLIP_TOKENS 5    /* from one chunk's first token to the next one's */
#define H3_VIDEO_CHUNK_TOKENS 7   /* decoded at a time, to 28 frames */
#define H3_VIDEO_TOKEN_DROP 3     /* at the end of an encoded clip */
#define H3_VIDEO_TAIL_FRAMES 5    /* of a chunk, cross-faded into the next one */
#define H3_VIDEO_AXIS_TILES 128   /* at most, of one axis */
#define H3_VIDEO_PIXELS_MAX 16384 /* height or width */
#define H3_VIDEO_FRAMES_MAX 65536

typedef struct H3VideoConfig {
        uint32_t latent_channels;                                      /* 24 */
        float mean[H3_VIDEO_CHANNELS_MAX], std[H3_VIDEO_CHANNELS_MAX]; /* z = (latent - mean) / std */
        bool has_encoder, has_decoder;
        /* encoder */
        uint32_t channels[H3_VIDEO_LEVELS], level_blocks, groups;
        LkPad pad; /* in height and width */
        float group_eps;
        /* decoder */
        uint32_t layers, heads, head_dim, hidden, ffn, registers;
        uint32_t rope_freqs; /* per axis */
        float eps;
        double rope_theta;
} H3VideoConfig;

typedef struct H3VideoVae H3VideoVae;

/* Opens a checkpoint in original or diffusers names; config.json is compared where it is there, and gives
 * what no shape tells (head size, groups, padding, mean and std). A file may hold one half only. Owns no
 * weight bytes but biases and scales: the files must stay mapped. ops: asked whether it runs the model;
 * NULL: not asked. -EBADMSG (InvalidFile), -EINVAL (InvalidModel), -EOPNOTSUPP (NotSupported), -ENOMEM. */
int h3_video_vae_open(const H3File *files, size_t n_files, const LkOps *ops, H3VideoVae **ret, Fault *f);
H3VideoVae *h3_video_vae_free(H3VideoVae *m); /* accepts NULL, returns NULL */

const H3VideoConfig *h3_video_vae_config(const H3VideoVae *m);
uint64_t h3_video_vae_weight_bytes(const H3VideoVae *m);
const char *h3_video_vae_layout(const H3VideoVae *m); /* "original", "diffusers" */

/* Tiles in pixels, multiples of 16. h3.md 5.4: 256, 64. */
typedef struct H3VideoTiling {
        uint32_t tile, min_overlap;
} H3VideoTiling;

#define H3_VIDEO_TILING ((H3VideoTiling){256, 64})

/* The tiles along one axis, in pixels. All have the same size. */
typedef struct H3VideoAxis {
        uint32_t length, size, n;
        uint32_t start[H3_VIDEO_AXIS_TILES];
} H3VideoAxis;

/* Pixels that tile i shares with tile i - 1; 0 for the first. */
static inline uint32_t h3_video_overlap(const H3VideoAxis *a, uint32_t i) {
        return i == 0 ? 0 : a->start[i - 1] + a->size - a->start[i];
}

/* Cuts `length` pixels. -EINVAL (InvalidArgument): no multiples of 16, min_overlap not below tile, more than
 * H3_VIDEO_AXIS_TILES tiles. */
int h3_video_split(uint64_t length, H3VideoTiling tiling, H3VideoAxis *ret, Fault *f);

/* Bytes; of one rank's job, then of what all ranks share. */
typedef struct H3VideoMemory {
        uint64_t device; /* a job's work memory, from ops->memory_new() of the rank */
        uint64_t host;   /* what a job allocates while it runs */
        uint64_t tile;   /* one raw result */
        uint64_t chunk;  /* all raw results of one chunk or clip */
        uint64_t tail;   /* decode: one tail; 0: none */
} H3VideoMemory;

/* Everything that follows from the sizes. Tiles are counted row by row: tile = row * cols.n + col. */
typedef struct H3VideoDecodePlan {
        uint32_t tokens, height, width; /* of the latent */
        uint32_t frames;                /* of the result; in pixels 16 * height, 16 * width */
        uint32_t chunks, chunk_tokens;  /* chunk_tokens is 7, of a single image 1 */
        H3VideoAxis rows, cols;
        LkType type;    /* of the blocks' activations: LK_F32 or LK_F16 */
        uint32_t batch; /* tiles of a job, at most */
        H3VideoMemory memory;
} H3VideoDecodePlan;

/* In f32, one tile a job. tokens 1 is a single image. Any other number is decoded as if the last token went on until a chunk is
 * full; frames beyond the given tokens are cut. -EINVAL (InvalidArgument, or InvalidModel if the file has no
 * decoder). */
int h3_video_decode_plan(const H3VideoVae *m, uint64_t tokens, uint64_t height, uint64_t width,
        H3VideoTiling tiling, H3VideoDecodePlan *ret, Fault *f);

/* The same in another type, with up to `batch` tiles a job (0: 1; no more than there are). LK_F16 becomes LK_F32 where
 * f16 does not do: weights whose columns have scales. -EINVAL (DoesNotFit); the plan is then as before. */
int h3_video_decode_plan_as(const H3VideoVae *m, LkType type, uint32_t batch, H3VideoDecodePlan *p, Fault *f);

static inline uint32_t h3_video_decode_tiles(const H3VideoDecodePlan *p) {
        return p->rows.n * p->cols.n;
}

/* Jobs are numbered 0 .. chunks * tiles - 1 with tile = job % tiles and chunk = job / tiles: done in this
 * order, the blend can start early. */
static inline uint64_t h3_video_decode_jobs(const H3VideoDecodePlan *p) {
        return (uint64_t) p->chunks * h3_video_decode_tiles(p);
}

/* Frames of the result that the blend of a chunk finishes. */
H3Range h3_video_decode_frames(const H3VideoDecodePlan *p, uint32_t chunk);

/* n tiles of one chunk from `tile` on, 1 <= n <= p->batch. rank: its ops and context (plan and exchange are not looked at). z: host,
 * normalised latents [channels, tokens, height, width], the same for all jobs; checked by the caller to be
 * finite. work: memory.device bytes of the rank's device, contents do not matter. out: host, n times memory.tile
 * bytes: f32 [frames, size, size, 3], 4 frames per token, raw. on_tap: NULL, or called with stages of the
 * first tile. -EINVAL (Internal: a chunk or tile that the plan does not have), -ENOMEM, or a device error. On
 * failure the content of out is undefined. */
int h3_video_decode_batch(const H3Rank *rank, const H3VideoVae *m, const H3VideoDecodePlan *p, const float *z,
        uint32_t chunk, uint32_t tile, uint32_t n, void *work, const H3StepHooks *hooks, float *out, Fault *f);

/* The same in two: if `out` is registered it may return before the pixels are there, which end() waits for with the same rank and slot.
 * Until then out is the device's. The next begin() with the same work memory may come before that, in the other slot. */
#define H3_VIDEO_SLOTS 2u
typedef struct H3VideoSlot {
        uint32_t number;
        bool registered; /* out, with the rank's device; hooks->on_block may still set it */
} H3VideoSlot;

int h3_video_decode_begin(const H3Rank *rank, const H3VideoVae *m, const H3VideoDecodePlan *p, const float *z, uint32_t chunk,
        uint32_t tile, uint32_t n, void *work, const H3StepHooks *hooks, const H3VideoSlot *slot, float *out, Fault *f);
int h3_video_decode_end(const H3Rank *rank, uint32_t slot, Fault *f);

static inline int h3_video_decode_tile(const H3Rank *rank, const H3VideoVae *m, const H3VideoDecodePlan *p, const float *z,
        uint32_t chunk, uint32_t tile, void *work, const H3StepHooks *hooks, float *out, Fault *f) {
        return h3_video_decode_batch(rank, m, p, z, chunk, tile, 1, work, hooks, out, f);
}

/* How pixels are given. */
typedef enum H3Pixels {
        H3_PIXELS_U8,         /* round(255 * x) with x as in F32; as input x = u / 255 */
        H3_PIXELS_F32,        /* 0 to 1 */
        H3_PIXELS_NORMALISED, /* f32, (x - mean) / std of ImageNet: what the model sees and says */
} H3Pixels;

static inline uint64_t h3_pixel_size(H3Pixels p) {
        return p == H3_PIXELS_U8 ? 1 : 4;
}

/* One chunk's place in the film. */
typedef struct H3VideoBlend {
        uint32_t chunk;
        const float *const *tiles; /* of all tiles, results of the chunk's jobs */
        const float *tail_before;  /* tail_after of the chunk before; not looked at for chunk 0 */
        float *tail_after;         /* memory.tail bytes, f32 [5, height, width, 3]; not written for the last
                                      chunk. Another buffer than tail_before, so that a chunk that was
                                      interrupted can be repeated */
        H3Pixels pixels;
        void *frames; /* [frames of h3_video_decode_frames(), height, width, 3] */
} H3VideoBlend;

/* Blends rows [rows.begin, rows.end) of pixels of a chunk's frames and of its tail. Ranges may run at the
 * same time on several threads. -EINVAL: an argument that breaks the contract. */
int h3_video_decode_blend(const H3VideoDecodePlan *p, const H3VideoBlend *b, H3Range rows);

typedef struct H3VideoEncodePlan {
        uint32_t frames, height, width; /* pixels */
        uint32_t clips, clip_frames;    /* clip_frames is 17, of a single image 1 */
        uint32_t clip_tokens;           /* that a job makes: 5 or 1 */
        uint32_t tokens;                /* of the latent [channels, tokens, height / 16, width / 16] */
        H3VideoAxis rows, cols;
        H3VideoMemory memory;
} H3VideoEncodePlan;

/* frames 1 is a single image. More are filled up to a multiple of 17 by repeating the last one; the last
 * three tokens are dropped. height and width are multiples of 16, at least 32. -EINVAL (InvalidArgument, or
 * InvalidModel if the file has no encoder). */
int h3_video_encode_plan(const H3VideoVae *m, uint64_t frames, uint64_t height, uint64_t width,
        H3VideoTiling tiling, H3VideoEncodePlan *ret, Fault *f);

static inline uint32_t h3_video_encode_tiles(const H3VideoEncodePlan *p) {
        return p->rows.n * p->cols.n;
}

/* Numbered as in decoding: clip = job / tiles. */
static inline uint64_t h3_video_encode_jobs(const H3VideoEncodePlan *p) {
        return (uint64_t) p->clips * h3_video_encode_tiles(p);
}

/* One tile of one clip. frames: host [frames, height, width, 3], the same for all jobs. out: host,
 * memory.tile bytes: moments f32 [clip_tokens, size / 16, size / 16, 2 * channels]. Otherwise as
 * h3_video_decode_tile(). */
int h3_video_encode_tile(const H3Rank *rank, const H3VideoVae *m, const H3VideoEncodePlan *p,
        H3Pixels pixels, const void *frames, uint32_t clip, uint32_t tile, void *work,
        const H3StepHooks *hooks, float *out, Fault *f);

/* Blends a clip's tiles into its tokens of moments, f32 [2 * channels, tokens, height / 16, width / 16]:
 * mean, then log variance (not clamped). Clips may be done in any order and at the same time. -EINVAL as
 * above. */
int h3_video_encode_blend(const H3VideoVae *m, const H3VideoEncodePlan *p, uint32_t clip,
        const float *const *tiles, float *moments);

/* z [channels, n] of moments [2 * channels, n]: the normalised posterior mean. */
void h3_video_latent_mean(const H3VideoVae *m, const float *moments, uint64_t n, float *ret);

/* The same of a sample (h3.md 5.7): mean + exp(logvar / 2) * randn of a new generator of the seed, logvar
 * clamped to [-30, 20], rounded to f16, then normalised. The reference's seed is 42. -ENOMEM. */
#define H3_VIDEO_SAMPLE_SEED 42u
int h3_video_latent_sample(const H3VideoVae *m, const float *moments, uint64_t n, uint64_t seed, float *ret);

/* The same of a part of a latent whose noise was drawn before, as far as the part goes: noise is [channels, n],
 * numbers of a randn() of the whole. */
void h3_video_latent_sample_of(
        const H3VideoVae *m, const float *moments, const float *noise, uint64_t n, float *ret);
