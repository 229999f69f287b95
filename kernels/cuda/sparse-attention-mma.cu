/* SPDX-License-Identifier: Apache-2.0 */
/* Attention over lists of blocks by mma.sync, bf16: a block of threads for a head and a block of queries. The tiles are those of
 * attention-mma.cuh, and so is what is made of them: a row that sees all blocks, of which only the last is ragged, has the bits of that
 * kernel.
 *
 * Queries of the next block have another list, so two warps share a tile of keys where that kernel has four. For four blocks of threads
 * on a processor there is one tile of keys and one of values: the values come while scores are made, the next keys while values are
 * added. */

#define WARPS 2
#include "kernels/cuda/attention-mma.cuh"

#include "kernels/cpu/check.h"

#define DIM 128
#define HIGH 2
#define ROWS (WARPS * HIGH * 16)

static_assert(ROWS == LK_BLOCK_ROWS && KEYS == LK_BLOCK_ROWS && THREADS == LK_BLOCK_ROWS, "a row, a key and an entry of a list each");

typedef struct Lists {
        Attention attention;
        LkSparseAttention x;
        float inverse; /* 1 / |scale| */
} Lists;

/* In shared memory, behind the tiles. Of KEYS entries of a list: */
typedef struct Entries {
        union {
                uint32_t row[KEYS]; /* the block's first; of those that are seen */
                float score[KEYS];  /* of the others */
        };
        union {
                uint32_t n[KEYS];
                float many[KEYS];
        };
        float centre[ROWS]; /* scale * (q . centre) */
        uint32_t count;
        uint32_t zero;      /* thread_again() */
} Entries;

#define SHARED (ROWS * Tile<DIM>::PITCH + 2 * Tile<DIM>::SIZE + (int) sizeof(Entries))

/* Who a thread is: threadIdx.x, blockIdx.x, blockIdx.y. */
typedef struct Self {
        uint32_t thread, block, head;
} Self;

/* The same, as nothing that the compiler knows: addresses which follow from it are made where they are wanted. Made before the loops they
 * would take registers through them, which are all in use. */
static __device__ __forceinline__ Self self_again(const Entries *from) {
        const uint32_t zero = *(const volatile uint32_t *) &from->zero;

        return {threadIdx.x + zero, blockIdx.x + zero, blockIdx.y + zero};
}

static __device__ __forceinline__ uint32_t count_again(const Entries *from) {
        return *(const volatile uint32_t *) &from->count;
}

/* Rows of q that the block of threads is for. */
typedef struct Queries {
        uint64_t from, end;
} Queries;

static __device__ __forceinline__ Queries queries_of(const LkSparseAttention &x, Self self) {
        const uint32_t *start = x.blocks.start + x.first_block + self.block;
        const uint64_t begin = start[0], behind = start[1], first = x.a.first_row;
        const uint64_t end = behind > first ? behind - first : 0;

        return {begin > first ? begin - first : 0, end < x.a.n_q ? end : x.a.n_q};
}

/* Row `row` of the head in one of the arrays. */
static __device__ __forceinline__ const uint8_t *head_row(const LkSparseAttention &x, const void *p, uint64_t row, uint64_t ld, uint32_t head) {
        return (const uint8_t *) p + (row * ld + (uint64_t) head * x.a.head_dim) * 2;
}

/* Which of all lists it is. */
static __device__ __forceinline__ uint64_t list_of(const LkSparseAttention &x, Self self) {
        return (uint64_t) self.head * x.n_blocks + self.block;
}

/* Blocks that are seen, from entry `first` on. */
static __device__ __forceinline__ void entries_load(Entries *to, const LkSparseAttention &x, uint32_t first) {
        const Self self = self_again(to);
        const uint32_t e = first + self.thread, b = e < count_again(to) ? x.list[list_of(x, self) * x.blocks.n + e] : 0;

        to->row[self.thread] = x.blocks.start[b];
        to->n[self.thread] = x.blocks.start[b + 1] - x.blocks.start[b];
        __syncthreads();
}

/* A thread's row. q: that of the first row, in device memory. */
static __device__ void centre_load(Entries *to, const LkSparseAttention &x, const uint8_t *q, uint64_t rows, uint32_t head) {
        const float *centre = x.centre + (uint64_t) head * x.a.head_dim;
        float sum = 0;

        if (threadIdx.x < rows)
                for (uint32_t d = 0; d < x.a.head_dim; d += 8) {
                        const uint4 v = *(const uint4 *) (q + threadIdx.x * x.a.q_ld * 2 + d * 2);
                        const uint32_t pair[4] = {v.x, v.y, v.z, v.w};

#pragma unroll
                        for (uint32_t i = 0; i < 8; i++)
                                sum = __fmaf_rn(__uint_as_float(i % 2 ? pair[i / 2] & 0xffff0000u : pair[i / 2] << 16), centre[d + i], sum);
                }
        to->centre[threadIdx.x] = __fmul_rn(x.a.scale, sum);
}

/* n blocks that are not seen, from entry e on: their scores, rows and values as a tile, filled up with what weighs
 * nothing. */
static __device__ __forceinline__ void means_load(Entries *to, uint8_t *v, const LkSparseAttention &x, Self self, uint32_t e, uint32_t n) {
        const uint64_t at = list_of(x, self) * x.blocks.n;
        const uint32_t *list = x.list + at + e, own = self.thread < n ? list[self.thread] : 0;

        to->score[self.thread] = self.thread < n ? x.score[at + own] : -INFINITY;
        to->many[self.thread] = self.thread < n ? (float) (x.blocks.start[own + 1] - x.blocks.start[own]) : 0;
#pragma unroll 4
        for (uint32_t i = self.thread; i < KEYS * (DIM / 8); i += THREADS) {
                const uint32_t key = i / (DIM / 8), piece = i % (DIM / 8);
                uint4 y = {};

                if (key < n && piece * 8 < x.a.head_dim) {
                        const float4 *p = (const float4 *) (x.value + ((uint64_t) list[key] * x.a.heads + self.head) * x.a.head_dim + piece * 8);
                        const float4 low = p[0], high = p[1];

                        y = {pair_round(low.x, low.y), pair_round(low.z, low.w), pair_round(high.x, high.y), pair_round(high.z, high.w)};
                }
                *(uint4 *) (v + Tile<DIM>::place((int) key, (int) piece)) = y;
        }
        __syncthreads();
}

/* Scores of means, in the unit of the products' scores. */
static __device__ __forceinline__ void means_scores(float (&s)[HIGH][KEYS / 8][4], const Entries *from, float inverse) {
        const int lane = (int) threadIdx.x % 32, row = (int) threadIdx.x / 32 * HIGH * 16 + lane / 4;

#pragma unroll
        for (int h = 0; h < HIGH; h++)
#pragma unroll
                for (int i = 0; i < KEYS / 2; i++)
                        s[h][i / 4][i % 4] =
                                __fmul_rn(__fadd_rn(from->score[i / 4 * 8 + lane % 4 * 2 + i % 2], from->centre[row + h * 16 + i / 2 % 2 * 8]), inverse);
}

/* The quotient, with the gated coarse branch if there is one. */
struct Gated {
        const LkSparseAttention &x;
        const float *coarse; /* of the head and the block of queries */
        uint32_t head;

        __device__ __forceinline__ float operator()(uint64_t row, uint32_t column, float y) const {
                if (!x.gate)
                        return y;
                return __fmaf_rn(__uint_as_float((uint32_t) ((const uint16_t *) x.gate)[row * x.gate_ld + head * x.a.head_dim + column] << 16),
                        coarse[column], y);
        }
};

/* Weights as operands: the next keys are fetched in between, which 64 numbers more would leave no registers for. */
typedef uint32_t Weights[HIGH][KEYS / 16][4];

static __device__ __forceinline__ void weights_pack(Weights &w, const float (&s)[HIGH][KEYS / 8][4]) {
#pragma unroll
        for (int i = 0; i < HIGH * KEYS / 4; i++)
                asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;"
                             : "=r"(w[i / (KEYS / 4)][i / 4 % (KEYS / 16)][i % 4])
                             : "f"(s[i / (KEYS / 4)][i / 2 % (KEYS / 8)][i % 2 * 2 + 1]), "f"(s[i / (KEYS / 4)][i / 2 % (KEYS / 8)][i % 2 * 2]));
}

static __device__ __forceinline__ void add_values(State<DIM, HIGH> &t, const Weights &w, uint32_t v, uint32_t thread) {
        values<LK_BF16, DIM, HIGH>(t, [&](int h, int i, int j) { return w[h][i][j]; }, v, (int) thread);
}

/* The keys or values p of entry e. */
static __device__ __forceinline__ void tile_fetch(
        uint32_t to, const LkSparseAttention &x, const void *p, uint64_t ld, const Entries *entries, uint32_t e) {
        const Self self = self_again(entries);

        fetch<DIM, KEYS>(to, head_row(x, p, entries->row[e % KEYS], ld, self.head), ld * 2, entries->n[e % KEYS], (int) x.a.head_dim / 8, self.thread);
}

static __global__ void __launch_bounds__(THREADS) attention_lists(const __grid_constant__ Lists a) {
        extern __shared__ __align__(1024) uint4 raw[];
        typedef Tile<DIM> T;
        const LkSparseAttention &x = a.x;
        const uint32_t q = (uint32_t) __cvta_generic_to_shared(raw), k = q + ROWS * T::PITCH, v = k + T::SIZE;
        Entries *entries = (Entries *) ((uint8_t *) raw + ROWS * T::PITCH + 2 * T::SIZE);
        Self self = {threadIdx.x, blockIdx.x, blockIdx.y};
        Queries rows = queries_of(x, self);
        State<DIM, HIGH> t = {};

        if (rows.from >= rows.end)
                return;
#pragma unroll
        for (int h = 0; h < HIGH; h++)
                t.top[h][0] = t.top[h][1] = -INFINITY;
        fetch<DIM, ROWS>(q, head_row(x, x.a.q, rows.from, x.a.q_ld, self.head), x.a.q_ld * 2, rows.end - rows.from, (int) x.a.head_dim / 8);
        if (threadIdx.x == 0) {
                entries->zero = 0;
                entries->count = x.count[list_of(x, self)];
        }
        fetched();
        if (a.attention.negative)
                queries_negate((uint8_t *) raw, ROWS * T::PITCH);
        if (count_again(entries) > 0) {
                entries_load(entries, x, 0);
                tile_fetch(k, x, x.a.k, x.a.k_ld, entries, 0);
        }

#pragma unroll 1
        for (uint32_t e = 0; e < count_again(entries); e++) {
                float s[HIGH][KEYS / 8][4] = {};
                Weights w;

                fetched();
                tile_fetch(v, x, x.a.v, x.a.v_ld, entries, e);
                scores<LK_BF16, DIM, HIGH>(s, q, k, (int) self_again(entries).thread);
                if (entries->n[e % KEYS] < KEYS)
                        mask<HIGH>(s, 0, entries->n[e % KEYS], false);
                softmax<DIM, HIGH, false>(s, t, a.attention.unit, NULL);
                weights_pack(w, s);
                fetched();
                if (e + 1 < count_again(entries)) {
                        if ((e + 1) % KEYS == 0)
                                entries_load(entries, x, e + 1);
                        tile_fetch(k, x, x.a.k, x.a.k_ld, entries, e + 1);
                }
                add_values(t, w, v, self_again(entries).thread);
        }

        self = self_again(entries);
        if (x.value) {
                rows = queries_of(x, self);
                centre_load(entries, x, head_row(x, x.a.q, rows.from, x.a.q_ld, self.head), rows.end - rows.from, self.head);
#pragma unroll 1
                for (uint32_t e = count_again(entries); e < x.blocks.n; e += KEYS) {
                        const uint32_t n = x.blocks.n - e < KEYS ? x.blocks.n - e : KEYS;
                        float s[HIGH][KEYS / 8][4];
                        Weights w;

                        __syncthreads();
                        means_load(entries, (uint8_t *) raw + (v - q), x, self_again(entries), e, n);
                        means_scores(s, entries, a.inverse);
                        softmax<DIM, HIGH, true>(s, t, a.attention.unit, entries->many);
                        weights_pack(w, s);
                        add_values(t, w, v, self_again(entries).thread);
                }
                self = self_again(entries);
        }
        rows = queries_of(x, self);
        store<LK_BF16, DIM, HIGH>(t, a.attention, self.head, rows.from, rows.end,
                Gated{x, x.coarse + ((uint64_t) (x.first_block + self.block) * x.a.heads + self.head) * x.a.head_dim, self.head});
}

int sparse_attention_mma(LkContext *c, const LkSparseAttention *a) {
        const Lists args = {attention_call(&a->a), *a, 1 / fabsf(a->a.scale)};
        int r;

        if (a->a.type != LK_BF16 || a->a.head_dim > DIM || !attention_has_pieces(&a->a) || !isfinite(args.inverse) ||
                (uintptr_t) a->value % 16 != 0)
                return -EOPNOTSUPP;

        r = cuda_result(cudaFuncSetAttribute(attention_lists, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED));
        if (r < 0)
                return r;
        attention_lists<<<dim3(a->n_blocks, a->a.heads), THREADS, SHARED, c->stream>>>(args);
        return cuda_result(cudaGetLastError());
}
