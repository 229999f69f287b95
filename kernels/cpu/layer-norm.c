/* SPDX-License-Identifier: Apache-2.0 */
/* Layer norm of a row. The variance is that of the differences, so that a large mean costs no digits. */

#include <errno.h>

#include "kernels/cpu/check.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/rows.h"
#include "kernels/cpu/vec.h"

VEC_INLINE float row_mean(const void *x, LkType t, uint64_t n) {
        V8 sum = v8_zero();

        for (uint64_t i = 0; i < n; i += 8)
                sum = v8_add(sum, v8_get(x, t, i, n)); /* + 0 of a missing element */

        return v8_sum(sum) / (float) n;
}

VEC_INLINE float row_variance(const void *x, LkType t, uint64_t n, float mean) {
        V8 sum = v8_zero(), minus = v8_set1(-mean);

        for (uint64_t i = 0; i < n; i += 8) {
                V8 d = v8_add(v8_get(x, t, i, n), minus);
                float lanes[8];

                if (n - i < 8) { /* a missing element differs by nothing */
                        v8_store(lanes, d);
                        for (uint64_t lane = n - i; lane < 8; lane++)
                                lanes[lane] = 0;
                        d = v8_load(lanes);
                }
                sum = v8_fma(d, d, sum);
        }

        return v8_sum(sum) / (float) n;
}

VEC_INLINE void layer_norm_typed(const LkLayerNorm *a, uint64_t row, LkType t) {
        const void *x = rows_at(a->x, t, row, a->x_ld);
        void *y = rows_at_mutable(a->y, t, row, a->y_ld);
        float mean = row_mean(x, t, a->n);
        VT factor = vt_set1(1 / f32_sqrt(row_variance(x, t, a->n, mean) + a->eps)), minus = vt_set1(-mean);

        for (uint64_t i = 0; i < a->n; i += VT_N) {
                VT h = vt_mul(vt_add(vt_get(x, t, i, a->n), minus), factor);

                vt_put(y, t, i, a->n,
                        vt_fma(h, vt_get(a->weight.data, a->weight.type, i, a->n),
                                vt_get(a->bias.data, a->bias.type, i, a->n)));
        }
}

static void layer_norm_row(const void *arg, uint64_t row) {
        const LkLayerNorm *a = arg;

        if (a->type == LK_F32)
                layer_norm_typed(a, row, LK_F32);
        else
                layer_norm_typed(a, row, LK_BF16);
}

int LK_ISA(layer_norm)(LkContext *c, const LkLayerNorm *a) {
        if (!c || !a || !check_rows(a->x, a->type, a->m, a->n, a->x_ld) ||
                !check_rows(a->y, a->type, a->m, a->n, a->y_ld) || !check_vector(&a->weight, a->n) ||
                !check_vector(&a->bias, a->n))
                return -EINVAL;
        if (a->m == 0 || a->n == 0)
                return 0;

        return rows_run(c, a->m, a->n, layer_norm_row, a);
}
