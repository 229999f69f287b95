/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Models with LoRA adapters merged into them (h3/lora.h), kept between jobs: a merge reads and writes every
 * matrix that the adapters change. The newest are kept, and each as long as a job uses it. Made on one rank's
 * thread, let go on any.
 *
 * With a device, too, merged matrices are host memory that is fetched like the base's, not made while a part is fetched. The bits
 * are defined by the merge's rounding points (h3/lora-merge.c): expanded, sums in f32 one adapter after the other, rounded or
 * quantised once. A device could only give the same from the expanded matrix, three f32 copies of a piece of it and an
 * operation for the sums that the table does not have; and what streams would be merged anew in every step, on the queue that has to
 * stay ahead of the computing. The price is host memory: of the changed matrices, once for all jobs and ranks, counted
 * (merged_model_bytes(), JOB_OPEN's private_max) and gone with a TRIM. */

#include <pthread.h>
#include <stdatomic.h>

#include "service/h3/lora.h"
#include "service/worker/model-table.h"

#define MERGED_KEPT 2

/* What a merged model is made of: equal keys make equal bits. */
typedef struct MergedKey {
        uint64_t base; /* serial */
        uint64_t loras[WIRE_LORAS_MAX];
        double strengths[WIRE_LORAS_MAX];
        uint32_t n_loras;
        H3Compute compute;
} MergedKey;

/* Whether this model is the base or one of the adapters. */
bool merged_key_has(const MergedKey *k, uint64_t serial);

typedef struct MergedModel {
        atomic_uint n_ref;
        MergedKey key;
        uint64_t serial;  /* of no other model */
        ModelEntry *base; /* counted: the unchanged matrices are its views */
        H3Model *h3;
        H3LoraReport *report;
        Ranges registered; /* of its own matrices, as of a Region */
        _Atomic uint64_t registered_bytes;
} MergedModel;

/* Of the matrices of all merged models of this process, kept or in use. Any thread. */
uint64_t merged_model_bytes(void);

MergedModel *merged_model_ref(MergedModel *m);
MergedModel *merged_model_unref(MergedModel *m);

typedef struct MergedCache {
        pthread_mutex_t lock;           /* of all below */
        MergedModel *kept[MERGED_KEPT]; /* newest first, counted */
        uint64_t last_serial;
} MergedCache;

#define MERGED_CACHE_INIT                                                                                   \
        { .lock = PTHREAD_MUTEX_INITIALIZER }

/* Lets everything go, and is as new. */
void merged_cache_clear(MergedCache *c);

/* A counted reference, or NULL. What is found becomes the newest. */
MergedModel *merged_cache_find(MergedCache *c, const MergedKey *key);

/* Takes h3 and report over: *ret is a counted reference to the new model, which the cache keeps, too, unless
 * the base or one of loras[key->n_loras] was closed meanwhile. -ENOMEM (then they stay the caller's). */
int merged_cache_add(MergedCache *c, const MergedKey *key, ModelEntry *base, ModelEntry *const *loras,
        H3Model **h3, H3LoraReport **report, MergedModel **ret);

/* MODEL_CLOSE, after model_table_close(): lets go what is made with this model. */
void merged_cache_drop(MergedCache *c, uint64_t serial);
