/* SPDX-License-Identifier: Apache-2.0 */

/* What a process found of the library's algorithms, told to another one: the same bits without a trial, and a trial where it does not
 * fit. Each process is a child, since what it knows stays with it. What needs a CUDA device skips without one. */

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/warm.h"

#define PINS_MAX 16u
#define ARCH 90
#define ROWS UINT64_C(1536)
#define K UINT64_C(1024)
#define M UINT64_C(2500) /* few rows, and more */
#define FEW UINT64_C(300)
#define PRODUCTS 3u

typedef struct Told {
        LkCudaPin pins[PINS_MAX];
        unsigned n, taken, known, tried, beside; /* beside: known before the first product */
        char why[256];
        uint8_t y[PRODUCTS][(M + FEW) * ROWS * 2];
} Told;

static Told *first, *second; /* shared with children */

static void *shared(size_t size) {
        void *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

        assert_ptr_not_equal(p, MAP_FAILED);
        return p;
}

static int setup(void **state) {
        first = shared(sizeof(*first));
        second = shared(sizeof(*second));
        return 0;
}

static Told *child; /* whose turn it is */
static bool awaits; /* what is asked about beside it, before the first product */

static void on_layer(bool known, uint64_t usec) {
        *(known ? &child->known : &child->tried) += 1;
}

static void must(bool holds, int line) {
        if (!holds) {
                (void) fprintf(stderr, "test-pins.c:%d\n", line);
                _exit(1);
        }
}
#define MUST(x) must((x), __LINE__)

static void *device_numbers(LkContext *c, uint64_t n, bool f16) {
        uint16_t *host = malloc(n * sizeof(*host));
        uint32_t seed = 42;
        void *p;

        MUST(host && lk_cuda_ops()->memory_new(c, n * sizeof(*host), &p) == 0);
        for (uint64_t i = 0; i < n; i++) {
                seed = seed * 1664525 + 1013904223;
                host[i] = (uint16_t) ((f16 ? 0x3000 : 0x3d00) + (seed >> 22) + (seed >> 31 << 15)); /* about 0.1 */
        }
        MUST(lk_cuda_ops()->upload(c, p, host, n * sizeof(*host)) == 0);
        free(host);
        return p;
}

/* In bf16 without and with a bias, and in f16 with one: three layers. */
static void products(LkContext *c, Told *ret) {
        for (unsigned i = 0; i < PRODUCTS; i++) {
                const LkType type = i == 2 ? LK_F16 : LK_BF16;
                void *x = device_numbers(c, M * K, i == 2), *w = device_numbers(c, ROWS * K, i == 2);
                void *y = device_numbers(c, M * ROWS, i == 2);
                LkGemm g = {
                        .m = M, .x = x, .x_type = type, .x_ld = K, .y = y, .y_type = type, .y_ld = ROWS,
                        .w = {.data = w, .type = type, .rows = ROWS, .cols = K, .row_stride = 2 * K, .block_rows = ROWS,
                                .block_stride = 2 * K * ROWS},
                        .bias = i > 0 ? (LkVector){w, type, ROWS} : (LkVector){},
                };

                MUST(lk_cuda_ops()->gemm(c, &g) == 0 && lk_cuda_ops()->download(c, ret->y[i], y, M * ROWS * 2) == 0);
                g.m = FEW;
                MUST(lk_cuda_ops()->gemm(c, &g) == 0 && lk_cuda_ops()->download(c, ret->y[i] + M * ROWS * 2, y, FEW * ROWS * 2) == 0);
        }
}

static int arch_of_device(void) {
        LkContext *c;
        char text[128];
        int r = lk_cuda_ops()->context_new(0, &c), arch = 0;

        if (r == -ENODEV)
                _exit(77);
        MUST(r == 0);
        MUST(lk_cuda_numerics_id(c, text, sizeof(text)) > 0 && strstr(text, "-sm") && sscanf(strstr(text, "-sm"), "-sm%d", &arch) == 1);
        (void) lk_cuda_ops()->context_free(c);
        return arch;
}

/* Told what `from` knows (NULL: nothing). */
static void work(const Told *from, Told *ret) {
        int arch = arch_of_device();
        LkContext *c;

        child = ret;
        lk_cuda_on_layer = on_layer;
        if (from)
                ret->taken = lk_cuda_pins_take(arch, from->pins, from->n, ret->why, sizeof(ret->why));
        if (from)
                lk_cuda_warm_told(NULL);
        if (awaits)
                lk_cuda_warm_await();
        ret->beside = awaits ? ret->known : 0;
        lk_cuda_warm(NULL);
        MUST(lk_cuda_ops()->context_new(0, &c) == 0);
        products(c, ret);
        ret->n = lk_cuda_pins(arch, ret->pins, PINS_MAX);
        lk_cuda_warm_await();
        (void) lk_cuda_ops()->context_free(c);
}

static void in_a_child(const Told *from, Told *ret) {
        int status;
        pid_t pid;

        memset(ret, 0, sizeof(*ret));
        pid = fork();
        assert_true(pid >= 0);
        if (pid == 0) {
                work(from, ret);
                _exit(0);
        }
        assert_int_equal(waitpid(pid, &status, 0), pid);
        if (WIFEXITED(status) && WEXITSTATUS(status) == 77)
                skip();
        assert_int_equal(status, 0);
}

static void assert_same_products(void) {
        assert_memory_equal(first->y, second->y, sizeof(first->y));
}

static void what_is_told_is_not_tried_and_has_the_same_bits(void **state) {
        in_a_child(NULL, first);
        assert_int_equal(first->known, 0);
        assert_int_equal(first->tried, PRODUCTS);
        assert_int_equal(first->n, PRODUCTS);
        in_a_child(first, second);
        assert_string_equal(second->why, "");
        assert_int_equal(second->taken, PRODUCTS);
        assert_int_equal(second->known, PRODUCTS);
        assert_int_equal(second->tried, 0);
        assert_int_equal(second->n, PRODUCTS);
        assert_memory_equal(first->pins, second->pins, sizeof(first->pins)); /* in the same order */
        assert_same_products();
}

static void what_is_told_is_asked_about_beside_the_start(void **state) {
        in_a_child(NULL, first);
        awaits = true;
        in_a_child(first, second);
        awaits = false;
        assert_int_equal(second->beside, PRODUCTS);
        assert_int_equal(second->known, PRODUCTS); /* not again */
        assert_int_equal(second->tried, 0);
        assert_memory_equal(first->pins, second->pins, sizeof(first->pins));
        assert_same_products();
}

static void what_the_library_does_not_take_is_tried(void **state) {
        Told *wrong = shared(sizeof(*wrong));
        uint32_t n_library = 0;

        in_a_child(NULL, first);
        *wrong = *first;
        for (unsigned i = 0; i < wrong->n; i++) {
                n_library += !wrong->pins[i].own;
                wrong->pins[i].large[0] = 0x7fffffff; /* the algorithm's number */
        }
        in_a_child(wrong, second);
        assert_int_equal(second->taken, PRODUCTS); /* only the library can tell */
        assert_int_equal(second->tried, n_library);
        assert_int_equal(second->known, PRODUCTS - n_library);
        assert_memory_equal(first->pins, second->pins, sizeof(first->pins));
        assert_same_products();
        (void) munmap(wrong, sizeof(*wrong));
}

static LkCudaPin pin(uint64_t rows) {
        /* id, tile, stages, scheme, swizzle, custom, splits, shapes */
        return (LkCudaPin){.k = 64, .rows = rows, .type = LK_BF16, .large = {66, 1, 1, 0, 0, 0, 1, 0}, .small = {66, 2, 1, 0, 0, 0, 1, 0}};
}

/* No device is needed: nothing is asked of the library. */
static void pins_that_are_wrong_are_refused_by_name(void **state) {
        LkCudaPin all[12], got[12];
        char why[256];
        unsigned n = 0;

        for (unsigned i = 0; i < 12; i++)
                all[i] = pin(8 * (i + 1));
        assert_int_equal(lk_cuda_pins_take(ARCH, all, 2, why, sizeof(why)), 2);
        assert_string_equal(why, "");
        assert_int_equal(lk_cuda_pins(ARCH, got, 12), 2);
        assert_memory_equal(got, all, 2 * sizeof(*got));
        assert_int_equal(lk_cuda_pins(ARCH - 1, got, 12), 0);
        assert_int_equal(lk_cuda_pins_take(ARCH, all, 2, why, sizeof(why)), 2); /* again: nothing new */
        assert_int_equal(lk_cuda_pins(ARCH, got, 12), 2);
        assert_int_equal(lk_cuda_pins(ARCH, got, 1), 1);

        for (n = 2; n < 12; n++) {
                static const char *const words[] = {"type", "size", "size", "size", "yes or no", "yes or no", "yes or no", "splits",
                        "splits", "splits"};

                all[2].type = n == 2 ? LK_I8 : LK_BF16;
                all[3].k = 0;
                all[4].k = 65;
                all[5].rows = 0;
                all[6].own = 2;
                all[7].few = 2;
                all[8].biased = 1; /* the library's only in f16 */
                all[9].large[6] = 2;
                all[10].large[3] = 1;
                all[11].few = 1;
                all[11].small[6] = 3;
                assert_int_equal(lk_cuda_pins_take(ARCH, all + n, 1, why, sizeof(why)), 0);
                assert_non_null(strstr(why, "the layer of "));
                if (!strstr(why, words[n - 2]))
                        fail_msg("pin %u: %s", n, why);
                assert_int_equal(lk_cuda_pins(ARCH, got, 12), 2);
        }
        all[9].own = 1; /* its numbers mean nothing */
        assert_int_equal(lk_cuda_pins_take(ARCH, all + 9, 1, why, sizeof(why)), 1);
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(what_is_told_is_not_tried_and_has_the_same_bits),
                cmocka_unit_test(what_is_told_is_asked_about_beside_the_start),
                cmocka_unit_test(what_the_library_does_not_take_is_tried),
                cmocka_unit_test(pins_that_are_wrong_are_refused_by_name),
        };

        return cmocka_run_group_tests(tests, setup, NULL);
}
