/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* A handle on a model object of one run of the service. */

#include "client/liblatent/source.h"

struct latent_model {
        latent_client *client; /* reference */
        Object object;
        ModelSource *source; /* reference; NULL: not known */
};

/* source may be NULL. */
int model_new(latent_client *c, const char *owner, const char *path, ModelSource *source, latent_model **ret,
        latent_error *e);
