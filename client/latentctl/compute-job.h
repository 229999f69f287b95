/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* What step and sample have in common: the model, a session with the inputs, the job, the output file. */

#include "client/latentctl/inputs.h"
#include "client/latentctl/output.h"

/* Options of the command line. */
typedef struct ComputeOptions {
        const char *model, *input, *output; /* output: -o */
        const char *compute, *qkv_order;
        const char *lora, *sparse; /* of a later version */
        uint64_t restart_sec;      /* how long to wait for a service that went away; 0: not */
        bool has_restart;          /* else RESTART_SEC */
} ComputeOptions;

typedef struct ComputeJob {
        const Ctl *ctl;
        const ComputeOptions *options;
        TensorFile file;
        Output output;
        Inputs inputs;
        latent_client *client;
        latent_model *model;
        latent_session *session;
        latent_job *job;
        uint64_t bytes_read; /* of model files */
} ComputeJob;

/* Opens both files and finds the inputs: everything that needs no service. */
int compute_open_files(ComputeJob *j, bool with_sigmas, latent_error *e);

#define RESTART_SEC 60u
#define RESTART_SEC_MAX 86400u

/* Puts the request into the open session j->session: sets j->job. */
typedef int (*ComputeStart)(ComputeJob *j, const void *options, latent_error *e);

/* Connects, opens the model and a session with room for these results, writes the inputs there and starts the job. All of it
 * again when the service goes away meanwhile and comes back. */
int compute_start(ComputeJob *j, uint32_t steps, bool keep_steps, ComputeStart start, const void *options,
        latent_error *e);

/* Waits for j->job and writes the output file. */
int compute_finish(ComputeJob *j, const char *label, latent_error *e);

/* Says what was done. */
void compute_report(const ComputeJob *j);

void compute_done(ComputeJob *j);
