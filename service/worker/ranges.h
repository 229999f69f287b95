/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Bytes of memory for which something is done: ranges, ascending, apart. A new one is all zeros. Not for several threads. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct Ranges {
        struct RangesOne {
                uint64_t begin, end;
        } *all; /* [n], owned */
        size_t n, max;
        uint64_t bytes; /* of all of them */
} Ranges;

void ranges_done(Ranges *r);

/* From now on it has [begin, end). -ENOMEM: nothing changed. */
int ranges_add(Ranges *r, uint64_t begin, uint64_t end);

/* Whether it has all of [begin, end). */
bool ranges_have(const Ranges *r, uint64_t begin, uint64_t end);
