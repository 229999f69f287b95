/* SPDX-License-Identifier: Apache-2.0 */
#include "service/worker/mod-cache.h"

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

#include "kernels/cpu/cpu.h"
#include "service/shared/cleanup.h"
#include "tests/unit/worker/fixture.h"

#define SMALL 4096

DEFINE_CLEANUP(Job *, job_unref)

/* Rows of the one step with these sigmas for j's model, kept as so many bytes. */
static ModTable *add(ModCache *c, const Job *j, float sigma, uint64_t bytes) {
        const H3ModSchedule s = {j->layout, &sigma, &sigma, 1};
        H3Rank rank = {.ops = lk_cpu_ops(LK_CPU_AUTO)};
        H3ModTable *h3 = NULL;
        ModTable *t = NULL;
        Fault f = {};

        assert_int_equal(rank.ops->context_new(1, &rank.context), 0);
        if (h3_mod_table_new(&rank, job_model(j), &s, j->compute, NULL, &h3, &f) < 0)
                fail_msg("%s", f.text);
        (void) rank.ops->context_free(rank.context);
        assert_int_equal(mod_cache_add(c, j, bytes, &h3, &t), 0);
        assert_null(h3); /* taken over */
        return t;
}

static H3StepInput input(const Job *j, float sigma) {
        return (H3StepInput){
                .compute = j->compute, .layout = j->layout, .sigma_video = sigma, .sigma_audio = sigma};
}

/* NULL: not kept. */
static const ModTable *find(ModCache *c, const Job *j, float sigma) {
        const H3StepInput in = input(j, sigma);
        ModTable *t = mod_cache_find(c, j, &in);

        (void) mod_table_unref(t); /* the cache has it still */
        return t;
}

static void cache_tells_models_arithmetics_and_sigmas_apart(void **state) {
        CLEANUP(fixture_freep) Fixture *x = fixture_new();
        CLEANUP(job_unrefp) Job *j = fixture_job(x, 5), *other = NULL, *bf16 = NULL;
        WireJobOpen open = x->sample;
        ModCache c = MOD_CACHE_INIT;
        ModTable *t = add(&c, j, 0.5f, SMALL);
        ModelEntry *first = fixture_model(x);
        Fault f = {};

        assert_int_equal(t->n_ref, 2);
        assert_ptr_equal(find(&c, j, 0.5f), t);
        assert_null(find(&c, j, 0.25f));
        open.compute = WIRE_COMPUTE_BF16;
        assert_int_equal(fixture_open(x, &open, &bf16, &f), 0);
        assert_null(find(&c, bf16, 0.5f));

        /* The same file, loaded once more. */
        assert_int_equal(model_table_close(&x->models, 1), first->serial);
        fixture_add_model(x, 1, "dit/comfy.safetensors");
        other = fixture_job(x, 6);
        assert_null(find(&c, other, 0.5f));
        assert_ptr_equal(find(&c, j, 0.5f), t);

        mod_cache_clear(&c);
        assert_null(find(&c, j, 0.5f));
        assert_int_equal(t->n_ref, 1);
        (void) mod_table_unref(t);
        mod_cache_clear(&c);
        assert_null(mod_table_unref(NULL));
}

static void cache_keeps_the_newest_used(void **state) {
        CLEANUP(fixture_freep) Fixture *x = fixture_new();
        CLEANUP(job_unrefp) Job *j = fixture_job(x, 5);
        ModCache c = MOD_CACHE_INIT;
        ModTable *t[MOD_TABLES_KEPT + 1];

        for (unsigned i = 0; i < MOD_TABLES_KEPT; i++)
                t[i] = add(&c, j, 0.125f * (float) i, SMALL);
        assert_ptr_equal(find(&c, j, 0), t[0]); /* is the newest from now on */
        assert_true(mod_cache_make_room(&c, SMALL));
        assert_null(find(&c, j, 0.125f));
        assert_int_equal(t[1]->n_ref, 1); /* whoever uses it still has it */
        t[MOD_TABLES_KEPT] = add(&c, j, 1, SMALL);
        assert_ptr_equal(c.kept[0], t[MOD_TABLES_KEPT]);
        assert_ptr_equal(c.kept[1], t[0]);
        assert_ptr_equal(c.kept[2], t[3]);
        assert_ptr_equal(c.kept[3], t[2]);

        for (unsigned i = 0; i <= MOD_TABLES_KEPT; i++)
                (void) mod_table_unref(t[i]);
        mod_cache_clear(&c);
}

/* Counted in what their makers say. */
static void cache_keeps_so_many_bytes_together(void **state) {
        CLEANUP(fixture_freep) Fixture *x = fixture_new();
        CLEANUP(job_unrefp) Job *j = fixture_job(x, 5);
        ModCache c = MOD_CACHE_INIT;
        ModTable *a = add(&c, j, 0.25f, MOD_TABLES_BYTES / 2), *b = add(&c, j, 0.5f, MOD_TABLES_BYTES / 4);

        assert_false(mod_cache_make_room(&c, MOD_TABLES_BYTES + 1));
        assert_false(mod_cache_make_room(&c, UINT64_MAX));
        assert_true(mod_cache_make_room(&c, MOD_TABLES_BYTES / 4));
        assert_ptr_equal(c.kept[1], a); /* both are there still */
        assert_true(mod_cache_make_room(&c, MOD_TABLES_BYTES / 4 + 1));
        assert_ptr_equal(c.kept[0], b);
        assert_null(c.kept[1]);
        assert_true(mod_cache_make_room(&c, MOD_TABLES_BYTES));
        assert_null(c.kept[0]);
        (void) mod_table_unref(a);
        (void) mod_table_unref(b);

        a = add(&c, j, 0.25f, MOD_TABLES_BYTES / 2);
        b = add(&c, j, 0.5f, MOD_TABLES_BYTES);
        assert_ptr_equal(c.kept[0], b);
        assert_null(c.kept[1]);
        (void) mod_table_unref(a);
        (void) mod_table_unref(b);
        mod_cache_clear(&c);
}

static void cache_lets_go_what_is_closed(void **state) {
        CLEANUP(fixture_freep) Fixture *x = fixture_new();
        CLEANUP(job_unrefp) Job *j = fixture_job(x, 5), *other = NULL;
        ModCache c = MOD_CACHE_INIT;
        ModTable *t[3], *late;
        ModelEntry *first = fixture_model(x);

        t[0] = add(&c, j, 0.25f, SMALL);
        assert_int_equal(model_table_close(&x->models, 1), first->serial);
        fixture_add_model(x, 1, "dit/comfy.safetensors");
        other = fixture_job(x, 6);
        t[1] = add(&c, other, 0.5f, SMALL);

        /* Made while its model was closed: for the step, not for the cache. */
        late = add(&c, j, 0.75f, SMALL);
        assert_int_equal(late->n_ref, 1);
        assert_null(find(&c, j, 0.75f));
        (void) mod_table_unref(late);

        t[2] = add(&c, other, 0.75f, SMALL);
        mod_cache_drop(&c, 4711);
        assert_ptr_equal(c.kept[2], t[0]);
        mod_cache_drop(&c, first->serial);
        assert_int_equal(t[0]->n_ref, 1);
        assert_ptr_equal(c.kept[0], t[2]);
        assert_ptr_equal(c.kept[1], t[1]);
        assert_null(c.kept[2]);
        mod_cache_drop(&c, other->model->serial);
        assert_null(c.kept[0]);
        for (unsigned i = 0; i < 3; i++) {
                assert_int_equal(t[i]->n_ref, 1);
                (void) mod_table_unref(t[i]);
        }
}

typedef struct Closer {
        ModCache *cache;
        uint64_t serial;
        atomic_bool end;
} Closer;

static void *close_again_and_again(void *userdata) {
        Closer *x = userdata;

        while (!x->end)
                mod_cache_drop(x->cache, x->serial);
        return NULL;
}

/* The link's thread lets go what the steps' thread looks for and uses. */
static void cache_dropped_in_use_by_another_thread(void **state) {
        CLEANUP(fixture_freep) Fixture *x = fixture_new();
        CLEANUP(job_unrefp) Job *j = fixture_job(x, 5);
        const H3StepInput in = input(j, 0.5f);
        ModCache c = MOD_CACHE_INIT;
        Closer closer = {.cache = &c, .serial = j->model->serial};
        pthread_t thread;

        assert_int_equal(pthread_create(&thread, NULL, close_again_and_again, &closer), 0);
        for (unsigned i = 0; i < 100; i++) {
                ModTable *t = add(&c, j, 0.5f, SMALL), *found = mod_cache_find(&c, j, &in);

                assert_true(!found || found == t);
                assert_true(h3_mod_table_covers(t->h3, &in));
                (void) mod_table_unref(t);
                if (found)
                        assert_true(h3_mod_table_covers(found->h3, &in));
                (void) mod_table_unref(found);
        }
        closer.end = true;
        assert_int_equal(pthread_join(thread, NULL), 0);
        mod_cache_clear(&c);
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(cache_tells_models_arithmetics_and_sigmas_apart),
                cmocka_unit_test(cache_keeps_the_newest_used),
                cmocka_unit_test(cache_keeps_so_many_bytes_together),
                cmocka_unit_test(cache_lets_go_what_is_closed),
                cmocka_unit_test(cache_dropped_in_use_by_another_thread),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
