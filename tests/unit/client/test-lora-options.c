/* SPDX-License-Identifier: Apache-2.0 */

/* What --lora says. */

#include "client/latentctl/lora-options.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

static void parse_file_and_strength(void **state) {
        const struct {
                const char *argument, *file;
                double strength;
        } cases[] = {
                {"a.safetensors", "a.safetensors", 1},
                {"a.safetensors:0.5", "a.safetensors", 0.5},
                {"dir/a:-1.25", "dir/a", -1.25},
                {"a:1e-3", "a", 1e-3},
                {"a:0", "a", 0},
                {"a:b", "a:b", 1},     /* no number: part of the name */
                {"a:", "a:", 1},
                {"a:0.5x", "a:0.5x", 1},
                {"a:nano", "a:nano", 1},
                {"a:-1000", "a", -1000},
                {"a:1:2", "a:1", 2},   /* only the last colon */
                {"a:1:b", "a:1:b", 1},
        };
        StringList arguments = {.n = ELEMENTSOF(cases)};
        LoraOptions l = {};
        latent_error e = {};

        _Static_assert(ELEMENTSOF(cases) <= STRINGS_MAX, "as many as one command line has");
        for (size_t i = 0; i < ELEMENTSOF(cases); i++)
                arguments.items[i] = cases[i].argument;
        assert_int_equal(loras_parse(&arguments, &l, &e), 0);
        assert_int_equal(l.n, ELEMENTSOF(cases));
        for (size_t i = 0; i < ELEMENTSOF(cases); i++) {
                assert_string_equal(l.items[i].file, cases[i].file);
                assert_true(l.items[i].strength == cases[i].strength);
        }
        loras_done(&l);
        assert_int_equal(l.n, 0);
}

static void parse_without_file_refused(void **state) {
        const char *wrong[] = {"", ":0.5"};

        for (size_t i = 0; i < ELEMENTSOF(wrong); i++) {
                const StringList arguments = {.items = {"good:2", wrong[i]}, .n = 2};
                LoraOptions l = {};
                latent_error e = {};

                assert_int_equal(loras_parse(&arguments, &l, &e), -EINVAL);
                assert_string_equal(e.name, CTL_ERROR_USAGE);
                assert_int_equal(l.n, 0);
        }
}

static void parse_strength_out_of_range_refused(void **state) {
        const char *wrong[] = {"a:nan", "a:-NAN", "a:inf", "a:-infinity", "a:1e400", "a:1000.5", "a:-1001"};

        for (size_t i = 0; i < ELEMENTSOF(wrong); i++) {
                const StringList arguments = {.items = {"good:2", wrong[i]}, .n = 2};
                LoraOptions l = {};
                latent_error e = {};

                assert_int_equal(loras_parse(&arguments, &l, &e), -EINVAL);
                assert_string_equal(e.name, CTL_ERROR_USAGE);
                assert_non_null(strstr(e.text, "strength"));
                assert_int_equal(l.n, 0);
        }
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(parse_file_and_strength),
                cmocka_unit_test(parse_strength_out_of_range_refused),
                cmocka_unit_test(parse_without_file_refused),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
