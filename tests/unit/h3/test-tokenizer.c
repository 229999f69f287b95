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

#include "service/h3/tokenizer-private.h"
#include "service/shared/cleanup.h"
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
                (void) snprintf(
                        all + strlen(all), sizeof(all) - strlen(all), "%s%d", i > 0 ? " " : "", ids[i]);
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
        assert_int_equal(
                h3_tokenizer_n_ids(published), json_integer_value(json_object_get(j, "vocab_size")));
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

static void decode_unknown_id_is_refused(void **state) {
        const int32_t bad[] = {-1, 151676, INT32_MAX};

        for (size_t i = 0; i < ELEMENTSOF(bad); i++) {
                const int32_t ids[] = {9707, bad[i]};
                char *text = NULL, number[32];
                size_t n = 7;
                Fault f = {};

                assert_int_equal(h3_tokenizer_decode(published, ids, 2, &text, &n, &f), -EINVAL);
                assert_string_equal(f.name, FAULT_INVALID_ARGUMENT);
                (void) snprintf(number, sizeof(number), "Token 1 is %d,", bad[i]);
                assert_non_null(strstr(f.text, number));
                assert_true(!text && n == 7);
                assert_null(h3_tokenizer_token(published, bad[i], &n));
        }
}

static void encode_empty_text_has_no_ids(void **state) {
        CLEANUP_FREE int32_t *ids = NULL;

        assert_int_equal(encode(published, "", 0, &ids), 0);
        free(ids);
        ids = NULL;
        assert_int_equal(encode(published, NULL, 0, &ids), 0);
}

static void encode_nul_is_a_character(void **state) {
        CLEANUP_FREE int32_t *ids = NULL;
        CLEANUP_FREE char *back = NULL;
        const char text[] = "one\0two\0";
        size_t n, n_back;
        Fault f = {};

        n = encode(published, text, 8, &ids);
        assert_int_equal(n, 4); /* one, NUL, two, NUL */
        assert_int_equal(h3_tokenizer_decode(published, ids, n, &back, &n_back, &f), 0);
        assert_int_equal(n_back, 8);
        assert_memory_equal(back, text, 8);
}

static void encode_bad_utf8_is_refused_with_its_place(void **state) {
        const struct {
                const char *text;
                size_t n, at;
        } bad[] = {{"\xff", 1, 0}, {"abc\x80", 4, 3}, {"\xc3\xa9\xc3", 3, 2}, {"a\xc0\x80", 3, 1},
                {"<|im_start|>\xed\xa0\x80", 15, 12}, {"\xf4\x90\x80\x80", 4, 0}, {"ok\n\xe4\xb8", 5, 3}};

        for (size_t i = 0; i < ELEMENTSOF(bad); i++) {
                int32_t *ids = NULL;
                char place[32];
                size_t n = 5;
                Fault f = {};

                assert_int_equal(
                        h3_tokenizer_encode(published, bad[i].text, bad[i].n, &ids, &n, &f), -EINVAL);
                assert_string_equal(f.name, FAULT_INVALID_ARGUMENT);
                (void) snprintf(place, sizeof(place), "byte %zu (", bad[i].at);
                assert_non_null(strstr(f.text, place));
                assert_true(!ids && n == 5);
        }
}

static void encode_text_too_long_is_refused(void **state) {
        CLEANUP_FREE char *text = malloc(H3_TOKENIZER_TEXT_MAX + 1);
        int32_t *ids = NULL;
        Fault f = {};
        size_t n;

        assert_non_null(text);
        memset(text, 'a', H3_TOKENIZER_TEXT_MAX + 1);
        assert_int_equal(
                h3_tokenizer_encode(published, text, H3_TOKENIZER_TEXT_MAX + 1, &ids, &n, &f), -EINVAL);
        assert_non_null(strstr(f.text, "4194305 bytes"));
}

/* A quarter of a million of one letter, each merge making new ones: all of them go, in their order. */
static void encode_one_letter_again_and_again_is_merged(void **state) {
        const size_t n = 250000;
        CLEANUP_FREE char *text = malloc(n);
        CLEANUP_FREE int32_t *ids = NULL;
        size_t n_ids;

        assert_non_null(text);
        memset(text, 'a', n);
        n_ids = encode(published, text, n, &ids);
        assert_int_equal(n_ids, n / 8); /* "aaaaaaaa" is a token, nothing longer */
        for (size_t i = 1; i < n_ids; i++)
                assert_int_equal(ids[i], ids[0]);
}

/* The longest of those that begin at a place, the first place first; what looks like one is text. */
static void encode_added_tokens_longest_first(void **state) {
        CLEANUP(text_files_freep) TextFiles *files = text_files_demo();
        CLEANUP(h3_tokenizer_freep) H3Tokenizer *t = NULL;

        text_files_set(files, "added_tokens.json",
                strdup("{\"@a\": 900, \"@ab\": 901, \"@abcd\": 902, \"b@\": 903, \"e\\u0301\": 904, \"@\": "
                       "31}"));
        t = text_open(files);
        assert_ids(t, "@ab", "901");
        assert_ids(t, "@abcd@a", "902 900");
        assert_ids(t, "@abc", "901 66");
        assert_ids(t, "@b@", "31 903");
        assert_ids(t, "@@ab@", "31 901 31");
        assert_ids(t, "e\xcc\x81", "904"); /* as it stands, before NFC */
        assert_ids(t, "@a@a", "900 900");
        assert_int_equal(h3_tokenizer_n_ids(t), 905);
}

/* The token list of the plain rule: while a pair has a merge, the one with the lowest rank, the first of
 * equals. */
static size_t merge_plainly(
        const char *word, size_t n, const char merges[][2][8], size_t n_merges, char ret[][64]) {
        for (size_t i = 0; i < n; i++)
                (void) snprintf(ret[i], 64, "%c", word[i]);
        for (size_t m = 0; m < n_merges;) {
                char both[16];
                size_t i = 0;

                while (i + 1 < n &&
                        (strcmp(ret[i], merges[m][0]) != 0 || strcmp(ret[i + 1], merges[m][1]) != 0))
                        i++;
                if (i + 1 >= n) {
                        m++;
                        continue;
                }
                (void) snprintf(both, sizeof(both), "%.7s%.7s", merges[m][0], merges[m][1]);
                memcpy(ret[i], both, sizeof(both));
                memmove(ret[i + 1], ret[i + 2], (n - i - 2) * 64);
                n--;
                m = 0;
        }
        return n;
}

/* The bytes as the demonstration model's vocabulary has them, then what the merges make. */
static TextFiles *made_files(const char merges[][2][8], size_t n_merges) {
        TextFiles *files = text_files_demo();
        const json_t *token;
        const char *key;
        json_t *all = json_loads(text_files_get(files, "vocab.json"), 0, NULL), *made = json_object();
        char lines[4096] = "#version: 0.2\n";

        json_object_foreach(all, key, token) if (json_integer_value(token) < 256)
                assert_int_equal(json_object_set(made, key, (json_t *) (uintptr_t) token), 0);
        assert_int_equal(json_object_size(made), 256);
        for (size_t i = 0; i < n_merges; i++) {
                char both[16];

                (void) snprintf(both, sizeof(both), "%.7s%.7s", merges[i][0], merges[i][1]);
                if (!json_object_get(made, both))
                        assert_int_equal(
                                json_object_set_new(made, both, json_integer((json_int_t) (256 + i))), 0);
                (void) snprintf(lines + strlen(lines), sizeof(lines) - strlen(lines), "%s %s\n",
                        merges[i][0], merges[i][1]);
        }
        text_files_set(files, "tokenizer.json", NULL);
        text_files_set(files, "tokenizer_config.json", NULL);
        text_files_set(files, "vocab.json", json_dumps(made, 0));
        text_files_set(files, "merges.txt", strdup(lines));
        json_decref(all);
        json_decref(made);
        return files;
}

static void encode_random_words_follow_the_plain_rule(void **state) {
        /* abc comes of two merges; one merge is of its own result; some never come first. */
        static const char merges[][2][8] = {{"b", "c"}, {"a", "a"}, {"a", "bc"}, {"c", "c"}, {"aa", "aa"},
                {"a", "b"}, {"ab", "c"}, {"cc", "a"}, {"abc", "abc"}, {"aa", "b"}, {"c", "ab"}, {"b", "b"},
                {"bb", "cc"}};
        CLEANUP(text_files_freep) TextFiles *files = made_files(merges, ELEMENTSOF(merges));
        CLEANUP(h3_tokenizer_freep) H3Tokenizer *t = text_open(files);
        uint32_t seed = 9;

        for (int round = 0; round < 2000; round++) {
                CLEANUP_FREE int32_t *ids = NULL;
                char word[64], want[64][64];
                size_t n = 1 + (size_t) round % 60, n_want;

                for (size_t i = 0; i < n; i++) {
                        seed = seed * 1664525u + 1013904223u;
                        word[i] = (char) ('a' + (seed >> 20) % 3);
                }
                n_want = merge_plainly(word, n, merges, ELEMENTSOF(merges), want);
                assert_int_equal(encode(t, word, n, &ids), n_want);
                for (size_t i = 0; i < n_want; i++) {
                        size_t len;
                        const char *token = h3_tokenizer_token(t, ids[i], &len);

                        assert_int_equal(len, strlen(want[i]));
                        assert_memory_equal(token, want[i], len);
                }
        }
}

/* Words that ASCII alone decides, against PCRE2 with the pattern as published (its own \s is right in
 * ASCII). */
static void split_ascii_equals_the_pattern(void **state) {
        static const char letters[] = "aZ0 \t\n\r\v\f'sStre.-(\\_\x01\x7f";
        CLEANUP(json_unref) json_t *j = text_json("text/added_tokens.json");
        const char *published_pattern = json_string_value(json_object_get(j, "pre_tokenizer_regex"));
        pcre2_match_data *match;
        pcre2_code *code;
        uint32_t seed = 11;
        PCRE2_SIZE offset;
        int error;

        assert_string_equal(published_pattern, tokenizer_word_pattern);
        code = pcre2_compile((PCRE2_SPTR) published_pattern, PCRE2_ZERO_TERMINATED,
                PCRE2_UTF | PCRE2_UCP | PCRE2_ANCHORED, &error, &offset, NULL);
        assert_non_null(code);
        match = pcre2_match_data_create(1, NULL);
        for (int round = 0; round < 200000; round++) {
                size_t n = 1 + (size_t) round % 9, len;
                char text[16] = "";

                for (size_t i = 0; i < n; i++) {
                        seed = seed * 1664525u + 1013904223u;
                        text[i] = letters[(seed >> 16) % (sizeof(letters) - 1)];
                }
                assert_int_equal(pcre2_match(code, (PCRE2_SPTR) text, n, 0, 0, match, NULL), 1);
                len = split_plain(text, n);
                if (len == 0)
                        assert_int_equal(text[0], '\'');
                else
                        assert_int_equal(len, pcre2_get_ovector_pointer(match)[1]);
        }
        pcre2_match_data_free(match);
        pcre2_code_free(code);
}

/* What stands behind the ASCII may be part of its word: then the pattern says. */
static void split_beside_other_characters_takes_the_pattern(void **state) {
        assert_ids(published, " caf\xc3\xa9", "51950");
        assert_int_equal(split_plain("caf\xc3\xa9", 5), 0);
        assert_int_equal(split_plain(".\xc3\xa9", 3), 0);
        assert_int_equal(split_plain("..\xc2\xa0", 4), 0);
        assert_int_equal(split_plain(" \xe3\x80\x80", 4), 0);
        assert_int_equal(split_plain("  \xe3\x80\x80", 5), 0);
        assert_int_equal(split_plain("\xc3\xa9", 2), 0);
}

/* U+180E is no white space, though PCRE2's \s takes it; U+3000 and U+0085 are. */
static void split_white_space_is_unicodes(void **state) {
        CLEANUP(split_done) Splitter s = {};
        pcre2_code *code = NULL;
        size_t len, offset;
        int error;

        assert_int_equal(split_compile(&code, &error, &offset), 0);
        assert_int_equal(split_init(&s, code), 0);
        assert_int_equal(split_next(&s, "\xe1\xa0\x8e\n", 4, 0, &len), 0);
        assert_int_equal(len, 4); /* as a sign, with the line break behind it */
        assert_int_equal(split_next(&s, "\xe1\xa0\x8e.x", 5, 0, &len), 0);
        assert_int_equal(len, 4);
        assert_int_equal(split_next(&s, "\xe3\x80\x80\xc2\x85.", 6, 0, &len), 0);
        assert_int_equal(len, 3); /* all white space but the last */
        pcre2_code_free(code);
}

/* tokenizer.json alone, with the lists, and the lists alone give one tokenizer. */
static void open_any_files_give_the_same(void **state) {
        static const char text[] =
                "A red ball rolls <|im_start|>\xe9\x9b\xaa over 1024 the grass, it's e\xcc\x81 <d>";
        CLEANUP(text_files_freep) TextFiles *files = text_files_demo();
        CLEANUP(h3_tokenizer_freep) H3Tokenizer *both = text_open(files), *whole = NULL, *lists = NULL;
        CLEANUP_FREE int32_t *a = NULL, *b = NULL, *c = NULL;
        CLEANUP_FREE char *vocab = NULL, *merges = NULL;
        size_t n;

        vocab = strdup(text_files_get(files, "vocab.json"));
        merges = strdup(text_files_get(files, "merges.txt"));
        text_files_set(files, "vocab.json", NULL);
        text_files_set(files, "merges.txt", NULL);
        whole = text_open(files);
        text_files_set(files, "tokenizer.json", NULL);
        text_files_set(files, "vocab.json", STEAL_PTR(vocab));
        text_files_set(files, "merges.txt", STEAL_PTR(merges));
        lists = text_open(files);

        n = encode(both, text, strlen(text), &a);
        assert_int_equal(encode(whole, text, strlen(text), &b), n);
        assert_int_equal(encode(lists, text, strlen(text), &c), n);
        assert_memory_equal(a, b, n * sizeof(*a));
        assert_memory_equal(a, c, n * sizeof(*a));
        assert_int_equal(h3_tokenizer_n_ids(both), h3_tokenizer_n_ids(whole));
        assert_int_equal(h3_tokenizer_n_ids(both), h3_tokenizer_n_ids(lists));
}

/* A copy with the first `old` replaced; it must be there. */
static char *replaced(const char *text, const char *old, const char *new) {
        const char *where = strstr(text, old);
        char *copy;

        if (!where)
                fail_msg("no '%s'", old);
        copy = malloc(strlen(text) + strlen(new) + 1);
        assert_non_null(copy);
        (void) memcpy(copy, text, (size_t) (where - text));
        (void) strcpy(copy + (where - text), new);
        (void) strcat(copy, where + strlen(old));
        return copy;
}

static void assert_open_fails(const TextFiles *files, int error, const char *name, const char *why) {
        H3Tokenizer *t = NULL;
        Fault f = {};
        int r;

        r = h3_tokenizer_open(files->files, files->n, &t, &f);
        if (r != error)
                fail_msg("%d, expected %d (%s): %s", r, error, why, f.text);
        assert_null(t);
        assert_string_equal(f.name, name);
        if (!strstr(f.text, why))
                fail_msg("'%s' does not say '%s'", f.text, why);
}

typedef struct Change {
        const char *file, *old, *new;
        int error;
        const char *name, *why;
} Change;

/* The demonstration model's files with one thing changed; whole: tokenizer.json alone, else the lists. */
static void assert_changes_fail(const Change *changes, size_t n, bool whole) {
        for (size_t i = 0; i < n; i++) {
                CLEANUP(text_files_freep) TextFiles *files = text_files_demo();

                if (whole) {
                        text_files_set(files, "vocab.json", NULL);
                        text_files_set(files, "merges.txt", NULL);
                } else
                        text_files_set(files, "tokenizer.json", NULL);
                text_files_set(files, changes[i].file,
                        changes[i].old ? replaced(text_files_get(files, changes[i].file), changes[i].old,
                                                 changes[i].new)
                                       : strdup(changes[i].new));
                assert_open_fails(files, changes[i].error, changes[i].name, changes[i].why);
        }
}

static void open_hostile_lists_are_refused(void **state) {
        static const Change changes[] = {
                {"vocab.json", "\"!\":0", "\"!\": 1000000000", -EBADMSG, FAULT_INVALID_FILE,
                        "ids are below 1048576"},
                {"vocab.json", "\"!\":0", "\"!\": 1", -EBADMSG, FAULT_INVALID_FILE,
                        "two tokens have the id 1"},
                {"vocab.json", "\"!\":0", "\"!\": -1", -EBADMSG, FAULT_INVALID_FILE,
                        "'vocab.json': malformed at byte"},
                {"vocab.json", "\"!\":0", "\"!!!!!\": 0", -EBADMSG, FAULT_INVALID_FILE,
                        "no token for the byte 0x21 ('!')"},
                {"vocab.json", "\"!\":0", "\"!\": 0, \"!\": 5000", -EBADMSG, FAULT_INVALID_FILE,
                        "the ids 0 and 5000 have the same token"},
                {"vocab.json", "\"!\":0", "\"! !\": 0", -EBADMSG, FAULT_INVALID_FILE, "stands for no byte"},
                {"vocab.json", "\"!\":0", "\"\": 0", -EBADMSG, FAULT_INVALID_FILE,
                        "stands for no byte, or none"},
                {"vocab.json", "\"!\":0", "\"\\u4e00\": 0", -EBADMSG, FAULT_INVALID_FILE,
                        "stands for no byte"},
                {"vocab.json", "\"!\":0", "\"!\": [0]", -EBADMSG, FAULT_INVALID_FILE, "nested too deeply"},
                {"vocab.json", NULL, "", -EBADMSG, FAULT_INVALID_FILE, "'vocab.json': malformed at byte 0"},
                {"vocab.json", NULL, "[]", -EBADMSG, FAULT_INVALID_FILE, "malformed at byte 0"},
                {"vocab.json", NULL, "{} {}", -EBADMSG, FAULT_INVALID_FILE, "no token for the byte 0x00"},
                {"merges.txt", "n d", "n d d", -EBADMSG, FAULT_INVALID_FILE, "merge 5 is not two tokens"},
                {"merges.txt", "n d", "nd", -EBADMSG, FAULT_INVALID_FILE, "merge 5 is not two tokens"},
                {"merges.txt", "n d", "n ", -EBADMSG, FAULT_INVALID_FILE,
                        "merge 5 has a character that stands for no byte, or an empty part"},
                {"merges.txt", "n d", "n \t", -EBADMSG, FAULT_INVALID_FILE, "merge 5 has a character"},
                {"merges.txt", "n d", "n \xff", -EBADMSG, FAULT_INVALID_FILE, "merge 5 has a character"},
                {"merges.txt", "n d", "n zzzz", -EBADMSG, FAULT_INVALID_FILE,
                        "merge 5: its right part is not"},
                {"merges.txt", "n d", "zzzz n", -EBADMSG, FAULT_INVALID_FILE,
                        "merge 5: its left part is not"},
                {"merges.txt", "n d", "q z", -EBADMSG, FAULT_INVALID_FILE,
                        "'merges.txt': merge 5: what it makes is not"},
                {"merges.txt", "n d", "n d\nn d", -EBADMSG, FAULT_INVALID_FILE,
                        "the merges 5 and 6 are of the same pair"},
                {"tokenizer_config.json", "\"792\"", "\"1000000000\"", -EBADMSG, FAULT_INVALID_FILE,
                        "ids are below 1048576"},
                {"tokenizer_config.json", "\"792\"", "\"7 9\"", -EBADMSG, FAULT_INVALID_FILE,
                        "'7 9' is no token id"},
                {"tokenizer_config.json", "\"792\"", "\"-1\"", -EBADMSG, FAULT_INVALID_FILE,
                        "'-1' is no token id"},
                {"tokenizer_config.json", "\"792\"", "\"5\"", -EINVAL, FAULT_INVALID_MODEL,
                        "has the id 5, which another token has"},
                {"tokenizer_config.json", "\"content\": \"<|endoftext|>\"", "\"content\": \"\"", -EBADMSG,
                        FAULT_INVALID_FILE, "has 0 bytes"},
                {"tokenizer_config.json", "\"content\": \"<|endoftext|>\"", "\"content\": 7", -EBADMSG,
                        FAULT_INVALID_FILE, "no 'content'"},
                {"tokenizer_config.json", "\"content\": \"<|im_end|>\"", "\"content\": \"<|im_start|>\"",
                        -EINVAL, FAULT_INVALID_MODEL, "elsewhere"},
                {"tokenizer_config.json", "\"normalized\": false", "\"normalized\": true", -EOPNOTSUPP,
                        FAULT_NOT_SUPPORTED, "has normalized"},
                {"tokenizer_config.json", "\"lstrip\": false", "\"lstrip\": true", -EOPNOTSUPP,
                        FAULT_NOT_SUPPORTED, "has lstrip"},
                {"tokenizer_config.json", "Qwen2Tokenizer", "LlamaTokenizer", -EOPNOTSUPP,
                        FAULT_NOT_SUPPORTED, "LlamaTokenizer"},
                {"tokenizer_config.json", "\"add_prefix_space\": false", "\"add_prefix_space\": true",
                        -EOPNOTSUPP, FAULT_NOT_SUPPORTED, "add_prefix_space"},
                {"tokenizer_config.json", NULL, "[1]", -EBADMSG, FAULT_INVALID_FILE, "not an object"},
                {"tokenizer_config.json", NULL, "{\"added_tokens_decoder\": []}", -EBADMSG,
                        FAULT_INVALID_FILE, "is not an object"},
                {"tokenizer_config.json", NULL, "{\"a\": 1, \"a\": 2}", -EBADMSG, FAULT_INVALID_FILE,
                        "'tokenizer_config.json': malformed"},
                {"added_tokens.json", NULL, "{\"<x>\": \"1\"}", -EBADMSG, FAULT_INVALID_FILE,
                        "'added_tokens.json': '<x>' has no id"},
                {"added_tokens.json", NULL, "{\"<|im_end|>\": 5000}", -EINVAL, FAULT_INVALID_MODEL,
                        "here and 5000 elsewhere"},
        };

        assert_changes_fail(changes, ELEMENTSOF(changes), false);
}

static void open_hostile_tokenizer_json_is_refused(void **state) {
        static const Change changes[] = {
                {"tokenizer.json", "\"NFC\"", "\"NFKC\"", -EOPNOTSUPP, FAULT_NOT_SUPPORTED,
                        "the normaliser is NFKC; only NFC"},
                {"tokenizer.json", "\\\\p{N}|", "\\\\p{N}{1,3}|", -EOPNOTSUPP, FAULT_NOT_SUPPORTED,
                        "\\p{N}{1,3}|"},
                {"tokenizer.json", "\"Isolated\"", "\"Removed\"", -EOPNOTSUPP, FAULT_NOT_SUPPORTED,
                        "Isolated"},
                {"tokenizer.json", "\"use_regex\": false", "\"use_regex\": true", -EOPNOTSUPP,
                        FAULT_NOT_SUPPORTED, "use_regex"},
                {"tokenizer.json", "\"pre_tokenizer\"", "\"x\"", -EOPNOTSUPP, FAULT_NOT_SUPPORTED,
                        "not there"},
                {"tokenizer.json", "\"normalizer\"", "\"x\"", -EOPNOTSUPP, FAULT_NOT_SUPPORTED, "not there"},
                {"tokenizer.json", "\"post_processor\": null",
                        "\"post_processor\": {\"type\": \"TemplateProcessing\"}", -EOPNOTSUPP,
                        FAULT_NOT_SUPPORTED, "TemplateProcessing"},
                {"tokenizer.json", "\"type\": \"BPE\"", "\"type\": \"Unigram\"", -EOPNOTSUPP,
                        FAULT_NOT_SUPPORTED, "the model's type is \"Unigram\""},
                {"tokenizer.json", "\"ignore_merges\": false", "\"ignore_merges\": true", -EOPNOTSUPP,
                        FAULT_NOT_SUPPORTED, "ignore_merges"},
                {"tokenizer.json", "\"dropout\": null", "\"dropout\": 0.1", -EOPNOTSUPP, FAULT_NOT_SUPPORTED,
                        "dropout is 0.1"},
                {"tokenizer.json", "\"vocab\"", "\"x\"", -EBADMSG, FAULT_INVALID_FILE, "'vocab' is missing"},
                {"tokenizer.json", "\"merges\"", "\"x\"", -EBADMSG, FAULT_INVALID_FILE,
                        "'merges' is missing"},
                {"tokenizer.json", "\"model\"", "\"x\"", -EBADMSG, FAULT_INVALID_FILE, "'model' is missing"},
                {"tokenizer.json", "\"truncation\"", "\"model\": {}, \"truncation\"", -EBADMSG,
                        FAULT_INVALID_FILE, "'model' stands there twice"},
                {"tokenizer.json", "\"id\": 792", "\"id\": -2", -EBADMSG, FAULT_INVALID_FILE, "no 'id'"},
                {"tokenizer.json", "\"single_word\": false", "\"single_word\": true", -EOPNOTSUPP,
                        FAULT_NOT_SUPPORTED, "single_word"},
                {"tokenizer.json", "\"id\": 792", "\"id\": 3", -EINVAL, FAULT_INVALID_MODEL,
                        "another token has"},
                {"tokenizer.json", NULL, "{\"model\": [[[[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]]]}", -EBADMSG,
                        FAULT_INVALID_FILE, "nested too deeply"},
                {"tokenizer.json", NULL, "{\"model\": {}", -EBADMSG, FAULT_INVALID_FILE,
                        "'tokenizer.json': malformed"},
                {"tokenizer_config.json", "\"792\"", "\"9000\"", -EINVAL, FAULT_INVALID_MODEL,
                        "has the id 9000 here and 792 elsewhere"},
        };

        assert_changes_fail(changes, ELEMENTSOF(changes), true);
}

/* Both forms of a merge are read. */
static void open_merges_as_strings_are_taken(void **state) {
        CLEANUP(text_files_freep) TextFiles *files = text_files_demo();
        json_t *j = json_loads(text_files_get(files, "tokenizer.json"), 0, NULL), *merges, *pair;
        H3Tokenizer *t;
        size_t i;

        merges = json_object_get(json_object_get(j, "model"), "merges");
        json_array_foreach(merges, i, pair) {
                char both[512];

                (void) snprintf(both, sizeof(both), "%.200s %.200s",
                        json_string_value(json_array_get(pair, 0)),
                        json_string_value(json_array_get(pair, 1)));
                assert_int_equal(json_array_set_new(merges, i, json_string(both)), 0);
        }
        text_files_set(files, "tokenizer.json", json_dumps(j, 0));
        t = text_open(files); /* and agrees with merges.txt */
        (void) h3_tokenizer_free(t);

        pair = json_pack("[sss]", "n", "d", "x");
        assert_int_equal(json_array_set_new(merges, 4, pair), 0);
        text_files_set(files, "tokenizer.json", json_dumps(j, 0));
        assert_open_fails(files, -EBADMSG, FAULT_INVALID_FILE, "merge 5 has over two tokens");
        assert_int_equal(json_array_set_new(merges, 4, json_pack("[s]", "n")), 0);
        text_files_set(files, "tokenizer.json", json_dumps(j, 0));
        assert_open_fails(files, -EBADMSG, FAULT_INVALID_FILE, "merge 5 has under two tokens");
        json_decref(j);
}

static void open_files_that_disagree_are_refused(void **state) {
        CLEANUP(text_files_freep) TextFiles *files = text_files_demo();
        CLEANUP_FREE char *merges = strdup(text_files_get(files, "merges.txt"));

        text_files_set(files, "merges.txt", replaced(merges, "n d\ni n\n", "i n\nn d\n"));
        assert_open_fails(files, -EINVAL, FAULT_INVALID_MODEL, "merges.txt about merge 5 disagree");
        text_files_set(files, "merges.txt", replaced(merges, "\xc4\xa0 a\n", ""));
        assert_open_fails(files, -EINVAL, FAULT_INVALID_MODEL, "merges.txt about merge 1 disagree");
        text_files_set(files, "merges.txt", STEAL_PTR(merges));
        text_files_set(files, "vocab.json",
                replaced(text_files_get(files, "vocab.json"), "{", "{\"zzzz\": 4000, "));
        assert_open_fails(
                files, -EINVAL, FAULT_INVALID_MODEL, "vocab.json about the token with id 4000 disagree");
}

static void open_without_files_names_them(void **state) {
        CLEANUP(text_files_freep) TextFiles *files = text_files_demo();

        text_files_set(files, "tokenizer.json", NULL);
        text_files_set(files, "merges.txt", NULL);
        assert_open_fails(files, -EINVAL, FAULT_INVALID_MODEL, "no merges.txt");
        text_files_set(files, "vocab.json", NULL);
        assert_open_fails(files, -EINVAL, FAULT_INVALID_MODEL, "no files");
}

/* Special tokens that only a list names get the next ids in its order; those of the vocabulary keep theirs.
 */
static void open_tokens_without_ids_get_the_next(void **state) {
        CLEANUP(text_files_freep) TextFiles *files = text_files_demo();
        CLEANUP(h3_tokenizer_freep) H3Tokenizer *t = NULL;
        int32_t id;

        text_files_set(files, "tokenizer.json", NULL);
        text_files_set(files, "tokenizer_config.json",
                strdup("{\"added_tokens_decoder\": {\"800\": {\"content\": \"<b>\"}}, \"eos_token\": "
                       "\"<e>\", "
                       "\"pad_token\": {\"content\": \"<p>\", \"lstrip\": false}, \"unk_token\": null, "
                       "\"additional_special_tokens\": [\"<x>\", \"<b>\", \"!\", \"<y>\"]}"));
        t = text_open(files);
        assert_int_equal(h3_tokenizer_added(t, "<b>", &id), 0);
        assert_int_equal(id, 800);
        assert_int_equal(h3_tokenizer_added(t, "<e>", &id), 0);
        assert_int_equal(id, 801);
        assert_int_equal(h3_tokenizer_added(t, "<p>", &id), 0);
        assert_int_equal(id, 802);
        assert_int_equal(h3_tokenizer_added(t, "<x>", &id), 0);
        assert_int_equal(id, 803);
        assert_int_equal(h3_tokenizer_added(t, "!", &id), 0);
        assert_int_equal(id, 0);
        assert_int_equal(h3_tokenizer_added(t, "<y>", &id), 0);
        assert_int_equal(id, 804);
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(encode_published_cases_match),
                cmocka_unit_test(added_published_tokens_match),
                cmocka_unit_test(decode_published_cases_come_back),
                cmocka_unit_test(decode_unknown_id_is_refused),
                cmocka_unit_test(encode_empty_text_has_no_ids),
                cmocka_unit_test(encode_nul_is_a_character),
                cmocka_unit_test(encode_bad_utf8_is_refused_with_its_place),
                cmocka_unit_test(encode_text_too_long_is_refused),
                cmocka_unit_test(encode_one_letter_again_and_again_is_merged),
                cmocka_unit_test(encode_added_tokens_longest_first),
                cmocka_unit_test(encode_random_words_follow_the_plain_rule),
                cmocka_unit_test(split_ascii_equals_the_pattern),
                cmocka_unit_test(split_beside_other_characters_takes_the_pattern),
                cmocka_unit_test(split_white_space_is_unicodes),
                cmocka_unit_test(open_any_files_give_the_same),
                cmocka_unit_test(open_hostile_lists_are_refused),
                cmocka_unit_test(open_hostile_tokenizer_json_is_refused),
                cmocka_unit_test(open_merges_as_strings_are_taken),
                cmocka_unit_test(open_files_that_disagree_are_refused),
                cmocka_unit_test(open_without_files_names_them),
                cmocka_unit_test(open_tokens_without_ids_get_the_next),
        };

        return cmocka_run_group_tests(tests, open_published, close_published);
}
