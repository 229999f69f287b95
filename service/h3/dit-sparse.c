/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>

#include "service/h3/dit-private.h"

/* Sparse attention of a block of the model (h3.md 7.2 - 7.4), for the rank's heads. Whoever attends has Q, K and V of all
 * rows in order, and so the means of all blocks: what is seen depends on the head alone, on no rank, chunk or plan.
 * Everything is of this step: nothing of the one before is used. */

#define REACH 2u /* a block sees itself and its neighbours */

static uint32_t own_heads(const DitRun *run) {
        return (uint32_t) h3_range_size(run->heads);
}

static float scale_of(const DitRun *run) {
        return 1.0f / sqrtf((float) run->c->head_dim);
}

static int means_of(const DitRun *run, const void *x, float *mean, float *centre) {
        const LkBlockMeans args = {
                .type = run->type,
                .heads = own_heads(run),
                .head_dim = run->c->head_dim,
                .blocks = {run->sparse->n, run->block_start},
                .x = x,
                .x_ld = dit_heads_width(run, run->heads),
                .mean = mean,
                .centre = centre,
        };

        return run->ops->block_means(run->context, &args);
}

/* A softmax over the blocks, each as one key; the centre of the keys changes nothing. */
static int coarse_branch(const DitRun *run) {
        uint64_t own = dit_heads_width(run, run->heads);
        const LkAttention args = {
                .type = LK_F32,
                .n_q = run->sparse->n,
                .n_k = run->sparse->n,
                .heads = own_heads(run),
                .head_dim = run->c->head_dim,
                .scale = scale_of(run),
                .q = run->q_mean,
                .k = run->k_mean,
                .v = run->v_mean,
                .o = run->coarse,
                .q_ld = own,
                .k_ld = own,
                .v_ld = own,
                .o_ld = own,
        };

        return run->ops->attention(run->context, &args);
}

int dit_sparse_begin(const DitRun *run) {
        int r;

        if (own_heads(run) == 0)
                return 0;
        r = means_of(run, run->q, run->q_mean, NULL);
        if (r >= 0)
                r = means_of(run, run->k, run->k_mean, run->k_centre);
        if (r >= 0 && (run->coarse || run->sparse->options.tail))
                r = means_of(run, run->v, run->v_mean, NULL);
        return r >= 0 && run->coarse ? coarse_branch(run) : r;
}

static int route(const DitRun *run, uint32_t first, uint32_t n) {
        const H3Sparse *s = run->sparse;
        const LkRoute args = {
                .heads = own_heads(run),
                .head_dim = run->c->head_dim,
                .n = s->n,
                .first = first,
                .n_q = n,
                .scale = scale_of(run),
                .q = run->q_mean,
                .k = run->k_mean,
                .variance = run->k_centre + dit_heads_width(run, run->heads),
                .by_rank = s->options.method != SPARSE_SOL,
                .keep = s->keep,
                .tau = s->options.tau,
                .sinks = s->sinks,
                .dense_begin = s->dense_begin,
                .dense_end = s->dense_end,
                .reach = REACH,
                .list = run->list,
                .count = run->count,
                .score = run->score,
        };

        return run->ops->route(run->context, &args);
}

/* Query blocks first .. first + n - 1, as far as they are rows row .. row + a->n_q - 1. */
static int attend_blocks(const DitRun *run, const LkAttention *a, uint64_t row, uint32_t first, uint32_t n) {
        const H3Sparse *s = run->sparse;
        uint64_t begin = s->start[first] > row ? s->start[first] : row, end = row + a->n_q;
        LkSparseAttention args = {
                .a = *a,
                .blocks = {s->n, run->block_start},
                .first_block = first,
                .n_blocks = n,
                .list = run->list,
                .count = run->count,
                .score = run->score,
                .value = s->options.tail ? run->v_mean : NULL,
                .centre = run->k_centre,
                .gate = run->coarse_gate ? run->coarse_gate + begin * a->q_ld * run->element : NULL,
                .gate_ld = a->q_ld,
                .coarse = run->coarse,
        };

        end = end < s->start[first + n] ? end : s->start[first + n];
        args.a.first_row = begin;
        args.a.n_q = end - begin;
        args.a.q = (const uint8_t *) a->q + (begin - row) * a->q_ld * run->element;
        args.a.o = (uint8_t *) a->o + (begin - row) * a->o_ld * run->element;
        return run->ops->sparse_attention(run->context, &args);
}

int dit_sparse_attend(const DitRun *run, const LkAttention *a, uint64_t row) {
        uint32_t last = h3_sparse_block(run->sparse, row + a->n_q - 1), n;
        int r = 0;

        for (uint32_t first = h3_sparse_block(run->sparse, row); r >= 0 && first <= last; first += n) {
                n = last + 1 - first < DIT_ROUTED_BLOCKS ? last + 1 - first : DIT_ROUTED_BLOCKS;
                r = route(run, first, n);
                if (r >= 0)
                        r = attend_blocks(run, a, row, first, n);
        }
        return r;
}
