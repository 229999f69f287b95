/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The modulation rows of a whole schedule (h3.md 1.6), computed once. They depend on the timesteps alone,
 * but the weights that make them are two fifths of an unpruned checkpoint (26 GB in bf16) and would be read
 * again in every step. With the table a step reads none of them and has the same bits: a row does not depend
 * on what else is in the call (kernels/ops.h).
 *
 * Host memory, so that all ranks of a process share one table and a device keeps its own memory for blocks;
 * a block takes its rows up when it runs, 194 KB for each timestep of the step.
 *
 * Worth it for more than one step. The caller asks for the bytes first and goes without if they are too
 * many: n distinct timesteps take n * (layers * 18 + 2) * hidden numbers of the activation type (with a
 * curve the last 2 * hidden are f32). 20 steps of the released model make 2 timesteps each, one of them the
 * same if both start at sigma = 1, so 39 * 902 * 5376 * 2 = 378 MB in bf16; conditions add two rows, masks
 * of many levels as many per step. */

#include <stdbool.h>
#include <stdint.h>

#include "service/h3/dit.h"

typedef struct H3ModSchedule {
        const H3Layout *layout;                   /* conditions and masks have timesteps of their own */
        const float *sigmas_video, *sigmas_audio; /* [steps]: what each h3_step() will be told */
        uint32_t steps;                           /* >= 1 */
} H3ModSchedule;

/* Bytes of host memory that the table takes. -EINVAL (InvalidArgument), -EOVERFLOW or -ENOMEM (DoesNotFit).
 */
int h3_mod_table_bytes(
        const H3Model *m, const H3ModSchedule *s, H3Compute compute, uint64_t *ret_bytes, Fault *f);

/* Computes it on one rank's device (rank->plan and rank->exchange are not looked at). The layout and the
 * sigmas may go afterwards; the model must be the one that the steps run, with its LoRAs. hooks->on_block
 * is called as in a step, the rest is not looked at; hooks may be NULL. -EINVAL (InvalidArgument),
 * -ECANCELED, -EOVERFLOW or -ENOMEM (DoesNotFit), or a device error. */
int h3_mod_table_new(const H3Rank *rank, const H3Model *m, const H3ModSchedule *s, H3Compute compute,
        const H3StepHooks *hooks, H3ModTable **ret, Fault *f);
H3ModTable *h3_mod_table_free(H3ModTable *t); /* accepts NULL, returns NULL */

/* Whether it has the rows of all timesteps of the step, in its arithmetic: then a step on the model that it
 * was made for may take it. Of `in` only compute, layout and the sigmas are looked at. */
bool h3_mod_table_covers(const H3ModTable *t, const H3StepInput *in);
