/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The split of a step over ranks: contiguous rows cut at multiples of the row tile, contiguous heads
 * (DESIGN.md "The split"). */

#include "service/shared/wire.h"

/* Fills everything behind the header, which stays. Rows go in whole tiles, heads one by one, both as evenly
 * as can be: where it does not divide, the first ranks have one more (8 heads on 3 ranks: 3, 3, 2). A
 * sequence with fewer tiles than ranks is planned onto as many ranks as it has tiles; the others get empty
 * ranges at the end, of heads too. More ranks than heads: the last ones have rows but no heads. -EINVAL: a
 * number is 0, ranks > WIRE_RANKS_MAX. */
int plan_make(uint64_t rows, uint32_t heads, uint32_t ranks, uint32_t row_tile, WirePlan *ret);
