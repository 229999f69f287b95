/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* A session's two arenas, mapped. Counted: a job holds its session's arenas, so that ARENA_CLOSE never pulls
 * memory from under a running step. */

#include <stdatomic.h>
#include <stdbool.h>

#include "service/shared/wire.h"

typedef struct Arena {
        void *map; /* input: PROT_READ, written by a hostile client at any time; output: read-write, written
                      by us alone */
        uint64_t size;
        bool given; /* an ARENA message came, good or not */
} Arena;

typedef struct ArenaPair {
        atomic_uint n_ref;
        uint64_t session;
        Arena input, output;
        Fault fault; /* the first arena that could not be mapped, and why: JOB_OPEN answers with it */
} ArenaPair;

int arena_pair_new(uint64_t session, ArenaPair **ret);
ArenaPair *arena_pair_ref(ArenaPair *a);
ArenaPair *arena_pair_unref(ArenaPair *a);

/* Maps one arena. A descriptor that does not hold what the message says, or a map that fails, is remembered
 * in a->fault (0); -EPROTO: the message breaks the protocol (kind unknown, or given twice). fd stays the
 * caller's. */
int arena_pair_add(ArenaPair *a, const WireArena *w, int fd, Fault *f);
