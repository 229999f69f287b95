/* SPDX-License-Identifier: Apache-2.0 */
#include "service/worker/registrar.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "service/shared/cleanup.h"

struct Registrar {
        const Backend *backend;
        uint32_t device;
        DeviceWeights *weights;
        uint32_t *parts; /* owned */
        uint32_t n_parts;
        atomic_bool stop;
        pthread_t thread;
        bool runs;
};

DEFINE_CLEANUP(Registrar *, registrar_free)

static void *work(void *userdata) {
        Registrar *r = userdata;

        if (r->backend->bind && r->backend->bind(r->device) < 0)
                return NULL;
        for (uint32_t i = 0; i < r->n_parts && !r->stop; i++)
                device_weights_register(r->weights, r->parts[i]);
        return NULL;
}

static int add_pass(Registrar *r, const ModelWeights *w, H3Pass pass) {
        CLEANUP_FREE uint32_t *order = NULL;
        uint32_t n, *all;
        int error;

        error = model_weights_order(w, pass, &order, &n);
        if (error < 0)
                return error;
        all = realloc(r->parts, (r->n_parts + n) * sizeof(*all));
        if (!all)
                return -ENOMEM;
        r->parts = all;
        for (uint32_t i = 0; i < n; i++)
                all[r->n_parts++] = order[i];
        return 0;
}

int registrar_new(const Backend *b, uint32_t device, ModelWeights *w, Registrar **ret) {
        CLEANUP(registrar_freep) Registrar *r = NULL;
        int error;

        r = calloc(1, sizeof(*r));
        if (!r)
                return -ENOMEM;
        r->backend = b;
        r->device = device;
        r->weights = model_weights_device(w);
        error = add_pass(r, w, H3_PASS_TEXT);
        if (error >= 0)
                error = add_pass(r, w, H3_PASS_STEP);
        if (error >= 0)
                error = -pthread_create(&r->thread, NULL, work, r);
        if (error < 0)
                return error;
        r->runs = true;
        *ret = STEAL_PTR(r);
        return 0;
}

Registrar *registrar_free(Registrar *r) {
        if (!r)
                return NULL;
        r->stop = true;
        if (r->runs)
                (void) pthread_join(r->thread, NULL);
        free(r->parts);
        free(r);
        return NULL;
}
