/* SPDX-License-Identifier: Apache-2.0 */
/* The text of sparse attention, and what its numbers may be. */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>
#include <string.h>

#include "service/shared/cleanup.h"
#include "service/shared/sparse.h"

static SparseOptions parse(const char *text) {
        SparseOptions o;
        Fault f = {};

        if (sparse_parse(text, &o, &f) < 0)
                fail_msg("%s: %s", text, f.text);
        return o;
}

static void sparse_parse_method_alone_has_defaults(void **state) {
        static const char *const names[] = {"off", "sol-attn", "sla", "vsa"};

        for (uint32_t i = SPARSE_SOL; i < _SPARSE_METHOD_MAX; i++) {
                SparseOptions o = parse(names[i]);

                assert_int_equal(o.method, i);
                assert_string_equal(sparse_method_to_string((SparseMethod) i), names[i]);
                assert_true(o.tau == 1.3f && o.keep == 10 && o.start == 0.2f && o.end == 1 && o.min_tokens == 12288);
                assert_int_equal(o.sinks, SPARSE_SINKS_KV_AND_ROWS);
                assert_int_equal(o.tail, i != SPARSE_VSA);
                assert_false(sparse_is_dense(&o, 0));
                o.shift = 12;
                assert_true(sparse_check(&o, 50));
        }
        assert_int_equal(parse("").method, SPARSE_NONE);
        assert_int_equal(parse("off").method, SPARSE_NONE);
}

static void sparse_parse_every_key_is_read(void **state) {
        SparseOptions o = parse("sol-attn:tau=2,start=0.4,end=0.9,dense_blocks=0+47-49,min_tokens=0,sinks=exact_kv,tail=off");

        assert_true(o.tau == 2 && o.start == 0.4f && o.end == 0.9f);
        assert_int_equal(o.min_tokens, 0);
        assert_int_equal(o.sinks, SPARSE_SINKS_KV);
        assert_int_equal(o.tail, 0);
        for (uint32_t i = 0; i < 60; i++)
                assert_int_equal(sparse_is_dense(&o, i), i == 0 || (i >= 47 && i <= 49));
        assert_true(sparse_is_dense(&o, SPARSE_LAYERS_MAX)); /* no such bit */
        o.shift = 12;
        assert_true(sparse_check(&o, 50));
        assert_false(sparse_check(&o, 49)); /* it has no block 49 */

        o = parse("sla:keep=30,sinks=off,tail=on,dense_blocks=");
        assert_true(o.keep == 30 && o.sinks == SPARSE_SINKS_OFF && o.tail == 1);
        o = parse("vsa:keep=95,sigma_start=0.9,sigma_end=0.1");
        assert_true(o.by_sigma == 1 && o.start == 0.9f && o.end == 0.1f);
        o = parse("vsa:sigma_start=0.5");
        assert_true(o.start == 0.5f && o.end == 0);
        o = parse("vsa:sigma_end=0.5");
        assert_true(o.start == 1 && o.end == 0.5f);
}

static void sparse_parse_bad_text_is_named(void **state) {
        static const char *const bad[][2] = {
                {"block", "no method"}, {":tau=1", "no method"}, {"sol-attn:", "key=value"}, {"sol-attn:tau", "key=value"},
                {"sol-attn:tau=1,", "key=value"}, {"sol-attn:extra_tokens=256", "no extra_tokens"},
                {"sol-attn:tow=1", "no key"}, {"sol-attn:tau=", "0 to 4"},
                {"sol-attn:tau=4.1", "0 to 4"}, {"sol-attn:tau=nan", "0 to 4"}, {"sol-attn:tau=1x", "0 to 4"},
                {"sol-attn:tau=1,tau=1", "twice"}, {"sol-attn:keep=10", "not for sol-attn"}, {"sla:tau=1", "not for sla"},
                {"vsa:tail=on", "not for vsa"}, {"vsa:sinks=off", "not for vsa"}, {"sla:keep=0.4", "0.5 to 95"},
                {"sla:keep=96", "0.5 to 95"}, {"sla:start=1.1", "0 to 1"}, {"sla:start=0.5,end=0.4", "after its end"},
                {"sla:sigma_start=0.1,sigma_end=0.2", "after its end"}, {"sla:start=0.1,sigma_end=0.2", "one of both"},
                {"sla:dense_blocks=1024", "numbers and ranges"}, {"sla:dense_blocks=3-2", "numbers and ranges"},
                {"sla:dense_blocks=1+", "numbers and ranges"}, {"sla:dense_blocks=-1", "numbers and ranges"},
                {"sla:dense_blocks=1;2", "numbers and ranges"}, {"sla:min_tokens=-1", "number of rows"},
                {"sla:min_tokens=1.5", "number of rows"}, {"sla:sinks=all", "exact_kv"}, {"sla:tail=yes", "on or off"},
        };
        char longest[2000];

        for (size_t i = 0; i < ELEMENTSOF(bad); i++) {
                SparseOptions o = {.tau = 7};
                Fault f = {};

                if (sparse_parse(bad[i][0], &o, &f) >= 0)
                        fail_msg("%s was taken", bad[i][0]);
                assert_string_equal(f.name, FAULT_INVALID_ARGUMENT);
                if (!strstr(f.text, bad[i][1]))
                        fail_msg("%s: \"%s\" does not say \"%s\"", bad[i][0], f.text, bad[i][1]);
                assert_true(o.tau == 7);
        }
        memset(longest, 'a', sizeof(longest) - 1);
        longest[sizeof(longest) - 1] = '\0';
        assert_true(sparse_parse(longest, &(SparseOptions){}, NULL) < 0);
}

static void sparse_check_numbers_of_nobody_are_refused(void **state) {
        SparseOptions good = parse("sol-attn"), bad[12];

        good.shift = 12;
        assert_true(sparse_check(&good, 50));
        assert_true(sparse_check(&(SparseOptions){}, 50));
        for (size_t i = 0; i < ELEMENTSOF(bad); i++)
                bad[i] = good;
        bad[0].method = _SPARSE_METHOD_MAX;
        bad[1].sinks = _SPARSE_SINKS_MAX;
        bad[2].tail = 2;
        bad[3].tau = NAN;
        bad[4].keep = 0;
        bad[5].start = 1.5f;
        bad[6].end = 0.1f;
        bad[7].shift = 0;
        bad[8].shift = INFINITY;
        bad[9].min_tokens = UINT64_MAX;
        bad[10].reserved = 1;
        bad[11].method = SPARSE_NONE;
        for (size_t i = 0; i < ELEMENTSOF(bad); i++)
                assert_false(sparse_check(bad + i, 50));
}

static void sparse_sigmas_follow_the_shift(void **state) {
        SparseOptions o = parse("sol-attn");
        float start, end;

        o.shift = 12; /* b = 0.8 */
        sparse_sigmas(&o, &start, &end);
        assert_true(fabs((double) start - 9.6 / 9.8) < 1e-6 && end == 0);
        o = parse("sol-attn:start=0,end=0.5");
        o.shift = 3;
        sparse_sigmas(&o, &start, &end);
        assert_true(start == 1 && end == 0.75f);
        o = parse("sol-attn:sigma_start=0.9,sigma_end=0.25");
        o.shift = 3;
        sparse_sigmas(&o, &start, &end);
        assert_true(start == 0.9f && end == 0.25f);
}

int main(void) {
        static const struct CMUnitTest tests[] = {
                cmocka_unit_test(sparse_parse_method_alone_has_defaults),
                cmocka_unit_test(sparse_parse_every_key_is_read),
                cmocka_unit_test(sparse_parse_bad_text_is_named),
                cmocka_unit_test(sparse_check_numbers_of_nobody_are_refused),
                cmocka_unit_test(sparse_sigmas_follow_the_shift),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
