/* SPDX-License-Identifier: Apache-2.0 */
#include "service/h3/text.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "service/h3/text-private.h"
#include "service/shared/cleanup.h"
#include "service/shared/fmath.h"

/* Token rows, then layer by layer. A layer is the same on every rank but for the columns it makes:
 *
 *      q, k, v of own heads, attention       -> O is gathered
 *      own columns of the projection         -> gathered, added
 *      own columns of the MLP's inner rows   -> gathered, piece by piece
 *      own columns of the MLP's result       -> gathered, added
 *
 * A result's sum runs over whole gathered rows in their order, so that ranks change no bit. */

static uint64_t min_of(uint64_t a, uint64_t b) {
        return a < b ? a : b;
}

static TextRows stream(const TextRun *run) {
        return text_rows(run, run->x, run->m->config.hidden);
}

/* x: token rows, and what the tower makes of the pictures in the place of their tokens. */
static int enter(TextRun *run, const H3TextInput *in) {
        uint64_t row = 0, merged = 0;
        int r = 0;

        for (size_t i = 0; r >= 0 && i < in->n_vision; i++) {
                const H3VisionInput *v = in->vision + i;
                uint64_t n = v->grid_height * v->grid_width / 4;

                r = text_embed(run, in, row, v->first_token);
                if (r >= 0)
                        r = vision_run(run, v, (uint32_t) i, merged);
                row = v->first_token + n;
                merged += n;
        }
        if (r >= 0)
                r = text_embed(run, in, row, in->n);
        return r < 0 ? r : text_tap(run, "residual", 0, run->x, in->n, run->m->config.hidden);
}

static float round_to_bf16(float x) {
        uint32_t bits;

        memcpy(&bits, &x, sizeof(bits)); /* cos and sin are finite */
        bits += 0x7fff + (bits >> 16 & 1);
        bits &= 0xffff0000u;
        memcpy(&x, &bits, sizeof(x));
        return x;
}

/* Which of t, h, w turns frequency k: interleaved M-RoPE (h3.md 3.1). */
static uint32_t rope_axis(const H3TextConfig *c, uint32_t k) {
        uint32_t axis = k % 3;

        return axis > 0 && k < 3 * c->sections[axis] ? axis : 0;
}

static int upload_rope(const TextRun *run, const H3TextInput *in) {
        const H3TextConfig *c = &run->m->config;
        uint32_t width = c->head_dim / 2;
        uint64_t n = in->n * width;
        CLEANUP_FREE float *table = malloc(2 * n * sizeof(float));
        float inverse[128];
        int r;

        if (!table)
                return -ENOMEM;
        for (uint32_t k = 0; k < width; k++) { /* torch: a power in f32, then its reciprocal in f32 */
                double power = fmath_exp(fmath_log((double) c->theta) * 2.0 * k / c->head_dim);

                inverse[k] = 1.0f / (float) power;
        }
        for (uint64_t i = 0; i < n; i++) {
                uint32_t k = (uint32_t) (i % width);
                float angle = (float) in->positions[rope_axis(c, k) * in->n + i / width] * inverse[k];

                table[i] = (float) fmath_cos((double) angle);
                table[n + i] = (float) fmath_sin((double) angle);
                if (run->type == LK_BF16) {
                        table[i] = round_to_bf16(table[i]);
                        table[n + i] = round_to_bf16(table[n + i]);
                }
        }
        if (run->hooks && run->hooks->on_tap) {
                run->hooks->on_tap(run->hooks->userdata, "rope.cos", table, in->n, width);
                run->hooks->on_tap(run->hooks->userdata, "rope.sin", table + n, in->n, width);
        }
        r = run->ops->upload(run->context, run->cos, table, n * sizeof(float));
        return r < 0 ? r : run->ops->upload(run->context, run->sin, table + n, n * sizeof(float));
}

static int norm(const TextRun *run, const LkVector *weight) {
        const H3TextConfig *c = &run->m->config;
        const LkNorm args = {
                .type = run->type,
                .m = run->size.tokens,
                .n = c->hidden,
                .x = run->x,
                .x_ld = c->hidden,
                .weight = *weight,
                .eps = c->eps,
                .round_first = true,
                .y = run->h,
                .y_ld = c->hidden,
        };

        return run->ops->norm(run->context, &args);
}

static int norm_heads(const TextRun *run, const LkVector *head_weight, uint64_t heads, void *x) {
        const H3TextConfig *c = &run->m->config;
        const LkQkNormRope args = {
                .type = run->type,
                .m = run->size.tokens,
                .heads = (uint32_t) heads,
                .head_dim = c->head_dim,
                .x = x,
                .x_ld = heads * c->head_dim,
                .weight = *head_weight,
                .eps = c->eps,
                .cos = run->cos,
                .sin = run->sin,
                .rope_dims = c->head_dim / 2,
        };

        return run->ops->qk_norm_rope(run->context, &args);
}

/* Q, K, V of own heads from h. */
static int project_heads(const TextRun *run, const H3TextLayer *l, H3Range kv) {
        const H3TextConfig *c = &run->m->config;
        uint64_t n = run->size.tokens, group = c->heads / c->kv_heads, keys = h3_range_size(kv);
        H3Range k_rows = {kv.begin * c->head_dim, kv.end * c->head_dim};
        H3Range q_rows = {k_rows.begin * group, k_rows.end * group};
        TextRows h = text_rows(run, run->h, c->hidden);
        int r;

        r = text_product(run, n, h, &l->q, NULL, q_rows, text_rows(run, run->q, h3_range_size(q_rows)));
        if (r >= 0)
                r = text_product(
                        run, n, h, &l->k, NULL, k_rows, text_rows(run, run->k, h3_range_size(k_rows)));
        if (r >= 0)
                r = text_product(
                        run, n, h, &l->v, NULL, k_rows, text_rows(run, run->v, h3_range_size(k_rows)));
        if (r >= 0)
                r = norm_heads(run, &l->q_norm, keys * group, run->q);
        return r < 0 ? r : norm_heads(run, &l->k_norm, keys, run->k);
}

static int attend(const TextRun *run, const H3TextLayer *l) {
        const H3TextConfig *c = &run->m->config;
        H3Range kv = text_own(run, c->kv_heads);
        uint64_t group = c->heads / c->kv_heads, keys = h3_range_size(kv);
        uint64_t inner = (uint64_t) c->heads * c->head_dim;
        const LkAttention args = {
                .type = run->type,
                .n_q = run->size.tokens,
                .n_k = run->size.tokens,
                .heads = (uint32_t) (keys * group),
                .kv_heads = (uint32_t) keys,
                .head_dim = c->head_dim,
                .causal = true,
                .first_row = 0,
                .scale = 1.0f / sqrtf((float) c->head_dim),
                .q = run->q,
                .k = run->k,
                .v = run->v,
                .o = text_column(text_rows(run, run->o, inner), kv.begin * group * c->head_dim).data,
                .q_ld = keys * group * c->head_dim,
                .k_ld = keys * c->head_dim,
                .v_ld = keys * c->head_dim,
                .o_ld = inner,
        };
        int r;

        if (keys == 0)
                return 0;
        r = project_heads(run, l, kv);
        return r < 0 ? r : text_attention(run, &args);
}

/* y = the MLP of rows begin .. begin + n of h. */
static int mlp_piece(TextRun *run, const H3TextLayer *l, uint64_t begin, uint64_t n) {
        const H3TextConfig *c = &run->m->config;
        H3Range own = text_own(run, c->ffn);
        uint64_t width = h3_range_size(own);
        TextRows h = text_at(text_rows(run, run->h, c->hidden), begin);
        TextRows y = text_at(text_rows(run, run->y, c->hidden), begin);
        TextRows act = text_rows(run, run->act, c->ffn);
        const LkSwiglu args = {
                .type = run->type,
                .m = n,
                .n = width,
                .gate = run->gate,
                .up = run->up,
                .gate_ld = width,
                .up_ld = width,
                .y = text_column(act, own.begin).data,
                .y_ld = c->ffn,
        };
        int r;

        r = text_product(run, n, h, &l->gate, NULL, own, text_rows(run, run->gate, width));
        if (r >= 0)
                r = text_product(run, n, h, &l->up, NULL, own, text_rows(run, run->up, width));
        if (r >= 0 && width > 0)
                r = run->ops->swiglu(run->context, &args);
        if (r >= 0)
                r = text_gather(run, n, act, c->ffn, 1);
        return r < 0 ? r : text_linear(run, n, act, &l->down, NULL, 0, y);
}

/* What the tower's merger `i` made, onto the rows of its tokens. */
static int add_deepstack(const TextRun *run, const H3TextInput *in, uint32_t i) {
        const H3TextConfig *c = &run->m->config;
        uint64_t merged = 0;
        int r = 0;

        for (size_t v = 0; r >= 0 && i < c->vision.n_deepstack && v < in->n_vision; v++) {
                uint64_t n = in->vision[v].grid_height * in->vision[v].grid_width / 4;

                r = text_add(run, n, c->hidden, text_at(stream(run), in->vision[v].first_token),
                        text_at(text_rows(run, run->deepstack[i], c->hidden), merged));
                merged += n;
        }
        return r;
}

/* With the weights of layer i. */
static int run_layer(TextRun *run, const H3TextLayer *l) {
        const H3TextConfig *c = &run->m->config;
        uint64_t n = run->size.tokens, group = c->heads / c->kv_heads;
        TextRows o = text_rows(run, run->o, (uint64_t) c->heads * c->head_dim);
        TextRows y = text_rows(run, run->y, c->hidden);
        int r;

        r = norm(run, &l->norm1);
        if (r >= 0)
                r = attend(run, l);
        if (r >= 0)
                r = text_gather(run, n, o, c->kv_heads, group * c->head_dim);
        if (r >= 0)
                r = text_linear(run, n, o, &l->out, NULL, 0, y);
        if (r >= 0)
                r = text_add(run, n, c->hidden, stream(run), y);

        if (r >= 0)
                r = norm(run, &l->norm2);
        for (uint64_t begin = 0; r >= 0 && begin < n; begin += TEXT_PIECE_ROWS)
                r = mlp_piece(run, l, begin, min_of(n - begin, TEXT_PIECE_ROWS));
        return r < 0 ? r : text_add(run, n, c->hidden, stream(run), y);
}

static int layer(TextRun *run, const H3TextInput *in, uint32_t i) {
        const H3TextModel *m;
        int r;

        r = text_take(run, H3_PART_STAGE, i, &m);
        if (r < 0)
                return r;
        r = run_layer(run, m->layers + i);
        text_give(run, H3_PART_STAGE, i);
        if (r >= 0)
                r = add_deepstack(run, in, i);
        if (r >= 0)
                r = text_tap(run, "residual", i + 1, run->x, run->size.tokens, run->m->config.hidden);
        return r < 0 ? r : text_block_done(run);
}

static int run_all(TextRun *run, const H3TextInput *in, void *ret_hidden) {
        const H3TextConfig *c = &run->m->config;
        int r;

        run->total = c->layers + (uint32_t) in->n_vision * c->vision.depth;
        r = enter(run, in);
        if (r >= 0)
                r = upload_rope(run, in);
        for (uint32_t i = 0; r >= 0 && i < c->layers; i++)
                r = layer(run, in, i);
        if (r < 0 || !ret_hidden)
                return r;
        return run->ops->download(run->context, ret_hidden, run->x, in->n * c->hidden * run->element);
}

static int run_fault(Fault *f, int r) {
        if (r == -ENOMEM)
                return fault_set(f, r, FAULT_DOES_NOT_FIT,
                        "No memory left in the conditioner; free some and try again.");
        if (r == -ECANCELED)
                return fault_set(f, r, FAULT_CANCELLED, "The encoding was cancelled.");
        return fault_set(f, r, FAULT_INTERNAL, "The conditioner failed: %s.", strerrordesc_np(-r));
}

static int run_of_rank(const H3Rank *rank, const H3TextModel *m, const H3TextInput *in,
        const H3StepHooks *hooks, void *ret_hidden, Fault *f) {
        const H3Plan *plan = rank->plan;
        H3TextSize size;
        uint64_t bytes;
        TextRun run;
        void *arena;
        int r;

        if (rank->index >= plan->ranks || plan->ranks > H3_TEXT_RANKS_MAX ||
                (plan->ranks > 1 && !rank->exchange))
                return fault_set(f, -EINVAL, FAULT_INTERNAL,
                        "The plan does not fit the conditioner: rank %" PRIu32 " of %" PRIu32 ".",
                        rank->index, plan->ranks);
        r = h3_text_check(m, in, f);
        if (r < 0)
                return r;
        size = h3_text_size(in, plan->ranks);
        run = text_run_make(m, &size, rank->index);
        run.rank = rank;
        run.ops = rank->ops;
        run.context = rank->context;
        run.hooks = hooks;

        bytes = text_carve(&run, NULL);
        r = run.ops->memory_new(run.context, bytes, &arena);
        if (r == -ENOMEM)
                return fault_set(f, r, FAULT_DOES_NOT_FIT,
                        "The conditioner needs %" PRIu64 " bytes of device memory, which are not free.",
                        bytes);
        if (r < 0)
                return run_fault(f, r);
        (void) text_carve(&run, arena);
        r = run_all(&run, in, ret_hidden);
        run.ops->memory_free(run.context, arena);
        return r < 0 ? run_fault(f, r) : 0;
}

int h3_text_run(const H3Rank *rank, const H3TextModel *m, const H3TextInput *in, const H3StepHooks *hooks,
        void *ret_hidden, Fault *f) {
        Fault why = {};
        int r;

        r = run_of_rank(rank, m, in, hooks, ret_hidden, &why);
        if (r < 0 && rank->exchange) /* also what failed before its first message: others wait for it */
                rank->exchange->fail(rank->exchange, rank->index, r, &why);
        if (r < 0 && f && f->name[0] == '\0')
                *f = why;
        return r;
}
