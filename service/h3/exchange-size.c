/* SPDX-License-Identifier: Apache-2.0 */
#include "service/h3/exchange-size.h"

bool h3_block_is_int8(const H3Block *b, H3Compute compute, bool gated) {
        const LkMatrix *q = &b->attn.q, *k = &b->attn.k, *v = &b->attn.v, *gate = &b->attn.gate;

        if (gated && (gate->type != LK_I8 || gate->quant.rotation != q->quant.rotation))
                return false;

        return compute == H3_COMPUTE_BF16 && q->type == LK_I8 && k->type == LK_I8 && v->type == LK_I8 &&
               q->quant.rotation == k->quant.rotation && q->quant.rotation == v->quant.rotation;
}

/* How many of Q, K, V and gate a rank sends of a row's heads where it sends them. */
static uint64_t sent_arrays(const H3Plan *p) {
        if (p->kind == H3_PLAN_KV_GATHER)
                return p->sparse ? 3 : 2;
        return h3_sparse_is_gated(p->sparse) ? 4 : 3;
}

static uint64_t element(H3Compute compute) {
        return compute == H3_COMPUTE_F32 ? 4 : 2;
}

static uint64_t hidden_row(const H3Model *m, H3Compute compute, bool int8) {
        return int8 ? m->config.hidden + sizeof(float) : m->config.hidden * element(compute);
}

/* Bytes of a row's heads in one of Q, K, V, O. */
static uint64_t heads_row(const H3Model *m, H3Compute compute, H3Range heads) {
        return h3_range_size(heads) * m->config.head_dim * element(compute);
}

static bool has_receiver(const H3Plan *p, H3Phase phase, uint32_t from) {
        for (uint32_t to = 0; to < p->ranks; to++)
                if (h3_plan_receives(p, phase, from, to))
                        return true;
        return false;
}

uint64_t h3_message_max(const H3Model *m, const H3Plan *p, H3Compute compute, const H3Message *x) {
        uint32_t rows_of = x->phase == H3_PHASE_IN ? x->from : x->to;
        uint64_t rows;
        bool int8 = true;

        if (h3_plan_sends_to_all(p, x->phase) != (x->to == H3_TO_ALL))
                return 0;
        if (x->to == H3_TO_ALL ? !has_receiver(p, x->phase, x->from)
                               : !h3_plan_receives(p, x->phase, x->from, x->to))
                return 0;

        rows = h3_range_size(h3_plan_chunk(p, rows_of, x->chunk));
        if (x->phase == H3_PHASE_OUT)
                return rows * heads_row(m, compute, p->heads[x->from]);
        switch (p->kind) {
        case H3_PLAN_KV_GATHER:
                return rows * sent_arrays(p) * heads_row(m, compute, (H3Range){0, m->config.heads});
        case H3_PLAN_QKV_ALL_TO_ALL:
                return rows * sent_arrays(p) * heads_row(m, compute, p->heads[x->to]);
        default:
                for (uint32_t i = 0; i < m->config.layers; i++)
                        int8 = int8 && h3_block_is_int8(m->blocks + i, compute, h3_sparse_is_gated(p->sparse));
                return rows * hidden_row(m, compute, int8);
        }
}

/* HIDDEN_GATHER: rows as the block wants them go to all that have heads. */
static void add_hidden(const H3Model *m, const H3Plan *p, H3Compute compute, uint32_t rank, uint64_t *sent,
        uint64_t *received) {
        uint64_t own = h3_range_size(p->rows[rank]), rows = p->rows[p->ranks - 1].end;
        bool sends = has_receiver(p, H3_PHASE_IN, rank), receives = h3_range_size(p->heads[rank]) > 0;

        for (uint32_t i = 0; i < m->config.layers; i++) {
                uint64_t row = hidden_row(m, compute, h3_block_is_int8(m->blocks + i, compute, h3_sparse_is_gated(p->sparse)));

                *sent += sends ? own * row : 0;
                *received += receives ? (rows - own) * row : 0;
        }
}

void h3_exchange_size(const H3Model *m, const H3Plan *p, H3Compute compute, uint32_t rank,
        uint64_t *ret_sent, uint64_t *ret_received) {
        uint64_t layers = m->config.layers, own = h3_range_size(p->rows[rank]), sent = 0, received = 0;
        uint64_t others = p->rows[p->ranks - 1].end - own;
        uint64_t all_heads = heads_row(m, compute, (H3Range){0, m->config.heads});
        uint64_t own_heads = heads_row(m, compute, h3_plan_heads(p, rank, m->config.heads));

        switch (p->kind) {
        case H3_PLAN_KV_GATHER:
                sent = has_receiver(p, H3_PHASE_IN, rank) ? layers * own * sent_arrays(p) * all_heads : 0;
                received = own > 0 ? layers * others * sent_arrays(p) * all_heads : 0;
                break;
        case H3_PLAN_QKV_ALL_TO_ALL:
                sent = layers * (own * sent_arrays(p) * (all_heads - own_heads) + others * own_heads);
                received = layers * (others * sent_arrays(p) * own_heads + own * (all_heads - own_heads));
                break;
        default:
                sent = layers * others * own_heads;
                received = layers * own * (all_heads - own_heads);
                add_hidden(m, p, compute, rank, &sent, &received);
                break;
        }
        *ret_sent = sent;
        *ret_received = received;
}
