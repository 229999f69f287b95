/* SPDX-License-Identifier: Apache-2.0 */
#include "service/worker/rope-cache.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "service/h3/layout.h"

#define ROWS 9001u /* no multiple of what a thread makes */
#define FREQS 5u

/* By how many threads is the machine's affair. */
static void a_table_of_many_threads_has_the_bits_of_one(void **state) {
        H3Config c = {.rope_freqs = FREQS};
        H3Layout l = {.rows = ROWS};
        const uint64_t n = ROWS * 3 * FREQS;
        float *want = malloc(2 * n * sizeof(*want));
        RopeCache cache = {};

        l.position = malloc(ROWS * sizeof(*l.position));
        assert_true(want && l.position);
        for (uint32_t i = 0; i < FREQS; i++)
                c.rope_inv_freq[i] = 1.0f / (float) (1 + i * i);
        for (uint32_t i = 0; i < ROWS; i++)
                for (uint32_t axis = 0; axis < 3; axis++)
                        l.position[i][axis] = (double) (i * (axis + 1) % 613) * 0.25;
        for (int bf16 = 0; bf16 < 2; bf16++) {
                const H3Compute compute = bf16 ? H3_COMPUTE_BF16 : H3_COMPUTE_F32;
                const float *got = rope_cache_get(&cache, &c, &l, compute);

                h3_rope_table(&c, &l, NULL, 0, ROWS, bf16, want, want + n);
                assert_non_null(got);
                assert_memory_equal(got, want, 2 * n * sizeof(*want));
                assert_ptr_equal(rope_cache_get(&cache, &c, &l, compute), got);
        }
        rope_cache_clear(&cache);
        free(l.position);
        free(want);
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(a_table_of_many_threads_has_the_bits_of_one),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
