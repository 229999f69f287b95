/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The split of a step over ranks: contiguous rows cut at multiples of the row tile, contiguous heads
 * (DESIGN.md "The split"). */

#include <stdbool.h>
#include <stddef.h>

#include "service/shared/wire.h"

#define PLAN_SHARE_MAX UINT32_C(1000000)

/* What a session may say about it; all 0: as the service thinks best. */
typedef struct PlanWishes {
        uint32_t ranks; /* 0: all that the worker has */
        uint32_t n_shares;
        uint32_t shares[WIRE_RANKS_MAX]; /* [n_shares], 1 .. PLAN_SHARE_MAX, relative; none: equal */
        WirePlanKind kind;
        WireExchange exchange;
        uint32_t n_gpus; /* 0: all that there are */
        char gpus[WIRE_DEVICES_MAX][sizeof(((WireDevice *) NULL)->pci_address)]; /* gpu-set.h */
        uint64_t without; /* ranks that have no part, a bit each: ranks and shares are of the others */
        uint32_t chunks; /* 0: as fits; up to WIRE_CHUNKS_MAX */
} PlanWishes;

/* Fills everything behind the header, which stays. ranks: of the worker.
 *
 * Rows go in whole tiles, heads one by one, both by share: each rank has the whole part of what is due to it,
 * the rest goes to those with the largest remainders, the first among equals (8 heads on 3 ranks: 3, 3, 2). A
 * sequence with fewer tiles than ranks is planned onto as many ranks as it has tiles, those with the largest
 * shares; the others get empty ranges, of heads too. A rank with a small share may have rows and no heads, or
 * neither. Wishes for more ranks than there are (the worker was started anew with fewer) are planned down,
 * then shares count for the ranks that are left (without those that shall have no part; -EINVAL: all of them). More
 * chunks than the largest part has tiles are planned down. -EINVAL: a number is 0 or out of range. */
int plan_make(uint64_t rows, uint32_t heads, uint32_t ranks, uint32_t row_tile, const PlanWishes *wishes,
        WirePlan *ret);

/* Whether the rank has rows or heads. */
bool plan_has_part(const WirePlan *p, uint32_t rank);

/* Ranks with rows or heads: bits, and how many; with KV_GATHER those with rows, a rank has all heads of these there. */
uint64_t plan_ranks_at_work(const WirePlan *p);
uint32_t plan_ranks_used(const WirePlan *p);

/* "auto", "hidden-gather", ...; "auto", "host", ... From a string: -EINVAL for an unknown one. */
const char *plan_kind_to_string(WirePlanKind k);
int plan_kind_from_string(const char *s, WirePlanKind *ret);
const char *plan_exchange_to_string(WireExchange e);
int plan_exchange_from_string(const char *s, WireExchange *ret);
