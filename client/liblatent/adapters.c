/* SPDX-License-Identifier: Apache-2.0 */
#include "client/liblatent/adapters.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "client/liblatent/job.h"
#include "client/liblatent/model.h"
#include "client/liblatent/request.h"
#include "service/shared/wire.h"

_Static_assert(sizeof(latent_lora) == 16, "public layout changed");

DEFINE_CLEANUP(latent_model *, latent_model_free)

AdapterSet *adapters_ref(AdapterSet *a) {
        if (a)
                a->n_ref++;
        return a;
}

AdapterSet *adapters_unref(AdapterSet *a) {
        if (!a || --a->n_ref > 0)
                return NULL;

        for (uint32_t i = 0; i < a->n; i++) {
                (void) source_unref(a->adapters[i].source);
                latent_model_free(a->adapters[i].model);
                latent_job_free(a->adapters[i].load);
        }
        free(a->compute);
        free(a);
        return NULL;
}

static bool is_of_run(const latent_model *m, const char *owner) {
        return !owner || !m->object.owner || strcmp(m->object.owner, owner) == 0;
}

static int error_restarted(latent_error *e, size_t i) {
        return error_set(e, -ECONNRESET, LATENT_ERROR_RESTARTED,
                "Adapter %zu was loaded by a run of the service that is gone. Load it again.", i);
}

static int check(const latent_lora *l, size_t i, const latent_client *c, const char *owner, latent_error *e) {
        if (!l->model || l->model->client != c)
                return error_set(e, -EINVAL, LATENT_ERROR_INVALID_ARGUMENT,
                        "Adapter %zu has %s; expected a model of the session's client.", i,
                        l->model ? "a model of another client" : "no model");
        if (!(fabs(l->strength) <= WIRE_LORA_STRENGTH_MAX)) /* NaN too */
                return error_set(e, -EINVAL, LATENT_ERROR_INVALID_ARGUMENT,
                        "The strength of adapter %zu is %g; expected a number from -%g to %g.", i, l->strength,
                        WIRE_LORA_STRENGTH_MAX, WIRE_LORA_STRENGTH_MAX);
        return is_of_run(l->model, owner) ? 0 : error_restarted(e, i);
}

int adapters_new(const latent_lora *loras, size_t n, const char *compute, const latent_client *c, const char *owner,
        AdapterSet **ret, latent_error *e) {
        CLEANUP(adapters_unrefp) AdapterSet *a = NULL;
        int r;

        if (n > ADAPTERS_MAX || (n > 0 && !loras))
                return error_set(e, -EINVAL, LATENT_ERROR_INVALID_ARGUMENT,
                        "%zu adapters%s; expected an array of at most %u.", n, loras ? "" : " at no place",
                        ADAPTERS_MAX);

        a = calloc(1, sizeof(*a));
        if (!a)
                return error_errno(e, -ENOMEM, "Setting adapters");
        a->n_ref = 1;
        if (copy_string(compute, &a->compute) < 0)
                return error_errno(e, -ENOMEM, "Setting adapters");

        for (size_t i = 0; i < n; i++) {
                Adapter *x = &a->adapters[i];
                latent_model *m = loras[i].model;

                r = check(&loras[i], i, c, owner, e);
                if (r < 0)
                        return r;
                a->n++;
                x->strength = loras[i].strength;
                x->source = source_ref(m->source);
                r = model_new(m->client, m->object.owner, m->object.path, m->source, &x->model, e);
                if (r < 0)
                        return r;
                /* Without it the session's jobs cannot be taken up; SetLoras() says what is wrong. */
                if (x->source && !m->client->no_resume && model_ask_identity(m, NULL) >= 0)
                        memcpy(x->identity, m->identity, sizeof(x->identity));
        }

        *ret = STEAL_PTR(a);
        return 0;
}

bool adapters_same(const AdapterSet *a, const AdapterSet *b) {
        return a == b || ((!a || a->n == 0) && (!b || b->n == 0));
}

bool adapters_known(const AdapterSet *a) {
        for (uint32_t i = 0; a && i < a->n; i++)
                if (!a->adapters[i].source || a->adapters[i].identity[0] == '\0')
                        return false;

        return true;
}

static int load_one(AdapterSet *a, uint32_t i, latent_client *c, const char *owner, latent_error *e) {
        Adapter *x = &a->adapters[i];
        CLEANUP(latent_model_freep) latent_model *model = NULL;
        int r;

        if (x->model && x->model->object.owner && is_of_run(x->model, owner))
                return 0;
        if (!x->load) {
                r = source_load(c, x->source, &x->load, e);
                return r < 0 ? r : 1;
        }

        r = job_look(x->load, e);
        if (r == 1)
                return 1;
        if (r >= 0)
                r = latent_job_model(x->load, &model, e);
        latent_job_free(STEAL_PTR(x->load));
        if (r < 0)
                return r;

        if (!is_of_run(model, owner))
                return error_restarted(e, i);
        r = model_check_identity(model, x->identity, "adapter", e);
        if (r < 0)
                return r;

        latent_model_free(x->model);
        x->model = STEAL_PTR(model);
        return 0;
}

int adapters_load(AdapterSet *a, latent_client *c, const char *owner, latent_error *e) {
        int r, pending = 0;

        for (uint32_t i = 0; a && i < a->n; i++) {
                r = load_one(a, i, c, owner, e);
                if (r < 0)
                        return r;
                pending |= r;
        }

        return pending;
}

int adapters_check(const AdapterSet *a, const char *owner, latent_error *e) {
        for (uint32_t i = 0; a && i < a->n; i++)
                if (!is_of_run(a->adapters[i].model, owner))
                        return error_restarted(e, i);

        return 0;
}

int adapters_append(sd_bus_message *m, const AdapterSet *a) {
        int r;

        r = sd_bus_message_open_container(m, 'a', "(od)");
        for (uint32_t i = 0; r >= 0 && a && i < a->n; i++)
                r = sd_bus_message_append(m, "(od)", a->adapters[i].model->object.path, a->adapters[i].strength);
        if (r >= 0)
                r = sd_bus_message_close_container(m);
        if (r >= 0)
                r = sd_bus_message_open_container(m, 'a', "{sv}");
        if (r >= 0)
                r = append_string(m, "compute", a ? a->compute : NULL);
        if (r >= 0)
                r = sd_bus_message_close_container(m);

        return r;
}
