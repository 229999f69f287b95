/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Jobs of a service that went away, taken up by the one that comes back: a step is sent again as it was, a trajectory goes on
 * from the last state that its output arena, which stays mapped here, says is complete. */

#include "client/liblatent/request.h"
#include "client/liblatent/session.h"

/* What has to be known of a job before it is sent. */
typedef struct Before {
        uint64_t word;      /* where its commit word will be: what an earlier job left there */
        char numerics[128]; /* of the worker that will compute; "": not known */
} Before;

int recover_before(latent_session *s, const Request *q, Before *ret, latent_error *e);

/* The adapters of the request are the session's from now on, if they were not. */
int recover_adapters(latent_session *s, const Request *q, latent_error *e);

/* Step(), Sample() or SetLoras(). resume may be NULL. */
int recover_send(latent_session *s, const Request *q, const Resume *resume, sd_bus_message **ret_reply, latent_error *e);

/* Its service is gone. False: it cannot be taken up. */
bool recover_begin(latent_job *j);
/* Whatever can be done for it now without waiting for long. The end: it is not lost any more, or has failed. */
void recover_go_on(latent_job *j);

