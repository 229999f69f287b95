/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The CPU backend: reference, demo and CI. Same bits on every x86-64 (scalar fmaf or AVX2 chosen at run time). */

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
