/* SPDX-License-Identifier: Apache-2.0 */

/* The products of the CUDA backend. What the CPU's bits are promised for is compared to the byte; the rest to f64,
 * and parts of it to the whole. Needs a CUDA device; without one every test skips. */

#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "kernels/cpu/cpu.h"
#include "kernels/cuda/cuda.h"
#include "tests/gpu/pair.h"

/* -1 .. 1 */
static float small(void) {
        return (float) (int32_t) next() * 0x1p-31f;
}

static uint16_t bf16_of(float f) {
        uint32_t u;

        memcpy(&u, &f, sizeof(u));
        return (uint16_t) ((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}

static float of_bf16(uint16_t h) {
        uint32_t u = (uint32_t) h << 16;
        float f;

        memcpy(&f, &u, sizeof(f));
        return f;
}

/* Finite numbers of any type of a matrix. f16: magnitudes 2^-15 .. 1, some subnormal. */
static void fill(uint8_t *p, LkType t, uint64_t n) {
        for (uint64_t i = 0; i < n; i++) {
                float f = next() % 40 == 0 ? 0 : small();
                uint16_t h = bf16_of(f);

                switch (t) {
                case LK_F32:
                        memcpy(p + 4 * i, &f, 4);
                        break;
                case LK_BF16:
                        memcpy(p + 2 * i, &h, 2);
                        break;
                case LK_F16:
                        h = (uint16_t) (next() & 0xbfffu);
                        memcpy(p + 2 * i, &h, 2);
                        break;
                case LK_F8_E4M3:
                        p[i] = (uint8_t) (next() & 0xf7u);
                        break;
                case LK_F8_E5M2:
                        p[i] = (uint8_t) (next() & 0xbfu);
                        break;
                case LK_NVFP4:
                        if (i % 2 == 0)
                                p[i / 2] = (uint8_t) next();
                        break;
                default:
                        p[i] = (uint8_t) next();
                        break;
                }
        }
}

static Pair pair_filled(LkType t, uint64_t n, uint64_t offset) {
        Pair p = pair_new(lk_row_size(t, n) + offset);

        fill(p.host + offset, t, n);
        pair_sync(&p);
        return p;
}

/* A matrix in both places. `offset`: bytes before its first number. */
typedef struct Weights {
        Pair data, scale, block_scale, in_scale;
        LkMatrix host, device;
} Weights;

typedef struct WeightsForm {
        LkType type;
        uint64_t rows, cols, offset, block_rows;
        uint32_t rotation;
        bool in_scale, one_scale;
} WeightsForm;

static Weights weights_new(WeightsForm f) {
        uint64_t row = lk_row_size(f.type, f.cols), blocks = f.block_rows ? f.rows / f.block_rows : 1;
        uint64_t per_block = f.block_rows ? f.block_rows : f.rows, gap = f.block_rows ? 2 : 1, tensor_rows = blocks * per_block * gap;
        Weights w = {.data = pair_filled(f.type, tensor_rows * f.cols, f.offset)};

        w.host = (LkMatrix){.data = w.data.host + f.offset, .type = f.type, .rows = f.rows, .cols = f.cols, .row_stride = row,
                .block_rows = per_block, .block_stride = gap * per_block * row};
        w.scale = pair_filled(LK_F32, tensor_rows, 0);
        w.block_scale = pair_filled(LK_F8_E4M3, (tensor_rows + 127) / 128 * 128 * ((f.cols / 16 + 3) / 4 * 4), 0);
        w.in_scale = pair_filled(LK_BF16, f.cols, 0);
        w.device = w.host;
        w.device.data = w.data.device + f.offset;
        if (f.type >= LK_I8) {
                LkQuant q = {.scale = w.scale.host, .scale_stride = f.one_scale ? 0 : 4, .rotation = f.rotation};

                if (f.type == LK_NVFP4) {
                        q.block_scale = w.block_scale.host;
                        q.block_scale_cols = (f.cols / 16 + 3) / 4 * 4;
                }
                if (f.in_scale)
                        q.in_scale = (LkVector){w.in_scale.host, LK_BF16, f.cols};
                w.host.quant = w.device.quant = q;
                w.device.quant.scale = w.scale.device;
                w.device.quant.block_scale = q.block_scale ? w.block_scale.device : NULL;
                w.device.quant.in_scale.data = f.in_scale ? w.in_scale.device : NULL;
        }
        return w;
}

static void weights_free(Weights *w) {
        pair_free(&w->data);
        pair_free(&w->scale);
        pair_free(&w->block_scale);
        pair_free(&w->in_scale);
}

static const uint64_t ms[] = {1, 5, 17, 33, 130, 301}, ns[] = {1, 7, 33, 64, 96, 131, 300}, ks[] = {16, 48, 256, 272, 1040};
#define ANY(a) (a)[next() % (sizeof(a) / sizeof(*(a)))]

/* One product by both backends, whose bits must agree. */
static void gemm_f32_one(uint64_t m, LkType x_type, LkType y_type, WeightsForm f) {
        uint64_t x_ld = f.cols + next() % 2 * 3, y_ld = f.rows + next() % 2 * 5;
        LkType bias_type = (LkType) (LK_F32 + next() % 3);
        bool biased = next() % 2;
        Weights w = weights_new(f);
        Pair x = pair_filled(x_type, m * x_ld, 0), y = pair_new(m * y_ld * lk_type_size(y_type)), bias = pair_filled(bias_type, f.rows, 1);
        LkGemm a = {.m = m, .x = x.host, .x_type = x_type, .x_ld = x_ld, .w = w.host, .y = y.host, .y_type = y_type, .y_ld = y_ld};
        char what[160];

        if (biased)
                a.bias = (LkVector){bias.host + 1, bias_type, f.rows};
        pair_sync(&y);
        assert_int_equal(lk_cpu_ops(LK_CPU_AUTO)->gemm(cpu, &a), 0);
        a.x = x.device;
        a.y = y.device;
        a.w = w.device;
        if (biased)
                a.bias.data = bias.device + 1;
        assert_int_equal(lk_cuda_ops()->gemm(gpu, &a), 0);
        (void) snprintf(what, sizeof(what), "types %d %d %d, %llu x %llu x %llu, rotation %u", x_type, f.type, y_type,
                (unsigned long long) m, (unsigned long long) f.rows, (unsigned long long) f.cols, f.rotation);
        assert_pair_same(&y, what);
        pair_free(&x);
        pair_free(&y);
        pair_free(&bias);
        weights_free(&w);
}

static bool bf16_way(LkType x, LkType y, const WeightsForm *f) {
        return x == LK_BF16 && y == LK_BF16 && f->type != LK_F32 && f->type != LK_F16;
}

static void gemm_f32_same_bits_as_cpu(void **state) {
        static const uint32_t rotations[] = {0, 4, 16};

        need_device();
        for (int i = 0; i < 6; i++)
                for (LkType x = LK_F32; x <= LK_BF16; x++)
                        for (LkType y = LK_F32; y <= LK_BF16; y++)
                                for (LkType t = LK_F32; t < LK_TYPE_MAX; t++) {
                                        WeightsForm f = {.type = t,
                                                .rows = ANY(ns),
                                                .cols = ANY(ks),
                                                .offset = next() % 2 * (1 + next() % 15)};

                                        f.rotation = t == LK_I8 ? ANY(rotations) : 0;
                                        f.in_scale = t >= LK_I8 && next() % 2;
                                        f.one_scale = next() % 2;
                                        if (next() % 4 == 0)
                                                f.block_rows = f.rows % 3 == 0 ? f.rows / 3 : 0;
                                        if (!bf16_way(x, y, &f))
                                                gemm_f32_one(ANY(ms), x, y, f);
                                }
}

/* As many rows as have a kernel of their own. */
static void gemm_f32_many_rows_same_bits_as_cpu(void **state) {
        static const uint64_t rows[] = {8191, 8192, 8193, 8449};

        need_device();
        for (size_t i = 0; i < 3 * sizeof(rows) / sizeof(*rows); i++) {
                const WeightsForm f = {.type = i % 3 == 0 ? LK_F32 : i % 3 == 1 ? LK_F16 : LK_I8,
                        .rows = i % 2 ? 131 : 300,
                        .cols = i % 4 ? 272 : 1040,
                        .in_scale = i % 3 == 2 && i % 2};

                gemm_f32_one(rows[i / 3], i % 2 ? LK_BF16 : LK_F32, LK_F32, f);
        }
}

static void dequantise_same_bits_as_cpu(void **state) {
        static const uint32_t rotations[] = {0, 4, 16, 64, 256};

        need_device();
        for (LkType t = LK_F32; t < LK_TYPE_MAX; t++)
                for (int i = 0; i < 8; i++) {
                        WeightsForm f = {.type = t, .rows = ANY(ns), .cols = i % 2 ? 2304 : ANY(ks), .offset = next() % 4};
                        uint64_t ld = f.cols + next() % 3;
                        Weights w;
                        Pair y = pair_new(f.rows * ld * 4);
                        LkDequantise a = {.y = (float *) (void *) y.host, .y_ld = ld};

                        f.rotation = t == LK_I8 && (f.cols == 2304 || f.cols == 256) ? ANY(rotations) : 0;
                        if (f.rows % 3 == 0)
                                f.block_rows = f.rows / 3;
                        w = weights_new(f);
                        a.w = w.host;
                        pair_sync(&y);
                        assert_int_equal(lk_cpu_ops(LK_CPU_AUTO)->dequantise(cpu, &a), 0);
                        a.w = w.device;
                        a.y = (float *) (void *) y.device;
                        assert_int_equal(lk_cuda_ops()->dequantise(gpu, &a), 0);
                        assert_pair_same(&y, "dequantise");
                        pair_free(&y);
                        weights_free(&w);
                }
}

/* Any byte that rows may begin at, columns behind the last group of eight, views, each kind of scale, parts of a rotation's row. */
static void expand_same_bits_as_cpu(void **state) {
        static const LkType types[] = {LK_I8, LK_F8_E4M3, LK_F8_E5M2, LK_NVFP4};
        static const uint32_t rotations[] = {0, 4, 16, 64, 256};
        static const uint64_t odd[] = {1, 7, 8, 13, 50, 1023, 1043};

        need_device();
        for (size_t t = 0; t < sizeof(types) / sizeof(*types); t++)
                for (int i = 0; i < 24; i++) {
                        WeightsForm f = {.type = types[t], .rows = ANY(ns), .cols = ANY(ks), .offset = next() % 9, .in_scale = i % 2,
                                .one_scale = next() % 2};
                        Weights w;
                        Pair y;
                        LkExpand a;

                        if (i % 3 == 0 && types[t] != LK_NVFP4)
                                f.cols = ANY(odd);
                        else if (i % 3 == 1)
                                f.cols = 2304;
                        f.rotation = types[t] == LK_I8 && f.cols == 2304 ? ANY(rotations) : 0;
                        if (f.rows % 3 == 0 && next() % 2)
                                f.block_rows = f.rows / 3;
                        w = weights_new(f);
                        y = pair_new((f.rows * f.cols + 1) * 2);
                        a = (LkExpand){w.host, (uint16_t *) (void *) y.host};
                        pair_sync(&y);
                        assert_int_equal(lk_cpu_ops(LK_CPU_AUTO)->expand(cpu, &a), 0);
                        a = (LkExpand){w.device, (uint16_t *) (void *) y.device};
                        assert_int_equal(lk_cuda_ops()->expand(gpu, &a), 0);
                        assert_pair_same(&y, "expand");
                        a.y++;
                        assert_int_equal(lk_cuda_ops()->expand(gpu, &a), -EINVAL);
                        pair_free(&y);
                        weights_free(&w);
                }
}

/* Expanded in the product or before it: not one bit. */
static void gemm_bf16_of_expanded_one(WeightsForm f, uint64_t m, bool own) {
        Weights w = weights_new(f);
        Pair x = pair_filled(LK_BF16, m * f.cols, 0), y = pair_new(m * f.rows * 2), wide = pair_new(f.rows * f.cols * 2),
             bias = pair_filled(LK_F32, f.rows, 1);
        LkGemm a = {.m = m, .x = x.device, .x_type = LK_BF16, .x_ld = f.cols, .w = w.device, .y = y.device, .y_type = LK_BF16,
                .y_ld = f.rows};
        const LkExpand e = {w.device, (uint16_t *) (void *) wide.device};
        uint8_t *packed, *got;

        if (next() % 2)
                a.bias = (LkVector){bias.device + 1, LK_F32, f.rows};
        lk_cuda_product_set(gpu, own, 0);
        assert_int_equal(lk_cuda_ops()->gemm(gpu, &a), 0);
        packed = pair_downloaded(&y);
        assert_int_equal(lk_cuda_ops()->expand(gpu, &e), 0);
        a.w = (LkMatrix){.data = wide.device, .type = LK_BF16, .rows = f.rows, .cols = f.cols, .row_stride = f.cols * 2,
                .block_rows = f.rows, .block_stride = f.rows * f.cols * 2};
        assert_int_equal(lk_cuda_ops()->gemm(gpu, &a), 0);
        lk_cuda_product_set(gpu, false, 0);
        got = pair_downloaded(&y);
        assert_memory_equal(got, packed, y.size);
        free(packed);
        free(got);
        pair_free(&x);
        pair_free(&y);
        pair_free(&wide);
        pair_free(&bias);
        weights_free(&w);
}

static void gemm_bf16_of_expanded_same_bits(void **state) {
        static const LkType types[] = {LK_F8_E4M3, LK_NVFP4, LK_F8_E5M2, LK_I8};

        need_device();
        for (int own = 0; own < 2; own++)
                for (size_t i = 0; i < sizeof(types) / sizeof(*types); i++) {
                        gemm_bf16_of_expanded_one((WeightsForm){.type = types[i], .rows = 384, .cols = 1040, .in_scale = i % 2}, 700, own);
                        gemm_bf16_of_expanded_one(
                                (WeightsForm){.type = types[i], .rows = 131, .cols = 272, .offset = 3, .in_scale = own}, 33, own);
                        gemm_bf16_of_expanded_one((WeightsForm){.type = types[i], .rows = 256, .cols = 5376, .block_rows = 64}, 129, own);
                }
}

/* By whom int8 products are made. */
static const struct {
        const char *name;
        bool own;
        uint64_t rows; /* lk_cuda_product_set() */
} i8_ways[] = {{"gemm_i8", false, 0}, {"gemm_i8, library's sums", false, 128}, {"gemm_i8, own", true, 0}};
#define I8_WAYS (sizeof(i8_ways) / sizeof(*i8_ways))

static void gemm_i8_strided(uint64_t m, WeightsForm f, LkType y_type, uint64_t x_ld, uint64_t y_ld) {
        Weights w = weights_new(f);
        Pair x = pair_filled(LK_I8, m * x_ld, 0), y = pair_new(m * y_ld * lk_type_size(y_type)), bias = pair_filled(LK_BF16, f.rows, 1),
             scale = pair_filled(LK_F32, m, 0);
        LkGemmI8 a = {.m = m,
                .x = (const int8_t *) x.host,
                .x_ld = x_ld,
                .x_scale = (const float *) (void *) scale.host,
                .w = w.host,
                .y = y.host,
                .y_type = y_type,
                .y_ld = y_ld};
        bool biased = next() % 2;
        void *zeros = calloc(1, y.size);
        char what[160];

        assert_non_null(zeros);
        if (biased)
                a.bias = (LkVector){bias.host + 1, LK_BF16, f.rows};
        assert_int_equal(lk_cpu_ops(LK_CPU_AUTO)->gemm_i8(cpu, &a), 0);
        a.x = (const int8_t *) x.device;
        a.x_scale = (const float *) (void *) scale.device;
        a.y = y.device;
        a.w = w.device;
        if (biased)
                a.bias.data = bias.device + 1;
        for (size_t i = 0; i < I8_WAYS; i++) {
                assert_int_equal(lk_cuda_ops()->upload(gpu, y.device, zeros, y.size), 0);
                lk_cuda_product_set(gpu, i8_ways[i].own, i8_ways[i].rows);
                assert_int_equal(lk_cuda_ops()->gemm_i8(gpu, &a), 0);
                (void) snprintf(what, sizeof(what), "%s, %llu x %llu x %llu", i8_ways[i].name, (unsigned long long) m,
                        (unsigned long long) f.rows, (unsigned long long) f.cols);
                assert_pair_same(&y, what);
        }
        lk_cuda_product_set(gpu, false, 0);
        free(zeros);
        pair_free(&x);
        pair_free(&y);
        pair_free(&bias);
        pair_free(&scale);
        weights_free(&w);
}

static void gemm_i8_one(uint64_t m, WeightsForm f, LkType y_type, bool odd) {
        gemm_i8_strided(m, f, y_type, f.cols + (odd ? 3 : 0), f.rows + (odd ? 5 : 0));
}

static void gemm_i8_same_bits_as_cpu(void **state) {
        need_device();
        for (LkType y = LK_F32; y <= LK_BF16; y++) {
                for (int i = 0; i < 12; i++)
                        gemm_i8_one(ANY(ms),
                                (WeightsForm){.type = LK_I8, .rows = ANY(ns), .cols = ANY(ks), .offset = next() % 3}, y,
                                next() % 2);
                gemm_i8_one(301, (WeightsForm){.type = LK_I8, .rows = 384, .cols = 1040, .block_rows = 128}, y, false);
                gemm_i8_one(1000, (WeightsForm){.type = LK_I8, .rows = 512, .cols = 5376}, y, false);
        }
}

/* Rows, columns and k around the tiles, stages and copies of the kernels that want everything aligned; gaps behind the rows, which stay as
 * they are. Columns that are no multiple of eight: the copy engine would write into the gap. */
static void gemm_i8_aligned_ends_same_bits_as_cpu(void **state) {
        static const uint64_t m[] = {1, 15, 16, 63, 64, 65, 127, 128, 129, 255, 256, 257, 513, 2305};
        static const uint64_t n[] = {2, 8, 16, 62, 64, 66, 128, 248, 256, 258, 264, 520};
        static const uint64_t k[] = {16, 128, 144, 384, 512, 528, 640, 1040, 1424};

        need_device();
        for (int i = 0; i < 60; i++) {
                const WeightsForm f = {.type = LK_I8, .rows = ANY(n), .cols = ANY(k)};

                gemm_i8_strided(i < 14 ? m[i] : ANY(m), f, LK_BF16, f.cols + next() % 2 * 16, (f.rows + 7) / 8 * 8 + next() % 2 * 8);
        }
        for (int i = 0; i < 4; i++) { /* whole tiles, one a block, as well as the pieces of few */
                const WeightsForm f = {.type = LK_I8, .rows = 1032 - next() % 2 * 8, .cols = ANY(k)};

                gemm_i8_strided(2305, f, LK_BF16, f.cols, f.rows + next() % 2 * 8);
        }
        if (!is_part()) /* several tiles a block */
                gemm_i8_strided(2309, (WeightsForm){.type = LK_I8, .rows = 2072, .cols = 1040}, LK_BF16, 1040, 2080);
}

#define BESIDE 5u

/* Products beside each other, of the same x but for the last, whose rows of y lie in one array. */
static void gemm_i8_beside_one(uint64_t m, uint64_t k, const uint64_t (*n)[BESIDE], bool biased) {
        Weights w[BESIDE];
        LkGemmI8 all[BESIDE];
        uint64_t ld = 0, at = 0;
        Pair x = pair_filled(LK_I8, (m + 1) * k, 0), scale = pair_filled(LK_F32, m + 1, 0), bias, y;

        for (uint32_t i = 0; i < BESIDE; i++)
                ld += (*n)[i];
        bias = pair_filled(LK_F32, ld, 0);
        y = pair_new(m * ld * 2);
        for (uint32_t i = 0; i < BESIDE; at += (*n)[i++]) {
                const bool other = i == BESIDE - 1;

                w[i] = weights_new((WeightsForm){.type = LK_I8, .rows = (*n)[i], .cols = k, .one_scale = biased && i == 2});
                all[i] = (LkGemmI8){.m = m, .x = (const int8_t *) x.host + (other ? k : 0), .x_ld = k,
                        .x_scale = (const float *) (void *) scale.host + other, .w = w[i].host, .y = y.host + at * 2, .y_type = LK_BF16,
                        .y_ld = ld, .beside = other ? NULL : all + i + 1};
                if (biased && i == 1)
                        all[i].bias = (LkVector){bias.host, LK_F32, (*n)[i]};
        }
        assert_int_equal(lk_cpu_ops(LK_CPU_AUTO)->gemm_i8(cpu, all), 0);
        for (uint32_t i = 0; i < BESIDE; i++) {
                all[i].x = (const int8_t *) x.device + ((const uint8_t *) all[i].x - x.host);
                all[i].x_scale = (const float *) (void *) scale.device + (i == BESIDE - 1);
                all[i].y = y.device + ((uint8_t *) all[i].y - y.host);
                all[i].w = w[i].device;
                if (all[i].bias.data)
                        all[i].bias.data = bias.device;
        }
        for (size_t way = 0; way < I8_WAYS; way++) {
                void *zeros = calloc(1, y.size);

                assert_non_null(zeros);
                assert_int_equal(lk_cuda_ops()->upload(gpu, y.device, zeros, y.size), 0);
                free(zeros);
                lk_cuda_product_set(gpu, i8_ways[way].own, i8_ways[way].rows);
                assert_int_equal(lk_cuda_ops()->gemm_i8(gpu, all), 0);
                assert_pair_same(&y, i8_ways[way].name);
        }
        lk_cuda_product_set(gpu, false, 0);
        pair_free(&x);
        pair_free(&y);
        pair_free(&bias);
        pair_free(&scale);
        for (uint32_t i = 0; i < BESIDE; i++)
                weights_free(w + i);
}

/* Some in one launch, some not: a bias, one scale for all, columns that are no multiple of eight, other rows. Tiles of each matrix whole
 * and in pieces, several a block. */
static void gemm_i8_beside_each_other_same_bits_as_cpu(void **state) {
        static const uint64_t n[][BESIDE] = {{256, 264, 8, 512, 128}, {8, 520, 248, 256, 264}, {64, 72, 36, 132, 16},
                {1024, 1032, 1040, 520, 256}};

        need_device();
        for (size_t i = 0; i < (is_part() ? 3 : sizeof(n) / sizeof(*n)); i++)
                for (int biased = 0; biased < 2; biased++) {
                        gemm_i8_beside_one(257, 528, n + i, biased);
                        gemm_i8_beside_one(i == 3 ? 2309 : 130, 144, n + i, biased);
                }
}

/* Scales and bias that are no finite numbers: ops.h has one NaN. */
static void gemm_i8_odd_scales_same_bits_as_cpu(void **state) {
        static const uint32_t odd[] = {0x7f800000, 0xff800000, 0x7fc00001, 0xffc00000, 0x7f7fffff, 0x00000001, 0x80000000, 0};
        const uint64_t m = 200, n = 272, k = 272;
        Weights w;
        Pair x, y, bias, scale;
        LkGemmI8 a;

        need_device();
        w = weights_new((WeightsForm){.type = LK_I8, .rows = n, .cols = k});
        x = pair_filled(LK_I8, m * k, 0);
        y = pair_new(m * n * 2);
        bias = pair_filled(LK_F32, n, 0);
        scale = pair_filled(LK_F32, m, 0);
        for (size_t i = 0; i < sizeof(odd) / sizeof(*odd); i++) {
                memcpy(scale.host + (i * 17 + 3) * 4, odd + i, 4);
                memcpy(w.scale.host + (i * 19 + 5) * 4, odd + i, 4);
                memcpy(bias.host + (i * 23 + 7) * 4, odd + i, 4);
        }
        pair_sync(&scale);
        pair_sync(&w.scale);
        pair_sync(&bias);
        a = (LkGemmI8){.m = m, .x = (const int8_t *) x.host, .x_ld = k, .x_scale = (const float *) (void *) scale.host, .w = w.host,
                .bias = {bias.host, LK_F32, n}, .y = y.host, .y_type = LK_BF16, .y_ld = n};
        assert_int_equal(lk_cpu_ops(LK_CPU_AUTO)->gemm_i8(cpu, &a), 0);
        a.x = (const int8_t *) x.device;
        a.x_scale = (const float *) (void *) scale.device;
        a.w = w.device;
        a.bias.data = bias.device;
        a.y = y.device;
        for (size_t i = 0; i < I8_WAYS; i++) {
                lk_cuda_product_set(gpu, i8_ways[i].own, i8_ways[i].rows);
                assert_int_equal(lk_cuda_ops()->gemm_i8(gpu, &a), 0);
                assert_pair_same(&y, i8_ways[i].name);
        }
        lk_cuda_product_set(gpu, false, 0);
        pair_free(&x);
        pair_free(&y);
        pair_free(&bias);
        pair_free(&scale);
        weights_free(&w);
}

/* Parts of a layer have the bits of the whole: rows at other places of their tiles, columns as ranks have them. */
static void gemm_i8_parts_have_the_bits_of_the_whole(void **state) {
        static const uint64_t rows[][2] = {{0, 1}, {1, 700}, {77, 200}, {128, 513}, {699, 2}};
        static const uint64_t cols[][2] = {{0, 1536}, {0, 128}, {128, 896}, {8, 104}};
        const uint64_t m = 701, n = 1536, k = 5376;
        Weights w;
        Pair x, y, part, scale;
        uint8_t *whole;
        LkGemmI8 a;

        need_device();
        w = weights_new((WeightsForm){.type = LK_I8, .rows = n, .cols = k});
        x = pair_filled(LK_I8, m * k, 0);
        y = pair_new(m * n * 2);
        part = pair_new(m * n * 2);
        scale = pair_filled(LK_F32, m, 0);
        a = (LkGemmI8){.m = m, .x = (const int8_t *) x.device, .x_ld = k, .x_scale = (const float *) (void *) scale.device, .w = w.device,
                .y = y.device, .y_type = LK_BF16, .y_ld = n};
        lk_cuda_product_set(gpu, true, 0);
        assert_int_equal(lk_cuda_ops()->gemm_i8(gpu, &a), 0);
        lk_cuda_product_set(gpu, false, 0);
        whole = pair_downloaded(&y);
        for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++)
                for (size_t j = 0; j < sizeof(cols) / sizeof(*cols); j++) {
                        uint64_t c0 = cols[j][0], c = cols[j][1], r0 = rows[i][0], r = rows[i][1];

                        a.m = r;
                        a.x = (const int8_t *) x.device + r0 * k;
                        a.x_scale = (const float *) (void *) scale.device + r0;
                        a.w = lk_matrix_rows(&w.device, c0, c);
                        a.y = part.device + c0 * 2; /* beside other columns, which stay */
                        memset(part.host, 0, part.size);
                        pair_sync(&part);
                        for (uint64_t l = 0; l < r; l++)
                                memcpy(part.host + (l * n + c0) * 2, whole + ((r0 + l) * n + c0) * 2, c * 2);
                        assert_int_equal(lk_cuda_ops()->gemm_i8(gpu, &a), 0);
                        assert_pair_same(&part, "part of int8");
                }
        free(whole);
        pair_free(&x);
        pair_free(&y);
        pair_free(&part);
        pair_free(&scale);
        weights_free(&w);
}

/* The largest sums that int32 must hold, of one sign. */
static void gemm_i8_extreme_exact(void **state) {
        const uint64_t m = 3, n = 32, k = LK_GEMM_I8_K_MAX / 16 * 16;
        Weights w;
        Pair x, y, scale;
        float *scales;

        need_device();
        w = weights_new((WeightsForm){.type = LK_I8, .rows = n, .cols = k});
        x = pair_new(m * k);
        y = pair_new(m * n * 4);
        scale = pair_new((m > n ? m : n) * 4);
        scales = (float *) (void *) scale.host;
        memset(w.data.host, 0x80, n * k);
        memset(x.host, 0x80, m * k);
        for (uint64_t i = 0; i < n; i++)
                scales[i] = 1;
        pair_sync(&w.data);
        pair_sync(&x);
        pair_sync(&y);
        pair_sync(&scale);
        w.device.quant.scale = scale.device;
        for (size_t way = 0; way < 2 * I8_WAYS; way++) {
                const LkType type = way % 2 ? LK_BF16 : LK_F32;
                const float sum = (float) (k * 128 * 128);
                const LkGemmI8 a = {.m = m,
                        .x = (const int8_t *) x.device,
                        .x_ld = k,
                        .x_scale = (const float *) (void *) scale.device,
                        .w = w.device,
                        .y = y.device,
                        .y_type = type,
                        .y_ld = n};

                memset(y.host, 0, y.size);
                pair_sync(&y);
                lk_cuda_product_set(gpu, i8_ways[way / 2].own, i8_ways[way / 2].rows);
                assert_int_equal(lk_cuda_ops()->gemm_i8(gpu, &a), 0);
                for (uint64_t i = 0; i < m * n; i++)
                        if (type == LK_F32)
                                ((float *) (void *) y.host)[i] = sum;
                        else
                                ((uint16_t *) (void *) y.host)[i] = bf16_of(sum);
                assert_pair_same(&y, "extreme sums");
        }
        lk_cuda_product_set(gpu, false, 0);
        pair_free(&x);
        pair_free(&y);
        pair_free(&scale);
        weights_free(&w);
}

/* A quantised matrix as bf16 has it. */
static void widen(const LkMatrix *w, float *y) {
        uint64_t n = w->rows * w->cols;
        uint16_t *half = malloc(n * sizeof(*half));

        assert_non_null(half);
        assert_int_equal(lk_cpu_ops(LK_CPU_AUTO)->expand(cpu, &(LkExpand){*w, half}), 0);
        for (uint64_t i = 0; i < n; i++)
                y[i] = of_bf16(half[i]);
        free(half);
}

/* bf16 products against f64 of the weights as bf16 has them: at most 1.1 times the error of rounding the exact result once. */
static void gemm_bf16_one(WeightsForm f, uint64_t m, bool own, bool odd) {
        uint64_t x_ld = f.cols + (odd ? 3 : 0), y_ld = f.rows + (odd ? 5 : 0), k = f.cols;
        Weights w = weights_new(f);
        Pair x = pair_filled(LK_BF16, m * x_ld, 0), y = pair_new(m * y_ld * 2), bias = pair_filled(LK_F32, f.rows, 1),
             expanded = pair_new(f.rows * k * 4);
        LkDequantise numbers = {.w = w.host, .y = (float *) (void *) expanded.host, .y_ld = k};
        LkGemm a = {.m = m, .x = x.device, .x_type = LK_BF16, .x_ld = x_ld, .w = w.device, .y = y.device, .y_type = LK_BF16, .y_ld = y_ld};
        bool biased = next() % 2;
        double error = 0, rounding = 0;
        uint8_t *got;

        if (biased)
                a.bias = (LkVector){bias.device + 1, LK_F32, f.rows};
        if (f.type == LK_BF16)
                assert_int_equal(lk_cpu_ops(LK_CPU_AUTO)->dequantise(cpu, &numbers), 0);
        else
                widen(&w.host, numbers.y);
        pair_sync(&y);
        lk_cuda_product_set(gpu, own, 0);
        assert_int_equal(lk_cuda_ops()->gemm(gpu, &a), 0);
        lk_cuda_product_set(gpu, false, 0);
        got = pair_downloaded(&y);
        for (uint64_t i = 0; i < m; i++)
                for (uint64_t j = 0; j < y_ld; j++) {
                        double sum = 0, r;
                        uint16_t h;
                        float b;

                        memcpy(&h, got + (i * y_ld + j) * 2, 2);
                        if (j >= f.rows) {
                                assert_int_equal(h, 0);
                                continue;
                        }
                        for (uint64_t l = 0; l < k; l++)
                                sum += (double) of_bf16(((uint16_t *) (void *) x.host)[i * x_ld + l]) * (double) numbers.y[j * k + l];
                        memcpy(&b, bias.host + 1 + j * 4, 4);
                        sum += biased ? (double) b : 0;
                        r = (double) of_bf16(bf16_of((float) sum));
                        rounding += (r - sum) * (r - sum);
                        error += ((double) of_bf16(h) - sum) * ((double) of_bf16(h) - sum);
                }
        if (!(sqrt(error) <= 1.1 * sqrt(rounding) + 1e-30))
                fail_msg("type %d, %s, %llu x %llu x %llu: error %g, of one rounding %g", f.type,
                        own ? "own" : "library", (unsigned long long) m, (unsigned long long) f.rows,
                        (unsigned long long) k, sqrt(error), sqrt(rounding));
        free(got);
        pair_free(&x);
        pair_free(&y);
        pair_free(&bias);
        pair_free(&expanded);
        weights_free(&w);
}

static void gemm_bf16_error_of_one_rounding(void **state) {
        static const LkType types[] = {LK_BF16, LK_F8_E4M3, LK_F8_E5M2, LK_NVFP4, LK_I8};

        need_device();
        for (int own = 0; own < 2; own++)
                for (size_t i = 0; i < sizeof(types) / sizeof(*types); i++)
                        for (int odd = 0; odd < 3; odd++) {
                                WeightsForm f = {.type = types[i], .rows = odd == 1 ? 131 : 320, .cols = 1040, .offset = odd == 1 ? 2 : 0};

                                if (odd == 2)
                                        f.block_rows = 64;
                                f.in_scale = odd == 2 && types[i] != LK_BF16;
                                gemm_bf16_one(f, odd == 1 ? 97 : 200, own, odd == 1);
                        }
        gemm_bf16_one((WeightsForm){.type = LK_BF16, .rows = 40, .cols = 1043}, 50, false, false); /* k that no library takes */
}

/* Parts of a layer have the bits of the whole. */
static void gemm_parts_one(uint64_t n, uint64_t k, LkType type, bool own) {
        static const uint64_t rows[][2] = {{0, 1}, {1, 700}, {77, 200}, {128, 513}, {699, 2}}, cols[][2] = {{0, 128}, {128, 256}, {8, 104}};
        const uint64_t m = 701;
        Weights w = weights_new((WeightsForm){.type = type, .rows = n, .cols = k});
        Pair x = pair_filled(LK_BF16, m * k, 0), y = pair_new(m * n * 2), part = pair_new(m * n * 2);
        LkGemm a = {.m = m, .x = x.device, .x_type = LK_BF16, .x_ld = k, .w = w.device, .y = y.device, .y_type = LK_BF16, .y_ld = n};
        uint8_t *whole;

        lk_cuda_product_set(gpu, own, 0);
        assert_int_equal(lk_cuda_ops()->gemm(gpu, &a), 0);
        whole = pair_downloaded(&y);
        for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++)
                for (size_t j = 0; j <= sizeof(cols) / sizeof(*cols); j++) {
                        bool all = j == sizeof(cols) / sizeof(*cols);
                        uint64_t c0 = all ? 0 : cols[j][0], c = all ? n : cols[j][1], r0 = rows[i][0], r = rows[i][1];

                        a.m = r;
                        a.x = x.device + r0 * k * 2;
                        a.w = lk_matrix_rows(&w.device, c0, c);
                        a.y = part.device;
                        a.y_ld = c;
                        memset(part.host, 0, part.size);
                        pair_sync(&part);
                        for (uint64_t l = 0; l < r; l++)
                                memcpy(part.host + l * c * 2, whole + ((r0 + l) * n + c0) * 2, c * 2);
                        assert_int_equal(lk_cuda_ops()->gemm(gpu, &a), 0);
                        assert_pair_same(&part, own ? "part, own" : "part, library");
                }
        lk_cuda_product_set(gpu, false, 0);
        free(whole);
        pair_free(&x);
        pair_free(&y);
        pair_free(&part);
        weights_free(&w);
}

static void gemm_parts_have_the_bits_of_the_whole(void **state) {
        need_device();
        for (int own = 0; own < 2; own++) {
                gemm_parts_one(1536, 5376, LK_BF16, own);
                gemm_parts_one(512, 14336, LK_BF16, own);
                gemm_parts_one(384, 7168, LK_F8_E4M3, own);
        }
}

static void gemm_nan_stays_in_its_row(void **state) {
        const uint64_t m = 300, n = 384, k = 1024, row = 150;
        const uint16_t nan = 0x7fc0;
        Weights w;
        Pair x, y;

        need_device();
        w = weights_new((WeightsForm){.type = LK_BF16, .rows = n, .cols = k});
        x = pair_filled(LK_BF16, m * k, 0);
        y = pair_new(m * n * 2);
        for (int own = 0; own < 2; own++) {
                LkGemm a = {.m = m,
                        .x = x.device,
                        .x_type = LK_BF16,
                        .x_ld = k,
                        .w = w.device,
                        .y = y.device,
                        .y_type = LK_BF16,
                        .y_ld = n};
                uint8_t *clean, *got;

                lk_cuda_product_set(gpu, own, 0);
                pair_sync(&x);
                assert_int_equal(lk_cuda_ops()->gemm(gpu, &a), 0);
                clean = pair_downloaded(&y);
                assert_int_equal(lk_cuda_ops()->upload(gpu, x.device + row * k * 2 + 2, &nan, 2), 0);
                assert_int_equal(lk_cuda_ops()->gemm(gpu, &a), 0);
                got = pair_downloaded(&y);
                assert_memory_equal(got, clean, row * n * 2);
                assert_memory_equal(got + (row + 1) * n * 2, clean + (row + 1) * n * 2, (m - row - 1) * n * 2);
                for (uint64_t i = 0; i < n; i++)
                        assert_true(isnan(of_bf16(((uint16_t *) (void *) got)[row * n + i])));
                free(clean);
                free(got);
        }
        lk_cuda_product_set(gpu, false, 0);
        pair_free(&x);
        pair_free(&y);
        weights_free(&w);
}

/* More than 2^31 numbers of x: rows at both ends and around where a launch is cut. */
static void gemm_huge_rows_right(void **state) {
        const uint64_t m = 170000, n = 64, k = 14336, size = m * k * 2;
        const uint64_t tops[] = {0, 149000, 149760, 169990};
        const uint64_t few = 10;
        Weights w;
        Pair rows, y, part;
        void *x;
        int r;

        need_device();
        if (is_part())
                skip();
        r = lk_cuda_ops()->memory_new(gpu, size, &x);
        if (r == -ENOMEM)
                skip();
        assert_int_equal(r, 0);
        w = weights_new((WeightsForm){.type = LK_BF16, .rows = n, .cols = k});
        rows = pair_filled(LK_BF16, few * k, 0);
        y = pair_new(m * n * 2);
        part = pair_new(few * n * 2);
        for (int own = 0; own < 2; own++) {
                LkGemm a = {.m = m, .x = x, .x_type = LK_BF16, .x_ld = k, .w = w.device, .y = y.device, .y_type = LK_BF16, .y_ld = n};
                uint8_t *got, *right;

                lk_cuda_product_set(gpu, own, 0);
                for (size_t i = 0; i < sizeof(tops) / sizeof(*tops); i++)
                        assert_int_equal(lk_cuda_ops()->upload(gpu, (uint8_t *) x + tops[i] * k * 2, rows.host, few * k * 2), 0);
                assert_int_equal(lk_cuda_ops()->gemm(gpu, &a), 0);
                got = pair_downloaded(&y);
                a.m = few;
                a.x = rows.device;
                a.y = part.device;
                assert_int_equal(lk_cuda_ops()->gemm(gpu, &a), 0);
                right = pair_downloaded(&part);
                for (size_t i = 0; i < sizeof(tops) / sizeof(*tops); i++)
                        assert_memory_equal(got + tops[i] * n * 2, right, few * n * 2);
                free(got);
                free(right);
        }
        lk_cuda_product_set(gpu, false, 0);
        lk_cuda_ops()->memory_free(gpu, x);
        pair_free(&rows);
        pair_free(&y);
        pair_free(&part);
        weights_free(&w);
}

/* More than 2^31 numbers of x and of y: rows at both ends and around where 31 bits end. */
static void gemm_i8_huge_rows_right(void **state) {
        const uint64_t m = 150000, n = 14592, k = 14336, few = 10;
        const uint64_t tops[] = {0, 147160, 149790, 149990};
        Weights w;
        Pair rows, part, scale;
        void *x, *y;
        int r;

        need_device();
        if (is_part())
                skip();
        r = lk_cuda_ops()->memory_new(gpu, m * k, &x);
        if (r == -ENOMEM)
                skip();
        assert_int_equal(r, 0);
        r = lk_cuda_ops()->memory_new(gpu, m * n * 2, &y);
        if (r == -ENOMEM) {
                lk_cuda_ops()->memory_free(gpu, x);
                skip();
        }
        assert_int_equal(r, 0);
        w = weights_new((WeightsForm){.type = LK_I8, .rows = n, .cols = k});
        rows = pair_filled(LK_I8, few * k, 0);
        part = pair_new(few * n * 2);
        scale = pair_filled(LK_F32, m, 0);
        for (size_t i = 0; i < sizeof(tops) / sizeof(*tops); i++)
                assert_int_equal(lk_cuda_ops()->upload(gpu, (uint8_t *) x + tops[i] * k, rows.host, few * k), 0);
        for (size_t way = 0; way < I8_WAYS; way++) {
                LkGemmI8 a = {.m = m, .x = x, .x_ld = k, .x_scale = (const float *) (void *) scale.device, .w = w.device, .y = y,
                        .y_type = LK_BF16, .y_ld = n};

                lk_cuda_product_set(gpu, i8_ways[way].own, i8_ways[way].rows ? 8192 : 0);
                assert_int_equal(lk_cuda_ops()->gemm_i8(gpu, &a), 0);
                lk_cuda_product_set(gpu, true, 0);
                for (size_t i = 0; i < sizeof(tops) / sizeof(*tops); i++) {
                        a.m = few;
                        a.x = (const int8_t *) rows.device;
                        a.x_scale = (const float *) (void *) scale.device + tops[i];
                        a.y = part.device;
                        assert_int_equal(lk_cuda_ops()->gemm_i8(gpu, &a), 0);
                        assert_int_equal(lk_cuda_ops()->download(gpu, part.host, (uint8_t *) y + tops[i] * n * 2, few * n * 2), 0);
                        assert_pair_same(&part, i8_ways[way].name);
                }
        }
        lk_cuda_product_set(gpu, false, 0);
        lk_cuda_ops()->memory_free(gpu, x);
        lk_cuda_ops()->memory_free(gpu, y);
        pair_free(&rows);
        pair_free(&part);
        pair_free(&scale);
        weights_free(&w);
}

static void gemm_bad_arguments_refused(void **state) {
        Weights w;
        Pair x;

        need_device();
        w = weights_new((WeightsForm){.type = LK_BF16, .rows = 8, .cols = 16});
        x = pair_filled(LK_BF16, 64, 0);
        LkGemm a = {.m = 2, .x = x.device, .x_type = LK_BF16, .x_ld = 15, .w = w.device, .y = x.device, .y_type = LK_BF16, .y_ld = 8};
        LkGemmI8 b = {.m = 2,
                .x = (const int8_t *) x.device,
                .x_ld = 16,
                .x_scale = (const float *) (void *) x.device,
                .w = w.device,
                .y = x.device,
                .y_type = LK_BF16,
                .y_ld = 8};

        assert_int_equal(lk_cuda_ops()->gemm(gpu, &a), -EINVAL); /* rows overlap */
        a.x_ld = 16;
        a.x_type = LK_F16;
        assert_int_equal(lk_cuda_ops()->gemm(gpu, &a), -EINVAL);
        assert_int_equal(lk_cuda_ops()->gemm_i8(gpu, &b), -EINVAL); /* w is not int8 */
        b.w.type = LK_I8;
        assert_int_equal(lk_cuda_ops()->gemm_i8(gpu, &b), -EINVAL); /* no scale */
        a.x_type = LK_BF16;
        a.m = 0;
        assert_int_equal(lk_cuda_ops()->gemm(gpu, &a), 0);
        pair_free(&x);
        weights_free(&w);
}

/* After all products of this program: the libraries held what is expected of them. */
static void describe_names_libraries(void **state) {
        char text[1024], id[128];

        need_device();
        assert_in_range(lk_cuda_describe(gpu, text, sizeof(text)), 1, sizeof(text) - 1);
        assert_in_range(lk_cuda_numerics_id(gpu, id, sizeof(id)), 1, sizeof(id) - 1);
        print_message("# %s\n%s", id, text);
        assert_non_null(strstr(text, "self-test: nothing"));
        assert_true(strncmp(id, "cuda-", 5) == 0);
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(gemm_f32_same_bits_as_cpu),
                cmocka_unit_test(gemm_f32_many_rows_same_bits_as_cpu),
                cmocka_unit_test(dequantise_same_bits_as_cpu),
                cmocka_unit_test(expand_same_bits_as_cpu),
                cmocka_unit_test(gemm_bf16_of_expanded_same_bits),
                cmocka_unit_test(gemm_i8_same_bits_as_cpu),
                cmocka_unit_test(gemm_i8_aligned_ends_same_bits_as_cpu),
                cmocka_unit_test(gemm_i8_beside_each_other_same_bits_as_cpu),
                cmocka_unit_test(gemm_i8_odd_scales_same_bits_as_cpu),
                cmocka_unit_test(gemm_i8_parts_have_the_bits_of_the_whole),
                cmocka_unit_test(gemm_i8_extreme_exact),
                cmocka_unit_test(gemm_bf16_error_of_one_rounding),
                cmocka_unit_test(gemm_parts_have_the_bits_of_the_whole),
                cmocka_unit_test(gemm_nan_stays_in_its_row),
                cmocka_unit_test(gemm_huge_rows_right),
                cmocka_unit_test(gemm_i8_huge_rows_right),
                cmocka_unit_test(gemm_bad_arguments_refused),
                cmocka_unit_test(describe_names_libraries),
        };

        return cmocka_run_group_tests(tests, backends_setup, backends_teardown);
}
