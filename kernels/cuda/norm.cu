/* SPDX-License-Identifier: Apache-2.0 */
/* RMS norm of rows, optionally modulated, with a residual before and int8 rows after: kernels/cpu/norm.c, the same bits.
 *
 * The sum of squares is eight chains of as many steps as a row has pieces, so a warp runs those of four rows at once: thread 4l + r has
 * lane l of row r, brought there by transposing loads from shared memory. A block keeps four rows there; a thread has the same columns
 * of all rows, so that weight and modulation stay in registers. */

#include "kernels/cuda/quantise-rows.cuh"

#define ROWS 4u
#define THREADS_MOST 352u /* 88 registers a thread at two blocks */
#define WIDTH_MAX (THREADS_MOST * 2u * PIECE)

typedef struct Neighbours {
        LkNorm norm;
        LkResidual add;     /* if ADD */
        LkQuantise quantise; /* if QUANTISE */
        int stages;
} Neighbours;

static inline __host__ __device__ uint32_t row_pitch(uint64_t n) {
        return (uint32_t) ((n * 2 + 127) / 128 * 128 + 32); /* four rows start in different banks */
}

/* A modulation row's shift and scale, kept until another row is asked for. */
typedef struct Kept {
        int32_t row;
        uint4 shift[2], scale[2];
} Kept;

/* Sums of squares of four rows by one warp, in the order of ops.h; every thread gets that of row `thread % 4`. */
__device__ static inline float four_sums(uint32_t rows, uint32_t pitch, uint32_t pieces) {
        const unsigned lane = threadIdx.x % 32;
        uint32_t at = rows + lane % 8 / 2 * pitch + (lane / 8 * 2 + lane % 2) * 16;
        float sum = 0;

        for (uint32_t i = 0; i < pieces; i += 8, at += 128) {
                uint32_t v[4];

                asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                             : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                             : "r"(at)
                             : "memory");
#pragma unroll
                for (int j = 0; j < 4; j++) {
                        float a = bf16_low(v[j]), b = bf16_high(v[j]);

                        sum = __fmaf_rn(a, a, sum);
                        sum = __fmaf_rn(b, b, sum);
                }
        }
        sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 16));
        sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 8));
        return __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 4));
}

/* Which piece of a row is the thread's j-th. */
template <bool QUANTISE> __device__ static inline uint32_t piece_of(unsigned j) {
        return QUANTISE ? 2 * threadIdx.x + j : threadIdx.x + j * blockDim.x;
}

/* A part of a modulation row: the thread's pieces of it. */
template <bool QUANTISE>
__device__ static inline void part_load(uint4 (&to)[2], const void *mod, uint64_t ld, uint64_t part, int32_t row, uint32_t pieces) {
        const void *p = row_at(row_at(mod, LK_BF16, (uint64_t) row, ld), LK_BF16, 1, part);

#pragma unroll
        for (unsigned j = 0; j < 2; j++)
                if (piece_of<QUANTISE>(j) < pieces)
                        to[j] = piece_load(p, piece_of<QUANTISE>(j));
}

/* Rows from `first` on to shared memory, after the residual. */
template <bool ADD>
__device__ static inline void rows_load(const Neighbours &a, uint8_t *rows, uint32_t pitch, uint64_t first) {
        const uint32_t pieces = (uint32_t) (a.norm.n / PIECE);
        int32_t gate_row = -1;
        uint4 gate[2] = {};

#pragma unroll
        for (unsigned r = 0; r < ROWS; r += 2) {
                uint4 x[2][2] = {}, y[2][2] = {};

#pragma unroll
                for (unsigned i = 0; i < 4; i++) {
                        const uint64_t row = first + r + i / 2;
                        const uint32_t piece = piece_of<false>(i % 2);

                        if (row < a.norm.m && piece < pieces) {
                                x[i / 2][i % 2] = piece_load(row_at(a.norm.x, LK_BF16, row, a.norm.x_ld), piece);
                                if (ADD)
                                        y[i / 2][i % 2] = piece_load(row_at(a.add.y, LK_BF16, row, a.add.y_ld), piece);
                        }
                }
#pragma unroll
                for (unsigned i = 0; i < 4; i++) {
                        const uint64_t row = first + r + i / 2;
                        const uint32_t piece = piece_of<false>(i % 2);
                        uint4 u = x[i / 2][i % 2], v = y[i / 2][i % 2];

                        if (row >= a.norm.m || piece >= pieces)
                                continue;
                        if (ADD) {
                                if (a.add.mod && a.add.mod_index[row] != gate_row) {
                                        gate_row = a.add.mod_index[row];
                                        part_load<false>(gate, a.add.mod, a.add.mod_ld, a.add.gate_at, gate_row, pieces);
                                }
                                if (a.add.mod)
                                        v = piece_mul(gate[i % 2], v);
                                u = piece_settled(piece_add(u, v));
                                piece_store(row_at_mutable(a.add.x, LK_BF16, row, a.norm.x_ld), piece, u);
                        }
                        piece_store(rows + (r + i / 2) * pitch, piece, u);
                }
        }
}

/* The rows of the block's next turn come nearer meanwhile. */
template <bool ADD> __device__ static inline void rows_prefetch(const Neighbours &a, uint64_t first) {
        const uint32_t lines = (uint32_t) ((a.norm.n + 63) / 64);

        for (unsigned r = 0; r < ROWS && first + r < a.norm.m; r++)
                for (uint32_t i = threadIdx.x; i < lines; i += blockDim.x) {
                        row_prefetch((const uint8_t *) row_at(a.norm.x, LK_BF16, first + r, a.norm.x_ld) + i * 128);
                        if (ADD)
                                row_prefetch((const uint8_t *) row_at(a.add.y, LK_BF16, first + r, a.add.y_ld) + i * 128);
                }
}

/* The thread's weights, of any type, at any byte, to places of its own. */
template <bool QUANTISE> __device__ static inline void weights_load(const LkNorm &a, float4 *w) {
        for (unsigned i = 0; i < 2 * PIECE; i++) {
                uint64_t at = (uint64_t) piece_of<QUANTISE>(i / PIECE) * PIECE + i % PIECE;

                ((float *) (w + i / 4 * blockDim.x + threadIdx.x))[i % 4] = at < a.n ? weight_get(a.weight.data, a.weight.type, at) : 0;
        }
}

/* A normed, modulated piece; what is no number is not settled. */
__device__ static inline uint4 piece_norm(
        uint4 x, const float4 *w, float factor, bool round_first, bool modulated, const uint4 &shift, const uint4 &scale) {
        const float4 w0 = w[threadIdx.x], w1 = w[blockDim.x + threadIdx.x];
        const float weight[PIECE] = {w0.x, w0.y, w0.z, w0.w, w1.x, w1.y, w1.z, w1.w};
        float v[PIECE], s[PIECE], t[PIECE];

        piece_floats(x, v);
#pragma unroll
        for (unsigned i = 0; i < PIECE; i++)
                v[i] = __fmul_rn(v[i], factor);
        if (round_first)
                piece_floats(piece_round(v), v);
#pragma unroll
        for (unsigned i = 0; i < PIECE; i++)
                v[i] = __fmul_rn(v[i], weight[i]);
        x = piece_round(v);
        if (!modulated)
                return x;

        piece_floats(x, v);
        piece_floats(scale, s);
        piece_floats(shift, t);
#pragma unroll
        for (unsigned i = 0; i < PIECE; i++)
                v[i] = __fmaf_rn(v[i], __fadd_rn(1.0f, s[i]), t[i]);
        return piece_round(v);
}

/* A row that lies in shared memory, by all threads. */
template <bool QUANTISE>
__device__ static inline void row_norm(const Neighbours &a, uint8_t *x, uint64_t row, float factor, const float4 *w, Kept &kept,
        float *exchange, Share *ret) {
        const LkNorm &n = a.norm;
        const uint32_t pieces = (uint32_t) (n.n / PIECE);
        uint4 y[2] = {};

        if (n.mod && n.mod_index[row] != kept.row) {
                kept.row = n.mod_index[row];
                part_load<QUANTISE>(kept.shift, n.mod, n.mod_ld, n.shift_at, kept.row, pieces);
                part_load<QUANTISE>(kept.scale, n.mod, n.mod_ld, n.scale_at, kept.row, pieces);
        }
#pragma unroll
        for (unsigned j = 0; j < 2; j++)
                if (piece_of<QUANTISE>(j) < pieces)
                        y[j] = piece_norm(piece_load(x, piece_of<QUANTISE>(j)), w + j * 2 * blockDim.x, factor, n.round_first, n.mod != NULL,
                                kept.shift[j], kept.scale[j]);
        if (!QUANTISE || n.y)
#pragma unroll
                for (unsigned j = 0; j < 2; j++)
                        if (piece_of<QUANTISE>(j) < pieces)
                                piece_store(row_at_mutable(n.y, LK_BF16, row, n.y_ld), piece_of<QUANTISE>(j), piece_settled(y[j]));
        if (QUANTISE)
                *ret = share_make(
                        [&](float (&v)[SHARE]) {
                                piece_floats(y[0], v);
                                piece_floats(y[1], v + PIECE);
                        },
                        a.stages, exchange);
}

/* The rotated rows in shared memory to int8. */
__device__ static inline void rows_quantise(const Neighbours &a, uint8_t *rows, uint32_t pitch, uint64_t first,
        const uint32_t (&most)[ROWS][THREADS_MOST / 32], uint32_t exact, float *exchange) {
        const unsigned lane = threadIdx.x % 32, warps = blockDim.x / 32;
        const bool mine = threadIdx.x < a.norm.n / SHARE;

#pragma unroll 1
        for (unsigned r = 0; r < ROWS && first + r < a.norm.m; r++) {
                float s = share_scale(__uint_as_float(__reduce_max_sync(0xffffffffu, lane < warps ? most[r][lane] : 0)));
                uint4 low = {}, high = {};

                if (threadIdx.x == 0)
                        a.quantise.scale[first + r] = s;
                if (mine) {
                        low = piece_load(rows + r * pitch, 2 * threadIdx.x);
                        high = piece_load(rows + r * pitch, 2 * threadIdx.x + 1);
                }
                share_store(low, high, share_factor(s), a.stages, exact >> r & 1, exchange,
                        a.quantise.q + (first + r) * a.quantise.q_ld + threadIdx.x * SHARE, mine);
        }
}

/* Shared memory: four rows, the weights, an exchange for each warp. A turn's int8 rows: the rotated rows lie where the rows were, each thread's
 * share in its own place. */
template <bool ADD, bool QUANTISE> __global__ static void __launch_bounds__(THREADS_MOST, 2) norm_pieces(const Neighbours a) {
        extern __shared__ uint4 raw[];
        __shared__ float factors[ROWS];
        __shared__ uint32_t most[ROWS][THREADS_MOST / 32];
        uint8_t *rows = (uint8_t *) raw;
        const uint32_t pieces = (uint32_t) (a.norm.n / PIECE), pitch = row_pitch(a.norm.n);
        const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const bool mine = threadIdx.x < pieces / 2; /* a whole share, if QUANTISE */
        float4 *w = (float4 *) (rows + ROWS * pitch);
        float *exchange = (float *) (w + 4 * blockDim.x) + warp * (EXCHANGE_SIZE / 4);
        Kept kept = {-1};

        weights_load<QUANTISE>(a.norm, w);
        for (uint32_t i = threadIdx.x; i < ROWS * 8; i += blockDim.x) /* what fills up the last eight pieces adds 0 */
                if (pieces + i % 8 < (pieces + 7) / 8 * 8)
                        piece_store(rows + i / 8 * pitch, pieces + i % 8, make_uint4(0, 0, 0, 0));

        for (uint64_t first = (uint64_t) blockIdx.x * ROWS; first < a.norm.m; first += (uint64_t) gridDim.x * ROWS) {
                uint32_t exact = 0;

                rows_load<ADD>(a, rows, pitch, first);
                __syncthreads();
                rows_prefetch<ADD>(a, first + (uint64_t) gridDim.x * ROWS);
                if (warp == 0) {
                        float sum = four_sums((uint32_t) __cvta_generic_to_shared(rows), pitch, pieces);

                        if (lane < ROWS)
                                factors[lane] = row_factor(sum, a.norm.n, a.norm.eps);
                }
                __syncthreads();

#pragma unroll 1
                for (unsigned r = 0; r < ROWS && first + r < a.norm.m; r++) {
                        Share s;

                        row_norm<QUANTISE>(a, rows + r * pitch, first + r, factors[r], w, kept, exchange, &s);
                        if (QUANTISE) {
                                if (mine) {
                                        piece_store(rows + r * pitch, 2 * threadIdx.x, s.low);
                                        piece_store(rows + r * pitch, 2 * threadIdx.x + 1, s.high);
                                }
                                if (lane == 0)
                                        most[r][warp] = __float_as_uint(s.most);
                                exact |= (uint32_t) s.exact << r;
                        }
                }
                __syncthreads();
                if (QUANTISE) {
                        rows_quantise(a, rows, pitch, first, most, exact, exchange);
                        __syncthreads();
                }
        }
}

/* Any type and alignment: a block has a row at a time. */
__global__ static void __launch_bounds__(ROW_THREADS) norm_plain(
        LkNorm a, LkType mod_type, LkResidual add, LkQuantise quantise, bool adds, bool quantises) {
        __shared__ float exchange[ROW_THREADS / 32 * PLAIN_GROUP], factor;
        __shared__ uint32_t most;

        for (uint64_t row = blockIdx.x; row < a.m; row += gridDim.x) {
                const void *x = row_at(a.x, a.type, row, a.x_ld), *shift = NULL, *scale = NULL;
                auto value = [&](uint64_t i) {
                        float h = __fmul_rn(number_get(x, a.type, i), factor);

                        h = __fmul_rn(a.round_first ? number_round(h, a.type) : h, weight_get(a.weight.data, a.weight.type, i));
                        if (a.mod)
                                h = __fmaf_rn(number_round(h, a.type), __fadd_rn(1.0f, number_get(scale, mod_type, i)),
                                        number_get(shift, mod_type, i));
                        return number_round(h, a.type);
                };

                if (adds)
                        row_add(add, row, threadIdx.x, ROW_THREADS);
                __syncthreads();
                if (threadIdx.x < 32) {
                        float sum = row_sum_squares(x, a.type, threadIdx.x < ROW_LANES ? a.n : 0, threadIdx.x);

                        if (threadIdx.x == 0)
                                factor = row_factor(sum, a.n, a.eps);
                }
                __syncthreads();
                if (a.mod) {
                        const void *mod = row_at(a.mod, mod_type, (uint64_t) a.mod_index[row], a.mod_ld);

                        shift = row_at(mod, mod_type, 1, a.shift_at);
                        scale = row_at(mod, mod_type, 1, a.scale_at);
                }
                if (quantises)
                        plain_quantise(quantise, row, value, exchange, &most);
                if (a.y)
                        for (uint64_t i = threadIdx.x; i < a.n; i += ROW_THREADS)
                                number_put(row_at_mutable(a.y, a.type, row, a.y_ld), a.type, i, value(i));
                __syncthreads();
        }
}

/* What is asked for beside the norm does not contradict it (kernels/cpu/norm.c). */
static bool neighbours_valid(const LkNorm *a) {
        const LkResidual *add = a->add;
        const LkQuantise *q = a->quantise;

        if (add && (add->type != a->type || add->m != a->m || add->n != a->n || add->x != a->x || add->x_ld != a->x_ld || !add->y ||
                           add->y_ld < a->n || (add->mod && !add->mod_index)))
                return false;
        if (a->y ? a->y_ld < a->n : !q)
                return false;
        return !q || (!q->up && q->q && q->q_ld >= a->n && q->scale && rotation_valid(q->rotation, a->n));
}

static bool norm_has_pieces(const LkNorm *a, LkType mod_type) {
        const LkResidual *add = a->add;
        const LkQuantise *q = a->quantise;

        return a->type == LK_BF16 && a->n <= WIDTH_MAX && row_pieces(a->x, a->x_ld, a->n) && (!a->y || row_pieces(a->y, a->y_ld, a->n)) &&
               (!a->mod || (mod_type == LK_BF16 && row_pieces(a->mod, a->mod_ld, a->n) && a->shift_at % PIECE == 0 &&
                                   a->scale_at % PIECE == 0)) &&
               (!add || (row_pieces(add->y, add->y_ld, a->n) &&
                                (!add->mod || (row_pieces(add->mod, add->mod_ld, a->n) && add->gate_at % PIECE == 0)))) &&
               (!q || (a->n % SHARE == 0 && (uintptr_t) q->q % 16 == 0 && q->q_ld % 16 == 0));
}

template <bool ADD, bool QUANTISE> static int launch_pieces(LkContext *c, const LkNorm *a) {
        const unsigned threads = (unsigned) ((a->n / PIECE + 63) / 64 * 32);
        const uint64_t shared = ROWS * row_pitch(a->n) + threads * 64 + (QUANTISE ? threads / 32 * EXCHANGE_SIZE : 0), turns = (a->m + ROWS - 1) / ROWS;
        Neighbours all = {*a};
        unsigned blocks;
        int r;

        if (ADD)
                all.add = *a->add;
        if (QUANTISE) {
                all.quantise = *a->quantise;
                all.stages = (int) rotation_stages(a->quantise->rotation);
        }
        r = row_grid(c, (const void *) norm_pieces<ADD, QUANTISE>, threads, shared, &blocks);
        if (r < 0)
                return r;
        norm_pieces<ADD, QUANTISE><<<(unsigned) (turns < blocks ? turns : blocks), threads, shared, c->stream>>>(all);
        return cuda_result(cudaGetLastError());
}

static int launch_plain(LkContext *c, const LkNorm *a, LkType mod_type) {
        LkResidual add = {};
        LkQuantise quantise = {};

        if (a->add)
                add = *a->add;
        if (a->quantise) {
                quantise = *a->quantise;
                quantise.x_type = a->type;
                quantise.m = a->m;
                quantise.k = a->n;
        }
        norm_plain<<<(unsigned) (a->m < 65536 ? a->m : 65536), ROW_THREADS, 0, c->stream>>>(
                *a, mod_type, add, quantise, a->add != NULL, a->quantise != NULL);
        return cuda_result(cudaGetLastError());
}

extern "C" int lk_cuda_norm(LkContext *c, const LkNorm *a) {
        LkType mod_type = a->mod_type ? a->mod_type : a->type;

        if (a->m == 0 || a->n == 0)
                return 0;
        if (!row_types(a->type) || !row_types(mod_type) || !a->x || a->x_ld < a->n || !a->weight.data || a->weight.n != a->n ||
                (a->mod && (a->round_first || !a->mod_index)) || !neighbours_valid(a))
                return -EINVAL;

        if (!norm_has_pieces(a, mod_type))
                return launch_plain(c, a, mod_type);
        if (a->add)
                return a->quantise ? launch_pieces<true, true>(c, a) : launch_pieces<true, false>(c, a);
        return a->quantise ? launch_pieces<false, true>(c, a) : launch_pieces<false, false>(c, a);
}
