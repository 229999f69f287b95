/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* A handle on a model object of one run of the service. */

#include "client/liblatent/source.h"

struct latent_model {
        latent_client *client; /* reference */
        Object object;
        ModelSource *source; /* reference; NULL: not known */
        char identity[MODEL_IDENTITY_MAX]; /* what its files are, as the service says; "": not asked for yet */
};

/* source may be NULL. */
int model_new(latent_client *c, const char *owner, const char *path, ModelSource *source, latent_model **ret,
        latent_error *e);

/* Sets m->identity if it is not known yet. The model is loaded. */
int model_ask_identity(latent_model *m, latent_error *e);
/* FileChanged if it is not made of the same files as the one of that identity; what: "model", "adapter". */
int model_check_identity(latent_model *m, const char *identity, const char *what, latent_error *e);
