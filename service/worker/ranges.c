/* SPDX-License-Identifier: Apache-2.0 */
#include "service/worker/ranges.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define FIRST_MAX 16

void ranges_done(Ranges *r) {
        free(r->all);
        *r = (Ranges){};
}

/* The first that ends at `at` or behind it. */
static size_t find(const Ranges *r, uint64_t at) {
        size_t low = 0, high = r->n;

        while (low < high) {
                size_t middle = low + (high - low) / 2;

                if (r->all[middle].end < at)
                        low = middle + 1;
                else
                        high = middle;
        }
        return low;
}

static int make_room(Ranges *r) {
        size_t max = r->max > 0 ? 2 * r->max : FIRST_MAX;
        struct RangesOne *all;

        if (r->n < r->max)
                return 0;
        all = realloc(r->all, max * sizeof(*all));
        if (!all)
                return -ENOMEM;
        r->all = all;
        r->max = max;
        return 0;
}

int ranges_add(Ranges *r, uint64_t begin, uint64_t end) {
        uint64_t joined = 0;
        size_t i, n = 0;
        int error;

        if (begin >= end)
                return 0;
        error = make_room(r);
        if (error < 0)
                return error;

        i = find(r, begin);
        for (; i + n < r->n && r->all[i + n].begin <= end; n++) { /* touches it */
                joined += r->all[i + n].end - r->all[i + n].begin;
                begin = r->all[i + n].begin < begin ? r->all[i + n].begin : begin;
                end = r->all[i + n].end > end ? r->all[i + n].end : end;
        }
        memmove(r->all + i + 1, r->all + i + n, (r->n - i - n) * sizeof(*r->all));
        r->all[i] = (struct RangesOne){begin, end};
        r->n += 1 - n;
        r->bytes += end - begin - joined;
        return 0;
}

bool ranges_have(const Ranges *r, uint64_t begin, uint64_t end) {
        size_t i = find(r, end);

        return begin >= end || (i < r->n && r->all[i].begin <= begin);
}
