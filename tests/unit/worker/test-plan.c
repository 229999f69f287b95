/* SPDX-License-Identifier: Apache-2.0 */
#include "service/worker/plan.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#define ROWS 407
#define HEADS 8

/* Three ranks, the last with few rows and no head. */
static WirePlan good_plan(void) {
        WireMessage m;

        wire_init(&m, WIRE_PLAN, 1, 2, 0);
        m.plan.ranks = 3;
        m.plan.row_tile = 128;
        m.plan.chunks = 2;
        m.plan.kind = WIRE_PLAN_QKV_ALL_TO_ALL;
        m.plan.exchange = WIRE_EXCHANGE_HOST;
        m.plan.rows[0] = (WireRange){0, 256};
        m.plan.rows[1] = (WireRange){256, 384};
        m.plan.rows[2] = (WireRange){384, ROWS};
        m.plan.heads[0] = (WireHeads){0, 5};
        m.plan.heads[1] = (WireHeads){5, 8};
        m.plan.heads[2] = (WireHeads){8, 8};
        return m.plan;
}

static void expect_refused(const WirePlan *w, const char *part) {
        Plan *p = NULL;
        Fault f = {};

        assert_int_equal(plan_new(w, ROWS, HEADS, 3, &p, &f), -EINVAL);
        assert_null(p);
        assert_string_equal(f.name, FAULT_INTERNAL);
        if (!strstr(f.text, part))
                fail_msg("expected \"%s\" in: %s", part, f.text);
}

static void plan_new_good_is_copied(void **state) {
        WirePlan w = good_plan();
        Fault f = {};
        Plan *p;

        assert_int_equal(plan_new(&w, ROWS, HEADS, 3, &p, &f), 0);
        memset(&w, 0xff, sizeof(w));
        assert_int_equal(p->h3.kind, H3_PLAN_QKV_ALL_TO_ALL);
        assert_int_equal(p->h3.ranks, 3);
        assert_int_equal(p->h3.row_tile, 128);
        assert_int_equal(p->h3.chunks, 2);
        assert_int_equal(p->h3.rows[1].begin, 256);
        assert_int_equal(p->h3.rows[1].end, 384);
        assert_int_equal(p->h3.rows[2].end, ROWS);
        assert_int_equal(p->h3.heads[0].end, 5);
        assert_int_equal(p->h3.heads[2].begin, 8);
        assert_int_equal(p->h3.heads[2].end, 8);
        assert_null(plan_free(p));
        assert_null(plan_free(NULL));
}

static void plan_new_empty_ranks_accepted(void **state) {
        WirePlan w = good_plan();
        Fault f = {};
        Plan *p;

        /* Only the last rank has rows, only the first has heads. */
        w.rows[0] = w.rows[1] = (WireRange){0, 0};
        w.rows[2] = (WireRange){0, ROWS};
        w.heads[0] = (WireHeads){0, 8};
        w.heads[1] = w.heads[2] = (WireHeads){8, 8};
        assert_int_equal(plan_new(&w, ROWS, HEADS, 3, &p, &f), 0);
        (void) plan_free(p);

        /* Rows end early, the ranks behind have none. */
        w.rows[0] = (WireRange){0, ROWS};
        w.rows[1] = w.rows[2] = (WireRange){ROWS, ROWS};
        assert_int_equal(plan_new(&w, ROWS, HEADS, 3, &p, &f), 0);
        (void) plan_free(p);
}

static void plan_new_fewer_ranks_than_there_are(void **state) {
        WirePlan w = good_plan();
        Fault f = {};
        Plan *p;

        assert_int_equal(plan_new(&w, ROWS, HEADS, 8, &p, &f), 0);
        assert_int_equal(p->h3.ranks, 3);
        (void) plan_free(p);
}

static void plan_new_wrong_numbers_refused(void **state) {
        WirePlan w;
        Plan *p;

        w = good_plan();
        w.ranks = 4;
        expect_refused(&w, "for 4 ranks, this worker has 3");
        w.ranks = 2; /* may be, but then the third has no part */
        expect_refused(&w, "entry for rank 2 of 2");
        w.ranks = 0;
        expect_refused(&w, "for 0 ranks");
        w.ranks = WIRE_RANKS_MAX + 1;
        expect_refused(&w, "for 65 ranks");
        assert_int_equal(plan_new(&w, ROWS, HEADS, WIRE_RANKS_MAX + 1, &p, NULL), -EINVAL);

        w = good_plan();
        w.row_tile = 0;
        expect_refused(&w, "row tile of 0");
        w = good_plan();
        w.chunks = 0;
        expect_refused(&w, "0 chunks");
        w.chunks = WIRE_CHUNKS_MAX + 1;
        expect_refused(&w, "33 chunks");
        w = good_plan();
        w.kind = WIRE_PLAN_AUTO;
        expect_refused(&w, "kind 0");
        w.kind = _WIRE_PLAN_MAX;
        expect_refused(&w, "kind 4");
        w = good_plan();
        w.exchange = WIRE_EXCHANGE_AUTO;
        expect_refused(&w, "exchange 0");
        w = good_plan();
        w.rows[3].end = 1;
        expect_refused(&w, "entry for rank 3");
        w = good_plan();
        w.heads[WIRE_RANKS_MAX - 1].begin = 1;
        expect_refused(&w, "entry for rank 63");
}

static void plan_new_wrong_rows_refused(void **state) {
        WirePlan w;

        w = good_plan();
        w.rows[1].begin = 128; /* overlap */
        expect_refused(&w, "rank 1 the rows [128, 384)");
        w = good_plan();
        w.rows[1].begin = 257; /* hole */
        expect_refused(&w, "rank 1 the rows");
        w = good_plan();
        w.rows[0].begin = 1;
        expect_refused(&w, "rank 0 the rows");
        w = good_plan();
        w.rows[1].end = 128; /* backwards */
        expect_refused(&w, "rank 1 the rows");
        w = good_plan();
        w.rows[2].end = ROWS + 1;
        expect_refused(&w, "rank 2 the rows");
        w.rows[2].end = UINT64_MAX;
        expect_refused(&w, "rank 2 the rows");
        w.rows[2].end = ROWS - 23; /* a multiple of the tile, but not the end */
        expect_refused(&w, "covers 384 of 407 rows");
        w = good_plan();
        w.rows[0].end = w.rows[1].begin = 255;
        expect_refused(&w, "cuts the rows at 255");
}

static void plan_new_wrong_heads_refused(void **state) {
        WirePlan w;

        w = good_plan();
        w.heads[1].end = 7;
        expect_refused(&w, "rank 2 the heads [8, 8)");
        w.heads[2] = (WireHeads){7, 7};
        expect_refused(&w, "covers 7 of 8 heads");
        w = good_plan();
        w.heads[2].end = 9;
        expect_refused(&w, "rank 2 the heads");
        w = good_plan();
        w.heads[0] = (WireHeads){5, 0};
        expect_refused(&w, "rank 0 the heads");
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(plan_new_good_is_copied),
                cmocka_unit_test(plan_new_empty_ranks_accepted),
                cmocka_unit_test(plan_new_fewer_ranks_than_there_are),
                cmocka_unit_test(plan_new_wrong_numbers_refused),
                cmocka_unit_test(plan_new_wrong_rows_refused),
                cmocka_unit_test(plan_new_wrong_heads_refused),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
