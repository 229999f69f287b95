/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* A session's arenas in this process. */

#include "client/liblatent/adapters.h"
#include "client/liblatent/arena.h"

/* An output arena, read-only. After a restart of the service a session has another one; jobs that are done keep theirs. */
typedef struct Output {
        unsigned n_ref;
        const void *map;
        uint64_t size;
} Output;

/* Of a pipeline beside the session's model: conditioner, video VAE, audio VAE. */
#define SESSION_PARTS 3u
typedef struct SessionPart {
        bool given;
        ModelSource *source; /* reference; NULL: not known */
        char identity[MODEL_IDENTITY_MAX];
        latent_model *model; /* while the session is being opened again, in the service as it is now */
} SessionPart;

struct latent_session {
        unsigned n_ref;        /* the user's handle and its jobs */
        latent_client *client; /* reference */
        Object object;
        bool closed;
        void *input; /* mapping; stays where it is */
        uint64_t input_bytes, output_bytes;
        Output *output; /* reference */
        Arena arena;    /* of the input */

        /* for opening it again */
        ModelSource *source; /* reference; NULL: not known */
        char identity[MODEL_IDENTITY_MAX]; /* of the model; "": not known */
        SessionPart parts[SESSION_PARTS];
        latent_session_options options;
        char *compute, *job_class, *plan, *exchange, *sparse;
        uint32_t *shares;
        char **gpus; /* [options.n_gpus] */
        latent_job *load; /* of the model, when it is being opened again */
        Arena spare;      /* behind the input: states of trajectories that go on */

        AdapterSet *adapters; /* reference: of jobs from now on; NULL: none were ever set */
        AdapterSet *in_force; /* reference: what the service was told last */
};

latent_session *session_ref(latent_session *s);
latent_session *session_unref(latent_session *s);

Output *output_ref(Output *o);
Output *output_unref(Output *o);
/* NULL if the range does not lie in it. */
const void *output_at(const Output *o, uint64_t offset, uint64_t size);

struct Request;

/* Sends the request, which is taken over on success. */
int session_start(latent_session *s, struct Request **q, latent_job **ret, latent_error *e);
int session_plan(latent_session *s, const struct Request *q, latent_value **ret, latent_error *e);

/* SetLoras(): tells the service. a may be NULL: none. ret_reply may be NULL. */
int session_send_adapters(latent_session *s, AdapterSet *a, sd_bus_message **ret_reply, latent_error *e);

/* Opens it again with the same model, inputs and sizes, and `spare` bytes more of input; *ret_spare: where they are, until
 * session_spare_done(). */
int session_reopen(
        latent_session *s, const latent_model *model, uint64_t spare, void **ret_spare, latent_error *e);
void session_spare_done(latent_session *s, void *spare);
