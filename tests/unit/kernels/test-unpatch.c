/* SPDX-License-Identifier: Apache-2.0 */
/* unpatch against its rule. */

#include "tests/unit/kernels/kernels-test.h"

static void unpatch_sizes_follow_rule(void **state) {
        static const LkUnpatch sizes[] = {
                {.t = 1, .h = 1, .w = 1, .patch = {1, 1, 1}, .channels = 1},
                {.t = 2, .h = 3, .w = 5, .patch = {4, 16, 16}, .channels = 3},
                {.t = 3, .h = 2, .w = 4, .patch = {1, 3, 2}, .channels = 5},
        };

        for (unsigned i = 0; i < ELEMENTSOF(sizes) * ISAS; i++) {
                LkUnpatch a = sizes[i / ISAS];
                uint64_t tokens = a.t * a.h * a.w, plane = (uint64_t) a.patch[0] * a.patch[1] * a.patch[2], seed = i;
                uint64_t numbers = plane * a.channels, rows = a.h * a.patch[1], cols = a.w * a.patch[2];
                CLEANUP_FREE float *x = NULL, *y = guarded(tokens * numbers + 1, LK_F32);
                LkContext *c;
                const LkOps *ops = open_isa(all_isas[i % ISAS], 1 + i % 3, &c);

                if (!ops)
                        continue;
                a.x_ld = numbers + 7;
                a.x = x = random_aligned(tokens * a.x_ld, LK_F32, 1, &seed);
                a.y = y;
                assert_int_equal(ops->unpatch(c, &a), 0);
                for (uint64_t k = 0; k < tokens * numbers; k++) {
                        uint64_t channel = k % a.channels, col = k / a.channels % cols, row = k / a.channels / cols % rows;
                        uint64_t frame = k / a.channels / cols / rows;
                        uint64_t token = (frame / a.patch[0] * a.h + row / a.patch[1]) * a.w + col / a.patch[2];
                        uint64_t at = ((channel * a.patch[0] + frame % a.patch[0]) * a.patch[1] + row % a.patch[1]) * a.patch[2] +
                                      col % a.patch[2];

                        assert_memory_equal(y + k, x + token * a.x_ld + at, sizeof(float));
                }
                assert_int_equal(((uint8_t *) (y + tokens * numbers))[0], 0x5a);
                assert_null(ops->context_free(c));
        }
}

static void unpatch_bad_argument_is_refused(void **state) {
        const float x[4] = {};
        float y[4];
        LkContext *c;
        const LkOps *ops = open_isa(LK_CPU_AUTO, 1, &c);
        LkUnpatch good = {.t = 1, .h = 1, .w = 1, .patch = {1, 2, 2}, .channels = 1, .x = x, .x_ld = 4, .y = y}, a = good;

        assert_int_equal(ops->unpatch(NULL, &good), -EINVAL);
        assert_int_equal(ops->unpatch(c, NULL), -EINVAL);
        a.x_ld = 3;
        assert_int_equal(ops->unpatch(c, &a), -EINVAL);
        a = good;
        a.patch[1] = 0;
        assert_int_equal(ops->unpatch(c, &a), -EINVAL);
        a = good;
        a.channels = 0;
        assert_int_equal(ops->unpatch(c, &a), -EINVAL);
        a = good;
        a.t = UINT64_MAX / 2;
        a.h = 4;
        assert_int_equal(ops->unpatch(c, &a), -EINVAL);
        a = good;
        a.y = NULL;
        assert_int_equal(ops->unpatch(c, &a), -EINVAL);
        a = good;
        a.w = 0;
        assert_int_equal(ops->unpatch(c, &a), 0);
        assert_null(ops->context_free(c));
}

int main(void) {
        static const struct CMUnitTest tests[] = {
                cmocka_unit_test(unpatch_sizes_follow_rule),
                cmocka_unit_test(unpatch_bad_argument_is_refused),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
