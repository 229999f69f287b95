/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The operations a backend offers on device arrays, as a table of function pointers.
 *
 * A backend (kernels/cpu, kernels/cuda) fills one LkOps. Code above it (service/h3, service/worker) sees
 * only this header. Operations know nothing of models, ranks, files or the bus.
 *
 * Rules that every implementation holds ("one answer", DESIGN.md):
 *  - A row's result depends on that row's inputs alone: never on the number of rows in the call, on its
 *    position, on the thread count or on the instruction set chosen at run time.
 *  - gemm: one f32 accumulator per output, k ascending, fused multiply-add (fmaf semantics), then
 *    + bias in f32, then one rounding to the output type.
 *  - reductions over a row (norms): 8 virtual lanes (element i goes to lane i % 8, ascending, fma), then
 *    the fixed tree ((0+4)+(2+6))+((1+5)+(3+7)).
 *  - attention: keys in absolute order in tiles of LK_KEY_TILE; online softmax; every decision per row.
 *  - no libm in result paths: own exp2, sqrtf and division are exact by IEEE.
 *  - bf16 results are rounded to nearest even at the points stated with each operation and nowhere else.
 *
 * Activations are LK_F32 or LK_BF16, the same type for all arguments of a call unless stated. They are
 * naturally aligned and rows are contiguous unless a stride is given; strides (ld) count elements. Weights
 * (LkMatrix, LkVector) may start at any byte and may be LK_F32, LK_BF16 or LK_F16.
 *
 * All functions return 0 or a negative errno (-EINVAL for an argument that breaks the contract, -EIO or
 * -ENODEV when a device fails). They are called from one thread per LkContext. */

#include <stdint.h>
#include <stddef.h>

typedef enum LkType {
        LK_F32 = 1,
        LK_BF16 = 2,
        LK_F16 = 3,
} LkType;

#define LK_KEY_TILE 64

/* One rank's device: its threads or stream and its scratch memory. */
typedef struct LkContext LkContext;

/* A weight matrix [rows, cols], row-major inside a row. Row r starts at
 *     data + (r / block_rows) * block_stride + (r % block_rows) * row_stride      (bytes)
 * so that the Q rows of a QKV matrix interleaved per head are a view: block_rows = head_dim,
 * block_stride = 3 * head_dim * row_stride. A plain matrix has block_rows = rows. */
typedef struct LkMatrix {
        const void *data;
        LkType type;
        uint64_t rows, cols;
        uint64_t row_stride;   /* bytes from one row to the next inside a block */
        uint64_t block_rows;   /* rows per block, > 0 */
        uint64_t block_stride; /* bytes from one block to the next */
} LkMatrix;

typedef struct LkVector {
        const void *data; /* NULL: absent */
        LkType type;
        uint64_t n;
} LkVector;

/* y[m, n] = x[m, k] . w[n, k]^T + bias[n].  n = w.rows, k = w.cols. x and y may differ in type. */
typedef struct LkGemm {
        uint64_t m;
        const void *x;
        LkType x_type;
        uint64_t x_ld;
        LkMatrix w;
        LkVector bias; /* data may be NULL */
        void *y;
        LkType y_type;
        uint64_t y_ld;
} LkGemm;

/* o[i, h, :] = softmax(scale * q[i, h, :] . k[j, h, :]) . v[j, h, :], full attention over n_k keys.
 * Rows are [heads, head_dim] with row strides in elements. Scores, maximum and sum are f32; with LK_BF16
 * the probabilities exp(s - running max) are rounded to bf16 before they meet v (the sum takes the unrounded
 * ones), accumulation is f32, the quotient is rounded once. head_dim is a multiple of 8, at most 256. */
typedef struct LkAttention {
        LkType type;
        uint64_t n_q, n_k;
        uint32_t heads, head_dim;
        float scale;
        const void *q, *k, *v;
        void *o;
        uint64_t q_ld, k_ld, v_ld, o_ld;
} LkAttention;

/* y = rms(x) * weight, optionally modulated: y = y * (1 + scale[row]) + shift[row].
 * Statistics f32: rstd = 1 / sqrtf(sum(x^2) / n + eps). Rounding points (LK_BF16): x * rstd * weight -> bf16;
 * then fma(h, 1 + scale, shift) in f32 -> bf16.
 * Row i uses modulation row mod_index[i] of `mod` (elements of `type`): shift at + shift_at, scale at + scale_at. */
typedef struct LkNorm {
        LkType type;
        uint64_t m, n;
        const void *x;
        uint64_t x_ld;
        LkVector weight;
        float eps;
        const void *mod; /* NULL: no modulation */
        uint64_t mod_ld;
        const int32_t *mod_index; /* [m] */
        uint64_t shift_at, scale_at;
        void *y;
        uint64_t y_ld;
} LkNorm;

/* In place on x[m, heads, head_dim] (row stride x_ld): per-head rms with weight[head_dim], f32 statistics,
 * rounded to `type`; then, if cos is given, the first 2 * rope_dims of each head are rotated split-half:
 * a' = a*cos - b*sin, b' = b*cos + a*sin for the pair (i, i + rope_dims), computed in f32 as
 * fma(a, cos, -(b * sin)) and fma(b, cos, a * sin), rounded once. cos and sin are [m, rope_dims] f32, already rounded to
 * the activation type by the caller. */
typedef struct LkQkNormRope {
        LkType type;
        uint64_t m;
        uint32_t heads, head_dim;
        void *x;
        uint64_t x_ld;
        LkVector weight;
        float eps;
        const float *cos, *sin; /* NULL: no rotation (refiner) */
        uint32_t rope_dims;
} LkQkNormRope;

/* x[i, :] += gate * y[i, :]: gate * y is rounded to `type`, the sum is rounded to `type`.
 * gate row as in LkNorm; mod == NULL: plain x += y. */
typedef struct LkResidual {
        LkType type;
        uint64_t m, n;
        void *x;
        uint64_t x_ld;
        const void *y;
        uint64_t y_ld;
        const void *mod;
        uint64_t mod_ld;
        const int32_t *mod_index;
        uint64_t gate_at;
} LkResidual;

/* y = silu(gate) * up; silu(g) = g / (1 + exp(-g)) in f32, rounded to `type`, times up, rounded to `type`. */
typedef struct LkSwiglu {
        LkType type;
        uint64_t m, n;
        const void *gate, *up;
        uint64_t gate_ld, up_ld;
        void *y;
        uint64_t y_ld;
} LkSwiglu;

/* y[i, :] = x[i, :] in another type (f32 <-> bf16, round to nearest even). */
typedef struct LkConvert {
        uint64_t m, n;
        const void *x;
        LkType x_type;
        uint64_t x_ld;
        void *y;
        LkType y_type;
        uint64_t y_ld;
} LkConvert;

typedef struct LkOps {
        const char *backend;     /* "cpu", "cuda" */
        const char *numerics_id; /* what the bits depend on, e.g. "cpu-1" */

        /* threads: 0 = as many as the calling thread's CPU mask allows. */
        int (*context_new)(uint32_t threads, LkContext **ret);
        LkContext *(*context_free)(LkContext *c); /* accepts NULL, returns NULL */

        /* Device memory, 256-byte aligned. The CPU backend's device memory is ordinary memory. */
        int (*memory_new)(LkContext *c, uint64_t size, void **ret);
        void (*memory_free)(LkContext *c, void *p); /* accepts NULL */
        int (*upload)(LkContext *c, void *device, const void *host, uint64_t size);
        int (*download)(LkContext *c, void *host, const void *device, uint64_t size);

        int (*gemm)(LkContext *c, const LkGemm *a);
        int (*attention)(LkContext *c, const LkAttention *a);
        int (*norm)(LkContext *c, const LkNorm *a);
        int (*qk_norm_rope)(LkContext *c, const LkQkNormRope *a);
        int (*residual)(LkContext *c, const LkResidual *a);
        int (*swiglu)(LkContext *c, const LkSwiglu *a);
        int (*convert)(LkContext *c, const LkConvert *a);
} LkOps;

static inline uint64_t lk_type_size(LkType t) {
        return t == LK_F32 ? 4 : 2;
}
