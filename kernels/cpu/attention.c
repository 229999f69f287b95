/* SPDX-License-Identifier: Apache-2.0 */
/* Attention, full or causal: all keys in absolute order in tiles of LK_KEY_TILE, as kernels/cpu/attention.h says. A task
 * is one head and a block of query rows of a sequence; its panels live in the thread's part of the scratch memory. */

#include <errno.h>

#include "kernels/cpu/attention.h"

typedef struct AttentionJob {
        AttentionCall call;
        const Threads *threads;
        AttentionScratch *scratch; /* one per thread */
        uint64_t blocks;           /* tasks per head */
} AttentionJob;

static void store_rows(
        const AttentionCall *j, const AttentionScratch *s, uint32_t head, uint64_t row, uint32_t n) {
        const LkAttention *a = j->attention;

        for (uint32_t i = 0; i < n; i++) {
                uint64_t at = (row + i) * a->o_ld + (uint64_t) head * a->head_dim;
                void *o = (uint8_t *) a->o + at * lk_type_size(a->type);
                float sum = v8_sum(v8_load(s->sum[i]));

                for (uint32_t d = 0; d < a->head_dim; d += VT_N)
                        vt_put(o, a->type, d, a->head_dim, attention_quotient(j, s, i, d, sum));
        }
}

static void attention_task(void *userdata, uint64_t task, uint32_t thread) {
        const AttentionJob *j = userdata;
        const LkAttention *a = j->call.attention;
        AttentionScratch *s = &j->scratch[thread];
        uint32_t head = (uint32_t) (task / j->blocks), n;
        uint64_t row = task % j->blocks * ATTENTION_ROWS, end;

        n = a->n_q - row < ATTENTION_ROWS ? (uint32_t) (a->n_q - row) : ATTENTION_ROWS;
        attention_begin(&j->call, s, head, row, n);

        end = a->causal ? a->first_row + row + n : a->n_k;
        /* all keys of a long film are seconds of work for one task */
        for (uint64_t key = 0; key < end && !threads_stopped(j->threads); key += LK_KEY_TILE) {
                uint32_t n_keys = end - key < LK_KEY_TILE ? (uint32_t) (end - key) : LK_KEY_TILE;

                attention_pack_keys(&j->call, s, head, key, n_keys);

                for (uint32_t i = 0; i < n; i += TILE_ROWS)
                        attention_attend(&j->call, s, i / TILE_ROWS, n - i < TILE_ROWS ? n - i : TILE_ROWS, row + i,
                                key, n_keys);
        }

        store_rows(&j->call, s, head, row, n);
}

int LK_ISA(attention)(LkContext *c, const LkAttention *a) {
        LkAttention one;
        AttentionJob j;
        void *scratch;
        int r;

        if (!c || !a || !attention_check(a))
                return -EINVAL;
        if (a->n_q == 0 || a->heads == 0)
                return 0;

        r = context_scratch(c, threads_count(c->threads) * sizeof(AttentionScratch), &scratch);
        if (r < 0)
                return r;

        one = *a;
        j = (AttentionJob){
                .call = attention_call(&one),
                .threads = c->threads,
                .scratch = scratch,
                .blocks = a->n_q / ATTENTION_ROWS + (a->n_q % ATTENTION_ROWS != 0),
        };
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
