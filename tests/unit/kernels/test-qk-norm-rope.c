/* SPDX-License-Identifier: Apache-2.0 */
/* qk_norm_rope against its rule (bits) and against double precision. */

#include "tests/unit/kernels/kernels-test.h"

typedef struct Data {
        LkQkNormRope a;
        void *x, *weight_base; /* x: what goes in */
        float *cos, *sin;
        uint64_t size; /* of x, bytes */
} Data;

static void data_make(uint64_t m, uint32_t heads, uint32_t head_dim, uint32_t rope, LkType type,
        LkType weight_type, Data *d) {
        uint64_t seed = m + head_dim, ld = (uint64_t) heads * head_dim + 5;

        *d = (Data){
                .a = {.type = type,
                        .m = m,
                        .heads = heads,
                        .head_dim = head_dim,
                        .x_ld = ld,
                        .weight = {.type = weight_type, .n = head_dim},
                        .eps = 1e-5f,
                        .rope_dims = rope},
                .x = random_aligned(m * ld, type, 3, &seed),
                .cos = rope > 0 ? allocate(m * rope * sizeof(float)) : NULL,
                .sin = rope > 0 ? allocate(m * rope * sizeof(float)) : NULL,
                .size = m * ld * lk_type_size(type),
        };
        for (uint64_t i = 0; i < m * rope; i++) {
                put(d->cos, LK_F32, i, round_type(cos(0.37 * (double) i), type));
                put(d->sin, LK_F32, i, round_type(sin(0.37 * (double) i), type));
        }
        d->a.cos = d->cos;
        d->a.sin = d->sin;
        d->a.weight.data = random_array(head_dim, weight_type, head_dim / 8 % 4, 1, &seed, &d->weight_base);
}

static void data_done(Data *d) {
        free(d->x);
        free(d->weight_base);
        free(d->cos);
        free(d->sin);
}

static void rule_head(const LkQkNormRope *a, const float *cosines, const float *sines, void *x) {
        float h[256], l[8] = {}, sum, rstd;
        uint32_t n = a->head_dim, half = a->rope_dims;

        for (uint32_t i = 0; i < n; i++) {
                h[i] = (float) get(x, a->type, i);
                l[i % 8] = fmaf(h[i], h[i], l[i % 8]);
        }

        sum = ((l[0] + l[4]) + (l[2] + l[6])) + ((l[1] + l[5]) + (l[3] + l[7]));
        rstd = 1 / sqrtf(sum / (float) n + a->eps);

        for (uint32_t i = 0; a->weight.data && i < n; i++)
                h[i] = (float) round_type(
                        h[i] * rstd * (float) get(a->weight.data, a->weight.type, i), a->type);

        for (uint32_t i = 0; cosines && i < half; i++) {
                float p = h[i], q = h[i + half];

                h[i] = fmaf(p, cosines[i], -(q * sines[i]));
                h[i + half] = fmaf(q, cosines[i], p * sines[i]);
        }

        for (uint32_t i = 0; i < n; i++)
                put(x, a->type, i, h[i]);
}

static uint64_t turn(const LkQkNormRope *a, uint64_t i) {
        return a->period > 0 ? i % a->period : i;
}

static void *rule(const Data *d) {
        const LkQkNormRope *a = &d->a;
        uint8_t *x = allocate(d->size);

        memcpy(x, d->x, d->size);
        for (uint64_t i = 0; i < a->m; i++)
                for (uint32_t head = 0; head < a->heads; head++)
                        rule_head(a, a->cos ? a->cos + turn(a, i) * a->rope_dims : NULL,
                                a->cos ? a->sin + turn(a, i) * a->rope_dims : NULL,
                                x + (i * a->x_ld + (uint64_t) head * a->head_dim) * lk_type_size(a->type));

        return x;
}

static void *run(LkCpuIsa isa, uint32_t threads, const Data *d) {
        LkContext *c;
        const LkOps *ops = open_isa(isa, threads, &c);
        LkQkNormRope a = d->a;

        if (!ops)
                return NULL;

        a.x = allocate(d->size);
        memcpy(a.x, d->x, d->size);
        assert_int_equal(ops->qk_norm_rope(c, &a), 0);
        assert_null(ops->context_free(c));
        return a.x;
}

static const LkType types[] = {LK_F32, LK_BF16, LK_F16};

static void qk_norm_rope_sizes_follow_rule(void **state) {
        static const struct {
                uint64_t m;
                uint32_t heads, head_dim, rope;
        } cases[] = {
                {1, 1, 8, 0},
                {1, 1, 8, 4},
                {2, 3, 8, 1},
                {5, 2, 24, 12},
                {13, 2, 40, 17},
                {7, 1, 64, 24},
                {407, 2, 128, 48},
                {30, 3, 128, 0},
                {6, 1, 256, 128},
                {3, 56, 16, 8},
        };

        for (unsigned i = 0; i < 9 * ELEMENTSOF(cases); i++) {
                CLEANUP_FREE void *expected = NULL;
                Data d;

                data_make(cases[i / 9].m, cases[i / 9].heads, cases[i / 9].head_dim, cases[i / 9].rope,
                        types[i % 3], types[i / 3 % 3], &d);
                d.a.period = i % 4 == 1 ? 3 : 0;
                expected = rule(&d);

                for (unsigned isa = 0; isa < ISAS; isa++) {
                        CLEANUP_FREE void *x = run(all_isas[isa], 1 + isa, &d);

                        if (x)
                                assert_memory_equal(x, expected, d.size);
                }

                data_done(&d);
        }
}

/* The sign of zero survives: -(b * sin) is a negation, not a difference from zero. */
static void qk_norm_rope_without_weight_only_rotates(void **state) {
        for (unsigned i = 0; i < 4; i++) {
                LkType type = i % 2 ? LK_BF16 : LK_F32;
                CLEANUP_FREE void *expected = NULL;
                Data d;

                data_make(21, 3, i / 2 ? 72 : 24, i / 2 ? 36 : 8, type, type, &d);
                d.a.weight.data = NULL;
                expected = rule(&d);
                for (unsigned isa = 0; isa < ISAS; isa++) {
                        CLEANUP_FREE void *x = run(all_isas[isa], 1 + isa, &d);

                        if (x)
                                assert_memory_equal(x, expected, d.size);
                }
                data_done(&d);
        }
}

static void qk_norm_rope_zeros_follow_rule(void **state) {
        CLEANUP_FREE void *expected = NULL;
        Data d;

        data_make(4, 1, 16, 8, LK_F32, LK_F32, &d);
        for (uint64_t i = 0; i < d.size / 4; i++)
                put(d.x, LK_F32, i, i % 3 == 0 ? 0.0 : i % 3 == 1 ? -0.0 : 1.0);
        for (uint64_t i = 0; i < 32; i++) {
                d.cos[i] = i % 2 ? 1 : -1;
                d.sin[i] = i % 4 < 2 ? 0.0f : -0.0f;
        }

        expected = rule(&d);
        for (unsigned isa = 0; isa < ISAS; isa++) {
                CLEANUP_FREE void *x = run(all_isas[isa], 1, &d);

                if (x)
                        assert_memory_equal(x, expected, d.size);
        }

        data_done(&d);
}

static void qk_norm_rope_against_double_is_accurate(void **state) {
        static const double limits[] = {1e-6, 2.4e-3, 3e-4}; /* bf16: two roundings of 1.53e-3, and a tenth; f16: an eighth */

        for (unsigned t = 0; t < 3; t++) {
                CLEANUP_FREE double *expected = allocate(50 * 128 * sizeof(double));
                CLEANUP_FREE void *x = NULL;
                Data d;

                data_make(50, 1, 128, 48, types[t], LK_BF16, &d);

                for (uint64_t i = 0; i < 50; i++) {
                        double *h = expected + i * 128, sum = 0;

                        for (unsigned j = 0; j < 128; j++) {
                                h[j] = get(d.x, types[t], i * d.a.x_ld + j);
                                sum += h[j] * h[j];
                        }

                        for (unsigned j = 0; j < 128; j++)
                                h[j] *= get(d.a.weight.data, LK_BF16, j) / sqrt(sum / 128 + 1e-5);

                        for (unsigned j = 0; j < 48; j++) {
                                double p = h[j], q = h[j + 48], c = d.cos[i * 48 + j], s = d.sin[i * 48 + j];

                                h[j] = p * c - q * s;
                                h[j + 48] = q * c + p * s;
                        }
                }

                x = run(LK_CPU_AUTO, 1, &d);
                assert_true(relative_l2(x, types[t], d.a.x_ld, expected, 50, 128) < limits[t]);
                data_done(&d);
        }
}

static void qk_norm_rope_any_thread_count_same_bits(void **state) {
        static const uint32_t threads[] = {1, 2, 3, 8, 0};
        CLEANUP_FREE void *expected = NULL;
        Data d;

        data_make(407, 3, 64, 24, LK_BF16, LK_BF16, &d);
        expected = rule(&d);

        for (unsigned i = 0; i < ELEMENTSOF(threads); i++) {
                CLEANUP_FREE void *x = run(LK_CPU_AUTO, threads[i], &d);

                assert_memory_equal(x, expected, d.size);
        }

        data_done(&d);
}

/* A NaN in one head stays there; the row gives the same bits wherever it stands. */
static void qk_norm_rope_row_position_same_bits(void **state) {
        CLEANUP_FREE uint8_t *expected = NULL;
        float row[48];
        Data d;

        data_make(90, 2, 24, 12, LK_F32, LK_F32, &d);
        memcpy(row, d.x, sizeof(row));
        for (uint64_t i = 0; i < 90 * 12; i++) {
                d.cos[i] = d.cos[i % 12];
                d.sin[i] = d.sin[i % 12];
        }

        for (uint64_t at = 0; at < 90; at += 7) {
                CLEANUP_FREE uint8_t *x = NULL;
                float *in = d.x;

                for (uint64_t e = 0; e < d.size / 4; e++)
                        in[e] = NAN;

                memcpy(in + at * d.a.x_ld, row, sizeof(row));
                in[at * d.a.x_ld + 24] = NAN; /* head 1 */
                x = run(LK_CPU_AUTO, 2, &d);

                if (!expected)
                        expected = STEAL_PTR(x);
                else
                        assert_memory_equal(expected, x + at * d.a.x_ld * 4, 24 * 4);
        }

        for (uint64_t i = 0; i < 24; i++)
                assert_true(isfinite(get(expected, LK_F32, i)));

        data_done(&d);
}

#define REFUSED(statement)                                                                                  \
        do {                                                                                                \
                LkQkNormRope a = d.a;                                                                       \
                a.x = d.x;                                                                                  \
                statement;                                                                                  \
                assert_int_equal(ops->qk_norm_rope(c, &a), -EINVAL);                                        \
        } while (0)

static void qk_norm_rope_bad_argument_is_refused(void **state) {
        LkContext *c;
        const LkOps *ops = open_isa(LK_CPU_AUTO, 1, &c);
        Data d;

        data_make(2, 2, 8, 4, LK_F32, LK_F32, &d);
        assert_int_equal(ops->qk_norm_rope(NULL, &d.a), -EINVAL);
        assert_int_equal(ops->qk_norm_rope(c, NULL), -EINVAL);
        REFUSED(a.x = NULL);
        REFUSED(a.type = LK_I8);
        REFUSED(a.head_dim = 0; a.weight.n = 0);
        REFUSED(a.head_dim = 7);
        REFUSED(a.head_dim = 264);
        REFUSED(a.x_ld = 15);
        REFUSED(a.weight.data = NULL; a.cos = a.sin = NULL);
        REFUSED(a.weight.n = 16);
        REFUSED(a.rope_dims = 5);
        REFUSED(a.sin = NULL);
        REFUSED(a.cos = NULL);
        REFUSED(a.m = UINT64_MAX / 16);
        data_done(&d);
        assert_null(ops->context_free(c));
}

int main(void) {
        static const struct CMUnitTest tests[] = {
                cmocka_unit_test(qk_norm_rope_sizes_follow_rule),
                cmocka_unit_test(qk_norm_rope_without_weight_only_rotates),
                cmocka_unit_test(qk_norm_rope_zeros_follow_rule),
                cmocka_unit_test(qk_norm_rope_against_double_is_accurate),
                cmocka_unit_test(qk_norm_rope_any_thread_count_same_bits),
                cmocka_unit_test(qk_norm_rope_row_position_same_bits),
                cmocka_unit_test(qk_norm_rope_bad_argument_is_refused),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
