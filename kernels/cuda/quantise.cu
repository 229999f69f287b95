/* SPDX-License-Identifier: Apache-2.0 */
/* Rows to int8 with one scale each, of x or of silu(x) * up: kernels/cpu/quantise.c, the same bits. */

#include "kernels/cuda/quantise-rows.cuh"

#define THREADS_MOST 224u /* 72 registers a thread at four blocks */
#define SHARED_MAX (96u << 10)

typedef struct Slot {
        uint4 low, high;
} Slot;

/* A thread's share of a row, waiting for the numbers of the one before. */
typedef struct Source {
        uint4 x[2], up[2];
} Source;

template <bool GATED> __device__ static inline Source source_load(const void *x, const void *up, uint32_t share, bool inside) {
        Source s = {};

        if (inside) {
                s.x[0] = piece_load(x, 2 * share);
                s.x[1] = piece_load(x, 2 * share + 1);
                if (GATED) {
                        s.up[0] = piece_load(up, 2 * share);
                        s.up[1] = piece_load(up, 2 * share + 1);
                }
        }
        return s;
}

template <bool GATED> __device__ static inline void source_values(const Source &s, float (&v)[SHARE]) {
        piece_floats(s.x[0], v);
        piece_floats(s.x[1], v + 8);
        if (GATED) {
                float up[SHARE];
                uint32_t most = 0;

#pragma unroll
                for (unsigned i = 0; i < 2; i++)
                        most = pair_most(pair_most(pair_most(pair_most(most, s.x[i].x), s.x[i].y), s.x[i].z), s.x[i].w);
                if (silu_is_easy(most)) {
#pragma unroll
                        for (unsigned i = 0; i < SHARE; i++)
                                v[i] = silu_easy(v[i]);
                } else {
#pragma unroll 1
                        for (unsigned i = 0; i < SHARE; i++)
                                v[i] = silu_any(v[i]);
                }
                piece_floats(s.up[0], up);
                piece_floats(s.up[1], up + 8);
#pragma unroll
                for (unsigned i = 0; i < SHARE; i++)
                        v[i] = __fmul_rn(v[i], up[i]);
        }
}

/* A block for a row at a time. Shared memory: a slot for each share, then an exchange for each warp. */
template <bool GATED> __global__ static void __launch_bounds__(THREADS_MOST, 4) quantise_pieces(LkQuantise a, int stages) {
        extern __shared__ uint4 raw[];
        __shared__ uint32_t most[2][THREADS_MOST / 32];
        const uint32_t shares = (uint32_t) (a.k / SHARE), turns = (shares + blockDim.x - 1) / blockDim.x;
        const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
        Slot *slots = (Slot *) raw;
        float *exchange = (float *) (slots + turns * blockDim.x) + warp * (EXCHANGE_SIZE / 4);
        unsigned parity = 0;

        for (uint64_t row = blockIdx.x; row < a.m; row += gridDim.x, parity ^= 1) {
                const void *x = row_at(a.x, LK_BF16, row, a.x_ld), *up = GATED ? row_at(a.up, LK_BF16, row, a.up_ld) : NULL;
                Source next = source_load<GATED>(x, up, threadIdx.x, threadIdx.x < shares);
                float largest = 0, scale, factor;
                uint32_t exact = 0;

                for (uint32_t i = 0; i < turns; i++) {
                        const uint32_t at = i * blockDim.x + threadIdx.x;
                        Source here = next;
                        Share s;

                        if (i + 1 < turns)
                                next = source_load<GATED>(x, up, at + blockDim.x, at + blockDim.x < shares);
                        s = share_make([&](float (&v)[SHARE]) { source_values<GATED>(here, v); }, stages, exchange);
                        slots[at] = {s.low, s.high};
                        largest = fmaxf(largest, s.most);
                        exact |= (uint32_t) s.exact << i;
                }

                if (lane == 0)
                        most[parity][warp] = __float_as_uint(largest);
                __syncthreads();
                scale = share_scale(__uint_as_float(__reduce_max_sync(0xffffffffu, lane < warps ? most[parity][lane] : 0)));
                factor = share_factor(scale);
                if (threadIdx.x == 0)
                        a.scale[row] = scale;
                for (uint32_t i = 0; i < turns; i++) {
                        const uint32_t at = i * blockDim.x + threadIdx.x;

                        share_store(slots[at].low, slots[at].high, factor, stages, exact >> i & 1, exchange,
                                a.q + row * a.q_ld + (uint64_t) at * SHARE, at < shares);
                }
        }
}

__global__ static void __launch_bounds__(THREADS_MOST) quantise_plain(LkQuantise a) {
        __shared__ float exchange[THREADS_MOST / 32 * PLAIN_GROUP];
        __shared__ uint32_t most;

        for (uint64_t row = blockIdx.x; row < a.m; row += gridDim.x) {
                const void *x = row_at(a.x, a.x_type, row, a.x_ld), *up = a.up ? row_at(a.up, a.x_type, row, a.up_ld) : NULL;

                plain_quantise(
                        a, row,
                        [&](uint64_t i) {
                                float v = number_get(x, a.x_type, i);

                                return up ? __fmul_rn(silu_any(v), number_get(up, a.x_type, i)) : v;
                        },
                        exchange, &most);
        }
}

template <bool GATED> static int launch_pieces(LkContext *c, const LkQuantise *a) {
        const uint64_t shares = a->k / SHARE;
        const unsigned threads = row_threads(shares, THREADS_MOST);
        const uint64_t turns = (shares + threads - 1) / threads;
        const uint64_t shared = turns * threads * sizeof(Slot) + threads / 32 * EXCHANGE_SIZE;
        unsigned blocks;
        int r;

        if (shared > SHARED_MAX)
                return -E2BIG;
        r = row_grid(c, (const void *) quantise_pieces<GATED>, threads, shared, &blocks);
        if (r < 0)
                return r;
        quantise_pieces<GATED><<<(unsigned) (a->m < blocks ? a->m : blocks), threads, shared, c->stream>>>(
                *a, (int) rotation_stages(a->rotation));
        return cuda_result(cudaGetLastError());
}

extern "C" int lk_cuda_quantise(LkContext *c, const LkQuantise *a) {
        bool pieces = a->x_type == LK_BF16 && a->k % SHARE == 0 && row_pieces(a->x, a->x_ld, a->k) &&
                      (!a->up || row_pieces(a->up, a->up_ld, a->k)) && (uintptr_t) a->q % 16 == 0 && a->q_ld % 16 == 0;
        int r = -E2BIG;

        if (a->m == 0 || a->k == 0)
                return 0;
        if (!row_types(a->x_type) || !a->x || a->x_ld < a->k || (a->up && a->up_ld < a->k) || !a->q || a->q_ld < a->k || !a->scale ||
                !rotation_valid(a->rotation, a->k))
                return -EINVAL;

        if (pieces)
                r = a->up ? launch_pieces<true>(c, a) : launch_pieces<false>(c, a);
        if (r != -E2BIG)
                return r;
        quantise_plain<<<(unsigned) (a->m < 65536 ? a->m : 65536), THREADS_MOST, 0, c->stream>>>(*a);
        return cuda_result(cudaGetLastError());
}
