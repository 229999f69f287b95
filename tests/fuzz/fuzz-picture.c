/* SPDX-License-Identifier: Apache-2.0 */
/* Input: four numbers (height, width, frames, flags), two of limits, then pixels, again and again. */
#include <errno.h>
#include <math.h>
#include <string.h>

#include "service/h3/picture.h"
#include "service/shared/cleanup.h"
#include "tests/fuzz/target.h"

/* Larger ones are only sized: they would take their time. */
#define PIXELS_MAX 8192u

static uint64_t take(const uint8_t **data, size_t *n, size_t bytes) {
        uint64_t v = 0;

        for (size_t i = 0; i<bytes && * n> 0; i++, (*n)--)
                v |= (uint64_t) * (*data)++ << 8 * i;
        return v;
}

static uint8_t *pixels(uint64_t size, const uint8_t *data, size_t n, size_t skip) {
        uint8_t *p = malloc(size);

        CHECK(p);
        for (uint64_t i = 0; i < size; i++)
                p[i] = n > 0 ? data[(i + skip) % n] : 0;
        return p;
}

/* Every number is written and lies between -1 and 1. */
static void check_patches(const H3PictureRules *rules, const uint8_t *first, const uint8_t *second,
        uint64_t h, uint64_t w, H3PictureSize to) {
        const uint64_t n = to.height * to.width * 6;
        CLEANUP_FREE float *patches = malloc(n * sizeof(*patches));

        CHECK(patches);
        for (uint64_t i = 0; i < n; i++)
                patches[i] = 7.0f;
        CHECK(h3_picture_patches(rules, first, second, h, w, to, patches) == 0);
        for (uint64_t i = 0; i < n; i++)
                CHECK(fabsf(patches[i]) <= 1.0f + 1e-5f);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
        uint64_t h = take(&data, &n, 3), w = take(&data, &n, 3), frames = take(&data, &n, 4),
                 flags = take(&data, &n, 1);
        H3PictureRules rules = flags & 1 ? h3_picture_comfy : h3_picture_published;
        CLEANUP_FREE uint8_t *first = NULL, *second = NULL;
        H3PictureSize to = {};
        Fault f = {};
        int r;

        frames = flags & 2 ? frames : 0;
        if (flags & 4) {
                rules.image_min = 1 + take(&data, &n, 2);
                rules.image_max = rules.image_min + take(&data, &n, 2);
        }
        r = h3_picture_size(&rules, frames, h, w, &to, &f);
        CHECK((r == 0) == (f.name[0] == '\0'));
        if (r < 0) {
                CHECK(r == -EINVAL && to.height == 0 && strcmp(f.name, FAULT_INVALID_ARGUMENT) == 0);
                return 0;
        }
        CHECK(to.height >= 32 && to.width >= 32 && to.height % 32 == 0 && to.width % 32 == 0);
        CHECK(to.height * to.width <= (UINT64_C(1) << 33));
        if (h * w > PIXELS_MAX || to.height * to.width > 2 * PIXELS_MAX)
                return 0;
        first = pixels(h * w * 3, data, n, 0);
        second = flags & 8 ? pixels(h * w * 3, data, n, 1) : NULL;
        check_patches(&rules, first, second, h, w, to);
        return 0;
}
