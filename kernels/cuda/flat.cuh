/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Numbers of f32 in one line, each on its own: what the passes of the VAEs share. */

#include "kernels/cpu/check.h"
#include "kernels/cuda/context.cuh"

#define FLAT_THREADS 256u
#define FLAT_BLOCKS_MAX 16384u /* then a thread takes several */

static inline unsigned flat_blocks(uint64_t n) {
        uint64_t blocks = n / FLAT_THREADS + (n % FLAT_THREADS != 0);

        return blocks < FLAT_BLOCKS_MAX ? (unsigned) blocks : FLAT_BLOCKS_MAX;
}

__device__ static inline uint64_t flat_first(void) {
        return (uint64_t) blockIdx.x * FLAT_THREADS + threadIdx.x;
}

__device__ static inline uint64_t flat_step(void) {
        return (uint64_t) gridDim.x * FLAT_THREADS;
}
