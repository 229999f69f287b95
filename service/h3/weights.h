/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* A model's parts, and where a rank finds them. On a device that cannot read host memory (LkOps.host_weights)
 * the weights come and go while a step runs: what a step is about to use it takes, what it has used it gives
 * back. The service/h3 code says which part it needs next and knows nothing of memory; the holder
 * (service/worker/device-weights.h) knows nothing of models. */

#include <stdint.h>

#include "kernels/ops.h"
#include "service/h3/model.h"
#include "service/h3/rank.h"

typedef enum H3PartKind {
        H3_PART_TEXT,   /* text_in, refiner, refiner_norm: once for each prompt */
        H3_PART_TIME,   /* time_1, time_2: where the schedule has no table of modulation rows */
        H3_PART_ADALN,  /* adaln of block `layer`; layer == layers: final_adaln. Likewise */
        H3_PART_ENDS,   /* video_in, audio_in, final_norm, video_out, audio_out: in every step */
        H3_PART_FEED,   /* norm1, q, k, v and their norms of block `layer` */
        H3_PART_FINISH, /* out, norm2 and the MLP of block `layer` */

        /* Of a conditioner: the tower and the layers. Of a VAE, by half: video's decoder and encoder, audio's. */
        H3_PART_IN,     /* before TOWER or STAGE 0: the tower's patches; post_quant and embed, conv_in; dec_in and dec_pre, enc_first */
        H3_PART_TOWER,  /* block `layer` of the tower, and the merger of its deepstack */
        H3_PART_OUT,    /* behind them: the tower's merger; decoder_norm and proj, norm_out, conv_out and quant; post and dec_post,
                           enc_alpha and enc_last */
        H3_PART_STAGE,  /* layer `layer` of the conditioner, of the video decoder; level or stage of the others */
        H3_PART_LATENT, /* of audio's encoder: what attends over all latents */
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
        H3_PASS_CODE,       /* h3_text_run(), where the tower may be left out or come again; a tile or job of a VAE */
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

/* What a holder must know of a kind of model. `model` is an H3Model, H3TextModel, H3VideoVae or H3AudioVae. */
typedef struct H3WeightsKind {
        /* Fills ret (NULL: only counted) with all parts, those first that may stay (*ret_staying), in the order that they are used
         * in. */
        uint32_t (*parts)(const void *model, H3Part *ret, uint32_t *ret_staying);
        /* As h3_pass_parts(). */
        uint32_t (*pass)(const void *model, H3Pass pass, H3Part *ret);
        /* As h3_model_visit(), of a copy. */
        int (*visit)(void *model, H3Part part, H3SlotFunc f, void *userdata);
        /* As h3_model_copy(). */
        void *(*copy)(const void *model);
        void (*free)(void *copy);
        bool one_at_a_time; /* a part is given before the next one is taken; else as H3Pass says */
        uint32_t bf16_parts; /* bits, by H3PartKind: taken again and again for one result, and their matrices meet rows of bf16
                                alone where that is what is computed in */
} H3WeightsKind;

extern const H3WeightsKind h3_weights_denoiser; /* weights.c */
extern const H3WeightsKind h3_weights_text;     /* weights-text.c: the token table and the table of positions belong to no part */
extern const H3WeightsKind h3_weights_video_decoder, h3_weights_video_encoder; /* weights-video.c */
extern const H3WeightsKind h3_weights_audio_decoder, h3_weights_audio_encoder; /* weights-audio.c */

/* For the files weights*.c: parts one after the other. */
typedef struct H3PartList {
        H3Part *parts; /* NULL: only counted */
        uint32_t n;
} H3PartList;

/* `n` of the kind, from layer `first` on. */
static inline void h3_part_list_add(H3PartList *l, H3PartKind kind, uint32_t first, uint32_t n) {
        for (uint32_t i = 0; i < n; i++, l->n++)
                if (l->parts)
                        l->parts[l->n] = (H3Part){kind, first + i};
}

/* A half of a VAE: IN, its stages, OUT. */
static inline void h3_part_list_add_half(H3PartList *l, uint32_t stages) {
        h3_part_list_add(l, H3_PART_IN, 0, 1);
        h3_part_list_add(l, H3_PART_STAGE, 0, stages);
        h3_part_list_add(l, H3_PART_OUT, 0, 1);
}

/* For the files weights*.c: calls f for a slot that has data, unless there was an error. */
typedef struct H3Visit {
        H3SlotFunc f;
        void *userdata;
        int result;
} H3Visit;

static inline void h3_visit_matrix(H3Visit *v, LkMatrix *m) {
        if (v->result >= 0 && m->data)
                v->result = v->f(v->userdata, m, NULL);
}

static inline void h3_visit_vector(H3Visit *v, LkVector *x) {
        if (v->result >= 0 && x->data)
                v->result = v->f(v->userdata, NULL, x);
}

static inline void h3_visit_linear(H3Visit *v, LkMatrix *m, LkVector *bias) {
        h3_visit_matrix(v, m);
        h3_visit_vector(v, bias);
}

/* Views of the same matrices in tables of its own, for a holder to fill; freed by h3_model_free(). NULL: no
 * memory. */
H3Model *h3_model_copy(const H3Model *base);

/* Events of a context (LkOps.mark) that the code of service/h3 marks itself; a holder has the others. */
enum {
        H3_EVENT_PACE,                            /* [2] */
        H3_EVENT_QKV = 2,                         /* Q, K and V of a block are there */
        H3_EVENT_ATTENDED,                        /* all that LK_SIDE was given is done */
        H3_EVENT_CHUNK,                           /* [H3_CHUNK_EVENTS]: a chunk of it; several may have one */
        H3_CHUNK_EVENTS = 8,
        H3_EVENTS = H3_EVENT_CHUNK + H3_CHUNK_EVENTS,
};

/* Of one rank; called on its thread. */
struct H3Weights {
        /* *ret: the model (of the holder's kind) with this part's slots in memory that work started later on the context may use,
         * until the part is given. Waits for memory of parts that were given, not for the copy. 0, -ENOMEM or
         * a device error. */
        int (*take)(H3Weights *w, H3Part part, const void **ret);
        /* Work started later does not use it. */
        void (*give)(H3Weights *w, H3Part part);
};

/* The rank's view of a part: of weights (NULL: model itself). *ret is of model's type. */
static inline int h3_part_take(H3Weights *weights, const void *model, H3PartKind kind, uint32_t layer, const void **ret) {
        *ret = model;
        return weights ? weights->take(weights, (H3Part){kind, layer}, ret) : 0;
}

static inline void h3_part_give(H3Weights *weights, H3PartKind kind, uint32_t layer) {
        if (weights)
                weights->give(weights, (H3Part){kind, layer});
}

static inline uint32_t h3_pace_event(uint32_t part) {
        return H3_EVENT_PACE + part % 2;
}

/* Part `i` of a run was given out: the host stays about one ahead of the device, so that a cancel is seen in time. */
static inline int h3_part_pace(const H3Rank *rank, uint32_t i) {
        int r;

        if (!rank->weights)
                return 0;
        r = rank->ops->mark(rank->context, LK_COMPUTE, h3_pace_event(i));
        return r < 0 || i == 0 ? r : rank->ops->join(rank->context, h3_pace_event(i - 1));
}
