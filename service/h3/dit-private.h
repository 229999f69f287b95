/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* One rank's pass over the model, shared by dit.c, dit-block.c, adaln.c and adaln-table.c; nobody else
 * includes it. */

#include "service/h3/dit.h"
#include "service/h3/exchange-size.h"
#include "service/h3/sparse.h"
#include "service/h3/weights.h"

/* The MLP's inner rows are the widest thing there is: they are made for so many rows at a time, unless the
 * rank says otherwise. */
#define DIT_PIECE_ROWS 4096u

/* Query blocks that are routed at a time: their lists and scores take 8 bytes for every head and pair of blocks. */
#define DIT_ROUTED_BLOCKS 64u

/* Timesteps of a step: one per stream and one per kind of condition, fewer if they are equal; more with a
 * denoise mask. */
#define DIT_TIMESTEPS_MAX (4 + 2 * H3_MASK_LEVELS)

/* Rows are elements of `type` unless stated; "own" rows are those of the rank, a "chunk" is one of the plan's
 * (h3_plan_chunk()). `heads` are those that the rank attends for. All arrays are device memory, parts of one
 * arena. */
typedef struct DitRun {
        const LkOps *ops;
        LkContext *context;
        const H3Rank *rank; /* for the exchange */
        uint32_t self;      /* its index */
        const H3Plan *plan;
        const H3Config *c;
        H3Compute compute;
        LkType type;
        uint64_t element;       /* bytes of `type` */
        uint64_t n_rows;        /* of the whole sequence */
        uint64_t timesteps_max; /* what the arrays below have room for */
        H3Range rows, heads;
        H3Range rope;       /* rows of cos and sin: those that the rank makes Q and K of */
        uint64_t own_chunk; /* rows of the largest own chunk */
        uint64_t in_chunk;  /* rows of the largest chunk that h takes */
        uint64_t piece_rows; /* of an MLP's inner rows and of quantised ones at a time */
        H3Weights *weights;  /* NULL: the model's own pointers are used */

        uint8_t *x;         /* [own rows, hidden]: the residual stream */
        uint8_t *h;         /* [in_chunk, hidden]: normed rows of a chunk */
        int8_t *h_int8;     /* [in_chunk, hidden]: the same for int8 matrices, which the model has */
        float *h_scale;     /* [in_chunk] */
        uint8_t *q;         /* [rows attended for, heads * head_dim], [chunk][rank][row]; sparse: [all rows, ..] in order */
        uint8_t *k, *v;     /* [all rows, heads * head_dim] */
        uint8_t *o;         /* [own rows, inner]; before and after the blocks latent rows, as they come in and as they leave (dit.c) */
        uint8_t *o_out;     /* [other ranks' rows of a chunk, heads * head_dim]: O that leaves */
        uint8_t *qkv_out[4]; /* [own chunk, inner]: Q, K, V and gate that leave */
        uint8_t *y;         /* [own chunk, hidden]: what a branch adds */
        uint8_t *gate, *up, *act; /* [piece of a chunk, ffn] */
        int8_t *int8;             /* [piece, int8_cols]: quantised rows; no int8 matrices: empty */
        float *int8_scale;        /* [piece] */
        uint32_t int8_cols;

        /* of a sparse step; [blocks, ..] numbers are f32 */
        const H3Sparse *sparse; /* NULL: dense */
        uint8_t *coarse_gate;   /* VSA: as q */
        uint32_t *block_start;  /* [blocks + 1] */
        float *q_mean, *k_mean, *v_mean; /* [blocks, heads * head_dim] */
        float *k_centre;                 /* [2, heads * head_dim] */
        float *coarse;                   /* VSA: as q_mean */
        uint32_t *list;                  /* [heads, DIT_ROUTED_BLOCKS, blocks] */
        float *score;                    /* as list */
        uint32_t *count;                 /* [dit_counts()]: lengths of the lists of every layer (dit-sparse.c) */

        /* of a step, not of the refiner */
        float *cos, *sin;       /* [rope rows, 3 * rope_freqs] */
        uint8_t *coordinate;    /* [timesteps, time_dim]: silu(temb), or the curve's point */
        LkType coordinate_type; /* `type`; f32 with a curve, and so are the final layer's shift and scale */
        float *time_a, *time_b; /* [timesteps, the widest time row] */
        uint8_t *mod[2];     /* [timesteps * tags, 6 * hidden] of block i in mod[i % 2]: the norm before block
                                i + 1 runs while block i is not done; [timesteps, 2 * hidden] of the final layer,
                                which comes after the last block (dit_mod()) */
        int32_t *mod_index;  /* [own rows]: timestep * tags + tag */
        int32_t *time_index; /* [own rows]: timestep */

        const H3ModTable *table;  /* NULL: modulation rows are computed */
        const H3StepHooks *hooks; /* may be NULL */
} DitRun;

/* Which half of a block, and so which three of the six modulation vectors. */
typedef enum DitBranch {
        DIT_ATTENTION,
        DIT_MLP,
} DitBranch;

/* A run without rows and memory yet. rank: its ops and context; may be NULL. */
DitRun dit_run_make(const H3Rank *rank, const H3Model *m, H3Compute compute);
/* Memory for all arrays of a step of run's rows and timesteps_max; freed by ops->memory_free(). 0 or what
 * ops->memory_new() says. */
int dit_arena_new(DitRun *run, void **ret_arena);

/* The model with the part's weights where operations may read them, until it is given. */
static inline int dit_take(
        const DitRun *run, const H3Model *m, H3PartKind kind, uint32_t layer, const H3Model **ret) {
        const void *taken;
        int r;

        r = h3_part_take(run->weights, m, kind, layer, &taken);
        if (r >= 0)
                *ret = taken;
        return r;
}

static inline void dit_give(const DitRun *run, H3PartKind kind, uint32_t layer) {
        h3_part_give(run->weights, kind, layer);
}

static inline uint8_t *dit_mod(const DitRun *run, uint32_t layer) {
        return run->mod[layer % 2];
}

/* The widest row of the time embedding. */
static inline uint64_t dit_time_width(const H3Config *c) {
        uint64_t width = c->time_freq_dim > c->time_hidden ? c->time_freq_dim : c->time_hidden;

        return width > c->time_dim ? width : c->time_dim;
}

static inline uint64_t dit_own_rows(const DitRun *run) {
        return run->rows.end - run->rows.begin;
}

static inline uint64_t dit_heads_width(const DitRun *run, H3Range heads) {
        return h3_range_size(heads) * run->c->head_dim;
}

/* Where own row `row` (of the sequence) is in an array of own rows of `width` elements. */
static inline uint8_t *dit_own_at(const DitRun *run, uint8_t *x, uint64_t row, uint64_t width) {
        return x + (row - run->rows.begin) * width * run->element;
}

/* y[m, w.rows] = x[m, w.cols] . w^T + bias, dense rows; m may be 0. bias may be NULL. */
int dit_gemm(const DitRun *run, uint64_t m, const void *x, LkType x_type, const LkMatrix *w,
        const LkVector *bias, void *y, LkType y_type);
/* The same into rows of y_ld elements, in the activation type. */
int dit_gemm_to(const DitRun *run, uint64_t m, const void *x, const LkMatrix *w, void *y, uint64_t y_ld);

/* Whether a product with w is made in int8: of activations in bf16. In f32, int8 matrices are expanded. */
static inline bool dit_is_int8(const DitRun *run, const LkMatrix *w, LkType x_type) {
        return w->type == LK_I8 && run->type == LK_BF16 && x_type == LK_BF16;
}

/* The product of silu(gate) * up, unrounded, for such a w, in the activation type. */
int dit_int8_gemm_gated(const DitRun *run, uint64_t m, const void *gate, const void *up, const LkMatrix *w, void *y);

/* dit-block.c: a block of the model (block->adaln present: modulated, roped) or of the refiner. */

/* What a chunk's rows get added before their next norm: gate * run->y of a branch of a block. */
typedef struct DitPending {
        const H3Block *block;
        uint32_t layer;
        DitBranch branch;
} DitPending;

/* The norm before a block's attention on the rank's rows of a chunk, and all that attention needs of them:
 * Q, K and V into place, or on their way to the ranks that make or want them. layer counts from 0. pending
 * (may be NULL) is added to the rows first. */
int dit_feed(
        const DitRun *run, const H3Block *block, uint32_t layer, uint32_t chunk, const DitPending *pending);

/* A block, whose rows were fed, in two halves: attention over the rows that it was fed, then all that follows.
 * Each chunk that is done is fed to the next block at once (NULL: it is the last), so that it leaves while the
 * following chunks compute. */
int dit_attend(const DitRun *run, const H3Block *block, uint32_t layer);
int dit_finish(const DitRun *run, const H3Block *block, const H3Block *next, uint32_t layer);

/* dit-sparse.c: of a layer whose Q, K and V are there; the rank may have no heads. */
static inline bool dit_is_sparse(const DitRun *run, uint32_t layer) {
        return run->sparse && !sparse_is_dense(&run->sparse->options, layer);
}

/* Numbers in run->count: of each layer, block and head, and of one more block. */
uint64_t dit_counts(const DitRun *run);

/* Before the first layer and after the last: on_seen is told what the rank's queries saw. Both wait for the device. */
int dit_sparse_start(const DitRun *run);
int dit_sparse_end(const DitRun *run);

/* Means of the blocks, and what follows from them for all queries. */
int dit_sparse_begin(const DitRun *run);
/* Attention of the rows of `a`, of which the first is `row`: routed and attended in pieces. */
int dit_sparse_attend(const DitRun *run, uint32_t layer, const LkAttention *a, uint64_t row);

/* timesteps.c */
typedef struct DitTimesteps {
        uint32_t n;
        float t[DIT_TIMESTEPS_MAX]; /* ascending, distinct */
        /* which one a target row has, by its mask level; text rows have video[H3_MASK_LEVELS] */
        uint32_t video[H3_MASK_LEVELS + 1], audio[H3_MASK_LEVELS + 1];
        uint32_t visual_condition, audio_condition;
} DitTimesteps;

void dit_timesteps(const H3Layout *l, float sigma_video, float sigma_audio, DitTimesteps *ret);
/* Sets run->mod_index and run->time_index. */
int dit_index_rows(const DitRun *run, const H3Layout *l, const DitTimesteps *t);

/* adaln.c: sets run->coordinate for n timesteps. */
int dit_time_embedding(const DitRun *run, const H3Model *m, const float *t, uint32_t n);
/* Sets dit_mod(run, layer) to the rows of block `layer` for n timesteps from run->coordinate; layer = layers: of the
 * final layer. One row of 18 * hidden per timestep is H3_TAGS rows of 6 * hidden. */
int dit_modulation_rows(const DitRun *run, const H3Model *m, uint32_t layer, uint32_t n);
/* The same for the step's timesteps, from run->table if there is one. */
int dit_modulation(const DitRun *run, const H3Model *m, uint32_t layer, const DitTimesteps *t);

/* adaln-table.c: whether the table is of this model and has the timesteps of the step. -EINVAL (Internal).
 */
int dit_table_check(const H3ModTable *table, const H3Model *m, const H3StepInput *in, Fault *f);
/* Sets dit_mod(run, layer) to the rows of run->table, which was checked. */
int dit_table_load(const DitRun *run, uint32_t layer, const DitTimesteps *t);

/* Hands rows x columns of device memory to the test's tap, if there is one. layer < 0: no "block.N." before
 * the name. */
int dit_tap(const DitRun *run, int layer, const char *name, const void *x, LkType type, uint64_t rows,
        uint64_t columns);
/* The same for host values of f32. */
void dit_tap_host(const DitRun *run, const char *name, const float *values, uint64_t rows, uint64_t columns);
