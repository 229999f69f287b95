/* SPDX-License-Identifier: Apache-2.0 */
/* activate against double precision with the bounds of ops.h; all instruction sets the same bits. */

#include "tests/unit/kernels/kernels-test.h"

static double exact(LkFunction f, double x, double *ret_exponent) {
        double u = sqrt(2 / M_PI) * (x + 0.044715 * x * x * x);

        *ret_exponent = f == LK_SILU ? -x : f == LK_GELU_TANH ? -2 * u : 0;
        return f == LK_GELU ? 0.5 * x * erfc(-x / sqrt(2)) : x / (1 + exp(*ret_exponent));
}

static void activate(LkCpuIsa isa, LkFunction f, LkType type, const void *x, void *y, uint64_t m, uint64_t n,
        uint64_t ld) {
        LkContext *c;
        const LkOps *ops = open_isa(isa, 2, &c);
        const LkActivate a = {
                .type = type, .function = f, .m = m, .n = n, .x = x, .x_ld = ld, .y = y, .y_ld = ld};

        if (!ops) {
                memset(y, 0, m * ld * lk_type_size(type));
                return;
        }
        assert_int_equal(ops->activate(c, &a), 0);
        assert_null(ops->context_free(c));
}

#define FLOATS (UINT64_C(1) << 22)

/* Every 1021st float of either sign; 1021 is prime, so all low bits occur. */
static void activate_f32_keeps_its_bound(void **state) {
        CLEANUP_FREE float *x = allocate(FLOATS * sizeof(float)), *y = allocate(FLOATS * sizeof(float));
        uint64_t n = 0;

        for (uint64_t u = 0; u <= UINT32_MAX && n < FLOATS; u += 1021) {
                uint32_t bits = (uint32_t) u;
                float v;

                memcpy(&v, &bits, sizeof(v));
                if (isfinite(v) && fabsf(v) < 1e6f)
                        x[n++] = v;
        }
        for (LkFunction f = LK_SILU; f < _LK_FUNCTION_MAX; f++) {
                double worst = 0, at = 0;

                activate(LK_CPU_AUTO, f, LK_F32, x, y, 1, n, n);
                for (uint64_t i = 0; i < n; i++) {
                        double exponent, e = exact(f, x[i], &exponent), error = fabs(y[i] - e) / fabs(e);

                        error /= f == LK_GELU ? 0x1p-20 : 0x1p-22 * (1 + fabs(exponent));
                        if (fabs(e) < 0x1p-126 ||
                                exponent > 88.72) { /* no digits to lose; exp is infinite */
                                assert_true(fabs(y[i] - e) < 0x1p-120);
                                continue;
                        }
                        if (error > worst) {
                                worst = error;
                                at = x[i];
                        }
                }
                print_message("function %d: %.3f of its bound at %g\n", f, worst, at);
                if (!(worst <= 1))
                        fail_msg("function %d: %g times its bound at %g", f, worst, at);
        }
}

static void activate_extremes_are_exact(void **state) {
        static const float x[] = {0, -0.0f, 200, -200, 3e38f, -3e38f, NAN, 20};
        float y[8];

        for (LkFunction f = LK_SILU; f < _LK_FUNCTION_MAX; f++) {
                activate(LK_CPU_AUTO, f, LK_F32, x, y, 1, 8, 8);
                assert_true(
                        y[0] == 0 && y[1] == 0 && y[2] == 200 && y[3] == 0 && y[4] == 3e38f && y[5] == 0);
                assert_true(isnan(y[6]) && fabsf(y[7] - 20) < 1e-5f);
        }
}

/* The two GELU differ by up to 5e-4: one in place of the other would be seen. */
static void activate_functions_differ(void **state) {
        static const float x[] = {1, 2.3f};
        float tanh_y[2], y[2];

        activate(LK_CPU_AUTO, LK_GELU_TANH, LK_F32, x, tanh_y, 1, 2, 2);
        activate(LK_CPU_AUTO, LK_GELU, LK_F32, x, y, 1, 2, 2);
        assert_true(fabsf(tanh_y[0] - 0.8411920f) < 1e-6f && fabsf(y[0] - 0.8413447f) < 1e-6f);
        assert_true(fabsf(y[1] - tanh_y[1]) > 2e-4f);
}

/* bf16 is the f32 result rounded; every width and level gives the scalar bits; nothing outside is touched.
 */
static void activate_all_levels_same_bits(void **state) {
        static const uint64_t ns[] = {1, 7, 8, 9, 16, 31, 100};

        for (unsigned i = 0; i < ELEMENTSOF(ns) * 6; i++) {
                LkFunction f = (LkFunction) (LK_SILU + i % 3);
                LkType type = i / 3 % 2 ? LK_BF16 : LK_F32;
                uint64_t n = ns[i / 6], ld = n + 3, seed = i, size = 50 * ld * lk_type_size(type);
                CLEANUP_FREE void *x = random_aligned(50 * ld, type, 3, &seed);
                CLEANUP_FREE float *wide = allocate(50 * ld * sizeof(float));
                CLEANUP_FREE uint8_t *first = guarded(50 * ld, type);

                for (uint64_t e = 0; e < 50 * ld; e++)
                        wide[e] = (float) get(x, type, e);
                activate(LK_CPU_SCALAR, f, type, x, first, 50, n, ld);
                activate(LK_CPU_SCALAR, f, LK_F32, wide, wide, 50, n, ld); /* in place */
                for (uint64_t row = 0; row < 50; row++) {
                        for (uint64_t e = 0; e < n; e++)
                                assert_true(get(first, type, row * ld + e) ==
                                            round_type(wide[row * ld + e], type));
                        for (uint64_t b = n * lk_type_size(type); b < ld * lk_type_size(type); b++)
                                assert_int_equal(first[row * ld * lk_type_size(type) + b], 0x5a);
                }

                for (unsigned isa = 1; isa < ISAS; isa++) {
                        CLEANUP_FREE uint8_t *y = guarded(50 * ld, type);

                        if (!lk_cpu_ops(all_isas[isa]))
                                continue;
                        activate(all_isas[isa], f, type, x, y, 50, n, ld);
                        assert_memory_equal(first, y, size);
                }
        }
}

#define REFUSED(statement)                                                                                  \
        do {                                                                                                \
                LkActivate a = good;                                                                        \
                statement;                                                                                  \
                assert_int_equal(ops->activate(c, &a), -EINVAL);                                            \
        } while (0)

static void activate_bad_argument_is_refused(void **state) {
        float x[16] = {1}, y[16];
        const LkActivate good = {
                .type = LK_F32, .function = LK_GELU, .m = 2, .n = 8, .x = x, .x_ld = 8, .y = y, .y_ld = 8};
        LkContext *c;
        const LkOps *ops = open_isa(LK_CPU_AUTO, 1, &c);

        assert_int_equal(ops->activate(c, &good), 0);
        assert_int_equal(ops->activate(NULL, &good), -EINVAL);
        assert_int_equal(ops->activate(c, NULL), -EINVAL);
        REFUSED(a.function = (LkFunction) 0);
        REFUSED(a.function = _LK_FUNCTION_MAX);
        REFUSED(a.type = LK_F16);
        REFUSED(a.x = NULL);
        REFUSED(a.y = NULL);
        REFUSED(a.x_ld = 7);
        REFUSED(a.y_ld = 7);
        REFUSED(a.m = UINT64_MAX / 8);
        assert_null(ops->context_free(c));
}

int main(void) {
        static const struct CMUnitTest tests[] = {
                cmocka_unit_test(activate_f32_keeps_its_bound),
                cmocka_unit_test(activate_extremes_are_exact),
                cmocka_unit_test(activate_functions_differ),
                cmocka_unit_test(activate_all_levels_same_bits),
                cmocka_unit_test(activate_bad_argument_is_refused),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
