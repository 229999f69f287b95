/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* What makes a worker program a CPU or a CUDA worker. Exactly one file of each program (worker-cpu.c,
 * worker-cuda.c) defines backend_get(); everything else in this folder is the same source for both. */

#include <stdbool.h>
#include <stdint.h>

#include "kernels/ops.h"
#include "service/shared/wire.h"

typedef struct Backend {
        const char *program; /* "latent-worker-cpu" */
        const LkOps *ops;    /* complete once start() was there */

        /* Makes the devices ready, from the main thread, before the process is shut in. Fails with f where
         * this machine lacks what the backend needs: the worker says so and has no devices. NULL: nothing to do. */
        int (*start)(Fault *f);

        /* Fills up to WIRE_DEVICES_MAX descriptions for HELLO, and what is known of the ways between them, and returns how
         * many there are. Reads /proc: call it before the filter of system calls is on. */
        uint32_t (*devices)(WireHello *hello);

        /* Bytes of host memory that a step could take now; 0 where that is not known. */
        uint64_t (*memory_available)(void);

        /* The rest is of a backend with memory of its own (!ops->host_weights), else NULL. */

        /* Contexts that the calling thread makes from now on are of this device (its place in devices()). NULL: there is one. */
        int (*bind)(uint32_t device);
        /* Of the devices only these (a bit each) have ranks: lets go of the others. Once, before there is a rank. NULL likewise. */
        void (*choose)(uint64_t devices);
        /* Behind it, likewise: tries the ways between those that have ranks, and how fast these are; peer_mbs, host_mbs, rates and notes of
         * ret say what it found, and begin as zeros. */
        void (*try_links)(WireHello *ret);
        /* What trials of the device's library have found, for a worker after this one: device, n and pins. Any thread. NULL: there are no
         * trials. */
        void (*pins)(WirePins *ret);
        /* What a worker before this one found; with what does not fit, or is wrong, it does nothing. Returns how many were taken; f says of
         * one that was not why. Before there are steps. */
        uint32_t (*take_pins)(const WirePins *pins, Fault *f);
        /* Of a device. Any thread but those of the ranks: it may be bound to the device then. */
        int (*device_memory)(uint32_t device, uint64_t *ret_free, uint64_t *ret_total);
        /* In words what is wrong with one of them, after an operation failed. Whether it is gone from the bus: then with its
         * PCI address. Any thread. */
        bool (*device_error)(char *ret, size_t size);
        /* Which kernel does what, in lines. */
        const char *kernels;

        bool bf16_only; /* denoisers run in no other type */
        bool uses_driver; /* of a device, whose library makes more system calls (seccomp.h) */
} Backend;

/* The program's backend, the same at each call; quick, the devices are not looked at. NULL with f: no op of it runs on
 * this machine. */
const Backend *backend_get(Fault *f);
