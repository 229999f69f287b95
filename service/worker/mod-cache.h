/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Modulation rows of whole schedules (h3/adaln-table.h), kept between steps and jobs. Making them reads two
 * fifths of an unpruned model. Made on rank 0's thread, let go on any. */

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

#include "service/h3/adaln-table.h"
#include "service/worker/job-context.h"

#define MOD_TABLES_KEPT 4

/* Of all tables together. A timestep of the released model takes 10 MB in bf16: room for fifty steps of two
 * streams, or for two jobs of twenty with conditions. What needs much more are masks of many levels, where
 * a table would in the end be larger than the weights that it saves. */
#define MOD_TABLES_BYTES (UINT64_C(1) << 30)

typedef struct ModTable {
        atomic_uint n_ref;
        uint64_t serial;   /* of the model whose rows they are: job_model_serial() */
        MergedKey made_of; /* that model: the base, the adapters if there are any */
        uint64_t bytes;
        H3ModTable *h3;
} ModTable;

ModTable *mod_table_ref(ModTable *t);
ModTable *mod_table_unref(ModTable *t);
void mod_table_unrefp(ModTable **t);

typedef struct ModCache {
        pthread_mutex_t lock;            /* of all below */
        ModTable *kept[MOD_TABLES_KEPT]; /* newest first, counted, no gaps */
} ModCache;

#define MOD_CACHE_INIT                                                                                      \
        { .lock = PTHREAD_MUTEX_INITIALIZER }

/* Lets everything go, and is as new. */
void mod_cache_clear(ModCache *c);

/* A counted reference to a table of the model that j's steps run which covers the step, or NULL. What is
 * found becomes the newest. */
ModTable *mod_cache_find(ModCache *c, const Job *j, const H3StepInput *in);

/* Lets the oldest go until one more of so many bytes may be kept: call it before that is made, so that there
 * never are more. False: it is too large altogether, nothing went. */
bool mod_cache_make_room(ModCache *c, uint64_t bytes);

/* Takes *h3 over, made for j's model: *ret is a counted reference to it, which the cache keeps, too, unless the
 * base or one of its adapters was closed meanwhile. -ENOMEM (then it stays the caller's). */
int mod_cache_add(ModCache *c, const Job *j, uint64_t bytes, H3ModTable **h3, ModTable **ret);

/* MODEL_CLOSE, after model_table_close(): lets go what is made of this model. A step that uses it keeps it to
 * its end. */
void mod_cache_drop(ModCache *c, uint64_t serial);
