/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* What gemm and conv share: the weights' panels and the register tiles of f32. j->args is an LkGemm, of
 * which x is not looked at here. */

#include "kernels/cpu/gemm-blocks.h"
#include "kernels/cpu/pack.h"
#include "kernels/cpu/quant.h"
#include "kernels/cpu/rows.h"

/* What w's numbers are rounded to before they meet x; LK_F32: nothing. */
static inline LkType gemm_met_type(const LkGemm *g) {
        if (g->x_type == LK_F16)
                return g->w.type == LK_F16 ? LK_F32 : LK_F16;
        return g->x_type == LK_BF16 && g->y_type == LK_BF16 && g->w.type >= LK_I8 ? LK_BF16 : LK_F32;
}

/* n: a multiple of TILE_COLS. */
static inline void gemm_round(float *p, uint64_t n, LkType type) {
        for (uint64_t i = 0; type != LK_F32 && i < n; i += VT_N)
                vt_store(p + i, vt_round(vt_load(p + i), type));
}

static inline void gemm_pack_w(const GemmJob *j, uint64_t panel) {
        const LkGemm *g = j->args;
        const void *rows[TILE_COLS] = {};
        float expanded[TILE_COLS * BLOCK_K];
        uint64_t first = j->n0 + panel * TILE_COLS;
        uint32_t n = (uint32_t) min_u64(TILE_COLS, j->n0 + j->n - first);
        bool quantised = g->w.type >= LK_I8;

        for (uint32_t i = 0; i < n; i++)
                if (quantised) {
                        quant_expand(&g->w, first + i, j->k0, j->k, expanded + i * BLOCK_K);
                        if (gemm_met_type(g) == LK_BF16)
                                quant_scale_columns(&g->w, j->k0, j->k, expanded + i * BLOCK_K);
                        rows[i] = expanded + i * BLOCK_K;
                } else
                        rows[i] = quant_row(&g->w, first + i) + j->k0 * lk_type_size(g->w.type);

        pack_rows(rows, n, quantised ? LK_F32 : g->w.type, j->k, TILE_COLS,
                j->b + panel * BLOCK_K * TILE_COLS);
        gemm_round(j->b + panel * BLOCK_K * TILE_COLS, j->k * TILE_COLS, gemm_met_type(g));

        for (uint32_t i = 0; g->bias.data && j->first && i < n; i++) {
                float bias = number_get(g->bias.data, g->bias.type, first + i);

                j->bias[panel * TILE_COLS + i] = g->x_type == LK_F16 ? f32_from_f16(f16_from_f32(bias)) : bias;
        }
}

VEC_INLINE void gemm_emit(
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

static inline void gemm_float_tile(const GemmJob *j, uint64_t pm, uint64_t pn) {
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
                gemm_emit(j, t.c, pm * TILE_ROWS, pn * TILE_COLS, h, LK_F32);
        else if (g->y_type == LK_F16)
                gemm_emit(j, t.c, pm * TILE_ROWS, pn * TILE_COLS, h, LK_F16);
        else
                gemm_emit(j, t.c, pm * TILE_ROWS, pn * TILE_COLS, h, LK_BF16);
}
