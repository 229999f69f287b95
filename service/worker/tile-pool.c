/* SPDX-License-Identifier: Apache-2.0 */
#include "service/worker/tile-pool.h"

#include <errno.h>
#include <inttypes.h>

void tile_pool_init(TilePool *p, uint32_t chunks, uint32_t tiles, TileFunc func, void *userdata) {
        *p = (TilePool){.chunks = chunks, .tiles = tiles, .func = func, .userdata = userdata};
        (void) pthread_mutex_init(&p->lock, NULL);
}

void tile_pool_done(TilePool *p) {
        (void) pthread_mutex_destroy(&p->lock);
}

static void fail(TilePool *p, int error, const Fault *f) {
        (void) pthread_mutex_lock(&p->lock);
        if (p->error == 0) {
                p->error = error;
                p->fault = *f;
        }
        (void) pthread_mutex_unlock(&p->lock);
        p->failed = true;
}

/* Tiles from `tile` on, as many as are made together. */
static int make_some(TilePool *p, TilePlace *at, uint32_t chunk, uint32_t tile) {
        const StepRunner *s = p->runner;
        Fault f = {};
        int r;

        if (p->job->cancelled)
                return -ECANCELED;
        at->chunk = chunk;
        at->tile = tile;
        at->n = p->tiles - tile < p->together ? p->tiles - tile : p->together;
        for (uint32_t i = 0; s->tile_hook && i < at->n; i++)
                s->tile_hook(s->tile_userdata, at->rank, chunk, tile + i);
        r = p->func(p->userdata, at, &f);
        if (r < 0)
                fail(p, r, &f);
        return r;
}

static int make_tiles(TilePool *p, TilePlace *at) {
        uint32_t tile, done;
        int r;

        while (!p->failed && !p->only_ahead && (tile = atomic_fetch_add(&p->next, p->together)) < p->tiles) {
                r = make_some(p, at, p->chunk, tile);
                if (r < 0)
                        return r;
                done = atomic_fetch_add(&p->done, at->n) + at->n;
                if (!p->quiet)
                        step_tell(p->runner, p->job, p->chunk, p->blocks_before + done,
                                p->blocks_before + p->tiles + p->blocks_after);
        }
        if (p->failed || (p->done >= p->tiles && !p->only_ahead) || p->chunk + 1 >= p->chunks)
                return 0;
        tile = atomic_fetch_add(&p->next_ahead, p->together);
        return tile < p->tiles ? make_some(p, at, p->chunk + 1, tile) : 0;
}

static int work(void *userdata, uint32_t rank, LkContext *context) {
        TilePool *p = userdata;
        const LkOps *ops = p->runner->backend->ops;
        TilePlace at = {.rank = rank, .context = context};
        H3Rank on = {};
        int r;

        r = residency_begin(&p->runner->residency, rank, H3_PASS_CODE, &on);
        if (r < 0) {
                fail(p, r, &(Fault){});
                return r;
        }
        at.weights = on.weights;
        if (p->memory > 0) {
                r = ops->memory_new(context, p->memory, &at.memory);
                if (r < 0) {
                        fail(p, r, &(Fault){});
                        return r;
                }
        }
        r = make_tiles(p, &at);
        ops->memory_free(context, at.memory);
        return r;
}

static void stuck(void *userdata, uint32_t rank) {
        TilePool *p = userdata;
        Fault f = {};

        (void) fault_set(&f, -ETIMEDOUT, FAULT_INTERNAL, "Rank %" PRIu32 " did not answer in %" PRIu64 " s.",
                rank, (p->deadline_usec + 999999) / 1000000);
        p->runner->on_stuck(p->runner->userdata, p->job, p->chunk, &f);
}

static int run(TilePool *p, RankGroup *g, uint32_t ranks) {
        const RankOrder order = {.ranks = UINT64_MAX >> (64 - ranks),
                .work = work,
                .userdata = p,
                .deadline_usec = p->deadline_usec,
                .stuck = stuck};

        p->failed = false;
        p->error = 0;
        return rank_group_run(g, &order);
}

static void took_ahead(TilePool *p) {
        p->ahead = p->next_ahead < p->tiles ? p->next_ahead : p->tiles;
        p->ahead_chunk = p->chunk + 1;
}

uint32_t tile_pool_together(uint32_t tiles, uint32_t batch, uint32_t ranks) {
        uint32_t turns = batch > 1 ? (tiles + batch - 1) / batch : tiles;

        turns = (turns + ranks - 1) / ranks * ranks;
        return turns < tiles ? (tiles + turns - 1) / turns : 1;
}

int tile_pool_run(
        TilePool *p, StepRunner *s, RankGroup *g, Job *j, uint32_t chunk, uint32_t ranks, Fault *f) {
        int r;

        p->deadline_usec =
                s->deadline_usec > 0 ? s->deadline_usec : split_deadline(s->backend->ops, p->row_bytes);
        p->runner = s;
        p->job = j;
        p->chunk = chunk;
        p->together = tile_pool_together(p->tiles, p->batch, ranks);
        p->next = p->done = p->ahead_chunk == chunk ? p->ahead : 0;
        p->ahead = 0;
        p->next_ahead = 0;

        r = run(p, g, ranks);
        if (p->error < 0) {
                *f = p->fault;
                return p->error;
        }
        if (r < 0) /* cancelled between two tiles */
                return r;
        took_ahead(p);
        return 0;
}

void tile_pool_ahead(TilePool *p, StepRunner *s, RankGroup *g, Job *j, uint32_t ranks) {
        if (p->chunk + 1 >= p->chunks || p->ahead >= p->tiles)
                return;

        p->runner = s;
        p->job = j;
        p->next_ahead = p->ahead;
        p->only_ahead = true;
        if (run(p, g, ranks) >= 0 && p->error == 0)
                took_ahead(p);
        p->only_ahead = false;
}
