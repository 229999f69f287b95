/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The tiny model, arenas and inputs inside the test's own process, so that sanitizers see what is allocated
 * and freed. */

#include "service/worker/arena-map.h"
#include "service/worker/job-context.h"
#include "service/worker/model-table.h"

#define FIXTURE_ARENA (UINT64_C(1) << 17)

#define FIXTURE_MODELS 4 /* ids 1 to this */

typedef struct Fixture {
        ModelTable models;
        ArenaPair *arenas;  /* session 2 */
        uint8_t *input;     /* writable map of the input arena, as a client has it */
        WireJobOpen sample; /* traj_euler_4 on model 1, f32, whole output arena */
} Fixture;

Fixture *fixture_new(void);
Fixture *fixture_free(Fixture *x);
void fixture_freep(Fixture **x);

/* A file of tests/data as another model. */
void fixture_add_model(Fixture *x, uint64_t id, const char *file);
ModelEntry *fixture_model(const Fixture *x);
/* job_new() on the model and the arenas. */
int fixture_open(Fixture *x, const WireJobOpen *open, Job **ret, Fault *f);
/* A job of x->sample; fails the test where it is refused. */
Job *fixture_job(Fixture *x, uint64_t id);
