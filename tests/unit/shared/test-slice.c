/* SPDX-License-Identifier: Apache-2.0 */
#include "service/shared/slice.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

/* As the kernel has it; runtime of an ordinary thread is its slice since Linux 6.12, 0 before. */
typedef struct Attributes {
        uint32_t size, policy;
        uint64_t flags;
        int32_t nice;
        uint32_t priority;
        uint64_t runtime, deadline, period;
} Attributes;

static Attributes get(void) {
        Attributes a = {};

        assert_int_equal(syscall(SYS_sched_getattr, 0, &a, sizeof(a), 0), 0);
        return a;
}

static void *other_thread(void *userdata) {
        *(Attributes *) userdata = get();
        return NULL;
}

static void slice_make_short_is_for_this_thread_only(void **state) {
        Attributes before = get(), after, other;
        pthread_t thread;
        int status;
        pid_t child;

        assert_int_equal(slice_make_short(), 0);
        after = get();
        assert_int_equal(after.policy, before.policy);
        assert_int_equal(after.nice, before.nice);
        if (before.runtime == 0)
                skip(); /* this kernel has no slices of threads */
        assert_int_equal(after.runtime, 100000);

        assert_int_equal(pthread_create(&thread, NULL, other_thread, &other), 0);
        assert_int_equal(pthread_join(thread, NULL), 0);
        assert_int_equal(other.runtime, before.runtime);

        child = fork();
        assert_true(child >= 0);
        if (child == 0)
                _exit(get().runtime == before.runtime ? 0 : 1);
        assert_int_equal(waitpid(child, &status, 0), child);
        assert_int_equal(status, 0);
}

static void *long_thread(void *userdata) {
        Attributes *a = userdata;
        pthread_t thread;

        if (slice_make_long() < 0 || pthread_create(&thread, NULL, other_thread, &a[1]) != 0)
                return NULL;
        (void) pthread_join(thread, NULL);
        a[0] = get();
        return NULL;
}

/* From a thread with a short one: a rank's is made by the one that reads the socket. */
static void slice_make_long_is_for_its_threads_too(void **state) {
        Attributes before = get(), found[2] = {};
        pthread_t thread;

        assert_int_equal(slice_make_short(), 0);
        assert_int_equal(pthread_create(&thread, NULL, long_thread, found), 0);
        assert_int_equal(pthread_join(thread, NULL), 0);
        assert_int_equal(found[0].size, found[1].size); /* the second one ran */
        if (before.runtime == 0)
                skip();
        assert_int_equal(found[0].runtime, 20000000);
        assert_int_equal(found[1].runtime, 20000000);
}

static void slice_make_short_leaves_other_policies_alone(void **state) {
        const struct sched_param p = {};
        Attributes before;

        assert_int_equal(sched_setscheduler(0, SCHED_BATCH, &p), 0);
        before = get();
        assert_int_equal(slice_make_short(), -EOPNOTSUPP);
        assert_int_equal(get().runtime, before.runtime);
        assert_int_equal(get().policy, SCHED_BATCH);
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(slice_make_short_is_for_this_thread_only),
                cmocka_unit_test(slice_make_long_is_for_its_threads_too),
                cmocka_unit_test(slice_make_short_leaves_other_policies_alone),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
