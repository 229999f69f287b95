/* SPDX-License-Identifier: Apache-2.0 */
#include "service/worker/model-weights.h"

#include <errno.h>
#include <stdlib.h>

#include "service/shared/cleanup.h"
#include "service/worker/timeline.h"

struct ModelWeights {
        H3Weights interface; /* first: what service/h3 has is this */
        const H3WeightsKind *kind;
        const void *host;
        void *device;  /* its slots are the holder's to set */
        H3Part *parts; /* [n_parts]: by the holder's numbers */
        uint32_t n_parts;
        DeviceWeights *holder;
};

DEFINE_CLEANUP(ModelWeights *, model_weights_free)

/* One that there is none of has a number that the holder refuses. */
static uint32_t number_of(const ModelWeights *w, H3Part part) {
        uint32_t i = 0;

        while (i < w->n_parts && (w->parts[i].kind != part.kind || w->parts[i].layer != part.layer))
                i++;
        return i;
}

static int take(H3Weights *interface, H3Part part, const void **ret) {
        ModelWeights *w = (ModelWeights *) interface;
        int r;

        r = device_weights_take(w->holder, number_of(w, part));
        timeline_note("weights");
        if (r >= 0)
                *ret = w->device;
        return r;
}

static void give(H3Weights *interface, H3Part part) {
        ModelWeights *w = (ModelWeights *) interface;

        device_weights_give(w->holder, number_of(w, part));
}

static int add_slot(void *userdata, LkMatrix *matrix, LkVector *vector) {
        const ModelWeights *w = userdata;

        return device_weights_add_slot(w->holder, matrix, vector);
}

int model_weights_new(const H3WeightsKind *kind, const void *m, const DeviceWeightsConfig *config, ModelWeights **ret) {
        CLEANUP(model_weights_freep) ModelWeights *w = NULL;
        DeviceWeightsConfig all = *config;
        uint32_t staying;
        int r;

        w = calloc(1, sizeof(*w));
        if (!w)
                return -ENOMEM;
        w->interface = (H3Weights){take, give};
        w->kind = kind;
        w->host = m;
        w->n_parts = kind->parts(m, NULL, &staying);
        w->parts = calloc(w->n_parts, sizeof(*w->parts));
        w->device = kind->copy(m);
        if (!w->parts || !w->device)
                return -ENOMEM;
        (void) kind->parts(m, w->parts, &staying);
        all.first_event = H3_EVENTS;
        all.one_at_a_time = kind->one_at_a_time;
        r = device_weights_new(&all, &w->holder);
        for (uint32_t i = 0; r >= 0 && i < w->n_parts; i++) {
                r = device_weights_add_part(w->holder, i >= staying, kind->bf16_parts >> w->parts[i].kind & 1);
                if (r >= 0)
                        r = kind->visit(w->device, w->parts[i], add_slot, w);
        }
        if (r < 0)
                return r;
        *ret = STEAL_PTR(w);
        return 0;
}

ModelWeights *model_weights_free(ModelWeights *w) {
        if (!w)
                return NULL;
        (void) device_weights_free(w->holder);
        if (w->device)
                w->kind->free(w->device);
        free(w->parts);
        free(w);
        return NULL;
}

H3Weights *model_weights_interface(ModelWeights *w) {
        return &w->interface;
}

DeviceWeights *model_weights_device(ModelWeights *w) {
        return w->holder;
}

int model_weights_begin(ModelWeights *w, H3Pass pass) {
        uint32_t n = w->kind->pass(w->host, pass, NULL);
        CLEANUP_FREE H3Part *parts = NULL;
        CLEANUP_FREE uint32_t *order = NULL;

        parts = calloc(n, sizeof(*parts));
        order = calloc(n, sizeof(*order));
        if (!parts || !order)
                return -ENOMEM;
        (void) w->kind->pass(w->host, pass, parts);
        for (uint32_t i = 0; i < n; i++)
                order[i] = number_of(w, parts[i]);
        return device_weights_begin(w->holder, order, n);
}
