/* SPDX-License-Identifier: Apache-2.0 */
#include "service/latentd/memory.h"

#include <fcntl.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "service/shared/cleanup.h"

/* Reads a small file of a pseudo file system whole. Returns its length; text is NUL-terminated. */
static ssize_t read_text(const char *path, char *text, size_t size) {
        CLEANUP_CLOSE int fd = -EBADF;
        size_t n = 0;

        fd = open(path, O_RDONLY | O_CLOEXEC);
        if (fd < 0)
                return -errno;

        while (n < size - 1) {
                ssize_t k = read(fd, text + n, size - 1 - n);

                if (k < 0 && errno == EINTR)
                        continue;
                if (k < 0)
                        return -errno;
                if (k == 0)
                        break;
                n += (size_t) k;
        }

        text[n] = '\0';
        return (ssize_t) n;
}

/* The number behind `key` at the start of a line. */
static int find_number(const char *text, const char *key, uint64_t *ret) {
        size_t n = strlen(key);
        unsigned long long v;

        for (const char *line = text; line; line = strchr(line, '\n')) {
                if (*line == '\n')
                        line++;
                if (strncmp(line, key, n) == 0 && sscanf(line + n, " %llu", &v) == 1) {
                        *ret = v;
                        return 0;
                }
        }

        return -ENODATA;
}

static int memory_available(const char *root, uint64_t *ret) {
        char path[PATH_MAX], text[8192];
        uint64_t kib;
        ssize_t n;
        int r;

        (void) snprintf(path, sizeof(path), "%s/proc/meminfo", root);
        n = read_text(path, text, sizeof(text));
        if (n < 0)
                return (int) n;

        r = find_number(text, "MemAvailable:", &kib);
        if (r < 0)
                return r;

        *ret = kib > UINT64_MAX / 1024 ? UINT64_MAX : kib * 1024;
        return 0;
}

/* One number of a group's file; "max" is no limit. -ENOENT without the file (the root group, no memory
 * controller). */
static int read_group_number(const char *directory, const char *file, uint64_t *ret) {
        char path[PATH_MAX], text[64];
        unsigned long long v;
        ssize_t n;

        if (snprintf(path, sizeof(path), "%s/%s", directory, file) >= (int) sizeof(path))
                return -ENAMETOOLONG;

        n = read_text(path, text, sizeof(text));
        if (n < 0)
                return (int) n;

        if (strncmp(text, "max", 3) == 0)
                v = UINT64_MAX;
        else if (sscanf(text, "%llu", &v) != 1)
                return -EBADMSG;

        *ret = v;
        return 0;
}

static uint64_t group_reclaimable(const char *directory) {
        char path[PATH_MAX], text[16384];
        uint64_t v;

        if (snprintf(path, sizeof(path), "%s/memory.stat", directory) >= (int) sizeof(path))
                return 0;
        if (read_text(path, text, sizeof(text)) < 0 || find_number(text, "inactive_file ", &v) < 0)
                return 0;

        return v;
}

/* Lowers *bytes to what this group still allows. Returns whether it did. */
static bool apply_group(const char *directory, uint64_t *bytes) {
        uint64_t limit = UINT64_MAX, high, current, spare, left;

        if (read_group_number(directory, "memory.max", &limit) < 0)
                limit = UINT64_MAX;
        if (read_group_number(directory, "memory.high", &high) >= 0 && high < limit)
                limit = high;
        if (limit == UINT64_MAX || read_group_number(directory, "memory.current", &current) < 0)
                return false;

        spare = group_reclaimable(directory);
        current = spare < current ? current - spare : 0;
        left = limit > current ? limit - current : 0;
        if (left >= *bytes)
                return false;

        *bytes = left;
        return true;
}

void memory_own_group(const char *root, char *ret, size_t size) {
        char path[PATH_MAX], text[PATH_MAX];
        char *p = NULL;

        ret[0] = '\0';
        (void) snprintf(path, sizeof(path), "%s/proc/self/cgroup", root);
        if (read_text(path, text, sizeof(text)) < 0)
                return;

        for (char *line = text; line && !p; line = strchr(line, '\n')) {
                if (*line == '\n')
                        line++;
                if (strncmp(line, "0::/", 4) == 0)
                        p = line + 3;
        }
        if (!p)
                return;

        p[strcspn(p, "\n")] = '\0';
        /* "/../..": a group outside of our cgroup namespace, whose files cannot be seen. */
        if (strcmp(p, "/") == 0 || strstr(p, "/.."))
                return;

        (void) snprintf(ret, size, "%s", p);
}

/* From our own group up to the root of what we see: in a container that root has limits too. */
static void apply_groups(const char *root, uint64_t *bytes, char *limit, size_t limit_size) {
        char group[PATH_MAX], directory[PATH_MAX];

        memory_own_group(root, group, sizeof(group));

        for (;;) {
                char *slash;

                if (snprintf(directory, sizeof(directory), "%s/sys/fs/cgroup%s", root, group) <
                                (int) sizeof(directory) &&
                        apply_group(directory, bytes))
                        (void) snprintf(limit, limit_size, "cgroup %.80s", group[0] != '\0' ? group : "/");

                slash = strrchr(group, '/');
                if (!slash)
                        return;
                *slash = '\0';
        }
}

static void subtract(MemoryHeadroom *h, uint64_t reserve) {
        h->missing = reserve > h->bytes ? reserve - h->bytes : 0;
        h->bytes = h->bytes > reserve ? h->bytes - reserve : 0;
}

int memory_headroom(const Config *c, const char *root, uint64_t used, MemoryHeadroom *ret) {
        MemoryHeadroom h = {.bytes = UINT64_MAX};
        int r;

        if (c->cache_ram_max == 0) {
                r = memory_available(root, &h.bytes);
                if (r < 0)
                        return r;
                (void) snprintf(h.limit, sizeof(h.limit), "MemAvailable");
        }

        apply_groups(root, &h.bytes, h.limit, sizeof(h.limit));
        if (h.bytes != UINT64_MAX)
                subtract(&h, c->cache_ram_reserve);

        if (c->cache_ram_max > 0) {
                uint64_t left = c->cache_ram_max > used ? c->cache_ram_max - used : 0;

                if (used > c->cache_ram_max && used - c->cache_ram_max > h.missing)
                        h.missing = used - c->cache_ram_max;
                if (left <= h.bytes) {
                        h.bytes = left;
                        (void) snprintf(h.limit, sizeof(h.limit), "CacheRamMax");
                }
        }

        *ret = h;
        return 0;
}
