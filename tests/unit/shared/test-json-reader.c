/* SPDX-License-Identifier: Apache-2.0 */
#include "service/shared/json-reader.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "service/shared/cleanup.h"
#include "tests/unit/shared/cmocka-all.h"

/* A copy of exact size: a read behind its end is seen by the address sanitizer. */
static JsonReader reader_new(const char *text, size_t n) {
        char *copy = malloc(n > 0 ? n : 1);

        assert_non_null(copy);
        memcpy(copy, text, n);
        return (JsonReader){.text = copy, .n = n};
}

static void reader_done(JsonReader *j) {
        free((char *) j->text);
}

static void json_check_depth_counts_outside_strings(void **state) {
        static const struct {
                const char *text;
                int r;
        } cases[] = {
                {"{\"a\":[[1]]}", 0},
                {"{\"a\":[[[1]]]}", -EBADMSG},
                {"[\"[[[[[[\"]", 0},
                {"[\"\\\"[[[[[[\"]", 0},
                {"[\"\\\\\",[[[1]]]]", -EBADMSG},
                {"[[],[],[],[],[]]", 0},
        };

        for (size_t i = 0; i < ELEMENTSOF(cases); i++) {
                JsonReader j = reader_new(cases[i].text, strlen(cases[i].text));

                assert_int_equal(reader_check(&j, 3), cases[i].r);
                assert_int_equal(j.rule != NULL, cases[i].r < 0);
                reader_done(&j);
        }
}

static void json_check_bad_utf8_refused_with_place(void **state) {
        JsonReader j = reader_new("{\"ab\xc3\x28\":1}", 9);

        assert_int_equal(reader_check(&j, 3), -EBADMSG);
        assert_int_equal(j.at, 4);
        reader_done(&j);
}

static void json_string_escapes_resolved(void **state) {
        static const struct {
                const char *text, *value;
        } cases[] = {
                {"\"\"", ""},
                {"\"abc\"", "abc"},
                {"\"\\\"\\\\\\/\\b\\f\\n\\r\\t\"", "\"\\/\b\f\n\r\t"},
                {"\"\\u0041\\u00e9\\u20AC\"", "A\xc3\xa9\xe2\x82\xac"},
                {"\"\\ud83d\\uDE00\"", "\xf0\x9f\x98\x80"},
                {" \n\t\"x\"", "x"},
        };

        for (size_t i = 0; i < ELEMENTSOF(cases); i++) {
                JsonReader j = reader_new(cases[i].text, strlen(cases[i].text));
                char out[32];
                size_t n;

                assert_int_equal(reader_string(&j, out, &n), 0);
                assert_string_equal(out, cases[i].value);
                assert_int_equal(n, strlen(cases[i].value));
                assert_int_equal(j.at, j.n);
                reader_done(&j);
        }
}

static void json_string_malformed_refused(void **state) {
        static const char *const cases[] = {
                "",
                "x",
                "\"",
                "\"abc",
                "\"\\",
                "\"\\\"",
                "\"\\x\"",
                "\"\\u12\"",
                "\"\\u12",
                "\"\\u12g4\"",
                "\"\\u0000\"",
                "\"\\ud800\"",
                "\"\\ud800x\"",
                "\"\\ud800\\n\"",
                "\"\\ud800\\u0041\"",
                "\"\\udc00\"",
                "\"a\nb\"",
                "\"a\x01\"",
                "\"\\ud800\\u",
        };

        for (size_t i = 0; i < ELEMENTSOF(cases); i++) {
                JsonReader j = reader_new(cases[i], strlen(cases[i]));
                char out[32];
                size_t n = 77;

                assert_int_equal(reader_string(&j, out, &n), -EBADMSG);
                assert_non_null(j.rule);
                assert_int_equal(n, 77);
                reader_done(&j);
        }
}

static void json_integer_limits_kept(void **state) {
        static const struct {
                const char *text;
                int r;
                uint64_t value;
        } cases[] = {
                {"0", 0, 0},
                {" 42]", 0, 42},
                {"9223372036854775807", 0, INT64_MAX},
                {"9223372036854775808", -EBADMSG, 0},
                {"18446744073709551615", -EBADMSG, 0},
                {"18446744073709551616", -EBADMSG, 0},
                {"99999999999999999999999", -EBADMSG, 0},
                {"-1", -EBADMSG, 0},
                {"-0", -EBADMSG, 0},
                {"+1", -EBADMSG, 0},
                {"1.0", -EBADMSG, 0},
                {"1e3", -EBADMSG, 0},
                {"1E3", -EBADMSG, 0},
                {"01", -EBADMSG, 0},
                {"\"1\"", -EBADMSG, 0},
                {"null", -EBADMSG, 0},
                {"", -EBADMSG, 0},
        };

        for (size_t i = 0; i < ELEMENTSOF(cases); i++) {
                JsonReader j = reader_new(cases[i].text, strlen(cases[i].text));
                uint64_t v = 77;

                assert_int_equal(reader_integer(&j, &v), cases[i].r);
                assert_int_equal(v, cases[i].r < 0 ? 77 : cases[i].value);
                reader_done(&j);
        }
}

static void json_skip_values_judged_by_grammar(void **state) {
        static const char *const good[] = {
                "0",
                "-0",
                "-12.5e+3",
                "1E9",
                "true",
                "false",
                "null",
                "\"a\\n\"",
                "[]",
                "{}",
                "[1,[2,{}],\"x\"]",
                "{\"a\":{\"b\":[null]},\"c\":1}",
                " [ 1 , 2 ] ",
        };
        static const char *const bad[] = {
                "",
                "-",
                "01",
                "1.",
                ".5",
                "1e",
                "1e+",
                "tru",
                "nul",
                "True",
                "[",
                "[1",
                "[1,",
                "[1,]",
                "[,1]",
                "[1 2]",
                "{",
                "{\"a\"",
                "{\"a\":",
                "{\"a\":1,}",
                "{1:2}",
                "{\"a\" 1}",
                "{\"a\":1 \"b\":2}",
                "[1}",
                "{]",
                "\x7f",
                "'a'",
                "// x",
                "NaN",
                "Infinity",
                "[1]x",
                "1 2",
        };

        for (size_t i = 0; i < ELEMENTSOF(good) + ELEMENTSOF(bad); i++) {
                const char *text = i < ELEMENTSOF(good) ? good[i] : bad[i - ELEMENTSOF(good)];
                JsonReader j = reader_new(text, strlen(text));
                int r = reader_skip(&j);

                if (r >= 0)
                        r = reader_end(&j);
                assert_int_equal(r, i < ELEMENTSOF(good) ? 0 : -EBADMSG);
                reader_done(&j);
        }
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(json_check_depth_counts_outside_strings),
                cmocka_unit_test(json_check_bad_utf8_refused_with_place),
                cmocka_unit_test(json_string_escapes_resolved),
                cmocka_unit_test(json_string_malformed_refused),
                cmocka_unit_test(json_integer_limits_kept),
                cmocka_unit_test(json_skip_values_judged_by_grammar),
        };

        return cmocka_run_group_tests_name("json-reader", tests, NULL, NULL);
}
