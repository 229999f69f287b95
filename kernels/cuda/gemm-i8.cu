/* SPDX-License-Identifier: Apache-2.0 */
/* int8: kernels/cpu/gemm-i8.c, the same bits. Hopper has a kernel of its own, which makes products beside each other in one launch. Elsewhere the
 * library leaves int32 sums of some rows in scratch memory, and a pass makes y of them; what neither takes goes to the kernel that every card
 * has. Sums are exact, so neither choice nor cuts show. */

#include "kernels/cpu/check.h"
#include "kernels/cuda/product.cuh"

static bool library_takes(const LkGemmI8 *a) {
        return a->w.cols % 16 == 0 && a->w.rows % 16 == 0 && is_aligned(a->x, a->x_ld) && is_aligned(a->w.data, 0) && is_dense(&a->w);
}

static int library_rows(LkContext *c, const LkGemmI8 *a, const Columns *columns, uint64_t begin, uint64_t n, void *sums) {
        const LtProduct product = { n, a->w.rows, a->w.cols, LK_I8, a->x + begin * a->x_ld, a->x_ld, a->w.data, sums, LK_F32, a->w.rows, NULL };
        const Emit emit = { n, a->w.rows, sums, EMIT_I32, a->w.rows, a->x_scale + begin, *columns,
                (uint8_t *) a->y + begin * a->y_ld * lk_type_size(a->y_type), a->y_type, a->y_ld };
        int r = lt_run_i8(c->product->lt, c->stream, &product);

        return r < 0 ? r : product_emit(c->stream, &emit);
}

/* -EOPNOTSUPP: no library, or it has nothing for this. */
static int library_piece(LkContext *c, const LkGemmI8 *a, const Columns *columns) {
        const CudaProduct *p = c->product;
        Scratch s = scratch_begin(p);
        uint64_t rows = at_most(at_most(p->i8_rows, s.left / (a->w.rows * sizeof(int32_t))), LAUNCH_MAX / (a->x_ld > a->w.rows ? a->x_ld : a->w.rows));
        int r = 0;

        rows = rows / PIECE_ROWS * PIECE_ROWS;
        if (rows == 0 || !library_takes(a) || !library_i8(c))
                return -EOPNOTSUPP;

        for (uint64_t begin = 0; r >= 0 && begin < a->m; begin += rows)
                r = library_rows(c, a, columns, begin, at_most(rows, a->m - begin), s.at);
        return r;
}

/* The first kernel that takes it. */
static int columns_piece(LkContext *c, const LkGemmI8 *a) {
        MmaProduct product = { a->m, a->x, a->x_ld, a->w, a->x_scale, {}, a->y, a->y_type, a->y_ld };
        int r;

        r = expand_columns(c->product, c->stream, &a->w, &a->bias, true, false, &product.columns);
        if (r < 0)
                return r;
        r = -EOPNOTSUPP;
#ifdef LK_CUDA_SM90
        if (hopper_i8(c))
                r = product_i8_sm90(c, &product, 1);
#endif
        if (r == -EOPNOTSUPP)
                r = library_piece(c, a, &product.columns);
        return r == -EOPNOTSUPP ? product_mma(c->stream, &product) : r;
}

static int gemm_i8_one(LkContext *c, const LkGemmI8 *a) {
        uint64_t step = COLUMNS_MAX;
        int r = 0;

        if (a->m == 0 || a->w.rows == 0)
                return 0;

        if (a->w.rows > step && a->w.block_rows < a->w.rows)
                step = step / a->w.block_rows * a->w.block_rows;
        if (step == 0)
                return -EINVAL;
        for (uint64_t begin = 0; r >= 0 && begin < a->w.rows; begin += step) {
                uint64_t n = at_most(step, a->w.rows - begin);
                LkGemmI8 part = *a;

                part.w = lk_matrix_rows(&a->w, begin, n);
                part.y = (uint8_t *) a->y + begin * lk_type_size(a->y_type);
                part.bias = bias_part(&a->bias, begin, n);
                r = columns_piece(c, &part);
        }
        return r;
}

#ifdef LK_CUDA_SM90
/* Factors that need not be gathered: they lie behind each other. */
static bool direct_columns(const LkGemmI8 *a, Columns *ret) {
        const LkQuant *q = &a->w.quant;
        const uint8_t *scale = (const uint8_t *) q->scale + q->first_row * sizeof(float);

        if (a->bias.data || q->scale_stride != sizeof(float) || !is_dense(&a->w))
                return false;
        *ret = { (const float *) scale, NULL, NULL };
        return true;
}

static bool same_rows(const LkGemmI8 *a, const LkGemmI8 *b) {
        return a->m == b->m && a->x == b->x && a->x_ld == b->x_ld && a->x_scale == b->x_scale && a->w.cols == b->w.cols;
}

/* a and as many of those beside it as go into one launch; `ret_rest` are the others. */
static int hopper_run(LkContext *c, const LkGemmI8 *a, const LkGemmI8 **ret_rest) {
        MmaProduct products[I8_TOGETHER];
        const LkGemmI8 *p = a;
        Columns columns;
        uint32_t n = 0;
        int r;

        for (; p && n < I8_TOGETHER && same_rows(a, p) && direct_columns(p, &columns); p = p->beside)
                products[n++] = { p->m, p->x, p->x_ld, p->w, p->x_scale, columns, p->y, p->y_type, p->y_ld };
        r = n == 0 || a->m == 0 || !hopper_i8(c) ? -EOPNOTSUPP : product_i8_sm90(c, products, n);
        if (r != -EOPNOTSUPP)
                *ret_rest = p;
        return r;
}
#endif

/* The first of them, or more. */
static int gemm_i8_some(LkContext *c, const LkGemmI8 *a, const LkGemmI8 **ret_rest) {
#ifdef LK_CUDA_SM90
        int r = hopper_run(c, a, ret_rest);

        if (r != -EOPNOTSUPP)
                return r;
#endif
        *ret_rest = a->beside;
        return gemm_i8_one(c, a);
}

extern "C" int lk_cuda_gemm_i8(LkContext *c, const LkGemmI8 *a) {
        int r = 0;

        if (!c || !a || !check_gemm_i8(a))
                return -EINVAL;
        while (r >= 0 && a)
                r = gemm_i8_some(c, a, &a);
        return r;
}
