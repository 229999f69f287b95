/* SPDX-License-Identifier: Apache-2.0 */
#include "service/h3/dit-private.h"

/* Products with weights. One of activations in bf16 with an int8 matrix is made in int8, piece by piece. */

/* Rows of x to int8, their product with w. up: NULL, or x is the gate and silu(x) * up goes in. */
typedef struct Int8Product {
        const uint8_t *x, *up;
        const LkMatrix *w;
        LkVector bias;
        uint8_t *y;
        LkType y_type;
        uint64_t y_ld;
} Int8Product;

static int int8_piece(const DitRun *run, const Int8Product *p, uint64_t begin, uint64_t n) {
        uint64_t x_at = begin * p->w->cols * run->element;
        const LkQuantise rows = {
                .x_type = run->type,
                .m = n,
                .k = p->w->cols,
                .x = p->x + x_at,
                .x_ld = p->w->cols,
                .up = p->up ? p->up + x_at : NULL,
                .up_ld = p->w->cols,
                .rotation = p->w->quant.rotation,
                .q = run->int8,
                .q_ld = p->w->cols,
                .scale = run->int8_scale,
        };
        const LkGemmI8 product = {
                .m = n,
                .x = run->int8,
                .x_ld = p->w->cols,
                .x_scale = run->int8_scale,
                .w = *p->w,
                .bias = p->bias,
                .y = p->y + begin * p->y_ld * lk_type_size(p->y_type),
                .y_type = p->y_type,
                .y_ld = p->y_ld,
        };
        int r;

        r = run->ops->quantise(run->context, &rows);
        return r < 0 ? r : run->ops->gemm_i8(run->context, &product);
}

static int int8_product(const DitRun *run, uint64_t m, const Int8Product *p) {
        int r = 0;

        for (uint64_t begin = 0; r >= 0 && begin < m; begin += run->piece_rows)
                r = int8_piece(run, p, begin, m - begin < run->piece_rows ? m - begin : run->piece_rows);
        return r;
}

static int product(const DitRun *run, const LkGemm *a) {
        const Int8Product p = {a->x, NULL, &a->w, a->bias, a->y, a->y_type, a->y_ld};

        if (a->m == 0)
                return 0;
        if (dit_is_int8(run, &a->w, a->x_type))
                return int8_product(run, a->m, &p);
        return run->ops->gemm(run->context, a);
}

int dit_gemm(const DitRun *run, uint64_t m, const void *x, LkType x_type, const LkMatrix *w,
        const LkVector *bias, void *y, LkType y_type) {
        const LkGemm args = {
                .m = m,
                .x = x,
                .x_type = x_type,
                .x_ld = w->cols,
                .w = *w,
                .bias = bias ? *bias : (LkVector){},
                .y = y,
                .y_type = y_type,
                .y_ld = w->rows,
        };

        return product(run, &args);
}

int dit_gemm_to(const DitRun *run, uint64_t m, const void *x, const LkMatrix *w, void *y, uint64_t y_ld) {
        const LkGemm args = {
                .m = m,
                .x = x,
                .x_type = run->type,
                .x_ld = w->cols,
                .w = *w,
                .y = y,
                .y_type = run->type,
                .y_ld = y_ld,
        };

        return product(run, &args);
}

int dit_int8_gemm_gated(
        const DitRun *run, uint64_t m, const void *gate, const void *up, const LkMatrix *w, void *y) {
        const Int8Product p = {gate, up, w, {}, y, run->type, w->rows};

        return int8_product(run, m, &p);
}
