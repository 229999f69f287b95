/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The conditioner's forward pass (h3.md 3) of one rank: vision tower, then the language layers; the output
 * is the residual stream after the last layer that runs, without a final norm.
 *
 * Ranks split every matrix by its output rows and gather the results: each rank reads only its rows of the
 * weights and ends with the whole output, the same bits however many ranks there are. Norms, biases, the
 * position table and the rows of the token table that the ids name are read by all. */

#include <stdint.h>

#include "service/h3/dit.h"
#include "service/h3/rank.h"
#include "service/h3/text-model.h"

#define H3_TEXT_RANKS_MAX 64
#define H3_VISION_PATCHES_MAX (UINT64_C(1) << 20) /* of a block */

/* What the tower sees at once: a picture, or two frames of a video. Attention stays inside. */
typedef struct H3VisionInput {
        uint64_t grid_height, grid_width; /* patches, both even */
        uint64_t first_token;             /* where the grid_height / 2 * grid_width / 2 merged tokens go */
        const float *patches; /* host, [grid_height * grid_width, patch], four of a merged token together
                                 (h3.md 3.3) */
} H3VisionInput;

typedef struct H3TextInput {
        H3Compute compute;
        uint64_t n;                  /* tokens, 1 to tokens_max of the model */
        const int32_t *ids;          /* [n]; those under a vision block are not looked at */
        const int32_t *positions;    /* [3, n]: t, h, w, not negative */
        const H3VisionInput *vision; /* by first_token, not overlapping */
        size_t n_vision;
} H3TextInput;

/* -EINVAL (InvalidArgument, InvalidTensor): what of the input does not fit the model. */
int h3_text_check(const H3TextModel *m, const H3TextInput *in, Fault *f);
/* Of that only how many tokens there are: known before there are any inputs. */
int h3_text_check_length(const H3TextModel *m, uint64_t n, Fault *f);

/* The plan that the ranks and their exchange are given: every rank gets what every other sends, in phase IN,
 * chunk 0. rows: room for `ranks` ranges, which the plan points to. */
H3Plan h3_text_plan(uint32_t ranks, H3Range *rows);

/* What sizes depend on, without the input itself. */
typedef struct H3TextSize {
        H3Compute compute;
        uint32_t ranks;
        uint64_t tokens;
        uint64_t patches;     /* of the largest vision block; 0: none */
        uint64_t all_patches; /* of all vision blocks together */
} H3TextSize;

H3TextSize h3_text_size(const H3TextInput *in, uint32_t ranks);

/* Bytes of device memory that a rank's run takes (the same on every rank), for admission. */
uint64_t h3_text_memory(const H3TextModel *m, const H3TextSize *size);

/* Bytes of the largest message of this (phase, from, to, chunk); 0: it is never sent. */
uint64_t h3_text_message_max(const H3TextModel *m, const H3TextSize *size, const H3Message *message);

/* Bytes of matrices that a rank reads: its rows of each. With vision: also the tower's. */
uint64_t h3_text_rank_bytes(const H3TextModel *m, uint32_t ranks, uint32_t rank, bool vision);

/* Runs it. rank->plan: h3_text_plan() of the group. hooks (may be NULL): on_block is called after every
 * block of the tower, once per vision input, and after every layer; total counts them all. Inside of one it is
 * called with the same number again, often enough that a cancel is heard within a fraction of a second. ret_hidden: host,
 * [n, hidden] of the activation type (bf16 or f32); NULL: the rank only helps. On failure the content is
 * undefined, and rank->exchange was told. 0, -EINVAL, -ECANCELED, -ENOMEM, or a device error. */
int h3_text_run(const H3Rank *rank, const H3TextModel *m, const H3TextInput *in, const H3StepHooks *hooks,
        void *ret_hidden, Fault *f);
