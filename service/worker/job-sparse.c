/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>

#include "service/worker/job-private.h"

int job_check_sparse(const WireJobOpen *w, const H3Model *m, Fault *f) {
        bool vsa = w->sparse.method == SPARSE_VSA;

        if (!sparse_check(&w->sparse, m->config.layers) || (w->kind == WIRE_JOB_MERGE && w->sparse.method != SPARSE_NONE))
                return fault_set(f, -EINVAL, FAULT_INVALID_ARGUMENT,
                        "The numbers of the job's sparse attention are none that a model of %u blocks can have.", m->config.layers);
        if (w->sparse.method == SPARSE_NONE || vsa == m->gated)
                return 0;
        return sparse_refuse_model(vsa, f);
}

int job_make_sparse(Job *j, const WireJobOpen *w) {
        if (w->sparse.method == SPARSE_NONE || j->layout->rows < w->sparse.min_tokens)
                return 0;
        return h3_sparse_new(&j->model->h3->config, j->layout, &w->sparse, &j->sparse);
}

const H3Sparse *job_sparse(const Job *j, uint32_t step) {
        H3StepInput in;

        if (!j->sparse)
                return NULL;
        job_step_input(j, step, &in);
        return h3_sparse_applies(&j->sparse->options, j->layout->rows, in.sigma_video) ? j->sparse : NULL;
}
