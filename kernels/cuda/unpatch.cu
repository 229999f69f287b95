/* SPDX-License-Identifier: Apache-2.0 */
/* Pixels of tokens to where they belong: kernels/cpu/unpatch.c. A thread for each pixel. */

#include "kernels/cpu/check.h"
#include "kernels/cuda/context.cuh"

#define THREADS 256u

__global__ static void __launch_bounds__(THREADS) unpatch_kernel(const __grid_constant__ LkUnpatch a, uint64_t pixels) {
        const uint64_t at = (uint64_t) blockIdx.x * THREADS + threadIdx.x, width = a.w * a.patch[2], height = a.h * a.patch[1];
        const uint64_t x = at % width, y = at / width % height, frame = at / width / height;
        const uint64_t token = (frame / a.patch[0] * a.h + y / a.patch[1]) * a.w + x / a.patch[2];
        const uint64_t line = frame % a.patch[0] * a.patch[1] + y % a.patch[1];
        const float *from = a.x + token * a.x_ld + line * a.patch[2] + x % a.patch[2];

        if (at >= pixels)
                return;
        for (uint32_t c = 0; c < a.channels; c++)
                a.y[at * a.channels + c] = from[(uint64_t) c * a.patch[0] * a.patch[1] * a.patch[2]];
}

extern "C" int lk_cuda_unpatch(LkContext *c, const LkUnpatch *a) {
        uint64_t pixels, blocks;

        if (!c || !a || !check_unpatch(a))
                return -EINVAL;
        pixels = a->t * a->h * a->w * a->patch[0] * a->patch[1] * a->patch[2];
        blocks = (pixels + THREADS - 1) / THREADS;
        if (blocks > GRID_X_MAX)
                return -EINVAL;
        if (pixels == 0)
                return 0;

        unpatch_kernel<<<(unsigned) blocks, THREADS, 0, c->stream>>>(*a, pixels);
        return cuda_result(cudaGetLastError());
}
