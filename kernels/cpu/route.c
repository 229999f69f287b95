/* SPDX-License-Identifier: Apache-2.0 */
/* Which blocks of keys a block of queries sees row by row. */

#include <errno.h>

#include "kernels/cpu/check.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/rows.h"
#include "kernels/cpu/vec.h"

/* Integers in the order of the numbers; -0 is 0, a NaN is the least of all. */
static uint32_t order_key(float f) {
        uint32_t u = f32_bits(f + 0.0f);

        if ((u & 0x7fffffffu) > 0x7f800000u)
                return 0;
        return u & 0x80000000u ? ~u : u | 0x80000000u;
}

/* The key of the keep-th largest dot from block `sinks` on: the largest one that so many reach. UINT32_MAX: none. */
static uint32_t least_key(const float *dot, uint32_t sinks, uint32_t n, uint32_t keep) {
        uint32_t key = 0;

        if (keep == 0 || sinks >= n)
                return UINT32_MAX;
        for (uint32_t bit = UINT32_C(1) << 31; bit > 0; bit >>= 1) {
                uint32_t reached = 0;

                for (uint32_t b = sinks; b < n; b++)
                        reached += order_key(dot[b]) >= (key | bit);
                if (reached >= keep)
                        key |= bit;
        }
        return key > 0 ? key : 1; /* 0: a NaN */
}

static float dot_of(const float *a, const float *b, uint32_t n) {
        float sum = 0;

        for (uint32_t d = 0; d < n; d++)
                sum = f32_fma(a[d], b[d], sum);
        return sum;
}

static float limit_of(const LkRoute *a, float c, const float *q, uint32_t head) {
        const float *variance = a->variance + (uint64_t) head * a->head_dim;
        float sum = 0;

        for (uint32_t d = 0; d < a->head_dim; d++)
                sum = f32_fma(q[d] * q[d], variance[d], sum);
        return a->tau * f32_sqrt((c * c) * sum + 1e-6f);
}

static bool always_seen(const LkRoute *a, uint32_t i, uint32_t b) {
        return b < a->sinks || (i >= a->dense_begin && i < a->dense_end) || (i > b ? i - b : b - i) < a->reach;
}

/* score holds the dots first. */
static void route_block(const void *arg, uint64_t task) {
        const LkRoute *a = arg;
        const float c = a->scale * EXP_LOG2E;
        uint32_t head = (uint32_t) (task / a->n_q), i = a->first + (uint32_t) (task % a->n_q), seen = 0, least = 0;
        uint64_t width = (uint64_t) a->heads * a->head_dim, at = (uint64_t) head * a->head_dim;
        const float *q = a->q + i * width + at;
        uint32_t *list = a->list + task * a->n;
        float *score = a->score + task * a->n, limit = 0;

        for (uint32_t b = 0; b < a->n; b++)
                score[b] = dot_of(q, a->k + b * width + at, a->head_dim);
        if (a->by_rank)
                least = least_key(score, a->sinks, a->n, a->keep);
        else
                limit = limit_of(a, c, q, head);

        for (int pass = 0; pass < 2; pass++) { /* those that are seen, then the others */
                uint32_t n = pass == 0 ? 0 : seen;

                for (uint32_t b = 0; b < a->n; b++) {
                        bool chosen = a->by_rank ? order_key(score[b]) >= least : score[b] * c > limit;

                        if ((chosen || always_seen(a, i, b)) == (pass == 0))
                                list[n++] = b;
                }
                if (pass == 0)
                        seen = n;
        }
        a->count[task] = seen;
        for (uint32_t b = 0; b < a->n; b++)
                score[b] *= a->scale;
}

int LK_ISA(route)(LkContext *c, const LkRoute *a) {
        if (!c || !a || !check_route(a))
                return -EINVAL;

        return rows_run(c, (uint64_t) a->heads * a->n_q, (uint64_t) a->n * a->head_dim, route_block, a);
}
