/* SPDX-License-Identifier: Apache-2.0 */
/* The op table, contexts, memory and the thread pool. */

#include "tests/unit/kernels/kernels-test.h"

#include <sched.h>
#include <stdatomic.h>

#include "kernels/cpu/context.h"
#include "kernels/cpu/threads.h"

static void ops_table_is_complete(void **state) {
        for (unsigned i = 0; i < ISAS; i++) {
                const LkOps *o = lk_cpu_ops(all_isas[i]);

                if (!o)
                        continue;

                assert_string_equal(o->backend, "cpu");
                assert_string_equal(o->numerics_id, lk_cpu_ops(LK_CPU_SCALAR)->numerics_id);
                assert_true(o->context_new && o->context_free && o->memory_new && o->memory_free &&
                            o->upload && o->download && o->gemm && o->attention && o->norm &&
                            o->qk_norm_rope && o->residual && o->swiglu && o->convert);
        }

        assert_null(lk_cpu_ops((LkCpuIsa) 99));
}

/* Makes the other programs' silent gaps visible: they compare the instruction sets that this machine has. */
static void ops_v3_is_present(void **state) {
        if (!lk_cpu_ops(LK_CPU_V3))
                skip();

        assert_ptr_not_equal(lk_cpu_ops(LK_CPU_AUTO), lk_cpu_ops(LK_CPU_SCALAR));
}

static void ops_v4_is_present(void **state) {
        if (!lk_cpu_ops(LK_CPU_V4))
                skip();

        assert_ptr_equal(lk_cpu_ops(LK_CPU_AUTO), lk_cpu_ops(LK_CPU_V4));
}

static void context_bad_argument_is_refused(void **state) {
        const LkOps *o = lk_cpu_ops(LK_CPU_AUTO);
        LkContext *c = NULL;

        assert_int_equal(o->context_new(THREADS_MAX + 1, &c), -EINVAL);
        assert_int_equal(o->context_new(1, NULL), -EINVAL);
        assert_null(c);
        assert_null(o->context_free(NULL));
}

static void memory_round_trip_is_equal(void **state) {
        const LkOps *o = lk_cpu_ops(LK_CPU_AUTO);
        uint8_t in[1000], out[1000];
        LkContext *c;
        void *p = NULL, *q = NULL;

        for (unsigned i = 0; i < sizeof(in); i++)
                in[i] = (uint8_t) (i * 7);

        assert_int_equal(o->context_new(2, &c), 0);
        assert_int_equal(o->memory_new(c, sizeof(in), &p), 0);
        assert_int_equal(o->memory_new(c, 0, &q), 0);
        assert_int_equal((uintptr_t) p % 256, 0);
        assert_int_equal(o->upload(c, p, in, sizeof(in)), 0);
        assert_int_equal(o->download(c, out, p, sizeof(out)), 0);
        assert_memory_equal(in, out, sizeof(in));
        o->memory_free(c, p);
        o->memory_free(c, q);
        o->memory_free(c, NULL);

        p = NULL;
        assert_int_equal(o->memory_new(c, UINT64_MAX, &p), -ENOMEM);
        assert_int_equal(o->memory_new(c, UINT64_MAX - 255, &p), -ENOMEM);
        assert_int_equal(o->upload(c, NULL, in, 1), -EINVAL);
        assert_int_equal(o->upload(c, NULL, NULL, 0), 0);
        assert_null(p);
        assert_null(o->context_free(c));
}

/* Ops of one context share the scratch memory: a larger wish after a smaller one must be met. */
static void context_scratch_grows(void **state) {
        static const size_t sizes[] = {1, 100, 5000, 300, 1 << 20};
        LkContext *c;

        assert_int_equal(context_new(1, &c), 0);

        for (unsigned i = 0; i < ELEMENTSOF(sizes); i++) {
                void *p = NULL;

                assert_int_equal(context_scratch(c, sizes[i], &p), 0);
                assert_int_equal((uintptr_t) p % CONTEXT_ALIGN, 0);
                assert_true(c->scratch_size >= sizes[i]);
                memset(p, 0xff, sizes[i]); /* the address sanitizer looks on */
        }

        assert_null(context_free(c));
}

typedef struct Count {
        _Atomic uint64_t calls, sum;
        uint8_t *done; /* [task] */
        uint64_t *per_thread;
        uint32_t threads;
} Count;

/* The plain writes are what the thread sanitizer watches. */
static void count_task(void *arg, uint64_t task, uint32_t thread) {
        Count *c = arg;

        if (thread >= c->threads)
                abort();

        c->done[task]++;
        c->per_thread[thread]++;
        atomic_fetch_add(&c->calls, 1);
        atomic_fetch_add(&c->sum, task);
}

static void threads_every_task_runs_once(void **state) {
        static const uint32_t counts[] = {1, 2, 3, 8};
        static const uint64_t tasks[] = {0, 1, 2, 7, 500};

        for (unsigned i = 0; i < ELEMENTSOF(counts); i++) {
                Threads *t;

                assert_int_equal(threads_new(counts[i], &t), 0);
                assert_int_equal(threads_count(t), counts[i]);

                for (unsigned round = 0; round < 300; round++) {
                        uint64_t n = tasks[round % ELEMENTSOF(tasks)], per_thread[8] = {}, total = 0;
                        uint8_t done[500] = {};
                        Count c = {.done = done, .per_thread = per_thread, .threads = counts[i]};

                        threads_run(t, n, count_task, &c);

                        for (uint64_t k = 0; k < n; k++)
                                assert_int_equal(done[k], 1);
                        for (unsigned k = 0; k < 8; k++)
                                total += per_thread[k];

                        assert_int_equal(total, n);
                        assert_int_equal(atomic_load(&c.calls), n);
                        assert_int_equal(atomic_load(&c.sum), n * (n > 0 ? n - 1 : 0) / 2);
                }

                assert_null(threads_free(t));
        }

        assert_null(threads_free(NULL));
}

/* Two tasks that wait for each other end only if two threads work at the same time. */
static void meet_task(void *arg, uint64_t task, uint32_t thread) {
        _Atomic int *here = arg;

        atomic_fetch_add(here, 1);
        while (atomic_load(here) < 2)
                (void) sched_yield();
}

static void threads_tasks_run_at_the_same_time(void **state) {
        _Atomic int here = 0;
        Threads *t;

        assert_int_equal(threads_new(2, &t), 0);
        threads_run(t, 2, meet_task, &here);
        assert_int_equal(atomic_load(&here), 2);
        assert_null(threads_free(t));
}

static void threads_bad_count_is_refused(void **state) {
        Threads *t = NULL;

        assert_int_equal(threads_new(0, &t), -EINVAL);
        assert_int_equal(threads_new(THREADS_MAX + 1, &t), -EINVAL);
        assert_null(t);
}

int main(void) {
        static const struct CMUnitTest tests[] = {
                cmocka_unit_test(ops_table_is_complete),
                cmocka_unit_test(ops_v3_is_present),
                cmocka_unit_test(ops_v4_is_present),
                cmocka_unit_test(context_bad_argument_is_refused),
                cmocka_unit_test(memory_round_trip_is_equal),
                cmocka_unit_test(context_scratch_grows),
                cmocka_unit_test(threads_every_task_runs_once),
                cmocka_unit_test(threads_tasks_run_at_the_same_time),
                cmocka_unit_test(threads_bad_count_is_refused),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
