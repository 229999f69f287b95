/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The kernels among which attention.cu chooses. Each returns -EOPNOTSUPP for what it does not serve, without
 * having done anything. */

#include "kernels/cuda/context.cuh"

extern "C" {
/* Hopper: bf16, heads of 128, all keys, rows 16-byte aligned. */
int lk_cuda_attention_sm90(LkContext *c, const LkAttention *a);
}
