/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* LoRA adapters (h3.md 2.4): W + strength * (alpha / rank) * B . A. They are merged into private copies of
 * the matrices that they change; the base stays as it is. Key styles: original names with or without
 * "diffusion_model.", musubi ("lora_unet_blocks_0_..."), DiffSynth (".lora_A.default.weight"), diffusers and
 * PEFT names; alpha per module, or "alpha" in the metadata, or else alpha = rank. Ranks may differ by
 * module. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "service/h3/dit.h"
#include "service/h3/model.h"
#include "service/shared/fault.h"

typedef struct H3Lora H3Lora;

typedef struct H3LoraOptions {
        H3QkvOrder qkv_order; /* of the rows of a fused qkv_proj; AUTO: interleaved in DiffSynth's style,
                                 else stacked */
} H3LoraOptions;

/* Whether names of tensors in these files are those of an adapter; false also for what cannot be read (the
 * opening says why). A model has no such names. */
bool h3_lora_recognises(const H3File *files, size_t n_files);

/* Keeps pointers into the files' memory, which must stay mapped. -EBADMSG (InvalidFile), -EINVAL
 * (InvalidModel: no adapter in it, or far more tensors than one has), -EOPNOTSUPP (NotSupported: a bank of
 * output heads), -ENOMEM.
 *
 * The memory may be changed by a hostile writer at any time, as with a model. Headers are copied before they
 * are parsed, so places, shapes and types are those that were checked, whatever stands there later. Numbers
 * (matrices, alphas) are read when the adapter is merged, some of them more than once: a writer that is at
 * work then gets a merge of whatever was read, which may differ from one merge to the next and is refused
 * where it is not finite, and nothing worse. */
int h3_lora_open(const H3File *files, size_t n_files, const H3LoraOptions *options, H3Lora **ret, Fault *f);
H3Lora *h3_lora_free(H3Lora *l);

typedef struct H3LoraInfo {
        uint32_t n_tensors;
        uint64_t weight_bytes;  /* of them */
        uint64_t private_bytes; /* of its tables */
        char types[64];         /* "BF16, F32" */
} H3LoraInfo;

void h3_lora_describe(const H3Lora *l, H3LoraInfo *ret);

#define H3_LORA_STRENGTH_MAX 1000.0

typedef struct H3LoraUse {
        const H3Lora *lora;
        double strength; /* at most H3_LORA_STRENGTH_MAX either way; 0: as if it were not there */
} H3LoraUse;

typedef struct H3LoraNote {
        uint32_t lora;    /* index into the uses */
        char name[160];   /* module, as the file spells it */
        char reason[160]; /* "" for an applied one */
} H3LoraNote;

typedef struct H3LoraReport {
        H3LoraNote *applied, *refused;
        size_t n_applied, n_refused;
} H3LoraReport;

H3LoraReport *h3_lora_report_free(H3LoraReport *r);

/* Bytes that h3_model_with_loras() would take at its largest: the merged copies, and the room for merging
 * the largest of them. *ret_kept: the copies alone. Errors as that one's, but for numbers that are not
 * finite. */
int h3_lora_memory(const H3Model *base, const H3LoraUse *uses, size_t n_uses, H3Compute compute,
        uint64_t *ret_bytes, uint64_t *ret_kept, Fault *f);

/* A model with the adapters merged, in the order given, and a report of every module. base, and the files
 * behind it, must outlive it; the adapters need not. Arithmetic: B . A by ops->gemm (f32, rank ascending), W
 * + factor * that in f32; then int8 matrices are quantised again to nearest with the rotation they have,
 * others are stored in f32 if compute is f32 or they were f32 or f16, else rounded to bf16 once. Strengths
 * of 0 change no bit. -EINVAL (InvalidArgument: strength; InvalidModel: an adapter of which nothing applies,
 * with the first reason, or a number that is not finite), -ENOMEM (DoesNotFit), or a device error.
 * weights: of the base, as in H3Rank. */
int h3_model_with_loras(const H3Model *base, const H3LoraUse *uses, size_t n_uses, H3Compute compute,
        const LkOps *ops, LkContext *context, H3Weights *weights, H3Model **ret, H3LoraReport **ret_report,
        Fault *f);
