/* SPDX-License-Identifier: Apache-2.0 */
/* x += gate * y: kernels/cpu/residual.c, the same bits. */

#include "kernels/cuda/context.cuh"

__global__ static void residual_kernel(LkResidual a) {
        uint64_t row = ((uint64_t) blockIdx.x * ROW_THREADS + threadIdx.x) / ROW_LANES;

        if (row >= a.m)
                return;

        const void *y = row_at(a.y, a.type, row, a.y_ld), *gate = NULL;
        void *x = row_at_mutable(a.x, a.type, row, a.x_ld);

        if (a.mod)
                gate = row_at(row_at(a.mod, a.type, (uint64_t) a.mod_index[row], a.mod_ld), a.type, 1, a.gate_at);

        for (uint64_t i = threadIdx.x % ROW_LANES; i < a.n; i += ROW_LANES) {
                float v = number_get(y, a.type, i);

                if (gate)
                        v = number_round(__fmul_rn(number_get(gate, a.type, i), v), a.type);
                number_put(x, a.type, i, __fadd_rn(number_get(x, a.type, i), v));
        }
}

extern "C" int lk_cuda_residual(LkContext *c, const LkResidual *a) {
        if (a->m == 0 || a->n == 0)
                return 0;
        if (row_blocks(a->m) == 0)
                return -EINVAL;

        residual_kernel<<<row_blocks(a->m), ROW_THREADS, 0, c->stream>>>(*a);
        return cuda_result(cudaGetLastError());
}
