/* SPDX-License-Identifier: Apache-2.0 */
/* Quantised conditioners (h3.md 2.2, 2.3), made here from the tiny one: the whole encoder against the same
 * numbers expanded in advance, and against the model that they were made from. */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "service/shared/cleanup.h"
#include "tests/unit/h3/text-quantised.h"

static void check(const TextQuantised *b, H3Compute compute, double to_expanded, double to_original) {
        static const char *const names[] = {"text_only", "image_video"};

        for (size_t i = 0; i < ELEMENTSOF(names); i++) {
                CLEANUP(text_case_freep) TextCase *k = text_case_open(names[i]);
                CLEANUP_FREE float *original = text_case_run(b->models[0], &k->input, NULL);
                CLEANUP_FREE float *quantised = NULL, *expanded = NULL;
                uint64_t n = k->input.n * 32;
                double d, e;

                k->input.compute = compute;
                quantised = text_case_run(b->models[1], &k->input, NULL);
                expanded = text_case_run(b->models[2], &k->input, NULL);
                d = golden_distance(quantised, expanded, n, NULL);
                e = golden_distance(quantised, original, n, NULL);
                print_message("%s: %.3g from the expanded, %.3g from the original\n", names[i], d, e);
                if (!(d <= to_expanded) || !(e <= to_original))
                        fail_msg("%s: %g from the expanded (%g), %g from the original (%g)", names[i], d,
                                to_expanded, e, to_original);
                assert_true(e > 1e-4); /* it is quantised */
        }
}

/* Expansion inside the product changes no bit in f32. In bf16 a weight is rounded to that, which the one that was expanded in
 * advance, to f32, is not: two runs of bf16 are so far apart. */
static void text_int8_is_the_expanded_model(void **state) {
        CLEANUP(text_quantised_freep) TextQuantised *b = text_quantised_new(TEXT_INT8);

        assert_string_equal(b->models[1]->types, "BF16, I8");
        check(b, H3_COMPUTE_F32, 0, 0.05);
        check(b, H3_COMPUTE_BF16, 0.02, 0.05);
}

/* The input's scale is multiplied in elsewhere: one rounding of f32, 6e-8, per product. */
static void text_nvfp4_awq_is_the_expanded_model(void **state) {
        CLEANUP(text_quantised_freep) TextQuantised *b = text_quantised_new(TEXT_NVFP4);

        assert_string_equal(b->models[1]->types, "BF16, I8, NVFP4");
        check(b, H3_COMPUTE_F32, 2e-6, 0.4);
        check(b, H3_COMPUTE_BF16, 0.02, 0.4);
}

int main(void) {
        static const struct CMUnitTest tests[] = {
                cmocka_unit_test(text_int8_is_the_expanded_model),
                cmocka_unit_test(text_nvfp4_awq_is_the_expanded_model),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
