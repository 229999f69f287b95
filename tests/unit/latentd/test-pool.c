/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <time.h>

#include "service/latentd/pool.h"
#include "service/shared/cleanup.h"

typedef struct Item Item;
typedef struct Test {
        sd_event *event;
        Pool *pool;
        pthread_t loop;
        unsigned n_done, again;
        Item *last;
} Test;

struct Item {
        Test *test;
        int value;
        atomic_int worked;
        int done;
        bool on_loop, off_loop;
        unsigned order;
};

static void setup_test(Test *t, unsigned n_threads) {
        *t = (Test){.loop = pthread_self()};
        assert_int_equal(sd_event_new(&t->event), 0);
        assert_int_equal(pool_new(t->event, n_threads, &t->pool), 0);
}

static int work(void *userdata) {
        Item *i = userdata;

        i->off_loop = !pthread_equal(pthread_self(), i->test->loop);
        atomic_fetch_add(&i->worked, 1);
        return i->value;
}

static void on_done(void *userdata, int result) {
        Item *i = userdata;

        i->done++;
        i->on_loop = pthread_equal(pthread_self(), i->test->loop) && result == i->value;
        i->order = i->test->n_done++;
}

static void pool_submit_many_runs_each_once_off_the_loop(void **state) {
        enum { N = 2000 };
        CLEANUP_FREE Item *items = calloc(N, sizeof(Item));
        Test t;

        setup_test(&t, 4);
        for (int i = 0; i < N; i++) {
                items[i] = (Item){.test = &t, .value = i - 7};
                assert_int_equal(pool_submit(t.pool, work, on_done, &items[i]), 0);
        }
        while (t.n_done < N)
                assert_true(sd_event_run(t.event, 5000000) > 0);

        for (int i = 0; i < N; i++) {
                assert_int_equal(items[i].worked, 1);
                assert_int_equal(items[i].done, 1);
                assert_true(items[i].on_loop && items[i].off_loop);
        }
        assert_null(pool_free(t.pool));
        sd_event_unref(t.event);
}

static void pool_submit_one_thread_keeps_order(void **state) {
        Item items[50];
        Test t;

        setup_test(&t, 1);
        for (unsigned i = 0; i < ELEMENTSOF(items); i++) {
                items[i] = (Item){.test = &t};
                assert_int_equal(pool_submit(t.pool, work, on_done, &items[i]), 0);
        }
        while (t.n_done < ELEMENTSOF(items))
                assert_true(sd_event_run(t.event, 5000000) > 0);
        for (unsigned i = 0; i < ELEMENTSOF(items); i++)
                assert_int_equal(items[i].order, i);
        pool_free(t.pool);
        sd_event_unref(t.event);
}

static void pool_free_finishes_queued_work_and_calls_done(void **state) {
        Item items[100];
        Test t;

        setup_test(&t, 2);
        for (unsigned i = 0; i < ELEMENTSOF(items); i++) {
                items[i] = (Item){.test = &t};
                assert_int_equal(pool_submit(t.pool, work, i % 2 ? on_done : NULL, &items[i]), 0);
        }
        pool_free(t.pool);
        for (unsigned i = 0; i < ELEMENTSOF(items); i++) {
                assert_int_equal(items[i].worked, 1);
                assert_int_equal(items[i].done, i % 2);
        }
        sd_event_unref(t.event);
}

/* A chain: each done submits the next, as the frees of a closing cache do. */
static void on_done_again(void *userdata, int result) {
        Item *i = userdata;

        on_done(userdata, result);
        if (i->test->again-- > 1)
                assert_int_equal(pool_submit(i->test->pool, work, on_done_again, i), 0);
}

static void pool_free_runs_what_done_submits(void **state) {
        Item item = {};
        Test t;

        setup_test(&t, 2);
        t.again = 5;
        item.test = &t;
        assert_int_equal(pool_submit(t.pool, work, on_done_again, &item), 0);
        pool_free(t.pool);
        assert_int_equal(item.done, 5);
        assert_int_equal(item.worked, 5);
        sd_event_unref(t.event);
}

static int held_work(void *userdata) {
        atomic_bool *held = userdata;

        for (unsigned i = 0; i < 60000 && *held; i++)
                (void) nanosleep(&(struct timespec){.tv_nsec = 1000 * 1000}, NULL);
        return *held ? -ETIMEDOUT : 0;
}

static void on_held_done(void *userdata, int result) {
        assert_int_equal(result, 0); /* nobody waited for it to give up */
}

static void pool_submit_does_not_wait_for_the_work(void **state) {
        atomic_bool held = true;
        Test t;

        setup_test(&t, 1);
        assert_int_equal(pool_submit(t.pool, held_work, on_held_done, &held), 0);
        assert_int_equal(sd_event_run(t.event, 0), 0);
        held = false;
        pool_free(t.pool);
        sd_event_unref(t.event);
}

static void pool_new_without_threads_is_refused(void **state) {
        Pool *p = NULL;
        sd_event *e = NULL;

        assert_int_equal(sd_event_new(&e), 0);
        assert_int_equal(pool_new(e, 0, &p), -EINVAL);
        assert_null(p);
        assert_null(pool_free(NULL));
        sd_event_unref(e);
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(pool_submit_many_runs_each_once_off_the_loop),
                cmocka_unit_test(pool_submit_one_thread_keeps_order),
                cmocka_unit_test(pool_free_finishes_queued_work_and_calls_done),
                cmocka_unit_test(pool_free_runs_what_done_submits),
                cmocka_unit_test(pool_submit_does_not_wait_for_the_work),
                cmocka_unit_test(pool_new_without_threads_is_refused),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
