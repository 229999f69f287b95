/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* What the verbs of latentctl share. Inside, functions return negative errno and fill a latent_error, as
 * liblatent does; a verb reports an error once and returns an exit status. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "client/latent.h"
#include "service/shared/cleanup.h"
#include "service/shared/fault.h"

/* Exit statuses, documented in latentctl(1). */
enum {
        STATUS_OK = 0,
        STATUS_FAILED = 1,
        STATUS_USAGE = 2,
        STATUS_UNREACHABLE = 3,
        STATUS_REFUSED = 4,
        STATUS_INTERRUPTED = 130,
};

/* Names of errors that only latentctl makes. */
#define CTL_ERROR_USAGE "Usage"
#define CTL_ERROR_INTERRUPTED "Interrupted"

/* Evaluations of a trajectory. */
#define STEPS_MAX 1000u

/* Of --restart-timeout. */
#define RESTART_SEC 60u
#define RESTART_SEC_MAX 86400u

typedef struct Ctl {
        latent_client_options bus;
        bool json;
        bool help;
} Ctl;

typedef struct Verb {
        const char *name;
        const char *arguments; /* for the usage line */
        const char *summary;   /* one line */
        const char *options;   /* option lines for --help, may be "" */
        int (*run)(Ctl *c, const struct Verb *verb, int argc,
                char *argv[]); /* argv[0] is the verb; returns a status */
} Verb;

DEFINE_CLEANUP(latent_client *, latent_client_free)
DEFINE_CLEANUP(latent_model *, latent_model_free)
DEFINE_CLEANUP(latent_session *, latent_session_free)
DEFINE_CLEANUP(latent_job *, latent_job_free)
DEFINE_CLEANUP(latent_value *, latent_value_free)

int verb_status(Ctl *c, const Verb *verb, int argc, char *argv[]);
int verb_devices(Ctl *c, const Verb *verb, int argc, char *argv[]);
int verb_models(Ctl *c, const Verb *verb, int argc, char *argv[]);
int verb_load(Ctl *c, const Verb *verb, int argc, char *argv[]);
int verb_unload(Ctl *c, const Verb *verb, int argc, char *argv[]);
int verb_release(Ctl *c, const Verb *verb, int argc, char *argv[]);
int verb_cache(Ctl *c, const Verb *verb, int argc, char *argv[]);
int verb_jobs(Ctl *c, const Verb *verb, int argc, char *argv[]);
int verb_cancel(Ctl *c, const Verb *verb, int argc, char *argv[]);
int verb_step(Ctl *c, const Verb *verb, int argc, char *argv[]);
int verb_sample(Ctl *c, const Verb *verb, int argc, char *argv[]);
int verb_tokenize(Ctl *c, const Verb *verb, int argc, char *argv[]);
int verb_encode(Ctl *c, const Verb *verb, int argc, char *argv[]);
int verb_decode(Ctl *c, const Verb *verb, int argc, char *argv[]);
int verb_encode_media(Ctl *c, const Verb *verb, int argc, char *argv[]);
int verb_render(Ctl *c, const Verb *verb, int argc, char *argv[]);
int verb_parity(Ctl *c, const Verb *verb, int argc, char *argv[]);
int verb_doctor(Ctl *c, const Verb *verb, int argc, char *argv[]);
