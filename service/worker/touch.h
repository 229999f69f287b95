/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Pages of a model's files that are registered with a device soon, touched before by a crew: registering one that this process has not
 * touched takes three times as long, is one thread's work, and holds up the driver. Pages are read, so that a mapping that may not be
 * written stays so. */

#include <stdbool.h>
#include <stdint.h>

#include "service/h3/weights.h"

/* Parts of less are not worth it. */
#define TOUCH_FROM (UINT64_C(1) << 20)

typedef struct Touch Touch;

/* Begins with the parts that the model's first pass takes, then those of its first step, in that order, up to so many bytes. The memory
 * stays until touch_free(). NULL: no memory, then nothing is touched. */
Touch *touch_begin(const H3WeightsKind *kind, const void *model, uint64_t bytes);

/* Waits until these bytes are touched. False: they are not among what is touched. Any thread. NULL: false. */
bool touch_await(Touch *t, const void *host, uint64_t size);

/* Ends it wherever it is. Accepts NULL, returns NULL. */
Touch *touch_free(Touch *t);

/* The same for a piece of memory at once, by a crew that ends with it. */
void touch_now(const void *host, uint64_t size);
