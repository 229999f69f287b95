/* SPDX-License-Identifier: Apache-2.0 */
/* norm against its rule (bits) and against double precision. */

#include "tests/unit/kernels/kernels-test.h"

#define MOD_ROWS 4

typedef struct Data {
        LkNorm a;
        void *x, *mod, *weight_base;
        int32_t *index;
        uint64_t y_size;
} Data;

static void data_make(uint64_t m, uint64_t n, LkType type, LkType weight_type, bool modulated, Data *d) {
        uint64_t seed = m + 31 * n, mod_ld = 2 * n + 7;

        *d = (Data){
                .a = {.type = type,
                        .m = m,
                        .n = n,
                        .x_ld = n + 2,
                        .weight = {.type = weight_type, .n = n},
                        .eps = 1e-5f,
                        .mod_ld = mod_ld,
                        .shift_at = 3,
                        .scale_at = n + 5,
                        .y_ld = n + 6},
                .x = random_aligned(m * (n + 2), type, 2, &seed),
                .mod = modulated ? random_aligned(MOD_ROWS * mod_ld, type, 0.5, &seed) : NULL,
                .index = allocate(m * sizeof(int32_t)),
                .y_size = m * (n + 6) * lk_type_size(type),
        };
        for (uint64_t i = 0; i < m; i++)
                d->index[i] = (int32_t) (random_u64(&seed) % MOD_ROWS);
        d->a.x = d->x;
        d->a.mod = d->mod;
        d->a.mod_index = modulated ? d->index : NULL;
        d->a.weight.data = random_array(n, weight_type, (unsigned) (n % 4), 1, &seed, &d->weight_base);
}

static void data_done(Data *d) {
        free(d->x);
        free(d->mod);
        free(d->weight_base);
        free(d->index);
}

static float x_at(const LkNorm *a, uint64_t i, uint64_t j) {
        return (float) get(a->x, a->type, i * a->x_ld + j);
}

static float mod_at(const LkNorm *a, uint64_t i, uint64_t at) {
        return (float) get(
                a->mod, a->mod_type ? a->mod_type : a->type, (uint64_t) a->mod_index[i] * a->mod_ld + at);
}

static void rule(const LkNorm *a, uint64_t i, void *y) {
        float l[8] = {}, sum, rstd;

        for (uint64_t j = 0; j < a->n; j++)
                l[j % 8] = fmaf(x_at(a, i, j), x_at(a, i, j), l[j % 8]);

        sum = ((l[0] + l[4]) + (l[2] + l[6])) + ((l[1] + l[5]) + (l[3] + l[7]));
        rstd = 1 / sqrtf(sum / (float) a->n + a->eps);

        for (uint64_t j = 0; j < a->n; j++) {
                float w = (float) get(a->weight.data, a->weight.type, j), h = x_at(a, i, j) * rstd;

                if (a->round_first)
                        h = (float) round_type(h, a->type);
                h = (float) round_type(h * w, a->type);
                if (a->mod)
                        h = fmaf(h, 1 + mod_at(a, i, a->scale_at + j), mod_at(a, i, a->shift_at + j));

                put(y, a->type, j, h);
        }
}

static void *run(LkCpuIsa isa, uint32_t threads, const Data *d) {
        LkContext *c;
        const LkOps *ops = open_isa(isa, threads, &c);
        LkNorm a = d->a;

        if (!ops)
                return NULL;

        a.y = guarded(d->y_size / lk_type_size(a.type), a.type);
        assert_int_equal(ops->norm(c, &a), 0);
        assert_null(ops->context_free(c));
        return a.y;
}

static void check_rule(const LkNorm *a, const uint8_t *got) {
        uint64_t size = lk_type_size(a->type);
        CLEANUP_FREE uint8_t *expected = guarded(a->y_ld, a->type);

        for (uint64_t i = 0; i < a->m; i++) {
                rule(a, i, expected);
                assert_memory_equal(got + i * a->y_ld * size, expected, a->y_ld * size);
        }
}

static const LkType types[] = {LK_F32, LK_BF16, LK_F16};

static void norm_sizes_follow_rule(void **state) {
        static const uint64_t ms[] = {1, 2, 7, 407}, ns[] = {1, 7, 8, 9, 15, 16, 31, 96, 1027};

        for (unsigned i = 0; i < ELEMENTSOF(ms) * ELEMENTSOF(ns) * 4; i++) {
                Data d;

                data_make(ms[i / 4 % ELEMENTSOF(ms)], ns[i / 4 / ELEMENTSOF(ms)], types[i % 2], types[i % 3],
                        i / 2 % 2, &d);

                for (unsigned isa = 0; isa < ISAS; isa++) {
                        CLEANUP_FREE void *y = run(all_isas[isa], 1 + isa, &d);

                        if (y)
                                check_rule(&d.a, y);
                }

                data_done(&d);
        }
}

/* Shift and scale of a curve's final layer: f32 beside rows of bf16. */
static void norm_f32_modulation_follows_rule(void **state) {
        static const uint64_t ns[] = {1, 16, 31, 96, 1027};

        for (unsigned i = 0; i < ELEMENTSOF(ns); i++) {
                uint64_t seed = i;
                Data d;

                data_make(13, ns[i], LK_BF16, LK_BF16, true, &d);
                free(d.mod);
                d.mod = random_aligned(MOD_ROWS * d.a.mod_ld, LK_F32, 0.5, &seed);
                d.a.mod = d.mod;
                d.a.mod_type = LK_F32;
                for (unsigned isa = 0; isa < ISAS; isa++) {
                        CLEANUP_FREE void *y = run(all_isas[isa], 1 + isa, &d);

                        if (y)
                                check_rule(&d.a, y);
                }
                data_done(&d);
        }
}

/* A stream in f32 that meets products in f16; what is added first may lie where the result goes. */
static void norm_half_follows_rule(void **state) {
        static const uint64_t sizes[][2] = {{1, 1}, {2, 8}, {7, 31}, {13, 96}, {3, 1027}, {5, 2048}};

        for (unsigned i = 0; i < ELEMENTSOF(sizes) * 3 * ISAS; i++) {
                uint64_t m = sizes[i / 3 / ISAS][0], n = sizes[i / 3 / ISAS][1], seed = i, x_size = m * (n + 2) * sizeof(float);
                CLEANUP_FREE float *gate = random_aligned(n, LK_F32, 1, &seed), *x = NULL, *added = NULL;
                CLEANUP_FREE int32_t *zeros = calloc(m, sizeof(*zeros));
                CLEANUP_FREE uint8_t *y = random_aligned(m * (n + 6), LK_F16, 1, &seed), *expected = guarded(n, LK_F16);
                LkResidual add;
                LkContext *c;
                const LkOps *ops = open_isa(all_isas[i % ISAS], 2, &c);
                Data d;

                if (!ops)
                        continue;
                data_make(m, n, LK_F32, types[i / ISAS % 3], false, &d);
                x = allocate(x_size);
                added = allocate(x_size);
                memcpy(x, d.x, x_size);
                memcpy(added, d.x, x_size);
                add = (LkResidual){.type = LK_F32, .m = m, .n = n, .x = x, .x_ld = n + 2, .y = y, .y_type = LK_F16, .y_ld = n + 6,
                        .mod = gate, .mod_ld = n, .mod_index = zeros};
                for (uint64_t k = 0; i % 2 && k < m * n; k++) {
                        float v = gate[k % n] * (float) get(y, LK_F16, k / n * (n + 6) + k % n);

                        added[k / n * (n + 2) + k % n] += v;
                }
                d.a.x = x;
                d.a.y = y;
                d.a.y_type = LK_F16;
                d.a.add = i % 2 ? &add : NULL;
                assert_int_equal(ops->norm(c, &d.a), 0);
                assert_memory_equal(x, added, x_size);
                d.a.type = LK_F32;
                for (uint64_t k = 0; k < m; k++) {
                        CLEANUP_FREE float *row = allocate(n * sizeof(float));

                        rule(&d.a, k, row);
                        for (uint64_t j = 0; j < n; j++)
                                put(expected, LK_F16, j, row[j]);
                        assert_memory_equal(y + k * (n + 6) * 2, expected, n * 2);
                }
                data_done(&d);
                assert_null(ops->context_free(c));
        }
}

static void norm_rounded_first_follows_rule(void **state) {
        static const uint64_t ns[] = {1, 16, 31, 96, 1027};

        for (unsigned i = 0; i < 2 * ELEMENTSOF(ns); i++) {
                Data d;

                data_make(13, ns[i / 2], i % 2 ? LK_BF16 : LK_F32, LK_BF16, false, &d);
                d.a.round_first = true;
                for (unsigned isa = 0; isa < ISAS; isa++) {
                        CLEANUP_FREE void *y = run(all_isas[isa], 1 + isa, &d);

                        if (y)
                                check_rule(&d.a, y);
                }
                data_done(&d);
        }
}

static void norm_against_double_is_accurate(void **state) {
        for (unsigned t = 0; t < 4; t++) {
                CLEANUP_FREE double *expected = allocate(20 * 5376 * sizeof(double));
                CLEANUP_FREE void *y = NULL;
                Data d;

                data_make(20, 5376, types[t % 2], LK_BF16, t / 2, &d);

                for (uint64_t i = 0; i < 20; i++) {
                        double sum = 0;

                        for (uint64_t j = 0; j < 5376; j++)
                                sum += (double) x_at(&d.a, i, j) * x_at(&d.a, i, j);

                        for (uint64_t j = 0; j < 5376; j++) {
                                double h = x_at(&d.a, i, j) / sqrt(sum / 5376 + 1e-5) *
                                           get(d.a.weight.data, LK_BF16, j);

                                if (d.a.mod)
                                        h = h * (1.0 + mod_at(&d.a, i, d.a.scale_at + j)) +
                                            mod_at(&d.a, i, d.a.shift_at + j);

                                expected[i * 5376 + j] = h;
                        }
                }

                y = run(LK_CPU_AUTO, 2, &d);
                /* bf16: one rounding of 1.53e-3, two with modulation, and a tenth */
                assert_true(relative_l2(y, d.a.type, d.a.y_ld, expected, 20, 5376) <
                            (t % 2 == 0          ? 1e-6
                                    : t / 2 == 0 ? 1.69e-3
                                                 : 2.4e-3));
                data_done(&d);
        }
}

static void norm_any_thread_count_same_bits(void **state) {
        static const uint32_t threads[] = {2, 3, 8, 0};
        CLEANUP_FREE void *first = NULL;
        Data d;

        data_make(407, 96, LK_BF16, LK_BF16, true, &d);
        first = run(LK_CPU_AUTO, 1, &d);

        for (unsigned i = 0; i < ELEMENTSOF(threads); i++) {
                CLEANUP_FREE void *y = run(LK_CPU_AUTO, threads[i], &d);

                assert_memory_equal(first, y, d.y_size);
        }

        data_done(&d);
}

static void norm_row_position_same_bits(void **state) {
        CLEANUP_FREE uint8_t *expected = NULL;
        float row[50];
        Data d;

        data_make(300, 50, LK_F32, LK_F32, true, &d);
        memcpy(row, d.x, sizeof(row));

        for (uint64_t at = 0; at < 300; at += 23) {
                CLEANUP_FREE uint8_t *y = NULL;
                float *x = d.x;

                for (uint64_t e = 0; e < 300 * d.a.x_ld; e++)
                        x[e] = NAN;
                for (uint64_t i = 0; i < 300; i++)
                        d.index[i] = i == at ? 2 : 1;

                memcpy(x + at * d.a.x_ld, row, sizeof(row));
                y = run(LK_CPU_AUTO, 2, &d);

                if (!expected)
                        expected = STEAL_PTR(y);
                else
                        assert_memory_equal(expected, y + at * d.a.y_ld * 4, sizeof(row));
        }

        data_done(&d);
}

/* Subnormal squares, and sums that overflow: no NaN where the formula has none. */
static void norm_extreme_rows_follow_rule(void **state) {
        static const float sizes[] = {0, 1e-30f, 1e-44f, 1e15f, 1e19f, 3e38f};
        Data d;

        data_make(ELEMENTSOF(sizes), 24, LK_F32, LK_F32, false, &d);
        for (uint64_t i = 0; i < d.a.m; i++)
                for (uint64_t j = 0; j < d.a.n; j++)
                        put(d.x, LK_F32, i * d.a.x_ld + j, sizes[i] * (j % 2 ? -1.0 : 1.0));

        for (unsigned isa = 0; isa < ISAS; isa++) {
                CLEANUP_FREE void *y = run(all_isas[isa], 1, &d);

                if (y)
                        check_rule(&d.a, y);
        }

        data_done(&d);
}

#define REFUSED(statement)                                                                                  \
        do {                                                                                                \
                LkNorm a = d.a;                                                                             \
                a.y = y;                                                                                    \
                statement;                                                                                  \
                assert_int_equal(ops->norm(c, &a), -EINVAL);                                                \
        } while (0)

static void norm_bad_argument_is_refused(void **state) {
        LkContext *c;
        const LkOps *ops = open_isa(LK_CPU_AUTO, 1, &c);
        CLEANUP_FREE void *y = guarded(2 * 14, LK_F32);
        int32_t negative[2] = {0, -1};
        Data d;

        data_make(2, 8, LK_F32, LK_F32, true, &d);
        assert_int_equal(ops->norm(NULL, &d.a), -EINVAL);
        assert_int_equal(ops->norm(c, NULL), -EINVAL);
        REFUSED(a.x = NULL);
        REFUSED(a.y = NULL);
        REFUSED(a.type = LK_F16);
        REFUSED(a.y_type = LK_F16); /* modulated */
        REFUSED(a.y_type = LK_BF16);
        REFUSED(a.x_ld = 7);
        REFUSED(a.y_ld = 7);
        REFUSED(a.weight.data = NULL);
        REFUSED(a.weight.n = 7);
        REFUSED(a.mod_index = NULL);
        REFUSED(a.mod_index = negative);
        REFUSED(a.mod_ld = 12);
        REFUSED(a.shift_at = UINT64_MAX);
        REFUSED(a.mod = (uint8_t *) d.mod + 1);
        REFUSED(a.mod_type = LK_BF16);
        REFUSED(a.round_first = true);
        REFUSED(a.mod_type = LK_F16);
        REFUSED(a.m = UINT64_MAX / 8);
        data_done(&d);
        assert_null(ops->context_free(c));
}

/* Everything that one call may do beside the norm, and the same by one operation after the other. */
typedef struct Neighbours {
        LkResidual add;
        LkQuantise quantise;
        uint8_t *x, *y; /* copies that are written */
        uint64_t x_size, y_size, q_size;
} Neighbours;

static void neighbours_make(const Data *d, bool gated, uint32_t rotation, void *source, Neighbours *n) {
        const LkNorm *a = &d->a;

        *n = (Neighbours){
                .add = {.type = a->type,
                        .m = a->m,
                        .n = a->n,
                        .x_ld = a->x_ld,
                        .y = source,
                        .y_ld = a->n + 3,
                        .mod = gated ? d->mod : NULL,
                        .mod_ld = a->mod_ld,
                        .mod_index = gated ? d->index : NULL,
                        .gate_at = 1},
                .quantise = {.rotation = rotation, .q_ld = a->n + 5},
                .x_size = a->m * a->x_ld * lk_type_size(a->type),
                .y_size = d->y_size,
                .q_size = a->m * (a->n + 5),
        };
        n->x = allocate(n->x_size);
        memcpy(n->x, d->x, n->x_size);
        n->y = guarded(n->y_size / lk_type_size(a->type), a->type);
        n->quantise.q = memset(allocate(n->q_size), 0x5a, n->q_size);
        n->quantise.scale = guarded(a->m, LK_F32);
        n->add.x = n->x;
}

static void neighbours_done(Neighbours *n) {
        free(n->x);
        free(n->y);
        free(n->quantise.q);
        free(n->quantise.scale);
}

static void assert_same_neighbours(const Neighbours *a, const Neighbours *b, uint64_t m, bool y) {
        assert_memory_equal(a->x, b->x, a->x_size);
        assert_memory_equal(a->quantise.q, b->quantise.q, a->q_size);
        assert_memory_equal(a->quantise.scale, b->quantise.scale, m * sizeof(float));
        if (y)
                assert_memory_equal(a->y, b->y, a->y_size);
        else
                for (uint64_t i = 0; i < b->y_size; i++)
                        assert_int_equal(b->y[i], 0x5a);
}

/* bits of `form`: 0 add, 1 gated, 2 quantise, 3 y is wanted */
static void check_neighbours(LkCpuIsa isa, const Data *d, unsigned form, uint32_t rotation, void *source) {
        LkContext *c;
        const LkOps *ops = open_isa(isa, 2, &c);
        Neighbours one, all;
        LkNorm a = d->a;

        if (!ops)
                return;

        neighbours_make(d, form & 2, rotation, source, &one);
        neighbours_make(d, form & 2, rotation, source, &all);

        a.x = one.x;
        a.y = one.y;
        if (form & 1)
                assert_int_equal(ops->residual(c, &one.add), 0);
        assert_int_equal(ops->norm(c, &a), 0);
        if (form & 4) {
                LkQuantise q = one.quantise;

                q.x_type = a.type;
                q.m = a.m;
                q.k = a.n;
                q.x = a.y;
                q.x_ld = a.y_ld;
                assert_int_equal(ops->quantise(c, &q), 0);
        }

        a.x = all.x;
        a.y = form & 8 || !(form & 4) ? all.y : NULL;
        a.add = form & 1 ? &all.add : NULL;
        a.quantise = form & 4 ? &all.quantise : NULL;
        assert_int_equal(ops->norm(c, &a), 0);
        assert_same_neighbours(&one, &all, a.m, a.y != NULL);

        neighbours_done(&one);
        neighbours_done(&all);
        assert_null(ops->context_free(c));
}

static void norm_with_neighbours_same_bits_as_one_by_one(void **state) {
        static const struct {
                uint64_t m, n;
                uint32_t rotation;
        } sizes[] = {{1, 256, 256}, {407, 96, 16}, {7, 1027, 0}, {2, 5376, 256}, {33, 20, 4}};

        for (unsigned i = 0; i < ELEMENTSOF(sizes) * 4; i++) {
                uint64_t seed = i;
                CLEANUP_FREE void *source = NULL;
                Data d;

                data_make(sizes[i / 4].m, sizes[i / 4].n, types[i % 2], LK_BF16, i / 2 % 2, &d);
                source = random_aligned(d.a.m * (d.a.n + 3), d.a.type, 3, &seed);
                for (unsigned form = 0; form < 16; form++)
                        if (d.mod || !(form & 2))
                                check_neighbours(all_isas[form % ISAS], &d, form, sizes[i / 4].rotation, source);
                data_done(&d);
        }
}

#define CONTRADICTION(statement)                                                                            \
        do {                                                                                                \
                LkNorm a = d.a;                                                                             \
                LkResidual add = n.add;                                                                     \
                LkQuantise quantise = n.quantise;                                                           \
                a.x = n.x;                                                                                  \
                a.y = n.y;                                                                                  \
                a.add = &add;                                                                               \
                a.quantise = &quantise;                                                                     \
                statement;                                                                                  \
                assert_int_equal(ops->norm(c, &a), -EINVAL);                                                \
        } while (0)

static void norm_contradicting_neighbour_is_refused(void **state) {
        LkContext *c;
        const LkOps *ops = open_isa(LK_CPU_AUTO, 1, &c);
        uint64_t seed = 5;
        CLEANUP_FREE void *source = random_aligned(4 * 35, LK_F32, 1, &seed);
        Neighbours n, before;
        Data d;

        data_make(4, 32, LK_F32, LK_F32, true, &d);
        neighbours_make(&d, true, 16, source, &n);
        neighbours_make(&d, true, 16, source, &before);
        CONTRADICTION(add.x = before.x);
        CONTRADICTION(add.x_ld = 32);
        CONTRADICTION(add.m = 3);
        CONTRADICTION(add.n = 31);
        CONTRADICTION(add.type = LK_BF16);
        CONTRADICTION(add.y = NULL);
        CONTRADICTION(add.gate_at = UINT64_MAX);
        CONTRADICTION(add.mod_index = NULL);
        CONTRADICTION(quantise.up = n.y);
        CONTRADICTION(quantise.q = NULL);
        CONTRADICTION(quantise.q_ld = 31);
        CONTRADICTION(quantise.scale = NULL);
        CONTRADICTION(quantise.rotation = 8);
        CONTRADICTION(quantise.rotation = 64);
        CONTRADICTION(a.y_ld = 31);
        CONTRADICTION((a.y = NULL, a.quantise = NULL));
        assert_same_neighbours(&before, &n, 4, false); /* nothing was written */
        neighbours_done(&n);
        neighbours_done(&before);
        data_done(&d);
        assert_null(ops->context_free(c));
}

int main(void) {
        static const struct CMUnitTest tests[] = {
                cmocka_unit_test(norm_sizes_follow_rule),
                cmocka_unit_test(norm_f32_modulation_follows_rule),
                cmocka_unit_test(norm_half_follows_rule),
                cmocka_unit_test(norm_rounded_first_follows_rule),
                cmocka_unit_test(norm_against_double_is_accurate),
                cmocka_unit_test(norm_any_thread_count_same_bits),
                cmocka_unit_test(norm_row_position_same_bits),
                cmocka_unit_test(norm_extreme_rows_follow_rule),
                cmocka_unit_test(norm_bad_argument_is_refused),
                cmocka_unit_test(norm_with_neighbours_same_bits_as_one_by_one),
                cmocka_unit_test(norm_contradicting_neighbour_is_refused),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
