/* SPDX-License-Identifier: Apache-2.0 */
/* int8: kernels/cpu/gemm-i8.c, the same bits. The library leaves int32 sums of some rows in scratch memory, and a pass makes y of them; what
 * the library does not take goes to an own kernel, which does both. Sums are exact, so neither choice nor cuts show. */

#include "kernels/cpu/check.h"
#include "kernels/cuda/product.cuh"

static int own(LkContext *c, const LkGemmI8 *a, const Columns *columns) {
        const MmaProduct product = { a->m, a->x, a->x_ld, a->w, a->x_scale, *columns, a->y, a->y_type, a->y_ld };

        return product_mma(c->stream, &product);
}

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

static int columns_piece(LkContext *c, const LkGemmI8 *a, bool library) {
        const CudaProduct *p = c->product;
        Scratch s = scratch_begin(p);
        uint64_t rows = at_most(at_most(p->i8_rows, s.left / (a->w.rows * sizeof(int32_t))), LAUNCH_MAX / (a->x_ld > a->w.rows ? a->x_ld : a->w.rows));
        Columns columns;
        int r;

        r = expand_columns(p, c->stream, &a->w, &a->bias, true, false, &columns);
        if (r < 0)
                return r;
        rows = rows / PIECE_ROWS * PIECE_ROWS;
        if (!library || rows == 0)
                return own(c, a, &columns);

        for (uint64_t begin = 0; r >= 0 && begin < a->m; begin += rows)
                r = library_rows(c, a, &columns, begin, at_most(rows, a->m - begin), s.at);
        return r == -EOPNOTSUPP ? own(c, a, &columns) : r;
}

extern "C" int lk_cuda_gemm_i8(LkContext *c, const LkGemmI8 *a) {
        uint64_t step = COLUMNS_MAX;
        bool library;
        int r = 0;

        if (!c || !a || !check_gemm_i8(a))
                return -EINVAL;
        if (a->m == 0 || a->w.rows == 0)
                return 0;

        library = library_takes(a) && library_i8(c);
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
                r = columns_piece(c, &part, library);
        }
        return r;
}
