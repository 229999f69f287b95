/* SPDX-License-Identifier: Apache-2.0 */
#include "service/media/resample.h"

#include <errno.h>
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>

#include "service/shared/cleanup.h"

#define SUPPORT 3.0
#define WEIGHT_BITS 22
#define SIDE_MAX (1u << 16)

/* For each of n places of one axis: the first source pixel, how many, and their weights. */
typedef struct Axis {
        uint32_t n, taps_max;
        uint32_t *first, *taps;
        int32_t *weights; /* [n, taps_max] */
} Axis;

static void axis_done(Axis *a) {
        free(a->first);
        free(a->taps);
        free(a->weights);
        *a = (Axis){};
}

static double sinc(double x) {
        return x == 0.0 ? 1.0 : sin(M_PI * x) / (M_PI * x);
}

static double lanczos(double x) {
        return x >= -SUPPORT && x < SUPPORT ? sinc(x) * sinc(x / SUPPORT) : 0.0;
}

/* The weights of the places begin .. begin + n of `to` when an axis of `from` pixels becomes one of `to`. */
static int axis_init(Axis *a, uint32_t from, uint32_t to, uint32_t begin, uint32_t n) {
        double scale = (double) from / to, stretch = scale < 1.0 ? 1.0 : scale, support = SUPPORT * stretch;
        CLEANUP_FREE double *w = NULL;

        *a = (Axis){.n = n, .taps_max = (uint32_t) ceil(support) * 2 + 1};
        a->first = calloc(n, sizeof(*a->first));
        a->taps = calloc(n, sizeof(*a->taps));
        a->weights = calloc((size_t) n * a->taps_max, sizeof(*a->weights));
        w = calloc(a->taps_max, sizeof(*w));
        if (!a->first || !a->taps || !a->weights || !w)
                return -ENOMEM;

        for (uint32_t i = 0; i < n; i++) {
                double centre = ((double) (begin + i) + 0.5) * scale, sum = 0.0;
                double low = centre - support + 0.5, high = centre + support + 0.5;
                uint32_t first = low > 0.0 ? (uint32_t) low : 0;
                uint32_t end = high < from ? (uint32_t) high : from;

                for (uint32_t k = first; k < end; k++) {
                        w[k - first] = lanczos(((double) k - centre + 0.5) / stretch);
                        sum += w[k - first];
                }
                for (uint32_t k = 0; k < end - first; k++) {
                        double x = (sum != 0.0 ? w[k] / sum : w[k]) * (double) (1 << WEIGHT_BITS);

                        a->weights[(size_t) i * a->taps_max + k] = (int32_t) (x < 0.0 ? x - 0.5 : x + 0.5);
                }
                a->first[i] = first;
                a->taps[i] = end - first;
        }
        return 0;
}

static uint8_t round_sum(int32_t sum) {
        int32_t v = sum >> WEIGHT_BITS;

        return v < 0 ? 0 : v > 255 ? 255 : (uint8_t) v;
}

/* Weights of one place sum to 1, their magnitudes to less than 2: a sum of U8 times them fits into 32 bits.
 */
static void resample_row(const Axis *x, const uint8_t *from, uint8_t *to) {
        for (uint32_t i = 0; i < x->n; i++) {
                const int32_t *w = x->weights + (size_t) i * x->taps_max;
                const uint8_t *p = from + (size_t) x->first[i] * 3;
                int32_t r = 1 << (WEIGHT_BITS - 1), g = r, b = r;

                for (uint32_t k = 0; k < x->taps[i]; k++, p += 3) {
                        r += p[0] * w[k];
                        g += p[1] * w[k];
                        b += p[2] * w[k];
                }
                to[i * 3] = round_sum(r);
                to[i * 3 + 1] = round_sum(g);
                to[i * 3 + 2] = round_sum(b);
        }
}

static void resample_column(
        const Axis *y, uint32_t i, const uint8_t *rows, size_t stride, int32_t *sums, uint8_t *to) {
        const int32_t *w = y->weights + (size_t) i * y->taps_max;

        for (size_t c = 0; c < stride; c++)
                sums[c] = 1 << (WEIGHT_BITS - 1);
        for (uint32_t k = 0; k < y->taps[i]; k++, rows += stride)
                for (size_t c = 0; c < stride; c++)
                        sums[c] += rows[c] * w[k];
        for (size_t c = 0; c < stride; c++)
                to[c] = round_sum(sums[c]);
}

static bool is_side(uint32_t n) {
        return n >= 1 && n <= SIDE_MAX;
}

int resample_rgb(const uint8_t *from, uint32_t from_width, uint32_t from_height, uint32_t to_width,
        uint32_t to_height, const ResampleCrop *crop, uint8_t *to) {
        CLEANUP(axis_done) Axis x = {}, y = {};
        CLEANUP_FREE uint8_t *rows = NULL;
        CLEANUP_FREE int32_t *sums = NULL;
        size_t stride = (size_t) crop->width * 3;
        uint32_t first, n;
        int r;

        if (!is_side(from_width) || !is_side(from_height) || !is_side(to_width) || !is_side(to_height) ||
                crop->width < 1 || crop->height < 1 || crop->x > to_width ||
                crop->width > to_width - crop->x || crop->y > to_height ||
                crop->height > to_height - crop->y)
                return -EINVAL;

        r = axis_init(&x, from_width, to_width, crop->x, crop->width);
        if (r < 0)
                return r;
        r = axis_init(&y, from_height, to_height, crop->y, crop->height);
        if (r < 0)
                return r;

        /* Source rows that the columns need. Places ascend, and so do their first and last pixels. */
        first = y.first[0];
        n = y.first[y.n - 1] + y.taps[y.n - 1] - first;
        rows = malloc(n * stride);
        sums = malloc(stride * sizeof(*sums));
        if (!rows || !sums)
                return -ENOMEM;

        for (uint32_t i = 0; i < n; i++) {
                const uint8_t *row = from + (size_t) (first + i) * from_width * 3;

                if (from_width == to_width) /* an axis that stays is not touched */
                        memcpy(rows + i * stride, row + (size_t) crop->x * 3, stride);
                else
                        resample_row(&x, row, rows + i * stride);
        }
        for (uint32_t i = 0; i < crop->height; i++) {
                if (from_height == to_height)
                        memcpy(to + i * stride, rows + (size_t) (crop->y + i - first) * stride, stride);
                else
                        resample_column(&y, i, rows + (size_t) (y.first[i] - first) * stride, stride, sums,
                                to + i * stride);
        }
        return 0;
}
