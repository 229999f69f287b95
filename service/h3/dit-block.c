/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>

#include "service/h3/dit-private.h"

/* One block over the rank's rows and heads (h3.md 1.6). The refiner's blocks are the same without modulation
 * and rope. */

/* The six vectors of a modulation row: shift, scale, gate of the attention, then of the MLP. */
static uint64_t mod_at(const DitRun *run, DitBranch branch, uint32_t which) {
        return (branch == DIT_ATTENTION ? which : 3 + which) * (uint64_t) run->c->hidden;
}

/* Own rows of h = norm(x), modulated. */
static int norm_rows(const DitRun *run, const LkVector *weight, bool modulated, DitBranch branch) {
        uint64_t hidden = run->c->hidden;
        const LkNorm args = {
                .type = run->type,
                .m = dit_own_rows(run),
                .n = hidden,
                .x = run->x,
                .x_ld = hidden,
                .weight = *weight,
                .eps = run->c->eps,
                .mod = modulated ? run->mod : NULL,
                .mod_ld = 6 * hidden,
                .mod_index = modulated ? run->mod_index : NULL,
                .shift_at = mod_at(run, branch, 0),
                .scale_at = mod_at(run, branch, 1),
                .y = dit_own_h(run),
                .y_ld = hidden,
        };

        if (dit_own_rows(run) == 0)
                return 0;
        return run->ops->norm(run->context, &args);
}

/* x += gate * y on own rows. */
static int add_rows(const DitRun *run, bool modulated, DitBranch branch) {
        uint64_t hidden = run->c->hidden;
        const LkResidual args = {
                .type = run->type,
                .m = dit_own_rows(run),
                .n = hidden,
                .x = run->x,
                .x_ld = hidden,
                .y = run->y,
                .y_ld = hidden,
                .mod = modulated ? run->mod : NULL,
                .mod_ld = 6 * hidden,
                .mod_index = modulated ? run->mod_index : NULL,
                .gate_at = mod_at(run, branch, 2),
        };

        if (dit_own_rows(run) == 0)
                return 0;
        return run->ops->residual(run->context, &args);
}

static int norm_heads(const DitRun *run, void *x, const LkVector *head_weight, bool roped) {
        uint32_t heads = (uint32_t) (run->heads.end - run->heads.begin);
        const LkQkNormRope args = {
                .type = run->type,
                .m = run->n_rows,
                .heads = heads,
                .head_dim = run->c->head_dim,
                .x = x,
                .x_ld = (uint64_t) heads * run->c->head_dim,
                .weight = *head_weight,
                .eps = run->c->eps,
                .cos = roped ? run->cos : NULL,
                .sin = roped ? run->sin : NULL,
                .rope_dims = roped ? 3 * run->c->rope_freqs : 0,
        };

        return run->ops->qk_norm_rope(run->context, &args);
}

static int project_heads(const DitRun *run, const LkMatrix *w, void *y) {
        uint64_t head_dim = run->c->head_dim;
        LkMatrix part = lk_matrix_rows(
                w, run->heads.begin * head_dim, (run->heads.end - run->heads.begin) * head_dim);

        return dit_gemm(run, run->n_rows, run->h, run->type, &part, NULL, y, run->type);
}

/* Own heads over all rows: fills their columns of o. */
static int attend_heads(const DitRun *run, const H3Attention *a, bool roped, uint32_t layer) {
        uint32_t heads = (uint32_t) (run->heads.end - run->heads.begin), head_dim = run->c->head_dim;
        uint64_t own = (uint64_t) heads * head_dim;
        uint8_t *o = run->o + run->heads.begin * head_dim * run->element;
        const LkAttention args = {
                .type = run->type,
                .n_q = run->n_rows,
                .n_k = run->n_rows,
                .heads = heads,
                .head_dim = head_dim,
                .scale = 1.0f / sqrtf((float) head_dim),
                .q = run->q,
                .k = run->k,
                .v = run->v,
                .o = o,
                .q_ld = own,
                .k_ld = own,
                .v_ld = own,
                .o_ld = run->c->inner,
        };
        int r;

        if (heads == 0)
                return 0;
        r = project_heads(run, &a->q, run->q);
        if (r >= 0)
                r = project_heads(run, &a->k, run->k);
        if (r >= 0)
                r = project_heads(run, &a->v, run->v);
        if (r >= 0)
                r = norm_heads(run, run->q, &a->q_norm, roped);
        if (r >= 0)
                r = norm_heads(run, run->k, &a->k_norm, roped);
        if (r < 0)
                return r;

        if (roped) {
                r = dit_tap(run, (int) layer, "q", run->q, run->type, run->n_rows, own);
                if (r >= 0)
                        r = dit_tap(run, (int) layer, "k", run->k, run->type, run->n_rows, own);
                if (r >= 0)
                        r = dit_tap(run, (int) layer, "v", run->v, run->type, run->n_rows, own);
                if (r < 0)
                        return r;
        }
        return run->ops->attention(run->context, &args);
}

static int attention_branch(const DitRun *run, const H3Block *block, bool modulated, uint32_t layer) {
        const H3Config *c = run->c;
        const uint8_t *own_o = run->o + run->rows.begin * c->inner * run->element;
        int r;

        r = norm_rows(run, &block->norm1, modulated, DIT_ATTENTION);
        if (r >= 0 && run->exchange)
                r = run->exchange->gather(run->exchange, run->rank, run->h, c->hidden * run->element);
        if (r >= 0 && modulated)
                r = dit_tap(run, (int) layer, "attn_in", dit_own_h(run), run->type, dit_own_rows(run),
                        c->hidden);
        if (r >= 0)
                r = attend_heads(run, &block->attn, modulated, layer);
        if (r >= 0 && run->exchange)
                r = run->exchange->scatter_heads(
                        run->exchange, run->rank, run->o, c->head_dim * run->element);
        if (r >= 0 && modulated)
                r = dit_tap(run, (int) layer, "attn", own_o, run->type, dit_own_rows(run), c->inner);
        if (r >= 0)
                r = dit_gemm(
                        run, dit_own_rows(run), own_o, run->type, &block->attn.out, NULL, run->y, run->type);
        if (r >= 0 && modulated)
                r = dit_tap(run, (int) layer, "attn_proj", run->y, run->type, dit_own_rows(run), c->hidden);
        return r < 0 ? r : add_rows(run, modulated, DIT_ATTENTION);
}

static int mlp_chunk(const DitRun *run, const H3Mlp *m, uint64_t begin, uint64_t n) {
        uint64_t hidden_bytes = run->c->hidden * run->element, ffn = run->c->ffn;
        const uint8_t *h = dit_own_h(run) + begin * hidden_bytes;
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

        r = dit_gemm(run, n, h, run->type, &m->gate, NULL, run->gate, run->type);
        if (r >= 0)
                r = dit_gemm(run, n, h, run->type, &m->up, NULL, run->up, run->type);
        if (r >= 0 &&
                dit_is_int8(run, &m->down, run->type)) /* the quantiser does it, unrounded (h3.md 2.2) */
                return dit_int8_gemm(run, n, run->gate, run->up, &m->down, NULL,
                        run->y + begin * hidden_bytes, run->type);
        if (r >= 0)
                r = run->ops->swiglu(run->context, &args);
        return r < 0 ? r
                     : dit_gemm(run, n, run->act, run->type, &m->down, NULL, run->y + begin * hidden_bytes,
                               run->type);
}

static int mlp_branch(const DitRun *run, const H3Block *block, bool modulated, uint32_t layer) {
        uint64_t own = dit_own_rows(run);
        int r;

        r = norm_rows(run, &block->norm2, modulated, DIT_MLP);
        if (r >= 0 && modulated)
                r = dit_tap(run, (int) layer, "ff_in", dit_own_h(run), run->type, own, run->c->hidden);
        for (uint64_t begin = 0; r >= 0 && begin < own; begin += DIT_CHUNK_ROWS)
                r = mlp_chunk(run, &block->mlp, begin,
                        own - begin < DIT_CHUNK_ROWS ? own - begin : DIT_CHUNK_ROWS);
        if (r >= 0 && modulated)
                r = dit_tap(run, (int) layer, "ff_out", run->y, run->type, own, run->c->hidden);
        return r < 0 ? r : add_rows(run, modulated, DIT_MLP);
}

int dit_block(const DitRun *run, const H3Block *block, uint32_t layer) {
        bool modulated = block->adaln.data != NULL;
        int r;

        r = attention_branch(run, block, modulated, layer);
        if (r >= 0)
                r = mlp_branch(run, block, modulated, layer);
        if (r >= 0 && modulated)
                r = dit_tap(run, (int) layer, "out", run->x, run->type, dit_own_rows(run), run->c->hidden);
        return r;
}
