/* SPDX-License-Identifier: Apache-2.0 */
#include "service/shared/fmath.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

/* All constants are plain expansions (factorials, ln 2, pi / 2 cut into doubles); every polynomial is the
 * function's Taylor series, long enough that the first term left out is below 2^-58 of the result on the
 * reduced range. */

#define LN2_HIGH 0x1.62e42fefa2p-1 /* 40 bits: k * LN2_HIGH is exact for |k| < 2^13 */
#define LN2_LOW 0x1.9ef35793c7673p-41
#define INV_LN2 0x1.71547652b82fep+0

static const double inverse_factorial[] = {
        1.0,
        1.0,
        1.0 / 2,
        1.0 / 6,
        1.0 / 24,
        1.0 / 120,
        1.0 / 720,
        1.0 / 5040,
        1.0 / 40320,
        1.0 / 362880,
        1.0 / 3628800,
        1.0 / 39916800,
        1.0 / 479001600,
        1.0 / 6227020800,
        1.0 / 87178291200,
        1.0 / 1307674368000,
        1.0 / 20922789888000,
        1.0 / 355687428096000,
};

static double power_of_two(int e) { /* -1022 <= e <= 1023 */
        uint64_t bits = (uint64_t) (e + 1023) << 52;
        double d;

        memcpy(&d, &bits, sizeof(d));
        return d;
}

/* Nearest integer, |x| < 2^51, by the rounding of an addition: no libm, and the mode is to-nearest
 * everywhere here. */
static double nearest(double x) {
        return (x + 0x1.8p52) - 0x1.8p52;
}

double fmath_exp(double x) {
        double k, r, low, p;
        int e;

        if (x != x)
                return x;
        if (x > 709.8)
                return HUGE_VAL;
        if (x < -745.2)
                return 0.0;

        k = nearest(x * INV_LN2);
        r = fma(-k, LN2_HIGH, x);
        low = k * LN2_LOW;

        /* e^(r - low) = 1 + r + (r^2 / 2 + ... - low), |r| <= 0.35 */
        double t = r - low;
        double lost = (r - t) - low;

        p = inverse_factorial[14];
        for (int i = 13; i >= 2; i--)
                p = fma(p, t, inverse_factorial[i]);
        p = fma(p * t, t, lost);
        p = 1.0 + (t + p);

        e = (int) k;
        if (e >= -1022 && e <= 1023)
                return p * power_of_two(e);
        if (e > 1023) /* the largest values: 2^1024 is no double */
                return p * 2.0 * power_of_two(e - 1);
        return p * power_of_two(e + 200) * power_of_two(-200);
}

double fmath_log(double x) {
        uint64_t bits;
        int e = 0;
        double f, d, s, s_low, z, p, high, low, sum;

        if (x != x || x < 0)
                return NAN;
        if (x == 0)
                return -HUGE_VAL;
        if (x > 0x1.fffffffffffffp1023)
                return x;

        if (x < 0x1p-1022) {
                x *= 0x1p54;
                e = -54;
        }
        memcpy(&bits, &x, sizeof(bits));
        e += (int) (bits >> 52) - 1023;
        bits = (bits & 0xfffffffffffffULL) | 0x3ff0000000000000ULL;
        memcpy(&x, &bits, sizeof(x));
        if (x > 0x1.6a09e667f3bcdp0) { /* sqrt 2: the mantissa lies in [sqrt 1/2, sqrt 2] */
                x *= 0.5;
                e++;
        }

        /* log(1 + f) = 2 atanh(s), s = f / (2 + f) kept in two doubles */
        f = x - 1.0;
        d = 2.0 + f;
        s = f / d;
        s_low = (fma(-s, d, f) - s * (f - (d - 2.0))) / d;
        z = s * s;
        p = 0;
        for (int i = 12; i >= 1; i--)
                p = fma(p, z, 1.0 / (2 * i + 1));
        p *= z * s;

        high = (double) e * LN2_HIGH;
        low = fma((double) e, LN2_LOW, 2.0 * (s_low + p));
        sum = high + 2.0 * s; /* |high| > |2 s| or high is 0 */
        low += (high - sum) + 2.0 * s;
        return sum + low;
}

/* x - n * pi / 2 as high + low, and n modulo 4. The first product is exact to the last bit of the difference
 * for |x| <= 1e9: n has at most 30 bits and the difference is below 1. */
static int reduce(double x, double *ret_high, double *ret_low) {
        static const double pio2_1 = 0x1.921fb54442d18p+0, pio2_2 = 0x1.1a62633145c07p-54,
                            pio2_3 = -0x1.f1976b7ed8fbcp-110;
        double n, r, p, p_low, high;

        n = nearest(x * 0x1.45f306dc9c883p-1);
        r = fma(-n, pio2_1, x);
        p = n * pio2_2;
        p_low = fma(n, pio2_3, fma(n, pio2_2, -p));
        high = r - p;

        /* exact error of the subtraction, whichever of the two is larger */
        double back = high - r;
        double lost = (r - (high - back)) - (p + back);

        *ret_high = high;
        *ret_low = lost - p_low;
        return (int) ((int64_t) n & 3);
}

/* sin(x + low), |x| <= pi / 4 + a little */
static double sin_reduced(double x, double low) {
        double z = x * x, p = -inverse_factorial[15];

        p = fma(p, z, inverse_factorial[13]);
        p = fma(p, z, -inverse_factorial[11]);
        p = fma(p, z, inverse_factorial[9]);
        p = fma(p, z, -inverse_factorial[7]);
        p = fma(p, z, inverse_factorial[5]);
        p = fma(p, z, -inverse_factorial[3]);
        return x + fma(p * z, x, low * fma(-0.5, z, 1.0));
}

static double cos_reduced(double x, double low) {
        double z = x * x, p = inverse_factorial[16], half, w;

        p = fma(p, z, -inverse_factorial[14]);
        p = fma(p, z, inverse_factorial[12]);
        p = fma(p, z, -inverse_factorial[10]);
        p = fma(p, z, inverse_factorial[8]);
        p = fma(p, z, -inverse_factorial[6]);
        p = fma(p, z, inverse_factorial[4]);
        half = 0.5 * z;
        w = 1.0 - half;
        return w + (((1.0 - w) - half) + (fma(p * z, z, -x * low) - 0.5 * fma(x, x, -z)));
}

double fmath_sin(double x) {
        double high, low;

        switch (reduce(x, &high, &low)) {
        case 0:
                return sin_reduced(high, low);
        case 1:
                return cos_reduced(high, low);
        case 2:
                return -sin_reduced(high, low);
        default:
                return -cos_reduced(high, low);
        }
}

double fmath_cos(double x) {
        double high, low;

        switch (reduce(x, &high, &low)) {
        case 0:
                return cos_reduced(high, low);
        case 1:
                return -sin_reduced(high, low);
        case 2:
                return -cos_reduced(high, low);
        default:
                return sin_reduced(high, low);
        }
}
