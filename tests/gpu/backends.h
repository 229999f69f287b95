/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* A context of each backend for tests that hold CUDA against the CPU. Included once a program. */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "kernels/cpu/cpu.h"
#include "kernels/cuda/cuda.h"

static LkContext *gpu, *cpu; /* gpu: NULL without a device, and tests that need it skip */

static int backends_setup(void **state) {
        int r = lk_cuda_ops()->context_new(0, &gpu);

        if (r < 0) {
                gpu = NULL;
                print_message("# no CUDA device: %s\n", strerror(-r));
        }
        return lk_cpu_ops(LK_CPU_AUTO)->context_new(0, &cpu);
}

static int backends_teardown(void **state) {
        lk_cuda_ops()->context_free(gpu);
        lk_cpu_ops(LK_CPU_AUTO)->context_free(cpu);
        return 0;
}
