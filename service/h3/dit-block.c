/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>

#include "service/h3/dit-private.h"

/* One block over the rank's rows and heads (h3.md 1.6), chunk by chunk. The refiner's blocks are the same
 * without modulation and rope. A chunk's way, on every rank:
 *
 *      dit_feed()         norm 1, Q, K, V           -> IN of the plan leaves
 *      take_chunk()       IN of the others arrives, Q, K, V of their rows
 *      attend_chunk()     after all chunks were taken; O of the others' rows leaves
 *      finish_chunk()     O of own rows arrives; projection, MLP, and dit_feed() for the next block
 *
 * What a branch adds to the residual stream waits in y for the norm that follows it.
 *
 * Rows never see each other but in attention, where keys come in absolute order: chunks and ranks change no
 * bit. */

/* The six vectors of a modulation row: shift, scale, gate of the attention, then of the MLP. */
static uint64_t mod_at(const DitRun *run, DitBranch branch, uint32_t which) {
        return (branch == DIT_ATTENTION ? which : 3 + which) * (uint64_t) run->c->hidden;
}

static bool is_modulated(const H3Block *block) {
        return block->adaln.data != NULL;
}

/* x += gate * y of own rows. */
static LkResidual residual_of(
        const DitRun *run, const H3Block *block, uint32_t layer, DitBranch branch, H3Range rows) {
        uint64_t hidden = run->c->hidden;
        bool modulated = is_modulated(block);

        return (LkResidual){
                .type = run->type,
                .m = h3_range_size(rows),
                .n = hidden,
                .x = dit_own_at(run, run->x, rows.begin, hidden),
                .x_ld = hidden,
                .y = run->y,
                .y_ld = hidden,
                .mod = modulated ? dit_mod(run, layer) : NULL,
                .mod_ld = 6 * hidden,
                .mod_index = modulated ? run->mod_index + (rows.begin - run->rows.begin) : NULL,
                .gate_at = mod_at(run, branch, 2),
        };
}

/* Whether h of the block is int8. */
static bool feed_is_int8(const DitRun *run, const H3Block *block) {
        return h3_block_is_int8(block, run->compute, h3_sparse_is_gated(run->sparse));
}

/* Whether gate and up take their rows in int8, quantised once. */
static bool mlp_is_int8(const DitRun *run, const H3Mlp *m) {
        return dit_is_int8(run, &m->gate, run->type) && dit_is_int8(run, &m->up, run->type) &&
               m->gate.quant.rotation == m->up.quant.rotation;
}

static bool has_taps(const DitRun *run) {
        return run->hooks && run->hooks->on_tap;
}

/* h = norm(x), modulated, of own rows; in h_int8 and h_scale where the products after it are in int8, and only
 * there then. pending (may be NULL) is added to x first. */
static int norm_rows(const DitRun *run, const H3Block *block, uint32_t layer, DitBranch branch, H3Range rows,
        const DitPending *pending) {
        uint64_t hidden = run->c->hidden;
        bool attention = branch == DIT_ATTENTION, modulated = is_modulated(block);
        bool int8 = attention ? feed_is_int8(run, block) : mlp_is_int8(run, &block->mlp);
        const LkQuantise quantise = {
                .rotation = attention ? block->attn.q.quant.rotation : block->mlp.gate.quant.rotation,
                .q = run->h_int8,
                .q_ld = hidden,
                .scale = run->h_scale,
        };
        LkNorm args = {
                .type = run->type,
                .m = h3_range_size(rows),
                .n = hidden,
                .x = dit_own_at(run, run->x, rows.begin, hidden),
                .x_ld = hidden,
                .weight = attention ? block->norm1 : block->norm2,
                .eps = run->c->eps,
                .mod = modulated ? dit_mod(run, layer) : NULL,
                .mod_ld = 6 * hidden,
                .mod_index = modulated ? run->mod_index + (rows.begin - run->rows.begin) : NULL,
                .shift_at = mod_at(run, branch, 0),
                .scale_at = mod_at(run, branch, 1),
                .y = int8 && !has_taps(run) ? NULL : run->h,
                .y_ld = hidden,
                .quantise = int8 ? &quantise : NULL,
        };
        LkResidual add;

        if (pending) {
                add = residual_of(run, pending->block, pending->layer, pending->branch, rows);
                args.add = &add;
        }
        return run->ops->norm(run->context, &args);
}

/* Q, K and V, and the coarse branch's gate, of some rows and heads: where they lie, in rows of ld elements. */
typedef struct Places {
        void *q, *k, *v, *gate; /* gate: NULL if there is none */
        uint64_t ld;
} Places;

/* What rows are multiplied by, and where to. */
typedef struct Factor {
        LkMatrix w;
        void *y;
} Factor;

#define FACTORS_MAX 4u

/* y = the normed rows in h (or h_int8) from `begin` on, of a chunk, times w, for each factor. */
static int multiply(const DitRun *run, uint64_t begin, uint64_t n, bool int8, const Factor *f,
        uint32_t n_factors, uint64_t y_ld) {
        uint64_t hidden = run->c->hidden;
        LkGemmI8 products[FACTORS_MAX];
        int r = 0;

        if (!int8) { /* then there may be no h_int8 */
                for (uint32_t i = 0; r >= 0 && i < n_factors; i++)
                        r = dit_gemm_to(
                                run, n, run->h + begin * hidden * run->element, &f[i].w, f[i].y, y_ld);
                return r;
        }
        for (uint32_t i = 0; i < n_factors; i++)
                products[i] = (LkGemmI8){
                        .m = n,
                        .x = run->h_int8 + begin * hidden,
                        .x_ld = hidden,
                        .x_scale = run->h_scale + begin,
                        .w = f[i].w,
                        .y = f[i].y,
                        .y_type = run->type,
                        .y_ld = y_ld,
                        .beside = i + 1 < n_factors ? products + i + 1 : NULL,
                };
        return run->ops->gemm_i8(run->context, products);
}

/* The heads' part of w. */
static Factor factor_of(const DitRun *run, const LkMatrix *w, H3Range heads, void *y) {
        return (Factor){lk_matrix_rows(w, heads.begin * run->c->head_dim, dit_heads_width(run, heads)), y};
}

static int norm_heads(const DitRun *run, const H3Block *block, H3Range rows, H3Range heads, bool keys, void *x,
        uint64_t ld) {
        bool roped = is_modulated(block);
        uint64_t at = roped ? (rows.begin - run->rope.begin) * 3 * run->c->rope_freqs : 0;
        const LkQkNormRope args = {
                .type = run->type,
                .m = h3_range_size(rows),
                .heads = (uint32_t) h3_range_size(heads),
                .head_dim = run->c->head_dim,
                .x = x,
                .x_ld = ld,
                .weight = keys ? block->attn.k_norm : block->attn.q_norm,
                .eps = run->c->eps,
                .cos = roped ? run->cos + at : NULL,
                .sin = roped ? run->sin + at : NULL,
                .rope_dims = roped ? 3 * run->c->rope_freqs : 0,
        };

        return run->ops->qk_norm_rope(run->context, &args);
}

/* Q, K, V of the rows that are in h. */
static int make_qkv(const DitRun *run, const H3Block *block, H3Range rows, H3Range heads, Places y) {
        uint64_t n = h3_range_size(rows);
        Factor factors[FACTORS_MAX];
        uint32_t n_factors = 0;
        int r;

        if (n == 0 || h3_range_size(heads) == 0)
                return 0;
        factors[n_factors++] = factor_of(run, &block->attn.q, heads, y.q);
        factors[n_factors++] = factor_of(run, &block->attn.k, heads, y.k);
        factors[n_factors++] = factor_of(run, &block->attn.v, heads, y.v);
        if (y.gate)
                factors[n_factors++] = factor_of(run, &block->attn.gate, heads, y.gate);
        r = multiply(run, 0, n, feed_is_int8(run, block), factors, n_factors, y.ld);
        if (r >= 0)
                r = norm_heads(run, block, rows, heads, false, y.q, y.ld);
        return r < 0 ? r : norm_heads(run, block, rows, heads, true, y.k, y.ld);
}

/* Rows of chunk `chunk` of ranks begin..end. */
static uint64_t chunk_rows(const DitRun *run, uint32_t chunk, uint32_t begin, uint32_t end) {
        uint64_t n = 0;

        for (uint32_t i = begin; i < end; i++)
                n += h3_range_size(h3_plan_chunk(run->plan, i, chunk));
        return n;
}

/* Where the queries of a rank's chunk begin in q: [chunk][rank][row], so that a chunk of all ranks is one
 * array. With KV_GATHER the rank has its own rows only. Sparse: in order, so that a block of them is one array. */
static uint64_t query_row(const DitRun *run, uint32_t rank, uint32_t chunk) {
        uint64_t row = 0;

        if (run->sparse)
                return h3_plan_chunk(run->plan, rank, chunk).begin;
        if (run->plan->kind == H3_PLAN_KV_GATHER)
                return h3_plan_chunk(run->plan, rank, chunk).begin - run->rows.begin;
        for (uint32_t c = 0; c < chunk; c++)
                row += chunk_rows(run, c, 0, run->plan->ranks);
        return row + chunk_rows(run, chunk, 0, rank);
}

/* Where attention wants a rank's chunk. */
static Places attention_places(const DitRun *run, uint32_t rank, uint32_t chunk) {
        uint64_t ld = dit_heads_width(run, run->heads), row = ld * run->element;
        uint64_t key = h3_plan_chunk(run->plan, rank, chunk).begin;

        return (Places){
                .q = run->q + query_row(run, rank, chunk) * row,
                .k = run->k + key * row,
                .v = run->v + key * row,
                .gate = run->coarse_gate ? run->coarse_gate + key * row : NULL,
                .ld = ld,
        };
}

/* A heads' part of rows of ld elements. */
static H3View view_of(const DitRun *run, void *x, uint64_t rows, uint64_t width, uint64_t ld) {
        return (H3View){.data = x, .rows = rows, .width = width * run->element, .stride = ld * run->element};
}

/* What is in h, as it travels. */
static uint32_t view_hidden(const DitRun *run, const H3Block *block, uint64_t n, H3View *ret) {
        uint64_t hidden = run->c->hidden;

        if (!feed_is_int8(run, block)) {
                ret[0] = view_of(run, run->h, n, hidden, hidden);
                return 1;
        }
        ret[0] = (H3View){.data = run->h_int8, .rows = n, .width = hidden, .stride = hidden};
        ret[1] = (H3View){.data = run->h_scale, .rows = n, .width = sizeof(float), .stride = sizeof(float)};
        return 2;
}

/* With QKV_ALL_TO_ALL the rows' queries go, too; with KV_GATHER they stay, or go for their means alone. */
static uint32_t view_places(const DitRun *run, const Places *x, uint64_t n, H3Range heads, H3View *ret) {
        bool all_to_all = run->plan->kind == H3_PLAN_QKV_ALL_TO_ALL;
        uint64_t width = dit_heads_width(run, heads);
        uint32_t i = 0;

        if (all_to_all || run->sparse)
                ret[i++] = view_of(run, x->q, n, width, x->ld);
        if (all_to_all && x->gate)
                ret[i++] = view_of(run, x->gate, n, width, x->ld);
        ret[i++] = view_of(run, x->k, n, width, x->ld);
        ret[i++] = view_of(run, x->v, n, width, x->ld);
        return i;
}

/* Sends to all that need it, or to nobody. */
static int send(const DitRun *run, H3Message m, const H3View *views, uint32_t n) {
        bool needed = false;

        for (uint32_t to = 0; to < run->plan->ranks && !needed; to++)
                needed = (m.to == H3_TO_ALL || m.to == to) &&
                         h3_plan_receives(run->plan, m.phase, m.from, to);
        if (!needed)
                return 0;
        return run->rank->exchange->send(run->rank->exchange, run->rank, &m, views, n);
}

/* Q, K and V of own rows to the ranks that have the heads. */
static int feed_all(const DitRun *run, const H3Block *block, H3Message m, H3Range rows) {
        uint64_t inner = run->c->inner;
        H3View views[H3_VIEWS_MAX];
        int r = 0;

        for (uint32_t i = 0; r >= 0 && i < run->plan->ranks; i++) {
                H3Range heads = run->plan->heads[i];
                uint64_t at = heads.begin * run->c->head_dim * run->element;
                Places y = {run->qkv_out[0] + at, run->qkv_out[1] + at, run->qkv_out[2] + at,
                        run->coarse_gate ? run->qkv_out[3] + at : NULL, inner};

                if (i == run->self || h3_range_size(heads) == 0)
                        continue;
                m.to = i;
                r = make_qkv(run, block, rows, heads, y);
                if (r >= 0)
                        r = send(run, m, views, view_places(run, &y, h3_range_size(rows), heads, views));
        }
        return r;
}

int dit_feed(
        const DitRun *run, const H3Block *block, uint32_t layer, uint32_t chunk, const DitPending *pending) {
        uint32_t self = run->self;
        H3Range rows = h3_plan_chunk(run->plan, self, chunk);
        H3Message m = {.phase = H3_PHASE_IN, .from = self, .to = H3_TO_ALL, .chunk = chunk,
                .sequence = layer + 1};
        uint64_t n = h3_range_size(rows);
        H3View views[H3_VIEWS_MAX];
        Places y;
        int r;

        if (n == 0)
                return 0;
        r = norm_rows(run, block, layer, DIT_ATTENTION, rows, pending);
        if (r >= 0 && is_modulated(block))
                r = dit_tap(run, (int) layer, "attn_in", run->h, run->type, n, run->c->hidden);
        if (r >= 0 && run->plan->kind == H3_PLAN_HIDDEN_GATHER)
                r = send(run, m, views, view_hidden(run, block, n, views));
        if (r >= 0 && run->plan->kind == H3_PLAN_QKV_ALL_TO_ALL)
                r = feed_all(run, block, m, rows);
        if (r < 0)
                return r;

        y = attention_places(run, self, chunk);
        r = make_qkv(run, block, rows, run->heads, y);
        if (r >= 0 && run->plan->kind == H3_PLAN_KV_GATHER)
                r = send(run, m, views, view_places(run, &y, n, run->heads, views));
        return r;
}

/* Another rank's rows. */
static int take_chunk(const DitRun *run, const H3Block *block, uint32_t layer, uint32_t from, uint32_t chunk) {
        H3Exchange *e = run->rank->exchange;
        H3Range rows = h3_plan_chunk(run->plan, from, chunk);
        Places y = attention_places(run, from, chunk);
        uint64_t n = h3_range_size(rows);
        H3View views[H3_VIEWS_MAX];
        uint32_t n_views;
        const H3Message m = {
                .phase = H3_PHASE_IN,
                .from = from,
                .to = h3_plan_sends_to_all(run->plan, H3_PHASE_IN) ? H3_TO_ALL : run->self,
                .chunk = chunk,
                .sequence = layer + 1,
        };
        int r;

        if (n == 0)
                return 0;
        if (run->plan->kind == H3_PLAN_HIDDEN_GATHER)
                n_views = view_hidden(run, block, n, views);
        else
                n_views = view_places(run, &y, n, run->heads, views);
        r = e->recv(e, run->rank, &m, views, n_views);
        if (r >= 0 && run->plan->kind == H3_PLAN_HIDDEN_GATHER)
                r = make_qkv(run, block, rows, run->heads, y);
        return r;
}

/* Everything of the others. Ranks begin with their right neighbour, so that not all read one at a time. */
static int take_all(const DitRun *run, const H3Block *block, uint32_t layer) {
        uint32_t ranks = run->plan->ranks, self = run->self;
        int r = 0;

        for (uint32_t chunk = 0; r >= 0 && chunk < run->plan->chunks; chunk++)
                for (uint32_t i = 1; r >= 0 && i < ranks; i++) {
                        uint32_t from = (self + i) % ranks;

                        if (h3_plan_receives(run->plan, H3_PHASE_IN, from, self))
                                r = take_chunk(run, block, layer, from, chunk);
                }
        return r;
}

/* Whether the rank attends for rows of others; else nobody waits for a chunk of what it attends for. */
static bool has_others(const DitRun *run) {
        return run->plan->ranks > 1 && run->plan->kind != H3_PLAN_KV_GATHER;
}

/* Whether O of own rows is made on LK_SIDE, while LK_COMPUTE makes that of the others: what is short ends with most of a device
 * idle. Those of a sparse step share memory and stay in order. */
static bool is_aside(const DitRun *run, uint32_t layer) {
        return has_others(run) && !dit_is_sparse(run, layer);
}

/* n queries from row `query` of q. */
static LkAttention attention_of(const DitRun *run, uint64_t query, uint64_t n, void *o, uint64_t o_ld) {
        uint64_t own = dit_heads_width(run, run->heads);

        return (LkAttention){
                .type = run->type,
                .n_q = n,
                .n_k = run->n_rows,
                .heads = (uint32_t) h3_range_size(run->heads),
                .head_dim = run->c->head_dim,
                .scale = 1.0f / sqrtf((float) run->c->head_dim),
                .q = run->q + query * own * run->element,
                .k = run->k,
                .v = run->v,
                .o = o,
                .q_ld = own,
                .k_ld = own,
                .v_ld = own,
                .o_ld = o_ld,
        };
}

static int attend(const DitRun *run, uint32_t layer, uint64_t query, uint64_t n, void *o, uint64_t o_ld, bool aside) {
        LkAttention args = attention_of(run, query, n, o, o_ld);

        args.aside = aside;
        if (n == 0)
                return 0;
        if (dit_is_sparse(run, layer))
                return dit_sparse_attend(run, layer, &args, query);
        return run->ops->attention(run->context, &args);
}

/* Chunk `chunk` of ranks begin..end, to o. */
static int attend_ranks(const DitRun *run, uint32_t layer, uint32_t chunk, uint32_t begin, uint32_t end, uint8_t *o) {
        uint64_t own = dit_heads_width(run, run->heads);
        int r = 0;

        if (!run->sparse) /* one array */
                return attend(run, layer, query_row(run, begin, chunk), chunk_rows(run, chunk, begin, end), o, own, false);
        for (uint32_t i = begin; r >= 0 && i < end; i++) {
                r = attend(run, layer, query_row(run, i, chunk), chunk_rows(run, chunk, i, i + 1), o, own, false);
                o += chunk_rows(run, chunk, i, i + 1) * own * run->element;
        }
        return r;
}

/* O of n own rows of the plan from `begin` on. */
static int attend_own(const DitRun *run, uint32_t layer, uint64_t query, uint64_t begin, uint64_t n) {
        uint64_t inner = run->c->inner;
        uint8_t *o = dit_own_at(run, run->o, begin, inner) + run->heads.begin * run->c->head_dim * run->element;

        return attend(run, layer, query, n, o, inner, is_aside(run, layer));
}

/* O of other ranks' rows, then to them. */
static int attend_others(const DitRun *run, uint32_t layer, uint32_t chunk) {
        uint32_t ranks = run->plan->ranks, self = run->self;
        uint64_t own = dit_heads_width(run, run->heads), at = 0, before = chunk_rows(run, chunk, 0, self);
        int r;

        r = attend_ranks(run, layer, chunk, 0, self, run->o_out);
        if (r >= 0)
                r = attend_ranks(run, layer, chunk, self + 1, ranks, run->o_out + before * own * run->element);

        for (uint32_t to = 0; r >= 0 && to < ranks; to++) {
                uint64_t n = chunk_rows(run, chunk, to, to + 1);
                const H3Message m = {.phase = H3_PHASE_OUT, .from = self, .to = to, .chunk = chunk,
                        .sequence = layer + 1};
                const H3View view = view_of(run, run->o_out + at * own * run->element, n, own, own);

                if (to == self || n == 0)
                        continue;
                r = send(run, m, &view, 1);
                at += n;
        }
        return r;
}

static int attend_chunk(const DitRun *run, uint32_t layer, uint32_t chunk) {
        H3Range rows = h3_plan_chunk(run->plan, run->self, chunk);
        int r = 0;

        if (h3_range_size(run->heads) == 0)
                return 0;
        if (has_others(run))
                r = attend_others(run, layer, chunk);
        if (r >= 0)
                r = attend_own(run, layer, query_row(run, run->self, chunk), rows.begin, h3_range_size(rows));
        if (r < 0 || !is_aside(run, layer))
                return r;
        r = run->ops->mark(run->context, LK_SIDE, H3_EVENT_CHUNK + chunk % H3_CHUNK_EVENTS);
        return r < 0 ? r : run->ops->mark(run->context, LK_SIDE, H3_EVENT_ATTENDED);
}

static int attend_chunks(const DitRun *run, uint32_t layer) {
        int r = 0;

        if (is_aside(run, layer)) {
                r = run->ops->mark(run->context, LK_COMPUTE, H3_EVENT_QKV);
                if (r >= 0)
                        r = run->ops->wait(run->context, LK_SIDE, H3_EVENT_QKV);
        } else if (!run->sparse && !has_others(run))
                return h3_range_size(run->heads) == 0 ? 0 : attend_own(run, layer, 0, run->rows.begin, h3_range_size(run->rows));
        for (uint32_t chunk = 0; r >= 0 && chunk < run->plan->chunks; chunk++)
                r = attend_chunk(run, layer, chunk);
        return r;
}

/* O of own rows from the ranks that have the other heads. */
static int take_o(const DitRun *run, uint32_t layer, uint32_t chunk, H3Range rows) {
        uint32_t ranks = run->plan->ranks, self = run->self;
        uint8_t *o = dit_own_at(run, run->o, rows.begin, run->c->inner);
        H3Exchange *e = run->rank->exchange;
        int r = 0;

        for (uint32_t i = 1; r >= 0 && i < ranks; i++) {
                uint32_t from = (self + i) % ranks;
                const H3Message m = {.phase = H3_PHASE_OUT, .from = from, .to = self, .chunk = chunk,
                        .sequence = layer + 1};
                H3View view;

                if (!h3_plan_receives(run->plan, H3_PHASE_OUT, from, self))
                        continue;
                view = view_of(run, o + run->plan->heads[from].begin * run->c->head_dim * run->element,
                        h3_range_size(rows), dit_heads_width(run, run->plan->heads[from]), run->c->inner);
                r = e->recv(e, run->rank, &m, &view, 1);
        }
        return r;
}

static int mlp_piece(const DitRun *run, const H3Mlp *m, uint64_t begin, uint64_t n) {
        uint64_t hidden_bytes = run->c->hidden * run->element, ffn = run->c->ffn;
        const Factor factors[] = {{m->gate, run->gate}, {m->up, run->up}};
        uint8_t *y = run->y + begin * hidden_bytes;
        const LkSwiglu args = {
                .type = run->type,
                .m = n,
                .n = ffn,
                .gate = run->gate,
                .up = run->up,
                .gate_ld = ffn,
                .up_ld = ffn,
                .y = run->act,
                .y_ld = ffn,
        };
        int r;

        r = multiply(run, begin, n, mlp_is_int8(run, m), factors, 2, ffn);
        if (r >= 0 &&
                dit_is_int8(run, &m->down, run->type)) /* the quantiser does it, unrounded (h3.md 2.2) */
                return dit_int8_gemm_gated(run, n, run->gate, run->up, &m->down, y);
        if (r >= 0)
                r = run->ops->swiglu(run->context, &args);
        return r < 0 ? r : dit_gemm(run, n, run->act, run->type, &m->down, NULL, y, run->type);
}

static int attention_end(const DitRun *run, const H3Block *block, uint32_t layer, H3Range rows) {
        const uint8_t *o = dit_own_at(run, run->o, rows.begin, run->c->inner);
        uint64_t n = h3_range_size(rows);
        bool modulated = is_modulated(block);
        int r = 0;

        if (modulated)
                r = dit_tap(run, (int) layer, "attn", o, run->type, n, run->c->inner);
        if (r >= 0)
                r = dit_gemm(run, n, o, run->type, &block->attn.out, NULL, run->y, run->type);
        if (r >= 0 && modulated)
                r = dit_tap(run, (int) layer, "attn_proj", run->y, run->type, n, run->c->hidden);
        return r;
}

/* To y, which is still to be added; what attention left there goes in first. */
static int mlp_branch(const DitRun *run, const H3Block *block, uint32_t layer, H3Range rows) {
        uint64_t n = h3_range_size(rows);
        bool modulated = is_modulated(block);
        int r;

        r = norm_rows(run, block, layer, DIT_MLP, rows, &(DitPending){block, layer, DIT_ATTENTION});
        if (r >= 0 && modulated)
                r = dit_tap(run, (int) layer, "ff_in", run->h, run->type, n, run->c->hidden);
        for (uint64_t begin = 0; r >= 0 && begin < n; begin += run->piece_rows)
                r = mlp_piece(run, &block->mlp, begin, n - begin < run->piece_rows ? n - begin : run->piece_rows);
        if (r >= 0 && modulated)
                r = dit_tap(run, (int) layer, "ff_out", run->y, run->type, n, run->c->hidden);
        return r;
}

static int finish_chunk(
        const DitRun *run, const H3Block *block, const H3Block *next, uint32_t layer, uint32_t chunk) {
        H3Range rows = h3_plan_chunk(run->plan, run->self, chunk);
        uint64_t n = h3_range_size(rows);
        bool aside = is_aside(run, layer);
        int r;

        if (n == 0)
                return 0;
        r = aside ? run->ops->wait(run->context, LK_COMPUTE, H3_EVENT_CHUNK + chunk % H3_CHUNK_EVENTS) : 0;
        if (r >= 0) /* what it waits is what the exchange did not hide */
                r = take_o(run, layer, chunk, rows);
        if (r >= 0)
                r = attention_end(run, block, layer, rows);
        if (r >= 0)
                r = mlp_branch(run, block, layer, rows);
        if (r >= 0 && aside) /* no chunk needs K and V any more, nor Q */
                r = run->ops->wait(run->context, LK_COMPUTE, H3_EVENT_ATTENDED);
        if (r >= 0 && next)
                r = dit_feed(run, next, layer + 1, chunk, &(DitPending){block, layer, DIT_MLP});
        else if (r >= 0) {
                const LkResidual add = residual_of(run, block, layer, DIT_MLP, rows);

                r = run->ops->residual(run->context, &add);
        }
        if (r >= 0 && is_modulated(block))
                r = dit_tap(run, (int) layer, "out", dit_own_at(run, run->x, rows.begin, run->c->hidden),
                        run->type, n, run->c->hidden);
        return r;
}

static int tap_qkv(const DitRun *run, uint32_t layer) {
        uint64_t own = dit_heads_width(run, run->heads);
        int r;

        r = dit_tap(run, (int) layer, "q", run->q, run->type, run->n_rows, own);
        if (r >= 0)
                r = dit_tap(run, (int) layer, "k", run->k, run->type, run->n_rows, own);
        if (r >= 0 && run->coarse_gate)
                r = dit_tap(run, (int) layer, "gate", run->coarse_gate, run->type, run->n_rows, own);
        return r < 0 ? r : dit_tap(run, (int) layer, "v", run->v, run->type, run->n_rows, own);
}

int dit_attend(const DitRun *run, const H3Block *block, uint32_t layer) {
        int r;

        r = take_all(run, block, layer);
        if (r >= 0 && is_modulated(block) && run->plan->ranks == 1)
                r = tap_qkv(run, layer);
        if (r >= 0 && dit_is_sparse(run, layer))
                r = dit_sparse_begin(run);
        return r < 0 ? r : attend_chunks(run, layer);
}

int dit_finish(const DitRun *run, const H3Block *block, const H3Block *next, uint32_t layer) {
        int r = 0;

        for (uint32_t chunk = 0; r >= 0 && chunk < run->plan->chunks; chunk++)
                r = finish_chunk(run, block, next, layer, chunk);
        return r;
}
