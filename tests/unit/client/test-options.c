/* SPDX-License-Identifier: Apache-2.0 */

/* Option structs of older and newer callers. */

#include "client/liblatent/options.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

/* The struct as the library knows it, and as callers of other versions do. */
typedef struct Ours {
        uint32_t struct_size, a;
        uint64_t b, c; /* c came in the second version */
} Ours;

typedef struct Newer {
        Ours ours;
        uint64_t d;
} Newer;

#define FIRST_SIZE 16u

static void read_same_version_copied(void **state) {
        Ours in = {sizeof(in), 1, 2, 3}, out;

        assert_int_equal(options_read(&in, FIRST_SIZE, &out, sizeof(out), NULL), 0);
        assert_memory_equal(&in, &out, sizeof(out));
}

static void read_null_all_defaults(void **state) {
        Ours out;

        memset(&out, 0xff, sizeof(out));
        assert_int_equal(options_read(NULL, FIRST_SIZE, &out, sizeof(out), NULL), 0);
        assert_int_equal(out.struct_size, sizeof(out));
        assert_int_equal(out.a, 0);
        assert_int_equal(out.c, 0);
}

static void read_older_caller_rest_zero(void **state) {
        Ours in = {FIRST_SIZE, 1, 2, 3}, out;

        assert_int_equal(options_read(&in, FIRST_SIZE, &out, sizeof(out), NULL), 0);
        assert_int_equal(out.b, 2);
        assert_int_equal(out.c, 0);
        assert_int_equal(out.struct_size, sizeof(out));
}

static void read_newer_caller_zero_tail_accepted(void **state) {
        Newer in = {{sizeof(in), 1, 2, 3}, 0};
        latent_error e = {};
        Ours out;

        assert_int_equal(options_read(&in, FIRST_SIZE, &out, sizeof(out), &e), 0);
        assert_int_equal(out.c, 3);
        in.d = 1;
        assert_int_equal(options_read(&in, FIRST_SIZE, &out, sizeof(out), &e), -E2BIG);
        assert_string_equal(e.name, "InvalidArgument");
}

static void read_wrong_sizes_refused(void **state) {
        Ours in = {0, 1, 2, 3}, out = {.b = 9};

        assert_int_equal(options_read(&in, FIRST_SIZE, &out, sizeof(out), NULL), -EINVAL);
        in.struct_size = FIRST_SIZE - 1;
        assert_int_equal(options_read(&in, FIRST_SIZE, &out, sizeof(out), NULL), -EINVAL);
        in.struct_size = UINT32_MAX; /* not a byte behind the struct may be read */
        assert_int_equal(options_read(&in, FIRST_SIZE, &out, sizeof(out), NULL), -E2BIG);
        assert_int_equal(out.b, 9);
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(read_same_version_copied),
                cmocka_unit_test(read_null_all_defaults),
                cmocka_unit_test(read_older_caller_rest_zero),
                cmocka_unit_test(read_newer_caller_zero_tail_accepted),
                cmocka_unit_test(read_wrong_sizes_refused),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
