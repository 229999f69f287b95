/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* What tokenize, encode, decode and encode-media have in common: which part of a pipeline, a session that is large enough, the job. */

#include "client/latentctl/arguments.h"
#include "client/latentctl/output.h"
#include "client/latentctl/same-file.h"
#include "client/latentctl/tensor-file.h"

typedef struct CodingOptions {
        const char *model, *output, *compute;
        const char *tokenizer;
        bool defer; /* LATENT_LOAD_DEFER */
        uint64_t restart_sec; /* how long to wait for a service that went away; 0: not */
        bool has_restart;     /* else RESTART_SEC */
} CodingOptions;

/* For the table of a verb. o: its CodingOptions. */
#define CODING_OPTIONS(o)                                            \
        {"output", OPTION_STRING, &(o).output, NULL, 'o'},           \
        {"restart-timeout", OPTION_UINT, &(o).restart_sec, &(o).has_restart, '\0', .max = RESTART_SEC_MAX}

typedef struct CodingJob {
        const Ctl *ctl;
        const CodingOptions *options;
        latent_client *client;
        latent_model *model;
        latent_session *session;
        latent_job *job;
} CodingJob;

/* One job. The functions get `userdata`. */
typedef struct CodingWork {
        const char *part;      /* folder of a pipeline that has the model for it */
        uint64_t input_bytes;  /* of the arena, with what alignment takes */
        uint64_t output_bytes; /* 0: plan() is asked */
        int (*place)(void *userdata, latent_session *s, latent_error *e); /* writes the inputs */
        int (*plan)(void *userdata, latent_session *s, latent_value **ret, latent_error *e);
        int (*start)(void *userdata, latent_session *s, latent_job **ret, latent_error *e);
        void *userdata;
} CodingWork;

/* -o is there. */
int coding_check_options(const CodingOptions *o, latent_error *e);

/* Opens -o. inputs: whatever else the verb reads, up to CODING_INPUTS_MAX; CTL_ERROR_USAGE if -o is one of them or a file of the model. */
#define CODING_INPUTS_MAX (STRINGS_MAX + 2)
int coding_open_output(const CodingOptions *o, const NamedFile *inputs, size_t n, Output *ret, latent_error *e);

/* The model that an argument means for this part: of a pipeline its folder, else the model itself. NotFound as usual. */
int coding_open_model(CodingJob *j, const char *part, latent_error *e);

/* What a VAE's verb can do with the model: of a pipeline both streams, of a single VAE its own. */
typedef enum CodingKind {
        CODING_BOTH,
        CODING_VIDEO,
        CODING_AUDIO,
} CodingKind;

/* Loads a single model to see what it is. InvalidArgument: it is no VAE. */
int coding_single_kind(CodingJob *j, CodingKind *ret, latent_error *e);
/* The error of a file that has only the other stream. */
int coding_nothing_for(const CodingJob *j, CodingKind kind, const char *input, latent_error *e);

/* Connects, opens the model and a session with enough room, writes the inputs there and starts the job: j->job. All of it again
 * when the service goes away meanwhile and comes back. */
int coding_start(CodingJob *j, const CodingWork *w, latent_error *e);

/* The same for other work: attempt() until it succeeds or fails for another reason than that the service is not there, for as long as
 * --restart-timeout says; before that each time forget(), for what belongs to the service that went away. From here on signals are
 * caught. */
typedef int (*CodingAttempt)(CodingJob *j, void *userdata, latent_error *e);
int coding_retry(CodingJob *j, CodingAttempt attempt, void (*forget)(void *userdata), void *userdata, latent_error *e);

/* Ends the job, its session and its model; the connection stays. */
void coding_next(CodingJob *j);
void coding_done(CodingJob *j);

/* Says what was done. */
void coding_report(const CodingJob *j, const latent_job *job);

/* A tensor of a file for an arena: type and shape, with its size. -EINVAL with e: more dimensions than the service takes. */
int coding_tensor(const TensorFile *f, const StTensor *t, latent_tensor *ret, latent_error *e);
/* Takes a place in the arena and reads it there. */
int coding_place(const TensorFile *f, const StTensor *t, latent_tensor *tensor, latent_session *s, latent_error *e);

/* TEXT, or of "-" what standard input has: *ret is malloc'ed. */
int coding_text(const char *text, char **ret, size_t *ret_size, latent_error *e);
int coding_place_text(const char *text, size_t size, latent_tensor *tensor, latent_session *s, latent_error *e);
