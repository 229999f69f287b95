/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The CUDA backend so far: memory, attention, and the row passes with the CPU backend's bits. The products are still NULL, so no
 * worker uses this table yet. */

#include "kernels/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The static op table. context_new takes the calling thread's current device; -ENODEV without one. */
const LkOps *lk_cuda_ops(void);

#ifdef __cplusplus
}
#endif
