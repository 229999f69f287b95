/* SPDX-License-Identifier: Apache-2.0 */
/* The answer to Session.Plan("render"). */
#include "service/latentd/render-internal.h"

#include <stdio.h>

#include "service/latentd/bus-error.h"
#include "service/latentd/gpu-set.h"
#include "service/latentd/model.h"
#include "service/latentd/plan.h"
#include "service/latentd/worker-link.h"
#include "service/shared/cleanup.h"

/* Which parts are in memory after a phase, and which have left before it. */
typedef struct Residence {
        Model *models[_RENDER_PHASE_MAX]; /* in order of phases */
        bool in[_RENDER_PHASE_MAX];
        uint64_t free; /* bytes that are nobody's then */
} Residence;

static Model *first_to_leave(Residence *x, const Model *stays, size_t *ret) {
        Model *first = NULL;

        for (size_t i = 0; i < _RENDER_PHASE_MAX; i++) {
                Model *m = x->models[i];

                if (!x->in[i] || m == stays || !m->defer || m->keep)
                        continue;
                if (!first || model_ease(m->info.kind) > model_ease(first->info.kind)) {
                        first = m;
                        *ret = i;
                }
        }

        return first;
}

static int append_leaving(sd_bus_message *m, Residence *x, const Model *needed) {
        uint64_t need = render_weights_bytes(needed);
        int error;

        error = bus_open_list(m, "leave", "s");
        for (size_t i = 0; error >= 0 && i < _RENDER_PHASE_MAX; i++)
                if (x->models[i] == needed && x->in[i])
                        need = 0;
        while (error >= 0 && need > x->free) {
                size_t i = 0;
                Model *leaves = first_to_leave(x, needed, &i);

                if (!leaves)
                        break;
                x->in[i] = false;
                x->free += render_weights_bytes(leaves);
                error = sd_bus_message_append(m, "s", leaves->name);
        }
        x->free -= need < x->free ? need : x->free;
        return error < 0 ? error : bus_close_list(m);
}

/* Bytes of its weights on each NUMA node; nothing while it is not loaded. */
static int append_nodes(sd_bus_message *m, const Model *model) {
        uint64_t bytes[REGION_NODES_MAX] = {};
        size_t n = 0;

        for (size_t i = 0; i < model->n_parts; i++)
                for (size_t k = 0; model->parts[i].region && k < ELEMENTSOF(bytes); k++)
                        bytes[k] += model->parts[i].region->node_bytes[k];
        for (size_t k = 0; k < ELEMENTSOF(bytes); k++)
                n = bytes[k] > 0 ? k + 1 : n;

        return bus_append_numbers(m, "node-bytes", bytes, n);
}

/* How its steps are cut, as Session.Plan says it of a step. */
static int append_split(sd_bus_message *m, const struct RenderPlanned *y) {
        int error;

        error = sd_bus_message_append(m, "{sv}{sv}{sv}", "plan", "s", plan_kind_to_string((WirePlanKind) y->plan.kind), "exchange", "s",
                plan_exchange_to_string((WireExchange) y->plan.exchange), "chunks", "u", y->plan.chunks);
        if (error >= 0 && y->step_usec > 0)
                error = sd_bus_message_append(m, "{sv}", "step-usec", "t", y->step_usec);
        return error;
}

/* That run it, or may. */
static uint64_t ranks_of(const Render *r, RenderPhase p) {
        return r->planned[p].known ? r->planned[p].ranks
                                   : worker_link_ranks_for(r->job->manager->worker, render_phase_kind(p), &r->client->split);
}

static size_t gpus_of(const Render *r, uint64_t ranks, const char *ret[static WIRE_DEVICES_MAX]) {
        const WireHello *h = worker_link_hello(r->job->manager->worker);

        return h ? gpu_set_addresses(h, ranks, ret) : 0;
}

/* One that is loaded is in the worker that runs it; of one that is not only the files are known. */
static int append_phase(sd_bus_message *m, const Render *r, RenderPhase p, Residence *x) {
        const struct RenderPlanned *y = &r->planned[p];
        const Model *model = render_model(r, p);
        const uint64_t ranks = ranks_of(r, p);
        const char *gpus[WIRE_DEVICES_MAX];
        size_t n_gpus = gpus_of(r, ranks, gpus);
        bool loaded = model->state == MODEL_READY, measured = r->measured[p] && (loaded || r->loads[p] > 0);
        char numa[24];
        int error;

        (void) numa_policy_format(&model->numa, numa);
        error = sd_bus_message_open_container(m, 'a', "{sv}");
        if (error >= 0)
                error = sd_bus_message_append(m, "{sv}{sv}{sv}{sv}{sv}{sv}", "phase", "s", render_phase_name(p), "model", "s", model->name,
                        "loaded", "b", (int) loaded, "weight-bytes", "t", render_weights_bytes(model), "ranks", "u",
                        (uint32_t) __builtin_popcountll(ranks), "numa", "s", numa);
        if (error >= 0 && n_gpus > 0)
                error = bus_append_strings(m, "gpus", gpus, n_gpus);
        if (error >= 0 && y->known)
                error = sd_bus_message_append(m, "{sv}", "step-bytes", "t", y->memory);
        if (error >= 0 && y->known && p == RENDER_SAMPLE && y->plan.ranks > 0)
                error = append_split(m, y);
        if (error >= 0 && measured)
                error = sd_bus_message_append(m, "{sv}", "usec", "t", (uint64_t) (r->weights[p] + (loaded ? 0 : r->loads[p])));
        if (error >= 0)
                error = append_nodes(m, model);
        if (error >= 0)
                error = append_leaving(m, x, model);
        return error < 0 ? error : sd_bus_message_close_container(m);
}

static void find_residence(const Render *r, Residence *ret) {
        uint64_t work = r->work ? 0 : r->sizes.work_bytes;
        MemoryHeadroom h = {};

        *ret = (Residence){};
        if (manager_headroom(r->job->manager, &h) >= 0)
                ret->free = h.bytes > work ? h.bytes - work : 0;
        for (RenderPhase p = 0; p < _RENDER_PHASE_MAX; p++) {
                if (!render_has_phase(r, p))
                        continue;
                ret->models[p] = render_model(r, p);
                ret->in[p] = ret->models[p]->state == MODEL_READY;
        }
}

/* Most of what is in memory for it at a time. */
static uint64_t peak_of(const Render *r) {
        uint64_t peak = 0, stay = 0;

        for (RenderPhase p = 0; p < _RENDER_PHASE_MAX; p++)
                if (!render_model(r, p)->defer)
                        stay += render_weights_bytes(render_model(r, p));
        for (RenderPhase p = 0; p < _RENDER_PHASE_MAX; p++) {
                uint64_t own = render_model(r, p)->defer ? render_weights_bytes(render_model(r, p)) : 0;

                if (own + r->planned[p].memory > peak)
                        peak = own + r->planned[p].memory;
        }

        return stay + peak + r->sizes.work_bytes + r->sizes.output_bytes;
}

static int append_phases(sd_bus_message *m, const Render *r) {
        Residence x;
        int error;

        find_residence(r, &x);
        error = bus_open_list(m, "phases", "a{sv}");
        for (RenderPhase p = 0; p < _RENDER_PHASE_MAX && error >= 0; p++) {
                if (!render_has_phase(r, p))
                        continue;
                error = append_phase(m, r, p, &x);
                for (size_t i = 0; i < _RENDER_PHASE_MAX; i++)
                        x.in[i] = x.in[i] || x.models[i] == x.models[p];
        }
        return error < 0 ? error : bus_close_list(m);
}

/* There only if each phase was measured: a sum with guesses in it would be one. */
static int append_usec(sd_bus_message *m, const Render *r) {
        double usec = r->tail;

        for (RenderPhase p = 0; p < _RENDER_PHASE_MAX; p++) {
                if (!r->measured[p])
                        return 0;
                usec += r->weights[p] + r->loads[p];
        }

        return sd_bus_message_append(m, "{sv}", "usec", "t", (uint64_t) usec);
}

int render_plan_reply(const Render *r, sd_bus_message *message) {
        CLEANUP(sd_bus_message_unrefp) sd_bus_message *m = NULL;
        const struct RenderPlanned *sample = &r->planned[RENDER_SAMPLE];
        uint32_t steps = r->o.sample.schedule == WIRE_SCHEDULE_GIVEN ? (uint32_t) r->o.sample.sigmas_video.shape[0] - 1 : r->o.sample.steps;
        int error;

        error = sd_bus_message_new_method_return(message, &m);
        if (error >= 0)
                error = sd_bus_message_open_container(m, 'a', "{sv}");
        if (error >= 0)
                error = sd_bus_message_append(m, "{sv}{sv}{sv}{sv}{sv}{sv}{sv}{sv}{sv}{sv}", "rows", "t", r->sizes.rows,
                        "tokens", "t", r->sizes.tokens, "steps", "u", sample->known ? sample->steps : steps, "ranks", "u",
                        (uint32_t) __builtin_popcountll(ranks_of(r, RENDER_SAMPLE)),
                        "frames", "u", r->o.frames, "width", "u", r->o.width, "height", "u", r->o.height,
                        "output-bytes", "t", r->sizes.output_bytes, "work-bytes", "t", r->sizes.work_bytes,
                        "memory-bytes", "t", peak_of(r));
        if (error >= 0)
                error = append_usec(m, r);
        if (error >= 0)
                error = append_phases(m, r);
        if (error >= 0)
                error = sd_bus_message_close_container(m);
        if (error < 0)
                return sd_bus_reply_method_errno(message, error, NULL);

        return sd_bus_send(NULL, m, NULL);
}
