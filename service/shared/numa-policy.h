/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* NUMA placement of shared memory. Reports what happened, never fails a load. */

#include <stdbool.h>
#include <stdint.h>

#include "service/shared/fault.h"

typedef enum NumaKind {
        NUMA_DEFAULT,    /* leave it to the kernel */
        NUMA_INTERLEAVE, /* over all nodes with memory */
        NUMA_BIND,
        NUMA_PREFER,     /* another node where this one is full; of no setting */
} NumaKind;

typedef struct NumaPolicy {
        NumaKind kind;
        int node; /* NUMA_BIND, NUMA_PREFER */
} NumaPolicy;

/* "auto" (interleave if there is more than one node), "interleave", "bind:N", "default". -EINVAL. */
int numa_policy_parse(const char *s, NumaPolicy *ret);
const char *numa_policy_format(const NumaPolicy *p, char buf[static 24]);

/* Whether the machine has what it names: InvalidArgument, with the nodes that there are, for a node without memory or one that this process
 * may not use. */
int numa_policy_check(const NumaPolicy *p, Fault *f);

/* Applies the policy to a mapping of a memfd before it is populated (the policy sticks to the inode). Returns 0 or a
 * negative errno that the caller shows in the model's properties and otherwise ignores. */
int numa_policy_apply(const NumaPolicy *p, void *map, uint64_t size);

/* Number of nodes with memory, >= 1. */
unsigned numa_node_count(void);

/* Where the populated pages of a mapping lie: bytes per node, estimated from up to `samples` pages, evenly spaced, by
 * move_pages; ret_bytes[n] for node n < n_max, other nodes are not counted. 1 if at least half of the mapping is huge
 * pages (smaps), 0 if not, or a negative errno. Only pages that this process has touched are seen. Takes time in
 * proportion to size: not on the event loop. */
int numa_placement(const void *map, uint64_t size, unsigned samples, uint64_t *ret_bytes, unsigned n_max);
