/* SPDX-License-Identifier: Apache-2.0 */
/* Per-head RMS norm, then split-half rotation, in place: kernels/cpu/qk-norm-rope.c, the same bits.
 *
 * Fast way: a warp has four heads at a time. Thread 4l + h ends up with lane l of head h, all its steps (element 8s + l is step s), so
 * that sums, norm and rotation stay inside a thread. Loads and stores see a pair of neighbouring lanes instead; the 8 x 8 transposition
 * of 16-bit numbers that a warp can do in registers goes from one to the other: a matrix is two steps of four heads. */

#include "kernels/cuda/rows.cuh"

#define HEAD_DIM_MAX 256u
#define TOGETHER 4u /* heads of a warp */

__device__ static inline uint32_t transposed(uint32_t x) {
        uint32_t y;

        asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
        return y;
}

/* Which row of cos and sin a row turns by. */
__device__ static inline uint64_t turn_of(const LkQkNormRope &a, uint64_t row) {
        return a.period > 0 ? row % a.period : row;
}

/* A thread's part of four heads in memory order, before or after the transposition. */
template <int STEPS> __device__ static inline void heads_load(uint32_t (&v)[STEPS / 2], const uint8_t *x, bool inside) {
#pragma unroll
        for (int i = 0; i < STEPS / 2; i++)
                v[i] = inside ? *(const uint32_t *) (x + i * 32) : 0;
}

/* Norm and rotation of the thread's lane of a head; HALF: steps of the rotation's first half. */
template <int STEPS, int HALF, LkType TYPE>
__device__ static inline void lane_rope(
        uint32_t (&pair)[STEPS / 2], float factor, const float *w, const float *cosines, const float *sines) {
        float v[STEPS];

#pragma unroll
        for (int i = 0; i < STEPS; i++)
                v[i] = __fmul_rn(__fmul_rn(i % 2 ? pair_high<TYPE>(pair[i / 2]) : pair_low<TYPE>(pair[i / 2]), factor), w[i]);
#pragma unroll
        for (int i = 0; i < STEPS / 2; i++) {
                pair[i] = pair_round_to<TYPE>(v[2 * i], v[2 * i + 1]);
                v[2 * i] = pair_low<TYPE>(pair[i]);
                v[2 * i + 1] = pair_high<TYPE>(pair[i]);
        }
#pragma unroll
        for (int i = 0; i < HALF; i++) {
                float p = v[i], q = v[i + HALF];

                v[i] = __fmaf_rn(p, cosines[i], -__fmul_rn(q, sines[i]));
                v[i + HALF] = __fmaf_rn(q, cosines[i], __fmul_rn(p, sines[i]));
        }
#pragma unroll
        for (int i = 0; i < HALF; i++)
                pair[i] = pair_round_to<TYPE>(v[2 * i], v[2 * i + 1]);
}

template <int STEPS, LkType TYPE> __device__ static inline float lane_sum(const uint32_t (&pair)[STEPS / 2]) {
        float sum = 0;

#pragma unroll
        for (int i = 0; i < STEPS / 2; i++) {
                float a = pair_low<TYPE>(pair[i]), b = pair_high<TYPE>(pair[i]);

                sum = __fmaf_rn(a, a, sum);
                sum = __fmaf_rn(b, b, sum);
        }
        sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 16));
        sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 8));
        return __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 4));
}

/* A warp for a row at a time. Rows behind it are not prefetched: those of all warps, read and written, are more than the cache holds. */
template <int STEPS, int HALF, LkType TYPE>
__global__ static void __launch_bounds__(256, HALF > 6 ? 2 : HALF > 3 ? 3 : 4) qk_pieces(LkQkNormRope a) {
        const unsigned lane = threadIdx.x % 32, l = lane / 4; /* l: the lane of ops.h, after the transposition */
        const uint64_t warps = (uint64_t) gridDim.x * 8;
        float w[STEPS], cosines[HALF + 1], sines[HALF + 1];

#pragma unroll
        for (int i = 0; i < STEPS; i++)
                w[i] = weight_get(a.weight.data, a.weight.type, (uint64_t) i * 8 + l);

        for (uint64_t row = blockIdx.x * UINT64_C(8) + threadIdx.x / 32; row < a.m; row += warps) {
                uint8_t *x = (uint8_t *) row_at_mutable(a.x, TYPE, row, a.x_ld) +
                             (lane / 8 * STEPS + lane / 4 % 2) * 16 + lane % 4 * 4;
                const uint64_t turn = turn_of(a, row);
                uint32_t next[STEPS / 2];

                heads_load<STEPS>(next, x, lane / 8 < a.heads);
#pragma unroll
                for (int i = 0; i < HALF; i++) {
                        cosines[i] = a.cos[turn * (HALF * 8) + i * 8 + l];
                        sines[i] = a.sin[turn * (HALF * 8) + i * 8 + l];
                }
                for (uint32_t head = lane / 8; head - lane / 8 < a.heads; head += TOGETHER, x += TOGETHER * STEPS * 16) {
                        uint32_t pair[STEPS / 2], seen = 0;

#pragma unroll
                        for (int i = 0; i < STEPS / 2; i++)
                                pair[i] = transposed(next[i]);
                        heads_load<STEPS>(next, x + TOGETHER * STEPS * 16, head + TOGETHER < a.heads);
                        lane_rope<STEPS, HALF, TYPE>(pair, row_factor(lane_sum<STEPS, TYPE>(pair), STEPS * 8, a.eps), w, cosines, sines);
#pragma unroll
                        for (int i = 0; i < STEPS / 2; i++)
                                seen = pair_watch_of<TYPE>(pair[i], seen);
                        if (!watch_clean(seen))
#pragma unroll
                                for (int i = 0; i < STEPS / 2; i++)
                                        pair[i] = pair_settled_of<TYPE>(pair[i]);
                        __syncwarp();
#pragma unroll
                        for (int i = 0; i < STEPS / 2; i++)
                                pair[i] = transposed(pair[i]);
                        if (head < a.heads)
#pragma unroll
                                for (int i = 0; i < STEPS / 2; i++)
                                        *(uint32_t *) (x + i * 32) = pair[i];
                }
        }
}

/* Number i of a head, normed if there is a weight. */
__device__ static float normed(const LkQkNormRope &a, const void *x, uint64_t i, float factor) {
        float v = number_get(x, a.type, i);

        if (!a.weight.data)
                return v;
        return number_round_to(__fmul_rn(__fmul_rn(v, factor), weight_get(a.weight.data, a.weight.type, i)), a.type);
}

/* Eight threads for a head. Each rotates whole pairs, so none waits for another's normed number. */
__global__ static void qk_plain(LkQkNormRope a) {
        uint64_t at = ((uint64_t) blockIdx.x * ROW_THREADS + threadIdx.x) / ROW_LANES;
        unsigned lane = threadIdx.x % ROW_LANES;
        bool inside = at < a.m * a.heads;
        uint64_t row = inside ? at / a.heads : 0, n = inside ? a.head_dim : 0;
        void *x = row_at_mutable(row_at_mutable(a.x, a.type, row, a.x_ld), a.type, at % a.heads, a.head_dim);
        float factor = row_factor(row_sum_squares(x, a.type, n, lane), a.head_dim, a.eps);
        uint64_t pairs = a.cos ? a.rope_dims : 0;

        for (uint64_t i = lane; i < n; i += ROW_LANES) {
                if (i >= pairs && i < 2 * pairs)
                        continue;

                float p = normed(a, x, i, factor);

                if (i < pairs) {
                        uint64_t j = i + pairs;
                        float q = normed(a, x, j, factor);
                        float c = a.cos[turn_of(a, row) * pairs + i], s = a.sin[turn_of(a, row) * pairs + i];

                        number_put_as(x, a.type, j, __fmaf_rn(q, c, __fmul_rn(p, s)));
                        p = __fmaf_rn(p, c, -__fmul_rn(q, s));
                }
                number_put_as(x, a.type, i, p);
        }
}

template <int STEPS, int HALF, LkType TYPE> static int launch_pieces(LkContext *c, const LkQkNormRope *a) {
        uint64_t most = (a->m + 7) / 8;
        unsigned blocks;
        int r;

        r = row_grid(c, (const void *) qk_pieces<STEPS, HALF, TYPE>, 256, 0, &blocks);
        if (r < 0)
                return r;
        qk_pieces<STEPS, HALF, TYPE><<<(unsigned) (most < blocks ? most : blocks), 256, 0, c->stream>>>(*a);
        return cuda_result(cudaGetLastError());
}

static bool is_known(const LkQkNormRope *a, uint32_t pairs) {
        return check_type(a->type) && a->x && a->head_dim > 0 && a->head_dim % 4 == 0 && a->head_dim <= HEAD_DIM_MAX &&
                a->x_ld >= (uint64_t) a->heads * a->head_dim && (a->weight.data ? a->weight.n == a->head_dim : a->cos != NULL) &&
                !a->cos == !a->sin && pairs <= a->head_dim / 2 && a->m <= UINT64_MAX / a->heads && row_blocks(a->m * a->heads) > 0;
}

extern "C" int lk_cuda_qk_norm_rope(LkContext *c, const LkQkNormRope *a) {
        uint32_t pairs = a->cos ? a->rope_dims : 0;

        if (a->m == 0 || a->heads == 0)
                return 0;
        if (!is_known(a, pairs))
                return -EINVAL;

        if (a->type == LK_BF16 && a->weight.data && row_pieces(a->x, a->x_ld, a->head_dim)) {
                if (a->head_dim == 128 && pairs == 0)
                        return launch_pieces<16, 0, LK_BF16>(c, a);
                if (a->head_dim == 128 && pairs == 48)
                        return launch_pieces<16, 6, LK_BF16>(c, a);
                if (a->head_dim == 128 && pairs == 64)
                        return launch_pieces<16, 8, LK_BF16>(c, a);
                if (a->head_dim == 64 && pairs == 0)
                        return launch_pieces<8, 0, LK_BF16>(c, a);
                if (a->head_dim == 64 && pairs == 24)
                        return launch_pieces<8, 3, LK_BF16>(c, a);
        }
        if (a->type == LK_F16 && a->weight.data && row_pieces(a->x, a->x_ld, a->head_dim) && a->head_dim == 64 && pairs == 24)
                return launch_pieces<8, 3, LK_F16>(c, a);
        qk_plain<<<row_blocks(a->m * a->heads), ROW_THREADS, 0, c->stream>>>(*a);
        return cuda_result(cudaGetLastError());
}
