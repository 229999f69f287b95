/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The inputs of a step or trajectory from a file to a session's arena. */

#include "client/latentctl/conditions.h"

typedef enum InputKind {
        INPUT_TEXT,
        INPUT_TEXT_TAGS, /* optional, as all but text, video, audio */
        INPUT_VIDEO,
        INPUT_AUDIO,
        INPUT_MASK_VIDEO,
        INPUT_MASK_AUDIO,
        INPUT_CLEAN_VIDEO, /* from here on: sample only */
        INPUT_CLEAN_AUDIO,
        INPUT_SIGMAS_VIDEO, /* both or none */
        INPUT_SIGMAS_AUDIO,
        INPUT_CONDITIONS, /* video of the first, its audio, video of the second, ... */
        INPUT_MAX = INPUT_CONDITIONS + 2 * CONDITIONS_MAX,
} InputKind;

typedef struct Inputs {
        const StTensor *source[INPUT_MAX]; /* NULL: not in the file */
        latent_tensor tensor[INPUT_MAX];
        latent_condition conditions[CONDITIONS_MAX];
        uint32_t n_conditions;
} Inputs;

/* Finds the tensors; the service judges types and shapes. InvalidFile: what the metadata lists is not what the file has. */
int inputs_find(const TensorFile *f, bool is_sample, Inputs *ret, latent_error *e);

/* Bytes of an input arena that holds them. */
uint64_t inputs_bytes(const Inputs *in);

/* Reads them into the session's arena. */
int inputs_place(const TensorFile *f, Inputs *in, latent_session *s, latent_error *e);

/* NULL if the file has none of this kind. */
const latent_tensor *inputs_get(const Inputs *in, InputKind kind);

/* n_conditions of them, with their tensors; valid as long as `in` stays where it is. NULL if there are none. */
const latent_condition *inputs_conditions(Inputs *in);

/* A noise level: the metadata KEY_f32 (hex bits of the f32) if there, else KEY (decimal). */
int inputs_sigma(const TensorFile *f, const char *key, double *ret, latent_error *e);

/* A shift of the schedule from the metadata KEY. Without it 0, which means the default. */
int inputs_shift(const TensorFile *f, const char *key, double *ret, latent_error *e);
