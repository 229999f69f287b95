/* SPDX-License-Identifier: Apache-2.0 */
/* Residual and RMS norm where the stream is f32 and what meets products is f16: kernels/cpu/norm.c, the same bits.
 *
 * Four rows are a block's, which goes through them piece by piece and keeps them: in registers for their factors, and in shared memory
 * for the warp that sums their squares, thread 8r + l as lane l of row r. That is a chain as long as the row, which the other blocks of the
 * processor hide. Rows that are not of pieces, or too wide, are gone through twice, by eight threads each; if many are under way, the second
 * time comes from memory again. */

#include "kernels/cuda/norm-half.cuh"

#define THREADS 128u
#define TOGETHER 16u /* numbers of a thread that are asked for before the first is used */
#define BATCH 4u     /* rows: lanes_sum() wants a whole warp */
#define WIDTH_MOST (512 * PIECE)

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

/* aligned: the weights are. */
template <bool ADD>
__global__ static void __launch_bounds__(THREADS) norm_half_plain(
        const __grid_constant__ LkNorm a, const __grid_constant__ LkResidual add, bool aligned) {
        const uint64_t row = ((uint64_t) blockIdx.x * THREADS + threadIdx.x) / ROW_LANES;
        const unsigned lane = threadIdx.x % ROW_LANES;
        const float factor = row_factor(lanes_sum(row < a.m ? lane_squares<ADD>(a, add, row, lane) : 0), a.n, a.eps);

        __syncwarp(); /* x of the row is there for all of its threads, and nobody wants add.y any more, which y may be */
        if (row >= a.m)
                return;

        const float *x = (const float *) row_at(a.x, LK_F32, row, a.x_ld);
        uint16_t *y = (uint16_t *) row_at_mutable(a.y, LK_F16, row, a.y_ld);

        for (uint64_t i = lane; i < a.n; i += ROW_LANES)
                y[i] = f16_from_f32(__fmul_rn(__fmul_rn(x[i], factor), weight_near(a.weight, aligned, i)));
}

/* Numbers of a row in shared memory: rows of a batch begin in different banks. */
__host__ __device__ static inline uint32_t batch_pitch(uint64_t n) {
        return (uint32_t) (n + 31) / 32 * 32 + ROW_LANES;
}

__device__ static inline void eight_load(const float *from, float *to) {
        *(float4 *) to = ((const float4 *) from)[0];
        *(float4 *) (to + 4) = ((const float4 *) from)[1];
}

__device__ static inline void eight_store(float *to, const float *from) {
        ((float4 *) to)[0] = *(const float4 *) from;
        ((float4 *) to)[1] = *(const float4 *) (from + 4);
}

/* v += gate * y of the batch's rows, of number `at` on, and to memory. */
__device__ static inline void batch_add(const LkNorm &a, const LkResidual &add, uint64_t first, uint32_t at, float (&v)[BATCH][PIECE]) {
        int32_t mods[BATCH] = {}, mod = -1;
        float gate[PIECE];
        uint4 y[BATCH];

#pragma unroll
        for (unsigned r = 0; r < BATCH; r++)
                if (add.mod && first + r < a.m)
                        mods[r] = add.mod_index[first + r];
#pragma unroll
        for (unsigned r = 0; r < BATCH; r++)
                y[r] = first + r < a.m ? *(const uint4 *) ((const uint16_t *) add.y + (first + r) * add.y_ld + at) : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (unsigned r = 0; r < BATCH; r++) {
                const uint32_t pairs[4] = {y[r].x, y[r].y, y[r].z, y[r].w};

                if (first + r >= a.m)
                        break;
                if (add.mod && mods[r] != mod) {
                        mod = mods[r];
                        eight_load((const float *) add.mod + (uint64_t) mod * add.mod_ld + add.gate_at + at, gate);
                }
#pragma unroll
                for (unsigned j = 0; j < PIECE; j++) {
                        const float u = j % 2 ? pair_high<LK_F16>(pairs[j / 2]) : pair_low<LK_F16>(pairs[j / 2]);

                        v[r][j] = __fadd_rn(v[r][j], add.mod ? __fmul_rn(gate[j], u) : u);
                }
                eight_store((float *) a.x + (first + r) * a.x_ld + at, v[r]);
        }
}

/* By the first warp: what the rows are normed with. */
__device__ static inline void batch_factors(const LkNorm &a, const float *rows, float *factors) {
        const float *row = rows + threadIdx.x / ROW_LANES * batch_pitch(a.n) + threadIdx.x % ROW_LANES;
        const uint32_t n = (uint32_t) a.n;
        float sum = 0;

        for (uint32_t begin = 0; begin < n; begin += TOGETHER * ROW_LANES) {
                float x[TOGETHER];

#pragma unroll
                for (unsigned j = 0; j < TOGETHER; j++)
                        x[j] = begin + j * ROW_LANES < n ? row[begin + j * ROW_LANES] : 0;
#pragma unroll
                for (unsigned j = 0; j < TOGETHER; j++)
                        sum = __fmaf_rn(x[j], x[j], sum); /* +0 behind the end */
        }
        sum = lanes_sum(sum);
        if (threadIdx.x % ROW_LANES == 0)
                factors[threadIdx.x / ROW_LANES] = row_factor(sum, a.n, a.eps);
}

/* pieces: of f16 or bf16, in pieces of 16 bytes. */
__device__ static inline void weights_load(const LkVector &w, bool pieces, uint32_t at, float (&to)[PIECE]) {
        if (pieces) {
                const uint4 p = *(const uint4 *) ((const uint16_t *) w.data + at);
                const uint32_t pairs[4] = {p.x, p.y, p.z, p.w};

#pragma unroll
                for (unsigned j = 0; j < PIECE; j++) {
                        const uint32_t pair = pairs[j / 2];

                        to[j] = w.type == LK_F16 ? (j % 2 ? pair_high<LK_F16>(pair) : pair_low<LK_F16>(pair)) : (j % 2 ? bf16_high(pair) : bf16_low(pair));
                }
                return;
        }
#pragma unroll
        for (unsigned j = 0; j < PIECE; j++)
                to[j] = weight_get(w.data, w.type, at + j);
}

template <bool ADD>
__global__ static void __launch_bounds__(WIDTH_MOST / PIECE) norm_half_pieces(
        const __grid_constant__ LkNorm a, const __grid_constant__ LkResidual add, bool weight_pieces) {
        extern __shared__ float4 raw[];
        __shared__ float factors[BATCH];
        const uint64_t first = (uint64_t) blockIdx.x * BATCH;
        const uint32_t at = threadIdx.x * PIECE;
        const bool mine = at < a.n;
        float v[BATCH][PIECE] = {}, *rows = (float *) raw;

        if (mine) {
#pragma unroll
                for (unsigned r = 0; r < BATCH; r++)
                        if (first + r < a.m)
                                eight_load((const float *) a.x + (first + r) * a.x_ld + at, v[r]);
                if (ADD)
                        batch_add(a, add, first, at, v);
#pragma unroll
                for (unsigned r = 0; r < BATCH; r++)
                        eight_store(rows + r * batch_pitch(a.n) + at, v[r]);
        }
        __syncthreads(); /* nobody wants add.y any more either, which y may be */
        if (threadIdx.x < 32)
                batch_factors(a, rows, factors);

        float w[PIECE];

        if (mine)
                weights_load(a.weight, weight_pieces, at, w);
        __syncthreads();
#pragma unroll
        for (unsigned r = 0; r < BATCH; r++) {
                uint32_t p[PIECE];

                if (!mine || first + r >= a.m)
                        break;
#pragma unroll
                for (unsigned j = 0; j < PIECE; j++)
                        p[j] = f16_from_f32(__fmul_rn(__fmul_rn(v[r][j], factors[r]), w[j]));
                *(uint4 *) ((uint16_t *) a.y + (first + r) * a.y_ld + at) =
                        make_uint4(p[0] | p[1] << 16, p[2] | p[3] << 16, p[4] | p[5] << 16, p[6] | p[7] << 16);
        }
}

static bool has_pieces(const LkNorm *a) {
        const LkResidual *add = a->add;

        return a->n <= WIDTH_MOST && a->n % PIECE == 0 && ((uintptr_t) a->x | (uintptr_t) a->y) % 16 == 0 && a->x_ld % 4 == 0 && a->y_ld % PIECE == 0 &&
               (!add || (add->y_type == LK_F16 && (uintptr_t) add->y % 16 == 0 && add->y_ld % PIECE == 0 &&
                                (!add->mod || ((uintptr_t) add->mod % 16 == 0 && add->mod_ld % 4 == 0 && add->gate_at % 4 == 0))));
}

template <bool ADD> static int launch(LkContext *c, const LkNorm *a) {
        const bool pieces = has_pieces(a), aligned = (uintptr_t) a->weight.data % lk_type_size(a->weight.type) == 0;
        const uint64_t rows = pieces ? BATCH : THREADS / ROW_LANES, blocks = (a->m + rows - 1) / rows;
        const unsigned shared = BATCH * batch_pitch(a->n) * (unsigned) sizeof(float);
        const LkResidual none = {}, *add = ADD ? a->add : &none;
        int r;

        if (blocks > GRID_X_MAX)
                return -EINVAL;
        if (!pieces) {
                norm_half_plain<ADD><<<(unsigned) blocks, THREADS, 0, c->stream>>>(*a, *add, aligned);
                return cuda_result(cudaGetLastError());
        }
        r = cuda_result(cudaFuncSetAttribute(norm_half_pieces<ADD>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int) shared));
        if (r < 0)
                return r;
        norm_half_pieces<ADD><<<(unsigned) blocks, row_threads(a->n / PIECE, WIDTH_MOST / PIECE), shared, c->stream>>>(
                *a, *add, a->weight.type != LK_F32 && (uintptr_t) a->weight.data % 16 == 0);
        return cuda_result(cudaGetLastError());
}

int norm_half(LkContext *c, const LkNorm *a) {
        return a->add ? launch<true>(c, a) : launch<false>(c, a);
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
