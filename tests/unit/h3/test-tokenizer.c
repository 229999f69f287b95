/* SPDX-License-Identifier: Apache-2.0 */
#include "service/h3/tokenizer.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <jansson.h>

#include "service/shared/cleanup.h"
#include "service/shared/utf8.h"
#include "tests/unit/h3/text-data.h"

DEFINE_CLEANUP(H3Tokenizer *, h3_tokenizer_free)

static void json_unref(json_t **j) {
        json_decref(*j);
}

static H3Tokenizer *published; /* opened once: it takes a moment */

static int open_published(void **state) {
        CLEANUP(text_files_freep) TextFiles *files = text_files_published();

        published = text_open(files);
        return 0;
}

static int close_published(void **state) {
        published = h3_tokenizer_free(published);
        return 0;
}

static size_t encode(const H3Tokenizer *t, const char *text, size_t n, int32_t **ret_ids) {
        size_t n_ids = 0;
        Fault f = {};

        if (h3_tokenizer_encode(t, text, n, ret_ids, &n_ids, &f) < 0)
                fail_msg("%s", f.text);
        return n_ids;
}

/* Ids of a text as "1 2 3". */
static void assert_ids(const H3Tokenizer *t, const char *text, const char *expected) {
        CLEANUP_FREE int32_t *ids = NULL;
        char all[1024] = "";
        size_t n = encode(t, text, strlen(text), &ids);

        for (size_t i = 0; i < n; i++)
                (void) snprintf(all + strlen(all), sizeof(all) - strlen(all), "%s%d", i > 0 ? " " : "", ids[i]);
        assert_string_equal(all, expected);
}

/* The bytes of a case's "utf8"; freed by the caller. */
static char *bytes_of(const json_t *entry, size_t *ret_n) {
        const char *hex = json_string_value(json_object_get(entry, "utf8"));
        size_t n;
        char *text;

        assert_non_null(hex);
        n = strlen(hex) / 2;
        text = malloc(n + 1);
        assert_non_null(text);
        for (size_t i = 0; i < n; i++) {
                unsigned byte;

                assert_int_equal(sscanf(hex + 2 * i, "%2x", &byte), 1);
                text[i] = (char) byte;
        }
        *ret_n = n;
        return text;
}

static void encode_published_cases_match(void **state) {
        CLEANUP(json_unref) json_t *j = text_json("text/cases.json");
        const json_t *cases = json_object_get(j, "cases"), *entry;
        size_t i, wrong = 0;

        assert_true(json_array_size(cases) >= 100);
        json_array_foreach(cases, i, entry) {
                const json_t *want = json_object_get(entry, "ids");
                CLEANUP_FREE int32_t *ids = NULL;
                CLEANUP_FREE char *text = NULL;
                size_t n, n_ids;
                bool same;

                text = bytes_of(entry, &n);
                n_ids = encode(published, text, n, &ids);
                same = n_ids == json_array_size(want);
                for (size_t k = 0; same && k < n_ids; k++)
                        same = ids[k] == json_integer_value(json_array_get(want, k));
                if (!same)
                        print_error("case %zu (%s) differs\n", i,
                                json_string_value(json_object_get(entry, "group")));
                wrong += !same;
        }
        assert_int_equal(wrong, 0);
}

static void added_published_tokens_match(void **state) {
        CLEANUP(json_unref) json_t *j = text_json("text/added_tokens.json");
        const json_t *list = json_object_get(j, "added_tokens"), *entry;
        int32_t id;
        size_t i;

        assert_true(json_array_size(list) > 0);
        json_array_foreach(list, i, entry) {
                const char *content = json_string_value(json_object_get(entry, "content"));

                assert_int_equal(h3_tokenizer_added(published, content, &id), 0);
                assert_int_equal(id, json_integer_value(json_object_get(entry, "id")));
        }
        assert_int_equal(h3_tokenizer_added(published, "<|no such token|>", &id), -ENOENT);
        assert_int_equal(h3_tokenizer_n_ids(published), json_integer_value(json_object_get(j, "vocab_size")));
}

static void decode_published_cases_come_back(void **state) {
        CLEANUP(json_unref) json_t *j = text_json("text/cases.json");
        const json_t *entry;
        size_t i, equal = 0;

        json_array_foreach(json_object_get(j, "cases"), i, entry) {
                CLEANUP_FREE int32_t *ids = NULL, *again = NULL;
                CLEANUP_FREE char *text = NULL, *back = NULL;
                size_t n, n_ids, n_back;
                bool ascii = true;
                Fault f = {};

                text = bytes_of(entry, &n);
                n_ids = encode(published, text, n, &ids);
                assert_int_equal(h3_tokenizer_decode(published, ids, n_ids, &back, &n_back, &f), 0);
                assert_int_equal(back[n_back], '\0');
                assert_int_equal(encode(published, back, n_back, &again), n_ids);
                assert_memory_equal(again, ids, n_ids * sizeof(*ids));
                for (size_t k = 0; k < n; k++)
                        ascii = ascii && (uint8_t) text[k] < 0x80;
                if (n == n_back && memcmp(text, back, n) == 0)
                        equal++;
                else
                        assert_false(ascii);
        }
        assert_true(equal > 100);
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(encode_published_cases_match),
                cmocka_unit_test(added_published_tokens_match),
                cmocka_unit_test(decode_published_cases_come_back),
        };

        return cmocka_run_group_tests(tests, open_published, close_published);
}
