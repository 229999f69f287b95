/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Row-wise ops: how rows are dealt out to threads. Rows never meet, so the cut shows nowhere in a result. */

#include <stdint.h>

#include "kernels/cpu/context.h"

typedef void (*RowTask)(const void *arg, uint64_t row);

typedef struct RowsJob {
        RowTask fn;
        const void *arg;
        uint64_t m, rows_per_task;
} RowsJob;

static inline void rows_task(void *userdata, uint64_t task, uint32_t thread) {
        const RowsJob *j = userdata;
        uint64_t end = (task + 1) * j->rows_per_task;

        for (uint64_t i = task * j->rows_per_task; i < end && i < j->m; i++)
                j->fn(j->arg, i);
}

/* Of about n elements each: big enough to be worth waking a thread. */
static inline uint64_t rows_per_task(uint64_t n) {
        return n >= 16384 ? 1 : 16384 / (n + 1) + 1;
}

/* Runs fn for rows 0..m-1 of about n elements each. */
static inline int rows_run(LkContext *c, uint64_t m, uint64_t n, RowTask fn, const void *arg) {
        uint64_t rows = rows_per_task(n);
        RowsJob job = {.fn = fn, .arg = arg, .m = m, .rows_per_task = rows};

        return threads_run(c->threads, m / rows + (m % rows != 0), rows_task, &job);
}

/* Address of row i. */
static inline const void *rows_at(const void *p, LkType t, uint64_t i, uint64_t ld) {
        return (const uint8_t *) p + i * ld * lk_type_size(t);
}

static inline void *rows_at_mutable(void *p, LkType t, uint64_t i, uint64_t ld) {
        return (uint8_t *) p + i * ld * lk_type_size(t);
}
