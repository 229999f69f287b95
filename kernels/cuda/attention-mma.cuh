/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Attention by the instructions of every card since sm_80: mma.sync, ldmatrix, cp.async, at most 99 KB of shared memory a block.
 *
 * A block has WARPS x HIGH x 16 query rows of one head. Keys come in tiles of LK_KEY_TILE in absolute order; a row's maximum, sum and
 * rescaling are its own. There is one instantiation for a type and padded head size, whatever the rows, heads and mask, so that a row's
 * bits depend on its own numbers alone. Shared memory: queries, then STAGES tiles of keys and of values; head sizes are filled up with
 * zeros to DIM. */

#include <math.h>

#include "kernels/cuda/attention.cuh"
#include "kernels/cuda/ptx.cuh"

#ifndef WARPS /* sparse-attention-mma.cu has fewer */
#define WARPS 4
#endif
#define THREADS (WARPS * 32)
#define KEYS LK_KEY_TILE

/* bf16 or f16, numbers 0x7f80 and 0x7c00 are their infinities. */
template <LkType TYPE> static __device__ __forceinline__ void product(float (&d)[4], const uint32_t *a, uint32_t b0, uint32_t b1) {
        if (TYPE == LK_BF16)
                multiply_bf16(d, a, b0, b1);
        else
                multiply_f16(d, a, b0, b1);
}

template <LkType TYPE> static __device__ __forceinline__ uint32_t pack(float low, float high) {
        return TYPE == LK_BF16 ? pair_round(low, high) : pair_round_f16(low, high);
}

static __device__ __forceinline__ float exp2_unit(float x) {
        float y;

        asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
        return y;
}

/* Shared memory holds rows in pieces of 16 bytes so that eight rows of one column lie in different banks: exchanged within a row whose
 * size is a power of two, else with an odd number of pieces to a row. */
template <int DIM> struct Tile {
        static const int PIECES = DIM / 8;
        static const bool EXCHANGED = (PIECES & (PIECES - 1)) == 0;
        static const int PITCH = EXCHANGED ? DIM * 2 : (PIECES | 1) * 16;
        static const int SIZE = KEYS * PITCH;

        static __device__ __forceinline__ uint32_t place(int row, int piece) {
                return (uint32_t) (row * PITCH + (EXCHANGED ? piece ^ (row & 7) : piece) * 16);
        }

        /* The place of piece 2i + p of a row from that of piece p, 0 or 1. Tiles start at multiples of PITCH. */
        static __device__ __forceinline__ uint32_t further(uint32_t at, int i) {
                return EXCHANGED ? at ^ (uint32_t) (i * 32) : at + (uint32_t) (i * 32);
        }
};

template <bool WHOLE> static __device__ __forceinline__ void fetch_piece(uint32_t to, const uint8_t *from, bool there) {
        if (WHOLE)
                copy16(to, from);
        else
                copy16_part(to, from, there ? 16 : 0);
}

/* ROWS rows of one head to shared memory; zeros behind the last of `left` and behind the last of `pieces`. */
template <int DIM, int ROWS, bool WHOLE, class INDEX>
static __device__ __forceinline__ void fetch_rows(uint32_t to, const uint8_t *from, uint64_t ld, uint64_t left, int pieces, INDEX thread) {
        typedef Tile<DIM> T;

        if (T::EXCHANGED) {
                const INDEX row = thread / T::PIECES, piece = thread % T::PIECES, step = THREADS / T::PIECES;
                const uint8_t *p = from + row * ld + piece * 16;

#pragma unroll
                for (int i = 0; i < ROWS / step; i++, p += step * ld) {
                        bool there = WHOLE || (row + i * step < left && (int) piece < pieces);

                        fetch_piece<WHOLE>(to + T::place((int) (row + i * step), (int) piece), there ? p : from, there);
                }
        } else {
#pragma unroll
                for (int i = 0; i < ROWS * T::PIECES / THREADS; i++) {
                        const int at = (int) thread + i * THREADS, row = at / T::PIECES, piece = at % T::PIECES;
                        bool there = WHOLE || (row < left && piece < pieces);

                        fetch_piece<WHOLE>(to + T::place(row, piece), there ? from + row * ld + piece * 16 : from, there);
                }
        }
}

template <int DIM, int ROWS, class INDEX = int>
static __device__ __forceinline__ void fetch(
        uint32_t to, const uint8_t *from, uint64_t ld, uint64_t left, int pieces, INDEX thread = (INDEX) threadIdx.x) {
        if (left >= ROWS && pieces == Tile<DIM>::PIECES)
                fetch_rows<DIM, ROWS, true>(to, from, ld, left, pieces, thread);
        else
                fetch_rows<DIM, ROWS, false>(to, from, ld, left, pieces, thread);
}

static __device__ __forceinline__ void fetched(void) {
        copies_wait_all();
        __syncthreads();
}

/* What a warp keeps of its HIGH x 16 rows; a thread has two rows of each 16. */
template <int DIM, int HIGH> struct State {
        float o[HIGH][DIM / 8][4], top[HIGH][2], sum[HIGH][2];
};

template <LkType TYPE, int DIM, int HIGH>
static __device__ __forceinline__ void scores(
        float (&s)[HIGH][KEYS / 8][4], uint32_t q, uint32_t k, int thread = (int) threadIdx.x) {
        const int lane = thread % 32, mine = thread / 32 * HIGH * 16;

        q += Tile<DIM>::place(mine + lane % 16, lane / 16);
        k += Tile<DIM>::place(lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
        for (int i = 0; i < DIM / 16; i++) {
                uint32_t x[HIGH][4];

#pragma unroll
                for (int h = 0; h < HIGH; h++)
                        matrices_load(x[h], Tile<DIM>::further(q, i) + h * 16 * Tile<DIM>::PITCH);
#pragma unroll
                for (int n = 0; n < KEYS / 16; n++) {
                        uint32_t y[4];

                        matrices_load(y, Tile<DIM>::further(k, i) + n * 16 * Tile<DIM>::PITCH);
#pragma unroll
                        for (int h = 0; h < HIGH; h++) {
                                product<TYPE>(s[h][2 * n], x[h], y[0], y[1]);
                                product<TYPE>(s[h][2 * n + 1], x[h], y[2], y[3]);
                        }
                }
        }
}

/* Scores to weights relative to the running maximum, every decision a row's own. `unit`: of a score, to base 2. MANY: column i stands
 * for many[i] keys. */
template <int DIM, int HIGH, bool MANY>
static __device__ __forceinline__ void softmax(float (&s)[HIGH][KEYS / 8][4], State<DIM, HIGH> &t, float unit, const float *many) {
        const int column = (int) threadIdx.x % 4 * 2;

#pragma unroll
        for (int h = 0; h < HIGH; h++) {
                float most[2] = {t.top[h][0], t.top[h][1]}, base[2], scale[2];

#pragma unroll
                for (int i = 0; i < KEYS / 2; i++)
                        most[i / 2 % 2] = fmaxf(most[i / 2 % 2], s[h][i / 4][i % 4]);
#pragma unroll
                for (int r = 0; r < 2; r++) {
                        most[r] = fmaxf(most[r], __shfl_xor_sync(0xffffffffu, most[r], 1));
                        most[r] = fmaxf(most[r], __shfl_xor_sync(0xffffffffu, most[r], 2));
                        base[r] = most[r] == -INFINITY ? 0 : most[r];
                        scale[r] = exp2_unit((t.top[h][r] - base[r]) * unit);
                        base[r] *= unit;
                        t.top[h][r] = most[r];
                        t.sum[h][r] *= scale[r];
                }
#pragma unroll
                for (int i = 0; i < KEYS / 2; i++) {
                        float w = exp2_unit(fmaf(s[h][i / 4][i % 4], unit, -base[i / 2 % 2]));

                        if (MANY)
                                w *= many[i / 4 * 8 + column + i % 2];
                        s[h][i / 4][i % 4] = w;
                        t.sum[h][i / 2 % 2] += w;
                }
                /* Leaving out factors of 1 changes nothing. */
                if (__any_sync(0xffffffffu, scale[0] != 1 || scale[1] != 1)) {
#pragma unroll
                        for (int i = 0; i < DIM / 2; i++)
                                t.o[h][i / 4][i % 4] *= scale[i / 2 % 2];
                }
        }
}

template <LkType TYPE, int HIGH> static __device__ __forceinline__ uint32_t pack_weights(const float (&s)[HIGH][KEYS / 8][4], int h, int i, int j) {
        return pack<TYPE>(s[h][2 * i + j / 2][j % 2 * 2], s[h][2 * i + j / 2][j % 2 * 2 + 1]);
}

/* weight(h, i, j): register j of the operand of keys 16 i .. 16 i + 15 for the h-th 16 rows. */
template <LkType TYPE, int DIM, int HIGH, class WEIGHT>
static __device__ __forceinline__ void values(State<DIM, HIGH> &t, WEIGHT weight, uint32_t v, int thread = (int) threadIdx.x) {
        v += Tile<DIM>::place(thread % 16, thread % 32 / 16);
#pragma unroll
        for (int i = 0; i < KEYS / 16; i++) {
                uint32_t x[HIGH][4];

#pragma unroll
                for (int h = 0; h < HIGH; h++)
#pragma unroll
                        for (int j = 0; j < 4; j++)
                                x[h][j] = weight(h, i, j);
#pragma unroll
                for (int n = 0; n < DIM / 16; n++) {
                        uint32_t y[4];

                        matrices_load_turned(y, Tile<DIM>::further(v, n) + i * 16 * Tile<DIM>::PITCH);
#pragma unroll
                        for (int h = 0; h < HIGH; h++) {
                                product<TYPE>(t.o[h][2 * n], x[h], y[0], y[1]);
                                product<TYPE>(t.o[h][2 * n + 1], x[h], y[2], y[3]);
                        }
                }
        }
}

/* How many keys of a tile, less than 0 or more than all too, the thread's first row sees; the row behind it sees one more. */
template <int HIGH> static __device__ __forceinline__ int row_seen(const Attention &a, uint64_t first, uint32_t tile) {
        const int64_t seen = (int64_t) (a.a.first_row + first + 1) - (int64_t) tile * KEYS;

        return (int) (seen < KEYS ? seen : KEYS) + (int) (threadIdx.x / 32 * HIGH * 16 + threadIdx.x % 32 / 4);
}

/* Drops the scores of keys that a row does not see; behind: keys from this tile on. */
template <int HIGH>
static __device__ __forceinline__ void mask(float (&s)[HIGH][KEYS / 8][4], int seen, uint64_t behind, bool causal) {
        const int column = (int) threadIdx.x % 4 * 2, left = behind < KEYS ? (int) behind : KEYS;

#pragma unroll
        for (int h = 0; h < HIGH; h++)
#pragma unroll
                for (int r = 0; r < 2; r++) {
                        const int end = causal && seen + h * 16 + r * 8 < left ? seen + h * 16 + r * 8 : left;

#pragma unroll
                        for (int i = 0; i < KEYS / 4; i++)
                                if (i / 2 * 8 + column + i % 2 >= end)
                                        s[h][i / 2][2 * r + i % 2] = -INFINITY;
                }
}

/* A causal row may not even add 0 * v of a key that it does not see: v may be no number. So the tiles with such keys are searched for
 * what is not finite; it is replaced by 0 in shared memory and its keys are named in `bad`. Returns whether there are none. */
template <LkType TYPE, int DIM> static __device__ bool values_clean(uint8_t *v, uint32_t *bad) {
        const uint32_t limit = TYPE == LK_BF16 ? 0x7f80u : 0x7c00u;
        bool found = false;

        if (threadIdx.x < KEYS / 32)
                bad[threadIdx.x] = 0;
        __syncthreads();
        for (int i = (int) threadIdx.x; i < Tile<DIM>::SIZE / 4; i += THREADS) {
                uint32_t *p = (uint32_t *) v + i, pair = *p, keep = 0xffffffffu;

                if ((pair & limit) == limit)
                        keep &= 0xffff0000u;
                if ((pair >> 16 & limit) == limit)
                        keep &= 0x0000ffffu;
                if (keep != 0xffffffffu) {
                        int key = i * 4 / Tile<DIM>::PITCH;

                        *p = pair & keep;
                        atomicOr(bad + key / 32, 1u << key % 32);
                        found = true;
                }
        }
        return !__syncthreads_or(found);
}

/* What values() will leave out: p * v of the numbers that are not finite, for the rows that see their key. `weights` is the tile of
 * keys, which nobody needs any more; v the tile of values in memory; `seen` as for mask(). */
template <LkType TYPE, int DIM, int HIGH>
static __device__ __forceinline__ void values_bad(State<DIM, HIGH> &t, const float (&s)[HIGH][KEYS / 8][4], const uint32_t *bad, uint8_t *weights,
        const uint8_t *v, uint64_t ld, int seen, int dim) {
        const int lane = (int) threadIdx.x % 32;
        uint16_t *mine = (uint16_t *) weights + threadIdx.x / 32 * 16 * KEYS;

        __syncthreads();
#pragma unroll
        for (int h = 0; h < HIGH; h++) {
                __syncwarp();
#pragma unroll
                for (int i = 0; i < KEYS / 4; i++)
                        *(uint32_t *) (mine + (i % 2 * 8 + lane / 4) * KEYS + i / 2 * 8 + lane % 4 * 2) =
                                pack<TYPE>(s[h][i / 2][i % 2 * 2], s[h][i / 2][i % 2 * 2 + 1]);
                __syncwarp();
#pragma unroll 1
                for (int key = 0; key < KEYS; key++) {
                        float p[2];

                        if (!(bad[key / 32] >> key % 32 & 1))
                                continue;
#pragma unroll
                        for (int r = 0; r < 2; r++)
                                p[r] = number_get(mine, TYPE, (uint64_t) ((r * 8 + lane / 4) * KEYS + key));
#pragma unroll
                        for (int i = 0; i < DIM / 4; i++) {
                                const int column = i / 2 * 8 + lane % 4 * 2 + i % 2;
                                const float x = column < dim ? number_get(v + key * ld, TYPE, (uint64_t) column) : 0;

#pragma unroll
                                for (int r = 0; r < 2; r++)
                                        if (!isfinite(x) && key < seen + h * 16 + r * 8)
                                                t.o[h][i / 2][2 * r + i % 2] += p[r] * x;
                        }
                }
        }
}

/* What is stored of a row's quotient: that itself. */
struct Quotient {
        __device__ __forceinline__ float operator()(uint64_t, uint32_t, float y) const {
                return y;
        }
};

/* Rows `first` .. end - 1. */
template <LkType TYPE, int DIM, int HIGH, class FINISH>
static __device__ __forceinline__ void store(State<DIM, HIGH> &t, const Attention &a, uint32_t head, uint64_t first, uint64_t end, FINISH finish) {
        const int lane = (int) threadIdx.x % 32, mine = (int) threadIdx.x / 32 * HIGH * 16;
        const bool pairs = ((uintptr_t) a.a.o | a.a.o_ld * 2) % 4 == 0;

#pragma unroll
        for (int h = 0; h < HIGH; h++)
#pragma unroll
                for (int r = 0; r < 2; r++) {
                        uint64_t row = first + (uint64_t) (mine + h * 16 + r * 8 + lane / 4);
                        float sum = t.sum[h][r];

                        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
                        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
                        if (row >= end)
                                continue;

                        uint8_t *o = (uint8_t *) a.a.o + (row * a.a.o_ld + (uint64_t) head * a.a.head_dim) * 2;

#pragma unroll
                        for (int n = 0; n < DIM / 8; n++) {
                                const uint32_t column = (uint32_t) (n * 8 + lane % 4 * 2);
                                const float low = sum == 0 ? 0 : __fdiv_rn(t.o[h][n][2 * r], sum);
                                const float high = sum == 0 ? 0 : __fdiv_rn(t.o[h][n][2 * r + 1], sum);
                                uint32_t y;

                                if (column >= a.a.head_dim)
                                        continue;
                                y = pack<TYPE>(finish(row, column, low), finish(row, column + 1, high));
                                if (pairs) {
                                        *(uint32_t *) (o + column * 2) = y;
                                } else {
                                        *(uint16_t *) (o + column * 2) = (uint16_t) y;
                                        *(uint16_t *) (o + column * 2 + 2) = (uint16_t) (y >> 16);
                                }
                        }
                }
}

/* -q in place of q, for a negative scale: the maximum is looked for before the scaling. */
static __device__ void queries_negate(uint8_t *q, int size) {
        for (int i = (int) threadIdx.x; i < size / 4; i += THREADS)
                ((uint32_t *) q)[i] ^= 0x80008000u;
}

template <LkType TYPE, int DIM, int HIGH, int STAGES>
static __global__ void __launch_bounds__(THREADS) attention_kernel(const __grid_constant__ Attention a) {
        extern __shared__ __align__(1024) uint4 raw[];
        typedef Tile<DIM> T;
        constexpr int ROWS = WARPS * HIGH * 16;
        uint32_t *bad = (uint32_t *) raw + (ROWS * T::PITCH + STAGES * 2 * T::SIZE) / 4;
        const uint32_t head = blockIdx.y, kv_head = head / a.group;
        const uint64_t block = a.a.causal ? gridDim.x - 1 - blockIdx.x : blockIdx.x, first = block * ROWS; /* causal: the longest first */
        const uint64_t k_ld = a.a.k_ld * 2, v_ld = a.a.v_ld * 2;
        const uint64_t rows = a.a.n_q - first < ROWS ? a.a.n_q - first : ROWS, keys = a.a.causal ? a.a.first_row + first + rows : a.a.n_k;
        const uint32_t q = (uint32_t) __cvta_generic_to_shared(raw), kv = q + ROWS * T::PITCH, tiles = (uint32_t) ((keys + KEYS - 1) / KEYS);
        /* from this tile on the block's first row does not see all of a tile */
        const uint32_t partly = a.a.causal ? (uint32_t) ((a.a.first_row + first + 1) / KEYS) : tiles;
        const int pieces = (int) a.a.head_dim / 8;
        const uint64_t query = blockIdx.z * a.a.n_q + first; /* of all sequences' */
        const uint8_t *k = (const uint8_t *) a.a.k + (uint64_t) kv_head * a.a.head_dim * 2 + blockIdx.z * a.a.n_k * k_ld;
        const uint8_t *v = (const uint8_t *) a.a.v + (uint64_t) kv_head * a.a.head_dim * 2 + blockIdx.z * a.a.n_k * v_ld;
        State<DIM, HIGH> t = {};

#pragma unroll
        for (int h = 0; h < HIGH; h++)
                t.top[h][0] = t.top[h][1] = -INFINITY;
        fetch<DIM, ROWS>(q, (const uint8_t *) a.a.q + (query * a.a.q_ld + (uint64_t) head * a.a.head_dim) * 2, a.a.q_ld * 2, rows, pieces);
        if (a.negative) {
                fetched();
                queries_negate((uint8_t *) raw, ROWS * T::PITCH);
        }
        if (STAGES == 2) {
                fetch<DIM, KEYS>(kv, k, k_ld, keys, pieces);
                fetch<DIM, KEYS>(kv + T::SIZE, v, v_ld, keys, pieces);
        }

#pragma unroll 1
        for (uint32_t tile = 0; tile < tiles; tile++) {
                const uint32_t at = STAGES == 2 ? kv + tile % 2 * 2 * T::SIZE : kv;
                float s[HIGH][KEYS / 8][4] = {};

                if (STAGES == 1) {
                        __syncthreads();
                        fetch<DIM, KEYS>(kv, k, k_ld, keys - (uint64_t) tile * KEYS, pieces);
                        fetch<DIM, KEYS>(kv + T::SIZE, v, v_ld, keys - (uint64_t) tile * KEYS, pieces);
                }
                fetched();
                k += KEYS * k_ld;
                v += KEYS * v_ld;
                if (STAGES == 2 && tile + 1 < tiles) {
                        const uint32_t next = kv + (tile + 1) % 2 * 2 * T::SIZE;

                        fetch<DIM, KEYS>(next, k, k_ld, keys - (uint64_t) (tile + 1) * KEYS, pieces);
                        fetch<DIM, KEYS>(next + T::SIZE, v, v_ld, keys - (uint64_t) (tile + 1) * KEYS, pieces);
                }
                scores<TYPE, DIM, HIGH>(s, q, at);
                if (tile + 1 == tiles || tile >= partly)
                        mask<HIGH>(s, row_seen<HIGH>(a, first, tile), keys - (uint64_t) tile * KEYS, a.a.causal);
                softmax<DIM, HIGH, false>(s, t, a.unit, NULL);
                if (tile >= partly && !values_clean<TYPE, DIM>((uint8_t *) raw + (at + T::SIZE - q), bad))
                        values_bad<TYPE, DIM, HIGH>(t, s, bad, (uint8_t *) raw + (at - q), v - KEYS * v_ld, v_ld, row_seen<HIGH>(a, first, tile),
                                (int) a.a.head_dim);
                values<TYPE, DIM, HIGH>(t, [&](int h, int i, int j) { return pack_weights<TYPE, HIGH>(s, h, i, j); }, at + T::SIZE);
        }
        store<TYPE, DIM, HIGH>(t, a, head, blockIdx.z * a.a.n_q + first, (blockIdx.z + UINT64_C(1)) * a.a.n_q, Quotient());
}

template <LkType TYPE, int DIM, int HIGH, int STAGES> static int launch(LkContext *c, const Attention *a) {
        const int rows = WARPS * HIGH * 16, shared = rows * Tile<DIM>::PITCH + STAGES * 2 * Tile<DIM>::SIZE + KEYS / 8;
        const uint64_t blocks = (a->a.n_q + rows - 1) / rows;
        int r;

        if (blocks > GRID_X_MAX || a->a.heads > GRID_Y_MAX)
                return -EINVAL;
        r = cuda_result(cudaFuncSetAttribute(
                attention_kernel<TYPE, DIM, HIGH, STAGES>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
        if (r < 0)
                return r;
        attention_kernel<TYPE, DIM, HIGH, STAGES><<<dim3((unsigned) blocks, a->a.heads, a->sequences), THREADS, shared, attention_stream(c, &a->a)>>>(*a);
        return cuda_result(cudaGetLastError());
}

template <LkType TYPE> static int attention_mma(LkContext *c, const Attention *a) {
        if (a->a.head_dim <= 64)
                return launch<TYPE, 64, 2, 2>(c, a);
        if (a->a.head_dim <= 80)
                return launch<TYPE, 80, 2, 2>(c, a);
        if (a->a.head_dim <= 128)
                return launch<TYPE, 128, 2, 2>(c, a);
        return launch<TYPE, 256, 1, 1>(c, a);
}
