/* SPDX-License-Identifier: Apache-2.0 */
/* RMS norm of a row, optionally modulated: kernels/cpu/norm.c, the same bits. */

#include "kernels/cuda/context.cuh"

__global__ static void norm_kernel(LkNorm a, LkType mod_type) {
        uint64_t row = ((uint64_t) blockIdx.x * ROW_THREADS + threadIdx.x) / ROW_LANES;
        unsigned lane = threadIdx.x % ROW_LANES;
        uint64_t n = row < a.m ? a.n : 0; /* whole warps take part in the sum */
        const void *x = row_at(a.x, a.type, n ? row : 0, a.x_ld), *shift = NULL, *scale = NULL;
        void *y = row_at_mutable(a.y, a.type, row, a.y_ld);
        float factor = row_factor(row_sum_squares(x, a.type, n, lane), a.n, a.eps);

        if (a.mod && n) {
                const void *mod = row_at(a.mod, mod_type, (uint64_t) a.mod_index[row], a.mod_ld);

                shift = row_at(mod, mod_type, 1, a.shift_at);
                scale = row_at(mod, mod_type, 1, a.scale_at);
        }

        for (uint64_t i = lane; i < n; i += ROW_LANES) {
                float h = __fmul_rn(number_get(x, a.type, i), factor);

                h = __fmul_rn(a.round_first ? number_round(h, a.type) : h, weight_get(a.weight.data, a.weight.type, i));
                if (a.mod)
                        h = __fmaf_rn(number_round(h, a.type), __fadd_rn(1.0f, number_get(scale, mod_type, i)),
                                number_get(shift, mod_type, i));
                number_put(y, a.type, i, h);
        }
}

extern "C" int lk_cuda_norm(LkContext *c, const LkNorm *a) {
        LkType mod_type = a->mod_type ? a->mod_type : a->type;

        if (a->m == 0 || a->n == 0)
                return 0;
        if (row_blocks(a->m) == 0 || !a->weight.data)
                return -EINVAL;

        norm_kernel<<<row_blocks(a->m), ROW_THREADS, 0, c->stream>>>(*a, mod_type);
        return cuda_result(cudaGetLastError());
}
