/* SPDX-License-Identifier: Apache-2.0 */
/* average against its rule. */

#include "tests/unit/kernels/kernels-test.h"

static void average_sizes_follow_rule(void **state) {
        static const uint64_t ns[] = {1, 7, 8, 16, 17, 1000, 40001};

        for (unsigned i = 0; i < ELEMENTSOF(ns) * LK_AVERAGE_MAX * ISAS; i++) {
                uint64_t n = ns[i % ELEMENTSOF(ns)], seed = i;
                uint32_t count = 1 + i / ELEMENTSOF(ns) % LK_AVERAGE_MAX;
                CLEANUP_FREE float *x = random_aligned(LK_AVERAGE_MAX * n, LK_F32, 1, &seed);
                CLEANUP_FREE float *y = guarded(n + 1, LK_F32);
                LkAverage a = {.n = n, .count = count, .y = y};
                LkContext *c;
                const LkOps *ops = open_isa(all_isas[i % ISAS], 1 + i % 3, &c);

                if (!ops)
                        continue;
                for (uint32_t k = 0; k < count; k++)
                        a.x[k] = x + k * n;
                assert_int_equal(ops->average(c, &a), 0);
                for (uint64_t j = 0; j < n; j++) {
                        float sum = x[j];

                        for (uint32_t k = 1; k < count; k++)
                                sum = sum + x[k * n + j];
                        assert_true(y[j] == sum / (float) count);
                }
                assert_int_equal(((uint8_t *) (y + n))[0], 0x5a);

                /* in place */
                a.y = x + (count - 1) * n;
                assert_int_equal(ops->average(c, &a), 0);
                assert_memory_equal(a.y, y, n * sizeof(float));
                assert_null(ops->context_free(c));
        }
}

static void average_bad_argument_is_refused(void **state) {
        const float x[4] = {};
        float y[4];
        LkContext *c;
        const LkOps *ops = open_isa(LK_CPU_AUTO, 1, &c);
        LkAverage good = {.n = 4, .count = 2, .x = {x, x}, .y = y}, a = good;

        assert_int_equal(ops->average(NULL, &good), -EINVAL);
        assert_int_equal(ops->average(c, NULL), -EINVAL);
        a.count = 0;
        assert_int_equal(ops->average(c, &a), -EINVAL);
        a.count = LK_AVERAGE_MAX + 1;
        assert_int_equal(ops->average(c, &a), -EINVAL);
        a.count = 3; /* the third one is not there */
        assert_int_equal(ops->average(c, &a), -EINVAL);
        a = good;
        a.y = NULL;
        assert_int_equal(ops->average(c, &a), -EINVAL);
        assert_null(ops->context_free(c));
}

int main(void) {
        static const struct CMUnitTest tests[] = {
                cmocka_unit_test(average_sizes_follow_rule),
                cmocka_unit_test(average_bad_argument_is_refused),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
