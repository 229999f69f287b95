/* SPDX-License-Identifier: Apache-2.0 */
#include "service/shared/fault.h"

#include <errno.h>
#include <string.h>

#include "service/shared/utf8.h"
#include "tests/unit/shared/cmocka-all.h"

static void fault_set_empty_is_filled(void **state) {
        Fault f = {};

        assert_int_equal(fault_set(&f, -EBADMSG, FAULT_INVALID_FILE, "file '%s': %d", "a", 7), -EBADMSG);
        assert_string_equal(f.name, "InvalidFile");
        assert_string_equal(f.text, "file 'a': 7");
}

static void fault_set_filled_is_kept(void **state) {
        Fault f = {};

        (void) fault_set(&f, -EBADMSG, FAULT_INVALID_FILE, "first");
        assert_int_equal(fault_set(&f, -EIO, FAULT_IO, "second"), -EIO);
        assert_string_equal(f.name, "InvalidFile");
        assert_string_equal(f.text, "first");
}

static void fault_set_null_returns_error(void **state) {
        assert_int_equal(fault_set(NULL, -EIO, FAULT_IO, "text"), -EIO);
}

static void fault_set_hostile_bytes_replaced(void **state) {
        Fault f = {};

        /* a terminal escape, a line break, broken UTF-8, C1, a character that reverses the line, and good
         * ones */
        (void) fault_set(&f, -1, FAULT_IO, "%s",
                "\x1b[31m\n\xff\xc3|\xc2\x9b|\xe2\x80\xae|gr\xc3\xbc\xc3\x9f \xf0\x9f\x98\x80");
        assert_string_equal(f.text, "?[31m???|?|?|gr\xc3\xbc\xc3\x9f \xf0\x9f\x98\x80");
}

static void fault_set_long_cut_at_character(void **state) {
        for (size_t shift = 0; shift < 4; shift++) {
                char text[2048] = "";
                Fault f = {};
                size_t n;

                memset(text, 'x', shift);
                for (size_t i = shift; i + 4 < sizeof(text); i += 4)
                        memcpy(text + i, "\xf0\x9f\x98\x80", 4);

                (void) fault_set(&f, -1, FAULT_IO, "%s", text);
                n = strlen(f.text);
                assert_int_equal(n, 1020 + shift);
                assert_memory_equal(f.text, text, n);
                assert_true(utf8_is_valid(f.text, n));
        }
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(fault_set_empty_is_filled),
                cmocka_unit_test(fault_set_filled_is_kept),
                cmocka_unit_test(fault_set_null_returns_error),
                cmocka_unit_test(fault_set_hostile_bytes_replaced),
                cmocka_unit_test(fault_set_long_cut_at_character),
        };

        return cmocka_run_group_tests_name("fault", tests, NULL, NULL);
}
