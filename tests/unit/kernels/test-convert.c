/* SPDX-License-Identifier: Apache-2.0 */
/* convert, and the number formats below all ops, against double arithmetic. */

#include "tests/unit/kernels/kernels-test.h"

#include "kernels/cpu/number.h"

static void number_every_half_converts_exactly(void **state) {
        for (uint32_t u = 0; u < 65536; u++) {
                double f16 = f16_to_double((uint16_t) u), bf16 = bf16_to_double((uint16_t) u);
                float a = f32_from_f16((uint16_t) u), b = f32_from_bf16((uint16_t) u);

                assert_true(isnan(f16) ? isnan(a) : a == f16 && !signbit(a) == !signbit(f16));
                assert_true(isnan(bf16) ? isnan(b) : b == bf16 && !signbit(b) == !signbit(bf16));
        }
}

/* Nearest, ties to even: every 997th float, and around every bf16 the tie and its neighbours. */
static void number_bf16_rounds_to_nearest_even(void **state) {
        for (uint64_t u = 0; u <= UINT32_MAX; u += 997) {
                float f = f32_from_bits((uint32_t) u);
                uint16_t h = bf16_from_f32(f);

                if (isnan(f))
                        assert_int_equal(h, 0x7fc0);
                else if (fabsf(f) < 0x1.ffp+127f)
                        assert_int_equal(h, half_bits(round_type(f, LK_BF16), LK_BF16));
                else
                        assert_int_equal(h, f > 0 ? 0x7f80 : 0xff80);
        }

        for (uint32_t u = 0; u < 0x7f7f; u++)
                for (uint32_t low = 0x7fff; low <= 0x8001; low++) {
                        uint32_t up = low > 0x8000 || (low == 0x8000 && u % 2 == 1);

                        assert_int_equal(bf16_from_f32(f32_from_bits(u << 16 | low)), u + up);
                        assert_int_equal(bf16_from_f32(f32_from_bits(0x80000000u | u << 16 | low)),
                                0x8000 | (u + up));
                }
}

static void check_convert(LkCpuIsa isa, uint32_t threads, uint64_t m, uint64_t n, LkType from, LkType to) {
        uint64_t seed = m + n, size = lk_type_size(to), x_ld = n + 3, y_ld = n + 1;
        CLEANUP_FREE void *x = random_aligned(m * x_ld, from, 100, &seed);
        CLEANUP_FREE uint8_t *y = guarded(m * y_ld, to), *expected = guarded(y_ld, to);
        LkConvert a = {
                .m = m, .n = n, .x = x, .x_type = from, .x_ld = x_ld, .y = y, .y_type = to, .y_ld = y_ld};
        LkContext *c;
        const LkOps *ops = open_isa(isa, threads, &c);

        if (!ops)
                return;

        assert_int_equal(ops->convert(c, &a), 0);
        for (uint64_t i = 0; i < m; i++) {
                for (uint64_t j = 0; j < n; j++)
                        put(expected, to, j, get(x, from, i * x_ld + j));

                assert_memory_equal(y + i * y_ld * size, expected, y_ld * size);
        }

        assert_null(ops->context_free(c));
}

static void convert_sizes_follow_rule(void **state) {
        static const uint64_t ms[] = {1, 2, 407}, ns[] = {1, 7, 8, 15, 16, 17, 96, 1031};
        static const LkType types[] = {LK_F32, LK_BF16};

        for (unsigned i = 0; i < ELEMENTSOF(ms) * ELEMENTSOF(ns) * 4; i++)
                for (unsigned isa = 0; isa < ISAS; isa++)
                        check_convert(all_isas[isa], 1 + isa, ms[i / 4 % ELEMENTSOF(ms)],
                                ns[i / 4 / ELEMENTSOF(ms)], types[i % 2], types[i / 2 % 2]);
}

/* Infinities, overflow, subnormals, ties and NaN in the vector code too. */
static void convert_special_values_same_at_every_isa(void **state) {
        static const uint32_t bits[] = {0x00000000, 0x80000000, 0x7f800000, 0xff800000, 0x7fc00000,
                0xffc00001, 0x7f800001, 0x7f7fffff, 0xff7fffff, 0x7f7f8000, 0x7f7f7fff, 0x00000001,
                0x00008000, 0x00018000, 0x80008001, 0x3f808000, 0x3f818000, 0x3f818001};
        static const uint16_t expected[] = {0x0000, 0x8000, 0x7f80, 0xff80, 0x7fc0, 0x7fc0, 0x7fc0, 0x7f80,
                0xff80, 0x7f80, 0x7f7f, 0x0000, 0x0000, 0x0002, 0x8001, 0x3f80, 0x3f82, 0x3f82};
        uint16_t y[ELEMENTSOF(bits)];
        LkConvert a = {.m = 1,
                .n = ELEMENTSOF(bits),
                .x = bits,
                .x_type = LK_F32,
                .x_ld = ELEMENTSOF(bits),
                .y = y,
                .y_type = LK_BF16,
                .y_ld = ELEMENTSOF(bits)};

        for (unsigned isa = 0; isa < ISAS; isa++) {
                LkContext *c;
                const LkOps *ops = open_isa(all_isas[isa], 1, &c);

                if (!ops)
                        continue;

                assert_int_equal(ops->convert(c, &a), 0);
                assert_memory_equal(y, expected, sizeof(expected));
                assert_null(ops->context_free(c));
        }
}

#define REFUSED(statement)                                                                                  \
        do {                                                                                                \
                LkConvert a = good;                                                                         \
                statement;                                                                                  \
                assert_int_equal(ops->convert(c, &a), -EINVAL);                                             \
        } while (0)

static void convert_bad_argument_is_refused(void **state) {
        float x[4] = {};
        uint16_t y[4];
        LkConvert good = {
                .m = 2, .n = 2, .x = x, .x_type = LK_F32, .x_ld = 2, .y = y, .y_type = LK_BF16, .y_ld = 2};
        LkContext *c;
        const LkOps *ops = open_isa(LK_CPU_AUTO, 1, &c);

        assert_int_equal(ops->convert(c, &good), 0);
        assert_int_equal(ops->convert(NULL, &good), -EINVAL);
        assert_int_equal(ops->convert(c, NULL), -EINVAL);
        REFUSED(a.x = NULL);
        REFUSED(a.y = NULL);
        REFUSED(a.x_type = LK_F16);
        REFUSED(a.y_type = LK_F16);
        REFUSED(a.x_ld = 1);
        REFUSED(a.y_ld = 1);
        REFUSED(a.m = UINT64_MAX / 2);
        assert_null(ops->context_free(c));
}

int main(void) {
        static const struct CMUnitTest tests[] = {
                cmocka_unit_test(number_every_half_converts_exactly),
                cmocka_unit_test(number_bf16_rounds_to_nearest_even),
                cmocka_unit_test(convert_sizes_follow_rule),
                cmocka_unit_test(convert_special_values_same_at_every_isa),
                cmocka_unit_test(convert_bad_argument_is_refused),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
