/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The broker's PLAN as the model's code wants it, checked. */

#include <stdint.h>

#include "service/h3/rank.h"
#include "service/shared/wire.h"
#include "service/worker/exchange.h"

typedef struct Plan {
        H3Plan h3; /* points to the arrays below */
        ExchangeKind exchange;
        H3Range rows[WIRE_RANKS_MAX];
        H3Range heads[WIRE_RANKS_MAX];
} Plan;

/* Checks a plan for a sequence of `rows` rows, `heads` heads and a group of `ranks` (the plan may use fewer):
 * kind and exchange known, tile and chunks in range, ranges contiguous, ascending and complete, cuts at multiples of the tile, entries of
 * ranks that do not exist zero. -EINVAL (Internal: the broker made it), -ENOMEM. */
int plan_new(const WirePlan *w, uint64_t rows, uint32_t heads, uint32_t ranks, Plan **ret, Fault *f);
Plan *plan_free(Plan *p);

/* A WireExchange; AUTO is the host's. */
ExchangeKind plan_exchange_kind(uint32_t exchange);
