/* SPDX-License-Identifier: Apache-2.0 */
/* snake against its rule (bits) and its sine against double precision. */

#include "tests/unit/kernels/kernels-test.h"

static const LkType types[] = {LK_F32, LK_BF16, LK_F16};

/* The rule of ops.h in scalars. */
static float sin_squared(float t) {
        float limit = LK_SIN2_MAX, n, r, z, p;

        t = t < -limit ? -limit : t > limit ? limit : t;
        n = fmaf(t, 0x1.45f306p-2f, 0x1.8p+23f) - 0x1.8p+23f;
        r = fmaf(n, -0x1.921fb6p+1f, t);
        r = fmaf(n, 0x1.777a5cp-24f, r);
        z = r * r;
        p = fmaf(0x1.5dbdeap-19f, z, -0x1.9f6ffep-13f);
        p = fmaf(p, z, 0x1.110ed4p-7f);
        p = fmaf(p, z, -0x1.55554cp-3f);
        r = fmaf(r * z, p, r);
        return r * r;
}

static float rule(float x, float a, float b) {
        return fmaf(1 / (b + 1e-9f), sin_squared(a * x), x);
}

static void snake_sizes_follow_rule(void **state) {
        static const uint64_t ms[] = {1, 3, 407}, ns[] = {1, 2, 7, 8, 15, 16, 17, 64, 333};

        for (unsigned i = 0; i < ELEMENTSOF(ms) * ELEMENTSOF(ns); i++) {
                uint64_t m = ms[i / ELEMENTSOF(ns)], n = ns[i % ELEMENTSOF(ns)], seed = i;
                CLEANUP_FREE void *alpha_base = NULL, *beta_base = NULL;
                CLEANUP_FREE float *x = random_aligned(m * n, LK_F32, 3, &seed);
                LkType type = types[i % 3];
                LkSnake a = {.m = m, .channels = n, .x = x};

                a.alpha = (LkVector){random_array(n, type, i % 5, 2, &seed, &alpha_base), type, n};
                a.beta = (LkVector){random_array(n, type, i % 3, 2, &seed, &beta_base), type, n};
                for (unsigned k = 0; k < 2 * ISAS; k++) {
                        LkContext *c;
                        const LkOps *ops = open_isa(all_isas[k / 2], 1 + k, &c);
                        CLEANUP_FREE float *y = guarded(m * n + 1, LK_F32);
                        const uint32_t guard = 0x5a5a5a5a;

                        if (!ops)
                                continue;
                        if (k % 2 == 0) /* alpha for both */
                                a.beta.data = NULL;
                        else
                                a.beta.data = (uint8_t *) beta_base + i % 3;
                        a.y = y;
                        assert_int_equal(ops->snake(c, &a), 0);
                        for (uint64_t at = 0; at < m * n; at++) {
                                float al = (float) get(a.alpha.data, type, at % n);
                                float be = a.beta.data ? (float) get(a.beta.data, type, at % n) : al;
                                float expected = rule(x[at], al, be);

                                assert_memory_equal(y + at, &expected, 4);
                        }
                        assert_memory_equal(y + m * n, &guard, 4);
                        assert_null(ops->context_free(c));
                }
        }
}

/* sin^2(t) alone: x = t / 2^60 and alpha = 2^60, so that what is added is nothing. */
static double sine_error(const LkOps *ops, LkContext *c, float *t, uint64_t n) {
        const float alpha = 0x1p60f, beta = 1;
        LkSnake a = {.m = n, .channels = 1, .alpha = {&alpha, LK_F32, 1}, .beta = {&beta, LK_F32, 1}};
        CLEANUP_FREE float *x = allocate(n * sizeof(float)), *y = allocate(n * sizeof(float));
        double worst = 0;

        for (uint64_t i = 0; i < n; i++)
                x[i] = t[i] * 0x1p-60f;
        a.x = x;
        a.y = y;
        assert_int_equal(ops->snake(c, &a), 0);
        for (uint64_t i = 0; i < n; i++) {
                double s = sin((double) t[i]), error = fabs((double) y[i] - s * s);

                if (!(error <= worst))
                        worst = error;
        }
        return worst;
}

#define SINES 400000

static void snake_sine_is_within_its_bound(void **state) {
        CLEANUP_FREE float *t = allocate(SINES * sizeof(float));
        LkContext *c;
        const LkOps *ops = open_isa(LK_CPU_AUTO, 2, &c);
        uint64_t seed = 1;
        double worst = 0, e;

        /* all sizes up to the limit; then the hard places: multiples of pi / 4 and their neighbours */
        for (double size = 0x1p-20; size <= LK_SIN2_MAX; size *= 8) {
                for (unsigned i = 0; i < SINES; i++)
                        t[i] = (float) (size * ((double) (random_u64(&seed) >> 11) * 0x1p-52 - 1));
                e = sine_error(ops, c, t, SINES);
                worst = e > worst ? e : worst;
        }
        for (unsigned i = 0; i < SINES; i++) {
                double at = (double) (random_u64(&seed) % 300000 + 1) * M_PI / 4;

                t[i] = (float) at;
                for (unsigned k = 0; k < i % 5; k++)
                        t[i] = nextafterf(t[i], i % 2 ? 0 : INFINITY);
        }
        e = sine_error(ops, c, t, SINES);
        worst = e > worst ? e : worst;
        print_message("largest error of sin^2: %.3g\n", worst);
        assert_true(worst <= LK_SIN2_ERROR);
        assert_true(worst > 1e-8); /* it is f32 */
        assert_null(ops->context_free(c));
}

static void snake_exponents_are_raised(void **state) {
        LkContext *c;
        const LkOps *ops = open_isa(LK_CPU_AUTO, 1, &c);
        uint64_t seed = 5;
        CLEANUP_FREE float *x = random_aligned(50 * 20, LK_F32, 2, &seed);
        CLEANUP_FREE float *alpha = random_aligned(20, LK_F32, 1, &seed);
        CLEANUP_FREE float *beta = random_aligned(20, LK_F32, 1, &seed);
        CLEANUP_FREE float *y = guarded(50 * 20, LK_F32);
        CLEANUP_FREE double *expected = allocate(50 * 20 * sizeof(double));
        LkSnake a = {.m = 50,
                .channels = 20,
                .x = x,
                .alpha = {alpha, LK_F32, 20},
                .beta = {beta, LK_F32, 20},
                .exponents = true,
                .y = y};

        assert_int_equal(ops->snake(c, &a), 0);
        for (unsigned i = 0; i < 50 * 20; i++) {
                double s = sin(exp((double) alpha[i % 20]) * (double) x[i]);

                expected[i] = (double) x[i] + s * s / (exp((double) beta[i % 20]) + 1e-9);
        }
        assert_true(relative_l2(y, LK_F32, 20, expected, 50, 20) < 1e-6);
        assert_null(ops->context_free(c));
}

/* alpha = 0 gives sin 0 = 0 over 1e-9: not 0 / 0. A huge argument stays bounded, a NaN stays one. */
static void snake_odd_numbers_keep_to_the_rule(void **state) {
        const float x[] = {3, -2, 0.5f, 1e30f, -1e30f, NAN}, alpha[] = {0, 1e-30f, 1e30f, 1, 1, 1};
        float y[6];
        LkContext *c;
        LkSnake a = {.m = 1, .channels = 6, .x = x, .alpha = {alpha, LK_F32, 6}, .y = y};

        for (unsigned i = 0; i < ISAS; i++) {
                const LkOps *ops = open_isa(all_isas[i], 1, &c);

                if (!ops)
                        continue;
                assert_int_equal(ops->snake(c, &a), 0);
                assert_true(y[0] == 3 && y[1] == -2 && y[2] == 0.5f && y[3] == 1e30f && y[4] == -1e30f);
                assert_true(isnan(y[5]));
                assert_null(ops->context_free(c));
        }
}

/* In place, and rows alone. */
static void snake_any_position_same_bits(void **state) {
        LkContext *c;
        const LkOps *ops = open_isa(LK_CPU_AUTO, 3, &c);
        uint64_t seed = 9;
        CLEANUP_FREE float *x = random_aligned(200 * 37, LK_F32, 2, &seed);
        CLEANUP_FREE float *alpha = random_aligned(37, LK_F32, 1, &seed);
        CLEANUP_FREE float *y = guarded(200 * 37, LK_F32), *row = guarded(37, LK_F32);
        LkSnake a = {.m = 200, .channels = 37, .x = x, .alpha = {alpha, LK_F32, 37}, .y = y};

        assert_int_equal(ops->snake(c, &a), 0);
        a.m = 1;
        a.y = row;
        for (unsigned i = 0; i < 200; i++) {
                a.x = x + i * 37ul;
                assert_int_equal(ops->snake(c, &a), 0);
                assert_memory_equal(row, y + i * 37ul, 37 * sizeof(float));
        }
        a.m = 200;
        a.x = a.y = x;
        assert_int_equal(ops->snake(c, &a), 0);
        assert_memory_equal(x, y, 200 * 37 * sizeof(float));
        assert_null(ops->context_free(c));
}

#define REFUSED(statement)                                                                                  \
        do {                                                                                                \
                LkSnake a = good;                                                                           \
                statement;                                                                                  \
                assert_int_equal(ops->snake(c, &a), -EINVAL);                                               \
        } while (0)

static void snake_bad_argument_is_refused(void **state) {
        const float x[8] = {}, alpha[4] = {};
        float y[8];
        LkContext *c;
        const LkOps *ops = open_isa(LK_CPU_AUTO, 1, &c);
        const LkSnake good = {.m = 2, .channels = 4, .x = x, .alpha = {alpha, LK_F32, 4}, .y = y};

        assert_int_equal(ops->snake(NULL, &good), -EINVAL);
        assert_int_equal(ops->snake(c, NULL), -EINVAL);
        REFUSED(a.x = NULL);
        REFUSED(a.y = NULL);
        REFUSED(a.channels = 0);
        REFUSED(a.channels = 3);
        REFUSED(a.alpha.data = NULL);
        REFUSED(a.alpha.type = LK_I8);
        REFUSED(a.beta = ((LkVector){alpha, LK_F32, 3}));
        REFUSED(a.m = UINT64_MAX / 4);
        REFUSED(a.x = (const float *) ((const uint8_t *) x + 2));
        assert_null(ops->context_free(c));
}

int main(void) {
        static const struct CMUnitTest tests[] = {
                cmocka_unit_test(snake_sizes_follow_rule),
                cmocka_unit_test(snake_sine_is_within_its_bound),
                cmocka_unit_test(snake_exponents_are_raised),
                cmocka_unit_test(snake_odd_numbers_keep_to_the_rule),
                cmocka_unit_test(snake_any_position_same_bits),
                cmocka_unit_test(snake_bad_argument_is_refused),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
