/* SPDX-License-Identifier: Apache-2.0 */
/* Attention over int8 for Hopper (sm_90a), in the shape of attention-sm90.cu: one warp of a producer group brings tiles by the copy engine, two
 * warpgroups of 64 queries each multiply, two blocks of a cluster bring half of a tile for both. While a tile has its softmax, the weights of
 * the one before meet their values; their sums are added to the output a tile later, behind the products of the next scores. The bits are
 * those of the portable kernel and of the CPU: sums of integers are exact, all else is attention-i8.cuh. */

#include "kernels/cuda/attention-i8.cuh"
#include "kernels/cuda/hopper.cuh"

#define ROWS 64 /* of a warpgroup */
#define GROUPS 2
#define STAGES 4
#define QUERY_TILE (ROWS * DIM)
#define SCALES (DIM * (int) sizeof(float))
#define THREADS ((GROUPS + 1) * 128)

typedef struct Barriers {
        uint64_t q, k_full[STAGES], k_free[STAGES], v_full[STAGES], v_free[STAGES];
} Barriers;

#define Q_AT 0
#define K_AT (GROUPS * QUERY_TILE)
#define V_AT (K_AT + STAGES * TILE)
#define SCALES_AT (V_AT + STAGES * TILE)
#define BARRIERS_AT (SCALES_AT + STAGES * SCALES)
#define SHARED (BARRIERS_AT + (int) sizeof(Barriers) + 1024) /* the tiles begin at a multiple of 1024 */

#define REGISTER(i) "+r"(d[i])

/* d[64, KEYS] = (add ? d : 0) + a . b^T over 32 numbers; both by rows in shared memory. */
static __device__ __forceinline__ void score_product(int (&d)[64], uint64_t a, uint64_t b, int add) {
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %66, 0; wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 " D64 ", %64, %65, p; }"
                     : LIST64(REGISTER)
                     : "l"(a), "l"(b), "r"(add));
}

/* d[64, DIM] = (add ? d : 0) + a . b^T over 32 keys; a in registers, b by channels. */
static __device__ __forceinline__ void value_product(int (&d)[64], const uint32_t *a, uint64_t b, int add) {
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %69, 0; wgmma.mma_async.sync.aligned.m64n128k32.s32.u8.s8 " D64
                     ", {%64,%65,%66,%67}, %68, p; }"
                     : LIST64(REGISTER)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

/* What comes behind does not read the numbers before this point. */
template <int N, typename T> static __device__ __forceinline__ void settle(T (&d)[N]) {
#pragma unroll
        for (int i = 0; i < N; i++)
                asm volatile("" : "+r"(d[i])::"memory");
}

static __device__ __forceinline__ void scores(int (&s)[64], uint32_t q, uint32_t k) {
        products_begin();
#pragma unroll
        for (uint32_t i = 0; i < DIM / 32; i++)
                score_product(s, describe(q + i * 32, 16), describe(k + i * 32, 16), i > 0);
        products_commit();
}

static __device__ __forceinline__ void values(int (&sums)[64], const uint32_t (&p)[16], uint32_t v) {
        products_begin();
#pragma unroll
        for (uint32_t i = 0; i < KEYS / 32; i++)
                value_product(sums, p + i * 4, describe(v + i * 32, 16), i > 0);
        products_commit();
}

static __device__ __forceinline__ void load_bytes(void *to, const void *from, uint32_t size, uint64_t *b) {
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(to)), "l"(from),
                     "r"(size), "r"(shared_address(b))
                     : "memory");
}

/* One thread brings all tiles. */
static __device__ __forceinline__ void produce(const AttentionI8 &a, uint8_t *shared, Barriers *b, const CUtensorMap *q, const CUtensorMap *k,
        const CUtensorMap *v, uint32_t head, uint32_t row, uint32_t tiles) {
        const uint32_t part = KEYS / CLUSTER, rank = cluster_rank();

        barrier_expect(&b->q, GROUPS * QUERY_TILE);
        for (uint32_t g = 0; g < GROUPS; g++)
                load(shared + Q_AT + g * QUERY_TILE, q, &b->q, head * DIM, row + g * ROWS);
#pragma unroll 1
        for (uint32_t j = 0; j < tiles; j++) {
                const uint32_t stage = j % STAGES, phase = j / STAGES % 2, at = (head * tiles + j) * KEYS + rank * part;
                const float *scales = a.a.keys.v_scale + (uint64_t) (head * tiles + j) * DIM;

                barrier_wait(&b->k_free[stage], phase ^ 1);
                barrier_expect(&b->k_full[stage], TILE);
                load_for_all(shared + K_AT + stage * TILE + rank * part * DIM, k, &b->k_full[stage], 0, at);
                barrier_wait(&b->v_free[stage], phase ^ 1);
                barrier_expect(&b->v_full[stage], TILE + SCALES);
                load_for_all(shared + V_AT + stage * TILE + rank * part * KEYS, v, &b->v_full[stage], 0, at);
                load_bytes(shared + SCALES_AT + stage * SCALES, scales, SCALES, &b->v_full[stage]);
        }
}

/* A warp is done with a stage: every block of the cluster hears it, for all bring parts of it. */
static __device__ __forceinline__ void release(uint64_t *b) {
        __syncwarp();
        if (threadIdx.x % 32 < CLUSTER)
                barrier_arrive(b, threadIdx.x % 32);
}

/* What a group carries from tile to tile. */
typedef struct Rows {
        int s[64];      /* a tile's scores */
        int sums[64];   /* of weights times values, of the tile before */
        float o[64];
        uint32_t p[16]; /* weights that meet values */
        RowI8 row[2];
        StepI8 step[2], before[2]; /* of the newest tile, of that of the sums */
        float q_scale[2];
} Rows;

/* Where a group finds things. */
typedef struct Places {
        Barriers *b;
        uint32_t q, k, v;
        const float *scales, *k_scale; /* of values, in shared memory; of keys */
        float half_scale;
} Places;

/* The sums of tile j, which are there, to the output; its stage is free. */
static __device__ __forceinline__ void add_sums(Rows &x, const Places &at, uint32_t j) {
        accumulate_i8(x.o, x.sums, x.before, at.scales + j % STAGES * DIM);
        release(&at.b->v_free[j % STAGES]);
}

static __device__ __forceinline__ void begin_values(Rows &x, const Places &at, uint32_t j) {
        x.before[0] = x.step[0];
        x.before[1] = x.step[1];
        values(x.sums, x.p, at.v + j % STAGES * TILE);
}

/* Behind the wait for the products of weights and values. The compiler gives a product's registers away as soon as no instruction reads them any
 * more, waited for or not: those of the weights are read here, for the sum of the row. */
static __device__ __forceinline__ void take_sums(Rows &x) {
        settle(x.sums);
        settle(x.p);
        sum_i8(x.row, x.before, x.p);
}

static __device__ __forceinline__ void wait_keys(const Places &at, uint32_t j) {
        barrier_wait(&at.b->k_full[j % STAGES], j / STAGES % 2);
}

static __device__ __forceinline__ void wait_values(const Places &at, uint32_t j) {
        barrier_wait(&at.b->v_full[j % STAGES], j / STAGES % 2);
}

/* Scores of tile j, which are there, to weights; what comes next in shared memory is there behind it, and nothing under way. That wait stands
 * before the one for products because the compiler waits for them as early as it can within a body. LAST: the tile has `end` keys. */
template <bool LAST> static __device__ __forceinline__ void weigh(Rows &x, const Places &at, uint32_t j, uint32_t end, float k_scale) {
        const int left = (int) end - (int) (threadIdx.x % 4 * 2);

        settle(x.s);
        release(&at.b->k_free[j % STAGES]);
        steps_i8<LAST>(x.s, x.row, x.step, x.q_scale, k_scale, at.half_scale, left);
        if (LAST)
                wait_values(at, j);
        else
                wait_keys(at, j + 1);
        products_wait<0>();
        if (j > 0)
                take_sums(x);
        weights_i8<LAST>(x.s, x.step, left, x.p);
        settle(x.p);
}

/* Tile j > 0, whose keys are there: its scores beside the sums of tile j - 2 going to the output, its steps beside the sums of tile j - 1. */
template <bool LAST> static __device__ __forceinline__ void next_tile(Rows &x, const Places &at, uint32_t j, uint32_t end) {
        const float k_scale = at.k_scale[j];

        scores(x.s, at.q, at.k + j % STAGES * TILE);
        if (j > 1)
                add_sums(x, at, j - 2);
        wait_values(at, j - 1);
        begin_values(x, at, j - 1);
        products_wait<1>();
        weigh<LAST>(x, at, j, end, k_scale);
}

static __device__ __forceinline__ void consume(const AttentionI8 &a, const Places &at, uint32_t head, uint64_t row, uint32_t tiles) {
        const uint32_t lane = threadIdx.x % 32, end = (uint32_t) (a.a.keys.n - (uint64_t) (tiles - 1) * KEYS);
        const uint64_t mine = row + threadIdx.x / 32 % 4 * 16 + lane / 4;
        Rows x;

#pragma unroll
        for (int i = 0; i < 64; i++)
                x.o[i] = 0;
#pragma unroll
        for (int r = 0; r < 2; r++) {
                x.q_scale[r] = mine + r * 8 < a.a.n_q ? a.a.q_scale[(mine + r * 8) * a.scale_ld + head] : 0;
                x.row[r].max = -INFINITY;
                x.row[r].sum = 0;
        }
        barrier_wait(&at.b->q, 0);
        wait_keys(at, 0);
        scores(x.s, at.q, at.k);
        products_wait<0>();
        if (tiles == 1)
                weigh<true>(x, at, 0, end, at.k_scale[0]);
        else
                weigh<false>(x, at, 0, KEYS, at.k_scale[0]);

#pragma unroll 1
        for (uint32_t j = 1; j + 1 < tiles; j++)
                next_tile<false>(x, at, j, KEYS);
        if (tiles > 1)
                next_tile<true>(x, at, tiles - 1, end);

        if (tiles > 1)
                add_sums(x, at, tiles - 2);
        begin_values(x, at, tiles - 1);
        products_wait<0>();
        take_sums(x);
        add_sums(x, at, tiles - 1);

#pragma unroll
        for (int r = 0; r < 2; r++)
                if (mine + r * 8 < a.a.n_q)
#pragma unroll
                        for (int i = 0; i < 16; i++)
                                store_i8(a, mine + r * 8, (uint64_t) head * DIM + i * 8 + lane % 4 * 2, __fdiv_rn(x.o[i * 4 + r * 2], x.row[r].sum),
                                        __fdiv_rn(x.o[i * 4 + r * 2 + 1], x.row[r].sum));
}

static __device__ __forceinline__ void barriers_init(Barriers *b) {
        barrier_init(&b->q, 1);
        for (int i = 0; i < STAGES; i++) {
                barrier_init(&b->k_full[i], 1);
                barrier_init(&b->v_full[i], 1);
                barrier_init(&b->k_free[i], GROUPS * 4 * CLUSTER);
                barrier_init(&b->v_free[i], GROUPS * 4 * CLUSTER);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

static __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
        attention_i8_wgmma(const __grid_constant__ CUtensorMap q, const __grid_constant__ CUtensorMap k, const __grid_constant__ CUtensorMap v,
                const __grid_constant__ AttentionI8 a) {
        extern __shared__ uint8_t raw[];
        uint8_t *shared = raw + (1024 - shared_address(raw) % 1024) % 1024;
        Barriers *b = (Barriers *) (shared + BARRIERS_AT);
        const int group = (int) threadIdx.x / 128 - 1;
        const uint32_t head = blockIdx.y, row = blockIdx.x * GROUPS * ROWS, tiles = (uint32_t) a.tiles;

        if (threadIdx.x == 0)
                barriers_init(b);
        cluster_sync();

        if (group < 0) {
                asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
                if (threadIdx.x == 0)
                        produce(a, shared, b, &q, &k, &v, head, row, tiles);
        } else {
                asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
                const Places at = {.b = b,
                        .q = shared_address(shared) + Q_AT + (uint32_t) group * QUERY_TILE,
                        .k = shared_address(shared) + K_AT,
                        .v = shared_address(shared) + V_AT,
                        .scales = (const float *) (shared + SCALES_AT),
                        .k_scale = a.a.keys.k_scale + (uint64_t) head * tiles,
                        .half_scale = a.half_scale};

                consume(a, at, head, row + (uint32_t) group * ROWS, tiles);
        }
        cluster_sync(); /* a block stays as long as the other may write or arrive here */
}

/* Boxes of 64 rows of 128 bytes. */
static int encode(EncodeFunction f, const void *data, uint64_t rows, uint64_t width, uint64_t ld, CUtensorMap *ret) {
        const cuuint64_t sizes[2] = {width, rows}, strides[1] = {ld};
        const cuuint32_t boxes[2] = {DIM, ROWS}, steps[2] = {1, 1};

        return f(ret, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, (void *) data, sizes, strides, boxes, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                       CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS
                       ? 0
                       : -EINVAL;
}

int attention_i8_sm90(LkContext *c, const AttentionI8 *b) {
        static const EncodeFunction encode_tiled = encode_function();
        const LkAttentionI8 *a = &b->a;
        const uint64_t tile_rows = a->keys.heads * b->tiles * KEYS;
        uint64_t blocks = (a->n_q + GROUPS * ROWS - 1) / (GROUPS * ROWS);
        CUtensorMap q, k, v;
        int r;

        if (!encode_tiled || a->n_q >= UINT64_C(1) << 31 || b->tiles >= UINT64_C(1) << 24 || tile_rows >= UINT64_C(1) << 31 ||
                a->q_ld >= UINT64_C(1) << 40)
                return -EOPNOTSUPP;
        if (encode(encode_tiled, a->q, a->n_q, (uint64_t) a->keys.heads * DIM, a->q_ld, &q) < 0 ||
                encode(encode_tiled, a->keys.k, tile_rows, DIM, DIM, &k) < 0 || encode(encode_tiled, a->keys.v, tile_rows, KEYS, KEYS, &v) < 0)
                return -EOPNOTSUPP;

        r = cuda_result(cudaFuncSetAttribute(attention_i8_wgmma, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED));
        if (r < 0)
                return r;
        blocks = (blocks + CLUSTER - 1) / CLUSTER * CLUSTER;
        attention_i8_wgmma<<<dim3((unsigned) blocks, a->keys.heads), THREADS, SHARED, c->stream>>>(q, k, v, *b);
        return cuda_result(cudaGetLastError());
}
