/* SPDX-License-Identifier: Apache-2.0 */
/* int8 products for Hopper (sm_90a), scales and bias with it: the bits of product_mma and of the library's sums behind product_emit, since sums
 * of integers are exact in any order. One thread of a producer group brings tiles by the copy engine, two groups of 64 rows each multiply 128 x 256
 * outputs. Two blocks of a cluster have neighbouring rows and the same columns: each brings half of w's tile for both. There are as many blocks
 * as processors, which walk over the tiles of all matrices. What is left for the last of them to do, if that is few tiles, is cut into pieces of
 * fewer columns, one for each pair of blocks.
 *
 * The second group is LEAD steps behind the first, so that one multiplies while the other finishes its outputs: they leave by the copy engine,
 * each warp's 16 rows through a piece of shared memory of its own. Whatever lies beyond the ends of a matrix is read as zero and not written: the copy
 * engine writes whole pieces of 16 bytes only, which is why rows of y end with one. */

#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/product.cuh"
#include "kernels/cuda/rows.cuh"

#define GROUPS 2u
#define GROUP_ROWS 64u
#define TILE_ROWS (GROUPS * GROUP_ROWS)
#define TILE_COLUMNS 256u
#define STEP 128u /* of k: a row's bytes of a stage */
#define STAGES 4u
#define X_TILE (TILE_ROWS * STEP)
#define W_TILE (TILE_COLUMNS * STEP)
#define BOX 128u /* rows that come at once */
#define LEAD 2u
#define BAND 8u /* pairs of tiles of rows that go along all columns before the next ones */
#define THREADS ((GROUPS + 1) * 128)
#define SUMS (TILE_COLUMNS / 2) /* of a thread */

/* Outputs on their way: 16 rows of 128 bytes of a warp, twice. */
#define OUT_ROWS 16u
#define OUT_COLUMNS 64u
#define OUT_SIZE (OUT_ROWS * OUT_COLUMNS * 2)
#define OUTS 2u

#define X_AT 0u
#define W_AT (STAGES * X_TILE)
#define OUT_AT (W_AT + STAGES * W_TILE)
#define BARRIERS_AT (OUT_AT + GROUPS * 4 * OUTS * OUT_SIZE)
#define SHARED (BARRIERS_AT + (uint32_t) sizeof(Barriers) + 1024) /* the tiles begin at a multiple of 1024 */

typedef struct Barriers {
        uint64_t full[STAGES], free[STAGES];
} Barriers;

static_assert(SHARED <= 227 * 1024 && TILE_ROWS == BOX && TILE_COLUMNS == CLUSTER * BOX, "");

typedef struct Matrix {
        Columns columns;
        uint32_t n, row_ends; /* columns of y; tiles of them */
} Matrix;

typedef struct Args {
        const float *x_scale;
        uint32_t m, steps;        /* steps: of k */
        uint32_t pairs, row_ends; /* pairs of tiles of rows; tiles of columns of all matrices */
        uint32_t whole, cut;      /* pairs of tiles as they are; pieces of each of the others, 2 or 4 */
        uint32_t units;           /* all of them, the pieces last */
        Matrix matrices[I8_TOGETHER];
} Args;

typedef struct Maps {
        CUtensorMap x, w[I8_TOGETHER], y[I8_TOGETHER];
        CUtensorMap pieces[I8_TOGETHER]; /* w, for a tile that is cut */
} Maps;

#define D128                                                                                                \
        "{"                                                                                                 \
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25," \
        "%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49," \
        "%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71,%72,%73," \
        "%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97," \
        "%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116," \
        "%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127" \
        "}"
#define D32                                                                                               \
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25," \
        "%26,%27,%28,%29,%30,%31}"
#define LIST32(F)                                                                                           \
        F(0), F(1), F(2), F(3), F(4), F(5), F(6), F(7), F(8), F(9), F(10), F(11), F(12), F(13), F(14),      \
                F(15), F(16), F(17), F(18), F(19), F(20), F(21), F(22), F(23), F(24), F(25), F(26), F(27),  \
                F(28), F(29), F(30), F(31)
#define LOW(i) "+r"(d[i])
#define HIGH(i) "+r"(d[64 + (i)])

/* d[64, COLUMNS] = (add ? d : 0) + a . b^T over 32 numbers; both by rows in shared memory. Where a thread's numbers are: attention-sm90.cuh. */
template <uint32_t COLUMNS> static __device__ __forceinline__ void multiply(int (&d)[SUMS], uint64_t a, uint64_t b, int add) {
        static_assert(COLUMNS == 256 || COLUMNS == 128 || COLUMNS == 64, "");

        if constexpr (COLUMNS == 256)
                asm volatile("{ .reg .pred p; setp.ne.b32 p, %130, 0; wgmma.mma_async.sync.aligned.m64n256k32.s32.s8.s8 " D128
                             ", %128, %129, p; }"
                             : LIST64(LOW), LIST64(HIGH)
                             : "l"(a), "l"(b), "r"(add));
        else if constexpr (COLUMNS == 128)
                asm volatile("{ .reg .pred p; setp.ne.b32 p, %66, 0; wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 " D64 ", %64, %65, p; }"
                             : LIST64(LOW)
                             : "l"(a), "l"(b), "r"(add));
        else
                asm volatile("{ .reg .pred p; setp.ne.b32 p, %34, 0; wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8 " D32 ", %32, %33, p; }"
                             : LIST32(LOW)
                             : "l"(a), "l"(b), "r"(add));
}

/* What comes behind does not read the sums before this point. */
static __device__ __forceinline__ void settle(int (&d)[SUMS]) {
#pragma unroll
        for (int i = 0; i < (int) SUMS; i++)
                asm volatile("" : "+r"(d[i])::"memory");
}

/* Barrier 1 is both groups'. */
static __device__ __forceinline__ void lead_begin(void) {
        asm volatile("bar.arrive 1, %0;" ::"n"(GROUPS * 128) : "memory");
}

static __device__ __forceinline__ void lead_wait(void) {
        asm volatile("bar.sync 1, %0;" ::"n"(GROUPS * 128) : "memory");
}

/* A warp is done with a stage: both blocks hear it, for both bring parts of it. */
static __device__ __forceinline__ void release(uint64_t *b) {
        __syncwarp();
        if (threadIdx.x % 32 < CLUSTER)
                barrier_arrive(b, threadIdx.x % 32);
}

static __device__ __forceinline__ void matrices_store(uint32_t to, const uint32_t *p) {
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(p[0]), "r"(p[1]), "r"(p[2]), "r"(p[3])
                     : "memory");
}

static __device__ __forceinline__ void send(const CUtensorMap *map, uint32_t from, uint32_t column, uint32_t row) {
        asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map), "r"(from), "r"(column), "r"(row)
                     : "memory");
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/* For all but the newest LEFT to have been read. */
template <int LEFT> static __device__ __forceinline__ void sent(void) {
        asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(LEFT) : "memory");
}

typedef struct Place {
        uint32_t row, matrix, column, columns;
} Place;

static __device__ __forceinline__ Place place_of(const Args &a, uint32_t unit) {
        const bool is_piece = unit >= a.whole;
        const uint32_t tile = is_piece ? a.whole + (unit - a.whole) / a.cut : unit;
        const uint32_t columns = is_piece ? TILE_COLUMNS / a.cut : TILE_COLUMNS, skipped = is_piece ? (unit - a.whole) % a.cut * columns : 0;
        const uint32_t band = BAND * a.row_ends, first = tile / band * BAND, in = tile % band;
        const uint32_t pairs = a.pairs - first < BAND ? a.pairs - first : BAND;
        uint32_t end = in / pairs, matrix = 0;

        for (; end >= a.matrices[matrix].row_ends; matrix++)
                end -= a.matrices[matrix].row_ends;
        return {((first + in % pairs) * CLUSTER + cluster_rank()) * TILE_ROWS, matrix, end * TILE_COLUMNS + skipped, columns};
}

/* One thread brings all tiles. */
static __device__ __forceinline__ void produce(const Args &a, uint8_t *shared, Barriers *b, const Maps &maps) {
        uint32_t j = 0;

        for (uint32_t unit = blockIdx.x / CLUSTER; unit < a.units; unit += gridDim.x / CLUSTER) {
                const Place at = place_of(a, unit);
                const uint32_t part = cluster_rank() * (at.columns / CLUSTER);
                const CUtensorMap *w = (at.columns < TILE_COLUMNS ? maps.pieces : maps.w) + at.matrix;

#pragma unroll 1
                for (uint32_t i = 0; i < a.steps; i++, j++) {
                        const uint32_t stage = j % STAGES;

                        barrier_wait(&b->free[stage], j / STAGES % 2 ^ 1);
                        barrier_expect(&b->full[stage], X_TILE + at.columns * STEP);
                        load(shared + X_AT + stage * X_TILE, &maps.x, &b->full[stage], i * STEP, at.row);
                        load_for_all(shared + W_AT + stage * W_TILE + part * STEP, w, &b->full[stage], i * STEP, at.column + part);
                }
        }
}

/* Factors of two neighbouring columns; `bias` is not looked at where there is none. */
typedef struct Factors {
        float2 scale[OUT_COLUMNS / 8], bias[OUT_COLUMNS / 8];
} Factors;

/* Those of a thread's columns from `column` on. */
static __device__ __forceinline__ void factors_fetch(const Matrix &a, uint32_t column, Factors &f) {
        column += threadIdx.x % 4 * 2;
#pragma unroll
        for (uint32_t i = 0; i < OUT_COLUMNS / 8; i++) {
                const bool inside = column + i * 8 < a.n;

                f.scale[i] = inside ? *(const float2 *) (a.columns.scale + column + i * 8) : make_float2(0, 0);
                f.bias[i] = inside && a.columns.bias ? *(const float2 *) (a.columns.bias + column + i * 8) : make_float2(0, 0);
        }
}

static __device__ __forceinline__ float finish(int sum, float x_scale, float scale, float bias, bool biased) {
        const float v = __fmul_rn(__fmul_rn(__int2float_rn(sum), x_scale), scale);

        return biased ? __fadd_rn(v, bias) : v;
}

/* Numbers PART * OUT_COLUMNS and on of a thread's rows as pairs of bf16: of row lane / 4 and of the eighth below it, by turns. */
template <int PART>
static __device__ __forceinline__ void pairs_of(
        const int (&d)[SUMS], const float (&x_scale)[2], const Factors &f, bool biased, uint32_t (&p)[OUT_COLUMNS / 4]) {
        uint32_t seen = 0;

#pragma unroll
        for (int i = 0; i < (int) OUT_COLUMNS / 4; i++) {
                const int *two = d + PART * (int) OUT_COLUMNS / 2 + i * 2;

                p[i] = pair_round(finish(two[0], x_scale[i % 2], f.scale[i / 2].x, f.bias[i / 2].x, biased),
                        finish(two[1], x_scale[i % 2], f.scale[i / 2].y, f.bias[i / 2].y, biased));
                seen = pair_watch(p[i], seen);
        }
        if (!watch_clean(seen))
#pragma unroll
                for (int i = 0; i < (int) OUT_COLUMNS / 4; i++)
                        p[i] = pair_settled(p[i]);
}

/* To a warp's piece of shared memory, rows of 128 bytes, swizzled as the copy engine reads them: eight columns of a row are 16 bytes, which lie
 * where their number, exclusive or the row's of eight, says. A thread has the place of row lane % 16, in the first or the second of two eights. */
static __device__ __forceinline__ void pairs_store(const uint32_t (&p)[OUT_COLUMNS / 4], uint32_t to) {
        const uint32_t lane = threadIdx.x % 32;

        to += lane % 16 * (OUT_COLUMNS * 2);
#pragma unroll
        for (uint32_t i = 0; i < OUT_COLUMNS / 8; i += 2)
                matrices_store(to + ((i + lane / 16) ^ lane % 8) * 16, p + i * 2);
}

/* What a warp has besides its sums. */
typedef struct Warp {
        const CUtensorMap *y;
        uint32_t out; /* its pieces of shared memory */
        uint32_t row, column;
        float x_scale[2];
} Warp;

/* A part of the sums leaves; `next` is fetched meanwhile. */
template <int PART>
static __device__ __forceinline__ void part_finish(const Matrix &a, const int (&d)[SUMS], const Warp &w, const Factors &f, Factors &next) {
        const uint32_t out = w.out + PART % OUTS * OUT_SIZE, column = w.column + PART * OUT_COLUMNS;
        uint32_t p[OUT_COLUMNS / 4];

        if ((PART + 1) * OUT_COLUMNS < TILE_COLUMNS)
                factors_fetch(a, column + OUT_COLUMNS, next);
        pairs_of<PART>(d, w.x_scale, f, a.columns.bias != NULL, p);
        if (threadIdx.x % 32 == 0)
                sent<OUTS - 1>();
        __syncwarp();
        pairs_store(p, out);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncwarp();
        if (threadIdx.x % 32 == 0)
                send(w.y, out, column, w.row);
}

/* A group's way through k. */
typedef struct Way {
        uint64_t x, w; /* descriptions of its rows of x and of w in the first stage */
        uint32_t lead; /* the step at which the other group begins */
        uint32_t j;    /* steps behind it */
} Way;

/* A group's sums, and the factors of their first part. */
template <uint32_t COLUMNS>
static __device__ __forceinline__ void sum_up(const Args &a, Barriers *b, const Place &at, Way &way, int (&d)[SUMS], Factors &factors) {
#pragma unroll 1
        for (uint32_t i = 0; i < a.steps; i++, way.j++) {
                const uint32_t stage = way.j % STAGES;
                const uint64_t x = way.x + stage * (X_TILE >> 4), w = way.w + stage * (W_TILE >> 4);

                if (way.j == way.lead)
                        lead_begin();
                barrier_wait(&b->full[stage], way.j / STAGES % 2);
                products_begin();
#pragma unroll
                for (uint32_t k = 0; k < STEP; k += 32)
                        multiply<COLUMNS>(d, x + (k >> 4), w + (k >> 4), i > 0 || k > 0);
                products_commit();
                products_wait<1>();
                if (i > 0)
                        release(&b->free[(way.j - 1) % STAGES]);
        }
        factors_fetch(a.matrices[at.matrix], at.column, factors);
        products_wait<0>();
        settle(d);
        release(&b->free[(way.j - 1) % STAGES]);
}

/* Pieces of a tile come last, one for a block: a piece of shared memory that a warp's part of outputs goes through is free after the next one's. */
static __device__ __forceinline__ void consume(const Args &a, uint32_t shared, Barriers *b, const Maps &maps, uint32_t group) {
        const uint32_t warp = threadIdx.x / 32 % 4;
        Way way = {describe(shared + X_AT + group * GROUP_ROWS * STEP, 16), describe(shared + W_AT, 16), group == 0 ? LEAD : UINT32_MAX, 0};
        Warp out = {NULL, shared + OUT_AT + (group * 4 + warp) * OUTS * OUT_SIZE, 0, 0, {0, 0}};
        int d[SUMS] = {};

        if (group > 0)
                lead_wait();
        for (uint32_t unit = blockIdx.x / CLUSTER; unit < a.units; unit += gridDim.x / CLUSTER) {
                const Place at = place_of(a, unit);
                const Matrix &matrix = a.matrices[at.matrix];
                Factors even, odd;

                out.y = maps.y + at.matrix;
                out.row = at.row + group * GROUP_ROWS + warp * OUT_ROWS;
                out.column = at.column;
#pragma unroll
                for (uint32_t r = 0; r < 2; r++) {
                        const uint32_t row = out.row + threadIdx.x % 32 / 4 + r * 8;

                        out.x_scale[r] = row < a.m ? a.x_scale[row] : 0;
                }
                if (at.columns == TILE_COLUMNS)
                        sum_up<TILE_COLUMNS>(a, b, at, way, d, even);
                else if (at.columns == TILE_COLUMNS / 2)
                        sum_up<TILE_COLUMNS / 2>(a, b, at, way, d, even);
                else
                        sum_up<TILE_COLUMNS / 4>(a, b, at, way, d, even);
                part_finish<0>(matrix, d, out, even, odd);
                if (at.columns > OUT_COLUMNS)
                        part_finish<1>(matrix, d, out, odd, even);
                if (at.columns > 2 * OUT_COLUMNS) {
                        part_finish<2>(matrix, d, out, even, odd);
                        part_finish<3>(matrix, d, out, odd, even);
                }
        }
        if (group == 0 && way.j <= LEAD)
                lead_begin();
        if (threadIdx.x % 32 == 0)
                sent<0>();
}

static __device__ __forceinline__ void barriers_init(Barriers *b) {
        for (uint32_t i = 0; i < STAGES; i++) {
                barrier_init(&b->full[i], 1);
                barrier_init(&b->free[i], GROUPS * 4 * CLUSTER);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

static __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
        gemm_i8_wgmma(const __grid_constant__ Maps maps, const __grid_constant__ Args a) {
        extern __shared__ uint8_t raw[];
        uint8_t *shared = raw + (1024 - shared_address(raw) % 1024) % 1024;
        Barriers *b = (Barriers *) (shared + BARRIERS_AT);
        const uint32_t group = threadIdx.x / 128;

        if (threadIdx.x == 0)
                barriers_init(b);
        cluster_sync();

        if (group == GROUPS) {
                asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
                if (threadIdx.x == GROUPS * 128)
                        produce(a, shared, b, maps);
        } else {
                asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
                consume(a, shared_address(shared), b, maps, group);
        }
        cluster_sync(); /* a block stays as long as the other may write or arrive here */
}

/* Boxes of `box` rows of 128 bytes. */
static int encode(EncodeFunction f, CUtensorMapDataType type, const void *data, uint64_t rows, uint64_t width, uint64_t ld_bytes,
        uint32_t box_width, uint32_t box, CUtensorMap *ret) {
        const cuuint64_t sizes[2] = {width, rows}, strides[1] = {ld_bytes};
        const cuuint32_t boxes[2] = {box_width, box}, steps[2] = {1, 1};

        return f(ret, type, 2, (void *) data, sizes, strides, boxes, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                       CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS
                       ? 0
                       : -EOPNOTSUPP;
}

static bool takes(const MmaProduct *a) {
        const uint64_t far = UINT64_C(1) << 39; /* bytes from one row to the next that the copy engine takes */

        return a->w.type == LK_I8 && a->y_type == LK_BF16 && a->x_scale && a->columns.scale && is_dense(&a->w) && is_aligned(a->x, a->x_ld) &&
               is_aligned(a->w.data, a->w.cols) && is_aligned(a->y, a->y_ld * 2) && a->w.rows % 8 == 0 && a->x_ld < far && a->y_ld < far / 2 &&
               ((uintptr_t) a->columns.scale | (uintptr_t) a->columns.bias) % sizeof(float2) == 0 && a->m < UINT64_C(1) << 30 &&
               a->w.rows < UINT64_C(1) << 30;
}

/* The last round's tiles are cut if there is a pair of blocks for each piece. Returns how many pairs of blocks have something to do. */
static uint32_t deal(uint32_t tiles, uint32_t blocks, Args *a) {
        const uint32_t rest = tiles % blocks;

        a->cut = rest == 0 ? 1 : rest * 4 <= blocks ? 4 : rest * 2 <= blocks ? 2 : 1;
        a->whole = a->cut > 1 ? tiles - rest : tiles;
        a->units = a->whole + (tiles - a->whole) * a->cut;
        return (uint32_t) at_most(a->units, blocks);
}

/* What belongs to product i. */
static int matrix_init(EncodeFunction f, const MmaProduct *a, uint32_t i, Maps *maps, Args *args) {
        const LkMatrix *w = &a->w;
        int r;

        args->matrices[i] = {a->columns, (uint32_t) w->rows, (uint32_t) ((w->rows + TILE_COLUMNS - 1) / TILE_COLUMNS)};
        r = encode(f, CU_TENSOR_MAP_DATA_TYPE_UINT8, w->data, w->rows, w->cols, w->cols, STEP, BOX, maps->w + i);
        if (r >= 0 && args->cut > 1)
                r = encode(f, CU_TENSOR_MAP_DATA_TYPE_UINT8, w->data, w->rows, w->cols, w->cols, STEP, BOX / args->cut, maps->pieces + i);
        return r < 0 ? r : encode(f, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, a->y, a->m, w->rows, a->y_ld * 2, OUT_COLUMNS, OUT_ROWS, maps->y + i);
}

int product_i8_sm90(LkContext *c, const MmaProduct *a, uint32_t n) {
        static const EncodeFunction encode_tiled = encode_function();
        const uint64_t pairs = (a->m + CLUSTER * TILE_ROWS - 1) / (CLUSTER * TILE_ROWS);
        uint64_t row_ends = 0;
        Args args = {};
        Maps maps;
        uint32_t blocks;
        int r, processors;

        for (uint32_t i = 0; i < n; i++) {
                if (!encode_tiled || !takes(a + i))
                        return -EOPNOTSUPP;
                row_ends += (a[i].w.rows + TILE_COLUMNS - 1) / TILE_COLUMNS;
        }
        if (pairs * row_ends >= UINT64_C(1) << 31)
                return -EOPNOTSUPP;
        r = cuda_result(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, c->device));
        if (r < 0)
                return r;

        args.x_scale = a->x_scale;
        args.m = (uint32_t) a->m;
        args.steps = (uint32_t) ((a->w.cols + STEP - 1) / STEP);
        args.pairs = (uint32_t) pairs;
        args.row_ends = (uint32_t) row_ends;
        blocks = deal((uint32_t) (pairs * row_ends), (uint32_t) processors / CLUSTER, &args);
        r = encode(encode_tiled, CU_TENSOR_MAP_DATA_TYPE_UINT8, a->x, a->m, a->w.cols, a->x_ld, STEP, BOX, &maps.x);
        for (uint32_t i = 0; r >= 0 && i < n; i++)
                r = matrix_init(encode_tiled, a + i, i, &maps, &args);
        if (r >= 0)
                r = cuda_result(cudaFuncSetAttribute(gemm_i8_wgmma, cudaFuncAttributeMaxDynamicSharedMemorySize, (int) SHARED));
        if (r < 0)
                return r;
        gemm_i8_wgmma<<<CLUSTER * blocks, THREADS, SHARED, c->stream>>>(maps, args);
        return cuda_result(cudaGetLastError());
}
