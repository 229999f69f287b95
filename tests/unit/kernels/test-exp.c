/* SPDX-License-Identifier: Apache-2.0 */
/* The exponential of the CPU backend against libm's in double precision. That the vector versions give its
 * bits is tested where they are used (attention, swiglu). */

#define LK_CPU_LEVEL 1

#include "tests/unit/kernels/kernels-test.h"

#include "kernels/cpu/vec.h"

/* Distance in units of the last place of the exact result; subnormals have the unit 2^-149. */
static double ulps(float got, double exact) {
        int exponent;

        (void) frexp(exact, &exponent);
        exponent = exponent - 24 < -149 ? -149 : exponent - 24;
        return fabs(ldexp((double) got - exact, -exponent));
}

/* Every 257th float of either sign; 257 is prime to all powers of two, so all low bits occur. */
static void exp_finite_is_within_two_ulp(void **state) {
        double worst = 0;

        for (uint64_t u = 0; u <= UINT32_MAX; u += 257) {
                float x = f32_from_bits((uint32_t) u);
                double exact;

                if (!isfinite(x) || x > 88.722f || x < EXP_MIN)
                        continue;

                exact = exp(x);
                worst = fmax(worst, ulps(exp_one(x), exact));
        }

        if (worst > 2)
                fail_msg("%g ulp", worst);
}

static void exp_limits_are_exact(void **state) {
        assert_true(exp_one(0) == 1);
        assert_true(exp_one(-0.0f) == 1);
        assert_true(exp_one(-INFINITY) == 0);
        assert_true(exp_one(-3e38f) == 0);
        assert_true(exp_one(-104) == 0);
        assert_true(exp_one(-103) == 0x1p-149f);
        assert_true(exp_one(88.722f) < INFINITY);
        assert_true(exp_one(88.73f) == INFINITY);
        assert_true(exp_one(3e38f) == INFINITY);
        assert_true(exp_one(INFINITY) == INFINITY);
        assert_true(isnan(exp_one(NAN)));
}

/* A softmax weight may not grow when its score falls. */
static void exp_neighbours_are_ordered(void **state) {
        float last = 0;

        for (float x = -104; x < 0; x += 0x1p-12f) {
                float e = exp_one(x);

                assert_true(e >= last && e <= 1);
                last = e;
        }
}

int main(void) {
        static const struct CMUnitTest tests[] = {
                cmocka_unit_test(exp_finite_is_within_two_ulp),
                cmocka_unit_test(exp_limits_are_exact),
                cmocka_unit_test(exp_neighbours_are_ordered),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
