/* SPDX-License-Identifier: Apache-2.0 */
/* Per-head RMS norm (or none), then split-half rotation, in place. */

#include <errno.h>

#include "kernels/cpu/check.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/rows.h"
#include "kernels/cpu/vec.h"

#define HEAD_DIM_MAX 256u

VEC_INLINE void head_typed(
        const LkQkNormRope *a, void *x, const float *cosines, const float *sines, LkType t) {
        uint64_t n = a->head_dim, half = a->rope_dims;
        bool normed = a->weight.data != NULL;
        VT factor = vt_set1(normed ? 1 / f32_sqrt(v8_sum_squares(x, t, n) / (float) n + a->eps) : 1);
        float h[HEAD_DIM_MAX + VT_N]; /* the normed head, rounded to t */

        for (uint64_t i = 0; i < n; i += VT_N) {
                VT v = vt_get(x, t, i, n);

                if (normed)
                        v = vt_round(
                                vt_mul(vt_mul(v, factor), vt_get(a->weight.data, a->weight.type, i, n)), t);
                vt_store(h + i, v);
        }

        for (uint64_t i = 0; cosines && i < half; i += VT_N) {
                VT c = vt_get(cosines, LK_F32, i, half), s = vt_get(sines, LK_F32, i, half);
                VT p = vt_get(h, LK_F32, i, half), q = vt_get(h + half, LK_F32, i, half);

                vt_put(h, LK_F32, i, half, vt_fma(p, c, vt_negate(vt_mul(q, s))));
                vt_put(h + half, LK_F32, i, half, vt_fma(q, c, vt_mul(p, s)));
        }

        for (uint64_t i = 0; i < n; i += VT_N)
                vt_put(x, t, i, n, vt_load(h + i));
}

static void qk_row(const void *arg, uint64_t row) {
        const LkQkNormRope *a = arg;
        uint64_t turn = (a->period > 0 ? row % a->period : row) * a->rope_dims;
        const float *c = a->cos ? a->cos + turn : NULL, *s = a->cos ? a->sin + turn : NULL;
        void *x = rows_at_mutable(a->x, a->type, row, a->x_ld);

        for (uint32_t head = 0; head < a->heads; head++) {
                void *h = rows_at_mutable(x, a->type, head, a->head_dim);

                if (a->type == LK_BF16)
                        head_typed(a, h, c, s, LK_BF16);
                else if (a->type == LK_F16)
                        head_typed(a, h, c, s, LK_F16);
                else
                        head_typed(a, h, c, s, LK_F32);
        }
}

int LK_ISA(qk_norm_rope)(LkContext *c, const LkQkNormRope *a) {
        uint64_t n, turns;

        if (!c || !a || a->head_dim == 0 || a->head_dim % 4 != 0 || a->head_dim > HEAD_DIM_MAX)
                return -EINVAL;

        n = (uint64_t) a->heads * a->head_dim;
        turns = a->period > 0 && a->period < a->m ? a->period : a->m;
        if (!check_any_rows(a->x, a->type, a->m, n, a->x_ld) ||
                (a->weight.data ? !check_vector(&a->weight, a->head_dim) : !a->cos))
                return -EINVAL;
        if (!a->cos != !a->sin)
                return -EINVAL;
        if (a->cos && (a->rope_dims > a->head_dim / 2 ||
                              !check_rows(a->cos, LK_F32, turns, a->rope_dims, a->rope_dims) ||
                              !check_rows(a->sin, LK_F32, turns, a->rope_dims, a->rope_dims)))
                return -EINVAL;
        if (a->m == 0 || n == 0)
                return 0;

        return rows_run(c, a->m, n, qk_row, a);
}
