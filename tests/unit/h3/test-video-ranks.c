/* SPDX-License-Identifier: Apache-2.0 */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "service/shared/cleanup.h"
#include "tests/unit/h3/video.h"

/* One answer: any number of ranks take (chunk, tile) jobs in any order, and threads blend any rows. */

#define RANKS_MAX 8

typedef struct Pool Pool;
struct Pool {
        pthread_mutex_t lock;
        uint64_t order[64], n, next; /* jobs, shuffled */
        uint64_t seed;
        int (*job)(Pool *p, const H3Rank *rank, uint64_t job, void *work);
        uint64_t device_bytes;
        int error;
        /* of the job */
        const H3VideoVae *vae;
        const H3VideoDecodePlan *decode;
        const H3VideoEncodePlan *encode;
        const void *input;
        float **tiles;
};

static uint64_t draw(uint64_t *seed) {
        *seed = *seed * 6364136223846793005u + 1442695040888963407u;
        return *seed >> 33;
}

static bool take(Pool *p, uint64_t *ret, useconds_t *ret_delay) {
        bool more;

        assert_int_equal(pthread_mutex_lock(&p->lock), 0);
        more = p->next < p->n;
        if (more)
                *ret = p->order[p->next++];
        *ret_delay = (useconds_t) (draw(&p->seed) % 2000);
        assert_int_equal(pthread_mutex_unlock(&p->lock), 0);
        return more;
}

static void *rank_main(void *userdata) {
        Pool *p = userdata;
        useconds_t delay;
        uint64_t job;
        H3Rank rank;
        void *work;
        int r;

        assert_int_equal(pthread_mutex_lock(&p->lock), 0);
        rank = video_rank(1 + (uint32_t) (draw(&p->seed) % 3));
        assert_int_equal(pthread_mutex_unlock(&p->lock), 0);
        r = rank.ops->memory_new(rank.context, p->device_bytes, &work);
        while (r >= 0 && take(p, &job, &delay)) {
                (void) usleep(delay);
                r = p->job(p, &rank, job, work);
        }
        assert_int_equal(pthread_mutex_lock(&p->lock), 0);
        if (r < 0)
                p->error = r;
        assert_int_equal(pthread_mutex_unlock(&p->lock), 0);
        rank.ops->memory_free(rank.context, work);
        (void) rank.ops->context_free(rank.context);
        return NULL;
}

static void pool_run(Pool *p, unsigned ranks) {
        pthread_t threads[RANKS_MAX];

        assert_true(p->n <= ELEMENTSOF(p->order));
        assert_int_equal(pthread_mutex_init(&p->lock, NULL), 0);
        p->seed = ranks;
        p->next = 0;
        for (uint64_t i = 0; i < p->n; i++) {
                uint64_t at = draw(&p->seed) % (i + 1);

                p->order[i] = p->order[at];
                p->order[at] = i;
        }
        for (unsigned i = 0; i < ranks; i++)
                assert_int_equal(pthread_create(threads + i, NULL, rank_main, p), 0);
        for (unsigned i = 0; i < ranks; i++)
                assert_int_equal(pthread_join(threads[i], NULL), 0);
        assert_int_equal(p->error, 0);
        assert_int_equal(pthread_mutex_destroy(&p->lock), 0);
}

static int decode_job(Pool *p, const H3Rank *rank, uint64_t job, void *work) {
        uint32_t n = h3_video_decode_tiles(p->decode);

        return h3_video_decode_tile(rank, p->vae, p->decode, p->input, (uint32_t) (job / n),
                (uint32_t) (job % n), work, NULL, p->tiles[job], NULL);
}

static int encode_job(Pool *p, const H3Rank *rank, uint64_t job, void *work) {
        uint32_t n = h3_video_encode_tiles(p->encode);

        return h3_video_encode_tile(rank, p->vae, p->encode, H3_PIXELS_U8, p->input, (uint32_t) (job / n),
                (uint32_t) (job % n), work, NULL, p->tiles[job], NULL);
}

static float **new_tiles(uint64_t n, uint64_t bytes) {
        float **tiles = malloc(n * sizeof(*tiles));

        assert_non_null(tiles);
        for (uint64_t i = 0; i < n; i++) {
                tiles[i] = malloc(bytes);
                assert_non_null(tiles[i]);
                memset(tiles[i], 0x5a, bytes);
        }
        return tiles;
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) /* ten times slower */
static const unsigned counts[] = {1, 3};
#else
static const unsigned counts[] = {1, 2, 3, 8};
#endif

/* Bands of a chunk's rows at the same time. */
typedef struct Band {
        const H3VideoDecodePlan *plan;
        const H3VideoBlend *blend;
        H3Range rows;
        int result;
} Band;

static void *band_main(void *userdata) {
        Band *b = userdata;

        b->result = h3_video_decode_blend(b->plan, b->blend, b->rows);
        return NULL;
}

static uint8_t *blend_with_threads(const H3VideoDecodePlan *p, float **tiles, unsigned n) {
        uint64_t frame = 3ull * p->rows.length * p->cols.length;
        uint8_t *frames = malloc(p->frames * frame);
        float *tails[2] = {malloc(p->memory.tail), malloc(p->memory.tail)};

        assert_true(frames && tails[0] && tails[1]);
        for (uint32_t chunk = 0; chunk < p->chunks; chunk++) {
                const H3VideoBlend blend = {
                        .chunk = chunk,
                        .tiles = (const float *const *) tiles + (uint64_t) chunk * h3_video_decode_tiles(p),
                        .tail_before = tails[chunk % 2],
                        .tail_after = tails[(chunk + 1) % 2],
                        .pixels = H3_PIXELS_U8,
                        .frames = frames + h3_video_decode_frames(p, chunk).begin * frame,
                };
                pthread_t threads[RANKS_MAX];
                Band bands[RANKS_MAX];

                for (unsigned i = 0; i < n; i++) {
                        bands[i] = (Band){p, &blend,
                                {(uint64_t) p->rows.length * i / n, (uint64_t) p->rows.length * (i + 1) / n},
                                -1};
                        assert_int_equal(pthread_create(threads + i, NULL, band_main, bands + i), 0);
                }
                for (unsigned i = 0; i < n; i++) {
                        assert_int_equal(pthread_join(threads[i], NULL), 0);
                        assert_int_equal(bands[i].result, 0);
                }
        }
        free(tails[0]);
        free(tails[1]);
        return frames;
}

static void decode_any_ranks_same_bits(void **state) {
        CLEANUP(video_freep) Video *v = video_open();
        CLEANUP_FREE float *z = malloc(24 * 12 * 30 * sizeof(float));
        CLEANUP_FREE uint8_t *first = NULL;
        H3VideoDecodePlan p;
        uint64_t seed = 9, jobs, frame_bytes;
        float **reference;

        for (unsigned i = 0; i < 24 * 12 * 30; i++)
                z[i] = (float) draw(&seed) * 0x1p-29f - 2;
        assert_int_equal(h3_video_decode_plan(v->vae, 12, 5, 6, (H3VideoTiling){64, 16}, &p, NULL), 0);
        jobs = h3_video_decode_jobs(&p);
        assert_int_equal(jobs, 8);
        frame_bytes = 3ull * p.rows.length * p.cols.length;
        reference = video_decode_all(v->vae, &p, z, NULL);

        for (size_t i = 0; i < ELEMENTSOF(counts); i++) {
                Pool pool = {.n = jobs,
                        .job = decode_job,
                        .device_bytes = p.memory.device,
                        .vae = v->vae,
                        .decode = &p,
                        .input = z,
                        .tiles = new_tiles(jobs, p.memory.tile)};
                CLEANUP_FREE uint8_t *frames = NULL;

                pool_run(&pool, counts[i]);
                for (uint64_t k = 0; k < jobs; k++)
                        assert_memory_equal(pool.tiles[k], reference[k], p.memory.tile);
                frames = blend_with_threads(&p, pool.tiles, counts[i]);
                if (first)
                        assert_memory_equal(frames, first, p.frames * frame_bytes);
                else
                        first = STEAL_PTR(frames);
                video_tiles_free(pool.tiles, jobs);
        }
        video_tiles_free(reference, jobs);
}

/* So many tiles at a time as one, from any tile on, in both types. */
static void decode_any_batch_same_bits(void **state) {
        static const LkType types[] = {LK_F32, LK_F16};
        static const uint32_t batches[] = {1, 2, 3, 4};
        CLEANUP(video_freep) Video *v = video_open();
        CLEANUP_FREE float *z = malloc(24 * 7 * 30 * sizeof(float));
        uint64_t seed = 11;

        for (unsigned i = 0; i < 24 * 7 * 30; i++)
                z[i] = (float) draw(&seed) * 0x1p-29f - 2;
        for (size_t i = 0; i < ELEMENTSOF(types) * ELEMENTSOF(batches); i++) {
                uint32_t batch = batches[i / 2];
                H3VideoDecodePlan one, p;
                CLEANUP_FREE uint8_t *out = NULL;
                H3Rank rank = video_rank(2);
                float **reference;
                void *work;
                Fault f = {};

                assert_int_equal(h3_video_decode_plan(v->vae, 7, 5, 6, (H3VideoTiling){64, 16}, &p, NULL), 0);
                assert_int_equal(h3_video_decode_plan_as(v->vae, types[i % 2], 1, &p, NULL), 0);
                one = p;
                assert_int_equal(h3_video_decode_plan_as(v->vae, types[i % 2], batch, &p, NULL), 0);
                assert_int_equal(h3_video_decode_jobs(&p), 4);
                reference = video_decode_all(v->vae, &one, z, NULL);
                out = malloc(4 * p.memory.tile);
                assert_non_null(out);
                assert_int_equal(rank.ops->memory_new(rank.context, p.memory.device, &work), 0);
                for (uint32_t tile = 0; tile < 4; tile += batch) {
                        uint32_t n = 4 - tile < batch ? 4 - tile : batch;

                        if (h3_video_decode_batch(
                                    &rank, v->vae, &p, z, 0, tile, n, work, NULL, (float *) (out + tile * p.memory.tile), &f) < 0)
                                fail_msg("%s", f.text);
                }
                for (uint32_t tile = 0; tile < 4; tile++)
                        assert_memory_equal(out + tile * p.memory.tile, reference[tile], p.memory.tile);
                assert_int_equal(h3_video_decode_batch(&rank, v->vae, &p, z, 0, 0, batch + 1, work, NULL, (float *) out, &f), -EINVAL);
                assert_int_equal(h3_video_decode_batch(&rank, v->vae, &p, z, 0, 0, 0, work, NULL, (float *) out, &f), -EINVAL);
                rank.ops->memory_free(rank.context, work);
                (void) rank.ops->context_free(rank.context);
                video_tiles_free(reference, 4);
        }
}

static void encode_any_ranks_same_bits(void **state) {
        CLEANUP(video_freep) Video *v = video_open();
        CLEANUP_FREE uint8_t *rgb = malloc(22 * 32 * 80 * 3);
        CLEANUP_FREE float *first = NULL;
        uint64_t seed = 10, jobs;
        H3VideoEncodePlan p;

        for (unsigned i = 0; i < 22 * 32 * 80 * 3; i++)
                rgb[i] = (uint8_t) draw(&seed);
        assert_int_equal(h3_video_encode_plan(v->vae, 22, 32, 80, (H3VideoTiling){64, 16}, &p, NULL), 0);
        jobs = h3_video_encode_jobs(&p);
        assert_int_equal(jobs, 4);

        for (size_t i = 0; i < ELEMENTSOF(counts); i++) {
                Pool pool = {.n = jobs,
                        .job = encode_job,
                        .device_bytes = p.memory.device,
                        .vae = v->vae,
                        .encode = &p,
                        .input = rgb,
                        .tiles = new_tiles(jobs, p.memory.tile)};
                CLEANUP_FREE float *moments = NULL;

                pool_run(&pool, counts[i]);
                moments = video_moments_all(v->vae, &p, pool.tiles);
                if (first)
                        assert_memory_equal(moments, first, 48ull * p.tokens * 2 * 5 * sizeof(float));
                else
                        first = STEAL_PTR(moments);
                video_tiles_free(pool.tiles, jobs);
        }
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(decode_any_ranks_same_bits),
                cmocka_unit_test(decode_any_batch_same_bits),
                cmocka_unit_test(encode_any_ranks_same_bits),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
