/* SPDX-License-Identifier: Apache-2.0 */
#include "service/shared/utf8.h"

#include <stdlib.h>
#include <string.h>

#include "service/shared/cleanup.h"
#include "tests/unit/shared/cmocka-all.h"

static void utf8_decode_valid_gives_code_point(void **state) {
        static const struct {
                const char *s;
                size_t n;
                uint32_t c;
        } cases[] = {
                {"a", 1, 'a'},
                {"\x7f", 1, 0x7f},
                {"\xc2\x80", 2, 0x80},
                {"\xdf\xbf", 2, 0x7ff},
                {"\xe0\xa0\x80", 3, 0x800},
                {"\xed\x9f\xbf", 3, 0xd7ff},
                {"\xee\x80\x80", 3, 0xe000},
                {"\xf0\x90\x80\x80", 4, 0x10000},
                {"\xf4\x8f\xbf\xbf", 4, 0x10ffff},
        };

        for (size_t i = 0; i < ELEMENTSOF(cases); i++) {
                char buf[4];
                uint32_t c;

                assert_int_equal(utf8_decode(cases[i].s, strlen(cases[i].s), &c), cases[i].n);
                assert_int_equal(c, cases[i].c);
                assert_int_equal(utf8_encode(c, buf), cases[i].n);
                assert_memory_equal(buf, cases[i].s, cases[i].n);
        }
}

static void utf8_decode_malformed_gives_zero(void **state) {
        static const char *const cases[] = {
                "",
                "\x80",
                "\xbf",
                "\xc0\x80",
                "\xc1\xbf",
                "\xe0\x9f\xbf",
                "\xed\xa0\x80",
                "\xed\xbf\xbf",
                "\xf0\x8f\xbf\xbf",
                "\xf4\x90\x80\x80",
                "\xf8\x88\x80\x80\x80",
                "\xff",
                "\xc3",
                "\xc3(",
                "\xe2\x82",
                "\xe2(\xa1",
                "\xf0\x9f\x98",
        };

        for (size_t i = 0; i < ELEMENTSOF(cases); i++) {
                uint32_t c = 77;

                assert_int_equal(utf8_decode(cases[i], strlen(cases[i]), &c), 0);
                assert_int_equal(c, 77);
        }
}

static void utf8_is_valid_text_judged_whole(void **state) {
        assert_true(utf8_is_valid("", 0));
        assert_true(utf8_is_valid("gr\xc3\xbc\xc3\x9f\x65", 8));
        assert_false(utf8_is_valid("ab\xc3", 3));
        assert_false(utf8_is_valid("\xff"
                                   "ab",
                3));
}

static void utf8_escape_bad_bytes_are_shown(void **state) {
        static const char *const cases[][2] = {
                {"", ""},
                {"gr\xc3\xbc\xc3\x9f", "gr\xc3\xbc\xc3\x9f"},
                {"caf\xe9.x", "caf\\xe9.x"},
                {"\xff\xc3", "\\xff\\xc3"},
                {"\xed\xa0\x80\xf0\x9f\x98\x80", "\\xed\\xa0\\x80\xf0\x9f\x98\x80"},
        };

        for (size_t i = 0; i < ELEMENTSOF(cases); i++) {
                char *s = utf8_escape(cases[i][0]);

                assert_non_null(s);
                assert_string_equal(s, cases[i][1]);
                free(s);
        }
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(utf8_decode_valid_gives_code_point),
                cmocka_unit_test(utf8_decode_malformed_gives_zero),
                cmocka_unit_test(utf8_is_valid_text_judged_whole),
                cmocka_unit_test(utf8_escape_bad_bytes_are_shown),
        };

        return cmocka_run_group_tests_name("utf8", tests, NULL, NULL);
}
