/* SPDX-License-Identifier: Apache-2.0 */
#include "service/h3/preview.h"

#include <math.h>

#include "service/shared/cleanup.h"
#include "tests/unit/shared/cmocka-all.h"

#define N 5

static float latent[24 * N], velocity[24 * N], map[75];

/* Small numbers that no two places share. */
static void fill(void) {
        for (unsigned i = 0; i < ELEMENTSOF(latent); i++) {
                latent[i] = 0.01f * (float) i - 0.3f;
                velocity[i] = 0.5f - 0.007f * (float) i;
        }
        for (unsigned i = 0; i < ELEMENTSOF(map); i++)
                map[i] = i < 72 ? 0.02f * (float) ((i * 7) % 11) - 0.09f : 0.4f + 0.1f * (float) (i - 72);
}

static void preview_is_the_map_of_the_clean_latent(void **state) {
        uint8_t got[N * 3];

        fill();
        h3_preview(latent, velocity, 0.625f, N, map, got);
        for (unsigned i = 0; i < N; i++)
                for (unsigned k = 0; k < 3; k++) {
                        double v = map[72 + k];

                        for (unsigned c = 0; c < 24; c++)
                                v += (double) map[c * 3 + k] *
                                     ((double) latent[c * N + i] + 0.625 * (double) velocity[c * N + i]);
                        v = v < 0 ? 0 : v > 1 ? 1 : v;
                        assert_true(fabs(got[i * 3 + k] - v * 255) <= 0.51);
                }
}

static void preview_at_sigma_0_does_not_look_at_the_velocity(void **state) {
        uint8_t a[N * 3], b[N * 3];

        fill();
        h3_preview(latent, velocity, 0, N, map, a);
        for (unsigned i = 0; i < ELEMENTSOF(velocity); i++)
                velocity[i] = -1000;
        h3_preview(latent, velocity, 0, N, map, b);
        assert_memory_equal(a, b, sizeof(a));
}

static void preview_cuts_off_what_is_no_colour(void **state) {
        static const float numbers[] = {-1e30f, 1e30f, NAN, INFINITY, -INFINITY};
        static const uint8_t want[] = {0, 255, 0, 255, 0};
        uint8_t got[N * 3];

        for (unsigned i = 0; i < ELEMENTSOF(map); i++)
                map[i] = i < 3;
        for (unsigned i = 0; i < ELEMENTSOF(latent); i++)
                latent[i] = velocity[i] = 0;
        for (unsigned i = 0; i < N; i++)
                latent[i] = numbers[i];
        h3_preview(latent, velocity, 1, N, map, got);
        for (unsigned i = 0; i < N; i++)
                for (unsigned k = 0; k < 3; k++)
                        assert_int_equal(got[i * 3 + k], want[i]);
}

int main(void) {
        const struct CMUnitTest tests[] = {
                cmocka_unit_test(preview_is_the_map_of_the_clean_latent),
                cmocka_unit_test(preview_at_sigma_0_does_not_look_at_the_velocity),
                cmocka_unit_test(preview_cuts_off_what_is_no_colour),
        };

        return cmocka_run_group_tests(tests, NULL, NULL);
}
