/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "service/shared/cleanup.h"
#include "service/shared/safetensors.h"
#include "tests/unit/shared/cmocka-all.h"

DEFINE_CLEANUP(StIndex *, st_index_free)
DEFINE_CLEANUP(StHeader *, st_header_free)

static int parse_n(const char *json, size_t n, StIndex **ret, Fault *f) {
        CLEANUP_FREE char *copy = malloc(n > 0 ? n : 1);

        assert_non_null(copy);
        memcpy(copy, json, n);
        return st_index_parse(copy, n, "m.safetensors.index.json", ret, f);
}

static StIndex *accepted(const char *json) {
        StIndex *x = NULL;
        Fault f = {};

        if (parse_n(json, strlen(json), &x, &f) < 0)
                fail_msg("%s: %s", json, f.text);
        return x;
}

static void assert_refused(const char *json, const char *rule) {
        StIndex *x = NULL;
        Fault f = {};

        assert_int_equal(parse_n(json, strlen(json), &x, &f), -EBADMSG);
        assert_null(x);
        assert_string_equal(f.name, FAULT_INVALID_FILE);
        assert_non_null(strstr(f.text, "'m.safetensors.index.json'"));
        if (!strstr(f.text, rule))
                fail_msg("\"%s\" is not in \"%s\"", rule, f.text);
}

static void st_index_parse_entries_sorted(void **state) {
        CLEANUP(st_index_freep) StIndex *x = NULL;

        x = accepted(" {\"metadata\":{\"total_size\":1.5e3,\"x\":[{},null,true,-0.5]},\n\"weight_map\":{"
                     "\"b\":\"m-2.safetensors\","
                     "\"c\":\"m-1.safetensors\",\"a\\u0041\":\"m-2.safetensors\"},\"other\":[]}\n");
        assert_int_equal(x->n_entries, 3);
        assert_string_equal(x->entries[0].tensor, "aA");
        assert_string_equal(x->entries[2].tensor, "c");
        assert_int_equal(x->n_files, 2);
        assert_string_equal(x->files[0], "m-1.safetensors");
        assert_string_equal(x->files[1], "m-2.safetensors");
        assert_string_equal(st_index_file_of(x, "b"), "m-2.safetensors");
        assert_null(st_index_file_of(x, "d"));
}

static void st_index_parse_empty_map_has_no_files(void **state) {
        CLEANUP(st_index_freep) StIndex *x = accepted("{\"weight_map\":{}}");

        assert_int_equal(x->n_entries, 0);
        assert_int_equal(x->n_files, 0);
        assert_null(st_index_file_of(x, "a"));
}

static void st_index_parse_map_missing_or_wrong_refused(void **state) {
        assert_refused("{}", "'weight_map' is missing");
        assert_refused("{\"metadata\":{}}", "'weight_map' is missing");
        assert_refused("{\"weight_map\":[]}", "'weight_map' must be an object");
        assert_refused("{\"weight_map\":null}", "'weight_map' must be an object");
        assert_refused("{\"weight_map\":\"a\"}", "'weight_map' must be an object");
        assert_refused("{\"weight_map\":{},\"weight_map\":{}}", "duplicate key 'weight_map'");
        assert_refused("[]", "an object with 'weight_map' expected");
        assert_refused("", "an object with 'weight_map' expected");
        assert_refused("{\"weight_map\":{\"a\":1}}", "tensor 'a': the name of a file expected");
        assert_refused("{\"weight_map\":{\"a\":null}}", "tensor 'a': the name of a file expected");
}

static void st_index_parse_duplicate_tensor_refused(void **state) {
        assert_refused(
                "{\"weight_map\":{\"a\":\"x\",\"b\":\"x\",\"a\":\"x\"}}", "tensor 'a': duplicate name");
        assert_refused("{\"weight_map\":{\"a\":\"x\",\"\\u0061\":\"y\"}}", "tensor 'a': duplicate name");
}

static void st_index_parse_names_leading_out_refused(void **state) {
        char json[400], name[257];

        assert_refused("{\"weight_map\":{\"a\":\"../x\"}}", "file name '../x' is refused");
        assert_refused("{\"weight_map\":{\"a\":\"/etc/passwd\"}}", "file name '/etc/passwd' is refused");
        assert_refused("{\"weight_map\":{\"a\":\"b\\/c\"}}", "file name 'b/c' is refused");
        assert_refused("{\"weight_map\":{\"a\":\"b\\u002fc\"}}", "file name 'b/c' is refused");
        assert_refused("{\"weight_map\":{\"a\":\"..\"}}", "file name '..' is refused");
        assert_refused("{\"weight_map\":{\"a\":\".\"}}", "file name '.' is refused");
        assert_refused("{\"weight_map\":{\"a\":\"\"}}", "it is empty");
        assert_refused("{\"weight_map\":{\"a\":\"x\\u0000y\"}}", "NUL");
        assert_refused("{\"weight_map\":{\"a\":\"x\\ny\"}}", "control character");
        assert_refused("{\"weight_map\":{\"a\":\"x\xff\"}}", "not UTF-8");

        memset(name, 'n', 256);
        name[256] = '\0';
        (void) snprintf(json, sizeof(json), "{\"weight_map\":{\"a\":\"%s\"}}", name);
        assert_refused(json, "longer than 255 bytes");
}

static void st_index_parse_plain_names_with_dots_accepted(void **state) {
        CLEANUP(st_index_freep)
        StIndex *x = accepted("{\"weight_map\":{\"a\":\"v1..2.safetensors\",\"b\":\"...\"}}");

        assert_int_equal(x->n_files, 2);
}

static void st_index_parse_broken_json_refused(void **state) {
        StIndex *x = NULL;
        Fault f = {};

        assert_refused("{\"weight_map\":{\"a\":\"x\"}", "ends too early");
        assert_refused("{\"weight_map\":{\"a\":\"x\",}}", "comma");
        assert_refused("{\"weight_map\":{\"a\":\"x\"}}{}", "behind the end");
        assert_refused("{\"weight_map\":{},\"x\":01}", "not a JSON value");
        assert_refused("{\"weight_map\":{},\"x\":[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]}", "nested too deeply");
        assert_int_equal(parse_n("{\"weight_map\":{}\0}", 17, &x, &f), -EBADMSG);
        assert_null(x);
}

static void st_index_parse_lfs_pointer_named(void **state) {
        assert_refused("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n",
                "Git LFS pointer");
        assert_refused("<!DOCTYPE html><html></html>", "HTML");
}

/* More names than files in the folder, as after a re-quantisation: all of them are known before anything is
 * read. */
static void st_index_parse_thirty_files_listed(void **state) {
        CLEANUP(st_index_freep) StIndex *x = NULL;
        char json[8192] = "{\"weight_map\":{", name[32];

        for (int i = 0; i < 90; i++)
                (void) sprintf(json + strlen(json), "%s\"t%d\":\"m-%05d-of-00030.safetensors\"",
                        i > 0 ? "," : "", i, i % 30 + 1);
        strcat(json, "}}");

        x = accepted(json);
        assert_int_equal(x->n_entries, 90);
        assert_int_equal(x->n_files, 30);
        for (int i = 0; i < 30; i++) {
                (void) snprintf(name, sizeof(name), "m-%05d-of-00030.safetensors", i + 1);
                assert_string_equal(x->files[i], name);
        }
}

/* One byte of tensor "x", written with the given value beside a tensor of the shard's own. */
static void *shard_new(const char *own, unsigned char value, size_t *ret_size) {
        const StTensor tensors[] = {{"x", ST_U8, 1, {1}, 0, 1}, {own, ST_U8, 1, {1}, 0, 1}};
        const unsigned char zero = 0;
        const void *data[] = {&value, &zero};
        CLEANUP_CLOSE int fd = memfd_create("shard", MFD_CLOEXEC);
        struct stat st;
        void *file;

        assert_true(fd >= 0);
        assert_int_equal(st_write(fd, tensors, data, 2, NULL, 0), 0);
        assert_int_equal(fstat(fd, &st), 0);
        file = malloc((size_t) st.st_size);
        assert_non_null(file);
        assert_int_equal(pread(fd, file, (size_t) st.st_size, 0), st.st_size);
        *ret_size = (size_t) st.st_size;
        return file;
}

/* Two shards hold "x" (a base and an overlay): the index alone says whose bytes count. */
static void st_index_file_of_tensor_in_two_shards_honours_index(void **state) {
        static const char *const indexes[] = {
                "{\"weight_map\":{\"a\":\"a.safetensors\",\"x\":\"b.safetensors\",\"b\":\"b.safetensors\"}}",
                "{\"weight_map\":{\"b\":\"b.safetensors\",\"x\":\"b.safetensors\",\"a\":\"a.safetensors\"}}",
                "{\"weight_map\":{\"b\":\"b.safetensors\",\"x\":\"a.safetensors\",\"a\":\"a.safetensors\"}}",
        };
        static const unsigned char expected[] = {22, 22, 11};

        for (size_t i = 0; i < ELEMENTSOF(indexes); i++) {
                CLEANUP(st_index_freep) StIndex *x = accepted(indexes[i]);
                CLEANUP(st_header_freep) StHeader *h = NULL;
                bool b = strcmp(st_index_file_of(x, "x"), "b.safetensors") == 0;
                size_t size;
                CLEANUP_FREE unsigned char *file = shard_new(b ? "b" : "a", b ? 22 : 11, &size);
                uint64_t header_size;
                Fault f = {};

                assert_int_equal(st_header_size(file, size, size, "s", &header_size, &f), 0);
                assert_int_equal(st_header_parse(file, header_size, size, "s", &h, &f), 0);
                assert_int_equal(file[st_header_find(h, "x")->offset], expected[i]);
        }
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(st_index_parse_entries_sorted),
                cmocka_unit_test(st_index_parse_empty_map_has_no_files),
                cmocka_unit_test(st_index_parse_map_missing_or_wrong_refused),
                cmocka_unit_test(st_index_parse_duplicate_tensor_refused),
                cmocka_unit_test(st_index_parse_names_leading_out_refused),
                cmocka_unit_test(st_index_parse_plain_names_with_dots_accepted),
                cmocka_unit_test(st_index_parse_broken_json_refused),
                cmocka_unit_test(st_index_parse_lfs_pointer_named),
                cmocka_unit_test(st_index_parse_thirty_files_listed),
                cmocka_unit_test(st_index_file_of_tensor_in_two_shards_honours_index),
        };

        return cmocka_run_group_tests_name("safetensors-index", tests, NULL, NULL);
}
