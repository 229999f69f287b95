/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Previews of a render, as pictures beside the film. */

#include "client/latentctl/ctl.h"

typedef struct Preview {
        uint64_t steps;           /* after every so many; 0: none */
        bool has_steps;
        const char *map_path;     /* NULL: of the model */
        double map[75];           /* [25][3] */
        char *stem;               /* of the pictures' names: the film's path without its ending */
        latent_job *job;          /* the caller's */
        uint32_t all;             /* steps of the film */
        uint32_t last;            /* step of the last one that was heard of */
        uint32_t n_written;
        bool seen[STEPS_MAX + 1]; /* by step */
        bool failed;              /* it was said that one could not be written */
} Preview;

/* Reads the map, if previews are asked for: 75 numbers, 25 rows of red, green and blue. output: of the film;
 * NULL: it is only planned. */
int preview_open(Preview *p, const char *model, const char *output, latent_error *e);
void preview_done(Preview *p);

/* A latent_progress_fn; userdata is the Preview. A picture that cannot be written is said once and costs
 * nothing else. */
void preview_on_news(const latent_progress *news, void *userdata);

/* The film is made: says how many were skipped because the next one came first. */
void preview_finish(Preview *p);

/* Of a render that was interrupted: what of it is there. Nothing, if nothing is. */
void preview_say_left(const Preview *p, latent_error *e);
