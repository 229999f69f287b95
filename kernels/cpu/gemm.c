/* SPDX-License-Identifier: Apache-2.0 */
/* y = x . w^T + bias in f32: one chain of fma per output. Types, byte alignment, the blocked-row view and
 * quantisation end in the packing. */

#include <errno.h>

#include "kernels/cpu/check.h"
#include "kernels/cpu/gemm-float.h"
#include "kernels/cpu/isa.h"

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

        for (uint64_t k = 0; in_scale->data && gemm_met_type(g) != LK_BF16 && k < j->k; k++) {
                float scale = number_get(in_scale->data, in_scale->type, j->k0 + k);

                for (uint32_t i = 0; i < TILE_LD; i++)
                        a[k * TILE_LD + i] = a[k * TILE_LD + i] * scale;
        }
}

int LK_ISA(gemm)(LkContext *c, const LkGemm *a) {
        GemmJob j = {.args = a, .pack_x = pack_x, .pack_w = gemm_pack_w, .tile = gemm_float_tile};

        if (!c || !a || !check_gemm(a))
                return -EINVAL;
        if (a->m == 0 || a->w.rows == 0)
                return 0;

        j.rows = a->m;
        j.cols = a->w.rows;
        j.steps = a->w.cols;
        j.block_k = a->w.quant.rotation > 0 ? BLOCK_K / a->w.quant.rotation * a->w.quant.rotation : BLOCK_K;
        return gemm_run(c, &j);
}
