/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Numbers of attention tests in arrays of any type. */

#include <math.h>

#include "tests/gpu/backends.h"

/* Of standard deviation 1, about. */
static inline float normal(void) {
        float f = 0;

        for (int i = 0; i < 4; i++)
                f += (float) (next() >> 8) * 0x1p-24f - 0.5f;
        return f * 1.7320508f;
}

static inline void put(void *p, LkType t, uint64_t i, float f) {
        uint32_t u, sign, exponent;

        memcpy(&u, &f, 4);
        if (t == LK_F32)
                memcpy((uint8_t *) p + i * 4, &u, 4);
        else if (t == LK_BF16)
                memcpy((uint8_t *) p + i * 2, (uint8_t *) &u + 2, 2);
        else { /* cut off */
                sign = u >> 16 & 0x8000u;
                exponent = u >> 23 & 255u;
                uint16_t h = (uint16_t) (exponent < 113 ? sign : exponent == 255 ? sign | 0x7c00u | (u & 0x7fffffu ? 0x200u : 0)
                                                                                 : sign | (exponent - 112) << 10 | (u >> 13 & 0x3ffu));

                memcpy((uint8_t *) p + i * 2, &h, 2);
        }
}

static inline double get(const void *p, LkType t, uint64_t i) {
        uint32_t u = 0;
        uint16_t h;
        float f;

        if (t == LK_F32) {
                memcpy(&f, (const uint8_t *) p + i * 4, 4);
                return f;
        }
        memcpy(&h, (const uint8_t *) p + i * 2, 2);
        if (t == LK_BF16) {
                u = (uint32_t) h << 16;
                memcpy(&f, &u, 4);
                return f;
        }
        if ((h & 0x7c00) == 0x7c00)
                return h & 0x3ff ? NAN : h & 0x8000 ? -INFINITY : INFINITY;
        return (h & 0x8000 ? -1 : 1) * ((h & 0x7c00) == 0 ? ldexp(h & 0x3ff, -24) : ldexp(1024 + (h & 0x3ff), (h >> 10 & 31) - 25));
}
