/* SPDX-License-Identifier: Apache-2.0 */
/* f32 <-> bf16: kernels/cpu/convert.c, the same bits. */

#include "kernels/cuda/context.cuh"

__global__ static void convert_kernel(LkConvert a) {
        uint64_t row = ((uint64_t) blockIdx.x * ROW_THREADS + threadIdx.x) / ROW_LANES;

        if (row >= a.m)
                return;

        const void *x = row_at(a.x, a.x_type, row, a.x_ld);
        void *y = row_at_mutable(a.y, a.y_type, row, a.y_ld);

        for (uint64_t i = threadIdx.x % ROW_LANES; i < a.n; i += ROW_LANES)
                number_put(y, a.y_type, i, number_get(x, a.x_type, i));
}

extern "C" int lk_cuda_convert(LkContext *c, const LkConvert *a) {
        if (a->m == 0 || a->n == 0)
                return 0;
        if (row_blocks(a->m) == 0 || (a->x_type != LK_F32 && a->x_type != LK_BF16) || (a->y_type != LK_F32 && a->y_type != LK_BF16))
                return -EINVAL;

        convert_kernel<<<row_blocks(a->m), ROW_THREADS, 0, c->stream>>>(*a);
        return cuda_result(cudaGetLastError());
}
