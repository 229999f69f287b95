/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The keyframes and references that the metadata of an input file lists. */

#include "client/latentctl/tensor-file.h"

/* The service takes no more. */
#define CONDITIONS_MAX 30u

/* The metadata `conds`: a JSON list in packed order of {"kind": "keyframe", "frame": N} and {"kind": "image" | "video" | "audio"};
 * absent: none. kind and frame are set, video and audio are NULL. Compared with the metadata `task` if that is there.
 * InvalidFile. */
int conditions_parse(const TensorFile *f, latent_condition ret[static CONDITIONS_MAX], uint32_t *ret_n, latent_error *e);

bool condition_needs_video(const latent_condition *c);
bool condition_needs_audio(const latent_condition *c);
