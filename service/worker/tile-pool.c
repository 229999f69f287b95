/* SPDX-License-Identifier: Apache-2.0 */
#include "service/worker/tile-pool.h"

#include <errno.h>
#include <inttypes.h>

#include "service/shared/clock.h"

#define PROGRESS_INTERVAL_USEC UINT64_C(20000)
#define DEADLINE_USEC UINT64_C(20000000)

void tile_pool_init(TilePool *p, uint32_t chunks, uint32_t tiles, TileFunc func, void *userdata) {
        *p = (TilePool){.chunks = chunks, .tiles = tiles, .func = func, .userdata = userdata, .deadline_usec = DEADLINE_USEC};
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

/* Any rank tells how far all are; of several at once one does. */
static void tell(TilePool *p, uint32_t done) {
        uint64_t now = clock_usec(), last = p->progress_usec;
        WireMessage m;

        if (now - last < PROGRESS_INTERVAL_USEC || !atomic_compare_exchange_strong(&p->progress_usec, &last, now))
                return;
        wire_init(&m, WIRE_PROGRESS, p->job->epoch, p->job->id, p->chunk);
        m.progress.block = p->blocks_before + done;
        m.progress.blocks = p->blocks_before + p->tiles + p->blocks_after;
        link_offer(p->runner->link, &m);
}

static int make_tile(TilePool *p, uint32_t rank, LkContext *context, uint32_t chunk, uint32_t tile) {
        const StepRunner *s = p->runner;
        Fault f = {};
        int r;

        if (p->job->cancelled)
                return -ECANCELED;
        if (s->tile_hook)
                s->tile_hook(s->tile_userdata, rank, chunk, tile);
        r = p->func(p->userdata, rank, context, chunk, tile, &f);
        if (r < 0)
                fail(p, r, &f);
        return r;
}

static int work(void *userdata, uint32_t rank, LkContext *context) {
        TilePool *p = userdata;
        uint32_t tile;
        int r;

        while (!p->failed && (tile = p->next++) < p->tiles) {
                r = make_tile(p, rank, context, p->chunk, tile);
                if (r < 0)
                        return r;
                tell(p, ++p->done);
        }
        if (p->failed || p->done >= p->tiles || p->chunk + 1 >= p->chunks)
                return 0;
        tile = p->next_ahead++;
        return tile < p->tiles ? make_tile(p, rank, context, p->chunk + 1, tile) : 0;
}

static void stuck(void *userdata, uint32_t rank) {
        TilePool *p = userdata;
        Fault f = {};

        (void) fault_set(&f, -ETIMEDOUT, FAULT_INTERNAL, "Rank %" PRIu32 " did not answer in %" PRIu64 " s.", rank,
                (p->deadline_usec + 999999) / 1000000);
        p->runner->on_stuck(p->runner->userdata, p->job, p->chunk, &f);
}

int tile_pool_run(TilePool *p, StepRunner *s, RankGroup *g, Job *j, uint32_t chunk, uint32_t ranks, Fault *f) {
        const RankOrder order = {
                .ranks = UINT64_MAX >> (64 - ranks),
                .work = work,
                .userdata = p,
                .deadline_usec = s->deadline_usec > 0 ? s->deadline_usec : p->deadline_usec,
                .stuck = stuck,
        };
        int r;

        p->runner = s;
        p->job = j;
        p->chunk = chunk;
        p->next = p->done = p->ahead;
        p->ahead = 0;
        p->next_ahead = 0;
        p->failed = false;
        p->error = 0;
        p->progress_usec = clock_usec();

        r = rank_group_run(g, &order);
        if (p->error < 0) {
                *f = p->fault;
                return p->error;
        }
        if (r < 0) /* cancelled between two tiles */
                return r;
        p->ahead = p->next_ahead < p->tiles ? p->next_ahead : p->tiles;
        return 0;
}
