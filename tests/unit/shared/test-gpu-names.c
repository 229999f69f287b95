/* SPDX-License-Identifier: Apache-2.0 */
#include "service/shared/gpu-names.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static const WireDevice device = {.pci_address = "0000:41:00.0", .uuid = "GPU-01234567-89ab-cdef-0123-456789abcdef"};

static void a_list_has_each_kind_of_name(void **state) {
        static const struct {
                const char *list;
                bool has;
        } cases[] = {
                {"1", true}, {"0", false}, {"0 1", true}, {"0,1", true}, {" ,\t0\t, 1=2.5 ", true}, {"11", false}, {"1x", false},
                {"=1", false}, {"0=1", false}, {"0000:41:00.0", true}, {"0000:42:00.0", false},
                {"gpu-01234567-89AB-cdef-0123-456789abcdef,7", true}, {"", false}, {" ", false}, {",", false},
                {"GPU-01234567-89ab-cdef-0123-456789abcdef-and-then-more-than-a-name-can-have-0 1", true},
        };

        for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++)
                if (gpu_is_listed(cases[i].list, &device, 1) != cases[i].has)
                        fail_msg("\"%s\"", cases[i].list);
        assert_false(gpu_is_listed(NULL, &device, 1));
}

static void left_out_of(const char *list, const char *exclude, bool want) {
        assert_int_equal(list ? setenv(GPU_NAMES_VARIABLE, list, 1) : unsetenv(GPU_NAMES_VARIABLE), 0);
        assert_int_equal(exclude ? setenv(GPU_NAMES_EXCLUDE_VARIABLE, exclude, 1) : unsetenv(GPU_NAMES_EXCLUDE_VARIABLE), 0);
        assert_int_equal(gpu_is_left_out(&device, 1), want);
}

static void the_environment_leaves_out(void **state) {
        Fault f = {};

        left_out_of(NULL, NULL, false);
        left_out_of("", "", false);
        left_out_of("0 1", "", false);
        left_out_of("0", "", true);
        left_out_of("", "0", false);
        left_out_of("", "0000:41:00.0", true);
        left_out_of("1", "1", true);
        left_out_of(NULL, NULL, false);
        assert_true(gpu_names_refuse(3, &f) < 0);
        assert_non_null(strstr(f.text, "None of the 3 GPUs"));
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(a_list_has_each_kind_of_name),
                cmocka_unit_test(the_environment_leaves_out),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
