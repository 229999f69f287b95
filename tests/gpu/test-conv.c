/* SPDX-License-Identifier: Apache-2.0 */

/* The convolutions of the CUDA backend, whose bits are the CPU's: every shape, however it is cut. Needs a CUDA device; without one every
 * test skips. */

#include <errno.h>
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

#define GUARD 64u /* bytes behind y that stay as they are */

#define ANY(a) (a)[next() % (sizeof(a) / sizeof(*(a)))]

/* Finite numbers, some of them 0. f16: magnitudes 2^-15 .. 1, some subnormal. */
static void fill(uint8_t *p, LkType t, uint64_t n) {
        for (uint64_t i = 0; i < n; i++) {
                float f = next() % 40 == 0 ? 0 : (float) (int32_t) next() * 0x1p-31f;
                uint32_t u;
                uint16_t h;

                memcpy(&u, &f, sizeof(u));
                h = t == LK_BF16 ? (uint16_t) (u >> 16) : (uint16_t) (next() & 0xbfffu);
                if (t == LK_F32)
                        memcpy(p + 4 * i, &f, 4);
                else
                        memcpy(p + 2 * i, &h, 2);
        }
}

static Pair pair_filled(LkType t, uint64_t n, uint64_t offset) {
        Pair p = pair_new(n * lk_type_size(t) + offset);

        memset(p.host, 0, offset);
        fill(p.host + offset, t, n);
        pair_sync(&p);
        return p;
}

/* An axis that is not there. */
#define NO_AXIS                                                                                                                       \
        { .size = 1, .kernel = 1, .stride = 1, .dilation = 1 }

typedef struct Form {
        LkConvAxis axis[3];
        uint64_t channels, out;
        LkType w, bias; /* bias 0: none */
        uint64_t offset; /* of weights and bias, bytes */
        uint64_t block_rows, block_gap; /* 0: plain; rows that lie between two blocks */
} Form;

typedef struct Data {
        LkConv host, device;
        Pair x, w, bias, y;
        uint64_t positions;
} Data;

static uint64_t pixels(const Form *f) {
        return f->axis[0].size * f->axis[1].size * f->axis[2].size;
}

static Data data_new(const Form *f) {
        uint64_t cols = f->channels * f->axis[0].kernel * f->axis[1].kernel * f->axis[2].kernel, row = cols * lk_type_size(f->w);
        uint64_t per_block = f->block_rows ? f->block_rows : f->out, rows = f->out / per_block * (per_block + f->block_gap);
        Data d = {.positions = 1};

        for (int i = 0; i < 3; i++)
                d.positions *= lk_conv_size(f->axis + i);
        d.x = pair_filled(LK_F32, pixels(f) * f->channels, 0);
        d.w = pair_filled(f->w, rows * cols, f->offset);
        d.bias = pair_filled(f->bias ? f->bias : LK_F32, f->out, f->offset);
        d.y = pair_new(d.positions * f->out * sizeof(float) + GUARD);
        memset(d.y.host, 0x5a, d.y.size);
        pair_sync(&d.y);

        memcpy(d.host.axis, f->axis, sizeof(f->axis));
        d.host.channels = f->channels;
        d.host.w = (LkMatrix){.type = f->w, .rows = f->out, .cols = cols, .row_stride = row, .block_rows = per_block,
                .block_stride = (per_block + f->block_gap) * row};
        if (f->bias)
                d.host.bias = (LkVector){.data = d.bias.host + f->offset, .type = f->bias, .n = f->out};
        d.device = d.host;
        d.host.x = (const float *) (void *) d.x.host;
        d.host.w.data = d.w.host + f->offset;
        d.host.y = (float *) (void *) d.y.host;
        d.device.x = (const float *) (void *) d.x.device;
        d.device.w.data = d.w.device + f->offset;
        d.device.y = (float *) (void *) d.y.device;
        if (f->bias)
                d.device.bias.data = d.bias.device + f->offset;
        return d;
}

static void data_free(Data *d) {
        pair_free(&d->x);
        pair_free(&d->w);
        pair_free(&d->bias);
        pair_free(&d->y);
}

static const char *words(const Form *f, char *buf, size_t size) {
        int n = snprintf(buf, size, "%llu channels, %llu out, types %d %d, offset %llu;", (unsigned long long) f->channels,
                (unsigned long long) f->out, f->w, f->bias, (unsigned long long) f->offset);

        for (int i = 0; i < 3; i++)
                n += snprintf(buf + n, size - (size_t) n, " %llu+%u+%u kernel %u stride %u dilation %u pad %d;",
                        (unsigned long long) f->axis[i].size, f->axis[i].before, f->axis[i].after, f->axis[i].kernel, f->axis[i].stride,
                        f->axis[i].dilation, f->axis[i].pad);
        return buf;
}

/* Both backends, whose bits must agree. */
static void conv_one(const Form *f) {
        Data d = data_new(f);
        char what[400];

        assert_int_equal(lk_cpu_ops(LK_CPU_AUTO)->conv(cpu, &d.host), 0);
        assert_int_equal(lk_cuda_ops()->conv(gpu, &d.device), 0);
        assert_pair_same(&d.y, words(f, what, sizeof(what)));
        data_free(&d);
}

static LkConvAxis random_axis(uint64_t max, uint32_t kernel) {
        LkConvAxis a = {.size = 1 + next() % max, .kernel = kernel, .stride = next() % 3 ? 1 : 2 + next() % 2};

        a.dilation = next() % 3 ? 1 : 2 + next() % 4;
        a.pad = (LkPad) (next() % LK_PAD_MAX);
        a.before = next() % (a.pad == LK_PAD_REFLECT ? (uint32_t) a.size : 6);
        a.after = next() % (a.pad == LK_PAD_REFLECT ? (uint32_t) a.size : 6);
        while (lk_conv_size(&a) == 0)
                a.size++;
        return a;
}

static void conv_random_same_bits_as_cpu(void **state) {
        static const uint64_t channels[] = {1, 2, 3, 8, 31, 32, 40, 65}, outs[] = {1, 7, 8, 32, 33, 48, 64, 65, 100, 128, 132, 260};
        static const uint32_t kernels[] = {1, 2, 3, 4, 5};

        need_device();
        for (int i = 0; i < (is_part() ? 40 : 250); i++) {
                Form f = {.axis = {NO_AXIS, NO_AXIS, NO_AXIS}, .channels = ANY(channels), .out = ANY(outs)};
                unsigned axes = 1 + next() % 3;

                for (unsigned j = 3 - axes; j < 3; j++)
                        f.axis[j] = random_axis(axes == 1 ? 400 : axes == 2 ? 25 : 9, axes == 1 ? 1 + next() % 12 : ANY(kernels));
                f.w = (LkType) (LK_F32 + next() % 3);
                f.bias = (LkType) (next() % 4);
                f.offset = next() % 2 * (next() % 8);
                if (f.out % 4 == 0 && next() % 4 == 0) {
                        f.block_rows = f.out / 4;
                        f.block_gap = next() % 3;
                }
                conv_one(&f);
        }
}

/* Every form of the kernel, full tiles and cut ones, several blocks for each of a device's processors and fewer. */
static void conv_tiles_same_bits_as_cpu(void **state) {
        static const struct {
                uint64_t channels, out, h, w;
        } cases[] = {{4, 128, 200, 250}, {3, 192, 200, 170}, {5, 256, 150, 170}, {4, 64, 200, 250}, {4, 36, 220, 250}, {4, 32, 130, 170},
                {8, 1, 90, 100}, {9, 512, 16, 16}, {2, 130, 257, 131}};

        need_device();
        for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
                Form f = {.axis = {{1, 3, 1, 1, 2, 0, LK_PAD_ZERO},
                                  {cases[i].h, 3, 1, 1, 1, 1, LK_PAD_REFLECT},
                                  {cases[i].w, 3, 1, 1, 1, 1, LK_PAD_REFLECT}},
                        .channels = cases[i].channels,
                        .out = cases[i].out,
                        .w = (LkType) (LK_F32 + i % 3),
                        .bias = LK_F32};

                conv_one(&f);
        }
}

/* The VAEs' own: a res block's, downsampling, the edge of a sound, a folded transposed convolution, the last one of the sound. */
static void conv_of_models_same_bits_as_cpu(void **state) {
        static const Form forms[] = {
                {.axis = {{5, 3, 1, 1, 2, 0, LK_PAD_ZERO}, {16, 3, 1, 1, 1, 1, LK_PAD_REFLECT}, {16, 3, 1, 1, 1, 1, LK_PAD_REFLECT}},
                        .channels = 512, .out = 256, .w = LK_F16, .bias = LK_F16},
                {.axis = {{17, 3, 2, 1, 2, 0, LK_PAD_ZERO}, {32, 3, 2, 1, 0, 1, LK_PAD_REFLECT}, {34, 3, 2, 1, 0, 1, LK_PAD_REFLECT}},
                        .channels = 128, .out = 128, .w = LK_F32, .bias = LK_F32},
                {.axis = {{3, 3, 1, 1, 2, 0, LK_PAD_ZERO}, {64, 3, 1, 1, 1, 1, LK_PAD_REPLICATE}, {64, 3, 1, 1, 1, 1, LK_PAD_REPLICATE}},
                        .channels = 3, .out = 128, .w = LK_F32, .bias = LK_F32},
                {.axis = {{5, 1, 1, 1, 0, 0, LK_PAD_ZERO}, {16, 1, 1, 1, 0, 0, LK_PAD_REFLECT}, {16, 1, 1, 1, 0, 0, LK_PAD_REFLECT}},
                        .channels = 256, .out = 512, .w = LK_BF16, .bias = LK_BF16},
                {.axis = {NO_AXIS, NO_AXIS, {2300, 11, 1, 5, 25, 0, LK_PAD_ZERO}}, .channels = 64, .out = 64, .w = LK_F32, .bias = LK_F32},
                {.axis = {NO_AXIS, NO_AXIS, {4000, 10, 5, 1, 3, 2, LK_PAD_ZERO}}, .channels = 128, .out = 256, .w = LK_F32, .bias = LK_F32},
                {.axis = {NO_AXIS, NO_AXIS, {405, 7, 1, 1, 3, 3, LK_PAD_ZERO}}, .channels = 2048, .out = 256, .w = LK_F32, .bias = LK_F32},
                {.axis = {NO_AXIS, NO_AXIS, {9000, 2, 1, 1, 1, 1, LK_PAD_ZERO}}, .channels = 32, .out = 32, .w = LK_F32, .bias = LK_F32},
                {.axis = {NO_AXIS, NO_AXIS, {40000, 7, 1, 1, 3, 3, LK_PAD_ZERO}}, .channels = 8, .out = 1, .w = LK_F32},
                {.axis = {NO_AXIS, NO_AXIS, {40000, 7, 1, 1, 3, 3, LK_PAD_ZERO}}, .channels = 1, .out = 64, .w = LK_F32, .bias = LK_F32},
        };

        need_device();
        for (size_t i = 0; i < sizeof(forms) / sizeof(*forms); i++)
                conv_one(forms + i);
}

/* More planes than the scratch memory holds, so that y is cut along each axis; more weights than it holds; and what it cannot hold at all.
 * Large by their padding, so that the CPU has little to do. */
static void conv_beyond_scratch_same_bits_as_cpu(void **state) {
        const LkConvAxis none = NO_AXIS;
        Form f = {.channels = 128, .out = 5, .w = LK_F32, .bias = LK_F32};

        need_device();
        if (is_part())
                skip();
        f.axis[0] = f.axis[1] = none;
        f.axis[2] = (LkConvAxis){.size = 1000, .kernel = 3, .stride = 1, .dilation = 1, .before = 600001, .after = 600000};
        conv_one(&f);

        f.axis[1] = (LkConvAxis){.size = 3, .kernel = 2, .stride = 1, .dilation = 1, .before = 13, .after = 14};
        f.axis[2] = (LkConvAxis){40, 1, 1, 1, 29000, 21000, LK_PAD_REPLICATE};
        conv_one(&f);

        f.channels = 256;
        f.axis[0] = (LkConvAxis){.size = 3, .kernel = 3, .stride = 1, .dilation = 1, .before = 60};
        f.axis[1] = f.axis[2] = (LkConvAxis){98, 1, 1, 1, 1, 1, LK_PAD_REFLECT};
        conv_one(&f);

        /* Blocks of the weights that lie on one another. */
        f.channels = 1024;
        f.out = 4096;
        f.w = LK_F16;
        f.axis[0] = none;
        f.axis[1] = f.axis[2] = (LkConvAxis){.size = 3, .kernel = 5, .stride = 1, .dilation = 1, .before = 2, .after = 1};
        f.block_rows = 32;
        f.block_gap = 0;
        Data d = data_new(&(Form){.axis = {f.axis[0], f.axis[1], f.axis[2]}, .channels = 1024, .out = 32, .w = LK_F16});
        Pair y = pair_new(d.positions * f.out * sizeof(float));

        d.host.w.rows = d.device.w.rows = f.out;
        d.host.w.block_stride = d.device.w.block_stride = 0;
        d.host.y = (float *) (void *) y.host;
        d.device.y = (float *) (void *) y.device;
        assert_int_equal(lk_cpu_ops(LK_CPU_AUTO)->conv(cpu, &d.host), 0);
        assert_int_equal(lk_cuda_ops()->conv(gpu, &d.device), 0);
        assert_pair_same(&y, "more weights than the scratch memory holds");
        pair_free(&y);
        data_free(&d);

        f = (Form){.axis = {NO_AXIS, NO_AXIS, {.size = 50, .kernel = 2, .stride = 1, .dilation = 1u << 30, .before = 1u << 30, .after = 3}},
                .channels = 7, .out = 9, .w = LK_BF16, .bias = LK_F16, .offset = 3};
        conv_one(&f);
        f.axis[2] = (LkConvAxis){.size = 50, .kernel = 3, .stride = 5, .dilation = 1u << 30, .before = 1u << 30, .after = 1u << 30,
                .pad = LK_PAD_REPLICATE};
        conv_one(&f);
}

/* Frames alone, and pieces of a sound alone, as the VAEs' callers cut them. */
static void conv_parts_have_the_bits_of_the_whole(void **state) {
        const Form video = {
                .axis = {{7, 3, 1, 1, 2, 0, LK_PAD_ZERO}, {65, 3, 1, 1, 1, 1, LK_PAD_REFLECT}, {120, 3, 1, 1, 1, 1, LK_PAD_REFLECT}},
                .channels = 64, .out = 128, .w = LK_F32, .bias = LK_F32};
        const Form sound = {.axis = {NO_AXIS, NO_AXIS, {50000, 7, 1, 3, 9, 9, LK_PAD_ZERO}},
                .channels = 32, .out = 64, .w = LK_F32, .bias = LK_F32};
        uint64_t row;
        Data d;

        need_device();
        d = data_new(&video);
        row = d.positions / 7 * video.out;
        assert_int_equal(lk_cuda_ops()->conv(gpu, &d.device), 0);
        assert_int_equal(lk_cuda_ops()->download(gpu, d.y.host, d.y.device, d.y.size), 0);
        pair_sync(&d.y);
        for (uint64_t t = 0, n; t < 7; t += n) {
                uint64_t from = t < 2 ? 0 : t - 2;
                LkConv part = d.device;

                n = t == 0 ? 1 : t == 1 ? 2 : 4;
                part.axis[0].size = t + n - from;
                part.axis[0].before = (uint32_t) (2 - (t - from));
                part.x += from * 65 * 120 * video.channels;
                part.y += t * row;
                assert_int_equal(lk_conv_size(part.axis), n);
                assert_int_equal(lk_cuda_ops()->conv(gpu, &part), 0);
        }
        assert_pair_same(&d.y, "frames");
        data_free(&d);

        d = data_new(&sound);
        assert_int_equal(lk_cuda_ops()->conv(gpu, &d.device), 0);
        assert_int_equal(lk_cuda_ops()->download(gpu, d.y.host, d.y.device, d.y.size), 0);
        for (uint64_t at = 0, n; at < 50000; at += n) {
                uint64_t from = at < 9 ? 0 : at - 9, to;
                LkConv part = d.device;

                n = 1 + next() % 9000;
                n = n < 50000 - at ? n : 50000 - at;
                to = at + n + 9 < 50000 ? at + n + 9 : 50000;
                part.axis[2].size = to - from;
                part.axis[2].before = (uint32_t) (9 - (at - from));
                part.axis[2].after = (uint32_t) (9 - (to - at - n));
                part.x += from * sound.channels;
                part.y += at * sound.out;
                assert_int_equal(lk_cuda_ops()->conv(gpu, &part), 0);
        }
        assert_pair_same(&d.y, "pieces of a sound");
        data_free(&d);
}

/* Products that vanish below zero: the sum is -0, and a product that nobody asked for would make it +0. */
static void conv_vanishing_sums_keep_sign(void **state) {
        Form f = {.axis = {NO_AXIS, NO_AXIS, {300, 9, 1, 1, 0, 0, LK_PAD_ZERO}}, .channels = 1, .out = 3, .w = LK_F32};
        const float tiny = 1e-30f, minus = -1e-30f;
        uint32_t bits;
        Data d;

        need_device();
        d = data_new(&f);
        for (uint64_t i = 0; i < 300; i++)
                memcpy(d.x.host + 4 * i, &minus, 4);
        for (uint64_t i = 0; i < 27; i++)
                memcpy(d.w.host + 4 * i, &tiny, 4);
        pair_sync(&d.x);
        pair_sync(&d.w);
        assert_int_equal(lk_cpu_ops(LK_CPU_AUTO)->conv(cpu, &d.host), 0);
        assert_int_equal(lk_cuda_ops()->conv(gpu, &d.device), 0);
        memcpy(&bits, d.y.host, sizeof(bits));
        assert_int_equal(bits, 0x80000000u);
        assert_pair_same(&d.y, "vanishing sums");
        data_free(&d);
}

/* Whatever is no number changes the positions under which it lies, no other. */
static void conv_nan_stays_in_its_positions(void **state) {
        const Form f = {.axis = {NO_AXIS, NO_AXIS, {1000, 5, 1, 1, 2, 2, LK_PAD_ZERO}},
                .channels = 40, .out = 70, .w = LK_F32, .bias = LK_F32};
        const uint32_t nan = 0x7fc00000u;
        uint8_t *got;
        Data d;

        need_device();
        d = data_new(&f);
        got = malloc(d.y.size);
        assert_non_null(got);
        assert_int_equal(lk_cuda_ops()->conv(gpu, &d.device), 0);
        assert_int_equal(lk_cuda_ops()->download(gpu, d.y.host, d.y.device, d.y.size), 0);
        memcpy(d.x.host + (500 * f.channels + 3) * 4, &nan, 4);
        pair_sync(&d.x);
        assert_int_equal(lk_cuda_ops()->conv(gpu, &d.device), 0);
        assert_int_equal(lk_cuda_ops()->download(gpu, got, d.y.device, d.y.size), 0);
        for (uint64_t i = 0; i < 1000 * f.out; i++) {
                bool under = i / f.out >= 498 && i / f.out <= 502;
                float v;

                memcpy(&v, got + 4 * i, 4);
                if (under)
                        assert_true(v != v);
                else
                        assert_memory_equal(got + 4 * i, d.y.host + 4 * i, 4);
        }
        free(got);
        data_free(&d);
}

static void conv_bad_arguments_refused(void **state) {
        const Form f = {.axis = {{4, 3, 1, 1, 2, 0, LK_PAD_ZERO}, {8, 3, 1, 1, 1, 1, LK_PAD_REFLECT}, {8, 3, 1, 1, 1, 1, LK_PAD_REFLECT}},
                .channels = 8, .out = 8, .w = LK_F32, .bias = LK_F32};
        const LkOps *ops = lk_cuda_ops();
        LkConv a;
        Data d;

        need_device();
        d = data_new(&f);
#define REFUSED(change)                                                                                                               \
        do {                                                                                                                          \
                a = d.device;                                                                                                         \
                change;                                                                                                               \
                assert_int_equal(ops->conv(gpu, &a), -EINVAL);                                                                        \
        } while (0)
        REFUSED(a.channels = 0);
        REFUSED(a.channels = 9);
        REFUSED(a.axis[1].kernel = 0);
        REFUSED(a.axis[1].stride = 0);
        REFUSED(a.axis[1].dilation = 0);
        REFUSED(a.axis[1].dilation = 5);
        REFUSED(a.axis[1].before = 8);
        REFUSED(a.axis[0].size = 0);
        REFUSED(a.axis[0].pad = LK_PAD_MAX);
        REFUSED(a.x = NULL);
        REFUSED(a.y = NULL);
        REFUSED(a.w.data = NULL);
        REFUSED(a.w.type = LK_I8);
        REFUSED(a.w.cols = 215);
        REFUSED(a.bias.n = 7);
#undef REFUSED
        assert_int_equal(ops->conv(NULL, &d.device), -EINVAL);
        assert_int_equal(ops->conv(gpu, NULL), -EINVAL);
        assert_pair_same(&d.y, "refused");

        a = d.device;
        a.w.rows = 0;
        a.bias = (LkVector){};
        assert_int_equal(ops->conv(gpu, &a), 0);
        assert_pair_same(&d.y, "no columns");
        data_free(&d);
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(conv_random_same_bits_as_cpu),
                cmocka_unit_test(conv_tiles_same_bits_as_cpu),
                cmocka_unit_test(conv_of_models_same_bits_as_cpu),
                cmocka_unit_test(conv_beyond_scratch_same_bits_as_cpu),
                cmocka_unit_test(conv_parts_have_the_bits_of_the_whole),
                cmocka_unit_test(conv_vanishing_sums_keep_sign),
                cmocka_unit_test(conv_nan_stays_in_its_positions),
                cmocka_unit_test(conv_bad_arguments_refused),
        };

        return cmocka_run_group_tests(tests, backends_setup, backends_teardown);
}
