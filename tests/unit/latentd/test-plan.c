/* SPDX-License-Identifier: Apache-2.0 */
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <setjmp.h>

#include <cmocka.h>

#include <errno.h>
#include <string.h>

#include "service/latentd/plan.h"
#include "service/shared/cleanup.h"

/* What wire.h promises of a plan, for any numbers. */
static void assert_valid(const WirePlan *p, uint64_t rows, uint32_t heads, uint32_t ranks, uint32_t tile) {
        uint64_t at = 0;
        uint32_t head = 0;

        assert_int_equal(p->ranks, ranks);
        assert_int_equal(p->row_tile, tile);
        assert_int_equal(p->chunks, 1);
        for (uint32_t i = 0; i < ranks; i++) {
                assert_true(p->rows[i].begin == at);
                assert_true(p->rows[i].end >= at && p->rows[i].end <= rows);
                assert_true(p->rows[i].end % tile == 0 || p->rows[i].end == rows);
                assert_true(p->heads[i].begin == head && p->heads[i].end >= head);
                at = p->rows[i].end;
                head = p->heads[i].end;
        }
        assert_true(at == rows);
        assert_int_equal(head, heads);
        for (uint32_t i = ranks; i < WIRE_RANKS_MAX; i++)
                assert_true(p->rows[i].end == 0 && p->heads[i].end == 0);
}

static void plan_make_many_numbers_cover_exactly(void **state) {
        static const uint64_t rows[] = { 1, 7, 33, 127, 128, 129, 1000, 38010, 75794 };
        static const uint32_t ranks[] = { 1, 2, 3, 4, 5, 7, 8, 64 }, heads[] = { 1, 4, 8, 56 },
                              tiles[] = { 1, 16, 128 };
        WirePlan p;

        for (size_t a = 0; a < ELEMENTSOF(rows); a++)
                for (size_t b = 0; b < ELEMENTSOF(ranks); b++)
                        for (size_t c = 0; c < ELEMENTSOF(heads); c++)
                                for (size_t d = 0; d < ELEMENTSOF(tiles); d++) {
                                        memset(&p, 0xff, sizeof(p));
                                        assert_int_equal(
                                                plan_make(rows[a], heads[c], ranks[b], tiles[d], &p), 0);
                                        assert_valid(&p, rows[a], heads[c], ranks[b], tiles[d]);
                                }
}

static void plan_make_uneven_first_ranks_have_more(void **state) {
        WirePlan p = { .header = { .job = 42 } };

        assert_int_equal(plan_make(1000, 8, 3, 128, &p), 0);
        assert_int_equal(p.header.job, 42);
        assert_int_equal(p.heads[0].end - p.heads[0].begin, 3);
        assert_int_equal(p.heads[1].end - p.heads[1].begin, 3);
        assert_int_equal(p.heads[2].end - p.heads[2].begin, 2);
        /* 8 tiles, the last of 104 rows */
        assert_int_equal(p.rows[0].end, 384);
        assert_int_equal(p.rows[1].end, 768);
        assert_int_equal(p.rows[2].end, 1000);
}

static void plan_make_short_sequence_uses_fewer_ranks(void **state) {
        WirePlan p;

        assert_int_equal(plan_make(200, 8, 4, 128, &p), 0);
        assert_int_equal(p.rows[0].end, 128);
        assert_int_equal(p.rows[1].end, 200);
        assert_int_equal(p.heads[1].end, 8);
        for (int i = 2; i < 4; i++) {
                assert_int_equal(p.rows[i].begin, 200);
                assert_int_equal(p.rows[i].end, 200);
                assert_int_equal(p.heads[i].begin, 8);
                assert_int_equal(p.heads[i].end, 8);
        }
}

static void plan_make_more_ranks_than_heads_last_have_rows_only(void **state) {
        WirePlan p;

        assert_int_equal(plan_make(800, 4, 8, 100, &p), 0);
        assert_int_equal(p.rows[7].end - p.rows[7].begin, 100);
        assert_int_equal(p.heads[3].end, 4);
        assert_int_equal(p.heads[7].begin, 4);
        assert_int_equal(p.heads[7].end, 4);
}

static void plan_make_bad_numbers_fail(void **state) {
        WirePlan p = { .ranks = 77 };

        assert_int_equal(plan_make(0, 8, 1, 1, &p), -EINVAL);
        assert_int_equal(plan_make(1, 0, 1, 1, &p), -EINVAL);
        assert_int_equal(plan_make(1, 8, 0, 1, &p), -EINVAL);
        assert_int_equal(plan_make(1, 8, WIRE_RANKS_MAX + 1, 1, &p), -EINVAL);
        assert_int_equal(plan_make(1, 8, 1, 0, &p), -EINVAL);
        assert_int_equal(p.ranks, 77);
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(plan_make_many_numbers_cover_exactly),
                cmocka_unit_test(plan_make_uneven_first_ranks_have_more),
                cmocka_unit_test(plan_make_short_sequence_uses_fewer_ranks),
                cmocka_unit_test(plan_make_more_ranks_than_heads_last_have_rows_only),
                cmocka_unit_test(plan_make_bad_numbers_fail),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
