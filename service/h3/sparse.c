/* SPDX-License-Identifier: Apache-2.0 */
#include "service/h3/sparse.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>

#include "service/shared/cleanup.h"

#define CUBE 4u

DEFINE_CLEANUP(H3Sparse *, h3_sparse_free)

H3Sparse *h3_sparse_free(H3Sparse *s) {
        if (!s)
                return NULL;
        free(s->start);
        free(s->order);
        free(s);
        return NULL;
}

bool h3_sparse_applies(const SparseOptions *o, uint64_t rows, float sigma_video) {
        float start, end;

        if (o->method == SPARSE_NONE || rows < o->min_tokens)
                return false;
        sparse_sigmas(o, &start, &end);
        return sigma_video >= end && sigma_video <= start;
}

uint32_t h3_sparse_keep(double percent, uint32_t scored) {
        double wanted = rint(percent / 100 * scored); /* half to even */

        if (scored <= 1)
                return 0;
        return wanted < 1 ? 1 : wanted > scored - 1 ? scored - 1 : (uint32_t) wanted;
}

uint32_t h3_sparse_block(const H3Sparse *s, uint64_t row) {
        uint32_t low = 0, high = s->n;

        while (high - low > 1) {
                uint32_t middle = low + (high - low) / 2;

                if (s->start[middle] <= row)
                        low = middle;
                else
                        high = middle;
        }
        return low;
}

static uint32_t blocks_of(uint64_t n, uint32_t size) {
        return (uint32_t) ((n + size - 1) / size);
}

/* Rows begin .. end in blocks of LK_BLOCK_ROWS. */
static void add_blocks(H3Sparse *s, uint64_t begin, uint64_t end) {
        for (uint64_t row = begin; row < end; row += LK_BLOCK_ROWS)
                s->start[s->n++] = (uint32_t) row;
        s->start[s->n] = (uint32_t) end;
}

/* A cube of the grid whose first patch is (t, h, w), behind the rows that are there. */
static void add_cube(H3Sparse *s, const uint64_t grid[3], uint64_t t, uint64_t h, uint64_t w, uint64_t begin) {
        uint64_t row = s->start[s->n];

        for (uint64_t a = t; a < t + CUBE && a < grid[0]; a++)
                for (uint64_t b = h; b < h + CUBE && b < grid[1]; b++)
                        for (uint64_t c = w; c < w + CUBE && c < grid[2]; c++)
                                s->order[row++] = begin + (a * grid[1] + b) * grid[2] + c;
        s->start[++s->n] = (uint32_t) row;
}

static void make_cubes(H3Sparse *s, const H3Layout *l, const uint64_t grid[3]) {
        uint64_t begin = h3_layout_video(l)->begin;

        for (uint64_t row = 0; row < begin; row++)
                s->order[row] = row;
        for (uint32_t i = 0; i + 1 < l->n_segments; i++)
                add_blocks(s, l->segments[i].begin, l->segments[i].end);
        s->sinks = s->dense_end = s->n;

        for (uint64_t t = 0; t < grid[0]; t += CUBE)
                for (uint64_t h = 0; h < grid[1]; h += CUBE)
                        for (uint64_t w = 0; w < grid[2]; w += CUBE)
                                add_cube(s, grid, t, h, w, begin);
}

static void make_rows(H3Sparse *s, const H3Layout *l) {
        uint32_t before = blocks_of(h3_layout_video(l)->begin, LK_BLOCK_ROWS);

        add_blocks(s, 0, l->rows);
        if (s->options.sinks == SPARSE_SINKS_OFF)
                return;
        s->sinks = before;
        if (s->options.sinks == SPARSE_SINKS_KV_AND_ROWS) {
                s->dense_begin = (uint32_t) (h3_layout_audio(l)->begin / LK_BLOCK_ROWS);
                s->dense_end = before;
        }
}

int h3_sparse_new(const H3Config *c, const H3Layout *l, const SparseOptions *o, H3Sparse **ret) {
        const H3Grid g = h3_shape_grid(&l->shape);
        const uint64_t grid[3] = {g.frames, h3_grid_rows_h(c, &g), h3_grid_rows_w(c, &g)};
        CLEANUP(h3_sparse_freep) H3Sparse *s = NULL;
        uint64_t blocks = 0;

        s = calloc(1, sizeof(*s));
        if (!s)
                return -ENOMEM;
        s->options = *o;
        s->rows = l->rows;
        if (o->method == SPARSE_VSA) {
                for (uint32_t i = 0; i + 1 < l->n_segments; i++)
                        blocks += blocks_of(l->segments[i].end - l->segments[i].begin, LK_BLOCK_ROWS);
                blocks += (uint64_t) blocks_of(grid[0], CUBE) * blocks_of(grid[1], CUBE) * blocks_of(grid[2], CUBE);
                s->order = malloc(l->rows * sizeof(*s->order));
        } else
                blocks = blocks_of(l->rows, LK_BLOCK_ROWS);
        s->start = calloc(blocks + 1, sizeof(*s->start));
        if (!s->start || (o->method == SPARSE_VSA && !s->order))
                return -ENOMEM;

        if (o->method == SPARSE_VSA)
                make_cubes(s, l, grid);
        else
                make_rows(s, l);
        if (o->method != SPARSE_SOL)
                s->keep = h3_sparse_keep((double) o->keep, s->n - s->sinks);
        *ret = STEAL_PTR(s);
        return 0;
}
