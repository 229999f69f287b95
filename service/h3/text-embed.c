/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "service/h3/text-private.h"
#include "service/shared/cleanup.h"

/* Token rows. A prompt names a few of the table's rows: where a device cannot read the host's memory, those go there as the
 * file has them, so that they are expanded alike. */

#define TILE 128u /* rows of LK_NVFP4 whose block scales lie together */

static uint64_t min_of(uint64_t a, uint64_t b) {
        return a < b ? a : b;
}

uint64_t text_table_blocks(const LkMatrix *table, uint64_t n) {
        return table->quant.block_scale ? (n + TILE - 1) / TILE * TILE * table->quant.block_scale_cols : 0;
}

/* Where the block scales of a row begin inside the tile of columns 0 .. 3. */
static uint64_t blocks_at(const LkQuant *q, uint64_t row) {
        return row / TILE * TILE * q->block_scale_cols + row % 32 * 16 + row % TILE / 32 * 4;
}

static void copy_blocks(const LkQuant *from, uint64_t row, uint8_t *to, uint64_t i) {
        const uint8_t *source = (const uint8_t *) from->block_scale + blocks_at(from, row);

        to += blocks_at(from, i);
        for (uint64_t tile = 0; tile < from->block_scale_cols / 4; tile++)
                memcpy(to + tile * TILE * 4, source + tile * TILE * 4, 4);
}

/* The table's rows `ids`, side by side: as *ret says, on the device. */
static int upload_rows(const TextRun *run, const int32_t *ids, uint64_t n, LkMatrix *ret) {
        const LkMatrix *t = &run->m->embed;
        uint64_t row = lk_row_size(t->type, t->cols), blocks = text_table_blocks(t, n);
        CLEANUP_FREE uint8_t *rows = malloc(n * row), *tiles = calloc(blocks + 1, 1);
        CLEANUP_FREE float *scales = malloc(n * sizeof(float));
        uint64_t n_scales = !t->quant.scale ? 0 : t->quant.scale_stride > 0 ? n : 1;
        int r;

        if (!rows || !tiles || !scales)
                return -ENOMEM;
        for (uint64_t i = 0; i < n; i++) {
                uint64_t id = (uint64_t) ids[i];

                memcpy(rows + i * row, (const uint8_t *) t->data + id * t->row_stride, row);
                if (i < n_scales)
                        memcpy(scales + i, (const uint8_t *) t->quant.scale + (t->quant.first_row + id) * t->quant.scale_stride,
                                sizeof(float));
                if (blocks > 0)
                        copy_blocks(&t->quant, t->quant.first_row + id, tiles, i);
        }
        r = run->ops->upload(run->context, run->table, rows, n * row);
        if (r >= 0 && n_scales > 0)
                r = run->ops->upload(run->context, run->table_scale, scales, n_scales * sizeof(float));
        if (r >= 0 && blocks > 0)
                r = run->ops->upload(run->context, run->table_blocks, tiles, blocks);

        *ret = *t;
        ret->data = run->table;
        ret->rows = ret->block_rows = n;
        ret->row_stride = row;
        ret->block_stride = n * row;
        ret->layer_rows = t->rows;
        ret->quant.first_row = 0;
        ret->quant.scale = n_scales > 0 ? run->table_scale : NULL;
        ret->quant.scale_stride = n_scales > 1 || t->quant.scale_stride > 0 ? sizeof(float) : 0;
        ret->quant.block_scale = blocks > 0 ? run->table_blocks : NULL;
        return r;
}

/* io = the table's rows `ids`, in f32. */
static int expand_rows(const TextRun *run, const int32_t *ids, uint64_t n) {
        uint64_t hidden = run->m->config.hidden;
        LkDequantise all = {.y = run->io, .y_ld = hidden};
        int r = 0;

        if (!run->ops->host_weights) {
                r = upload_rows(run, ids, n, &all.w);
                return r < 0 ? r : run->ops->dequantise(run->context, &all);
        }
        for (uint64_t i = 0; r >= 0 && i < n; i++) {
                const LkDequantise row = {
                        .w = lk_matrix_rows(&run->m->embed, (uint64_t) ids[i], 1),
                        .y = run->io + i * hidden,
                        .y_ld = hidden,
                };

                r = run->ops->dequantise(run->context, &row);
        }
        return r;
}

int text_embed(const TextRun *run, const H3TextInput *in, uint64_t begin, uint64_t end) {
        uint64_t hidden = run->m->config.hidden;
        int r = 0;

        while (r >= 0 && begin < end) {
                uint64_t n = min_of(end - begin, TEXT_PIECE_ROWS);
                const LkConvert rows = {
                        .m = n,
                        .n = hidden,
                        .x = run->io,
                        .x_type = LK_F32,
                        .x_ld = hidden,
                        .y = text_at(text_rows(run, run->x, hidden), begin).data,
                        .y_type = run->type,
                        .y_ld = hidden,
                };

                r = expand_rows(run, in->ids + begin, n);
                if (r >= 0)
                        r = run->ops->convert(run->context, &rows);
                begin += n;
        }
        return r;
}
