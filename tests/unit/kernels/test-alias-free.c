/* SPDX-License-Identifier: Apache-2.0 */
/* alias_free against its rule (bits), against the published way of writing it in double precision, and piece
 * by piece. */

#include "tests/unit/kernels/kernels-test.h"

#define TAPS LK_ALIAS_FREE_TAPS

typedef struct Data {
        LkAliasFree a;
        float *x, *alpha, *beta, *up, *down;
} Data;

static void data_make(uint64_t rows, uint64_t channels, double exponents, Data *d) {
        uint64_t seed = rows + 1000 * channels;

        *d = (Data){
                .x = random_aligned(rows * channels, LK_F32, 2, &seed),
                .alpha = random_aligned(channels, LK_F32, exponents, &seed),
                .beta = random_aligned(channels, LK_F32, exponents, &seed),
                .up = random_aligned(TAPS, LK_F32, 0.3, &seed),
                .down = random_aligned(TAPS, LK_F32, 0.3, &seed),
        };
        d->a = (LkAliasFree){
                .rows = rows,
                .channels = channels,
                .m = rows,
                .x = d->x,
                .alpha = {d->alpha, LK_F32, channels},
                .beta = {d->beta, LK_F32, channels},
                .up = {d->up, LK_F32, TAPS},
                .down = {d->down, LK_F32, TAPS},
        };
}

static void data_done(Data *d) {
        free(d->x);
        free(d->alpha);
        free(d->beta);
        free(d->up);
        free(d->down);
}

/* The op's result, freed by the caller; NULL: this machine lacks the instruction set. */
static float *run(LkCpuIsa isa, uint32_t threads, const LkAliasFree *args) {
        LkContext *c;
        const LkOps *ops = open_isa(isa, threads, &c);
        LkAliasFree a = *args;

        if (!ops)
                return NULL;
        a.y = guarded(a.m * a.channels + 1, LK_F32);
        assert_int_equal(ops->alias_free(c, &a), 0);
        assert_int_equal(((uint8_t *) (a.y + a.m * a.channels))[0], 0x5a);
        assert_null(ops->context_free(c));
        return a.y;
}

static int64_t clamp(int64_t i, int64_t n) {
        return i < 0 ? 0 : i >= n ? n - 1 : i;
}

/* snake with alpha = beta = 0 by the op that test-snake holds to its rule. */
static void snake(float *s, uint64_t n, uint64_t channels) {
        LkContext *c;
        const LkOps *ops = open_isa(LK_CPU_SCALAR, 1, &c);
        CLEANUP_FREE float *ones = allocate(channels * sizeof(float));
        LkSnake a = {.m = n, .channels = channels, .x = s, .alpha = {ones, LK_F32, channels}, .y = s};

        for (uint64_t i = 0; i < channels; i++)
                ones[i] = 1;
        assert_int_equal(ops->snake(c, &a), 0);
        assert_null(ops->context_free(c));
}

/* The sums of ops.h. */
static float *rule(const Data *d) {
        int64_t rows = (int64_t) d->a.rows, w = (int64_t) d->a.channels;
        CLEANUP_FREE float *s = allocate(d->a.rows * 2 * d->a.channels * sizeof(float));
        float *y = allocate(d->a.rows * d->a.channels * sizeof(float));

        for (int64_t i = 0; i < 2 * rows; i++)
                for (int64_t k = 0; k < w; k++) {
                        float sum = 0;

                        for (int64_t j = (i + 1) % 2; j < TAPS; j += 2) {
                                int64_t at = i % 2 == 0 ? i / 2 + 2 - (j - 1) / 2 : i / 2 + 3 - j / 2;

                                sum = fmaf(d->up[j], d->x[clamp(at, rows) * w + k], sum);
                        }
                        s[i * w + k] = 2 * sum;
                }
        snake(s, 2 * d->a.rows, d->a.channels);
        for (int64_t i = 0; i < rows; i++)
                for (int64_t k = 0; k < w; k++) {
                        float sum = 0;

                        for (int64_t j = 0; j < TAPS; j++)
                                sum = fmaf(d->down[j], s[clamp(2 * i + j - 5, 2 * rows) * w + k], sum);
                        y[i * w + k] = sum;
                }
        return y;
}

static void alias_free_sizes_follow_rule(void **state) {
        static const uint64_t rows[] = {1, 2, 3, 5, 6, 7, 12, 130, 300},
                              channels[] = {1, 2, 3, 8, 16, 17, 64, 65, 150};

        for (unsigned i = 0; i < ELEMENTSOF(rows) * ELEMENTSOF(channels); i++) {
                Data d;
                CLEANUP_FREE float *expected = NULL;

                data_make(rows[i / ELEMENTSOF(channels)], channels[i % ELEMENTSOF(channels)], 0, &d);
                expected = rule(&d);
                for (unsigned isa = 0; isa < ISAS; isa++) {
                        CLEANUP_FREE float *y = run(all_isas[isa], 1 + isa, &d.a);

                        if (y)
                                assert_memory_equal(y, expected, d.a.rows * d.a.channels * sizeof(float));
                }
                data_done(&d);
        }
}

/* As the network is written: pad, transposed convolution, times 2, crop, snake, pad, convolution. */
static double *published(const Data *d) {
        int64_t n = (int64_t) d->a.rows, w = (int64_t) d->a.channels;
        CLEANUP_FREE double *u = calloc((size_t) (2 * n + 30), sizeof(double));
        double *y = calloc(d->a.rows * d->a.channels, sizeof(double));

        for (int64_t k = 0; k < w; k++) {
                memset(u, 0, (size_t) (2 * n + 30) * sizeof(double));
                for (int64_t t = 0; t < n + 10; t++)
                        for (int64_t j = 0; j < TAPS; j++)
                                u[2 * t + j] +=
                                        2 * (double) d->up[j] * (double) d->x[clamp(t - 5, n) * w + k];
                for (int64_t i = 0; i < 2 * n; i++) {
                        double v = u[i + 15], s = sin(exp((double) d->alpha[k]) * v);

                        u[i + 15] = v + s * s / (exp((double) d->beta[k]) + 1e-9);
                }
                for (int64_t i = 0; i < n; i++)
                        for (int64_t j = 0; j < TAPS; j++)
                                y[i * w + k] += (double) d->down[j] * u[15 + clamp(2 * i + j - 5, 2 * n)];
        }
        return y;
}

static void alias_free_against_double_is_accurate(void **state) {
        static const uint64_t rows[] = {1, 4, 11, 500}, channels[] = {1, 5, 16, 130};

        for (unsigned i = 0; i < 16; i++) {
                Data d;
                CLEANUP_FREE double *expected = NULL;
                CLEANUP_FREE float *y = NULL;

                data_make(rows[i / 4], channels[i % 4], 0.5, &d);
                expected = published(&d);
                y = run(LK_CPU_AUTO, 2, &d.a);
                assert_true(relative_l2(y, LK_F32, d.a.channels, expected, d.a.rows, d.a.channels) < 1e-6);
                data_done(&d);
        }
}

/* A piece with its surroundings gives the bits of the whole, wherever it is cut. */
static void alias_free_any_piece_same_bits(void **state) {
        static const uint64_t channels[] = {1, 3, 24, 70};

        for (unsigned i = 0; i < ELEMENTSOF(channels); i++) {
                uint64_t rows = 150, w = channels[i];
                CLEANUP_FREE float *whole = NULL;
                Data d;

                data_make(rows, w, 0.5, &d);
                whole = run(LK_CPU_AUTO, 1, &d.a);
                for (uint64_t begin = 0; begin < rows; begin += 7)
                        for (uint64_t n = 1; begin + n <= rows; n += 1 + n / 2) {
                                uint64_t from = begin > 5 ? begin - 5 : 0;
                                uint64_t to = begin + n + 5 < rows ? begin + n + 5 : rows;
                                CLEANUP_FREE float *y = NULL;
                                LkAliasFree a = d.a;

                                a.x = d.x + from * w;
                                a.rows = to - from;
                                a.first = begin - from;
                                a.m = n;
                                y = run(all_isas[n % ISAS], 1 + (uint32_t) n % 3, &a);
                                if (y)
                                        assert_memory_equal(y, whole + begin * w, n * w * sizeof(float));
                        }
                data_done(&d);
        }
}

static void alias_free_any_thread_count_same_bits(void **state) {
        static const uint32_t threads[] = {2, 3, 8, 0};
        CLEANUP_FREE float *one = NULL;
        Data d;

        data_make(3000, 90, 0.5, &d);
        one = run(LK_CPU_AUTO, 1, &d.a);
        for (unsigned i = 0; i < ELEMENTSOF(threads); i++) {
                CLEANUP_FREE float *y = run(LK_CPU_AUTO, threads[i], &d.a);

                assert_memory_equal(y, one, 3000 * 90 * sizeof(float));
        }
        data_done(&d);
}

#define REFUSED(statement)                                                                                  \
        do {                                                                                                \
                LkAliasFree a = d.a;                                                                        \
                statement;                                                                                  \
                assert_int_equal(ops->alias_free(c, &a), -EINVAL);                                          \
        } while (0)

static void alias_free_bad_argument_is_refused(void **state) {
        LkContext *c;
        const LkOps *ops = open_isa(LK_CPU_AUTO, 1, &c);
        CLEANUP_FREE float *y = guarded(80, LK_F32);
        Data d;

        data_make(10, 8, 1, &d);
        d.a.y = y;
        assert_int_equal(ops->alias_free(NULL, &d.a), -EINVAL);
        assert_int_equal(ops->alias_free(c, NULL), -EINVAL);
        REFUSED(a.x = NULL);
        REFUSED(a.y = NULL);
        REFUSED(a.channels = 0);
        REFUSED(a.channels = 9);
        REFUSED(a.first = 1);
        REFUSED(a.first = UINT64_MAX);
        REFUSED(a.m = 11);
        REFUSED(a.rows = UINT64_MAX / 16);
        REFUSED(a.alpha.data = NULL);
        REFUSED(a.up.n = 11);
        REFUSED(a.down.data = NULL);
        data_done(&d);
        assert_null(ops->context_free(c));
}

int main(void) {
        static const struct CMUnitTest tests[] = {
                cmocka_unit_test(alias_free_sizes_follow_rule),
                cmocka_unit_test(alias_free_against_double_is_accurate),
                cmocka_unit_test(alias_free_any_piece_same_bits),
                cmocka_unit_test(alias_free_any_thread_count_same_bits),
                cmocka_unit_test(alias_free_bad_argument_is_refused),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
