/* SPDX-License-Identifier: Apache-2.0 */
#include "service/media/resample.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "service/shared/cleanup.h"
#include "tests/unit/shared/cmocka-all.h"

/* The oracle: every pixel as one weighted mean of its neighbours, in f64. */
static double weight(double x) {
        if (x <= -3.0 || x >= 3.0)
                return 0.0;
        if (x == 0.0)
                return 1.0;
        return 3.0 * sin(M_PI * x) * sin(M_PI * x / 3.0) / (M_PI * M_PI * x * x);
}

static double oracle_line(const double *from, uint32_t n, uint32_t step, uint32_t to, uint32_t i) {
        double scale = (double) n / to, wide = scale > 1.0 ? scale : 1.0, centre = (i + 0.5) * scale,
               sum = 0.0, weights = 0.0;

        for (uint32_t k = 0; k < n; k++) {
                double w = weight((k + 0.5 - centre) / wide);

                sum += w * from[(size_t) k * step];
                weights += w;
        }
        return sum / weights;
}

static double round_to_u8(double v) {
        return v < 0.0 ? 0.0 : v > 255.0 ? 255.0 : floor(v + 0.5);
}

static uint8_t *noise(uint32_t width, uint32_t height, unsigned seed) {
        uint8_t *p = malloc((size_t) width * height * 3);

        assert_non_null(p);
        for (size_t i = 0; i < (size_t) width * height * 3; i++) {
                seed = seed * 1664525u + 1013904223u;
                p[i] = (i / 3) % 7 == 0 ? ((seed >> 24) & 1 ? 255 : 0) : (uint8_t) (seed >> 24);
        }
        return p;
}

static void check(uint32_t fw, uint32_t fh, uint32_t tw, uint32_t th) {
        CLEANUP_FREE uint8_t *from = noise(fw, fh, fw * 31 + fh * 17 + tw),
                             *to = malloc((size_t) tw * th * 3);
        CLEANUP_FREE double *rows = malloc((size_t) tw * fh * 3 * sizeof(double)),
                            *source = malloc((size_t) fw * fh * 3 * sizeof(double));
        ResampleCrop all = {0, 0, tw, th};
        unsigned differ = 0;

        for (size_t i = 0; i < (size_t) fw * fh * 3; i++)
                source[i] = from[i];
        for (uint32_t y = 0; y < fh; y++)
                for (uint32_t x = 0; x < tw; x++)
                        for (unsigned c = 0; c < 3; c++)
                                rows[((size_t) y * tw + x) * 3 + c] =
                                        fw == tw ? source[((size_t) y * fw + x) * 3 + c]
                                                 : round_to_u8(oracle_line(
                                                           source + (size_t) y * fw * 3 + c, fw, 3, tw, x));

        assert_int_equal(resample_rgb(from, fw, fh, tw, th, &all, to), 0);
        for (uint32_t y = 0; y < th; y++)
                for (uint32_t x = 0; x < tw * 3; x++) {
                        double want = fh == th ? rows[(size_t) y * tw * 3 + x]
                                               : round_to_u8(oracle_line(rows + x, fh, tw * 3, th, y));
                        double d = fabs(want - to[(size_t) y * tw * 3 + x]);

                        if (d > 1.0)
                                fail_msg("%ux%u to %ux%u: %d at %u,%u, expected %.0f", fw, fh, tw, th,
                                        to[(size_t) y * tw * 3 + x], x, y, want);
                        differ += d != 0.0;
                }
        assert_true(differ <= (size_t) tw * th * 3 / 1000 + 1); /* halves alone */
}

static void resample_rgb_all_scales_match_oracle(void **state) {
        check(64, 48, 32, 24);
        check(64, 48, 96, 80);
        check(101, 37, 64, 64);
        check(37, 101, 50, 33);
        check(300, 5, 7, 200);
        check(1, 1, 32, 32);
        check(2, 3, 1, 1);
        check(64, 64, 64, 32);
        check(64, 64, 32, 64);
        check(517, 389, 32, 32);
}

static void resample_rgb_same_size_is_copy(void **state) {
        CLEANUP_FREE uint8_t *from = noise(33, 21, 1), *to = malloc(33 * 21 * 3);

        assert_int_equal(resample_rgb(from, 33, 21, 33, 21, &(ResampleCrop){0, 0, 33, 21}, to), 0);
        assert_memory_equal(from, to, 33 * 21 * 3);
}

static void resample_rgb_crop_is_part_of_whole(void **state) {
        CLEANUP_FREE uint8_t *from = noise(71, 53, 5), *whole = malloc(90 * 40 * 3),
                             *part = malloc(31 * 22 * 3);
        ResampleCrop crop = {17, 9, 31, 22};

        assert_int_equal(resample_rgb(from, 71, 53, 90, 40, &(ResampleCrop){0, 0, 90, 40}, whole), 0);
        assert_int_equal(resample_rgb(from, 71, 53, 90, 40, &crop, part), 0);
        for (uint32_t y = 0; y < crop.height; y++)
                assert_memory_equal(
                        part + y * crop.width * 3, whole + ((y + crop.y) * 90 + crop.x) * 3, crop.width * 3);
}

static void resample_rgb_flat_stays_flat(void **state) {
        uint8_t from[19 * 23 * 3], to[64 * 64 * 3];

        for (unsigned v = 0; v < 256; v += 51) {
                memset(from, (int) v, sizeof(from));
                assert_int_equal(resample_rgb(from, 19, 23, 64, 64, &(ResampleCrop){0, 0, 64, 64}, to), 0);
                for (size_t i = 0; i < sizeof(to); i++)
                        assert_int_equal(to[i], v);
        }
}

static void resample_rgb_bad_sizes_refused(void **state) {
        uint8_t from[3] = {1, 2, 3}, to[12] = {9, 9, 9};

        assert_int_equal(resample_rgb(from, 0, 1, 2, 2, &(ResampleCrop){0, 0, 2, 2}, to), -EINVAL);
        assert_int_equal(resample_rgb(from, 1, 1, 70000, 2, &(ResampleCrop){0, 0, 2, 2}, to), -EINVAL);
        assert_int_equal(resample_rgb(from, 1, 1, 2, 2, &(ResampleCrop){1, 0, 2, 2}, to), -EINVAL);
        assert_int_equal(resample_rgb(from, 1, 1, 2, 2, &(ResampleCrop){UINT32_MAX, 0, 2, 2}, to), -EINVAL);
        assert_int_equal(resample_rgb(from, 1, 1, 2, 2, &(ResampleCrop){0, 0, 0, 2}, to), -EINVAL);
        assert_int_equal(to[0], 9);
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(resample_rgb_all_scales_match_oracle),
                cmocka_unit_test(resample_rgb_same_size_is_copy),
                cmocka_unit_test(resample_rgb_crop_is_part_of_whole),
                cmocka_unit_test(resample_rgb_flat_stays_flat),
                cmocka_unit_test(resample_rgb_bad_sizes_refused),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
