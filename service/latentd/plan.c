/* SPDX-License-Identifier: Apache-2.0 */
#include "service/latentd/plan.h"

#include <errno.h>
#include <string.h>

#include "service/shared/cleanup.h"

/* A chunk's rows: small enough for the working memory of a card, large enough for its kernels
 * (several chunks hide the exchange behind the computation). */
#define CHUNK_ROWS 8192
#define CHUNKS_SPLIT 4 /* at least, of several ranks */

/* ret[i]: what of `total` is due to rank i by its share. Shares of 0 get nothing; one is not 0. */
static void divide(uint64_t total, uint32_t n, const uint64_t *shares, uint64_t *ret) {
        uint64_t sum = 0, left = total, remainder[WIRE_RANKS_MAX];

        for (uint32_t i = 0; i < n; i++)
                sum += shares[i];
        for (uint32_t i = 0; i < n; i++) {
                ret[i] = total * shares[i] / sum;
                remainder[i] = total * shares[i] % sum;
                left -= ret[i];
        }
        while (left-- > 0) {
                uint32_t best = 0;

                for (uint32_t i = 1; i < n; i++)
                        if (remainder[i] > remainder[best])
                                best = i;
                ret[best]++;
                remainder[best] = 0;
        }
}

/* Leaves the `keep` largest shares, the first among equals. */
static void drop_shares(uint32_t n, uint64_t keep, uint64_t *shares) {
        uint64_t used = 0;

        for (uint32_t i = 0; i < n; i++)
                used += shares[i] > 0;
        for (; used > keep; used--) {
                uint32_t least = n;

                for (uint32_t i = 0; i < n; i++)
                        if (shares[i] > 0 && (least == n || shares[i] <= shares[least]))
                                least = i;
                shares[least] = 0;
        }
}

static WirePlanKind choose_kind(const PlanWishes *w, uint32_t ranks, uint32_t heads) {
        if (w->kind != WIRE_PLAN_AUTO)
                return w->kind;
        /* Most ranks would have no head to attend for. */
        return ranks > heads ? WIRE_PLAN_KV_GATHER : WIRE_PLAN_HIDDEN_GATHER;
}

/* tiles: of the rank that has most. */
static uint32_t choose_chunks(const PlanWishes *w, uint32_t ranks, uint64_t tiles, uint32_t row_tile) {
        uint64_t chunks = w->chunks;

        if (chunks == 0)
                chunks = (tiles * row_tile + CHUNK_ROWS - 1) / CHUNK_ROWS;
        if (w->chunks == 0 && ranks > 1 && chunks < CHUNKS_SPLIT)
                chunks = CHUNKS_SPLIT;
        if (chunks > WIRE_CHUNKS_MAX)
                chunks = WIRE_CHUNKS_MAX;
        return (uint32_t) (chunks < tiles ? chunks : tiles);
}

static bool wishes_are_possible(const PlanWishes *w) {
        if (w->ranks > WIRE_RANKS_MAX || w->n_shares > WIRE_RANKS_MAX || w->kind >= _WIRE_PLAN_MAX ||
                w->exchange >= _WIRE_EXCHANGE_MAX || w->chunks > WIRE_CHUNKS_MAX)
                return false;
        for (uint32_t i = 0; i < w->n_shares; i++)
                if (w->shares[i] == 0 || w->shares[i] > PLAN_SHARE_MAX)
                        return false;
        return true;
}

/* The shares of the ranks that have a part, 0 for those between them that have none; returns how many there are with these. */
static uint32_t take_part(uint32_t ranks, const PlanWishes *w, uint64_t *shares) {
        uint32_t n = 0, end = 0;

        for (uint32_t i = 0; i < ranks; i++) {
                shares[i] = 0;
                if (w->without >> i & 1 || (w->ranks > 0 && n >= w->ranks) || (w->n_shares > 0 && n >= w->n_shares))
                        continue;
                shares[i] = w->n_shares > 0 ? w->shares[n] : 1;
                n++;
                end = i + 1;
        }
        return end;
}

int plan_make(uint64_t rows, uint32_t heads, uint32_t ranks, uint32_t row_tile, const PlanWishes *w,
        WirePlan *ret) {
        uint64_t shares[WIRE_RANKS_MAX], tiles_of[WIRE_RANKS_MAX], heads_of[WIRE_RANKS_MAX];
        uint64_t tiles, tile = 0, head = 0, most = 0;
        WireHeader header;

        if (rows == 0 || rows > UINT64_C(1) << 40 || heads == 0 || ranks == 0 || ranks > WIRE_RANKS_MAX ||
                row_tile == 0 || !wishes_are_possible(w))
                return -EINVAL;

        ranks = take_part(ranks, w, shares);
        if (ranks == 0)
                return -EINVAL;
        tiles = (rows - 1) / row_tile + 1;
        drop_shares(ranks, tiles, shares);
        divide(tiles, ranks, shares, tiles_of);
        divide(heads, ranks, shares, heads_of);

        header = ret->header;
        memset(ret, 0, sizeof(*ret));
        ret->header = header;
        ret->ranks = ranks;
        ret->row_tile = row_tile;
        ret->kind = choose_kind(w, ranks, heads);
        ret->exchange = w->exchange == WIRE_EXCHANGE_AUTO ? WIRE_EXCHANGE_HOST : w->exchange; /* of AUTO: gpu-set.h may know better */
        for (uint32_t i = 0; i < ranks; i++) {
                tile += tiles_of[i];
                most = tiles_of[i] > most ? tiles_of[i] : most;
                ret->rows[i].begin = i > 0 ? ret->rows[i - 1].end : 0;
                ret->rows[i].end = tile == tiles ? rows : tile * row_tile;
                ret->heads[i].begin = (uint32_t) head;
                head += heads_of[i];
                ret->heads[i].end = (uint32_t) head;
        }
        ret->chunks = choose_chunks(w, ranks, most, row_tile);
        return 0;
}

bool plan_has_part(const WirePlan *p, uint32_t rank) {
        return p->rows[rank].end > p->rows[rank].begin || p->heads[rank].end > p->heads[rank].begin;
}

uint64_t plan_ranks_at_work(const WirePlan *p) {
        uint64_t bits = 0;

        for (uint32_t i = 0; i < p->ranks; i++)
                if (p->rows[i].end > p->rows[i].begin || (p->kind != WIRE_PLAN_KV_GATHER && p->heads[i].end > p->heads[i].begin))
                        bits |= UINT64_C(1) << i;
        return bits;
}

uint32_t plan_ranks_used(const WirePlan *p) {
        return (uint32_t) __builtin_popcountll(plan_ranks_at_work(p));
}

static const char *const kinds[_WIRE_PLAN_MAX] = {
        [WIRE_PLAN_AUTO] = "auto",
        [WIRE_PLAN_HIDDEN_GATHER] = "hidden-gather",
        [WIRE_PLAN_KV_GATHER] = "kv-gather",
        [WIRE_PLAN_QKV_ALL_TO_ALL] = "qkv-all-to-all",
};

static const char *const exchanges[_WIRE_EXCHANGE_MAX] = {
        [WIRE_EXCHANGE_AUTO] = "auto",
        [WIRE_EXCHANGE_HOST] = "host",
        [WIRE_EXCHANGE_P2P] = "p2p",
        [WIRE_EXCHANGE_NCCL] = "nccl",
};

const char *plan_kind_to_string(WirePlanKind k) {
        return kinds[k];
}

int plan_kind_from_string(const char *s, WirePlanKind *ret) {
        for (size_t i = 0; i < ELEMENTSOF(kinds); i++)
                if (strcmp(s, kinds[i]) == 0) {
                        *ret = (WirePlanKind) i;
                        return 0;
                }
        return -EINVAL;
}

const char *plan_exchange_to_string(WireExchange e) {
        return exchanges[e];
}

int plan_exchange_from_string(const char *s, WireExchange *ret) {
        for (size_t i = 0; i < ELEMENTSOF(exchanges); i++)
                if (strcmp(s, exchanges[i]) == 0) {
                        *ret = (WireExchange) i;
                        return 0;
                }
        return -EINVAL;
}
