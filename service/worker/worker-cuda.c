/* SPDX-License-Identifier: Apache-2.0 */
/* The CUDA backend of the worker: its op table, and the devices that are alike, with the ways between them. */

#include "service/worker/backend.h"

#include <errno.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include <cuda_runtime_api.h>

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/warm.h"
#include "service/shared/cleanup.h"
#include "service/shared/gpu-names.h"
#include "service/shared/log.h"
#include "service/worker/alike.h"
#include "service/worker/meminfo.h"
#include "service/worker/nccl.h"
#include "service/worker/peers.h"
#include "service/worker/timeline.h"

/* The portable kernels want mma.sync of bf16 and cp.async. */
#define OLDEST_MAJOR 8
/* Below it there is no room beside CUDA itself (RESIDENCY_OVERHEAD) for the least step of the least model. */
#define SMALLEST_MEMORY (UINT64_C(3) << 30)

/* Of the trial of copies between devices. */
#define PATTERN (UINT64_C(16) << 20)
#define PATTERN_USEC UINT64_C(5000000)
#define PRODUCT 4096 /* 0.2 ms of an H200 */

/* NCCL looks at the whole machine first. */
#define NCCL_USEC UINT64_C(60000000)

typedef struct Gpu {
        int number; /* CUDA's */
        struct cudaDeviceProp properties;
        char pci_address[16];
        char numerics_id[128];
        bool is_out;                /* no rank has it: gpu_is_left_out(), choose() */
        _Atomic(LkContext *) first; /* made by start(); the first rank takes it over */
} Gpu;

/* All of it is written by start() and choose(), on the main thread. */
static struct {
        bool started;
        LkOps ops;
        char kernels[2048];
        char pins_device[sizeof(((WirePins *) NULL)->device)]; /* what pins hold for, beside the numerics */
        uint32_t n;
        Gpu gpus[WIRE_DEVICES_MAX];
        const Gpu *first; /* that was opened: all are alike */
        bool reaches[WIRE_DEVICES_MAX][WIRE_DEVICES_MAX]; /* [from][to]: there is a direct way */
        WireHello left_out; /* notes of start() */
} cuda;

static _Thread_local uint32_t bound; /* which of them */

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

static void on_warm(void) {
        timeline_beside("library ran");
}

static void on_told(void) {
        timeline_beside("layers checked");
}

static int open_device(Gpu *g, Fault *f) {
        LkContext *c = NULL;
        char text[256];
        int r;

        r = cudaSetDevice(g->number) == cudaSuccess ? 0 : -ENODEV;
        timeline_note("context");
        if (r >= 0)
                r = lk_cuda_ops()->context_new(0, &c);
        timeline_note("library");
        if (r >= 0)
                r = try_kernel(c);
        timeline_note("kernel");
        if (r >= 0) {
                (void) lk_cuda_numerics_id(c, g->numerics_id, sizeof(g->numerics_id));
                g->first = c;
                lk_cuda_warm(on_warm);
                return 0;
        }

        c = lk_cuda_ops()->context_free(c);
        if (r == -ENOMEM)
                (void) snprintf(text, sizeof(text), "others have taken its memory");
        else if (r == -ENODEV)
                (void) snprintf(text, sizeof(text), "this build has no kernels for sm_%d%d (option gpu_arch), or others use it alone",
                        g->properties.major, g->properties.minor);
        else if (r == -ELIBACC)
                (void) snprintf(text, sizeof(text), "cuBLAS of CUDA %d (libcublasLt.so.%d) cannot be loaded: install it",
                        CUDART_VERSION / 1000, CUDART_VERSION / 1000);
        else
                (void) snprintf(text, sizeof(text), "%s", strerror(-r));
        return fault_set(f, r, FAULT_NOT_SUPPORTED, "The GPU %s (%s) cannot be used: %s.", g->properties.name, g->pci_address, text);
}

static void describe(WireDevice *d, const Gpu *g);

typedef struct Listed {
        WireDevice devices[WIRE_DEVICES_MAX];
        AlikeDevice alike[WIRE_DEVICES_MAX]; /* of them */
} Listed;

/* And the next one behind them, which has its properties. */
static void list_devices(Listed *ret) {
        for (uint32_t i = 0; i <= cuda.n; i++) {
                const Gpu *g = cuda.gpus + i;
                WireDevice *d = ret->devices + i;

                describe(d, g);
                ret->alike[i] = (AlikeDevice){d->name, d->pci_address, d->architecture, g->is_out ? "" : g->numerics_id};
        }
}

/* The next one. A context takes a tenth of a second, and as long to be let go of. */
static bool is_left_out(void) {
        Listed all;

        list_devices(&all);
        return gpu_is_left_out(all.devices + cuda.n, alike_number(all.alike, cuda.n, all.alike + cuda.n));
}

/* f: what is wrong with it. */
static int try_device(int i, Gpu *g, Fault *f) {
        char address[32] = "";
        cudaError_t e;
        int r;

        (void) cudaDeviceGetPCIBusId(address, sizeof(address), i);
        g->number = i;
        e = cudaGetDeviceProperties(&g->properties, i);
        if (e != cudaSuccess)
                return fault_set(f, -ENODEV, FAULT_NOT_SUPPORTED, "GPU %d (%s) does not answer: %s.", i, address, cudaGetErrorString(e));
        address_of(&g->properties, g->pci_address, sizeof(g->pci_address));
        r = check_device(&g->properties, g->pci_address, f);
        if (r < 0)
                return r;
        g->is_out = is_left_out();
        return g->is_out ? 0 : open_device(g, f);
}

/* A line in the notes if not. */
static bool is_like_others(void) {
        Listed all;

        list_devices(&all);
        return alike_join(all.alike, cuda.n, all.alike + cuda.n, &cuda.left_out);
}

static void close_device(Gpu *g) {
        LkContext *c;

        if (g->is_out) /* asking the driver anything of it would make a context */
                return;
        g->is_out = true;
        lk_cuda_warm_await();
        if (cudaSetDevice(g->number) != cudaSuccess)
                return;
        c = atomic_exchange(&g->first, NULL);
        if (c)
                (void) lk_cuda_ops()->context_free(c);
        (void) cudaDeviceReset(); /* what the driver took for us, too */
}

/* A step is cut over devices that give the same bits (alike.h). f: what is wrong with the last one that will not do. */
static int open_devices(int n, Fault *f) {
        int r = -ENODEV;

        for (int i = 0; i < n; i++) {
                Gpu *g = cuda.gpus + cuda.n;

                if (cuda.n == WIRE_DEVICES_MAX) {
                        peers_note(&cuda.left_out, "%d GPUs are there; a worker uses %d at most.", n, WIRE_DEVICES_MAX);
                        break;
                }
                *f = (Fault){};
                r = try_device(i, g, f);
                if (r < 0) {
                        if (n > 1)
                                peers_note(&cuda.left_out, "%s", f->text);
                        continue;
                }
                if (!is_like_others()) {
                        close_device(g);
                        continue;
                }
                if (!cuda.first && !g->is_out)
                        cuda.first = g;
                cuda.n++;
        }
        if (cuda.n > 1)
                timeline_note("other devices");
        if (cuda.n > 0 && !cuda.first)
                return gpu_names_refuse(cuda.n, f);
        return cuda.n > 0 ? 0 : r;
}

static int bind_device(uint32_t device) {
        if (device >= cuda.n || cuda.gpus[device].is_out || cudaSetDevice(cuda.gpus[device].number) != cudaSuccess)
                return -ENODEV;
        bound = device;
        return 0;
}

/* Threads begin on device 0. */
static int context_new(uint32_t threads, LkContext **ret) {
        LkContext *c;
        int r;

        r = cuda.started ? bind_device(bound) : -ENODEV;
        if (r < 0)
                return r;
        c = atomic_exchange(&cuda.gpus[bound].first, NULL);
        if (!c)
                return lk_cuda_ops()->context_new(threads, ret);
        *ret = c;
        return 0;
}

static bool connect(uint32_t from, uint32_t to) {
        int can = 0;
        cudaError_t e;

        if (cuda.gpus[to].is_out || cudaDeviceCanAccessPeer(&can, cuda.gpus[from].number, cuda.gpus[to].number) != cudaSuccess || !can ||
                bind_device(from) < 0)
                return false;
        e = cudaDeviceEnablePeerAccess(cuda.gpus[to].number, 0);
        (void) cudaGetLastError();
        return e == cudaSuccess || e == cudaErrorPeerAccessAlreadyEnabled;
}

/* On one thread, before anything is copied: several at once fail. Of what it says only copies prove anything. */
static void connect_all(void) {
        for (uint32_t from = 0; from < cuda.n; from++)
                for (uint32_t to = 0; to < cuda.n; to++)
                        cuda.reaches[from][to] = from != to && connect(from, to);
        if (cuda.n > 1)
                timeline_note("ways");
}

static int is_connected(uint32_t from, uint32_t to) {
        return cuda.reaches[from][to] ? 0 : -EOPNOTSUPP;
}

static void try_links(WireHello *ret) {
        LkContext *contexts[WIRE_DEVICES_MAX];
        WireDevice devices[WIRE_DEVICES_MAX];
        PeersTrial trial = {
                .ops = lk_cuda_ops(),
                .n = cuda.n,
                .devices = devices,
                .contexts = contexts,
                .bind = bind_device,
                .connect = is_connected,
                .size = PATTERN,
                .product = PRODUCT,
                .deadline_usec = PATTERN_USEC,
        };

        lk_cuda_warm_await(); /* beside it a device has another rate */
        for (uint32_t i = 0; i < cuda.n; i++) {
                contexts[i] = cuda.gpus[i].first;
                describe(devices + i, cuda.gpus + i);
                if (cuda.gpus[i].is_out)
                        trial.without |= UINT64_C(1) << i;
        }
        peers_try(&trial, ret);
}

/* Before the process is shut in: it makes sockets, and whatever it connects it connects now. */
static void start_nccl(void) {
        LkContext *contexts[WIRE_DEVICES_MAX];
        const NcclDevices d = {.ops = lk_cuda_ops(), .n = cuda.n, .contexts = contexts, .bind = bind_device, .size = PATTERN,
                .deadline_usec = NCCL_USEC};
        Fault f = {};

        for (uint32_t i = 0; i < cuda.n; i++)
                contexts[i] = cuda.gpus[i].first;
        if (nccl_start(&d, &f) < 0)
                peers_note(&cuda.left_out, "Sessions cannot say exchange nccl: %.200s", f.text);
        (void) bind_device(0);
        timeline_note("NCCL");
}

static void on_layer(bool known, uint64_t usec) {
        timeline_count(known ? "layers known" : "layers tried", usec);
}

/* Their algorithms may be others with another driver, and where there are more or fewer processors. */
static void name_pins_device(void) {
        const struct cudaDeviceProp *p = &cuda.first->properties;
        char driver[64] = "?";
        int version = 0;
        FILE *file = fopen("/sys/module/nvidia/version", "re");

        if (file) {
                if (fscanf(file, "%63s", driver) != 1)
                        driver[0] = '\0';
                (void) fclose(file);
        }
        (void) cudaDriverGetVersion(&version);
        (void) snprintf(cuda.pins_device, sizeof(cuda.pins_device), "%.100s with %d processors, driver %s (CUDA %d)", p->name,
                p->multiProcessorCount, driver, version);
}

static int arch(void) {
        return 10 * cuda.first->properties.major + cuda.first->properties.minor;
}

_Static_assert(sizeof(LkCudaPin) == sizeof(WirePin) && LK_CUDA_PIN_WORDS == WIRE_PIN_WORDS, "pins");

static void pins(WirePins *ret) {
        LkCudaPin all[WIRE_PINS_MAX];

        (void) snprintf(ret->device, sizeof(ret->device), "%s", cuda.pins_device);
        ret->n = cuda.started ? lk_cuda_pins(arch(), all, WIRE_PINS_MAX) : 0;
        for (uint32_t i = 0; i < ret->n; i++) {
                WirePin *p = ret->pins + i;

                *p = (WirePin){.columns = all[i].k, .rows = all[i].rows, .type = all[i].type, .biased = all[i].biased,
                        .own = all[i].own, .few = all[i].few};
                memcpy(p->large, all[i].large, sizeof(p->large));
                memcpy(p->small, all[i].small, sizeof(p->small));
        }
}

static uint32_t take_pins(const WirePins *m, Fault *f) {
        LkCudaPin all[WIRE_PINS_MAX];
        char why[256];
        uint32_t n;

        if (!cuda.started || strcmp(m->device, cuda.pins_device) != 0) {
                (void) fault_set(f, -EINVAL, FAULT_INTERNAL, "they are of %.200s, this worker has %.200s", m->device, cuda.pins_device);
                return 0;
        }
        for (uint32_t i = 0; i < m->n; i++) {
                const WirePin *p = m->pins + i;

                all[i] = (LkCudaPin){.k = p->columns, .rows = p->rows, .type = p->type, .biased = p->biased,
                        .own = p->own, .few = p->few};
                memcpy(all[i].large, p->large, sizeof(p->large));
                memcpy(all[i].small, p->small, sizeof(p->small));
        }
        n = lk_cuda_pins_take(arch(), all, m->n, why, sizeof(why));
        if (why[0] != '\0')
                (void) fault_set(f, -EINVAL, FAULT_INTERNAL, "%s", why);
        for (uint32_t i = 0; n > 0 && i < cuda.n; i++)
                if (bind_device(i) >= 0)
                        lk_cuda_warm_told(on_told);
        return n;
}

static bool any_is_out(void) {
        for (uint32_t i = 0; i < cuda.n; i++)
                if (cuda.gpus[i].is_out)
                        return true;
        return false;
}

static int start(Fault *f) {
        const bool wants_nccl = nccl_is_wanted();
        int n = 0, r;

        lk_cuda_on_layer = on_layer;
        r = count_devices(&n, f);
        if (r >= 0)
                r = open_devices(n, f);
        lk_cuda_await_libraries(); /* a process that is shut in loads nothing any more */
        if (r < 0)
                return r;
        (void) lk_cuda_describe(cuda.first->first, cuda.kernels, sizeof(cuda.kernels));
        name_pins_device();
        connect_all();
        (void) atexit(lk_cuda_warm_await); /* before the driver's library ends */
        cuda.ops.numerics_id = cuda.first->numerics_id;
        if (wants_nccl && !any_is_out()) /* it has all of them or none */
                start_nccl();
        cuda.started = true;
        return 0;
}

static void choose(uint64_t devices) {
        if (devices != (UINT64_C(1) << cuda.n) - 1) /* it has all of them or none */
                nccl_end();
        for (uint32_t i = 0; i < cuda.n; i++)
                if (!(devices >> i & 1))
                        close_device(cuda.gpus + i);
        /* what this thread asks of the driver must not make a context on one of those again */
        for (uint32_t i = 0; i < cuda.n; i++)
                if (bind_device(i) >= 0)
                        break;
}

static int numa_node(const Gpu *g) {
        char path[64];
        FILE *file;
        int node = -1;

        (void) snprintf(path, sizeof(path), "/sys/bus/pci/devices/%s/numa_node", g->pci_address);
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

static int device_memory(uint32_t device, uint64_t *ret_free, uint64_t *ret_total) {
        size_t n_free, n_total;

        if (!cuda.started || bind_device(device) < 0 || cudaMemGetInfo(&n_free, &n_total) != cudaSuccess)
                return -ENODEV;
        *ret_free = n_free;
        *ret_total = n_total;
        return 0;
}

static void describe(WireDevice *d, const Gpu *g) {
        memset(d, 0, sizeof(*d));
        (void) snprintf(d->name, sizeof(d->name), "%.63s", g->properties.name);
        (void) snprintf(d->pci_address, sizeof(d->pci_address), "%s", g->pci_address);
        (void) snprintf(d->architecture, sizeof(d->architecture), "sm_%d%d", g->properties.major, g->properties.minor);
        print_uuid(&g->properties.uuid, d->uuid, sizeof(d->uuid));
        d->numa_node = numa_node(g);
        d->memory_total = g->properties.totalGlobalMem;
}

static uint32_t devices(WireHello *hello) {
        if (!cuda.started)
                return 0;

        memcpy(hello->notes, cuda.left_out.notes, sizeof(hello->notes));
        hello->nccl = nccl_version();
        for (uint32_t i = 0; i < cuda.n; i++) {
                WireDevice *d = hello->devices + i;

                describe(d, cuda.gpus + i);
                d->left_out = cuda.gpus[i].is_out;
                hello->peer_mbs[i][i] = WIRE_LINK_SAME;
                (void) device_memory(i, &d->memory_free, &d->memory_total);
        }
        return cuda.n;
}

/* A GPU that is gone from the bus reads as ones. */
static bool is_off_the_bus(const Gpu *g) {
        unsigned char id[2] = {};
        char path[64];
        FILE *file;
        size_t n;

        (void) snprintf(path, sizeof(path), "/sys/bus/pci/devices/%s/config", g->pci_address);
        file = fopen(path, "re");
        if (!file)
                return errno == ENOENT;
        n = fread(id, 1, sizeof(id), file);
        (void) fclose(file);
        return n == sizeof(id) && id[0] == 0xff && id[1] == 0xff;
}

/* An error that stays comes out again. */
static cudaError_t error_of(const Gpu *g) {
        cudaError_t e = cudaSetDevice(g->number);

        return e == cudaSuccess ? cudaDeviceSynchronize() : e;
}

/* The one that is off the bus, or has an error; else the first. */
static bool device_error(char *ret, size_t size) {
        const Gpu *guilty = NULL;
        cudaError_t e = cudaSuccess;
        bool off_bus = false;

        for (uint32_t i = 0; !off_bus && i < cuda.n; i++)
                if (!cuda.gpus[i].is_out && is_off_the_bus(cuda.gpus + i)) {
                        guilty = cuda.gpus + i;
                        off_bus = true;
                }
        for (uint32_t i = 0; !guilty && i < cuda.n; i++)
                if (!cuda.gpus[i].is_out && (e = error_of(cuda.gpus + i)) != cudaSuccess)
                        guilty = cuda.gpus + i;
        if (off_bus)
                e = error_of(guilty);
        if (!guilty)
                guilty = cuda.gpus;
        (void) snprintf(ret, size, "the GPU %s (%s, sm_%d%d) %s%s%s", guilty->properties.name, guilty->pci_address,
                guilty->properties.major, guilty->properties.minor, off_bus ? "has fallen off the bus" : "failed",
                e != cudaSuccess ? ": " : "", e != cudaSuccess ? cudaGetErrorString(e) : "");
        return off_bus;
}

const Backend *backend_get(Fault *f) {
        static Backend backend = {
                .program = "latent-worker-cuda",
                .start = start,
                .devices = devices,
                .bind = bind_device,
                .choose = choose,
                .try_links = try_links,
                .pins = pins,
                .take_pins = take_pins,
                .memory_available = meminfo_available,
                .device_memory = device_memory,
                .device_error = device_error,
                .kernels = cuda.kernels,
                .bf16_only = true,
                .uses_driver = true,
        };

        if (!backend.ops) {
                cuda.ops = *lk_cuda_ops();
                cuda.ops.context_new = context_new;
                cuda.ops.numerics_id = "cuda-none";
                backend.ops = &cuda.ops;
        }
        return &backend;
}
