/* SPDX-License-Identifier: Apache-2.0 */
/* Products of bf16 rows with numbers of bf16, or that are expanded to it, and those of f16, go to the multiply instructions: by a library's algorithm that is pinned to the
 * layer, or by an own kernel. All others are chains of fma with the CPU's bits. Which way a product goes depends on its layer alone (types,
 * k, layer_rows, whether there is a bias), never on the rows or columns of a call.
 *
 * A library's sums are finished by an own pass where there is a bias. */

#include "kernels/cpu/check.h"
#include "kernels/cuda/product.cuh"

#define PIECE_COLUMNS UINT64_C(65536)

/* Some columns of a product: w is dense bf16 or f16, y its first column. */
typedef struct Piece {
        const LkGemm *g;
        const LayerPin *pin;
        LkType type; /* of x, w and y */
        LkMatrix w;
        uint64_t cols; /* that y wants; w.rows may be more */
        Columns columns;
        uint8_t *y;
        bool finished;    /* the library's output is y's, no pass behind it */
        bool whole_tiles; /* rows are padded to whole tiles */
        Scratch scratch;
} Piece;

static int expand(cudaStream_t stream, LkType type, const LkMatrix *w, uint64_t padded_rows, void *y) {
        return type == LK_F16 ? expand_f16(stream, w, padded_rows, y) : expand_bf16(stream, w, padded_rows, y);
}

/* Rows [begin, begin + n) by the library: x is copied first where it is not aligned, y comes through scratch memory where it is not or is
 * not finished. */
static int library_rows(LkContext *c, const Piece *p, uint64_t begin, uint64_t n) {
        const LkGemm *g = p->g;
        const uint8_t *x = (const uint8_t *) g->x + begin * g->x_ld * 2;
        uint8_t *y = p->y + begin * g->y_ld * 2;
        bool direct = p->finished && !p->whole_tiles && p->cols == p->w.rows && is_aligned(y, g->y_ld * 2);
        bool packed = p->whole_tiles || !is_aligned(x, g->x_ld * 2);
        LtProduct product = { p->whole_tiles ? round_up(n, PIECE_ROWS) : n, p->w.rows, p->w.cols, p->type, x, g->x_ld, p->w.data, y,
                p->finished ? p->type : LK_F32, g->y_ld, p->columns.half_bias };
        Scratch s = p->scratch;
        int r = 0;

        if (packed) {
                LkMatrix rows = dense_matrix(x, p->type, n, p->w.cols);
                void *to = scratch_take(&s, product.m * product.k * 2);

                if (!to)
                        return -ENOMEM;
                rows.row_stride = g->x_ld * 2;
                r = expand(c->stream, p->type, &rows, product.m, to);
                product.x = to;
                product.x_ld = product.k;
        }
        if (!direct) {
                product.y = scratch_take(&s, product.m * product.n * lk_type_size(product.y_type));
                product.y_ld = product.n;
                if (!product.y)
                        return -ENOMEM;
        }
        if (r >= 0)
                r = lt_run(c->product->lt, c->stream, n <= FEW_ROWS && p->pin->few ? &p->pin->small : &p->pin->large, &product);
        if (r >= 0 && !direct) {
                const EmitType type = p->type == LK_F16 ? EMIT_F16 : p->finished ? EMIT_BF16 : EMIT_F32;
                const Columns columns = p->type == LK_F16 ? (Columns) {} : p->columns;
                const Emit emit = { n, p->cols, product.y, type, product.y_ld, NULL, columns, y, p->type, g->y_ld };

                r = product_emit(c->stream, &emit);
        }
        return r;
}

static int library_piece(LkContext *c, Piece *p) {
        const LkGemm *g = p->g;
        uint64_t k = p->w.cols, n = p->w.rows, widest = n > k ? n : k, rows, room = p->scratch.left;
        int r = 0;

        widest = widest > g->x_ld ? widest : g->x_ld;
        widest = widest > g->y_ld ? widest : g->y_ld;
        rows = LAUNCH_MAX / widest;
        /* As if both ways through scratch memory were needed, when one is: rare but for layers with a bias. */
        if (!p->finished || p->cols != n || !is_aligned(p->y, g->y_ld * 2) || !is_aligned(g->x, g->x_ld * 2))
                rows = at_most(rows, room / (n * 4 + (is_aligned(g->x, g->x_ld * 2) ? 0 : k * 2)));
        rows = rows / PIECE_ROWS * PIECE_ROWS;
        if (rows == 0)
                return -ENOMEM;

        for (uint64_t begin = 0; r >= 0 && begin < g->m; begin += rows) {
                r = library_rows(c, p, begin, at_most(rows, g->m - begin));
                if (r == -EOPNOTSUPP && !p->whole_tiles) {
                        /* Another algorithm would be another answer: the same one, with more rows. */
                        p->whole_tiles = true;
                        rows = at_most(rows, room / (n * 4 + k * 2) / PIECE_ROWS * PIECE_ROWS);
                        r = rows == 0 ? -ENOMEM : library_rows(c, p, begin, at_most(rows, g->m - begin));
                }
        }
        return r;
}

static int own_piece(LkContext *c, const Piece *p) {
        const LkGemm *g = p->g;
        const MmaProduct product = { g->m, g->x, g->x_ld, p->w, NULL, p->columns, p->y, p->type, g->y_ld };

        return product_mma(c->stream, &product);
}

/* Columns at a time, so that w's copy and the columns' factors fit: whole blocks of w. */
static uint64_t piece_columns(const LkMatrix *w, uint64_t room, uint64_t row_size) {
        uint64_t step = w->block_rows < w->rows ? w->block_rows : PIECE_ROWS, n = at_most(PIECE_COLUMNS, room / row_size);

        return w->rows <= n ? w->rows : n / step * step;
}

/* Columns [begin, begin + n) by the multiply instructions. */
static int multiply_columns(LkContext *c, const LkGemm *g, const LayerPin *pin, bool expands, uint64_t begin, uint64_t n) {
        const CudaProduct *p = c->product;
        LkVector bias = bias_part(&g->bias, begin, n);
        LkMatrix w = lk_matrix_rows(&g->w, begin, n);
        Piece piece = {};
        int r;

        piece.g = g;
        piece.pin = pin;
        piece.type = g->x_type;
        piece.cols = n;
        piece.y = (uint8_t *) g->y + begin * 2;
        piece.scratch = scratch_begin(p);
        piece.w = w;
        r = expand_columns(p, c->stream, &w, &bias, false, g->x_type == LK_F16, &piece.columns);
        if (r >= 0 && expands) {
                uint64_t rows = pin->own ? n : round_up(n, 8);
                void *to = scratch_take(&piece.scratch, rows * w.cols * 2);

                if (!to)
                        return -ENOMEM;
                r = expand(c->stream, piece.type, &w, rows, to);
                piece.w = dense_matrix(to, piece.type, rows, w.cols);
        }
        piece.finished = piece.type == LK_F16 || !piece.columns.bias;
        if (r < 0)
                return r;
        return pin->own ? own_piece(c, &piece) : library_piece(c, &piece);
}

static int gemm_multiply(LkContext *c, const LkGemm *g) {
        uint64_t k = g->w.cols, layer_rows = g->w.layer_rows > 0 ? g->w.layer_rows : g->w.rows, step;
        const LayerPin *pin;
        bool half = g->x_type == LK_F16, expands;
        int r;

        r = layer_pin(c, k, layer_rows, half ? LK_F16 : g->bias.data ? LK_F32 : LK_BF16, half && g->bias.data, &pin);
        if (r < 0)
                return r;

        expands = (half ? g->w.type != LK_F16 : g->w.type >= LK_I8) || (!pin->own && (!is_dense(&g->w) || !is_aligned(g->w.data, 0) || g->w.rows % 8 != 0));
        step = expands ? piece_columns(&g->w, scratch_begin(c->product).left / 2, k * 2) : at_most(g->w.rows, PIECE_COLUMNS);
        if (!expands && g->w.block_rows < g->w.rows && step < g->w.rows)
                step = step / g->w.block_rows * g->w.block_rows;
        if (step == 0)
                return -ENOMEM;
        for (uint64_t begin = 0; r >= 0 && begin < g->w.rows; begin += step)
                r = multiply_columns(c, g, pin, expands, begin, at_most(step, g->w.rows - begin));
        return r;
}

/* f32, a quantised w piece by piece. */
static int gemm_f32(LkContext *c, const LkGemm *g) {
        uint64_t k = g->w.cols, step;
        int r = 0;

        if (g->w.type < LK_I8)
                return product_f32(c->stream, g);

        step = piece_columns(&g->w, scratch_begin(c->product).left, k * sizeof(float));
        if (step == 0)
                return -ENOMEM;
        for (uint64_t begin = 0; r >= 0 && begin < g->w.rows; begin += step) {
                uint64_t n = at_most(step, g->w.rows - begin);
                LkMatrix w = lk_matrix_rows(&g->w, begin, n);
                Scratch s = scratch_begin(c->product);
                float *expanded = (float *) scratch_take(&s, n * k * sizeof(float));
                LkGemm part = *g;

                if (!expanded)
                        return -ENOMEM;
                part.w = dense_matrix(expanded, LK_F32, n, k);
                part.w.quant.in_scale = g->w.quant.in_scale;
                part.bias = bias_part(&g->bias, begin, n);
                part.y = (uint8_t *) g->y + begin * lk_type_size(g->y_type);
                r = expand_f32(c->stream, &w, expanded, k);
                if (r >= 0)
                        r = product_f32(c->stream, &part);
        }
        return r;
}

extern "C" int lk_cuda_gemm(LkContext *c, const LkGemm *a) {
        if (!c || !a || !check_gemm(a))
                return -EINVAL;
        if (a->m == 0 || a->w.rows == 0)
                return 0;

        if (a->x_type == LK_F16)
                return gemm_multiply(c, a);
        if (a->x_type == LK_BF16 && a->y_type == LK_BF16 && (a->w.type == LK_BF16 || a->w.type >= LK_I8))
                return gemm_multiply(c, a);
        return gemm_f32(c, a);
}
