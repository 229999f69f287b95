/* SPDX-License-Identifier: Apache-2.0 */
/* route against its rule: lists, counts and scores to the bit, by another way (sorting). */

#include "tests/unit/kernels/kernels-test.h"

enum { HEADS = 3, DIM = 16, WIDTH = HEADS * DIM, N = 41 };

typedef struct Scene {
        float *q, *k, *variance;
        uint32_t list[HEADS * N * N], count[HEADS * N];
        float score[HEADS * N * N];
} Scene;

static Scene *scene_new(void) {
        Scene *s = calloc(1, sizeof(*s));
        uint64_t seed = 7;

        assert_non_null(s);
        s->q = random_aligned(N * WIDTH, LK_F32, 1, &seed);
        s->k = random_aligned(N * WIDTH, LK_F32, 1, &seed);
        s->variance = random_aligned(WIDTH, LK_F32, 1, &seed);
        for (uint32_t i = 0; i < WIDTH; i++)
                s->variance[i] *= s->variance[i];
        return s;
}

static void scene_freep(Scene **s) {
        free((*s)->q);
        free((*s)->k);
        free((*s)->variance);
        free(*s);
}

static LkRoute scene_route(Scene *s) {
        return (LkRoute){.heads = HEADS, .head_dim = DIM, .n = N, .n_q = N, .scale = 0.25f, .q = s->q, .k = s->k,
                .variance = s->variance, .list = s->list, .count = s->count, .score = s->score};
}

static int by_size(const void *a, const void *b) {
        float x = *(const float *) a, y = *(const float *) b;

        return (x < y) - (x > y);
}

static int by_double(const void *a, const void *b) {
        double x = *(const double *) a, y = *(const double *) b;

        return (x < y) - (x > y);
}

static bool chosen(const LkRoute *a, const float *dot, uint32_t head, uint32_t i, uint32_t b) {
        float sorted[N], c = a->scale * 0x1.715476p+0f, v = 0;
        uint32_t n = 0;

        if (!a->by_rank) {
                for (uint32_t d = 0; d < DIM; d++) {
                        float q = a->q[i * WIDTH + head * DIM + d];

                        v = fmaf(q * q, a->variance[head * DIM + d], v);
                }
                return dot[b] * c > a->tau * sqrtf((c * c) * v + 1e-6f);
        }
        for (uint32_t e = a->sinks; e < N; e++)
                sorted[n++] = dot[e];
        qsort(sorted, n, sizeof(*sorted), by_size);
        return a->keep > 0 && b >= a->sinks && dot[b] >= sorted[a->keep - 1];
}

static void check_lists_of(const LkRoute *a) {
        for (uint32_t head = 0; head < HEADS; head++)
                for (uint32_t e = 0; e < a->n_q; e++) {
                        uint32_t i = a->first + e, at = head * a->n_q + e, wanted[N], n = 0, seen = 0;
                        float dot[N];

                        for (uint32_t b = 0; b < N; b++) {
                                dot[b] = 0;
                                for (uint32_t d = 0; d < DIM; d++)
                                        dot[b] = fmaf(a->q[i * WIDTH + head * DIM + d], a->k[b * WIDTH + head * DIM + d], dot[b]);
                                assert_true(a->score[at * N + b] == dot[b] * a->scale);
                        }
                        for (int pass = 0; pass < 2; pass++) {
                                for (uint32_t b = 0; b < N; b++) {
                                        bool near = (uint32_t) abs((int) i - (int) b) < a->reach;
                                        bool sees = b < a->sinks || (i >= a->dense_begin && i < a->dense_end) || near ||
                                                    chosen(a, dot, head, i, b);

                                        if (sees == (pass == 0))
                                                wanted[n++] = b;
                                }
                                if (pass == 0)
                                        seen = n;
                        }
                        assert_int_equal(a->count[at], seen);
                        assert_memory_equal(a->list + at * N, wanted, sizeof(wanted));
                }
}

static void route_every_rule_gives_its_lists(void **state) {
        __attribute__((cleanup(scene_freep))) Scene *s = scene_new();
        static const struct {
                bool by_rank;
                uint32_t keep, sinks, dense_begin, dense_end, reach, first, n_q;
                float tau;
        } rules[] = {
                {.tau = 1, .n_q = N}, {.tau = 1.3f, .reach = 2, .n_q = N}, {.tau = 0.5f, .sinks = 3, .reach = 1, .first = 5, .n_q = 7},
                {.tau = 2, .sinks = 3, .dense_begin = 1, .dense_end = 3, .reach = 2, .n_q = N},
                {.by_rank = true, .keep = 4, .n_q = N}, {.by_rank = true, .keep = 9, .sinks = 5, .reach = 2, .n_q = N},
                {.by_rank = true, .keep = N, .n_q = 3}, {.by_rank = true, .keep = 0, .reach = 2, .n_q = N},
                {.by_rank = true, .keep = 1, .sinks = N - 1, .first = N - 1, .n_q = 1},
        };

        s->k[WIDTH * 6] = -0.0f; /* and a tie: blocks 8 and 9 are alike */
        memcpy(s->k + WIDTH * 9, s->k + WIDTH * 8, WIDTH * sizeof(float));
        for (unsigned i = 0; i < ELEMENTSOF(rules) * ISAS; i++) {
                unsigned rule = i / ISAS;
                LkRoute a = scene_route(s);
                LkContext *c;
                const LkOps *ops = open_isa(all_isas[i % ISAS], 1 + i % 3, &c);

                if (!ops)
                        continue;
                a.by_rank = rules[rule].by_rank;
                a.keep = rules[rule].keep;
                a.tau = rules[rule].tau;
                a.sinks = rules[rule].sinks;
                a.dense_begin = rules[rule].dense_begin;
                a.dense_end = rules[rule].dense_end;
                a.reach = rules[rule].reach;
                a.first = rules[rule].first;
                a.n_q = rules[rule].n_q;
                assert_int_equal(ops->route(c, &a), 0);
                check_lists_of(&a);
                assert_null(ops->context_free(c));
        }
}

static void route_no_number_is_never_chosen(void **state) {
        __attribute__((cleanup(scene_freep))) Scene *s = scene_new();
        LkRoute a = scene_route(s);
        LkContext *c;
        const LkOps *ops = open_isa(LK_CPU_AUTO, 2, &c);

        for (uint32_t d = 0; d < WIDTH; d++)
                s->k[3 * WIDTH + d] = NAN;
        a.by_rank = true;
        a.keep = N;
        assert_int_equal(ops->route(c, &a), 0);
        for (uint32_t i = 0; i < HEADS * N; i++) {
                assert_int_equal(s->count[i], N - 1);
                assert_int_equal(s->list[i * N + N - 1], 3);
        }
        assert_null(ops->context_free(c));
}

/* As many blocks as the released model's longest films have. */
enum { MANY = 1152, QUERIES = 256, LONG = 128 };

/* What the rule makes of f64: how far each dot is above what it must reach, relative to the sizes that were summed up. */
static void far_above(const LkRoute *a, uint32_t head, uint32_t i, double *dot, double *ret) {
        const float *q = a->q + (i * a->heads + head) * LONG;
        double c = (double) a->scale * M_LOG2E, v = 0, limit = 0, size[MANY];

        for (uint32_t b = 0; b < MANY; b++) {
                dot[b] = size[b] = 0;
                for (uint32_t d = 0; d < LONG; d++) {
                        double x = (double) q[d] * (double) a->k[(b * a->heads + head) * LONG + d];

                        dot[b] += x;
                        size[b] += fabs(x);
                }
        }
        for (uint32_t d = 0; d < LONG; d++)
                v += (double) q[d] * (double) q[d] * (double) a->variance[head * LONG + d];
        if (a->by_rank) {
                double sorted[MANY];

                memcpy(sorted, dot, sizeof(sorted));
                qsort(sorted, MANY, sizeof(*sorted), by_double);
                limit = (sorted[a->keep - 1] + sorted[a->keep]) / 2;
        } else
                limit = (double) a->tau * sqrt(c * c * v + 1e-6) / c;
        for (uint32_t b = 0; b < MANY; b++)
                ret[b] = (dot[b] - limit) / size[b];
}

/* Blocks that f32 chooses otherwise than f64 would are such whose score ties with the limit within rounding, and at most 1e-5 of all. */
static void route_differs_from_f64_in_ties_alone(void **state) {
        const uint32_t heads = 2, width = heads * LONG, lists = heads * QUERIES;
        uint64_t seed = 11, wrong = 0, all = 0;
        float *q = random_aligned(MANY * width, LK_F32, 0.125, &seed), *k = random_aligned(MANY * width, LK_F32, 0.125, &seed);
        float *variance = random_aligned(width, LK_F32, 1, &seed), *score = malloc(lists * MANY * sizeof(float));
        uint32_t *list = malloc(lists * MANY * sizeof(*list)), count[2 * QUERIES];
        LkRoute a = {.heads = heads, .head_dim = LONG, .n = MANY, .first = 300, .n_q = QUERIES, .scale = 1 / sqrtf(LONG), .q = q, .k = k,
                .variance = variance, .keep = MANY / 10, .tau = 1.3f, .list = list, .count = count, .score = score};
        LkContext *c;
        const LkOps *ops = open_isa(LK_CPU_AUTO, 2, &c);

        assert_true(score && list);
        for (uint32_t i = 0; i < width; i++)
                variance[i] = 1 / 64.0f + variance[i] / 1000;
        for (int rank = 0; rank < 2; rank++) {
                a.by_rank = rank == 1;
                assert_int_equal(ops->route(c, &a), 0);
                for (uint32_t t = 0; t < lists; t++) {
                        double dot[MANY], above[MANY];
                        bool seen[MANY] = {};

                        assert_true(count[t] > MANY / 20 && count[t] < MANY / 5);
                        for (uint32_t e = 0; e < count[t]; e++)
                                seen[list[t * MANY + e]] = true;
                        far_above(&a, t / QUERIES, a.first + t % QUERIES, dot, above);
                        for (uint32_t b = 0; b < MANY; b++, all++)
                                if (seen[b] != (above[b] > 0)) {
                                        wrong++;
                                        assert_true(fabs(above[b]) < 4e-6); /* sums of 128 products in f32 */
                                }
                }
        }
        print_message("%llu of %llu blocks tie within rounding and are chosen otherwise than in f64\n", (unsigned long long) wrong,
                (unsigned long long) all);
        assert_true((double) wrong <= 1e-5 * (double) all);
        assert_null(ops->context_free(c));
        free(q);
        free(k);
        free(variance);
        free(score);
        free(list);
}

static void route_bad_argument_is_refused(void **state) {
        __attribute__((cleanup(scene_freep))) Scene *s = scene_new();
        const LkRoute good = scene_route(s);
        LkRoute a = good;
        LkContext *c;
        const LkOps *ops = open_isa(LK_CPU_AUTO, 1, &c);

        assert_int_equal(ops->route(NULL, &good), -EINVAL);
        assert_int_equal(ops->route(c, NULL), -EINVAL);
        a.n = 0;
        assert_int_equal(ops->route(c, &a), -EINVAL);
        a = good;
        a.first = 1; /* one block too many */
        assert_int_equal(ops->route(c, &a), -EINVAL);
        a = good;
        a.variance = NULL;
        assert_int_equal(ops->route(c, &a), -EINVAL);
        a.by_rank = true; /* does not need it */
        assert_int_equal(ops->route(c, &a), 0);
        a = good;
        a.score = NULL;
        assert_int_equal(ops->route(c, &a), -EINVAL);
        assert_null(ops->context_free(c));
}

int main(void) {
        static const struct CMUnitTest tests[] = {
                cmocka_unit_test(route_every_rule_gives_its_lists),
                cmocka_unit_test(route_no_number_is_never_chosen),
                cmocka_unit_test(route_differs_from_f64_in_ties_alone),
                cmocka_unit_test(route_bad_argument_is_refused),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
