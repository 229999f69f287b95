/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Jobs as latentctl runs them: connect, load, wait with progress, stop at Ctrl-C. */

#include "client/latentctl/ctl.h"

int run_connect(const Ctl *c, latent_client **ret, latent_error *e);

/* From now on Ctrl-C and SIGTERM ask the running job to stop. */
void run_catch_signals(void);

/* What a call gave, unless a signal cut it short: then -EINTR with CTL_ERROR_INTERRUPTED. */
int run_outcome(int r, latent_error *e);
bool run_interrupted(void);

/* Waits for the job's end. After a signal the job is cancelled and its end waited for; a second one does not
 * wait. -EINTR with CTL_ERROR_INTERRUPTED. */
int run_wait(const Ctl *c, latent_job *job, const char *label, latent_error *e);
/* Likewise, and news go to this function, too. */
int run_wait_and(const Ctl *c, latent_job *job, const char *label, latent_progress_fn also, void *userdata, latent_error *e);

/* The model that an argument means: a path that exists here, else a model in use by its name, number or
 * path, else a name below the service's ModelPath=. Loads it and waits. ret_load may be NULL; else set to
 * the finished load (NULL if there was none). */
int run_open_model(const Ctl *c, latent_client *client, const char *name, const latent_load_options *options,
        latent_model **ret, latent_job **ret_load, latent_error *e);
