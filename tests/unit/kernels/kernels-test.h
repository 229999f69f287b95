/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* What the tests of kernels/ share: random arrays of any type at any byte, guarded results, the loop over
 * instruction sets. Numbers are converted here in double arithmetic, independent of kernels/cpu/number.h. */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/cpu.h"
#include "kernels/ops.h"
#include "service/shared/cleanup.h"

#define TEST_INLINE static inline __attribute__((unused))

/* The fixed order in which eight lanes are summed (ops.h). */
TEST_INLINE float tree(const float l[8]) {
        return ((l[0] + l[4]) + (l[2] + l[6])) + ((l[1] + l[5]) + (l[3] + l[7]));
}

TEST_INLINE uint64_t random_u64(uint64_t *state) {
        uint64_t z = (*state += 0x9e3779b97f4a7c15u);

        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        return z ^ (z >> 31);
}

/* Bell-shaped, mean 0, standard deviation about 1. */
TEST_INLINE double random_normal(uint64_t *state) {
        double sum = 0;

        for (int i = 0; i < 6; i++)
                sum += (double) (random_u64(state) >> 11) * 0x1p-53 - 0.5;

        return sum * sqrt(2);
}

TEST_INLINE double bf16_to_double(uint16_t h) {
        double sign = h & 0x8000 ? -1 : 1, fraction = h & 127;
        int exponent = (h >> 7) & 255;

        if (exponent == 255)
                return fraction > 0 ? NAN : sign * INFINITY;

        return exponent == 0 ? sign * ldexp(fraction, -133) : sign * ldexp(128 + fraction, exponent - 134);
}

TEST_INLINE double f16_to_double(uint16_t h) {
        double sign = h & 0x8000 ? -1 : 1, fraction = h & 1023;
        int exponent = (h >> 10) & 31;

        if (exponent == 31)
                return fraction > 0 ? NAN : sign * INFINITY;

        return exponent == 0 ? sign * ldexp(fraction, -24) : sign * ldexp(1024 + fraction, exponent - 25);
}

/* The nearest value with `bits` bits of precision and exponents from `lowest` on, ties to even: nearbyint()
 * in the default rounding mode. Overflow is not looked at. */
TEST_INLINE double round_to(double d, int bits, int lowest) {
        int exponent;

        if (d == 0 || !isfinite(d))
                return d;

        (void) frexp(d, &exponent);
        exponent = exponent - bits < lowest ? lowest : exponent - bits;
        return ldexp(nearbyint(ldexp(d, -exponent)), exponent);
}

TEST_INLINE double round_type(double d, LkType t) {
        return t == LK_F32    ? round_to(d, 24, -149)
               : t == LK_BF16 ? round_to(d, 8, -133)
                              : round_to(d, 11, -24);
}

TEST_INLINE uint16_t half_bits(double d, LkType t) {
        double a = fabs(d);
        uint16_t sign = signbit(d) ? 0x8000 : 0;
        int exponent, bits = t == LK_BF16 ? 8 : 11, lowest = t == LK_BF16 ? -133 : -24;

        if (isnan(d))
                return t == LK_BF16 ? 0x7fc0 : 0x7e00;
        if (isinf(d))
                return sign | (t == LK_BF16 ? 0x7f80 : 0x7c00);
        if (a < ldexp(1, lowest + bits - 1))
                return sign | (uint16_t) ldexp(a, -lowest);

        (void) frexp(a, &exponent);
        exponent -= bits;
        return sign | (uint16_t) ((uint16_t) (exponent - lowest + 1) << (bits - 1)) |
               ((uint16_t) ldexp(a, -exponent) & ((1u << (bits - 1)) - 1));
}

TEST_INLINE double get(const void *p, LkType t, uint64_t i) {
        uint16_t h;
        float f;

        if (t == LK_F32) {
                memcpy(&f, (const uint8_t *) p + 4 * i, 4);
                return f;
        }

        memcpy(&h, (const uint8_t *) p + 2 * i, 2);
        return t == LK_BF16 ? bf16_to_double(h) : f16_to_double(h);
}

/* Rounds. */
TEST_INLINE void put(void *p, LkType t, uint64_t i, double d) {
        uint16_t h;
        float f = (float) d;

        if (t == LK_F32) {
                memcpy((uint8_t *) p + 4 * i, &f, 4);
                return;
        }

        h = half_bits(round_type(d, t), t);
        memcpy((uint8_t *) p + 2 * i, &h, 2);
}

TEST_INLINE void *allocate(uint64_t size) {
        void *p = aligned_alloc(64, (size + 64) / 64 * 64);

        assert_non_null(p);
        return p;
}

/* n random elements that start `offset` bytes behind a 64-byte boundary; free the result of *ret_base. */
TEST_INLINE void *random_array(
        uint64_t n, LkType t, unsigned offset, double size, uint64_t *state, void **ret_base) {
        uint8_t *base = allocate(n * lk_type_size(t) + offset);

        memset(base, 0xa5, offset);
        for (uint64_t i = 0; i < n; i++)
                put(base + offset, t, i, size * random_normal(state));

        *ret_base = base;
        return base + offset;
}

TEST_INLINE void *random_aligned(uint64_t n, LkType t, double size, uint64_t *state) {
        void *base;

        (void) random_array(n, t, 0, size, state, &base);
        return base;
}

/* n elements of a pattern that no result has, to see what an op leaves alone. */
TEST_INLINE void *guarded(uint64_t n, LkType t) {
        void *p = allocate(n * lk_type_size(t));

        memset(p, 0x5a, n * lk_type_size(t));
        return p;
}

static const LkCpuIsa all_isas[] = {LK_CPU_SCALAR, LK_CPU_V3, LK_CPU_V4};
#define ISAS 3

/* A context of `threads` threads on isa; NULL if this machine lacks it (test-context counts that as a skip).
 */
TEST_INLINE const LkOps *open_isa(LkCpuIsa isa, uint32_t threads, LkContext **ret) {
        const LkOps *ops = lk_cpu_ops(isa);

        if (ops)
                assert_int_equal(ops->context_new(threads, ret), 0);

        return ops;
}

/* sqrt(sum (a - b)^2 / sum b^2), b of doubles */
TEST_INLINE double relative_l2(
        const void *a, LkType t, uint64_t a_ld, const double *b, uint64_t m, uint64_t n) {
        double difference = 0, norm = 0;

        for (uint64_t i = 0; i < m; i++)
                for (uint64_t j = 0; j < n; j++) {
                        double d = get(a, t, i * a_ld + j) - b[i * n + j];

                        difference += d * d;
                        norm += b[i * n + j] * b[i * n + j];
                }

        return sqrt(difference / norm);
}
