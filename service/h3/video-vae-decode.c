/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "service/h3/video-vae-private.h"
#include "service/shared/cleanup.h"
#include "service/shared/fmath.h"

/* The decoder (h3.md 5.2): a transformer over the tokens of one tile of one chunk. Positions count from the
 * tile's corner, so that a tile knows nothing of the others. */

#define TAU 6.283185307179586

/* Events of the context: pixels are in place; [H3_VIDEO_SLOTS] they are the host's. */
#define EVENT_PLACED H3_EVENT_QKV
#define EVENT_COPIED H3_EVENT_CHUNK
_Static_assert(H3_VIDEO_SLOTS <= H3_CHUNK_EVENTS, "events");

/* Memory of a job. What is not alive at the same time lies in the same place: [q, k, v], [gate, up] and `pixels`. `frames` are a
 * job's until the next one has some. */
typedef struct Work {
        float *latent, *post;          /* [tiles * tokens, channels] */
        float *x;                      /* [tiles * rows, hidden] */
        void *y;                       /* the same in the blocks' type, as is what follows */
        void *q, *k, *v;               /* [tiles * rows, hidden] */
        void *gate, *up;               /* [tiles * rows, ffn] */
        float *pixels;                 /* [tiles * rows, 3 * 4 * 16 * 16] */
        float *frames;                 /* [tiles, tokens * 3 * 4 * 16 * 16] */
        float *cos, *sin;              /* [rows, 3 * rope_freqs] */
        float *ones, *scale1, *scale2; /* [head_dim], [hidden] */
        int32_t *zeros;                /* [tiles * rows] */
} Work;

typedef struct Decode {
        const H3Rank *rank;
        const H3VideoVae *m;
        const H3VideoConfig *c;
        const H3VideoDecodePlan *plan;
        const H3StepHooks *hooks;
        const H3VideoSlot *slot;
        LkType type;           /* of the blocks' activations */
        uint64_t tiles;        /* of the job */
        uint64_t tokens, rows; /* of a tile; rows: tokens, registers and the empty one */
        uint64_t t, h, w;      /* of a tile, in tokens */
        uint64_t all;          /* rows of all tiles */
        Work work;
} Decode;

#define TOKEN_PIXELS (UINT64_C(3) * H3_VIDEO_TOKEN_FRAMES * H3_VIDEO_RATIO * H3_VIDEO_RATIO)

static void widen(VideoArena *a, uint64_t *end) {
        *end = a->used > *end ? a->used : *end;
}

static Work lay_out(const H3VideoConfig *c, LkType type, uint64_t tokens, uint64_t tiles, VideoArena *a) {
        uint64_t rows = tokens + c->registers + 1, all = tiles * rows, hidden = all * c->hidden;
        uint64_t rope = rows * 3 * c->rope_freqs, size = lk_type_size(type), begin, end = 0;
        Work w = {
                .latent = video_take(a, tiles * tokens * c->latent_channels, sizeof(float)),
                .post = video_take(a, tiles * tokens * c->latent_channels, sizeof(float)),
                .cos = video_take(a, rope, sizeof(float)),
                .sin = video_take(a, rope, sizeof(float)),
                .ones = video_take(a, c->head_dim, sizeof(float)),
                .scale1 = video_take(a, c->hidden, sizeof(float)),
                .scale2 = video_take(a, c->hidden, sizeof(float)),
                .zeros = video_take(a, all, sizeof(int32_t)),
        };

        w.frames = video_take(a, tiles * tokens, TOKEN_PIXELS * sizeof(float));
        w.x = video_take(a, hidden, sizeof(float));
        w.y = video_take(a, hidden, size);

        begin = a->used;
        w.pixels = video_take(a, all, TOKEN_PIXELS * sizeof(float));
        widen(a, &end);
        a->used = begin;
        w.q = video_take(a, hidden, size);
        w.k = video_take(a, hidden, size);
        w.v = video_take(a, hidden, size);
        widen(a, &end);
        a->used = begin;
        w.gate = video_take(a, all * c->ffn, size);
        w.up = video_take(a, all * c->ffn, size);
        widen(a, &end);
        a->used = end;
        return w;
}

/* Frames that the tokens stand for: the first of five stands for one, each other one for four. */
static uint64_t count_frames(uint64_t tokens) {
        uint64_t clips = (tokens + H3_VIDEO_CLIP_TOKENS - 1) / H3_VIDEO_CLIP_TOKENS;

        return clips + (tokens - clips) * H3_VIDEO_TOKEN_FRAMES;
}

static uint64_t host_bytes(const H3VideoConfig *c, uint64_t tokens, uint64_t tiles) {
        uint64_t rows = tokens + c->registers + 1;

        return 4 * (tiles * tokens * c->latent_channels + rows * 6 * c->rope_freqs + c->head_dim + tiles * rows);
}

/* In f16 the columns of a weight have no scales (LkGemm). */
static bool does_in_half(const H3VideoVae *m) {
        for (uint32_t i = 0; i < m->config.layers; i++) {
                const VideoLayer *l = m->layers + i;
                const VideoLinear *linears[] = {&l->q, &l->k, &l->v, &l->out, &l->gate, &l->up, &l->down};

                for (size_t k = 0; k < ELEMENTSOF(linears); k++)
                        if (linears[k]->w.quant.in_scale.data)
                                return false;
        }
        return true;
}

int h3_video_decode_plan_as(const H3VideoVae *m, LkType type, uint32_t batch, H3VideoDecodePlan *p, Fault *f) {
        uint64_t tokens = (uint64_t) p->chunk_tokens * (p->rows.size / H3_VIDEO_RATIO) * (p->cols.size / H3_VIDEO_RATIO);
        VideoArena arena = {};

        batch = batch == 0 ? 1 : batch > h3_video_decode_tiles(p) ? h3_video_decode_tiles(p) : batch;
        if (type == LK_F16 && !does_in_half(m))
                type = LK_F32;
        (void) lay_out(&m->config, type, tokens, batch, &arena);
        if (arena.overflow)
                return fault_set(f, -EINVAL, FAULT_DOES_NOT_FIT,
                        "A tile of %u x %u pixels needs more memory than there are addresses. Use smaller "
                        "tiles.",
                        p->rows.size, p->cols.size);
        p->type = type;
        p->batch = batch;
        p->memory.device = arena.used;
        p->memory.host = host_bytes(&m->config, tokens, batch);
        return 0;
}

int h3_video_decode_plan(const H3VideoVae *m, uint64_t tokens, uint64_t height, uint64_t width,
        H3VideoTiling tiling, H3VideoDecodePlan *ret, Fault *f) {
        const uint64_t limit = H3_VIDEO_FRAMES_MAX / H3_VIDEO_TOKEN_FRAMES, ratio = H3_VIDEO_RATIO;
        H3VideoDecodePlan p = {};
        int r;

        if (!m->config.has_decoder)
                return fault_set(f, -EINVAL, FAULT_INVALID_MODEL,
                        "This video VAE file holds the encoder only. Load one with the decoder (tensors "
                        "decoder.*).");
        if (tokens == 0 || tokens > limit || height > H3_VIDEO_PIXELS_MAX || width > H3_VIDEO_PIXELS_MAX)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "A latent of %" PRIu64 " x %" PRIu64 " x %" PRIu64
                        " (tokens, height, width); expected 1 to %" PRIu64 " tokens of 1 to %" PRIu64
                        " in height and width.",
                        tokens, height, width, limit, H3_VIDEO_PIXELS_MAX / ratio);
        r = video_split_both(height * ratio, width * ratio, tiling, &p.rows, &p.cols, f);
        if (r < 0)
                return r;

        p.tokens = (uint32_t) tokens;
        p.height = (uint32_t) height;
        p.width = (uint32_t) width;
        p.frames = (uint32_t) count_frames(tokens);
        p.chunk_tokens = tokens == 1 ? 1 : H3_VIDEO_CHUNK_TOKENS;
        p.chunks = tokens <= H3_VIDEO_CHUNK_TOKENS
                           ? 1
                           : (uint32_t) ((tokens - (H3_VIDEO_CHUNK_TOKENS - H3_VIDEO_CLIP_TOKENS) +
                                                 H3_VIDEO_CLIP_TOKENS - 1) /
                                         H3_VIDEO_CLIP_TOKENS);

        r = h3_video_decode_plan_as(m, LK_F32, 1, &p, f);
        if (r < 0)
                return r;
        /* below 2^16 pixels squared, 2^8 frames and tiles: no overflow */
        p.memory.tile = 12ull * p.chunk_tokens * H3_VIDEO_TOKEN_FRAMES * p.rows.size * p.cols.size;
        p.memory.chunk = p.memory.tile * h3_video_decode_tiles(&p);
        p.memory.tail = p.chunks > 1 ? 12ull * H3_VIDEO_TAIL_FRAMES * p.rows.length * p.cols.length : 0;
        *ret = p;
        return 0;
}

/* Host: the tile's latents as the model knows them, [t, h, w, channels]. */
static void gather_latents(const Decode *d, const float *z, uint32_t chunk, uint32_t tile, float *ret) {
        const H3VideoDecodePlan *p = d->plan;
        uint64_t channels = d->c->latent_channels;
        uint64_t y0 = p->rows.start[tile / p->cols.n] / H3_VIDEO_RATIO;
        uint64_t x0 = p->cols.start[tile % p->cols.n] / H3_VIDEO_RATIO;

        for (uint64_t c = 0; c < channels; c++)
                for (uint64_t i = 0; i < d->tokens; i++) {
                        uint64_t t = (uint64_t) chunk * H3_VIDEO_CLIP_TOKENS + i / (d->h * d->w);
                        uint64_t y = y0 + i / d->w % d->h, x = x0 + i % d->w;
                        float v;

                        if (t >= p->tokens) /* as if the last token went on */
                                t = p->tokens - 1;
                        v = z[((c * p->tokens + t) * p->height + y) * p->width + x] * d->c->std[c];
                        ret[i * channels + c] = v + d->c->mean[c];
                }
}

/* Coordinates run from -1 to 1 over the tile and the chunk, middles of the tokens. f64, rounded once. */
static void make_rope(const Decode *d, float *cos, float *sin) {
        uint64_t freqs = d->c->rope_freqs, width = 3 * freqs;
        const uint64_t counts[] = {d->t, d->h, d->w}, steps[] = {d->h * d->w, d->w, 1};
        double log_theta = fmath_log(d->c->rope_theta);

        for (uint64_t k = 0; k < width; k++) {
                uint64_t axis = k / freqs, step = steps[axis], count = counts[axis];
                double freq = fmath_exp(-(double) (k % freqs) / (double) freqs * log_theta);

                /* an angle where its first row is; rows that share the coordinate have it from there */
                for (uint64_t i = 0; i < d->rows; i++) {
                        uint64_t first = i < d->tokens ? i / step % count * step : d->tokens;
                        double position = 2 * ((double) (i / step % count) + 0.5) / (double) count - 1;
                        double angle = i < d->tokens ? TAU * position * freq : 0;

                        cos[i * width + k] = i > first ? cos[first * width + k] : (float) fmath_cos(angle);
                        sin[i * width + k] = i > first ? sin[first * width + k] : (float) fmath_sin(angle);
                }
        }
}

static int upload(const Decode *d, void *to, const void *from, uint64_t bytes) {
        return d->rank->ops->upload(d->rank->context, to, from, bytes);
}

static int upload_tables(const Decode *d) {
        uint64_t rope = d->rows * 3 * d->c->rope_freqs;
        CLEANUP_FREE float *cos = malloc(rope * sizeof(float)), *sin = malloc(rope * sizeof(float)),
                           *ones = malloc(d->c->head_dim * sizeof(float));
        CLEANUP_FREE int32_t *zeros = calloc(d->all, sizeof(int32_t));
        int r;

        if (!cos || !sin || !ones || !zeros)
                return -ENOMEM;
        make_rope(d, cos, sin);
        for (uint32_t i = 0; i < d->c->head_dim; i++)
                ones[i] = 1;

        r = upload(d, d->work.cos, cos, rope * sizeof(float));
        if (r >= 0)
                r = upload(d, d->work.sin, sin, rope * sizeof(float));
        if (r >= 0)
                r = upload(d, d->work.ones, ones, d->c->head_dim * sizeof(float));
        if (r >= 0)
                r = upload(d, d->work.zeros, zeros, d->all * sizeof(int32_t));
        if (r >= 0)
                r = video_tap(d->rank, d->hooks, "rope.cos", d->work.cos, d->rows, 3 * d->c->rope_freqs);
        return r < 0 ? r
                     : video_tap(d->rank, d->hooks, "rope.sin", d->work.sin, d->rows, 3 * d->c->rope_freqs);
}

/* Latents to rows of the transformer. */
static int embed(const Decode *d, const float *latent) {
        const Work *w = &d->work;
        uint64_t channels = d->c->latent_channels, hidden = d->c->hidden;
        const H3VideoVae *m;
        int r;

        r = upload(d, w->latent, latent, d->tiles * d->tokens * channels * sizeof(float));
        if (r >= 0)
                r = video_part(d->rank, d->m, H3_PART_IN, 0, &m);
        if (r < 0)
                return r;
        r = video_gemm(d->rank, LK_F32, d->tiles * d->tokens, w->latent, &m->post_quant, w->post);
        if (r >= 0)
                r = video_tap(d->rank, d->hooks, "post_quant", w->post, d->tokens, channels);
        for (uint64_t i = 0; r >= 0 && i < d->tiles; i++)
                r = video_gemm(d->rank, LK_F32, d->tokens, w->post + i * d->tokens * channels, &m->embed, w->x + i * d->rows * hidden);
        h3_part_give(d->rank->weights, H3_PART_IN, 0);
        for (uint64_t i = 0; r >= 0 && i < d->tiles; i++)
                r = upload(d, w->x + (i * d->rows + d->tokens) * hidden, d->m->suffix,
                        (d->rows - d->tokens) * hidden * sizeof(float));
        return r < 0 ? r : video_tap(d->rank, d->hooks, "x_embedder", w->x, d->tokens, hidden);
}

/* x += y * scale. */
static LkResidual residual_of(const Decode *d, const void *y, const float *scale) {
        return (LkResidual){
                .type = LK_F32,
                .m = d->all,
                .n = d->c->hidden,
                .x = d->work.x,
                .x_ld = d->c->hidden,
                .y = y,
                .y_type = d->type,
                .y_ld = d->c->hidden,
                .mod = scale,
                .mod_ld = d->c->hidden,
                .mod_index = d->work.zeros,
        };
}

/* add: NULL, or done before. */
static int norm(const Decode *d, const LkVector *weight, const LkResidual *add) {
        const LkNorm args = {
                .type = LK_F32,
                .m = d->all,
                .n = d->c->hidden,
                .x = d->work.x,
                .x_ld = d->c->hidden,
                .weight = *weight,
                .eps = d->c->eps,
                .y = d->work.y,
                .y_type = d->type,
                .y_ld = d->c->hidden,
                .add = add,
        };

        return d->rank->ops->norm(d->rank->context, &args);
}

static int norm_heads(const Decode *d, void *x) {
        const LkQkNormRope args = {
                .type = d->type,
                .m = d->all,
                .heads = d->c->heads,
                .head_dim = d->c->head_dim,
                .x = x,
                .x_ld = d->c->hidden,
                .weight = {.data = d->work.ones, .type = LK_F32, .n = d->c->head_dim},
                .eps = d->c->eps,
                .cos = d->work.cos,
                .sin = d->work.sin,
                .rope_dims = 3 * d->c->rope_freqs,
                .period = d->rows,
        };

        return d->rank->ops->qk_norm_rope(d->rank->context, &args);
}

/* Its result is in q, to be added to x. */
static int attend(const Decode *d, const VideoLayer *l) {
        const Work *w = &d->work;
        uint64_t hidden = d->c->hidden;
        const LkAttention args = {
                .type = d->type,
                .n_q = d->rows,
                .n_k = d->rows,
                .sequences = d->tiles,
                .heads = d->c->heads,
                .head_dim = d->c->head_dim,
                .scale = 1 / __builtin_sqrtf((float) d->c->head_dim),
                .q = w->q,
                .k = w->k,
                .v = w->v,
                .o = w->y,
                .q_ld = hidden,
                .k_ld = hidden,
                .v_ld = hidden,
                .o_ld = hidden,
        };
        int r;

        r = norm(d, &l->norm1, NULL);
        if (r >= 0)
                r = video_gemm(d->rank, d->type, d->all, w->y, &l->q, w->q);
        if (r >= 0)
                r = video_gemm(d->rank, d->type, d->all, w->y, &l->k, w->k);
        if (r >= 0)
                r = video_gemm(d->rank, d->type, d->all, w->y, &l->v, w->v);
        if (r >= 0)
                r = norm_heads(d, w->q);
        if (r >= 0)
                r = norm_heads(d, w->k);
        if (r >= 0)
                r = d->rank->ops->attention(d->rank->context, &args);
        return r < 0 ? r : video_gemm(d->rank, d->type, d->all, w->y, &l->out, w->q);
}

/* After what attention has left. */
static int feed_forward(const Decode *d, const VideoLayer *l) {
        const Work *w = &d->work;
        const LkResidual attended = residual_of(d, w->q, w->scale1), fed = residual_of(d, w->y, w->scale2);
        const LkSwiglu args = {
                .type = d->type,
                .m = d->all,
                .n = d->c->ffn,
                .gate = w->gate,
                .up = w->up,
                .gate_ld = d->c->ffn,
                .up_ld = d->c->ffn,
                .y = w->gate, /* element by element: in place */
                .y_ld = d->c->ffn,
        };
        int r;

        r = norm(d, &l->norm2, &attended);
        if (r >= 0)
                r = video_gemm(d->rank, d->type, d->all, w->y, &l->gate, w->gate);
        if (r >= 0)
                r = video_gemm(d->rank, d->type, d->all, w->y, &l->up, w->up);
        if (r >= 0)
                r = d->rank->ops->swiglu(d->rank->context, &args);
        if (r >= 0)
                r = video_gemm(d->rank, d->type, d->all, w->gate, &l->down, w->y);
        return r < 0 ? r : d->rank->ops->residual(d->rank->context, &fed);
}

static int run_layer(const Decode *d, uint32_t i) {
        uint64_t bytes = d->c->hidden * sizeof(float);
        const H3VideoVae *m;
        char name[32];
        int r;

        (void) snprintf(name, sizeof(name), "block.%u", i);
        r = upload(d, d->work.scale1, d->m->layers[i].scale1, bytes);
        if (r >= 0)
                r = upload(d, d->work.scale2, d->m->layers[i].scale2, bytes);
        if (r >= 0)
                r = video_part(d->rank, d->m, H3_PART_STAGE, i, &m);
        if (r < 0)
                return r;
        r = attend(d, m->layers + i);
        if (r >= 0)
                r = feed_forward(d, m->layers + i);
        h3_part_give(d->rank->weights, H3_PART_STAGE, i);
        if (r >= 0)
                r = h3_part_pace(d->rank, i);
        if (r >= 0)
                r = video_tap(d->rank, d->hooks, name, d->work.x, d->rows, d->c->hidden);
        if (r >= 0 && d->hooks && d->hooks->on_block)
                r = d->hooks->on_block(d->hooks->userdata, i + 1, d->c->layers);
        return r;
}

/* In place: x is not needed any more. */
static int final_norm(const Decode *d, const H3VideoVae *m) {
        const LkLayerNorm args = {
                .type = LK_F32,
                .m = d->all,
                .n = d->c->hidden,
                .x = d->work.x,
                .x_ld = d->c->hidden,
                .weight = m->decoder_norm.weight,
                .bias = m->decoder_norm.bias,
                .eps = d->c->eps,
                .y = d->work.x,
                .y_ld = d->c->hidden,
        };
        int r;

        r = d->rank->ops->layer_norm(d->rank->context, &args);
        return r < 0 ? r : video_tap(d->rank, d->hooks, "norm_out", d->work.x, d->rows, d->c->hidden);
}

/* A token's numbers are [channel, frame, row, column] of its pixels; the rows behind the tokens say nothing. */
static int place_pixels(const Decode *d) {
        LkUnpatch args = {
                .t = d->t,
                .h = d->h,
                .w = d->w,
                .patch = {H3_VIDEO_TOKEN_FRAMES, H3_VIDEO_RATIO, H3_VIDEO_RATIO},
                .channels = 3,
                .x_ld = TOKEN_PIXELS,
        };
        int r = 0;

        for (uint32_t i = 0; r >= 0 && i < H3_VIDEO_SLOTS; i++) /* the frames before these */
                r = d->rank->ops->wait(d->rank->context, LK_COMPUTE, EVENT_COPIED + i);
        for (uint64_t i = 0; r >= 0 && i < d->tiles; i++) {
                args.x = d->work.pixels + i * d->rows * TOKEN_PIXELS;
                args.y = d->work.frames + i * d->tokens * TOKEN_PIXELS;
                r = d->rank->ops->unpatch(d->rank->context, &args);
        }
        return r;
}

/* Pixels of the tokens, as frames. */
static int project(const Decode *d) {
        const H3VideoVae *m;
        int r;

        r = video_part(d->rank, d->m, H3_PART_OUT, 0, &m);
        if (r < 0)
                return r;
        r = final_norm(d, m);
        if (r >= 0)
                r = video_gemm(d->rank, LK_F32, d->all - (d->rows - d->tokens), d->work.x, &m->proj, d->work.pixels);
        h3_part_give(d->rank->weights, H3_PART_OUT, 0);
        return r < 0 ? r : place_pixels(d);
}

/* To the host; to registered memory beside what comes next. */
static int send_frames(const Decode *d, float *out) {
        const LkOps *ops = d->rank->ops;
        LkContext *c = d->rank->context;
        const uint64_t size = d->tiles * d->tokens * TOKEN_PIXELS * sizeof(float);
        int r;

        if (!ops->copy || !d->slot->registered)
                return ops->download(c, out, d->work.frames, size);
        r = ops->mark(c, LK_COMPUTE, EVENT_PLACED);
        if (r >= 0)
                r = ops->wait(c, LK_PEER, EVENT_PLACED);
        if (r >= 0)
                r = ops->copy(c, LK_PEER,
                        &(LkCopy){.to = out, .from = d->work.frames, .rows = 1, .width = size, .to_stride = size, .from_stride = size});
        return r < 0 ? r : ops->mark(c, LK_PEER, EVENT_COPIED + d->slot->number);
}

static int run(const Decode *d, const float *z, uint32_t chunk, uint32_t tile, float *out) {
        uint64_t numbers = d->tokens * d->c->latent_channels;
        CLEANUP_FREE float *latents = malloc(d->tiles * numbers * sizeof(float));
        int r;

        if (!latents)
                return -ENOMEM;
        for (uint32_t i = 0; i < d->tiles; i++)
                gather_latents(d, z, chunk, tile + i, latents + i * numbers);
        r = upload_tables(d);
        if (r >= 0)
                r = embed(d, latents);
        for (uint32_t i = 0; r >= 0 && i < d->c->layers; i++)
                r = run_layer(d, i);
        if (r >= 0)
                r = project(d);
        return r < 0 ? r : send_frames(d, out);
}

int h3_video_decode_begin(const H3Rank *rank, const H3VideoVae *m, const H3VideoDecodePlan *p, const float *z, uint32_t chunk,
        uint32_t tile, uint32_t n, void *work, const H3StepHooks *hooks, const H3VideoSlot *slot, float *out, Fault *f) {
        Decode d = {.rank = rank, .m = m, .c = &m->config, .plan = p, .hooks = hooks, .slot = slot, .type = p->type, .tiles = n};
        VideoArena arena = {.base = work};
        int r;

        r = video_check_rank(rank, false, f);
        if (r >= 0)
                r = video_check_job(chunk, p->chunks, tile, n, &p->rows, &p->cols, f);
        if (r >= 0 && slot->number >= H3_VIDEO_SLOTS)
                r = fault_set(f, -EINVAL, FAULT_INTERNAL, "Slot %u of %u.", slot->number, H3_VIDEO_SLOTS);
        if (r >= 0 && n > p->batch)
                r = fault_set(f, -EINVAL, FAULT_INTERNAL, "%u tiles at a time, the plan has room for %u.", n, p->batch);
        if (r < 0)
                return r;

        d.t = p->chunk_tokens;
        d.h = p->rows.size / H3_VIDEO_RATIO;
        d.w = p->cols.size / H3_VIDEO_RATIO;
        d.tokens = d.t * d.h * d.w;
        d.rows = d.tokens + d.c->registers + 1;
        d.all = d.tiles * d.rows;
        d.work = lay_out(d.c, d.type, d.tokens, p->batch, &arena); /* of any number of tiles alike: those before may be on their way */

        r = run(&d, z, chunk, tile, out);
        return r < 0 ? video_device_fault(r, "decode a tile of video", f) : 0;
}

int h3_video_decode_end(const H3Rank *rank, uint32_t slot, Fault *f) {
        int r = slot < H3_VIDEO_SLOTS ? 0 : -EINVAL;

        if (r >= 0 && rank->ops->copy)
                r = rank->ops->join(rank->context, EVENT_COPIED + slot);
        return r < 0 ? video_device_fault(r, "decode a tile of video", f) : 0;
}

int h3_video_decode_batch(const H3Rank *rank, const H3VideoVae *m, const H3VideoDecodePlan *p, const float *z,
        uint32_t chunk, uint32_t tile, uint32_t n, void *work, const H3StepHooks *hooks, float *out, Fault *f) {
        const H3VideoSlot slot = {.registered = false};

        return h3_video_decode_begin(rank, m, p, z, chunk, tile, n, work, hooks, &slot, out, f);
}
