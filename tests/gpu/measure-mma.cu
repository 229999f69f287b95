/* SPDX-License-Identifier: Apache-2.0 */
/* How near does attention by the instructions that every card since sm_80 has (mma.sync, ldmatrix, cp.async,
 * at most 99 KB of shared memory a block) come to the bare products of the same instructions? Bare loops
 * first, then a kernel in several tile shapes, each compared with f64 and, to the bit, over parts of the
 * rows and heads.
 *
 *     measure-mma
 */

#include <math.h>
#include <stdio.h>

#include "tests/gpu/attention-case.h"
#include "tests/gpu/device.h"

#define ROUNDS 2000

static __device__ void product_bf16(float (&d)[4], const uint32_t *a, uint32_t b0, uint32_t b1) {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
                     "{%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

static __device__ void product_s8(int (&d)[4], const uint32_t *a, uint32_t b0, uint32_t b1) {
        asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
                     "{%8,%9}, {%0,%1,%2,%3};"
                     : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

static __device__ void product(float (&d)[4], const uint32_t *a, uint32_t b0, uint32_t b1) {
        product_bf16(d, a, b0, b1);
}

static __device__ void product(int (&d)[4], const uint32_t *a, uint32_t b0, uint32_t b1) {
        product_s8(d, a, b0, b1);
}

/* 32 independent sums a warp, operands in registers. */
template <typename T>
static __global__ void __launch_bounds__(256, 1) bare_kernel(const uint32_t *data, T *out) {
        uint32_t a[4][4], b[8][2];
        T d[32][4] = {}, sum = 0;

        for (int i = 0; i < 16; i++)
                a[i / 4][i % 4] = data[threadIdx.x * 32 + i];
        for (int i = 0; i < 16; i++)
                b[i / 2][i % 2] = data[threadIdx.x * 32 + 16 + i];
        for (int round = 0; round < ROUNDS; round++)
#pragma unroll
                for (int i = 0; i < 32; i++)
                        product(d[i], a[i / 8], b[i % 8][0], b[i % 8][1]);
        for (int i = 0; i < 128; i++)
                sum += d[i / 4][i % 4];
        if (sum == (T) 12345)
                *out = sum;
}

static __device__ void matrices(uint32_t *d, uint32_t at) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                     : "r"(at));
}

static __device__ void matrices_turned(uint32_t *d, uint32_t at) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                     : "r"(at));
}

static __device__ uint32_t pack(float a, float b) {
        uint32_t y;

        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(b), "f"(a));
        return y;
}

static __device__ float exp2_unit(float x) {
        float y;

        asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
        return y;
}

/* Shared memory holds rows of 128 numbers, their 16 pieces of 16 bytes exchanged so that 8 rows of one
 * column lie in different banks. */
static __device__ uint32_t place(int row, int piece) {
        return (uint32_t) (row * 256 + (piece ^ (row & 7)) * 16);
}

/* ROWS rows of one head, `from` on, to shared memory; zeros behind the last of `left`. A thread has one
 * piece of every THREADS/16th row, and THREADS/16 is a multiple of 8, so that its places are a constant
 * apart. */
template <int ROWS, int THREADS>
static __device__ __forceinline__ void fetch(uint32_t to, const uint8_t *from, uint64_t left) {
        const int row = (int) threadIdx.x / 16, piece = (int) threadIdx.x % 16;
        const uint8_t *p = from + row * (WIDTH * 2) + piece * 16;
        uint32_t at = to + place(row, piece);

        if (left >= ROWS) {
#pragma unroll
                for (int i = 0; i < ROWS * 16 / THREADS; i++)
                        asm volatile(
                                "cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at + i * THREADS * 16),
                                "l"(p + i * (THREADS / 16 * WIDTH * 2))
                                : "memory");
        } else {
#pragma unroll
                for (int i = 0; i < ROWS * 16 / THREADS; i++) {
                        bool there = row + i * THREADS / 16 < left;

                        asm volatile(
                                "cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at + i * THREADS * 16),
                                "l"(there ? p + i * (THREADS / 16 * WIDTH * 2) : from), "r"(there ? 16 : 0)
                                : "memory");
                }
        }
}

static __device__ __forceinline__ void fetched(void) {
        asm volatile("cp.async.wait_all;" ::: "memory");
        __syncthreads();
}

typedef struct Attention {
        const uint8_t *q, *k, *v;
        uint8_t *o;
        uint64_t rows, keys; /* of queries; of keys */
} Attention;

/* What a warp keeps of its HIGH x 16 rows; a thread has two rows of each 16. */
template <int HIGH, bool HELD> struct State {
        float o[HIGH][16][4], top[HIGH][2], sum[HIGH][2];
        uint32_t held[HELD ? HIGH : 1][HELD ? 8 : 1][4]; /* queries */
};

template <int HIGH, int KEYS, bool HELD>
static __device__ __forceinline__ void scores(
        float (&s)[HIGH][KEYS / 8][4], const State<HIGH, HELD> &t, uint32_t q, uint32_t k) {
        const int lane = (int) threadIdx.x % 32, mine = (int) threadIdx.x / 32 * HIGH * 16;

#pragma unroll
        for (int i = 0; i < 8; i++) {
                uint32_t x[HIGH][4];

#pragma unroll
                for (int h = 0; h < HIGH; h++)
                        if (!HELD)
                                matrices(x[h], q + place(mine + h * 16 + lane % 16, 2 * i + lane / 16));
#pragma unroll
                for (int n = 0; n < KEYS / 16; n++) {
                        uint32_t y[4];

                        matrices(y, k + place(n * 16 + lane / 16 * 8 + lane % 8, 2 * i + lane / 8 % 2));
#pragma unroll
                        for (int h = 0; h < HIGH; h++) {
                                product_bf16(s[h][2 * n], HELD ? t.held[HELD ? h : 0][HELD ? i : 0] : x[h],
                                        y[0], y[1]);
                                product_bf16(s[h][2 * n + 1],
                                        HELD ? t.held[HELD ? h : 0][HELD ? i : 0] : x[h], y[2], y[3]);
                        }
                }
        }
}

/* Scores to weights relative to the running maximum, every decision a row's own. */
template <int HIGH, int KEYS, bool HELD>
static __device__ __forceinline__ void softmax(float (&s)[HIGH][KEYS / 8][4], State<HIGH, HELD> &t) {
        const float unit = 0.08838834764831845f * 1.4426950408889634f; /* 1/sqrt(128), to base 2 */

#pragma unroll
        for (int h = 0; h < HIGH; h++) {
                float most[2] = {t.top[h][0], t.top[h][1]}, scale[2];

#pragma unroll
                for (int i = 0; i < KEYS / 2; i++)
                        most[i / 2 % 2] = fmaxf(most[i / 2 % 2], s[h][i / 4][i % 4]);
#pragma unroll
                for (int r = 0; r < 2; r++) {
                        most[r] = fmaxf(most[r], __shfl_xor_sync(0xffffffffu, most[r], 1));
                        most[r] = fmaxf(most[r], __shfl_xor_sync(0xffffffffu, most[r], 2));
                        scale[r] = exp2_unit((t.top[h][r] - most[r]) * unit);
                        t.top[h][r] = most[r];
                        t.sum[h][r] *= scale[r];
                }
#pragma unroll
                for (int i = 0; i < KEYS / 2; i++) {
                        float w = exp2_unit(fmaf(s[h][i / 4][i % 4], unit, -most[i / 2 % 2] * unit));

                        s[h][i / 4][i % 4] = w;
                        t.sum[h][i / 2 % 2] += w;
                }
                /* Leaving out factors of 1 changes nothing. */
                if (__any_sync(0xffffffffu, scale[0] != 1 || scale[1] != 1)) {
#pragma unroll
                        for (int i = 0; i < 64; i++)
                                t.o[h][i / 4][i % 4] *= scale[i / 2 % 2];
                }
        }
}

template <int HIGH, int KEYS, bool HELD>
static __device__ __forceinline__ void values(
        State<HIGH, HELD> &t, const float (&s)[HIGH][KEYS / 8][4], uint32_t v) {
        const int lane = (int) threadIdx.x % 32;

#pragma unroll
        for (int i = 0; i < KEYS / 16; i++) {
                uint32_t x[HIGH][4];

#pragma unroll
                for (int h = 0; h < HIGH; h++)
#pragma unroll
                        for (int j = 0; j < 4; j++)
                                x[h][j] = pack(
                                        s[h][2 * i + j / 2][j % 2 * 2], s[h][2 * i + j / 2][j % 2 * 2 + 1]);
#pragma unroll
                for (int n = 0; n < 8; n++) {
                        uint32_t y[4];

                        matrices_turned(y, v + place(i * 16 + lane % 16, 2 * n + lane / 16));
#pragma unroll
                        for (int h = 0; h < HIGH; h++) {
                                product_bf16(t.o[h][2 * n], x[h], y[0], y[1]);
                                product_bf16(t.o[h][2 * n + 1], x[h], y[2], y[3]);
                        }
                }
        }
}

template <int HIGH, int KEYS>
static __device__ __forceinline__ void mask(float (&s)[HIGH][KEYS / 8][4], int left) {
#pragma unroll
        for (int h = 0; h < HIGH; h++)
#pragma unroll
                for (int i = 0; i < KEYS / 2; i++)
                        if (i / 4 * 8 + (int) threadIdx.x % 4 * 2 + i % 2 >= left)
                                s[h][i / 4][i % 4] = -INFINITY;
}

template <int HIGH, bool HELD>
static __device__ __forceinline__ void store(
        State<HIGH, HELD> &t, uint8_t *o, uint64_t first, uint64_t rows) {
        const int lane = (int) threadIdx.x % 32, mine = (int) threadIdx.x / 32 * HIGH * 16;

#pragma unroll
        for (int h = 0; h < HIGH; h++)
#pragma unroll
                for (int r = 0; r < 2; r++) {
                        uint64_t row = first + mine + h * 16 + r * 8 + lane / 4;
                        float sum = t.sum[h][r];

                        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
                        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
                        if (row >= rows)
                                continue;
#pragma unroll
                        for (int n = 0; n < 16; n++)
                                *(uint32_t *) (o + row * (WIDTH * 2) + n * 16 + lane % 4 * 4) =
                                        pack(t.o[h][n][2 * r] / sum, t.o[h][n][2 * r + 1] / sum);
                }
}

/* One block: WARPS x HIGH x 16 query rows of one head. Keys in tiles of KEYS in their own order. HELD:
 * queries stay in registers. */
template <int WARPS, int HIGH, int KEYS, bool HELD>
static __global__ void __launch_bounds__(WARPS * 32) attention_kernel(const Attention a) {
        extern __shared__ uint8_t raw[];
        constexpr int ROWS = WARPS * HIGH * 16, THREADS = WARPS * 32, TILE = KEYS * 256;
        const int lane = (int) threadIdx.x % 32, mine = (int) threadIdx.x / 32 * HIGH * 16;
        const uint32_t q = (uint32_t) __cvta_generic_to_shared(raw), kv = HELD ? q : q + ROWS * 256;
        const uint64_t head = (uint64_t) blockIdx.y * 256, first = (uint64_t) blockIdx.x * ROWS;
        const int tiles = (int) ((a.keys + KEYS - 1) / KEYS);
        const uint8_t *k = a.k + head, *v = a.v + head;
        State<HIGH, HELD> t = {};

#pragma unroll
        for (int h = 0; h < HIGH; h++)
                t.top[h][0] = t.top[h][1] = -INFINITY;
        fetch<ROWS, THREADS>(q, a.q + head + first * (WIDTH * 2), a.rows - first);
        if (HELD) {
                fetched();
#pragma unroll
                for (int h = 0; h < HIGH; h++)
#pragma unroll
                        for (int i = 0; i < 8; i++)
                                matrices(t.held[HELD ? h : 0][HELD ? i : 0],
                                        q + place(mine + h * 16 + lane % 16, 2 * i + lane / 16));
                __syncthreads();
        }
        fetch<KEYS, THREADS>(kv, k, a.keys);
        fetch<KEYS, THREADS>(kv + TILE, v, a.keys);

        for (int tile = 0; tile < tiles; tile++) {
                const uint32_t at = kv + (uint32_t) (tile % 2 * 2 * TILE),
                               next = kv + (uint32_t) ((tile + 1) % 2 * 2 * TILE);
                const uint64_t left = a.keys - (uint64_t) tile * KEYS;
                float s[HIGH][KEYS / 8][4] = {};

                fetched();
                k += KEYS * WIDTH * 2;
                v += KEYS * WIDTH * 2;
                if (left > KEYS) {
                        fetch<KEYS, THREADS>(next, k, left - KEYS);
                        fetch<KEYS, THREADS>(next + TILE, v, left - KEYS);
                }
                scores<HIGH, KEYS, HELD>(s, t, q, at);
                if (left < KEYS)
                        mask<HIGH, KEYS>(s, (int) left);
                softmax<HIGH, KEYS, HELD>(s, t);
                values<HIGH, KEYS, HELD>(t, s, at + TILE);
        }
        store<HIGH, HELD>(t, a.o + head, first, a.rows);
}

typedef struct Launch {
        Attention a;
        unsigned heads;
} Launch;

template <int WARPS, int HIGH, int KEYS, bool HELD> static void launch(void *arg) {
        const Launch *l = (const Launch *) arg;
        const int rows = WARPS * HIGH * 16, queries = rows * 256, tiles = 4 * KEYS * 256;
        const int shared = HELD ? (queries > tiles ? queries : tiles) : queries + tiles;
        dim3 grid((unsigned) ((l->a.rows + rows - 1) / rows), l->heads);

        must(cudaFuncSetAttribute(attention_kernel<WARPS, HIGH, KEYS, HELD>,
                     cudaFuncAttributeMaxDynamicSharedMemorySize, shared),
                "shared memory");
        attention_kernel<WARPS, HIGH, KEYS, HELD><<<grid, WARPS * 32, shared>>>(l->a);
        must(cudaGetLastError(), "attention");
}

typedef void (*LaunchFunction)(void *);

static Launch part(const Case *c, uint64_t head, unsigned heads, uint64_t row, uint64_t rows, uint8_t *o) {
        uint64_t at = (row * WIDTH + head * DIM) * 2;

        return {{c->q + at, c->k + head * DIM * 2, c->v + head * DIM * 2, o + at, rows, c->rows}, heads};
}

static void check(LaunchFunction f, uint64_t rows) {
        static const uint64_t parts[][4] = {
                /* head, heads, row, rows */
                {0, 7, 0, 1409},
                {3, 1, 0, 1409},
                {55, 1, 0, 1409},
                {0, 56, 128, 1000},
                {0, 56, 37, 64},
                {0, 56, 1001, 1},
                {7, 14, 333, 1000},
                {0, 56, 1, 1408},
        };
        unsigned same = 0, all = 0;
        Launch l;
        Case c;

        case_init(&c, rows);
        l = part(&c, 0, HEADS, 0, rows, c.o);
        f(&l);
        for (auto &p : parts) {
                uint64_t at = (p[2] * WIDTH + p[0] * DIM) * 2;

                must(cudaMemset(c.part, 0xff, rows * WIDTH * 2), "poison");
                l = part(&c, p[0], (unsigned) p[1], p[2], p[3], c.part);
                f(&l);
                all++;
                same += differing(c.o + at, WIDTH * 2, c.part + at, WIDTH * 2, p[1] * DIM * 2, p[3]) == 0;
        }
        printf("  %lu rows: error against f64 %.2e, %u of %u parts with the bits of the whole\n", rows,
                case_error(&c), same, all);
        case_done(&c);
}

template <typename T> static void launch_bare(void *data) {
        bare_kernel<T><<<2 * device_processors(), 256>>>(
                (const uint32_t *) data, (T *) ((uint8_t *) data + 65536));
        must(cudaGetLastError(), "bare products");
}

static double bare(const char *what, Rate r, double k) {
        double tf = 2e-6 * 2 * device_processors() * 8 * ROUNDS * 32 * 16 * 8 * k / r.usec;

        printf("%s: %.0f TF %u MHz %u W\n", what, tf, r.mhz, r.watts);
        return tf;
}

static void measure(const char *what, LaunchFunction f, double limit) {
        static const uint64_t lengths[] = {7013, 38010, 73686};

        printf("%s\n", what);
        check(f, 1409);
        for (uint64_t rows : lengths) {
                Launch l;
                Rate r;
                double tf;
                Case c;

                case_init(&c, rows);
                l = part(&c, 0, HEADS, 0, rows, c.o);
                r = rate(f, &l, 0.5);
                tf = 4e-6 * (double) (HEADS * DIM) * (double) rows * (double) rows / r.usec;
                printf("  %lu rows: %.1f ms (%.1f to %.1f, %u) %.0f TF %u MHz %u W, of the bare products "
                       "%.3f\n",
                        rows, r.usec / 1000, r.shortest / 1000, r.longest / 1000, r.samples, tf, r.mhz,
                        r.watts, tf / limit);
                case_done(&c);
        }
}

int main(void) {
        uint8_t *data;
        double limit;

        device_open();
        data = (uint8_t *) device_new(131072);
        fill_bf16(data, 65536, 1, 1);
        limit = bare("bare mma.sync bf16, m16n8k16", rate(launch_bare<float>, data, 1), 16);
        fill_s8(data, 65536, 32, 2);
        (void) bare("bare mma.sync int8, m16n8k32", rate(launch_bare<int>, data, 1), 32);

        measure("4 warps of 32 rows, 64 keys, queries in shared memory", launch<4, 2, 64, false>, limit);
        measure("8 warps of 16 rows, 64 keys, queries in registers", launch<8, 1, 64, true>, limit);
        measure("4 warps of 16 rows, 64 keys, queries in registers", launch<4, 1, 64, true>, limit);
        measure("4 warps of 32 rows, 32 keys, queries in shared memory", launch<4, 2, 32, false>, limit);
        return 0;
}
