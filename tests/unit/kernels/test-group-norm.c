/* SPDX-License-Identifier: Apache-2.0 */
/* group_norm against its rule: bits without silu, double precision with it. */

#include "tests/unit/kernels/kernels-test.h"

typedef struct Case {
        uint64_t frames, pixels, channels;
        uint32_t groups;
        LkType weight;
        unsigned offset;
} Case;

static const Case cases[] = {
        {1, 1, 32, 32, LK_F32, 0},
        {3, 5, 12, 4, LK_F16, 1},
        {2, 256, 6, 2, LK_BF16, 2},
        {2, 257, 40, 8, LK_F32, 3},
        {1, 1000, 64, 32, LK_F16, 0},
        {5, 700, 9, 1, LK_F32, 1},
};

typedef struct Data {
        LkGroupNorm a;
        void *x_base, *weight_base, *bias_base;
        uint64_t n;
} Data;

static void data_make(const Case *c, Data *d) {
        uint64_t seed = c->pixels * 3 + c->channels;

        *d = (Data){.a = {.frames = c->frames,
                            .pixels = c->pixels,
                            .channels = c->channels,
                            .groups = c->groups,
                            .eps = 1e-6f},
                .n = c->frames * c->pixels * c->channels};
        d->a.x = random_array(d->n, LK_F32, 0, 1, &seed, &d->x_base);
        for (uint64_t i = 0; i < d->n; i++) /* a mean that is not zero, another one per channel */
                ((float *) d->x_base)[i] += (float) (i % c->channels) - 3;
        d->a.weight = (LkVector){
                .data = random_array(c->channels, c->weight, c->offset, 1, &seed, &d->weight_base),
                .type = c->weight,
                .n = c->channels};
        d->a.bias =
                (LkVector){.data = random_array(c->channels, c->weight, c->offset, 1, &seed, &d->bias_base),
                        .type = c->weight,
                        .n = c->channels};
}

static void data_done(Data *d) {
        free(d->x_base);
        free(d->weight_base);
        free(d->bias_base);
}

/* The sum of x (or of its squared distance from *mean) over a frame's group, as ops.h says. */
static double group_sum(const LkGroupNorm *a, uint64_t frame, uint64_t group, const float *mean) {
        uint64_t width = a->channels / a->groups;
        double total = 0;

        for (uint64_t begin = 0; begin < a->pixels; begin += LK_GROUP_PIXELS)
                for (uint64_t c = group * width; c < (group + 1) * width; c++) {
                        float sum = 0;

                        for (uint64_t p = begin; p < a->pixels && p < begin + LK_GROUP_PIXELS; p++) {
                                float v = a->x[(frame * a->pixels + p) * a->channels + c];

                                if (mean) {
                                        v = v - *mean;
                                        sum = fmaf(v, v, sum);
                                } else
                                        sum = sum + v;
                        }
                        total += (double) sum;
                }
        return total;
}

static void rule(const LkGroupNorm *a, float *y) {
        uint64_t width = a->channels / a->groups;
        double n = (double) (a->pixels * width);

        for (uint64_t frame = 0; frame < a->frames; frame++)
                for (uint64_t group = 0; group < a->groups; group++) {
                        float mean = (float) (group_sum(a, frame, group, NULL) / n);
                        float rstd = 1 / sqrtf((float) (group_sum(a, frame, group, &mean) / n) + a->eps);

                        for (uint64_t i = 0; i < a->pixels * width; i++) {
                                uint64_t c = group * width + i % width;
                                uint64_t at = (frame * a->pixels + i / width) * a->channels + c;

                                y[at] = fmaf((a->x[at] - mean) * rstd,
                                        (float) get(a->weight.data, a->weight.type, c),
                                        (float) get(a->bias.data, a->bias.type, c));
                        }
                }
}

static void *run(LkCpuIsa isa, uint32_t threads, const Data *d, bool silu, bool in_place) {
        LkContext *c;
        const LkOps *ops = open_isa(isa, threads, &c);
        LkGroupNorm a = d->a;

        if (!ops)
                return NULL;
        a.silu = silu;
        a.y = guarded(d->n + 8, LK_F32);
        if (in_place) {
                memcpy(a.y, a.x, d->n * sizeof(float));
                a.x = a.y;
        }
        assert_int_equal(ops->group_norm(c, &a), 0);
        for (uint64_t i = 0; i < 8 * sizeof(float); i++)
                assert_int_equal(((const uint8_t *) (a.y + d->n))[i], 0x5a);
        assert_null(ops->context_free(c));
        return a.y;
}

static void group_norm_shapes_follow_rule(void **state) {
        for (unsigned i = 0; i < ELEMENTSOF(cases); i++) {
                CLEANUP_FREE float *expected = NULL;
                Data d;

                data_make(&cases[i], &d);
                expected = allocate(d.n * sizeof(float));
                rule(&d.a, expected);
                for (unsigned j = 0; j < ISAS; j++) {
                        CLEANUP_FREE float *y = run(all_isas[j], 1 + j, &d, false, j % 2 == 1);

                        if (y)
                                assert_memory_equal(y, expected, d.n * sizeof(float));
                }
                data_done(&d);
        }
}

static void group_norm_silu_near_exact_and_same_bits(void **state) {
        for (unsigned i = 0; i < ELEMENTSOF(cases); i++) {
                CLEANUP_FREE float *plain = NULL, *first = NULL;
                Data d;

                data_make(&cases[i], &d);
                plain = allocate(d.n * sizeof(float));
                rule(&d.a, plain);
                for (unsigned j = 0; j < ISAS; j++) {
                        CLEANUP_FREE float *y = run(all_isas[j], 4 - j, &d, true, false);

                        if (y && first)
                                assert_memory_equal(y, first, d.n * sizeof(float));
                        else if (y)
                                first = STEAL_PTR(y);
                }
                for (uint64_t k = 0; k < d.n; k++) {
                        double exact = (double) plain[k] / (1 + exp(-(double) plain[k]));

                        assert_true(fabs((double) first[k] - exact) <= 4e-7 * fabs(exact));
                }
                data_done(&d);
        }
}

/* A frame's result is the same alone. */
static void group_norm_frames_are_independent(void **state) {
        const Case *c = &cases[5];
        CLEANUP_FREE float *all = NULL;
        Data d;

        data_make(c, &d);
        all = run(LK_CPU_AUTO, 2, &d, true, false);
        for (uint64_t frame = 0; frame < c->frames; frame++) {
                uint64_t n = c->pixels * c->channels;
                CLEANUP_FREE float *one = NULL;
                Data part = d;

                part.a.frames = 1;
                part.a.x += frame * n;
                part.n = n;
                one = run(LK_CPU_AUTO, 1, &part, true, false);
                assert_memory_equal(one, all + frame * n, n * sizeof(float));
        }
        data_done(&d);
}

static void group_norm_bad_arguments_are_refused(void **state) {
        LkContext *c;
        const LkOps *ops = open_isa(LK_CPU_AUTO, 1, &c);
        float y[3 * 5 * 12];
        Data d;

        data_make(&cases[1], &d);
        d.a.y = y;
        assert_int_equal(ops->group_norm(c, &d.a), 0);

#define REFUSED(member, value)                                                                              \
        do {                                                                                                \
                LkGroupNorm a = d.a;                                                                        \
                a.member = value;                                                                           \
                assert_int_equal(ops->group_norm(c, &a), -EINVAL);                                          \
        } while (0)

        REFUSED(groups, 0);
        REFUSED(groups, 5);
        REFUSED(channels, 0);
        REFUSED(x, NULL);
        REFUSED(y, NULL);
        REFUSED(weight.n, 11);
        REFUSED(bias.data, NULL);
        REFUSED(frames, UINT64_MAX / 4);
        assert_int_equal(ops->group_norm(NULL, &d.a), -EINVAL);
        assert_null(ops->context_free(c));
        data_done(&d);
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(group_norm_shapes_follow_rule),
                cmocka_unit_test(group_norm_silu_near_exact_and_same_bits),
                cmocka_unit_test(group_norm_frames_are_independent),
                cmocka_unit_test(group_norm_bad_arguments_are_refused),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
