/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* How fast parts of a Render, and steps, were when they last ran: what later ones are foretold by. Lives as long as the service. */

#include <stdbool.h>
#include <stdint.h>

#define PACE_ENTRIES 64

typedef struct PaceKey {
        uint64_t files;   /* a hash of a model's files: of a phase over names and sizes, of a step model_identity(); 0: no model's */
        uint32_t phase;   /* RenderPhase, or one of the caller's own */
        uint32_t compute; /* WireCompute */
        uint32_t ranks;   /* of a phase as asked for, 0: all; of a step those that it was cut over */
        uint32_t sparse;  /* SparseMethod */
} PaceKey;

typedef struct PaceEntry {
        PaceKey key;
        double usec;      /* per unit of work; 0: the entry is free */
        double attention; /* units of work for each pair of rows, which a model that is not loaded cannot tell */
        uint64_t turn;    /* when it was used last */
        bool rough;       /* of pace_add_rough() */
} PaceEntry;

/* All zeros: nothing is known. */
typedef struct PaceTable {
        PaceEntry entries[PACE_ENTRIES];
        uint64_t turns;
} PaceTable;

/* NULL: not measured. */
const PaceEntry *pace_find(PaceTable *t, const PaceKey *key);
/* A new measurement counts as much as all before it. usec that is not above 0 and finite changes nothing. The entry that was not used
 * for longest makes room. */
void pace_add(PaceTable *t, const PaceKey *key, double usec, double attention);
/* One with which other work went on, likewise: it takes the place of such a one, and gives way to the first of pace_add(). */
void pace_add_rough(PaceTable *t, const PaceKey *key, double usec);
