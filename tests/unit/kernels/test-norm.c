/* SPDX-License-Identifier: Apache-2.0 */
/* norm against its rule (bits) and against double precision. */

#include "tests/unit/kernels/kernels-test.h"

#define MOD_ROWS 4

typedef struct Data {
        LkNorm a;
        void *x, *mod, *weight_base;
        int32_t *index;
        uint64_t y_size;
} Data;

static void data_make(uint64_t m, uint64_t n, LkType type, LkType weight_type, bool modulated, Data *d) {
        uint64_t seed = m + 31 * n, mod_ld = 2 * n + 7;

        *d = (Data){
                .a = {.type = type,
                        .m = m,
                        .n = n,
                        .x_ld = n + 2,
                        .weight = {.type = weight_type, .n = n},
                        .eps = 1e-5f,
                        .mod_ld = mod_ld,
                        .shift_at = 3,
                        .scale_at = n + 5,
                        .y_ld = n + 6},
                .x = random_aligned(m * (n + 2), type, 2, &seed),
                .mod = modulated ? random_aligned(MOD_ROWS * mod_ld, type, 0.5, &seed) : NULL,
                .index = allocate(m * sizeof(int32_t)),
                .y_size = m * (n + 6) * lk_type_size(type),
        };
        for (uint64_t i = 0; i < m; i++)
                d->index[i] = (int32_t) (random_u64(&seed) % MOD_ROWS);
        d->a.x = d->x;
        d->a.mod = d->mod;
        d->a.mod_index = modulated ? d->index : NULL;
        d->a.weight.data = random_array(n, weight_type, (unsigned) (n % 4), 1, &seed, &d->weight_base);
}

static void data_done(Data *d) {
        free(d->x);
        free(d->mod);
        free(d->weight_base);
        free(d->index);
}

static float x_at(const LkNorm *a, uint64_t i, uint64_t j) {
        return (float) get(a->x, a->type, i * a->x_ld + j);
}

static float mod_at(const LkNorm *a, uint64_t i, uint64_t at) {
        return (float) get(
                a->mod, a->mod_type ? a->mod_type : a->type, (uint64_t) a->mod_index[i] * a->mod_ld + at);
}

static void rule(const LkNorm *a, uint64_t i, void *y) {
        float l[8] = {}, sum, rstd;

        for (uint64_t j = 0; j < a->n; j++)
                l[j % 8] = fmaf(x_at(a, i, j), x_at(a, i, j), l[j % 8]);

        sum = ((l[0] + l[4]) + (l[2] + l[6])) + ((l[1] + l[5]) + (l[3] + l[7]));
        rstd = 1 / sqrtf(sum / (float) a->n + a->eps);

        for (uint64_t j = 0; j < a->n; j++) {
                float w = (float) get(a->weight.data, a->weight.type, j), h = x_at(a, i, j) * rstd;

                if (a->round_first)
                        h = (float) round_type(h, a->type);
                h = (float) round_type(h * w, a->type);
                if (a->mod)
                        h = fmaf(h, 1 + mod_at(a, i, a->scale_at + j), mod_at(a, i, a->shift_at + j));

                put(y, a->type, j, h);
        }
}

static void *run(LkCpuIsa isa, uint32_t threads, const Data *d) {
        LkContext *c;
        const LkOps *ops = open_isa(isa, threads, &c);
        LkNorm a = d->a;

        if (!ops)
                return NULL;

        a.y = guarded(d->y_size / lk_type_size(a.type), a.type);
        assert_int_equal(ops->norm(c, &a), 0);
        assert_null(ops->context_free(c));
        return a.y;
}

static void check_rule(const LkNorm *a, const uint8_t *got) {
        uint64_t size = lk_type_size(a->type);
        CLEANUP_FREE uint8_t *expected = guarded(a->y_ld, a->type);

        for (uint64_t i = 0; i < a->m; i++) {
                rule(a, i, expected);
                assert_memory_equal(got + i * a->y_ld * size, expected, a->y_ld * size);
        }
}

static const LkType types[] = {LK_F32, LK_BF16, LK_F16};

static void norm_sizes_follow_rule(void **state) {
        static const uint64_t ms[] = {1, 2, 7, 407}, ns[] = {1, 7, 8, 9, 15, 16, 31, 96, 1027};

        for (unsigned i = 0; i < ELEMENTSOF(ms) * ELEMENTSOF(ns) * 4; i++) {
                Data d;

                data_make(ms[i / 4 % ELEMENTSOF(ms)], ns[i / 4 / ELEMENTSOF(ms)], types[i % 2], types[i % 3],
                        i / 2 % 2, &d);

                for (unsigned isa = 0; isa < ISAS; isa++) {
                        CLEANUP_FREE void *y = run(all_isas[isa], 1 + isa, &d);

                        if (y)
                                check_rule(&d.a, y);
                }

                data_done(&d);
        }
}

/* Shift and scale of a curve's final layer: f32 beside rows of bf16. */
static void norm_f32_modulation_follows_rule(void **state) {
        static const uint64_t ns[] = {1, 16, 31, 96, 1027};

        for (unsigned i = 0; i < ELEMENTSOF(ns); i++) {
                uint64_t seed = i;
                Data d;

                data_make(13, ns[i], LK_BF16, LK_BF16, true, &d);
                free(d.mod);
                d.mod = random_aligned(MOD_ROWS * d.a.mod_ld, LK_F32, 0.5, &seed);
                d.a.mod = d.mod;
                d.a.mod_type = LK_F32;
                for (unsigned isa = 0; isa < ISAS; isa++) {
                        CLEANUP_FREE void *y = run(all_isas[isa], 1 + isa, &d);

                        if (y)
                                check_rule(&d.a, y);
                }
                data_done(&d);
        }
}

static void norm_rounded_first_follows_rule(void **state) {
        static const uint64_t ns[] = {1, 16, 31, 96, 1027};

        for (unsigned i = 0; i < 2 * ELEMENTSOF(ns); i++) {
                Data d;

                data_make(13, ns[i / 2], i % 2 ? LK_BF16 : LK_F32, LK_BF16, false, &d);
                d.a.round_first = true;
                for (unsigned isa = 0; isa < ISAS; isa++) {
                        CLEANUP_FREE void *y = run(all_isas[isa], 1 + isa, &d);

                        if (y)
                                check_rule(&d.a, y);
                }
                data_done(&d);
        }
}

static void norm_against_double_is_accurate(void **state) {
        for (unsigned t = 0; t < 4; t++) {
                CLEANUP_FREE double *expected = allocate(20 * 5376 * sizeof(double));
                CLEANUP_FREE void *y = NULL;
                Data d;

                data_make(20, 5376, types[t % 2], LK_BF16, t / 2, &d);

                for (uint64_t i = 0; i < 20; i++) {
                        double sum = 0;

                        for (uint64_t j = 0; j < 5376; j++)
                                sum += (double) x_at(&d.a, i, j) * x_at(&d.a, i, j);

                        for (uint64_t j = 0; j < 5376; j++) {
                                double h = x_at(&d.a, i, j) / sqrt(sum / 5376 + 1e-5) *
                                           get(d.a.weight.data, LK_BF16, j);

                                if (d.a.mod)
                                        h = h * (1.0 + mod_at(&d.a, i, d.a.scale_at + j)) +
                                            mod_at(&d.a, i, d.a.shift_at + j);

                                expected[i * 5376 + j] = h;
                        }
                }

                y = run(LK_CPU_AUTO, 2, &d);
                /* bf16: one rounding of 1.53e-3, two with modulation, and a tenth */
                assert_true(relative_l2(y, d.a.type, d.a.y_ld, expected, 20, 5376) <
                            (t % 2 == 0          ? 1e-6
                                    : t / 2 == 0 ? 1.69e-3
                                                 : 2.4e-3));
                data_done(&d);
        }
}

static void norm_any_thread_count_same_bits(void **state) {
        static const uint32_t threads[] = {2, 3, 8, 0};
        CLEANUP_FREE void *first = NULL;
        Data d;

        data_make(407, 96, LK_BF16, LK_BF16, true, &d);
        first = run(LK_CPU_AUTO, 1, &d);

        for (unsigned i = 0; i < ELEMENTSOF(threads); i++) {
                CLEANUP_FREE void *y = run(LK_CPU_AUTO, threads[i], &d);

                assert_memory_equal(first, y, d.y_size);
        }

        data_done(&d);
}

static void norm_row_position_same_bits(void **state) {
        CLEANUP_FREE uint8_t *expected = NULL;
        float row[50];
        Data d;

        data_make(300, 50, LK_F32, LK_F32, true, &d);
        memcpy(row, d.x, sizeof(row));

        for (uint64_t at = 0; at < 300; at += 23) {
                CLEANUP_FREE uint8_t *y = NULL;
                float *x = d.x;

                for (uint64_t e = 0; e < 300 * d.a.x_ld; e++)
                        x[e] = NAN;
                for (uint64_t i = 0; i < 300; i++)
                        d.index[i] = i == at ? 2 : 1;

                memcpy(x + at * d.a.x_ld, row, sizeof(row));
                y = run(LK_CPU_AUTO, 2, &d);

                if (!expected)
                        expected = STEAL_PTR(y);
                else
                        assert_memory_equal(expected, y + at * d.a.y_ld * 4, sizeof(row));
        }

        data_done(&d);
}

/* Subnormal squares, and sums that overflow: no NaN where the formula has none. */
static void norm_extreme_rows_follow_rule(void **state) {
        static const float sizes[] = {0, 1e-30f, 1e-44f, 1e15f, 1e19f, 3e38f};
        Data d;

        data_make(ELEMENTSOF(sizes), 24, LK_F32, LK_F32, false, &d);
        for (uint64_t i = 0; i < d.a.m; i++)
                for (uint64_t j = 0; j < d.a.n; j++)
                        put(d.x, LK_F32, i * d.a.x_ld + j, sizes[i] * (j % 2 ? -1.0 : 1.0));

        for (unsigned isa = 0; isa < ISAS; isa++) {
                CLEANUP_FREE void *y = run(all_isas[isa], 1, &d);

                if (y)
                        check_rule(&d.a, y);
        }

        data_done(&d);
}

#define REFUSED(statement)                                                                                  \
        do {                                                                                                \
                LkNorm a = d.a;                                                                             \
                a.y = y;                                                                                    \
                statement;                                                                                  \
                assert_int_equal(ops->norm(c, &a), -EINVAL);                                                \
        } while (0)

static void norm_bad_argument_is_refused(void **state) {
        LkContext *c;
        const LkOps *ops = open_isa(LK_CPU_AUTO, 1, &c);
        CLEANUP_FREE void *y = guarded(2 * 14, LK_F32);
        int32_t negative[2] = {0, -1};
        Data d;

        data_make(2, 8, LK_F32, LK_F32, true, &d);
        assert_int_equal(ops->norm(NULL, &d.a), -EINVAL);
        assert_int_equal(ops->norm(c, NULL), -EINVAL);
        REFUSED(a.x = NULL);
        REFUSED(a.y = NULL);
        REFUSED(a.type = LK_F16);
        REFUSED(a.x_ld = 7);
        REFUSED(a.y_ld = 7);
        REFUSED(a.weight.data = NULL);
        REFUSED(a.weight.n = 7);
        REFUSED(a.mod_index = NULL);
        REFUSED(a.mod_index = negative);
        REFUSED(a.mod_ld = 12);
        REFUSED(a.shift_at = UINT64_MAX);
        REFUSED(a.mod = (uint8_t *) d.mod + 1);
        REFUSED(a.mod_type = LK_BF16);
        REFUSED(a.round_first = true);
        REFUSED(a.mod_type = LK_F16);
        REFUSED(a.m = UINT64_MAX / 8);
        data_done(&d);
        assert_null(ops->context_free(c));
}

int main(void) {
        static const struct CMUnitTest tests[] = {
                cmocka_unit_test(norm_sizes_follow_rule),
                cmocka_unit_test(norm_f32_modulation_follows_rule),
                cmocka_unit_test(norm_rounded_first_follows_rule),
                cmocka_unit_test(norm_against_double_is_accurate),
                cmocka_unit_test(norm_any_thread_count_same_bits),
                cmocka_unit_test(norm_row_position_same_bits),
                cmocka_unit_test(norm_extreme_rows_follow_rule),
                cmocka_unit_test(norm_bad_argument_is_refused),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
