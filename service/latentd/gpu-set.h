/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Which of a worker's devices take part, and with which shares: latentd.conf (Gpus=, GpusExclude=, GpusMax=, GpuMinFree=,
 * GpuShares=) and udev (LATENTD_IGNORE, LATENTD_SHARE), and which part of a film they run (DenoiserGpus=, ConditionerGpus=,
 * VaeGpus=). Sessions choose among those by the same names. */

#include <stdbool.h>

#include "service/latentd/config.h"
#include "service/latentd/device.h"
#include "service/latentd/plan.h"
#include "service/shared/wire.h"

typedef struct GpuSet {
        /* Of those that take part: where the worker's own HELLO has them; of a step's rows and heads against each other, a
         * thousand each as long as nobody says anything. */
        uint8_t place[WIRE_DEVICES_MAX];
        uint32_t shares[WIRE_DEVICES_MAX];
        uint64_t parts[_GPU_PART_MAX]; /* those that run it: bits; 0: latentd.conf names none of them */
        bool given; /* somebody says something of one of them; else they follow the rates, once these are measured */
} GpuSet;

/* Leaves those devices in h, in its order, and what is known of the ways between them; a line in its notes for each that is left
 * out for want of memory or for GpusMax=, for each name that fits none and each GPU that a key names twice. A CPU (no PCI address)
 * always takes part, as gpu_set_note_cpu(). infos: of
 * device_enumerate(). -ENODEV with f: none is left. */
int gpu_set_apply(const Config *c, const DeviceInfo *infos, size_t n_infos, WireHello *h, GpuSet *ret, Fault *f);

/* The ways between a set of devices, their rates, and notes of them, for workers that have the same ones later. All zeros: nothing is
 * known. */
typedef struct GpuLinks {
        WireHello hello; /* as gpu_set_learn() left it: its devices, peer_mbs, host_mbs, rates */
        char notes[1024]; /* of LINKS */
} GpuLinks;

/* What LINKS says goes into h, of which gpu_set_apply() made s, and is kept; s gets shares by the rates where none were given. */
void gpu_set_learn(GpuSet *s, const WireLinks *m, WireHello *h, GpuLinks *ret);

/* What is known of h's devices goes into it and s likewise; false: nothing is, or they are others. */
bool gpu_set_recall(const GpuLinks *x, GpuSet *s, WireHello *h);

/* One line more in h's notes, and in the log; what has no room is left out. */
void gpu_set_note(WireHello *h, const char *format, ...) __attribute__((__format__(__printf__, 2, 3)));

/* A line in h's notes that names those keys of GPUs that latentd.conf has beside a worker of the CPU. */
void gpu_set_note_cpu(const Config *c, WireHello *h);

/* Of latentd.conf, "VaeGpus"; of a job. */
const char *gpu_part_key(GpuPart part);
GpuPart gpu_part_of(WireJobKind kind);

/* What a session's devices, or else the part's, and the service's shares make of its wishes; rank i of the worker is on device
 * i % n_devices of h. -ENODEV: none of the devices is there. */
int gpu_set_wishes(const GpuSet *s, GpuPart part, const WireHello *h, uint32_t ranks, PlanWishes *w);

/* Ranks of a job without a plan: bits; 0: none of the devices is there. A worker may have fewer than the session asked for. A prompt is
 * encoded by one device unless the session says how many ranks: it has too few rows for several. What they save of its 0.3 s goes to and
 * fro between them 200 times, and each takes all of the weights. */
uint64_t gpu_set_ranks(const GpuSet *s, WireJobKind kind, const WireHello *h, uint32_t ranks, const PlanWishes *w);

/* PCI addresses of the GPUs that these ranks (bits) are on; how many. They are h's. */
size_t gpu_set_addresses(const WireHello *h, uint64_t ranks, const char *ret[static WIRE_DEVICES_MAX]);

/* FAULT_NO_WORKER: gpu_set_wishes() of a session found none. */
int gpu_set_refuse(GpuPart part, const PlanWishes *w, Fault *f);

/* How a plan's ranks exchange: as wished if they can, else through the host. AUTO: as is faster of p2p and host. */
WireExchange gpu_set_exchange(const WireHello *h, const WirePlan *p, WireExchange wish);
/* Likewise of ranks (bits) without a plan, never NCCL. */
WireExchange gpu_set_exchange_of(const WireHello *h, uint64_t ranks, WireExchange wish);
