/* SPDX-License-Identifier: Apache-2.0 */
#include "service/worker/alike.h"

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

#include "service/shared/cleanup.h"

static const AlikeDevice hopper = {"Hopper", "0000:41:00.0", "sm_90", "cuda-1"}, hopper2 = {"Hopper", "0000:42:00.0", "sm_90", "cuda-1"},
                         ampere = {"Ampere", "0000:43:00.0", "sm_80", "cuda-2"}, ampere2 = {"Ampere", "0000:44:00.0", "sm_80", "cuda-2"},
                         other = {"Hopper", "0000:45:00.0", "sm_90", "cuda-3"}, shut = {"Hopper", "0000:46:00.0", "sm_90", ""},
                         shut_ampere = {"Ampere", "0000:47:00.0", "sm_80", ""};

static bool joins(const AlikeDevice *a, const AlikeDevice *b, const AlikeDevice *next, WireHello *notes) {
        AlikeDevice listed[2] = {};

        *notes = (WireHello){};
        if (a)
                listed[0] = *a;
        if (b)
                listed[1] = *b;
        return alike_join(listed, a ? b ? 2 : 1 : 0, next, notes);
}

static void alike_same_class_joins(void **state) {
        WireHello notes;

        assert_true(joins(NULL, NULL, &hopper, &notes));
        assert_true(joins(&hopper, NULL, &hopper2, &notes));
        assert_true(joins(&ampere, NULL, &ampere2, &notes));
        assert_true(joins(&hopper, &shut, &hopper2, &notes));
        assert_string_equal(notes.notes, "");
}

/* Bits of bf16 products differ by architecture, and by what a library has chosen on the same one. */
static void alike_another_class_is_left_out_and_told(void **state) {
        WireHello notes;

        assert_false(joins(&hopper, NULL, &ampere, &notes));
        assert_string_equal(notes.notes,
                "The GPU Ampere (0000:43:00.0) is left out: beside Hopper (0000:41:00.0) its results would have other bits.\n");
        assert_false(joins(&ampere, NULL, &hopper, &notes));
        assert_false(joins(&hopper, &hopper2, &other, &notes));
        assert_non_null(strstr(notes.notes, "(0000:45:00.0) is left out: beside Hopper (0000:41:00.0)"));
        assert_false(joins(&shut_ampere, &hopper, &ampere, &notes)); /* whoever computes is the example */
        assert_non_null(strstr(notes.notes, "beside Hopper (0000:41:00.0)"));
}

/* One that has no part is nobody's example, and has a number where it had one. */
static void alike_one_that_is_not_opened_is_no_example(void **state) {
        WireHello notes;

        assert_true(joins(&shut_ampere, NULL, &hopper, &notes));
        assert_true(joins(&shut, NULL, &other, &notes));
        assert_true(joins(&hopper, NULL, &shut, &notes));
        assert_false(joins(&hopper, NULL, &shut_ampere, &notes));
        assert_false(joins(&shut, NULL, &shut_ampere, &notes));
        assert_false(joins(&shut, &ampere, &shut_ampere, &notes));
}

/* As if those of another class were not there. */
static void alike_number_is_that_of_the_first_ones_class(void **state) {
        const AlikeDevice listed[] = {shut, ampere, hopper};

        assert_int_equal(alike_number(listed, 0, &ampere), 0);
        assert_int_equal(alike_number(listed, 1, &ampere), UINT32_MAX);
        assert_int_equal(alike_number(listed, 1, &hopper), 1);
        assert_int_equal(alike_number(listed, 2, &hopper), 1);
        assert_int_equal(alike_number(listed, 3, &other), 2);
        assert_int_equal(alike_number(listed, 3, &shut_ampere), UINT32_MAX);
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(alike_same_class_joins),
                cmocka_unit_test(alike_another_class_is_left_out_and_told),
                cmocka_unit_test(alike_one_that_is_not_opened_is_no_example),
                cmocka_unit_test(alike_number_is_that_of_the_first_ones_class),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
