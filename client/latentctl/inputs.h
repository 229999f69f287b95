/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The inputs of a step or trajectory from a file to a session's arena. */

#include "client/latentctl/tensor-file.h"

typedef enum InputKind {
        INPUT_TEXT,
        INPUT_TEXT_TAGS, /* optional */
        INPUT_VIDEO,
        INPUT_AUDIO,
        INPUT_SIGMAS_VIDEO, /* sample only, both or none */
        INPUT_SIGMAS_AUDIO,
        INPUT_MAX,
} InputKind;

typedef struct Inputs {
        const StTensor *source[INPUT_MAX]; /* NULL: not in the file */
        latent_tensor tensor[INPUT_MAX];
} Inputs;

/* Finds the tensors; the service judges types and shapes. What this version cannot do (conditions, other
 * tasks) is NotSupported. */
int inputs_find(const TensorFile *f, bool with_sigmas, Inputs *ret, latent_error *e);

/* Bytes of an input arena that holds them. */
uint64_t inputs_bytes(const Inputs *in);

/* Reads them into the session's arena. */
int inputs_place(const TensorFile *f, Inputs *in, latent_session *s, latent_error *e);

/* NULL if the file has none of this kind. */
const latent_tensor *inputs_get(const Inputs *in, InputKind kind);

/* A noise level: the metadata KEY_f32 (hex bits of the f32) if there, else KEY (decimal). */
int inputs_sigma(const TensorFile *f, const char *key, double *ret, latent_error *e);
