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
        atomic_uint memory_seen, most, least; /* most, least: tiles at a time */
        unsigned usec;                  /* a tile takes */
        uint32_t fail_chunk, fail_tile; /* with -EIO, once */
        atomic_bool failed;
        atomic_uint n_stuck;
        uint32_t slow;         /* this rank ends its first tiles when all others of two chunks are there; UINT32_MAX: none */
        atomic_uint slow_took; /* tiles that it took then */
        atomic_uint open[3], most_open, completed; /* open: of each rank, what was begun and not ended */
        uint32_t slots[3];                          /* of each rank, those of them: bits */
        atomic_uint spoilt_chunk;                   /* the first that is ended of it fails; UINT32_MAX: none */
} Scene;

static uint32_t count(const Scene *x, uint32_t from, uint32_t to) {
        uint32_t n = 0;

        for (uint32_t k = from; k < to; k++)
                for (uint32_t i = 0; i < TILES; i++)
                        n += x->made[k][i];
        return n;
}

static void be_slow(Scene *x, uint32_t n) {
        x->slow_took = n;
        while (count(x, 0, 2) < 2 * TILES - n)
                (void) usleep(1000);
}

static int make(void *userdata, const TilePlace *at, Fault *f) {
        Scene *x = userdata;

        assert_true(at->chunk < CHUNKS && at->n > 0 && at->n <= TILES && at->tile <= TILES - at->n);
        for (unsigned most = x->most; at->n > most && !atomic_compare_exchange_weak(&x->most, &most, at->n);)
                ;
        for (unsigned least = x->least; at->n < least && !atomic_compare_exchange_weak(&x->least, &least, at->n);)
                ;
        if (at->memory) {
                memset(at->memory, 1, 100);
                x->memory_seen += at->n;
        }
        if (at->chunk == x->fail_chunk && at->tile <= x->fail_tile && x->fail_tile < at->tile + at->n && !atomic_exchange(&x->failed, true))
                return fault_set(f, -EIO, FAULT_INTERNAL, "Tile %u of chunk %u broke.", at->tile, at->chunk);
        if (at->rank == x->slow && x->slow_took == 0)
                be_slow(x, at->n);
        (void) usleep(x->usec);
        for (uint32_t i = 0; i < at->n; i++)
                x->made[at->chunk][at->tile + i]++;
        return 0;
}

/* One that only begins them. */
static int begin_tiles(void *userdata, const TilePlace *at, Fault *f) {
        Scene *x = userdata;
        int r = make(userdata, at, f);
        unsigned n;

        if (r < 0)
                return r;
        assert_false(x->slots[at->rank] >> at->slot & 1);
        x->slots[at->rank] |= 1u << at->slot;
        n = ++x->open[at->rank];
        for (unsigned most = x->most_open; n > most && !atomic_compare_exchange_weak(&x->most_open, &most, n);)
                ;
        return 0;
}

static int complete_tiles(void *userdata, const TilePlace *at, Fault *f) {
        Scene *x = userdata;
        unsigned spoilt = at->chunk;

        assert_true(x->open[at->rank]-- > 0);
        assert_true(x->slots[at->rank] >> at->slot & 1);
        x->slots[at->rank] &= ~(1u << at->slot);
        x->completed += at->n;
        if (!atomic_compare_exchange_strong(&x->spoilt_chunk, &spoilt, UINT32_MAX))
                return 0;
        return fault_set(f, -EIO, FAULT_INTERNAL, "Tile %u of chunk %u ended badly.", at->tile, at->chunk);
}

static int setup(void **state) {
        Scene *x = calloc(1, sizeof(*x));

        assert_non_null(x);
        x->b = bench_new(3, 4096);
        x->job.n_ref = 1;
        x->fail_chunk = x->slow = UINT32_MAX;
        x->spoilt_chunk = UINT32_MAX;
        tile_pool_init(&x->pool, CHUNKS, TILES, make, x);
        *state = x;
        return 0;
}

static int teardown(void **state) {
        Scene *x = *state;

        (void) rank_group_end(x->b->ranks);
        assert_int_equal(x->job.n_ref, 1);
        tile_pool_done(&x->pool);
        (void) bench_free(x->b);
        free(x);
        return 0;
}

/* This chunk alone. */
static int run(Scene *x, uint32_t chunk, uint32_t ranks, Fault *f) {
        return tile_pool_run(&x->pool, &x->b->runner, x->b->ranks, &x->job, chunk, chunk + 1, UINT64_MAX >> (64 - ranks), f);
}

/* And the next one. */
static int run_on(Scene *x, uint32_t chunk, uint32_t ranks, Fault *f) {
        return tile_pool_run(&x->pool, &x->b->runner, x->b->ranks, &x->job, chunk, chunk + 2, UINT64_MAX >> (64 - ranks), f);
}

static uint32_t made_of(const Scene *x, uint32_t chunk) {
        for (uint32_t i = 0; i < TILES; i++)
                assert_true(x->made[chunk][i] <= 1);
        return count(x, chunk, chunk + 1);
}

static void await_made(const Scene *x, uint32_t chunk) {
        while (made_of(x, chunk) < TILES)
                (void) usleep(1000);
}

/* Until the pool knows of it: the tile that breaks is not yet its end. */
static void await_failure(Scene *x) {
        for (int error = 0; error == 0; (void) usleep(1000)) {
                (void) pthread_mutex_lock(&x->pool.lock);
                error = x->pool.error;
                (void) pthread_mutex_unlock(&x->pool.lock);
        }
}

/* Ranks may be at the next chunk. */
static uint32_t made_by(Scene *x, uint32_t rank) {
        uint32_t n;

        (void) pthread_mutex_lock(&x->pool.lock);
        n = x->pool.made[rank];
        (void) pthread_mutex_unlock(&x->pool.lock);
        return n;
}

static uint32_t sum_of_ranks(Scene *x) {
        return made_by(x, 0) + made_by(x, 1) + made_by(x, 2);
}

static void run_every_tile_is_made_once(void **state) {
        Scene *x = *state;
        Fault f = {};

        x->usec = 2000;
        x->pool.memory = 100;
        for (uint32_t k = 0; k < CHUNKS; k++) {
                assert_int_equal(run_on(x, k, 3, &f), 0);
                assert_int_equal(made_of(x, k), TILES);
                for (uint32_t later = k + 2; later < CHUNKS; later++)
                        assert_int_equal(made_of(x, later), 0);
        }
        assert_int_equal(x->memory_seen, CHUNKS * TILES);
        assert_int_equal(sum_of_ranks(x), CHUNKS * TILES);
}

static void set_two_steps(Scene *x) {
        memset(x->made, 0, sizeof(x->made));
        x->pool.func = begin_tiles;
        x->pool.complete = complete_tiles;
        x->usec = 1000;
}

static void await_idle(Scene *x) {
        for (uint64_t active = 1; active != 0; (void) usleep(1000)) {
                (void) pthread_mutex_lock(&x->pool.lock);
                active = x->pool.active;
                (void) pthread_mutex_unlock(&x->pool.lock);
        }
}

static uint32_t open_of(const Scene *x) {
        return x->open[0] + x->open[1] + x->open[2];
}

/* The next tiles are begun before some are ended, and a chunk is there when all of it are. */
static void run_begins_the_next_before_it_ends_some(void **state) {
        Scene *x = *state;
        Fault f = {};

        for (uint32_t ranks = 1; ranks <= 3; ranks += 2) {
                const uint32_t sum = sum_of_ranks(x);

                set_two_steps(x);
                x->completed = x->most_open = 0;
                for (uint32_t k = 0; k < CHUNKS; k++) {
                        assert_int_equal(run(x, k, ranks, &f), 0);
                        assert_int_equal(made_of(x, k), TILES);
                        assert_true(x->completed >= (k + 1) * TILES);
                        await_idle(x);
                        assert_int_equal(open_of(x), 0);
                }
                assert_int_equal(x->completed, CHUNKS * TILES);
                assert_int_equal(x->most_open, 2);
                assert_int_equal(sum_of_ranks(x) - sum, CHUNKS * TILES);
        }
}

/* An error of either half ends the run, what was begun is ended, and the chunk can be made again. */
static void run_two_halves_error_leaves_nothing_open(void **state) {
        Scene *x = *state;

        for (unsigned i = 0; i < 2; i++) {
                Fault f = {};

                set_two_steps(x);
                x->failed = false;
                assert_int_equal(run(x, 0, 1, &f), 0);
                        if (i == 0) {
                        x->fail_chunk = 1;
                        x->fail_tile = 3;
                } else
                        x->spoilt_chunk = 1;
                assert_int_equal(run(x, 1, 1, &f), -EIO);
                assert_string_equal(f.text, i == 0 ? "Tile 3 of chunk 1 broke." : "Tile 0 of chunk 1 ended badly.");
                assert_int_equal(open_of(x), 0);
                x->fail_chunk = UINT32_MAX;
                for (uint32_t k = 1; k < CHUNKS; k++) {
                        set_two_steps(x);
                        assert_int_equal(run(x, k, 1, &f), 0);
                        assert_int_equal(made_of(x, k), TILES);
                }
                assert_int_equal(open_of(x), 0);
        }
}

/* To the end of what it may: then a place is free, and the ranks begin anew. */
static void run_goes_on_behind_its_step(void **state) {
        Scene *x = *state;
        Fault f = {};

        for (uint32_t ranks = 1; ranks <= 3; ranks++) {
                memset(x->made, 0, sizeof(x->made));
                assert_int_equal(run_on(x, 0, ranks, &f), 0);
                await_made(x, 1);
                assert_int_equal(made_of(x, 2), 0);
                tile_pool_allow(&x->pool, 3);
                await_made(x, 2);
                assert_int_equal(made_of(x, 3), 0);
                assert_int_equal(run_on(x, 1, ranks, &f), 0);
                tile_pool_allow(&x->pool, 4);
                await_made(x, 3);
                assert_int_equal(run_on(x, 2, ranks, &f), 0);
                assert_int_equal(run_on(x, 3, ranks, &f), 0);
                assert_false(x->pool.runs);
                assert_int_equal(count(x, 0, CHUNKS), CHUNKS * TILES);
        }
}

static void run_one_chunk_alone_takes_none_ahead(void **state) {
        Scene *x = *state;
        Fault f = {};

        for (uint32_t k = 0; k < CHUNKS; k++) {
                assert_int_equal(run(x, k, 3, &f), 0);
                if (k + 1 < CHUNKS)
                        assert_int_equal(made_of(x, k + 1), 0);
        }
}

static void run_no_tiles_is_done(void **state) {
        Scene *x = *state;
        Fault f = {};

        x->pool.tiles = 0;
        assert_int_equal(run(x, 0, 3, &f), 0);
        x->job.cancelled = true;
        assert_int_equal(run(x, 0, 3, &f), -ECANCELED);
}

/* Others do all the rest of what may be made. */
static void run_a_slow_rank_is_not_waited_for_by_others(void **state) {
        Scene *x = *state;
        Fault f = {};

        x->slow = 1;
        assert_int_equal(run_on(x, 0, 3, &f), 0);
        assert_int_equal(run_on(x, 1, 3, &f), 0);
        if (x->slow_took > 0) /* it was there in time for one */
                assert_true(made_by(x, 0) + made_by(x, 2) >= 2 * TILES - x->slow_took);
        assert_int_equal(run_on(x, 2, 3, &f), 0);
        assert_int_equal(run_on(x, 3, 3, &f), 0);
        assert_int_equal(sum_of_ranks(x), CHUNKS * TILES);
}

/* What was made of this chunk is forgotten with the step that failed, since nobody knows what of it is whole. */
static void run_after_a_failure_begins_again(void **state) {
        Scene *x = *state;
        Fault f = {};

        x->usec = 1000;
        x->fail_chunk = 1;
        x->fail_tile = 3;
        assert_int_equal(run(x, 0, 1, &f), 0);
        assert_int_equal(run_on(x, 1, 3, &f), -EIO);
        assert_string_equal(f.text, "Tile 3 of chunk 1 broke.");
        assert_false(x->pool.runs);
        memset(x->made, 0, sizeof(x->made));
        f = (Fault){};
        assert_int_equal(run(x, 1, 3, &f), 0);
        assert_int_equal(made_of(x, 1), TILES);
        assert_int_equal(run(x, 2, 3, &f), 0);
        assert_int_equal(made_of(x, 2), TILES);
}

/* It is made again, and only then does somebody hear of it. */
static void run_a_failure_behind_the_step_is_forgotten(void **state) {
        Scene *x = *state;
        Fault f = {};

        x->fail_chunk = 1;
        x->fail_tile = 4;
        assert_int_equal(run_on(x, 0, 1, &f), 0);
        await_failure(x);
        assert_int_equal(made_of(x, 1), 4);
        memset(x->made, 0, sizeof(x->made));
        assert_int_equal(run_on(x, 1, 1, &f), 0);
        assert_int_equal(made_of(x, 1), TILES);
}

/* A step that is asked for once more. */
static void run_the_same_chunk_again_makes_all_of_it(void **state) {
        Scene *x = *state;
        Fault f = {};

        assert_int_equal(run_on(x, 0, 3, &f), 0);
        await_made(x, 1);
        (void) rank_group_end(x->b->ranks);
        memset(x->made, 0, sizeof(x->made));
        assert_int_equal(run(x, 0, 3, &f), 0);
        assert_int_equal(made_of(x, 0), TILES);
        assert_int_equal(made_of(x, 1), 0);
}

static int count_ranks(void *userdata, uint32_t rank, LkContext *context) {
        atomic_uint *n = userdata;

        (*n)++;
        return 0;
}

/* What other steps give the ranks to do comes between; then it goes on where it was. */
static void run_other_orders_come_between(void **state) {
        atomic_uint n = 0;
        Scene *x = *state;
        Fault f = {};

        x->usec = 3000;
        for (uint32_t k = 0; k < CHUNKS; k++) {
                uint32_t made;

                assert_int_equal(run_on(x, k, 3, &f), 0);
                assert_int_equal(rank_group_run(x->b->ranks,
                                         &(RankOrder){.ranks = 7, .work = count_ranks, .userdata = &n, .deadline_usec = 60000000}),
                        0);
                assert_int_equal(n, 3 * (k + 1));
                assert_false(x->pool.runs);
                assert_int_equal(x->job.n_ref, 1);
                made = count(x, 0, CHUNKS);
                (void) usleep(10000);
                assert_int_equal(count(x, 0, CHUNKS), made);
        }
        for (uint32_t k = 0; k < CHUNKS; k++)
                assert_int_equal(made_of(x, k), TILES);
}

static void run_cancelled_makes_nothing(void **state) {
        Scene *x = *state;
        Fault f = {};

        x->job.cancelled = true;
        assert_int_equal(run(x, 0, 3, &f), -ECANCELED);
        assert_int_equal(made_of(x, 0), 0);
        assert_false(x->pool.runs);
}

/* The ranks let go of the job by themselves. */
static void run_cancelled_behind_the_step_ends(void **state) {
        Scene *x = *state;
        Fault f = {};

        x->usec = 10000;
        assert_int_equal(run_on(x, 0, 3, &f), 0);
        x->job.cancelled = true;
        for (uint64_t active = 1; active != 0; (void) usleep(1000)) {
                (void) pthread_mutex_lock(&x->pool.lock);
                active = x->pool.active;
                (void) pthread_mutex_unlock(&x->pool.lock);
        }
        if (made_of(x, 1) == TILES) /* all of it was there before this thread came to cancel */
                return;
        assert_int_equal(run_on(x, 1, 3, &f), -ECANCELED);
        assert_int_equal(x->job.n_ref, 1);
}

static atomic_int behind_result;

static void first_chunk(void *userdata, RankGroup *g, Job *j, uint32_t step) {
        Scene *x = userdata;
        Fault f = {};

        behind_result = tile_pool_run(&x->pool, &x->b->runner, g, j, 0, 2, 3, &f) + 1;
}

/* Without a next step: the steps' thread lets go of what has come to its end, and of what never will in time. */
static void run_behind_the_last_step_lets_go_of_the_job(void **state) {
        Scene *x = *state;
        Fault f = {};

        for (unsigned cancels = 0; cancels < 2; cancels++) {
                RankGroup *g;

                x->usec = cancels ? 2000 : 0;
                x->job.cancelled = false;
                behind_result = 0;
                x->pool.current = UINT32_MAX;
                assert_int_equal(rank_group_new(&x->b->ops, 2, 2, NULL, first_chunk, x, &g, &f), 0);
                assert_int_equal(rank_group_queue(g, &x->job, 0), 0);
                while (behind_result == 0)
                        (void) usleep(1000);
                assert_int_equal(behind_result, 1);
                x->job.cancelled = cancels > 0;
                while (x->job.n_ref > 1)
                        (void) usleep(1000);
                (void) rank_group_free(g);
        }
}

/* With the group. */
static void run_behind_a_step_ends_with_the_ranks(void **state) {
        Scene *x = *state;
        Fault f = {};

        x->usec = 2000;
        assert_int_equal(run_on(x, 0, 3, &f), 0);
        bench_set_ranks(x->b, 2);
        assert_false(x->pool.runs);
        assert_int_equal(x->job.n_ref, 1);
        assert_int_equal(run_on(x, 1, 2, &f), 0);
        assert_int_equal(made_of(x, 1), TILES);
}

/* As many at a time as give every rank a turn, at most the batch; of several ranks less and less towards the end. */
static void run_takes_several_at_a_time(void **state) {
        static const struct {
                uint32_t batch, ranks, most, least;
        } cases[] = {{1, 3, 1, 1}, {2, 1, 2, 1}, {3, 1, 3, 2}, {4, 1, 3, 2}, {9, 1, 5, 5}, {9, 2, 3, 1}, {9, 3, 2, 1}, {2, 2, 2, 1}};
        Scene *x = *state;
        Fault f = {};

        for (size_t i = 0; i < ELEMENTSOF(cases); i++) {
                memset(x->made, 0, sizeof(x->made));
                x->most = 0;
                x->least = TILES;
                x->pool.batch = cases[i].batch;
                for (uint32_t k = 0; k < CHUNKS; k++) {
                        assert_int_equal(run(x, k, cases[i].ranks, &f), 0);
                        assert_int_equal(made_of(x, k), TILES);
                }
                assert_int_equal(x->most, cases[i].most);
                assert_int_equal(x->least, cases[i].least);
        }
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
                TEST(run_begins_the_next_before_it_ends_some),
                TEST(run_two_halves_error_leaves_nothing_open),
                TEST(run_goes_on_behind_its_step),
                TEST(run_one_chunk_alone_takes_none_ahead),
                TEST(run_no_tiles_is_done),
                TEST(run_a_slow_rank_is_not_waited_for_by_others),
                TEST(run_after_a_failure_begins_again),
                TEST(run_a_failure_behind_the_step_is_forgotten),
                TEST(run_the_same_chunk_again_makes_all_of_it),
                TEST(run_other_orders_come_between),
                TEST(run_cancelled_makes_nothing),
                TEST(run_cancelled_behind_the_step_ends),
                TEST(run_behind_the_last_step_lets_go_of_the_job),
                TEST(run_behind_a_step_ends_with_the_ranks),
                TEST(run_takes_several_at_a_time),
                TEST(run_a_rank_that_hangs_is_named),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
