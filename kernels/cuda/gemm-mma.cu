/* SPDX-License-Identifier: Apache-2.0 */
/* bf16, f16 and int8 products by mma.sync, for cards and shapes that no library serves. A block makes 128 x 256 outputs with eight warps of
 * 64 x 64; 64 bytes of k a stage come through four stages of shared memory (96 KiB: what every card has). Bytes lie in the registers of
 * m16n8k16 (bf16, f16) and m16n8k32 (int8) in the same places, so that one kernel serves all. */

#include "kernels/cuda/product.cuh"
#include "kernels/cuda/ptx.cuh"

#define TILE_M 128u
#define TILE_N 256u
#define STEP 64u /* bytes of k */
#define STAGES 4u
#define STAGE_SIZE ((TILE_M + TILE_N) * STEP)
#define THREADS 256u

typedef struct MmaArgs {
        MmaProduct p;
        uint64_t k_bytes;
        uint32_t m_tiles, n_tiles;
} MmaArgs;

/* 16 bytes `chunk` of a row of a stage: eight rows that are read together lie in different banks. */
__device__ static uint32_t stage_at(uint32_t row, uint32_t chunk) {
        return row * STEP + (chunk ^ ((row >> 1) & 3)) * 16;
}

/* `size` bytes from `from`, then zeros. */
template <bool ALIGNED> __device__ static void copy_chunk(uint32_t to, const uint8_t *from, uint32_t size) {
        if (ALIGNED) {
                copy16_part(to, from, size);
                return;
        }

        uint32_t v[4] = {};

        for (uint32_t i = 0; i < size; i++)
                v[i / 4] |= (uint32_t) from[i] << i % 4 * 8;
        asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
}

/* The rows that a thread brings to every stage: its 16 bytes of each. */
typedef struct Loads {
        const uint8_t *x[TILE_M / 64], *w[TILE_N / 64];
        uint32_t inside; /* bit i: x[i] is a row, bit 8 + i: w[i] is */
} Loads;

__device__ static Loads loads_of(const MmaArgs &a, uint64_t m0, uint64_t n0, uint32_t element) {
        const MmaProduct &p = a.p;
        Loads l = {};

        for (uint32_t i = 0; i < TILE_M / 64; i++) {
                uint64_t row = m0 + threadIdx.x / 4 + i * 64;
                bool inside = row < p.m;

                l.x[i] = (const uint8_t *) p.x + (inside ? row : 0) * p.x_ld * element;
                l.inside |= (uint32_t) inside << i;
        }
        for (uint32_t i = 0; i < TILE_N / 64; i++) {
                uint64_t row = n0 + threadIdx.x / 4 + i * 64;
                bool inside = row < p.w.rows;

                l.w[i] = matrix_row(p.w, inside ? row : 0);
                l.inside |= (uint32_t) inside << (8 + i);
        }
        return l;
}

template <bool ALIGNED> __device__ static void load_stage(const MmaArgs &a, const Loads &l, uint32_t stage, uint64_t step) {
        uint32_t chunk = threadIdx.x % 4, row = threadIdx.x / 4;
        uint64_t at = step * STEP + chunk * 16;
        uint32_t size = at < a.k_bytes ? (uint32_t) (a.k_bytes - at < 16 ? a.k_bytes - at : 16) : 0;

        at = size ? at : 0;
        for (uint32_t i = 0; i < TILE_M / 64; i++)
                copy_chunk<ALIGNED>(stage + stage_at(row + i * 64, chunk), l.x[i] + at, l.inside >> i & 1 ? size : 0);
        for (uint32_t i = 0; i < TILE_N / 64; i++)
                copy_chunk<ALIGNED>(stage + TILE_M * STEP + stage_at(row + i * 64, chunk), l.w[i] + at, l.inside >> (8 + i) & 1 ? size : 0);
}

template <LkType TYPE> __device__ static void multiply(float *c, const uint32_t *a, const uint32_t *b) {
        if (TYPE == LK_F16)
                multiply_f16(c, a, b[0], b[1]);
        else
                multiply_bf16(c, a, b[0], b[1]);
}

template <LkType TYPE> __device__ static void multiply(int32_t *c, const uint32_t *a, const uint32_t *b) {
        multiply_i8(c, a, b[0], b[1]);
}

template <LkType TYPE, typename T> __device__ static void compute_stage(uint32_t stage, uint32_t wm, uint32_t wn, T (*acc)[8][4]) {
        uint32_t lane = threadIdx.x % 32, w = stage + TILE_M * STEP;

#pragma unroll
        for (uint32_t k = 0; k < STEP / 32; k++) {
                uint32_t a[4][4], b[4][4];

#pragma unroll
                for (uint32_t i = 0; i < 4; i++)
                        matrices_load(a[i], stage + stage_at(wm + i * 16 + lane % 16, k * 2 + lane / 16));
#pragma unroll
                for (uint32_t j = 0; j < 4; j++)
                        matrices_load(b[j], w + stage_at(wn + j * 16 + lane / 16 * 8 + lane % 8, k * 2 + lane / 8 % 2));
#pragma unroll
                for (uint32_t i = 0; i < 4; i++)
#pragma unroll
                        for (uint32_t j = 0; j < 8; j++)
                                multiply<TYPE>(acc[i][j], a[i], b[j / 2] + j % 2 * 2);
        }
}

__device__ static float finish(const MmaProduct &p, float sum, float x_scale, uint64_t col) {
        float v = p.columns.scale ? __fmul_rn(sum, p.columns.scale[col]) : sum;

        return p.columns.bias ? __fadd_rn(v, p.columns.bias[col]) : v;
}

__device__ static float finish(const MmaProduct &p, int32_t sum, float x_scale, uint64_t col) {
        float v = __fmul_rn(__fmul_rn(__int2float_rn(sum), x_scale), p.columns.scale[col]);

        return p.columns.bias ? __fadd_rn(v, p.columns.bias[col]) : v;
}

template <typename T> __device__ static void store(const MmaProduct &p, uint64_t row, uint64_t col, const T (*acc)[4]) {
        float x_scale = p.x_scale && row < p.m ? p.x_scale[row] : 0;
        void *y = row_at_mutable(p.y, p.y_type, row, p.y_ld);
        bool pairs = p.y_type != LK_F32 && ((uintptr_t) p.y & 3) == 0 && p.y_ld % 2 == 0;

        if (row >= p.m)
                return;
#pragma unroll
        for (uint32_t j = 0; j < 8; j++) {
                uint64_t at = col + j * 8;
                float v0, v1;

                if (at >= p.w.rows)
                        break;
                v0 = finish(p, acc[j][0], x_scale, at);
                if (at + 1 >= p.w.rows) {
                        number_put_as(y, p.y_type, at, v0);
                        break;
                }
                v1 = finish(p, acc[j][1], x_scale, at + 1);
                if (pairs)
                        *(uint32_t *) ((uint16_t *) y + at) = p.y_type == LK_F16
                                                                      ? f16_from_f32(v0) | (uint32_t) f16_from_f32(v1) << 16
                                                                      : bf16_from_f32(v0) | (uint32_t) bf16_from_f32(v1) << 16;
                else {
                        number_put_as(y, p.y_type, at, v0);
                        number_put_as(y, p.y_type, at + 1, v1);
                }
        }
}

template <LkType TYPE, typename T, bool ALIGNED> __global__ static void __launch_bounds__(THREADS, 1) mma_kernel(const __grid_constant__ MmaArgs a) {
        extern __shared__ uint4 shared[];
        uint32_t base = (uint32_t) __cvta_generic_to_shared(shared), m_tile, n_tile;
        uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, wm = warp / 4 * 64, wn = warp % 4 * 64;
        uint64_t steps = (a.k_bytes + STEP - 1) / STEP;
        T acc[4][8][4] = {};

        tile_of_block(a.m_tiles, a.n_tiles, &m_tile, &n_tile);

        uint64_t m0 = (uint64_t) m_tile * TILE_M, n0 = (uint64_t) n_tile * TILE_N;
        Loads l = loads_of(a, m0, n0, TYPE == LK_I8 ? 1 : 2);

        for (uint32_t s = 0; s < STAGES - 1; s++) {
                if (s < steps)
                        load_stage<ALIGNED>(a, l, base + s * STAGE_SIZE, s);
                copies_commit();
        }
        for (uint64_t step = 0; step < steps; step++) {
                copies_wait<STAGES - 2>();
                __syncthreads();
                if (step + STAGES - 1 < steps)
                        load_stage<ALIGNED>(a, l, base + (uint32_t) ((step + STAGES - 1) % STAGES) * STAGE_SIZE, step + STAGES - 1);
                copies_commit();
                compute_stage<TYPE>(base + (uint32_t) (step % STAGES) * STAGE_SIZE, wm, wn, acc);
        }

#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
                T half[8][4];

                store(a.p, m0 + wm + i * 16 + lane / 4, n0 + wn + lane % 4 * 2, acc[i]);
#pragma unroll
                for (uint32_t j = 0; j < 8; j++) {
                        half[j][0] = acc[i][j][2];
                        half[j][1] = acc[i][j][3];
                }
                store(a.p, m0 + wm + i * 16 + lane / 4 + 8, n0 + wn + lane % 4 * 2, half);
        }
}

template <LkType TYPE, typename T, bool ALIGNED> static int launch(cudaStream_t stream, const MmaArgs &a) {
        int r = cuda_result(
                cudaFuncSetAttribute(mma_kernel<TYPE, T, ALIGNED>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int) (STAGES * STAGE_SIZE)));

        if (r < 0)
                return r;
        mma_kernel<TYPE, T, ALIGNED><<<a.m_tiles * a.n_tiles, THREADS, STAGES * STAGE_SIZE, stream>>>(a);
        return cuda_result(cudaGetLastError());
}

int product_mma(cudaStream_t stream, const MmaProduct *p) {
        uint64_t element = p->w.type == LK_I8 ? 1 : 2, m_tiles = (p->m + TILE_M - 1) / TILE_M, n_tiles = (p->w.rows + TILE_N - 1) / TILE_N;
        bool aligned = is_aligned(p->x, p->x_ld * element) && matrix_aligned(&p->w);
        MmaArgs a = { *p, p->w.cols * element, (uint32_t) m_tiles, (uint32_t) n_tiles };

        if (m_tiles > GRID_X_MAX / n_tiles)
                return -EINVAL;
        if (p->w.type == LK_F16)
                return aligned ? launch<LK_F16, float, true>(stream, a) : launch<LK_F16, float, false>(stream, a);
        if (p->w.type == LK_BF16)
                return aligned ? launch<LK_BF16, float, true>(stream, a) : launch<LK_BF16, float, false>(stream, a);
        return aligned ? launch<LK_I8, int32_t, true>(stream, a) : launch<LK_I8, int32_t, false>(stream, a);
}
