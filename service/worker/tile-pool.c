/* SPDX-License-Identifier: Apache-2.0 */
#include "service/worker/tile-pool.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "service/shared/cleanup.h"
#include "service/shared/clock.h"

void tile_pool_init(TilePool *p, uint32_t chunks, uint32_t tiles, TileFunc func, void *userdata) {
        pthread_condattr_t attributes;

        *p = (TilePool){.chunks = chunks, .tiles = tiles, .func = func, .userdata = userdata, .current = UINT32_MAX};
        (void) pthread_mutex_init(&p->lock, NULL);
        (void) pthread_condattr_init(&attributes);
        (void) pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
        (void) pthread_cond_init(&p->changed, &attributes);
        (void) pthread_condattr_destroy(&attributes);
}

void tile_pool_done(TilePool *p) {
        (void) pthread_cond_destroy(&p->changed);
        (void) pthread_mutex_destroy(&p->lock);
}

uint32_t tile_pool_together(uint32_t tiles, uint32_t batch, uint32_t ranks) {
        uint32_t turns = batch > 1 ? (tiles + batch - 1) / batch : tiles;

        turns = (turns + ranks - 1) / ranks * ranks;
        return turns < tiles ? (tiles + turns - 1) / turns : 1;
}

/* Under the lock. Towards the film's end less and less at a time: so all come to their end at about the same time, whatever they are. */
static uint32_t next_size(const TilePool *p) {
        uint64_t left = (uint64_t) (p->chunks - p->chunk) * p->tiles - p->tile, share = (left + 2 * p->ranks - 1) / (2 * p->ranks);
        uint32_t n = p->tiles - p->tile < p->together ? p->tiles - p->tile : p->together;

        return p->ranks > 1 && share < n ? (uint32_t) share : n;
}

/* Under the lock. */
static void happened(TilePool *p) {
        p->events++;
        (void) pthread_cond_broadcast(&p->changed);
}

static void leave(TilePool *p, uint32_t rank) {
        p->active &= ~(UINT64_C(1) << rank);
        happened(p);
}

static bool is_over(const TilePool *p) {
        return p->stop || p->error < 0 || p->job->cancelled;
}

/* False: there is nothing; the rank has left, if it does not stay. */
static bool take(TilePool *p, TilePlace *at, bool stays) {
        bool found;

        (void) pthread_mutex_lock(&p->lock);
        found = !is_over(p) && p->chunk < p->end;
        if (found) {
                at->chunk = p->chunk;
                at->tile = p->tile;
                at->n = next_size(p);
                p->tile += at->n;
                if (p->tile == p->tiles) {
                        p->tile = 0;
                        p->chunk++;
                }
        } else if (!stays)
                leave(p, at->rank);
        (void) pthread_mutex_unlock(&p->lock);
        return found;
}

/* r: of the tiles, or of what comes before them. < 0: the rank leaves. */
static void finish(TilePool *p, const TilePlace *at, int r, const Fault *f) {
        (void) pthread_mutex_lock(&p->lock);
        if (r >= 0) {
                p->done[at->chunk % 2] += at->n;
                p->made[at->rank] += at->n;
                happened(p);
        } else {
                if (r != -ECANCELED && p->error == 0) {
                        p->error = r;
                        p->fault = *f;
                }
                leave(p, at->rank);
        }
        (void) pthread_mutex_unlock(&p->lock);
}

static int make(TilePool *p, const TilePlace *at, Fault *f) {
        const StepRunner *s = p->runner;

        for (uint32_t i = 0; s->tile_hook && i < at->n; i++)
                s->tile_hook(s->tile_userdata, at->rank, at->chunk, at->tile + i);
        return p->job->cancelled ? -ECANCELED : p->func(p->userdata, at, f);
}

static int complete(TilePool *p, const TilePlace *at) {
        Fault f = {};
        int r = p->complete(p->userdata, at, &f);

        finish(p, at, r, &f);
        return r;
}

/* Takes some, if there are any, then ends those that were begun before. 0: the rank has left, as after an error; 1: it goes on. */
static int turn(TilePool *p, TilePlace *at, TilePlace *begun) {
        const bool found = take(p, at, begun->n > 0);
        Fault f = {};
        int r, before;

        if (!found && begun->n == 0)
                return 0;
        r = found ? make(p, at, &f) : 0;
        before = begun->n > 0 ? complete(p, begun) : 0;
        begun->n = 0;
        if (before < 0) {
                if (found && r >= 0)
                        (void) p->complete(p->userdata, at, &f);
                return before;
        }
        if (found && (r < 0 || !p->complete))
                finish(p, at, r, &f);
        if (found && r >= 0 && p->complete) {
                *begun = *at;
                at->slot = 1 - at->slot;
        }
        return r < 0 ? r : 1;
}

static int work(void *userdata, uint32_t rank, LkContext *context) {
        TilePool *p = userdata;
        const LkOps *ops = p->runner->backend->ops;
        TilePlace at = {.rank = rank, .context = context}, begun = {};
        H3Rank on = {};
        int r;

        r = residency_begin(&p->runner->residency, rank, H3_PASS_CODE, &on);
        at.weights = on.weights;
        if (r >= 0 && p->memory > 0)
                r = ops->memory_new(context, p->memory, &at.memory);
        if (r < 0) {
                finish(p, &at, r, &(Fault){});
                return r;
        }
        do
                r = turn(p, &at, &begun);
        while (r > 0);
        ops->memory_free(context, at.memory);
        return r;
}

static void tell_stuck(TilePool *p, uint32_t rank) {
        Fault f = {};

        (void) fault_set(&f, -ETIMEDOUT, FAULT_INTERNAL, "Rank %" PRIu32 " did not answer in %" PRIu64 " s.",
                rank, (p->deadline_usec + 999999) / 1000000);
        p->runner->on_stuck(p->runner->userdata, p->job, p->current, &f);
}

static void on_stuck(void *userdata, uint32_t rank) {
        tell_stuck(userdata, rank);
}

static void on_stop(void *userdata) {
        TilePool *p = userdata;

        (void) pthread_mutex_lock(&p->lock);
        p->stop = true;
        (void) pthread_mutex_unlock(&p->lock);
}

/* The pool may be gone with its job behind this. */
static void on_ended(void *userdata) {
        TilePool *p = userdata;

        p->runs = false;
        (void) job_unref(STEAL_PTR(p->job));
}

/* As if nothing of this chunk were there. */
static void forget(TilePool *p, uint32_t chunk) {
        p->current = p->chunk = chunk;
        p->end = p->tile = 0;
        p->done[0] = p->done[1] = 0;
        p->error = 0;
        p->fault = (Fault){};
}

static void begin(TilePool *p, RankGroup *g, Job *j) {
        const RankOrder order = {.ranks = p->on,
                .work = work,
                .userdata = p,
                .deadline_usec = p->deadline_usec,
                .stuck = on_stuck,
                .stop = on_stop,
                .ended = on_ended};

        (void) rank_group_end(g); /* another's, whose job may go with it */
        p->group = g;
        p->job = job_ref(j);
        p->stop = false;
        p->active = p->on;
        p->runs = true;
        rank_group_begin(g, &order);
}

void tile_pool_allow(TilePool *p, uint32_t end) {
        uint64_t again = 0;

        (void) pthread_mutex_lock(&p->lock);
        if (p->end < end)
                p->end = end < p->chunks ? end : p->chunks;
        if (p->runs && !is_over(p) && p->chunk < p->end) {
                again = p->on & ~p->active;
                p->active |= again;
        }
        (void) pthread_mutex_unlock(&p->lock);
        if (again != 0)
                rank_group_again(p->group, again);
}

/* Under the lock. */
static int take_result(TilePool *p) {
        uint32_t *done = &p->done[p->current % 2];

        if (*done < p->tiles)
                return p->error < 0 ? p->error : -ECANCELED;
        *done = 0;
        p->current++;
        return 0;
}

void tile_pool_count(TilePool *p, uint32_t *ret_made) {
        (void) pthread_mutex_lock(&p->lock);
        memcpy(ret_made, p->made, sizeof(p->made));
        memset(p->made, 0, sizeof(p->made));
        (void) pthread_mutex_unlock(&p->lock);
}

/* Until all of the current chunk is there, or nobody is at it any more. The first rank that the others have waited for too long is
 * named, after which it is waited for without limit. */
static int wait_for_chunk(TilePool *p) {
        struct timespec until = clock_after(p->deadline_usec);
        bool told = false;
        int r;

        (void) pthread_mutex_lock(&p->lock);
        while (p->done[p->current % 2] < p->tiles && p->error == 0 && p->active != 0) {
                uint64_t seen = p->events;
                bool late = false;

                if (told || p->active == p->on)
                        (void) pthread_cond_wait(&p->changed, &p->lock);
                else
                        late = pthread_cond_timedwait(&p->changed, &p->lock, &until) == ETIMEDOUT;
                if (p->events != seen) {
                        until = clock_after(p->deadline_usec);
                        if (!p->quiet)
                                step_tell(p->runner, p->job, p->current, p->blocks_before + p->done[p->current % 2],
                                        p->blocks_before + p->tiles + p->blocks_after);
                } else if (late) {
                        uint32_t rank = (uint32_t) __builtin_ctzll(p->active);

                        told = true;
                        (void) pthread_mutex_unlock(&p->lock);
                        tell_stuck(p, rank);
                        (void) pthread_mutex_lock(&p->lock);
                }
        }
        r = take_result(p);
        (void) pthread_mutex_unlock(&p->lock);
        return r;
}

static bool can_go_on(TilePool *p, uint32_t chunk) {
        bool can;

        (void) pthread_mutex_lock(&p->lock);
        can = chunk == p->current && p->error == 0;
        (void) pthread_mutex_unlock(&p->lock);
        return can;
}

int tile_pool_run(TilePool *p, StepRunner *s, RankGroup *g, Job *j, uint32_t chunk, uint32_t end, uint64_t ranks, Fault *f) {
        int r;

        if (p->tiles == 0)
                return j->cancelled ? -ECANCELED : 0;
        if (!can_go_on(p, chunk)) {
                if (p->runs)
                        (void) rank_group_end(g);
                forget(p, chunk);
        }
        tile_pool_allow(p, end);
        if (!p->runs) {
                p->deadline_usec = s->deadline_usec > 0 ? s->deadline_usec : split_deadline(s->backend->ops, p->row_bytes);
                p->runner = s;
                p->on = ranks;
                p->ranks = (uint32_t) __builtin_popcountll(ranks);
                p->together = tile_pool_together(p->tiles, p->batch, p->ranks);
                begin(p, g, j);
        }

        r = wait_for_chunk(p);
        if (r < 0 || p->current == p->chunks)
                (void) rank_group_end(g);
        if (r < 0) {
                *f = p->fault;
                p->current = UINT32_MAX;
        }
        return r;
}
