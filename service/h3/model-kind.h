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

/* Files that cannot be read are a denoiser's, too. */
H3ModelKind h3_model_kind(const H3File *files, size_t n_files);
