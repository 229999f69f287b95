/* SPDX-License-Identifier: Apache-2.0 */
/* block_means against its rule, number by number. */

#include "tests/unit/kernels/kernels-test.h"

static void block_means_uneven_blocks_follow_rule(void **state) {
        enum { HEADS = 3, DIM = 20, WIDTH = HEADS * DIM, N = 21, LD = WIDTH + 4 };
        uint32_t start[N + 1] = {};
        uint64_t seed = 1;

        for (uint32_t b = 0; b < N; b++)
                start[b + 1] = start[b] + 1 + (b * 37 + 63) % LK_BLOCK_ROWS;

        for (unsigned i = 0; i < ISAS * 2; i++) {
                LkType type = i % 2 ? LK_BF16 : LK_F32;
                CLEANUP_FREE void *x = random_aligned(start[N] * LD, type, 1, &seed);
                CLEANUP_FREE float *mean = guarded(N * WIDTH + 1, LK_F32), *raw = guarded(N * WIDTH, LK_F32);
                float centre[2 * WIDTH];
                LkBlockMeans a = {.type = type, .heads = HEADS, .head_dim = DIM, .blocks = {N, start}, .x = x, .x_ld = LD,
                        .mean = raw};
                LkContext *c;
                const LkOps *ops = open_isa(all_isas[i / 2], 1 + i % 3, &c);

                if (!ops)
                        continue;
                assert_int_equal(ops->block_means(c, &a), 0);
                for (uint32_t b = 0; b < N; b++)
                        for (uint32_t k = 0; k < WIDTH; k++) {
                                float sum = 0;

                                for (uint64_t row = start[b]; row < start[b + 1]; row++)
                                        sum += (float) get(x, type, row * LD + k);
                                assert_true(raw[b * WIDTH + k] == sum / (float) (start[b + 1] - start[b]));
                        }

                a.mean = mean;
                a.centre = centre;
                assert_int_equal(ops->block_means(c, &a), 0);
                for (uint32_t k = 0; k < WIDTH; k++) {
                        float sum[8] = {}, square[8] = {}, middle;

                        for (uint32_t b = 0; b < N; b++)
                                sum[b % 8] += raw[b * WIDTH + k];
                        middle = tree(sum) / N;
                        assert_true(centre[k] == middle);
                        for (uint32_t b = 0; b < N; b++) {
                                float d = raw[b * WIDTH + k] - middle;

                                assert_true(mean[b * WIDTH + k] == d);
                                square[b % 8] = fmaf(d, d, square[b % 8]);
                        }
                        assert_true(centre[WIDTH + k] == tree(square) / N);
                }
                assert_int_equal(((uint8_t *) (mean + N * WIDTH))[0], 0x5a);
                assert_null(ops->context_free(c));
        }
}

static void block_means_bad_argument_is_refused(void **state) {
        const uint32_t start[] = {0, 1, 2};
        float x[8] = {}, mean[8];
        LkContext *c;
        const LkOps *ops = open_isa(LK_CPU_AUTO, 1, &c);
        const LkBlockMeans good = {.type = LK_F32, .heads = 1, .head_dim = 4, .blocks = {2, start}, .x = x, .x_ld = 4, .mean = mean};
        LkBlockMeans a = good;

        assert_int_equal(ops->block_means(c, &good), 0);
        assert_int_equal(ops->block_means(NULL, &good), -EINVAL);
        assert_int_equal(ops->block_means(c, NULL), -EINVAL);
        a.blocks.n = 0;
        assert_int_equal(ops->block_means(c, &a), -EINVAL);
        a = good;
        a.blocks.start = NULL;
        assert_int_equal(ops->block_means(c, &a), -EINVAL);
        a = good;
        a.type = LK_F16;
        assert_int_equal(ops->block_means(c, &a), -EINVAL);
        a = good;
        a.x_ld = 3;
        assert_int_equal(ops->block_means(c, &a), -EINVAL);
        a = good;
        a.mean = NULL;
        assert_int_equal(ops->block_means(c, &a), -EINVAL);
        assert_null(ops->context_free(c));
}

int main(void) {
        static const struct CMUnitTest tests[] = {
                cmocka_unit_test(block_means_uneven_blocks_follow_rule),
                cmocka_unit_test(block_means_bad_argument_is_refused),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
