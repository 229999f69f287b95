/* SPDX-License-Identifier: Apache-2.0 */
#include "service/latentd/step-pace.h"

#include "service/latentd/gpu-cost.h"
#include "service/latentd/job.h"
#include "service/latentd/model.h"
#include "service/latentd/plan.h"
#include "service/latentd/worker-link.h"
#include "service/shared/cleanup.h"

/* Of PaceKey: behind those of render-cost.c. Those of one rank, and of any (0 ranks), are of computing alone. */
#define PHASE 1000u

typedef struct Cut {
        const WireHello *hello;
        GpuWork work;
        const WirePlan *plan;
        double operations;
} Cut;

static uint32_t compute_of(const Job *j) {
        return j->request.compute == WIRE_COMPUTE_AUTO ? WIRE_COMPUTE_BF16 : j->request.compute;
}

static PaceKey key_of(const Job *j, uint32_t sparse, uint32_t ranks) {
        return (PaceKey){
                .files = model_identity(j->model),
                .phase = PHASE + (ranks > 1 ? j->plan.kind * 16 + j->plan.exchange : 0),
                .compute = compute_of(j),
                .ranks = ranks,
                .sparse = sparse,
        };
}

static bool cut_of(const Job *j, Cut *ret) {
        const WireHello *h = worker_link_hello(j->manager->worker);
        GpuWork x = gpu_work_of(&j->model->info, j->ready.rows);

        if (compute_of(j) == WIRE_COMPUTE_F32 && x.int8) { /* expanded */
                x.int8 = false;
                x.weight_bytes *= 2;
        }
        if (!h || h->n_devices == 0 || j->plan.ranks == 0 || model_identity(j->model) == 0)
                return false;
        *ret = (Cut){ .hello = h, .work = x, .plan = &j->plan, .operations = gpu_operations(h, &x, &j->plan) };
        return ret->operations > 0;
}

/* Computing and receiving go on at the same time, but for a chunk: the first one has to arrive, or the last one to be computed. < 0: how
 * fast it arrives is not known. */
static double together(const Cut *c, double compute_usec) {
        double receive = gpu_receive_sec(c->hello, &c->work, c->plan) * 1e6, chunks = c->plan->chunks > 0 ? c->plan->chunks : 1;

        if (receive < 0)
                return -1;
        return compute_usec > receive ? compute_usec + receive / chunks : receive + compute_usec / chunks;
}

/* The other way round; <= 0: it tells more of the ways than of the devices. */
static double compute_alone(const Cut *c, double usec) {
        double receive = gpu_receive_sec(c->hello, &c->work, c->plan) * 1e6, chunks = c->plan->chunks > 0 ? c->plan->chunks : 1;
        double compute = usec - receive / chunks;

        return receive >= 0 && compute > receive ? compute : 0;
}

static void add(const Job *j, const PaceKey *key, bool rough, double pace) {
        if (rough)
                pace_add_rough(&j->manager->paces, key, pace);
        else
                pace_add(&j->manager->paces, key, pace, 0);
}

void step_pace_note(const Job *j, bool sparse, bool rough, uint64_t usec) {
        const uint32_t method = sparse ? j->request.sparse.method : SPARSE_NONE, ranks = plan_ranks_used(&j->plan);
        const PaceKey own = key_of(j, method, ranks), any = key_of(j, method, 0);
        Cut c;

        if (!cut_of(j, &c))
                return;
        add(j, &own, rough, (double) usec / c.operations);
        if (ranks > 1)
                add(j, &any, rough, compute_alone(&c, (double) usec) / c.operations);
}

/* <= 0: not known. */
static double usec_by_rates(const Job *j, const Cut *c) {
        double rate = gpu_rate(c->hello, c->plan);

        if (rate <= 0 || compute_of(j) != WIRE_COMPUTE_BF16 || j->request.sparse.method != SPARSE_NONE)
                return 0;
        return together(c, c->operations / rate * 1e6);
}

uint64_t step_pace_usec(const Job *j) {
        const uint32_t method = j->request.sparse.method, ranks = plan_ranks_used(&j->plan);
        const PaceKey keys[] = { key_of(j, method, ranks), key_of(j, method, 1), key_of(j, method, 0) };
        double rough = 0, rates;
        Cut c;

        if (!cut_of(j, &c))
                return 0;
        for (size_t i = 0; i < ELEMENTSOF(keys); i++) {
                const PaceEntry *e = pace_find(&j->manager->paces, &keys[i]);
                double usec = e ? e->usec * c.operations : 0;

                if (i > 0 && ranks > 1 && e)
                        usec = together(&c, usec);
                if (usec > 0 && !e->rough)
                        return (uint64_t) usec;
                rough = rough > 0 ? rough : usec;
        }

        /* A first step takes longer than those behind it, and none is faster than products alone: in between. */
        rates = usec_by_rates(j, &c);
        if (rough > 0)
                return (uint64_t) (rates > 0 && rates < rough ? (rates + rough) / 2 : rough);
        return rates > 0 ? (uint64_t) rates : 0;
}
