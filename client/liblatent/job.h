/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* A job as far as this client has heard of it. */

#include "client/liblatent/client.h"

struct latent_job {
        latent_client *client;   /* reference */
        latent_session *session; /* reference; NULL for a load */
        Object object;
        latent_progress progress; /* newest news; progress.state is the state */
        bool is_news;             /* the caller of latent_job_wait() has not seen it yet */
        uint64_t heard_usec;      /* when we last heard of it, for lost signals */
        latent_error error;       /* FAILED, CANCELLED */
        latent_value *result;     /* DONE */
        LIST_ENTRY(latent_job) entry;
};

/* Makes the handle from the answer "o" of the call that started the job. session may be NULL. */
int job_new_from_reply(
        latent_client *c, latent_session *session, sd_bus_message *reply, latent_job **ret, latent_error *e);

/* From the filter: a signal of this interface with a path. */
void job_on_signal(latent_client *c, sd_bus_message *m);

/* All unfinished jobs of this run of the service end with Restarted. owner NULL: all. */
void job_on_service_gone(latent_client *c, const char *owner);
