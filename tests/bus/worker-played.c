/* SPDX-License-Identifier: Apache-2.0 */
/* The CUDA worker on a device that the CPU plays (tests/unit/worker/device-ops.h), for tests of the service where there is
 * no GPU: the real worker, with another backend. The file that LATENT_PLAYED names is a struct Played that the test and
 * the worker share. */

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "service/shared/cleanup.h"
#include "service/shared/clock.h"
#include "service/worker/backend.h"
#include "service/worker/meminfo.h"
#include "tests/unit/worker/device-ops.h"

typedef struct Played {
        volatile uint64_t limit;      /* bytes of the device */
        volatile uint64_t used, peak; /* by the worker; peak: of all workers */
        volatile uint64_t fails_in;   /* copies to the device, then it fails for this worker; 0: it does not */
        volatile uint64_t gone;       /* it is not there for the next worker */
        volatile uint64_t starts;     /* of workers */
        volatile uint64_t stamp_usec; /* a kernel of block 0 begins so much later */
        volatile uint64_t goes;       /* with the copy that fails it is gone */
} Played;

static Played *played;
static const LkOps *device;
static LkOps ops;
static bool failed; /* sticky */

static int result(int r) {
        played->used = device_sim.used;
        if (device_sim.peak > played->peak)
                played->peak = device_sim.peak;
        return failed ? -EIO : r;
}

static int memory_new(LkContext *c, uint64_t size, void **ret) {
        device_sim.limit = played->limit;
        return failed ? -EIO : result(device->memory_new(c, size, ret));
}

static void memory_free(LkContext *c, void *p) {
        device->memory_free(c, p);
        (void) result(0);
}

static void memory_trim(LkContext *c) {
        device->memory_trim(c);
        (void) result(0);
}

static int fetch(LkContext *c, const LkFetch *a) {
        if (played->fails_in > 0 && --played->fails_in == 0) {
                failed = true;
                if (played->goes)
                        played->gone = 1;
        }
        return failed ? -EIO : result(device->fetch(c, a));
}

static uint64_t stamped_usec;

static int stamp(LkContext *c) {
        stamped_usec = clock_usec() + played->stamp_usec;
        return result(0);
}

static int stamped(LkContext *c, uint64_t *ret_usec) {
        *ret_usec = stamped_usec;
        return result(0);
}

static int start(Fault *f) {
        const char *path = getenv("LATENT_PLAYED");
        CLEANUP_CLOSE int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -EBADF;

        if (fd < 0)
                return fault_set(f, -ENODEV, FAULT_NOT_SUPPORTED, "LATENT_PLAYED names no file: there is no device to play.");
        played = mmap(NULL, sizeof(*played), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (played == MAP_FAILED)
                return -errno;
        played->starts++;
        if (played->gone)
                return fault_set(f, -ENODEV, FAULT_NOT_SUPPORTED, "GPU 0 does not answer: it is played to be gone.");

        played->used = 0;
        device_sim.keeps = true;
        return 0;
}

static uint32_t devices(WireDevice *d) {
        memset(d, 0, sizeof(*d));
        (void) snprintf(d->name, sizeof(d->name), "Played GPU");
        (void) snprintf(d->pci_address, sizeof(d->pci_address), "0000:41:00.0");
        (void) snprintf(d->uuid, sizeof(d->uuid), "GPU-01234567-89ab-cdef-0123-456789abcdef");
        (void) snprintf(d->architecture, sizeof(d->architecture), "sm_00");
        d->numa_node = -1;
        d->memory_total = d->memory_free = played->limit;
        return 1;
}

static int device_memory(uint64_t *ret_free, uint64_t *ret_total) {
        *ret_total = played->limit;
        *ret_free = played->limit > device_sim.used ? played->limit - device_sim.used : 0;
        return failed ? -ENODEV : 0;
}

static bool device_error(char *ret, size_t size) {
        (void) snprintf(ret, size, "the GPU Played GPU (0000:41:00.0) %s", played->gone ? "has fallen off the bus" : "failed");
        return played->gone;
}

const Backend *backend_get(Fault *f) {
        static const Backend backend = {
                .program = "latent-worker-cuda",
                .ops = &ops,
                .start = start,
                .devices = devices,
                .memory_available = meminfo_available,
                .device_memory = device_memory,
                .device_error = device_error,
                .kernels = "all: played",
                .bf16_only = true,
        };

        device = device_ops();
        ops = *device;
        ops.backend = "cuda";
        ops.numerics_id = "played-1";
        ops.memory_new = memory_new;
        ops.memory_free = memory_free;
        ops.memory_trim = memory_trim;
        ops.fetch = fetch;
        ops.stamp = stamp;
        ops.stamped = stamped;
        return &backend;
}
