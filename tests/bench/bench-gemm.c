/* SPDX-License-Identifier: Apache-2.0 */
/* gemm of kernels/cpu beside OpenBLAS, one thread each: y = x . w^T in f32. The two run in turn and the
 * medians are compared.
 *
 *     bench-gemm [auto|v3|v4|scalar] [M N K]...
 *
 * Without shapes: square and wide ones, then small K and few rows, where packing the weights costs most. */

#include <cblas.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "kernels/cpu/cpu.h"
#include "service/shared/cleanup.h"

#define ROUNDS 9

typedef struct Shape {
        uint64_t m, n, k;
} Shape;

static double now(void) {
        struct timespec t;

        (void) clock_gettime(CLOCK_MONOTONIC, &t);
        return (double) t.tv_sec + 1e-9 * (double) t.tv_nsec;
}

static int compare_doubles(const void *a, const void *b) {
        double x = *(const double *) a, y = *(const double *) b;

        return (x > y) - (x < y);
}

static double median(double *v) {
        qsort(v, ROUNDS, sizeof(*v), compare_doubles);
        return v[ROUNDS / 2];
}

static float *random_floats(uint64_t n) {
        float *p = aligned_alloc(64, (n * sizeof(float) + 63) / 64 * 64);
        uint32_t state = 1;

        for (uint64_t i = 0; p && i < n; i++) {
                state = state * 1664525u + 1013904223u;
                p[i] = (float) (state >> 8) * 0x1p-23f - 1;
        }

        return p;
}

/* Median seconds of ours and of OpenBLAS. -EIO if their results differ by more than rounding explains. */
static int measure(const LkOps *ops, LkContext *c, Shape s, double ret_seconds[2]) {
        CLEANUP_FREE float *x = random_floats(s.m * s.k), *w = random_floats(s.n * s.k);
        CLEANUP_FREE float *y = random_floats(s.m * s.n), *z = random_floats(s.m * s.n);
        double ours[ROUNDS], theirs[ROUNDS];
        LkGemm g = {
                .m = s.m,
                .x = x,
                .x_type = LK_F32,
                .x_ld = s.k,
                .y = y,
                .y_type = LK_F32,
                .y_ld = s.n,
                .w = {.data = w,
                        .type = LK_F32,
                        .rows = s.n,
                        .cols = s.k,
                        .row_stride = s.k * 4,
                        .block_rows = s.n},
        };
        int r;

        if (!x || !w || !y || !z)
                return -ENOMEM;

        for (int i = -1; i < ROUNDS; i++) { /* round -1 warms up */
                double t0 = now(), t1, t2;

                r = ops->gemm(c, &g);
                if (r < 0)
                        return r;

                t1 = now();
                cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (blasint) s.m, (blasint) s.n,
                        (blasint) s.k, 1, x, (blasint) s.k, w, (blasint) s.k, 0, z, (blasint) s.n);
                t2 = now();

                if (i >= 0) {
                        ours[i] = t1 - t0;
                        theirs[i] = t2 - t1;
                }
        }

        for (uint64_t i = 0; i < s.m * s.n; i++)
                if (fabsf(y[i] - z[i]) > 1e-5f * (float) s.k)
                        return -EIO;

        ret_seconds[0] = median(ours);
        ret_seconds[1] = median(theirs);
        return 0;
}

static int report(const LkOps *ops, LkContext *c, Shape s) {
        double seconds[2], work = 2e-9 * (double) s.m * (double) s.n * (double) s.k;
        int r;

        r = measure(ops, c, s, seconds);
        if (r < 0) {
                (void) fprintf(stderr, "%lu %lu %lu: %s\n", (unsigned long) s.m, (unsigned long) s.n,
                        (unsigned long) s.k, r == -EIO ? "results differ" : strerror(-r));
                return r;
        }

        (void) printf("%6lu %6lu %6lu  %8.1f  %8.1f  %6.2f\n", (unsigned long) s.m, (unsigned long) s.n,
                (unsigned long) s.k, work / seconds[0], work / seconds[1], seconds[1] / seconds[0]);
        (void) fflush(stdout);
        return 0;
}

static const char *const isa_names[] = {"auto", "scalar", "v3", "v4"};

int main(int argc, char *argv[]) {
        static const Shape shapes[] = {
                {512, 1024, 1024},
                {1024, 1792, 1792},
                {1024, 5376, 5376},
                {2048, 2048, 2048},
                {407, 3072, 64},
                {16, 2048, 2048},
                {1, 4096, 4096},
        };
        LkCpuIsa isa = LK_CPU_AUTO;
        const LkOps *ops;
        LkContext *c;
        int r = 0, at = 1;

        for (unsigned i = 0; argc > 1 && i < ELEMENTSOF(isa_names); i++)
                if (strcmp(argv[1], isa_names[i]) == 0) {
                        isa = (LkCpuIsa) i;
                        at = 2;
                }

        ops = lk_cpu_ops(isa);
        if (!ops || ops->context_new(1, &c) < 0) {
                (void) fprintf(stderr, "this machine cannot run %s\n", isa_names[isa]);
                return EXIT_FAILURE;
        }

        openblas_set_num_threads(1);
        (void) printf("ours: %s; OpenBLAS: core %s; one thread each, median of %d alternating runs\n",
                isa_names[isa], openblas_get_corename(), ROUNDS);
        (void) printf("     M      N      K      ours  OpenBLAS   ratio   (GFLOP/s)\n");

        for (unsigned i = 0; at >= argc && r == 0 && i < ELEMENTSOF(shapes); i++)
                r = report(ops, c, shapes[i]);
        for (; at + 2 < argc && r == 0; at += 3)
                r = report(ops, c,
                        (Shape){strtoull(argv[at], NULL, 10), strtoull(argv[at + 1], NULL, 10),
                                strtoull(argv[at + 2], NULL, 10)});

        (void) ops->context_free(c);
        return r < 0 ? EXIT_FAILURE : EXIT_SUCCESS;
}
