/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The CUDA backend so far: memory and the row passes (norm, qk_norm_rope, residual, swiglu, convert), with the CPU backend's bits. The
 * products and attention are still NULL, so no worker uses this table yet. */

#include "kernels/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The static op table. context_new takes the calling thread's current device; -ENODEV without one. */
const LkOps *lk_cuda_ops(void);

#ifdef __cplusplus
}
#endif
