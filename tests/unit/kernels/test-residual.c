/* SPDX-License-Identifier: Apache-2.0 */
/* residual against its rule, which defines every bit. */

#include "tests/unit/kernels/kernels-test.h"

#define MOD_ROWS 3

typedef struct Data {
        LkResidual a;
        void *x, *y, *mod;
        int32_t *index;
        uint64_t size; /* of x, bytes */
} Data;

static void data_make_beside(uint64_t m, uint64_t n, LkType type, LkType y_type, bool gated, Data *d) {
        uint64_t seed = m * 3 + n;

        *d = (Data){
                .a = {.type = type,
                        .y_type = y_type == type ? 0 : y_type,
                        .m = m,
                        .n = n,
                        .x_ld = n + 1,
                        .y_ld = n + 4,
                        .mod_ld = n + 9,
                        .gate_at = 8},
                .x = random_aligned(m * (n + 1), type, 3, &seed),
                .y = random_aligned(m * (n + 4), y_type, 1, &seed),
                .mod = gated ? random_aligned(MOD_ROWS * (n + 9), type, 1, &seed) : NULL,
                .index = allocate(m * sizeof(int32_t)),
                .size = m * (n + 1) * lk_type_size(type),
        };
        for (uint64_t i = 0; i < m; i++)
                d->index[i] = (int32_t) (random_u64(&seed) % MOD_ROWS);
        d->a.y = d->y;
        d->a.mod = d->mod;
        d->a.mod_index = gated ? d->index : NULL;
}

static void data_make(uint64_t m, uint64_t n, LkType type, bool gated, Data *d) {
        data_make_beside(m, n, type, type, gated, d);
}

static void data_done(Data *d) {
        free(d->x);
        free(d->y);
        free(d->mod);
        free(d->index);
}

static float gate_at(const LkResidual *a, uint64_t i, uint64_t j) {
        return (float) get(a->mod, a->type, (uint64_t) a->mod_index[i] * a->mod_ld + a->gate_at + j);
}

static void *rule(const Data *d) {
        const LkResidual *a = &d->a;
        void *x = allocate(d->size);

        memcpy(x, d->x, d->size);
        for (uint64_t i = 0; i < a->m; i++)
                for (uint64_t j = 0; j < a->n; j++) {
                        float y = (float) get(a->y, a->y_type ? a->y_type : a->type, i * a->y_ld + j);

                        if (a->mod)
                                y = (float) round_type(gate_at(a, i, j) * y, a->type);

                        put(x, a->type, i * a->x_ld + j, (float) get(x, a->type, i * a->x_ld + j) + y);
                }

        return x;
}

static void *run(LkCpuIsa isa, uint32_t threads, const Data *d) {
        LkContext *c;
        const LkOps *ops = open_isa(isa, threads, &c);
        LkResidual a = d->a;

        if (!ops)
                return NULL;

        a.x = allocate(d->size);
        memcpy(a.x, d->x, d->size);
        assert_int_equal(ops->residual(c, &a), 0);
        assert_null(ops->context_free(c));
        return a.x;
}

static void residual_sizes_follow_rule(void **state) {
        static const uint64_t ms[] = {1, 2, 13, 407}, ns[] = {1, 7, 8, 15, 16, 17, 96, 1031};

        for (unsigned i = 0; i < ELEMENTSOF(ms) * ELEMENTSOF(ns) * 6; i++) {
                CLEANUP_FREE void *expected = NULL;
                LkType type = i / 2 % 3 == 1 ? LK_BF16 : LK_F32;
                Data d;

                data_make_beside(ms[i / 6 % ELEMENTSOF(ms)], ns[i / 6 / ELEMENTSOF(ms)], type, i / 2 % 3 == 2 ? LK_F16 : type, i % 2, &d);
                expected = rule(&d);

                for (unsigned isa = 0; isa < ISAS; isa++) {
                        CLEANUP_FREE void *x = run(all_isas[isa], 1 + isa, &d);

                        if (x)
                                assert_memory_equal(x, expected, d.size);
                }

                data_done(&d);
        }
}

/* With one rounding instead of two the small end of the product would survive the subtraction. */
static void residual_bf16_rounds_twice(void **state) {
        LkContext *c;
        const LkOps *ops = open_isa(LK_CPU_AUTO, 1, &c);
        uint16_t x, y, gate;
        int32_t index = 0;
        LkResidual a = {.type = LK_BF16,
                .m = 1,
                .n = 1,
                .x = &x,
                .x_ld = 1,
                .y = &y,
                .y_ld = 1,
                .mod = &gate,
                .mod_ld = 1,
                .mod_index = &index};

        put(&gate, LK_BF16, 0, 1 + 0x1p-7);
        put(&y, LK_BF16, 0, 1 + 0x1p-6); /* product 1 + 2^-6 + 2^-7 + 2^-13: rounds to 1 + 3 * 2^-7 */
        put(&x, LK_BF16, 0, -(1 + 3 * 0x1p-7));
        assert_int_equal(ops->residual(c, &a), 0);
        assert_true(get(&x, LK_BF16, 0) == 0);
        assert_null(ops->context_free(c));
}

static void residual_any_thread_count_same_bits(void **state) {
        static const uint32_t threads[] = {1, 2, 3, 8, 0};
        CLEANUP_FREE void *expected = NULL;
        Data d;

        data_make(407, 333, LK_BF16, true, &d);
        expected = rule(&d);

        for (unsigned i = 0; i < ELEMENTSOF(threads); i++) {
                CLEANUP_FREE void *x = run(LK_CPU_AUTO, threads[i], &d);

                assert_memory_equal(x, expected, d.size);
        }

        data_done(&d);
}

#define REFUSED(statement)                                                                                  \
        do {                                                                                                \
                LkResidual a = d.a;                                                                         \
                a.x = d.x;                                                                                  \
                statement;                                                                                  \
                assert_int_equal(ops->residual(c, &a), -EINVAL);                                            \
        } while (0)

static void residual_bad_argument_is_refused(void **state) {
        LkContext *c;
        const LkOps *ops = open_isa(LK_CPU_AUTO, 1, &c);
        int32_t negative[2] = {-1, 0};
        Data d;

        data_make(2, 8, LK_BF16, true, &d);
        assert_int_equal(ops->residual(NULL, &d.a), -EINVAL);
        assert_int_equal(ops->residual(c, NULL), -EINVAL);
        REFUSED(a.x = NULL);
        REFUSED(a.y = NULL);
        REFUSED(a.type = LK_F16);
        REFUSED(a.y_type = LK_F16); /* beside f32 only */
        REFUSED(a.x_ld = 7);
        REFUSED(a.y_ld = 7);
        REFUSED(a.x = (uint8_t *) d.x + 1);
        REFUSED(a.mod_index = NULL);
        REFUSED(a.mod_index = negative);
        REFUSED(a.mod_ld = 15);
        REFUSED(a.gate_at = UINT64_MAX - 1);
        REFUSED(a.m = UINT64_MAX / 4);
        data_done(&d);
        assert_null(ops->context_free(c));
}

int main(void) {
        static const struct CMUnitTest tests[] = {
                cmocka_unit_test(residual_sizes_follow_rule),
                cmocka_unit_test(residual_bf16_rounds_twice),
                cmocka_unit_test(residual_any_thread_count_same_bits),
                cmocka_unit_test(residual_bad_argument_is_refused),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
