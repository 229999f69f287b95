/* SPDX-License-Identifier: Apache-2.0 */
#include "service/worker/model-weights.h"

#include <errno.h>
#include <stdlib.h>

#include "service/shared/cleanup.h"

struct ModelWeights {
        H3Weights interface; /* first: what service/h3 has is this */
        const H3Model *host;
        H3Model *device; /* its slots are the holder's to set */
        DeviceWeights *holder;
};

DEFINE_CLEANUP(ModelWeights *, model_weights_free)

/* Parts by number: those of every step in its order, which may stay; then those of a prompt or a schedule. */
static uint32_t number_of(const H3Model *m, H3Part part) {
        uint32_t layers = m->config.layers;

        switch (part.kind) {
        case H3_PART_ENDS:
                return 0;
        case H3_PART_FEED:
                return 1 + 2 * part.layer;
        case H3_PART_FINISH:
                return 2 + 2 * part.layer;
        case H3_PART_TIME:
                return 1 + 2 * layers;
        case H3_PART_TEXT:
                return 2 + 2 * layers;
        default:
                return 3 + 2 * layers + part.layer; /* ADALN */
        }
}

static uint32_t n_parts(const H3Model *m) {
        return 4 + 3 * m->config.layers;
}

static H3Part part_of(const H3Model *m, uint32_t number) {
        uint32_t layers = m->config.layers;

        if (number == 0)
                return (H3Part){H3_PART_ENDS, 0};
        if (number <= 2 * layers)
                return (H3Part){number % 2 ? H3_PART_FEED : H3_PART_FINISH, (number - 1) / 2};
        if (number <= 2 * layers + 2)
                return (H3Part){number == 2 * layers + 1 ? H3_PART_TIME : H3_PART_TEXT, 0};
        return (H3Part){H3_PART_ADALN, number - (2 * layers + 3)};
}

static int take(H3Weights *interface, H3Part part, const H3Model **ret) {
        ModelWeights *w = (ModelWeights *) interface;
        int r;

        r = device_weights_take(w->holder, number_of(w->host, part));
        if (r >= 0)
                *ret = w->device;
        return r;
}

static void give(H3Weights *interface, H3Part part) {
        ModelWeights *w = (ModelWeights *) interface;

        device_weights_give(w->holder, number_of(w->host, part));
}

static int add_slot(void *userdata, LkMatrix *matrix, LkVector *vector) {
        const ModelWeights *w = userdata;

        return device_weights_add_slot(w->holder, matrix, vector);
}

int model_weights_new(const H3Model *m, const DeviceWeightsConfig *config, ModelWeights **ret) {
        CLEANUP(model_weights_freep) ModelWeights *w = NULL;
        DeviceWeightsConfig all = *config;
        int r;

        w = calloc(1, sizeof(*w));
        if (!w)
                return -ENOMEM;
        w->interface = (H3Weights){take, give};
        w->host = m;
        w->device = h3_model_copy(m);
        if (!w->device)
                return -ENOMEM;
        all.first_event = H3_EVENTS;
        r = device_weights_new(&all, &w->holder);
        for (uint32_t i = 0; r >= 0 && i < n_parts(m); i++) {
                r = device_weights_add_part(w->holder, i > 2 * m->config.layers);
                if (r >= 0)
                        r = h3_model_visit(w->device, part_of(m, i), add_slot, w);
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
        (void) h3_model_free(w->device);
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
        uint32_t n = h3_pass_parts(w->host, pass, NULL);
        CLEANUP_FREE H3Part *parts = NULL;
        CLEANUP_FREE uint32_t *order = NULL;

        parts = calloc(n, sizeof(*parts));
        order = calloc(n, sizeof(*order));
        if (!parts || !order)
                return -ENOMEM;
        (void) h3_pass_parts(w->host, pass, parts);
        for (uint32_t i = 0; i < n; i++)
                order[i] = number_of(w->host, parts[i]);
        return device_weights_begin(w->holder, order, n);
}
