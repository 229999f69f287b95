/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Tiles of a film's chunks (or clips), taken by the ranks one by one from a counter: whoever is free takes
 * the next, and no order of theirs changes a bit, since a tile has its own place for what it makes.
 *
 * A chunk's tiles seldom are a multiple of the ranks. A rank that finds the chunk's tiles all taken while
 * others still work takes one of the next chunk's (one: so all come to their end at about the same time),
 * which is done then when its step comes. Hence two chunks' places, by chunk % 2.
 *
 * Small tiles are taken several at a time where a device wants them so; as many takes as make the ranks' shares even. */

#include <pthread.h>
#include <stdatomic.h>
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
        bool quiet;       /* no PROGRESS */
        uint32_t blocks_before, blocks_after; /* of the step, beside these tiles: for PROGRESS */

        uint32_t ahead, ahead_chunk; /* so many tiles of this chunk are done already */

        /* of the step that runs */
        Job *job;
        StepRunner *runner;
        uint32_t chunk, together; /* together: tiles that are taken at a time */
        uint64_t deadline_usec;
        atomic_uint next, next_ahead, done;
        bool only_ahead; /* it is tile_pool_ahead() */
        atomic_bool failed;
        pthread_mutex_t lock; /* of fault and error */
        int error;
        Fault fault;
};

void tile_pool_init(TilePool *p, uint32_t chunks, uint32_t tiles, TileFunc func, void *userdata);
void tile_pool_done(TilePool *p);

/* How many of a chunk's tiles are made together where a device takes up to `batch` (0: 1): as many turns as those need, or more where
 * ranks would be left without one; then what each turn takes. */
uint32_t tile_pool_together(uint32_t tiles, uint32_t batch, uint32_t ranks);

/* Makes all tiles of the chunk, on the ranks 0 to `ranks` - 1, with PROGRESS. On the steps' thread; chunks
 * come one after the other, or the same one again after a failure. -ECANCELED: the job was cancelled; else
 * the first error, with f: then nothing of this and the next chunk counts. */
int tile_pool_run(
        TilePool *p, StepRunner *s, RankGroup *g, Job *j, uint32_t chunk, uint32_t ranks, Fault *f);

/* Behind tile_pool_run() of a chunk, while the host is busy with what that made: every rank makes tiles of the next chunk once. A
 * failure is forgotten with them: it comes again in the chunk's own step. */
void tile_pool_ahead(TilePool *p, StepRunner *s, RankGroup *g, Job *j, uint32_t ranks);
