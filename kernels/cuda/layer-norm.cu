/* SPDX-License-Identifier: Apache-2.0 */
/* Layer norm of a row: kernels/cpu/layer-norm.c, the same bits. Eight threads a row. */

#include "kernels/cuda/rows.cuh"

__global__ static void layer_norm_plain(LkLayerNorm a) {
        uint64_t row = ((uint64_t) blockIdx.x * ROW_THREADS + threadIdx.x) / ROW_LANES;
        unsigned lane = threadIdx.x % ROW_LANES;
        uint64_t n = row < a.m ? a.n : 0; /* whole warps take part in the sums */
        const void *x = row_at(a.x, a.type, n ? row : 0, a.x_ld);
        void *y = row_at_mutable(a.y, a.type, row, a.y_ld);
        float mean, factor, sum = 0;

        for (uint64_t i = lane; i < n; i += ROW_LANES)
                sum = __fadd_rn(sum, number_get(x, a.type, i));
        mean = __fdiv_rn(lanes_sum(sum), (float) a.n);

        sum = 0;
        for (uint64_t i = lane; i < n; i += ROW_LANES) {
                float d = __fsub_rn(number_get(x, a.type, i), mean);

                sum = __fmaf_rn(d, d, sum);
        }
        factor = row_factor(lanes_sum(sum), a.n, a.eps);

        for (uint64_t i = lane; i < n; i += ROW_LANES)
                number_put(y, a.type, i,
                        __fmaf_rn(__fmul_rn(__fsub_rn(number_get(x, a.type, i), mean), factor),
                                weight_get(a.weight.data, a.weight.type, i), weight_get(a.bias.data, a.bias.type, i)));
}

extern "C" int lk_cuda_layer_norm(LkContext *c, const LkLayerNorm *a) {
        if (a->m == 0 || a->n == 0)
                return 0;
        if (!check_activation_type(a->type) || !a->x || !a->y || a->x_ld < a->n || a->y_ld < a->n || !a->weight.data || a->weight.n != a->n ||
                !a->bias.data || a->bias.n != a->n || row_blocks(a->m) == 0)
                return -EINVAL;

        layer_norm_plain<<<row_blocks(a->m), ROW_THREADS, 0, c->stream>>>(*a);
        return cuda_result(cudaGetLastError());
}
