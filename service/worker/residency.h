/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Which models' weights are on the ranks' devices and how much memory they get there, beside what a step takes.
 * One model's steps run at a time; the others' weights are kept until the memory is wanted, the oldest go first: the
 * parts of a film on a large device stay from one to the next, on a small one they take turns. All go when they are
 * closed, or no step came for a while. With weights that are read where they are (LkOps.host_weights) nothing here does anything.
 *
 * On the steps' thread unless stated. A new one is all zeros. */

#include <stdatomic.h>
#include <stdbool.h>

#include "service/h3/weights.h"
#include "service/shared/wire.h"
#include "service/worker/backend.h"
#include "service/worker/exchange.h"
#include "service/worker/job-context.h"
#include "service/worker/model-weights.h"
#include "service/worker/rank.h"
#include "service/worker/staging.h"

/* What CUDA takes of a device for itself: context, modules, the products' scratch. */
#define RESIDENCY_OVERHEAD (UINT64_C(1) << 30)

typedef struct ResidencyLimits {
        uint64_t reserve;   /* bytes of each device that others shall find free */
        uint64_t limit;     /* bytes of each device that the worker may take, its overhead included; 0: all */
        uint64_t idle_usec; /* without a step; then device memory is given back. 0: never */
} ResidencyLimits;

typedef struct ResidencyModel {
        ModelEntry *base;    /* counted; NULL: no model */
        MergedModel *merged; /* counted; NULL: the base itself */
        const H3Model *h3;   /* of them; NULL: no denoiser */
        const H3WeightsKind *kind; /* of the weights: a VAE has two */
        const void *model;
        uint64_t serial;
        bool expand; /* DeviceWeightsConfig */
        ModelWeights *weights[RANKS_MAX]; /* NULL: none */
} ResidencyModel;

/* Beside the one whose turn it is. */
#define RESIDENCY_KEPT (WIRE_DEVICE_MODELS_MAX - 1)

typedef struct ResidencyRank {
        struct Residency *all;
        uint32_t index;
        uint64_t least;        /* bytes of a ring for all of them */
} ResidencyRank;

typedef struct Residency {
        ResidencyLimits limits;
        const LkOps *ops;
        ResidencyModel now;  /* whose turn it is */
        ResidencyModel kept[RESIDENCY_KEPT]; /* the newest first */
        uint32_t n_kept;
        ResidencyRank ranks[RANKS_MAX];
        uint8_t device_of[RANKS_MAX]; /* rank: its device; set when the worker starts */
        Staging staging; /* its nodes likewise. Between the devices; it goes when memory of the devices does */

        bool planned;         /* memory is taken for the following */
        uint64_t plan_ranks;  /* bits */
        uint64_t plan_bytes;  /* of all ranks with the fewest rows at a time: what uses differ by */
        uint64_t all_bytes;   /* of the devices, for the weights and beside them */
        uint32_t piece_rows;  /* H3Rank */
        uint64_t regrow_usec; /* after a shrink: when it is planned anew; 0: as planned */
        uint64_t regrow_delay_usec;
        uint64_t used_usec;   /* when a step began or ended last, at first: when the worker began; or an idle time ended */
        bool warned;          /* that memory cannot be registered */

        WireDeviceModel figures[WIRE_DEVICE_MODELS_MAX]; /* residency_figures() */
        _Atomic uint32_t idle; /* times that limits.idle_usec passed without a step; any thread */
} Residency;

typedef struct ResidencyUse {
        const Job *job;         /* whose model */
        bool base;              /* not what its adapters make of it */
        const H3Plan *plan;     /* NULL: `ranks` work, and take */
        ExchangeKind exchange;  /* with plan */
        uint64_t ranks;         /* without plan, a bit each; 0: the job's first one */
        uint64_t bytes;         /* of device memory beside the weights, over all ranks */
} ResidencyUse;

/* Has the model (of a coding job: the half that it needs) on the devices as far as there is memory beside what the use
 * takes. 0; -ENOMEM (DoesNotFit, with the numbers); device errors. */
int residency_prepare(Residency *x, const Backend *b, RankGroup *g, const ResidencyUse *use, Fault *f);

/* For `pass`: parts are taken in no order that is known. */
#define RESIDENCY_ANY_ORDER _H3_PASS_MAX

/* On a rank's thread: what `to` needs for a pass of the prepared model. */
int residency_begin(Residency *x, uint32_t rank, H3Pass pass, H3Rank *to);

/* On a rank's thread: what its context only keeps of work that ended goes from the device. Before and after what is done beside
 * steps and was not planned with them. */
void residency_trim(const Residency *x, LkContext *context);

/* After -ENOMEM: models that are kept go, else the model keeps less, or fewer rows are taken at a time. False: that is not possible
 * any more. Whether there is memory again is looked at later, before a step: after half a minute, each time twice as long. */
bool residency_shrink(Residency *x, RankGroup *g);

/* Work of a job that was prepared ended with r. True: others have taken memory since, the model keeps less of it now, do
 * the work again (f is empty). */
bool residency_again(Residency *x, RankGroup *g, const Job *j, int r, Fault *f);

/* Lets go of all models. */
void residency_clear(Residency *x, RankGroup *g);

/* There is nothing to do: lets go of what was closed, or lies idle, and counts idle times. When to ask again
 * (CLOCK_MONOTONIC). */
uint64_t residency_rest(Residency *x, RankGroup *g);

/* After steps: counts anew what the broker is told. */
void residency_note(Residency *x);

/* What was counted last; any thread. */
void residency_figures(const Residency *x, WireDeviceModel ret[static WIRE_DEVICE_MODELS_MAX]);

/* Lets go of everything, from any thread, when the ranks have ended what they did and still have their contexts. */
void residency_done(Residency *x);
