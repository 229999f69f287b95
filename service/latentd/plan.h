/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The split of a step over ranks: contiguous rows cut at multiples of the row tile, contiguous heads (DESIGN.md "The split"). */

#include "service/shared/wire.h"

/* ranks >= 1; a sequence too short for them is planned onto fewer (later ranks get empty ranges). Fills everything behind the header. -EINVAL. */
int plan_make(uint64_t rows, uint32_t heads, uint32_t ranks, uint32_t row_tile, WirePlan *ret);
