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
        assert_true(p->chunks >= 1 && p->chunks <= WIRE_CHUNKS_MAX && p->chunks <= (rows + tile - 1) / tile);
        assert_true(p->kind > WIRE_PLAN_AUTO && p->kind < _WIRE_PLAN_MAX);
        assert_int_equal(p->exchange, WIRE_EXCHANGE_HOST);
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
                                                plan_make(rows[a], heads[c], ranks[b], tiles[d], &(PlanWishes){ 0 }, &p), 0);
                                        assert_valid(&p, rows[a], heads[c], ranks[b], tiles[d]);
                                }
}

static void plan_make_uneven_first_ranks_have_more(void **state) {
        WirePlan p = { .header = { .job = 42 } };

        assert_int_equal(plan_make(1000, 8, 3, 128, &(PlanWishes){ 0 }, &p), 0);
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

        assert_int_equal(plan_make(200, 8, 4, 128, &(PlanWishes){ 0 }, &p), 0);
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

        assert_int_equal(plan_make(800, 4, 8, 100, &(PlanWishes){ 0 }, &p), 0);
        assert_int_equal(p.rows[7].end - p.rows[7].begin, 100);
        assert_int_equal(p.heads[3].end, 4);
        assert_int_equal(p.heads[7].begin, 4);
        assert_int_equal(p.heads[7].end, 4);
}

static uint64_t rows_of(const WirePlan *p, uint32_t rank) {
        return p->rows[rank].end - p->rows[rank].begin;
}

static uint32_t heads_of(const WirePlan *p, uint32_t rank) {
        return p->heads[rank].end - p->heads[rank].begin;
}

static void plan_make_shares_divide_rows_and_heads(void **state) {
        static const struct {
                uint32_t n, shares[4];
                uint64_t rows[4];
                uint32_t heads[4];
        } cases[] = {
                { 2, { 10, 7 }, { 586, 411 }, { 33, 23 } },
                { 3, { 10, 10, 5 }, { 399, 399, 199 }, { 23, 22, 11 } },
                { 2, { 100, 1 }, { 987, 10 }, { 55, 1 } },
                { 2, { 1, 1000000 }, { 0, 997 }, { 0, 56 } },
        };
        WirePlan p;

        for (size_t i = 0; i < ELEMENTSOF(cases); i++) {
                PlanWishes w = { .n_shares = cases[i].n };

                memcpy(w.shares, cases[i].shares, sizeof(cases[i].shares));
                assert_int_equal(plan_make(997, 56, 4, 1, &w, &p), 0);
                assert_valid(&p, 997, 56, cases[i].n, 1); /* as many ranks as shares */
                for (uint32_t k = 0; k < cases[i].n; k++) {
                        assert_int_equal(rows_of(&p, k), cases[i].rows[k]);
                        assert_int_equal(heads_of(&p, k), cases[i].heads[k]);
                }
        }
}

/* The largest shares stay. */
static void plan_make_short_sequence_drops_small_shares(void **state) {
        const PlanWishes w = { .n_shares = 4, .shares = { 1, 5, 2, 5 } };
        WirePlan p;

        assert_int_equal(plan_make(2, 8, 4, 1, &w, &p), 0);
        assert_valid(&p, 2, 8, 4, 1);
        assert_int_equal(rows_of(&p, 0) + rows_of(&p, 2), 0);
        assert_int_equal(rows_of(&p, 1), 1);
        assert_int_equal(rows_of(&p, 3), 1);
        assert_int_equal(heads_of(&p, 1), 4);
        assert_int_equal(heads_of(&p, 3), 4);
        assert_int_equal(plan_ranks_used(&p), 2);
}

static void plan_make_wishes_are_followed_as_far_as_can_be(void **state) {
        WirePlan p;

        assert_int_equal(plan_make(1000, 8, 4, 1,
                                 &(PlanWishes){ .ranks = 3, .kind = WIRE_PLAN_KV_GATHER, .chunks = 32 }, &p),
                0);
        assert_valid(&p, 1000, 8, 3, 1);
        assert_int_equal(p.kind, WIRE_PLAN_KV_GATHER);
        assert_int_equal(p.chunks, 32);
        assert_int_equal(plan_ranks_used(&p), 3);

        /* A worker that was started anew has fewer. */
        assert_int_equal(
                plan_make(1000, 8, 2, 1, &(PlanWishes){ .ranks = 3, .n_shares = 3, .shares = { 1, 1, 8 } }, &p), 0);
        assert_valid(&p, 1000, 8, 2, 1);

        /* 3 tiles on 2 ranks: 2 chunks at most. */
        assert_int_equal(plan_make(300, 8, 2, 128, &(PlanWishes){ .chunks = 32 }, &p), 0);
        assert_int_equal(p.chunks, 2);

        /* More ranks than heads: all can attend for their rows. */
        assert_int_equal(plan_make(300, 8, 9, 1, &(PlanWishes){ 0 }, &p), 0);
        assert_int_equal(p.kind, WIRE_PLAN_KV_GATHER);
        assert_int_equal(plan_make(300, 8, 9, 1, &(PlanWishes){ .kind = WIRE_PLAN_HIDDEN_GATHER }, &p), 0);
        assert_int_equal(p.kind, WIRE_PLAN_HIDDEN_GATHER);

        /* Chunks of 8,192 rows; a large step on one rank is not done in one. */
        assert_int_equal(plan_make(75794, 56, 1, 128, &(PlanWishes){ 0 }, &p), 0);
        assert_int_equal(p.chunks, 10);
        assert_int_equal(plan_make(75794, 56, 2, 128, &(PlanWishes){ 0 }, &p), 0);
        assert_int_equal(p.chunks, 5);
        assert_int_equal(plan_make(8000, 56, 4, 128, &(PlanWishes){ 0 }, &p), 0);
        assert_int_equal(p.chunks, 4);
}

static void plan_names_there_and_back(void **state) {
        WirePlanKind kind;
        WireExchange exchange;

        for (int i = 0; i < _WIRE_PLAN_MAX; i++) {
                assert_int_equal(plan_kind_from_string(plan_kind_to_string((WirePlanKind) i), &kind), 0);
                assert_int_equal(kind, i);
        }
        for (int i = 0; i < _WIRE_EXCHANGE_MAX; i++) {
                assert_int_equal(plan_exchange_from_string(plan_exchange_to_string((WireExchange) i), &exchange), 0);
                assert_int_equal(exchange, i);
        }
        assert_int_equal(plan_kind_from_string("", &kind), -EINVAL);
        assert_int_equal(plan_exchange_from_string("nvlink", &exchange), -EINVAL);
}

static void plan_make_bad_numbers_fail(void **state) {
        WirePlan p = { .ranks = 77 };

        assert_int_equal(plan_make(0, 8, 1, 1, &(PlanWishes){ 0 }, &p), -EINVAL);
        assert_int_equal(plan_make(1, 0, 1, 1, &(PlanWishes){ 0 }, &p), -EINVAL);
        assert_int_equal(plan_make(1, 8, 0, 1, &(PlanWishes){ 0 }, &p), -EINVAL);
        assert_int_equal(plan_make(1, 8, WIRE_RANKS_MAX + 1, 1, &(PlanWishes){ 0 }, &p), -EINVAL);
        assert_int_equal(plan_make(1, 8, 1, 0, &(PlanWishes){ 0 }, &p), -EINVAL);
        assert_int_equal(plan_make(1, 8, 1, 1, &(PlanWishes){ .chunks = 33 }, &p), -EINVAL);
        assert_int_equal(plan_make(1, 8, 1, 1, &(PlanWishes){ .n_shares = 1 }, &p), -EINVAL);
        assert_int_equal(plan_make(1, 8, 1, 1, &(PlanWishes){ .kind = _WIRE_PLAN_MAX }, &p), -EINVAL);
        assert_int_equal(p.ranks, 77);
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(plan_make_many_numbers_cover_exactly),
                cmocka_unit_test(plan_make_uneven_first_ranks_have_more),
                cmocka_unit_test(plan_make_short_sequence_uses_fewer_ranks),
                cmocka_unit_test(plan_make_more_ranks_than_heads_last_have_rows_only),
                cmocka_unit_test(plan_make_shares_divide_rows_and_heads),
                cmocka_unit_test(plan_make_short_sequence_drops_small_shares),
                cmocka_unit_test(plan_make_wishes_are_followed_as_far_as_can_be),
                cmocka_unit_test(plan_names_there_and_back),
                cmocka_unit_test(plan_make_bad_numbers_fail),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
