/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The abstract rank: one participant of a split step, its device and its way to the others. The model's code
 * is written over this and nothing else, so that a transport or a backend adds no model code. */

#include <stdbool.h>
#include <stdint.h>

#include "kernels/ops.h"
#include "service/shared/fault.h"

typedef struct H3Range {
        uint64_t begin, end;
} H3Range;

static inline uint64_t h3_range_size(H3Range r) {
        return r.end - r.begin;
}

typedef struct H3Sparse H3Sparse; /* sparse.h */

/* What travels so that every rank can attend. Each rank owns rows; all plans give the same bits. */
typedef enum H3PlanKind {
        H3_PLAN_HIDDEN_GATHER,  /* normed rows go to all; a rank attends for its heads, O goes back by rows */
        H3_PLAN_KV_GATHER,      /* K and V of all heads go to all; a rank attends for its rows, O stays */
        H3_PLAN_QKV_ALL_TO_ALL, /* Q, K and V go to the rank that has the head, O goes back by rows */
        _H3_PLAN_MAX,
} H3PlanKind;

/* The split of one step, the same on every rank; made by the broker (wire.h PLAN). */
typedef struct H3Plan {
        H3PlanKind kind;
        uint32_t ranks;
        uint32_t row_tile, chunks; /* both at least 1 */
        const H3Range *rows;       /* [ranks], packed rows owned; begins are multiples of row_tile */
        const H3Range *heads;      /* [ranks]; KV_GATHER: not looked at, a rank has all heads of its rows */
        const H3Sparse *sparse;    /* NULL: attention is dense. Else rows are packed in its order, and with KV_GATHER Q goes to
                                      all, too: a block of queries need not be one rank's. Every split gives the same bits */
} H3Plan;

/* Rows of a rank's chunk: its tiles in plan.chunks parts, as even as can be. May be empty. */
static inline H3Range h3_plan_chunk(const H3Plan *p, uint32_t rank, uint32_t chunk) {
        H3Range own = p->rows[rank];
        uint64_t tiles = (h3_range_size(own) + p->row_tile - 1) / p->row_tile;
        uint64_t begin = own.begin + tiles * chunk / p->chunks * p->row_tile;
        uint64_t end = own.begin + tiles * (chunk + 1) / p->chunks * p->row_tile;

        return (H3Range){begin < own.end ? begin : own.end, end < own.end ? end : own.end};
}

/* The heads that a rank attends for. */
static inline H3Range h3_plan_heads(const H3Plan *p, uint32_t rank, uint32_t all) {
        return p->kind == H3_PLAN_KV_GATHER ? (H3Range){0, all} : p->heads[rank];
}

/* Nothing to do in any block. */
static inline bool h3_plan_is_idle(const H3Plan *p, uint32_t rank) {
        return h3_range_size(p->rows[rank]) == 0 &&
               (p->kind == H3_PLAN_KV_GATHER || h3_range_size(p->heads[rank]) == 0);
}

/* A block has two exchanges. */
typedef enum H3Phase {
        H3_PHASE_IN,  /* to attention: rows of the sender's chunk */
        H3_PHASE_OUT, /* from attention: rows of the receiver's chunk, the sender's heads */
        _H3_PHASE_MAX,
} H3Phase;

#define H3_TO_ALL UINT32_MAX /* to every rank that needs it (h3_plan_receives()) */

/* Which message. Sender and receiver name it alike; a message without rows is neither sent nor awaited. */
typedef struct H3Message {
        H3Phase phase;
        uint32_t from, to, chunk;
        uint32_t sequence; /* 1, 2, ... of this (phase, from, to, chunk): the block it belongs to */
} H3Message;

/* Whether rank `to` takes what rank `from` sends in the phase. */
static inline bool h3_plan_receives(const H3Plan *p, H3Phase phase, uint32_t from, uint32_t to) {
        if (from == to)
                return false;
        if (p->kind == H3_PLAN_KV_GATHER)
                return phase == H3_PHASE_IN && h3_range_size(p->rows[to]) > 0;
        return h3_range_size(p->heads[phase == H3_PHASE_IN ? to : from]) > 0;
}

/* In IN of HIDDEN_GATHER and KV_GATHER all get the same. */
static inline bool h3_plan_sends_to_all(const H3Plan *p, H3Phase phase) {
        return phase == H3_PHASE_IN && p->kind != H3_PLAN_QKV_ALL_TO_ALL;
}

/* Rows in device memory: `rows` pieces of `width` bytes, `stride` bytes from one to the next. */
typedef struct H3View {
        void *data;
        uint64_t rows, width, stride;
} H3View;

#define H3_VIEWS_MAX 4 /* of a message: Q, K, V, gate */

typedef struct H3Exchange H3Exchange;
typedef struct H3Weights H3Weights; /* weights.h */
typedef struct H3Rank H3Rank;

/* Called on the rank's thread. Both return 0 or the group's first error, which releases every rank that
 * waits. Sender and receiver give views of the same sizes in the same order. */
struct H3Exchange {
        /* What the views hold leaves; their memory may be overwritten by work that the rank starts later.
         * Waits for nothing but the place of the message before (sequence - 1), which its receivers took. */
        int (*send)(H3Exchange *e, const H3Rank *rank, const H3Message *m, const H3View *views, uint32_t n);
        /* Waits for the message and puts it into the views; work that the rank starts later sees it. */
        int (*recv)(H3Exchange *e, const H3Rank *rank, const H3Message *m, const H3View *views, uint32_t n);
        /* The rank will not go on. f: why, for people; may be NULL. */
        void (*fail)(H3Exchange *e, uint32_t rank, int error, const Fault *f);
};

struct H3Rank {
        uint32_t index;
        const LkOps *ops;
        LkContext *context;
        const H3Plan *plan;
        H3Exchange *exchange; /* NULL with one rank: nothing to move */
        H3Weights *weights;   /* NULL: those of the model itself (LkOps.host_weights), and what an operation
                                 was given is done when it returns */
        uint32_t piece_rows;  /* rows that an MLP is made for at a time; 0: DIT_PIECE_ROWS. Changes no bit */
};
