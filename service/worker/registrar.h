/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* A thread that registers a model's weights with the device in the order in which a first step uses them, beside that step: what the
 * step comes to earlier it registers itself. Without it a new worker's first kernels wait for what is only for later ones. */

#include "service/worker/backend.h"
#include "service/worker/model-weights.h"

typedef struct Registrar Registrar;

/* Of a denoiser's weights, which outlive it. device: the place of their rank's in Backend.devices(). -ENOMEM, -EAGAIN: no thread; nothing
 * but time is lost. */
int registrar_new(const Backend *b, uint32_t device, ModelWeights *w, Registrar **ret);

/* At the end of the part that it is at. Accepts NULL, returns NULL. */
Registrar *registrar_free(Registrar *r);
