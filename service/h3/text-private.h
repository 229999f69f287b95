/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* What the conditioner's files share; nobody else includes it. */

#include "service/h3/model-private.h"
#include "service/h3/text.h"
#include "service/h3/weights.h"

/* text-config.c. What config.json says that shapes do not; 0 or empty: it does not say. */
typedef struct TextSaid {
        uint32_t run_layers;
        uint32_t heads; /* of the vision tower */
        uint32_t n_deepstack, deepstack[H3_DEEPSTACK_MAX];
        uint32_t sections[3];
        uint32_t positions; /* that the model was made for */
        double eps, theta, vision_theta;
} TextSaid;

int text_config_read(const char *json, uint64_t size, TextSaid *ret, Fault *f);
/* Compares the rest with the configuration that was read from the shapes. */
int text_config_check(const char *json, uint64_t size, const H3TextConfig *c, Fault *f);

/* text-bind.c: fills config and every view of m, or says everything that is missing, left over or mis-shaped
 * at once. published: names of the published folder; else of a single file. */
int text_bind(H3TensorSet *s, bool published, const TextSaid *said, H3TextModel *m, Fault *f);

/* Rows of an MLP at a time: its inner rows are the widest thing there is. */
#define TEXT_PIECE_ROWS 1024

/* One rank's run. Rows are elements of `type` unless stated; "own" columns are those of the rank's part.
 * Every rank has all rows. All arrays are device memory, parts of one arena; those of the tower and those of
 * the layers share their place. */
typedef struct TextRun {
        const H3Rank *rank;
        const LkOps *ops;
        LkContext *context;
        uint32_t self, ranks;
        const H3TextModel *m;
        LkType type;
        uint64_t element; /* bytes of `type` */
        H3TextSize size;
        uint32_t sequence[H3_TEXT_RANKS_MAX]; /* messages so far, by sender */
        uint32_t done, total;                 /* blocks, for on_block */
        const H3StepHooks *hooks;             /* may be NULL */

        uint8_t *x;                           /* [tokens, hidden]: the residual stream */
        uint8_t *deepstack[H3_DEEPSTACK_MAX]; /* [all merged tokens, hidden] */
        float *io;                            /* [TEXT_PIECE_ROWS, hidden], f32: token rows */
        uint8_t *table, *table_scale, *table_blocks; /* TEXT_PIECE_ROWS rows of the token table, as the file has them; in the
                                                        place of the arrays below */

        uint8_t *h, *y;           /* [tokens, hidden] */
        uint8_t *q, *k, *v;       /* [tokens, own] */
        uint8_t *o;               /* [tokens, heads * head_dim] */
        uint8_t *gate, *up, *act; /* [piece, own], [piece, own], [piece, ffn] */
        float *cos, *sin;         /* [tokens, head_dim / 2] */

        /* of the tower, for one vision input */
        float *patches;        /* [patches, patch], f32; then [patches, vision hidden]: positions */
        uint8_t *vx, *vh, *vy; /* [patches, vision hidden], also as [merged tokens, merged] */
        uint8_t *vq, *vk, *vv; /* [patches, own] */
        uint8_t *vo;           /* [patches, vision hidden], also as [merged tokens, merged] */
        uint8_t *vact;         /* [piece, vision ffn] */
        float *vcos, *vsin;    /* [patches, head_dim / 2] */
} TextRun;

/* Part of n units that a rank has. */
static inline H3Range text_part(uint64_t n, uint32_t ranks, uint32_t rank) {
        return (H3Range){n * rank / ranks, n * (rank + 1) / ranks};
}

static inline H3Range text_own(const TextRun *run, uint64_t n) {
        return text_part(n, run->ranks, run->self);
}

/* text-size.c */

/* A run without rank and memory yet. */
TextRun text_run_make(const H3TextModel *m, const H3TextSize *size, uint32_t rank);
/* Sets the arrays from base (NULL: none) on; returns their bytes. */
uint64_t text_carve(TextRun *run, uint8_t *base);

/* text-embed.c */

/* Rows begin .. end of x from the token table. */
int text_embed(const TextRun *run, const H3TextInput *in, uint64_t begin, uint64_t end);

/* Bytes of the block scales of n rows of the table, whole tiles; 0: it has none. */
uint64_t text_table_blocks(const LkMatrix *table, uint64_t n);

/* text-product.c */

/* Rows of activations: where they start, and how many numbers from one to the next. */
typedef struct TextRows {
        void *data;
        LkType type;
        uint64_t ld;
} TextRows;

static inline TextRows text_rows(const TextRun *run, void *data, uint64_t ld) {
        return (TextRows){data, run->type, ld};
}

/* Row `row` of such rows. */
static inline TextRows text_at(TextRows x, uint64_t row) {
        x.data = (uint8_t *) x.data + row * x.ld * lk_type_size(x.type);
        return x;
}

static inline TextRows text_column(TextRows x, uint64_t column) {
        x.data = (uint8_t *) x.data + column * lk_type_size(x.type);
        return x;
}

/* y[n, rows] = x . (those rows of w)^T + their bias; bias may be NULL, rows empty. */
int text_product(const TextRun *run, uint64_t n, TextRows x, const LkMatrix *w, const LkVector *bias,
        H3Range rows, TextRows y);

/* y[n, units * width]: each rank has made the columns of its part of the units; after it all have all. */
int text_gather(TextRun *run, uint64_t n, TextRows y, uint64_t units, uint64_t width);

/* y[n, w.rows] = function(x . w^T + bias), split by rows of w and gathered. function 0: none. */
int text_linear(TextRun *run, uint64_t n, TextRows x, const LkMatrix *w, const LkVector *bias,
        LkFunction function, TextRows y);

/* Attention with own heads, on a processor in pieces of query rows: it grows with the square of the tokens, and between
 * two pieces somebody is asked whether to go on. */
int text_attention(const TextRun *run, const LkAttention *args);

/* x[n, columns] += y. */
int text_add(const TextRun *run, uint64_t n, uint64_t columns, TextRows x, TextRows y);

/* The model with the part's weights where operations may read them, until it is given. */
static inline int text_take(const TextRun *run, H3PartKind kind, uint32_t layer, const H3TextModel **ret) {
        const void *taken;
        int r;

        r = h3_part_take(run->rank->weights, run->m, kind, layer, &taken);
        if (r >= 0)
                *ret = taken;
        return r;
}

static inline void text_give(const TextRun *run, H3PartKind kind, uint32_t layer) {
        h3_part_give(run->rank->weights, kind, layer);
}

/* Asks whether to go on; the second counts a block before that. */
int text_ask(const TextRun *run);
int text_block_done(TextRun *run);

/* Hands rows x columns to the test's tap, if there is one. */
int text_tap(const TextRun *run, const char *name, uint32_t number, const void *x, uint64_t rows,
        uint64_t columns);

/* vision.c: the tower over vision input `i`, whose merged tokens begin at row `merged` of all: their rows of
 * x, and of deepstack[]. */
int vision_run(TextRun *run, const H3VisionInput *in, uint32_t i, uint64_t merged);
