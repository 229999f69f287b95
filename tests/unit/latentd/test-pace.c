/* SPDX-License-Identifier: Apache-2.0 */
#include "service/latentd/pace.h"

#include <math.h>

#include "tests/unit/shared/cmocka-all.h"

static PaceKey key(uint64_t files) {
        return (PaceKey){ .files = files, .phase = 1, .compute = 2, .ranks = 3 };
}

static void find_tells_all_of_a_key_apart(void **state) {
        PaceTable t = {};
        PaceKey k = key(1), other[5] = { key(2), key(1), key(1), key(1), key(1) };

        other[1].phase = 0;
        other[2].compute = 1;
        other[3].ranks = 0;
        other[4].sparse = 1;
        assert_null(pace_find(&t, &k));
        pace_add(&t, &k, 7, 5);
        assert_true(pace_find(&t, &k)->usec == 7 && pace_find(&t, &k)->attention == 5);
        for (int i = 0; i < 5; i++)
                assert_null(pace_find(&t, &other[i]));
}

static void add_a_new_time_counts_as_much_as_all_before(void **state) {
        PaceTable t = {};
        PaceKey k = key(1);

        pace_add(&t, &k, 8, 1);
        pace_add(&t, &k, 4, 2);
        assert_true(pace_find(&t, &k)->usec == 6 && pace_find(&t, &k)->attention == 2);
        pace_add(&t, &k, 2, 2);
        assert_true(pace_find(&t, &k)->usec == 4);
}

static void add_rough_gives_way(void **state) {
        PaceTable t = {};
        PaceKey k = key(1);

        pace_add_rough(&t, &k, 9);
        assert_true(pace_find(&t, &k)->usec == 9 && pace_find(&t, &k)->rough);
        pace_add_rough(&t, &k, 7);
        assert_true(pace_find(&t, &k)->usec == 7 && pace_find(&t, &k)->rough);
        pace_add(&t, &k, 4, 0);
        assert_true(pace_find(&t, &k)->usec == 4 && !pace_find(&t, &k)->rough);
        pace_add_rough(&t, &k, 9);
        assert_true(pace_find(&t, &k)->usec == 4 && !pace_find(&t, &k)->rough);
        pace_add(&t, &k, 2, 0);
        assert_true(pace_find(&t, &k)->usec == 3);
}

static void add_nonsense_changes_nothing(void **state) {
        static const double nonsense[] = { 0, -1, NAN, INFINITY };
        PaceTable t = {};
        PaceKey k = key(1);

        for (int i = 0; i < 4; i++)
                pace_add(&t, &k, nonsense[i], 1);
        assert_null(pace_find(&t, &k));
        pace_add(&t, &k, 3, 1);
        for (int i = 0; i < 4; i++)
                pace_add(&t, &k, nonsense[i], 1);
        assert_true(pace_find(&t, &k)->usec == 3);
}

static void add_the_one_not_used_for_longest_makes_room(void **state) {
        PaceTable t = {};
        PaceKey k;

        for (uint64_t i = 1; i <= PACE_ENTRIES; i++) {
                k = key(i);
                pace_add(&t, &k, (double) i, 0);
        }
        k = key(1);
        assert_non_null(pace_find(&t, &k)); /* used */
        k = key(1000);
        pace_add(&t, &k, 1, 0);
        for (uint64_t i = 1; i <= PACE_ENTRIES; i++) {
                k = key(i);
                assert_int_equal(pace_find(&t, &k) != NULL, i != 2);
        }
        k = key(1000);
        assert_non_null(pace_find(&t, &k));
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(find_tells_all_of_a_key_apart),
                cmocka_unit_test(add_a_new_time_counts_as_much_as_all_before),
                cmocka_unit_test(add_rough_gives_way),
                cmocka_unit_test(add_nonsense_changes_nothing),
                cmocka_unit_test(add_the_one_not_used_for_longest_makes_room),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
