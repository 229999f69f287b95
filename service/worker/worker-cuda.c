/* SPDX-License-Identifier: Apache-2.0 */
/* The CUDA backend of the worker: its op table, and the one device that this version drives. */

#include "service/worker/backend.h"

#include <errno.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include <cuda_runtime_api.h>

#include "kernels/cuda/cuda.h"
#include "service/shared/cleanup.h"
#include "service/shared/log.h"
#include "service/worker/meminfo.h"
#include "service/worker/timeline.h"

/* The portable kernels want mma.sync of bf16 and cp.async. */
#define OLDEST_MAJOR 8
/* Below it there is no room beside CUDA itself (RESIDENCY_OVERHEAD) for the least step of the least model. */
#define SMALLEST_MEMORY (UINT64_C(3) << 30)

/* All of it is written by start(), on the main thread. */
static struct {
        bool started;
        LkOps ops;
        char numerics_id[128], kernels[2048];
        int device;
        struct cudaDeviceProp properties;
        char pci_address[16];
        _Atomic(LkContext *) first; /* made by start(); the first rank takes it over */
} gpu;

static int no_device(Fault *f, const char *text) {
        return fault_set(f, -ENODEV, FAULT_NOT_SUPPORTED, "%s", text);
}

/* How many devices there are, or why there are none. */
static int count_devices(int *ret, Fault *f) {
        int driver = 0, runtime = 0;
        cudaError_t e;

        (void) cudaDriverGetVersion(&driver);
        if (driver > 0)
                lk_cuda_load_libraries();
        e = cudaGetDeviceCount(ret);
        timeline_note("driver");
        if (e == cudaSuccess && *ret > 0)
                return 0;

        (void) cudaRuntimeGetVersion(&runtime);
        if (driver == 0)
                return no_device(f, "There is no NVIDIA driver (libcuda.so.1): install one of version 580 or newer.");
        if (e == cudaErrorInsufficientDriver)
                return fault_set(f, -ENODEV, FAULT_NOT_SUPPORTED,
                        "The NVIDIA driver is too old: it has CUDA %d.%d, this program needs %d.%d (driver 580 for 13.0).", driver / 1000,
                        driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
        if (e == cudaErrorNoDevice || e == cudaSuccess)
                return no_device(f,
                        "The NVIDIA driver finds no GPU: look at /dev/nvidia*, who may open them, and "
                        "CUDA_VISIBLE_DEVICES.");
        return fault_set(f, -ENODEV, FAULT_NOT_SUPPORTED, "The NVIDIA driver does not start: %s (%s).", cudaGetErrorString(e),
                cudaGetErrorName(e));
}

static int check_device(const struct cudaDeviceProp *p, const char *address, Fault *f) {
        if (p->major < OLDEST_MAJOR)
                return fault_set(f, -ENODEV, FAULT_NOT_SUPPORTED,
                        "The GPU %s (%s, sm_%d%d) is too old, expected sm_%d0 or newer (Ampere: A100, RTX 3000).", p->name,
                        address, p->major, p->minor, OLDEST_MAJOR);
        if (p->totalGlobalMem < SMALLEST_MEMORY)
                return fault_set(f, -ENODEV, FAULT_NOT_SUPPORTED,
                        "The GPU %s (%s) is too small: it has %zu bytes of memory, expected %" PRIu64 " at least.", p->name,
                        address, p->totalGlobalMem, SMALLEST_MEMORY);
        return 0;
}

static void address_of(const struct cudaDeviceProp *p, char *ret, size_t size) {
        (void) snprintf(ret, size, "%04x:%02x:%02x.0", (unsigned) p->pciDomainID & 0xffffu, (unsigned) p->pciBusID & 0xffu,
                (unsigned) p->pciDeviceID & 0xffu);
}

/* Its first kernel: a build has code for some architectures. */
static int try_kernel(LkContext *c) {
        const LkOps *ops = lk_cuda_ops();
        const float one = 1;
        uint16_t half = 0;
        void *p;
        int r;

        r = ops->memory_new(c, 512, &p);
        if (r < 0)
                return r;
        r = ops->upload(c, p, &one, sizeof(one));
        if (r >= 0)
                r = ops->convert(c, &(LkConvert){.m = 1, .n = 1, .x = p, .x_type = LK_F32, .x_ld = 1,
                                            .y = (uint8_t *) p + 256, .y_type = LK_BF16, .y_ld = 1});
        if (r >= 0)
                r = ops->download(c, &half, (uint8_t *) p + 256, sizeof(half));
        ops->memory_free(c, p);
        return r < 0 ? r : half == 0x3f80 ? 0 : -EIO;
}

static int open_device(Fault *f) {
        LkContext *c = NULL;
        char text[256];
        int r;

        r = cudaSetDevice(gpu.device) == cudaSuccess ? 0 : -ENODEV;
        timeline_note("context");
        if (r >= 0)
                r = lk_cuda_ops()->context_new(0, &c);
        timeline_note("library");
        if (r >= 0)
                r = try_kernel(c);
        timeline_note("kernel");
        if (r >= 0) {
                (void) lk_cuda_numerics_id(c, gpu.numerics_id, sizeof(gpu.numerics_id));
                (void) lk_cuda_describe(c, gpu.kernels, sizeof(gpu.kernels));
                gpu.first = c;
                return 0;
        }

        c = lk_cuda_ops()->context_free(c);
        if (r == -ENOMEM)
                (void) snprintf(text, sizeof(text), "others have taken its memory");
        else if (r == -ENODEV)
                (void) snprintf(text, sizeof(text), "this build has no kernels for sm_%d%d (option gpu_arch), or others use it alone",
                        gpu.properties.major, gpu.properties.minor);
        else if (r == -ELIBACC)
                (void) snprintf(text, sizeof(text), "cuBLAS of CUDA %d (libcublasLt.so.%d) cannot be loaded: install it",
                        CUDART_VERSION / 1000, CUDART_VERSION / 1000);
        else
                (void) snprintf(text, sizeof(text), "%s", strerror(-r));
        return fault_set(f, r, FAULT_NOT_SUPPORTED, "The GPU %s (%s) cannot be used: %s.", gpu.properties.name,
                gpu.pci_address, text);
}

/* f: what is wrong with it. */
static int try_device(int i, Fault *f) {
        char address[32] = "";
        cudaError_t e;
        int r;

        (void) cudaDeviceGetPCIBusId(address, sizeof(address), i);
        e = cudaGetDeviceProperties(&gpu.properties, i);
        if (e != cudaSuccess)
                return fault_set(f, -ENODEV, FAULT_NOT_SUPPORTED, "GPU %d (%s) does not answer: %s.", i, address, cudaGetErrorString(e));
        address_of(&gpu.properties, gpu.pci_address, sizeof(gpu.pci_address));
        r = check_device(&gpu.properties, gpu.pci_address, f);
        if (r < 0)
                return r;
        gpu.device = i;
        return open_device(f);
}

/* The first one that will do; f: what is wrong with the last one that will not. */
static int choose_device(int n, Fault *f) {
        int r = -ENODEV;

        for (int i = 0; r < 0 && i < n; i++) {
                *f = (Fault){};
                r = try_device(i, f);
                if (r < 0 && n > 1)
                        log_warning("%s", f->text);
        }
        if (r >= 0 && n > 1)
                log_notice("%d GPUs are there; this version computes on one: %s (%s).", n, gpu.properties.name, gpu.pci_address);
        return r;
}

/* Threads begin on device 0. */
static int context_new(uint32_t threads, LkContext **ret) {
        LkContext *c;

        if (!gpu.started || cudaSetDevice(gpu.device) != cudaSuccess)
                return -ENODEV;
        c = atomic_exchange(&gpu.first, NULL);
        if (!c)
                return lk_cuda_ops()->context_new(threads, ret);
        *ret = c;
        return 0;
}

static int start(Fault *f) {
        int n = 0, r;

        r = count_devices(&n, f);
        if (r >= 0)
                r = choose_device(n, f);
        lk_cuda_await_libraries(); /* a process that is shut in loads nothing any more */
        if (r < 0)
                return r;
        gpu.ops.numerics_id = gpu.numerics_id;
        gpu.started = true;
        return 0;
}

static int numa_node(void) {
        char path[64];
        FILE *file;
        int node = -1;

        (void) snprintf(path, sizeof(path), "/sys/bus/pci/devices/%s/numa_node", gpu.pci_address);
        file = fopen(path, "re");
        if (!file)
                return -1;
        if (fscanf(file, "%d", &node) != 1)
                node = -1;
        (void) fclose(file);
        return node;
}

static void print_uuid(const cudaUUID_t *uuid, char *ret, size_t size) {
        size_t n = (size_t) snprintf(ret, size, "GPU-");

        for (size_t i = 0; i < sizeof(uuid->bytes) && n < size; i++)
                n += (size_t) snprintf(ret + n, size - n, "%s%02x", i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "",
                        (unsigned char) uuid->bytes[i]);
}

static int device_memory(uint64_t *ret_free, uint64_t *ret_total) {
        size_t n_free, n_total;

        if (!gpu.started || cudaSetDevice(gpu.device) != cudaSuccess || cudaMemGetInfo(&n_free, &n_total) != cudaSuccess)
                return -ENODEV;
        *ret_free = n_free;
        *ret_total = n_total;
        return 0;
}

static uint32_t devices(WireDevice *ret_devices) {
        WireDevice *d = &ret_devices[0];

        if (!gpu.started)
                return 0;

        memset(d, 0, sizeof(*d));
        (void) snprintf(d->name, sizeof(d->name), "%.63s", gpu.properties.name);
        (void) snprintf(d->pci_address, sizeof(d->pci_address), "%s", gpu.pci_address);
        (void) snprintf(d->architecture, sizeof(d->architecture), "sm_%d%d", gpu.properties.major, gpu.properties.minor);
        print_uuid(&gpu.properties.uuid, d->uuid, sizeof(d->uuid));
        d->numa_node = numa_node();
        if (device_memory(&d->memory_free, &d->memory_total) < 0)
                d->memory_total = gpu.properties.totalGlobalMem;
        return 1;
}

/* A GPU that is gone from the bus reads as ones. */
static bool is_off_the_bus(void) {
        unsigned char id[2] = {};
        char path[64];
        FILE *file;
        size_t n;

        (void) snprintf(path, sizeof(path), "/sys/bus/pci/devices/%s/config", gpu.pci_address);
        file = fopen(path, "re");
        if (!file)
                return errno == ENOENT;
        n = fread(id, 1, sizeof(id), file);
        (void) fclose(file);
        return n == sizeof(id) && id[0] == 0xff && id[1] == 0xff;
}

static bool device_error(char *ret, size_t size) {
        const bool off_bus = is_off_the_bus();
        cudaError_t e = cudaSetDevice(gpu.device);

        if (e == cudaSuccess)
                e = cudaDeviceSynchronize(); /* an error that stays comes out again */
        (void) snprintf(ret, size, "the GPU %s (%s, sm_%d%d) %s%s%s", gpu.properties.name, gpu.pci_address,
                gpu.properties.major, gpu.properties.minor, off_bus ? "has fallen off the bus" : "failed",
                e != cudaSuccess ? ": " : "", e != cudaSuccess ? cudaGetErrorString(e) : "");
        return off_bus;
}

const Backend *backend_get(Fault *f) {
        static Backend backend = {
                .program = "latent-worker-cuda",
                .start = start,
                .devices = devices,
                .memory_available = meminfo_available,
                .device_memory = device_memory,
                .device_error = device_error,
                .kernels = gpu.kernels,
                .bf16_only = true,
                .uses_driver = true,
        };

        if (!backend.ops) {
                gpu.ops = *lk_cuda_ops();
                gpu.ops.context_new = context_new;
                gpu.ops.numerics_id = "cuda-none";
                backend.ops = &gpu.ops;
        }
        return &backend;
}
