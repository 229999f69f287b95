/* SPDX-License-Identifier: Apache-2.0 */
#include "service/worker/timeline.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "service/shared/clock.h"

static void note_counts_the_first_time_only(void **state) {
        double linked, driver, text;
        char line[256];
        int n = 0;

        timeline_begin();
        (void) usleep(20000);
        timeline_note("driver");
        timeline_note("text");
        (void) usleep(20000);
        timeline_note("driver");
        assert_true(timeline_print(line, sizeof(line)) < (int) sizeof(line));
        assert_int_equal(sscanf(line, "linked %lf, driver %lf, text %lf%n", &linked, &driver, &text, &n), 3);
        assert_int_equal((size_t) n, strlen(line));
        assert_true(linked >= 0 && driver >= 20 && driver < 10000 && text >= 0 && text < 10000);
}

static void end_tells_when_the_first_kernel_began(void **state) {
        uint64_t first;
        double all;
        char line[256];

        timeline_begin();
        timeline_note("rows");
        first = clock_usec() + 50000;
        timeline_end(first);
        timeline_note("late");
        timeline_end(first + 1000000);
        (void) timeline_print(line, sizeof(line));
        assert_null(strstr(line, "late"));
        assert_non_null(strstr(line, "first kernel "));
        assert_int_equal(sscanf(strstr(line, "all "), "all %lf", &all), 1);
        assert_true(all >= 50 && all < 1000);
}

static void beside_is_told_at_the_end_and_takes_no_time_of_others(void **state) {
        double linked, driver, text, touched;
        char line[256];
        int n = 0;

        timeline_begin();
        timeline_note("driver");
        (void) usleep(20000);
        timeline_beside("touched");
        timeline_note("text");
        (void) timeline_print(line, sizeof(line));
        assert_int_equal(
                sscanf(line, "linked %lf, driver %lf, text %lf, beside it touched at %lf%n", &linked, &driver, &text, &touched, &n), 4);
        assert_int_equal((size_t) n, strlen(line));
        assert_true(text >= 20 && touched >= 20);
}

static void what_is_counted_is_summed(void **state) {
        char line[256];

        timeline_begin();
        timeline_count("layers tried", 25000);
        timeline_note("text");
        timeline_count("layers known", 100);
        timeline_count("layers tried", 24500);
        (void) timeline_print(line, sizeof(line));
        assert_non_null(strstr(line, ", text "));
        assert_non_null(strstr(line, ", 2 layers tried in 49.5, 1 layers known in 0.1"));
}

static void end_without_a_stamp_tells_no_kernel(void **state) {
        char line[256];

        timeline_begin();
        timeline_end(0);
        (void) timeline_print(line, sizeof(line));
        assert_null(strstr(line, "kernel"));
}

static void line_that_is_too_long_is_cut(void **state) {
        char line[16];

        timeline_begin();
        timeline_note("something that takes its room");
        assert_true(timeline_print(line, sizeof(line)) > (int) sizeof(line));
        assert_int_equal(strlen(line), sizeof(line) - 1);
        assert_true(timeline_print(line, 0) > (int) sizeof(line));
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(note_counts_the_first_time_only),
                cmocka_unit_test(end_tells_when_the_first_kernel_began),
                cmocka_unit_test(beside_is_told_at_the_end_and_takes_no_time_of_others),
                cmocka_unit_test(what_is_counted_is_summed),
                cmocka_unit_test(end_without_a_stamp_tells_no_kernel),
                cmocka_unit_test(line_that_is_too_long_is_cut),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
