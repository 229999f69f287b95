/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* A job as far as this client has heard of it. */

#include "client/liblatent/recover.h"

struct latent_job {
        latent_client *client;   /* reference */
        latent_session *session; /* reference; NULL for a load */
        Output *output;          /* reference: where its results are; NULL for a load */
        ModelSource *source;     /* reference; of a load */
        Object object;
        latent_progress progress; /* newest news; progress.state is the state */
        bool is_news;             /* the caller of latent_job_wait() has not seen it yet */
        uint64_t heard_usec;      /* when we last heard of it, for lost signals */
        latent_error error;       /* FAILED, CANCELLED */
        latent_value *result;     /* DONE */
        latent_value *places;     /* of a decode that runs: its result so far; NULL: not known */
        uint64_t frames;          /* of a decode: final so far */
        latent_value *preview;    /* the result as it was when there was a preview */

        /* recover.c */
        Request *request; /* NULL: a load */
        Before before;
        Resume resume;
        Output *states; /* reference: where those of `resume` are; NULL: none, or the job is done */
        bool lost;          /* its service is gone, it waits for another */
        bool cancel_asked;  /* then it does not */
        uint64_t lost_usec; /* since when */
        unsigned n_taken_up; /* since its last finished step */
        LIST_ENTRY(latent_job) entry;
};

/* Makes the handle from the answer "o" of the call that started the job. session may be NULL. */
int job_new_from_reply(
        latent_client *c, latent_session *session, sd_bus_message *reply, latent_job **ret, latent_error *e);

/* How it stands, asking the service if it was silent for long: 0: done; 1: not finished; negative: failed, or the connection. */
int job_look(latent_job *j, latent_error *e);
/* The ends of one that was lost. */
void job_taken_up(latent_job *j);
void job_fail(latent_job *j, const latent_error *e);
void job_fail_restarted(latent_job *j);

/* From the filter: a signal of this interface with a path. */
void job_on_signal(latent_client *c, sd_bus_message *m);

/* All unfinished jobs of this run of the service are lost, or end with Restarted. owner NULL: all. */
void job_on_service_gone(latent_client *c, const char *owner);
