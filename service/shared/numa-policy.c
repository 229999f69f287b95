/* SPDX-License-Identifier: Apache-2.0 */
#include "service/shared/numa-policy.h"

#include <errno.h>
#include <inttypes.h>
#include <numaif.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "service/shared/cleanup.h"

#define NODES_MAX 1024
#define BITS (8 * sizeof(unsigned long))
#define BATCH 256

typedef struct NodeSet {
        unsigned long words[NODES_MAX / BITS];
} NodeSet;

static void node_set_add(NodeSet *s, unsigned node) {
        s->words[node / BITS] |= 1UL << node % BITS;
}

static unsigned node_set_count(const NodeSet *s) {
        unsigned n = 0;

        for (size_t i = 0; i < ELEMENTSOF(s->words); i++)
                n += (unsigned) __builtin_popcountl(s->words[i]);

        return n;
}

/* "0-1,4" as in sysfs. False if there is no such list. */
static bool read_nodes(const char *path, NodeSet *ret) {
        CLEANUP_FREE char *line = NULL;
        NodeSet s = {};
        size_t room = 0;
        ssize_t n;
        FILE *f;

        f = fopen(path, "re");
        if (!f)
                return false;
        n = getline(&line, &room, f);
        (void) fclose(f);
        if (n <= 0)
                return false;

        for (char *p = line; *p >= '0' && *p <= '9';) {
                unsigned long first = strtoul(p, &p, 10), last = first;

                if (*p == '-')
                        last = strtoul(p + 1, &p, 10);
                for (unsigned long node = first; node <= last && node < NODES_MAX; node++)
                        node_set_add(&s, (unsigned) node);
                if (*p == ',')
                        p++;
        }

        *ret = s;
        return true;
}

/* Nodes that have memory and that this process may use. Node 0 where the kernel knows no nodes. */
static void usable_nodes(NodeSet *ret) {
        NodeSet allowed = {}, s;

        if (!read_nodes("/sys/devices/system/node/has_memory", &s))
                s = (NodeSet){{1}};

        if (get_mempolicy(NULL, allowed.words, NODES_MAX, NULL, MPOL_F_MEMS_ALLOWED) == 0)
                for (size_t i = 0; i < ELEMENTSOF(s.words); i++)
                        s.words[i] &= allowed.words[i];

        if (node_set_count(&s) == 0)
                s = (NodeSet){{1}};
        *ret = s;
}

unsigned numa_node_count(void) {
        NodeSet s;

        usable_nodes(&s);
        return node_set_count(&s);
}

int numa_policy_parse(const char *s, NumaPolicy *ret) {
        NumaPolicy p = {};
        const char *digits;
        int node = 0;

        if (strcmp(s, "auto") == 0)
                p.kind = numa_node_count() > 1 ? NUMA_INTERLEAVE : NUMA_DEFAULT;
        else if (strcmp(s, "interleave") == 0)
                p.kind = NUMA_INTERLEAVE;
        else if (strncmp(s, "bind:", 5) == 0) {
                for (digits = s + 5; *digits >= '0' && *digits <= '9' && node < NODES_MAX; digits++)
                        node = node * 10 + (*digits - '0');
                if (digits == s + 5 || *digits != '\0' || node >= NODES_MAX)
                        return -EINVAL;
                p = (NumaPolicy){NUMA_BIND, node};
        } else if (strcmp(s, "default") != 0)
                return -EINVAL;

        *ret = p;
        return 0;
}

static bool node_set_has(const NodeSet *s, unsigned node) {
        return s->words[node / BITS] >> node % BITS & 1;
}

/* "0-1,4" */
static void node_set_format(const NodeSet *s, char *ret, size_t size) {
        size_t n = 0;

        ret[0] = '\0';
        for (unsigned first = 0, last; first < NODES_MAX && n < size; first = last + 1) {
                last = first;
                if (!node_set_has(s, first))
                        continue;
                while (last + 1 < NODES_MAX && node_set_has(s, last + 1))
                        last++;
                n += (size_t) snprintf(ret + n, size - n, first < last ? "%s%u-%u" : "%s%u", n > 0 ? "," : "", first, last);
        }
}

int numa_policy_check(const NumaPolicy *p, Fault *f) {
        char list[128];
        NodeSet s;

        if (p->kind != NUMA_BIND)
                return 0;

        usable_nodes(&s);
        if (p->node >= 0 && p->node < NODES_MAX && node_set_has(&s, (unsigned) p->node))
                return 0;

        node_set_format(&s, list, sizeof(list));
        return fault_set(f, -ENOENT, FAULT_INVALID_ARGUMENT,
                "bind:%d: this machine has no NUMA node %d with memory for the service (nodes: %s)", p->node, p->node, list);
}

const char *numa_policy_format(const NumaPolicy *p, char buf[static 24]) {
        switch (p->kind) {
        case NUMA_INTERLEAVE:
                return strcpy(buf, "interleave");
        case NUMA_BIND:
                (void) snprintf(buf, 24, "bind:%d", p->node);
                return buf;
        default:
                return strcpy(buf, "default");
        }
}

int numa_policy_apply(const NumaPolicy *p, void *map, uint64_t size) {
        NodeSet s = {};
        int mode;

        switch (p->kind) {
        case NUMA_INTERLEAVE:
                usable_nodes(&s);
                if (node_set_count(&s) == 1) /* nothing to spread over, also where the kernel has no mbind */
                        return 0;
                mode = MPOL_INTERLEAVE;
                break;
        case NUMA_BIND:
                if (p->node < 0 || p->node >= NODES_MAX)
                        return -EINVAL;
                node_set_add(&s, (unsigned) p->node);
                mode = MPOL_BIND;
                break;
        case NUMA_PREFER:
                if (p->node < 0 || p->node >= NODES_MAX)
                        return -EINVAL;
                node_set_add(&s, (unsigned) p->node);
                mode = MPOL_PREFERRED;
                break;
        default:
                return 0;
        }

        /* The kernel reads one bit less than it is told. */
        return mbind(map, (size_t) size, mode, s.words, NODES_MAX + 1, 0) < 0 ? -errno : 0;
}

/* True if at least half of [map, map + size) is mapped by huge pages. */
static bool is_huge(const void *map, uint64_t size) {
        uint64_t begin = (uintptr_t) map, end = begin + size, from, to, kib, overlap = 0, huge = 0;
        CLEANUP_FREE char *line = NULL;
        size_t room = 0;
        char key[32];
        FILE *f;

        f = fopen("/proc/self/smaps", "re");
        if (!f)
                return false;

        while (getline(&line, &room, f) > 0) {
                if (sscanf(line, "%" SCNx64 "-%" SCNx64 " ", &from, &to) == 2) {
                        from = from > begin ? from : begin;
                        to = to < end ? to : end;
                        overlap = from < to ? to - from : 0;
                } else if (overlap > 0 && sscanf(line, "%31[A-Za-z]: %" SCNu64 " kB", key, &kib) == 2 &&
                           (strcmp(key, "ShmemPmdMapped") == 0 || strcmp(key, "AnonHugePages") == 0))
                        huge += kib * 1024 < overlap ? kib * 1024 : overlap;
        }

        (void) fclose(f);
        return huge >= size - huge;
}

int numa_placement(const void *map, uint64_t size, unsigned samples, uint64_t *ret_bytes, unsigned n_max) {
        uint64_t page = (uint64_t) sysconf(_SC_PAGESIZE), pages = size / page + (size % page > 0), count;
        CLEANUP_FREE uint64_t *hits = NULL;

        if (size == 0 || samples == 0 || (uintptr_t) map % page != 0)
                return -EINVAL;

        hits = calloc(n_max > 0 ? n_max : 1, sizeof(*hits));
        if (!hits)
                return -ENOMEM;

        count = samples < pages ? samples : pages;
        for (uint64_t done = 0; done < count;) {
                uint64_t n = count - done < BATCH ? count - done : BATCH;
                void *where[BATCH];
                int status[BATCH];

                for (uint64_t i = 0; i < n; i++)
                        where[i] = (char *) map +
                                   (uint64_t) ((unsigned __int128) (done + i) * pages / count) * page;
                if (move_pages(0, (unsigned long) n, where, NULL, status, 0) < 0)
                        return -errno;
                for (uint64_t i = 0; i < n; i++)
                        if (status[i] >= 0 && (unsigned) status[i] < n_max)
                                hits[status[i]]++;
                done += n;
        }

        for (unsigned i = 0; i < n_max; i++)
                ret_bytes[i] = (uint64_t) ((unsigned __int128) size * hits[i] / count);

        return is_huge(map, size);
}
