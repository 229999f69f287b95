/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Every op is compiled once per instruction set (LK_CPU_LEVEL 1: portable C, 3: AVX2 + FMA + F16C, 4:
 * AVX-512) from the same source; LK_ISA(gemm) is the name of this compilation's gemm. */

#include "kernels/cpu/context.h"
#include "kernels/ops.h"

#define LK_CPU_DECLARE(isa)                                                                                 \
        int lk_cpu_gemm_##isa(LkContext *c, const LkGemm *a);                                               \
        int lk_cpu_attention_##isa(LkContext *c, const LkAttention *a);                                     \
        int lk_cpu_quantise_queries_##isa(LkContext *c, const LkQuantiseQueries *a);                        \
        int lk_cpu_quantise_keys_##isa(LkContext *c, const LkQuantiseKeys *a);                              \
        int lk_cpu_attention_i8_##isa(LkContext *c, const LkAttentionI8 *a);                                \
        int lk_cpu_norm_##isa(LkContext *c, const LkNorm *a);                                               \
        int lk_cpu_layer_norm_##isa(LkContext *c, const LkLayerNorm *a);                                    \
        int lk_cpu_qk_norm_rope_##isa(LkContext *c, const LkQkNormRope *a);                                 \
        int lk_cpu_residual_##isa(LkContext *c, const LkResidual *a);                                       \
        int lk_cpu_swiglu_##isa(LkContext *c, const LkSwiglu *a);                                           \
        int lk_cpu_activate_##isa(LkContext *c, const LkActivate *a);                                       \
        int lk_cpu_convert_##isa(LkContext *c, const LkConvert *a);                                         \
        int lk_cpu_quantise_##isa(LkContext *c, const LkQuantise *a);                                       \
        int lk_cpu_gemm_i8_##isa(LkContext *c, const LkGemmI8 *a);                                          \
        int lk_cpu_dequantise_##isa(LkContext *c, const LkDequantise *a);                                   \
        int lk_cpu_expand_##isa(LkContext *c, const LkExpand *a);                                           \
        int lk_cpu_conv_##isa(LkContext *c, const LkConv *a);                                               \
        int lk_cpu_group_norm_##isa(LkContext *c, const LkGroupNorm *a);                                    \
        int lk_cpu_snake_##isa(LkContext *c, const LkSnake *a);                                             \
        int lk_cpu_alias_free_##isa(LkContext *c, const LkAliasFree *a);                                    \
        int lk_cpu_average_##isa(LkContext *c, const LkAverage *a);                                         \
        int lk_cpu_block_means_##isa(LkContext *c, const LkBlockMeans *a);                                  \
        int lk_cpu_route_##isa(LkContext *c, const LkRoute *a);                                             \
        int lk_cpu_sparse_attention_##isa(LkContext *c, const LkSparseAttention *a);                        \
        int lk_cpu_unpatch_##isa(LkContext *c, const LkUnpatch *a);

LK_CPU_DECLARE(scalar)
LK_CPU_DECLARE(v3)
LK_CPU_DECLARE(v4)

#ifdef LK_CPU_LEVEL
#if LK_CPU_LEVEL == 4
#define LK_ISA(op) lk_cpu_##op##_v4
#elif LK_CPU_LEVEL == 3
#define LK_ISA(op) lk_cpu_##op##_v3
#else
#define LK_ISA(op) lk_cpu_##op##_scalar
#endif
#endif
