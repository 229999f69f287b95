/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Host memory that the devices of a group copy to and from: registered with them, on the node of the rank that reads it, and kept for
 * the next step, since registering takes longer than a step may. What is a rank's is used on its thread, or while none is at work. */

#include "kernels/ops.h"
#include "service/worker/rank.h"

typedef struct StagingArea {
        const LkOps *ops;
        uint8_t *memory; /* NULL: none */
        uint64_t size;
        bool registered; /* else LkOps.copy() may not have it */
} StagingArea;

/* All zeros is an empty one. */
typedef struct Staging {
        StagingArea areas[RANKS_MAX];
        uint16_t nodes[RANKS_MAX]; /* 1 + the NUMA node of a rank's device; 0: not known */
} Staging;

/* The rank's, of at least so many bytes, whatever is in them; what was kept and is too small, or much too large, goes. Memory
 * that cannot be registered is given all the same, with a warning for the first. -ENOMEM. */
int staging_take(Staging *s, const LkOps *ops, LkContext *context, uint32_t rank, uint64_t size, StagingArea *ret);

/* No copy with it is under way any more. */
void staging_drop(Staging *s, uint32_t rank);
void staging_clear(Staging *s);

/* Forgets all of it: a device that is lost may still copy. */
void staging_abandon(Staging *s);

/* What is kept. */
uint64_t staging_bytes(const Staging *s);
