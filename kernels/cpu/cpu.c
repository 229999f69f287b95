/* SPDX-License-Identifier: Apache-2.0 */
/* The op tables and the choice between them. */

#include "kernels/cpu/cpu.h"

#if LK_CPU_X86
#include <cpuid.h>
#endif
#include <stdbool.h>

#include "kernels/cpu/context.h"
#include "kernels/cpu/isa.h"

/* All tables have the same numerics id: they give the same bits. */
/* clang-format off */
#define CPU_WEIGHTS                                                                                   \
        {                                                                                             \
                [LK_F32] = LK_NATIVE, [LK_BF16] = LK_NATIVE, [LK_F16] = LK_NATIVE, [LK_I8] = LK_NATIVE, \
                [LK_F8_E4M3] = LK_EXPANDED, [LK_F8_E5M2] = LK_EXPANDED, [LK_NVFP4] = LK_EXPANDED,     \
        }
#define CPU_OPS(isa)                                       \
        {                                                  \
                .backend = "cpu",                          \
                .numerics_id = "cpu-2",                    \
                .weights = CPU_WEIGHTS,                    \
                .host_weights = true,                      \
                .context_new = context_new,                \
                .context_free = context_free,              \
                .stop_when = context_stop_when,            \
                .memory_new = context_memory_new,          \
                .memory_free = context_memory_free,        \
                .memory_trim = context_memory_trim,        \
                .upload = context_copy,                    \
                .download = context_copy,                  \
                .fetch = context_fetch,                    \
                .mark = context_event,                     \
                .wait = context_event,                     \
                .join = context_join,                      \
                .pin = context_pin,                        \
                .unpin = context_unpin,                    \
                .gemm = lk_cpu_gemm_##isa,                 \
                .attention = lk_cpu_attention_##isa,       \
                .quantise_queries = lk_cpu_quantise_queries_##isa, \
                .quantise_keys = lk_cpu_quantise_keys_##isa, \
                .attention_i8 = lk_cpu_attention_i8_##isa, \
                .norm = lk_cpu_norm_##isa,                 \
                .layer_norm = lk_cpu_layer_norm_##isa,     \
                .qk_norm_rope = lk_cpu_qk_norm_rope_##isa, \
                .residual = lk_cpu_residual_##isa,         \
                .swiglu = lk_cpu_swiglu_##isa,             \
                .activate = lk_cpu_activate_##isa,         \
                .convert = lk_cpu_convert_##isa,           \
                .quantise = lk_cpu_quantise_##isa,         \
                .gemm_i8 = lk_cpu_gemm_i8_##isa,           \
                .dequantise = lk_cpu_dequantise_##isa,     \
                .expand = lk_cpu_expand_##isa,             \
                .conv = lk_cpu_conv_##isa,                 \
                .group_norm = lk_cpu_group_norm_##isa,     \
                .snake = lk_cpu_snake_##isa,               \
                .alias_free = lk_cpu_alias_free_##isa,     \
                .average = lk_cpu_average_##isa,           \
                .block_means = lk_cpu_block_means_##isa,   \
                .route = lk_cpu_route_##isa,               \
                .sparse_attention = lk_cpu_sparse_attention_##isa, \
                .unpatch = lk_cpu_unpatch_##isa,           \
        }
/* clang-format on */

static const LkOps ops_scalar = CPU_OPS(scalar);

#if LK_CPU_X86
static const LkOps ops_v3 = CPU_OPS(v3);
static const LkOps ops_v4 = CPU_OPS(v4);

/* Exactly the features that the v3 files are compiled with. clang 14's __builtin_cpu_supports() does not
 * know f16c. */
static bool has_v3(void) {
        unsigned a, b, c, d;

        __builtin_cpu_init();

        return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) && __builtin_cpu_supports("avx2") &&
               __builtin_cpu_supports("fma");
}

static bool has_v4(void) {
        return has_v3() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

const LkOps *lk_cpu_ops(LkCpuIsa isa) {
        switch (isa) {
#if LK_CPU_X86
        case LK_CPU_V3:
                return has_v3() ? &ops_v3 : NULL;

        case LK_CPU_V4:
                return has_v4() ? &ops_v4 : NULL;

        case LK_CPU_AUTO:
                return has_v4() ? &ops_v4 : has_v3() ? &ops_v3 : &ops_scalar;
#else
        case LK_CPU_AUTO:
#endif
        case LK_CPU_SCALAR:
                return &ops_scalar;

        default:
                return NULL;
        }
}
