/* SPDX-License-Identifier: Apache-2.0 */
#include "service/h3/vision.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "service/h3/number.h"
#include "service/h3/text-private.h"
#include "service/shared/cleanup.h"
#include "service/shared/fmath.h"

static uint64_t min_of(uint64_t a, uint64_t b) {
        return a < b ? a : b;
}

void h3_vision_place(uint64_t grid_width, uint64_t i, uint64_t *ret_row, uint64_t *ret_column) {
        uint64_t token = i / 4, tokens = grid_width / 2;

        *ret_row = token / tokens * 2 + i % 4 / 2;
        *ret_column = token % tokens * 2 + i % 2;
}

/* The two lines of the table beside a place, and how much of each. */
typedef struct Between {
        uint64_t line[2];
        float weight[2];
} Between;

static Between between(uint64_t i, uint64_t n, uint64_t grid) {
        float at = (float) i * (float) (grid - 1) / (float) (n > 1 ? n - 1 : 1), whole = floorf(at);
        uint64_t line = (uint64_t) whole;
        float rest = at - whole;

        return (Between){{line, min_of(line + 1, grid - 1)}, {1 - rest, 1 - (1 - rest)}};
}

/* sum = (or +=) row `at` of the table times weight. A picture has millions of them: a loop for each type. */
static void add_corner(const LkVector *table, uint64_t at, float weight, bool first, uint64_t n, float *sum) {
        const uint8_t *row = (const uint8_t *) table->data + at * n * lk_type_size(table->type);

        for (uint64_t k = 0; first && k < n; k++)
                sum[k] = h3_number(row, table->type, k) * weight;
        for (uint64_t k = 0; !first && table->type == LK_BF16 && k < n; k++)
                sum[k] = sum[k] + h3_number(row, LK_BF16, k) * weight;
        for (uint64_t k = 0; !first && table->type != LK_BF16 && k < n; k++)
                sum[k] = sum[k] + h3_number(row, table->type, k) * weight;
}

void h3_vision_positions(const H3TextModel *m, uint64_t grid_height, uint64_t grid_width, float *ret) {
        const H3VisionConfig *c = &m->config.vision;

        for (uint64_t i = 0; i < grid_height * grid_width; i++) {
                uint64_t row, column;
                Between y, x;

                h3_vision_place(grid_width, i, &row, &column);
                y = between(row, grid_height, c->grid);
                x = between(column, grid_width, c->grid);
                for (uint32_t corner = 0; corner < 4; corner++)
                        add_corner(&m->positions, y.line[corner / 2] * c->grid + x.line[corner % 2],
                                y.weight[corner / 2] * x.weight[corner % 2], corner == 0, c->hidden, ret + i * c->hidden);
        }
}

void h3_vision_rope(
        const H3VisionConfig *c, uint64_t grid_height, uint64_t grid_width, float *ret_cos, float *ret_sin) {
        uint32_t freqs = c->head_dim / 4;
        float inverse[64];

        for (uint32_t k = 0; k < freqs; k++) { /* torch: a power in f32, then its reciprocal in f32 */
                double power = fmath_exp(fmath_log((double) c->theta) * k / freqs);

                inverse[k] = 1.0f / (float) power;
        }
        for (uint64_t i = 0; i < grid_height * grid_width; i++) {
                uint64_t place[2];

                h3_vision_place(grid_width, i, place, place + 1);
                for (uint32_t k = 0; k < 2 * freqs; k++) {
                        float angle = (float) place[k / freqs] * inverse[k % freqs];

                        *ret_cos++ = (float) fmath_cos((double) angle);
                        *ret_sin++ = (float) fmath_sin((double) angle);
                }
        }
}

static int upload_rope(const TextRun *run, const H3VisionInput *in) {
        const H3VisionConfig *c = &run->m->config.vision;
        uint64_t n = in->grid_height * in->grid_width * (c->head_dim / 2);
        CLEANUP_FREE float *table = malloc(2 * n * sizeof(float));
        int r;

        if (!table)
                return -ENOMEM;
        h3_vision_rope(c, in->grid_height, in->grid_width, table, table + n);
        r = run->ops->upload(run->context, run->vcos, table, n * sizeof(float));
        return r < 0 ? r : run->ops->upload(run->context, run->vsin, table + n, n * sizeof(float));
}

/* vx: patches through their projection, plus where they stand. */
static int embed(TextRun *run, const H3VisionInput *in, uint64_t n) {
        const H3VisionConfig *c = &run->m->config.vision;
        CLEANUP_FREE float *positions = malloc(n * c->hidden * sizeof(float));
        TextRows x = text_rows(run, run->vx, c->hidden), y = text_rows(run, run->vy, c->hidden);
        const LkConvert rows = {
                .m = n,
                .n = c->hidden,
                .x = run->patches,
                .x_type = LK_F32,
                .x_ld = c->hidden,
                .y = run->vy,
                .y_type = run->type,
                .y_ld = c->hidden,
        };
        const H3TextModel *m;
        int r;

        if (!positions)
                return -ENOMEM;
        r = run->ops->upload(run->context, run->patches, in->patches, n * c->patch * sizeof(float));
        if (r >= 0)
                r = text_take(run, H3_PART_IN, 0, &m);
        if (r < 0)
                return r;
        r = text_linear(run, n, (TextRows){run->patches, LK_F32, c->patch}, &m->patch.w, &m->patch.bias, 0, x);
        text_give(run, H3_PART_IN, 0);
        if (r < 0)
                return r;
        h3_vision_positions(run->m, in->grid_height, in->grid_width, positions);
        r = run->ops->upload(run->context, run->patches, positions, n * c->hidden * sizeof(float));
        if (r >= 0)
                r = run->ops->convert(run->context, &rows);
        return r < 0 ? r : text_add(run, n, c->hidden, x, y);
}

/* vh = the norm of vx, of rows of n columns. */
static int norm(const TextRun *run, const H3LayerNorm *w, uint64_t m, uint64_t n) {
        const LkLayerNorm args = {
                .type = run->type,
                .m = m,
                .n = n,
                .x = run->vx,
                .x_ld = n,
                .weight = w->weight,
                .bias = w->bias,
                .eps = run->m->config.vision.eps,
                .y = run->vh,
                .y_ld = n,
        };

        return run->ops->layer_norm(run->context, &args);
}

static int rotate(const TextRun *run, uint64_t n, uint64_t heads, void *x) {
        const H3VisionConfig *c = &run->m->config.vision;
        const LkQkNormRope args = {
                .type = run->type,
                .m = n,
                .heads = (uint32_t) heads,
                .head_dim = c->head_dim,
                .x = x,
                .x_ld = heads * c->head_dim,
                .cos = run->vcos,
                .sin = run->vsin,
                .rope_dims = c->head_dim / 2,
        };

        return run->ops->qk_norm_rope(run->context, &args);
}

/* vo of own heads from vh. */
static int attend(const TextRun *run, const H3VisionBlockWeights *w, uint64_t n) {
        const H3VisionConfig *c = &run->m->config.vision;
        H3Range heads = text_own(run, c->heads);
        uint64_t own = h3_range_size(heads) * c->head_dim, first = heads.begin * c->head_dim;
        void *to[] = {run->vq, run->vk, run->vv};
        const LkAttention args = {
                .type = run->type,
                .n_q = n,
                .n_k = n,
                .heads = (uint32_t) h3_range_size(heads),
                .head_dim = c->head_dim,
                .scale = 1.0f / sqrtf((float) c->head_dim),
                .q = run->vq,
                .k = run->vk,
                .v = run->vv,
                .o = text_column(text_rows(run, run->vo, c->hidden), first).data,
                .q_ld = own,
                .k_ld = own,
                .v_ld = own,
                .o_ld = c->hidden,
        };
        int r = 0;

        if (own == 0)
                return 0;
        for (uint32_t i = 0; r >= 0 && i < 3; i++) {
                uint64_t at = (uint64_t) i * c->hidden + first;

                r = text_product(run, n, text_rows(run, run->vh, c->hidden), &w->qkv.w, &w->qkv.bias,
                        (H3Range){at, at + own}, text_rows(run, to[i], own));
        }
        if (r >= 0)
                r = rotate(run, n, h3_range_size(heads), run->vq);
        if (r >= 0)
                r = rotate(run, n, h3_range_size(heads), run->vk);
        return r < 0 ? r : text_attention(run, &args);
}

static int block(TextRun *run, const H3VisionBlockWeights *w, uint64_t n) {
        const H3VisionConfig *c = &run->m->config.vision;
        TextRows x = text_rows(run, run->vx, c->hidden), h = text_rows(run, run->vh, c->hidden);
        TextRows y = text_rows(run, run->vy, c->hidden), o = text_rows(run, run->vo, c->hidden);
        TextRows act = text_rows(run, run->vact, c->ffn);
        int r;

        r = norm(run, &w->norm1, n, c->hidden);
        if (r >= 0)
                r = attend(run, w, n);
        if (r >= 0)
                r = text_gather(run, n, o, c->heads, c->head_dim);
        if (r >= 0)
                r = text_linear(run, n, o, &w->out.w, &w->out.bias, 0, y);
        if (r >= 0)
                r = text_add(run, n, c->hidden, x, y);

        if (r >= 0)
                r = norm(run, &w->norm2, n, c->hidden);
        for (uint64_t begin = 0; r >= 0 && begin < n; begin += TEXT_PIECE_ROWS) {
                uint64_t rows = min_of(n - begin, TEXT_PIECE_ROWS);

                r = text_linear(run, rows, text_at(h, begin), &w->fc1.w, &w->fc1.bias, LK_GELU_TANH, act);
                if (r >= 0)
                        r = text_linear(run, rows, act, &w->fc2.w, &w->fc2.bias, 0, text_at(y, begin));
        }
        return r < 0 ? r : text_add(run, n, c->hidden, x, y);
}

/* y[merged tokens, text hidden] from vx: the main merger norms patches, the others merged tokens. */
static int merge(TextRun *run, const H3Merger *w, bool main, uint64_t n, TextRows y) {
        const H3VisionConfig *c = &run->m->config.vision;
        TextRows h = text_rows(run, run->vh, c->merged), inner = text_rows(run, run->vo, c->merged);
        int r;

        r = main ? norm(run, &w->norm, n, c->hidden) : norm(run, &w->norm, n / 4, c->merged);
        if (r >= 0)
                r = text_linear(run, n / 4, h, &w->fc1.w, &w->fc1.bias, LK_GELU, inner);
        return r < 0 ? r : text_linear(run, n / 4, inner, &w->fc2.w, &w->fc2.bias, 0, y);
}

static int blocks(TextRun *run, uint32_t i, uint64_t n, uint64_t merged) {
        const H3TextConfig *c = &run->m->config;
        const H3TextModel *m;
        uint32_t j = 0;
        int r = 0;

        for (uint32_t b = 0; r >= 0 && b < c->vision.depth; b++) {
                r = text_take(run, H3_PART_TOWER, b, &m);
                if (r < 0)
                        return r;
                r = block(run, m->blocks + b, n);
                if (r >= 0 && j < c->vision.n_deepstack && c->vision.deepstack[j] == b) {
                        TextRows y = text_at(text_rows(run, run->deepstack[j], c->hidden), merged);

                        r = merge(run, m->deepstack + j, false, n, y);
                        if (r >= 0)
                                r = text_tap(run, "vision.deepstack", i * H3_DEEPSTACK_MAX + j, y.data,
                                        n / 4, c->hidden);
                        j++;
                }
                text_give(run, H3_PART_TOWER, b);
                if (r >= 0)
                        r = text_block_done(run);
        }
        return r;
}

int vision_run(TextRun *run, const H3VisionInput *in, uint32_t i, uint64_t merged) {
        const H3TextConfig *c = &run->m->config;
        uint64_t n = in->grid_height * in->grid_width;
        TextRows y = text_at(text_rows(run, run->x, c->hidden), in->first_token);
        const H3TextModel *m;
        int r;

        r = upload_rope(run, in);
        if (r >= 0)
                r = embed(run, in, n);
        if (r >= 0)
                r = text_tap(run, "vision.embed", i, run->vx, n, c->vision.hidden);
        if (r >= 0)
                r = blocks(run, i, n, merged);
        if (r >= 0)
                r = text_tap(run, "vision.trunk", i, run->vx, n, c->vision.hidden);
        if (r >= 0)
                r = text_take(run, H3_PART_OUT, 0, &m);
        if (r < 0)
                return r;
        r = merge(run, &m->merger, true, n, y);
        text_give(run, H3_PART_OUT, 0);
        return r < 0 ? r : text_tap(run, "vision.merged", i, y.data, n / 4, c->hidden);
}
