/* SPDX-License-Identifier: Apache-2.0 */
/* Per-head RMS norm, then split-half rotation, in place: kernels/cpu/qk-norm-rope.c, the same bits. A "row" of threads is a head. */

#include "kernels/cuda/context.cuh"

#define HEAD_DIM_MAX 256u

/* Number i of a head, normed if there is a weight. */
__device__ static float normed(const LkQkNormRope &a, const void *x, uint64_t i, float factor) {
        float v = number_get(x, a.type, i);

        if (!a.weight.data)
                return v;
        return number_round(__fmul_rn(__fmul_rn(v, factor), weight_get(a.weight.data, a.weight.type, i)), a.type);
}

__global__ static void qk_norm_rope_kernel(LkQkNormRope a) {
        uint64_t at = ((uint64_t) blockIdx.x * ROW_THREADS + threadIdx.x) / ROW_LANES;
        unsigned lane = threadIdx.x % ROW_LANES;
        bool inside = at < a.m * a.heads;
        uint64_t row = inside ? at / a.heads : 0, n = inside ? a.head_dim : 0;
        void *x = row_at_mutable(row_at_mutable(a.x, a.type, row, a.x_ld), a.type, at % a.heads, a.head_dim);
        float factor = row_factor(row_sum_squares(x, a.type, n, lane), a.head_dim, a.eps);
        uint64_t pairs = a.cos ? a.rope_dims : 0;

        /* Each lane rotates whole pairs, so no lane waits for another's normed number. */
        for (uint64_t i = lane; i < n; i += ROW_LANES) {
                if (i >= pairs && i < 2 * pairs)
                        continue;

                float p = normed(a, x, i, factor);

                if (i < pairs) {
                        uint64_t j = i + pairs;
                        float q = normed(a, x, j, factor);
                        float c = a.cos[row * pairs + i], s = a.sin[row * pairs + i];

                        number_put(x, a.type, j, __fmaf_rn(q, c, __fmul_rn(p, s)));
                        p = __fmaf_rn(p, c, -__fmul_rn(q, s));
                }
                number_put(x, a.type, i, p);
        }
}

extern "C" int lk_cuda_qk_norm_rope(LkContext *c, const LkQkNormRope *a) {
        if (a->m == 0 || a->heads == 0)
                return 0;
        if (a->head_dim == 0 || a->head_dim % 8 || a->head_dim > HEAD_DIM_MAX || !a->weight.data || !a->cos != !a->sin ||
                (a->cos && a->rope_dims > a->head_dim / 2) || a->m > UINT64_MAX / a->heads || row_blocks(a->m * a->heads) == 0)
                return -EINVAL;

        qk_norm_rope_kernel<<<row_blocks(a->m * a->heads), ROW_THREADS, 0, c->stream>>>(*a);
        return cuda_result(cudaGetLastError());
}
