/* SPDX-License-Identifier: Apache-2.0 */
/* Products in f32 with the CPU's bits: one chain of fma over ascending k for each output. Types and alignment end on the way to shared
 * memory. 256 threads; a thread has TM rows in fours and TN columns in pairs, apart so that a warp's reads meet no bank twice. Eight rows
 * and columns want as many numbers of shared memory as Hopper's processors can have while they multiply them; where there are rows for it,
 * a thread has sixteen. */

#include "kernels/cuda/product.cuh"

#define THREADS 256u
#define STEP 16u /* of k */

typedef struct F32Args {
        LkGemm g;
        bool x_vectors, w_vectors; /* eight numbers can be read at a time */
        uint32_t m_tiles, n_tiles;
} F32Args;

/* Numbers k .. k + 7 of a row; 0 beyond the n that are left. */
__device__ static void load8(float *v, const uint8_t *row, LkType type, uint64_t k, uint64_t n, bool vectors) {
        if (!vectors || n < 8) {
#pragma unroll
                for (uint32_t i = 0; i < 8; i++)
                        v[i] = i < n ? weight_get(row, type, k + i) : 0;
        } else if (type == LK_F32) {
                const float4 *p = (const float4 *) (row + k * 4);
                float4 a = p[0], b = p[1];

                v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
                v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
        } else {
                uint4 u = *(const uint4 *) (row + k * 2);

#pragma unroll
                for (uint32_t i = 0; i < 4; i++) {
                        uint32_t pair = i == 0 ? u.x : i == 1 ? u.y : i == 2 ? u.z : u.w;

                        v[2 * i] = type == LK_BF16 ? __uint_as_float(pair << 16) : number_get(&pair, type, 0);
                        v[2 * i + 1] = type == LK_BF16 ? __uint_as_float(pair & 0xffff0000u) : number_get(&pair, type, 1);
                }
        }
}

/* The part of a panel [k][row] that a thread brings: eight numbers of a row. */
typedef struct Load {
        const uint8_t *row; /* NULL: none */
        LkType type;
        bool vectors, takes_part;
        uint32_t at, half;
        float v[8];
} Load;

__device__ static void load(Load *l, uint64_t k0, uint64_t cols, const LkVector *factor) {
        uint64_t k = k0 + l->half * 8, n = k < cols ? cols - k : 0;

        if (!l->row) {
#pragma unroll
                for (uint32_t i = 0; i < 8; i++)
                        l->v[i] = 0;
                return;
        }
        load8(l->v, l->row, l->type, k, n, l->vectors);
        for (uint32_t i = 0; factor && factor->data && i < 8 && i < n; i++)
                l->v[i] = __fmul_rn(l->v[i], weight_get(factor->data, factor->type, k + i));
}

__device__ static void put(const Load *l, float *panel, uint32_t ld) {
        if (!l->takes_part)
                return;
#pragma unroll
        for (uint32_t i = 0; i < 8; i++)
                panel[(l->half * 8 + i) * ld + l->at] = l->v[i];
}

template <uint32_t TM, uint32_t TN, uint32_t MS> __device__ static void one_k(const float *a, const float *b, uint32_t ty, uint32_t tx, float (*acc)[TN]) {
        float u[TM], v[TN];

#pragma unroll
        for (uint32_t i = 0; i < TM; i += MS)
#pragma unroll
                for (uint32_t j = 0; j < MS; j++)
                        u[i + j] = a[i * 16 + ty * MS + j];
#pragma unroll
        for (uint32_t i = 0; i < TN; i += 2) {
                float2 pair = *(const float2 *) (b + i * 16 + tx * 2);

                v[i] = pair.x;
                v[i + 1] = pair.y;
        }
#pragma unroll
        for (uint32_t i = 0; i < TM; i++)
#pragma unroll
                for (uint32_t j = 0; j < TN; j++)
                        acc[i][j] = __fmaf_rn(u[i], v[j], acc[i][j]);
}

template <uint32_t TM, uint32_t TN>
__global__ static void __launch_bounds__(THREADS, TM > 8 ? 1 : 2) f32_kernel(const __grid_constant__ F32Args a) {
        const uint32_t MS = TM < 4 ? TM : 4, BM = TM * 16, BN = TN * 16, PAD = TM > 8 ? 0 : 4, A_LD = BM + PAD, B_LD = BN + PAD;
        const uint32_t LOADS = TM > 8 ? 2 : 1; /* of x, eight numbers each */
        __shared__ __align__(16) float panel_a[2][STEP * A_LD], panel_b[2][STEP * B_LD];
        const LkGemm &g = a.g;
        uint32_t tx = threadIdx.x % 16, ty = threadIdx.x / 16, m_tile, n_tile;
        float acc[TM][TN] = {};
        Load x[LOADS] = {}, w = {};

        tile_of_block(a.m_tiles, a.n_tiles, &m_tile, &n_tile);

        uint64_t m0 = (uint64_t) m_tile * BM, n0 = (uint64_t) n_tile * BN, cols = g.w.cols;

#pragma unroll
        for (uint32_t i = 0; i < LOADS; i++) {
                x[i].at = threadIdx.x % BM;
                x[i].half = threadIdx.x / BM + i;
                x[i].takes_part = threadIdx.x < 2 * BM;
                x[i].type = g.x_type;
                x[i].vectors = a.x_vectors;
                if (x[i].takes_part && m0 + x[i].at < g.m)
                        x[i].row = (const uint8_t *) row_at(g.x, g.x_type, m0 + x[i].at, g.x_ld);
        }
        w.at = threadIdx.x % BN;
        w.half = threadIdx.x / BN;
        w.takes_part = threadIdx.x < 2 * BN;
        w.type = g.w.type;
        w.vectors = a.w_vectors;
        if (w.takes_part && n0 + w.at < g.w.rows)
                w.row = matrix_row(g.w, n0 + w.at);

#pragma unroll
        for (uint32_t i = 0; i < LOADS; i++)
                load(x + i, 0, cols, &g.w.quant.in_scale);
        load(&w, 0, cols, NULL);
        for (uint64_t k = 0, buffer = 0; k < cols; k += STEP, buffer ^= 1) {
#pragma unroll
                for (uint32_t i = 0; i < LOADS; i++)
                        put(x + i, panel_a[buffer], A_LD);
                put(&w, panel_b[buffer], B_LD);
                __syncthreads();
                if (k + STEP < cols) {
#pragma unroll
                        for (uint32_t i = 0; i < LOADS; i++)
                                load(x + i, k + STEP, cols, &g.w.quant.in_scale);
                        load(&w, k + STEP, cols, NULL);
                }
                if (cols - k >= STEP) {
#pragma unroll
                        for (uint32_t i = 0; i < STEP; i++)
                                one_k<TM, TN, MS>(panel_a[buffer] + i * A_LD, panel_b[buffer] + i * B_LD, ty, tx, acc);
                } else /* a padded fma would lose the sign of a sum that is -0 */
                        for (uint32_t i = 0; i < cols - k; i++)
                                one_k<TM, TN, MS>(panel_a[buffer] + i * A_LD, panel_b[buffer] + i * B_LD, ty, tx, acc);
        }

#pragma unroll
        for (uint32_t i = 0; i < TM; i++) {
                uint64_t row = m0 + i / MS * MS * 16 + ty * MS + i % MS;
                void *y = row_at_mutable(g.y, g.y_type, row, g.y_ld);

                if (row >= g.m)
                        continue;
#pragma unroll
                for (uint32_t j = 0; j < TN; j++) {
                        uint64_t col = n0 + j / 2 * 32 + tx * 2 + j % 2;
                        float v = acc[i][j];

                        if (col >= g.w.rows)
                                continue;
                        if (g.bias.data)
                                v = __fadd_rn(v, weight_get(g.bias.data, g.bias.type, col));
                        number_put(y, g.y_type, col, v);
                }
        }
}

template <uint32_t TM, uint32_t TN> static int launch(cudaStream_t stream, F32Args *a) {
        uint64_t m_tiles = (a->g.m + TM * 16 - 1) / (TM * 16), n_tiles = (a->g.w.rows + TN * 16 - 1) / (TN * 16);

        if (m_tiles > GRID_X_MAX / n_tiles)
                return -EINVAL;
        a->m_tiles = (uint32_t) m_tiles;
        a->n_tiles = (uint32_t) n_tiles;
        f32_kernel<TM, TN><<<a->m_tiles * a->n_tiles, THREADS, 0, stream>>>(*a);
        return cuda_result(cudaGetLastError());
}

template <uint32_t TM> static int launch_columns(cudaStream_t stream, F32Args *a) {
        uint64_t n = a->g.w.rows;

        if (n <= 32)
                return launch<TM, 2>(stream, a);
        if (n <= 64)
                return launch<TM, 4>(stream, a);
        if (n <= 96)
                return launch<TM, 6>(stream, a);
        return launch<TM, 8>(stream, a);
}

#define MANY_ROWS UINT64_C(8192) /* blocks of 256 rows fill a device several times */

int product_f32(cudaStream_t stream, const LkGemm *g) {
        F32Args a = { *g };

        a.x_vectors = is_aligned(g->x, g->x_ld * lk_type_size(g->x_type));
        a.w_vectors = matrix_aligned(&g->w);
        if (g->m <= 16)
                return launch_columns<1>(stream, &a);
        if (g->m <= 64)
                return launch_columns<4>(stream, &a);
        if (g->m >= MANY_ROWS && g->w.rows > 96)
                return launch<16, 8>(stream, &a);
        return launch_columns<8>(stream, &a);
}
