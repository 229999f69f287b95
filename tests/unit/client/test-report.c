/* SPDX-License-Identifier: Apache-2.0 */

/* What latentctl prints: JSON, numbers, the progress line, exit statuses. */

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "client/latentctl/progress.h"
#include "client/latentctl/report.h"
#include "client/liblatent/value.h"

static void json_strings_escaped(void **state) {
        char *text = NULL;
        size_t n;
        JsonWriter w = {.file = open_memstream(&text, &n)};

        assert_non_null(w.file);
        json_writer_object(&w, NULL);
        json_writer_string(&w, "a\"", "q\"\\\n\x7f\xc3\xa9\xf0\x9f\x8e\xac\xff");
        json_writer_uint(&w, "u", UINT64_MAX);
        json_writer_double(&w, "d", 0.1);
        json_writer_double(&w, "nan", __builtin_nan(""));
        json_writer_list(&w, "l");
        json_writer_uint(&w, NULL, 1);
        json_writer_object(&w, NULL);
        json_writer_end(&w);
        json_writer_line(&w);
        assert_int_equal(fclose(w.file), 0);
        assert_string_equal(text, "{\"a\\\"\":\"q\\\"\\\\\\u000a\\u007f\\u00e9\\ud83c\\udfac\\ufffd\",\"u\":"
                                  "18446744073709551615,"
                                  "\"d\":0.10000000000000001,\"nan\":null,\"l\":[1,{}]}\n");
        free(text);
}

static void json_value_nested(void **state) {
        latent_value *v = value_new(LATENT_VALUE_DICT), *list = value_new(LATENT_VALUE_LIST);
        char *text = NULL;
        size_t n;
        JsonWriter w = {.file = open_memstream(&text, &n)};

        assert_int_equal(value_add_string(list, NULL, "x"), 0);
        assert_int_equal(value_add(v, "list", list), 0);
        assert_int_equal(value_add(v, "empty", value_new(LATENT_VALUE_DICT)), 0);
        json_writer_value(&w, NULL, v);
        json_writer_line(&w);
        assert_int_equal(fclose(w.file), 0);
        assert_string_equal(text, "{\"list\":[\"x\"],\"empty\":{}}\n");
        free(text);
        latent_value_free(v);
}

static void string_at_without_text_is_empty(void **state) {
        latent_value *list = value_new(LATENT_VALUE_LIST);

        assert_int_equal(value_add_string(list, NULL, "x"), 0);
        assert_int_equal(value_add(list, NULL, value_new(LATENT_VALUE_LIST)), 0);
        assert_string_equal(string_at(list, 0), "x");
        assert_string_equal(string_at(list, 1), "");
        assert_string_equal(string_at(list, 2), "");
        assert_string_equal(string_at(NULL, 0), "");
        latent_value_free(list);
}

static void format_numbers_for_people(void **state) {
        char buf[FORMAT_MAX];

        assert_string_equal(format_bytes(0, buf), "0 B");
        assert_string_equal(format_bytes(1023, buf), "1023 B");
        assert_string_equal(format_bytes(1536, buf), "1.5 KiB");
        assert_string_equal(format_bytes(UINT64_MAX, buf), "16.0 EiB");
        assert_string_equal(format_usec(1500000, buf), "1.50 s");
        assert_string_equal(format_usec(65000000, buf), "1m05s");
        assert_string_equal(format_usec(UINT64_C(3720000000), buf), "1h02m");
        assert_string_equal(format_id("/org/latentd/Latent1/job/_312", buf), "12");
        assert_string_equal(format_id("/org/latentd/Latent1/job/12", buf), "12");
        assert_string_equal(format_id("12", buf), "12");
}

static void status_of_errors(void **state) {
        assert_int_equal(status_of(CTL_ERROR_USAGE), 2);
        assert_int_equal(status_of(LATENT_ERROR_NO_SERVICE), 3);
        assert_int_equal(status_of(LATENT_ERROR_NOT_SUPPORTED), 4);
        assert_int_equal(status_of(LATENT_ERROR_INVALID_TENSOR), 4);
        assert_int_equal(status_of(LATENT_ERROR_WORKER_CRASHED), 1);
        assert_int_equal(status_of(LATENT_ERROR_RESTARTED), 1);
        assert_int_equal(status_of(LATENT_ERROR_CANCELLED), 1);
        assert_int_equal(status_of(CTL_ERROR_INTERRUPTED), 130);
        assert_int_equal(status_of("Novel"), 1);
}

static void progress_line_fits_the_terminal(void **state) {
        const Progress p = {.label = "sampling"};
        latent_progress n = {.struct_size = sizeof(n),
                .state = LATENT_JOB_RUNNING,
                .phase = "sample",
                .step = 2,
                .steps = 8,
                .block = 12,
                .blocks = 50,
                .fraction = 0.28,
                .eta_usec = 65000000};
        char line[256];

        progress_format(&p, &n, 100, line, sizeof(line));
        assert_non_null(strstr(line, "step 3/8  block 12/50"));
        assert_non_null(strstr(line, "28%"));
        assert_non_null(strstr(line, "ETA 1m05s"));
        assert_non_null(strstr(line, "[####"));
        for (size_t columns = 1; columns <= 160; columns++)
                for (double f = 0; f <= 1; f += 0.125) {
                        n.fraction = f;
                        progress_format(&p, &n, columns, line, sizeof(line));
                        assert_true(strlen(line) < columns);
                }

        n.step = 8; /* all done, the end not yet heard of */
        progress_format(&p, &n, 100, line, sizeof(line));
        assert_non_null(strstr(line, "step 8/8"));
        n.state = LATENT_JOB_QUEUED;
        progress_format(&p, &n, 100, line, sizeof(line));
        assert_non_null(strstr(line, "waiting"));
        n.state = LATENT_JOB_RUNNING;
        strcpy(n.phase, "read");
        progress_format(&p, &n, 100, line, sizeof(line));
        assert_non_null(strstr(line, "read 12/50 MiB"));
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(json_strings_escaped),
                cmocka_unit_test(json_value_nested),
                cmocka_unit_test(string_at_without_text_is_empty),
                cmocka_unit_test(format_numbers_for_people),
                cmocka_unit_test(status_of_errors),
                cmocka_unit_test(progress_line_fits_the_terminal),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
