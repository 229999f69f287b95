/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* How far a job is: a line on a terminal's stderr that is redrawn, or with --json (and no terminal) an
 * object per line on stdout. With both a terminal on stderr and a pipe on stdout, both. */

#include "client/latentctl/ctl.h"

/* The label of a job whose phases stand in its place. */
#define PROGRESS_PHASES "rendering"

typedef struct Progress {
        const char *label; /* "loading", "sampling" */
        bool bar, json, drawn;
        bool restart; /* it was said that the service went away */
} Progress;

void progress_init(Progress *p, const Ctl *c, const char *label);

/* A latent_progress_fn; userdata is the Progress. */
void progress_show(const latent_progress *news, void *userdata);

/* Says that the service went away and is waited for. */
void progress_restart(bool was_there);

/* Clears the line. */
void progress_done(Progress *p);

/* The line without control characters, at most columns - 1 wide (a terminal wraps the last column). */
void progress_format(const Progress *p, const latent_progress *news, size_t columns, char *buf, size_t size);
