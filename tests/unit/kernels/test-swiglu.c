/* SPDX-License-Identifier: Apache-2.0 */
/* swiglu against its rule (bits, on the exponential that test-exp tests) and against double precision. */

#define LK_CPU_LEVEL 1

#include "tests/unit/kernels/kernels-test.h"

#include "kernels/cpu/vec.h"

typedef struct Data {
        LkSwiglu a;
        void *gate_up;
        uint64_t y_size;
} Data;

/* gate and up side by side, as the first linear of the MLP writes them */
static void data_make(uint64_t m, uint64_t n, LkType type, double size, Data *d) {
        uint64_t seed = m * 3 + n, ld = 2 * n + 1;

        *d = (Data){
                .a = {.type = type, .m = m, .n = n, .gate_ld = ld, .up_ld = ld, .y_ld = n + 2},
                .gate_up = random_aligned(m * ld, type, size, &seed),
                .y_size = m * (n + 2) * lk_type_size(type),
        };
        d->a.gate = d->gate_up;
        d->a.up = (uint8_t *) d->gate_up + n * lk_type_size(type);
}

static void check_rule(const LkSwiglu *a, const uint8_t *got) {
        uint64_t size = lk_type_size(a->type);
        CLEANUP_FREE uint8_t *expected = guarded(a->y_ld, a->type);

        for (uint64_t i = 0; i < a->m; i++) {
                for (uint64_t j = 0; j < a->n; j++) {
                        float g = (float) get(a->gate, a->type, i * a->gate_ld + j);
                        float s = (float) round_type(g / (1 + exp_one(-g)), a->type);

                        put(expected, a->type, j, s * (float) get(a->up, a->type, i * a->up_ld + j));
                }

                assert_memory_equal(got + i * a->y_ld * size, expected, a->y_ld * size);
        }
}

static void *run(LkCpuIsa isa, uint32_t threads, const Data *d) {
        LkContext *c;
        const LkOps *ops = open_isa(isa, threads, &c);
        LkSwiglu a = d->a;

        if (!ops)
                return NULL;

        a.y = guarded(d->y_size / lk_type_size(a.type), a.type);
        assert_int_equal(ops->swiglu(c, &a), 0);
        assert_null(ops->context_free(c));
        return a.y;
}

static void check_all_isas(const Data *d) {
        for (unsigned isa = 0; isa < ISAS; isa++) {
                CLEANUP_FREE void *y = run(all_isas[isa], 1 + isa, d);

                if (y)
                        check_rule(&d->a, y);
        }
}

static void swiglu_sizes_follow_rule(void **state) {
        static const uint64_t ms[] = {1, 2, 13, 407}, ns[] = {1, 7, 8, 15, 16, 17, 96, 1031};

        static const LkType types[] = {LK_F32, LK_BF16, LK_F16};

        for (unsigned i = 0; i < ELEMENTSOF(ms) * ELEMENTSOF(ns) * 3; i++) {
                Data d;

                data_make(ms[i / 3 % ELEMENTSOF(ms)], ns[i / 3 / ELEMENTSOF(ms)], types[i % 3], 2, &d);
                check_all_isas(&d);
                free(d.gate_up);
        }
}

/* Every finite bf16 as gate: this also compares the vector exponentials with the portable one over their
 * range. */
static void swiglu_every_bf16_follows_rule(void **state) {
        Data d;

        data_make(256, 256, LK_BF16, 1, &d);
        for (uint64_t u = 0; u < 65536; u++) {
                uint16_t h = (u & 0x7f80) == 0x7f80 ? (uint16_t) (u & 0xff7f) : (uint16_t) u;

                memcpy((uint8_t *) d.gate_up + (u / 256 * d.a.gate_ld + u % 256) * 2, &h, 2);
        }

        check_all_isas(&d);
        free(d.gate_up);
}

/* Every finite f16 as gate, up below 1 so that nothing is too large. */
static void swiglu_every_f16_follows_rule(void **state) {
        Data d;

        data_make(256, 256, LK_F16, 0.2, &d);
        for (uint64_t u = 0; u < 65536; u++) {
                uint16_t h = (u & 0x7c00) == 0x7c00 ? (uint16_t) (u & 0xfbff) : (uint16_t) u;

                memcpy((uint8_t *) d.gate_up + (u / 256 * d.a.gate_ld + u % 256) * 2, &h, 2);
        }

        check_all_isas(&d);
        free(d.gate_up);
}

/* What f16 cannot hold: beyond 65504 and half a step infinity, and one NaN for all. */
static void swiglu_f16_edges(void **state) {
        static const double gates[] = {1024, 1024, 1024, 1024, -1024, NAN}, ups[] = {63.96, 63.97, 64, -64, 64, -1};
        static const uint16_t expected[] = {0x7bff, 0x7bff, 0x7c00, 0xfc00, 0x8000, 0x7e00};
        Data d;

        data_make(1, ELEMENTSOF(gates), LK_F16, 1, &d);
        for (unsigned i = 0; i < ELEMENTSOF(gates); i++) {
                put(d.gate_up, LK_F16, i, gates[i]);
                put((void *) d.a.up, LK_F16, i, ups[i]);
        }
        for (unsigned isa = 0; isa < ISAS; isa++) {
                CLEANUP_FREE uint16_t *y = run(all_isas[isa], 1, &d);

                if (y)
                        assert_memory_equal(y, expected, sizeof(expected));
        }
        free(d.gate_up);
}

/* As many f32 gates around the ends of the exponential's range: subnormal and infinite results of exp. */
static void swiglu_f32_range_follows_rule(void **state) {
        Data d;

        data_make(400, 530, LK_F32, 1, &d);
        for (uint64_t i = 0; i < 400 * 530; i++)
                put(d.gate_up, LK_F32, i / 530 * d.a.gate_ld + i % 530, -106.0 + 0.001 * (double) i);

        check_all_isas(&d);
        free(d.gate_up);
}

static void swiglu_against_double_is_accurate(void **state) {
        static const LkType types[] = {LK_F32, LK_BF16, LK_F16};
        static const double limits[] = {1e-6, 2.4e-3, 3e-4}; /* bf16: two roundings of 1.53e-3, and a tenth; f16: an eighth */

        for (unsigned t = 0; t < ELEMENTSOF(types); t++) {
                LkType type = types[t];
                CLEANUP_FREE double *expected = allocate(50 * 300 * sizeof(double));
                CLEANUP_FREE void *y = NULL;
                Data d;

                data_make(50, 300, type, 3, &d);
                for (uint64_t i = 0; i < 50 * 300; i++) {
                        double g = get(d.a.gate, type, i / 300 * d.a.gate_ld + i % 300);

                        expected[i] = g / (1 + exp(-g)) * get(d.a.up, type, i / 300 * d.a.up_ld + i % 300);
                }

                y = run(LK_CPU_AUTO, 2, &d);
                assert_true(relative_l2(y, type, d.a.y_ld, expected, 50, 300) < limits[t]);
                free(d.gate_up);
        }
}

static void swiglu_any_thread_count_same_bits(void **state) {
        static const uint32_t threads[] = {1, 2, 3, 8, 0};
        Data d;

        data_make(407, 333, LK_BF16, 2, &d);
        for (unsigned i = 0; i < ELEMENTSOF(threads); i++) {
                CLEANUP_FREE void *y = run(LK_CPU_AUTO, threads[i], &d);

                check_rule(&d.a, y);
        }

        free(d.gate_up);
}

#define REFUSED(statement)                                                                                  \
        do {                                                                                                \
                LkSwiglu a = d.a;                                                                           \
                a.y = y;                                                                                    \
                statement;                                                                                  \
                assert_int_equal(ops->swiglu(c, &a), -EINVAL);                                              \
        } while (0)

static void swiglu_bad_argument_is_refused(void **state) {
        LkContext *c;
        const LkOps *ops = open_isa(LK_CPU_AUTO, 1, &c);
        CLEANUP_FREE void *y = guarded(2 * 10, LK_F32);
        Data d;

        data_make(2, 8, LK_F32, 1, &d);
        assert_int_equal(ops->swiglu(NULL, &d.a), -EINVAL);
        assert_int_equal(ops->swiglu(c, NULL), -EINVAL);
        REFUSED(a.gate = NULL);
        REFUSED(a.up = NULL);
        REFUSED(a.y = NULL);
        REFUSED(a.type = LK_I8);
        REFUSED(a.gate_ld = 7);
        REFUSED(a.up_ld = 7);
        REFUSED(a.y_ld = 7);
        REFUSED(a.m = UINT64_MAX / 8);
        free(d.gate_up);
        assert_null(ops->context_free(c));
}

int main(void) {
        static const struct CMUnitTest tests[] = {
                cmocka_unit_test(swiglu_sizes_follow_rule),
                cmocka_unit_test(swiglu_every_bf16_follows_rule),
                cmocka_unit_test(swiglu_every_f16_follows_rule),
                cmocka_unit_test(swiglu_f16_edges),
                cmocka_unit_test(swiglu_f32_range_follows_rule),
                cmocka_unit_test(swiglu_against_double_is_accurate),
                cmocka_unit_test(swiglu_any_thread_count_same_bits),
                cmocka_unit_test(swiglu_bad_argument_is_refused),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
