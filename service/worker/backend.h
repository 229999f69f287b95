/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* What makes a worker program a CPU or a CUDA worker. Exactly one file of each program (worker-cpu.c,
 * worker-cuda.c) defines backend_get(); everything else in this folder is the same source for both. */

#include <stdint.h>

#include "kernels/ops.h"
#include "service/shared/wire.h"

typedef struct Backend {
        const char *program; /* "latent-worker-cpu" */
        const LkOps *ops;

        /* Fills up to WIRE_DEVICES_MAX descriptions for HELLO and returns how many. Reads /proc: call it
         * before the filter of system calls is on. */
        uint32_t (*devices)(WireDevice *ret_devices);

        /* Bytes that a step could take from its device now; 0 where that is not known. */
        uint64_t (*memory_available)(void);
} Backend;

/* The program's backend, made at the first call (from main(), before there are threads); NULL with f if this
 * machine lacks what the backend needs. */
const Backend *backend_get(Fault *f);
