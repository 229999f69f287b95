/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "service/h3/text-private.h"
#include "service/shared/cleanup.h"

/* Products that ranks split, and what they have in common. */

#define PRODUCT_ROWS 4096u             /* at a time: many rows of the weights' panels each */
#define ATTENTION_WORK (UINT64_C(1) << 29) /* products at a time: some hundredths of a second of one processor */
#define ATTENTION_ROWS 8u

static int product_piece(
        const TextRun *run, const LkGemm *all, uint64_t begin, uint64_t n) {
        LkGemm args = *all;

        args.m = n;
        args.x = (const uint8_t *) all->x + begin * all->x_ld * lk_type_size(all->x_type);
        args.y = (uint8_t *) all->y + begin * all->y_ld * lk_type_size(all->y_type);
        return run->ops->gemm(run->context, &args);
}

int text_product(const TextRun *run, uint64_t n, TextRows x, const LkMatrix *w, const LkVector *bias,
        H3Range rows, TextRows y) {
        LkGemm args = {
                .x = x.data,
                .x_type = x.type,
                .x_ld = x.ld,
                .y = y.data,
                .y_type = y.type,
                .y_ld = y.ld,
        };
        int r = 0;

        if (n == 0 || h3_range_size(rows) == 0)
                return 0;
        args.w = lk_matrix_rows(w, rows.begin, h3_range_size(rows));
        if (bias)
                args.bias = (LkVector){
                        .data = (const uint8_t *) bias->data + rows.begin * lk_type_size(bias->type),
                        .type = bias->type,
                        .n = h3_range_size(rows),
                };
        for (uint64_t begin = 0; r >= 0 && begin < n; begin += PRODUCT_ROWS) {
                if (begin > 0)
                        r = text_ask(run);
                if (r >= 0)
                        r = product_piece(run, &args, begin, n - begin < PRODUCT_ROWS ? n - begin : PRODUCT_ROWS);
        }
        return r;
}

int text_attention(const TextRun *run, const LkAttention *args) {
        uint64_t rows = ATTENTION_WORK / args->n_k / (args->heads * args->head_dim), size = lk_type_size(args->type);
        int r = 0;

        rows = rows < ATTENTION_ROWS ? ATTENTION_ROWS : rows / ATTENTION_ROWS * ATTENTION_ROWS;
        if (!run->ops->stop_when) /* every operation is soon done, and small ones leave most of a device idle */
                rows = args->n_q;
        for (uint64_t begin = 0; r >= 0 && begin < args->n_q && rows > 0; begin += rows) {
                LkAttention piece = *args;

                piece.n_q = args->n_q - begin < rows ? args->n_q - begin : rows;
                piece.first_row = args->first_row + begin;
                piece.q = (const uint8_t *) args->q + begin * args->q_ld * size;
                piece.o = (uint8_t *) args->o + begin * args->o_ld * size;
                if (begin > 0)
                        r = text_ask(run);
                if (r >= 0)
                        r = run->ops->attention(run->context, &piece);
        }
        return r;
}

/* The columns that a rank has made. */
static H3View part_of(
        const TextRun *run, uint64_t n, TextRows y, uint64_t units, uint64_t width, uint32_t rank) {
        H3Range part = text_part(units, run->ranks, rank);
        uint64_t size = lk_type_size(y.type);

        return (H3View){
                .data = text_column(y, part.begin * width).data,
                .rows = n,
                .width = h3_range_size(part) * width * size,
                .stride = y.ld * size,
        };
}

int text_gather(TextRun *run, uint64_t n, TextRows y, uint64_t units, uint64_t width) {
        H3Exchange *e = run->rank->exchange;
        int r = 0;

        /* Own part first, then the others from the right neighbour on, so that not all read one at a time.
         */
        for (uint32_t i = 0; r >= 0 && run->ranks > 1 && i < run->ranks; i++) {
                uint32_t from = (run->self + i) % run->ranks;
                H3View view = part_of(run, n, y, units, width, from);
                const H3Message message = {
                        .phase = H3_PHASE_IN,
                        .from = from,
                        .to = H3_TO_ALL,
                        .sequence = run->sequence[from] + 1,
                };

                if (n == 0 || view.width == 0)
                        continue;
                r = from == run->self ? e->send(e, run->rank, &message, &view, 1)
                                      : e->recv(e, run->rank, &message, &view, 1);
                run->sequence[from]++;
        }
        return r;
}

int text_linear(TextRun *run, uint64_t n, TextRows x, const LkMatrix *w, const LkVector *bias,
        LkFunction function, TextRows y) {
        H3Range own = text_own(run, w->rows);
        TextRows part = text_column(y, own.begin);
        const LkActivate args = {
                .type = run->type,
                .function = function,
                .m = n,
                .n = h3_range_size(own),
                .x = part.data,
                .x_ld = y.ld,
                .y = part.data,
                .y_ld = y.ld,
        };
        int r;

        r = text_product(run, n, x, w, bias, own, part);
        if (r >= 0 && function && args.n > 0)
                r = run->ops->activate(run->context, &args);
        return r < 0 ? r : text_gather(run, n, y, w->rows, 1);
}

int text_add(const TextRun *run, uint64_t n, uint64_t columns, TextRows x, TextRows y) {
        const LkResidual args = {
                .type = run->type,
                .m = n,
                .n = columns,
                .x = x.data,
                .x_ld = x.ld,
                .y = y.data,
                .y_ld = y.ld,
        };

        return run->ops->residual(run->context, &args);
}

int text_ask(const TextRun *run) {
        if (!run->hooks || !run->hooks->on_block)
                return 0;
        return run->hooks->on_block(run->hooks->userdata, run->done, run->total);
}

int text_block_done(TextRun *run) {
        int r;

        r = h3_part_pace(run->rank, run->done++);
        return r < 0 ? r : text_ask(run);
}

int text_tap(const TextRun *run, const char *name, uint32_t number, const void *x, uint64_t rows,
        uint64_t columns) {
        CLEANUP_FREE float *values = NULL;
        uint64_t n = rows * columns;
        char full[64];
        int r;

        if (!run->hooks || !run->hooks->on_tap || n == 0)
                return 0;
        values = malloc(n * sizeof(float));
        if (!values)
                return -ENOMEM;
        r = run->ops->download(run->context, values, x, n * run->element);
        if (r < 0)
                return r;
        if (run->type ==
                LK_BF16) /* widened in place from the end: element i is read before it is overwritten */
                for (uint64_t i = n; i-- > 0;) {
                        uint16_t half;
                        uint32_t bits;

                        memcpy(&half, (const uint8_t *) values + 2 * i, sizeof(half));
                        bits = (uint32_t) half << 16;
                        memcpy(values + i, &bits, sizeof(bits));
                }
        (void) snprintf(full, sizeof(full), "%s.%u", name, number);
        run->hooks->on_tap(run->hooks->userdata, full, values, rows, columns);
        return 0;
}
