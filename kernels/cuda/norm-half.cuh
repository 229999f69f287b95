/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Rows in f32 beside rows in f16. Arguments are checked. */

#include "kernels/cuda/rows.cuh"

/* y_type is LK_F16; nothing is quantised or modulated. Any alignment. */
int norm_half(LkContext *c, const LkNorm *a);
/* y_type is LK_F16. -EOPNOTSUPP: the rows are not of 16-byte pieces, nothing was done. */
int residual_half(LkContext *c, const LkResidual *a);
