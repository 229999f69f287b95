/* SPDX-License-Identifier: Apache-2.0 */
#include "service/shared/safetensors.h"

#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "service/shared/cleanup.h"
#include "tests/unit/shared/cmocka-all.h"

#define T(name, dtype, shape, offsets)                                                                      \
        "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":" offsets "}"
#define F32_1(name, offsets) T(name, "F32", "[1]", offsets)

DEFINE_CLEANUP(StHeader *, st_header_free)

/* As the loader does it: the size from the first 8 bytes, then the header. All buffers have exactly the
 * promised size. */
static int parse_file(const void *file, uint64_t n, uint64_t file_size, StHeader **ret, Fault *f) {
        CLEANUP_FREE char *start = malloc(8), *bytes = NULL;
        uint64_t size;
        int r;

        assert_non_null(start);
        memcpy(start, file, n < 8 ? n : 8);
        r = st_header_size(start, n < 8 ? n : 8, file_size, "m.safetensors", &size, f);
        if (r < 0)
                return r;

        assert_true(size <= n);
        bytes = malloc(size);
        assert_non_null(bytes);
        memcpy(bytes, file, size);
        return st_header_parse(bytes, size, file_size, "m.safetensors", ret, f);
}

static int parse_n(const char *json, size_t n, uint64_t data_size, StHeader **ret, Fault *f) {
        CLEANUP_FREE char *file = malloc(8 + n);
        uint64_t length = htole64(n);

        assert_non_null(file);
        memcpy(file, &length, 8);
        memcpy(file + 8, json, n);
        return parse_file(file, 8 + n, 8 + n + data_size, ret, f);
}

static int parse(const char *json, uint64_t data_size, StHeader **ret, Fault *f) {
        return parse_n(json, strlen(json), data_size, ret, f);
}

static void assert_text(const Fault *f, const char *part) {
        if (!strstr(f->text, part))
                fail_msg("\"%s\" is not in \"%s\"", part, f->text);
}

typedef struct Bad {
        const char *json;
        uint64_t data_size;
        const char *tensor; /* NULL: the rule is not about one */
        const char *rule;
} Bad;

static void assert_refused(const Bad *cases, size_t n) {
        for (size_t i = 0; i < n; i++) {
                StHeader *h = NULL;
                Fault f = {};
                int r;

                r = parse(cases[i].json, cases[i].data_size, &h, &f);
                if (r != -EBADMSG)
                        fail_msg("%d instead of -EBADMSG: %s", r, cases[i].json);
                assert_null(h);
                assert_string_equal(f.name, FAULT_INVALID_FILE);
                assert_text(&f, "'m.safetensors'");
                assert_text(&f, cases[i].rule);
                if (cases[i].tensor)
                        assert_text(&f, cases[i].tensor);
        }
}

#define ASSERT_REFUSED(...)                                                                                 \
        do {                                                                                                \
                static const Bad _cases[] = {__VA_ARGS__};                                                  \
                assert_refused(_cases, ELEMENTSOF(_cases));                                                 \
        } while (0)

static StHeader *accepted(const char *json, uint64_t data_size) {
        StHeader *h = NULL;
        Fault f = {};

        if (parse(json, data_size, &h, &f) < 0)
                fail_msg("%s: %s", json, f.text);
        assert_string_equal(f.name, "");
        return h;
}

static void st_header_parse_entries_read(void **state) {
        CLEANUP(st_header_freep) StHeader *h = NULL;
        const char *json = "{" T("w.b", "BF16", "[2,3]",
                "[8,20]") ",\"__metadata__\":{\"z\":\"1\",\"format\":\"pt\"}, " T("a", "F32", "[2]",
                "[0,8]") " }";
        const StTensor *t;

        h = accepted(json, 20);
        assert_int_equal(h->n_tensors, 2);
        assert_int_equal(h->data_offset, 8 + strlen(json));
        assert_string_equal(h->tensors[0].name, "a");
        assert_string_equal(h->tensors[1].name, "w.b");

        t = st_header_find(h, "w.b");
        assert_ptr_equal(t, &h->tensors[1]);
        assert_int_equal(t->type, ST_BF16);
        assert_int_equal(t->n_dims, 2);
        assert_int_equal(t->shape[0], 2);
        assert_int_equal(t->shape[1], 3);
        assert_int_equal(t->offset, h->data_offset + 8);
        assert_int_equal(t->size, 12);
        assert_null(st_header_find(h, "w"));

        assert_int_equal(h->n_meta, 2);
        assert_string_equal(h->meta[0].key, "format");
        assert_string_equal(st_header_meta(h, "z"), "1");
        assert_null(st_header_meta(h, "y"));
}

static void st_header_parse_duplicate_name_refused(void **state) {
        ASSERT_REFUSED({"{" F32_1("w", "[0,4]") "," F32_1("w", "[4,8]") "}", 8, "'w'", "duplicate name"},
                {"{" F32_1("w", "[0,4]") "," F32_1("w", "[0,4]") "}", 4, "'w'", "duplicate name"},
                {"{" F32_1("w", "[0,4]") "," F32_1("\\u0077", "[4,8]") "}", 8, "'w'", "duplicate name"},
                /* found before offsets are judged */
                {"{" F32_1("w", "[0,4]") "," F32_1("w", "[77,4]") "}", 8, "'w'", "duplicate name"},
                {"{\"__metadata__\":{},\"__metadata__\":{}}", 0, "__metadata__", "duplicate name"},
                {"{\"__metadata__\":{\"a\":\"1\",\"a\":\"1\"}}", 0, "__metadata__", "duplicate key 'a'"},
                {"{\"w\":{\"dtype\":\"F32\",\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4,
                        "'w'", "duplicate key 'dtype'"});
}

static void st_header_parse_no_tensors_accepted(void **state) {
        static const char *const cases[] = {
                "{}", "{ }", "{}   ", "{\"__metadata__\":{}}", "{\"__metadata__\":{\"a\":\"b\"}}"};

        for (size_t i = 0; i < ELEMENTSOF(cases); i++) {
                CLEANUP(st_header_freep) StHeader *h = accepted(cases[i], 0);

                assert_int_equal(h->n_tensors, 0);
                assert_null(st_header_find(h, "a"));
        }
}

static void st_header_parse_text_behind_object_refused(void **state) {
        ASSERT_REFUSED({"{}x", 0, NULL, "behind the end"}, {"{} {}", 0, NULL, "behind the end"},
                {"{\"__metadata__\":{}}}", 0, NULL, "behind the end"}, {" {}", 0, NULL, "begins with '{'"},
                {"\xef\xbb\xbf{}", 0, NULL, "begins with '{'"});
}

static void st_header_parse_metadata_not_strings_refused(void **state) {
        ASSERT_REFUSED({"{\"__metadata__\":{\"a\":1}}", 0, "__metadata__", "'a' is not a string"},
                {"{\"__metadata__\":{\"a\":null}}", 0, "__metadata__", "'a' is not a string"},
                {"{\"__metadata__\":{\"a\":{\"b\":\"c\"}}}", 0, "__metadata__", "'a' is not a string"},
                {"{\"__metadata__\":[]}", 0, "__metadata__", "reserved"},
                {"{\"__metadata__\":null}", 0, "__metadata__", "reserved"},
                {"{\"__metadata__\":\"x\"}", 0, "__metadata__", "reserved"});
}

static void st_header_parse_tensor_called_metadata_refused(void **state) {
        ASSERT_REFUSED(
                {"{" F32_1("__metadata__", "[0,4]") "}", 4, "__metadata__", "a tensor cannot have it"},
                {"{" F32_1("\\u005f_metadata__", "[0,4]") "}", 4, "__metadata__",
                        "a tensor cannot have it"});
}

static void st_header_parse_empty_tensors_accepted(void **state) {
        CLEANUP(st_header_freep) StHeader *h = NULL;

        h = accepted("{" T("a", "F32", "[0]", "[0,0]") "," T("b", "BF16", "[0,128]", "[0,0]") "," T(
                             "c", "F32", "[]", "[0,4]") "," T("d", "U8", "[1,0,3]", "[4,4]") "," T("e", "U8",
                             "[3]", "[4,7]") "," T("z", "F8_E4M3", "[0]", "[7,7]") "}",
                7);
        assert_int_equal(h->n_tensors, 6);
        assert_int_equal(st_header_find(h, "c")->n_dims, 0);
        assert_int_equal(st_header_find(h, "c")->size, 4);
        assert_int_equal(st_header_find(h, "d")->size, 0);
        assert_int_equal(st_header_find(h, "z")->offset, h->data_offset + 7);
        assert_int_equal(st_header_find(h, "z")->type, ST_F8_E4M3);
}

static void st_header_parse_wrong_span_refused(void **state) {
        ASSERT_REFUSED({"{" F32_1("w", "[0,3]") "}", 3, "'w'", "span 3 bytes, shape and dtype F32 need 4"},
                {"{" F32_1("w", "[0,5]") "}", 5, "'w'", "span 5 bytes, shape and dtype F32 need 4"},
                {"{" T("w", "F32", "[]", "[0,0]") "}", 0, "'w'", "span 0 bytes, shape and dtype F32 need 4"},
                {"{" T("w", "F32", "[0]", "[0,4]") "}", 4, "'w'",
                        "span 4 bytes, shape and dtype F32 need 0"});
}

static void st_header_parse_wrong_json_types_refused(void **state) {
        ASSERT_REFUSED({"[]", 0, NULL, "begins with '{'"}, {"12", 0, NULL, "begins with '{'"},
                {"null", 0, NULL, "begins with '{'"}, {"{\"w\":[]}", 0, "'w'", "an object"},
                {"{\"w\":null}", 0, "'w'", "an object"}, {"{\"w\":{}}", 0, "'w'", "'dtype' is missing"},
                {"{\"w\":{\"dtype\":\"F32\",\"shape\":[1]}}", 0, "'w'", "'data_offsets' is missing"},
                {"{\"w\":{\"dtype\":\"F32\",\"data_offsets\":[0,4]}}", 4, "'w'", "'shape' is missing"},
                {"{\"w\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4],\"x\":1}}", 4, "'w'",
                        "unknown key 'x'"},
                {"{\"w\":{\"dtype\":5,\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "'w'",
                        "'dtype' must be a string"},
                {"{" T("w", "F32", "\"1\"", "[0,4]") "}", 4, "'w'", "'shape' must be a list"},
                {"{" T("w", "F32", "1", "[0,4]") "}", 4, "'w'", "'shape' must be a list"},
                {"{" T("w", "F32", "null", "[0,4]") "}", 4, "'w'", "'shape' must be a list"},
                {"{" T("w", "F32", "[\"1\"]", "[0,4]") "}", 4, "'w'", "'shape' at byte"},
                {"{" T("w", "F32", "[1.0]", "[0,4]") "}", 4, "'w'", "an integer from 0"},
                {"{" T("w", "F32", "[-1]", "[0,4]") "}", 4, "'w'", "an integer from 0"},
                {"{" T("w", "F32", "[[1]]", "[0,4]") "}", 4, "'w'", "an integer from 0"},
                {"{" T("w", "F32", "[true]", "[0,4]") "}", 4, "'w'", "an integer from 0"},
                {"{" T("w", "F32", "{}", "[0,4]") "}", 4, "'w'", "'shape' must be a list"},
                {"{" F32_1("w", "4") "}", 4, "'w'", "must be a list of two"},
                {"{" F32_1("w", "[]") "}", 4, "'w'", "has 0 numbers, two expected"},
                {"{" F32_1("w", "[4]") "}", 4, "'w'", "has 1 numbers, two expected"},
                {"{" F32_1("w", "[0,4,8]") "}", 4, "'w'", "more than two numbers"},
                {"{" F32_1("w", "[-4,0]") "}", 4, "'w'", "an integer from 0"},
                {"{" F32_1("w", "[4,0]") "}", 4, "'w'", "reversed: 4, 0"},
                {"{" F32_1("w", "[0.0,4]") "}", 4, "'w'", "an integer from 0"},
                {"{" F32_1("w", "[0,4e0]") "}", 4, "'w'", "an integer from 0"},
                {"{" F32_1("w", "[9223372036854775808,9223372036854775812]") "}", 4, "'w'",
                        "to 9223372036854775807"},
                {"{" F32_1("w", "[18446744073709551616,18446744073709551620]") "}", 4, "'w'",
                        "to 9223372036854775807"},
                {"{" F32_1("w", "[0,18446744073709551620]") "}", 4, "'w'", "to 9223372036854775807"});
}

static void st_header_parse_broken_json_refused(void **state) {
        ASSERT_REFUSED({"{\"w\"", 0, NULL, "ends too early"}, {"{,}", 0, NULL, "malformed"},
                {"{" F32_1("w", "[0,4]") ",}", 4, NULL, "a comma in front of the end"},
                {"{" F32_1("w", "[0,4,]") "}", 4, NULL, "a comma in front of the end"},
                {"{" F32_1("w", "[0,4]") " " F32_1("v", "[4,8]") "}", 8, NULL, "a comma or the end"},
                {"{'w':{}}", 0, NULL, "a string expected"}, {"{\"w\" {}}", 0, NULL, "':' expected"},
                {"{\"w\":{\"dtype\":\"F32\",\"shape\":[[[[1]]]]}}", 0, NULL, "nested too deeply"},
                {"{\"a\nb\":{}}", 0, NULL, "control character"}, {"{\"a\\u0000\":{}}", 0, NULL, "NUL"},
                {"{\"a\\ud800\":{}}", 0, NULL, "surrogate"}, {"{\"a\xff\":{}}", 0, NULL, "not UTF-8"},
                {"{\"\xc0\xaf\":{}}", 0, NULL, "not UTF-8"},
                {"{\"\xed\xa0\x80\":{}}", 0, NULL, "not UTF-8"});
}

static void st_header_parse_nul_bytes_refused(void **state) {
        StHeader *h = NULL;
        Fault f = {};

        assert_int_equal(parse_n("{}\0\0", 4, 0, &h, &f), -EBADMSG);
        assert_text(&f, "behind the end");
        f = (Fault){};
        assert_int_equal(parse_n("{\"a\0b\":1}", 9, 0, &h, &f), -EBADMSG);
        assert_text(&f, "control character");
        assert_null(h);
}

static void st_header_parse_overlap_refused(void **state) {
        ASSERT_REFUSED({"{" T("a", "U8", "[8]", "[0,8]") "," T("b", "U8", "[8]", "[4,12]") "}", 12, "'b'",
                               "overlaps with tensor 'a'"},
                {"{" T("b", "U8", "[8]", "[0,8]") "," T("a", "U8", "[8]", "[0,8]") "}", 8, "'b'",
                        "overlaps with tensor 'a'"},
                {"{" T("a", "U8", "[8]", "[0,8]") "," T("b", "U8", "[2]", "[2,4]") "}", 8, "'b'",
                        "overlaps with tensor 'a'"},
                {"{" T("a", "U8", "[8]", "[0,8]") "," T("b", "U8", "[0]", "[4,4]") "}", 8, "'b'",
                        "overlaps with tensor 'a'"});
}

static void st_header_parse_hole_refused(void **state) {
        ASSERT_REFUSED({"{" T("a", "U8", "[4]", "[0,4]") "," T("b", "U8", "[4]", "[6,10]") "}", 10, "'b'",
                               "a hole of 2 bytes"},
                {"{" T("a", "U8", "[4]", "[1,5]") "}", 5, "'a'", "a hole of 1 bytes"},
                {"{" T("a", "U8", "[0]", "[9,9]") "}", 0, "'a'", "a hole of 9 bytes"});
}

static void st_header_parse_bytes_behind_last_refused(void **state) {
        ASSERT_REFUSED({"{" F32_1("w", "[0,4]") "}", 5, NULL, "1 bytes behind the last tensor"},
                {"{}", 1, NULL, "1 bytes behind the last tensor"});
}

static void st_header_parse_overflowing_shape_refused(void **state) {
        ASSERT_REFUSED(
                {"{" T("w", "U8", "[4294967296,4294967296]", "[0,0]") "}", 0, "'w'", "above 2^63 - 1"},
                {"{" T("w", "F32", "[4611686018427387904]", "[0,0]") "}", 0, "'w'", "above 2^63 - 1"},
                {"{" T("w", "F32", "[4294967296,0,4294967296]", "[0,0]") "}", 0, "'w'", "above 2^63 - 1"},
                {"{" T("w", "U8", "[9223372036854775808]", "[0,0]") "}", 0, "'w'", "to 9223372036854775807"},
                {"{" T("w", "U8", "[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1]", "[0,1]") "}", 1, "'w'",
                        "more than 16 dimensions"});
}

static void st_header_parse_65_dimensions_refused(void **state) {
        char json[400], shape[200] = "[1";
        StHeader *h = NULL;
        Fault f = {};

        for (int i = 1; i < 65; i++)
                strcat(shape, ",1");
        strcat(shape, "]");
        (void) snprintf(
                json, sizeof(json), "{\"w\":{\"dtype\":\"U8\",\"shape\":%s,\"data_offsets\":[0,1]}}", shape);
        assert_int_equal(parse(json, 1, &h, &f), -EBADMSG);
        assert_text(&f, "more than 16 dimensions");
}

static void st_header_parse_16_dimensions_accepted(void **state) {
        CLEANUP(st_header_freep)
        StHeader *h = accepted("{" T("w", "U8", "[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,3]", "[0,3]") "}", 3);

        assert_int_equal(h->tensors[0].n_dims, 16);
        assert_int_equal(h->tensors[0].shape[15], 3);
}

static void st_header_parse_huge_tensor_beyond_file_refused(void **state) {
        ASSERT_REFUSED({"{" T("w", "U8", "[9223372036854775807]", "[0,9223372036854775807]") "}", 16, "'w'",
                "truncated"});
}

static void st_header_parse_unknown_type_refused_by_name(void **state) {
        ASSERT_REFUSED({"{" T("w", "bf16", "[1]", "[0,2]") "}", 2, "'w'", "dtype 'bf16' is not supported"},
                {"{" T("w", "Q4_K", "[1]", "[0,2]") "}", 2, "'w'", "dtype 'Q4_K' is not supported"},
                {"{" T("w", "F4", "[2]", "[0,1]") "}", 1, "'w'", "dtype 'F4' is not supported"},
                {"{" T("w", "F6_E2M3", "[4]", "[0,3]") "}", 3, "'w'", "dtype 'F6_E2M3' is not supported"},
                {"{" T("w", "", "[1]", "[0,2]") "}", 2, "'w'", "dtype '' is not supported"});
}

static void st_header_parse_type_never_guessed_from_size(void **state) {
        CLEANUP(st_header_freep) StHeader *h = NULL;

        h = accepted("{" T("a", "F8_E4M3", "[4]", "[0,4]") "," T("b", "U8", "[4]", "[4,8]") "," T("c",
                             "F8_E5M2", "[4]", "[8,12]") "," T("d", "F8_E8M0", "[4]", "[12,16]") "," T("e",
                             "U16", "[2]", "[16,20]") "," T("f", "BOOL", "[4]", "[20,24]") "}",
                24);
        assert_int_equal(h->tensors[0].type, ST_F8_E4M3);
        assert_int_equal(h->tensors[1].type, ST_U8);
        assert_int_equal(h->tensors[2].type, ST_F8_E5M2);
        assert_int_equal(h->tensors[3].type, ST_F8_E8M0);
        assert_int_equal(h->tensors[4].type, ST_U16);
        assert_int_equal(h->tensors[5].type, ST_BOOL);
}

/* Lengths 8k + 1 to 8k + 7, and the BF16 values at odd places of the file. */
static void st_header_parse_misaligned_data_found(void **state) {
        static const uint16_t values[2] = {0x3f80, 0xc000};
        const char *json = "{" T("a", "U8", "[1]", "[0,1]") "," T("w", "BF16", "[2]", "[1,5]") "}";
        bool odd = false;

        for (size_t pad = 0; pad < 8; pad++) {
                CLEANUP(st_header_freep) StHeader *h = NULL;
                uint64_t n = strlen(json) + pad, length = htole64(n);
                CLEANUP_FREE char *file = malloc(8 + n + 5);
                uint16_t read[2];
                const StTensor *t;
                Fault f = {};

                assert_non_null(file);
                memcpy(file, &length, 8);
                memset(file + 8, ' ', n);
                memcpy(file + 8, json, strlen(json));
                memcpy(file + 8 + n + 1, values, sizeof(values));

                assert_int_equal(parse_file(file, 8 + n, 8 + n + 5, &h, &f), 0);
                t = st_header_find(h, "w");
                assert_int_equal(t->offset, 8 + n + 1);
                odd |= t->offset % 2 == 1;
                memcpy(read, file + t->offset, sizeof(read));
                assert_memory_equal(read, values, sizeof(values));
        }

        assert_true(odd);
}

static void st_header_parse_truncated_says_sizes(void **state) {
        const char *json = "{" T("w", "U8", "[100]", "[0,100]") "}";
        uint64_t n = strlen(json), length = htole64(n), header = 8 + n, whole = header + 100;
        const struct {
                uint64_t cut, expected;
        } cases[] = {
                {4, 8},
                {8, header},
                {9, header},
                {header - 1, header},
                {header, whole},
                {whole - 1, whole},
        };
        CLEANUP_FREE char *file = calloc(1, whole);

        assert_non_null(file);
        memcpy(file, &length, 8);
        memcpy(file + 8, json, n);

        for (size_t i = 0; i < ELEMENTSOF(cases); i++) {
                StHeader *h = NULL;
                char number[32];
                Fault f = {};

                assert_int_equal(parse_file(file, cases[i].cut, cases[i].cut, &h, &f), -EBADMSG);
                assert_null(h);
                assert_text(&f, "truncated");
                (void) snprintf(number, sizeof(number), " %" PRIu64, cases[i].expected);
                assert_text(&f, number);
                (void) snprintf(number, sizeof(number), "it has %" PRIu64 " ", cases[i].cut);
                assert_text(&f, number);
        }
}

static void st_header_parse_other_length_than_promised_refused(void **state) {
        char bytes[16] = "\4\0\0\0\0\0\0\0{}  {}  ";
        StHeader *h = NULL;
        Fault f = {};

        assert_int_equal(st_header_parse(bytes, 10, 12, "m.safetensors", &h, &f), -EBADMSG);
        assert_string_equal(f.name, FAULT_FILE_CHANGED);
        assert_null(h);
}

static void st_header_parse_hostile_name_made_printable(void **state) {
        StHeader *h = NULL;
        Fault f = {};

        assert_int_equal(parse("{" F32_1("a\\u001b[2J\\n\\u202eb", "[0,3]") "}", 3, &h, &f), -EBADMSG);
        assert_text(&f, "'a?[2J??b'");
        assert_null(strchr(f.text, '\x1b'));
}

static void st_header_parse_long_name_leaves_room_for_rule(void **state) {
        CLEANUP_FREE char *json = malloc(5000);
        StHeader *h = NULL;
        char name[4097];
        Fault f = {};

        assert_non_null(json);
        memset(name, 'n', 4096);
        name[4096] = '\0';
        (void) snprintf(
                json, 5000, "{\"%s\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,3]}}", name);
        assert_int_equal(parse(json, 3, &h, &f), -EBADMSG);
        assert_text(&f, "nnn': data_offsets span 3 bytes, shape and dtype F32 need 4");
}

static void st_header_parse_escaped_names_found(void **state) {
        CLEANUP(st_header_freep) StHeader *h = NULL;

        h = accepted("{" F32_1("\\ud83d\\ude00\\\"\\/", "[0,4]") "," F32_1("", "[4,8]") "}", 8);
        assert_non_null(st_header_find(h, "\xf0\x9f\x98\x80\"/"));
        assert_ptr_equal(st_header_find(h, ""), &h->tensors[0]);
}

static void st_header_size_cap_kept(void **state) {
        static const struct {
                uint64_t length, file_size;
                int r;
        } cases[] = {
                {ST_HEADER_MAX, UINT64_C(1) << 40, 0},
                {ST_HEADER_MAX, 8 + ST_HEADER_MAX, 0},
                {ST_HEADER_MAX, 7 + ST_HEADER_MAX, -EBADMSG},
                {ST_HEADER_MAX + 1, UINT64_C(1) << 40, -EBADMSG},
                {126000000, UINT64_C(1) << 40, -EBADMSG},
                {UINT64_C(1) << 40, 1000, -EBADMSG},
                {UINT64_MAX, 1000, -EBADMSG},
                {UINT64_MAX, UINT64_MAX, -EBADMSG},
                {UINT64_MAX - 7, UINT64_MAX, -EBADMSG},
                {0, 8, -EBADMSG},
                {1, 9, -EBADMSG},
                {2, 10, 0},
        };

        for (size_t i = 0; i < ELEMENTSOF(cases); i++) {
                uint64_t length = htole64(cases[i].length), size = 77;
                Fault f = {};

                assert_int_equal(st_header_size(&length, 8, cases[i].file_size, "m", &size, &f), cases[i].r);
                assert_int_equal(size, cases[i].r < 0 ? 77 : cases[i].length + 8);
                assert_int_equal(f.name[0] != '\0', cases[i].r < 0);
        }
}

static void st_header_size_too_few_bytes_is_internal(void **state) {
        uint64_t size;
        Fault f = {};

        assert_int_equal(st_header_size("1234", 4, 1000, "m", &size, &f), -EINVAL);
        assert_string_equal(f.name, FAULT_INTERNAL);
}

static void st_header_size_other_formats_named(void **state) {
        static const struct {
                const char *start;
                size_t n;
                const char *what;
        } cases[] = {
                {"PK\3\4\x14\0\0\0\0\0archive/data.pkl", 26, "zip archive"},
                {"PK\3\4\0\0\0\0\0\0archive/data.pkl", 26, "zip archive"}, /* an allowed length by chance */
                {"PK\5\6\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0", 22, "zip archive"},
                {"\x80\2\x8a\nl\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.", 15, "pickle"},
                {"\x80\4\x95\x05\0\0\0\0\0\0\0\x8c\5torch", 18, "pickle"},
                {"GGUF\3\0\0\0\1\0\0\0\0\0\0\0", 16, "GGUF"},
                {"\x1f\x8b\x08\0\0\0\0\0\0\3\xab\xa8\xae\5\0", 15, "gzip"},
                {"<!DOCTYPE html>\n<html>", 22, "HTML"},
                {"\r\n<HTML lang=\"en\"><head>", 24, "HTML"},
                {"<html></html>", 13, "HTML"},
                {"<?xml version=\"1.0\"?><Error/>", 29, "HTML or XML"},
                {"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n", 70, "Git LFS"},
                {"{\"error\":\"Repository not found\"}", 32, "JSON"},
        };

        for (size_t i = 0; i < ELEMENTSOF(cases); i++) {
                uint64_t size;
                Fault f = {};

                assert_int_equal(
                        st_header_size(cases[i].start, cases[i].n, cases[i].n, "m.safetensors", &size, &f),
                        -EBADMSG);
                assert_text(&f, "'m.safetensors' is not a safetensors file");
                assert_text(&f, cases[i].what);
        }

        /* and by the first 8 bytes alone, where they tell */
        for (size_t i = 0; i < ELEMENTSOF(cases); i++) {
                uint64_t size;
                Fault f = {};

                if (strcmp(cases[i].what, "HTML") == 0 && cases[i].start[0] == '\r')
                        continue; /* not enough left behind the white space */
                if (st_header_size(cases[i].start, 8, cases[i].n, "m.safetensors", &size, &f) == 0)
                        fail_msg("case %zu accepted", i);
                assert_text(&f, cases[i].what);
        }
}

/* A header length whose bytes are another format's magic is still a length. */
static void st_header_parse_length_like_gzip_magic_accepted(void **state) {
        CLEANUP(st_header_freep) StHeader *h = NULL;
        CLEANUP_FREE char *json = malloc(0x8b1f);
        Fault f = {};

        assert_non_null(json);
        memset(json, ' ', 0x8b1f);
        memcpy(json, "{}", 2);
        assert_int_equal(parse_n(json, 0x8b1f, 0, &h, &f), 0);
}

static void st_header_parse_largest_header_accepted(void **state) {
        CLEANUP(st_header_freep) StHeader *h = NULL;
        CLEANUP_FREE char *file = malloc(8 + ST_HEADER_MAX);
        uint64_t length = htole64(ST_HEADER_MAX);
        Fault f = {};

        assert_non_null(file);
        memcpy(file, &length, 8);
        memset(file + 8, ' ', ST_HEADER_MAX);
        memcpy(file + 8, "{}", 2);
        assert_int_equal(st_header_parse(file, 8 + ST_HEADER_MAX, 8 + ST_HEADER_MAX, "m", &h, &f), 0);
        assert_int_equal(h->n_tensors, 0);
}

static void st_header_parse_golden_file_read(void **state) {
        const char *data = getenv("LATENT_TEST_DATA");
        CLEANUP(st_header_freep) StHeader *h = NULL;
        CLEANUP_CLOSE int fd = -EBADF;
        CLEANUP_FREE char *file = NULL;
        char path[1024];
        struct stat st;
        Fault f = {};

        assert_non_null(data);
        (void) snprintf(path, sizeof(path), "%s/dit/case_t2va_tiny.safetensors", data);
        fd = open(path, O_RDONLY | O_CLOEXEC);
        assert_true(fd >= 0 && fstat(fd, &st) == 0);
        file = malloc((size_t) st.st_size);
        assert_non_null(file);
        assert_int_equal(read(fd, file, (size_t) st.st_size), st.st_size);

        assert_int_equal(parse_file(file, (uint64_t) st.st_size, (uint64_t) st.st_size, &h, &f), 0);
        assert_int_equal(h->n_tensors, 4);
        assert_int_equal(h->n_meta, 8);
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(st_header_parse_entries_read),
                cmocka_unit_test(st_header_parse_duplicate_name_refused),
                cmocka_unit_test(st_header_parse_no_tensors_accepted),
                cmocka_unit_test(st_header_parse_text_behind_object_refused),
                cmocka_unit_test(st_header_parse_metadata_not_strings_refused),
                cmocka_unit_test(st_header_parse_tensor_called_metadata_refused),
                cmocka_unit_test(st_header_parse_empty_tensors_accepted),
                cmocka_unit_test(st_header_parse_wrong_span_refused),
                cmocka_unit_test(st_header_parse_wrong_json_types_refused),
                cmocka_unit_test(st_header_parse_broken_json_refused),
                cmocka_unit_test(st_header_parse_nul_bytes_refused),
                cmocka_unit_test(st_header_parse_overlap_refused),
                cmocka_unit_test(st_header_parse_hole_refused),
                cmocka_unit_test(st_header_parse_bytes_behind_last_refused),
                cmocka_unit_test(st_header_parse_overflowing_shape_refused),
                cmocka_unit_test(st_header_parse_65_dimensions_refused),
                cmocka_unit_test(st_header_parse_16_dimensions_accepted),
                cmocka_unit_test(st_header_parse_huge_tensor_beyond_file_refused),
                cmocka_unit_test(st_header_parse_unknown_type_refused_by_name),
                cmocka_unit_test(st_header_parse_type_never_guessed_from_size),
                cmocka_unit_test(st_header_parse_misaligned_data_found),
                cmocka_unit_test(st_header_parse_truncated_says_sizes),
                cmocka_unit_test(st_header_parse_other_length_than_promised_refused),
                cmocka_unit_test(st_header_parse_hostile_name_made_printable),
                cmocka_unit_test(st_header_parse_long_name_leaves_room_for_rule),
                cmocka_unit_test(st_header_parse_escaped_names_found),
                cmocka_unit_test(st_header_size_cap_kept),
                cmocka_unit_test(st_header_size_too_few_bytes_is_internal),
                cmocka_unit_test(st_header_size_other_formats_named),
                cmocka_unit_test(st_header_parse_length_like_gzip_magic_accepted),
                cmocka_unit_test(st_header_parse_largest_header_accepted),
                cmocka_unit_test(st_header_parse_golden_file_read),
        };

        return cmocka_run_group_tests_name("safetensors", tests, NULL, NULL);
}
