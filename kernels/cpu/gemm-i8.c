/* SPDX-License-Identifier: Apache-2.0 */
/* y = (x . w^T) * scales + bias over int8. A word of a panel is a pair of int16 of consecutive k, which is
 * what the multiply-and-add instructions take; the sum is exact in int32, so nothing here can change a bit.
 */

#include <errno.h>

#include "kernels/cpu/check.h"
#include "kernels/cpu/gemm-blocks.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/quant.h"
#include "kernels/cpu/rows.h"

#if LK_CPU_LEVEL == 4

typedef __m512i VI;

VEC_INLINE VI vi_load(const void *p) {
        return _mm512_loadu_si512(p);
}
VEC_INLINE void vi_store(void *p, VI v) {
        _mm512_storeu_si512(p, v);
}
VEC_INLINE VI vi_zero(void) {
        return _mm512_setzero_si512();
}
VEC_INLINE VI vi_set1(int32_t i) {
        return _mm512_set1_epi32(i);
}
VEC_INLINE VI vi_add_pairs(VI sum, VI a, VI b) {
        return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b));
}

#elif LK_CPU_LEVEL == 3

typedef __m256i VI;

VEC_INLINE VI vi_load(const void *p) {
        return _mm256_loadu_si256(p);
}
VEC_INLINE void vi_store(void *p, VI v) {
        _mm256_storeu_si256(p, v);
}
VEC_INLINE VI vi_zero(void) {
        return _mm256_setzero_si256();
}
VEC_INLINE VI vi_set1(int32_t i) {
        return _mm256_set1_epi32(i);
}
VEC_INLINE VI vi_add_pairs(VI sum, VI a, VI b) {
        return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
}

#else

typedef struct VI {
        int32_t i[VT_N];
} VI;

VEC_INLINE VI vi_load(const void *p) {
        VI v;

        memcpy(v.i, p, sizeof(v.i));
        return v;
}
VEC_INLINE void vi_store(void *p, VI v) {
        memcpy(p, v.i, sizeof(v.i));
}
VEC_INLINE VI vi_zero(void) {
        return (VI){};
}
VEC_INLINE VI vi_set1(int32_t i) {
        VI v;

        for (uint32_t n = 0; n < VT_N; n++)
                v.i[n] = i;
        return v;
}
VEC_INLINE VI vi_add_pairs(VI sum, VI a, VI b) {
        for (uint32_t n = 0; n < VT_N; n++)
                sum.i[n] += (int32_t) (int16_t) a.i[n] * (int16_t) b.i[n] + (a.i[n] >> 16) * (b.i[n] >> 16);
        return sum;
}

#endif

/* Columns 2 * k0 .. of `n` rows, as words [k][ld]; beyond the end of a row and of the rows: 0. */
static void pack_pairs(const int8_t *const *rows, uint32_t n, uint64_t k0, uint64_t steps, uint64_t cols,
        uint32_t ld, void *panel) {
        int32_t *words = panel;

        for (uint64_t k = 0; k < steps; k++)
                for (uint32_t i = 0; i < ld; i++) {
                        uint64_t at = 2 * (k0 + k);
                        int8_t low = i < n ? rows[i][at] : 0,
                               high = i < n && at + 1 < cols ? rows[i][at + 1] : 0;

                        words[k * ld + i] =
                                (int32_t) ((uint32_t) (uint16_t) low | (uint32_t) (uint16_t) high << 16);
                }
}

static void pack_x(const GemmJob *j, uint64_t panel) {
        const LkGemmI8 *g = j->args;
        const int8_t *rows[TILE_LD] = {};
        uint64_t first = j->m0 + panel * TILE_ROWS;
        uint32_t n = (uint32_t) min_u64(TILE_ROWS, j->m0 + j->m - first);

        for (uint32_t i = 0; i < n; i++)
                rows[i] = g->x + (first + i) * g->x_ld;

        pack_pairs(rows, n, j->k0, j->k, g->w.cols, TILE_LD, j->a + panel * BLOCK_K * TILE_LD);
}

static void pack_w(const GemmJob *j, uint64_t panel) {
        const LkGemmI8 *g = j->args;
        const int8_t *rows[TILE_COLS] = {};
        uint64_t first = j->n0 + panel * TILE_COLS;
        uint32_t n = (uint32_t) min_u64(TILE_COLS, j->n0 + j->n - first);

        for (uint32_t i = 0; i < n; i++)
                rows[i] = (const int8_t *) quant_row(&g->w, first + i);

        pack_pairs(rows, n, j->k0, j->k, g->w.cols, TILE_COLS, j->b + panel * BLOCK_K * TILE_COLS);

        for (uint32_t i = 0; j->first && i < TILE_COLS; i++) {
                j->scale[panel * TILE_COLS + i] = i < n ? quant_row_scale(&g->w, first + i) : 0;
                if (g->bias.data)
                        j->bias[panel * TILE_COLS + i] =
                                i < n ? number_get(g->bias.data, g->bias.type, first + i) : 0;
        }
}

VEC_INLINE void emit_typed(const GemmJob *j, const int32_t *tile, uint64_t row, uint64_t col, LkType type) {
        const LkGemmI8 *g = j->args;
        uint64_t n = min_u64(TILE_COLS, j->n - col);
        float line[TILE_COLS];

        for (uint64_t i = 0; i < TILE_ROWS && row + i < j->m; i++) {
                float scale = g->x_scale[j->m0 + row + i];
                void *y =
                        (uint8_t *) g->y + ((j->m0 + row + i) * g->y_ld + j->n0 + col) * lk_type_size(type);

                for (uint32_t v = 0; v < TILE_COLS; v++)
                        line[v] = ((float) tile[i * TILE_COLS + v] * scale) * j->scale[col + v];
                for (uint32_t v = 0; g->bias.data && v < TILE_COLS; v++)
                        line[v] = line[v] + j->bias[col + v];
                for (uint32_t v = 0; v < n; v += VT_N)
                        vt_put(y, type, v, n, vt_load(line + v));
        }
}

static void compute_tile(const GemmJob *j, uint64_t pm, uint64_t pn) {
        const LkGemmI8 *g = j->args;
        const int32_t *a = (const int32_t *) (const void *) (j->a + pm * BLOCK_K * TILE_LD);
        const int32_t *b = (const int32_t *) (const void *) (j->b + pn * BLOCK_K * TILE_COLS);
        int32_t *c = (int32_t *) (void *) gemm_tile(j, pm, pn);
        VI acc[TILE_ROWS][2];

#pragma GCC unroll 14
        for (uint32_t i = 0; i < TILE_ROWS; i++) {
                acc[i][0] = j->first ? vi_zero() : vi_load(c + i * TILE_COLS);
                acc[i][1] = j->first ? vi_zero() : vi_load(c + i * TILE_COLS + VT_N);
        }

        for (uint64_t k = 0; k < j->k; k++, a += TILE_LD, b += TILE_COLS) {
                VI b0 = vi_load(b), b1 = vi_load(b + VT_N);

#pragma GCC unroll 14
                for (uint32_t i = 0; i < TILE_ROWS; i++) {
                        VI ai = vi_set1(a[i]);

                        acc[i][0] = vi_add_pairs(acc[i][0], ai, b0);
                        acc[i][1] = vi_add_pairs(acc[i][1], ai, b1);
                }
        }

#pragma GCC unroll 14
        for (uint32_t i = 0; i < TILE_ROWS; i++) {
                vi_store(c + i * TILE_COLS, acc[i][0]);
                vi_store(c + i * TILE_COLS + VT_N, acc[i][1]);
        }

        if (!j->last)
                return;
        if (g->y_type == LK_F32)
                emit_typed(j, c, pm * TILE_ROWS, pn * TILE_COLS, LK_F32);
        else
                emit_typed(j, c, pm * TILE_ROWS, pn * TILE_COLS, LK_BF16);
}

static int product(LkContext *c, const LkGemmI8 *a) {
        GemmJob j = {
                .args = a, .pack_x = pack_x, .pack_w = pack_w, .tile = compute_tile, .block_k = BLOCK_K};

        if (a->m == 0 || a->w.rows == 0)
                return 0;

        j.rows = a->m;
        j.cols = a->w.rows;
        j.steps = divide_up(a->w.cols, 2);
        return gemm_run(c, &j);
}

int LK_ISA(gemm_i8)(LkContext *c, const LkGemmI8 *a) {
        int r = 0;

        if (!c || !a || !check_gemm_i8(a))
                return -EINVAL;
        for (; r >= 0 && a; a = a->beside)
                r = product(c, a);
        return r;
}
