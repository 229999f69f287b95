/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* What a job made, from its output arena to a file. */

#include "client/latentctl/output.h"

#define RESULTS_META_MAX 8u

/* The metadata that says how it was made. */
typedef struct ResultsMeta {
        char rows[32];
        StMeta entries[RESULTS_META_MAX];
        size_t n;
} ResultsMeta;

/* compute: what was used; NULL: not said. The strings are the job's and the caller's. */
void results_meta(const latent_job *job, const char *compute, ResultsMeta *ret);

/* A tensor of the arena as the file has it. name stays the caller's. */
StTensor results_tensor(const char *name, const latent_tensor *t);

/* All tensors of a job that is done. */
int results_write(Output *o, const latent_job *job, const char *compute, latent_error *e);
