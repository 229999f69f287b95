/* SPDX-License-Identifier: Apache-2.0 */
#include "service/worker/meminfo.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "service/shared/cleanup.h"

static inline void fclosep(FILE **f) {
        if (*f)
                (void) fclose(*f);
}

int meminfo_field(const char *path, const char *key, char *ret, size_t n) {
        CLEANUP(fclosep) FILE *file = NULL;
        char line[512];

        file = fopen(path, "re");
        if (!file)
                return -errno;

        while (fgets(line, sizeof(line), file)) {
                char *value;

                if (strncmp(line, key, strlen(key)) != 0)
                        continue;

                value = line + strlen(key);
                value += strspn(value, " \t");
                if (*value != ':')
                        continue;

                value++;
                value += strspn(value, " \t");
                value[strcspn(value, "\n")] = '\0';
                (void) snprintf(ret, n, "%.*s", (int) n - 1, value);
                return 0;
        }
        return -ENOENT;
}

uint64_t meminfo_read(const char *key) {
        char value[64];
        uint64_t kib;

        if (meminfo_field("/proc/meminfo", key, value, sizeof(value)) < 0 ||
                sscanf(value, "%" SCNu64 " kB", &kib) != 1 || kib > UINT64_MAX / 1024)
                return 0;

        return kib * 1024;
}

uint64_t meminfo_available(void) {
        return meminfo_read("MemAvailable");
}
