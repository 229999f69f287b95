/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Cheap checks of op arguments: nothing here touches the arrays. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/ops.h"

static inline bool check_activation_type(LkType t) {
        return t == LK_F32 || t == LK_BF16;
}

static inline bool check_type(LkType t) {
        return check_activation_type(t) || t == LK_F16;
}

/* An array of m rows of n elements, ld elements apart: there, aligned, and inside the address space. Of an
 * operation that takes LK_F16, too. */
static inline bool check_any_rows(const void *p, LkType t, uint64_t m, uint64_t n, uint64_t ld) {
        uint64_t elements, bytes;

        if (!check_type(t))
                return false;
        if (m == 0 || n == 0)
                return true;

        return p && (uintptr_t) p % lk_type_size(t) == 0 && ld >= n &&
               !__builtin_mul_overflow(m, ld, &elements) &&
               !__builtin_mul_overflow(elements, lk_type_size(t), &bytes) && bytes <= PTRDIFF_MAX;
}

static inline bool check_rows(const void *p, LkType t, uint64_t m, uint64_t n, uint64_t ld) {
        return check_activation_type(t) && check_any_rows(p, t, m, n, ld);
}

/* An output or a summand of rows in f32 that may be f16 beside them; 0: `type`. */
static inline LkType type_beside(LkType type, LkType beside) {
        return beside ? beside : type;
}

static inline bool check_beside(LkType type, LkType beside) {
        return beside == 0 || beside == type || (beside == LK_F16 && type == LK_F32);
}

static inline bool check_vector(const LkVector *v, uint64_t n) {
        return v->data && check_type(v->type) && v->n == n;
}

/* A vector that may be absent. */
static inline bool check_optional(const LkVector *v, uint64_t n) {
        return !v->data || check_vector(v, n);
}

/* Negative indices only: how many rows the table has is the caller's knowledge. */
static inline bool check_index(const int32_t *index, uint64_t m) {
        if (m > 0 && !index)
                return false;

        for (uint64_t i = 0; i < m; i++)
                if (index[i] < 0)
                        return false;

        return true;
}

/* A modulation table of type t: the part at..at+n of a row lies inside the row. */
static inline bool check_mod_part(const void *mod, LkType t, uint64_t ld, uint64_t at, uint64_t n) {
        uint64_t end;

        return (uintptr_t) mod % lk_type_size(t) == 0 && !__builtin_add_overflow(at, n, &end) && end <= ld &&
               ld <= PTRDIFF_MAX / 4 / INT32_MAX;
}

static inline bool check_rotation(uint32_t rotation, uint64_t cols) {
        if (rotation == 0)
                return true;
        if (rotation < 4 || rotation > LK_ROTATION_MAX || cols % rotation != 0)
                return false;

        while (rotation % 4 == 0)
                rotation /= 4;

        return rotation == 1;
}

/* What a quantised matrix says beside its numbers; how many scales there are is the caller's knowledge. */
static inline bool check_quant(const LkMatrix *w) {
        const LkQuant *q = &w->quant;

        if (w->type < LK_I8)
                return !q->in_scale.data && q->rotation == 0;
        if (!q->scale || (q->rotation != 0 && w->type != LK_I8) || !check_rotation(q->rotation, w->cols) ||
                !check_optional(&q->in_scale, w->cols))
                return false;
        if (w->block_rows < w->rows && (w->row_stride == 0 || w->block_stride % w->row_stride != 0))
                return false;

        return w->type != LK_NVFP4 || (w->cols % 16 == 0 && q->block_scale && q->block_scale_cols % 4 == 0 &&
                                              q->block_scale_cols >= w->cols / 16);
}

static inline bool check_matrix(const LkMatrix *w) {
        uint64_t last_block, last_row, end;

        if (!w->data || w->type < LK_F32 || w->type >= LK_TYPE_MAX || w->block_rows == 0)
                return false;
        if (w->rows == 0 || w->cols == 0)
                return true;

        return w->cols <= PTRDIFF_MAX / 4 && w->row_stride >= lk_row_size(w->type, w->cols) &&
               check_quant(w) &&
               !__builtin_mul_overflow((w->rows - 1) / w->block_rows, w->block_stride, &last_block) &&
               !__builtin_mul_overflow(
                       w->block_rows < w->rows ? w->block_rows : w->rows, w->row_stride, &last_row) &&
               !__builtin_add_overflow(last_block, last_row, &end) && end <= PTRDIFF_MAX;
}

/* m rows of n numbers of one byte, ld apart. */
static inline bool check_bytes(const void *p, uint64_t m, uint64_t n, uint64_t ld) {
        uint64_t bytes;

        if (m == 0 || n == 0)
                return true;

        return p && ld >= n && !__builtin_mul_overflow(m, ld, &bytes) && bytes <= PTRDIFF_MAX;
}

/* What follows is of one operation each, for both backends; limits of its own are a backend's to add. */

static inline bool check_gemm(const LkGemm *a) {
        if ((a->x_type == LK_F16) != (a->y_type == LK_F16) || (a->x_type == LK_F16 && a->w.quant.in_scale.data))
                return false;

        return check_matrix(&a->w) && a->w.cols > 0 && check_any_rows(a->x, a->x_type, a->m, a->w.cols, a->x_ld) &&
               check_any_rows(a->y, a->y_type, a->m, a->w.rows, a->y_ld) && check_optional(&a->bias, a->w.rows);
}

static inline bool check_gemm_i8(const LkGemmI8 *a) {
        return check_matrix(&a->w) && a->w.type == LK_I8 && a->w.cols > 0 && a->w.cols <= LK_GEMM_I8_K_MAX &&
               check_bytes(a->x, a->m, a->w.cols, a->x_ld) && check_rows(a->x_scale, LK_F32, a->m, 1, 1) &&
               check_rows(a->y, a->y_type, a->m, a->w.rows, a->y_ld) && check_optional(&a->bias, a->w.rows);
}

static inline bool check_dequantise(const LkDequantise *a) {
        return check_matrix(&a->w) && check_rows(a->y, LK_F32, a->w.rows, a->w.cols, a->y_ld);
}

static inline bool check_axis(const LkConvAxis *a) {
        uint64_t padded, span;

        if (a->size == 0 || a->size > INT32_MAX || a->kernel == 0 || a->kernel > LK_CONV_TAPS_MAX ||
                a->stride == 0 || a->dilation == 0 || a->before > INT32_MAX || a->after > INT32_MAX ||
                a->pad >= LK_PAD_MAX)
                return false;
        if (a->pad == LK_PAD_REFLECT && (a->before >= a->size || a->after >= a->size))
                return false;

        padded = a->size + a->before + a->after;
        span = (uint64_t) a->dilation * (a->kernel - 1) + 1;
        return span <= padded;
}

/* ret_size: positions of y. */
static inline bool check_conv(const LkConv *a, uint64_t ret_size[3]) {
        uint64_t pixels = 1, positions = 1, taps = 1, cols;

        for (uint32_t i = 0; i < 3; i++) {
                if (!check_axis(a->axis + i))
                        return false;

                ret_size[i] = lk_conv_size(a->axis + i);
                taps *= a->axis[i].kernel;
                if (taps > LK_CONV_TAPS_MAX || __builtin_mul_overflow(pixels, a->axis[i].size, &pixels) ||
                        __builtin_mul_overflow(positions, ret_size[i], &positions))
                        return false;
        }

        return a->channels > 0 && check_matrix(&a->w) && check_type(a->w.type) &&
               !__builtin_mul_overflow(a->channels, taps, &cols) && a->w.cols == cols &&
               check_rows(a->x, LK_F32, pixels, a->channels, a->channels) &&
               check_rows(a->y, LK_F32, positions, a->w.rows, a->w.rows) &&
               check_optional(&a->bias, a->w.rows);
}

/* ret_rows: pixels of all frames. */
static inline bool check_group_norm(const LkGroupNorm *a, uint64_t *ret_rows) {
        return a->groups > 0 && a->channels > 0 && a->channels % a->groups == 0 &&
               !__builtin_mul_overflow(a->frames, a->pixels, ret_rows) &&
               check_rows(a->x, LK_F32, *ret_rows, a->channels, a->channels) &&
               check_rows(a->y, LK_F32, *ret_rows, a->channels, a->channels) &&
               check_vector(&a->weight, a->channels) && check_vector(&a->bias, a->channels);
}

/* What snake and alias_free have in common. */
static inline bool check_snake_channels(const LkVector *alpha, const LkVector *beta, uint64_t channels) {
        return channels > 0 && channels <= INT32_MAX && check_vector(alpha, channels) &&
               check_optional(beta, channels);
}

static inline bool check_snake(const LkSnake *a) {
        return check_snake_channels(&a->alpha, &a->beta, a->channels) &&
               check_rows(a->x, LK_F32, a->m, a->channels, a->channels) &&
               check_rows(a->y, LK_F32, a->m, a->channels, a->channels);
}

static inline bool check_alias_free(const LkAliasFree *a) {
        uint64_t end;

        return check_snake_channels(&a->alpha, &a->beta, a->channels) &&
               check_vector(&a->up, LK_ALIAS_FREE_TAPS) && check_vector(&a->down, LK_ALIAS_FREE_TAPS) &&
               a->rows <= INT64_MAX && !__builtin_add_overflow(a->first, a->m, &end) && end <= a->rows &&
               check_rows(a->x, LK_F32, a->rows, a->channels, a->channels) &&
               check_rows(a->y, LK_F32, a->m, a->channels, a->channels);
}

static inline bool check_unpatch(const LkUnpatch *a) {
        uint64_t tokens, numbers = a->channels;
        bool fits = a->channels > 0;

        for (size_t i = 0; fits && i < 3; i++)
                fits = a->patch[i] > 0 && !__builtin_mul_overflow(numbers, a->patch[i], &numbers);

        return fits && !__builtin_mul_overflow(a->t, a->h, &tokens) && !__builtin_mul_overflow(tokens, a->w, &tokens) &&
               check_rows(a->x, LK_F32, tokens, numbers, a->x_ld) && check_rows(a->y, LK_F32, tokens, numbers, numbers);
}

static inline bool check_average(const LkAverage *a) {
        if (a->count == 0 || a->count > LK_AVERAGE_MAX || !check_rows(a->y, LK_F32, 1, a->n, a->n))
                return false;

        for (uint32_t k = 0; k < a->count; k++)
                if (!check_rows(a->x[k], LK_F32, 1, a->n, a->n))
                        return false;

        return true;
}
