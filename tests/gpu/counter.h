/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Numbers made of a name and a counter: any part of a tensor can be made alone, by any thread, and is the same everywhere. Only exact
 * operations of f32 and integers, rounded to nearest where a type is narrower. */

#include <math.h>
#include <stdint.h>
#include <string.h>

/* Of a tensor's name. */
static inline uint64_t counter_seed(const char *name) {
        uint64_t h = 0x6a09e667f3bcc908; /* the square root of two */

        for (; *name != '\0'; name++)
                h = (h ^ (uint8_t) *name) * 0x9e3779b97f4a7c15; /* the golden ratio */
        return h;
}

static inline uint64_t counter_hash(uint64_t seed, uint64_t i) {
        uint64_t h = (seed ^ i) * 0x9e3779b97f4a7c15;

        h = (h ^ h >> 32) * 0xbb67ae8584caa73b; /* the square root of three */
        h = (h ^ h >> 29) * 0x3c6ef372fe94f82b; /* of five */
        return h ^ h >> 32;
}

#define COUNTER_MEAN 131070    /* of the sum of four numbers of 16 bits, which is also the farthest from it */
#define COUNTER_DEVIATION 37837

/* A whole number of mean 0 and standard deviation COUNTER_DEVIATION, nearly normal, at most COUNTER_MEAN from 0. */
static inline int32_t counter_sum(uint64_t seed, uint64_t i) {
        uint64_t h = counter_hash(seed, i);

        h = (h & 0x0000ffff0000ffff) + (h >> 16 & 0x0000ffff0000ffff);
        return (int32_t) ((h & 0xffffffff) + (h >> 32)) - COUNTER_MEAN;
}

/* Mean 0, standard deviation 1, at most 3.47 from 0. */
static inline float counter_normal(uint64_t seed, uint64_t i) {
        return (float) counter_sum(seed, i) * (1.0f / COUNTER_DEVIATION);
}

/* Finite numbers only. */
static inline uint16_t counter_bf16(float x) {
        uint32_t bits;

        memcpy(&bits, &x, sizeof(bits));
        return (uint16_t) ((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* Numbers below 65504. */
static inline uint16_t counter_f16(float x) {
        uint32_t bits, sign;

        memcpy(&bits, &x, sizeof(bits));
        sign = bits >> 16 & 0x8000;
        bits &= 0x7fffffff;
        if (bits < 0x38800000) /* below 2^-14 steps are 2^-24 */
                return (uint16_t) (sign | (uint32_t) lrintf(fabsf(x) * 0x1p24f));
        bits = ((bits + 0xfff + (bits >> 13 & 1)) >> 13) - (112u << 10);
        return (uint16_t) (sign | bits);
}
