/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <math.h>
#include <stdlib.h>

#include "service/h3/dit-private.h"
#include "service/shared/cleanup.h"

/* Sparse attention of a block of the model (h3.md 7.2 - 7.4), for the rank's heads. Whoever attends has Q, K and V of all
 * rows in order, and so the means of all blocks: what is seen depends on the head alone, on no rank, chunk or plan.
 * Everything is of this step: nothing of the one before is used. */

#define REACH 2u /* a block sees itself and its neighbours */

static uint32_t own_heads(const DitRun *run) {
        return (uint32_t) h3_range_size(run->heads);
}

uint64_t dit_counts(const DitRun *run) {
        return ((uint64_t) run->c->layers * run->sparse->n + 1) * own_heads(run);
}

/* Where a layer's list lengths of blocks first.. are, [heads, blocks]. Blocks whose rows are not all there come more than once:
 * those that another call has counted go behind all others. */
static uint32_t *counts_at(const DitRun *run, uint32_t layer, uint32_t first, bool again) {
        return run->count + ((uint64_t) (again ? run->c->layers : layer) * run->sparse->n + (again ? 0 : first)) * own_heads(run);
}

int dit_sparse_start(const DitRun *run) {
        uint64_t n = dit_counts(run);
        CLEANUP_FREE uint32_t *zeros = NULL;
        int r;

        if (n == 0)
                return 0;
        zeros = calloc(n, sizeof(*zeros));
        if (!zeros)
                return -ENOMEM;
        r = run->ops->upload(run->context, run->block_start, run->sparse->start, (run->sparse->n + 1) * sizeof(*run->block_start));
        return r < 0 ? r : run->ops->upload(run->context, run->count, zeros, n * sizeof(*zeros));
}

int dit_sparse_end(const DitRun *run) {
        uint64_t n = dit_counts(run), seen = 0, lists = 0;
        CLEANUP_FREE uint32_t *counts = NULL;
        int r;

        if (n == 0 || !run->hooks || !run->hooks->on_seen)
                return 0;
        n -= own_heads(run);
        counts = malloc(n * sizeof(*counts));
        if (!counts)
                return -ENOMEM;
        r = run->ops->download(run->context, counts, run->count, n * sizeof(*counts));
        if (r < 0)
                return r;
        for (uint64_t i = 0; i < n; i++) {
                seen += counts[i];
                lists += counts[i] > 0; /* a block sees itself */
        }
        run->hooks->on_seen(run->hooks->userdata, seen, lists * run->sparse->n);
        return 0;
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

static int route(const DitRun *run, uint32_t first, uint32_t n, uint32_t *count) {
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
                .count = count,
                .score = run->score,
        };

        return run->ops->route(run->context, &args);
}

/* Query blocks first .. first + n - 1, as far as they are rows row .. row + a->n_q - 1. */
static int attend_blocks(const DitRun *run, const LkAttention *a, uint64_t row, uint32_t first, uint32_t n, const uint32_t *count) {
        const H3Sparse *s = run->sparse;
        uint64_t begin = s->start[first] > row ? s->start[first] : row, end = row + a->n_q;
        LkSparseAttention args = {
                .a = *a,
                .blocks = {s->n, run->block_start},
                .first_block = first,
                .n_blocks = n,
                .list = run->list,
                .count = count,
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

int dit_sparse_attend(const DitRun *run, uint32_t layer, const LkAttention *a, uint64_t row) {
        uint32_t last = h3_sparse_block(run->sparse, row + a->n_q - 1), n;
        int r = 0;

        for (uint32_t first = h3_sparse_block(run->sparse, row); r >= 0 && first <= last; first += n) {
                /* whoever has its first row counts it */
                bool again = run->sparse->start[first] < row;
                uint32_t *count = counts_at(run, layer, first, again);

                n = last + 1 - first < DIT_ROUTED_BLOCKS ? last + 1 - first : DIT_ROUTED_BLOCKS;
                n = again ? 1 : n;
                r = route(run, first, n, count);
                if (r >= 0)
                        r = attend_blocks(run, a, row, first, n, count);
        }
        return r;
}
