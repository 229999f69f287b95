/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* What lora.c, lora-keys.c and lora-merge.c share; nobody else includes it. */

#include "service/h3/lora.h"
#include "service/h3/model-private.h"
#include "service/h3/weights.h"

typedef enum LoraRole {
        LORA_OTHER, /* of an adapter kind that is not merged here */
        LORA_A,
        LORA_B,
        LORA_ALPHA,
} LoraRole;

typedef enum LoraPart {
        LORA_NONE, /* not a module of this model */
        LORA_QKV,
        LORA_Q,
        LORA_K,
        LORA_V,
        LORA_OUT,
        LORA_FC1,
        LORA_FC2,
        LORA_ADALN,
        LORA_VIDEO_IN,
        LORA_AUDIO_IN,
        LORA_TEXT_IN,
        LORA_TIME_1,
        LORA_TIME_2,
        LORA_FINAL_ADALN,
        LORA_VIDEO_OUT,
        LORA_AUDIO_OUT,
} LoraPart;

/* What a module name means. */
typedef struct LoraTarget {
        LoraPart part;
        bool refiner, diffusers;
        uint32_t layer; /* of parts up to LORA_ADALN */
} LoraTarget;

typedef struct LoraModule {
        char *name; /* owned */
        const H3Tensor *a, *b, *alpha;
        const char *other;  /* the key of a kind that is not merged; NULL: none */
        bool named_adapter; /* ".default" in the key */
        LoraTarget target;
        const struct LoraModule *twin; /* an earlier pair for the same matrix by another name; NULL: none */
} LoraModule;

struct H3Lora {
        H3TensorSet *set;
        LoraModule *modules; /* by name */
        size_t n_modules;
        H3QkvOrder qkv_order;
        double alpha; /* of the metadata; NAN: none */
};

/* lora-keys.c: splits a key; ret_n: bytes of the module's name. */
LoraRole lora_key_split(const char *key, size_t *ret_n, bool *ret_named_adapter);
LoraTarget lora_target_parse(const char *module);

/* Rows of a matrix that a module changes: row r of `slot` is row first + r / block_rows * block_step +
 * r % block_rows of B. */
typedef struct LoraSlot {
        LkMatrix *matrix; /* of the model that was given */
        uint64_t first, block_rows, block_step;
} LoraSlot;

/* lora.c: the matrices that a module changes, at most 3, always in the same order; 0: the model does not have them. */
#define LORA_SLOTS_MAX 3u
size_t lora_slots(H3Model *m, const LoraTarget *t, bool interleaved, LoraSlot *ret);

typedef struct LoraDelta {
        LoraSlot slot;
        size_t index; /* of it among the module's */
        const LoraModule *module;
        float factor;
        size_t order; /* of equal slots */
} LoraDelta;

/* lora-merge.c: merges deltas, all of one slot, into a copy of its matrix that m owns from then on. Of rank the
 * ops, context and weights are looked at. */
int lora_merge(H3Model *m, const LoraDelta *deltas, size_t n, H3Compute compute, const H3Rank *rank, Fault *f);

/* Bytes that lora_merge() leaves with the model, and those it takes for its work besides. -EOVERFLOW. */
int lora_merge_size(
        const LoraDelta *deltas, size_t n, H3Compute compute, uint64_t *ret_kept, uint64_t *ret_work);
