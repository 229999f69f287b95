/* SPDX-License-Identifier: Apache-2.0 */
/* RMS norm of rows, optionally modulated, with a residual before and int8 rows after: kernels/cpu/norm.c, the same bits.
 *
 * The sum of squares is eight chains of as many steps as a row has pieces, longer than anything else of a row takes. So a warp of its own
 * has them for all rows of a batch at once: thread 4l + r has lane l of row r, brought there by transposing loads from shared memory. The
 * others, 16 numbers a thread, meanwhile finish the batch before and copy the one behind it to shared memory. Their columns are the same in
 * all rows, so modulation stays in registers. */

#include "kernels/cuda/norm-half.cuh"
#include "kernels/cuda/quantise-rows.cuh"

#define EACH 16u         /* numbers a thread */
#define ROWS_MOST 2u     /* of a batch */
#define WORKERS_MOST 352u
#define THREADS_MOST (WORKERS_MOST + 32u) /* 80 registers a thread at two blocks */
#define WIDTH_MAX (WORKERS_MOST * EACH)

typedef struct Neighbours {
        LkNorm norm;
        LkResidual add;      /* if ADD */
        LkQuantise quantise; /* if QUANTISE */
        int stages;
        uint32_t rows;    /* of a batch */
        uint32_t m, pieces, pitch; /* rows; pieces of a row; bytes from one to the next in shared memory */
        uint32_t workers; /* threads; one more warp sums */
} Neighbours;

static inline __host__ __device__ uint32_t row_pitch(uint64_t n) {
        return (uint32_t) ((n * 2 + 127) / 128 * 128 + 32); /* rows start in different banks */
}

/* Bytes of a weight in shared memory: bf16 as it is, others as f32. */
static inline __host__ __device__ uint32_t weight_bytes(LkType t) {
        return t == LK_BF16 ? 2 : 4;
}

/* Shared memory: two batches; what is added to one; weights; an exchange for each warp. */
typedef struct Places {
        uint32_t rows, add, weights, exchange, size;
} Places;

static inline __host__ __device__ Places places(const Neighbours &a, bool adds, bool quantises) {
        const uint32_t batch = a.rows * a.pitch, add = 2 * batch, weights = add + (adds ? batch : 0);
        const uint32_t exchange = weights + a.workers * EACH * weight_bytes(a.norm.weight.type);

        return {0, add, weights, exchange, exchange + (quantises ? a.workers / 32 * SHARE_BYTES(EACH) : 0)};
}

/* A modulation row's shift and scale, kept until another row is asked for. */
typedef struct Kept {
        int32_t row;
        uint4 shift[2], scale[2];
} Kept;

/* Sums of squares of a batch's rows by one warp, in the order of ops.h; every thread gets that of row `thread % 4`, if there is one. */
__device__ static inline float batch_sums(uint32_t at, uint32_t rows, uint32_t pitch, uint32_t pieces) {
        const unsigned lane = threadIdx.x % 32;
        uint32_t v[4];
        float sum = 0;

        at += lane % 8 / 2 % rows * pitch + (lane / 8 * 2 + lane % 2) * 16;
        matrices_load_turned(v, at); /* eight lanes of eight pieces of up to four rows, each thread its own */
#pragma unroll 4
        for (uint32_t i = 0; i < pieces; i += 8) {
                uint32_t next[4];

                at += 128; /* behind the last ones lies something else, but shared memory */
                matrices_load_turned(next, at);
#pragma unroll
                for (int j = 0; j < 4; j++) {
                        float a = bf16_low(v[j]), b = bf16_high(v[j]);

                        sum = __fmaf_rn(a, a, sum);
                        sum = __fmaf_rn(b, b, sum);
                        v[j] = next[j];
                }
        }
        sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 16));
        sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 8));
        return __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 4));
}

/* Which piece of a row is the thread's j-th. */
template <bool QUANTISE> __device__ static inline uint32_t piece_of(const Neighbours &a, unsigned j) {
        return QUANTISE ? 2 * threadIdx.x + j : threadIdx.x + j * a.workers;
}

/* A part of a modulation row: the thread's pieces of it. */
template <bool QUANTISE>
__device__ static inline void part_load(const Neighbours &a, uint4 (&to)[2], const void *mod, uint64_t ld, uint64_t part, int32_t row) {
        const void *p = row_at(row_at(mod, LK_BF16, (uint64_t) row, ld), LK_BF16, 1, part);

#pragma unroll
        for (unsigned j = 0; j < 2; j++)
                if (piece_of<QUANTISE>(a, j) < a.pieces)
                        to[j] = piece_load(p, piece_of<QUANTISE>(a, j));
}

/* The thread's pieces of the rows from `first` on are on their way to shared memory. */
template <bool ADD, bool QUANTISE> __device__ static inline void batch_copy(const Neighbours &a, uint32_t first, uint32_t x, uint32_t y) {
#pragma unroll
        for (uint32_t r = 0; r < ROWS_MOST; r++) {
                if (r >= a.rows || first + r >= a.m)
                        continue;
#pragma unroll
                for (unsigned j = 0; j < 2; j++) {
                        const uint32_t piece = piece_of<QUANTISE>(a, j);

                        if (piece >= a.pieces)
                                continue;
                        copy16(x + r * a.pitch + piece * 16, row_piece(a.norm.x, first + r, a.norm.x_ld, piece));
                        if (ADD)
                                copy16(y + r * a.pitch + piece * 16, row_piece(a.add.y, first + r, a.add.y_ld, piece));
                }
        }
        copies_commit();
}

/* x += gate * y of the thread's pieces in shared memory, also to memory. */
template <bool QUANTISE>
__device__ static inline void batch_add(const Neighbours &a, uint32_t first, const int32_t *gates, uint8_t *x, const uint8_t *y) {
        int32_t gate_row = -1;
        uint4 gate[2] = {};

#pragma unroll
        for (unsigned r = 0; r < ROWS_MOST; r++) {
                if (r >= a.rows || first + r >= a.m)
                        continue;
                if (a.add.mod && gates[r] != gate_row) {
                        gate_row = gates[r];
                        part_load<QUANTISE>(a, gate, a.add.mod, a.add.mod_ld, a.add.gate_at, gate_row);
                }
                if (r == 0)
                        copies_wait_all();
#pragma unroll
                for (unsigned j = 0; j < 2; j++) {
                        const uint32_t piece = piece_of<QUANTISE>(a, j);
                        uint4 u, v;

                        if (piece >= a.pieces)
                                continue;
                        u = piece_load(x + r * a.pitch, piece);
                        v = piece_load(y + r * a.pitch, piece);
                        if (a.add.mod)
                                v = piece_mul(gate[j], v);
                        u = piece_settled(piece_add(u, v));
                        *row_piece_mutable(a.add.x, first + r, a.norm.x_ld, piece) = u;
                        piece_store(x + r * a.pitch, piece, u);
                }
        }
}

/* The thread's weights, of any type, at any byte, to places of its own: piece by piece, one behind the other of all threads. */
template <bool QUANTISE> __device__ static inline void weights_load(const Neighbours &a, uint8_t *w) {
        const LkVector &from = a.norm.weight;

        for (unsigned i = 0; i < EACH; i++) {
                const uint64_t at = (uint64_t) piece_of<QUANTISE>(a, i / PIECE) * PIECE + i % PIECE;
                const float f = at < a.norm.n ? weight_get(from.data, from.type, at) : 0;

                if (from.type == LK_BF16)
                        ((uint16_t *) w)[(i / PIECE * a.workers + threadIdx.x) * PIECE + i % PIECE] = bf16_from_f32(f);
                else
                        ((float *) w)[(i / 4 * a.workers + threadIdx.x) * 4 + i % 4] = f;
        }
}

__device__ static inline void weights_get(const Neighbours &a, const uint8_t *w, unsigned j, float (&ret)[PIECE]) {
        if (a.norm.weight.type == LK_BF16) {
                piece_floats(piece_load(w, j * a.workers + threadIdx.x), ret);
                return;
        }

#pragma unroll
        for (unsigned i = 0; i < 2; i++) {
                const float4 four = ((const float4 *) w)[(j * 2 + i) * a.workers + threadIdx.x];

                ret[4 * i] = four.x;
                ret[4 * i + 1] = four.y;
                ret[4 * i + 2] = four.z;
                ret[4 * i + 3] = four.w;
        }
}

/* A normed, modulated piece; what is no number is not settled. */
__device__ static inline uint4 piece_norm(
        uint4 x, const float (&weight)[PIECE], float factor, bool round_first, bool modulated, const uint4 &shift, const uint4 &scale) {
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

/* The thread's pieces of a row, x to y, and to memory if wanted there. */
template <bool QUANTISE>
__device__ static inline void row_norm(
        const Neighbours &a, uint4 (&x)[2], uint32_t row, int32_t index, float factor, const uint8_t *w, Kept &kept) {
        const LkNorm &n = a.norm;

        if (n.mod && index != kept.row) {
                kept.row = index;
                part_load<QUANTISE>(a, kept.shift, n.mod, n.mod_ld, n.shift_at, kept.row);
                part_load<QUANTISE>(a, kept.scale, n.mod, n.mod_ld, n.scale_at, kept.row);
        }
#pragma unroll
        for (unsigned j = 0; j < 2; j++) {
                float weight[PIECE];

                weights_get(a, w, j, weight);
                x[j] = piece_norm(x[j], weight, factor, n.round_first, n.mod != NULL, kept.shift[j], kept.scale[j]);
                if (piece_of<QUANTISE>(a, j) >= a.pieces)
                        x[j] = make_uint4(0, 0, 0, 0);
                else if (!QUANTISE || n.y)
                        *row_piece_mutable(n.y, row, n.y_ld, piece_of<QUANTISE>(a, j)) = piece_settled(x[j]);
        }
}

/* The thread's pieces of a row rotated; the largest magnitude of the warp, which calls this together. */
__device__ static inline uint32_t row_rotate(const Neighbours &a, uint4 (&y)[2], float *exchange) {
        float v[EACH];

        piece_floats(y[0], v);
        piece_floats(y[1], v + PIECE);
        return share_make<EACH>(v, a.stages, exchange + threadIdx.x / 32 * (SHARE_BYTES(EACH) / 4), y);
}

/* Number i of a row that is normed the plain way. */
__device__ static float plain_norm(const LkNorm &a, LkType mod_type, uint64_t row, uint64_t i, float factor) {
        float h = __fmul_rn(number_get(row_at(a.x, a.type, row, a.x_ld), a.type, i), factor);

        h = __fmul_rn(a.round_first ? number_round(h, a.type) : h, weight_get(a.weight.data, a.weight.type, i));
        if (a.mod) {
                const void *mod = row_at(a.mod, mod_type, (uint64_t) a.mod_index[row], a.mod_ld);

                h = __fmaf_rn(number_round(h, a.type), __fadd_rn(1.0f, number_get(row_at(mod, mod_type, 1, a.scale_at), mod_type, i)),
                        number_get(row_at(mod, mod_type, 1, a.shift_at), mod_type, i));
        }
        return number_round(h, a.type);
}

/* What a block's threads share. A batch's numbers are asked for up to two turns after they were written, and those that are added with
 * are written two turns before. */
#define TURNS 4u

typedef struct Shared {
        float factors[TURNS][ROWS_MOST]; /* of the rows of as many batches, as are their modulation rows */
        int32_t mods[TURNS][ROWS_MOST], gates[TURNS][ROWS_MOST];
        uint32_t most[2][ROWS_MOST][WORKERS_MOST / 32], plain_most;
} Shared;

/* By the warp that sums in turn t: what the batch is normed with, and what the next but one, from row `later` on, is added with. */
template <bool ADD>
__device__ static inline void batch_sum(const Neighbours &a, uint32_t first, uint32_t later, Shared &s, uint32_t t, uint32_t at) {
        const unsigned r = threadIdx.x % 32;
        int32_t mod = 0, gate = 0;
        float sum;

        if (r < a.rows) {
                if (a.norm.mod && first + r < a.m)
                        mod = a.norm.mod_index[first + r];
                if (ADD && a.add.mod && later + r < a.m)
                        gate = a.add.mod_index[later + r];
        }
        sum = batch_sums(at, a.rows, a.pitch, a.pieces);
        if (r < a.rows) {
                s.mods[t % TURNS][r] = mod;
                s.gates[(t + 2) % TURNS][r] = gate;
                s.factors[t % TURNS][r] = row_factor(sum, a.norm.n, a.norm.eps);
        }
}

/* The rotated rows of turn t's batch to int8; all threads call it. */
__device__ static inline void batch_quantise(
        const Neighbours &a, uint32_t first, const uint4 (&y)[ROWS_MOST][2], uint32_t t, Kept &kept, Shared &s, float *exchange) {
        const unsigned lane = threadIdx.x % 32, mine = lane % ROWS_MOST; /* a thread has one row's scale, and gets the others' */
        uint32_t bits = 0, unusual;
        float scale, factor;

#pragma unroll
        for (unsigned r = 0; r < ROWS_MOST; r++) {
                const uint32_t most = __reduce_max_sync(0xffffffffu, lane < a.workers / 32 ? s.most[t % 2][r][lane] : 0);

                bits = mine == r ? most : bits;
        }
        scale = share_scale(__fmul_rn(__uint_as_float(bits), share_power(a.stages)));
        factor = share_factor(scale, a.stages);
        unusual = __ballot_sync(0xffffffffu, lane < a.rows && first + lane < a.m && !share_usual(bits));
        if (threadIdx.x < a.rows && first + threadIdx.x < a.m)
                a.quantise.scale[first + threadIdx.x] = scale; /* of an unusual row: until its own follows */
#pragma unroll
        for (unsigned r = 0; r < ROWS_MOST; r++) {
                const Factor f = factor_of(__shfl_sync(0xffffffffu, factor, (int) r));

                if (r < a.rows && first + r < a.m && !(unusual >> r & 1) && threadIdx.x < a.workers)
                        share_store<EACH>(y[r], f, a.quantise.q + (first + r) * a.quantise.q_ld, (uint32_t) a.norm.n);
        }
        if (unusual == 0)
                return;

#pragma unroll 1
        for (unsigned r = 0; r < ROWS_MOST; r++)
                if (unusual >> r & 1)
                        plain_quantise(
                                a.quantise, first + r,
                                [&](uint64_t i) { return plain_norm(a.norm, LK_BF16, first + r, i, s.factors[t % TURNS][r]); },
                                exchange, &s.plain_most);
        kept = {-1}; /* leaves its registers to that */
}

/* What fills up the last eight pieces of the rows of both batches adds 0. */
__device__ static void rows_fill_up(const Neighbours &a, uint8_t *batches) {
        const uint32_t pieces = a.pieces, pitch = a.pitch;

        for (uint32_t i = threadIdx.x; i < 2 * a.rows * 8; i += blockDim.x)
                if (pieces + i % 8 < (pieces + 7) / 8 * 8)
                        piece_store(batches + i / 8 * pitch, pieces + i % 8, make_uint4(0, 0, 0, 0));
}

/* This thread's pieces of a batch's rows into registers. */
template <bool QUANTISE> __device__ static void batch_take(const Neighbours &a, const uint8_t *batch, uint4 (&y)[ROWS_MOST][2]) {
#pragma unroll
        for (unsigned r = 0; r < ROWS_MOST; r++)
#pragma unroll
                for (unsigned j = 0; j < 2; j++)
                        if (r < a.rows && piece_of<QUANTISE>(a, j) < a.pieces)
                                y[r][j] = piece_load(batch + r * a.pitch, piece_of<QUANTISE>(a, j));
}

/* Batches of a block: turn t sums batch t, and norms batch t - 1 after the int8 rows of batch t - 2, all of which have their scale then;
 * batch t + 1 is copied meanwhile and, before the turn ends, added. What is behind the barrier of a turn is done by all threads. */
template <bool ADD, bool QUANTISE>
__global__ static void __launch_bounds__(THREADS_MOST, 2) norm_pieces(const __grid_constant__ Neighbours a) {
        extern __shared__ uint4 raw[];
        __shared__ Shared s;
        const Places at = places(a, ADD, QUANTISE);
        uint8_t *shared = (uint8_t *) raw, *w = shared + at.weights;
        float *exchange = (float *) (shared + at.exchange);
        const uint32_t batch = a.rows * a.pitch, step = gridDim.x * a.rows, begin = blockIdx.x * a.rows;
        const bool works = threadIdx.x < a.workers;
        uint4 y[ROWS_MOST][2] = {};
        Kept kept = {-1};
        uint32_t first = begin;

        rows_fill_up(a, shared);
        if (works) {
                weights_load<QUANTISE>(a, w);
                batch_copy<ADD, QUANTISE>(a, first, (uint32_t) __cvta_generic_to_shared(shared), (uint32_t) __cvta_generic_to_shared(shared + at.add));
        } else if (ADD && a.add.mod && threadIdx.x % 32 < 2 * a.rows) {
                const uint32_t t = threadIdx.x % 32 / a.rows, r = threadIdx.x % 32 % a.rows, row = first + t * step + r;

                s.gates[t][r] = row < a.m ? a.add.mod_index[row] : 0;
        }
        __syncthreads();

        for (uint32_t t = 0;; first += step, t++) {
                uint8_t *here = shared + t % 2 * batch, *other = shared + (t + 1) % 2 * batch;
                const uint32_t before = first - step;

                if (works) {
                        if (ADD)
                                batch_add<QUANTISE>(a, first, s.gates[t % TURNS], here, shared + at.add);
                        copies_wait_all();
                }
                __syncthreads();
                if (QUANTISE && t > 1)
                        batch_quantise(a, before - step, y, t - 2, kept, s, exchange);
                if (t == 0 ? first >= a.m : before >= a.m)
                        break;

                if (!works) {
                        batch_sum<ADD>(a, first, first + 2 * step, s, t, (uint32_t) __cvta_generic_to_shared(here));
                        continue;
                }
                if (t > 0)
                        batch_take<QUANTISE>(a, other, y);
                batch_copy<ADD, QUANTISE>(a, first + step, (uint32_t) __cvta_generic_to_shared(other),
                        (uint32_t) __cvta_generic_to_shared(shared + at.add));
#pragma unroll
                for (unsigned r = 0; r < ROWS_MOST; r++)
                        if (t > 0 && r < a.rows && before + r < a.m) {
                                row_norm<QUANTISE>(a, y[r], before + r, s.mods[(t - 1) % TURNS][r], s.factors[(t - 1) % TURNS][r], w, kept);
                                if (QUANTISE)
                                        s.most[(t - 1) % 2][r][threadIdx.x / 32] = row_rotate(a, y[r], exchange);
                        }
        }
}

/* Any type and alignment: a block has a row at a time. */
__global__ static void __launch_bounds__(ROW_THREADS) norm_plain(
        LkNorm a, LkType mod_type, LkResidual add, LkQuantise quantise, bool adds, bool quantises) {
        __shared__ float exchange[ROW_THREADS / 32 * PLAIN_GROUP], factor;
        __shared__ uint32_t most;

        for (uint64_t row = blockIdx.x; row < a.m; row += gridDim.x) {
                const void *x = row_at(a.x, a.type, row, a.x_ld);
                auto value = [&](uint64_t i) { return plain_norm(a, mod_type, row, i, factor); };

                if (adds)
                        row_add(add, row, threadIdx.x, ROW_THREADS);
                __syncthreads();
                if (threadIdx.x < 32) {
                        float sum = row_sum_squares(x, a.type, threadIdx.x < ROW_LANES ? a.n : 0, threadIdx.x);

                        if (threadIdx.x == 0)
                                factor = row_factor(sum, a.n, a.eps);
                }
                __syncthreads();
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

        if (!check_beside(a->type, a->y_type) || (a->y_type == LK_F16 && (q || a->mod)) || (add && !check_beside(add->type, add->y_type)))
                return false;
        if (add && (add->type != a->type || add->m != a->m || add->n != a->n || add->x != a->x || add->x_ld != a->x_ld || !add->y ||
                           add->y_ld < a->n || (add->mod && !add->mod_index)))
                return false;
        if (a->y ? a->y_ld < a->n : !q)
                return false;
        return !q || (!q->up && q->q && q->q_ld >= a->n && q->scale && check_rotation(q->rotation, a->n));
}

static bool norm_has_pieces(const LkNorm *a, LkType mod_type) {
        const LkResidual *add = a->add;
        const LkQuantise *q = a->quantise;

        return a->type == LK_BF16 && a->n <= WIDTH_MAX && rows_near(a->m, a->x_ld) && row_pieces(a->x, a->x_ld, a->n) &&
               (!a->y || (rows_near(a->m, a->y_ld) && row_pieces(a->y, a->y_ld, a->n))) &&
               (!a->mod || (mod_type == LK_BF16 && row_pieces(a->mod, a->mod_ld, a->n) && a->shift_at % PIECE == 0 &&
                                   a->scale_at % PIECE == 0)) &&
               (!add || (rows_near(a->m, add->y_ld) && row_pieces(add->y, add->y_ld, a->n) &&
                                (!add->mod || (row_pieces(add->mod, add->mod_ld, a->n) && add->gate_at % PIECE == 0)))) &&
               (!q || (a->n % SQUARE == 0 && (uintptr_t) q->q % 16 == 0 && q->q_ld % 16 == 0));
}

/* What of a quantise the norm itself says. */
static LkQuantise quantise_of(const LkNorm *a) {
        LkQuantise q = *a->quantise;

        q.x_type = a->type;
        q.m = a->m;
        q.k = a->n;
        return q;
}

/* -E2BIG: a row does not fit. */
template <bool ADD, bool QUANTISE> static int launch_pieces(LkContext *c, const LkNorm *a) {
        Neighbours all = {*a};
        unsigned blocks;
        uint64_t batches;
        int most, r;

        all.rows = ROWS_MOST;
        all.m = (uint32_t) a->m;
        all.pieces = (uint32_t) (a->n / PIECE);
        all.pitch = row_pitch(a->n);
        all.workers = (unsigned) ((a->n / PIECE + 63) / 64 * 32);
        if (ADD)
                all.add = *a->add;
        if (QUANTISE) {
                all.quantise = quantise_of(a);
                all.stages = (int) rotation_stages(a->quantise->rotation);
        }
        r = cuda_result(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, c->device));
        if (r < 0)
                return r;
        while (places(all, ADD, QUANTISE).size + sizeof(Shared) > (unsigned) most)
                if (--all.rows == 0)
                        return -E2BIG;

        batches = (a->m + all.rows - 1) / all.rows;
        r = row_grid(c, (const void *) norm_pieces<ADD, QUANTISE>, all.workers + 32, places(all, ADD, QUANTISE).size, &blocks);
        if (r < 0)
                return r;
        norm_pieces<ADD, QUANTISE><<<(unsigned) (batches < blocks ? batches : blocks), all.workers + 32, places(all, ADD, QUANTISE).size,
                c->stream>>>(all);
        return cuda_result(cudaGetLastError());
}

static int launch_plain(LkContext *c, const LkNorm *a, LkType mod_type) {
        LkResidual add = {};
        LkQuantise quantise = {};

        if (a->add)
                add = *a->add;
        if (a->quantise)
                quantise = quantise_of(a);
        norm_plain<<<(unsigned) (a->m < 65536 ? a->m : 65536), ROW_THREADS, 0, c->stream>>>(
                *a, mod_type, add, quantise, a->add != NULL, a->quantise != NULL);
        return cuda_result(cudaGetLastError());
}

extern "C" int lk_cuda_norm(LkContext *c, const LkNorm *a) {
        LkType mod_type = a->mod_type ? a->mod_type : a->type;

        if (a->m == 0 || a->n == 0)
                return 0;
        if (!check_activation_type(a->type) || !check_activation_type(mod_type) || !a->x || a->x_ld < a->n || !a->weight.data || a->weight.n != a->n ||
                (a->mod && (a->round_first || !a->mod_index)) || !neighbours_valid(a))
                return -EINVAL;
        if (a->y_type == LK_F16)
                return norm_half(c, a);

        if (norm_has_pieces(a, mod_type)) {
                int r = a->add ? (a->quantise ? launch_pieces<true, true>(c, a) : launch_pieces<true, false>(c, a))
                               : (a->quantise ? launch_pieces<false, true>(c, a) : launch_pieces<false, false>(c, a));

                if (r != -E2BIG)
                        return r;
        }
        return launch_plain(c, a, mod_type);
}
