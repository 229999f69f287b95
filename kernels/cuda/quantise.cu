/* SPDX-License-Identifier: Apache-2.0 */
/* Rows to int8 with one scale each, of x or of silu(x) * up: kernels/cpu/quantise.c, the same bits. */

#include "kernels/cuda/quantise-rows.cuh"

#define EACH 32u          /* numbers a thread */
#define THREADS_MOST 448u /* 72 registers a thread at two blocks */

/* silu of a thread's numbers, in `own` memory because their place is not known before. */
__device__ static void share_silu_any(float (&v)[EACH], float *own) {
#pragma unroll
        for (unsigned i = 0; i < EACH; i++)
                own[i] = v[i];
#pragma unroll 1
        for (unsigned i = 0; i < EACH; i++)
                own[i] = silu_any(own[i]);
#pragma unroll
        for (unsigned i = 0; i < EACH; i++)
                v[i] = own[i];
}

/* v = silu(g) * u. exchange: of the warp, which has to call this together. */
__device__ static inline void share_gate(float (&v)[EACH], const uint4 (&g)[EACH / 8], const uint4 (&u)[EACH / 8], float *exchange) {
        uint32_t most = 0;

#pragma unroll
        for (unsigned i = 0; i < EACH / 8; i++)
                most = pair_most(pair_most(pair_most(pair_most(most, g[i].x), g[i].y), g[i].z), g[i].w);
        if (__all_sync(0xffffffffu, silu_is_easy(most)))
#pragma unroll
                for (unsigned i = 0; i < EACH; i++)
                        v[i] = silu_easy(v[i]);
        else
                share_silu_any(v, exchange + threadIdx.x % 32 * EACH);
#pragma unroll
        for (unsigned i = 0; i < EACH / 8; i++) {
                float f[8];

                piece_floats(u[i], f);
#pragma unroll
                for (unsigned j = 0; j < 8; j++)
                        v[i * 8 + j] = __fmul_rn(v[i * 8 + j], f[j]);
        }
}

/* A thread's numbers of a row, 0 beyond its end. exchange: of the warp. */
template <bool GATED> __device__ static inline void share_load(const LkQuantise &a, uint64_t row, float (&v)[EACH], float *exchange) {
        const void *x = row_at(a.x, LK_BF16, row, a.x_ld), *up = row_at(a.up, LK_BF16, row, a.up_ld);
        uint4 g[EACH / 8] = {}, u[EACH / 8] = {};

#pragma unroll
        for (unsigned i = 0; i < EACH / 8; i++)
                if (share_at<EACH>(i / 2) < a.k) {
                        g[i] = piece_load(x, share_at<EACH>(i / 2) / 8 + i % 2);
                        if (GATED)
                                u[i] = piece_load(up, share_at<EACH>(i / 2) / 8 + i % 2);
                }
#pragma unroll
        for (unsigned i = 0; i < EACH / 8; i++)
                piece_floats(g[i], v + i * 8);
        if (GATED)
                share_gate(v, g, u, exchange);
}

/* The block's next row comes nearer. */
template <bool GATED> __device__ static inline void next_prefetch(const LkQuantise &a, uint64_t row) {
        if (row < a.m)
                for (uint32_t i = threadIdx.x * 128; i < a.k * 2; i += blockDim.x * 128) {
                        row_prefetch((const uint8_t *) row_at(a.x, LK_BF16, row, a.x_ld) + i);
                        if (GATED)
                                row_prefetch((const uint8_t *) row_at(a.up, LK_BF16, row, a.up_ld) + i);
                }
}

__device__ static void row_plain(const LkQuantise &a, uint64_t row, float *exchange, uint32_t *most) {
        const void *x = row_at(a.x, a.x_type, row, a.x_ld), *up = a.up ? row_at(a.up, a.x_type, row, a.up_ld) : NULL;

        plain_quantise(
                a, row,
                [&](uint64_t i) {
                        float v = number_get(x, a.x_type, i);

                        return up ? __fmul_rn(silu_any(v), number_get(up, a.x_type, i)) : v;
                },
                exchange, most);
}

/* A block for a row at a time, a thread for EACH of its numbers. Shared memory: SHARE_BYTES for each warp. */
template <bool GATED> __global__ static void __launch_bounds__(THREADS_MOST, 2) quantise_pieces(LkQuantise a, int stages) {
        extern __shared__ uint4 raw[];
        __shared__ uint32_t most[2][THREADS_MOST / 32], plain_most;
        const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
        float *exchange = (float *) raw + warp * (SHARE_BYTES(EACH) / 4);
        unsigned parity = 0;

        for (uint64_t row = blockIdx.x; row < a.m; row += gridDim.x, parity ^= 1) {
                float v[EACH], scale;
                uint4 y[EACH / 8];
                uint32_t bits;

                share_load<GATED>(a, row, v, exchange);
                next_prefetch<GATED>(a, row + gridDim.x);
                bits = share_make<EACH>(v, stages, exchange, y);
                if (lane == 0)
                        most[parity][warp] = bits;
                __syncthreads();
                bits = __reduce_max_sync(0xffffffffu, lane < warps ? most[parity][lane] : 0);
                if (!share_usual(bits)) {
                        row_plain(a, row, (float *) raw, &plain_most);
                        continue;
                }
                scale = share_scale(__fmul_rn(__uint_as_float(bits), share_power(stages)));
                if (threadIdx.x == 0)
                        a.scale[row] = scale;
                share_store<EACH>(y, share_factor(scale, stages), a.q + row * a.q_ld, a.k);
        }
}

__global__ static void __launch_bounds__(256) quantise_plain(LkQuantise a) {
        __shared__ float exchange[256 / 32 * PLAIN_GROUP];
        __shared__ uint32_t most;

        for (uint64_t row = blockIdx.x; row < a.m; row += gridDim.x)
                row_plain(a, row, exchange, &most);
}

template <bool GATED> static int launch_pieces(LkContext *c, const LkQuantise *a) {
        const unsigned threads = (unsigned) ((a->k + 1023) / 1024 * 32), shared = threads / 32 * SHARE_BYTES(EACH);
        unsigned blocks;
        int r;

        r = row_grid(c, (const void *) quantise_pieces<GATED>, threads, shared, &blocks);
        if (r < 0)
                return r;
        quantise_pieces<GATED><<<(unsigned) (a->m < blocks ? a->m : blocks), threads, shared, c->stream>>>(
                *a, (int) rotation_stages(a->rotation));
        return cuda_result(cudaGetLastError());
}

extern "C" int lk_cuda_quantise(LkContext *c, const LkQuantise *a) {
        bool pieces = a->x_type == LK_BF16 && a->k % SQUARE == 0 && a->k <= THREADS_MOST * EACH && row_pieces(a->x, a->x_ld, a->k) &&
                      (!a->up || row_pieces(a->up, a->up_ld, a->k)) && (uintptr_t) a->q % 16 == 0 && a->q_ld % 16 == 0;

        if (a->m == 0 || a->k == 0)
                return 0;
        if (!row_types(a->x_type) || !a->x || a->x_ld < a->k || (a->up && a->up_ld < a->k) || !a->q || a->q_ld < a->k || !a->scale ||
                !rotation_valid(a->rotation, a->k))
                return -EINVAL;

        if (pieces)
                return a->up ? launch_pieces<true>(c, a) : launch_pieces<false>(c, a);
        quantise_plain<<<(unsigned) (a->m < 65536 ? a->m : 65536), 256, 0, c->stream>>>(*a);
        return cuda_result(cudaGetLastError());
}
