/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdatomic.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <unistd.h>

#include "service/latentd/file-jobs.h"
#include "service/shared/cleanup.h"

#define STALL_USEC 100000

typedef struct Item {
        int fd; /* its work ends when a byte or the end comes from here; negative: at once */
        int value, result;
        unsigned n_stuck, n_done;
        FileJobs *more; /* done submits another here */
} Item;

typedef struct Test {
        sd_event *event;
        FileJobs *jobs;
        int pipe[2];
} Test;

static int setup_with(void **state, uint64_t stall_usec) {
        Test *t = calloc(1, sizeof(*t));

        if (!t || pipe2(t->pipe, O_CLOEXEC) < 0 || sd_event_new(&t->event) < 0 || file_jobs_new(t->event, stall_usec, &t->jobs) < 0)
                return -1;
        *state = t;
        return 0;
}

static int setup(void **state) {
        return setup_with(state, STALL_USEC);
}

/* For what must not be taken for stuck on a machine that is busy. */
static int setup_patient(void **state) {
        return setup_with(state, 60 * UINT64_C(1000000));
}

static int teardown(void **state) {
        Test *t = *state;

        cleanup_closep(&t->pipe[1]);
        t->jobs = file_jobs_free(t->jobs);
        cleanup_closep(&t->pipe[0]);
        sd_event_unref(t->event);
        free(t);
        return 0;
}

static atomic_uint n_read;

static int work(void *userdata) {
        Item *i = userdata;
        int r = 0;
        char c;

        if (i->fd >= 0) {
                r = read(i->fd, &c, 1) < 0 ? -errno : 0;
                n_read++;
        }
        return r < 0 ? r : i->value;
}

static void on_stuck(void *userdata) {
        Item *i = userdata;

        assert_int_equal(i->n_done, 0);
        i->n_stuck++;
}

static void on_done(void *userdata, int result) {
        Item *i = userdata;

        i->n_done++;
        i->result = result;
        if (i->more) {
                FileJobs *j = STEAL_PTR(i->more);

                assert_int_equal(file_jobs_submit(j, work, on_stuck, on_done, i), 0);
        }
}

static void submit(Test *t, Item *i) {
        assert_int_equal(file_jobs_submit(t->jobs, work, on_stuck, on_done, i), 0);
}

#define RUN_UNTIL(t, condition)                                                 \
        while (!(condition))                                                    \
                assert_true(sd_event_run((t)->event, 60000000) > 0)

static void submit_many_each_is_done_once(void **state) {
        Test *t = *state;
        Item items[200];
        unsigned n = 0;

        for (int k = 0; k < 200; k++) {
                items[k] = (Item){.fd = -1, .value = k - 100};
                submit(t, &items[k]);
        }
        while (n < 200) {
                assert_true(sd_event_run(t->event, 60000000) > 0);
                n = 0;
                for (int k = 0; k < 200; k++)
                        n += items[k].n_done;
        }
        for (int k = 0; k < 200; k++) {
                assert_int_equal(items[k].n_done, 1);
                assert_int_equal(items[k].n_stuck, 0);
                assert_int_equal(items[k].result, k - 100);
        }
}

/* More of them than run at a time: others do not wait for what never ends, and it is told of, then and at its end. */
static void submit_stuck_ones_hold_up_no_other(void **state) {
        Test *t = *state;
        Item stuck[20], quick = {.fd = -1, .value = 7};
        unsigned n_stuck = 0, n_done = 0;

        for (int k = 0; k < 20; k++) {
                stuck[k] = (Item){.fd = t->pipe[0], .value = 1};
                submit(t, &stuck[k]);
        }
        submit(t, &quick);
        RUN_UNTIL(t, quick.n_done == 1);
        assert_int_equal(quick.result, 7);
        while (n_stuck < 20) {
                assert_true(sd_event_run(t->event, 60000000) > 0);
                n_stuck = 0;
                for (int k = 0; k < 20; k++)
                        n_stuck += stuck[k].n_stuck;
        }
        for (int k = 0; k < 20; k++)
                assert_int_equal(stuck[k].n_done, 0);

        assert_int_equal(write(t->pipe[1], "01234567890123456789", 20), 20);
        while (n_done < 20) {
                assert_true(sd_event_run(t->event, 60000000) > 0);
                n_done = 0;
                for (int k = 0; k < 20; k++)
                        n_done += stuck[k].n_done;
        }
        for (int k = 0; k < 20; k++) {
                assert_int_equal(stuck[k].n_stuck, 1);
                assert_int_equal(stuck[k].n_done, 1);
                assert_int_equal(stuck[k].result, 1);
        }
}

/* The end waits for what runs, says no to what waits, and leaves what is stuck. */
static void free_ends_all_but_the_stuck_ones(void **state) {
        static FileJobs *kept; /* by threads */
        static Item stuck[9], queued = {.fd = -1, .value = 3}; /* a thread has them after this function */
        Test *t = *state;
        Item quick = {.fd = -1, .value = 5, .more = t->jobs};

        kept = t->jobs;
        for (int k = 0; k < 9; k++) {
                stuck[k] = (Item){.fd = t->pipe[0]};
                if (k < 7)
                        submit(t, &stuck[k]);
        }
        submit(t, &quick); /* the eighth */
        submit(t, &stuck[7]);
        submit(t, &queued);
        t->jobs = file_jobs_free(t->jobs);

        assert_int_equal(quick.n_done, 2);
        assert_int_equal(quick.result, -ECANCELED);
        assert_int_equal(queued.n_done, 1);
        assert_int_equal(queued.result, -ECANCELED);
        assert_int_equal(stuck[7].n_done, 1);
        for (int k = 0; k < 7; k++) {
                assert_int_equal(stuck[k].n_stuck, 1);
                assert_int_equal(stuck[k].n_done, 0);
        }
        assert_non_null(kept);
        n_read = 0;
        cleanup_closep(&t->pipe[1]);
        while (n_read < 7) /* the pipe is theirs until then */
                (void) usleep(1000);
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test_setup_teardown(submit_many_each_is_done_once, setup_patient, teardown),
                cmocka_unit_test_setup_teardown(submit_stuck_ones_hold_up_no_other, setup, teardown),
                cmocka_unit_test_setup_teardown(free_ends_all_but_the_stuck_ones, setup, teardown),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
