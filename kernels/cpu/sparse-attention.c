/* SPDX-License-Identifier: Apache-2.0 */
/* Attention over lists of blocks (kernels/cpu/attention.h has the arithmetic of a tile). A task is one head and one
 * block of queries. */

#include <errno.h>

#include "kernels/cpu/attention.h"

typedef struct SparseJob {
        AttentionCall call;
        const LkSparseAttention *sparse;
        const Threads *threads;
        AttentionScratch *scratch; /* one per thread */
} SparseJob;

/* A task's part: rows `row` .. `row` + n - 1 of q, against the lists of (head, query block). */
typedef struct SparseTask {
        uint32_t head, block, n;
        uint64_t row;
        const uint32_t *list;
        uint32_t count;
        const float *score;
} SparseTask;

static uint32_t block_rows(const LkBlocks *b, uint32_t i) {
        return b->start[i + 1] - b->start[i];
}

static void see_blocks(const SparseJob *j, AttentionScratch *s, const SparseTask *t) {
        const LkBlocks *blocks = &j->sparse->blocks;

        for (uint32_t e = 0; e < t->count && !threads_stopped(j->threads); e++) {
                uint64_t key = blocks->start[t->list[e]];
                uint32_t n_keys = block_rows(blocks, t->list[e]);

                attention_pack_keys(&j->call, s, t->head, key, n_keys);
                for (uint32_t i = 0; i < t->n; i += TILE_ROWS)
                        attention_attend(&j->call, s, i / TILE_ROWS, t->n - i < TILE_ROWS ? t->n - i : TILE_ROWS, t->row + i,
                                key, n_keys);
        }
}

/* scale * (q . centre) of each row. */
static void centre_scores(const SparseJob *j, const SparseTask *t, float *ret) {
        const LkAttention *a = &j->sparse->a;
        const float *centre = j->sparse->centre + (uint64_t) t->head * a->head_dim;

        for (uint32_t i = 0; i < t->n; i++) {
                const void *q = attention_head_row(a, a->q, t->row + i, a->q_ld, t->head);
                float sum = 0;

                for (uint32_t d = 0; d < a->head_dim; d++)
                        sum = f32_fma(number_get(q, a->type, d), centre[d], sum);
                ret[i] = a->scale * sum;
        }
}

/* Values and rows of n blocks that are not seen, as a tile. */
static void pack_means(const SparseJob *j, AttentionScratch *s, const SparseTask *t, const uint32_t *list, uint32_t n,
        float *ret_rows) {
        const LkSparseAttention *x = j->sparse;
        uint32_t dim = x->a.head_dim;

        for (uint32_t e = 0; e < LK_KEY_TILE; e++)
                ret_rows[e] = e < n ? (float) block_rows(&x->blocks, list[e]) : 0;
        for (uint32_t e = 0; e < n; e++) {
                const float *v = x->value + ((uint64_t) list[e] * x->a.heads + t->head) * dim;

                for (uint32_t d = 0; d < j->call.padded; d += VT_N) {
                        VT y = d < dim ? vt_get(v, LK_F32, d, dim) : vt_zero();

                        vt_store(s->v + e * j->call.padded + d, x->a.type == LK_BF16 ? vt_round_bf16(y) : y);
                }
        }
}

static void see_means(const SparseJob *j, AttentionScratch *s, const SparseTask *t) {
        float centre[LK_BLOCK_ROWS], rows[LK_KEY_TILE];
        uint32_t seen[TILE_ROWS], n_blocks = j->sparse->blocks.n;

        centre_scores(j, t, centre);
        for (uint32_t first = t->count; first < n_blocks; first += LK_KEY_TILE) {
                uint32_t n = n_blocks - first < LK_KEY_TILE ? n_blocks - first : LK_KEY_TILE;

                pack_means(j, s, t, t->list + first, n, rows);
                for (uint32_t i = 0; i < TILE_ROWS; i++)
                        seen[i] = n;
                for (uint32_t i = 0; i < t->n; i += TILE_ROWS) {
                        uint32_t h = t->n - i < TILE_ROWS ? t->n - i : TILE_ROWS;

                        for (uint32_t k = 0; k < h; k++)
                                for (uint32_t e = 0; e < LK_KEY_TILE; e++)
                                        s->p[k][e] = e < n ? t->score[t->list[first + e]] + centre[i + k] : 0;
                        attention_absorb(&j->call, s, i / TILE_ROWS, h, seen, n, 1, rows);
                }
        }
}

static void store_rows(const SparseJob *j, const AttentionScratch *s, const SparseTask *t) {
        const LkSparseAttention *x = j->sparse;
        const LkAttention *a = &x->a;

        for (uint32_t i = 0; i < t->n; i++) {
                uint64_t at = (uint64_t) t->head * a->head_dim;
                void *o = (uint8_t *) a->o + ((t->row + i) * a->o_ld + at) * lk_type_size(a->type);
                float sum = v8_sum(v8_load(s->sum[i]));

                for (uint32_t d = 0; d < a->head_dim; d += VT_N) {
                        VT y = attention_quotient(&j->call, s, i, d, sum);

                        if (x->gate) {
                                const void *gate = rows_at(x->gate, a->type, t->row + i, x->gate_ld);
                                const float *coarse = x->coarse + (uint64_t) t->block * a->heads * a->head_dim + at;

                                gate = (const uint8_t *) gate + at * lk_type_size(a->type);
                                y = vt_fma(vt_get(gate, a->type, d, a->head_dim), vt_get(coarse, LK_F32, d, a->head_dim), y);
                        }
                        vt_put(o, a->type, d, a->head_dim, y);
                }
        }
}

static void sparse_task(void *userdata, uint64_t task, uint32_t thread) {
        const SparseJob *j = userdata;
        const LkSparseAttention *x = j->sparse;
        AttentionScratch *s = &j->scratch[thread];
        uint32_t block = x->first_block + (uint32_t) (task % x->n_blocks);
        uint64_t begin = x->blocks.start[block], end = x->blocks.start[block + 1];
        uint64_t first = x->a.first_row, last = first + x->a.n_q;
        SparseTask t = {
                .head = (uint32_t) (task / x->n_blocks),
                .block = block,
                .list = x->list + task * x->blocks.n,
                .count = x->count[task],
                .score = x->score + task * x->blocks.n,
        };

        begin = begin < first ? first : begin;
        end = end > last ? last : end;
        if (begin >= end)
                return;
        t.row = begin - first;
        t.n = (uint32_t) (end - begin);

        attention_begin(&j->call, s, t.head, t.row, t.n);
        see_blocks(j, s, &t);
        if (x->value)
                see_means(j, s, &t);
        store_rows(j, s, &t);
}

int LK_ISA(sparse_attention)(LkContext *c, const LkSparseAttention *a) {
        SparseJob j;
        void *scratch;
        int r;

        if (!c || !a || !check_sparse_attention(a) || !attention_check(&a->a))
                return -EINVAL;
        if (a->a.n_q == 0 || a->a.heads == 0)
                return 0;

        r = context_scratch(c, threads_count(c->threads) * sizeof(AttentionScratch), &scratch);
        if (r < 0)
                return r;

        j = (SparseJob){.call = attention_call(&a->a), .sparse = a, .threads = c->threads, .scratch = scratch};
        return threads_run(c->threads, (uint64_t) a->a.heads * a->n_blocks, sparse_task, &j);
}
