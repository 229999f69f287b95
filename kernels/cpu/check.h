/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Cheap checks of op arguments: nothing here touches the arrays. */

#include <float.h>
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

static inline bool check_one_gemm_i8(const LkGemmI8 *a) {
        return check_matrix(&a->w) && a->w.type == LK_I8 && a->w.cols > 0 && a->w.cols <= LK_GEMM_I8_K_MAX &&
               check_bytes(a->x, a->m, a->w.cols, a->x_ld) && check_rows(a->x_scale, LK_F32, a->m, 1, 1) &&
               check_rows(a->y, a->y_type, a->m, a->w.rows, a->y_ld) && check_optional(&a->bias, a->w.rows);
}

/* With all that is beside it. */
static inline bool check_gemm_i8(const LkGemmI8 *a) {
        for (; a; a = a->beside)
                if (!check_one_gemm_i8(a))
                        return false;

        return true;
}

static inline bool check_dequantise(const LkDequantise *a) {
        return check_matrix(&a->w) && check_rows(a->y, LK_F32, a->w.rows, a->w.cols, a->y_ld);
}

static inline bool check_expand(const LkExpand *a) {
        return check_matrix(&a->w) && a->w.type >= LK_I8 && a->y && (uintptr_t) a->y % 16 == 0;
}

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

static inline bool check_quantise_queries(const LkQuantiseQueries *a) {
        return check_rows(a->x, a->type, a->n, (uint64_t) a->heads * LK_I8_DIM, a->x_ld) &&
               check_queries_i8(a->q, a->scale, a->n, a->heads, a->q_ld);
}

static inline bool check_quantise_keys(const LkQuantiseKeys *a) {
        const uint64_t width = (uint64_t) a->to.heads * LK_I8_DIM;

        return check_keys_i8(&a->to) && check_rows(a->k, a->type, a->to.n, width, a->k_ld) &&
               check_rows(a->v, a->type, a->to.n, width, a->v_ld);
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

/* What start says is the caller's knowledge. */
static inline bool check_blocks(const LkBlocks *b) {
        return b->n > 0 && b->n < UINT32_MAX / LK_BLOCK_ROWS && b->start;
}

/* [blocks, heads, head_dim] of f32, which every number below can count. */
static inline bool check_means(const float *mean, uint32_t n, uint32_t heads, uint32_t head_dim) {
        return check_rows(mean, LK_F32, n, (uint64_t) heads * head_dim, (uint64_t) heads * head_dim);
}

static inline bool check_block_means(const LkBlockMeans *a) {
        uint64_t width = (uint64_t) a->heads * a->head_dim;

        return check_blocks(&a->blocks) && check_rows(a->x, a->type, a->blocks.n, width, a->x_ld) &&
               check_means(a->mean, a->blocks.n, a->heads, a->head_dim) &&
               (!a->centre || check_rows(a->centre, LK_F32, 2, width, width));
}

/* [heads, n_q, n] numbers of four bytes. */
static inline bool check_lists(const void *p, uint32_t heads, uint32_t n_q, uint32_t n) {
        uint64_t rows = (uint64_t) heads * n_q;

        return check_rows(p, LK_F32, rows, n, n);
}

/* Keys of more blocks than a list has numbers for: no lists. */
static inline bool check_lists_i8(const LkAttentionI8 *a) {
        const uint64_t n = lk_i8_blocks(a->keys.n);
        const uint64_t first = (uint64_t) a->first_block * LK_BLOCK_ROWS;

        return n <= UINT32_MAX && a->first_block <= n && a->n_blocks <= n - a->first_block && a->first_row >= first &&
               a->first_row <= INT64_MAX && a->n_q <= INT64_MAX &&
               a->first_row + a->n_q <= first + (uint64_t) a->n_blocks * LK_BLOCK_ROWS &&
               check_lists(a->list, a->keys.heads, a->n_blocks, (uint32_t) n) && check_lists(a->count, a->keys.heads, a->n_blocks, 1);
}

static inline bool check_attention_i8(const LkAttentionI8 *a) {
        return a->scale > 0 && a->scale <= FLT_MAX && check_keys_i8(&a->keys) &&
               check_queries_i8(a->q, a->q_scale, a->n_q, a->keys.heads, a->q_ld) &&
               check_rows(a->o, a->o_type, a->n_q, (uint64_t) a->keys.heads * LK_I8_DIM, a->o_ld) &&
               (!a->list || check_lists_i8(a));
}

static inline bool check_route(const LkRoute *a) {
        uint64_t width = (uint64_t) a->heads * a->head_dim;

        return a->n > 0 && a->first <= a->n && a->n_q <= a->n - a->first && check_means(a->q, a->n, a->heads, a->head_dim) &&
               check_means(a->k, a->n, a->heads, a->head_dim) &&
               (a->by_rank || check_rows(a->variance, LK_F32, 1, width, width)) &&
               check_lists(a->list, a->heads, a->n_q, a->n) && check_lists(a->score, a->heads, a->n_q, a->n) &&
               check_lists(a->count, a->heads, a->n_q, 1);
}

static inline bool check_sparse_attention(const LkSparseAttention *a) {
        uint64_t width = (uint64_t) a->a.heads * a->a.head_dim;
        uint32_t n = a->blocks.n;

        return check_activation_type(a->a.type) && check_blocks(&a->blocks) && !a->a.causal && a->a.kv_heads == 0 &&
               a->a.sequences <= 1 && a->first_block <= n &&
               a->n_blocks <= n - a->first_block && a->a.n_q <= (uint64_t) a->n_blocks * LK_BLOCK_ROWS &&
               a->a.first_row <= INT64_MAX && check_lists(a->list, a->a.heads, a->n_blocks, n) &&
               check_lists(a->score, a->a.heads, a->n_blocks, n) && check_lists(a->count, a->a.heads, a->n_blocks, 1) &&
               (!a->value || (check_means(a->value, n, a->a.heads, a->a.head_dim) &&
                                     check_rows(a->centre, LK_F32, 1, width, width))) &&
               (!a->gate || (check_rows(a->gate, a->a.type, a->a.n_q, width, a->gate_ld) &&
                                    check_means(a->coarse, n, a->a.heads, a->a.head_dim)));
}
