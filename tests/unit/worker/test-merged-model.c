/* SPDX-License-Identifier: Apache-2.0 */
#include "service/worker/merged-model.h"

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

#include "kernels/cpu/cpu.h"
#include "service/shared/cleanup.h"
#include "tests/unit/worker/fixture.h"

/* A merged model of the tiny base and adapter 2 with this strength, in the cache. */
static MergedModel *add(Fixture *x, MergedCache *c, double strength) {
        ModelEntry *base = fixture_model(x), *loras[WIRE_LORAS_MAX] = {model_table_find(&x->models, 2)};
        MergedKey key = {.base = base->serial, .n_loras = 1, .compute = H3_COMPUTE_F32};
        const LkOps *ops = lk_cpu_ops(LK_CPU_AUTO);
        H3LoraReport *report = NULL;
        LkContext *context = NULL;
        MergedModel *m = NULL;
        H3Model *h3 = NULL;
        Fault f = {};

        key.loras[0] = loras[0]->serial;
        key.strengths[0] = strength;
        assert_int_equal(ops->context_new(1, &context), 0);
        if (h3_model_with_loras(base->h3, &(H3LoraUse){loras[0]->lora, strength}, 1, key.compute, ops,
                    context, NULL, &h3, &report, &f) < 0)
                fail_msg("%s", f.text);
        (void) ops->context_free(context);
        assert_int_equal(merged_cache_add(c, &key, base, loras, &h3, &report, &m), 0);
        assert_true(!h3 && !report); /* taken over */
        return m;
}

static Fixture *fixture(void) {
        Fixture *x = fixture_new();

        fixture_add_model(x, 2, "dit/lora/lora_comfy.safetensors");
        return x;
}

static void cache_keeps_the_newest_used(void **state) {
        CLEANUP(fixture_freep) Fixture *x = fixture();
        MergedCache c = MERGED_CACHE_INIT;
        MergedModel *m[3], *found;

        for (unsigned i = 0; i < 2; i++)
                m[i] = add(x, &c, 0.25 * (i + 1));
        assert_true(m[0]->serial != m[1]->serial && m[0]->serial > UINT64_C(1) << 62);
        assert_int_equal(fixture_model(x)->n_ref, 3);

        found = merged_cache_find(&c, &m[0]->key); /* is the newest from now on */
        assert_ptr_equal(found, m[0]);
        assert_int_equal(m[0]->n_ref, 3);
        (void) merged_model_unref(found);
        m[2] = add(x, &c, 1);
        assert_null(merged_cache_find(&c, &m[1]->key));
        assert_int_equal(m[1]->n_ref, 1); /* whoever uses it still has it whole */
        assert_true(m[1]->h3->n_merged > 0);
        found = merged_cache_find(&c, &m[0]->key);
        assert_ptr_equal(found, m[0]);
        (void) merged_model_unref(found);

        for (unsigned i = 0; i < 3; i++)
                (void) merged_model_unref(m[i]);
        assert_int_equal(fixture_model(x)->n_ref, 3);
        merged_cache_clear(&c);
        assert_int_equal(fixture_model(x)->n_ref, 1);
        merged_cache_clear(&c);
        assert_null(merged_model_unref(NULL));
}

static void cache_tells_keys_apart(void **state) {
        CLEANUP(fixture_freep) Fixture *x = fixture();
        MergedCache c = MERGED_CACHE_INIT;
        MergedModel *m = add(x, &c, 0.5), *found;
        MergedKey key;

        for (unsigned i = 0; i < 6; i++) {
                key = m->key;
                switch (i) {
                case 0:
                        key.base++;
                        break;
                case 1:
                        key.loras[0]++;
                        break;
                case 2:
                        key.strengths[0] = 0.5000001;
                        break;
                case 3:
                        key.n_loras = 2;
                        break;
                case 4:
                        key.compute = H3_COMPUTE_BF16;
                        break;
                case 5:
                        key.n_loras = 0;
                        break;
                }
                assert_null(merged_cache_find(&c, &key));
        }
        key = m->key;
        key.strengths[1] = 7; /* behind the last one */
        found = merged_cache_find(&c, &key);
        assert_ptr_equal(found, m);
        (void) merged_model_unref(found);
        (void) merged_model_unref(m);
        merged_cache_clear(&c);
}

static void cache_lets_go_what_is_closed(void **state) {
        for (uint64_t id = 1; id <= 2; id++) {
                CLEANUP(fixture_freep) Fixture *x = fixture();
                ModelEntry *base = model_entry_ref(fixture_model(x));
                MergedCache c = MERGED_CACHE_INIT;
                MergedModel *m = add(x, &c, 1), *other = add(x, &c, 2);

                merged_cache_drop(&c, 4711);
                assert_ptr_equal(c.kept[1], m);
                (void) merged_model_unref(other);
                merged_cache_drop(&c, model_table_close(&x->models, id));
                assert_null(c.kept[0]);
                assert_null(c.kept[1]);
                assert_int_equal(m->n_ref, 1);
                assert_int_equal(base->n_ref, id == 1 ? 2 : 3);
                (void) merged_model_unref(m);
                (void) model_entry_unref(base);
        }
}

/* A MODEL_CLOSE that comes while rank 0 merges: the job gets its model, nobody else. */
static void cache_does_not_keep_what_was_closed_meanwhile(void **state) {
        for (uint64_t id = 1; id <= 2; id++) {
                CLEANUP(fixture_freep) Fixture *x = fixture();
                ModelEntry *held = model_table_find(&x->models, id);
                MergedCache c = MERGED_CACHE_INIT;
                MergedModel *m;

                held->closed = true;
                m = add(x, &c, 1);
                assert_null(c.kept[0]);
                assert_int_equal(m->n_ref, 1);
                (void) merged_model_unref(m);
        }
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(cache_keeps_the_newest_used),
                cmocka_unit_test(cache_tells_keys_apart),
                cmocka_unit_test(cache_lets_go_what_is_closed),
                cmocka_unit_test(cache_does_not_keep_what_was_closed_meanwhile),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
