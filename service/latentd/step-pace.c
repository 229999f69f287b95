/* SPDX-License-Identifier: Apache-2.0 */
#include "service/latentd/step-pace.h"

#include "service/latentd/job.h"
#include "service/latentd/model.h"
#include "service/latentd/plan.h"

/* Of PaceKey: behind those of render-cost.c. */
#define PHASE 1000u
/* A unit of work is a byte of weights that a row goes through. Attention: two products of rows x rows x hidden. */
#define ATTENTION 4.0

static PaceKey key_of(const Job *j, uint32_t sparse) {
        const uint32_t compute = j->request.compute == WIRE_COMPUTE_AUTO ? WIRE_COMPUTE_BF16 : j->request.compute;

        return (PaceKey){
                .files = model_identity(j->model),
                .phase = PHASE + j->plan.kind * 16 + j->plan.exchange,
                .compute = compute,
                .ranks = plan_ranks_used(&j->plan),
                .sparse = sparse,
        };
}

/* Of the rank that has most: the others wait for it. */
static double units_of(const Job *j) {
        const WireModelReady *m = &j->model->info;
        double rows = (double) j->ready.rows, most = 0;

        for (uint32_t i = 0; i < j->plan.ranks; i++) {
                double own = (double) (j->plan.rows[i].end - j->plan.rows[i].begin);

                most = own > most ? own : most;
        }
        return most * ((double) m->weight_bytes + rows * ATTENTION * m->hidden * m->layers);
}

void step_pace_note(const Job *j, bool sparse, uint64_t usec) {
        const PaceKey key = key_of(j, sparse ? j->request.sparse.method : SPARSE_NONE);

        if (key.files != 0 && j->plan.ranks > 0 && units_of(j) > 0)
                pace_add(&j->manager->paces, &key, (double) usec / units_of(j), 0);
}

uint64_t step_pace_usec(const Job *j) {
        const PaceKey key = key_of(j, j->request.sparse.method);
        const PaceEntry *e = key.files != 0 && j->plan.ranks > 0 ? pace_find(&j->manager->paces, &key) : NULL;

        return e ? (uint64_t) (e->usec * units_of(j)) : 0;
}
