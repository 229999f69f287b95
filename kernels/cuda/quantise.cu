/* SPDX-License-Identifier: Apache-2.0 */
/* Rows to int8 with one scale each, of x or of silu(x) * up: kernels/cpu/quantise.c, the same bits. */

#include "kernels/cuda/quantise-rows.cuh"

#define EACH 32u          /* numbers a thread */
#define THREADS_MOST 448u /* 72 registers a thread at two blocks */

/* silu of the numbers of bf16 from 2^-25 up to 128 in magnitude: those whose bits, without the sign, are TABLE / 2 from 0x3300 on. Others
 * take longer. TABLE_SHIFT added, those of the exponent say whether a number is one of them, and the last ones which. */
#define TABLE 8192u
#define TABLE_LEAST 0x3300u
#define TABLE_SHIFT 0x0d000d00u
#define TABLE_BITS 0x70007000u
#define TABLE_OURS 0x40004000u

/* Number i of the table is that of this g. */
__device__ static inline float table_number(uint32_t i) {
        return __uint_as_float((TABLE_LEAST + i % (TABLE / 2)) << 16 | i / (TABLE / 2) << 31);
}

/* Bits of `other` stay 0 where all pairs are in the table. */
__device__ static inline uint32_t table_other(uint32_t other, uint32_t pair) {
        return other | ((pair + TABLE_SHIFT) ^ TABLE_OURS);
}

/* silu of a pair. */
__device__ static inline void table_get(const float *table, uint32_t pair, float &low, float &high) {
        const uint32_t bits = pair + TABLE_SHIFT, at = (bits << 2 & 0x3ffc3ffcu) | (bits >> 1 & 0x40004000u); /* bytes */

        low = *(const float *) ((const uint8_t *) table + (at & 0xffffu));
        high = *(const float *) ((const uint8_t *) table + (at >> 16));
}

/* silu of a thread's numbers, in `own` memory because their place is not known before. */
__device__ static void share_silu_any(float (&v)[EACH], const uint4 (&g)[EACH / 8], float *own) {
#pragma unroll
        for (unsigned i = 0; i < EACH / 8; i++)
                piece_floats(g[i], v + i * 8);
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

/* What a thread has of a row as it lies in memory; something of the row instead of what is beyond its end. */
template <bool GATED> struct Share {
        uint4 x[EACH / 8], up[GATED ? EACH / 8 : 1];
};

/* v = silu(x) * up. exchange: of the warp, which has to call this together. */
__device__ static inline void share_gate(float (&v)[EACH], const Share<true> &s, const float *table, float *exchange) {
        uint32_t other = 0;

#pragma unroll
        for (unsigned i = 0; i < EACH / 8; i++)
                other = table_other(table_other(table_other(table_other(other, s.x[i].x), s.x[i].y), s.x[i].z), s.x[i].w);
        if (__all_sync(0xffffffffu, (other & TABLE_BITS) == 0))
#pragma unroll
                for (unsigned i = 0; i < EACH / 8; i++) {
                        table_get(table, s.x[i].x, v[i * 8], v[i * 8 + 1]);
                        table_get(table, s.x[i].y, v[i * 8 + 2], v[i * 8 + 3]);
                        table_get(table, s.x[i].z, v[i * 8 + 4], v[i * 8 + 5]);
                        table_get(table, s.x[i].w, v[i * 8 + 6], v[i * 8 + 7]);
                }
        else
                share_silu_any(v, s.x, exchange + threadIdx.x % 32 * EACH);
#pragma unroll
        for (unsigned i = 0; i < EACH / 8; i++) {
                float f[8];

                piece_floats(s.up[i], f);
#pragma unroll
                for (unsigned j = 0; j < 8; j++)
                        v[i * 8 + j] = __fmul_rn(v[i * 8 + j], f[j]);
        }
}

template <bool GATED> __device__ static inline void share_fetch(const LkQuantise &a, uint32_t row, Share<GATED> &s) {
#pragma unroll
        for (unsigned part = 0; part < EACH / 16; part++) {
                const uint32_t piece = share_at<EACH>(part) < (uint32_t) a.k ? share_at<EACH>(part) / 8 : 0;

#pragma unroll
                for (unsigned i = 0; i < 2; i++) {
                        s.x[2 * part + i] = row_piece(a.x, row, a.x_ld, piece)[i];
                        if (GATED)
                                s.up[2 * part + i] = row_piece(a.up, row, a.up_ld, piece)[i];
                }
        }
}

/* 0 beyond the end of a row. */
__device__ static inline void share_end(float (&v)[EACH], uint32_t k) {
        if (k % 1024 != 0)
#pragma unroll
                for (unsigned i = 0; i < EACH; i++)
                        v[i] = share_at<EACH>(i / 16) < k ? v[i] : 0;
}

/* A row of the block comes nearer. */
template <bool GATED> __device__ static inline void row_nearer(const LkQuantise &a, uint32_t row) {
        for (uint32_t i = threadIdx.x * 8; i < (uint32_t) a.k / 8; i += blockDim.x * 8) {
                row_prefetch(row_piece(a.x, row, a.x_ld, i));
                if (GATED)
                        row_prefetch(row_piece(a.up, row, a.up_ld, i));
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

/* A block for a row at a time, a thread for EACH of its numbers, which are on their way while the row before is finished. Shared memory:
 * SHARE_BYTES for each warp. */
template <bool GATED>
__global__ static void __launch_bounds__(THREADS_MOST, 2) quantise_pieces(const __grid_constant__ LkQuantise a, int stages) {
        extern __shared__ uint4 raw[];
        __shared__ float table[GATED ? TABLE : 1]; /* of silu */
        __shared__ uint32_t most[2][THREADS_MOST / 32], plain_most;
        const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
        float *exchange = (float *) raw + warp * (SHARE_BYTES(EACH) / 4);
        Share<GATED> s;
        unsigned parity = 0;

        share_fetch<GATED>(a, blockIdx.x, s);
        for (uint32_t i = threadIdx.x; GATED && i < TABLE; i += blockDim.x)
                table[i] = silu_any(table_number(i));
        __syncthreads();

        for (uint32_t row = blockIdx.x; row < (uint32_t) a.m; row += gridDim.x, parity ^= 1) {
                const uint32_t next = row + gridDim.x < (uint32_t) a.m ? row + gridDim.x : row;
                float v[EACH], scale;
                uint4 y[EACH / 8];
                uint32_t bits;

                row_nearer<GATED>(a, next);
                if constexpr (GATED)
                        share_gate(v, s, table, exchange);
                else
#pragma unroll
                        for (unsigned i = 0; i < EACH / 8; i++)
                                piece_floats(s.x[i], v + i * 8);
                share_end(v, (uint32_t) a.k);
                bits = share_make<EACH>(v, stages, exchange, y);
                share_fetch<GATED>(a, next, s); /* not before: its registers had v */
                if (lane == 0)
                        most[parity][warp] = bits;
                __syncthreads();
                bits = __reduce_max_sync(0xffffffffu, lane < warps ? most[parity][lane] : 0);
                if (!share_usual(bits)) {
                        row_plain(a, row, (float *) raw, &plain_most);
                        share_fetch<GATED>(a, next, s); /* again: leaves its registers to that */
                        continue;
                }
                scale = share_scale(__fmul_rn(__uint_as_float(bits), share_power(stages)));
                if (threadIdx.x == 0)
                        a.scale[row] = scale;
                share_store<EACH>(y, factor_of(share_factor(scale, stages)), a.q + row * a.q_ld, (uint32_t) a.k);
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
        bool pieces = a->x_type == LK_BF16 && a->k % SQUARE == 0 && a->k <= THREADS_MOST * EACH && rows_near(a->m, a->x_ld) &&
                      row_pieces(a->x, a->x_ld, a->k) &&
                      (!a->up || (rows_near(a->m, a->up_ld) && row_pieces(a->up, a->up_ld, a->k))) && (uintptr_t) a->q % 16 == 0 &&
                      a->q_ld % 16 == 0;

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
