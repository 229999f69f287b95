/* SPDX-License-Identifier: Apache-2.0 */
/* What an attention kernel of sm_90a can reach when nothing but the processor holds it back: bare warpgroup
 * products, the operations of a softmax alone, and both together in the order of an attention kernel,
 * without any loads. Two warpgroups a processor, operands in shared memory that never change.
 *
 *     measure-wgmma
 */

#include <stdio.h>

#include "kernels/cuda/hopper.cuh"
#include "tests/gpu/device.h"

#define ROWS 64 /* of a warpgroup's tile */
#define KEYS 128
#define SCORES (ROWS * KEYS / 128) /* of a thread */
#define TILE_BYTES (KEYS * 128)    /* 128 rows of 128 bytes: keys by 64 numbers of bf16 or 128 of 8 bits */
#define SHARED (4 * TILE_BYTES + 2 * 2 * ROWS * 128 + 1024)
#define ROUNDS 2000
#define GROUP 64

enum { BF16, S8, E4M3 };

#define FLOAT_REGISTER(i) "+f"(d[i])
#define INT_REGISTER(i) "+r"(d[i])

/* d = (add ? d : 0) + a . b^T, 64 x 128, K of 16 for bf16, 32 for 8 bits; a in shared memory or in four
 * registers. */
#define SHARED_PRODUCT(shape, list, tail)                                                                   \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %66, 0; wgmma.mma_async.sync.aligned." shape " " D64   \
                     ", %64, %65, p" tail "; }"                                                             \
                     : LIST64(list)                                                                         \
                     : "l"(a), "l"(b), "r"(add))
#define REGISTER_PRODUCT(shape, list, tail)                                                                 \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %69, 0; wgmma.mma_async.sync.aligned." shape " " D64   \
                     ", {%64,%65,%66,%67}, %68, p" tail "; }"                                               \
                     : LIST64(list)                                                                         \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add))

template <int KIND> static __device__ void product(float (&d)[64], uint64_t a, uint64_t b, int add) {
        if (KIND == BF16)
                SHARED_PRODUCT("m64n128k16.f32.bf16.bf16", FLOAT_REGISTER, ", 1, 1, 0, 0");
        else
                SHARED_PRODUCT("m64n128k32.f32.e4m3.e4m3", FLOAT_REGISTER, ", 1, 1");
}

template <int KIND> static __device__ void product(int (&d)[64], uint64_t a, uint64_t b, int add) {
        SHARED_PRODUCT("m64n128k32.s32.s8.s8", INT_REGISTER, "");
}

template <int KIND> static __device__ void product(float (&d)[64], const uint32_t *a, uint64_t b, int add) {
        if (KIND == BF16)
                REGISTER_PRODUCT("m64n128k16.f32.bf16.bf16", FLOAT_REGISTER, ", 1, 1, 0");
        else
                REGISTER_PRODUCT("m64n128k32.f32.e4m3.e4m3", FLOAT_REGISTER, ", 1, 1");
}

template <int KIND> static __device__ void product(int (&d)[64], const uint32_t *a, uint64_t b, int add) {
        REGISTER_PRODUCT("m64n128k32.s32.s8.s8", INT_REGISTER, "");
}

/* A tile of rows of 128 bytes, swizzled by 128 bytes, groups of 8 rows 1024 bytes apart. */
static __device__ uint64_t describe(const void *p) {
        uint64_t at = __cvta_generic_to_shared(p);

        return (at & 0x3ffff) >> 4 | UINT64_C(1) << 16 | (uint64_t) (1024 >> 4) << 32 | UINT64_C(1) << 62;
}

static __device__ uint8_t *tiles(uint8_t *raw) {
        return raw + (1024 - __cvta_generic_to_shared(raw) % 1024) % 1024;
}

static __device__ void load(uint8_t *shared, const uint4 *data) {
        for (unsigned i = threadIdx.x; i < (SHARED - 1024) / 16; i += blockDim.x)
                ((uint4 *) shared)[i] = data[i];
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncthreads();
}

template <typename T> static __device__ void keep(T *out, const T *d) {
        T sum = 0;

        for (int i = 0; i < 64; i++)
                sum += d[i];
        if (sum == (T) 12345)
                *out = sum;
}

/* GROUP products in a group, nothing else. */
template <int KIND, typename T, bool REGISTERS>
static __global__ void __launch_bounds__(256, 1) bare_kernel(const uint4 *data, T *out) {
        extern __shared__ uint8_t raw[];
        uint8_t *shared = tiles(raw);
        uint64_t b = describe(shared),
                 a = describe(shared + 4 * TILE_BYTES + threadIdx.x / 128 * ROWS * 128);
        uint32_t p[16];
        T d[64] = {};

        load(shared, data);
        for (int i = 0; i < 16; i++)
                p[i] = ((uint32_t *) shared)[threadIdx.x * 16 + i];
        for (int round = 0; round < ROUNDS; round++) {
                products_begin();
#pragma unroll
                for (int i = 0; i < GROUP; i++) {
                        uint64_t step = (uint64_t) (i % 4 * 2 + i / 4 % 4 * (TILE_BYTES >> 4));

                        if (REGISTERS)
                                product<KIND>(d, p + i % 4 * 4, b + step, 1);
                        else
                                product<KIND>(d, a + (uint64_t) (i % 4 * 2), b + step, 1);
                }
                products_commit();
                products_wait<0>();
        }
        keep(out, d);
}

static __device__ float exp2_unit(float x) {
        float y;

        asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
        return y;
}

/* Without the special unit: Cody and Waite's split at the nearest integer, a cubic for the rest (9e-5,
 * enough for 8 bits). */
static __device__ float exp2_polynomial(float x) {
        float z = fmaxf(x, -120.0f) + 12582912.0f, f = x - (z - 12582912.0f), y;

        y = fmaf(fmaf(fmaf(0.0555054f, f, 0.2402265f), f, 0.6931472f), f, 1.0f);
        return __int_as_float(__float_as_int(y) + (__float_as_int(z) << 23));
}

static __device__ uint16_t pack_e4m3(float a, float b) {
        uint16_t y;

        asm volatile("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(y) : "f"(b), "f"(a));
        return y;
}

static __device__ uint32_t pack_bf16(float a, float b) {
        uint32_t y;

        asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(b), "f"(a));
        return y;
}

enum { EXP2, INT_TO_FLOAT, PACK, EXP2_AND_INT_TO_FLOAT, EXP2_AND_PACK, POLYNOMIAL };

/* Operations of one thread, in numbers of scores; the clocks of one block. */
template <int WHAT>
static __global__ void __launch_bounds__(512, 1) softmax_kernel(float *out, long long *clocks) {
        float x[16];
        uint32_t sum = 0;
        long long begin;

        for (int i = 0; i < 16; i++)
                x[i] = -0.001f * (float) (threadIdx.x + i);
        __syncthreads();
        begin = clock64();
        for (int round = 0; round < 256; round++)
                for (int i = 0; i < 16; i++) {
                        if (WHAT == INT_TO_FLOAT || WHAT == EXP2_AND_INT_TO_FLOAT)
                                asm volatile("cvt.rn.f32.s32 %0, %1;"
                                             : "=f"(x[i])
                                             : "r"(__float_as_int(x[i])));
                        if (WHAT == EXP2 || WHAT == EXP2_AND_INT_TO_FLOAT || WHAT == EXP2_AND_PACK)
                                x[i] = exp2_unit(x[i]);
                        if (WHAT == POLYNOMIAL)
                                x[i] = exp2_polynomial(x[i]);
                        if ((WHAT == PACK || WHAT == EXP2_AND_PACK) && i % 2)
                                sum ^= pack_e4m3(x[i - 1], x[i]);
                }
        __syncthreads();
        if (threadIdx.x == 0 && blockIdx.x == 0)
                *clocks = clock64() - begin;
        for (int i = 0; i < 16; i++)
                sum ^= __float_as_uint(x[i]);
        if (sum == 12345)
                *out = 1;
}

/* Scores of a thread to weights (w may be s): maximum of each of its two rows over the tile and its four
 * lanes, weights, their sums. One weight in SHARE goes without the special unit; 0: none. */
template <int KIND, int SHARE, typename T>
static __device__ void softmax(const T *s, float (&top)[2], float (&sum)[2], float (&scale)[2], float *w) {
        const float unit = KIND == BF16 ? 0.02f : 0.0001f;
        float part[2] = {}, low[2];
        T most[2] = {s[0], s[2]};

        for (int i = 0; i < 64; i++)
                most[i / 2 % 2] = most[i / 2 % 2] > s[i] ? most[i / 2 % 2] : s[i];
        for (int r = 0; r < 2; r++) {
                float m = (float) most[r] * unit;

                m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
                m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
                m = fmaxf(m, top[r]);
                scale[r] = exp2_unit(top[r] - m);
                top[r] = m;
                low[r] = -m;
        }
        for (int i = 0; i < 64; i++) {
                float x = fmaf((float) s[i], unit, low[i / 2 % 2]);

                w[i] = SHARE && i % (SHARE ? SHARE : 1) == 0 ? exp2_polynomial(x) : exp2_unit(x);
                part[i / 2 % 2] += w[i];
        }
        for (int r = 0; r < 2; r++)
                sum[r] = fmaf(sum[r], scale[r], part[r]);
}

/* Weights to operand registers. The order of the columns is not the product's, which costs the same. */
template <int KIND> static __device__ void pack(const float *w, uint32_t *p) {
        for (int i = 0; i < 64; i += KIND == BF16 ? 2 : 4)
                if (KIND == BF16)
                        p[i / 2] = pack_bf16(w[i], w[i + 1]);
                else
                        p[i / 4] = pack_e4m3(w[i], w[i + 1]) | (uint32_t) pack_e4m3(w[i + 2], w[i + 3])
                                                                       << 16;
}

static __device__ void barrier_wait(int id) {
        asm volatile("bar.sync %0, 256;" ::"r"(id) : "memory");
}

static __device__ void barrier_arrive(int id) {
        asm volatile("bar.arrive %0, 256;" ::"r"(id) : "memory");
}

enum { PRODUCTS_ONLY, FREE, TURNS };

/* Query by key, softmax, weights by value, over the same tile again and again; a tile's weights meet the
 * values behind the next tile's softmax. KIND S8: scores of int8, weights and values of e4m3, a tile's sums
 * added to the output apart, as the short sums of 8-bit products ask for; BF16: the output in place. TURNS:
 * by two barriers one warpgroup gives its products away while the other has its softmax. */
template <int KIND, typename T, int HOW, int SHARE>
static __global__ void __launch_bounds__(256, 1) attention_kernel(const uint4 *data, float *out) {
        extern __shared__ uint8_t raw[];
        uint8_t *shared = tiles(raw);
        const int group = (int) threadIdx.x / 128, steps = KIND == BF16 ? 8 : 4;
        const int values = KIND == BF16 ? BF16 : E4M3;
        uint64_t q = describe(shared + 4 * TILE_BYTES + group * 2 * ROWS * 128), k = describe(shared),
                 v = describe(shared + 2 * TILE_BYTES);
        float o[64] = {}, part[64] = {}, w[64], top[2] = {-1e30f, -1e30f}, sum[2] = {}, scale[2] = {1, 1},
              before[2];
        uint32_t p[32];
        T s[64] = {};

        load(shared, data);
        for (int i = 0; i < 32; i++)
                p[i] = ((uint32_t *) (shared + 2 * TILE_BYTES))[threadIdx.x % 128 * 32 + i];
        if (HOW == TURNS && group == 1)
                barrier_arrive(1);
        for (int round = 0; round < ROUNDS; round++) {
                if (HOW == TURNS)
                        barrier_wait(1 + group);
                products_begin();
                /* Keys a little further on each round, or the compiler sees that the scores are always the
                 * same. */
                k ^= (uint64_t) (round % 4 * 2);
                for (int i = 0; i < steps; i++)
                        product<KIND>(s, q + (uint64_t) (i % 4 * 2 + i / 4 * (ROWS * 128 >> 4)),
                                k + (uint64_t) (i % 4 * 2 + i / 4 * (TILE_BYTES >> 4)),
                                HOW == PRODUCTS_ONLY || i > 0);
                products_commit();
                for (int i = 0; i < steps; i++)
                        product<values>(KIND == BF16 ? o : part, p + i * 4,
                                (HOW == PRODUCTS_ONLY ? k ^ (v ^ describe(shared)) : v) +
                                        (uint64_t) (i % 4 * 2 + i / 4 * (TILE_BYTES >> 4)),
                                KIND == BF16 || i > 0);
                products_commit();
                products_wait<1>();
                if (HOW == TURNS)
                        barrier_arrive(2 - group);
                before[0] = scale[0];
                before[1] = scale[1];
                if (HOW != PRODUCTS_ONLY)
                        softmax<KIND, SHARE>(s, top, sum, scale, w);
                products_wait<0>();
                for (int i = 0; i < 64; i++)
                        if (KIND != BF16)
                                o[i] = fmaf(o[i], before[i / 2 % 2], part[i]);
                        else if (HOW != PRODUCTS_ONLY)
                                o[i] *= scale[i / 2 % 2];
                if (HOW != PRODUCTS_ONLY)
                        pack<KIND>(w, p);
        }
        if (HOW == TURNS && group == 0)
                barrier_wait(1);
        keep(out, o);
        if (HOW == PRODUCTS_ONLY) {
                keep((T *) out, s);
                keep(out, part);
        }
        if (sum[0] + sum[1] == 12345)
                *out = 1;
}

static const uint4 *data_bf16, *data_s8, *data_e4m3, *data_mixed;
static float *out;
static long long *clocks;

template <typename K> static void allow(K kernel) {
        must(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED),
                "shared memory");
}

template <int KIND, typename T, bool REGISTERS> static void launch_bare(void *data) {
        allow(bare_kernel<KIND, T, REGISTERS>);
        bare_kernel<KIND, T, REGISTERS>
                <<<device_processors(), 256, SHARED>>>((const uint4 *) data, (T *) out);
        must(cudaGetLastError(), "bare products");
}

template <int KIND, typename T, int HOW, int SHARE> static void launch_attention(void *data) {
        allow(attention_kernel<KIND, T, HOW, SHARE>);
        attention_kernel<KIND, T, HOW, SHARE>
                <<<device_processors(), 256, SHARED>>>((const uint4 *) data, out);
        must(cudaGetLastError(), "attention");
}

/* TF of what a launch of `products` products a warpgroup and round took. */
static double print_rate(const char *what, Rate r, double products, double k, double limit) {
        double tf = 2e-6 * device_processors() * 2 * ROUNDS * products * ROWS * 128 * k / r.usec;

        printf("%-58s %6.0f TF %4u MHz %3u W", what, tf, r.mhz, r.watts);
        if (limit > 0)
                printf(", of the bare products %.3f", tf / limit);
        printf("\n");
        return tf;
}

template <int WHAT> static double print_clocks(const char *what) {
        long long n;

        for (int i = 0; i < 2; i++) {
                softmax_kernel<WHAT><<<device_processors(), 512>>>(out, clocks);
                must(cudaMemcpy(&n, clocks, sizeof(n), cudaMemcpyDeviceToHost), "softmax operations");
        }
        printf("%-58s %6.1f scores a clock and processor\n", what, 512.0 * 256 * 16 / (double) n);
        return (double) n;
}

int main(void) {
        const double seconds = 0.7;
        uint8_t *mixed;
        double bf16, s8, e4m3, eight;

        device_open();
        out = (float *) device_new(256);
        clocks = (long long *) device_new(sizeof(*clocks));
        data_bf16 = (const uint4 *) device_new(SHARED);
        data_s8 = (const uint4 *) device_new(SHARED);
        data_e4m3 = (const uint4 *) device_new(SHARED);
        mixed = (uint8_t *) device_new(SHARED);
        fill_bf16((void *) data_bf16, SHARED / 2, 1, 1);
        fill_s8((void *) data_s8, SHARED, 32, 2);
        fill_e4m3((void *) data_e4m3, SHARED, 1, 3);
        fill_s8(mixed, SHARED, 32, 4);
        fill_e4m3(mixed + 2 * TILE_BYTES, 2 * TILE_BYTES, 1, 5);
        data_mixed = (const uint4 *) mixed;

        puts("bare products, m64n128, two warpgroups a processor; a from shared memory / from registers");
        (void) print_rate("bf16, shared", rate(launch_bare<BF16, float, false>, (void *) data_bf16, seconds),
                GROUP, 16, 0);
        bf16 = print_rate("bf16, registers",
                rate(launch_bare<BF16, float, true>, (void *) data_bf16, seconds), GROUP, 16, 0);
        (void) print_rate(
                "int8, shared", rate(launch_bare<S8, int, false>, (void *) data_s8, seconds), GROUP, 32, 0);
        s8 = print_rate("int8, registers", rate(launch_bare<S8, int, true>, (void *) data_s8, seconds),
                GROUP, 32, 0);
        (void) print_rate("e4m3, shared", rate(launch_bare<E4M3, float, false>, (void *) data_e4m3, seconds),
                GROUP, 32, 0);
        e4m3 = print_rate("e4m3, registers",
                rate(launch_bare<E4M3, float, true>, (void *) data_e4m3, seconds), GROUP, 32, 0);
        eight = 2 / (1 / s8 + 1 / e4m3);

        puts("operations of a softmax alone, 16 warps a processor");
        (void) print_clocks<EXP2>("exp2 by the special unit");
        (void) print_clocks<POLYNOMIAL>("exp2 by a cubic");
        (void) print_clocks<INT_TO_FLOAT>("int32 to float");
        (void) print_clocks<PACK>("two floats to e4m3");
        (void) print_clocks<EXP2_AND_INT_TO_FLOAT>("exp2 and int32 to float");
        (void) print_clocks<EXP2_AND_PACK>("exp2 and two floats to e4m3");

        puts("attention without loads, 64 x 128 a warpgroup");
        (void) print_rate("bf16, products only",
                rate(launch_attention<BF16, float, PRODUCTS_ONLY, 0>, (void *) data_bf16, seconds), 16, 16,
                bf16);
        (void) print_rate("bf16, warpgroups free",
                rate(launch_attention<BF16, float, FREE, 0>, (void *) data_bf16, seconds), 16, 16, bf16);
        (void) print_rate("bf16, in turns",
                rate(launch_attention<BF16, float, TURNS, 0>, (void *) data_bf16, seconds), 16, 16, bf16);
        (void) print_rate("bf16, in turns, an eighth of exp2 by a cubic",
                rate(launch_attention<BF16, float, TURNS, 8>, (void *) data_bf16, seconds), 16, 16, bf16);
        (void) print_rate("int8 and e4m3, products only",
                rate(launch_attention<S8, int, PRODUCTS_ONLY, 0>, (void *) data_mixed, seconds), 8, 32,
                eight);
        (void) print_rate("int8 and e4m3, warpgroups free",
                rate(launch_attention<S8, int, FREE, 0>, (void *) data_mixed, seconds), 8, 32, eight);
        (void) print_rate("int8 and e4m3, in turns",
                rate(launch_attention<S8, int, TURNS, 0>, (void *) data_mixed, seconds), 8, 32, eight);
        (void) print_rate("the same, an eighth of exp2 by a cubic",
                rate(launch_attention<S8, int, TURNS, 8>, (void *) data_mixed, seconds), 8, 32, eight);
        (void) print_rate("the same, a quarter by a cubic",
                rate(launch_attention<S8, int, TURNS, 4>, (void *) data_mixed, seconds), 8, 32, eight);
        (void) print_rate("warpgroups free, an eighth by a cubic",
                rate(launch_attention<S8, int, FREE, 8>, (void *) data_mixed, seconds), 8, 32, eight);
        (void) print_rate("warpgroups free, a quarter by a cubic",
                rate(launch_attention<S8, int, FREE, 4>, (void *) data_mixed, seconds), 8, 32, eight);
        return 0;
}
