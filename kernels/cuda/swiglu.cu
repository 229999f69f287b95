/* SPDX-License-Identifier: Apache-2.0 */
/* y = silu(gate) * up: kernels/cpu/swiglu.c, the same bits. */

#include "kernels/cuda/context.cuh"

__global__ static void swiglu_kernel(LkSwiglu a) {
        uint64_t row = ((uint64_t) blockIdx.x * ROW_THREADS + threadIdx.x) / ROW_LANES;

        if (row >= a.m)
                return;

        const void *gate = row_at(a.gate, a.type, row, a.gate_ld), *up = row_at(a.up, a.type, row, a.up_ld);
        void *y = row_at_mutable(a.y, a.type, row, a.y_ld);

        for (uint64_t i = threadIdx.x % ROW_LANES; i < a.n; i += ROW_LANES) {
                float g = number_get(gate, a.type, i);
                float s = number_round(__fdiv_rn(g, __fadd_rn(1.0f, number_exp(-g))), a.type);

                number_put(y, a.type, i, __fmul_rn(s, number_get(up, a.type, i)));
        }
}

extern "C" int lk_cuda_swiglu(LkContext *c, const LkSwiglu *a) {
        if (a->m == 0 || a->n == 0)
                return 0;
        if (row_blocks(a->m) == 0)
                return -EINVAL;

        swiglu_kernel<<<row_blocks(a->m), ROW_THREADS, 0, c->stream>>>(*a);
        return cuda_result(cudaGetLastError());
}
