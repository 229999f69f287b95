/* SPDX-License-Identifier: Apache-2.0 */
/* attention against the rule that kernels/cpu/attention.c states (bits) and against double precision. */

#define LK_CPU_LEVEL 1 /* exp_one(): the rule names the exponential, test-exp tests it */

#include "tests/unit/kernels/kernels-test.h"

#include "kernels/cpu/vec.h"

typedef struct Shape {
        uint64_t n_q, n_k;
        uint32_t heads, head_dim;
        LkType type;
        uint32_t kv_heads; /* 0: heads */
        bool causal;
        uint64_t first_row;
} Shape;

/* Rows of q, k, v side by side, as the qkv linear writes them. */
typedef struct Data {
        LkAttention a;
        void *q, *kv;
        uint64_t o_size;
} Data;

static void data_make(const Shape *s, double size, Data *d) {
        uint64_t seed = s->n_q * 3 + s->n_k * 5 + s->head_dim, n = (uint64_t) s->heads * s->head_dim;
        uint64_t keys = (uint64_t) (s->kv_heads ? s->kv_heads : s->heads) * s->head_dim;

        *d = (Data){
                .a = {.type = s->type,
                        .n_q = s->n_q,
                        .n_k = s->n_k,
                        .heads = s->heads,
                        .head_dim = s->head_dim,
                        .kv_heads = s->kv_heads,
                        .causal = s->causal,
                        .first_row = s->first_row,
                        .scale = 1 / sqrtf((float) s->head_dim),
                        .q_ld = n + 8,
                        .k_ld = 2 * keys,
                        .v_ld = 2 * keys,
                        .o_ld = n + 4},
                .q = random_aligned(s->n_q * (n + 8), s->type, size, &seed),
                .kv = random_aligned(s->n_k * 2 * keys, s->type, 1, &seed),
                .o_size = s->n_q * (n + 4) * lk_type_size(s->type),
        };
        d->a.q = d->q;
        d->a.k = d->kv;
        d->a.v = (uint8_t *) d->kv + keys * lk_type_size(s->type);
}

static void data_done(Data *d) {
        free(d->q);
        free(d->kv);
}

static double element(
        const LkAttention *a, const void *p, uint64_t row, uint64_t ld, uint32_t head, uint32_t dim) {
        return get(p, a->type, row * ld + (uint64_t) head * a->head_dim + dim);
}

static uint32_t kv_head(const LkAttention *a, uint32_t head) {
        return a->kv_heads ? head / (a->heads / a->kv_heads) : head;
}

static uint64_t seen(const LkAttention *a, uint64_t i) {
        return a->causal ? a->first_row + i + 1 : a->n_k;
}

static float rule_score(const LkAttention *a, uint64_t i, uint64_t j, uint32_t head) {
        float dot = 0;

        for (uint32_t d = 0; d < a->head_dim; d++)
                dot = fmaf((float) element(a, a->q, i, a->q_ld, head, d),
                        (float) element(a, a->k, j, a->k_ld, kv_head(a, head), d), dot);

        return a->scale * dot;
}

/* One row and head, straight from the text. */
static void rule(const LkAttention *a, uint64_t i, uint32_t head, float *o) {
        float m = -INFINITY, l[8] = {};

        memset(o, 0, a->head_dim * sizeof(float));

        for (uint64_t key = 0; key < seen(a, i); key += LK_KEY_TILE) {
                float p[LK_KEY_TILE], next = m, u, f;

                for (uint64_t j = 0; j < LK_KEY_TILE; j++) {
                        p[j] = key + j < seen(a, i) ? rule_score(a, i, key + j, head) : -INFINITY;
                        next = p[j] > next ? p[j] : next;
                }

                u = next == -INFINITY ? 0 : next;
                f = exp_one(m - u);
                m = next;

                for (uint64_t j = 0; j < LK_KEY_TILE; j++)
                        p[j] = exp_one(p[j] - u);

                for (int lane = 0; lane < 8; lane++) {
                        float b[4];

                        for (int g = 0; g < 4; g++)
                                b[g] = p[16 * g + lane] + p[16 * g + 8 + lane];

                        l[lane] = fmaf(l[lane], f, (b[0] + b[1]) + (b[2] + b[3]));
                }

                for (uint32_t d = 0; d < a->head_dim; d++) {
                        o[d] *= f;
                        for (uint64_t j = 0; j < LK_KEY_TILE && key + j < seen(a, i); j++)
                                o[d] = fmaf((float) round_type(p[j], a->type),
                                        (float) element(a, a->v, key + j, a->v_ld, kv_head(a, head), d),
                                        o[d]);
                }
        }

        for (uint32_t d = 0; d < a->head_dim; d++)
                o[d] = tree(l) == 0 ? 0 : o[d] / tree(l);
}

static void check_rule(const LkAttention *a, const uint8_t *got) {
        uint64_t size = lk_type_size(a->type), n = (uint64_t) a->heads * a->head_dim;

        for (uint64_t i = 0; i < a->n_q; i++) {
                for (uint32_t head = 0; head < a->heads; head++) {
                        float o[256];
                        uint8_t expected[256 * 4];

                        rule(a, i, head, o);
                        for (uint32_t d = 0; d < a->head_dim; d++)
                                put(expected, a->type, d, o[d]);

                        assert_memory_equal(got + (i * a->o_ld + (uint64_t) head * a->head_dim) * size,
                                expected, a->head_dim * size);
                }

                for (uint64_t b = n * size; b < a->o_ld * size; b++)
                        assert_int_equal(got[i * a->o_ld * size + b], 0x5a);
        }
}

static void *run(LkCpuIsa isa, uint32_t threads, const Data *d) {
        LkContext *c;
        const LkOps *ops = open_isa(isa, threads, &c);
        LkAttention a = d->a;

        if (!ops)
                return NULL;

        a.o = guarded(d->o_size / lk_type_size(a.type), a.type);
        assert_int_equal(ops->attention(c, &a), 0);
        assert_null(ops->context_free(c));
        return a.o;
}

static void check_all_isas(const Data *d) {
        for (unsigned i = 0; i < ISAS; i++) {
                CLEANUP_FREE void *o = run(all_isas[i], 1 + i, d);

                if (o)
                        check_rule(&d->a, o);
        }
}

static void attention_sizes_follow_rule(void **state) {
        static const uint64_t n_qs[] = {1, 5, 6, 7, 15, 101}, n_ks[] = {1, 63, 64, 65, 130};
        static const uint32_t dims[] = {8, 24, 20, 40, 64, 12, 128, 256};
        unsigned i = 0;

        for (unsigned q = 0; q < ELEMENTSOF(n_qs); q++)
                for (unsigned k = 0; k < ELEMENTSOF(n_ks); k++, i++) {
                        Shape s = {n_qs[q], n_ks[k], 1 + i % 3, dims[i % ELEMENTSOF(dims)],
                                i / 2 % 3 == 0 ? LK_F32 : i / 2 % 3 == 1 ? LK_BF16 : LK_F16};
                        Data d;

                        if (s.n_q * s.n_k * s.heads * s.head_dim > 1000000)
                                s.heads = 1;

                        data_make(&s, 1, &d);
                        check_all_isas(&d);
                        data_done(&d);
                }
}

/* Groups of heads on one key head; causal from the first row and from a later one. */
static void attention_grouped_and_causal_follow_rule(void **state) {
        static const Shape shapes[] = {
                {15, 70, 6, 16, LK_F32, 2, false, 0},
                {31, 65, 8, 24, LK_BF16, 1, false, 0},
                {130, 130, 4, 16, LK_F32, 2, true, 0},
                {101, 230, 3, 40, LK_BF16, 3, true, 129},
                {70, 135, 6, 32, LK_F32, 2, true, 60},
                {1, 200, 2, 8, LK_F32, 1, true, 63},
                {1, 200, 2, 8, LK_BF16, 1, true, 64},
                {300, 310, 1, 8, LK_BF16, 0, true, 7},
        };

        for (unsigned i = 0; i < ELEMENTSOF(shapes); i++) {
                Data d;

                data_make(shapes + i, 1, &d);
                check_all_isas(&d);
                data_done(&d);
        }
}

/* Sequences behind each other are as many calls. */
static void attention_sequences_same_bits_as_alone(void **state) {
        static const Shape shapes[] = {{35, 70, 6, 16, LK_F16, 2, false, 0}, {30, 65, 2, 24, LK_F32, 0, true, 5}};

        for (unsigned i = 0; i < ELEMENTSOF(shapes); i++) {
                Shape s = shapes[i];
                CLEANUP_FREE uint8_t *all = NULL;
                Data d;

                s.n_q *= 3;
                s.n_k *= 3;
                data_make(&s, 1, &d);
                d.a.n_q /= 3;
                d.a.n_k /= 3;
                d.a.sequences = 3;
                all = run(LK_CPU_AUTO, 2, &d);
                for (unsigned k = 0; k < 3; k++) {
                        uint64_t size = lk_type_size(s.type);
                        Data one = d;

                        one.a.sequences = k % 2;
                        one.a.q = (const uint8_t *) d.a.q + k * d.a.n_q * d.a.q_ld * size;
                        one.a.k = (const uint8_t *) d.a.k + k * d.a.n_k * d.a.k_ld * size;
                        one.a.v = (const uint8_t *) d.a.v + k * d.a.n_k * d.a.v_ld * size;
                        check_rule(&one.a, all + k * d.a.n_q * d.a.o_ld * size);
                }
                data_done(&d);
        }
}

/* What a row does not see may hold anything, and a range of the queries alone gives the rows of the whole.
 */
static void attention_causal_range_same_bits(void **state) {
        static const uint64_t firsts[] = {0, 1, 5, 63, 64, 100, 128, 199}, ns[] = {1, 3, 14, 15, 100};
        static const Shape s = {200, 200, 4, 16, LK_F32, 2, true, 0};

        for (unsigned isa = 0; isa < ISAS; isa++) {
                CLEANUP_FREE uint8_t *whole = NULL;
                Data d;

                if (!lk_cpu_ops(all_isas[isa]))
                        continue;
                data_make(&s, 1, &d);
                whole = run(all_isas[isa], 1, &d);

                for (unsigned i = 0; i < ELEMENTSOF(firsts) * ELEMENTSOF(ns); i++) {
                        CLEANUP_FREE uint8_t *o = NULL;
                        uint64_t first = firsts[i % ELEMENTSOF(firsts)], row = d.a.o_ld * sizeof(float);
                        uint64_t n = ns[i / ELEMENTSOF(firsts)];
                        CLEANUP_FREE float *kv = allocate(200 * d.a.k_ld * sizeof(float));
                        Data part = d;

                        part.a.n_q = n = first + n > 200 ? 200 - first : n;
                        part.a.first_row = first;
                        part.a.q = (const float *) d.a.q + first * d.a.q_ld;
                        memcpy(kv, d.kv, 200 * d.a.k_ld * sizeof(float));
                        for (uint64_t e = (first + n) * d.a.k_ld; e < 200 * d.a.k_ld; e++)
                                kv[e] = NAN;
                        for (uint64_t e = 32; e < 64 && n > 1; e++) /* v of the last row's own key */
                                kv[(first + n - 1) * d.a.k_ld + e] = INFINITY;
                        part.a.k = kv;
                        part.a.v = kv + 32;
                        o = run(all_isas[isa], 2, &part);
                        assert_memory_equal(o, whole + first * row, (n > 1 ? n - 1 : n) * row);
                }
                data_done(&d);
        }
}

/* More query rows than one task takes at any instruction set (224). */
static void attention_many_rows_follow_rule(void **state) {
        static const Shape s = {470, 70, 1, 16, LK_F32};
        Data d;

        data_make(&s, 1, &d);
        check_all_isas(&d);
        data_done(&d);
}

/* Scores up to some hundreds: the running maximum moves and whole tiles vanish. */
static void attention_peaked_follows_rule(void **state) {
        Shape s = {9, 300, 1, 32, LK_F32};
        Data d;

        for (unsigned i = 0; i < 2; i++) {
                s.type = i ? LK_BF16 : LK_F32;
                data_make(&s, 100, &d);
                check_all_isas(&d);
                data_done(&d);
        }
}

static void oracle(const LkAttention *a, double *o) {
        CLEANUP_FREE double *p = allocate(a->n_k * sizeof(double));
        uint64_t n = (uint64_t) a->heads * a->head_dim;

        for (uint64_t i = 0; i < a->n_q; i++)
                for (uint32_t head = 0; head < a->heads; head++) {
                        double max = -INFINITY, sum = 0;

                        for (uint64_t j = 0; j < a->n_k; j++) {
                                p[j] = 0;
                                for (uint32_t d = 0; d < a->head_dim; d++)
                                        p[j] += element(a, a->q, i, a->q_ld, head, d) *
                                                element(a, a->k, j, a->k_ld, head, d);
                                p[j] *= a->scale;
                                max = fmax(max, p[j]);
                        }

                        for (uint64_t j = 0; j < a->n_k; j++)
                                sum += p[j] = exp(p[j] - max);

                        for (uint32_t d = 0; d < a->head_dim; d++) {
                                double v = 0;

                                for (uint64_t j = 0; j < a->n_k; j++)
                                        v += p[j] * element(a, a->v, j, a->v_ld, head, d);

                                o[i * n + (uint64_t) head * a->head_dim + d] = v / sum;
                        }
                }
}

static void attention_against_double_is_accurate(void **state) {
        /* Larger queries make larger scores, and a score's own rounding counts in the exponent. */
        static const double sizes[] = {0.3, 1, 5}, limits[] = {1e-6, 1e-6, 2e-6};
        Shape s = {60, 400, 2, 128, LK_F32};

        for (unsigned i = 0; i < 6; i++) {
                CLEANUP_FREE double *expected = allocate(s.n_q * 256 * sizeof(double));
                CLEANUP_FREE void *o = NULL;
                double error;
                Data d;

                s.type = i % 2 ? LK_BF16 : LK_F32;
                data_make(&s, sizes[i / 2], &d);
                oracle(&d.a, expected);
                o = run(LK_CPU_AUTO, 2, &d);
                error = relative_l2(o, s.type, d.a.o_ld, expected, s.n_q, 256);

                /* bf16: two roundings of 1.53e-3 each (probabilities, result), and a tenth */
                if (error > (s.type == LK_F32 ? limits[i / 2] : 2.4e-3))
                        fail_msg("queries of size %g: error %g", sizes[i / 2], error);

                data_done(&d);
        }
}

static void attention_any_thread_count_same_bits(void **state) {
        static const uint32_t threads[] = {2, 3, 8, 0};
        static const Shape s = {300, 130, 3, 64, LK_BF16};
        CLEANUP_FREE void *first = NULL;
        Data d;

        data_make(&s, 1, &d);
        first = run(LK_CPU_AUTO, 1, &d);

        for (unsigned i = 0; i < ELEMENTSOF(threads); i++) {
                CLEANUP_FREE void *o = run(LK_CPU_AUTO, threads[i], &d);

                assert_memory_equal(first, o, d.o_size);
        }

        data_done(&d);
}

/* The same query row at every place of a call, among NaN rows, then among rows a thousand times larger. */
static void attention_row_position_same_bits(void **state) {
        static const uint64_t n_qs[] = {1, 2, 6, 7, 14, 31, 230};
        static const Shape s = {230, 100, 1, 32, LK_F32};

        for (unsigned isa = 0; isa < ISAS; isa++) {
                CLEANUP_FREE uint8_t *expected = NULL;
                float row[32], *q;
                Data d;

                if (!lk_cpu_ops(all_isas[isa]))
                        continue;

                data_make(&s, 1, &d);
                q = d.q;
                memcpy(row, q, sizeof(row));

                for (unsigned i = 0; i < ELEMENTSOF(n_qs); i++)
                        for (uint64_t at = 0; at < n_qs[i]; at += 1 + n_qs[i] / 12) {
                                CLEANUP_FREE uint8_t *o = NULL;

                                for (uint64_t e = 0; e < n_qs[i] * d.a.q_ld; e++)
                                        q[e] = at % 2 ? NAN : 1000.0f * row[e % 32];

                                memcpy(q + at * d.a.q_ld, row, sizeof(row));
                                d.a.n_q = n_qs[i];
                                o = run(all_isas[isa], 1, &d);

                                if (!expected)
                                        expected = STEAL_PTR(o);
                                else
                                        assert_memory_equal(expected, o + at * d.a.o_ld * 4, sizeof(row));
                        }

                data_done(&d);
        }
}

static void attention_head_slice_same_bits(void **state) {
        static const Shape s = {20, 90, 7, 24, LK_BF16};
        CLEANUP_FREE uint8_t *whole = NULL;
        Data d;

        data_make(&s, 1, &d);
        whole = run(LK_CPU_AUTO, 1, &d);

        for (uint32_t head = 0; head < s.heads; head += 3) {
                uint64_t skip = (uint64_t) head * s.head_dim * 2;
                CLEANUP_FREE uint8_t *o = NULL;
                Data one = d;

                one.a.heads = 1;
                one.a.q = (const uint8_t *) d.a.q + skip;
                one.a.k = (const uint8_t *) d.a.k + skip;
                one.a.v = (const uint8_t *) d.a.v + skip;
                o = run(LK_CPU_AUTO, 1, &one);

                for (uint64_t i = 0; i < s.n_q; i++)
                        assert_memory_equal(
                                whole + i * d.a.o_ld * 2 + skip, o + i * d.a.o_ld * 2, s.head_dim * 2u);
        }

        data_done(&d);
}

/* Keys 0..69 give -inf (a whole tile and a part), the others are ordinary: only they count. */
static void attention_infinite_scores_count_nothing(void **state) {
        static const Shape s = {3, 100, 1, 8, LK_F32};
        CLEANUP_FREE double *expected = allocate(3 * 8 * sizeof(double));
        float *q, *k;
        Data d;

        data_make(&s, 1, &d);
        q = d.q;
        k = d.kv;
        for (uint64_t i = 0; i < s.n_q; i++)
                q[i * d.a.q_ld] = 1;
        for (uint64_t j = 0; j < 70; j++)
                k[j * d.a.k_ld] = -INFINITY;

        oracle(&d.a, expected);

        for (unsigned i = 0; i < ISAS; i++) {
                CLEANUP_FREE void *o = run(all_isas[i], 1, &d);

                if (o)
                        assert_true(relative_l2(o, LK_F32, d.a.o_ld, expected, 3, 8) < 1e-6);
        }

        d.a.n_k = 70;
        check_all_isas(&d); /* nothing left: zeros, by the rule */
        data_done(&d);
}

static void attention_nan_stays_in_its_row(void **state) {
        static const Shape s = {15, 70, 2, 16, LK_BF16};
        CLEANUP_FREE uint8_t *clean = NULL, *o = NULL;
        uint16_t *q;
        Data d;

        data_make(&s, 1, &d);
        clean = run(LK_CPU_AUTO, 1, &d);
        q = d.q;
        q[4 * d.a.q_ld + 3] = 0x7fc0; /* row 4, head 0 */
        o = run(LK_CPU_AUTO, 1, &d);

        for (uint64_t i = 0; i < s.n_q; i++)
                for (uint64_t e = 0; e < 32; e++) {
                        uint64_t at = i * d.a.o_ld + e;

                        if (i == 4 && e < 16)
                                assert_true(isnan(get(o, LK_BF16, at)));
                        else
                                assert_true(get(o, LK_BF16, at) == get(clean, LK_BF16, at));
                }

        data_done(&d);
}

#define REFUSED(statement)                                                                                  \
        do {                                                                                                \
                LkAttention a = good;                                                                       \
                statement;                                                                                  \
                assert_int_equal(ops->attention(c, &a), -EINVAL);                                           \
        } while (0)

static void attention_bad_argument_is_refused(void **state) {
        float x[16] = {1}, o[16];
        LkAttention good = {.type = LK_F32,
                .n_q = 2,
                .n_k = 2,
                .heads = 1,
                .head_dim = 8,
                .scale = 1,
                .q = x,
                .k = x,
                .v = x,
                .o = o,
                .q_ld = 8,
                .k_ld = 8,
                .v_ld = 8,
                .o_ld = 8};
        LkContext *c;
        const LkOps *ops = open_isa(LK_CPU_AUTO, 1, &c);

        assert_int_equal(ops->attention(c, &good), 0);
        assert_int_equal(ops->attention(NULL, &good), -EINVAL);
        assert_int_equal(ops->attention(c, NULL), -EINVAL);
        REFUSED(a.q = NULL);
        REFUSED(a.k = NULL);
        REFUSED(a.v = NULL);
        REFUSED(a.o = NULL);
        REFUSED(a.type = LK_I8);
        REFUSED(a.sequences = UINT64_MAX / 2);
        REFUSED(a.head_dim = 0);
        REFUSED(a.head_dim = 2);
        REFUSED(a.head_dim = 7);
        REFUSED(a.head_dim = 264; a.q_ld = a.k_ld = a.v_ld = a.o_ld = 264);
        REFUSED(a.heads = 2);
        REFUSED(a.n_k = 0);
        REFUSED(a.k_ld = 7);
        REFUSED(a.n_q = UINT64_MAX / 8);
        REFUSED(a.n_k = UINT64_MAX / 16);
        REFUSED(a.kv_heads = 2);
        REFUSED(a.causal = true; a.first_row = 1);
        REFUSED(a.causal = true; a.first_row = UINT64_MAX);

        good.n_q = 0;
        assert_int_equal(ops->attention(c, &good), 0);
        assert_null(ops->context_free(c));
}

int main(void) {
        static const struct CMUnitTest tests[] = {
                cmocka_unit_test(attention_sizes_follow_rule),
                cmocka_unit_test(attention_grouped_and_causal_follow_rule),
                cmocka_unit_test(attention_sequences_same_bits_as_alone),
                cmocka_unit_test(attention_causal_range_same_bits),
                cmocka_unit_test(attention_many_rows_follow_rule),
                cmocka_unit_test(attention_peaked_follows_rule),
                cmocka_unit_test(attention_against_double_is_accurate),
                cmocka_unit_test(attention_any_thread_count_same_bits),
                cmocka_unit_test(attention_row_position_same_bits),
                cmocka_unit_test(attention_head_slice_same_bits),
                cmocka_unit_test(attention_infinite_scores_count_nothing),
                cmocka_unit_test(attention_nan_stays_in_its_row),
                cmocka_unit_test(attention_bad_argument_is_refused),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
