/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Rows of numbers of any type, at any byte, to a transposed f32 panel: panel[k * ld + r] = rows[r][k]. */

#include "kernels/cpu/vec.h"

#if LK_CPU_LEVEL >= 3

VEC_INLINE void pack_transpose8(V8 v[8]) {
        V8 a[8], b[8];

        for (int i = 0; i < 4; i++) {
                a[2 * i] = _mm256_unpacklo_ps(v[2 * i], v[2 * i + 1]);
                a[2 * i + 1] = _mm256_unpackhi_ps(v[2 * i], v[2 * i + 1]);
        }
        for (int i = 0; i < 2; i++) {
                b[4 * i] = _mm256_shuffle_ps(a[4 * i], a[4 * i + 2], 0x44);
                b[4 * i + 1] = _mm256_shuffle_ps(a[4 * i], a[4 * i + 2], 0xee);
                b[4 * i + 2] = _mm256_shuffle_ps(a[4 * i + 1], a[4 * i + 3], 0x44);
                b[4 * i + 3] = _mm256_shuffle_ps(a[4 * i + 1], a[4 * i + 3], 0xee);
        }
        for (int i = 0; i < 4; i++) {
                v[i] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x20);
                v[i + 4] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x31);
        }
}

#else

VEC_INLINE void pack_transpose8(V8 v[8]) {
        for (int i = 0; i < 8; i++)
                for (int j = i + 1; j < 8; j++) {
                        float f = v[i].f[j];

                        v[i].f[j] = v[j].f[i];
                        v[j].f[i] = f;
                }
}

#endif

VEC_INLINE void pack_typed(
        const void *const *rows, uint32_t n_rows, LkType type, uint64_t n, uint32_t ld, float *panel) {
        for (uint32_t r = 0; r < ld; r += 8)
                for (uint64_t k = 0; k < n; k += 8) {
                        V8 v[8];

                        for (uint32_t i = 0; i < 8; i++)
                                v[i] = r + i < n_rows ? v8_get(rows[r + i], type, k, n) : v8_zero();

                        pack_transpose8(v);

                        for (uint32_t i = 0; i < 8 && k + i < n; i++)
                                v8_store(panel + (k + i) * ld + r, v[i]);
                }
}

/* n_rows <= ld rows of n numbers each; ld is a multiple of 8 and the missing rows become +0. */
static inline void pack_rows(
        const void *const *rows, uint32_t n_rows, LkType type, uint64_t n, uint32_t ld, float *panel) {
        if (type == LK_F32)
                pack_typed(rows, n_rows, LK_F32, n, ld, panel);
        else if (type == LK_BF16)
                pack_typed(rows, n_rows, LK_BF16, n, ld, panel);
        else
                pack_typed(rows, n_rows, LK_F16, n, ld, panel);
}
