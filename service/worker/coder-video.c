/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>

#include "service/h3/video-vae.h"
#include "service/shared/cleanup.h"
#include "service/worker/coder.h"
#include "service/worker/crew.h"
#include "service/worker/job-input.h"
#include "service/worker/split.h"
#include "service/worker/tile-pool.h"

/* DECODE of video: a step per temporal chunk. Its tiles are made by whoever is free (tile-pool.h), then its
 * frames are blended by all processors, each a band of rows, into memory of the job; from there they go to the
 * ring, and the tail to its slot, before the commit. Several ranks, and devices that compute by themselves, make the next chunks
 * meanwhile: a chunk of 1344 x 768 is 616 MB of tiles for the host to go through. */

typedef struct VideoWork {
        const H3VideoVae *vae;
        const LkOps *ops;
        H3VideoDecodePlan plan;
        H3Pixels pixels;
        uint64_t frame_bytes;
        float *z;      /* [channels, T, H, W], the job's own */
        TilePool pool; /* once the first step runs */
        bool has_pool;
        size_t n_raw;        /* 2 with several ranks or devices of their own, and several chunks; else 1 */
        float *raw[2];       /* tiles of chunk k at k % n_raw */
        float *tails[2];     /* after k steps at k % 2; NULL with one chunk */
        const float **tiles; /* [tiles], of the chunk that is blended */
        void *frames;        /* of a step */
        bool overlaps;       /* the devices work while the host blends */
        Job *job;            /* that this belongs to */
        StepRunner *runner;  /* of the step */
        H3VideoBlend blend;  /* of the step */
        Crew crew;           /* that does it */
        atomic_int error;    /* of one of them */
        pthread_mutex_t lock; /* of fault */
        Fault fault;
} VideoWork;

static void work_free(void *userdata) {
        VideoWork *x = userdata;

        if (!x)
                return;
        if (x->has_pool)
                tile_pool_done(&x->pool);
        (void) pthread_mutex_destroy(&x->lock);
        free(x->z);
        for (size_t i = 0; i < 2; i++) {
                if (x->raw[i] && x->overlaps)
                        x->ops->unpin(x->raw[i], x->plan.memory.chunk);
                free(x->raw[i]);
                free(x->tails[i]);
        }
        free(x->tiles);
        free(x->frames);
        free(x);
}

static int take_latents(Job *j, const WireJobOpen *w, VideoWork *x, Fault *f) {
        const TensorRule rule = {.name = "video",
                .type = ST_F32,
                .n_dims = 4,
                .shape = {h3_video_vae_config(x->vae)->latent_channels}};
        const LkOps *ops = x->ops;
        LkType type = LK_F32;
        int r;

        /* sizes before bytes: what no plan takes is not copied either */
        r = tensor_check(&w->video, &rule, &j->arenas->input, f);
        if (r >= 0)
                r = h3_video_decode_plan(x->vae, w->video.shape[1], w->video.shape[2], w->video.shape[3],
                        H3_VIDEO_TILING, &x->plan, f);
        if (r >= 0 && ops->half && j->compute != H3_COMPUTE_F32)
                type = LK_F16;
        if (r >= 0) /* memory for what is made together */
                r = h3_video_decode_plan_as(x->vae, type,
                        tile_pool_together(h3_video_decode_tiles(&x->plan), ops->batch, j->coder->ranks), &x->plan, f);
        if (r >= 0 && !(w->flags & WIRE_JOB_UNREAD))
                r = tensor_copy(&w->video, &rule, &j->arenas->input, (void **) &x->z, f);
        if (r < 0 || (w->flags & WIRE_JOB_UNREAD))
                return r;
        return tensor_check_finite("video", ST_F32, x->z, 4, w->video.shape, f);
}

/* Frames of the film, of a step, of the ring. */
static int set_frames(Job *j, const WireJobOpen *w, const VideoWork *x, Fault *f) {
        Coder *c = j->coder;

        c->frames = x->plan.frames;
        for (uint32_t i = 0; i < x->plan.chunks; i++) {
                uint64_t n = h3_range_size(h3_video_decode_frames(&x->plan, i));

                if (n > c->step_frames)
                        c->step_frames = n;
        }
        c->ring_frames = w->ring_frames == 0 || w->ring_frames > c->frames ? c->frames : w->ring_frames;
        if (c->ring_frames < c->step_frames)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "The result may hold %" PRIu64 " frames at a time, a step makes up to %" PRIu64
                        ": give room for as many, or for all %" PRIu64 ".",
                        c->ring_frames, c->step_frames, c->frames);
        return 0;
}

static int set_memory(Job *j, const VideoWork *x) {
        const H3VideoMemory *m = &x->plan.memory;
        uint64_t ranks = x->n_raw == 1 ? coder_takers(j, h3_video_decode_tiles(&x->plan)) : j->coder->ranks, own, all;

        if (__builtin_add_overflow(m->device, m->host, &own) || __builtin_mul_overflow(own, ranks, &own) ||
                __builtin_mul_overflow(m->chunk, (uint64_t) x->n_raw, &all) ||
                __builtin_add_overflow(all, own, &all) ||
                __builtin_add_overflow(all, 2 * m->tail + j->coder->step_frames * x->frame_bytes, &all))
                return -EOVERFLOW;
        j->coder->memory_bytes = all;
        j->coder->device_bytes = m->device * ranks;
        return 0;
}

static int decode_open(Job *j, const WireJobOpen *w, Fault *f) {
        Coder *c = j->coder;
        VideoWork *x;
        int r;

        if (w->output_type != ST_U8 && w->output_type != ST_F32)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "The frames are to be of the type %" PRIu32 ", expected u8 or f32.", w->output_type);
        x = calloc(1, sizeof(*x));
        if (!x)
                return -ENOMEM;
        c->work = x; /* freed with the job from now on */
        (void) pthread_mutex_init(&x->lock, NULL);
        x->vae = j->model->video_vae;
        x->ops = j->model->ops;
        c->weights = &h3_weights_video_decoder;
        c->model = x->vae;
        x->job = j;
        x->pixels = w->output_type == ST_U8 ? H3_PIXELS_U8 : H3_PIXELS_F32;

        r = take_latents(j, w, x, f);
        if (r >= 0)
                r = set_frames(j, w, x, f);
        if (r < 0)
                return r;
        x->frame_bytes = UINT64_C(3) * H3_VIDEO_RATIO * H3_VIDEO_RATIO * x->plan.height * x->plan.width *
                         h3_pixel_size(x->pixels);
        c->rows = (uint64_t) x->plan.tokens * x->plan.height * x->plan.width;
        c->blocks = h3_video_decode_tiles(&x->plan);
        c->slot_size = x->plan.chunks > 1 ? x->plan.memory.tail : 0;
        j->steps = x->plan.chunks;
        x->overlaps = !x->ops->host_weights && x->plan.chunks > 1;
        x->n_raw = (c->ranks > 1 && x->plan.chunks > 1) || x->overlaps ? 2 : 1;
        r = set_memory(j, x);
        if (r < 0)
                return r;
        return coder_add_output(c, WIRE_OUTPUT_FRAMES, c->output_type, 4,
                (uint64_t[]){c->ring_frames, x->plan.rows.length, x->plan.cols.length, 3});
}

/* A worker that died wrote it: its numbers are checked like an input's. */
static int decode_resume(Job *j, Fault *f) {
        VideoWork *x = j->coder->work;
        float *tail;

        j->coder->frames_done = h3_video_decode_frames(&x->plan, j->committed - 1).end;
        if (j->committed == j->steps)
                return 0;
        tail = malloc(x->plan.memory.tail);
        if (!tail)
                return -ENOMEM;
        x->tails[j->committed % 2] = tail;
        memcpy(tail, coder_slot(j, j->committed), (size_t) x->plan.memory.tail);
        return tensor_check_finite("the committed tail of the chunk before", ST_F32, tail, 1,
                (uint64_t[]){x->plan.memory.tail / sizeof(float)}, f);
}

static float *tile_place(const VideoWork *x, uint32_t chunk, uint32_t tile) {
        return x->raw[chunk % x->n_raw] + (uint64_t) tile * (x->plan.memory.tile / sizeof(float));
}

/* Tiles that are being made. */
typedef struct Making {
        const VideoWork *work;
        const TilePlace *at;
        float *out;
        H3VideoSlot slot;
} Making;

/* Slow where the memory cannot be registered, and right. */
static void pin_tiles(Making *m) {
        const VideoWork *x = m->work;

        if (x->overlaps)
                m->slot.registered = x->ops->pin(m->at->context, m->out, m->at->n * x->plan.memory.tile) >= 0;
}

/* Where the tiles go is registered while the device is at their first block. */
static int on_block(void *userdata, uint32_t done, uint32_t total) {
        Making *m = userdata;

        if (done == 1)
                pin_tiles(m);
        return m->work->job->cancelled ? -ECANCELED : 0;
}

static int make_tiles(void *userdata, const TilePlace *at, Fault *f) {
        VideoWork *x = userdata;
        Making making = {x, at, tile_place(x, at->chunk, at->tile), {.number = at->slot}};
        const H3StepHooks hooks = {.on_block = on_block, .userdata = &making};
        const H3Rank rank = {.index = at->rank, .ops = x->runner->backend->ops, .context = at->context, .weights = at->weights};

        return h3_video_decode_begin(
                &rank, x->vae, &x->plan, x->z, at->chunk, at->tile, at->n, at->memory, &hooks, &making.slot, making.out, f);
}

/* While the device is at the next ones. */
static int end_tiles(void *userdata, const TilePlace *at, Fault *f) {
        const VideoWork *x = userdata;
        const H3Rank rank = {.index = at->rank, .ops = x->runner->backend->ops, .context = at->context};

        return h3_video_decode_end(&rank, at->slot, f);
}

/* Memory for a chunk's tiles, in large pages if they are registered with devices: what is not yet there costs each film more than its
 * blend. */
#define LARGE_PAGE (UINT64_C(2) << 20)
static float *tiles_new(const VideoWork *x) {
        uint64_t size = (x->plan.memory.chunk + LARGE_PAGE - 1) / LARGE_PAGE * LARGE_PAGE;
        float *tiles;

        if (!x->overlaps)
                return malloc(x->plan.memory.chunk);
        tiles = aligned_alloc(LARGE_PAGE, size);
        if (tiles)
                (void) madvise(tiles, size, MADV_HUGEPAGE);
        return tiles;
}

/* While the devices are at the first tiles. A kernel that cannot does it later. One page at a time: a rank that maps memory meanwhile waits
 * for each call. */
static void touch_part(void *userdata, uint32_t part, uint32_t n) {
        const VideoWork *x = userdata;
        uint64_t all = x->plan.memory.chunk / LARGE_PAGE, from = all * part / n, to = all * (part + 1) / n;

        for (size_t i = 0; i < x->n_raw; i++)
                for (uint64_t page = from; page < to; page++)
                        (void) madvise((uint8_t *) x->raw[i] + page * LARGE_PAGE, LARGE_PAGE, MADV_POPULATE_WRITE);
}

/* Once, and again after memory was missing. */
static int start(Job *j, VideoWork *x) {
        const H3VideoMemory *m = &x->plan.memory;
        uint32_t tiles = h3_video_decode_tiles(&x->plan);
        size_t n_tails = x->plan.chunks > 1 ? 2 : 0;
        bool ok = true;

        if (x->has_pool)
                return 0;
        for (size_t i = 0; i < x->n_raw; i++)
                ok = (x->raw[i] || (x->raw[i] = tiles_new(x))) && ok;
        for (size_t i = 0; i < n_tails; i++)
                ok = (x->tails[i] || (x->tails[i] = malloc(m->tail))) && ok;
        ok = (x->tiles || (x->tiles = calloc(tiles, sizeof(*x->tiles)))) && ok;
        ok = (x->frames || (x->frames = malloc(j->coder->step_frames * x->frame_bytes))) && ok;
        if (!ok)
                return -ENOMEM;

        tile_pool_init(&x->pool, x->plan.chunks, tiles, make_tiles, x);
        x->pool.memory = m->device;
        x->pool.complete = x->ops->copy ? end_tiles : NULL;
        x->pool.batch = x->plan.batch;
        x->pool.row_bytes = (double) x->plan.batch * (double) x->plan.chunk_tokens * (x->plan.rows.size / H3_VIDEO_RATIO) *
                            (x->plan.cols.size / H3_VIDEO_RATIO) *
                            (double) h3_video_vae_weight_bytes(x->vae);
        x->has_pool = true;
        return 0;
}

static void fail(VideoWork *x, int error, const Fault *f) {
        (void) pthread_mutex_lock(&x->lock);
        if (x->error == 0) {
                x->error = error;
                x->fault = *f;
        }
        (void) pthread_mutex_unlock(&x->lock);
}

/* What tiles say must be finite: what is blended of finite numbers is, too. */
static void check_tiles(VideoWork *x, uint32_t i, uint32_t n) {
        Fault f = {};
        int r = 0;

        for (uint32_t tile = i; r >= 0 && x->error == 0 && tile < h3_video_decode_tiles(&x->plan); tile += n)
                r = tensor_check_finite("pixels of the VAE", ST_F32, x->tiles[tile], 1,
                        (uint64_t[]){x->plan.memory.tile / sizeof(float)}, &f);
        if (r < 0)
                fail(x, r, &f);
}

/* A band of rows, so many at a time that a cancel is heard. */
#define BLEND_ROWS 64u
static void blend_band(void *userdata, uint32_t i, uint32_t n) {
        VideoWork *x = userdata;
        uint64_t height = x->plan.rows.length;
        H3Range rows = {height * i / n, height * (i + 1) / n};
        int r = 0;

        check_tiles(x, i, n);
        while (r >= 0 && x->error == 0 && h3_range_size(rows) > 0) {
                uint64_t some = h3_range_size(rows) < BLEND_ROWS ? h3_range_size(rows) : BLEND_ROWS;

                r = x->job->cancelled ? -ECANCELED
                                      : h3_video_decode_blend(&x->plan, &x->blend, (H3Range){rows.begin, rows.begin + some});
                rows.begin += some;
        }
        if (r < 0)
                fail(x, r, &(Fault){});
}

static int blend(VideoWork *x, uint32_t chunk, Fault *f) {
        for (uint32_t i = 0; i < h3_video_decode_tiles(&x->plan); i++)
                x->tiles[i] = tile_place(x, chunk, i);
        x->blend = (H3VideoBlend){
                .chunk = chunk,
                .tiles = x->tiles,
                .tail_before = x->tails[chunk % 2],
                .tail_after = x->tails[(chunk + 1) % 2],
                .pixels = x->pixels,
                .frames = x->frames,
        };
        x->error = 0;
        x->fault = (Fault){};
        crew_begin(&x->crew, CREW_MAX, blend_band, x);
        crew_end(&x->crew);
        if (x->error < 0 && x->fault.text[0])
                *f = x->fault;
        return x->error;
}

/* Bytes of part i of n: whole lines of the cache. */
static H3Range part_of(uint64_t size, uint32_t i, uint32_t n) {
        uint64_t step = (size / n + 63) / 64 * 64, begin = step * i;

        return (H3Range){begin < size ? begin : size, i + 1 < n && begin + step < size ? begin + step : size};
}

static void copy_part(void *to, const void *from, H3Range part) {
        memcpy((uint8_t *) to + part.begin, (const uint8_t *) from + part.begin, (size_t) h3_range_size(part));
}

/* Frames to the ring, the tail to its slot: hundreds of megabytes while the devices wait. */
static void publish_part(void *userdata, uint32_t part, uint32_t n) {
        const VideoWork *x = userdata;
        uint32_t chunk = x->blend.chunk;
        H3Range made = h3_video_decode_frames(&x->plan, chunk), bytes = part_of(x->frame_bytes, part, n);
        uint8_t *ring = coder_output(x->job, 0);

        for (uint64_t i = made.begin; i < made.end; i++)
                copy_part(ring + i % x->job->coder->ring_frames * x->frame_bytes,
                        (const uint8_t *) x->frames + (i - made.begin) * x->frame_bytes, bytes);
        if (chunk + 1 < x->plan.chunks)
                copy_part(coder_slot(x->job, chunk + 1), x->tails[(chunk + 1) % 2], part_of(x->plan.memory.tail, part, n));
}

static int publish(Job *j, VideoWork *x) {
        int r;

        r = coder_hold(j);
        if (r < 0)
                return r;
        crew_begin(&x->crew, CREW_MAX, publish_part, x);
        crew_end(&x->crew);
        coder_release(j, true);
        return 0;
}

static int decode_step(StepRunner *s, RankGroup *g, Job *j, uint32_t step, StepResult *ret, Fault *f) {
        VideoWork *x = j->coder->work;
        bool touches = x->overlaps && !x->has_pool;
        int r;

        if (!x->runner)
                x->runner = s;
        r = start(j, x);
        if (r < 0)
                return r;
        if (touches)
                crew_begin(&x->crew, CREW_MAX, touch_part, x);
        r = tile_pool_run(&x->pool, s, g, j, step, step + (uint32_t) x->n_raw, j->ranks, f);
        if (touches)
                crew_end(&x->crew);
        if (r < 0)
                return r;
        r = blend(x, step, f);
        if (r < 0)
                return r;
        if (x->n_raw > 1) /* the tiles' place is free */
                tile_pool_allow(&x->pool, step + 1 + (uint32_t) x->n_raw);
        r = publish(j, x);
        if (r < 0)
                return r;
        ret->frames = h3_video_decode_frames(&x->plan, step).end;
        tile_pool_count(&x->pool, ret->tiles);
        return 0;
}

const CoderClass coder_decode_video = {
        .open = decode_open, .resume = decode_resume, .step = decode_step, .free = work_free};
