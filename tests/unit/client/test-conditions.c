/* SPDX-License-Identifier: Apache-2.0 */

/* The metadata conds and task of latentctl's input files, and the tensors that belong to them. */

#include "client/latentctl/conditions.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/latentctl/inputs.h"
#include "tests/unit/client/temporary.h"

/* A file whose metadata are these members, as JSON strings inside JSON. */
static void open_with(const char *meta, const char *tensors, size_t n, TensorFile *ret) {
        char header[4096];
        latent_error e = {};

        (void) snprintf(header, sizeof(header), "{\"__metadata__\":{%s}%s%s}", meta, tensors[0] ? "," : "", tensors);
        temporary_write_tensors("x", header, n);
        if (tensor_file_open("x", ret, &e) < 0)
                fail_msg("%s", e.text);
}

static int parse(const char *meta, latent_condition *ret, uint32_t *ret_n, latent_error *e) {
        TensorFile t = {};
        int r;

        open_with(meta, "", 0, &t);
        r = conditions_parse(&t, ret, ret_n, e);
        tensor_file_done(&t);
        return r;
}

static void parse_all_kinds(void **state) {
        latent_condition c[CONDITIONS_MAX];
        latent_error e = {};
        uint32_t n = 9;

        assert_int_equal(parse("\"conds\":\"[ {\\\"kind\\\": \\\"keyframe\\\", \\\"frame\\\": 38}, "
                               "{\\\"kind\\\":\\\"image\\\"},"
                               "{\\\"kind\\\":\\\"video\\\"},{\\\"kind\\\":\\\"audio\\\"}, "
                               "{\\\"frame\\\":0,\\\"kind\\\":\\\"keyframe\\\"} ]\"",
                                 c, &n, &e),
                0);
        assert_int_equal(n, 5);
        assert_string_equal(c[0].kind, "keyframe");
        assert_int_equal(c[0].frame, 38);
        assert_string_equal(c[1].kind, "image");
        assert_string_equal(c[2].kind, "video");
        assert_string_equal(c[3].kind, "audio");
        assert_int_equal(c[3].frame, 0);
        assert_string_equal(c[4].kind, "keyframe");
        assert_true(condition_needs_video(&c[0]) && !condition_needs_audio(&c[2]) && condition_needs_audio(&c[3]) &&
                !condition_needs_video(&c[3]));

        assert_int_equal(parse("\"conds\":\"[]\"", c, &n, &e), 0);
        assert_int_equal(n, 0);
        n = 9;
        assert_int_equal(parse("", c, &n, &e), 0);
        assert_int_equal(n, 0);
}

#define KIND(k) "{\\\"kind\\\":\\\"" k "\\\"}"
#define KEY "{\\\"kind\\\":\\\"keyframe\\\",\\\"frame\\\":3}"

static void parse_wrong_lists_refused(void **state) {
        const struct {
                const char *conds, *says;
        } cases[] = {
                {"", "JSON list"},
                {"7", "JSON list"},
                {"{}", "JSON list"},
                {"[7]", "JSON list"},
                {"[" KIND("image"), "JSON list"},
                {"[" KIND("image") "] x", "JSON list"},
                {"[{\\\"kind\\\":[]}]", "JSON list"}, /* too deep */
                {"[{\\\"kind\\\":1}]", "JSON list"},
                {"[" KIND("image") "," KIND("film") "]", "entry 1: an unknown kind"},
                {"[{}]", "kind is missing"},
                {"[{\\\"kind\\\":\\\"keyframe\\\"}]", "needs its frame"},
                {"[{\\\"kind\\\":\\\"image\\\",\\\"frame\\\":0}]", "only keyframes"},
                {"[{\\\"kind\\\":\\\"keyframe\\\",\\\"frame\\\":-1}]", "whole number"},
                {"[{\\\"kind\\\":\\\"keyframe\\\",\\\"frame\\\":1.5}]", "whole number"},
                {"[{\\\"kind\\\":\\\"keyframe\\\",\\\"frame\\\":1,\\\"frame\\\":1}]", "twice"},
                {"[{\\\"kind\\\":\\\"image\\\",\\\"strength\\\":1}]", "unknown member"},
        };

        for (size_t i = 0; i < ELEMENTSOF(cases); i++) {
                latent_condition c[CONDITIONS_MAX];
                char meta[512];
                latent_error e = {};
                uint32_t n = 9;

                (void) snprintf(meta, sizeof(meta), "\"conds\":\"%s\"", cases[i].conds);
                if (parse(meta, c, &n, &e) != -EBADMSG)
                        fail_msg("taken: %s", cases[i].conds);
                assert_string_equal(e.name, "InvalidFile");
                if (!strstr(e.text, cases[i].says))
                        fail_msg("%s: \"%s\" does not say \"%s\"", cases[i].conds, e.text, cases[i].says);
                assert_int_equal(n, 9);
        }
}

static void parse_at_most_thirty(void **state) {
        latent_condition c[CONDITIONS_MAX];
        char meta[4096] = "\"conds\":\"[" KEY;
        latent_error e = {};
        uint32_t n = 0;

        for (unsigned i = 1; i < CONDITIONS_MAX; i++)
                strcat(meta, "," KEY);
        strcat(meta, "]\"");
        assert_int_equal(parse(meta, c, &n, &e), 0);
        assert_int_equal(n, CONDITIONS_MAX);

        strcpy(meta + strlen(meta) - 2, "," KEY "]\"");
        assert_int_equal(parse(meta, c, &n, &e), -EBADMSG);
        assert_non_null(strstr(e.text, "30"));
}

static void task_that_says_something_else_refused(void **state) {
        const struct {
                const char *task, *conds, *says; /* NULL: right */
        } cases[] = {
                {"t2va", "[]", NULL},
                {"t2va", "[" KEY "]", "lists conditions"},
                {"fl2va", "[" KEY "," KEY "]", NULL},
                {"fl2va", "[]", "lists no keyframe"},
                {"fl2va", "[" KEY "," KIND("image") "]", "lists references"},
                {"ref2va", "[" KIND("audio") "]", NULL},
                {"ref2va", "[" KIND("audio") "," KEY "]", NULL},
                {"ref2va", "[" KEY "]", "lists no reference"},
                {"ref2va", "[]", "lists no reference"},
                {"v2v", "[]", "expected t2va, fl2va or ref2va"},
        };

        for (size_t i = 0; i < ELEMENTSOF(cases); i++) {
                latent_condition c[CONDITIONS_MAX];
                char meta[512];
                latent_error e = {};
                uint32_t n;
                int r;

                (void) snprintf(meta, sizeof(meta), "\"task\":\"%s\",\"conds\":\"%s\"", cases[i].task, cases[i].conds);
                r = parse(meta, c, &n, &e);
                if ((r < 0) != (cases[i].says != NULL))
                        fail_msg("%s: %d %s", meta, r, e.text);
                if (cases[i].says && !strstr(e.text, cases[i].says))
                        fail_msg("%s: \"%s\" does not say \"%s\"", meta, e.text, cases[i].says);
        }
}

#define T(name, at) "\"" name "\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[" at "]}"
#define TARGET T("text", "0,1") "," T("video", "1,2") "," T("audio", "2,3")

static void find_conditions_with_their_tensors(void **state) {
        TensorFile t = {};
        latent_error e = {};
        const latent_condition *c;
        Inputs in;

        open_with("\"conds\":\"[" KIND("image") "," KIND("video") "," KIND("audio") "," KEY "]\"",
                TARGET "," T("cond.0.video", "3,4") "," T("cond.1.audio", "4,5") "," T("cond.1.video", "5,6") "," T(
                        "cond.2.audio", "6,7") "," T("cond.3.video", "7,8") "," T("mask_video", "8,9") "," T("clean_audio", "9,10"),
                10, &t);
        if (inputs_find(&t, true, &in, &e) < 0)
                fail_msg("%s", e.text);
        assert_int_equal(in.n_conditions, 4);
        c = inputs_conditions(&in);
        assert_string_equal(c[3].kind, "keyframe");
        assert_int_equal(c[3].frame, 3);
        assert_true(c[0].video && !c[0].audio && c[1].video && c[1].audio && !c[2].video && c[2].audio && c[3].video);
        assert_ptr_not_equal(c[0].video, c[1].video);
        assert_string_equal(in.source[INPUT_CONDITIONS + 3]->name, "cond.1.audio");
        assert_non_null(inputs_get(&in, INPUT_MASK_VIDEO));
        assert_null(inputs_get(&in, INPUT_MASK_AUDIO));
        assert_non_null(inputs_get(&in, INPUT_CLEAN_AUDIO));
        assert_true(inputs_bytes(&in) >= 10);

        assert_int_equal(inputs_find(&t, false, &in, &e), 0);
        assert_null(inputs_get(&in, INPUT_CLEAN_AUDIO)); /* a step has none */
        assert_int_equal(in.n_conditions, 4);
        tensor_file_done(&t);
}

static void find_conditions_that_do_not_match_refused(void **state) {
        const struct {
                const char *conds, *tensors, *says;
        } cases[] = {
                {"[" KIND("image") "]", "", "cond.0.video"},
                {"[" KIND("audio") "]", "," T("cond.0.video", "3,4"), "cond.0.audio"},
                {"[" KEY "," KEY "]", "," T("cond.0.video", "3,4"), "cond.1.video"},
                {"[]", "," T("cond.0.video", "3,4"), "lists 0 conditions"},
                {"[" KEY "]", "," T("cond.0.video", "3,4") "," T("cond.1.video", "4,5"), "cond.1.video"},
                {"[" KEY "]", "," T("cond.0.video", "3,4") "," T("cond.00.video", "4,5"), "cond.00.video"},
                {"[" KEY "]", "," T("cond.0.video", "3,4") "," T("cond.0.mask", "4,5"), "cond.0.mask"},
        };

        for (size_t i = 0; i < ELEMENTSOF(cases); i++) {
                char meta[512], tensors[1024];
                TensorFile t = {};
                latent_error e = {};
                Inputs in;

                (void) snprintf(meta, sizeof(meta), "\"conds\":\"%s\"", cases[i].conds);
                (void) snprintf(tensors, sizeof(tensors), TARGET "%s", cases[i].tensors);
                open_with(meta, tensors, 3 + (strstr(tensors, "3,4") != NULL) + (strstr(tensors, "4,5") != NULL), &t);
                if (inputs_find(&t, false, &in, &e) >= 0)
                        fail_msg("taken: %s %s", meta, cases[i].tensors);
                if (!strstr(e.text, cases[i].says))
                        fail_msg("\"%s\" does not say \"%s\"", e.text, cases[i].says);
                tensor_file_done(&t);
        }
}

static void find_published_cases(void **state) {
        const struct {
                const char *name;
                uint32_t n;
        } cases[] = {{"case_fl2va_firstlast", 2}, {"case_ref2va_mixed", 4}, {"traj_euler_4_ref2va_small", 2}, {"case_t2va_tiny", 0}};

        for (size_t i = 0; i < ELEMENTSOF(cases); i++) {
                char path[512];
                TensorFile t = {};
                latent_error e = {};
                Inputs in;

                (void) snprintf(path, sizeof(path), "%s/dit/%s.safetensors", getenv("LATENT_TEST_DATA"), cases[i].name);
                if (tensor_file_open(path, &t, &e) < 0 || inputs_find(&t, cases[i].name[0] == 't', &in, &e) < 0)
                        fail_msg("%s: %s", cases[i].name, e.text);
                assert_int_equal(in.n_conditions, cases[i].n);
                tensor_file_done(&t);
        }
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, temporary_setup, temporary_teardown)

int main(void) {
        const struct CMUnitTest tests[] = {
                TEST(parse_all_kinds),
                TEST(parse_wrong_lists_refused),
                TEST(parse_at_most_thirty),
                TEST(task_that_says_something_else_refused),
                TEST(find_conditions_with_their_tensors),
                TEST(find_conditions_that_do_not_match_refused),
                TEST(find_published_cases),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
