/* SPDX-License-Identifier: Apache-2.0 */
/* The CPU backend of the worker: its op table and how the machine looks. */

#include "service/worker/backend.h"

#include <stdio.h>
#include <string.h>

#include "kernels/cpu/cpu.h"
#include "service/shared/cleanup.h"
#include "service/worker/meminfo.h"

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

static uint32_t devices(WireHello *hello) {
        WireDevice *d = &hello->devices[0];

        memset(d, 0, sizeof(*d));
        (void) snprintf(d->architecture, sizeof(d->architecture), "%s", architecture(cpu_ops));
        if (meminfo_field("/proc/cpuinfo", "model name", d->name, sizeof(d->name)) <
                0) /* e.g. aarch64 has no such line */
                (void) snprintf(d->name, sizeof(d->name), "CPU (%s)", d->architecture);
        d->memory_total = meminfo_read("MemTotal");
        d->memory_free = meminfo_available();
        d->numa_node = -1;
        return 1;
}

const Backend *backend_get(Fault *f) {
        static Backend backend = {
                .program = "latent-worker-cpu",
                .devices = devices,
                .memory_available = meminfo_available,
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
