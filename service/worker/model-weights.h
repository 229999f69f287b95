/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* A model's weights on one rank's device: which parts there are and in which order they are used, for
 * device-weights.h. On the rank's thread. */

#include "service/h3/weights.h"
#include "service/worker/device-weights.h"

typedef struct ModelWeights ModelWeights;

/* m: of the kind. config.first_event is set here. The model, and the memory behind it, must outlive it. No device
 * memory is taken yet. -ENOMEM, -EOPNOTSUPP. */
int model_weights_new(const H3WeightsKind *kind, const void *m, const DeviceWeightsConfig *config, ModelWeights **ret);
ModelWeights *model_weights_free(ModelWeights *w);

/* What service/h3 is given, once memory is planned (device_weights_plan()). */
H3Weights *model_weights_interface(ModelWeights *w);
DeviceWeights *model_weights_device(ModelWeights *w);

/* Before a pass: what it takes is fetched ahead. -ENOMEM or a device error. */
int model_weights_begin(ModelWeights *w, H3Pass pass);
