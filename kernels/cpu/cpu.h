/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The CPU backend: reference, demo and CI. The same bits from every instruction set below, on every thread
 * count and on other architectures (portable C only); results that are NaN may differ in payload and sign if
 * they are f32. */

#include "kernels/ops.h"

/* Instruction set: LK_CPU_AUTO picks the best one this machine has. The others are for tests. */
typedef enum LkCpuIsa {
        LK_CPU_AUTO = 0,
        LK_CPU_SCALAR,
        LK_CPU_V3, /* AVX2, FMA, F16C */
        LK_CPU_V4, /* AVX-512 F, BW, DQ, VL */
} LkCpuIsa;

/* Returns the static op table, or NULL if this machine lacks `isa`. Environment variables are not read. */
const LkOps *lk_cpu_ops(LkCpuIsa isa);
