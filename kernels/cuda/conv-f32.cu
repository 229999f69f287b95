/* SPDX-License-Identifier: Apache-2.0 */
/* Chains of fma, for conv.cu. Four warps; a warp has 32 FM positions and 16 FN columns of the block's tile, a thread FM x FN squares of
 * four by four that lie apart, so that a warp's reads of shared memory are whole lines. The larger the thread's part, the fewer reads there
 * are for a product: 6 of 16 bytes for 128 in the largest form. */

#include "kernels/cuda/conv.cuh"
#include "kernels/cuda/product.cuh"
#include "kernels/cuda/ptx.cuh"

#define THREADS 128u
#define STEP 8u /* of k */
#define STAGES 3u

typedef struct ConvArgs {
        ConvBox b;
        uint32_t m, m_tiles, n_tiles;
        bool vectors; /* four numbers of y can be written at a time */
} ConvArgs;

__device__ static void copy4(uint32_t to, const float *from) {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

/* What a thread brings to every stage: numbers of one position, and pieces of w's rows. */
template <uint32_t BM, uint32_t BN> struct Loads {
        static const uint32_t COUNT = STEP * BM / THREADS, PIECES = STEP * BN / 4;

        const float *x, *w;
        const int32_t *offsets;
        uint64_t w_step;
        uint32_t to_x, to_w; /* in a stage */
        int32_t at[COUNT];   /* of the stage that is brought next */
        static_assert(COUNT % 4 == 0, "offsets are read four at a time");

        __device__ void look(void) {
#pragma unroll
                for (uint32_t i = 0; i < COUNT; i += 4) {
                        int4 v = *(const int4 *) (offsets + i);

                        at[i] = v.x, at[i + 1] = v.y, at[i + 2] = v.z, at[i + 3] = v.w;
                }
                offsets += STEP;
        }

        __device__ void begin(const ConvBox &b, uint32_t m, uint32_t n0, uint32_t m0) {
                uint32_t row = m0 + threadIdx.x % BM, part = threadIdx.x / BM * COUNT, column = threadIdx.x % (BN / 4) * 4;
                const uint32_t *size = b.box.size, *width = b.box.width;
                uint32_t x_at, h, t;

                row = row < m ? row : m - 1;
                x_at = row % size[2] * b.stride[2];
                h = row / size[2] % size[1] * b.stride[1];
                t = row / size[2] / size[1] * b.stride[0];
                x = b.planes + (t * width[1] + h) * width[2] + x_at;
                to_x = (part * BM + threadIdx.x % BM) * 4;
                offsets = b.offsets + part;

                w = b.w + threadIdx.x / (BN / 4) * b.w_ld + n0 + column;
                w_step = b.w_ld;
                to_w = STEP * BM * 4 + threadIdx.x * 16;
                look();
        }

        /* The next stage, to shared memory from `stage` on. */
        __device__ void bring(uint32_t stage, bool more) {
                const uint32_t rows = THREADS / (BN / 4); /* of w that the block brings at a time */

#pragma unroll
                for (uint32_t i = 0; i < COUNT; i++)
                        copy4(stage + to_x + i * BM * 4, x + at[i]);
#pragma unroll
                for (uint32_t i = 0; i < PIECES; i += THREADS)
                        if (PIECES % THREADS == 0 || threadIdx.x < PIECES)
                                copy16(stage + to_w + i * 16, w + i / THREADS * rows * w_step);
                w += STEP * w_step;
                if (more)
                        look();
        }
};

/* acc += the products of one k. */
template <uint32_t FM, uint32_t FN>
__device__ static __forceinline__ void one_k(const float *x, const float *w, float (*acc)[FN * 4]) {
        float u[FM * 4], v[FN * 4];

#pragma unroll
        for (uint32_t i = 0; i < FM; i++) {
                float4 p = *(const float4 *) (x + i * 32);

                u[i * 4] = p.x, u[i * 4 + 1] = p.y, u[i * 4 + 2] = p.z, u[i * 4 + 3] = p.w;
        }
#pragma unroll
        for (uint32_t i = 0; i < FN; i++) {
                float4 p = *(const float4 *) (w + i * 16);

                v[i * 4] = p.x, v[i * 4 + 1] = p.y, v[i * 4 + 2] = p.z, v[i * 4 + 3] = p.w;
        }
#pragma unroll
        for (uint32_t i = 0; i < FM * 4; i++)
#pragma unroll
                for (uint32_t j = 0; j < FN * 4; j++)
                        acc[i][j] = __fmaf_rn(u[i], v[j], acc[i][j]);
}

/* The thread's part of y, from row and column on. */
template <uint32_t FM, uint32_t FN>
__device__ static __forceinline__ void store(const ConvArgs &a, uint32_t row, uint32_t column, const float (*acc)[FN * 4]) {
        const ConvBox &b = a.b;
        float bias[FN * 4];

#pragma unroll
        for (uint32_t j = 0; j < FN * 4; j++) {
                uint32_t n = column + j / 4 * 16 + j % 4;

                bias[j] = b.bias.data && n < b.n ? weight_get(b.bias.data, b.bias.type, b.begin + n) : 0;
        }
#pragma unroll
        for (uint32_t i = 0; i < FM * 4; i++) {
                uint32_t m = row + i / 4 * 32 + i % 4;
                uint64_t w = b.box.first[2] + m % b.box.size[2], h = b.box.first[1] + m / b.box.size[2] % b.box.size[1];
                uint64_t t = b.box.first[0] + m / b.box.size[2] / b.box.size[1];
                float *y = b.y + ((t * b.y_size[1] + h) * b.y_size[2] + w) * b.y_ld + b.begin;

                if (m >= a.m)
                        continue;
#pragma unroll
                for (uint32_t j = 0; j < FN * 4; j += 4) {
                        uint32_t n = column + j * 4;
                        float v[4];

#pragma unroll
                        for (uint32_t k = 0; k < 4; k++)
                                v[k] = b.bias.data ? __fadd_rn(acc[i][j + k], bias[j + k]) : acc[i][j + k];
                        if (a.vectors && n < b.n)
                                *(float4 *) (y + n) = make_float4(v[0], v[1], v[2], v[3]);
                        else
#pragma unroll
                                for (uint32_t k = 0; k < 4; k++)
                                        if (n + k < b.n)
                                                y[n + k] = v[k];
                }
        }
}

template <uint32_t FM, uint32_t FN, uint32_t WM, uint32_t WN>
__global__ static void __launch_bounds__(THREADS, 2) conv_kernel(const __grid_constant__ ConvArgs a) {
        const uint32_t BM = 32 * FM * WM, BN = 16 * FN * WN, STAGE = STEP * (BM + BN);
        __shared__ __align__(16) float panels[STAGES * STAGE];
        uint32_t base = (uint32_t) __cvta_generic_to_shared(panels), lane = threadIdx.x % 32, warp = threadIdx.x / 32, m_tile, n_tile;
        uint32_t row = warp / WN * 32 * FM + lane / 4 * 4, column = warp % WN * 16 * FN + lane % 4 * 4;
        uint32_t steps = (uint32_t) ((a.b.k + STEP - 1) / STEP), in = 0, out = 0;
        float acc[FM * 4][FN * 4] = {};
        Loads<BM, BN> l;

        static_assert(WM * WN * 32 == THREADS && CONV_COLUMNS % BN == 0, "tile");
        tile_of_block(a.m_tiles, a.n_tiles, &m_tile, &n_tile);
        l.begin(a.b, a.m, n_tile * BN, m_tile * BM);

        for (uint32_t s = 0; s < STAGES - 1; s++) {
                if (s < steps)
                        l.bring(base + in * 4, s + 1 < steps);
                in += STAGE;
                copies_commit();
        }
        for (uint32_t step = 0; step < steps; step++) {
                const float *x = panels + out + row, *w = panels + out + STEP * BM + column;

                copies_wait<STAGES - 2>();
                __syncthreads();
                if (step + STAGES - 1 < steps)
                        l.bring(base + in * 4, step + STAGES < steps);
                copies_commit();
                if (a.b.k - (uint64_t) step * STEP >= STEP) {
#pragma unroll
                        for (uint32_t k = 0; k < STEP; k++)
                                one_k<FM, FN>(x + k * BM, w + k * BN, acc);
                } else /* a padded fma would lose the sign of a sum that is -0 */
#pragma unroll 1
                        for (uint32_t k = 0; k < a.b.k % STEP; k++)
                                one_k<FM, FN>(x + k * BM, w + k * BN, acc);
                in = in == (STAGES - 1) * STAGE ? 0 : in + STAGE;
                out = out == (STAGES - 1) * STAGE ? 0 : out + STAGE;
        }
        store<FM, FN>(a, m_tile * BM + row, n_tile * BN + column, acc);
}

template <uint32_t FM, uint32_t FN, uint32_t WM, uint32_t WN> static int launch(cudaStream_t stream, ConvArgs *a) {
        uint32_t height = 32 * FM * WM, width = 16 * FN * WN;

        a->m_tiles = (a->m + height - 1) / height;
        a->n_tiles = (a->b.n + width - 1) / width;
        if (a->m_tiles > GRID_X_MAX / a->n_tiles)
                return -EINVAL;
        conv_kernel<FM, FN, WM, WN><<<a->m_tiles * a->n_tiles, THREADS, 0, stream>>>(*a);
        return cuda_result(cudaGetLastError());
}

/* weight: of the time that an output takes. What shares a wave of blocks, one a processor, ends together. */
static const struct {
        uint32_t height, width, weight;
        int (*launch)(cudaStream_t stream, ConvArgs *a);
} forms[] = {
        { 128, 128, 8, launch<2, 4, 2, 2> },
        { 128, 64, 9, launch<2, 2, 2, 2> },
        { 64, 64, 13, launch<1, 2, 2, 2> },
        { 128, 32, 13, launch<1, 2, 4, 1> },
};
#define FORMS (sizeof(forms) / sizeof(*forms))

int conv_f32(LkContext *c, const ConvBox *b) {
        ConvArgs a = { *b };
        uint64_t least = UINT64_MAX;
        size_t best = 0;
        int processors, r;

        a.m = b->box.size[0] * b->box.size[1] * b->box.size[2]; /* no more than elements of a plane */
        a.vectors = b->y_ld % 4 == 0 && (uintptr_t) b->y % 16 == 0;
        r = cuda_result(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, c->device));
        if (r < 0)
                return r;

        /* The form changes no bit. */
        for (size_t i = 0; i < FORMS; i++) {
                uint64_t height = forms[i].height, width = forms[i].width;
                uint64_t tiles = (a.m + height - 1) / height * ((b->n + width - 1) / width);
                uint64_t cost = (tiles + (uint64_t) processors - 1) / (uint64_t) processors * height * width * forms[i].weight;

                if (cost < least) {
                        least = cost;
                        best = i;
                }
        }
        return forms[best].launch(c->stream, &a);
}
