/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Transcendental functions for host-made tables (rope, time embedding, schedules), the same bits on every
 * machine and libc. f64, error below 1 ulp-ish (1e-15 relative), by range reduction and polynomials with
 * explicit fma. */

double fmath_exp(double x);
double fmath_log(double x); /* x > 0 */
double fmath_sin(double x); /* |x| <= 1e9 */
double fmath_cos(double x);
