/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Products with weights: what the files of gemm, gemm_i8 and dequantise share. A context's part of it is a CudaProduct. */

#include <stdint.h>

#include <cuda_runtime_api.h>

#include "kernels/cuda/context.cuh"
#include "kernels/cuda/lt.h"

struct CudaProduct {
        CudaLt *lt;   /* NULL: not on this device; own kernels then */
        uint8_t *scratch;
        uint64_t scratch_size;
        uint64_t i8_rows;   /* of int32 at a time, at most */
        bool own_only;      /* mma.sync only: for tests and measurements */
        bool i8_sums;       /* int8 not by Hopper's kernel: likewise */
        const char *refused; /* what the self-tests of this context found wrong; NULL: nothing */
};

/* The first part of the scratch memory: factors and bias of up to COLUMNS_MAX columns as f32. */
#define COLUMNS_MAX UINT64_C(262144)
#define SCRATCH_ALIGN UINT64_C(256)
#define LAUNCH_MAX ((UINT64_C(1) << 31) - 1) /* elements of a matrix in a launch, gaps included */

#define SCRATCH_LARGE (UINT64_C(512) << 20)
#define SCRATCH_SMALL (UINT64_C(160) << 20)
#define SCRATCH_LARGE_FROM (UINT64_C(32) << 30) /* of device memory */

/* The rest of it, handed out from the front. */
typedef struct Scratch {
        uint8_t *at;
        uint64_t left;
} Scratch;

static inline Scratch scratch_begin(const CudaProduct *p) {
        const uint64_t columns = 2 * COLUMNS_MAX * sizeof(float);
        Scratch s = { p->scratch + columns, p->scratch_size - columns };

        return s;
}

static inline uint64_t at_most(uint64_t a, uint64_t b) {
        return a < b ? a : b;
}

static inline uint64_t round_up(uint64_t n, uint64_t to) {
        return (n + to - 1) / to * to;
}

static inline void *scratch_take(Scratch *s, uint64_t size) {
        uint64_t rounded = round_up(size, SCRATCH_ALIGN);
        void *p = s->at;

        if (rounded > s->left)
                return NULL;
        s->at += rounded;
        s->left -= rounded;
        return p;
}

/* Per column of a product, f32; NULL: 1, 0. */
typedef struct Columns {
        const float *scale, *bias;
        const void *half_bias; /* of f16 products, beside `bias`: the same numbers in f16, up to a multiple of 8 columns */
} Columns;

#define PIECE_ROWS UINT64_C(128) /* rows that go to a library at a time: a multiple of it */

static inline bool is_aligned(const void *p, uint64_t ld_bytes) {
        return ((uintptr_t) p | ld_bytes) % 16 == 0;
}

static inline bool is_dense(const LkMatrix *w) {
        uint64_t size = lk_row_size(w->type, w->cols);

        return w->row_stride == size && (w->block_rows >= w->rows || w->block_stride == w->block_rows * size);
}

__device__ static inline const uint8_t *matrix_row(const LkMatrix &w, uint64_t r) {
        return (const uint8_t *) w.data + r / w.block_rows * w.block_stride + r % w.block_rows * w.row_stride;
}

/* May the rows of w be read in pieces of 16 bytes? */
static inline bool matrix_aligned(const LkMatrix *w) {
        return is_aligned(w->data, w->row_stride | (w->block_rows < w->rows ? w->block_stride : 0));
}

static inline LkMatrix dense_matrix(const void *data, LkType type, uint64_t rows, uint64_t cols) {
        LkMatrix w = {};

        w.data = data;
        w.type = type;
        w.rows = w.block_rows = rows;
        w.cols = cols;
        w.row_stride = lk_row_size(type, cols);
        w.block_stride = rows * w.row_stride;
        return w;
}

static inline LkVector bias_part(const LkVector *bias, uint64_t begin, uint64_t n) {
        LkVector part = *bias;

        if (part.data)
                part.data = (const uint8_t *) bias->data + begin * lk_type_size(bias->type);
        part.n = n;
        return part;
}

/* Tile of a launch's block: eight tiles of rows go along all columns before the next eight, so that both operands stay in the cache. */
__device__ static inline void tile_of_block(uint32_t m_tiles, uint32_t n_tiles, uint32_t *ret_m, uint32_t *ret_n) {
        const uint32_t group = 8;
        uint32_t first = blockIdx.x / (group * n_tiles) * group, in = blockIdx.x % (group * n_tiles);
        uint32_t rows = m_tiles - first < group ? m_tiles - first : group;

        *ret_m = first + in % rows;
        *ret_n = in / rows;
}

/* y = x . w^T by the multiply instructions that every card since sm_80 has; bf16 or f16 x and w, or int8 with x_scale. k ascending, one
 * accumulator. Any alignment, any m, n, k. */
typedef struct MmaProduct {
        uint64_t m;
        const void *x;
        uint64_t x_ld;
        LkMatrix w;            /* LK_BF16, LK_F16 or LK_I8 */
        const float *x_scale;  /* of LK_I8 */
        Columns columns;
        void *y;
        LkType y_type;
        uint64_t y_ld;
} MmaProduct;
int product_mma(cudaStream_t stream, const MmaProduct *a);
/* The same of int8 by Hopper's kernel: the same bits. n products, up to I8_TOGETHER, of the same rows of x, in one launch. -EOPNOTSUPP: it does
 * not take one of them (y is bf16; whatever the copy engine reads or writes is aligned to 16 bytes, w is dense, its rows are a multiple of
 * eight; factors and bias aligned to 8 bytes); nothing was launched. */
#define I8_TOGETHER 4u
int product_i8_sm90(LkContext *c, const MmaProduct *a, uint32_t n);

/* y = (sum * x_scale[row]) * scale[column] + bias[column], rounded once; without x_scale and scale: of the sum itself. */
typedef enum EmitType {
        EMIT_I32,
        EMIT_F32,
        EMIT_BF16, /* copied */
        EMIT_F16,  /* the same */
} EmitType;
typedef struct Emit {
        uint64_t m, n;
        const void *sums; /* [m, sums_ld], aligned */
        EmitType type;
        uint64_t sums_ld;
        const float *x_scale; /* NULL: none */
        Columns columns;
        void *y;
        LkType y_type;
        uint64_t y_ld;
} Emit;
int product_emit(cudaStream_t stream, const Emit *a);

/* LkGemm with w in LK_F32, LK_BF16 or LK_F16 and the CPU's bits; `in_scale` of any type of w. */
int product_f32(cudaStream_t stream, const LkGemm *a);

/* w as dense rows of bf16 (LkExpand; one of bf16 as it is), rows up to padded_rows as zeros. -EINVAL: another type. */
int expand_bf16(cudaStream_t stream, const LkMatrix *w, uint64_t padded_rows, void *y);
/* The same of f16, scales included, rounded. */
int expand_f16(cudaStream_t stream, const LkMatrix *w, uint64_t padded_rows, void *y);
/* The same as f32, scales included (dequantise). */
int expand_f32(cudaStream_t stream, const LkMatrix *w, float *y, uint64_t y_ld);
/* Scales of w's rows (if `scaled`) and bias to the scratch memory. half: of an f16 product, the bias only. */
int expand_columns(const CudaProduct *p, cudaStream_t stream, const LkMatrix *w, const LkVector *bias, bool scaled, bool half, Columns *ret);

/* How a layer's bf16 or f16 product is made. */
typedef struct LayerPin {
        bool own;    /* by product_mma */
        bool few;    /* `small` has the bits of `large` and is faster for few rows */
        LtPin large, small;
} LayerPin;
#define FEW_ROWS UINT64_C(2048)

/* y_type LK_F16: x and w, too. biased: the library adds it. `own` where the library is not to be used or does not take k and layer_rows. Else found once for a layer, all its parts and all devices
 * of the class; tested when first asked for, on the context's stream and in its scratch memory, which must not hold anything. */
int layer_pin(LkContext *c, uint64_t k, uint64_t layer_rows, LkType y_type, bool biased, const LayerPin **ret);
/* The same for int8 as a whole: false if the library is not to be used. */
bool library_i8(LkContext *c);
/* And for int8 products by Hopper's kernel; `refused` says so if it has other bits than product_mma. */
bool hopper_i8(LkContext *c);
/* And for attention over int8 by Hopper's kernel; `refused` says so if it has other bits than the portable one. */
bool hopper_attention_i8(LkContext *c);
/* Both kernels on a few numbers in the scratch memory. Whether they have the same bits, or a negative errno. */
int attention_i8_try(LkContext *c);

int product_new(LkContext *c);
void product_free(LkContext *c);
