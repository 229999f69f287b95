/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Checks of the arrays that attention over int8 shares (ops.h). */

#include "kernels/cpu/check.h"

static inline bool check_queries_i8(
        const int8_t *q, const float *scale, uint64_t n, uint32_t heads, uint64_t ld) {
        return (uintptr_t) q % 16 == 0 && ld % LK_I8_DIM == 0 &&
               check_bytes(q, n, (uint64_t) heads * LK_I8_DIM, ld) &&
               check_rows(scale, LK_F32, n, heads, ld / LK_I8_DIM);
}

static inline bool check_keys_i8(const LkKeysI8 *k) {
        const uint64_t tiles = lk_i8_tiles(k->n), heads = k->heads;
        uint64_t all, numbers;

        if (k->n == 0 || k->n > PTRDIFF_MAX / LK_I8_SAMPLES || __builtin_mul_overflow(tiles, heads, &all) ||
                __builtin_mul_overflow(all, LK_I8_DIM * LK_I8_KEYS, &numbers))
                return false;

        return ((uintptr_t) k->offset | (uintptr_t) k->k | (uintptr_t) k->v | (uintptr_t) k->v_scale) % 16 ==
                       0 &&
               check_rows(k->offset, LK_F32, heads, LK_I8_DIM, LK_I8_DIM) &&
               check_bytes(k->k, 1, numbers, numbers) && check_bytes(k->v, 1, numbers, numbers) &&
               check_rows(k->k_scale, LK_F32, heads, tiles, tiles) &&
               check_rows(k->v_scale, LK_F32, all, LK_I8_DIM, LK_I8_DIM);
}
