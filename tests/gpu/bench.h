/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* What the bench programs share: timing operations of the CUDA backend, whose queues are its own, by the host's clock. Operations are
 * given in groups long enough that the last wait does not count. */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "kernels/cuda/cuda.h"
#include "tests/gpu/device.h"

#define BENCH_SAMPLES 11

/* The operation's name, its argument block, and what runs it. */
typedef int (*BenchRun)(LkContext *c, const void *args);

static inline int bench_compare(const void *a, const void *b) {
        double x = *(const double *) a, y = *(const double *) b;

        return (x > y) - (x < y);
}

static inline double bench_group(LkContext *c, BenchRun run, const void *args, unsigned n, void *device) {
        uint32_t word;
        double from = now();

        for (unsigned i = 0; i < n; i++)
                must_be(run(c, args) == 0, "operation");
        must_be(lk_cuda_ops()->download(c, &word, device, sizeof(word)) == 0, "what was timed");
        return (now() - from) * 1000 / n;
}

/* Median milliseconds of one run. device: any device memory of four bytes or more. samples: at most BENCH_SAMPLES. */
static inline double bench_msec(LkContext *c, BenchRun run, const void *args, unsigned samples, void *device) {
        double took[BENCH_SAMPLES], once = bench_group(c, run, args, 1, device);
        unsigned n;

        once = bench_group(c, run, args, 2, device);
        n = once < 15 ? (unsigned) (15 / (once + 0.001)) + 1 : 1;
        for (unsigned i = 0; i < samples; i++)
                took[i] = bench_group(c, run, args, n, device);
        qsort(took, samples, sizeof(*took), bench_compare);
        return took[samples / 2];
}
