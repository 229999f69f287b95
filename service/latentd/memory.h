/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* How much memory may still be taken. There is no ENOMEM past a cgroup limit, the kernel kills: so ask
 * first. */

#include <stdint.h>

#include "service/latentd/config.h"
#include "service/shared/fault.h"

typedef struct MemoryHeadroom {
        uint64_t bytes; /* may be taken now, reserve already subtracted */
        uint64_t missing; /* so much less should be taken for reserve and CacheRamMax to hold; 0: they do */
        char limit[96]; /* what limits it: "MemAvailable", "CacheRamMax", "cgroup /a/b" */
} MemoryHeadroom;

/* Minimum over MemAvailable and, for every cgroup v2 ancestor, its limit (memory.max, memory.high) minus
 * what it holds (memory.current without memory.stat's inactive_file, which the kernel gives up before it
 * kills), minus CacheRamReserve. CacheRamMax - used replaces the MemAvailable term and, being a size that
 * the administrator chose, has no reserve taken off. Never below 0. root: "" for the system, else the root
 * of a made tree with proc/meminfo, proc/self/cgroup and sys/fs/cgroup (tests). used: bytes the cache and
 * the arenas hold already. Reads only files of procfs and cgroupfs: short enough for the loop. -ENODATA: no
 * MemAvailable. */
int memory_headroom(const Config *c, const char *root, uint64_t used, MemoryHeadroom *ret);

/* Our own cgroup v2 path below root's sys/fs/cgroup ("/a/b"); "" for the root group, for one outside of our cgroup
 * namespace and if there is none. */
void memory_own_group(const char *root, char *ret, size_t size);
