/* SPDX-License-Identifier: Apache-2.0 */
/* The CPU backend of the worker: its op table and how the machine looks. */

#include "service/worker/backend.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "kernels/cpu/cpu.h"
#include "service/shared/cleanup.h"

static inline void fclosep(FILE **f) {
        if (*f)
                (void) fclose(*f);
}

/* The value of the first "key : value" line of a /proc file. */
static int read_field(const char *path, const char *key, char *ret, size_t n) {
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

static uint64_t read_meminfo(const char *key) {
        char value[64];
        uint64_t kib;

        if (read_field("/proc/meminfo", key, value, sizeof(value)) < 0 ||
                sscanf(value, "%" SCNu64 " kB", &kib) != 1 || kib > UINT64_MAX / 1024)
                return 0;

        return kib * 1024;
}

static uint64_t memory_available(void) {
        return read_meminfo("MemAvailable");
}

static const char *architecture(const LkOps *ops) {
#if defined(__x86_64__)
        static const struct {
                LkCpuIsa isa;
                const char *name;
        } names[] = {{LK_CPU_V4, "x86-64-v4"}, {LK_CPU_V3, "x86-64-v3"}};

        for (size_t i = 0; i < ELEMENTSOF(names); i++)
                if (lk_cpu_ops(names[i].isa) == ops)
                        return names[i].name;
        return "x86-64";
#elif defined(__aarch64__)
        return "aarch64";
#else
        return "generic";
#endif
}

static const LkOps *cpu_ops; /* set by backend_get() */

static uint32_t devices(WireDevice *ret_devices) {
        WireDevice *d = &ret_devices[0];

        memset(d, 0, sizeof(*d));
        (void) snprintf(d->architecture, sizeof(d->architecture), "%s", architecture(cpu_ops));
        if (read_field("/proc/cpuinfo", "model name", d->name, sizeof(d->name)) <
                0) /* e.g. aarch64 has no such line */
                (void) snprintf(d->name, sizeof(d->name), "CPU (%s)", d->architecture);
        d->memory_total = read_meminfo("MemTotal");
        d->memory_free = memory_available();
        d->numa_node = -1;
        return 1;
}

const Backend *backend_get(Fault *f) {
        static Backend backend = {
                .program = "latent-worker-cpu",
                .devices = devices,
                .memory_available = memory_available,
        };

        if (!backend.ops) {
                cpu_ops = lk_cpu_ops(LK_CPU_AUTO);
                if (!cpu_ops) {
                        (void) fault_set(f, -EOPNOTSUPP, FAULT_NOT_SUPPORTED,
                                "This CPU has no instruction set that the kernels know.");
                        return NULL;
                }
                backend.ops = cpu_ops;
        }
        return &backend;
}
