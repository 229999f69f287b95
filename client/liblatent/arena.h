/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Places in an arena: arithmetic only. */

#include <stdint.h>

#include "client/latent.h"

typedef struct Arena {
        uint64_t size, used;
} Arena;

/* Takes size bytes (0 is fine) at the next multiple of LATENT_ALIGNMENT. -ENOSPC: nothing is taken. */
int arena_take(Arena *a, uint64_t size, uint64_t *ret_offset);

/* The bytes of a tensor, from its type and shape. -EINVAL: unknown type, too many dimensions; -EOVERFLOW. */
int tensor_size(const latent_tensor *t, uint64_t *ret_size);

/* The bytes of a slot of the output range: video, audio, and what the sampler holds besides (dbus/org.latentd.Latent1.Session.xml).
 * sampler: NULL: the default. One that this library does not know: as much as any takes. -EINVAL, -EOVERFLOW. */
int slot_bytes(const latent_tensor *video, const latent_tensor *audio, const char *sampler, uint64_t *ret);
