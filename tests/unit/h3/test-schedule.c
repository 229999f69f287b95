/* SPDX-License-Identifier: Apache-2.0 */
#include "service/h3/schedule.h"

#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <jansson.h>

#include "service/shared/cleanup.h"
#include "tests/unit/h3/golden.h"

static void check_table(const json_t *table) {
        const char *kind = json_string_value(json_object_get(table, "kind"));
        uint32_t evaluations = (uint32_t) json_integer_value(json_object_get(table, "evaluations")), n = 0;
        float shift = (float) json_number_value(json_object_get(table, "shift")), sigmas[H3_STEPS_MAX + 1];
        const json_t *hex = json_object_get(table, "hex");
        Fault f = {};

        assert_non_null(kind);
        assert_int_equal(
                h3_schedule(strcmp(kind, "simple") == 0 ? H3_SCHEDULE_SIMPLE : H3_SCHEDULE_REFERENCE,
                        evaluations, shift, sigmas, &n, &f),
                0);
        assert_int_equal(n + 1, json_array_size(hex));
        for (uint32_t i = 0; i <= n; i++) {
                uint32_t bits;

                memcpy(&bits, sigmas + i, sizeof(bits));
                if (bits != strtoul(json_string_value(json_array_get(hex, i)), NULL, 16))
                        fail_msg("%s, %u steps, shift %g: sigma %u is %08x, expected %s", kind, evaluations,
                                (double) shift, i, bits, json_string_value(json_array_get(hex, i)));
        }
}

static void schedule_published_tables_match_to_the_bit(void **state) {
        uint64_t size;
        uint8_t *text = golden_read(NULL, "dit/schedule.json", &size);
        json_t *root = json_loadb((const char *) text, size, 0, NULL), *table;
        size_t i, n = 0;

        assert_non_null(root);
        json_array_foreach(json_object_get(root, "tables"), i, table) {
                check_table(table);
                n++;
        }
        assert_int_equal(n, 48);
        json_decref(root);
        free(text);
}

static void schedule_most_steps_are_valid_lists(void **state) {
        float sigmas[H3_STEPS_MAX + 1];
        uint32_t n = 0;
        Fault f = {};

        for (uint32_t steps = 1; steps <= H3_STEPS_MAX; steps += 37)
                for (H3ScheduleKind kind = H3_SCHEDULE_SIMPLE; kind <= H3_SCHEDULE_REFERENCE; kind++) {
                        assert_int_equal(h3_schedule(kind, steps, 12, sigmas, &n, &f), 0);
                        assert_in_range(n, 1, steps);
                        assert_true(sigmas[0] == 1 && sigmas[n] == 0);
                        assert_int_equal(h3_schedule_check("sigmas", sigmas, n + 1, &f), 0);
                }
}

static void schedule_small_shifts_stay_at_or_below_one(void **state) {
        static const float shifts[] = {0.4f, 0.2f, 0.07f, 0.001f, 1e-7f, 1e-9f, 1e-45f};
        float sigmas[9];
        uint32_t n = 0;
        Fault f = {};

        for (size_t i = 0; i < sizeof(shifts) / sizeof(shifts[0]); i++)
                for (H3ScheduleKind kind = H3_SCHEDULE_SIMPLE; kind <= H3_SCHEDULE_REFERENCE; kind++) {
                        assert_int_equal(h3_schedule(kind, 8, shifts[i], sigmas, &n, &f), 0);
                        for (uint32_t k = 0; k <= n; k++)
                                assert_true(sigmas[k] >= 0 && sigmas[k] <= 1);
                }
}

static void refused(H3ScheduleKind kind, uint32_t steps, float shift, const char *word) {
        float sigmas[H3_STEPS_MAX + 1];
        uint32_t n = 7;
        Fault f = {};

        assert_int_equal(h3_schedule(kind, steps, shift, sigmas, &n, &f), -EINVAL);
        assert_string_equal(f.name, FAULT_INVALID_ARGUMENT);
        assert_non_null(strstr(f.text, word));
        assert_int_equal(n, 7);
}

static void schedule_bad_arguments_are_refused(void **state) {
        refused(H3_SCHEDULE_SIMPLE, 0, 12, "steps");
        refused(H3_SCHEDULE_SIMPLE, H3_STEPS_MAX + 1, 12, "1001");
        refused(H3_SCHEDULE_REFERENCE, 8, 0, "shift");
        refused(H3_SCHEDULE_REFERENCE, 8, -1, "shift");
        refused(H3_SCHEDULE_REFERENCE, 8, NAN, "shift");
        refused(H3_SCHEDULE_REFERENCE, 8, INFINITY, "shift");
        refused((H3ScheduleKind) 9, 8, 12, "9");
}

static void list_refused(const float *sigmas, uint64_t n, const char *word) {
        Fault f = {};

        assert_int_equal(h3_schedule_check("sigmas_video", sigmas, n, &f), -EINVAL);
        assert_string_equal(f.name, FAULT_INVALID_ARGUMENT);
        assert_non_null(strstr(f.text, word));
}

static void schedule_check_bad_lists_are_refused(void **state) {
        Fault f = {};

        list_refused((const float[]){1}, 1, "1 values");
        list_refused((const float[]){0.5f, 0.5f}, 2, "sigmas_video[1]");
        list_refused((const float[]){0.5f, 0.6f}, 2, "sigmas_video[1]");
        list_refused((const float[]){1.5f, 0.6f}, 2, "sigmas_video[0]");
        list_refused((const float[]){1, -0.1f}, 2, "sigmas_video[1]");
        list_refused((const float[]){1, NAN, 0}, 3, "sigmas_video[1]");
        assert_int_equal(h3_schedule_check("x", (const float[]){1, 0.25f, 0}, 3, &f), 0);
        assert_int_equal(h3_schedule_check("x", (const float[]){0.5f, 0.25f}, 2, &f), 0);
}

static int read_shifts(const char *name, const void *bytes, size_t size, float *video, float *audio, Fault *f) {
        const H3File files[] = {{"config.json", "[", 1}, {name, bytes, size}};

        *f = (Fault){};
        return h3_shifts_read(files, 2, video, audio, f);
}

static void expect_shifts(const char *name, const char *json, float video, float audio) {
        float v = 7, a = 7;
        Fault f;

        if (read_shifts(name, json, strlen(json), &v, &a, &f) < 0)
                fail_msg("%s: %s", json, f.text);
        assert_true(v == video && a == audio);
}

static void shifts_read_of_both_streams(void **state) {
        static const char video[] = "{\"shift\": 6.0}", audio[] = "{\"shift\": 3}";
        const H3File both[] = {{H3_SCHEDULER_AUDIO, audio, strlen(audio)}, {H3_SCHEDULER_VIDEO, video, strlen(video)}};
        float v = 0, a = 0;
        Fault f = {};

        expect_shifts("scheduler_config.json", "{\"_class_name\": \"MiniMaxH3Scheduler\", \"shift\": 6.0, \"more\": [null]}", 6, 0);
        expect_shifts("audio_scheduler_config.json", "{\"shift\": 3}", 0, 3);
        expect_shifts("scheduler_config.json", "{}", 0, 0); /* as it was released */
        expect_shifts("audio_scheduler_config.json", "{\"shift\": null}", 0, 0);
        expect_shifts("other_config.json", "{\"shift\": 5}", 0, 0);
        assert_int_equal(h3_shifts_read(both, 2, &v, &a, &f), 0);
        assert_true(v == 6 && a == 3);
}

static void shifts_read_others_are_refused_by_name(void **state) {
        static const struct {
                const char *json, *says;
        } bad[] = {
                {"", "not JSON"},
                {"{\"shift\": 6", "not JSON"},
                {"{\"shift\": 6, \"shift\": 6}", "not JSON"},
                {"[6]", "not a JSON object"},
                {"{\"shift\": \"6\"}", "shift is not a number above 0"},
                {"{\"shift\": true}", "shift is not a number above 0"},
                {"{\"shift\": 0}", "shift is not a number above 0"},
                {"{\"shift\": -3.0}", "shift is not a number above 0"},
                {"{\"shift\": 1e300}", "shift is not a number above 0"},
                {"{\"shift\": 1e-300}", "shift is not a number above 0"},
        };
        static char large[65537];
        float v = 7, a = 7;
        Fault f;

        for (size_t i = 0; i < ELEMENTSOF(bad); i++) {
                const char *name = i % 2 ? H3_SCHEDULER_AUDIO : H3_SCHEDULER_VIDEO;

                assert_int_equal(read_shifts(name, bad[i].json, strlen(bad[i].json), &v, &a, &f), -EBADMSG);
                assert_string_equal(f.name, FAULT_INVALID_FILE);
                if (!strstr(f.text, bad[i].says) || !strstr(f.text, name) ||
                        !strstr(f.text, i % 2 ? "folder audio_scheduler," : "folder scheduler,"))
                        fail_msg("%s: %s", bad[i].json, f.text);
        }
        memset(large, ' ', sizeof(large));
        memcpy(large, "{}", 2);
        assert_int_equal(read_shifts(H3_SCHEDULER_VIDEO, large, sizeof(large), &v, &a, &f), -EBADMSG);
        assert_non_null(strstr(f.text, "65536"));
        assert_int_equal(read_shifts(H3_SCHEDULER_VIDEO, large, sizeof(large) - 1, &v, &a, &f), 0);
        assert_true(v == 0 && a == 0);
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(schedule_published_tables_match_to_the_bit),
                cmocka_unit_test(schedule_most_steps_are_valid_lists),
                cmocka_unit_test(schedule_small_shifts_stay_at_or_below_one),
                cmocka_unit_test(schedule_bad_arguments_are_refused),
                cmocka_unit_test(schedule_check_bad_lists_are_refused),
                cmocka_unit_test(shifts_read_of_both_streams),
                cmocka_unit_test(shifts_read_others_are_refused_by_name),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
