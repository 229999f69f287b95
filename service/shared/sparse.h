/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* What is asked of sparse attention, as text and as numbers. The text is METHOD[:key=value,...]; the broker reads it and
 * the worker gets the numbers (wire.h). */

#include <stdbool.h>
#include <stdint.h>

#include "service/shared/fault.h"

typedef enum SparseMethod {
        SPARSE_NONE, /* dense attention */
        SPARSE_SOL,  /* sol-attn: blocks of keys whose score is above a threshold, the others by their means */
        SPARSE_SLA,  /* the best share of the blocks, the others by their means */
        SPARSE_VSA,  /* the best share of cubes of the film, and a coarse branch behind a gate that the model has */
        _SPARSE_METHOD_MAX,
} SparseMethod;

/* What rows before the film are to SPARSE_SOL and SPARSE_SLA. */
typedef enum SparseSinks {
        SPARSE_SINKS_KV_AND_ROWS, /* all queries see them exactly; the target's sound sees everything */
        SPARSE_SINKS_KV,          /* all queries see them exactly */
        SPARSE_SINKS_OFF,
        _SPARSE_SINKS_MAX,
} SparseSinks;

#define SPARSE_LAYERS_MAX 1024u

/* Numbers of a fixed size: it is a part of wire messages. */
typedef struct SparseOptions {
        uint32_t method, sinks; /* of the enums */
        uint32_t tail;          /* what is not seen exactly counts by its means */
        uint32_t by_sigma;      /* start and end are sigmas, not parts of the schedule */
        float tau;              /* SOL, in standard deviations: 0 to 4 */
        float keep;             /* SLA, VSA, percent: 0.5 to 95 */
        float start, end;       /* dense outside: parts of the schedule, 0 <= start <= end <= 1; or sigmas, start >= end */
        float shift;            /* of the schedule, by which parts become sigmas; 0: not said yet */
        uint32_t reserved;
        uint64_t min_tokens;                    /* shorter sequences stay dense */
        uint8_t dense[SPARSE_LAYERS_MAX / 8]; /* bit layer % 8 of byte layer / 8: this block stays dense */
} SparseOptions;

static inline bool sparse_is_dense(const SparseOptions *o, uint32_t layer) {
        return layer >= SPARSE_LAYERS_MAX || (o->dense[layer / 8] >> (layer % 8) & 1);
}

/* "sol-attn", "sla", "vsa". */
const char *sparse_method_to_string(SparseMethod m);

/* Reads a text; what it does not name has the default. "" and "off": SPARSE_NONE. -EINVAL (InvalidArgument): what is wrong,
 * what was expected. */
int sparse_parse(const char *text, SparseOptions *ret, Fault *f);

/* -EOPNOTSUPP (NotSupported): the model has no gates for vsa, or was made for it and has them: it runs nothing else. */
int sparse_refuse_model(bool vsa, Fault *f);

/* Whether numbers that came from elsewhere are such as sparse_parse() gives, shift set. layers: of the model. */
bool sparse_check(const SparseOptions *o, uint32_t layers);

/* The sigmas between which steps are sparse, both included. */
void sparse_sigmas(const SparseOptions *o, float *ret_start, float *ret_end);
