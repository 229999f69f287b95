/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Denoise masks (h3.md 1.11, as ComfyUI defines them): what of a latent is generated (1) and what is kept
 * (0). The model knows a mask only per row and in steps of 1 / H3_MASK_LEVELS: the pooled mask. Host
 * arithmetic in f32. */

#include "service/h3/layout.h"

/* Video mask [T, H, W] to the pooled one, of the same shape: the largest value of each patch (padding adds
 * nothing), rounded up to a multiple of 1 / H3_MASK_LEVELS. ret may be mask. -EINVAL with InvalidTensor for
 * a value that is not in 0 to 1. */
int h3_mask_pool_video(const H3Config *c, const H3Grid *g, const float *mask, float *ret, Fault *f);

/* Audio mask [channels, 2, A] to the pooled one, [2, A]: the largest value over the channels, rounded up
 * likewise. A mask that does not tell latent channels apart has channels = 1. ret may be mask. */
int h3_mask_pool_audio(uint64_t channels, uint64_t n_audio, const float *mask, float *ret, Fault *f);

/* ret = mask * x + (1 - mask) * kept. mask [n_mask] is repeated over the channels: n is a multiple of
 * n_mask. ret may be x or kept. */
void h3_mask_mix(
        const float *mask, uint64_t n_mask, const float *x, const float *kept, uint64_t n, float *ret);
