/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Attention for Hopper (sm_90a): every key for every query. One warp of a producer group brings tiles of keys and
 * values by the copy engine; GROUPS warpgroups of 64 queries each multiply. A tile's
 * weights meet its values while the next tile has its softmax, and one group multiplies while the others have
 * their own (taking turns by barriers was 2 % slower than leaving that to chance). Two blocks beside each other in a cluster have the same head:
 * each brings half of a tile for both.
 *
 * "One answer": keys in absolute order in tiles of KEYS, which is part of the answer here (ops.h has its own for
 * the CPU); all sums and maxima are of one row; nothing depends on where a row lies or what its neighbours
 * are. Rows and keys beyond the ends are read as zero; such keys' scores are minus infinity. */

#include "kernels/cuda/attention.cuh"
#include "kernels/cuda/hopper.cuh"

#include "kernels/cuda/ptx.cuh"

#define ROWS 64 /* of a warpgroup */
#define HALF 64 /* numbers, 128 bytes: a row's piece that the copy engine swizzles */

/* TYPE: of all numbers in memory, LK_BF16 or LK_F16. DIM: head size, 64 or 128. KEYS: of a tile. STAGES: tiles of keys, and of values, in
 * shared memory. MANY: there may be several sequences. */
template <LkType TYPE_, int DIM_, int KEYS_, int GROUPS_, int STAGES_, bool MANY_> struct Form {
        static constexpr LkType TYPE = TYPE_;
        static constexpr int DIM = DIM_, KEYS = KEYS_, GROUPS = GROUPS_, STAGES = STAGES_;
        static constexpr bool MANY = MANY_;

        static constexpr int SCORES = KEYS / 2, VALUES = DIM / 2; /* of a thread */
        static constexpr int HALVES = DIM / HALF;
        static constexpr bool HELD = DIM < 128; /* the compiler has registers to spare, and is to be told when weights are not read any more */
        static constexpr int KEY_HALF = KEYS * 128, KEY_TILE = HALVES * KEY_HALF;
        static constexpr int QUERY_HALF = ROWS * 128, QUERY_TILE = HALVES * QUERY_HALF;
        static constexpr int THREADS = (GROUPS + 1) * 128;
        static constexpr int PRODUCER_REGISTERS = GROUPS == 2 ? 40 : 32, REGISTERS = GROUPS == 2 ? 232 : 160;

        struct Barriers {
                uint64_t q, k_full[STAGES], k_free[STAGES], v_full[STAGES], v_free[STAGES];
        };

        /* Tiles begin at multiples of 1024. */
        static constexpr int Q_AT = 0, K_AT = GROUPS * QUERY_TILE, V_AT = K_AT + STAGES * KEY_TILE, BARRIERS_AT = V_AT + STAGES * KEY_TILE;
        static constexpr int SHARED = BARRIERS_AT + (int) sizeof(Barriers) + 1024;
        static_assert(KEYS % (8 * CLUSTER) == 0 && KEYS % 16 == 0 && DIM % HALF == 0 && SHARED <= 227 * 1024, "");

        /* What a group carries from tile to tile. */
        struct Rows {
                float s[SCORES];        /* a tile's scores, then weights */
                float o[VALUES];        /* sum of weights times values, at `top` of two tiles before */
                uint32_t p[SCORES / 2]; /* weights as operands */
                float top[2], sum[2], factor[2]; /* factor: what brings o to the newest top */
        };
};

typedef struct Args {
        uint64_t n_q, n_k, o_ld;
        uint32_t group; /* query heads of a key head */
        float scale;    /* of scores as exponents of 2 */
        uint16_t *o;
} Args;

#define REGISTER(i) "+f"(d[i])
#define EIGHT(i) \
        REGISTER(i), REGISTER(i + 1), REGISTER(i + 2), REGISTER(i + 3), REGISTER(i + 4), REGISTER(i + 5), REGISTER(i + 6), REGISTER(i + 7)
#define LIST32 EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24)
#define D32 \
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}"
#define D88 \
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29," \
        "%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57," \
        "%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87}"

#define SCORE_PRODUCT(keys, types, registers, a_at, b_at, add_at, ...) \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %" add_at ", 0; wgmma.mma_async.sync.aligned.m64n" keys "k16.f32." types " " registers \
                     ", %" a_at ", %" b_at ", p, 1, 1, 0, 0; }" \
                     : __VA_ARGS__ \
                     : "l"(a), "l"(b), "r"(add))
#define SCORE_PRODUCT_OF(keys, ...) \
        if (TYPE == LK_BF16) \
                SCORE_PRODUCT(keys, "bf16.bf16", __VA_ARGS__); \
        else \
                SCORE_PRODUCT(keys, "f16.f16", __VA_ARGS__)

/* d[64, keys] = (add ? d : 0) + a . b^T over 16 numbers; both by rows in shared memory. d has half as many numbers as there are keys. */
template <LkType TYPE> static __device__ void score_product(float (&d)[64], uint64_t a, uint64_t b, int add) {
        SCORE_PRODUCT_OF("128", D64, "64", "65", "66", LIST64(REGISTER));
}

template <LkType TYPE> static __device__ void score_product(float (&d)[88], uint64_t a, uint64_t b, int add) {
        SCORE_PRODUCT_OF("176", D88, "88", "89", "90", LIST64(REGISTER), EIGHT(64), EIGHT(72), EIGHT(80));
}

#define VALUE_PRODUCT(dim, types, registers, a0, a1, a2, a3, b_at, ...) \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" dim "k16.f32." types " " registers ", {%" a0 ",%" a1 ",%" a2 ",%" a3 "}, %" b_at \
                     ", 1, 1, 1, 1;" \
                     : __VA_ARGS__ \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

/* d[64, dim] += a . b over 16 keys; a in registers, b by keys. d has half as many numbers as a head. */
template <LkType TYPE> static __device__ void value_product(float (&d)[64], const uint32_t *a, uint64_t b) {
        if (TYPE == LK_BF16)
                VALUE_PRODUCT("128", "bf16.bf16", D64, "64", "65", "66", "67", "68", LIST64(REGISTER));
        else
                VALUE_PRODUCT("128", "f16.f16", D64, "64", "65", "66", "67", "68", LIST64(REGISTER));
}

template <LkType TYPE> static __device__ void value_product(float (&d)[32], const uint32_t *a, uint64_t b) {
        if (TYPE == LK_BF16)
                VALUE_PRODUCT("64", "bf16.bf16", D32, "32", "33", "34", "35", "36", LIST32);
        else
                VALUE_PRODUCT("64", "f16.f16", D32, "32", "33", "34", "35", "36", LIST32);
}

static __device__ float exp2_unit(float x) {
        float y;

        asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
        return y;
}

/* Where a thread's numbers of a tile of 64 rows are: element i is in row i / 2 % 2 * 8 + lane / 4 of the
 * warp's 16 and in column i / 4 * 8 + lane % 4 * 2 + i % 2. */

template <int SCORES> static __device__ void mask_end(float (&s)[SCORES], uint32_t keys) {
        uint32_t column = threadIdx.x % 4 * 2;

#pragma unroll
        for (int i = 0; i < SCORES; i++)
                if (column + (uint32_t) (i / 4 * 8 + i % 2) >= keys)
                        s[i] = -INFINITY;
}

/* Scores to weights exp(score - top). A thread's sum is of its own columns. */
template <int SCORES> static __device__ void softmax(float (&s)[SCORES], float (&top)[2], float (&sum)[2], float (&factor)[2], float scale) {
        float most[2] = {s[0], s[2]}, low[2], part[2] = {};

#pragma unroll
        for (int i = 1; i < SCORES; i++)
                most[i / 2 % 2] = fmaxf(most[i / 2 % 2], s[i]);
#pragma unroll
        for (int r = 0; r < 2; r++) {
                float m = most[r];

                m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
                m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
                m = fmaxf(m, top[r]);
                factor[r] = exp2_unit((top[r] - m) * scale);
                top[r] = m;
                low[r] = -m * scale;
        }
#pragma unroll
        for (int i = 0; i < SCORES; i++) {
                s[i] = exp2_unit(fmaf(s[i], scale, low[i / 2 % 2]));
                part[i / 2 % 2] += s[i];
        }
#pragma unroll
        for (int r = 0; r < 2; r++)
                sum[r] = fmaf(sum[r], factor[r], part[r]);
}

template <LkType TYPE> static __device__ uint32_t pair_of(float low, float high) {
        return TYPE == LK_BF16 ? pair_round(low, high) : pair_round_f16(low, high);
}

template <LkType TYPE, int SCORES> static __device__ void pack(const float (&s)[SCORES], uint32_t (&p)[SCORES / 2]) {
#pragma unroll
        for (int i = 0; i < SCORES; i += 2)
                p[i / 2] = pair_of<TYPE>(s[i], s[i + 1]);
}

template <class F> static __device__ void scores(float (&s)[F::SCORES], uint32_t q, uint32_t k) {
#pragma unroll
        for (int i = 0; i < F::DIM / 16; i++)
                score_product<F::TYPE>(
                        s, describe(q + i / 4 * F::QUERY_HALF + i % 4 * 32, 16), describe(k + i / 4 * F::KEY_HALF + i % 4 * 32, 16), i > 0);
        products_commit();
}

template <class F> static __device__ void values(float (&o)[F::VALUES], const uint32_t (&p)[F::SCORES / 2], uint32_t v) {
#pragma unroll
        for (int i = 0; i < F::KEYS / 16; i++)
                value_product<F::TYPE>(o, p + i * 4, describe(v + i * 16 * 128, F::KEY_HALF));
        products_commit();
}

/* To all blocks of the cluster. */
template <bool MANY>
static __device__ void bring(void *to, const CUtensorMap *map, uint64_t *b, uint32_t column, uint32_t row, uint32_t sequence) {
        if (MANY)
                load_for_all(to, map, b, column, row, sequence);
        else
                load_for_all(to, map, b, column, row);
}

/* One thread brings all tiles. */
template <class F>
static __device__ void produce(uint8_t *shared, typename F::Barriers *b, const CUtensorMap *q, const CUtensorMap *k, const CUtensorMap *v,
        uint32_t head, uint32_t key_head, uint32_t row, uint32_t sequence, uint32_t tiles) {
        const uint32_t part = F::KEYS / CLUSTER, rank = cluster_rank();

        barrier_expect(&b->q, F::GROUPS * F::QUERY_TILE);
        for (int g = 0; g < F::GROUPS; g++)
                for (int h = 0; h < F::HALVES; h++) {
                        uint8_t *to = shared + F::Q_AT + g * F::QUERY_TILE + h * F::QUERY_HALF;
                        const uint32_t column = head * F::DIM + (uint32_t) h * HALF;

                        if (F::MANY)
                                load(to, q, &b->q, column, row + (uint32_t) g * ROWS, sequence);
                        else
                                load(to, q, &b->q, column, row + (uint32_t) g * ROWS);
                }
        for (uint32_t j = 0; j < tiles; j++) {
                uint32_t stage = j % F::STAGES, phase = j / F::STAGES % 2, at = stage * F::KEY_TILE + rank * part * 128;

                barrier_wait(&b->k_free[stage], phase ^ 1);
                barrier_expect(&b->k_full[stage], F::KEY_TILE);
                for (uint32_t h = 0; h < F::HALVES; h++)
                        bring<F::MANY>(shared + F::K_AT + at + h * F::KEY_HALF, k, &b->k_full[stage], key_head * F::DIM + h * HALF,
                                j * F::KEYS + rank * part, sequence);
                barrier_wait(&b->v_free[stage], phase ^ 1);
                barrier_expect(&b->v_full[stage], F::KEY_TILE);
                for (uint32_t h = 0; h < F::HALVES; h++)
                        bring<F::MANY>(shared + F::V_AT + at + h * F::KEY_HALF, v, &b->v_full[stage], key_head * F::DIM + h * HALF,
                                j * F::KEYS + rank * part, sequence);
        }
}

/* A group is done with a stage: every block of the cluster hears it, for all bring parts of it. */
static __device__ void release(uint64_t *b) {
        if (threadIdx.x % 128 < CLUSTER)
                barrier_arrive(b, threadIdx.x % 128);
}

template <class F>
static __device__ void store(const Args &a, const float (&o)[F::VALUES], const float (&sum)[2], uint32_t head, uint32_t row, uint32_t sequence) {
        uint32_t lane = threadIdx.x % 32;

        row += threadIdx.x / 32 % 4 * 16 + lane / 4;
#pragma unroll
        for (int r = 0; r < 2; r++) {
                float all = sum[r];
                uint64_t at = row + r * 8;

                if (F::MANY)
                        at += sequence * a.n_q;

                uint16_t *to = a.o + at * a.o_ld + head * F::DIM + lane % 4 * 2;

                all += __shfl_xor_sync(0xffffffffu, all, 1);
                all += __shfl_xor_sync(0xffffffffu, all, 2);
                if (row + r * 8 < a.n_q)
#pragma unroll
                        for (int i = 0; i < F::DIM / 8; i++)
                                *(uint32_t *) (to + i * 8) =
                                        pair_of<F::TYPE>(__fdiv_rn(o[i * 4 + r * 2], all), __fdiv_rn(o[i * 4 + r * 2 + 1], all));
        }
}

/* Behind the wait for the products that read p. */
template <class F> static __device__ void weights_read(uint32_t (&p)[F::SCORES / 2]) {
#pragma unroll
        for (int i = 0; F::HELD && i < F::SCORES / 2; i++)
                asm volatile("" : "+r"(p[i])::"memory");
}

template <class F> static __device__ void rescale(typename F::Rows &x) {
        if (__any_sync(0xffffffffu, x.factor[0] != 1 || x.factor[1] != 1)) /* by 1 changes nothing */
#pragma unroll
                for (int i = 0; i < F::VALUES; i++)
                        x.o[i] *= x.factor[i / 2 % 2];
}

/* Scores and softmax of tile j while the weights of tile j - 1 meet their values; those of j - 2 have begun to.
 * The wait for them stands first, so that the compiler keeps the softmax before it: it would wait as early as
 * it can within a body. LAST: the tile has `end` keys. */
template <class F, bool LAST>
static __device__ void next_tile(
        typename F::Rows &x, typename F::Barriers *b, uint32_t j, uint32_t q, uint32_t k, uint32_t v, uint32_t end, float scale) {
        uint32_t stage = j % F::STAGES, before = (j - 1) % F::STAGES;

        barrier_wait(&b->k_full[stage], j / F::STAGES % 2);
        products_wait<0>();
        weights_read<F>(x.p);
        if (j > 1)
                release(&b->v_free[(j + F::STAGES - 2) % F::STAGES]);
        pack<F::TYPE>(x.s, x.p);
        products_begin();
        scores<F>(x.s, q, k + stage * F::KEY_TILE);
        rescale<F>(x);
        barrier_wait(&b->v_full[before], (j - 1) / F::STAGES % 2);
        products_begin();
        values<F>(x.o, x.p, v + before * F::KEY_TILE);
        products_wait<1>();
        release(&b->k_free[stage]);
        if (LAST)
                mask_end(x.s, end);
        softmax(x.s, x.top, x.sum, x.factor, scale);
}

template <class F>
static __device__ void consume(
        const Args &a, uint8_t *shared, typename F::Barriers *b, int group, uint32_t head, uint32_t row, uint32_t sequence, uint32_t tiles) {
        uint32_t q = shared_address(shared) + F::Q_AT + (uint32_t) group * F::QUERY_TILE, k = shared_address(shared) + F::K_AT,
                 v = shared_address(shared) + F::V_AT, end = (uint32_t) (a.n_k - (uint64_t) (tiles - 1) * F::KEYS);
        typename F::Rows x;

#pragma unroll
        for (int i = 0; i < F::VALUES; i++)
                x.o[i] = 0;
#pragma unroll
        for (int i = 0; F::HELD && i < F::SCORES / 2; i++)
                x.p[i] = 0;
        x.top[0] = x.top[1] = -INFINITY;
        x.sum[0] = x.sum[1] = 0;
        barrier_wait(&b->q, 0);
        barrier_wait(&b->k_full[0], 0);
        products_begin();
        scores<F>(x.s, q, k);
        products_wait<0>();
        release(&b->k_free[0]);
        if (tiles == 1)
                mask_end(x.s, end);
        softmax(x.s, x.top, x.sum, x.factor, a.scale);

        for (uint32_t j = 1; j + 1 < tiles; j++)
                next_tile<F, false>(x, b, j, q, k, v, F::KEYS, a.scale);
        if (tiles > 1)
                next_tile<F, true>(x, b, tiles - 1, q, k, v, end, a.scale);

        products_wait<0>();
        weights_read<F>(x.p);
        pack<F::TYPE>(x.s, x.p);
        rescale<F>(x);
        barrier_wait(&b->v_full[(tiles - 1) % F::STAGES], (tiles - 1) / F::STAGES % 2);
        products_begin();
        values<F>(x.o, x.p, v + (tiles - 1) % F::STAGES * F::KEY_TILE);
        products_wait<0>();
        weights_read<F>(x.p);
        store<F>(a, x.o, x.sum, head, row, sequence);
}

template <LkType TYPE, int DIM, int KEYS, int GROUPS, int STAGES, bool MANY>
static __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__((GROUPS + 1) * 128, 1)
        attention_wgmma(const __grid_constant__ CUtensorMap q, const __grid_constant__ CUtensorMap k,
                const __grid_constant__ CUtensorMap v, const Args a) {
        typedef Form<TYPE, DIM, KEYS, GROUPS, STAGES, MANY> F;
        typedef typename F::Barriers Barriers;
        extern __shared__ uint8_t raw[];
        uint8_t *shared = raw + (1024 - shared_address(raw) % 1024) % 1024;
        Barriers *b = (Barriers *) (shared + F::BARRIERS_AT);
        int group = (int) threadIdx.x / 128 - 1;
        uint32_t head = blockIdx.y, row = blockIdx.x * GROUPS * ROWS, sequence = MANY ? blockIdx.z : 0, tiles = (uint32_t) ((a.n_k + KEYS - 1) / KEYS);

        if (threadIdx.x == 0) {
                barrier_init(&b->q, 1);
                for (int i = 0; i < STAGES; i++) {
                        barrier_init(&b->k_full[i], 1);
                        barrier_init(&b->v_full[i], 1);
                        barrier_init(&b->k_free[i], GROUPS * CLUSTER);
                        barrier_init(&b->v_free[i], GROUPS * CLUSTER);
                }
                asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        }
        cluster_sync();

        if (group < 0) {
                asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(F::PRODUCER_REGISTERS));
                if (threadIdx.x == 0)
                        produce<F>(shared, b, &q, &k, &v, head, head / a.group, row, sequence, tiles);
        } else {
                asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(F::REGISTERS));
                consume<F>(a, shared, b, group, head, row + (uint32_t) group * ROWS, sequence, tiles);
        }
        cluster_sync(); /* a block stays as long as the other may write or arrive here */
}

/* Boxes of `box` rows of HALF numbers; sequences of `rows` rows each. */
template <class F>
static int encode(EncodeFunction f, const void *data, uint64_t rows, uint64_t sequences, uint64_t width, uint64_t ld, uint32_t box, CUtensorMap *ret) {
        const cuuint64_t sizes[3] = {width, rows, sequences}, strides[2] = {ld * 2, rows * ld * 2};
        const cuuint32_t boxes[3] = {HALF, box, 1}, steps[3] = {1, 1, 1};

        return f(ret, F::TYPE == LK_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, F::MANY ? 3 : 2, (void *) data,
                       sizes, strides, boxes, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                       CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS
                       ? 0
                       : -EINVAL;
}

static inline bool is_aligned(const void *p, uint64_t rows, uint64_t ld) {
        return (uintptr_t) p % 16 == 0 && ld * 2 % 16 == 0 && ld < UINT64_C(1) << 39 && rows < UINT64_C(1) << 31 &&
               ld * rows < UINT64_C(1) << 39;
}

/* -EOPNOTSUPP: it does not serve the arguments, nothing was done. */
template <LkType TYPE, int DIM, int KEYS, int GROUPS, int STAGES, bool MANY>
static int attention_launch(LkContext *c, const Attention *b) {
        typedef Form<TYPE, DIM, KEYS, GROUPS, STAGES, MANY> F;
        static const EncodeFunction encode_tiled = encode_function();
        const auto kernel = attention_wgmma<TYPE, DIM, KEYS, GROUPS, STAGES, MANY>;
        const LkAttention *a = &b->a;
        const Args args = {
                .n_q = a->n_q,
                .n_k = a->n_k,
                .o_ld = a->o_ld,
                .group = b->group,
                .scale = b->unit,
                .o = (uint16_t *) a->o,
        };
        uint64_t pairs = (a->n_q + CLUSTER * GROUPS * ROWS - 1) / (CLUSTER * GROUPS * ROWS), width = (uint64_t) a->heads * DIM;
        CUtensorMap q, k, v;
        int r;

        if (a->type != TYPE || a->head_dim != DIM || a->causal || (!MANY && b->sequences > 1) || b->negative || !(b->unit > 0) ||
                !is_aligned(a->q, a->n_q, a->q_ld) || !is_aligned(a->k, a->n_k, a->k_ld) || !is_aligned(a->v, a->n_k, a->v_ld) ||
                (uintptr_t) a->o % 4 != 0 || a->o_ld % 2 != 0)
                return -EOPNOTSUPP;
        if (!encode_tiled || encode<F>(encode_tiled, a->q, a->n_q, b->sequences, width, a->q_ld, ROWS, &q) < 0 ||
                encode<F>(encode_tiled, a->k, a->n_k, b->sequences, width / b->group, a->k_ld, KEYS / CLUSTER, &k) < 0 ||
                encode<F>(encode_tiled, a->v, a->n_k, b->sequences, width / b->group, a->v_ld, KEYS / CLUSTER, &v) < 0)
                return -EOPNOTSUPP;

        r = cuda_result(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, F::SHARED));
        if (r < 0)
                return r;
        kernel<<<dim3((unsigned) pairs * CLUSTER, a->heads, b->sequences), F::THREADS, F::SHARED, attention_stream(c, a)>>>(q, k, v, args);
        return cuda_result(cudaGetLastError());
}
