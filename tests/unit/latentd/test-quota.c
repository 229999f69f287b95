/* SPDX-License-Identifier: Apache-2.0 */
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <setjmp.h>

#include <cmocka.h>

#include <errno.h>
#include <string.h>

#include "service/latentd/job.h"
#include "service/latentd/model.h"
#include "service/latentd/quota.h"
#include "service/latentd/remains.h"
#include "service/latentd/session.h"
#include "service/shared/cleanup.h"

typedef struct Lists {
        Config config;
        Manager m;
        Session sessions[1024];
        Job jobs[4];
        Model models[70];
} Lists;

static int setup(void **state) {
        Lists *l = calloc(1, sizeof(*l));

        assert_non_null(l);
        l->config = (Config){ .sessions_per_user = 2, .jobs_per_user = 2, .arena_bytes_per_user = 1000 };
        l->m.config = &l->config;
        TAILQ_INIT(&l->m.sessions);
        TAILQ_INIT(&l->m.remains);
        TAILQ_INIT(&l->m.jobs);
        TAILQ_INIT(&l->m.unfinished);
        TAILQ_INIT(&l->m.models);
        *state = l;
        return 0;
}

static int teardown(void **state) {
        free(*state);
        return 0;
}

static void add_session(Lists *l, unsigned i, uid_t uid, SessionState s) {
        l->sessions[i] = (Session){ .uid = uid, .state = s, .input_bytes = 100, .output_bytes = 300 };
        TAILQ_INSERT_TAIL(&l->m.sessions, &l->sessions[i], entry);
}

static void session_bytes_of_one_user_are_counted(void **state) {
        Lists *l = *state;
        Fault f = {};

        assert_int_equal(quota_check_session(&l->m, 1, 1000, &f), 0);
        assert_int_equal(quota_check_session(&l->m, 1, 1001, &f), -EDQUOT);
        assert_int_equal(quota_check_session(&l->m, 1, UINT64_MAX, &f), -EDQUOT);
        add_session(l, 0, 1, SESSION_CLOSED); /* its memory is still there */
        assert_int_equal(quota_check_session(&l->m, 1, 600, &f), 0);
        f = (Fault){};
        assert_int_equal(quota_check_session(&l->m, 1, 601, &f), -EDQUOT);
        assert_string_equal(f.name, FAULT_LIMIT);
        assert_non_null(strstr(f.text, "601"));
        assert_non_null(strstr(f.text, "400"));
        assert_non_null(strstr(f.text, "1000"));
        assert_int_equal(quota_check_session(&l->m, 2, 1000, &f), 0); /* another user */
}

static void session_number_per_user_and_in_all_is_limited(void **state) {
        Lists *l = *state;
        Fault f = {};

        add_session(l, 0, 1, SESSION_OPEN);
        assert_int_equal(quota_check_session(&l->m, 1, 1, &f), 0);
        add_session(l, 1, 1, SESSION_OPENING);
        assert_int_equal(quota_check_session(&l->m, 1, 1, &f), -EDQUOT);
        assert_int_equal(quota_check_session(&l->m, 2, 1, &f), 0);
        for (unsigned i = 2; i < ELEMENTSOF(l->sessions); i++)
                add_session(l, i, 100 + i, SESSION_OPEN);
        assert_int_equal(quota_check_session(&l->m, 2, 1, &f), -EDQUOT);
}

static void session_memory_that_clients_keep_is_counted(void **state) {
        Remains x = { .uid = 1, .input_bytes = 100, .output_bytes = 300 };
        Remains y = { .uid = 1, .input_bytes = 1, .output_bytes = 1 };
        Lists *l = *state;
        Fault f = {};

        TAILQ_INSERT_TAIL(&l->m.remains, &x, entry);
        assert_int_equal(quota_check_session(&l->m, 1, 600, &f), 0);
        assert_int_equal(quota_check_session(&l->m, 1, 601, &f), -EDQUOT);
        assert_string_equal(f.name, FAULT_LIMIT);
        assert_non_null(strstr(f.text, "400"));
        assert_non_null(strstr(f.text, "1 of them are closed"));
        assert_non_null(strstr(f.text, "descriptors"));
        assert_int_equal(quota_check_session(&l->m, 2, 1000, &f), 0);
        TAILQ_INSERT_TAIL(&l->m.remains, &y, entry);
        f = (Fault){};
        assert_int_equal(quota_check_session(&l->m, 1, 1, &f), -EDQUOT);
        assert_non_null(strstr(f.text, "SessionsPerUser="));
        assert_non_null(strstr(f.text, "2 of them are closed"));
}

static void job_number_counts_unfinished_of_the_user(void **state) {
        static const JobState states[] = { JOB_QUEUED, JOB_DONE, JOB_CANCELLED, JOB_CANCELLING };
        Lists *l = *state;
        Fault f = {};

        for (unsigned i = 0; i < ELEMENTSOF(states); i++) {
                assert_int_equal(quota_check_job(&l->m, 1, &f), 0);
                l->jobs[i] = (Job){ .uid = 1, .state = states[i] };
                TAILQ_INSERT_TAIL(&l->m.jobs, &l->jobs[i], entry);
                if (!job_is_finished(&l->jobs[i]))
                        TAILQ_INSERT_TAIL(&l->m.unfinished, &l->jobs[i], unfinished_entry);
        }
        assert_int_equal(quota_check_job(&l->m, 1, &f), -EDQUOT);
        assert_string_equal(f.name, FAULT_LIMIT);
        assert_int_equal(quota_check_job(&l->m, 2, &f), 0);
}

static Model *add_model(Lists *l, unsigned i, uid_t uid, ModelState state, uint64_t files) {
        l->models[i] = (Model){ .manager = &l->m, .is_private = true, .uid = uid, .state = state, .files_hash = files };
        TAILQ_INSERT_TAIL(&l->m.models, &l->models[i], entry);
        return &l->models[i];
}

static void models_of_the_same_files_count_once(void **state) {
        static const ModelState states[] = { MODEL_DEFERRED, MODEL_LOADING, MODEL_READY };
        Model *same, *other, *hers, *shared;
        Lists *l = *state;
        Fault f = {};

        for (unsigned i = 0; i < MODELS_PRIVATE_MAX - 1; i++)
                (void) add_model(l, i, 1, states[i % 3], i);
        shared = add_model(l, 63, 1, MODEL_READY, 63);
        shared->is_private = false;
        (void) add_model(l, 64, 1, MODEL_FAILED, 64);
        same = add_model(l, 65, 1, MODEL_NEW, 5);
        other = add_model(l, 66, 1, MODEL_NEW, 66);
        hers = add_model(l, 67, 2, MODEL_NEW, 67);
        assert_int_equal(quota_check_model(other, &f), 0);
        (void) add_model(l, 68, 1, MODEL_READY, 5);
        assert_int_equal(quota_check_model(other, &f), 0);
        (void) add_model(l, 69, 1, MODEL_READY, 69);
        assert_int_equal(quota_check_model(other, &f), -EDQUOT);
        assert_string_equal(f.name, FAULT_LIMIT);
        assert_non_null(strstr(f.text, "64 different models"));
        assert_int_equal(quota_check_model(same, &f), 0);
        assert_int_equal(quota_check_model(hers, &f), 0);
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test_setup_teardown(session_bytes_of_one_user_are_counted, setup, teardown),
                cmocka_unit_test_setup_teardown(
                        session_number_per_user_and_in_all_is_limited, setup, teardown),
                cmocka_unit_test_setup_teardown(
                        session_memory_that_clients_keep_is_counted, setup, teardown),
                cmocka_unit_test_setup_teardown(job_number_counts_unfinished_of_the_user, setup, teardown),
                cmocka_unit_test_setup_teardown(models_of_the_same_files_count_once, setup, teardown),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
