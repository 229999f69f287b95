/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "service/h3/noise.h"
#include "service/h3/video-vae.h"
#include "service/shared/cleanup.h"
#include "service/worker/coder.h"
#include "service/worker/job-input.h"
#include "service/worker/split.h"
#include "service/worker/tile-pool.h"

/* ENCODE_MEDIA of pictures: a step per clip of 17 frames, or one for a single picture. A clip's frames are
 * copied out of the arena when its first tile is to be made: a film is too large to be copied at once. Its
 * tiles are made by whoever is free; blended and normalised they go straight to their place in the latent.
 */

typedef struct MediaWork {
        const H3VideoVae *vae;
        H3VideoEncodePlan film; /* all of it */
        H3VideoEncodePlan clip; /* one clip of it, with all its tokens */
        WireTensor video;
        H3Pixels pixels;
        uint64_t frame_bytes;
        bool sampled;
        uint64_t seed;
        TilePool pool; /* once the first step runs */
        bool has_pool;
        size_t n_raw;         /* 2 with several ranks and clips, else 1 */
        uint8_t *frames[2];   /* of clip k at k % n_raw: [clip_frames, height, width, 3] */
        int64_t frames_of[2]; /* which clip that is; -1: none */
        float *raw[2];        /* its tiles likewise */
        const float **tiles;  /* [tiles] */
        float *moments;       /* [2 * channels, clip tokens, height, width] */
        float *z;             /* [channels, clip tokens, height, width] */
        float *noise;         /* of the film's latent; NULL: the mean is taken */
        float *clip_noise;    /* of a clip's */
        Job *job;             /* that this belongs to */
        StepRunner *runner;   /* of the step */
} MediaWork;

static void work_free(void *userdata) {
        MediaWork *x = userdata;

        if (!x)
                return;
        if (x->has_pool)
                tile_pool_done(&x->pool);
        for (size_t i = 0; i < 2; i++) {
                free(x->frames[i]);
                free(x->raw[i]);
        }
        free(x->tiles);
        free(x->moments);
        free(x->z);
        free(x->noise);
        free(x->clip_noise);
        free(x);
}

/* Types, sizes, place. Whether numbers are finite is seen when they are copied, clip by clip: a film in F32
 * has gigabytes, and the link's thread would read them all. */
static int check_frames(Job *j, const WireJobOpen *w, MediaWork *x, Fault *f) {
        TensorRule rule = {.name = "video", .type = ST_U8, .n_dims = 4, .shape = {0, 0, 0, 3}};
        int r;

        if (w->video.dtype == ST_F32) {
                rule.type = ST_F32;
                x->pixels = H3_PIXELS_F32;
        }
        r = tensor_check(&w->video, &rule, &j->arenas->input, f);
        if (r < 0)
                return r;
        x->video = w->video;
        r = h3_video_encode_plan(x->vae, w->video.shape[0], w->video.shape[1], w->video.shape[2],
                H3_VIDEO_TILING, &x->film, f);
        if (r < 0)
                return r;

        /* A clip is one of all its frames, however many the film has of them, and keeps all its tokens. */
        r = h3_video_encode_plan(x->vae, x->film.clip_frames, w->video.shape[1], w->video.shape[2],
                H3_VIDEO_TILING, &x->clip, f);
        x->clip.tokens = x->clip.clip_tokens;
        x->frame_bytes = w->video.size / w->video.shape[0];
        return r;
}

static uint64_t plane(const MediaWork *x) {
        return (uint64_t) (x->film.height / H3_VIDEO_RATIO) * (x->film.width / H3_VIDEO_RATIO);
}

static int set_memory(Job *j, MediaWork *x) {
        const H3VideoMemory *m = &x->clip.memory;
        uint64_t ranks = x->n_raw == 1 ? coder_takers(j, h3_video_encode_tiles(&x->clip)) : j->coder->ranks, own, all;
        uint64_t channels = h3_video_vae_config(x->vae)->latent_channels;
        uint64_t clip = m->chunk + x->film.clip_frames * x->frame_bytes;

        if (__builtin_add_overflow(m->device, m->host, &own) || __builtin_mul_overflow(own, ranks, &own) ||
                __builtin_mul_overflow(clip, (uint64_t) x->n_raw, &all) ||
                __builtin_add_overflow(all, own, &all))
                return -EOVERFLOW;
        all += 3 * channels * x->clip.tokens * plane(x) * sizeof(float);
        if (x->sampled)
                all += channels * (x->film.tokens + x->clip.tokens) * plane(x) * sizeof(float);
        j->coder->memory_bytes = all;
        j->coder->device_bytes = m->device * ranks;
        return 0;
}

static int encode_open(Job *j, const WireJobOpen *w, Fault *f) {
        Coder *c = j->coder;
        MediaWork *x;
        int r;

        if (w->posterior >= _WIRE_POSTERIOR_MAX)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "The job has the unknown posterior %" PRIu32 ".", w->posterior);
        x = calloc(1, sizeof(*x));
        if (!x)
                return -ENOMEM;
        c->work = x; /* freed with the job from now on */
        x->vae = j->model->video_vae;
        c->weights = &h3_weights_video_encoder;
        c->model = x->vae;
        x->job = j;
        x->sampled = w->posterior == WIRE_POSTERIOR_SAMPLED;
        x->seed = w->seed;
        x->frames_of[0] = x->frames_of[1] = -1;

        r = check_frames(j, w, x, f);
        if (r < 0)
                return r;
        x->n_raw = c->ranks > 1 && x->film.clips > 1 ? 2 : 1;
        c->rows = x->film.tokens * plane(x);
        c->blocks = h3_video_encode_tiles(&x->film);
        j->steps = x->film.clips;
        r = set_memory(j, x);
        if (r < 0)
                return r;
        return coder_add_output(c, WIRE_OUTPUT_VIDEO, ST_F32, 4,
                (uint64_t[]){h3_video_vae_config(x->vae)->latent_channels, x->film.tokens,
                        x->film.height / H3_VIDEO_RATIO, x->film.width / H3_VIDEO_RATIO});
}

/* A clip beyond the film's end goes on with its last frame. */
static int copy_frames(MediaWork *x, uint32_t clip, Fault *f) {
        const uint8_t *film = (const uint8_t *) x->job->arenas->input.map + x->video.offset;
        size_t i = clip % x->n_raw;

        for (uint64_t k = 0; k < x->film.clip_frames; k++) {
                uint64_t frame = clip * x->film.clip_frames + k;

                if (frame >= x->video.shape[0])
                        frame = x->video.shape[0] - 1;
                memcpy(x->frames[i] + k * x->frame_bytes, film + frame * x->frame_bytes,
                        (size_t) x->frame_bytes);
        }
        x->frames_of[i] = clip;
        if (x->pixels != H3_PIXELS_F32)
                return 0;
        return tensor_check_finite("video", ST_F32, x->frames[i], 4,
                (uint64_t[]){x->film.clip_frames, x->video.shape[1], x->video.shape[2], 3}, f);
}

static int on_block(void *userdata, uint32_t done, uint32_t total) {
        const Job *j = userdata;

        return j->cancelled ? -ECANCELED : 0;
}

static float *tile_place(const MediaWork *x, uint32_t clip, uint32_t tile) {
        return x->raw[clip % x->n_raw] + (uint64_t) tile * (x->clip.memory.tile / sizeof(float));
}

static int make_tile(void *userdata, const TilePlace *at, Fault *f) {
        MediaWork *x = userdata;
        const H3StepHooks hooks = {.on_block = on_block, .userdata = x->job};
        const H3Rank rank = {.index = at->rank, .ops = x->runner->backend->ops, .context = at->context, .weights = at->weights};

        return h3_video_encode_tile(&rank, x->vae, &x->clip, x->pixels, x->frames[at->chunk % x->n_raw], 0,
                at->tile, at->memory, &hooks, tile_place(x, at->chunk, at->tile), f);
}

/* The reference draws once for the whole latent. */
static int draw_noise(MediaWork *x) {
        uint64_t n = h3_video_vae_config(x->vae)->latent_channels * x->film.tokens * plane(x);
        H3Noise generator;

        if (!x->sampled || x->noise)
                return 0;
        x->noise = malloc(n * sizeof(*x->noise));
        x->clip_noise = malloc(n / x->film.tokens * x->clip.tokens * sizeof(*x->clip_noise));
        if (!x->noise || !x->clip_noise) {
                free(STEAL_PTR(x->noise));
                free(STEAL_PTR(x->clip_noise));
                return -ENOMEM;
        }
        h3_noise_init(&generator, x->seed);
        generator.stop = job_is_cancelled;
        generator.stop_userdata = x->job;
        generator.share = job_share_noise;
        h3_noise_draw(&generator, n, x->noise);
        return x->job->cancelled ? -ECANCELED : 0;
}

/* Once, and again after memory was missing. */
static int start(MediaWork *x) {
        uint64_t n = h3_video_vae_config(x->vae)->latent_channels * x->clip.tokens * plane(x);
        uint32_t tiles = h3_video_encode_tiles(&x->clip);
        bool ok = true;

        if (x->has_pool)
                return 0;
        for (size_t i = 0; i < x->n_raw; i++) {
                ok = (x->raw[i] || (x->raw[i] = malloc(x->clip.memory.chunk))) && ok;
                ok = (x->frames[i] || (x->frames[i] = malloc(x->film.clip_frames * x->frame_bytes))) && ok;
        }
        ok = (x->tiles || (x->tiles = calloc(tiles, sizeof(*x->tiles)))) && ok;
        ok = (x->moments || (x->moments = malloc(2 * n * sizeof(float)))) && ok;
        ok = (x->z || (x->z = malloc(n * sizeof(float)))) && ok;
        if (!ok || draw_noise(x) < 0)
                return -ENOMEM;

        tile_pool_init(&x->pool, x->film.clips, tiles, make_tile, x);
        x->pool.memory = x->clip.memory.device;
        /* Few of the weights meet every pixel. */
        x->pool.row_bytes = (double) x->clip.clip_frames * x->clip.rows.size * x->clip.cols.size *
                            (double) h3_video_vae_weight_bytes(x->vae) / 16;
        x->has_pool = true;
        return 0;
}

/* The clip's frames, and those of the next one if ranks may turn to it. */
static int take_frames(MediaWork *x, uint32_t clip, Fault *f) {
        int r = 0;

        for (uint32_t i = clip; r >= 0 && i < clip + x->n_raw && i < x->film.clips; i++)
                if (x->frames_of[i % x->n_raw] != i)
                        r = copy_frames(x, i, f);
        return r;
}

static uint64_t tokens_of(const MediaWork *x, uint32_t clip) {
        uint64_t left = x->film.tokens - (uint64_t) clip * x->clip.tokens;

        return left < x->clip.tokens ? left : x->clip.tokens;
}

/* The clip's part of the noise, behind each other as its moments are. Tokens beyond the film's are dropped
 * later: any noise will do. */
static void sample(MediaWork *x, uint32_t clip) {
        uint64_t channels = h3_video_vae_config(x->vae)->latent_channels, all = x->clip.tokens * plane(x);

        memset(x->clip_noise, 0, channels * all * sizeof(float));
        for (uint64_t c = 0; c < channels; c++)
                memcpy(x->clip_noise + c * all,
                        x->noise + (c * x->film.tokens + (uint64_t) clip * x->clip.tokens) * plane(x),
                        tokens_of(x, clip) * plane(x) * sizeof(float));
        h3_video_latent_sample_of(x->vae, x->moments, x->clip_noise, all, x->z);
}

/* From tiles to x->z: all of the clip's tokens. */
static int finish(MediaWork *x, uint32_t clip) {
        uint64_t n = x->clip.tokens * plane(x);
        int r;

        for (uint32_t i = 0; i < h3_video_encode_tiles(&x->clip); i++)
                x->tiles[i] = tile_place(x, clip, i);
        r = h3_video_encode_blend(x->vae, &x->clip, 0, x->tiles, x->moments);
        if (r < 0)
                return r;
        if (x->sampled)
                sample(x, clip);
        else
                h3_video_latent_mean(x->vae, x->moments, n, x->z);
        return 0;
}

/* To the film's tokens from this clip's first one on. */
static int publish(Job *j, const MediaWork *x, uint32_t clip) {
        uint64_t n = tokens_of(x, clip) * plane(x), channels = h3_video_vae_config(x->vae)->latent_channels;
        float *film = coder_output(j, 0);
        int r;

        r = coder_hold(j);
        if (r < 0)
                return r;
        for (uint64_t c = 0; c < channels; c++)
                memcpy(film + (c * x->film.tokens + (uint64_t) clip * x->clip.tokens) * plane(x),
                        x->z + c * x->clip.tokens * plane(x), n * sizeof(float));
        coder_release(j, true);
        return 0;
}

static int encode_step(StepRunner *s, RankGroup *g, Job *j, uint32_t step, StepResult *ret, Fault *f) {
        MediaWork *x = j->coder->work;
        int r;

        if (!x->runner)
                x->runner = s;
        r = start(x);
        if (r >= 0)
                r = take_frames(x, step, f);
        if (r >= 0)
                r = tile_pool_run(&x->pool, s, g, j, step, step + (uint32_t) x->n_raw, j->ranks, f);
        if (r >= 0)
                r = finish(x, step);
        if (r >= 0)
                r = tensor_check_finite("latents of the VAE", ST_F32, x->z, 1,
                        (uint64_t[]){
                                h3_video_vae_config(x->vae)->latent_channels * x->clip.tokens * plane(x)},
                        f);
        if (r >= 0)
                r = publish(j, x, step);
        if (r >= 0)
                tile_pool_count(&x->pool, ret->tiles);
        return r;
}

static bool runs(const LkOps *ops) {
        return ops->conv && ops->group_norm;
}

const CoderClass coder_encode_video = {.runs = runs, .open = encode_open, .step = encode_step, .free = work_free};
