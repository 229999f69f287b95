/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* A model's parts, and where a rank finds them. On a device that cannot read host memory (LkOps.host_weights)
 * the weights come and go while a step runs: what a step is about to use it takes, what it has used it gives
 * back. The service/h3 code says which part it needs next and knows nothing of memory; the holder
 * (service/worker/device-weights.h) knows nothing of models. */

#include <stdint.h>

#include "kernels/ops.h"
#include "service/h3/model.h"

typedef enum H3PartKind {
        H3_PART_TEXT,   /* text_in, refiner, refiner_norm: once for each prompt */
        H3_PART_TIME,   /* time_1, time_2: where the schedule has no table of modulation rows */
        H3_PART_ADALN,  /* adaln of block `layer`; layer == layers: final_adaln. Likewise */
        H3_PART_ENDS,   /* video_in, audio_in, final_norm, video_out, audio_out: in every step */
        H3_PART_FEED,   /* norm1, q, k, v and their norms of block `layer` */
        H3_PART_FINISH, /* out, norm2 and the MLP of block `layer` */
        _H3_PART_KIND_MAX,
} H3PartKind;

typedef struct H3Part {
        H3PartKind kind;
        uint32_t layer; /* 0 where the kind has none */
} H3Part;

/* What takes parts, and in which order. A FEED is taken before the FINISH of the layer before is given; else a
 * part is given before the next one is taken, so that at most two are held at a time. */
typedef enum H3Pass {
        H3_PASS_TEXT,       /* h3_refine_text() */
        H3_PASS_TABLE,      /* h3_mod_table_new() */
        H3_PASS_STEP,       /* h3_step() without a table of modulation rows */
        H3_PASS_STEP_TABLE, /* with one */
        _H3_PASS_MAX,
} H3Pass;

/* Fills ret (NULL: only counted) with the parts of a pass in the order that they are taken in, some of them
 * more than once; returns how many. */
uint32_t h3_pass_parts(const H3Model *m, H3Pass pass, H3Part *ret);

/* One of both is NULL. */
typedef int (*H3SlotFunc)(void *userdata, LkMatrix *matrix, LkVector *vector);

/* Calls f with every slot of the part that has data, always in the same order; ends with the first error,
 * which it returns. -EINVAL: no such part. The curve (h3.md 1.12) belongs to no part: it is host memory. */
int h3_model_visit(H3Model *m, H3Part part, H3SlotFunc f, void *userdata);

/* Views of the same matrices in tables of its own, for a holder to fill; freed by h3_model_free(). NULL: no
 * memory. */
H3Model *h3_model_copy(const H3Model *base);

/* Events of a context (LkOps.mark) that the code of service/h3 marks itself; a holder has the others. */
#define H3_EVENTS 2u

typedef struct H3Weights H3Weights;

/* Of one rank; called on its thread. */
struct H3Weights {
        /* *ret: the model with this part's slots in memory that work started later on the context may use,
         * until the part is given. Waits for memory of parts that were given, not for the copy. 0, -ENOMEM or
         * a device error. */
        int (*take)(H3Weights *w, H3Part part, const H3Model **ret);
        /* Work started later does not use it. */
        void (*give)(H3Weights *w, H3Part part);
};
