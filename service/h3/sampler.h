/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Sampler updates on one stream's latent (h3.md 4.3). Host arithmetic in f32, shared by all backends. */

#include <stdint.h>

/* Euler as diffusers computes it: with t = 1 - sigma in f32, x0 = x + (1 - t) * v, r = next / sigma,
 * ret = r * x + (1 - r) * x0, each operation rounded to f32. ret must not overlap x. n elements. */
void h3_euler(const float *x, const float *velocity, float sigma, float next, uint64_t n, float *ret);
