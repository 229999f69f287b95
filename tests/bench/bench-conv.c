/* SPDX-License-Identifier: Apache-2.0 */
/* conv beside gemm of the same product, one thread each: what gathering costs. The two run in turn and the
 * medians are compared. Shapes: the video encoder's levels, then the audio decoder's first and last.
 *
 *     bench-conv [auto|v3|v4|scalar]
 */

#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "kernels/cpu/cpu.h"
#include "service/shared/cleanup.h"

#define ROUNDS 5

typedef struct Shape {
        uint64_t size[3], in, out;
        uint32_t kernel[3], stride;
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

static float *random_floats(uint64_t n) {
        float *p = aligned_alloc(64, (n * sizeof(float) + 63) / 64 * 64);
        uint32_t state = 1;

        for (uint64_t i = 0; p && i < n; i++) {
                state = state * 1664525u + 1013904223u;
                p[i] = (float) (state >> 8) * 0x1p-23f - 1;
        }
        return p;
}

static int measure(const LkOps *ops, LkContext *c, const LkConv *conv, const LkGemm *gemm, double ret[2]) {
        double seconds[2][ROUNDS];
        int r;

        for (int i = -1; i < ROUNDS; i++) { /* round -1 warms up */
                double t0 = now(), t1;

                r = ops->conv(c, conv);
                if (r < 0)
                        return r;
                t1 = now();
                r = ops->gemm(c, gemm);
                if (r < 0)
                        return r;
                if (i >= 0) {
                        seconds[0][i] = t1 - t0;
                        seconds[1][i] = now() - t1;
                }
        }
        for (unsigned i = 0; i < 2; i++) {
                qsort(seconds[i], ROUNDS, sizeof(double), compare_doubles);
                ret[i] = seconds[i][ROUNDS / 2];
        }
        return 0;
}

static int report(const LkOps *ops, LkContext *c, const Shape *s) {
        uint64_t pixels = s->size[0] * s->size[1] * s->size[2], m = 1, k = s->in;
        CLEANUP_FREE float *x = random_floats(pixels * s->in), *w = NULL, *rows = NULL, *y = NULL;
        LkConv conv = {.channels = s->in, .x = x};
        LkGemm gemm = {.x_type = LK_F32, .y_type = LK_F32};
        double seconds[2], work;
        int r;

        for (unsigned i = 0; i < 3; i++) {
                uint32_t beyond = s->kernel[i] - 1;

                conv.axis[i] = (LkConvAxis){
                        .size = s->size[i],
                        .kernel = s->kernel[i],
                        .stride = i > 0 ? s->stride : 1,
                        .dilation = 1,
                        .before = i == 0 ? beyond : beyond / 2,
                        .after = i == 0 ? 0 : beyond - beyond / 2,
                        .pad = i == 0 ? LK_PAD_ZERO : LK_PAD_REFLECT,
                };
                m *= lk_conv_size(conv.axis + i);
                k *= s->kernel[i];
        }
        w = random_floats(s->out * k);
        rows = random_floats(m * k);
        y = random_floats(m * s->out);
        if (!x || !w || !rows || !y)
                return -ENOMEM;

        conv.w = (LkMatrix){.data = w,
                .type = LK_F32,
                .rows = s->out,
                .cols = k,
                .row_stride = 4 * k,
                .block_rows = s->out};
        conv.y = y;
        gemm.m = m;
        gemm.x = rows;
        gemm.x_ld = k;
        gemm.w = conv.w;
        gemm.y = y;
        gemm.y_ld = s->out;
        r = measure(ops, c, &conv, &gemm, seconds);
        if (r < 0)
                return r;

        work = 2e-9 * (double) m * (double) s->out * (double) k;
        (void) printf("%6lu %6lu %6lu  %8.1f  %8.1f  %6.2f\n", (unsigned long) m, (unsigned long) s->out,
                (unsigned long) k, work / seconds[0], work / seconds[1], seconds[1] / seconds[0]);
        (void) fflush(stdout);
        return 0;
}

static const char *const isa_names[] = {"auto", "scalar", "v3", "v4"};

int main(int argc, char *argv[]) {
        static const Shape shapes[] = {
                {{2, 64, 64}, 3, 128, {3, 3, 3}, 1},
                {{2, 64, 64}, 128, 128, {3, 3, 3}, 1},
                {{2, 64, 64}, 128, 256, {3, 3, 3}, 1},
                {{2, 64, 64}, 256, 256, {3, 3, 3}, 2},
                {{5, 16, 16}, 512, 512, {3, 3, 3}, 1},
                {{5, 16, 16}, 1024, 1024, {3, 3, 3}, 1},
                {{5, 16, 16}, 512, 1024, {1, 1, 1}, 1},
                {{1, 1, 1000}, 512, 512, {1, 1, 7}, 1},
                {{1, 1, 20000}, 32, 32, {1, 1, 11}, 1},
        };
        LkCpuIsa isa = LK_CPU_AUTO;
        const LkOps *ops;
        LkContext *c;
        int r = 0;

        for (unsigned i = 0; argc > 1 && i < ELEMENTSOF(isa_names); i++)
                if (strcmp(argv[1], isa_names[i]) == 0)
                        isa = (LkCpuIsa) i;

        ops = lk_cpu_ops(isa);
        if (!ops || ops->context_new(1, &c) < 0) {
                (void) fprintf(stderr, "this machine cannot run %s\n", isa_names[isa]);
                return EXIT_FAILURE;
        }

        (void) printf("conv and gemm: %s; one thread each, median of %d alternating runs\n", isa_names[isa],
                ROUNDS);
        (void) printf("     M      N      K      conv      gemm   ratio   (GFLOP/s)\n");
        for (unsigned i = 0; r == 0 && i < ELEMENTSOF(shapes); i++)
                r = report(ops, c, shapes + i);
        if (r < 0)
                (void) fprintf(stderr, "%s\n", strerror(-r));

        (void) ops->context_free(c);
        return r < 0 ? EXIT_FAILURE : EXIT_SUCCESS;
}
