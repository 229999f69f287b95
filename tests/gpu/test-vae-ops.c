/* SPDX-License-Identifier: Apache-2.0 */

/* The passes of the VAEs on the CUDA backend against their CPU twins: the same bits, for odd sizes, weights of every type at any byte, in
 * place, and of parts as of the whole. Needs a CUDA device; without one every test skips. */

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "kernels/cpu/cpu.h"
#include "kernels/cuda/cuda.h"
#include "tests/gpu/backends.h"

static const LkOps *host, *device;
/* Bell-shaped, `size` wide. */
static float number(float size) {
        float f = 0;

        for (int j = 0; j < 4; j++)
                f += (float) (next() >> 8) * 0x1p-24f - 0.5f;
        return f * size;
}

/* The same numbers on both sides, and room for a result of each. */
typedef struct Pair {
        float *host, *device, *got;
        uint64_t n;
} Pair;

static Pair pair_new(uint64_t n, float size) {
        Pair p = {.n = n};
        void *memory;

        p.host = malloc((n + 1) * sizeof(float));
        p.got = malloc((n + 1) * sizeof(float));
        assert_true(p.host && p.got);
        for (uint64_t i = 0; i < n; i++)
                p.host[i] = next() % 64 == 0 ? 0 : number(size);
        assert_int_equal(device->memory_new(gpu, (n + 1) * sizeof(float), &memory), 0);
        p.device = memory;
        assert_int_equal(device->upload(gpu, p.device, p.host, n * sizeof(float)), 0);
        return p;
}

static void pair_free(Pair *p) {
        device->memory_free(gpu, p->device);
        free(p->host);
        free(p->got);
}

static void assert_pair_same(const Pair *p, const char *what) {
        assert_int_equal(device->download(gpu, p->got, p->device, p->n * sizeof(float)), 0);
        for (uint64_t i = 0; i < p->n; i++)
                if (memcmp(p->got + i, p->host + i, sizeof(float)) != 0)
                        fail_msg("%s: number %llu of %llu is %.9g, expected %.9g", what, (unsigned long long) i,
                                (unsigned long long) p->n, (double) p->got[i], (double) p->host[i]);
}

/* n numbers of a type, `shift` bytes behind an aligned address. */
typedef struct Weights {
        uint8_t *bytes;
        void *memory;
        LkVector on_host, on_device;
} Weights;

static Weights weights_new(LkType type, uint64_t n, float size) {
        uint64_t bytes = n * lk_type_size(type), shift = next() % 4;
        Weights w = {.bytes = calloc(1, bytes + 8)};

        assert_non_null(w.bytes);
        for (uint64_t i = 0; i < n; i++) {
                float f = number(size);
                uint32_t u;
                uint16_t h;

                memcpy(&u, &f, 4);
                h = (uint16_t) (u >> 16);
                if (type == LK_F16) /* 2^-3 to 2^0 */
                        h = (uint16_t) (0x3000 + next() % 0x0c00 + (next() % 2) * 0x8000);
                memcpy(w.bytes + shift + i * lk_type_size(type), type == LK_F32 ? (void *) &f : (void *) &h, lk_type_size(type));
        }
        assert_int_equal(device->memory_new(gpu, bytes + 8, &w.memory), 0);
        assert_int_equal(device->upload(gpu, w.memory, w.bytes, bytes + 8), 0);
        w.on_host = (LkVector){w.bytes + shift, type, n};
        w.on_device = (LkVector){(uint8_t *) w.memory + shift, type, n};
        return w;
}

static void weights_free(Weights *w) {
        device->memory_free(gpu, w->memory);
        free(w->bytes);
}

static LkType some_type(void) {
        return (LkType) (LK_F32 + next() % 3);
}

static void norm_one(uint64_t frames, uint64_t pixels, uint64_t channels, uint32_t groups, bool silu, bool in_place) {
        uint64_t n = frames * pixels * channels;
        Pair x = pair_new(n, 3), y = pair_new(n, 1);
        Weights weight = weights_new(some_type(), channels, 2), bias = weights_new(some_type(), channels, 1);
        LkGroupNorm a = {.frames = frames, .pixels = pixels, .channels = channels, .groups = groups, .x = x.host, .weight = weight.on_host,
                .bias = bias.on_host, .eps = 1e-6f, .silu = silu, .y = in_place ? x.host : y.host};

        assert_int_equal(host->group_norm(cpu, &a), 0);
        a.x = x.device;
        a.y = in_place ? x.device : y.device;
        a.weight = weight.on_device;
        a.bias = bias.on_device;
        assert_int_equal(device->group_norm(gpu, &a), 0);
        assert_pair_same(&x, "group norm's x");
        assert_pair_same(&y, "group norm");
        pair_free(&x);
        pair_free(&y);
        weights_free(&weight);
        weights_free(&bias);
}

static void group_norm_same_bits(void **state) {
        static const uint64_t pixels[] = {1, 2, 255, 256, 257, 1000};
        static const uint32_t widths[][2] = {{32, 32}, {64, 32}, {96, 32}, {8, 4}, {5, 1}, {130, 2}, {512, 32}};

        need_device();
        for (size_t i = 0; i < sizeof(pixels) / sizeof(*pixels); i++)
                for (size_t j = 0; j < sizeof(widths) / sizeof(*widths); j++)
                        for (unsigned form = 0; form < 4; form++)
                                norm_one(1 + next() % 3, pixels[i], widths[j][0], widths[j][1], form & 1, form & 2);
        norm_one(5, 64 * 64, 128, 32, true, false); /* a level of a small tile */
}

/* A frame's numbers are its own. */
static void group_norm_of_a_frame_is_the_films(void **state) {
        enum { FRAMES = 3, PIXELS = 300, CHANNELS = 64 };
        const uint64_t one = PIXELS * CHANNELS;

        need_device();
        Pair x = pair_new(FRAMES * one, 3), y = pair_new(FRAMES * one, 1), z = pair_new(one, 1);
        Weights weight = weights_new(LK_F16, CHANNELS, 1), bias = weights_new(LK_F32, CHANNELS, 1);
        LkGroupNorm a = {.frames = FRAMES, .pixels = PIXELS, .channels = CHANNELS, .groups = 32, .x = x.device, .weight = weight.on_device,
                .bias = bias.on_device, .eps = 1e-6f, .y = y.device};

        assert_int_equal(device->group_norm(gpu, &a), 0);
        assert_int_equal(device->download(gpu, y.got, y.device, y.n * sizeof(float)), 0);
        for (uint64_t i = 0; i < FRAMES; i++) {
                a.frames = 1;
                a.x = x.device + i * one;
                a.y = z.device;
                assert_int_equal(device->group_norm(gpu, &a), 0);
                assert_int_equal(device->download(gpu, z.got, z.device, one * sizeof(float)), 0);
                assert_memory_equal(z.got, y.got + i * one, one * sizeof(float));
        }
        pair_free(&x);
        pair_free(&y);
        pair_free(&z);
        weights_free(&weight);
        weights_free(&bias);
}

static void snake_one(uint64_t m, uint64_t channels, float size, bool exponents, bool with_beta, bool in_place) {
        Pair x = pair_new(m * channels, size), y = pair_new(m * channels, 1);
        Weights alpha = weights_new(some_type(), channels, 2), beta = weights_new(some_type(), channels, 2);
        LkSnake a = {.m = m, .channels = channels, .x = x.host, .alpha = alpha.on_host, .exponents = exponents,
                .y = in_place ? x.host : y.host};

        if (with_beta)
                a.beta = beta.on_host;
        assert_int_equal(host->snake(cpu, &a), 0);
        a.x = x.device;
        a.y = in_place ? x.device : y.device;
        a.alpha = alpha.on_device;
        if (with_beta)
                a.beta = beta.on_device;
        assert_int_equal(device->snake(gpu, &a), 0);
        assert_pair_same(&x, "snake's x");
        assert_pair_same(&y, "snake");
        pair_free(&x);
        pair_free(&y);
        weights_free(&alpha);
        weights_free(&beta);
}

/* Also far beyond LK_SIN2_MAX. */
static void snake_same_bits(void **state) {
        static const uint64_t rows[] = {1, 3, 257, 4099}, widths[] = {1, 7, 48, 128, 1536};
        static const float sizes[] = {1, 50, 1e5f, 1e9f};

        need_device();
        for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++)
                for (size_t j = 0; j < sizeof(widths) / sizeof(*widths); j++)
                        for (unsigned form = 0; form < 8 && rows[i] * widths[j] < 1000000; form++)
                                snake_one(rows[i], widths[j], sizes[next() % 4], form & 1, form & 2, form & 4);
        snake_one(4099, 1536, 4, true, true, true);
}

static void alias_free_one(uint64_t rows, uint64_t channels, uint64_t first, uint64_t m) {
        Pair x = pair_new(rows * channels, 2), y = pair_new(m * channels, 1);
        Weights alpha = weights_new(some_type(), channels, 2), beta = weights_new(some_type(), channels, 2);
        Weights up = weights_new(some_type(), LK_ALIAS_FREE_TAPS, 1), down = weights_new(some_type(), LK_ALIAS_FREE_TAPS, 1);
        LkAliasFree a = {.rows = rows, .channels = channels, .first = first, .m = m, .x = x.host, .alpha = alpha.on_host,
                .beta = beta.on_host, .up = up.on_host, .down = down.on_host, .y = y.host};

        assert_int_equal(host->alias_free(cpu, &a), 0);
        a.x = x.device;
        a.y = y.device;
        a.alpha = alpha.on_device;
        a.beta = beta.on_device;
        a.up = up.on_device;
        a.down = down.on_device;
        assert_int_equal(device->alias_free(gpu, &a), 0);
        assert_pair_same(&x, "alias_free's x");
        assert_pair_same(&y, "alias_free");
        pair_free(&x);
        pair_free(&y);
        weights_free(&alpha);
        weights_free(&beta);
        weights_free(&up);
        weights_free(&down);
}

static void alias_free_same_bits(void **state) {
        static const uint64_t rows[] = {1, 2, 3, 5, 6, 63, 64, 65, 70, 300}, widths[] = {1, 3, 12, 24, 32, 33, 96};

        need_device();
        for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++)
                for (size_t j = 0; j < sizeof(widths) / sizeof(*widths); j++) {
                        uint64_t first = next() % rows[i];

                        alias_free_one(rows[i], widths[j], 0, rows[i]);
                        alias_free_one(rows[i], widths[j], first, 1 + next() % (rows[i] - first));
                }
        alias_free_one(20011, 48, 0, 20011);
}

static void average_same_bits(void **state) {
        static const uint64_t sizes[] = {1, 255, 257, 100003};

        need_device();
        for (size_t i = 0; i < sizeof(sizes) / sizeof(*sizes); i++)
                for (uint32_t count = 1; count <= LK_AVERAGE_MAX; count++)
                        for (unsigned in_place = 0; in_place < 2; in_place++) {
                                Pair x[LK_AVERAGE_MAX], y = pair_new(sizes[i], 1);
                                LkAverage a = {.n = sizes[i], .count = count};

                                for (uint32_t k = 0; k < count; k++) {
                                        x[k] = pair_new(sizes[i], 3);
                                        a.x[k] = x[k].host;
                                }
                                a.y = in_place ? x[count - 1].host : y.host;
                                assert_int_equal(host->average(cpu, &a), 0);
                                for (uint32_t k = 0; k < count; k++)
                                        a.x[k] = x[k].device;
                                a.y = in_place ? x[count - 1].device : y.device;
                                assert_int_equal(device->average(gpu, &a), 0);
                                assert_pair_same(&y, "average");
                                for (uint32_t k = 0; k < count; k++) {
                                        assert_pair_same(x + k, "average's x");
                                        pair_free(x + k);
                                }
                                pair_free(&y);
                        }
}

/* What the CPU refuses, and nothing for nothing. */
static void passes_refuse_what_breaks_the_contract(void **state) {
        need_device();
        Pair x = pair_new(64, 1);
        Weights w = weights_new(LK_F32, 8, 1);
        LkGroupNorm norm = {.frames = 1, .pixels = 8, .channels = 8, .groups = 3, .x = x.device, .weight = w.on_device, .bias = w.on_device,
                .y = x.device};
        LkSnake snake = {.m = 8, .channels = 9, .x = x.device, .alpha = w.on_device, .y = x.device};
        LkAliasFree free_of = {.rows = 8, .channels = 8, .first = 4, .m = 5, .x = x.device, .alpha = w.on_device, .beta = w.on_device,
                .up = {w.on_device.data, LK_F32, LK_ALIAS_FREE_TAPS}, .down = {w.on_device.data, LK_F32, LK_ALIAS_FREE_TAPS},
                .y = x.device};
        LkAverage average = {.n = 8, .count = LK_AVERAGE_MAX + 1, .x = {x.device, x.device, x.device, x.device}, .y = x.device};

        assert_int_equal(device->group_norm(gpu, &norm), -EINVAL);
        norm.groups = 4;
        norm.frames = 0;
        assert_int_equal(device->group_norm(gpu, &norm), 0);
        assert_int_equal(device->snake(gpu, &snake), -EINVAL);
        snake.channels = 8;
        snake.m = 0;
        assert_int_equal(device->snake(gpu, &snake), 0);
        assert_int_equal(device->alias_free(gpu, &free_of), -EINVAL);
        free_of.m = 0;
        assert_int_equal(device->alias_free(gpu, &free_of), 0);
        assert_int_equal(device->average(gpu, &average), -EINVAL);
        average.count = 1;
        average.n = 0;
        assert_int_equal(device->average(gpu, &average), 0);
        pair_free(&x);
        weights_free(&w);
}

static int setup(void **state) {
        host = lk_cpu_ops(LK_CPU_AUTO);
        device = lk_cuda_ops();
        seed = 7;
        return backends_setup(state);
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(group_norm_same_bits),
                cmocka_unit_test(group_norm_of_a_frame_is_the_films),
                cmocka_unit_test(snake_same_bits),
                cmocka_unit_test(alias_free_same_bits),
                cmocka_unit_test(average_same_bits),
                cmocka_unit_test(passes_refuse_what_breaks_the_contract),
        };

        return cmocka_run_group_tests(tests, setup, backends_teardown);
}
