/* SPDX-License-Identifier: Apache-2.0 */
/* conv against its rule (bits), written down naively, for every kind of padding. */

#include "tests/unit/kernels/kernels-test.h"

typedef struct Case {
        uint64_t size[3], channels, out;
        uint32_t kernel[3], stride[3], dilation[3], before[3], after[3];
        LkPad pad[3];
        LkType w, bias;  /* bias 0: none */
        unsigned offset; /* of the weights, bytes */
} Case;

typedef struct Data {
        LkConv a;
        void *x_base, *w_base, *bias_base;
        uint64_t size[3]; /* of y */
} Data;

static uint64_t product(const uint64_t size[3]) {
        return size[0] * size[1] * size[2];
}

static void data_make(const Case *c, Data *d) {
        uint64_t seed = product(c->size) + c->channels * 3 + c->out * 5, taps = 1;

        *d = (Data){.a = {.channels = c->channels}};
        for (unsigned i = 0; i < 3; i++) {
                d->a.axis[i] = (LkConvAxis){
                        .size = c->size[i],
                        .kernel = c->kernel[i],
                        .stride = c->stride[i] ? c->stride[i] : 1,
                        .dilation = c->dilation[i] ? c->dilation[i] : 1,
                        .before = c->before[i],
                        .after = c->after[i],
                        .pad = c->pad[i],
                };
                taps *= c->kernel[i];
                d->size[i] = (c->size[i] + c->before[i] + c->after[i] -
                                     (c->kernel[i] - 1) * (uint64_t) d->a.axis[i].dilation - 1) /
                                     d->a.axis[i].stride +
                             1;
                assert_int_equal(lk_conv_size(d->a.axis + i), d->size[i]);
        }
        d->a.x = random_array(product(c->size) * c->channels, LK_F32, 0, 1, &seed, &d->x_base);
        d->a.w = (LkMatrix){
                .data = random_array(c->out * c->channels * taps, c->w, c->offset, 1, &seed, &d->w_base),
                .type = c->w,
                .rows = c->out,
                .cols = c->channels * taps,
                .row_stride = c->channels * taps * lk_type_size(c->w),
                .block_rows = c->out,
        };
        if (c->bias != 0)
                d->a.bias =
                        (LkVector){.data = random_array(c->out, c->bias, c->offset, 1, &seed, &d->bias_base),
                                .type = c->bias,
                                .n = c->out};
}

static void data_done(Data *d) {
        free(d->x_base);
        free(d->w_base);
        free(d->bias_base);
}

/* Position p of y at tap k along an axis; false: zero. Walks back from beyond the edge one element at a
 * time.
 */
static bool source(const LkConvAxis *a, uint64_t p, uint64_t k, uint64_t *ret) {
        int64_t i = (int64_t) (p * a->stride + k * a->dilation) - a->before, n = (int64_t) a->size;

        if ((i < 0 || i >= n) && a->pad == LK_PAD_ZERO)
                return false;
        if (a->pad == LK_PAD_REPLICATE)
                i = i < 0 ? 0 : i >= n ? n - 1 : i;
        else
                i = i < 0 ? -i : i >= n ? n - 1 - (i - (n - 1)) : i;
        assert_true(i >= 0 && i < n);
        *ret = (uint64_t) i;
        return true;
}

static float element(const LkConv *a, const uint64_t at[3], uint64_t channel, const uint64_t tap[3]) {
        uint64_t t, h, w;

        if (!source(a->axis, at[0], tap[0], &t) || !source(a->axis + 1, at[1], tap[1], &h) ||
                !source(a->axis + 2, at[2], tap[2], &w))
                return 0;
        return a->x[((t * a->axis[1].size + h) * a->axis[2].size + w) * a->channels + channel];
}

static float rule(const LkConv *a, const uint64_t at[3], uint64_t out) {
        uint64_t k = out * a->w.cols, tap[3];
        float sum = 0;

        for (uint64_t c = 0; c < a->channels; c++)
                for (tap[0] = 0; tap[0] < a->axis[0].kernel; tap[0]++)
                        for (tap[1] = 0; tap[1] < a->axis[1].kernel; tap[1]++)
                                for (tap[2] = 0; tap[2] < a->axis[2].kernel; tap[2]++)
                                        sum = fmaf(element(a, at, c, tap),
                                                (float) get(a->w.data, a->w.type, k++), sum);

        if (a->bias.data)
                sum += (float) get(a->bias.data, a->bias.type, out);
        return sum;
}

/* Every element if that is quick, else 400 of them. */
static void check_rule(const Data *d, const float *y) {
        uint64_t n = product(d->size) * d->a.w.rows, seed = 3;
        bool all = n * d->a.w.cols <= 400000;

        for (uint64_t i = 0; i < (all ? n : 400); i++) {
                uint64_t e = all ? i : random_u64(&seed) % n, row = e / d->a.w.rows;
                uint64_t at[3] = {
                        row / d->size[2] / d->size[1], row / d->size[2] % d->size[1], row % d->size[2]};
                float expected = rule(&d->a, at, e % d->a.w.rows);

                if (memcmp(&expected, y + e, sizeof(expected)) != 0)
                        fail_msg("element %lu of position (%lu, %lu, %lu) breaks the rule: %a, not %a",
                                (unsigned long) (e % d->a.w.rows), (unsigned long) at[0],
                                (unsigned long) at[1], (unsigned long) at[2], (double) y[e],
                                (double) expected);
        }
}

static float *run(LkCpuIsa isa, uint32_t threads, const Data *d) {
        uint64_t n = product(d->size) * d->a.w.rows;
        LkContext *c;
        const LkOps *ops = open_isa(isa, threads, &c);
        LkConv a = d->a;

        if (!ops)
                return NULL;
        a.y = guarded(n + 8, LK_F32);
        assert_int_equal(ops->conv(c, &a), 0);
        for (uint64_t i = 0; i < 8 * sizeof(float); i++)
                assert_int_equal(((const uint8_t *) (a.y + n))[i], 0x5a);
        assert_null(ops->context_free(c));
        return a.y;
}

/* The portable code calls fmaf() for each product: it gets the small shapes only. */
#define SCALAR_WORK 6000000u

static void check_case(const Case *c) {
        CLEANUP_FREE float *first = NULL;
        uint64_t n;
        Data d;

        data_make(c, &d);
        n = product(d.size) * d.a.w.rows;
        for (unsigned i = 0; i < ISAS; i++) {
                CLEANUP_FREE float *y = NULL;

                if (all_isas[i] == LK_CPU_SCALAR && n * d.a.w.cols > SCALAR_WORK)
                        continue;
                y = run(all_isas[i], 1 + i, &d);
                if (y && !first) {
                        check_rule(&d, y);
                        first = STEAL_PTR(y);
                } else if (y)
                        assert_memory_equal(first, y, n * sizeof(float));
        }
        data_done(&d);
}

static const LkType types[] = {LK_F32, LK_BF16, LK_F16};

static void conv_video_shapes_follow_rule(void **state) {
        static const uint64_t channels[] = {1, 3, 7, 8, 14, 15, 24, 33};

        for (unsigned i = 0; i < ELEMENTSOF(channels); i++) {
                const Case c = {
                        .size = {3, 5, 6},
                        .channels = channels[i],
                        .out = 1 + 5 * i,
                        .kernel = {3, 3, 3},
                        .before = {2, 1, 1},
                        .after = {0, 1, 1},
                        .pad = {LK_PAD_ZERO, LK_PAD_REFLECT, LK_PAD_REFLECT},
                        .w = types[i % 3],
                        .bias = types[(i + 1) % 3],
                        .offset = i % 4,
                };

                check_case(&c);
        }
}

/* Stride 2 in space and time, padding behind only, as the encoder's downsampling has it; even and odd sizes.
 */
static void conv_strides_follow_rule(void **state) {
        for (unsigned i = 0; i < 8; i++) {
                const Case c = {
                        .size = {1 + i % 5, 4 + i, 7},
                        .channels = 9,
                        .out = 18,
                        .kernel = {3, 3, 3},
                        .stride = {1 + i % 2, 2, 2},
                        .before = {2, 0, 0},
                        .after = {0, 1, 1},
                        .pad = {LK_PAD_ZERO, LK_PAD_REFLECT, i < 4 ? LK_PAD_REFLECT : LK_PAD_REPLICATE},
                        .w = LK_F32,
                };

                check_case(&c);
        }
}

static void conv_one_axis_follows_rule(void **state) {
        static const uint32_t kernels[] = {1, 2, 3, 7, 10, 16, 41};

        for (unsigned i = 0; i < ELEMENTSOF(kernels); i++)
                for (unsigned pad = 0; pad < LK_PAD_MAX; pad++) {
                        const Case c = {
                                .size = {1, 1, 50 + i},
                                .channels = 1 + 11 * i,
                                .out = 33,
                                .kernel = {1, 1, kernels[i]},
                                .stride = {1, 1, 1 + i % 3},
                                .dilation = {1, 1, 1 + pad},
                                .before = {0, 0, 49},
                                .after = {0, 0, 31 + i},
                                .pad = {LK_PAD_ZERO, LK_PAD_ZERO, (LkPad) pad},
                                .w = types[i % 3],
                                .bias = LK_F32,
                                .offset = 1,
                        };

                        check_case(&c);
                }
}

static void conv_padding_beyond_input_follows_rule(void **state) {
        const Case zeros = {
                .size = {1, 2, 1},
                .channels = 5,
                .out = 4,
                .kernel = {2, 3, 4},
                .before = {3, 6, 9},
                .after = {4, 7, 0},
                .pad = {LK_PAD_ZERO, LK_PAD_REPLICATE, LK_PAD_ZERO},
                .w = LK_F32,
        };

        check_case(&zeros);
}

/* More positions than a block has rows, more k than a block, more columns than a block. */
static void conv_many_blocks_follow_rule(void **state) {
        static const Case cases[] = {
                {.size = {5, 20, 21},
                        .channels = 40,
                        .out = 70,
                        .kernel = {3, 3, 3},
                        .before = {2, 1, 1},
                        .after = {0, 1, 1},
                        .pad = {LK_PAD_ZERO, LK_PAD_REFLECT, LK_PAD_REFLECT},
                        .w = LK_F16,
                        .bias = LK_F16},
                {.size = {1, 2, 3}, .channels = 800, .out = 8300, .kernel = {1, 1, 1}, .w = LK_BF16},
                {.size = {1, 1, 1300},
                        .channels = 130,
                        .out = 1100,
                        .kernel = {1, 1, 3},
                        .before = {0, 0, 1},
                        .after = {0, 0, 1},
                        .w = LK_F32},
        };

        for (unsigned i = 0; i < ELEMENTSOF(cases); i++)
                check_case(&cases[i]);
}

static const Case small = {
        .size = {3, 4, 5},
        .channels = 6,
        .out = 7,
        .kernel = {3, 3, 3},
        .before = {2, 1, 1},
        .after = {0, 1, 1},
        .pad = {LK_PAD_ZERO, LK_PAD_REFLECT, LK_PAD_REFLECT},
        .w = LK_F32,
        .bias = LK_F32,
};

/* Bits depend on what lies under the kernel, not on where it is or how many threads there are. */
static void conv_thread_counts_same_bits(void **state) {
        CLEANUP_FREE float *first = NULL;
        Case c = small;
        Data d;

        c.size[1] = 40;
        c.size[2] = 37;
        data_make(&c, &d);
        for (uint32_t threads = 1; threads <= 8; threads++) {
                CLEANUP_FREE float *y = run(LK_CPU_AUTO, threads, &d);

                if (first)
                        assert_memory_equal(first, y, product(d.size) * c.out * sizeof(float));
                else
                        first = STEAL_PTR(y);
        }
        data_done(&d);
}

static int call(const LkConv *a) {
        LkContext *c;
        const LkOps *ops = open_isa(LK_CPU_AUTO, 1, &c);
        int r = ops->conv(c, a);

        assert_null(ops->context_free(c));
        return r;
}

static void conv_bad_arguments_are_refused(void **state) {
        float y[3 * 4 * 5 * 7];
        Data d;

        data_make(&small, &d);
        d.a.y = y;
        assert_int_equal(call(&d.a), 0);

#define REFUSED(member, value)                                                                              \
        do {                                                                                                \
                LkConv a = d.a;                                                                             \
                a.member = value;                                                                           \
                assert_int_equal(call(&a), -EINVAL);                                                        \
        } while (0)

        REFUSED(x, NULL);
        REFUSED(y, NULL);
        REFUSED(w.data, NULL);
        REFUSED(w.type, LK_I8);
        REFUSED(w.cols, d.a.w.cols - 1);
        REFUSED(channels, 0);
        REFUSED(channels, UINT64_MAX / 9);
        REFUSED(bias.n, 6);
        REFUSED(axis[0].kernel, 0);
        REFUSED(axis[0].stride, 0);
        REFUSED(axis[0].dilation, 0);
        REFUSED(axis[0].size, 0);
        REFUSED(axis[0].pad, LK_PAD_MAX);
        REFUSED(axis[1].before, 4);                /* reflect: less than the size */
        REFUSED(axis[2].after, 5);                 /* likewise */
        REFUSED(axis[1].dilation, 4);              /* wider than the padded input */
        REFUSED(axis[2].kernel, LK_CONV_TAPS_MAX); /* too many taps */
        REFUSED(axis[1].size, UINT64_MAX);
        data_done(&d);
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(conv_video_shapes_follow_rule),
                cmocka_unit_test(conv_strides_follow_rule),
                cmocka_unit_test(conv_one_axis_follows_rule),
                cmocka_unit_test(conv_padding_beyond_input_follows_rule),
                cmocka_unit_test(conv_many_blocks_follow_rule),
                cmocka_unit_test(conv_thread_counts_same_bits),
                cmocka_unit_test(conv_bad_arguments_are_refused),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
