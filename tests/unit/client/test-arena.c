/* SPDX-License-Identifier: Apache-2.0 */
#include "client/liblatent/arena.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

static void take_unaligned_sizes_aligned_places(void **state) {
        Arena a = {.size = 256};
        uint64_t at;

        assert_int_equal(arena_take(&a, 1, &at), 0);
        assert_int_equal(at, 0);
        assert_int_equal(arena_take(&a, 64, &at), 0);
        assert_int_equal(at, 64);
        assert_int_equal(arena_take(&a, 0, &at), 0);
        assert_int_equal(at, 128);
        assert_int_equal(arena_take(&a, 128, &at), 0);
        assert_int_equal(at, 128);
        assert_int_equal(a.used, 256);
}

static void take_too_much_unchanged(void **state) {
        Arena a = {.size = 100};
        uint64_t at = 7;

        assert_int_equal(arena_take(&a, 101, &at), -ENOSPC);
        assert_int_equal(arena_take(&a, UINT64_MAX, &at), -ENOSPC);
        assert_int_equal(arena_take(&a, 65, &at), 0);
        assert_int_equal(arena_take(&a, 1, &at), -ENOSPC); /* would begin at 128 */
        assert_int_equal(a.used, 65);
        assert_int_equal(at, 0);
}

static void take_end_of_address_space_refused(void **state) {
        Arena a = {.size = UINT64_MAX, .used = UINT64_MAX - 10};
        uint64_t at;

        assert_int_equal(arena_take(&a, 0, &at), -ENOSPC);
        a.used = UINT64_MAX - 127;
        assert_int_equal(arena_take(&a, 128, &at), -ENOSPC);
}

static void size_counts_elements(void **state) {
        latent_tensor t = {.dtype = "F32", .n_dims = 4, .shape = {24, 2, 4, 4}};
        uint64_t size;

        assert_int_equal(tensor_size(&t, &size), 0);
        assert_int_equal(size, 24 * 2 * 4 * 4 * 4);
        strcpy(t.dtype, "BF16");
        t.n_dims = 0;
        assert_int_equal(tensor_size(&t, &size), 0);
        assert_int_equal(size, 2);
        t.n_dims = 2;
        t.shape[1] = 0;
        assert_int_equal(tensor_size(&t, &size), 0);
        assert_int_equal(size, 0);
}

static void size_nonsense_refused(void **state) {
        latent_tensor t = {.dtype = "F33", .n_dims = 1, .shape = {1}};
        uint64_t size = 3;

        assert_int_equal(tensor_size(&t, &size), -EINVAL);
        t.dtype[0] = '\0';
        assert_int_equal(tensor_size(&t, &size), -EINVAL);
        memset(t.dtype, 'F', sizeof(t.dtype)); /* without an end */
        assert_int_equal(tensor_size(&t, &size), -EINVAL);
        strcpy(t.dtype, "F32");
        t.n_dims = LATENT_DIMS_MAX + 1;
        assert_int_equal(tensor_size(&t, &size), -EINVAL);
        t.n_dims = 2;
        t.shape[0] = UINT64_C(1) << 32;
        t.shape[1] = UINT64_C(1) << 30;
        assert_int_equal(tensor_size(&t, &size), -EOVERFLOW);
        assert_int_equal(size, 3);
}

static uint64_t round_up(uint64_t v) {
        return (v + 63) / 64 * 64;
}

/* What the worker needs (dbus/org.latentd.Latent1.Session.xml): 64 bytes for the commit word, then the slots. */
static void output_bytes_enough_for_the_worker(void **state) {
        latent_tensor video = {.dtype = "F32", .n_dims = 4, .shape = {24, 7, 6, 10}};
        latent_tensor audio = {.dtype = "F32", .n_dims = 3, .shape = {32, 2, 37}};
        uint64_t v = round_up(24 * 7 * 6 * 10 * 4), a = round_up(32 * 2 * 37 * 4);
        const struct {
                const char *sampler;
                uint64_t slot;
        } cases[] = {
                {NULL, v + a},
                {"euler", v + a},
                {"res_multistep", v + a + 2 * a + v},
                {"res_multistep_perstream", v + a + a + v},
                {"of another version", v + a + 2 * a + v},
        };

        for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
                for (uint32_t steps = 1; steps <= 1000; steps += 37) {
                        uint64_t kept = latent_output_bytes(&video, &audio, cases[i].sampler, steps, 1),
                                 last = latent_output_bytes(&video, &audio, cases[i].sampler, steps, 0);

                        assert_true(kept >= 64 + (steps + UINT64_C(1)) * cases[i].slot);
                        assert_true(kept <= 4096 + (steps + UINT64_C(1)) * cases[i].slot);
                        assert_true(last >= 64 + 2 * cases[i].slot && last <= 4096 + 2 * cases[i].slot);
                }
}

static void output_bytes_nonsense_all_ones(void **state) {
        latent_tensor video = {.dtype = "F32", .n_dims = 1, .shape = {UINT64_C(1) << 60}};
        latent_tensor audio = {.dtype = "F32", .n_dims = 3, .shape = {32, 2, 37}};

        assert_true(latent_output_bytes(&video, &audio, "euler", 1000, 1) == UINT64_MAX);
        video.shape[0] = UINT64_C(1) << 61; /* one fits, two of a multistep sampler do not */
        assert_true(latent_output_bytes(&video, &audio, "res_multistep", 1, 0) == UINT64_MAX);
        video.dtype[0] = 'X';
        assert_true(latent_output_bytes(&video, &audio, NULL, 1, 0) == UINT64_MAX);
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(take_unaligned_sizes_aligned_places),
                cmocka_unit_test(take_too_much_unchanged),
                cmocka_unit_test(take_end_of_address_space_refused),
                cmocka_unit_test(size_counts_elements),
                cmocka_unit_test(size_nonsense_refused),
                cmocka_unit_test(output_bytes_enough_for_the_worker),
                cmocka_unit_test(output_bytes_nonsense_all_ones),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
