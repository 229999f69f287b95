/* SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "service/shared/cleanup.h"
#include "service/shared/safetensors.h"
#include "tests/unit/shared/cmocka-all.h"

static void st_type_known_names_sized(void **state) {
        static const struct {
                const char *name;
                StType type;
                uint64_t size;
        } cases[] = {
                {"BOOL", ST_BOOL, 1},
                {"U8", ST_U8, 1},
                {"I8", ST_I8, 1},
                {"U16", ST_U16, 2},
                {"I16", ST_I16, 2},
                {"F16", ST_F16, 2},
                {"BF16", ST_BF16, 2},
                {"U32", ST_U32, 4},
                {"I32", ST_I32, 4},
                {"F32", ST_F32, 4},
                {"U64", ST_U64, 8},
                {"I64", ST_I64, 8},
                {"F64", ST_F64, 8},
                {"F8_E4M3", ST_F8_E4M3, 1},
                {"F8_E5M2", ST_F8_E5M2, 1},
                {"F8_E8M0", ST_F8_E8M0, 1},
        };

        assert_int_equal(ELEMENTSOF(cases), ST_TYPE_MAX);
        for (size_t i = 0; i < ELEMENTSOF(cases); i++) {
                assert_int_equal(st_type_parse(cases[i].name), cases[i].type);
                assert_string_equal(st_type_name(cases[i].type), cases[i].name);
                assert_int_equal(st_type_size(cases[i].type), cases[i].size);
        }
}

static void st_type_unknown_refused(void **state) {
        static const char *const names[] = {
                "", "bf16", "Q4_K", "F4", "F6_E2M3", "F8_E4M3FN", "C64", "F32 ", " F32"};

        for (size_t i = 0; i < ELEMENTSOF(names); i++)
                assert_int_equal(st_type_parse(names[i]), ST_TYPE_INVALID);

        assert_null(st_type_name(ST_TYPE_INVALID));
        assert_null(st_type_name(ST_TYPE_MAX));
        assert_int_equal(st_type_size(ST_TYPE_INVALID), 0);
        assert_int_equal(st_type_size((StType) 1000), 0);
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(st_type_known_names_sized),
                cmocka_unit_test(st_type_unknown_refused),
        };

        return cmocka_run_group_tests_name("safetensors-type", tests, NULL, NULL);
}
