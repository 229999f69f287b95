/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* One rank's pass over the model, shared by dit.c, dit-block.c, adaln.c and adaln-table.c; nobody else
 * includes it. */

#include "service/h3/dit.h"

/* The MLP's inner rows are the widest thing there is: they are made for so many rows at a time. */
#define DIT_CHUNK_ROWS 4096

/* Timesteps of a step: one per stream and one per kind of condition, fewer if they are equal; more with a
 * denoise mask. */
#define DIT_TIMESTEPS_MAX (4 + 2 * H3_MASK_LEVELS)

/* Rows are elements of `type` unless stated; "own" rows and heads are those of the rank. All arrays are
 * device memory, parts of one arena. */
typedef struct DitRun {
        const LkOps *ops;
        LkContext *context;
        H3Exchange *exchange; /* NULL: nothing to move */
        uint32_t rank;
        const H3Config *c;
        LkType type;
        uint64_t element;       /* bytes of `type` */
        uint64_t n_rows;        /* of the whole sequence */
        uint64_t timesteps_max; /* what the arrays below have room for */
        H3Range rows, heads;

        uint8_t *x;               /* [own rows, hidden]: the residual stream */
        uint8_t *h;               /* [all rows, hidden]: normed rows */
        uint8_t *q, *k, *v;       /* [all rows, own heads * head_dim] */
        uint8_t *o;               /* [all rows, inner] */
        uint8_t *y;               /* [own rows, hidden]: what a branch adds */
        uint8_t *gate, *up, *act; /* [chunk, ffn] */
        int8_t *int8;             /* [chunk, int8_cols]: quantised rows; no int8 matrices: empty */
        float *int8_scale;        /* [chunk] */
        uint32_t int8_cols;

        /* of a step, not of the refiner */
        float *cos, *sin;       /* [all rows, 3 * rope_freqs] */
        uint8_t *coordinate;    /* [timesteps, time_dim]: silu(temb), or the curve's point */
        LkType coordinate_type; /* `type`; f32 with a curve, and so are the final layer's shift and scale */
        float *time_a, *time_b; /* [timesteps, the widest time row] */
        uint8_t *mod; /* [timesteps * tags, 6 * hidden] of the block at hand, then [timesteps, 2 * hidden] */
        int32_t *mod_index;  /* [own rows]: timestep * tags + tag */
        int32_t *time_index; /* [own rows]: timestep */
        float *io;           /* [own rows, the widest latent row], f32 */

        const H3ModTable *table;  /* NULL: modulation rows are computed */
        const H3StepHooks *hooks; /* may be NULL */
} DitRun;

/* Which half of a block, and so which three of the six modulation vectors. */
typedef enum DitBranch {
        DIT_ATTENTION,
        DIT_MLP,
} DitBranch;

/* A run of all rows and heads without memory yet. rank may be NULL. */
DitRun dit_run_make(const H3Rank *rank, const H3Model *m, H3Compute compute, uint64_t n_rows);
/* Memory for all arrays of a step of run's rows and timesteps_max; freed by ops->memory_free(). 0 or what
 * ops->memory_new() says. */
int dit_arena_new(DitRun *run, void **ret_arena);

/* The widest row of the time embedding. */
static inline uint64_t dit_time_width(const H3Config *c) {
        uint64_t width = c->time_freq_dim > c->time_hidden ? c->time_freq_dim : c->time_hidden;

        return width > c->time_dim ? width : c->time_dim;
}

static inline uint64_t dit_own_rows(const DitRun *run) {
        return run->rows.end - run->rows.begin;
}

static inline uint8_t *dit_own_h(const DitRun *run) {
        return run->h + run->rows.begin * run->c->hidden * run->element;
}

/* y[m, w.rows] = x[m, w.cols] . w^T + bias, dense rows; m may be 0. bias may be NULL. */
int dit_gemm(const DitRun *run, uint64_t m, const void *x, LkType x_type, const LkMatrix *w,
        const LkVector *bias, void *y, LkType y_type);

/* Whether a product with w is made in int8: of activations in bf16. In f32, int8 matrices are expanded. */
static inline bool dit_is_int8(const DitRun *run, const LkMatrix *w, LkType x_type) {
        return w->type == LK_I8 && run->type == LK_BF16 && x_type == LK_BF16;
}

/* The same product for such a w, by rows of a chunk. up: NULL, or x is the gate and silu(x) * up goes
 * in. */
int dit_int8_gemm(const DitRun *run, uint64_t m, const void *x, const void *up, const LkMatrix *w,
        const LkVector *bias, void *y, LkType y_type);

/* dit-block.c: a block of the model (block->adaln present: modulated by run->mod, roped) or of the refiner.
 */
int dit_block(const DitRun *run, const H3Block *block, uint32_t layer);

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
/* Sets run->mod to the rows of block `layer` for n timesteps from run->coordinate; layer = layers: of the
 * final layer. One row of 18 * hidden per timestep is H3_TAGS rows of 6 * hidden. */
int dit_modulation_rows(const DitRun *run, const H3Model *m, uint32_t layer, uint32_t n);
/* The same for the step's timesteps, from run->table if there is one. */
int dit_modulation(const DitRun *run, const H3Model *m, uint32_t layer, const DitTimesteps *t);

/* adaln-table.c: whether the table is of this model and has the timesteps of the step. -EINVAL (Internal).
 */
int dit_table_check(const H3ModTable *table, const H3Model *m, const H3StepInput *in, Fault *f);
/* Sets run->mod to the rows of run->table, which was checked. */
int dit_table_load(const DitRun *run, uint32_t layer, const DitTimesteps *t);

/* Hands rows x columns of device memory to the test's tap, if there is one. layer < 0: no "block.N." before
 * the name. */
int dit_tap(const DitRun *run, int layer, const char *name, const void *x, LkType type, uint64_t rows,
        uint64_t columns);
/* The same for host values of f32. */
void dit_tap_host(const DitRun *run, const char *name, const float *values, uint64_t rows, uint64_t columns);
