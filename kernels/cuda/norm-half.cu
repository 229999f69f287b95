/* SPDX-License-Identifier: Apache-2.0 */
/* Residual and RMS norm where the stream is f32 and what meets products is f16: kernels/cpu/norm.c, the same bits.
 *
 * Eight threads have a row, and a warp four: thread 8r + l is lane l of its row's sum, so that a warp's reads are whole sectors. A chain of
 * sums is as long as a row has pieces, but so many rows are under way that the memory is what all wait for. */

#include "kernels/cuda/norm-half.cuh"

#define THREADS 128u
#define TOGETHER 16u /* numbers of a thread that are asked for before the first is used */

/* A weight at its own address, or at any byte. */
__device__ static inline float weight_near(const LkVector &w, bool aligned, uint64_t i) {
        if (!aligned)
                return weight_get(w.data, w.type, i);
        if (w.type == LK_F32)
                return ((const float *) w.data)[i];

        const uint16_t h = ((const uint16_t *) w.data)[i];

        return w.type == LK_F16 ? f32_from_f16(h) : __uint_as_float((uint32_t) h << 16);
}

/* The lane's numbers of a row: x += gate * y if asked for, and the sum of their squares. */
template <bool ADD> __device__ static inline float lane_squares(const LkNorm &a, const LkResidual &add, uint64_t row, unsigned lane) {
        float *x = (float *) row_at_mutable((void *) a.x, LK_F32, row, a.x_ld), sum = 0;
        const LkType y_type = add.y_type ? add.y_type : LK_F32;
        const void *y = ADD ? row_at(add.y, y_type, row, add.y_ld) : NULL;
        const float *gate = ADD && add.mod ? (const float *) add.mod + (uint64_t) add.mod_index[row] * add.mod_ld + add.gate_at : NULL;

        for (uint64_t begin = lane; begin < a.n; begin += TOGETHER * ROW_LANES) {
                float v[TOGETHER], u[TOGETHER];

#pragma unroll
                for (unsigned j = 0; j < TOGETHER; j++) {
                        const uint64_t i = begin + j * ROW_LANES;

                        v[j] = i < a.n ? x[i] : 0;
                        if (!ADD || i >= a.n)
                                continue;
                        u[j] = y_type == LK_F16 ? f32_from_f16(((const uint16_t *) y)[i]) : ((const float *) y)[i];
                        if (gate)
                                u[j] = __fmul_rn(gate[i], u[j]);
                }
#pragma unroll
                for (unsigned j = 0; j < TOGETHER; j++) {
                        const uint64_t i = begin + j * ROW_LANES;

                        if (ADD && i < a.n) {
                                v[j] = __fadd_rn(v[j], u[j]);
                                x[i] = v[j];
                        }
                        sum = __fmaf_rn(v[j], v[j], sum); /* +0 behind the end */
                }
        }
        return sum;
}

/* pieces: x and y are moved in pieces of 16 bytes. */
template <bool ADD>
__global__ static void __launch_bounds__(THREADS) norm_half_kernel(
        const __grid_constant__ LkNorm a, const __grid_constant__ LkResidual add, bool pieces, bool aligned) {
        const uint64_t row = ((uint64_t) blockIdx.x * THREADS + threadIdx.x) / ROW_LANES;
        const unsigned lane = threadIdx.x % ROW_LANES;
        const float factor = row_factor(lanes_sum(row < a.m ? lane_squares<ADD>(a, add, row, lane) : 0), a.n, a.eps);

        __syncwarp(); /* x of the row is there for all of its threads, and nobody wants add.y any more, which y may be */
        if (row >= a.m)
                return;

        const float *x = (const float *) row_at(a.x, LK_F32, row, a.x_ld);
        uint16_t *y = (uint16_t *) row_at_mutable(a.y, LK_F16, row, a.y_ld);

        if (!pieces) {
                for (uint64_t i = lane; i < a.n; i += ROW_LANES)
                        y[i] = f16_from_f32(__fmul_rn(__fmul_rn(x[i], factor), weight_near(a.weight, aligned, i)));
                return;
        }
#pragma unroll 2
        for (uint64_t i = lane * PIECE; i < a.n; i += ROW_LANES * PIECE) {
                const float4 low = *(const float4 *) (x + i), high = *(const float4 *) (x + i + 4);
                const float v[PIECE] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
                uint32_t p[PIECE];

#pragma unroll
                for (unsigned j = 0; j < PIECE; j++)
                        p[j] = f16_from_f32(__fmul_rn(__fmul_rn(v[j], factor), weight_near(a.weight, aligned, i + j)));
                *(uint4 *) (y + i) = make_uint4(p[0] | p[1] << 16, p[2] | p[3] << 16, p[4] | p[5] << 16, p[6] | p[7] << 16);
        }
}

int norm_half(LkContext *c, const LkNorm *a) {
        const bool pieces = ((uintptr_t) a->x | (uintptr_t) a->y) % 16 == 0 && a->x_ld % 4 == 0 && a->y_ld % PIECE == 0 && a->n % PIECE == 0;
        const bool aligned = (uintptr_t) a->weight.data % lk_type_size(a->weight.type) == 0;
        const uint64_t rows = THREADS / ROW_LANES, blocks = (a->m + rows - 1) / rows;
        const LkResidual none = {};

        if (blocks > GRID_X_MAX)
                return -EINVAL;
        if (a->add)
                norm_half_kernel<true><<<(unsigned) blocks, THREADS, 0, c->stream>>>(*a, *a->add, pieces, aligned);
        else
                norm_half_kernel<false><<<(unsigned) blocks, THREADS, 0, c->stream>>>(*a, none, pieces, aligned);
        return cuda_result(cudaGetLastError());
}

/* A block for a row, eight numbers a thread. */
__global__ static void __launch_bounds__(256) residual_half_pieces(const __grid_constant__ LkResidual a) {
        float *x = (float *) row_at_mutable(a.x, LK_F32, blockIdx.x, a.x_ld);
        const void *y = row_at(a.y, LK_F16, blockIdx.x, a.y_ld);
        const float *gate = a.mod ? (const float *) a.mod + (uint64_t) a.mod_index[blockIdx.x] * a.mod_ld + a.gate_at : NULL;

        for (uint32_t i = threadIdx.x; i < a.n / PIECE; i += blockDim.x) {
                const uint4 p = piece_load(y, i);
                const uint32_t pairs[4] = {p.x, p.y, p.z, p.w};
                float4 v[2] = {((const float4 *) x)[2 * i], ((const float4 *) x)[2 * i + 1]}, g[2];
                float *to = (float *) v, *gates = (float *) g;

                if (gate)
                        g[0] = ((const float4 *) gate)[2 * i], g[1] = ((const float4 *) gate)[2 * i + 1];
#pragma unroll
                for (unsigned j = 0; j < PIECE; j++) {
                        float u = j % 2 ? pair_high<LK_F16>(pairs[j / 2]) : pair_low<LK_F16>(pairs[j / 2]);

                        to[j] = __fadd_rn(to[j], gate ? __fmul_rn(gates[j], u) : u);
                }
                ((float4 *) x)[2 * i] = v[0];
                ((float4 *) x)[2 * i + 1] = v[1];
        }
}

int residual_half(LkContext *c, const LkResidual *a) {
        if (a->m > GRID_X_MAX || a->n % PIECE != 0 || ((uintptr_t) a->x | (uintptr_t) a->y) % 16 != 0 || a->x_ld % 4 != 0 ||
                a->y_ld % PIECE != 0 || (a->mod && ((uintptr_t) a->mod % 16 != 0 || a->mod_ld % 4 != 0 || a->gate_at % 4 != 0)))
                return -EOPNOTSUPP;

        residual_half_pieces<<<(unsigned) a->m, row_threads(a->n / PIECE, 256), 0, c->stream>>>(*a);
        return cuda_result(cudaGetLastError());
}
