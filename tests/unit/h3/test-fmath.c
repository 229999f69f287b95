/* SPDX-License-Identifier: Apache-2.0 */
#include "service/shared/fmath.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#define SAMPLES 400000
#define ULP_MAX 2.0

static uint64_t random_next(uint64_t *state) { /* xorshift64 */
        uint64_t x = *state;

        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        return *state = x;
}

static double random_unit(uint64_t *state) {
        return (double) (random_next(state) >> 11) * 0x1p-53;
}

/* Distance in units of the last place of the expected value; libm itself is within 1. */
static double ulps(double got, double expected) {
        double magnitude = fabs(expected), spacing;

        if (got == expected)
                return 0;
        if (!isfinite(got) || !isfinite(expected))
                return INFINITY;
        spacing = nextafter(magnitude, INFINITY) - magnitude;
        return fabs(got - expected) / spacing;
}

static void check(const char *what, double x, double got, double expected) {
        if (ulps(got, expected) > ULP_MAX)
                fail_msg(
                        "%s(%a) is %a, libm says %a: %.3g ulp", what, x, got, expected, ulps(got, expected));
}

static void exp_whole_range_matches_libm(void **state) {
        uint64_t seed = 1;

        for (int i = 0; i < SAMPLES; i++) {
                double x = (random_unit(&seed) - 0.5) * 1416, small = (random_unit(&seed) - 0.5) * 2;

                check("exp", x, fmath_exp(x), exp(x));
                check("exp", small, fmath_exp(small), exp(small));
        }
        for (double x = -745.1; x < -708;
                x += 0.01) /* results that are subnormal: one unit of 2^-1074 is allowed twice */
                assert_true(fabs(fmath_exp(x) - exp(x)) <= 0x1p-1073);
}

static void exp_ends_are_exact(void **state) {
        assert_true(fmath_exp(0) == 1);
        assert_true(fmath_exp(1000) == HUGE_VAL);
        assert_true(fmath_exp(-1000) == 0);
        assert_true(isnan(fmath_exp(NAN)));
        check("exp", 709.78, fmath_exp(709.78), exp(709.78));
}

static void log_whole_range_matches_libm(void **state) {
        uint64_t seed = 2;

        for (int i = 0; i < SAMPLES; i++) {
                uint64_t bits =
                        random_next(&seed) & 0x7fefffffffffffffULL; /* positive and finite, subnormal too */
                double x, near_one = 1 + (random_unit(&seed) - 0.5) * 0.6;

                memcpy(&x, &bits, sizeof(x));
                if (x > 0)
                        check("log", x, fmath_log(x), log(x));
                check("log", near_one, fmath_log(near_one), log(near_one));
        }
}

static void log_ends_are_exact(void **state) {
        assert_true(fmath_log(1) == 0);
        assert_true(fmath_log(0) == -HUGE_VAL);
        assert_true(fmath_log(HUGE_VAL) == HUGE_VAL);
        assert_true(isnan(fmath_log(-1)));
        check("log", 10000, fmath_log(10000), log(10000));
}

static void sin_cos_wide_range_match_libm(void **state) {
        static const double ranges[] = {1e-8, 1e-3, 1, 10, 1e3, 2e5, 1e9};
        uint64_t seed = 3;

        for (size_t r = 0; r < sizeof(ranges) / sizeof(ranges[0]); r++)
                for (int i = 0; i < SAMPLES / 4; i++) {
                        double x = (random_unit(&seed) - 0.5) * 2 * ranges[r];

                        check("sin", x, fmath_sin(x), sin(x));
                        check("cos", x, fmath_cos(x), cos(x));
                }
}

static void sin_cos_near_multiples_of_pi_2_match_libm(void **state) {
        uint64_t seed = 4;

        for (int i = 0; i < SAMPLES / 4; i++) {
                double n = (double) (random_next(&seed) % 636619772); /* up to 1e9 */
                double x = n * 1.5707963267948966;

                for (int step = -1; step <= 1; step++) {
                        double y = step < 0 ? nextafter(x, -1) : step > 0 ? nextafter(x, 2e9) : x;

                        check("sin", y, fmath_sin(y), sin(y));
                        check("cos", y, fmath_cos(y), cos(y));
                }
        }
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(exp_whole_range_matches_libm),
                cmocka_unit_test(exp_ends_are_exact),
                cmocka_unit_test(log_whole_range_matches_libm),
                cmocka_unit_test(log_ends_are_exact),
                cmocka_unit_test(sin_cos_wide_range_match_libm),
                cmocka_unit_test(sin_cos_near_multiples_of_pi_2_match_libm),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
