/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Where a model comes from, so that it can be loaded again by the same means: a name of the service, or files that stay open,
 * so that it is the same files even if their path leads elsewhere by then. */

#include "client/liblatent/checkpoint.h"
#include "client/liblatent/client.h"

/* Of Model.Identity with its NUL. Longer ones count as unknown. */
#define MODEL_IDENTITY_MAX 72u

typedef struct ModelSource {
        unsigned n_ref;
        char *name;                         /* of the service; of files: for people */
        char *qkv_order, *partition, *numa; /* NULL: default */
        char *tokenizer;                    /* of a name; NULL: default */
        bool defer;
        Checkpoint checkpoint;              /* without files: a name */
} ModelSource;

/* checkpoint: NULL, else it is taken over on success. */
int source_new(const char *name, const latent_load_options *o, Checkpoint *checkpoint, ModelSource **ret);
ModelSource *source_ref(ModelSource *s); /* NULL is fine */
ModelSource *source_unref(ModelSource *s);

/* Starts the load. *ret has a reference to the source. */
int source_load(latent_client *c, ModelSource *s, latent_job **ret, latent_error *e);

DEFINE_CLEANUP(ModelSource *, source_unref)
