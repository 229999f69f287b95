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

typedef struct Stop {
        _Atomic uint64_t calls, at; /* tasks or questions so far; from so many on it says stop */
} Stop;

static bool has_enough(void *userdata) {
        Stop *s = userdata;

        return atomic_load(&s->calls) >= atomic_load(&s->at);
}

static void call_task(void *arg, uint64_t task, uint32_t thread) {
        Stop *s = arg;

        atomic_fetch_add(&s->calls, 1);
}

/* What threads have begun they end; a run that is told to stop says so, and the next one is whole again. */
static void threads_stopped_run_begins_no_more(void **state) {
        for (uint32_t n = 1; n <= 3; n++) {
                Stop s = {.at = 10};
                Threads *t;

                assert_int_equal(threads_new(n, &t), 0);
                threads_stop_when(t, has_enough, &s);
                assert_int_equal(threads_run(t, 100000, call_task, &s), -ECANCELED);
                assert_in_range(s.calls, 10, 9 + n);
                assert_int_equal(threads_run(t, 5, call_task, &s), -ECANCELED);
                assert_in_range(s.calls, 10, 9 + n);

                threads_stop_when(t, NULL, NULL);
                s.calls = 0;
                assert_int_equal(threads_run(t, 1000, call_task, &s), 0);
                assert_int_equal(s.calls, 1000);
                assert_null(threads_free(t));
        }
}

static bool ask(void *userdata) {
        Stop *s = userdata;

        return atomic_fetch_add(&s->calls, 1) >= atomic_load(&s->at);
}

#define KEYS (20 * LK_KEY_TILE)

/* One task with many keys asks on the way; a product asks between its blocks; both have their bits afterwards. */
static void ops_long_ones_are_stopped_on_the_way(void **state) {
        static float q[4] = {1, 2, 3, 4}, k[KEYS * 4], o[4], want[4], y[KEYS];
        const LkOps *ops = lk_cpu_ops(LK_CPU_AUTO);
        const LkAttention attention = {.type = LK_F32, .n_q = 1, .n_k = KEYS, .heads = 1, .head_dim = 4, .scale = 0.5f,
                .q = q, .k = k, .v = k, .o = o, .q_ld = 4, .k_ld = 4, .v_ld = 4, .o_ld = 4};
        const LkGemm gemm = {.m = KEYS, .x = k, .x_type = LK_F32, .x_ld = 4,
                .w = {.data = q, .type = LK_F32, .rows = 1, .cols = 4, .row_stride = 16, .block_rows = 1},
                .y = y, .y_type = LK_F32, .y_ld = 1};
        Stop s = {.at = UINT64_MAX};
        LkContext *c;

        for (unsigned i = 0; i < KEYS * 4; i++)
                k[i] = (float) (i % 7) - 3;
        assert_int_equal(ops->context_new(1, &c), 0);
        assert_int_equal(ops->attention(c, &attention), 0);
        memcpy(want, o, sizeof(o));

        ops->stop_when(c, ask, &s);
        assert_int_equal(ops->attention(c, &attention), 0);
        assert_true(s.calls > KEYS / LK_KEY_TILE);
        assert_memory_equal(o, want, sizeof(o));
        s.calls = 0;
        s.at = 5;
        assert_int_equal(ops->attention(c, &attention), -ECANCELED);
        assert_true(s.calls < 10);
        assert_int_equal(ops->gemm(c, &gemm), -ECANCELED);

        ops->stop_when(c, NULL, NULL);
        assert_int_equal(ops->gemm(c, &gemm), 0);
        assert_int_equal(ops->attention(c, &attention), 0);
        assert_memory_equal(o, want, sizeof(o));
        assert_null(ops->context_free(c));
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
                cmocka_unit_test(threads_stopped_run_begins_no_more),
                cmocka_unit_test(ops_long_ones_are_stopped_on_the_way),
                cmocka_unit_test(threads_bad_count_is_refused),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
