/* SPDX-License-Identifier: Apache-2.0 */
#include "service/worker/encode-cache.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <string.h>

#include <cmocka.h>

#include "service/shared/cleanup.h"

#define TEXT_BYTES 1000

static const char text[TEXT_BYTES] = "what was made";

static EncodeKey key_of(uint64_t owner, const char *bytes) {
        return (EncodeKey){.owner = owner, .model = 7, .bytes = bytes, .size = strlen(bytes)};
}

static void add(EncodeCache *c, uint64_t owner, const char *bytes) {
        const EncodeKey key = key_of(owner, bytes);

        encode_cache_add(c, &key, text, sizeof(text));
}

static bool has(EncodeCache *c, uint64_t owner, const char *bytes) {
        const EncodeKey key = key_of(owner, bytes);
        CLEANUP(encoded_unrefp) Encoded *e = encode_cache_find(c, &key);

        if (e)
                assert_memory_equal(e->text, text, sizeof(text));
        return e;
}

#define ENTRY (sizeof(Encoded) + TEXT_BYTES + 1) /* with a key of one byte */

static void find_tells_owners_models_and_keys_apart(void **state) {
        EncodeCache c = ENCODE_CACHE_INIT;
        EncodeKey key = key_of(1, "red");

        encode_cache_set_limit(&c, 10 * ENTRY);
        add(&c, 1, "red");
        assert_true(has(&c, 1, "red"));
        assert_false(has(&c, 2, "red"));
        assert_false(has(&c, 1, "rad"));
        assert_false(has(&c, 1, "re"));
        assert_false(has(&c, 1, "redd"));
        key.model = 8;
        assert_null(encode_cache_find(&c, &key));
        encode_cache_clear(&c);
        assert_false(has(&c, 1, "red"));
        assert_int_equal(c.used, 0);
}

static void add_lets_the_oldest_used_go(void **state) {
        EncodeCache c = ENCODE_CACHE_INIT;

        encode_cache_set_limit(&c, 3 * ENTRY);
        add(&c, 1, "a");
        add(&c, 1, "b");
        add(&c, 1, "c");
        assert_int_equal(c.used, 3 * ENTRY);
        assert_true(has(&c, 1, "a")); /* is the newest from now on */
        add(&c, 1, "d");
        assert_false(has(&c, 1, "b"));
        assert_true(has(&c, 1, "a"));
        assert_true(has(&c, 1, "c"));
        assert_true(has(&c, 1, "d"));
        assert_int_equal(c.used, 3 * ENTRY);
        encode_cache_clear(&c);
}

/* Keys, too: pictures are larger than what is made of them. */
static void add_counts_all_bytes(void **state) {
        EncodeCache c = ENCODE_CACHE_INIT;

        encode_cache_set_limit(&c, ENTRY - 1);
        add(&c, 1, "a");
        assert_false(has(&c, 1, "a"));
        encode_cache_set_limit(&c, ENTRY);
        add(&c, 1, "ab");
        assert_false(has(&c, 1, "ab"));
        add(&c, 1, "a");
        assert_true(has(&c, 1, "a"));
        encode_cache_set_limit(&c, 0);
        encode_cache_clear(&c);
        add(&c, 1, "a");
        assert_false(has(&c, 1, "a"));
}

static void add_of_an_unknown_model_keeps_nothing(void **state) {
        EncodeCache c = ENCODE_CACHE_INIT;
        EncodeKey key = key_of(1, "a");

        encode_cache_set_limit(&c, 10 * ENTRY);
        key.model = 0;
        encode_cache_add(&c, &key, text, sizeof(text));
        assert_null(encode_cache_find(&c, &key));
        assert_int_equal(c.used, 0);
}

static void clear_leaves_what_is_in_use(void **state) {
        EncodeCache c = ENCODE_CACHE_INIT;
        const EncodeKey key = key_of(2, "c");
        Encoded *used;

        encode_cache_set_limit(&c, 10 * ENTRY);
        add(&c, 1, "a");
        add(&c, 2, "c");
        used = encode_cache_find(&c, &key);
        encode_cache_clear(&c);
        assert_int_equal(c.used, 0);
        assert_false(has(&c, 1, "a"));
        assert_memory_equal(used->text, text, sizeof(text)); /* whoever has it keeps it */
        assert_int_equal(used->n_ref, 1);
        assert_null(encoded_unref(used));
        assert_null(encoded_unref(NULL));
}

typedef struct Clearer {
        EncodeCache *cache;
        atomic_bool end;
} Clearer;

static void *clear_again_and_again(void *userdata) {
        Clearer *x = userdata;

        while (!x->end)
                encode_cache_clear(x->cache);
        return NULL;
}

/* The link's thread clears what the steps' thread looks for and uses. */
static void clear_in_use_by_another_thread(void **state) {
        EncodeCache c = ENCODE_CACHE_INIT;
        Clearer clearer = {.cache = &c};
        pthread_t thread;

        encode_cache_set_limit(&c, 2 * ENTRY);
        assert_int_equal(pthread_create(&thread, NULL, clear_again_and_again, &clearer), 0);
        for (unsigned i = 0; i < 2000; i++) {
                add(&c, 1, i % 2 ? "a" : "b");
                (void) has(&c, 1, "a");
                (void) has(&c, 1, "b");
        }
        clearer.end = true;
        assert_int_equal(pthread_join(thread, NULL), 0);
        encode_cache_clear(&c);
        assert_int_equal(c.used, 0);
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(find_tells_owners_models_and_keys_apart),
                cmocka_unit_test(add_lets_the_oldest_used_go),
                cmocka_unit_test(add_counts_all_bytes),
                cmocka_unit_test(add_of_an_unknown_model_keeps_nothing),
                cmocka_unit_test(clear_leaves_what_is_in_use),
                cmocka_unit_test(clear_in_use_by_another_thread),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
