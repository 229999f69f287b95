/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The CPU backend as a device with memory of its own (LkOps.host_weights is not set): operations refuse arrays that are not
 * there, and nobody else may touch it (the program ends); fresh memory is poisoned, copies of fetch() happen as late as the
 * queues allow, and a copy into memory whose readers it does not wait for ends the program. Each context has its queues and its
 * memory. Copies between contexts, and with the host, are as late, and ones that do not wait for what wrote their source, or for those
 * that read their target, end the program, too. */

#include <stdbool.h>
#include <stdint.h>

#include "kernels/ops.h"

#define DEVICE_SIM_DEVICES 4

typedef struct DeviceSim {
        uint64_t limit;       /* bytes of memory of each device; 0: no limit */
        uint64_t used, peak;  /* bytes, of all devices */
        uint64_t used_of[DEVICE_SIM_DEVICES];
        uint64_t allocations; /* calls of memory_new() that succeeded */
        uint64_t fetches, fetched_bytes;
        uint64_t pinned_bytes; /* over all calls of pin() */
        uint64_t joins;
        int64_t fetches_left; /* then fetch() fails with -EIO; -1: never */
        bool pin_fails;
        uint64_t peer_copies, peer_bytes; /* between contexts */
        bool flip_next;    /* the next copy between contexts changes a bit */
        bool peer_stuck;   /* copies between contexts never end */
        bool keeps; /* what is freed counts as used until memory_trim(), and is given out again, as a driver's heap does */
        uint32_t refusals, refuse; /* memory_new(): of the next `refusals` calls the last `refuse` fail with -ENOMEM */
} DeviceSim;

extern DeviceSim device_sim;

/* What LkOps.native() gives. */
typedef struct DeviceQueue {
        const LkOps *ops;
        LkContext *context;
} DeviceQueue;

/* The table; device_sim is as new. */
const LkOps *device_ops(void);

/* Contexts that this thread makes from now on are of this device (from 0). */
void device_ops_bind(uint32_t device);

/* The device that this memory is on; UINT32_MAX: registered memory of the host. */
uint32_t device_ops_device(const void *p);

/* The CPU backend itself. */
const LkOps *device_ops_cpu(void);

/* What LK_COMPUTE was told to wait for has happened, and all copies between contexts. */
void device_ops_sync(void);

/* Ends the program where memory is left, or copies into it are. */
void device_ops_done(void);

/* Ends the program unless these bytes are device memory that an operation may read now. The test itself may, too, until the
 * next operation ends. */
void device_ops_read(const void *p, uint64_t size);
