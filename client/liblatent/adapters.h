/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* A session's LoRA adapters, as SetLoras() had them: enough to load and set them again in another run of the service. */

#include "client/liblatent/source.h"

#define ADAPTERS_MAX 16u

typedef struct Adapter {
        ModelSource *source; /* reference; NULL: not known, found rather than loaded */
        double strength;
        char identity[MODEL_IDENTITY_MAX]; /* "": not known */
        latent_model *model; /* of the run of the service in which it was loaded last */
        latent_job *load;    /* when it is being loaded again */
} Adapter;

/* Shared by the session and its jobs: each job goes on with those that it began with. */
typedef struct AdapterSet {
        unsigned n_ref;
        char *compute; /* NULL: the session's */
        uint32_t n;
        Adapter adapters[ADAPTERS_MAX];
} AdapterSet;

/* Of models of this client, and of the run of the service that `owner` names (NULL: any). InvalidArgument, Restarted. */
int adapters_new(const latent_lora *loras, size_t n, const char *compute, const latent_client *c, const char *owner,
        AdapterSet **ret, latent_error *e);

/* NULL is fine for all that follow: no adapters. */
AdapterSet *adapters_ref(AdapterSet *a);
AdapterSet *adapters_unref(AdapterSet *a);

/* The same for a session's jobs. */
bool adapters_same(const AdapterSet *a, const AdapterSet *b);

/* All can be loaded again, and it can be told whether they are the same then. */
bool adapters_known(const AdapterSet *a);

/* 0: all are loaded in this run of the service; 1: not yet, call again when something arrived. FileChanged: one is not what it was. */
int adapters_load(AdapterSet *a, latent_client *c, const char *owner, latent_error *e);

/* Restarted: some are of another run of the service than this. */
int adapters_check(const AdapterSet *a, const char *owner, latent_error *e);

/* The arguments of SetLoras(). */
int adapters_append(sd_bus_message *m, const AdapterSet *a);

DEFINE_CLEANUP(AdapterSet *, adapters_unref)
