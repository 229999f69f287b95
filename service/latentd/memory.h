/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* How much memory may still be taken. There is no ENOMEM past a cgroup limit, the kernel kills: so ask first. */

#include <stdint.h>

#include "service/latentd/config.h"
#include "service/shared/fault.h"

typedef struct MemoryHeadroom {
        uint64_t bytes;    /* may be taken now, reserve already subtracted */
        char limit[96];    /* what limits it: "MemAvailable", "CacheRamMax", "cgroup /a/b" */
} MemoryHeadroom;

/* Minimum over MemAvailable (or CacheRamMax - used, which replaces it) and max - current of every cgroup v2 ancestor, minus
 * CacheRamReserve. root: "" for the system, else the root of a made tree with proc/meminfo, proc/self/cgroup and sys/fs/cgroup (tests).
 * used: bytes the cache and the arenas hold already. */
int memory_headroom(const Config *c, const char *root, uint64_t used, MemoryHeadroom *ret);
