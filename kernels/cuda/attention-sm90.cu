/* SPDX-License-Identifier: Apache-2.0 */
/* Attention for Hopper (sm_90a): head size 128, bf16, every key for every query. One warp of a producer group
 * brings tiles of keys and values by the copy engine; two warpgroups of 64 queries each multiply. A tile's
 * weights meet its values while the next tile has its softmax, and one group multiplies while the other has
 * its own (taking turns by barriers was 2 % slower than leaving that to chance). Two blocks beside each other in a cluster have the same head:
 * each brings half of a tile for both.
 *
 * "One answer": keys in absolute order in tiles of KEYS, which is part of the answer here (ops.h has its own for
 * the CPU); all sums and maxima are of one row; nothing depends on where a row lies or what its neighbours
 * are. Rows and keys beyond the ends are read as zero; such keys' scores are minus infinity. */

#include "kernels/cuda/attention.cuh"
#include "kernels/cuda/hopper.cuh"

#include "kernels/cuda/ptx.cuh"

#define ROWS 64 /* of a warpgroup */
#define GROUPS 2
#define KEYS 176
#define SCORES (KEYS / 2) /* of a thread */
#define STAGES 2
#define DIM 128

/* A tile is two halves of 64 numbers (128 bytes) a row, swizzled by the copy engine. */
#define KEY_HALF (KEYS * 128)
#define KEY_TILE (2 * KEY_HALF)
#define QUERY_HALF (ROWS * 128)
#define QUERY_TILE (2 * QUERY_HALF)
#define THREADS ((GROUPS + 1) * 128)

typedef struct Barriers {
        uint64_t q, k_full[STAGES], k_free[STAGES], v_full[STAGES], v_free[STAGES];
} Barriers;

#define Q_AT 0
#define K_AT (GROUPS * QUERY_TILE)
#define V_AT (K_AT + STAGES * KEY_TILE)
#define BARRIERS_AT (V_AT + STAGES * KEY_TILE)
#define SHARED (BARRIERS_AT + (int) sizeof(Barriers) + 1024) /* the tiles begin at a multiple of 1024 */

typedef struct Args {
        uint64_t n_q, n_k, o_ld;
        uint32_t group; /* query heads of a key head */
        float scale;    /* of scores as exponents of 2 */
        uint16_t *o;
} Args;

#define REGISTER(i) "+f"(d[i])
#define D88 \
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25," \
        "%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48," \
        "%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71," \
        "%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87}"
#define LIST24(F) \
        F(64), F(65), F(66), F(67), F(68), F(69), F(70), F(71), F(72), F(73), F(74), F(75), F(76), F(77), F(78), F(79), F(80), F(81), F(82), F(83), F(84), F(85), F(86), F(87)

/* d[64, KEYS] = (add ? d : 0) + a . b^T over 16 numbers; both by rows in shared memory. */
static __device__ void score_product(float (&d)[SCORES], uint64_t a, uint64_t b, int add) {
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %90, 0; wgmma.mma_async.sync.aligned.m64n176k16.f32.bf16.bf16 " D88
                     ", %88, %89, p, 1, 1, 0, 0; }"
                     : LIST64(REGISTER), LIST24(REGISTER)
                     : "l"(a), "l"(b), "r"(add));
}

/* d[64, DIM] += a . b over 16 keys; a in registers, b by keys. */
static __device__ void value_product(float (&d)[64], const uint32_t *a, uint64_t b) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " D64
                     ", {%64,%65,%66,%67}, %68, 1, 1, 1, 1;"
                     : LIST64(REGISTER)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

static __device__ float exp2_unit(float x) {
        float y;

        asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
        return y;
}

/* Where a thread's numbers of a tile of 64 rows are: element i is in row i / 2 % 2 * 8 + lane / 4 of the
 * warp's 16 and in column i / 4 * 8 + lane % 4 * 2 + i % 2. */

static __device__ void mask_end(float (&s)[SCORES], uint32_t keys) {
        uint32_t column = threadIdx.x % 4 * 2;

#pragma unroll
        for (int i = 0; i < SCORES; i++)
                if (column + (uint32_t) (i / 4 * 8 + i % 2) >= keys)
                        s[i] = -INFINITY;
}

/* Scores to weights exp(score - top). A thread's sum is of its own columns. */
static __device__ void softmax(float (&s)[SCORES], float (&top)[2], float (&sum)[2], float (&factor)[2], float scale) {
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

static __device__ void pack(const float (&s)[SCORES], uint32_t (&p)[SCORES / 2]) {
#pragma unroll
        for (int i = 0; i < SCORES; i += 2)
                p[i / 2] = pair_round(s[i], s[i + 1]);
}

static __device__ void scores(float (&s)[SCORES], uint32_t q, uint32_t k) {
#pragma unroll
        for (int i = 0; i < DIM / 16; i++)
                score_product(s, describe(q + i / 4 * QUERY_HALF + i % 4 * 32, 16), describe(k + i / 4 * KEY_HALF + i % 4 * 32, 16),
                        i > 0);
        products_commit();
}

static __device__ void values(float (&o)[64], const uint32_t (&p)[SCORES / 2], uint32_t v) {
#pragma unroll
        for (int i = 0; i < KEYS / 16; i++)
                value_product(o, p + i * 4, describe(v + i * 16 * 128, KEY_HALF));
        products_commit();
}

/* One thread brings all tiles. */
static __device__ void produce(uint8_t *shared, Barriers *b, const CUtensorMap *q, const CUtensorMap *k, const CUtensorMap *v,
        uint32_t head, uint32_t key_head, uint32_t row, uint32_t tiles) {
        const uint32_t part = KEYS / CLUSTER, rank = cluster_rank();

        barrier_expect(&b->q, GROUPS * QUERY_TILE);
        for (int g = 0; g < GROUPS; g++)
                for (int h = 0; h < 2; h++)
                        load(shared + Q_AT + g * QUERY_TILE + h * QUERY_HALF, q, &b->q, head * DIM + (uint32_t) h * 64,
                                row + (uint32_t) g * ROWS);
        for (uint32_t j = 0; j < tiles; j++) {
                uint32_t stage = j % STAGES, phase = j / STAGES % 2, at = stage * KEY_TILE + rank * part * 128;

                barrier_wait(&b->k_free[stage], phase ^ 1);
                barrier_expect(&b->k_full[stage], KEY_TILE);
                for (uint32_t h = 0; h < 2; h++)
                        load_for_all(shared + K_AT + at + h * KEY_HALF, k, &b->k_full[stage], key_head * DIM + h * 64,
                                j * KEYS + rank * part);
                barrier_wait(&b->v_free[stage], phase ^ 1);
                barrier_expect(&b->v_full[stage], KEY_TILE);
                for (uint32_t h = 0; h < 2; h++)
                        load_for_all(shared + V_AT + at + h * KEY_HALF, v, &b->v_full[stage], key_head * DIM + h * 64,
                                j * KEYS + rank * part);
        }
}

/* A group is done with a stage: every block of the cluster hears it, for all bring parts of it. */
static __device__ void release(uint64_t *b) {
        if (threadIdx.x % 128 < CLUSTER)
                barrier_arrive(b, threadIdx.x % 128);
}

static __device__ void store(const Args &a, const float (&o)[64], const float (&sum)[2], uint32_t head, uint32_t row) {
        uint32_t lane = threadIdx.x % 32;

        row += threadIdx.x / 32 % 4 * 16 + lane / 4;
#pragma unroll
        for (int r = 0; r < 2; r++) {
                float all = sum[r];
                uint16_t *to = a.o + (uint64_t) (row + r * 8) * a.o_ld + head * DIM + lane % 4 * 2;

                all += __shfl_xor_sync(0xffffffffu, all, 1);
                all += __shfl_xor_sync(0xffffffffu, all, 2);
                if (row + r * 8 < a.n_q)
#pragma unroll
                        for (int i = 0; i < 16; i++)
                                *(uint32_t *) (to + i * 8) =
                                        pair_round(__fdiv_rn(o[i * 4 + r * 2], all), __fdiv_rn(o[i * 4 + r * 2 + 1], all));
        }
}

/* What a group carries from tile to tile. */
typedef struct Rows {
        float s[SCORES];      /* a tile's scores, then weights */
        float o[64];          /* sum of weights times values, at `top` of two tiles before */
        uint32_t p[SCORES / 2]; /* weights as operands */
        float top[2], sum[2], factor[2]; /* factor: what brings o to the newest top */
} Rows;

static __device__ void rescale(Rows &x) {
        if (__any_sync(0xffffffffu, x.factor[0] != 1 || x.factor[1] != 1)) /* by 1 changes nothing */
#pragma unroll
                for (int i = 0; i < 64; i++)
                        x.o[i] *= x.factor[i / 2 % 2];
}

/* Scores and softmax of tile j while the weights of tile j - 1 meet their values; those of j - 2 have begun to.
 * The wait for them stands first, so that the compiler keeps the softmax before it: it would wait as early as
 * it can within a body. LAST: the tile has `end` keys. */
template <bool LAST>
static __device__ void next_tile(Rows &x, Barriers *b, uint32_t j, uint32_t q, uint32_t k, uint32_t v, uint32_t end, float scale) {
        uint32_t stage = j % STAGES, before = (j - 1) % STAGES;

        barrier_wait(&b->k_full[stage], j / STAGES % 2);
        products_wait<0>();
        if (j > 1)
                release(&b->v_free[j % STAGES]);
        pack(x.s, x.p);
        products_begin();
        scores(x.s, q, k + stage * KEY_TILE);
        rescale(x);
        barrier_wait(&b->v_full[before], (j - 1) / STAGES % 2);
        products_begin();
        values(x.o, x.p, v + before * KEY_TILE);
        products_wait<1>();
        release(&b->k_free[stage]);
        if (LAST)
                mask_end(x.s, end);
        softmax(x.s, x.top, x.sum, x.factor, scale);
}

static __device__ void consume(const Args &a, uint8_t *shared, Barriers *b, int group, uint32_t head, uint32_t row, uint32_t tiles) {
        uint32_t q = shared_address(shared) + Q_AT + (uint32_t) group * QUERY_TILE, k = shared_address(shared) + K_AT,
                 v = shared_address(shared) + V_AT, end = (uint32_t) (a.n_k - (uint64_t) (tiles - 1) * KEYS);
        Rows x;

#pragma unroll
        for (int i = 0; i < 64; i++)
                x.o[i] = 0;
        x.top[0] = x.top[1] = -INFINITY;
        x.sum[0] = x.sum[1] = 0;
        barrier_wait(&b->q, 0);
        barrier_wait(&b->k_full[0], 0);
        products_begin();
        scores(x.s, q, k);
        products_wait<0>();
        release(&b->k_free[0]);
        if (tiles == 1)
                mask_end(x.s, end);
        softmax(x.s, x.top, x.sum, x.factor, a.scale);

        for (uint32_t j = 1; j + 1 < tiles; j++)
                next_tile<false>(x, b, j, q, k, v, KEYS, a.scale);
        if (tiles > 1)
                next_tile<true>(x, b, tiles - 1, q, k, v, end, a.scale);

        products_wait<0>();
        pack(x.s, x.p);
        rescale(x);
        barrier_wait(&b->v_full[(tiles - 1) % STAGES], (tiles - 1) / STAGES % 2);
        products_begin();
        values(x.o, x.p, v + (tiles - 1) % STAGES * KEY_TILE);
        products_wait<0>();
        store(a, x.o, x.sum, head, row);
}

static __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
        attention_kernel(const __grid_constant__ CUtensorMap q, const __grid_constant__ CUtensorMap k,
                const __grid_constant__ CUtensorMap v, const Args a) {
        extern __shared__ uint8_t raw[];
        uint8_t *shared = raw + (1024 - shared_address(raw) % 1024) % 1024;
        Barriers *b = (Barriers *) (shared + BARRIERS_AT);
        int group = (int) threadIdx.x / 128 - 1;
        uint32_t head = blockIdx.y, row = blockIdx.x * GROUPS * ROWS, tiles = (uint32_t) ((a.n_k + KEYS - 1) / KEYS);

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
                asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
                if (threadIdx.x == 0)
                        produce(shared, b, &q, &k, &v, head, head / a.group, row, tiles);
        } else {
                asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
                consume(a, shared, b, group, head, row + (uint32_t) group * ROWS, tiles);
        }
        cluster_sync(); /* a block stays as long as the other may write or arrive here */
}

/* Boxes of `box` rows of 64 numbers. */
static int encode(EncodeFunction f, const void *data, uint64_t rows, uint64_t width, uint64_t ld, uint32_t box, CUtensorMap *ret) {
        const cuuint64_t sizes[2] = {width, rows}, strides[1] = {ld * 2};
        const cuuint32_t boxes[2] = {64, box}, steps[2] = {1, 1};

        return f(ret, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, (void *) data, sizes, strides, boxes, steps,
                       CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                       CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS
                       ? 0
                       : -EINVAL;
}

static bool is_aligned(const void *p, uint64_t ld) {
        return (uintptr_t) p % 16 == 0 && ld * 2 % 16 == 0 && ld * 2 < UINT64_C(1) << 40;
}

int attention_sm90(LkContext *c, const Attention *b) {
        static const EncodeFunction encode_tiled = encode_function();
        const LkAttention *a = &b->a;
        const Args args = {
                .n_q = a->n_q,
                .n_k = a->n_k,
                .o_ld = a->o_ld,
                .group = b->group,
                .scale = b->unit,
                .o = (uint16_t *) a->o,
        };
        uint64_t blocks = (a->n_q + GROUPS * ROWS - 1) / (GROUPS * ROWS), width = (uint64_t) a->heads * DIM;
        CUtensorMap q, k, v;
        int r;

        if (a->type != LK_BF16 || a->head_dim != DIM || a->causal || b->sequences > 1 || b->negative || !(b->unit > 0) || a->n_q >= UINT64_C(1) << 31 ||
                a->n_k >= UINT64_C(1) << 31 || !is_aligned(a->q, a->q_ld) || !is_aligned(a->k, a->k_ld) || !is_aligned(a->v, a->v_ld) ||
                (uintptr_t) a->o % 4 != 0 || a->o_ld % 2 != 0)
                return -EOPNOTSUPP;
        if (!encode_tiled || encode(encode_tiled, a->q, a->n_q, width, a->q_ld, ROWS, &q) < 0 ||
                encode(encode_tiled, a->k, a->n_k, width / b->group, a->k_ld, KEYS / CLUSTER, &k) < 0 ||
                encode(encode_tiled, a->v, a->n_k, width / b->group, a->v_ld, KEYS / CLUSTER, &v) < 0)
                return -EOPNOTSUPP;

        r = cuda_result(cudaFuncSetAttribute(attention_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED));
        if (r < 0)
                return r;
        blocks = (blocks + CLUSTER - 1) / CLUSTER * CLUSTER;
        attention_kernel<<<dim3((unsigned) blocks, a->heads), THREADS, SHARED, c->stream>>>(q, k, v, args);
        return cuda_result(cudaGetLastError());
}
