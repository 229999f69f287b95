/* SPDX-License-Identifier: Apache-2.0 */
/* Attention, full or causal, with an online softmax. For a query row and a head, per tile of LK_KEY_TILE
 * keys in absolute order:
 *
 *   s[j] = scale * (q . k[j])           dot: one accumulator over ascending dims, fma
 *   m'   = max(m, max s[j])             m starts at -inf; a NaN score is not a maximum (it reaches p)
 *   u    = m', or 0 while m' is -inf    so that exp(-inf - u) is 0 and not NaN
 *   p[j] = exp(s[j] - u)                exp of kernels/cpu/vec.h
 *   f    = exp(m - u)
 *   b[g] = p[16g + i] + p[16g + 8 + i]  for g = 0..3, in each lane i = 0..7
 *   l    = fma(l, f, (b[0] + b[1]) + (b[2] + b[3]))
 *   o    = o * f, then for ascending j fma(p[j], v[j], o)    p rounded to bf16 or f16 here with these types
 *
 * and after the last tile o / (tree of l), rounded once. A row with every score at -inf gets zeros. Keys
 * missing from the last tile count as s = -inf in l and are not visited in o. Every decision is per row: a
 * causal row's last key is its own, and it does not see the tiles behind that. A
 * task is one head and a block of query rows of a sequence; its panels live in the thread's part of the scratch memory. */

#include <errno.h>

#include "kernels/cpu/check.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/pack.h"
#include "kernels/cpu/rows.h"
#include "kernels/cpu/tile.h"

#define HEAD_DIM_MAX 256u
#define BLOCK_PANELS (224u / TILE_ROWS) /* of query rows in a task: enough to pay for packing the keys */
#define BLOCK_ROWS (BLOCK_PANELS * TILE_ROWS)

/* Per thread. The dims of o and v are padded with zeros to whole tiles. */
typedef struct AttentionScratch {
        float q[BLOCK_PANELS][HEAD_DIM_MAX * TILE_LD]; /* [dim][row] of each panel */
        float k[HEAD_DIM_MAX * LK_KEY_TILE];           /* [dim][key] */
        float v[LK_KEY_TILE * HEAD_DIM_MAX];           /* [key][padded dims] */
        float o[BLOCK_ROWS * HEAD_DIM_MAX];            /* [row][padded dims] */
        float p[TILE_ROWS][LK_KEY_TILE];               /* scores, then probabilities of one panel */
        float max[BLOCK_PANELS][TILE_LD];
        float sum[BLOCK_ROWS][8];
} AttentionScratch;

typedef struct AttentionJob {
        const LkAttention *attention;
        const Threads *threads;
        AttentionScratch *scratch; /* one per thread */
        uint64_t blocks;           /* tasks per head */
        uint32_t padded;           /* head_dim in whole tiles */
        uint32_t group;            /* query heads that share a key head */
} AttentionJob;

static uint64_t attention_sequences(const LkAttention *a) {
        return a->sequences > 0 ? a->sequences : 1;
}

static const void *head_row(const LkAttention *a, const void *p, uint64_t row, uint64_t ld, uint32_t head) {
        return (const uint8_t *) p + (row * ld + (uint64_t) head * a->head_dim) * lk_type_size(a->type);
}

static void pack_queries(
        const AttentionJob *j, AttentionScratch *s, uint32_t head, uint64_t row, uint32_t n) {
        const LkAttention *a = j->attention;
        const void *rows[TILE_ROWS] = {};

        for (uint32_t i = 0; i < n; i += TILE_ROWS) {
                uint32_t h = n - i < TILE_ROWS ? n - i : TILE_ROWS;

                for (uint32_t r = 0; r < h; r++)
                        rows[r] = head_row(a, a->q, row + i + r, a->q_ld, head);

                pack_rows(rows, h, a->type, a->head_dim, TILE_LD, s->q[i / TILE_ROWS]);
        }
}

static void pack_keys(const AttentionJob *j, AttentionScratch *s, uint32_t head, uint64_t key, uint32_t n) {
        const LkAttention *a = j->attention;
        const void *rows[LK_KEY_TILE] = {};

        head /= j->group;
        for (uint32_t i = 0; i < n; i++)
                rows[i] = head_row(a, a->k, key + i, a->k_ld, head);

        pack_rows(rows, n, a->type, a->head_dim, LK_KEY_TILE, s->k);

        for (uint32_t i = 0; i < n; i++) {
                const void *v = head_row(a, a->v, key + i, a->v_ld, head);

                for (uint32_t d = 0; d < j->padded; d += VT_N)
                        vt_store(s->v + i * j->padded + d,
                                d < a->head_dim ? vt_get(v, a->type, d, a->head_dim) : vt_zero());
        }
}

/* Scales the scores of a row, drops those beyond the last key and returns the new maximum. */
static float scale_scores(float *p, float scale, uint32_t n_keys, float max) {
        float lanes[VT_N];
        VT m = vt_set1(max);

        for (uint32_t i = 0; i < LK_KEY_TILE; i += VT_N)
                vt_store(p + i, vt_mul(vt_set1(scale), vt_load(p + i)));

        for (uint32_t i = n_keys; i < LK_KEY_TILE; i++)
                p[i] = -F32_INFINITY;

        for (uint32_t i = 0; i < LK_KEY_TILE; i += VT_N)
                m = vt_max(vt_load(p + i), m);

        vt_store(lanes, m);
        for (uint32_t i = 0; i < VT_N; i++)
                max = lanes[i] > max ? lanes[i] : max;

        return max;
}

/* Scores of a row to probabilities; updates the sum. base: what the header of this file calls u. */
static void softmax_row(float *p, float base, float factor, float *sum, LkType type) {
        V8 t[4];

        for (uint32_t i = 0; i < LK_KEY_TILE; i += VT_N)
                vt_store(p + i, vt_exp(vt_sub(vt_load(p + i), vt_set1(base))));

        for (uint32_t i = 0; i < 4; i++)
                t[i] = v8_add(v8_load(p + 16 * i), v8_load(p + 16 * i + 8));

        t[0] = v8_add(v8_add(t[0], t[1]), v8_add(t[2], t[3]));
        v8_store(sum, v8_fma(v8_load(sum), v8_set1(factor), t[0]));

        for (uint32_t i = 0; type != LK_F32 && i < LK_KEY_TILE; i += VT_N)
                vt_store(p + i, type == LK_BF16 ? vt_round_bf16(vt_load(p + i)) : vt_round_f16(vt_load(p + i)));
}

/* How many of the n_keys keys from `key` on a query row sees. */
static uint32_t seen_keys(const LkAttention *a, uint64_t row, uint64_t key, uint32_t n_keys) {
        uint64_t end = a->first_row + row + 1;

        if (!a->causal || end >= key + n_keys)
                return n_keys;
        return end > key ? (uint32_t) (end - key) : 0;
}

/* o += p . v of h rows from row i of a panel. */
static void add_values(
        const AttentionJob *j, AttentionScratch *s, float *o, uint32_t i, uint32_t h, uint32_t n_keys) {
        for (uint32_t d = 0; d < j->padded; d += TILE_COLS) {
                Tile t = {.a = s->p[i],
                        .b = s->v + d,
                        .c = o + (uint64_t) i * j->padded + d,
                        .b_ld = j->padded,
                        .c_ld = j->padded,
                        .k = n_keys,
                        .carry = true};

                tile_run(&t, LK_KEY_TILE, 1, h);
        }
}

/* One panel of h rows, the first of which is query `row`, against the keys in s->k, s->v. */
static void attend_panel(const AttentionJob *j, AttentionScratch *s, uint32_t panel, uint32_t h,
        uint64_t row, uint64_t key, uint32_t n_keys) {
        const LkAttention *a = j->attention;
        float *o = s->o + (uint64_t) panel * TILE_ROWS * j->padded, base[TILE_LD] = {}, factor[TILE_LD];
        uint32_t seen[TILE_ROWS];

        for (uint32_t i = 0; i < h; i++)
                seen[i] = seen_keys(a, row + i, key, n_keys);
        if (seen[h - 1] == 0)
                return;

        for (uint32_t col = 0; col < LK_KEY_TILE; col += TILE_COLS) {
                Tile t = {.a = s->q[panel],
                        .b = s->k + col,
                        .c = s->p[0] + col,
                        .b_ld = LK_KEY_TILE,
                        .c_ld = LK_KEY_TILE,
                        .k = a->head_dim};

                tile_run(&t, 1, TILE_LD, h);
        }

        for (uint32_t i = 0; i < TILE_LD; i++)
                factor[i] = 0;
        for (uint32_t i = 0; i < h; i++) {
                float max;

                if (seen[i] == 0)
                        continue;
                max = scale_scores(s->p[i], a->scale, seen[i], s->max[panel][i]);
                base[i] = max == -F32_INFINITY ? 0 : max;
                factor[i] = s->max[panel][i] - base[i];
                s->max[panel][i] = max;
        }
        for (uint32_t i = 0; i < TILE_LD; i += VT_N)
                vt_store(factor + i, vt_exp(vt_load(factor + i)));

        for (uint32_t i = 0; i < h; i++) {
                float *out = o + (uint64_t) i * j->padded;

                if (seen[i] == 0)
                        continue;
                softmax_row(s->p[i], base[i], factor[i], s->sum[panel * TILE_ROWS + i], a->type);

                for (uint32_t d = 0; d < j->padded; d += VT_N)
                        vt_store(out + d, vt_mul(vt_load(out + d), vt_set1(factor[i])));
        }

        /* a row may not even add 0 * v of a key that it does not see: v may be no number */
        if (seen[0] == n_keys)
                add_values(j, s, o, 0, h, n_keys);
        else
                for (uint32_t i = 0; i < h; i++)
                        if (seen[i] > 0)
                                add_values(j, s, o, i, 1, seen[i]);
}

static void store_rows(
        const AttentionJob *j, const AttentionScratch *s, uint32_t head, uint64_t row, uint32_t n) {
        const LkAttention *a = j->attention;

        for (uint32_t i = 0; i < n; i++) {
                uint64_t at = (row + i) * a->o_ld + (uint64_t) head * a->head_dim;
                void *o = (uint8_t *) a->o + at * lk_type_size(a->type);
                float sum = v8_sum(v8_load(s->sum[i]));

                for (uint32_t d = 0; d < a->head_dim; d += VT_N) {
                        VT v = vt_load(s->o + (uint64_t) i * j->padded + d);

                        vt_put(o, a->type, d, a->head_dim, sum == 0 ? vt_zero() : vt_div(v, vt_set1(sum)));
                }
        }
}

static void attention_task(void *userdata, uint64_t task, uint32_t thread) {
        const AttentionJob *j = userdata;
        const LkAttention *a = j->attention;
        AttentionScratch *s = &j->scratch[thread];
        uint32_t head = (uint32_t) (task / j->blocks), n;
        uint64_t row = task % j->blocks * BLOCK_ROWS, end;

        n = a->n_q - row < BLOCK_ROWS ? (uint32_t) (a->n_q - row) : BLOCK_ROWS;

        memset(s->o, 0, (size_t) n * j->padded * sizeof(float));
        memset(s->sum, 0, sizeof(s->sum));
        for (uint32_t i = 0; i < BLOCK_PANELS * TILE_LD; i++)
                s->max[i / TILE_LD][i % TILE_LD] = -F32_INFINITY;

        pack_queries(j, s, head, row, n);

        end = a->causal ? a->first_row + row + n : a->n_k;
        /* all keys of a long film are seconds of work for one task */
        for (uint64_t key = 0; key < end && !threads_stopped(j->threads); key += LK_KEY_TILE) {
                uint32_t n_keys = end - key < LK_KEY_TILE ? (uint32_t) (end - key) : LK_KEY_TILE;

                pack_keys(j, s, head, key, n_keys);

                for (uint32_t i = 0; i < n; i += TILE_ROWS)
                        attend_panel(j, s, i / TILE_ROWS, n - i < TILE_ROWS ? n - i : TILE_ROWS, row + i,
                                key, n_keys);
        }

        store_rows(j, s, head, row, n);
}

static int check_attention(const LkAttention *a) {
        uint64_t n, keys, end, queries, seen, sequences;

        if (!a || a->head_dim == 0 || a->head_dim % 4 != 0 || a->head_dim > HEAD_DIM_MAX || a->n_k == 0)
                return -EINVAL;
        if (a->kv_heads > 0 && a->heads % a->kv_heads != 0)
                return -EINVAL;
        if (a->causal && (__builtin_add_overflow(a->first_row, a->n_q, &end) || end > a->n_k))
                return -EINVAL;

        n = (uint64_t) a->heads * a->head_dim;
        keys = a->kv_heads > 0 ? (uint64_t) a->kv_heads * a->head_dim : n;
        sequences = attention_sequences(a);
        if (__builtin_mul_overflow(a->n_q, sequences, &queries) || __builtin_mul_overflow(a->n_k, sequences, &seen))
                return -EINVAL;
        if (!check_any_rows(a->q, a->type, queries, n, a->q_ld) ||
                !check_any_rows(a->k, a->type, seen, keys, a->k_ld) ||
                !check_any_rows(a->v, a->type, seen, keys, a->v_ld) ||
                !check_any_rows(a->o, a->type, queries, n, a->o_ld))
                return -EINVAL;

        return 0;
}

int LK_ISA(attention)(LkContext *c, const LkAttention *a) {
        LkAttention one;
        AttentionJob j = {.attention = &one};
        void *scratch;
        int r;

        if (!c)
                return -EINVAL;

        r = check_attention(a);
        if (r < 0)
                return r;
        if (a->n_q == 0 || a->heads == 0)
                return 0;

        r = context_scratch(c, threads_count(c->threads) * sizeof(AttentionScratch), &scratch);
        if (r < 0)
                return r;

        one = *a;
        j.threads = c->threads;
        j.scratch = scratch;
        j.group = a->kv_heads > 0 ? a->heads / a->kv_heads : 1;
        j.blocks = a->n_q / BLOCK_ROWS + (a->n_q % BLOCK_ROWS != 0);
        j.padded = (a->head_dim + TILE_COLS - 1) / TILE_COLS * TILE_COLS;

        for (uint64_t i = 0; r >= 0 && i < attention_sequences(a); i++) {
                if (i > 0) {
                        one.q = rows_at(one.q, a->type, a->n_q, a->q_ld);
                        one.k = rows_at(one.k, a->type, a->n_k, a->k_ld);
                        one.v = rows_at(one.v, a->type, a->n_k, a->v_ld);
                        one.o = rows_at_mutable(one.o, a->type, a->n_q, a->o_ld);
                }
                r = threads_run(c->threads, j.blocks * a->heads, attention_task, &j);
        }
        return r;
}
