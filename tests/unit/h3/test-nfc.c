/* SPDX-License-Identifier: Apache-2.0 */
#include "service/h3/nfc.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <utf8proc.h>

#include "service/shared/cleanup.h"
#include "service/shared/utf8.h"

static void assert_nfc(const char *text, size_t n, const char *expected, size_t expected_n) {
        CLEANUP(nfc_done) NfcBuffer b = {};
        const char *got;
        size_t got_n;

        assert_int_equal(nfc_of(&b, text, n, &got, &got_n), 0);
        assert_int_equal(got_n, expected_n);
        assert_memory_equal(got, expected, got_n);
}

static void nfc_known_texts_are_composed(void **state) {
        const char *const texts[][2] = {
                {"", ""}, {"plain \xc3\xa9", "plain \xc3\xa9"}, {"e\xcc\x81", "\xc3\xa9"}, /* e, acute */
                {"\xe2\x84\xab", "\xc3\x85"},                             /* the angstrom sign */
                {"q\xcc\x87\xcc\xa3", "q\xcc\xa3\xcc\x87"},               /* dot above, dot below */
                {"s\xcc\xa3\xcc\x87", "\xe1\xb9\xa9"},                    /* s with both */
                {"\xe1\x84\x80\xe1\x85\xa1\xe1\x86\xa8", "\xea\xb0\x81"}, /* three Hangul letters */
                {"\xea\xb0\x80\xe1\x86\xa7", "\xea\xb0\x80\xe1\x86\xa7"}, /* no final: U+11A7 stays */
                {"\xe0\xa4\x95\xe0\xa4\xbc", "\xe0\xa4\x95\xe0\xa4\xbc"}, /* excluded from composition */
                {"\xef\xac\x81", "\xef\xac\x81"}, /* a ligature is no canonical one */
        };

        for (size_t i = 0; i < ELEMENTSOF(texts); i++)
                assert_nfc(texts[i][0], strlen(texts[i][0]), texts[i][1], strlen(texts[i][1]));
        assert_nfc("\0e\xcc\x81\0", 5, "\0\xc3\xa9\0", 4);
}

/* Against utf8proc's own way, on what its way is right about. */
static void nfc_random_texts_match_utf8proc(void **state) {
        const uint32_t points[] = {'a', 'e', 's', ' ', 0x300, 0x301, 0x323, 0x327, 0x334, 0x345, 0x1100,
                0x1161, 0x11a8, 0xac00, 0x212b, 0x1f82, 0x390, 0x915, 0x93c, 0x1d15e, 0x1d165, 0xfb2c,
                0x3099, 0x304b, 0};
        uint32_t seed = 5;

        for (int round = 0; round < 3000; round++) {
                char text[256];
                utf8proc_uint8_t *want = NULL;
                utf8proc_ssize_t n_want;
                size_t n = 0;

                for (int i = 0; i < 1 + round % 40; i++) {
                        seed = seed * 1664525u + 1013904223u;
                        n += utf8_encode(points[(seed >> 12) % ELEMENTSOF(points)], text + n);
                }
                n_want = utf8proc_map((const utf8proc_uint8_t *) text, (utf8proc_ssize_t) n, &want,
                        UTF8PROC_STABLE | UTF8PROC_COMPOSE);
                assert_true(n_want >= 0);
                assert_nfc(text, n, (const char *) want, (size_t) n_want);
                free(want);
        }
}

/* A million marks in the wrong order: by the square of their number it would take an hour. */
static void nfc_a_long_run_of_marks_is_put_in_order(void **state) {
        CLEANUP(nfc_done) NfcBuffer b = {};
        const size_t pairs = 500000, n = 4 * pairs;
        CLEANUP_FREE char *text = malloc(n);
        const char *got;
        size_t got_n;

        assert_non_null(text);
        for (size_t i = 0; i < pairs; i++)
                memcpy(text + 4 * i, "\xcc\x81\xcc\xa3", 4); /* above (230), below (220) */
        assert_int_equal(nfc_of(&b, text, n, &got, &got_n), 0);
        assert_int_equal(got_n, n);
        for (size_t i = 0; i < 2 * pairs; i++)
                assert_memory_equal(got + 2 * i, i < pairs ? "\xcc\xa3" : "\xcc\x81", 2);
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(nfc_known_texts_are_composed),
                cmocka_unit_test(nfc_random_texts_match_utf8proc),
                cmocka_unit_test(nfc_a_long_run_of_marks_is_put_in_order),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
