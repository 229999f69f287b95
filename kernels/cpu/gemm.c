/* SPDX-License-Identifier: Apache-2.0 */
/* y = x . w^T + bias in f32: one chain of fma per output. Types, byte alignment, the blocked-row view and
 * quantisation end in the packing. */

#include <errno.h>

#include "kernels/cpu/check.h"
#include "kernels/cpu/gemm-blocks.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/pack.h"
#include "kernels/cpu/quant.h"
#include "kernels/cpu/rows.h"

static void pack_x(const GemmJob *j, uint64_t panel) {
        const LkGemm *g = j->args;
        const LkVector *in_scale = &g->w.quant.in_scale;
        const void *rows[TILE_LD] = {};
        uint64_t size = lk_type_size(g->x_type), first = j->m0 + panel * TILE_ROWS;
        uint32_t n = (uint32_t) min_u64(TILE_ROWS, j->m0 + j->m - first);
        float *a = j->a + panel * BLOCK_K * TILE_LD;

        for (uint32_t i = 0; i < n; i++)
                rows[i] = (const uint8_t *) g->x + ((first + i) * g->x_ld + j->k0) * size;

        pack_rows(rows, n, g->x_type, j->k, TILE_LD, a);

        for (uint64_t k = 0; in_scale->data && k < j->k; k++) {
                float scale = number_get(in_scale->data, in_scale->type, j->k0 + k);

                for (uint32_t i = 0; i < TILE_LD; i++)
                        a[k * TILE_LD + i] = a[k * TILE_LD + i] * scale;
        }
}

static void pack_w(const GemmJob *j, uint64_t panel) {
        const LkGemm *g = j->args;
        const void *rows[TILE_COLS] = {};
        float expanded[TILE_COLS * BLOCK_K];
        uint64_t first = j->n0 + panel * TILE_COLS;
        uint32_t n = (uint32_t) min_u64(TILE_COLS, j->n0 + j->n - first);
        bool quantised = g->w.type >= LK_I8;

        for (uint32_t i = 0; i < n; i++)
                if (quantised) {
                        quant_expand(&g->w, first + i, j->k0, j->k, expanded + i * BLOCK_K);
                        rows[i] = expanded + i * BLOCK_K;
                } else
                        rows[i] = quant_row(&g->w, first + i) + j->k0 * lk_type_size(g->w.type);

        pack_rows(rows, n, quantised ? LK_F32 : g->w.type, j->k, TILE_COLS,
                j->b + panel * BLOCK_K * TILE_COLS);

        for (uint32_t i = 0; g->bias.data && j->first && i < n; i++)
                j->bias[panel * TILE_COLS + i] = number_get(g->bias.data, g->bias.type, first + i);
}

VEC_INLINE void emit_typed(
        const GemmJob *j, const float *tile, uint64_t row, uint64_t col, uint32_t h, LkType type) {
        const LkGemm *g = j->args;
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
        const LkGemm *g = j->args;
        uint32_t h = (uint32_t) min_u64(TILE_ROWS, j->m - pm * TILE_ROWS);
        Tile t = {
                .a = j->a + pm * BLOCK_K * TILE_LD,
                .b = j->b + pn * BLOCK_K * TILE_COLS,
                .c = gemm_tile(j, pm, pn),
                .b_ld = TILE_COLS,
                .c_ld = TILE_COLS,
                .k = j->k,
                .carry = !j->first,
        };

        tile_run(&t, 1, TILE_LD, h);

        if (!j->last)
                return;
        if (g->y_type == LK_F32)
                emit_typed(j, t.c, pm * TILE_ROWS, pn * TILE_COLS, h, LK_F32);
        else
                emit_typed(j, t.c, pm * TILE_ROWS, pn * TILE_COLS, h, LK_BF16);
}

int LK_ISA(gemm)(LkContext *c, const LkGemm *a) {
        GemmJob j = {.args = a, .pack_x = pack_x, .pack_w = pack_w, .tile = compute_tile};

        if (!c || !a || !check_matrix(&a->w) || a->w.cols == 0 ||
                !check_rows(a->x, a->x_type, a->m, a->w.cols, a->x_ld) ||
                !check_rows(a->y, a->y_type, a->m, a->w.rows, a->y_ld) ||
                (a->bias.data && !check_vector(&a->bias, a->w.rows)))
                return -EINVAL;
        if (a->m == 0 || a->w.rows == 0)
                return 0;

        j.rows = a->m;
        j.cols = a->w.rows;
        j.steps = a->w.cols;
        j.block_k = a->w.quant.rotation > 0 ? BLOCK_K / a->w.quant.rotation * a->w.quant.rotation : BLOCK_K;
        return gemm_run(c, &j);
}
