/* SPDX-License-Identifier: Apache-2.0 */
/* y = x . w^T + bias.
 *
 * The product is cut into blocks of rows, columns and k. For each block both operands are packed into f32
 * panels (this is where types, byte alignment and the blocked-row view end), then register tiles run over
 * the panels. The accumulators of a (row, column) block wait in f32 between two k blocks, so that every
 * output is one chain of fma over ascending k whatever the blocking. Scratch is bounded by the constants
 * below, not by the shape. */

#include <errno.h>

#include "kernels/cpu/check.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/pack.h"
#include "kernels/cpu/rows.h"
#include "kernels/cpu/tile.h"

#define BLOCK_K 384u       /* a panel of b (TILE_COLS * BLOCK_K) is read from the nearest caches */
#define BLOCK_PANELS_M 84u /* row panels per block */
#define BLOCK_COLS 1024u   /* columns per block; more if the rows leave room */
#define BLOCK_COLS_MAX 8192u
#define BLOCK_TILES (BLOCK_PANELS_M * (BLOCK_COLS / TILE_COLS)) /* tiles of accumulators that fit */
#define TASK_PANELS_M 8u /* a compute task: so many row panels stay in the second level cache */
#define TASK_PANELS_N 8u

typedef struct GemmJob {
        const LkGemm *gemm;
        float *a;                     /* [row panel][BLOCK_K][TILE_LD] */
        float *b;                     /* [column panel][BLOCK_K][TILE_COLS] */
        float *c;                     /* accumulators: [column panel][row panel][TILE_ROWS][TILE_COLS] */
        float *bias;                  /* f32, of the block's columns */
        uint64_t m0, m, n0, n, k0, k; /* the block */
        uint64_t panels_m, panels_n, tasks_m;
        bool first, last; /* of the k blocks */
} GemmJob;

static uint64_t divide_up(uint64_t a, uint64_t b) {
        return a / b + (a % b != 0);
}

static uint64_t min_u64(uint64_t a, uint64_t b) {
        return a < b ? a : b;
}

static const void *matrix_at(const LkMatrix *w, uint64_t row, uint64_t col) {
        return (const uint8_t *) w->data + row / w->block_rows * w->block_stride +
               row % w->block_rows * w->row_stride + col * lk_type_size(w->type);
}

static void pack_task(void *userdata, uint64_t task, uint32_t thread) {
        GemmJob *j = userdata;
        const LkGemm *g = j->gemm;
        const void *rows[TILE_COLS] = {};
        uint64_t size = lk_type_size(g->x_type), first;
        uint32_t n;

        if (task < j->panels_m) {
                first = j->m0 + task * TILE_ROWS;
                n = (uint32_t) min_u64(TILE_ROWS, j->m0 + j->m - first);
                for (uint32_t i = 0; i < n; i++)
                        rows[i] = (const uint8_t *) g->x + ((first + i) * g->x_ld + j->k0) * size;

                pack_rows(rows, n, g->x_type, j->k, TILE_LD, j->a + task * BLOCK_K * TILE_LD);
                return;
        }

        task -= j->panels_m;
        first = j->n0 + task * TILE_COLS;
        n = (uint32_t) min_u64(TILE_COLS, j->n0 + j->n - first);
        for (uint32_t i = 0; i < n; i++)
                rows[i] = matrix_at(&g->w, first + i, j->k0);

        pack_rows(rows, n, g->w.type, j->k, TILE_COLS, j->b + task * BLOCK_K * TILE_COLS);

        for (uint32_t i = 0; g->bias.data && j->first && i < n; i++)
                j->bias[task * TILE_COLS + i] = number_get(g->bias.data, g->bias.type, first + i);
}

VEC_INLINE void emit_typed(
        const GemmJob *j, const float *tile, uint64_t row, uint64_t col, uint32_t h, LkType type) {
        const LkGemm *g = j->gemm;
        uint64_t n = min_u64(TILE_COLS, j->n - col);

        for (uint32_t i = 0; i < h; i++) {
                uint64_t at = (j->m0 + row + i) * g->y_ld + j->n0 + col;
                void *y = (uint8_t *) g->y + at * lk_type_size(type);

                for (uint32_t v = 0; v < n; v += VT_N) {
                        VT sum = vt_load(tile + i * TILE_COLS + v);

                        if (g->bias.data)
                                sum = vt_add(sum, vt_load(j->bias + col + v));

                        vt_put(y, type, v, n, sum);
                }
        }
}

static void compute_tile(const GemmJob *j, uint64_t pm, uint64_t pn) {
        uint32_t h = (uint32_t) min_u64(TILE_ROWS, j->m - pm * TILE_ROWS);
        Tile t = {
                .a = j->a + pm * BLOCK_K * TILE_LD,
                .b = j->b + pn * BLOCK_K * TILE_COLS,
                .c = j->c + (pn * j->panels_m + pm) * TILE_ROWS * TILE_COLS,
                .b_ld = TILE_COLS,
                .c_ld = TILE_COLS,
                .k = j->k,
                .carry = !j->first,
        };

        tile_run(&t, 1, TILE_LD, h);

        if (!j->last)
                return;
        if (j->gemm->y_type == LK_F32)
                emit_typed(j, t.c, pm * TILE_ROWS, pn * TILE_COLS, h, LK_F32);
        else
                emit_typed(j, t.c, pm * TILE_ROWS, pn * TILE_COLS, h, LK_BF16);
}

static void compute_task(void *userdata, uint64_t task, uint32_t thread) {
        const GemmJob *j = userdata;
        uint64_t m0 = task % j->tasks_m * TASK_PANELS_M, n0 = task / j->tasks_m * TASK_PANELS_N;

        for (uint64_t pn = n0; pn < j->panels_n && pn < n0 + TASK_PANELS_N; pn++)
                for (uint64_t pm = m0; pm < j->panels_m && pm < m0 + TASK_PANELS_M; pm++)
                        compute_tile(j, pm, pn);
}

static void gemm_block(LkContext *c, GemmJob *j) {
        uint64_t cols = j->gemm->w.cols;

        j->panels_m = divide_up(j->m, TILE_ROWS);
        j->panels_n = divide_up(j->n, TILE_COLS);
        j->tasks_m = divide_up(j->panels_m, TASK_PANELS_M);

        for (j->k0 = 0; j->k0 < cols; j->k0 += j->k) {
                j->k = min_u64(BLOCK_K, cols - j->k0);
                j->first = j->k0 == 0;
                j->last = j->k0 + j->k == cols;

                threads_run(c->threads, j->panels_m + j->panels_n, pack_task, j);
                threads_run(c->threads, j->tasks_m * divide_up(j->panels_n, TASK_PANELS_N), compute_task, j);
        }
}

/* Columns per block: few rows leave room for more of them. */
static uint64_t block_columns(uint64_t m) {
        uint64_t tiles = BLOCK_TILES / divide_up(min_u64(m, BLOCK_PANELS_M * TILE_ROWS), TILE_ROWS);

        return min_u64(tiles * TILE_COLS, BLOCK_COLS_MAX);
}

static int gemm_scratch(LkContext *c, GemmJob *j) {
        size_t a = (size_t) BLOCK_PANELS_M * BLOCK_K * TILE_LD, b = (size_t) BLOCK_COLS_MAX * BLOCK_K;
        size_t tiles = (size_t) BLOCK_TILES * TILE_ROWS * TILE_COLS;
        void *p;
        int r;

        r = context_scratch(c, (a + b + tiles + BLOCK_COLS_MAX) * sizeof(float), &p);
        if (r < 0)
                return r;

        j->a = p;
        j->b = j->a + a;
        j->c = j->b + b;
        j->bias = j->c + tiles;
        return 0;
}

int LK_ISA(gemm)(LkContext *c, const LkGemm *a) {
        GemmJob j = {.gemm = a};
        uint64_t cols;
        int r;

        if (!c || !a || !check_matrix(&a->w) || a->w.cols == 0 ||
                !check_rows(a->x, a->x_type, a->m, a->w.cols, a->x_ld) ||
                !check_rows(a->y, a->y_type, a->m, a->w.rows, a->y_ld) ||
                (a->bias.data && !check_vector(&a->bias, a->w.rows)))
                return -EINVAL;
        if (a->m == 0 || a->w.rows == 0)
                return 0;

        r = gemm_scratch(c, &j);
        if (r < 0)
                return r;

        cols = block_columns(a->m);

        for (j.m0 = 0; j.m0 < a->m; j.m0 += j.m) {
                j.m = min_u64(BLOCK_PANELS_M * TILE_ROWS, a->m - j.m0);

                for (j.n0 = 0; j.n0 < a->w.rows; j.n0 += j.n) {
                        j.n = min_u64(cols, a->w.rows - j.n0);
                        gemm_block(c, &j);
                }
        }

        return 0;
}
