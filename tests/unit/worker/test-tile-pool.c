/* SPDX-License-Identifier: Apache-2.0 */
#include "service/worker/tile-pool.h"

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

#include "service/shared/cleanup.h"
#include "tests/unit/worker/coder-bench.h"

#define CHUNKS 4
#define TILES 5

typedef struct Scene {
        CoderBench *b;
        Job job;
        TilePool pool;
        atomic_uint made[CHUNKS][TILES];
        atomic_uint memory_seen, most; /* most: tiles at a time */
        unsigned usec;                  /* a tile takes */
        uint32_t fail_chunk, fail_tile; /* with -EIO, once */
        atomic_bool failed;
        atomic_uint n_stuck;
} Scene;

static int make(void *userdata, const TilePlace *at, Fault *f) {
        Scene *x = userdata;

        assert_true(at->chunk < CHUNKS && at->n > 0 && at->n <= TILES && at->tile <= TILES - at->n);
        if (at->n > x->most)
                x->most = at->n;
        if (at->memory) {
                memset(at->memory, 1, 100);
                x->memory_seen++;
        }
        if (at->chunk == x->fail_chunk && at->tile <= x->fail_tile && x->fail_tile < at->tile + at->n && !atomic_exchange(&x->failed, true))
                return fault_set(f, -EIO, FAULT_INTERNAL, "Tile %u of chunk %u broke.", at->tile, at->chunk);
        (void) usleep(x->usec);
        for (uint32_t i = 0; i < at->n; i++)
                x->made[at->chunk][at->tile + i]++;
        return 0;
}

static int setup(void **state) {
        Scene *x = calloc(1, sizeof(*x));

        assert_non_null(x);
        x->b = bench_new(3, 4096);
        x->fail_chunk = UINT32_MAX;
        tile_pool_init(&x->pool, CHUNKS, TILES, make, x);
        *state = x;
        return 0;
}

static int teardown(void **state) {
        Scene *x = *state;

        tile_pool_done(&x->pool);
        (void) bench_free(x->b);
        free(x);
        return 0;
}

static int run(Scene *x, uint32_t chunk, uint32_t ranks, Fault *f) {
        return tile_pool_run(&x->pool, &x->b->runner, x->b->ranks, &x->job, chunk, ranks, f);
}

static uint32_t made_of(const Scene *x, uint32_t chunk) {
        uint32_t n = 0;

        for (uint32_t i = 0; i < TILES; i++) {
                assert_true(x->made[chunk][i] <= 1);
                n += x->made[chunk][i];
        }
        return n;
}

static void run_every_tile_is_made_once(void **state) {
        Scene *x = *state;
        Fault f = {};

        x->usec = 2000;
        x->pool.memory = 100;
        for (uint32_t k = 0; k < CHUNKS; k++) {
                assert_int_equal(run(x, k, 3, &f), 0);
                assert_int_equal(made_of(x, k), TILES);
                for (uint32_t later = k + 2; later < CHUNKS; later++)
                        assert_int_equal(made_of(x, later), 0);
        }
        assert_int_equal(x->memory_seen, CHUNKS * TILES);
}

/* Three ranks and five tiles: one rank is free while two make the last ones. It takes one tile ahead, not
 * more. */
static void run_a_free_rank_takes_one_tile_ahead(void **state) {
        Scene *x = *state;
        Fault f = {};

        x->usec = 30000;
        assert_int_equal(run(x, 0, 3, &f), 0);
        assert_true(made_of(x, 1) >= 1 && made_of(x, 1) <= 2);
        assert_int_equal(x->pool.ahead, made_of(x, 1));
        assert_int_equal(x->pool.ahead_chunk, 1);
}

static void run_one_rank_takes_none_ahead(void **state) {
        Scene *x = *state;
        Fault f = {};

        for (uint32_t k = 0; k < CHUNKS; k++) {
                assert_int_equal(run(x, k, 1, &f), 0);
                if (k + 1 < CHUNKS)
                        assert_int_equal(made_of(x, k + 1), 0);
        }
}

/* What was made ahead is forgotten with the step that failed, since nobody knows what of it is whole. */
static void run_after_a_failure_begins_again(void **state) {
        Scene *x = *state;
        Fault f = {};

        x->usec = 1000;
        x->fail_chunk = 1;
        x->fail_tile = 3;
        assert_int_equal(run(x, 0, 1, &f), 0);
        assert_int_equal(run(x, 1, 3, &f), -EIO);
        assert_string_equal(f.text, "Tile 3 of chunk 1 broke.");
        memset(x->made, 0, sizeof(x->made));
        f = (Fault){};
        assert_int_equal(run(x, 1, 3, &f), 0);
        assert_int_equal(made_of(x, 1), TILES);
        assert_int_equal(run(x, 2, 3, &f), 0);
        assert_int_equal(made_of(x, 2), TILES);
}

/* Also one that was made ahead, on its own step's account. */
static void run_tiles_ahead_of_another_chunk_do_not_count(void **state) {
        Scene *x = *state;
        Fault f = {};

        x->usec = 20000;
        assert_int_equal(run(x, 0, 3, &f), 0);
        assert_true(x->pool.ahead > 0);
        memset(x->made, 0, sizeof(x->made));
        assert_int_equal(run(x, 0, 3, &f), 0); /* the step is asked for once more */
        assert_int_equal(made_of(x, 0), TILES);
}

static void run_cancelled_makes_nothing(void **state) {
        Scene *x = *state;
        Fault f = {};

        x->job.cancelled = true;
        assert_int_equal(run(x, 0, 3, &f), -ECANCELED);
        assert_int_equal(made_of(x, 0), 0);
}

/* As many at a time as give every rank a turn, at most the batch. */
static void run_takes_several_at_a_time(void **state) {
        static const struct {
                uint32_t batch, ranks, most;
        } cases[] = {{1, 3, 1}, {2, 1, 2}, {3, 1, 3}, {4, 1, 3}, {9, 1, 5}, {9, 2, 3}, {9, 3, 2}, {2, 2, 2}};
        Scene *x = *state;
        Fault f = {};

        for (size_t i = 0; i < ELEMENTSOF(cases); i++) {
                memset(x->made, 0, sizeof(x->made));
                x->most = 0;
                x->pool.batch = cases[i].batch;
                x->pool.ahead_chunk = 0;
                x->pool.ahead = 0;
                for (uint32_t k = 0; k < CHUNKS; k++) {
                        assert_int_equal(run(x, k, cases[i].ranks, &f), 0);
                        assert_int_equal(made_of(x, k), TILES);
                }
                assert_int_equal(x->most, cases[i].most);
        }
}

static void ahead_makes_some_of_the_next_chunk(void **state) {
        Scene *x = *state;
        Fault f = {};

        x->pool.batch = 2;
        for (uint32_t k = 0; k < CHUNKS; k++) {
                assert_int_equal(run(x, k, 1, &f), 0);
                assert_int_equal(made_of(x, k), TILES);
                tile_pool_ahead(&x->pool, &x->b->runner, x->b->ranks, &x->job, 1);
                if (k + 1 < CHUNKS)
                        assert_int_equal(made_of(x, k + 1), 2);
        }
}

/* It is made again, and only then does somebody hear of it. */
static void ahead_failure_is_forgotten(void **state) {
        Scene *x = *state;
        Fault f = {};

        x->pool.batch = 2;
        x->fail_chunk = 1;
        assert_int_equal(run(x, 0, 1, &f), 0);
        tile_pool_ahead(&x->pool, &x->b->runner, x->b->ranks, &x->job, 1);
        assert_true(x->failed);
        assert_int_equal(made_of(x, 1), 0);
        assert_int_equal(run(x, 1, 1, &f), 0);
        assert_int_equal(made_of(x, 1), TILES);
}

static void note_stuck(void *userdata, const Job *j, uint32_t step, const Fault *f) {
        Scene *x = userdata;

        assert_non_null(strstr(f->text, "did not answer"));
        assert_int_equal(step, CHUNKS - 1);
        x->n_stuck++;
}

/* Of the last chunk: there is nothing to take ahead. */
static void run_a_rank_that_hangs_is_named(void **state) {
        Scene *x = *state;
        Fault f = {};

        x->usec = 300000;
        x->b->runner.on_stuck = note_stuck;
        x->b->runner.userdata = x;
        x->b->runner.deadline_usec = 50000;
        assert_int_equal(run(x, CHUNKS - 1, 3, &f), 0); /* it ended after all */
        assert_int_equal(x->n_stuck, 1);
}

#define TEST(function) cmocka_unit_test_setup_teardown(function, setup, teardown)

int main(void) {
        const struct CMUnitTest tests[] = {
                TEST(run_every_tile_is_made_once),
                TEST(run_a_free_rank_takes_one_tile_ahead),
                TEST(run_one_rank_takes_none_ahead),
                TEST(run_after_a_failure_begins_again),
                TEST(run_tiles_ahead_of_another_chunk_do_not_count),
                TEST(run_cancelled_makes_nothing),
                TEST(run_takes_several_at_a_time),
                TEST(ahead_makes_some_of_the_next_chunk),
                TEST(ahead_failure_is_forgotten),
                TEST(run_a_rank_that_hangs_is_named),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
