/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* How gemm and gemm_i8 cut a product into blocks of rows, columns and k. For each block both operands are
 * packed into panels of 4-byte words (numbers of f32, or pairs of integers), then register tiles run over
 * the panels. The accumulators of a (row, column) block wait between two k blocks, so that every output is
 * one chain over ascending k whatever the blocking. Scratch is bounded by the constants below, not by the
 * shape. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/cpu/context.h"
#include "kernels/cpu/tile.h"

#define BLOCK_K 384u       /* a panel of b (TILE_COLS * BLOCK_K) is read from the nearest caches */
#define BLOCK_PANELS_M 84u /* row panels per block */
#define BLOCK_COLS 1024u   /* columns per block; more if the rows leave room */
#define BLOCK_COLS_MAX 8192u
#define BLOCK_TILES (BLOCK_PANELS_M * (BLOCK_COLS / TILE_COLS)) /* tiles of accumulators that fit */
#define TASK_PANELS_M 8u /* a compute task: so many row panels stay in the second level cache */
#define TASK_PANELS_N 8u

typedef struct GemmJob GemmJob;
struct GemmJob {
        const void *args;                                 /* of the op */
        void (*pack_x)(const GemmJob *j, uint64_t panel); /* rows m0 + panel * TILE_ROWS of x to a */
        void (*pack_w)(const GemmJob *j, uint64_t panel); /* rows n0 + panel * TILE_COLS of w to b */
        void (*tile)(const GemmJob *j, uint64_t pm, uint64_t pn);
        uint64_t rows, cols, steps; /* of the whole: m, n, words of k */
        uint64_t block_k;           /* at most BLOCK_K */

        float *a;                     /* [row panel][BLOCK_K][TILE_LD] */
        float *b;                     /* [column panel][BLOCK_K][TILE_COLS] */
        float *c;                     /* accumulators: [column panel][row panel][TILE_ROWS][TILE_COLS] */
        float *bias, *scale;          /* f32, of the block's columns */
        uint64_t m0, m, n0, n, k0, k; /* the block */
        uint64_t panels_m, panels_n, tasks_m;
        bool first, last; /* of the k blocks */
};

static inline uint64_t divide_up(uint64_t a, uint64_t b) {
        return a / b + (a % b != 0);
}

static inline uint64_t min_u64(uint64_t a, uint64_t b) {
        return a < b ? a : b;
}

static inline float *gemm_tile(const GemmJob *j, uint64_t pm, uint64_t pn) {
        return j->c + (pn * j->panels_m + pm) * TILE_ROWS * TILE_COLS;
}

static inline void gemm_pack_task(void *userdata, uint64_t task, uint32_t thread) {
        const GemmJob *j = userdata;

        if (task < j->panels_m)
                j->pack_x(j, task);
        else
                j->pack_w(j, task - j->panels_m);
}

static inline void gemm_compute_task(void *userdata, uint64_t task, uint32_t thread) {
        const GemmJob *j = userdata;
        uint64_t m0 = task % j->tasks_m * TASK_PANELS_M, n0 = task / j->tasks_m * TASK_PANELS_N;

        for (uint64_t pn = n0; pn < j->panels_n && pn < n0 + TASK_PANELS_N; pn++)
                for (uint64_t pm = m0; pm < j->panels_m && pm < m0 + TASK_PANELS_M; pm++)
                        j->tile(j, pm, pn);
}

static inline int gemm_block(LkContext *c, GemmJob *j) {
        int r;

        j->panels_m = divide_up(j->m, TILE_ROWS);
        j->panels_n = divide_up(j->n, TILE_COLS);
        j->tasks_m = divide_up(j->panels_m, TASK_PANELS_M);

        for (j->k0 = 0; j->k0 < j->steps; j->k0 += j->k) {
                j->k = min_u64(j->block_k, j->steps - j->k0);
                j->first = j->k0 == 0;
                j->last = j->k0 + j->k == j->steps;

                r = threads_run(c->threads, j->panels_m + j->panels_n, gemm_pack_task, j);
                if (r >= 0)
                        r = threads_run(c->threads, j->tasks_m * divide_up(j->panels_n, TASK_PANELS_N),
                                gemm_compute_task, j);
                if (r < 0)
                        return r;
        }
        return 0;
}

/* Columns per block: few rows leave room for more of them. */
static inline uint64_t gemm_block_columns(uint64_t m) {
        uint64_t tiles = BLOCK_TILES / divide_up(min_u64(m, BLOCK_PANELS_M * TILE_ROWS), TILE_ROWS);

        return min_u64(tiles * TILE_COLS, BLOCK_COLS_MAX);
}

static inline int gemm_scratch(LkContext *c, GemmJob *j) {
        size_t a = (size_t) BLOCK_PANELS_M * BLOCK_K * TILE_LD, b = (size_t) BLOCK_COLS_MAX * BLOCK_K;
        size_t tiles = (size_t) BLOCK_TILES * TILE_ROWS * TILE_COLS;
        void *p;
        int r;

        r = context_scratch(c, (a + b + tiles + 2 * BLOCK_COLS_MAX) * sizeof(float), &p);
        if (r < 0)
                return r;

        j->a = p;
        j->b = j->a + a;
        j->c = j->b + b;
        j->bias = j->c + tiles;
        j->scale = j->bias + BLOCK_COLS_MAX;
        return 0;
}

static inline int gemm_run(LkContext *c, GemmJob *j) {
        uint64_t cols = gemm_block_columns(j->rows);
        int r;

        r = gemm_scratch(c, j);
        if (r < 0)
                return r;

        for (j->m0 = 0; j->m0 < j->rows; j->m0 += j->m) {
                j->m = min_u64(BLOCK_PANELS_M * TILE_ROWS, j->rows - j->m0);

                for (j->n0 = 0; j->n0 < j->cols; j->n0 += j->n) {
                        j->n = min_u64(cols, j->cols - j->n0);
                        r = gemm_block(c, j);
                        if (r < 0)
                                return r;
                }
        }

        return 0;
}
