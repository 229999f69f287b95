/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* What attention and sparse attention share: an online softmax over tiles of up to LK_KEY_TILE keys. For a query row
 * and a head, per tile:
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
 * missing from a tile count as s = -inf in l and are not visited in o. Every decision is per row: a
 * causal row's last key is its own, and it does not see the tiles behind that. */

#include "kernels/cpu/check.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/pack.h"
#include "kernels/cpu/rows.h"
#include "kernels/cpu/tile.h"

#define ATTENTION_HEAD_DIM_MAX 256u
#define ATTENTION_PANELS (224u / TILE_ROWS) /* of query rows in a task: enough to pay for packing the keys */
#define ATTENTION_ROWS (ATTENTION_PANELS * TILE_ROWS)

/* Per thread. The dims of o and v are padded with zeros to whole tiles. */
typedef struct AttentionScratch {
        float q[ATTENTION_PANELS][ATTENTION_HEAD_DIM_MAX * TILE_LD]; /* [dim][row] of each panel */
        float k[ATTENTION_HEAD_DIM_MAX * LK_KEY_TILE];           /* [dim][key] */
        float v[LK_KEY_TILE * ATTENTION_HEAD_DIM_MAX];           /* [key][padded dims] */
        float o[ATTENTION_ROWS * ATTENTION_HEAD_DIM_MAX];            /* [row][padded dims] */
        float p[TILE_ROWS][LK_KEY_TILE];               /* scores, then probabilities of one panel */
        float max[ATTENTION_PANELS][TILE_LD];
        float sum[ATTENTION_ROWS][8];
} AttentionScratch;

typedef struct AttentionCall {
        const LkAttention *attention;
        uint32_t padded; /* head_dim in whole tiles */
        uint32_t group;  /* query heads that share a key head */
} AttentionCall;

static inline const void *attention_head_row(const LkAttention *a, const void *p, uint64_t row, uint64_t ld, uint32_t head) {
        return (const uint8_t *) p + (row * ld + (uint64_t) head * a->head_dim) * lk_type_size(a->type);
}

static inline void attention_pack_queries(
        const AttentionCall *j, AttentionScratch *s, uint32_t head, uint64_t row, uint32_t n) {
        const LkAttention *a = j->attention;
        const void *rows[TILE_ROWS] = {};

        for (uint32_t i = 0; i < n; i += TILE_ROWS) {
                uint32_t h = n - i < TILE_ROWS ? n - i : TILE_ROWS;

                for (uint32_t r = 0; r < h; r++)
                        rows[r] = attention_head_row(a, a->q, row + i + r, a->q_ld, head);

                pack_rows(rows, h, a->type, a->head_dim, TILE_LD, s->q[i / TILE_ROWS]);
        }
}

static inline void attention_pack_keys(const AttentionCall *j, AttentionScratch *s, uint32_t head, uint64_t key, uint32_t n) {
        const LkAttention *a = j->attention;
        const void *rows[LK_KEY_TILE] = {};

        head /= j->group;
        for (uint32_t i = 0; i < n; i++)
                rows[i] = attention_head_row(a, a->k, key + i, a->k_ld, head);

        pack_rows(rows, n, a->type, a->head_dim, LK_KEY_TILE, s->k);

        for (uint32_t i = 0; i < n; i++) {
                const void *v = attention_head_row(a, a->v, key + i, a->v_ld, head);

                for (uint32_t d = 0; d < j->padded; d += VT_N)
                        vt_store(s->v + i * j->padded + d,
                                d < a->head_dim ? vt_get(v, a->type, d, a->head_dim) : vt_zero());
        }
}

/* Scales the scores of a row, drops those beyond the last key and returns the new maximum. */
static inline float attention_scale_scores(float *p, float scale, uint32_t n_keys, float max) {
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

/* Scores of a row to probabilities, times weight (NULL: 1); updates the sum. base: what the header of this file calls u. */
static inline void attention_softmax_row(float *p, float base, float factor, const float *weight, float *sum, LkType type) {
        V8 t[4];

        for (uint32_t i = 0; i < LK_KEY_TILE; i += VT_N)
                vt_store(p + i, vt_exp(vt_sub(vt_load(p + i), vt_set1(base))));
        for (uint32_t i = 0; weight && i < LK_KEY_TILE; i += VT_N)
                vt_store(p + i, vt_mul(vt_load(p + i), vt_load(weight + i)));

        for (uint32_t i = 0; i < 4; i++)
                t[i] = v8_add(v8_load(p + 16 * i), v8_load(p + 16 * i + 8));

        t[0] = v8_add(v8_add(t[0], t[1]), v8_add(t[2], t[3]));
        v8_store(sum, v8_fma(v8_load(sum), v8_set1(factor), t[0]));

        for (uint32_t i = 0; type != LK_F32 && i < LK_KEY_TILE; i += VT_N)
                vt_store(p + i, type == LK_BF16 ? vt_round_bf16(vt_load(p + i)) : vt_round_f16(vt_load(p + i)));
}

/* How many of the n_keys keys from `key` on a query row sees. */
static inline uint32_t attention_seen_keys(const LkAttention *a, uint64_t row, uint64_t key, uint32_t n_keys) {
        uint64_t end = a->first_row + row + 1;

        if (!a->causal || end >= key + n_keys)
                return n_keys;
        return end > key ? (uint32_t) (end - key) : 0;
}

/* o += p . v of h rows from row i of a panel. */
static inline void attention_add_values(
        const AttentionCall *j, AttentionScratch *s, float *o, uint32_t i, uint32_t h, uint32_t n_keys) {
        Tile t = {.a = s->p[i],
                .b = s->v,
                .c = o + (uint64_t) i * j->padded,
                .b_ld = j->padded,
                .c_ld = j->padded,
                .k = n_keys,
                .carry = true};

        tile_columns(t, j->padded, LK_KEY_TILE, 1, h);
}

/* The scores in s->p of a panel of h rows, times scale, and the values in s->v into sums and outputs. seen: how many
 * of the tile's n_keys each row sees. */
static inline void attention_absorb(const AttentionCall *j, AttentionScratch *s, uint32_t panel, uint32_t h, const uint32_t *seen,
        uint32_t n_keys, float scale, const float *weight) {
        float *o = s->o + (uint64_t) panel * TILE_ROWS * j->padded, base[TILE_LD] = {}, factor[TILE_LD];

        for (uint32_t i = 0; i < TILE_LD; i++)
                factor[i] = 0;
        for (uint32_t i = 0; i < h; i++) {
                float max;

                if (seen[i] == 0)
                        continue;
                max = attention_scale_scores(s->p[i], scale, seen[i], s->max[panel][i]);
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
                attention_softmax_row(s->p[i], base[i], factor[i], weight, s->sum[panel * TILE_ROWS + i], j->attention->type);

                for (uint32_t d = 0; d < j->padded; d += VT_N)
                        vt_store(out + d, vt_mul(vt_load(out + d), vt_set1(factor[i])));
        }

        /* a row may not even add 0 * v of a key that it does not see: v may be no number */
        if (seen[0] == n_keys)
                attention_add_values(j, s, o, 0, h, n_keys);
        else
                for (uint32_t i = 0; i < h; i++)
                        if (seen[i] > 0)
                                attention_add_values(j, s, o, i, 1, seen[i]);
}

/* One panel of h rows, the first of which is query `row`, against the keys in s->k, s->v. */
static inline void attention_attend(const AttentionCall *j, AttentionScratch *s, uint32_t panel, uint32_t h, uint64_t row,
        uint64_t key, uint32_t n_keys) {
        const LkAttention *a = j->attention;
        uint32_t seen[TILE_ROWS];

        for (uint32_t i = 0; i < h; i++)
                seen[i] = attention_seen_keys(a, row + i, key, n_keys);
        if (seen[h - 1] == 0)
                return;

        tile_columns((Tile){.a = s->q[panel], .b = s->k, .c = s->p[0], .b_ld = LK_KEY_TILE, .c_ld = LK_KEY_TILE, .k = a->head_dim},
                LK_KEY_TILE, 1, TILE_LD, h);
        attention_absorb(j, s, panel, h, seen, n_keys, a->scale, NULL);
}

/* Before the first tile of n rows, which are packed. */
static inline void attention_begin(
        const AttentionCall *j, AttentionScratch *s, uint32_t head, uint64_t row, uint32_t n) {
        memset(s->o, 0, (size_t) n * j->padded * sizeof(float));
        memset(s->sum, 0, sizeof(s->sum));
        for (uint32_t i = 0; i < ATTENTION_PANELS * TILE_LD; i++)
                s->max[i / TILE_LD][i % TILE_LD] = -F32_INFINITY;

        attention_pack_queries(j, s, head, row, n);
}

/* The quotient of row i, from dim d on. */
static inline VT attention_quotient(const AttentionCall *j, const AttentionScratch *s, uint32_t i, uint32_t d, float sum) {
        VT v = vt_load(s->o + (uint64_t) i * j->padded + d);

        return sum == 0 ? vt_zero() : vt_div(v, vt_set1(sum));
}

static inline uint64_t attention_sequences(const LkAttention *a) {
        return a->sequences > 0 ? a->sequences : 1;
}

static inline AttentionCall attention_call(const LkAttention *a) {
        return (AttentionCall){
                .attention = a,
                .padded = (a->head_dim + TILE_COLS - 1) / TILE_COLS * TILE_COLS,
                .group = a->kv_heads > 0 ? a->heads / a->kv_heads : 1,
        };
}

/* Whether the arguments hold what ops.h says. */
static inline bool attention_check(const LkAttention *a) {
        uint64_t n, keys, end, queries, seen;

        if (a->head_dim == 0 || a->head_dim % 4 != 0 || a->head_dim > ATTENTION_HEAD_DIM_MAX || a->n_k == 0)
                return false;
        if (a->kv_heads > 0 && a->heads % a->kv_heads != 0)
                return false;
        if (a->causal && (__builtin_add_overflow(a->first_row, a->n_q, &end) || end > a->n_k))
                return false;

        n = (uint64_t) a->heads * a->head_dim;
        keys = a->kv_heads > 0 ? (uint64_t) a->kv_heads * a->head_dim : n;
        if (__builtin_mul_overflow(a->n_q, attention_sequences(a), &queries) ||
                __builtin_mul_overflow(a->n_k, attention_sequences(a), &seen))
                return false;
        return check_any_rows(a->q, a->type, queries, n, a->q_ld) && check_any_rows(a->k, a->type, seen, keys, a->k_ld) &&
               check_any_rows(a->v, a->type, seen, keys, a->v_ld) && check_any_rows(a->o, a->type, queries, n, a->o_ld);
}
