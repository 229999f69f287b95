/* SPDX-License-Identifier: Apache-2.0 */
/* quantise against its rule (bits, on the exponential that test-exp tests). */

#define LK_CPU_LEVEL 1

#include "tests/unit/kernels/kernels-test.h"

#include "kernels/cpu/vec.h"

typedef struct Data {
        LkQuantise a;
        void *x, *up;
} Data;

static void data_make(uint64_t m, uint64_t k, uint32_t rotation, LkType type, bool gated, Data *d) {
        uint64_t seed = m * 5 + k + rotation;

        *d = (Data){
                .a = {.x_type = type,
                        .m = m,
                        .k = k,
                        .x_ld = k + 1,
                        .up_ld = k + 2,
                        .rotation = rotation,
                        .q_ld = k + 3},
                .x = random_aligned(m * (k + 1), type, 3, &seed),
                .up = gated ? random_aligned(m * (k + 2), type, 1, &seed) : NULL,
        };
        d->a.x = d->x;
        d->a.up = d->up;
}

static void data_done(Data *d) {
        free(d->x);
        free(d->up);
}

static float rounded(float f, LkType t) {
        return (float) round_type((double) f, t);
}

/* One group by the recursion: the group of 4 * n is four groups of n and one more stage. */
static void rotate_naively(const float *x, uint32_t n, float *y) {
        static const int h[4][4] = {{1, 1, 1, -1}, {1, 1, -1, 1}, {1, -1, 1, 1}, {-1, 1, 1, 1}};
        uint32_t quarter = n / 4;
        float parts[256];

        if (n == 1) {
                y[0] = x[0];
                return;
        }
        for (uint32_t i = 0; i < 4; i++)
                rotate_naively(x + i * quarter, quarter, parts + i * quarter);
        for (uint32_t row = 0; row < 4; row++)
                for (uint32_t i = 0; i < quarter; i++) {
                        /* the last row begins with its first positive term, as the rule writes it */
                        unsigned first = row == 3 ? 1 : 0, second = row == 3 ? 0 : 1;
                        float sum = parts[first * quarter + i] +
                                    (float) h[row][second] * parts[second * quarter + i];

                        sum = sum + (float) h[row][2] * parts[2 * quarter + i];
                        sum = sum + (float) h[row][3] * parts[3 * quarter + i];
                        y[row * quarter + i] = sum * 0.5f;
                }
}

static void rule(const LkQuantise *a, uint64_t row, int8_t *q, float *scale) {
        CLEANUP_FREE float *v = allocate(a->k * sizeof(float));
        float most = 0, s;

        for (uint64_t i = 0; i < a->k; i++) {
                float x = (float) get(a->x, a->x_type, row * a->x_ld + i);

                v[i] = a->up ? x / (1 + exp_one(-x)) * (float) get(a->up, a->x_type, row * a->up_ld + i) : x;
        }
        for (uint64_t i = 0; a->rotation > 0 && i < a->k; i += a->rotation) {
                float group[256];

                rotate_naively(v + i, a->rotation, group);
                memcpy(v + i, group, a->rotation * sizeof(float));
        }
        for (uint64_t i = 0; i < a->k; i++)
                if (fabsf(v[i]) > most)
                        most = fabsf(v[i]);
        if (a->x_type == LK_BF16 && most > 0x1.fep+127f)
                most = 0x1.fep+127f;
        if (most > 0x1.fffffep+127f)
                most = 0x1.fffffep+127f;

        s = a->x_type == LK_BF16 ? most * (1.0f / 127.0f) : most / 127.0f;
        s = s > 1e-30f ? s : 1e-30f;
        for (uint64_t i = 0; i < a->k; i++) {
                float f = rounded(rounded(v[i], a->x_type) / rounded(s, a->x_type), a->x_type);

                q[i] = isnan(f) ? 0 : (int8_t) fmaxf(-128, fminf(127, nearbyintf(f)));
        }
        *scale = s;
}

static void check(LkCpuIsa isa, uint32_t threads, const Data *d) {
        CLEANUP_FREE int8_t *q = guarded(d->a.m * d->a.q_ld / 2 + 1, LK_BF16), *expected = allocate(d->a.k);
        CLEANUP_FREE float *scale = allocate(d->a.m * sizeof(float));
        LkContext *c;
        const LkOps *ops = open_isa(isa, threads, &c);
        LkQuantise a = d->a;

        if (!ops)
                return;
        a.q = q;
        a.scale = scale;
        assert_int_equal(ops->quantise(c, &a), 0);
        for (uint64_t i = 0; i < a.m; i++) {
                float s;

                rule(&a, i, expected, &s);
                assert_memory_equal(&s, scale + i, sizeof(s));
                assert_memory_equal(q + i * a.q_ld, expected, a.k);
                for (uint64_t j = a.k; j < a.q_ld; j++)
                        assert_int_equal(q[i * a.q_ld + j], 0x5a);
        }
        assert_null(ops->context_free(c));
}

static void quantise_sizes_follow_rule(void **state) {
        static const struct {
                uint64_t k;
                uint32_t rotation;
        } sizes[] = {{1, 0}, {7, 0}, {16, 4}, {33, 0}, {80, 16}, {192, 64}, {512, 256}, {2688, 64}};
        static const uint64_t ms[] = {1, 3, 40};

        for (unsigned i = 0; i < ELEMENTSOF(sizes) * ELEMENTSOF(ms) * 4; i++) {
                Data d;

                data_make(ms[i / 4 % ELEMENTSOF(ms)], sizes[i / 4 / ELEMENTSOF(ms)].k,
                        sizes[i / 4 / ELEMENTSOF(ms)].rotation, i % 2 ? LK_BF16 : LK_F32, i & 2, &d);
                for (unsigned isa = 0; isa < ISAS; isa++)
                        check(all_isas[isa], 1 + isa, &d);
                data_done(&d);
        }
}

/* Zero rows, tiny and huge numbers, ties, infinity, NaN. */
static void quantise_extreme_rows_follow_rule(void **state) {
        static const float values[] = {0, -0.0f, 1e-38f, -1e-33f, 3e38f, -3e38f, INFINITY, -INFINITY, NAN,
                127, 63.5f, 0.5f, -0.5f, 1.5f, -2.5f, 126.5f};

        for (unsigned t = 0; t < 2; t++) {
                LkType type = t == 0 ? LK_F32 : LK_BF16;
                Data d;

                data_make(8, 32, 0, type, false, &d);
                for (uint64_t row = 0; row < 8; row++)
                        for (uint64_t i = 0; i < 32; i++)
                                put(d.x, type, row * d.a.x_ld + i,
                                        row == 0
                                                ? 0
                                                : (double)
                                                          values[row == 1 ? 9 + i % 7 : (row * 3 + i) % 16]);
                for (unsigned isa = 0; isa < ISAS; isa++)
                        check(all_isas[isa], 2, &d);
                data_done(&d);
        }
}

static void quantise_any_thread_count_same_bits(void **state) {
        static const uint32_t threads[] = {1, 2, 3, 8, 0};
        Data d;

        data_make(203, 256, 64, LK_BF16, true, &d);
        for (unsigned i = 0; i < ELEMENTSOF(threads); i++)
                check(LK_CPU_AUTO, threads[i], &d);
        data_done(&d);
}

static void quantise_row_position_same_bits(void **state) {
        int8_t whole[50 * 67], part[67];
        float scales[50], scale;
        LkContext *c;
        const LkOps *ops = open_isa(LK_CPU_AUTO, 2, &c);
        Data d;

        data_make(50, 64, 64, LK_BF16, false, &d);
        d.a.q = whole;
        d.a.scale = scales;
        assert_int_equal(ops->quantise(c, &d.a), 0);
        for (uint64_t i = 0; i < 50; i++) {
                LkQuantise a = d.a;

                a.m = 1;
                a.x = (const uint8_t *) d.x + i * a.x_ld * 2;
                a.q = part;
                a.scale = &scale;
                assert_int_equal(ops->quantise(c, &a), 0);
                assert_memory_equal(part, whole + i * a.q_ld, 64);
                assert_memory_equal(&scale, scales + i, sizeof(scale));
        }
        data_done(&d);
        assert_null(ops->context_free(c));
}

#define REFUSED(statement)                                                                                  \
        do {                                                                                                \
                LkQuantise a = good;                                                                        \
                statement;                                                                                  \
                assert_int_equal(ops->quantise(c, &a), -EINVAL);                                            \
        } while (0)

static void quantise_bad_argument_is_refused(void **state) {
        LkContext *c;
        const LkOps *ops = open_isa(LK_CPU_AUTO, 1, &c);
        int8_t q[200];
        float scale[2];
        LkQuantise good;
        Data d;

        data_make(2, 64, 16, LK_F32, true, &d);
        good = d.a;
        good.q = q;
        good.scale = scale;
        assert_int_equal(ops->quantise(c, &good), 0);
        assert_int_equal(ops->quantise(NULL, &good), -EINVAL);
        assert_int_equal(ops->quantise(c, NULL), -EINVAL);
        REFUSED(a.x = NULL);
        REFUSED(a.q = NULL);
        REFUSED(a.scale = NULL);
        REFUSED(a.x_type = LK_F16);
        REFUSED(a.x_type = LK_I8);
        REFUSED(a.x_ld = 63);
        REFUSED(a.up_ld = 63);
        REFUSED(a.q_ld = 63);
        REFUSED(a.rotation = 1);
        REFUSED(a.rotation = 8);
        REFUSED(a.rotation = 256);
        REFUSED(a.rotation = 1024; a.k = 1024; a.x_ld = 2048; a.up_ld = 2048; a.q_ld = 2048);
        REFUSED(a.m = UINT64_MAX / 8);
        good.m = 0;
        assert_int_equal(ops->quantise(c, &good), 0);
        data_done(&d);
        assert_null(ops->context_free(c));
}

int main(void) {
        static const struct CMUnitTest tests[] = {
                cmocka_unit_test(quantise_sizes_follow_rule),
                cmocka_unit_test(quantise_extreme_rows_follow_rule),
                cmocka_unit_test(quantise_any_thread_count_same_bits),
                cmocka_unit_test(quantise_row_position_same_bits),
                cmocka_unit_test(quantise_bad_argument_is_refused),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
