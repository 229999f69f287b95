/* SPDX-License-Identifier: Apache-2.0 */
/* DECODE and ENCODE_MEDIA of video. What a job makes is compared with the plain way through the VAE, tile
 * after tile on one thread, to the bit: ranks, delays, rings and deaths may change nothing. */
#include "service/worker/coder.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <math.h>
#include <string.h>

#include <cmocka.h>

#include "service/shared/cleanup.h"
#include "tests/unit/worker/coder-bench.h"

DEFINE_CLEANUP(Job *, job_unref)

#define MODEL 1
#define ARENA (UINT64_C(12) << 20)
#define CHANNELS 24
/* Three chunks of two tiles: 56 frames of 288 x 32 pixels. */
#define T 17
#define H 18
#define W 2
#define N (CHANNELS * T * H * W)
#define FRAME (UINT64_C(3) * H * W * 256)
#define FRAMES 56

#ifdef SANITIZED /* ten times slower */
static const uint32_t rank_counts[] = {1, 3};
#else
static const uint32_t rank_counts[] = {1, 2, 3, 8};
#endif

static int setup(void **state) {
        CoderBench *b = bench_new(1, ARENA);

        bench_load(b, MODEL, bench_video_vae);
        *state = b;
        return 0;
}

static int teardown(void **state) {
        (void) bench_free(*state);
        return 0;
}

static const H3VideoVae *vae_of(const CoderBench *b) {
        return model_table_find(&b->models, MODEL)->video_vae;
}

static WireJobOpen decode_job(CoderBench *b, const uint64_t shape[4], const float *z, StType type) {
        WireJobOpen w = bench_job(b, WIRE_JOB_DECODE, MODEL);

        w.video = bench_put(b, ST_F32, 4, shape, z);
        w.output_type = type;
        return w;
}

/* The film of T, H, W that most tests decode. */
static WireJobOpen film_job(CoderBench *b, StType type) {
        CLEANUP_FREE float *z = bench_numbers(N, 1);

        return decode_job(b, (uint64_t[]){CHANNELS, T, H, W}, z, type);
}

/* As service/h3/video-vae.h says, in the order of the film. */
static uint8_t *decode_plainly(
        CoderBench *b, const uint64_t shape[4], const float *z, H3Pixels pixels, uint64_t *ret_size) {
        H3Rank rank = {.ops = &b->ops};
        H3VideoDecodePlan p;
        uint32_t n;
        float *raw, *tails[2];
        const float *tiles[64];
        uint64_t frame;
        uint8_t *film;
        void *work;
        Fault f = {};

        assert_int_equal(
                h3_video_decode_plan(vae_of(b), shape[1], shape[2], shape[3], H3_VIDEO_TILING, &p, &f), 0);
        n = h3_video_decode_tiles(&p);
        frame = shape[2] * shape[3] * 768 * h3_pixel_size(pixels);
        *ret_size = p.frames * frame;
        film = malloc(*ret_size);
        raw = malloc(p.memory.chunk);
        tails[0] = malloc(p.memory.tail + 1);
        tails[1] = malloc(p.memory.tail + 1);
        assert_true(n <= 64 && film && raw && tails[0] && tails[1]);
        assert_int_equal(b->ops.context_new(1, &rank.context), 0);
        assert_int_equal(b->ops.memory_new(rank.context, p.memory.device + 1, &work), 0);
        for (uint32_t k = 0; k < p.chunks; k++) {
                const H3VideoBlend blend = {
                        .chunk = k,
                        .tiles = tiles,
                        .tail_before = tails[k % 2],
                        .tail_after = tails[(k + 1) % 2],
                        .pixels = pixels,
                        .frames = film + h3_video_decode_frames(&p, k).begin * frame,
                };

                for (uint32_t i = 0; i < n; i++) {
                        float *out = raw + i * (p.memory.tile / sizeof(float));

                        tiles[i] = out;
                        if (h3_video_decode_tile(&rank, vae_of(b), &p, z, k, i, work, NULL, out, &f) < 0)
                                fail_msg("%s", f.text);
                }
                assert_int_equal(h3_video_decode_blend(&p, &blend, (H3Range){0, p.rows.length}), 0);
        }
        b->ops.memory_free(rank.context, work);
        (void) b->ops.context_free(rank.context);
        free(raw);
        free(tails[0]);
        free(tails[1]);
        return film;
}

/* Made once for all tests: it is of the same numbers in each. */
static uint8_t *film_plainly(CoderBench *b, H3Pixels pixels, uint64_t *ret_size) {
        static uint8_t *films[2];
        static uint64_t sizes[2];
        const bool wide = pixels == H3_PIXELS_F32;
        uint8_t *film;

        if (!films[wide]) {
                CLEANUP_FREE float *z = bench_numbers(N, 1);

                films[wide] = decode_plainly(b, (uint64_t[]){CHANNELS, T, H, W}, z, pixels, sizes + wide);
        }
        *ret_size = sizes[wide];
        film = malloc(*ret_size);
        assert_non_null(film);
        return memcpy(film, films[wide], *ret_size);
}

static void decode_ranks_and_delays_same_bits(void **state) {
        CoderBench *b = *state;
        const WireJobOpen w = film_job(b, ST_U8);
        CLEANUP_FREE uint8_t *expected = NULL;
        uint64_t size, n;

        expected = film_plainly(b, H3_PIXELS_U8, &size);
        assert_int_equal(size, FRAMES * FRAME);
        for (size_t i = 0; i < ELEMENTSOF(rank_counts); i++) {
                CLEANUP_FREE uint8_t *film = NULL;

                bench_set_ranks(b, rank_counts[i]);
                bench_delay(b, (uint32_t) i, i % 2 ? 3000 : 0);
                film = bench_run(b, &w, &n);
                assert_true(n >= size);
                assert_memory_equal(film, expected, size);
        }
}

/* Every tile once: what ranks make behind a step counts with the next one. */
static void decode_says_who_made_the_tiles(void **state) {
        CoderBench *b = *state;
        const WireJobOpen w = film_job(b, ST_U8);
        CLEANUP(job_unrefp) Job *j = NULL;
        uint32_t all = 0;

        bench_set_ranks(b, 3);
        j = bench_open(b, &w);
        for (uint32_t k = 1; k <= j->steps; k++) {
                StepResult result;
                Fault f = {};

                assert_int_equal(bench_try_step(b, j, &result, &f), 0);
                for (uint32_t i = 0; i < RANKS_MAX; i++) {
                        assert_true(result.tiles[i] == 0 || i < 3);
                        all += result.tiles[i];
                }
                assert_true(all >= 2 * k && all <= 6);
        }
        assert_int_equal(all, 6);
}

static void note_rank(void *userdata, uint32_t rank, uint32_t chunk, uint32_t tile) {
        (void) atomic_fetch_or((atomic_uint_least64_t *) userdata, UINT64_C(1) << rank);
}

/* Fewer ranks than there are. */
static void decode_takes_the_ranks_that_were_asked_for(void **state) {
        CoderBench *b = *state;
        WireJobOpen w = film_job(b, ST_F32);
        CLEANUP_FREE uint8_t *expected = NULL, *film = NULL;
        atomic_uint_least64_t ranks = 0;
        uint64_t size, n;

        bench_set_ranks(b, 4);
        w.ranks = 10; /* the second and the fourth */
        expected = film_plainly(b, H3_PIXELS_F32, &size);
        b->runner.tile_hook = note_rank;
        b->runner.tile_userdata = &ranks;
        film = bench_run(b, &w, &n);
        assert_memory_equal(film, expected, size);
        assert_int_equal(ranks & ~w.ranks, 0);
        assert_int_not_equal(ranks, 0);
        w.ranks = 16;
        bench_refuse(b, &w, FAULT_INVALID_ARGUMENT, "the worker has 4");
}

static void decode_says_what_it_makes(void **state) {
        CoderBench *b = *state;
        WireJobOpen w = film_job(b, ST_U8);
        CLEANUP(job_unrefp) Job *j = NULL;
        WireMessage m;

        w.ring_frames = 30;
        j = bench_open(b, &w);
        wire_init(&m, WIRE_JOB_READY, 1, BENCH_JOB, 0);
        job_describe(j, &m.job_ready);
        assert_int_equal(m.job_ready.steps, 3);
        assert_int_equal(m.job_ready.blocks, 2);
        assert_int_equal(m.job_ready.rows, T * H * W);
        assert_int_equal(m.job_ready.frames, FRAMES);
        assert_int_equal(m.job_ready.ring_frames, 30);
        assert_int_equal(m.job_ready.step_frames, 22);
        assert_int_equal(m.job_ready.frames_done, 0);
        assert_int_equal(m.job_ready.n_slots, 2);
        assert_true(m.job_ready.slot_stride >= 5 * FRAME * sizeof(float));
        assert_int_equal(m.job_ready.n_outputs, 1);
        assert_int_equal(m.job_ready.outputs[0].name, WIRE_OUTPUT_FRAMES);
        assert_int_equal(m.job_ready.outputs[0].tensor.size, 30 * FRAME);
        assert_true(m.job_ready.memory_bytes > 2 * 5 * FRAME * sizeof(float));
        assert_committed(b, j, 0);
}

/* A client takes frames as they come; each is where the ring says, and stays until its room is used again.
 */
static void decode_ring_has_every_frame_in_turn(void **state) {
        CoderBench *b = *state;
        const uint64_t rings[] = {22, 23, FRAMES + 7};
        CLEANUP_FREE uint8_t *expected = NULL;
        uint64_t size;

        expected = film_plainly(b, H3_PIXELS_U8, &size);
        bench_set_ranks(b, 3);
        for (size_t i = 0; i < ELEMENTSOF(rings); i++) {
                WireJobOpen w = film_job(b, ST_U8);
                CLEANUP(job_unrefp) Job *j = NULL;
                uint64_t done = 0, ring;

                w.ring_frames = rings[i];
                j = bench_open(b, &w);
                ring = j->coder->ring_frames;
                assert_int_equal(ring, rings[i] < FRAMES ? rings[i] : FRAMES);
                while (j->committed < j->steps) {
                        const uint8_t *frames = b->output + j->coder->outputs[0].tensor.offset;
                        StepResult result = {};
                        Fault f = {};

                        assert_int_equal(bench_try_step(b, j, &result, &f), 0);
                        assert_int_equal(result.frames, j->committed < 3 ? 17 * j->committed : FRAMES);
                        for (; done < result.frames; done++)
                                assert_memory_equal(
                                        frames + done % ring * FRAME, expected + done * FRAME, FRAME);
                }
                assert_committed(b, j, 3);
        }
}

/* The worker dies after each step, and in the middle of each. */
static void decode_killed_at_every_chunk_same_bits(void **state) {
        CoderBench *b = *state;
        WireJobOpen w = film_job(b, ST_F32);
        CLEANUP_FREE uint8_t *expected = NULL;
        uint64_t size;

        expected = film_plainly(b, H3_PIXELS_F32, &size);
        for (uint32_t k = 0; k <= 3; k++) {
                CLEANUP(job_unrefp) Job *j = NULL;
                WireMessage m;

                w.flags = 0;
                bench_set_ranks(b, 2);
                memset(b->output, 0xff, b->size);
                j = bench_open(b, &w);
                while (j->committed < k)
                        bench_step(b, j);
                j = job_unref(j);

                /* what an interrupted step leaves: frames that nobody was told of */
                bench_set_ranks(b, 3);
                w.flags = WIRE_JOB_RESUME;
                j = bench_open(b, &w);
                memset(b->output + j->coder->outputs[0].tensor.offset + 17 * k * FRAME * sizeof(float), 0xaa,
                        k < 3 ? FRAME : 0);
                wire_init(&m, WIRE_JOB_READY, 1, BENCH_JOB, 0);
                job_describe(j, &m.job_ready);
                assert_int_equal(m.job_ready.committed, k);
                assert_int_equal(m.job_ready.frames_done, k < 3 ? 17 * k : FRAMES);
                bench_finish(b, j);
                assert_memory_equal(b->output + j->coder->outputs[0].tensor.offset, expected, size);
        }
}

static void decode_resume_of_a_broken_tail_is_refused(void **state) {
        CoderBench *b = *state;
        WireJobOpen w = film_job(b, ST_U8);
        Job *j = bench_open(b, &w);
        const float nan = NAN;

        bench_step(b, j);
        memcpy((char *) coder_slot(j, 1) + 400, &nan, sizeof(nan));
        (void) job_unref(j);
        w.flags = WIRE_JOB_RESUME;
        bench_refuse(b, &w, FAULT_INVALID_TENSOR, "the committed tail of the chunk before has NaN");
        memset(b->output, 0, 64);
        bench_refuse(b, &w, FAULT_INVALID_ARGUMENT, "holds no committed state");
}

static void decode_image_and_short_clip_match(void **state) {
        CoderBench *b = *state;
        const uint64_t tokens[] = {1, 2, 6};

        bench_set_ranks(b, 2);
        for (size_t i = 0; i < ELEMENTSOF(tokens); i++) {
                const uint64_t shape[4] = {CHANNELS, tokens[i], 2, 3};
                CLEANUP_FREE float *z = bench_numbers(CHANNELS * tokens[i] * 6, 5);
                CLEANUP_FREE uint8_t *expected = NULL, *film = NULL;
                const WireJobOpen w = decode_job(b, shape, z, ST_U8);
                uint64_t size, n;

                expected = decode_plainly(b, shape, z, H3_PIXELS_U8, &size);
                film = bench_run(b, &w, &n);
                assert_memory_equal(film, expected, size);
        }
}

static Job *cancelled_by_tile;

static void cancel_at_tile(void *userdata, uint32_t rank, uint32_t chunk, uint32_t tile) {
        if (chunk == 1 && tile == 1)
                cancelled_by_tile->cancelled = true;
}

static void decode_cancelled_in_a_tile_commits_nothing(void **state) {
        CoderBench *b = *state;
        const WireJobOpen w = film_job(b, ST_U8);
        CLEANUP(job_unrefp) Job *j = NULL;
        StepResult result;
        Fault f = {};

        j = cancelled_by_tile = bench_open(b, &w);
        b->runner.tile_hook = cancel_at_tile;
        bench_step(b, j);
        assert_int_equal(bench_try_step(b, j, &result, &f), -ECANCELED);
        assert_string_equal(f.name, FAULT_CANCELLED);
        assert_committed(b, j, 1);
}

static Job *closed_by_tile;

static void close_at_tile(void *userdata, uint32_t rank, uint32_t chunk, uint32_t tile) {
        (void) pthread_mutex_lock(&closed_by_tile->lock);
        closed_by_tile->closed = true;
        (void) pthread_mutex_unlock(&closed_by_tile->lock);
}

/* JOB_CLOSE came while the last tile was made, too late for it to stop. */
static void decode_closed_in_a_tile_writes_nothing(void **state) {
        CoderBench *b = *state;
        const WireJobOpen w = film_job(b, ST_U8);
        CLEANUP(job_unrefp) Job *j = NULL;
        StepResult result;
        Fault f = {};

        memset(b->output, 0x11, b->size);
        j = closed_by_tile = bench_open(b, &w);
        b->runner.tile_hook = close_at_tile;
        assert_int_equal(bench_try_step(b, j, &result, &f), -ECANCELED);
        assert_committed(b, j, 0);
        for (uint64_t i = 64; i < b->size; i++)
                assert_int_equal(b->output[i], 0x11);
}

static void decode_does_not_fit_says_numbers(void **state) {
        CoderBench *b = *state;
        const WireJobOpen w = film_job(b, ST_U8);
        CLEANUP(job_unrefp) Job *j = bench_open(b, &w);
        StepResult result;
        char part[64];
        Fault f = {};

        (void) snprintf(part, sizeof(part), "needs %llu bytes", (unsigned long long) j->coder->memory_bytes);
        bench_memory_available = j->coder->memory_bytes - 1;
        assert_int_equal(bench_try_step(b, j, &result, &f), -ENOMEM);
        assert_string_equal(f.name, FAULT_DOES_NOT_FIT);
        assert_non_null(strstr(f.text, part));
        bench_memory_available++;
        f = (Fault){};
        assert_int_equal(bench_try_step(b, j, &result, &f), 0);
}

static int failing_memory_new(LkContext *c, uint64_t size, void **ret) {
        return -ENOMEM;
}

/* A step that found no memory can be tried again. */
static void decode_device_out_of_memory_can_be_tried_again(void **state) {
        CoderBench *b = *state;
        const WireJobOpen w = film_job(b, ST_U8);
        CLEANUP(job_unrefp) Job *j = bench_open(b, &w);
        CLEANUP_FREE uint8_t *expected = NULL;
        int (*memory_new)(LkContext * c, uint64_t size, void **ret) = b->ops.memory_new;
        StepResult result;
        uint64_t size;
        Fault f = {};

        b->ops.memory_new = failing_memory_new;
        assert_int_equal(bench_try_step(b, j, &result, &f), -ENOMEM);
        assert_string_equal(f.name, FAULT_DOES_NOT_FIT);
        b->ops.memory_new = memory_new;
        bench_finish(b, j);
        expected = film_plainly(b, H3_PIXELS_U8, &size);
        assert_memory_equal(b->output + j->coder->outputs[0].tensor.offset, expected, size);
}

static void decode_result_not_finite_is_not_committed(void **state) {
        CoderBench *b = *state;
        CLEANUP_FREE float *z = bench_numbers(N, 1);
        CLEANUP(job_unrefp) Job *j = NULL;
        StepResult result;
        WireJobOpen w;
        Fault f = {};

        for (size_t i = 0; i < N; i++)
                z[i] = 3e38f;
        w = decode_job(b, (uint64_t[]){CHANNELS, T, H, W}, z, ST_U8);
        j = bench_open(b, &w);
        assert_int_equal(bench_try_step(b, j, &result, &f), -EINVAL);
        assert_string_equal(f.name, FAULT_INVALID_TENSOR);
        assert_committed(b, j, 0);
}

static void decode_bad_requests_are_refused(void **state) {
        CoderBench *b = *state;
        const WireJobOpen good = film_job(b, ST_U8);
        float *inside = (float *) (void *) (b->input + good.video.offset + 12);
        const float nan = NAN;
        WireJobOpen w = good;

        w.output_type = ST_BF16;
        bench_refuse(b, &w, FAULT_INVALID_ARGUMENT, "expected u8 or f32");
        w = good;
        w.ring_frames = 21;
        bench_refuse(b, &w, FAULT_INVALID_ARGUMENT, "a step makes up to 22");
        w = good;
        w.output_size = 64 + FRAMES * FRAME;
        bench_refuse(b, &w, FAULT_DOES_NOT_FIT, "make the arena larger");
        w = good;
        w.output_offset = 32;
        bench_refuse(b, &w, FAULT_INVALID_ARGUMENT, "at offset 32");
        w = good;
        w.video.shape[0] = 23;
        bench_refuse(b, &w, FAULT_INVALID_TENSOR, "expected [24, *, *, *]");
        w = good;
        w.video.offset = ARENA - 4;
        bench_refuse(b, &w, FAULT_INVALID_TENSOR, "outside its arena");
        w = good;
        w.audio = w.video;
        bench_refuse(b, &w, FAULT_INVALID_ARGUMENT, "the tensor audio");
        w = good;
        w.n_loras = 1;
        bench_refuse(b, &w, FAULT_INVALID_ARGUMENT, "1 LoRA adapters");
        w = good;
        w.n_conditions = 1;
        bench_refuse(b, &w, FAULT_INVALID_ARGUMENT, "only Encode");
        w = good;
        w.flags = WIRE_JOB_KEEP_STEPS;
        bench_refuse(b, &w, FAULT_INVALID_ARGUMENT, "the flags 0x1");
        w = good;
        w.kind = WIRE_JOB_TOKENIZE;
        bench_refuse(b, &w, FAULT_INVALID_ARGUMENT, "of kind \"video VAE\": it needs a conditioner");
        w.kind = WIRE_JOB_SAMPLE;
        bench_refuse(b, &w, FAULT_INVALID_ARGUMENT, "video VAE");
        w = good;
        memcpy(inside, &nan, sizeof(nan));
        bench_refuse(b, &w, FAULT_INVALID_TENSOR, "video has NaN");
}

static void decode_plan_only_writes_nothing(void **state) {
        CoderBench *b = *state;
        WireJobOpen w = film_job(b, ST_U8);
        CLEANUP(job_unrefp) Job *j = NULL;
        StepResult result;
        Fault f = {};

        memset(b->output, 0x33, b->size);
        w.flags = WIRE_JOB_PLAN_ONLY;
        w.output_size = 64; /* the plan says how much it has to be */
        j = bench_open(b, &w);
        assert_true(j->output_used > FRAMES * FRAME);
        for (uint64_t i = 0; i < b->size; i++)
                assert_int_equal(b->output[i], 0x33);
        assert_int_equal(bench_try_step(b, j, &result, &f), -EINVAL);
}

/* The latents of a film that is planned are not there yet. */
static void decode_plan_unread_is_the_same_plan(void **state) {
        CoderBench *b = *state;
        WireJobOpen w = film_job(b, ST_U8);
        CLEANUP(job_unrefp) Job *read = NULL;
        CLEANUP(job_unrefp) Job *unread = NULL;
        WireJobReady a = {}, c = {};

        w.flags = WIRE_JOB_PLAN_ONLY;
        read = bench_open(b, &w);
        memset(b->input + w.video.offset, 0xff, (size_t) w.video.size); /* NaN */
        bench_refuse(b, &w, FAULT_INVALID_TENSOR, "video has NaN");
        w.flags = WIRE_JOB_PLAN_ONLY | WIRE_JOB_UNREAD;
        unread = bench_open(b, &w);
        job_describe(read, &a);
        job_describe(unread, &c);
        assert_memory_equal(&a, &c, sizeof(a));
        w.flags = WIRE_JOB_UNREAD;
        bench_refuse(b, &w, FAULT_INVALID_ARGUMENT, "flags 0x8");
        w.flags = WIRE_JOB_PLAN_ONLY | WIRE_JOB_UNREAD;
        w.video.shape[0]++;
        bench_refuse(b, &w, FAULT_INVALID_TENSOR, "video has the shape");
}

/* ---- ENCODE_MEDIA ---- */

/* Two clips, the second one of three frames; two tiles. */
#define CLIP_FRAMES 20
#define CLIP_H 288
#define CLIP_W 32
#define PIXELS (UINT64_C(3) * CLIP_FRAMES * CLIP_H * CLIP_W)

static WireJobOpen media_job(CoderBench *b, uint64_t frames, StType type, const void *pixels) {
        WireJobOpen w = bench_job(b, WIRE_JOB_ENCODE_MEDIA, MODEL);

        w.video = bench_put(b, type, 4, (uint64_t[]){frames, CLIP_H, CLIP_W, 3}, pixels);
        return w;
}

/* sampled: with seed 7. */
static float *encode_plainly(
        CoderBench *b, uint64_t frames, const uint8_t *pixels, bool sampled, uint64_t *ret_n) {
        H3Rank rank = {.ops = &b->ops};
        H3VideoEncodePlan p;
        const float *tiles[64];
        float *raw, *moments, *z;
        uint32_t n_tiles;
        void *work;
        Fault f = {};

        assert_int_equal(
                h3_video_encode_plan(vae_of(b), frames, CLIP_H, CLIP_W, H3_VIDEO_TILING, &p, &f), 0);
        n_tiles = h3_video_encode_tiles(&p);
        *ret_n = (uint64_t) CHANNELS * p.tokens * (CLIP_H / 16) * (CLIP_W / 16);
        raw = malloc(p.memory.chunk);
        moments = malloc(2 * *ret_n * sizeof(float));
        z = malloc(*ret_n * sizeof(float));
        assert_true(n_tiles <= 64 && raw && moments && z);
        assert_int_equal(b->ops.context_new(1, &rank.context), 0);
        assert_int_equal(b->ops.memory_new(rank.context, p.memory.device + 1, &work), 0);
        for (uint32_t k = 0; k < p.clips; k++) {
                for (uint32_t i = 0; i < n_tiles; i++) {
                        float *out = raw + i * (p.memory.tile / sizeof(float));

                        tiles[i] = out;
                        if (h3_video_encode_tile(&rank, vae_of(b), &p, H3_PIXELS_U8, pixels, k, i, work,
                                    NULL, out, &f) < 0)
                                fail_msg("%s", f.text);
                }
                assert_int_equal(h3_video_encode_blend(vae_of(b), &p, k, tiles, moments), 0);
        }
        if (sampled)
                assert_int_equal(h3_video_latent_sample(vae_of(b), moments, *ret_n / CHANNELS, 7, z), 0);
        else
                h3_video_latent_mean(vae_of(b), moments, *ret_n / CHANNELS, z);
        b->ops.memory_free(rank.context, work);
        (void) b->ops.context_free(rank.context);
        free(raw);
        free(moments);
        return z;
}

static void encode_ranks_and_delays_same_bits(void **state) {
        CoderBench *b = *state;
        CLEANUP_FREE uint8_t *pixels = bench_bytes(PIXELS, 3);
        const WireJobOpen w = media_job(b, CLIP_FRAMES, ST_U8, pixels);
        CLEANUP_FREE float *expected = NULL;
        uint64_t n, size;

        expected = encode_plainly(b, CLIP_FRAMES, pixels, false, &n);
        for (size_t i = 0; i < ELEMENTSOF(rank_counts); i += 2) {
                CLEANUP_FREE uint8_t *z = NULL;

                bench_set_ranks(b, rank_counts[i]);
                bench_delay(b, (uint32_t) i, i > 0 ? 3000 : 0);
                z = bench_run(b, &w, &size);
                assert_memory_equal(z, expected, n * sizeof(float));
        }
}

/* The noise of a clip is its part of what is drawn for the whole latent. */
static void encode_sampled_clip_by_clip_same_bits(void **state) {
        CoderBench *b = *state;
        CLEANUP_FREE uint8_t *pixels = bench_bytes(PIXELS, 3);
        WireJobOpen w = media_job(b, CLIP_FRAMES, ST_U8, pixels);
        CLEANUP_FREE float *expected = NULL;
        CLEANUP(job_unrefp) Job *j = NULL;
        uint64_t n;

        expected = encode_plainly(b, CLIP_FRAMES, pixels, true, &n);
        w.posterior = WIRE_POSTERIOR_SAMPLED;
        w.seed = 7;
        j = bench_open(b, &w);
        assert_int_equal(j->steps, 2);
        bench_step(b, j);

        /* and over a death in between */
        j = job_unref(j);
        w.flags = WIRE_JOB_RESUME;
        j = bench_open(b, &w);
        assert_int_equal(j->committed, 1);
        bench_finish(b, j);
        assert_memory_equal(b->output + j->coder->outputs[0].tensor.offset, expected, n * sizeof(float));
}

static void encode_f32_pixels_are_those_of_u8(void **state) {
        CoderBench *b = *state;
        CLEANUP_FREE uint8_t *pixels = bench_bytes(PIXELS, 3);
        CLEANUP_FREE float *floats = malloc(PIXELS * sizeof(float)), *expected = NULL;
        CLEANUP_FREE uint8_t *z = NULL;
        uint64_t n, size;
        WireJobOpen w;

        assert_non_null(floats);
        for (uint64_t i = 0; i < PIXELS; i++)
                floats[i] = (float) pixels[i] / 255.0f;
        w = media_job(b, CLIP_FRAMES, ST_F32, floats);
        expected = encode_plainly(b, CLIP_FRAMES, pixels, false, &n);
        z = bench_run(b, &w, &size);
        assert_memory_equal(z, expected, n * sizeof(float));
}

static void encode_image_matches(void **state) {
        CoderBench *b = *state;
        CLEANUP_FREE uint8_t *pixels = bench_bytes(PIXELS / CLIP_FRAMES, 4), *z = NULL;
        const WireJobOpen w = media_job(b, 1, ST_U8, pixels);
        CLEANUP_FREE float *expected = NULL;
        uint64_t n, size;

        expected = encode_plainly(b, 1, pixels, false, &n);
        assert_int_equal(n, CHANNELS * 18 * 2);
        z = bench_run(b, &w, &size);
        assert_memory_equal(z, expected, n * sizeof(float));
}

static void encode_bad_requests_are_refused(void **state) {
        CoderBench *b = *state;
        CLEANUP_FREE float *pixels = bench_numbers(PIXELS / CLIP_FRAMES, 4);
        const WireJobOpen good = media_job(b, 1, ST_F32, pixels);
        CLEANUP(job_unrefp) Job *j = NULL;
        const float infinity = INFINITY;
        WireJobOpen w = good;
        StepResult result;
        Fault f = {};

        w.video.dtype = ST_BF16;
        bench_refuse(b, &w, FAULT_INVALID_TENSOR, "the type BF16, expected U8");
        w = good;
        w.video.shape[1] = 280;
        w.video.size = UINT64_C(280) * CLIP_W * 12;
        bench_refuse(b, &w, FAULT_INVALID_ARGUMENT, "16");
        w = good;
        w.posterior = 2;
        bench_refuse(b, &w, FAULT_INVALID_ARGUMENT, "posterior 2");
        w = good;
        w.video = (WireTensor){};
        bench_refuse(b, &w, FAULT_INVALID_TENSOR, "video");

        /* Seen when the clip is taken. */
        memcpy(b->input + good.video.offset + 4 * 77, &infinity, sizeof(infinity));
        j = bench_open(b, &good);
        assert_int_equal(bench_try_step(b, j, &result, &f), -EINVAL);
        assert_string_equal(f.name, FAULT_INVALID_TENSOR);
        assert_non_null(strstr(f.text, "video has Inf at [0, 0, 25, 2]"));
        assert_committed(b, j, 0);
}

#define TEST(function) cmocka_unit_test_setup_teardown(function, setup, teardown)

int main(void) {
        const struct CMUnitTest tests[] = {
                TEST(decode_ranks_and_delays_same_bits),
                TEST(decode_says_who_made_the_tiles),
                TEST(decode_takes_the_ranks_that_were_asked_for),
                TEST(decode_says_what_it_makes),
                TEST(decode_ring_has_every_frame_in_turn),
                TEST(decode_killed_at_every_chunk_same_bits),
                TEST(decode_resume_of_a_broken_tail_is_refused),
                TEST(decode_image_and_short_clip_match),
                TEST(decode_cancelled_in_a_tile_commits_nothing),
                TEST(decode_closed_in_a_tile_writes_nothing),
                TEST(decode_does_not_fit_says_numbers),
                TEST(decode_device_out_of_memory_can_be_tried_again),
                TEST(decode_result_not_finite_is_not_committed),
                TEST(decode_bad_requests_are_refused),
                TEST(decode_plan_only_writes_nothing),
                TEST(decode_plan_unread_is_the_same_plan),
                TEST(encode_ranks_and_delays_same_bits),
                TEST(encode_sampled_clip_by_clip_same_bits),
                TEST(encode_f32_pixels_are_those_of_u8),
                TEST(encode_image_matches),
                TEST(encode_bad_requests_are_refused),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
