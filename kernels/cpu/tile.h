/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The register tile that gemm and attention share: c[i][j] (+)= sum over k of a[i][k] * b[k][j], one
 * accumulator per element, k ascending, fma. Up to TILE_ROWS rows and exactly TILE_COLS columns; an
 * element's chain does not depend on the height of the tile or on its place in it. */

#include <stdbool.h>

#include "kernels/cpu/vec.h"

#if LK_CPU_LEVEL == 4
#define TILE_ROWS 14u /* 28 accumulators, 2 of b, the broadcast comes from memory: 30 of 32 registers */
#define TILE_LD 16u
#elif LK_CPU_LEVEL == 3
#define TILE_ROWS 6u /* 12 accumulators, 2 of b, 1 of a: 15 of 16 registers */
#define TILE_LD 8u
#else
#define TILE_ROWS 4u
#define TILE_LD 8u
#endif
#define TILE_COLS (2u * VT_N)

/* a: a[i * a_row + k * a_k]; b: rows of b_ld; c: rows of c_ld, read first if carry. */
typedef struct Tile {
        const float *a, *b;
        float *c;
        uint64_t b_ld, c_ld, k;
        bool carry;
} Tile;

VEC_INLINE void tile_rows(const Tile *t, uint32_t a_row, uint32_t a_k, uint32_t h) {
        const float *a = t->a, *b = t->b;
        VT acc[TILE_ROWS][2];

#pragma GCC unroll 14
        for (uint32_t i = 0; i < h; i++) {
                acc[i][0] = t->carry ? vt_load(t->c + i * t->c_ld) : vt_zero();
                acc[i][1] = t->carry ? vt_load(t->c + i * t->c_ld + VT_N) : vt_zero();
        }

        for (uint64_t k = 0; k < t->k; k++) {
                VT b0 = vt_load(b), b1 = vt_load(b + VT_N);

#pragma GCC unroll 14
                for (uint32_t i = 0; i < h; i++) {
                        VT ai = vt_set1(a[i * a_row]);

                        acc[i][0] = vt_fma(ai, b0, acc[i][0]);
                        acc[i][1] = vt_fma(ai, b1, acc[i][1]);
                }

                a += a_k;
                b += t->b_ld;
        }

#pragma GCC unroll 14
        for (uint32_t i = 0; i < h; i++) {
                vt_store(t->c + i * t->c_ld, acc[i][0]);
                vt_store(t->c + i * t->c_ld + VT_N, acc[i][1]);
        }
}

/* h: 1..TILE_ROWS, spelled out so that the accumulators of every height live in registers. */
VEC_INLINE void tile_run(const Tile *t, uint32_t a_row, uint32_t a_k, uint32_t h) {
        switch (h) {
        case 1:
                return tile_rows(t, a_row, a_k, 1);
        case 2:
                return tile_rows(t, a_row, a_k, 2);
        case 3:
                return tile_rows(t, a_row, a_k, 3);
        case 4:
                return tile_rows(t, a_row, a_k, 4);
#if TILE_ROWS >= 6
        case 5:
                return tile_rows(t, a_row, a_k, 5);
        case 6:
                return tile_rows(t, a_row, a_k, 6);
#endif
#if TILE_ROWS >= 14
        case 7:
                return tile_rows(t, a_row, a_k, 7);
        case 8:
                return tile_rows(t, a_row, a_k, 8);
        case 9:
                return tile_rows(t, a_row, a_k, 9);
        case 10:
                return tile_rows(t, a_row, a_k, 10);
        case 11:
                return tile_rows(t, a_row, a_k, 11);
        case 12:
                return tile_rows(t, a_row, a_k, 12);
        case 13:
                return tile_rows(t, a_row, a_k, 13);
        case 14:
                return tile_rows(t, a_row, a_k, 14);
#endif
        }
}

/* n columns in whole tiles, of which t is the first. */
VEC_INLINE void tile_columns(Tile t, uint64_t n, uint32_t a_row, uint32_t a_k, uint32_t h) {
        for (uint64_t i = 0; i < n; i += TILE_COLS, t.b += TILE_COLS, t.c += TILE_COLS)
                tile_run(&t, a_row, a_k, h);
}
