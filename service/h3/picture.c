/* SPDX-License-Identifier: Apache-2.0 */
#include "service/h3/picture.h"

#include <errno.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "service/shared/cleanup.h"

#define CHANNELS 3
#define CUBIC_A (-0.5)
#define CUBIC_RADIUS 2.0

const H3PictureRules h3_picture_published = {
        .filter = H3_FILTER_BICUBIC,
        .image_min = 65536,
        .image_max = 16777216,
        .video_min = 4096,
        .video_max = 25165824,
};
const H3PictureRules h3_picture_comfy = {
        .filter = H3_FILTER_BILINEAR,
        .image_min = 3136,
        .image_max = 12845056,
};

/* To the nearest integer, ties to the even one, by the rounding of an addition. */
static double to_nearest(double x) {
        return (x + 0x1.8p52) - 0x1.8p52;
}

static uint64_t multiple(double units) {
        return (uint64_t) units * H3_PATCH_PIXELS;
}

static uint64_t at_least_one(double units) {
        return multiple(units < 1.0 ? 1.0 : units);
}

/* frames counts for the limits as it is when both edges change, and `counted` when they are compared. */
static H3PictureSize fit(double frames, double counted, double h, double w, uint64_t least, uint64_t most) {
        const double unit = H3_PATCH_PIXELS;
        uint64_t height = multiple(to_nearest(h / unit)), width = multiple(to_nearest(w / unit));
        double area = counted * (double) height * (double) width, factor;

        if (area > (double) most) {
                factor = sqrt(frames * h * w / (double) most);
                height = at_least_one(floor(h / factor / unit));
                width = at_least_one(floor(w / factor / unit));
        } else if (area < (double) least) {
                factor = sqrt((double) least / (frames * h * w));
                height = at_least_one(ceil(h * factor / unit));
                width = at_least_one(ceil(w * factor / unit));
        }
        return (H3PictureSize){height, width};
}

int h3_picture_size(const H3PictureRules *rules, uint64_t frames, uint64_t height, uint64_t width,
        H3PictureSize *ret, Fault *f) {
        double h = (double) height, w = (double) width, n = (double) frames, scale;

        if (height < 1 || width < 1 || height > H3_PICTURE_EDGE_MAX || width > H3_PICTURE_EDGE_MAX)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "A picture has %llu x %llu pixels; both edges must be from 1 to %llu.",
                        (unsigned long long) width, (unsigned long long) height,
                        (unsigned long long) H3_PICTURE_EDGE_MAX);
        if (height > width * H3_PICTURE_ASPECT_MAX || width > height * H3_PICTURE_ASPECT_MAX)
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "A picture has %llu x %llu pixels; one edge may be up to %llu times the other.",
                        (unsigned long long) width, (unsigned long long) height,
                        (unsigned long long) H3_PICTURE_ASPECT_MAX);
        if (frames == 0 || rules->video_max == 0) {
                *ret = fit(1.0, 1.0, h, w, rules->image_min, rules->image_max);
                return 0;
        }
        /* A frame is made as large as a token first. */
        if (h < H3_PATCH_PIXELS || w < H3_PATCH_PIXELS) {
                scale = fmax(H3_PATCH_PIXELS / h, H3_PATCH_PIXELS / w);
                h = floor(h * scale);
                w = floor(w * scale);
        }
        *ret = fit(n, to_nearest(n / 2.0) * 2.0, h, w, rules->video_min, rules->video_max);
        return 0;
}

/* For each place of an edge: which places of the old one count, and how much. */
typedef struct Taps {
        uint64_t *begin, *n;
        double *weights; /* [places, most] */
        uint64_t most;
} Taps;

static void taps_done(Taps *t) {
        free(t->begin);
        free(t->n);
        free(t->weights);
}

static double cubic(double x) {
        x = fabs(x);
        if (x < 1.0)
                return ((CUBIC_A + 2.0) * x - (CUBIC_A + 3.0)) * x * x + 1.0;
        return x < 2.0 ? (((x - 5.0) * x + 8.0) * x - 4.0) * CUBIC_A : 0.0;
}

static void make_taps(Taps *t, uint64_t place, uint64_t from, double scale, double widen) {
        double *weights = t->weights + place * t->most, sum = 0.0, center = scale * ((double) place + 0.5);
        double first = center - CUBIC_RADIUS * widen + 0.5, last = center + CUBIC_RADIUS * widen + 0.5;
        uint64_t begin = first > 0.0 ? (uint64_t) first : 0, end = (uint64_t) last;

        end = end < from ? end : from;
        for (uint64_t i = begin; i < end; i++) {
                weights[i - begin] = cubic(((double) i - center + 0.5) / widen);
                sum += weights[i - begin];
        }
        for (uint64_t i = begin; i < end; i++)
                weights[i - begin] /= sum;
        t->begin[place] = begin;
        t->n[place] = end - begin;
}

static int taps_init(Taps *t, uint64_t from, uint64_t to) {
        double scale = (double) from / (double) to, widen = scale > 1.0 ? scale : 1.0;

        t->most = (uint64_t) (2.0 * CUBIC_RADIUS * widen) + 2;
        t->begin = calloc(to, sizeof(*t->begin));
        t->n = calloc(to, sizeof(*t->n));
        t->weights = calloc(to * t->most, sizeof(*t->weights));
        if (!t->begin || !t->n || !t->weights)
                return -ENOMEM;
        for (uint64_t i = 0; i < to; i++)
                make_taps(t, i, from, scale, widen);
        return 0;
}

static uint8_t to_u8(double x) {
        return x <= 0.0 ? 0 : x >= 255.0 ? 255 : (uint8_t) (x + 0.5);
}

/* Along one edge: `step` bytes lie between one place and the next, in and out. */
static uint8_t tap(const Taps *t, uint64_t place, const uint8_t *line, uint64_t step) {
        const double *weights = t->weights + place * t->most;
        const uint8_t *p = line + t->begin[place] * step;
        double sum = 0.0;

        for (uint64_t i = 0; i < t->n[place]; i++)
                sum += weights[i] * (double) p[i * step];
        return to_u8(sum);
}

static int resize_columns(const uint8_t *rgb, uint64_t height, uint64_t width, uint64_t to, uint8_t *ret) {
        CLEANUP(taps_done) Taps t = {};

        if (taps_init(&t, width, to) < 0)
                return -ENOMEM;
        for (uint64_t y = 0; y < height; y++)
                for (uint64_t x = 0; x < to; x++)
                        for (uint64_t c = 0; c < CHANNELS; c++)
                                ret[(y * to + x) * CHANNELS + c] =
                                        tap(&t, x, rgb + y * width * CHANNELS + c, CHANNELS);
        return 0;
}

/* Row by row, so that memory is read in order. */
static int resize_rows(const uint8_t *rgb, uint64_t height, uint64_t width, uint64_t to, uint8_t *ret) {
        const uint64_t line = width * CHANNELS;
        CLEANUP(taps_done) Taps t = {};
        CLEANUP_FREE double *sums = NULL;

        sums = calloc(line, sizeof(*sums));
        if (!sums || taps_init(&t, height, to) < 0)
                return -ENOMEM;
        for (uint64_t y = 0; y < to; y++) {
                const double *weights = t.weights + y * t.most;

                memset(sums, 0, line * sizeof(*sums));
                for (uint64_t i = 0; i < t.n[y]; i++) {
                        const uint8_t *row = rgb + (t.begin[y] + i) * line;

                        for (uint64_t x = 0; x < line; x++)
                                sums[x] += weights[i] * (double) row[x];
                }
                for (uint64_t x = 0; x < line; x++)
                        ret[y * line + x] = to_u8(sums[x]);
        }
        return 0;
}

static bool is_edge(uint64_t edge) {
        return edge >= 1 && edge <= H3_PICTURE_EDGE_MAX;
}

int h3_picture_resize(const uint8_t *rgb, uint64_t height, uint64_t width, H3PictureSize to, uint8_t *ret) {
        CLEANUP_FREE uint8_t *between = NULL;
        int r;

        if (!is_edge(height) || !is_edge(width) || !is_edge(to.height) || !is_edge(to.width))
                return -EINVAL;
        if (to.width == width && to.height == height) {
                memcpy(ret, rgb, height * width * CHANNELS);
                return 0;
        }
        if (to.width == width)
                return resize_rows(rgb, height, width, to.height, ret);
        if (to.height == height)
                return resize_columns(rgb, height, width, to.width, ret);
        between = malloc(height * to.width * CHANNELS);
        if (!between)
                return -ENOMEM;
        r = resize_columns(rgb, height, width, to.width, between);
        return r < 0 ? r : resize_rows(between, height, to.width, to.height, ret);
}

/* Where a patch's numbers stand. */
static uint64_t patch_of(H3PictureSize size, uint64_t y, uint64_t x) {
        uint64_t row = y / H3_PATCH, column = x / H3_PATCH, columns = size.width / H3_PATCH_PIXELS;

        return (row / H3_PATCH_MERGE * columns + column / H3_PATCH_MERGE) * H3_PATCH_MERGE * H3_PATCH_MERGE +
               row % H3_PATCH_MERGE * H3_PATCH_MERGE + column % H3_PATCH_MERGE;
}

static void put(
        float *patches, H3PictureSize size, uint64_t y, uint64_t x, uint64_t slot, const float rgb[3]) {
        float *patch = patches + patch_of(size, y, x) * H3_PATCH_NUMBERS;

        for (uint64_t c = 0; c < CHANNELS; c++)
                patch[((c * 2 + slot) * H3_PATCH + y % H3_PATCH) * H3_PATCH + x % H3_PATCH] = rgb[c];
}

static int bicubic(
        const uint8_t *rgb, uint64_t height, uint64_t width, H3PictureSize to, uint64_t slot, float *ret) {
        CLEANUP_FREE uint8_t *resized = NULL;
        float value[256];
        int r;

        if (to.height != height || to.width != width) {
                resized = malloc(to.height * to.width * CHANNELS);
                if (!resized)
                        return -ENOMEM;
                r = h3_picture_resize(rgb, height, width, to, resized);
                if (r < 0)
                        return r;
                rgb = resized;
        }
        for (unsigned i = 0; i < 256; i++)
                value[i] = ((float) i - 127.5f) / 127.5f;
        for (uint64_t y = 0; y < to.height; y++)
                for (uint64_t x = 0; x < to.width; x++) {
                        const uint8_t *p = rgb + (y * to.width + x) * CHANNELS;

                        put(ret, to, y, x, slot, (float[3]){value[p[0]], value[p[1]], value[p[2]]});
                }
        return 0;
}

/* The two neighbours of a place on an edge, pixel centres at one half, the far one's share. */
static void neighbours(uint64_t place, float scale, uint64_t n, uint64_t ret[2], float *ret_share) {
        float at = scale * ((float) place + 0.5f) - 0.5f;

        at = at < 0.0f ? 0.0f : at;
        ret[0] = (uint64_t) at < n - 1 ? (uint64_t) at : n - 1;
        ret[1] = ret[0] + (ret[0] < n - 1);
        *ret_share = fminf(at - (float) ret[0], 1.0f);
}

/* Numbers from 0 to 1, as ComfyUI's pictures are, before the mean and deviation of 0.5. */
static void bilinear(
        const uint8_t *rgb, uint64_t height, uint64_t width, H3PictureSize to, uint64_t slot, float *ret) {
        float down = (float) height / (float) to.height, right = (float) width / (float) to.width;
        float unit[256];

        for (unsigned i = 0; i < 256; i++)
                unit[i] = (float) i / 255.0f;
        for (uint64_t y = 0; y < to.height; y++) {
                uint64_t rows[2], columns[2];
                float v, u, mixed[3];

                neighbours(y, down, height, rows, &v);
                for (uint64_t x = 0; x < to.width; x++) {
                        neighbours(x, right, width, columns, &u);
                        for (uint64_t c = 0; c < CHANNELS; c++) {
                                const uint8_t *a = rgb + rows[0] * width * CHANNELS + c,
                                              *b = rgb + rows[1] * width * CHANNELS + c;
                                float upper = (1.0f - u) * unit[a[columns[0] * CHANNELS]] +
                                              u * unit[a[columns[1] * CHANNELS]],
                                      lower = (1.0f - u) * unit[b[columns[0] * CHANNELS]] +
                                              u * unit[b[columns[1] * CHANNELS]];

                                mixed[c] = ((1.0f - v) * upper + v * lower - 0.5f) / 0.5f;
                        }
                        put(ret, to, y, x, slot, mixed);
                }
        }
}

/* One frame into its slot of time. */
static int frame(const H3PictureRules *rules, const uint8_t *rgb, uint64_t height, uint64_t width,
        H3PictureSize to, uint64_t slot, float *ret) {
        if (rules->filter == H3_FILTER_BICUBIC)
                return bicubic(rgb, height, width, to, slot, ret);
        bilinear(rgb, height, width, to, slot, ret);
        return 0;
}

int h3_picture_patches(const H3PictureRules *rules, const uint8_t *first, const uint8_t *second,
        uint64_t height, uint64_t width, H3PictureSize to, float *ret) {
        const uint64_t slot = (uint64_t) H3_PATCH * H3_PATCH;
        uint64_t patches = to.height / H3_PATCH * (to.width / H3_PATCH);
        int r;

        if (!is_edge(height) || !is_edge(width) || !is_edge(to.height) || !is_edge(to.width) ||
                to.height % H3_PATCH_PIXELS != 0 || to.width % H3_PATCH_PIXELS != 0)
                return -EINVAL;
        r = frame(rules, first, height, width, to, 0, ret);
        if (r < 0 || second)
                return r < 0 ? r : frame(rules, second, height, width, to, 1, ret);
        for (uint64_t i = 0; i < patches; i++)
                for (uint64_t c = 0; c < CHANNELS; c++) {
                        float *p = ret + i * H3_PATCH_NUMBERS + c * 2 * slot;

                        memcpy(p + slot, p, slot * sizeof(*p));
                }
        return 0;
}
