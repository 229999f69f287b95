/* SPDX-License-Identifier: Apache-2.0 */
#include "service/worker/ranges.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define SIZE 200u

/* Against a byte for each. */
static void check(const Ranges *r, const bool *has) {
        uint64_t bytes = 0;

        for (uint64_t begin = 0; begin <= SIZE; begin++) {
                bool all = true;

                for (uint64_t end = begin; end <= SIZE; end++) {
                        all = all && (end == begin || has[end - 1]);
                        assert_int_equal(ranges_have(r, begin, end), all);
                }
        }
        for (uint64_t i = 0; i < SIZE; i++)
                bytes += has[i];
        assert_int_equal(r->bytes, bytes);
        for (size_t i = 0; i < r->n; i++) {
                assert_true(r->all[i].begin < r->all[i].end);
                assert_true(i == 0 || r->all[i - 1].end < r->all[i].begin);
        }
}

static void ranges_have_what_was_added(void **state) {
        for (unsigned seed = 1; seed <= 40; seed++) {
                bool has[SIZE] = {};
                Ranges r = {};

                srand(seed);
                for (unsigned i = 0; i < 60; i++) {
                        unsigned begin = (unsigned) rand() % SIZE, end = begin + (unsigned) rand() % (1 + seed % 12);

                        end = end < SIZE ? end : SIZE;
                        assert_int_equal(ranges_add(&r, begin, end), 0);
                        memset(has + begin, 1, end - begin);
                        if (i % 7 == 0)
                                check(&r, has);
                }
                check(&r, has);
                ranges_done(&r);
                assert_int_equal(r.n, 0);
        }
}

static void ranges_neighbours_become_one(void **state) {
        Ranges r = {};

        assert_int_equal(ranges_add(&r, 10, 20), 0);
        assert_int_equal(ranges_add(&r, 30, 40), 0);
        assert_int_equal(r.n, 2);
        assert_false(ranges_have(&r, 15, 35));
        assert_int_equal(ranges_add(&r, 20, 30), 0);
        assert_int_equal(r.n, 1);
        assert_true(ranges_have(&r, 10, 40));
        assert_false(ranges_have(&r, 9, 40));
        assert_false(ranges_have(&r, 10, 41));
        ranges_done(&r);
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(ranges_have_what_was_added),
                cmocka_unit_test(ranges_neighbours_become_one),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
