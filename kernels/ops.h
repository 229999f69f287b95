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
 *  - reductions over a row (norms): 8 virtual lanes (element i goes to lane i % 8, ascending; squares by
 *    fma), then the fixed tree ((0+4)+(2+6))+((1+5)+(3+7)).
 *  - attention: keys in absolute order in tiles of LK_KEY_TILE; online softmax; every decision per row.
 *  - no libm in result paths: own exp2, sqrtf and division are exact by IEEE.
 *  - bf16 results are rounded to nearest even at the points stated with each operation and nowhere else.
 *
 * Activations are LK_F32 or LK_BF16, the same type for all arguments of a call unless stated; LK_F16 where an
 * operation says so, rounded to nearest even at the same points as bf16 (beyond 65504: infinity). They are
 * naturally aligned and rows are contiguous unless a stride is given; strides (ld) count elements. Weights
 * may start at any byte. LkVector: LK_F32, LK_BF16 or LK_F16. LkMatrix: any type; a quantised one stays as
 * the file has it and is expanded tile by tile, so that a model is never in memory twice.
 *
 * All functions return 0 or a negative errno (-EINVAL for an argument that breaks the contract, -EIO or
 * -ENODEV when a device fails, -ECANCELED as stop_when() says). They are called from one thread per LkContext. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum LkType {
        LK_F32 = 1,
        LK_BF16 = 2,
        LK_F16 = 3,
        /* of a matrix only */
        LK_I8 = 4,
        LK_F8_E4M3 = 5, /* the finite kind ("fn"): no infinity, two NaN */
        LK_F8_E5M2 = 6,
        LK_NVFP4 = 7, /* two numbers a byte, the even one in the high half */
        LK_TYPE_MAX,
} LkType;

/* What a backend does with a weight type. */
typedef enum LkSupport {
        LK_REFUSED,  /* its gemm returns -EINVAL */
        LK_EXPANDED, /* in gemm, tile by tile; or by expand() before, which gives a gemm of bf16 the same bits */
        LK_NATIVE,   /* the arithmetic is the format's own; of LK_I8: gemm_i8 (gemm expands it) */
} LkSupport;

#define LK_KEY_TILE 64

/* One rank's device: its threads or stream and its scratch memory. */
typedef struct LkContext LkContext;

typedef struct LkVector {
        const void *data; /* NULL: absent */
        LkType type;
        uint64_t n;
} LkVector;

#define LK_ROTATION_MAX 256u

/* How the numbers of a quantised matrix are meant. Row r of a view is row first_row + (r / block_rows) *
 * (block_stride / row_stride) + r % block_rows of the tensor ("tensor row"), by which scales are found. All
 * products are f32, in the order of the parentheses, rounded once each:
 *     LK_I8    w = (sum over the group of q * H) * scale[row]    (the sum is exact; H below, 1 without
 * rotation) LK_F8_*  w = value(q) * scale[row] LK_NVFP4 w = value(q) * (scale[row] * e4m3(block_scale of the
 * 16 columns)) H is the normalised Hadamard matrix of the group: the Kronecker power of (1,1,1,-1)
 * (1,1,-1,1) (1,-1,1,1) (-1,1,1,1), divided by 2 each time. */
typedef struct LkQuant {
        const void *scale;     /* f32 */
        uint64_t scale_stride; /* bytes from one tensor row's to the next; 0: one for all */
        uint64_t first_row;    /* the view's row 0 */
        uint32_t rotation; /* LK_I8: columns per group, a power of 4 up to LK_ROTATION_MAX that divides cols;
                              0: none */
        const void *block_scale; /* LK_NVFP4: [tensor rows up to 128 | block_scale_cols up to 4] in tiles of
                                    128 x 4: the scale (r, c) is byte (r % 32) * 16 + (r % 128) / 32 * 4 + c
                                    % 4 of tile (r / 128) * (block_scale_cols / 4) + c / 4 */
        uint64_t block_scale_cols; /* a multiple of 4, at least cols / 16 */
        LkVector in_scale; /* [cols]: column k of x is multiplied by it in f32 before the product, or of w where
                              that is rounded to bf16 (LkExpand); may be absent */
} LkQuant;

/* A weight matrix [rows, cols], row-major inside a row. Row r starts at
 *     data + (r / block_rows) * block_stride + (r % block_rows) * row_stride      (bytes)
 * so that the Q rows of a QKV matrix interleaved per head are a view: block_rows = head_dim,
 * block_stride = 3 * head_dim * row_stride. A plain matrix has block_rows = rows. `layer_rows` names the layer
 * for a backend that chooses an algorithm once for each layer: the rows of the matrix that this is a part of,
 * so that every part is computed alike. */
typedef struct LkMatrix {
        const void *data;
        LkType type;
        uint64_t rows, cols;
        uint64_t row_stride;   /* bytes from one row to the next inside a block */
        uint64_t block_rows;   /* rows per block, > 0 */
        uint64_t block_stride; /* bytes from one block to the next */
        uint64_t layer_rows;   /* 0: rows */
        LkQuant quant;         /* types from LK_I8 on; else zero */
} LkMatrix;

/* y[m, n] = x[m, k] . w[n, k]^T + bias[n].  n = w.rows, k = w.cols. x and y may differ in type. A quantised
 * w is expanded as LkQuant says; then the rule of gemm holds. LK_F16: of both x and y; w (expanded) and bias are
 * rounded to f16 first, in_scale is absent. LK_BF16 of both x and y: a quantised w is LkExpand's first, as a file in bf16
 * would have it. */
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

/* y[m, rows] (f32) = the matrix expanded as LkQuant says; of other types, converted. */
typedef struct LkDequantise {
        LkMatrix w;
        float *y;
        uint64_t y_ld;
} LkDequantise;

/* y[rows, cols] (bf16, dense, 16-byte aligned) = the quantised matrix expanded as LkQuant says, column k times in_scale[k] (f32,
 * rounded once) if there is one, rounded to bf16. */
typedef struct LkExpand {
        LkMatrix w;
        uint16_t *y;
} LkExpand;

/* Rows to int8 with one scale each (h3.md 2.2). In f32, each operation rounded once:
 *  1. v = x, or silu(x) * up with silu(g) = g / (1 + exp(-g)) if up is given
 *  2. rotation by groups, a stage per power of 4 with strides 1, 4, 16, 64: the numbers a, b, c, d at that
 *     stride become ((a+b)+c)-d, ((a+b)-c)+d, ((a-b)+c)+d, ((b-a)+c)+d, times 0.5
 *  3. m = the largest |v|, at most the largest finite number of x_type; a NaN does not count
 *  4. LK_BF16: s = max(m * (1/127), 1e-30), q = bf16(bf16(v) / bf16(s)); LK_F32 (weights): s = max(m / 127,
 *     1e-30), q = v / s
 *  5. q to the nearest integer, ties to even, clamped to [-128, 127]; NaN gives 0. scale = s. */
typedef struct LkQuantise {
        LkType x_type;
        uint64_t m, k;
        const void *x;
        uint64_t x_ld;
        const void *up; /* NULL: x as it is */
        uint64_t up_ld;
        uint32_t rotation; /* as in LkQuant */
        int8_t *q;         /* [m, k] */
        uint64_t q_ld;
        float *scale; /* [m] */
} LkQuantise;

/* y = (f32(x . w^T) * x_scale[row]) * w.quant.scale[row of w] + bias, rounded to y_type. w is LK_I8;
 * rotation and in_scale of w are not looked at: x was rotated by quantise. The int32 sum is exact (k <=
 * LK_GEMM_I8_K_MAX), so its order is free; its conversion to f32 rounds once. beside: NULL, or a product to
 * be made at the same time or after it, in any order, and so on: none reads or writes what another writes.
 * All are checked before the first is made. Those of the same x are faster so than one by one. */
#define LK_GEMM_I8_K_MAX 131071u
typedef struct LkGemmI8 LkGemmI8;
struct LkGemmI8 {
        uint64_t m;
        const int8_t *x; /* [m, w.cols] */
        uint64_t x_ld;
        const float *x_scale; /* [m] */
        LkMatrix w;
        LkVector bias; /* data may be NULL */
        void *y;
        LkType y_type;
        uint64_t y_ld;
        const LkGemmI8 *beside;
};

/* o[i, h, :] = softmax(scale * q[i, h, :] . k[j, g, :]) . v[j, g, :] over n_k keys, g = h / (heads /
 * kv_heads). Rows are [heads, head_dim] (k, v: [kv_heads, head_dim]) with row strides in elements. Scores,
 * maximum and sum are f32; with LK_BF16 or LK_F16 the probabilities exp(s - running max) are rounded to that
 * before they meet v (the sum takes the unrounded ones), accumulation is f32, the quotient is rounded once.
 * sequences: so many of n_q queries and n_k keys each lie behind each other, row after row, and do not see one
 * another; as so many calls, bit for bit. head_dim is a multiple of 4, at most 256. causal: query i
 * sees keys 0 .. first_row + i, bit for bit as if there were no others (first_row + n_q <= n_k), so that any range of
 * the queries can be computed alone. */
typedef struct LkAttention {
        LkType type;
        uint64_t n_q, n_k;
        uint64_t sequences; /* 0: 1 */
        uint32_t heads, head_dim;
        uint32_t kv_heads; /* 0: `heads`; else a divisor of it */
        bool causal;
        bool aside; /* on LK_SIDE, beside what LK_COMPUTE is given: two that end one after the other leave a device half idle twice */
        uint64_t first_row; /* of the whole sequence, that q[0] is; looked at if causal */
        float scale;
        const void *q, *k, *v;
        void *o;
        uint64_t q_ld, k_ld, v_ld, o_ld;
} LkAttention;

/* Sparse attention (h3.md 7): rows lie in blocks, and a query sees the rows of some blocks one by one and those of
 * the others, or none of them, through the blocks' means. Three operations: means of the blocks, which blocks
 * (all of it on the device), attention. A block's numbers depend on its own rows, a choice on the head's blocks: on
 * no rank, chunk or plan. */

#define LK_BLOCK_ROWS LK_KEY_TILE

/* Block b is rows start[b] .. start[b + 1] - 1: 1 to LK_BLOCK_ROWS of them, whose place in the sequence need be no
 * multiple of anything. */
typedef struct LkBlocks {
        uint32_t n;
        const uint32_t *start; /* [n + 1], device memory; start[0] is 0 */
} LkBlocks;

/* mean[b, h, :] = (sum of the rows of block b of x[rows, heads, head_dim], ascending from +0) / their number; f32.
 * With centre, of every (h, d), each operation rounded once and sums over blocks by the rule of reductions over a
 * row (lane b % 8):
 *     centre[0] = sum(mean) / n;  mean = mean - centre[0];  centre[1] = sum(mean^2) / n */
typedef struct LkBlockMeans {
        LkType type;
        uint32_t heads, head_dim;
        LkBlocks blocks;
        const void *x;
        uint64_t x_ld;
        float *mean;   /* [blocks, heads, head_dim] */
        float *centre; /* [2, heads, head_dim]; NULL: mean is as it is */
} LkBlockMeans;

/* Which key blocks the query blocks i = first .. first + n_q - 1 of each head see row by row. All f32:
 *     dot = sum of q[i, d] * k[b, d]           one accumulator, d ascending, fma
 *     score = dot * scale
 * Block b is seen by i if it is a sink (b < sinks), if i sees all (dense_begin <= i < dense_end), if |i - b| <
 * reach, or if it is chosen:
 *     by_rank  b is no sink and its dot is at least the keep-th largest of those that are none; a NaN and what
 *              keep = 0 asks for is never chosen
 *     else     dot * c > tau * sqrtf((c * c) * v + 1e-6f) with c = scale * log2(e), v = sum of (q[i, d] * q[i, d])
 *              * variance[d] as dot
 * list: numbers of the blocks that are seen, ascending, count of them; behind them those that are not. */
typedef struct LkRoute {
        uint32_t heads, head_dim;
        uint32_t n;          /* blocks */
        uint32_t first, n_q; /* query blocks; first + n_q <= n */
        float scale;
        const float *q;        /* [n, heads, head_dim]: means */
        const float *k;        /* [n, heads, head_dim]: means less their centre */
        const float *variance; /* [heads, head_dim]: centre[1] of LkBlockMeans */
        bool by_rank;
        uint32_t keep;
        float tau;
        uint32_t sinks, dense_begin, dense_end, reach;
        uint32_t *list;  /* [heads, n_q, n] */
        uint32_t *count; /* [heads, n_q] */
        float *score;    /* [heads, n_q, n], by block */
} LkRoute;

/* Attention of queries in the query blocks first_block .. first_block + n_blocks - 1 by their lists. As LkAttention
 * says, with a block that is seen as a tile of keys, in the order of the list. With `value` the others follow, in the
 * order of the list, in tiles of LK_KEY_TILE of which each stands for a block b of n rows: score s = score[b] + scale
 * * (q . centre) (rounded to f32 each; dot as in LkRoute), probability exp(s - running max) * n, which is then rounded
 * as others are, and v = value[b], rounded to `type`. With `gate`: o = fma(gate, coarse[own block], quotient),
 * rounded once. If all blocks are seen the bits are those of attention (CUDA: of the kernel
 * for every card, of heads up to 128). */
typedef struct LkSparseAttention {
        LkAttention a; /* not causal, kv_heads 0, one sequence; first_row: of q[0], which lies in first_block */
        LkBlocks blocks;
        uint32_t first_block, n_blocks; /* those that the queries are in, with lists of their own: [heads, n_blocks, ..] */
        const uint32_t *list, *count;
        const float *score;
        const float *value;  /* [blocks, heads, head_dim]: means of v; NULL: the others are left out */
        const float *centre; /* [heads, head_dim]; with value */
        const void *gate;    /* [n_q, heads, head_dim] of `type`; NULL: none */
        uint64_t gate_ld;
        const float *coarse; /* [blocks, heads, head_dim]; with gate */
} LkSparseAttention;

/* Attention by int8 products: an approximation of attention(), with the same bits from every backend and on
 * every device. Heads have LK_I8_DIM numbers, every query sees every key if no lists say which. Keys are taken in tiles of LK_I8_KEYS
 * in absolute order; all scales and decisions are of one query row and head, or of one tile, so that any range
 * of rows and heads can be computed alone. All f32 operations round once and are in the order of the
 * parentheses; sums of integers are exact.
 *
 * Heads as int8: a number of f32 times 127 / m, to the nearest integer, ties to even; m: the largest magnitude
 * of those that share the scale, at least 1e-30; scale = m * (1 / 127). Where one of them is not finite, the
 * scale is NaN and the integers are 0: what attention() would spoil is NaN. Queries and keys are rotated first,
 * which spreads channels that stick out: LkQuantise's rotation in groups of 64, then the numbers a, b at a
 * distance of 64 become a + b and a - b. That is sqrt(2) too much, which the scale of the scores takes back. */
#define LK_I8_DIM 128u
#define LK_I8_KEYS 128u
#define LK_I8_SAMPLES 128u

static inline uint64_t lk_i8_tiles(uint64_t n_keys) {
        return n_keys / LK_I8_KEYS + (n_keys % LK_I8_KEYS != 0);
}

/* Queries: a scale for each row and head. */
typedef struct LkQuantiseQueries {
        LkType type; /* LK_F32 or LK_BF16 */
        uint64_t n;
        uint32_t heads;
        const void *x; /* [n, heads, LK_I8_DIM] */
        uint64_t x_ld;
        int8_t *q;     /* [n, heads, LK_I8_DIM], 16-byte aligned */
        uint64_t q_ld; /* a multiple of LK_I8_DIM */
        float *scale;  /* of row i and head h: scale[i * (q_ld / LK_I8_DIM) + h] */
} LkQuantiseQueries;

/* Keys and values of whole tiles; all arrays but k_scale are 16-byte aligned; what is missing from the last
 * tile is 0. In a row of v the keys of each 16 are in the order 0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15, in which
 * the products of scores leave them. */
typedef struct LkKeysI8 {
        uint64_t n; /* keys, > 0 */
        uint32_t heads;
        float *offset;  /* [heads, LK_I8_DIM]: what was taken from every key */
        int8_t *k;      /* [heads, tiles, LK_I8_KEYS, LK_I8_DIM] */
        float *k_scale; /* [heads, tiles] */
        int8_t *v;      /* [heads, tiles, LK_I8_DIM, LK_I8_KEYS] */
        float *v_scale; /* [heads, tiles, LK_I8_DIM] */
} LkKeysI8;

/* The key of a tile at place p of a row of v. */
static inline uint32_t lk_i8_key(uint32_t p) {
        return p / 16 * 16 + p / 2 % 2 * 8 + p % 16 / 4 * 2 + p % 2;
}

/* Keys less their offset, which changes no weight, with a scale for each tile; values with one for each tile and
 * channel.
 *     offset = ((k[r(0)] + k[r(1)]) + ..) * (1 / LK_I8_SAMPLES), r(i) = i * n / LK_I8_SAMPLES rounded down, from +0 on */
typedef struct LkQuantiseKeys {
        LkType type;       /* LK_F32 or LK_BF16 */
        const void *k, *v; /* [n, heads, LK_I8_DIM] */
        uint64_t k_ld, v_ld;
        LkKeysI8 to;
} LkQuantiseKeys;

/* o[i, h, :] by the integers of quantise_queries() and quantise_keys(). Tile by tile, with m = -inf, l = 0 and
 * o = 0 before the first:
 *     s[j] = q . k[j]                               top = the largest s[j]
 *     u = (q_scale * k_scale) * (scale * 0.5)       t = top * u
 *     e = exp(-|t - m|), as in attention()
 *     f, g, m = e, 1, t  if t > m, else  1, e, m
 *     a = u * (log2(e) / 16)
 *     w = fma(s[j], a, fma(-top, a, 1)), at most 1, at least 0 (also if it is NaN); the weight is 2^(16 w - 16)
 *     n = w in 16ths, to the nearest, ties to an odd number of them
 *     r = w - n
 *     p[j] = fma(fma(LK_I8_EXP_2, r, LK_I8_EXP_1), r, LK_I8_EXP_0) * 2^(16 n - 16), to the nearest integer,
 *            ties to even, rounded once: 0 .. 255
 *     l = fma(sum of p[j], g, l * f)                o = fma((sum of p[j] * v[j]) * v_scale, g, o * f)
 * A tile's weights are relative to its own largest one, so that none are lost in 8 bits whose tile has small
 * ones. The result is o / l, rounded to o_type.
 *
 * With lists, of route(), a query sees the keys of some blocks alone: block b is rows b * LK_BLOCK_ROWS .. of one sequence of
 * queries and keys, the last may be ragged. A tile with one of its two blocks in the list has only its keys j (though the scales of
 * all), one with none is left out. Blocks that are not seen do not count at all. If all are seen the bits are those without lists. */
#define LK_I8_EXP_0 255.113f /* 255 * 2^(16 r): within 1.8e-3 for |r| <= 1/32 */
#define LK_I8_EXP_1 2870.0679f
#define LK_I8_EXP_2 15564.641f
typedef struct LkAttentionI8 {
        uint64_t n_q;
        float scale; /* > 0, finite */
        const int8_t *q;
        const float *q_scale;
        uint64_t q_ld; /* as in LkQuantiseQueries */
        LkKeysI8 keys; /* its heads are those of q and o */
        LkType o_type; /* LK_F32 or LK_BF16 */
        void *o;
        uint64_t o_ld;

        const uint32_t *list; /* [heads, n_blocks, blocks of the keys], ascending; NULL: every query sees every key */
        const uint32_t *count; /* [heads, n_blocks], > 0 */
        uint64_t first_row;    /* of the sequence, that q[0] is; in first_block */
        uint32_t first_block, n_blocks; /* those that the queries are in */
} LkAttentionI8;

static inline uint64_t lk_i8_blocks(uint64_t n_keys) {
        return n_keys / LK_BLOCK_ROWS + (n_keys % LK_BLOCK_ROWS != 0);
}

/* y = rms(x) * weight, optionally modulated: y = y * (1 + scale[row]) + shift[row].
 * Statistics f32: rstd = 1 / sqrtf(sum(x^2) / n + eps). Rounding points (LK_BF16): x * rstd * weight ->
 * bf16; then fma(h, 1 + scale, shift) in f32 -> bf16. Row i uses modulation row mod_index[i] of `mod`
 * (elements of `mod_type`): shift at + shift_at, scale at + scale_at. round_first: x * rstd -> bf16, times
 * weight -> bf16 (no modulation then). y_type LK_F16, of type LK_F32: x * rstd * weight -> f16 (nothing of
 * quantise and mod then).
 *
 * Its neighbours in one pass over the rows, with the bits that the operations one by one would give: `add` is
 * done before, its x and x_ld are those of the norm; `quantise` after, of y. */
typedef struct LkResidual LkResidual;
typedef struct LkNorm {
        LkType type;
        uint64_t m, n;
        const void *x;
        uint64_t x_ld;
        LkVector weight;
        float eps;
        bool round_first;
        const void *mod; /* NULL: no modulation */
        LkType mod_type; /* 0: `type` */
        uint64_t mod_ld;
        const int32_t *mod_index; /* [m] */
        uint64_t shift_at, scale_at;
        void *y; /* NULL, with quantise: not wanted itself */
        LkType y_type; /* 0: `type` */
        uint64_t y_ld;
        const LkResidual *add;      /* NULL: none */
        const LkQuantise *quantise; /* NULL: none. up is NULL; x, x_ld, x_type, m and k are not looked at */
} LkNorm;

/* y = layer_norm(x) * weight + bias. Statistics f32, of the row as it is: mean = sum(x) / n; d = x - mean;
 * rstd = 1 / sqrtf(sum(d^2) / n + eps). Then fma(d * rstd, weight, bias), rounded once. y may be x. */
typedef struct LkLayerNorm {
        LkType type;
        uint64_t m, n;
        const void *x;
        uint64_t x_ld;
        LkVector weight, bias;
        float eps;
        void *y;
        uint64_t y_ld;
} LkLayerNorm;

/* LK_F16 too. In place on x[m, heads, head_dim] (row stride x_ld): per-head rms with weight[head_dim], f32 statistics,
 * rounded to `type`; then, if cos is given, the first 2 * rope_dims of each head are rotated split-half:
 * a' = a*cos - b*sin, b' = b*cos + a*sin for the pair (i, i + rope_dims), computed in f32 as
 * fma(a, cos, -(b * sin)) and fma(b, cos, a * sin), rounded once. cos and sin are [m, rope_dims] f32 (or of as
 * many rows as `period` says, again and again), already rounded to the activation type by the caller. */
typedef struct LkQkNormRope {
        LkType type;
        uint64_t m;
        uint32_t heads, head_dim;
        void *x;
        uint64_t x_ld;
        LkVector weight; /* data NULL: rotation only */
        float eps;
        const float *cos, *sin; /* NULL: no rotation (refiner) */
        uint32_t rope_dims;
        uint64_t period; /* row i turns by row i % period of cos and sin; 0: m */
} LkQkNormRope;

/* x[i, :] += gate * y[i, :]: gate * y is rounded to `type`, the sum is rounded to `type`.
 * gate row as in LkNorm; mod == NULL: plain x += y. y may be LK_F16 where the others are LK_F32. */
struct LkResidual {
        LkType type;
        uint64_t m, n;
        void *x;
        uint64_t x_ld;
        const void *y;
        LkType y_type; /* 0: `type` */
        uint64_t y_ld;
        const void *mod;
        uint64_t mod_ld;
        const int32_t *mod_index;
        uint64_t gate_at;
};

/* LK_F16 too. y = silu(gate) * up; silu(g) = g / (1 + exp(-g)) in f32, rounded to `type`, times up, rounded to `type`.
 */
typedef struct LkSwiglu {
        LkType type;
        uint64_t m, n;
        const void *gate, *up;
        uint64_t gate_ld, up_ld;
        void *y;
        uint64_t y_ld;
} LkSwiglu;

/* Element-wise, in f32, rounded once to `type`. Relative error, of finite x and normal results: LK_GELU
 * 2^-20; LK_SILU and LK_GELU_TANH 2^-22 * (1 + |exponent of their exp|), and 0 from an exponent of 88.73 on.
 */
typedef enum LkFunction {
        LK_SILU = 1,  /* x / (1 + exp(-x)) */
        LK_GELU,      /* x * (1 + erf(x / sqrt(2))) / 2 */
        LK_GELU_TANH, /* x * (1 + tanh(u)) / 2 = x / (1 + exp(-2 * u)), u = sqrt(2 / pi) * (x + 0.044715 *
                         x^3) */
        _LK_FUNCTION_MAX,
} LkFunction;

/* y may be x. */
typedef struct LkActivate {
        LkType type;
        LkFunction function;
        uint64_t m, n;
        const void *x;
        uint64_t x_ld;
        void *y;
        uint64_t y_ld;
} LkActivate;

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

/* What lies beyond an axis. */
typedef enum LkPad {
        LK_PAD_ZERO,
        LK_PAD_REFLECT,   /* about the edge element: 2 1 | 0 1 2; both pads are smaller than size */
        LK_PAD_REPLICATE, /* the edge element */
        LK_PAD_MAX,
} LkPad;

/* How a convolution walks an axis. */
typedef struct LkConvAxis {
        uint64_t size;                     /* of x, > 0 */
        uint32_t kernel, stride, dilation; /* > 0 */
        uint32_t before, after;            /* elements of padding */
        LkPad pad;
} LkConvAxis;

/* Positions of y along the axis; 0: the kernel does not fit. */
static inline uint64_t lk_conv_size(const LkConvAxis *a) {
        uint64_t padded = a->size + a->before + a->after;
        uint64_t span = (uint64_t) a->dilation * (a->kernel - 1) + 1;

        return padded < span ? 0 : (padded - span) / a->stride + 1;
}

/* A convolution (cross-correlation, as in torch) over t, h, w of channels-last f32; fewer axes: size and
 * kernel 1. It is gemm with one row of x per position of y: the numbers under the kernel in the order that
 * the weight has in its file, [out, in, kt, kh, kw], so k = ((c * KT + t) * KH + h) * KW + w ascending; what
 * lies in zero padding takes part as +0. All rules of gemm hold. */
#define LK_CONV_TAPS_MAX 256u /* kt * kh * kw */
typedef struct LkConv {
        LkConvAxis axis[3]; /* t, h, w */
        uint64_t channels;
        const float *x; /* [t, h, w, channels] */
        LkMatrix w;     /* [out, channels * kt * kh * kw]; not quantised */
        LkVector bias;  /* data may be NULL */
        float *y;       /* [t', h', w', out], lk_conv_size(); does not overlap x */
} LkConv;

/* y = (x - mean) * rstd * weight + bias per frame and group of neighbouring channels, then y = silu(y) if
 * asked for; f32, y may be x. Every product, sum and fma rounds once:
 *  1. channel sums of blocks of LK_GROUP_PIXELS pixels (the last one shorter), pixels ascending from +0
 *  2. the group's sum: f64, over blocks ascending and inside a block over channels ascending
 *  3. mean = f32(sum / n), n = pixels * channels of the group, division in f64
 *  4. the same two sums of d * d with d = x - mean, in 1 as fma(d, d, sum)
 *  5. rstd = 1 / sqrtf(f32(sum / n) + eps)
 *  6. y = fma(d * rstd, weight, bias); silu(y) = y / (1 + exp(-y)) */
#define LK_GROUP_PIXELS 256u
typedef struct LkGroupNorm {
        uint64_t frames, pixels, channels; /* x and y: [frames, pixels, channels] */
        uint32_t groups;                   /* divides channels */
        const float *x;
        LkVector weight, bias; /* [channels] */
        float eps;
        bool silu;
        float *y;
} LkGroupNorm;

/* y = fma(sin^2(a * x), 1 / (b + 1e-9), x) per channel with a = alpha, b = beta, or their exponentials; f32,
 * dense rows, y may be x. a * x is rounded; then sin^2 has an own polynomial behind a reduction by pi (no
 * libm): within LK_SIN2_ERROR of the exact value for |a * x| <= LK_SIN2_MAX, beyond it that of the limit. */
#define LK_SIN2_ERROR 2.5e-7f
#define LK_SIN2_MAX 0x1p18f
typedef struct LkSnake {
        uint64_t m, channels;
        const float *x;
        LkVector alpha, beta; /* [channels]; beta.data NULL: alpha */
        bool exponents;       /* alpha and beta are logarithms */
        float *y;
} LkSnake;

/* Snake between an upsampling and a downsampling by two, so that its overtones do not fold back: of rows
 * [first, first + m) of x, in one pass. x is [rows, channels] dense, beyond its ends x[-1] = x[0] and
 * x[rows] = x[rows - 1] and so on. Sums are chains of fma over j ascending from +0; 0 <= i < rows, all f32:
 *     u[2i]     = 2 * sum of up[j] * x[i + 2 - (j - 1) / 2], j = 1, 3 .. 11
 *     u[2i + 1] = 2 * sum of up[j] * x[i + 3 - j / 2], j = 0, 2 .. 10
 *     s         = snake(u); beyond its ends as x
 *     y[i]      = sum of down[j] * s[2i + j - 5], j = 0 .. 11
 * (a transposed convolution of x padded by 5, times 2, cropped by 15 on both sides; a convolution with stride
 * 2 of s padded by 5 and 6). A row of y depends on LK_ALIAS_FREE_REACH rows of x on each side. */
#define LK_ALIAS_FREE_TAPS 12u
#define LK_ALIAS_FREE_REACH 5u
typedef struct LkAliasFree {
        uint64_t rows, channels, first, m;
        const float *x;
        LkVector alpha, beta; /* [channels], logarithms */
        LkVector up, down;    /* [LK_ALIAS_FREE_TAPS] */
        float *y;             /* [m, channels]; does not overlap x */
} LkAliasFree;

/* y = ((x[0] + x[1]) + ..) / count of n numbers of f32; y may be one of x. */
#define LK_AVERAGE_MAX 4u
typedef struct LkAverage {
        uint64_t n;
        uint32_t count;
        const float *x[LK_AVERAGE_MAX];
        float *y;
} LkAverage;

/* Pixels of tokens, each [channels, patch[0], patch[1], patch[2]] f32, dense: y = [t * patch[0], h * patch[1], w *
 * patch[2], channels] of tokens in the order [t, h, w]. Copies only; x_ld: numbers from a token to the next. */
typedef struct LkUnpatch {
        uint64_t t, h, w;
        uint32_t patch[3], channels; /* > 0 */
        const float *x;
        uint64_t x_ld;
        float *y; /* does not overlap x */
} LkUnpatch;

/* The queues of a context run beside each other, the work of one in the order it was given. Every operation
 * goes to LK_COMPUTE but fetch(), copies between contexts or with the host, and attention that says LK_SIDE. */
typedef enum LkQueue {
        LK_COMPUTE,
        LK_COPY,
        LK_PEER,
        LK_SIDE,
        LK_TAKE, /* what comes in, while LK_PEER sends */
        _LK_QUEUE_MAX,
} LkQueue;

#define LK_EVENTS_MAX 256u

/* Rows of host memory, `stride` bytes apart, to dense rows of device memory. The host's memory stays as it is
 * until the copy is done. */
typedef struct LkFetch {
        void *device;
        const void *host;
        uint64_t rows, width, stride; /* width: bytes of a row */
} LkFetch;

/* Rows of device memory to device memory: of the context's own on LK_COMPUTE, from its own to that of any context of the
 * process on LK_PEER. Or, dense, between the context's own and host memory that is registered (pin()): to the host on LK_PEER, from it
 * on LK_TAKE; the host's memory is the copy's until it is done. Nothing overlaps. */
typedef struct LkCopy {
        void *to;
        const void *from;
        uint64_t rows, width, to_stride, from_stride; /* width: bytes of a row */
} LkCopy;

typedef bool (*LkStop)(void *userdata);

typedef struct LkOps {
        const char *backend;          /* "cpu", "cuda" */
        const char *numerics_id;      /* what the bits depend on, e.g. "cpu-2" */
        uint8_t weights[LK_TYPE_MAX]; /* LkSupport, by the type of a matrix */
        bool half;         /* LK_F16 is the quick way where f32 is not asked for */
        uint32_t batch;    /* so many small problems together fill the device; 0: 1 */
        bool host_weights; /* matrices and vectors may be in host memory; else they are fetched first, all
                              pointers of an operation are device memory, and rows are dense */

        /* threads: 0 = as many as the calling thread's CPU mask allows. */
        int (*context_new)(uint32_t threads, LkContext **ret);
        LkContext *(*context_free)(LkContext *c); /* accepts NULL, returns NULL */
        /* From now on the context's operations, whatever their size, end soon with -ECANCELED and undefined results
         * once stop() says true, which it then keeps to. Any thread may ask it, often. stop NULL: never. The member
         * is NULL where every operation is soon done. */
        void (*stop_when)(LkContext *c, LkStop stop, void *userdata);

        /* Device memory, 256-byte aligned. The CPU backend's device memory is ordinary memory. */
        int (*memory_new)(LkContext *c, uint64_t size, void **ret);
        void (*memory_free)(LkContext *c, void *p); /* accepts NULL */
        /* What was freed is kept for the next one that wants as much; this gives it back to the device. */
        void (*memory_trim)(LkContext *c);
        int (*upload)(LkContext *c, void *device, const void *host, uint64_t size);
        int (*download)(LkContext *c, void *host, const void *device, uint64_t size);

        /* Work may still run when an operation returns, and its error come out of a later one. upload() and
         * download() are done with the host's memory when they return. */
        int (*fetch)(LkContext *c, const LkFetch *a); /* on LK_COPY */
        /* Event `event` stands for what the queue was given so far; replaces what it stood for. */
        int (*mark)(LkContext *c, LkQueue queue, uint32_t event);
        /* Work that the queue is given later waits for it. An event that was never marked is done. */
        int (*wait)(LkContext *c, LkQueue queue, uint32_t event);
        int (*join)(LkContext *c, uint32_t event); /* the calling thread waits; sleeps meanwhile */

        /* Between the contexts of a process, on devices that reach each other; NULL: this backend has no such thing. */
        int (*copy)(LkContext *c, LkQueue queue, const LkCopy *a); /* LK_COMPUTE, LK_PEER or LK_TAKE */
        /* Work that the queue is given later waits for what other's event stands for now, or for what it stands for a moment
         * later. other may be at work on its thread meanwhile, but has marked the event before (the caller knows that). */
        int (*wait_for)(LkContext *c, LkQueue queue, LkContext *other, uint32_t event);
        /* Whether what the event stands for is done: 1, 0. Does not wait. */
        int (*is_done)(LkContext *c, uint32_t event);
        /* What a queue is for the device's own libraries, and the number of its device there. NULL: it has none. */
        void *(*native)(LkContext *c, LkQueue queue, int *ret_device);

        /* For figures: stamp() goes into LK_COMPUTE, stamped() waits for all that LK_COMPUTE has and says when (CLOCK_MONOTONIC,
         * usec, to about 100) the newest stamp was reached. NULL: work is done when it is given. */
        int (*stamp)(LkContext *c);
        int (*stamped)(LkContext *c, uint64_t *ret_usec);
        /* Likewise: how long LK_COMPUTE was from each lap(true) to the lap(false) behind it, all of them since the last laps(), which
         * waits for LK_COMPUTE. NULL: work is done when it is given. */
        int (*lap)(LkContext *c, bool begins);
        int (*laps)(LkContext *c, uint64_t *ret_usec);
        /* For tests of slow ways. nsec 0: notes when the queue comes to this; else the queue goes on so long after that at the
         * earliest. Waiting costs the device nothing. NULL: it cannot. */
        int (*hold)(LkContext *c, LkQueue queue, uint64_t nsec);

        /* Host memory [host, host + size) that is fetched from often, or that copy() works with: registered with the
         * device, for all contexts of the process, once; what is registered already is left alone. On failure it is as
         * before and may be fetched from all the same, slowly. unpin() takes what lies in the range back; nothing may
         * be fetched from it, or copied with it, meanwhile. The map is writable during pin(). */
        int (*pin)(LkContext *c, const void *host, uint64_t size);
        void (*unpin)(const void *host, uint64_t size);

        int (*gemm)(LkContext *c, const LkGemm *a);
        int (*attention)(LkContext *c, const LkAttention *a);
        int (*quantise_queries)(LkContext *c, const LkQuantiseQueries *a);
        int (*quantise_keys)(LkContext *c, const LkQuantiseKeys *a);
        int (*attention_i8)(LkContext *c, const LkAttentionI8 *a);
        int (*norm)(LkContext *c, const LkNorm *a);
        int (*layer_norm)(LkContext *c, const LkLayerNorm *a);
        int (*qk_norm_rope)(LkContext *c, const LkQkNormRope *a);
        int (*residual)(LkContext *c, const LkResidual *a);
        int (*swiglu)(LkContext *c, const LkSwiglu *a);
        int (*activate)(LkContext *c, const LkActivate *a);
        int (*convert)(LkContext *c, const LkConvert *a);
        int (*quantise)(LkContext *c, const LkQuantise *a);
        int (*gemm_i8)(LkContext *c, const LkGemmI8 *a);
        int (*dequantise)(LkContext *c, const LkDequantise *a);
        int (*expand)(LkContext *c, const LkExpand *a);
        int (*conv)(LkContext *c, const LkConv *a);
        int (*group_norm)(LkContext *c, const LkGroupNorm *a);
        int (*snake)(LkContext *c, const LkSnake *a);
        int (*alias_free)(LkContext *c, const LkAliasFree *a);
        int (*average)(LkContext *c, const LkAverage *a);
        int (*unpatch)(LkContext *c, const LkUnpatch *a);

        /* All three, or NULL: the backend has no sparse attention. */
        int (*block_means)(LkContext *c, const LkBlockMeans *a);
        int (*route)(LkContext *c, const LkRoute *a);
        int (*sparse_attention)(LkContext *c, const LkSparseAttention *a);
} LkOps;

/* Bytes of a number of an activation or a vector. */
static inline uint64_t lk_type_size(LkType t) {
        return t == LK_F32 ? 4 : 2;
}

/* Bytes of n numbers in a row of a matrix; n is even for LK_NVFP4. */
static inline uint64_t lk_row_size(LkType t, uint64_t n) {
        return t == LK_NVFP4 ? n / 2 : t >= LK_I8 ? n : n * lk_type_size(t);
}

/* Rows [begin, begin + n) of a matrix as a matrix, n > 0. begin lies on a block boundary where the matrix
 * has several blocks. */
static inline LkMatrix lk_matrix_rows(const LkMatrix *m, uint64_t begin, uint64_t n) {
        LkMatrix part = *m;
        const uint8_t *data = (const uint8_t *) m->data;

        part.layer_rows = m->layer_rows > 0 ? m->layer_rows : m->rows;
        part.rows = n;
        if (m->block_rows >= m->rows) {
                part.data = data + begin * m->row_stride;
                part.block_rows = n;
                part.block_stride = n * m->row_stride;
                part.quant.first_row += begin;
        } else {
                part.data = data + begin / m->block_rows * m->block_stride;
                if (m->row_stride > 0)
                        part.quant.first_row += begin / m->block_rows * (m->block_stride / m->row_stride);
        }
        return part;
}
