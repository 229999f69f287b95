/* SPDX-License-Identifier: Apache-2.0 */
/* The CUDA worker on devices that the CPU plays (tests/unit/worker/device-ops.h), for tests of the service where there is
 * no GPU: the real worker, with another backend. The file that LATENT_PLAYED names is a struct Played that the test and
 * the worker share. */

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "service/shared/cleanup.h"
#include "service/shared/clock.h"
#include "service/shared/gpu-names.h"
#include "service/worker/alike.h"
#include "service/worker/backend.h"
#include "service/worker/meminfo.h"
#include "service/worker/nccl.h"
#include "service/worker/peers.h"
#include "tests/unit/worker/device-ops.h"

typedef struct Played {
        volatile uint64_t limit;      /* bytes of each device */
        volatile uint64_t used, peak; /* by the worker; peak: of all workers */
        volatile uint64_t fails_in;   /* copies to the device, then it fails for this worker; 0: it does not */
        volatile uint64_t gone;       /* it is not there for the next worker */
        volatile uint64_t starts;     /* of workers */
        volatile uint64_t stamp_usec; /* a kernel of block 0 begins so much later */
        volatile uint64_t devices;    /* 0: one */
        volatile uint64_t lost;       /* bits: devices that fail at the next upload, and are not there for the next worker */
        volatile uint64_t flips, hangs; /* copies from device a to b, 1 + 8 * a + b: change a bit; never end */
        volatile uint64_t peer_copies; /* by all workers */
        volatile uint64_t trials;     /* of ways between devices, by all workers */
        volatile uint64_t rates;      /* of 10^9 operations a second, 16 bits for each device; 0: not measured */
        volatile uint64_t goes;       /* with the copy that fails it is gone */
        volatile uint64_t tried, told; /* layers, by all workers: by trials, by workers before them */
        volatile uint64_t opened;     /* bits: devices, by the last worker */
        volatile uint64_t architectures; /* sm_NN, 8 bits for each device */
        volatile uint64_t kinds;      /* 8 bits for each device: those with another number give other bits */
        volatile uint64_t spoils;     /* what is handed on: 1: a layer's size is wrong, 2: it is of another device */
} Played;

static Played *played;
static const LkOps *device;
static LkOps ops;
static bool failed; /* sticky */
static uint32_t numbers[DEVICE_SIM_DEVICES], n_devices; /* of those that are there */
static bool is_out[DEVICE_SIM_DEVICES];

#define CONTEXTS_MAX 64
static struct {
        LkContext *context;
        uint32_t device;
        bool hangs;
} contexts[CONTEXTS_MAX]; /* only added to, by the main thread and ranks that start */
static pthread_mutex_t contexts_lock = PTHREAD_MUTEX_INITIALIZER;
static _Thread_local uint32_t bound;

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

static int bind_device(uint32_t i) {
        if (i >= n_devices || is_out[i])
                return -ENODEV;
        bound = i;
        device_ops_bind(numbers[i]);
        return 0;
}

static size_t find_context(const LkContext *c) {
        size_t i;

        (void) pthread_mutex_lock(&contexts_lock);
        for (i = 0; i + 1 < CONTEXTS_MAX && contexts[i].context != c; i++)
                ;
        (void) pthread_mutex_unlock(&contexts_lock);
        return i;
}

static int context_new(uint32_t threads, LkContext **ret) {
        int r = bind_device(bound);

        if (r >= 0)
                r = device->context_new(threads, ret);
        if (r < 0)
                return r;
        (void) pthread_mutex_lock(&contexts_lock);
        for (size_t i = 0; i < CONTEXTS_MAX; i++)
                if (!contexts[i].context) {
                        contexts[i].context = *ret;
                        contexts[i].device = numbers[bound];
                        break;
                }
        (void) pthread_mutex_unlock(&contexts_lock);
        return 0;
}

static LkContext *context_free(LkContext *c) {
        size_t i = find_context(c);

        (void) pthread_mutex_lock(&contexts_lock);
        contexts[i].context = NULL;
        contexts[i].hangs = false;
        (void) pthread_mutex_unlock(&contexts_lock);
        return device->context_free(c);
}

static int copy(LkContext *c, LkQueue queue, const LkCopy *a) {
        size_t i = find_context(c);
        uint64_t way;

        if (queue != LK_PEER)
                return failed ? -EIO : result(device->copy(c, queue, a));
        if (device_ops_device(a->to) == UINT32_MAX) /* on its way through the host */
                return failed ? -EIO : result(device->copy(c, queue, a));
        played->peer_copies++;
        way = 1 + 8 * contexts[i].device + device_ops_device(a->to);
        if (played->hangs == way) {
                contexts[i].hangs = true;
                return 0;
        }
        device_sim.flip_next = played->flips == way;
        return failed ? -EIO : result(device->copy(c, queue, a));
}

static int is_done(LkContext *c, uint32_t event) {
        return failed ? -EIO : contexts[find_context(c)].hangs ? 0 : device->is_done(c, event);
}

static int upload(LkContext *c, void *to, const void *host, uint64_t size) {
        if (played->lost >> contexts[find_context(c)].device & 1)
                failed = true;
        return failed ? -EIO : result(device->upload(c, to, host, size));
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

static void describe(WireDevice *d, uint32_t number) {
        memset(d, 0, sizeof(*d));
        (void) snprintf(d->name, sizeof(d->name), "Played GPU");
        (void) snprintf(d->pci_address, sizeof(d->pci_address), "0000:4%u:00.0", 1 + number);
        (void) snprintf(d->uuid, sizeof(d->uuid), "GPU-01234567-89ab-cdef-0123-456789abcde%c", "f012"[number]);
        (void) snprintf(d->architecture, sizeof(d->architecture), "sm_%02u", (unsigned) (played->architectures >> 8 * number & 0xff));
        d->numa_node = -1;
        d->memory_total = d->memory_free = played->limit;
}

static void try_links(WireHello *ret) {
        LkContext *own[WIRE_DEVICES_MAX];
        WireDevice listed[WIRE_DEVICES_MAX];
        PeersTrial trial = {
                .ops = &ops,
                .n = n_devices,
                .devices = listed,
                .contexts = own,
                .bind = bind_device,
                .size = 1 << 20,
                .deadline_usec = 1000000,
        };

        for (uint32_t i = 0; i < n_devices; i++) {
                describe(listed + i, numbers[i]);
                if (is_out[i])
                        trial.without |= UINT64_C(1) << i;
                else if (bind_device(i) < 0 || ops.context_new(1, own + i) < 0)
                        abort();
        }
        played->trials++;
        peers_try(&trial, ret);
        for (uint32_t i = 0; i < n_devices; i++)
                ret->rates[i] = is_out[i] ? 0 : (uint32_t) (played->rates >> 16 * numbers[i] & 0xffff);
        for (uint32_t i = 0; i < n_devices; i++)
                if (!is_out[i] && !contexts[find_context(own[i])].hangs)
                        (void) ops.context_free(own[i]);
}

/* Two layers, of 16 and 24 rows. */
#define LAYERS 2u
static bool knows[LAYERS];
static pthread_mutex_t layers_lock = PTHREAD_MUTEX_INITIALIZER;

static void pins(WirePins *ret) {
        (void) pthread_mutex_lock(&layers_lock);
        ret->n = LAYERS;
        (void) snprintf(ret->device, sizeof(ret->device), played->spoils == 2 ? "another one" : "the played one");
        for (uint32_t i = 0; i < LAYERS; i++) {
                played->tried += !knows[i];
                knows[i] = true;
                ret->pins[i] = (WirePin){.columns = 64, .rows = played->spoils == 1 && i == 1 ? 13 : 16 + 8 * i};
        }
        (void) pthread_mutex_unlock(&layers_lock);
}

static uint32_t take_pins(const WirePins *m, Fault *f) {
        uint32_t n = 0;

        if (strcmp(m->device, "the played one") != 0) {
                (void) fault_set(f, -EINVAL, FAULT_INTERNAL, "they are of %s", m->device);
                return 0;
        }
        (void) pthread_mutex_lock(&layers_lock);
        for (uint32_t i = 0; i < m->n; i++) {
                uint64_t rows = m->pins[i].rows;

                if (rows % 8 != 0 || rows / 8 - 2 >= LAYERS) {
                        (void) fault_set(f, -EINVAL, FAULT_INTERNAL, "the layer of %" PRIu64 " rows", rows);
                        continue;
                }
                knows[rows / 8 - 2] = true;
                n++;
        }
        (void) pthread_mutex_unlock(&layers_lock);
        played->told += n;
        return n;
}

static WireHello found; /* notes of start() */

static void start_nccl(void) {
        LkContext *own[WIRE_DEVICES_MAX];
        const NcclDevices d = {.ops = device, .n = n_devices, .contexts = own, .bind = bind_device, .size = 4096,
                .deadline_usec = 60000000};
        Fault f = {};

        for (uint32_t i = 0; i < n_devices; i++)
                if (bind_device(i) < 0 || ops.context_new(1, own + i) < 0)
                        abort();
        if (nccl_start(&d, &f) < 0)
                peers_note(&found, "Sessions cannot say exchange nccl: %.200s", f.text);
        else
                for (uint32_t i = 0; i < n_devices; i++)
                        (void) ops.context_free(own[i]);
}

static uint32_t opened; /* devices */

/* As the CUDA worker does it: of those that are there the ones that are alike. */
static int open_devices(Fault *f) {
        const uint32_t there = n_devices;
        WireDevice devices[DEVICE_SIM_DEVICES];
        AlikeDevice alike[DEVICE_SIM_DEVICES];
        char numerics[DEVICE_SIM_DEVICES][16];

        played->opened = 0;
        n_devices = 0;
        for (uint32_t i = 0; i < there; i++) {
                const uint32_t number = numbers[i], n = n_devices;

                describe(devices + n, number);
                (void) snprintf(numerics[n], sizeof(numerics[n]), "played-%u", (unsigned) (played->kinds >> 8 * number & 0xff));
                alike[n] = (AlikeDevice){devices[n].name, devices[n].pci_address, devices[n].architecture, numerics[n]};
                is_out[n] = gpu_is_left_out(devices + n, alike_number(alike, n, alike + n));
                if (is_out[n])
                        alike[n].numerics_id = "";
                if (!alike_join(alike, n, alike + n, &found))
                        continue;
                numbers[n_devices++] = number;
                if (is_out[n])
                        continue;
                opened++;
                played->opened |= UINT64_C(1) << number;
        }
        return opened > 0 ? 0 : gpu_names_refuse(n_devices, f);
}

static int start(Fault *f) {
        const char *path = getenv("LATENT_PLAYED");
        CLEANUP_CLOSE int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -EBADF;
        int r;

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
        for (uint32_t i = 0; i < DEVICE_SIM_DEVICES && i < (played->devices > 0 ? played->devices : 1); i++)
                if (!(played->lost >> i & 1))
                        numbers[n_devices++] = i;
        if (n_devices == 0)
                return fault_set(f, -ENODEV, FAULT_NOT_SUPPORTED, "All GPUs are played to be lost.");
        r = open_devices(f);
        if (r >= 0 && nccl_is_wanted() && opened == n_devices)
                start_nccl();
        return r;
}

static void choose(uint64_t devices) {
        for (uint32_t i = 0; i < n_devices; i++)
                is_out[i] = !(devices >> i & 1);
        if (devices != (UINT64_C(1) << n_devices) - 1)
                nccl_end();
}

static uint32_t devices(WireHello *hello) {
        for (uint32_t i = 0; i < n_devices; i++) {
                describe(hello->devices + i, numbers[i]);
                hello->devices[i].left_out = is_out[i];
                if (is_out[i])
                        hello->devices[i].memory_free = 0;
                hello->peer_mbs[i][i] = WIRE_LINK_SAME;
        }
        memcpy(hello->notes, found.notes, sizeof(hello->notes));
        hello->nccl = nccl_version();
        return n_devices;
}

static int device_memory(uint32_t i, uint64_t *ret_free, uint64_t *ret_total) {
        uint64_t used = device_sim.used_of[numbers[i]];

        *ret_total = played->limit;
        *ret_free = played->limit > used ? played->limit - used : 0;
        return failed ? -ENODEV : 0;
}

static bool device_error(char *ret, size_t size) {
        uint32_t number = played->lost != 0 ? (uint32_t) __builtin_ctzll(played->lost) : 0;
        bool off_bus = played->gone || played->lost != 0;

        (void) snprintf(ret, size, "the GPU Played GPU (0000:4%u:00.0) %s", 1 + number, off_bus ? "has fallen off the bus" : "failed");
        return off_bus;
}

const Backend *backend_get(Fault *f) {
        static const Backend backend = {
                .program = "latent-worker-cuda",
                .ops = &ops,
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
        ops.upload = upload;
        ops.fetch = fetch;
        ops.context_new = context_new;
        ops.context_free = context_free;
        ops.copy = copy;
        ops.is_done = is_done;
        ops.stamp = stamp;
        ops.stamped = stamped;
        return &backend;
}
