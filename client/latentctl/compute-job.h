/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* What step and sample have in common: the model, a session with the inputs, the job, the output file. */

#include "client/latentctl/inputs.h"
#include "client/latentctl/lora-options.h"
#include "client/latentctl/output.h"

/* Options of the command line. */
typedef struct ComputeOptions {
        const char *model, *input, *output; /* output: -o */
        const char *compute, *qkv_order;
        const char *sparse;
        const char *noise;  /* sample only */
        const char *condition_noise;
        StringList loras;
        uint64_t seed;
        uint64_t restart_sec; /* how long to wait for a service that went away; 0: not */
        bool has_seed;
        bool has_restart; /* else RESTART_SEC */
} ComputeOptions;

/* Those of both verbs, for the table of a verb. o: its ComputeOptions. */
#define COMPUTE_OPTIONS(o)                                                              \
        {"output", OPTION_STRING, &(o).output, NULL, 'o'},                              \
        {"compute", OPTION_STRING, &(o).compute, NULL, '\0'},                           \
        {"qkv-order", OPTION_STRING, &(o).qkv_order, NULL, '\0'},                       \
        {"lora", OPTION_STRINGS, &(o).loras, NULL, '\0'},                               \
        {"sparse", OPTION_STRING, &(o).sparse, NULL, '\0'},                             \
        {"condition-noise", OPTION_STRING, &(o).condition_noise, NULL, '\0'},           \
        {"seed", OPTION_UINT, &(o).seed, &(o).has_seed, '\0'},                          \
        {"restart-timeout", OPTION_UINT, &(o).restart_sec, &(o).has_restart, '\0', .max = RESTART_SEC_MAX}

typedef struct ComputeJob {
        const Ctl *ctl;
        const ComputeOptions *options;
        TensorFile file;
        Output output;
        Inputs inputs;
        LoraOptions loras;
        latent_client *client;
        latent_model *model;
        latent_session *session;
        latent_job *job;
        uint64_t bytes_read; /* of model files */
} ComputeJob;

/* How a verb of this kind runs from its command line to its exit status. options: its table; o: with COMPUTE_OPTIONS() in the table. */
typedef int (*ComputeRun)(ComputeJob *j, void *userdata, latent_error *e);
int compute_verb(Ctl *c, const Verb *verb, int argc, char *argv[], const Option *options, size_t n_options,
        ComputeOptions *o, ComputeRun run, void *userdata);

/* A text of --sparse (NULL: not given), before there is a service to ask. */
int compute_check_sparse(const char *text, latent_error *e);

/* Opens both files and finds the inputs: everything that needs no service. */
int compute_open_files(ComputeJob *j, bool is_sample, latent_error *e);

/* How large the results are. */
typedef struct ComputeSize {
        const char *sampler; /* NULL: the default, or a step */
        uint32_t steps;
        bool keep_steps;
} ComputeSize;

/* Puts the request into the open session j->session: sets j->job. */
typedef int (*ComputeStart)(ComputeJob *j, const void *userdata, latent_error *e);

/* Connects, opens the model and a session with room for these results, sets the adapters, writes the inputs there and starts the
 * job. All of it again when the service goes away meanwhile and comes back. */
int compute_start(ComputeJob *j, const ComputeSize *size, ComputeStart start, const void *userdata, latent_error *e);

/* Waits for j->job and writes the output file. */
int compute_finish(ComputeJob *j, const char *label, latent_error *e);
