/* SPDX-License-Identifier: Apache-2.0 */
/* How near does attention by the instructions that every card since sm_80 has (mma.sync, ldmatrix, cp.async, at most 99 KB of shared
 * memory a block) come to the bare products of the same instructions? Bare loops first, then a kernel in several tile shapes, each
 * compared with f64 and, to the bit, over parts of the rows and heads.
 *
 *     measure-mma
 */

#include <math.h>
#include <stdio.h>

#include "tests/gpu/attention-case.h"
#include "tests/gpu/device.h"

#define ROUNDS 2000

static __device__ void product_bf16(float (&d)[4], const uint32_t *a, uint32_t b0, uint32_t b1) {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

static __device__ void product_s8(int (&d)[4], const uint32_t *a, uint32_t b0, uint32_t b1) {
        asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
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
template <typename T> static __global__ void __launch_bounds__(256, 1) bare_kernel(const uint32_t *data, T *out) {
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
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"(at));
}

static __device__ void matrices_turned(uint32_t *d, uint32_t at) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"(at));
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

/* Shared memory holds rows of 128 numbers, their 16 pieces of 16 bytes exchanged so that 8 rows of one column lie in different banks. */
static __device__ uint32_t place(int row, int piece) {
        return (uint32_t) (row * 256 + (piece ^ (row & 7)) * 16);
}

/* `rows` rows from `first` on, zeros behind the last. */
template <int ROWS, int THREADS> static __device__ void fetch(uint32_t shared, const uint8_t *from, uint64_t first, uint64_t rows) {
        for (int i = (int) threadIdx.x; i < ROWS * 16; i += THREADS) {
                int row = i / 16, piece = i % 16;
                bool there = first + row < rows;
                const uint8_t *p = from + (there ? first + row : 0) * (WIDTH * 2) + piece * 16;

                asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared + place(row, piece)), "l"(p), "r"(there ? 16 : 0) : "memory");
        }
}

typedef struct Attention {
        const uint8_t *q, *k, *v;
        uint8_t *o;
        uint64_t rows, keys; /* of queries; of keys */
} Attention;

/* One block: WARPS x HIGH x 16 query rows of one head. Keys in tiles of KEYS in their own order, every decision a row's own. HELD: the
 * queries stay in registers. */
template <int WARPS, int HIGH, int KEYS, bool HELD> static __global__ void __launch_bounds__(WARPS * 32) attention_kernel(const Attention a) {
        extern __shared__ uint8_t raw[];
        constexpr int ROWS = WARPS * HIGH * 16, THREADS = WARPS * 32, TILE = KEYS * 256;
        const int lane = (int) threadIdx.x % 32, mine = (int) threadIdx.x / 32 * HIGH * 16;
        const uint32_t q = (uint32_t) __cvta_generic_to_shared(raw), kv = HELD ? q : q + ROWS * 256;
        const uint64_t head = (uint64_t) blockIdx.y * 256, first = (uint64_t) blockIdx.x * ROWS;
        const int tiles = (int) ((a.keys + KEYS - 1) / KEYS);
        const float unit = 0.08838834764831845f * 1.4426950408889634f; /* 1/sqrt(128), to base 2 */
        float o[HIGH][16][4] = {}, top[HIGH][2], sum[HIGH][2] = {};
        uint32_t held[HELD ? HIGH : 1][HELD ? 8 : 1][4];

#pragma unroll
        for (int h = 0; h < HIGH; h++)
                top[h][0] = top[h][1] = -INFINITY;
        fetch<ROWS, THREADS>(q, a.q + head, first, a.rows);
        if (HELD) {
                asm volatile("cp.async.commit_group;\ncp.async.wait_group 0;" ::: "memory");
                __syncthreads();
#pragma unroll
                for (int h = 0; h < HIGH; h++)
                        for (int i = 0; i < 8; i++)
                                matrices(held[HELD ? h : 0][HELD ? i : 0], q + place(mine + h * 16 + lane % 16, 2 * i + lane / 16));
                __syncthreads();
        }
        fetch<KEYS, THREADS>(kv, a.k + head, 0, a.keys);
        fetch<KEYS, THREADS>(kv + TILE, a.v + head, 0, a.keys);
        asm volatile("cp.async.commit_group;" ::: "memory");

        for (int tile = 0; tile < tiles; tile++) {
                const uint32_t k = kv + (uint32_t) (tile % 2 * 2 * TILE), v = k + TILE;
                float s[HIGH][KEYS / 8][4] = {};

                asm volatile("cp.async.wait_group 0;" ::: "memory");
                __syncthreads();
                if (tile + 1 < tiles) {
                        uint32_t next = kv + (uint32_t) ((tile + 1) % 2 * 2 * TILE);

                        fetch<KEYS, THREADS>(next, a.k + head, (uint64_t) (tile + 1) * KEYS, a.keys);
                        fetch<KEYS, THREADS>(next + TILE, a.v + head, (uint64_t) (tile + 1) * KEYS, a.keys);
                        asm volatile("cp.async.commit_group;" ::: "memory");
                }

#pragma unroll
                for (int i = 0; i < 8; i++) {
                        uint32_t x[HIGH][4];

#pragma unroll
                        for (int h = 0; h < HIGH; h++)
                                if (HELD)
                                        for (int j = 0; j < 4; j++)
                                                x[h][j] = held[HELD ? h : 0][HELD ? i : 0][j];
                                else
                                        matrices(x[h], q + place(mine + h * 16 + lane % 16, 2 * i + lane / 16));
#pragma unroll
                        for (int n = 0; n < KEYS / 16; n++) {
                                uint32_t y[4];

                                matrices(y, k + place(n * 16 + lane / 16 * 8 + lane % 8, 2 * i + lane / 8 % 2));
#pragma unroll
                                for (int h = 0; h < HIGH; h++) {
                                        product_bf16(s[h][2 * n], x[h], y[0], y[1]);
                                        product_bf16(s[h][2 * n + 1], x[h], y[2], y[3]);
                                }
                        }
                }

                if (tile == tiles - 1 && a.keys % KEYS != 0)
#pragma unroll
                        for (int h = 0; h < HIGH; h++)
#pragma unroll
                                for (int n = 0; n < KEYS / 8; n++)
                                        for (int j = 0; j < 4; j++)
                                                if ((uint64_t) tile * KEYS + n * 8 + lane % 4 * 2 + j % 2 >= a.keys)
                                                        s[h][n][j] = -INFINITY;

#pragma unroll
                for (int h = 0; h < HIGH; h++) {
                        float most[2] = { top[h][0], top[h][1] }, scale[2];

#pragma unroll
                        for (int n = 0; n < KEYS / 8; n++)
                                for (int j = 0; j < 4; j++)
                                        most[j / 2] = fmaxf(most[j / 2], s[h][n][j]);
#pragma unroll
                        for (int r = 0; r < 2; r++) {
                                most[r] = fmaxf(most[r], __shfl_xor_sync(0xffffffffu, most[r], 1));
                                most[r] = fmaxf(most[r], __shfl_xor_sync(0xffffffffu, most[r], 2));
                                scale[r] = exp2_unit((top[h][r] - most[r]) * unit);
                                top[h][r] = most[r];
                                sum[h][r] *= scale[r];
                        }
#pragma unroll
                        for (int n = 0; n < KEYS / 8; n++)
                                for (int j = 0; j < 4; j++) {
                                        s[h][n][j] = exp2_unit(fmaf(s[h][n][j], unit, -most[j / 2] * unit));
                                        sum[h][j / 2] += s[h][n][j];
                                }
                        /* Leaving out factors of 1 changes nothing. */
                        if (__any_sync(0xffffffffu, scale[0] != 1 || scale[1] != 1))
#pragma unroll
                                for (int n = 0; n < 16; n++)
                                        for (int j = 0; j < 4; j++)
                                                o[h][n][j] *= scale[j / 2];
                }

#pragma unroll
                for (int i = 0; i < KEYS / 16; i++) {
                        uint32_t x[HIGH][4];

#pragma unroll
                        for (int h = 0; h < HIGH; h++)
                                for (int j = 0; j < 4; j++)
                                        x[h][j] = pack(s[h][2 * i + j / 2][j % 2 * 2], s[h][2 * i + j / 2][j % 2 * 2 + 1]);
#pragma unroll
                        for (int n = 0; n < 8; n++) {
                                uint32_t y[4];

                                matrices_turned(y, v + place(i * 16 + lane % 16, 2 * n + lane / 16));
#pragma unroll
                                for (int h = 0; h < HIGH; h++) {
                                        product_bf16(o[h][2 * n], x[h], y[0], y[1]);
                                        product_bf16(o[h][2 * n + 1], x[h], y[2], y[3]);
                                }
                        }
                }
        }

#pragma unroll
        for (int h = 0; h < HIGH; h++)
#pragma unroll
                for (int r = 0; r < 2; r++) {
                        uint64_t row = first + mine + h * 16 + r * 8 + lane / 4;

                        sum[h][r] += __shfl_xor_sync(0xffffffffu, sum[h][r], 1);
                        sum[h][r] += __shfl_xor_sync(0xffffffffu, sum[h][r], 2);
                        if (row < a.rows)
#pragma unroll
                                for (int n = 0; n < 16; n++)
                                        *(uint32_t *) (a.o + row * (WIDTH * 2) + head + n * 16 + lane % 4 * 4) =
                                                pack(o[h][n][2 * r] / sum[h][r], o[h][n][2 * r + 1] / sum[h][r]);
                }
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

        must(cudaFuncSetAttribute(attention_kernel<WARPS, HIGH, KEYS, HELD>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared), "shared memory");
        attention_kernel<WARPS, HIGH, KEYS, HELD><<<grid, WARPS * 32, shared>>>(l->a);
        must(cudaGetLastError(), "attention");
}

typedef void (*LaunchFunction)(void *);

static Launch part(const Case *c, uint64_t head, unsigned heads, uint64_t row, uint64_t rows, uint8_t *o) {
        uint64_t at = (row * WIDTH + head * DIM) * 2;

        return { { c->q + at, c->k + head * DIM * 2, c->v + head * DIM * 2, o + at, rows, c->rows }, heads };
}

static void check(LaunchFunction f, uint64_t rows) {
        static const uint64_t parts[][4] = { /* head, heads, row, rows */
                { 0, 7, 0, 1409 }, { 3, 1, 0, 1409 }, { 55, 1, 0, 1409 }, { 0, 56, 128, 1000 }, { 0, 56, 37, 64 }, { 0, 56, 1001, 1 }, { 7, 14, 333, 1000 },
                { 0, 56, 1, 1408 },
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
        printf("  %lu rows: error against f64 %.2e, %u of %u parts with the bits of the whole\n", rows, case_error(&c), same, all);
        case_done(&c);
}

template <typename T> static void launch_bare(void *data) {
        bare_kernel<T><<<2 * device_processors(), 256>>>((const uint32_t *) data, (T *) ((uint8_t *) data + 65536));
        must(cudaGetLastError(), "bare products");
}

static double bare(const char *what, Rate r, double k) {
        double tf = 2e-6 * 2 * device_processors() * 8 * ROUNDS * 32 * 16 * 8 * k / r.usec;

        printf("%s: %.0f TF %u MHz %u W\n", what, tf, r.mhz, r.watts);
        return tf;
}

static void measure(const char *what, LaunchFunction f, double limit) {
        static const uint64_t lengths[] = { 7013, 38010, 73686 };

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
                printf("  %lu rows: %.1f ms (%.1f to %.1f, %u) %.0f TF %u MHz %u W, of the bare products %.3f\n", rows, r.usec / 1000, r.shortest / 1000,
                        r.longest / 1000, r.samples, tf, r.mhz, r.watts, tf / limit);
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
