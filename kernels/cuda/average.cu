/* SPDX-License-Identifier: Apache-2.0 */
/* The mean of a few arrays: kernels/cpu/average.c, the same bits. */

#include "kernels/cuda/flat.cuh"

__global__ static void __launch_bounds__(FLAT_THREADS) average_flat(const __grid_constant__ LkAverage a) {
        for (uint64_t i = flat_first(); i < a.n; i += flat_step()) {
                float sum = a.x[0][i];

                for (uint32_t k = 1; k < a.count; k++)
                        sum = __fadd_rn(sum, a.x[k][i]);
                a.y[i] = __fdiv_rn(sum, (float) a.count);
        }
}

extern "C" int lk_cuda_average(LkContext *c, const LkAverage *a) {
        if (!c || !a || !check_average(a))
                return -EINVAL;
        if (a->n == 0)
                return 0;

        average_flat<<<flat_blocks(a->n), FLAT_THREADS, 0, c->stream>>>(*a);
        return cuda_result(cudaGetLastError());
}
