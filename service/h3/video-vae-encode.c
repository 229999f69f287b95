/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "service/h3/video-vae-private.h"
#include "service/shared/cleanup.h"

/* The encoder (h3.md 5.1): convolutions over one tile of one clip, causal in time: two frames of zeros stand
 * before the first one of each clip. */

#define PIXELS_MIN 32 /* the deepest level has 2 x 2 positions then, as many as reflection needs */

/* Frames, rows and columns of an activation [t, h, w, channels]. */
typedef struct Size {
        uint64_t t, h, w;
} Size;

typedef struct Encode {
        const H3Rank *rank;
        const H3VideoVae *m;
        const H3VideoConfig *c;
        const H3StepHooks *hooks;
        Size size;      /* of x */
        uint64_t width; /* channels of x */
        float *x;       /* the activation; the two others are free */
        float *a, *b;
} Encode;

static uint64_t positions(Size s) {
        return s.t * s.h * s.w;
}

static Size downsampled(Size s, uint32_t level) {
        uint64_t time = video_time_stride[level], space = video_space_stride[level];

        return (Size){(s.t + time - 1) / time, (s.h + space - 1) / space, (s.w + space - 1) / space};
}

/* The largest activation of all stages, in numbers. */
static uint64_t largest_activation(const H3VideoConfig *c, Size s) {
        uint64_t n = positions(s) * (c->channels[0] > 3 ? c->channels[0] : 3), in = c->channels[0];

        for (uint32_t i = 0; i < H3_VIDEO_LEVELS; i++) {
                uint64_t wide = in > c->channels[i] ? in : c->channels[i];

                n = positions(s) * wide > n ? positions(s) * wide : n;
                in = c->channels[i];
                s = downsampled(s, i);
        }
        return positions(s) * 2 * c->latent_channels > n ? positions(s) * 2 * c->latent_channels : n;
}

static void lay_out(const H3VideoConfig *c, Size s, VideoArena *a, Encode *ret) {
        uint64_t n = largest_activation(c, s);

        ret->x = video_take(a, n, sizeof(float));
        ret->a = video_take(a, n, sizeof(float));
        ret->b = video_take(a, n, sizeof(float));
}

int h3_video_encode_plan(const H3VideoVae *m, uint64_t frames, uint64_t height, uint64_t width,
        H3VideoTiling tiling, H3VideoEncodePlan *ret, Fault *f) {
        H3VideoEncodePlan p = {};
        VideoArena arena = {};
        Encode sizes;
        Size s;
        int r;

        if (!m->config.has_encoder)
                return fault_set(f, -EINVAL, FAULT_INVALID_MODEL,
                        "This video VAE file holds the decoder only. Load one with the encoder (tensors "
                        "encoder.*).");
        if (frames == 0 || frames > H3_VIDEO_FRAMES_MAX || height < PIXELS_MIN || width < PIXELS_MIN)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "%" PRIu64 " frames of %" PRIu64 " x %" PRIu64
                        " pixels (height, width); expected 1 to %u frames of at least %u x %u.",
                        frames, height, width, H3_VIDEO_FRAMES_MAX, PIXELS_MIN, PIXELS_MIN);
        r = video_split_both(height, width, tiling, &p.rows, &p.cols, f);
        if (r < 0)
                return r;
        if (p.rows.size < PIXELS_MIN || p.cols.size < PIXELS_MIN)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "Tiles of %u x %u pixels; the encoder needs at least %u x %u.", p.rows.size,
                        p.cols.size, PIXELS_MIN, PIXELS_MIN);

        p.frames = (uint32_t) frames;
        p.height = (uint32_t) height;
        p.width = (uint32_t) width;
        p.clip_frames = frames == 1 ? 1 : H3_VIDEO_CLIP_FRAMES;
        p.clip_tokens = frames == 1 ? 1 : H3_VIDEO_CLIP_TOKENS;
        p.clips = (p.frames + p.clip_frames - 1) / p.clip_frames;
        p.tokens = frames == 1 ? 1 : p.clips * H3_VIDEO_CLIP_TOKENS - H3_VIDEO_TOKEN_DROP;

        s = (Size){p.clip_frames, p.rows.size, p.cols.size};
        lay_out(&m->config, s, &arena, &sizes);
        p.memory.device = arena.used;
        /* below 2^16 pixels squared, 2^8 frames and tiles: no overflow */
        p.memory.host = 12 * positions(s);
        p.memory.tile = 8ull * m->config.latent_channels * p.clip_tokens * (p.rows.size / H3_VIDEO_RATIO) *
                        (p.cols.size / H3_VIDEO_RATIO);
        p.memory.chunk = p.memory.tile * h3_video_encode_tiles(&p);
        if (arena.overflow)
                return fault_set(f, -EINVAL, FAULT_DOES_NOT_FIT,
                        "A tile of %u x %u pixels needs more memory than there are addresses. Use smaller "
                        "tiles.",
                        p.rows.size, p.cols.size);
        *ret = p;
        return 0;
}

/* Host: the tile's pixels as the model sees them, [t, h, w, 3]. */
static void gather_pixels(const Encode *e, const H3VideoEncodePlan *p, H3Pixels pixels, const void *frames,
        uint32_t clip, uint32_t tile, float *ret) {
        uint64_t y0 = p->rows.start[tile / p->cols.n], x0 = p->cols.start[tile % p->cols.n];
        uint64_t line = e->size.w * 3;

        for (uint64_t i = 0; i < e->size.t * e->size.h; i++, ret += line) {
                uint64_t t = (uint64_t) clip * p->clip_frames + i / e->size.h, at;
                const uint8_t *bytes = frames;
                const float *numbers = frames;

                if (t >= p->frames) /* the last frame goes on */
                        t = p->frames - 1;
                at = ((t * p->height + y0 + i % e->size.h) * p->width + x0) * 3;
                for (uint64_t k = 0; k < line; k++) {
                        float v = pixels == H3_PIXELS_U8 ? (float) bytes[at + k] / 255 : numbers[at + k];

                        ret[k] = pixels == H3_PIXELS_NORMALISED
                                         ? v
                                         : (v - video_pixel_mean[k % 3]) / video_pixel_std[k % 3];
                }
        }
}

static LkConvAxis axis_of(
        uint64_t size, uint32_t kernel, uint32_t stride, uint32_t before, uint32_t after, LkPad pad) {
        return (LkConvAxis){.size = size,
                .kernel = kernel,
                .stride = stride,
                .dilation = 1,
                .before = before,
                .after = after,
                .pad = pad};
}

/* y = conv(x) of 3 x 3 x 3 (or 1 x 1 x 1), causal in time. */
static int conv(const Encode *e, const VideoLinear *l, const float *x, uint64_t channels, float *y) {
        uint32_t kernel = l->w.cols == channels ? 1 : 3, side = kernel / 2;
        const LkConv args = {
                .axis = {axis_of(e->size.t, kernel, 1, kernel - 1, 0, LK_PAD_ZERO),
                        axis_of(e->size.h, kernel, 1, side, side, e->c->pad),
                        axis_of(e->size.w, kernel, 1, side, side, e->c->pad)},
                .channels = channels,
                .x = x,
                .w = l->w,
                .bias = l->bias,
                .y = y,
        };

        return e->rank->ops->conv(e->rank->context, &args);
}

/* y = silu(norm(x)); y may be x. */
static int norm(const Encode *e, const VideoNorm *n, const float *x, uint64_t channels, float *y) {
        const LkGroupNorm args = {
                .frames = e->size.t,
                .pixels = e->size.h * e->size.w,
                .channels = channels,
                .groups = e->c->groups,
                .x = x,
                .weight = n->weight,
                .bias = n->bias,
                .eps = e->c->group_eps,
                .silu = true,
                .y = y,
        };

        return e->rank->ops->group_norm(e->rank->context, &args);
}

static void swap(float **a, float **b) {
        float *c = *a;

        *a = *b;
        *b = c;
}

/* x = shortcut(x) + conv2(silu(norm2(conv1(silu(norm1(x)))))) */
static int res_block(Encode *e, const VideoResBlock *l) {
        uint64_t out = l->conv1.w.rows;
        LkResidual sum = {.type = LK_F32, .m = positions(e->size), .n = out, .x_ld = out, .y_ld = out};
        int r;

        r = norm(e, &l->norm1, e->x, e->width, e->a);
        if (r >= 0)
                r = conv(e, &l->conv1, e->a, e->width, e->b);
        if (r >= 0)
                r = norm(e, &l->norm2, e->b, out, e->b);
        if (r >= 0)
                r = conv(e, &l->conv2, e->b, out, e->a);
        if (r >= 0 && l->shortcut.w.data) {
                r = conv(e, &l->shortcut, e->x, e->width, e->b);
                swap(&e->x, &e->b);
        }
        if (r < 0)
                return r;
        e->width = out;
        sum.x = e->x;
        sum.y = e->a;
        return e->rank->ops->residual(e->rank->context, &sum);
}

/* Padding on the right and below only. */
static int downsample(Encode *e, const VideoLinear *l, uint32_t level) {
        uint32_t space = video_space_stride[level];
        const LkConv args = {
                .axis = {axis_of(e->size.t, 3, video_time_stride[level], 2, 0, LK_PAD_ZERO),
                        axis_of(e->size.h, 3, space, 0, 1, e->c->pad),
                        axis_of(e->size.w, 3, space, 0, 1, e->c->pad)},
                .channels = e->width,
                .x = e->x,
                .w = l->w,
                .bias = l->bias,
                .y = e->a,
        };
        int r;

        r = e->rank->ops->conv(e->rank->context, &args);
        e->size = downsampled(e->size, level);
        swap(&e->x, &e->a);
        return r;
}

static int tap(const Encode *e, const char *name) {
        return video_tap(e->rank, e->hooks, name, e->x, positions(e->size), e->width);
}

static int run_level(Encode *e, uint32_t level) {
        const VideoLevel *l;
        const H3VideoVae *m;
        char name[40];
        int r;

        r = video_part(e->rank, e->m, H3_PART_STAGE, level, &m);
        if (r < 0)
                return r;
        l = m->levels + level;
        for (uint32_t i = 0; r >= 0 && i < e->c->level_blocks; i++) {
                (void) snprintf(name, sizeof(name), "down.%u.block.%u", level, i);
                r = res_block(e, l->blocks + i);
                if (r >= 0)
                        r = tap(e, name);
        }
        if (r >= 0 && l->down.w.data)
                r = downsample(e, &l->down, level);
        h3_part_give(e->rank->weights, H3_PART_STAGE, level);
        if (r >= 0)
                r = h3_part_pace(e->rank, level);
        (void) snprintf(name, sizeof(name), "down.%u", level);
        if (r >= 0)
                r = tap(e, name);
        if (r >= 0 && e->hooks && e->hooks->on_block)
                r = e->hooks->on_block(e->hooks->userdata, level + 1, H3_VIDEO_LEVELS);
        return r;
}

/* Moments from what the levels made, to e->a. */
static int finish(Encode *e) {
        const H3VideoVae *m;
        int r;

        r = video_part(e->rank, e->m, H3_PART_OUT, 0, &m);
        if (r < 0)
                return r;
        r = norm(e, &m->norm_out, e->x, e->width, e->a);
        if (r >= 0)
                r = conv(e, &m->conv_out, e->a, e->width, e->x);
        e->width = 2ull * e->c->latent_channels;
        if (r >= 0)
                r = tap(e, "conv_out");
        if (r >= 0)
                r = video_gemm(e->rank, LK_F32, positions(e->size), e->x, &m->quant, e->a);
        h3_part_give(e->rank->weights, H3_PART_OUT, 0);
        return r;
}

static int run(Encode *e, const float *pixels) {
        const H3VideoVae *m;
        int r;

        r = e->rank->ops->upload(e->rank->context, e->a, pixels, positions(e->size) * 3 * sizeof(float));
        if (r >= 0)
                r = video_part(e->rank, e->m, H3_PART_IN, 0, &m);
        if (r < 0)
                return r;
        r = conv(e, &m->conv_in, e->a, 3, e->x);
        h3_part_give(e->rank->weights, H3_PART_IN, 0);
        e->width = e->c->channels[0];
        if (r >= 0)
                r = tap(e, "conv_in");
        for (uint32_t i = 0; r >= 0 && i < H3_VIDEO_LEVELS; i++)
                r = run_level(e, i);
        return r < 0 ? r : finish(e);
}

int h3_video_encode_tile(const H3Rank *rank, const H3VideoVae *m, const H3VideoEncodePlan *p,
        H3Pixels pixels, const void *frames, uint32_t clip, uint32_t tile, void *work,
        const H3StepHooks *hooks, float *out, Fault *f) {
        Encode e = {.rank = rank, .m = m, .c = &m->config, .hooks = hooks};
        CLEANUP_FREE float *host = NULL;
        VideoArena arena = {.base = work};
        int r;

        r = video_check_rank(rank, true, f);
        if (r >= 0)
                r = video_check_job(clip, p->clips, tile, 1, &p->rows, &p->cols, f);
        if (r < 0)
                return r;

        e.size = (Size){p->clip_frames, p->rows.size, p->cols.size};
        lay_out(e.c, e.size, &arena, &e);
        host = malloc(p->memory.host);
        if (!host)
                return video_device_fault(-ENOMEM, "encode a tile of video", f);
        gather_pixels(&e, p, pixels, frames, clip, tile, host);
        r = run(&e, host);
        if (r >= 0)
                r = rank->ops->download(rank->context, out, e.a, p->memory.tile);
        return r < 0 ? video_device_fault(r, "encode a tile of video", f) : 0;
}
