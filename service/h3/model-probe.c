/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "service/h3/model-private.h"
#include "service/h3/number.h"
#include "service/shared/cleanup.h"

/* Do the QKV rows of a file with original names lie in the order that was assumed? Names do not tell
 * (h3.md 1.2).
 *
 * In trained weights the rows of q, k and v differ in length: q and k are normalised afterwards and drift, v
 * is not. So the mean row length of each run of head_dim rows is looked at: in the right order the runs of
 * q, of k and of v are alike, and the three kinds explain much of the difference between runs; in the other
 * order each kind is a mix of all three and explains next to nothing. It is a hint, not a proof: random
 * weights, or kinds of equal length, show nothing in either order, and then nothing is said. */

#define LAYERS_LOOKED_AT 3u
#define ROWS_PER_HEAD 8u
#define COLUMNS 512u
#define EXPLAINS_MUCH 0.6 /* of the variance */
#define EXPLAINS_LITTLE 0.15

/* Length of part of a row, in the matrix's own numbers: a rotation does not change it. */
static double row_length(const LkMatrix *w, uint64_t row) {
        const uint8_t *p = (const uint8_t *) w->data + row / w->block_rows * w->block_stride +
                           row % w->block_rows * w->row_stride;
        uint64_t n = w->cols < COLUMNS ? w->cols : COLUMNS;
        double sum = 0, scale = 1;

        for (uint64_t i = 0; i < n; i++) {
                double v = w->type == LK_I8 ? (double) (int8_t) p[i] : (double) h3_number(p, w->type, i);

                sum += v * v;
        }
        if (w->type == LK_I8) {
                uint64_t block = row / w->block_rows;
                uint64_t tensor_row = w->quant.first_row + row % w->block_rows +
                                      (block > 0 ? block * (w->block_stride / w->row_stride) : 0);

                scale = (double) h3_number(
                        (const uint8_t *) w->quant.scale + tensor_row * w->quant.scale_stride, LK_F32, 0);
        }
        return scale * sqrt(sum);
}

/* Mean row lengths of the 3 * heads runs in the order of the file. */
static void file_lengths(const H3Model *m, const H3Attention *a, double *ret) {
        uint32_t heads = m->config.heads, head_dim = m->config.head_dim;
        const LkMatrix *parts[] = {&a->q, &a->k, &a->v};

        for (uint32_t part = 0; part < 3; part++)
                for (uint32_t head = 0; head < heads; head++) {
                        double *run = ret + (m->qkv_order == H3_QKV_INTERLEAVED ? 3 * head + part
                                                                                : part * heads + head);

                        *run = 0;
                        for (uint32_t i = 0; i < ROWS_PER_HEAD; i++)
                                *run += row_length(
                                        parts[part], (uint64_t) head * head_dim +
                                                             (uint64_t) i * head_dim / ROWS_PER_HEAD);
                }
}

/* The share of the variance between runs that their kind explains, corrected for chance; at least 0. */
static double explained(const double *runs, uint32_t heads, H3QkvOrder order) {
        double mean[3] = {}, total = 0, inside = 0, all = 0;
        uint32_t n = 3 * heads;

        for (uint32_t i = 0; i < n; i++) {
                all += runs[i] / n;
                mean[order == H3_QKV_INTERLEAVED ? i % 3 : i / heads] += runs[i] / heads;
        }
        for (uint32_t i = 0; i < n; i++) {
                double d = runs[i] - mean[order == H3_QKV_INTERLEAVED ? i % 3 : i / heads];

                total += (runs[i] - all) * (runs[i] - all);
                inside += d * d;
        }
        if (!(total > 0))
                return 0;
        return fmax(0, 1 - (inside / (n - 3)) / (total / (n - 1)));
}

void h3_qkv_probe(H3Model *m) {
        uint32_t heads = m->config.heads, layers = m->config.layers;
        H3QkvOrder other = m->qkv_order == H3_QKV_INTERLEAVED ? H3_QKV_STACKED : H3_QKV_INTERLEAVED;
        CLEANUP_FREE double *runs = NULL;
        double as_read = 0, otherwise = 0;

        /* fp8 and nvfp4 are not looked at; a few heads prove nothing */
        if (m->qkv_order == H3_QKV_SPLIT || heads < 4)
                return;
        runs = malloc(3 * heads * sizeof(*runs));
        if (!runs)
                return; /* only a hint */

        for (uint32_t i = 0; i < LAYERS_LOOKED_AT; i++) {
                const H3Attention *a = &m->blocks[(uint64_t) i * (layers - 1) / (LAYERS_LOOKED_AT - 1)].attn;

                if (a->q.type > LK_I8)
                        return;
                file_lengths(m, a, runs);
                as_read += explained(runs, heads, m->qkv_order) / LAYERS_LOOKED_AT;
                otherwise += explained(runs, heads, other) / LAYERS_LOOKED_AT;
        }
        if (otherwise > EXPLAINS_MUCH && as_read < EXPLAINS_LITTLE)
                (void) snprintf(m->warning, sizeof(m->warning),
                        "The QKV rows were read as %s, but look %s: if the result is noise, load the model "
                        "with "
                        "the other --qkv-order.",
                        m->qkv_order == H3_QKV_INTERLEAVED ? "interleaved" : "stacked",
                        m->qkv_order == H3_QKV_INTERLEAVED ? "stacked" : "interleaved");
}
