/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* A context of each backend for tests that hold CUDA against the CPU, and numbers that are the same in each run. Included once a
 * program. */

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "kernels/cpu/cpu.h"
#include "kernels/cuda/cuda.h"

static LkContext *gpu, *cpu; /* gpu: NULL without a device, and tests that need it skip */
static uint64_t seed = 42;

static inline uint32_t next(void) {
        seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        return (uint32_t) (seed >> 32);
}

/* LATENT_TEST_PART=1: fewer and smaller cases, for tools that slow everything down (`sanitize`). */
static inline bool is_part(void) {
        return getenv("LATENT_TEST_PART") != NULL;
}

static inline void need_device(void) {
        if (!gpu)
                skip();
}

/* A device that is there and fails is no reason to skip. */
static int backends_setup(void **state) {
        int r = lk_cuda_ops()->context_new(0, &gpu);

        if (r == -ENODEV) {
                gpu = NULL;
                print_message("# no CUDA device\n");
        } else if (r < 0) {
                print_error("The CUDA device cannot be used: %s\n", strerror(-r));
                return -1;
        }
        return lk_cpu_ops(LK_CPU_AUTO)->context_new(0, &cpu);
}

static int backends_teardown(void **state) {
        gpu = lk_cuda_ops()->context_free(gpu);
        cpu = lk_cpu_ops(LK_CPU_AUTO)->context_free(cpu);
        return 0;
}
