/* SPDX-License-Identifier: Apache-2.0 */
/* RMS norm of a row, optionally modulated. (x * rstd) * weight, in this order, is rounded (round_first:
 * after the first product, too); then the modulation. What else is asked for is done row by row around it. */

#include <errno.h>

#include "kernels/cpu/check.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/quantise-row.h"
#include "kernels/cpu/residual-row.h"

VEC_INLINE void norm_typed(const LkNorm *a, uint64_t row, void *y, LkType t, LkType mt, LkType yt) {
        const void *x = rows_at(a->x, t, row, a->x_ld), *shift = NULL, *scale = NULL;
        float rstd = 1 / f32_sqrt(v8_sum_squares(x, t, a->n) / (float) a->n + a->eps);
        VT factor = vt_set1(rstd), one = vt_set1(1);

        if (a->mod) {
                const void *mod = rows_at(a->mod, mt, (uint64_t) a->mod_index[row], a->mod_ld);

                shift = rows_at(mod, mt, 1, a->shift_at);
                scale = rows_at(mod, mt, 1, a->scale_at);
        }

        for (uint64_t i = 0; i < a->n; i += VT_N) {
                VT h = vt_mul(vt_get(x, t, i, a->n), factor);

                h = vt_mul(a->round_first ? vt_round(h, t) : h,
                        vt_get(a->weight.data, a->weight.type, i, a->n));
                if (a->mod)
                        h = vt_fma(vt_round(h, t), vt_add(one, vt_get(scale, mt, i, a->n)),
                                vt_get(shift, mt, i, a->n));

                vt_put(y, yt, i, a->n, h);
        }
}

/* To y, a row of y_type. */
static void norm_to(const LkNorm *a, uint64_t row, void *y) {
        if (a->y_type == LK_F16)
                norm_typed(a, row, y, LK_F32, LK_F32, LK_F16);
        else if (a->type == LK_F32)
                norm_typed(a, row, y, LK_F32, LK_F32, LK_F32);
        else if (a->mod_type == LK_F32)
                norm_typed(a, row, y, LK_BF16, LK_F32, LK_BF16);
        else
                norm_typed(a, row, y, LK_BF16, LK_BF16, LK_BF16);
}

static void norm_row(const void *arg, uint64_t row) {
        const LkNorm *a = arg;

        if (a->add)
                residual_row(a->add, row);
        norm_to(a, row, rows_at_mutable(a->y, type_beside(a->type, a->y_type), row, a->y_ld));
}

/* Rows that are quantised, too. */
typedef struct NormJob {
        const LkNorm *norm;
        LkQuantise quantise;
        uint8_t *scratch; /* of each thread: a row in f32, then one of `type` where y is not wanted */
        uint64_t values_size, thread_size, rows_per_task;
} NormJob;

VEC_INLINE void quantise_normed(const LkQuantise *q, uint64_t row, const void *y, float *v, LkType t) {
        for (uint64_t i = 0; i < q->k; i += VT_N)
                vt_put(v, LK_F32, i, q->k, vt_get(y, t, i, q->k));

        quantise_values(q, row, v, t);
}

static void norm_task(void *userdata, uint64_t task, uint32_t thread) {
        const NormJob *j = userdata;
        const LkNorm *a = j->norm;
        float *v = (float *) (j->scratch + thread * j->thread_size);
        uint64_t end = (task + 1) * j->rows_per_task;

        for (uint64_t i = task * j->rows_per_task; i < end && i < a->m; i++) {
                void *y = a->y ? rows_at_mutable(a->y, a->type, i, a->y_ld) : (uint8_t *) v + j->values_size;

                if (a->add)
                        residual_row(a->add, i);
                norm_to(a, i, y);
                if (a->type == LK_BF16)
                        quantise_normed(&j->quantise, i, y, v, LK_BF16);
                else
                        quantise_normed(&j->quantise, i, y, v, LK_F32);
        }
}

static int norm_and_quantise(LkContext *c, const LkNorm *a) {
        NormJob j = {.norm = a, .quantise = *a->quantise};
        void *scratch;
        int r;

        j.quantise.x_type = a->type;
        j.quantise.m = a->m;
        j.quantise.k = a->n;
        j.values_size = (a->n + 63) / 64 * 64 * sizeof(float);
        j.thread_size = 2 * j.values_size;
        j.rows_per_task = rows_per_task(a->n);
        r = context_scratch(c, threads_count(c->threads) * j.thread_size, &scratch);
        if (r < 0)
                return r;

        j.scratch = scratch;
        return threads_run(c->threads, a->m / j.rows_per_task + (a->m % j.rows_per_task != 0), norm_task, &j);
}

/* What is asked for beside the norm does not contradict it. */
static bool check_neighbours(const LkNorm *a) {
        const LkResidual *add = a->add;
        const LkQuantise *q = a->quantise;

        if (add && (add->type != a->type || add->m != a->m || add->n != a->n || add->x != a->x ||
                           add->x_ld != a->x_ld || !check_residual(add)))
                return false;
        if (!check_beside(a->type, a->y_type) || (a->y_type == LK_F16 && (q || a->mod)))
                return false;
        if (!q)
                return check_any_rows(a->y, type_beside(a->type, a->y_type), a->m, a->n, a->y_ld);

        return (!a->y || check_rows(a->y, a->type, a->m, a->n, a->y_ld)) && !q->up &&
               check_bytes(q->q, a->m, a->n, q->q_ld) && check_rows(q->scale, LK_F32, a->m, 1, 1) &&
               check_rotation(q->rotation, a->n) && a->n <= PTRDIFF_MAX / 16 / THREADS_MAX;
}

int LK_ISA(norm)(LkContext *c, const LkNorm *a) {
        LkType mod_type = a && a->mod_type != 0 ? a->mod_type : a ? a->type : LK_F32;

        if (!c || !a || !check_rows(a->x, a->type, a->m, a->n, a->x_ld) || !check_vector(&a->weight, a->n) ||
                !check_neighbours(a))
                return -EINVAL;
        if (a->mod_type != 0 && a->mod_type != a->type && a->mod_type != LK_F32)
                return -EINVAL;
        if (a->mod && a->round_first)
                return -EINVAL;
        if (a->mod && (!check_index(a->mod_index, a->m) ||
                              !check_mod_part(a->mod, mod_type, a->mod_ld, a->shift_at, a->n) ||
                              !check_mod_part(a->mod, mod_type, a->mod_ld, a->scale_at, a->n)))
                return -EINVAL;
        if (a->m == 0 || a->n == 0)
                return 0;

        if (a->quantise)
                return norm_and_quantise(c, a);
        return rows_run(c, a->m, a->n, norm_row, a);
}
