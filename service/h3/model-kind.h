/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* What a checkpoint is, from the names of its tensors: folders and files are named by whoever has them. */

#include "service/h3/model.h"

typedef enum H3ModelKind {
        H3_KIND_DENOISER, /* also what is none of the others: its opener says what is missing */
        H3_KIND_LORA,
        H3_KIND_CONDITIONER,
        H3_KIND_VIDEO_VAE,
        H3_KIND_AUDIO_VAE,
} H3ModelKind;

typedef struct H3ModelSummary {
        H3ModelKind kind;
        uint32_t n_tensors;
        uint64_t tensor_bytes;
        char types[64];        /* "BF16, F32" */
        uint32_t matrix_types; /* bit per LkType of tensors with several dimensions */
} H3ModelSummary;

/* Files that cannot be read are a denoiser's, with nothing in them. */
void h3_model_summary(const H3File *files, size_t n_files, H3ModelSummary *ret);
