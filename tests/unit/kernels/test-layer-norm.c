/* SPDX-License-Identifier: Apache-2.0 */
/* layer_norm against its rule (bits) and against double precision. */

#include "tests/unit/kernels/kernels-test.h"

typedef struct Data {
        LkLayerNorm a;
        void *x, *weight_base, *bias_base;
        uint64_t y_size;
} Data;

static void data_make(uint64_t m, uint64_t n, LkType type, LkType weight_type, double mean, Data *d) {
        uint64_t seed = m + 31 * n;

        *d = (Data){
                .a = {.type = type,
                        .m = m,
                        .n = n,
                        .x_ld = n + 2,
                        .weight = {.type = weight_type, .n = n},
                        .bias = {.type = weight_type, .n = n},
                        .eps = 1e-6f,
                        .y_ld = n + 6},
                .x = random_aligned(m * (n + 2), type, 2, &seed),
                .y_size = m * (n + 6) * lk_type_size(type),
        };
        for (uint64_t i = 0; i < m * (n + 2); i++)
                put(d->x, type, i, get(d->x, type, i) + mean);
        d->a.x = d->x;
        d->a.weight.data = random_array(n, weight_type, (unsigned) (n % 4), 1, &seed, &d->weight_base);
        d->a.bias.data = random_array(n, weight_type, (unsigned) (n % 3), 1, &seed, &d->bias_base);
}

static void data_done(Data *d) {
        free(d->x);
        free(d->weight_base);
        free(d->bias_base);
}

static float x_at(const LkLayerNorm *a, uint64_t i, uint64_t j) {
        return (float) get(a->x, a->type, i * a->x_ld + j);
}

static void rule(const LkLayerNorm *a, uint64_t i, void *y) {
        float l[8] = {}, v[8] = {}, mean, rstd;

        for (uint64_t j = 0; j < a->n; j++)
                l[j % 8] += x_at(a, i, j);
        mean = tree(l) / (float) a->n;
        for (uint64_t j = 0; j < a->n; j++)
                v[j % 8] = fmaf(x_at(a, i, j) - mean, x_at(a, i, j) - mean, v[j % 8]);
        rstd = 1 / sqrtf(tree(v) / (float) a->n + a->eps);

        for (uint64_t j = 0; j < a->n; j++)
                put(y, a->type, j,
                        fmaf((x_at(a, i, j) - mean) * rstd, (float) get(a->weight.data, a->weight.type, j),
                                (float) get(a->bias.data, a->bias.type, j)));
}

static void *run(LkCpuIsa isa, uint32_t threads, const Data *d) {
        LkContext *c;
        const LkOps *ops = open_isa(isa, threads, &c);
        LkLayerNorm a = d->a;

        if (!ops)
                return NULL;
        a.y = guarded(d->y_size / lk_type_size(a.type), a.type);
        assert_int_equal(ops->layer_norm(c, &a), 0);
        assert_null(ops->context_free(c));
        return a.y;
}

static void check_rule(const LkLayerNorm *a, const uint8_t *got) {
        uint64_t size = lk_type_size(a->type);
        CLEANUP_FREE uint8_t *expected = guarded(a->y_ld, a->type);

        for (uint64_t i = 0; i < a->m; i++) {
                rule(a, i, expected);
                assert_memory_equal(got + i * a->y_ld * size, expected, a->y_ld * size);
        }
}

static const LkType types[] = {LK_F32, LK_BF16, LK_F16};

static void layer_norm_sizes_follow_rule(void **state) {
        static const uint64_t ms[] = {1, 2, 7, 407}, ns[] = {1, 7, 8, 9, 15, 16, 31, 96, 1027};

        for (unsigned i = 0; i < ELEMENTSOF(ms) * ELEMENTSOF(ns) * 2; i++) {
                Data d;

                data_make(ms[i / 2 % ELEMENTSOF(ms)], ns[i / 2 / ELEMENTSOF(ms)], types[i % 2], types[i % 3],
                        i % 5, &d);
                for (unsigned isa = 0; isa < ISAS; isa++) {
                        CLEANUP_FREE void *y = run(all_isas[isa], 1 + isa, &d);

                        if (y)
                                check_rule(&d.a, y);
                }
                data_done(&d);
        }
}

/* Also where the mean is a thousand times the spread: the variance of the squares would have no digit left.
 */
static void layer_norm_against_double_is_accurate(void **state) {
        static const double means[] = {0, 3, 2000}, limits[] = {1e-6, 2e-6, 1e-4};

        for (unsigned t = 0; t < ELEMENTSOF(means) + 1; t++) {
                LkType type = t < ELEMENTSOF(means) ? LK_F32 : LK_BF16;
                CLEANUP_FREE double *expected = allocate(20 * 1152 * sizeof(double));
                CLEANUP_FREE void *y = NULL;
                double error;
                Data d;

                data_make(20, 1152, type, LK_BF16, type == LK_F32 ? means[t] : 1, &d);
                for (uint64_t i = 0; i < 20; i++) {
                        double sum = 0, squares = 0;

                        for (uint64_t j = 0; j < 1152; j++)
                                sum += x_at(&d.a, i, j);
                        for (uint64_t j = 0; j < 1152; j++)
                                squares += pow(x_at(&d.a, i, j) - sum / 1152, 2);
                        for (uint64_t j = 0; j < 1152; j++)
                                expected[i * 1152 + j] = (x_at(&d.a, i, j) - sum / 1152) /
                                                                 sqrt(squares / 1152 + 1e-6) *
                                                                 get(d.a.weight.data, LK_BF16, j) +
                                                         get(d.a.bias.data, LK_BF16, j);
                }
                y = run(LK_CPU_AUTO, 2, &d);
                error = relative_l2(y, type, d.a.y_ld, expected, 20, 1152);
                /* bf16: one rounding of 1.53e-3 and a tenth */
                if (!(error < (type == LK_F32 ? limits[t] : 1.69e-3)))
                        fail_msg("case %u: error %g", t, error);
                data_done(&d);
        }
}

static void layer_norm_any_thread_count_and_in_place_same_bits(void **state) {
        static const uint32_t threads[] = {2, 3, 8, 0};
        CLEANUP_FREE uint8_t *first = NULL;
        LkContext *c;
        const LkOps *ops = open_isa(LK_CPU_AUTO, 1, &c);
        Data d;

        data_make(407, 96, LK_BF16, LK_BF16, 0.5, &d);
        first = run(LK_CPU_AUTO, 1, &d);
        for (unsigned i = 0; i < ELEMENTSOF(threads); i++) {
                CLEANUP_FREE void *y = run(LK_CPU_AUTO, threads[i], &d);

                assert_memory_equal(first, y, d.y_size);
        }

        d.a.y = d.x;
        d.a.y_ld = d.a.x_ld;
        assert_int_equal(ops->layer_norm(c, &d.a), 0);
        for (uint64_t i = 0; i < 407; i++)
                assert_memory_equal(first + i * 102 * 2, (uint8_t *) d.x + i * 98 * 2, 96 * 2);
        assert_null(ops->context_free(c));
        data_done(&d);
}

#define REFUSED(statement)                                                                                  \
        do {                                                                                                \
                LkLayerNorm a = d.a;                                                                        \
                a.y = y;                                                                                    \
                statement;                                                                                  \
                assert_int_equal(ops->layer_norm(c, &a), -EINVAL);                                          \
        } while (0)

static void layer_norm_bad_argument_is_refused(void **state) {
        LkContext *c;
        const LkOps *ops = open_isa(LK_CPU_AUTO, 1, &c);
        CLEANUP_FREE void *y = guarded(2 * 14, LK_F32);
        Data d;

        data_make(2, 8, LK_F32, LK_F32, 0, &d);
        assert_int_equal(ops->layer_norm(NULL, &d.a), -EINVAL);
        assert_int_equal(ops->layer_norm(c, NULL), -EINVAL);
        REFUSED(a.x = NULL);
        REFUSED(a.y = NULL);
        REFUSED(a.type = LK_F16);
        REFUSED(a.x_ld = 7);
        REFUSED(a.y_ld = 7);
        REFUSED(a.weight.data = NULL);
        REFUSED(a.weight.n = 7);
        REFUSED(a.bias.data = NULL);
        REFUSED(a.bias.n = 9);
        REFUSED(a.m = UINT64_MAX / 8);
        data_done(&d);
        assert_null(ops->context_free(c));
}

int main(void) {
        static const struct CMUnitTest tests[] = {
                cmocka_unit_test(layer_norm_sizes_follow_rule),
                cmocka_unit_test(layer_norm_against_double_is_accurate),
                cmocka_unit_test(layer_norm_any_thread_count_and_in_place_same_bits),
                cmocka_unit_test(layer_norm_bad_argument_is_refused),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
