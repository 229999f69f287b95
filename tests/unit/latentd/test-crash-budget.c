/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <errno.h>

#include "service/latentd/crash-budget.h"

#define MINUTE (60 * UINT64_C(1000000))
#define START (1000 * MINUTE)

static void crash_budget_third_crash_makes_its_user_wait(void **state) {
        CrashBudget *b = NULL;

        assert_int_equal(crash_budget_new(3, 10 * MINUTE, &b), 0);
        assert_false(crash_budget_count(b, 7, START));
        assert_false(crash_budget_count(b, 7, START + MINUTE));
        assert_false(crash_budget_count(b, 8, START + MINUTE)); /* somebody else */
        assert_int_equal(crash_budget_until(b, 7, START + MINUTE), 0);
        assert_true(crash_budget_count(b, 7, START + 9 * MINUTE));
        assert_int_equal(crash_budget_until(b, 7, START + 9 * MINUTE), START + 10 * MINUTE);
        assert_int_equal(crash_budget_until(b, 8, START + 9 * MINUTE), 0);
        assert_int_equal(crash_budget_until(b, 7, START + 10 * MINUTE - 1), START + 10 * MINUTE);
        assert_int_equal(crash_budget_until(b, 7, START + 10 * MINUTE), 0);

        /* Counted anew. */
        assert_false(crash_budget_count(b, 7, START + 10 * MINUTE));
        assert_false(crash_budget_count(b, 7, START + 11 * MINUTE));
        assert_true(crash_budget_count(b, 7, START + 12 * MINUTE));
        assert_null(crash_budget_free(b));
}

static void crash_budget_old_crashes_do_not_count(void **state) {
        CrashBudget *b = NULL;

        assert_int_equal(crash_budget_new(3, 10 * MINUTE, &b), 0);
        for (unsigned i = 0; i < 50; i++) /* two in ten minutes, for hours */
                assert_false(crash_budget_count(b, 7, START + i * 5 * MINUTE));
        assert_null(crash_budget_free(b));

        assert_int_equal(crash_budget_new(3, 10 * MINUTE, &b), 0);
        assert_false(crash_budget_count(b, 7, START));
        assert_false(crash_budget_count(b, 7, START + 9 * MINUTE));
        assert_false(crash_budget_count(b, 7, START + 10 * MINUTE)); /* the first is over */
        assert_true(crash_budget_count(b, 7, START + 11 * MINUTE));
        assert_null(crash_budget_free(b));
}

static void crash_budget_off_never_waits(void **state) {
        CrashBudget *b = NULL;

        assert_int_equal(crash_budget_new(CRASH_BUDGET_MAX + 1, MINUTE, &b), -ERANGE);
        assert_int_equal(crash_budget_new(0, 0, &b), 0);
        for (unsigned i = 0; i < 10; i++)
                assert_false(crash_budget_count(b, 7, START));
        assert_int_equal(crash_budget_until(b, 7, START), 0);
        assert_null(crash_budget_free(b));
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(crash_budget_third_crash_makes_its_user_wait),
                cmocka_unit_test(crash_budget_old_crashes_do_not_count),
                cmocka_unit_test(crash_budget_off_never_waits),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
