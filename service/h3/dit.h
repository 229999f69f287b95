/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The denoiser's forward pass (h3.md 1.3 - 1.9) of one rank. Which operations in which order; the arithmetic
 * is the op table's. Rounding points: gpu-review 6.1, i.e. those stated in kernels/ops.h. */

#include <stdbool.h>
#include <stdint.h>

#include "service/h3/layout.h"
#include "service/h3/model.h"
#include "service/h3/rank.h"

typedef enum H3Compute {
        H3_COMPUTE_F32,  /* activations f32: the reference mode */
        H3_COMPUTE_BF16, /* activations bf16, f32 islands as published */
} H3Compute;

/* condition_proj and the refiner over the text rows (h3.md 1.7): depends on the prompt only, kept between
 * steps. text: [text_rows, text_dim] bf16. ret_refined: host copy [text_rows, hidden] of the activation
 * type, freed by the caller. */
int h3_refine_text(const H3Rank *rank, const H3Model *m, H3Compute compute, const uint16_t *text,
        uint64_t text_rows, void **ret_refined, Fault *f);

/* A condition's host latents, [24, T, H, W] and [32, 2, A], as the model shall see them: already noised
 * (noise.h). NULL where the condition has none. */
typedef struct H3ConditionLatents {
        const float *video, *audio;
} H3ConditionLatents;

typedef struct H3ModTable H3ModTable; /* adaln-table.h */

/* With masks (h3_layout_set_masks()) the latents are what the model shall see, too: what is kept was put in
 * by the caller (h3_sampler_input()). */
typedef struct H3StepInput {
        H3Compute compute;
        const H3Layout *layout;
        const void *refined_text;             /* host, from h3_refine_text() */
        const float *video, *audio;           /* host latents, [24, T, H, W] and [32, 2, A] */
        const H3ConditionLatents *conditions; /* [layout->shape.n_conditions] */
        float sigma_video, sigma_audio;       /* in [0, 1] */
        const float *rope; /* h3_rope_table() of all rows of the layout, all cosines before all sines, rounded as the compute
                              type asks; NULL: made in the step */
        const H3ModTable *mod_table; /* of this model and a schedule that has these sigmas; NULL: the rows
                                        are computed in the step */
} H3StepInput;

/* Where a stage's values go for a test: name as in golden taps ("packed_input", "block.0.q", ...), host f32
 * copy of rows x columns. Called on the rank's thread. */
typedef void (*H3TapFunc)(
        void *userdata, const char *name, const float *values, uint64_t rows, uint64_t columns);

typedef struct H3StepHooks {
        /* After each block: blocks done so far. Returns < 0 to stop the step (e.g. -ECANCELED); every rank
         * is asked, the same answer is the caller's duty. May be NULL. */
        int (*on_block)(void *userdata, uint32_t done, uint32_t total);
        void (*on_first)(void *userdata); /* the first block's work is given out next. May be NULL */
        /* At the end of a sparse step: of how many pairs of blocks, over its sparse layers and the rank's heads, queries saw keys
         * row by row, and of how many in all. Ranks' sums are the same for every plan. May be NULL */
        void (*on_seen)(void *userdata, uint64_t seen, uint64_t all);
        H3TapFunc on_tap; /* NULL: none; costs nothing then */
        void *userdata;
} H3StepHooks;

/* Bytes of device memory that one rank's step needs (its arena) beside the weights, for admission. piece_rows:
 * as in H3Rank. */
int h3_step_memory(const H3Model *m, const H3Layout *l, const H3Plan *plan, uint32_t rank, H3Compute compute,
        uint32_t piece_rows, uint64_t *ret_bytes);

/* One step: velocities in the model's own sign (x0 = x + sigma * v), f32, for the target rows that this rank
 * owns, written into the shared host arrays ret_video [24, T, H, W] and ret_audio [32, 2, A] (ranks write
 * disjoint elements). With masks they are multiplied by the pooled mask, so that x0 = x + sigma * v still
 * holds. On failure their content is undefined. 0, -EINVAL, -ECANCELED, -ENOMEM, or a device error. */
int h3_step(const H3Rank *rank, const H3Model *m, const H3StepInput *in, const H3StepHooks *hooks,
        float *ret_video, float *ret_audio, Fault *f);
