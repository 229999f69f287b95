/* SPDX-License-Identifier: Apache-2.0 */
#include "service/worker/plan.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>

#include "service/shared/cleanup.h"

/* One list of ranges: [0, total) without gaps. tile: all cuts but the last are multiples of it. */
static int check_ranges(
        const char *what, const H3Range *ranges, uint32_t ranks, uint64_t total, uint32_t tile, Fault *f) {
        uint64_t at = 0;

        for (uint32_t i = 0; i < ranks; i++) {
                const H3Range *x = &ranges[i];

                if (x->begin != at || x->end < x->begin || x->end > total)
                        return fault_set(f, -EINVAL, FAULT_INTERNAL,
                                "The plan gives rank %" PRIu32 " the %s [%" PRIu64 ", %" PRIu64
                                "), expected a range from %" PRIu64 " that ends at %" PRIu64 " or before.",
                                i, what, x->begin, x->end, at, total);

                if (x->end != total && x->end % tile != 0)
                        return fault_set(f, -EINVAL, FAULT_INTERNAL,
                                "The plan cuts the %s at %" PRIu64
                                ", which is no multiple of the tile of %" PRIu32 ".",
                                what, x->end, tile);
                at = x->end;
        }

        if (at != total)
                return fault_set(f, -EINVAL, FAULT_INTERNAL,
                        "The plan covers %" PRIu64 " of %" PRIu64 " %s.", at, total, what);
        return 0;
}

static int check_numbers(const WirePlan *w, uint64_t rows, uint32_t ranks, Fault *f) {
        if (w->ranks == 0 || w->ranks > ranks || ranks > WIRE_RANKS_MAX)
                return fault_set(f, -EINVAL, FAULT_INTERNAL,
                        "The plan is for %" PRIu32 " ranks, this worker has %" PRIu32 ".", w->ranks, ranks);

        if (w->kind == WIRE_PLAN_AUTO || w->kind >= _WIRE_PLAN_MAX || w->exchange == WIRE_EXCHANGE_AUTO ||
                w->exchange >= _WIRE_EXCHANGE_MAX)
                return fault_set(f, -EINVAL, FAULT_INTERNAL,
                        "The plan is of the unknown kind %" PRIu32 " or exchange %" PRIu32 ".", w->kind,
                        w->exchange);

        if (w->row_tile == 0)
                return fault_set(f, -EINVAL, FAULT_INTERNAL, "The plan has a row tile of 0.");

        if (w->chunks == 0 || w->chunks > WIRE_CHUNKS_MAX || w->chunks > rows)
                return fault_set(f, -EINVAL, FAULT_INTERNAL,
                        "The plan has %" PRIu32 " chunks for %" PRIu64 " rows.", w->chunks, rows);

        for (uint32_t i = w->ranks; i < WIRE_RANKS_MAX; i++)
                if (w->rows[i].begin != 0 || w->rows[i].end != 0 || w->heads[i].begin != 0 ||
                        w->heads[i].end != 0)
                        return fault_set(f, -EINVAL, FAULT_INTERNAL,
                                "The plan has an entry for rank %" PRIu32 " of %" PRIu32 ".", i, w->ranks);

        return 0;
}

ExchangeKind plan_exchange_kind(uint32_t exchange) {
        return exchange == WIRE_EXCHANGE_P2P ? EXCHANGE_P2P : exchange == WIRE_EXCHANGE_NCCL ? EXCHANGE_NCCL : EXCHANGE_HOST;
}

int plan_new(const WirePlan *w, uint64_t rows, uint32_t heads, uint32_t ranks, Plan **ret, Fault *f) {
        CLEANUP_FREE Plan *p = NULL;
        int r;

        r = check_numbers(w, rows, ranks, f);
        if (r < 0)
                return r;

        p = calloc(1, sizeof(*p));
        if (!p)
                return -ENOMEM;

        for (uint32_t i = 0; i < w->ranks; i++) {
                p->rows[i] = (H3Range){w->rows[i].begin, w->rows[i].end};
                p->heads[i] = (H3Range){w->heads[i].begin, w->heads[i].end};
        }

        r = check_ranges("rows", p->rows, w->ranks, rows, w->row_tile, f);
        if (r < 0)
                return r;

        r = check_ranges("heads", p->heads, w->ranks, heads, 1, f);
        if (r < 0)
                return r;

        p->h3 = (H3Plan){
                .kind = w->kind == WIRE_PLAN_KV_GATHER        ? H3_PLAN_KV_GATHER
                        : w->kind == WIRE_PLAN_QKV_ALL_TO_ALL ? H3_PLAN_QKV_ALL_TO_ALL
                                                              : H3_PLAN_HIDDEN_GATHER,
                .ranks = w->ranks,
                .row_tile = w->row_tile,
                .chunks = w->chunks,
                .rows = p->rows,
                .heads = p->heads,
        };
        p->exchange = plan_exchange_kind(w->exchange);
        *ret = STEAL_PTR(p);
        return 0;
}

Plan *plan_free(Plan *p) {
        free(p);
        return NULL;
}
