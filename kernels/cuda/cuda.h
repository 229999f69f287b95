/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The CUDA backend: every operation of ops.h. */

#include "kernels/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Counts up with every change of the kernels' bits. */
#define LK_CUDA_KERNELS 2

/* The static op table. context_new takes the calling thread's current device; -ENODEV without one. */
const LkOps *lk_cuda_ops(void);

/* Which kernel does what on this device, in a few lines of words; and what the bits depend on, in one. Both return as snprintf does. */
int lk_cuda_describe(LkContext *c, char *ret, size_t size);
int lk_cuda_numerics_id(LkContext *c, char *ret, size_t size);

/* For tests and measurements: products by own kernels only; rows of int32 sums at a time (0: as before). */
void lk_cuda_product_set(LkContext *c, bool own_only, uint64_t i8_rows);
/* Likewise: attention by the kernel that every card has. */
void lk_cuda_attention_set(LkContext *c, bool portable);

#ifdef __cplusplus
}
#endif
