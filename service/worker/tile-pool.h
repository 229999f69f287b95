/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Tiles of a film's chunks (or clips), taken by the ranks some at a time: whoever is free takes the next, and no order
 * of theirs changes a bit, since a tile has its own place for what it makes.
 *
 * The ranks do not stop where a chunk ends, nor where its step does: while the host is busy with what they made, and while the next
 * step is still to be asked for, they go on with the chunks that have a place. Places are for two chunks, by chunk % 2. A rank that
 * finds nothing it may make comes to its end and begins anew when there is something again. */

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "service/worker/step.h"

typedef struct TilePool TilePool;

typedef struct TilePlace {
        uint32_t rank;
        LkContext *context;
        H3Weights *weights; /* of H3Rank */
        void *memory;       /* of the rank's device */
        uint32_t chunk, tile, n; /* tiles [tile, tile + n) */
        uint32_t slot;           /* 0 and 1 by turns, if the pool has a complete() */
} TilePlace;

/* Makes tiles of one chunk, on the rank's thread. f is filled on failure. */
typedef int (*TileFunc)(void *userdata, const TilePlace *at, Fault *f);

struct TilePool {
        uint32_t chunks, tiles;
        TileFunc func;
        void *userdata;
        /* set by the owner before the first run */
        uint32_t batch;   /* tiles that are made together, at most; 0: 1 */
        uint64_t memory;  /* device bytes that a rank works in; 0: none */
        double row_bytes; /* of a batch: rows times bytes of weights; how long it may take, once another rank
                             has nothing to do any more (split_deadline()) */
        TileFunc complete; /* NULL, or func only begins tiles and this waits for them: then the rank begins the next ones before it ends
                             some. What func began is ended in any case */
        bool quiet;       /* no PROGRESS */
        uint32_t blocks_before, blocks_after; /* of the step, beside these tiles: for PROGRESS */

        /* of what runs */
        Job *job; /* counted while it does */
        StepRunner *runner;
        RankGroup *group;
        uint64_t on; /* ranks that take part: bits */
        uint32_t ranks, together; /* how many; tiles that are taken at a time */
        uint64_t deadline_usec;

        pthread_mutex_t lock; /* of all below */
        pthread_cond_t changed;
        bool runs, stop;
        uint32_t current;     /* the chunk whose step comes next; UINT32_MAX: none was run, or the last one failed */
        uint32_t end;         /* chunks before it may be made */
        uint32_t chunk, tile; /* to be taken next */
        uint32_t done[2];     /* tiles of a chunk */
        uint64_t active;      /* ranks that take tiles: bits */
        uint64_t events;      /* ends of tiles and of ranks */
        uint32_t made[RANKS_MAX]; /* by each rank, since it was last asked */
        int error;
        Fault fault;
};

void tile_pool_init(TilePool *p, uint32_t chunks, uint32_t tiles, TileFunc func, void *userdata);
void tile_pool_done(TilePool *p);

/* How many of a chunk's tiles are made together where a device takes up to `batch` (0: 1): as many turns as those need, or more where
 * ranks would be left without one; then what each turn takes. */
uint32_t tile_pool_together(uint32_t tiles, uint32_t batch, uint32_t ranks);

/* Makes all tiles of the chunk, on these ranks (bits), with PROGRESS. On the steps' thread; chunks
 * come one after the other, or the same one again after a failure. `end`: chunks before it may be made, too, with this one or behind
 * it: two at a time, or this one alone. -ECANCELED: the job was cancelled; else the first error, with f: then nothing of this and the
 * next chunk counts. An error that comes behind the step is forgotten with what was made: it comes again in the next one. */
int tile_pool_run(TilePool *p, StepRunner *s, RankGroup *g, Job *j, uint32_t chunk, uint32_t end, uint64_t ranks, Fault *f);

/* What each rank has made since the last call. */
void tile_pool_count(TilePool *p, uint32_t *ret_made);

/* Behind tile_pool_run(): chunks before `end` may be made, since their places are free. */
void tile_pool_allow(TilePool *p, uint32_t end);
